"""S4: diagonal structured state-space layers (S4D, Gu et al. 2022) behind the encoder of
contrastive predictive coding.

Each channel d of a layer is a linear system with S / 2 complex states (and their conjugates), x' =
A x + B u, y = 2 Re C x + D u. A is diagonal, A_n = -1/2 + i pi n (`lin`) or -1/2 + i S / pi (S /
(2n + 1) - 1) (`inv`), B = 1, and the step of the discretisation is learned:

    zoh:       a = step A,                                    b = (exp(a) - 1) / A
    bilinear:  a = log((1 + step A / 2) / (1 - step A / 2)),  b = step / (1 - step A / 2)

    y(t) = sum_(s <= t) K(t - s) u(s) + D u(t),   K(tau) = 2 Re sum_n C_n b_n exp(tau a_n)

On a regular clock tau counts tokens: a convolution by FFT in training, or the recurrence x <-
exp(a) x + u. Events are impulses, and tau is the time
between them in months: the recurrence with x <- exp(gap a) x + u. The layer is y + x behind GELU, a
gated linear map and dropout, then a layer norm.

Legend: B batch, N tokens, M = N + 2 positions, D width, S states, K steps ahead, L layers.

The objective is contrastive predictive coding (van den Oord et al. 2018): from the past, find the
encoded token k steps ahead among others (InfoNCE).

The context c_t is the state of the last layer at token t, all layers forward; z_t is the encoded
token. For each step k

    -log exp(z_(t+k) . W_k c_t) / (exp(z_(t+k) . W_k c_t) + sum_j exp(z_j . W_k c_t))

averaged over tokens and steps. The negatives z_j are drawn with replacement, `negatives` for each
row, and serve all its contexts; one that is the positive itself is left out. `sequence`, as for ECG
(Mehari and Strodthoff 2022): from the row's own tokens; `rows`: from other rows.

`rel` is the loss divided by that of a constant representation. Legend: B batch, N tokens, D width,
K steps, n negatives.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Generator, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig, ObjectiveConfig
from bitimely_core.models.base import Model
from bitimely_core.models.contract import Direction, config_error
from bitimely_core.models.layers import BidirectionalConfig, Positions, normalise_tokens, run_layers
from bitimely_core.models.stack import (
    DIRECTED_CAPABILITIES,
    BidirectionalModel,
    EmbeddedBatch,
    LayerDirections,
    LayerReading,
    place_times,
)
from bitimely_core.models.tokenizers import average_tokens, take_state
from bitimely_core.objectives.token_objectives import (
    Generators,
    Result,
    cycle_directions,
    pack_result,
    refuse_overlap,
)
from bitimely_core.ops.fused import widen
from bitimely_core.ops.rotary import find_widest_float
from bitimely_core.registry import ModelFacts, ObjectiveFacts, models, objectives
from bitimely_core.types import Batch
from bitimely_core.zoo import contrast
from bitimely_core.zoo.patchtst import BatchNorm, norm_by_running
from bitimely_core.zoo.recurrent import reverse_rows

# positions up to which `auto` sums the taps: exactly causal, where the FFT is up to its rounding
DIRECT = 64


class S4Config(BidirectionalConfig):
    """Settings of S4."""

    state: int = Field(64, ge=2, multiple_of=2, description="States of each channel, S.")
    start: Literal["lin", "inv"] = Field("lin", description="Initial A: S4D-Lin or S4D-Inv.")
    discretisation: Literal["zoh", "bilinear"] = Field(
        "zoh", description="Zero-order hold, or bilinear."
    )
    step_min: float = Field(0.001, gt=0, description="Smallest initial step; of events in months.")
    step_max: float = Field(0.1, gt=0, description="Largest initial step.")
    sides: Literal["one", "two"] = Field(
        "one", description="two: each layer also has a kernel for what follows."
    )
    form: Literal["auto", "fft", "direct", "recurrent"] = Field(
        "auto", description="How the convolution is computed."
    )
    norm_first: bool = Field(
        False, description="Layer norm before the layer instead of behind the residual sum."
    )
    encoder_layers: int = Field(
        4, ge=1, description="Pointwise layers of the encoder, each with a norm and ReLU."
    )
    encoder_norm: Literal["batch", "layer"] = Field("batch", description="Norm within the encoder.")
    ahead: int = Field(12, ge=1, description="Steps that cpc predicts, K.")
    predictor: Literal["each", "last"] = Field(
        "each", description="A linear map for each step; last: a network for the K-th alone."
    )

    def leak_conditions(self) -> tuple[str, ...]:
        """As `ModelConfig.leak_conditions`; batch norm over time adds one."""
        return (
            *super().leak_conditions(),
            *(("up to batch statistics",) if self.encoder_norm == "batch" else ()),
        )


class DiagonalKernel(nn.Module):
    """K of each channel. A, and the logarithm of the step, learn without weight decay and at a
    limited rate (`slow`), as the authors'.
    """

    slow = ("log_step", "log_decay", "frequency")

    def __init__(self, config: S4Config) -> None:
        super().__init__()
        dim, pairs = config.dim, config.state // 2
        low, high = math.log(config.step_min), math.log(config.step_max)
        n = torch.arange(pairs, dtype=torch.get_default_dtype())
        frequency = (
            math.pi * n
            if config.start == "lin"
            else config.state / math.pi * (config.state / (2 * n + 1) - 1)
        )
        self.discretisation = config.discretisation
        self.log_step = nn.Parameter(torch.empty(dim).uniform_(low, high))
        self.log_decay = nn.Parameter(torch.full((dim, pairs), math.log(0.5)))
        self.frequency = nn.Parameter(frequency.repeat(dim, 1))
        self.out = nn.Parameter(torch.randn(dim, pairs, 2) * math.sqrt(0.5))  # C

    def discretise(self) -> tuple[Tensor, Tensor]:
        """A and C b, complex [D, S / 2], in double precision where the device has it: powers of A
        lose no digits.
        """
        wide = find_widest_float(self.out.device)
        a = torch.complex(-self.log_decay.to(wide).exp(), self.frequency.to(wide))
        step = self.log_step.to(wide).exp()[:, None]
        if self.discretisation == "zoh":
            rate = step * a
            entry = torch.expm1(rate) / a
        else:
            rate = torch.log((1 + step * a / 2) / (1 - step * a / 2))
            entry = step / (1 - step * a / 2)
        return rate, torch.view_as_complex(self.out.to(wide).contiguous()) * entry

    def forward(self, count: int) -> Tensor:
        """K(0) .. K(count - 1), [D, count]: exp(tau a) from the products of two tables of about
        sqrt(count) powers.
        """
        rate, weight = self.discretise()
        inner = math.isqrt(max(count - 1, 0)) + 1
        steps = torch.arange(inner, device=rate.device, dtype=rate.real.dtype)
        fine = (rate[..., None] * steps).exp()
        coarse = weight[..., None] * (rate[..., None] * inner * steps[: -(-count // inner)]).exp()
        # Re of the product
        rows, columns = (
            torch.cat((coarse.real, -coarse.imag), 1),
            torch.cat((fine.real, fine.imag), 1),
        )
        return 2 * (rows.mT @ columns).flatten(1)[:, :count]


class S4Positions(NamedTuple):
    """Ends and times of a batch; the same for all layers."""

    ends: Tensor | None  # [B] positions that are no padding, None = all
    times: Tensor | None  # [B, M] months, None on a regular clock


class S4State(NamedTuple):
    """Of a layer behind a piece of a sequence."""

    state: Tensor  # complex [B, D, S / 2]
    time: Tensor | None  # [B, 1] months of the last position, None on a regular clock


class S4Layer(nn.Module):
    """One state-space layer, with a kernel for either direction (`sides` = one), or one for
    each.
    """

    def __init__(self, config: S4Config) -> None:
        super().__init__()
        self.config = config
        self.kernel = DiagonalKernel(config)
        self.back = DiagonalKernel(config) if config.sides == "two" else None
        self.skip = nn.Parameter(torch.randn(config.dim))  # D
        self.mix = nn.Linear(config.dim, 2 * config.dim)
        self.norm, self.dropout = nn.LayerNorm(config.dim), nn.Dropout(config.dropout)

    def forward(self, x: Tensor, places: S4Positions, direction: Direction) -> tuple[Tensor, None]:
        """[B, M, D] -> [B, M, D], and no map."""
        u = self.norm(x) if self.config.norm_first else x
        y = u * self.skip
        with torch.autocast(x.device.type, enabled=False):
            wide = widen(u)
            if direction != "backward":
                y = y + self._convolve(self.kernel, wide, places.times)
            if direction != "forward":
                times = None if places.times is None else reverse_rows(places.times, places.ends)
                read = self._convolve(
                    self.back or self.kernel, reverse_rows(wide, places.ends), times
                )
                y = y + reverse_rows(read, places.ends)
        return self._mix(x, y), None

    def _mix(self, x: Tensor, y: Tensor) -> Tensor:
        y = x + self.dropout(F.glu(self.mix(self.dropout(F.gelu(y))), -1))
        return y if self.config.norm_first else self.norm(y)

    def advance(
        self, x: Tensor, places: Positions, state: S4State | None
    ) -> tuple[Tensor, S4State]:
        """As `StackLayer.advance`."""
        u = self.norm(x) if self.config.norm_first else x
        y, state = self._recur(self.kernel, widen(u), places.times, state)
        return self._mix(x, u * self.skip + y), state

    def _convolve(self, kernel: DiagonalKernel, u: Tensor, times: Tensor | None) -> Tensor:
        """sum_(s <= t) K(t - s) u(s), [B, M, D] -> [B, M, D]."""
        form, count = self.config.form, u.shape[1]
        if times is not None or form == "recurrent":
            return self._recur(kernel, u, times)[0]
        taps = kernel(count).to(u.dtype)
        if form == "direct" or (form == "auto" and count <= DIRECT):
            return F.conv1d(
                F.pad(u.mT, (count - 1, 0)), taps.flip(1)[:, None], groups=u.shape[2]
            ).mT
        size = choose_fft_length(2 * count - 1)
        return torch.fft.irfft(torch.fft.rfft(u.mT, size) * torch.fft.rfft(taps, size), size)[
            ..., :count
        ].mT

    @staticmethod
    def _recur(
        kernel: DiagonalKernel, u: Tensor, times: Tensor | None, before: S4State | None = None
    ) -> tuple[Tensor, S4State]:
        """The same by the recurrence behind the state `before`; `times` [B, M] (None: one apart) in
        their order, or in the reverse one.
        """
        rate, weight = kernel.discretise()
        wide = rate.real.dtype
        state = rate.new_zeros(u.shape[0], *rate.shape) if before is None else before.state
        gaps = None
        if times is not None:
            last = times[:, :1] if before is None or before.time is None else before.time
            gaps = torch.cat((last, times), 1).to(wide).diff(dim=1).abs()
        fade, out = rate.exp(), []
        for step, value in enumerate(u.to(wide).unbind(1)):
            if gaps is not None:
                fade = (gaps[:, step, None, None] * rate).exp()
            state = fade * state + value[..., None]
            out.append(2 * (state * weight).real.sum(-1))
        return torch.stack(out, 1).to(u.dtype), S4State(
            state, None if times is None else times[:, -1:].clone()
        )


def choose_fft_length(count: int) -> int:
    """The smallest of 2^k, 3 * 2^k and 5 * 2^k that is at least `count`: their transforms are
    fast.
    """
    return min(factor << max(0, (-(-count // factor) - 1).bit_length()) for factor in (1, 3, 5))


class S4(BidirectionalModel):
    """The encoder, pointwise over time, and S4 layers between [SOS] and [EOS]; `predict` holds the
    maps of the objective `cpc`.
    """

    config: S4Config

    def __init__(self, config: S4Config) -> None:
        if config.step_min > config.step_max:
            raise config_error(
                f"steps from {config.step_min} to {config.step_max}",
                "expected an ascending range",
                "model.step_max",
            )
        super().__init__(config)
        dim, depth = config.dim, config.encoder_layers
        # the first one is the adapter's
        self.encoder_maps = nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth - 1))
        self.encoder_norms = nn.ModuleList(
            BatchNorm(dim) if config.encoder_norm == "batch" else nn.LayerNorm(dim)
            for _ in range(depth)
        )
        self.enter = nn.Linear(dim, dim)
        self.layers = nn.ModuleList(S4Layer(config) for _ in range(config.layers))
        self.predict: nn.Module = nn.Linear(dim, config.ahead * dim, bias=False)
        if config.predictor == "last":
            self.predict = nn.Sequential(
                nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim, bias=False)
            )
        self.takes = (
            ("forward", "backward", "both") if config.sides == "two" else ("forward", "backward")
        )
        self.pooled_width = dim

    @property
    def directions(self) -> tuple[Direction, ...]:
        """Forward, of `sides` = two both ways, in every layer."""
        return ("both" if self.config.sides == "two" else "forward",) * self.config.layers

    def encode(self, x: Tensor, real: Tensor) -> Tensor:
        """Z: embedded positions [B, M, D] through the encoder; batch statistics leave out what is
        not `real` [B, N], [SOS] and [EOS] included.
        """
        inside = F.pad(real, (1, 1))
        for depth, norm in enumerate(self.encoder_norms):
            x = self.encoder_maps[depth - 1](x) if depth else x
            x = self._normalise(norm, x, inside) if isinstance(norm, BatchNorm) else norm(x)
            x = F.relu(x)
        return x

    def _normalise(self, norm: BatchNorm, x: Tensor, inside: Tensor) -> Tensor:
        """Batch norm of the tokens; [SOS] and [EOS] by the running statistics."""
        running = norm_by_running(norm, x.flatten(0, 1)).view_as(x)
        if not norm.training:
            return running
        return torch.where(inside[..., None], normalise_tokens(norm, x, inside), running)

    def read(
        self, embedded: EmbeddedBatch, plan: LayerDirections, *, attention: bool
    ) -> LayerReading:
        """As `BidirectionalModel.read`; the native vector is the mean over the tokens, of events
        the state at [EOS].
        """
        real = embedded.real
        states = self.read_encoded(self.encode(embedded.x, real), embedded, plan)
        last = self.norm(states[-1], "previous" if plan[-1] == "backward" else "next")
        if self.config.tokenizer == "codes":
            return states, None, take_state(last, real.sum(1) + 1)
        return states, None, average_tokens(last[:, 1:-1], real)

    def enter_layers(self, x: Tensor) -> Tensor:
        """Embedded positions through the encoder."""
        # read in training alone
        return self.enter(self.encode(x, torch.ones_like(x[:, 2:, 0], dtype=torch.bool)))

    def read_encoded(
        self, z: Tensor, embedded: EmbeddedBatch, plan: LayerDirections
    ) -> list[Tensor]:
        """States of each layer from the encoder's output [B, M, D]."""
        batch, real = embedded.batch, embedded.real
        ends = None if batch.mask is None else real.sum(1) + 2
        places = S4Positions(ends, place_times(batch, real))
        return run_layers(self.layers, self.enter(z), plan, places)[0]


@models(
    ModelFacts(
        config=S4Config,
        family="s4",
        objective="cpc",
        capabilities=(*DIRECTED_CAPABILITIES, "cpc"),
        readout="native",
        directions=("forward",),
        input=("regular", "events"),
        step=2,
        source="Gu et al. 2022, On the Parameterization and Initialization of Diagonal State "
        "Space Models; Mehari and Strodthoff 2023",
        known="Not in the paper; with cpc and 3.8 M parameters it leads the benchmark of ECG "
        "models of 2025. Its batch norm shares statistics",
    )
)
def s4(config: S4Config) -> S4:
    """S4: diagonal state-space layers; events decay over the time between them."""
    return S4(config)


# --- the objective


class CPCConfig(ObjectiveConfig):
    """Settings of cpc."""

    negatives: int = Field(128, ge=1, description="Negatives drawn for each row.")
    source: Literal["sequence", "rows"] = Field(
        "sequence", description="Negatives from the row's own tokens, or from other rows."
    )

    @property
    def least_rows(self) -> int:
        """2 where another row gives the negatives."""
        return 1 + (self.source == "rows")


def check_sides(config: ModelConfig) -> None:
    """Refuse two-sided layers, whose second kernel cpc would not train. Raises UserError (config,
    exit 2).
    """
    refuse_overlap(config)
    if isinstance(config, S4Config) and config.sides == "two":
        raise config_error(
            "two for cpc",
            "expected layers that read the past alone",
            "model.sides",
            "Use the objective masked",
        )


NOTICE = (
    "cpc: contrastive; rel 1.0 = no better than chance. Losses with other negatives, batch sizes "
    "or steps cannot be compared."
)


def draw_own(
    model: Model, batch: Batch, generators: Generators, config: CPCConfig
) -> Tensor | None:
    """Negatives of each row among its own tokens, int64 [B, n]: their places in it. None: they are
    of other rows.
    """
    if config.source == "rows":
        return None
    there = find_encoded(model, batch, model.adapter_of(batch).tokenizer.find_real(batch)).cpu()
    rows = [
        draw_places(row.nonzero().flatten(), config, generator)
        for row, generator in zip(there, generators, strict=True)
    ]
    return torch.stack(rows)


def find_encoded(model: Model, batch: Batch, real: Tensor) -> Tensor:
    """The real tokens with an observed value, bool [B, N]."""
    seen = model.adapter_of(batch).tokenizer.find_targets(batch)
    return real & (seen if seen.dim() == 2 else seen.any(-1))


@objectives(
    ObjectiveFacts(
        leak_free=True,
        context="past",
        requires="cpc",
        config=CPCConfig,
        check=check_sides,
        notice=NOTICE,
        states=True,
        draw=draw_own,
    )
)
def cpc(
    model: Model, batch: Batch, generator: Generator | None = None, *, config: CPCConfig
) -> Result:
    """From its past alone, each token finds the encoded tokens ahead among negatives (InfoNCE)."""
    assert isinstance(model, S4)
    if config.source == "rows":
        contrast.require_rows("cpc with negatives of other rows", batch)
    draws, embedded = batch.draws, model.embed(batch)
    z = model.encode(embedded.x, embedded.real)
    states = model.read_encoded(z, embedded, cycle_directions(model, "forward"))
    context, z = model.norm(states[-1])[:, 1:-1], z[:, 1:-1]
    there = find_encoded(model, embedded.batch, embedded.real)
    predicted = model.predict(context)
    first = 1
    if model.config.predictor == "last":  # short windows have fewer steps
        first = max(1, min(model.config.ahead, z.shape[1] - 1))
    each = predicted.unflatten(-1, (-1, z.shape[2])).unbind(2)
    steps = torch.arange(z.shape[1], device=z.device)
    starts = z.shape[1] * torch.arange(len(z), device=z.device)[:, None]
    if draws is None:
        index, drawn = draw_negatives(there, config, generator)
    else:
        index, drawn = draws + starts, there.any(1)[:, None, None]
    others = z.flatten(0, 1)[index]  # [B, n, D]
    losses, chances, valid = [], [], []
    for ahead, prediction in enumerate(each, first):
        inside = there & F.pad(there[:, ahead:], (0, min(ahead, len(steps))))
        positive = F.pad(z[:, ahead:], (0, 0, 0, min(ahead, len(steps))))
        is_positive = index[:, None] == (steps + ahead + starts)[..., None]
        loss, chance = compare_candidates(prediction, positive, others, drawn & ~is_positive)
        losses.append(torch.where(inside, loss, 0.0).sum())
        chances.append(torch.where(inside, chance, 0.0).sum())
        valid.append(inside)
    count = torch.stack(valid).sum()
    loss, chance = (torch.stack(sums).sum() / count.clamp(min=1) for sums in (losses, chances))
    width = len(each)
    return pack_result(
        loss,
        loss.detach() / torch.where(chance > 0, chance, 1.0),
        {"cpc": loss},
        count,
        rel_count=chance * count,
        prediction=predicted.unflatten(-1, (width, -1)).flatten(1, 2),
        target=(steps[:, None] + torch.arange(first, first + width, device=z.device))
        .flatten()
        .expand(len(z), -1),
        valid=torch.stack(valid, 2).flatten(1),
        slices={f"next-{first + k}": slice(k, width * len(steps), width) for k in range(width)},
    )


def compare_candidates(
    predicted: Tensor, positive: Tensor, others: Tensor, usable: Tensor
) -> tuple[Tensor, Tensor]:
    """-log softmax of the positive, and its value for equal scores, [B, N] each.

    `predicted` and `positive` [B, N, D], `others` [B, n, D] the negatives of a row, `usable` [B, N,
    n] which of them count.
    """
    kind = torch.promote_types(predicted.dtype, torch.float32)
    with torch.autocast(predicted.device.type, enabled=False):
        predicted, positive, others = predicted.to(kind), positive.to(kind), others.to(kind)
        hit = (predicted * positive).sum(-1)
        scores = (predicted @ others.mT).masked_fill(~usable, torch.finfo(kind).min)
        return torch.logaddexp(hit, scores.logsumexp(-1)) - hit, usable.sum(-1).to(kind).log1p()


def draw_negatives(
    there: Tensor, config: CPCConfig, generator: Generator | None
) -> tuple[Tensor, Tensor]:
    """Tokens of `there` [B, N] for each row, as places in the flattened [B * N], int64 [B, n], and
    whether there are any, bool [B, 1, 1].
    """
    places = [row.nonzero().flatten() + n * there.shape[1] for n, row in enumerate(there.cpu())]
    chosen, some = [], []
    for n, pool in enumerate(places):
        if config.source == "rows":
            pool = torch.cat([*places[:n], *places[n + 1 :]])
        chosen.append(draw_places(pool, config, generator))
        some.append(len(pool) > 0)
    index, drawn = torch.stack(chosen), torch.tensor(some)[:, None, None]
    device = there.device
    return index.to(device, non_blocking=True), drawn.to(device, non_blocking=True)


def draw_places(pool: Tensor, config: CPCConfig, generator: Generator | None) -> Tensor:
    """Negatives of a row from the places `pool`, int64 [n]; 0 where there are none."""
    draw = torch.randint(max(len(pool), 1), (config.negatives,), generator=generator)
    return pool[draw] if len(pool) else draw * 0
