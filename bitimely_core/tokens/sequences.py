"""Event sequences on disk: codes and their times, one sequence a subject, cut to the last events on
reading.

The module does not import torch. Legend: n sequences, N events of the longest of them, C labels.
"""

from __future__ import annotations

import io
import mmap
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from bitimely_core.schemas.runs import RunData
from bitimely_core.schemas.tokens import (
    HistoryPreparation,
    PredictionStatistics,
    SequenceManifest,
    SequenceOptions,
    SequenceStatistics,
)
from bitimely_core.store import manifests, storage
from bitimely_core.store.records import StoredFile, store_file, store_hashed
from bitimely_core.system_errors import raise_system_error
from bitimely_core.tokens.sets import TokenSet, check_subjects, open_manifest, token_error
from bitimely_core.types import SPLITS, name_horizon

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

    from bitimely_core.schemas.ingest_records import IngestReport

SPECIAL = ("[PAD]", "[SOS]", "[EOS]", "[MASK]", "[UNK]")  # ids 0 to 4; codes follow
SHARDS = re.compile(r"sequences-\d+-[0-9a-f]{16}\.parquet")
VALUES = "values.parquet"  # cut points and moments of the numbers of codes
HISTORIES = "histories.json"  # `HistoryPreparation`
COHORT = "cohort.parquet"  # who belongs to the cohort of the sequences
# bytes of codes and times up to which they are all in memory; more are mapped from the disk
IN_MEMORY = 1 << 28
MONTH = 30.4375  # days of the clock of sequences: 365.25 / 12 = 487 / 16
MAX_EVENTS = 254  # events that a model sees: 256 positions with [SOS] and [EOS]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class EventSequences(TokenSet):
    """Code sequences of a claims view, see `TokenSet`. Only the last `limit` events of a subject
    are read, their clock restarted.
    """

    manifest: SequenceManifest
    statistics: SequenceStatistics | PredictionStatistics
    flat: np.ndarray  # int32: the codes of all subjects one after another
    clock: np.ndarray  # float32, months, beside `flat`
    firsts: np.ndarray  # [subjects + 1] int64: where each begins
    # [subjects] float32 months of the index day on the sequence's clock; NaN: the last event ends
    # it
    index_time: np.ndarray
    age: np.ndarray | None = None  # [subjects] float32 months at the first event; NaN: not known
    sex: np.ndarray | None = None  # [subjects] uint8: 1 male, 2 female, 0 unknown
    # float32 beside `flat`: numbers of the events as they are, NaN: none; None: a set without them
    numbers: np.ndarray | None = None
    limit: int = MAX_EVENTS

    inputs = "events"
    channels = 1
    channel_names: tuple[str, ...] = ()
    rate = 0.0
    regular = False

    @property
    def options(self) -> SequenceOptions:
        """The resolved choices that made the sequences."""
        return self.manifest.options

    @property
    def class_names(self) -> tuple[str, ...]:
        """The C labels; of times to event their risks at each horizon."""
        days = self.options.time_to_event
        if not days:
            return super().class_names
        return tuple(name_horizon(name, day) for name in self.manifest.class_names for day in days)

    @property
    def code_statistics(self) -> SequenceStatistics:
        """Statistics of a set without prediction times."""
        assert isinstance(self.statistics, SequenceStatistics)
        return self.statistics

    @property
    def length(self) -> int:
        """The longest sequence that is read."""
        return self.limit

    @property
    def codes(self) -> int:
        """Size of the input vocabulary, special ids included."""
        return len(self.vocabulary)

    def find_adapters(self, data: Sequence[RunData], channels: Sequence[int]) -> list[int]:
        """The only one, if it was trained on this vocabulary."""
        return [0] if self.vocabulary_sha256 in {part.vocabulary for part in data} else []

    def describe_misfit(self, data: Sequence[RunData], channels: Sequence[int]) -> tuple[str, str]:
        """Vocabularies."""
        return "another vocabulary", "its own"

    def _describe_reading(self) -> dict[str, Any]:
        return {"limit": self.limit}

    def lengths(self) -> np.ndarray:
        """Events of each uncut sequence of this subset, [n] int64."""
        return np.diff(self.firsts)[self.rows]

    def moments(self) -> dict[int, tuple[float, float]]:
        """Mean and standard deviation of the numbers of each id that has any, in the training split
        up to the index days.
        """
        import polars as pl

        if self.numbers is None:
            return {}
        fitted = pl.read_parquet(self.folder / VALUES, columns=["code", "mean", "std"], glob=False)
        ids = {code: number for number, code in enumerate(self.vocabulary)}
        return {ids[code]: (mean, std) for code, mean, std in fitted.iter_rows() if code in ids}

    def counts(self) -> np.ndarray:
        """Occurrences of each id in each uncut sequence of this subset, [n, codes] float32."""
        counts = np.zeros((len(self.firsts) - 1, self.codes), dtype=np.float32)
        subject = np.repeat(np.arange(len(counts)), np.diff(self.firsts))
        np.add.at(counts, (subject, self.flat), 1.0)
        return counts[self.rows]

    def arrays(
        self, rows: Sequence[int] | np.ndarray | None = None, draw: tuple[int, int] | None = None
    ) -> dict[str, np.ndarray | None]:
        """What a `Batch` of these rows holds besides labels.

        Args:
            rows: positions in the full index; None: all of this subset.
            draw: (seed, epoch): events of equal times in a new order, drawn once an epoch and row;
                None: in the order of their ids.

        Returns:
            values [n, N] int64 (0 behind the end), times [n, N] float32 months since the first
            event that is read, mask [n, N] bool, end [n] float32: position of [EOS], the last event
            or the index day, person [n, 4] and numbers [n, N] float32 as in `Batch`.
        """
        rows = self._check_rows(rows)
        stops = self.firsts[rows + 1]
        starts = np.maximum(self.firsts[rows], stops - self.limit)
        lengths = stops - starts
        mask = np.arange(max(int(lengths.max(initial=0)), 1)) < lengths[:, None]
        events = np.where(mask, starts[:, None] + np.arange(mask.shape[1]), 0)
        values = np.where(mask, self.flat[events], 0).astype(np.int64)
        clock = np.asarray(self.clock[events], np.float64)
        numbers = None
        if self.numbers is not None:
            numbers = np.where(mask, self.numbers[events], np.float32(np.nan))
        for mapped in (self.flat, self.clock, self.numbers):
            _release_pages(mapped)
        begin = clock[:, 0]
        times = np.where(mask, clock - begin[:, None], 0.0)
        index_time = self.index_time[rows].astype(np.float64) - begin
        end = np.where(np.isnan(index_time), times.max(axis=1, initial=0.0), index_time)
        if draw is not None:
            for i, row in enumerate(rows.tolist()):
                keys = np.random.Generator(np.random.PCG64([*draw, row])).random(int(lengths[i]))
                order = np.lexsort((keys, times[i, : lengths[i]]))
                values[i, : lengths[i]] = values[i, order]
                if numbers is not None:
                    numbers[i, : lengths[i]] = numbers[i, order]
        return {
            "values": values,
            "times": times.astype(np.float32),
            "mask": mask,
            "end": end.astype(np.float32),
            "person": self._describe_persons(rows, begin),
            "numbers": numbers,
        }

    def _describe_persons(self, rows: np.ndarray, begin: np.ndarray) -> np.ndarray | None:
        """`Batch.person` of subjects whose first event that is read is `begin` months behind their
        first.
        """
        if self.age is None or self.sex is None:
            return None
        years = (self.age[rows] + begin) / 12
        has_age, sex = ~np.isnan(years), self.sex[rows]
        columns = (np.where(has_age, (years - 50) / 10, 0.0), has_age, sex == 1, sex == 2)
        return np.stack(columns, axis=1).astype(np.float32)


class NewHistories(NamedTuple):
    """Histories of new people as a run reads them, with what of them it does not understand."""

    sequences: EventSequences
    # subject_id, index_day (on the clock of the cache), status, died (before the index day), had
    # (labels whose outcome came by it), events (known codes), rows and unknown_rows (up to it), in
    # the order of the sequences
    people: pl.DataFrame
    unknown: pl.DataFrame  # code, reason, rows, people
    dated: bool  # index days are dates
    exact: bool  # whether pages show small counts: the people are synthetic
    report: IngestReport | None  # of their ingest; None: a cache was there
    ids: pl.DataFrame | None  # of people in a table: raw and new ids

    def name_rows(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The frame with the ids of the table, in rising order, in the place of those of the
        cache.
        """
        if self.ids is None:
            return frame
        named = self.ids.join(frame, left_on="new", right_on="subject_id")
        return named.drop("new").rename({"raw": "subject_id"}).sort("subject_id")


def _release_pages(mapped: np.ndarray | None) -> None:
    """Give the pages of a mapped file back: they stay in the cache of the system, not in the memory
    of the process.
    """
    if isinstance(mapped, np.memmap):
        mapped._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]


def _read_shards(
    folder: Path, names: Sequence[str], *, mapped: bool, numbered: bool
) -> tuple[pl.DataFrame, dict[str, np.ndarray]]:
    """The sequences without their events, but with their `length`; and the events: codes and times,
    and `values` if they are `numbered`.

    The events are in memory, or `mapped` from a scratch file. One shard is in memory at a time.
    """
    import polars as pl

    parts: list[pl.DataFrame] = []
    kinds = {"codes": np.dtype(np.int32), "times": np.dtype(np.float32)}
    if numbered:
        kinds["values"] = np.dtype(np.float32)
    with ExitStack() as stack:
        streams = {
            name: stack.enter_context(storage.open_scratch(folder) if mapped else io.BytesIO())
            for name in kinds
        }
        for file in names:
            part = pl.read_parquet(folder / file, glob=False).with_columns(
                pl.col("split").cast(pl.String), length=pl.col("codes").list.len()
            )
            for name, kind in kinds.items():
                events = part[name].explode()
                if name == "values":
                    events = events.fill_null(float("nan"))
                streams[name].write(events.to_numpy().astype(kind).data)
            parts.append(part.drop("codes", "times", "values", strict=False))
            del part
        events_by_name = {name: _map_events(streams[name], kind) for name, kind in kinds.items()}
        return pl.concat(parts), events_by_name


def _map_events(stream: BinaryIO, kind: np.dtype[Any]) -> np.ndarray:
    """The events that a stream holds."""
    if isinstance(stream, io.BytesIO):
        return np.frombuffer(stream.getvalue(), kind)
    stream.flush()
    return np.memmap(stream, kind, "r")


def write_shard(out: Path, number: int, frame: pl.DataFrame) -> dict[str, StoredFile]:
    """Write the sequences of some subjects: subject_id, codes, times, split, age0_months, sex,
    y_<label> ..., t_index; of times to event time_<label>, event_<label>.
    """
    content = storage.encode_parquet(to_table(frame))
    name, stored = store_hashed(out, f"sequences-{number:05d}", ".parquet", content, frame.height)
    return {name: stored}


def publish_sequences(
    out: Path,
    manifest: SequenceManifest,
    *,
    shards: dict[str, StoredFile],
    vocabulary: pl.DataFrame,
    ratios: pl.DataFrame,
    statistics: SequenceStatistics | PredictionStatistics,
    preparation: HistoryPreparation | None = None,
    cohort: pl.DataFrame | None = None,
    values: pl.DataFrame | None = None,
) -> None:
    """Write a set of sequences, the manifest last; the caller holds the lock.

    Args:
        out: folder of the set.
        manifest: without files and shards.
        shards: files of `write_shard`, in order.
        vocabulary: id, code, name, category, n_subjects_train, n_events_train.
        ratios: target, code, ratio, lo, hi, n_case_with, n_case, n_ref_with, n_ref, selected.
        statistics: of the set.
        preparation: of histories of new people.
        cohort: who belongs to it and why not, as `claims.cohorts.select_subjects`.
        values: of the numbers of codes, as `claims.code_values.fit_values`.
    """
    storage.remove_file(out / manifests.MANIFEST)
    files = dict(shards)
    frames = {"vocab.parquet": vocabulary, "ratios.parquet": ratios, COHORT: cohort, VALUES: values}
    for name, frame in frames.items():
        if frame is None:
            storage.remove_file(out / name)
        else:
            content = storage.encode_parquet(to_table(frame))
            files[name] = store_file(out / name, content, frame.height)
    for name, record in (("statistics.json", statistics), (HISTORIES, preparation)):
        if record is None:
            storage.remove_file(out / name)
        else:
            files[name] = store_file(out / name, record.encode())
    manifest.model_copy(update={"files": files, "shards": list(shards)}).publish(out)
    manifests.remove_old_files(out, SHARDS)


def to_table(frame: pl.DataFrame) -> pa.Table:
    """An Arrow table with 32-bit offsets, which every reader knows."""
    import pyarrow as pa

    def narrow(kind: pa.DataType) -> pa.DataType:
        if pa.types.is_large_list(kind):
            return pa.list_(narrow(kind.value_type))
        return pa.string() if pa.types.is_large_string(kind) else kind

    table = frame.to_arrow()
    return table.cast(pa.schema([(field.name, narrow(field.type)) for field in table.schema]))


def count_splits(folder: Path) -> dict[str, dict[str, Any]]:
    """Of each split subjects, windows and cases of each label, with a column of a shard in memory
    at a time. A subject is in one shard.
    """
    import polars as pl

    manifest = SequenceManifest.read(folder)
    labels = {f"y_{name}": name for name in manifest.class_names}
    counts = [
        pl.col("subject_id").n_unique().alias("subjects"),
        pl.len().alias("windows"),
        *(pl.col(column).sum() for column in labels),
    ]
    parts = []
    for name in manifest.shards:
        part = pl.read_parquet(folder / name, columns=["subject_id", "split", *labels], glob=False)
        groups = part.group_by(pl.col("split").cast(pl.String))
        parts.append(groups.agg(count.cast(pl.Int64) for count in counts))
    total = pl.concat(parts).group_by("split").sum()
    rows = {row["split"]: row for row in total.iter_rows(named=True)}
    audit = {}
    for split in SPLITS:
        row = rows.get(split, {})
        audit[split] = {
            "subjects": row.get("subjects", 0),
            "windows": row.get("windows", 0),
            "classes": {name: row[column] for column, name in labels.items() if row},
        }
    return audit


def count_carriers(folder: Path, codes: Mapping[str, str]) -> dict[str, dict[str, tuple[int, int]]]:
    """Of one code for each label the sequences with it, among the cases and among the others, by
    split and in all.
    """
    import polars as pl

    manifest = SequenceManifest.read(folder)
    ids = dict(
        pl.read_parquet(folder / "vocab.parquet", glob=False).select("code", "id").iter_rows()
    )
    sums: Counter[tuple[str, str, int]] = Counter()
    for name in manifest.shards:
        part = pl.read_parquet(
            folder / name,
            columns=["codes", "split", *(f"y_{label}" for label in codes)],
            glob=False,
        )
        for label, code in codes.items():
            carriers = part.filter(pl.col("codes").list.contains(ids[code]))
            groups = carriers.group_by(pl.col("split").cast(pl.String), f"y_{label}").len()
            for split, value, n in groups.drop_nulls().iter_rows():
                sums.update({(label, split, value): n, (label, "all", value): n})
    return {
        label: {part: (sums[label, part, 1], sums[label, part, 0]) for part in (*SPLITS, "all")}
        for label in codes
    }


def open_sequences(
    folder: str | Path, verify: bool = True, shards: int | None = None
) -> EventSequences:
    """Open the sequences in `folder`, or those of its first so many shards. Raises UserError as
    `tokens.open_tokens`.
    """
    import polars as pl

    folder = Path(folder)
    manifest = open_manifest(folder, SequenceManifest, verify)
    options = manifest.options
    numbered = options.numbers
    mapped = manifest.events * (12 if numbered else 8) > IN_MEMORY
    try:
        frame, events = _read_shards(
            folder, manifest.shards[:shards], mapped=mapped, numbered=numbered
        )
        codes = pl.read_parquet(folder / "vocab.parquet", columns=["code"], glob=False)[
            "code"
        ].to_list()
    except (OSError, pl.exceptions.PolarsError) as error:
        raise_system_error(error, folder)
        wanted = "expected sequences and their vocabulary in Parquet"
        raise token_error(folder, "not readable", wanted) from error
    index = _make_index(frame, manifest.class_names)
    check_subjects(index, options.split, folder)
    statistics = PredictionStatistics if manifest.base else SequenceStatistics
    return EventSequences(
        folder=folder,
        manifest=manifest,
        statistics=statistics.load(folder / "statistics.json"),
        rows=np.arange(frame.height),
        whole_index=index,
        target=_stack_targets(frame, manifest.class_names, options.time_to_event),
        flat=events["codes"],
        clock=events["times"],
        numbers=events.get("values"),
        firsts=np.append(0, np.cumsum(frame["length"].to_numpy())).astype(np.int64),
        index_time=frame["t_index"].cast(pl.Float32).fill_null(float("nan")).to_numpy(),
        vocabulary=(*SPECIAL, *codes),
        age=frame["age0_months"].cast(pl.Float32).fill_null(float("nan")).to_numpy(),
        sex=frame["sex"].fill_null(0).to_numpy(),
    )


def _make_index(frame: pl.DataFrame, labels: Sequence[str]) -> pl.DataFrame:
    """The index of the sequences; a subject is a window and a recording."""
    import polars as pl

    subject = pl.col("subject_id").cast(pl.String)
    positive = [pl.when(pl.col(f"y_{name}") == 1).then(pl.lit(name)) for name in labels]
    label = pl.concat_list(positive).list.drop_nulls() if positive else pl.lit(None, pl.String)
    return frame.select(
        window=pl.int_range(pl.len(), dtype=pl.Int64),
        subject_id=subject,
        recording_id=subject,
        start=pl.lit(0.0),
        label=label,
        split="split",
    )


def _stack_targets(
    frame: pl.DataFrame, labels: Sequence[str], horizons: Sequence[int] | None
) -> np.ndarray | None:
    """Labels [n, C] as numbers, NaN: not known; of times to event time and event of each label
    [n, C, 2], repeated for each horizon.
    """
    import polars as pl

    def stack(*columns: str) -> np.ndarray:
        return frame.select(pl.col(columns).cast(pl.Float32)).to_numpy(order="c")

    if not labels:
        return None
    if not horizons:
        return stack(*(f"y_{name}" for name in labels))
    targets = np.stack([stack(f"time_{name}", f"event_{name}") for name in labels], axis=1)
    return np.repeat(targets, len(horizons), axis=1)
