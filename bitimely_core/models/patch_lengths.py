"""How long a patch of a signal is: the slowest thing that one token must hold.

The rows of `patch_lengths.toml` say so in seconds, by the label that a view has or by the names of
its channels. A window has at least 3 and at most 60 patches, all of one length, so that the last
patch is short by less than one sample a patch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bitimely_core.config import LONG_PATCH, PATCHES, M, ModelConfig, choose_tokens, read_toml
from bitimely_core.schemas.tokens import TokenOptions, WindowOptions

TABLE = Path(__file__).with_suffix(".toml")
FEWEST, MOST = 3, 60  # patches of a window
SHORT_RATE, LONG_RATE = 1e-3, 3e-3  # largest learning rate of short patches, of residual blocks


class PatchRule(NamedTuple):
    """A row of the table."""

    kind: str
    seconds: float  # of a patch
    features: bool  # whether log amplitudes, mean and size of a patch are read, too
    channels: str = ""  # regular expression that the name of a channel begins with, in any case
    labels: tuple[str, ...] = ()  # targets of a view, whatever its channels
    longest: float = float("inf")  # seconds of the windows that it is for


@cache
def list_rules() -> tuple[PatchRule, ...]:
    """The rows of the table."""
    return tuple(
        PatchRule(**{**row, "labels": tuple(row.get("labels", ()))})
        for row in read_toml(TABLE)["rules"]
    )


def find_rule(channels: Sequence[str], label: str | None, seconds: float) -> PatchRule | None:
    """The row for windows of so many `seconds`: by the `label`, else by the first channel that a
    row knows; None for signals of no known kind.
    """
    rules = [rule for rule in list_rules() if seconds <= rule.longest]
    by_label = [rule for rule in rules if label in rule.labels]
    by_channel = (
        rule
        for channel in channels
        for rule in rules
        if rule.channels and re.match(rule.channels, channel, re.IGNORECASE)
    )
    return next(itertools.chain(by_label, by_channel), None)


def count_samples(length: int, wanted: float) -> int:
    """Samples of a patch in windows of `length`, of about as many as `wanted`: the window is cut
    into 3 to 60 equal patches.
    """
    patches = min(max(round(length / wanted), FEWEST), MOST)
    return -(-length // patches)


def choose_patch(config: M, options: TokenOptions) -> M:
    """The configuration with the patch for windows of signals that were cut by the `options`, where
    none was chosen.
    """
    if config.tokenizer != "patch-cnn" or not isinstance(options, WindowOptions):
        return config
    rule = find_rule(options.value_channels, options.target, options.length)
    wanted = options.window / PATCHES if rule is None else rule.seconds * options.rate
    patch = config.patch or count_samples(options.window, wanted)
    features = config.patch_features
    if features is None and rule is not None:
        features = rule.features
    return choose_tokens(config.model_copy(update={"patch": patch, "patch_features": features}))


def choose_learning_rate(config: ModelConfig) -> float | None:
    """The largest learning rate of a training from random weights; None: the model's own."""
    if config.tokenizer != "patch-cnn":
        return None
    return SHORT_RATE if config.patch < LONG_PATCH else LONG_RATE
