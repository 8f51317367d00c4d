"""Which tokens the last layers of a model attend to in held-out sequences, head by head, and how
much attention shapelets get.

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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import nn

from bitimely_core.analyses import start_page
from bitimely_core.analyses.controls import randomise_model, to_float64
from bitimely_core.errors import UserError, usage_error
from bitimely_core.insight import regions
from bitimely_core.insight.attention_maps import (
    LayerMixing,
    column_share,
    combine_pair,
    compute_last_shares,
    compute_mixings,
    last_map,
    name_heads,
    split_batch,
)
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
from bitimely_core.privacy import Sharing
from bitimely_core.progress import report_progress
from bitimely_core.registry import AnalysisFacts, analyses
from bitimely_core.run import Run
from bitimely_core.tokens import Windows
from bitimely_core.tokens.drawing import draw_held_out
from bitimely_core.types import Batch

Array = npt.NDArray[np.float64]
Limits = tuple[float, float]  # of a region of interest: seconds, of event data events


@analyses(
    AnalysisFacts(
        takes="runs",
        help="Attention maps of the last layers, head by head, "
        "and the share of attention on shapelets",
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
    limits = _check_limits(runs, start, stop)
    for run in runs:  # a model without maps is refused before shapelets are mined
        rows, _ = draw_held_out(run.windows(), 1, seed)
        compute_mixings(to_float64(run.model(), device), split_batch(run.windows(), rows)[0])
    sample, notice = None, ""
    if limits is None and windows:
        sample, notice = _find_sample(runs, windows, shapelets, lengths, bootstrap, seed)
    sequence_maps: list[SequenceAttention] = []
    on_shapelets: dict[str, ShapeletAttention] = {}
    splits = []
    for run in runs:
        drawn = _draw_sequences(run.windows(), sample, limits, sequences, seed)
        splits.append(drawn.split)
        trained = to_float64(run.model(), device)
        random = randomise_model(run.model(), seed, device)
        if sample is not None:
            others = [
                randomise_model(run.model(), seed + k, device)
                for k in range(1, regions.RANDOM_MODELS)
            ]
            on_shapelets[run.name] = _measure_on_shapelets(run, [trained, random, *others], sample)
        sequence_maps += _compute_sequences(run, trained, random, drawn)
    page = start_page("Attention of " + " and ".join(run.name for run in runs), runs, splits, seed)
    count = max(maps.number for maps in sequence_maps) + 1
    origin = f"{count} of the {', '.join(sorted(set(splits)))} split"
    page.fact("Sequences", origin + (", closest to a shapelet" if sample else ""))
    page.notice(*filter(None, [notice]))
    summary = _summarize(runs, sequence_maps, on_shapelets)
    size = None
    if sample is not None:
        page.notice(*sample.list_notices("attention on"))
        page.add_facts(sample.describe())
        size = sample.average(sample.magnitudes)
        summary["signal_size"] = size
        _add_shapelets(page, on_shapelets, sample, size)
    else:
        page.text(HOW_TO_READ)
    _add_sequences(page, sequence_maps, count, is_example=sample is not None)
    return page.finish(_verdict(sequence_maps[0], on_shapelets, size), summary)


def _check_limits(runs: list[Run], start: float | None, stop: float | None) -> Limits | None:
    """The region of interest, None without one. Raises UserError (config, exit 2) for half of one,
    and as `place_region`.
    """
    if start is None or stop is None:
        if start == stop:
            return None
        raise usage_error(
            "half a region", "expected --start together with --stop, in seconds", field="--start"
        )
    for run in runs:
        windows = run.windows()
        if hasattr(windows, "channel_names"):
            place_region(start, stop, windows.length, windows.rate or None)
    return start, stop


def _find_sample(
    runs: list[Run], count: int, folder: str, lengths: str, bootstrap: int, seed: int
) -> tuple[regions.ShapeletSample | None, str]:
    """Windows with shapelets, else a notice why there are none. Raises UserError as
    `regions.draw_sample`, where a folder of shapelets was asked for.
    """
    windows = runs[0].windows()
    is_common = len({run.windows().fingerprint for run in runs}) == 1
    try:
        if not hasattr(windows, "channel_names") or not is_common:
            raise usage_error(
                "the runs do not all read the same windows of signals", field="--shapelets"
            )
        return regions.draw_sample(windows, folder, lengths, count, bootstrap, seed), ""
    except UserError as error:
        if folder:
            raise
        requirement = f" ({error.requirement})" if error.requirement else ""
        return None, f"No shapelets: {error.problem}{requirement}."


class DrawnSequences(NamedTuple):
    """Sequences that are shown."""

    rows: npt.NDArray[np.int64]
    limits: Sequence[Limits | None]  # of the region of interest in each
    split: str


def _draw_sequences(
    windows: Windows,
    sample: regions.ShapeletSample | None,
    limits: Limits | None,
    count: int,
    seed: int,
) -> DrawnSequences:
    """The sequences closest to their shapelets, without a sample drawn ones."""
    if sample is None:
        rows, split = draw_held_out(windows, count, seed)
        return DrawnSequences(rows, [limits] * len(rows), split)
    chosen = sample.windows
    closest = np.argsort(chosen.distance, kind="stable")[:count]
    spans = [chosen.find_span(k, windows.rate) for k in closest]
    return DrawnSequences(chosen.rows[closest], spans, chosen.split)


def _compute_sequences(
    run: Run, trained: nn.Module, random: nn.Module, drawn: DrawnSequences
) -> list[SequenceAttention]:
    """The maps of a run on drawn sequences, with those of random weights."""
    sequences = []
    for k, batch in enumerate(split_batch(run.windows(), drawn.rows)):
        layers, control = compute_mixings(trained, batch), compute_mixings(random, batch)
        row, limits = int(drawn.rows[k]), drawn.limits[k]
        sequences.append(SequenceAttention(run, k, row, layers, control, batch, limits))
        report_progress(f"attention {run.name}", k + 1, len(drawn.rows))
    return sequences


class ShapeletAttention(NamedTuple):
    """Attention of one run on the shapelets."""

    ratio: Array  # [S]
    measures: regions.RegionMeasures
    heads: dict[str, regions.RegionMeasures]

    def to_json(self) -> dict[str, object]:
        """As the summary stores it."""
        return {**self.measures._asdict(), "heads": self.heads}


def _measure_on_shapelets(
    run: Run, models: list[nn.Module], sample: regions.ShapeletSample
) -> ShapeletAttention:
    """The share of attention on the shapelets of the sample, over all heads and head by head.
    `models`: the trained one, then those with random weights.
    """
    config, length, chosen = run.model().config, run.windows().length, sample.windows
    maps: list[list[Array]] = [[] for _ in models]  # S times [1 + H, T]
    for k, batch in enumerate(split_batch(run.windows(), chosen.rows)):
        for model, by_window in zip(models, maps, strict=True):
            shares = compute_last_shares(model, batch)
            spread = [regions.spread_over_samples(share, length, config) for share in shares]
            by_window.append(np.stack(spread))
        report_progress(f"shapelets {run.name}", k + 1, len(chosen.rows))
    trained, *controls = (np.stack(by_window, 1) for by_window in maps)  # [1 + H, S, T]
    measures = [
        sample.compare(head, [control[h] for control in controls]) for h, head in enumerate(trained)
    ]
    heads = {str(h): measured for h, measured in enumerate(measures) if h}
    return ShapeletAttention(chosen.measure_ratios(trained[0]), measures[0], heads)


def _summarize(
    runs: list[Run],
    sequence_maps: list[SequenceAttention],
    on_shapelets: dict[str, ShapeletAttention],
) -> dict[str, object]:
    summary: dict[str, dict[str, object]] = {run.name: {} for run in runs}
    for maps in sequence_maps:
        summary[maps.run.name][str(maps.number + 1)] = maps.summarize()
    for name, part in on_shapelets.items():
        summary[name]["shapelets"] = part.to_json()
    return dict(summary)


CORRELATION = (
    "Rank correlation with the map of random weights: near 1 the architecture and the signal "
    "explain the map."
)
BY_HEAD = "The same ratios by head; all heads of all runs are a family of their own, {tests}."


def _add_shapelets(
    page: PageBuilder,
    on_shapelets: dict[str, ShapeletAttention],
    sample: regions.ShapeletSample,
    size: regions.SubjectMean,
) -> None:
    measures = {name: part.measures for name, part in on_shapelets.items()}
    regions.add_headline(page, "Attention on shapelets", measures, size, "attention")
    page.text(HOW_TO_READ)
    columns = ["run", "ratio", "inside / outside", *regions.CONTROLS, "correlation, random weights"]
    findings = regions.judge_measures(measures)
    rows = []
    for name, m in measures.items():
        cells = [m.ratio, m.inside_over_outside, *m.cells(findings[name])]
        rows.append([name, *cells, m.correlation_with_random_weights])
    caption = f"{regions.describe_family(findings)} {CORRELATION}"
    page.table("shapelets", "Inside and outside", caption, columns, rows)
    ratios = {"all heads": {name: part.ratio for name, part in on_shapelets.items()}}
    regions.add_differences(page, ratios, sample)
    heads: dict[tuple[str, int], regions.RegionMeasures] = {}
    for name, part in on_shapelets.items():
        heads |= {(name, int(head)): measured for head, measured in part.heads.items()}
    head_findings = regions.judge_measures(heads)
    rows = [
        [*key, measured.ratio, *measured.cells(head_findings[key])]
        for key, measured in heads.items()
    ]
    caption = BY_HEAD.format(tests=regions.count_tests(head_findings))
    columns = ["run", "head", "ratio", *regions.CONTROLS]
    page.table("shapelets-heads", "Ratios by head", caption, columns, rows)


HOW_TO_READ = (
    "Entry (n, m) of a map is the weight of token m (column) in the output of token n (row). "
    "Retention maps are signed: blue adds, red subtracts; their rows have no common scale, because "
    "a normalisation follows. The share of attention is therefore computed over columns, unsigned, "
    "and sums to 1 over the sequence. Structure that the same architecture with random weights "
    "also shows was not learnt."
)
HEADS = (
    "Half of it on: the smallest share of the tokens that receives half of the attention (0.5: "
    "even). Mean distance: between query and key, weighted by the magnitude of the entry; it "
    "depends mostly on the decay γ of a head. Negative share: of the summed magnitudes."
)
HEAD_COLUMNS = [
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
MAPS = (
    "Left: trained; right: the same architecture with random weights on the same sequence, each "
    "scaled to its largest entry. Vertical stripes are tokens that many others attend to. Stripes "
    "in both panels are large values of the signal, which pass through random weights, too."
)
MAPS_BY_HEAD = (
    "The same map ({what}), one panel a head, on one scale. Below the diagonal a token reads the "
    "past, above it the future. Heads with γ near 1 have long memory; a head without structure "
    "only smooths."
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
    limits: Limits | None  # of the region of interest

    @property
    def share(self) -> Array:
        """[N]."""
        return column_share(last_map(self.layers)[0])

    @property
    def control_share(self) -> Array:
        """[N], of random weights."""
        return column_share(last_map(self.control)[0])

    @property
    def rate(self) -> float | None:
        """Hz; None where tokens are events, or months of them, which have no rate."""
        return self.run.windows().rate or None

    def over_samples(self, share: Array) -> Array:
        """[T]; for codes [N]."""
        if self.rate is None:
            return share
        return regions.spread_over_samples(
            share, self.run.windows().length, self.run.model().config
        )

    def region(self) -> RegionShare | None:
        """Attention in the region of interest."""
        if self.limits is None:
            return None
        return compare_region(self.over_samples(self.share), *self.limits, self.rate)

    def summarize(self) -> dict[str, object]:
        """Numbers of this sequence."""
        share, control, (maps, name) = self.share, self.control_share, last_map(self.layers)
        varies = share.std() > 0 and control.std() > 0
        correlation = float(np.corrcoef(share, control)[0, 1]) if varies else None
        numbers: dict[str, object] = {
            "window": self.position,
            "map": name,
            "tokens": len(share),
            "half_on": half_share(share),
            "half_on_random_weights": half_share(control),
            "correlation_with_random_weights": correlation,
            "share": share.tolist(),
            "heads": {
                str(h): {"half_on": half_share(column_share(head[None]))}
                for h, head in enumerate(maps, 1)
            },
        }
        return numbers if self.limits is None else numbers | {"region": self.region()}

    def rows(self) -> Iterator[list[object]]:
        """A row of the table a head, of the layers that the figures show."""
        depth = len(self.layers)
        is_pair = depth > 1 and combine_pair(*self.layers[-2:]) is not None
        for layer in range(depth - 1 - is_pair, depth):
            for h in range(len(self.layers[-1].map)):
                head = self._describe_head(self.layers[layer], h)
                yield [self.run.name, self.number + 1, layer + 1, h + 1, *head]

    def _describe_head(self, mixing: LayerMixing, h: int) -> list[object]:
        """The last five cells of a row."""
        signed, sizes = mixing.map[h], np.abs(mixing.map[h])
        tokens, total = np.arange(len(sizes)), sizes.sum() or 1.0
        distance = float((sizes * np.abs(np.subtract.outer(tokens, tokens))).sum() / total)
        seconds = None
        if self.rate is not None:
            seconds = distance * (self.run.windows().length / self.rate / len(self.share))
        return [
            mixing.gammas[h] if mixing.gammas else None,
            half_share(column_share(signed[None])),
            distance,
            seconds,
            float(-np.minimum(signed, 0).sum() / total),
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
    scale, unit = (1.0, "events") if rate is None else (rate, "s")
    first, end = round(start * scale), round(stop * scale)
    if 0 <= first < end <= samples:
        return first, end
    raise usage_error(
        f"{start:g} to {stop:g} {unit}",
        f"expected a part of the sequence, 0 to {samples / scale:g} {unit}",
        field="--start" if first < 0 else "--stop",
    )


def compare_region(share: Array, start: float, stop: float, rate: float | None) -> RegionShare:
    """Attention in a region against all regions of that length. Raises UserError (config, exit 2),
    as `place_region`.
    """
    first, end = place_region(start, stop, len(share), rate)
    sums = np.concatenate([[0.0], np.cumsum(share)])
    width = end - first
    every = sums[width:] - sums[: len(sums) - width]
    inside, length = float(sums[end] - sums[first]), width / len(share)
    higher = float((every > inside * (1 + 1e-9)).mean())
    return RegionShare(inside / length, inside, length, higher)


def _add_sequences(
    page: PageBuilder, sequence_maps: list[SequenceAttention], count: int, *, is_example: bool
) -> None:
    """The figures of each sequence, then the table of heads."""
    for k in range(count):
        example = ", an example" if is_example and k == 0 else ""
        page.section(f"Sequence {k + 1}{example}")
        same = [maps for maps in sequence_maps if maps.number == k]
        _add_signal(page, same)
        for maps in same:
            _add_maps(page, maps)
    page.section("Heads")
    rows = itertools.chain.from_iterable(maps.rows() for maps in sequence_maps)
    page.table("heads", "Measures by head", HEADS, HEAD_COLUMNS, rows, Sharing.OPEN)


def _add_signal(page: PageBuilder, sequence_maps: list[SequenceAttention]) -> None:
    """The signal with the share of attention of each run below it."""
    first = sequence_maps[0]
    k, windows = first.number + 1, first.run.windows()
    curves = {maps.run.name: maps.over_samples(maps.share) for maps in sequence_maps}
    curves[f"{first.run.name}, random weights"] = first.over_samples(first.control_share)
    if first.rate is None:
        lines = [Line(name, np.arange(len(y)), y) for name, y in curves.items()]
        plot = LinePlot(lines, xlabel="event", ylabel="share")
        page.figure(f"share-{k}", "Share of attention", f"{SHARE_OF_TOKENS} {NOT_LEARNT}", plot)
        return
    signal = first.batch.values[0].numpy()
    label = regions.name_class(windows, first.batch, 0)
    traces = [Trace(name, signal[:, v]) for v, name in enumerate(windows.channel_names)]
    traces += [Trace(name, y * len(y), "share / even", accent=True) for name, y in curves.items()]
    spans = [] if first.limits is None else [TimeSpan(*first.limits, "region")]
    page.figure(
        f"signal-{k}",
        "Signal and attention" + (f" (class {label})" if label else ""),
        f"Window {first.position}, normalised as the model reads it. {SHARE_OF_TOKENS} 1 is an "
        f"even share. {NOT_LEARNT}",
        TracePlot(first.rate, traces, spans),
    )


def _add_maps(page: PageBuilder, sequence: SequenceAttention) -> None:
    """The maps of one run, averaged and by head."""
    (maps, what), (random, _) = last_map(sequence.layers), last_map(sequence.control)
    name = sequence.run.name
    slug, diverging = f"{name}-{sequence.number + 1}", bool((maps < 0).any())
    means = [part.mean(0) for part in (maps, random)]
    panels = np.stack([mean / (np.abs(mean).max() or 1.0) for mean in means]).astype(np.float32)
    plot = HeatMap(panels, "key token", "query token", diverging, [name, "random weights"])
    page.figure(f"map-{slug}", f"{name}: {what}, mean over heads", MAPS, plot)
    heads = name_heads(len(maps), sequence.layers[-1].gammas)
    plot = HeatMap(maps.astype(np.float32), "key token", "query token", diverging, heads)
    page.figure(f"heads-{slug}", f"{name}: maps by head", MAPS_BY_HEAD.format(what=what), plot)


def _verdict(
    sequence: SequenceAttention,
    on_shapelets: dict[str, ShapeletAttention],
    size: regions.SubjectMean | None,
) -> str:
    """Result of the first run."""
    name, region = sequence.run.name, sequence.region()
    if size is not None:
        measures = {run: part.measures for run, part in on_shapelets.items()}
        measured, finding = measures[name], regions.judge_measures(measures)[name]
        ratio = measured.ratio
        return (
            f"Shapelets receive {ratio.value:.2f} times the attention of their length in {name} "
            f"({ratio.describe_interval()}): {regions.describe_finding(measured, finding)}; the "
            f"ratio of the signal's magnitude is {size.value:.2f}."
        )
    if region is not None:
        return (
            f"The region receives {region.ratio:.2f} times the attention of its length in {name}; "
            f"{100 * region.higher_elsewhere:.0f} % of all places of that length receive more."
        )
    trained, random = map(half_share, (sequence.share, sequence.control_share))
    return (
        f"{100 * trained:.0f} % of tokens receive half of the attention of {name} (50 % if even; "
        f"{100 * random:.0f} % with random weights)."
    )
