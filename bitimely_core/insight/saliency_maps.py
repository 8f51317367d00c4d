"""Computes saliency: the derivatives of the loss of a run with respect to the states of its layers
and to its input.

Legend: S windows, B rows of a batch, T samples, V channels, N tokens, D width, L layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import pad

from bitimely_core import data, heads, objectives
from bitimely_core.analyses.controls import randomise_model
from bitimely_core.insight import regions
from bitimely_core.objectives.token_objectives import Result
from bitimely_core.run import Run
from bitimely_core.types import Batch, Encoded

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
LossFunction = Callable[[Batch, Generator], Result]

ROWS = 8  # of a batch


class GradientMagnitudes(NamedTuple):
    """Magnitudes of the derivatives of the loss, of the rows of one batch. Empty `layers`: the
    objective reads no states of complete windows.
    """

    layers: list[Tensor]  # L times [B, N, D]
    input: Tensor  # [B, T, V]
    # part of the loss -> [B, N] error of the prediction from each token; {} for losses that are not
    # of tokens
    losses: dict[str, Tensor]
    drawn: bool  # the loss has random masks

    def add(self, other: GradientMagnitudes) -> GradientMagnitudes:
        """The sums over both."""
        return GradientMagnitudes(
            [a + b for a, b in zip(self.layers, other.layers, strict=True)],
            self.input + other.input,
            {name: loss + other.losses[name] for name, loss in self.losses.items()},
            self.drawn,
        )


class StatePass(NamedTuple):
    """The states of one pass through a model."""

    states: Sequence[Tensor]  # L times [B, N', D]
    encoded: Encoded | None  # what `forward` returned; None: states that `output` read

    def reduce(self, values: Iterator[Tensor], rows: int) -> list[Tensor]:
        """The next values, one tensor a state, without special positions, one row a window."""
        stripped = (_strip_special(next(values), self.encoded) for _ in self.states)
        return [_average_channels(part, rows) for part in stripped]


@contextmanager
def record_states(model: nn.Module) -> Iterator[list[StatePass]]:
    """The passes through a model inside the context, filled at its end; of models that predict
    without `forward` the first states that `output` reads.
    """
    passes: list[StatePass] = []
    outputs: list[StatePass] = []
    original: Any = getattr(model, "output", None)

    def output(hidden: Tensor, *args: Any, **options: Any) -> Any:
        outputs.append(StatePass([hidden], None))
        return original(hidden, *args, **options)

    hook = model.register_forward_hook(
        lambda module, args, encoded: passes.append(StatePass(encoded.hidden, encoded))
    )
    if original is not None:
        model.output = output  # type: ignore[assignment]
    try:
        yield passes
        passes += [] if passes else outputs[:1]
    finally:
        hook.remove()
        if original is not None:
            del model.output


def gradient_magnitudes(
    model: nn.Module, loss: LossFunction, batch: Batch, generator: Generator
) -> GradientMagnitudes:
    """|dL / dh| of every layer's states and |dL / dx|, L = loss(batch, generator)["loss"].

    Targets computed from x are constant. States are those of the real positions without [SOS] and
    [EOS]. Where an objective reads the model twice the magnitudes are added, and where the model
    reads channels one by one they are averaged.
    """
    x = batch.values.clone().requires_grad_()
    before = generator.get_state()
    with record_states(model) as passes:
        result = loss(batch._replace(values=x), generator)
    drawn = not torch.equal(before, generator.get_state())
    inputs = [x, *itertools.chain.from_iterable(part.states for part in passes)]
    slopes = torch.autograd.grad(result["loss"], inputs, allow_unused=True, materialize_grads=True)
    sizes = (slope.abs() for slope in slopes)
    gradient, rows = next(sizes), len(x)
    count = int(model.adapter.tokenizer.count(x.shape[1]))  # type: ignore[union-attr, operator]
    states = [part.reduce(sizes, rows) for part in passes]
    layers: list[Tensor] = []
    shapes = {state.shape[:2] for state in itertools.chain.from_iterable(states)}
    if shapes == {(rows, count)}:  # else states of crops or views of the windows
        layers = [torch.stack(layer).sum(0) for layer in zip(*states, strict=True)]
    return GradientMagnitudes(layers, gradient, _token_errors(result, rows, count), drawn)


def _strip_special(state: Tensor, encoded: Encoded | None) -> Tensor:
    """The states without [SOS] and [EOS], or without a leading class token."""
    if encoded is None:
        return state
    if encoded.eos is not None:
        return state[:, 1:-1]
    if encoded.mask is None:
        return state
    return state[:, max(0, state.shape[1] - encoded.mask.shape[1]) :]


def _average_channels(values: Tensor, rows: int) -> Tensor:
    """One row a window: rows of single channels, [B * V, ...], are averaged."""
    if len(values) == rows or len(values) % rows:
        return values
    return values.unflatten(0, (rows, -1)).mean(1)


def _token_errors(result: Result, rows: int, count: int) -> dict[str, Tensor]:
    """Squared errors of the predictions, [B, N] a part, at the token that predicts: its neighbour,
    or itself.
    """
    target = result["target"]
    if not result.get("slices") or target is None or target.dim() != 3:
        return {}
    valid = result["valid"]
    squares = torch.where(valid, result["prediction"].detach() - target, 0.0).square()
    error = squares.sum(-1) / valid.sum(-1).clamp(min=1)
    # columns of zeros before and after: an error stands at the neighbour that predicts
    pads = {"next": (0, 1), "previous": (1, 0)}
    errors = {}
    for name, part in result["slices"].items():
        part_error = _average_channels(error[:, part], rows)
        if part_error.shape == (rows, count):
            before, after = pads.get(name, (0, 0))
            errors[name] = pad(part_error, (before, after))[:, after : after + count]
    return errors


def loss_fn(run: Run, model: nn.Module, head: nn.Module | None) -> LossFunction:
    """The loss of a run on a batch: of its head, else of its objective."""
    if head is not None:
        loss = heads.losses[str(head.task)]
        return lambda batch, generator: loss(head, batch, generator)
    objective = objectives.get(run.record.settings.objective)
    return lambda batch, generator: objective(model, batch, generator)  # type: ignore[arg-type]


def randomise_run(run: Run, seed: int) -> tuple[nn.Module, nn.Module | None]:
    """The model of a run, and its head, with random weights; scales of targets are kept."""
    model: Any = randomise_model(run.model(), seed).float()
    with torch.no_grad():
        model.target_scale.copy_(run.model().target_scale)
    old: Any = run.head()
    if old is None:
        return model, None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = heads.build(
            model,
            task=old.task,
            outputs=old.outputs,
            readout=old.readout,
            layers=old.layers,
            layer_merge=old.layer_merge,
            context=old.context.reach if old.context else 0,
            context_clock=bool(old.context and old.context.clock),
        )
    scales = {name: part for name, part in old.state_dict().items() if name.startswith("target_")}
    head.load_state_dict(scales, strict=False)
    return model, head.eval()


class SaliencyMaps(NamedTuple):
    """Saliency of one model on all windows."""

    layers: list[Array]  # L times [S, T], each row with sum 1 (NaN: gradient 0)
    input: Array  # [S, T], likewise
    # part of the loss -> [S, T] error of the prediction from the token of each sample
    losses: dict[str, Array]
    heat: list[Array]  # L times [N, D] of the example, not normalised
    masks: int

    def select(self, kind: str, layer: int | None) -> Array | None:
        """[S, T] of the embeddings of a layer, counted from 0, or of the input."""
        if kind == "input":
            return self.input
        return None if layer is None or layer >= len(self.layers) else self.layers[layer]


def compute_saliency(
    run: Run,
    model: nn.Module,
    head: nn.Module | None,
    rows: Ints,
    case: int,
    masks: int,
    seed: int,
    report: Callable[[int], None],
) -> SaliencyMaps:
    """Saliency of windows at `rows`; random masks are averaged over `masks` draws, the same for all
    models.
    """
    loss = loss_fn(run, model, head)
    model.eval()
    config, used = run.model().config, 1
    parts: list[GradientMagnitudes] = []
    heat: list[Array] = []
    for part in np.array_split(np.arange(len(rows)), -(-len(rows) // ROWS)):
        batch = data.to_device(data.collate(run.windows(), rows[part]), data.find_device(model))
        total, used = _sum_masks(model, loss, batch, masks, 1_000_003 * seed + 1009 * int(part[0]))
        means = [state.mean(-1) for state in total.layers]
        parts.append(total._replace(layers=means, input=total.input.mean(-1)))
        if case in part:
            row = list(part).index(case)
            heat = [state[row].cpu().double().numpy() for state in total.layers]
        report(int(part[-1]) + 1)
    inputs = torch.cat([part.input for part in parts]).cpu().double().numpy()

    def spread(tokens: Sequence[Tensor]) -> Array:
        values = torch.cat(tuple(tokens)).cpu().double().numpy()
        samples = inputs.shape[1]
        return np.stack([regions.spread_over_samples(row, samples, config) for row in values])

    layers = zip(*(part.layers for part in parts), strict=True)
    return SaliencyMaps(
        [regions.normalise_rows(spread(layer)) for layer in layers],
        regions.normalise_rows(inputs),
        {name: spread([part.losses[name] for part in parts]) for name in parts[0].losses},
        heat,
        used,
    )


def _sum_masks(
    model: nn.Module, loss: LossFunction, batch: Batch, masks: int, seed: int
) -> tuple[GradientMagnitudes, int]:
    """Sums over `masks` draws of random masks, and their number; one pass for a loss without."""
    total = gradient_magnitudes(model, loss, batch, Generator().manual_seed(seed))
    if not total.drawn:
        return total, 1
    for k in range(1, masks):
        generator = Generator().manual_seed(seed + k)
        total = total.add(gradient_magnitudes(model, loss, batch, generator))
    return total, masks
