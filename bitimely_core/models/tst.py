"""TST (Zerveas et al. 2021): every timestep is a token, in post-norm layers with batch norm; masked values are reconstructed.

Embedded timesteps times sqrt(D), positions, dropout, L layers as those of PatchTST with dropout on the attention weights, then GELU and
dropout before the output projection or the head. Padding is no key and has no part in the batch statistics. Learned positions start as the
sinusoids: from U(-0.02, 0.02), far below the embedded values, a frequency was not learnt in hundreds of steps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bitimely_core.models.patchtst import TokenEncoder, TokenEncoderConfig, encode_sinusoid
from bitimely_core.registry import ModelFacts, models


class TST(TokenEncoder):
    """Timesteps of all channels; what heads and output projection read is Drop(GELU(state))."""

    def __init__(self, config: TokenEncoderConfig) -> None:
        self.attention_dropout = config.dropout
        self.scale = 1.0 if config.tokenizer == "codes" else math.sqrt(config.dim)  # embeddings of codes start as large as that makes them
        super().__init__(config)
        self.norms = nn.ModuleDict({"next": nn.Sequential(nn.GELU(), nn.Dropout(config.dropout))})

    def draw_positions(self, first: int, count: int) -> Tensor:
        """The sinusoids of positions `first` to `first` + `count` - 1, [count, D]."""
        return encode_sinusoid(torch.arange(first, first + count, dtype=torch.get_default_dtype()), self.config.dim)


@models(
    ModelFacts(
        config=TokenEncoderConfig,
        family="attention",
        objective="masked-runs",
        capabilities=("hidden",),
        readout="flatten",
        attention=True,
        input=("regular", "events"),
        source="Zerveas et al. 2021, A Transformer-based Framework for Multivariate Time Series Representation Learning",
        known="A token a timestep: memory and time grow with the square of the window; its own masks are 15 %, the comparison's 40 %",
    )
)
def tst(config: TokenEncoderConfig) -> TST:
    """TST: every timestep a token; runs of single channels are masked and reconstructed."""
    own = {"ffn": "plain", "value_dim": config.dim, "output_heads": "shared", "target": "raw", "ties": "canonical"}
    if config.tokenizer != "codes":
        own["tokenizer"] = "steps"
    return TST(config.model_copy(update=own))
