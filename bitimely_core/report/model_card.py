"""The model card of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bitimely_core import evaluate, registry, storage
from bitimely_core.evaluate.result_table import read_speed
from bitimely_core.page import rename_units
from bitimely_core.privacy import format_count
from bitimely_core.report.run_page import (
    ORDER,
    baseline_values,
    list_notices,
    run_facts,
    show_split,
    stamp_text,
)
from bitimely_core.report.text import markdown_text
from bitimely_core.schemas.runs import FinalLosses, RunData, RunRecord, TrainSubjects
from bitimely_core.schemas.scores import Scores


def model_card(
    record: RunRecord,
    scores: Scores | None = None,
    subjects: Sequence[str] | None = None,
    speed: tuple[float | None, float | None] = (None, None),
) -> str:
    """`model_card.md`: model, training data, scores, intended use. Counts only, nothing about a
    person.

    `subjects` are hashes of the training subjects, for their common hash; `speed` is seconds of
    training and windows per second.
    """
    tuned = record.pretraining_data or ()
    verb = "Fine-tuned" if record.is_finetuned else "Trained"
    parts = [
        f"# {markdown_text(record.run)}",
        f"{'Fine-tuned' if record.is_finetuned else 'Pre-trained'} {markdown_text(record.model)}, made by bitimely {markdown_text(record.versions['bitimely'])}.",
        _card_rows(run_facts(record)),
        "## Data",
        *(_card_data(one, f"{verb} on") for one in record.data),
        *(_card_data(one, "Pre-trained on") for one in tuned),
    ]
    if subjects is not None:
        digest = f"{storage.fingerprint(sorted(subjects))[:16]}, of {len(subjects):,}"
        parts.append(
            f"Hash of the training subjects (pre-training and fine-tuning): {digest}. Equal hashes, equal subjects."
        )
    caveats = dict.fromkeys([*list_notices(record), *(scores.remarks if scores else ())])
    parts += ["## Leakage", _card_leakage(record, scores), "## Scores", _card_scores(scores)]
    parts += [
        "## Caveats",
        "\n".join(f"- {markdown_text(line)}" for line in caveats)
        or "- none beyond the limits below",
    ]
    parts += [
        "## Intended use",
        "Research on representations of clinical time series: comparing models, features for further research on data like those above.",
        "## Limits",
        "Not a medical device: no diagnosis or treatment may rest on its output. Valid at most for recordings or histories with the channels or codes, the rate and the kind of "
        "subjects named above; not tested on other devices, hospitals or populations, and not tested for differences between groups of people.",
    ]
    final, (seconds, rate) = record.final or FinalLosses(), speed
    losses = {"loss": final.loss, "rel": final.rel}
    after = (
        f", after {record.pretraining_steps:,} of the pre-training"
        if record.pretraining_steps
        else ""
    )
    cost = {
        "Parameters": f"{record.parameters:,}",
        "Optimizer steps": f"{final.step:,}{after}",
        "Device": record.device or "not stated",
        "Seconds of training": "not logged" if seconds is None else f"about {seconds:,.0f}",
        "Windows per second": "not logged" if rate is None else f"about {rate:,.0f}",
        "Last logged training values": ", ".join(
            f"{k} {v:.4g}" for k, v in losses.items() if v is not None
        )
        or "none",
    }
    parts += ["## Training and cost", _card_rows(cost), "## Versions", _card_rows(record.versions)]
    unit = (
        evaluate.name_unit(scores)
        if scores and scores.intervals
        else registry.find_subject_unit(record.data[0].dataset)
    )
    return (
        "\n\n".join(
            [*rename_units(parts, unit), "## Licence", _card_licence([*record.data, *tuned])]
        )
        + "\n"
    )


def render_card(
    folder: Path, record: RunRecord, scores: Scores | None, subjects: TrainSubjects | None
) -> bytes:
    """Content of `model_card.md` of the finished run in `folder`."""
    return model_card(
        record, scores, None if subjects is None else subjects.marks, read_speed(folder, record)
    ).encode()


def _card_rows(values: Mapping[str, str]) -> str:
    return "\n".join(
        [
            "| | |",
            "|---|---|",
            *(
                f"| {markdown_text(key)} | {markdown_text(value)} |"
                for key, value in values.items()
            ),
        ]
    )


def _card_data(data: RunData, verb: str) -> str:
    mark = markdown_text(data.fingerprint[:16])
    head = f"{verb} {markdown_text(data.name)}, split {markdown_text(data.split)}, fingerprint {mark} (of windows and split):"
    splits = sorted(data.audit, key=ORDER.index)
    counts = (
        f"| {markdown_text(s)} | {show_split(data, s, 'subjects')} | {show_split(data, s, 'windows')} |"
        for s in splits
    )
    table = ["| split | subjects | windows |", "|---|---|---|", *counts]
    return "\n".join([head, "", *table])


def _card_leakage(record: RunRecord, scores: Scores | None) -> str:
    stamped = record.leak_free is not None or not record.is_finetuned
    by_subject = all(one.split in {"subject", "official"} for one in record.data)
    objective = f"Objective {markdown_text(record.settings.objective.name)}: {stamp_text(record.leak_free)}."
    mixed = (
        "Windows of one subject may be in several splits: scores are optimistic for new subjects."
    )
    lines = [
        objective if stamped else "Not pre-trained.",
        "No subject is in two splits." if by_subject else mixed,
    ]
    if scores is not None:
        shared = f"{scores.subjects_shared_with_training:,}"
        lines.append(
            f"Subjects of the scored split that were in the training or the pre-training: {shared}."
        )
    return " ".join(lines)


def _card_scores(scores: Scores | None) -> str:
    if scores is None or not scores.metrics:
        return f"Not evaluated{' with a score' if scores else ''} yet."
    lines = [
        "| metric | value | standard error | 95 % CI | baselines | remark |",
        "|---|---|---|---|---|---|",
    ]
    for name in [
        n for n in evaluate.METRICS.get(scores.task or "", scores.metrics) if n in scores.metrics
    ]:
        m = scores.metrics[name]
        baselines = ", ".join(
            f"{base} {value:.3f}" for base, value in baseline_values(scores, name).items()
        )
        cells = [
            name.replace("_", " "),
            *("–" if v is None else f"{v:.3f}" for v in (m.value, m.se)),
        ]
        cells += [
            "–" if m.lo is None else f"{m.lo:.3f} to {m.hi:.3f}",
            baselines or "–",
            m.undefined_reason or "",
        ]
        lines.append("| " + " | ".join(map(markdown_text, cells)) + " |")
    counted = f"{format_count(scores.n)} windows of {format_count(scores.n_subjects)} subjects"
    where = f"On the {markdown_text(scores.split)} split of {markdown_text(scores.data)}: {counted}"
    return "\n".join(
        [f"{where}; 95 % confidence intervals over {scores.settings.by}s.", "", *lines]
    )


def _card_licence(data: Sequence[RunData]) -> str:
    lines = ["Weights may be passed on only where the terms of the data allow it:", ""]
    for name in dict.fromkeys(one.dataset for one in data):
        terms = "unknown to this version"
        if name in registry.datasets:
            known = registry.datasets[name].facts
            terms = f"{markdown_text(known.title)}, {markdown_text(known.licence)}" + (
                f", <{known.url}>" if known.url else ""
            )
        lines.append(f"- {markdown_text(name)}: {terms}")
    return "\n".join(lines)
