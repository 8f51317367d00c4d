"""Training of models: the loop `fit`, with devices, processes, checkpoints and logs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitimely_core.train.loop import fit
    from bitimely_core.train.step_cost import estimate

__all__ = ["estimate", "fit"]
FILES = {"estimate": "step_cost", "fit": "loop"}


def __getattr__(name: str) -> Any:
    """Import the loop or the estimate, and with them torch, on first use."""
    if name not in FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{FILES[name]}"), name)
