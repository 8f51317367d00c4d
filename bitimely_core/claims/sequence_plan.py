"""Choices for the sequences of cached claims, checked against the cache and against each other."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import polars as pl

from bitimely_core import storage
from bitimely_core.cache import Cache
from bitimely_core.claims import cohorts, engines
from bitimely_core.claims.choices import PRESETS, SequenceChoices, parse_landmark
from bitimely_core.claims.cohorts import CohortRules
from bitimely_core.claims.labels import Landmark
from bitimely_core.errors import check_choice, unknown_name_error, usage_error
from bitimely_core.privacy import SMALL
from bitimely_core.schemas.ingest import EventsManifest

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
    split_file: str
    engine: str
    small_counts: bool = False
    individual_timelines: bool = False
    cohort: CohortRules | None = None
    fitted: pl.DataFrame | None = None  # of numbers, `code_values.fit_values`
    # PheCodes that the data have for codes of the cohort's outcome
    defining: frozenset[str] = frozenset()
    by_default: bool = False  # nobody asked for the selection of codes and subjects

    @property
    def names(self) -> list[str]:
        """The labels: those of the cache, or the outcome of the cohort."""
        if self.cohort is not None:
            return [self.cohort.outcome.rule]
        made = {rule["name"] for rule in self.manifest.rules}  # only these have onsets
        return [
            name for name in self.manifest.names if not self.choices.time_to_event or name in made
        ]

    @property
    def floor(self) -> int:
        """Training subjects that a code that is not ICD needs."""
        return 1 if self.small_counts else SMALL

    @property
    def judged(self) -> SequenceChoices:
        """The choices by which findings are judged: labels of an incident outcome lie after the
        input, as under a landmark.
        """
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
            "task": ("survival" if self.choices.time_to_event else "multilabel")
            if self.names
            else "none",
            "split": "official" if self.split_file else self.manifest.split,
            "seed": self.manifest.seed,
            "normalise": "none",
            "preset": self.preset,
            "split_file": storage.hash_file(Path(self.split_file)) if self.split_file else None,
            **asdict(self.choices),
            "asked": None,
            "small_counts": self.small_counts,
            "individual_timelines": self.individual_timelines,
            "cohort": self.cohort.model_dump(mode="json", exclude_none=True)
            if self.cohort
            else None,
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
        engine: polars or spark, with the same result.
        small_counts: pages and messages show counts below 11: for synthetic or consented data.
        individual_timelines: the page draws sequences of single subjects.
        cohort: a shipped definition or a file of one: its subjects up to their index days, with its
            outcome as the label.
        choices: fields of `choices.SequenceChoices`, hyphens or underscores in their values; None:
            those of the preset.

    Raises:
        UserError: config or unknown_name (exit 2).
    """
    preset_given = preset
    preset, chosen = parse_choices(
        preset=preset, landmark=landmark, landmark_date=landmark_date, engine=engine, **choices
    )
    plan = SequencePlan(
        cache=cache, preset=preset, choices=chosen, split_file=str(split_file or ""), engine=engine
    )
    by_default = (
        preset_given is None
        and cohort is None
        and all(choices.get(name) is None for name in SELECTING)
    )
    plan = replace(
        plan,
        small_counts=small_counts,
        individual_timelines=individual_timelines,
        by_default=by_default,
    )
    manifest = plan.manifest
    if cohort is not None:
        plan = replace(plan, cohort=cohorts.load_cohort(cohort))
        check_cohort(plan.cohort, chosen, dated=manifest.clock == "calendar")
    check_choices(
        preset,
        chosen,
        dated=manifest.clock == "calendar",
        ignored=bool(manifest.settings.options.get("keep_ignored")),
    )
    if seed is not None and seed != manifest.seed:
        expected = f"expected {manifest.seed}, the seed of the cache"
        raise usage_error(
            f"seed {seed}",
            expected,
            "Ingest again with that --seed, or give --split-file",
            field="--seed",
        )
    check_times(plan)
    if chosen.values != "none" and manifest.settings.options.get("codes") != "all":
        hint = "Ingest MEDS or OMOP with --codes all"
        raise usage_error(
            f"--values {chosen.values}",
            "this cache has no codes with numbers",
            hint,
            field="--values",
        )
    if chosen.select is True and not plan.names:
        raise usage_error(
            "selection by prevalence ratio without any label",
            "expected rules or label columns",
            "Give --no-select",
        )
    return plan


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
    given: dict[str, Any] = {
        k: v.replace("-", "_") if isinstance(v, str) else v
        for k, v in choices.items()
        if v is not None
    }
    if landmark or landmark_date:
        given["landmark"] = _parse_landmark(landmark, landmark_date)
    names = [field.name for field in fields(SequenceChoices)]
    if odd := next((name for name in given if name not in names), None):
        raise unknown_name_error("choice of sequences", odd, names)
    try:
        return preset, replace(PRESETS[preset], **given)
    except ValueError as error:
        raise usage_error(str(error)) from error


def check_choices(preset: str, chosen: SequenceChoices, *, dated: bool, ignored: bool) -> None:
    """Refuse choices that a cache without dates, or without the PheCodes marked Ignore, cannot
    serve. Raises UserError (config, exit 2).
    """
    if not dated:
        needing = ["--time calendar-month"] * (chosen.time == "calendar_month") + [
            "--dedupe month"
        ] * (chosen.dedupe == "month")
        needing += ["--landmark-date"] * (
            chosen.landmark is not None and chosen.landmark.day is not None
        )
        if needing:
            raise usage_error(
                f"{needing[0]} needs true dates", "this cache has none", "Ingest with --keep-dates"
            )
    if preset == "original" and not ignored:
        hint = "Ingest pophr with --keep-ignored, or choose another --preset"
        raise usage_error(
            "preset original keeps the PheCodes marked Ignore", "this cache has left them out", hint
        )


def check_times(plan: SequencePlan) -> None:
    """Refuse times to event without onsets, or beyond the time at risk. Raises UserError (config,
    exit 2).
    """
    if not (days := plan.choices.time_to_event):
        return
    field = "--time-to-event"
    if plan.cohort is None:
        end = plan.choices.landmark.horizon_days if plan.choices.landmark else None
    else:
        risk = plan.cohort.risk or cohorts.CohortRisk()
        end = (
            None
            if plan.cohort.outcome.kind == "prevalent"
            else (risk.to_day or days[-1] + risk.from_day) - risk.from_day + 1
        )
    if end is None or days[-1] > end:
        found = (
            "no time at risk" if end is None else f"a horizon of {days[-1]} days, and {end} at risk"
        )
        raise usage_error(
            found,
            "expected horizons within it",
            "Give --landmark DAYS,GAP,HORIZON, or an incident --cohort",
            field=field,
        )
    if not plan.names or (plan.cohort is None and not plan.manifest.ruled):
        raise usage_error(
            "time to event of labels that no rule makes",
            "expected days of onset",
            "Ingest with --rules",
            field=field,
        )


def check_cohort(cohort: CohortRules | None, chosen: SequenceChoices, *, dated: bool) -> None:
    """Refuse a cohort beside a landmark, or with a calendar day in a cache without dates. Raises
    UserError (config, exit 2).
    """
    if cohort is not None and chosen.landmark is not None:
        raise usage_error(
            "--cohort with a landmark", "both set index days", "Give one of them", field="--cohort"
        )
    if cohort is not None and cohort.index.at == "date" and not dated:
        raise usage_error(
            '--cohort with index.at = "date" needs true dates',
            "this cache has none",
            "Ingest with --keep-dates",
        )


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
        return parse_landmark(given)
    except ValueError as error:
        expected = (
            "expected --landmark DAYS[,GAP,HORIZON], or --landmark-date with --landmark GAP,HORIZON"
        )
        raise usage_error(str(error), expected) from error
