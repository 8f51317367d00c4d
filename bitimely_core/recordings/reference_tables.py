"""Finds the table beside recordings that says whose they are and of which class, where no map
names it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, compress, filterfalse, islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from bitimely_core.errors import Finding, Reason, UserError, input_warning, safe_text
from bitimely_core.formats import tables
from bitimely_core.formats.sniffer import find_delimiter
from bitimely_core.formats.source import Source
from bitimely_core.recordings.folder_tables import TableFindings, is_missing, parse_split
from bitimely_core.recordings.mapping import (
    CLASSES,
    PARTS,
    PEOPLE,
    TableRule,
    fold_column,
    fold_subject,
    strip_suffix,
)
from bitimely_core.types import SourceRows
from bitimely_core.wording import list_first

MOST_CLASSES = 50  # distinct texts of a column
LARGEST_TABLE = 1 << 26  # bytes
FIRST_ROWS = 50  # one of them names a recording, where the table does
SHOWN = 6  # classes or columns in a message
MARK = re.compile(r"[_\-. ]")  # behind the subject in the name of a recording
INSIDE = re.compile(r"(?=((?<!\d)\d+|(?<![^\W_])[^\W_]+))")  # words of a name, numbers in them
VAGUE = {"id", "user", "user_id", "case_id", "caseid"}  # may be rows, raters or visits
RATERS = {"user", "user_id"}  # of those, beside classes
OF_PEOPLE = re.compile(r"subj|patient|partic|person|people|demogr|(?<![^\W_])(age|sex|gender)")


class ReferenceTable(NamedTuple):
    """A table of recordings, or of their subjects, that no map names."""

    rule: TableRule | None  # None: it is not clear which column is meant
    headed: bool  # else its first line is a row, whose cells are the names in `rule`
    findings: TableFindings
    people: str  # the table of subjects; "": none
    subjects: dict[str, str]  # recording -> subject, of that table

    @property
    def is_of_subjects(self) -> bool:
        """Whether `rule` is of the table of subjects."""
        return self.rule is not None and self.rule.path == self.people

    def list_files(self) -> set[str]:
        """The tables that are read."""
        return {self.rule.path if self.rule else "", self.people} - {""}


NO_REFERENCE = ReferenceTable(None, headed=True, findings=[], people="", subjects={})


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
    split: str  # the column that states the split of each; "": none
    rows: int = 0  # of a table of subjects
    unclear: str = ""  # a column of subjects, or of those who rated the recordings

    @property
    def is_of_subjects(self) -> bool:
        """Whether a row is of a subject, who may have several recordings."""
        return self.key == self.subject


class OwnerNames(NamedTuple):
    """The parts of a recording's path that may name its owner, as subjects are compared."""

    beginnings: set[str]  # folders and the name, and their beginnings up to a mark
    inside: set[str]  # all words and numbers


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
    stated = stated if classes else _leave_out_classes(stated)
    candidates = [table for table in stated if not table.is_of_subjects]
    people = [table for table in stated if table.is_of_subjects]
    if people and not any(table.subject for table in candidates):
        return _add_subjects(candidates, people[0])
    return _choose_reference(candidates)


def _leave_out_classes(stated: Sequence[ReferenceColumns]) -> list[ReferenceColumns]:
    """The tables with subjects or splits, without their classes."""
    return [table._replace(classes=[]) for table in stated if table.subject or table.split]


def _add_subjects(
    candidates: Sequence[ReferenceColumns], people: ReferenceColumns
) -> ReferenceTable:
    """The table of `candidates`, if there are any, with the subjects of the table `people`."""
    reference = _choose_reference(candidates or ([people] if people.classes else []))
    reports = list(reference.findings)
    if reference.rule is None or candidates:
        reports.append(_report_table(people, "", alone=True))
        reports.append(SourceRows(file=people.file, seen=people.rows))
    return reference._replace(findings=reports, people=people.file, subjects=people.bearers)


def _choose_reference(candidates: Sequence[ReferenceColumns]) -> ReferenceTable:
    """The table with the only column of classes, else one with subjects or splits."""
    choices = [(table, name) for table in candidates for name in table.classes]
    if len(choices) == 1:
        table, label = choices[0]
        return _make_reference(table, label)
    findings: TableFindings = [_report_choice(choices)] if choices else []
    stated = [table for table in candidates if table.subject or table.split]
    if stated:
        return _make_reference(stated[0], "", findings)
    return ReferenceTable(None, headed=True, findings=findings, people="", subjects={})


def _make_reference(
    table: ReferenceColumns, label: str, findings: Sequence[SourceRows | Finding] = ()
) -> ReferenceTable:
    """The table with the rule by which it is read; `label`: its column of classes, or none."""
    table_rule = TableRule(
        path=table.file,
        file="" if table.is_of_subjects else table.key,
        subject=table.subject,
        label=label,
        split=table.split,
        delimiter=table.delimiter,
    )
    reports = [*findings, _report_table(table, label)]
    return ReferenceTable(table_rule, headed=table.headed, findings=reports, people="", subjects={})


def _list_owner_names(rels: Iterable[str]) -> dict[str, OwnerNames]:
    """Recording -> what may name its owner."""
    return {rel: _split_name(PurePosixPath(strip_suffix(rel)).parts) for rel in rels}


def _split_name(parts: Sequence[str]) -> OwnerNames:
    """What may name the owner in the parts of a path."""
    beginnings = (part[: mark.start()] for part in parts for mark in MARK.finditer(part))
    inside = chain.from_iterable(INSIDE.findall(part) for part in parts)
    return OwnerNames(
        set(map(fold_subject, chain(parts, beginnings))), set(map(fold_subject, inside))
    )


def _find_table(
    source: Source, rel: str, keys: Mapping[str, str], owners: Mapping[str, OwnerNames]
) -> ReferenceColumns | None:
    """The columns of a table by whichever of its readings names more recordings; None for a table
    that names none, or no subjects, classes and splits.
    """
    with suppress(UserError):  # whatever it is, it is no such table
        text = _open_table(source.path(rel))
        readings = (
            [_find_recordings(rel, text, keys, owners), _find_subjects(rel, text, owners)]
            if text
            else []
        )
        usable = [
            table for table in readings if table and (table.classes or table.subject or table.split)
        ]
        return max(usable, key=lambda table: len(table.bearers), default=None)
    return None


def _report_table(table: ReferenceColumns, label: str, *, alone: bool = False) -> Finding:
    """The warning that a table is read; `alone`: that nothing else of it is."""
    parts = []
    what = f"{len(table.bearers)} recordings"
    if table.is_of_subjects:
        count = len(set(table.bearers.values()))
        what = f"{count} subjects ({safe_text(table.subject)}) of {what}"
    elif table.subject:
        parts.append(f"their subjects ({safe_text(table.subject)})")
    if table.split:
        parts.append(f"their splits ({safe_text(table.split)}, for tokenize --split official)")
    if label:
        parts.append(f"their classes: {_count_classes(table.cells[label])}")
    return input_warning(
        Reason.LABEL if label else Reason.IDENTIFIER,
        " and ".join([f"names {what}", *parts]),
        "read for generic/classification" if label else "only these are read" if alone else "read",
        f"If they are none, give --map with a [table]{_propose_subject(table)}",
        file=table.file,
        count=len(table.bearers),
    )


def _propose_subject(table: ReferenceColumns) -> str:
    """What to state where a column that may be of raters is that of the subjects."""
    name = safe_text(table.unclear)
    return f"; so do where {name} names subjects, not raters" if table.unclear else ""


def _count_classes(cells: Sequence[str]) -> str:
    """The commonest classes with their numbers, in words."""
    counts = Counter(cells)
    return list_first([f"{safe_text(name, 20)} {n}" for name, n in counts.most_common()], SHOWN)


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


def _find_recordings(
    rel: str, text: TableText, keys: Mapping[str, str], owners: Mapping[str, OwnerNames]
) -> ReferenceColumns | None:
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
    named = filled if headed else {}
    subject, split = _find_subject_column(named), _find_split_column(named)
    subjects = filled.pop(subject, [])
    classes = _find_class_columns(filled)
    may_rate = _may_rate(subject, subjects, owners)
    is_unclear = bool(classes) and may_rate and not _lists_persons(rel, text)
    return ReferenceColumns(
        rel,
        text.names[place],
        bearers,
        headed,
        text.delimiter,
        "" if is_unclear else subject,
        filled,
        classes,
        split,
        unclear=subject if is_unclear else "",
    )


def _may_rate(column: str, subjects: Sequence[str], owners: Mapping[str, OwnerNames]) -> bool:
    """Whether a column of subjects may be one of raters, whom no path of a recording names."""
    return fold_column(column) in RATERS and not _assign_owners(set(subjects), owners)


def _lists_persons(rel: str, text: TableText) -> bool:
    """Whether the name of a table or of one of its columns has a word for people."""
    return any(map(OF_PEOPLE.search, map(str.lower, [rel, *text.names])))


def _find_subjects(
    rel: str, text: TableText, owners: Mapping[str, OwnerNames]
) -> ReferenceColumns | None:
    """The columns of a table with a row a subject; None for another table."""
    names = [name for name in text.names if fold_column(name) in PEOPLE]
    if not names or not _lists_persons(rel, text):
        return None
    columns = dict(zip(text.names, zip(*text.list_rows(), strict=True), strict=False))
    subjects = {
        name: dict.fromkeys(filterfalse(is_missing, columns.get(name, ()))) for name in names
    }
    bearers = {name: _assign_owners(subjects[name], owners) for name in names}
    key = max(names, key=lambda name: len(bearers[name]))
    if not bearers[key] or any(len(same) < len(subjects[key]) for same in subjects.values()):
        return None  # it names nobody, or visits of people in another column
    used = set(bearers[key].values())
    is_used = [cell in used for cell in columns[key]]
    filled = _select_filled(text.names, columns.values(), is_used)
    del filled[key]
    stated = filled if sum(is_used) == len(used) else {}  # else visits, each with cells of its own
    return ReferenceColumns(
        rel,
        key,
        bearers[key],
        headed=True,
        delimiter=text.delimiter,
        subject=key,
        cells=filled,
        classes=_find_class_columns(stated),
        split=_find_split_column(stated),
        rows=len(columns[key]),
    )


def _assign_owners(subjects: Collection[str], owners: Mapping[str, OwnerNames]) -> dict[str, str]:
    """Recording -> the subject that its path names; empty where that is not clear.

    Most recordings are of one of these subjects, and some are of another one. Where a path has a
    subject in it with which none begins, what they begin with may be visits.
    """
    spellings = {fold_subject(subject): subject for subject in subjects}
    named = {rel: names.beginnings & spellings.keys() for rel, names in owners.items()}
    bearers = {rel: spellings[min(same)] for rel, same in named.items() if len(same) == 1}
    inside = set().union(*(names.inside & spellings.keys() for names in owners.values()))
    used = set(bearers.values())
    is_clear = len(spellings) == len(subjects) and used.issuperset(map(spellings.get, inside))
    return bearers if is_clear and 2 * len(bearers) > len(owners) and len(used) > 1 else {}


def _select_filled(
    names: Sequence[str], columns: Iterable[Sequence[str]], is_chosen: Sequence[bool]
) -> dict[str, list[str]]:
    """Column -> its cells in the rows that are chosen, without empty ones."""
    return {
        name: list(filterfalse(is_missing, compress(cells, is_chosen)))
        for name, cells in zip(names, columns, strict=True)
    }


def _find_subject_column(columns: Mapping[str, Sequence[str]]) -> str:
    """The column that says whose the recordings are, by its name; "" where there is none.

    Of several it is the one with the clearest name, then with the fewest subjects. A column `id`
    may number the rows: it counts where a value is there twice.
    """
    ranks = {
        name: (folded in VAGUE, len(set(cells)))
        for name, cells in columns.items()
        if (folded := fold_column(name)) in PEOPLE
        and (folded != "id" or len(set(cells)) < len(cells))
    }
    return min(ranks, key=lambda name: ranks[name], default="")


def _find_split_column(columns: Mapping[str, Sequence[str]]) -> str:
    """The column that says in which split, or which of ten folds, each is; "" where none does."""
    names = (name for name in columns if fold_column(name) in PARTS)
    return next((name for name in names if _has_test_split(columns[name])), "")


def _has_test_split(cells: Sequence[str]) -> bool:
    """Whether all cells are splits or folds, and some are of the test split."""
    parts = [parse_split(cell) for cell in cells]
    return None not in parts and any(part in parts for part in ({"split": "test"}, {"fold": 10.0}))


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
