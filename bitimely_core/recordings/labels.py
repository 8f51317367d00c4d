"""Finds the files that hold the labels of a recording: beside it, or in a folder of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from bitimely_core.formats.source import Source
from bitimely_core.recordings.mapping import Format, RecordingInfo, strip_suffix
from bitimely_core.recordings.tables import read_bids_events

NSRR = "-nsrr.xml"  # scored events beside an EDF file, or in a folder of their own


def list_scored(source: Source) -> dict[str, list[str]]:
    """Name of a recording -> files of scored events of the NSRR."""
    scored: dict[str, list[str]] = {}
    for rel in source.files:
        if rel.endswith(NSRR):
            scored.setdefault(PurePosixPath(rel).name.removesuffix(NSRR), []).append(rel)
    return scored


def choose_scored(rel: str, scored: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The file of scored events of a recording: that of its folder, else the only one."""
    files = scored.get(PurePosixPath(strip_suffix(rel)).name, ())
    folder = PurePosixPath(rel).parent
    beside = [file for file in files if PurePosixPath(file).parent == folder]
    chosen = beside or files
    return tuple(chosen) if len(chosen) == 1 else ()


def find_labels(
    source: Source,
    rel: str,
    kind: Format,
    info: RecordingInfo,
    *,
    bids: bool,
    annotators: Sequence[str],
) -> tuple[RecordingInfo, list[str]]:
    """`info` with the annotations of tables and the names of annotation files, and the tables.

    Args:
        source: the folder.
        rel: the file of the recording.
        kind: its format.
        info: what the map says of it.
        bids: whether an events table is read.
        annotators: endings of the annotation files beside a WFDB record.

    Raises:
        UserError: a faulty row of the events table.
    """
    stem = strip_suffix(rel)
    if kind in {"edf", "mne"} or info.events == "notes":
        info = replace(info, stages=True)
    if kind == "wfdb":
        beside = (f"{stem}.{ending}" for ending in annotators)
        there = source.files.keys() | source.rejected.keys()
        info = replace(info, annotation_files=tuple(name for name in beside if name in there))
    events = f"{stem.rpartition('_')[0]}_events.tsv"
    if not bids or events not in source.files:
        return info, []
    notes = read_bids_events(source.path(events), events)
    return replace(info, notes=(*info.notes, *notes)), [events]
