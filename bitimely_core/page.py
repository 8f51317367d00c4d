"""What a report shows, as plain data: figures, tables, the page that holds them, and the builder
that collects a page in reading order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

from bitimely_core.privacy import Sharing

if TYPE_CHECKING:
    import numpy.typing as npt

    # None and NaN: not defined, not drawn
    Values = Sequence[float | None] | Sequence[float] | Sequence[int] | npt.NDArray[Any]


class MetricLike(Protocol):
    """A value with its 95 % confidence interval, None where undefined."""

    @property
    def value(self) -> float | None:
        """The estimate."""

    @property
    def lo(self) -> float | None:
        """Lower limit."""

    @property
    def hi(self) -> float | None:
        """Upper limit."""


@dataclass(frozen=True, eq=False)
class Line:
    """A curve with an optional band from `lo` to `hi`; a reference is dashed and grey."""

    name: str
    x: Values
    y: Values
    lo: Values | None = None
    hi: Values | None = None
    reference: bool = False

    @classmethod
    def from_metrics(
        cls, name: str, x: Values, metrics: Iterable[MetricLike], *, band: bool = True
    ) -> Self:
        """A curve of metrics; with `band` their intervals, where all of them have one."""
        values = [(metric.value, metric.lo, metric.hi) for metric in metrics]
        y, lo, hi = map(list, zip(*values, strict=True))
        return cls(name, x, y, lo, hi) if band and None not in lo else cls(name, x, y)


@dataclass(frozen=True, eq=False)
class LinePlot:
    """Curves on common axes."""

    series: Sequence[Line]
    xlabel: str = ""
    ylabel: str = ""
    logx: bool = False
    logy: bool = False


@dataclass(frozen=True, eq=False)
class HeatMap:
    """A matrix [R, C], or panels [M, R, C] with `names` [M]. Up to 16 rows and columns with names
    show the number in every cell.
    """

    values: npt.NDArray[Any]
    xlabel: str = ""
    ylabel: str = ""
    diverging: bool = False  # colours around 0
    names: Sequence[str] | None = None
    row_names: Sequence[str] | None = None
    column_names: Sequence[str] | None = None
    mark: Sequence[float] | None = None  # columns at which a vertical line is drawn


@dataclass(frozen=True, eq=False)
class BarPlot:
    """A bar a name, with an optional interval.

    As the first block of a page it is the headline: the result first, then what it is compared
    with.
    """

    names: Sequence[str]
    values: Values
    lo: Values | None = None
    hi: Values | None = None
    ylabel: str = ""

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, MetricLike], ylabel: str = "") -> Self:
        """Bars with intervals of named metrics; undefined ones are left out."""
        defined = {name: metric for name, metric in metrics.items() if metric.value is not None}
        lo, hi = ([getattr(metric, end) for metric in defined.values()] for end in ("lo", "hi"))
        return cls(list(defined), [metric.value for metric in defined.values()], lo, hi, ylabel)


@dataclass(frozen=True, eq=False)
class Trace:
    """A signal; with `accent` it is drawn in colour."""

    name: str
    values: Values
    unit: str = ""
    accent: bool = False


@dataclass(frozen=True)
class TimeSpan:
    """A named interval in seconds; start = stop is an instant."""

    start: float
    stop: float
    name: str = ""


@dataclass(frozen=True)
class SpanLanes:
    """Time spans below the traces, a line a name: a hypnogram, beats, events."""

    names: Sequence[str]
    spans: Sequence[TimeSpan]


@dataclass(frozen=True, eq=False)
class TracePlot:
    """Signals of one sampling rate (Hz) below each other, with spans shaded in all of them."""

    rate: float
    signals: Sequence[Trace]
    spans: Sequence[TimeSpan] = ()
    lanes: SpanLanes | None = None


@dataclass(frozen=True, eq=False)
class StageTrack:
    """Classes of successive epochs: names or numbers; None and numbers outside the classes are
    gaps.
    """

    name: str
    stages: Sequence[Any] | npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Hypnogram:
    """Tracks of classes over time; two tracks are compared epoch by epoch."""

    epoch: float  # seconds
    tracks: Sequence[StageTrack]
    classes: Sequence[str]


@dataclass(frozen=True, eq=False)
class DensityPlot:
    """Probabilities [E, K] of the classes of successive epochs as stacked areas (a hypnodensity);
    NaN: a gap.
    """

    epoch: float  # seconds
    values: npt.NDArray[Any]
    classes: Sequence[str]


@dataclass(frozen=True, eq=False)
class Spectrogram:
    """Power of one channel in successive epochs."""

    channel: str
    frequencies: npt.NDArray[Any]  # [F] Hz, ascending
    power: npt.NDArray[Any]  # [E, F] dB; NaN: a gap


@dataclass(frozen=True, eq=False)
class NightPlot:
    """Spectrogram, most probable classes and their probabilities on one time axis."""

    track: StageTrack
    density: DensityPlot
    spectrogram: Spectrogram | None = None
    clock: float | None = None  # seconds from midnight to the first epoch; None: not known


@dataclass(frozen=True, eq=False)
class PointPlot:
    """True and predicted classes of points of a recording, such as beats, below their signal."""

    times: npt.NDArray[Any]  # [n] seconds from the start of the recording
    true: npt.NDArray[Any]  # [n] numbers of classes
    predicted: npt.NDArray[Any]  # [n]
    classes: Sequence[str]
    signal: Trace  # NaN: between the windows
    start: float  # seconds, of the signal
    rate: float  # Hz, of the signal


@dataclass(frozen=True, eq=False)
class Timeline:
    """Events of one subject: times and the number of the group of each."""

    name: str
    times: Values
    groups: Sequence[int] | npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class TimelinePlot:
    """Events as ticks, a line a subject; the first group is the background."""

    lanes: Sequence[Timeline]
    groups: Sequence[str]
    xlabel: str = ""


@dataclass(frozen=True, eq=False)
class ScatterPanel:
    """Points and the number of the group of each, -1 for none."""

    name: str
    x: Values
    y: Values
    group: Sequence[int] | npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class ScatterPlot:
    """Panels of points with common groups."""

    panels: Sequence[ScatterPanel]
    groups: Sequence[str]
    xlabel: str = ""
    ylabel: str = ""
    ticks: bool = False


@dataclass(frozen=True, eq=False)
class ForestPanel:
    """A value with an interval a name."""

    name: str
    values: Values
    lo: Values | None = None
    hi: Values | None = None
    other: Values | None = None  # drawn beside `values`, for comparison
    zero: bool = False  # draws the line of no difference
    margins: Values | None = None  # a short line a name


@dataclass(frozen=True, eq=False)
class ForestPlot:
    """Panels of values with intervals that share their names."""

    names: Sequence[str]
    panels: Sequence[ForestPanel]
    xlabel: str = ""
    ours: str = "ours"  # words of the legend for `values`
    other: str = "other"  # and for `other`


@dataclass(frozen=True, eq=False)
class RankPlot:
    """Mean ranks on a line; a bar joins names that differ by less than the critical difference
    (Demsar 2006).
    """

    names: Sequence[str]
    ranks: Values
    critical: float


@dataclass(frozen=True, eq=False)
class FlowPlot:
    """Boxes from top to bottom, each with a count. At the right of each arrow stands what left."""

    names: Sequence[str]
    counts: Sequence[int | None]  # None: withheld
    leaving: Sequence[str]  # an entry an arrow, one fewer than names
    leaving_counts: Sequence[int | None]


FigureData = (
    FlowPlot
    | LinePlot
    | HeatMap
    | BarPlot
    | TracePlot
    | Hypnogram
    | DensityPlot
    | NightPlot
    | PointPlot
    | TimelinePlot
    | ScatterPlot
    | ForestPlot
    | RankPlot
)


@dataclass(frozen=True)
class Figure:
    """A figure as data; the report draws it and stores every array beside the page as Parquet."""

    name: str
    title: str
    caption: str  # what is seen, and which observation would be evidence against it
    data: FigureData
    sharing: Sharing | None = None


@dataclass(frozen=True)
class Link:
    """A cell of a table that leads to a file; without `href` it is text."""

    # a stored cell with a text and a value is no link
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  read by pydantic as it is

    text: str
    href: str = ""


@dataclass(frozen=True)
class Sparkline:
    """A cell of a table with small curves on common axes, the last of them in colour."""

    value: float | None  # shown beside the curves; the column is sorted by it
    curves: Sequence[Sequence[tuple[float, float]]]
    about: str


@dataclass(frozen=True)
class Table:
    """A table of a report: cells are text, numbers, metric objects, links, sparklines or None
    (shown as a dash).
    """

    name: str
    title: str
    caption: str
    columns: list[str]
    rows: list[list[Any]]
    sharing: Sharing | None = None


@dataclass(frozen=True, kw_only=True)
class Page:
    """Result of an analysis or an evaluation; `report.write_report` turns it into one
    self-contained HTML file and its data.
    """

    title: str
    verdict: str  # one sentence a newcomer understands
    # at the top: leak_free false, random-window split ...
    notices: list[str] = field(default_factory=list)
    # in reading order; a str is a paragraph, "## ..." a heading
    blocks: list[Figure | Table | str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)  # data, split, subjects, seed, versions ...
    fact_sharing: dict[str, Sharing] = field(default_factory=dict)  # of facts that state one
    summary: dict[str, Any] = field(default_factory=dict)  # summary.json


def make_table(
    name: str,
    title: str,
    caption: str,
    columns: Iterable[str],
    rows: Iterable[Iterable[Any]],
    sharing: Sharing | None = None,
) -> Table:
    """A table for `PageBuilder.add`."""
    cells = [to_plain(list(row)) for row in rows]
    return Table(name, title, caption, list(columns), cells, sharing)


def make_tables(
    name: str, title: str, caption: str, columns: Iterable[str], rows: Iterable[Iterable[Any]]
) -> list[Table]:
    """As `make_table`, in a list that is empty where the table would have no rows."""
    table = make_table(name, title, caption, columns, rows)
    return [table] if table.rows else []


def to_plain(value: Any) -> Any:
    """`value` with the records in it (pydantic models, dataclasses, named tuples) as dicts; arrays,
    links and curves stay.
    """
    if isinstance(value, Link | Sparkline):
        return value
    if hasattr(value, "model_dump"):
        return value.model_dump(by_alias=True)
    if is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: to_plain(part) for key, part in value.items()}
    return list(map(to_plain, value)) if isinstance(value, list | tuple) else value


# the word in a text, not as a part of a key, an option or a path
SUBJECT = re.compile(r"(?<![\w/-])([Ss])ubject(s?)(?![\w/-]|\.\w)")
# the field that `rename_units` leaves alone: names of files, and titles, which name runs
FIXED_FIELDS: dict[type, str] = {Figure: "name", Table: "name", Page: "title"}


def rename_units(value: Any, unit: str) -> Any:
    """`value` (a text, a block, a page) with `unit`, such as segment, in the place of subject.

    Only what is shown changes; keys and names of files stay.
    """
    if unit in {"subject", "window"}:
        return value
    if isinstance(value, str):
        words = {"s": unit, "S": unit.capitalize()}
        return SUBJECT.sub(lambda match: words[match[1]] + match[2], value)
    if isinstance(value, Mapping):
        return {key: rename_units(part, unit) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [rename_units(part, unit) for part in value]
    return _rename_fields(value, unit) if is_dataclass(value) else value


def _rename_fields(value: Any, unit: str) -> Any:
    """A dataclass with `rename_units` applied to its fields; of a page also to the names of the
    facts.
    """
    names = [f.name for f in fields(value) if f.name != FIXED_FIELDS.get(type(value))]
    changed = {name: rename_units(getattr(value, name), unit) for name in names}
    if isinstance(value, Page):
        changed["facts"] = {rename_units(k, unit): text for k, text in changed["facts"].items()}
    return replace(value, **changed)


class PageBuilder:
    """A page that is filled in reading order.

    `page.fact(..)`, `page.figure(..)` and `page.table(..)` add to it; `page.finish(verdict,
    summary)` ends it. Where counts of people are withheld, a figure is left out, and a table or a
    fact with a number of 1 to 10, unless its `sharing` says that it is open.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.blocks: list[Figure | Table | str] = []
        self.notices: list[str] = []
        self.facts: dict[str, str] = {}
        self.fact_sharing: dict[str, Sharing] = {}

    def fact(self, name: str, value: object, sharing: Sharing | None = None) -> None:
        """Add a row to the facts at the top, or replace the row of the same name."""
        self.facts[name] = str(value)
        if sharing is not None:
            self.fact_sharing[name] = sharing

    def add_facts(self, facts: Mapping[str, object], sharing: Sharing | None = None) -> None:
        """Add rows to the facts at the top."""
        for name, value in facts.items():
            self.fact(name, value, sharing)

    def notice(self, *lines: str) -> None:
        """Add caveats at the top; repeated ones appear once."""
        self.notices += [line for line in dict.fromkeys(lines) if line not in self.notices]

    def section(self, text: str) -> None:
        """Start a section."""
        self.blocks.append(f"## {text}")

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self.blocks.append(text)

    def figure(
        self, name: str, title: str, caption: str, data: FigureData, sharing: Sharing | None = None
    ) -> None:
        """Add a figure; the class of `data` is its kind."""
        self.blocks.append(Figure(name, title, caption, data, sharing))

    def table(
        self,
        name: str,
        title: str,
        caption: str,
        columns: Iterable[str],
        rows: Iterable[Iterable[Any]],
        sharing: Sharing | None = None,
    ) -> None:
        """Add a table."""
        self.blocks.append(make_table(name, title, caption, columns, rows, sharing))

    def add(self, *blocks: Figure | Table | str) -> None:
        """Add blocks that were made elsewhere."""
        self.blocks += blocks

    def finish(self, verdict: str, summary: Mapping[str, Any] | None = None) -> Page:
        """The page, with its verdict (one sentence) and what `summary.json` holds."""
        return Page(
            title=self.title,
            verdict=verdict,
            notices=self.notices,
            blocks=self.blocks,
            facts=self.facts,
            fact_sharing=self.fact_sharing,
            summary=to_plain(summary or {}),
        )
