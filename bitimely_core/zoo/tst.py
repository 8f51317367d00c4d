"""TST (Zerveas et al. 2021): every timestep is a token, in post-norm layers with batch norm; masked
values are reconstructed.

Embedded timesteps times sqrt(D), positions, dropout, L layers as those of PatchTST with dropout on
the attention weights, then GELU and dropout before the output projection or the head. Padding is no
key and has no part in the batch statistics. Learned positions start as the sinusoids: from U(-0.02,
0.02), far below the embedded values, a frequency was not learnt in hundreds of steps.

The objective masks single values, in runs of geometric length, each channel by itself. They are
set to 0 and reconstructed.
"""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Generator, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig
from bitimely_core.errors import usage_error
from bitimely_core.models.base import Model
from bitimely_core.models.tokenizers import CodeTokenizer
from bitimely_core.objectives.token_objectives import (
    Generators,
    MaskedConfig,
    Result,
    make_hidden_part,
    make_result,
)
from bitimely_core.registry import ModelFacts, ObjectiveFacts, models, objectives
from bitimely_core.types import Batch
from bitimely_core.zoo.patchtst import ENCODER, TokenEncoder, TokenEncoderConfig, encode_sinusoid


class TST(TokenEncoder):
    """Timesteps of all channels; what heads and output projection read is Drop(GELU(state))."""

    def __init__(self, config: TokenEncoderConfig) -> None:
        self.attention_dropout = config.dropout
        # embeddings of codes start as large as that makes them
        self.scale = 1.0 if config.tokenizer == "codes" else math.sqrt(config.dim)
        super().__init__(config)
        self.norms = nn.ModuleDict({"next": nn.Sequential(nn.GELU(), nn.Dropout(config.dropout))})

    def draw_positions(self, first: int, count: int) -> Tensor:
        """The sinusoids of positions `first` to `first` + `count` - 1, [count, D]."""
        return encode_sinusoid(
            torch.arange(first, first + count, dtype=torch.get_default_dtype()), self.config.dim
        )


@models(
    ModelFacts(
        config=TokenEncoderConfig,
        family="attention",
        objective="masked-runs",
        capabilities=("hidden",),
        readout="flatten",
        attention=True,
        input=("regular", "events"),
        source="Zerveas et al. 2021, A Transformer-based Framework for Multivariate Time Series "
        "Representation Learning",
        known="A token a timestep: memory and time grow with the square of the window; its own "
        "masks are 15 %, the comparison's 40 %",
    )
)
def tst(config: TokenEncoderConfig) -> TST:
    """TST: every timestep a token; runs of single channels are masked and reconstructed."""
    settings = ENCODER | {"value_dim": config.dim}
    if config.tokenizer != "codes":
        settings["tokenizer"] = "steps"
    return TST(config.model_copy(update=settings))


# --- the objective

MEAN_RUN = 3.0  # lm, timesteps


class MaskedRunsConfig(MaskedConfig):
    """Settings of masked-runs."""

    concurrent: bool = Field(False, description="Mask all channels together.")
    bernoulli: bool = Field(False, description="Mask each value by itself, not in runs.")


def check_timesteps(config: ModelConfig) -> None:
    """Single values can be masked where a token is a timestep. Raises UserError (config, exit
    2).
    """
    if config.tokenizer not in {"steps", "codes"}:
        raise usage_error(
            f"masked-runs for tokens of {config.tokenizer}",
            "expected timesteps",
            "Use masked-patches or gap",
            field="objective.name",
        )


def draw_values(
    model: Model, batch: Batch, generators: Generators, config: MaskedRunsConfig
) -> Tensor:
    """Values to mask, bool [B, N, V], on the CPU; [B, N, 1] where all channels are masked
    together.
    """
    tokenizer = model.adapter_of(batch).tokenizer
    width = (
        1 if config.concurrent or isinstance(tokenizer, CodeTokenizer) else tokenizer.target_width
    )
    real = tokenizer.find_real(batch)
    rows = [
        draw_runs(count, width, config, generator)
        for count, generator in zip(real.sum(1).tolist(), generators, strict=True)
    ]
    return torch.stack([F.pad(row, (0, 0, 0, real.shape[1] - len(row))) for row in rows])


@objectives(
    ObjectiveFacts(
        leak_free=True,
        requires="hidden",
        config=MaskedRunsConfig,
        check=check_timesteps,
        draw=draw_values,
    )
)
def masked_runs(
    model: Model, batch: Batch, generator: Generator | None = None, *, config: MaskedRunsConfig
) -> Result:
    """40 % of the values masked in runs of 3 timesteps on average, each channel by itself;
    reconstruct them.

    `concurrent`: all channels together. `bernoulli`: no runs, each value by itself. Padding and
    missing values are no targets.
    """
    tokenizer = model.adapter_of(batch).tokenizer
    target, valid = model.targets(batch)
    chosen = batch.draws
    assert chosen is not None
    if isinstance(tokenizer, CodeTokenizer):
        chosen = chosen[..., 0]
        erased = model.erase(batch, chosen)
    else:
        chosen = chosen.expand_as(target)
        erased = batch._replace(values=batch.values.masked_fill(chosen, 0.0))
    return make_result(
        model,
        batch,
        [make_hidden_part(model, batch, model(erased), target, valid, chosen, "masked")],
    )


def draw_runs(
    count: int, width: int, config: MaskedRunsConfig, generator: Generator | None = None
) -> Tensor:
    """Masked values of a row, bool [count, width], on the CPU.

    Two states that take turns: a masked run goes on with probability 1 - 1 / lm, a kept one ends
    with p = r / (1 - r) / lm, and the row
    starts masked with probability r: the share r is masked everywhere. Where p would pass 1 (r >
    3/4), masked runs are longer instead.
    """
    ratio = config.ratio
    if config.bernoulli:
        return torch.rand(count, width, generator=generator) < ratio
    mean = max(MEAN_RUN, ratio / (1 - ratio))
    masked = torch.rand(width, 1, generator=generator) < ratio
    # the state of each run, [width, runs]; no row has more runs than timesteps
    turn = masked ^ (torch.arange(count) % 2 == 1)
    ends = torch.where(turn, 1 / mean, ratio / (1 - ratio) / mean).double().clamp(max=1 - 1e-12)
    uniform = torch.rand(width, count, generator=generator, dtype=torch.float64).clamp(min=1e-300)
    # geometric: P(length > n) = (1 - p)^n
    lengths = 1 + (uniform.log() / torch.log1p(-ends)).floor().clamp(max=count)
    passed = torch.searchsorted(
        lengths.cumsum(1),
        torch.arange(count, dtype=torch.float64).expand(width, -1).contiguous(),
        right=True,
    )
    return (masked ^ (passed % 2 == 1)).T
