"""Selected records -> sequences: dedupe, order, minimum codes, truncation, times, gaps (section 2,
step 8; section 9).

Each record that the dedupe keeps becomes one integer, (subject, day, id) packed in this order:
sorting integers is fast. Lists are made last, from the places where another subject begins.

Legend: S sequences, E events of all of them together.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
import polars.selectors as cs
import pyarrow as pa
from numpy.typing import NDArray

from bitimely_core.claims import dates
from bitimely_core.claims.distinct import find_starts, sort_distinct
from bitimely_core.claims.sequence_choices import SequenceChoices
from bitimely_core.tokens.sequences import MONTH, SPECIAL

UNKNOWN = SPECIAL.index("[UNK]")
DAY_MINUTES = 1440
MEASURES = ("minute", "value")  # columns of records that not every cache has
MAX_AGE_MONTHS = 1080  # months: ages of 90 and over are one
Array = NDArray[Any]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class CodeSequences:
    """All kept sequences of a shard, flat: events of sequence i are `offsets[i]:offsets[i + 1]`. In
    order of subject, then (day, id).
    """

    subjects: Ints  # [S] rows of `cohort`
    offsets: Ints  # [S + 1]
    ids: NDArray[np.int32]  # [E] of the vocabulary
    days: NDArray[np.int32]  # [E]
    times: Floats  # [E] on the chosen clock, in months
    ends: Floats  # [S] time of [EOS]
    minutes: Ints | None = None  # [E] of the day, where they are kept
    # [E] numbers of the events, NaN: none; where they are read as they are
    values: NDArray[np.float32] | None = None
    indexed: bool = False  # whether the ends are index days
    no_birth: int = 0  # subjects excluded because the clock needs a birth date

    def gaps(self, i: int) -> Floats:
        """Time since the previous position, for [SOS], the events and [EOS] of sequence i [n + 2].
        [SOS] has the time of the first event.
        """
        times = self.times[self.offsets[i] : self.offsets[i + 1]]
        return np.diff(times, prepend=[times[0], times[0]], append=self.ends[i])


def number_phecodes(phecodes: Sequence[str]) -> dict[str, int]:
    """PheCode -> id, after the special tokens."""
    return {phecode: i for i, phecode in enumerate(phecodes, len(SPECIAL))}


def build_code_sequences(
    records: pl.DataFrame,
    phecodes: Sequence[str],
    vocab: Mapping[str, int],
    cohort: pl.DataFrame,
    choices: SequenceChoices,
) -> CodeSequences:
    """The sequences of one shard; subjects without any event have none.

    Args:
        records: subject, day, phecode (index into `phecodes`), and `row` for dedupe
            first_per_age30.
        phecodes: names of the PheCodes.
        vocab: the selected ones -> id.
        cohort: with `birth_day`, and `index_day` under a landmark.
        choices: dedupe, min_codes with its unit, max_events (applied after the test on min_codes;
            the clock restarts) and time.
    """
    size = len(SPECIAL) + len(vocab)
    no_birth, ids = 0, pl.Series(list(map(vocab.get, phecodes)), dtype=pl.Int32)
    # of the selected PheCodes alone
    records = records.with_columns(id=ids.gather(records["phecode"]))
    records = records.drop("phecode").drop_nulls("id")
    if choices.time == "age30" or choices.dedupe == "first_per_age30":
        records, no_birth = _add_births(records, cohort)
    events = _sort_events(_deduplicate(records, choices.dedupe, size), size, choices.dedupe)
    subject = events["subject"]
    starts = find_starts(subject)
    subjects, lengths = subject[starts], np.diff(starts, append=len(subject))
    counts = _count_codes(records, events, choices.min_codes_unit, size, cohort.height)
    enough = counts[subjects] >= choices.min_codes
    most = choices.max_events or len(subject)
    # 1 for the last event
    from_end = np.repeat(starts + lengths, lengths) - np.arange(len(subject))
    stays = np.repeat(enough, lengths) & (from_end <= most)
    events = {name: column[stays] for name, column in events.items()}
    subjects = subjects[enough]
    offsets = np.append(0, np.cumsum(np.minimum(lengths, most)[enough]))
    times, ends = _compute_times(
        choices.time, subjects, offsets, events["day"], cohort, events.get("minute")
    )
    return CodeSequences(
        subjects=subjects,
        offsets=offsets,
        ids=events["id"].astype(np.int32),
        days=events["day"].astype(np.int32),
        times=times,
        ends=ends,
        minutes=events.get("minute"),
        values=events.get("value"),
        indexed=choices.time == "months" and "index_day" in cohort.columns,
        no_birth=no_birth,
    )


def _add_births(records: pl.DataFrame, cohort: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """The records of subjects with a known birth, with its day as `birth`, and how many subjects
    have records but no known birth.
    """
    births = cohort["birth_day"].gather(records["subject"])
    no_birth = records["subject"].filter(births.is_null()).n_unique()
    return records.with_columns(birth=births).drop_nulls("birth"), no_birth


def _deduplicate(records: pl.DataFrame, dedupe: str, size: int) -> pl.DataFrame:
    """The records that the dedupe keeps; equal (subject, day, id) may still occur several times.

    month: of a PheCode the earliest day in a calendar month; first_per_age30: one event in an age
    month, the first in input order.
    """
    if dedupe == "month":
        records = records.with_columns(
            month=pl.Series(dates.to_calendar_months(records["day"].to_numpy()))
        )
        return records.filter(pl.col("day") == pl.col("day").min().over("subject", "month", "id"))
    if dedupe == "first_per_age30":
        age = records["day"] - records["birth"]
        records = records.with_columns(age_month=pl.Series(dates.to_age_months(age.to_numpy())))
        place = pl.col("row") * size + pl.col("id")
        return records.filter(place == place.min().over("subject", "age_month"))
    return records


def _sort_events(records: pl.DataFrame, size: int, dedupe: str) -> dict[str, Array]:
    """subject, day and id of the records (int64), sorted by them, with their minutes and values if
    they have any.

    Of records with equal subject, day and id one stays, but for dedupe none.
    """
    if set(MEASURES) & set(records.columns):
        return _sort_measured(records, dedupe)
    day_bits, id_bits = (dates.LATEST - dates.EARLIEST).bit_length(), size.bit_length()
    subject_day = pl.col("subject").cast(pl.Int64) * (1 << day_bits) + (
        pl.col("day") - dates.EARLIEST
    )
    packed: Ints = (
        records.select(subject_day * (1 << id_bits) + pl.col("id")).to_series().to_numpy()
    )
    packed = np.sort(packed) if dedupe == "none" else sort_distinct(packed)
    place = packed >> id_bits
    return {
        "subject": place >> day_bits,
        "day": (place & (1 << day_bits) - 1) + dates.EARLIEST,
        "id": packed & (1 << id_bits) - 1,
    }


def _sort_measured(records: pl.DataFrame, dedupe: str) -> dict[str, Array]:
    """As `_sort_events` of records with a minute or a value. Of equal ones the first stays, by
    minute and value.
    """
    measures = [name for name in MEASURES if name in records.columns]
    key = ("subject", "day", "id")
    frame = records.select(*key, *measures).cast({cs.integer(): pl.Int64})
    frame = frame.with_columns(cs.float().fill_null(np.nan))
    if dedupe != "none":
        frame = frame.sort(*key, *measures, nulls_last=True)
        frame = frame.unique(key, keep="first", maintain_order=True)
    order = [name for name in ("subject", "day", "minute", "id", "value") if name in frame.columns]
    return {column.name: column.to_numpy() for column in frame.sort(order, nulls_last=True)}


def _count_codes(
    records: pl.DataFrame, events: Mapping[str, Array], unit: str, size: int, n_subjects: int
) -> Ints:
    """Of each subject the number that is compared with min_codes: of its events, of its records
    before the dedupe, or of its unique ids.
    """
    subject = events["subject"]
    if unit == "records":
        subject = records["subject"].to_numpy()
    elif unit == "unique":
        subject = sort_distinct(subject * size + events["id"]) // size
    return np.bincount(subject, minlength=n_subjects)


def hide_codes(sequences: CodeSequences, first: int) -> CodeSequences:
    """The same events with [UNK] for every id from `first` on; equal days stay in the order of
    ids.
    """
    ids = np.where(sequences.ids < first, sequences.ids, UNKNOWN).astype(np.int32)
    subject = np.repeat(np.arange(len(sequences.subjects)), np.diff(sequences.offsets))
    minutes = np.zeros(len(ids), np.int64) if sequences.minutes is None else sequences.minutes
    order = np.lexsort((ids, minutes, sequences.days, subject))
    return replace(
        sequences,
        ids=ids[order],
        values=None if sequences.values is None else sequences.values[order],
    )


def _compute_times(
    time: str, subjects: Ints, offsets: Ints, day: Ints, cohort: pl.DataFrame, minute: Ints | None
) -> tuple[Floats, Floats]:
    """Times of the events and of [EOS], which is the (end of the) index day under a landmark with
    months.
    """
    lengths, firsts = np.diff(offsets), offsets[:-1]
    if time == "months":
        exact: Array = day if minute is None else day + minute / DAY_MINUTES
        times = (exact - np.repeat(exact[firsts], lengths)) / MONTH
        if "index_day" in cohort.columns:
            index = cohort["index_day"].gather(subjects).to_numpy()
            if minute is not None:
                index = index + (DAY_MINUTES - 1) / DAY_MINUTES
            return times, (index - exact[firsts]) / MONTH
    elif time == "calendar_month":
        months = dates.to_calendar_months(day)
        times = (months - np.repeat(months[firsts], lengths)).astype(np.float64)
    else:
        births = cohort["birth_day"].gather(subjects).to_numpy()
        times = dates.to_age_months(day - np.repeat(births, lengths)).astype(np.float64)
    return times, times[offsets[1:] - 1]


def compute_ages(sequences: CodeSequences, cohort: pl.DataFrame) -> pl.Series:
    """Whole months from birth to the first event of each sequence, null where no birth is known."""
    births = cohort["birth_day"].gather(sequences.subjects)
    first = sequences.days[sequences.offsets[:-1]].astype(np.int64)
    months = dates.to_completed_months(first - births.fill_null(0).to_numpy())
    return pl.Series(months, dtype=pl.Int64).set(births.is_null(), None)


def to_frame(sequences: CodeSequences, cohort: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """The sequences of a shard in the form of `sequences-*.parquet` (section 11), sorted by
    subject_id when `cohort` is.

    `cohort`: subject_id (int64), split, birth_day, sex, and where known index_day; `names`: of the
    labels.
    """
    offsets = pl.Series(sequences.offsets, dtype=pl.Int32).to_arrow()

    def make_lists(values: Array, kind: type[pl.DataType]) -> pl.Series:
        events = pl.Series(values, dtype=kind).to_arrow()  # not pa.array, which imports pandas
        return pl.Series(pa.ListArray.from_arrays(offsets, events))

    lists = {
        "codes": make_lists(sequences.ids, pl.Int32),
        "times": make_lists(sequences.times.astype(np.float32), pl.Float32),
    }
    if sequences.values is not None:
        lists["values"] = make_lists(sequences.values, pl.Float32)
    members = cohort[sequences.subjects]
    times = itertools.chain.from_iterable((f"time_{name}", f"event_{name}") for name in names)
    ends = pl.lit(pl.Series(sequences.ends)) if sequences.indexed else pl.lit(None)
    return members.select(
        pl.col("subject_id").cast(pl.Int64),
        **lists,
        split=pl.col("split").cast(pl.String).cast(pl.Categorical),
        age0_months=compute_ages(sequences, cohort).clip(None, MAX_AGE_MONTHS).cast(pl.Int16),
        sex=pl.col("sex").cast(pl.UInt8),
        **{f"y_{name}": pl.col(f"y_{name}").cast(pl.Int8) for name in names},
        **{name: name for name in times if name in members.columns},
        t_index=ends.cast(pl.Float32),
    )


def add_silent_subjects(
    table: pl.DataFrame, cohort: pl.DataFrame, subjects: Ints, columns: Sequence[str]
) -> pl.DataFrame:
    """A table of `to_frame`, of the `subjects` of `cohort`, with a row for each other subject: its
    single code is [UNK], and it has some columns of `cohort`.
    """
    event = {"codes": UNKNOWN, "times": 0.0, "values": float("nan")}
    silent = cohort.filter(~np.isin(np.arange(cohort.height), subjects)).select(
        *columns,
        **{
            name: pl.lit([event[name]], table.schema[name])
            for name in event
            if name in table.columns
        },
    )
    table = table.with_columns(pl.col("split").cast(pl.String))
    return pl.concat([table, silent], how="diagonal_relaxed")


def count_usage(sequences: CodeSequences, cohort: pl.DataFrame, size: int) -> Ints:
    """Of the training sequences: subjects and events by id [2, size]; they add up over shards."""
    train = (cohort["split"].gather(sequences.subjects) == "train").to_numpy()
    subject = np.repeat(np.arange(len(train)), np.diff(sequences.offsets))
    in_train = train[subject]
    ids = sequences.ids[in_train]
    pairs = sort_distinct(subject[in_train] * size + ids)
    return np.stack([np.bincount(part, minlength=size) for part in (pairs % size, ids)])
