"""Readers of a user's own recordings, one a format: a file as a record, by the mapping file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from bitimely_core.errors import Finding, Reason
from bitimely_core.formats import edf, nsrr_xml, stage_texts, wfdb, wfdb_annotations
from bitimely_core.formats.source import Source, locate_errors
from bitimely_core.recordings.arrays import read_mat, read_npy
from bitimely_core.recordings.channels import assume_units
from bitimely_core.recordings.mapping import Format, RecordingInfo
from bitimely_core.recordings.mne_files import read_mne
from bitimely_core.recordings.sample_tables import read_table
from bitimely_core.recordings.selection import make_record
from bitimely_core.types import Annotation, Record


def read_edf(path: Path, rel: str, info: RecordingInfo, events: tuple[Path, ...] = ()) -> Record:
    """A file in EDF, EDF+ or BDF with the NSRR `events` beside it.

    Raises UserError as `formats.edf.read_recording`, and for faulty events.
    """
    for file in events:
        with locate_errors(file):
            scored = [_name_event(note, info.labels) for note in nsrr_xml.read_events(file)]
        info = replace(info, notes=(*info.notes, *scored))
    with locate_errors(rel):
        recording = edf.read_recording(path, required=tuple(info.channels), keep_phi=info.keep_phi)
    header = recording.header
    signals, remarks = assume_units(recording.signals, info)
    findings = [*recording.findings, *remarks]
    start = header.start + timedelta(seconds=recording.origin) if header.start else None
    return make_record(rel, info, signals, recording.annotations, findings, start, header.phi)


def _name_event(note: Annotation, labels: Mapping[str, str] | None) -> Annotation:
    """An event called by its stage, where it is one, or by its concept without the code.

    A map may name it with its code.
    """
    name = note.label.partition("|")[0].strip()
    if labels is None:
        return note._replace(label=stage_texts.STAGE_OF.get(name.lower(), name))
    return note if note.label in labels else note._replace(label=name)


def read_wfdb(source: Source, rel: str, info: RecordingInfo) -> Record:
    """A WFDB record with its segments and its annotation files.

    Raises UserError as `formats.wfdb.read_recording`, and for faulty annotations.
    """
    recording = wfdb.read_recording(
        rel, source, required=tuple(info.channels), keep_phi=info.keep_phi, unfilled=info.unfilled
    )
    header, findings = recording.header, list(recording.findings)
    codes: list[Annotation] = []
    notes: list[Annotation] = []
    for name in info.annotation_files:
        with locate_errors(name):
            content = wfdb_annotations.read_annotations(source.path(name), header.frame_rate)
        selected = content.list_codes(info.events)
        codes += selected
        notes += content.notes
        excluded = content.others + len(content.beats) + len(content.rhythms) - len(selected)
        if excluded:
            what = "beats or rhythms" if info.events == "both" else info.events
            problem = f"annotations that are not {what}: {excluded}"
            action = "counted, not kept"
            findings.append(
                Finding(Reason.LEFT_OUT, problem, action, level="info", file=name, count=excluded)
            )
    codes = [_name_rhythm(note, info.labels or {}) for note in codes]
    info = replace(info, notes=(*info.notes, *codes))
    phi = {"comments": "\n".join(header.comments)} if header.comments else {}
    return make_record(rel, info, recording.signals, notes, findings, header.start, phi)


def _name_rhythm(note: Annotation, labels: Mapping[str, str]) -> Annotation:
    """A rhythm with its bracket, as the file has it, where the map names it so."""
    name = f"({note.label}"
    return note._replace(label=name) if note.duration and name in labels else note


READERS: dict[Format, Callable[[Path, str, RecordingInfo], Record]] = {
    "edf": read_edf,
    "table": read_table,
    "npy": read_npy,
    "mat": read_mat,
    "mne": read_mne,
}
