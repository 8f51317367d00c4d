"""Reads tables with a row for each time in which a subject was observed, as insurers have them of
enrolment.
"""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from bitimely_core.claims import dates
from bitimely_core.claims.periods import merge_periods
from bitimely_core.claims.sources.coarse_dates import complete_dates
from bitimely_core.claims.sources.columns import (
    DateCounts,
    reformat_dates,
    refuse_unread_dates,
    warn_of_rows,
)
from bitimely_core.claims.sources.subject_tables import TableAccounts, report_reversed
from bitimely_core.claims.unknown_dates import DEFAULTS, blank_dates
from bitimely_core.errors import Place, Reason
from bitimely_core.formats.source import locate_errors

PERIOD_DATES = ("obs_start", "obs_end")


def separate_spells(people: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame | None]:
    """A table of people with a row for each, and their times of observation where somebody has
    several; None where nobody has.
    """
    if not {*PERIOD_DATES}.issubset(people.columns):
        return people, None
    spells = people.select("subject", *PERIOD_DATES).drop_nulls("subject")
    if not spells.unique()["subject"].is_duplicated().any():
        return people, None
    facts = [name for name in people.columns if name not in {*PERIOD_DATES, "row"}]
    return people.drop(PERIOD_DATES).unique(facts, keep="first", maintain_order=True), spells


def read_spells(
    spells: pl.DataFrame, file: str, forms: Mapping[str, str], accounts: TableAccounts
) -> pl.DataFrame:
    """Times of observation in days: subject_id, start, end. One without an end reaches to the last
    day of the claims, one with a date that cannot be read is left out and said.

    `spells`: subject, obs_start, obs_end as text. Raises UserError: date, where most of a column
    cannot be read.
    """
    for name in PERIOD_DATES:
        form = forms.get(name, "")
        texts, findings = complete_dates(spells[name], name, form, file)
        accounts.findings += findings
        with locate_errors(file):
            texts = blank_dates(reformat_dates(texts, form), DEFAULTS)
        counts = DateCounts().add(texts)
        refuse_unread_dates(counts, file, name)
        place: Place = {"file": file, "field": name}
        problem = f"of {counts.good + counts.bad} dates cannot be read"
        rule = "these times of observation are left out"
        accounts.findings += warn_of_rows(counts.bad, Reason.METADATA, problem, rule, **place)
        spells = spells.with_columns(texts)
    is_open = spells["obs_end"].is_null()
    read = spells.select(
        pl.col("subject").alias("subject_id"),
        *(
            dates.parse_days(spells[key]).alias(name)
            for key, name in zip(PERIOD_DATES, ("start", "end"), strict=True)
        ),
    )
    accounts.findings += report_reversed(read["start"] > read["end"], file)
    last = pl.lit(accounts.last, pl.Int32)
    read = read.with_columns(end=pl.when(is_open).then(last).otherwise("end"))
    return read.drop_nulls().filter(pl.col("start") <= pl.col("end"))


def span_spells(spells: pl.DataFrame) -> pl.DataFrame:
    """Start of the first and end of the last time of observation of each subject, as text: subject,
    obs_start, obs_end.
    """
    spans = spells.group_by("subject_id", maintain_order=True).agg(
        obs_start=pl.col("start").min(), obs_end=pl.col("end").max()
    )
    texts = (pl.col(name).cast(pl.Date).cast(pl.String) for name in PERIOD_DATES)
    return spans.select(pl.col("subject_id").alias("subject"), *texts)


def join_periods(spells: pl.DataFrame, file: str, accounts: TableAccounts) -> pl.DataFrame | None:
    """`merge_periods` of times of observation, None where nobody has several; these are said."""
    periods = merge_periods(spells)
    problem = "subjects were observed in several periods, with gaps between"
    rule = "they are at risk in the period of their index day alone"
    accounts.findings += warn_of_rows(periods.height, Reason.METADATA, problem, rule, file=file)
    return periods if periods.height else None
