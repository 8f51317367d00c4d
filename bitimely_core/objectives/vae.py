"""The variational bound of mTAND: observations from a latent sequence, with a weight on the divergence that grows with the training."""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Generator, Tensor

from bitimely_core.config import ObjectiveConfig
from bitimely_core.models.base import Model
from bitimely_core.models.mtand import MTANDFull
from bitimely_core.objectives.tokens import Generators, Result, has_target_scale, pack_result
from bitimely_core.registry import ObjectiveFacts, objectives
from bitimely_core.types import Batch

STD = 0.01  # of an observation around its reconstruction
EPOCHS, WAIT, RATE = 300, 10, 0.99  # the authors' training: beta is 0 for 10 of 300 epochs, then 1 - 0.99^(epoch - 10)

NOTICE = "vae: the model sees what it reconstructs; its loss says how well a sample is kept, not what follows."


def compute_divergence_weight(progress: float) -> float:
    """The weight of the divergence, beta, at a share of the training."""
    return 1 - RATE ** max(EPOCHS * progress - WAIT, 0.0)


def log_likelihood(values: Tensor, reconstruction: Tensor, mask: Tensor) -> Tensor:
    """Sum of log N(x; x^, 0.01^2) over the observed entries of a row: values and mask [B, T, V], reconstruction [..., B, T, V] -> [..., B]."""
    each = -0.5 * ((values - reconstruction) / STD).square() - math.log(STD * math.sqrt(2 * math.pi))
    return torch.where(mask, each, 0.0).sum((-1, -2))


def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL(N(mean, exp(log_variance)) || N(0, 1)) summed over points and dimensions, [B, R, Z] -> [B]."""
    return 0.5 * (log_variance.exp() + mean.square() - 1 - log_variance).sum((-1, -2))


class VAEConfig(ObjectiveConfig):
    """Settings of vae."""

    samples: int = Field(1, ge=1, description="Latents drawn for each row.")


def draw_noise(model: Model, batch: Batch, generators: Generators, config: VAEConfig) -> Tensor:
    """Normal noise of the latents of each row, [B, K, R, Z], on the CPU."""
    assert isinstance(model, MTANDFull)
    shape = (config.samples, len(model.points), model.config.latent)
    return torch.stack([torch.randn(shape, generator=generator) for generator in generators])


@objectives(ObjectiveFacts(leak_free=None, requires="vae", config=VAEConfig, notice=NOTICE, draw=draw_noise))
def vae(model: Model, batch: Batch, generator: Generator | None = None, *, config: VAEConfig) -> Result:
    """-mean over the rows of [logsumexp_k (log p(x | z_k) - beta KL) - log K] / number of observed entries, with K = `samples`.

    beta follows the training as in the authors' 300 epochs; outside training it is what it ends with. `rel` is the squared error of the
    reconstructions over Var(target).
    """
    assert isinstance(model, MTANDFull)
    assert batch.draws is not None
    posterior = model.posterior(batch)
    rows = posterior.rows
    mean, log_variance = (part if part.dtype == torch.float64 else part.float() for part in (posterior.mean, posterior.log_variance))
    noise = batch.draws.transpose(0, 1).to(mean)
    reconstruction = torch.stack([model.decode(z, rows, batch) for z in mean + (0.5 * log_variance).exp() * noise]).to(mean)
    values = rows.values.to(mean)
    observed = rows.mask.sum((-1, -2))
    per = observed.clamp(min=1)
    beta = compute_divergence_weight(model.progress if model.training else 1.0)
    likelihood, kl = log_likelihood(values, reconstruction, rows.mask) / per, divergence(mean, log_variance) / per
    bound = torch.logsumexp(likelihood - beta * kl, 0) - math.log(config.samples)
    real = observed > 0
    count = real.sum()
    loss = -torch.where(real, bound, 0.0).sum() / count.clamp(min=1)
    error = torch.where(rows.mask, (values - reconstruction).square(), 0.0).sum() / (observed.sum() * config.samples).clamp(min=1)
    scale = model.target_scale if has_target_scale(model) else model.measure([batch])
    sums = {"likelihood": torch.where(real, likelihood, 0.0).mean(0).sum(), "kl": torch.where(real, kl, 0.0).sum()}
    parts = {name: value / count.clamp(min=1) for name, value in sums.items()}
    aligned = {"prediction": reconstruction.mean(0), "target": values, "valid": rows.mask, "rel_count": observed.sum()}
    return pack_result(loss, error.detach() / scale, parts, count, slices={"reconstruction": slice(0, values.shape[1])}, **aligned)
