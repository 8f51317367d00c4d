"""The records by which a source of claims describes its tables, and a block of events read from
one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import polars as pl

from bitimely_core.errors import Reason
from bitimely_core.formats import tables
from bitimely_core.formats.stat_files import (
    NUMBER,
    is_stat_file,
    read_stat_types,
    read_value_labels,
)
from bitimely_core.formats.table_text import TableSpan

NAMED_VALUES = ("sex", "vital", "source", "vocab", "certainty", "status")
"""Keys of columns whose numbers stand for words."""
CODE_LABEL = re.compile(r"[A-Za-z]{0,2}\d[\w.].*")  # E119, 250.00, E11.9 Diabetes; no title alone

Stated = Literal["surely", "by name", "nowhere"]
"""What states the vocabulary of rows without one: an option, the name of the column, or nothing."""


class OpenTable(NamedTuple):
    """A table whose columns have been matched and checked."""

    file: str  # relative to the source
    path: Path
    columns: dict[str, str]  # key -> name as the file spells it
    delimiter: str = ","

    def list_names(self) -> tuple[str, ...]:
        """Names of all columns of the file."""
        return tables.read_names(self.path, delimiter=self.delimiter)

    def list_unread(self) -> list[str]:
        """Names of the columns that are not among those that were matched."""
        return [name for name in self.list_names() if name not in self.columns.values()]

    def read(self) -> pl.DataFrame:
        """All rows, as `tables.read_table`; numbers that stand for words are these."""
        frame = tables.read_table(self.path, self.file, self.columns, self.delimiter)
        return frame.with_columns(self.name_values())

    def read_blocks(self, *names: str, quotes: bool = True) -> Iterator[pl.DataFrame]:
        """Blocks with `row`, the columns under their keys without surrounding blanks, and further
        columns by their names. Numbers that stand for words are these. `quotes`: as of
        `tables.read_frames`.
        """
        wanted = tuple(dict.fromkeys((*self.columns.values(), *names)))
        named = self.name_values()
        for block in tables.read_frames(self.path, wanted, delimiter=self.delimiter, quotes=quotes):
            tables.refuse_faults(block, self.file)
            frame = block.frame.select(
                "row",
                *(
                    tables.strip_blanks(pl.col(name)).alias(key)
                    for key, name in self.columns.items()
                ),
                *names,
            )
            yield frame.with_columns(named)

    def name_values(self, names: Sequence[str] = ()) -> list[pl.Expr]:
        """Columns with the labels that Stata and SPSS give to numbers: 1 may be female, 0 dead, or
        a code. `names`: of further columns of codes.
        """
        if not is_stat_file(self.path):
            return []
        named = [
            pl.col(key).replace(read_value_labels(self.path, self.columns[key]))
            for key in NAMED_VALUES
            if key in self.columns
        ]
        return named + self._name_codes(names)

    def _name_codes(self, names: Sequence[str]) -> list[pl.Expr]:
        """Columns of codes by their labels. A number without one could be taken for a code."""
        coded = {name: name for name in names}
        if "code" in self.columns:
            coded["code"] = self.columns["code"]
        labels = {key: read_code_labels(self.path, name) for key, name in coded.items()}
        return [
            pl.col(key).replace_strict(texts, default=None, return_dtype=pl.String)
            for key, texts in labels.items()
            if texts
        ]


def read_code_labels(path: Path, column: str) -> dict[str, str]:
    """Number as text -> its label, of a column of Stata or SPSS most of whose labels are codes,
    perhaps with titles; else {}. Raises UserError: as `read_value_labels`.
    """
    if not is_stat_file(path) or read_stat_types(path).get(column) != NUMBER:
        return {}
    labels = read_value_labels(path, column)
    codes = {number: label for number, label in labels.items() if CODE_LABEL.fullmatch(label)}
    return codes if 2 * len(codes) > len(labels) else {}


@dataclass(frozen=True, kw_only=True)
class SourceTable:
    """A table of diagnoses."""

    table: OpenTable
    # makes events of a block: row, the columns under their keys, those of `wide`
    shape: Callable[[pl.DataFrame], EventBlock]
    # names of columns of codes: diagnoses are counted then, else records
    wide: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()  # of dates or vocabularies, where columns of codes have their own
    dated: tuple[str, str] | None = None  # file and column of its dates, if they are not its own
    form: str = ""  # `--date-format`, where `shape` does not apply it
    span: TableSpan | None = None  # the part of the table to read; None: all of it
    categories: tuple[str, ...] = ()  # columns with few distinct texts
    vocab: str = ""  # of rows without one, where it is another one than the survey's
    dropped_note: str = ""  # what is wrong with the rows that `shape` drops, as in `are of ...`
    reverses: bool = False  # this table or another of its source marks reversals of other rows
    others: bool = False  # with codes of other vocabularies, and their values

    @property
    def file(self) -> str:
        """The name of the table in the source."""
        return self.table.file


class EventBlock(NamedTuple):
    """A block of a table as events."""

    # row, subject_id, date, code, and any of vocab, source, claim, position, value
    events: pl.DataFrame
    # reason -> rows (or codes, see `SourceTable.wide`) left out by a rule of the source
    dropped: Mapping[str, int] = {}
    # source concept (OMOP), or string of a diagnosis (MEDS) -> rows that are not read as ICD codes
    unused: Mapping[str, int] = {}


def count_dropped(reason: Reason, count: int) -> dict[str, int]:
    """Rows left out for one reason, as in `EventBlock.dropped`; empty where there are none."""
    return {str(reason): count} if count else {}
