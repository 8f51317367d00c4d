"""Blocks of result pages (means over seeds, paired differences, ranks, wins, cost, curves) and the
comparison page made of them.

A row is a model or an arm, a column is a metric of a view of a data set: `data` for the main metric
of its task, `data:metric` for another one, `data:label` for the AUPRC of one label or class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from bitimely_core import evaluate
from bitimely_core.errors import Reason, input_error
from bitimely_core.evaluate import result_table, verdicts
from bitimely_core.evaluate.result_table import (
    Key,
    ResultTable,
    ScoreColumn,
    ScoredRun,
    read_curve,
    read_speed,
)
from bitimely_core.page import (
    BarPlot,
    Figure,
    ForestPanel,
    ForestPlot,
    Line,
    LinePlot,
    Page,
    PageBuilder,
    RankPlot,
    Table,
    make_figure,
    make_table,
    rename_units,
)
from bitimely_core.privacy import show_count
from bitimely_core.records import has_result
from bitimely_core.report.run_page import (
    baseline_values,
    describe_baselines,
    find_places,
    is_from_scratch,
    list_reproductions,
    loss_curves,
    main_metric,
    run_facts,
)
from bitimely_core.report.text import text_cell
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.schemas.scores import CorrectedDifference, MetricValue, Scores
from bitimely_core.workspace import locate

FURTHER_METRICS = {
    "classification": ("balanced_accuracy", "auroc", "macro_f1", "kappa"),
    "multilabel": ("auprc", "auroc", "macro_f1"),
    "regression": ("rmse",),
}
SPLITS = {
    "subject": "by subject",
    "official": "official",
    "time": "by time, subjects in several splits",
    "random-window": "random windows, subjects in several splits",
}
STAMPS: dict[bool | str | None, str] = {True: "yes", False: "no", None: "no target"}
MAX_CURVES = 12  # of one figure
DESCRIBED = 3  # differences that are described one by one
METHOD = (
    "Differences are paired subject by subject, of means over seeds. The test is Student's t (difference over its standard error, which adds the variance between the seeds of "
    "each of the two rows). All differences of the page to the reference are one family with Holm correction, those to baselines another; better or worse needs three seeds in each "
    "trained row. A corrected 95 % interval has the level of its step in Holm's procedure: it matches the test beside it, and the intervals of a family are not simultaneous (all "
    "of them together may hold the true differences in fewer than 95 % of cases). Differences to the baselines that the runs store are averaged over the seeds: their standard error over subjects is the mean of those of the seeds, an upper bound."
)


DIFFERENCE_COLUMNS = (
    "row",
    "data",
    "difference",
    "unit",
    "standard error",
    "corrected 95 % CI",
    "p, Holm",
    "significant?",
)
MARGINS = (
    " Margin: the row is non-inferior where the bound of the corrected two-sided interval is within the margin, and the two are equivalent where it is and the corrected 90 % interval "
    "is inside the margin (two one-sided tests); tests of non-inferiority are a second family with Holm correction, those of equivalence a third."
)


def _difference_cells(d: CorrectedDifference, name: str) -> list[Any]:
    """The cells of a difference of the metric `name`, from the difference itself to the verdict."""
    metric = verdicts.PrintedMetric(name, d.unit)
    numbers = (d.difference, d.lo, d.hi, d.se, d.corrected_lo, d.corrected_hi)
    value, lo, hi, se, low, high = (None if v is None else v * metric.factor for v in numbers)
    corrected = None
    if low is not None and high is not None:
        places = verdicts.choose_places(
            2, None if d.total_se is None else d.total_se * metric.factor, low, high
        )
        corrected = text_cell(
            low, f"{low:.{places}f} to {high:.{places}f}".replace("-", "−"), to=high
        )
    unit = d.unit or evaluate.find_unit(name).name
    return [
        MetricValue(value=value, lo=lo, hi=hi),
        unit,
        se,
        corrected,
        d.p_holm,
        verdicts.name_verdict(d, metric),
    ]


def difference_table(table: ResultTable) -> Table:
    """Every row minus the reference, uncorrected and corrected."""
    rows, reference = [], table.name(table.reference)
    for key, d in table.differences.items():
        against = [_describe_margin_test(d, table.column(key[1]).factor)] if table.margins else []
        rows.append([*map(table.name, key), *_difference_cells(d, table.metric(key[1])), *against])
    return make_table(
        "differences",
        f"Paired differences to {reference}",
        f"Row minus {reference} on the same test {table.unit()}s, means over seeds (of errors a negative difference is better). "
        f"Below the difference: its uncorrected 95 % CI over {table.unit()}s for these trained runs. Corrected: Holm correction of one family of "
        f"{len(rows)} comparisons, with the variance between the seeds of each row; these intervals match the tests and are not simultaneous. If the corrected 95 % CI contains 0, the "
        "difference is not significant; that is no evidence that the rows are equal."
        + (MARGINS if table.margins else ""),
        [*DIFFERENCE_COLUMNS, *(["margin"] if table.margins else [])],
        rows,
    )


def baseline_difference_table(table: ResultTable) -> list[Table]:
    """Every row minus each of its baselines."""
    best: dict[Key, tuple[float, str]] = {}
    for pair, d in table.baseline_differences.items():
        if d.difference is not None:  # withheld, or of a metric that the rows do not define
            lift = (
                verdicts.PrintedMetric(table.metric(pair.column)).sign * d.difference,
                pair.baseline,
            )
            best[pair.row, pair.column] = min(best.get((pair.row, pair.column), lift), lift)
    rows = [
        [
            table.name(pair.row),
            table.name(pair.column),
            pair.baseline
            + " (best)" * (pair.baseline == best.get((pair.row, pair.column), (0.0, ""))[1]),
            *_difference_cells(d, table.metric(pair.column)),
        ]
        for pair, d in table.baseline_differences.items()
    ]
    caption = (
        f"Row minus baseline on the same test {table.unit()}s, of the mean over the seeds of the row (of errors a negative difference is better). Below the difference: its "
        f"uncorrected 95 % CI for these trained runs. Corrected: Holm correction of one family of {len(rows)} comparisons with baselines (the intervals match the tests and are not "
        "simultaneous), with the variance between seeds from three seeds on; with fewer it speaks of these trained models and not of the method. A row that is not better than its baselines shows no benefit of its architecture "
        "or pre-training; its lift is the difference to the best of them."
    )
    columns = ["row", "data", "baseline", *DIFFERENCE_COLUMNS[2:]]
    return (
        [
            make_table(
                "baseline-differences", "Paired differences to baselines", caption, columns, rows
            )
        ]
        if rows
        else []
    )


def summarize_baselines(table: ResultTable) -> str:
    """Which rows a baseline beats, does not significantly differ from, or is compared with without
    a verdict; empty where none.
    """
    families: dict[Key, dict[str, CorrectedDifference]] = {}
    for pair, d in table.baseline_differences.items():
        if d.difference is not None:
            families.setdefault((pair.row, pair.column), {})[pair.baseline] = d
    closest: dict[Key, tuple[str, str]] = {}
    for key, of in families.items():
        sign = verdicts.PrintedMetric(table.metric(key[1])).sign
        case, name = verdicts.find_closest(of, sign)
        ahead = case == "unclear" and sign * (of[name].difference or 0.0) > 0
        closest[key] = ("ahead" if ahead else case, name)
    replicated = any(d.seeds[0] for d in table.baseline_differences.values())
    # else data have several columns
    once = len({(row, key.partition(":")[0]) for row, key in families}) == len(families)
    models = f"{len(families)} {'' if once else 'scores of '}{'models' if replicated else 'trained models'}"
    out: list[str] = []
    over = f" (Holm-corrected over {len(table.baseline_differences)} comparisons with baselines)"
    for case, words in (
        ("exceeded", "A baseline beats"),
        ("unclear", "Without a verdict, a baseline reaches as much as"),
        ("equal", "A baseline does not significantly differ from"),
        ("ahead", "Without a verdict, the closest baseline reaches less than"),
    ):
        named = [
            f"{table.name(row)} on {table.name(key)} ({name})"
            for (row, key), (found, name) in closest.items()
            if found == case
        ]
        if named:
            more = f" and {len(named) - 6} more" if len(named) > 6 else ""
            out.append(
                f"{words} {len(named)} of {models}{over * (not out)}: {', '.join(named[:6])}{more}."
            )
    return " ".join(out)


def _describe_margin_test(d: CorrectedDifference, factor: float) -> str | None:
    one = d.against_margin
    if one is None or one.worst is None or evaluate.explain_no_verdict(d) is not None:
        return None
    found = "equivalent" if one.equivalent else "non-inferior" if one.non_inferior else "not shown"
    return f"{found} (margin {one.margin * factor:g}; at most {max(one.worst, 0.0) * factor:.3g} worse)"


def difference_figure(table: ResultTable) -> list[Figure]:
    """The differences with a panel a column."""
    rows, reference = (
        list(dict.fromkeys(row for row, _ in table.differences)),
        table.name(table.reference),
    )
    panels = []
    for c in table.columns:
        here = [table.differences.get((row, c.key)) for row in rows]
        if any(here):
            values, lo, hi = scale_fields(here, c, "difference", "corrected_lo", "corrected_hi")
            unit = next((d.unit for d in here if d is not None and d.unit not in {None, "1"}), None)
            panels.append(
                ForestPanel(
                    table.name(c.key) + (f" ({unit})" if unit else ""), values, lo, hi, zero=True
                )
            )
    if not panels:
        return []
    lower = [table.name(c.key) for c in table.columns if c.lower]
    caption = (
        f"Dots: paired difference, row minus {reference}; lines: 95 % CI after Holm correction for all comparisons of the page. If a line crosses 0, the difference "
        "is not significant; a dot without a line has no CI."
        + (
            f" Left is better for {', '.join(lower)}, right for the others."
            if lower
            else " Right is better."
        )
    )
    data = ForestPlot([table.name(row) for row in rows], panels, "difference")
    return [make_figure("difference-forest", f"Differences to {reference}", caption, data)]


def scale_fields(
    cells: Sequence[object], column: ScoreColumn, *names: str
) -> Iterator[list[float | None]]:
    """Of each field the values of all cells in the units of the column, None where there is no cell
    or no value.
    """
    for name in names:
        values = (getattr(cell, name, None) for cell in cells)
        yield [None if value is None else value * column.factor for value in values]


def variance_table(table: ResultTable) -> list[Table]:
    """Variation between seeds beside that between subjects, where there are several seeds."""
    rows = []
    for key, cell in table.cells.items():
        factor = table.column(key[1]).factor
        values = [one.value * factor for one in cell.seeds if one.value is not None]
        errors = [one.se * factor for one in cell.seeds if one.se is not None]
        if len(values) > 1:
            sd, subjects = (
                float(np.std(values, ddof=1)),
                float(np.sqrt(np.mean(np.square(errors)))) if errors else None,
            )
            mean = float(np.mean(values))
            rows.append(
                [
                    *map(table.name, key),
                    len(values),
                    mean,
                    sd,
                    sd / np.sqrt(len(values)),
                    min(values),
                    max(values),
                    subjects,
                ]
            )
    caption = (
        "A seed determines the initial weights, the order of the windows and the training subjects. The standard error over subjects is that of one "
        "seed (root mean square). Where the standard deviation over seeds is as large as a difference between rows, one seed each cannot show the difference."
    )
    errors_of = ["standard error over seeds", "lowest", "highest", "standard error over subjects"]
    columns = ["row", "data", "seeds", "mean", "standard deviation", *errors_of]
    return [make_table("seeds", "Variation between seeds", caption, columns, rows)] if rows else []


def rank_blocks(table: ResultTable) -> list[Figure | Table]:
    """Ranks of each column and their mean; from three rows on two data sets on, a figure with the
    critical difference.
    """
    columns = [
        c for c in table.columns if sum(table.value(row, c) is not None for row in table.rows) > 1
    ]
    rows = [row for row in table.rows if any(table.value(row, c) is not None for c in columns)]
    if not columns:
        return []
    found = table.ranks(rows, columns)
    lines: list[tuple[int, float, list[Any]]] = []
    for k, row in enumerate(rows):
        ranks = [found[c.key][k] for c in columns]
        known = [r for r in ranks if r is not None]
        mean = float(np.mean(known))
        cells = [None if r is None else text_cell(r, f"{r:g}") for r in ranks]
        lines.append(
            (
                -len(known),
                mean,
                [table.name(row), text_cell(mean, f"{mean:.2f}"), len(known), *cells],
            )
        )
    caption = (
        "1 is the best mean of a column, ties share their mean rank; mean ranks over different columns are not comparable. Ranks do not show the size of a difference: see "
        "the differences."
    )
    heads = ["row", "mean rank", "columns", *(table.name(c.key) for c in columns)]
    out: list[Figure | Table] = [
        make_table(
            "ranks",
            "Ranks",
            caption,
            heads,
            [line for *_, line in sorted(lines, key=lambda one: one[:2])],
        )
    ]
    complete = [row for row in rows if all(table.value(row, c) is not None for c in columns)]
    if len(complete) < 3 or len({c.data for c in columns}) < 2:
        return out
    ranks_of = table.ranks(complete, columns)
    test = evaluate.nemenyi(np.array([ranks_of[c.key] for c in columns], dtype=float))
    p = (
        ""
        if test.friedman_p is None
        else f" Friedman's test that all rows are equal: p = {test.friedman_p:.3g}."
    )
    caption = (
        f"Mean ranks of {len(complete)} rows over {len(columns)} columns; a bar joins rows that differ by less than the critical difference of Nemenyi's test at 5 % over all "
        f"pairs, {test.critical:.2f}: no significant difference.{p} The test assumes independent columns; those of one data set are not, which makes it anti-conservative, and "
        f"with {len(columns)} columns its power is low. Rows without a score in some column are excluded."
    )
    data = RankPlot([table.name(row) for row in complete], test.mean_ranks, test.critical)
    return [
        *out,
        make_figure(
            "critical-difference", "Mean ranks and their critical difference", caption, data
        ),
    ]


def win_table(table: ResultTable) -> list[Table]:
    """How often one row beats another, out of the columns that both have."""
    rows = [row for row in table.rows if any((row, c.key) in table.cells for c in table.columns)]

    def count(row: str, other: str) -> str | None:
        pairs = [(table.value(row, c), table.value(other, c), c.lower) for c in table.columns]
        both = [
            (b - a if lower else a - b) for a, b, lower in pairs if a is not None and b is not None
        ]
        if row == other or not both:
            return None
        ties = sum(d == 0 for d in both)
        return f"{sum(d > 0 for d in both)}/{len(both)}" + (f", {ties} equal" if ties else "")

    caption = (
        "Number of columns in which the mean of the row (left) is better than that of the column (top), out of those that both have. Wins count means, "
        "significant or not."
    )
    lines = [[table.name(row), *(count(row, other) for other in rows)] for row in rows]
    return (
        [make_table("wins", "Wins", caption, ["row", *map(table.name, rows)], lines)]
        if len(rows) > 1
        else []
    )


def cost_table(table: ResultTable, workspace: Path) -> Table:
    """Parameters, seconds and speed of each row, pre-training and fine-tuning."""
    rows = []
    for row in dict.fromkeys(one.row for one in table.found):
        runs = [run for one in table.found if one.row == row for run in one.runs]
        folders = {
            locate(workspace, "runs", name): None for run in runs if (name := _parent_name(run))
        }
        parents = [folder for folder in folders if has_result(folder / "run.json")]
        sizes = sorted({run.record.parameters for run in runs})
        parameters = f"{sizes[0]:,}" + (f"–{sizes[-1]:,}" if len(sizes) > 1 else "")
        before = [read_speed(folder, RunRecord.load(folder / "run.json")) for folder in parents]
        tuned = [read_speed(run.folder, run.record) for run in runs]
        devices = ", ".join(sorted({run.record.device or "" for run in runs}))
        rows.append(
            [
                table.name(row),
                parameters,
                len(parents),
                *_sum_costs(before),
                len(runs),
                *_sum_costs(tuned),
                devices,
            ]
        )
    caption = (
        "Seconds of all trainings of the row, from the speed of the logged steps, without validation; windows per second: median. Speeds on shared or different machines "
        "are not comparable."
    )
    costs = ["seconds", "windows per second"]
    # distinct names
    columns = [
        "row",
        "parameters",
        "pre-trainings",
        *costs,
        "fine-tunings",
        *(f"{name} " for name in costs),
        "device",
    ]
    return make_table("cost", "Cost", caption, columns, rows)


def _parent_name(one: ScoredRun) -> str | None:
    source = one.record.source
    return source.run if source and source.weights else None


def _sum_costs(
    costs: Sequence[tuple[float | None, float | None]],
) -> tuple[float | None, float | None]:
    """Total seconds (None unless all are known) and median windows per second."""
    seconds, rates = (
        [value for value in column if value is not None]
        for column in ([s for s, _ in costs], [r for _, r in costs])
    )
    complete = seconds and len(seconds) == len(costs)
    return round(sum(seconds), 1) if complete else None, round(
        float(np.median(rates)), 1
    ) if rates else None


def curve_figures(table: ResultTable, workspace: Path) -> list[Figure]:
    """Validation curves of the fine-tunings of each data set, and of the pre-trainings; the first
    seed of each row.
    """
    groups: dict[str, dict[str, Path]] = {"Pre-training": {}}
    firsts = {(one.row, one.data): one for one in sorted(table.found, key=lambda one: -one.seed)}
    for one in table.found:
        if firsts[one.row, one.data] is one:
            groups.setdefault(f"Fine-tuning on {table.name(one.data)}", {})[one.row] = one.folder
            before = _parent_name(one)
            if before and has_result(
                (parent := locate(workspace, "runs", before)) / "metrics.jsonl"
            ):
                groups["Pre-training"][one.row] = parent
    out = []
    for title, folders in groups.items():
        series, key = [], ""
        for row, folder in list(folders.items())[:MAX_CURVES]:
            key, x, y = read_curve(folder, "validation")
            if len(x) < 2:
                key, x, y = read_curve(folder, "train")
            if len(x):
                series.append(Line(table.name(row), x, y))
        more = len(folders) - MAX_CURVES
        caption = (
            "Validation loss (training, where there is at most one validation) of the first seed (and test fold) of each row"
            + (
                f", of the first {MAX_CURVES} rows; {more} more are in their runs"
                if more > 0
                else ""
            )
            + ". rel: loss over the variance or entropy of the target, 1.0 = no better than predicting the mean. Losses of different objectives are not comparable; a curve "
            "that still falls at its end indicates too short a training, one that rises overfitting."
        )
        if series:
            out.append(
                make_figure(
                    f"curves-{title}", title, caption, LinePlot(series, "optimizer step", key)
                )
            )
    return out


def secondary_table(table: ResultTable) -> list[Table]:
    """Further metrics of every run, with intervals; a table a task."""
    out = []
    for task, metrics in FURTHER_METRICS.items():
        rows = [
            [
                table.name(one.row),
                table.name(one.data),
                one.seed,
                *(one.scores.metrics.get(m) for m in metrics),
            ]
            for one in table.found
            if one.scores.task == task
        ]
        caption = "Value and 95 % CI of each run, as fractions (errors in the unit of the target). A dash: not defined or no CI; the page of the run has the reason."
        if task == "classification":
            caption += " Accuracy alone hides classes that are never predicted; balanced accuracy is the mean recall, AUROC and F1 are means over classes."
        columns = ["row", "data", "seed", *(evaluate.NAMES[m] for m in metrics)]
        out += (
            [make_table(f"further-{task}", f"Further metrics: {task}", caption, columns, rows)]
            if rows
            else []
        )
    return out


def data_table(table: ResultTable) -> Table:
    """The scored split of each data set, and the share of training subjects."""
    rows = []
    for data in dict.fromkeys(one.data for one in table.found):
        runs = [one for one in table.found if one.data == data]
        s, trained = runs[0].scores, runs[0].record.data[0]
        shares = sorted({one.record.settings.data.fraction for one in runs})
        split = SPLITS.get(trained.split, trained.split) + (
            f", {len(runs[0].parts)} test folds" if runs[0].parts else ""
        )
        unit = f"over {evaluate.name_unit(s)}s"
        if s.n_subjects is not None and s.n_subjects < evaluate.MINIMUM_UNITS:
            unit += f"; no CI: at least {evaluate.MINIMUM_UNITS} required"
        share = ", ".join(f"{v:g}" for v in shares)
        rows.append(
            [
                table.name(data),
                s.split,
                split,
                show_count(s.n),
                show_count(s.n_subjects),
                share,
                unit,
                trained.fingerprint[:12],
            ]
        )
    caption = "The split that was scored. Equal fingerprints: the same windows."
    columns = [
        "data",
        "scored on",
        "split",
        "windows",
        "subjects",
        "share of training subjects",
        "intervals",
        "fingerprint",
    ]
    return make_table("data", "Data", caption, columns, rows)


def row_table(table: ResultTable) -> Table:
    """Model, preset and pre-training of each row."""
    rows: list[list[Any]] = []
    for row in dict.fromkeys(one.row for one in table.found):
        records = [run.record for one in table.found if one.row == row for run in one.runs]
        facts = [
            (
                r.model,
                r.preset,
                r.settings.objective.name,
                STAMPS.get(r.leak_free, r.leak_free),
                r.settings.finetune.readout or "none",
                choice,
            )
            for r in records
            for choice in [r.checkpoint.choice if r.checkpoint else "last"]
        ]
        model, preset, objective, *others = (
            ", ".join(dict.fromkeys(map(str, values))) for values in zip(*facts, strict=True)
        )
        source = "from scratch" if all(map(is_from_scratch, records)) else objective
        rows.append([table.name(row), model, preset, source, *others, len(records)])
    caption = (
        "Leak-free: the targets of the pre-training are hidden from the model. Where they are not, a low pre-training loss is not informative; the scores of the fine-tuned "
        "model remain valid."
    )
    return make_table(
        "rows",
        "Rows",
        caption,
        ["row", "model", "preset", "pre-training", "leak-free", "readout", "checkpoint", "runs"],
        rows,
    )


def summarize_differences(table: ResultTable) -> str:
    """The significant differences of a page, and the number of the others, in one or two
    sentences.
    """
    total = len(table.differences)
    if not total:
        scored = any(one.row == table.reference for one in table.found)
        return f"No two rows could be compared{'' if scored else f': {table.name(table.reference)}, the reference, has no scores'}."
    named: dict[str, list[str]] = {"better": [], "worse": []}
    for row, key in table.differences:
        if side := table.side((row, key)):
            named["better" if side < 0 else "worse"].append(
                f"{table.name(row)} on {table.name(key)}"
            )
    more = {
        word: f" and {len(names) - 6} more" if len(names) > 6 else ""
        for word, names in named.items()
    }
    clauses = [
        f"{word} than {', '.join(names[:6])}{more[word]}" for word, names in named.items() if names
    ]
    if total <= DESCRIBED:
        return " ".join(describe_difference(table, key) for key in table.differences)
    reasons = Counter(
        reason for d in table.differences.values() if (reason := evaluate.explain_no_verdict(d))
    )
    rest = total - sum(map(len, named.values())) - reasons.total()
    sentences = [
        f"{table.name(table.reference)} is {' and '.join(clauses)} (the Holm-corrected 95 % CI excludes 0)."
        if clauses
        else "",
        f"No significant difference in {rest} of {total} comparisons after Holm correction."
        if rest
        else "",
        *(
            f"No verdict in {count} of {total} comparisons: {reason.removeprefix('no CI: ')}."
            for reason, count in reasons.items()
        ),
    ]
    return " ".join(filter(None, [*sentences, *_summarize_margins(table)]))


def _summarize_margins(table: ResultTable) -> list[str]:
    """Which rows are equivalent to the reference or non-inferior, of more differences than are
    described one by one.
    """
    tests = {
        key: one
        for key, d in table.differences.items()
        if (one := d.against_margin) and evaluate.explain_no_verdict(d) is None
    }
    named: dict[str, list[str]] = {"equivalent": [], "non-inferior": []}
    for (row, key), one in tests.items():
        for word, holds in (("equivalent", one.equivalent), ("non-inferior", one.non_inferior)):
            named[word] += [f"{table.name(row)} on {table.name(key)}"] if holds else []
    reference, missing = (
        table.name(table.reference),
        sum(not one.non_inferior for one in tests.values()),
    )
    out = [
        f"Equivalent to {reference} within the margin: {', '.join(names)}."
        for word, names in named.items()
        if names and word == "equivalent"
    ]
    out += (
        [f"Non-inferior to {reference}: {', '.join(named['non-inferior'])}."]
        if named["non-inferior"]
        else []
    )
    return out + (
        [f"Non-inferiority is not shown in {missing} of {len(tests)} comparisons."]
        if missing
        else []
    )


def describe_difference(table: ResultTable, key: Key) -> str:
    """One difference as a sentence."""
    d, pair = table.differences[key], (table.name(key[0]), table.name(table.reference))
    metric = verdicts.PrintedMetric(str(table.column(key[1]).metric), d.unit)
    text = verdicts.describe_difference(
        pair, table.name(key[1]), d, metric, table.unit(table.column(key[1]).data)
    )
    return f"{text} {verdicts.describe_margin(pair, d, metric, planned=table.planned)}".strip()


def comparison_page(folders: list[Path], margin: float | None = None) -> Page:
    """One page of several evaluated runs; `margin` of non-inferiority and equivalence, in printed
    units. Raises UserError (incomplete, exit 4) for a run without scores.
    """
    for folder in folders:
        if not has_result(folder / "scores.json"):
            hint = f"Run: bitimely evaluate {folder.name}"
            raise input_error(
                Reason.INCOMPLETE, "no scores", "expected scores.json", hint, file=str(folder)
            )
    scored = [Scores.load_shared(folder) for folder in folders]
    runs = result_table.assign_rows(folders)
    columns, reference = result_table.group_columns(runs, [one.data for one in runs]), runs[0].row
    rows = list(dict.fromkeys(one.row for one in runs))
    results = {c.key: result_table.compare_column(c, runs, reference) for c in columns}
    table = ResultTable(
        runs, rows, columns, reference, results, margins={} if margin is None else {"": margin}
    )
    page = PageBuilder(
        "Comparison of "
        + (", ".join(s.run for s in scored) if len(scored) <= 4 else f"{len(scored)} runs")
    )
    page.notice(
        *(
            f"{s.run}: {line}"
            for folder, s in zip(folders, scored, strict=True)
            for line in list_reproductions(folder)
        )
    )
    page.notice(
        *(line for s in scored for line in s.notices),
        *(line for result in table.results.values() for line in result.remarks),
    )
    page.add_facts(run_facts(RunRecord.load(folders[0] / "run.json")))
    page.fact("Reference of the differences", reference)
    name, here = main_metric(scored[0]), [s for s in scored if s.data == scored[0].data]
    bars = {s.run: s.metrics.get(name, MetricValue()) for s in here}
    bars |= {
        f"{base} baseline": MetricValue(value=value)
        for base, value in baseline_values(scored[0], name).items()
    }
    if any(bars[s.run].value is not None for s in here):
        caption = f"The score on the split; lines: 95 % CI over {table.unit(scored[0].data)}s. Overlapping intervals do not rank the runs; see the paired differences."
        words = name.replace("_", " ")
        page.figure(
            "scores",
            f"{words.capitalize()} on {scored[0].data}",
            caption,
            BarPlot.from_metrics(bars, words),
        )
    page.add(*_score_tables(scored))
    if table.differences:
        page.add(*difference_figure(table), difference_table(table))
    page.add(*baseline_difference_table(table))
    if len(columns) > 1:
        page.add(*win_table(table), *rank_blocks(table))
    root = folders[0].parent.parent
    page.add(*variance_table(table), data_table(table), row_table(table), cost_table(table, root))
    if len(folders) <= 4:
        for folder, s in zip(folders, scored, strict=True):
            page.add(*loss_curves(folder, f"curves-{s.run}", f"Training of {s.run}"))
    else:
        page.add(*curve_figures(table, root))
    if table.differences:
        page.section("Methods")
        page.text(METHOD)
    objectives = {one.record.settings.objective.name for one in runs if one.data == scored[0].data}
    summary: dict[str, object] = {s.run: {m: v.value for m, v in s.metrics.items()} for s in scored}
    verdict = _compare_verdict(name, here, objectives)
    if table.differences:
        by_column = groupby(table.differences.items(), key=lambda pair: pair[0][1])
        summary["differences"] = {
            "reference": reference,
            **{key: {row: d for (row, _), d in of} for key, of in by_column},
        }
        verdict += f" {summarize_differences(table)}"
    summary["baseline_differences"] = nest_baselines(table)
    return rename_units(
        page.finish(" ".join(filter(None, [summarize_baselines(table), verdict])), summary),
        table.unit(),
    )


def nest_baselines(table: ResultTable) -> dict[str, dict[str, dict[str, CorrectedDifference]]]:
    """The differences to baselines for summary.json: column -> row -> baseline."""
    out: dict[str, dict[str, dict[str, CorrectedDifference]]] = {}
    for pair, d in table.baseline_differences.items():
        out.setdefault(pair.column, {}).setdefault(pair.row, {})[pair.baseline] = d
    return out


def _compare_verdict(name: str, scored: Sequence[Scores], objectives: set[str]) -> str:
    """The scores without a best one: which it is may be another for other seeds or threads;
    differences have their own sentence.
    """
    words = name.replace("_", " ")
    values = {
        s.run: v for s in scored if (v := s.metrics.get(name, MetricValue()).value) is not None
    }
    verdict = f"{words} is undefined for all runs"
    if values:
        places = max(find_places(name, s.metrics[name]) for s in scored if s.run in values)
        listed = ", ".join(f"{value:.{places}f} ({run})" for run, value in values.items())
        shown = (
            listed
            if len(values) <= DESCRIBED
            else f"{min(values.values()):.{places}f} to {max(values.values()):.{places}f}"
        )
        verdict = f"{words.capitalize()} of {len(values)} trained models: {shown}"
    incomparable = name == "rel" and len(objectives) > 1
    return (
        f"{verdict}{describe_baselines(scored[0], name)}."
        + " Their objectives differ, so their losses are not comparable." * incomparable
    )


def _score_tables(scored: Sequence[Scores]) -> list[Table]:
    out = []
    for task in dict.fromkeys(s.task for s in scored):
        of_task = [s for s in scored if s.task == task]
        metrics = list(
            evaluate.METRICS.get(task or "") or dict.fromkeys(m for s in of_task for m in s.metrics)
        )
        title = (
            "All scores" if len(of_task) == len(scored) else f"All scores: {task or 'pre-training'}"
        )
        caption = "Value and 95 % CI. A dash: undefined or not measured for that run."
        columns = ["run", "data", *(m.replace("_", " ") for m in metrics)]
        rows = [[s.run, s.data, *(s.metrics.get(m) for m in metrics)] for s in of_task]
        out.append(make_table("all-scores", title, caption, columns, rows))
    return out
