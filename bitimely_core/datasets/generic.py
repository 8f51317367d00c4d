"""A user's own recordings: EDF, BDF, WFDB, csv, Parquet, npy, MATLAB 5, and through mne BrainVision, EEGLAB, GDF, FIF and CNT; a BIDS folder as it is.

`edf` and `wfdb` are `generic` for files of that one format. What files do not state (subjects, channels of a table, rates, labels) comes from
 a mapping file in TOML (`--map`), whose keys are those of `Map`.
"""

from __future__ import annotations

import fnmatch
import math
import operator
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np
from pydantic import Field

from bitimely_core.config import Section, read_toml, validate
from bitimely_core.datasets import tser
from bitimely_core.datasets.tser import report_unclaimed
from bitimely_core.errors import Finding, Reason, UserError, input_error, input_warning, safe_text, usage_error
from bitimely_core.formats import edf as format_edf
from bitimely_core.formats import matlab, tables
from bitimely_core.formats import wfdb as format_wfdb
from bitimely_core.formats.source import Source, locate_errors, require_source
from bitimely_core.formats.text import sanitize_label
from bitimely_core.formats.units import VOLTS, scale_signal
from bitimely_core.registry import DatasetFacts, View, datasets
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import (
    Annotation,
    Attributes,
    AttributeValue,
    IngestOptions,
    IngestUnit,
    Record,
    Records,
    Signal,
    SourceRows,
    count_reasons,
)

Format = Literal["edf", "wfdb", "table", "npy", "mat", "mne"]

SUFFIXES: dict[str, Format] = {
    ".edf": "edf",
    ".bdf": "edf",
    ".hea": "wfdb",
    ".csv": "table",
    ".csv.gz": "table",
    ".tsv": "table",
    ".parquet": "table",
    ".pq": "table",
    ".npy": "npy",
    ".mat": "mat",
    **dict.fromkeys((".vhdr", ".set", ".gdf", ".fif", ".fif.gz", ".cnt"), "mne"),
}
COMPANIONS = {".vhdr": (".eeg", ".vmrk", ".dat"), ".set": (".fdt",)}
LAYOUT = re.compile(
    r"(RECORDS|SHA256SUMS|LICENSE|README|CHANGES|ANNOTATORS|index\.html|dataset_description\.json|participants\.).*|.*\.(dat|txt|md|json|mat|xyz)"
    r"|.*_(events|channels|scans|sessions|electrodes|coordsystem)\.(tsv|json)|.*\.d\d+",
    re.IGNORECASE,
)
BIDS = re.compile(r"(?:^|/)sub-([A-Za-z0-9]+)(?=[_/])")
DERIVED = ("derivatives/", "sourcedata/", "code/", "stimuli/")
ELECTRIC = {"eeg", "eog", "ecg", "emg", "seeg", "ecog", "dbs", "bio"}  # kinds of channel that mne gives in volts
EMPTY_CELLS = {"", "n/a", "na", "nan"}
SPLIT_NAMES = {name: name for name in tser.SPLITS} | {"training": "train", "val": "validation", "valid": "validation", "testing": "test"}
FOLDS = 10  # the ninth is validation, the tenth test
FLAGS = {"0": False, "1": True, "0.0": False, "1.0": True, "False": False, "True": True, "false": False, "true": True}
EMPTY_NUMBER = "nan"  # of a row of numbers whose cell is empty


# --- the mapping file


class ChannelRule(Section):
    """A channel: its name in the cache and its unit."""

    name: str
    unit: str = ""


class FileRule(Section):
    """[[files]]: a group of files, and the properties that they do not state."""

    pattern: str = "*"  # of the path relative to the source; * also matches folders
    format: Format | None = None  # else by the ending
    match: str = ""  # regular expression on the path, with groups named subject, label, value or recording
    subject: str = ""  # of all these files
    label: str = ""
    rate: float | None = Field(None, gt=0)  # Hz: of tables, npy and mat; other formats are compared with it
    unit: str = ""
    channels: (
        tuple[str, ...] | dict[str, str | ChannelRule]
    ) = ()  # () all; names as in the file, or name in the file -> name or {name, unit}
    variable: str = ""  # of MATLAB files: name of the array; else the only one
    time: str = ""  # column with seconds, of tables
    series: str = ""  # pattern of columns: each row is a recording of one channel, with these columns as its samples in their order
    id_column: str = ""  # of such rows; else they are numbered
    subject_column: str = ""
    label_column: str = ""
    value_column: str = ""
    delimiter: str = ","


class TableRule(Section):
    """[table]: a table with one row a recording (`file`) or a subject (`subject` alone)."""

    path: str
    file: str = ""  # column: path without ending, or file name, of the recording
    subject: str = ""  # column
    label: str = ""  # column with a class
    labels: tuple[str, ...] = ()  # columns with 0 or 1, one a class, of which a recording may have several
    value: str = ""  # column with a number
    split: str = ""  # column with train, validation or test, or with folds: 1 to 10, or 1-8 for those that are training
    attributes: tuple[str, ...] = ()  # further columns to keep
    delimiter: str = ","


class AnnotationRule(Section):
    """[annotations]: a table with one row an annotation, a text or a number."""

    path: str
    file: str  # column: path without ending, or file name, of the recording
    onset: str = "onset"  # column: seconds
    duration: str = "duration"  # column: seconds; "": a row lasts until the next one of its recording, the last to the end
    label: str = "label"
    value: str = ""  # column with a number, read instead of the label
    delimiter: str = ","


class RecordingMap(Section):
    """The mapping file."""

    files: tuple[FileRule, ...] = (FileRule(),)
    table: TableRule | None = None
    annotations: AnnotationRule | None = None
    labels: dict[str, str] | None = None  # text of an annotation -> class; other texts are counted and excluded


@dataclass(frozen=True, kw_only=True)
class RecordingInfo:
    """Properties of one recording beyond its file. `channels`: name in the file -> name, unit."""

    recording_id: str
    subject_id: str
    attributes: dict[str, AttributeValue] = field(default_factory=dict)
    notes: tuple[Annotation, ...] = ()  # from tables
    numbers: tuple[Annotation, ...] = ()  # from a table of numbers: their texts are numbers, not labels
    channels: dict[str, tuple[str, str]] = field(default_factory=dict)
    labels: dict[str, str] | None = None
    rate: float | None = None
    unit: str = ""
    variable: str = field(default="", metadata={"later": True})
    time: str = ""
    series: str = ""
    columns: dict[str, str] = field(default_factory=dict)  # id, subject, label, value -> column of a table of series
    delimiter: str = ","
    keep_dates: bool = False
    keep_phi: bool = False


# --- the data sets


RULES = {
    "units": "one file (or record) is one recording, called by its path without ending",
    "subjects": "by --map; in a BIDS folder sub-...; else every recording is taken for another subject, with a warning",
    "annotations": "texts inside files can hold names: they are kept where [labels] of the map names them, or under --keep-phi, else counted; "
    "texts of tables (BIDS events, [annotations]) are labels and are kept",
    "channels": "by name; all of a file, or those of the map, and then each must be there; volts are converted to the unit asked for",
    "views": "channels and rate are those of the first recording; a window is 10 s, or the commonest annotation, unless --window says otherwise",
}
WINDOWS = View(channels=(), rate=0.0, window=0, seconds=10.0, help="all channels of the first recording, windows of 10 s, no labels")
OPEN = {
    "": WINDOWS,
    "annotations": replace(WINDOWS, seconds=0.0, task="classification", epoch=0.0, help="one window an annotation, its text is the class"),
}
LABELLED = {
    "classification": replace(WINDOWS, task="classification", target="label", help="the class of the recording"),
    "multilabel": replace(
        WINDOWS, task="multilabel", target="labels", help="all classes of the recording, by the columns `labels` of the table"
    ),
    "regression": replace(WINDOWS, task="regression", target="value", help="the number of the recording"),
    "values": replace(
        WINDOWS, task="regression", overlap=0.5, help="the mean of the numeric annotations over the window, where they cover half of it"
    ),
}


def name_unit(subjects: Iterable[str], recordings: Iterable[str]) -> str:
    """Whether the subjects of windows are recordings, because the source names no subjects."""
    return "recording" if all(map(operator.eq, subjects, recordings)) else "subject"


def _make_facts(title: str, layout: str, views: dict[str, View], options: dict[str, None] | None = None) -> DatasetFacts:
    return DatasetFacts(
        subject_unit=name_unit,
        title=title,
        views=views,
        licence="your own",
        url="",
        download="your own files",
        layout=layout,
        paper={},
        rules=RULES,
        options=options,
    )


@datasets(
    _make_facts(
        "Your own recordings, with a mapping file for what the files do not state",
        "any folders of recordings, with --map FILE.toml where the files do not state subjects, rates and labels; a BIDS folder as it is",
        OPEN | LABELLED,
        {"map": None},
    )
)
def generic(source: Source | None, options: IngestOptions) -> Iterator[IngestUnit | Finding | SourceRows]:
    """Your own files: EDF, BDF, WFDB, csv, Parquet, npy, mat (--map), BrainVision, EEGLAB, GDF, FIF, or a BIDS folder."""
    path = options.get("map")
    if path is None:
        yield from _list_units(require_source(source), RecordingMap(), ("edf", "wfdb", "mne"), options)
        return
    chosen = validate(RecordingMap, read_toml(Path(path)), str(path))
    for i, files in enumerate(chosen.files):
        try:
            re.compile(files.match)
        except re.error as error:
            raise usage_error(
                f"found {safe_text(files.match)}", f"expected a regular expression ({error})", file=str(path), field=f"files.{i}.match"
            ) from None
    yield from _list_units(require_source(source), chosen, ("edf", "wfdb", "table", "npy", "mat", "mne"), options)


@datasets(_make_facts("Recordings in EDF, EDF+ or BDF files", "any folders of .edf and .bdf files", OPEN))
def edf(source: Source | None, options: IngestOptions) -> Iterator[IngestUnit | Finding | SourceRows]:
    """All .edf and .bdf files of a folder, one recording each."""
    yield from _list_units(require_source(source), RecordingMap(), ("edf",), options)


@datasets(_make_facts("Recordings in WFDB format", "any folders of .hea files with their signal files", OPEN))
def wfdb(source: Source | None, options: IngestOptions) -> Iterator[IngestUnit | Finding | SourceRows]:
    """All WFDB records of a folder, single and multi-segment, one recording each."""
    yield from _list_units(require_source(source), RecordingMap(), ("wfdb",), options)


def _list_units(
    source: Source, chosen: RecordingMap, formats: tuple[Format, ...], options: IngestOptions
) -> Iterator[IngestUnit | Finding | SourceRows]:
    """The units of a folder, findings about the folder, and the account of its tables."""
    bids = any(name in source.files for name in ("participants.tsv", "dataset_description.json"))
    skipped = {table.path for table in (chosen.table, chosen.annotations) if table}
    derived = {rel for rel in source.files if bids and rel.startswith(DERIVED)}
    found: dict[str, tuple[Format, FileRule]] = {}
    for rel in [*source.files, *source.rejected]:
        if rel in skipped | derived or (bids and PurePosixPath(rel).suffix == ".tsv"):
            continue
        files = next((files for files in chosen.files if fnmatch.fnmatchcase(rel, files.pattern)), None)
        kind = files and (files.format or SUFFIXES.get(find_suffix(rel)))
        if kind == "mat" and files and not (files.variable or files.format or files.pattern.lower().endswith(".mat")):
            continue  # many data sets have a copy of their recordings in this format
        if files and kind in formats:
            found[rel] = (kind, files)
    segments = find_segments(source, [rel for rel, (kind, _) in found.items() if kind == "wfdb"])
    found = {rel: what for rel, what in found.items() if rel not in segments}
    names = _name_units(list(found))
    rows, table_rows = _read_attributes(source, chosen.table) if chosen.table else _read_participants(source) if bids else ([], {})
    yield from rows
    rows, annotations = _read_annotations(source, chosen.annotations) if chosen.annotations else ([], {})
    yield from rows
    units: list[IngestUnit] = []
    infos: dict[str, RecordingInfo] = {}
    for rel, (kind, files) in found.items():
        if rel in source.rejected:
            units.append(IngestUnit(name=names[rel], files=(rel,), read=None, findings=(source.rejected[rel],)))
            continue
        info = infos[rel] = describe_recording(rel, names[rel], files, chosen, table_rows, annotations, options)
        try:
            units.append(make_unit(source, rel, kind, info, bids=bids))
        except UserError as error:
            raise_system_error(error)
            units.append(IngestUnit(name=names[rel], files=(rel,), read=None, findings=(error.finding.at(rel),)))
    claimed = {rel: rel for unit in units for rel in unit.files} | {rel: rel for rel in segments | skipped | derived}
    yield from report_unclaimed(source, {"": claimed}, LAYOUT)
    named = [chosen.table.path if chosen.table else "participants.tsv", chosen.annotations.path if chosen.annotations else ""]
    yield from _report_unmatched(infos, table_rows, annotations, named)
    yield from units


def _report_unmatched(
    infos: Mapping[str, RecordingInfo],
    table_rows: Mapping[str, Attributes],
    annotations: Mapping[str, list[Annotation]],
    files: Sequence[str],
) -> Iterator[Finding]:
    """Warnings about recordings without a known subject, without a row in the table, and about rows without a recording; `files`: of both."""
    alone = [rel for rel, info in infos.items() if info.subject_id == info.recording_id and not info.series]
    if len(infos) > 1 and alone:
        text = f"{len(alone)} recordings with unknown subjects, each counted as a subject of its own"
        action = "Give --map (generic) with a match or a table where several are of one person"
        wanted = "recordings of one person in two splits make scores optimistic"
        yield input_warning(Reason.IDENTIFIER, text, wanted, action, file=alone[0], count=len(alone))
    keys = {key for rel, info in infos.items() for key in (*_recording_keys(rel), info.subject_id)}
    for what, table, file in zip(("the table", "the table of annotations"), (table_rows, annotations), files, strict=True):
        if extra := [key for key in table if key not in keys]:
            text = f"{len(extra)} recordings or subjects of {what} have no file here"
            yield input_warning(Reason.UNMATCHED_LABELS, text, "their rows are not used", file=file, count=len(extra))
    lacking = [rel for rel, info in infos.items() if table_rows and not {*_recording_keys(rel), info.subject_id} & table_rows.keys()]
    if lacking:
        text = f"{len(lacking)} recordings have no row in the table"
        yield input_warning(Reason.UNMATCHED_LABELS, text, "they have no label", file=lacking[0], count=len(lacking))


def find_suffix(rel: str) -> str:
    """The ending of a file's name, in lower case."""
    name = rel.lower()
    return next((end for end in (".csv.gz", ".fif.gz") if name.endswith(end)), PurePosixPath(name).suffix)


def strip_suffix(rel: str) -> str:
    """The path without its ending."""
    return rel[: len(rel) - len(find_suffix(rel))]


def _recording_keys(rel: str) -> tuple[str, ...]:
    """Names of a recording that a table may use."""
    return (strip_suffix(rel), rel, PurePosixPath(strip_suffix(rel)).name, PurePosixPath(rel).name)


def _name_units(rels: list[str]) -> dict[str, str]:
    """File -> name of its unit: the path without ending, with it where two would be equal."""
    often = Counter(strip_suffix(rel) for rel in rels)
    return {rel: strip_suffix(rel) if often[strip_suffix(rel)] == 1 else rel for rel in rels}


def describe_recording(
    rel: str,
    name: str,
    files: FileRule,
    chosen: RecordingMap,
    table_rows: Mapping[str, Attributes],
    annotations: Mapping[str, list[Annotation]],
    options: IngestOptions,
) -> RecordingInfo:
    """Properties of a recording by the map, its tables and the path."""
    matched = re.search(files.match, rel) if files.match else None
    groups = {key: value for key, value in (matched.groupdict() if matched else {}).items() if value is not None}
    bids = BIDS.search(rel)
    subject = groups.get("subject") or files.subject or (bids[1] if bids else "")
    row = next((table_rows[key] for key in (*_recording_keys(rel), subject) if key in table_rows), {})
    subject = str(row.get("subject") or subject or name)
    attributes = {key: value for key, value in row.items() if key != "subject"}
    if label := groups.get("label") or files.label:
        attributes.setdefault("label", label)
    if "value" in groups:
        with locate_errors(rel):
            attributes.setdefault("value", tables.parse_number(groups["value"]))
    channels = files.channels if isinstance(files.channels, dict) else {channel: channel for channel in files.channels}
    noted = tuple(sorted(note for key in dict.fromkeys(_recording_keys(rel)) for note in annotations.get(key, ())))
    numeric = chosen.annotations is not None and bool(chosen.annotations.value)
    return RecordingInfo(
        recording_id=name,
        subject_id=subject,
        attributes=attributes,
        notes=() if numeric else noted,
        numbers=noted if numeric else (),
        channels={key: (to, "") if isinstance(to, str) else (to.name, to.unit) for key, to in channels.items()},
        labels=chosen.labels,
        rate=files.rate,
        unit=files.unit,
        variable=files.variable,
        time=files.time,
        series=files.series,
        columns={
            key: column
            for key, column in zip(
                ("id", "subject", "label", "value"),
                (files.id_column, files.subject_column, files.label_column, files.value_column),
                strict=True,
            )
            if column
        },
        delimiter="\t" if find_suffix(rel) == ".tsv" else files.delimiter,
        keep_dates=bool(options.get("keep_dates")),
        keep_phi=bool(options.get("keep_phi")),
    )


def make_unit(source: Source, rel: str, kind: Format, info: RecordingInfo, *, bids: bool) -> IngestUnit:
    """One recording. Raises UserError for what is wrong with its header or with its events."""
    path = source.path(rel)
    files = [rel]
    if bids:
        events = f"{rel[: len(strip_suffix(rel))].rpartition('_')[0]}_events.tsv"
        if events in source.files:
            files.append(events)
            info = replace(info, notes=(*info.notes, *_read_bids_events(source.path(events), events)))
    if kind == "wfdb":
        with locate_errors(rel):
            names = format_wfdb.read_header(rel, source, required=tuple(info.channels)).files
        own = replace(source, files={name: source.files[name] for name in names}, rejected={})
        return IngestUnit(name=info.recording_id, files=tuple(dict.fromkeys([*files, *names])), read=partial(read_wfdb, own, rel, info))
    if kind in {"npy", "mat"} and info.rate is None:
        raise usage_error("has no sampling rate", "expected `rate` in [[files]] of the map")
    if kind == "mne":
        files += [
            name
            for name in source.files
            if strip_suffix(name) == strip_suffix(rel) and find_suffix(name) in COMPANIONS.get(find_suffix(rel), ())
        ]
    if info.series:
        return IngestUnit(name=info.recording_id, files=tuple(files), read=partial(read_series, path, rel, info))
    readers: dict[Format, Callable[[Path, str, RecordingInfo], Record]] = {
        "edf": read_edf,
        "table": read_table,
        "npy": read_npy,
        "mat": read_mat,
        "mne": read_mne,
    }
    return IngestUnit(name=info.recording_id, files=tuple(files), read=partial(readers[kind], path, rel, info))


def find_segments(source: Source, headers: Iterable[str]) -> set[str]:
    """Header files that are segments of another record, or the layout of one."""
    found: set[str] = set()
    for rel in headers:
        if rel in source.rejected:
            continue
        try:
            with source.path(rel).open("rb") as file:
                head = file.read(1 << 12).split(b"\n")
                first = next((line for line in head if line.strip() and not line.startswith(b"#")), b"")
                if b"/" not in (first.split() or [b""])[0]:
                    continue
                file.seek(0)
                parsed = format_wfdb.parse_header(file.read(format_wfdb.MAX_HEADER + 1), PurePosixPath(rel).stem, required=())
        except (OSError, UserError) as error:
            raise_system_error(error, source.path(rel), stored=False)
            continue  # its unit reports that
        folder = PurePosixPath(rel).parent
        found |= {(folder / f"{name}.hea").as_posix() for name, _ in parsed.segments or () if name != "~"}
    return found - {rel for rel in found if rel not in source.files}


# --- tables beside the recordings


def _read_attributes(source: Source, table: TableRule) -> tuple[list[SourceRows | Finding], dict[str, Attributes]]:
    """Recording or subject -> attributes (`subject`, `label`, `value`, others by their columns); the account of the rows.

    Raises UserError: schema, config, duplicate_key and the faults of the file.
    """
    key = table.file or table.subject
    if not key:
        raise usage_error("names no column of files or subjects", "expected `file` or `subject`", file=table.path, field="table")
    wanted = {"subject": table.subject, "label": table.label, "value": table.value, "split": table.split}
    columns = {name: column for name, column in {**wanted, **{name: name for name in table.attributes}}.items() if column}
    out: dict[str, Attributes] = {}
    faults: list[Finding] = []
    dropped: Counter[str] = Counter()
    with locate_errors(table.path):
        path = source.path(table.path)
        names = list(dict.fromkeys([key, *columns.values(), *table.labels]))
        for row in tables.read_rows(path, names, key=[key], delimiter=table.delimiter):
            if isinstance(row, Finding):
                if row.level == "warning":
                    dropped[str(row.code)] += 1
                else:
                    faults.append(row.at(table.path))
                continue
            cells = {name: cell.strip() for name, cell in zip(names, row.cells, strict=True)}
            found = _parse_attributes(row.row, cells, columns, table)
            if isinstance(found, Finding):
                faults.append(found.at(table.path))
            else:
                out[cells[key]] = found
        seen = tables.count_rows(path, delimiter=table.delimiter)
    account = SourceRows(file=table.path, seen=seen, dropped=dict(dropped), quarantined=count_reasons(faults))
    return [account, *faults[:20]], out


def _parse_attributes(row: int, cells: Mapping[str, str], columns: Mapping[str, str], table: TableRule) -> Attributes | Finding:
    """The attributes of one row, or its fault; `cells`: by column, `columns`: attribute -> column."""
    out: dict[str, AttributeValue] = {}
    for name, column in columns.items():
        cell = cells[column]
        if name == "value":
            try:
                value = tables.parse_number(cell)
            except UserError as error:
                return replace(error.finding, row=row, field=column, problem=f"the cell {error.problem}")
            out |= {} if value is None else {name: value}
        elif name == "split" and table.split and cell.lower() not in EMPTY_CELLS:
            place = parse_split(cell)
            if place is None:
                text, wanted = f"the cell of row {row} is no split", "expected train, validation, test, a fold from 1 to 10, or 1-8"
                return Finding(Reason.LABEL, text, wanted, field=column, row=row)
            out |= place
        elif cell.lower() not in EMPTY_CELLS:
            out[name] = cell
    flags = {name: FLAGS.get(cells[name]) for name in table.labels}
    if wrong := [name for name, flag in flags.items() if flag is None]:
        return Finding(Reason.LABEL, f"the cell of row {row} is neither 0 nor 1", "expected one of them", field=wrong[0], row=row)
    return out | ({"labels": [name for name, flag in flags.items() if flag]} if flags else {})


def parse_split(cell: str) -> dict[str, AttributeValue] | None:
    """Attribute of a recording by the cell of a column of splits: `split` (train, validation, test) or `fold` (1 to 10), None for another text.

    A range of folds, such as 1-8, states a split where all its folds are of one: 1 to 8 are train, 9 validation, 10 test.
    """
    if named := SPLIT_NAMES.get(cell.lower()):
        return {"split": named}
    folds = re.fullmatch(r"(\d{1,2})(?:\.0*)?(?:\s*-\s*(\d{1,2}))?", cell, re.ASCII)
    if folds is None:
        return None
    first, last = int(folds[1]), int(folds[2] or folds[1])
    if not 1 <= first <= last <= FOLDS:
        return None
    if folds[2] is None:
        return {"fold": float(first)}
    return {"split": "train"} if last <= FOLDS - 2 else None


def _read_participants(source: Source) -> tuple[list[SourceRows | Finding], dict[str, Attributes]]:
    """Age and sex of a BIDS folder's participants.tsv, where it has them."""
    rel = "participants.tsv"
    if rel not in source.files:
        return [], {}
    with locate_errors(rel):
        columns = tables.read_names(source.path(rel), delimiter="\t")
    known = tuple(name for name in ("age", "sex") if name in columns)
    table = TableRule(path=rel, subject="participant_id", attributes=known, delimiter="\t")
    rows, found = _read_attributes(source, table)
    return rows, {key.removeprefix("sub-"): {**row, "subject": key.removeprefix("sub-")} for key, row in found.items()}


def _read_annotations(source: Source, table: AnnotationRule) -> tuple[list[SourceRows | Finding], dict[str, list[Annotation]]]:
    """Recording -> annotations of the map's table; the account of the rows."""
    out: dict[str, list[Annotation]] = {}
    faults: list[Finding] = []
    empty = 0
    columns = [table.file, table.onset, table.value or table.label, *([table.duration] if table.duration else [])]
    with locate_errors(table.path):
        path = source.path(table.path)
        for row in tables.read_rows(path, columns, delimiter=table.delimiter):
            note = row if isinstance(row, Finding) else _parse_annotation(row, table)
            if isinstance(note, Finding):
                faults.append(note.at(table.path))
            elif not isinstance(row, Finding):
                out.setdefault(row.cells[0].strip(), []).append(note)
                empty += bool(table.value) and note.label == EMPTY_NUMBER
        seen = tables.count_rows(path, delimiter=table.delimiter)
    if not table.duration:
        out = {key: _extend_to_next(notes) for key, notes in out.items()}
    if table.value:
        out = {key: [note for note in notes if note.label != EMPTY_NUMBER] for key, notes in out.items()}
    dropped = {str(Reason.MISSING_VALUES): empty} if empty else {}
    account = SourceRows(file=table.path, seen=seen, dropped=dropped, quarantined=count_reasons(faults))
    return [account, *faults[:20]], out


def _parse_annotation(row: tables.TableRow, table: AnnotationRule) -> Annotation | Finding:
    """One row of the map's table. A number is kept as a text that reads back as the same; an empty one ends the value before it."""
    _, onset, text, *duration = row.cells
    if table.value and text.strip().lower() in EMPTY_CELLS:
        text = EMPTY_NUMBER
    note = _make_annotation(row.row, onset, duration[0] if duration else "0", text)
    if isinstance(note, Finding) or not table.value or text == EMPTY_NUMBER:
        return note
    if duration and not note.duration:
        wanted = 'expected a duration in seconds; with duration = "" in the map a number holds until the next row'
        return Finding(Reason.ANNOTATION_SYNTAX, f"row {row.row} lasts 0 s", wanted, field=table.duration, row=row.row)
    try:
        return note._replace(label=repr(tables.parse_number(text)))
    except UserError as error:
        return replace(error.finding, row=row.row, field=table.value, problem=f"the cell of row {row.row} {error.problem}")


def _extend_to_next(notes: list[Annotation]) -> list[Annotation]:
    """Each lasts until the next one that begins later; the last ones have no end."""
    begins = sorted({note.onset for note in notes})
    ends = dict(zip(begins, [*begins[1:], math.inf], strict=True))
    return [note._replace(duration=ends[note.onset] - note.onset) for note in notes]


def _read_bids_events(path: Path, rel: str) -> list[Annotation]:
    """Annotations of an events.tsv: trial_type, else value, is the text. Raises UserError for a faulty row."""
    with locate_errors(rel):
        columns = tables.read_names(path, delimiter="\t")
        text = next((name for name in ("trial_type", "value") if name in columns), None)
        if text is None:
            return []
        out = []
        for row in tables.read_rows(path, ["onset", "duration", text], delimiter="\t"):
            note = (
                row
                if isinstance(row, Finding)
                else _make_annotation(row.row, *(("0" if cell.strip().lower() in EMPTY_CELLS else cell) for cell in row.cells))
            )
            if isinstance(note, Finding):
                raise input_error(note.code, note.problem, note.requirement, field=note.field, row=note.row)
            out.append(note)
    return out


def _make_annotation(row: int, onset: str, duration: str, label: str) -> Annotation | Finding:
    try:
        times = [tables.parse_number(cell) or 0.0 for cell in (onset, duration)]
    except UserError as error:
        return Finding(Reason.ANNOTATION_SYNTAX, f"onset or duration {error.problem}", "expected seconds", row=row)
    if times[1] < 0 or not label.strip():
        return Finding(Reason.ANNOTATION_SYNTAX, "a negative duration or no label", row=row)
    return Annotation(times[0], times[1], label.strip())


# --- one recording


def read_edf(path: Path, rel: str, info: RecordingInfo) -> Record:
    """A file in EDF, EDF+ or BDF. Raises UserError as `formats.edf.read`."""
    with locate_errors(rel):
        found = format_edf.read_recording(path, required=tuple(info.channels))
        if info.keep_phi:
            found = replace(found, header=format_edf.read_header(path, required=tuple(info.channels), keep_phi=True))
    start = found.header.start
    begin = start + timedelta(seconds=found.origin) if start else None
    return _make_record(rel, info, found.signals, found.annotations, found.findings, begin, found.header.phi)


def read_wfdb(source: Source, rel: str, info: RecordingInfo) -> Record:
    """A WFDB record with its segments. Raises UserError as `formats.wfdb.read`."""
    found = format_wfdb.read_recording(rel, source, required=tuple(info.channels), keep_phi=info.keep_phi)
    phi = {"comments": "\n".join(found.header.comments)} if found.header.comments else {}
    return _make_record(rel, info, found.signals, [], found.findings, found.header.start, phi)


def read_table(path: Path, rel: str, info: RecordingInfo) -> Record:
    """A csv or Parquet table with a column a channel and a row a sample; empty cells are missing values."""
    with locate_errors(rel):
        columns = tables.read_names(path, delimiter=info.delimiter)
        names = list(info.channels) or [name for name in columns if name and name != info.time]
        if names and all(map(tables.NUMBER.fullmatch, names)) and not info.channels:
            raise input_error(
                Reason.HEADER, "the first line holds numbers", "expected names of channels: is the header line absent?", row=1
            )
        order = [*([info.time] if info.time else []), *names]
        values = tables.read_number_table(path, order, missing=EMPTY_CELLS, delimiter=info.delimiter)
        if not len(values):
            raise input_error(Reason.TRUNCATED, "has no rows below its header", hint="Download it again")
        rate = _check_clock(values[:, 0], info) if info.time else info.rate
        if rate is None:
            raise input_error(Reason.SAMPLING_RATE, "has no sampling rate", "expected `rate` or `time` in [[files]] of the map")
        own = values[:, 1:] if info.time else values
        with np.errstate(over="ignore"):
            signals = [Signal(name, rate, "", np.ascontiguousarray(own[:, i], np.float32)) for i, name in enumerate(names)]
    lost = int(np.isnan(own).sum())
    missing = [input_warning(Reason.MISSING_VALUES, f"{lost} cells are empty", "kept as missing (NaN)", count=lost)] if lost else []
    return _make_record(rel, replace(info, rate=None), signals, [], missing)


def read_series(path: Path, rel: str, info: RecordingInfo) -> Records:
    """A table with a recording a row: the columns of `info.series` are its samples. Faulty rows are counted and left out."""
    with locate_errors(rel):
        if info.rate is None:
            raise input_error(Reason.CONFIG, "has no sampling rate", "expected `rate` in [[files]] of the map")
        columns = tables.read_names(path, delimiter=info.delimiter)
        samples = [name for name in columns if fnmatch.fnmatchcase(name, info.series) and name not in info.columns.values()]
        if not samples:
            text = f"has no column that matches {safe_text(info.series)}"
            raise input_error(Reason.SCHEMA, text, f"found {', '.join(map(safe_text, columns[:12]))}", field="series")
        key = [info.columns["id"]] if "id" in info.columns else []
        order = [*info.columns.values(), *samples]
        records: list[Record] = []
        faults: list[Finding] = []
        dropped: Counter[str] = Counter()
        for row in tables.read_rows(path, order, key=key, delimiter=info.delimiter):
            if isinstance(row, Finding) and row.level == "warning":
                dropped[str(row.code)] += 1
                continue
            found = row if isinstance(row, Finding) else _make_series_record(row, samples, info)
            if isinstance(found, Finding):
                faults.append(found.at(rel))
            else:
                records.append(found)
        seen = tables.count_rows(path, delimiter=info.delimiter)
    findings = tser.report_faults(faults)
    if len(records) > 1 and "subject" not in info.columns:
        text = f"{len(records)} rows with unknown subjects, each counted as a subject of its own"
        wanted = "recordings of one person in two splits make scores optimistic"
        findings.append(input_warning(Reason.IDENTIFIER, text, wanted, "Give subject_column", file=rel))
    account = SourceRows(
        file=rel, kind="segments", seen=seen, dropped=dict(dropped), quarantined=dict(Counter(str(fault.code) for fault in faults))
    )
    return Records(records=records, rows=[account], findings=findings)


def _make_series_record(row: tables.TableRow, samples: list[str], info: RecordingInfo) -> Record | Finding:
    """One row as a recording, or its fault."""
    cells = {key: cell.strip() for key, cell in zip(info.columns, row.cells, strict=False)}
    values = tables.parse_numbers(tables.TableRow(row.row, row.cells[len(info.columns) :]), samples)
    if isinstance(values, Finding):
        return values
    attributes = dict(info.attributes)
    if cells.get("label", "").lower() not in EMPTY_CELLS:
        attributes["label"] = cells["label"]
    try:
        value = tables.parse_number(cells.get("value", ""))
    except UserError as error:
        return replace(error.finding, row=row.row, field=info.columns["value"], problem=f"the cell of row {row.row} {error.problem}")
    if value is not None:
        attributes["value"] = value
    if "subject" in cells and cells["subject"].lower() in EMPTY_CELLS:
        return Finding(Reason.IDENTIFIER, f"row {row.row} has no subject", "expected one", field=info.columns["subject"], row=row.row)
    assert info.rate is not None
    name, unit = next(iter(info.channels.values()), ("channel 1", ""))
    with np.errstate(over="ignore"):
        signal = Signal(name, info.rate, unit or info.unit, values.astype(np.float32))
    recording = f"{info.recording_id}-{cells.get('id') or f'{row.row:06d}'}"
    return Record(recording_id=recording, subject_id=cells.get("subject") or recording, signals=[signal], attributes=attributes)


def _check_clock(times: np.ndarray, info: RecordingInfo) -> float:
    """Sampling rate in Hz of a column of times in seconds.

    Raises UserError: timestamps for gaps in time or repeated times, sampling_rate where the map states another rate.
    """
    if len(times) < 2 or np.isnan(times).any() or times[-1] <= times[0]:
        raise input_error(Reason.TIMESTAMPS, "the times do not increase, or one is missing", field=info.time)
    rate = info.rate or (len(times) - 1) / float(times[-1] - times[0])
    off = np.abs(times - times[0] - np.arange(len(times)) / rate) * rate
    if off.max() > 0.75:  # of a sample: times may be rounded
        row = int(np.argmax(off > 0.75))
        code = Reason.SAMPLING_RATE if info.rate else Reason.TIMESTAMPS
        text = f"the time of sample {row + 1} is {off[row]:.3g} samples off a clock of {rate:.6g} Hz"
        raise input_error(code, text, "expected a row for every sample", field=info.time)
    return rate


def read_npy(path: Path, rel: str, info: RecordingInfo) -> Record:
    """An array [samples] or [samples, channels] of int16 (kept) or other numbers (float32)."""
    with locate_errors(rel):
        try:
            values = np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            unsafe = "pickle" in str(error).lower() or "object" in str(error).lower()
            code = Reason.UNSAFE_PICKLE if unsafe else Reason.CORRUPT
            raise input_error(code, "is not a .npy file of numbers", "only arrays of numbers are read") from None
        except (OSError, EOFError, SyntaxError) as error:
            raise_system_error(error, path, stored=False)
            raise input_error(Reason.CORRUPT, f"does not read as .npy ({type(error).__name__})", hint="Save it again") from None
        if values.dtype.kind not in "iuf" or values.ndim not in {1, 2} or values.size == 0:
            raise input_error(
                Reason.DIMENSIONS, f"is an array of {values.ndim} dimensions of {values.dtype}", "expected [samples, channels]"
            )
        signals = _make_array_signals(np.asarray(values).reshape(len(values), -1), info)
    return _make_record(rel, info, signals, [], [])


def read_mat(path: Path, rel: str, info: RecordingInfo) -> Record:
    """An array of a MATLAB 5 file, as `read_npy`; one with a row a channel, by the channels of the map or because it is wider than tall, is turned."""
    with locate_errors(rel):
        values = matlab.read_array(path, info.variable)
        if values.ndim != 2 or values.size == 0:
            text = f"is an array of {' x '.join(map(str, values.shape))}"
            raise input_error(Reason.DIMENSIONS, text, "expected [samples, channels] or [channels, samples]", field="variable")
        tall, wide = (count == len(info.channels) for count in values.shape[::-1])
        if (wide and not tall) or (wide == tall and values.shape[0] < values.shape[1]):
            values = values.T
        signals = _make_array_signals(values, info)
    return _make_record(rel, info, signals, [], [])


def _make_array_signals(table: np.ndarray, info: RecordingInfo) -> list[Signal]:
    """The columns of [samples, channels] as signals: int16 as it is, else float32. Raises UserError: dimensions."""
    names = list(info.channels) or [f"channel {i}" for i in range(1, table.shape[1] + 1)]
    if len(names) != table.shape[1]:
        raise input_error(Reason.DIMENSIONS, f"has {table.shape[1]} columns", f"the map names {len(names)} channels")
    kind = np.int16 if table.dtype == np.int16 else np.float32
    with np.errstate(over="ignore"):
        return [Signal(name, info.rate or 1.0, "", np.ascontiguousarray(table[:, i], kind)) for i, name in enumerate(names)]


def read_mne(path: Path, rel: str, info: RecordingInfo) -> Record:
    """Any other format, through mne; volts become uV."""
    import mne

    with locate_errors(rel):
        if find_suffix(rel) == ".vhdr":
            _require_same_folder(re.findall(r"^\s*(?:DataFile|MarkerFile)\s*=\s*(.+?)\s*$", path.read_text("latin-1"), re.MULTILINE))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                raw = mne.io.read_raw(path, preload=False, verbose="ERROR")
                for name in raw.filenames:
                    if name is not None and os.path.normpath(Path(name).parent) != os.path.normpath(path.parent):
                        raise input_error(Reason.PATH_ESCAPE, "names a file in another folder", "which is not read")
                values = raw.get_data(verbose="ERROR")
            kinds = raw.get_channel_types()
            rate = float(raw.info["sfreq"])
            start = raw.info["meas_date"]
            found = [Annotation(float(a["onset"]), float(a["duration"]), str(a["description"])) for a in raw.annotations]
        except UserError:
            raise
        except Exception as error:  # each of mne's readers fails in ways of its own
            raise_system_error(error, path, stored=False)
            raise input_error(
                Reason.CORRUPT, f"mne does not read it ({type(error).__name__})", hint="Open it with mne to see more"
            ) from None
        signals: list[Signal] = []
        for name, kind, channel in zip(raw.ch_names, kinds, values, strict=True):
            electric = kind in ELECTRIC
            with np.errstate(over="ignore"):
                samples = (channel * 1e6 if electric else channel).astype(np.float32)
            signals.append(Signal(sanitize_label(name) or f"channel {len(signals) + 1}", rate, "uV" if electric else "", samples))
    return _make_record(rel, info, signals, found, [], start.replace(tzinfo=None) if start else None)


def _require_same_folder(names: Iterable[str]) -> None:
    """Raises UserError (path_escape) for a name that is more than that of a file in the same folder."""
    for name in names:
        if PurePosixPath(name).name != name or "\\" in name:
            raise input_error(Reason.PATH_ESCAPE, f"names the file {safe_text(name)}", "which must be in the same folder")


def _make_record(
    rel: str,
    info: RecordingInfo,
    signals: list[Signal],
    notes: list[Annotation],
    findings: Iterable[Finding],
    start: datetime | None = None,
    phi: Mapping[str, str] | None = None,
) -> Record:
    """The recording with the channels, units and labels of the map.

    Raises UserError: no_input without signals, missing_channel, unit, sampling_rate.
    """
    out = [finding.at(rel) for finding in findings]
    with locate_errors(rel):
        chosen = _select_channels(signals, info)
    end = max(signal.onset + len(signal.samples) / signal.rate for signal in chosen)
    kept, remarks = _select_annotations(notes, info, end)
    return Record(
        recording_id=info.recording_id,
        subject_id=info.subject_id,
        signals=chosen,
        annotations=kept,
        attributes={**info.attributes, **(phi or {})},
        start_time=start.isoformat() if start and info.keep_dates else None,
        findings=[*out, *(finding.at(rel) for finding in remarks)],
    )


def _select_channels(signals: list[Signal], info: RecordingInfo) -> list[Signal]:
    """The channels of the map under their names, else all; in the units of the map."""
    if not signals or not any(len(signal.samples) for signal in signals):
        raise input_error(Reason.NO_INPUT, "holds no signals", "files of annotations alone are no recordings")
    names = dict.fromkeys(signal.channel for signal in signals)
    channels = info.channels or {name: (name, "") for name in names}
    missing = [name for name in channels if name not in names]
    if missing:
        text = f"has no channel {safe_text(missing[0])}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
        wanted = f"found {', '.join(safe_text(name) for name in list(names)[:12])}"
        raise input_error(Reason.MISSING_CHANNEL, text, wanted, field="channels", expected=safe_text(missing[0]))
    out = []
    for name, (to, unit) in channels.items():
        for signal in (signal for signal in signals if signal.channel == name and len(signal.samples)):
            if info.rate is not None and not math.isclose(signal.rate, info.rate, rel_tol=1e-6):
                text = f"{safe_text(name)} is sampled at {signal.rate:g} Hz"
                raise input_error(Reason.SAMPLING_RATE, text, f"the map states {info.rate:g} Hz", field="rate")
            out.append(_convert_unit(signal, unit or info.unit)._replace(channel=to))
    return out


def _convert_unit(signal: Signal, unit: str) -> Signal:
    """The signal in `unit`: a signal without a unit is assumed to have it, volts are converted, others are refused."""
    stored, wanted = signal.unit.strip().casefold(), unit.strip().casefold()
    if not wanted or stored == wanted:
        return signal
    if not stored:
        return signal._replace(unit=unit)
    if stored not in VOLTS or wanted not in VOLTS:
        text = f"{safe_text(signal.channel)} is in {safe_text(signal.unit)}"
        raise input_error(Reason.UNIT, text, f"the map states {safe_text(unit)}", field="unit", found=safe_text(signal.unit))
    return scale_signal(signal, VOLTS[stored] / VOLTS[wanted], unit)


def _select_annotations(notes: list[Annotation], info: RecordingInfo, end: float) -> tuple[list[Annotation], list[Finding]]:
    """Annotations of the file and of tables, mapped and clipped to the signal; findings on the excluded ones."""
    mapped = info.labels
    inside = (
        [note._replace(label=mapped[note.label]) for note in notes if note.label in mapped]
        if mapped is not None
        else notes
        if info.keep_phi
        else []
    )
    outside = [note._replace(label=mapped[note.label]) for note in info.notes if note.label in mapped] if mapped is not None else info.notes
    findings = []
    if left := len(notes) - len(inside) + len(info.notes) - len(outside):
        text = f"annotations whose texts are no labels of the map: {left}"
        findings.append(Finding(Reason.UNKNOWN_LABEL, text, "counted, not kept: texts can hold names", level="info", count=left))
    kept, cut = [], 0
    for note in sorted([*inside, *outside, *info.numbers]):
        begin, stop = max(note.onset, 0.0), min(note.onset + note.duration, end)
        cut += note.onset < 0 or note.onset > end or end + 1e-6 < note.onset + note.duration < math.inf
        if begin < end and stop >= begin:
            kept.append(note._replace(onset=begin, duration=stop - begin))
    if cut:
        text = f"annotations that reach beyond the signal: {cut}"
        findings.append(input_warning(Reason.ANNOTATION_OUT_OF_RANGE, text, "that part is dropped", count=cut))
    return kept, findings
