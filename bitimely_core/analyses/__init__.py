"""Analyses: each sibling file registers one function from runs (or data, or a model's name) to a `Page`; `report.write_report` draws it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from bitimely_core.tokens import Windows


class LoadedRun(NamedTuple):
    """A trained run as an analysis reads it."""

    name: str
    model: nn.Module  # the backbone, in eval mode
    windows: Windows  # all splits
    settings: dict[str, Any]  # run.json
    head: nn.Module | None = None  # a fine-tuned run whole, with its head, in eval mode
    folder: Path | None = None  # the run's, for what stands beside it
    shared: int = 0  # test subjects that were in its training (possible where windows of one subject are in several splits)
