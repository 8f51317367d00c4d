"""Makes the record of a recording: the channels, units and labels that its map asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

import numpy as np

from bitimely_core.errors import Finding, Reason, input_warning
from bitimely_core.formats.source import locate_errors
from bitimely_core.formats.text import list_names
from bitimely_core.recordings.annotations import clip_annotations, select_annotations
from bitimely_core.recordings.channels import select_channels
from bitimely_core.recordings.label_sources import read_stage_channels
from bitimely_core.recordings.label_times import RecordingTime
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

    Raises UserError: as `channels.select_channels`, and the faults of label files.
    """
    remarks: list[Finding] = []
    with locate_errors(rel):
        selected, triggers = select_channels(signals, info, remarks)
    end = max(signal.onset + len(signal.samples) / signal.rate for signal in selected)
    rate = max(signal.rate for signal in selected)
    time = RecordingTime(start, end, rate, info.origin, info.zone)
    info = replace(info, notes=(*info.notes, *triggers))
    channels = read_stage_channels(signals, info, rel)
    labelled = select_annotations(rel, notes, info, time, remarks, channels)
    annotations = clip_annotations(labelled, end, remarks)
    return Record(
        recording_id=info.recording_id,
        subject_id=info.subject_id,
        signals=selected,
        annotations=annotations,
        attributes={**info.attributes, **(phi or {})},
        start_time=start.isoformat() if start and info.keep_dates else None,
        findings=[finding.at(rel) for finding in (*findings, *remarks)],
    )


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
