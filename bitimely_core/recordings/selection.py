"""Makes the record of a recording: the channels, units and labels that its map asks for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import numpy as np

from bitimely_core.errors import Finding, Reason, input_error, input_warning, safe_text
from bitimely_core.formats import stage_texts
from bitimely_core.formats.source import locate_errors
from bitimely_core.formats.text import list_first, list_names
from bitimely_core.formats.units import VOLTS, scale_signal
from bitimely_core.recordings.mapping import RecordingInfo
from bitimely_core.types import Annotation, Record, Signal


def make_record(
    rel: str,
    info: RecordingInfo,
    signals: Sequence[Signal],
    notes: Sequence[Annotation] = (),
    findings: Iterable[Finding] = (),
    start: datetime | None = None,
    phi: Mapping[str, str] | None = None,
) -> Record:
    """The recording in file `rel` with the channels, units and labels of the map.

    Raises UserError: no_input without signals, missing_channel, unit, sampling_rate.
    """
    with locate_errors(rel):
        selected = _select_channels(signals, info)
    end = max(signal.onset + len(signal.samples) / signal.rate for signal in selected)
    remarks: list[Finding] = []
    annotations = _clip(_select_annotations(notes, info, remarks), end, remarks)
    return Record(
        recording_id=info.recording_id,
        subject_id=info.subject_id,
        signals=selected,
        annotations=annotations,
        attributes={**info.attributes, **(phi or {})},
        start_time=start.isoformat() if start and info.keep_dates else None,
        findings=[finding.at(rel) for finding in (*findings, *remarks)],
    )


def _select_channels(signals: Sequence[Signal], info: RecordingInfo) -> list[Signal]:
    """The channels of the map under their names, else all; in the units of the map."""
    filled = [signal for signal in signals if len(signal.samples)]
    if not filled:
        raise input_error(
            Reason.NO_INPUT, "holds no signals", "files of annotations alone are no recordings"
        )
    names = list(dict.fromkeys(signal.channel for signal in signals))
    channels = info.channels or {name: (name, "") for name in names}
    _require_channels(names, channels)
    selected: list[Signal] = []
    for name, (stored_name, unit) in channels.items():
        for signal in filled:
            if signal.channel == name:
                _check_rate(signal, info.rate)
                converted = _convert_unit(signal, unit or info.unit)
                selected.append(converted._replace(channel=stored_name))
    return selected


def _require_channels(names: Sequence[str], wanted: Iterable[str]) -> None:
    """Raises UserError (missing_channel) where not all `wanted` are among `names`."""
    missing = [safe_text(name) for name in wanted if name not in names]
    if missing:
        raise input_error(
            Reason.MISSING_CHANNEL,
            f"has no channel {list_first(missing, 1)}",
            f"found {', '.join(map(safe_text, names[:12]))}",
            field="channels",
            expected=missing[0],
        )


def _check_rate(signal: Signal, rate: float | None) -> None:
    """Raises UserError (sampling_rate) for another rate than the map states."""
    if rate is not None and not math.isclose(signal.rate, rate, rel_tol=1e-6):
        problem = f"{safe_text(signal.channel)} is sampled at {signal.rate:g} Hz"
        wanted = f"the map states {rate:g} Hz"
        raise input_error(Reason.SAMPLING_RATE, problem, wanted, field="rate")


def _convert_unit(signal: Signal, unit: str) -> Signal:
    """The signal in `unit`.

    One without a unit is assumed to have it, volts are converted. Raises UserError (unit) for
    another.
    """
    stored, wanted = signal.unit.strip().casefold(), unit.strip().casefold()
    if not wanted or stored == wanted:
        return signal
    if not stored:
        return signal._replace(unit=unit)
    if stored not in VOLTS or wanted not in VOLTS:
        text = safe_text(signal.unit)
        raise input_error(
            Reason.UNIT,
            f"{safe_text(signal.channel)} is in {text}",
            f"the map states {safe_text(unit)}",
            field="unit",
            found=text,
        )
    return scale_signal(signal, VOLTS[stored] / VOLTS[wanted], unit)


def _select_annotations(
    notes: Sequence[Annotation], info: RecordingInfo, findings: list[Finding]
) -> list[Annotation]:
    """Annotations of the file and of tables as the map calls them, in order of time.

    Without a map those of tables are kept, and of the file only sleep stages: other texts can hold
    names.
    """
    inside, outside = notes, info.notes
    if info.labels is not None:
        inside, outside = (_map_labels(same, info.labels) for same in (notes, info.notes))
    elif not info.keep_phi:
        inside = _read_stages(notes, findings) if info.stages else ()
    excluded = len(notes) + len(info.notes) - len(inside) - len(outside)
    if excluded:
        findings.append(
            Finding(
                Reason.UNKNOWN_LABEL,
                f"annotations whose texts are no labels of the map: {excluded}",
                "counted, not kept: texts can hold names",
                level="info",
                field=None if info.labels is None else "labels",
                count=excluded,
            )
        )
    return sorted([*inside, *outside, *info.numbers])


def _map_labels(notes: Iterable[Annotation], labels: Mapping[str, str]) -> tuple[Annotation, ...]:
    return tuple(note._replace(label=labels[note.label]) for note in notes if note.label in labels)


def _read_stages(notes: Sequence[Annotation], findings: list[Finding]) -> list[Annotation]:
    stages, _, ambiguous = stage_texts.read_stages(notes)
    if ambiguous:
        texts = ", ".join(map(repr, ambiguous))
        findings.append(
            input_warning(
                Reason.UNKNOWN_LABEL,
                f"annotations {texts} are sleep stages in some systems alone",
                "they are not read",
                "State their stages in [labels] of the map",
            )
        )
    return stages


def _clip(notes: Iterable[Annotation], end: float, findings: list[Finding]) -> list[Annotation]:
    """The parts of annotations between 0 and `end` seconds."""
    clipped: list[Annotation] = []
    cut = 0
    for note in notes:
        stop = note.onset + note.duration
        cut += note.onset < 0 or note.onset > end or end + 1e-6 < stop < math.inf
        begin, stop = max(note.onset, 0.0), min(stop, end)
        if begin < end and stop >= begin:
            clipped.append(note._replace(onset=begin, duration=stop - begin))
    if cut:
        problem = f"annotations that reach beyond the signal: {cut}"
        findings.append(
            input_warning(
                Reason.ANNOTATION_OUT_OF_RANGE, problem, "that part is dropped", count=cut
            )
        )
    return clipped


def report_missing(signals: Sequence[Signal], what: str) -> list[Finding]:
    """The warning about missing values, with the channels that have no others."""
    floats = [signal for signal in signals if signal.samples.dtype.kind == "f"]
    counts = {signal.channel: int(np.isnan(signal.samples).sum()) for signal in floats}
    missing = sum(counts.values())
    if not missing:
        return []
    empty = [signal.channel for signal in floats if counts[signal.channel] == len(signal.samples)]
    problem = f"{missing} {what}" + (f", all of {list_names(empty)}" if empty else "")
    action = "kept as missing (NaN)"
    return [input_warning(Reason.MISSING_VALUES, problem, action, count=missing)]
