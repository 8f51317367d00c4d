"""Makes the record of a recording: the channels, units and labels that its map asks for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import numpy as np

from bitimely_core.errors import Finding, Reason, input_warning
from bitimely_core.formats import stage_texts
from bitimely_core.formats.source import locate_errors
from bitimely_core.formats.text import list_names
from bitimely_core.recordings.channels import select_channels
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

    Raises UserError: as `channels.select_channels`.
    """
    remarks: list[Finding] = []
    with locate_errors(rel):
        selected, triggers = select_channels(signals, info, remarks)
    end = max(signal.onset + len(signal.samples) / signal.rate for signal in selected)
    labelled = _select_annotations(notes, (*info.notes, *triggers), info, remarks)
    annotations = _clip(labelled, end, remarks)
    return Record(
        recording_id=info.recording_id,
        subject_id=info.subject_id,
        signals=selected,
        annotations=annotations,
        attributes={**info.attributes, **(phi or {})},
        start_time=start.isoformat() if start and info.keep_dates else None,
        findings=[finding.at(rel) for finding in (*findings, *remarks)],
    )


def _select_annotations(
    notes: Sequence[Annotation],
    labels: Sequence[Annotation],
    info: RecordingInfo,
    findings: list[Finding],
) -> list[Annotation]:
    """Annotations of the file and of tables as the map calls them, in order of time.

    Without a map `labels`, those of tables and the codes of triggers, are kept, and of the file
    only sleep stages: other texts can hold names. Where points alone are read they have no text.
    """
    if info.points:
        points = [note for note in (*notes, *labels) if note.duration == 0]
        return sorted(note._replace(label="") for note in points)
    inside, outside = notes, labels
    if info.labels is not None:
        inside, outside = (_map_labels(same, info.labels) for same in (notes, labels))
    elif not info.keep_phi:
        inside = _read_stages(notes, findings) if info.stages else ()
    excluded = len(notes) + len(labels) - len(inside) - len(outside)
    if excluded:
        findings.append(
            Finding(
                Reason.UNKNOWN_LABEL,
                f"annotations whose texts are no labels of the map: {excluded}",
                "counted, not kept: texts can hold names",
                level="info",
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
