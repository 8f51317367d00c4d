"""The page of a registered experiment: what each family of tests found, and nothing on one before
all of its runs are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from bitimely_core.evaluate.verdicts import PrintedMetric
from bitimely_core.page import ForestPanel, ForestPlot, Page, PageBuilder
from bitimely_core.schemas.scores import RegisteredResult

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
    page, judged = PageBuilder(title), [one for one in results if one.verdict is not None]
    tests, described = (
        [one for one in results if one.descriptive is kind] for kind in (False, True)
    )
    if judged:
        page.figure(
            "differences",
            "Registered differences",
            "The row less its rival, with corrected 95 % intervals; short dashed lines are margins of non-inferiority. Of errors less is better.",
            draw_differences(judged),
        )
    about = "Means over seeds; each family is corrected by itself, and none is judged before all of its cells have run. The intervals match the tests and are not simultaneous."
    if tests:
        page.table(
            "families", "Registered tests", about, COLUMNS, [format_result(one) for one in tests]
        )
    if any(one.difference is not None for one in described):
        page.figure(
            "undecided",
            "Differences without verdicts",
            "The row less its rival, with 95 % intervals that are not corrected. Of errors less is better.",
            draw_differences([one for one in described if one.difference is not None]),
        )
    if described:
        about = "Means over seeds. Each interval stands by itself: of many, some leave out the true difference by chance."
        page.table(
            "descriptive",
            "Differences in numbers",
            about,
            DESCRIPTIVE,
            [format_description(one) for one in described],
        )
    if judged:
        rows = [
            (
                *list_names(one),
                print_difference(one, one.difference),
                print_difference(one, one.medians),
            )
            for one in judged
        ]
        page.table(
            "sensitivity",
            "Sensitivity, without verdicts",
            "Medians over seeds in the place of means.",
            SENSITIVITY,
            rows,
        )
    for family, question in questions.items():
        page.section(family)
        page.text(question)
        for one in judged:
            if one.family == family:
                page.text(one.sentence)
    verdict = " ".join(
        count_verdicts(family, [one for one in results if one.family == family])
        for family in questions
    )
    return page.finish(verdict, {"tests": [one.model_dump() for one in results]})


def count_verdicts(family: str, results: Sequence[RegisteredResult]) -> str:
    """The verdicts of a family with how often each was found, for example `F1: no significant
    difference (4).`.
    """
    if results and results[0].descriptive:
        return f"{family}: {sum(one.difference is not None for one in results)} of {len(results)} differences, without verdicts."
    found = Counter(one.verdict for one in results)
    if None in found:
        return f"{family}: not complete ({sum(one.done for one in results)} of {sum(one.cells for one in results)} cells)."
    return f"{family}: {', '.join(f'{words} ({count})' for words, count in found.most_common())}."


def draw_differences(results: Sequence[RegisteredResult]) -> ForestPlot:
    """A row for each family and rival, a panel for each column of data."""
    rows, panels = list(dict.fromkeys((one.family, one.rival) for one in results)), []
    for data in dict.fromkeys(one.data for one in results):
        found = {(one.family, one.rival): one for one in results if one.data == data}
        first = next(iter(found.values()))
        metric = PrintedMetric(first.metric)

        def take(
            name: str,
            found: Mapping[tuple[str, str], RegisteredResult] = found,
            factor: float = metric.factor,
        ) -> list[float | None]:
            values = [getattr(found[row], name) if row in found else None for row in rows]
            return [None if value is None else value * factor for value in values]

        margins = take("margin", factor=-metric.sign * metric.factor)
        name = f"{data} ({first.unit})" if first.unit else data
        panels.append(
            ForestPanel(
                name,
                take("difference"),
                take("lo"),
                take("hi"),
                zero=True,
                margins=None if set(margins) == {None} else margins,
            )
        )
    return ForestPlot([f"{family}: {rival}" for family, rival in rows], panels, "difference")


def list_names(one: RegisteredResult) -> tuple[str, str, str, str]:
    """Family, data, row and rival of a test."""
    return one.family, one.data, one.row, one.rival


def choose_metric(one: RegisteredResult) -> PrintedMetric:
    """How the numbers of a test are printed: with decimals for its interval and margin, which may
    be in small units.
    """
    # about two standard errors on either side
    width = None if one.lo is None or one.hi is None else (one.hi - one.lo) / 4
    return PrintedMetric(one.metric).fit(width, one.lo, one.hi, one.margin)


def print_difference(one: RegisteredResult, value: float | None) -> str:
    """A difference with its unit."""
    return f"{choose_metric(one).number(value, signed=True)} {one.unit if value is not None else ''}".rstrip()


def format_result(one: RegisteredResult) -> tuple[str, ...]:
    """A row of the table of tests."""
    if one.verdict is None:
        return (
            *list_names(one),
            "",
            "",
            "",
            "",
            f"family not complete, {one.done} of {one.cells} cells",
        )
    return (*_format_numbers(one), one.verdict)


def format_description(one: RegisteredResult) -> tuple[str, ...]:
    """A row of the table of differences without verdicts."""
    return (
        _format_numbers(one)
        if one.difference is not None
        else (*list_names(one), "", "", f"{one.done} of {one.cells} cells", "")
    )


def _format_numbers(one: RegisteredResult) -> tuple[str, ...]:
    number = choose_metric(one).number
    interval = "" if one.lo is None else f"{number(one.lo)} to {number(one.hi)}"
    return (
        *list_names(one),
        number(one.value),
        number(one.rival_value),
        print_difference(one, one.difference),
        interval,
    )
