"""Insight: what a trained model looks at and has learned: attention, saliency, singular values,
shapelets, costs of long inputs. One file an analysis.
"""

from bitimely_core.registry import analyses

analyses.provide(__name__)
