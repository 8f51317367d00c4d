"""The page of risks of new people: their distribution, and the codes that were not understood.
Counts of few people are withheld unless the people are synthetic.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, TypedDict

import numpy as np

from bitimely_core import privacy
from bitimely_core.page import BarPlot, Page, PageBuilder, make_tables
from bitimely_core.privacy import SMALL
from bitimely_core.report.prediction_page import describe_run
from bitimely_core.schemas.runs import RunRecord

if TYPE_CHECKING:
    import polars as pl

BANDS = 10  # of the predicted risk
CODES = 50  # codes that are listed
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
RISKS = (
    "People by their predicted risk of {label}, in bands of ten points. Bands of few people are "
    "left out."
)
STATUS = (
    "People with fewer codes than in the training, or without any that the model knows, have a "
    "risk too; the model has not learned from such people. Who died before the index day has none."
)
UNKNOWN = (
    "Codes that are no part of the input, with the rows that have them up to the index day. A "
    "code that few people have is not named."
)


class SubjectsPredictionLike(Protocol):
    """As `workflows.new_subjects.SubjectsPrediction`."""

    @property
    def frame(self) -> pl.DataFrame:
        """A row a person."""

    @property
    def unknown(self) -> pl.DataFrame:
        """Code, reason, rows, people."""

    @property
    def exact(self) -> bool:
        """Whether small counts are shown."""


class SharedCounts(TypedDict):
    """Numbers of people and of their rows, as they may be shared; None: withheld."""

    people: int | None
    status: dict[str, int | None]
    rows: int
    unknown_rows: int  # with a code that the run does not know


class SubjectsSummary(NamedTuple):
    """What the screen says, and what JSON says of it."""

    lines: list[str]  # exact, for the owner of the data alone
    protected: SharedCounts

    @classmethod
    def describe(cls, made: SubjectsPredictionLike) -> Self:
        """The numbers of people by status, and of rows that were not understood."""
        status, hidden = _count_status(made)
        rows, unknown = (int(made.frame[name].sum()) for name in ("rows", "unknown_rows"))
        texts = ", ".join(f"{n:,} {name}" for name, n in status.items())
        lines = [
            f"{made.frame.height:,} people: {texts}",
            f"{unknown:,} of {rows:,} rows have a code that the run does not know",
        ]
        by_status = {name: None if (name,) in hidden else n for name, n in status.items()}
        total = None if ("all",) in hidden else made.frame.height
        if not made.exact:
            rows, unknown = map(privacy.round_rows, (rows, unknown))
        counts: SharedCounts = {
            "people": total,
            "status": by_status,
            "rows": rows,
            "unknown_rows": unknown,
        }
        return cls(lines, counts)


def _count_status(made: SubjectsPredictionLike) -> tuple[dict[str, int], frozenset[tuple[str]]]:
    """People by status, and the counts that are withheld; `all` is their sum."""
    rows = made.frame["status"].value_counts().sort(["count", "status"], descending=[True, False])
    counts = dict(rows.iter_rows())
    return counts, _find_hidden(made, counts)


def _find_hidden(made: SubjectsPredictionLike, counts: dict[str, int]) -> frozenset[tuple[str]]:
    """The parts of all people that are withheld, so that none of 1 to 10 is left."""
    if made.exact:
        return frozenset()
    keys = {("all",): made.frame.height} | {(name,): n for name, n in counts.items()}
    parts = [(name,) for name in counts]
    order = {key: n for n, key in enumerate(keys)}
    return privacy.find_withheld(keys, [(("all",), parts)], (), order)


def new_subjects_page(record: RunRecord, calibration: str, made: SubjectsPredictionLike) -> Page:
    """The page of the risks of new people; `calibration` says what the risks are."""
    page = PageBuilder(f"Risks by {record.run}")
    labels = record.data[0].class_names
    page.notice(privacy.SHOWN if made.exact else privacy.NOTICE)
    page.fact("Run", describe_run(record))
    page.fact("Risks", calibration)
    page.fact("Index day", _describe_index(made.frame))
    means = [made.frame[f"risk_{label}"].mean() for label in labels]
    shows_risks = made.exact or not privacy.is_small(made.frame.height)
    if shows_risks:
        bars = BarPlot(list(labels), means, ylabel="mean risk")  # type: ignore[arg-type]
        title = f"Mean risk of {labels[0]}"
        page.figure("risks", title, "The mean of the predicted risks of each label.", bars)
    status, hidden = _count_status(made)
    shared = {name: None if (name,) in hidden else n for name, n in status.items()}
    rows = [[name, privacy.show_count(n)] for name, n in shared.items()]
    page.table("people", "People", STATUS, ["history", "people"], rows)
    _add_unknown(page, made)
    for label in labels if shows_risks else ():
        _add_distribution(page, label, made)
    total = privacy.show_count(None if ("all",) in hidden else made.frame.height)
    verdict = f"Risks of {', '.join(labels)}; {total} people were read."
    return page.finish(verdict, {"run": record.run, **SubjectsSummary.describe(made).protected})


def _describe_index(frame: pl.DataFrame) -> str:
    if "index_date" not in frame.columns:
        return "of each person, on a clock of their own"
    days = frame["index_date"].drop_nulls().unique()
    if not len(days):
        return "none: complete histories, as in the training of the run"
    return f"{days[0]}" if len(days) == 1 else "of each person, as the source gives it"


def _add_distribution(page: PageBuilder, label: str, made: SubjectsPredictionLike) -> None:
    """How the risks of a label are distributed."""
    risks = made.frame[f"risk_{label}"].drop_nulls().to_numpy()
    if not len(risks):
        return
    counts, edges = np.histogram(risks, np.linspace(0, 1, BANDS + 1))
    names = [f"{low:.0%} to {high:.0%}" for low, high in itertools.pairwise(edges)]
    people = dict(zip(names, counts.tolist(), strict=True))
    rest = {"no risk": made.frame.height - len(risks)} if made.frame.height > len(risks) else {}
    hidden = _find_hidden(made, people | rest)
    heights = [None if (name,) in hidden else n for name, n in people.items()]
    bars = BarPlot(names, heights, ylabel="people")
    page.section(f"Risk of {label}")
    page.figure(f"risk-{label}", "Bands of risk", RISKS.format(label=label), bars)
    least = 0 if made.exact else SMALL
    rows = [
        [f"{q:.0%}", round(float(np.quantile(risks, q)), privacy.DECIMALS)]
        for q in QUANTILES
        if min(q, 1 - q) * len(risks) >= least
    ]
    caption = f"Of so many of the people the risk of {label} is at most this."
    page.add(*make_tables(f"shares-{label}", "Shares", caption, ["share", "risk"], rows))


def _add_unknown(page: PageBuilder, made: SubjectsPredictionLike) -> None:
    """The codes that were not understood, those of most people first."""
    named = [row for row in made.unknown.iter_rows() if made.exact or row[3] >= SMALL]
    rows = [
        [code, reason, rows if made.exact else privacy.round_rows(rows), people]
        for code, reason, rows, people in named[:CODES]
    ]
    others = made.unknown.height - len(rows)
    caption = UNKNOWN + (f" {others:,} more codes are not listed." if others else "")
    columns = ["code", "reason", "rows", "people"]
    page.add(*make_tables("unknown", "Not understood", caption, columns, rows))
