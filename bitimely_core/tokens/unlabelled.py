"""Cuts new recordings into windows in memory, as the training did.

Legend: n windows, T samples a window, V channels.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from bitimely_core.errors import Finding, Reason, UserError, input_error, input_warning, safe_text
from bitimely_core.formats.units import (
    find_unit,
    find_unit_factor,
    is_far_off,
    list_plausible_units,
    measure_spread,
)
from bitimely_core.schemas.tokens import (
    Preprocessing,
    WindowManifest,
    WindowOptions,
    WindowStatistics,
)
from bitimely_core.tokens.cutting import (
    RecordCut,
    cut_record,
    describe_preparation,
    find_observed,
    make_windows,
)
from bitimely_core.tokens.new_recordings import UNLABELLED, list_points
from bitimely_core.tokens.resampling import choose_resampling, to_physical
from bitimely_core.tokens.windows import Windows, assemble_windows
from bitimely_core.types import Annotation, Record, Signal

HOW_RESAMPLED = {
    "interpolated": "by interpolation, which adds no faster activity",
    "held": "by repeating samples, which adds no faster activity",
    "placed": "with missing values between its samples",
    "resampled": "with an anti-alias filter",
    "causal": "with a one-sided anti-alias filter",
    "averaged": "by means",
}


@dataclass(frozen=True, kw_only=True)
class UnlabelledWindows:
    """The windows of a recording in memory, and what was converted or left out."""

    windows: Windows
    record: Record  # in the units of the run
    placement: str  # where the windows lie, in words
    findings: list[Finding] = field(default_factory=list)


def prediction_options(options: WindowOptions) -> WindowOptions:
    """The options of the training without its labels.

    They give every window of a recording, at any rate that can be resampled.
    """
    changed = {
        "resample": True,
        "trim": None,
        "target": None,
        "overlap": None,
        "labels": {UNLABELLED: UNLABELLED},
    }
    return options.model_copy(update=changed)


def label_texts(preprocessing: Preprocessing) -> dict[str, str]:
    """Text of an annotation -> class: as the view reads them, and the classes themselves."""
    return {
        **(preprocessing.options.labels or {}),
        **{name: name for name in preprocessing.class_names},
    }


def cut_unlabelled(
    record: Record, name: str, preprocessing: Preprocessing, *, labels: bool = False
) -> UnlabelledWindows:
    """The windows of `record` as the run of `preprocessing` reads them.

    Views of epochs have a window for each full epoch from the start of a segment, those of points
    one around each annotation of `record` without a duration (or, where it has none, one after the
    other), others one every stride; with `labels` those that the view labels, as at the training.

    Windows without a sample are left out, but for irregular ones. Raises UserError: unit,
    sampling_rate, length (no full window), missing_values (no sample), timestamps (of irregular
    samples), all exit 4; those of `cut_record`.
    """
    options = prediction_options(preprocessing.options)
    if labels:
        options = preprocessing.options.model_copy(update={"resample": True, "labels": None})
    signals, units = match_units(record.signals, preprocessing)
    times = _report_rates if options.clock is None else _check_times
    findings = [*record.findings, *units, *times(signals, options)]
    record = replace(record, signals=signals)
    placement = "with a label"
    if not labels:
        notes, placement = _place_unlabelled(record, signals, options)
        record = replace(record, annotations=notes)
    left_out: Counter[str] = Counter()
    cut = cut_record(record, options, preprocessing.units, left_out)
    if cut is None or not cut.places:
        if labels and cut is not None:
            raise _no_label_error(preprocessing.class_names)
        raise _too_short_error(signals, options, placement, is_joint=cut is not None)
    if options.irregular:
        del cut.places[1:]  # rows behind the first window
    findings += _report_left_out(left_out)
    cut, empty = _drop_empty(cut, options)
    windows = _make_windows(cut, name, preprocessing, options, labels=labels)
    return UnlabelledWindows(
        windows=windows,
        record=replace(
            record, signals=[_convert(s, preprocessing.unit_of) for s in record.signals]
        ),
        placement=placement,
        findings=[*findings, *empty],
    )


def _no_label_error(names: Sequence[str]) -> UserError:
    problem, wanted = "no window of it has a label", f"expected one of {', '.join(names)}"
    return input_error(Reason.UNMATCHED_LABELS, problem, wanted)


def _too_short_error(
    signals: Sequence[Signal], options: WindowOptions, placement: str, *, is_joint: bool
) -> UserError:
    """The error for a recording without a full window; `is_joint`: it has a stretch of all
    channels.
    """
    longest = max((len(signal.samples) / signal.rate for signal in signals), default=0.0)
    return input_error(
        Reason.LENGTH,
        f"{longest:.6g} s of signal" if is_joint else "no stretch of it has all channels",
        f"expected at least one window of {options.length:g} s, {placement}",
        f"Give a longer recording{', or times inside of it' if options.points else ''}",
    )


def _convert(signal: Signal, units: Mapping[str, str]) -> Signal:
    """The signal in the unit of the run."""
    unit = units.get(signal.channel, signal.unit)
    factor = find_unit_factor(signal.unit, unit) or 1.0
    return signal._replace(scale=signal.scale * factor, offset=signal.offset * factor, unit=unit)


def _place_unlabelled(
    record: Record, signals: Sequence[Signal], options: WindowOptions
) -> tuple[list[Annotation], str]:
    """What windows without a label are cut from, and where they lie, in words."""
    if options.epoch is None:
        return [], f"one every {options.stride / options.rate:g} s"
    if not options.points:
        return _cover_segments(signals), "one for each full epoch"
    points = list_points(record)
    if points:
        return points, f"one around each of {len(points)} times"
    step = options.length
    marks = [
        Annotation(stretch.onset + (number + 0.5) * step, 0.0, UNLABELLED)
        for stretch in _cover_segments(signals)
        for number in range(int(stretch.duration / step + 1e-6))
    ]
    return marks, f"one every {step:g} s, for no time is known"


def _report_left_out(left_out: Counter[str]) -> Iterator[Finding]:
    for key, text in (
        ("annotation_out_of_range", "epochs or times without a full window at the edges"),
        ("too_short", "segments are too short"),
    ):
        count = left_out[key]
        if count:
            yield input_warning(
                Reason.LENGTH, f"{count} {text}", "they have no prediction", count=count
            )


def _drop_empty(cut: RecordCut, options: WindowOptions) -> tuple[RecordCut, list[Finding]]:
    """The windows with a sample, of which there is something to predict; a warning about others.

    Raises UserError: missing_values (exit 4), where all are empty.
    """
    observed = find_observed(cut, options)
    if not observed.any():
        raise input_error(
            Reason.MISSING_VALUES,
            f"none of {len(observed)} windows has a sample",
            "expected a measured signal",
        )
    empty = int((~observed).sum())
    if not empty:
        return cut, []
    finding = input_warning(
        Reason.MISSING_VALUES,
        f"{empty} windows have no sample",
        "they have no prediction",
        count=empty,
    )
    return cut._replace(places=list(itertools.compress(cut.places, observed))), [finding]


def _make_windows(
    cut: RecordCut, name: str, preprocessing: Preprocessing, options: WindowOptions, *, labels: bool
) -> Windows:
    """The set of the windows of one recording, in memory alone."""
    import polars as pl

    shards = tuple(make_windows(cut, options))
    missing = preprocessing.missing or not all(np.isfinite(shard).all() for shard in shards)
    n = len(cut.places)
    values = [place.label if labels else None for place in cut.places]
    index = pl.DataFrame(
        {
            "window": pl.Series(range(n), dtype=pl.Int64),
            "subject_id": pl.Series([name] * n, dtype=pl.String),
            "recording_id": pl.Series([name] * n, dtype=pl.String),
            "start": pl.Series([place.start for place in cut.places], dtype=pl.Float64),
            "label": pl.Series(values, dtype=None if labels else pl.String),
            "split": pl.Series(["test"] * n, dtype=pl.String),
        }
    )
    rates = {(signal.channel, signal.rate) for signal in itertools.chain(*cut.segments)}
    manifest = WindowManifest(
        cache="",
        options=options,
        class_names=list(preprocessing.class_names),
        units=list(preprocessing.units),
        windows=n,
        missing=missing,
        shards=[],
        counts={},
        left_out={},
        preparation=describe_preparation(rates, options),
        notices=[],
        findings=[],
    )
    statistics = WindowStatistics(windows=0, channels=list(preprocessing.channels))
    recordings = pl.Series([name])
    affine = cut.scale[None], cut.offset[None]
    return assemble_windows(Path(name), manifest, statistics, index, shards, recordings, affine)


def match_units(
    signals: Sequence[Signal], preprocessing: Preprocessing
) -> tuple[list[Signal], list[Finding]]:
    """The signals in units that `cut_record` converts, and what is to be said of them.

    Raises UserError (unit, exit 4).
    """
    units = preprocessing.unit_of
    matched: list[Signal] = []
    findings: dict[str, Finding] = {}
    for signal in signals:
        # the times of samples that are brought to a grid have no unit of the run
        if signal.channel in units:
            unit = units[signal.channel]
            if not signal.unit.strip():
                unit = _assume_unit(signal, unit)
            text, requirement = _compare_units(signal, unit)
            if requirement:
                findings[text] = input_warning(Reason.UNIT, text, requirement, field="unit")
            if find_unit_factor(signal.unit, unit) is None:
                signal = signal._replace(unit=unit)
        matched.append(signal)
    return matched, list(findings.values())


def _assume_unit(signal: Signal, unit: str) -> str:
    """The unit of a signal that states none: that of the run, unless its values are implausible in
    it and plausible in another one.
    """
    trained, spread = find_unit(unit), measure_spread(signal)
    if trained is None or not is_far_off(signal.channel, trained, spread):
        return unit
    return next(iter(list_plausible_units(signal.channel, spread)), unit)


def _compare_units(signal: Signal, unit: str) -> tuple[str, str]:
    """What to say of a signal's unit beside that of the run, and what is done; "" for the same.

    Raises UserError (unit, exit 4) for units of different quantities.
    """
    name, stated = safe_text(signal.channel), signal.unit.strip()
    text = f"{name} is in {safe_text(signal.unit)}"
    if stated.casefold() == unit.strip().casefold():
        return text, ""
    if find_unit_factor(signal.unit, unit) is not None:
        return text, f"converted to {safe_text(unit)}"
    if not unit:
        return text, "the run was trained without a unit: nothing was converted"
    if not stated:
        return f"{name} states no unit", f"taken for {safe_text(unit)}"
    raise input_error(
        Reason.UNIT,
        text,
        f"the run reads {safe_text(unit)}",
        "Convert it, or map another channel",
        field="unit",
        found=safe_text(signal.unit),
    )


def _report_rates(signals: Sequence[Signal], options: WindowOptions) -> Iterator[Finding]:
    for channel, rate in sorted({(signal.channel, signal.rate) for signal in signals}):
        method = choose_resampling(channel, rate, options)
        if method in HOW_RESAMPLED:
            yield input_warning(
                Reason.SAMPLING_RATE,
                f"{safe_text(channel)} has {rate:g} Hz",
                f"resampled to the {options.rate:g} Hz of the run {HOW_RESAMPLED[method]}",
                field="rate",
            )


def _check_times(signals: Sequence[Signal], options: WindowOptions) -> Iterator[Finding]:
    """A warning about rows of irregular samples that are not read.

    Raises UserError (timestamps, exit 4) for times that are not seconds from the start in order.
    """
    clock = next(signal for signal in signals if signal.channel == options.clock)
    times = to_physical(clock)
    if not np.isfinite(times).all() or (times < 0).any() or (np.diff(times) < 0).any():
        raise input_error(
            Reason.TIMESTAMPS,
            f"{safe_text(clock.channel)} is not a time in each row",
            "expected seconds since the start, of 0 or more, in order, in every row",
            field=safe_text(clock.channel),
        )
    beyond = int((times > options.length).sum()) if options.grid else len(times) - options.window
    if beyond > 0:
        limit = f"{options.length:g} s" if options.grid else f"{options.window} rows"
        yield input_warning(
            Reason.LENGTH,
            f"{beyond} rows behind the first {limit}",
            "they are not read, as at the training",
            count=beyond,
        )


def _cover_segments(signals: Sequence[Signal]) -> list[Annotation]:
    """One unlabelled stretch for each segment: as long as its shortest channel."""
    length: dict[float, float] = {}
    for signal in signals:
        seconds = len(signal.samples) / signal.rate
        length[signal.onset] = min(length.get(signal.onset, seconds), seconds)
    return [Annotation(onset, seconds, UNLABELLED) for onset, seconds in sorted(length.items())]
