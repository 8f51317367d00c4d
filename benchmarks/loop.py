"""The training loop around forward and backward, preset tiny: CPU time of `fit` against a bare loop
over the same batches in the same process.

    python benchmarks/loop.py [--quick] [--json]

The bare loop does what no training can do without: forward, backward, the norm of the gradient,
AdamW. `fit` adds the prefetch, the schedule, checks for non-finite losses, the log and its
averages. One thread for the operators, both interleaved, medians of the rounds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator

import torch
from side_by_side import Row, make_parser, report

from bitimely_core import models, objectives
from bitimely_core.config import TrainConfig
from bitimely_core.train.loop import fit
from bitimely_core.train.optimizer import group_parameters
from bitimely_core.types import Batch

ROWS, SAMPLES, CHANNELS = 16, 3000, 2


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


def measure(rounds: int, steps: int) -> Iterator[Row]:
    """`fit` beside the bare loop; the first round warms up."""
    batches, config = RandomBatches(steps), TrainConfig(epochs=1, batch_size=ROWS, device="cpu")
    taken: dict[str, list[float]] = {"bare": [], "fit": []}
    for _ in range(rounds + 1):
        taken["bare"].append(run_bare(batches, config))
        taken["fit"].append(run_fit(batches, config))
    bare, fitted = (statistics.median(values[1:]) for values in taken.values())
    yield Row(
        figure="training loop, preset tiny", peer="bare loop", value=bare / fitted, least=0.95
    )


def main() -> int:
    """Measure and print."""
    options = make_parser(__doc__, "a round of 2 steps").parse_args()
    torch.set_num_threads(1)
    rounds, steps = (1, 2) if options.quick else (5, 8)
    return report(f"{ROWS} windows a step, {steps} steps a round", measure(rounds, steps), options)


if __name__ == "__main__":
    sys.exit(main())
