"""Operations on histories of events (claims, EHR), see `registry.DataKind`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bitimely_core.cache import Cache, open_cache
from bitimely_core.claims import (
    build_findings,
    event_tokens,
    meds_export,
    new_histories,
    protected_scores,
    sequence_plan,
    tasks,
)
from bitimely_core.claims.claims_page import claims_page, open_examples
from bitimely_core.claims.claims_report import round_refusal, round_report
from bitimely_core.claims.cohorts import CohortRules, load_cohort
from bitimely_core.claims.disclosure import (
    CountDisclosure,
    flow_table,
    has_withheld_labels,
    is_open_source,
    open_disclosure,
    shortcut_table,
)
from bitimely_core.claims.ingest_claims import ingest_events, pin_options
from bitimely_core.claims.shortcut_baselines import ALL
from bitimely_core.claims.sources import recognize_layout
from bitimely_core.errors import usage_error
from bitimely_core.formats.source import Source
from bitimely_core.page import Page
from bitimely_core.privacy import EXACT, choose_counts, format_count, round_message
from bitimely_core.registry import Choices, DataKind, DatasetFacts, data_kinds
from bitimely_core.schemas.ingest_records import IngestAccount, IngestPart, IngestReport
from bitimely_core.schemas.tokens import SequenceManifest, SequenceStatistics
from bitimely_core.store.workspace import refuse_inside_workspace
from bitimely_core.tokens.sequences import MAX_EVENTS, count_splits, open_sequences
from bitimely_core.types import leave_out

PAPER_CODES = 52  # 47 PheCodes of PopHR and 5 special ids


def split_choices(options: Choices, choices: Choices | None) -> tuple[Choices, Choices | None]:
    """Options of the cache and choices of the sequences that are made with it; a split file has the
    ids of the source: an option.
    """
    if choices is None:
        return options, None
    shared: Choices = {name: choices[name] for name in ("engine", "split_file") if name in choices}
    if choices.get("cohort"):
        shared["for_cohort"] = True
    build = {name: value for name, value in choices.items() if name != "split_file"}
    return {**options, **shared}, build


def check_arguments(choices: Choices, arguments: Choices, folder: Path) -> None:
    """Refuse choices of sequences, and options of the ingest that they follow, which cannot be
    together. Raises UserError (exit 2).
    """
    names = {"split_file", "seed", "small_counts", "individual_timelines", "cohort"}
    preset, chosen = sequence_plan.parse_choices(**leave_out(choices, names))
    dated, ignored = bool(arguments.get("keep_dates")), bool(arguments.get("keep_ignored"))
    cohort = load_cohort(choices["cohort"]) if choices.get("cohort") else None
    sequence_plan.check_choices(preset, chosen, cohort, dated=dated, ignored=ignored)
    if keep_ids := arguments.get("keep_ids"):
        refuse_inside_workspace(Path(keep_ids), folder.parent.parent)
        if (arguments.get("shard") or (1, 1))[1] > 1:
            problem = "raw ids are in several processes"
            raise usage_error("--keep-ids with --shard", problem, "Ingest without --shard")


def _find_base(out: Path, dataset: str, choices: Choices) -> Path:
    """The sequences whose codes those of a task use. Raises UserError (config, exit 2) for other
    choices or no name.
    """
    base = out.with_name(dataset)
    others = [f"--{key.replace('_', '-')}" for key in choices if key not in {"task", "ids"}]
    if others or out == base:
        problem = others[0] if others else "no --name"
        expected = f"expected only --name: the choices are those of {base.name}"
        raise usage_error(problem, expected, "Give --task with another --name", field="--task")
    return base


def plan_sequences(cache: Path, out: Path, view: str = "", **choices: Any) -> Choices:
    """What `write_sequences` would make: subjects, or with `task` prediction times. Raises
    UserError: as that.
    """
    opened = open_cache(cache, verify=False)
    if "task" in choices:
        base = _find_base(out, opened.dataset, choices)
        rows = tasks.read_task_labels(choices["task"])
        return {"folder": str(out), "base": str(base), "rows": rows.height}
    plan = sequence_plan.resolve_plan(opened, **choices)
    result: Choices = {"folder": str(out), "options": plan.options, "subjects": None}
    # beside the number of sequences it shows how few have none
    exact = {"subjects": opened.cohort().height}
    return {**result, **(exact if plan.small_counts else {EXACT: exact})}


def write_sequences(
    cache: str | Path | Cache,
    out: Path,
    *,
    view: str = "",
    verify: bool = True,
    force_new: bool = False,
    **choices: Any,
) -> None:
    """Sequences of a cache of events, with the choices of `sequence_plan.resolve_plan`.

    With `task`, a folder of MEDS labels (and `ids`): up to its prediction times, of the codes of
    the sequences called as the data set.

    Raises UserError: as `resolve_plan`, `event_tokens.write_sequences` and
    `tasks.write_task_sequences`.
    """
    opened = open_cache(cache, verify=False) if isinstance(cache, str | Path) else cache
    how: Choices = {"verify": verify, "force_new": force_new}
    with round_refusal():
        if "task" in choices:
            base = open_sequences(_find_base(out, opened.dataset, choices), verify)
            tasks.write_task_sequences(opened, base, out=out, **how, **choices)
        else:
            plan = sequence_plan.resolve_plan(opened, **choices)
            event_tokens.write_sequences(plan, out, **how)


def write_extras(cache: Path, folder: Path) -> Page | None:
    """An export as MEDS where dates are true; returns the page of the sequences. Those of a task
    have neither.
    """
    if SequenceManifest.read(folder).base:
        return None
    opened = open_cache(cache, verify=False)
    if opened.events_manifest.clock == "calendar":
        meds_export.write_meds(folder / "meds", opened, open_sequences(folder, verify=False))
    return claims_page(open_examples(folder))


def summarize_sequences(folder: Path) -> Choices:
    """Counts, notices, findings, audit and shortcut baselines of the sequences in `folder`, which
    may not fit into memory; None: withheld, but not in `exact`.
    """
    disclosure = open_disclosure(folder)
    summary = _summarize(folder, disclosure)
    if not disclosure.exact:
        summary[EXACT] = _summarize(folder, CountDisclosure())
    return summary


def _summarize(folder: Path, disclosure: CountDisclosure) -> Choices:
    """The summary of sequences with what may be printed of them."""
    manifest = SequenceManifest.read(folder)
    statistics = None if manifest.base else SequenceStatistics.load(folder / "statistics.json")
    audit, exact = count_splits(folder), disclosure.exact
    windows = disclosure.get(sum(split["windows"] for split in audit.values()), "out", ALL)
    summary: Choices = {
        "windows": windows,
        "events": manifest.events,
        "codes": manifest.files["vocab.parquet"].rows,
        "task": manifest.options.task,
        "class_names": manifest.class_names,
        "split": manifest.options.split,
        "fingerprint": manifest.manifest_sha256,
        "notices": manifest.notices if exact else list(map(round_message, manifest.notices)),
        "small_counts": "shown" if exact else "withheld",
        "findings": _list_findings(manifest, statistics, disclosure),
        "audit": {part: _protect_split(part, row, disclosure) for part, row in audit.items()},
        "honesty": [],
    }
    if statistics is not None:
        summary["honesty"] = shortcut_table(statistics, disclosure)
        summary["selected"] = statistics.selected
        if statistics.cohort is not None:
            summary["cohort"] = [row._asdict() for row in flow_table(statistics, disclosure)]
    return summary


def _protect_split(part: str, counts: Choices, disclosure: CountDisclosure) -> Choices:
    """The counts of a split as they are printed."""
    return {
        **{kind: disclosure.get(counts[kind], "out", part) for kind in ("subjects", "windows")},
        "classes": {
            label: disclosure.get(n, label, "after", part, "cases")
            for label, n in counts["classes"].items()
        },
    }


def _list_findings(
    manifest: SequenceManifest, statistics: SequenceStatistics | None, disclosure: CountDisclosure
) -> list[Choices]:
    """The findings of a build as they are printed."""
    if disclosure.exact:
        return [finding.model_dump() for finding in manifest.findings]
    if statistics is None:
        return [finding.round_counts().model_dump() for finding in manifest.findings]
    stored = manifest.options.cohort
    choices = sequence_plan.judge_choices(
        sequence_plan.read_choices(manifest.options),
        CohortRules.model_validate(stored) if stored else None,
    )
    findings = build_findings.list_findings(statistics, choices, disclosure)
    # those of the build are stored in the same order
    files = (finding.file for finding in manifest.findings)
    return [replace(finding, file=next(files, None)).as_dict() for finding in findings]


def protect_report(report: Choices) -> Choices:
    """An ingest report as it is shared: rounded, unless its people are synthetic or its sequences
    are built with `small_counts`.
    """
    if "rows" not in report:
        return report
    path = Path("ingest_report.json")
    if "parts_missing" in report:
        part = IngestPart.parse(report, path)
        return report if _is_open(part) else round_report(part).to_json()
    account = IngestReport.parse(report, path)
    is_open = _is_open(account)
    if account.tokens:
        tokens = choose_counts(account.tokens, owner=False)
        is_open = tokens["small_counts"] == "shown"
        account = account.model_copy(update={"tokens": tokens})
        report = {**report, "tokens": tokens}
    return report if is_open else round_report(account).to_json()


def _is_open(account: IngestAccount) -> bool:
    """Whether the people of an ingest are synthetic."""
    return is_open_source(account.dataset, account.options.get("source"))


def describe_sequences(summary: Choices) -> tuple[str, str]:
    """Number and place of new sequences, and the next verb."""
    text = (
        f"{format_count(summary['windows'])} sequences, {summary['events']:,} events of "
        f"{summary['codes']} PheCodes in {summary['folder']}"
    )
    is_labelled = bool(summary["honesty"]) or "selected" not in summary
    return text, "finetune RUN" if is_labelled else "pretrain --preset 3m"


def estimate_sequences(
    facts: DatasetFacts, view: str, cache: Cache | None, window: int | None, rate: float | None
) -> Choices:
    """Subjects (None: unknown), length and vocabulary of the sequences of a cache, else of the
    paper.
    """
    subjects = cache.events_manifest.funnel.subjects if cache else None
    return {
        "windows": subjects or facts.paper.get("subjects"),
        "channels": 1,
        "length": MAX_EVENTS,
        "codes": PAPER_CODES,
    }


def recognize_source(source: Source) -> Choices:
    """The layout that the files of a source show, if one."""
    layout = recognize_layout(source)
    return {"source": layout} if layout else {}


KIND = DataKind(
    section="build",
    option_groups=("Claims: reading", "Claims: sequences"),
    no_folds="Split claims with --split-file at ingest",
    split_choices=split_choices,
    check_arguments=check_arguments,
    recognize_source=recognize_source,
    pin_options=pin_options,
    ingest=ingest_events,
    protect_report=protect_report,
    plan_tokens=plan_sequences,
    write_tokens=write_sequences,
    write_extras=write_extras,
    open_tokens=open_sequences,
    summarize_tokens=summarize_sequences,
    describe_tokens=describe_sequences,
    estimate_size=estimate_sequences,
    protect_scores=protected_scores.protect_scores,
    has_withheld_labels=has_withheld_labels,
    write_predictions=tasks.write_predictions,
    read_subjects=new_histories.read_subjects,
)

data_kinds.add("events", KIND)
