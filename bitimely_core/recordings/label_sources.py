"""Reads the labels of a recording: from each file that holds some, as annotations in its time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import NamedTuple

from bitimely_core.errors import Finding, Reason, input_error, input_warning, safe_text
from bitimely_core.formats import (
    clocks,
    edf,
    edf_header,
    label_files,
    nsrr_xml,
    vendors,
    wfdb_annotations,
)
from bitimely_core.formats.source import locate_errors
from bitimely_core.formats.stage_texts import DIGITS, EPOCH, STAGE_OF, fold_text
from bitimely_core.formats.text import decode_table
from bitimely_core.formats.wfdb_annotations import AnnotationKind
from bitimely_core.recordings.channels import STAGES, group_segments, holds_labels, read_states
from bitimely_core.recordings.folder_tables import read_bids_events
from bitimely_core.recordings.label_times import RecordingTime, find_epoch_length, place_rows
from bitimely_core.recordings.mapping import LabelFile, LabelForm, LabelRules, RecordingInfo
from bitimely_core.types import Annotation, Signal

UNKNOWN_DAY = date(1985, 1, 1)  # what files state that state no date
QUARTER = 900.0  # seconds: clocks of time zones differ by quarters of an hour


class LabelSource(NamedTuple):
    """The labels of a recording from one file."""

    name: str  # the file
    notes: list[Annotation]
    is_free: bool = False  # texts can hold names: only known ones are kept
    is_prose: bool = False  # texts can be sentences: codes of a vocabulary are kept
    is_listed: bool = False  # letters and digits alone are stages
    words: Mapping[str, str] = {}  # further texts -> stage
    findings: tuple[Finding, ...] = ()


def read_label_file(file: LabelFile, time: RecordingTime, rules: LabelRules) -> LabelSource:
    """The labels in `file` by [labels] of the map. Raises UserError for a damaged file."""
    with locate_errors(file.rel):
        source = READERS[file.form](file, time, rules)
    moved = [note._replace(onset=note.onset + rules.shift) for note in source.notes]
    remarks = [*source.findings, *_report_reach(moved, time.length)]
    said = tuple(finding.at(file.rel) for finding in remarks)
    return source._replace(notes=moved, findings=said)


def read_stage_channels(
    signals: Sequence[Signal], info: RecordingInfo, name: str
) -> list[LabelSource]:
    """The stages of the channels of a recording that are called so; `name`: its file.

    Digits are stages; a 4 is N3 beside a 5, which is REM.
    """
    sources: list[LabelSource] = []
    for channel, parts in group_segments(signals).items():
        notes = read_states(parts) if holds_labels(channel, info, STAGES) else []
        codes = {note.label for note in notes}
        if not codes - {"0"} or not codes <= DIGITS.keys() | {"4"}:
            continue
        four = {"4": "N3"} if "5" in codes else {}
        said = _report_stage_channel(channel, codes, four)
        sources.append(LabelSource(name, notes, is_listed=True, words=four, findings=(said,)))
    return sources


def _report_stage_channel(
    channel: str, codes: Collection[str], words: Mapping[str, str]
) -> Finding:
    """What the numbers of a channel of stages are taken for."""
    legend = [f"{c} {stage}" for c in sorted(codes) if (stage := {**DIGITS, **words}.get(c))]
    hint = 'If they mean something else, write a line a number in [labels] of the map, "0" = "W"'
    action = "others are not scored"
    if "4" in codes - words.keys():
        action = "4 is not read: it is REM in some programs and N3 in others"
        hint = 'Write "4" = "REM" or "4" = "N3" in [labels] of the map'
    problem = f"{safe_text(channel)} holds sleep stages: {', '.join(legend)}"
    return input_warning(Reason.LABEL, problem, action, hint, field="labels")


def _report_reach(notes: list[Annotation], length: float) -> list[Finding]:
    """A warning where labels lie outside the recording, run past its end by an epoch or more, or
    begin a part of an hour before it.
    """
    if not notes:
        return []
    begin, end = min(note.onset for note in notes), max(map(_find_end, notes))
    action, hint = "what is beyond is dropped", _suggest_shift(begin)
    if begin >= length or end <= 0:
        problem = (
            f"its labels run from {begin:g} to {end:g} s, the recording from 0 to {length:g} s"
        )
        action, hint = "none of them is used", f"Are they of another recording?{hint}"
    elif end >= length + EPOCH:
        if step := find_epoch_length(len(notes), length):
            hint = f"If its epochs last {step} s, write epoch = {step} in [labels] of the map"
        problem = f"its labels run to {end:g} s, past the end of the recording at {length:g} s"
    elif begin <= -QUARTER / 2:
        problem = f"its labels begin {-begin:g} s before the recording"
    else:
        return []
    return [input_warning(Reason.ANNOTATION_OUT_OF_RANGE, problem, action, hint.strip())]


def _find_end(note: Annotation) -> float:
    """Its end in seconds, its beginning where it lasts to the end of the recording."""
    return note.onset + (0.0 if math.isinf(note.duration) else note.duration)


def _suggest_shift(begin: float) -> str:
    """What to write where labels that begin at `begin` seconds are timed in another zone."""
    shift = -round(begin / QUARTER) * QUARTER
    if not 0 < abs(shift) < clocks.DAY:
        return ""
    return f" If their clock is of another zone, write shift = {shift:g} in [labels] of the map"


# --- the forms


def _read_text(file: LabelFile, time: RecordingTime, rules: LabelRules) -> LabelSource:
    table = label_files.read_label_text(file.path)
    if table is None:
        wanted = "expected one stage a line, or a table with times and labels"
        raise input_error(Reason.ANNOTATION_SYNTAX, "is no file of labels that is known", wanted)
    placed = place_rows(table, time, rules)
    if placed is None:
        return LabelSource(file.rel, [], findings=(_report_no_start("clock times"),))
    findings = [*placed.findings, *_report_dropped(table.dropped)]
    return LabelSource(
        file.rel,
        [Annotation(row.onset, row.duration or 0.0, row.text) for row in placed.rows],
        is_prose=table.is_prose,
        is_listed=table.is_listed,
        words={"4": file.four} if file.four else {},
        findings=tuple(findings),
    )


def _report_no_start(times: str) -> Finding:
    problem = f"states {times}, and the recording states no start"
    hint = "State the times in seconds from the start of the recording"
    return input_warning(Reason.UNMATCHED_LABELS, problem, "its labels are not used", hint)


def _report_dropped(count: int) -> tuple[Finding, ...]:
    """The warning about rows without a time or a text; none for 0."""
    problem = f"rows that state no onset or no label: {count}"
    warning = input_warning(Reason.ANNOTATION_SYNTAX, problem, "left out", count=count)
    return (warning,) if count else ()


def _read_xml(file: LabelFile, _: RecordingTime, rules: LabelRules) -> LabelSource:
    stages, events = nsrr_xml.read_scored(file.path)
    events = [_name_event(note, rules.words) for note in events]
    words = DIGITS | {"4": "N3"} if stages else {}
    return LabelSource(file.rel, [*stages, *events], words=words)


def _name_event(note: Annotation, labels: Mapping[str, str] | None) -> Annotation:
    """An event called by its stage, where it is one, or by its concept without the code.

    A map may name it with its code.
    """
    name = note.label.partition("|")[0].strip()
    if labels is None:
        return note._replace(label=STAGE_OF.get(fold_text(name), name))
    return note if note.label in labels else note._replace(label=name)


def _read_edf(file: LabelFile, time: RecordingTime, _: LabelRules) -> LabelSource:
    header = edf_header.read_header(file.path, required=())
    notes, findings = edf.read_annotations(file.path, header)
    shift = _measure_shift(header.start, time.start)
    if shift:
        problem = f"begins {shift:g} s after the recording"
        findings.append(
            input_warning(Reason.START_MISMATCH, problem, "its labels are placed by the clock")
        )
    moved = [note._replace(onset=note.onset + shift) for note in notes]
    return LabelSource(file.rel, moved, is_free=True, findings=tuple(findings))


def _measure_shift(start: datetime | None, recording: datetime | None) -> float:
    """Seconds from the start of a recording to that of its labels; 0 where either is not known."""
    if start is None or recording is None or start.date() == UNKNOWN_DAY:
        return 0.0
    seconds = (start - recording).total_seconds()
    return seconds if abs(seconds) < clocks.DAY else 0.0


def _read_wfdb(file: LabelFile, time: RecordingTime, rules: LabelRules) -> LabelSource:
    content = read_wfdb_labels(file.path, file.rel, time.rate, "both", rules.words)
    findings = list(content.findings)
    if content.notes:
        problem = f"notes that are no codes: {len(content.notes)}"
        action = "counted, not kept: texts can hold names"
        count = len(content.notes)
        findings.append(Finding(Reason.UNKNOWN_LABEL, problem, action, level="info", count=count))
    return LabelSource(file.rel, content.codes, findings=tuple(findings))


class WfdbLabels(NamedTuple):
    """What an annotation file of WFDB holds."""

    codes: list[Annotation]
    notes: list[Annotation]  # free texts
    findings: list[Finding]


def read_wfdb_labels(
    path: Path, name: str, rate: float, kind: AnnotationKind, labels: Mapping[str, str] | None
) -> WfdbLabels:
    """The codes of kind `kind` in an annotation file of WFDB, and what is said of it."""
    content = wfdb_annotations.read_annotations(path, rate)
    selected = content.list_codes(kind)
    findings: list[Finding] = []
    excluded = content.others + len(content.beats) + len(content.rhythms) - len(selected)
    if excluded:
        what = "beats or rhythms" if kind == "both" else kind
        problem = f"annotations that are not {what}: {excluded}"
        action = "counted, not kept"
        findings.append(
            Finding(Reason.LEFT_OUT, problem, action, level="info", file=name, count=excluded)
        )
    if content.step:
        problem = f"marks every {content.step:g} s"
        action = "each stands for the stretch until the next one"
        hint = 'If not, write reaches = "previous" or a number of seconds in [labels] of the map'
        findings.append(input_warning(Reason.LABEL, problem, action, hint, file=name))
    codes = [_name_rhythm(note, labels or {}) for note in selected]
    return WfdbLabels(codes, content.notes, findings)


def _name_rhythm(note: Annotation, labels: Mapping[str, str]) -> Annotation:
    """A rhythm with its bracket, as the file has it, where the map names it so."""
    name = f"({note.label}"
    return note._replace(label=name) if note.duration and name in labels else note


def _read_bids(file: LabelFile, time: RecordingTime, _: LabelRules) -> LabelSource:
    """The events of BIDS; physiology may begin before or after the zero of their clock."""
    notes, dropped = read_bids_events(file.path, file.rel, file.levels)
    notes = [note._replace(onset=note.onset - time.origin) for note in notes]
    return LabelSource(file.rel, notes, findings=_report_dropped(dropped))


def _read_device(file: LabelFile, time: RecordingTime, _: LabelRules) -> LabelSource:
    """The events of a device as points, by the times since 1970."""
    text = decode_table(file.path.read_bytes(), fallback="latin-1")
    form = vendors.find_form(file.path.name, text)
    if form is None or time.start is None:
        return LabelSource(file.rel, [], findings=(_report_no_start("times since 1970"),))
    start = (time.start - datetime(1970, 1, 1)).total_seconds()
    times = form.read_events(text)
    notes = [
        Annotation(round(seconds - start, 6), 0.0, form.events)
        for seconds in times
        if not math.isnan(seconds)
    ]
    return LabelSource(file.rel, notes, findings=_report_dropped(len(times) - len(notes)))


Reader = Callable[[LabelFile, RecordingTime, LabelRules], LabelSource]
READERS: dict[LabelForm, Reader] = {
    "text": _read_text,
    "xml": _read_xml,
    "edf": _read_edf,
    "wfdb": _read_wfdb,
    "bids": _read_bids,
    "device": _read_device,
}
