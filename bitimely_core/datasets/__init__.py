"""The named data sets, one file a source: a function that lists its units, with the facts that
`bitimely list datasets` shows. No torch here.
"""

from bitimely_core.registry import datasets

datasets.provide(__name__)
