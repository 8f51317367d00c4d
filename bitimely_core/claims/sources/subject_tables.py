"""Tables with one row per subject: unique rows, dates of birth and observation, sex, 0/1 labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from bitimely_core.claims import dates
from bitimely_core.claims.sources.columns import (
    SUBJECT_DATE_COLUMNS,
    DateCounts,
    reformat_dates,
    refuse_unread_dates,
    report_zones,
)
from bitimely_core.errors import Finding, Reason, input_error, input_warning
from bitimely_core.types import SourceRows

SEXES = {"1": 1, "m": 1, "male": 1, "2": 2, "f": 2, "female": 2}  # any other text: 0, unknown


def keep_unique_rows(
    frame: pl.DataFrame, file: str, key: str = "subject_id"
) -> tuple[pl.DataFrame, SourceRows, list[Finding]]:
    """The table with one row per subject: rows without a subject are excluded, repeated ones are
    used once.

    Raises UserError: duplicate_key when two rows of one subject differ.
    """
    known = frame.filter(pl.col(key).is_not_null())
    single = known.unique(
        [name for name in frame.columns if name != "row"], keep="first", maintain_order=True
    )
    conflicting = single.filter(pl.col(key).is_duplicated())
    if conflicting.height:
        first = conflicting.filter(pl.col(key) == conflicting[key][0])["row"]
        others = conflicting[key].n_unique() - 1
        text = f"rows {', '.join(map(str, first.head(5)))} are of one subject and differ"
        text += f", so do those of {others} other subjects" if others else ""
        action = "Keep only the correct row of each subject"
        raise input_error(
            Reason.DUPLICATE_KEY,
            text,
            "expected one row a subject",
            action,
            file=file,
            row=int(first[0]),
        )
    empty, repeated = frame.height - known.height, known.height - single.height
    findings = []
    if empty:
        text, rows = (
            f"{empty} rows have no subject",
            frame.filter(pl.col(key).is_null())["row"].head(5),
        )
        findings.append(
            Finding(
                Reason.IDENTIFIER,
                text,
                "they are excluded",
                file=file,
                count=empty,
                examples=tuple(map(str, rows)),
            )
        )
    if repeated:
        text = f"{repeated} rows repeat others"
        findings.append(
            input_warning(Reason.DUPLICATES, text, "they are used once", file=file, count=repeated)
        )
    dropped = {str(Reason.DUPLICATES): repeated} if repeated else {}
    quarantined = {str(Reason.IDENTIFIER): empty} if empty else {}
    return (
        single,
        SourceRows(
            file=file, kind="subjects", seen=frame.height, dropped=dropped, quarantined=quarantined
        ),
        findings,
    )


def make_subjects(
    frame: pl.DataFrame,
    file: str,
    findings: list[Finding],
    form: str | None = None,
    last: int | None = None,
) -> pl.DataFrame:
    """`ClaimsSource.subjects` from a table with any of its columns, `sex` as text or as its final
    number; `file` is that of the dates, `form` theirs; a birth with two digits of its year is in
    the hundred years up to the `last` day of the data.

    A warning is added to `findings` for each column with unreadable dates, which count as unknown.
    Raises UserError: date, where most of a column cannot be read.
    """
    for name in (name for name in SUBJECT_DATE_COLUMNS if name in frame.columns):
        near = dates.get_year(last) - 49 if last is not None and name == "birth" else None
        frame = frame.with_columns(reformat_dates(frame[name], form, near))
        counts = DateCounts().add(frame[name])
        refuse_unread_dates(counts, file, name)
        findings += report_zones(counts.zoned, file, name)
        if bad := counts.odd.total():
            text = f"{bad} of {counts.good + bad} dates cannot be read"
            findings.append(
                input_warning(
                    Reason.METADATA, text, "they count as unknown", file=file, field=name, count=bad
                )
            )
    absent = {
        name: pl.lit(None, pl.String)
        for name in (*SUBJECT_DATE_COLUMNS, "sex")
        if name not in frame.columns
    }
    frame = frame.with_columns(**absent)
    sex = pl.col("sex")
    if frame.schema["sex"] == pl.String:
        sex = pl.when(sex.is_not_null()).then(
            sex.str.to_lowercase().replace_strict(SEXES, default=0, return_dtype=pl.UInt8)
        )
    return frame.select("subject_id", *SUBJECT_DATE_COLUMNS, sex.cast(pl.UInt8).alias("sex"))


def parse_labels(
    frame: pl.DataFrame, columns: Mapping[str, str], names: Sequence[str], file: str
) -> tuple[pl.DataFrame, int, list[Finding]]:
    """Columns of 0 and 1 as Int8; rows with other values are excluded. `columns` (key -> header)
    and `file` are for messages.

    Returns the frame, the number of excluded rows, and the findings on them. Raises UserError:
    label, for a column with other values in most rows.
    """
    words = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}
    odd = pl.lit(value=False)
    for name in names:
        wrong = pl.col(name).is_not_null() & ~pl.col(name).is_in(list(words))
        n, count = frame.filter(wrong).height, frame[name].count()
        if 2 * n > count:
            action = "Remove the column, or name the labels with --label-column COLUMN:NAME:VALUE"
            text = f"{n} of {count} rows hold neither 0 nor 1"
            raise input_error(
                Reason.LABEL, text, "expected a label", action, file=file, field=columns[name]
            )
        odd |= wrong
    left = frame.filter(odd)
    kept = frame.filter(~odd).with_columns(
        pl.col(name).replace_strict(words, default=None, return_dtype=pl.Int8) for name in names
    )
    if not left.height:
        return kept, 0, []
    text, examples = (
        f"{left.height} rows hold neither 0 nor 1 as a label",
        tuple(map(str, left["row"].head(5))),
    )
    return (
        kept,
        left.height,
        [
            Finding(
                Reason.LABEL,
                text,
                "they are excluded",
                file=file,
                count=left.height,
                examples=examples,
            )
        ],
    )
