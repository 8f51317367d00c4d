"""Saliency: where the loss of a run is sensitive to its output embeddings and to its input, and whether that is where the shapelets are.

For a window x with states h of a layer, s_n = mean over d of |dL / dh_nd| (the paper's), and of the samples s_t = mean over v of
|dL / dx_tv|, L the objective of a pre-trained run or the loss of a fine-tuned one. Each map is normalised to sum 1 over the window; the
statistic is (share of saliency in the shapelet) / (share of the window's length in it), 1 = no preference.

At the last layer the output projection is pointwise: there the gradient at a token only tells how wrong its own prediction is, it is a map
of the loss and not of what the model used. Layers below, and the input, are attributions. Every number stands beside the same number
for random weights, for shapelets at random places, and for the plain size of the signal.

Legend: S windows, B rows of a batch, T samples, V channels, N tokens, D width, L layers, R replicates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Generator, Tensor, nn

from bitimely_core import data, evaluate, heads, objectives
from bitimely_core.analyses.attention import held_out, spread, untrained
from bitimely_core.analyses.shapelets import Shapelet, distances
from bitimely_core.batch import Batch, Encoded
from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.settings import ObjectiveConfig, validated

if TYPE_CHECKING:
    from bitimely_core.analyses import LoadedRun
    from bitimely_core.tokens import Windows

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Ask = Callable[[Batch, Generator], dict[str, Any]]

ROWS = 8  # of a batch
POOL = 10  # held-out windows that are looked through, per window that is kept
PRESENT = 0.1  # share of them, the closest, in which a shapelet counts as present
ENOUGH = 20  # windows
PLACES = 1000  # draws of random places
MASKED, DROPPED = 0.4, 0.7  # of the figure that shows three kinds of pre-training


# --- gradients ----------------------------------------------------------------------------------------------------------------------------


class Slopes(NamedTuple):
    """Sizes of the derivatives of the loss, of the rows of one batch. Empty `layers`: the objective reads no states of whole windows."""

    layers: list[Tensor]  # L times [B, N, D]
    input: Tensor  # [B, T, V]
    losses: Tensor | None  # [B, N] error of each token's prediction, None where there is no such thing
    drawn: bool  # the loss has random masks


def slopes(model: nn.Module, ask: Ask, batch: Batch, generator: Generator) -> Slopes:
    """|dL / dh| of every layer's states and |dL / dx|, L = ask(batch, generator)["loss"].

    States are those of the real positions without [SOS] and [EOS]; where an objective reads the model twice the sizes are added, and where
    the model reads channels one by one they are averaged. Models that predict without `forward` are read where they predict (`output`).
    """
    seen: list[Encoded] = []
    read_out: list[Tensor] = []
    whole = model.output if hasattr(model, "output") else None

    def output(hidden: Tensor, *args: Any, **named: Any) -> Any:
        read_out.append(hidden)
        return whole(hidden, *args, **named)  # type: ignore[misc]

    hook = model.register_forward_hook(lambda module, args, out: seen.append(out))
    if whole is not None:
        model.output = output  # type: ignore[assignment]
    x = batch.values.clone().requires_grad_()
    before = generator.get_state()
    try:
        result = ask(batch._replace(values=x), generator)
        drawn = not torch.equal(before, generator.get_state())
        passes = [[(state, one) for state in one.hidden] for one in seen] or [[(state, None)] for state in read_out[:1]]
        flat = [state for one in passes for state, _ in one]
        found = torch.autograd.grad(result["loss"], [x, *flat], allow_unused=True)
    finally:
        hook.remove()
        if whole is not None:
            del model.output
    sizes = iter(torch.zeros_like(state) if part is None else part.abs() for part, state in zip(found[1:], flat, strict=True))
    rows, count = len(x), _tokens(model, x)
    layers: list[Tensor] = []
    for one in passes:
        cut = [_rows(_inner(next(sizes), encoded), rows) for _, encoded in one]
        layers = cut if not layers else [a + b for a, b in zip(layers, cut, strict=True)]
    if any(len(state) != rows or state.shape[1] != count for state in layers):
        layers = []  # crops or views of the window: their tokens are not its tokens
    gradient = torch.zeros_like(x) if found[0] is None else found[0].abs()
    return Slopes(layers, gradient, _losses(result, rows, count), drawn)


def _tokens(model: nn.Module, x: Tensor) -> int:
    """N of these windows."""
    tokenizer: Any = model.adapter.tokenizer  # type: ignore[union-attr]
    return int(tokenizer.count(x.shape[1]))


def _inner(state: Tensor, encoded: Encoded | None) -> Tensor:
    """Without special positions: [SOS] and [EOS], or a class token ahead."""
    if encoded is None:
        return state
    if encoded.eos is not None:
        return state[:, 1:-1]
    return state if encoded.mask is None else state[:, max(0, state.shape[1] - encoded.mask.shape[1]) :]


def _rows(values: Tensor, rows: int) -> Tensor:
    """One row a window: channels that are rows of their own, [B * V, ...], are averaged."""
    if len(values) == rows or len(values) % rows:
        return values
    return values.unflatten(0, (rows, -1)).mean(1)


def _losses(result: dict[str, Any], rows: int, count: int) -> Tensor | None:
    """Squared error of each token's prediction, sum over the parts, [B, N]."""
    target = result["target"]
    if "slices" not in result or target.dim() != 3 or not target.is_floating_point():
        return None
    valid = result["valid"]
    error = torch.where(valid, result["prediction"].detach() - target, 0.0).square().sum(-1) / valid.sum(-1).clamp(min=1)
    parts = [error[:, part] for part in result["slices"].values()]
    if any(part.shape[1] != count for part in parts):
        return None
    found = _rows(torch.stack(parts).sum(0), rows)
    return found if len(found) == rows else None


# --- runs ---------------------------------------------------------------------------------------------------------------------------------


def asked(run: LoadedRun, model: nn.Module, head: nn.Module | None) -> Ask:
    """The loss of a run on a batch: of its head, else of its objective."""
    if head is not None:
        return lambda batch, generator: heads.losses[head.task](head, batch, generator)  # type: ignore[index, arg-type]
    stored = run.settings.get("settings", run.settings).get("objective", {})
    objective = objectives.get(validated(ObjectiveConfig, stored))
    return lambda batch, generator: objective(model, batch, generator)  # type: ignore[arg-type]


def randomised(run: LoadedRun, seed: int) -> tuple[nn.Module, nn.Module | None]:
    """The model of a run, and its head, with random weights; scales of targets are kept."""
    model: Any = untrained(run.model, seed).float()
    with torch.no_grad():
        model.target_scale.copy_(run.model.target_scale)
    if run.head is None:
        return model, None
    old: Any = run.head
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = heads.build(model, task=old.task, outputs=old.outputs, readout=old.readout, layers=old.layers, layer_merge=old.layer_merge)
    head.load_state_dict({name: value for name, value in old.state_dict().items() if name.startswith("target_")}, strict=False)
    return model, head.eval()


class Seen(NamedTuple):
    """Saliency of one model on all windows."""

    layers: list[Array]  # L times [S, T], each row sums to 1 (NaN: no gradient at all)
    input: Array  # [S, T], likewise
    losses: Array | None  # [S, T] error of the token that stands for each sample
    heat: list[Array]  # L times [N, D] of the case, before normalising
    masks: int


def look(
    run: LoadedRun, model: nn.Module, head: nn.Module | None, rows: Ints, case: int, masks: int, seed: int, told: Callable[[int], None]
) -> Seen:
    """Saliency of windows at `rows`; random masks are averaged over `masks` draws, the same for all models."""
    ask = asked(run, model, head)
    model.eval()
    config: Any = run.model.config
    layers: list[list[Array]] = []
    inputs: list[Array] = []
    losses: list[Array] | None = []
    heat: list[Array] = []
    used = 1
    for part in np.array_split(np.arange(len(rows)), -(-len(rows) // ROWS)):
        batch = data.collate(run.windows, rows[part])
        samples = batch.values.shape[1]
        total: Slopes | None = None
        for k in range(masks):
            found = slopes(model, ask, batch, Generator().manual_seed(1_000_003 * seed + 1009 * int(part[0]) + k))
            total = found if total is None else _added(total, found)
            if not found.drawn:
                break
            used = k + 1
        assert total is not None
        layers.append([_over(state.mean(-1), samples, config) for state in total.layers])
        inputs.append(_shares(total.input.mean(-1).double().numpy()))
        if losses is not None:
            losses = None if total.losses is None else [*losses, _over(total.losses, samples, config, normalised=False)]
        if case in part:
            heat = [state[list(part).index(case)].double().numpy() for state in total.layers]
        told(int(part[-1]) + 1)
    joined = [np.concatenate(of_layer) for of_layer in zip(*layers, strict=True)]
    return Seen(joined, np.concatenate(inputs), None if losses is None else np.concatenate(losses), heat, used)


def _added(a: Slopes, b: Slopes) -> Slopes:
    losses = None if a.losses is None or b.losses is None else a.losses + b.losses
    return Slopes([x + y for x, y in zip(a.layers, b.layers, strict=True)], a.input + b.input, losses, b.drawn)


def _over(tokens: Tensor, samples: int, config: Any, *, normalised: bool = True) -> Array:
    """Values of tokens [B, N] spread over the samples that they stand for, [B, T]; tokens of spectra stand for none."""
    out = np.stack([spread(row, samples, config) for row in tokens.double().numpy()])
    return _shares(out) if normalised else out


def _shares(maps: Array) -> Array:
    """Rows to sum 1; NaN where all is 0."""
    total = maps.sum(1, keepdims=True)
    return np.divide(maps, total, out=np.full_like(maps, np.nan), where=total > 0)


# --- windows and their shapelets ----------------------------------------------------------------------------------------------------------


class Chosen(NamedTuple):
    """Held-out windows in which a shapelet is present."""

    rows: Ints  # [S]
    which: Ints  # [S] number of the shapelet
    start: Ints  # [S] samples
    length: Ints  # [S]
    distance: Array  # [S], per sample
    subjects: npt.NDArray[Any]  # [S]
    split: str
    looked: int  # windows that were looked through


def present(windows: Windows, found: Sequence[Shapelet], count: int, seed: int, but: npt.NDArray[Any]) -> Chosen:
    """Up to `count` held-out windows among the tenth that is closest to some shapelet: elsewhere the closest stretch is an arbitrary place.

    Args:
        windows: all splits.
        found: the shapelets.
        count: windows to keep; drawn where more have one.
        seed: of what is drawn.
        but: rows that the shapelets were mined from.

    Raises:
        UserError: no_input, where nothing is held out; config (exit 2), where no shapelet is of a channel and rate of these windows.
    """
    names = list(windows.channel_names)
    fitting = [k for k, one in enumerate(found) if one.channel in names and one.rate == windows.rate and len(one.values) <= windows.length]
    if not fitting:
        raise UserError(
            Reason.CONFIG,
            f"no shapelet is of a channel of {windows.name} at {windows.rate:g} Hz",
            wanted=f"known are {', '.join(names)}",
            field="--shapelets",
            exit_code=Exit.USAGE,
        )
    pool, split = held_out(windows, POOL * count, seed)
    pool = pool[~np.isin(pool, but)]
    parts: dict[str, Any] = windows.arrays(pool)
    if parts.get("mask") is not None:
        whole = parts["mask"].reshape(len(pool), -1).all(1)
        pool, parts = pool[whole], {"values": parts["values"][whole]}
    if not len(pool):
        raise UserError(Reason.NO_INPUT, f"{windows.name} has no windows that the shapelets were not mined from")
    values = torch.from_numpy(np.ascontiguousarray(parts["values"]))
    rank, places, apart = (np.full((len(found), len(pool)), fill) for fill in (np.inf, -1.0, np.inf))
    for k in fitting:
        one = found[k]
        d, at = distances(values[..., names.index(one.channel)].double(), torch.from_numpy(one.values)[None])
        rank[k, np.argsort(d[0].numpy(), kind="stable")] = np.arange(len(pool))
        places[k], apart[k] = at[0].numpy(), d[0].numpy() / len(one.values)
    which = rank.argmin(0)
    here = np.flatnonzero(rank.min(0) < max(1, round(PRESENT * len(pool))))
    here = np.sort(np.random.default_rng([seed, 4]).permutation(here)[:count])
    which = which[here]
    lengths = np.array([len(found[k].values) for k in which], np.int64)
    whose = dict(zip(windows.rows.tolist(), windows.subjects().tolist(), strict=True))
    subjects = np.array([whose[row] for row in pool[here].tolist()])
    return Chosen(pool[here], which, places[which, here].astype(np.int64), lengths, apart[which, here], subjects, split, len(pool))


def ratios(maps: Array, start: Ints, length: Ints) -> Array:
    """(share of the saliency inside) / (share of the length inside) of each window, [S], from maps [S, T] that sum to 1."""
    sums = np.concatenate([np.zeros((len(maps), 1)), np.cumsum(maps, 1)], 1)
    at = np.arange(len(maps))
    return np.asarray((sums[at, start + length] - sums[at, start]) * maps.shape[1] / length)


def elsewhere(maps: Array, length: Ints, draws: int, seed: int) -> Array:
    """Mean ratio over the windows when each shapelet stands at a random place of its window, [draws]: the control."""
    rng = np.random.default_rng([seed, 5])
    known = np.isfinite(maps).all(1)
    maps, length = maps[known], length[known]
    if not len(maps):
        return np.empty(0)
    return np.array([ratios(maps, rng.integers(0, maps.shape[1] - length + 1), length).mean() for _ in range(draws)])


def over_subjects(values: Array, subjects: npt.NDArray[Any], bootstrap: int, seed: int) -> dict[str, Any]:
    """Mean over the windows [S] with its bootstrap over subjects; without an interval, why. NaN values are left out."""
    known = np.isfinite(values)
    out: dict[str, Any] = {"value": None, "se": None, "lo": None, "hi": None, "n": int(known.sum()), "n_subjects": 0}
    if not known.any():
        return {**out, "undefined_reason": "no window has a gradient"}
    names, whose = np.unique(subjects[known], return_inverse=True)
    n = len(names)
    out |= {"value": float(values[known].mean()), "n_subjects": n, "undefined_reason": None}
    if n < evaluate.MINIMUM_UNITS or bootstrap < 2:
        few = f"{n} subject{'s' * (n != 1)}, an interval needs at least {evaluate.MINIMUM_UNITS}"
        return {**out, "undefined_reason": f"no interval: {few if bootstrap > 1 else 'no bootstrap was asked for'}"}
    counts = evaluate.draw(range(bootstrap), n, seed)
    sums, sizes = (np.bincount(whose, weights, n) for weights in (values[known], np.ones(known.sum())))
    means = (counts @ sums) / (counts @ sizes)
    lo, hi = np.percentile(means, [2.5, 97.5])
    return {**out, "se": float(means.std(ddof=1)), "lo": float(lo), "hi": float(hi)}


def agreement(a: Array, b: Array) -> float | None:
    """Mean rank correlation of two sets of maps [S, T], window by window; None where none is defined."""
    found = []
    for x, y in zip(a, b, strict=True):
        if np.isfinite(x).all() and np.isfinite(y).all():
            x, y = _ranks(x), _ranks(y)
            if x.std() > 0 and y.std() > 0:
                found.append(np.corrcoef(x, y)[0, 1])
    return float(np.mean(found)) if found else None


def _ranks(x: Array) -> Array:
    """Ranks, equal values share their mean."""
    _, whose, counts = np.unique(x, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[whose], np.float64)
