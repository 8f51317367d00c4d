"""Tables beside a user's own recordings: one row a recording or subject, one row an annotation, and
those of BIDS folders.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bitimely_core.errors import Finding, Reason, UserError, input_error, usage_error
from bitimely_core.formats import tables
from bitimely_core.formats.source import Source, locate_errors
from bitimely_core.recordings.mapping import EMPTY_CELLS, AnnotationRule, TableRule
from bitimely_core.types import (
    SPLITS,
    Annotation,
    Attributes,
    AttributeValue,
    SourceRows,
    count_reasons,
)

SPLIT_NAMES = {name: name for name in SPLITS} | {
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "testing": "test",
}
FOLDS = 10  # the ninth is validation, the tenth test
FLAGS = {
    "0": False,
    "1": True,
    "0.0": False,
    "1.0": True,
    "False": False,
    "True": True,
    "false": False,
    "true": True,
}
EMPTY_NUMBER = "nan"  # of a row of numbers whose cell is empty


def read_attributes(
    source: Source, table: TableRule
) -> tuple[list[SourceRows | Finding], dict[str, Attributes]]:
    """Recording or subject -> attributes (`subject`, `label`, `value`, others by their columns);
    the account of the rows.

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
    wanted = {
        "subject": table.subject,
        "label": table.label,
        "value": table.value,
        "split": table.split,
    }
    columns = {
        name: column
        for name, column in {**wanted, **{name: name for name in table.attributes}}.items()
        if column
    }
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
    account = SourceRows(
        file=table.path, seen=seen, dropped=dict(dropped), quarantined=count_reasons(faults)
    )
    return [account, *faults[:20]], out


def _parse_attributes(
    row: int, cells: Mapping[str, str], columns: Mapping[str, str], table: TableRule
) -> Attributes | Finding:
    """The attributes of one row, or its fault; `cells`: by column, `columns`: attribute ->
    column.
    """
    out: dict[str, AttributeValue] = {}
    for name, column in columns.items():
        cell = cells[column]
        if name == "value":
            try:
                value = tables.parse_number(cell)
            except UserError as error:
                return replace(
                    error.finding, row=row, field=column, problem=f"the cell {error.problem}"
                )
            out |= {} if value is None else {name: value}
        elif name == "split" and table.split and cell.lower() not in EMPTY_CELLS:
            place = parse_split(cell)
            if place is None:
                text, wanted = (
                    f"the cell of row {row} is no split",
                    "expected train, validation, test, a fold from 1 to 10, or 1-8",
                )
                return Finding(Reason.LABEL, text, wanted, field=column, row=row)
            out |= place
        elif cell.lower() not in EMPTY_CELLS:
            out[name] = cell
    flags = {name: FLAGS.get(cells[name]) for name in table.labels}
    if wrong := [name for name, flag in flags.items() if flag is None]:
        return Finding(
            Reason.LABEL,
            f"the cell of row {row} is neither 0 nor 1",
            "expected one of them",
            field=wrong[0],
            row=row,
        )
    return out | ({"labels": [name for name, flag in flags.items() if flag]} if flags else {})


def parse_split(cell: str) -> dict[str, AttributeValue] | None:
    """Attribute of a recording by the cell of a column of splits: `split` (train, validation, test)
    or `fold` (1 to 10), None for another text.

    A range of folds, such as 1-8, states a split where all its folds are of one: 1 to 8 are train,
    9 validation, 10 test.
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


def read_participants(source: Source) -> tuple[list[SourceRows | Finding], dict[str, Attributes]]:
    """Age and sex of a BIDS folder's participants.tsv, where it has them."""
    rel = "participants.tsv"
    if rel not in source.files:
        return [], {}
    with locate_errors(rel):
        columns = tables.read_names(source.path(rel), delimiter="\t")
    known = tuple(name for name in ("age", "sex") if name in columns)
    table = TableRule(path=rel, subject="participant_id", attributes=known, delimiter="\t")
    rows, found = read_attributes(source, table)
    return rows, {
        key.removeprefix("sub-"): {**row, "subject": key.removeprefix("sub-")}
        for key, row in found.items()
    }


def read_annotations(
    source: Source, table: AnnotationRule
) -> tuple[list[SourceRows | Finding], dict[str, list[Annotation]]]:
    """Recording -> annotations of the map's table; the account of the rows."""
    out: dict[str, list[Annotation]] = {}
    faults: list[Finding] = []
    empty = 0
    columns = [
        table.file,
        table.onset,
        table.value or table.label,
        *([table.duration] if table.duration else []),
    ]
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
        out = {
            key: [note for note in notes if note.label != EMPTY_NUMBER]
            for key, notes in out.items()
        }
    dropped = {str(Reason.MISSING_VALUES): empty} if empty else {}
    account = SourceRows(
        file=table.path, seen=seen, dropped=dropped, quarantined=count_reasons(faults)
    )
    return [account, *faults[:20]], out


def _parse_annotation(row: tables.TableRow, table: AnnotationRule) -> Annotation | Finding:
    """One row of the map's table. A number is kept as a text that reads back as the same; an empty
    one ends the value before it.
    """
    _, onset, text, *duration = row.cells
    if table.value and text.strip().lower() in EMPTY_CELLS:
        text = EMPTY_NUMBER
    note = _make_annotation(row.row, onset, duration[0] if duration else "0", text)
    if isinstance(note, Finding) or not table.value or text == EMPTY_NUMBER:
        return note
    if duration and not note.duration:
        wanted = 'expected a duration in seconds; with duration = "" in the map a number holds until the next row'
        return Finding(
            Reason.ANNOTATION_SYNTAX,
            f"row {row.row} lasts 0 s",
            wanted,
            field=table.duration,
            row=row.row,
        )
    try:
        return note._replace(label=repr(tables.parse_number(text)))
    except UserError as error:
        return replace(
            error.finding,
            row=row.row,
            field=table.value,
            problem=f"the cell of row {row.row} {error.problem}",
        )


def _extend_to_next(notes: list[Annotation]) -> list[Annotation]:
    """Each lasts until the next one that begins later; the last ones have no end."""
    begins = sorted({note.onset for note in notes})
    ends = dict(zip(begins, [*begins[1:], math.inf], strict=True))
    return [note._replace(duration=ends[note.onset] - note.onset) for note in notes]


def read_bids_events(path: Path, rel: str) -> list[Annotation]:
    """Annotations of an events.tsv: trial_type, else value, is the text. Raises UserError for a
    faulty row.
    """
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
                else _make_annotation(
                    row.row,
                    *(("0" if cell.strip().lower() in EMPTY_CELLS else cell) for cell in row.cells),
                )
            )
            if isinstance(note, Finding):
                raise input_error(
                    note.code, note.problem, note.requirement, field=note.field, row=note.row
                )
            out.append(note)
    return out


def _make_annotation(row: int, onset: str, duration: str, label: str) -> Annotation | Finding:
    try:
        times = [tables.parse_number(cell) or 0.0 for cell in (onset, duration)]
    except UserError as error:
        return Finding(
            Reason.ANNOTATION_SYNTAX,
            f"onset or duration {error.problem}",
            "expected seconds",
            row=row,
        )
    if times[1] < 0 or not label.strip():
        return Finding(Reason.ANNOTATION_SYNTAX, "a negative duration or no label", row=row)
    return Annotation(times[0], times[1], label.strip())
