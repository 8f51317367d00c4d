"""Selected records -> sequences: dedupe, order, minimum codes, truncation, times, gaps (section 2, step 8; section 9).

The engine filters and dedupes; each remaining record becomes one integer, (subject, day, id) packed in this order, so that records are sorted
as integers, alike in every engine. Lists are made last, from run boundaries.

Legend: S sequences, E events of all of them together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import narwhals as nw
import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from bitimely_core.claims import dates
from bitimely_core.claims.engines import Engine, collect_rows

if TYPE_CHECKING:
    from bitimely_core.claims.steps import SequenceChoices

SPECIAL = ("[PAD]", "[SOS]", "[EOS]", "[MASK]", "[UNK]")  # ids 0 to 4
MAX_AGE_MONTHS = 1080  # months: ages of 90 and over are one


@dataclass(frozen=True, kw_only=True)
class CodeSequences:
    """All kept sequences of a shard, flat: events of sequence i are `offsets[i]:offsets[i + 1]`. In order of subject, then (day, id)."""

    subjects: NDArray[np.int64]  # [S] rows of `cohort`
    offsets: NDArray[np.int64]  # [S + 1]
    ids: NDArray[np.int32]  # [E] of the vocabulary
    days: NDArray[np.int32]  # [E]
    times: NDArray[np.float64]  # [E] on the chosen clock, in months
    ends: NDArray[np.float64]  # [S] time of [EOS]
    indexed: bool = False  # whether the ends are index days
    no_birth: int = 0  # subjects excluded because the clock needs a birth date

    def gaps(self, i: int) -> NDArray[np.float64]:
        """Time since the previous position, for [SOS], the events and [EOS] of sequence i [n + 2]. [SOS] has the time of the first event."""
        times = self.times[self.offsets[i] : self.offsets[i + 1]]
        return np.diff(times, prepend=[times[0], times[0]], append=self.ends[i])


def number_phecodes(phecodes: Sequence[str]) -> dict[str, int]:
    """PheCode -> id, after the special tokens."""
    return {phecode: i for i, phecode in enumerate(phecodes, len(SPECIAL))}


def build_code_sequences(
    records: nw.LazyFrame[Any],
    phecodes: Sequence[str],
    vocab: Mapping[str, int],
    cohort: pl.DataFrame,
    choices: SequenceChoices,
    engine: Engine,
) -> CodeSequences:
    """The sequences of one shard; subjects without any event have none.

    Args:
        records: subject, day, phecode (index into `phecodes`), and `row` for dedupe first_per_age30.
        phecodes: names of the PheCodes.
        vocab: the selected ones -> id.
        cohort: with `birth_day`, and `index_day` under a landmark.
        choices: dedupe, min_codes with its unit, max_events (applied after the test on min_codes; the clock restarts) and time.
        engine: of the frames.
    """
    dedupe, time = choices.dedupe, choices.time
    pairs = [(i, vocab[phecode]) for i, phecode in enumerate(phecodes) if phecode in vocab]
    ids = pl.DataFrame(pairs, schema={"phecode": pl.Int32, "id": pl.Int32}, orient="row")
    chosen = records.join(engine(ids), on="phecode").drop("phecode")
    births = cohort.select(subject=pl.int_range(pl.len(), dtype=pl.Int32), birth="birth_day").drop_nulls()
    no_birth = 0
    if "age30" in f"{time} {dedupe}":
        no_birth = collect_rows(chosen.select("subject").unique()).join(births, on="subject", how="anti").height
        chosen = chosen.join(engine(births), on="subject")
    size = len(SPECIAL) + len(vocab)
    kept = _deduplicate(chosen, dedupe, size, engine)
    subject, day, code = _sort_records(kept, size, repeats=dedupe == "none")
    subjects, starts = np.unique(subject, return_index=True)
    lengths = np.diff(starts, append=len(subject))
    amount = lengths
    if choices.min_codes_unit == "records":
        amount = collect_rows(chosen.group_by("subject").agg(nw.len().alias("n"))).sort("subject")["n"].to_numpy()
    elif choices.min_codes_unit == "unique":
        amount = np.bincount(np.unique(subject * size + code) // size, minlength=cohort.height)[subjects]
    enough = amount >= choices.min_codes
    from_end = np.repeat(starts + lengths, lengths) - np.arange(len(subject))  # 1 for the last event
    stays = np.repeat(enough, lengths) & (from_end <= (choices.max_events or len(subject)))
    subject, day, code = subject[stays], day[stays], code[stays]
    subjects = subjects[enough]
    offsets = np.append(np.searchsorted(subject, subjects).astype(np.int64), len(subject))
    times, ends = _compute_times(time, subjects, offsets, day, cohort)
    return CodeSequences(
        subjects=subjects,
        offsets=offsets,
        ids=code.astype(np.int32),
        days=day.astype(np.int32),
        times=times,
        ends=ends,
        indexed=time == "months" and "index_day" in cohort.columns,
        no_birth=no_birth,
    )


def hide_codes(sequences: CodeSequences, first: int) -> CodeSequences:
    """The same events with [UNK] for every id from `first` on; equal days stay in the order of ids."""
    ids = np.where(sequences.ids < first, sequences.ids, SPECIAL.index("[UNK]")).astype(np.int32)
    subject = np.repeat(np.arange(len(sequences.subjects)), np.diff(sequences.offsets))
    return replace(sequences, ids=ids[np.lexsort((ids, sequences.days, subject))])


def _deduplicate(chosen: nw.LazyFrame[Any], dedupe: str, size: int, engine: Engine) -> nw.LazyFrame[Any]:
    """The records that the dedupe keeps; equal (subject, day, id) may still occur several times.

    month: of a PheCode the earliest day in a calendar month; first_per_age30: one event in an age month, the first in input order.
    """
    if dedupe == "month":
        binned = chosen.join(engine(_make_bins(chosen, nw.col("day"), "day", dates.to_calendar_months)), on="day")
        return binned.filter(nw.col("day") == nw.col("day").min().over("subject", "bin", "id"))
    if dedupe == "first_per_age30":
        aged = chosen.with_columns((nw.col("day") - nw.col("birth")).alias("age"))
        binned = aged.join(engine(_make_bins(aged, nw.col("age"), "age", dates.to_age_months)), on="age")
        binned = binned.with_columns((nw.col("row").cast(nw.Int64) * size + nw.col("id")).alias("place"))
        return binned.filter(nw.col("place") == nw.col("place").min().over("subject", "bin"))
    return chosen


def _make_bins(lazy: nw.LazyFrame[Any], column: nw.Expr, name: str, function: Any) -> pl.DataFrame:
    """`name` -> `bin` for every value from the least to the greatest of a column, so that no engine does date arithmetic."""
    ends = collect_rows(lazy.select(column.min().alias("low"), column.max().alias("high"))).row(0)
    values = np.arange(ends[0], ends[1] + 1, dtype=np.int32) if ends[0] is not None else np.empty(0, np.int32)
    return pl.DataFrame({name: values, "bin": function(values).astype(np.int32)})


def _sort_records(kept: nw.LazyFrame[Any], size: int, *, repeats: bool) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """subject, day and id of the records, sorted by them; `repeats` keeps equal ones."""
    low, span = dates.EARLIEST, dates.LATEST - dates.EARLIEST + 1
    place = nw.col("subject").cast(nw.Int64) * span + (nw.col("day") - low)
    key = collect_rows(kept.select((place * size + nw.col("id")).alias("key")))["key"].sort().to_numpy()
    if not repeats and len(key):
        key = key[np.append(True, key[1:] != key[:-1])]
    rest, code = np.divmod(key, size)
    subject, day = np.divmod(rest, span)
    return subject, day + low, code


def _compute_times(
    time: str, subjects: NDArray[np.int64], offsets: NDArray[np.int64], day: NDArray[np.int64], cohort: pl.DataFrame
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Times of the events and of [EOS], which is the index day under a landmark with months."""
    lengths = np.diff(offsets)
    first = day[offsets[:-1]]
    if time == "months":
        times = (day - np.repeat(first, lengths)) / dates.MONTH
    elif time == "calendar_month":
        times = (dates.to_calendar_months(day) - np.repeat(dates.to_calendar_months(first), lengths)).astype(np.float64)
    else:
        births = cohort["birth_day"].gather(subjects).to_numpy()
        times = dates.to_age_months(day - np.repeat(births, lengths)).astype(np.float64)
    if time == "months" and "index_day" in cohort.columns:
        return times, (cohort["index_day"].gather(subjects).to_numpy() - first) / dates.MONTH
    return times, times[offsets[1:] - 1]


def compute_ages(sequences: CodeSequences, cohort: pl.DataFrame) -> list[int | None]:
    """Whole months from birth to the first event of each sequence, None where no birth is known."""
    births = cohort["birth_day"].gather(sequences.subjects)
    first = sequences.days[sequences.offsets[:-1]].astype(np.int64)
    months = dates.to_completed_months(first - births.fill_null(0).to_numpy())
    return [None if unknown else int(n) for n, unknown in zip(months, births.is_null(), strict=True)]


def to_table(sequences: CodeSequences, cohort: pl.DataFrame, names: Sequence[str]) -> pa.Table:
    """The sequences of a shard in the form of `sequences-*.parquet` (section 11), sorted by subject_id when `cohort` is.

    `cohort`: subject_id (int64), split, and where known birth_day, sex, index_day; `names`: of the labels.
    """
    own = cohort[sequences.subjects]
    offsets = pa.array(sequences.offsets, pa.int32())
    months = [None if age is None else min(age, MAX_AGE_MONTHS) for age in compute_ages(sequences, cohort)]
    columns = {
        "subject_id": pa.array(own["subject_id"].to_numpy(), pa.int64()),
        "codes": pa.ListArray.from_arrays(offsets, pa.array(sequences.ids, pa.int32())),
        "times": pa.ListArray.from_arrays(offsets, pa.array(sequences.times.astype(np.float32), pa.float32())),
        "split": pa.array(own["split"].to_list(), pa.string()).dictionary_encode(),
        "age0_months": pa.array(months, pa.int16()),
        "sex": pa.array(own["sex"].to_list() if "sex" in own.columns else [None] * own.height, pa.uint8()),
        **{f"y_{name}": pa.array(own[f"y_{name}"].to_list(), pa.int8()) for name in names},
        **{name: own[name].to_arrow() for label in names for name in (f"time_{label}", f"event_{label}") if name in own.columns},
        "t_index": pa.array(sequences.ends.astype(np.float32)) if sequences.indexed else pa.nulls(own.height, pa.float32()),
    }
    return pa.table(columns)


def count_usage(sequences: CodeSequences, cohort: pl.DataFrame, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of the training sequences: subjects and events by id [size each]; they add up over shards."""
    train = (cohort["split"].gather(sequences.subjects) == "train").to_numpy()
    of_event = np.repeat(np.arange(len(train)), np.diff(sequences.offsets))
    in_train = train[of_event]
    pairs = np.sort(of_event[in_train] * size + sequences.ids[in_train])  # faster than np.unique, which hashes
    pairs = pairs[np.append(True, pairs[1:] != pairs[:-1])] if len(pairs) else pairs
    return np.bincount(pairs % size, minlength=size), np.bincount(sequences.ids[in_train], minlength=size)
