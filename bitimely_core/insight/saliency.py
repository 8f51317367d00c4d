"""Saliency: how sensitive the loss of a run is to its output embeddings and to its input, inside
shapelets and elsewhere.

For a window x with states h of a layer, s_n = mean over d of |dL / dh_nd| (the paper's), and of the
samples s_t = mean over v of |dL / dx_tv|. L is the objective of a pre-trained run or the loss of a
fine-tuned one. Each map is normalised to sum 1 over the window. The statistic is (share of saliency
in the shapelet) / (share of the window's length in it), 1 = no preference.

At the last layer the output projection is pointwise, so the gradient at a token depends on its own
prediction only: it is a map of the loss, not of what the model used. Maps of lower layers and of
the input are attributions. Every number is compared with that of random weights, of shapelets at
random places, and of the magnitude of the signal.

Legend: S windows, B rows of a batch, T samples, V channels, N tokens, D width, L layers, R
replicates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import nn

from bitimely_core.analyses import start_page
from bitimely_core.config import ModelConfig
from bitimely_core.errors import usage_error
from bitimely_core.evaluate.intervals import explain_few
from bitimely_core.insight import regions
from bitimely_core.insight.saliency_maps import SaliencyMaps, compute_saliency, randomise_run
from bitimely_core.insight.shapelets import name_shapelets
from bitimely_core.models.tokenizers import samples_per_token
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
from bitimely_core.progress import report_progress
from bitimely_core.registry import AnalysisFacts, analyses
from bitimely_core.run import Run
from bitimely_core.tokens import Windows
from bitimely_core.train.devices import select_device

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ADVISED_WINDOWS = 20  # windows
CONTROL_WINDOWS = 64  # windows of the second and further random initialisations
SAME = 1e-4  # of the largest gradient: smaller differences are those of rounding
MASKED, DROPPED = 0.4, 0.7  # of the figure that shows three kinds of pre-training


def _place_windows(maps: SaliencyMaps, positions: Ints, count: int) -> SaliencyMaps:
    """Maps of the windows at `positions` among `count` windows, NaN for all others."""

    def place(part: Array) -> Array:
        placed = np.full((count, part.shape[1]), np.nan)
        placed[positions] = part
        return placed

    return maps._replace(
        layers=list(map(place, maps.layers)),
        input=place(maps.input),
        losses={name: place(loss) for name, loss in maps.losses.items()},
    )


@analyses(
    AnalysisFacts(
        takes="runs",
        help="Sensitivity of the loss inside shapelets: "
        "gradients at the output embeddings and the input",
    )
)
def saliency(
    runs: list[Run],
    *,
    sequences: int = 64,
    shapelets: str = "",
    lengths: str = "",
    layer: int = 0,
    masks: int = 8,
    bootstrap: int = 1000,
    seed: int = 0,
    device: str = "auto",
) -> Page:
    """Saliency inside shapelets against outside, run by run on the same held-out windows of
    signals, with three controls.

    A shapelet is present in each of the `sequences` windows; `shapelets` and `lengths` are as in
    `attention`. `layer` of the output embeddings counts from 1; 0 = the last one whose tokens have
    gradients that differ. Random masks are averaged over `masks` draws.

    Returns a page; its summary is keyed by run, then `embeddings` and `input`. Raises UserError:
    runs on different windows, events, a layer that does not exist, windows without classes and no
    --shapelets (exit 2).
    """
    windows = _common_windows(runs, layer)
    sample = regions.draw_sample(windows, shapelets, lengths, sequences, bootstrap, seed)
    chosen = sample.windows
    example = SaliencyExample(windows, sample, int(np.argmin(chosen.distance)))
    measured: dict[str, RunSaliency] = {}
    for run in runs:
        maps = _compute_all(run, chosen, example.case, masks, seed, device)
        measured[run.name] = _measure_run(run.model().config, maps, sample, layer)
    size = sample.average(sample.magnitudes)
    title = "Saliency of " + " and ".join(measured)
    page = start_page(title, runs, [chosen.split] * len(runs), seed)
    _add_notices(page, runs, measured, sample)
    facts = sample.describe()
    page.fact("Windows", f"the same for all runs, {facts['Windows']}")
    page.fact("Shapelets", facts["Shapelets"])
    tokens = (f"{name}: {part.step} samples each" for name, part in measured.items())
    page.fact("Tokens", ", ".join(tokens))
    _add_blocks(page, measured, example, size)
    names = name_shapelets(sample.shapelets)
    options = {
        "windows": len(chosen.rows),
        "subjects": chosen.n_subjects,
        "looked_through": chosen.looked,
        "split": chosen.split,
        "seed": seed,
        "bootstrap": bootstrap,
        "shapelets": [
            {"name": name, "present_in": int((chosen.which == k).sum())}
            for k, name in enumerate(names)
        ],
        "shapelets_p": sample.p,
    }
    summary: dict[str, object] = {name: part.summarize() for name, part in measured.items()}
    summary |= {"signal_size": size, "options": options}
    return page.finish(_verdict(measured, size), summary)


def _common_windows(runs: list[Run], layer: int) -> Windows:
    """The windows of all runs. Raises UserError (exit 2) where they differ, or are no signals."""
    for run in runs:
        config = run.model().config
        if config.tokenizer == "codes" or not hasattr(run.windows(), "channel_names"):
            raise usage_error(
                f"{run.name} reads events",
                "expected signals, whose samples are shown with their weight",
                field="RUN",
            )
        if not 0 <= layer <= config.layers:
            raise usage_error(f"layer {layer}", f"{run.name} has {config.layers}", field="--layer")
    if len({run.windows().fingerprint for run in runs}) > 1:
        raise usage_error(
            "runs on different windows",
            "expected the same for a comparison",
            "Give --data windows that all runs can read",
            field="--data",
        )
    return runs[0].windows()


def _compute_all(
    run: Run, chosen: regions.ShapeletWindows, case: int, masks: int, seed: int, device_name: str
) -> list[SaliencyMaps]:
    """Saliency of the trained run and of its random initialisations, the second and further ones on
    a part of the windows.
    """
    trained: Any = run.require_network().head()
    models: dict[str, tuple[nn.Module, nn.Module | None]] = {"": (run.model(), trained)}
    for k in range(regions.RANDOM_MODELS):
        models[f" with random weights {k + 1}"] = randomise_run(run, seed + k)
    every, count = np.arange(len(chosen.rows)), len(chosen.rows)
    maps: list[SaliencyMaps] = []
    device = select_device(device_name)
    for name, (model, head) in models.items():
        for module in filter(None, (model, head)):
            module.to(device)

        def report(done: int, label: str = f"saliency {run.name}{name}") -> None:
            report_progress(label, done, count)

        is_full = len(maps) < 2
        positions = every if is_full else every[:: -(-count // CONTROL_WINDOWS)]
        part = compute_saliency(
            run, model, head, chosen.rows[positions], case if is_full else -1, masks, seed, report
        )
        maps.append(_place_windows(part, positions, count))
    return maps


class LayerSaliency(NamedTuple):
    """Mean ratio at one layer."""

    trained: regions.SubjectMean
    random_weights: regions.SubjectMean


class KindSaliency(NamedTuple):
    """Saliency with respect to the embeddings or to the input."""

    ratio: Array  # [S]
    measures: regions.RegionMeasures
    with_loss: dict[str, float | None]  # rank correlation with each part of the loss

    def to_json(self) -> dict[str, object]:
        """As the summary stores it."""
        return {**self.measures._asdict(), "correlation_with_loss": self.with_loss}


class RunSaliency(NamedTuple):
    """Saliency of one run and of its random initialisations."""

    maps: SaliencyMaps
    random: list[SaliencyMaps]
    layer: int | None  # of the output embeddings, from 0
    step: int  # samples of a token
    first: int  # sample of the first token
    kinds: dict[str, KindSaliency]  # of `WORDS`
    by_layer: dict[str, LayerSaliency]

    @property
    def main(self) -> str:
        """The map of the headline: of the embeddings, where they have one."""
        return next(iter(self.kinds))

    def summarize(self) -> dict[str, object]:
        """As the summary stores it."""
        return {
            "layer": None if self.layer is None else self.layer + 1,
            "layers": len(self.maps.layers),
            "masks": self.maps.masks,
            "samples_a_token": self.step,
            **{name: kind.to_json() for name, kind in self.kinds.items()},
            "by_layer": self.by_layer,
        }


def _measure_run(
    config: ModelConfig, maps: list[SaliencyMaps], sample: regions.ShapeletSample, layer: int
) -> RunSaliency:
    """Measures of the maps of a run and of its random initialisations; `layer` of the embeddings
    counts from 1, 0: the last one whose gradients differ over time.
    """
    chosen, (trained, *random) = sample.windows, maps
    index = _choose_layer(trained, layer)
    kinds = {}
    for kind in WORDS:
        selected = [part.select(kind, index) for part in maps]
        defined = [part for part in selected if part is not None]
        if defined:
            kinds[kind] = KindSaliency(
                chosen.measure_ratios(defined[0]),
                sample.compare(defined[0], defined[1:]),
                {
                    name: regions.rank_agreement(defined[0], loss)
                    for name, loss in trained.losses.items()
                },
            )

    def average(parts: Sequence[Array]) -> regions.SubjectMean:
        return sample.average(regions.nan_mean(list(map(chosen.measure_ratios, parts))))

    by_layer: dict[str, LayerSaliency] = {}
    for layers in zip(*(part.layers for part in maps), strict=False):
        name = str(len(by_layer) + 1)
        by_layer[name] = LayerSaliency(average(layers[:1]), average(layers[1:]))
    step, first = samples_per_token(config), regions.first_sample(trained.input.shape[1], config)
    return RunSaliency(trained, random, index, step, first, kinds, by_layer)


def _choose_layer(maps: SaliencyMaps, layer: int) -> int | None:
    if 0 < layer <= len(maps.layers):
        return layer - 1
    varying = [k for k, heat in enumerate(maps.heat) if _varies_over_time(heat)]
    return max(varying, default=None)


def _varies_over_time(heat: Array) -> bool:
    """Whether the gradients [N, D] at the states of a window differ over time. A head on their mean
    over time gives all of them the same, whatever the weights are.
    """
    sizes = heat.mean(1)
    used = sizes[sizes > 0]
    return used.size > 0 and bool(np.ptp(used) > SAME * used.max())


def judge_runs(measured: Mapping[str, RunSaliency]) -> dict[tuple[str, str], regions.RegionFinding]:
    """The findings of the maps of all runs by run and kind; those of the embeddings are one family,
    those of the input a second one.
    """
    findings: dict[tuple[str, str], regions.RegionFinding] = {}
    for kind in WORDS:
        with_kind = {name: run for name, run in measured.items() if kind in run.kinds}
        findings |= regions.judge_measures(
            {(name, kind): run.kinds[kind].measures for name, run in with_kind.items()}
        )
    return findings


WORDS = {"embeddings": "output embeddings", "input": "input"}
YLABEL = "share of saliency / share of length"
HOW_TO_READ = (
    "The gradient at the output embeddings of the last layer is the paper's measure, but there the "
    "gradient of each token comes from its own prediction: it maps where the loss is large, not "
    "what the model used (see the correlation with the loss below). Maps of lower layers and of "
    "the input are attributions. A fine-tuned run that reads [SOS] or [EOS] has no gradient at the "
    "tokens of the last layer, and one that reads the mean over time has the same at all of them: "
    "the last layer whose gradients differ over time is used. Maps sum to 1 over a window; values "
    "of tokens are spread evenly over their samples. Random masks are averaged over several draws. "
    "A map that correlates with that of random weights reflects the architecture and the signal, "
    "not training."
)
WINDOWS = (
    "Share of the windows with a ratio up to the value on the axis. In the paper this distribution "
    "is higher for its model; evidence against it: curves that cross, or that coincide with that "
    "of random weights."
)
LAYERS = (
    "The ratio at every layer; bands are 95 % CI over subjects where there are enough of them. If "
    "training had moved saliency to the shapelets, the curve would differ from that of random "
    "weights."
)
CHECKS = (
    "Rank correlations of the maps, window by window. Near 1 with random weights: the map does not "
    "depend on training. Near 1 with the prediction errors of the tokens (of the part of the loss "
    "with the highest correlation): it only shows where predictions are wrong; a dash where the "
    "loss is not one of tokens. Long tokens cannot resolve the edges of a shapelet."
)
CHECK_COLUMNS = [
    "run",
    "gradient at",
    "correlation, random weights",
    "correlation, loss",
    "random places, 95 %",
    "samples a token",
    "masks",
]
CASE = (
    "The held-out window that is closest to its shapelet, with saliency in units of an even share "
    "(1), and the prediction error of each token. One window illustrates the numbers and is no "
    "evidence; it was selected by its shapelet, not by a model."
)
HEAT = (
    "|dL / dh| of each dimension (rows) at each token, each panel scaled to its largest entry, the "
    "shapelet between the dashed lines. Left: trained; right: random weights. Stripes at the same "
    "tokens in both are places where the signal is large."
)
KINDS = (
    "The same window as three kinds of pre-training read it: complete (generative), {masked} "
    "of its patches of {patch} samples set to zero (masking), {dropped} of them removed "
    "(dropping). Of the shapelet masking keeps {unmasked} and dropping {undropped} in this "
    "draw, on average {usual} and {rest}. Patches are drawn in every step, so every part "
    "of every window is seen during training: the figure shows one step and is no evidence that a "
    "model cannot learn the shapelet."
)


class SaliencyExample(NamedTuple):
    """The windows with their shapelets, and the one of them that is shown."""

    windows: Windows
    sample: regions.ShapeletSample
    case: int

    @property
    def shapelet(self) -> int:
        """Number of the shapelet in the window."""
        return int(self.sample.windows.which[self.case])

    @property
    def span(self) -> tuple[int, int]:
        """First sample of the shapelet in the window, and the first one behind it."""
        start = int(self.sample.windows.start[self.case])
        return start, start + int(self.sample.windows.length[self.case])

    def time_span(self, name: str) -> TimeSpan:
        """The shapelet in seconds."""
        return TimeSpan(*self.sample.windows.find_span(self.case, self.windows.rate), name)

    def trace(self) -> Trace:
        """The channel of the shapelet."""
        channel = self.sample.shapelets[self.shapelet].channel
        values = self.sample.batch.values[self.case, :, self.windows.channel_names.index(channel)]
        return Trace(channel, values.double().numpy())


def _add_blocks(
    page: PageBuilder,
    measured: Mapping[str, RunSaliency],
    example: SaliencyExample,
    size: regions.SubjectMean,
) -> None:
    main = {name: run.kinds[run.main].measures for name, run in measured.items()}
    regions.add_headline(page, "Saliency inside shapelets", main, size, "saliency")
    page.text(HOW_TO_READ)
    _add_tables(page, measured)
    ratios: dict[str, dict[str, Array]] = {words: {} for words in WORDS.values()}
    lines = []
    for name, run in measured.items():
        for kind, saliency_map in run.kinds.items():
            ratio = saliency_map.ratio
            ratios[WORDS[kind]][name] = ratio
            values = np.sort(ratio[np.isfinite(ratio)])
            shares = np.arange(1, len(values) + 1) / max(1, len(values))
            lines.append(Line(f"{name}, {WORDS[kind]}", values, shares))
    regions.add_differences(page, ratios, example.sample)
    plot = LinePlot(lines, xlabel=YLABEL, ylabel="share of the windows")
    page.figure("windows", "Distribution over windows", WINDOWS, plot)
    _add_layers(page, measured)
    page.section("An example")
    _add_case(page, measured, example)
    for name, run in measured.items():
        _add_heat(page, name, run, example)
    page.section("Input of three kinds of pre-training")
    _add_kinds(page, example, max(8, next(iter(measured.values())).step))


def _add_layers(page: PageBuilder, measured: Mapping[str, RunSaliency]) -> None:
    """The ratio at every layer of the runs with several."""
    lines = []
    for name, run in measured.items():
        if len(run.by_layer) > 1:
            trained, random = zip(*run.by_layer.values(), strict=True)
            lines.append(_make_layer_line(name, trained))
            lines.append(_make_layer_line(f"{name}, random weights", random))
    if lines:
        plot = LinePlot(lines, xlabel="layer", ylabel=YLABEL)
        page.figure("layers", "Saliency by layer", LAYERS, plot)


def _make_layer_line(name: str, means: Sequence[regions.SubjectMean]) -> Line:
    y, lo, hi = np.array([(mean.value, mean.lo, mean.hi) for mean in means], dtype=float).T
    band = (lo, hi) if np.isfinite(lo).any() else (None, None)
    return Line(name, np.arange(1, len(means) + 1), y, *band)


def _add_tables(page: PageBuilder, measured: Mapping[str, RunSaliency]) -> None:
    rows: list[list[object]] = []
    checks: list[list[object]] = []
    findings = judge_runs(measured)
    for name, run in measured.items():
        for kind, (_, m, with_loss) in run.kinds.items():
            is_input = kind == "input"
            where = kind if is_input else f"layer {(run.layer or 0) + 1} of {len(run.maps.layers)}"
            cells = m.cells(findings[name, kind])
            rows.append([name, where, m.ratio, m.inside_over_outside, *cells])
            places = m.random_places
            checks.append(
                [
                    name,
                    where,
                    m.correlation_with_random_weights,
                    max((value for value in with_loss.values() if value is not None), default=None),
                    places and f"{places.lo:.2f} to {places.hi:.2f}",
                    1 if is_input else run.step,
                    run.maps.masks,
                ]
            )
    columns = ["run", "gradient at", "ratio", "inside / outside", *regions.CONTROLS]
    caption = regions.describe_family(findings, "gradient")
    page.table("table", "Inside and outside", caption, columns, rows)
    page.table("checks", "Other explanations of the maps", CHECKS, CHECK_COLUMNS, checks)


def _add_case(
    page: PageBuilder, measured: Mapping[str, RunSaliency], example: SaliencyExample
) -> None:
    """The window that is shown, with the maps of all runs."""
    windows, batch, case = example.windows, example.sample.batch, example.case
    samples = batch.values.shape[1]
    traces = [example.trace()]
    for name, run in measured.items():
        for kind, words in WORDS.items():
            maps = run.maps.select(kind, run.layer)
            if maps is not None and np.isfinite(maps[case]).all():
                traces.append(Trace(name, maps[case] * samples, words.split()[-1], accent=True))
        if run.maps.losses:
            error = np.sum([part[case : case + 1] for part in run.maps.losses.values()], 0)
            traces.append(Trace(name, regions.normalise_rows(error)[0] * samples, "its loss"))
    label = regions.name_class(windows, batch, case)
    span = example.time_span(f"shapelet {example.shapelet + 1}")
    page.figure(
        "case",
        f"Window {example.sample.windows.rows[case]}" + (f", class {label}" if label else ""),
        CASE,
        TracePlot(windows.rate, traces, [span]),
    )


def _add_heat(page: PageBuilder, name: str, run: RunSaliency, example: SaliencyExample) -> None:
    """The gradient of each dimension at each token, beside that of random weights."""
    layer = run.layer
    if layer is None or layer >= len(run.random[0].heat):
        return
    # tokens of spectra follow those of samples
    count = -(-(example.windows.length - run.first) // run.step)
    panels = [maps.heat[layer][:count].T for maps in (run.maps, run.random[0])]
    values = np.stack([panel / (panel.max() or 1.0) for panel in panels]).astype(np.float32)
    edges = [(edge - run.first) / run.step - 0.5 for edge in example.span]
    plot = HeatMap(values, "token", "dimension", names=[name, "random weights"], mark=edges)
    title = f"{name}: saliency of the embeddings of layer {layer + 1}"
    page.figure(f"heat-{name}", title, HEAT, plot)


def _add_kinds(page: PageBuilder, example: SaliencyExample, patch: int) -> None:
    """The panel of the paper's first figure: one window under generative, masking and dropping
    pre-training.
    """
    x, inside = np.asarray(example.trace().values), slice(*example.span)
    patches = np.arange(len(x)) // patch
    order = np.random.default_rng([example.sample.seed, 6]).permutation(patches[-1] + 1)
    masked, dropped = (
        np.isin(patches, order[: int(share * len(order))]) for share in (MASKED, DROPPED)
    )
    shares = {
        "masked": MASKED,
        "dropped": DROPPED,
        "usual": 1 - MASKED,
        "rest": 1 - DROPPED,
        "unmasked": float(1 - masked[inside].mean()),
        "undropped": float(1 - dropped[inside].mean()),
    }
    percents = {name: f"{round(100 * share)} %" for name, share in shares.items()}
    traces = [
        Trace("generative", x),
        Trace("masking", np.where(masked, 0.0, x)),
        Trace("dropping", np.where(dropped, np.nan, x)),
    ]
    page.figure(
        "kinds",
        "One window in three kinds of pre-training",
        KINDS.format(patch=patch, **percents),
        TracePlot(example.windows.rate, traces, [example.time_span("shapelet")]),
    )


def _add_notices(
    page: PageBuilder,
    runs: list[Run],
    measured: Mapping[str, RunSaliency],
    sample: regions.ShapeletSample,
) -> None:
    page.notice(*runs[0].windows().notices)
    stamps = {run.record.leak_free for run in runs if run.head() is None}
    if False in stamps and stamps <= {False, None}:
        page.notice(
            "No run here is leak-free: where an objective can copy its targets, input saliency "
            "shows the copy. Add a run of a leak-free objective, for instance next-previous-strict."
        )
    few, count = explain_few(sample.windows.n_subjects), len(sample.windows.rows)
    if few is not None:
        page.notice(f"no CI: {few}.")
    if count < ADVISED_WINDOWS:
        page.notice(f"Means over {count} windows; {ADVISED_WINDOWS} or more are recommended.")
    page.notice(*sample.list_notices("saliency in"))
    if len({run.step for run in measured.values()}) > 1:
        page.notice(
            "The runs have tokens of different lengths; longer ones resolve the edges of a "
            "shapelet less well."
        )
    for name, run in measured.items():
        if run.layer is None:
            page.notice(
                f"{name}: its loss reads no states of complete windows, or the mean of its "
                "states over time alone, so only the input has a map."
            )


def _verdict(measured: Mapping[str, RunSaliency], size: regions.SubjectMean) -> str:
    name, run = next(iter(measured.items()))
    measures = run.kinds[run.main].measures
    if measures.ratio.value is None or measures.random_weights.value is None:
        return (
            f"The loss of {name} has no gradient on these windows, so there is nothing to compare."
        )
    finding = judge_runs(measured)[name, run.main]
    return (
        f"Inside shapelets {name} has {measures.ratio.value:.2f} times the saliency at its "
        f"{WORDS[run.main]} expected from their length ({measures.ratio.describe_interval()}): "
        f"{regions.describe_finding(measures, finding)}; the ratio of the signal's magnitude is "
        f"{size.value:.2f}."
    )
