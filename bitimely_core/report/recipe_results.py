"""The page of a recipe's results: our cells beside the paper's, differences, ranks, baselines,
variation, cost, and missing cells.

`[paper]` of a recipe holds a table per row, `column = value` or `column = [value, standard error]`,
in the units that the paper prints (per cent, or those of the error). A column is a view of a data
set, `sleep-edf/staging`, for the main metric of its task; `data:metric` is another metric of it,
`data:label` the AUPRC of one label of multi-label data (`pophr:chf`). Keys that are no rows:
`names` (row or column -> printed name), `source` (table of the paper) and `notes` (lines below the
table).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitimely_core import evaluate
from bitimely_core.errors import UserError, clean, usage_error
from bitimely_core.evaluate import baselines, folds, result_table
from bitimely_core.evaluate.folds import FittedBaseline
from bitimely_core.evaluate.result_table import (
    Key,
    OpenWindows,
    ResultTable,
    ScoredRun,
    has_withheld,
)
from bitimely_core.page import (
    Figure,
    ForestPanel,
    ForestPlot,
    PageBuilder,
    Table,
    make_table,
    rename_units,
)
from bitimely_core.report import differences, result_blocks, run_page
from bitimely_core.report.page_text import is_number, scale_number
from bitimely_core.report.recipe_tables import (
    MISSING_COLUMNS,
    MissingCell,
    PaperPair,
    PaperValues,
    PlannedCell,
    RecipeResults,
    list_missing,
    main_table,
    render_latex,
    render_markdown,
    write_long_csv,
)
from bitimely_core.report.renderer import write_report
from bitimely_core.schemas.scores import WITHOUT_FITTED
from bitimely_core.store.workspace import find_run_folder
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import count_nouns, drop_empty, drop_none, group_by
from bitimely_core.wording import list_first

if TYPE_CHECKING:
    import polars as pl

RESERVED = ("names", "source", "notes")
PaperSection = Mapping[str, Any]  # `[paper]` of a recipe
METHOD = (
    "A cell is the mean over seeds; the number in brackets is the standard error over test "
    "subjects (all windows of a subject together), that of the mean over seeds. It does not "
    "include the variance between trainings: see the variation between seeds.",
    differences.METHOD,
    "Each run is compared with its own baselines; those that are fitted for the page are fitted on "
    "the training windows of the first row's run, with the penalty chosen on the validation split, "
    "and scored by the same code on the same windows. Nothing was chosen by the test labels.",
    "The paper does not state over which units its bootstrap was, which subjects were in its test "
    "split or how many; its numbers are shown for comparison, and differences to them are not "
    "tested.",
)


@dataclass(frozen=True, kw_only=True)
class ResultPlan:
    """What a recipe states on its results. The row of the first of `cells` is the reference of all
    comparisons.
    """

    name: str
    cells: Sequence[PlannedCell]
    title: str = ""
    description: str = ""
    paper: PaperSection = field(default_factory=dict)  # see the head of this module
    columns: Sequence[str] = ()  # `data:metric` or `data:class`, beside those of the paper
    # column, "": the others -> margin of non-inferiority in printed units
    margins: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ResultSource:
    """Where the scores and predictions of a recipe's runs come from."""

    workspace: Path
    keep: Path  # folder of stored scores and comparisons
    open_windows: OpenWindows


def write_results(
    plan: ResultPlan, *, workspace: Path, out: Path, open_windows: OpenWindows
) -> dict[str, Any]:
    """Write the page of a recipe's results into `out`: report.html, summary.json, results.csv,
    results.md, results.tex and the data of every figure.

    Scores and comparisons are stored in `out/kept` for later calls.

    Returns `report`, `verdict`, `cells`, `differences`, `missing`, `files`. Raises UserError:
    config (exit 2) for a `[paper]` that cannot be read; those of writing.
    """
    source = ResultSource(workspace, out / "kept", open_windows)
    results, remarks = _gather_results(plan, source)
    table, cells, missing = results.table, plan.cells, results.missing
    total = len(cells) - sum(cell.state == "left out" for cell in missing)
    sentences = [
        differences.summarize_baselines(table),
        f"{len(cells) - len(missing)} of {total} cells were run.",
        differences.summarize_differences(table),
    ]
    verdict = " ".join(filter(None, sentences))
    texts = {
        "results.csv": write_long_csv(cells, results),
        "results.md": render_markdown(results, verdict),
        "results.tex": render_latex(results),
    }
    builder = PageBuilder(plan.title or plan.name)
    builder.notice(*_list_notices(results), *remarks)
    for result in table.results.values():
        builder.notice(*result.remarks)
    builder.add_facts(_list_facts(plan, results))
    _fill_page(builder, results, workspace)
    page = builder.finish(verdict, _summarize_numbers(plan.name, results))
    page = rename_units(page, table.unit())
    others = {file: text.encode() for file, text in texts.items()}
    path = write_report(out, page, files=ABOUT_FILES, others=others)
    return {
        "report": str(path),
        "verdict": page.verdict,
        "files": [str(out / file) for file in texts],
        **{key: page.summary[key] for key in ("cells", "differences", "missing")},
    }


ABOUT_FILES = {
    "results.csv": "every cell and seed as a table",
    "results.md": "the table as Markdown",
    "results.tex": "the table for LaTeX (booktabs)",
}


# ---- what the recipe states, and what was run


def read_paper(paper: PaperSection) -> tuple[PaperValues, dict[str, str]]:
    """The numbers of `[paper]` by row and column, and the printed names. Raises UserError (config,
    exit 2) for what is no number.
    """
    values: PaperValues = {}
    for row, columns in paper.items():
        if row in RESERVED:
            continue
        for column, value in (columns if isinstance(columns, Mapping) else {"": columns}).items():
            pair = _parse_pair(value)
            if not column or pair is None:
                raise usage_error(
                    f"found {clean(str(value), 80)}",
                    "expected column = value, or column = [value, standard error]",
                    field=f"paper.{row}.{column}".removesuffix("."),
                )
            values[row, column] = pair
    return values, {str(key): str(name) for key, name in (paper.get("names") or {}).items()}


def _parse_pair(value: object) -> PaperPair | None:
    """A number with or without its standard error; None for anything else."""
    numbers = value if isinstance(value, list | tuple) else (value,)
    if len(numbers) not in {1, 2} or not all(is_number(n) and math.isfinite(n) for n in numbers):
        return None
    return float(numbers[0]), float(numbers[1]) if len(numbers) == 2 else None


def _gather_results(plan: ResultPlan, source: ResultSource) -> tuple[RecipeResults, list[str]]:
    """The scores and comparisons of all cells; and a line for each baseline that was left out."""
    paper, names = read_paper(plan.paper)
    runs, missing = _open_runs(plan.cells, source)
    rows = list(dict.fromkeys([*(cell.row for cell in plan.cells), *(row for row, _ in paper)]))
    reference = rows[0] if rows else ""
    fitted, remarks = _fit_baselines(runs, reference, source)
    columns = _group_columns(plan, paper, runs)
    frames = {data: _title_frames(kinds) for data, kinds in fitted.items()}
    compared = {
        column.key: result_table.compare_column(
            column, runs, reference, others=frames.get(column.data, {}), keep=source.keep
        )
        for column in columns
    }
    table = ResultTable(runs, rows, columns, reference, compared, names, plan.margins, planned=True)
    results = RecipeResults(
        plan.title,
        table,
        paper,
        str(plan.paper.get("source") or ""),
        _join_notes(plan.paper.get("notes") or []),
        missing,
        {data: {kind: pair[0] for kind, pair in kinds.items()} for data, kinds in fitted.items()},
    )
    return results, remarks


def _group_columns(
    plan: ResultPlan, paper: PaperValues, runs: Sequence[ScoredRun]
) -> list[result_table.ScoreColumn]:
    """The columns of the cells, then those that the paper alone has."""
    of_paper = [column for _, column in paper]
    requested = [cell.column for cell in plan.cells]
    requested += [column for column in of_paper if column.partition(":")[0] not in requested]
    return result_table.group_columns(runs, requested, dict.fromkeys([*plan.columns, *of_paper]))


def _title_frames(fitted: Mapping[str, FittedBaseline]) -> dict[str, pl.DataFrame]:
    """Printed name of a baseline -> its predictions."""
    return {baselines.title_baseline(kind): frame for kind, (_, frame) in fitted.items()}


def _join_notes(notes: str | Sequence[object]) -> str:
    """The notes on the paper's table, which a recipe states as a text or a list of texts."""
    return notes if isinstance(notes, str) else " ".join(map(str, notes))


def _open_runs(
    cells: Sequence[PlannedCell], source: ResultSource
) -> tuple[list[ScoredRun], list[MissingCell]]:
    """The evaluated runs of the cells, and the cells without one."""
    places: dict[tuple[str, str, int], ScoredRun] = {}
    missing = []
    for cell in cells:
        run = _open_cell(cell, source)
        if isinstance(run, MissingCell):
            missing.append(run)
        elif places.setdefault((run.row, run.data, run.seed), run) is not run:
            reason = f"another run is in this cell, not {run.name}"
            missing.append(MissingCell(cell.row, cell.column, cell.seed, "not run", reason))
    return list(places.values()), missing


def _open_cell(cell: PlannedCell, source: ResultSource) -> ScoredRun | MissingCell:
    """The evaluated run of a cell, its folds pooled; where there is none, the reason."""
    missing = MissingCell(cell.row, cell.column, cell.seed, cell.state, cell.detail)
    if cell.state != "done" or not cell.runs:
        return missing
    data, parts = cell.column.partition(":")[0], []
    try:
        for name in cell.runs:
            folder = find_run_folder(name, source.workspace)
            part = result_table.read_scored_run(cell.row, data, cell.seed, folder)
            if part is None:
                return missing._replace(state="failed", detail="the run has not been evaluated")
            parts.append(part)
        return folds.pool_folds(parts, source.keep, source.open_windows)
    except (UserError, ValueError) as error:
        raise_system_error(error)
        return missing._replace(state="failed", detail=clean(str(error), 300))


def _fit_baselines(
    runs: Sequence[ScoredRun], reference: str, source: ResultSource
) -> tuple[dict[str, dict[str, FittedBaseline]], list[str]]:
    """Data set -> the baselines that could be fitted, by kind; and a line for each that could
    not.
    """
    fitted: dict[str, dict[str, FittedBaseline]] = {}
    remarks = []
    scored = [run for run in runs if run.scores.task]
    for data, of_data in group_by(scored, lambda run: run.data).items():
        first = min(of_data, key=lambda run: (run.row != reference, run.seed))
        if has_withheld(first.scores):
            reason = "scores of labels of few people are withheld"
            remarks.append(f"{data}: fitted baselines were left out: {reason}.")
            continue
        for kind in _list_kinds(data, source.open_windows):
            baseline = _fit_baseline(kind, first, source)
            if isinstance(baseline, str):
                title = baselines.title_baseline(kind)
                remarks.append(f"{data}: the baseline of {title} was left out: {baseline}.")
            else:
                fitted.setdefault(data, {})[kind] = baseline
    return fitted, remarks


def _fit_baseline(kind: str, run: ScoredRun, source: ResultSource) -> FittedBaseline | str:
    """A baseline on the data of a run, its folds pooled; a text says why there is none."""
    try:
        return folds.fit_pooled_baseline(kind, run, source.keep, source.open_windows)
    except UserError as error:
        raise_system_error(error)
        return clean(error.finding.line(), 300)


def _list_kinds(data: str, open_windows: OpenWindows) -> list[str]:
    """The kinds of baselines of a data set."""
    try:
        return list(baselines.list_baselines(open_windows(data)))
    except UserError as error:  # tokens that are gone: each kind says so
        raise_system_error(error)
        return list(baselines.DESCRIPTIONS)


# ---- the page


def _fill_page(page: PageBuilder, results: RecipeResults, workspace: Path) -> None:
    """Figures and tables in reading order."""
    table = results.table
    page.add(main_table(results), *_interval_figures(results))
    if table.differences:
        page.section("Differences")
        page.add(*differences.difference_figure(table), differences.difference_table(table))
    page.add(*result_blocks.rank_blocks(table))
    if table.runs:
        page.section("Baselines")
        page.add(_baseline_table(results), *differences.baseline_difference_table(table))
        page.section("Further metrics and variation")
        page.add(*result_blocks.secondary_table(table), *result_blocks.variance_table(table))
    if results.missing:
        page.section("Missing cells")
        page.table(
            "missing",
            "Missing cells and reasons",
            "Cells of the recipe without a score; this page supports no conclusion about them.",
            MISSING_COLUMNS,
            [
                [*cells, reason or "no reason was given"]
                for *cells, reason in list_missing(results.missing, table.name)
            ],
        )
    if table.runs:
        page.section("Training")
        page.add(result_blocks.data_table(table), result_blocks.row_table(table))
        page.add(result_blocks.cost_table(table, workspace))
        page.add(*result_blocks.curve_figures(table, workspace))
    page.section("Methods")
    page.add(*METHOD)


def _interval_figures(results: RecipeResults) -> list[Figure]:
    """Our values with intervals beside the paper's, a panel for each of our columns."""
    table, panels = results.table, []
    rows = result_blocks.list_scored(table)
    for column in table.columns:
        cells = [table.cells.get((row, column.key)) for row in rows]
        values, lo, hi = differences.scale_fields(cells, column.factor, "value", "lo", "hi")
        pairs = [results.paper.get((row, column.key)) for row in rows]
        other = [pair[0] if pair else None for pair in pairs] if any(pairs) else None
        if set(values) - {None}:
            panels.append(ForestPanel(table.name(column.key), values, lo, hi, other))
    title = "Our results and the paper's"
    caption = (
        "Dots: our means, lines: 95 % CI over test subjects (windows, where the notices say so)"
    )
    if results.paper:
        caption += (
            "; diamonds: the paper's. A diamond inside an interval does not confirm a "
            "reproduction, one outside does not refute it: splits and subjects differ. Evidence "
            "against a reproduction would be another order of the rows in columns with significant "
            "differences."
        )
    else:
        title = "Scores with intervals"
        caption += ". Overlapping intervals do not rank two rows: see the differences."
    plot = ForestPlot(list(map(table.name, rows)), panels, other="the paper's")
    return [Figure("beside", title, caption, plot)] if panels else []


def _baseline_table(results: RecipeResults) -> Table:
    """Baselines of each column, and the rows that do not exceed them."""
    table, rows = results.table, []
    for column in table.columns:
        values = {row: table.value(row, column) for row in table.rows}
        scored = drop_none(values)
        sign = column.sign
        for name, metric in results.baselines(column).items():
            below = []
            if metric.value is not None:
                bound = sign * metric.value
                below = [table.name(row) for row, value in scored.items() if sign * value <= bound]
            text = f"{len(below)} of {len(scored)}"
            if below:
                text += f": {list_first(below, 5)}"
            ends = (metric.value, metric.lo, metric.hi)
            numbers = [scale_number(number, column.factor) for number in ends]
            rows.append([table.name(column.key), column.words, name, *numbers, text])
    about = []
    for kind in results.kinds:
        title = baselines.title_baseline(kind)
        about.append(f"{title[0].upper()}{title[1:]}: {baselines.describe_baseline(kind)}.")
    columns = ["data", "metric", "baseline", "value", "95 % CI lower", "upper"]
    return make_table(
        "baselines",
        "Baselines without pre-training",
        "A useful model must exceed its baselines: a row whose mean does not shows no benefit of "
        "its architecture or pre-training. For the significance see the differences to baselines. "
        f"{' '.join(about)}",
        [*columns, "rows that do not exceed it"],
        rows,
    )


def _list_notices(results: RecipeResults) -> list[str]:
    """The notices of the runs, each with the number of runs that have it."""
    table, runs = results.table, results.table.runs
    counts: Counter[str] = Counter()
    notices: list[str] = []
    for run in runs:
        counts.update(list(dict.fromkeys([*run.scores.notices, *run.scores.remarks])))
        for part in run.runs:
            lines = run_page.list_reproductions(part.folder)
            notices += [f"{part.name}: {line}" for line in lines]
    if all(results.fitted.get(run.data) for run in runs):
        counts.pop(WITHOUT_FITTED, None)  # of the pages of single runs: this page has them
    for line, count in counts.most_common(12):
        notices.append(line if count == len(runs) else f"{line} ({count} of {len(runs)} runs)")
    return [*notices, *_report_few_subjects(table)]


def _report_few_subjects(table: ResultTable) -> list[str]:
    """A sentence on each data set with too few test subjects for intervals."""
    few = {
        run.data: run.scores.n_subjects
        for run in table.runs
        if run.scores.settings.by == "subject"
        and run.scores.n_subjects is not None
        and run.scores.n_subjects < evaluate.MINIMUM_UNITS
    }
    required = f"at least {evaluate.MINIMUM_UNITS} required"
    return [
        f"{table.name(data)}: no CI: {count_nouns(count, 'test subject')}, {required}."
        for data, count in few.items()
    ]


def _list_facts(plan: ResultPlan, results: RecipeResults) -> dict[str, str]:
    """Facts at the top of the page; those that are not known are left out."""
    table = results.table
    versions: set[str] = set()
    for run in table.runs:
        versions.update(*(run_page.list_versions(part.record) for part in run.runs))
    stamps = Counter(run_page.stamp_text(run.scores.leak_free) for run in table.runs)
    pretraining = [f"{n} run{'s' * (n > 1)} {words}" for words, n in stamps.most_common()]
    source = "the paper's table" if results.paper else "no numbers of the paper"
    facts = {
        "Recipe": plan.name,
        "About": plan.description,
        "Compared to": results.source or source,
        "Reference": table.name(table.reference),
        "Seeds": ", ".join(map(str, sorted({run.seed for run in table.runs}))),
        "Pre-training": "; ".join(pretraining),
        "Versions": ", ".join(sorted(versions)),
    }
    return drop_empty(facts)


def _nest_cells(cells: Mapping[Key, object]) -> dict[str, dict[str, object]]:
    """Row -> column -> cell."""
    rows: dict[str, dict[str, object]] = defaultdict(dict)
    for (row, column), cell in cells.items():
        rows[row][column] = cell
    return rows


def _summarize_numbers(name: str, results: RecipeResults) -> dict[str, object]:
    """summary.json: the numbers behind the page; scores as fractions, the paper's in its units."""
    table = results.table
    paper = {cell: {"value": value, "se": error} for cell, (value, error) in results.paper.items()}
    return {
        "pipeline": name,
        "rows": list(table.rows),
        "columns": [
            {
                "column": column.key,
                "data": column.data,
                "metric": column.metric,
                "label": column.label,
                "lower_is_better": column.lower,
            }
            for column in table.columns
        ],
        "cells": _nest_cells(table.cells),
        "differences": _nest_cells(table.differences),
        "baseline_differences": differences.nest_baselines(table),
        "paper": _nest_cells(paper),
        "baselines": {
            data: {kind: scores.metrics for kind, scores in kinds.items()}
            for data, kinds in results.fitted.items()
        },
        "missing": list(results.missing),
        "told_apart": sum(evaluate.significance_sign(d) != 0 for d in table.differences.values()),
    }
