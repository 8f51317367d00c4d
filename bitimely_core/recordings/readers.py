"""Readers of a user's own recordings, one a format: a file as a record, by the mapping file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from bitimely_core.formats import edf, wfdb
from bitimely_core.formats.source import Source, locate_errors
from bitimely_core.recordings.arrays import read_mat, read_npy
from bitimely_core.recordings.channels import assume_units
from bitimely_core.recordings.label_sources import read_wfdb_labels
from bitimely_core.recordings.mapping import Format, RecordingInfo
from bitimely_core.recordings.mne_files import read_mne
from bitimely_core.recordings.selection import make_record
from bitimely_core.recordings.table_blocks import read_any_table
from bitimely_core.types import Annotation, AttributeValue, Record, Records


def read_edf(path: Path, rel: str, info: RecordingInfo) -> Record:
    """A file in EDF, EDF+ or BDF. Raises UserError as `formats.edf.read_recording`."""
    with locate_errors(rel):
        recording = edf.read_recording(path, required=tuple(info.channels), keep_phi=info.keep_phi)
    header = recording.header
    signals, remarks = assume_units(recording.signals, info)
    findings = [*recording.findings, *remarks]
    start = header.start + timedelta(seconds=recording.origin) if header.start else None
    return make_record(rel, info, signals, recording.annotations, findings, start, header.phi)


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
            path, words = source.path(name), info.label_rules.words
            content = read_wfdb_labels(path, name, header.frame_rate, info.events, words)
        codes += content.codes
        notes += content.notes
        findings += content.findings
    classes = _name_diagnoses(header.diagnoses, info)
    info = replace(info, notes=(*info.notes, *codes), attributes=classes | info.attributes)
    phi = {"comments": "\n".join(header.comments)} if header.comments else {}
    return make_record(rel, info, recording.signals, notes, findings, header.start, phi)


def _name_diagnoses(codes: Sequence[str], info: RecordingInfo) -> dict[str, AttributeValue]:
    """The codes of a header as the classes of its recording, called as the map says."""
    words = info.label_rules.words or {}
    classes = [*filter(None, dict.fromkeys(words.get(code, code) for code in codes))]
    return {"labels": classes} if classes else {}


READERS: dict[Format, Callable[[Path, str, RecordingInfo], Record | Records]] = {
    "edf": read_edf,
    "table": read_any_table,
    "npy": read_npy,
    "mat": read_mat,
    "mne": read_mne,
}
