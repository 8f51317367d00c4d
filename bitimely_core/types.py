"""Types of recordings, ingest units and batches, which ingest and training share.

It imports neither torch nor pyarrow. Legend: B batch, T timesteps, V channels, N tokens, P target
width, D model width, H heads, L layers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import (
    Callable,
    Collection,
    Container,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from bitimely_core.errors import Finding

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

SPLITS = ("train", "validation", "test")
Item = TypeVar("Item")
Default = TypeVar("Default")
Group = TypeVar("Group", bound=Hashable)


class Signal(NamedTuple):
    """One channel of one recording at its native rate.

    `samples * scale + offset` in float64 = physical values in `unit`.
    """

    channel: str
    rate: float  # Hz
    unit: str
    samples: np.ndarray  # int16 (the source's digital values, bit for bit) or float32, shape [n]
    scale: float = 1.0
    offset: float = 0.0
    # seconds from the start of the recording; > 0 for later segments of a discontinuous file
    onset: float = 0.0
    # lowest and highest digital value, for the QC; not stored
    rails: tuple[float, float] | None = None


class Annotation(NamedTuple):
    """A labelled stretch of a recording, in seconds from its start."""

    onset: float
    duration: float
    label: str


AttributeValue = str | float | list[str] | None
Attributes = Mapping[str, AttributeValue]
"""Attributes of a subject or recording."""

IngestOptions = Mapping[str, Any]
"""Options of an ingest by name: those that a data set declares, and keep_dates and keep_phi."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One recording as read: what goes into the cache."""

    recording_id: str
    subject_id: str
    signals: list[Signal]
    annotations: list[Annotation] = field(default_factory=list)
    attributes: Attributes = field(default_factory=dict)  # allow-listed: age, sex, night ...
    start_time: str | None = None  # ISO; only with --keep-dates
    findings: list[Finding] = field(default_factory=list)  # warnings and infos of this unit
    # channel -> its name in the file, of channels that have the names of a run
    sources: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SourceRows:
    """Status of the rows of one table, as in the ingest report.

    seen = used + dropped + quarantined.
    """

    file: str  # relative to the source
    kind: str = "rows"  # rows, segments, cases ...
    seen: int  # data records in the file, counted independently of the parser
    # reason -> rows excluded by a documented rule
    dropped: dict[str, int] = field(default_factory=dict)
    quarantined: dict[str, int] = field(default_factory=dict)  # reason -> faulty rows
    warned: dict[str, int] = field(default_factory=dict)  # reason -> rows used with a warning


def count_reasons(findings: Iterable[Finding]) -> dict[str, int]:
    """Reason -> findings with it, in the order of their first occurrence."""
    return dict(Counter(str(finding.code) for finding in findings))


@dataclass(frozen=True, kw_only=True)
class Records:
    """Contents of a unit that is a table: many recordings, and the account of its rows."""

    records: list[Record]
    rows: list[SourceRows] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)  # warnings and infos of the table


@dataclass(frozen=True, kw_only=True)
class IngestUnit:
    """The smallest thing that is accepted or quarantined.

    `read` runs in a worker process and raises UserError. A unit is not read again while its files
    and the arguments of `read` (a `functools.partial` of a function of a module) stay the same.
    """

    name: str
    files: tuple[str, ...]  # relative to the source
    # None: `findings` hold the reason why it cannot be read
    read: Callable[[], Record | Records] | None
    findings: tuple[Finding, ...] = ()


RECORDING = 1 << 32  # between the places of the first windows of two recordings


class Batch(NamedTuple):
    """What a model reads. All but `values` may be None. mask: True = observed."""

    values: Tensor  # signals [B, T, V] float; events [B, N] code ids; dense [B, T, V]
    times: Tensor | None = None  # events [B, N] months; dense [B, T]
    mask: Tensor | None = None  # [B, T], [B, T, V] or [B, N]
    target: Tensor | None = None  # [B] class ids or values, [B, C] multi-label
    # [B] row in the index of the tokens; it hides the method of tuple
    index: Tensor | None = None  # type: ignore[assignment]
    # [B] months: time of [EOS], for events under a landmark the index day; None: that of the last
    # event
    end: Tensor | None = None
    # [B] on the CPU, all equal: data set of the rows in a mixed pre-training; None: the first
    source: Tensor | None = None
    # [B, 4] events: age at the first event (50 years: 0, 60: 1; not known: 0), whether it is
    # known, male, female
    person: Tensor | None = None
    draws: Tensor | None = None  # [B, ...] what the objective has drawn for each row
    numbers: Tensor | None = None  # [B, N] of events, in their own units; NaN: none
    # [B, 2, V] centre and factor, of values that are still int16: (value - centre) * factor
    affine: Tensor | None = None
    # [B] int64, for heads with context: windows from the first one of the recording, plus
    # `RECORDING` for each recording before it
    place: Tensor | None = None


class LabelledRow(NamedTuple):
    """One training window with its label, which augmentations change.

    T samples, V channels, C classes. A new row never shares memory with the one before.
    """

    values: np.ndarray  # [T, V] float32 as the model reads them, 0 where one is missing
    mask: np.ndarray | None  # [T, V] bool, True = observed; None: all are
    # [] class id or number, [C] indicators or shares, NaN: not known
    target: np.ndarray


class AugmentationContext(NamedTuple):
    """What an augmentation may read beside its row."""

    label_scales: str  # rate, duration or none: what stretching the time does to the label
    draw_partner: Callable[[np.random.Generator], LabelledRow]  # another row of the training


class LabelColumns(NamedTuple):
    """The columns of one label, a horizon each, the shortest first."""

    columns: list[int]
    days: list[float]


def group_by(items: Iterable[Item], find_group: Callable[[Item], Group]) -> dict[Group, list[Item]]:
    """Group -> its items, both in order."""
    groups: dict[Group, list[Item]] = {}
    for item in items:
        groups.setdefault(find_group(item), []).append(item)
    return groups


def find_only(values: Collection[Item], default: Default) -> Item | Default:
    """The only one of several values; `default` where there are none or more."""
    return next(iter(values)) if len(values) == 1 else default


def leave_out(values: Mapping[Group, Item], keys: Container[object]) -> dict[Group, Item]:
    """The values without those of some keys."""
    return {key: value for key, value in values.items() if key not in keys}


def select_keys(values: Mapping[Group, Item], keys: Container[object]) -> dict[Group, Item]:
    """The values of those keys that are among `keys`."""
    return {key: value for key, value in values.items() if key in keys}


def drop_none(values: Mapping[Group, Item | None]) -> dict[Group, Item]:
    """The values that are not None."""
    return {key: value for key, value in values.items() if value is not None}


def drop_empty(values: Mapping[Group, Item]) -> dict[Group, Item]:
    """The values that are not empty, 0 or None."""
    return {key: value for key, value in values.items() if value}


def count_nouns(count: int, noun: str) -> str:
    """A number of things in words: 1 gap, 2 gaps."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def group_columns(names: Sequence[str]) -> dict[str, LabelColumns]:
    """Label -> its columns; `names` of the C columns as of `name_horizon`."""
    labels = defaultdict[str, LabelColumns](lambda: LabelColumns([], []))
    for column, name in enumerate(names):
        label, day = parse_horizon(name)
        labels[label].columns.append(column)
        labels[label].days.append(day)
    return labels


def name_horizon(label: str, days: float) -> str:
    """The name of the risk of a label within so many days."""
    return f"{label}@{days:g}d"


def parse_horizon(name: str) -> tuple[str, float]:
    """Label and days of such a name."""
    label, _, days = name.rpartition("@")
    return label, float(days.removesuffix("d"))


class Encoded(NamedTuple):
    """What a model returns, in forward time order.

    With special positions [SOS] is at 0, [EOS] at `eos`.
    """

    tokens: Tensor | None  # [B, N, ...] before the embedding
    targets: Tensor | None  # [B, N, P] fixed functions of the input; codes [B, N]
    mask: Tensor | None  # [B, N] True = real token
    # L states [B, N+2, D] before the final norm (N without special positions)
    hidden: tuple[Tensor, ...]
    # [B, H, N+2, N+2] a layer; row = query, column = key
    attention: tuple[Tensor, ...] | None = None
    pooled: Tensor | None = None  # the method's own vector
    eos: Tensor | None = None  # [B] index of [EOS]
    # [B] index of the state that readout `last` reads; None: that of the last token
    last: Tensor | None = None
    embedded: Tensor | None = None  # [B, N, D] tokens before the first layer


class Batches(Protocol):
    """`epoch -> iterator of Batch` with a known number of steps.

    The order is a function of (seed, epoch).
    """

    steps: int  # optimizer-sized global batches an epoch
    size: int  # rows of a global batch

    def __call__(
        self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """Batches `start`.. of `epoch`; process `rank` of `world` gets every world-th row."""
        ...


class NativeWindow(NamedTuple):
    """The recording under one window as the cache holds it.

    Nothing is resampled, filtered or normalised.
    """

    # channel -> [t] float64 in physical units, empty where the recording has none there
    samples: Mapping[str, np.ndarray]
    rates: Mapping[str, float]  # Hz
