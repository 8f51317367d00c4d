"""The page of a recipe's results: our cells beside the paper's, differences, ranks, baselines, spread, cost, and what could not be run.

`[paper]` of a recipe holds a table a row, `column = value` or `column = [value, standard error]`, in the units that the paper prints (per cent,
or those of the error). A column is a view of a data set, `sleep-edf/staging`, for the main metric of its task; `data:metric` is another metric of
it, `data:label` the AUPRC of one label of multi-label data (`pophr:CHF`). Keys that are no rows: `names` (row or column -> printed words), `source`
(which table of the paper) and `notes` (a list of lines that stand under the table).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bitimely_core import evaluate, storage
from bitimely_core.errors import UserError, clean, usage_error
from bitimely_core.evaluate import baselines as plain
from bitimely_core.evaluate import folds
from bitimely_core.evaluate.result_table import (
    ColumnResult,
    Key,
    OpenWindows,
    ScoreColumn,
    ScoredRun,
    compare_column,
    correct_family,
    group_columns,
    read_scored_run,
)
from bitimely_core.page import Figure, Page, Table
from bitimely_core.report import comparison, run_page
from bitimely_core.report.text import markdown_text, tex_text
from bitimely_core.types import Progress
from bitimely_core.workspace import run_folder

RESERVED = ("names", "source", "notes")
EVENTS = ("length_only", "single_code")  # baselines that tell one history from another
PaperValues = dict[Key, tuple[float, float | None]]
METHOD = (
    "A cell is the mean over seeds; the number in brackets is the standard error of a bootstrap over test subjects, all windows of a subject together, as the seeds' "
    "mean varies over the replicates. It does not hold what another training would give: see the spread over seeds.",
    comparison.METHOD,
    "Baselines are fitted on the training windows of the first row's run, their penalty is chosen on the validation split, and they are scored by the same "
    "code on the same windows. Nothing here was chosen by the test labels.",
    "The paper does not say over what its bootstrap was, which subjects were in its test split or how many; its numbers stand here to be looked at beside ours, and no "
    "difference to them is tested.",
)


def write_results(
    name: str,
    entries: Sequence[Mapping[str, Any]],
    *,
    paper: Mapping[str, Any],
    title: str,
    description: str,
    workspace: Path,
    out: Path,
    open_windows: OpenWindows,
    baselines: Sequence[str] = ("features", "kernels"),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the page of a recipe's results: report.html, summary.json, results.csv, results.md, results.tex and the data of every figure.

    Args:
        name: of the recipe.
        entries: the cells: `row`, `column`, `seed`, `run` (None where there is none; several: test folds to be scored together), `state` (done, failed, not run; left out: the recipe has no such cell), `detail`. The
            first row is the reference of all comparisons.
        paper: section `[paper]` of the recipe, see the head of this module.
        title: of the page.
        description: what the recipe is and how its settings stand to the paper's.
        workspace: where runs and tokens lie.
        open_windows: opens the tokens of that name.
        out: folder of the page; what was computed is kept in `out/kept`, so that a second call need not do it again.
        baselines: keys of `baselines.ABOUT` to fit beside the runs.
        progress: told about the baselines.

    Returns:
        `report`, `verdict`, `cells`, `differences`, `missing` (cells that are not there), `files`.

    Raises:
        UserError: config (exit 2) for a `[paper]` that cannot be read; those of writing.
    """
    from bitimely_core import report

    stated, names = read_paper(paper)
    found, missing = _open_runs(entries, workspace, out / "kept", open_windows)
    asked = dict.fromkeys(
        [*(str(e["column"]) for e in entries), *(c for _, c in stated if c.partition(":")[0] not in {e["column"] for e in entries})]
    )
    shown = group_columns(found, asked, [column for _, column in stated])
    rows = list(dict.fromkeys([*(str(e["row"]) for e in entries), *(row for row, _ in stated)]))
    reference = rows[0] if rows else ""
    fitted, remarks = _fit_baselines(found, reference, baselines, out / "kept", open_windows, progress)
    measures = {
        c.key: compare_column(
            c, found, reference, others={plain.TITLES[k]: f for k, (_, f) in fitted.get(c.data, {}).items()}, keep=out / "kept"
        )
        for c in shown
    }
    cells: dict[Key, dict[str, Any]] = {(row, key): cell for key, m in measures.items() for row, cell in m.cells.items()}
    differences = correct_family(measures)
    done = len(entries) - len(missing)
    never = sum(m["state"] == "left out" for m in missing)  # cells that the recipe has not
    verdict = f"{done} of {len(entries) - never} cells were run. " + comparison.summarize_differences(differences, shown, reference, names)
    unit = "windows" if any(one.scores["settings"]["by"] == "window" for one in found) else "subjects"
    untrained = {
        c.key: _untrained_baselines(c, one, fitted)
        for c in shown
        if c.metric
        for one in [next((o for o in found if o.data == c.data), None)]
        if one
    }
    files = {
        "results.csv": ("every cell and seed as a table", write_long_csv(entries, shown, found, stated, missing)),
        "results.md": (
            "the table as Markdown",
            render_markdown(title, verdict, rows, shown, cells, stated, names, paper, missing, untrained, unit),
        ),
        "results.tex": ("the table for LaTeX (booktabs)", render_latex(title, rows, shown, cells, stated, names, fitted, unit)),
    }
    blocks = _result_blocks(rows, shown, cells, differences, stated, names, paper, found, fitted, measures, missing, reference, workspace)
    summary = _summarize_numbers(name, rows, shown, cells, differences, stated, missing, fitted)
    page = Page(
        title=title or name,
        verdict=verdict,
        notices=[*_list_notices(found, shown, names), *remarks, *(line for m in measures.values() for line in m.remarks)],
        blocks=blocks,
        facts=_list_facts(name, description, paper, found, reference, names),
        summary=summary,
    )
    storage.make_folder(out)
    for file, (_, content) in files.items():
        storage.write_bytes(out / file, content.encode())
    path = report.write_report(out, page, files={file: about for file, (about, _) in files.items()})
    return {
        "report": str(path),
        "verdict": verdict,
        "files": [str(out / file) for file in files],
        **{k: summary[k] for k in ("cells", "differences", "missing")},
    }


def read_paper(paper: Mapping[str, Any]) -> tuple[PaperValues, dict[str, str]]:
    """The numbers of `[paper]` by row and column, and the printed names. Raises UserError (config, exit 2) for what is no number."""
    out: PaperValues = {}
    for row, values in paper.items():
        if row in RESERVED:
            continue
        for column, value in values.items() if isinstance(values, Mapping) else [("", values)]:
            pair = value if isinstance(value, list | tuple) else (value,)
            if not column or not 1 <= len(pair) <= 2 or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in pair):
                raise usage_error(
                    f"found {clean(str(value), 80)}",
                    "expected column = value, or column = [value, standard error]",
                    field=f"paper.{row}" + (f".{column}" if column else ""),
                )
            out[row, column] = (float(pair[0]), float(pair[1]) if len(pair) == 2 else None)
    return out, {str(k): str(v) for k, v in (paper.get("names") or {}).items()}


def _open_runs(
    entries: Iterable[Mapping[str, Any]], workspace: Path, keep: Path, open_windows: OpenWindows
) -> tuple[list[ScoredRun], list[dict[str, Any]]]:
    """The evaluated runs of the cells, and the cells without one."""
    found: list[ScoredRun] = []
    missing: list[dict[str, Any]] = []
    for entry in entries:
        row, column, seed = str(entry["row"]), str(entry["column"]), int(entry.get("seed") or 0)
        one, state, detail = None, str(entry["state"]), str(entry.get("detail") or "")
        if state == "done" and entry.get("run"):
            try:
                names = [entry["run"]] if isinstance(entry["run"], str) else entry["run"]
                data = column.partition(":")[0]
                parts = [read_scored_run(row, data, seed, run_folder(str(name), workspace)) for name in names]
                known = [part for part in parts if part is not None]
                one = folds.pool_folds(known, keep, open_windows) if len(known) == len(parts) else None
                detail = detail or "" if one else "the run has not been evaluated"
            except (UserError, ValueError) as error:
                detail = clean(str(error), 300)
            state = state if one else "failed"
        if one is None:
            missing.append({"row": row, "column": column, "seed": seed, "state": state, "detail": detail})
        elif any((other.row, other.data, other.seed) == (one.row, one.data, one.seed) for other in found):
            missing.append(
                {"row": row, "column": column, "seed": seed, "state": "not run", "detail": f"another run stands here, not {one.name}"}
            )
        else:
            found.append(one)
    return found, missing


def _fit_baselines(
    found: Sequence[ScoredRun], reference: str, kinds: Sequence[str], keep: Path, open_windows: OpenWindows, progress: Progress | None
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Of each data set the baselines that could be fitted: kind -> (scores, frame); and a line for each that could not."""
    out: dict[str, dict[str, Any]] = {}
    remarks = []
    for data in dict.fromkeys(one.data for one in found if one.scores.get("task")):
        mine = [one for one in found if one.data == data and one.scores.get("task")]
        first = min(mine, key=lambda one: (one.row != reference, one.seed))
        for kind in kinds:
            try:
                each = [
                    plain.fit_baseline(kind, one.body, one.scores, keep=keep, open_windows=open_windows, progress=progress)
                    for one in first.runs
                ]
                why = next((one for one in each if isinstance(one, str)), "")
                made = why or folds.pool_baseline([one for one in each if not isinstance(one, str)], first.scores)
            except UserError as error:
                made = clean(error.finding.line(), 300)
            if isinstance(made, str):
                remarks.append(f"{data}: the baseline of {plain.TITLES[kind]} was left out: {made}.")
            else:
                out.setdefault(data, {})[kind] = made
    return out, remarks


# --- cells as text ------------------------------------------------------------------------------------------------------------------------


def count_decimals(column: ScoreColumn) -> int:
    """Decimals that the paper prints."""
    return 1 if column.factor > 1 else 2


def format_cell(cell: Mapping[str, Any] | None, column: ScoreColumn) -> str:
    """`90.4 (2.5)`: mean and standard error; `90.4 (n < 5)` where there are too few subjects for one; a dash where there is nothing."""
    if not cell or cell["value"] is None:
        return "–"
    places = count_decimals(column)
    few = cell.get("n_subjects", evaluate.MINIMUM_UNITS) < evaluate.MINIMUM_UNITS
    error = (
        f"{cell['se'] * column.factor:.{places}f}" if cell.get("se") is not None else f"n < {evaluate.MINIMUM_UNITS}" if few else "no s.e."
    )
    return f"{cell['value'] * column.factor:.{places}f} ({error})"


def format_paper(pair: tuple[float, float | None] | None) -> str:
    """The paper's number as it prints it, or a dash."""
    if pair is None:
        return "–"
    known = [value for value in pair if value is not None]
    places = max(1, *(len(f"{value:.6g}".partition(".")[2]) for value in known))
    return " ".join([f"{known[0]:.{places}f}", *(f"({value:.{places}f})" for value in known[1:])])


def main_table(
    rows: Sequence[str],
    shown: Sequence[ScoreColumn],
    cells: Mapping[Key, Mapping[str, Any]],
    stated: PaperValues,
    names: Mapping[str, str],
    paper: Mapping[str, Any],
) -> Table:
    """Ours above, the paper's below, in one cell."""
    table = []
    for row in rows:
        line: list[Any] = [names.get(row, row)]
        for c in shown:
            cell, pair = cells.get((row, c.key)), stated.get((row, c.key))
            value = cell["value"] * c.factor if cell and cell["value"] is not None else None
            line.append(
                {
                    "value": value,
                    "text": format_cell(cell, c),
                    "note": format_paper(pair) if pair else "",
                    "paper": pair[0] if pair else None,
                }
            )
        table.append(line)
    units = "; ".join(
        f"{words}: {', '.join(names.get(c.key, c.key) for c in shown if c.words == words)}"
        for words in dict.fromkeys(c.words for c in shown)
        if words
    )
    notes = paper.get("notes") or []
    return Table(
        name="results",
        title="Results",
        columns=["row", *(names.get(c.key, c.key) for c in shown)],
        rows=table,
        caption=f"Our mean over seeds, in brackets the standard error over test subjects (windows, where the notices say so); below it, small, the paper's. {units}. n < {evaluate.MINIMUM_UNITS}: too few test subjects for a standard error. A dash was not run or is not defined. Two cells whose "
        "numbers differ are not told apart by that: see the differences. "
        + " ".join([notes] if isinstance(notes, str) else map(str, notes)),
    )


def render_latex(
    title: str,
    rows: Sequence[str],
    shown: Sequence[ScoreColumn],
    cells: Mapping[Key, Mapping[str, Any]],
    stated: PaperValues,
    names: Mapping[str, str],
    fitted: Mapping[str, Mapping[str, Any]],
    unit: str,
) -> str:
    """The table in the paper's layout: `ours (se) / paper (se)`; what needs no pre-training below a rule. Needs booktabs."""

    def number(text: str) -> str:
        return "--" if text == "–" else text.replace("n < ", "$n<$")

    beside = " / the paper's" if stated else ""
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}[t]",
        rf"\caption{{{tex_text(title)}. Ours (standard error over test {unit}){beside}.}}",
        r"\scriptsize",
        r"\begin{tabular}{l" + "c" * len(shown) + "}",
        r"\toprule",
        " & ".join(["", *(tex_text(names.get(c.key, c.key)) for c in shown)]) + r" \\",
        " & ".join(["", *(tex_text(c.words) for c in shown)]) + r" \\",
        r"\midrule",
    ]
    for row in rows:
        parts = [
            number(format_cell(cells.get((row, c.key)), c)) + (f" / {number(format_paper(stated.get((row, c.key))))}" if stated else "")
            for c in shown
        ]
        lines.append(" & ".join([tex_text(names.get(row, row)), *parts]) + r" \\")
    kinds = list(dict.fromkeys(kind for of in fitted.values() for kind in of))
    for k, kind in enumerate(kinds):
        parts = [number(format_cell(c.of(fitted[c.data][kind][0]) if kind in fitted.get(c.data, {}) else None, c)) for c in shown]
        lines += ([r"\midrule"] if k == 0 else []) + [" & ".join([tex_text(plain.TITLES[kind]), *parts]) + r" \\"]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def render_markdown(
    title: str,
    verdict: str,
    rows: Sequence[str],
    shown: Sequence[ScoreColumn],
    cells: Mapping[Key, Mapping[str, Any]],
    stated: PaperValues,
    names: Mapping[str, str],
    paper: Mapping[str, Any],
    missing: Sequence[Mapping[str, Any]],
    untrained: Mapping[str, Mapping[str, Mapping[str, Any]]],
    unit: str,
) -> str:
    """The table, with what needs no pre-training at its end, and what is missing as Markdown."""

    def line(parts: Iterable[object]) -> str:
        return "| " + " | ".join(map(str, parts)) + " |"

    out = [
        f"# {markdown_text(title)}",
        "",
        markdown_text(verdict),
        "",
        line(["", *(markdown_text(names.get(c.key, c.key)) for c in shown)]),
    ]
    out += [line(["---"] * (len(shown) + 1)), line(["", *(markdown_text(c.words) for c in shown)])]
    for row in rows:
        parts = [
            format_cell(cells.get((row, c.key)), c) + (f" / {format_paper(stated.get((row, c.key)))}" if stated else "") for c in shown
        ]
        out.append(line([markdown_text(names.get(row, row)), *parts]))
    for name in dict.fromkeys(name for of in untrained.values() for name in of):
        out.append(line([f"*{markdown_text(name)}*", *(format_cell(untrained.get(c.key, {}).get(name), c) for c in shown)]))
    out += [
        "",
        f"Ours (standard error over test {unit})"
        + (" / the paper's" if stated else "")
        + (f", {markdown_text(paper['source'])}" if paper.get("source") else "")
        + ".",
    ]
    if missing:
        out += ["", "## What was not run", "", line(["rows", "column", "seeds", "state", "why"]), line(["---"] * 5)]
        out += [
            line(
                [
                    markdown_text(text)
                    for text in (", ".join(m["rows"]), m["column"], ", ".join(map(str, m["seeds"])), m["state"], m["detail"])
                ]
            )
            for m in group_missing(missing)
        ]
    return "\n".join([*out, ""])


def group_missing(missing: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Missing cells of one column that have one reason as one: `rows`, `column`, `seeds`, `state`, `detail`."""
    out: dict[tuple[str, str, str], dict[str, Any]] = {}
    for m in missing:
        key = (m["column"], m["state"], m["detail"])
        one = out.setdefault(key, {"rows": [], "column": m["column"], "seeds": [], "state": m["state"], "detail": m["detail"]})
        one["rows"] += [m["row"]] if m["row"] not in one["rows"] else []
        one["seeds"] += [m["seed"]] if m["seed"] not in one["seeds"] else []
    return list(out.values())


def write_long_csv(
    entries: Sequence[Mapping[str, Any]],
    shown: Sequence[ScoreColumn],
    found: Sequence[ScoredRun],
    stated: PaperValues,
    missing: Sequence[Mapping[str, Any]],
) -> str:
    """A line a cell and seed, in the units of `scores.json`; the paper's in its own."""
    from bitimely_core import report

    at = {(one.row, one.data, one.seed): one for one in found}
    gone = {(m["row"], m["column"].partition(":")[0], m["seed"]): m for m in missing}
    places = dict.fromkeys((str(e["row"]), str(e["column"]).partition(":")[0], int(e.get("seed") or 0)) for e in entries)
    lines = []
    for row, data, seed in places:
        for c in (c for c in shown if c.data == data):
            one, lost = at.get((row, data, seed)), gone.get((row, data, seed), {})
            metric = (c.of(one.scores) if one else None) or {}
            pair = stated.get((row, c.key), (None, None))
            state, detail = ("done", metric.get("undefined_reason")) if one else (lost.get("state"), lost.get("detail"))
            counts = (one.scores["n"], one.scores["n_subjects"]) if one else (None, None)
            lines.append(
                [
                    row,
                    c.key,
                    c.metric,
                    seed,
                    one.name if one else None,
                    state,
                    *(metric.get(k) for k in ("value", "se", "lo", "hi")),
                    *counts,
                    *pair,
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
        "paper",
        "paper_se",
        "detail",
    ]
    return report.to_csv(report.table_data(Table(name="results", title="", caption="", columns=heads, rows=lines)))


# --- the page -----------------------------------------------------------------------------------------------------------------------------


def _result_blocks(
    rows: Sequence[str],
    shown: Sequence[ScoreColumn],
    cells: Mapping[Key, dict[str, Any]],
    differences: Mapping[Key, dict[str, Any]],
    stated: PaperValues,
    names: Mapping[str, str],
    paper: Mapping[str, Any],
    found: Sequence[ScoredRun],
    fitted: Mapping[str, Mapping[str, Any]],
    measures: Mapping[str, ColumnResult],
    missing: Sequence[Mapping[str, Any]],
    reference: str,
    workspace: Path,
) -> list[Figure | Table | str]:
    blocks: list[Figure | Table | str] = [
        main_table(rows, shown, cells, stated, names, paper),
        *_side_figure(rows, shown, cells, stated, names),
    ]
    if differences:
        blocks += ["## Differences", *comparison.difference_figure(differences, shown, reference, names)]
        blocks.append(comparison.difference_table(differences, shown, reference, names))
    blocks += comparison.rank_blocks(rows, shown, cells, names)
    blocks += ["## Baselines", _baseline_table(shown, found, fitted, measures, names)] if found else []
    blocks += (
        ["## Beyond the headline", *comparison.secondary_table(found, names), *comparison.variance_table(cells, shown, names)]
        if found
        else []
    )
    if missing:
        lost = [
            [
                ", ".join(names.get(row, row) for row in m["rows"]),
                names.get(m["column"], m["column"]),
                ", ".join(map(str, m["seeds"])),
                m["state"],
                m["detail"] or "no reason was given",
            ]
            for m in group_missing(missing)
        ]
        caption = "Cells of the recipe without a score. A conclusion that needs one of them cannot be drawn from this page."
        blocks += [
            "## What was not run",
            Table(
                name="missing",
                title="What could not be run, and why",
                columns=["rows", "column", "seeds", "state", "why"],
                rows=lost,
                caption=caption,
            ),
        ]
    if found:
        blocks += [
            "## Training",
            comparison.data_table(found, names),
            comparison.row_table(found, names),
            comparison.cost_table(found, workspace, names),
        ]
        blocks += comparison.curve_figures(found, workspace, names)
    return [*blocks, "## How the numbers were made", *METHOD]


def _side_figure(
    rows: Sequence[str], shown: Sequence[ScoreColumn], cells: Mapping[Key, Mapping[str, Any]], stated: PaperValues, names: Mapping[str, str]
) -> list[Figure]:
    """Ours with intervals beside the paper's values, a panel a column that has ours."""
    panels = []
    kept = [row for row in rows if any((row, c.key) in cells for c in shown)]
    for c in shown:
        here = [cells.get((row, c.key)) for row in kept]
        if any(cell and cell["value"] is not None for cell in here):
            values = {
                k: [cell[n] * c.factor if cell and cell.get(n) is not None else None for cell in here]
                for k, n in (("values", "value"), ("lo", "lo"), ("hi", "hi"))
            }
            pairs = [stated.get((row, c.key)) for row in kept]
            panels.append(
                {"name": names.get(c.key, c.key), **values, "other": [p[0] if p else None for p in pairs] if any(pairs) else None}
            )
    if not panels:
        return []
    if not stated:
        caption = "Dots: our means, lines: 95 % bootstrap intervals over test subjects (windows, where the notices say so). Overlapping lines do not rank two rows: see the differences."
        data = {"names": [names.get(row, row) for row in kept], "panels": panels, "xlabel": ""}
        return [Figure(name="beside", title="Scores with intervals", kind="forest", caption=caption, data=data)]
    caption = (
        "Dots: our means, lines: 95 % bootstrap intervals over test subjects (windows, where the notices say so); diamonds: the paper's. A diamond inside a line does not make the result reproduced, one "
        "outside of it does not make it refuted: splits and subjects differ. What would speak against a reproduction is another order of the rows, in columns where "
        "the differences are told apart."
    )
    data = {"names": [names.get(row, row) for row in kept], "panels": panels, "xlabel": "", "ours": "ours", "other": "the paper's"}
    return [Figure(name="beside", title="Ours beside the paper's", kind="forest", caption=caption, data=data)]


def _simple_baselines(column: ScoreColumn, one: ScoredRun) -> dict[str, dict[str, Any]]:
    """What needs no fitting, of one column."""
    held = one.scores.get("baselines") or {}
    if column.label:
        rate = (one.scores.get("by_class") or {}).get(column.label, {}).get("base_rate")
        chance = {"base rate (chance)": {"value": rate}} if rate is not None and column.metric == "auprc" else {}
        told = {name.replace("_", " "): (body.get("by_class") or {}).get(column.label, {}) for name, body in held.items() if name in EVENTS}
        return {**chance, **{name: each[column.metric] for name, each in told.items() if column.metric in each}}
    return {name.replace("_", " "): body[column.metric] for name, body in held.items() if column.metric in body}


def _untrained_baselines(column: ScoreColumn, one: ScoredRun, fitted: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The baselines of a column by name, those that need no fitting first."""
    return {
        **_simple_baselines(column, one),
        **{plain.TITLES[k]: column.of(scores) or {} for k, (scores, _) in fitted.get(column.data, {}).items()},
    }


def _baseline_table(
    shown: Sequence[ScoreColumn],
    found: Sequence[ScoredRun],
    fitted: Mapping[str, Mapping[str, Any]],
    measures: Mapping[str, ColumnResult],
    names: Mapping[str, str],
) -> Table:
    """Baselines of each column beside the rows of the page that lie below them."""
    lines = []
    for c in shown:
        mine = [one for one in found if one.data == c.data]
        if not mine or c.metric is None:
            continue
        told = _untrained_baselines(c, mine[0], fitted)
        values = {row: cell["value"] for row, cell in measures[c.key].cells.items() if cell["value"] is not None}
        for name, metric in told.items():
            value = metric.get("value")
            under = [names.get(row, row) for row, v in values.items() if value is not None and ((v >= value) if c.lower else (v <= value))]
            line = [
                names.get(c.key, c.key),
                c.words,
                name,
                *(metric[k] * c.factor if metric.get(k) is not None else None for k in ("value", "lo", "hi")),
            ]
            lines.append(
                [*line, f"{len(under)} of {len(values)}" + (f": {', '.join(under[:5])}{' …' if len(under) > 5 else ''}" if under else "")]
            )
    kinds = [kind for kind in plain.DESCRIPTIONS if any(kind in of for of in fitted.values())]
    return Table(
        name="baselines",
        title="What needs no pre-training",
        columns=["data", "metric", "baseline", "value", "95 % from", "to", "rows that do not clear it"],
        rows=lines,
        caption="A row whose mean does not clear a baseline owes nothing to its architecture or its pre-training; whether it is told apart from the fitted ones stands under the "
        "differences. "
        + " ".join(f"{plain.TITLES[kind][0].upper()}{plain.TITLES[kind][1:]}: {plain.DESCRIPTIONS[kind]}." for kind in kinds),
    )


def _list_notices(found: Sequence[ScoredRun], shown: Sequence[ScoreColumn], names: Mapping[str, str]) -> list[str]:
    counted = Counter(line for one in found for line in dict.fromkeys([*one.scores.get("notices", []), *one.scores.get("remarks", [])]))
    out = [line if n == len(found) else f"{line} ({n} of {len(found)} runs)" for line, n in counted.most_common(12)]
    few = {
        one.data: one.scores["n_subjects"]
        for one in found
        if one.scores["n_subjects"] < evaluate.MINIMUM_UNITS and one.scores["settings"]["by"] == "subject"
    }
    out += [
        f"{names.get(data, data)}: {n} test subject{'s' * (n != 1)}, too few for an interval ({evaluate.MINIMUM_UNITS} are needed)."
        for data, n in few.items()
    ]
    return out


def _list_facts(
    name: str, description: str, paper: Mapping[str, Any], found: Sequence[ScoredRun], reference: str, names: Mapping[str, str]
) -> dict[str, str]:
    facts = {
        "Recipe": name,
        "About": description,
        "Beside": str(paper.get("source") or ("the paper's table" if set(paper) - set(RESERVED) else "no numbers of the paper")),
    }
    facts |= {"Reference": names.get(reference, reference), "Seeds": ", ".join(map(str, sorted({one.seed for one in found})))}
    stamps = Counter(run_page.stamp_text(one.scores.get("leak_free")) for one in found)
    facts["Pre-training"] = "; ".join(f"{n} runs {words}" for words, n in stamps.most_common())
    versions = {
        f"{k} {v}" for one in found for run in one.runs for k, v in run.body["versions"].items() if k in {"bitimely", "torch", "python"}
    }
    return {key: value for key, value in {**facts, "Versions": ", ".join(sorted(versions))}.items() if value}


def _summarize_numbers(
    name: str,
    rows: Sequence[str],
    shown: Sequence[ScoreColumn],
    cells: Mapping[Key, Mapping[str, Any]],
    differences: Mapping[Key, Mapping[str, Any]],
    stated: PaperValues,
    missing: Sequence[Mapping[str, Any]],
    fitted: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """The numbers behind the page; scores as fractions, the paper's in its units."""

    def nested(of: Mapping[Key, Any]) -> dict[str, dict[str, Any]]:
        out: dict[str, dict[str, Any]] = {}
        for (row, key), value in of.items():
            out.setdefault(row, {})[key] = value
        return out

    return {
        "pipeline": name,
        "rows": list(rows),
        "columns": [{"column": c.key, "data": c.data, "metric": c.metric, "label": c.label, "lower_is_better": c.lower} for c in shown],
        "cells": nested(cells),
        "differences": nested(differences),
        "paper": nested({key: {"value": v, "se": se} for key, (v, se) in stated.items()}),
        "baselines": {data: {kind: scores["metrics"] for kind, (scores, _) in of.items()} for data, of in fitted.items()},
        "missing": list(missing),
        "told_apart": int(np.sum([evaluate.significance_sign(d) != 0 for d in differences.values()])),
    }
