"""Sequences up to the prediction times of a task: a token set from MEDS labels and the codes of
another token set.

One sequence per row of the labels, so one per prediction time of a subject. The cache stores days,
so the input ends on the day before the prediction time. A row without any known code before it has
the single code [UNK], so that every row gets a prediction. Codes, roll-up, dedupe, clock and
leakage policy are those of the other token set.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from bitimely_core.cache import Cache
from bitimely_core.claims import code_values, sequence_builder, sequence_plan, steps
from bitimely_core.claims.prevalence import CodeSelection
from bitimely_core.claims.sequence_choices import SequenceChoices
from bitimely_core.claims.shard_map import ShardMap, load_subjects
from bitimely_core.claims.steps import ClaimsShard
from bitimely_core.errors import Finding, Place, Reason, input_error, input_warning, usage_error
from bitimely_core.formats import tables
from bitimely_core.formats.source import scan_folder
from bitimely_core.progress import report_progress
from bitimely_core.schemas.ingest_records import FindingRecord
from bitimely_core.schemas.tokens import PredictionStatistics, SequenceManifest, SequenceOptions
from bitimely_core.store import locks, manifests, storage
from bitimely_core.store.records import StoredFile, write_results
from bitimely_core.system_errors import raise_system_error
from bitimely_core.tokens.sequences import (
    SPECIAL,
    EventSequences,
    publish_sequences,
    to_table,
    write_shard,
)
from bitimely_core.tokens.sets import TokenSet, open_manifest

DAY = 86_400_000_000  # microseconds
LABEL_COLUMNS: dict[str, Any] = {
    "subject_id": pl.Int64,
    "prediction_time": pl.Datetime("us"),
    "boolean_value": pl.Boolean,
}


def read_task_labels(folder: str | Path) -> pl.DataFrame:
    """The rows of a MEDS label folder, sorted: subject_id Int64, prediction_time in microseconds,
    boolean_value (null: not known).

    Raises UserError: not_found (exit 2), no_input or schema (exit 4).
    """
    folder = Path(folder)
    place = Place(file=str(folder), field="--task")
    if not folder.is_dir():
        expected = "expected a folder with label files of MEDS"
        raise usage_error("no such folder", expected, **place)
    names = scan_folder(folder, follow_symlinks=True).files
    paths = [folder / name for name in names if name.endswith(".parquet")]
    if not paths:
        expected = "expected label files of MEDS"
        raise input_error(Reason.NO_INPUT, "no .parquet in it", expected, **place)
    columns = [pl.col(name).cast(kind) for name, kind in LABEL_COLUMNS.items()]
    try:
        parts = [pl.read_parquet(path, columns=list(LABEL_COLUMNS), glob=False) for path in paths]
        rows = pl.concat([part.select(columns) for part in parts])
    except (OSError, pl.exceptions.PolarsError) as error:
        raise_system_error(error, folder, stored=False)
        expected = "expected subject_id, prediction_time and boolean_value"
        raise input_error(Reason.SCHEMA, type(error).__name__, expected, **place) from error
    if rows["subject_id"].null_count() or rows["prediction_time"].null_count():
        problem = "a row without subject or time"
        raise input_error(Reason.SCHEMA, problem, "expected both", **place)
    rows = rows.unique(maintain_order=True)
    return rows.sort("subject_id", "prediction_time", maintain_order=True)


def read_id_table(path: str | Path | None) -> pl.DataFrame | None:
    """The table that `ingest --keep-ids` wrote: raw and new, both Int64; None for no path. Raises
    UserError (config, exit 2).
    """
    if path is None:
        return None
    names = ("subject_id", "new")
    expected = "expected the file of ingest --keep-ids, with integer ids as in MEDS"
    table = tables.read_option_table(Path(path), names, "--ids", expected, integers=names)
    return table.select(raw="subject_id", new="new")


def write_task_sequences(
    cache: Cache,
    base: EventSequences,
    task: str | Path,
    out: Path,
    *,
    ids: str | Path | None = None,
    verify: bool = True,
    force_new: bool = False,
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

    Raises:
        UserError: config, settings_differ (exit 2), no_input, schema (4), integrity (5).
    """
    _check_base(cache, base)
    requested, id_table = read_task_labels(task), read_id_table(ids)
    options = {
        **base.options.model_dump(mode="json"),
        "time_to_event": None,
        "cohort": None,
        "task": "multilabel",
        "landmark": None,
        "min_codes": 0,
        "asked": storage.fingerprint([rows.to_physical().to_list() for rows in requested]),
    }
    if (out / manifests.MANIFEST).exists() and not force_new:
        stored = manifests.read_manifest(out)
        if stored.get("options") != options or stored.get("base") != base.fingerprint:
            raise usage_error(
                "was made from other labels or codes",
                "expected the same",
                "Give another --name, or --force-new",
                code=Reason.SETTINGS_DIFFER,
                file=str(out),
            )
        open_manifest(out, SequenceManifest, verify)
        return
    if verify:
        cache.manifest.check_files(cache.folder)
    rows = requested.with_columns(raw="subject_id")
    if id_table is not None:
        rows = rows.join(id_table, on="raw", how="left", maintain_order="left")
        rows = rows.with_columns(subject_id="new")
    subjects = cache.cohort()["subject_id"].implode()
    is_absent = pl.col("subject_id").is_null() | ~pl.col("subject_id").is_in(subjects)
    absent = rows.filter(is_absent)["raw"].n_unique()
    storage.make_folder(out)
    with locks.lock_folder(out):
        storage.remove_temporary_files(out)
        _write_task(cache, base, rows, out, options, absent)


def _check_base(cache: Cache, base: EventSequences) -> None:
    """Raises UserError (config, exit 2) for a cache without true dates, and for sequences of
    another cache or with a split of their own.
    """
    if cache.events_manifest.clock != "calendar":
        raise usage_error(
            "the cache has no true dates",
            "prediction times are dates",
            "Ingest again with --keep-dates",
            file=str(cache.folder),
            field="--task",
        )
    problem = "was made with --split-file" if base.options.split_file else ""
    if base.manifest.cache != cache.manifest.manifest_sha256:
        problem = "was made from another cache"
    if problem:
        expected = "expected sequences of this cache and its split"
        hint = "Tokenize again without --task"
        raise usage_error(problem, expected, hint, file=str(base.folder), field="--task")


def _write_task(
    cache: Cache,
    base: EventSequences,
    requested: pl.DataFrame,
    out: Path,
    options: dict[str, Any],
    absent: int,
) -> None:
    """Write all files of the token set.

    `requested`: subject_id (of the cache), prediction_time, boolean_value. `absent`: subjects of
    the labels that the cache does not have.
    """
    resolved = SequenceOptions(**options)
    plan = sequence_plan.SequencePlan(
        cache=cache,
        preset=resolved.preset,
        choices=sequence_plan.read_choices(resolved),
        fitted=code_values.load_values(base.folder),
    )
    selection = CodeSelection(
        phecodes=list(base.vocabulary[len(SPECIAL) :]), ratios={}, max_attainable={}
    )
    requested = requested.select(
        "subject_id",
        "prediction_time",
        pl.col("boolean_value").cast(pl.Int8).alias(f"y_{out.name}"),
        index_day=pl.col("prediction_time").dt.epoch("us") // DAY - 1,
    )
    build = partial(_build_task_shard, requested, plan.choices, selection, out.name)
    files: dict[str, StoredFile] = {}
    parts: list[pl.DataFrame] = []
    frames = ShardMap(plan, load_subjects(plan)).apply(build)
    for done, frame in enumerate(frames, 1):
        if frame.height:
            files |= write_shard(out, len(files), frame)
            parts.append(frame.select("codes"))
        report_progress("sequences", done, len(cache.events_manifest.shards))
    if not parts:
        raise input_error(
            Reason.NO_INPUT,
            "no subject of the labels is in the cache",
            "expected some",
            "Give --ids of the ingest",
        )
    codes = pl.concat(parts)["codes"]
    statistics = PredictionStatistics(
        rows=len(codes),
        without_codes=int((codes.list.first() == sequence_builder.UNKNOWN).sum()),
        not_in_cache=absent,
        events=int(codes.list.len().sum()),
    )
    manifest = SequenceManifest(
        cache=base.manifest.cache,
        base=base.fingerprint,
        options=resolved,
        class_names=[out.name],
        notices=_list_notices(statistics),
        findings=list(map(FindingRecord.from_finding, _list_findings(absent))),
        shards=[],
        events=statistics.events,
    )
    publish_sequences(
        out,
        manifest,
        shards=files,
        vocabulary=pl.read_parquet(base.folder / "vocab.parquet", glob=False),
        ratios=pl.read_parquet(base.folder / "ratios.parquet", glob=False),
        values=plan.fitted,
        statistics=statistics,
    )


def _list_notices(statistics: PredictionStatistics) -> list[str]:
    n_silent = statistics.without_codes
    text = (
        f"{n_silent:,} of {statistics.rows:,} rows have no known code before their prediction "
        "time: their input is [UNK]."
    )
    return [text] if n_silent else []


def _list_findings(absent: int) -> list[Finding]:
    text, effect = f"the cache lacks {absent} subjects of the labels", "they get no prediction"
    return [input_warning(Reason.IDENTIFIER, text, effect, count=absent)] if absent else []


def _build_task_shard(
    requested: pl.DataFrame,
    choices: SequenceChoices,
    selection: CodeSelection,
    name: str,
    shard: ClaimsShard,
) -> pl.DataFrame:
    """The stored form of the sequences of one shard, one per requested prediction time."""
    cohort = (
        shard.cohort.drop("index_day", strict=False)
        .with_row_index("subject")
        .with_columns(pl.col("subject").cast(pl.Int32))
        .join(requested, on="subject_id", how="inner", maintain_order="left")
    )
    numbers = cohort.select("subject", number=pl.int_range(pl.len(), dtype=pl.Int32))
    rows = shard.rows.join(numbers, on="subject", how="inner", maintain_order="left")
    rows = rows.with_columns(subject="number").drop("number")
    built = steps.build_shard(replace(shard, rows=rows, cohort=cohort), choices, selection)
    table = sequence_builder.to_frame(built, cohort, [name]).with_columns(
        prediction_time=cohort["prediction_time"].gather(built.subjects)
    )
    columns = ("subject_id", "split", f"y_{name}", "prediction_time")
    table = sequence_builder.add_silent_subjects(table, cohort, built.subjects, columns)
    return table.sort("subject_id", "prediction_time", maintain_order=True)


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
        [
            pl.read_parquet(shard, columns=["subject_id", "prediction_time", y], glob=False)
            for shard in shards
        ]
    )[sequences.rows]
    if (id_table := read_id_table(ids)) is not None:
        frame = frame.join(
            id_table, left_on="subject_id", right_on="new", how="left", maintain_order="left"
        ).with_columns(subject_id="raw")
        if frame["subject_id"].null_count():
            problem = "misses subjects of these sequences"
            expected = "expected that of their ingest"
            raise usage_error(problem, expected, file=str(ids), field="--ids")
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
