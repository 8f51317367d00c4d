"""Finds which native samples of a recording reach which values of a window.

This puts a condition on a leak-free objective. Native sample k of a recording lies in value floor(k
* rate / native rate). A prediction may not depend on native samples that lie in its target or, of
one direction, beyond it; and a target that native samples outside of it determine is no target.
Both follow from the first and the last native sample that each value is made of, at every position
of the tokens relative to the native samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from bitimely_core.config import ModelConfig
from bitimely_core.schemas.tokens import ChannelPreparation, SamplePreparation

# of a prediction; around: all but the hidden tokens
Context = Literal["past", "future", "past or future", "around"]
Array = npt.NDArray[np.int64]

CONDITIONS = {  # of a resampling, where it does not name its channels
    "none": "given native samples",
    "causal": "given causally resampled channels",
}
FAR = 1 << 40  # beyond every sample
# values of the stretch that is looked at, else of one common period of tokens and samples
LONGEST = 1 << 18


class Support(NamedTuple):
    """The native samples that each value of a stretch is made of.

    `first` > `last`: none, the value is missing.
    """

    first: Array  # [n] native sample; -FAR: all before
    last: Array  # [n]; FAR: all after
    rate: Fraction  # values a native sample

    def places(self, samples: Array) -> Array:
        """The value in which each native sample lies."""
        return np.clip(samples * self.rate.numerator // self.rate.denominator, -FAR, FAR)

    def first_in(self, values: Array) -> Array:
        """The first native sample that lies in one of the values, or behind it."""
        return -(-values * self.rate.denominator // self.rate.numerator)


def find_ratio(step: ChannelPreparation) -> Fraction:
    """Values a native sample."""
    if step.resampling == "none":
        return Fraction(1)
    return Fraction(step.rate / step.native_rate).limit_denominator(100_000)


def find_support(step: ChannelPreparation, length: int) -> Support:
    """Of the first `length` values of a recording, its edges left out: what each is made of."""
    ratio, values = find_ratio(step), np.arange(length, dtype=np.int64)
    up, down = ratio.numerator, ratio.denominator
    before = values * down // up  # the last native sample at or before the start of the value
    # those that lie in the value
    begin, end = -(-values * down // up), -(-(values + 1) * down // up) - 1
    first, last = {
        "none": (values, values),
        "interpolated": (before, before + (values * down % up > 0)),
        "held": (before, before),
        "placed": (begin, end),
        "averaged": (begin, end),
        "causal": (np.full(length, -FAR), end),
        "resampled": (np.full(length, -FAR), np.full(length, FAR)),
    }[step.resampling]
    if step.filters is not None:
        first = np.full(length, -FAR)
        last = np.full(length, FAR) if step.filters == "zero-phase" else last
    return Support(first, last, ratio)


def find_leak(support: Support, starts: Array, width: int, context: Context) -> bool:
    """Whether a prediction of `width` values from one of `starts` on sees its target.

    It reaches a native sample in or beyond them, or all samples of one.
    """
    if context == "past or future":
        return any(find_leak(support, starts, width, side) for side in ("past", "future"))
    ends, values = starts + width - 1, starts[:, None] + np.arange(width)
    seen = support.first <= support.last
    # last native sample that earlier values reach
    before = np.maximum.accumulate(np.where(seen, support.last, -FAR))[starts - 1]
    # first one that later values reach
    after = np.minimum.accumulate(np.where(seen, support.first, FAR)[::-1])[::-1][ends + 1]
    # native samples that lie in the target
    begin, end = support.first_in(starts), support.first_in(ends + 1) - 1
    ahead = (before >= begin) & (begin <= end)
    behind = (after <= end) & (begin <= end)
    if context == "past":
        ahead = support.places(before) >= starts
        after = np.full_like(after, FAR)
        behind = np.zeros_like(ahead)
    elif context == "future":
        behind = support.places(after) <= ends
        before = np.full_like(before, -FAR)
        ahead = np.zeros_like(behind)
    first = np.maximum(support.first[values], before[:, None] + 1)
    last = np.minimum(support.last[values], after[:, None] - 1)
    return bool(ahead.any() or behind.any() or (seen[values] & (first > last)).any())


def find_token_grid(config: ModelConfig) -> tuple[int, int]:
    """Values between the starts of two tokens, and values of a target."""
    if config.cuts_patches:
        return config.stride or config.patch, config.patch
    return (4, 1) if config.tokenizer == "conv" else (1, 1)


def list_conditions(
    preparations: Iterable[SamplePreparation], config: ModelConfig, context: Context
) -> list[str]:
    """Conditions under which predictions from such a context see no sample of their targets."""
    conditions: list[str] = []
    for preparation in preparations:
        for step in preparation.channels:
            conditions += _list_step_conditions(step, preparation.stride, config, context)
    return list(dict.fromkeys(conditions))


def _list_step_conditions(
    step: ChannelPreparation, stride: int | None, config: ModelConfig, context: Context
) -> list[str]:
    if step.resampling == "none" and step.filters is None:
        return []
    token, width = find_token_grid(config)
    # tokens start at multiples of it
    places = 1 if stride is None or config.crop == "start" else math.gcd(stride, token)
    ratio = find_ratio(step)
    margin = 2 * math.ceil(ratio) + token + width
    period = min(math.lcm(token, ratio.numerator), max(LONGEST, 4 * math.ceil(ratio)))
    starts = np.arange(margin, margin + period, dtype=np.int64)
    starts = starts[starts % places == 0]

    def leaks(changes: dict[str, Any]) -> bool:
        support = find_support(step.model_copy(update=changes), period + 2 * margin)
        return find_leak(support, starts, width, context)

    if not leaks({}):
        return []
    name = CONDITIONS.get(step.resampling, f"given {step.resampling} channels")
    names = {name: leaks({"filters": None})}
    if step.filters is not None:
        names[f"given {step.filters} filters"] = leaks({"resampling": "none"})
    return [name for name, is_cause in names.items() if is_cause] or list(names)
