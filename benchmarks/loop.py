"""The training loop around forward and backward, preset tiny: CPU time of `fit` against a bare loop
over the same batches in the same process.

    python benchmarks/loop.py [--quick] [--json]

The bare loop does what no training can do without: forward, backward, the norm of the gradient,
AdamW. `fit` adds the prefetch, the schedule, checks for non-finite losses, the log and its
averages. One thread for the operators, both interleaved, medians of the rounds. Ceiling 1.05; exit
code 1 where it is missed (not under --quick).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator

import torch

from bitimely_core import models, objectives
from bitimely_core.config import TrainConfig
from bitimely_core.train.loop import fit, group_parameters
from bitimely_core.types import Batch

CEILING, ROWS, SAMPLES, CHANNELS = 1.05, 16, 3000, 2


class RandomBatches:
    """The same few batches over and over."""

    size = ROWS

    def __init__(self, steps: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.steps = steps
        self.held = [Batch(torch.randn(ROWS, SAMPLES, CHANNELS, generator=draw)) for _ in range(2)]

    def __call__(
        self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """One epoch."""
        yield from (self.held[step % len(self.held)] for step in range(start, self.steps))


def run_bare(batches: RandomBatches, config: TrainConfig) -> float:
    """CPU seconds of the bare loop."""
    model, objective, draw = (
        build_tiny(),
        objectives.get("next-previous"),
        torch.Generator().manual_seed(0),
    )
    optimizer = torch.optim.AdamW(group_parameters(model, config.weight_decay), lr=config.lr)
    begin = time.process_time()
    for batch in batches(0):
        optimizer.zero_grad(set_to_none=True)
        objective(model, batch, draw)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
    return time.process_time() - begin


def run_fit(batches: RandomBatches, config: TrainConfig) -> float:
    """CPU seconds of `fit`."""
    model = build_tiny()
    begin = time.process_time()
    fit(model, batches, objectives.get("next-previous"), config=config)
    return time.process_time() - begin


def build_tiny() -> models.Model:
    """The model, whose scale of the targets is known, so that `fit` does not measure it."""
    torch.manual_seed(0)
    model = models.build(
        "bitimelygpt", preset="tiny", channels=CHANNELS, length=SAMPLES, tokenizer="conv"
    ).train()
    model.target_scale.fill_(1.0)
    return model


def main() -> int:
    """Measure and print."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument(
        "--quick", action="store_true", help="2 rounds of 4 steps instead of 5 of 8"
    )
    arguments.add_argument(
        "--json", action="store_true", help="one JSON object instead of the table"
    )
    options = arguments.parse_args()
    torch.set_num_threads(1)
    rounds, steps = (2, 4) if options.quick else (5, 8)
    batches, config = RandomBatches(steps), TrainConfig(epochs=1, batch_size=ROWS, device="cpu")
    taken: dict[str, list[float]] = {"bare": [], "fit": []}
    for _ in range(rounds + 1):
        taken["bare"].append(run_bare(batches, config) / steps)
        taken["fit"].append(run_fit(batches, config) / steps)
    # the first round warms up
    median = {name: statistics.median(values[1:]) for name, values in taken.items()}
    ratio = median["fit"] / median["bare"]
    if options.json:
        print(json.dumps({"seconds_a_step": median, "ratio": ratio, "ceiling": CEILING}))
    else:
        print(
            f"bare {median['bare']:.3f} s a step, fit {median['fit']:.3f}: ratio {ratio:.3f} (<= {CEILING})"
        )
    return 0 if options.quick or ratio <= CEILING else 1


if __name__ == "__main__":
    sys.exit(main())
