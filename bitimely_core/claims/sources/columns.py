"""Finds the tables of a source by name, matches their columns and checks the types; reads columns
of dates.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Self

import numpy as np
import polars as pl

from bitimely_core.claims import dates
from bitimely_core.claims.distinct import map_texts, number_texts
from bitimely_core.claims.sources.source_table import OpenTable
from bitimely_core.errors import Finding, Reason, input_error, input_warning, safe_text
from bitimely_core.formats import tables
from bitimely_core.formats.source import Source

ENDINGS = (".csv", ".csv.gz", ".parquet")
SUBJECT_DATE_COLUMNS = ("birth", "death", "obs_start", "obs_end")  # of a subject
# keys of columns whose numbers have no fraction
WHOLE_COLUMNS = {"subject", "subject_id", "date", *SUBJECT_DATE_COLUMNS}
FRACTION_TYPES = ("float", "double", "halffloat", "decimal")  # of Arrow
DATE_SAMPLES = 200  # distinct unreadable dates that the advice is made from
DATE_CHARACTERS = 10  # characters of an unreadable date of which the shape is shown


def open_table(
    source: Source,
    file: str,
    wanted: Mapping[str, Sequence[str]],
    optional: Collection[str] = (),
    *,
    codes: Collection[str] = ("code",),
) -> OpenTable:
    """A table, comma- or tab-separated or Parquet.

    Raises UserError: as `match_columns` and `check_types`.
    """
    path = source.path(file)
    mark = detect_delimiter(path)
    columns = match_columns(path, wanted, optional, mark)
    check_types(path, file, columns, codes)
    return OpenTable(file, path, columns, mark)


def find_table(source: Source, stem: str, *, needed: bool = True) -> str:
    """Relative path of the table of this name; "" where there is none.

    Case, folder and ending do not count. Raises UserError: no_input when there are several, or none
    and it is `needed`.
    """
    names = {stem + ending for ending in ENDINGS}
    paths = sorted({*source.files, *source.rejected})
    matches = [path for path in paths if PurePosixPath(path).name.lower() in names]
    if len(matches) > 1:
        text = f"{stem} occurs {len(matches)} times ({', '.join(map(safe_text, matches[:5]))})"
        raise input_error(Reason.NO_INPUT, text, "expected once", "Keep one of them in the folder")
    if needed and not matches:
        text = f"no {stem}{{{','.join(ENDINGS)}}} among {len(source.files)} files"
        raise input_error(
            Reason.NO_INPUT,
            text,
            hint="Give the folder that holds it, and the --source it is laid out for",
        )
    return matches[0] if matches else ""


def detect_delimiter(path: Path) -> str:
    """Comma, or tab where the header has tabs."""
    return "\t" if any("\t" in name for name in tables.read_names(path)) else ","


def match_columns(
    path: Path, wanted: Mapping[str, Sequence[str]], optional: Collection[str] = (), mark: str = ","
) -> dict[str, str]:
    """Key -> name of its column in the file. Case and surrounding blanks of names do not count.

    `wanted`: key -> accepted names, of which the first present one is used. Keys in `optional` may
    be absent. Raises UserError: header (duplicate names, none of the accepted), schema (columns
    missing: found and expected names), and as `tables.read_names`.
    """
    names = tables.read_names(path, delimiter=mark)
    by_lower_case = {name.lower(): name for name in reversed(names)}  # of equal ones the first
    chosen, missing = {}, []
    for key, accepted in wanted.items():
        matches = (by_lower_case.get(name.lower()) for name in accepted)
        name = next(filter(None, matches), None)
        if name is not None:
            chosen[key] = name
        elif key not in optional:
            missing.append(" or ".join(accepted))
    if missing and chosen.keys() <= set(optional):
        raise input_error(
            Reason.HEADER,
            f"the first line has none of the expected columns ({', '.join(missing)})",
            "expected a header line with these names and a known separator",
            file=str(path),
        )
    if missing:
        listed = ", ".join(map(safe_text, names[:60]))
        subject = "the columns" if len(missing) > 1 else "the column"
        verb = "are" if len(missing) > 1 else "is"
        raise input_error(
            Reason.SCHEMA,
            f"{subject} {', '.join(missing)} {verb} missing",
            f"found {listed}",
            field=missing[0],
            file=str(path),
            found=listed,
            expected=missing[0],
        )
    return chosen


def check_types(
    path: Path, file: str, columns: Mapping[str, str], codes: Collection[str] = ("code",)
) -> None:
    """Refuse columns with several values a row, and those whose stored type has lost information:
    codes that are not text, subjects and dates with a fraction.

    `columns`: key -> name; `codes`: keys of codes; `file`: name in messages. Raises UserError:
    ambiguous_code, schema.
    """
    kinds = tables.read_types(path)
    for key, name in columns.items():
        kind = kinds.get(name, "text")
        if "<" in kind:
            raise input_error(
                Reason.SCHEMA,
                f"is stored as {kind.partition('<')[0]}",
                "expected one value in a row",
                "Write the table with one row for each value, for example by DataFrame.explode of "
                "polars",
                file=file,
                field=name,
            )
        if key in codes and kind != "text":
            raise input_error(
                Reason.AMBIGUOUS_CODE,
                f"the codes are stored as {kind}, which loses zeros: "
                "018.82 and 188.2 look the same",
                "expected text",
                "Write the table again from its origin",
                file=file,
                field=name,
            )
        if key in WHOLE_COLUMNS and kind.startswith(FRACTION_TYPES):
            raise input_error(
                Reason.SCHEMA,
                f"is stored as {kind}",
                "expected text",
                "Write it as text",
                file=file,
                field=name,
            )


def rename_columns(frame: pl.DataFrame, columns: Mapping[str, str], *names: str) -> pl.DataFrame:
    """`row`, the columns (key -> name) under their keys without surrounding blanks, and `names`."""
    stripped = (tables.strip_blanks(pl.col(name)).alias(key) for key, name in columns.items())
    return frame.select("row", *stripped, *names)


def reformat_dates(column: pl.Series, form: str | None, near: int | None = None) -> pl.Series:
    """Dates in a form of `dates.parse_day` as YYYY-MM-DD; other texts unchanged."""
    if form is None:
        return column

    def reformat(text: str | None) -> str | None:
        day = dates.parse_day(text, form, near)
        return text if day is None else dates.format_day(day)

    return map_texts(column, reformat, pl.String)


def assign_vocabulary(column: pl.Series, since: int, before: str, after: str) -> pl.Series:
    """The vocabulary of rows by their date: `before` a day, or `after` from it on.

    Null where the date cannot be read.
    """
    return (dates.parse_days(column) >= since).replace_strict(
        {True: after, False: before}, default=None, return_dtype=pl.String
    )


@dataclass
class DateCounts:
    """What a column of dates holds."""

    good: int = 0  # rows with a readable date
    odd: Counter[str] = field(default_factory=Counter)  # beginnings of the other texts -> rows
    samples: list[str] = field(default_factory=list)  # some of the other texts
    zoned: int = 0  # rows that state a zone
    last: int | None = None  # day

    def add(self, column: pl.Series) -> Self:
        """Count the dates of a column."""
        row, number = number_texts(column)
        texts, rows = column.gather(row).cast(pl.String), np.bincount(number, minlength=len(row))
        plain = texts.str.strip_chars()
        days = pl.Series([dates.parse_day(text) for text in texts], dtype=pl.Int32)
        self.good += int(rows[days.is_not_null().to_numpy()].sum())
        zoned = plain.str.contains(dates.ZONED).fill_null(value=False)
        self.zoned += int(rows[zoned.to_numpy()].sum())
        last = days.max()
        if isinstance(last, int):
            self.last = last if self.last is None else max(self.last, last)
        self._add_odd(texts, plain, rows, texts.is_not_null() & days.is_null())
        return self

    def _add_odd(
        self, texts: pl.Series, plain: pl.Series, rows: np.ndarray, is_odd: pl.Series
    ) -> None:
        """Count unreadable dates, and take some of them as samples."""
        beginnings = plain.filter(is_odd).str.head(DATE_CHARACTERS)
        for text, n in zip(beginnings, rows[is_odd.to_numpy()].tolist(), strict=True):
            self.odd[text] += n
        odd = texts.filter(is_odd).sort()
        wanted = min(odd.len(), max(0, DATE_SAMPLES - len(self.samples)))
        self.samples += odd.sample(wanted, seed=0).to_list()


def report_zones(count: int, file: str, name: str) -> list[Finding]:
    """A warning about times with a zone, if there are any."""
    if not count:
        return []
    return [
        input_warning(
            Reason.TIMESTAMPS,
            f"{count} dates state a time zone",
            "the date of the clock that wrote them counts, nothing is converted",
            file=file,
            field=name,
            count=count,
        )
    ]


def report_spelling(
    file: str, columns: Mapping[str, str], wanted: Mapping[str, Sequence[str]]
) -> list[Finding]:
    """A warning about columns (key -> name) whose names differ from the accepted ones in case."""
    names = [name for key, name in columns.items() if key in wanted and name not in wanted[key]]
    if not names:
        return []
    return [
        input_warning(
            Reason.HEADER,
            f"columns are written {', '.join(map(safe_text, names))}",
            "case does not count here",
            file=file,
            row=1,
            count=len(names),
        )
    ]


def refuse_unread_dates(counts: DateCounts, file: str, name: str) -> None:
    """Refuse a column of dates most of which are in an unknown form: 02/03/04 may be six days.

    Raises UserError: date.
    """
    bad = counts.odd.total()
    if bad <= counts.good:
        return
    # no date of a patient is shown
    shape = re.sub(r"[^\W\d_]", "x", re.sub(r"\d", "9", next(iter(counts.odd))))
    rows = f"{bad} of {counts.good + bad} dates are in an unknown form"
    raise input_error(
        Reason.DATE,
        f"{rows} (they look like {safe_text(shape)})",
        "expected YYYY-MM-DD or YYYYMMDD",
        _advise_form(dates.suggest_forms(counts.samples)),
        file=file,
        field=name,
    )


def _advise_form(forms: Sequence[str]) -> str:
    """What to do about dates that may be in some forms."""
    if list(forms) == list(dates.SERIALS):
        return (
            "They are serial numbers of a spreadsheet: give --date-format excel, or excel-1904 for "
            "files of old versions for the Macintosh"
        )
    if not forms:
        return "Give their form with --date-format, as in --date-format '%d/%m/%Y'"
    flags = " or ".join(f"--date-format '{form}'" for form in forms[:3])
    return f"Give their form with {flags}" + ", whichever they are" * (len(forms) > 1)
