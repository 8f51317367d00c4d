"""Augmentations: changes of a training window that keep what its label means, one file each.

An augmentation is a function `(row, draw, context) -> row` of one `LabelledRow`; everything random
comes from `draw`, the numpy generator of that row. Legend: T samples, V channels, C classes.
"""
