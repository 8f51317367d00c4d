"""Cached claims to code sequences: the two passes of the builder over the shards of the cache, and
statistics to judge them by.

Leakage policy, landmark, selection, clock and minimum codes are chosen here, so other choices need
no second ingest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from bitimely_core import locks, manifests, storage
from bitimely_core.claims import (
    code_values,
    codes,
    cohorts,
    event_times,
    sequence_builder,
    shortcut_baselines,
    steps,
)
from bitimely_core.claims import prevalence as ratios
from bitimely_core.claims.choices import SequenceChoices
from bitimely_core.claims.cohorts import CohortRules
from bitimely_core.claims.disclosure import CountDisclosure
from bitimely_core.claims.prevalence import CodeSelection
from bitimely_core.claims.sequence_plan import SequencePlan
from bitimely_core.claims.shard_map import ShardMap, load_subjects
from bitimely_core.claims.shortcut_baselines import Prevalence, ShortcutTally
from bitimely_core.claims.steps import ClaimsShard
from bitimely_core.errors import (
    Finding,
    Reason,
    input_error,
    input_warning,
    raise_differences,
    usage_error,
)
from bitimely_core.privacy import round_rows
from bitimely_core.records import StoredFile
from bitimely_core.schemas.ingest import EventsManifest, FindingRecord
from bitimely_core.schemas.tokens import (
    CohortFlow,
    FlowStep,
    SequenceFunnel,
    SequenceLengths,
    SequenceManifest,
    SequenceOptions,
    SequenceStatistics,
)
from bitimely_core.tokens.sequences import publish_sequences, write_shard
from bitimely_core.types import Progress

# at most so many sequences of a shard, and in total, give the median gap
SAMPLED_SEQUENCES = 2000, 16_000
SMALL_SUPPORT = 20  # carriers among the cases below which a selected code is reported


ALTERNATIVES: dict[str, dict[str, Any]] = {
    "--no-select": {"select": False},
    "--min-codes 1": {"min_codes": 1},
}
LEAST_SHARE, LEAST_CODES = 0.05, 10  # of the subjects; PheCodes


def write_sequences(
    plan: SequencePlan,
    out: Path,
    *,
    verify: bool = True,
    force_new: bool = False,
    progress: Progress | None = None,
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
                _write_plan(plan, out, progress)
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
    old = manifests.read_manifest(out)
    now = json.loads(storage.encode_json(plan.options | {"cache": plan.manifest.manifest_sha256}))
    before = old.get("options", {}) | {"cache": old.get("cache")}
    raise_differences(
        before,
        now,
        out / manifests.MANIFEST,
        "Give the same choices, another --name, or --force-new",
    )
    return True


def _write_plan(plan: SequencePlan, out: Path, progress: Progress | None) -> None:
    manifest, choices, names = plan.manifest, plan.choices, plan.names
    report = progress or (lambda what, done, total: None)
    total = len(manifest.shards)
    plan, cohort, record, flow = select_members(plan)
    plan = _fit_numbers(ShardMap(plan, cohort))
    mapped = ShardMap(plan, cohort)
    counts = ratios.CodeCounts()
    before: list[Prevalence] = []
    for counted, found in mapped.apply(partial(_count_shard, choices, names)):
        counts = counts + counted
        before.append(found)
        report("count codes", len(before), total)
    selection = _select_vocabulary(plan, counts, choices)
    size = len(sequence_builder.SPECIAL) + len(selection.phecodes)
    usage = (np.zeros(size, np.int64), np.zeros(size, np.int64))
    tally: ShortcutTally = {}
    after: list[Prevalence] = []
    lengths: list[np.ndarray] = []  # for the statistics: the events are on disk by then
    gaps: list[np.ndarray] = []
    files: dict[str, StoredFile] = {}
    no_birth = 0
    sampled = max(1, min(SAMPLED_SEQUENCES[0], SAMPLED_SEQUENCES[1] // max(1, total)))
    for built in mapped.apply(
        partial(_build_shard, choices, names, selection, out.resolve(), sampled)
    ):
        files |= _number_files(out, built.files, len(files))
        no_birth += built.no_birth
        gaps.append(built.gaps)
        lengths.append(built.lengths)
        after.append(built.prevalence)
        usage = usage[0] + built.usage[0], usage[1] + built.usage[1]
        tally = shortcut_baselines.merge_tallies([tally, built.tally])
        report("sequences", len(lengths), total)
    if plan.by_default:
        made, kept = [out / name for name in files], sum(map(len, lengths))
        _refuse_little(mapped, counts, selection, made, kept)
    all_lengths = np.concatenate(lengths)
    _refuse_none(plan, selection, len(all_lengths))
    all_gaps = np.concatenate(gaps).astype(np.float64)
    statistics = SequenceStatistics(
        funnel=SequenceFunnel(
            **manifest.funnel.model_dump(exclude={"subjects"}),
            subjects_in=manifest.funnel.subjects or 0,
            subjects_out=len(all_lengths),
            events=int(all_lengths.sum()),
            no_birth=no_birth,
        ),
        sequences=SequenceLengths(
            n=len(all_lengths),
            median_length=float(np.median(all_lengths)),
            longest=int(all_lengths.max()),
            median_positive_gap=float(np.median(all_gaps)) if len(all_gaps) else None,
        ),
        prevalence={
            "before": shortcut_baselines.add_prevalence(before),
            "after": shortcut_baselines.add_prevalence(after),
        },
        **_describe_selection(plan, selection, tally),
        agreement=manifest.agreement if plan.cohort is None else [],
        unmapped=manifest.unmapped,
        cohort=flow,
    )
    publish_sequences(
        out,
        SequenceManifest(
            cache=manifest.manifest_sha256,
            options=SequenceOptions.model_validate(plan.options),
            class_names=names,
            notices=_list_notices(plan),
            findings=[
                FindingRecord.from_finding(finding)
                for finding in list_findings(
                    statistics, plan.judged, tables=_find_label_tables(plan)
                )
            ],
            shards=[],
            events=statistics.funnel.events,
        ),
        shards=files,
        vocabulary=_make_vocabulary(manifest, selection, usage),
        ratios=_make_ratio_table(selection),
        statistics=statistics,
        cohort=record,
        values=plan.fitted,
    )


def _number_files(out: Path, files: Mapping[str, StoredFile], first: int) -> dict[str, StoredFile]:
    """The files of a shard, renamed to the numbers from `first` on: shards without any sequence are
    not numbered.
    """
    renamed = {}
    for number, (name, file) in enumerate(files.items(), first):
        new_name = re.sub(r"\d+", f"{number:05d}", name, count=1)
        if new_name != name:
            storage.rename(out / name, out / new_name)
        renamed[new_name] = file
    return renamed


def _count_values(shard: ClaimsShard, number: int) -> pl.DataFrame:
    return code_values.count_values(shard)


def _select_vocabulary(
    plan: SequencePlan, counts: ratios.CodeCounts, choices: SequenceChoices
) -> CodeSelection:
    exempt = () if plan.fitted is None else frozenset(code_values.list_deciles(plan.fitted))
    return steps.select_vocabulary(counts, plan.names, choices, plan.floor, exempt)


def _refuse_none(plan: SequencePlan, selection: CodeSelection, kept: int) -> None:
    """Raises UserError (no_input, exit 4) where no subject has a sequence."""
    if not kept:
        wanted = f"{len(selection.phecodes)} PheCodes are selected, {plan.choices.min_codes} {plan.choices.min_codes_unit} are needed"
        hint = "Lower --min-codes, or give --no-select"
        raise input_error(
            Reason.NO_INPUT, "no subject has a sequence", wanted, hint, file=str(plan.cache.folder)
        )


class BuiltShard(NamedTuple):
    """What the sequences of a shard add to those of all."""

    files: dict[str, StoredFile]  # none without any sequence
    no_birth: int
    gaps: np.ndarray  # months, of a sample
    lengths: np.ndarray
    prevalence: Prevalence
    usage: tuple[np.ndarray, np.ndarray]
    tally: ShortcutTally


def _fit_numbers(mapped: ShardMap) -> SequencePlan:
    """The plan with the cut points and moments of numbers, if it reads them."""
    plan = mapped.plan
    if plan.choices.values == "none":
        return plan
    return replace(plan, fitted=code_values.fit_values(mapped.apply(_count_values), plan.floor))


def _count_shard(
    choices: SequenceChoices, names: list[str], shard: ClaimsShard, number: int
) -> tuple[ratios.CodeCounts, Prevalence]:
    """Counts for the selection, and prevalence before the filters."""
    prevalence = shortcut_baselines.count_prevalence(
        _label_values(shard.cohort, names), shard.cohort["split"].to_numpy()
    )
    return steps.count_shard(shard, choices), prevalence


def _build_shard(
    choices: SequenceChoices,
    names: list[str],
    selection: CodeSelection,
    out: Path,
    sampled: int,
    shard: ClaimsShard,
    number: int,
) -> BuiltShard:
    """Write the sequences of a shard; `sampled` of them give gaps."""
    built = steps.build_shard(shard, choices, selection)
    frame = pl.from_arrow(sequence_builder.to_table(built, shard.cohort, names))
    assert isinstance(frame, pl.DataFrame)
    of_sampled = [np.diff(times.to_numpy()) for times in frame["times"].head(sampled)]
    own = shard.cohort[built.subjects]
    return BuiltShard(
        files=write_shard(out, number, frame) if frame.height else {},
        no_birth=built.no_birth,
        gaps=np.concatenate([np.empty(0, np.float32), *(gap[gap > 0] for gap in of_sampled)]),
        lengths=frame["codes"].list.len().to_numpy(),
        prevalence=shortcut_baselines.count_prevalence(
            _label_values(frame, names), frame["split"].cast(pl.String).to_numpy()
        ),
        usage=sequence_builder.count_usage(
            built, shard.cohort, len(sequence_builder.SPECIAL) + len(selection.phecodes)
        ),
        tally=shortcut_baselines.count_shortcuts(
            built.offsets, built.ids, _label_values(own, names), own["split"].to_numpy()
        ),
    )


def _count_kept(
    choices: SequenceChoices, selection: CodeSelection, shard: ClaimsShard, number: int
) -> int:
    return len(steps.build_shard(shard, choices, selection).subjects)


def _refuse_little(
    mapped: ShardMap,
    counts: ratios.CodeCounts,
    selection: CodeSelection,
    made: Iterable[Path],
    kept: int,
) -> None:
    """Raises UserError (min_codes, exit 4), without the files `made`, where the selection that
    nobody asked for keeps almost nothing and another one keeps more.
    """
    plan = mapped.plan
    total, n_codes = plan.manifest.funnel.subjects or 0, len(selection.phecodes)
    if not kept or not (kept < LEAST_SHARE * total or (n_codes < LEAST_CODES and kept < total / 2)):
        return
    found: dict[str, tuple[int, int]] = {}
    for flag, change in ALTERNATIVES.items():
        choices = replace(plan.choices, **change)
        other = _select_vocabulary(plan, counts, choices)
        found[flag] = sum(mapped.apply(partial(_count_kept, choices, other))), len(other.phecodes)
    more = [
        f"{flag} keeps at most {round_rows(n):,}, with {codes} PheCodes"
        for flag, (n, codes) in found.items()
        if n > kept
    ]
    problem = f"of the subjects the default selection keeps at most {round_rows(kept):,} of at most {round_rows(total):,}, with {n_codes} PheCodes"
    hint = "Choose one of them, or give --preset paper to keep the selection as it is"
    if more:
        for path in made:
            storage.remove_file(path)
        raise input_error(
            Reason.MIN_CODES, problem, "; ".join(more), hint, file=str(plan.cache.folder)
        )


def select_members(
    plan: SequencePlan,
) -> tuple[SequencePlan, pl.DataFrame | None, pl.DataFrame | None, CohortFlow | None]:
    """The subjects (None: executors of Spark read them); with a cohort the plan with `defining`,
    the subjects with index day and outcome (null for those left out), the record of all subjects,
    and how they were chosen.
    """
    if (rules := plan.cohort) is None:
        return plan, None if plan.engine == "spark" else load_subjects(plan), None, None
    subjects = load_subjects(plan)
    own, parts, defining = rules.outcome_rule, list[pl.DataFrame](), set[str]()
    if "index_day" in subjects.columns and subjects["index_day"].count():
        raise usage_error(
            "the source gives index days itself",
            "expected none",
            "Ingest without index_date",
            field="--cohort",
        )
    subjects = subjects.drop("index_day", strict=False)
    for part, codes_of in ShardMap(plan, subjects).apply(
        partial(_apply_cohort, rules, plan.manifest.data_end)
    ):
        parts.append(part)
        defining |= codes_of
    record = cohorts.match_controls(rules, pl.concat(parts).sort("subject_id"))
    member = record["left_out"].is_null()
    subjects = subjects.with_columns(
        record["index_day"].set(~member, None),
        record["outcome_day"].is_not_null().cast(pl.Int8).set(~member, None).alias(f"y_{own.name}"),
        record["outcome_day"].cast(pl.Int32).set(~member, None).alias(f"onset_{own.name}"),
    )
    if plan.choices.time_to_event:
        subjects = event_times.add_record_times(subjects, record, own.name)
    return (
        replace(plan, defining=frozenset(defining)),
        subjects,
        record,
        _describe_flow(rules, record),
    )


def _apply_cohort(
    rules: CohortRules, data_end: int | None, shard: ClaimsShard, number: int
) -> tuple[pl.DataFrame, set[str]]:
    """The record of a shard's subjects, and the PheCodes of the codes of the outcome."""
    record = cohorts.apply_cohort(rules, shard.rows, shard.codes, shard.cohort, data_end)
    return record, {
        phecode
        for code in shard.codes
        if rules.outcome_rule.matches(code)
        for phecode in code.phecodes
    }


def _describe_flow(rules: CohortRules, record: pl.DataFrame) -> CohortFlow:
    left, texts = record.height, cohorts.describe_reasons(rules)
    steps = []
    for reason, n in cohorts.count_flow(rules, record):
        left -= n
        steps.append(FlowStep(reason=reason, text=texts[reason], left_out=n, left=left))
    cases = record.filter(pl.col("left_out").is_null())["outcome_day"].count()
    return CohortFlow(
        title=rules.title or rules.name,
        kind=rules.outcome.kind,
        subjects=record.height,
        steps=steps,
        cases=cases,
    )


def _label_values(cohort: pl.DataFrame, names: list[str]) -> dict[str, np.ndarray]:
    """Labels as 1, 0 or -1 for not known."""
    return {name: cohort[f"y_{name}"].fill_null(-1).to_numpy() for name in names}


def _make_vocabulary(
    manifest: EventsManifest, selection: CodeSelection, usage: tuple[np.ndarray, np.ndarray]
) -> pl.DataFrame:
    first = len(sequence_builder.SPECIAL)
    schema = {"id": pl.Int32, **dict.fromkeys(("code", "name", "category"), pl.String)}
    schema |= dict.fromkeys(("n_subjects_train", "n_events_train"), pl.Int64)
    rows = [
        (
            number,
            code,
            manifest.phenotypes.get(code, ""),
            manifest.categories.get(code, ""),
            usage[0][number],
            usage[1][number],
        )
        for number, code in enumerate(selection.phecodes, first)
    ]
    return pl.DataFrame(rows, schema=schema, orient="row")


def _make_ratio_table(selection: CodeSelection) -> pl.DataFrame:
    rows = [
        (
            name,
            code,
            r.ratio,
            *(r.interval or (None, None)),
            r.n_case_with,
            r.n_case,
            r.n_ref_with,
            r.n_ref,
            code in selection.phecodes,
        )
        for name, own in selection.ratios.items()
        for code, r in own.items()
    ]
    schema = {
        "target": pl.String,
        "code": pl.String,
        **dict.fromkeys(("ratio", "lo", "hi"), pl.Float64),
    }
    schema |= dict.fromkeys(("n_case_with", "n_case", "n_ref_with", "n_ref"), pl.Int64) | {
        "selected": pl.Boolean
    }
    return pl.DataFrame(rows, schema=schema, orient="row")


def _describe_selection(
    plan: SequencePlan, selection: CodeSelection, tally: ShortcutTally
) -> dict[str, Any]:
    """The fields of `SequenceStatistics` on selected codes and shortcuts."""
    level, threshold = plan.choices.level, plan.choices.threshold
    own = {}
    for name in plan.names:
        defining = (
            plan.defining
            if plan.cohort
            else plan.manifest.defining.get(name.removesuffix("_source"), ())
        )
        own[name] = sorted(
            {codes.roll_up_phecode(phecode, level) for phecode in defining},
            key=codes.phecode_sort_key,
        )
    ratios_of = selection.ratios
    small = {
        code
        for found in ratios_of.values()
        for code, r in found.items()
        if r.selected and r.n_case_with < SMALL_SUPPORT
    }
    return {
        "leaks": shortcut_baselines.score_shortcuts(
            tally, dict(enumerate(selection.phecodes, len(sequence_builder.SPECIAL))), own
        ),
        "own": own,
        "max_attainable": {
            name: None if value is None or np.isinf(value) else value
            for name, value in selection.max_attainable.items()
        },
        "threshold": threshold,
        "fallback": [
            name
            for name, found in ratios_of.items()
            if found and not any(r.ratio > threshold for r in found.values())
        ],
        "selected": len(selection.phecodes),
        "small_support": sorted(small),
    }


def _find_label_tables(plan: SequencePlan) -> dict[str, str]:
    """Label -> the table that it was read from; labels that rules make have none."""
    manifest = plan.manifest
    if plan.cohort is not None:
        return {}
    files = [
        file
        for file in manifest.facts.get("tables", ())
        if PurePath(file).name.lower().startswith("labels.")
    ]
    made = {rule["name"] for rule in manifest.rules} if manifest.ruled else set()
    return {name: files[0] for name in manifest.names if files and name not in made}


def list_findings(
    statistics: SequenceStatistics,
    choices: SequenceChoices,
    disclosure: CountDisclosure | None = None,
    tables: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Warnings of a build for the screen and the ingest report, without what `disclosure`
    withholds; `tables` of labels are named.
    """
    shown = disclosure or CountDisclosure()
    findings, funnel = [], statistics.funnel
    subjects = statistics.cohort.steps[-1].left if statistics.cohort else funnel.subjects_in
    if excluded := subjects - funnel.subjects_out:
        keys = {
            ("out", "all"),
            ("left", statistics.cohort.steps[-1].reason) if statistics.cohort else ("in",),
        }
        is_open = not keys & shown.withheld
        problem = (
            f"{excluded} of {subjects} subjects have no sequence"
            if is_open
            else "some subjects have no sequence"
        )
        least = f"fewer than {choices.min_codes} {choices.min_codes_unit} of the selected PheCodes"
        rare = (
            "The few selected PheCodes are rare: see --no-select, --min-case-support, --min-codes"
        )
        hint = rare if excluded > funnel.subjects_out else ""
        findings.append(
            input_warning(Reason.MIN_CODES, problem, least, hint, count=excluded if is_open else 1)
        )
    for name, scores in statistics.leaks.items():
        chance, best = scores.prevalence["all"], scores.best.count["all"] if scores.best else None
        leaked = scores.leak and chance is not None and best is not None and best > chance + 0.01
        if scores.cases["all"] and (
            leaked or (choices.leakage == "keep" and choices.landmark is None and scores.own)
        ):
            printed = shown.get_code_score(scores, name)
            problems = (
                [f"its own codes ({', '.join(scores.own)}) are in the input"] if scores.own else []
            )
            problems += (
                [f"the count of PheCode {scores.best.phecode} alone scores {printed:.3f}"]
                if scores.best and printed
                else []
            )
            problems = problems or ["one code alone predicts it"]
            requirement = (
                f"chance is {chance:.3f}"
                if chance is not None and shown.has_counts(name, "after")
                else ""
            )
            hint = "See --leakage drop-phecode and --landmark"
            text = f"label {name}: {' and '.join(problems)}"
            findings.append(
                input_warning(
                    Reason.LABEL_LEAKAGE, text, requirement, hint, file=(tables or {}).get(name)
                )
            )
    for name in statistics.fallback:
        ceiling = statistics.max_attainable.get(name)
        if ceiling is not None and ceiling <= statistics.threshold:
            value = (
                f"{ceiling:.2f}" if shown.has_counts(name, "before", "train") else "the threshold"
            )
            problem = f"label {name}: no ratio can exceed {value} at its prevalence"
            fallback = f"the threshold is {statistics.threshold:g}, so the top codes were selected"
            findings.append(Finding(Reason.CLASS_MISSING, problem, fallback, level="info"))
    return findings


def _list_notices(plan: SequencePlan) -> list[str]:
    rules, found = plan.cohort, list[str]()
    if plan.judged.landmark is None:
        leak = "Labels derived from codes leak into inputs that hold them (--leakage keep, no landmark)"
        found.append(
            f"{leak}: scores measure label recovery, not prediction."
            if plan.choices.leakage == "keep"
            else "Labels come from the complete history (no landmark): scores measure recognition, not prediction."
        )
    if rules is not None and rules.controls is not None:
        found.append(
            "Controls are matched to cases: prevalence, and with it AUPRC, calibration and predictive values, is that of the design."
        )
    risk = (rules and rules.risk) or cohorts.CohortRisk()
    if (
        rules is not None
        and rules.outcome.kind == "incident"
        and (risk.to_day is None or risk.min_days is not None or risk.keep_deaths)
    ):
        found.append(
            "Subjects without outcome may have been followed for less than the time at risk: they count as not having had it."
        )
    return found
