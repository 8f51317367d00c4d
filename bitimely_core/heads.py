"""Heads under the name that the library API promises; the code is in `models.heads`."""

from bitimely_core.models.heads import Classifier, MultiLabel, Regressor, binary_cross_entropy, cross_entropy, mean_squared_error

__all__ = ["Classifier", "MultiLabel", "Regressor", "binary_cross_entropy", "cross_entropy", "mean_squared_error"]
