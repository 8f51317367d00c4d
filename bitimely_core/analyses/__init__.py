"""Analyses: each sibling file registers one function from runs (or data, or a model's name) to a `Page`; `report.write` draws it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import nn

    from bitimely_core.tokens import Windows


class LoadedRun(NamedTuple):
    """A trained run as an analysis reads it."""

    name: str
    model: nn.Module  # the backbone, in eval mode
    windows: Windows  # all splits
    settings: dict[str, Any]  # run.json
