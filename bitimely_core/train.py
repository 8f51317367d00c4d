"""The training loop under the name that the library API promises; the code is in `training`."""

from bitimely_core.training.estimate import estimate
from bitimely_core.training.loop import fit

__all__ = ["estimate", "fit"]
