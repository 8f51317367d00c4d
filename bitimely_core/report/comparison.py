"""Rows and columns from the scores of runs: means over seeds, paired differences, ranks, wins, cost, curves.

The page of a recipe's results and the page of a comparison are made of these blocks. A row is a model or an arm, a column is a score on a
view of a data set: `data` for the main metric of its task, `data:metric` for another one, `data:label` for the AUPRC of one label or class.

Legend: S seeds, R replicates.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bitimely_core import evaluate as scoring
from bitimely_core.errors import Reason, input_error
from bitimely_core.evaluate.result_table import assign_rows, compare_column, correct_family, group_columns, read_curve, read_speed
from bitimely_core.page import Figure, Page, Table
from bitimely_core.run import read_run

if TYPE_CHECKING:
    pass
from collections.abc import Callable, Mapping, Sequence

from bitimely_core import evaluate
from bitimely_core.evaluate.result_table import Key, ScoreColumn, ScoredRun, rank_rows
from bitimely_core.report.run_page import baseline_values, loss_curves, main_metric, run_facts

FURTHER_METRICS = {
    "classification": ("balanced_accuracy", "auroc", "macro_f1", "kappa"),
    "multilabel": ("auprc", "auroc", "macro_f1"),
    "regression": ("rmse",),
}
LINES = 12  # curves of one figure

METHOD = (
    "Differences are of means over seeds, on the same draws of subjects for both rows. They are tested against Student's t (difference over the standard error, with "
    "the variance between seeds added, pooled over the rows of the column, where there are several), and all differences of the page are one family, corrected after Holm."
)


# --- blocks -------------------------------------------------------------------------------------------------------------------------------


def difference_table(
    differences: Mapping[Key, Mapping[str, Any]], shown: Sequence[ScoreColumn], reference: str, names: Mapping[str, str]
) -> Table:
    """Every row less the reference, uncorrected and corrected."""
    of = {c.key: c for c in shown}
    rows = []
    for (row, key), d in differences.items():
        f = of[key].factor
        difference, se, lo, hi, low, high = (
            None if d[k] is None else d[k] * f for k in ("difference", "se", "lo", "hi", "corrected_lo", "corrected_hi")
        )
        side = evaluate.significance_sign(d) * (-1 if of[key].lower else 1)
        word = {1: "better", -1: "worse", 0: "not told apart"}[side] if low is not None else d["undefined_reason"] or "no interval"
        fixed = (
            None
            if low is None or high is None
            else {"value": low, "text": f"{low:.2f} to {high:.2f}".replace("-", "−"), "note": "", "to": high}
        )
        rows.append([names.get(row, row), names.get(key, key), {"value": difference, "lo": lo, "hi": hi}, se, fixed, d["p_holm"], word])
    return Table(
        name="differences",
        title=f"Paired differences to {names.get(reference, reference)}",
        columns=["row", "data", "difference", "standard error", "corrected interval", "p, Holm", "told apart?"],
        rows=rows,
        caption=f"Row minus {names.get(reference, reference)} on the same draws of test subjects, means over seeds; in the units of the metric, so that of errors a "
        "negative difference is better. Below the difference: percentiles of the replicates, 95 %, uncorrected. Corrected: one family of "
        f"{len(rows)} comparisons after Holm, with the variance between seeds (pooled over the rows of a column) where there are several. Only where the corrected interval excludes 0 are the two told apart; "
        "more subjects or seeds may tell apart what is not told apart here.",
    )


def difference_figure(
    differences: Mapping[Key, Mapping[str, Any]], shown: Sequence[ScoreColumn], reference: str, names: Mapping[str, str]
) -> list[Figure]:
    """The same with a panel a column."""
    rows = list(dict.fromkeys(row for row, _ in differences))
    panels = []
    for c in shown:
        here = [differences.get((row, c.key)) for row in rows]
        if any(d is not None for d in here):
            parts = {"values": "difference", "lo": "corrected_lo", "hi": "corrected_hi"}
            values = {key: [None if d is None or d[name] is None else d[name] * c.factor for d in here] for key, name in parts.items()}
            panels.append({"name": names.get(c.key, c.key), "zero": True, **values})
    if not panels:
        return []
    lower = [names.get(c.key, c.key) for c in shown if c.lower]
    return [
        Figure(
            name="difference-forest",
            title=f"What is told apart from {names.get(reference, reference)}",
            kind="forest",
            caption=f"Dots: the paired difference, row minus {names.get(reference, reference)}; lines: intervals corrected for all comparisons of the page. A line that "
            "crosses 0 tells nothing apart; a dot without a line has no interval."
            + (f" Left is better for {', '.join(lower)}, right for the others." if lower else " Right is better."),
            data={"names": [names.get(row, row) for row in rows], "panels": panels, "xlabel": "difference"},
        )
    ]


def variance_table(cells: Mapping[Key, Mapping[str, Any]], shown: Sequence[ScoreColumn], names: Mapping[str, str]) -> list[Table]:
    """How much the seeds differ beside how much the subjects do, where there are several seeds."""
    of = {c.key: c for c in shown}
    rows = []
    for (row, key), cell in cells.items():
        values = [one["value"] * of[key].factor for one in cell["seeds"] if one["value"] is not None]
        errors = [one["se"] * of[key].factor for one in cell["seeds"] if one.get("se") is not None]
        if len(values) > 1:
            sd, mean_se = float(np.std(values, ddof=1)), float(np.sqrt(np.mean(np.square(errors)))) if errors else None
            rows.append(
                [
                    names.get(row, row),
                    names.get(key, key),
                    len(values),
                    float(np.mean(values)),
                    sd,
                    sd / np.sqrt(len(values)),
                    min(values),
                    max(values),
                    mean_se,
                ]
            )
    if not rows:
        return []
    columns = [
        "row",
        "data",
        "seeds",
        "mean",
        "standard deviation",
        "standard error over seeds",
        "lowest",
        "highest",
        "standard error over subjects",
    ]
    caption = (
        "Another seed is another draw of the initial weights, the order of the windows and the training subjects. The standard error over subjects is that of the "
        "bootstrap of one seed (root mean square). Where the spread over seeds is as large as a difference between rows, one training each cannot show the difference."
    )
    return [Table(name="seeds", title="Spread over seeds", columns=columns, rows=rows, caption=caption)]


def rank_blocks(
    rows: Sequence[str], shown: Sequence[ScoreColumn], cells: Mapping[Key, Mapping[str, Any]], names: Mapping[str, str]
) -> list[Figure | Table]:
    """Ranks of each column and their mean; with three rows or more on two columns or more a picture with the critical difference."""

    def value(row: str, c: ScoreColumn) -> float | None:
        return cells.get((row, c.key), {}).get("value")

    shown = [c for c in shown if sum(value(row, c) is not None for row in rows) > 1]
    rows = [row for row in rows if any(value(row, c) is not None for c in shown)]
    if not shown:
        return []
    found = rank_rows(rows, shown, value)
    table: list[list[Any]] = []
    for k, row in enumerate(rows):
        mine = [found[c.key][k] for c in shown]
        held = [r for r in mine if r is not None]
        mean = float(np.mean(held))
        shown_ranks = [None if r is None else {"value": r, "text": f"{r:g}", "note": ""} for r in mine]
        table.append([names.get(row, row), {"value": mean, "text": f"{mean:.2f}", "note": ""}, len(held), *shown_ranks])
    table.sort(key=lambda line: (-line[2], line[1]["value"]))
    caption = (
        "1 is the best mean of a column, equal ones share their mean rank; a mean over fewer columns cannot be set beside one over more. Ranks say nothing about how "
        "far apart two rows are: see the differences."
    )
    out: list[Figure | Table] = [
        Table(
            name="ranks",
            title="Ranks",
            columns=["row", "mean rank", "columns", *(names.get(c.key, c.key) for c in shown)],
            rows=table,
            caption=caption,
        )
    ]
    whole = [row for row in rows if all(value(row, c) is not None for c in shown)]
    data = {c.data for c in shown}
    if len(whole) < 3 or len(data) < 2:
        return out
    again = rank_rows(whole, shown, value)
    test = evaluate.nemenyi(np.array([again[c.key] for c in shown], dtype=float))
    p = "" if test["friedman_p"] is None else f" Friedman's test that all are equal: p = {test['friedman_p']:.3g}."
    out.append(
        Figure(
            name="critical-difference",
            title="Mean ranks and their critical difference",
            kind="ranks",
            caption=f"Mean ranks of {len(whole)} rows over {len(shown)} columns; a bar joins rows that differ by less than the critical difference of Nemenyi's test at 5 % "
            f"over all pairs, {test['critical']:.2f}: these are not told apart.{p} The test takes the columns for independent; those of one data set are not, which makes it "
            f"too bold, and with {len(shown)} columns it can hardly tell anything apart. Rows without a score in some column are left out.",
            data={"names": [names.get(row, row) for row in whole], "ranks": test["mean_ranks"], "critical": test["critical"]},
        )
    )
    return out


def win_table(
    rows: Sequence[str], shown: Sequence[ScoreColumn], cells: Mapping[Key, Mapping[str, Any]], names: Mapping[str, str]
) -> list[Table]:
    """How often one row beats another, out of the columns that both have."""
    rows = [row for row in rows if any((row, c.key) in cells for c in shown)]
    table = []
    for row in rows:
        line: list[Any] = [names.get(row, row)]
        for other in rows:
            pairs = [(cells.get((row, c.key), {}).get("value"), cells.get((other, c.key), {}).get("value"), c.lower) for c in shown]
            both = [(a, b, lower) for a, b, lower in pairs if a is not None and b is not None]
            wins, ties = sum((a < b) if lower else (a > b) for a, b, lower in both), sum(a == b for a, b, _ in both)
            line.append(None if row == other or not both else f"{wins}/{len(both)}" + (f", {ties} equal" if ties else ""))
        table.append(line)
    if len(rows) < 2:
        return []
    caption = (
        "In how many columns the mean of the row (left) is better than that of the column (top), out of those that both have. Counts of means: a win within the "
        "noise counts as one."
    )
    return [Table(name="wins", title="Wins", columns=["row", *(names.get(row, row) for row in rows)], rows=table, caption=caption)]


def cost_table(found: Sequence[ScoredRun], workspace: Path, names: Mapping[str, str]) -> Table:
    """Parameters, seconds and speed of each row, pre-training and fine-tuning."""
    rows = []
    for row in dict.fromkeys(one.row for one in found):
        mine = [run for one in found if one.row == row for run in one.runs]
        parents = dict.fromkeys((one.body.get("source") or {}).get("run") for one in mine if (one.body.get("source") or {}).get("weights"))
        before = [workspace / "runs" / str(name) for name in parents if (workspace / "runs" / str(name) / "run.json").is_file()]
        cost = [read_speed(folder, read_run(folder)) for folder in before]
        tuned = [read_speed(one.folder, one.body) for one in mine]
        sizes = sorted({one.body["parameters"] for one in mine})
        told = [f"{sizes[0]:,}" + (f"–{sizes[-1]:,}" if len(sizes) > 1 else "")] if sizes else [None]
        rows.append([names.get(row, row), *told, len(before), _total([s for s, _ in cost]), _median([r for _, r in cost]), len(mine)])
        rows[-1] += [
            _total([s for s, _ in tuned]),
            _median([r for _, r in tuned]),
            ", ".join(sorted({str(one.body.get("device", "")) for one in mine})),
        ]
    return Table(
        name="cost",
        title="Cost",
        columns=[
            "row",
            "parameters",
            "pre-trainings",
            "seconds",
            "windows a second",
            "fine-tunings",
            "seconds ",
            "windows a second ",
            "device",
        ],
        rows=rows,
        caption="Seconds of all trainings of the row together, from the speed of the logged steps, without validation; windows a second: the median. Speeds of runs that "
        "shared a machine with others, or ran on different machines, cannot be set beside each other.",
    )


def _total(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return round(sum(known), 1) if known and len(known) == len(values) else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return round(float(np.median(known)), 1) if known else None


def curve_figures(found: Sequence[ScoredRun], workspace: Path, names: Mapping[str, str]) -> list[Figure]:
    """Validation curves of the fine-tunings of each data set, and of the pre-trainings; the first seed of each row."""
    groups: dict[str, dict[str, tuple[Path, int]]] = {}
    firsts = {(one.row, one.data): one for one in sorted(found, key=lambda one: -one.seed)}
    for one in found:
        if firsts[one.row, one.data] is one:
            groups.setdefault(f"Fine-tuning on {names.get(one.data, one.data)}", {})[one.row] = (one.folder, 0)
            source = one.body.get("source") or {}
            parent = workspace / "runs" / str(source.get("run"))
            if source.get("weights") and (parent / "metrics.jsonl").is_file():
                groups.setdefault("Pre-training", {})[one.row] = (parent, 0)
    out = []
    for title, rows in sorted(groups.items(), key=lambda pair: pair[0] != "Pre-training"):
        series, key = [], ""
        for row, (folder, _) in list(rows.items())[:LINES]:
            key, x, y = read_curve(folder, "validation")
            if len(x) < 2:
                key, x, y = read_curve(folder, "train")
            if len(x):
                series.append({"name": names.get(row, row), "x": x, "y": y})
        if series:
            left = len(rows) - LINES
            out.append(
                Figure(
                    name=f"curves-{title}",
                    title=title,
                    kind="lines",
                    caption="Validation loss (training, where there is at most one validation) of the first seed (and test fold) of each row"
                    + (f", of the first {LINES} rows; {left} more are in their runs" if left > 0 else "")
                    + ". rel: loss over the variance or entropy of the target, 1.0 = no better than predicting the mean. Losses of different objectives cannot be set beside "
                    "each other; a curve that still falls at its end would have gained from longer training, one that rises was trained for too long.",
                    data={"series": series, "xlabel": "optimizer step", "ylabel": key},
                )
            )
    return out


def secondary_table(found: Sequence[ScoredRun], names: Mapping[str, str]) -> list[Table]:
    """Further metrics of every run, with intervals; a table a task."""
    out = []
    for task, metrics in FURTHER_METRICS.items():
        mine = [one for one in found if one.scores.get("task") == task]
        if mine:
            rows = [
                [names.get(one.row, one.row), names.get(one.data, one.data), one.seed, *(one.scores["metrics"].get(m) for m in metrics)]
                for one in mine
            ]
            caption = "Value and 95 % bootstrap interval of each run, as fractions (errors in the unit of the target). A dash is not defined or has no interval; the page of the run says why."
            if task == "classification":
                caption += " Accuracy alone hides a class that is never found; balanced accuracy is the mean recall, AUROC and F1 are means over the classes."
            columns = ["row", "data", "seed", *(evaluate.NAMES[m] for m in metrics)]
            out.append(Table(name=f"further-{task}", title=f"Further metrics: {task}", columns=columns, rows=rows, caption=caption))
    return out


def data_table(found: Sequence[ScoredRun], names: Mapping[str, str]) -> Table:
    """What was scored on, and what trained on it."""
    rows = []
    for data in dict.fromkeys(one.data for one in found):
        mine = [one for one in found if one.data == data]
        s, body = mine[0].scores, mine[0].body
        shares = sorted({float(one.body["settings"]["data"].get("fraction", 1.0)) for one in mine})
        few = s["n_subjects"] < evaluate.MINIMUM_UNITS
        mark = {
            "subject": "by subject",
            "official": "official",
            "time": "by time, subjects in several splits",
            "random-window": "random windows, subjects in several splits",
        }
        cut = mark.get(body["data"][0]["split"], body["data"][0]["split"])
        cut += f", {len(mine[0].parts)} test folds" if mine[0].parts else ""
        unit = f"{s['settings']['bootstrap']:,} resamples of {s['settings']['by']}s" + (
            f"; too few subjects for an interval ({evaluate.MINIMUM_UNITS} are needed)" if few else ""
        )
        rows.append(
            [
                names.get(data, data),
                s["split"],
                cut,
                s["n"],
                s["n_subjects"],
                ", ".join(f"{v:g}" for v in shares),
                unit,
                body["data"][0]["fingerprint"][:12],
            ]
        )
    columns = ["data", "scored on", "split", "windows", "subjects", "share of training subjects", "intervals", "fingerprint"]
    return Table(
        name="data",
        title="Data",
        columns=columns,
        rows=rows,
        caption="The split that was scored. The fingerprint names the windows: the same one, the same windows.",
    )


def row_table(found: Sequence[ScoredRun], names: Mapping[str, str]) -> Table:
    """What each row is, and whether its pre-training could see its targets."""
    rows: list[list[Any]] = []
    for row in dict.fromkeys(one.row for one in found):
        mine = [run.body for one in found if one.row == row for run in one.runs]

        def each(value: Callable[[Any], str], mine: list[dict[str, Any]] = mine) -> str:
            return ", ".join(dict.fromkeys(value(body) for body in mine))

        scratch = [body["kind"] == "finetune" and not (body.get("source") or {}).get("weights") for body in mine]
        objective = each(lambda body: str(body["settings"]["objective"]["name"]))
        rows.append(
            [
                names.get(row, row),
                each(lambda body: body["model"]),
                each(lambda body: str(body["preset"])),
                "from scratch" if all(scratch) else objective,
            ]
        )
        rows[-1] += [each(lambda body: {True: "yes", False: "no", None: "has none"}.get(body["leak_free"], str(body["leak_free"])))]
        rows[-1] += [each(lambda body: str((body["settings"].get("finetune") or {}).get("readout") or "none")), len(mine)]
    columns = ["row", "model", "preset", "pre-training", "leak-free", "readout", "runs"]
    caption = (
        "Leak-free: whether the targets of the pre-training are hidden from the model; where they are not, a low pre-training loss means little, and the scores of the "
        "fine-tuned model stand for themselves."
    )
    return Table(name="rows", title="Rows", columns=columns, rows=rows, caption=caption)


def summarize_differences(
    differences: Mapping[Key, Mapping[str, Any]], shown: Sequence[ScoreColumn], reference: str, names: Mapping[str, str]
) -> str:
    """The differences of a page in one or two sentences: only those whose corrected interval excludes 0 are named."""
    if not differences:
        return "No two rows could be compared."
    of = {c.key: c for c in shown}
    sides: dict[str, list[str]] = {"above": [], "below": []}
    without = sum(d["corrected_lo"] is None for d in differences.values())
    for (row, key), d in differences.items():
        side = evaluate.significance_sign(d) * (-1 if of[key].lower else 1)
        if side:
            sides["above" if side < 0 else "below"].append(f"{names.get(row, row)} on {names.get(key, key)}")
    told = [
        f"better than {_join_names(sides['above'])}" if sides["above"] else "",
        f"worse than {_join_names(sides['below'])}" if sides["below"] else "",
    ]
    total, apart = len(differences), sum(map(len, sides.values()))
    first = f"{names.get(reference, reference)} is {' and '.join(filter(None, told))} (corrected intervals exclude 0)" if apart else ""
    rest = total - apart - without
    more = [
        f"{rest} of {total} comparisons are not told apart" if rest else "",
        f"{without} of {total} have too few subjects for an interval" if without else "",
    ]
    return ". ".join(filter(None, [first, "; ".join(filter(None, more))])) + "."


def _join_names(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def comparison_page(found: list[Path]) -> Page:
    """One page of several evaluated runs. Raises UserError (incomplete, exit 4) for a run without scores."""
    entries = []
    for folder in found:
        path = folder / "scores.json"
        if not path.is_file():
            raise input_error(
                Reason.INCOMPLETE, "no scores", "expected scores.json", f"Run: bitimely evaluate {folder.name}", file=str(folder)
            )
        entries.append((read_run(folder), json.loads(path.read_bytes()), folder))
    name = main_metric(entries[0][1])
    runs = assign_rows(found)
    shown = group_columns(runs, [one.data for one in runs])
    reference = runs[0].row
    measures = {c.key: compare_column(c, runs, reference) for c in shown}
    cells = {(row, key): cell for key, m in measures.items() for row, cell in m.cells.items()}
    differences = correct_family(measures)
    here = [(body, scores, folder) for body, scores, folder in entries if scores["data"] == entries[0][1]["data"]]
    bars = [(s["run"], s["metrics"].get(name) or {}) for _, s, _ in here]
    told = baseline_values(entries[0][1], name)
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
        blocks += difference_figure(differences, shown, reference, {})
        blocks.append(difference_table(differences, shown, reference, {}))
    rows = list(dict.fromkeys(one.row for one in runs))
    if len(shown) > 1:
        blocks += [*win_table(rows, shown, cells, {}), *rank_blocks(rows, shown, cells, {})]
    blocks += variance_table(cells, shown, {})
    root = found[0].parent.parent
    blocks += [data_table(runs, {}), row_table(runs, {}), cost_table(runs, root, {})]
    if len(entries) <= 4:
        for body, _, folder in entries:
            blocks += loss_curves(folder, f"curves-{body['run']}", f"Training of {body['run']}")
    else:
        blocks += curve_figures(runs, root, {})
    blocks += ["## How the numbers were made", METHOD] if differences else []
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
        verdict += " " + summarize_differences(differences, shown, reference, {})
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
        facts={**run_facts(entries[0][0]), "Reference of the differences": reference},
        summary={**summary, "differences": {"reference": reference, **compared}} if compared else summary,
    )
