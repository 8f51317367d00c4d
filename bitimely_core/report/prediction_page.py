"""Pages of predictions on new recordings: one a recording, and one of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from bitimely_core.evaluate.endpoints import is_staging
from bitimely_core.page import (
    BarPlot,
    DensityPlot,
    Hypnogram,
    Line,
    LinePlot,
    Page,
    PageBuilder,
    StageTrack,
)
from bitimely_core.report.text import format_number
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.schemas.scores import EndpointValue
from bitimely_core.schemas.tokens import Calibration

if TYPE_CHECKING:
    from bitimely_core.tokens import Windows


class PredictionLike(Protocol):
    """As `workflows.predict.RecordingPrediction`."""

    @property
    def windows(self) -> Windows:
        """N windows."""

    @property
    def prediction(self) -> npt.NDArray[Any]:
        """[n, K] probabilities or [n] values."""

    @property
    def confidence(self) -> npt.NDArray[Any] | None:
        """[n]."""

    @property
    def sets(self) -> npt.NDArray[Any] | None:
        """[n, K]."""

    @property
    def reach(self) -> float | None:
        """Half the width of an interval."""

    @property
    def endpoints(self) -> dict[str, EndpointValue]:
        """Of sleep stages."""


DENSITY = (
    "The probability of each class in each epoch, stacked: an epoch in which one colour fills the column is certain, several colours are "
    "stages between which the model hesitates. White: no prediction."
)
HYPNOGRAM = "The most probable class of each epoch. Nobody has scored this recording: how well the model scores others is in the page of the run."


def describe_endpoints(endpoints: Mapping[str, EndpointValue]) -> str:
    """One sentence: time in bed, sleep, efficiency, onset."""
    value = {name: one.value for name, one in endpoints.items()}
    bed, sleep, onset = (
        value["time_in_bed"],
        value["total_sleep_time"],
        value["sleep_onset_latency"],
    )
    text = f"{format_minutes(sleep)} of sleep in {format_minutes(bed)} (efficiency {format_number(value['sleep_efficiency'], 0)} %)"
    return f"{text}, asleep after {format_minutes(onset)}" if onset is not None else text


def describe_calibration(calibration: Calibration | None) -> str:
    """What the confidence is, in one phrase."""
    if calibration is None:
        return "probability of the class as the model gives it; not calibrated: the validation windows of the run are not here"
    whose = f"{calibration.units} {calibration.unit}s ({calibration.data})"
    sets = (
        f"; no sets: {calibration.undefined_reason}"
        if calibration.threshold is None
        else f"; sets and intervals cover {calibration.level:.0%}"
    )
    if calibration.temperature is None:
        return f"fitted on {whose}{sets}"
    return f"probability of the class with temperature {calibration.temperature:.3g}, fitted on {whose}{sets}"


def format_minutes(minutes: float | None) -> str:
    """Minutes as people say them: `7 h 25 min`, `12.5 min`."""
    if minutes is None:
        return "–"
    hours, rest = divmod(round(minutes), 60)
    return f"{hours} h {rest:02d} min" if hours else f"{minutes:g} min"


def recording_page(
    name: str,
    record: RunRecord,
    calibration: Calibration | None,
    made: PredictionLike,
    notices: Sequence[str],
) -> Page:
    """The page of one recording: its hypnogram and hypnodensity with the endpoints, or the classes,
    labels or values over time.
    """
    windows, prediction = made.windows, made.prediction
    options, classes = windows.options, list(windows.class_names)
    starts = windows.index["start"].to_numpy()
    hours = (starts[-1] + options.length) / 3600
    page = PageBuilder(f"Prediction for {name}")
    page.notice(*notices)
    page.add_facts(
        {
            "Run": f"{record.run} ({record.model}), trained on {', '.join(one.name for one in record.data)}",
            "Windows": f"{len(starts):,} of {options.length:g} s at {options.rate:g} Hz",
            "Channels": ", ".join(windows.channel_names),
            "Confidence": describe_calibration(calibration),
        }
    )
    if windows.task == "classification":
        verdict = _add_classes(page, made, starts, calibration)
    elif windows.task == "multilabel":
        series = [Line(label, starts / 3600, prediction[:, k]) for k, label in enumerate(classes)]
        page.figure(
            "trend",
            "Labels over time",
            "The probability of each label in each window.",
            LinePlot(series, "hours", "probability"),
        )
        bars = BarPlot(classes, prediction.mean(0), ylabel="mean probability")
        page.figure("labels", "Labels", "Mean probability over the windows.", bars)
        verdict = f"{classes[int(prediction.mean(0).argmax())]} is the most probable label of {len(starts):,} windows."
    else:
        band = (
            (None, None)
            if made.reach is None
            else (prediction - made.reach, prediction + made.reach)
        )
        line = Line("predicted", starts / 3600, prediction, *band)
        caption = (
            "The predicted value of each window, in the unit of the labels of the training"
            + (", with its interval." if band[0] is not None else ".")
        )
        page.figure("trend", "Trend", caption, LinePlot([line], "hours", "value"))
        verdict = f"Median {np.median(prediction):.4g}, from {prediction.min():.4g} to {prediction.max():.4g}, over {hours:.2g} h."
    if made.endpoints:
        page.table(*endpoint_table(made.endpoints))
    return page.finish(
        verdict, {"recording": name, "windows": len(starts), "endpoints": dict(made.endpoints)}
    )


def _add_classes(
    page: PageBuilder,
    made: PredictionLike,
    starts: npt.NDArray[Any],
    calibration: Calibration | None,
) -> str:
    """Hypnogram, hypnodensity, shares and sets of a classification; the verdict."""
    options, classes, endpoints = (
        made.windows.options,
        list(made.windows.class_names),
        made.endpoints,
    )
    epoch = options.epoch or options.stride / options.rate
    grid = np.full((round((starts[-1] - starts[0]) / epoch) + 1, len(classes)), np.nan)
    grid[np.rint((starts - starts[0]) / epoch).astype(int)] = made.prediction
    stages = np.where(np.isfinite(grid[:, 0]), np.nan_to_num(grid).argmax(1), -1)
    night = Hypnogram(epoch, [StageTrack("predicted", stages)], classes)
    page.figure("hypnogram", "Hypnogram" if endpoints else "Classes over time", HYPNOGRAM, night)
    page.figure(
        "hypnodensity",
        "Hypnodensity" if endpoints else "Probabilities over time",
        DENSITY,
        DensityPlot(epoch, grid, classes),
    )
    named = made.prediction.argmax(1)
    share = [float((named == k).mean()) for k in range(len(classes))]
    rows = [
        [c, int((named == k).sum()), share[k], _mean_where(made.confidence, named == k)]
        for k, c in enumerate(classes)
    ]
    caption = "Windows by their most probable class, and how sure the model is of them."
    if made.sets is not None and calibration is not None:
        sizes = np.bincount(made.sets.sum(1), minlength=2) / len(starts)
        parts = ", ".join(f"{k} in {part:.0%}" for k, part in enumerate(sizes) if part)
        caption += f" Sets with {calibration.level:.0%} coverage hold so many classes: {parts} of the windows."
    page.table(
        "classes", "Classes", caption, ["class", "windows", "share", "mean confidence"], rows
    )
    text = (
        describe_endpoints(endpoints)
        if endpoints
        else f"{classes[int(np.argmax(share))]} in {max(share):.0%} of {len(starts):,} windows"
    )
    return text + (
        f"; mean confidence {float(np.mean(made.confidence)):.2f}."
        if made.confidence is not None
        else "."
    )


def _mean_where(values: npt.NDArray[Any] | None, keep: npt.NDArray[Any]) -> float | None:
    return None if values is None or not keep.any() else float(values[keep].mean())


def endpoint_table(
    endpoints: Mapping[str, EndpointValue],
) -> tuple[str, str, str, list[str], list[list[Any]]]:
    """Name, title, caption, columns and rows of the table of endpoints."""
    caption = (
        "By the definitions of the AASM manual, with lights off at the first and lights on at the last epoch. Latencies count from lights off, "
        "that of REM also from sleep onset; wake after sleep onset ends with the last epoch of sleep."
    )
    rows = [
        [name.replace("_", " "), one.value, one.unit, one.undefined_reason or ""]
        for name, one in endpoints.items()
    ]
    return (
        "endpoints",
        "Sleep endpoints",
        caption,
        ["endpoint", "value", "unit", "undefined because"],
        rows,
    )


SHOWN = (
    "total_sleep_time",
    "sleep_efficiency",
    "sleep_onset_latency",
    "wake_after_sleep_onset",
    "latency_REM",
)


def collection_page(
    record: RunRecord, calibration: Calibration | None, rows: Sequence[Mapping[str, Any]]
) -> Page:
    """The page of all recordings of a call. `rows` are as in the result of `predict`."""
    done = [row for row in rows if row["status"] == "predicted"]
    page = PageBuilder(f"Predictions of {record.run}")
    page.fact(
        "Run",
        f"{record.run} ({record.model}), trained on {', '.join(one.name for one in record.data)}",
    )
    page.fact("Confidence", describe_calibration(calibration))
    page.fact("Recordings", f"{len(done)} of {len(rows)} predicted")
    shown = SHOWN if is_staging(record.data[0].class_names) else ()
    columns = [
        "recording",
        "windows",
        "hours",
        "mean confidence",
        *(name.replace("_", " ") for name in shown),
    ]
    cells = [
        [
            *(row[key] for key in ("recording", "windows", "hours", "confidence")),
            *(row["endpoints"].get(name, {}).get("value") for name in shown),
        ]
        for row in done
    ]
    caption = (
        "One row a recording; its page, hypnogram and table are in the folder of that name."
        + (" Times in minutes." if shown else "")
    )
    page.table("recordings", "Recordings", caption, columns, cells)
    refused = [
        [row["recording"], "; ".join(row["messages"])] for row in rows if row["status"] == "refused"
    ]
    if refused:
        page.table(
            "refused",
            "Not predicted",
            "Files that were refused, and why.",
            ["recording", "reason"],
            refused,
        )
    windows = sum(row["windows"] for row in done)
    failed = f"; {len(refused)} could not be read" if refused else ""
    # no paths: they can name people
    stored = [
        {key: value for key, value in row.items() if key not in {"file", "report"}} for row in rows
    ]
    verdict = f"{len(done)} recordings with {windows:,} windows predicted by {record.run}{failed}."
    return page.finish(verdict, {"run": record.run, "recordings": stored})
