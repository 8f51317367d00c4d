"""Training of models: the loop `fit`, with devices, processes, checkpoints and logs."""

from bitimely_core.train.loop import fit
from bitimely_core.train.step_cost import estimate

__all__ = ["estimate", "fit"]
