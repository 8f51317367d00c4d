"""Operators on tensors: retention in its three forms, and the rotation of queries and keys."""

from bitimely_core.ops.retention import State, decay_matrix, retention, retention_matrix
from bitimely_core.ops.rotary import rotate, xpos

__all__ = ["State", "decay_matrix", "retention", "retention_matrix", "rotate", "xpos"]
