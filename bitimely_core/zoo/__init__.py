"""The zoo: the models that BiTimelyGPT is compared with, one file a method, each with the
objectives of its own paper.
"""

from bitimely_core.registry import models, objectives

models.provide(__name__)
objectives.provide(__name__)
