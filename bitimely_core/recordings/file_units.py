"""Binds the file of a recording to the reader of its format, with the files that come with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath

from bitimely_core.errors import usage_error
from bitimely_core.formats import wfdb
from bitimely_core.formats.source import Source, locate_errors
from bitimely_core.recordings import readers
from bitimely_core.recordings.arrays import check_samples, find_rate, read_mat, read_npy
from bitimely_core.recordings.file_choice import suggest_map
from bitimely_core.recordings.mapping import Format, RecordingInfo, find_suffix, strip_suffix
from bitimely_core.recordings.mne_files import list_later_parts, list_named_files
from bitimely_core.recordings.sample_tables import read_series
from bitimely_core.recordings.sidecars import describe_table, read_sidecars
from bitimely_core.types import IngestUnit, Record, Records

COMPANIONS = {".vhdr": (".eeg", ".vmrk", ".dat"), ".set": (".fdt",)}
ARRAY_READERS = {"npy": read_npy, "mat": read_mat}


def make_unit(
    source: Source,
    rel: str,
    kind: Format,
    info: RecordingInfo,
    *,
    bids: bool = False,
    annotators: Sequence[str] = (),
) -> IngestUnit:
    """The recording in file `rel`, bound to the reader of its format.

    `bids`: whether sidecars of BIDS are read; `annotators`: endings of the annotation files beside
    a WFDB record. Raises UserError for what is wrong with its header.
    """
    path = source.path(rel)
    if kind in {"edf", "mne"} or info.events == "notes":
        info = replace(info, stages=True)
    info, described = add_descriptions(source, rel, kind, info, bids=bids)
    files = [rel, *(file.rel for file in info.label_files), *described]
    if kind == "wfdb":
        beside = (f"{strip_suffix(rel)}.{ending}" for ending in annotators)
        info = replace(info, annotation_files=tuple(filter(source.lists, beside)))
        return _make_wfdb_unit(source, rel, info, files)
    if kind in {"npy", "mat"} and info.rate is None:
        info = replace(info, rate=_require_rate(source, rel, kind, info))
    files += [*_list_companions(source, rel), *info.annotation_files]
    read: Callable[..., Record | Records] = readers.READERS[kind]
    if kind in {"npy", "mat"} and info.annotation_files:  # epochs or trials with their classes
        read = partial(ARRAY_READERS[kind], labels=source.path(info.annotation_files[-1]))
    elif info.series:
        read = read_series
    return IngestUnit(
        name=info.recording_id, files=tuple(files), read=partial(read, path, rel, info)
    )


def _require_rate(source: Source, rel: str, kind: Format, info: RecordingInfo) -> float:
    """Hz that a file of arrays states. Raises UserError for one that states none, or that of MATLAB
    cannot be read at all.
    """
    rate = find_rate(source.path(rel))
    if rate is None:
        if kind == "mat":
            with locate_errors(rel):
                check_samples(source.path(rel), info)
        wanted = "needs --map with a rate (`rate` in [[files]])"
        raise usage_error("has no sampling rate", wanted, suggest_map(source))
    return rate


def add_descriptions(
    source: Source, rel: str, kind: Format, info: RecordingInfo, *, bids: bool = False
) -> tuple[RecordingInfo, tuple[str, ...]]:
    """`info` with what descriptions beside a recording say of it, and their files."""
    files: tuple[str, ...] = ()
    if bids:
        sidecars = read_sidecars(source, rel)
        info = replace(info, facts=sidecars.facts, stated_rate=sidecars.rate)
        files = sidecars.files
    if kind == "table":
        described = describe_table(source, rel)
        rate = described.rate or info.stated_rate
        info = replace(info, stated_rate=rate, headers=described.headers, origin=described.start)
        files = (*files, *described.files)
    return info, tuple(dict.fromkeys(files))


def _make_wfdb_unit(
    source: Source, rel: str, info: RecordingInfo, files: Sequence[str]
) -> IngestUnit:
    """A WFDB record with the files that its header names and its annotation files."""
    with locate_errors(rel):
        names = wfdb.read_header(rel, source, required=tuple(info.channels)).files
    for name in info.annotation_files:
        source.path(name)  # raises for a file that must not be opened
    names = (*names, *info.annotation_files)
    part = replace(source, files={name: source.files[name] for name in names}, rejected={})
    return IngestUnit(
        name=info.recording_id,
        files=tuple(dict.fromkeys([*files, *names])),
        read=partial(readers.read_wfdb, part, rel, info),
    )


def _list_companions(source: Source, rel: str) -> list[str]:
    """Files with the samples and markers of a recording whose file is a header or the first part.

    Raises UserError for one that must not be opened.
    """
    endings = COMPANIONS.get(find_suffix(rel), ())
    if not endings:
        return list_later_parts(source, rel)
    stem = strip_suffix(rel)
    spellings = [
        spelling
        for ending in endings
        for spelling in (ending, ending.upper(), f".{ending[1:].capitalize()}")
    ]
    names = [name for spelling in spellings if source.lists(name := stem + spelling)]
    if find_suffix(rel) == ".vhdr":  # one that is copied beside it later makes it another unit
        folder = PurePosixPath(rel).parent
        beside = ((folder / name).as_posix() for name in list_named_files(source.path(rel)))
        names = list(dict.fromkeys([*names, *filter(source.lists, beside)]))
    for name in names:
        source.path(name)
    return names
