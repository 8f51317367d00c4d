"""What a run says about itself: the page of its training, the page of its scores, the comparison page, the model card."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bitimely_core import evaluate as scoring
from bitimely_core import registry
from bitimely_core.evaluate.result_table import read_curve
from bitimely_core.page import Figure, Page, Table
from bitimely_core.run import read_run
from bitimely_core.training import tuning

if TYPE_CHECKING:
    from bitimely_core.tokens import Windows

ORDER = ["train", "validation", "test"]
STAMP = {True: "leak-free", False: "not leak-free: the objective can see its targets", None: "has no target of its own"}
CURVES = (
    "Each point is one logged step; rel is the loss divided by the variance of the target (or the entropy of the labels): 1.0 = no better than "
    "predicting the mean (contrastive objectives: divided by the loss of one and the same vector for everything). A validation curve that rises "
    "while the training curve falls would show overfitting."
)


def stamp_text(stamp: bool | str | None) -> str:
    """The leak stamp in words."""
    return f"leak-free {stamp}" if isinstance(stamp, str) else STAMP[stamp]


def run_facts(body: dict[str, Any]) -> dict[str, str]:
    """The table at the top of a run's pages."""
    data = body["data"][0]
    per_split = ", ".join(
        f"{split} {a['subjects']} subjects / {a['windows']:,} windows"
        for split, a in ((s, data["audit"][s]) for s in ("train", "validation", "test"))
    )
    tokenizer = body["settings"]["model"]["tokenizer"]
    out = {
        "Data": ", ".join(d["name"] for d in body["data"])
        + (
            f" (code sequences, the last {data['length']} events)"
            if data.get("vocabulary")
            else f" ({data['channels']} channels, {data['length']} samples at {data['rate']:g} Hz)"
        ),
        "Split": f"by {data['split']}: {per_split}; 0 shared"
        if data["split"] in {"subject", "official"}
        else f"{data['split']}: {per_split}",
        "Model": f"{body['model']}, preset {body['preset']}, {tokenizer} tokens, {body['parameters']:,} parameters"
        + (f" (the paper says {body['paper_parameters'] / 1e6:g} M)" if body.get("paper_parameters") else ""),
        **({"Learning rate": tuning.describe_tuning(body["tuning"])} if body.get("tuning") else {}),
        "Seed": str(body["seed"]),
        "Versions": ", ".join(f"{k} {v}" for k, v in body["versions"].items() if k in {"bitimely", "torch", "python"}),
        "Fingerprint of the data": data["fingerprint"][:16],
    }
    if body["kind"] == "pretrain":
        out["Objective"] = f"{body['settings']['objective']['name']} ({stamp_text(body['leak_free'])})"
    else:
        source = body["source"]
        scratch = source["weights"] is None
        out["Pre-training"] = (
            "none (from scratch)"
            if scratch
            else (
                f"run {source['run']} on {', '.join(d['name'] for d in body['pretraining_data'])}, {body['settings']['objective']['name']} ({stamp_text(body['leak_free'])})"
            )
        )
        tuned = body["settings"]["finetune"]
        out["Readout"] = f"{tuned['readout']} of layer{'s' if tuned['layers'] == 'last-two' else ''} {tuned['layers']}" + (
            ", frozen" if tuned["freeze"] else ""
        )
    return out


def loss_curves(folder: Path, name: str = "curves", title: str = "Training") -> list[Figure]:
    """The training and validation curves of a run, as loss / Var(target) where it is known, else as loss."""
    series, key = [], ""
    for split in ("train", "validation"):
        key, x, y = read_curve(folder, split)
        if len(x):
            series.append({"name": split, "x": x, "y": y})
    if not series:
        return []
    return [
        Figure(name=name, title=title, caption=CURVES, kind="lines", data={"series": series, "xlabel": "optimizer step", "ylabel": key})
    ]


def write_training_page(folder: Path) -> Path:
    """Write the page of a run that has been trained but not evaluated."""
    from bitimely_core import report

    body = read_run(folder)
    final = body["final"]
    rel = (final.get("validation") or {}).get("rel", final.get("rel")) if final.get("validation") else final.get("rel")
    where = "validation" if final.get("validation") else "training"
    compares = body["kind"] == "pretrain" and registry.objectives[body["settings"]["objective"]["name"]].facts.rows > 1
    blind = "telling no window from another" if compares else "predicting the mean"
    verdict = (
        f"{body['run']}: {final['step']:,} steps" + (f"; {where} loss is {rel:.3f} of that of {blind}" if rel is not None else "") + "."
    )
    page = Page(
        title=f"Run {body['run']}",
        verdict=verdict,
        notices=body["notices"],
        blocks=[*loss_curves(folder)],
        facts=run_facts(body),
        summary=final,
    )
    return report.write_report(folder, page)


def write_evaluation_page(folder: Path, body: dict[str, Any], scores: dict[str, Any], windows: Windows, columns: dict[str, Any]) -> Path:
    """Write the page of an evaluated run: scores beside the baselines, confusion, classes, curves."""
    from bitimely_core import report

    shown = scoring.score_figure(scores) if scores["metrics"] and "task" in scores else None
    blocks: list[Figure | Table | str] = [*([shown] if shown else []), metric_table(scores)]
    if scores.get("comparison"):
        blocks.append(_comparison_table(scores["comparison"], scores["run"]))
    if scores.get("by_class"):
        first = next(iter(scores["by_class"].values()))
        blocks.append(
            Table(
                name="classes",
                title="Scores by class",
                caption="Support is the number of test windows. A class without windows has no recall.",
                columns=["class", *first],
                rows=[[name, *row.values()] for name, row in scores["by_class"].items()],
            )
        )
    if scores.get("confusion"):
        confusion = np.array(scores["confusion"], dtype=float)
        blocks.append(
            Figure(
                name="confusion",
                title="Confusion matrix",
                kind="matrix",
                caption="Row: scored by experts; column: predicted. Rows sum to the class's support. Mass off the diagonal between neighbouring classes is usual; "
                "a column that swallows all rows is a classifier that predicts one class.",
                data={
                    "values": confusion,
                    "xlabel": "predicted",
                    "ylabel": "scored",
                    "diverging": False,
                    "row_names": list(windows.class_names),
                    "column_names": list(windows.class_names),
                },
            )
        )
    if windows.task == "classification" and columns and len(columns["target"]):
        blocks += _hypnogram_figures(windows[scores["split"]], windows, columns)
    blocks += loss_curves(folder)
    parent = folder.parent / str((body.get("source") or {}).get("run"))
    if body["kind"] == "finetune" and (body["source"] or {}).get("weights") and (parent / "metrics.jsonl").is_file():
        blocks += loss_curves(parent, "pretraining-curves", "Pre-training")
    page = Page(
        title=f"Scores of {scores['run']}",
        verdict=verdict_text(scores),
        notices=[*scores["notices"], *scores.get("remarks", [])],
        blocks=blocks,
        facts=run_facts(body),
        summary=scores,
    )
    return report.write_report(folder, page)


def main_metric(scores: dict[str, Any]) -> str:
    """The metric that the verdict speaks of: the task's, or the relative loss of a pre-training."""
    return scores.get("main") or "rel"


def verdict_text(scores: dict[str, Any]) -> str:
    """One sentence: the main score with its interval beside the baseline."""
    name = main_metric(scores)
    metric = scores["metrics"].get(name)
    if metric is None:
        return f"{scores['run']}: nothing could be scored."
    words = name.replace("_", " ")
    if metric["value"] is None:
        return f"{scores['run']}: {words} is undefined on {scores['data']} ({metric['undefined_reason']})."
    interval = f" (95 % interval {metric['lo']:.3f} to {metric['hi']:.3f})" if metric["lo"] is not None else " (no interval)"
    told = baseline_values(scores, name)
    beside = f"; {' and '.join(f'the {base} baseline reaches {value:.3f}' for base, value in told.items())}" if told else ""
    return f"{words.capitalize()} {metric['value']:.3f}{interval} on {scores['n']:,} {scores['split']} windows of {scores['n_subjects']} subjects{beside}."


def baseline_values(scores: dict[str, Any], metric: str) -> dict[str, float]:
    """What needs no model, for the one metric: majority class; of claims the length of the history and the best single code."""
    found = {
        name: ((scores["baselines"].get(name) or {}).get(metric) or {}).get("value") for name in ("majority", "length_only", "single_code")
    }
    return {name.replace("_", "-"): value for name, value in found.items() if value is not None}


def metric_table(scores: dict[str, Any]) -> Table:
    """Metrics with standard error and interval beside each baseline."""
    names = list(scores["baselines"])
    rows = []
    for name, m in scores["metrics"].items():
        base = [((scores["baselines"][b] or {}).get(name) or {}).get("value") for b in names]
        rows.append([name.replace("_", " "), m["value"], m["se"], m["lo"], m["hi"], *base, m["undefined_reason"] or ""])
    unit = "subjects" if scores["settings"]["by"] == "subject" else "windows"
    return Table(
        name="metrics",
        title="Scores",
        columns=["metric", "value", "standard error", "95 % from", "to", *names, "remark"],
        rows=rows,
        caption=f"Bootstrap over {unit}, {scores['settings']['bootstrap']:,} resamples: standard error = standard deviation of the resamples, interval = their 2.5 and 97.5 "
        "percentiles. A dash is a value that is not defined; the remark says why.",
    )


def _comparison_table(comparison: dict[str, Any], run: str) -> Table:
    rows = [
        [name.replace("_", " "), d["difference"], d["se"], d["lo"], d["hi"], d.get("share_above_zero")]
        for name, d in comparison["metrics"].items()
    ]
    return Table(
        name="paired",
        title=f"{run} minus {comparison['run']}",
        columns=["metric", "difference", "standard error", "95 % from", "to", "share of resamples above 0"],
        rows=rows,
        caption="Paired: the same resamples of the same windows for both runs. An interval that holds 0 does not tell the runs apart.",
    )


def _hypnogram_figures(chosen: Windows, windows: Windows, columns: dict[str, Any]) -> list[Figure]:
    """Predicted beside scored stages of the first recording of the split, for data cut in epochs."""
    frame = chosen.index
    recording = frame["recording_id"][0]
    keep = np.flatnonzero((frame["recording_id"] == recording).to_numpy())
    if len(keep) < 10:
        return []
    predicted = np.asarray(columns["prediction"])[keep].argmax(1)
    return [
        Figure(
            name="hypnogram",
            title="One recording: predicted against scored",
            kind="hypnogram",
            caption=f"The first recording of the split ({len(keep)} windows). Agreement here is one recording's, not the score; see the tables for all subjects.",
            data={
                "epoch": windows.length / windows.rate,
                "classes": list(windows.class_names),
                "tracks": [{"name": "scored", "stages": np.asarray(columns["target"])[keep]}, {"name": "predicted", "stages": predicted}],
            },
        )
    ]


def combine_pages(page: Page, others: list[Page], tables: list[Table], title: str) -> Page:
    """`page` with the tables in front and the blocks of `others` behind, each under its own title."""
    blocks: list[Figure | Table | str] = [*tables, *page.blocks]
    for other in others:
        blocks += [f"{other.title}. {other.verdict}", *other.blocks]
    notices = list(dict.fromkeys([*page.notices, *(line for other in others for line in other.notices)]))
    return Page(title=title, verdict=page.verdict, notices=notices, blocks=blocks, facts=page.facts, summary=page.summary)


def audit_table(name: str, audit: dict[str, dict[str, Any]], class_names: list[str]) -> Table:
    """Subjects, windows and windows a class in each split."""
    return Table(
        name="audit",
        title=f"Data: {name}",
        caption="No subject is in two splits; statistics for the normalisation come from the training split alone.",
        columns=["split", "subjects", "windows", *class_names],
        rows=[[split, a["subjects"], a["windows"], *(a["classes"].get(c, 0) for c in class_names)] for split, a in audit.items()],
    )
