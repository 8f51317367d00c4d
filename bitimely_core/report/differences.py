"""Paired differences of result pages, to a reference row and to baselines: as tables, as a figure
and as sentences.

A row is a model or an arm, a column is a metric of a view of a data set: `data` for the main metric
of its task, `data:metric` for another one, `data:label` for the AUPRC of one label or class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bitimely_core import evaluate
from bitimely_core.evaluate import verdicts
from bitimely_core.evaluate.multiple import find_margin_test
from bitimely_core.evaluate.result_table import Key, ResultTable
from bitimely_core.page import Figure, ForestPanel, ForestPlot, Table, make_table, make_tables
from bitimely_core.report.page_text import scale_number, text_cell
from bitimely_core.schemas.scores import CorrectedDifference, MetricValue
from bitimely_core.wording import list_first

DESCRIBED = 3  # differences that are described one by one
NAMED = 6  # rows of a sentence
METHOD = (
    "Differences are paired subject by subject, of means over seeds. The test is Student's t "
    "(difference over its standard error, which adds the variance between the seeds of each of the "
    "two rows). All differences of the page to the reference are one family with Holm correction, "
    "those to baselines another; better or worse needs three seeds in each trained row. A "
    "corrected 95 % interval has the level of its step in Holm's procedure: it matches the test "
    "beside it, and the intervals of a family are not simultaneous (all of them together may hold "
    "the true differences in fewer than 95 % of cases). Differences to the baselines that the runs "
    "store are averaged over the seeds: their standard error over subjects is the mean of those of "
    "the seeds, an upper bound."
)
DIFFERENCE_COLUMNS = (
    "difference",
    "unit",
    "standard error",
    "corrected 95 % CI",
    "p, Holm",
    "significant?",
)
MARGINS = (
    " Margin: the row is non-inferior where the bound of the corrected two-sided interval is "
    "within the margin, and the two are equivalent where it is and the corrected 90 % interval is "
    "inside the margin (two one-sided tests); tests of non-inferiority are a second family with "
    "Holm correction, those of equivalence a third."
)
# how a row compares with the closest of its baselines -> how a sentence on such rows begins
BASELINE_CASES = {
    "exceeded": "A baseline beats",
    "unclear": "Without a verdict, a baseline reaches as much as",
    "equal": "A baseline does not significantly differ from",
    "ahead": "Without a verdict, the closest baseline reaches less than",
}


# ---- differences to the reference


def _difference_cells(d: CorrectedDifference, name: str) -> list[Any]:
    """The cells of a difference of the metric `name`, as in `DIFFERENCE_COLUMNS`."""
    metric = verdicts.PrintedMetric(name, d.unit)
    numbers = (d.difference, d.lo, d.hi, d.se, d.total_se, d.corrected_lo, d.corrected_hi)
    value, lo, hi, se, spread, low, high = (scale_number(v, metric.factor) for v in numbers)
    corrected = None
    if low is not None and high is not None:
        places = verdicts.choose_places(2, spread, low, high)
        text = f"{low:.{places}f} to {high:.{places}f}".replace("-", "−")
        corrected = text_cell(low, text, to=high)
    return [
        MetricValue(value=value, lo=lo, hi=hi),
        d.unit or evaluate.find_unit(name).name,
        se,
        corrected,
        d.p_holm,
        verdicts.name_verdict(d, metric),
    ]


def difference_table(table: ResultTable) -> Table:
    """Every row minus the reference, uncorrected and corrected."""
    rows, reference, unit = [], table.name(table.reference), table.unit()
    for (row, key), d in table.differences.items():
        cells = [table.name(row), table.name(key), *_difference_cells(d, table.metric(key))]
        if table.margins:
            cells.append(_describe_margin_test(d, table.column(key).factor))
        rows.append(cells)
    caption = (
        f"Row minus {reference} on the same test {unit}s, means over seeds (of errors a negative "
        f"difference is better). Below the difference: its uncorrected 95 % CI over {unit}s for "
        f"these trained runs. Corrected: Holm correction of one family of {len(rows)} comparisons, "
        "with the variance between the seeds of each row; these intervals match the tests and are "
        "not simultaneous. If the corrected 95 % CI contains 0, the difference is not significant; "
        "that is no evidence that the rows are equal."
    )
    columns = ["row", "data", *DIFFERENCE_COLUMNS]
    if table.margins:
        caption, columns = caption + MARGINS, [*columns, "margin"]
    title = f"Paired differences to {reference}"
    return make_table("differences", title, caption, columns, rows)


def _describe_margin_test(d: CorrectedDifference, factor: float) -> str | None:
    """The verdict against the margin, in printed units; None where there is none."""
    test = find_margin_test(d)
    if test is None or test.worst is None:
        return None
    verdict = "non-inferior" if test.non_inferior else "not shown"
    if test.equivalent:
        verdict = "equivalent"
    worst = max(test.worst, 0.0) * factor
    return f"{verdict} (margin {test.margin * factor:g}; at most {worst:.3g} worse)"


def difference_figure(table: ResultTable) -> list[Figure]:
    """The differences with a panel a column."""
    rows, reference = list(dict.fromkeys(row for row, _ in table.differences)), table.reference
    panels = []
    for column in table.columns:
        cells = [table.differences.get((row, column.key)) for row in rows]
        name, units = table.name(column.key), {d.unit for d in filter(None, cells)} - {None, "1"}
        if units:
            name += f" ({units.pop()})"
        fields = ("difference", "corrected_lo", "corrected_hi")
        values, lo, hi = scale_fields(cells, column.factor, *fields)
        if any(cells):
            panels.append(ForestPanel(name, values, lo, hi, zero=True))
    lower = [table.name(column.key) for column in table.columns if column.lower]
    side = f"Left is better for {', '.join(lower)}, right for the others."
    figure = Figure(
        "difference-forest",
        f"Differences to {table.name(reference)}",
        f"Dots: paired difference, row minus {table.name(reference)}; lines: 95 % CI after Holm "
        "correction for all comparisons of the page. If a line crosses 0, the difference is not "
        "significant; a dot without a line has no CI. " + (side if lower else "Right is better."),
        ForestPlot(list(map(table.name, rows)), panels, "difference"),
    )
    return [figure] if panels else []


def scale_fields(
    cells: Sequence[object], factor: float, *names: str
) -> Iterator[list[float | None]]:
    """Of each field the values of all cells times `factor`, None where there is no cell or no
    value.
    """
    for name in names:
        yield [scale_number(getattr(cell, name, None), factor) for cell in cells]


# ---- differences to baselines


def _group_by_cell(table: ResultTable) -> dict[Key, dict[str, CorrectedDifference]]:
    """Row and column -> baseline -> difference. Differences that are withheld, or of a metric that
    the rows do not define, are left out.
    """
    cells: dict[Key, dict[str, CorrectedDifference]] = {}
    for pair, d in table.baseline_differences.items():
        if d.difference is not None:
            cells.setdefault((pair.row, pair.column), {})[pair.baseline] = d
    return cells


def _find_sign(table: ResultTable, key: str) -> int:
    """-1 for a column in which lower is better."""
    return verdicts.PrintedMetric(table.metric(key)).sign


def baseline_difference_table(table: ResultTable) -> list[Table]:
    """Every row minus each of its baselines."""
    rows, families, unit = [], _group_by_cell(table), table.unit()
    for (row, column, baseline), d in table.baseline_differences.items():
        family, sign = families.get((row, column), {}), _find_sign(table, column)
        lifts = {name: sign * (other.difference or 0.0) for name, other in family.items()}
        best = min(lifts, key=lambda name: (lifts[name], name), default=None)
        name = baseline + (" (best)" if baseline == best else "")
        cells = _difference_cells(d, table.metric(column))
        rows.append([table.name(row), table.name(column), name, *cells])
    return make_tables(
        "baseline-differences",
        "Paired differences to baselines",
        f"Row minus baseline on the same test {unit}s, of the mean over the seeds of the row (of "
        "errors a negative difference is better). Below the difference: its uncorrected 95 % CI "
        f"for these trained runs. Corrected: Holm correction of one family of {len(rows)} "
        "comparisons with baselines (the intervals match the tests and are not simultaneous), with "
        "the variance between seeds from three seeds on; with fewer it speaks of these trained "
        "models and not of the method. A row that is not better than its baselines shows no "
        "benefit of its architecture or pre-training; its lift is the difference to the best of "
        "them.",
        ["row", "data", "baseline", *DIFFERENCE_COLUMNS],
        rows,
    )


def nest_baselines(table: ResultTable) -> dict[str, dict[str, dict[str, CorrectedDifference]]]:
    """The differences to baselines for summary.json: column -> row -> baseline."""
    columns: dict[str, dict[str, dict[str, CorrectedDifference]]] = {}
    for (row, column, baseline), d in table.baseline_differences.items():
        columns.setdefault(column, {}).setdefault(row, {})[baseline] = d
    return columns


# ---- sentences


def _name_cell(table: ResultTable, cell: Key) -> str:
    return f"{table.name(cell[0])} on {table.name(cell[1])}"


def summarize_baselines(table: ResultTable) -> str:
    """Which rows a baseline beats, does not significantly differ from, or is compared with without
    a verdict; empty where none.
    """
    families = _group_by_cell(table)
    alone = _describe_closest(table, *families.items()) if len(families) == 1 else ""
    return alone or _summarize_cases(table, families)


def _summarize_cases(
    table: ResultTable, families: Mapping[Key, Mapping[str, CorrectedDifference]]
) -> str:
    """How many rows compare with their closest baseline in which way, and which they are."""
    named = _name_cases(table, families)
    is_replicated = any(d.seeds[0] for d in table.baseline_differences.values())
    models = "models" if is_replicated else "trained models"
    if len({(row, key.partition(":")[0]) for row, key in families}) < len(families):
        models = f"scores of {models}"  # data have several columns
    over = f" (Holm-corrected over {len(table.baseline_differences)} comparisons with baselines)"
    sentences: list[str] = []
    for case, words in BASELINE_CASES.items():
        if names := named.get(case):
            counted = f"{len(names)} of {len(families)} {models}{'' if sentences else over}"
            sentences.append(f"{words} {counted}: {list_first(names, NAMED)}.")
    return " ".join(sentences)


def _name_cases(
    table: ResultTable, families: Mapping[Key, Mapping[str, CorrectedDifference]]
) -> dict[str, list[str]]:
    """Case -> the rows with it, each with its closest baseline."""
    named: dict[str, list[str]] = {}
    for cell, family in families.items():
        sign = _find_sign(table, cell[1])
        case, baseline = verdicts.find_closest(family, sign)
        if case == "unclear" and sign * (family[baseline].difference or 0.0) > 0:
            case = "ahead"
        named.setdefault(case, []).append(f"{_name_cell(table, cell)} ({baseline})")
    return named


def _describe_closest(
    table: ResultTable, family: tuple[Key, Mapping[str, CorrectedDifference]]
) -> str:
    """The difference of the only row to its closest baseline; empty for too few seeds."""
    (row, key), differences = family
    metric = verdicts.PrintedMetric(table.metric(key))
    _, baseline = verdicts.find_closest(differences, metric.sign)
    d, data = differences[baseline], key.partition(":")[0]
    pair = (table.name(row), f"the {baseline} baseline")
    text = verdicts.describe_difference(
        pair, table.name(key), d, metric._replace(target=d.unit), table.unit(data)
    )
    return text if d.seeds[0] else ""


def summarize_differences(table: ResultTable) -> str:
    """The significant differences of a page, and the number of the others, in one or two
    sentences.
    """
    total, reference = len(table.differences), table.name(table.reference)
    if not total:
        is_scored = any(run.row == table.reference for run in table.runs)
        reason = "" if is_scored else f": {reference}, the reference, has no scores"
        return f"No two rows could be compared{reason}."
    if total <= DESCRIBED:
        return " ".join(describe_difference(table, cell) for cell in table.differences)
    sides = {-1: "better", 1: "worse"}  # of the reference
    named: dict[str, list[str]] = {"better": [], "worse": []}
    for cell in table.differences:
        if side := table.side(cell):
            named[sides[side]].append(_name_cell(table, cell))
    sentences = []
    clauses = [f"{word} than {list_first(names, NAMED)}" for word, names in named.items() if names]
    if clauses:
        text = f"{reference} is {' and '.join(clauses)}"
        sentences.append(f"{text} (the Holm-corrected 95 % CI excludes 0).")
    sentences += _count_undecided(table, sum(map(len, named.values())))
    return " ".join([*sentences, *_summarize_margins(table)])


def _count_undecided(table: ResultTable, significant: int) -> list[str]:
    """How many differences beside the significant ones are not, and how many have no verdict."""
    total, sentences = len(table.differences), []
    reasons = Counter(filter(None, map(evaluate.explain_no_verdict, table.differences.values())))
    if rest := total - significant - reasons.total():
        counted = f"{rest} of {total} comparisons"
        sentences.append(f"No significant difference in {counted} after Holm correction.")
    for reason, count in reasons.items():
        sentences.append(f"No verdict in {count} of {total} comparisons: {reason}.")
    return sentences


def _summarize_margins(table: ResultTable) -> list[str]:
    """Which rows are equivalent to the reference or non-inferior, of more differences than are
    described one by one.
    """
    equivalent, non_inferior, total = [], [], 0
    for cell, d in table.differences.items():
        if d.against_margin is None or evaluate.explain_no_verdict(d) is not None:
            continue
        total += 1
        equivalent += [_name_cell(table, cell)] * d.against_margin.equivalent
        non_inferior += [_name_cell(table, cell)] * d.against_margin.non_inferior
    reference, missing = table.name(table.reference), total - len(non_inferior)
    sentences = []
    if equivalent:
        sentences.append(f"Equivalent to {reference} within the margin: {', '.join(equivalent)}.")
    if non_inferior:
        sentences.append(f"Non-inferior to {reference}: {', '.join(non_inferior)}.")
    if missing:
        sentences.append(f"Non-inferiority is not shown in {missing} of {total} comparisons.")
    return sentences


def describe_difference(table: ResultTable, cell: Key) -> str:
    """One difference as a sentence."""
    d, (row, key) = table.differences[cell], cell
    pair, column = (table.name(row), table.name(table.reference)), table.column(key)
    metric, unit = verdicts.PrintedMetric(str(column.metric), d.unit), table.unit(column.data)
    text = verdicts.describe_difference(pair, table.name(key), d, metric, unit)
    return f"{text} {verdicts.describe_margin(pair, d, metric, planned=table.planned)}".strip()
