"""An objective that copies its targets.

Two forms of one objective are trained on white noise, which nobody can predict: a loss below the
variance means that the model has seen the answer. The paper's form falls, the strict one stays.
"""

import sys

import matplotlib.pyplot as plt
import numpy as np
import torch

import bitimely as bt


class NoiseBatches:
    """Fresh noise in every step."""

    steps, size = 400, 64

    def __call__(self, epoch, *, start=0, rank=0, world=1):
        """Batches of one epoch."""
        for step in range(start, self.steps):
            yield bt.Batch(
                torch.randn(self.size, 64, 1, generator=torch.Generator().manual_seed(step))
            )


figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
for name in ("next-previous", "next-previous-strict"):
    torch.manual_seed(0)
    model = bt.build_model(
        "bitimelygpt",
        preset="tiny",
        channels=1,
        length=64,
        layers=2,
        tokenizer="patch",
        patch=4,
        dropout=0.0,
    )
    lines = []
    bt.fit(model, NoiseBatches(), bt.get_objective(name), epochs=1, lr=3e-3, log=lines.append)
    curve = np.array([(line["step"], line["rel"]) for line in lines if line["split"] == "train"])
    axis.plot(*curve.T, label=name)
    print(name, f"loss / variance {curve[-5:, 1].mean():.2f} at the end")
axis.axhline(1, color="grey", lw=0.7)
axis.set(xlabel="step", ylabel="loss / variance of the target", ylim=(0, 1.3))
axis.legend()
figure.savefig(sys.argv[1])
