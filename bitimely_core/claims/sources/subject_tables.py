"""Reads tables with one row for each subject: dates of birth and observation, sex, labels of 0 and
1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import polars as pl

from bitimely_core.claims import dates, unknown_dates
from bitimely_core.claims.sources import words
from bitimely_core.claims.sources.coarse_dates import complete_dates
from bitimely_core.claims.sources.columns import (
    SUBJECT_DATE_COLUMNS,
    DateCounts,
    reformat_dates,
    refuse_unread_dates,
    report_zones,
    select_columns,
    warn_of_rows,
)
from bitimely_core.claims.sources.id_spellings import IdSpellings, refuse_rounded_ids
from bitimely_core.claims.sources.source_table import OpenTable, count_dropped
from bitimely_core.errors import Finding, Reason, input_error, input_warning, safe_text
from bitimely_core.formats.source import locate_errors
from bitimely_core.types import SourceRows, find_only, select_keys

SEX_NUMBERS = {"unknown": 0, "male": 1, "female": 2}
SEXES = {word: SEX_NUMBERS[sex] for word, sex in words.index_words("sexes").items()}
# words that mean one thing beside one word and another beside another -> what they mean together
# and what is said of it
PAIRED_SEXES = {
    ("0", "1"): ({"1": 0}, "1 may be male or female: they count as unknown"),
    ("1", "3"): ({"3": 2}, "1 is taken for male, 3 for female, as in Brazil"),
    ("h", "m"): ({"h": 1, "m": 2}, "H is taken for male, M for female (hombre and mujer)"),
    ("m", "v"): (
        {"m": 0, "v": 0},
        "they may be man and vrouw, or mujer and varón: they count as unknown",
    ),
}
UK_BIOBANK = {"p31", "3100", "f3100"}  # folded names of its field 31: 0 is female, 1 is male
NUMBER = r"^0*(\d)(\.0+)?$"  # of a sex: 01, 1.0
# columns of dates that are often called otherwise -> what they may hold, the options that name them
UNREAD_DATES = {
    "death": ("deaths", "--col death={}"),
    "obs_start": ("times of observation", "--col obs_start=NAME --col obs_end=NAME"),
}
DATE_LIKE = re.compile(r"^(\d{4}-?\d\d-?\d\d|\d{1,4}[./-]\d{1,2}[./-]\d{1,4})\b")
# of a death, perhaps by its year or month alone, or a flag or word of it
DEATH_LIKE = re.compile(
    rf"{DATE_LIKE.pattern}|^((19|20)\d\d(0[1-9]|1[0-2])?|[01]|[yn]|yes|no|dead|alive|died)$",
    re.IGNORECASE,
)
SHOWN_ROWS = 11  # rows that must hold a word for a message to show it
FLAGS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}  # labels as written
EXAMPLES = 5  # rows that a message shows


@dataclass
class TableAccounts:
    """Rows and findings of the tables of a source."""

    rows: list[SourceRows] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    last: int | None = None  # day of a row of diagnoses
    spellings: IdSpellings = field(default_factory=IdSpellings)

    def exclude(
        self, reason: Reason, rows: pl.Series, problem: str, column: str | None = None
    ) -> None:
        """Count rows of the last table, given their numbers, as excluded.

        `problem` is what is wrong with them, as in `have no subject`.
        """
        if rows.is_empty():
            return
        table = self.rows[-1]
        table.quarantined[str(reason)] = rows.len()
        self.findings.append(
            Finding(
                reason,
                f"{rows.len()} rows {problem}",
                "they are excluded",
                file=table.file,
                field=column,
                count=rows.len(),
                examples=tuple(map(str, rows.head(EXAMPLES))),
            )
        )

    def enter_subjects(self, frame: pl.DataFrame, file: str, key: str) -> pl.DataFrame:
        """The rows of a table that have a subject. All are counted, and the others excluded.

        Raises UserError: as `refuse_rounded_ids`.
        """
        self.rows.append(SourceRows(file=file, kind="subjects", seen=frame.height))
        self.exclude(
            Reason.IDENTIFIER, frame.filter(pl.col(key).is_null())["row"], "have no subject"
        )
        named = frame.drop_nulls(key)
        refuse_rounded_ids(named, key, file)
        self.spellings.add(named[key])
        return named


def keep_unique_rows(
    frame: pl.DataFrame, file: str, accounts: TableAccounts, key: str = "subject_id"
) -> pl.DataFrame:
    """The table with one row for each subject, entered in the accounts.

    Rows without a subject are excluded, repeated ones are used once. Raises UserError:
    duplicate_key when two rows of one subject differ.
    """
    named = accounts.enter_subjects(frame, file, key)
    cells = [name for name in frame.columns if name != "row"]
    unique = named.unique(cells, keep="first", maintain_order=True)
    conflicting = unique.filter(pl.col(key).is_duplicated())
    if conflicting.height:
        first = conflicting.filter(pl.col(key) == conflicting[key][0])["row"]
        rows = ", ".join(map(str, first.head(EXAMPLES)))
        raise input_error(
            Reason.DUPLICATE_KEY,
            f"rows {rows} are of one subject and differ, as do those of "
            f"{conflicting[key].n_unique()} subjects in all",
            "expected one row a subject",
            "Keep only the correct row of each subject",
            file=file,
            row=int(first[0]),
        )
    repeated = named.height - unique.height
    accounts.rows[-1].dropped.update(count_dropped(Reason.DUPLICATES, repeated))
    accounts.findings += warn_of_rows(
        repeated, Reason.DUPLICATES, "rows repeat others", "they are used once", file=file
    )
    return unique


def make_subjects(
    frame: pl.DataFrame,
    file: str,
    accounts: TableAccounts,
    forms: Mapping[str, str] = MappingProxyType({}),
) -> pl.DataFrame:
    """`ClaimsSource.subjects` from a table with any of its columns.

    A warning is added to the accounts for each column with unreadable dates: they count as unknown.
    Raises UserError: date, where most of a column cannot be read.

    Args:
        frame: all text.
        file: that of the dates.
        accounts: grow. A birth with two digits of its year is in the hundred years up to their last
            day.
        forms: column -> form of its dates.
    """
    last = accounts.last
    absent = {*SUBJECT_DATE_COLUMNS, "sex"}.difference(frame.columns)
    frame = frame.with_columns(pl.lit(None, pl.String).alias(name) for name in sorted(absent))
    for name in SUBJECT_DATE_COLUMNS:
        near = dates.get_year(last) - 49 if last is not None and name == "birth" else None
        form = forms.get(name, "")
        column, findings = complete_dates(frame[name], name, form, file)
        accounts.findings += findings
        with locate_errors(file):
            written = reformat_dates(column, form, near)
        frame = frame.with_columns(_blank_unknown_dates(written, name, file, accounts))
        counts = DateCounts().add(frame[name])
        refuse_unread_dates(counts, file, name)
        accounts.findings += report_zones(counts.zoned, file, name)
        problem = f"of {counts.good + counts.bad} dates cannot be read"
        accounts.findings += warn_of_rows(
            counts.bad, Reason.METADATA, problem, "they count as unknown", file=file, field=name
        )
    is_reversed = dates.parse_days(frame["obs_start"]) > dates.parse_days(frame["obs_end"])
    accounts.findings += report_reversed(is_reversed, file)
    frame = frame.with_columns(
        pl.when(~is_reversed.fill_null(value=False)).then(name).alias(name)
        for name in ("obs_start", "obs_end")
    )
    sex, findings = _read_sexes(frame["sex"], file)
    accounts.findings += findings
    return frame.select("subject_id", *SUBJECT_DATE_COLUMNS, sex)


def report_reversed(is_reversed: pl.Series, path: str) -> list[Finding]:
    """A warning of times of observation that end before they start."""
    return warn_of_rows(
        int(is_reversed.sum()),
        Reason.METADATA,
        "times of observation end before they start",
        "they are left out",
        file=path,
        field="obs_end",
    )


def report_unread_dates(table: OpenTable) -> list[Finding]:
    """Warnings of columns of a table of subjects that are called as deaths or times of observation
    and hold dates, or flags and words of deaths, but are not read.
    """
    unread = table.list_unread()
    tests = {"death": DATE_LIKE if "vital" in table.columns else DEATH_LIKE}
    alike = {
        key: select_columns(
            table, words.find_lookalikes(key, unread), tests.get(key, DATE_LIKE).search
        )
        for key in UNREAD_DATES
        if key not in table.columns
    }
    return [
        input_warning(
            Reason.HEADER,
            f"{' and '.join(map(safe_text, dated))} may hold {UNREAD_DATES[key][0]}",
            "not read",
            f"Give {UNREAD_DATES[key][1].format(safe_text(dated[0]))}",
            file=table.file,
            row=1,
        )
        for key, dated in alike.items()
        if dated
    ]


def _blank_unknown_dates(
    texts: pl.Series, name: str, file: str, accounts: TableAccounts
) -> pl.Series:
    """A column of dates without words for a missing one and without days that stand for none,
    which a warning names.

    Of deaths and observation periods all such days are left out, of births those far from others.
    """
    counts = unknown_dates.count_days(texts)
    unknown = unknown_dates.find_unknown_days(counts)
    if name != "birth":
        unknown |= unknown_dates.DEFAULTS
    days = select_keys(counts, unknown)
    accounts.findings += warn_of_rows(
        sum(days.values()),
        Reason.DATE,
        f"rows hold {unknown_dates.describe_days(days)}",
        "which stands for an unknown date: they count as unknown",
        file=file,
        field=name,
    )
    return unknown_dates.blank_dates(texts, unknown)


def _read_sexes(column: pl.Series, file: str) -> tuple[pl.Series, list[Finding]]:
    """The numbers of `SEX_NUMBERS` of a column of words, null where it is empty, and warnings of
    words that are no known sex or that mean another one elsewhere.
    """
    lower = column.str.strip_chars().str.to_lowercase().str.replace(NUMBER, "$1")
    counts = lower.drop_nulls().value_counts(name="rows", sort=True)
    numbers = {word: parse_sex(word) for word in counts["sex"]}
    findings = []
    for pair, (meanings, rule) in PAIRED_SEXES.items():
        if set(pair) <= numbers.keys() and 2 not in numbers.values():
            numbers |= meanings
            problem = f"sexes are written {' and '.join(map(str.upper, pair))}: {rule}"
            findings.append(
                input_warning(Reason.METADATA, problem, "", "Write M and F", file=file, field="sex")
            )
    odd = counts.filter([numbers[word] is None for word in counts["sex"]])
    frequent = odd.filter(pl.col("rows") >= SHOWN_ROWS)["sex"].head(EXAMPLES)
    examples = f" ({', '.join(map(safe_text, frequent))})" if frequent.len() else ""
    findings += warn_of_rows(
        int(odd["rows"].sum()),
        Reason.METADATA,
        f"of {column.count()} sexes are not understood{examples}",
        "they count as unknown: known are M, F, male, female, 1, 2",
        hint="Write M and F",
        file=file,
        field="sex",
    )
    filled = {word: number or 0 for word, number in numbers.items()}
    return lower.replace_strict(filled, default=None, return_dtype=pl.UInt8), findings


def decode_sexes(frame: pl.DataFrame, columns: Mapping[str, str]) -> pl.DataFrame:
    """The rows with words in place of numbers of which the name of the column states the meaning.

    `columns`: key -> name.
    """
    if words.fold_name(columns.get("sex", "")) not in UK_BIOBANK:
        return frame
    return frame.with_columns(pl.col("sex").replace({"0": "female", "1": "male"}))


def parse_sex(text: str) -> int | None:
    """The number of a sex in lower case, also with its code: male, 1 - male; None where the text is
    not understood.
    """
    if text in SEXES:
        return SEXES[text]
    numbers = set(map(SEXES.get, re.findall(r"\w+", text)))
    sure = numbers - {SEX_NUMBERS["unknown"]}
    return find_only(sure, None)


def parse_labels(
    frame: pl.DataFrame, columns: Mapping[str, str], names: Sequence[str], accounts: TableAccounts
) -> pl.DataFrame:
    """Columns of 0 and 1 as Int8. Rows of this last table of the accounts with other values are
    excluded.

    `columns` (key -> header) is for messages. Raises UserError: label, for a column with other
    values in most rows.
    """
    is_odd = pl.lit(value=False)
    for name in names:
        is_wrong = pl.col(name).is_not_null() & ~pl.col(name).is_in(list(FLAGS))
        wrong, count = frame.filter(is_wrong).height, frame[name].count()
        if 2 * wrong > count:
            raise input_error(
                Reason.LABEL,
                f"{wrong} of {count} rows hold neither 0 nor 1",
                "expected a label",
                "Remove the column, or name the labels with --label-column COLUMN:NAME:VALUE",
                file=accounts.rows[-1].file,
                field=columns[name],
            )
        is_odd |= is_wrong
    odd = frame.filter(is_odd)["row"]
    accounts.exclude(Reason.LABEL, odd, "hold neither 0 nor 1 as a label")
    return frame.filter(~is_odd).with_columns(
        pl.col(name).replace_strict(FLAGS, default=None, return_dtype=pl.Int8) for name in names
    )
