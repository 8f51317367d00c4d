"""Reads the tables beside a user's own recordings, which state subjects, labels and annotations.

They have one row a recording or subject, or one row an annotation; BIDS folders have both.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from bitimely_core.errors import Finding, Reason, UserError, input_error, usage_error
from bitimely_core.formats import tables
from bitimely_core.formats.sniffer import find_delimiter
from bitimely_core.formats.source import Source, finding_to_error, locate_errors
from bitimely_core.recordings.mapping import EMPTY_CELLS, AnnotationRule, TableRule
from bitimely_core.types import (
    SPLITS,
    Annotation,
    Attributes,
    AttributeValue,
    SourceRows,
    count_reasons,
)

PARTICIPANTS = "participants.tsv"  # of a BIDS folder
SPLIT_NAMES = dict(zip(SPLITS, SPLITS, strict=True)) | {
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "testing": "test",
}
FOLDS = 10  # the ninth is validation, the tenth test
FLAGS = dict.fromkeys(("0", "0.0", "False", "false"), False)
FLAGS |= dict.fromkeys(("1", "1.0", "True", "true"), True)
EMPTY_NUMBER = "nan"  # of a row of numbers whose cell is empty
MOST_FAULTS = 20  # of a table, which are listed

TableFindings = list[SourceRows | Finding]
"""The account of the rows of a table, and its first faults."""


def read_attributes(
    source: Source, table: TableRule
) -> tuple[TableFindings, dict[str, Attributes]]:
    """Recording or subject -> attributes: `subject`, `label`, `value`, others by their columns.

    Raises UserError: schema, config, duplicate_key and the faults of the file.
    """
    key = table.file or table.subject
    if not key:
        raise usage_error(
            "names no column of files or subjects",
            "expected `file` or `subject`",
            file=table.path,
            field="table",
        )
    columns = {
        "subject": table.subject,
        "label": table.label,
        "value": table.value,
        "split": table.split,
        **{name: name for name in table.attributes},
    }
    columns = {name: column for name, column in columns.items() if column}
    names = list(dict.fromkeys([key, *columns.values(), *table.labels]))
    rows: dict[str, Attributes] = {}
    faults: list[Finding] = []
    dropped: Counter[str] = Counter()
    with locate_errors(table.path):
        path = source.path(table.path)
        delimiter = table.delimiter or find_delimiter(path)
        for row in tables.read_rows(path, names, key=[key], delimiter=delimiter):
            if isinstance(row, Finding) and row.level == "warning":
                dropped[str(row.code)] += 1
                continue
            parsed = (
                row if isinstance(row, Finding) else _parse_attributes(row, names, columns, table)
            )
            if isinstance(parsed, Finding):
                faults.append(parsed.at(table.path))
            else:
                rows[parsed[0]] = parsed[1]
        seen = tables.count_rows(path, delimiter=delimiter)
    return _account(table.path, seen, dropped, faults), rows


def _account(
    file: str, seen: int, dropped: Mapping[str, int], faults: Sequence[Finding]
) -> TableFindings:
    quarantined = count_reasons(faults)
    account = SourceRows(file=file, seen=seen, dropped=dict(dropped), quarantined=quarantined)
    return [account, *faults[:MOST_FAULTS]]


def _parse_attributes(
    row: tables.TableRow, names: Sequence[str], columns: Mapping[str, str], table: TableRule
) -> tuple[str, Attributes] | Finding:
    """Key and attributes of one row, or its fault; `columns`: attribute -> column."""
    cells = {name: cell.strip() for name, cell in zip(names, row.cells, strict=True)}
    attributes: dict[str, AttributeValue] = {}
    column = ""
    try:
        for name, column in columns.items():
            attributes |= _parse_cell(name, cells[column], is_split=column == table.split)
        flags = {}
        for column in table.labels:
            flags[column] = _parse_flag(cells[column])
    except UserError as error:
        return tables.locate_cell(error, row.row, column)
    if flags:
        attributes["labels"] = [name for name, flag in flags.items() if flag]
    return cells[names[0]], attributes


def _parse_cell(name: str, cell: str, *, is_split: bool) -> dict[str, AttributeValue]:
    """The attribute in a cell; none for an empty one. Raises UserError: label, not_numeric ..."""
    if name == "value":
        value = tables.parse_number(cell)
        return {} if value is None else {name: value}
    if cell.lower() in EMPTY_CELLS:
        return {}
    if name != "split" or not is_split:
        return {name: cell}
    split = parse_split(cell)
    if split is None:
        wanted = "expected train, validation, test, a fold from 1 to 10, or 1-8"
        raise input_error(Reason.LABEL, "is no split", wanted)
    return split


def _parse_flag(cell: str) -> bool:
    if cell not in FLAGS:
        raise input_error(Reason.LABEL, "is neither 0 nor 1", "expected one of them")
    return FLAGS[cell]


def parse_split(cell: str) -> dict[str, AttributeValue] | None:
    """The split or the fold of a recording by a cell, None for another text.

    `split` is train, validation or test, `fold` 1 to 10. A range of folds, such as 1-8, states a
    split where all its folds are of one: 1 to 8 are train, 9 validation, 10 test.
    """
    if split := SPLIT_NAMES.get(cell.lower()):
        return {"split": split}
    folds = re.fullmatch(r"(\d{1,2})(?:\.0*)?(?:\s*-\s*(\d{1,2}))?", cell, re.ASCII)
    if folds is None:
        return None
    first, last = int(folds[1]), int(folds[2] or folds[1])
    if not 1 <= first <= last <= FOLDS:
        return None
    if folds[2] is None:
        return {"fold": float(first)}
    return {"split": "train"} if last <= FOLDS - 2 else None


def read_participants(source: Source) -> tuple[TableFindings, dict[str, Attributes]]:
    """Age and sex of a BIDS folder's participants.tsv, where it has them."""
    if PARTICIPANTS not in source.files:
        return [], {}
    with locate_errors(PARTICIPANTS):
        columns = tables.read_names(source.path(PARTICIPANTS), delimiter="\t")
    attributes = tuple(name for name in ("age", "sex") if name in columns)
    table = TableRule(
        path=PARTICIPANTS, subject="participant_id", attributes=attributes, delimiter="\t"
    )
    findings, rows = read_attributes(source, table)
    subjects = {key.removeprefix("sub-"): row for key, row in rows.items()}
    return findings, {key: {**row, "subject": key} for key, row in subjects.items()}


def read_annotations(
    source: Source, table: AnnotationRule
) -> tuple[TableFindings, dict[str, list[Annotation]]]:
    """Recording -> annotations of the map's table."""
    notes: dict[str, list[Annotation]] = {}
    faults: list[Finding] = []
    columns = [table.file, table.onset, table.value or table.label]
    columns += [table.duration] if table.duration else []
    with locate_errors(table.path):
        path = source.path(table.path)
        delimiter = table.delimiter or find_delimiter(path)
        for row in tables.read_rows(path, columns, delimiter=delimiter):
            note = row if isinstance(row, Finding) else _parse_annotation(row, table)
            if isinstance(note, Finding):
                faults.append(note.at(table.path))
            elif isinstance(row, tables.TableRow):
                notes.setdefault(row.cells[0].strip(), []).append(note)
        seen = tables.count_rows(path, delimiter=delimiter)
    if not table.duration:
        notes = {key: _extend_to_next(same) for key, same in notes.items()}
    dropped: dict[str, int] = {}
    if table.value:
        notes, empty = _drop_empty(notes)
        dropped = {str(Reason.MISSING_VALUES): empty} if empty else {}
    return _account(table.path, seen, dropped, faults), notes


def _drop_empty(notes: Mapping[str, list[Annotation]]) -> tuple[dict[str, list[Annotation]], int]:
    """The numbers that are not empty, and how many are."""
    filled = {
        key: [note for note in same if note.label != EMPTY_NUMBER] for key, same in notes.items()
    }
    return filled, sum(map(len, notes.values())) - sum(map(len, filled.values()))


def _parse_annotation(row: tables.TableRow, table: AnnotationRule) -> Annotation | Finding:
    """One row of the map's table.

    A number is kept as a text that reads back as the same; an empty one ends the value before it.
    """
    _, onset, text, *duration = row.cells
    if table.value and text.strip().lower() in EMPTY_CELLS:
        text = EMPTY_NUMBER
    note = _make_annotation(row.row, onset, duration[0] if duration else "0", text)
    if isinstance(note, Finding) or not table.value or text == EMPTY_NUMBER:
        return note
    if duration and not note.duration:
        return Finding(
            Reason.ANNOTATION_SYNTAX,
            f"row {row.row} lasts 0 s",
            "expected a duration in seconds; "
            'with duration = "" in the map a number holds until the next row',
            field=table.duration,
            row=row.row,
        )
    try:
        return note._replace(label=repr(tables.parse_number(text)))
    except UserError as error:
        return tables.locate_cell(error, row.row, table.value)


def _extend_to_next(notes: list[Annotation]) -> list[Annotation]:
    """Each lasts until the next one that begins later; the last ones have no end."""
    begins = sorted({note.onset for note in notes})
    ends = dict(zip(begins, [*begins[1:], math.inf], strict=True))
    return [note._replace(duration=ends[note.onset] - note.onset) for note in notes]


def read_bids_events(path: Path, rel: str) -> list[Annotation]:
    """Annotations of an events.tsv: trial_type, else value, is the text.

    Raises UserError for a faulty row.
    """
    notes: list[Annotation] = []
    with locate_errors(rel):
        columns = tables.read_names(path, delimiter="\t")
        texts = [name for name in ("trial_type", "value") if name in columns]
        if not texts:
            return []
        wanted = ["onset", "duration", texts[0]]
        for row in tables.read_rows(path, wanted, delimiter="\t"):
            note = (
                row
                if isinstance(row, Finding)
                else _make_annotation(row.row, *map(_fill_cell, row.cells))
            )
            if isinstance(note, Finding):
                raise finding_to_error(note)
            notes.append(note)
    return notes


def _fill_cell(cell: str) -> str:
    return "0" if cell.strip().lower() in EMPTY_CELLS else cell


def _make_annotation(row: int, onset: str, duration: str, label: str) -> Annotation | Finding:
    try:
        begin, length = (tables.parse_number(cell) or 0.0 for cell in (onset, duration))
    except UserError as error:
        problem = f"onset or duration {error.problem}"
        return Finding(Reason.ANNOTATION_SYNTAX, problem, "expected seconds", row=row)
    if length < 0 or not label.strip():
        return Finding(Reason.ANNOTATION_SYNTAX, "a negative duration or no label", row=row)
    return Annotation(begin, length, label.strip())
