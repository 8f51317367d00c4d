"""Small models and batches for tests of every model."""

import torch

from bitimely_core import registry
from bitimely_core.config import find_model_config
from bitimely_core.models.tokenizers import FIRST
from bitimely_core.types import Batch

REGULAR = sorted(name for name, entry in registry.models.items() if "regular" in entry.facts.input)
EVENTS = sorted(  # of those whose tokens are the events
    name
    for name, entry in registry.models.items()
    if "events" in entry.facts.input
    and entry.facts.family in {"retention", "attention", "recurrent", "s4"}
)
STACKS = ["bitimelygpt", "gpt", "gpt-baar", "timelybert", "timelygpt"]


def combine(names, options):
    """Every model with every choice of options that it has."""
    return [
        (name, chosen)
        for name in names
        for chosen in options
        if chosen.keys() <= find_model_config(name).model_fields.keys()
    ]


def events(batch=2, length=9, seed=0):
    draw = torch.Generator().manual_seed(seed)
    times = (torch.rand(batch, length, generator=draw) * 30).cumsum(1)
    return Batch(torch.randint(FIRST, 52, (batch, length), generator=draw), times)
