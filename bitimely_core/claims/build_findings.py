"""Warnings and notices of a build of sequences, for the screen, the ingest report and every report
on the sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

from bitimely_core.claims.disclosure import CountDisclosure, Key
from bitimely_core.claims.sequence_choices import SequenceChoices
from bitimely_core.claims.sequence_plan import SequencePlan
from bitimely_core.claims.shortcut_baselines import ALL
from bitimely_core.errors import Finding, Reason, input_warning
from bitimely_core.schemas.tokens import SequenceStatistics, ShortcutScores

EVERY_COUNT = CountDisclosure()
NO_TABLES: Mapping[str, str] = {}
LEAKING_CODES = (
    "Labels derived from codes leak into inputs that hold them (--leakage keep, no landmark): "
    "scores measure label recovery, not prediction."
)
COMPLETE_HISTORY = (
    "Labels come from the complete history (no landmark): scores measure recognition, not "
    "prediction."
)
MATCHED_CONTROLS = (
    "Controls are matched to cases: prevalence, and with it AUPRC, calibration and predictive "
    "values, is that of the design."
)
SHORT_FOLLOW_UP = (
    "Subjects without outcome may have been followed for less than the time at risk: they count as "
    "not having had it."
)
RARE_CODES = "The few selected PheCodes are rare: see --no-select, --min-case-support, --min-codes"


def list_findings(
    statistics: SequenceStatistics,
    choices: SequenceChoices,
    disclosure: CountDisclosure = EVERY_COUNT,
    tables: Mapping[str, str] = NO_TABLES,
) -> list[Finding]:
    """Warnings of a build, without what `disclosure` withholds.

    Args:
        statistics: of the sequences.
        choices: of the build, as findings are judged by them (`SequencePlan.judged`).
        disclosure: of the counts.
        tables: label -> the table that it was read from, which a warning names.
    """
    return [
        *_find_excluded(statistics, choices, disclosure),
        *_find_leaks(statistics, choices, disclosure, tables),
        *_find_fallbacks(statistics, disclosure),
    ]


def _find_excluded(
    statistics: SequenceStatistics, choices: SequenceChoices, disclosure: CountDisclosure
) -> list[Finding]:
    """Subjects without sequence."""
    total = statistics.funnel.subjects_in
    key: Key = ("in",)
    if statistics.cohort is not None:
        last = statistics.cohort.steps[-1]
        total, key = last.left, ("left", last.reason)
    with_sequence = statistics.funnel.subjects_out
    excluded = total - with_sequence
    if not excluded:
        return []
    least = f"fewer than {choices.min_codes} {choices.min_codes_unit} of the selected PheCodes"
    hint = "Lower --min-codes" if choices.select is False else RARE_CODES
    hint = hint if excluded > with_sequence else ""
    if {("out", ALL), key} & disclosure.withheld:
        problem, count = "some subjects have no sequence", 1
    else:
        problem, count = f"{excluded} of {total} subjects have no sequence", excluded
    return [input_warning(Reason.MIN_CODES, problem, least, hint, count=count)]


def _find_leaks(
    statistics: SequenceStatistics,
    choices: SequenceChoices,
    disclosure: CountDisclosure,
    tables: Mapping[str, str],
) -> list[Finding]:
    """Labels that can be read from the input."""
    keeps_own = choices.leakage == "keep" and choices.landmark is None
    findings = []
    for name, scores in statistics.leaks.items():
        if not scores.cases[ALL] or not (_is_leaked(scores) or (keeps_own and scores.own)):
            continue
        leak = _describe_leak(scores, disclosure.get_code_score(scores, name))
        chance = scores.prevalence[ALL]
        has_chance = chance is not None and disclosure.has_counts(name, "after")
        findings.append(
            input_warning(
                Reason.LABEL_LEAKAGE,
                f"label {name}: {leak}",
                f"chance is {chance:.3f}" if has_chance else "",
                "See --leakage drop-phecode and --landmark",
                file=tables.get(name),
            )
        )
    return findings


def _describe_leak(scores: ShortcutScores, score: float | None) -> str:
    """How a label can be read; `score` of its best single code, None where it is not printed."""
    problems = []
    if scores.own:
        problems.append(f"its own codes ({', '.join(scores.own)}) are in the input")
    if scores.best and score:
        problems.append(f"the count of PheCode {scores.best.phecode} alone scores {score:.3f}")
    return " and ".join(problems or ["one code alone predicts it"])


def _is_leaked(scores: ShortcutScores) -> bool:
    """Whether one code predicts a label clearly better than chance and almost alone."""
    chance, best = scores.prevalence[ALL], scores.best.count[ALL] if scores.best else None
    return scores.leak and chance is not None and best is not None and best > chance + 0.01


def _find_fallbacks(statistics: SequenceStatistics, disclosure: CountDisclosure) -> list[Finding]:
    """Labels for which no PheCode can exceed the threshold."""
    findings = []
    for name in statistics.fallback:
        bound = statistics.max_attainable.get(name)
        if bound is None or bound > statistics.threshold:
            continue
        has_counts = disclosure.has_counts(name, "before", "train")
        value = f"{bound:.2f}" if has_counts else "the threshold"
        problem = f"label {name}: no ratio can exceed {value} at its prevalence"
        fallback = f"the threshold is {statistics.threshold:g}, so the top codes were selected"
        findings.append(Finding(Reason.CLASS_MISSING, problem, fallback, level="info"))
    return findings


def find_label_tables(plan: SequencePlan) -> dict[str, str]:
    """Label -> the table that it was read from; labels that rules make have none."""
    manifest = plan.manifest
    files = manifest.facts.get("tables", ())
    tables = [file for file in files if PurePath(file).name.lower().startswith("labels.")]
    if plan.cohort is not None or not tables:
        return {}
    made = {rule["name"] for rule in manifest.rules if manifest.ruled}
    return dict.fromkeys([name for name in manifest.names if name not in made], tables[0])


def list_notices(plan: SequencePlan) -> list[str]:
    """What the choices of a plan mean for scores."""
    notices = []
    if plan.judged.landmark is None:
        notices.append(LEAKING_CODES if plan.choices.leakage == "keep" else COMPLETE_HISTORY)
    rules = plan.cohort
    if rules is None:
        return notices
    if rules.controls is not None:
        notices.append(MATCHED_CONTROLS)
    risk = rules.time_at_risk
    is_followed = risk.to_day is not None and risk.min_days is None and not risk.keep_deaths
    is_followed |= bool(plan.choices.time_to_event)  # less is censored
    if rules.outcome.kind == "incident" and not is_followed:
        notices.append(SHORT_FOLLOW_UP)
    return notices
