"""TF-C (Zhang et al. 2022): encoders of the window and of its spectrum, trained to give consistent vectors.

Both encoders are three convolution blocks as in TS-TCC; each map, flattened, goes through its own projector. The vector of
a window is z_t beside z_f. The spectrum is |FFT(x)| / sqrt(T), two-sided, of the row's own samples.

Legend: B batch, T timesteps, V channels, F steps of a map, D width of a map and of z.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.models import contrast
from bitimely_core.models.base import require_learned_positions
from bitimely_core.models.patchtst import BatchNorm
from bitimely_core.models.tokenizers import find_row_ends, mask_before
from bitimely_core.registry import ModelFacts, models
from bitimely_core.types import Batch, Encoded

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
        return nn.Sequential(nn.Linear(dim * self.steps, 2 * dim), BatchNorm(2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def encode(self, batch: Batch, hide: Tensor | None) -> Encoded:
        """States: the map of the time encoder; vector: z_t beside z_f. Raises UserError (exit 2) for windows longer than the projectors know."""
        time, frequency = self.view("time", batch), self.view("frequency", self.spectrum(batch))
        return Encoded(None, None, time.real, (time.map,), None, torch.cat((time.vector, frequency.vector), -1), None)

    def view(self, encoder: str, batch: Batch) -> TFCView:
        """Output of encoder `time` for samples, or `frequency` for a spectrum. `batch` as `expand_channels` or `spectrum` returns it."""
        z, real = contrast.compute_map(self.trunks[encoder], self.adapter_of(batch), encoder, batch)
        missing = self.steps - z.shape[1]
        if missing < 0:
            require_learned_positions(batch.values.shape[1], self.config.length, "samples")
        flat = F.pad(z * real[..., None], (0, 0, 0, missing)).flatten(1)
        return TFCView(z, real, flat, self.projectors[encoder](flat))

    def spectrum(self, batch: Batch) -> Batch:
        """|FFT(x)| / sqrt(n) over the n samples of each row, as a batch of n bins. Missing samples count as 0."""
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
        """For other numbers of steps the first layers of the projectors are randomly initialised."""
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
        source="Zhang et al. 2022, Self-Supervised Contrastive Pre-Training for Time Series via Time-Frequency Consistency",
        known='"TS-T" of the paper\'s PopHR table is read as TF-C (alias ts-t); the projectors grow with the window and know its length',
    )
)
def tf_c(config: contrast.ConvolutionConfig) -> TFC:
    """TF-C, alias ts-t: a window and its spectrum, encoded side by side and trained to agree."""
    return TFC(contrast.configure_signals(config))


models.aliases["ts-t"] = "tf-c"
