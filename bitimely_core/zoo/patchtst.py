"""PatchTST (Nie et al. 2023): channel-independent patches through an encoder of post-norm layers
with batch norm.

Each channel of a window is a separate sequence; all share the weights. RevIN first: a window's
channel is standardised by its own mean and variance over its observed samples. Then patches, a
linear map, learned positions, L layers z = BN(z + Drop(MHA(z))), z = BN(z + Drop(FF(z))). The batch
statistics of a feature run over the rows and the real tokens together.

`TokenEncoder` is shared with TST, where a token is a timestep of all channels.

Legend: B batch, R rows of the encoder (B * V where channels are independent), T timesteps, V
channels, N tokens, P patch, D width, H heads.

The objective hides a share of the patches of each row: they are read as 0 behind the
normalisation, and reconstructed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Generator, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig
from bitimely_core.models.adapters import find_end_times
from bitimely_core.models.base import Adapter, Model, extend_positions, require_learned_positions
from bitimely_core.models.contract import Direction, objective_error, require_divisible
from bitimely_core.models.layers import Attention, Positions, normalise_tokens
from bitimely_core.models.tokenizers import average_tokens, get_observed
from bitimely_core.objectives.token_objectives import (
    Generators,
    MaskedConfig,
    Result,
    count_share,
    draw_hidden,
    predict_hidden,
    refuse_normalisation,
)
from bitimely_core.registry import ModelFacts, ObjectiveFacts, models, objectives
from bitimely_core.types import Batch, Encoded

BOUND = 0.02  # of learned positions at the start, uniform
EPSILON = 1e-5  # of RevIN
# settings of every encoder of tokens
ENCODER: dict[str, object] = {
    "ffn": "plain",
    "output_heads": "shared",
    "target": "raw",
    "ties": "canonical",
}


class TokenEncoderConfig(ModelConfig):
    """Settings of encoders of tokens (PatchTST, TST)."""

    positions: Literal["learned", "sinusoid"] = Field(
        "learned", description="Positions of tokens; sinusoid: windows of any length."
    )


class PatchTSTConfig(TokenEncoderConfig):
    """Settings of PatchTST."""

    revin: bool = Field(
        True, description="Standardise each channel of each window by its own mean and variance."
    )

    @property
    def normalises_windows(self) -> bool:
        """Under RevIN."""
        return self.revin and self.tokenizer != "codes"


class BatchNorm(nn.BatchNorm1d):
    """Batch norm that uses its running statistics for a single value per feature, which has no
    variance.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name that torch gives it
        """[n, D] or [n, D, T], as it came."""
        if self.training and input.numel() <= input.shape[1]:
            return norm_by_running(self, input)
        return super().forward(input)


def norm_by_running(norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
    """`x` [n, D] by the running statistics, also in training."""
    return F.batch_norm(
        x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps
    )


class TokenNorm(nn.Module):
    """Batch norm of each feature over the rows and real tokens; padding is excluded and becomes
    0.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.batch = BatchNorm(dim)

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        """[R, N, D] and the real tokens [R, N] (None: all) -> [R, N, D]."""
        return normalise_tokens(self.batch, x, real)


class PatchTSTLayer(nn.Module):
    """Post-norm residual: z = BN(x + Drop(MHA(x))); BN(z + Drop(FF(z))) with FF = Linear,
    activation, dropout, Linear.
    """

    def __init__(self, config: ModelConfig, attention_dropout: float) -> None:
        super().__init__()
        self.mix = Attention(config.model_copy(update={"dropout": attention_dropout}))
        self.first, self.out = (
            nn.Linear(config.dim, config.ffn_dim),
            nn.Linear(config.ffn_dim, config.dim),
        )
        self.norm_mix, self.norm_ffn = TokenNorm(config.dim), TokenNorm(config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.act = F.silu if config.ffn_act == "silu" else F.gelu

    def forward(
        self, x: Tensor, places: Positions, *, attention: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """[R, N, D] -> [R, N, D] and the map [R, H, N, N] on request."""
        mixed, maps = self.mix(x, places, "both", attention=attention)
        x = self.norm_mix(x + self.dropout(mixed), places.real)
        inner = self.dropout(self.act(self.first(x)))
        return self.norm_ffn(x + self.dropout(self.out(inner)), places.real), maps


def encode_sinusoid(
    places: Tensor, dim: int, *, base: float = 10_000.0, scale: float = 1.0
) -> Tensor:
    """Sinusoidal encoding of positions or times [..., N] -> [..., N, D]: sin(scale t / base^(2i /
    D)) and cos, interleaved.
    """
    steps = torch.arange(0, dim, 2, device=places.device, dtype=places.dtype)
    angle = places[..., None] * (scale * base ** (-steps / dim))
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2)[..., :dim]


class PostNormAdapter(Adapter):
    """Adapter with torch's default initialisation: post-norm layers need embeddings at least as
    large as the positions.
    """

    def __init__(self, config: ModelConfig, norm_width: int | None = None) -> None:
        super().__init__(config, norm_width)
        for part in (self.embedding, *self.output.values()):
            part.reset_parameters()  # type: ignore[operator]
        self._scale_numbers(50.0)  # as large as the embeddings again


class TokenEncoder(Model):
    """Tokens, positions and bidirectional post-norm layers; no [SOS] and [EOS].

    Attributes:
        scale: of the embedded tokens, before the positions are added.
        attention_dropout: dropout rate of the attention weights.
        positions: learned [N, D], or None for sinusoids (`model.positions = sinusoid`; events: of
            their months).
    """

    adapter_type = PostNormAdapter
    scale = 1.0
    attention_dropout = 0.0

    def __init__(self, config: TokenEncoderConfig) -> None:
        require_divisible(config, "dim")
        super().__init__(config)
        self.positions: nn.Parameter | None = None
        if config.positions == "learned" and config.tokenizer != "codes":
            self.positions = nn.Parameter(
                self.draw_positions(0, self.adapter.tokenizer.count(config.length))
            )
        self.layers = nn.ModuleList(
            PatchTSTLayer(config, self.attention_dropout) for _ in range(config.layers)
        )

    def draw_positions(self, first: int, count: int) -> Tensor:
        """Learned positions [count, D] at the start, from number `first` on."""
        return torch.empty(count, self.config.dim).uniform_(-BOUND, BOUND)

    def forward(
        self,
        batch: Batch,
        *,
        directions: Iterable[Direction] | None = None,
        hide: Tensor | None = None,
        attention: bool = False,
    ) -> Encoded:
        """Encode signals [B, T, V], or events [B, N] with times in months; `attention` also returns
        the maps [R, H, N, N] of each layer.

        Tokens `hide` [R, N] are read as 0 (codes: as [MASK]), after the normalisation. Raises
        UserError: directions, or more tokens than there are learned positions (exit 2).
        """
        refuse_directions(self, directions)
        adapter, rows = self.adapter_of(batch), batch.values.shape[0]
        batch = self.prepare(batch)
        tokens, targets, real = adapter.tokenizer(batch)
        x = adapter.embed(tokens, batch.numbers)
        if hide is not None:
            x = torch.where(hide[..., None], adapter.blank.to(x.dtype), x)
        inside = None if batch.mask is None else real
        index = torch.arange(x.shape[1], device=x.device)
        x = F.dropout(
            x * self.scale + self._encode_positions(batch, index, real).to(x.dtype),
            self.config.dropout,
            self.training,
        )
        states, maps = apply_layers(
            self.layers, x, Positions(index, None, inside, inside), attention=attention
        )
        return Encoded(
            tokens, targets, real, states, maps, self.pool_tokens(states[-1], real, rows)
        )

    def pool_tokens(self, x: Tensor, real: Tensor, rows: int) -> Tensor | None:
        """The native vector of each of the `rows` windows, from the last states [R, N, D]."""
        return None

    def _encode_positions(self, batch: Batch, index: Tensor, real: Tensor) -> Tensor:
        """Encodings of positions [N, D]; events: of their months [B, N, D]."""
        if self.positions is not None:
            require_learned_positions(index.shape[0], len(self.positions))
            return self.positions[: index.shape[0]]
        places = index if batch.times is None else torch.where(real, batch.times, 0.0)
        # months before the index day, from the horizon on
        if self.config.index_day and batch.times is not None:
            places = places + self.config.horizon - find_end_times(batch)[:, None]
        return encode_sinusoid(places.to(next(self.parameters()).dtype), self.config.dim)

    def _fit_length(self, before: int) -> list[str]:
        """Learned positions are cut, or continued by random ones."""
        if self.positions is None:
            return []
        total = self.adapter.tokenizer.count(self.config.length)
        return extend_positions(self, "positions", total, self.draw_positions)


class PatchTST(TokenEncoder):
    """Channel-independent patches, standardised per window; native vector: mean over tokens,
    channels concatenated.
    """

    def __init__(self, config: PatchTSTConfig) -> None:
        super().__init__(config)
        # post-norm layers end in a norm; the heads' dropout stands here
        self.norms = nn.ModuleDict({"next": nn.Dropout(config.dropout)})
        self._fit_length(config.length)

    def prepare(self, batch: Batch) -> Batch:
        """Rows of one channel each, by RevIN unless it is off."""
        return self.standardise(self.expand_channels(batch))

    def standardise(self, batch: Batch) -> Batch:
        """RevIN: each row by its mean and biased variance over observed samples. `batch` as
        `expand_channels` returns it.
        """
        if not self.config.normalises_windows:
            return batch
        seen = get_observed(batch)
        count = seen.sum(1, keepdim=True).clamp(min=1)
        x = torch.where(seen, batch.values, 0.0)
        centred = torch.where(seen, x - x.sum(1, keepdim=True) / count, 0.0)
        return batch._replace(
            values=centred * torch.rsqrt(centred.square().sum(1, keepdim=True) / count + EPSILON)
        )

    @torch.no_grad()
    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """As `Model.targets`, of the standardised window, without the inverse scaling."""
        return super().targets(self.prepare(batch))

    def erase(self, batch: Batch, chosen: Tensor) -> Batch:
        """As `Model.erase`. Raises UserError (config, exit 2) under RevIN, whose statistics erased
        samples would change.
        """
        refuse_normalisation(self.config)
        return super().erase(batch, chosen)

    def pool_tokens(self, x: Tensor, real: Tensor, rows: int) -> Tensor:
        """[R, N, D] -> [B, V * D]: mean over the real tokens of each channel, 0 for a channel that
        was never observed.
        """
        vectors = average_tokens(x, real).reshape(rows, -1)
        return F.dropout(vectors, self.config.dropout, self.training)

    def _fit_length(self, before: int) -> list[str]:
        self.pooled_width = self.config.dim * (
            self.config.channels if self.config.channel_independent else 1
        )
        return super()._fit_length(before)


def apply_layers(
    layers: Iterable[nn.Module], x: Tensor, shared: Any, *, attention: bool
) -> tuple[tuple[Tensor, ...], tuple[Any, ...] | None]:
    """States of each of some layers, `layer(x, shared, attention=)` -> state and map, and with
    `attention` their maps.
    """
    states, maps = [], []
    for layer in layers:
        x, layer_maps = layer(x, shared, attention=attention)
        states.append(x)
        maps.append(layer_maps)
    return tuple(states), tuple(maps) if attention else None


def refuse_directions(model: Model, directions: Iterable[Direction] | None) -> None:
    """Raises UserError (config, exit 2) for directions: the layers of the model are
    bidirectional.
    """
    if directions is not None:
        raise objective_error(
            model.config,
            "layers of one direction",
            f"layers of {model.config.name} are bidirectional and cannot predict the next token",
        )


@models(
    ModelFacts(
        config=PatchTSTConfig,
        family="attention",
        objective="masked-patches",
        capabilities=("hidden",),
        readout="native",
        attention=True,
        input=("regular", "events"),
        source="Nie et al. 2023, A Time Series is Worth 64 Words: Long-term Forecasting with "
        "Transformers",
        known="RevIN removes the level and the size of each window and channel: turn it off where "
        "they say something (model.revin=false)",
    )
)
def patchtst(config: PatchTSTConfig) -> PatchTST:
    """PatchTST: the patches of each channel by itself, standardised per window; masked patches are
    reconstructed.
    """
    settings = ENCODER | {"value_dim": config.dim, "others": ()}
    if config.tokenizer != "codes":  # an odd length loses its first samples
        settings |= {"crop": "start", "channel_independent": True}
        settings |= {} if config.tokenizer == "patch-cnn" else {"tokenizer": "patch"}
    return PatchTST(config.model_copy(update=settings))


# --- the objective


def draw_patches(
    model: Model, batch: Batch, generators: Generators, config: MaskedConfig
) -> Tensor:
    """Patches to hide: all but so many kept ones."""
    return draw_hidden(
        model,
        batch,
        generators,
        lambda n, generator: torch.rand(n, generator=generator).argsort()[
            count_share(1 - config.ratio, n) :
        ],
    )


@objectives(
    ObjectiveFacts(leak_free=True, requires="hidden", config=MaskedConfig, draw=draw_patches)
)
def masked_patches(
    model: Model, batch: Batch, generator: Generator | None = None, *, config: MaskedConfig
) -> Result:
    """40 % of the patches of each row masked, in each channel others where it reads them one by
    one; reconstruct them.

    floor(N (1 - ratio)) patches are kept, so of 8 patches at 40 % four are masked. The error is the
    mean over the masked patches.
    """
    return predict_hidden("masked", model, batch, lambda chosen: model(batch, hide=chosen))
