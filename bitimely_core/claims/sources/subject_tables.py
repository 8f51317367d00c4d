"""Reads tables with one row for each subject: dates of birth and observation, sex, labels of 0 and
1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from bitimely_core.claims import dates
from bitimely_core.claims.sources.columns import (
    SUBJECT_DATE_COLUMNS,
    DateCounts,
    reformat_dates,
    refuse_unread_dates,
    report_zones,
)
from bitimely_core.claims.sources.source_table import count_dropped
from bitimely_core.errors import Finding, Reason, input_error, input_warning
from bitimely_core.types import SourceRows

SEXES = {"1": 1, "m": 1, "male": 1, "2": 2, "f": 2, "female": 2}  # any other text: 0, unknown
FLAGS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}  # labels as written
EXAMPLES = 5  # rows that a message shows


@dataclass
class TableAccounts:
    """Rows and findings of the tables of a source that hold no diagnoses."""

    rows: list[SourceRows] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def report_excluded(
    reason: Reason, rows: pl.Series, problem: str, file: str, field: str | None = None
) -> list[Finding]:
    """The finding on excluded rows, whose numbers are `rows`; none where there are none.

    `problem` is what is wrong with them, as in `have no subject`.
    """
    if rows.is_empty():
        return []
    return [
        Finding(
            reason,
            f"{rows.len()} rows {problem}",
            "they are excluded",
            file=file,
            field=field,
            count=rows.len(),
            examples=tuple(map(str, rows.head(EXAMPLES))),
        )
    ]


def keep_unique_rows(
    frame: pl.DataFrame, file: str, accounts: TableAccounts, key: str = "subject_id"
) -> pl.DataFrame:
    """The table with one row for each subject, entered in the accounts.

    Rows without a subject are excluded, repeated ones are used once. Raises UserError:
    duplicate_key when two rows of one subject differ.
    """
    without = frame.filter(pl.col(key).is_null())["row"]
    named = frame.filter(pl.col(key).is_not_null())
    cells = [name for name in frame.columns if name != "row"]
    unique = named.unique(cells, keep="first", maintain_order=True)
    _refuse_conflicts(unique, file, key)
    accounts.findings += report_excluded(Reason.IDENTIFIER, without, "have no subject", file)
    repeated = named.height - unique.height
    if repeated:
        accounts.findings.append(
            input_warning(
                Reason.DUPLICATES,
                f"{repeated} rows repeat others",
                "they are used once",
                file=file,
                count=repeated,
            )
        )
    accounts.rows.append(
        SourceRows(
            file=file,
            kind="subjects",
            seen=frame.height,
            dropped=count_dropped(Reason.DUPLICATES, repeated),
            quarantined=count_dropped(Reason.IDENTIFIER, without.len()),
        )
    )
    return unique


def _refuse_conflicts(frame: pl.DataFrame, file: str, key: str) -> None:
    """Raises UserError: duplicate_key for a subject with several rows."""
    conflicting = frame.filter(pl.col(key).is_duplicated())
    if conflicting.is_empty():
        return
    first = conflicting.filter(pl.col(key) == conflicting[key][0])["row"]
    others = conflicting[key].n_unique() - 1
    text = f"rows {', '.join(map(str, first.head(EXAMPLES)))} are of one subject and differ"
    raise input_error(
        Reason.DUPLICATE_KEY,
        f"{text}, so do those of {others} other subjects" if others else text,
        "expected one row a subject",
        "Keep only the correct row of each subject",
        file=file,
        row=int(first[0]),
    )


def make_subjects(
    frame: pl.DataFrame,
    file: str,
    accounts: TableAccounts,
    form: str | None = None,
    last: int | None = None,
) -> pl.DataFrame:
    """`ClaimsSource.subjects` from a table with any of its columns.

    A warning is added to the accounts for each column with unreadable dates: they count as unknown.
    Raises UserError: date, where most of a column cannot be read.

    Args:
        frame: `sex` is text or its final number.
        file: that of the dates.
        accounts: grow.
        form: of the dates.
        last: the last day of the data. A birth with two digits of its year is in the hundred years
            up to it.
    """
    for name in SUBJECT_DATE_COLUMNS:
        if name not in frame.columns:
            frame = frame.with_columns(pl.lit(None, pl.String).alias(name))
            continue
        near = dates.get_year(last) - 49 if last is not None and name == "birth" else None
        frame = frame.with_columns(reformat_dates(frame[name], form, near))
        counts = DateCounts().add(frame[name])
        refuse_unread_dates(counts, file, name)
        accounts.findings += report_zones(counts.zoned, file, name)
        if bad := counts.odd.total():
            accounts.findings.append(
                input_warning(
                    Reason.METADATA,
                    f"{bad} of {counts.good + bad} dates cannot be read",
                    "they count as unknown",
                    file=file,
                    field=name,
                    count=bad,
                )
            )
    return frame.select("subject_id", *SUBJECT_DATE_COLUMNS, _read_sexes(frame).alias("sex"))


def _read_sexes(frame: pl.DataFrame) -> pl.Expr:
    """The column `sex` as numbers; null where it is empty or absent."""
    if "sex" not in frame.columns:
        return pl.lit(None, pl.UInt8)
    sex = pl.col("sex")
    if frame.schema["sex"] != pl.String:
        return sex.cast(pl.UInt8)
    numbers = sex.str.to_lowercase().replace_strict(SEXES, default=0, return_dtype=pl.UInt8)
    return pl.when(sex.is_not_null()).then(numbers)


def parse_labels(
    frame: pl.DataFrame,
    columns: Mapping[str, str],
    names: Sequence[str],
    file: str,
    accounts: TableAccounts,
) -> pl.DataFrame:
    """Columns of 0 and 1 as Int8. Rows with other values are excluded, from the last rows of the
    accounts too.

    `columns` (key -> header) and `file` are for messages. Raises UserError: label, for a column
    with other values in most rows.
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
                file=file,
                field=columns[name],
            )
        is_odd |= is_wrong
    odd = frame.filter(is_odd)["row"]
    problem = "hold neither 0 nor 1 as a label"
    accounts.findings += report_excluded(Reason.LABEL, odd, problem, file)
    accounts.rows[-1].quarantined.update(count_dropped(Reason.LABEL, odd.len()))
    return frame.filter(~is_odd).with_columns(
        pl.col(name).replace_strict(FLAGS, default=None, return_dtype=pl.Int8) for name in names
    )
