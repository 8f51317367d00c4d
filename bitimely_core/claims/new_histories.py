"""Histories of new people as a run reads them: with its vocabulary, code map and choices, up to an
index day, and what of them it does not understand.

Nobody is left out: a person without any known code has the single code [UNK], as in
`tasks.write_task_sequences`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from bitimely_core.cache import Cache, ingest, open_cache
from bitimely_core.claims import (
    dates,
    event_labels,
    event_tokens,
    prevalence,
    sequence_builder,
    sequence_plan,
    steps,
)
from bitimely_core.claims.claims_reading import ClaimsOptions
from bitimely_core.claims.disclosure import is_open_source
from bitimely_core.claims.label_rules import SOURCES, LabelRule, parse_rules
from bitimely_core.claims.prevalence import CodeSelection
from bitimely_core.claims.sequence_plan import SequencePlan
from bitimely_core.claims.shard_map import ShardMap, load_subjects
from bitimely_core.claims.sources import recognize_layout
from bitimely_core.claims.sources.claims import SUBJECT_NAMES
from bitimely_core.claims.sources.columns import find_names
from bitimely_core.claims.steps import ClaimsShard
from bitimely_core.errors import usage_error
from bitimely_core.formats.source import scan_folder
from bitimely_core.formats.text import ENCODING
from bitimely_core.registry import Choices
from bitimely_core.schemas.ingest_records import EventsManifest, IngestReport
from bitimely_core.schemas.tokens import (
    HistoryPreparation,
    PredictionStatistics,
    SequenceManifest,
    SequenceOptions,
)
from bitimely_core.store import manifests
from bitimely_core.store.records import StoredFile
from bitimely_core.store.storage import fingerprint, make_folder
from bitimely_core.tokens.sequences import (
    HISTORIES,
    MONTH,
    SPECIAL,
    EventSequences,
    NewHistories,
    open_sequences,
    publish_sequences,
    write_shard,
)
from bitimely_core.tokens.splits import EXTERNAL
from bitimely_core.types import find_only

DATASET = "pophr"  # which reads all layouts of claims
UNSTATED = ("claims", "meds")  # layouts whose tables may state no kind of claims
# options of the ingest of the training that hold for other files of the same layout
READING = (
    "admitting",
    "code_pattern",
    "col",
    "date_format",
    "default_source",
    "icd10_from",
    "pad_undotted",
    "source_value",
    "source_vocab",
)
# and those that hold for all, where the layout has such codes or times
CODING = ("codes", "time_unit", "sex_restrictions")
AS_TRAINED, LONG, LEFT, FEW, SILENT, ABSENT_SO_FAR, DEAD, HAD, DOUBTFUL = (
    "as in the training",
    "a longer history than in the training",
    "left the observation before the index day",
    "fewer codes than in the training",
    "no known code",
    "no row up to the index day",
    "died before the index day",
    "had the outcome by the index day",
    "may have had the outcome by the index day (age or kind of claims unknown)",
)
UNMAPPED = "no PheCode in the map of the run"
ABSENT = "not in the vocabulary of the run"


class BuiltHistories(NamedTuple):
    """Histories of new people, row by row, and the codes that are not understood; fields as of
    `NewHistories`.
    """

    sequences: EventSequences
    people: pl.DataFrame
    unknown: pl.DataFrame
    manifest: EventsManifest


def read_subjects(
    source: str | Path | pl.DataFrame,
    run: Path,
    prepared: HistoryPreparation,
    home: Path,
    *,
    as_of: str | None,
    options: Choices,
) -> NewHistories:
    """The histories of the people in a folder of claims, in a cache or in a table, as the run in
    the folder `run` reads them; what is made for it stands in `home`.

    `as_of`: as `build_new_histories`; `options`: as `ingest_new_subjects`. Raises UserError: as
    both.
    """
    table = source if isinstance(source, pl.DataFrame) else None
    if isinstance(source, pl.DataFrame):
        folder = make_folder(home / "table")
        source.write_parquet(folder / "claims.parquet")
        options = {**options, "keep_ids": str(home / "ids.csv")}
    else:
        folder = Path(source)
    cache, report = folder, None
    if not (folder / manifests.MANIFEST).is_file():
        cache, account = ingest_new_subjects(folder, run, home / "workspace", options)
        report = IngestReport.parse(account, Path("ingest_report.json"))
    made = build_new_histories(cache, prepared, home / "sequences", as_of)
    return NewHistories(
        sequences=made.sequences,
        people=_mark_ends(made.people, open_cache(cache, verify=False), made.manifest.data_end),
        unknown=made.unknown,
        dated=made.manifest.clock == "calendar",
        exact=is_open_source(made.manifest.dataset, made.manifest.settings.options.get("source")),
        report=report,
        ids=None if table is None else _read_ids(home / "ids.csv", table, options),
    )


def _read_ids(path: Path, table: pl.DataFrame, options: Choices) -> pl.DataFrame:
    """Raw ids, in the type that the table has, and new ones: the table of `--keep-ids`."""
    stated = dict(text.split("=", 1) for text in options.get("col") or ())
    name = stated.get("subject") or find_names(table.columns, SUBJECT_NAMES)[0]
    ids = pl.read_csv(path, schema_overrides={"subject_id": pl.String})
    return ids.select(pl.col("subject_id").cast(table[name].dtype).alias("raw"), "new")


def ingest_new_subjects(
    source: Path, run: Path, home: Path, options: Choices
) -> tuple[Path, Choices]:
    """Read a folder (or a file) of claims into a cache in `home` by the code map and the reading
    options of the run in the folder `run`; `options` replace these.

    Returns the cache and the report of its ingest. Raises UserError: as `cache.ingest`.
    """
    folder = source
    if source.is_file():
        folder = make_folder(home / "source")
        (folder / source.name).symlink_to(source.resolve())
    prepared = sequence_plan.load_preparation(run)
    layout = options.get("source") or recognize_layout(scan_folder(folder, follow_symlinks=True))
    reading = prepared.reading
    chosen = {"source": layout or ClaimsOptions.source, "rules": "none", "for_cohort": True}
    if chosen["source"] in UNSTATED:
        chosen["default_source"] = reading.get("default_source") or find_only(prepared.kinds, "")
    if chosen["source"] == reading.get("source"):
        chosen |= {name: reading[name] for name in READING if name in reading}
    chosen |= {name: reading[name] for name in CODING if name in reading}
    chosen |= {"phecode_map": (str(run / HISTORIES),), **options}
    cache = home / "cache" / DATASET
    report = ingest(
        DATASET,
        folder,
        cache,
        options=chosen,
        keep_dates=True,
        follow_symlinks=True,
        encoding=ENCODING.get(),
    )
    return cache, report


def build_new_histories(
    cache: Path, prepared: HistoryPreparation, out: Path, as_of: str | None = None
) -> BuiltHistories:
    """The histories of all subjects of a cache up to their index days, written to `out`.

    The index day is `as_of` (YYYY-MM-DD); else that of the source; else, for a run whose training
    had index days, the last day of the data (in a cache without dates the end of each
    observation). Other runs read complete histories.

    Raises UserError: config (exit 2) for a date that is none, or in a cache without dates.
    """
    opened = open_cache(cache, verify=False)
    plan = _make_plan(opened, prepared)
    subjects = _set_index_days(plan, load_subjects(plan), as_of)
    shards = ShardMap(plan, subjects)
    surveys = list(shards.apply(partial(_survey_shard, plan)))
    carried = set[str]().union(*(phecodes for phecodes, _ in surveys))
    selection = prevalence.fix_codes(prepared.vocabulary, carried, plan.choices)
    kinds = frozenset[str]().union(*(kinds for _, kinds in surveys))
    rules = list(_widen_rules(prepared, kinds))
    files: dict[str, StoredFile] = {}
    people, unknown = list[pl.DataFrame](), list[pl.DataFrame]()
    make_folder(out)
    for frame, of_people, of_codes in shards.apply(partial(_build_shard, plan, selection, rules)):
        files |= write_shard(out, len(files), frame)
        people.append(of_people)
        unknown.append(of_codes)
    _publish(plan, out, files, pl.concat(people))
    counts = pl.concat(unknown).group_by("code", "reason").agg(pl.sum("rows", "people"))
    counts = counts.sort("people", "rows", "code", descending=[True, True, False])
    return BuiltHistories(
        open_sequences(out, verify=False), pl.concat(people), counts, plan.manifest
    )


def _make_plan(cache: Cache, prepared: HistoryPreparation) -> SequencePlan:
    choices = sequence_plan.read_choices(prepared.options)
    return SequencePlan(
        cache=cache,
        preset=prepared.options.preset,
        choices=replace(choices, landmark=None, time_to_event=None, min_codes=0),
        prepared=prepared,
        fitted=sequence_plan.load_fitted(prepared),
    )


def _set_index_days(plan: SequencePlan, subjects: pl.DataFrame, as_of: str | None) -> pl.DataFrame:
    """The subjects with the index day of each, without the column where histories are complete."""
    dated, last = plan.manifest.clock == "calendar", plan.manifest.data_end
    assert plan.prepared is not None
    if as_of is not None:
        day = dates.parse_day(as_of)
        if day is None:
            raise usage_error(f"found {as_of!r}", "expected YYYY-MM-DD", field="--as-of")
        if not dated:
            raise usage_error(
                "the cache has no true dates",
                "an index day is a date",
                "Ingest again with --keep-dates, or give the raw folder",
                field="--as-of",
            )
        return subjects.with_columns(index_day=pl.lit(day, pl.Int64))
    if "index_day" in subjects.columns or not plan.prepared.indexed:
        return subjects
    end = pl.lit(last) if dated else pl.col("obs_end")
    return subjects.with_columns(index_day=end.cast(pl.Int64))


def _survey_shard(plan: SequencePlan, shard: ClaimsShard) -> tuple[set[str], set[str]]:
    """The rolled-up PheCodes of the codes of a shard, and the kinds of its claims."""
    phecodes = set[str]().union(*steps.roll_up_codes(shard, plan.choices))
    return phecodes, {SOURCES[kind] for kind in shard.rows["source"].unique()}


class OutcomeRule(NamedTuple):
    """The rule of an outcome, and what may be it where kinds of claims of the training are absent:
    claims of all kinds count for the clauses that need these.
    """

    rule: LabelRule
    wide: LabelRule


def _widen_rules(prepared: HistoryPreparation, kinds: frozenset[str]) -> Iterator[OutcomeRule]:
    """The rules of the run; `kinds`: of the claims of the new people."""
    any_kind = {"sources": frozenset(SOURCES)}
    for rule in parse_rules(prepared.first_outcomes):
        clauses = tuple(
            clause.model_copy(update=any_kind)
            if clause.sources.isdisjoint(kinds) and not clause.sources.isdisjoint(prepared.kinds)
            else clause
            for clause in rule.clauses
        )
        yield OutcomeRule(rule, rule.model_copy(update={"clauses": clauses}))


def _build_shard(
    plan: SequencePlan, selection: CodeSelection, rules: Sequence[OutcomeRule], shard: ClaimsShard
) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """The sequences of a shard, a row a subject; `NewHistories.people` and `.unknown` of it."""
    assert plan.prepared is not None
    built = steps.build_shard(shard, plan.choices, selection)
    frame = sequence_builder.to_frame(built, shard.cohort, ())
    if not plan.prepared.indexed:
        frame = frame.with_columns(t_index=pl.lit(None, pl.Float32))
    frame = sequence_builder.add_silent_subjects(
        frame, shard.cohort, built.subjects, ["subject_id"]
    )
    frame = frame.with_columns(split=pl.lit("test")).sort("subject_id")
    rows, unknown = _judge_rows(plan, shard, set(selection.phecodes))
    people = shard.cohort.select(
        "subject_id",
        pl.col("index_day")
        if "index_day" in shard.cohort.columns
        else pl.lit(None, pl.Int64).alias("index_day"),
        *_find_outcomes(shard, rules),
    ).with_columns(starmap(pl.Series, rows.items()))
    is_known = pl.element() != sequence_builder.UNKNOWN
    understood = frame["codes"].list.eval(pl.element().filter(is_known))
    people = people.sort("subject_id").with_columns(events=understood.list.len())
    amount = {"events": pl.col("events"), "records": pl.col("rows") - pl.col("unknown_rows")}
    trained = sequence_plan.read_choices(plan.prepared.options)
    enough = amount.get(trained.min_codes_unit, pl.lit(understood.list.n_unique()))
    longest = (trained.landmark and trained.landmark.landmark_days) or np.inf
    is_long = frame["t_index"] > (longest + 0.5) / MONTH  # float32 is exact to less than a day
    length = pl.when(is_long).then(pl.lit(LONG)).otherwise(pl.lit(AS_TRAINED))
    enough = pl.when(enough < trained.min_codes).then(pl.lit(FEW)).otherwise(length)
    silent = pl.when(pl.col("rows") == 0).then(pl.lit(ABSENT_SO_FAR)).otherwise(pl.lit(SILENT))
    status = pl.when(pl.col("events") == 0).then(silent).otherwise(enough)
    had_all = pl.col("had").list.len() >= max(1, len(plan.prepared.class_names))
    outcome = pl.when("doubtful").then(pl.lit(DOUBTFUL)).otherwise(pl.lit(HAD))
    status = pl.when(had_all).then(outcome).otherwise(status)
    return frame, people.with_columns(status=status).drop("doubtful"), unknown


def _find_outcomes(shard: ClaimsShard, rules: Sequence[OutcomeRule]) -> list[pl.Series]:
    """`had`: of each subject the names of the rules that its rows up to the index day fulfil, or
    may; `doubtful`: whether it only may fulfil them, for its age or kinds of claims are unknown.
    """
    labels = [
        event_labels.add_onsets(shard.input_rows, shard.codes, chosen, shard.cohort)
        for chosen in ([pair.rule for pair in rules], [pair.wide for pair in rules])
    ]
    names: list[list[str]] = [[] for _ in range(shard.cohort.height)]
    doubtful = pl.repeat(value=False, n=shard.cohort.height, dtype=pl.Boolean, eager=True)
    for rule, _ in rules:
        is_sure, may_be = (met[f"y_{rule.name}"].ne_missing(0) for met in labels)
        is_sure &= labels[0][f"y_{rule.name}"].is_not_null()
        for i in may_be.arg_true():
            names[i].append(rule.name)
        doubtful |= may_be & ~is_sure
    return [pl.Series("had", names, pl.List(pl.String)), doubtful.alias("doubtful")]


def _judge_rows(
    plan: SequencePlan, shard: ClaimsShard, vocabulary: set[str]
) -> tuple[dict[str, np.ndarray], pl.DataFrame]:
    """Of each subject its rows up to the index day and those that are not understood; and the codes
    of these (code, reason, rows, people).

    Codes that the leakage policy of the run leaves out are understood.
    """
    rows, n = shard.input_rows, shard.cohort.height
    rolled = steps.roll_up_codes(shard, plan.choices)
    reasons = [
        UNMAPPED if not code.phecodes else ABSENT if read and not read & vocabulary else None
        for code, read in zip(shard.codes, rolled, strict=True)
    ]
    reason = pl.Series(reasons, dtype=pl.String)
    texts = pl.Series([code.text for code in shard.codes], dtype=pl.String)
    unknown = rows.select(
        "subject", code=texts.gather(rows["code"]), reason=reason.gather(rows["code"])
    ).drop_nulls("reason")
    amounts = {
        name: np.bincount(part["subject"].to_numpy(), minlength=n)
        for name, part in (("rows", rows), ("unknown_rows", unknown))
    }
    counted = unknown.group_by("code", "reason").agg(
        rows=pl.len().cast(pl.Int64), people=pl.col("subject").n_unique().cast(pl.Int64)
    )
    return amounts, counted


def _publish(
    plan: SequencePlan, out: Path, files: dict[str, StoredFile], people: pl.DataFrame
) -> None:
    """Write the manifest of the sequences and what belongs to them."""
    prepared = plan.prepared
    assert prepared is not None
    options: dict[str, Any] = {**prepared.options.model_dump(mode="json"), "task": "none"}
    options |= {"time_to_event": None, "landmark": None, "cohort": None}
    options |= {"split": EXTERNAL}
    size = len(SPECIAL) + len(prepared.vocabulary)
    statistics = PredictionStatistics(
        rows=people.height,
        without_codes=int((people["events"] == 0).sum()),
        not_in_cache=0,
        events=int(people["events"].sum()),
    )
    manifest = SequenceManifest(
        cache=plan.manifest.manifest_sha256,
        base=fingerprint(prepared.to_json()),
        options=SequenceOptions(**options),
        class_names=[],
        notices=[],
        findings=[],
        shards=[],
        events=statistics.events,
    )
    publish_sequences(
        out,
        manifest,
        shards=files,
        vocabulary=event_tokens.make_vocabulary(prepared, np.zeros((2, size), np.int64)),
        ratios=pl.DataFrame(),
        statistics=statistics,
        values=plan.fitted,
    )


def _mark_ends(people: pl.DataFrame, cache: Cache, data_end: int | None) -> pl.DataFrame:
    """The people with `died`, and the status of those who died, or whose observation ended, before
    their index day; one after the last day of the data is that day.
    """
    ends = cache.cohort(("subject_id", "death_day", "obs_end"))
    marked = people.join(ends, on="subject_id", how="left", maintain_order="left")
    last = pl.min_horizontal("index_day", pl.lit(data_end, pl.Int64))
    has_left = (pl.col("obs_end") < last) & pl.col("status").is_in([AS_TRAINED, LONG])
    died = (pl.col("death_day") < pl.col("index_day")).fill_null(value=False)
    ended = pl.when(died).then(pl.lit(DEAD)).when(has_left).then(pl.lit(LEFT))
    marked = marked.with_columns(died.alias("died"), status=ended.otherwise("status"))
    return marked.drop("death_day", "obs_end")
