"""Pages of predictions on new recordings: one a recording, and one of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from bitimely_core.page import (
    BarPlot,
    DensityPlot,
    Hypnogram,
    Line,
    LinePlot,
    Link,
    NightPlot,
    Page,
    PageBuilder,
    Spectrogram,
    StageTrack,
    Timeline,
    TimelinePlot,
    make_tables,
)
from bitimely_core.report.page_text import format_number
from bitimely_core.report.plain_figures import TimeUnit, choose_unit
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.schemas.scores import EndpointValue
from bitimely_core.schemas.tokens import Calibration
from bitimely_core.types import count_nouns, leave_out

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
    def placement(self) -> str:
        """Where the windows lie, in words."""

    @property
    def endpoints(self) -> dict[str, EndpointValue]:
        """Of sleep stages."""

    @property
    def spectrogram(self) -> Spectrogram | None:
        """Of the n epochs of a night."""

    @property
    def clock(self) -> float | None:
        """Seconds from midnight to the first epoch."""


DENSITY = (
    "The probability of each class in each window, stacked: where one colour fills the column the "
    "model is certain, several colours are classes between which it hesitates. White: no "
    "prediction."
)
HYPNOGRAM = (
    "The most probable class of each window. Nobody has scored this recording: how well the model "
    "scores others is in the page of the run."
)
NIGHT = (
    "From top to bottom: power of the first channel, dark to bright; the most probable stage of "
    "each epoch; the probability of each stage in the colours of the line above. Nobody has scored "
    "this recording: how well the model scores others is in the page of the run."
)
ENDPOINTS = (
    "By the definitions of the AASM manual, with lights off at the first and lights on at the last "
    "epoch. Latencies count from lights off, that of REM also from sleep onset; wake after sleep "
    "onset ends with the last epoch of sleep."
)
SHOWN_ENDPOINTS = (
    "total_sleep_time",
    "sleep_efficiency",
    "sleep_onset_latency",
    "wake_after_sleep_onset",
    "rem_latency_from_onset",
)


# ---- sentences


def describe_run(record: RunRecord) -> str:
    """The run that predicts, with what it was trained on."""
    trained_on = ", ".join(data.name for data in record.data)
    return f"{record.run} ({record.model}), trained on {trained_on}"


def describe_endpoints(endpoints: Mapping[str, EndpointValue]) -> str:
    """One sentence: time in bed, sleep, efficiency, onset."""
    bed, sleep, onset, efficiency = (
        endpoints[name].value
        for name in ("time_in_bed", "total_sleep_time", "sleep_onset_latency", "sleep_efficiency")
    )
    share = f"efficiency {format_number(efficiency, 0)} %"
    text = f"{format_minutes(sleep)} of sleep in {format_minutes(bed)} ({share})"
    return text if onset is None else f"{text}, asleep after {format_minutes(onset)}"


def describe_calibration(calibration: Calibration | None) -> str:
    """What the confidence is, in one phrase."""
    if calibration is None:
        return (
            "probability of the class as the model gives it; not calibrated: the validation "
            "windows of the run are not here"
        )
    if calibration.temperature is None and calibration.threshold is None:
        return f"as the model gives it; not calibrated: {calibration.undefined_reason}"
    fitted = f"fitted on {calibration.units} {calibration.unit}s ({calibration.data})"
    if calibration.temperature is not None:
        temperature = f"temperature {calibration.temperature:.3g}"
        fitted = f"probability of the class with {temperature}, {fitted}"
    else:
        fitted = f"as the model gives it, without a temperature; {fitted}"
    if calibration.threshold is None:
        return f"{fitted}; no sets: {calibration.undefined_reason}"
    return f"{fitted}; sets and intervals cover {calibration.level:.0%}"


def format_minutes(minutes: float | None) -> str:
    """Minutes as people say them: `7 h 25 min`, `12.5 min`."""
    if minutes is None:
        return "–"
    hours, rest = divmod(round(minutes), 60)
    return f"{hours} h {rest:02d} min" if hours else f"{minutes:g} min"


# ---- one recording


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
    windows, count = made.windows, len(made.windows.index)
    page = PageBuilder(f"Prediction for {name}")
    page.notice(*notices)
    page.fact("Run", describe_run(record))
    options = windows.options
    page.fact(
        "Windows", f"{count:,} of {options.length:g} s at {options.rate:g} Hz, {made.placement}"
    )
    page.fact("Channels", ", ".join(windows.channel_names))
    page.fact("Confidence", describe_calibration(calibration))
    if windows.task == "classification":
        verdict = _add_classes(page, made, calibration)
    elif windows.task == "multilabel":
        verdict = _add_labels(page, made)
    else:
        verdict = _add_values(page, made)
    rows = [
        [name.replace("_", " "), endpoint.value, endpoint.unit, endpoint.undefined_reason or ""]
        for name, endpoint in made.endpoints.items()
    ]
    columns = ["endpoint", "value", "unit", "undefined because"]
    page.add(*make_tables("endpoints", "Sleep endpoints", ENDPOINTS, columns, rows))
    summary = {"recording": name, "windows": count, "endpoints": dict(made.endpoints)}
    return page.finish(verdict, summary)


def _read_starts(made: PredictionLike) -> npt.NDArray[Any]:
    """Seconds from the start of the recording to each window, [n]."""
    return made.windows.index["start"].to_numpy()


def _scale_starts(made: PredictionLike) -> tuple[npt.NDArray[Any], TimeUnit]:
    """Starts of the windows, in the unit that fits the length of the recording."""
    starts = _read_starts(made)
    unit = choose_unit(starts[-1] + made.windows.options.length)
    return starts / unit.seconds, unit


def _add_labels(page: PageBuilder, made: PredictionLike) -> str:
    """The probability of each label over time, and its mean; the verdict."""
    labels, (times, unit) = list(made.windows.class_names), _scale_starts(made)
    lines = [Line(label, times, made.prediction[:, k]) for k, label in enumerate(labels)]
    caption = "The probability of each label in each window."
    page.figure("trend", "Labels over time", caption, LinePlot(lines, unit.name, "probability"))
    means = made.prediction.mean(0)
    bars = BarPlot(labels, means, ylabel="mean probability")
    page.figure("labels", "Labels", "Mean probability over the windows.", bars)
    return f"{labels[int(means.argmax())]} is the most probable label of {len(times):,} windows."


def _add_values(page: PageBuilder, made: PredictionLike) -> str:
    """The predicted value over time, with its interval where there is one; the verdict."""
    values, (times, unit) = made.prediction, _scale_starts(made)
    line = Line("predicted", times, values)
    caption = "The predicted value of each window, in the unit of the labels of the training"
    if made.reach is not None:
        line = replace(line, lo=values - made.reach, hi=values + made.reach)
        caption += ", with its interval"
    page.figure("trend", "Trend", f"{caption}.", LinePlot([line], unit.name, "value"))
    reached = times[-1] + made.windows.options.length / unit.seconds
    spread = f"from {values.min():.4g} to {values.max():.4g}"
    return f"Median {np.median(values):.4g}, {spread}, over {reached:.3g} {unit.name}."


def _add_classes(page: PageBuilder, made: PredictionLike, calibration: Calibration | None) -> str:
    """Hypnogram, hypnodensity, shares and sets of a classification; the verdict."""
    options, classes = made.windows.options, list(made.windows.class_names)
    starts = _read_starts(made)
    best, count = made.prediction.argmax(1), len(starts)
    counts = np.bincount(best, minlength=len(classes)).tolist()
    confidence = np.asarray(made.confidence)
    epoch = options.epoch or options.stride / options.rate
    places = np.rint((starts - starts[0]) / epoch).astype(int)
    grid = np.full((round((starts[-1] - starts[0]) / epoch) + 1, len(classes)), np.nan)
    grid[places] = made.prediction
    stages = np.where(np.isfinite(grid[:, 0]), np.nan_to_num(grid).argmax(1), -1)
    track, density = StageTrack("predicted", stages), DensityPlot(epoch, grid, classes)
    if made.endpoints:
        spectrogram = _fill_gaps(made.spectrogram, places, len(grid))
        night = NightPlot(track, density, spectrogram, made.clock)
        page.figure("night", "The night", NIGHT, night)
    elif options.points:
        lane = Timeline("predicted", starts + options.length / 2, best)
        plot = TimelinePlot([lane], classes, "seconds")
        page.figure("hypnogram", "Classes over time", HYPNOGRAM, plot)
    else:
        page.figure("hypnogram", "Classes over time", HYPNOGRAM, Hypnogram(epoch, [track], classes))
        page.figure("hypnodensity", "Probabilities over time", DENSITY, density)
    rows = [
        [name, counts[k], counts[k] / count, confidence[best == k].mean() if counts[k] else None]
        for k, name in enumerate(classes)
    ]
    caption = "Windows by their most probable class, and how sure the model is of them."
    if made.sets is not None and calibration is not None:
        shares = np.bincount(made.sets.sum(1), minlength=2) / count
        parts = ", ".join(f"{size} in {share:.0%}" for size, share in enumerate(shares) if share)
        sets = f"Sets with {calibration.level:.0%} coverage hold so many classes"
        caption += f" {sets}: {parts} of the windows."
    columns = ["class", "windows", "share", "mean confidence"]
    page.table("classes", "Classes", caption, columns, rows)
    most = max(counts)
    text = f"{classes[counts.index(most)]} in {most / count:.0%} of {count:,} windows"
    if made.endpoints:
        text = describe_endpoints(made.endpoints)
    return f"{text}; mean confidence {confidence.mean():.2f}."


def _fill_gaps(
    spectrogram: Spectrogram | None, places: npt.NDArray[Any], count: int
) -> Spectrogram | None:
    """Power of `count` epochs, from that of those at `places`; NaN elsewhere."""
    if spectrogram is None:
        return None
    power = np.full((count, spectrogram.power.shape[1]), np.nan)
    power[places] = spectrogram.power
    return replace(spectrogram, power=power)


# ---- all recordings of a call


def collection_page(
    record: RunRecord,
    calibration: Calibration | None,
    rows: Sequence[Mapping[str, Any]],
    notices: Sequence[str] = (),
) -> Page:
    """The page of all recordings of a call. `rows` are as in the result of `predict`."""
    page = PageBuilder(f"Predictions of {record.run}")
    page.notice(*notices)
    predicted = [row for row in rows if row["status"] == "predicted"]
    page.notice(*_describe_trained(predicted))
    refused = [row for row in rows if row["status"] == "refused"]
    page.fact("Run", describe_run(record))
    page.fact("Confidence", describe_calibration(calibration))
    page.fact("Recordings", f"{len(predicted)} of {len(rows)} predicted")
    _add_predicted(page, record, predicted)
    reasons = [[row["recording"], "; ".join(row["messages"])] for row in refused]
    caption, columns = "Files that were refused, and why.", ["recording", "reason"]
    page.add(*make_tables("refused", "Not predicted", caption, columns, reasons))
    count = sum(row["windows"] for row in predicted)
    verdict = f"{len(predicted)} recordings with {count:,} windows predicted by {record.run}"
    if refused:
        verdict += f"; {len(refused)} refused"
    # no paths: they can name people
    stored = [leave_out(row, {"file", "report"}) for row in rows]
    return page.finish(f"{verdict}.", {"run": record.run, "recordings": stored})


def _describe_trained(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """How many of the recordings the run was trained on; nothing where there is none."""
    count = [row["trained_on"] for row in rows].count(True)
    recordings = count_nouns(len(rows), "recording")
    text = f"The run was trained on {count:,} of {recordings}: their predictions look better"
    return [f"{text} than those of new recordings."] if count else []


def _add_predicted(page: PageBuilder, record: RunRecord, rows: Sequence[Mapping[str, Any]]) -> None:
    """A line for each recording, of sleep stages with the main endpoints."""
    names = SHOWN_ENDPOINTS if any(row["endpoints"] for row in rows) else ()
    caption = "One row a recording, which leads to its page; its table is beside that. "
    if names:
        caption += "Times in minutes, efficiency in per cent."
    else:
        caption += (
            "Prediction: the class of the largest mean probability, with it, or the median value."
        )
    keys = ["windows", "hours", *([] if names else ["prediction"]), "confidence"]
    lines = []
    for row in rows:
        endpoints = [row["endpoints"].get(name, {}).get("value") for name in names]
        name = row["recording"]
        link = Link(name, quote(f"{name}/report.html"))
        lines.append([link, *(row[key] for key in keys), *endpoints])
    columns = ["recording", *keys[:-1], "mean confidence"]
    columns += [name.replace("rem", "REM").replace("_", " ") for name in names]
    page.table("recordings", "Recordings", caption, columns, lines)
