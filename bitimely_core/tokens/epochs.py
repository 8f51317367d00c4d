"""Cuts annotations into epochs of one length: neighbours of one class are read as one run.

Scoring programs write a stage of ten minutes as one annotation, as 20 of 30 s, as 120 of 5 s, or
with ends that are a sample short. All of them give the same epochs.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bitimely_core.types import Annotation

Labels = Mapping[str, str] | None
"""Text of an annotation -> class; None: each text is a class."""

TOLERANCE = 0.01  # of an epoch: shorter gaps, and shorter lacks at the end of a run, do not count

ROUNDING = 1e-6  # of an epoch


class Epoch(NamedTuple):
    """A stretch of one class, or a point."""

    start: float  # seconds
    run: float  # seconds of all that has the class without a break; 0 for points
    label: str


def list_epochs(
    annotations: Iterable[Annotation],
    seconds: float,
    labels: Labels,
    borders: Collection[float],
    left_out: Counter[str],
) -> list[Epoch]:
    """The epochs of all annotations that last, in order of time; no two share samples.

    Args:
        annotations: of one recording.
        seconds: of an epoch.
        labels: of the view.
        borders: seconds at which segments begin; a run ends there.
        left_out: gets `unlabelled_epochs` without a class, `mixed_epochs` that would hold two,
            and `annotation_overlap` of another class than an earlier one of the same time.
    """
    slack = TOLERANCE * seconds
    by_label: defaultdict[str, list[Annotation]] = defaultdict(list)
    for note in annotations:
        if note.duration <= 0:
            continue
        label = find_class(note.label, labels)
        if label is None:
            left_out["unlabelled_epochs"] += max(1, int(note.duration / seconds + ROUNDING))
        else:
            by_label[label].append(note)
    epochs: list[Epoch] = []
    for label, notes in by_label.items():
        for run in _find_runs(sorted(notes), borders, slack):
            starts, rest = _cut_run(run, seconds, slack)
            length = _find_end(run) - run[0].onset
            epochs += [Epoch(start, length, label) for start in starts]
            is_short = any(note.duration < seconds - slack for note in run)
            left_out["mixed_epochs"] += is_short and rest > slack
    return list(_select_first(epochs, seconds - slack, left_out))


def list_points(
    annotations: Iterable[Annotation], step: float, labels: Labels, left_out: Counter[str]
) -> list[Epoch]:
    """The annotations without a duration, in order of time; of those of one sample the first.

    `step`: seconds between two samples. Points without a class count as `unlabelled_epochs`.
    """
    points: list[Epoch] = []
    for note in annotations:
        if note.duration != 0:
            continue
        label = find_class(note.label, labels)
        if label is None:
            left_out["unlabelled_epochs"] += 1
        else:
            points.append(Epoch(note.onset, 0.0, label))
    return list(_select_first(points, step / 2, left_out))


def choose_scored(durations: Counter[float]) -> float:
    """The commonest duration of annotations in seconds, of two the longer; 0 without any."""
    return max(durations, key=lambda seconds: (durations[seconds], seconds), default=0.0)


def count_durations(annotations: Iterable[tuple[float, str]], labels: Labels) -> Counter[float]:
    """Duration in seconds (to the millisecond) -> annotations that last and have a class.

    `annotations` are duration and text.
    """
    return Counter(
        round(seconds, 3)
        for seconds, text in annotations
        if seconds > 0 and find_class(text, labels) is not None
    )


def find_class(text: str, labels: Labels) -> str | None:
    """The class of the text of an annotation, None where it has none."""
    return text if labels is None else labels.get(text)


def is_shorter(scored: float, epoch: float) -> bool:
    """Whether annotations of `scored` seconds are too short for an epoch."""
    return 0 < scored < epoch * (1 - TOLERANCE)


def _find_runs(
    notes: Sequence[Annotation], borders: Collection[float], slack: float
) -> Iterator[list[Annotation]]:
    """Annotations in order of time that touch, or overlap."""
    run: list[Annotation] = []
    end = 0.0
    for note in notes:
        if run and (note.onset > end + slack or note.onset in borders):
            yield run
            run = []
        end = max(end, note.onset + note.duration) if run else note.onset + note.duration
        run.append(note)
    if run:
        yield run


def _find_end(run: Sequence[Annotation]) -> float:
    return max(note.onset + note.duration for note in run)


def _cut_run(run: Sequence[Annotation], seconds: float, slack: float) -> tuple[list[float], float]:
    """Where the epochs of a run begin, and the seconds that are left at its end.

    An annotation that begins where an epoch does, but for rounding, states the time. The last epoch
    may lack `slack` seconds where epochs were scored singly; a long stretch ends where it says.
    """
    onsets = [note.onset for note in run]
    end = _find_end(run)
    lack = slack if run[-1].duration <= seconds + slack else ROUNDING * seconds
    starts: list[float] = []
    anchor = onsets[0]
    number = 0  # of epochs since the anchor
    while True:
        start = anchor + number * seconds
        place = bisect.bisect_left(onsets, start - slack)
        if place < len(onsets) and onsets[place] <= start + slack:
            nearest = min(onsets[place : place + 2], key=lambda onset: abs(onset - start))
            anchor, number, start = nearest, 0, nearest
        if start + seconds > end + lack:
            break
        starts.append(start)
        number += 1
    return starts, end - start


def _select_first(epochs: Iterable[Epoch], width: float, left_out: Counter[str]) -> Iterator[Epoch]:
    """The epochs less those that begin within `width` seconds of one before.

    Of several at one time the first is that of the shortest run. Others of the same class are
    the same label twice; those of another class are counted.
    """
    last: Epoch | None = None
    for epoch in sorted(epochs, key=lambda epoch: epoch[:2]):
        if last is None or epoch.start >= last.start + width:
            last = epoch
            yield epoch
        else:
            left_out["annotation_overlap"] += epoch.label != last.label
