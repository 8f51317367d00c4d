"""Registered families of tests over the results of several recipes: no verdict before every run of
a family is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bitimely_core import evaluate, registry
from bitimely_core.errors import usage_error
from bitimely_core.evaluate import baselines, folds, result_table
from bitimely_core.evaluate.multiple import RunEstimates
from bitimely_core.evaluate.paired import Predictions, parse_predictions
from bitimely_core.evaluate.result_table import OpenWindows, ScoredRun
from bitimely_core.evaluate.verdicts import (
    PrintedMetric,
    describe_difference,
    describe_margin,
    find_margin_interval,
    name_margin_verdict,
    name_verdict,
)
from bitimely_core.methods.signal import list_measures
from bitimely_core.page import rename_units
from bitimely_core.pipeline.cells import ExperimentPlan
from bitimely_core.recipe import Recipe, RegisteredFamily
from bitimely_core.report.families_page import make_families_page
from bitimely_core.report.renderer import write_report
from bitimely_core.schemas.scores import CorrectedDifference, MeanDifference, RegisteredResult
from bitimely_core.store import storage
from bitimely_core.workflows.prepare import make_windows_opener

SIGNAL = "signal"  # rival: the first baseline that the data set registers


class RegisteredTest(NamedTuple):
    """One test of a family: its difference, or how many cells are still missing."""

    family: RegisteredFamily
    column: str
    rival: str
    done: int
    cells: int
    difference: MeanDifference | None = None
    metric: PrintedMetric = PrintedMetric("accuracy")
    unit: str = "subject"
    value: float = float("nan")  # mean over seeds of the row
    rival_value: float = float("nan")
    medians: float = float("nan")  # median over seeds of the row less that of the rival

    @property
    def margin(self) -> float | None:
        """The margin in units of the score."""
        stated, share = self.family.margin.get(self.column), self.family.margin_share
        if stated is not None:
            return stated / self.metric.factor
        return None if share is None else share * self.rival_value


class ColumnRuns(NamedTuple):
    """The runs of one column of one recipe: row -> seed -> scored folds, None where one is
    missing.
    """

    column: str
    rows: Mapping[str, Mapping[int, ScoredRun | None]]
    keep: Path
    open_windows: OpenWindows

    def compare(self, family: RegisteredFamily, rival: str) -> RegisteredTest:
        """The difference of the family's row to one rival where every seed of both is there."""
        row, other = self.rows.get(family.row, {}), self.rows.get(rival, {})
        cells = [*row.values(), *other.values()]
        runs = [run for run in cells if run is not None]
        test = RegisteredTest(family, self.column, rival, len(runs), len(cells))
        if not cells or len(runs) < len(cells):
            return test
        self._refuse_withheld(family, rival, runs)
        runs, rivals = runs[: len(row)], runs[len(row) :]
        predictions = {f"a{k}": _read_predictions(run) for k, run in enumerate(runs)}
        if rival in self.rows:
            predictions |= {f"b{k}": _read_predictions(run) for k, run in enumerate(rivals)}
        else:
            predictions |= {f"b{k}": self._fit(rival, run) for k, run in enumerate(runs)}
        return self._measure(test, runs[0], predictions)

    def _refuse_withheld(
        self, family: RegisteredFamily, rival: str, runs: Sequence[ScoredRun]
    ) -> None:
        """Raises UserError (config, exit 2) for scores that are withheld, which the predictions
        would show.
        """
        if any(result_table.has_withheld(run.scores) for run in runs):
            raise usage_error(
                f"scores of {family.row} or {rival} are withheld: labels of few people",
                f"expected all scores, for the family {family.name}",
                "Set build.small_counts = true where that is allowed",
                field=self.column,
            )

    def _measure(
        self, test: RegisteredTest, run: ScoredRun, predictions: Mapping[str, Predictions]
    ) -> RegisteredTest:
        """`test` with the difference between the predictions whose names begin with a, those of the
        row, and with b, those of the rival; `run` is any of the row.
        """
        scores = run.scores
        task, unit = scores.task or "", evaluate.name_unit(scores)
        metric = evaluate.MAIN[task]
        measured = evaluate.estimate_runs(
            task,
            predictions,
            class_names=list(scores.by_class),
            metric=metric,
            unit=scores.unit,
            subject=unit,
        )
        row, rival = ([name for name in predictions if name[0] == side] for side in "ab")
        return test._replace(
            difference=evaluate.paired_difference(measured, row, rival),
            metric=PrintedMetric(str(metric), scores.unit),
            unit=unit,
            value=_mean(measured, row),
            rival_value=_mean(measured, rival),
            medians=_median(measured, row) - _median(measured, rival),
        )

    def _fit(self, rival: str, run: ScoredRun) -> Predictions:
        """A baseline with the labels of one seed, all folds together."""
        kind = rival
        if rival == SIGNAL:
            windows = self.open_windows(run.runs[0].record.data[0].name)
            kind = next(iter(list_measures(windows)), rival)
        baseline = folds.fit_pooled_baseline(kind, run, self.keep, self.open_windows)
        if isinstance(baseline, str):
            raise usage_error(
                f"no baseline {kind}: {baseline}", "expected one of every fold", field=self.column
            )
        _, frame = baseline
        return parse_predictions(run.scores.task or "", frame, evaluate.list_classes(frame))


def _read_predictions(run: ScoredRun) -> Predictions:
    read = result_table.read_predictions(run)
    assert read is not None  # it has been scored
    return read[1]


def _mean(measured: RunEstimates, names: Sequence[str]) -> float:
    value = evaluate.mean_over_seeds(measured, names).value
    return float("nan") if value is None else value


def _median(measured: RunEstimates, names: Sequence[str]) -> float:
    return median(measured.runs[name].value for name in names)


def check_families(recipe: Recipe, plans: Sequence[ExperimentPlan]) -> None:
    """Check before anything runs that the recipes have what the families test. Raises UserError
    (config, exit 2) naming the field.
    """
    rows: dict[str, set[str]] = {}
    for entry in (entry for plan in plans for entry in plan.table if entry.run is not None):
        rows.setdefault(entry.column, set()).add(entry.row)
    for family in recipe.family:
        for column in family.columns:
            _check_name(family, "columns", column, sorted(rows))
            names = sorted(rows[column])
            _check_name(family, "row", family.row, names)
            names += _list_baselines(column)
            for rival in family.rivals:
                _check_name(family, "rivals", rival, names)


def _list_baselines(column: str) -> list[str]:
    """The baselines that a row of a column can be compared with."""
    dataset, _, view = column.partition("/")
    facts = registry.datasets[dataset].facts if dataset in registry.datasets else None
    signal = [
        baseline.name
        for baseline in (facts.baselines if facts else ())
        if not baseline.views or view in baseline.views
    ]
    return [*baselines.DESCRIPTIONS, *signal, *([SIGNAL] if signal else [])]


def _check_name(family: RegisteredFamily, key: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        raise usage_error(
            f"found {name!r} in the family {family.name}",
            f"expected one of {', '.join(names)}",
            "Correct it",
            field=f"family.{key}",
        )


def correct_families(tests: Sequence[RegisteredTest]) -> dict[int, CorrectedDifference]:
    """Position of a test -> its difference, corrected within its family; of complete families
    alone, and of each descriptive one by itself.
    """
    by_family: dict[str, dict[int, RegisteredTest]] = {}
    for k, test in enumerate(tests):
        by_family.setdefault(test.family.name, {})[k] = test
    corrected: dict[int, CorrectedDifference] = {}
    for family in by_family.values():
        differences = {
            k: test.difference for k, test in family.items() if test.difference is not None
        }
        if any(test.family.descriptive for test in family.values()):
            for k, difference in differences.items():
                corrected[k] = evaluate.holm_correct([difference])[0]
        elif len(differences) == len(family):
            holm = evaluate.holm_correct(list(differences.values()))
            margins = [test.margin for test in family.values()]
            signs = [test.metric.sign for test in family.values()]
            corrected |= zip(family, evaluate.apply_margins(holm, margins, signs), strict=True)
    return corrected


def collect_columns(plans: Sequence[ExperimentPlan], workspace: Path) -> dict[str, ColumnRuns]:
    """The runs of every column of the recipes."""
    open_windows = make_windows_opener(workspace)
    rows: dict[str, dict[str, dict[int, ScoredRun | None]]] = {}
    keep: dict[str, Path] = {}
    for plan in plans:
        folder = workspace / "reports" / plan.name / "kept"
        cells: dict[tuple[str, str, int], list[str]] = {}
        for entry in plan.table:
            if entry.run is not None:
                cells.setdefault((entry.column, entry.row, entry.seed), []).append(entry.run)
        for (column, row, seed), names in cells.items():
            keep.setdefault(column, folder)
            runs = [
                result_table.read_scored_run(row, column, seed, workspace / "runs" / name)
                for name in names
            ]
            parts = [run for run in runs if run is not None]
            pooled = (
                folds.pool_folds(parts, folder, open_windows) if len(parts) == len(runs) else None
            )
            rows.setdefault(column, {}).setdefault(row, {})[seed] = pooled
    return {column: ColumnRuns(column, rows[column], keep[column], open_windows) for column in rows}


def judge_test(test: RegisteredTest, d: CorrectedDifference | None) -> RegisteredResult:
    """The result of a test; `d`: its corrected difference, None before its family is complete."""
    family, metric = test.family, test.metric
    result = RegisteredResult(
        family=family.name,
        data=test.column,
        row=family.row,
        rival=test.rival,
        done=test.done,
        cells=test.cells,
        descriptive=family.descriptive,
    )
    if d is None:
        return result
    pair = family.row, test.rival
    lo, hi = d.corrected_lo, d.corrected_hi
    verdict = name_verdict(d, metric)
    sentence = describe_difference(pair, test.column, d, metric, test.unit)
    if d.against_margin is not None:
        verdict = name_margin_verdict(d, metric)
        lo, hi = find_margin_interval(d, metric) or (lo, hi)
        # empty where no verdict is allowed: the difference says why
        if against := describe_margin(pair, d, metric, planned=True):
            sentence = f"On {test.column}: {against}"
    return result.model_copy(
        update={
            "metric": metric.name,
            "unit": metric.suffix.strip(),
            "value": test.value,
            "rival_value": test.rival_value,
            "difference": d.difference,
            "lo": lo,
            "hi": hi,
            "margin": test.margin,
            "medians": test.medians,
            "verdict": None if family.descriptive else verdict,
            "sentence": "" if family.descriptive else rename_units(sentence, "subject"),
        }
    )


def write_families(
    recipe: Recipe, name: str, plans: Sequence[ExperimentPlan], workspace: Path
) -> Path:
    """The page of all registered tests; the path of `report.html`, beside which `summary.json` has
    a `RegisteredResult` for each test.
    """
    columns = collect_columns(plans, workspace)
    tests = []
    for family in recipe.family:
        for column in family.columns:
            for rival in family.rivals:
                runs = columns.get(column)
                empty = RegisteredTest(family, column, rival, 0, 0)
                tests.append(runs.compare(family, rival) if runs else empty)
    corrected = correct_families(tests)
    results = [judge_test(test, corrected.get(k)) for k, test in enumerate(tests)]
    questions = {family.name: family.question for family in recipe.family}
    return write_report(
        storage.make_folder(workspace / "reports" / name),
        make_families_page(recipe.title or name, questions, results),
    )
