"""TF-C's objectives: contrastive losses in time and in frequency, and a consistency loss between the two encoders.

h are flattened maps, z projected vectors, ~ marks the augmented window or spectrum; d is NT-Xent (cosine, temperature 0.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Generator, Tensor
from torch.nn import functional as F  # noqa: N812

from bitimely_core.models.base import Model
from bitimely_core.models.tf_c import TFC, TFCView
from bitimely_core.objectives import contrast
from bitimely_core.objectives.tokens import Result
from bitimely_core.registry import ObjectiveFacts, objectives
from bitimely_core.types import Batch

BALANCE = 0.5  # lambda
MARGIN = 1.0  # delta
CODE = 0.2  # weight of L_T and L_F in the reference code
NOTICE = "tf-c: contrastive, without targets; rel 1.0 = the same vector for everything. Losses of other batch sizes cannot be compared."


class TFCObjectiveConfig(contrast.AugmentationConfig):
    """Settings of tf-c and tf-c-code."""

    bank: bool = Field(False, description="For each window one of jitter, scaling, permutation and masking, instead of jitter.")


class TFCViews(NamedTuple):
    """A window and its spectrum, each as it is and augmented."""

    time: TFCView
    time_other: TFCView
    frequency: TFCView
    frequency_other: TFCView


@objectives(ObjectiveFacts(leak_free=None, requires="tf-c", config=TFCObjectiveConfig, notice=NOTICE, passes=2, rows=2))
def tf_c(model: Model, batch: Batch, generator: Generator | None = None, *, config: TFCObjectiveConfig) -> Result:
    """The paper's: lambda (L_T + L_F) + (1 - lambda) L_C, with lambda 0.5.

    L_T = d(h_t, h_t~), L_F = d(h_f, h_f~), L_C = sum over pairs of d(z_t, z_f) - d(pair) + 1 with the pairs (z_t, z_f~), (z_t~, z_f),
    (z_t~, z_f~): the pair that nothing was done to is to be the closest.
    """
    four = _encode_views("tf-c", model, batch, generator, config)
    a, b, c, d = (view.vector for view in four)
    closest = contrast.nt_xent(a, c)
    consistency = sum((closest - contrast.nt_xent(x, y) + MARGIN for x, y in ((a, d), (b, c), (b, d))), start=closest.new_zeros(()))
    parts = {**_encoder_losses(four, BALANCE), "consistency": (1 - BALANCE) * consistency}
    rows = len(batch.values)
    return contrast.make_contrastive_result(parts, 2 * BALANCE * contrast.uniform_loss(rows) + (1 - BALANCE) * 3 * MARGIN, rows)


@objectives(ObjectiveFacts(leak_free=None, requires="tf-c", config=TFCObjectiveConfig, notice=NOTICE, passes=2, rows=2))
def tf_c_code(model: Model, batch: Batch, generator: Generator | None = None, *, config: TFCObjectiveConfig) -> Result:
    """The released trainer's: 0.2 (L_T + L_F) + d(z_t, z_f) with `compute_polynomial_loss` as d; its spectra are augmented to twice their size,
    and L_C is not used.
    """
    four = _encode_views("tf-c-code", model, batch, generator, config)
    cross = compute_polynomial_loss(four.time.vector, four.frequency.vector)
    rows = len(batch.values)
    blind = contrast.uniform_loss(rows) + 1 - rows / (2 * rows - 1) ** 2
    return contrast.make_contrastive_result(
        {**_encoder_losses(four, CODE, compute_polynomial_loss), "cross": cross}, (2 * CODE + 1) * blind, rows
    )


def compute_polynomial_loss(first: Tensor, second: Tensor) -> Tensor:
    """The trainer's NT-Xent of B rows [B, D] each: mean of -log p + B (1 / B - m).

    p is the probability of the positive among the 2B - 1 other views, and m the mean of the 2B (2B - 1) probabilities times the one-hot labels,
    so the second term is 1 - B / (2B - 1) times the mean of p.
    """
    rows = len(first)
    views = F.normalize(torch.cat((first, second)).to(torch.promote_types(first.dtype, torch.float32)), dim=-1)
    with torch.autocast(views.device.type, enabled=False):
        scores = (views @ views.T / contrast.TEMPERATURE).masked_fill(
            torch.eye(2 * rows, dtype=torch.bool, device=views.device), -torch.inf
        )
        each = F.cross_entropy(scores, torch.arange(2 * rows, device=views.device).roll(rows), reduction="none")
    return each.mean() + 1 - rows / (2 * rows - 1) * (-each).exp().mean()


def _encode_views(name: str, model: Model, batch: Batch, generator: Generator | None, config: TFCObjectiveConfig) -> TFCViews:
    assert isinstance(model, TFC)
    contrast.require_rows(name, batch)
    other = contrast.augment_rows(batch, config, generator) if config.bank else contrast.add_jitter(batch, config.jitter, generator)
    spectrum = model.spectrum(batch)
    spectrum_other = contrast.perturb_spectrum(spectrum, generator, twice=name == "tf-c-code")
    return TFCViews(
        model.view("time", batch), model.view("time", other), model.view("frequency", spectrum), model.view("frequency", spectrum_other)
    )


def _encoder_losses(four: TFCViews, weight: float, compare: Callable[[Tensor, Tensor], Tensor] = contrast.nt_xent) -> dict[str, Tensor]:
    """L_T and L_F times their weight, with `compare` as d."""
    pairs = {"time": (four.time, four.time_other), "frequency": (four.frequency, four.frequency_other)}
    return {name: weight * compare(view.flat, other.flat) for name, (view, other) in pairs.items()}
