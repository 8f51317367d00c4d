"""Attention figures: where the layers look in a few held-out sequences, head by head and as the share of attention each token gets.

Maps are R [N, N], row = query, column = key, in forward time order, without [SOS], [EOS] and padding. Retention maps are signed and have
no scale of their own; softmax rows sum to 1. So models are compared by the share a_m = sum_n |R_nm|, averaged over heads and normalised to
sum 1 over the sequence, and by what part of it falls on shapelets of held-out windows, over what part of the length they are. An alternating model mixes both sides in a pair of layers, shown as tril(R_forward) + triu(R_backward, 1): forward
layer L - 1, backward layer L, with the diagonal once.

Legend: H heads, N tokens, K key width of a head, T samples, L layers.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bitimely_core import data
from bitimely_core.analyses import start_page
from bitimely_core.analyses.regions import (
    RANDOM_MODELS,
    RANDOM_PLACES,
    ShapeletWindows,
    compare_with_controls,
    compare_with_first,
    describe_interval,
    describe_ratio,
    draw_held_out,
    find_shapelet_windows,
    load_shapelets,
    make_headline,
    mean_over_subjects,
    share_ratios,
    signal_magnitudes,
    spread_over_samples,
)
from bitimely_core.errors import UserError, usage_error
from bitimely_core.models.stack import Attention, Retention
from bitimely_core.ops.retention import decay_matrix
from bitimely_core.ops.rotary import rotate
from bitimely_core.page import Figure, Page, Table
from bitimely_core.registry import AnalysisFacts, analyses, models
from bitimely_core.types import Batch, Encoded, Progress

if TYPE_CHECKING:
    from bitimely_core.run import Run
    from bitimely_core.tokens import Windows

Array = npt.NDArray[np.float64]


# --- maps ---------------------------------------------------------------------------------------------------------------------------------


class LayerMixing(NamedTuple):
    """How one layer mixes the tokens of one sequence, in float64."""

    map: Array  # [H, N, N], what the layer applies
    direction: str  # forward, backward or both, as the map shows it
    queries: Array | None  # [H, N, K]; q k^T is the map without decay, mask or softmax. None: not such a layer
    keys: Array | None  # [H, N, K], times K^(-1/2)
    alone: Array | None  # [H, N, N] what is left without q and k: the decay, or the mean over the allowed keys
    key_width: int | None  # K
    gammas: tuple[float, ...]  # decay of each head; () without


def to_float64(model: nn.Module) -> nn.Module:
    """A copy of the model in float64 and eval mode: no product of maps is ever formed in less."""
    return copy.deepcopy(model).double().cpu().eval()


def randomise_model(model: nn.Module, seed: int) -> nn.Module:
    """The same architecture with random weights, in float64: the control that tells training from structure."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return to_float64(models[str(model.config.name)](model.config))  # type: ignore[union-attr]


@torch.no_grad()
def compute_mixings(model: nn.Module, batch: Batch) -> list[LayerMixing]:
    """The layers of a float64 model on a batch of one row, without special positions and padding.

    Where the model reads channels one by one a map is the mean over the channels, and there are no queries and keys of it.

    Raises:
        UserError: config (exit 2), where the model has no attention maps.
    """
    seen: list[tuple[nn.Module, Tensor, Any, str]] = []
    mixers = [m for m in model.modules() if isinstance(m, Retention | Attention)]
    hooks = [m.register_forward_pre_hook(lambda module, args: seen.append((module, *args[:3]))) for m in mixers]
    try:
        encoded = _encode_with_maps(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    assert encoded.attention is not None
    kept = _find_tokens(encoded)
    parts = seen if len(seen) == len(encoded.attention) else [None] * len(encoded.attention)
    together = zip(encoded.attention, parts, strict=True)
    return [_make_mixing(of_layer.mean(0), part if len(of_layer) == 1 else None, kept) for of_layer, part in together]


def _encode_with_maps(model: nn.Module, batch: Batch) -> Encoded:
    """What a float64 model makes of a batch, with its maps. Raises UserError (config, exit 2) where it has none."""
    wide = batch._replace(**{name: part.double() for name, part in _list_tensors(batch) if part.is_floating_point()})
    encoded: Encoded = model(wide, attention=True)
    if encoded.attention is None:
        raise usage_error(
            f"{getattr(getattr(model, 'config', None), 'name', 'the model')} has no attention maps",
            "expected a model with retention or attention layers",
            "`bitimely list models` says which have them",
        )
    return encoded


def _list_tensors(batch: Batch) -> list[tuple[str, Tensor]]:
    """The tensors that a batch has, by name."""
    return [(name, part) for name, part in batch._asdict().items() if part is not None]


def _find_tokens(encoded: Encoded) -> Tensor:
    """Indices of the real tokens among the positions of the maps, [N]."""
    assert encoded.attention is not None
    positions = encoded.attention[0].shape[-1]
    before = 1 if encoded.eos is not None else 0
    count = positions - (2 if encoded.eos is not None else 0)
    real = torch.ones(count, dtype=torch.bool) if encoded.mask is None else encoded.mask.bool().any(0)
    return torch.nonzero(real)[:, 0] + before + max(0, count - len(real))  # a class token, where a model has one, stands first


def _make_mixing(of_layer: Tensor, part: tuple[nn.Module, Tensor, Any, str] | None, kept: Tensor) -> LayerMixing:
    def chosen(maps: Tensor) -> Array:
        return maps[:, kept][:, :, kept].numpy()

    made = chosen(of_layer)
    direction = "forward" if not np.triu(made, 1).any() else "backward" if not np.tril(made, -1).any() else "both"
    if part is None:
        return LayerMixing(made, direction, None, None, None, None, ())
    module, x, places, _ = part
    if isinstance(module, Retention):
        q, k = (rotate(linear(x).unflatten(-1, (module.config.heads, -1)), places.positions) for linear in (module.query, module.key))
        decay = module.decays
        alone = decay_matrix(decay, x.shape[1], times=places.times, direction=direction, dtype=torch.float64)[0]  # type: ignore[arg-type]
        gammas = tuple(decay.exp().tolist())
    else:
        assert isinstance(module, Attention)
        q, k, _ = module.qkv(x).unflatten(-1, (3, module.heads, -1)).unbind(2)
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.float64)
        allowed = {"forward": allowed.tril(), "backward": allowed.triu(), "both": allowed}[direction]
        alone, gammas = (allowed / allowed.sum(1, keepdim=True)).expand(module.heads, -1, -1), ()
    queries, keys = (part[0].transpose(0, 1)[:, kept].numpy() for part in (q, k))
    return LayerMixing(made, direction, queries, keys * q.shape[-1] ** -0.5, chosen(alone), q.shape[-1], gammas)


def combine_pair(first: LayerMixing, second: LayerMixing) -> Array | None:
    """tril(R_f) + triu(R_b, 1) of a forward layer and the backward layer after it, [H, N, N]; None for other directions."""
    if (first.direction, second.direction) != ("forward", "backward"):
        return None
    return np.tril(first.map) + np.triu(second.map, 1)


def last_map(layers: Sequence[LayerMixing]) -> tuple[Array, str]:
    """The map that a figure of the model shows, [H, N, N], and what it is: the last pair of an alternating model, else the last layer."""
    both = combine_pair(layers[-2], layers[-1]) if len(layers) > 1 else None
    if both is not None:
        return both, f"forward layer {len(layers) - 1} and backward layer {len(layers)}"
    return layers[-1].map, f"{layers[-1].direction.replace('both', 'two-sided')} layer {len(layers)}"


def column_share(maps: Array) -> Array:
    """Share of attention that each token gets, [N], sum 1: column sums of |R| averaged over heads. From [H, N, N]."""
    mass = np.abs(maps).sum(1).mean(0)
    return mass / mass.sum() if mass.sum() > 0 else np.full(len(mass), 1 / len(mass))


@torch.no_grad()
def compute_last_shares(model: nn.Module, batch: Batch) -> Array:
    """`column_share` of the `last_map` of a float64 model on one row: over all heads, then head by head, [1 + H, N]."""
    encoded = _encode_with_maps(model, batch)
    assert encoded.attention is not None
    maps, _ = last_map([_make_mixing(of_layer.mean(0), None, _find_tokens(encoded)) for of_layer in encoded.attention[-2:]])
    return np.stack([column_share(maps), *(column_share(one[None]) for one in maps)])


# --- sequences ----------------------------------------------------------------------------------------------------------------------------


def draw_batches(windows: Windows, count: int, seed: int) -> tuple[list[Batch], npt.NDArray[np.int64], str]:
    """`held_out` windows as batches of one row each, their positions and their split."""
    rows, split = draw_held_out(windows, count, seed)
    return split_batch(windows, rows), rows, split


def split_batch(windows: Windows, rows: npt.NDArray[np.int64]) -> list[Batch]:
    """Windows as batches of one row each."""
    whole = data.collate(windows, rows)
    return [whole._replace(**{name: part[i : i + 1] for name, part in _list_tensors(whole)}) for i in range(len(rows))]


# --- the analysis -------------------------------------------------------------------------------------------------------------------------


@analyses(
    AnalysisFacts(takes="runs", help="Where the layers look: maps of the last layers, head by head, and the share that shapelets get of it")
)
def attention(
    runs: list[Run],
    *,
    sequences: int = 1,
    windows: int = 64,
    shapelets: str = "",
    lengths: str = "",
    start: float | None = None,
    stop: float | None = None,
    bootstrap: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Page:
    """Where the last layers look in a few held-out sequences, and how much of it is on shapelets, beside random weights.

    Args:
        runs: any models with attention maps; those on the same windows see the same sequences.
        sequences: how many sequences are shown: those closest to their shapelets, without shapelets drawn at random.
        windows: held-out windows in which a shapelet is present, over which the share on shapelets is averaged; 0 = no shapelets.
        shapelets: folder of a report of `analyze shapelets`; empty = mined from the training split, where the windows have classes.
        lengths: of the shapelets that are mined here, seconds, with commas between; empty: 0.5, 1 and 2, of shorter windows parts of them.
        start: seconds; with `stop` a region of interest in the place of shapelets, whose share of attention is compared with its length.
        stop: seconds.
        bootstrap: replicates of the intervals over subjects.
        seed: of the choice of sequences and of the random weights.
        progress: told about the sequences.

    Returns:
        A page; its summary is keyed by run and sequence, and `shapelets` of each run.

    Raises:
        UserError: config (exit 2) for a model without maps, half a region or --shapelets that fit no window; no_input without windows.
    """
    if (start is None) != (stop is None):
        raise usage_error("half a region", "--start goes with --stop, in seconds", field="--start")
    region, told = (None, []) if start is not None else _find_region(runs, windows, shapelets, lengths, seed, progress)
    summary: dict[str, Any] = {}
    rows: list[list[Any]] = []
    splits: list[str] = []
    found: list[_SequenceAttention] = []
    on: dict[str, _ShapeletAttention] = {}
    for run in runs:
        trained, random = to_float64(run.model()), randomise_model(run.model(), seed)
        if region is None:
            positions, split = draw_held_out(run.windows(), sequences, seed)
        else:
            positions, split = region.chosen.rows[np.argsort(region.chosen.distance, kind="stable")[:sequences]], region.chosen.split
            untaught = [random, *(randomise_model(run.model(), seed + k) for k in range(1, RANDOM_MODELS))]
            on[run.name] = _measure_on_shapelets(run, trained, untaught, region.chosen, bootstrap, seed, progress)
        splits.append(split)
        summary[run.name] = {}
        for k, (batch, position) in enumerate(zip(split_batch(run.windows(), positions), positions, strict=True)):
            shown = _SequenceAttention(run, k, int(position), compute_mixings(trained, batch), compute_mixings(random, batch), batch)
            summary[run.name][str(k + 1)] = shown.summary(*(region.span(int(position)) if region else (start, stop)))
            found.append(shown)
            rows += shown.rows()
            if progress is not None:
                progress(f"attention {run.name}", k + 1, len(positions))
        if run.name in on:
            summary[run.name]["shapelets"] = on[run.name].summary
    shown_rows = max(shown.number for shown in found) + 1
    blocks: list[Figure | Table | str] = [HOW_TO_READ]
    if region is not None:
        size = mean_over_subjects(region.loud, region.chosen.subjects, bootstrap, seed)
        summary["signal_size"] = size
        blocks = list(_shapelet_blocks(on, region, size, bootstrap, seed))
    for k in range(shown_rows):
        here = [shown for shown in found if shown.number == k]
        blocks.append(f"## Sequence {k + 1}" + (", a case" if region is not None and k == 0 else ""))
        blocks += _sequence(here, *(region.span(here[0].position) if region else (start, stop)))
    columns = ["run", "sequence", "layer", "head", "γ", "half of it on", "mean distance, tokens", "mean distance, s", "negative share"]
    blocks += ["## What each head does", Table(name="heads", title="Heads", caption=HEADS, columns=columns, rows=rows)]
    top = start_page("", runs, splits, seed)
    return Page(
        title="Where " + " and ".join(run.name for run in runs) + (" looks" if len(runs) == 1 else " look"),
        verdict=_verdict(found[0], summary, size if region is not None else None),
        notices=[*top.notices, *told],
        blocks=blocks,
        facts={
            **top.facts,
            "Sequences": f"{shown_rows} of the {', '.join(sorted(set(splits)))} split" + (", closest to a shapelet" if region else ""),
            **(region.facts if region else {}),
        },
        summary=summary,
    )


# --- shapelets ----------------------------------------------------------------------------------------------------------------------------


class _ShapeletRegion(NamedTuple):
    """Held-out windows in which a shapelet is present."""

    chosen: ShapeletWindows
    rate: float  # Hz
    loud: Array  # [S] ratio of the signal's own size
    facts: dict[str, str]

    def span(self, position: int) -> tuple[float, float]:
        """Seconds of the shapelet in the window at a position of the index."""
        at = int(np.flatnonzero(self.chosen.rows == position)[0])
        return float(self.chosen.start[at]) / self.rate, float(self.chosen.start[at] + self.chosen.length[at]) / self.rate


def _find_region(
    runs: list[Run], count: int, folder: str, lengths: str, seed: int, progress: Progress | None
) -> tuple[_ShapeletRegion | None, list[str]]:
    """The windows with their shapelets; None where there are none to speak of, and why.

    Raises:
        UserError: where a folder of shapelets was given and does not fit.
    """
    if not count:
        return None, []
    source = runs[0].windows()
    try:
        if not hasattr(source, "channel_names") or len({run.windows().fingerprint for run in runs}) > 1:
            raise usage_error("the runs do not all read the same windows of signals", field="--shapelets")
        stretches, but, chance = load_shapelets(source, folder, lengths, seed, progress)
        chosen = find_shapelet_windows(source, stretches, count, seed, but)
    except UserError as error:
        if folder:
            raise
        return None, [f"Nothing is said about shapelets: {error.problem}{f' ({error.requirement})' if error.requirement else ''}."]
    values = data.collate(source, chosen.rows).values.double().numpy()
    loud = share_ratios(signal_magnitudes(values, source, stretches, chosen), chosen.start, chosen.length)
    subjects = len(set(chosen.subjects.tolist()))
    facts = {
        "Shapelets": f"{len(stretches)}, {f'from {folder}' if folder else f'mined from {len(but)} training windows'}",
        "Windows": f"{len(chosen.rows)} of {subjects} subject{'s' * (subjects != 1)}: of {chosen.looked} looked through those among the "
        "closest tenth to a shapelet",
    }
    weak = f"The shapelets tell the classes apart no better than chance would (p = {chance or 0:.2g}): attention on them means little."
    return _ShapeletRegion(chosen, source.rate, loud, facts), [weak] if chance is not None and chance > 0.05 else []


class _ShapeletAttention(NamedTuple):
    """Attention of one run on the shapelets."""

    ratio: Array  # [S]
    summary: dict[str, Any]


def _measure_on_shapelets(
    run: Run, trained: nn.Module, untaught: list[nn.Module], chosen: ShapeletWindows, bootstrap: int, seed: int, progress: Progress | None
) -> _ShapeletAttention:
    """The share of attention on the shapelets of the chosen windows, over all heads and head by head."""
    maps: list[list[Array]] = [[] for _ in (trained, *untaught)]  # S times [1 + H, T]
    for k, batch in enumerate(split_batch(run.windows(), chosen.rows)):
        for model, of in zip((trained, *untaught), maps, strict=True):
            of.append(
                np.stack(
                    [spread_over_samples(share, run.windows().length, run.model().config) for share in compute_last_shares(model, batch)]
                )
            )
        if progress is not None:
            progress(f"shapelets {run.name}", k + 1, len(chosen.rows))
    own, *controls = (np.stack(of, 1) for of in maps)  # [1 + H, S, T]
    summary = compare_with_controls(own[0], [one[0] for one in controls], chosen, bootstrap, seed)
    heads = range(1, len(own))
    summary["heads"] = {str(h): compare_with_controls(own[h], [one[h] for one in controls], chosen, bootstrap, seed) for h in heads}
    return _ShapeletAttention(share_ratios(own[0], chosen.start, chosen.length), summary)


SHARE = (
    "Share of the attention on the shapelets over their share of the length, mean over windows: 1 is an even spread. It speaks for a model "
    "only where it is above the same model with random weights, above shapelets at random places (bar: 95 % of {places:,} draws), and above "
    "the plain size of the signal; where it is not, the model looks at shapelets no more than chance, structure or loudness make it."
)
SHARES = (
    "Random weights: mean of {controls} draws. Beyond random weights: the ratio less that, window by window. 95 % intervals by bootstrap over "
    "subjects; p: share of random places that reach the ratio. A finding about training needs a ratio beyond all draws of random weights "
    "and an interval that leaves out 0. The "
    "correlation is of ranks, with the share that random weights give; near 1 the map is the signal's and the architecture's."
)
BY_HEAD = (
    "The same head by head. The best of many heads is above random weights by luck, too: of twenty intervals one leaves out 0 by chance."
)
BETWEEN = "Ratio of the first run less that of the second on the same windows; an interval that holds 0 shows no difference."


def _shapelet_blocks(
    on: dict[str, _ShapeletAttention], region: _ShapeletRegion, size: dict[str, Any], bootstrap: int, seed: int
) -> Iterator[Figure | Table | str]:
    """The page's part on shapelets."""
    whole = {name: one.summary for name, one in on.items()}
    yield make_headline(
        whole,
        size,
        title="Attention on shapelets",
        caption=SHARE.format(places=RANDOM_PLACES),
        ylabel="share of attention / share of length",
    )
    yield HOW_TO_READ
    keys = ("ratio", "inside_over_outside", "random_weights", "beyond_random_weights", "p_places", "correlation_with_random_weights")
    columns = ["ratio", "inside / outside", "random weights", "beyond random weights", "p, random places", "correlation, random weights"]
    rows = [[name, *(one[key] for key in keys)] for name, one in whole.items()]
    yield Table(
        name="shapelets", title="Inside and outside", caption=SHARES.format(controls=RANDOM_MODELS), columns=["run", *columns], rows=rows
    )
    if len(on) > 1:
        rows = [list(row) for row in compare_with_first({name: one.ratio for name, one in on.items()}, region.chosen, bootstrap, seed)]
        columns = ["run", "against", "difference of the ratios"]
        yield Table(name="differences", title="The first run against the others", caption=BETWEEN, columns=columns, rows=rows)
    columns = ["ratio", "random weights", "beyond random weights", "p, random places"]
    rows = [
        [name, int(h), *(head[key] for key in (keys[0], *keys[2:5]))] for name, one in whole.items() for h, head in one["heads"].items()
    ]
    yield Table(name="shapelets-heads", title="Head by head", caption=BY_HEAD, columns=["run", "head", *columns], rows=rows)


# --- sequences, as they are shown ---------------------------------------------------------------------------------------------------------

HOW_TO_READ = (
    "A map says how much token n (row) takes from token m (column). Retention maps are signed: blue adds, red subtracts; their rows have "
    "no common scale, because a norm follows. The share of attention is therefore taken over columns, without sign, and sums to 1 over "
    "the sequence. The same architecture with random weights stands beside every map: what both show is structure, not learnt."
)
HEADS = (
    "Half of it on: the smallest share of the tokens that gets half of the attention (0.5: spread evenly). Mean distance: between query "
    "and key, weighted by the size of the entry; heads differ in it mostly by their decay γ. Negative share: of the summed sizes."
)
MAPS = (
    "Left: trained; right: the same architecture with random weights on the same sequence, each scaled to its largest entry. Vertical "
    "stripes are tokens that many others read. Stripes that stand in both are loud places of the signal, which pass through random "
    "weights too."
)


class _SequenceAttention(NamedTuple):
    """One sequence of one run."""

    run: Run
    number: int
    position: int
    layers: list[LayerMixing]
    control: list[LayerMixing]
    batch: Batch

    @property
    def share(self) -> Array:
        """[N]."""
        return column_share(last_map(self.layers)[0])

    @property
    def control_share(self) -> Array:
        """[N], of random weights."""
        return column_share(last_map(self.control)[0])

    @property
    def codes(self) -> bool:
        return self.run.model().config.tokenizer == "codes"

    def over_samples(self, share: Array) -> Array:
        """[T]; for codes [N]."""
        return share if self.codes else spread_over_samples(share, self.run.windows().length, self.run.model().config)

    def summary(self, start: float | None, stop: float | None) -> dict[str, Any]:
        """Numbers of this sequence."""
        share, control = self.share, self.control_share
        out = {
            "window": self.position,
            "map": last_map(self.layers)[1],
            "tokens": len(share),
            "half_on": half_share(share),
            "half_on_random_weights": half_share(control),
            "correlation_with_random_weights": float(np.corrcoef(share, control)[0, 1]) if share.std() > 0 and control.std() > 0 else None,
            "share": share.tolist(),
            "heads": {str(h + 1): {"half_on": half_share(column_share(m[None]))} for h, m in enumerate(last_map(self.layers)[0])},
        }
        if start is not None and stop is not None:
            out["region"] = compare_region(self.over_samples(share), start, stop, 1.0 if self.codes else self.run.windows().rate)
        return out

    def rows(self) -> Iterator[list[Any]]:
        """A row of the table a head, of the layers that the figures show."""
        shown = range(
            len(self.layers) - (2 if len(self.layers) > 1 and combine_pair(*self.layers[-2:]) is not None else 1), len(self.layers)
        )
        seconds = None if self.codes else self.run.windows().length / self.run.windows().rate / len(self.share)
        for layer, h in itertools.product(shown, range(len(self.layers[-1].map))):
            mixing = self.layers[layer]
            sizes = np.abs(mixing.map[h])
            n = len(sizes)
            distance = float((sizes * np.abs(np.subtract.outer(np.arange(n), np.arange(n)))).sum() / (sizes.sum() or 1.0))
            negative = float(-np.minimum(mixing.map[h], 0).sum() / (sizes.sum() or 1.0))
            gamma = mixing.gammas[h] if mixing.gammas else None
            in_seconds = None if seconds is None else distance * seconds
            yield [
                self.run.name,
                self.number + 1,
                layer + 1,
                h + 1,
                gamma,
                half_share(column_share(mixing.map[h : h + 1])),
                distance,
                in_seconds,
                negative,
            ]


def half_share(share: Array) -> float:
    """The smallest share of the tokens that together get half of the attention: 0.5 spread evenly, 1 / N all on one."""
    return float((np.cumsum(np.sort(share)[::-1]) < 0.5 * (1 - 1e-12)).sum() + 1) / len(share)


def compare_region(share: Array, start: float, stop: float, rate: float) -> dict[str, float]:
    """Attention in a region against its length, with the same length at every other place as the control.

    Returns:
        `ratio` = share of attention / share of length (1: no preference), `share`, `length`, and `higher_elsewhere`, the share of all
        places where a region of this length gets more.
    """
    a, b = (int(np.clip(round(t * rate), 0, len(share))) for t in (start, stop))
    if a >= b:
        raise usage_error(f"{start:g} to {stop:g} s", "expected a region inside the window", field="--start")
    sums = np.concatenate([[0.0], np.cumsum(share)])
    everywhere = sums[b - a :] - sums[: len(sums) - (b - a)]
    got, length = float(sums[b] - sums[a]), (b - a) / len(share)
    return {"ratio": got / length, "share": got, "length": length, "higher_elsewhere": float((everywhere > got * (1 + 1e-9)).mean())}


def _sequence(here: list[_SequenceAttention], start: float | None, stop: float | None) -> Iterator[Figure | Table]:
    """The figures of one sequence: the signal with the share below it, then the maps of each run."""
    first = here[0]
    k = first.number + 1
    series = [(s.run.name, s.over_samples(s.share)) for s in here] + [
        (f"{first.run.name}, random weights", first.over_samples(first.control_share))
    ]
    about = "Share of attention each moment gets (last layers, averaged over heads, sum 1)."
    refuted = " A share that is the same with random weights is not something the model learnt."
    if first.codes:
        lines = [{"name": name, "x": np.arange(len(y)), "y": y} for name, y in series]
        yield Figure(
            name=f"share-{k}",
            title="Share of attention",
            caption=about + refuted,
            kind="lines",
            data={"series": lines, "xlabel": "event", "ylabel": "share"},
        )
    else:
        windows = first.run.windows()
        signal = first.batch.values[0].numpy()
        channels = [{"name": name, "unit": "", "values": signal[:, v]} for v, name in enumerate(windows.channel_names)]
        curves = [{"name": name, "unit": "share / even", "values": y * len(y), "accent": True} for name, y in series]
        spans = [] if start is None or stop is None else [{"start": start, "stop": stop, "name": "region"}]
        yield Figure(
            name=f"signal-{k}",
            title=f"The signal and the attention on it{_describe_class(first)}",
            caption=f"Window {first.position}, normalised as the model reads it. {about} 1 is an even share.{refuted}",
            kind="traces",
            data={"rate": windows.rate, "signals": [*channels, *curves], "spans": spans},
        )
    for shown in here:
        made, what = last_map(shown.layers)
        random, _ = last_map(shown.control)
        slug = f"{shown.run.name}-{k}"
        axes = {"xlabel": "key token", "ylabel": "query token", "diverging": bool((made < 0).any())}
        both = np.stack([m.mean(0) / (np.abs(m.mean(0)).max() or 1.0) for m in (made, random)])
        yield Figure(
            name=f"map-{slug}",
            title=f"{shown.run.name}: {what}, mean over heads",
            caption=MAPS,
            kind="matrix",
            data={"values": both.astype(np.float32), "names": [shown.run.name, "random weights"], **axes},
        )
        gammas = shown.layers[-1].gammas
        names = [f"head {h + 1}" + (f", γ {gammas[h]:.4f}" if gammas else "") for h in range(len(made))]
        yield Figure(
            name=f"heads-{slug}",
            title=f"{shown.run.name}: head by head",
            caption=f"The same map ({what}), one panel a head, on one scale. Below the diagonal a token reads the past, above it the "
            "future. Heads with a γ near 1 reach far; a panel without structure is a head that only smooths.",
            kind="matrix",
            data={"values": made.astype(np.float32), "names": names, **axes},
        )


def _describe_class(shown: _SequenceAttention) -> str:
    """The window's class in words, where it has one."""
    windows, target = shown.run.windows(), shown.batch.target
    if target is None or windows.task != "classification":
        return ""
    return f" (class {windows.class_names[int(target[0])]})"


def _verdict(shown: _SequenceAttention, summary: dict[str, Any], size: dict[str, Any] | None) -> str:
    """What the first run does."""
    name = shown.run.name
    entry = summary[name]["1"]
    if size is not None:
        about = summary[name]["shapelets"]
        return (
            f"{name} gives shapelets {about['ratio']['value']:.2f} times the attention of their length ({describe_interval(about['ratio'])}): "
            f"{describe_ratio(about)}; the plain size of the signal has {size['value']:.2f}."
        )
    if "region" in entry:
        region = entry["region"]
        return (
            f"{name} gives the region {region['ratio']:.2f} times the attention of its length; "
            f"{100 * region['higher_elsewhere']:.0f} % of all places of that length get more."
        )
    return (
        f"Half of the attention of {name} falls on {100 * entry['half_on']:.0f} % of the tokens (an even spread would need 50 %, "
        f"the same model with random weights {100 * entry['half_on_random_weights']:.0f} %)."
    )
