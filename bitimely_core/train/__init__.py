"""Training of models: the loop `fit`, with devices, processes, checkpoints and logs."""

from bitimely_core.train.estimate import estimate
from bitimely_core.train.loop import fit

__all__ = ["estimate", "fit"]
