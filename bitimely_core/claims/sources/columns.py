"""Finds the tables of a source by name, matches their columns and checks the types; reads columns
of dates.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Self, Unpack

import numpy as np
import polars as pl

from bitimely_core.claims import dates
from bitimely_core.claims.codes import shape_text
from bitimely_core.claims.distinct import map_texts
from bitimely_core.claims.sources import words
from bitimely_core.claims.sources.source_table import OpenTable, read_code_labels
from bitimely_core.claims.unknown_dates import DEFAULTS, MISSING
from bitimely_core.errors import (
    Finding,
    Place,
    Reason,
    UserError,
    input_error,
    input_warning,
    safe_text,
)
from bitimely_core.formats import tables
from bitimely_core.formats.sniffer import find_delimiter
from bitimely_core.formats.source import Source
from bitimely_core.formats.stat_files import READERS

ENDINGS = (
    ".csv",
    ".csv.gz",
    ".parquet",
    ".pq",
    ".tsv",
    ".tsv.gz",
    ".txt",
    ".txt.gz",
    ".psv",
    *READERS,
)
END_COLUMNS = {"death", "obs_end"}  # of those that follow
SUBJECT_DATE_COLUMNS = ("birth", "death", "obs_start", "obs_end")  # of a subject
SUBJECT_COLUMNS = {"subject", "subject_id"}
# keys of columns whose numbers have no fraction
WHOLE_COLUMNS = {*SUBJECT_COLUMNS, "date", *SUBJECT_DATE_COLUMNS}
ROW_COLUMNS = {"date", "code"}  # keys of columns that each row of claims needs
SHORT_TYPES = ("float", "halffloat")  # of Arrow: they do not hold a number of eight digits
EXACT_BELOW = 2**53  # whole numbers that a double holds
SAMPLE_ROWS = 200  # by which it is known what a column holds
DATE_SAMPLES = 200  # distinct unreadable dates that the advice is made from
NAMES_SHOWN = 6  # accepted names of a missing column
DATE_CHARACTERS = 10  # characters of an unreadable date of which the shape is shown
DAY_NUMBER = re.compile(r"-?\d{1,5}(\.0+)?", re.ASCII)
ELAPSED_HINT = (
    "If they are days from the birth or an index day of each person, add them to one day for all, "
    "as 2000-01-01, and write births, deaths and times of observation likewise"
)
SLIPS = 2  # dates with day and month the other way round that a table may have for no reason


def open_table(
    source: Source,
    file: str,
    wanted: Mapping[str, Sequence[str]],
    optional: Collection[str] = (),
    *,
    codes: Collection[str] = (),
    named: bool = False,
) -> OpenTable:
    """A table of text, whatever separates its cells, of Parquet, or of Stata, SAS or SPSS.

    `codes`: names of columns of codes beside that with the key `code`; `named`: `--col` gives
    columns other names. Raises UserError: as `_match_columns` and `_check_types`.
    """
    path = source.path(file)
    mark = find_delimiter(path)
    columns = _match_columns(path, wanted, optional, mark, named=named)
    names = {name: name for name in codes}
    _check_types(path, file, columns | names, {"code", *codes})
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
        text = f"no {stem}{{{','.join(ENDINGS[:3])}}} among {len(source.files)} files"
        raise input_error(
            Reason.NO_INPUT,
            text,
            hint="Give the folder that holds it, and the --source it is laid out for",
        )
    return matches[0] if matches else ""


def _match_columns(
    path: Path,
    wanted: Mapping[str, Sequence[str]],
    optional: Collection[str] = (),
    mark: str = ",",
    *,
    named: bool = False,
) -> dict[str, str]:
    """Key -> name of its column in the file. Case, blanks and punctuation of names do not count.

    `wanted`: key -> accepted name or names, of which the first present one is used, of dates and
    codes of claims the first that most rows fill. Keys in `optional` may be absent. Raises
    UserError: header (duplicate names, none of the accepted), schema (columns missing: found and
    expected names), and as `tables.read_names`.
    """
    names = tables.read_names(path, delimiter=mark)
    chosen, missing = {}, dict[str, str]()
    for key, texts in wanted.items():
        accepted = [texts] if isinstance(texts, str) else texts
        if matches := find_names(names, accepted):
            chosen[key] = _choose_filled(path, matches, mark) if key in ROW_COLUMNS else matches[0]
        elif key not in optional:
            missing[key] = " or ".join(accepted[:NAMES_SHOWN])
    if missing:
        unused = [name for name in names if name not in chosen.values()] if named else None
        is_optional = chosen.keys() <= set(optional)
        raise _refuse_missing(path, names, missing, unused, is_header=not is_optional)
    return chosen


def _choose_filled(path: Path, names: Sequence[str], mark: str) -> str:
    """The first of some columns whose first rows hold half as many texts as any other."""
    if len(names) == 1:
        return names[0]
    counts = [sum(map(_is_text, peek_texts(path, name, mark))) for name in names]
    return next(itertools.compress(names, 2 * np.array(counts) >= max(counts)))


def _is_text(cell: str) -> bool:
    return MISSING.fullmatch(cell) is None


def _refuse_missing(
    path: Path,
    names: Sequence[str],
    missing: Mapping[str, str],
    unused: Sequence[str] | None,
    *,
    is_header: bool,
) -> UserError:
    """The error about columns that are missing: key -> accepted names.

    `unused`: columns of which `--col` may name one, which the advice does where a name is alike;
    None: `--col` names no column of this table.
    """
    expected, alike = ", ".join(missing.values()), _match_lookalikes(missing, unused or ())
    flags = dict.fromkeys(missing, "NAME") | alike
    years = find_names(unused or (), words.WORDS["date_parts"]["year"])
    if years and flags.get("date") == "NAME":
        flags["date"] = f"{safe_text(years[0])} --date-format date=year"
    advice = " ".join(f"--col {key}={name}" for key, name in flags.items())
    # a first line without any is perhaps a patient's row: nothing of it is shown
    if not is_header and not alike:
        return input_error(
            Reason.HEADER,
            f"the first line has none of the expected columns ({expected})",
            "expected a header line with these names and a known separator",
            None if unused is None else f"If it is a header, name its columns: {advice}",
            file=str(path),
        )
    return input_error(
        Reason.SCHEMA,
        f"columns are missing: {expected}",
        f"found {', '.join(map(safe_text, names[:60]))}",
        None if unused is None else f"Give their names, as {advice}",
        field=", ".join(missing),
        file=str(path),
    )


def _match_lookalikes(keys: Iterable[str], names: Sequence[str]) -> dict[str, str]:
    """Key -> a name that is like it, of codes all that are called as diagnoses; each name for one
    key at most; without the keys that no name is like.
    """
    alike = dict[str, list[str]]()
    for key in keys:
        free = [name for name in names if name not in itertools.chain(*alike.values())]
        diagnoses = words.find_lookalikes("diagnosis", free) if key == "code" else []
        if lookalikes := diagnoses or words.find_lookalikes(key, free)[:1]:
            alike[key] = lookalikes
    return {key: ",".join(map(safe_text, listed)) for key, listed in alike.items()}


def find_names(names: Sequence[str], accepted: Sequence[str]) -> list[str]:
    """The names of a table that are accepted, the preferred one first.

    Case, blanks and punctuation do not count. Of two names that differ in nothing else, the one
    that is spelled as accepted but for its case is preferred, then the first.
    """
    by_folded = {words.fold_name(name): name for name in reversed(names)}
    by_lower_case = {name.lower(): name for name in reversed(names)}
    matches = (
        by_lower_case.get(name.lower()) or by_folded.get(words.fold_name(name)) for name in accepted
    )
    return list(dict.fromkeys(filter(None, matches)))


def _check_types(path: Path, file: str, columns: Mapping[str, str], codes: Collection[str]) -> None:
    """Refuse columns with several values a row, and those whose stored type has lost information:
    codes that are not text, subjects and dates in too few bits.

    `columns`: key -> name; `codes`: keys of codes; `file`: name in messages. Raises UserError:
    ambiguous_code, schema.
    """
    kinds = tables.read_types(path)
    for key, name in columns.items():
        kind = kinds.get(name, "text")
        reason, hint = Reason.SCHEMA, "Write it as text"
        if "<" in kind:
            hint = "Write one row for each value, for example by DataFrame.explode of polars"
        elif key in codes and not _holds_text(path, name, kind):
            # without zeros 018.82 and 188.2 look the same
            reason, hint = Reason.AMBIGUOUS_CODE, "Write the table again from its origin"
        elif key not in WHOLE_COLUMNS or not _has_lost_digits(path, key, name, kind):
            continue
        raise input_error(
            reason,
            f"is stored as {kind.partition('<')[0]}",
            "expected text",
            hint,
            file=file,
            field=name,
        )


def _holds_text(path: Path, name: str, kind: str) -> bool:
    """Whether a column holds texts, or numbers with codes as labels."""
    return kind == "text" or bool(read_code_labels(path, name))


def _has_lost_digits(path: Path, key: str, name: str, kind: str) -> bool:
    """Whether the type of a column of subjects or dates does not hold their numbers."""
    if kind in SHORT_TYPES:
        return True
    if kind != "double" or key not in SUBJECT_COLUMNS:
        return False
    texts = peek_texts(path, name)
    return not all(text.isdecimal() and int(text) < EXACT_BELOW for text in texts)


def peek_texts(path: Path, name: str, delimiter: str = ",") -> list[str]:
    """The first texts of a column, without empty ones."""
    rows = itertools.islice(tables.read_rows(path, (name,), delimiter=delimiter), SAMPLE_ROWS)
    texts = [row.cells[0].strip() for row in rows if isinstance(row, tables.TableRow)]
    return list(filter(None, texts))


def select_columns(
    table: OpenTable, names: Sequence[str], test: Callable[[str], object]
) -> list[str]:
    """The columns, of some, most of whose first texts pass a test. Words for a missing value do
    not count.
    """
    passed = []
    for name, texts in peek_columns(table, names).items():
        results = [bool(test(text)) for text in texts]
        if 2 * sum(results) > len(results):
            passed.append(name)
    return passed


def peek_columns(
    table: OpenTable, names: Sequence[str], rows: int = SAMPLE_ROWS
) -> dict[str, list[str]]:
    """Column -> its first texts, at most `rows`, without words for a missing value."""
    if not names:
        return {}
    blocks = table._replace(columns={name: name for name in names}).read_blocks()
    first = read_first(blocks, names, rows)
    return {
        column.name: list(itertools.filterfalse(MISSING.fullmatch, column.drop_nulls().head(rows)))
        for column in first
    }


def read_first(blocks: Iterable[pl.DataFrame], names: Sequence[str], rows: int) -> pl.DataFrame:
    """Columns of the first blocks of a table which have so many rows together, or of all."""
    frames, height = [pl.DataFrame(schema=dict.fromkeys(names, pl.String))], 0
    for frame in blocks:
        frames.append(frame.select(pl.col(names).cast(pl.String)))
        height += frame.height
        if height >= rows:
            break
    return pl.concat(frames)


def reformat_dates(column: pl.Series, form: str, near: int | None = None) -> pl.Series:
    """Dates in a form of `dates.parse_day` as YYYY-MM-DD; other texts, or all without a form,
    unchanged.

    Raises UserError: date, for a column of which some texts have the day first, others the month.
    """
    if not form:
        return column

    def reformat(text: str | None) -> str | None:
        day = dates.parse_day(text, form, near)
        return text if day is None else dates.format_day(day)

    written = map_texts(column, reformat, pl.String)
    _refuse_both_orders(written, form)
    return written


def _refuse_both_orders(written: pl.Series, form: str) -> None:
    """Raises UserError: date, where more than slips of the texts that a form does not read have
    day and month the other way round: then those up to day 12 that it reads may be wrong, too.
    """
    swapped = form.translate(str.maketrans("dm", "md"))
    if not {"%d", "%m"} <= set(re.findall("%.", form)):
        return
    unread = written.filter(written.str.contains("^[0-9]{1,2}[^0-9]"))
    n_other = map_texts(unread, lambda text: dates.parse_day(text, swapped), pl.Int32).count()
    if n_other > SLIPS + written.count() / 100:
        raise input_error(
            Reason.DATE,
            f"{n_other} of {written.count()} dates are not {form} but {swapped}",
            "expected one order of day and month: which one is 03/04 cannot be known",
            "Write all dates as YYYY-MM-DD, each part of the table in its own order",
            field=written.name,
        )


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
    bad: int = 0  # rows with another text
    samples: list[str] = field(default_factory=list)  # some of the other texts
    distant: int = 0  # rows of years of another calendar
    zoned: int = 0  # rows that state a zone
    last: int | None = None  # day

    def add(self, column: pl.Series) -> Self:
        """Count the dates of a column."""
        counts = column.alias("text").value_counts(name="rows").drop_nulls()
        counts = counts.with_columns(pl.col("text").cast(pl.String))
        days = dates.parse_days(counts["text"])
        unread = counts.filter(days.is_null()).sort("text")
        odd = unread.filter([not MISSING.fullmatch(text.strip()) for text in unread["text"]])
        self.bad += int(odd["rows"].sum())
        self.good += column.count() - int(unread["rows"].sum())
        is_distant = (days >= dates.DISTANT) & ~days.is_in(list(DEFAULTS))
        self.distant += int(counts.filter(is_distant)["rows"].sum())
        is_zoned = pl.col("text").str.strip_chars().str.contains(dates.ZONED)
        self.zoned += int(counts.filter(is_zoned)["rows"].sum())
        wanted = min(odd.height, DATE_SAMPLES - len(self.samples))
        self.samples += odd["text"].sample(wanted, seed=0).to_list()
        last = days.max()
        if isinstance(last, int):
            self.last = last if self.last is None else max(self.last, last)
        return self


def warn_of_rows(
    count: int,
    reason: Reason,
    problem: str,
    requirement: str = "",
    *,
    hint: str = "",
    examples: Iterable[object] = (),
    **place: Unpack[Place],
) -> list[Finding]:
    """A warning of `count` rows with a problem; none where there are none."""
    texts, problem = tuple(map(str, examples)), f"{count} {problem}"
    warning = input_warning(
        reason, problem, requirement, hint, count=count, examples=texts, **place
    )
    return [warning] if count else []


def report_zones(count: int, file: str, name: str) -> list[Finding]:
    """A warning about times with a zone, if there are any."""
    rule = "the date of the clock that wrote them counts, nothing is converted"
    problem = "dates state a time zone"
    return warn_of_rows(count, Reason.TIMESTAMPS, problem, rule, file=file, field=name)


def report_spelling(
    file: str, columns: Mapping[str, str], wanted: Mapping[str, Sequence[str]]
) -> list[Finding]:
    """A warning about columns (key -> name) whose names differ from the accepted ones in case."""
    names = [name for key, name in columns.items() if key in wanted and name not in wanted[key]]
    problem = f"columns are written {', '.join(map(safe_text, names))}"
    rule = "case and punctuation do not count here"
    return warn_of_rows(len(names), Reason.HEADER, problem, rule, file=file, row=1)


def _advise_forms(samples: Sequence[str], name: str) -> str:
    """What to do about some dates: the options that read them, those for numbers with the years
    that they give; of dates of subjects for their column alone, since those of the claims may have
    another form.
    """
    column = f"{name}=" if name in SUBJECT_DATE_COLUMNS else ""
    flags = _list_forms(samples, name, column)
    if words.find_lookalikes("elapsed", [name]) or not (flags or column or _has_texts(samples)):
        return " or give ".join([ELAPSED_HINT, *flags])
    if not flags:
        other = ", or rename the column if it holds no dates" if column else ""
        return f"Write them as YYYY-MM-DD{other}"
    return f"Give their form, as {' or '.join(flags)}"


def _has_texts(samples: Sequence[str]) -> bool:
    """Whether some dates are no numbers of days."""
    return not all(DAY_NUMBER.fullmatch(text.strip()) for text in samples)


def _list_forms(samples: Sequence[str], name: str, column: str) -> list[str]:
    """The options that read some dates, those for numbers with the years that they give. `column`:
    before the form.
    """
    years = dates.list_number_forms(samples, dates.get_plausible(name))
    flags = [
        f"--date-format {column}{form} (then they are of {first} to {last})"
        for form, (first, last) in years.items()
    ]
    if years.keys() <= {dates.ROC}:  # 940123 may also be of 1994
        flags += [f"--date-format '{column}{form}'" for form in dates.suggest_forms(samples)[:3]]
    return flags


def refuse_several_forms(columns: Mapping[str, tuple[str, pl.Series]]) -> None:
    """Raises UserError: date, where several columns are in an unknown form, with the forms of all.
    `columns`: key -> file and first dates. One alone is refused when it is read.
    """
    counted = {key: DateCounts().add(column) for key, (_, column) in columns.items()}
    samples = {key: counts.samples for key, counts in counted.items() if counts.bad > counts.good}
    common = [_list_forms(texts, key, "") for key, texts in samples.items()]
    if len(common) <= 1 or not all(common):
        return
    of_each = [_list_forms(texts, key, f"{key}=") for key, texts in samples.items()]
    flags = common[:1] if all(forms == common[0] for forms in common) else of_each
    places = ", ".join(f"{key} of {safe_text(columns[key][0])}" for key in samples)
    raise input_error(
        Reason.DATE,
        f"dates of several columns are in an unknown form: {places}",
        "expected YYYY-MM-DD or YYYYMMDD",
        f"Give their forms, as {' and '.join(map(' or '.join, flags))}",
    )


def refuse_unread_dates(counts: DateCounts, file: str, name: str) -> None:
    """Refuse a column of dates most of which are in an unknown form, as 02/03/04, which may be six
    days, or of years of another calendar.

    Raises UserError: date.
    """
    place: Place = {"file": file, "field": name}
    if counts.distant > counts.good / 2:
        raise input_error(
            Reason.DATE,
            f"{counts.distant} of {counts.good + counts.bad} dates are of years after 2400",
            "expected years of the common era",
            "Write them so: 2548 of the Buddhist calendar is 2005",
            **place,
        )
    if counts.bad <= counts.good:
        return
    # no date of a patient is shown
    shape = safe_text(shape_text(counts.samples[0].strip()[:DATE_CHARACTERS]))
    rows = f"{counts.bad} of {counts.good + counts.bad} dates are in an unknown form"
    raise input_error(
        Reason.DATE,
        f"{rows} (they look like {shape})",
        "expected YYYY-MM-DD or YYYYMMDD",
        _advise_forms(counts.samples, name),
        **place,
    )
