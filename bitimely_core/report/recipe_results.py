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
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bitimely_core import evaluate
from bitimely_core.errors import UserError, clean, usage_error
from bitimely_core.evaluate import baselines as plain
from bitimely_core.evaluate import folds, result_table
from bitimely_core.evaluate.result_table import (
    Key,
    OpenWindows,
    ResultTable,
    ScoreColumn,
    ScoredRun,
    has_withheld,
)
from bitimely_core.evaluate.verdicts import choose_places
from bitimely_core.page import (
    Figure,
    ForestPanel,
    ForestPlot,
    PageBuilder,
    Table,
    make_figure,
    make_table,
    rename_units,
)
from bitimely_core.report import comparison, run_page
from bitimely_core.report.numbers import table_data, to_csv
from bitimely_core.report.renderer import write_report
from bitimely_core.report.text import markdown_text, tex_text, text_cell
from bitimely_core.schemas.scores import WITHOUT_FITTED, CellScore, MetricValue, TaskScores
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import Progress
from bitimely_core.workspace import find_run_folder

RESERVED = ("names", "source", "notes")
EVENTS = ("length_only", "single_code")  # shortcut baselines of claims
PaperSection = Mapping[str, Any]  # `[paper]` of a recipe
PaperValues = dict[Key, tuple[float, float | None]]
METHOD = (
    "A cell is the mean over seeds; the number in brackets is the standard error over test subjects (all windows of a subject together), that of the mean over "
    "seeds. It does not include the variance between trainings: see the variation between seeds.",
    comparison.METHOD,
    "Each run is compared with its own baselines; those that are fitted for the page are fitted on the training windows of the first row's run, with the penalty chosen on the "
    "validation split, and scored by the same code on the same windows. Nothing was chosen by the test labels.",
    "The paper does not state over which units its bootstrap was, which subjects were in its test split or how many; its numbers are shown for comparison, and differences "
    "to them are not tested.",
)


class PlannedCell(NamedTuple):
    """A cell that the recipe plans: its place in the table, its runs, and how they ended."""

    row: str
    column: str
    seed: int
    state: str  # done, failed, not run, or left out: the recipe has no such cell
    runs: tuple[str, ...] = ()  # several are test folds, to be pooled
    detail: str = ""


class MissingCell(NamedTuple):
    """A cell without a score."""

    row: str
    column: str
    seed: int
    state: str  # failed, not run, or left out: the recipe has no such cell
    detail: str


class MissingGroup(NamedTuple):
    """Missing cells of one column for one reason."""

    rows: list[str]
    column: str
    seeds: list[int]
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
        return (
            "windows"
            if any(one.scores.settings.by == "window" for one in self.table.found)
            else f"{self.table.unit()}s"
        )

    def baselines(self, column: ScoreColumn) -> dict[str, MetricValue]:
        """The baselines of a column by printed name, those without fitting first."""
        one = next((one for one in self.table.found if one.data == column.data), None)
        if one is None or column.metric is None:
            return {}
        fitted = {
            plain.title_baseline(k): column.metric_in(scores) or MetricValue()
            for k, scores in self.fitted.get(column.data, {}).items()
        }
        return {**_simple_baselines(column, one.scores), **fitted}


def write_results(
    name: str,
    cells: Sequence[PlannedCell],
    *,
    paper: PaperSection,
    columns: Sequence[str] = (),
    title: str,
    description: str,
    workspace: Path,
    out: Path,
    open_windows: OpenWindows,
    margins: Mapping[str, float] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the page of a recipe's results: report.html, summary.json, results.csv, results.md,
    results.tex and the data of every figure.

    The row of the first of `cells` is the reference of all comparisons. `paper`: see the head of
    this module. `columns`: those that the recipe states, `data:metric` or `data:class`, beside the
    paper's. `margins`: column ("": the others) -> margin of non-inferiority that the recipe states.
    The baselines of `baselines.list_baselines` are fitted beside the runs. Results are stored in
    `out/kept` for later calls.

    Returns `report`, `verdict`, `cells`, `differences`, `missing`, `files`. Raises UserError:
    config (exit 2) for a `[paper]` that cannot be read; those of writing.
    """
    stated, names = read_paper(paper)
    keep = out / "kept"
    found, missing = _open_runs(cells, workspace, keep, open_windows)
    planned = [cell.column for cell in cells]
    requested = [*planned, *(c for _, c in stated if c.partition(":")[0] not in planned)]
    shown_columns = result_table.group_columns(
        found, requested, dict.fromkeys([*columns, *(column for _, column in stated)])
    )
    rows = list(dict.fromkeys([*(cell.row for cell in cells), *(row for row, _ in stated)]))
    reference = rows[0] if rows else ""
    fitted, remarks = _fit_baselines(found, reference, keep, open_windows, progress)
    frames = {
        data: {plain.title_baseline(k): frame for k, (_, frame) in of.items()}
        for data, of in fitted.items()
    }
    compared = {
        c.key: result_table.compare_column(
            c, found, reference, others=frames.get(c.data, {}), keep=keep
        )
        for c in shown_columns
    }
    notes = paper.get("notes") or []
    results = RecipeResults(
        title,
        ResultTable(
            found, rows, shown_columns, reference, compared, names, margins or {}, planned=True
        ),
        stated,
        str(paper.get("source") or ""),
        " ".join([notes] if isinstance(notes, str) else map(str, notes)),
        missing,
        {data: {k: scores for k, (scores, _) in of.items()} for data, of in fitted.items()},
    )
    total = len(cells) - sum(m.state == "left out" for m in missing)
    counted = f"{len(cells) - len(missing)} of {total} cells were run."
    verdict = " ".join(
        filter(
            None,
            [
                comparison.summarize_baselines(results.table),
                counted,
                comparison.summarize_differences(results.table),
            ],
        )
    )
    files = {
        "results.csv": ("every cell and seed as a table", write_long_csv(cells, results)),
        "results.md": ("the table as Markdown", render_markdown(results, verdict)),
        "results.tex": ("the table for LaTeX (booktabs)", render_latex(results)),
    }
    builder = PageBuilder(title or name)
    builder.notice(
        *_list_notices(results),
        *remarks,
        *(line for result in compared.values() for line in result.remarks),
    )
    builder.add_facts(_list_facts(name, description, results))
    _fill_page(builder, results, workspace)
    verdict = rename_units(verdict, results.table.unit())
    page = rename_units(
        builder.finish(verdict, _summarize_numbers(name, results)), results.table.unit()
    )
    about, content = ({file: pair[i] for file, pair in files.items()} for i in (0, 1))
    path = write_report(
        out, page, files=about, others={file: text.encode() for file, text in content.items()}
    )
    shown = {key: page.summary[key] for key in ("cells", "differences", "missing")}
    return {
        "report": str(path),
        "verdict": verdict,
        "files": [str(out / file) for file in files],
        **shown,
    }


def read_paper(paper: PaperSection) -> tuple[PaperValues, dict[str, str]]:
    """The numbers of `[paper]` by row and column, and the printed names. Raises UserError (config,
    exit 2) for what is no number.
    """
    out: PaperValues = {}
    for row, values in paper.items():
        if row in RESERVED:
            continue
        for column, value in values.items() if isinstance(values, Mapping) else [("", values)]:
            pair = value if isinstance(value, list | tuple) else (value,)
            numbers = [
                v
                for v in pair
                if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)
            ]
            if not column or len(numbers) < len(pair) or not 1 <= len(pair) <= 2:
                expected, field = (
                    "expected column = value, or column = [value, standard error]",
                    f"paper.{row}.{column}".removesuffix("."),
                )
                raise usage_error(f"found {clean(str(value), 80)}", expected, field=field)
            out[row, column] = (float(pair[0]), float(pair[1]) if len(pair) == 2 else None)
    return out, {str(k): str(v) for k, v in (paper.get("names") or {}).items()}


def _open_runs(
    cells: Sequence[PlannedCell], workspace: Path, keep: Path, open_windows: OpenWindows
) -> tuple[list[ScoredRun], list[MissingCell]]:
    """The evaluated runs of the cells, and the cells without one."""
    found: list[ScoredRun] = []
    missing: list[MissingCell] = []
    for row, column, seed, state, runs, detail in cells:
        one = None
        if state == "done" and runs:
            try:
                data = column.partition(":")[0]
                parts = [
                    result_table.read_scored_run(row, data, seed, find_run_folder(name, workspace))
                    for name in runs
                ]
                known = [part for part in parts if part is not None]
                one = (
                    folds.pool_folds(known, keep, open_windows)
                    if len(known) == len(parts)
                    else None
                )
                detail = detail if one else "the run has not been evaluated"
            except (UserError, ValueError) as error:
                raise_system_error(error)
                detail = clean(str(error), 300)
            state = state if one else "failed"
        if one is None:
            missing.append(MissingCell(row, column, seed, state, detail))
        elif any(
            (other.row, other.data, other.seed) == (one.row, one.data, one.seed) for other in found
        ):
            missing.append(
                MissingCell(
                    row, column, seed, "not run", f"another run is in this cell, not {one.name}"
                )
            )
        else:
            found.append(one)
    return found, missing


def _fit_baselines(
    found: Sequence[ScoredRun],
    reference: str,
    keep: Path,
    open_windows: OpenWindows,
    progress: Progress | None,
) -> tuple[dict[str, dict[str, tuple[TaskScores, Any]]], list[str]]:
    """Of each data set the baselines that could be fitted: kind -> (scores, frame); and a line for
    each that could not.
    """
    out: dict[str, dict[str, tuple[TaskScores, Any]]] = {}
    remarks = []
    for data in dict.fromkeys(one.data for one in found if one.scores.task):
        scored = [one for one in found if one.data == data and one.scores.task]
        first = min(scored, key=lambda one: (one.row != reference, one.seed))
        if has_withheld(first.scores):
            remarks.append(
                f"{data}: fitted baselines were left out: scores of labels of few people are withheld."
            )
            continue
        for kind in _list_kinds(data, open_windows):
            try:
                fit = partial(
                    plain.fit_baseline,
                    kind,
                    keep=keep,
                    open_windows=open_windows,
                    progress=progress,
                )
                each = [
                    fit(one.record, one.scores, also=[one.folder / plain.FOLDER])
                    for one in first.runs
                ]
                why = next((one for one in each if isinstance(one, str)), "")
                made = why or folds.pool_baseline(
                    [one for one in each if not isinstance(one, str)], first.scores
                )
            except UserError as error:
                raise_system_error(error)
                made = clean(error.finding.line(), 300)
            if isinstance(made, str):
                remarks.append(
                    f"{data}: the baseline of {plain.title_baseline(kind)} was left out: {made}."
                )
            else:
                out.setdefault(data, {})[kind] = made
    return out, remarks


def _list_kinds(data: str, open_windows: OpenWindows) -> list[str]:
    """The kinds of baselines of a data set."""
    try:
        return list(plain.list_baselines(open_windows(data)))
    except UserError as error:  # tokens that are gone: each kind says so
        raise_system_error(error)
        return list(plain.DESCRIPTIONS)


def format_cell(cell: MetricValue | None, column: ScoreColumn) -> str:
    """`90.4 (2.5)`: mean and standard error; `90.4 (n < 5)` with too few subjects for one; a dash
    without a score.
    """
    if cell is None or cell.value is None:
        return "–"
    spread = None if cell.se is None else cell.se * column.factor
    small = cell.value * column.factor if evaluate.find_unit(column.metric or "").scaled else None
    # ordinarily as the paper prints them
    places = choose_places(1 if column.factor > 1 else 2, spread, spread, small)
    few = (
        isinstance(cell, CellScore)
        and cell.n_subjects is not None
        and cell.n_subjects < evaluate.MINIMUM_UNITS
    )
    error = (
        f"{cell.se * column.factor:.{places}f}"
        if cell.se is not None
        else f"n < {evaluate.MINIMUM_UNITS}"
        if few
        else "no s.e."
    )
    return f"{cell.value * column.factor:.{places}f} ({error})"


def format_paper(pair: tuple[float, float | None] | None) -> str:
    """The paper's number as it prints it, or a dash."""
    if pair is None:
        return "–"
    known = [value for value in pair if value is not None]
    places = max(1, *(len(f"{value:.6g}".partition(".")[2]) for value in known))
    return " ".join([f"{known[0]:.{places}f}", *(f"({value:.{places}f})" for value in known[1:])])


def main_table(results: RecipeResults) -> Table:
    """Our value above the paper's in one cell."""
    table, rows = results.table, []
    for row in table.rows:
        line: list[Any] = [table.name(row)]
        for c in table.columns:
            value, pair = table.value(row, c), results.paper.get((row, c.key))
            own, shown = (
                format_cell(table.cells.get((row, c.key)), c),
                None if value is None else value * c.factor,
            )
            line.append(
                text_cell(
                    shown, own, format_paper(pair) if pair else "", paper=pair[0] if pair else None
                )
            )
        rows.append(line)
    metrics = dict.fromkeys(c.words for c in table.columns if c.words)
    units = "; ".join(
        f"{words}: {', '.join(table.name(c.key) for c in table.columns if c.words == words)}"
        for words in metrics
    )
    caption = (
        f"Our mean over seeds, in brackets the standard error over test subjects (windows, where the notices say so); below, small, the paper's. {units}. "
        f"n < {evaluate.MINIMUM_UNITS}: too few test subjects for a standard error. A dash: not run or not defined. For the significance of differences between cells see the "
        f"differences. {results.notes}"
    )
    return make_table(
        "results", "Results", caption, ["row", *(table.name(c.key) for c in table.columns)], rows
    )


def render_latex(results: RecipeResults) -> str:
    """The table in the paper's layout: `ours (se) / paper (se)`; fitted baselines below a rule.
    Needs booktabs.
    """
    table, columns = results.table, results.table.columns

    def line(name: str, cells: Iterable[str]) -> str:
        return (
            " & ".join(
                [
                    tex_text(name),
                    *("--" if cell == "–" else cell.replace("n < ", "$n<$") for cell in cells),
                ]
            )
            + r" \\"
        )

    def pair(row: str, c: ScoreColumn) -> str:
        own = format_cell(table.cells.get((row, c.key)), c)
        numbers = [own, *([format_paper(results.paper.get((row, c.key)))] if results.paper else [])]
        return " / ".join("--" if number == "–" else number for number in numbers)

    beside = " / the paper's" if results.paper else ""
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}[t]",
        rf"\caption{{{tex_text(results.title)}. Ours (standard error over test {results.unit}){beside}.}}",
        r"\scriptsize",
        r"\begin{tabular}{l" + "c" * len(columns) + "}",
        r"\toprule",
        line("", (tex_text(table.name(c.key)) for c in columns)),
        line("", (tex_text(c.words) for c in columns)),
        r"\midrule",
        *(line(table.name(row), (pair(row, c) for c in columns)) for row in table.rows),
    ]
    kinds = list(dict.fromkeys(kind for of in results.fitted.values() for kind in of))
    for k, kind in enumerate(kinds):
        scores = [(c, results.fitted.get(c.data, {}).get(kind)) for c in columns]
        lines += [r"\midrule"] if k == 0 else []
        lines.append(
            line(
                plain.title_baseline(kind),
                (format_cell(c.metric_in(of) if of else None, c) for c, of in scores),
            )
        )
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def render_markdown(results: RecipeResults, verdict: str) -> str:
    """The table with baselines at its end, and the missing cells, as Markdown."""
    table, columns = results.table, results.table.columns

    def line(parts: Iterable[object]) -> str:
        return "| " + " | ".join(map(str, parts)) + " |"

    def pair(row: str, c: ScoreColumn) -> str:
        own = format_cell(table.cells.get((row, c.key)), c)
        return own + (
            f" / {format_paper(results.paper.get((row, c.key)))}" if results.paper else ""
        )

    baselines = {c.key: results.baselines(c) for c in columns}
    source = (" / the paper's" if results.paper else "") + (
        f", {markdown_text(results.source)}" if results.source else ""
    )
    out = [
        f"# {markdown_text(results.title)}",
        "",
        markdown_text(verdict),
        "",
        line(["", *(markdown_text(table.name(c.key)) for c in columns)]),
        line(["---"] * (len(columns) + 1)),
        line(["", *(markdown_text(c.words) for c in columns)]),
        *(
            line([markdown_text(table.name(row)), *(pair(row, c) for c in columns)])
            for row in table.rows
        ),
        *(
            line(
                [
                    f"*{markdown_text(name)}*",
                    *(format_cell(baselines[c.key].get(name), c) for c in columns),
                ]
            )
            for name in dict.fromkeys(name for of in baselines.values() for name in of)
        ),
        "",
        f"Ours (standard error over test {results.unit}){source}.",
    ]
    if results.missing:
        out += [
            "",
            "## Missing cells",
            "",
            line(["rows", "column", "seeds", "state", "reason"]),
            line(["---"] * 5),
        ]
        for m in group_missing(results.missing):
            out.append(
                line(
                    map(
                        markdown_text,
                        (
                            ", ".join(m.rows),
                            m.column,
                            ", ".join(map(str, m.seeds)),
                            m.state,
                            m.detail,
                        ),
                    )
                )
            )
    return "\n".join([*out, ""])


def group_missing(missing: Sequence[MissingCell]) -> list[MissingGroup]:
    """Missing cells of one column with the same reason as one."""
    out: dict[tuple[str, str, str], MissingGroup] = {}
    for m in missing:
        one = out.setdefault(
            (m.column, m.state, m.detail), MissingGroup([], m.column, [], m.state, m.detail)
        )
        one.rows.extend([m.row] if m.row not in one.rows else [])
        one.seeds.extend([m.seed] if m.seed not in one.seeds else [])
    return list(out.values())


def write_long_csv(cells: Sequence[PlannedCell], results: RecipeResults) -> str:
    """A line a cell and seed, in the units of `scores.json`; the paper's in its own."""
    runs = {(one.row, one.data, one.seed): one for one in results.table.found}
    missing = {(m.row, m.column.partition(":")[0], m.seed): m for m in results.missing}
    places = dict.fromkeys((cell.row, cell.column.partition(":")[0], cell.seed) for cell in cells)
    lines = []
    for place in places:
        row, data, seed = place
        for c in (c for c in results.table.columns if c.data == data):
            one, lost = runs.get(place), missing.get(place)
            metric = (c.metric_in(one.scores) if one else None) or MetricValue()
            state, detail = (
                ("done", metric.undefined_reason)
                if one
                else (lost.state, lost.detail)
                if lost
                else (None, None)
            )
            numbers = [
                metric.value,
                metric.se,
                metric.lo,
                metric.hi,
                *((one.scores.n, one.scores.n_subjects) if one else (None, None)),
            ]
            paper = results.paper.get((row, c.key), (None, None))
            lines.append(
                [
                    row,
                    c.key,
                    c.metric,
                    seed,
                    one.name if one else None,
                    state,
                    *numbers,
                    *paper,
                    detail,
                ]
            )
    heads = [
        "row",
        "column",
        "metric",
        "seed",
        "run",
        "state",
        "value",
        "se",
        "lo",
        "hi",
        "windows",
        "subjects",
    ]
    return to_csv(
        table_data(make_table("results", "", "", [*heads, "paper", "paper_se", "detail"], lines))
    )


def _fill_page(page: PageBuilder, results: RecipeResults, workspace: Path) -> None:
    table = results.table
    page.add(main_table(results), *_interval_figures(results))
    if table.differences:
        page.section("Differences")
        page.add(*comparison.difference_figure(table), comparison.difference_table(table))
    page.add(*comparison.rank_blocks(table))
    if table.found:
        page.section("Baselines")
        page.add(_baseline_table(results), *comparison.baseline_difference_table(table))
        page.section("Further metrics and variation")
        page.add(*comparison.secondary_table(table), *comparison.variance_table(table))
    if results.missing:
        rows = [
            [
                ", ".join(map(table.name, m.rows)),
                table.name(m.column),
                ", ".join(map(str, m.seeds)),
                m.state,
                m.detail or "no reason was given",
            ]
            for m in group_missing(results.missing)
        ]
        page.section("Missing cells")
        caption = (
            "Cells of the recipe without a score; this page supports no conclusion about them."
        )
        page.table(
            "missing",
            "Missing cells and reasons",
            caption,
            ["rows", "column", "seeds", "state", "reason"],
            rows,
        )
    if table.found:
        page.section("Training")
        page.add(
            comparison.data_table(table),
            comparison.row_table(table),
            comparison.cost_table(table, workspace),
        )
        page.add(*comparison.curve_figures(table, workspace))
    page.section("Methods")
    page.add(*METHOD)


def _interval_figures(results: RecipeResults) -> list[Figure]:
    """Our values with intervals beside the paper's, a panel for each of our columns."""
    table, panels = results.table, []
    rows = [row for row in table.rows if any((row, c.key) in table.cells for c in table.columns)]
    for c in table.columns:
        cells = [table.cells.get((row, c.key)) for row in rows]
        if any(cell and cell.value is not None for cell in cells):
            values, lo, hi = comparison.scale_fields(cells, c, "value", "lo", "hi")
            pairs = [results.paper.get((row, c.key)) for row in rows]
            panels.append(
                ForestPanel(
                    table.name(c.key),
                    values,
                    lo,
                    hi,
                    [p[0] if p else None for p in pairs] if any(pairs) else None,
                )
            )
    if not panels:
        return []
    names = [table.name(row) for row in rows]
    caption = (
        "Dots: our means, lines: 95 % CI over test subjects (windows, where the notices say so)"
    )
    if not results.paper:
        caption += ". Overlapping intervals do not rank two rows: see the differences."
        return [make_figure("beside", "Scores with intervals", caption, ForestPlot(names, panels))]
    caption += (
        "; diamonds: the paper's. A diamond inside an interval does not confirm a reproduction, one outside does not refute it: splits and subjects differ. Evidence against "
        "a reproduction would be another order of the rows in columns with significant differences."
    )
    return [
        make_figure(
            "beside",
            "Our results and the paper's",
            caption,
            ForestPlot(names, panels, "", "ours", "the paper's"),
        )
    ]


def _simple_baselines(column: ScoreColumn, scores: TaskScores) -> dict[str, MetricValue]:
    held = scores.baselines
    if column.label is None:
        return {
            name.replace("_", " "): one.metrics[column.metric]
            for name, one in held.items()
            if column.metric in one.metrics
        }
    rate = scores.by_class[column.label].base_rate if column.label in scores.by_class else None
    prevalence = (
        {"prevalence": MetricValue(value=rate)}
        if rate is not None and column.metric == "auprc"
        else {}
    )
    labels = {
        name.replace("_", " "): (one.by_class or {}).get(column.label, {})
        for name, one in held.items()
        if name in EVENTS
    }
    return {
        **prevalence,
        **{name: each[column.metric] for name, each in labels.items() if column.metric in each},
    }


def _baseline_table(results: RecipeResults) -> Table:
    """Baselines of each column, and the rows that do not exceed them."""
    table, rows = results.table, []
    for c in table.columns:
        values = {row: v for row in table.rows if (v := table.value(row, c)) is not None}
        for name, metric in results.baselines(c).items():
            value = metric.value
            below = [
                table.name(row)
                for row, v in values.items()
                if value is not None and ((v >= value) if c.lower else (v <= value))
            ]
            numbers = [None if v is None else v * c.factor for v in (value, metric.lo, metric.hi)]
            listed = f": {', '.join(below[:5])}{' …' if len(below) > 5 else ''}" if below else ""
            rows.append(
                [
                    table.name(c.key),
                    c.words,
                    name,
                    *numbers,
                    f"{len(below)} of {len(values)}{listed}",
                ]
            )
    kinds = dict.fromkeys(kind for of in results.fitted.values() for kind in of)
    titles = [(plain.title_baseline(kind), plain.describe_baseline(kind)) for kind in kinds]
    about = " ".join(f"{title[0].upper()}{title[1:]}: {words}." for title, words in titles)
    caption = (
        "A useful model must exceed its baselines: a row whose mean does not shows no benefit of its architecture or pre-training. For the significance see the "
        f"differences to baselines. {about}"
    )
    columns = [
        "data",
        "metric",
        "baseline",
        "value",
        "95 % CI lower",
        "upper",
        "rows that do not exceed it",
    ]
    return make_table("baselines", "Baselines without pre-training", caption, columns, rows)


def _list_notices(results: RecipeResults) -> list[str]:
    table, found = results.table, results.table.found
    counted = Counter(
        line for one in found for line in dict.fromkeys([*one.scores.notices, *one.scores.remarks])
    )
    if all(results.fitted.get(one.data) for one in found):
        counted.pop(WITHOUT_FITTED, None)  # of the pages of single runs: this page has them
    out = [
        f"{part.name}: {line}"
        for one in found
        for part in one.runs
        for line in run_page.list_reproductions(part.folder)
    ]
    out += [
        line if n == len(found) else f"{line} ({n} of {len(found)} runs)"
        for line, n in counted.most_common(12)
    ]
    least = evaluate.MINIMUM_UNITS
    few = {
        one.data: n
        for one in found
        if (n := one.scores.n_subjects) is not None
        and n < least
        and one.scores.settings.by == "subject"
    }
    return out + [
        f"{table.name(data)}: no CI: {n} test subject{'s' * (n != 1)}, at least {least} required."
        for data, n in few.items()
    ]


def _list_facts(name: str, description: str, results: RecipeResults) -> dict[str, str]:
    table = results.table
    stamps = Counter(run_page.stamp_text(one.scores.leak_free) for one in table.found)
    records = [run.record for one in table.found for run in one.runs]
    versions = {
        f"{name} {record.versions[name]}"
        for record in records
        for name in ("bitimely", "torch", "python")
        if name in record.versions
    }
    facts = {
        "Recipe": name,
        "About": description,
        "Compared to": results.source
        or ("the paper's table" if results.paper else "no numbers of the paper"),
        "Reference": table.name(table.reference),
        "Seeds": ", ".join(map(str, sorted({one.seed for one in table.found}))),
        "Pre-training": "; ".join(
            f"{n} {'runs' if n > 1 else 'run'} {words}" for words, n in stamps.most_common()
        ),
        "Versions": ", ".join(sorted(versions)),
    }
    return {key: value for key, value in facts.items() if value}


def _summarize_numbers(name: str, results: RecipeResults) -> dict[str, object]:
    """summary.json: the numbers behind the page; scores as fractions, the paper's in its units."""

    def nest(of: Mapping[Key, object]) -> dict[str, dict[str, object]]:
        out: dict[str, dict[str, object]] = {}
        for (row, key), value in of.items():
            out.setdefault(row, {})[key] = value
        return out

    table = results.table
    return {
        "pipeline": name,
        "rows": list(table.rows),
        "columns": [
            {
                "column": c.key,
                "data": c.data,
                "metric": c.metric,
                "label": c.label,
                "lower_is_better": c.lower,
            }
            for c in table.columns
        ],
        "cells": nest(table.cells),
        "differences": nest(table.differences),
        "baseline_differences": comparison.nest_baselines(table),
        "paper": nest({key: {"value": v, "se": se} for key, (v, se) in results.paper.items()}),
        "baselines": {
            data: {kind: scores.metrics for kind, scores in of.items()}
            for data, of in results.fitted.items()
        },
        "missing": list(results.missing),
        "told_apart": sum(evaluate.significance_sign(d) != 0 for d in table.differences.values()),
    }
