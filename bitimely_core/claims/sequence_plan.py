"""Choices for the sequences of cached claims, checked against the cache and against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import polars as pl

from bitimely_core.cache import Cache
from bitimely_core.claims import code_values, cohorts, disclosure, engines
from bitimely_core.claims.cohorts import CohortRules
from bitimely_core.claims.event_labels import Landmark
from bitimely_core.claims.label_rules import RuleTable
from bitimely_core.claims.sequence_choices import PRESETS, SequenceChoices, parse_landmark
from bitimely_core.errors import check_choice, usage_error
from bitimely_core.privacy import SMALL
from bitimely_core.registry import Choices
from bitimely_core.schemas.ingest_records import EventsManifest
from bitimely_core.schemas.tokens import HistoryPreparation, SequenceOptions
from bitimely_core.store import storage
from bitimely_core.store.records import has_result
from bitimely_core.tokens.sequences import HISTORIES
from bitimely_core.tokens.splits import EXTERNAL
from bitimely_core.types import drop_none

CHANGEABLE = {"landmark", "landmark_date", "min_codes"}  # beside --vocabulary
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


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """Validated choices for the sequences of a cache."""

    cache: Cache
    preset: str
    choices: SequenceChoices
    split_file: str = ""
    engine: str = "polars"
    small_counts: bool = False
    individual_timelines: bool = False
    cohort: CohortRules | None = None
    fitted: pl.DataFrame | None = None  # of numbers, `code_values.fit_values`
    # PheCodes that the data have for codes of the cohort's outcome
    defining: frozenset[str] = frozenset()
    by_default: bool = False  # nobody asked for the selection of codes and subjects
    # of the run whose vocabulary, code map and rules are used
    prepared: HistoryPreparation | None = None

    @property
    def names(self) -> list[str]:
        """The labels: those of the cache, of the run, or the outcome of the cohort."""
        if self.cohort is not None:
            return [self.cohort.outcome.rule]
        if self.prepared is not None:
            return list(self.prepared.class_names)
        if not self.choices.time_to_event:
            return self.manifest.names
        made = {rule["name"] for rule in self.manifest.rules}  # only these have onsets
        return [name for name in self.manifest.names if name in made]

    @property
    def floor(self) -> int:
        """Training subjects that a code that is not ICD needs."""
        return 1 if self.small_counts else SMALL

    @property
    def judged(self) -> SequenceChoices:
        """The choices by which findings are judged."""
        return judge_choices(self.choices, self.cohort)

    @property
    def rules(self) -> Sequence[RuleTable]:
        """The label rules, for the leakage policies."""
        return self.manifest.rules if self.prepared is None else self.prepared.rules

    @property
    def rule_phecodes(self) -> frozenset[str]:
        """The PheCodes of their code sets and of the outcome."""
        defining = self.defining.union(*self.manifest.defining.values())
        return defining if self.prepared is None else frozenset(self.prepared.defining)

    @property
    def external(self) -> bool:
        """Whether the subjects are others than those of the training of `prepared`."""
        return self.prepared is not None and self.prepared.cache != self.manifest.manifest_sha256

    @property
    def manifest(self) -> EventsManifest:
        """The manifest of the cache."""
        return self.cache.events_manifest

    @property
    def options(self) -> dict[str, object]:
        """The resolved choices, as the manifest keeps them."""
        task = "survival" if self.choices.time_to_event else "multilabel"
        return {
            "dataset": self.cache.dataset,
            "view": "",
            "task": task if self.names else "none",
            "split": self._describe_split(),
            "seed": self.manifest.seed,
            "normalise": "none",
            "preset": self.preset,
            "split_file": storage.hash_file(Path(self.split_file)) if self.split_file else None,
            **asdict(self.choices),
            "asked": None,
            "small_counts": self.small_counts,
            "individual_timelines": self.individual_timelines,
            "cohort": self.cohort and self.cohort.model_dump(mode="json", exclude_none=True),
            "prepared": self.prepared and storage.fingerprint(self.prepared.to_json()),
        }

    def _describe_split(self) -> str:
        if self.split_file:
            return "official"
        return EXTERNAL if self.external else self.manifest.split


def judge_choices(choices: SequenceChoices, cohort: CohortRules | None) -> SequenceChoices:
    """The choices by which findings are judged: labels of an incident outcome lie after the input,
    as under a landmark.
    """
    if cohort is None or cohort.outcome.kind != "incident":
        return choices
    return replace(choices, landmark=Landmark())


def read_choices(options: SequenceOptions) -> SequenceChoices:
    """The choices of sequences from the record of their options."""
    stored = options.model_dump()
    if stored["landmark"]:
        stored["landmark"] = Landmark(**stored["landmark"])
    names = {field.name for field in fields(SequenceChoices)}
    return SequenceChoices(**{name: stored[name] for name in names & stored.keys()})


def resolve_plan(
    cache: Cache,
    *,
    preset: str | None = None,
    seed: int | None = None,
    split_file: str | Path | None = None,
    engine: str = "polars",
    small_counts: bool | None = None,
    individual_timelines: bool = False,
    cohort: str | Path | None = None,
    vocabulary: str | Path | None = None,
    **choices: Any,
) -> SequencePlan:
    """The choices of a build, checked against the cache.

    Args:
        cache: of claims.
        preset: paper, original or strict.
        seed: must be that of the ingest.
        split_file: csv or Parquet with subject_id (as in subjects.parquet) and split.
        engine: polars or spark, with the same result.
        small_counts: what is made to be shared shows counts below 11, for people who have
            consented; None: where the people are synthetic.
        individual_timelines: the page draws sequences of single subjects.
        cohort: a shipped definition or a file of one: its subjects up to their index days, with its
            outcome as the label.
        vocabulary: folder of a run or export: its vocabulary, code map and choices are used.
        choices: fields of `choices.SequenceChoices`, hyphens or underscores in their values; None:
            those of the preset. landmark: `DAYS[,GAP,HORIZON]`; landmark_date: YYYY-MM-DD instead
            of DAYS, which needs a cache with dates.

    Raises:
        UserError: config or unknown_name (exit 2).
    """
    prepared = fitted = None
    if vocabulary is None:
        name, chosen = parse_choices(preset=preset, engine=engine, **choices)
    else:
        prepared = load_preparation(Path(vocabulary))
        name, chosen = prepared.options.preset, change_choices(prepared, preset=preset, **choices)
        fitted = load_fitted(prepared)
    has_landmark = bool(choices.get("landmark") or choices.get("landmark_date"))
    rules = _find_cohort(cohort, prepared, is_replaced=has_landmark)
    if small_counts is None:
        layout = cache.events_manifest.settings.options.get("source")
        small_counts = disclosure.is_open_source(cache.dataset, layout)
    is_selected = any(choices.get(option) is not None for option in SELECTING)
    plan = SequencePlan(
        cache=cache,
        preset=name,
        choices=chosen,
        split_file=str(split_file or ""),
        engine=engine,
        small_counts=small_counts,
        individual_timelines=individual_timelines,
        cohort=rules,
        by_default=preset is None and rules is None and not is_selected and prepared is None,
        prepared=prepared,
        fitted=fitted,
    )
    _check_plan(plan, seed)
    return plan


def load_preparation(folder: Path) -> HistoryPreparation:
    """What a run or export in `folder` keeps of its histories. Raises UserError: config (exit 2)
    for a run on recordings, integrity (5).
    """
    path = folder / HISTORIES
    if not has_result(path):
        raise usage_error(
            f"{folder.name} reads no histories of events",
            "expected a finished run on claims",
            "See: bitimely list runs",
            field="--vocabulary",
        )
    return HistoryPreparation.load(path)


def load_fitted(prepared: HistoryPreparation) -> pl.DataFrame | None:
    """The cut points and moments of numbers, if the run reads them."""
    if prepared.values is None:
        return None
    return pl.DataFrame(prepared.values, schema=code_values.FITTED)


def change_choices(prepared: HistoryPreparation, **changes: Any) -> SequenceChoices:
    """The choices of a run with other index days (landmark, landmark_date) or other min_codes.

    Raises UserError (config, exit 2) for other changes.
    """
    changed = drop_none(changes)
    for name in changed.keys() - CHANGEABLE:
        raise usage_error(
            "beside --vocabulary",
            "expected the choices of the run",
            "Leave it out",
            field=f"--{name.replace('_', '-')}",
        )
    landmark, date = changed.pop("landmark", None), changed.pop("landmark_date", None)
    if landmark or date:
        changed["landmark"] = _parse_landmark(landmark, date)
    return replace(read_choices(prepared.options), **changed)


def _find_cohort(
    cohort: str | Path | None, prepared: HistoryPreparation | None, *, is_replaced: bool
) -> CohortRules | None:
    """The cohort that is asked for, else that of the run, unless a landmark replaces its days."""
    if cohort is not None:
        return cohorts.load_cohort(cohort)
    if prepared is None or is_replaced or not prepared.options.cohort:
        return None
    return CohortRules.model_validate(prepared.options.cohort)


def _check_plan(plan: SequencePlan, seed: int | None) -> None:
    """Raises UserError (config, exit 2) for choices that the cache cannot serve."""
    manifest, chosen = plan.manifest, plan.choices
    dated, options = manifest.clock == "calendar", manifest.settings.options
    ignored = bool(options.get("keep_ignored"))
    check_choices(plan.preset, chosen, plan.cohort, dated=dated, ignored=ignored)
    if seed is not None and seed != manifest.seed:
        expected = f"expected {manifest.seed}, the seed of the cache"
        hint = "Ingest again with that --seed, or give --split-file"
        raise usage_error(f"seed {seed}", expected, hint, field="--seed")
    _check_times(plan)
    _check_labels(plan)
    if chosen.values != "none" and options.get("codes") != "all":
        problem, hint = f"--values {chosen.values}", "Ingest MEDS or OMOP with --codes all"
        raise usage_error(problem, "this cache has no codes with numbers", hint, field="--values")
    if chosen.select is True and not plan.names and plan.prepared is None:
        raise usage_error(
            "selection by prevalence ratio without any label",
            "expected rules or label columns",
            "Give --no-select",
        )


def _check_labels(plan: SequencePlan) -> None:
    """Refuse data without a label of the run. Raises UserError (config, exit 2)."""
    if plan.prepared is None or plan.cohort is not None:
        return
    names = ", ".join(plan.manifest.names) or "none"
    for name in plan.names:
        if name not in plan.manifest.names:
            raise usage_error(
                f"the data have no label {name}",
                f"the run predicts it, and the labels here are: {names}",
                "Ingest with the --rules or --label-column of the run",
                field="--vocabulary",
            )


def parse_choices(
    *,
    preset: str | None = None,
    landmark: str | None = None,
    landmark_date: str | None = None,
    engine: str = "polars",
    **choices: Any,
) -> tuple[str, SequenceChoices]:
    """Preset and choices as `resolve_plan` takes them, checked by themselves. Raises UserError
    (config or unknown_name, exit 2).
    """
    preset = preset or "paper"
    check_choice("preset", preset, PRESETS)
    check_choice("engine", engine, engines.ENGINES)
    changed: Choices = {
        name: value.replace("-", "_") if isinstance(value, str) else value
        for name, value in choices.items()
        if value is not None
    }
    if landmark or landmark_date:
        changed["landmark"] = _parse_landmark(landmark, landmark_date)
    names = [field.name for field in fields(SequenceChoices)]
    for name in changed:
        check_choice("choice of sequences", name, names)
    try:
        return preset, replace(PRESETS[preset], **changed)
    except ValueError as error:
        raise usage_error(str(error)) from error


def check_choices(
    preset: str, chosen: SequenceChoices, cohort: CohortRules | None, *, dated: bool, ignored: bool
) -> None:
    """Refuse a cohort beside a landmark, and choices that a cache without dates, or without the
    PheCodes marked Ignore, cannot serve. Raises UserError (config, exit 2).
    """
    landmark = chosen.landmark
    if cohort is not None and landmark is not None:
        raise usage_error(
            "--cohort with a landmark", "both set index days", "Give one of them", field="--cohort"
        )
    needing = {
        "--time calendar-month": chosen.time == "calendar_month",
        "--dedupe month": chosen.dedupe == "month",
        "--landmark-date": landmark is not None and landmark.day is not None,
        '--cohort with index.at = "date"': cohort is not None and cohort.index.at == "date",
    }
    for option, is_chosen in needing.items():
        if is_chosen and not dated:
            problem = f"{option} needs true dates"
            raise usage_error(problem, "this cache has none", "Ingest with --keep-dates")
    if preset == "original" and not ignored:
        raise usage_error(
            "preset original keeps the PheCodes marked Ignore",
            "this cache has left them out",
            "Ingest pophr with --keep-ignored, or choose another --preset",
        )


def _check_times(plan: SequencePlan) -> None:
    """Refuse times to event without onsets, or beyond the time at risk. Raises UserError (config,
    exit 2).
    """
    if not (horizons := plan.choices.time_to_event):
        return
    field, last, end = "--time-to-event", horizons[-1], _count_days_at_risk(plan, horizons[-1])
    if last > end:
        raise usage_error(
            f"a horizon of {last} days, and {end} at risk",
            "expected horizons within it",
            "Give --landmark DAYS,GAP,HORIZON, or an incident --cohort",
            field=field,
        )
    if not plan.names or (plan.cohort is None and not plan.manifest.ruled):
        problem = "time to event of labels that no rule makes"
        raise usage_error(problem, "expected days of onset", "Ingest with --rules", field=field)


def _count_days_at_risk(plan: SequencePlan, horizon: int) -> int:
    """Days at risk of the labels; where nothing ends them, `horizon`."""
    if plan.cohort is None:
        return plan.choices.landmark.horizon_days if plan.choices.landmark else 0
    if plan.cohort.outcome.kind == "prevalent":
        return 0
    risk = plan.cohort.time_at_risk
    return horizon if risk.to_day is None else risk.to_day - risk.from_day + 1


def _parse_landmark(text: str | None, date: str | None) -> Landmark | None:
    """`DAYS[,GAP,HORIZON]` or a date as a landmark. Raises UserError (config, exit 2)."""
    names = ("date" if date else "landmark_days", "gap_days", "horizon_days")
    try:
        numbers = list(map(int, text.split(","))) if text else []
        values = [date, *numbers] if date else numbers
        if len(values) not in (1, 3):
            raise ValueError(f"found {text!r}")
        return parse_landmark(dict(zip(names, values, strict=False)))
    except ValueError as error:
        expected = "expected --landmark DAYS[,GAP,HORIZON], or --landmark-date with --landmark "
        raise usage_error(str(error), f"{expected}GAP,HORIZON") from error
