"""Scores of many runs as a table: rows and columns, seeds, paired comparisons, one family of
tests.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from bitimely_core import evaluate, registry, storage
from bitimely_core.errors import UserError
from bitimely_core.privacy import WITHHELD
from bitimely_core.records import has_result, read_result, read_result_table, write_results
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.schemas.scores import (
    CellScore,
    ClassScores,
    ColumnResult,
    CorrectedDifference,
    MeanDifference,
    MetricValue,
    Scores,
    SeedScore,
    TaskScores,
)
from bitimely_core.system_errors import raise_system_error
from bitimely_core.workspace import parse_view

if TYPE_CHECKING:
    import polars as pl

Key = tuple[str, str]  # row, column
OpenWindows = Callable[[str], Any]  # name of tokens -> its windows or sequences

CACHE_VERSION = 5  # of stored comparisons: raise it where the numbers change


class BaselinePair(NamedTuple):
    """A row and a baseline on one column; of multi-label data also on all labels."""

    row: str
    column: str
    baseline: str  # printed name


class ScoredRun(NamedTuple):
    """An evaluated run with its row and column of the table."""

    row: str
    data: str  # of the column
    seed: int
    name: str
    folder: Path
    record: RunRecord
    scores: Scores
    # test folds that are scored together; folder and record are those of the first
    parts: tuple[ScoredRun, ...] = ()

    @property
    def runs(self) -> tuple[ScoredRun, ...]:
        """The run itself, or the folds."""
        return self.parts or (self,)


@dataclass(frozen=True)
class ScoreColumn:
    """One metric of one data set."""

    key: str
    data: str
    metric: str | None  # None: unknown data
    label: str | None = None
    task: str = ""

    @property
    def lower(self) -> bool:
        """Whether lower is better."""
        return self.metric in evaluate.LOWER_IS_BETTER

    @property
    def factor(self) -> float:
        """Factor from a score to the printed number."""
        return 1.0 if self.metric is None else evaluate.find_unit(self.metric).factor

    @property
    def words(self) -> str:
        """The metric as a heading."""
        if self.metric is None:
            return ""
        return (
            evaluate.NAMES[self.metric]
            + (f" of {self.label}" if self.label else "")
            + (", %" if self.factor > 1 else "")
        )

    def metric_in(self, scores: TaskScores) -> MetricValue | None:
        """The metric of this column, or None."""
        if self.label is None:
            return scores.metrics.get(self.metric or "")
        found: MetricValue | None = getattr(
            scores.by_class.get(self.label, ClassScores()), self.metric or "", None
        )
        return found if self.label in scores.by_class else None


@dataclass(frozen=True)
class ResultTable:
    """Scores of runs in rows and columns with the paired differences to a reference row."""

    found: Sequence[ScoredRun]
    rows: Sequence[str]
    columns: Sequence[ScoreColumn]
    reference: str  # row
    results: Mapping[str, ColumnResult]  # by column
    names: Mapping[str, str] = field(default_factory=dict)  # row or column -> printed name
    # column, "": all others -> margin in printed units
    margins: Mapping[str, float] = field(default_factory=dict)
    planned: bool = False  # the margins were set before training

    @cached_property
    def cells(self) -> dict[Key, CellScore]:
        """All cells."""
        return {
            (row, key): cell
            for key, result in self.results.items()
            for row, cell in result.cells.items()
        }

    @cached_property
    def differences(self) -> dict[Key, CorrectedDifference]:
        """All differences as one family after Holm correction."""
        found = {
            (row, column): d
            for column, result in self.results.items()
            for row, d in result.differences.items()
        }
        columns = [self.column(key) for _, key in found]
        margins = [
            None
            if (margin := self.margins.get(c.key, self.margins.get(""))) is None
            else margin / c.factor
            for c in columns
        ]
        corrected = evaluate.holm_correct(list(found.values()))
        return dict(
            zip(
                found,
                evaluate.apply_margins(corrected, margins, [-1 if c.lower else 1 for c in columns]),
                strict=True,
            )
        )

    @cached_property
    def baseline_differences(self) -> dict[BaselinePair, CorrectedDifference]:
        """Each row less each of its baselines, seeds together, as one family after Holm correction:
        those of the runs, and those fitted for the page.
        """
        seeds: dict[tuple[str, str], list[Scores]] = {}
        for one in self.found:
            seeds.setdefault((one.row, one.data), []).append(one.scores)
        family: dict[BaselinePair, MeanDifference] = {}
        for (row, data), of in seeds.items():
            own = {
                c.key: c.metric for c in self.columns if c.data == data and c.metric and not c.label
            } or {data: str(of[0].main)}
            for (key, metric), name in itertools.product(own.items(), of[0].baselines):
                values = [s.baselines[name].metrics.get(metric) for s in of if name in s.baselines]
                each = [
                    v.difference
                    for v in values
                    if v and v.difference and v.difference.difference is not None
                ]
                if len(each) == len(of):
                    family[BaselinePair(row, key, name.replace("_", " "))] = (
                        evaluate.average_differences(each)
                    )
        for key, result in self.results.items():
            family |= {
                BaselinePair(row, key, name): d
                for row, of_row in result.baselines.items()
                for name, d in of_row.items()
            }
        return dict(zip(family, evaluate.holm_correct(list(family.values())), strict=True))

    def metric(self, key: str) -> str:
        """The metric of a column, or the main one of a data set."""
        known = [column.metric for column in self.columns if column.key == key and column.metric]
        return (
            known[0]
            if known
            else str(next(one.scores.main for one in self.found if one.data == key))
        )

    def name(self, key: str) -> str:
        """The printed name of a row or column."""
        return self.names.get(key, key)

    def unit(self, data: str | None = None) -> str:
        """The word for the units of the intervals, of one data set or of all; subject where they
        differ.
        """
        words = {evaluate.name_unit(one.scores) for one in self.found if data in {None, one.data}}
        return words.pop() if len(words) == 1 else "subject"

    def column(self, key: str) -> ScoreColumn:
        """The column with that key."""
        return next(column for column in self.columns if column.key == key)

    def value(self, row: str, column: ScoreColumn) -> float | None:
        """The mean score of a cell, None without one."""
        cell = self.cells.get((row, column.key))
        return None if cell is None else cell.value

    def ranks(
        self, rows: Sequence[str], columns: Sequence[ScoreColumn]
    ) -> dict[str, list[float | None]]:
        """Ranks of `rows` in each column, 1 the best: column -> [rows]."""
        return {
            c.key: evaluate.rank_values(
                [self.value(row, c) for row in rows], lower_is_better=c.lower
            )
            for c in columns
        }

    def side(self, key: Key) -> int:
        """1 where a row is significantly better than the reference, -1 where it is worse, else
        0.
        """
        return evaluate.significance_sign(self.differences[key]) * (
            -1 if self.column(key[1]).lower else 1
        )


def read_scored_run(row: str, data: str, seed: int, folder: Path) -> ScoredRun | None:
    """The evaluated run in `folder`; None without scores."""
    path = folder / "scores.json"
    if not has_result(path):
        return None
    record = RunRecord.load(folder / "run.json")
    return ScoredRun(row, data, seed, record.run, folder, record, Scores.load_shared(folder))


def assign_rows(found: Sequence[Path]) -> list[ScoredRun]:
    """Runs in rows: by model where models differ for the same data and seed, else by the
    pre-trained run, else by name.
    """
    made = [one for folder in found if (one := read_scored_run("", "", 0, folder)) is not None]
    made = [one._replace(data=one.scores.data, seed=one.record.seed) for one in made]
    rows: list[Callable[[ScoredRun], str]] = [
        lambda one: one.record.model,
        lambda one: one.record.source.run if one.record.source else one.name,
    ]
    for row in rows:
        if len({(row(one), one.data, one.seed) for one in made}) == len(made):
            return [one._replace(row=row(one)) for one in made]
    return [one._replace(row=one.name) for one in made]


def group_columns(
    found: Sequence[ScoredRun], requested: Iterable[str], stated: Iterable[str] = ()
) -> list[ScoreColumn]:
    """The columns of a page, in order: those of the planned cells (`requested`); data become the
    columns that the recipe or the paper (`stated`) has of them, multi-label data else one column
    per label.
    """
    tasks = {one.data: one.scores for one in found}
    stated = list(stated)
    out: dict[str, ScoreColumn] = {}
    for key in dict.fromkeys(requested):
        data, _, part = key.partition(":")
        scores = tasks.get(data)
        task = (scores.task if scores else None) or _infer_task(data)
        finer = [other for other in stated if other.partition(":")[0] == data and other != key]
        if part or not (finer or task == "multilabel"):
            kept = [key]
        else:
            kept = (
                finer
                or [f"{data}:{label}" for label in (scores.by_class if scores else ())]
                or [key]
            )
        for one in kept:
            what = one.partition(":")[2]
            metric = (
                what if what in evaluate.NAMES else "auprc" if what else evaluate.MAIN.get(task)
            )
            out[one] = ScoreColumn(
                one, data, metric, what if what and what not in evaluate.NAMES else None, task
            )
    return list(out.values())


def _infer_task(data: str) -> str:
    """The task of a view according to the registry, "" if unknown."""
    try:
        dataset, view = parse_view(data)
    except UserError as error:
        raise_system_error(error)
        return ""
    return registry.datasets[dataset].facts.views[view].task


def read_predictions(one: ScoredRun) -> tuple[list[str], evaluate.Predictions] | None:
    """Classes of a run, in order, and its predictions; None where the file is missing or has other
    columns.
    """
    import polars as pl

    paths = [run.folder / "predictions.parquet" for run in one.runs]
    if not all(map(has_result, paths)):
        return None
    try:
        frame = pl.concat(map(read_result_table, paths))
        classes = evaluate.list_classes(frame)
        return classes, evaluate.parse_predictions(one.scores.task or "", frame, classes)
    except (pl.exceptions.PolarsError, KeyError) as error:
        raise_system_error(error, paths[0])
        return None


def compare_column(
    column: ScoreColumn,
    found: Sequence[ScoredRun],
    reference: str,
    *,
    others: Mapping[str, pl.DataFrame] | None = None,
    keep: Path | None = None,
) -> ColumnResult:
    """Cells of one column and the paired difference of every row to the row `reference`.

    Runs on other data are ignored. `others`: baselines of all rows, name -> content of a
    `predictions.parquet`; `keep`: folder of stored results.
    """
    scored = [
        one for one in found if one.data == column.data and column.metric_in(one.scores) is not None
    ]
    if not scored or column.metric is None:
        return ColumnResult()
    if any(
        (metric := column.metric_in(one.scores)) and metric.undefined_reason == WITHHELD
        for one in scored
    ):
        # the predictions would show it
        return ColumnResult(cells=_build_cells(column, scored, None, {}))
    settings = scored[0].scores.settings
    files = [[run.folder / "predictions.parquet" for run in one.runs] for one in scored]
    marks = [
        [one.row, one.seed, *(storage.hash_file(file) if file.is_file() else None for file in of)]
        for one, of in zip(scored, files, strict=True)
    ]
    added = {
        name: storage.fingerprint([frame.columns, frame.hash_rows(seed=0).sum()])
        for name, frame in (others or {}).items()
    }
    inputs = [
        CACHE_VERSION,
        column.key,
        column.metric,
        column.label,
        reference,
        settings.bootstrap,
        settings.by,
        marks,
        added,
    ]
    path = keep / f"pairs-{storage.fingerprint(inputs)[:24]}.json" if keep else None
    if path is not None and has_result(path):
        result = ColumnResult.model_validate_json(read_result(path))
    else:
        result = _compare_rows(column, scored, reference, others or {})
        if path is not None:
            write_results(
                path.parent, {path.name: storage.encode_json(result.model_dump()) + b"\n"}
            )
    order = dict.fromkeys(one.row for one in scored)  # of the page, not of the file
    return ColumnResult(
        cells={row: result.cells[row] for row in order if row in result.cells},
        differences={row: result.differences[row] for row in order if row in result.differences},
        baselines={row: result.baselines[row] for row in order if row in result.baselines},
        remarks=result.remarks,
    )


def has_withheld(scores: TaskScores) -> bool:
    """Whether scores or counts of few people are withheld: what is computed on the same rows would
    show them.
    """
    labels = scores.by_class.values()
    hidden = any(one.undefined_reason == WITHHELD for one in scores.metrics.values())
    return (
        hidden
        or scores.n is None
        or scores.n_subjects is None
        or any(one.support is None for one in labels)
    )


def _label_run(one: ScoredRun) -> str:
    return f"{one.row}, seed {one.seed}"


def _compare_rows(
    column: ScoreColumn,
    scored: Sequence[ScoredRun],
    reference: str,
    others: Mapping[str, pl.DataFrame],
) -> ColumnResult:
    first = next((one for one in scored if one.row == reference), scored[0])
    settings, task = first.scores.settings, first.scores.task or ""
    read = {_label_run(one): p for one in scored if (p := read_predictions(one)) is not None}
    names = next((classes for classes, _ in read.values()), [])
    same = {name: p for name, (classes, p) in read.items() if classes == names}
    same |= {
        name: evaluate.parse_predictions(task, frame, names)
        for name, frame in others.items()
        if evaluate.list_classes(frame) == names
    }
    remarks: list[str] = []
    kept: dict[str, evaluate.Predictions] = {}
    for name, predictions in same.items():
        try:
            evaluate.align_runs(
                {"reference": same.get(_label_run(first), predictions), "run": predictions}
            )
        except UserError as error:
            raise_system_error(error)
            remarks.append(
                f"{name} on {column.key}: excluded from comparisons, evaluated on different windows."
            )
        else:
            kept[name] = predictions
    runs: dict[str, dict[int, str]] = {}
    for one in scored:
        if _label_run(one) in kept:
            runs.setdefault(one.row, {})[one.seed] = _label_run(one)
    if not kept:
        return ColumnResult(cells=_build_cells(column, scored, None, runs), remarks=remarks)
    measured = evaluate.estimate_runs(
        task,
        kept,
        class_names=names,
        metric=None if column.label else column.metric,
        label=column.label,
        bootstrap=settings.bootstrap,
        by=settings.by,
        unit=first.scores.unit,
        subject=evaluate.name_unit(first.scores),
    )
    differences = {}
    base = list(runs.get(reference, {}).values())
    if base and np.isfinite(measured.runs[base[0]].value):
        differences = {
            row: evaluate.paired_difference(measured, list(of.values()), base)
            for row, of in runs.items()
            if row != reference
        }
    fitted = [name for name in others if name in kept and np.isfinite(measured.runs[name].value)]
    baselines = {
        row: {
            name: evaluate.compare_with_baseline(measured, list(of.values()), name)
            for name in fitted
        }
        for row, of in runs.items()
    }
    cells = _build_cells(column, scored, measured, runs)
    remarks += _list_diverged(column, cells, first.scores)
    return ColumnResult(
        cells=cells, differences=differences, baselines=baselines if fitted else {}, remarks=remarks
    )


def _list_diverged(
    column: ScoreColumn, cells: Mapping[str, CellScore], scores: TaskScores
) -> list[str]:
    """A remark for each seed that is no better than a constant though its row is by more than the
    standard error over subjects, or far from its row as seeds vary.
    """
    sign = -1.0 if column.lower else 1.0
    baselines = [
        one.metrics[column.metric].value
        for one in scores.baselines.values()
        if column.metric in one.metrics
    ]
    constant = (
        max((sign * value for value in baselines if value is not None), default=-np.inf)
        if column.label is None
        else -np.inf
    )
    spread = [cell.seed_sd for cell in cells.values() if cell.seed_sd is not None]
    limit = 10 * float(np.median(spread)) if spread else np.inf
    out = []
    for row, cell in cells.items():
        values = {one.seed: sign * one.value for one in cell.seeds if one.value is not None}
        middle = float(np.median(list(values.values()))) if len(values) > 1 else np.nan
        for seed, value in values.items():
            if value <= constant < middle - (cell.se or 0.0) or 0 < limit < abs(value - middle):
                found = f"{sign * value:.3g}, median of the row {sign * middle:.3g}"
                out.append(
                    f"{row}, seed {seed} on {column.key}: this seed diverged ({found}). It stays in the mean and in the variance of its row."
                )
    return out


def _build_cells(
    column: ScoreColumn,
    scored: Sequence[ScoredRun],
    measured: evaluate.RunEstimates | None,
    runs: Mapping[str, Mapping[int, str]],
) -> dict[str, CellScore]:
    """A cell per row; its interval is that of the mean over seeds where the predictions of all
    seeds are there.
    """
    cells = {}
    for row in dict.fromkeys(one.row for one in scored):
        seeds = [
            SeedScore(
                seed=one.seed,
                run=one.name,
                **(column.metric_in(one.scores) or MetricValue()).model_dump(),
            )
            for one in scored
            if one.row == row
        ]
        values = [one.value for one in seeds if one.value is not None]
        if measured is not None and len(runs.get(row, {})) == len(seeds):
            score = evaluate.mean_over_seeds(measured, list(runs[row].values()))
        else:
            score = (
                MetricValue(**seeds[0].model_dump(include=set(MetricValue.model_fields)))
                if len(seeds) == 1
                else MetricValue()
            )
            score = score.model_copy(
                update={"value": float(np.mean(values)) if values else None, "classes": None}
            )
        sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
        test = next(one.scores for one in scored if one.row == row)
        cells[row] = CellScore(
            **score.model_dump(),
            seeds=seeds,
            seed_sd=sd,
            seed_se=float(sd / np.sqrt(len(values))) if sd is not None else None,
            n=test.n,
            n_subjects=test.n_subjects,
        )
    return cells


def read_speed(folder: Path, record: RunRecord) -> tuple[float | None, float | None]:
    """Seconds of training and windows per second (median of the logged steps, signals of one length
    only); None where not logged.
    """
    from bitimely_core.train import metrics_log

    lines = [
        line
        for line in metrics_log.read_metrics(folder)
        if line.get("split") == "train" and line.get("tokens_per_second")
    ]
    if not lines or len({one.length for one in record.data}) > 1 or record.data[0].vocabulary:
        return None, None
    rate = np.array([line["tokens_per_second"] / record.data[0].length for line in lines])
    steps = np.diff([0, *(line["step"] for line in lines)])
    return float((steps * record.settings.train.batch_size / rate).sum()), float(np.median(rate))


def read_curve(folder: Path, split: str) -> tuple[str, np.ndarray, np.ndarray]:
    """The plotted quantity of a training (`rel` where it is logged, else `loss`), its steps and
    values in one split.
    """
    from bitimely_core.train import metrics_log

    lines = metrics_log.read_metrics(folder)
    key: Literal["rel", "loss"] = (
        "rel" if any(line.get("rel") is not None for line in lines) else "loss"
    )
    points = [
        (line["step"], line[key])
        for line in lines
        if line.get("split") == split and line.get(key) is not None
    ]
    return key, np.array([x for x, _ in points]), np.array([y for _, y in points], dtype=float)
