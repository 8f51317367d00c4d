"""Tables found by name, their columns matched and checked by type; dates and texts of a column in
one form.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple, Self

import numpy as np
import polars as pl

from bitimely_core.claims import dates
from bitimely_core.claims.distinct import map_texts, number_texts
from bitimely_core.claims.sources.source_table import EventBlock, SourceTable
from bitimely_core.errors import Finding, Reason, input_error, input_warning, safe_text
from bitimely_core.formats import tables
from bitimely_core.formats.source import Source

ENDINGS = (".csv", ".csv.gz", ".parquet")
SUBJECT_DATE_COLUMNS = ("birth", "death", "obs_start", "obs_end")  # of a subject
DATE_SAMPLES = 200  # distinct unreadable dates that the advice is made from
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
        form: str | None = None,
        others: bool = False,
    ) -> SourceTable:
        """The table as one of diagnoses. `dated`: where its dates come from, if not from its own
        column; `wide`: further columns; `form`: of the dates; `others`: with codes of other
        vocabularies.
        """
        names = tuple(dict.fromkeys((*self.columns.values(), *wide)))
        dated = dated or (self.file, self.columns["date"])
        return SourceTable(
            file=self.file,
            path=self.path,
            columns=names,
            shape=shape,
            dated=dated,
            kind=kind,
            delimiter=self.delimiter,
            form=form,
            others=others,
        )


def open_table(
    source: Source,
    file: str,
    wanted: Mapping[str, Sequence[str]],
    optional: Collection[str] = (),
    *,
    codes: Collection[str] = ("code",),
) -> OpenTable:
    """A table, comma- or tab-separated or Parquet. Raises UserError: as `match_columns` and
    `check_types`.
    """
    path = source.path(file)
    mark = detect_delimiter(path)
    columns = match_columns(path, wanted, optional, mark)
    check_types(path, file, columns, codes)
    return OpenTable(file, path, columns, mark)


def find_table(source: Source, *stems: str, needed: bool = True) -> str:
    """Relative path of the one table with one of these names, whatever the case, the folder and the
    ending; "" where there is none.

    Raises UserError: no_input when there are several, or none and it is `needed`.
    """
    names = {stem + ending for stem in stems for ending in ENDINGS}
    matches = sorted(
        rel for rel in {*source.files, *source.rejected} if PurePosixPath(rel).name.lower() in names
    )
    if len(matches) > 1:
        text = f"{stems[0]} occurs {len(matches)} times ({', '.join(map(safe_text, matches[:5]))})"
        raise input_error(Reason.NO_INPUT, text, "expected once", "Keep one of them in the folder")
    if needed and not matches:
        text = f"no {stems[0]}{{{','.join(ENDINGS)}}} among {len(source.files)} files"
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
    """Key -> name of its column in the file. Names are compared without case and surrounding
    blanks.

    `wanted`: key -> accepted names; the first present one is used. Keys in `optional` may be
    absent. Raises UserError: header (duplicate names, none of the accepted), schema (columns
    missing: found and expected names), and as `tables.read_names`.
    """
    every = tables.read_names(path, delimiter=mark)
    chosen, missing = {}, []
    for key, accepted in wanted.items():
        name = next(
            (one for some in accepted for one in every if one.lower() == some.lower()), None
        )
        if name is not None:
            chosen[key] = name
        elif key not in optional:
            missing.append(" or ".join(accepted))
    if missing and not set(chosen) - set(optional):
        text = f"the first line has none of the expected columns ({', '.join(missing)})"
        raise input_error(
            Reason.HEADER,
            text,
            "expected a header line with these names and a known separator",
            file=str(path),
        )
    if missing:
        text = f"the column{'s' * (len(missing) > 1)} {', '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing"
        found = ", ".join(map(safe_text, every[:60]))
        raise input_error(
            Reason.SCHEMA,
            text,
            f"found {found}",
            field=missing[0],
            file=str(path),
            found=found,
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
            hint = "Write the table with one row for each value, for example by DataFrame.explode of polars"
            raise input_error(
                Reason.SCHEMA,
                f"is stored as {kind.partition('<')[0]}",
                "expected one value in a row",
                hint,
                file=file,
                field=name,
            )
        if key in codes and kind != "text":
            text = (
                f"the codes are stored as {kind}, which loses zeros: 018.82 and 188.2 look the same"
            )
            raise input_error(
                Reason.AMBIGUOUS_CODE,
                text,
                "expected text",
                "Write the table again from its origin",
                file=file,
                field=name,
            )
        if key in {"subject", "subject_id", "date", *SUBJECT_DATE_COLUMNS} and re.match(
            r"float|double|halffloat|decimal", kind
        ):
            raise input_error(
                Reason.SCHEMA,
                f"is stored as {kind}",
                "expected text",
                "Write it as text",
                file=file,
                field=name,
            )


def reformat_dates(column: pl.Series, form: str | None, near: int | None = None) -> pl.Series:
    """Dates in a form of `dates.parse_day` as YYYY-MM-DD; other texts unchanged. Each distinct text
    is read once.
    """
    if form is None:
        return column
    return map_texts(
        column,
        lambda text: (
            text if (day := dates.parse_day(text, form, near)) is None else dates.format_day(day)
        ),
        pl.String,
    )


def assign_vocabulary(column: pl.Series, since: int, before: str, after: str) -> pl.Series:
    """The vocabulary of rows by their date: `before` a day, or from it on; null where the date
    cannot be read.
    """
    return (dates.parse_days(column) >= since).replace_strict(
        {True: after, False: before}, default=None, return_dtype=pl.String
    )


@dataclass
class DateCounts:
    """What a column of dates holds."""

    good: int = 0  # readable ones
    odd: Counter[str] = field(default_factory=Counter)  # beginnings of the others
    samples: list[str] = field(default_factory=list)  # some of them
    zoned: int = 0  # that state a zone
    last: int | None = None  # day

    def add(self, column: pl.Series) -> Self:
        """Count the dates of a column. Each distinct text is read once."""
        row, number = number_texts(column)
        distinct, rows = column.gather(row).cast(pl.String), np.bincount(number, minlength=len(row))
        days, plain = (
            pl.Series([dates.parse_day(text) for text in distinct], dtype=pl.Int32),
            distinct.str.strip_chars(),
        )
        unread = distinct.is_not_null() & days.is_null()
        for text, n in zip(
            plain.filter(unread).str.head(DATE_CHARACTERS),
            rows[unread.to_numpy()].tolist(),
            strict=True,
        ):
            self.odd[text] += n
        odd = distinct.filter(unread)
        self.samples += (
            odd.sort()
            .sample(min(odd.len(), max(0, DATE_SAMPLES - len(self.samples))), seed=0)
            .to_list()
        )
        self.good += int(rows[days.is_not_null().to_numpy()].sum())
        self.zoned += int(
            rows[plain.str.contains(dates.ZONED).fill_null(value=False).to_numpy()].sum()
        )
        self.last = max(
            (day for day in (self.last, days.max()) if isinstance(day, int)), default=None
        )
        return self


def report_zones(count: int, file: str, name: str) -> list[Finding]:
    """A warning about times with a zone, if there are any."""
    text = f"{count} dates state a time zone"
    wanted = "the date of the clock that wrote them counts, nothing is converted"
    return (
        [input_warning(Reason.TIMESTAMPS, text, wanted, file=file, field=name, count=count)]
        if count
        else []
    )


def report_spelling(
    file: str, columns: Mapping[str, str], wanted: Mapping[str, Sequence[str]]
) -> list[Finding]:
    """A warning about columns (key -> name) whose names differ from the accepted ones in case."""
    respelled = [name for key, name in columns.items() if key in wanted and name not in wanted[key]]
    text, read = (
        f"columns are written {', '.join(map(safe_text, respelled))}",
        "case does not count here",
    )
    return (
        [input_warning(Reason.HEADER, text, read, file=file, row=1, count=len(respelled))]
        if respelled
        else []
    )


def refuse_unread_dates(counts: DateCounts, file: str, name: str) -> None:
    """Refuse a column of dates most of which are in an unknown form: 02/03/04 may be six days.
    Raises UserError: date.
    """
    bad = counts.odd.total()
    if bad <= counts.good:
        return
    # no date of a patient is shown
    shape = re.sub(r"[^\W\d_]", "x", re.sub(r"\d", "9", next(iter(counts.odd))))
    text = f"{bad} of {counts.good + bad} dates are in an unknown form (they look like {safe_text(shape)})"
    forms = dates.suggest_forms(counts.samples)
    action = "Give their form with --date-format, as in --date-format '%d/%m/%Y'"
    if forms == list(dates.SERIALS):
        action = "They are serial numbers of a spreadsheet: give --date-format excel, or excel-1904 for files of old versions for the Macintosh"
    elif forms:
        given = " or ".join(f"--date-format '{form}'" for form in forms[:3])
        action = f"Give their form with {given}" + ", whichever they are" * (len(forms) > 1)
    raise input_error(
        Reason.DATE, text, "expected YYYY-MM-DD or YYYYMMDD", action, file=file, field=name
    )
