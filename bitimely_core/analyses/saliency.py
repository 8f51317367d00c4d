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

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Generator, Tensor, nn

from bitimely_core import data, evaluate, objectives
from bitimely_core.analyses import start_page
from bitimely_core.analyses.attention import randomise_model
from bitimely_core.analyses.regions import (
    RANDOM_MODELS,
    RANDOM_PLACES,
    ShapeletWindows,
    compare_with_controls,
    compare_with_first,
    describe_interval,
    describe_ratio,
    find_shapelet_windows,
    load_shapelets,
    make_headline,
    mean_over_subjects,
    nan_mean,
    normalise_rows,
    rank_agreement,
    share_ratios,
    signal_magnitudes,
    spread_over_samples,
)
from bitimely_core.analyses.shapelets import Shapelet, name_shapelets
from bitimely_core.errors import UserError, usage_error
from bitimely_core.models import heads
from bitimely_core.page import Figure, Page, Table
from bitimely_core.registry import AnalysisFacts, analyses
from bitimely_core.types import Batch, Encoded, Progress

if TYPE_CHECKING:
    from bitimely_core.run import Run
    from bitimely_core.tokens import Windows

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
LossFunction = Callable[[Batch, Generator], dict[str, Any]]

ROWS = 8  # of a batch
ADVISED_WINDOWS = 20  # windows
CONTROL_WINDOWS = 64  # windows that the second and further sets of random weights are looked at
MASKED, DROPPED = 0.4, 0.7  # of the figure that shows three kinds of pre-training


# --- gradients ----------------------------------------------------------------------------------------------------------------------------


class GradientMagnitudes(NamedTuple):
    """Sizes of the derivatives of the loss, of the rows of one batch. Empty `layers`: the objective reads no states of whole windows."""

    layers: list[Tensor]  # L times [B, N, D]
    input: Tensor  # [B, T, V]
    losses: dict[
        str, Tensor
    ]  # part of the loss -> [B, N] error of the prediction that each token's state makes; {} where none is of tokens
    drawn: bool  # the loss has random masks


def gradient_magnitudes(model: nn.Module, ask: LossFunction, batch: Batch, generator: Generator) -> GradientMagnitudes:
    """|dL / dh| of every layer's states and |dL / dx|, L = ask(batch, generator)["loss"]. Targets that are made of x are held fixed.

    States are those of the real positions without [SOS] and [EOS]; where an objective reads the model twice the sizes are added, and where
    the model reads channels one by one they are averaged. Models that predict without `forward` are read where they predict (`output`).
    """
    seen: list[Encoded] = []
    read_out: list[Tensor] = []
    whole: Any = getattr(model, "output", None)

    def output(hidden: Tensor, *args: Any, **named: Any) -> Any:
        read_out.append(hidden)
        return whole(hidden, *args, **named)

    hook = model.register_forward_hook(lambda module, args, out: seen.append(out))
    if whole is not None:
        model.output = output  # type: ignore[assignment]
    x = batch.values.clone().requires_grad_()
    before = generator.get_state()
    try:
        result = ask(batch._replace(values=x), generator)
        drawn = not torch.equal(before, generator.get_state())
        passes: list[list[tuple[Tensor, Encoded | None]]] = [[(state, one) for state in one.hidden] for one in seen]
        passes = passes or [[(state, None)] for state in read_out[:1]]
        flat = [state for one in passes for state, _ in one]
        found = torch.autograd.grad(result["loss"], [x, *flat], allow_unused=True)
    finally:
        hook.remove()
        if whole is not None:
            del model.output
    sizes = iter(torch.zeros_like(state) if part is None else part.abs() for part, state in zip(found[1:], flat, strict=True))
    rows, count = len(x), _count_tokens(model, x)
    cut = [[_average_channels(_strip_special(next(sizes), encoded), rows) for _, encoded in one] for one in passes]
    whole_windows = all(state.shape[:2] == (rows, count) for one in cut for state in one)  # else crops or views of them
    layers = [torch.stack(of_layer).sum(0) for of_layer in zip(*cut, strict=True)] if whole_windows else []
    gradient = torch.zeros_like(x) if found[0] is None else found[0].abs()
    return GradientMagnitudes(layers, gradient, _token_errors(result, rows, count), drawn)


def _count_tokens(model: nn.Module, x: Tensor) -> int:
    """N of these windows."""
    tokenizer: Any = model.adapter.tokenizer  # type: ignore[union-attr]
    return int(tokenizer.count(x.shape[1]))


def _strip_special(state: Tensor, encoded: Encoded | None) -> Tensor:
    """Without special positions: [SOS] and [EOS], or a class token ahead."""
    if encoded is None:
        return state
    if encoded.eos is not None:
        return state[:, 1:-1]
    return state if encoded.mask is None else state[:, max(0, state.shape[1] - encoded.mask.shape[1]) :]


def _average_channels(values: Tensor, rows: int) -> Tensor:
    """One row a window: channels that are rows of their own, [B * V, ...], are averaged."""
    if len(values) == rows or len(values) % rows:
        return values
    return values.unflatten(0, (rows, -1)).mean(1)


def _token_errors(result: dict[str, Any], rows: int, count: int) -> dict[str, Tensor]:
    """Squared errors of the predictions, [B, N] a part, at the token that makes them: it predicts its neighbour, or itself."""
    target = result["target"]
    if not result.get("slices") or target is None or target.dim() != 3:
        return {}
    valid = result["valid"]
    error = torch.where(valid, result["prediction"].detach() - target, 0.0).square().sum(-1) / valid.sum(-1).clamp(min=1)
    out = {}
    for name, part in result["slices"].items():
        of_part = _average_channels(error[:, part], rows)
        if of_part.shape == (rows, count):
            before, after = torch.zeros_like(of_part[:, :1]), torch.zeros_like(of_part[:, :1])
            shifted = {"next": torch.cat((of_part[:, 1:], after), 1), "previous": torch.cat((before, of_part[:, :-1]), 1)}
            out[name] = shifted.get(name, of_part)
    return out


# --- runs ---------------------------------------------------------------------------------------------------------------------------------


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
        head = heads.build(model, task=old.task, outputs=old.outputs, readout=old.readout, layers=old.layers, layer_merge=old.layer_merge)
    head.load_state_dict({name: value for name, value in old.state_dict().items() if name.startswith("target_")}, strict=False)
    return model, head.eval()


class SaliencyMaps(NamedTuple):
    """Saliency of one model on all windows."""

    layers: list[Array]  # L times [S, T], each row sums to 1 (NaN: no gradient at all)
    input: Array  # [S, T], likewise
    losses: dict[str, Array]  # part of the loss -> [S, T] error of what the token predicts that stands for each sample
    heat: list[Array]  # L times [N, D] of the case, before normalising
    masks: int


def compute_saliency(
    run: Run, model: nn.Module, head: nn.Module | None, rows: Ints, case: int, masks: int, seed: int, told: Callable[[int], None]
) -> SaliencyMaps:
    """Saliency of windows at `rows`; random masks are averaged over `masks` draws, the same for all models."""
    ask = loss_fn(run, model, head)
    model.eval()
    config: Any = run.model().config
    layers: list[list[Array]] = []
    inputs: list[Array] = []
    losses: list[dict[str, Array]] = []
    heat: list[Array] = []
    used = 1
    for part in np.array_split(np.arange(len(rows)), -(-len(rows) // ROWS)):
        batch = data.collate(run.windows(), rows[part])
        samples = batch.values.shape[1]
        total: GradientMagnitudes | None = None
        for k in range(masks):
            found = gradient_magnitudes(model, ask, batch, Generator().manual_seed(1_000_003 * seed + 1009 * int(part[0]) + k))
            total = found if total is None else _add_magnitudes(total, found)
            if not found.drawn:
                break
            used = k + 1
        assert total is not None
        layers.append([_spread_tokens(state.mean(-1), samples, config) for state in total.layers])
        inputs.append(normalise_rows(total.input.mean(-1).double().numpy()))
        losses.append({name: _spread_tokens(one, samples, config, normalised=False) for name, one in total.losses.items()})
        if case in part:
            heat = [state[list(part).index(case)].double().numpy() for state in total.layers]
        told(int(part[-1]) + 1)
    joined = [np.concatenate(of_layer) for of_layer in zip(*layers, strict=True)]
    wrong = {name: np.concatenate([one[name] for one in losses]) for name in losses[0]}
    return SaliencyMaps(joined, np.concatenate(inputs), wrong, heat, used)


def _place_windows(seen: SaliencyMaps, at: Ints, count: int) -> SaliencyMaps:
    """Maps of some windows as those of all of them, NaN where none was made."""

    def placed(maps: Array) -> Array:
        out = np.full((count, maps.shape[1]), np.nan)
        out[at] = maps
        return out

    losses = {name: placed(one) for name, one in seen.losses.items()}
    return seen._replace(layers=[placed(maps) for maps in seen.layers], input=placed(seen.input), losses=losses)


def _add_magnitudes(a: GradientMagnitudes, b: GradientMagnitudes) -> GradientMagnitudes:
    losses = {name: value + b.losses[name] for name, value in a.losses.items()}
    return GradientMagnitudes([x + y for x, y in zip(a.layers, b.layers, strict=True)], a.input + b.input, losses, b.drawn)


def _spread_tokens(tokens: Tensor, samples: int, config: Any, *, normalised: bool = True) -> Array:
    """Values of tokens [B, N] spread over the samples that they stand for, [B, T]; tokens of spectra stand for none."""
    out = np.stack([spread_over_samples(row, samples, config) for row in tokens.double().numpy()])
    return normalise_rows(out) if normalised else out


# --- the analysis -------------------------------------------------------------------------------------------------------------------------


@analyses(
    AnalysisFacts(takes="runs", help="Is the loss sensitive where the shapelets are? Gradients at the output embeddings and the input")
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
    progress: Progress | None = None,
) -> Page:
    """Saliency inside shapelets against outside, run by run on the same held-out windows, with three controls.

    Args:
        runs: pre-trained or fine-tuned, on the same windows of signals.
        sequences: held-out windows in which a shapelet is present.
        shapelets: folder of a report of `analyze shapelets`; empty = mined here from the training split.
        lengths: of the shapelets that are mined here, seconds, with commas between; empty: 0.5, 1 and 2, of shorter windows parts of them.
        layer: from 1, whose states stand for the output embeddings; 0 = the last one whose tokens have a gradient.
        masks: draws that random masks are averaged over.
        bootstrap: replicates of the intervals over subjects.
        seed: of windows, masks, random weights and random places.
        progress: told about windows.

    Returns:
        A page; its summary is keyed by run, then `embeddings` and `input`.

    Raises:
        UserError: runs on different windows, events, a layer that does not exist, windows without classes and no --shapelets (exit 2).
    """
    windows = _common_windows(runs, layer)
    stretches, but, chance = load_shapelets(windows, shapelets, lengths, seed, progress)
    chosen = find_shapelet_windows(windows, stretches, sequences, seed, but)
    case = int(np.argmin(chosen.distance))
    batch = data.collate(windows, chosen.rows)
    found: dict[str, RunSaliency] = {}
    for run in runs:
        models: dict[str, tuple[nn.Module, nn.Module | None]] = {"": (run.model(), run.head())}
        models |= {f" with random weights {k + 1}": randomise_run(run, seed + k) for k in range(RANDOM_MODELS)}
        seen: list[SaliencyMaps] = []
        for what, (model, head) in models.items():

            def told(done: int, label: str = f"saliency {run.name}{what}") -> None:
                if progress is not None:
                    progress(label, done, len(chosen.rows))

            at = np.arange(0, len(chosen.rows), 1 if len(seen) < 2 else -(-len(chosen.rows) // CONTROL_WINDOWS))
            here = compute_saliency(run, model, head, chosen.rows[at], case if len(seen) < 2 else -1, masks, seed, told)
            seen.append(_place_windows(here, at, len(chosen.rows)))
        found[run.name] = _measure_run(run, seen[0], seen[1:], chosen, layer, bootstrap, seed)
    loud = signal_magnitudes(batch.values.double().numpy(), windows, stretches, chosen)
    size = mean_over_subjects(share_ratios(loud, chosen.start, chosen.length), chosen.subjects, bootstrap, seed)
    subjects = len(set(chosen.subjects.tolist()))
    about = {
        "windows": len(chosen.rows),
        "subjects": subjects,
        "looked_through": chosen.looked,
        "split": chosen.split,
        "seed": seed,
        "bootstrap": bootstrap,
        "shapelets": [{"name": name, "present_in": int((chosen.which == k).sum())} for k, name in enumerate(name_shapelets(stretches))],
        "shapelets_p": chance,
    }
    return Page(
        title="Saliency of " + " and ".join(found),
        verdict=_verdict(found, size),
        notices=_notices(runs, found, chosen, chance),
        blocks=list(_blocks(runs, found, stretches, chosen, batch, case, size, bootstrap, seed)),
        facts={
            **start_page("", runs, [chosen.split] * len(runs), seed).facts,
            "Windows": f"{len(chosen.rows)} of {subjects} subject{'s' * (subjects != 1)}, the same for all runs: of {chosen.looked} looked "
            f"through ({chosen.split} split) those among the closest tenth to a shapelet",
            "Shapelets": f"from {shapelets}" if shapelets else f"{len(stretches)}, mined from {len(but)} training windows",
            "Tokens": ", ".join(f"{name}: {one.step} samples each" for name, one in found.items()),
        },
        summary={**{name: one.summary for name, one in found.items()}, "signal_size": size, "options": about},
    )


def _common_windows(runs: list[Run], layer: int) -> Windows:
    """The windows of all runs. Raises UserError (exit 2) where they differ, or are no signals."""
    for run in runs:
        config: Any = run.model().config
        if config.tokenizer == "codes" or not hasattr(run.windows(), "channel_names"):
            raise _refused(f"{run.name} reads events", "shapelets are stretches of signals", "RUN")
        if not 0 <= layer <= config.layers:
            raise _refused(f"layer {layer}", f"{run.name} has {config.layers}", "--layer")
    if len({run.windows().fingerprint for run in runs}) > 1:
        raise _refused(
            "runs on different windows", "expected the same, to compare them", "--data", "Give --data the windows that all can read"
        )
    return runs[0].windows()


def _refused(text: str, wanted: str, where: str, action: str = "") -> UserError:
    return usage_error(text, wanted, action, field=where)


class RunSaliency(NamedTuple):
    """What was measured of one run."""

    seen: SaliencyMaps
    random: list[SaliencyMaps]
    at: int | None  # number of the layer that stands for the output embeddings, from 0
    step: int  # samples of a token
    ratio: dict[str, Array]  # "embeddings" and "input": [S]
    summary: dict[str, Any]

    @property
    def main(self) -> str:
        """What stands for the run: its embeddings, where they have a map."""
        return "embeddings" if "embeddings" in self.summary else "input"

    def maps(self, wrt: str) -> Array | None:
        """[S, T] of the embeddings or the input."""
        return _maps(self.seen, wrt, self.at)


def _maps(seen: SaliencyMaps, wrt: str, at: int | None) -> Array | None:
    """[S, T] of the embeddings of layer `at` or of the input."""
    if wrt == "input":
        return seen.input
    return None if at is None or at >= len(seen.layers) else seen.layers[at]


def _measure_run(
    run: Run, seen: SaliencyMaps, random: list[SaliencyMaps], chosen: ShapeletWindows, layer: int, bootstrap: int, seed: int
) -> RunSaliency:
    config: Any = run.model().config
    live = [k for k, maps in enumerate(seen.layers) if np.isfinite(maps).any()]
    at = layer - 1 if layer and layer <= len(seen.layers) else live[-1] if live else None
    step = {"conv": 4, "steps": 1}.get(config.tokenizer, config.stride or config.patch)
    out = RunSaliency(seen, random, at, step, {}, {})
    out.summary.update({"layer": None if at is None else at + 1, "layers": len(seen.layers), "masks": seen.masks, "samples_a_token": step})
    for wrt in ("embeddings", "input"):
        maps, controls = out.maps(wrt), [found for one in random if (found := _maps(one, wrt, at)) is not None]
        if maps is None or not controls:
            continue
        out.ratio[wrt] = share_ratios(maps, chosen.start, chosen.length)
        out.summary[wrt] = compare_with_controls(maps, controls, chosen, bootstrap, seed)
        out.summary[wrt]["correlation_with_loss"] = {name: rank_agreement(maps, wrong) for name, wrong in seen.losses.items()}
    of_layers = zip(seen.layers, *(one.layers for one in random), strict=False)
    out.summary["by_layer"] = {
        str(k + 1): {
            name: mean_over_subjects(
                nan_mean([share_ratios(m, chosen.start, chosen.length) for m in part]), chosen.subjects, bootstrap, seed
            )
            for name, part in (("trained", maps[:1]), ("random_weights", maps[1:]))
        }
        for k, maps in enumerate(of_layers)
    }
    return out


# --- the page -----------------------------------------------------------------------------------------------------------------------------

WORDS = {"embeddings": "output embeddings", "input": "input"}
MAIN = (
    "Share of saliency inside the shapelets over their share of the length, mean over windows: 1 is no preference. It speaks for a model "
    "only where it is above the same model with random weights, above shapelets at random places (bar: 95 % of {places:,} draws), and "
    "above the plain size of the signal. Where it is not, the preference is no finding about pre-training."
)
HOW_TO_READ = (
    "The gradient at the output embeddings of the last layer is the paper's measure, but there each token's gradient comes from its own "
    "prediction alone: it maps where the loss is large, not what the model used (see the correlation with the loss below). Lower layers "
    "and the input are attributions. A fine-tuned run that reads [SOS] or [EOS] has no gradient at the tokens of the last layer, so the "
    "last layer that has one stands for it. Maps sum to 1 over a window; tokens are spread evenly over their samples. Random masks are "
    "averaged over several draws. A map that correlates with that of random weights shows the architecture and the signal, not what was "
    "learnt."
)
WINDOWS = (
    "Share of the windows whose ratio is no more than the value below. The paper shows this distribution as higher for its own model; "
    "curves that cross, or that lie on that of random weights, refute it here."
)
LAYERS = (
    "The same ratio at every layer; bands are 95 % intervals over subjects where there are enough of them. If training had moved "
    "saliency to the shapelets, the curve would leave that of random weights."
)
TABLE = (
    "Ratio: share of saliency inside over share of length; random weights: mean of {controls} draws; beyond random weights: the ratio less "
    "that, window by window. 95 % intervals by bootstrap over subjects; p: share of random places that reach the ratio. A finding about "
    "training needs a ratio beyond all draws of random weights and an interval that leaves out 0."
)
CHECKS = (
    "Rank correlations of the maps, window by window. Near 1 with random weights: the map explains nothing that was learnt. Near 1 with "
    "the errors of what the tokens predict (of the part of the loss where it is nearest): it only tells where predictions are wrong; a dash "
    "where the loss is not one of tokens. Long tokens cannot follow the edges of a shapelet."
)
DIFFERENCES = "Ratio of the first run less that of the second on the same windows; an interval that holds 0 shows no difference."
CASE = (
    "The held-out window that is closest to its shapelet, and below it saliency in units of an even share (1), with the error of what each "
    "token predicts. One window shows what the numbers mean and proves nothing: it was picked for its shapelet, not for a model."
)
HEAT = (
    "|dL / dh| of each dimension (rows) at each token, each panel on the scale of its largest entry, the shapelet between the dashed "
    "lines. Left: trained; right: random weights. Stripes at the same tokens in both are places that the signal makes loud."
)
KINDS = (
    "The same window as three kinds of pre-training read it: whole (generative), {masked} % of its patches of {patch} samples set to zero "
    "(masking), {dropped} % of them left out (dropping). Of the shapelet masking leaves {left} % and dropping {kept} % in this draw, on "
    "average {usual} % and {rest} %. The choice is drawn anew in every step, so over a training every part of every window is seen: the "
    "figure shows what one step reads, and is no evidence that a model cannot learn the shapelet."
)


def _blocks(
    runs: list[Run],
    found: dict[str, RunSaliency],
    stretches: Sequence[Shapelet],
    chosen: ShapeletWindows,
    batch: Batch,
    case: int,
    size: dict[str, Any],
    bootstrap: int,
    seed: int,
) -> Iterator[Figure | Table | str]:
    first = next(iter(found.values()))
    yield make_headline(
        {name: one.summary[one.main] for name, one in found.items()},
        size,
        title="Saliency inside shapelets",
        caption=MAIN.format(places=RANDOM_PLACES),
        ylabel="share of saliency / share of length",
    )
    yield HOW_TO_READ
    yield from _tables(found)
    if len(found) > 1:
        yield _differences(found, chosen, bootstrap, seed)
    series = []
    for name, one in found.items():
        for wrt, words in WORDS.items():
            if wrt in one.ratio:
                values = np.sort(one.ratio[wrt][np.isfinite(one.ratio[wrt])])
                series.append({"name": f"{name}, {words}", "x": values, "y": np.arange(1, len(values) + 1) / max(1, len(values))})
    axes = {"xlabel": "share of saliency / share of length", "ylabel": "share of the windows"}
    yield Figure(name="windows", title="Window by window", caption=WINDOWS, kind="lines", data={"series": series, **axes})
    deep = {name: one for name, one in found.items() if len(one.summary["by_layer"]) > 1}
    if deep:
        yield _layers(deep)
    yield "## A case"
    yield from _case(runs, found, stretches, chosen, batch, case)
    yield "## What pre-training reads"
    yield _kinds(runs[0].windows(), stretches, chosen, batch, case, max(8, first.step), seed)


def _tables(found: dict[str, RunSaliency]) -> Iterator[Table]:
    measured: list[list[Any]] = []
    checks: list[list[Any]] = []
    for name, one in found.items():
        for wrt, words in WORDS.items():
            if wrt in one.summary:
                about, whole = one.summary[wrt], one.summary
                where = f"layer {whole['layer']} of {whole['layers']}" if wrt == "embeddings" else words
                keys = ("ratio", "inside_over_outside", "random_weights", "beyond_random_weights", "p_places")
                measured.append([name, where, *(about[key] for key in keys)])
                places = about["random_places"]
                told = None if places is None else f"{places['lo']:.2f} to {places['hi']:.2f}"
                with_loss = [value for value in about["correlation_with_loss"].values() if value is not None]
                correlations = [about["correlation_with_random_weights"], max(with_loss, default=None)]
                checks.append([name, where, *correlations, told, one.step if wrt == "embeddings" else 1, whole["masks"]])
    columns = ["run", "gradient at", "ratio", "inside / outside", "random weights", "beyond random weights", "p, random places"]
    yield Table(name="table", title="Inside and outside", caption=TABLE.format(controls=RANDOM_MODELS), columns=columns, rows=measured)
    columns = ["run", "gradient at", "correlation, random weights", "correlation, loss", "random places, 95 %", "samples a token", "masks"]
    yield Table(name="checks", title="What else makes such a map", caption=CHECKS, columns=columns, rows=checks)


def _differences(found: dict[str, RunSaliency], chosen: ShapeletWindows, bootstrap: int, seed: int) -> Table:
    rows: list[list[Any]] = []
    for wrt, words in WORDS.items():
        ratio = {name: one.ratio[wrt] for name, one in found.items() if wrt in one.ratio}
        rows += [[first, other, words, gap] for first, other, gap in compare_with_first(ratio, chosen, bootstrap, seed)] if ratio else []
    columns = ["run", "against", "gradient at", "difference of the ratios"]
    return Table(name="differences", title="The first run against the others", caption=DIFFERENCES, columns=columns, rows=rows)


def _layers(found: dict[str, RunSaliency]) -> Figure:
    series = []
    for name, one in found.items():
        for key, words in (("trained", name), ("random_weights", f"{name}, random weights")):
            cells = [of_layer[key] for of_layer in one.summary["by_layer"].values()]
            y, lo, hi = (np.array([np.nan if c[k] is None else c[k] for c in cells]) for k in ("value", "lo", "hi"))
            band = {"lo": lo, "hi": hi} if np.isfinite(lo).any() else {}
            series.append({"name": words, "x": np.arange(1, len(cells) + 1), "y": y, **band})
    axes = {"xlabel": "layer", "ylabel": "share of saliency / share of length"}
    return Figure(name="layers", title="Layer by layer", caption=LAYERS, kind="lines", data={"series": series, **axes})


def _case(
    runs: list[Run], found: dict[str, RunSaliency], stretches: Sequence[Shapelet], chosen: ShapeletWindows, batch: Batch, case: int
) -> Iterator[Figure]:
    windows = runs[0].windows()
    samples = batch.values.shape[1]
    start, stop = int(chosen.start[case]), int(chosen.start[case] + chosen.length[case])
    signals: list[dict[str, Any]] = [_signal(windows, stretches, chosen, batch, case)]
    for name, one in found.items():
        for wrt, words in WORDS.items():
            maps = one.maps(wrt)
            if maps is not None and np.isfinite(maps[case]).all():
                signals.append({"name": name, "unit": words.split()[-1], "values": maps[case] * samples, "accent": True})
        if one.seen.losses:
            share = normalise_rows(np.sum([wrong[case : case + 1] for wrong in one.seen.losses.values()], 0))[0] * samples
            signals.append({"name": name, "unit": "its loss", "values": share})
    span = {"start": start / windows.rate, "stop": stop / windows.rate, "name": f"shapelet {chosen.which[case] + 1}"}
    label = windows.class_names[int(batch.target[case])] if batch.target is not None and windows.task == "classification" else ""
    yield Figure(
        name="case",
        title=f"Window {chosen.rows[case]}" + (f", class {label}" if label else ""),
        caption=CASE,
        kind="traces",
        data={"rate": windows.rate, "signals": signals, "spans": [span]},
    )
    for run in runs:
        one, config = found[run.name], _config(run)
        if one.at is None or one.at >= len(one.random[0].heat):
            continue
        first = samples % config.patch if config.tokenizer == "patch" and config.crop == "start" else 0
        count = -(-(samples - first) // one.step)  # tokens of spectra follow those of samples
        panels = [seen.heat[one.at][:count].T for seen in (one.seen, one.random[0])]
        values = np.stack([panel / (panel.max() or 1.0) for panel in panels]).astype(np.float32)
        edges = [(edge - first) / one.step - 0.5 for edge in (start, stop)]
        axes = {"xlabel": "token", "ylabel": "dimension", "diverging": False, "mark": edges}
        yield Figure(
            name=f"heat-{run.name}",
            title=f"{run.name}: saliency of the embeddings of layer {one.at + 1}",
            caption=HEAT,
            kind="matrix",
            data={"values": values, "names": [run.name, "random weights"], **axes},
        )


def _config(run: Run) -> Any:
    return run.model().config


def _signal(windows: Windows, stretches: Sequence[Shapelet], chosen: ShapeletWindows, batch: Batch, case: int) -> dict[str, Any]:
    """The channel of the shapelet that is present in the case."""
    channel = stretches[chosen.which[case]].channel
    return {"name": channel, "unit": "", "values": batch.values[case, :, list(windows.channel_names).index(channel)].double().numpy()}


def _kinds(
    windows: Windows, stretches: Sequence[Shapelet], chosen: ShapeletWindows, batch: Batch, case: int, patch: int, seed: int
) -> Figure:
    """The panel of the paper's first figure: one window under generative, masking and dropping pre-training."""
    signal = _signal(windows, stretches, chosen, batch, case)
    x = signal["values"]
    start, stop = int(chosen.start[case]), int(chosen.start[case] + chosen.length[case])
    rng = np.random.default_rng([seed, 6])
    which = np.arange(len(x)) // patch
    order = rng.permutation(which[-1] + 1)
    masked, dropped = (np.isin(which, order[: int(share * len(order))]) for share in (MASKED, DROPPED))
    left, kept = (round(100 * float(1 - gone[start:stop].mean())) for gone in (masked, dropped))
    usual = {"masked": MASKED, "dropped": DROPPED, "usual": 1 - MASKED, "rest": 1 - DROPPED}
    return Figure(
        name="kinds",
        title="One window in three kinds of pre-training",
        caption=KINDS.format(patch=patch, left=left, kept=kept, **{name: round(100 * share) for name, share in usual.items()}),
        kind="traces",
        data={
            "rate": windows.rate,
            "signals": [
                {"name": "generative", "unit": "", "values": x},
                {"name": "masking", "unit": "", "values": np.where(masked, 0.0, x)},
                {"name": "dropping", "unit": "", "values": np.where(dropped, np.nan, x)},
            ],
            "spans": [{"start": start / windows.rate, "stop": stop / windows.rate, "name": "shapelet"}],
        },
    )


def _notices(runs: list[Run], found: dict[str, RunSaliency], chosen: ShapeletWindows, chance: float | None) -> list[str]:
    out = list(dict.fromkeys([*runs[0].windows().notices, *start_page("", runs, [chosen.split] * len(runs), 0).notices]))
    stamps = [run.record.leak_free for run in runs if run.head() is None]
    if False in stamps and not any(stamp is True or isinstance(stamp, str) for stamp in stamps):
        out.append(
            "No run here is leak-free: where an objective can copy its targets, input saliency shows the copy. Add a run of a leak-free "
            "objective, for instance next-previous-strict."
        )
    subjects = len(set(chosen.subjects.tolist()))
    if subjects < evaluate.MINIMUM_UNITS:
        out.append(f"No interval: {subjects} subject{'s' * (subjects != 1)}, an interval needs at least {evaluate.MINIMUM_UNITS}.")
    if len(chosen.rows) < ADVISED_WINDOWS:
        out.append(f"Means over {len(chosen.rows)} windows; {ADVISED_WINDOWS} or more are advised.")
    if chance is not None and chance > 0.05:
        out.append(f"The shapelets tell the classes apart no better than chance would (p = {chance:.2g}): saliency in them means little.")
    steps = {one.step for one in found.values()}
    if len(steps) > 1:
        out.append("The runs have tokens of different lengths; a coarser one cannot follow the edges of a shapelet as closely.")
    out += [
        f"{name}: its objective reads no states of whole windows, so only the input has a map."
        for name, one in found.items()
        if one.at is None
    ]
    return out


def _verdict(found: dict[str, RunSaliency], size: dict[str, Any]) -> str:
    name, one = next(iter(found.items()))
    about = one.summary[one.main]
    mean, random = about["ratio"], about["random_weights"]
    if mean["value"] is None or random["value"] is None:
        return f"The loss of {name} has no gradient on these windows, so there is nothing to compare."
    return (
        f"Inside shapelets {name} has {mean['value']:.2f} times the saliency at its {WORDS[one.main]} that their length alone would give "
        f"({describe_interval(mean)}): {describe_ratio(about)}; the plain size of the signal has {size['value']:.2f}."
    )
