"""The cohort of sequences as a MEDS 0.4 data set: events, code metadata, splits, and a label folder
for each label.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from bitimely_core import __version__
from bitimely_core.cache import Cache
from bitimely_core.store import storage
from bitimely_core.tokens.sequences import COHORT, EventSequences, to_table

DAY = 86_400_000_000  # microseconds
SPLITS = {"train": "train", "validation": "tuning", "test": "held_out"}
BIRTH, DEATH = "MEDS_BIRTH", "MEDS_DEATH"


def write_meds(out: Path, cache: Cache, sequences: EventSequences) -> None:
    """Write `data/`, with the kind of each claim in a column `visit_kind` of its own, `metadata/`
    and `labels/<label>/` below `out`. The cache must have been made with --keep-dates.

    The prediction time of a label is the index day; without a landmark, the last event of the
    subject, which may have a code without a token.
    """
    columns = ("subject_id", "time", "code", "numeric_value")
    kind = pl.col("source").cast(pl.String)
    events = [frame.select(*columns, visit_kind=kind) for frame in cache.events()]
    cohort = cache.cohort()
    births, deaths = (
        cohort.drop_nulls(day).select(
            "subject_id",
            time=_to_time(pl.col(day)),
            code=pl.lit(code),
            numeric_value=pl.lit(None, pl.Float32),
            visit_kind=pl.lit(None, pl.String),
        )
        for day, code in (("birth_day", BIRTH), ("death_day", DEATH))
    )
    data = pl.concat([births, deaths, *events]).sort("subject_id", "time", maintain_order=True)
    metadata = storage.make_folder(storage.make_folder(out) / "metadata")
    storage.write_parquet(storage.make_folder(out / "data") / "0.parquet", to_table(data))
    storage.write_parquet(metadata / "codes.parquet", to_table(_list_codes(cache)))
    splits = sequences.whole_index.select(
        pl.col("subject_id").cast(pl.Int64), pl.col("split").replace(SPLITS)
    )
    storage.write_parquet(metadata / "subject_splits.parquet", to_table(splits))
    facts = {
        "dataset_name": cache.dataset,
        "etl_name": "bitimely",
        "etl_version": __version__,
        "meds_version": "0.4.0",
    }
    storage.write_json(metadata / "dataset.json", facts)
    labels = select_labels(cache, sequences)
    for name, frame in zip(name_folders(labels), labels.values(), strict=True):
        folder = storage.make_folder(storage.make_folder(out / "labels") / name)
        storage.write_parquet(folder / "0.parquet", to_table(frame))


def _list_codes(cache: Cache) -> pl.DataFrame:
    """The codes with their PheCodes as parents; codes that are not ICD have none."""
    parts = [frame.select("code", "phecodes") for frame in cache.events()]
    phecodes = pl.col("phecodes")
    is_other = phecodes.list.contains(pl.col("code"))
    parents = pl.when(~is_other).then(phecodes).otherwise(pl.lit([], pl.List(pl.String)))
    return (
        pl.concat(parts)
        .unique("code")
        .sort("code")
        .select(
            "code",
            description=pl.lit(None, pl.String),
            parent_codes=parents.list.eval(pl.concat_str(pl.lit("PheCode/"), pl.element())),
        )
    )


def name_folders(labels: Iterable[str]) -> list[str]:
    """A folder for each label: its name without what leads to another folder, numbered where an
    earlier one has that name.
    """
    folders: dict[str, str] = {}  # as a file system without case compares them -> name
    for label in labels:
        name = plain = re.sub(r"[/\\\x00-\x1f]", "-", label).strip(" .")[:100] or "label"
        numbers = itertools.count(2)
        while name.casefold() in folders:
            name = f"{plain}-{next(numbers)}"
        folders[name.casefold()] = name
    return list(folders.values())


def _to_time(day: pl.Expr) -> pl.Expr:
    return (day.cast(pl.Int64) * DAY).cast(pl.Datetime("us"))


def select_labels(cache: Cache, sequences: EventSequences) -> dict[str, pl.DataFrame]:
    """Label -> subject_id, prediction_time, boolean_value of the subjects whose label is known; of
    histories without labels none. Of times to event each label is the event within a horizon.
    """
    if sequences.target is None:
        return {}
    time, landmark = pl.col("time"), sequences.options.landmark
    ends = {"first": time.min(), "last": time.max()}
    events = pl.concat([frame.group_by("subject_id").agg(**ends) for frame in cache.events()])
    index = sequences.whole_index.select(pl.col("subject_id").cast(pl.Int64))
    frame = index.join(events, on="subject_id", how="left", maintain_order="left")
    when = pl.col("last")
    if landmark is not None and landmark.day is not None:
        when = _to_time(pl.lit(landmark.day))
    elif landmark is not None:
        when = pl.col("first") + pl.duration(days=landmark.landmark_days)
    if sequences.options.cohort is not None:
        days = pl.read_parquet(
            sequences.folder / COHORT, columns=["subject_id", "index_day"], glob=False
        )
        frame = frame.join(days, on="subject_id", how="left", maintain_order="left")
        when = _to_time(pl.col("index_day"))
    frame = frame.select("subject_id", prediction_time=when.cast(pl.Datetime("us")))
    target, horizons = sequences.target, sequences.options.time_to_event
    target = _reach_horizons(target, horizons) if horizons else target
    by_label = {}
    for name, value in zip(sequences.class_names, target.T, strict=True):
        rows = frame.with_columns(boolean_value=pl.Series(value == 1))
        rows = rows.filter(pl.Series(np.isfinite(value)))
        by_label[name] = rows.sort("subject_id", "prediction_time")
    return by_label


def _reach_horizons(target: NDArray[np.float32], horizons: Sequence[int]) -> NDArray[np.float32]:
    """Whether events come within horizons; nan where the observation ends before.

    Args:
        target: [n, labels x horizons, 2], time and event (`event_times`).
        horizons: days, [h].

    Returns:
        [n, labels x horizons], 1, 0 or nan.
    """
    time, event = target[..., 0], target[..., 1]
    is_over = time <= np.tile(np.asarray(horizons), target.shape[1] // len(horizons))
    is_unknown = np.isnan(time) | (is_over & (event == 0))
    return np.where(is_unknown, np.nan, is_over & (event == 1)).astype(np.float32)
