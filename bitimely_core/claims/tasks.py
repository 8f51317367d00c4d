"""Sequences up to the prediction times of a task: a token set from MEDS labels and the codes of
another token set.

One sequence per row of the labels, so one per prediction time of a subject. The cache stores days,
so the input ends on the day before the prediction time. A row without any known code before it has
the single code [UNK], so that every row gets a prediction. Codes, roll-up, dedupe, clock and
leakage policy are those of the other token set.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from bitimely_core import locks, manifests, storage
from bitimely_core.cache import Cache
from bitimely_core.claims import code_values, sequence_builder, sequence_plan, shard_map, steps
from bitimely_core.claims.choices import SequenceChoices
from bitimely_core.claims.prevalence import CodeSelection
from bitimely_core.errors import Finding, Reason, input_error, usage_error
from bitimely_core.formats import tables
from bitimely_core.formats.source import scan_folder
from bitimely_core.privacy import round_message
from bitimely_core.records import StoredFile, refuse_other_manifest, write_results
from bitimely_core.schemas.ingest import FindingRecord
from bitimely_core.schemas.tokens import PredictionStatistics, SequenceManifest, SequenceOptions
from bitimely_core.system_errors import raise_system_error
from bitimely_core.tokens.sequences import (
    SPECIAL,
    EventSequences,
    publish_sequences,
    to_table,
    write_shard,
)
from bitimely_core.tokens.sets import TokenSet, open_manifest
from bitimely_core.types import Progress

DAY = 86_400_000_000  # microseconds
UNKNOWN = SPECIAL.index("[UNK]")


def read_task_labels(folder: str | Path) -> pl.DataFrame:
    """The rows of a MEDS label folder, sorted: subject_id Int64, prediction_time in microseconds,
    boolean_value (null: not known).

    Raises UserError: not_found (exit 2), no_input or schema (exit 4).
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise usage_error(
            "no such folder",
            "expected a folder with label files of MEDS",
            file=str(folder),
            field="--task",
        )
    paths = [
        folder / name
        for name in scan_folder(folder, follow_symlinks=True).files
        if name.endswith(".parquet")
    ]
    if not paths:
        raise input_error(
            Reason.NO_INPUT,
            "no .parquet in it",
            "expected label files of MEDS",
            file=str(folder),
            field="--task",
        )
    kinds: dict[str, Any] = {
        "subject_id": pl.Int64,
        "prediction_time": pl.Datetime("us"),
        "boolean_value": pl.Boolean,
    }
    try:
        rows = pl.concat(
            [
                pl.read_parquet(path, columns=list(kinds)).select(
                    pl.col(n).cast(k) for n, k in kinds.items()
                )
                for path in paths
            ]
        )
    except (OSError, pl.exceptions.PolarsError) as error:
        raise_system_error(error, folder, stored=False)
        wanted = "expected subject_id, prediction_time and boolean_value"
        raise input_error(
            Reason.SCHEMA, type(error).__name__, wanted, file=str(folder), field="--task"
        ) from error
    if rows["subject_id"].null_count() or rows["prediction_time"].null_count():
        raise input_error(
            Reason.SCHEMA,
            "a row without subject or time",
            "expected both",
            file=str(folder),
            field="--task",
        )
    return rows.unique(maintain_order=True).sort(
        "subject_id", "prediction_time", maintain_order=True
    )


def read_id_table(path: str | Path | None) -> pl.DataFrame | None:
    """The table that `ingest --keep-ids` wrote: raw and new, both Int64; None for no path. Raises
    UserError (config, exit 2).
    """
    if path is None:
        return None
    names, wanted = (
        ("subject_id", "new"),
        "expected the file of ingest --keep-ids, with integer ids as in MEDS",
    )
    return tables.read_option_table(Path(path), names, "--ids", wanted, integers=names).select(
        raw="subject_id", new="new"
    )


def write_task_sequences(
    cache: Cache,
    base: EventSequences,
    task: str | Path,
    out: Path,
    *,
    ids: str | Path | None = None,
    verify: bool = True,
    force_new: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write the sequences of the labels in `task`, with one label named after `out`.

    Args:
        cache: of claims, with true dates.
        base: the token set of the pre-training, made from `cache`.
        task: folder of MEDS labels.
        out: folder of the new token set; an existing one of the same labels stays.
        ids: table of raw and new subject_id; None: the labels have those of the cache.
        verify: compare the cache with its checksums.
        force_new: replace a token set of other labels.
        progress: called after each shard.

    Raises:
        UserError: config, settings_differ (exit 2), no_input, schema (4), integrity (5).
    """
    if cache.events_manifest.clock != "calendar":
        hint = "Ingest again with --keep-dates"
        raise usage_error(
            "the cache has no true dates",
            "prediction times are dates",
            hint,
            file=str(cache.folder),
            field="--task",
        )
    if base.manifest.cache != cache.manifest.manifest_sha256 or base.options.split_file:
        text = (
            "was made with --split-file"
            if base.options.split_file
            else "was made from another cache"
        )
        expected, hint = (
            "expected sequences of this cache and its split",
            "Tokenize again without --task",
        )
        raise usage_error(text, expected, hint, file=str(base.folder), field="--task")
    requested, known = read_task_labels(task), read_id_table(ids)
    options = {
        **base.options.model_copy(update={"time_to_event": None, "cohort": None}).model_dump(
            mode="json"
        ),
        "task": "multilabel",
        "landmark": None,
        "min_codes": 0,
        "asked": _fingerprint_labels(requested),
    }
    if (out / manifests.MANIFEST).exists() and not force_new:
        old = manifests.read_manifest(out)
        if old.get("options") == options and old.get("base") == base.fingerprint:
            open_manifest(out, SequenceManifest, verify)
            return
        raise usage_error(
            "was made from other labels or codes",
            "expected the same",
            "Give another --name, or --force-new",
            code=Reason.SETTINGS_DIFFER,
            file=str(out),
        )
    if verify:
        cache.manifest.check_files(cache.folder)
    if known is None:
        rows = requested.with_columns(new="subject_id")
    else:
        rows = requested.join(
            known, left_on="subject_id", right_on="raw", how="left", maintain_order="left"
        )
    cohort = cache.cohort()["subject_id"].implode()
    absent = rows.filter(pl.col("new").is_null() | ~pl.col("new").is_in(cohort))[
        "subject_id"
    ].n_unique()
    storage.make_folder(out)
    with locks.lock_folder(out):
        storage.remove_temporary_files(out)
        _write_task(
            cache,
            base,
            rows.drop("subject_id").rename({"new": "subject_id"}),
            out,
            options,
            absent,
            progress,
        )


def _fingerprint_labels(requested: pl.DataFrame) -> str:
    """Fingerprint of the rows."""
    return storage.fingerprint(
        [
            requested["subject_id"].to_list(),
            requested["prediction_time"].to_physical().to_list(),
            requested["boolean_value"].to_list(),
        ]
    )


def _write_task(
    cache: Cache,
    base: EventSequences,
    requested: pl.DataFrame,
    out: Path,
    options: dict[str, Any],
    absent: int,
    progress: Progress | None,
) -> None:
    """All files of the token set; `requested` has subject_id (of the cache), prediction_time,
    boolean_value.
    """
    names = {field.name for field in fields(SequenceChoices)}
    choices = SequenceChoices(**{name: value for name, value in options.items() if name in names})
    fitted = code_values.load_values(base.folder)
    plan = sequence_plan.SequencePlan(
        cache=cache,
        preset=base.options.preset,
        choices=choices,
        split_file="",
        engine="polars",
        fitted=fitted,
    )
    selection = CodeSelection(
        phecodes=list(base.vocabulary[len(SPECIAL) :]), ratios={}, max_attainable={}
    )
    day = pl.col("prediction_time").dt.epoch("us") // DAY - 1
    requested = requested.select(
        "subject_id",
        "prediction_time",
        pl.col("boolean_value").cast(pl.Int8).alias(f"y_{out.name}"),
        index_day=day,
    )
    files: dict[str, StoredFile] = {}
    parts: list[pl.DataFrame] = []
    total = len(cache.events_manifest.shards)
    shards = shard_map.iter_shards(plan, shard_map.load_subjects(plan))
    # enumerate would keep a shard in memory until the next is made
    for done in range(1, total + 1):
        shard = next(shards)
        frame = _build_task_shard(shard, requested, choices, selection, out.name)
        if frame.height:
            files |= write_shard(out, len(files), frame)
            parts.append(frame.select("subject_id", "prediction_time", "split", "codes"))
        if progress is not None:
            progress("sequences", done, total)
        del shard, frame
    if not parts:
        raise input_error(
            Reason.NO_INPUT,
            "no subject of the labels is in the cache",
            "expected some",
            "Give --ids of the ingest",
        )
    rows = pl.concat(parts)
    silent = rows.filter(pl.col("codes").list.first() == UNKNOWN).height
    notices = (
        [
            round_message(
                f"{silent:,} of {rows.height:,} rows have no known code before their prediction time: their input is [UNK]."
            )
        ]
        if silent
        else []
    )
    text = f"{absent} subjects of the labels are not in the cache"
    found = (
        [Finding(Reason.IDENTIFIER, text, "they get no prediction", level="warning", count=absent)]
        if absent
        else []
    )
    events = int(rows["codes"].list.len().sum())
    manifest = SequenceManifest(
        cache=base.manifest.cache,
        base=base.fingerprint,
        options=SequenceOptions(**options),
        class_names=[out.name],
        notices=notices,
        findings=[FindingRecord.from_finding(one) for one in found],
        shards=[],
        events=events,
    )
    publish_sequences(
        out,
        manifest,
        shards=files,
        vocabulary=pl.read_parquet(base.folder / "vocab.parquet"),
        ratios=pl.read_parquet(base.folder / "ratios.parquet"),
        values=fitted,
        statistics=PredictionStatistics(
            rows=rows.height, without_codes=silent, not_in_cache=absent, events=events
        ),
    )


def _build_task_shard(
    shard: steps.ClaimsShard,
    requested: pl.DataFrame,
    choices: SequenceChoices,
    selection: CodeSelection,
    name: str,
) -> pl.DataFrame:
    """The stored form of the sequences of one shard, one per requested prediction time."""
    cohort = (
        shard.cohort.drop("index_day", strict=False)
        .with_row_index("before")
        .join(requested, on="subject_id", how="inner", maintain_order="left")
    )
    cohort = cohort.with_columns(pl.col("before").cast(pl.Int32))
    numbers = cohort.select("before", number=pl.int_range(pl.len(), dtype=pl.Int32))
    rows = shard.rows.join(
        numbers, left_on="subject", right_on="before", how="inner", maintain_order="left"
    )
    rows = rows.with_columns(subject="number").drop("number")
    built = steps.build_shard(replace(shard, rows=rows, cohort=cohort), choices, selection)
    table = pl.from_arrow(sequence_builder.to_table(built, cohort, [name]))
    assert isinstance(table, pl.DataFrame)
    table = table.with_columns(
        pl.col("split").cast(pl.String),
        prediction_time=cohort["prediction_time"].gather(built.subjects),
    )
    silent = cohort.filter(~np.isin(np.arange(cohort.height), built.subjects))
    none = silent.select(
        "subject_id",
        "split",
        f"y_{name}",
        "prediction_time",
        codes=pl.lit([UNKNOWN], pl.List(pl.Int32)),
        times=pl.lit([0.0], pl.List(pl.Float32)),
    )
    return pl.concat([table, none], how="diagonal_relaxed").sort(
        "subject_id", "prediction_time", maintain_order=True
    )


def check_task_run(windows: TokenSet, kind: str, folder: Path) -> None:
    """Raises UserError (config, exit 2) where `write_predictions` cannot apply: other token sets, a
    run that is not fine-tuned, a `folder` of data.
    """
    refuse_other_manifest(folder)
    if kind != "finetune" or getattr(windows.options, "asked", None) is None:
        problem = "no prediction times" if kind == "finetune" else "a run without a head"
        expected = "expected a fine-tuned run and sequences of tokenize --task"
        raise usage_error(problem, expected, file=str(windows.folder), field="--predictions")


def write_predictions(
    path: str | Path, sequences: TokenSet, probabilities: np.ndarray, ids: str | Path | None = None
) -> int:
    """Predictions in the schema of MEDS-evaluation, one row a sequence; returns how many.

    Args:
        path: the Parquet file.
        sequences: a subset of what `build` made (`refuse_others`).
        probabilities: [n] or [n, 1] of the label being true.
        ids: as in `build`; subjects have their raw ids again.

    Raises:
        UserError: config (exit 2) for ids of another cache.
    """
    assert isinstance(sequences, EventSequences)
    shards = [sequences.folder / name for name in sequences.manifest.shards]
    y = f"y_{sequences.class_names[0]}"
    frame = pl.concat(
        [pl.read_parquet(shard, columns=["subject_id", "prediction_time", y]) for shard in shards]
    )[sequences.rows]
    if (known := read_id_table(ids)) is not None:
        frame = frame.join(
            known, left_on="subject_id", right_on="new", how="left", maintain_order="left"
        ).with_columns(subject_id="raw")
        if frame["subject_id"].null_count():
            raise usage_error(
                "misses subjects of these sequences",
                "expected the table of their ingest",
                file=str(ids),
                field="--ids",
            )
    chance = pl.Series(np.asarray(probabilities, dtype=np.float64).reshape(-1))
    frame = frame.select(
        "subject_id",
        "prediction_time",
        boolean_value=pl.col(y).cast(pl.Boolean),
        predicted_boolean_value=chance > 0.5,
        predicted_boolean_probability=chance,
    )
    write_results(Path(path).parent, {Path(path).name: storage.encode_parquet(to_table(frame))})
    return frame.height
