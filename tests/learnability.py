"""What every model learns with the product's defaults in a few hundred steps: `python
tests/learnability.py [--models A,B] [--tasks A,B] [--seeds 3]`.

Accuracies are kept in docs/models/learnability.json, one for each seed; a run measures what is
missing there, first of all models with one seed, and makes the table of docs/models/learnability.md
anew. After a change of a model `--again` measures what is named a second time.

Made-up windows of 64 samples, new ones in every step, so that nothing is learnt by heart: three
classes of frequency, three places of a motif, two levels of the mean of one channel among 4, 12 and
34. Preset `tiny`, each model's own readout, AdamW with warm-up and cosine as `finetune`, from
random weights. The accuracy is that of 300 new windows.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import torch
from torch import Generator, Tensor

from bitimely_core import heads, models, registry
from bitimely_core.train.loop import fit
from bitimely_core.types import Batch

LENGTH, ROWS, STEPS, RATE = 64, 32, 300, 1e-3
PAGE = Path(__file__).parent.parent / "docs" / "models" / "learnability.md"
CELLS = PAGE.with_suffix(".json")
Cells = dict[str, dict[str, list[float]]]  # model -> task -> accuracy of each seed
MARK = "<!-- measured by tests/learnability.py -->"

Draw = Callable[[int, Generator], tuple[Tensor, Tensor]]


def draw_frequencies(count: int, draw: Generator) -> tuple[Tensor, Tensor]:
    """Sines of about 3, 6 or 12 periods, any phase, in noise of a tenth of their power."""
    target = torch.arange(count) % 3
    periods = torch.tensor([3.0, 6.0, 12.0])[target] * (
        0.9 + 0.2 * torch.rand(count, generator=draw)
    )
    phase = 2 * math.pi * torch.rand(count, 1, generator=draw)
    wave = torch.sin(2 * math.pi * periods[:, None] * torch.arange(LENGTH) / LENGTH + phase)
    return (math.sqrt(2) * wave + 0.3 * torch.randn(count, LENGTH, generator=draw))[
        ..., None
    ], target


def draw_places(count: int, draw: Generator) -> tuple[Tensor, Tensor]:
    """The same short wave somewhere in the first, second or last third, in noise."""
    target = torch.arange(count) % 3
    centre = LENGTH * (target + 0.25 + 0.5 * torch.rand(count, generator=draw)) / 3
    away = torch.arange(LENGTH) - centre[:, None]
    motif = 3 * torch.exp(-((away / 3) ** 2) / 2) * torch.cos(0.8 * away)
    return (motif + 0.5 * torch.randn(count, LENGTH, generator=draw))[..., None], target


def draw_means(channels: int) -> Draw:
    """Noise, in which the middle one of the channels has the mean -0.5 or 0.5."""

    def draw_windows(count: int, draw: Generator) -> tuple[Tensor, Tensor]:
        target = torch.arange(count) % 2
        values = torch.randn(count, LENGTH, channels, generator=draw)
        values[..., channels // 2] += target[:, None] - 0.5
        return values, target

    return draw_windows


TASKS: dict[str, tuple[Draw, int, int, float]] = {  # channels, classes, least accuracy
    "frequency": (draw_frequencies, 1, 3, 0.8),
    "place": (draw_places, 1, 3, 0.8),
    **{f"mean of {v}": (draw_means(v), v, 2, 0.95) for v in (4, 12, 34)},
}


class TaskBatches:
    """New windows of a task in every step."""

    size = ROWS

    def __init__(self, task: str, steps: int, seed: int) -> None:
        self.draw, self.steps, self.seed = TASKS[task][0], steps, seed

    def __call__(
        self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        draw = torch.Generator().manual_seed(self.seed)
        for _ in range(start, self.steps):
            values, target = self.draw(ROWS, draw)
            yield Batch(values, target=target)


def build_head(
    name: str, task: str, seed: int, tokenizer_seed: int | None = None
) -> heads.Classifier:
    """An untrained model of preset tiny with its head; its tokenizer may be that of another
    seed.
    """
    torch.manual_seed(seed)
    _, channels, classes, _ = TASKS[task]
    # those whose start the tests compare
    tokens = {"tokenizer": "conv"} if registry.models[name].facts.tokenizer else {}
    head = heads.Classifier(
        models.build(name, preset="tiny", channels=channels, length=LENGTH, **tokens),
        outputs=classes,
    )
    if tokenizer_seed is not None:
        head.model.adapter.tokenizer.load_state_dict(
            build_head(name, task, tokenizer_seed).model.adapter.tokenizer.state_dict()
        )
    return head


def score(
    name: str,
    task: str,
    seed: int,
    steps: int = STEPS,
    *,
    tokenizer_seed: int | None = None,
    windows: int = 300,
) -> float:
    """Accuracy on new windows after `steps` steps."""
    head = build_head(name, task, seed, tokenizer_seed)
    fit(head, TaskBatches(task, steps, seed), heads.cross_entropy, epochs=1, lr=RATE, seed=seed)
    values, target = TASKS[task][0](windows, torch.Generator().manual_seed(1000 + seed))
    with torch.no_grad():
        return float((head.eval()(Batch(values)).argmax(-1) == target).double().mean())


def measure_spread(name: str, task: str, seed: int = 0) -> float:
    """Distance of the vectors of 32 windows from their mean, over their size, of the untrained
    model.
    """
    head = build_head(name, task, seed).eval()
    values, _ = TASKS[task][0](32, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        vectors = heads.compute_vectors(head.model, Batch(values), head.readout)
    return float((vectors - vectors.mean(0)).norm() / vectors.norm())


def render_table(found: Cells) -> str:
    """The lowest accuracy of the seeds, bold below the bound, and their number where it is not
    three; empty where nothing was measured.
    """

    def render_cell(name: str, task: str) -> str:
        scores = found.get(name, {}).get(task, [])
        if not scores:
            return ""
        lowest = f"{min(scores):.2f}" if min(scores) >= TASKS[task][3] else f"**{min(scores):.2f}**"
        return lowest if len(scores) == 3 else f"{lowest} ({len(scores)})"

    rows = ["| model | " + " | ".join(TASKS) + " |", "|---" * (len(TASKS) + 1) + "|"]
    rows += [
        "| " + " | ".join((name, *(render_cell(name, task) for task in TASKS))) + " |"
        for name in registry.models
    ]
    return "\n".join(rows)


def write_table(found: Cells) -> None:
    """Put the table into the page."""
    head, _, rest = PAGE.read_text().partition(MARK)
    PAGE.write_text(f"{head}{MARK}\n\n{render_table(found)}\n\n{MARK}{rest.partition(MARK)[2]}")


def read_cells(path: Path) -> Cells:
    """What was measured so far."""
    return json.loads(path.read_text()) if path.is_file() else {}


def main() -> None:
    """Measure what is missing, a cell after the other, so that a stopped run goes on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(registry.models))
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--cells",
        type=Path,
        default=CELLS,
        help="accuracies so far; of another file no table is made",
    )
    parser.add_argument(
        "--again", action="store_true", help="forget what was measured of these models and tasks"
    )
    parser.add_argument(
        "--swap",
        action="store_true",
        help="only print accuracies on 3,000 windows with the tokenizer of each seed",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    found, names, tasks = (
        read_cells(args.cells),
        args.models.split(",") if args.models else [],
        args.tasks.split(","),
    )
    if args.swap:
        for name, task, other in product(names, tasks, range(args.seeds)):
            scores = [
                score(name, task, seed, tokenizer_seed=other, windows=3000)
                for seed in range(args.seeds)
            ]
            print(
                f"{name} {task}, tokenizer of seed {other}:",
                *(f"{value:.3f}" for value in scores),
                flush=True,
            )
        return
    for name in names if args.again else []:
        found[name] = {
            task: scores for task, scores in found.get(name, {}).items() if task not in tasks
        }
    for seed in range(args.seeds):
        for name in names:
            for task in tasks:
                done = found.setdefault(name, {}).setdefault(task, [])
                if len(done) > seed:
                    continue
                done.append(round(score(name, task, seed), 4))
                print(f"{name:12} {task:10} {seed} {done[-1]:.3f}", flush=True)
                text = ",\n".join(
                    f"{json.dumps(name)}: {json.dumps(found[name])}"
                    for name in registry.models
                    if name in found
                )
                args.cells.write_text(f"{{\n{text}\n}}\n")
    if args.cells == CELLS:
        write_table(found)


if __name__ == "__main__":
    main()
