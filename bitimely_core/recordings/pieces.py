"""Places the epochs of a file as segments of one recording."""

from __future__ import annotations

from collections.abc import Sequence

from bitimely_core.errors import Finding, Reason
from bitimely_core.types import Annotation

EPOCH_GAP = 1.0  # seconds between epochs whose times are unknown: no window spans two of them


def place_in_row(count: int, seconds: float) -> list[float]:
    """Onsets in seconds of so many epochs of this length, one after the other."""
    return [number * (seconds + EPOCH_GAP) for number in range(count)]


def name_epochs(
    onsets: Sequence[float], seconds: float, names: Sequence[str | None]
) -> list[Annotation]:
    """An annotation over each epoch that has a name."""
    return [
        Annotation(onset, seconds, name)
        for onset, name in zip(onsets, names, strict=True)
        if name is not None
    ]


def report_epochs(count: int, seconds: float, *, timed: bool) -> Finding:
    """What is said of a file of epochs; `timed`: they lie at the times that the file states."""
    how = "at its time in the recording"
    if not timed:
        how = f"one after the other, {EPOCH_GAP:g} s apart"
    problem = f"holds {count} epochs of {seconds:g} s"
    action = f"each is a segment, {how}"
    return Finding(Reason.DISCONTINUOUS, problem, action, level="info", count=count)
