"""Finds the table beside recordings that says whose they are and of which class, where no map
names it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, compress, filterfalse, islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from bitimely_core.errors import Finding, Reason, UserError, input_warning, safe_text
from bitimely_core.formats import tables
from bitimely_core.formats.sniffer import find_delimiter
from bitimely_core.formats.source import Source
from bitimely_core.formats.text import list_first
from bitimely_core.recordings.folder_tables import is_missing
from bitimely_core.recordings.mapping import (
    CLASSES,
    PARTS,
    PEOPLE,
    TableRule,
    fold_column,
    strip_suffix,
)

MOST_CLASSES = 50  # distinct texts of a column
LARGEST_TABLE = 1 << 26  # bytes
FIRST_ROWS = 50  # one of them names a recording, where the table does
SHOWN = 6  # classes or columns in a message
MARK = re.compile(r"[_\-. ]")  # behind the subject in the name of a recording


class ReferenceTable(NamedTuple):
    """A table of recordings, or of their subjects, that no map names."""

    rule: TableRule | None  # None: it is not clear which column is meant
    headed: bool  # else its first line is a row, whose cells are the names in `rule`
    findings: list[Finding]
    subjects: dict[str, str]  # recording -> subject, of a table with a row a subject


NO_REFERENCE = ReferenceTable(None, headed=True, findings=[], subjects={})


class ReferenceColumns(NamedTuple):
    """The columns of a table whose rows are recordings or subjects."""

    file: str  # the table
    key: str  # the column with the names of recordings or subjects
    bearers: dict[str, str]  # recording that a row is of -> the name in `key`
    headed: bool
    delimiter: str
    subject: str  # the column that says whose the recordings are; "": none
    cells: dict[str, list[str]]  # of the other columns, without empty ones
    classes: list[str]  # columns that can hold classes

    @property
    def is_of_subjects(self) -> bool:
        """Whether a row is of a subject, who may have several recordings."""
        return self.key == self.subject


class TableText(NamedTuple):
    """The cells of a small table."""

    path: Path
    delimiter: str
    names: list[str]

    def list_rows(self) -> Iterator[tuple[str, ...]]:
        """The cells of the rows below the first line, without those that are no rows."""
        for row in tables.read_rows(self.path, delimiter=self.delimiter):
            if isinstance(row, tables.TableRow):
                yield tuple(map(str.strip, row.cells))


def find_reference_table(
    source: Source, rels: Iterable[str], keys: Mapping[str, str], *, classes: bool = True
) -> ReferenceTable:
    """The table among `rels` that states subjects or classes of the recordings.

    A row is a recording, or else a subject whose name is a folder of recordings or begins their
    names. Where several columns, or tables, could hold the classes, a warning says what to state in
    the map; the subjects are read all the same.

    Args:
        source: the folder.
        rels: tables that are no recordings.
        keys: names of recordings in tables -> recording.
        classes: False: only subjects are looked for.
    """
    owners = _list_owner_names(set(keys.values()))
    stated = [table for rel in rels if (table := _find_table(source, rel, keys, owners))]
    if not classes:
        stated = [table._replace(classes=[]) for table in stated if table.subject]
    candidates = [table for table in stated if not table.is_of_subjects] or stated[:1]
    if not candidates:
        return NO_REFERENCE
    choices = [(table, name) for table in candidates for name in table.classes]
    if len(choices) == 1:
        return _make_reference(*choices[0], [])
    table = max(candidates, key=lambda table: bool(table.subject))
    return _make_reference(table, "", [_report_choice(choices)] if choices else [])


def _make_reference(table: ReferenceColumns, label: str, findings: list[Finding]) -> ReferenceTable:
    """The table with the rule by which it is read; `label`: its column of classes, or none."""
    subjects = table.bearers if table.is_of_subjects else {}
    rule = None
    if label or table.subject:
        rule = _make_rule(table, label)
        findings = [*findings, _report_table(table, label)]
    return ReferenceTable(rule, table.headed, findings, subjects)


def _list_owner_names(rels: Iterable[str]) -> dict[str, set[str]]:
    """Recording -> what may name its owner: its folders, and the beginnings of all names of its
    path, up to a mark.
    """
    names: dict[str, set[str]] = {}
    for rel in rels:
        parts = PurePosixPath(strip_suffix(rel)).parts
        names[rel] = {
            *parts,
            *(part[: mark.start()] for part in parts for mark in MARK.finditer(part)),
        }
    return names


def _find_table(
    source: Source, rel: str, keys: Mapping[str, str], owners: Mapping[str, set[str]]
) -> ReferenceColumns | None:
    """The columns of a table by whichever of its readings names more recordings; None for a table
    that names none, or neither subjects nor classes.
    """
    with suppress(UserError):  # whatever it is, it is no such table
        text = _open_table(source.path(rel))
        readings = (
            [_find_recordings(rel, text, keys), _find_subjects(rel, text, owners)] if text else []
        )
        usable = [table for table in readings if table and (table.classes or table.subject)]
        return max(usable, key=lambda table: len(table.bearers), default=None)
    return None


def _make_rule(table: ReferenceColumns, label: str) -> TableRule:
    return TableRule(
        path=table.file,
        file="" if table.is_of_subjects else table.key,
        subject=table.subject,
        label=label,
        delimiter=table.delimiter,
    )


def _report_table(table: ReferenceColumns, label: str) -> Finding:
    """The warning that a table is read."""
    parts = []
    what = f"{len(table.bearers)} recordings"
    if table.is_of_subjects:
        count = len(set(table.bearers.values()))
        what = f"{count} subjects ({safe_text(table.subject)}) of {what}"
    elif table.subject:
        parts.append(f"their subjects ({safe_text(table.subject)})")
    if label:
        parts.append(f"their classes: {_count_classes(table.cells[label])}")
    return input_warning(
        Reason.LABEL if label else Reason.IDENTIFIER,
        " and ".join([f"names {what}", *parts]),
        "read for generic/classification" if label else "read",
        "If they are none, give --map with a [table]",
        file=table.file,
        count=len(table.bearers),
    )


def _count_classes(cells: Sequence[str]) -> str:
    """The commonest classes with their numbers, in words."""
    counts = Counter(cells)
    text = ", ".join(f"{safe_text(name, 20)} {n}" for name, n in counts.most_common(SHOWN))
    return f"{text} and {len(counts) - SHOWN} more" if len(counts) > SHOWN else text


def _open_table(path: Path) -> TableText | None:
    """A small table whose columns have names of their own; None for another.

    Raises UserError for a file that is no table.
    """
    if path.stat().st_size > LARGEST_TABLE:
        return None
    delimiter = find_delimiter(path)
    names = tables.read_names(path, delimiter=delimiter)
    if len({"", *names}) <= len(names):  # a name is empty, or there twice
        return None
    return TableText(path, delimiter, list(names))


def _find_recordings(rel: str, text: TableText, keys: Mapping[str, str]) -> ReferenceColumns | None:
    """The columns of a table that names recordings; None for another table."""
    first = chain(map(str.strip, text.names), *islice(text.list_rows(), FIRST_ROWS))
    if keys.keys().isdisjoint(first):
        return None
    headed = keys.keys().isdisjoint(text.names)
    rows = [*text.list_rows(), *([] if headed else [tuple(text.names)])]
    columns = list(zip(*rows, strict=True))
    counts = [len(set(map(keys.get, cells)) - {None}) for cells in columns]
    place = counts.index(max(counts))
    is_named = [cell in keys for cell in columns[place]]
    if sum(is_named) > 1.5 * max(counts):  # several rows a recording are annotations
        return None
    bearers = {keys[cell]: cell for cell in columns[place] if cell in keys}
    filled = _select_filled(text.names, columns, is_named)
    del filled[text.names[place]]
    subject = _find_subject_column(filled) if headed else ""
    filled.pop(subject, None)
    classes = _find_class_columns(filled)
    return ReferenceColumns(
        rel, text.names[place], bearers, headed, text.delimiter, subject, filled, classes
    )


def _find_subjects(
    rel: str, text: TableText, owners: Mapping[str, set[str]]
) -> ReferenceColumns | None:
    """The columns of a table with a row a subject; None for another table.

    Most recordings are of one of these subjects, and some are of another one.
    """
    place = _find_subject_place(text)
    if place is None:
        return None
    columns = list(zip(*text.list_rows(), strict=True))
    subjects = set(columns[place]) - {""}
    if len(subjects) < len(columns[place]):  # several rows a subject
        return None
    named = {recording: names & subjects for recording, names in owners.items()}
    bearers = {recording: min(same) for recording, same in named.items() if len(same) == 1}
    used = set(bearers.values())
    if 2 * len(bearers) <= len(owners) or len(used) < 2:
        return None
    key = text.names[place]
    filled = _select_filled(text.names, columns, [cell in used for cell in columns[place]])
    del filled[key]
    classes = _find_class_columns(filled)
    return ReferenceColumns(
        rel,
        key,
        bearers,
        headed=True,
        delimiter=text.delimiter,
        subject=key,
        cells=filled,
        classes=classes,
    )


def _find_subject_place(text: TableText) -> int | None:
    """The place of the column with a usual name for subjects, where each is there once."""
    places = [place for place, name in enumerate(text.names) if fold_column(name) in PEOPLE]
    first = list(islice(text.list_rows(), FIRST_ROWS)) if places else []
    return next((p for p in places if 0 < len(first) == len({row[p] for row in first})), None)


def _select_filled(
    names: Sequence[str], columns: Iterable[Sequence[str]], is_chosen: Sequence[bool]
) -> dict[str, list[str]]:
    """Column -> its cells in the rows that are chosen, without empty ones."""
    return {
        name: list(filterfalse(is_missing, compress(cells, is_chosen)))
        for name, cells in zip(names, columns, strict=True)
    }


def _find_subject_column(columns: Mapping[str, Sequence[str]]) -> str:
    """The column that says whose the recordings are, by its name; "" where there is none. A column
    `id` may number the rows: it counts where a value is there twice.
    """
    for name, cells in columns.items():
        folded = fold_column(name)
        if folded in PEOPLE and (folded != "id" or len(set(cells)) < len(cells)):
            return name
    return ""


def _find_class_columns(columns: Mapping[str, Sequence[str]]) -> list[str]:
    """The columns that can hold classes: the one with a usual name, else all with few texts."""
    names = [
        name
        for name, cells in columns.items()
        if _can_be_classes(cells) and fold_column(name) not in PARTS
    ]
    usual = [name for name in names if fold_column(name) in CLASSES]
    return usual if len(usual) == 1 else names


def _can_be_classes(cells: Sequence[str]) -> bool:
    """Whether a column has few distinct texts, more than one of them."""
    count = len(set(cells))
    return 1 < count <= min(MOST_CLASSES, (len(cells) + 1) // 2)


def _report_choice(choices: Sequence[tuple[ReferenceColumns, str]]) -> Finding:
    """The warning that it is not clear which column holds the classes."""
    table, label = choices[0]
    options = [f"{safe_text(name)} of {table.file}" for table, name in choices]
    file = "" if table.is_of_subjects else table.key
    stated = {"path": table.file, "file": file, "subject": table.subject, "label": label}
    if table.delimiter != ",":
        stated["delimiter"] = table.delimiter
    lines = [f"{key} = {json.dumps(text)}" for key, text in stated.items() if text]
    header = "" if table.headed else "Write a line with names of its columns above it, then "
    return input_warning(
        Reason.LABEL,
        f"names recordings, and {len(options)} columns can be their classes: "
        f"{list_first(options, SHOWN)}",
        "none is read",
        f"{header}give --map with the lines [table] {'; '.join(lines)}",
        file=table.file,
        count=len(options),
    )
