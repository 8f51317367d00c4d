"""Training on an accelerator: the curve of the CPU to rounding, exact resume, bf16. Skipped where
there is none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bitimely_core import models, objectives
from bitimely_core.train import loop
from bitimely_core.types import Batch

DEVICE = (
    "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else None
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE is None, reason="neither CUDA nor MPS here"),
]


class Noise:
    """Two batches an epoch of fixed random windows."""

    steps, size = 2, 4

    def __call__(self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1) -> Any:
        for step in range(start, self.steps):
            draw = torch.Generator().manual_seed(epoch * self.steps + step)
            yield Batch(torch.randn(self.size, 1200, 2, generator=draw))


def trained(
    device: str, folder: Path | None = None, **options: Any
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """With tokens without dropout, whose draws are those of a device."""
    torch.manual_seed(0)
    model = models.build("bitimelygpt", preset="tiny", channels=2, length=1200, tokenizer="conv")
    config = loop.TrainConfig(epochs=2, device=device, batch_size=4, **options)
    return model, loop.fit(
        model, Noise(), objectives.get("next-previous-strict"), config=config, folder=folder
    )


def test_the_curve_is_that_of_the_cpu() -> None:
    assert DEVICE is not None
    _, here = trained(DEVICE, precision="fp32")  # which is not that of CUDA by itself
    _, there = trained("cpu")
    assert here["device"].startswith(DEVICE)
    assert here["loss"] == pytest.approx(there["loss"], rel=1e-3)


def test_bf16_stays_near() -> None:
    assert DEVICE is not None
    assert trained(DEVICE, precision="bf16")[1]["loss"] == pytest.approx(
        trained(DEVICE, precision="fp32")[1]["loss"], rel=5e-2
    )


def test_a_finished_run_is_loaded(tmp_path: Path) -> None:
    assert DEVICE is not None
    first, _ = trained(DEVICE, tmp_path)
    second, again = trained(DEVICE, tmp_path)
    assert again["resumed"] == 4
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )
