"""Registered families of tests over the results of several recipes: no verdict before every run of
a family is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple, NoReturn

from bitimely_core import evaluate, registry, storage
from bitimely_core.errors import usage_error
from bitimely_core.evaluate import baselines, folds, result_table
from bitimely_core.evaluate.paired import Predictions, parse_predictions
from bitimely_core.evaluate.result_table import OpenWindows, ScoreColumn, ScoredRun
from bitimely_core.evaluate.verdicts import (
    PrintedMetric,
    describe_difference,
    describe_margin,
    find_margin_interval,
    name_margin_verdict,
    name_verdict,
)
from bitimely_core.page import rename_units
from bitimely_core.pipeline.plan import ExperimentPlan
from bitimely_core.recipe import Recipe, RegisteredFamily
from bitimely_core.report.families_page import make_families_page
from bitimely_core.report.renderer import write_report
from bitimely_core.schemas.scores import CorrectedDifference, MeanDifference, RegisteredResult
from bitimely_core.types import Progress
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
        share = self.family.margin_share
        stated = self.family.margin.get(self.column)
        return (
            stated / self.metric.factor
            if stated is not None
            else share * self.rival_value
            if share is not None
            else None
        )


class ColumnRuns(NamedTuple):
    """The runs of one column of one recipe: row -> seed -> scored folds, None where one is
    missing.
    """

    column: str
    rows: Mapping[str, Mapping[int, ScoredRun | None]]
    keep: Path
    open_windows: OpenWindows

    def compare(
        self, family: RegisteredFamily, rival: str, progress: Progress | None
    ) -> RegisteredTest:
        """The difference of the family's row to one rival where every seed of both is there."""
        sides = [
            self.rows.get(name, {})
            for name in (family.row, rival)
            if name in self.rows or name == family.row
        ]
        runs = [list(side.values()) for side in sides]
        found = [[one for one in side if one is not None] for side in runs]
        test = RegisteredTest(family, self.column, rival, sum(map(len, found)), sum(map(len, runs)))
        if not test.cells or test.done < test.cells:
            return test
        # their predictions would show it
        if any(result_table.has_withheld(one.scores) for side in found for one in side):
            problem = f"scores of {family.row} or {rival} are withheld: labels of few people"
            hint = "Set build.small_counts = true where that is allowed"
            raise usage_error(
                problem,
                f"expected all scores, for the family {family.name}",
                hint,
                field=self.column,
            )
        first = found[0][0].scores
        predictions = {f"a{k}": self._read(one) for k, one in enumerate(found[0])}
        others = (
            [self._read(one) for one in found[1]]
            if len(found) > 1
            else [self._fit(rival, one, progress) for one in found[0]]
        )
        predictions |= {f"b{k}": one for k, one in enumerate(others)}
        column = ScoreColumn(
            self.column, self.column, evaluate.MAIN[first.task or ""], None, first.task or ""
        )
        measured = evaluate.estimate_runs(
            column.task, predictions, class_names=list(first.by_class), metric=column.metric, unit=first.unit, subject=evaluate.name_unit(first)
        )  # fmt: skip
        sets = [[name for name in predictions if name[0] == side] for side in "ab"]
        means = [evaluate.mean_over_seeds(measured, names).value for names in sets]
        own, other = (float("nan") if mean is None else mean for mean in means)
        middle, of_rival = (median(measured.runs[name].value for name in names) for names in sets)
        return test._replace(
            difference=evaluate.paired_difference(measured, sets[0], sets[1]),
            metric=PrintedMetric(str(column.metric), first.unit),
            unit=evaluate.name_unit(first),
            value=own,
            rival_value=other,
            medians=middle - of_rival,
        )

    def _read(self, one: ScoredRun) -> Predictions:
        read = result_table.read_predictions(one)
        assert read is not None  # it has been scored
        return read[1]

    def _fit(self, rival: str, one: ScoredRun, progress: Progress | None) -> Predictions:
        """A baseline with the labels of one seed, all folds together."""
        kind = (
            next(
                iter(baselines.find_registered(self.open_windows(one.runs[0].record.data[0].name))),
                rival,
            )
            if rival == SIGNAL
            else rival
        )
        also = [part.folder / baselines.FOLDER for part in one.runs]
        fitted = [
            baselines.fit_baseline(
                kind,
                p.record,
                p.scores,
                keep=self.keep,
                open_windows=self.open_windows,
                also=also,
                progress=progress,
            )
            for p in one.runs
        ]
        made = next((each for each in fitted if isinstance(each, str)), "") or folds.pool_baseline(
            [each for each in fitted if not isinstance(each, str)], one.scores
        )
        if isinstance(made, str):
            raise usage_error(
                f"no baseline {kind}: {made}", "expected one of every fold", field=self.column
            )
        frame = made[1]
        return parse_predictions(one.scores.task or "", frame, evaluate.list_classes(frame))


def check_families(recipe: Recipe, plans: Sequence[ExperimentPlan]) -> None:
    """Check before anything runs that the recipes have what the families test. Raises UserError
    (config, exit 2) naming the field.
    """
    rows: dict[str, set[str]] = {}
    for entry in (entry for plan in plans for entry in plan.table if entry.run is not None):
        rows.setdefault(entry.column, set()).add(entry.row)
    for family in recipe.family:
        for column in family.columns:
            if column not in rows:
                _refuse_name(family, "columns", column, sorted(rows))
            if family.row not in rows[column]:
                _refuse_name(family, "row", family.row, sorted(rows[column]))
            dataset, _, view = column.partition("/")
            registered = (
                registry.datasets[dataset].facts.baselines if dataset in registry.datasets else ()
            )
            signal = [one.name for one in registered if not one.views or view in one.views]
            known = [
                *sorted(rows[column]),
                *baselines.DESCRIPTIONS,
                *signal,
                *([SIGNAL] if signal else []),
            ]
            for rival in family.rivals:
                if rival not in known:
                    _refuse_name(family, "rivals", rival, known)


def _refuse_name(family: RegisteredFamily, key: str, name: str, known: Sequence[str]) -> NoReturn:
    raise usage_error(
        f"found {name!r} in the family {family.name}",
        f"expected one of {', '.join(known)}",
        "Correct it",
        field=f"family.{key}",
    )


def correct_families(tests: Sequence[RegisteredTest]) -> dict[int, CorrectedDifference]:
    """Position of a test -> its difference, corrected within its family; of complete families
    alone, and of each descriptive one by itself.
    """
    out: dict[int, CorrectedDifference] = {}
    for name in dict.fromkeys(test.family.name for test in tests):
        own = [k for k, test in enumerate(tests) if test.family.name == name]
        known = [d for k in own if (d := tests[k].difference) is not None]
        if tests[own[0]].family.descriptive:
            out |= {
                k: evaluate.holm_correct([d])[0]
                for k in own
                if (d := tests[k].difference) is not None
            }
        elif len(known) == len(own):
            signs, margins = [tests[k].metric.sign for k in own], [tests[k].margin for k in own]
            out |= dict(
                zip(
                    own,
                    evaluate.apply_margins(evaluate.holm_correct(known), margins, signs),
                    strict=True,
                )
            )
    return out


def collect_columns(plans: Sequence[ExperimentPlan], workspace: Path) -> dict[str, ColumnRuns]:
    """The runs of every column of the recipes."""
    opened = make_windows_opener(workspace)
    out: dict[str, ColumnRuns] = {}
    for plan in plans:
        keep = workspace / "reports" / plan.name / "kept"
        cells: dict[tuple[str, str, int], list[str]] = {}
        for entry in plan.table:
            if entry.run is not None:
                cells.setdefault((entry.column, entry.row, entry.seed), []).append(entry.run)
        for (column, row, seed), names in cells.items():
            parts = [
                result_table.read_scored_run(row, column, seed, workspace / "runs" / name)
                for name in names
            ]
            known = [part for part in parts if part is not None]
            pooled = folds.pool_folds(known, keep, opened) if len(known) == len(names) else None
            rows: dict[str, dict[int, ScoredRun | None]] = out.setdefault(
                column, ColumnRuns(column, {}, keep, opened)
            ).rows  # type: ignore[assignment]
            rows.setdefault(row, {})[seed] = pooled
    return out


def judge_test(test: RegisteredTest, d: CorrectedDifference | None) -> RegisteredResult:
    """The result of a test; `d`: its corrected difference, None before its family is complete."""
    family, metric = test.family, test.metric
    out = RegisteredResult(
        family=family.name, data=test.column, row=family.row, rival=test.rival, done=test.done, cells=test.cells,
        descriptive=family.descriptive,
    )  # fmt: skip
    if d is None:
        return out
    pair, (lo, hi), verdict = (
        (family.row, test.rival),
        (d.corrected_lo, d.corrected_hi),
        name_verdict(d, metric),
    )
    sentence = describe_difference(pair, test.column, d, metric, test.unit)
    if d.against_margin is not None:
        verdict = name_margin_verdict(d, metric)
        lo, hi = find_margin_interval(d, metric) or (lo, hi)
        # empty where no verdict is allowed: the difference says why
        if against := describe_margin(pair, d, metric, planned=True):
            sentence = f"On {test.column}: {against}"
    return out.model_copy(
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
    recipe: Recipe,
    name: str,
    plans: Sequence[ExperimentPlan],
    workspace: Path,
    progress: Progress | None,
) -> Path:
    """The page of all registered tests; the path of `report.html`, beside which `summary.json` has
    a `RegisteredResult` for each test.
    """
    columns = collect_columns(plans, workspace)
    tests = []
    for family in recipe.family:
        for column in family.columns:
            runs = columns.get(column)
            empty = [RegisteredTest(family, column, rival, 0, 0) for rival in family.rivals]
            tests += (
                [runs.compare(family, rival, progress) for rival in family.rivals]
                if runs
                else empty
            )
    corrected = correct_families(tests)
    results = [judge_test(test, corrected.get(k)) for k, test in enumerate(tests)]
    questions = {family.name: family.question for family in recipe.family}
    return write_report(
        storage.make_folder(workspace / "reports" / name),
        make_families_page(recipe.title or name, questions, results),
    )
