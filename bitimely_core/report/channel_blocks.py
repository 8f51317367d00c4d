"""What the page of an ingest shows on the channels of all recordings: warnings, physical values,
faults and lengths.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from bitimely_core.page import BarPlot, Figure, Table, make_table
from bitimely_core.report.page_text import format_duration
from bitimely_core.types import group_by

MAX_BARS = 24  # channels or labels of a bar plot
MAX_BAR_PLOTS = 3  # units of measurement that get a figure
MAX_WARNINGS = 12
# ratio to the channel's usual spread above which a warning points to the unit or gain
ODD_SCALE = 30.0
LINE_NOISE = 0.2  # share of the power from which on there is a warning
SignalRow = Mapping[str, Any]  # of `cache.Cache.signals`
FAULTS = ("flat", "clipped", "missing", "out_of_range", "line_noise")


@dataclass
class IngestChannel:
    """A cached channel in one unit of measurement, with an entry per recording and segment."""

    name: str
    unit: str
    rates: set[float] = field(default_factory=set)  # Hz
    recordings: set[str] = field(default_factory=set)
    # quality figures, NaN: not measured
    figures: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def values(self, figure: str) -> np.ndarray:
        """The measured values of a quality figure."""
        values = np.array(self.figures[figure])
        return values[~np.isnan(values)]


def collect_channels(rows: Sequence[SignalRow]) -> list[IngestChannel]:
    """The channels of a cache in their order, one for each unit of measurement."""
    channels: dict[tuple[str, str], IngestChannel] = {}
    figures = json.loads(f"[{','.join(row['qc'] for row in rows)}]")  # one call for many
    for row, quality in zip(rows, figures, strict=True):
        key = (row["channel"], row["unit"])
        channel = channels.setdefault(key, IngestChannel(*key))
        channel.rates.add(row["rate"])
        channel.recordings.add(row["recording_id"])
        for name in (*FAULTS, "line_frequency", "min", "median", "max", "iqr"):
            value = quality.get(name)
            channel.figures[name].append(math.nan if value is None else value)
    return list(channels.values())


def measure_recordings(rows: Sequence[SignalRow]) -> dict[str, float]:
    """Recording -> seconds from its start to the end of its longest channel."""
    ends: dict[str, float] = defaultdict(float)
    for row in rows:
        end = row["onset"] + row["n_samples"] / row["rate"]
        ends[row["recording_id"]] = max(ends[row["recording_id"]], end)
    return ends


# ---- warnings


def channel_warnings(channels: list[IngestChannel]) -> list[str]:
    """Channels of unusual scale, constant channels and line noise."""
    warnings: list[str] = []
    for channel in channels:
        warnings += _list_warnings(channel)
    rest = len(warnings) - MAX_WARNINGS
    if rest > 0:
        warnings[MAX_WARNINGS:] = [f"And {rest} more warnings: see the quality of the channels."]
    return warnings


def _list_warnings(channel: IngestChannel) -> Iterator[str]:
    spread, is_single = channel.values("iqr"), len(channel.recordings) == 1
    odd = _count_odd(spread)
    if odd:
        yield (
            f"{channel.name}: the interquartile range of {odd:,} of {len(spread):,} recordings is "
            f"more than {ODD_SCALE:g} times wider or narrower than usual. Check their unit and "
            "gain."
        )
    constant = int((channel.values("min") == channel.values("max")).sum())
    if constant:
        where = "" if is_single else f" in {constant:,} of {len(spread):,} recordings"
        yield f"{channel.name}: constant{where}."
    noise = channel.values("line_noise")
    if len(noise) and float(np.median(noise)) > LINE_NOISE:
        frequency = _find_commonest(channel.values("line_frequency"))
        where = "" if is_single else " in the median recording"
        yield (
            f"{channel.name}: line noise at {frequency} Hz is "
            f"{100 * float(np.median(noise)):.0f} % of the power{where}; "
            f"`bitimely tokenize --notch {frequency}` removes it."
        )


def _count_odd(spread: np.ndarray) -> int:
    """Recordings of three or more whose spread is far from the median; spreads of 0 are not."""
    positive = spread[spread > 0]
    if len(spread) < 3 or not len(positive):
        return 0
    usual = np.median(positive)
    return int(((positive > ODD_SCALE * usual) | (positive < usual / ODD_SCALE)).sum())


# ---- tables and figures


def _reduce(values: np.ndarray, *statistics: Callable[[np.ndarray], Any]) -> list[float | None]:
    return [float(statistic(values)) if len(values) else None for statistic in statistics]


def quality_blocks(channels: list[IngestChannel]) -> Iterator[Figure | Table]:
    """Physical values and faults of each channel."""
    yield _value_table(channels)
    yield from _spread_figures(channels)
    yield _fault_table(channels)


def _value_table(channels: list[IngestChannel]) -> Table:
    rows: list[list[Any]] = []
    for channel in channels:
        rates: float | str = next(iter(channel.rates))
        if len(channel.rates) > 1:
            rates = _format_rates(channel.rates)
        rows.append(
            [
                f"{channel.name}, {channel.unit or 'no unit'}",
                rates,
                len(channel.recordings),
                *_reduce(channel.values("min"), np.min),
                *_reduce(channel.values("median"), np.median),
                *_reduce(channel.values("max"), np.max),
                *_reduce(channel.values("iqr"), np.median),
            ]
        )
    samples = ("lowest", "median", "highest", "interquartile range")
    return make_table(
        "values",
        "Physical values",
        "Over all recordings: lowest and highest sample; of the median recording: median and "
        "interquartile range of the samples. A wrong gain or unit shows here.",
        ["channel and unit", "Hz", "recordings", *samples],
        rows,
    )


def _fault_table(channels: list[IngestChannel]) -> Table:
    """Faults that occur; those that were measured and never occur are named below the table."""
    columns, absent = ["channel"], []
    rows: list[list[Any]] = [[channel.name] for channel in channels]
    for name in FAULTS:
        measured = [channel.values(name) for channel in channels]
        words = name.replace("_", " ")
        if any(values.any() for values in measured):
            columns += [f"{words} %", f"{words}, worst"]
            for row, values in zip(rows, measured, strict=True):
                row += _reduce((100 * values).round(3), np.median, np.max)
        elif any(map(len, measured)):
            absent.append(words)
    noise = ", measured in channels of at least 122 Hz only"
    if "line noise %" in columns:
        noise = ""
        columns.append("line frequency, Hz")
        for row, channel in zip(rows, channels, strict=True):
            row.append(_find_commonest(channel.values("line_frequency")))
    caption = (
        "Per cent of the samples in the median and in the worst recording. Flat: unchanged for a "
        "second or longer. Clipped: at the end of the converter's range, or at the recording's own "
        "extremes where the files do not state it. Out of range: outside of the range in the "
        "header. Line noise: per cent of the power above 0.5 Hz within 1 Hz of 50 or 60 Hz"
        f"{noise}. A dash: not measured."
    )
    if absent:
        caption += f" In no recording: {', '.join(absent)}."
    return make_table("faults", "Faults", caption, columns, rows)


def _spread_figures(channels: list[IngestChannel]) -> Iterator[Figure]:
    """Interquartile ranges, a figure for each of the commonest units of measurement."""
    measured = [channel for channel in channels if len(channel.values("iqr"))]
    by_unit = group_by(measured, lambda channel: channel.unit)
    for unit, members in sorted(by_unit.items(), key=lambda pair: -len(pair[1]))[:MAX_BAR_PLOTS]:
        if len(members) > 1 or len(members[0].recordings) > 1:
            yield _spread_figure(unit, members)


def _spread_figure(unit: str, channels: list[IngestChannel]) -> Figure:
    spreads = {channel.name: channel.values("iqr") for channel in channels[:MAX_BARS]}
    medians, lowest, highest = (
        [float(statistic(values)) for values in spreads.values()]
        for statistic in (np.median, np.min, np.max)
    )
    caption = (
        "Bar: interquartile range of the samples in the median recording; line: from the narrowest "
        "to the widest recording. A line that reaches far beyond the others indicates a recording "
        "of another scale."
    )
    if len(channels) > MAX_BARS:
        caption += f" The first {MAX_BARS} of {len(channels)} channels."
    axis = f"interquartile range, {unit}" if unit else "interquartile range"
    measured = f"in {unit}" if unit else "channels without a unit"
    plot = BarPlot(list(spreads), medians, lowest, highest, axis)
    return Figure(f"spread-{unit or 'none'}", f"Spread of the values, {measured}", caption, plot)


def _find_commonest(values: np.ndarray) -> int | None:
    return next((int(value) for value, _ in Counter(values.tolist()).most_common(1)), None)


def _format_rates(rates: set[float]) -> str:
    text = ", ".join(f"{rate:g}" for rate in sorted(rates)[:4])
    return f"{text}, ..." if len(rates) > 4 else text


def duration_figures(lengths: dict[str, float]) -> list[Figure]:
    """Recordings by length in seconds, where they differ."""
    seconds = np.array(list(lengths.values()))
    if len(seconds) < 2 or seconds.max() <= 1.01 * seconds.min():
        return []
    counts, edges = np.histogram(seconds, bins=min(12, max(4, math.ceil(math.sqrt(len(seconds))))))
    names = [f"{format_duration(a)} to {format_duration(b)}" for a, b in pairwise(edges)]
    caption = "Recordings much shorter than the others may be truncated."
    plot = BarPlot(names, counts.tolist(), ylabel="recordings")
    return [Figure("lengths", "Lengths of the recordings", caption, plot)]
