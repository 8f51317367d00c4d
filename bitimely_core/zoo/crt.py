"""CRT, the Cross Reconstruction Transformer (Zhang et al. 2023): a window, its magnitudes and its
phases in one sequence of patches.

Inputs are the samples and the first T / 2 bins of X = FFT(x) / sqrt(T): log(1 + |X|), and the angle
of X. The ResNet of each view maps each of 2K patches of time, K of magnitude and K of phase to a
token, with a learned position and a learned vector of its view. One [CLS] per view, without
position, comes first. The vector of a window is the mean of the three.

In pre-training the encoder does not see dropped patches; the decoder gets a mask token instead.

Legend: B batch, T timesteps, V channels, P patch, K patches of a half spectrum, N = 4K patches, D
width, H heads, W width of a head.

The objective reconstructs all patches of a window and its spectrum from those not dropped. A
second term keeps tokens distinct.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Generator, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig, ObjectiveConfig
from bitimely_core.models import base
from bitimely_core.models.adapters import count_channels
from bitimely_core.models.base import Model
from bitimely_core.models.contract import (
    Direction,
    Which,
    config_error,
    objective_error,
    refuse_codes,
)
from bitimely_core.models.convolution import Conv1d
from bitimely_core.models.layers import PreNormLayer
from bitimely_core.models.tokenizers import (
    PatchTokenizer,
    find_row_ends,
    get_observed,
    require_channels,
    take_steps,
)
from bitimely_core.objectives.token_objectives import Generators, LossPart, Result, make_result
from bitimely_core.registry import ModelFacts, ObjectiveFacts, models, objectives
from bitimely_core.types import Batch, Encoded
from bitimely_core.zoo.patchtst import BatchNorm, apply_layers, refuse_directions

VIEWS = {"time": 2, "magnitude": 1, "phase": 1}  # view -> its patches, in K
HEAD_WIDTH = 64  # W, whatever D
SCALE = 0.02  # of learned vectors at the start
NOISE = 1e-6  # of a channel's largest magnitude: below it a phase is rounding


class CRTConfig(ModelConfig):
    """Settings of CRT."""

    decoder_layers: int | None = Field(
        None, ge=1, description="Layers of the decoder, of all layers; none: half of them."
    )


class CRTTokenizer(PatchTokenizer):
    """Patches of a window, of its magnitudes and of its phases, [B, 4K, P * V]; they are the
    targets, too.

    The last sample is repeated up to a multiple of 2P. The spectrum of a row is that of its length,
    without padding.
    """

    def blocks(self, length: int) -> int:
        """K of windows of `length` samples."""
        return max(1, -(-length // (2 * self.patch)))

    def count(self, length: int) -> int:
        """4K of windows of `length` samples."""
        return 4 * self.blocks(length)

    def find_real(self, batch: Batch) -> Tensor:
        """Which tokens are real, bool [B, 4K]."""
        return _mask_views(
            -(-find_row_ends(batch) // (2 * self.patch)), self.blocks(batch.values.shape[1])
        )

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [B, 4K, P * V] (time 2K, magnitude K, phase K), targets (the same values), mask of
        real tokens [B, 4K].
        """
        require_channels(batch, self.channels)
        seen, ends = get_observed(batch), find_row_ends(batch)
        blocks = -(-ends // (2 * self.patch))
        most = self.blocks(batch.values.shape[1])
        index = torch.arange(2 * self.patch * most, device=ends.device).expand(ends.shape[0], -1)
        index = torch.minimum(index, (ends - 1).clamp(min=0)[:, None])
        x = take_steps(torch.where(seen, batch.values, 0.0), index)
        parts = [x, *(self._spectrum(x, blocks) if batch.mask is not None else compute_spectrum(x))]
        tokens = torch.cat([part.unflatten(1, (-1, self.patch)).flatten(2) for part in parts], 1)
        return tokens, tokens.detach(), _mask_views(blocks, most)

    def _spectrum(self, x: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Magnitudes and phases [B, T / 2, V] of the first 2P * blocks samples of each row [B, T,
        V]; 0 past them.
        """
        magnitude, phase = (x.new_zeros(x.shape[0], x.shape[1] // 2, x.shape[2]) for _ in range(2))
        for count in blocks.unique().tolist():
            half = count * self.patch
            if not half:
                continue
            rows = blocks == count
            magnitude[rows, :half], phase[rows, :half] = compute_spectrum(x[rows, : 2 * half])
        return magnitude, phase

    def find_targets(self, batch: Batch) -> Tensor:
        """Which target values count, bool [B, 4K, P * V]: observed samples, and all bins."""
        ends, seen = find_row_ends(batch), get_observed(batch)
        most = self.blocks(seen.shape[1])
        long = F.pad(seen, (0, 0, 0, 2 * self.patch * most - seen.shape[1]))
        time = long.unflatten(1, (-1, self.patch)).flatten(2)
        bins = _mask_views(-(-ends // (2 * self.patch)), most)[:, 2 * most :]
        return torch.cat((time, bins[..., None].expand(-1, -1, self.width)), 1)

    def erase(self, batch: Batch, chosen: Tensor) -> Batch:
        """Raises UserError (config, exit 2): erased patches would change the spectrum."""
        raise config_error(
            "masked patches for crt",
            "its patches are dropped",
            "objective.name",
            "Use the objective drop",
        )


def compute_spectrum(x: Tensor) -> tuple[Tensor, Tensor]:
    """Magnitudes and phases [B, T / 2, V] of rows [B, T, V]."""
    bins = torch.fft.rfft(x, dim=1, norm="ortho")[:, : x.shape[1] // 2]
    size = bins.abs()
    noise = NOISE * size.amax(1, keepdim=True)
    quiet = size <= noise  # 0 / 0 has neither an angle nor a derivative
    # the sign of a rounding would choose between -pi and pi
    level = quiet | (bins.imag.abs() <= noise)
    return size.log1p(), torch.atan2(
        torch.where(level, 0.0, bins.imag), torch.where(quiet, 1.0, bins.real)
    )


def _mask_views(blocks: Tensor, most: int) -> Tensor:
    """Mask of real tokens of rows with `blocks` [B] of K, bool [B, 4K]."""
    parts = [
        torch.arange(times * most, device=blocks.device) < times * blocks[:, None]
        for times in VIEWS.values()
    ]
    return torch.cat(parts, 1)


class CRTAdapter(base.PlainAdapter):
    """The parameters that depend on the channels: first convolution and output projection of each
    view.
    """

    tokenizer: CRTTokenizer

    def build(self, config: ModelConfig) -> None:
        """As `PlainAdapter.build`."""
        self.tokenizer = CRTTokenizer(count_channels(config), config.patch)
        channels = self.tokenizer.width // config.patch
        stem = config.dim // 8
        self.stems = nn.ModuleDict(
            {view: Conv1d(channels, stem, 3, stride=2, padding=1, bias=False) for view in VIEWS}
        )
        self.output = nn.ModuleDict(
            {view: nn.Linear(config.dim, self.tokenizer.width) for view in VIEWS}
        )


class CRTBlock(nn.Module):
    """Two convolutions of width 3 with batch norm and a residual connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            Conv1d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            BatchNorm(outputs),
            nn.ReLU(),
            Conv1d(outputs, outputs, 3, padding=1, bias=False),
            BatchNorm(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                Conv1d(inputs, outputs, 1, stride=stride, bias=False), BatchNorm(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """[n, inputs, T] -> [n, outputs, T / stride]."""
        return F.relu(self.body(x) + self.shortcut(x))


def build_resnet(dim: int) -> nn.Sequential:
    """ResNet-18 in one dimension behind its first convolution: widths D / 8, D / 4, D / 2, D of two
    blocks each.
    """
    widths = [dim // 8, dim // 4, dim // 2, dim]
    blocks = [
        nn.Sequential(CRTBlock(a, b, 1 if a == b else 2), CRTBlock(b, b, 1))
        for a, b in zip([widths[0], *widths], widths, strict=False)
    ]
    return nn.Sequential(
        BatchNorm(widths[0]), nn.ReLU(), nn.MaxPool1d(3, stride=2, padding=1), *blocks
    )


def make_layer(config: ModelConfig, hidden: int) -> PreNormLayer:
    """A layer with heads of width 64 whatever D."""
    heads, act = config.heads, F.gelu
    return PreNormLayer(
        config.dim,
        hidden,
        heads=heads,
        inner=heads * HEAD_WIDTH,
        scale=HEAD_WIDTH**-0.5,
        dropout=config.dropout,
        act=act,
    )


class CRTReconstruction(NamedTuple):
    """Output of the model for a batch without the dropped patches."""

    prediction: Tensor  # [B, 4K, P * V], of all patches
    before: Tensor  # [B, n, D] projected tokens of the kept patches, before the encoder
    after: Tensor  # [B, n, D] behind it
    real: Tensor  # bool [B, n], rows that keep fewer are padded


class CRT(base.Model):
    """An encoder of the three views, and for pre-training a decoder of half the layers (or
    `model.decoder_layers`) with MLPs of width D.
    """

    adapter_type = CRTAdapter
    adapter: CRTAdapter

    def __init__(self, config: CRTConfig) -> None:
        decoders = config.layers // 2 if config.decoder_layers is None else config.decoder_layers
        refuse_codes(config, "events have no spectrum")
        if config.dim % 8:
            raise config_error(
                f"width {config.dim}",
                "expected a multiple of 8, its ResNets start with an eighth of it",
                "model.dim",
            )
        if not 0 < decoders < config.layers:
            raise config_error(
                f"{decoders} of {config.layers} layers decode",
                "expected at least one layer to encode and one to decode",
                "model.layers",
            )
        super().__init__(config)
        dim = config.dim
        self.norms = nn.ModuleDict({"next": nn.Identity()})
        self.nets = nn.ModuleDict({view: build_resnet(dim) for view in VIEWS})
        self.classes, self.views = (
            nn.Parameter(torch.randn(3, dim) * SCALE),
            nn.Parameter(torch.randn(3, dim) * SCALE),
        )
        self.positions = self._draw_views()
        self.layers = nn.ModuleList(
            make_layer(config, config.ffn_dim) for _ in range(config.layers - decoders)
        )
        self.masks = nn.Parameter(torch.randn(3, dim) * SCALE)
        self.decoder_positions = self._draw_views()
        self.decoder = nn.ModuleList(make_layer(config, dim) for _ in range(decoders))
        self.project_before, self.project_after = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.pooled_width = dim

    def forward(
        self,
        batch: Batch,
        *,
        directions: Iterable[Direction] | None = None,
        hide: Tensor | None = None,
        attention: bool = False,
    ) -> Encoded:
        """Encode signals [B, T, V]: the states of their patches (time, magnitude, phase), the
        vector the mean of the three [CLS].

        With `attention` also the maps [B, H, 3 + 4K, 3 + 4K] of the encoder's layers; the [CLS]
        come first. Raises UserError: directions, hidden tokens (the objective `drop` uses
        `reconstruct`), or more patches than there are learned positions (exit 2).
        """
        refuse_directions(self, directions)
        if hide is not None:
            raise objective_error(self.config, "hidden tokens for crt", "its patches are dropped")
        batch, adapter = self.expand_channels(batch), self._adapter_of(batch)
        tokens, targets, real = adapter.tokenizer(batch)
        inside = None if batch.mask is None else real
        placed = self._place(self.embed_patches(adapter, tokens, inside), real)
        states, maps = self._encode(placed, inside, attention=attention)
        return Encoded(
            tokens,
            targets,
            real,
            tuple(state[:, 3:] for state in states),
            maps,
            states[-1][:, :3].mean(1),
        )

    def reconstruct(self, batch: Batch, dropped: Tensor) -> CRTReconstruction:
        """Predict all patches, those `dropped` (bool [B, 4K]) from the decoder; batch statistics
        exclude them.
        """
        batch, adapter = self.expand_channels(batch), self._adapter_of(batch)
        tokens, _, real = adapter.tokenizer(batch)
        keep, gone = real & ~dropped, real & dropped
        embedded = self.embed_patches(adapter, tokens, keep)
        placed = self._place(embedded, real)
        masks = self._encode_positions(self.decoder_positions, self.masks, real).expand_as(embedded)
        before, _ = _gather(embedded, keep)
        x, inside = _gather(placed, keep)
        blank, filled = _gather(masks, gone)
        states, _ = self._encode(x, inside)
        decoded = torch.cat((states[-1], blank), 1)
        keys = torch.cat((F.pad(inside, (3, 0), value=True), filled), 1)
        for layer in self.decoder:
            decoded, _ = layer(decoded, keys)
        after = states[-1][:, 3:]
        full = torch.zeros_like(embedded, dtype=decoded.dtype)
        full[keep], full[gone] = after[inside], decoded[:, states[-1].shape[1] :][filled]
        return CRTReconstruction(
            self.output(full, batch=batch),
            self.project_before(before),
            self.project_after(after),
            inside,
        )

    def output(self, hidden: Tensor, which: Which = "next", batch: Batch | None = None) -> Tensor:
        """States of all 4K patches [B, 4K, D] -> patches [B, 4K, P * V]; each view has its own
        projection.
        """
        parts = self._split(self.norm(hidden), 1)
        return torch.cat(
            [self._adapter_of(batch).output[view](part) for view, part in parts.items()], 1
        )

    def embed_patches(self, adapter: CRTAdapter, tokens: Tensor, keep: Tensor | None) -> Tensor:
        """ResNet embeddings [B, 4K, D] of the kept patches [B, 4K, P * V] (None: all), 0 for the
        others.
        """
        out = []
        for view, part in self._split(tokens, 1).items():
            where = None if keep is None else self._split(keep, 1)[view]
            patches = (
                (part.flatten(0, 1) if where is None else part[where])
                .unflatten(-1, (self.config.patch, -1))
                .transpose(1, 2)
            )  # [n, V, P]
            states = part.new_zeros(*part.shape[:2], self.config.dim)
            if where is None or len(patches):
                embedded = self.nets[view](adapter.stems[view](patches)).mean(-1)
                if where is None:
                    states = embedded.unflatten(0, states.shape[:2])
                else:
                    states = states.to(embedded.dtype)
                    states[where] = embedded
            out.append(states)
        return torch.cat(out, 1)

    def _encode(
        self, x: Tensor, real: Tensor | None, *, attention: bool = False
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None]:
        """States [B, 3 + n, D] of the encoder's layers, and their maps on request; `real` [B, n]:
        mask of patches.
        """
        keys = None if real is None else F.pad(real, (3, 0), value=True)
        starts = F.dropout(self.classes + self.views, self.config.dropout, self.training)
        x = torch.cat((starts.expand(x.shape[0], -1, -1).to(x.dtype), x), 1)
        return apply_layers(self.layers, x, keys, attention=attention)

    def _place(self, embedded: Tensor, real: Tensor) -> Tensor:
        """Embedded patches [B, 4K, D] with their positions and views."""
        x = embedded + self._encode_positions(self.positions, self.views, real)
        return F.dropout(x, self.config.dropout, self.training)

    def _encode_positions(self, positions: nn.ParameterDict, views: Tensor, real: Tensor) -> Tensor:
        """Position and view of each patch [4K, D]; of shorter windows the first positions of each
        view.
        """
        blocks = real.shape[1] // 4
        base.require_learned_positions(4 * blocks, sum(map(len, positions.values())))
        parts = [
            positions[name][: times * blocks] + view
            for (name, times), view in zip(VIEWS.items(), views, strict=True)
        ]
        return torch.cat(parts)

    def _split(self, x: Tensor, dim: int) -> dict[str, Tensor]:
        """The patches of each view."""
        blocks = x.shape[dim] // 4
        return dict(
            zip(VIEWS, x.split([times * blocks for times in VIEWS.values()], dim), strict=True)
        )

    def _adapter_of(self, batch: Batch | None) -> CRTAdapter:
        adapter = self.adapter_of(batch)
        assert isinstance(adapter, CRTAdapter)
        return adapter

    def _fit_length(self, before: int) -> list[str]:
        """Learned positions are cut, or continued by random ones."""
        fresh, blocks = [], self.adapter.tokenizer.blocks(self.config.length)
        for name in ("positions", "decoder_positions"):
            held: nn.ParameterDict = getattr(self, name)
            for view, times in VIEWS.items():
                added = base.extend_positions(held, view, times * blocks, self._draw_positions)
                fresh += [f"{name}.{key}" for key in added]
        return fresh

    def _draw_positions(self, first: int, count: int) -> Tensor:
        return torch.randn(count, self.config.dim) * SCALE

    def _draw_views(self) -> nn.ParameterDict:
        """Positions of the patches of each view."""
        blocks = self.adapter.tokenizer.blocks(self.config.length)
        counts = {view: times * blocks for view, times in VIEWS.items()}
        return nn.ParameterDict(
            {view: nn.Parameter(self._draw_positions(0, count)) for view, count in counts.items()}
        )


def _gather(x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen tokens of [B, N, D] packed to the left, [B, n, D], and their mask (bool [B,
    n]).
    """
    most = int(chosen.sum(1).max()) if len(chosen) else 0
    order = (~chosen).to(torch.int8).argsort(stable=True, dim=1)[:, :most]
    return take_steps(x, order), take_steps(chosen, order)


@models(
    ModelFacts(
        config=CRTConfig,
        family="attention",
        objective="drop",
        capabilities=("drop",),
        readout="native",
        attention=True,
        step=8,  # its heads do not divide the width
        source="Zhang et al. 2023, Self-Supervised Time Series Representation Learning via Cross "
        "Reconstruction Transformer",
        known="Its targets hold spectra of the whole window, so the loss is no forecast; the "
        "table's 6 + 6 layers are three times its own decoder",
    )
)
def crt(config: CRTConfig) -> CRT:
    """CRT: time, magnitude and phase of a window in one encoder; dropped patches are
    reconstructed.
    """
    settings = {
        "ffn": "plain",
        "value_dim": config.dim,
        "output_heads": "shared",
        "target": "raw",
        "crop": "pad",
        "stride": None,
    }
    if config.tokenizer != "codes":
        settings["tokenizer"] = "patch"
    return CRT(config.model_copy(update=settings))


# --- the objective

LEAST = 0.3  # share of dropped patches at the start
SLACK = 1e-6  # of a share, against rounding
WEIGHT = 1e-4  # of the instance constraint

NOTICE = (
    "drop: magnitudes and phases are of the whole window, dropped patches included; its loss "
    "measures reconstruction, not forecasting."
)


class DropConfig(ObjectiveConfig):
    """Settings of drop."""

    dropped: float = Field(
        0.7,
        gt=0,
        lt=1,
        description="Largest share of dropped patches, reached during the training.",
    )


def draw_order(model: Model, batch: Batch, generators: Generators, config: DropConfig) -> Tensor:
    """The share from which on each patch is dropped, float32 [B, 4K], on the CPU, see
    `draw_shares`.
    """
    real = model.adapter_of(batch).tokenizer.find_real(batch).cpu()
    return torch.stack(
        [draw_shares(row, generator) for row, generator in zip(real, generators, strict=True)]
    )


@objectives(
    ObjectiveFacts(
        leak_free=None, requires="drop", config=DropConfig, notice=NOTICE, draw=draw_order
    )
)
def drop(
    model: Model, batch: Batch, generator: Generator | None = None, *, config: DropConfig
) -> Result:
    """Up to 70 % of the patches dropped, of phase those of magnitude; reconstruct all, with CRT's
    instance constraint.

    The share rises with the training, clip(progress, 0.3, `dropped`); outside training it is the
    largest. Every row drops its own.
    """
    assert isinstance(model, CRT)
    assert batch.draws is not None
    target, valid = model.targets(batch)
    ratio = min(max(model.progress if model.training else 1.0, LEAST), config.dropped)
    output = model.reconstruct(batch, batch.draws <= ratio + SLACK)
    out = make_result(model, batch, [LossPart("reconstruction", output.prediction, target, valid)])
    constraint = WEIGHT * compute_constraint(output.before, output.after, output.real)
    return {
        **out,
        "loss": out["loss"] + constraint,
        "parts": {**out["parts"], "constraint": constraint.detach()},
    }


def draw_shares(real: Tensor, generator: Generator | None = None) -> Tensor:
    """The share from which on each patch of a row is dropped, float32 [4K]; infinite for padding.

    The `real` patches [4K] come in a random order. A share r drops floor(2 k r) of the 2k patches
    of time, floor(k r) of the k of magnitude, and the same of phase.
    """
    most = len(real) // 4
    blocks = int(real[2 * most : 3 * most].sum())
    time, bins = (torch.randperm(count, generator=generator) for count in (2 * blocks, blocks))
    out = torch.full(real.shape, torch.inf)
    for start, places in zip((0, 2 * most, 3 * most), (time, bins, bins), strict=True):
        out[start + places] = torch.arange(1, len(places) + 1) / max(len(places), 1)
    return out


def compute_constraint(before: Tensor, after: Tensor, real: Tensor) -> Tensor:
    """Instance discrimination: mean over rows of log sum_(i != j) exp(a_i . b_j) of their patches,
    a, b = [B, n, D] scaled to length 1; `real` [B, n] are no padding.
    """
    before, after = F.normalize(before.float(), dim=-1), F.normalize(after.float(), dim=-1)
    other = ~torch.eye(real.shape[1], dtype=torch.bool, device=real.device)
    pairs = real[:, :, None] & real[:, None] & other
    enough = pairs.flatten(1).any(1)
    # rows without a pair stay finite and are left out
    scores = (before @ after.mT).masked_fill(~pairs & enough[:, None, None], -torch.inf)
    return torch.where(enough, scores.flatten(1).logsumexp(1), 0.0).sum() / enough.sum().clamp(
        min=1
    )
