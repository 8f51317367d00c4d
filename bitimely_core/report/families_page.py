"""The page of a registered experiment: what each family of tests found. Nothing is said on a
family before all of its runs are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from bitimely_core.evaluate.verdicts import PrintedMetric
from bitimely_core.page import ForestPanel, ForestPlot, Page, PageBuilder, make_tables
from bitimely_core.report.differences import scale_fields
from bitimely_core.report.page_text import scale_number
from bitimely_core.schemas.scores import RegisteredResult
from bitimely_core.types import group_by

COLUMNS = (
    "family",
    "data",
    "row",
    "rival",
    "score",
    "rival's",
    "difference",
    "95 % CI, Holm-corrected",
    "verdict",
)
DESCRIPTIVE = (*COLUMNS[:-2], "95 % CI, not corrected")
SENSITIVITY = ("family", "data", "row", "rival", "difference of means", "of medians over seeds")


def make_families_page(
    title: str, questions: Mapping[str, str], results: Sequence[RegisteredResult]
) -> Page:
    """The page of all tests; `questions`: family -> what it asks."""
    page = PageBuilder(title)
    judged = [result for result in results if result.verdict is not None]
    _add_tests(page, judged, results)
    _add_descriptions(page, results)
    rows = []
    for result in judged:
        values = (result.difference, result.medians)
        numbers = (print_difference(result, value) for value in values)
        rows.append((*list_names(result), *numbers))
    caption = "Medians over seeds in the place of means."
    title = "Sensitivity, without verdicts"
    page.add(*make_tables("sensitivity", title, caption, SENSITIVITY, rows))
    counts = []
    for family, question in questions.items():
        page.section(family)
        page.text(question)
        members = [result for result in results if result.family == family]
        page.add(*(result.sentence for result in members if result.verdict is not None))
        counts.append(count_verdicts(family, members))
    return page.finish(" ".join(counts), {"tests": [result.model_dump() for result in results]})


def _add_tests(
    page: PageBuilder, judged: Sequence[RegisteredResult], results: Sequence[RegisteredResult]
) -> None:
    """The tests with their verdicts, as a figure where there are some, and as a table."""
    if judged:
        page.figure(
            "differences",
            "Registered differences",
            "The row less its rival, with corrected 95 % intervals; short dashed lines are margins "
            "of non-inferiority. Of errors less is better.",
            draw_differences(judged),
        )
    caption = (
        "Means over seeds; each family is corrected by itself, and none is judged before all of "
        "its cells have run. The intervals match the tests and are not simultaneous."
    )
    rows = [format_result(result) for result in results if not result.descriptive]
    page.add(*make_tables("families", "Registered tests", caption, COLUMNS, rows))


def _add_descriptions(page: PageBuilder, results: Sequence[RegisteredResult]) -> None:
    """The differences of descriptive families, as a figure where there are some, and as a table."""
    members = [result for result in results if result.descriptive]
    drawn = [result for result in members if result.difference is not None]
    if drawn:
        page.figure(
            "undecided",
            "Differences without verdicts",
            "The row less its rival, with 95 % intervals that are not corrected. Of errors less is "
            "better.",
            draw_differences(drawn),
        )
    caption = (
        "Means over seeds. Each interval stands by itself: of many, some leave out the true "
        "difference by chance."
    )
    rows = map(format_description, members)
    page.add(*make_tables("descriptive", "Differences in numbers", caption, DESCRIPTIVE, rows))


def count_verdicts(family: str, results: Sequence[RegisteredResult]) -> str:
    """The verdicts of a family with how often each was found, for example `F1: no significant
    difference (4).`.
    """
    if results and results[0].descriptive:
        count = sum(result.difference is not None for result in results)
        return f"{family}: {count} of {len(results)} differences, without verdicts."
    verdicts = Counter(result.verdict for result in results)
    if None in verdicts:
        done = sum(result.done for result in results)
        cells = sum(result.cells for result in results)
        return f"{family}: not complete ({done} of {cells} cells)."
    counts = [f"{words} ({count})" for words, count in verdicts.most_common()]
    return f"{family}: {', '.join(counts)}."


def draw_differences(results: Sequence[RegisteredResult]) -> ForestPlot:
    """A row for each family and rival, a panel for each column of data."""
    rows = list(dict.fromkeys((result.family, result.rival) for result in results))
    panels = []
    for data, of_data in group_by(results, lambda result: result.data).items():
        cells = {(result.family, result.rival): result for result in of_data}
        metric, unit = PrintedMetric(of_data[0].metric), of_data[0].unit
        values, lo, hi, margins = scale_fields(
            list(map(cells.get, rows)), metric.factor, "difference", "lo", "hi", "margin"
        )
        worst = [scale_number(margin, -metric.sign) for margin in margins]  # on the worse side
        lines = worst if set(margins) - {None} else None
        name = f"{data} ({unit})" if unit else data
        panels.append(ForestPanel(name, values, lo, hi, zero=True, margins=lines))
    return ForestPlot(list(map(": ".join, rows)), panels, "difference")


def list_names(result: RegisteredResult) -> tuple[str, str, str, str]:
    """Family, data, row and rival of a test."""
    return result.family, result.data, result.row, result.rival


def choose_metric(result: RegisteredResult) -> PrintedMetric:
    """How the numbers of a test are printed: with decimals for its interval and margin, which may
    be in small units.
    """
    lo, hi = result.lo, result.hi
    # about two standard errors on either side
    error = None if lo is None or hi is None else (hi - lo) / 4
    return PrintedMetric(result.metric).fit(error, lo, hi, result.margin)


def print_difference(result: RegisteredResult, value: float | None) -> str:
    """A difference with its unit."""
    number = choose_metric(result).number(value, signed=True)
    return number if value is None else f"{number} {result.unit}".rstrip()


def format_result(result: RegisteredResult) -> tuple[str, ...]:
    """A row of the table of tests."""
    if result.verdict is not None:
        return (*_format_numbers(result), result.verdict)
    progress = f"{result.done} of {result.cells} cells"
    return (*list_names(result), *[""] * 4, f"family not complete, {progress}")


def format_description(result: RegisteredResult) -> tuple[str, ...]:
    """A row of the table of differences without verdicts."""
    if result.difference is not None:
        return _format_numbers(result)
    return (*list_names(result), "", "", f"{result.done} of {result.cells} cells", "")


def _format_numbers(result: RegisteredResult) -> tuple[str, ...]:
    """The cells of a result that is known, up to its interval."""
    number = choose_metric(result).number
    interval = "" if result.lo is None else f"{number(result.lo)} to {number(result.hi)}"
    scores = (number(result.value), number(result.rival_value))
    return (*list_names(result), *scores, print_difference(result, result.difference), interval)
