"""PatchTST's masking: of each row so many patches are kept, the others are read as 0 behind the normalisation and reconstructed."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from bitimely_core.models.base import Model
from bitimely_core.objectives.tokens import Generators, MaskedConfig, Result, count_share, draw_hidden, predict_hidden
from bitimely_core.registry import ObjectiveFacts, objectives
from bitimely_core.types import Batch


def draw_patches(model: Model, batch: Batch, generators: Generators, config: MaskedConfig) -> Tensor:
    """Patches to hide: all but so many kept ones."""
    return draw_hidden(
        model, batch, generators, lambda n, generator: torch.rand(n, generator=generator).argsort()[count_share(1 - config.ratio, n) :]
    )


@objectives(ObjectiveFacts(leak_free=True, requires="hidden", config=MaskedConfig, draw=draw_patches))
def masked_patches(model: Model, batch: Batch, generator: Generator | None = None, *, config: MaskedConfig) -> Result:
    """40 % of the patches of each row masked, in each channel others where it reads them one by one; reconstruct them.

    floor(N (1 - ratio)) patches are kept, so of 8 patches at 40 % four are masked. The error is the mean over the masked patches.
    """
    return predict_hidden("masked", model, batch, lambda chosen: model(batch, hide=chosen))
