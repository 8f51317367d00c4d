"""TF-C (Zhang et al. 2022): encoders of the window and of its spectrum, trained to give consistent
vectors.

Both encoders are three convolution blocks as in TS-TCC; each map, flattened, goes through its own
projector. The vector of a window is z_t beside z_f. The spectrum is |FFT(x)| / sqrt(T), two-sided,
of the row's own samples.

Legend: B batch, T timesteps, V channels, F steps of a map, D width of a map and of z.

The objectives are contrastive losses in time and in frequency, and a consistency loss between the
two encoders.

h are flattened maps, z projected vectors, ~ marks the augmented window or spectrum; d is NT-Xent
(cosine, temperature 0.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Generator, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.models.base import Model, require_learned_positions
from bitimely_core.models.tokenizers import find_row_ends, mask_before
from bitimely_core.objectives.token_objectives import Result
from bitimely_core.ops.fused import widen
from bitimely_core.registry import ModelFacts, ObjectiveFacts, models, objectives
from bitimely_core.types import Batch, Encoded
from bitimely_core.zoo import contrast
from bitimely_core.zoo.patchtst import BatchNorm

ENCODERS = ("time", "frequency")


class TFCView(NamedTuple):
    """Output of one encoder."""

    map: Tensor  # [B, F, D]
    real: Tensor  # bool [B, F]
    flat: Tensor  # [B, F * D], h
    vector: Tensor  # [B, D], z


class TFCAdapter(contrast.ConvolutionAdapter):
    """The first convolution of both encoders."""

    encoders = ENCODERS


class TFC(contrast.ContrastiveModel):
    """Two encoders and two projectors."""

    adapter_type = TFCAdapter
    adapter: TFCAdapter

    def __init__(self, config: contrast.ConvolutionConfig) -> None:
        super().__init__(config)
        self.trunks = nn.ModuleDict({name: contrast.ConvolutionTrunk(config) for name in ENCODERS})
        self.projectors = nn.ModuleDict({name: self._projector() for name in ENCODERS})
        self.pooled_width = 2 * config.dim

    @property
    def steps(self) -> int:
        """F that the projectors read."""
        return self.adapter.tokenizer.count(self.config.length)

    def _projector(self) -> nn.Sequential:
        dim = self.config.dim
        return nn.Sequential(
            nn.Linear(dim * self.steps, 2 * dim),
            BatchNorm(2 * dim),
            nn.ReLU(),
            nn.Linear(2 * dim, dim),
        )

    def encode(self, batch: Batch, hide: Tensor | None) -> Encoded:
        """States: the map of the time encoder; vector: z_t beside z_f. Raises UserError (exit 2)
        for windows longer than the projectors know.
        """
        time, frequency = self.view("time", batch), self.view("frequency", self.spectrum(batch))
        return Encoded(
            None,
            None,
            time.real,
            (time.map,),
            None,
            torch.cat((time.vector, frequency.vector), -1),
            None,
        )

    def view(self, encoder: str, batch: Batch) -> TFCView:
        """Output of encoder `time` for samples, or `frequency` for a spectrum. `batch` as
        `expand_channels` or `spectrum` returns it.
        """
        z, real = contrast.compute_map(self.trunks[encoder], self.adapter_of(batch), encoder, batch)
        missing = self.steps - z.shape[1]
        if missing < 0:
            require_learned_positions(batch.values.shape[1], self.config.length, "samples")
        flat = F.pad(z * real[..., None], (0, 0, 0, missing)).flatten(1)
        return TFCView(z, real, flat, self.projectors[encoder](flat))

    def spectrum(self, batch: Batch) -> Batch:
        """|FFT(x)| / sqrt(n) over the n samples of each row, as a batch of n bins.

        Missing samples count as 0.
        """
        x, _, _ = self.adapter_of(batch).tokenizer(batch)
        if batch.mask is None:
            return Batch(torch.fft.fft(x, dim=1, norm="ortho").abs(), source=batch.source)
        ends, bins = find_row_ends(batch), torch.zeros_like(x)
        for length in ends.unique().tolist():
            if length:
                rows = ends == length
                bins[rows, :length] = torch.fft.fft(x[rows, :length], dim=1, norm="ortho").abs()
        return Batch(bins, mask=mask_before(ends, x.shape[1]), source=batch.source)

    def _fit_length(self, before: int) -> list[str]:
        """For other numbers of steps the first layers of the projectors are randomly
        initialised.
        """
        fresh = []
        for name, projector in self.projectors.items():
            assert isinstance(projector, nn.Sequential)
            if projector[0].in_features != self.config.dim * self.steps:
                like = next(projector.parameters())
                projector[0] = self._projector()[0].to(like.device, like.dtype)
                fresh += [f"projectors.{name}.0.weight", f"projectors.{name}.0.bias"]
        return fresh


@models(
    ModelFacts(
        config=contrast.ConvolutionConfig,
        family="tf-c",
        objective="tf-c",
        capabilities=("tf-c",),
        readout="native",
        step=1,
        source="Zhang et al. 2022, Self-Supervised Contrastive Pre-Training for Time Series via "
        "Time-Frequency Consistency",
        known='"TS-T" of the paper\'s PopHR table is read as TF-C (alias ts-t); the projectors '
        "grow with the window and know its length",
    )
)
def tf_c(config: contrast.ConvolutionConfig) -> TFC:
    """TF-C, alias ts-t: a window and its spectrum, encoded side by side and trained to agree."""
    return TFC(contrast.configure_signals(config))


models.aliases["ts-t"] = "tf-c"


# --- the objective

BALANCE = 0.5  # lambda
MARGIN = 1.0  # delta
CODE = 0.2  # weight of L_T and L_F in the reference code
NOTICE = f"tf-c: {contrast.NOTICE}"


class TFCObjectiveConfig(contrast.AugmentationConfig):
    """Settings of tf-c and tf-c-code."""

    bank: bool = Field(
        False,
        description="For each window one of jitter, scaling, permutation and masking, instead of "
        "jitter.",
    )


class TFCViews(NamedTuple):
    """A window and its spectrum, each as it is and augmented."""

    time: TFCView
    time_other: TFCView
    frequency: TFCView
    frequency_other: TFCView


FACTS = ObjectiveFacts(
    leak_free=None, requires="tf-c", config=TFCObjectiveConfig, notice=NOTICE, passes=2, rows=2
)


@objectives(FACTS, name="tf-c")
def compute_tf_c_loss(
    model: Model, batch: Batch, generator: Generator | None = None, *, config: TFCObjectiveConfig
) -> Result:
    """The paper's: lambda (L_T + L_F) + (1 - lambda) L_C, with lambda 0.5.

    L_T = d(h_t, h_t~), L_F = d(h_f, h_f~), L_C = sum over pairs of d(z_t, z_f) - d(pair) + 1 with
    the pairs (z_t, z_f~), (z_t~, z_f), (z_t~, z_f~): the pair that nothing was done to is to be the
    closest.
    """
    four = _encode_views("tf-c", model, batch, generator, config)
    a, b, c, d = (view.vector for view in four)
    closest = contrast.nt_xent(a, c)
    consistency = sum(
        (closest - contrast.nt_xent(x, y) + MARGIN for x, y in ((a, d), (b, c), (b, d))),
        start=closest.new_zeros(()),
    )
    parts = {**_encoder_losses(four, BALANCE), "consistency": (1 - BALANCE) * consistency}
    rows = len(batch.values)
    return contrast.make_contrastive_result(
        parts, 2 * BALANCE * contrast.uniform_loss(rows) + (1 - BALANCE) * 3 * MARGIN, rows
    )


@objectives(FACTS)
def tf_c_code(
    model: Model, batch: Batch, generator: Generator | None = None, *, config: TFCObjectiveConfig
) -> Result:
    """The released trainer's: 0.2 (L_T + L_F) + d(z_t, z_f) with `compute_polynomial_loss` as d;
    its spectra are augmented to twice their size, and L_C is not used.
    """
    four = _encode_views("tf-c-code", model, batch, generator, config)
    cross = compute_polynomial_loss(four.time.vector, four.frequency.vector)
    rows = len(batch.values)
    blind = contrast.uniform_loss(rows) + 1 - rows / (2 * rows - 1) ** 2
    return contrast.make_contrastive_result(
        {**_encoder_losses(four, CODE, compute_polynomial_loss), "cross": cross},
        (2 * CODE + 1) * blind,
        rows,
    )


def compute_polynomial_loss(first: Tensor, second: Tensor) -> Tensor:
    """The trainer's NT-Xent of B rows [B, D] each: mean of -log p + B (1 / B - m).

    p is the probability of the positive among the 2B - 1 other views, and m the mean of the 2B (2B
    - 1) probabilities times the one-hot labels, so the second term is 1 - B / (2B - 1) times the
    mean of p.
    """
    rows = len(first)
    views = F.normalize(widen(torch.cat((first, second))), dim=-1)
    with torch.autocast(views.device.type, enabled=False):
        scores = (views @ views.T / contrast.TEMPERATURE).masked_fill(
            torch.eye(2 * rows, dtype=torch.bool, device=views.device), -torch.inf
        )
        each = F.cross_entropy(
            scores, torch.arange(2 * rows, device=views.device).roll(rows), reduction="none"
        )
    return each.mean() + 1 - rows / (2 * rows - 1) * (-each).exp().mean()


def _encode_views(
    name: str, model: Model, batch: Batch, generator: Generator | None, config: TFCObjectiveConfig
) -> TFCViews:
    assert isinstance(model, TFC)
    contrast.require_rows(name, batch)
    other = (
        contrast.augment_rows(batch, config, generator)
        if config.bank
        else contrast.add_jitter(batch, config.jitter, generator)
    )
    spectrum = model.spectrum(batch)
    spectrum_other = contrast.perturb_spectrum(spectrum, generator, twice=name == "tf-c-code")
    return TFCViews(
        model.view("time", batch),
        model.view("time", other),
        model.view("frequency", spectrum),
        model.view("frequency", spectrum_other),
    )


def _encoder_losses(
    four: TFCViews, weight: float, compare: Callable[[Tensor, Tensor], Tensor] = contrast.nt_xent
) -> dict[str, Tensor]:
    """L_T and L_F times their weight, with `compare` as d."""
    pairs = {
        "time": (four.time, four.time_other),
        "frequency": (four.frequency, four.frequency_other),
    }
    return {name: weight * compare(view.flat, other.flat) for name, (view, other) in pairs.items()}
