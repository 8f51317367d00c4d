"""Scores of many runs as a table: rows and columns, seeds, paired comparisons, one family of tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bitimely_core.errors import UserError
from bitimely_core.run import read_run

if TYPE_CHECKING:
    pass
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bitimely_core import evaluate, registry, storage
from bitimely_core.workspace import dataset_and_view

Key = tuple[str, str]  # row, column
OpenWindows = Callable[[str], Any]  # name of tokens -> its windows or sequences


FRACTIONS = ("kappa", *evaluate.LOWER_IS_BETTER)  # metrics that are not printed in per cent


CACHE_VERSION = 1  # of what is kept between calls: raise it where the numbers change


class ScoredRun(NamedTuple):
    """An evaluated run in its place."""

    row: str
    data: str  # of the column
    seed: int
    name: str
    folder: Path
    body: dict[str, Any]  # run.json
    scores: dict[str, Any]  # scores.json
    parts: tuple[ScoredRun, ...] = ()  # of test folds that are scored together; folder and body are those of the first

    @property
    def runs(self) -> tuple[ScoredRun, ...]:
        """The runs behind it."""
        return self.parts or (self,)


@dataclass(frozen=True)
class ScoreColumn:
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
class ColumnResult:
    """What the runs of one column say."""

    cells: dict[str, dict[str, Any]] = field(default_factory=dict)  # row -> value, se, lo, hi, seeds, seed_se, undefined_reason
    differences: dict[str, dict[str, Any]] = field(default_factory=dict)  # row -> what `evaluate.contrast` says of it less the reference
    remarks: list[str] = field(default_factory=list)


def read_scored_run(row: str, data: str, seed: int, folder: Path) -> ScoredRun | None:
    """A run as it stands in its folder; None without scores."""
    path = folder / "scores.json"
    if not path.is_file():
        return None
    body = read_run(folder)
    return ScoredRun(row, data, seed, body["run"], folder, body, json.loads(path.read_bytes()))


def assign_rows(found: Sequence[Path]) -> list[ScoredRun]:
    """Runs in rows: by model where that tells runs on the same data and seed apart, else by the run they were fine-tuned from, else by name."""
    made = [one for folder in found if (one := read_scored_run("", "", 0, folder)) is not None]
    made = [one._replace(data=one.scores["data"], seed=int(one.body["seed"])) for one in made]
    rows: list[Callable[[ScoredRun], str]] = [
        lambda one: one.body["model"],
        lambda one: (one.body.get("source") or {}).get("run") or one.name,
    ]
    for row in rows:
        if len({(row(one), one.data, one.seed) for one in made}) == len(made):
            return [one._replace(row=row(one)) for one in made]
    return [one._replace(row=one.name) for one in made]


def group_columns(found: Sequence[ScoredRun], asked: Iterable[str], stated: Iterable[str] = ()) -> list[ScoreColumn]:
    """The columns of a page, in order.

    Args:
        found: evaluated runs.
        asked: columns of the cells that were to be made. One of multi-label data stands for those that `stated` has of these data, else for
            one column a label.
        stated: columns of the paper.
    """
    tasks = {one.data: one.scores for one in found}
    stated = list(stated)
    out: dict[str, ScoreColumn] = {}
    for key in dict.fromkeys(asked):
        data, _, part = key.partition(":")
        scores = tasks.get(data, {})
        task = scores.get("task") or _infer_task(data)
        finer = [other for other in stated if other.partition(":")[0] == data and other != key]
        if part or not (finer or task == "multilabel"):
            kept = [key]
        else:
            kept = finer or [f"{data}:{label}" for label in scores.get("by_class") or {}] or [key]
        for one in kept:
            what = one.partition(":")[2]
            metric = what if what in evaluate.NAMES else "auprc" if what else evaluate.MAIN.get(task)
            out[one] = ScoreColumn(one, data, metric, what if what and what not in evaluate.NAMES else None, task)
    return list(out.values())


def _infer_task(data: str) -> str:
    """The task of a view, as far as the registry knows."""
    try:
        dataset, view = dataset_and_view(data)
    except UserError:
        return ""
    facts = registry.datasets[dataset].facts
    return "multilabel" if facts.kind == "events" else str(facts.views[view].task)


def cached_json(keep: Path | None, kind: str, asked: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` returns, from `keep` where the same was asked before."""
    if keep is None:
        return make()
    path = keep / f"{kind}-{storage.fingerprint(asked)[:24]}.json"
    if path.is_file():
        found: dict[str, Any] = json.loads(path.read_bytes())
        return found
    storage.make_folder(keep)
    storage.write_json(path, made := make())
    return made


def read_predictions(one: ScoredRun) -> tuple[list[str], evaluate.Predictions] | None:
    """Classes of a run, in order, and what it said about each window of the split; None where the file is not there or is of other columns."""
    import polars as pl

    paths = [run.folder / "predictions.parquet" for run in one.runs]
    if not all(path.is_file() for path in paths):
        return None
    try:
        frame = pl.concat(pl.read_parquet(path) for path in paths)
        return evaluate.list_classes(frame), evaluate.parse_predictions(one.scores["task"], frame, evaluate.list_classes(frame))
    except (pl.exceptions.PolarsError, KeyError):
        return None


def compare_column(
    column: ScoreColumn, found: Sequence[ScoredRun], reference: str, *, others: Mapping[str, Any] | None = None, keep: Path | None = None
) -> ColumnResult:
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
        return ColumnResult()
    settings = mine[0].scores["settings"]
    files = [[run.folder / "predictions.parquet" for run in one.runs] for one in mine]
    marks = [
        [one.row, one.seed, *(storage.hash_file(file) if file.is_file() else None for file in of)]
        for one, of in zip(mine, files, strict=True)
    ]
    added = {name: storage.fingerprint([frame.columns, frame.hash_rows(seed=0).sum()]) for name, frame in (others or {}).items()}
    asked = [CACHE_VERSION, column.key, column.metric, column.label, reference, settings["bootstrap"], settings["by"], marks, added]
    made = cached_json(keep, "pairs", asked, lambda: _compare_column(column, mine, reference, others or {}))
    order = dict.fromkeys([*(one.row for one in mine), *(others or {})])  # of the page, not of the file
    cells, differences = ({row: made[key][row] for row in order if row in made[key]} for key in ("cells", "differences"))
    return ColumnResult(cells, differences, made["remarks"])


def _label_run(one: ScoredRun) -> str:
    return f"{one.row}, seed {one.seed}"


def _compare_column(column: ScoreColumn, mine: Sequence[ScoredRun], reference: str, others: Mapping[str, Any]) -> dict[str, Any]:
    first = next((one for one in mine if one.row == reference), mine[0])
    settings, task = first.scores["settings"], first.scores["task"]
    read = {_label_run(one): p for one in mine if (p := read_predictions(one)) is not None}
    names = next((classes for classes, _ in read.values()), [])
    told = {name: p for name, (classes, p) in read.items() if classes == names}
    extra = {
        name: evaluate.parse_predictions(task, frame, names) for name, frame in others.items() if evaluate.list_classes(frame) == names
    }
    remarks: list[str] = []
    kept: dict[str, evaluate.Predictions] = {}
    common = told.get(_label_run(first))
    for name, said_here in {**told, **extra}.items():
        try:
            evaluate.align_runs({"reference": common or said_here, "run": said_here})
        except UserError:
            remarks.append(f"{name} on {column.key}: other windows than the rest, so it is not compared.")
        else:
            kept[name] = said_here
    of: dict[str, dict[int, str]] = {}
    for one in mine:
        if _label_run(one) in kept:
            of.setdefault(one.row, {})[one.seed] = _label_run(one)
    drawn = None
    if kept:
        drawn = evaluate.draw_replicates(
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
            cell = evaluate.mean_over_seeds(drawn, list(of[row].values()))
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
        variance, df = _pool_seeds([[drawn.values[run] for run in runs.values()] for runs in of.values()])
        for row, runs in every.items():
            if row != reference:
                share = 1 / len(base) + (1 / len(runs) if row in of else 0.0)  # a baseline has no seeds
                differences[row] = evaluate.paired_difference(drawn, runs, base, (variance * share, df))
    return {"cells": cells, "differences": differences, "remarks": remarks}


def _pool_seeds(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Variance within groups of one value a seed, pooled over the groups, and its degrees of freedom; (0, 0) without any."""
    df = sum(len(group) - 1 for group in groups)
    return (
        (sum((len(group) - 1) * float(np.var(group, ddof=1)) for group in groups if len(group) > 1) / df, float(df)) if df else (0.0, 0.0)
    )


def correct_family(measures: Mapping[str, ColumnResult]) -> dict[Key, dict[str, Any]]:
    """All differences of a page, corrected together: (row, column) -> what `evaluate.corrected` says."""
    keys = [(row, column) for column, m in measures.items() for row in m.differences]
    fixed = evaluate.holm_correct([measures[column].differences[row] for row, column in keys])
    return dict(zip(keys, fixed, strict=True))


def rank_rows(
    rows: Sequence[str], shown: Sequence[ScoreColumn], value: Callable[[str, ScoreColumn], float | None]
) -> dict[str, list[float | None]]:
    """Ranks of the rows in each column, 1 the best: column -> [rows]."""
    return {c.key: evaluate.rank_values([value(row, c) for row in rows], lower_is_better=c.lower) for c in shown}


def read_speed(folder: Path, body: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Seconds of training and windows a second (the median of the logged steps), of signals of one length; None where it is not logged."""
    from bitimely_core.training import loop

    final = body.get("final") or {}
    stated, data = final.get("seconds"), body["data"]
    lines = [line for line in loop.metrics(folder) if line.get("split") == "train" and line.get("tokens_per_second")]
    if not lines or len({one["length"] for one in data}) > 1 or data[0].get("vocabulary"):
        return stated, None
    rate = np.array([line["tokens_per_second"] / data[0]["length"] for line in lines])
    steps = np.diff([0, *(line["step"] for line in lines)])
    seconds = float((steps * body["settings"]["train"]["batch_size"] / rate).sum())
    return (stated if stated is not None else seconds), float(np.median(rate))


def read_curve(folder: Path, split: str) -> tuple[str, np.ndarray, np.ndarray]:
    """What is drawn of a training (`rel` where it is known, else `loss`), its steps and values in one split."""
    from bitimely_core.training import loop

    lines = loop.metrics(folder)
    key = "rel" if any(line.get("rel") is not None for line in lines) else "loss"
    points = [(line["step"], line[key]) for line in lines if line.get("split") == split and line.get(key) is not None]
    return key, np.array([x for x, _ in points]), np.array([y for _, y in points], dtype=float)
