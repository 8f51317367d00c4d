"""mTAND (Shukla and Marlin 2021): attention from reference points to the times of the observations,
then recurrent layers.

mTAN: scores of a query time r and an observation time t are (phi(r) W_q) . (phi(t) W_k) / sqrt(d),
with phi(t) = [w t + b, sin(W t + b)]. Each channel has its own softmax over its observation times;
its value at r is the weighted mean of its observations.

* `mtand` (mTAND-Full): mTAN of [x, m] at R points on [0, 1] -> bidirectional GRU -> mean and log
  variance of a latent z at each point; z -> bidirectional GRU -> mTAN back to the observation times
  -> x^. Objective `vae`. Vector: last state of a GRU over the latent means.
* `mtand-enc` (mTAND-Enc): mTAN -> GRU, whose last state is the vector; no pre-training objective.

Events: in each month with any code all codes count as observed, absent ones as 0. With occurrences
alone every mean would be 1.

The start decides what is learnt. Frequencies reach `time_scale` radians over the window (those of
torch would stop at 1, where times hardly enter); keys start as the queries, so that a reference
point reads the observations near it; biases of the GRUs start at 0, but those of the update gate
are log U(1, R - 1), so that states last for up to all reference points (Tallec and Ollivier 2018).

Legend: B batch, T rows, V channels (events: codes), R reference points, H heads, D width, Z latent
width.

The objective is the variational bound of the observations given a latent sequence. The weight of
the divergence grows with the training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple, cast

import torch
from pydantic import Field
from torch import Generator, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig, ObjectiveConfig
from bitimely_core.models.adapters import RowTokenizer, TimedRows, get_time_span
from bitimely_core.models.base import Model
from bitimely_core.models.contract import config_error
from bitimely_core.objectives.token_objectives import (
    Generators,
    Result,
    find_target_scale,
    pack_result,
)
from bitimely_core.ops.fused import widen
from bitimely_core.ops.rotary import find_widest_float
from bitimely_core.registry import ModelFacts, ObjectiveFacts, models, objectives
from bitimely_core.types import Batch, Encoded
from bitimely_core.zoo.patchtst import encode_sinusoid
from bitimely_core.zoo.supervised import RowAdapter, SupervisedFacts, SupervisedModel

CODE = 128  # width of phi
GENERATOR = 50  # width of each direction of the decoder's GRU
INNER = 50  # hidden width of the small nets
FIXED_BASE = 10.0  # of the fixed frequencies
# of a score less the best of all rows: 1 / exp(it) is finite
LOWEST = {torch.float64: -600.0, torch.float32: -60.0}


class MTANDEncConfig(ModelConfig):
    """Settings of mTAND-Enc."""

    reference: int = Field(128, ge=2, description="Reference points.")
    time_code: Literal["learned", "fixed"] = Field(
        "learned", description="Code of times: learned frequencies, or the authors' fixed ones."
    )
    time_scale: float = Field(
        48.0,
        gt=0,
        description="Highest frequency of the code, in radians over the window; learned: at the "
        "start.",
    )


class MTANDConfig(MTANDEncConfig):
    """Settings of mTAND-Full."""

    latent: int = Field(20, ge=1, description="Width of the latent at each reference point.")


class TimeEmbedding(nn.Module):
    """phi, learned: one linear and 127 periodic functions of a time; frequencies start in U(-scale,
    scale), phases in U(-pi, pi).
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear, self.periodic = nn.Linear(1, 1), nn.Linear(1, CODE - 1)
        nn.init.uniform_(self.periodic.weight, -scale, scale)
        nn.init.uniform_(self.periodic.bias, -math.pi, math.pi)

    def forward(self, times: Tensor) -> Tensor:
        """[..., n] -> [..., n, 128]."""
        times = times[..., None].to(self.linear.weight.dtype)
        return torch.cat((self.linear(times), self.periodic(times).sin()), -1)


class FixedTimeEmbedding(nn.Module):
    """phi, fixed: sin and cos of scale * t * 10^(-2i / 128), i = 0 .. 63, in turns."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, times: Tensor) -> Tensor:
        """[..., n] -> [..., n, 128]."""
        return encode_sinusoid(times, CODE, base=FIXED_BASE, scale=self.scale)


def make_time_embedding(config: MTANDEncConfig) -> nn.Module:
    """Phi of a configuration."""
    return (FixedTimeEmbedding if config.time_code == "fixed" else TimeEmbedding)(config.time_scale)


@torch.no_grad()
def make_gru(inputs: int, hidden: int, points: int, *, bidirectional: bool = False) -> nn.GRU:
    """A GRU that starts with biases of 0 and, in the update gates, log U(1, points - 1)."""
    gru = nn.GRU(inputs, hidden, batch_first=True, bidirectional=bidirectional)
    for name, bias in gru.named_parameters():
        if name.startswith("bias"):
            nn.init.zeros_(bias)
        if name.startswith("bias_ih"):
            nn.init.uniform_(bias[hidden : 2 * hidden], 1, max(points - 1, 1)).log_()
    return gru


class TimeAttention(nn.Module):
    """mTAN without its output map, which depends on the channels."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(CODE, CODE), nn.Linear(CODE, CODE)
        nn.init.orthogonal_(self.query.weight, math.sqrt(2))
        nn.init.zeros_(self.query.bias)
        self.key.load_state_dict(self.query.state_dict())

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None = None,
        *,
        attention: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Weighted means [B, n, H * C] of each channel of `values` [B, T, C], without an
        observation 0; `mask` [B, T, C]: what was observed.

        `queries` and `keys` are phi of the query and key times, [1 or B, n or T, 128]. With
        `attention` also the weights [B, H, n, T], under a mask their mean over the channels that
        were observed at all. exp(score) is multiplied by the mask: memory is R * T, not R * T * V.
        """
        parts = (
            part(code.to(part.weight.dtype))
            for part, code in ((self.query, queries), (self.key, keys))
        )
        q, k = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).expand(
            values.shape[0], -1, -1, -1
        )
        if mask is None:
            weights = scores.softmax(-1)
            means = (weights @ values[:, None]).transpose(1, 2).flatten(2)
            return means, weights if attention else None
        seen = mask.any(-1)[:, None, None]
        # a channel's own rows may lie far below the best one: exp(-88) is 0 in float32
        wide = scores.to(find_widest_float(scores.device))
        top = wide.detach().masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)
        raised = torch.where(
            seen,
            (wide - torch.where(top.isfinite(), top, 0.0)).clamp(LOWEST[wide.dtype], 0.0).exp(),
            0.0,
        )
        weight = mask.to(raised.dtype)[:, None]
        total = raised @ weight  # [B, H, n, C]
        observed = total > 0
        total = torch.where(observed, total, 1.0)
        mean = torch.where(observed, raised @ (weight * values[:, None]) / total, 0.0)
        maps = None
        if attention:
            count = observed.sum(-1, keepdim=True).clamp(min=1)
            share = torch.where(observed, 1 / total, 0.0) / count
            maps = (raised * (share @ weight.transpose(-1, -2))).to(scores.dtype)
        return mean.to(scores.dtype).transpose(1, 2).flatten(2), maps


class MTANDAdapter(RowAdapter):
    """The parameters that depend on the channels: output map of the encoder's attention, last layer
    of the decoder.
    """

    def build(self, config: ModelConfig) -> None:
        """As `PlainAdapter.build`."""
        super().build(config)
        self.tokenizer = RowTokenizer(config, absent=True)
        self.enter = nn.Linear(config.heads * 2 * self.tokenizer.width, config.dim)
        if config.name == "mtand":
            self.output = nn.ModuleDict({"next": nn.Linear(INNER, self.tokenizer.target_width)})


class MTANDPosterior(NamedTuple):
    """Encoder output: parameters of q(z | x)."""

    rows: TimedRows
    entered: Tensor  # [B, R, D], behind mTAN
    mean: Tensor  # [B, R, Z]
    log_variance: Tensor  # [B, R, Z]
    attention: Tensor | None  # [B, H, R, T]


class MTANDEncoder(SupervisedModel):
    """mTAND-Enc: mTAN at the reference points, then a GRU whose last state is the sequence
    vector.
    """

    adapter_type = MTANDAdapter
    points: Tensor

    def __init__(self, config: MTANDEncConfig) -> None:
        if CODE % config.heads:
            raise config_error(
                f"{config.heads} heads", f"expected a divisor of {CODE}", "model.heads"
            )
        super().__init__(config)
        self.register_buffer("points", torch.linspace(0, 1, config.reference))
        self.code, self.attend = make_time_embedding(config), TimeAttention(config.heads)
        self._build_layers()

    def _build_layers(self) -> None:
        self.reader = make_gru(self.config.dim, self.config.dim, len(self.points))
        self.pooled_width = self.config.dim

    def attend_references(
        self, batch: Batch, *, attention: bool = False
    ) -> tuple[TimedRows, Tensor, Tensor | None]:
        """The rows of a batch, the output of mTAN at the reference points [B, R, D], and its
        weights [B, H, R, T] on request.
        """
        adapter = cast(MTANDAdapter, self.adapter_of(batch))
        rows = adapter.tokenizer.rows(batch)
        mask = torch.cat((rows.mask, rows.mask), -1)
        values = torch.cat((rows.values, rows.mask.to(rows.values)), -1).to(self.points.dtype)
        keys = self.code(rows.times / get_time_span(self.config))
        means, maps = self.attend(
            self.code(self.points)[None], keys, values, mask, attention=attention
        )
        return rows, adapter.enter(means), maps

    def encode(self, batch: Batch, *, attention: bool) -> Encoded:
        """States behind mTAN and behind the GRU at the reference points, [B, R, D]; maps: weights
        of mTAN [B, H, R, T], channel means.
        """
        _, entered, maps = self.attend_references(batch, attention=attention)
        return self._read(entered, entered, maps)

    def _read(self, entered: Tensor, inputs: Tensor, maps: Tensor | None) -> Encoded:
        states, last = self.reader(inputs)
        pooled = F.dropout(last[-1], self.config.dropout, self.training)
        return Encoded(
            None, None, None, (entered, states), None if maps is None else (maps,), pooled
        )


class MTANDFull(MTANDEncoder):
    """mTAND-Full: a variational autoencoder over the reference points."""

    config: MTANDConfig

    def _build_layers(self) -> None:
        config = self.config
        points = config.reference
        self.encoder = make_gru(config.dim, config.dim, points, bidirectional=True)
        self.to_latent = nn.Sequential(
            nn.Linear(2 * config.dim, INNER), nn.ReLU(), nn.Linear(INNER, 2 * config.latent)
        )
        self.reader = make_gru(config.latent, config.dim, points)
        self.decoder = make_gru(config.latent, GENERATOR, points, bidirectional=True)
        self.code_back, self.attend_back = make_time_embedding(config), TimeAttention(config.heads)
        self.out = nn.Sequential(
            nn.Linear(config.heads * 2 * GENERATOR, 2 * GENERATOR),
            nn.Linear(2 * GENERATOR, INNER),
            nn.ReLU(),
        )
        self.pooled_width = config.dim

    def posterior(self, batch: Batch, *, attention: bool = False) -> MTANDPosterior:
        """q(z | x), a diagonal Gaussian at each reference point."""
        rows, entered, maps = self.attend_references(batch, attention=attention)
        mean, log_variance = self.to_latent(self.encoder(entered)[0]).chunk(2, -1)
        # numbers of events are read, not reconstructed
        width = self.adapter_of(batch).tokenizer.target_width
        return MTANDPosterior(
            rows._replace(values=rows.values[..., :width], mask=rows.mask[..., :width]),
            entered,
            mean,
            log_variance,
            maps,
        )

    def decode(self, z: Tensor, rows: TimedRows, batch: Batch) -> Tensor:
        """x^ [B, T, V] at the times of the rows, from latents [B, R, Z]."""
        adapter = cast(MTANDAdapter, self.adapter_of(batch))
        states, _ = self.decoder(z)
        means, _ = self.attend_back(
            self.code_back(rows.times / get_time_span(self.config)),
            self.code_back(self.points)[None],
            states,
        )
        reconstruction: Tensor = adapter.output["next"](self.out(means))
        return reconstruction

    def encode(self, batch: Batch, *, attention: bool) -> Encoded:
        """As `MTANDEncoder.encode`; the GRU reads the means of the latents, without sampling."""
        posterior = self.posterior(batch, attention=attention)
        return self._read(posterior.entered, posterior.mean, posterior.attention)

    @torch.no_grad()
    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Observations and their mask, [B, T, V]."""
        tokenizer = cast(MTANDAdapter, self.adapter_of(batch)).tokenizer
        rows = tokenizer.rows(self.expand_channels(batch))
        return rows.values[..., : tokenizer.target_width], rows.mask[..., : tokenizer.target_width]

    def measure(self, batches: Iterable[Batch]) -> float:
        """Var(target) around the mean of each channel."""
        return Model.measure(self, batches)


SOURCE = "Shukla and Marlin 2021, Multi-Time Attention Networks for Irregularly Sampled Time Series"


@models(
    ModelFacts(
        config=MTANDConfig,
        family="mtand",
        objective="vae",
        capabilities=("vae",),
        readout="native",
        input=("regular", "events", "irregular"),
        step=2,
        source=SOURCE,
        known="An autoencoder: its loss says how well a sample is kept, not what follows; "
        "fine-tuning leaves its decoder aside",
    )
)
def mtand(config: MTANDConfig) -> MTANDFull:
    """mTAND-Full: attention from reference points to irregular times, a variational autoencoder."""
    return MTANDFull(config)


@models(
    SupervisedFacts(
        config=MTANDEncConfig,
        family="mtand",
        input=("regular", "events", "irregular"),
        step=2,
        source=SOURCE,
        known="Supervised only",
    )
)
def mtand_enc(config: MTANDEncConfig) -> MTANDEncoder:
    """mTAND-Enc: attention from reference points to irregular times, then a GRU; trained with its
    head alone.
    """
    return MTANDEncoder(config)


# --- the objective

STD = 0.01  # of an observation around its reconstruction
# the authors' training: beta is 0 for 10 of 300 epochs, then 1 - 0.99^(epoch - 10)
EPOCHS, WAIT, RATE = 300, 10, 0.99

NOTICE = (
    "vae: the model sees what it reconstructs; its loss says how well a sample is kept, not what "
    "follows."
)


def compute_divergence_weight(progress: float) -> float:
    """The weight of the divergence, beta, at a share of the training."""
    return 1 - RATE ** max(EPOCHS * progress - WAIT, 0.0)


def log_likelihood(values: Tensor, reconstruction: Tensor, mask: Tensor) -> Tensor:
    """Sum of log N(x; x^, 0.01^2) over the observed entries of a row: values and mask [B, T, V],
    reconstruction [..., B, T, V] -> [..., B].
    """
    each = -0.5 * ((values - reconstruction) / STD).square() - math.log(
        STD * math.sqrt(2 * math.pi)
    )
    return torch.where(mask, each, 0.0).sum((-1, -2))


def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL(N(mean, exp(log_variance)) || N(0, 1)) summed over points and dimensions, [B, R, Z] ->
    [B].
    """
    return 0.5 * (log_variance.exp() + mean.square() - 1 - log_variance).sum((-1, -2))


class VAEConfig(ObjectiveConfig):
    """Settings of vae."""

    samples: int = Field(1, ge=1, description="Latents drawn for each row.")


def draw_noise(model: Model, batch: Batch, generators: Generators, config: VAEConfig) -> Tensor:
    """Normal noise of the latents of each row, [B, K, R, Z], on the CPU."""
    assert isinstance(model, MTANDFull)
    shape = (config.samples, len(model.points), model.config.latent)
    return torch.stack([torch.randn(shape, generator=generator) for generator in generators])


@objectives(
    ObjectiveFacts(leak_free=None, requires="vae", config=VAEConfig, notice=NOTICE, draw=draw_noise)
)
def vae(
    model: Model, batch: Batch, generator: Generator | None = None, *, config: VAEConfig
) -> Result:
    """-mean over the rows of [logsumexp_k (log p(x | z_k) - beta KL) - log K] / number of observed
    entries, with K = `samples`.

    beta follows the training as in the authors' 300 epochs; outside training it is what it ends
    with. `rel` is the squared error of the reconstructions over Var(target).
    """
    assert isinstance(model, MTANDFull)
    assert batch.draws is not None
    posterior = model.posterior(batch)
    rows = posterior.rows
    mean, log_variance = widen(posterior.mean), widen(posterior.log_variance)
    noise = batch.draws.transpose(0, 1).to(mean)
    reconstruction = torch.stack(
        [model.decode(z, rows, batch) for z in mean + (0.5 * log_variance).exp() * noise]
    ).to(mean)
    values = rows.values.to(mean)
    observed = rows.mask.sum((-1, -2))
    per = observed.clamp(min=1)
    beta = compute_divergence_weight(model.progress if model.training else 1.0)
    likelihood, kl = (
        log_likelihood(values, reconstruction, rows.mask) / per,
        divergence(mean, log_variance) / per,
    )
    bound = torch.logsumexp(likelihood - beta * kl, 0) - math.log(config.samples)
    real = observed > 0
    count = real.sum()
    loss = -torch.where(real, bound, 0.0).sum() / count.clamp(min=1)
    error = torch.where(rows.mask, (values - reconstruction).square(), 0.0).sum() / (
        observed.sum() * config.samples
    ).clamp(min=1)
    sums = {
        "likelihood": torch.where(real, likelihood, 0.0).mean(0).sum(),
        "kl": torch.where(real, kl, 0.0).sum(),
    }
    parts = {name: value / count.clamp(min=1) for name, value in sums.items()}
    aligned = {
        "prediction": reconstruction.mean(0),
        "target": values,
        "valid": rows.mask,
        "rel_count": observed.sum(),
    }
    return pack_result(
        loss,
        error.detach() / find_target_scale(model, batch),
        parts,
        count,
        slices={"reconstruction": slice(0, values.shape[1])},
        **aligned,
    )
