"""Draws windows, or subjects of the training, by a seed."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from bitimely_core.errors import Reason, input_error
from bitimely_core.tokens.sets import TokenSet
from bitimely_core.tokens.splits import hash_to_share
from bitimely_core.types import SPLITS

Rows = TypeVar("Rows", bound=TokenSet)


def limit_windows(windows: Rows, limit: int | None, seed: int) -> Rows:
    """`windows` with at most `limit` windows of each split, drawn by `seed`; None: all."""
    if limit is None:
        return windows
    keep = np.zeros(len(windows), dtype=bool)
    split = windows.index["split"].to_numpy()
    draw = np.random.Generator(np.random.PCG64([seed, limit]))
    for name in SPLITS:
        keep[draw.permutation(np.flatnonzero(split == name))[:limit]] = True
    return windows.subset(keep)


def draw_held_out(windows: TokenSet, count: int, seed: int) -> tuple[np.ndarray, str]:
    """Positions in the index of up to `count` windows of one split, and that split's name.

    It is the first non-empty one of test, validation and train. They are drawn without replacement;
    runs on the same windows get the same ones. Raises UserError: no_input, without windows.
    """
    for split in reversed(SPLITS):
        rows = windows[split].rows
        if len(rows):
            draw = np.random.default_rng(seed)
            return np.sort(draw.choice(rows, min(count, len(rows)), replace=False)), split
    raise input_error(
        Reason.NO_INPUT,
        f"{windows.name} has no windows",
        hint="Tokenize it again with a shorter --window",
    )


def sample_subjects(windows: Rows, fraction: float, seed: int) -> Rows:
    """`windows` with a share of the training subjects; rows of other splits stay.

    Method notes, section 12, row 16. Of the m training subjects max(1, round(fraction * m)) are
    drawn, by the hash of (seed, subject): once a seed, whatever the epoch, and a larger fraction
    holds the smaller one.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"expected a fraction in (0, 1], found {fraction}")
    if fraction == 1:
        return windows
    training = (windows.index["split"] == "train").to_numpy()
    subjects = windows.subjects()
    ranked = sorted(
        set(subjects[training]),
        key=lambda subject: (hash_to_share(f"fraction|{seed}|{subject}"), subject),
    )
    drawn = ranked[: max(1, round(fraction * len(ranked)))]
    return windows.subset(~training | np.isin(subjects, drawn))
