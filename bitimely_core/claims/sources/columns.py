"""Tables found by name, their columns matched and checked by type; dates and texts of a column in one form."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

import polars as pl

from bitimely_core.claims import dates
from bitimely_core.claims.sources.claims_source import EventBlock, SourceTable
from bitimely_core.errors import Finding, Reason, input_error, input_warning, safe_text
from bitimely_core.formats import tables
from bitimely_core.formats.source import Source

ENDINGS = (".csv", ".csv.gz", ".parquet")
SUBJECT_DATE_COLUMNS = ("birth", "death", "obs_start", "obs_end")  # of a subject
DATE_CHARACTERS = 10  # characters of an unreadable date of which the shape is shown


class OpenTable(NamedTuple):
    """A table whose columns have been matched and checked."""

    file: str  # relative to the source
    path: Path
    columns: dict[str, str]  # key -> name
    delimiter: str

    def read(self) -> pl.DataFrame:
        """All rows, as `tables.read_table`."""
        return tables.read_table(self.path, self.file, self.columns, self.delimiter)

    def as_events(
        self,
        shape: Callable[[pl.DataFrame], EventBlock],
        *,
        dated: tuple[str, str] | None = None,
        wide: Sequence[str] = (),
        kind: Literal["rows", "codes"] = "rows",
    ) -> SourceTable:
        """The table as one of diagnoses. `dated`: where its dates come from, if not from its own column; `wide`: further columns."""
        names = tuple(dict.fromkeys((*self.columns.values(), *wide)))
        dated = dated or (self.file, self.columns["date"])
        return SourceTable(file=self.file, path=self.path, columns=names, shape=shape, dated=dated, kind=kind, delimiter=self.delimiter)


def open_table(
    source: Source, file: str, wanted: Mapping[str, Sequence[str]], optional: Collection[str] = (), *, codes: Collection[str] = ("code",)
) -> OpenTable:
    """A table, comma- or tab-separated or Parquet. Raises UserError: as `match_columns` and `check_types`."""
    path = source.path(file)
    mark = detect_delimiter(path)
    columns = match_columns(path, wanted, optional, mark)
    check_types(path, file, columns, codes)
    return OpenTable(file, path, columns, mark)


def find_table(source: Source, *stems: str, needed: bool = True) -> str:
    """Relative path of the one table with one of these names, whatever the case, the folder and the ending; "" where there is none.

    Raises UserError: no_input when there are several, or none and it is `needed`.
    """
    names = {stem + ending for stem in stems for ending in ENDINGS}
    matches = sorted(rel for rel in {*source.files, *source.rejected} if PurePosixPath(rel).name.lower() in names)
    if len(matches) > 1:
        text = f"{stems[0]} occurs {len(matches)} times ({', '.join(map(safe_text, matches[:5]))})"
        raise input_error(Reason.NO_INPUT, text, "expected once", "Keep one of them in the folder")
    if needed and not matches:
        text = f"no {stems[0]}{{{','.join(ENDINGS)}}} among {len(source.files)} files"
        raise input_error(Reason.NO_INPUT, text, hint="Give the folder that holds it, and the --source it is laid out for")
    return matches[0] if matches else ""


def detect_delimiter(path: Path) -> str:
    """Comma, or tab where the header has tabs."""
    return "\t" if any("\t" in name for name in tables.read_names(path)) else ","


def match_columns(path: Path, wanted: Mapping[str, Sequence[str]], optional: Collection[str] = (), mark: str = ",") -> dict[str, str]:
    """Key -> name of its column in the file. Names are compared without case and surrounding blanks.

    `wanted`: key -> accepted names; the first present one is used. Keys in `optional` may be absent. Raises UserError: header (duplicate
    names, none of the accepted), schema (columns missing: found and expected names), and as `tables.read_names`.
    """
    every = tables.read_names(path, delimiter=mark)
    chosen, missing = {}, []
    for key, accepted in wanted.items():
        name = next((one for some in accepted for one in every if one.lower() == some.lower()), None)
        if name is not None:
            chosen[key] = name
        elif key not in optional:
            missing.append(" or ".join(accepted))
    if missing and not set(chosen) - set(optional):
        text = f"the first line has none of the expected columns ({', '.join(missing)})"
        raise input_error(Reason.HEADER, text, "expected a header line with these names and a known separator", file=str(path))
    if missing:
        text = f"the column{'s' * (len(missing) > 1)} {', '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing"
        found = ", ".join(map(safe_text, every[:60]))
        raise input_error(Reason.SCHEMA, text, f"found {found}", field=missing[0], file=str(path), found=found, expected=missing[0])
    return chosen


def check_types(path: Path, file: str, columns: Mapping[str, str], codes: Collection[str] = ("code",)) -> None:
    """Refuse columns whose stored type has lost information: codes that are not text, subjects and dates with a fraction.

    `columns`: key -> name; `codes`: keys of codes; `file`: name in messages. Raises UserError: ambiguous_code, schema.
    """
    kinds = tables.read_types(path)
    for key, name in columns.items():
        kind = kinds.get(name, "text")
        if key in codes and kind != "text":
            text = f"the codes are stored as {kind}, which loses zeros: 018.82 and 188.2 look the same"
            raise input_error(Reason.AMBIGUOUS_CODE, text, "expected text", "Write the table again from its origin", file=file, field=name)
        if key in {"subject", "subject_id", "date", *SUBJECT_DATE_COLUMNS} and re.match(r"float|double|halffloat|decimal", kind):
            raise input_error(Reason.SCHEMA, f"is stored as {kind}", "expected text", "Write it as text", file=file, field=name)


def reformat_dates(column: pl.Series, form: str | None) -> pl.Series:
    """Dates in a `strptime` format as YYYY-MM-DD; other texts unchanged. Each distinct text is read once."""
    if form is None:
        return column
    distinct = column.drop_nulls().unique()
    written = [text if (day := dates.parse_day(text, form)) is None else dates.format_day(day) for text in distinct]
    return column.replace_strict(distinct, written, default=None)


def assign_vocabulary(column: pl.Series, since: int, before: str, after: str) -> pl.Series:
    """The vocabulary of rows by their date: `before` a day, or from it on; null where the date cannot be read."""
    return (dates.parse_days(column) >= since).replace_strict({True: after, False: before}, default=None, return_dtype=pl.String)


def count_unread_dates(column: pl.Series) -> tuple[int, Counter[str], int]:
    """Number of readable dates of a column, the beginnings of the others, and how many state a zone. Each distinct text is read once."""
    distinct = column.drop_nulls().unique()
    odd = distinct.filter(pl.Series([dates.parse_day(text) is None for text in distinct], dtype=pl.Boolean))
    zoned = distinct.filter(distinct.str.strip_chars().str.contains(dates.ZONED))
    rows, stamped = (column.filter(column.is_in(some.implode())) if some.len() else column.clear() for some in (odd, zoned))
    heads = rows.str.strip_chars().str.head(DATE_CHARACTERS).value_counts()
    return column.count() - rows.len(), Counter(dict(heads.iter_rows())), stamped.len()


def report_zones(count: int, file: str, name: str) -> list[Finding]:
    """A warning about times with a zone, if there are any."""
    text = f"{count} dates state a time zone"
    wanted = "the date of the clock that wrote them counts, nothing is converted"
    return [input_warning(Reason.TIMESTAMPS, text, wanted, file=file, field=name, count=count)] if count else []


def report_spelling(file: str, columns: Mapping[str, str], wanted: Mapping[str, Sequence[str]]) -> list[Finding]:
    """A warning about columns (key -> name) whose names differ from the accepted ones in case."""
    respelled = [name for key, name in columns.items() if key in wanted and name not in wanted[key]]
    text, read = f"columns are written {', '.join(map(safe_text, respelled))}", "case does not count here"
    return [input_warning(Reason.HEADER, text, read, file=file, row=1, count=len(respelled))] if respelled else []


def refuse_unread_dates(good: int, odd: Counter[str], file: str, name: str) -> None:
    """Refuse a column of dates most of which are in an unknown form: 02/03/04 may be six days. Raises UserError: date."""
    bad = odd.total()
    if bad <= good:
        return
    shape = re.sub(r"[^\W\d_]", "x", re.sub(r"\d", "9", next(iter(odd))))  # no date of a patient is shown
    text = f"{bad} of {good + bad} dates are in an unknown form (they look like {safe_text(shape)})"
    action = "Give their form with --date-format, as in --date-format '%d/%m/%Y'"
    raise input_error(Reason.DATE, text, "expected YYYY-MM-DD or YYYYMMDD", action, file=file, field=name)
