"""The page that compares evaluated runs: their scores, paired differences, ranks, variation between
seeds, cost and loss curves.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bitimely_core import evaluate
from bitimely_core.errors import Reason, input_error
from bitimely_core.evaluate import result_table
from bitimely_core.evaluate.intervals import list_values
from bitimely_core.evaluate.metrics import is_lower_better
from bitimely_core.evaluate.result_table import ResultTable, ScoreColumn
from bitimely_core.evaluate.verdicts import count_units
from bitimely_core.page import (
    BarPlot,
    Figure,
    MetricLike,
    Page,
    PageBuilder,
    Table,
    make_table,
    rename_units,
)
from bitimely_core.report.dashboard_page import identify_arm, show_baseline, show_seeds
from bitimely_core.report.differences import (
    DESCRIBED,
    METHOD,
    baseline_difference_table,
    difference_figure,
    difference_table,
    nest_baselines,
    summarize_baselines,
    summarize_differences,
)
from bitimely_core.report.result_blocks import (
    cost_table,
    curve_figures,
    data_table,
    rank_blocks,
    row_table,
    variance_table,
    win_table,
)
from bitimely_core.report.run_page import (
    describe_baselines,
    find_places,
    list_reproductions,
    loss_curves,
    main_metric,
    run_facts,
)
from bitimely_core.schemas.scores import MetricValue, Scores
from bitimely_core.store.records import describe_changes, has_result
from bitimely_core.types import group_by, select_keys

Arm = tuple[str, str]  # row, data
COMMON_FACTS = ("Data", "Split", "Versions", "Computed on", "Fingerprint of the data")
FEW = 4  # runs that the title names, each with its loss curves


def comparison_page(folders: list[Path], margin: float | None = None) -> Page:
    """One page of several evaluated runs; `margin` of non-inferiority and equivalence, in printed
    units. Raises UserError (incomplete, exit 4) for a run without scores.
    """
    table, scored = _compare_runs(folders, margin), list(map(Scores.load_shared, folders))
    names = ", ".join(scores.run for scores in scored)
    page = PageBuilder(f"Comparison of {names if len(scored) <= FEW else f'{len(scored)} runs'}")
    _add_notices(page, table, folders, scored)
    page.add_facts(_list_facts(table))
    page.fact("Seed", ", ".join(map(str, sorted({run.seed for run in table.runs}))))
    main = _list_main(table, scored)
    page.add(*_score_figures(table, scored[0], main))
    _add_blocks(page, table, folders, scored)
    summary: dict[str, object] = {
        scores.run: {name: metric.value for name, metric in scores.metrics.items()}
        for scores in scored
    }
    sentences = [summarize_baselines(table), _describe_scores(table, scored, main)]
    if table.differences:
        page.fact("Reference of the differences", table.reference)
        by_column = itertools.groupby(table.differences.items(), key=lambda pair: pair[0][1])
        columns = {key: {row: d for (row, _), d in group} for key, group in by_column}
        summary["differences"] = {"reference": table.reference, **columns}
        sentences.append(summarize_differences(table))
    summary["baseline_differences"] = nest_baselines(table)
    verdict = " ".join(filter(None, sentences))
    return rename_units(page.finish(verdict, summary), table.unit())


def _add_notices(
    page: PageBuilder, table: ResultTable, folders: list[Path], scored: Sequence[Scores]
) -> None:
    """Caveats of all runs, those on altered files and on reproductions first."""
    for folder, scores in zip(folders, scored, strict=True):
        page.notice(*describe_changes(folder))
        page.notice(*(f"{scores.run}: {line}" for line in list_reproductions(folder)))
    for scores in scored:
        page.notice(*scores.notices)
    for result in table.results.values():
        page.notice(*result.remarks)


def _list_facts(table: ResultTable) -> dict[str, str]:
    """Facts of the first run; of several rows those that they have in common."""
    first = table.runs[0]
    common = select_keys(run_facts(first.record), COMMON_FACTS)
    return common if len(table.rows) > 1 else run_facts(first.runs[0].record) | common


def _compare_runs(folders: list[Path], margin: float | None) -> ResultTable:
    """The runs in rows and columns; the row of the first is the reference."""
    for folder in folders:
        if not has_result(folder / "scores.json"):
            hint = f"Run: bitimely evaluate {folder.name}"
            raise input_error(
                Reason.INCOMPLETE, "no scores", "expected scores.json", hint, file=str(folder)
            )
    runs = result_table.assign_rows(folders)
    columns, reference = result_table.group_columns(runs, [run.data for run in runs]), runs[0].row
    return ResultTable(
        runs,
        list(dict.fromkeys(run.row for run in runs)),
        columns,
        reference,
        {column.key: result_table.compare_column(column, runs, reference) for column in columns},
        margins={} if margin is None else {"": margin},
    )


def _add_blocks(
    page: PageBuilder, table: ResultTable, folders: list[Path], scored: Sequence[Scores]
) -> None:
    """Figures and tables in reading order."""
    root = folders[0].parent.parent
    page.add(*_score_tables(table, scored))
    if table.differences:
        page.add(*difference_figure(table), difference_table(table))
    page.add(*baseline_difference_table(table))
    if len(table.columns) > 1:
        page.add(*win_table(table), *rank_blocks(table))
    page.add(*variance_table(table), data_table(table), row_table(table), cost_table(table, root))
    if len(folders) > FEW:
        page.add(*curve_figures(table, root))
    else:
        for folder, scores in zip(folders, scored, strict=True):
            page.add(*loss_curves(folder, f"curves-{scores.run}", f"Training of {scores.run}"))
    if table.differences:
        page.section("Methods")
        page.text(METHOD)


def _group_seeds(table: ResultTable, scored: Sequence[Scores]) -> dict[Arm, list[Scores]]:
    """Name and data -> the runs that differ in their seed alone; a single run has its own name."""
    runs_by_name = {run.name: run for run in table.runs}

    def find_arm(scores: Scores) -> Arm:
        run = runs_by_name.get(scores.run)
        return identify_arm(run.record) if run else scores.run, scores.data

    grouped = {}
    for (_, data), members in group_by(scored, find_arm).items():
        name = members[0].run
        if len(members) > 1:
            name = f"{runs_by_name[name].row} ({len(members)} seeds)"
        grouped[name, data] = members
    return grouped


def _list_main(table: ResultTable, scored: Sequence[Scores]) -> dict[str, MetricValue]:
    """The main metric of the first run, of all on its data; of several seeds their mean, with its
    interval over subjects.
    """
    first, name = scored[0], main_metric(scored[0])
    runs_by_name = {run.name: run for run in table.runs}
    column = ScoreColumn(f"{first.data}:{name}", first.data, name, None, first.task or "")
    values = {}
    for (row, data), members in _group_seeds(table, scored).items():
        if data != first.data:
            continue
        values[row] = members[0].metrics.get(name, MetricValue())
        if len(members) > 1:
            runs = [runs_by_name[scores.run]._replace(row=row) for scores in members]
            pooled = result_table.compare_column(column, runs, row).cells
            values[row] = pooled.get(row, MetricValue())
    return values


def _score_figures(
    table: ResultTable, first: Scores, main: Mapping[str, MetricValue]
) -> list[Figure]:
    """The main score of all runs on the data of the first, beside its best baseline."""
    name = main_metric(first)
    bars: dict[str, MetricLike] = dict(main)
    is_defined = any(metric.value is not None for metric in bars.values())
    if best := first.find_best_baseline(name, lower=is_lower_better(name)):
        bars[f"best baseline: {best.name}"] = best
    verdict = summarize_differences(table) if table.differences else ""
    figure = Figure(
        "scores",
        f"{evaluate.name_metric(name, first=True)} on {first.data}",
        "The score on the split, of several seeds their mean; lines: 95 % CI over "
        f"{table.unit(first.data)}s. Overlapping intervals do not rank the runs. {verdict}".strip(),
        BarPlot.from_metrics(bars, evaluate.name_metric(name)),
    )
    return [figure] if is_defined else []


def _describe_scores(
    table: ResultTable, scored: Sequence[Scores], main: Mapping[str, MetricValue]
) -> str:
    """The scores without a best one: which it is may be another for other seeds or threads;
    differences have their own sentence.
    """
    first, name = scored[0], main_metric(scored[0])
    text = f"{evaluate.name_metric(name)} is withheld or undefined for all runs"
    if reached := _list_values(name, main):
        trained = [run for run in scored if run.data == first.data]
        words = evaluate.name_metric(name, first=True)
        text = f"{words} of {count_units(len(trained), 'trained model')}: {reached}"
    text += f"{describe_baselines(first, name)}."
    runs = [run for run in table.runs if run.data == first.data]
    objectives = {run.record.settings.objective.name for run in runs}
    if name == "rel" and len(objectives) > 1:
        text += " Their objectives differ, so their losses are not comparable."
    return text


def _list_values(name: str, metrics: Mapping[str, MetricValue]) -> str:
    """The values of a metric by run, of many runs the lowest and the highest; empty without any."""
    values = {run: metric.value for run, metric in metrics.items() if metric.value is not None}
    if not values:
        return ""
    places = max(find_places(name, metrics[run]) for run in values)
    text = ", ".join(f"{run} {_show_interval(metrics[run], places)}" for run in values)
    if len(values) > DESCRIBED:
        text = f"{min(values.values()):.{places}f} to {max(values.values()):.{places}f}"
    return text


def _show_interval(metric: MetricValue, places: int) -> str:
    """A value with its interval, where it has one."""
    if metric.lo is None:
        return f"{metric.value:.{places}f}"
    return f"{metric.value:.{places}f} (95 % CI {metric.lo:.{places}f} to {metric.hi:.{places}f})"


def _score_tables(table: ResultTable, scored: Sequence[Scores]) -> list[Table]:
    """All metrics of all runs beside their best baseline; a table a task, a row for runs that
    differ in their seed alone.
    """
    tables = []
    by_task = group_by(scored, lambda scores: scores.task)
    for task, members in by_task.items():
        part = f": {task or 'pre-training'}" if len(by_task) > 1 else ""
        tables.append(_score_table(table, members, f"All scores{part}"))
    return tables


def _score_table(table: ResultTable, members: Sequence[Scores], title: str) -> Table:
    """All metrics of the runs of one task."""
    measured = itertools.chain(*(scores.metrics for scores in members))
    metrics = evaluate.METRICS.get(members[0].task or "", tuple(dict.fromkeys(measured)))
    rows = []
    for (name, data), runs in _group_seeds(table, members).items():
        cells = [_show_metric([run.metrics.get(metric) for run in runs]) for metric in metrics]
        main = main_metric(runs[0])
        best = runs[0].find_best_baseline(main, lower=is_lower_better(main))
        rows.append([name, data, *cells, show_baseline(best)])
    columns = ["run", "data", *map(evaluate.name_metric, metrics), "best baseline"]
    caption = (
        "Value and 95 % CI; of several seeds mean ± standard deviation over them. Best "
        "baseline: in the main metric on the same windows. A dash: undefined or not measured."
    )
    return make_table("all-scores", title, caption, columns, rows)


def _show_metric(metrics: Sequence[MetricValue | None]) -> Any:
    """The cell of a metric: of several seeds their mean and spread."""
    values = list_values(metrics)
    if len(metrics) == 1 or len(values) < 2:
        return metrics[0]
    return show_seeds(values)
