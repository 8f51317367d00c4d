"""Reads the tables beside a user's own recordings, which state subjects, labels and annotations.

They have one row a recording or subject, or one row an annotation; BIDS folders have both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import filterfalse
from pathlib import Path
from typing import TypeVar

from bitimely_core.errors import (
    Finding,
    Reason,
    UserError,
    input_error,
    input_warning,
    safe_text,
    select_errors,
    usage_error,
)
from bitimely_core.formats import tables
from bitimely_core.formats.sniffer import find_delimiter
from bitimely_core.formats.source import Source, finding_to_error, locate_errors
from bitimely_core.formats.stage_texts import EPOCH, name_listed_stage
from bitimely_core.recordings.mapping import EMPTY_CELLS, AnnotationRule, TableRule, fold_subject
from bitimely_core.types import (
    SPLITS,
    Annotation,
    Attributes,
    AttributeValue,
    SourceRows,
    count_reasons,
    drop_empty,
)

EVENT_TEXTS = {b"trial_type", b"value"}  # columns of events tables of BIDS
PARTICIPANTS = "participants.tsv"  # of a BIDS folder
PLACE_HINT = "Put it into the folder of the recordings: paths in the map begin there"
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

# why a row of annotations is dropped
NO_TIME = Finding(Reason.MISSING_VALUES, "states no onset or no label", level="warning")

TableFindings = list[SourceRows | Finding]
"""The account of the rows of a table, and its first faults."""

Parsed = TypeVar("Parsed")


def parse_rows(
    rows: Iterable[tables.TableRow | Finding], parse: Callable[[tables.TableRow], Parsed | Finding]
) -> tuple[list[Parsed], list[Finding]]:
    """What `parse` makes of the rows of a table, and why others are not used."""
    items = [row if isinstance(row, Finding) else parse(row) for row in rows]
    faults = [item for item in items if isinstance(item, Finding)]
    return [item for item in items if not isinstance(item, Finding)], faults


def account_rows(file: str, kind: str, seen: int, faults: Sequence[Finding]) -> SourceRows:
    """The account of `seen` rows: those with a fault of level error are quarantined, those with
    another fault are dropped.
    """
    return SourceRows(
        file=file,
        kind=kind,
        seen=seen,
        dropped=count_reasons(fault for fault in faults if fault.level != "error"),
        quarantined=count_reasons(select_errors(faults)),
    )


def read_attributes(
    source: Source, table: TableRule, *, headed: bool = True
) -> tuple[TableFindings, dict[str, Attributes]]:
    """Recording or subject -> attributes: `subject`, `label`, `value`, others by their columns.

    Without a header (not `headed`) the cells of the first row are the names in `table`.

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
    columns = drop_empty(columns)
    names = list(dict.fromkeys([key, *columns.values(), *table.labels]))
    with locate_errors(table.path):
        path = source.path(table.path, PLACE_HINT)
        delimiter = table.delimiter or find_delimiter(path)
        rows, faults = parse_rows(
            tables.read_rows(path, names, key=[key], delimiter=delimiter),
            partial(_parse_attributes, names=names, columns=columns, table=table),
        )
    if not headed:
        rows.insert(0, (key, dict(columns)))
    account = _account(table.path, len(rows) + len(faults), faults)
    others = _list_spellings(row for _, row in rows) if table.file else {}
    account += [_report_spellings(table, others)] if others else []
    return account, {name: _spell_subject(row, others) for name, row in rows}


def _spell_subject(row: Attributes, others: Mapping[str, str]) -> Attributes:
    """A row with the first spelling of its subject; `others`: further spelling -> first."""
    subject = str(row.get("subject", ""))
    return {**row, "subject": others[subject]} if subject in others else row


def _list_spellings(rows: Iterable[Attributes]) -> dict[str, str]:
    """Further spelling of a subject, such as 7.0 -> its first one, such as 7.

    As two subjects they could be in two splits.
    """
    subjects = dict.fromkeys(str(row["subject"]) for row in rows if "subject" in row)
    first: dict[str, str] = {}
    spellings = {subject: first.setdefault(fold_subject(subject), subject) for subject in subjects}
    return {subject: name for subject, name in spellings.items() if subject != name}


def _report_spellings(table: TableRule, others: Mapping[str, str]) -> Finding:
    other, first = next(iter(others.items()))
    return input_warning(
        Reason.IDENTIFIER,
        f"{len(others)} subjects are written in two ways, such as {safe_text(first)} and "
        f"{safe_text(other)}",
        "taken for one subject each",
        "Where they are two people, give them names that differ in more than zeros or capitals",
        file=table.path,
        field=table.subject,
        count=len(others),
    )


def _account(file: str, seen: int, faults: Sequence[Finding]) -> TableFindings:
    errors = [fault.at(file) for fault in select_errors(faults)]
    return [account_rows(file, "rows", seen, faults), *errors[:MOST_FAULTS]]


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
    if is_missing(cell):
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
    source: Source, table: AnnotationRule, epoch: float = EPOCH
) -> tuple[TableFindings, dict[str, list[Annotation]]]:
    """Recording -> annotations of the map's table; `epoch`: seconds of those that are numbered."""
    columns = [table.file, table.onset, table.value or table.label]
    columns += [table.duration] if table.duration else []
    with locate_errors(table.path):
        path = source.path(table.path, PLACE_HINT)
        delimiter = table.delimiter or find_delimiter(path)
        rows, faults = parse_rows(
            tables.read_rows(path, columns, delimiter=delimiter),
            partial(_parse_annotation, table=table),
        )
    seen = len(rows) + len(faults)
    notes: dict[str, list[Annotation]] = {}
    for recording, note in rows:
        notes.setdefault(recording, []).append(note)
    notes, remarks = _set_durations(notes, table, epoch)
    if table.value:
        notes, empty = _drop_empty(notes)
        faults += [NO_TIME] * empty
    return [*_account(table.path, seen, faults), *remarks], notes


def _set_durations(
    notes: dict[str, list[Annotation]], table: AnnotationRule, epoch: float
) -> tuple[dict[str, list[Annotation]], list[Finding]]:
    """The notes of each recording with the durations that the table does not state."""
    if notes and not table.value and all(map(_are_epochs, notes.values())):
        timed = {key: _time_epochs(same, epoch) for key, same in notes.items()}
        return timed, [_report_epochs(table, epoch)]
    if table.duration:
        return notes, []
    return {key: _extend_to_next(same) for key, same in notes.items()}, []


def _are_epochs(notes: Sequence[Annotation]) -> bool:
    """Whether onsets are the numbers of epochs: from 0 or 1 on, and each has a stage."""
    onsets = sorted(note.onset for note in notes)
    count = len(notes)
    is_counted = count > 1 and onsets in (list(range(count)), list(range(1, count + 1)))
    return is_counted and all(
        note.duration != 1 and name_listed_stage(note.label) is not None for note in notes
    )


def _time_epochs(notes: Sequence[Annotation], epoch: float) -> list[Annotation]:
    """The notes with seconds in place of the numbers of epochs."""
    first = min(note.onset for note in notes)
    return [Annotation((note.onset - first) * epoch, epoch, note.label) for note in notes]


def _report_epochs(table: AnnotationRule, epoch: float) -> Finding:
    problem = f"{safe_text(table.onset)} counts up by 1 with a stage each"
    action = f"read as numbers of epochs of {epoch:g} s"
    hint = "Where they are of other lengths, write epoch = their seconds in [labels] of the map"
    return input_warning(
        Reason.LABEL, problem, action, hint, file=table.path, field="annotations.onset"
    )


def _drop_empty(notes: Mapping[str, list[Annotation]]) -> tuple[dict[str, list[Annotation]], int]:
    """The numbers that are not empty, and how many are."""
    filled = {
        key: [note for note in same if note.label != EMPTY_NUMBER] for key, same in notes.items()
    }
    return filled, sum(map(len, notes.values())) - sum(map(len, filled.values()))


def _parse_annotation(
    row: tables.TableRow, table: AnnotationRule
) -> tuple[str, Annotation] | Finding:
    """The recording and the annotation of a row of the map's table.

    A number is kept as a text that reads back as the same; an empty one ends the value before it.
    """
    recording, onset, text, *duration = row.cells
    if is_missing(onset) or (is_missing(text) and not table.value):
        return NO_TIME
    text = EMPTY_NUMBER if is_missing(text) else text
    length = next(filterfalse(is_missing, duration), "0")
    note = _make_annotation(row.row, onset, length, text)
    if isinstance(note, Finding):
        return note
    if not table.value or text == EMPTY_NUMBER:
        return recording.strip(), note
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
        return recording.strip(), note._replace(label=repr(tables.parse_number(text)))
    except UserError as error:
        return tables.locate_cell(error, row.row, table.value)


def _extend_to_next(notes: list[Annotation]) -> list[Annotation]:
    """Each lasts until the next one that begins later; the last ones have no end."""
    begins = sorted({note.onset for note in notes})
    ends = dict(zip(begins, [*begins[1:], math.inf], strict=True))
    return [note._replace(duration=ends[note.onset] - note.onset) for note in notes]


def read_bids_events(
    path: Path, rel: str, levels: Mapping[str, str] | None = None
) -> tuple[list[Annotation], int]:
    """Annotations of an events.tsv, and how many rows state no onset or no text.

    The text is trial_type, else value, row by row; `levels` gives words for texts. Raises UserError
    for a faulty row.
    """
    notes: list[Annotation] = []
    dropped = 0
    with locate_errors(rel):
        columns = tables.read_names(path, delimiter="\t")
        texts = [name for name in ("trial_type", "value") if name in columns]
        if not texts:
            return [], len(list(tables.read_rows(path, delimiter="\t")))
        lengths = ["duration"] if "duration" in columns else []
        for row in tables.read_rows(path, ["onset", *texts, *lengths], delimiter="\t"):
            if isinstance(row, Finding):
                raise finding_to_error(row)
            onset, *cells = (cell.strip() for cell in row.cells)
            text = next(filterfalse(is_missing, cells[: len(texts)]), "")
            if is_missing(onset) or not text:
                dropped += 1
                continue
            length = next(filterfalse(is_missing, cells[len(texts) :]), "0")
            note = _make_annotation(row.row, onset, length, (levels or {}).get(text, text))
            if isinstance(note, Finding):
                raise finding_to_error(note)
            notes.append(note)
    return notes, dropped


def is_missing(cell: str) -> bool:
    """Whether a cell holds nothing, or a word for nothing."""
    return cell.strip().lower() in EMPTY_CELLS


def _make_annotation(row: int, onset: str, duration: str, label: str) -> Annotation | Finding:
    try:
        begin, length = (tables.parse_number(cell) or 0.0 for cell in (onset, duration))
    except UserError as error:
        problem = f"onset or duration {error.problem}"
        return Finding(Reason.ANNOTATION_SYNTAX, problem, "expected seconds", row=row)
    if length < 0 or not label.strip():
        return Finding(Reason.ANNOTATION_SYNTAX, "a negative duration or no label", row=row)
    return Annotation(begin, length, label.strip())
