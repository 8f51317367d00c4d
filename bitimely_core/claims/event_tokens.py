"""Cached claims to code sequences: the two passes of the builder over the shards of the cache, and
statistics to judge the sequences by.

Leakage policy, landmark, selection, clock and minimum codes are chosen here, so other choices need
no second ingest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from bitimely_core.cache import Cache
from bitimely_core.claims import (
    build_findings,
    code_values,
    codes,
    cohorts,
    event_times,
    prevalence,
    sequence_builder,
    shortcut_baselines,
    steps,
)
from bitimely_core.claims.cohorts import CohortRules
from bitimely_core.claims.label_rules import RuleTable
from bitimely_core.claims.prevalence import CodeCounts, CodeSelection
from bitimely_core.claims.sequence_plan import SequencePlan
from bitimely_core.claims.shard_map import ShardMap, load_subjects
from bitimely_core.claims.shortcut_baselines import Prevalence, ShortcutTally
from bitimely_core.claims.steps import ClaimsShard
from bitimely_core.errors import Reason, input_error, raise_differences, usage_error
from bitimely_core.progress import report_progress
from bitimely_core.registry import Choices
from bitimely_core.schemas.ingest_records import CodeMap, FindingRecord
from bitimely_core.schemas.tokens import (
    CohortFlow,
    FlowStep,
    HistoryPreparation,
    SequenceFunnel,
    SequenceLengths,
    SequenceManifest,
    SequenceOptions,
    SequenceStatistics,
)
from bitimely_core.store import locks, manifests, storage
from bitimely_core.store.records import StoredFile
from bitimely_core.tokens.sequences import SPECIAL, publish_sequences, write_shard

# at most so many sequences of a shard, and in total, give the median gap
SAMPLED_SEQUENCES = 2000, 16_000
SMALL_SUPPORT = 20  # carriers among the cases below which a selected code is reported
# what else a user may choose where the selection by default keeps little
ALTERNATIVES: dict[str, Choices] = {
    "--no-select": {"select": False},
    "--min-codes 1": {"min_codes": 1},
}
OTHER_COHORT = (
    "Give another definition with --cohort (diabetes-codes needs only codes and dates), or other "
    "data"
)
LEAST_SHARE, LEAST_CODES = 0.05, 10  # of the subjects; PheCodes
VOCABULARY: Choices = {
    "id": pl.Int32,
    **dict.fromkeys(("code", "name", "category"), pl.String),
    **dict.fromkeys(("n_subjects_train", "n_events_train"), pl.Int64),
}
RATIOS: Choices = {
    **dict.fromkeys(("target", "code"), pl.String),
    **dict.fromkeys(("ratio", "lo", "hi"), pl.Float64),
    **dict.fromkeys(("n_case_with", "n_case", "n_ref_with", "n_ref"), pl.Int64),
    "selected": pl.Boolean,
}


def write_sequences(
    plan: SequencePlan, out: Path, *, verify: bool = True, force_new: bool = False
) -> None:
    """Write the sequences of a plan in `out` without opening them, so that they need not fit into
    memory; existing ones of the same choices stay.

    Raises UserError: settings_differ (exit 2), no_input (exit 4) when no subject is left, integrity
    (exit 5).
    """
    if force_new or not _is_current(plan, out):
        if verify:
            plan.manifest.check_files(plan.cache.folder)
        storage.make_folder(out)
        with locks.lock_folder(out):
            if force_new or not _is_current(plan, out):
                storage.remove_temporary_files(out)
                _write_plan(plan, out)
                return
    storage.remove_temporary_files(out)
    if verify:
        SequenceManifest.read(out).check_files(out)


def _is_current(plan: SequencePlan, out: Path) -> bool:
    """Whether `out` holds the sequences of the plan. Raises UserError (settings_differ, exit 2)
    when it holds others.
    """
    if not (out / manifests.MANIFEST).exists():
        return False
    stored = manifests.read_manifest(out)
    before = stored.get("options", {}) | {"cache": stored.get("cache")}
    now = json.loads(storage.encode_json(plan.options | {"cache": plan.manifest.manifest_sha256}))
    hint = "Give the same choices, another --name, or --force-new"
    raise_differences(before, now, out / manifests.MANIFEST, hint)
    return True


def _write_plan(plan: SequencePlan, out: Path) -> None:
    manifest = plan.manifest
    members = select_members(plan)
    plan = _fit_numbers(ShardMap(members.plan, members.subjects))
    shards = ShardMap(plan, members.subjects)
    counts, before = _count_shards(shards)
    selection = _select_codes(plan, counts)
    built = _build_shards(shards, selection, out)
    lengths, gaps = built.lengths, built.gaps.astype(np.float64)
    if plan.by_default and _keeps_little(plan, selection, len(lengths)):
        _refuse_little(shards, counts, selection, built, out)
    if not len(lengths):
        needed = f"{plan.choices.min_codes} {plan.choices.min_codes_unit} are needed"
        raise input_error(
            Reason.NO_INPUT,
            "no subject has a sequence",
            f"{len(selection.phecodes)} PheCodes are selected, {needed}",
            "Lower --min-codes" + (", or give --no-select" if plan.choices.select else ""),
            file=str(plan.cache.folder),
        )
    statistics = SequenceStatistics(
        funnel=SequenceFunnel(
            **manifest.funnel.model_dump(exclude={"subjects"}),
            subjects_in=manifest.funnel.subjects or 0,
            subjects_out=len(lengths),
            events=int(lengths.sum()),
            no_birth=built.no_birth,
        ),
        sequences=SequenceLengths(
            n=len(lengths),
            median_length=float(np.median(lengths)),
            longest=int(lengths.max()),
            median_positive_gap=float(np.median(gaps)) if len(gaps) else None,
        ),
        prevalence={"before": before, "after": built.prevalence},
        **_describe_selection(plan, selection, built.tally),
        agreement=manifest.agreement if plan.cohort is None else [],
        unmapped=manifest.unmapped,
        cohort=members.flow,
    )
    preparation = _describe_preparation(plan, selection)
    tables = build_findings.find_label_tables(plan)
    findings = build_findings.list_findings(statistics, plan.judged, tables=tables)
    publish_sequences(
        out,
        SequenceManifest(
            cache=manifest.manifest_sha256,
            options=SequenceOptions.model_validate(plan.options),
            class_names=plan.names,
            notices=build_findings.list_notices(plan),
            findings=list(map(FindingRecord.from_finding, findings)),
            shards=[],
            events=statistics.funnel.events,
        ),
        shards=built.files,
        vocabulary=make_vocabulary(preparation, built.usage),
        ratios=_make_ratio_table(selection),
        statistics=statistics,
        preparation=preparation,
        cohort=members.record,
        values=plan.fitted,
    )


# ---- the subjects


def _refuse_empty_cohort(rules: CohortRules, flow: CohortFlow) -> None:
    """Raises UserError: no_input for a cohort without a member, class_missing without a case."""
    last = flow.steps[-1].left if flow.steps else flow.subjects
    if not last:
        reasons = sorted(flow.steps, key=lambda step: -step.left_out)
        texts = [f"{step.left_out} subjects {step.text}" for step in reasons if step.left_out]
        raise input_error(
            Reason.NO_INPUT,
            f"0 of {flow.subjects} subjects belong to the cohort {rules.name}",
            f"left out are {'; '.join(texts)}" if texts else "",
            OTHER_COHORT,
        )
    if not flow.cases:
        raise input_error(
            Reason.CLASS_MISSING,
            f"0 of {last} subjects of the cohort {rules.name} have its outcome",
            f"expected some with {rules.outcome.rule}",
            OTHER_COHORT,
        )


class Members(NamedTuple):
    """Whose sequences are built."""

    plan: SequencePlan  # with a cohort also the PheCodes that the data have for its outcome
    # with a cohort also index day and outcome, null for those left out; None: executors of Spark
    # read them
    subjects: pl.DataFrame | None
    record: pl.DataFrame | None = None  # of all subjects, with a cohort
    flow: CohortFlow | None = None  # how its members were chosen


def select_members(plan: SequencePlan) -> Members:
    """The subjects of a plan; with a cohort its members.

    Raises UserError: config (exit 2) for a cohort where the source gives index days; no_input or
    class_missing (exit 4) for one without members or cases.
    """
    if (rules := plan.cohort) is None:
        return Members(plan, None if plan.engine == "spark" else load_subjects(plan))
    subjects = load_subjects(plan)
    if "index_day" in subjects.columns:
        raise usage_error(
            "the source gives index days itself",
            "expected none",
            "Ingest without index_date",
            field="--cohort",
        )
    parts, defining = list[pl.DataFrame](), set[str]()
    apply = partial(_apply_cohort, rules, plan.manifest.data_end)
    for part, phecodes in ShardMap(plan, subjects).apply(apply):
        parts.append(part)
        defining |= phecodes
    record = cohorts.match_controls(rules, pl.concat(parts).sort("subject_id"))
    flow = _describe_flow(rules, record)
    _refuse_empty_cohort(rules, flow)
    name, day = rules.outcome.rule, record["outcome_day"]
    left_out = record["left_out"].is_not_null()
    subjects = subjects.with_columns(
        record["index_day"].set(left_out, None),
        day.is_not_null().cast(pl.Int8).set(left_out, None).alias(f"y_{name}"),
        day.cast(pl.Int32).set(left_out, None).alias(f"onset_{name}"),
    )
    if plan.choices.time_to_event:
        subjects = event_times.add_record_times(subjects, record, name)
    plan = replace(plan, defining=frozenset(defining))
    return Members(plan, subjects, record, flow)


def _apply_cohort(
    rules: CohortRules, data_end: int | None, shard: ClaimsShard
) -> tuple[pl.DataFrame, set[str]]:
    """The record of a shard's subjects, and the PheCodes of the codes of the outcome."""
    record = cohorts.apply_cohort(rules, shard.rows, shard.codes, shard.cohort, data_end)
    outcome = filter(rules.outcome_rule.matches, shard.codes)
    return record, set[str]().union(*(code.phecodes for code in outcome))


def _describe_flow(rules: CohortRules, record: pl.DataFrame) -> CohortFlow:
    remaining, texts = record.height, cohorts.describe_reasons(rules)
    counts = dict(record["left_out"].drop_nulls().value_counts().iter_rows())
    steps = []
    for reason in cohorts.list_reasons(rules):
        n = counts.get(reason, 0)
        remaining -= n
        steps.append(FlowStep(reason=reason, text=texts[reason], left_out=n, left=remaining))
    cases = record.filter(pl.col("left_out").is_null())["outcome_day"].count()
    return CohortFlow(
        title=rules.title or rules.name,
        kind=rules.outcome.kind,
        subjects=record.height,
        steps=steps,
        cases=cases,
    )


# ---- pass 1


def _fit_numbers(shards: ShardMap) -> SequencePlan:
    """The plan with the cut points and moments of numbers, if it reads them."""
    plan = shards.plan
    if plan.choices.values == "none" or plan.prepared is not None:
        return plan
    return replace(
        plan, fitted=code_values.fit_values(shards.apply(code_values.count_values), plan.floor)
    )


def _count_shards(shards: ShardMap) -> tuple[CodeCounts, Prevalence]:
    """Counts for the selection, and prevalence before the filters."""
    total, counts, before = len(shards.plan.manifest.shards), CodeCounts(), list[Prevalence]()
    for shard_counts, prevalence_before in shards.apply(partial(_count_shard, shards.plan)):
        counts += shard_counts
        before.append(prevalence_before)
        report_progress("count codes", len(before), total)
    return counts, shortcut_baselines.add_prevalence(before)


def _count_shard(plan: SequencePlan, shard: ClaimsShard) -> tuple[CodeCounts, Prevalence]:
    before = shortcut_baselines.count_prevalence(shard.cohort, plan.names)
    return steps.count_shard(shard, plan.choices), before


def _select_codes(plan: SequencePlan, counts: CodeCounts) -> CodeSelection:
    if plan.prepared is not None:
        return prevalence.fix_codes(plan.prepared.vocabulary, counts.carriers, plan.choices)
    exempt = () if plan.fitted is None else frozenset(code_values.list_deciles(plan.fitted))
    return prevalence.select_codes(counts, plan.names, plan.choices, plan.floor, exempt)


# ---- pass 2


class BuiltSequences(NamedTuple):
    """The sequences of a shard, or of several: they are on the disk, their events not here."""

    files: dict[str, StoredFile]  # one a shard, none without any sequence
    no_birth: int
    gaps: np.ndarray  # months, of a sample
    lengths: np.ndarray
    prevalence: Prevalence
    usage: np.ndarray  # [2, ids] training subjects with each id, and their events
    tally: ShortcutTally


def _build_shards(shards: ShardMap, selection: CodeSelection, out: Path) -> BuiltSequences:
    """Write the sequences of all shards."""
    plan, built = shards.plan, None
    build = partial(_build_shard, plan, selection, out.resolve())
    for done, shard in enumerate(shards.apply(build), 1):
        built = shard if built is None else _add_built(built, shard)
        report_progress("sequences", done, len(plan.manifest.shards))
    assert built is not None
    return built._replace(files=_number_files(out, built.files))


def _add_built(built: BuiltSequences, shard: BuiltSequences) -> BuiltSequences:
    """The sequences of some shards and of another one."""
    return BuiltSequences(
        files=built.files | shard.files,
        no_birth=built.no_birth + shard.no_birth,
        gaps=np.concatenate([built.gaps, shard.gaps]),
        lengths=np.concatenate([built.lengths, shard.lengths]),
        prevalence=shortcut_baselines.add_prevalence([built.prevalence, shard.prevalence]),
        usage=built.usage + shard.usage,
        tally=shortcut_baselines.merge_tallies([built.tally, shard.tally]),
    )


def _build_shard(
    plan: SequencePlan, selection: CodeSelection, out: Path, shard: ClaimsShard
) -> BuiltSequences:
    """Write the sequences of a shard."""
    names, size = plan.names, len(SPECIAL) + len(selection.phecodes)
    built = steps.build_shard(shard, plan.choices, selection)
    frame = sequence_builder.to_frame(built, shard.cohort, names)
    of_shard, in_all = SAMPLED_SEQUENCES
    sampled = max(1, min(of_shard, in_all // len(plan.manifest.shards)))
    gaps = frame["times"].head(sampled).list.diff(null_behavior="drop").explode().drop_nulls()
    members = shard.cohort[built.subjects]
    labels = {name: members[f"y_{name}"].fill_null(-1).to_numpy() for name in names}
    return BuiltSequences(
        files=write_shard(out, shard.number, frame) if frame.height else {},
        no_birth=built.no_birth,
        gaps=gaps.filter(gaps > 0).to_numpy(),
        lengths=frame["codes"].list.len().to_numpy(),
        prevalence=shortcut_baselines.count_prevalence(frame, names),
        usage=sequence_builder.count_usage(built, shard.cohort, size),
        tally=shortcut_baselines.count_shortcuts(
            built.offsets, built.ids, labels, members["split"].to_numpy()
        ),
    )


def _number_files(out: Path, files: Mapping[str, StoredFile]) -> dict[str, StoredFile]:
    """The files, renamed to numbers from 0 on: shards without any sequence are not numbered."""
    renamed = {}
    for number, (name, file) in enumerate(files.items()):
        new_name = re.sub(r"\d+", f"{number:05d}", name, count=1)
        if new_name != name:
            storage.rename(out / name, out / new_name)
        renamed[new_name] = file
    return renamed


def _keeps_little(plan: SequencePlan, selection: CodeSelection, n: int) -> bool:
    """Whether a selection that gives `n` subjects a sequence can hardly be meant."""
    total = plan.manifest.funnel.subjects or 0
    has_few_codes = len(selection.phecodes) < LEAST_CODES and n < total / 2
    return n > 0 and (n < LEAST_SHARE * total or has_few_codes)


def _refuse_little(
    shards: ShardMap, counts: CodeCounts, selection: CodeSelection, built: BuiltSequences, out: Path
) -> None:
    """Raises UserError (min_codes, exit 4), without the files in `out`, where another selection
    keeps more than the one that nobody asked for.
    """
    plan, n_default = shards.plan, len(built.lengths)
    better = []
    for flag, change in ALTERNATIVES.items():
        other = replace(plan, choices=replace(plan.choices, **change))
        wider = _select_codes(other, counts)
        n = sum(shards.apply(partial(_count_sequences, other, wider)))
        if n > n_default:
            n_codes = len(wider.phecodes)
            better.append(f"{flag} keeps {n:,} subjects, with {n_codes} PheCodes")
    if not better:
        return
    for name in built.files:
        storage.remove_file(out / name)
    total = plan.manifest.funnel.subjects or 0
    raise input_error(
        Reason.MIN_CODES,
        f"the default selection keeps {n_default:,} of {total:,} subjects, with "
        f"{len(selection.phecodes)} PheCodes",
        "; ".join(better),
        "Choose one of them, or give --preset paper to keep the selection as it is",
        file=str(plan.cache.folder),
    )


def _count_sequences(plan: SequencePlan, selection: CodeSelection, shard: ClaimsShard) -> int:
    return len(steps.build_shard(shard, plan.choices, selection).subjects)


# ---- tables and statistics


def _describe_preparation(plan: SequencePlan, selection: CodeSelection) -> HistoryPreparation:
    """What turns histories of new people into such sequences."""
    manifest, run = plan.manifest, plan.prepared
    index_days = plan.cache.cohort(("index_day",))
    has_days = "index_day" in index_days.columns and index_days["index_day"].count() > 0
    shared: Choices = {
        "cache": manifest.manifest_sha256,
        "options": SequenceOptions.model_validate(plan.options),
        "class_names": tuple(plan.names),
        "indexed": bool(plan.cohort or plan.choices.landmark or has_days),
        "first_outcomes": _list_first_outcomes(plan),
    }
    if run is not None:
        return run.model_copy(update=shared)
    phecodes = selection.phecodes
    return HistoryPreparation(
        **shared,
        vocabulary=tuple(phecodes),
        names={code: manifest.phenotypes.get(code, "") for code in phecodes},
        categories={code: manifest.categories.get(code, "") for code in phecodes},
        rules=manifest.rules,
        defining=tuple(sorted(plan.rule_phecodes)),
        reading=manifest.settings.options,
        kinds=_list_kinds(plan.cache),
        codemap=CodeMap.load(plan.cache.folder / manifest.codemap),
        values=None if plan.fitted is None else plan.fitted.to_dicts(),
    )


def _list_kinds(cache: Cache) -> tuple[str, ...]:
    """The kinds of claims of a cache."""
    shards = range(len(cache.events_manifest.shards))
    present = {kind for n in shards for kind in cache.shard(n, ("source",))["source"].unique()}
    return tuple(sorted(present))


def _list_first_outcomes(plan: SequencePlan) -> Sequence[RuleTable]:
    """The rules of labels that are not known where they are fulfilled by the index day."""
    if plan.cohort is not None:
        outcome = plan.cohort.outcome
        if outcome.kind != "incident" or not outcome.exclude_prior or outcome.lookback_days:
            return ()
        return (plan.cohort.outcome_rule.model_dump(mode="json", by_alias=True),)
    has_index_days = plan.choices.landmark is not None and plan.manifest.ruled
    return tuple(plan.manifest.rules) if has_index_days else ()


def make_vocabulary(prepared: HistoryPreparation, usage: np.ndarray) -> pl.DataFrame:
    """The table of codes; `usage` [2, ids]: training subjects with each id, and their events."""
    first, phecodes = len(SPECIAL), prepared.vocabulary
    columns = {
        "id": range(first, first + len(phecodes)),
        "code": phecodes,
        "name": [prepared.names.get(code, "") for code in phecodes],
        "category": [prepared.categories.get(code, "") for code in phecodes],
        "n_subjects_train": usage[0, first:],
        "n_events_train": usage[1, first:],
    }
    return pl.DataFrame(columns, schema=VOCABULARY)


def _make_ratio_table(selection: CodeSelection) -> pl.DataFrame:
    rows = []
    for name, ratios in selection.ratios.items():
        for code, ratio in ratios.items():
            ends = ratio.interval or (None, None)
            counts = (ratio.n_case_with, ratio.n_case, ratio.n_ref_with, ratio.n_ref)
            rows.append((name, code, ratio.ratio, *ends, *counts, code in selection.phecodes))
    return pl.DataFrame(rows, schema=RATIOS, orient="row")


def _describe_selection(
    plan: SequencePlan, selection: CodeSelection, tally: ShortcutTally
) -> Choices:
    """The fields of `SequenceStatistics` on selected codes and shortcuts."""
    threshold, own_codes = plan.choices.threshold, _list_own_codes(plan)
    fallback, small = list[str](), set[str]()
    for name, ratios in selection.ratios.items():
        if ratios and max(ratio.ratio for ratio in ratios.values()) <= threshold:
            fallback.append(name)
        for code, ratio in ratios.items():
            if ratio.selected and ratio.n_case_with < SMALL_SUPPORT:
                small.add(code)
    phecodes = dict(enumerate(selection.phecodes, len(SPECIAL)))
    return {
        "leaks": shortcut_baselines.score_shortcuts(tally, phecodes, own_codes),
        "own": own_codes,
        "max_attainable": {
            name: None if bound is None or np.isinf(bound) else bound
            for name, bound in selection.max_attainable.items()
        },
        "threshold": threshold,
        "fallback": fallback,
        "selected": len(selection.phecodes),
        "small_support": sorted(small),
    }


def _list_own_codes(plan: SequencePlan) -> dict[str, list[str]]:
    """Label -> the rolled-up PheCodes of its own rule."""
    own_codes = {}
    for name in plan.names:
        rule = name.removesuffix("_source")
        defining = plan.defining if plan.cohort else plan.manifest.defining.get(rule, ())
        rolled = {codes.roll_up_phecode(phecode, plan.choices.level) for phecode in defining}
        own_codes[name] = prevalence.sort_phecodes(rolled)
    return own_codes
