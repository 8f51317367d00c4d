"""A model of your own: one class and one line of facts. Pre-trains with the masked objective and is
fine-tuned like any other.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from bitimely_core import workflows
from bitimely_core.models.base import Model
from bitimely_core.registry import ModelFacts, models
from bitimely_core.types import Encoded


class Neighbours(Model):
    """Each token sees five tokens around it, and nothing more."""

    def __init__(self, config):
        super().__init__(config)
        self.mix = nn.Conv1d(config.dim, config.dim, 5, padding=2)

    def forward(self, batch, *, directions=None, hide=None, attention=False):
        """Tokens, targets and states of a batch."""
        batch, adapter = self.expand_channels(batch), self.adapter_of(batch)
        tokens, targets, real = adapter.tokenizer(batch)
        x = adapter.embed(tokens) * real[..., None]
        x = x + torch.relu(self.mix(x.transpose(1, 2))).transpose(1, 2)
        return Encoded(tokens, targets, real, (x,))


@models(ModelFacts(family="attention", objective="masked", readout="mean", source="this example"))
def neighbours(config):
    """Neighbours: one convolution over tokens."""
    return Neighbours(config)


# a package does the same in a module that its entry point `bitimely.plugins` names
with TemporaryDirectory() as home:
    flags = {
        "model": {"name": "neighbours", "tokenizer": "patch"},
        "data": {"names": ("synthetic/staging",)},
        "train": {"steps": 5},
    }
    run = workflows.pretrain(preset="tiny", flags=flags, workspace=Path(home))
    tuned = workflows.finetune(
        run["run"], data="synthetic/staging", flags={"train": {"steps": 5}}, workspace=Path(home)
    )
    print(
        workflows.evaluate(tuned["run"], workspace=Path(home), bootstrap=20)["metrics"]["accuracy"][
            "value"
        ]
    )
