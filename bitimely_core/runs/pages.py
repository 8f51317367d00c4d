"""What a run says about itself: the page of its training, the page of its scores, the comparison page, the model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bitimely_core import evaluate as scoring
from bitimely_core import registry, store
from bitimely_core.batch import Figure, Page, Table
from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.report.text import markdown_text
from bitimely_core.runs import comparing, folders, tuning

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


def facts(body: dict[str, Any]) -> dict[str, str]:
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
        **({"Learning rate": tuning.told(body["tuning"])} if body.get("tuning") else {}),
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


def curves(folder: Path, name: str = "curves", title: str = "Training") -> list[Figure]:
    """The training and validation curves of a run, as loss / Var(target) where it is known, else as loss."""
    series, key = [], ""
    for split in ("train", "validation"):
        key, x, y = comparing.curve(folder, split)
        if len(x):
            series.append({"name": split, "x": x, "y": y})
    if not series:
        return []
    return [
        Figure(name=name, title=title, caption=CURVES, kind="lines", data={"series": series, "xlabel": "optimizer step", "ylabel": key})
    ]


def training(folder: Path) -> Path:
    """Write the page of a run that has been trained but not evaluated."""
    from bitimely_core import report

    write_card(folder)
    body = folders.read(folder)
    final = body["final"]
    rel = (final.get("validation") or {}).get("rel", final.get("rel")) if final.get("validation") else final.get("rel")
    where = "validation" if final.get("validation") else "training"
    compares = body["kind"] == "pretrain" and registry.objectives[body["settings"]["objective"]["name"]].facts.rows > 1
    blind = "telling no window from another" if compares else "predicting the mean"
    verdict = (
        f"{body['run']}: {final['step']:,} steps" + (f"; {where} loss is {rel:.3f} of that of {blind}" if rel is not None else "") + "."
    )
    page = Page(
        title=f"Run {body['run']}", verdict=verdict, notices=body["notices"], blocks=[*curves(folder)], facts=facts(body), summary=final
    )
    return report.write(folder, page)


def evaluation(folder: Path, body: dict[str, Any], scores: dict[str, Any], windows: Windows, columns: dict[str, Any]) -> Path:
    """Write the page of an evaluated run: scores beside the baselines, confusion, classes, curves."""
    from bitimely_core import report

    write_card(folder)
    shown = scoring.headline(scores) if scores["metrics"] and "task" in scores else None
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
        blocks += _night(windows[scores["split"]], windows, columns)
    blocks += curves(folder)
    parent = folder.parent / str((body.get("source") or {}).get("run"))
    if body["kind"] == "finetune" and (body["source"] or {}).get("weights") and (parent / "metrics.jsonl").is_file():
        blocks += curves(parent, "pretraining-curves", "Pre-training")
    page = Page(
        title=f"Scores of {scores['run']}",
        verdict=verdict_of(scores),
        notices=[*scores["notices"], *scores.get("remarks", [])],
        blocks=blocks,
        facts=facts(body),
        summary=scores,
    )
    return report.write(folder, page)


def main_metric(scores: dict[str, Any]) -> str:
    """The metric that the verdict speaks of: the task's, or the relative loss of a pre-training."""
    return scores.get("main") or "rel"


def verdict_of(scores: dict[str, Any]) -> str:
    """One sentence: the main score with its interval beside the baseline."""
    name = main_metric(scores)
    metric = scores["metrics"].get(name)
    if metric is None:
        return f"{scores['run']}: nothing could be scored."
    words = name.replace("_", " ")
    if metric["value"] is None:
        return f"{scores['run']}: {words} is undefined on {scores['data']} ({metric['undefined_reason']})."
    interval = f" (95 % interval {metric['lo']:.3f} to {metric['hi']:.3f})" if metric["lo"] is not None else " (no interval)"
    told = baselines(scores, name)
    beside = f"; {' and '.join(f'the {base} baseline reaches {value:.3f}' for base, value in told.items())}" if told else ""
    return f"{words.capitalize()} {metric['value']:.3f}{interval} on {scores['n']:,} {scores['split']} windows of {scores['n_subjects']} subjects{beside}."


def baselines(scores: dict[str, Any], metric: str) -> dict[str, float]:
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


def _night(chosen: Windows, windows: Windows, columns: dict[str, Any]) -> list[Figure]:
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


def comparison(found: list[Path]) -> Page:
    """One page of several evaluated runs. Raises UserError (incomplete, exit 4) for a run without scores."""
    entries = []
    for folder in found:
        path = folder / "scores.json"
        if not path.is_file():
            raise UserError(
                Reason.INCOMPLETE,
                "no scores",
                wanted="expected scores.json",
                file=str(folder),
                action=f"Run: bitimely evaluate {folder.name}",
                exit_code=Exit.REFUSED,
            )
        entries.append((folders.read(folder), json.loads(path.read_bytes()), folder))
    name = main_metric(entries[0][1])
    runs = comparing.placed(found)
    shown = comparing.columns(runs, [one.data for one in runs])
    reference = runs[0].row
    measures = {c.key: comparing.measured(c, runs, reference) for c in shown}
    cells = {(row, key): cell for key, m in measures.items() for row, cell in m.cells.items()}
    differences = comparing.family(measures)
    here = [(body, scores, folder) for body, scores, folder in entries if scores["data"] == entries[0][1]["data"]]
    bars = [(s["run"], s["metrics"].get(name) or {}) for _, s, _ in here]
    told = baselines(entries[0][1], name)
    defined = [(n, m) for n, m in bars if m.get("value") is not None]
    blocks: list[Figure | Table | str] = []
    if defined:
        drawn = [*defined, *((f"{base} baseline", {"value": value, "lo": None, "hi": None}) for base, value in told.items())]
        blocks.append(
            Figure(
                name="scores",
                title=name.replace("_", " ").capitalize() + f" on {entries[0][1]['data']}",
                kind="bars",
                caption="The score on the split; lines: 95 % bootstrap intervals over subjects. Overlapping intervals do not rank the runs; see the paired differences.",
                data={
                    "names": [n for n, _ in drawn],
                    "values": [m["value"] for _, m in drawn],
                    "ylabel": name.replace("_", " "),
                    "lo": [m["lo"] for _, m in drawn],
                    "hi": [m["hi"] for _, m in drawn],
                },
            )
        )
    for task in dict.fromkeys(s.get("task", "") for _, s, _ in entries):
        mine = [s for _, s, _ in entries if s.get("task", "") == task]
        metrics = list(scoring.METRICS.get(task) or dict.fromkeys(m for s in mine for m in s["metrics"]))
        blocks.append(
            Table(
                name="all-scores",
                title="All scores" if len(mine) == len(entries) else f"All scores: {task or 'pre-training'}",
                caption="Value and 95 % interval. A dash is undefined or not measured for that run.",
                columns=["run", "data", *(m.replace("_", " ") for m in metrics)],
                rows=[[s["run"], s["data"], *(s["metrics"].get(m) for m in metrics)] for s in mine],
            )
        )
    if differences:
        blocks += comparing.difference_figure(differences, shown, reference, {})
        blocks.append(comparing.difference_table(differences, shown, reference, {}))
    rows = list(dict.fromkeys(one.row for one in runs))
    if len(shown) > 1:
        blocks += [*comparing.win_table(rows, shown, cells, {}), *comparing.rank_blocks(rows, shown, cells, {})]
    blocks += comparing.spread_table(cells, shown, {})
    root = found[0].parent.parent
    blocks += [comparing.data_table(runs, {}), comparing.row_table(runs, {}), comparing.cost_table(runs, root, {})]
    if len(entries) <= 4:
        for body, _, folder in entries:
            blocks += curves(folder, f"curves-{body['run']}", f"Training of {body['run']}")
    else:
        blocks += comparing.curve_figures(runs, root, {})
    blocks += ["## How the numbers were made", comparing.METHOD] if differences else []
    lower = name in scoring.LOWER_IS_BETTER or name in {"loss", "rel"}
    best = (min if lower else max)(defined, key=lambda pair: pair[1]["value"], default=None)
    words = name.replace("_", " ")
    verdict = (
        f"The {'lowest' if lower else 'highest'} {words} of {len(defined)} runs is {best[1]['value']:.3f} ({best[0]})"
        if best
        else f"{words} is undefined for all runs"
    )
    verdict += f"; {' and '.join(f'the {base} baseline reaches {value:.3f}' for base, value in told.items())}." if told else "."
    if name == "rel" and len({body["settings"]["objective"]["name"] for body, _, _ in here}) > 1:
        verdict += " Their objectives differ, so their losses cannot be set beside each other."
    if differences:
        verdict += " " + comparing.said(differences, shown, reference, {})
    notices = list(
        dict.fromkeys([*(line for _, s, _ in entries for line in s["notices"]), *(line for m in measures.values() for line in m.remarks)])
    )
    summary = {s["run"]: {m: v["value"] for m, v in s["metrics"].items()} for _, s, _ in entries}
    compared: dict[str, dict[str, Any]] = {}
    for (row, key), d in differences.items():
        compared.setdefault(key, {})[row] = d
    return Page(
        title="Comparison of " + (", ".join(s["run"] for _, s, _ in entries) if len(entries) <= 4 else f"{len(entries)} runs"),
        verdict=verdict,
        notices=notices,
        blocks=blocks,
        facts={**facts(entries[0][0]), "Reference of the differences": reference},
        summary={**summary, "differences": {"reference": reference, **compared}} if compared else summary,
    )


def model_card(body: dict[str, Any], scores: dict[str, Any] | None = None, subjects: list[str] | None = None) -> str:
    """`model_card.md`: what the model is, what it saw, how it scored, what it may be used for. Counts alone, nothing about a person.

    Args:
        body: run.json.
        scores: scores.json, where the run has been evaluated.
        subjects: marks of the training subjects (`train_subjects.json`), for their hash.
    """
    run, kind = markdown_text(body["run"]), "Pre-trained" if body["kind"] == "pretrain" else "Fine-tuned"
    tuned = body.get("pretraining_data") or []
    parts = [f"# {run}", f"{kind} {markdown_text(body['model'])}, made by bitimely {body['versions']['bitimely']}.", _rows(facts(body))]
    parts += ["## Data", *(_card_data(one, "Trained on" if body["kind"] == "pretrain" else "Fine-tuned on") for one in body["data"])]
    parts += [_card_data(one, "Pre-trained on") for one in tuned]
    if subjects is not None:
        parts.append(
            f"Hash of the training subjects (pre-training and fine-tuning): {store.fingerprint(sorted(subjects))[:16]}, of {len(subjects):,}. Equal hashes, equal subjects."
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
    parts += ["## Training and cost", _rows(cost), "## Versions", _rows(body["versions"])]
    return "\n\n".join([*parts, "## Licence", _card_licence([*body["data"], *tuned])]) + "\n"


def write_card(folder: Path) -> None:
    """Write `model_card.md` of a finished run from what stands in its folder."""
    body = folders.read(folder)
    found = {name: json.loads(path.read_bytes()) for name in ("scores", "train_subjects") if (path := folder / f"{name}.json").is_file()}
    body["cost"] = {"seconds_and_speed": comparing.speed(folder, body)}
    store.write_bytes(
        folder / "model_card.md", model_card(body, found.get("scores"), found.get("train_subjects", {}).get("marks")).encode()
    )


def _rows(values: dict[str, Any]) -> str:
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
        cells += [", ".join(f"{base} {value:.3f}" for base, value in baselines(scores, name).items()) or "–", m["undefined_reason"] or ""]
        lines.append("| " + " | ".join(map(markdown_text, cells)) + " |")
    words = (
        f"On the {scores['split']} split of {markdown_text(scores['data'])}: {scores['n']:,} windows of {scores['n_subjects']:,} subjects; "
        f"{scores['settings']['bootstrap']:,} resamples of {scores['settings']['by']}s."
    )
    return words + "\n\n" + "\n".join(lines)


def _card_licence(data: list[dict[str, Any]]) -> str:
    registry.members("bitimely_core.datasets")
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


def joined(page: Page, others: list[Page], tables: list[Table], title: str) -> Page:
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
