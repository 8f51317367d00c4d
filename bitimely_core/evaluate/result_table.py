"""Scores of many runs as a table: rows and columns, seeds, paired comparisons, one family of
tests.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from bitimely_core import evaluate, registry
from bitimely_core.errors import UserError
from bitimely_core.evaluate.intervals import list_values
from bitimely_core.evaluate.verdicts import find_difference
from bitimely_core.privacy import WITHHELD
from bitimely_core.run import flatten_compared
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.schemas.scores import (
    Baseline,
    CellScore,
    ColumnResult,
    CorrectedDifference,
    MeanDifference,
    MetricValue,
    Scores,
    SeedScore,
    TaskScores,
)
from bitimely_core.store import storage
from bitimely_core.store.records import has_result, read_result, read_result_table, write_results
from bitimely_core.store.workspace import parse_view
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import drop_none, find_only, group_by

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
    def sign(self) -> int:
        """1 where higher is better, else -1."""
        return -1 if self.lower else 1

    @property
    def factor(self) -> float:
        """Factor from a score to the printed number."""
        return 1.0 if self.metric is None else evaluate.find_unit(self.metric).factor

    @property
    def words(self) -> str:
        """The metric as a heading."""
        if self.metric is None:
            return ""
        label = f" of {self.label}" if self.label else ""
        return f"{evaluate.NAMES[self.metric]}{label}{', %' if self.factor > 1 else ''}"

    def metric_in(self, scores: TaskScores) -> MetricValue | None:
        """The metric of this column, or None."""
        if self.label is None:
            return scores.metrics.get(self.metric or "")
        label = scores.by_class.get(self.label)
        metric: MetricValue | None = getattr(label, self.metric or "", None)
        return metric


@dataclass(frozen=True)
class ResultTable:
    """Scores of runs in rows and columns with the paired differences to a reference row."""

    runs: Sequence[ScoredRun]
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
        cells: dict[Key, CellScore] = {}
        for key, result in self.results.items():
            cells |= {(row, key): cell for row, cell in result.cells.items()}
        return cells

    @cached_property
    def differences(self) -> dict[Key, CorrectedDifference]:
        """All differences as one family after Holm correction."""
        family: dict[Key, MeanDifference] = {}
        for key, result in self.results.items():
            family |= {(row, key): d for row, d in result.differences.items()}
        columns = [self.column(key) for _, key in family]
        corrected = evaluate.apply_margins(
            evaluate.holm_correct(list(family.values())),
            list(map(self._find_margin, columns)),
            [column.sign for column in columns],
        )
        return dict(zip(family, corrected, strict=True))

    def _find_margin(self, column: ScoreColumn) -> float | None:
        """The margin of a column in the unit of its scores."""
        margin = self.margins.get(column.key, self.margins.get(""))
        return None if margin is None else margin / column.factor

    @cached_property
    def baseline_differences(self) -> dict[BaselinePair, CorrectedDifference]:
        """Each row less each of its baselines, seeds together, as one family after Holm correction:
        those of the runs, and those fitted for the page.
        """
        family = self._average_stored_differences()
        for key, result in self.results.items():
            for row, differences in result.baselines.items():
                family |= {BaselinePair(row, key, name): d for name, d in differences.items()}
        return dict(zip(family, evaluate.holm_correct(list(family.values())), strict=True))

    def _average_stored_differences(self) -> dict[BaselinePair, MeanDifference]:
        """Each row less each baseline in its scores, where all seeds have the difference."""
        family = {}
        for (row, data), runs in group_by(self.runs, lambda run: (run.row, run.data)).items():
            scores = runs[0].scores
            metrics = self._list_metrics(data) or {data: str(scores.main)}
            for (key, metric), name in itertools.product(metrics.items(), scores.baselines):
                baselines = [run.scores.baselines.get(name, Baseline()) for run in runs]
                differences = [find_difference(baseline, metric) for baseline in baselines]
                if None not in differences:
                    pair = BaselinePair(row, key, name.replace("_", " "))
                    defined = list(filter(None, differences))
                    family[pair] = evaluate.average_differences(defined)
        return family

    def _list_metrics(self, data: str) -> dict[str, str]:
        """Column -> metric of the columns of a data set that are not of one label."""
        return {
            column.key: column.metric
            for column in self.columns
            if column.data == data and column.metric and not column.label
        }

    @cached_property
    def by_data(self) -> dict[str, list[ScoredRun]]:
        """The runs of each data set."""
        return group_by(self.runs, lambda run: run.data)

    def metric(self, key: str) -> str:
        """The metric of a column, or the main one of a data set."""
        metrics = (column.metric for column in self.columns if column.key == key)
        return next(filter(None, metrics), None) or str(self.by_data[key][0].scores.main)

    def name(self, key: str) -> str:
        """The printed name of a row or column."""
        return self.names.get(key, key)

    def unit(self, data: str | None = None) -> str:
        """The word for the units of the intervals, of one data set or of all; subject where they
        differ.
        """
        runs = (run for run in self.runs if data in {None, run.data})
        words = {evaluate.name_unit(run.scores) for run in runs}
        return find_only(words, "subject")

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
        ranks = {}
        for column in columns:
            values = [self.value(row, column) for row in rows]
            ranks[column.key] = evaluate.rank_values(values, lower_is_better=column.lower)
        return ranks

    def side(self, key: Key) -> int:
        """1 where a row is significantly better than the reference, -1 where it is worse, else
        0.
        """
        return evaluate.significance_sign(self.differences[key]) * self.column(key[1]).sign


def read_scored_run(row: str, data: str, seed: int, folder: Path) -> ScoredRun | None:
    """The evaluated run in `folder`, with its test folds; None without scores."""
    if not has_result(folder / "scores.json"):
        return None
    record, scores = RunRecord.load(folder / "run.json"), Scores.load_shared(folder)
    parts = [
        read_scored_run(row, data, seed, folder.parent / name)
        for name in (record.members.runs if record.members else ())
    ]
    run = ScoredRun(row, data, seed, record.run, folder, record, scores)
    return run._replace(parts=tuple(filter(None, parts)) if all(parts) else ())


def assign_rows(folders: Sequence[Path]) -> list[ScoredRun]:
    """Runs in rows: by model where models differ for the same data and seed, else by the
    pre-trained run, else runs that differ in their seed alone, else by name.
    """
    runs = list(_list_named(folders))
    firsts: dict[str, str] = {}
    for name, run in runs:
        firsts.setdefault(_identify_arm(run.record), name)
    choices: list[Callable[[str, ScoredRun], str]] = [
        lambda name, run: run.record.model,
        lambda name, run: run.record.source.run if run.record.source else name,
        lambda name, run: firsts[_identify_arm(run.record)],
    ]
    for choose in choices:
        if len({(choose(name, run), run.data, run.seed) for name, run in runs}) == len(runs):
            return [run._replace(row=choose(name, run)) for name, run in runs]
    return [run._replace(row=name) for name, run in runs]


def _list_named(folders: Sequence[Path]) -> Iterator[tuple[str, ScoredRun]]:
    """The evaluated runs in `folders`, each with its name; of one over seeds its runs under its
    name.
    """
    scored = filter(None, (read_scored_run("", "", 0, folder) for folder in folders))
    for run in scored:
        members = run.record.members
        is_split = members is not None and members.by == "seed"
        for part in run.parts if is_split else (run,):
            yield run.name, part._replace(seed=part.record.seed, data=part.scores.data)


def _identify_arm(record: RunRecord) -> str:
    """A hash of all settings of a run but the seed, and of what it was trained on."""
    compared = flatten_compared(record.model_copy(update={"members": None}))
    return storage.fingerprint({**compared, "settings.train.seed": None})


def group_columns(
    runs: Sequence[ScoredRun], requested: Iterable[str], stated: Iterable[str] = ()
) -> list[ScoreColumn]:
    """The columns of a page, in order: those of the planned cells (`requested`); data become the
    columns that the recipe or the paper (`stated`) has of them, multi-label data else one column
    per label.
    """
    scores = {run.data: run.scores for run in runs}
    stated = list(stated)
    columns: dict[str, ScoreColumn] = {}
    for key in dict.fromkeys(requested):
        data, _, part = key.partition(":")
        of_data = scores.get(data)
        task = (of_data.task if of_data else None) or _infer_task(data)
        keys = [] if part else _refine_column(key, task, of_data, stated)
        columns |= {name: _make_column(name, data, task) for name in keys or [key]}
    return list(columns.values())


def _refine_column(key: str, task: str, scores: Scores | None, stated: Sequence[str]) -> list[str]:
    """The columns of the data `key` that are stated, of multi-label data else its labels."""
    finer = [name for name in stated if name.partition(":")[0] == key and name != key]
    if not finer and task == "multilabel" and scores:
        finer = [f"{key}:{label}" for label in scores.by_class]
    return finer


def _make_column(key: str, data: str, task: str) -> ScoreColumn:
    """The column `data`, `data:metric` or `data:label`; of a label it is the AUPRC."""
    part = key.partition(":")[2]
    if not part or part in evaluate.NAMES:
        return ScoreColumn(key, data, part or evaluate.MAIN.get(task), None, task)
    return ScoreColumn(key, data, "auprc", part, task)


def _infer_task(data: str) -> str:
    """The task of a view according to the registry, "" if unknown."""
    try:
        dataset, view = parse_view(data)
    except UserError as error:
        raise_system_error(error)
        return ""
    return registry.datasets[dataset].facts.views[view].task


def read_predictions(run: ScoredRun) -> tuple[list[str], evaluate.Predictions] | None:
    """Classes of a run, in order, and its predictions; None where the file is missing or has other
    columns.
    """
    import polars as pl

    paths = _list_prediction_files(run)
    if not all(map(has_result, paths)):
        return None
    try:
        return _parse_frame(pl.concat(map(read_result_table, paths)), run.scores)
    except (pl.exceptions.PolarsError, KeyError) as error:
        raise_system_error(error, paths[0])
        return None


def _parse_frame(frame: pl.DataFrame, scores: TaskScores) -> tuple[list[str], evaluate.Predictions]:
    """Classes, in order, and predictions of the content of a `predictions.parquet`."""
    classes = evaluate.list_classes(frame)
    return classes, evaluate.parse_predictions(scores.task or "", frame, classes)


def _list_prediction_files(run: ScoredRun) -> list[Path]:
    """The files of the predictions of a run, or of its folds."""
    return [part.folder / "predictions.parquet" for part in run.runs]


def compare_column(
    column: ScoreColumn,
    runs: Sequence[ScoredRun],
    reference: str,
    *,
    others: Mapping[str, pl.DataFrame] | None = None,
    keep: Path | None = None,
) -> ColumnResult:
    """Cells of one column and the paired difference of every row to the row `reference`.

    Runs on other data are ignored. `others`: baselines of all rows, name -> content of a
    `predictions.parquet`; `keep`: folder of stored results.
    """
    metrics = [column.metric_in(run.scores) if run.data == column.data else None for run in runs]
    scored = [run for run, metric in zip(runs, metrics, strict=True) if metric]
    if not scored:
        return ColumnResult()
    if any(metric.undefined_reason == WITHHELD for metric in filter(None, metrics)):
        # the predictions would show it
        return ColumnResult(cells=_build_cells(column, scored, None, {}))
    compared = (column, scored, reference, others or {})
    if keep is None:
        return _compare_rows(*compared)
    path = keep / f"pairs-{_identify_comparison(*compared)}.json"
    if has_result(path):
        result = ColumnResult.model_validate_json(read_result(path))
    else:
        result = _compare_rows(*compared)
        write_results(keep, {path.name: storage.encode_json(result.model_dump()) + b"\n"})
    return _order_rows(result, [run.row for run in scored])


def _order_rows(result: ColumnResult, rows: Sequence[str]) -> ColumnResult:
    """The result with its rows in the order of a page, not of the file."""
    parts = {}
    for name in ("cells", "differences", "baselines"):
        part = getattr(result, name)
        parts[name] = {row: part[row] for row in dict.fromkeys(rows) if row in part}
    return result.model_copy(update=parts)


def _identify_comparison(
    column: ScoreColumn,
    scored: Sequence[ScoredRun],
    reference: str,
    others: Mapping[str, pl.DataFrame],
) -> str:
    """The name of a stored comparison: a hash of everything that it is computed from."""
    settings = scored[0].scores.settings
    runs = []
    for run in scored:
        files = _list_prediction_files(run)
        hashes = (storage.hash_file(file) if file.is_file() else None for file in files)
        runs.append([run.row, run.seed, *hashes])
    baselines = {
        name: storage.fingerprint([frame.columns, frame.hash_rows(seed=0).sum()])
        for name, frame in others.items()
    }
    what = [column.key, column.metric, column.label, reference, settings.bootstrap, settings.by]
    return storage.fingerprint([CACHE_VERSION, *what, runs, baselines])[:24]


def has_withheld(scores: TaskScores) -> bool:
    """Whether scores or counts of few people are withheld: what is computed on the same rows would
    show them.
    """
    reasons = (metric.undefined_reason for metric in scores.metrics.values())
    supports = (label.support for label in scores.by_class.values())
    return WITHHELD in reasons or None in (scores.n, scores.n_subjects, *supports)


def _label_run(run: ScoredRun) -> str:
    return f"{run.row}, seed {run.seed}"


def _select_comparable(
    column: ScoreColumn,
    scored: Sequence[ScoredRun],
    first: ScoredRun,
    others: Mapping[str, pl.DataFrame],
) -> tuple[list[str], dict[str, evaluate.Predictions], list[str]]:
    """Classes, the predictions of runs and baselines on the windows of the run `first` by name,
    and remarks on those that are excluded.
    """
    read = {_label_run(run): read_predictions(run) for run in scored}
    read |= {name: _parse_frame(frame, first.scores) for name, frame in others.items()}
    pairs = drop_none(read)
    classes = next((names for names, _ in pairs.values()), [])
    candidates = {name: values for name, (names, values) in pairs.items() if names == classes}
    predictions, remarks = {}, []
    for name, values in candidates.items():
        try:
            evaluate.align_runs({"first": candidates.get(_label_run(first), values), "run": values})
            predictions[name] = values
        except UserError as error:
            raise_system_error(error)
            excluded = "excluded from comparisons, evaluated on different windows"
            remarks.append(f"{name} on {column.key}: {excluded}.")
    return classes, predictions, remarks


def _compare_rows(
    column: ScoreColumn,
    scored: Sequence[ScoredRun],
    reference: str,
    others: Mapping[str, pl.DataFrame],
) -> ColumnResult:
    """The cells, differences and remarks of a column, from the predictions."""
    first = next((run for run in scored if run.row == reference), scored[0])
    scores = first.scores
    classes, predictions, remarks = _select_comparable(column, scored, first, others)
    rows = defaultdict[str, list[str]](list)
    for row, name in dict.fromkeys((run.row, _label_run(run)) for run in scored):
        if name in predictions:
            rows[row].append(name)
    if not rows:
        return ColumnResult(cells=_build_cells(column, scored, None, rows), remarks=remarks)
    estimates = evaluate.estimate_runs(
        scores.task or "",
        predictions,
        class_names=classes,
        metric=None if column.label else column.metric,
        label=column.label,
        bootstrap=scores.settings.bootstrap,
        by=scores.settings.by,
        unit=scores.unit,
        subject=evaluate.name_unit(scores),
    )
    cells = _build_cells(column, scored, estimates, rows)
    return ColumnResult(
        cells=cells,
        differences=_compare_with_reference(estimates, rows, reference),
        baselines=_compare_with_baselines(estimates, rows, others),
        remarks=[*remarks, *_list_diverged(column, cells, scores)],
    )


def _compare_with_reference(
    estimates: evaluate.RunEstimates, rows: Mapping[str, list[str]], reference: str
) -> dict[str, MeanDifference]:
    """Each other row less the row `reference`, where that has a score. `rows`: row -> names of its
    runs in `estimates`.
    """
    base = rows.get(reference)
    if not base or not np.isfinite(estimates.runs[base[0]].value):
        return {}
    return {
        row: evaluate.paired_difference(estimates, names, base)
        for row, names in rows.items()
        if row != reference
    }


def _compare_with_baselines(
    estimates: evaluate.RunEstimates, rows: Mapping[str, list[str]], baselines: Iterable[str]
) -> dict[str, dict[str, MeanDifference]]:
    """Each row less each baseline that has a score, by row and name of the baseline."""
    fitted = [
        name
        for name in baselines
        if name in estimates.runs and np.isfinite(estimates.runs[name].value)
    ]
    return {
        row: {name: evaluate.compare_with_baseline(estimates, names, name) for name in fitted}
        for row, names in rows.items()
    }


def _list_diverged(
    column: ScoreColumn, cells: Mapping[str, CellScore], scores: TaskScores
) -> list[str]:
    """A remark for each seed that is no better than a constant though its row is by more than the
    standard error over subjects, or far from its row as seeds vary.
    """
    constant = _find_best_constant(column, scores)
    spreads = [cell.seed_sd for cell in cells.values() if cell.seed_sd is not None]
    limit = 10 * float(np.median(spreads or [np.inf]))
    remarks = []
    for row, cell in cells.items():
        seeds = {
            seed.seed: column.sign * seed.value for seed in cell.seeds if seed.value is not None
        }
        middle = np.nan
        if len(seeds) > 1:
            middle = float(np.median(list(seeds.values())))
        for seed, value in seeds.items():
            is_constant = value <= constant < middle - (cell.se or 0.0)
            if is_constant or 0 < limit < abs(value - middle):
                numbers = f"{column.sign * value:.3g}, median of the row {column.sign * middle:.3g}"
                remarks.append(
                    f"{row}, seed {seed} on {column.key}: this seed diverged ({numbers}). It stays "
                    "in the mean and in the variance of its row."
                )
    return remarks


def _find_best_constant(column: ScoreColumn, scores: TaskScores) -> float:
    """The best score of a baseline, higher being better; of one label none is known."""
    if column.label is not None:
        return -np.inf
    metrics = (baseline.metrics.get(column.metric or "") for baseline in scores.baselines.values())
    return max((column.sign * value for value in list_values(metrics)), default=-np.inf)


def _build_cells(
    column: ScoreColumn,
    scored: Sequence[ScoredRun],
    estimates: evaluate.RunEstimates | None,
    names: Mapping[str, Sequence[str]],
) -> dict[str, CellScore]:
    """A cell per row; its interval is that of the mean over seeds where the predictions of all
    seeds are there. `names`: row -> those of its seeds in `estimates`.
    """
    cells = {}
    for row, runs in group_by(scored, lambda run: run.row).items():
        seeds = [_score_seed(column, run) for run in runs]
        values = list_values(seeds)
        sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
        if estimates is not None and len(names.get(row, [])) == len(seeds):
            score = evaluate.mean_over_seeds(estimates, names[row])
        elif len(seeds) == 1:
            score = seeds[0].model_copy(update={"classes": None})
        else:
            score = MetricValue(value=float(np.mean(values)) if values else None)
        cells[row] = CellScore(
            **score.model_dump(include=set(MetricValue.model_fields)),
            seeds=seeds,
            seed_sd=sd,
            seed_se=None if sd is None else float(sd / np.sqrt(len(values))),
            n=runs[0].scores.n,
            n_subjects=runs[0].scores.n_subjects,
        )
    return cells


def _score_seed(column: ScoreColumn, run: ScoredRun) -> SeedScore:
    metric = column.metric_in(run.scores) or MetricValue()
    return SeedScore(seed=run.seed, run=run.name, **metric.model_dump())


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
    lengths = {data.length for data in record.data}
    if not lines or len(lengths) > 1 or record.data[0].vocabulary:
        return None, None
    rate = np.array([line["tokens_per_second"] / record.data[0].length for line in lines])
    steps = np.diff([0, *(line["step"] for line in lines)])
    return float((steps * record.settings.train.batch_size / rate).sum()), float(np.median(rate))


def read_curves(folder: Path) -> tuple[str, dict[str, np.ndarray]]:
    """The plotted quantity of a training (`rel` where it is logged, else `loss`), and split -> its
    steps and values [2, n]; splits without any are left out.
    """
    from bitimely_core.train import metrics_log

    lines = metrics_log.read_metrics(folder)
    has_rel = any(line.get("rel") is not None for line in lines)
    key: Literal["rel", "loss"] = "rel" if has_rel else "loss"
    curves = {}
    for split in ("train", "validation"):
        points = [
            (line["step"], line[key])
            for line in lines
            if line.get("split") == split and line.get(key) is not None
        ]
        if points:
            curves[split] = np.array(points, np.float64).T
    return key, curves
