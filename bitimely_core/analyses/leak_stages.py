"""What each stage between native samples and predictions adds to a leak, measured by itself.

Stages: filters, resampling (slower channels), decimation (faster ones), normalisation, windows,
tokenizer, objective, batch statistics. Each
has three figures. Influence: the largest change of what a prediction may read (values; of the last
three the prediction itself) with a native
sample of its target or beyond it. Reach: how far that sample lies from what is read.
Copied: share of the target values that hold nothing but samples that are read. A stage that adds
nothing has 0 everywhere.

Legend: T values of a window, K native samples, N tokens, F token width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bitimely_core import models as building
from bitimely_core.config import ModelConfig
from bitimely_core.models import Model
from bitimely_core.models.tokenizers import samples_per_token
from bitimely_core.schemas.tokens import ChannelPreparation, SamplePreparation, WindowOptions
from bitimely_core.tokens.cutting import RecordCut, WindowPlace, make_values, make_windows
from bitimely_core.tokens.windows import normalise_windows
from bitimely_core.types import Batch, Signal

Array = npt.NDArray[Any]

# share of the largest influence of a stage below which a sample is not counted in its reach
FAINT = 1e-3


class Influence(NamedTuple):
    """Of forbidden samples through one stage."""

    size: float = 0.0
    reach: int = 0  # values of a window
    copied: float = 0.0  # share of the target values of which every sample reaches what is read


class Dependence(NamedTuple):
    """Largest dependence of a prediction on three kinds of inputs, and of every prediction on every
    input.
    """

    own: float  # on its own target
    beyond: float  # on inputs that only a leak can reach
    allowed: float  # on all others
    map: Array  # [predictions, inputs]
    parts: tuple[str, ...] = ()  # of each prediction: next, previous, ...
    # first and last sample of its target; (0, -1) without one
    spans: tuple[tuple[int, int], ...] = ()
    # on forbidden inputs, by tokens that the prediction may read
    tokenizer: Influence = Influence()
    objective: Influence = Influence()  # by tokens that it may not


class NativeInfluence(NamedTuple):
    """Largest influence of forbidden native samples on predictions, of channels of one native
    rate.
    """

    channels: tuple[str, ...]
    rate: float  # Hz
    filters: float  # through the filters alone
    resampling: float  # through the resampling alone
    forbidden: float  # through all stages
    copied: float  # share of target values of which every native sample reaches the prediction
    of_filters: Influence = Influence()
    of_resampling: Influence = Influence()


class LeakStage(NamedTuple):
    """A row of the page."""

    stage: str
    action: str  # what it does here
    influence: float
    reach: int  # values of a window
    copied: float  # share of the target values that hold nothing but samples that are read
    seconds: float | None  # the reach; None: without data

    @property
    def verdict(self) -> str:
        """In words."""
        return (
            "reaches forbidden samples"
            if self.influence > 0
            else "repeats what was read"
            if self.copied > 0
            else "adds nothing"
        )


def find_forbidden(part: str, span: tuple[int, int], hidden: Array, places: Array) -> Array:
    """Which places, in values of the window, a prediction of `span` must not depend on."""
    return (
        places >= span[0]
        if part == "next"
        else places <= span[1]
        if part == "previous"
        else np.isin(places, hidden)
    )


def list_hidden(found: Dependence) -> Array:
    """Samples of all targets."""
    return np.array([i for a, b in found.spans for i in range(a, b + 1)], dtype=np.int64)


def find_influence(slopes: Array, places: Array, found: Dependence) -> Influence:
    """Of samples at `places` on the values of a window by the `slopes` [T, K], over what
    predictions may read and what they may not.
    """
    hidden, values, copies = list_hidden(found), np.arange(len(slopes)), [False]
    size, reach, faint = 0.0, 0, FAINT * slopes.max(initial=0.0)
    distance = np.abs(places - values[:, None])
    for line, part, span in zip(found.map, found.parts, found.spans, strict=True):
        if span[1] < span[0]:
            continue
        read = (line > 0) & ~find_forbidden(part, span, hidden, values)
        sizes = slopes * read[:, None] * find_forbidden(part, span, hidden, places)
        size = max(size, float(sizes.max(initial=0.0)))
        reach = max(reach, int(distance[sizes > faint].max(initial=0)))
        copies += list_copies(slopes[span[0] : span[1] + 1], slopes[read].any(0))
    return Influence(size, reach, float(np.mean(copies[1:] or copies)))


def list_copies(target: Array, reached: Array) -> list[bool]:
    """Which values, by their slopes [values, K], hold samples, all of them `reached` [K]."""
    return [bool(row.any()) and not (row.astype(bool) & ~reached).any() for row in target]


def measure_native(
    config: ModelConfig,
    found: Dependence,
    options: WindowOptions,
    preparation: SamplePreparation,
    normalise: str = "channel",
) -> list[NativeInfluence]:
    """Native samples of noise are changed one by one; the code that makes tokens, then the
    derivatives `found` of the predictions, pass it on.
    """
    hidden, out = list_hidden(found), []
    normalising = (
        measure_normalisation(config, normalise) if normalise == "window" else np.eye(config.length)
    )
    for step in preparation.channels:
        ratio = options.rate / step.native_rate
        grid = math.gcd(preparation.stride or 1, samples_per_token(config))
        # a native sample is in the middle
        first = max(0, math.ceil(2 * ratio) - config.length // 2) // grid * grid
        count = math.ceil((first + config.length) / ratio + max(2, 2 / ratio)) + 30
        one = options.model_copy(update={"channels": step.channels[:1], "resample": True})
        bare = one.model_copy(update={"bandpass": None, "notch": None})
        filtered = one.model_copy(update={"rate": step.native_rate})
        whole, resampled = (
            find_slopes(o, step.native_rate, count)[first : first + config.length]
            for o in (one, bare)
        )
        at = np.minimum(
            (np.arange(first, first + config.length) / ratio + 1e-9).astype(np.int64), count - 1
        )
        kept = (
            find_slopes(filtered, step.native_rate, count)[at]
            if step.filters
            else np.zeros_like(whole)
        )
        place = np.floor(np.arange(count) * ratio + 1e-9) - first
        by_filters, by_resampling = (
            find_influence(slopes, place, found) for slopes in (kept, resampled)
        )
        passed, sizes, copies = normalising @ whole, [0.0], []
        for line, part, (start, stop) in zip(found.map, found.parts, found.spans, strict=True):
            if stop < start:
                continue
            reached = passed[line > 0].any(0)
            sizes.append(
                ((line @ passed) * find_forbidden(part, (start, stop), hidden, place)).max()
            )
            copies += list_copies(whole[start : stop + 1], reached)
        figures = by_filters.size, by_resampling.size, float(max(sizes)), float(np.mean(copies))
        out.append(
            NativeInfluence(step.channels, step.native_rate, *figures, by_filters, by_resampling)
        )
    return out


def _make_cut(signal: Signal, places: list[WindowPlace]) -> RecordCut:
    return RecordCut(
        [[signal]],
        [[1.0]],
        digital=False,
        scale=np.ones(1),
        offset=np.zeros(1),
        units=("",),
        places=places,
    )


def find_slopes(options: WindowOptions, rate: float, count: int) -> Array:
    """Size of the change of each value with each of `count` native samples of noise, [values,
    count]; values that are missing: 0.
    """
    noise = np.random.default_rng(0).normal(size=count)

    def make(samples: Array) -> Array:
        signal = Signal(options.channels[0], rate, "", samples)
        return make_values(signal, 1.0, _make_cut(signal, []), options)

    base = make(noise)
    changed = [
        np.abs(np.nan_to_num(make(noise + 1e3 * (np.arange(count) == k)) - base)) / 1e3
        for k in range(count)
    ]
    return np.stack(changed, axis=1)


def measure_windows(options: WindowOptions, length: int) -> Array:
    """Size of the change of each value of the second of three windows with each value of the
    recording, [length, 3 length].
    """
    noise = np.random.default_rng(0).normal(size=3 * length)
    plain = {
        "bandpass": None,
        "notch": None,
        "window": length,
        "channels": options.channels[:1],
        "clock": None,
    }
    chosen = options.model_copy(update=plain)

    def make(samples: Array) -> Array:
        cut = _make_cut(Signal("", options.rate, "", samples), [WindowPlace(0.0, 0, length)])
        return next(make_windows(cut, chosen))[0, :, 0]

    base = make(noise)
    return np.stack(
        [np.abs(make(noise + (np.arange(3 * length) == k)) - base) for k in range(3 * length)],
        axis=1,
    )


def _normalise(config: ModelConfig, normalise: str, rows: Array) -> Array:
    """Windows [n, T] as a model reads them: by their own statistics under `window`, by constants
    otherwise, then by the model's own.
    """
    values = rows[..., None].astype(np.float32)
    values = normalise_windows(values, None) if normalise == "window" else values
    if config.normalises_windows:
        model: Any = building.from_config(
            config.model_copy(update={"channels": 1, "others": ()})
        ).double()
        values = model.prepare(Batch(torch.from_numpy(values).double())).values.numpy()
    return values[..., 0].astype(np.float64)


def measure_normalisation(config: ModelConfig, normalise: str) -> Array:
    """Size of the change of each value of a window of noise with a change of 1 of each, [T, T]; not
    0 off the diagonal: by window statistics.
    """
    noise = np.random.default_rng(0).normal(size=config.length)
    found = _normalise(
        config, normalise, np.concatenate([noise[None], noise + np.eye(config.length)])
    )
    return np.abs(found[1:] - found[0]).T


def find_normalisation_reach(config: ModelConfig, normalise: str, length: int) -> int:
    """Values between the first or last value of a window of `length` and the farthest one that
    changes with it.
    """
    ends = np.array([0, length - 1])
    noise = np.random.default_rng(0).normal(size=length)
    found = _normalise(
        config, normalise, np.stack([noise, *(noise + (np.arange(length) == end) for end in ends)])
    )
    return int((np.abs(np.arange(length) - ends[:, None]) * (found[1:] != found[0])).max())


class TokenRecord(NamedTuple):
    """Tensors of a forward pass whose derivatives separate the tokenizer from what reads its
    tokens.
    """

    tokens: list[Tensor]  # [B, N, F]
    inputs: list[Tensor]  # [B, T, V], of the tokenizer, behind the model's own normalisation


@contextmanager
def record_tokens(model: Model, x: Tensor) -> Iterator[TokenRecord]:
    """The tokens that `model` makes of `x` inside the context."""
    record = TokenRecord([], [])
    prepare: Any = getattr(model, "prepare", None)

    def keep(batch: Batch) -> Batch:
        made: Batch = prepare(batch)
        record.inputs.append(made.values)
        return made

    hook = model.adapter.tokenizer.register_forward_hook(
        lambda module, given, made: record.tokens.append(made[0])
    )
    if model.config.normalises_windows:
        model.prepare = keep  # type: ignore[assignment]
    else:
        record.inputs.append(x)
    try:
        yield record
    finally:
        hook.remove()
        if model.config.normalises_windows:
            del model.prepare


def split_slopes(target: Tensor, record: TokenRecord, forbidden: Tensor) -> tuple[Tensor, Tensor]:
    """Sizes of the derivatives of `target` with respect to the inputs by tokens that are not
    `forbidden` [B, N], and by those that are.
    """
    tokens, inputs = ([one for one in some if one.requires_grad] for some in record)
    found = torch.autograd.grad(target, tokens, retain_graph=True, allow_unused=True)
    read = [(one, slope) for one, slope in zip(tokens, found, strict=True) if slope is not None]
    out = []
    for chosen in (~forbidden, forbidden):
        weights = [slope * chosen[..., None] for _, slope in read]
        slopes = (
            torch.autograd.grad(
                [one for one, _ in read], inputs, weights, retain_graph=True, allow_unused=True
            )
            if read
            else ()
        )
        out.append(
            sum((slope for slope in slopes if slope is not None), torch.zeros_like(inputs[0])).abs()
        )
    return out[0], out[1]


def find_path_influence(sizes: Tensor, part: str, span: tuple[int, int]) -> Influence:
    """Of forbidden samples by `sizes` [B, T, V], 0 elsewhere; the reach is from the nearest sample
    that may be read.
    """
    at = np.flatnonzero((sizes > FAINT * sizes.amax()).any(-1).any(0).cpu().numpy())
    edges = {"next": [span[0] - 1], "previous": [span[1] + 1]}.get(part, [span[0] - 1, span[1] + 1])
    return Influence(
        float(sizes.amax()), int(np.abs(at - np.array(edges)[:, None]).min(0).max(initial=0))
    )


def join_influences(found: Sequence[Influence]) -> Influence:
    """The largest of each figure."""
    return (
        Influence(*(max(figures) for figures in zip(*found, strict=True))) if found else Influence()
    )


METHODS = {"none": "", "interpolated": "linear interpolation", "held": "last value held", "placed": "at their times, else missing"} | {
    "resampled": "two-sided anti-alias filter", "causal": "anti-alias filter of the past", "averaged": "means"
}  # fmt: skip


def measure_stages(
    config: ModelConfig,
    jacobian: dict[str, Dependence],
    native: list[NativeInfluence],
    options: WindowOptions | None,
    preparation: SamplePreparation | None,
    normalise: str,
) -> list[LeakStage]:
    """Every stage of the path to the predictions of `jacobian`, on the configuration `config` that
    it was measured on; without `options` those of the model.
    """
    steps: tuple[ChannelPreparation, ...] = preparation.channels if preparation else ()
    rate = options.rate if options else 1.0
    found = jacobian["eval"]
    slower, faster = (
        [i for i, step in enumerate(steps) if sign * step.native_rate < sign * rate]
        for sign in (1, -1)
    )
    slower, faster = (
        [i for i in some if steps[i].resampling != "none"] for some in (slower, faster)
    )

    def describe(chosen: list[int]) -> str:
        texts = (
            f"{METHODS[steps[i].resampling]}, {steps[i].native_rate:g} to {rate:g} Hz: {', '.join(steps[i].channels)}"
            for i in chosen
        )
        return "; ".join(texts) or "none"

    rows: list[tuple[str, str, Influence]] = []
    is_signal = config.tokenizer != "codes"
    if options is not None and is_signal:
        names = [f"{step.filters}: {', '.join(step.channels)}" for step in steps if step.filters]
        rows.append(
            (
                "filters",
                "; ".join(names) or "none",
                join_influences([one.of_filters for one in native]),
            )
        )
        for stage, chosen in (("resampling", slower), ("decimation", faster)):
            rows.append(
                (
                    stage,
                    describe(chosen),
                    join_influences([native[i].of_resampling for i in chosen if i < len(native)]),
                )
            )
    if is_signal:
        by_window = normalise == "window"
        words = (
            "statistics of each window"
            if by_window
            else "statistics of the training split"
            if normalise == "channel"
            else "none"
        )
        words += ", then those of each window in the model" if config.normalises_windows else ""
        one = find_influence(
            measure_normalisation(config, normalise), np.arange(config.length), found
        )
        reach = (
            find_normalisation_reach(
                config, normalise, options.window if options else config.length
            )
            if one.size
            else 0
        )
        rows.append(("normalisation", words, one._replace(reach=reach)))
    if options is not None and is_signal:
        places = np.arange(3 * config.length) - config.length
        cut = find_influence(measure_windows(options, config.length), places, found)
        rows.append(("windows", f"{options.window} values every {options.stride}", cut))
    trained = jacobian["train"]
    by_batch = trained.objective if found.objective.size == 0 else Influence()
    rows += [
        ("tokenizer", config.tokenizer, found.tokenizer),
        ("objective", "derivative at random weights", found.objective),
    ]
    rows.append(("batch statistics", "the same in training mode", by_batch))
    return [
        LeakStage(stage, action, *one, one.reach / rate if options and is_signal else None)
        for stage, action, one in rows
    ]
