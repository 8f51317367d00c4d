"""The stamp of every shipped view under every objective, against predictions: native samples and
codes are really changed, one by one.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from planted import use_paper_tokens

from bitimely_core import models, objectives, registry
from bitimely_core.config import ModelConfig
from bitimely_core.datasets import synthetic
from bitimely_core.models.tokenizers import FIRST
from bitimely_core.schemas.tokens import WindowOptions
from bitimely_core.tokens import cutting
from bitimely_core.types import Batch, Record, Signal

sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))
import stamps

torch.set_num_threads(1)

CASES = list(stamps.list_cases())
WITH_TARGET = [
    name for name, entry in registry.objectives.items() if entry.facts.leak_free is not None
]
PAIRS = [  # the models of the page; others whose own objective it is take longer
    pytest.param(objective, model, marks=[pytest.mark.slow] if at else [])
    for objective in WITH_TARGET
    for at, model in enumerate(stamps.choose_models(objective))
]
CODES = 20  # of a sequence, each once
CHANGE = 1e-9  # of a prediction in float64; those of FFTs round to 1e-15


class Channel(NamedTuple):
    """What decides how the native samples of a channel become values."""

    native_rate: float
    rate: float
    is_held: bool
    is_gridded: bool
    stride: int


WINDOW = 32  # values, and at least three native samples; the window of a view would show no more
BEYOND = 4  # values to its left and right
NATIVE = Channel(100.0, 100.0, False, False, 64)


def list_channels(case: stamps.ViewCase) -> set[Channel]:
    """Those of a view that differ."""
    options = case.options
    assert options is not None
    return {
        Channel(rate, options.rate, name in options.hold, bool(options.grid), options.stride)
        for name, rate in case.rates
    }


class Recording(NamedTuple):
    """A window around the middle of a recording of one channel."""

    noise: np.ndarray  # [native samples]
    times: np.ndarray  # [native samples] s
    place: np.ndarray  # [native samples] int: the value at whose time a sample was taken
    options: WindowOptions
    native_rate: float
    first: int  # value of the recording with which the window begins

    def cut(self, samples: np.ndarray) -> np.ndarray:
        """The window, NaN where a value is missing, [T], by the code that makes tokens."""
        signals = [Signal("x", self.native_rate, "uV", samples)]
        signals += [Signal("Time", self.native_rate, "s", self.times)] if self.options.clock else []
        record = Record(recording_id="r", subject_id="s", signals=signals)
        units = ("uV", "s")[: len(self.options.channels)]
        found = cutting.cut_record(record, self.options, units, Counter())
        assert found is not None
        places = [place for place in found.places if place.first == self.first]
        found = found._replace(places=places)
        return next(cutting.make_windows(found, self.options))[0, :, 0].astype(np.float64)


def make_recording(channel: Channel) -> Recording:
    """White noise."""
    ratio = channel.rate / channel.native_rate
    window = WINDOW if channel.is_gridded else max(WINDOW, 3 * math.ceil(ratio))
    options = stamps.make_case("generic", "", several=False, rates={"x": channel.rate}).options
    assert options is not None
    changes: dict[str, Any] = {
        "rate": channel.rate,
        "window": window,
        "stride": channel.stride,
        "resample": True,
    }
    changes |= {"hold": ("x",)} if channel.is_held else {}
    if channel.is_gridded:
        rng = np.random.default_rng(1)
        times = np.sort(rng.uniform(0, window / channel.rate, 2 * window))
        options = options.model_copy(update={**changes, "clock": "Time", "grid": True})
        return Recording(
            rng.normal(size=len(times)),
            times,
            np.floor(times * channel.rate).astype(int),
            options,
            channel.native_rate,
            0,
        )
    first = math.ceil(2 * max(ratio, 1) / channel.stride) * channel.stride
    count = math.ceil((first + window) / ratio) + 8
    place = np.floor(np.arange(count) * ratio + 1e-9).astype(int) - first
    noise = np.random.default_rng(0).normal(size=count)
    return Recording(
        noise,
        np.arange(count) / channel.native_rate,
        place,
        options.model_copy(update=changes),
        channel.native_rate,
        first,
    )


class Predictions(NamedTuple):
    """Of the first of two rows."""

    values: np.ndarray  # [M, P]
    parts: list[str]  # of each prediction
    spans: list[tuple[int, int] | None]  # first and last position of its target; None: not valid


def predict(model: models.Model, objective: str, batch: Batch, *, training: bool) -> dict[str, Any]:
    """What the objective returns, with the same masks every time; negatives come from other rows:
    own ones would be seen.
    """
    options = {"source": "rows"} if registry.objectives[objective].facts.states else {}
    with torch.no_grad():
        return objectives.get(objective, **options)(
            model.train(training), batch, torch.Generator().manual_seed(3)
        )


def shrink_config(config: ModelConfig, normalise: str = "") -> ModelConfig:
    """Two layers, and of cpc three steps ahead, not only the last one."""
    revin = {"revin": False} if normalise == "none" and config.normalises_windows else {}
    return config.model_copy(
        update={"layers": 2}
        | revin
        | ({"predictor": "each", "ahead": 3} if config.name == "s4" else {})
    )


def find_spans(
    model: models.Model, batch: Batch, result: dict[str, Any]
) -> list[tuple[int, int] | None]:
    """The positions that each target holds: no two inputs are equal."""
    target, valid = result["target"][0], result["valid"][0]
    valid = valid.any(-1) if valid.dim() == 2 else valid
    if batch.values.dim() == 2:  # codes; the one behind the last stands for [EOS]
        order = {int(code) - FIRST: at for at, code in enumerate(batch.values[0])}
        places = (
            target
            if "cpc" in result["parts"]
            else torch.tensor([order.get(int(one), CODES) for one in target])
        )
        return [(int(at), int(at)) if ok else None for at, ok in zip(places, valid, strict=True)]
    if target.dim() == 1:  # numbers of tokens that are timesteps
        assert model.config.tokenizer == "steps"
        return [(int(one), int(one)) if ok else None for one, ok in zip(target, valid, strict=True)]
    # PatchTST standardises them first
    inputs = getattr(model, "prepare", model.expand_channels)(batch).values[0, :, 0]
    found = []
    for one, ok in zip(target, result["valid"][0], strict=True):
        at = (one[ok][:, None] == inputs).nonzero()[:, 1].tolist()
        found.append((min(at), max(at)) if at else None)
    return found


def is_forbidden(part: str, span: tuple[int, int], hidden: set[int], position: int) -> bool:
    """Whether a prediction may not depend on what was recorded at a position."""
    if part.startswith("next"):
        return position >= span[0]
    return position <= span[1] if part.startswith("previous") else position in hidden


def find_violations(
    base: dict[str, Any],
    spans: list[tuple[int, int] | None],
    changed: list[tuple[int, np.ndarray, dict[str, Any]]],
) -> bool:
    """Whether a change at a forbidden position reaches a prediction, or all that a target value is
    made of does.

    `changed` has the position of each change, which of the window's values differ with it, and the
    result.
    """
    parts = {
        at: name for name, part in base["slices"].items() for at in range(*part.indices(len(spans)))
    }
    hidden = {at for span in spans if span for at in range(span[0], span[1] + 1)}
    reached = torch.stack(
        [
            (one["prediction"] - base["prediction"])[0].abs().amax(-1) > CHANGE
            for _, _, one in changed
        ]
    ).numpy()  # [changes, M]
    differs = np.stack([one for _, one, _ in changed])  # [changes, values]
    for at, span in enumerate(spans):
        if span is None:
            continue
        if any(
            is_forbidden(parts[at], span, hidden, changed[k][0])
            for k in np.flatnonzero(reached[:, at])
        ):
            return True
        makers = differs[:, span[0] : span[1] + 1]
        if (makers.any(0) & ~(makers & ~reached[:, at, None]).any(0)).any():
            return True
    return False


@cache
def is_leaking(
    channel: Channel | None,
    objective: str,
    name: str,
    normalise: str = "channel",
    *,
    training: bool = False,
) -> bool:
    """By changes of every native sample of a window and around it, through the whole path; None: of
    the codes of a sequence.

    normalise: channel, window, or none: nothing by the statistics of a window, not in the model
    either.
    """
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    if channel is None:
        model = models.from_config(
            shrink_config(stamps.make_config(name, CODES, codes=CODES + 1))
        ).double()
        codes = torch.stack([FIRST + torch.randperm(CODES, generator=draw) for _ in range(2)])
        times = torch.rand(codes.shape, generator=draw, dtype=torch.float64).cumsum(1)
        batch = Batch(codes, times)
        variants = [
            (
                n,
                np.arange(CODES) == n,
                torch.where(torch.arange(2 * CODES).view(2, -1) == n, FIRST + CODES, codes),
            )
            for n in range(CODES)
        ]
        changed = [
            (n, differs, predict(model, objective, Batch(values, times), training=training))
            for n, differs, values in variants
        ]
    else:
        recording = make_recording(channel)
        model = models.from_config(
            shrink_config(stamps.make_config(name, recording.options.window), normalise)
        ).double()
        other = torch.randn(recording.options.window, generator=draw, dtype=torch.float64)

        def make_batch(samples: np.ndarray) -> Batch:
            window = recording.cut(samples)
            seen = np.isfinite(window)
            window = (
                (window - window[seen].mean()) / window[seen].std()
                if normalise == "window"
                else window / 1.5
            )
            values = torch.stack([torch.from_numpy(np.where(seen, window, 0.0)), other])[..., None]
            return Batch(
                values,
                mask=None
                if seen.all()
                else torch.stack([torch.from_numpy(seen), torch.ones(len(seen), dtype=torch.bool)])[
                    ..., None
                ],
            )

        batch, changed = make_batch(recording.noise), []
        base = recording.cut(recording.noise)
        for k in np.flatnonzero(
            (recording.place >= -BEYOND) & (recording.place < recording.options.window + BEYOND)
        ):
            samples = recording.noise.copy()
            samples[k] += 3.0
            result = predict(model, objective, make_batch(samples), training=training)
            changed.append(
                (
                    int(recording.place[k]),
                    np.nan_to_num(recording.cut(samples)) != np.nan_to_num(base),
                    result,
                )
            )
    result = predict(model, objective, batch, training=training)
    spans = find_spans(model, batch, result)
    assert sum(span is not None for span in spans) >= 2
    return find_violations(result, spans, changed)


def test_every_shipped_view_is_looked_at() -> None:
    shipped = {
        (name, view)
        for name, entry in registry.datasets.items()
        if entry.function.__module__.startswith("bitimely_core.")
        for view in entry.facts.views
    }
    assert {(case.dataset, case.view) for case in CASES} == shipped


@pytest.fixture
def paper_tokens(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The paper's tokens, whose batch norm a stamp names; those of patches: test_patch_cnn."""
    build = stamps.build_model_config

    def build_with_paper_tokens(name: str, preset: str, **options: Any) -> ModelConfig:
        return build(name, preset, **use_paper_tokens(name, options))

    monkeypatch.setattr(stamps, "build_model_config", build_with_paper_tokens)
    stamps.make_config.cache_clear()
    yield
    stamps.make_config.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "model"), PAIRS)
def test_the_stamp_of_every_view_is_what_changed_samples_show(
    objective: str, model: str, paper_tokens: None
) -> None:
    """A condition is named if and only if its cause, by itself, lets a forbidden sample reach a
    prediction.
    """
    in_itself, batches = (
        is_leaking(NATIVE, objective, model, training=training) for training in (False, True)
    )
    for case in CASES:
        if case.options is None or case.options.irregular:
            continue
        channels = list_channels(case)
        for normalise in ("channel", "window"):
            stamp = stamps.find_stamp(case, objective, model, normalise)
            if registry.objectives[objective].facts.leak_free is False:
                assert stamp is False
                assert in_itself
                continue
            parts = [] if stamp is True else str(stamp).split(" and ")
            of_window = in_itself or (
                normalise == "window" and is_leaking(NATIVE, objective, model, "window")
            )
            where = (case.dataset, case.view, normalise, stamp)
            assert ("given window statistics" in parts) == of_window, where
            assert ("up to batch statistics" in parts) == (batches and not in_itself), where
            of_channels = [part for part in parts if part.endswith(" channels")]
            assert bool(of_channels) == any(
                is_leaking(one, objective, model, "none") for one in channels
            ), where
            assert len(parts) == of_window + (batches and not in_itself) + len(of_channels), where


@pytest.mark.parametrize(
    ("objective", "model"),
    [pair for pair in PAIRS if "events" in registry.models[str(pair.values[1])].facts.input],
)
def test_the_stamp_of_codes_is_what_changed_codes_show(objective: str, model: str) -> None:
    in_itself, batches = (
        is_leaking(None, objective, model, training=training) for training in (False, True)
    )
    (stamp,) = {stamps.find_stamp(case, objective, model) for case in CASES if case.options is None}
    expected = False if in_itself else "up to batch statistics" if batches else True
    assert stamp == expected


def test_an_objective_without_a_target_has_no_stamp() -> None:
    for objective in registry.objectives.keys() - set(WITH_TARGET):
        assert {
            stamps.find_stamp(case, objective, stamps.choose_models(objective)[0])
            for case in CASES
            if case.options is not None
        } == {None}


def test_native_rates_are_those_of_the_recordings() -> None:
    for name in ("sleep-edf", "synthetic"):
        # as in the official files
        rates = {one.label: one.samples / synthetic.EPOCH for one in synthetic.CHANNELS}
        assert registry.datasets[name].facts.native_rates == {
            channel: rate for channel, rate in rates.items() if rate != synthetic.RATE
        }


@pytest.mark.slow
def test_the_page_is_what_the_code_says() -> None:
    assert stamps.PAGE.read_text() == stamps.format_page(), "run: python docs/generate.py"
