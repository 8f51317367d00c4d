"""The model card of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitimely_core import evaluate as scoring
from bitimely_core import registry, storage
from bitimely_core.evaluate.result_table import read_speed
from bitimely_core.report.text import markdown_text
from bitimely_core.run import read_run

if TYPE_CHECKING:
    pass
from bitimely_core.report.run_page import ORDER, baseline_values, run_facts, stamp_text


def model_card(body: dict[str, Any], scores: dict[str, Any] | None = None, subjects: list[str] | None = None) -> str:
    """`model_card.md`: what the model is, what it saw, how it scored, what it may be used for. Counts alone, nothing about a person.

    Args:
        body: run.json.
        scores: scores.json, where the run has been evaluated.
        subjects: marks of the training subjects (`train_subjects.json`), for their hash.
    """
    run, kind = markdown_text(body["run"]), "Pre-trained" if body["kind"] == "pretrain" else "Fine-tuned"
    tuned = body.get("pretraining_data") or []
    parts = [
        f"# {run}",
        f"{kind} {markdown_text(body['model'])}, made by bitimely {body['versions']['bitimely']}.",
        _card_rows(run_facts(body)),
    ]
    parts += ["## Data", *(_card_data(one, "Trained on" if body["kind"] == "pretrain" else "Fine-tuned on") for one in body["data"])]
    parts += [_card_data(one, "Pre-trained on") for one in tuned]
    if subjects is not None:
        parts.append(
            f"Hash of the training subjects (pre-training and fine-tuning): {storage.fingerprint(sorted(subjects))[:16]}, of {len(subjects):,}. Equal hashes, equal subjects."
        )
    parts += ["## Leakage", _card_leakage(body, scores), "## Scores", _card_scores(scores)]
    parts += [
        "## Know this",
        "\n".join(f"- {markdown_text(line)}" for line in dict.fromkeys([*body["notices"], *((scores or {}).get("remarks") or [])]))
        or "- nothing beyond the limits below",
    ]
    parts += [
        "## Intended use",
        "Research on representations of clinical time series: comparing models, features for further research on data like those above.",
        "## Limits",
        "Not a medical device: no diagnosis or treatment may rest on its output. Valid at most for recordings or histories with the channels or codes, the rate and the kind of "
        "subjects named above; not tested on other devices, hospitals or populations, and not tested for differences between groups of people.",
    ]
    final, (seconds, rate) = body.get("final") or {}, (body.get("cost") or {}).get("seconds_and_speed", (None, None))
    numbers = ", ".join(f"{k} {final[k]:.4g}" for k in ("loss", "rel") if final.get(k) is not None) or "none"
    cost = {
        "Parameters": f"{body['parameters']:,}",
        "Optimizer steps": f"{final.get('step', 0):,}"
        + (f", after {body['pretraining_steps']:,} of the pre-training" if body.get("pretraining_steps") else ""),
        "Device": str(body.get("device", "not stated")),
        "Seconds of training": "not logged" if seconds is None else f"about {seconds:,.0f}",
        "Windows a second": "not logged" if rate is None else f"about {rate:,.0f}",
        "Last logged training values": numbers,
    }
    parts += ["## Training and cost", _card_rows(cost), "## Versions", _card_rows(body["versions"])]
    return "\n\n".join([*parts, "## Licence", _card_licence([*body["data"], *tuned])]) + "\n"


def write_card(folder: Path) -> None:
    """Write `model_card.md` of a finished run from what stands in its folder."""
    body = read_run(folder)
    found = {name: json.loads(path.read_bytes()) for name in ("scores", "train_subjects") if (path := folder / f"{name}.json").is_file()}
    body["cost"] = {"seconds_and_speed": read_speed(folder, body)}
    storage.write_bytes(
        folder / "model_card.md", model_card(body, found.get("scores"), found.get("train_subjects", {}).get("marks")).encode()
    )


def _card_rows(values: dict[str, Any]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {markdown_text(key)} | {markdown_text(value)} |" for key, value in values.items())])


def _card_data(data: dict[str, Any], verb: str) -> str:
    lines = ["| split | subjects | windows |", "|---|---|---|"]
    lines += [
        f"| {split} | {a['subjects']:,} | {a['windows']:,} |"
        for split, a in sorted(data["audit"].items(), key=lambda pair: ORDER.index(pair[0]))
    ]
    return (
        f"{verb} {markdown_text(data['name'])}, split {markdown_text(data['split'])}, fingerprint {data['fingerprint'][:16]} (it names windows and split):\n\n"
        + "\n".join(lines)
    )


def _card_leakage(body: dict[str, Any], scores: dict[str, Any] | None) -> str:
    name = body["settings"]["objective"]["name"]
    lines = [
        f"Objective {markdown_text(name)}: {stamp_text(body['leak_free'])}."
        if body.get("leak_free") is not None or body["kind"] == "pretrain"
        else "Not pre-trained."
    ]
    whole = all(one["split"] in {"subject", "official"} for one in body["data"])
    lines.append(
        "No subject is in two splits."
        if whole
        else "Windows of one subject may be in several splits: scores are too good for new subjects."
    )
    if scores is not None and scores.get("subjects_shared_with_training") is not None:
        n = scores["subjects_shared_with_training"]
        lines.append(f"Subjects of the scored split that were in the training or the pre-training: {n:,}.")
    return " ".join(lines)


def _card_scores(scores: dict[str, Any] | None) -> str:
    if scores is None or not scores["metrics"]:
        return f"Not evaluated{' with a score' if scores else ''} yet."
    lines = ["| metric | value | standard error | 95 % interval | baselines | remark |", "|---|---|---|---|---|---|"]
    for name in [n for n in scoring.METRICS.get(scores.get("task", ""), scores["metrics"]) if n in scores["metrics"]]:
        m = scores["metrics"][name]
        cells = [name.replace("_", " "), "–" if m["value"] is None else f"{m['value']:.3f}", "–" if m["se"] is None else f"{m['se']:.3f}"]
        cells.append("–" if m["lo"] is None else f"{m['lo']:.3f} to {m['hi']:.3f}")
        cells += [
            ", ".join(f"{base} {value:.3f}" for base, value in baseline_values(scores, name).items()) or "–",
            m["undefined_reason"] or "",
        ]
        lines.append("| " + " | ".join(map(markdown_text, cells)) + " |")
    words = (
        f"On the {scores['split']} split of {markdown_text(scores['data'])}: {scores['n']:,} windows of {scores['n_subjects']:,} subjects; "
        f"{scores['settings']['bootstrap']:,} resamples of {scores['settings']['by']}s."
    )
    return words + "\n\n" + "\n".join(lines)


def _card_licence(data: list[dict[str, Any]]) -> str:
    registry.load_members("bitimely_core.datasets")
    lines = []
    for name in dict.fromkeys(one["dataset"] for one in data):
        known = registry.datasets[name].facts if name in registry.datasets else None
        lines.append(
            f"- {markdown_text(name)}: "
            + (
                f"{markdown_text(known.title)}, {markdown_text(known.licence)}" + (f", <{known.url}>" if known.url else "")
                if known
                else "not known to this version"
            )
        )
    return "Weights may be passed on only where the terms of the data allow it:\n\n" + "\n".join(lines)
