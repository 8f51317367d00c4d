"""The cohort of sequences as a MEDS 0.4 data set: events, code metadata, splits, and a label folder
for each label.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import polars as pl

from bitimely_core import __version__, storage
from bitimely_core.cache import Cache
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
    cohort = cache.cohort()
    events = pl.concat(
        [
            frame.select(
                "subject_id",
                "time",
                "code",
                "numeric_value",
                visit_kind=pl.col("source").cast(pl.String),
            )
            for frame in cache.events()
        ]
    )
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
    data = pl.concat([births, deaths, events]).sort("subject_id", "time", maintain_order=True)
    phecodes = (
        pl.concat([frame.select("code", "phecodes") for frame in cache.events()])
        .unique("code")
        .sort("code")
    )
    found = (
        pl.when(~pl.col("phecodes").list.contains(pl.col("code")))
        .then("phecodes")
        .otherwise(pl.lit([], pl.List(pl.String)))
    )  # other codes have none
    parents = found.list.eval(pl.concat_str(pl.lit("PheCode/"), pl.element()))
    codes = phecodes.select("code", description=pl.lit(None, pl.String), parent_codes=parents)
    splits = sequences.whole_index.select(
        pl.col("subject_id").cast(pl.Int64), pl.col("split").replace(SPLITS)
    )
    metadata = storage.make_folder(storage.make_folder(out) / "metadata")
    storage.write_parquet(storage.make_folder(out / "data") / "0.parquet", to_table(data))
    storage.write_parquet(metadata / "codes.parquet", to_table(codes))
    storage.write_parquet(metadata / "subject_splits.parquet", to_table(splits))
    facts = {
        "dataset_name": cache.dataset,
        "etl_name": "bitimely",
        "etl_version": __version__,
        "meds_version": "0.4.0",
    }
    storage.write_json(metadata / "dataset.json", facts)
    labels = select_labels(cache, sequences)
    for folder, frame in zip(name_folders(labels), labels.values(), strict=True):
        storage.write_parquet(
            storage.make_folder(storage.make_folder(out / "labels") / folder) / "0.parquet",
            to_table(frame),
        )


def name_folders(labels: Iterable[str]) -> list[str]:
    """A folder for each label: its name without what leads to another folder, numbered where an
    earlier one has that name.
    """
    found: list[str] = []
    for label in labels:
        plain = re.sub(r"[/\\\x00-\x1f]", "-", label).strip(" .")[:100] or "label"
        numbered = itertools.chain((plain,), (f"{plain}-{k}" for k in itertools.count(2)))
        found.append(
            next(name for name in numbered if name.casefold() not in map(str.casefold, found))
        )
    return found


def _to_time(day: pl.Expr) -> pl.Expr:
    return (day.cast(pl.Int64) * DAY).cast(pl.Datetime("us"))


def select_labels(cache: Cache, sequences: EventSequences) -> dict[str, pl.DataFrame]:
    """Label -> subject_id, prediction_time, boolean_value of the subjects whose label is known."""
    last = pl.concat(
        [
            frame.group_by("subject_id").agg(first=pl.col("time").min(), last=pl.col("time").max())
            for frame in cache.events()
        ]
    )
    ids = sequences.whole_index["subject_id"].cast(pl.Int64)
    frame = pl.DataFrame({"subject_id": ids}).join(
        last, on="subject_id", how="left", maintain_order="left"
    )
    when, landmark = pl.col("last"), sequences.options.landmark
    if landmark is not None:
        when = (
            _to_time(pl.lit(landmark.day))
            if landmark.day is not None
            else pl.col("first") + pl.duration(days=landmark.landmark_days)
        )
    if sequences.options.cohort is not None:
        index = pl.read_parquet(sequences.folder / COHORT, columns=["subject_id", "index_day"])
        frame, when = (
            frame.join(index, on="subject_id", how="left", maintain_order="left"),
            _to_time(pl.col("index_day")),
        )
    frame = frame.select("subject_id", prediction_time=when.cast(pl.Datetime("us")))
    assert sequences.target is not None
    by_label = {}
    for k, name in enumerate(sequences.class_names):
        value = sequences.target[:, k]
        known = frame.with_columns(boolean_value=pl.Series(value == 1)).filter(
            pl.Series(np.isfinite(value))
        )
        by_label[name] = known.sort("subject_id", "prediction_time")
    return by_label
