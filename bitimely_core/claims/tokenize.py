"""Cached claims to code sequences: the two passes of the builder over the shards of the cache, and statistics to judge them by.

Leakage policy, landmark, selection, clock and minimum codes are chosen here, so other choices need no second ingest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from bitimely_core import manifests, storage
from bitimely_core.cache import Cache
from bitimely_core.claims import codes, cohorts, engines, event_times, sequence_builder, shortcut_baselines, splits, steps
from bitimely_core.claims import prevalence as ratios
from bitimely_core.claims.cohorts import CohortRules
from bitimely_core.claims.disclosure import CountDisclosure
from bitimely_core.claims.engines import Engine
from bitimely_core.claims.label_rules import parse_rules
from bitimely_core.claims.labels import Landmark
from bitimely_core.claims.prevalence import CodeSelection
from bitimely_core.claims.shortcut_baselines import Prevalence, ShortcutTally
from bitimely_core.claims.steps import ClaimsShard, SequenceChoices
from bitimely_core.errors import Finding, Reason, input_error, input_warning, raise_differences, usage_error
from bitimely_core.privacy import round_message, round_rows
from bitimely_core.records import StoredFile
from bitimely_core.registry import unknown
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

SAMPLED_SEQUENCES = 2000, 16_000  # at most so many sequences of a shard, and in total, give the median gap
SMALL_SUPPORT = 20  # carriers among the cases below which a selected code is reported


SELECTING = (
    "select",
    "threshold",
    "top_k",
    "min_case_support",
    "min_case_fraction",
    "min_codes",
    "min_codes_unit",
    "population",
    "denominator",
)
ALTERNATIVES: dict[str, dict[str, Any]] = {"--no-select": {"select": False}, "--min-codes 1": {"min_codes": 1}}
LEAST_SHARE, LEAST_CODES = 0.05, 10  # of the subjects; PheCodes


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """Validated choices for the sequences of a cache."""

    cache: Cache
    preset: str
    choices: SequenceChoices
    split_file: str
    engine: str
    small_counts: bool = False
    individual_timelines: bool = False
    cohort: CohortRules | None = None
    defining: frozenset[str] = frozenset()  # PheCodes that the data have for codes of the cohort's outcome
    by_default: bool = False  # nobody asked for the selection of codes and subjects

    @property
    def names(self) -> list[str]:
        """The labels: those of the cache, or the outcome of the cohort."""
        if self.cohort is not None:
            return [self.cohort.outcome.rule]
        made = {rule["name"] for rule in self.manifest.rules}  # only these have onsets
        return [name for name in self.manifest.names if not self.choices.time_to_event or name in made]

    @property
    def judged(self) -> SequenceChoices:
        """The choices by which findings are judged: labels of an incident outcome lie after the input, as under a landmark."""
        incident = self.cohort is not None and self.cohort.outcome.kind == "incident"
        return replace(self.choices, landmark=Landmark()) if incident else self.choices

    @property
    def manifest(self) -> EventsManifest:
        """The manifest of the cache."""
        return self.cache.events_manifest

    @property
    def options(self) -> dict[str, object]:
        """The resolved choices, as the manifest keeps them."""
        return {
            "dataset": self.cache.dataset,
            "view": "",
            "task": ("survival" if self.choices.time_to_event else "multilabel") if self.names else "none",
            "split": "official" if self.split_file else self.manifest.split,
            "seed": self.manifest.seed,
            "normalise": "none",
            "preset": self.preset,
            "split_file": storage.hash_file(Path(self.split_file)) if self.split_file else None,
            **{name: value for name, value in asdict(self.choices).items() if name != "time_to_event" or value},
            **({"small_counts": "shown"} if self.small_counts else {}),
            **({"individual_timelines": "drawn"} if self.individual_timelines else {}),
            **({"cohort": self.cohort.model_dump(mode="json", exclude_none=True)} if self.cohort else {}),
        }


def resolve_plan(
    cache: Cache,
    *,
    preset: str | None = None,
    landmark: str | None = None,
    landmark_date: str | None = None,
    seed: int | None = None,
    split_file: str | Path | None = None,
    engine: str = "polars",
    small_counts: bool = False,
    individual_timelines: bool = False,
    cohort: str | Path | None = None,
    **choices: Any,
) -> SequencePlan:
    """The choices of a build, checked against the cache.

    Args:
        cache: of claims.
        preset: paper, original or strict.
        landmark: `DAYS[,GAP,HORIZON]`.
        landmark_date: YYYY-MM-DD instead of DAYS; needs a cache with dates.
        seed: must be that of the ingest.
        split_file: csv or Parquet with subject_id (as in subjects.parquet) and split.
        engine: polars, duckdb or spark, with the same result.
        small_counts: pages and messages show counts below 11: for synthetic or consented data.
        individual_timelines: the page draws sequences of single subjects.
        cohort: a shipped definition or a file of one: its subjects up to their index days, with its outcome as the label.
        choices: fields of `steps.SequenceChoices`, hyphens or underscores in their values; None: those of the preset.

    Raises:
        UserError: config or unknown_name (exit 2).
    """
    preset_given = preset
    preset, chosen = parse_choices(preset=preset, landmark=landmark, landmark_date=landmark_date, engine=engine, **choices)
    plan = SequencePlan(cache=cache, preset=preset, choices=chosen, split_file=str(split_file or ""), engine=engine)
    by_default = preset_given is None and cohort is None and all(choices.get(name) is None for name in SELECTING)
    plan = replace(plan, small_counts=small_counts, individual_timelines=individual_timelines, by_default=by_default)
    manifest = plan.manifest
    if cohort is not None:
        plan = replace(plan, cohort=cohorts.load_cohort(cohort))
        check_cohort(plan.cohort, chosen, dated=manifest.clock == "calendar")
    check_choices(preset, chosen, dated=manifest.clock == "calendar", ignored=bool(manifest.settings.options.get("keep_ignored")))
    if seed is not None and seed != manifest.seed:
        expected = f"expected {manifest.seed}, the seed of the cache"
        raise usage_error(f"seed {seed}", expected, "Ingest again with that --seed, or give --split-file", field="--seed")
    check_times(plan)
    if chosen.select is True and not plan.names:
        raise usage_error("selection by prevalence ratio without any label", "expected rules or label columns", "Give --no-select")
    return plan


def parse_choices(
    *, preset: str | None = None, landmark: str | None = None, landmark_date: str | None = None, engine: str = "polars", **choices: Any
) -> tuple[str, steps.SequenceChoices]:
    """Preset and choices as `resolve_plan` takes them, checked by themselves. Raises UserError (config or unknown_name, exit 2)."""
    preset = preset or "paper"
    if preset not in steps.PRESETS:
        raise unknown("preset", preset, list(steps.PRESETS))
    if engine not in engines.ENGINES:
        raise unknown("engine", engine, list(engines.ENGINES))
    given: dict[str, Any] = {k: v.replace("-", "_") if isinstance(v, str) else v for k, v in choices.items() if v is not None}
    if landmark or landmark_date:
        given["landmark"] = _parse_landmark(landmark, landmark_date)
    names = [field.name for field in fields(SequenceChoices)]
    if odd := next((name for name in given if name not in names), None):
        raise unknown("choice of sequences", odd, names)
    try:
        return preset, replace(steps.PRESETS[preset], **given)
    except ValueError as error:
        raise usage_error(str(error)) from error


def check_choices(preset: str, chosen: steps.SequenceChoices, *, dated: bool, ignored: bool) -> None:
    """Refuse choices that a cache without dates, or without the PheCodes marked Ignore, cannot serve. Raises UserError (config, exit 2)."""
    if not dated:
        needing = ["--time calendar-month"] * (chosen.time == "calendar_month") + ["--dedupe month"] * (chosen.dedupe == "month")
        needing += ["--landmark-date"] * (chosen.landmark is not None and chosen.landmark.day is not None)
        if needing:
            raise usage_error(f"{needing[0]} needs true dates", "this cache has none", "Ingest with --keep-dates")
    if preset == "original" and not ignored:
        hint = "Ingest pophr with --keep-ignored, or choose another --preset"
        raise usage_error("preset original keeps the PheCodes marked Ignore", "this cache has left them out", hint)


def check_times(plan: SequencePlan) -> None:
    """Refuse times to event without onsets, or beyond the time at risk. Raises UserError (config, exit 2)."""
    if not (days := plan.choices.time_to_event):
        return
    field = "--time-to-event"
    if plan.cohort is None:
        end = plan.choices.landmark.horizon_days if plan.choices.landmark else None
    else:
        risk = plan.cohort.risk or cohorts.CohortRisk()
        end = None if plan.cohort.outcome.kind == "prevalent" else (risk.to_day or days[-1] + risk.from_day) - risk.from_day + 1
    if end is None or days[-1] > end:
        found = "no time at risk" if end is None else f"a horizon of {days[-1]} days, and {end} at risk"
        raise usage_error(found, "expected horizons within it", "Give --landmark DAYS,GAP,HORIZON, or an incident --cohort", field=field)
    if not plan.names or (plan.cohort is None and not plan.manifest.ruled):
        raise usage_error("time to event of labels that no rule makes", "expected days of onset", "Ingest with --rules", field=field)


def check_cohort(cohort: CohortRules | None, chosen: steps.SequenceChoices, *, dated: bool) -> None:
    """Refuse a cohort beside a landmark, or with a calendar day in a cache without dates. Raises UserError (config, exit 2)."""
    if cohort is not None and chosen.landmark is not None:
        raise usage_error("--cohort with a landmark", "both set index days", "Give one of them", field="--cohort")
    if cohort is not None and cohort.index.at == "date" and not dated:
        raise usage_error('--cohort with index.at = "date" needs true dates', "this cache has none", "Ingest with --keep-dates")


def _parse_landmark(text: str | None, date: str | None) -> Landmark | None:
    """`DAYS[,GAP,HORIZON]` or a date as a landmark. Raises UserError (config, exit 2)."""
    names = ("landmark_days", "gap_days", "horizon_days")
    try:
        numbers = [int(part) for part in text.split(",")] if text else []
        given: dict[str, object] = dict(zip(names[1:] if date else names, numbers, strict=False))
        if date:
            given["date"] = date
        if len(numbers) not in ((0, 2) if date else (1, 3)):
            raise ValueError(f"found {text!r}")
        return steps.parse_landmark(given)
    except ValueError as error:
        expected = "expected --landmark DAYS[,GAP,HORIZON], or --landmark-date with --landmark GAP,HORIZON"
        raise usage_error(str(error), expected) from error


def write_sequences(
    plan: SequencePlan, out: Path, *, verify: bool = True, force_new: bool = False, progress: Progress | None = None
) -> None:
    """Write the sequences of a plan in `out` without opening them, so that they need not fit into memory; existing ones of the same choices stay.

    Raises UserError: settings_differ (exit 2), no_input (exit 4) when no subject is left, integrity (exit 5).
    """
    if force_new or not _is_current(plan, out):
        if verify:
            plan.manifest.check_files(plan.cache.folder)
        storage.make_folder(out)
        with storage.lock(out):
            if force_new or not _is_current(plan, out):
                storage.remove_temporary_files(out)
                _write_plan(plan, out, progress)
                return
    storage.remove_temporary_files(out)
    if verify:
        SequenceManifest.read(out).check_files(out)


def _is_current(plan: SequencePlan, out: Path) -> bool:
    """Whether `out` holds the sequences of the plan. Raises UserError (settings_differ, exit 2) when it holds others."""
    if not (out / manifests.MANIFEST).exists():
        return False
    old = manifests.read_manifest(out)
    now = json.loads(storage.encode_json(plan.options | {"cache": plan.manifest.manifest_sha256}))
    before = old.get("options", {}) | {"cache": old.get("cache")}
    raise_differences(before, now, out / manifests.MANIFEST, "Give the same choices, another --name, or --force-new")
    return True


def _write_plan(plan: SequencePlan, out: Path, progress: Progress | None) -> None:
    manifest, choices, names = plan.manifest, plan.choices, plan.names
    report = progress or (lambda what, done, total: None)
    total = len(manifest.shards)
    with ExitStack() as stack:
        engine = stack.enter_context(engines.open_engine(plan.engine))
        plan, cohort, record, flow = select_members(plan, load_subjects(plan), engine)
        held: list[ClaimsShard] = []
        counts = ratios.CodeCounts()
        before: list[Prevalence] = []
        for shard in iter_shards(plan, cohort, engine):  # no enumerate: it would keep a shard in memory until the next is made
            counts = counts + steps.count_shard(shard, choices, engine)
            before.append(shortcut_baselines.count_prevalence(_label_values(shard.cohort, names), shard.cohort["split"].to_numpy()))
            held = [shard] if total == 1 else []
            report("count codes", len(before), total)
            del shard
        selection = steps.select_vocabulary(counts, names, choices)
        size = len(sequence_builder.SPECIAL) + len(selection.phecodes)
        usage = (np.zeros(size, np.int64), np.zeros(size, np.int64))
        tally: ShortcutTally = {}
        after: list[Prevalence] = []
        lengths: list[np.ndarray] = []  # for the statistics: the events are on disk by then
        gaps: list[np.ndarray] = []
        files: dict[str, StoredFile] = {}
        no_birth, none = 0, np.empty(0, np.float32)
        sampled = max(1, min(SAMPLED_SEQUENCES[0], SAMPLED_SEQUENCES[1] // max(1, total)))
        for shard in held or iter_shards(plan, cohort, engine):
            built = steps.build_shard(shard, choices, selection, engine)
            no_birth += built.no_birth
            frame = pl.from_arrow(sequence_builder.to_table(built, shard.cohort, names))
            assert isinstance(frame, pl.DataFrame)
            if frame.height:
                files |= write_shard(out, len(files), frame)
            of_sampled = [np.diff(times.to_numpy()) for times in frame["times"].head(sampled)]
            gaps.append(np.concatenate([none, *(gap[gap > 0] for gap in of_sampled)]))
            lengths.append(frame["codes"].list.len().to_numpy())
            after.append(shortcut_baselines.count_prevalence(_label_values(frame, names), frame["split"].cast(pl.String).to_numpy()))
            of_subjects, of_events = sequence_builder.count_usage(built, shard.cohort, size)
            usage = usage[0] + of_subjects, usage[1] + of_events
            own = shard.cohort[built.subjects]
            counted = shortcut_baselines.count_shortcuts(built.offsets, built.ids, _label_values(own, names), own["split"].to_numpy())
            tally = shortcut_baselines.merge_tallies([tally, counted])
            report("sequences", len(lengths), total)
            del shard, built, frame, own
        if plan.by_default:
            made, kept = [out / name for name in files], sum(map(len, lengths))
            _refuse_little(plan, engine, counts, selection, made, kept, lambda: held or iter_shards(plan, cohort, engine))
    all_lengths = np.concatenate(lengths)
    if not len(all_lengths):
        wanted = f"{len(selection.phecodes)} PheCodes are selected, {choices.min_codes} {choices.min_codes_unit} are needed"
        hint = "Lower --min-codes, or give --no-select"
        raise input_error(Reason.NO_INPUT, "no subject has a sequence", wanted, hint, file=str(plan.cache.folder))
    all_gaps = np.concatenate([none, *gaps]).astype(np.float64)
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
        prevalence={"before": shortcut_baselines.add_prevalence(before), "after": shortcut_baselines.add_prevalence(after)},
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
            findings=[FindingRecord.of(finding) for finding in list_findings(statistics, plan.judged, tables=_find_label_tables(plan))],
            shards=[],
            events=statistics.funnel.events,
        ),
        shards=files,
        vocabulary=_make_vocabulary(manifest, selection, usage),
        ratios=_make_ratio_table(selection),
        statistics=statistics,
        cohort=record,
    )


def _refuse_little(
    plan: SequencePlan,
    engine: Engine,
    counts: ratios.CodeCounts,
    selection: CodeSelection,
    made: Iterable[Path],
    kept: int,
    shards: Callable[[], Iterable[ClaimsShard]],
) -> None:
    """Raises UserError (min_codes, exit 4), without the files `made`, where the selection that nobody asked for keeps almost nothing and another one keeps more."""
    total, n_codes = plan.manifest.funnel.subjects or 0, len(selection.phecodes)
    if not kept or not (kept < LEAST_SHARE * total or (n_codes < LEAST_CODES and kept < total / 2)):
        return
    found: dict[str, tuple[int, int]] = {}
    for flag, change in ALTERNATIVES.items():
        choices = replace(plan.choices, **change)
        other = steps.select_vocabulary(counts, plan.manifest.names, choices)
        found[flag] = sum(len(steps.build_shard(shard, choices, other, engine).subjects) for shard in shards()), len(other.phecodes)
    more = [f"{flag} keeps at most {round_rows(n):,}, with {codes} PheCodes" for flag, (n, codes) in found.items() if n > kept]
    problem = f"of the subjects the default selection keeps at most {round_rows(kept):,} of at most {round_rows(total):,}, with {n_codes} PheCodes"
    hint = "Choose one of them, or give --preset paper to keep the selection as it is"
    if more:
        for path in made:
            storage.remove_file(path)
        raise input_error(Reason.MIN_CODES, problem, "; ".join(more), hint, file=str(plan.cache.folder))


def select_members(
    plan: SequencePlan, subjects: pl.DataFrame, engine: Engine
) -> tuple[SequencePlan, pl.DataFrame, pl.DataFrame | None, CohortFlow | None]:
    """With a cohort the plan with `defining`, the subjects with index day and outcome (null for those left out), the record of all subjects, and how
    they were chosen.
    """
    if (rules := plan.cohort) is None:
        return plan, subjects, None, None
    own, parts, defining = rules.outcome_rule, [], set[str]()
    if "index_day" in subjects.columns and subjects["index_day"].count():
        raise usage_error("the source gives index days itself", "expected none", "Ingest without index_date", field="--cohort")
    subjects = subjects.drop("index_day", strict=False)
    for shard in iter_shards(plan, subjects, engine):
        parts.append(cohorts.apply_cohort(rules, shard.rows, shard.codes, shard.cohort, engine, plan.manifest.data_end))
        defining.update(phecode for code in shard.codes if own.matches(code) for phecode in code.phecodes)
        del shard
    record = cohorts.match_controls(rules, pl.concat(parts).sort("subject_id"))
    member = record["left_out"].is_null()
    subjects = subjects.with_columns(
        record["index_day"].set(~member, None),
        record["outcome_day"].is_not_null().cast(pl.Int8).set(~member, None).alias(f"y_{own.name}"),
        record["outcome_day"].cast(pl.Int32).set(~member, None).alias(f"onset_{own.name}"),
    )
    if plan.choices.time_to_event:
        subjects = event_times.add_record_times(subjects, record, own.name)
    return replace(plan, defining=frozenset(defining)), subjects, record, _describe_flow(rules, record)


def _describe_flow(rules: CohortRules, record: pl.DataFrame) -> CohortFlow:
    left, texts = record.height, cohorts.describe_reasons(rules)
    steps = []
    for reason, n in cohorts.count_flow(rules, record):
        left -= n
        steps.append(FlowStep(reason=reason, text=texts[reason], left_out=n, left=left))
    cases = record.filter(pl.col("left_out").is_null())["outcome_day"].count()
    return CohortFlow(title=rules.title or rules.name, kind=rules.outcome.kind, subjects=record.height, steps=steps, cases=cases)


def load_subjects(plan: SequencePlan) -> pl.DataFrame:
    """Every subject with its split and labels, row i the subject i: some 26 bytes each with three labels."""
    more = [*["obs_start"] * (plan.cohort is not None), *["death_day"] * bool(plan.cohort or plan.choices.time_to_event)]
    cohort = plan.cache.cohort(("subject_id", "birth_day", "obs_end", "index_day", "sex", "split_bin", "split", *more))
    bins = sorted(cohort["split_bin"].unique().to_list())
    places = pl.Enum(splits.SPLITS)
    placed = pl.col("split_bin").replace_strict(bins, [splits.assign_split_of_bin(number) for number in bins], return_dtype=places)
    cohort = cohort.with_columns(split=pl.col("split").cast(places).fill_null(placed) if "split" in cohort.columns else placed)
    cohort = cohort.drop("split_bin")
    if plan.split_file:
        given = splits.read_split_file(Path(plan.split_file), "as in subjects.parquet", numbers=True)
        given = given.with_columns(pl.col("split").cast(places))
        cohort = cohort.drop("split").join(given, on="subject_id", how="left", maintain_order="left")
        if missing := cohort["split"].null_count():
            text = round_message(f"misses {missing} of {cohort.height} subjects")
            raise usage_error(text, "expected all", file=plan.split_file, field="--split-file")
    names = sorted(plan.manifest.names) if plan.cohort is None else []
    columns: dict[str, pl.Series] = {}
    for kind, of in (("y", "value"), ("onset", "onset_day")):
        table = plan.cache.labels((of,))  # by subject and name
        columns |= {f"{kind}_{name}": table[of][i :: len(names)] for i, name in enumerate(names)}
        del table
    cohort = cohort.with_columns(columns[f"{kind}_{name}"].alias(f"{kind}_{name}") for name in names for kind in ("y", "onset"))
    pa.default_memory_pool().release_unused()
    return cohort.drop("subject_id")


def iter_shards(plan: SequencePlan, cohort: pl.DataFrame, engine: Engine) -> Iterator[ClaimsShard]:
    """The cache's shards, labels marked; subjects without any event come with the last."""
    manifest = plan.manifest
    rules = parse_rules(manifest.rules)
    defining = {phecode for own in manifest.defining.values() for phecode in own} | plan.defining
    added = (plan.cohort.outcome_rule,) if plan.cohort else ()
    eventless = np.ones(cohort.height, bool)
    left = len(manifest.shards)
    for events in plan.cache.events():
        left -= 1
        ids = events["subject_id"].unique().to_numpy()
        eventless[ids] = False
        rows = np.union1d(ids, ids if left else np.flatnonzero(eventless))
        shard_cohort = cohort[rows].select(pl.Series("subject_id", rows), pl.all().exclude("split"), pl.col("split").cast(pl.String))
        day = (pl.col("time").cast(pl.Int64) // 86_400_000_000).cast(pl.Int32)
        events = events.sort("subject_id", "row").with_columns(day=day).drop("row")
        shard = steps.load_shard(
            events,
            _fill_index_days(shard_cohort, events) if plan.cohort is None else shard_cohort,
            rule_labels=[rule.name for rule in rules if manifest.ruled],
            rules=(*rules, *added),
            defining=defining,
        )
        del events, shard_cohort  # the next shard is read when this one has gone
        pa.default_memory_pool().release_unused()
        shard = steps.set_index_days(shard, plan.choices, manifest.data_end, engine)
        yield shard
        del shard


def _fill_index_days(cohort: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """Where the source gives index days: for subjects without one the day of their last row."""
    if "index_day" not in cohort.columns:
        return cohort
    if cohort["index_day"].null_count() == cohort.height:
        return cohort.drop("index_day")
    last = events.group_by("subject_id").agg(last=pl.col("day").max())
    cohort = cohort.join(last, on="subject_id", how="left", maintain_order="left")
    return cohort.with_columns(index_day=pl.coalesce("index_day", "last").cast(pl.Int64)).drop("last")


def _label_values(cohort: pl.DataFrame, names: list[str]) -> dict[str, np.ndarray]:
    """Labels as 1, 0 or -1 for not known."""
    return {name: cohort[f"y_{name}"].fill_null(-1).to_numpy() for name in names}


def _make_vocabulary(manifest: EventsManifest, selection: CodeSelection, usage: tuple[np.ndarray, np.ndarray]) -> pl.DataFrame:
    first = len(sequence_builder.SPECIAL)
    schema = {"id": pl.Int32, **dict.fromkeys(("code", "name", "category"), pl.String)}
    schema |= dict.fromkeys(("n_subjects_train", "n_events_train"), pl.Int64)
    rows = [
        (number, code, manifest.phenotypes.get(code, ""), manifest.categories.get(code, ""), usage[0][number], usage[1][number])
        for number, code in enumerate(selection.phecodes, first)
    ]
    return pl.DataFrame(rows, schema=schema, orient="row")


def _make_ratio_table(selection: CodeSelection) -> pl.DataFrame:
    rows = [
        (name, code, r.ratio, *(r.interval or (None, None)), r.n_case_with, r.n_case, r.n_ref_with, r.n_ref, code in selection.phecodes)
        for name, own in selection.ratios.items()
        for code, r in own.items()
    ]
    schema = {"target": pl.String, "code": pl.String, **dict.fromkeys(("ratio", "lo", "hi"), pl.Float64)}
    schema |= dict.fromkeys(("n_case_with", "n_case", "n_ref_with", "n_ref"), pl.Int64) | {"selected": pl.Boolean}
    return pl.DataFrame(rows, schema=schema, orient="row")


def _describe_selection(plan: SequencePlan, selection: CodeSelection, tally: ShortcutTally) -> dict[str, Any]:
    """The fields of `SequenceStatistics` on selected codes and shortcuts."""
    level, threshold = plan.choices.level, plan.choices.threshold
    own = {}
    for name in plan.names:
        defining = plan.defining if plan.cohort else plan.manifest.defining.get(name.removesuffix("_source"), ())
        own[name] = sorted({codes.roll_up_phecode(phecode, level) for phecode in defining}, key=codes.phecode_sort_key)
    ratios_of = selection.ratios
    small = {code for found in ratios_of.values() for code, r in found.items() if r.selected and r.n_case_with < SMALL_SUPPORT}
    return {
        "leaks": shortcut_baselines.score_shortcuts(tally, dict(enumerate(selection.phecodes, len(sequence_builder.SPECIAL))), own),
        "own": own,
        "max_attainable": {name: None if value is None or np.isinf(value) else value for name, value in selection.max_attainable.items()},
        "threshold": threshold,
        "fallback": [name for name, found in ratios_of.items() if found and not any(r.ratio > threshold for r in found.values())],
        "selected": len(selection.phecodes),
        "small_support": sorted(small),
    }


def _find_label_tables(plan: SequencePlan) -> dict[str, str]:
    """Label -> the table that it was read from; labels that rules make have none."""
    manifest = plan.manifest
    if plan.cohort is not None:
        return {}
    files = [file for file in manifest.facts.get("tables", ()) if PurePath(file).name.lower().startswith("labels.")]
    made = {rule["name"] for rule in manifest.rules} if manifest.ruled else set()
    return {name: files[0] for name in manifest.names if files and name not in made}


def list_findings(
    statistics: SequenceStatistics,
    choices: SequenceChoices,
    disclosure: CountDisclosure | None = None,
    tables: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Warnings of a build for the screen and the ingest report, without what `disclosure` withholds; `tables` of labels are named."""
    shown = disclosure or CountDisclosure()
    findings, funnel = [], statistics.funnel
    subjects = statistics.cohort.steps[-1].left if statistics.cohort else funnel.subjects_in
    if excluded := subjects - funnel.subjects_out:
        keys = {("out", "all"), ("left", statistics.cohort.steps[-1].reason) if statistics.cohort else ("in",)}
        is_open = not keys & shown.withheld
        problem = f"{excluded} of {subjects} subjects have no sequence" if is_open else "some subjects have no sequence"
        least = f"fewer than {choices.min_codes} {choices.min_codes_unit} of the selected PheCodes"
        rare = "The few selected PheCodes are rare: see --no-select, --min-case-support, --min-codes"
        hint = rare if excluded > funnel.subjects_out else ""
        findings.append(input_warning(Reason.MIN_CODES, problem, least, hint, count=excluded if is_open else 1))
    for name, scores in statistics.leaks.items():
        chance, best = scores.prevalence["all"], scores.best.count["all"] if scores.best else None
        leaked = scores.leak and chance is not None and best is not None and best > chance + 0.01
        if scores.cases["all"] and (leaked or (choices.leakage == "keep" and choices.landmark is None and scores.own)):
            printed = shown.get_code_score(scores, name)
            problems = [f"its own codes ({', '.join(scores.own)}) are in the input"] if scores.own else []
            problems += [f"the count of PheCode {scores.best.phecode} alone scores {printed:.3f}"] if scores.best and printed else []
            problems = problems or ["one code alone predicts it"]
            requirement = f"chance is {chance:.3f}" if chance is not None and shown.has_counts(name, "after") else ""
            hint = "See --leakage drop-phecode and --landmark"
            text = f"label {name}: {' and '.join(problems)}"
            findings.append(input_warning(Reason.LABEL_LEAKAGE, text, requirement, hint, file=(tables or {}).get(name)))
    for name in statistics.fallback:
        ceiling = statistics.max_attainable.get(name)
        if ceiling is not None and ceiling <= statistics.threshold:
            value = f"{ceiling:.2f}" if shown.has_counts(name, "before", "train") else "the threshold"
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
    if rules is not None and rules.outcome.kind == "incident" and (risk.to_day is None or risk.min_days is not None or risk.keep_deaths):
        found.append("Subjects without outcome may have been followed for less than the time at risk: they count as not having had it.")
    return found
