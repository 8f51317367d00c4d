"""Rows and columns from the scores of runs: means over seeds, paired differences, ranks, wins, cost, curves.

The page of a recipe's results and the page of a comparison are made of these blocks. A row is a model or an arm, a column is a score on a
view of a data set: `data` for the main metric of its task, `data:metric` for another one, `data:label` for the AUPRC of one label or class.

Legend: S seeds, R replicates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bitimely_core import evaluate, registry, store
from bitimely_core.batch import Figure, Table
from bitimely_core.errors import UserError
from bitimely_core.runs import folders

Key = tuple[str, str]  # row, column
FRACTIONS = ("kappa", *evaluate.LOWER_IS_BETTER)  # metrics that are not printed in per cent
SECOND = {
    "classification": ("balanced_accuracy", "auroc", "macro_f1", "kappa"),
    "multilabel": ("auprc", "auroc", "macro_f1"),
    "regression": ("rmse",),
}
LINES = 12  # curves of one figure
KEPT = 1  # of what is kept between calls: raise it where the numbers change
METHOD = (
    "Differences are of means over seeds, on the same draws of subjects for both rows. They are tested against Student's t (difference over the standard error, with "
    "the variance between seeds added, pooled over the rows of the column, where there are several), and all differences of the page are one family, corrected after Holm."
)


class Scored(NamedTuple):
    """An evaluated run in its place."""

    row: str
    data: str  # of the column
    seed: int
    name: str
    folder: Path
    body: dict[str, Any]  # run.json
    scores: dict[str, Any]  # scores.json
    parts: tuple[Scored, ...] = ()  # of test folds that are scored together; folder and body are those of the first

    @property
    def runs(self) -> tuple[Scored, ...]:
        """The runs behind it."""
        return self.parts or (self,)


@dataclass(frozen=True)
class Column:
    """One score of one data set."""

    key: str
    data: str
    metric: str | None  # None: nothing is known about the data
    label: str | None = None
    task: str = ""

    @property
    def lower(self) -> bool:
        """Whether less is better."""
        return self.metric in evaluate.LOWER_IS_BETTER

    @property
    def factor(self) -> float:
        """From a score to what is printed."""
        return 1.0 if self.metric is None or self.metric in FRACTIONS else 100.0

    @property
    def words(self) -> str:
        """The metric as a heading has it."""
        if self.metric is None:
            return ""
        return evaluate.NAMES[self.metric] + (f" of {self.label}" if self.label else "") + (", %" if self.factor > 1 else "")

    def of(self, scores: Mapping[str, Any]) -> dict[str, Any] | None:
        """The metric object of a scores.json, or None."""
        found = (scores.get("by_class") or {}).get(self.label, {}) if self.label else scores.get("metrics") or {}
        return found.get(self.metric)


@dataclass(frozen=True)
class Measured:
    """What the runs of one column say."""

    cells: dict[str, dict[str, Any]] = field(default_factory=dict)  # row -> value, se, lo, hi, seeds, seed_se, undefined_reason
    differences: dict[str, dict[str, Any]] = field(default_factory=dict)  # row -> what `evaluate.contrast` says of it less the reference
    remarks: list[str] = field(default_factory=list)


def scored(row: str, data: str, seed: int, folder: Path) -> Scored | None:
    """A run as it stands in its folder; None without scores."""
    path = folder / "scores.json"
    if not path.is_file():
        return None
    body = folders.read(folder)
    return Scored(row, data, seed, body["run"], folder, body, json.loads(path.read_bytes()))


def placed(found: Sequence[Path]) -> list[Scored]:
    """Runs in rows: by model where that tells runs on the same data and seed apart, else by the run they were fine-tuned from, else by name."""
    made = [one for folder in found if (one := scored("", "", 0, folder)) is not None]
    made = [one._replace(data=one.scores["data"], seed=int(one.body["seed"])) for one in made]
    rows: list[Callable[[Scored], str]] = [lambda one: one.body["model"], lambda one: (one.body.get("source") or {}).get("run") or one.name]
    for row in rows:
        if len({(row(one), one.data, one.seed) for one in made}) == len(made):
            return [one._replace(row=row(one)) for one in made]
    return [one._replace(row=one.name) for one in made]


def columns(found: Sequence[Scored], asked: Iterable[str], stated: Iterable[str] = ()) -> list[Column]:
    """The columns of a page, in order.

    Args:
        found: evaluated runs.
        asked: columns of the cells that were to be made. One of multi-label data stands for those that `stated` has of these data, else for
            one column a label.
        stated: columns of the paper.
    """
    tasks = {one.data: one.scores for one in found}
    stated = list(stated)
    out: dict[str, Column] = {}
    for key in dict.fromkeys(asked):
        data, _, part = key.partition(":")
        scores = tasks.get(data, {})
        task = scores.get("task") or _task(data)
        finer = [other for other in stated if other.partition(":")[0] == data and other != key]
        if part or not (finer or task == "multilabel"):
            kept = [key]
        else:
            kept = finer or [f"{data}:{label}" for label in scores.get("by_class") or {}] or [key]
        for one in kept:
            what = one.partition(":")[2]
            metric = what if what in evaluate.NAMES else "auprc" if what else evaluate.MAIN.get(task)
            out[one] = Column(one, data, metric, what if what and what not in evaluate.NAMES else None, task)
    return list(out.values())


def _task(data: str) -> str:
    """The task of a view, as far as the registry knows."""
    try:
        dataset, view = folders.dataset_and_view(data)
    except UserError:
        return ""
    facts = registry.datasets[dataset].facts
    return "multilabel" if facts.kind == "events" else str(facts.views[view].task)


def remembered(keep: Path | None, kind: str, asked: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` returns, from `keep` where the same was asked before."""
    if keep is None:
        return make()
    path = keep / f"{kind}-{store.fingerprint(asked)[:24]}.json"
    if path.is_file():
        found: dict[str, Any] = json.loads(path.read_bytes())
        return found
    store.make_folder(keep)
    store.write_json(path, made := make())
    return made


def predictions(one: Scored) -> tuple[list[str], evaluate.Predictions] | None:
    """Classes of a run, in order, and what it said about each window of the split; None where the file is not there or is of other columns."""
    import polars as pl

    paths = [run.folder / "predictions.parquet" for run in one.runs]
    if not all(path.is_file() for path in paths):
        return None
    try:
        frame = pl.concat(pl.read_parquet(path) for path in paths)
        return evaluate.classes_of(frame), evaluate.predictions(one.scores["task"], frame, evaluate.classes_of(frame))
    except (pl.exceptions.PolarsError, KeyError):
        return None


def measured(
    column: Column, found: Sequence[Scored], reference: str, *, others: Mapping[str, Any] | None = None, keep: Path | None = None
) -> Measured:
    """Cells of one column and the paired difference of every row to the reference row.

    Args:
        column: which score.
        found: the evaluated runs of the page; those on other data are left out.
        reference: the row that the others are compared with.
        others: further rows: name -> frame as `predictions.parquet`, one for all seeds.
        keep: folder of what was made before.
    """
    mine = [one for one in found if one.data == column.data and column.of(one.scores) is not None]
    if not mine or column.metric is None:
        return Measured()
    settings = mine[0].scores["settings"]
    files = [[run.folder / "predictions.parquet" for run in one.runs] for one in mine]
    marks = [
        [one.row, one.seed, *(store.sha256(file) if file.is_file() else None for file in of)] for one, of in zip(mine, files, strict=True)
    ]
    added = {name: store.fingerprint([frame.columns, frame.hash_rows(seed=0).sum()]) for name, frame in (others or {}).items()}
    asked = [KEPT, column.key, column.metric, column.label, reference, settings["bootstrap"], settings["by"], marks, added]
    made = remembered(keep, "pairs", asked, lambda: _measured(column, mine, reference, others or {}))
    order = dict.fromkeys([*(one.row for one in mine), *(others or {})])  # of the page, not of the file
    cells, differences = ({row: made[key][row] for row in order if row in made[key]} for key in ("cells", "differences"))
    return Measured(cells, differences, made["remarks"])


def _name(one: Scored) -> str:
    return f"{one.row}, seed {one.seed}"


def _measured(column: Column, mine: Sequence[Scored], reference: str, others: Mapping[str, Any]) -> dict[str, Any]:
    first = next((one for one in mine if one.row == reference), mine[0])
    settings, task = first.scores["settings"], first.scores["task"]
    read = {_name(one): p for one in mine if (p := predictions(one)) is not None}
    names = next((classes for classes, _ in read.values()), [])
    told = {name: p for name, (classes, p) in read.items() if classes == names}
    extra = {name: evaluate.predictions(task, frame, names) for name, frame in others.items() if evaluate.classes_of(frame) == names}
    remarks: list[str] = []
    kept: dict[str, evaluate.Predictions] = {}
    common = told.get(_name(first))
    for name, said_here in {**told, **extra}.items():
        try:
            evaluate.aligned({"reference": common or said_here, "run": said_here})
        except UserError:
            remarks.append(f"{name} on {column.key}: other windows than the rest, so it is not compared.")
        else:
            kept[name] = said_here
    of: dict[str, dict[int, str]] = {}
    for one in mine:
        if _name(one) in kept:
            of.setdefault(one.row, {})[one.seed] = _name(one)
    drawn = None
    if kept:
        drawn = evaluate.replicates(
            task,
            kept,
            class_names=names,
            metric=None if column.label else column.metric,
            label=column.label,
            bootstrap=settings["bootstrap"],
            by=settings["by"],
        )
    cells: dict[str, Any] = {}
    for row in dict.fromkeys(one.row for one in mine):
        each = [{"seed": one.seed, "run": one.name, **(column.of(one.scores) or {})} for one in mine if one.row == row]
        values = [one["value"] for one in each if one["value"] is not None]
        if drawn is not None and len(of.get(row, {})) == len(each):
            cell = evaluate.average(drawn, list(of[row].values()))
        else:  # scores without the predictions behind them
            alone = len(each) == 1
            cell = {key: each[0].get(key) if alone else None for key in ("value", "se", "lo", "hi", "undefined_reason")}
            cell["value"] = float(np.mean(values)) if values else None
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
        test = next(one.scores for one in mine if one.row == row)
        cells[row] = {
            **cell,
            "seeds": each,
            "seed_sd": spread,
            "seed_se": spread and spread / np.sqrt(len(values)),
            "n": test["n"],
            "n_subjects": test["n_subjects"],
        }
    differences = {}
    base = list(of.get(reference, {}).values())
    every = {row: list(runs.values()) for row, runs in of.items()} | {row: [row] for row in extra if row in kept}
    if drawn is not None and base and np.isfinite(drawn.values[base[0]]):
        variance, df = _pooled([[drawn.values[run] for run in runs.values()] for runs in of.values()])
        for row, runs in every.items():
            if row != reference:
                share = 1 / len(base) + (1 / len(runs) if row in of else 0.0)  # a baseline has no seeds
                differences[row] = evaluate.contrast(drawn, runs, base, (variance * share, df))
    return {"cells": cells, "differences": differences, "remarks": remarks}


def _pooled(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Variance within groups of one value a seed, pooled over the groups, and its degrees of freedom; (0, 0) without any."""
    df = sum(len(group) - 1 for group in groups)
    return (
        (sum((len(group) - 1) * float(np.var(group, ddof=1)) for group in groups if len(group) > 1) / df, float(df)) if df else (0.0, 0.0)
    )


def family(measures: Mapping[str, Measured]) -> dict[Key, dict[str, Any]]:
    """All differences of a page, corrected together: (row, column) -> what `evaluate.corrected` says."""
    keys = [(row, column) for column, m in measures.items() for row in m.differences]
    fixed = evaluate.corrected([measures[column].differences[row] for row, column in keys])
    return dict(zip(keys, fixed, strict=True))


def ranked(rows: Sequence[str], shown: Sequence[Column], value: Callable[[str, Column], float | None]) -> dict[str, list[float | None]]:
    """Ranks of the rows in each column, 1 the best: column -> [rows]."""
    return {c.key: evaluate.ranks([value(row, c) for row in rows], lower_is_better=c.lower) for c in shown}


# --- blocks -------------------------------------------------------------------------------------------------------------------------------


def difference_table(
    differences: Mapping[Key, Mapping[str, Any]], shown: Sequence[Column], reference: str, names: Mapping[str, str]
) -> Table:
    """Every row less the reference, uncorrected and corrected."""
    of = {c.key: c for c in shown}
    rows = []
    for (row, key), d in differences.items():
        f = of[key].factor
        difference, se, lo, hi, low, high = (
            None if d[k] is None else d[k] * f for k in ("difference", "se", "lo", "hi", "corrected_lo", "corrected_hi")
        )
        side = evaluate.apart(d) * (-1 if of[key].lower else 1)
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
    differences: Mapping[Key, Mapping[str, Any]], shown: Sequence[Column], reference: str, names: Mapping[str, str]
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


def spread_table(cells: Mapping[Key, Mapping[str, Any]], shown: Sequence[Column], names: Mapping[str, str]) -> list[Table]:
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
    rows: Sequence[str], shown: Sequence[Column], cells: Mapping[Key, Mapping[str, Any]], names: Mapping[str, str]
) -> list[Figure | Table]:
    """Ranks of each column and their mean; with three rows or more on two columns or more a picture with the critical difference."""

    def value(row: str, c: Column) -> float | None:
        return cells.get((row, c.key), {}).get("value")

    shown = [c for c in shown if sum(value(row, c) is not None for row in rows) > 1]
    rows = [row for row in rows if any(value(row, c) is not None for c in shown)]
    if not shown:
        return []
    found = ranked(rows, shown, value)
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
    again = ranked(whole, shown, value)
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
    rows: Sequence[str], shown: Sequence[Column], cells: Mapping[Key, Mapping[str, Any]], names: Mapping[str, str]
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


def speed(folder: Path, body: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Seconds of training and windows a second (the median of the logged steps), of signals of one length; None where it is not logged."""
    from bitimely_core import train

    final = body.get("final") or {}
    stated, data = final.get("seconds"), body["data"]
    lines = [line for line in train.metrics(folder) if line.get("split") == "train" and line.get("tokens_per_second")]
    if not lines or len({one["length"] for one in data}) > 1 or data[0].get("vocabulary"):
        return stated, None
    rate = np.array([line["tokens_per_second"] / data[0]["length"] for line in lines])
    steps = np.diff([0, *(line["step"] for line in lines)])
    seconds = float((steps * body["settings"]["train"]["batch_size"] / rate).sum())
    return (stated if stated is not None else seconds), float(np.median(rate))


def cost_table(found: Sequence[Scored], workspace: Path, names: Mapping[str, str]) -> Table:
    """Parameters, seconds and speed of each row, pre-training and fine-tuning."""
    rows = []
    for row in dict.fromkeys(one.row for one in found):
        mine = [run for one in found if one.row == row for run in one.runs]
        parents = dict.fromkeys((one.body.get("source") or {}).get("run") for one in mine if (one.body.get("source") or {}).get("weights"))
        before = [workspace / "runs" / str(name) for name in parents if (workspace / "runs" / str(name) / "run.json").is_file()]
        cost = [speed(folder, folders.read(folder)) for folder in before]
        tuned = [speed(one.folder, one.body) for one in mine]
        sizes = sorted({one.body["parameters"] for one in mine})
        told = [f"{sizes[0]:,}" + (f"–{sizes[-1]:,}" if len(sizes) > 1 else "")] if sizes else [None]
        rows.append([names.get(row, row), *told, len(before), _sum([s for s, _ in cost]), _middle([r for _, r in cost]), len(mine)])
        rows[-1] += [
            _sum([s for s, _ in tuned]),
            _middle([r for _, r in tuned]),
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


def _sum(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return round(sum(known), 1) if known and len(known) == len(values) else None


def _middle(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return round(float(np.median(known)), 1) if known else None


def curve_figures(found: Sequence[Scored], workspace: Path, names: Mapping[str, str]) -> list[Figure]:
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
            key, x, y = curve(folder, "validation")
            if len(x) < 2:
                key, x, y = curve(folder, "train")
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


def curve(folder: Path, split: str) -> tuple[str, np.ndarray, np.ndarray]:
    """What is drawn of a training (`rel` where it is known, else `loss`), its steps and values in one split."""
    from bitimely_core import train

    lines = train.metrics(folder)
    key = "rel" if any(line.get("rel") is not None for line in lines) else "loss"
    points = [(line["step"], line[key]) for line in lines if line.get("split") == split and line.get(key) is not None]
    return key, np.array([x for x, _ in points]), np.array([y for _, y in points], dtype=float)


def second_table(found: Sequence[Scored], names: Mapping[str, str]) -> list[Table]:
    """Further metrics of every run, with intervals; a table a task."""
    out = []
    for task, metrics in SECOND.items():
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


def data_table(found: Sequence[Scored], names: Mapping[str, str]) -> Table:
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


def row_table(found: Sequence[Scored], names: Mapping[str, str]) -> Table:
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


def said(differences: Mapping[Key, Mapping[str, Any]], shown: Sequence[Column], reference: str, names: Mapping[str, str]) -> str:
    """The differences of a page in one or two sentences: only those whose corrected interval excludes 0 are named."""
    if not differences:
        return "No two rows could be compared."
    of = {c.key: c for c in shown}
    sides: dict[str, list[str]] = {"above": [], "below": []}
    without = sum(d["corrected_lo"] is None for d in differences.values())
    for (row, key), d in differences.items():
        side = evaluate.apart(d) * (-1 if of[key].lower else 1)
        if side:
            sides["above" if side < 0 else "below"].append(f"{names.get(row, row)} on {names.get(key, key)}")
    told = [
        f"better than {_listed(sides['above'])}" if sides["above"] else "",
        f"worse than {_listed(sides['below'])}" if sides["below"] else "",
    ]
    total, apart = len(differences), sum(map(len, sides.values()))
    first = f"{names.get(reference, reference)} is {' and '.join(filter(None, told))} (corrected intervals exclude 0)" if apart else ""
    rest = total - apart - without
    more = [
        f"{rest} of {total} comparisons are not told apart" if rest else "",
        f"{without} of {total} have too few subjects for an interval" if without else "",
    ]
    return ". ".join(filter(None, [first, "; ".join(filter(None, more))])) + "."


def _listed(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
