"""Saliency: sensitivity of the loss of a run to its output embeddings and to its input, inside
shapelets and elsewhere.

For a window x with states h of a layer, s_n = mean over d of |dL / dh_nd| (the paper's), and of the
samples s_t = mean over v of
|dL / dx_tv|, L the objective of a pre-trained run or the loss of a fine-tuned one. Each map is normalised to sum 1 over the window; the
statistic is (share of saliency in the shapelet) / (share of the window's length in it), 1 = no
preference.

At the last layer the output projection is pointwise, so the gradient at a token depends on its own
prediction only: it is a map of the loss, not of what the model used. Maps of lower layers and of
the input are attributions. Every number is compared with that of random weights, of shapelets at
random places, and of the magnitude of the signal.

Legend: S windows, B rows of a batch, T samples, V channels, N tokens, D width, L layers, R
replicates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Generator, Tensor, nn

from bitimely_core import data, evaluate, heads, objectives
from bitimely_core.analyses import start_page
from bitimely_core.analyses.controls import randomise_model
from bitimely_core.config import ModelConfig
from bitimely_core.errors import usage_error
from bitimely_core.insight import regions
from bitimely_core.insight.shapelet_mining import Shapelet
from bitimely_core.insight.shapelets import name_shapelets
from bitimely_core.models.tokenizers import samples_per_token
from bitimely_core.objectives.tokens import Result
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
from bitimely_core.train.devices import select_device
from bitimely_core.types import Batch, Encoded, Progress

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
LossFunction = Callable[[Batch, Generator], Result]

ROWS = 8  # of a batch
ADVISED_WINDOWS = 20  # windows
CONTROL_WINDOWS = 64  # windows of the second and further random initialisations
MASKED, DROPPED = 0.4, 0.7  # of the figure that shows three kinds of pre-training


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


def gradient_magnitudes(
    model: nn.Module, loss: LossFunction, batch: Batch, generator: Generator
) -> GradientMagnitudes:
    """|dL / dh| of every layer's states and |dL / dx|, L = loss(batch, generator)["loss"]. Targets computed from x are constant.

    States are those of the real positions without [SOS] and [EOS]; where an objective reads the
    model twice the magnitudes are added, and where the model reads channels one by one they are
    averaged. Models that predict without `forward` are read at `output`.
    """
    encodings: list[Encoded] = []
    outputs: list[Tensor] = []
    original: Any = getattr(model, "output", None)

    def output(hidden: Tensor, *args: Any, **options: Any) -> Any:
        outputs.append(hidden)
        return original(hidden, *args, **options)

    hook = model.register_forward_hook(lambda module, args, out: encodings.append(out))
    if original is not None:
        model.output = output  # type: ignore[assignment]
    x = batch.values.clone().requires_grad_()
    before = generator.get_state()
    try:
        result = loss(batch._replace(values=x), generator)
        drawn = not torch.equal(before, generator.get_state())
        passes: list[list[tuple[Tensor, Encoded | None]]] = [
            [(state, one) for state in one.hidden] for one in encodings
        ]
        passes = passes or [[(state, None)] for state in outputs[:1]]
        flat = [state for one in passes for state, _ in one]
        found = torch.autograd.grad(result["loss"], [x, *flat], allow_unused=True)
    finally:
        hook.remove()
        if original is not None:
            del model.output
    sizes = iter(
        torch.zeros_like(state) if part is None else part.abs()
        for part, state in zip(found[1:], flat, strict=True)
    )
    rows, count = len(x), int(model.adapter.tokenizer.count(x.shape[1]))  # type: ignore[union-attr, operator]
    states = [
        [_average_channels(_strip_special(next(sizes), encoded), rows) for _, encoded in one]
        for one in passes
    ]
    # else crops or views of the windows
    is_complete = all(state.shape[:2] == (rows, count) for one in states for state in one)
    layers = (
        [torch.stack(of_layer).sum(0) for of_layer in zip(*states, strict=True)]
        if is_complete
        else []
    )
    gradient = torch.zeros_like(x) if found[0] is None else found[0].abs()
    return GradientMagnitudes(layers, gradient, _token_errors(result, rows, count), drawn)


def _strip_special(state: Tensor, encoded: Encoded | None) -> Tensor:
    """The states without [SOS] and [EOS], or without a leading class token."""
    if encoded is None:
        return state
    if encoded.eos is not None:
        return state[:, 1:-1]
    return (
        state
        if encoded.mask is None
        else state[:, max(0, state.shape[1] - encoded.mask.shape[1]) :]
    )


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
    error = torch.where(valid, result["prediction"].detach() - target, 0.0).square().sum(
        -1
    ) / valid.sum(-1).clamp(min=1)
    out = {}
    for name, part in result["slices"].items():
        of_part = _average_channels(error[:, part], rows)
        if of_part.shape == (rows, count):
            before, after = torch.zeros_like(of_part[:, :1]), torch.zeros_like(of_part[:, :1])
            shifted = {
                "next": torch.cat((of_part[:, 1:], after), 1),
                "previous": torch.cat((before, of_part[:, :-1]), 1),
            }
            out[name] = shifted.get(name, of_part)
    return out


def loss_fn(run: Run, model: nn.Module, head: nn.Module | None) -> LossFunction:
    """The loss of a run on a batch: of its head, else of its objective."""
    if head is not None:
        return lambda batch, generator: heads.losses[head.task](head, batch, generator)  # type: ignore[index, arg-type]
    objective = objectives.get(run.record.settings.objective)
    return lambda batch, generator: objective(model, batch, generator)  # type: ignore[arg-type]


def randomise_run(run: Run, seed: int) -> tuple[nn.Module, nn.Module | None]:
    """The model of a run, and its head, with random weights; scales of targets are kept."""
    model: Any = randomise_model(run.model(), seed).float()
    with torch.no_grad():
        model.target_scale.copy_(run.model().target_scale)
    if run.head() is None:
        return model, None
    old: Any = run.head()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = heads.build(
            model,
            task=old.task,
            outputs=old.outputs,
            readout=old.readout,
            layers=old.layers,
            layer_merge=old.layer_merge,
        )
    head.load_state_dict(
        {name: value for name, value in old.state_dict().items() if name.startswith("target_")},
        strict=False,
    )
    return model, head.eval()


class SaliencyMaps(NamedTuple):
    """Saliency of one model on all windows."""

    layers: list[Array]  # L times [S, T], each row with sum 1 (NaN: gradient 0)
    input: Array  # [S, T], likewise
    # part of the loss -> [S, T] error of the prediction from the token of each sample
    losses: dict[str, Array]
    heat: list[Array]  # L times [N, D] of the example, not normalised
    masks: int

    def select(self, wrt: str, at: int | None) -> Array | None:
        """[S, T] of the embeddings of layer `at` or of the input."""
        if wrt == "input":
            return self.input
        return None if at is None or at >= len(self.layers) else self.layers[at]


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
    config = run.model().config
    layers: list[list[Array]] = []
    inputs: list[Array] = []
    losses: list[dict[str, Array]] = []
    heat: list[Array] = []
    used = 1
    for part in np.array_split(np.arange(len(rows)), -(-len(rows) // ROWS)):
        batch = data.to_device(data.collate(run.windows(), rows[part]), data.find_device(model))
        samples = batch.values.shape[1]
        total: GradientMagnitudes | None = None
        for k in range(masks):
            found = gradient_magnitudes(
                model,
                loss,
                batch,
                Generator().manual_seed(1_000_003 * seed + 1009 * int(part[0]) + k),
            )
            if total is not None:
                layers_so_far = [x + y for x, y in zip(total.layers, found.layers, strict=True)]
                losses_so_far = {
                    name: value + found.losses[name] for name, value in total.losses.items()
                }
                found = GradientMagnitudes(
                    layers_so_far, total.input + found.input, losses_so_far, found.drawn
                )
            total = found
            if not found.drawn:
                break
            used = k + 1
        assert total is not None
        layers.append(
            [
                regions.normalise_rows(_spread_tokens(state.mean(-1), samples, config))
                for state in total.layers
            ]
        )
        inputs.append(regions.normalise_rows(total.input.mean(-1).cpu().double().numpy()))
        losses.append(
            {name: _spread_tokens(one, samples, config) for name, one in total.losses.items()}
        )
        if case in part:
            heat = [state[list(part).index(case)].cpu().double().numpy() for state in total.layers]
        report(int(part[-1]) + 1)
    joined = [np.concatenate(of_layer) for of_layer in zip(*layers, strict=True)]
    errors = {name: np.concatenate([one[name] for one in losses]) for name in losses[0]}
    return SaliencyMaps(joined, np.concatenate(inputs), errors, heat, used)


def _place_windows(maps: SaliencyMaps, at: Ints, count: int) -> SaliencyMaps:
    """Maps of the windows `at` among `count` windows, NaN for all others."""

    def place(part: Array) -> Array:
        out = np.full((count, part.shape[1]), np.nan)
        out[at] = part
        return out

    losses = {name: place(one) for name, one in maps.losses.items()}
    return maps._replace(
        layers=[place(one) for one in maps.layers], input=place(maps.input), losses=losses
    )


def _spread_tokens(tokens: Tensor, samples: int, config: ModelConfig) -> Array:
    """Values of tokens [B, N] spread over their samples, [B, T]; tokens of spectra have none."""
    return np.stack(
        [regions.spread_over_samples(row, samples, config) for row in tokens.cpu().double().numpy()]
    )


@analyses(
    AnalysisFacts(
        takes="runs",
        help="Sensitivity of the loss inside shapelets: gradients at the output embeddings and the input",
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
    progress: Progress | None = None,
) -> Page:
    """Saliency inside shapelets against outside, run by run on the same held-out windows of
    signals, with three controls.

    A shapelet is present in each of the `sequences` windows; `shapelets` and `lengths` are as in
    `attention`. `layer` of the output embeddings counts from 1; 0 = the last one whose tokens have
    a gradient. Random masks are averaged over `masks` draws.

    Returns a page; its summary is keyed by run, then `embeddings` and `input`. Raises UserError:
    runs on different windows, events, a layer that does not exist, windows without classes and no
    --shapelets (exit 2).
    """
    windows = _common_windows(runs, layer)
    found_shapelets, mined, chance = regions.load_shapelets(
        windows, shapelets, lengths, seed, progress
    )
    chosen = regions.find_shapelet_windows(windows, found_shapelets, sequences, seed, mined)
    case = int(np.argmin(chosen.distance))
    example = SaliencyExample(
        windows, found_shapelets, chosen, data.collate(windows, chosen.rows), case
    )
    sizes = regions.signal_magnitudes(
        example.batch.values.double().numpy(), windows, found_shapelets, chosen
    )
    magnitudes = regions.share_ratios(sizes, chosen.start, chosen.length)
    found: dict[str, RunSaliency] = {}
    for run in runs:
        maps = _compute_all(run, chosen, case, masks, seed, device, progress)
        found[run.name] = _measure_run(
            run.model().config, maps[0], maps[1:], chosen, layer, magnitudes, bootstrap, seed
        )
    size = regions.mean_over_subjects(magnitudes, chosen.subjects, bootstrap)
    page = start_page("Saliency of " + " and ".join(found), runs, [chosen.split] * len(runs), seed)
    _add_notices(page, runs, found, chosen, chance)
    page.fact("Windows", f"the same for all runs, {regions.describe_windows(chosen)}")
    page.fact(
        "Shapelets",
        f"from {shapelets}"
        if shapelets
        else f"{len(found_shapelets)}, mined from {len(mined)} training windows",
    )
    page.fact(
        "Tokens", ", ".join(f"{name}: {one.step} samples each" for name, one in found.items())
    )
    _add_blocks(page, found, example, size, bootstrap, seed)
    counts = {
        "windows": len(chosen.rows),
        "subjects": len(set(chosen.subjects.tolist())),
        "looked_through": chosen.looked,
    }
    present = [
        {"name": name, "present_in": int((chosen.which == k).sum())}
        for k, name in enumerate(name_shapelets(found_shapelets))
    ]
    options = {
        **counts,
        "split": chosen.split,
        "seed": seed,
        "bootstrap": bootstrap,
        "shapelets": present,
        "shapelets_p": chance,
    }
    summary = {name: one.summarize() for name, one in found.items()}
    return page.finish(_verdict(found, size), {**summary, "signal_size": size, "options": options})


def _common_windows(runs: list[Run], layer: int) -> Windows:
    """The windows of all runs. Raises UserError (exit 2) where they differ, or are no signals."""
    for run in runs:
        config = run.model().config
        if config.tokenizer == "codes" or not hasattr(run.windows(), "channel_names"):
            raise usage_error(
                f"{run.name} reads events",
                "expected signals, of which shapelets are segments",
                field="RUN",
            )
        if not 0 <= layer <= config.layers:
            raise usage_error(f"layer {layer}", f"{run.name} has {config.layers}", field="--layer")
    if len({run.windows().fingerprint for run in runs}) > 1:
        hint = "Give --data windows that all runs can read"
        raise usage_error(
            "runs on different windows", "expected the same for a comparison", hint, field="--data"
        )
    return runs[0].windows()


def _compute_all(
    run: Run,
    chosen: regions.ShapeletWindows,
    case: int,
    masks: int,
    seed: int,
    device: str,
    progress: Progress | None,
) -> list[SaliencyMaps]:
    """Saliency of the trained run and of its random initialisations, the second and further ones on
    a part of the windows.
    """
    models: dict[str, tuple[nn.Module, nn.Module | None]] = {"": (run.model(), run.head())}
    models |= {
        f" with random weights {k + 1}": randomise_run(run, seed + k)
        for k in range(regions.RANDOM_MODELS)
    }
    out: list[SaliencyMaps] = []
    place = select_device(device)
    for name, (model, head) in models.items():
        for module in filter(None, (model, head)):
            module.to(place)

        def report(done: int, label: str = f"saliency {run.name}{name}") -> None:
            if progress is not None:
                progress(label, done, len(chosen.rows))

        at = np.arange(
            0, len(chosen.rows), 1 if len(out) < 2 else -(-len(chosen.rows) // CONTROL_WINDOWS)
        )
        maps = compute_saliency(
            run, model, head, chosen.rows[at], case if len(out) < 2 else -1, masks, seed, report
        )
        out.append(_place_windows(maps, at, len(chosen.rows)))
    return out


class LayerSaliency(NamedTuple):
    """Mean ratio at one layer."""

    trained: regions.SubjectMean
    random_weights: regions.SubjectMean


class RunSaliency(NamedTuple):
    """Saliency of one run and of its random initialisations."""

    maps: SaliencyMaps
    random: list[SaliencyMaps]
    at: int | None  # number of the layer of the output embeddings, from 0
    step: int  # samples of a token
    first: int  # sample of the first token
    ratio: dict[str, Array]  # "embeddings" and "input": [S]
    measures: dict[str, regions.RegionMeasures]  # likewise
    # likewise: rank correlation with each part of the loss
    with_loss: dict[str, dict[str, float | None]]
    by_layer: dict[str, LayerSaliency]

    @property
    def main(self) -> str:
        """The map of the headline: of the embeddings, where they have one."""
        return "embeddings" if "embeddings" in self.measures else "input"

    def summarize(self) -> dict[str, object]:
        """As the summary stores it."""
        return {
            "layer": None if self.at is None else self.at + 1,
            "layers": len(self.maps.layers),
            "masks": self.maps.masks,
            "samples_a_token": self.step,
            **{
                wrt: {**m.to_json(), "correlation_with_loss": self.with_loss[wrt]}
                for wrt, m in self.measures.items()
            },
            "by_layer": self.by_layer,
        }


def _measure_run(
    config: ModelConfig,
    maps: SaliencyMaps,
    random: list[SaliencyMaps],
    chosen: regions.ShapeletWindows,
    layer: int,
    magnitudes: Array,
    bootstrap: int,
    seed: int,
) -> RunSaliency:
    live = [k for k, one in enumerate(maps.layers) if np.isfinite(one).any()]
    at = layer - 1 if layer and layer <= len(maps.layers) else live[-1] if live else None
    out = RunSaliency(
        maps,
        random,
        at,
        samples_per_token(config),
        regions.first_sample(maps.input.shape[1], config),
        {},
        {},
        {},
        {},
    )
    for wrt in ("embeddings", "input"):
        own, controls = (
            maps.select(wrt, at),
            [one for part in random if (one := part.select(wrt, at)) is not None],
        )
        if own is not None and controls:
            out.ratio[wrt] = regions.share_ratios(own, chosen.start, chosen.length)
            out.measures[wrt] = regions.compare_with_controls(
                own, controls, magnitudes, chosen, bootstrap, seed
            )
            out.with_loss[wrt] = {
                name: regions.rank_agreement(own, error) for name, error in maps.losses.items()
            }

    def average(parts: Sequence[Array]) -> regions.SubjectMean:
        ratios = regions.nan_mean(
            [regions.share_ratios(one, chosen.start, chosen.length) for one in parts]
        )
        return regions.mean_over_subjects(ratios, chosen.subjects, bootstrap)

    for k, (own, *controls) in enumerate(
        zip(maps.layers, *(one.layers for one in random), strict=False)
    ):
        out.by_layer[str(k + 1)] = LayerSaliency(average([own]), average(controls))
    return out


def judge_runs(found: Mapping[str, RunSaliency]) -> dict[tuple[str, str], regions.RegionFinding]:
    """The findings of the maps of all runs; those of the embeddings are one family, those of the
    input a second one.
    """
    out: dict[tuple[str, str], regions.RegionFinding] = {}
    for wrt in WORDS:
        out |= regions.judge_measures(
            {(name, wrt): one.measures[wrt] for name, one in found.items() if wrt in one.measures}
        )
    return out


WORDS = {"embeddings": "output embeddings", "input": "input"}
YLABEL = "share of saliency / share of length"
HOW_TO_READ = (
    "The gradient at the output embeddings of the last layer is the paper's measure, but there the gradient of each token comes from its own "
    "prediction: it maps where the loss is large, not what the model used (see the correlation with the loss below). Maps of lower layers and "
    "of the input are attributions. A fine-tuned run that reads [SOS] or [EOS] has no gradient at the tokens of the last layer, so the last "
    "layer with a gradient is used. Maps sum to 1 over a window; values of tokens are spread evenly over their samples. Random masks are "
    "averaged over several draws. A map that correlates with that of random weights reflects the architecture and the signal, not training."
)
WINDOWS = (
    "Share of the windows with a ratio up to the value on the axis. In the paper this distribution is higher for its model; evidence "
    "against it: curves that cross, or that coincide with that of random weights."
)
LAYERS = (
    "The ratio at every layer; bands are 95 % CI over subjects where there are enough of them. If training had moved saliency to the "
    "shapelets, the curve would differ from that of random weights."
)
CHECKS = (
    "Rank correlations of the maps, window by window. Near 1 with random weights: the map does not depend on training. Near 1 with the "
    "prediction errors of the tokens (of the part of the loss with the highest correlation): it only shows where predictions are wrong; a dash "
    "where the loss is not one of tokens. Long tokens cannot resolve the edges of a shapelet."
)
CASE = (
    "The held-out window that is closest to its shapelet, with saliency in units of an even share (1), and the prediction error of each token. "
    "One window illustrates the numbers and is no evidence; it was selected by its shapelet, not by a model."
)
HEAT = (
    "|dL / dh| of each dimension (rows) at each token, each panel scaled to its largest entry, the shapelet between the dashed lines. Left: "
    "trained; right: random weights. Stripes at the same tokens in both are places where the signal is large."
)
KINDS = (
    "The same window as three kinds of pre-training read it: complete (generative), {masked} % of its patches of {patch} samples set to zero "
    "(masking), {dropped} % of them removed (dropping). Of the shapelet masking keeps {left} % and dropping {kept} % in this draw, on "
    "average {usual} % and {rest} %. Patches are drawn in every step, so every part of every window is seen during training: the figure shows "
    "one step and is no evidence that a model cannot learn the shapelet."
)


class SaliencyExample(NamedTuple):
    """The windows with their shapelets, and the one of them that is shown."""

    windows: Windows
    shapelets: Sequence[Shapelet]
    chosen: regions.ShapeletWindows
    batch: Batch
    case: int

    @property
    def span(self) -> tuple[int, int]:
        """First sample of the shapelet in the window, and the first one behind it."""
        start = int(self.chosen.start[self.case])
        return start, start + int(self.chosen.length[self.case])

    def time_span(self, name: str) -> TimeSpan:
        """The shapelet in seconds."""
        return TimeSpan(self.span[0] / self.windows.rate, self.span[1] / self.windows.rate, name)

    def trace(self) -> Trace:
        """The channel of the shapelet."""
        channel = self.shapelets[self.chosen.which[self.case]].channel
        return Trace(
            channel,
            self.batch.values[self.case, :, list(self.windows.channel_names).index(channel)]
            .double()
            .numpy(),
        )


def _add_blocks(
    page: PageBuilder,
    found: Mapping[str, RunSaliency],
    example: SaliencyExample,
    size: regions.SubjectMean,
    bootstrap: int,
    seed: int,
) -> None:
    main = {name: one.measures[one.main] for name, one in found.items()}
    regions.add_headline(page, "Saliency inside shapelets", main, size, "saliency")
    page.text(HOW_TO_READ)
    _add_tables(page, found)
    if len(found) > 1:
        ratios = {
            words: {name: one.ratio[wrt] for name, one in found.items() if wrt in one.ratio}
            for wrt, words in WORDS.items()
        }
        rows = regions.compare_with_first(ratios, example.chosen, bootstrap)
        page.table(
            "differences",
            "Differences to the first run",
            regions.DIFFERENCES,
            regions.DIFFERENCE_COLUMNS,
            rows,
        )
    lines = []
    for name, one in found.items():
        for wrt, values in one.ratio.items():
            values = np.sort(values[np.isfinite(values)])
            lines.append(
                Line(
                    f"{name}, {WORDS[wrt]}",
                    values,
                    np.arange(1, len(values) + 1) / max(1, len(values)),
                )
            )
    page.figure(
        "windows",
        "Distribution over windows",
        WINDOWS,
        LinePlot(lines, xlabel=YLABEL, ylabel="share of the windows"),
    )
    deep = {name: one for name, one in found.items() if len(one.by_layer) > 1}
    if deep:
        lines = []
        for name, one in deep.items():
            for key, label in (("trained", name), ("random_weights", f"{name}, random weights")):
                means = [getattr(layer, key) for layer in one.by_layer.values()]
                y, lo, hi = (
                    np.array([getattr(m, k) for m in means], dtype=float)
                    for k in ("value", "lo", "hi")
                )
                band = (lo, hi) if np.isfinite(lo).any() else (None, None)
                lines.append(Line(label, np.arange(1, len(means) + 1), y, *band))
        page.figure(
            "layers", "Saliency by layer", LAYERS, LinePlot(lines, xlabel="layer", ylabel=YLABEL)
        )
    page.section("An example")
    _add_example(page, found, example)
    page.section("Input of three kinds of pre-training")
    _add_kinds(page, example, max(8, next(iter(found.values())).step), seed)


def _add_tables(page: PageBuilder, found: Mapping[str, RunSaliency]) -> None:
    rows: list[list[object]] = []
    checks: list[list[object]] = []
    judged = judge_runs(found)
    for name, one in found.items():
        for wrt, m in one.measures.items():
            at = (
                f"layer {(one.at or 0) + 1} of {len(one.maps.layers)}"
                if wrt == "embeddings"
                else WORDS[wrt]
            )
            rows.append(
                [
                    name,
                    at,
                    m.ratio,
                    m.inside_over_outside,
                    *m.controls(),
                    *judged[name, wrt].cells(),
                ]
            )
            places = (
                None
                if m.random_places is None
                else f"{m.random_places.lo:.2f} to {m.random_places.hi:.2f}"
            )
            with_loss = max(
                (value for value in one.with_loss[wrt].values() if value is not None), default=None
            )
            step = one.step if wrt == "embeddings" else 1
            checks.append(
                [
                    name,
                    at,
                    m.correlation_with_random_weights,
                    with_loss,
                    places,
                    step,
                    one.maps.masks,
                ]
            )
    columns = ["run", "gradient at", "ratio", "inside / outside", *regions.CONTROLS]
    page.table(
        "table", "Inside and outside", regions.describe_family(judged, "gradient"), columns, rows
    )
    columns = [
        "run",
        "gradient at",
        "correlation, random weights",
        "correlation, loss",
        "random places, 95 %",
        "samples a token",
        "masks",
    ]
    page.table("checks", "Other explanations of the maps", CHECKS, columns, checks)


def _add_example(
    page: PageBuilder, found: Mapping[str, RunSaliency], example: SaliencyExample
) -> None:
    windows, batch, case, (start, stop) = example.windows, example.batch, example.case, example.span
    samples = batch.values.shape[1]
    traces = [example.trace()]
    for name, one in found.items():
        for wrt, words in WORDS.items():
            maps = one.maps.select(wrt, one.at)
            if maps is not None and np.isfinite(maps[case]).all():
                traces.append(Trace(name, maps[case] * samples, words.split()[-1], accent=True))
        if one.maps.losses:
            error = np.sum([part[case : case + 1] for part in one.maps.losses.values()], 0)
            traces.append(Trace(name, regions.normalise_rows(error)[0] * samples, "its loss"))
    label = regions.name_class(windows, batch, case)
    span = example.time_span(f"shapelet {example.chosen.which[case] + 1}")
    page.figure(
        "case",
        f"Window {example.chosen.rows[case]}" + (f", class {label}" if label else ""),
        CASE,
        TracePlot(windows.rate, traces, [span]),
    )
    for name, one in found.items():
        if one.at is None or one.at >= len(one.random[0].heat):
            continue
        count = -(-(samples - one.first) // one.step)  # tokens of spectra follow those of samples
        panels = [maps.heat[one.at][:count].T for maps in (one.maps, one.random[0])]
        values = np.stack([panel / (panel.max() or 1.0) for panel in panels]).astype(np.float32)
        edges = [(edge - one.first) / one.step - 0.5 for edge in (start, stop)]
        plot = HeatMap(values, "token", "dimension", names=[name, "random weights"], mark=edges)
        page.figure(
            f"heat-{name}", f"{name}: saliency of the embeddings of layer {one.at + 1}", HEAT, plot
        )


def _add_kinds(page: PageBuilder, example: SaliencyExample, patch: int, seed: int) -> None:
    """The panel of the paper's first figure: one window under generative, masking and dropping
    pre-training.
    """
    x, (start, stop) = np.asarray(example.trace().values), example.span
    which = np.arange(len(x)) // patch
    order = np.random.default_rng([seed, 6]).permutation(which[-1] + 1)
    masked, dropped = (
        np.isin(which, order[: int(share * len(order))]) for share in (MASKED, DROPPED)
    )
    shares = {"masked": MASKED, "dropped": DROPPED, "usual": 1 - MASKED, "rest": 1 - DROPPED}
    shares |= {
        "left": float(1 - masked[start:stop].mean()),
        "kept": float(1 - dropped[start:stop].mean()),
    }
    page.figure(
        "kinds",
        "One window in three kinds of pre-training",
        KINDS.format(patch=patch, **{name: round(100 * share) for name, share in shares.items()}),
        TracePlot(
            example.windows.rate,
            [
                Trace("generative", x),
                Trace("masking", np.where(masked, 0.0, x)),
                Trace("dropping", np.where(dropped, np.nan, x)),
            ],
            [example.time_span("shapelet")],
        ),
    )


def _add_notices(
    page: PageBuilder,
    runs: list[Run],
    found: Mapping[str, RunSaliency],
    chosen: regions.ShapeletWindows,
    chance: float | None,
) -> None:
    page.notice(*runs[0].windows().notices)
    stamps = [run.record.leak_free for run in runs if run.head() is None]
    if False in stamps and not any(stamp is True or isinstance(stamp, str) for stamp in stamps):
        page.notice(
            "No run here is leak-free: where an objective can copy its targets, input saliency shows the copy. Add a run of a leak-free "
            "objective, for instance next-previous-strict."
        )
    subjects = len(set(chosen.subjects.tolist()))
    if subjects < evaluate.MINIMUM_UNITS:
        page.notice(
            f"no CI: {subjects} subject{'s' * (subjects != 1)}, at least {evaluate.MINIMUM_UNITS} required."
        )
    if len(chosen.rows) < ADVISED_WINDOWS:
        page.notice(
            f"Means over {len(chosen.rows)} windows; {ADVISED_WINDOWS} or more are recommended."
        )
    if chance is not None and chance > 0.05:
        page.notice(
            f"The shapelets do not separate the classes significantly (p = {chance:.2g}), which limits what saliency in them means."
        )
    if len({one.step for one in found.values()}) > 1:
        page.notice(
            "The runs have tokens of different lengths; longer ones resolve the edges of a shapelet less well."
        )
    for name, one in found.items():
        if one.at is None:
            page.notice(
                f"{name}: its objective reads no states of complete windows, so only the input has a map."
            )


def _verdict(found: Mapping[str, RunSaliency], size: regions.SubjectMean) -> str:
    name, one = next(iter(found.items()))
    measures = one.measures[one.main]
    if measures.ratio.value is None or measures.random_weights.value is None:
        return (
            f"The loss of {name} has no gradient on these windows, so there is nothing to compare."
        )
    return (
        f"Inside shapelets {name} has {measures.ratio.value:.2f} times the saliency at its {WORDS[one.main]} expected from their length "
        f"({measures.ratio.describe_interval()}): {regions.describe_finding(measures, judge_runs(found)[name, one.main])}; the ratio of the signal's "
        f"magnitude is {size.value:.2f}."
    )
