"""A mapping file for a folder, made of what is found there, with comments where the files leave a
choice.
"""

from __future__ import annotations

import glob
import json
import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np

from bitimely_core.config import validate
from bitimely_core.errors import Finding, Reason, UserError, clean, input_error
from bitimely_core.formats import edf, edf_header, tables, wfdb
from bitimely_core.formats.source import Source
from bitimely_core.formats.wfdb_annotations import read_annotations
from bitimely_core.recordings.files import BIDS_FILES, DERIVED, LAYOUT, find_segments
from bitimely_core.recordings.mapping import (
    EMPTY_CELLS,
    SUFFIXES,
    RecordingMap,
    find_suffix,
    list_recording_keys,
)
from bitimely_core.system_errors import raise_system_error

FILES = 200  # of a group whose headers are read
NIGHTS = 20  # of a group whose annotations are read
ROWS = 1000  # of a table
GROUPS = 12  # folders and endings in groups of their own
ASSUMED_RATE = 1.0  # Hz, of files that state none
TIMES = {
    "t",
    "time",
    "times",
    "sec",
    "seconds",
    "time_s",
    "time_sec",
    "time (s)",
    "time[s]",
    "timestamp",
}
ROLES = {  # key of [table] -> usual names of its column
    "subject": {
        "subject",
        "subject_id",
        "patient",
        "patient_id",
        "participant",
        "participant_id",
        "person",
        "person_id",
        "id",
    },
    "label": {
        "label",
        "class",
        "diagnosis",
        "target",
        "group",
        "condition",
        "y",
        "category",
        "outcome",
    },
    "split": {"split", "fold", "strat_fold"},
}


class TableContent(NamedTuple):
    """The first rows of a table: name of a column -> its cells."""

    columns: dict[str, list[str]]

    def list_numeric(self) -> list[str]:
        """Columns of numbers and empty cells alone."""
        return [
            name
            for name, cells in self.columns.items()
            if name and all(_is_number(cell) for cell in cells)
        ]


def write_template(source: Source) -> str:
    """The text of a map with which `source` is read as it is; what has to be filled in is marked
    so.

    Raises UserError: no_input (exit 4) for a folder without recordings.
    """
    rels = list(_list_recordings(source))
    contents = {
        rel: found
        for rel in rels
        if SUFFIXES[find_suffix(rel)] == "table"
        and (found := _read_content(source, rel)) is not None
    }
    keys = {key for rel in rels if rel not in contents for key in list_recording_keys(rel)}
    beside = {
        rel: column
        for rel, content in contents.items()
        if (column := _find_file_column(rel, content, rels, keys))
    }
    groups: dict[tuple[str, str], list[str]] = {}
    for rel in (rel for rel in rels if rel not in beside):
        groups.setdefault((str(PurePosixPath(rel).parent), find_suffix(rel)), []).append(rel)
    if len(groups) > GROUPS:
        merged: dict[tuple[str, str], list[str]] = {}
        for (_, ending), members in groups.items():
            merged.setdefault((".", ending), []).extend(members)
        groups = merged
    if not groups:
        raise input_error(
            Reason.NO_INPUT,
            "no recordings there",
            f"expected {', '.join(SUFFIXES)}",
            file=str(source.root),
        )
    lines = [
        "# Map of a folder for: bitimely ingest generic FOLDER --map THIS-FILE",
        "# All keys: docs/generic.md. Lines with TO STATE hold what no file says.",
    ]
    texts: Counter[str] = Counter()
    for (folder, ending), members in sorted(
        groups.items(), key=lambda item: (-item[0][0].count("/"), item[0][0] == ".", item[0])
    ):
        pattern = f"*{ending}" if folder == "." else f"{glob.escape(folder)}/*{ending}"
        lines += [
            "",
            "[[files]]",
            f"pattern = {_quote(pattern)}  # {len(members)} files, such as {clean(members[0], 100)}",
        ]
        lines += [
            '# match = "(?P<subject>[^/_]+)_"  # TO STATE where several recordings are of one person: a regular expression on the path'
        ]
        lines += _describe_group(source, members, contents, texts)
    for rel, column in beside.items():
        lines += ["", *_describe_table(rel, column, contents[rel])]
    if texts:
        lines += [
            "",
            "# [labels]  # texts of annotations -> classes; with this section the texts that are not in it are left out",
        ]
        lines += [
            f"# {_quote(text)} = {_quote(text)}  # {count} times"
            for text, count in texts.most_common(100)
        ]
    text = "\n".join(lines) + "\n"
    validate(RecordingMap, tomllib.loads(text), "the map")
    return text


def _list_recordings(source: Source) -> Iterator[str]:
    """Files that are recordings or tables of them; .mat files, which are often copies, where there
    are no others.
    """
    bids = any(name in source.files for name in BIDS_FILES)
    known = [
        rel
        for rel in source.files
        if find_suffix(rel) in SUFFIXES and not (bids and rel.startswith(DERIVED))
    ]
    segments = find_segments(source, [rel for rel in known if find_suffix(rel) == ".hea"])
    others = {".mat", ".tsv"} if bids else {".mat"}
    kept = [
        rel
        for rel in known
        if not LAYOUT.fullmatch(PurePosixPath(rel).name) and find_suffix(rel) not in others
    ]
    yield from [rel for rel in kept if rel not in segments] or (
        rel for rel in known if find_suffix(rel) == ".mat"
    )


def _quote(text: str) -> str:
    return json.dumps(clean(text, 200), ensure_ascii=False)


def _is_number(cell: str) -> bool:
    return cell.strip().lower() in EMPTY_CELLS or tables.NUMBER.fullmatch(cell.strip()) is not None


def _read_content(source: Source, rel: str) -> TableContent | None:
    """The first rows of a table, None for one that does not read."""
    try:
        mark = "\t" if find_suffix(rel) == ".tsv" else ","
        names = tables.read_names(source.path(rel), delimiter=mark)
        rows = [
            row
            for row in islice(tables.read_rows(source.path(rel), delimiter=mark), ROWS)
            if not isinstance(row, Finding)
        ]
    except UserError as error:
        raise_system_error(error)
        return None  # the ingest says why
    return TableContent({name: [row.cells[i] for row in rows] for i, name in enumerate(names)})


def _find_file_column(rel: str, content: TableContent, rels: Sequence[str], keys: set[str]) -> str:
    """The column of a table that names most of the recordings, "" for a table that is a
    recording.
    """
    others = keys or {key for other in rels if other != rel for key in list_recording_keys(other)}
    for name, cells in content.columns.items():
        if name and cells and 2 * sum(cell.strip() in others for cell in cells) > len(cells):
            return name
    return ""


def _describe_group(
    source: Source, rels: Sequence[str], contents: dict[str, TableContent], texts: Counter[str]
) -> list[str]:
    """Lines of a group of files: rates and channels; their annotations are counted in `texts`."""
    kind = SUFFIXES[find_suffix(rels[0])]
    if kind == "table":
        return _describe_columns([contents[rel] for rel in rels if rel in contents])
    if kind in {"npy", "mat"}:
        shown = (
            ['# variable = "..."  # TO STATE: the array, unless it is the only one']
            if kind == "mat"
            else []
        )
        return [
            *shown,
            *_format_assumed_rate(),
            '# channels = ["..."]  # TO STATE: names of the columns; else channel 1, channel 2 ...',
        ]
    channels: Counter[tuple[str, float]] = Counter()
    for number, rel in enumerate(rels[:FILES]):
        try:
            channels.update(
                set(_read_header(source, rel, kind, texts if number < NIGHTS else None))
            )
        except UserError as error:
            raise_system_error(error)  # the ingest says what is wrong with the file
    seen = min(len(rels), FILES)
    lines = [
        f"#   {_quote(name)} at {rate:g} Hz, in {count} of {seen} files"
        for (name, rate), count in channels.most_common(60)
    ]
    most = _quote(channels.most_common(1)[0][0][0]) if channels else '"name in the file"'
    return [
        *(["# channels:"] if lines else []),
        *lines,
        f'# channels = {{{most} = {{name = "name in the cache", unit = "uV"}}}}  # each must be there',
    ]


def _read_header(
    source: Source, rel: str, kind: str, texts: Counter[str] | None
) -> Iterator[tuple[str, float]]:
    """Channels and rates by the header of a file; its annotations are counted in `texts`."""
    if kind == "edf":
        header = edf_header.read_header(source.path(rel), required=())
        yield from ((channel.label, header.rate(channel)) for channel in header.channels)
        if texts is not None:
            texts.update(note.label for note in edf.read_annotations(source.path(rel), header)[0])
    elif kind == "wfdb":
        record = wfdb.read_header(rel, source, required=())
        yield from ((channel.name, record.rate(channel)) for channel in record.channels)
        beside = f"{rel.removesuffix('.hea')}.atr"
        if texts is not None and beside in source.files:
            texts.update(
                note.label
                for note in read_annotations(source.path(beside), record.frame_rate).list_codes(
                    "both"
                )
            )


def _format_assumed_rate() -> list[str]:
    return [
        f"rate = {ASSUMED_RATE}  # TO STATE: Hz; no file says it, and {ASSUMED_RATE:g} is assumed"
    ]


def _describe_columns(found: Sequence[TableContent]) -> list[str]:
    """Lines of tables with a column a channel: their clock, and the columns of numbers."""
    if not found:
        return _format_assumed_rate()
    numeric = found[0].list_numeric()
    time = next((name for name in numeric if name.strip().lower() in TIMES), "")
    rates = [_measure_rate(content.columns.get(time, ())) for content in found] if time else []
    often = Counter(name for content in found for name in content.list_numeric() if name != time)
    common = [name for name in numeric if often[name] == len(found)]
    lines = [
        f"#   {_quote(name)} in {count} of {len(found)} files"
        for name, count in often.most_common(60)
    ]
    clock = (
        [f"time = {_quote(time)}  # seconds, at {rates[0]:g} Hz"]
        if rates and all(rates)
        else _format_assumed_rate()
    )
    return [*clock, "# channels:", *lines, f"channels = [{', '.join(map(_quote, common))}]"]


def _measure_rate(cells: Iterable[str]) -> float:
    """Hz of a column with the times of the rows in seconds, 0.0 where it is no clock."""
    times = np.array(
        [float(cell) if tables.NUMBER.fullmatch(cell.strip()) else math.nan for cell in cells]
    )
    if len(times) < 2 or not np.isfinite(times).all() or times[-1] <= times[0]:
        return 0.0
    rate = (len(times) - 1) / float(times[-1] - times[0])
    return rate if np.abs((times - times[0]) * rate - np.arange(len(times))).max() <= 0.75 else 0.0


def _describe_table(rel: str, column: str, content: TableContent) -> list[str]:
    """Lines of a table with one row a recording, or an annotation."""
    names = {name.strip().lower(): name for name in content.columns if name and name != column}
    onset = next(
        (names[name] for name in ("onset", "start", "begin", "onset_s") if name in names), ""
    )
    roles = {
        role: found
        for role, usual in ROLES.items()
        if (found := next((names[name] for name in names if name in usual), ""))
    }
    head = [
        f"path = {_quote(rel)}",
        f"file = {_quote(column)}",
        *(['delimiter = "\\t"'] if find_suffix(rel) == ".tsv" else []),
    ]
    if onset and "label" in roles:
        duration = names.get("duration", "")
        return [
            "[annotations]",
            *head,
            f"onset = {_quote(onset)}",
            f"duration = {_quote(duration)}",
            f"label = {_quote(roles['label'])}",
        ]
    shown = ", ".join(map(_quote, names.values()))
    asked = [] if "label" in roles else ['# label = "..."  # TO STATE: the column of the classes']
    return [
        "[table]",
        *head,
        *(f"{role} = {_quote(name)}" for role, name in roles.items()),
        *asked,
        f"# columns: {shown}",
    ]
