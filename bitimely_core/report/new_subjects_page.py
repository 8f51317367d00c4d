"""The page of risks of new people: their distribution, and the codes that were not understood.
Counts of few people are withheld unless the people are synthetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, TypedDict

import numpy as np

from bitimely_core import privacy
from bitimely_core.page import BarPlot, Page, PageBuilder, make_tables
from bitimely_core.privacy import SMALL
from bitimely_core.report.prediction_page import describe_run
from bitimely_core.schemas.runs import RunRecord

if TYPE_CHECKING:
    import polars as pl

RISK = "risk_"  # begins the names of columns of risks
BANDS = 10  # of the predicted risk
CODES = 50  # codes that are listed
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
RISKS = (
    "People by their predicted risk of {label}, in bands of ten points. Bands of few people are "
    "left out."
)
STATUS = (
    "People with fewer codes or a longer history than in the training, without any code that the "
    "model knows, or without observation on the index day have a risk too; the model has not "
    "learned from such people. Who died before the index day has none, and who had the outcome by "
    "then, or may have had it, none of it."
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
        status, _, hidden = _SubjectCounts.measure(made)
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


class _SubjectCounts(NamedTuple):
    """People by status, and of each label with risks by band; what of it is withheld."""

    status: dict[str, int]
    bands: dict[str, dict[str, int]]
    hidden: frozenset[tuple[str, ...]]  # of all, of a status, of a label and band

    @classmethod
    def measure(cls, made: SubjectsPredictionLike) -> Self:
        """The counts of some people; none of 1 to 10 follows from all that are printed."""
        import polars as pl

        statuses = made.frame["status"].value_counts()
        status = dict(statuses.sort(["count", "status"], descending=[True, False]).iter_rows())
        names = [name for name in made.frame.columns if name.startswith(RISK)]
        bands = {
            name.removeprefix(RISK): _count_bands(made.frame[name].drop_nulls())
            for name in names
            if made.frame[name].count()
        }
        has_risk = pl.any_horizontal(pl.col(names).is_not_null())
        living = set(made.frame.filter(has_risk)["status"])
        hidden = frozenset() if made.exact else _find_hidden(status, living, bands)
        return cls(status, bands, hidden)


def _find_hidden(
    status: Mapping[str, int], living: Collection[str], bands: Mapping[str, Mapping[str, int]]
) -> frozenset[tuple[str, ...]]:
    """The counts that are withheld; people of the states `living` have a risk of some label."""
    states: dict[tuple[str, ...], int] = {(name,): n for name, n in status.items()}
    counts: dict[tuple[str, ...], int] = {("all",): sum(status.values()), **states}
    order = {key: place for place, key in enumerate(counts)}
    counts["risk",] = sum(status[name] for name in living)  # printed nowhere
    alive: list[tuple[str, ...]] = [(name,) for name in living]
    sums = [(("all",), [*states]), (("risk",), alive)]
    unprinted: set[tuple[str, ...]] = {("risk",)}
    for label, people in bands.items():
        parts: dict[tuple[str, ...], int] = {(label, band): n for band, n in people.items()}
        order |= dict.fromkeys(parts, len(status) + 1)
        if n_without := counts["risk",] - sum(people.values()):  # who had the outcome
            parts["without a risk", label] = n_without
            unprinted.add(("without a risk", label))
        counts |= parts
        sums.append((("risk",), [*parts]))
    return privacy.find_withheld(counts, sums, unprinted, order)


def _count_bands(risks: pl.Series) -> dict[str, int]:
    """The people in each band of the risk."""
    counts, edges = np.histogram(risks, np.linspace(0, 1, BANDS + 1))
    names = [f"{low:.0%} to {high:.0%}" for low, high in itertools.pairwise(edges)]
    return dict(zip(names, counts.tolist(), strict=True))


def new_subjects_page(record: RunRecord, calibration: str, made: SubjectsPredictionLike) -> Page:
    """The page of the risks of new people; `calibration` says what the risks are."""
    page = PageBuilder(f"Risks by {record.run}")
    labels = record.data[0].class_names
    page.notice(privacy.SHOWN if made.exact else privacy.NOTICE)
    page.fact("Run", describe_run(record))
    page.fact("Risks", calibration)
    page.fact("Index day", _describe_index(made.frame))
    means = [made.frame[RISK + label].mean() for label in labels]
    shows_risks = made.exact or not privacy.is_small(made.frame.height)
    if shows_risks:
        bars = BarPlot(list(labels), means, ylabel="mean risk")  # type: ignore[arg-type]
        title = f"Mean risk of {labels[0]}"
        page.figure("risks", title, "The mean of the predicted risks of each label.", bars)
    counts = _SubjectCounts.measure(made)
    status, bands, hidden = counts
    shared = {name: None if (name,) in hidden else n for name, n in status.items()}
    rows = [[name, privacy.show_count(n)] for name, n in shared.items()]
    page.table("people", "People", STATUS, ["history", "people"], rows)
    _add_unknown(page, made)
    for label in bands if shows_risks else ():
        _add_distribution(page, label, made, counts)
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


def _add_distribution(
    page: PageBuilder, label: str, made: SubjectsPredictionLike, counts: _SubjectCounts
) -> None:
    """How the risks of a label are distributed."""
    risks = made.frame[RISK + label].drop_nulls().to_numpy()
    people = counts.bands[label]
    heights = [None if (label, band) in counts.hidden else n for band, n in people.items()]
    bars = BarPlot(list(people), heights, ylabel="people")
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
    total = made.frame.height
    named = [row for row in made.unknown.iter_rows() if made.exact or row[3] >= SMALL]
    rows = named[:CODES]
    if not made.exact:
        rows = [(*texts, *_share_code(count, people, total)) for *texts, count, people in rows]
    others = made.unknown.height - len(rows)
    caption = UNKNOWN + (f" {others:,} more codes are not listed." if others else "")
    columns = ["code", "reason", "rows", "people"]
    page.add(*make_tables("unknown", "Not understood", caption, columns, rows))


def _share_code(rows: int, people: int, total: int) -> tuple[int, object]:
    """Rows and people with a code as they may be shared: neither those of `total` with it nor those
    without it may be few.
    """
    is_few = privacy.is_small(people) or privacy.is_small(total - people)
    return privacy.round_rows(rows), privacy.show_count(None if is_few else people)
