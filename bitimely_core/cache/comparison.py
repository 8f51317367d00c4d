"""Compares the recordings of a data set with each other: levels of a channel that differ by about a
thousand, as of volts beside millivolts, and channels that were not stored.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from bitimely_core.cache import shards
from bitimely_core.errors import Finding, Reason, input_warning, safe_text
from bitimely_core.formats.units import find_unit_factor
from bitimely_core.schemas.ingest_records import CachedPart, CachedUnit
from bitimely_core.wording import list_first

FACTOR = 300.0  # between two levels that follow each other: people differ by far less
NAMES = 8  # channels in a line


class ChannelLevel(NamedTuple):
    """The interquartile range of a channel of a recording, in the unit of its first recording."""

    level: float
    recording: str
    unit: str


def compare_levels(folder: Path, parts: Iterable[CachedPart]) -> Iterator[Finding]:
    """A warning for each channel with recordings at levels that differ by more than `FACTOR`."""
    levels: dict[str, list[ChannelLevel]] = defaultdict(list)
    columns = ("recording_id", "channel", "unit", "qc")
    names = {entry.shard.recordings for part in parts for entry in part.units.values()}
    for name in sorted(filter(None, names)):
        for row in shards.read_table(folder / name, columns).to_pylist():
            figures = json.loads(row["qc"] or "{}")
            level = figures.get("iqr")
            if level:
                same = levels[row["channel"]]
                factor = find_unit_factor(row["unit"], same[0].unit if same else row["unit"])
                if factor is not None:
                    same.append(ChannelLevel(level * factor, row["recording_id"], row["unit"]))
    for channel, same in levels.items():
        yield from _report_levels(channel, sorted(same))


def _report_levels(channel: str, levels: list[ChannelLevel]) -> Iterator[Finding]:
    """The widest gap between levels that follow each other. `levels`: from the lowest."""
    pairs = list(itertools.pairwise(levels))
    place = max(range(len(pairs)), key=lambda i: pairs[i][1].level / pairs[i][0].level, default=-1)
    if place < 0 or pairs[place][1].level < FACTOR * pairs[place][0].level:
        return
    low, high = pairs[place]
    factor = 10 ** round(math.log10(high.level / low.level))
    texts = [f"{safe_text(row.recording)} ({row.level:.3g})" for row in (low, high)]
    yield input_warning(
        Reason.UNIT,
        f"{safe_text(channel)} is about {factor:,} times as strong in {texts[1]} as in {texts[0]}",
        f"{place + 1} recordings have the lower level, {len(levels) - place - 1} the higher",
        "Is one of them in another unit than its file says? State it in [units] of the map",
        field=channel,
        count=min(place + 1, len(levels) - place - 1),
        examples=(low.recording, high.recording),
    )


def summarize_left_out(entries: Mapping[str, CachedUnit]) -> Iterator[Finding]:
    """One warning for each reason for which channels of recordings were not stored."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for entry in entries.values():
        for finding in entry.report.reasons if entry.report else ():
            if finding.code == Reason.LEFT_OUT and finding.field == "channels":
                counts[finding.expected or ""][finding.found or ""] += 1
    texts = {
        "codes": "they hold codes, which are points in time now (view `points`)",
        "labels": "they hold labels, whose whole numbers are annotations now",
        "no signal": "they are no signals of a body",
        "bad": "their file or the channels table calls them bad",
    }
    for reason, names in counts.items():
        listed = [f"{name} in {count}" for name, count in names.most_common()]
        yield input_warning(
            Reason.LEFT_OUT,
            f"not stored are {list_first(listed, NAMES)} of {len(entries)} recordings",
            texts.get(reason, ""),
            "Name them in channels of [[files]] of the map to keep them",
            field="channels",
            count=names.total(),
        )
