"""The model card of a run: a Markdown file for whoever receives its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bitimely_core import evaluate, registry
from bitimely_core.evaluate.result_table import read_speed
from bitimely_core.page import rename_units
from bitimely_core.privacy import format_count, withhold_small
from bitimely_core.report.page_text import markdown_row, markdown_text
from bitimely_core.report.run_page import ORDER, baseline_values, run_facts, stamp_text
from bitimely_core.schemas.runs import FinalLosses, RunData, RunRecord, TrainSubjects
from bitimely_core.schemas.scores import Scores
from bitimely_core.store import storage

LIMITS = (
    "Not a medical device: no diagnosis or treatment may rest on its output. Valid at most for "
    "recordings or histories with the channels or codes, the rate and the kind of subjects named "
    "above; not tested on other devices, hospitals or populations, and not tested for differences "
    "between groups of people."
)
INTENDED_USE = (
    "Research on representations of clinical time series: comparing models, features for further "
    "research on data like those above."
)


KINDS = {  # kind of a run -> what the model is, what it was on its data
    "pretrain": ("Pre-trained", "Trained"),
    "finetune": ("Fine-tuned", "Fine-tuned"),
    "train": ("Trained", "Trained"),
}


def render_card(
    folder: Path, record: RunRecord, scores: Scores | None, subjects: TrainSubjects | None
) -> bytes:
    """Content of `model_card.md` of the finished run in `folder`: model, training data, scores,
    intended use. Counts only, nothing about a person.
    """
    record = record.share()
    pretraining = record.pretraining_data or ()
    kind, verb = KINDS[record.kind]
    model, version = markdown_text(record.model), markdown_text(record.versions["bitimely"])
    parts = [
        f"# {markdown_text(record.run)}",
        f"{kind} {model}, made by bitimely {version}.",
        _card_rows(run_facts(record)),
        "## Data",
        *(_card_data(data, f"{verb} on") for data in record.data),
        *(_card_data(data, "Pre-trained on") for data in pretraining),
    ]
    if subjects is not None:
        marks = subjects.marks
        number = withhold_small(len(marks)) if record.hides_counts else len(marks)
        digest = f"{storage.fingerprint(sorted(marks))[:16]}, of {format_count(number)}"
        parts.append(
            "Hash of the training subjects (pre-training and fine-tuning): "
            f"{digest}. Equal hashes, equal subjects."
        )
    parts += ["## Leakage", _card_leakage(record, scores), "## Scores", _card_scores(scores)]
    parts += ["## Caveats", _card_caveats(record, scores)]
    parts += ["## Intended use", INTENDED_USE, "## Limits", LIMITS]
    parts += ["## Training and cost", _card_cost(folder, record)]
    parts += ["## Versions", _card_rows(record.versions)]
    unit = registry.find_subject_unit(record.data[0].dataset)
    if scores and scores.intervals:
        unit = evaluate.name_unit(scores)
    licence = _card_licence([*record.data, *pretraining])
    text = "\n\n".join([*rename_units(parts, unit), "## Licence", licence])
    return f"{text}\n".encode()


def _card_line(cells: Iterable[object]) -> str:
    """A line of a Markdown table."""
    return markdown_row(map(markdown_text, cells))


def _card_rows(values: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *map(_card_line, values.items())])


def _card_data(data: RunData, verb: str) -> str:
    """Subjects and windows of each split of a training set."""
    name, split, mark = map(markdown_text, (data.name, data.split, data.fingerprint[:16]))
    lines = [
        f"{verb} {name}, split {split}, fingerprint {mark} (of windows and split):",
        "",
        "| split | subjects | windows |",
        "|---|---|---|",
    ]
    for part in sorted(data.audit, key=ORDER.index):
        counts = data.audit[part]
        cells = map(format_count, (counts.subjects, counts.windows))
        lines.append(markdown_row([markdown_text(part), *cells]))
    return "\n".join(lines)


def _card_leakage(record: RunRecord, scores: Scores | None) -> str:
    objective = markdown_text(record.settings.objective.name)
    is_stamped = record.leak_free is not None or not record.is_finetuned
    lines = [f"Objective {objective}: {stamp_text(record.leak_free)}."]
    if not is_stamped:
        lines = ["Not pre-trained."]
    if all(data.split in {"subject", "official"} for data in record.data):
        lines.append("No subject is in two splits.")
    else:
        lines.append(
            "Windows of one subject may be in several splits: scores are optimistic for new "
            "subjects."
        )
    if scores is not None:
        lines.append(
            "Subjects of the scored split that were in the training or the pre-training: "
            f"{scores.subjects_shared_with_training:,}."
        )
    return " ".join(lines)


def _card_scores(scores: Scores | None) -> str:
    """The metrics of a run with intervals and baselines."""
    if scores is None or not scores.metrics:
        return f"Not evaluated{' with a score' if scores else ''} yet."
    counted = f"{format_count(scores.n)} windows of {format_count(scores.n_subjects)} subjects"
    place = f"the {markdown_text(scores.split)} split of {markdown_text(scores.data)}"
    names = evaluate.METRICS.get(scores.task or "", scores.metrics)
    lines = [
        f"On {place}: {counted}; 95 % confidence intervals over {scores.settings.by}s.",
        "",
        "| metric | value | standard error | 95 % CI | baselines | remark |",
        "|---|---|---|---|---|---|",
        *(_card_metric(scores, name) for name in names if name in scores.metrics),
    ]
    return "\n".join(lines)


def _card_metric(scores: Scores, name: str) -> str:
    """The line of one metric."""
    metric, reached = scores.metrics[name], baseline_values(scores, name)
    value, error = (
        "–" if number is None else f"{number:.3f}" for number in (metric.value, metric.se)
    )
    interval = "–" if metric.lo is None else f"{metric.lo:.3f} to {metric.hi:.3f}"
    baselines = ", ".join(f"{baseline} {number:.3f}" for baseline, number in reached.items())
    words, remark = name.replace("_", " "), metric.undefined_reason or ""
    return _card_line((words, value, error, interval, baselines or "–", remark))


def _card_caveats(record: RunRecord, scores: Scores | None) -> str:
    caveats = dict.fromkeys([*record.notices, *(scores.remarks if scores else ())])
    lines = [f"- {markdown_text(line)}" for line in caveats]
    return "\n".join(lines) or "- none beyond the limits below"


def _card_cost(folder: Path, record: RunRecord) -> str:
    """Size, steps, device and speed of a training with its last losses."""
    final, (seconds, rate) = record.final or FinalLosses(), read_speed(folder, record)
    steps = "none: fitted at once" if record.is_method else f"{final.step:,}"
    if record.pretraining_steps:
        steps += f", after {record.pretraining_steps:,} of the pre-training"
    losses = {"loss": final.loss, "rel": final.rel}
    logged = [f"{name} {loss:.4g}" for name, loss in losses.items() if loss is not None]
    return _card_rows(
        {
            "Parameters": f"{record.parameters:,}",
            "Optimizer steps": steps,
            "Device": record.device or "not stated",
            "Seconds of training": "not logged" if seconds is None else f"about {seconds:,.0f}",
            "Windows per second": "not logged" if rate is None else f"about {rate:,.0f}",
            "Last logged training values": ", ".join(logged) or "none",
        }
    )


def _card_licence(data: Sequence[RunData]) -> str:
    """The terms of each data set that the run was trained on."""
    lines = ["Weights may be passed on only where the terms of the data allow it:", ""]
    for name in dict.fromkeys(part.dataset for part in data):
        terms = "unknown to this version"
        if name in registry.datasets:
            facts = registry.datasets[name].facts
            link = f", <{facts.url}>" if facts.url else ""
            terms = f"{markdown_text(facts.title)}, {markdown_text(facts.licence)}{link}"
        lines.append(f"- {markdown_text(name)}: {terms}")
    return "\n".join(lines)
