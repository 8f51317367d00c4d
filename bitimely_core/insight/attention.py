"""Attention figures: which tokens the last layers attend to in held-out sequences, head by head,
and how much attention shapelets get.

Maps are R [N, N], row = query, column = key, in forward time order, without [SOS], [EOS] and
padding. Retention maps are signed and not normalised; softmax rows sum to 1. Models are therefore
compared by the share a_m = sum_n |R_nm|, averaged over heads and normalised to sum 1 over the
sequence, and by the part of it inside shapelets of held-out windows relative to their length. An
alternating model mixes both directions in a pair of layers, shown as tril(R_forward) +
triu(R_backward, 1): forward layer L - 1, backward layer L, the diagonal once.

Legend: H heads, N tokens, K key width of a head, T samples, L layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bitimely_core import data
from bitimely_core.analyses import start_page
from bitimely_core.analyses.controls import randomise_model, to_float64
from bitimely_core.data import draw_held_out
from bitimely_core.errors import UserError, usage_error
from bitimely_core.insight import regions
from bitimely_core.models.layers import Attention, Retention
from bitimely_core.ops.retention import decay_matrix
from bitimely_core.ops.rotary import rotate
from bitimely_core.page import (
    HeatMap,
    Line,
    LinePlot,
    Page,
    PageBuilder,
    TimeSpan,
    Trace,
    TracePlot,
)
from bitimely_core.registry import AnalysisFacts, analyses
from bitimely_core.run import Run
from bitimely_core.tokens import Windows
from bitimely_core.types import Batch, Encoded, Progress

Array = npt.NDArray[np.float64]


class LayerMixing(NamedTuple):
    """Map of one layer for one sequence, in float64, with the parts that it is computed from."""

    map: Array  # [H, N, N], what the layer applies
    direction: str  # forward, backward or both, by the zeros of the map
    # [H, N, K]; q k^T is the map without decay, mask or softmax. None: not such a layer
    queries: Array | None
    keys: Array | None  # [H, N, K], times K^(-1/2)
    # [H, N, N], map without q and k: the decay, or the mean over the allowed keys
    alone: Array | None
    key_width: int | None  # K
    gammas: tuple[float, ...]  # decay of each head; () without


@torch.no_grad()
def compute_mixings(model: nn.Module, batch: Batch) -> list[LayerMixing]:
    """The layers of a float64 model on a batch of one row, without special positions and padding.

    For models that read channels one by one a map is the mean over the channels, without queries
    and keys. Raises UserError: config (exit 2), where the model has no attention maps.
    """
    calls: list[tuple[nn.Module, Tensor, Any, str]] = []
    mixers = [m for m in model.modules() if isinstance(m, Retention | Attention)]
    hooks = [
        m.register_forward_pre_hook(lambda module, args: calls.append((module, *args[:3])))
        for m in mixers
    ]
    try:
        encoded = _encode_with_maps(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    assert encoded.attention is not None
    kept = _find_tokens(encoded)
    parts = calls if len(calls) == len(encoded.attention) else [None] * len(encoded.attention)
    together = zip(encoded.attention, parts, strict=True)
    return [
        _make_mixing(of_layer.mean(0), part if len(of_layer) == 1 else None, kept)
        for of_layer, part in together
    ]


def _encode_with_maps(model: nn.Module, batch: Batch) -> Encoded:
    """The states of a float64 model for a batch, with its maps. Raises UserError (config, exit 2)
    where it has none.
    """
    wide = batch._replace(
        **{name: part.double() for name, part in _list_tensors(batch) if part.is_floating_point()}
    )
    encoded: Encoded = model(data.to_device(wide, data.find_device(model)), attention=True)
    if encoded.attention is None:
        raise usage_error(
            f"{getattr(getattr(model, 'config', None), 'name', 'the model')} has no attention maps",
            "expected a model with retention or attention layers",
            "`bitimely list models` lists them",
        )
    return encoded


def _list_tensors(batch: Batch) -> list[tuple[str, Tensor]]:
    return [(name, part) for name, part in batch._asdict().items() if part is not None]


def _find_tokens(encoded: Encoded) -> Tensor:
    """Indices of the real tokens among the positions of the maps, [N]."""
    assert encoded.attention is not None
    positions = encoded.attention[0].shape[-1]
    before = 1 if encoded.eos is not None else 0
    count = positions - (2 if encoded.eos is not None else 0)
    real = (
        encoded.attention[0].new_ones(count, dtype=torch.bool)
        if encoded.mask is None
        else encoded.mask.bool().any(0)
    )
    # a class token, where a model has one, is first
    return torch.nonzero(real)[:, 0] + before + max(0, count - len(real))


def _make_mixing(
    of_layer: Tensor, part: tuple[nn.Module, Tensor, Any, str] | None, kept: Tensor
) -> LayerMixing:
    def select(maps: Tensor) -> Array:
        return maps[:, kept][:, :, kept].cpu().numpy()

    made = select(of_layer)
    direction = (
        "forward"
        if not np.triu(made, 1).any()
        else "backward"
        if not np.tril(made, -1).any()
        else "both"
    )
    if part is None:
        return LayerMixing(made, direction, None, None, None, None, ())
    module, x, places, _ = part
    if isinstance(module, Retention):
        q, k = (
            rotate(linear(x).unflatten(-1, (module.config.heads, -1)), places.positions)
            for linear in (module.query, module.key)
        )
        decay = module.decays
        alone = decay_matrix(
            decay,
            x.shape[1],
            times=places.times,
            direction=direction,  # type: ignore[arg-type]
            dtype=torch.float64,
        )[0]
        gammas = tuple(decay.exp().tolist())
    else:
        assert isinstance(module, Attention)
        q, k, _ = module.qkv(x).unflatten(-1, (3, module.heads, -1)).unbind(2)
        allowed = x.new_ones(x.shape[1], x.shape[1], dtype=torch.float64)
        allowed = {"forward": allowed.tril(), "backward": allowed.triu(), "both": allowed}[
            direction
        ]
        alone, gammas = (allowed / allowed.sum(1, keepdim=True)).expand(module.heads, -1, -1), ()
    queries, keys = (part[0].transpose(0, 1)[:, kept].cpu().numpy() for part in (q, k))
    return LayerMixing(
        made, direction, queries, keys * q.shape[-1] ** -0.5, select(alone), q.shape[-1], gammas
    )


def combine_pair(first: LayerMixing, second: LayerMixing) -> Array | None:
    """tril(R_f) + triu(R_b, 1) of a forward layer and the backward layer after it, [H, N, N]; None
    for other directions.
    """
    if (first.direction, second.direction) != ("forward", "backward"):
        return None
    return np.tril(first.map) + np.triu(second.map, 1)


def last_map(layers: Sequence[LayerMixing]) -> tuple[Array, str]:
    """The map that figures show, [H, N, N], and its name: the last pair of an alternating model,
    else the last layer.
    """
    both = combine_pair(layers[-2], layers[-1]) if len(layers) > 1 else None
    if both is not None:
        return both, f"forward layer {len(layers) - 1} and backward layer {len(layers)}"
    return layers[
        -1
    ].map, f"{layers[-1].direction.replace('both', 'two-sided')} layer {len(layers)}"


def column_share(maps: Array) -> Array:
    """Share of attention that each token gets, [N], sum 1: column sums of |R| averaged over heads.
    From [H, N, N].
    """
    mass = np.abs(maps).sum(1).mean(0)
    return mass / mass.sum() if mass.sum() > 0 else np.full(len(mass), 1 / len(mass))


@torch.no_grad()
def compute_last_shares(model: nn.Module, batch: Batch) -> Array:
    """`column_share` of the `last_map` of a float64 model on one row: over all heads, then head by
    head, [1 + H, N].
    """
    encoded = _encode_with_maps(model, batch)
    assert encoded.attention is not None
    maps, _ = last_map(
        [
            _make_mixing(of_layer.mean(0), None, _find_tokens(encoded))
            for of_layer in encoded.attention[-2:]
        ]
    )
    return np.stack([column_share(maps), *(column_share(one[None]) for one in maps)])


def draw_batches(
    windows: Windows, count: int, seed: int
) -> tuple[list[Batch], npt.NDArray[np.int64], str]:
    """Drawn held-out windows as batches of one row each, their positions and their split."""
    rows, split = draw_held_out(windows, count, seed)
    return split_batch(windows, rows), rows, split


def split_batch(windows: Windows, rows: npt.NDArray[np.int64]) -> list[Batch]:
    """Windows as batches of one row each."""
    batch = data.collate(windows, rows)
    return [
        batch._replace(**{name: part[i : i + 1] for name, part in _list_tensors(batch)})
        for i in range(len(rows))
    ]


@analyses(
    AnalysisFacts(
        takes="runs",
        help="Attention maps of the last layers, head by head, and the share of attention on shapelets",
    )
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
    device: str = "auto",
    progress: Progress | None = None,
) -> Page:
    """Attention maps of the last layers in held-out sequences, and the share of attention on
    shapelets, beside random weights.

    `runs` are any models with attention maps; those on the same windows get the same sequences.
    `sequences` of them are shown: those closest to their shapelets, without shapelets drawn at
    random. The share on shapelets is a mean over `windows` held-out windows in which one is present
    (0: no shapelets). They are those of the report of `analyze shapelets` in the folder
    `shapelets`, else mined from the training split, where the windows have classes, with `lengths`
    in seconds, separated by commas (default 0.5, 1 and 2; of shorter windows fractions of them).
    `start` and `stop` give a region of interest instead, in seconds (of event data in events),
    whose share of attention is compared with its length.

    Returns a page; its summary is keyed by run and sequence, and `shapelets` of each run. Raises
    UserError: config (exit 2) for a model without maps, half a region, one that reaches beyond a
    sequence, or --shapelets that fit no window; no_input without windows.
    """
    if (start is None) != (stop is None):
        raise usage_error(
            "half a region", "expected --start together with --stop, in seconds", field="--start"
        )
    region = (
        None
        if start is not None
        else _find_region(runs, windows, shapelets, lengths, seed, progress)
    )
    chosen = region if isinstance(region, ShapeletRegion) else None
    limits = None if start is None or stop is None else (start, stop)
    shown: list[SequenceAttention] = []
    on_shapelets: dict[str, ShapeletAttention] = {}
    splits = []
    for run in runs:
        if limits is not None and hasattr(run.windows(), "channel_names"):
            # refused before anything is computed
            place_region(*limits, run.windows().length, run.windows().rate or None)
        trained, random = (
            to_float64(run.model(), device),
            randomise_model(run.model(), seed, device),
        )
        if chosen is None:
            positions, split = draw_held_out(run.windows(), sequences, seed)
        else:
            positions, split = chosen.closest(sequences), chosen.windows.split
            controls = [
                random,
                *(
                    randomise_model(run.model(), seed + k, device)
                    for k in range(1, regions.RANDOM_MODELS)
                ),
            ]
            on_shapelets[run.name] = _measure_on_shapelets(
                run, trained, controls, chosen, bootstrap, seed, progress
            )
        splits.append(split)
        for k, (batch, position) in enumerate(
            zip(split_batch(run.windows(), positions), positions, strict=True)
        ):
            limits = chosen.span(int(position)) if chosen else limits
            layers, control = compute_mixings(trained, batch), compute_mixings(random, batch)
            shown.append(SequenceAttention(run, k, int(position), layers, control, batch, limits))
            if progress is not None:
                progress(f"attention {run.name}", k + 1, len(positions))
    page = start_page("Attention of " + " and ".join(run.name for run in runs), runs, splits, seed)
    count = max(one.number for one in shown) + 1
    page.fact(
        "Sequences",
        f"{count} of the {', '.join(sorted(set(splits)))} split"
        + (", closest to a shapelet" if chosen else ""),
    )
    summary: dict[str, dict[str, object] | regions.SubjectMean] = {}
    for run in runs:
        summary[run.name] = {
            str(one.number + 1): one.summarize() for one in shown if one.run is run
        }
        if run.name in on_shapelets:
            one = on_shapelets[run.name]
            summary[run.name]["shapelets"] = {  # type: ignore[index]
                **one.measures.to_json(),
                "heads": {h: m.to_json() for h, m in one.heads.items()},
            }
    size = None
    if isinstance(region, str):
        page.notice(region)
    if chosen is not None:
        page.notice(*chosen.notices)
        page.add_facts(chosen.facts)
        summary["signal_size"] = size = regions.mean_over_subjects(
            chosen.magnitudes, chosen.windows.subjects, bootstrap
        )
        _add_shapelets(page, on_shapelets, chosen, size, bootstrap, seed)
    else:
        page.text(HOW_TO_READ)
    for k in range(count):
        page.section(f"Sequence {k + 1}" + (", an example" if chosen and k == 0 else ""))
        _add_sequence(page, [one for one in shown if one.number == k])
    page.section("Heads")
    columns = [
        "run",
        "sequence",
        "layer",
        "head",
        "γ",
        "half of it on",
        "mean distance, tokens",
        "mean distance, s",
        "negative share",
    ]
    page.table(
        "heads", "Measures by head", HEADS, columns, (row for one in shown for row in one.rows())
    )
    return page.finish(_verdict(shown[0], on_shapelets, size), summary)


class ShapeletRegion(NamedTuple):
    """Held-out windows in which a shapelet is present."""

    windows: regions.ShapeletWindows
    rate: float  # Hz
    magnitudes: Array  # [S], ratio of the signal's magnitude
    facts: dict[str, str]
    notices: list[str]

    def closest(self, count: int) -> npt.NDArray[np.int64]:
        """Positions of the windows closest to their shapelets."""
        return self.windows.rows[np.argsort(self.windows.distance, kind="stable")[:count]]

    def span(self, position: int) -> tuple[float, float]:
        """Seconds of the shapelet in the window at a position of the index."""
        at = int(np.flatnonzero(self.windows.rows == position)[0])
        return float(self.windows.start[at]) / self.rate, float(
            self.windows.start[at] + self.windows.length[at]
        ) / self.rate


def _find_region(
    runs: list[Run], count: int, folder: str, lengths: str, seed: int, progress: Progress | None
) -> ShapeletRegion | str | None:
    """The windows with their shapelets; None for a `count` of 0; a notice where there are none."""
    if not count:
        return None
    source = runs[0].windows()
    try:
        if (
            not hasattr(source, "channel_names")
            or len({run.windows().fingerprint for run in runs}) > 1
        ):
            raise usage_error(
                "the runs do not all read the same windows of signals", field="--shapelets"
            )
        found, mined, chance = regions.load_shapelets(source, folder, lengths, seed, progress)
        chosen = regions.find_shapelet_windows(source, found, count, seed, mined)
    except UserError as error:
        if folder:
            raise
        return f"No shapelets: {error.problem}{f' ({error.requirement})' if error.requirement else ''}."
    values = data.collate(source, chosen.rows).values.double().numpy()
    magnitudes = regions.share_ratios(
        regions.signal_magnitudes(values, source, found, chosen), chosen.start, chosen.length
    )
    origin = f"from {folder}" if folder else f"mined from {len(mined)} training windows"
    facts = {"Shapelets": f"{len(found)}, {origin}", "Windows": regions.describe_windows(chosen)}
    weak = f"The shapelets do not separate the classes significantly (p = {chance or 0:.2g}), which limits what attention on them means."
    return ShapeletRegion(
        chosen,
        source.rate,
        magnitudes,
        facts,
        [weak] if chance is not None and chance > 0.05 else [],
    )


class ShapeletAttention(NamedTuple):
    """Attention of one run on the shapelets."""

    ratio: Array  # [S]
    measures: regions.RegionMeasures
    heads: dict[str, regions.RegionMeasures]


def _measure_on_shapelets(
    run: Run,
    trained: nn.Module,
    controls: list[nn.Module],
    region: ShapeletRegion,
    bootstrap: int,
    seed: int,
    progress: Progress | None,
) -> ShapeletAttention:
    """The share of attention on the shapelets of the chosen windows, over all heads and head by
    head.
    """
    config, length, chosen = run.model().config, run.windows().length, region.windows
    maps: list[list[Array]] = [[] for _ in (trained, *controls)]  # S times [1 + H, T]
    for k, batch in enumerate(split_batch(run.windows(), chosen.rows)):
        for model, of in zip((trained, *controls), maps, strict=True):
            of.append(
                np.stack(
                    [
                        regions.spread_over_samples(share, length, config)
                        for share in compute_last_shares(model, batch)
                    ]
                )
            )
        if progress is not None:
            progress(f"shapelets {run.name}", k + 1, len(chosen.rows))
    own, *others = (np.stack(of, 1) for of in maps)  # [1 + H, S, T]
    measures = [
        regions.compare_with_controls(
            own[h], [one[h] for one in others], region.magnitudes, chosen, bootstrap, seed
        )
        for h in range(len(own))
    ]
    return ShapeletAttention(
        regions.share_ratios(own[0], chosen.start, chosen.length),
        measures[0],
        {str(h): one for h, one in enumerate(measures) if h},
    )


CORRELATION = "Rank correlation with the map of random weights: near 1 the architecture and the signal explain the map."
BY_HEAD = "The same ratios by head; all heads of all runs are a family of their own, {tests}."


def _add_shapelets(
    page: PageBuilder,
    on: dict[str, ShapeletAttention],
    region: ShapeletRegion,
    size: regions.SubjectMean,
    bootstrap: int,
    seed: int,
) -> None:
    found = {name: one.measures for name, one in on.items()}
    regions.add_headline(page, "Attention on shapelets", found, size, "attention")
    page.text(HOW_TO_READ)
    columns = ["run", "ratio", "inside / outside", *regions.CONTROLS, "correlation, random weights"]
    judged = regions.judge_measures(found)
    rows = [
        [
            name,
            m.ratio,
            m.inside_over_outside,
            *m.controls(),
            *judged[name].cells(),
            m.correlation_with_random_weights,
        ]
        for name, m in found.items()
    ]
    page.table(
        "shapelets",
        "Inside and outside",
        f"{regions.describe_family(judged)} {CORRELATION}",
        columns,
        rows,
    )
    if len(on) > 1:
        rows = regions.compare_with_first(
            {"all heads": {name: one.ratio for name, one in on.items()}}, region.windows, bootstrap
        )
        page.table(
            "differences",
            "Differences to the first run",
            regions.DIFFERENCES,
            regions.DIFFERENCE_COLUMNS,
            rows,
        )
    heads = {(name, int(h)): m for name, one in on.items() for h, m in one.heads.items()}
    judged_heads = regions.judge_measures(heads)
    rows = [
        [name, h, m.ratio, *m.controls(), *judged_heads[name, h].cells()]
        for (name, h), m in heads.items()
    ]
    tests = regions.count_tests(judged_heads)
    page.table(
        "shapelets-heads",
        "Ratios by head",
        BY_HEAD.format(tests=tests),
        ["run", "head", "ratio", *regions.CONTROLS],
        rows,
    )


HOW_TO_READ = (
    "Entry (n, m) of a map is the weight of token m (column) in the output of token n (row). Retention maps are signed: blue adds, red "
    "subtracts; their rows have no common scale, because a normalisation follows. The share of attention is therefore computed over columns, "
    "unsigned, and sums to 1 over the sequence. Structure that the same architecture with random weights also shows was not learnt."
)
HEADS = (
    "Half of it on: the smallest share of the tokens that receives half of the attention (0.5: even). Mean distance: between query and key, "
    "weighted by the magnitude of the entry; it depends mostly on the decay γ of a head. Negative share: of the summed magnitudes."
)
MAPS = (
    "Left: trained; right: the same architecture with random weights on the same sequence, each scaled to its largest entry. Vertical stripes "
    "are tokens that many others attend to. Stripes in both panels are large values of the signal, which pass through random weights, too."
)
SHARE_OF_TOKENS = "Share of attention of each moment (last layers, averaged over heads, sum 1)."
NOT_LEARNT = "A share that random weights show, too, was not learnt."


class RegionShare(NamedTuple):
    """Attention in a region against its length, with regions of that length at all other places as
    the control.
    """

    ratio: float  # share / length, 1: no preference
    share: float  # of attention
    length: float  # share of the sequence
    higher_elsewhere: float  # share of all places with more attention


class SequenceAttention(NamedTuple):
    """One sequence of one run."""

    run: Run
    number: int
    position: int
    layers: list[LayerMixing]
    control: list[LayerMixing]
    batch: Batch
    limits: tuple[float, float] | None  # seconds of a region of interest

    @property
    def share(self) -> Array:
        """[N]."""
        return column_share(last_map(self.layers)[0])

    @property
    def control_share(self) -> Array:
        """[N], of random weights."""
        return column_share(last_map(self.control)[0])

    @property
    def has_events(self) -> bool:
        """Whether the tokens are events, or months of them, which have no rate."""
        return not self.run.windows().rate

    def over_samples(self, share: Array) -> Array:
        """[T]; for codes [N]."""
        return (
            share
            if self.has_events
            else regions.spread_over_samples(
                share, self.run.windows().length, self.run.model().config
            )
        )

    def region(self) -> RegionShare | None:
        """Attention in the region of interest."""
        if self.limits is None:
            return None
        return compare_region(
            self.over_samples(self.share),
            *self.limits,
            None if self.has_events else self.run.windows().rate,
        )

    def summarize(self) -> dict[str, object]:
        """Numbers of this sequence."""
        share, control, (maps, name) = self.share, self.control_share, last_map(self.layers)
        is_defined = share.std() > 0 and control.std() > 0
        out: dict[str, object] = {
            "window": self.position,
            "map": name,
            "tokens": len(share),
            "half_on": half_share(share),
            "half_on_random_weights": half_share(control),
            "correlation_with_random_weights": float(np.corrcoef(share, control)[0, 1])
            if is_defined
            else None,
            "share": share.tolist(),
            "heads": {
                str(h + 1): {"half_on": half_share(column_share(one[None]))}
                for h, one in enumerate(maps)
            },
        }
        return out if self.limits is None else out | {"region": self.region()}

    def rows(self) -> Iterator[list[object]]:
        """A row of the table a head, of the layers that the figures show."""
        depth = len(self.layers)
        first = depth - (2 if depth > 1 and combine_pair(*self.layers[-2:]) is not None else 1)
        seconds = (
            None
            if self.has_events
            else self.run.windows().length / self.run.windows().rate / len(self.share)
        )
        for layer, h in itertools.product(range(first, depth), range(len(self.layers[-1].map))):
            mixing = self.layers[layer]
            signed, sizes = mixing.map[h], np.abs(mixing.map[h])
            n, total = len(sizes), sizes.sum() or 1.0
            distance = float(
                (sizes * np.abs(np.subtract.outer(np.arange(n), np.arange(n)))).sum() / total
            )
            half = half_share(column_share(signed[None]))
            gamma = mixing.gammas[h] if mixing.gammas else None
            in_seconds = None if seconds is None else distance * seconds
            negative = float(-np.minimum(signed, 0).sum() / total)
            yield [
                self.run.name,
                self.number + 1,
                layer + 1,
                h + 1,
                gamma,
                half,
                distance,
                in_seconds,
                negative,
            ]


def half_share(share: Array) -> float:
    """The smallest share of the tokens that receives half of the attention: 0.5 if even, 1 / N if
    on one token.
    """
    return float((np.cumsum(np.sort(share)[::-1]) < 0.5 * (1 - 1e-12)).sum() + 1) / len(share)


def place_region(start: float, stop: float, samples: int, rate: float | None) -> tuple[int, int]:
    """First sample of a region and the first one after it, of times in seconds; without `rate` in
    events.

    Raises UserError (config, exit 2) for a region that is empty or reaches beyond the sequence.
    """
    first, end = round(start * (rate or 1.0)), round(stop * (rate or 1.0))
    unit, longest = ("events", samples) if rate is None else ("s", samples / rate)
    if first < 0 or end > samples:
        field = "--start" if first < 0 else "--stop"
        raise usage_error(
            f"{start:g} to {stop:g} {unit}",
            f"expected a part of the sequence, 0 to {longest:g} {unit}",
            field=field,
        )
    if first >= end:
        raise usage_error(
            f"{start:g} to {stop:g} {unit}", "expected a stop after the start", field="--stop"
        )
    return first, end


def compare_region(share: Array, start: float, stop: float, rate: float | None) -> RegionShare:
    """Attention in a region against all regions of that length. Raises UserError (config, exit 2),
    as `place_region`.
    """
    a, b = place_region(start, stop, len(share), rate)
    sums = np.concatenate([[0.0], np.cumsum(share)])
    all_places = sums[b - a :] - sums[: len(sums) - (b - a)]
    inside, length = float(sums[b] - sums[a]), (b - a) / len(share)
    return RegionShare(
        inside / length, inside, length, float((all_places > inside * (1 + 1e-9)).mean())
    )


def _add_sequence(page: PageBuilder, shown: list[SequenceAttention]) -> None:
    """The figures of one sequence: the signal with the share below it, then the maps of each
    run.
    """
    first = shown[0]
    k = first.number + 1
    curves = [(one.run.name, one.over_samples(one.share)) for one in shown]
    curves.append((f"{first.run.name}, random weights", first.over_samples(first.control_share)))
    if first.has_events:
        lines = [Line(name, np.arange(len(y)), y) for name, y in curves]
        plot = LinePlot(lines, xlabel="event", ylabel="share")
        page.figure(f"share-{k}", "Share of attention", f"{SHARE_OF_TOKENS} {NOT_LEARNT}", plot)
    else:
        windows, signal = first.run.windows(), first.batch.values[0].numpy()
        label = regions.name_class(windows, first.batch, 0)
        traces = [Trace(name, signal[:, v]) for v, name in enumerate(windows.channel_names)]
        traces += [Trace(name, y * len(y), "share / even", accent=True) for name, y in curves]
        spans = [] if first.limits is None else [TimeSpan(*first.limits, "region")]
        page.figure(
            f"signal-{k}",
            "Signal and attention" + (f" (class {label})" if label else ""),
            f"Window {first.position}, normalised as the model reads it. {SHARE_OF_TOKENS} 1 is an even share. {NOT_LEARNT}",
            TracePlot(windows.rate, traces, spans),
        )
    for one in shown:
        maps, what = last_map(one.layers)
        random, _ = last_map(one.control)
        name, slug, diverging = one.run.name, f"{one.run.name}-{k}", bool((maps < 0).any())
        both = np.stack(
            [m.mean(0) / (np.abs(m.mean(0)).max() or 1.0) for m in (maps, random)]
        ).astype(np.float32)
        maps_plot = HeatMap(both, "key token", "query token", diverging, [name, "random weights"])
        page.figure(f"map-{slug}", f"{name}: {what}, mean over heads", MAPS, maps_plot)
        gammas = one.layers[-1].gammas
        heads = [
            f"head {h + 1}" + (f", γ {gammas[h]:.4f}" if gammas else "") for h in range(len(maps))
        ]
        page.figure(
            f"heads-{slug}",
            f"{name}: maps by head",
            f"The same map ({what}), one panel a head, on one scale. Below the diagonal a token reads the past, above it the future. Heads with "
            "γ near 1 have long memory; a head without structure only smooths.",
            HeatMap(maps.astype(np.float32), "key token", "query token", diverging, heads),
        )


def _verdict(
    shown: SequenceAttention, on: dict[str, ShapeletAttention], size: regions.SubjectMean | None
) -> str:
    """Result of the first run."""
    name, region = shown.run.name, shown.region()
    if name in on and size is not None:
        measures = {run: one.measures for run, one in on.items()}
        ratio, found = (
            measures[name].ratio,
            regions.describe_finding(measures[name], regions.judge_measures(measures)[name]),
        )
        return (
            f"Shapelets receive {ratio.value:.2f} times the attention of their length in {name} ({ratio.describe_interval()}): "
            f"{found}; the ratio of the signal's magnitude is {size.value:.2f}."
        )
    if region is not None:
        return (
            f"The region receives {region.ratio:.2f} times the attention of its length in {name}; "
            f"{100 * region.higher_elsewhere:.0f} % of all places of that length receive more."
        )
    return (
        f"{100 * half_share(shown.share):.0f} % of tokens receive half of the attention of {name} (50 % if even; "
        f"{100 * half_share(shown.control_share):.0f} % with random weights)."
    )
