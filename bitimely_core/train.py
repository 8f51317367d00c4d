"""The training loop under the name that the library API promises; the code is in `training.loop`."""

from bitimely_core.training.loop import fit

__all__ = ["fit"]
