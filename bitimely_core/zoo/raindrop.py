"""RAINDROP (Zhang et al. 2022): message passing between sensors on a graph of the sample, then
attention over time.

Channel u at row t: h_ut = max(0, x_ut R_u). Twice, over a complete directed graph whose edges e_uv
start at 1:

    alpha_uv,t = max(0, h_ut D [r_v; p_t])
    h_vt <- max(0, sum_u (h_ut . w_u) alpha_uv,t e_uv w_v)
    e_uv <- e_uv * mean of alpha_uv,t over the rows where u was observed

and after the first pass the lower half of each sample's edges is removed. `graph_distance` times
the mean distance between the edges of two samples is added to the training loss, 0.02 in the paper,
0 by default as in the authors' code. [h_1t .. h_Vt; p_t] goes through a transformer over the rows;
the vector of the sample is the mean over its rows.

`message = "self"`, the default as in the authors' code: no messages between channels, h_v <- max(0,
h_v W).

A pass of messages is a product of four factors, so small ones multiply to nothing: at the start
they are drawn such that observations keep about their size through both passes, and such that no
channel starts behind a closed max(0, .): R has both signs in each channel, senders and receivers
are positive, W is the identity. Without messages queries and keys start three times as large as
torch's: their products are then about 1 and not 0.1, and a frequency is learnt in 300 steps instead
of 900; with messages they do not, since a mean was learnt a little more slowly then.

Legend: B batch, T rows, V channels (events: codes), d width of a channel's observation
(`model.dim`), D = V d + 16.
"""

from __future__ import annotations

import math
from typing import Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig
from bitimely_core.models.adapters import TimedRows, get_time_span
from bitimely_core.models.contract import config_error
from bitimely_core.models.layers import Attention, Positions
from bitimely_core.models.tokenizers import average_tokens
from bitimely_core.ops.fused import widen
from bitimely_core.registry import models
from bitimely_core.types import Batch, Encoded
from bitimely_core.zoo.patchtst import apply_layers
from bitimely_core.zoo.supervised import RowAdapter, SupervisedFacts, SupervisedModel, encode_times

CODE = 16  # width of p_t
PASSES = 2  # of messages
SHARPNESS = 3.0  # queries and keys start so many times larger than torch's linear maps
KEPT = 0.5  # share of the edges kept after the first pass


class RaindropConfig(ModelConfig):
    """Settings of RAINDROP."""

    graph_distance: float = Field(
        0.0,
        ge=0,
        description="Weight of the distance between two samples' graphs in the loss; the paper: "
        "0.02.",
    )
    message: Literal["paper", "self"] = Field(
        "self", description="self: no messages between channels, as in the authors' code."
    )


class MessagePass(nn.Module):
    """One pass of messages between channels."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width + CODE, width, bias=False)  # D
        # |p_t|^2 = 8
        nn.init.normal_(self.query.weight, std=math.sqrt(2 / (width * (width + CODE / 2))))
        self.send = nn.Parameter(torch.randn(channels, width).abs() * math.sqrt(2 / width))  # w_u
        # w_v, of a sum over the channels
        self.receive = nn.Parameter(torch.randn(channels, width).abs() * math.sqrt(2) / channels)

    def forward(
        self, h: Tensor, nodes: Tensor, code: Tensor, edges: Tensor, observed: Tensor
    ) -> tuple[Tensor, Tensor]:
        """New observations and edges, from h [B, T, V, d], r_v [V, d], p_t [B, T, 16], edges [B, V,
        V] from the row to the column, and what was observed [B, T, V].
        """
        by_node, by_time = self.query.weight.split([nodes.shape[1], CODE], 1)
        # [B, T, u, v]
        alpha = F.relu(h @ (nodes @ by_node.T).T + (h @ (code @ by_time.T)[..., None]))
        sent = (h * self.send).sum(-1)
        got = torch.einsum("btu,btuv,buv->btv", sent, alpha, edges)
        active = observed.to(h.dtype)
        mean = torch.einsum("btuv,btu->buv", alpha, active) / active.sum(1).clamp(min=1)[..., None]
        return F.relu(got[..., None] * self.receive), edges * mean


def prune_edges(edges: Tensor) -> Tensor:
    """Edges [B, V, V] with the lower half of each sample set to 0; ties with the smallest kept edge
    are kept.
    """
    flat = edges.flatten(1)
    count = math.ceil(KEPT * flat.shape[1])
    return torch.where(edges >= flat.topk(count, dim=1).values[:, -1, None, None], edges, 0.0)


def compute_graph_distance(edges: Tensor) -> Tensor:
    """Mean Euclidean distance between the edges [B, V, V] of two samples, a scalar; 0 for one
    sample.
    """
    flat = widen(edges).flatten(1)
    return torch.pdist(flat).mean() if len(flat) > 1 else flat.sum() * 0.0


class RaindropLayer(nn.Module):
    """Post-norm residual: y = norm(x + attention(x)); norm(y + W_2 max(0, y W_1))."""

    def __init__(self, config: ModelConfig, hidden: int) -> None:
        super().__init__()
        self.mix = Attention(config)
        self.norm_mix, self.norm_ffn = nn.LayerNorm(config.dim), nn.LayerNorm(config.dim)
        self.first, self.out = nn.Linear(config.dim, hidden), nn.Linear(hidden, config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, places: Positions, *, attention: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """[B, T, D] -> [B, T, D] and the map [B, H, T, T] on request."""
        mixed, maps = self.mix(x, places, "both", attention=attention)
        x = self.norm_mix(x + self.dropout(mixed))
        return self.norm_ffn(x + self.dropout(self.out(self.dropout(F.relu(self.first(x)))))), maps


class Raindrop(SupervisedModel):
    """Messages between channels, then a transformer over the rows, of feed-forward width D *
    ffn_dim / dim. All weights depend on the channels.
    """

    config: RaindropConfig

    def __init__(self, config: RaindropConfig) -> None:
        super().__init__(config)
        self._build_layers()

    def _build_layers(self) -> None:
        config, width = self.config, self.width
        channels = self.adapter.tokenizer.target_width
        if width % config.heads:
            raise config_error(
                f"{channels} channels of {config.dim} and {CODE} are {width} for {config.heads} "
                "heads",
                "expected a multiple of the heads",
                "model.dim",
                "Choose a model.dim that is a multiple of the heads",
            )
        signs = torch.tensor([1.0, -1.0]).repeat(config.dim)[: config.dim]
        self.observation = nn.Parameter(torch.randn(channels, config.dim).abs() * signs)  # R
        self.nodes = nn.Parameter(torch.randn(channels, config.dim))  # r
        if config.numbers:
            with torch.random.fork_rng(devices=[]):
                # of a number of the code: of being there, of its value
                self.numbers = nn.Parameter(torch.randn(2, channels, config.dim))
        if config.message == "self":
            self.messages = nn.ModuleList(
                nn.Linear(config.dim, config.dim, bias=False) for _ in range(PASSES)
            )
            for linear in self.messages:
                nn.init.eye_(cast(nn.Linear, linear).weight)
        else:
            self.messages = nn.ModuleList(MessagePass(channels, config.dim) for _ in range(PASSES))
        inner = config.model_copy(update={"dim": width})
        layers = [
            RaindropLayer(inner, width * config.ffn_dim // config.dim) for _ in range(config.layers)
        ]
        if config.message == "self":
            # of queries and keys, else the weights of all rows start nearly equal
            with torch.no_grad():
                for layer in layers:
                    layer.mix.qkv.weight[: 2 * width] *= SHARPNESS
        self.layers = nn.ModuleList(layers)
        self.pooled_width = width

    @property
    def per_sample(self) -> bool:
        """Whether the training loss of a sample is independent of the others: no penalty on graphs,
        or no graph (one channel).
        """
        return (
            self.config.message == "self"
            or not self.config.graph_distance
            or self.adapter.tokenizer.target_width == 1
        )

    @property
    def width(self) -> int:
        """D."""
        return self.adapter.tokenizer.target_width * self.config.dim + CODE

    @property
    def norm_width(self) -> int:
        """Width of the unused final norm; only readouts read the states."""
        return CODE

    def encode(self, batch: Batch, *, attention: bool) -> Encoded:
        """States of the rows behind each layer [B, T, D]; maps: attention of each layer [B, H, T,
        T].
        """
        rows = cast(RowAdapter, self.adapter).tokenizer.rows(batch)
        code = encode_times(rows.times, get_time_span(self.config), CODE).to(self.nodes.dtype)
        h, edges = self.pass_messages(rows, code)
        self.penalty = (
            self.config.graph_distance * compute_graph_distance(edges)
            if self.training and not self.per_sample
            else None
        )
        x = torch.cat((h.flatten(2), code), -1)
        places = Positions(torch.arange(x.shape[1], device=x.device), None, rows.real, rows.real)
        states, maps = apply_layers(self.layers, x, places, attention=attention)
        pooled = average_tokens(states[-1], rows.real)
        return Encoded(rows.values, None, rows.real, states, maps, pooled)

    def pass_messages(self, rows: TimedRows, code: Tensor) -> tuple[Tensor, Tensor]:
        """Observations [B, T, V, d] behind both passes, and the edges of each sample [B, V, V] (1
        where no messages are passed).
        """
        width = len(self.nodes)
        h, observed = (
            rows.values[:, :, :width, None].to(self.nodes.dtype) * self.observation,
            rows.mask[..., :width],
        )
        if self.config.numbers:
            z, numbered = rows.values[:, :, width:, None].to(h), rows.mask[:, :, width:, None]
            h = h + torch.where(numbered, self.numbers[0] + z * self.numbers[1], 0.0)
        h = F.relu(h)
        edges = h.new_ones(h.shape[0], h.shape[2], h.shape[2])
        for depth, message in enumerate(self.messages):
            if self.config.message == "self":
                h = F.relu(message(h))
                continue
            h, edges = message(h, self.nodes, code, edges, observed)
            edges = prune_edges(edges) if depth == 0 else edges
        return h, edges

    @torch.no_grad()
    def reset_adapter(
        self, channels: int, length: int, codes: int | None = None, *, renew: bool = False
    ) -> list[str]:
        """As `Model.reset_adapter`; with other channels the model is randomly initialised."""
        other_codes = codes is not None and codes != self.config.codes
        if (
            self.config.channels == channels
            and not other_codes
            and not (renew and self.config.codes)
        ):
            return super().reset_adapter(channels, length, codes, renew=renew)
        like = self.nodes
        super().reset_adapter(channels, length, codes, renew=True)
        self._build_layers()
        self.to(like.device, like.dtype).train(self.training)
        return [name for name, _ in self.named_parameters()]


@models(
    SupervisedFacts(
        config=RaindropConfig,
        family="raindrop",
        attention=True,
        input=("regular", "events", "irregular"),
        step=2,
        source="Zhang et al. 2022, Graph-Guided Network for Irregularly Sampled Multivariate Time "
        "Series",
        known="Supervised only; as in the authors' code no message passes between sensors unless "
        "model.message=paper; its score on PhysioNet-2012 is disputed",
    )
)
def raindrop(config: RaindropConfig) -> Raindrop:
    """RAINDROP: message passing between sensors on a graph of the sample; trained with its head
    alone.
    """
    return Raindrop(config)
