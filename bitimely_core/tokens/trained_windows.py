"""Whether new recordings or people are those of a training, told by their samples or events."""

from __future__ import annotations

import hashlib
from typing import Any, TypeAlias

import numpy as np

from bitimely_core.tokens.sequences import EventSequences
from bitimely_core.tokens.windows import Windows

EVENTS = 10  # shorter histories may be equal by chance

# start in seconds and checksum of the samples of windows
WindowMarks: TypeAlias = frozenset[tuple[float, bytes]]


def mark_recordings(windows: Windows) -> WindowMarks:
    """The mark of the middle window of each recording; none of one without a change, which other
    recordings may have as well.
    """
    index = windows.index.with_columns(row=windows.rows)
    middles = index.group_by("recording_id").agg(row="row", start="start")
    marks = set()
    for rows, starts in middles.select("row", "start").iter_rows():
        middle = len(rows) // 2
        samples = _read_samples(windows, rows[middle])
        if (samples != samples[:1]).any():
            marks.add(_mark_window(starts[middle], samples))
    return frozenset(marks)


def holds_marked(windows: Windows, marks: WindowMarks) -> bool:
    """Whether a window of a new recording is among the marked ones."""
    starts = {start for start, _ in marks}
    rows = enumerate(windows.index["start"].to_list())
    return any(
        _mark_window(start, _read_samples(windows, row)) in marks
        for row, start in rows
        if round(start, 6) in starts
    )


def _read_samples(windows: Windows, row: int) -> np.ndarray:
    """The stored samples [T, V] of a window."""
    return windows.read_stored(np.array([row]))[0].astype(np.float32)


def _mark_window(start: float, samples: np.ndarray) -> tuple[float, bytes]:
    return round(start, 6), hashlib.sha256(samples.tobytes()).digest()


def mark_histories(sequences: EventSequences) -> frozenset[bytes]:
    """The marks of histories: checksums of their codes and times."""
    flat, clock = sequences.flat, sequences.clock
    firsts, ends = sequences.firsts[sequences.rows], sequences.firsts[sequences.rows + 1]
    return frozenset(
        hashlib.sha256(flat[first:end].tobytes() + clock[first:end].tobytes()).digest()
        for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)
        if end - first >= EVENTS
    )


def is_trained_on(trained: Any, others: Any) -> bool:
    """Whether some of the histories, or of the recordings, of a training are among `others`; False
    where the training is None.
    """
    if trained is None:
        return False
    if others.vocabulary:
        return not mark_histories(trained).isdisjoint(mark_histories(others))
    return holds_marked(others, mark_recordings(trained))
