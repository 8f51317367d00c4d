"""Training: `fit`, which moves a model from batch to batch, and what it stands on: devices,
processes, checkpoints, logs.
"""

from bitimely_core.train.estimate import estimate
from bitimely_core.train.loop import fit

__all__ = ["estimate", "fit"]
