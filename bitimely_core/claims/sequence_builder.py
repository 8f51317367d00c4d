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
from bitimely_core.claims.distinct import find_starts, sort_distinct
from bitimely_core.claims.engines import Engine, collect_rows

if TYPE_CHECKING:
    from bitimely_core.claims.steps import SequenceChoices

SPECIAL = ("[PAD]", "[SOS]", "[EOS]", "[MASK]", "[UNK]")  # ids 0 to 4
DAY_MINUTES = 1440
MEASURES = {"minute", "value"}  # columns of records that not every cache has
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
    minutes: NDArray[np.int64] | None = None  # [E] of the day, where they are kept
    values: NDArray[np.float32] | None = None  # [E] numbers of the events, NaN: none; where they are read as they are
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
    measures: dict[str, NDArray[Any]] = {}
    if MEASURES.isdisjoint(kept.collect_schema().names()):
        subject, day, code = _sort_records(kept, size, repeats=dedupe == "none")
    else:
        subject, day, code, measures = _sort_measured(kept, repeats=dedupe == "none")
    starts = find_starts(subject)
    subjects, lengths = subject[starts], np.diff(starts, append=len(subject))
    amount = lengths
    if choices.min_codes_unit == "records":
        amount = collect_rows(chosen.group_by("subject").agg(nw.len().alias("n"))).sort("subject")["n"].to_numpy()
    elif choices.min_codes_unit == "unique":
        amount = np.bincount(sort_distinct(subject * size + code) // size, minlength=cohort.height)[subjects]
    enough = amount >= choices.min_codes
    from_end = np.repeat(starts + lengths, lengths) - np.arange(len(subject))  # 1 for the last event
    stays = np.repeat(enough, lengths) & (from_end <= (choices.max_events or len(subject)))
    subject, day, code = subject[stays], day[stays], code[stays]
    measures = {name: of[stays] for name, of in measures.items()}
    subjects = subjects[enough]
    offsets = np.append(np.searchsorted(subject, subjects).astype(np.int64), len(subject))
    times, ends = _compute_times(time, subjects, offsets, day, cohort, measures.get("minute"))
    return CodeSequences(
        subjects=subjects,
        offsets=offsets,
        ids=code.astype(np.int32),
        days=day.astype(np.int32),
        times=times,
        ends=ends,
        minutes=measures.get("minute"),
        values=measures.get("value"),
        indexed=time == "months" and "index_day" in cohort.columns,
        no_birth=no_birth,
    )


def hide_codes(sequences: CodeSequences, first: int) -> CodeSequences:
    """The same events with [UNK] for every id from `first` on; equal days stay in the order of ids."""
    ids = np.where(sequences.ids < first, sequences.ids, SPECIAL.index("[UNK]")).astype(np.int32)
    subject = np.repeat(np.arange(len(sequences.subjects)), np.diff(sequences.offsets))
    minutes = np.zeros(len(ids), np.int64) if sequences.minutes is None else sequences.minutes
    order = np.lexsort((ids, minutes, sequences.days, subject))
    return replace(sequences, ids=ids[order], values=None if sequences.values is None else sequences.values[order])


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
    low, bits, day_bits = dates.EARLIEST, size.bit_length(), (dates.LATEST - dates.EARLIEST).bit_length()
    place = nw.col("subject").cast(nw.Int64) * (1 << day_bits) + (nw.col("day") - low)
    key = collect_rows(kept.select((place * (1 << bits) + nw.col("id")).alias("key")))["key"].to_numpy()
    key = np.sort(key) if repeats else sort_distinct(key)
    return key >> (day_bits + bits), (key >> bits & (1 << day_bits) - 1) + low, key & (1 << bits) - 1


def _sort_measured(
    kept: nw.LazyFrame[Any], *, repeats: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], dict[str, NDArray[Any]]]:
    """As `_sort_records` of records with a minute or a value, and these; without `repeats` the first of a subject, day and id stays."""
    names = kept.collect_schema().names()
    frame = collect_rows(kept)
    columns = {name: frame[name].to_numpy().astype(np.int64) for name in ("subject", "day", "id")}
    columns["minute"] = frame["minute"].to_numpy().astype(np.int64) if "minute" in names else np.zeros(frame.height, np.int64)
    columns["value"] = frame["value"].fill_null(float("nan")).to_numpy() if "value" in names else np.zeros(frame.height, np.float32)
    if not repeats:
        order = np.lexsort([columns[name] for name in ("value", "minute", "id", "day", "subject")])
        key = np.stack([columns[name][order] for name in ("subject", "day", "id")], 1)
        order = order[np.append(True, (key[1:] != key[:-1]).any(1))] if len(key) else order
        columns = {name: of[order] for name, of in columns.items()}
    order = np.lexsort([columns[name] for name in ("value", "id", "minute", "day", "subject")])
    columns = {name: of[order] for name, of in columns.items()}
    return columns["subject"], columns["day"], columns["id"], {name: columns[name] for name in MEASURES & set(names)}


def _compute_times(
    time: str,
    subjects: NDArray[np.int64],
    offsets: NDArray[np.int64],
    day: NDArray[np.int64],
    cohort: pl.DataFrame,
    minute: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Times of the events and of [EOS], which is the (end of the) index day under a landmark with months."""
    lengths = np.diff(offsets)
    exact: NDArray[Any] = day if minute is None else day + minute / DAY_MINUTES
    first = exact[offsets[:-1]]
    if time == "months":
        times = (exact - np.repeat(first, lengths)) / dates.MONTH
    elif time == "calendar_month":
        times = (dates.to_calendar_months(day) - np.repeat(dates.to_calendar_months(day[offsets[:-1]]), lengths)).astype(np.float64)
    else:
        births = cohort["birth_day"].gather(subjects).to_numpy()
        times = dates.to_age_months(day - np.repeat(births, lengths)).astype(np.float64)
    if time == "months" and "index_day" in cohort.columns:
        index = cohort["index_day"].gather(subjects).to_numpy()
        return times, ((index if minute is None else index + (DAY_MINUTES - 1) / DAY_MINUTES) - first) / dates.MONTH
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
    offsets = pl.Series(sequences.offsets, dtype=pl.Int32).to_arrow()  # not pa.array, which imports pandas
    months = pl.Series([None if age is None else min(age, MAX_AGE_MONTHS) for age in compute_ages(sequences, cohort)], dtype=pl.Int16)
    columns = {
        "subject_id": own["subject_id"].cast(pl.Int64).to_arrow(),
        "codes": pa.ListArray.from_arrays(offsets, pl.Series(sequences.ids, dtype=pl.Int32).to_arrow()),
        "times": pa.ListArray.from_arrays(offsets, pl.Series(sequences.times.astype(np.float32)).to_arrow()),
        **(
            {}
            if sequences.values is None
            else {"values": pa.ListArray.from_arrays(offsets, pl.Series(sequences.values, dtype=pl.Float32).to_arrow())}
        ),
        "split": own["split"].cast(pl.String).to_arrow().cast(pa.string()).dictionary_encode(),
        "age0_months": months.to_arrow(),
        "sex": own["sex"].cast(pl.UInt8).to_arrow() if "sex" in own.columns else pa.nulls(own.height, pa.uint8()),
        **{f"y_{name}": own[f"y_{name}"].cast(pl.Int8).to_arrow() for name in names},
        **{name: own[name].to_arrow() for label in names for name in (f"time_{label}", f"event_{label}") if name in own.columns},
        "t_index": pl.Series(sequences.ends.astype(np.float32)).to_arrow() if sequences.indexed else pa.nulls(own.height, pa.float32()),
    }
    return pa.table(columns)


def count_usage(sequences: CodeSequences, cohort: pl.DataFrame, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of the training sequences: subjects and events by id [size each]; they add up over shards."""
    train = (cohort["split"].gather(sequences.subjects) == "train").to_numpy()
    of_event = np.repeat(np.arange(len(train)), np.diff(sequences.offsets))
    in_train = train[of_event]
    pairs = sort_distinct(of_event[in_train] * size + sequences.ids[in_train])
    return np.bincount(pairs % size, minlength=size), np.bincount(sequences.ids[in_train], minlength=size)
