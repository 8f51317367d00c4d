"""Further blocks of result pages: variation between seeds, ranks, wins, metrics, data, rows, cost
and loss curves. Rows and columns are those of `differences`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bitimely_core import evaluate
from bitimely_core.evaluate.intervals import list_values
from bitimely_core.evaluate.result_table import (
    ResultTable,
    ScoreColumn,
    ScoredRun,
    read_curves,
    read_speed,
)
from bitimely_core.page import Figure, Line, LinePlot, RankPlot, Table, make_table, make_tables
from bitimely_core.privacy import show_count
from bitimely_core.report.page_text import text_cell
from bitimely_core.report.run_page import is_from_scratch, name_parent
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.store.records import has_result
from bitimely_core.store.workspace import locate
from bitimely_core.types import group_by

FURTHER_METRICS = {
    "classification": ("balanced_accuracy", "auroc", "macro_f1", "kappa"),
    "multilabel": ("auprc", "auroc", "macro_f1"),
    "regression": ("rmse",),
}
SPLITS = {
    "subject": "by subject",
    "official": "official",
    "time": "by time, subjects in several splits",
    "random-window": "random windows, subjects in several splits",
    "external": "all subjects, none of them trained on",
}
STAMPS: dict[bool | str | None, str] = {True: "yes", False: "no", None: "no target"}
MAX_CURVES = 12  # of one figure
Speed = tuple[float | None, float | None]  # seconds of training, windows per second


def _group_runs(table: ResultTable) -> dict[str, list[ScoredRun]]:
    """Row -> its runs, each fold by itself."""
    folds = itertools.chain.from_iterable(run.runs for run in table.runs)
    return group_by(folds, lambda run: run.row)


def list_scored(table: ResultTable) -> list[str]:
    """The rows with a score in some column."""
    scored = {row for row, _ in table.cells}
    return [row for row in table.rows if row in scored]


# ---- scores


def variance_table(table: ResultTable) -> list[Table]:
    """Variation between seeds beside that between subjects, where there are several seeds."""
    rows = []
    for (row, key), cell in table.cells.items():
        factor = table.column(key).factor
        values = [value * factor for value in list_values(cell.seeds)]
        if len(values) < 2:
            continue
        errors = [seed.se * factor for seed in cell.seeds if seed.se is not None]
        mean, sd = float(np.mean(values)), float(np.std(values, ddof=1))
        subjects = float(np.sqrt(np.mean(np.square(errors)))) if errors else None
        spread = (sd, sd / np.sqrt(len(values)), min(values), max(values), subjects)
        rows.append([table.name(row), table.name(key), len(values), mean, *spread])
    spread_columns = ("standard deviation", "standard error over seeds", "lowest", "highest")
    return make_tables(
        "seeds",
        "Variation between seeds",
        "A seed determines the initial weights, the order of the windows and the training "
        "subjects. The standard error over subjects is that of one seed (root mean square). Where "
        "the standard deviation over seeds is as large as a difference between rows, one seed each "
        "cannot show the difference.",
        ["row", "data", "seeds", "mean", *spread_columns, "standard error over subjects"],
        rows,
    )


def rank_blocks(table: ResultTable) -> list[Figure | Table]:
    """Ranks of each column and their mean; from three rows on two data sets on, a figure with the
    critical difference.
    """
    counts = Counter(key for (_, key), cell in table.cells.items() if cell.value is not None)
    columns = [column for column in table.columns if counts[column.key] > 1]
    return [_rank_table(table, columns), *_rank_figures(table, columns)] if columns else []


def _rank_table(table: ResultTable, columns: Sequence[ScoreColumn]) -> Table:
    """Ranks of the rows with a score in some column; rows with most columns first."""
    rows = [
        row for row in table.rows if any(table.value(row, column) is not None for column in columns)
    ]
    ranks = table.ranks(rows, columns)
    lines = []
    for k, row in enumerate(rows):
        places = [ranks[column.key][k] for column in columns]
        defined = list(filter(None, places))
        mean = float(np.mean(defined))
        cells = [None if place is None else text_cell(place, f"{place:g}") for place in places]
        line = [table.name(row), text_cell(mean, f"{mean:.2f}"), len(defined), *cells]
        lines.append((-len(defined), mean, line))
    lines.sort(key=lambda line: line[:2])
    return make_table(
        "ranks",
        "Ranks",
        "1 is the best mean of a column, ties share their mean rank; mean ranks over different "
        "columns are not comparable. Ranks do not show the size of a difference: see the "
        "differences.",
        ["row", "mean rank", "columns", *(table.name(column.key) for column in columns)],
        [line for *_, line in lines],
    )


def _rank_figures(table: ResultTable, columns: Sequence[ScoreColumn]) -> list[Figure]:
    """Mean ranks of the rows with a score in all columns; none of fewer than three rows, or of
    columns of one data set.
    """
    rows = [
        row for row in table.rows if all(table.value(row, column) is not None for column in columns)
    ]
    if len(rows) < 3 or len({column.data for column in columns}) < 2:
        return []
    ranks, count = table.ranks(rows, columns), len(columns)
    test = evaluate.nemenyi(np.array([ranks[column.key] for column in columns], dtype=float))
    friedman = ""
    if test.friedman_p is not None:
        friedman = f" Friedman's test that all rows are equal: p = {test.friedman_p:.3g}."
    figure = Figure(
        "critical-difference",
        "Mean ranks and their critical difference",
        f"Mean ranks of {len(rows)} rows over {count} columns; a bar joins rows that differ by "
        "less than the critical difference of Nemenyi's test at 5 % over all pairs, "
        f"{test.critical:.2f}: no significant difference.{friedman} The test assumes independent "
        "columns; those of one data set are not, which makes it anti-conservative, and with "
        f"{count} columns its power is low. Rows without a score in some column are excluded.",
        RankPlot(list(map(table.name, rows)), test.mean_ranks, test.critical),
    )
    return [figure]


def win_table(table: ResultTable) -> list[Table]:
    """How often one row beats another, out of the columns that both have."""
    rows = list_scored(table)
    if len(rows) < 2:
        return []
    return make_tables(
        "wins",
        "Wins",
        "Number of columns in which the mean of the row (left) is better than that of the column "
        "(top), out of those that both have. Wins count means, significant or not.",
        ["row", *map(table.name, rows)],
        [[table.name(row), *(_count_wins(table, row, other) for other in rows)] for row in rows],
    )


def _count_wins(table: ResultTable, row: str, other: str) -> str | None:
    """`3/5, 1 equal`: columns in which `row` is better, of those that both have; None without."""
    leads = []
    for column in table.columns:
        value, rival = table.value(row, column), table.value(other, column)
        if value is not None and rival is not None:
            leads.append(column.sign * (value - rival))
    ties = leads.count(0)
    text = f"{sum(lead > 0 for lead in leads)}/{len(leads)}{f', {ties} equal' if ties else ''}"
    return text if leads and row != other else None


def secondary_table(table: ResultTable) -> list[Table]:
    """Further metrics of every run, with intervals; a table a task."""
    tables = []
    for task, metrics in FURTHER_METRICS.items():
        rows = [
            [
                table.name(run.row),
                table.name(run.data),
                run.seed,
                *map(run.scores.metrics.get, metrics),
            ]
            for run in table.runs
            if run.scores.task == task
        ]
        caption = (
            "Value and 95 % CI of each run, as fractions (errors in the unit of the target). A "
            "dash: not defined or no CI; the page of the run has the reason."
        )
        if task == "classification":
            caption += (
                " Accuracy alone hides classes that are never predicted; balanced accuracy is the "
                "mean recall, AUROC and F1 are means over classes."
            )
        columns = ["row", "data", "seed", *(evaluate.NAMES[metric] for metric in metrics)]
        tables += make_tables(f"further-{task}", f"Further metrics: {task}", caption, columns, rows)
    return tables


# ---- data and models


def data_table(table: ResultTable) -> Table:
    """The scored split of each data set, and the share of training subjects."""
    rows = []
    for data, runs in table.by_data.items():
        scores, trained = runs[0].scores, runs[0].record.data[0]
        split = SPLITS.get(trained.split, trained.split)
        if runs[0].parts:
            split += f", {len(runs[0].parts)} test folds"
        unit = f"over {evaluate.name_unit(scores)}s"
        if scores.n_subjects is not None and scores.n_subjects < evaluate.MINIMUM_UNITS:
            unit += f"; no CI: at least {evaluate.MINIMUM_UNITS} required"
        counts = map(show_count, (scores.n, scores.n_subjects))
        shares = sorted({run.record.settings.data.fraction for run in runs})
        share = ", ".join(f"{share:g}" for share in shares)
        mark = trained.fingerprint[:12]
        rows.append([table.name(data), scores.split, split, *counts, share, unit, mark])
    columns = ["data", "scored on", "split", "windows", "subjects", "share of training subjects"]
    caption = "The split that was scored. Equal fingerprints: the same windows."
    return make_table("data", "Data", caption, [*columns, "intervals", "fingerprint"], rows)


def row_table(table: ResultTable) -> Table:
    """Model, preset and pre-training of each row."""
    rows = []
    for row, runs in _group_runs(table).items():
        records = [run.record for run in runs]
        facts = [
            (
                record.model,
                record.preset,
                record.settings.objective.name,
                STAMPS.get(record.leak_free, record.leak_free),
                record.settings.finetune.readout or "none",
                record.checkpoint.choice if record.checkpoint else "last",
            )
            for record in records
        ]
        model, preset, objective, *others = (
            ", ".join(dict.fromkeys(map(str, values))) for values in zip(*facts, strict=True)
        )
        source = "from scratch" if all(map(is_from_scratch, records)) else objective
        rows.append([table.name(row), model, preset, source, *others, len(records)])
    columns = ("row", "model", "preset", "pre-training", "leak-free", "readout", "checkpoint")
    return make_table(
        "rows",
        "Rows",
        "Leak-free: the targets of the pre-training are hidden from the model. Where they are not, "
        "a low pre-training loss is not informative; the scores of the fine-tuned model remain "
        "valid.",
        [*columns, "runs"],
        rows,
    )


# ---- training


def cost_table(table: ResultTable, workspace: Path) -> Table:
    """Parameters, seconds and speed of each row, pre-training and fine-tuning."""
    rows = []
    for row, runs in _group_runs(table).items():
        names = dict.fromkeys(filter(None, (name_parent(run.record) for run in runs)))
        folders = [locate(workspace, "runs", name) for name in names]
        pretraining = [
            read_speed(folder, RunRecord.load(folder / "run.json"))
            for folder in folders
            if has_result(folder / "run.json")
        ]
        tuning = [read_speed(run.folder, run.record) for run in runs]
        sizes = [run.record.parameters for run in runs]
        parameters = f"{min(sizes):,}"
        if max(sizes) > min(sizes):
            parameters += f"–{max(sizes):,}"
        devices = ", ".join(sorted({run.record.device or "" for run in runs}))
        costs = [len(pretraining), *_sum_costs(pretraining), len(tuning), *_sum_costs(tuning)]
        rows.append([table.name(row), parameters, *costs, devices])
    before = ["pre-trainings", "seconds", "windows per second"]
    after = ["fine-tunings", "seconds ", "windows per second "]  # distinct names
    return make_table(
        "cost",
        "Cost",
        "Seconds of all trainings of the row, from the speed of the logged steps, without "
        "validation; windows per second: median. Speeds on shared or different machines are not "
        "comparable.",
        ["row", "parameters", *before, *after, "device"],
        rows,
    )


def _sum_costs(costs: Sequence[Speed]) -> Speed:
    """Total seconds (None unless all are known) and median windows per second."""
    measured = [
        (seconds, rate) for seconds, rate in costs if seconds is not None and rate is not None
    ]
    if not measured:
        return None, None
    seconds, rates = zip(*measured, strict=True)
    total = round(sum(seconds), 1) if len(measured) == len(costs) else None
    return total, round(float(np.median(rates)), 1)


def curve_figures(table: ResultTable, workspace: Path) -> list[Figure]:
    """Validation curves of the fine-tunings of each data set, and of the pre-trainings; the first
    seed of each row.
    """
    groups: dict[str, dict[str, Path]] = {"Pre-training": {}}
    for runs in group_by(table.runs, lambda run: (run.row, run.data)).values():
        run = min(runs, key=lambda run: run.seed)
        groups.setdefault(f"Fine-tuning on {table.name(run.data)}", {})[run.row] = run.folder
        parent = name_parent(run.record)
        folder = locate(workspace, "runs", parent) if parent else None
        if folder is not None and has_result(folder / "metrics.jsonl"):
            groups["Pre-training"][run.row] = folder
    figures = []
    for title, folders in groups.items():
        figures += _draw_curves(title, [(table.name(row), path) for row, path in folders.items()])
    return figures


def _draw_curves(title: str, folders: Sequence[tuple[str, Path]]) -> list[Figure]:
    """A curve for each of the first rows; none where nothing was logged."""
    lines, key = [], ""
    for name, folder in folders[:MAX_CURVES]:
        key, curves = read_curves(folder)
        curve = curves.get("validation", np.empty((2, 0)))
        if curve.shape[1] < 2:
            curve = curves.get("train", curve[:, :0])
        if curve.size:
            lines.append(Line(name, *curve))
    rest = len(folders) - MAX_CURVES
    part = f", of the first {MAX_CURVES} rows; {rest} more are in their runs" if rest > 0 else ""
    figure = Figure(
        f"curves-{title}",
        title,
        "Validation loss (training, where there is at most one validation) of the first seed (and "
        f"test fold) of each row{part}. rel: loss over the variance or entropy of the target, 1.0 "
        "= no better than predicting the mean. Losses of different objectives are not comparable; "
        "a curve that still falls at its end indicates too short a training, one that rises "
        "overfitting.",
        LinePlot(lines, "optimizer step", key),
    )
    return [figure] if lines else []
