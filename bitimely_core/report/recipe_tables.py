"""The table of a recipe's results, our cells beside the paper's: for the page, as Markdown, as
LaTeX and as CSV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from bitimely_core import evaluate
from bitimely_core.evaluate import baselines
from bitimely_core.evaluate.result_table import Key, ResultTable, ScoreColumn, ScoredRun
from bitimely_core.evaluate.verdicts import choose_places
from bitimely_core.page import Table, make_table
from bitimely_core.report.numbers import table_data, to_csv
from bitimely_core.report.page_text import (
    markdown_row,
    markdown_text,
    scale_number,
    tex_text,
    text_cell,
)
from bitimely_core.schemas.scores import CellScore, MetricValue, TaskScores
from bitimely_core.types import group_by

EVENT_BASELINES = ("length_only", "single_code")  # shortcut baselines of claims, with labels
MISSING_COLUMNS = ("rows", "column", "seeds", "state", "reason")
PaperPair = tuple[float, float | None]  # value, standard error
PaperValues = dict[Key, PaperPair]


class PlannedCell(NamedTuple):
    """A cell that the recipe plans: its place in the table, its runs, and how they ended."""

    row: str
    column: str
    seed: int
    state: str  # done, failed, not run, or left out: the recipe has no such cell
    runs: tuple[str, ...] = ()  # several are test folds, to be pooled
    detail: str = ""


class MissingCell(NamedTuple):
    """A cell without a score; `state` and `detail` as of a planned one."""

    row: str
    column: str
    seed: int
    state: str
    detail: str


@dataclass(frozen=True)
class RecipeResults:
    """The results of a recipe beside the paper's."""

    title: str
    table: ResultTable
    paper: PaperValues
    source: str  # table of the paper
    notes: str
    missing: Sequence[MissingCell]
    fitted: Mapping[str, Mapping[str, TaskScores]]  # data -> baseline -> scores

    @property
    def unit(self) -> str:
        """The unit of resampling."""
        by_window = any(run.scores.settings.by == "window" for run in self.table.runs)
        return "windows" if by_window else f"{self.table.unit()}s"

    @property
    def kinds(self) -> list[str]:
        """The baselines that were fitted to some data set."""
        return list(dict.fromkeys(chain.from_iterable(self.fitted.values())))

    def baselines(self, column: ScoreColumn) -> dict[str, MetricValue]:
        """The baselines of a column by printed name, those without fitting first."""
        runs = self.table.by_data.get(column.data)
        if not runs or column.metric is None:
            return {}
        fitted = {
            baselines.title_baseline(kind): column.metric_in(scores) or MetricValue()
            for kind, scores in self.fitted.get(column.data, {}).items()
        }
        return {**_list_simple_baselines(column, runs[0].scores), **fitted}


def _list_simple_baselines(column: ScoreColumn, scores: TaskScores) -> dict[str, MetricValue]:
    """The baselines that the evaluation of a run stores; of one label its prevalence, too."""
    metrics = {name: baseline.metrics for name, baseline in scores.baselines.items()}
    values = {}
    if column.label is not None:
        metrics = {
            name: (scores.baselines[name].by_class or {}).get(column.label, {})
            for name in metrics
            if name in EVENT_BASELINES
        }
        row = scores.by_class.get(column.label)
        if row is not None and row.base_rate is not None and column.metric == "auprc":
            values["prevalence"] = MetricValue(value=row.base_rate)
    for name, by_metric in metrics.items():
        if column.metric in by_metric:
            values[name.replace("_", " ")] = by_metric[column.metric]
    return values


# ---- cells


def format_cell(cell: MetricValue | None, column: ScoreColumn) -> str:
    """`90.4 (2.5)`: mean and standard error; `90.4 (n < 5)` with too few subjects for one; a dash
    without a score.
    """
    if cell is None or cell.value is None:
        return "–"
    value, error = cell.value * column.factor, scale_number(cell.se, column.factor)
    is_scaled = evaluate.find_unit(column.metric or "").scaled
    # ordinarily as the paper prints them
    least = 1 if column.factor > 1 else 2
    places = choose_places(least, error, error, value if is_scaled else None)
    spread = "no s.e."
    if error is not None:
        spread = f"{error:.{places}f}"
    elif isinstance(cell, CellScore) and cell.n_subjects is not None:
        is_few = cell.n_subjects < evaluate.MINIMUM_UNITS
        spread = f"n < {evaluate.MINIMUM_UNITS}" if is_few else spread
    return f"{value:.{places}f} ({spread})"


def format_paper(pair: PaperPair | None) -> str:
    """The paper's number as it prints it, or a dash."""
    if pair is None:
        return "–"
    value, *errors = [number for number in pair if number is not None]
    places = max(1, *(len(f"{number:.6g}".partition(".")[2]) for number in (value, *errors)))
    return " ".join([f"{value:.{places}f}", *(f"({error:.{places}f})" for error in errors)])


def _format_pair(results: RecipeResults, row: str, column: ScoreColumn) -> str:
    """`ours (se) / paper (se)`, without numbers of the paper ours alone."""
    cell, pair = results.table.cells.get((row, column.key)), results.paper.get((row, column.key))
    text = format_cell(cell, column)
    return f"{text} / {format_paper(pair)}" if results.paper else text


def _find_best_baseline(
    results: RecipeResults, column: ScoreColumn
) -> dict[str, float | str | None] | None:
    """The cell of the best baseline of a column, its name below; None without any."""
    values = {
        name: metric.value
        for name, metric in results.baselines(column).items()
        if metric.value is not None
    }
    if not values:
        return None
    name = max(values, key=lambda name: column.sign * values[name])
    metric = results.baselines(column)[name]
    value = scale_number(metric.value, column.factor)
    return text_cell(value, format_cell(metric, column), name, paper=None)


def main_table(results: RecipeResults) -> Table:
    """Our value above the paper's in one cell."""
    table, rows = results.table, []
    for row in table.rows:
        line: list[Any] = [table.name(row)]
        for column in table.columns:
            value = scale_number(table.value(row, column), column.factor)
            text = format_cell(table.cells.get((row, column.key)), column)
            pair = results.paper.get((row, column.key))
            note, paper = (format_paper(pair), pair[0]) if pair else ("", None)
            line.append(text_cell(value, text, note, paper=paper))
        rows.append(line)
    best = [_find_best_baseline(results, column) for column in table.columns]
    if any(best):
        rows.append(["best baseline", *best])
    named: dict[str, list[str]] = {}
    for column in table.columns:
        named.setdefault(column.words, []).append(table.name(column.key))
    units = "; ".join(f"{words}: {', '.join(names)}" for words, names in named.items() if words)
    return make_table(
        "results",
        "Results",
        "Our mean over seeds, in brackets the standard error over test subjects (windows, where "
        f"the notices say so); below, small, the paper's. {units}. n < {evaluate.MINIMUM_UNITS}: "
        "too few test subjects for a standard error. A dash: not run or not defined. For the "
        f"significance of differences between cells see the differences. {results.notes}",
        ["row", *(table.name(column.key) for column in table.columns)],
        rows,
    )


# ---- files


def _tex_line(name: str, cells: Iterable[str]) -> str:
    """A row of a LaTeX table."""
    numbers = [cell.replace("–", "--").replace("n < ", "$n<$") for cell in cells]
    return rf"{' & '.join([tex_text(name), *numbers])} \\"


def render_latex(results: RecipeResults) -> str:
    """The table in the paper's layout: `ours (se) / paper (se)`; fitted baselines below a rule.
    Needs booktabs.
    """
    table, columns = results.table, results.table.columns
    beside = " / the paper's" if results.paper else ""
    caption = f"{tex_text(results.title)}. Ours (standard error over test {results.unit}){beside}."
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}[t]",
        rf"\caption{{{caption}}}",
        r"\scriptsize",
        rf"\begin{{tabular}}{{l{'c' * len(columns)}}}",
        r"\toprule",
        _tex_line("", (tex_text(table.name(column.key)) for column in columns)),
        _tex_line("", (tex_text(column.words) for column in columns)),
        r"\midrule",
    ]
    for row in table.rows:
        cells = [_format_pair(results, row, column) for column in columns]
        lines.append(_tex_line(table.name(row), cells))
    lines += [r"\midrule"] * bool(results.kinds)
    for kind in results.kinds:
        cells = []
        for column in columns:
            scores = results.fitted.get(column.data, {}).get(kind)
            cells.append(format_cell(column.metric_in(scores) if scores else None, column))
        lines.append(_tex_line(baselines.title_baseline(kind), cells))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def render_markdown(results: RecipeResults, verdict: str) -> str:
    """The table with baselines at its end, and the missing cells, as Markdown."""
    table, columns = results.table, results.table.columns
    lines = [
        f"# {markdown_text(results.title)}",
        "",
        markdown_text(verdict),
        "",
        markdown_row(["row", *(markdown_text(table.name(column.key)) for column in columns)]),
        markdown_row(["---"] * (len(columns) + 1)),
        markdown_row(["", *(markdown_text(column.words) for column in columns)]),
    ]
    for row in table.rows:
        cells = [_format_pair(results, row, column) for column in columns]
        lines.append(markdown_row([markdown_text(table.name(row)), *cells]))
    lines += _list_baseline_lines(results)
    beside = " / the paper's" if results.paper else ""
    source = f", {markdown_text(results.source)}" if results.source else ""
    lines += ["", f"Ours (standard error over test {results.unit}){beside}{source}."]
    return "\n".join([*lines, *_list_missing_lines(results.missing), ""])


def _list_baseline_lines(results: RecipeResults) -> list[str]:
    """A row of the Markdown table for each baseline that any column has."""
    columns = results.table.columns
    reached = list(map(results.baselines, columns))
    lines = []
    for name in dict.fromkeys(chain.from_iterable(reached)):
        pairs = zip(reached, columns, strict=True)
        cells = [format_cell(values.get(name), column) for values, column in pairs]
        lines.append(markdown_row([f"*{markdown_text(name)}*", *cells]))
    return lines


def _list_missing_lines(missing: Sequence[MissingCell]) -> list[str]:
    """The missing cells as a section of Markdown; [] without any."""
    if not missing:
        return []
    head = ["", "## Missing cells", "", markdown_row(MISSING_COLUMNS)]
    rows = [markdown_row(map(markdown_text, cells)) for cells in list_missing(missing)]
    return [*head, markdown_row(["---"] * len(MISSING_COLUMNS)), *rows]


def list_missing(
    missing: Sequence[MissingCell], name: Callable[[str], str] = str
) -> list[list[str]]:
    """The cells of `MISSING_COLUMNS`: missing cells of one column with the same reason in one line;
    `name` gives the printed name of a row or column.
    """
    groups = group_by(missing, lambda cell: (cell.column, cell.state, cell.detail))
    lines = []
    for (column, state, detail), cells in groups.items():
        rows = ", ".join(map(name, dict.fromkeys(cell.row for cell in cells)))
        seeds = ", ".join(map(str, dict.fromkeys(cell.seed for cell in cells)))
        lines.append([rows, name(column), seeds, state, detail])
    return lines


def write_long_csv(cells: Sequence[PlannedCell], results: RecipeResults) -> str:
    """A line a cell and seed, in the units of `scores.json`; the paper's in its own."""
    runs = {(run.row, run.data, run.seed): run for run in results.table.runs}
    missing = {_find_place(cell): cell for cell in results.missing}
    lines = []
    for place in dict.fromkeys(map(_find_place, cells)):
        row, data, seed = place
        for column in results.table.columns:
            if column.data == data:
                paper = results.paper.get((row, column.key), (None, None))
                numbers, detail = _list_numbers(runs.get(place), missing.get(place), column)
                lines.append([row, column.key, column.metric, seed, *numbers, *paper, detail])
    cell = ("row", "column", "metric", "seed", "run", "state")
    score = ("value", "se", "lo", "hi", "windows", "subjects")
    columns = [*cell, *score, "paper", "paper_se", "detail"]
    return to_csv(table_data(make_table("results", "", "", columns, lines)))


def _find_place(cell: PlannedCell | MissingCell) -> tuple[str, str, int]:
    """Row, data and seed of a cell."""
    return cell.row, cell.column.partition(":")[0], cell.seed


def _list_numbers(
    run: ScoredRun | None, missing: MissingCell | None, column: ScoreColumn
) -> tuple[list[Any], str | None]:
    """Run, state, metric, windows and subjects of a cell and seed; and why a number is missing."""
    if run is not None:
        metric = column.metric_in(run.scores) or MetricValue()
        numbers = [metric.value, metric.se, metric.lo, metric.hi]
        counts = [run.scores.n, run.scores.n_subjects]
        return [run.name, "done", *numbers, *counts], metric.undefined_reason
    if missing is not None:
        return [None, missing.state, *[None] * 6], missing.detail
    return [None] * 8, None
