"""Channels, rate and window of the views of a user's own recordings, which state none: by what most
recordings have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from bitimely_core.cache import Cache
from bitimely_core.errors import Reason, UserError, input_error
from bitimely_core.registry import View

LONG = 0.99  # of a recording: an annotation of this share of it states no length of windows


class StoredSignal(NamedTuple):
    """A channel of a recording, or of one segment of it, without its samples."""

    channel: str
    rate: float  # Hz
    samples: int


def choose_open_values(
    cache: Cache, view: View, channels: tuple[str, ...]
) -> tuple[tuple[str, ...], float, int]:
    """The channels, their rate in Hz and the samples of a window; what `view` or the caller's
    `channels` state stays.

    Of recordings with a label, where the view has labels: `choose_channels`, the rate of most
    recordings that have these (`choose_rate`), and the commonest length of an annotation
    (`choose_epoch`), else `view.seconds`; the first of them where it is shorter.

    Raises UserError: unmatched_labels (exit 4) where no recording has an annotation, or none with a
    duration.
    """
    labelled = _list_labelled(cache, view)
    signals: dict[str, list[StoredSignal]] = {}
    rows = cache.signals()
    for recording, *values in (
        rows.select("recording_id", "channel", "rate", "n_samples").iter_rows()
        if rows.height
        else ()
    ):
        signals.setdefault(recording, []).append(StoredSignal(*values))
    found = {
        name: signals[name]
        for name in cache.recording_ids()
        if name in labelled and name in signals
    }
    channels = channels or choose_channels(
        {name: dict.fromkeys(one.channel for one in row) for name, row in found.items()}
    )
    kept = {name: [one for one in row if one.channel in channels] for name, row in found.items()}
    kept = {
        name: row for name, row in kept.items() if {one.channel for one in row} >= set(channels)
    } or kept
    rate = (
        view.rate
        if view.rate > 0
        else choose_rate(max((one.rate for one in row), default=1.0) for row in kept.values())
    )
    if view.window > 0:
        return channels, rate, view.window
    first = next(
        (row for row in kept.values() if all(one.rate <= rate for one in row)),
        next(iter(kept.values()), []),
    )
    shortest = min((math.floor(one.samples * rate / one.rate + 1e-6) for one in first), default=1)
    seconds = view.epoch or view.seconds
    if view.epoch == 0 and not view.points:
        lengths = {
            name: max((one.samples / one.rate for one in row), default=0.0)
            for name, row in kept.items()
        }
        notes = cache.annotations().select("recording_id", "duration").iter_rows()
        seconds = (
            choose_epoch(
                [seconds for name, seconds in notes if 0 < seconds < LONG * lengths.get(name, 0.0)]
            )
            or view.seconds
        )
    preferred = round(seconds * rate)
    return channels, rate, preferred if 0 < preferred <= shortest else shortest


def _list_labelled(cache: Cache, view: View) -> set[str]:
    """Recordings that can have a window of the view."""
    if view.target is not None:
        subjects = cache.subjects()
        known = (
            subjects.filter(subjects[view.target].is_not_null())
            if view.target in subjects.columns
            else subjects
        )
        return set((known if known.height else subjects)["recording_id"])
    if view.epoch is None:
        return set(cache.recording_ids())
    notes = cache.annotations()
    if not notes.height:
        raise _label_error(
            cache,
            "no recording has an annotation",
            "Give labels at ingest (--map), or take another view",
        )
    points = notes["duration"] <= 0
    found = set(notes.filter(points if view.points else ~points)["recording_id"])
    if not found and view.points:
        raise _label_error(
            cache, "no annotation is a point in time", f"Take the view {cache.dataset}/annotations"
        )
    if not found:
        raise _label_error(
            cache, "no annotation has a duration", f"Take the view {cache.dataset}/points"
        )
    return found


def _label_error(cache: Cache, problem: str, hint: str) -> UserError:
    return input_error(Reason.UNMATCHED_LABELS, problem, hint=hint, file=str(cache.folder))


def choose_channels(recordings: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """The channels that the largest number of recordings have together, of two such sets the
    larger, then that of the earlier recording.

    They are in the order of the first recording that has them. `recordings`: id -> channels.
    """
    often = Counter(channel for channels in recordings.values() for channel in channels)
    if not often:
        return ()
    most = max(often.values())
    best: tuple[str, ...] = ()
    for channel in (channel for channel, count in often.items() if count == most):
        if channel in best:
            continue
        having = [tuple(channels) for channels in recordings.values() if channel in channels]
        common = set(having[0]).intersection(*having[1:])
        if len(common) > len(best):
            best = tuple(one for one in having[0] if one in common)
    return best


def choose_rate(rates: Iterable[float]) -> float:
    """The rate of most recordings, in Hz, of two the higher; 1 where there is none."""
    often = Counter(rates)
    return max(often, key=lambda rate: (often[rate], rate), default=1.0)


def choose_epoch(durations: list[float]) -> float:
    """The commonest duration in seconds, of two the longer; 0 where no more than half of them are
    multiples of it, as of rhythms.
    """
    often = Counter(durations)
    best = max(often, key=lambda seconds: (often[seconds], seconds), default=0.0)
    multiples = (
        sum(
            seconds >= best and abs(seconds / best - round(seconds / best)) < 1e-3
            for seconds in durations
        )
        if best
        else 0
    )
    return best if 2 * multiples > len(durations) else 0.0
