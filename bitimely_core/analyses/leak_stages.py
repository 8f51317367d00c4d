"""What each stage between native samples and predictions adds to a leak, measured by itself.

Stages: filters, resampling (slower channels), decimation (faster ones), normalisation, windows,
tokenizer, objective, batch statistics. Each has three figures, which are 0 where it adds nothing:

* Influence: the largest change of what a prediction may read with a native sample of its target or
  beyond it. What it may read are values; of the last three stages it is the prediction itself.
* Reach: how far that sample lies from what is read.
* Copied: share of the target values that hold nothing but samples that are read.

Legend: T values of a window, K native samples, N tokens, F token width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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
StageRow = tuple[str, str, "Influence"]  # stage, what it does here, what it adds

# share of the largest influence of a stage below which a sample is not counted in its reach
FAINT = 1e-3
METHODS = {
    "interpolated": "linear interpolation",
    "held": "last value held",
    "placed": "at their times, else missing",
    "resampled": "two-sided anti-alias filter",
    "causal": "anti-alias filter of the past",
    "averaged": "means",
}
NORMALISATIONS = {
    "window": "statistics of each window",
    "channel": "statistics of the training split",
}


class Influence(NamedTuple):
    """Of forbidden samples through one stage."""

    size: float = 0.0
    reach: int = 0  # values of a window
    copied: float = 0.0  # share of the target values of which every sample reaches what is read


class TargetedPrediction(NamedTuple):
    """A prediction that has a target."""

    slopes: Array  # [T] size of its derivative with respect to each value
    part: str  # next, previous, ...
    span: tuple[int, int]  # first and last value of its target
    hidden: Array  # values of all targets of the row

    def find_forbidden(self, places: Array) -> Array:
        """Which places, in values of the window, it must not depend on."""
        if self.part == "next":
            return places >= self.span[0]
        if self.part == "previous":
            return places <= self.span[1]
        return np.isin(places, self.hidden)

    def list_copies(self, slopes: Array, reached: Array) -> list[bool]:
        """Which values of the target hold samples, all of them `reached` [K], by the `slopes` [T,
        K] of the values.
        """
        target = slopes[self.span[0] : self.span[1] + 1] != 0
        return [bool(row.any()) and not row[~reached].any() for row in target]


class Dependence(NamedTuple):
    """Largest dependence of a prediction on three kinds of inputs, and of every prediction on every
    input.
    """

    target: float  # on its own target
    beyond: float  # on inputs that only a leak can reach
    allowed: float  # on all others
    map: Array  # [predictions, inputs]
    parts: tuple[str, ...] = ()  # of each prediction: next, previous, ...
    # first and last sample of its target; (0, -1) without one
    spans: tuple[tuple[int, int], ...] = ()
    # on forbidden inputs, by tokens that the prediction may read
    tokenizer: Influence = Influence()
    objective: Influence = Influence()  # by tokens that it may not

    @property
    def forbidden(self) -> float:
        """On any input that it must not depend on."""
        return max(self.target, self.beyond)

    def list_predictions(self) -> list[TargetedPrediction]:
        """The predictions that have a target."""
        hidden = np.concatenate([np.arange(first, last + 1) for first, last in self.spans])
        return [
            TargetedPrediction(slopes, part, span, hidden)
            for slopes, part, span in zip(self.map, self.parts, self.spans, strict=True)
            if span != (0, -1)
        ]


class NativeInfluence(NamedTuple):
    """Influence of forbidden native samples on predictions, of channels that were treated alike."""

    step: ChannelPreparation
    filters: Influence  # through the filters alone
    resampling: Influence  # through the resampling alone
    forbidden: float  # largest one, through all stages
    copied: float  # share of target values of which every native sample reaches the prediction

    @property
    def names(self) -> str:
        """The channels as text."""
        return ", ".join(self.step.channels)

    def to_json(self) -> dict[str, object]:
        """As the summary stores it."""
        return {
            "channels": self.step.channels,
            "rate": self.step.native_rate,
            "filters": self.filters.size,
            "resampling": self.resampling.size,
            "forbidden": self.forbidden,
            "copied": self.copied,
        }


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
        if self.influence > 0:
            return "reaches forbidden samples"
        return "repeats what was read" if self.copied > 0 else "adds nothing"


def find_influence(slopes: Array, places: Array, dependence: Dependence) -> Influence:
    """Of samples at `places` [K] on the values of a window by the `slopes` [T, K], over what
    predictions may read and what they may not.
    """
    values, copies = np.arange(len(slopes)), []
    size, reach, faint = 0.0, 0, FAINT * slopes.max(initial=0.0)
    distance = np.abs(places - values[:, None])
    for prediction in dependence.list_predictions():
        read = (prediction.slopes > 0) & ~prediction.find_forbidden(values)
        sizes = slopes * read[:, None] * prediction.find_forbidden(places)
        size = max(size, float(sizes.max(initial=0.0)))
        reach = max(reach, int(distance[sizes > faint].max(initial=0)))
        copies += prediction.list_copies(slopes, np.any(slopes[read], axis=0))
    return Influence(size, reach, float(np.mean(copies or [False])))


def measure_native(
    config: ModelConfig,
    dependence: Dependence,
    options: WindowOptions,
    preparation: SamplePreparation,
    normalise: str,
) -> list[NativeInfluence]:
    """Native samples of noise are changed one by one; the code that makes tokens, then the
    derivatives of the predictions, pass it on.
    """
    normalising = (
        measure_normalisation(config, normalise) if normalise == "window" else np.eye(config.length)
    )
    predictions = dependence.list_predictions()
    influences = []
    for step in preparation.channels:
        through_all, filters, resampling, places = _find_step_slopes(
            config, step, options, preparation.stride
        )
        passed = normalising @ through_all
        sizes, copies = [0.0], []
        for prediction in predictions:
            slopes = prediction.slopes @ passed
            sizes.append(float((slopes * prediction.find_forbidden(places)).max()))
            reached = np.any(passed[prediction.slopes > 0], axis=0)
            copies += prediction.list_copies(through_all, reached)
        influences.append(
            NativeInfluence(
                step,
                find_influence(filters, places, dependence),
                find_influence(resampling, places, dependence),
                max(sizes),
                float(np.mean(copies)),
            )
        )
    return influences


def _find_step_slopes(
    config: ModelConfig, step: ChannelPreparation, options: WindowOptions, stride: int | None
) -> tuple[Array, Array, Array, Array]:
    """Slopes [T, K] of the values of a window through filters and resampling, the filters alone,
    and the resampling alone, and the place of each native sample in values of the window, [K].
    """
    ratio = options.rate / step.native_rate
    grid = math.gcd(stride or 1, samples_per_token(config))
    # a native sample is in the middle
    first = max(0, math.ceil(2 * ratio) - config.length // 2) // grid * grid
    window = np.arange(first, first + config.length)
    count = math.ceil((first + config.length) / ratio + max(2, 2 / ratio)) + 30
    both = options.model_copy(update={"channels": step.channels[:1], "resample": True})
    unfiltered = both.model_copy(update={"bandpass": None, "notch": None})
    native = both.model_copy(update={"rate": step.native_rate})
    through_both, resampling = (
        find_slopes(chosen, step.native_rate, count)[window] for chosen in (both, unfiltered)
    )
    filters = np.zeros_like(through_both)
    if step.filters:
        nearest = np.minimum((window / ratio + 1e-9).astype(np.int64), count - 1)
        filters = find_slopes(native, step.native_rate, count)[nearest]
    places = np.floor(np.arange(count) * ratio + 1e-9) - first
    return through_both, filters, resampling, places


def _make_cut(signal: Signal, places: list[WindowPlace]) -> RecordCut:
    return RecordCut(
        [[signal]], [[1.0]], digital=False, scale=np.ones(1), offset=np.zeros(1), places=places
    )


def _measure_changes(make: Callable[[Array], Array], count: int, size: float = 1.0) -> Array:
    """Size of the change of each value that `make` makes of noise, relative to the change of one of
    `count` samples by `size`, [values, count]; of missing values 0.
    """
    noise = np.random.default_rng(0).normal(size=count)
    base = make(noise)
    changed = (make(noise + size * (np.arange(count) == k)) for k in range(count))
    return np.stack([np.abs(np.nan_to_num(values - base)) / size for values in changed], axis=1)


def find_slopes(options: WindowOptions, rate: float, count: int) -> Array:
    """Size of the change of each value with each of `count` native samples of noise, [values,
    count]; values that are missing: 0.
    """

    def make(samples: Array) -> Array:
        signal = Signal(options.channels[0], rate, "", samples)
        return make_values(signal, 1.0, _make_cut(signal, []), options)

    return _measure_changes(make, count, size=1e3)


def measure_windows(options: WindowOptions, length: int) -> Array:
    """Size of the change of each value of the second of three windows with each value of the
    recording, [length, 3 length].
    """
    plain = {"window": length, "channels": options.channels[:1], "clock": None}
    chosen = options.model_copy(update={**plain, "bandpass": None, "notch": None})
    places = [WindowPlace(0.0, 0, length)]

    def make(samples: Array) -> Array:
        cut = _make_cut(Signal("", options.rate, "", samples), places)
        return next(make_windows(cut, chosen))[0, :, 0]

    return _measure_changes(make, 3 * length)


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
    rows = np.concatenate([noise[None], noise + np.eye(config.length)])
    values = _normalise(config, normalise, rows)
    return np.abs(values[1:] - values[0]).T


def find_normalisation_reach(config: ModelConfig, normalise: str, length: int) -> int:
    """Values between the first or last value of a window of `length` and the farthest one that
    changes with it.
    """
    distance = np.abs(np.arange(length) - np.array([[0], [length - 1]]))
    noise = np.random.default_rng(0).normal(size=length)
    values = _normalise(config, normalise, np.stack([noise, *(noise + (distance == 0))]))
    return int((distance * (values[1:] != values[0])).max())


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
        lambda module, args, made: record.tokens.append(made[0])
    )
    if model.config.normalises_windows:
        model.prepare = keep  # type: ignore[method-assign]
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
    tokens = [part for part in record.tokens if part.requires_grad]
    inputs = [part for part in record.inputs if part.requires_grad]
    slopes = torch.autograd.grad(target, tokens, retain_graph=True, allow_unused=True)
    read = [pair for pair in zip(tokens, slopes, strict=True) if pair[1] is not None]

    def pass_on(chosen: Tensor) -> Tensor:
        total = torch.zeros_like(inputs[0])
        if not read:
            return total
        used, weights = zip(
            *((part, slope * chosen[..., None]) for part, slope in read), strict=True
        )
        for slope in torch.autograd.grad(
            used, inputs, weights, retain_graph=True, allow_unused=True
        ):
            total = total if slope is None else total + slope
        return total.abs()

    return pass_on(~forbidden), pass_on(forbidden)


def find_path_influence(sizes: Tensor, part: str, span: tuple[int, int]) -> Influence:
    """Of forbidden samples by `sizes` [B, T, V], 0 elsewhere; the reach is from the nearest sample
    that may be read.
    """
    places = np.flatnonzero((sizes > FAINT * sizes.amax()).any(-1).any(0).cpu().numpy())
    before, after = [span[0] - 1], [span[1] + 1]
    readable = {"next": before, "previous": after}.get(part, before + after)
    distance = np.abs(places - np.array(readable)[:, None]).min(0).max(initial=0)
    return Influence(float(sizes.amax()), int(distance))


def join_influences(influences: Sequence[Influence]) -> Influence:
    """The largest of each figure."""
    return Influence(*map(max, zip(*influences, strict=True))) if influences else Influence()


def measure_stages(
    config: ModelConfig,
    jacobian: dict[str, Dependence],
    native: Sequence[NativeInfluence],
    options: WindowOptions | None,
    normalise: str,
) -> list[LeakStage]:
    """Every stage of the path to the predictions of `jacobian`, on the configuration `config` that
    it was measured on; without `options` those of the model.
    """
    dependence = jacobian["eval"]
    rows: list[StageRow] = []
    if options is not None:
        rows += _list_preparation(native, options)
    if config.tokenizer != "codes":
        length = config.length if options is None else options.window
        rows.append(_measure_normalising(config, dependence, normalise, length))
    if options is not None:
        slopes = measure_windows(options, config.length)
        places = np.arange(3 * config.length) - config.length
        action = f"{options.window} values every {options.stride}"
        rows.append(("windows", action, find_influence(slopes, places, dependence)))
    by_batch = Influence() if dependence.objective.size else jacobian["train"].objective
    rows += [
        ("tokenizer", config.tokenizer, dependence.tokenizer),
        ("objective", "derivative at random weights", dependence.objective),
        ("batch statistics", "the same in training mode", by_batch),
    ]
    return [
        LeakStage(
            stage, action, *influence, None if options is None else influence.reach / options.rate
        )
        for stage, action, influence in rows
    ]


def _list_preparation(native: Sequence[NativeInfluence], options: WindowOptions) -> list[StageRow]:
    """Filters, resampling of slower channels, and decimation of faster ones."""
    filters = [f"{part.step.filters}: {part.names}" for part in native if part.step.filters]
    changed = [part for part in native if part.step.resampling != "none"]
    slower = [part for part in changed if part.step.native_rate < options.rate]
    faster = [part for part in changed if part.step.native_rate > options.rate]
    by_filters = join_influences([part.filters for part in native])
    return [
        ("filters", "; ".join(filters) or "none", by_filters),
        _describe_resampling("resampling", slower, options.rate),
        _describe_resampling("decimation", faster, options.rate),
    ]


def _describe_resampling(stage: str, parts: Sequence[NativeInfluence], rate: float) -> StageRow:
    texts = (
        f"{METHODS[part.step.resampling]}, {part.step.native_rate:g} to {rate:g} Hz: {part.names}"
        for part in parts
    )
    return stage, "; ".join(texts) or "none", join_influences([part.resampling for part in parts])


def _measure_normalising(
    config: ModelConfig, dependence: Dependence, normalise: str, length: int
) -> StageRow:
    """Normalisation of windows of `length` values, and that of the model itself."""
    action = NORMALISATIONS.get(normalise, "none")
    if config.normalises_windows:
        action += ", then those of each window in the model"
    slopes = measure_normalisation(config, normalise)
    influence = find_influence(slopes, np.arange(config.length), dependence)
    reach = find_normalisation_reach(config, normalise, length) if influence.size else 0
    return "normalisation", action, influence._replace(reach=reach)
