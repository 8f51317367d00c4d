"""From native samples to predictions: what the stamp promises, against native samples that are
really changed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitimely_cli.main import main
from bitimely_core import objectives, registry
from bitimely_core.config import ModelConfig, ObjectiveConfig, Settings
from bitimely_core.schemas.tokens import WindowOptions
from bitimely_core.tokens import cutting
from bitimely_core.types import Record, Signal

CONTEXTS = {"next": "past", "next-previous-strict": "past or future", "gap": "around"}


def make_options(rate: float, window: int = 64, **changes: Any) -> WindowOptions:
    """A sliding view of the channel x."""
    values: dict[str, Any] = {
        "dataset": "tiny", "view": "", "task": "none", "split": "subject", "seed": 0, "normalise": "channel", "channels": ("x",), "rate": rate,
        "window": window, "stride": window, "resample": True, "decimate": (), "hold": (), "classes": (), "labels": None, "epoch": None,
        "trim": None, "target": None, "overlap": None, "bandpass": None, "notch": None, "test_fold": None, "folds": None, "stratify": None,
        "resampling": "two-sided", "filtering": "zero-phase", "clock": None, "grid": False, "points": False,
    }  # fmt: skip
    return WindowOptions(**{**values, **changes})


def make_values(samples: np.ndarray, rate: float, options: WindowOptions) -> np.ndarray:
    """All windows of a recording of one channel, one after another, by the code that makes
    tokens.
    """
    record = Record(recording_id="r", subject_id="s", signals=[Signal("x", rate, "uV", samples)])
    found = cutting.cut_record(record, options, ("uV",), Counter())
    assert found is not None
    return np.concatenate(list(cutting.make_windows(found, options)))[..., 0].ravel()


def find_dependence(
    native: int, rate: float, options: WindowOptions
) -> tuple[np.ndarray, np.ndarray]:
    """Which values change with which native samples, bool [values, native]; and which values are
    observed.
    """
    noise = np.random.default_rng(0).normal(size=native)
    base = make_values(noise, rate, options)
    out = np.zeros((len(base), native), dtype=bool)
    for k in range(native):
        moved = noise.copy()
        moved[k] += 1e3  # filters fade out far below rounding
        changed = make_values(moved, rate, options)
        out[:, k] = ~((base == changed) | (np.isnan(base) & np.isnan(changed)))
    return out, np.isfinite(base)


def is_leak_free(
    depends: np.ndarray, observed: np.ndarray, clock: np.ndarray, tokens: list[range], context: str
) -> bool:
    """The definition, by the clock: no visible value holds a sample that was taken in (or beyond)
    the target, and each target holds one that none does.

    `clock` [native] is the value at whose time a sample was taken, `tokens` are the values of each
    target.
    """
    if context == "past or future":
        return all(
            is_leak_free(depends, observed, clock, tokens, one) for one in ("past", "future")
        )
    values = np.arange(len(depends))
    inner = [token for token in tokens if len(values) // 4 < token.start < 3 * len(values) // 4]
    for token in inner:
        before, after = values < token.start, values >= token.stop
        visible = {"past": before, "future": after, "around": before | after}[context]
        forbidden = {
            "past": clock >= token.start,
            "future": clock < token.stop,
            "around": (clock >= token.start) & (clock < token.stop),
        }[context]
        reached = depends[visible].any(0)
        if (reached & forbidden).any() or any(
            observed[i] and not (depends[i] & ~reached).any() for i in token
        ):
            return False
    return True


def stamp_of(
    rates: list[tuple[str, float]], options: WindowOptions, objective: str, **model: Any
) -> bool | str | None:
    settings = Settings(
        model=ModelConfig(length=options.window, **model), objective=ObjectiveConfig(name=objective)
    )
    return objectives.leak_free(
        settings, preparation=[cutting.describe_preparation(rates, options)]
    )


def cases() -> Iterator[tuple[float, float, dict[str, Any], dict[str, Any]]]:
    """Native rate, rate, choices of tokenize, model."""
    models: list[dict[str, Any]] = [
        {"tokenizer": "patch", "patch": 4}, {"tokenizer": "patch", "patch": 8}, {"tokenizer": "conv"}, {"tokenizer": "steps"},
    ]  # fmt: skip
    rates = [(10, 10), (10, 40), (10, 80), (10, 30), (40, 10), (30, 20), (10, 25), (50, 20)]
    choices: list[dict[str, Any]] = [
        {},
        {"hold": ("x",)},
        {"resampling": "causal"},
        {"resampling": "pointwise"},
    ]
    for (native, rate), choice, model in product(rates, choices, models):
        yield native, rate, choice, model
    for choice, (native, rate) in product([{}, {"filtering": "causal"}], [(40, 40), (40, 10)]):
        yield native, rate, {"bandpass": (None, 4.0), "resampling": "causal", **choice}, models[0]
    # tokens start in the middle of what is held
    yield 10, 40, {"resampling": "causal", "stride": 6}, models[0]
    yield 10, 20, {"resampling": "causal", "stride": 65}, models[0]


@pytest.mark.parametrize(("native", "rate", "choice", "model"), list(cases()))
def test_the_stamp_is_true_where_no_native_sample_that_is_changed_reaches_its_prediction(
    native: float, rate: float, choice: dict[str, Any], model: dict[str, Any]
) -> None:
    options = make_options(rate, **choice)
    stride, whole = options.stride, options.model_copy(update={"stride": options.window})
    windows = 3
    length = int(windows * options.window * native / rate) + 2
    depends, observed = find_dependence(length, native, whole)
    clock = np.floor(np.arange(length) * rate / native + 1e-9)
    step, width = {"patch": (model.get("patch"), model.get("patch")), "conv": (4, 1)}.get(
        model["tokenizer"], (1, 1)
    )
    starts = sorted(
        {
            start
            for offset in (0, stride % step)
            for start in range(offset, len(depends) - width, step)
        }
    )
    for objective, context in CONTEXTS.items():
        expected = is_leak_free(
            depends, observed, clock, [range(s, s + width) for s in starts], context
        )
        stamp = stamp_of([("x", native)], options, objective, **model)
        assert (stamp is True) == expected, (objective, stamp)
        if not expected:
            assert isinstance(stamp, str)
            assert all(part.startswith("given ") for part in stamp.split(" and "))


def test_conditions_name_their_cause() -> None:
    patches = {"tokenizer": "patch", "patch": 8}
    options = make_options(
        100.0, channels=("eeg", "temp", "marker", "fast"), hold=("marker",), bandpass=(0.5, 40.0)
    )
    rates = [("eeg", 100.0), ("temp", 1.0), ("marker", 1.0), ("fast", 256.0)]
    everything = "given zero-phase filters and given interpolated channels and given held channels and given resampled channels"
    assert set(str(stamp_of(rates, options, "gap", **patches)).split(" and ")) == set(
        everything.split(" and ")
    )
    assert (
        stamp_of(rates[1:2], options.model_copy(update={"bandpass": None}), "next", **patches)
        == "given interpolated channels"
    )
    assert (
        stamp_of(rates[:1], options.model_copy(update={"filtering": "causal"}), "next", **patches)
        is True
    )
    assert (
        stamp_of(rates[:1], options.model_copy(update={"filtering": "causal"}), "gap", **patches)
        == "given causal filters"
    )
    assert (
        stamp_of(rates[:1], options.model_copy(update={"bandpass": None}), "gap", **patches) is True
    )


def test_objectives_without_a_declared_context_are_judged_by_the_strictest() -> None:
    claims = {
        name: entry.facts.context
        for name, entry in registry.objectives.items()
        if entry.facts.leak_free is True
    }
    assert {name: context for name, context in claims.items() if context != "around"} == {
        "cpc": "past",
        "next": "past",
        "next-previous-strict": "past or future",
    }


# --------------------------------------------------------------------------------------- the case of noise, by the command line


def call(
    capsys: pytest.CaptureFixture[str], home: Path, *argv: str, code: int = 0
) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*argv, "--json", "-w", str(home)]) == code
    body: dict[str, Any] = json.loads(capsys.readouterr().out)
    return body


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a cache of white noise at 1 Hz: 8 recordings of 640 samples."""
    home = tmp_path_factory.mktemp("noise")
    (home / "raw").mkdir()
    for i in range(8):
        np.save(
            home / "raw" / f"p{i}.npy", np.random.default_rng(i).normal(size=640).astype(np.float32)
        )
    (home / "map.toml").write_text(
        '[[files]]\nmatch = "p(?P<subject>.)"\nrate = 1\nchannels = ["x"]\n'
    )
    assert main(
        ["ingest", "generic", str(home / "raw"), "--map", str(home / "map.toml"), "-w", str(home)]
    ) in {0, 3}
    return home


TOKENS = {
    "interpolated": ["--rate", "100", "--window", "1600"],
    "held": ["--rate", "100", "--window", "1600", "--resampling", "causal"],
    "native": ["--window", "64"],
    "pointwise": ["--rate", "100", "--window", "1600", "--resampling", "pointwise"],
    # one native sample a patch
    "short": ["--rate", "4", "--window", "64", "--resampling", "causal"],
}
STAMPS = {
    "interpolated": "given interpolated channels",
    "held": "given held channels",
    "native": True,
    "pointwise": True,
    "short": True,
}


@pytest.mark.parametrize("name", TOKENS)
def test_noise_is_stamped_by_what_was_done_to_it(
    capsys: pytest.CaptureFixture[str], noise: Path, name: str
) -> None:
    made = call(capsys, noise, "tokenize", "generic", "--name", name, *TOKENS[name])
    assert made["windows"] > 0
    stored = json.loads((noise / "tokens" / name / "manifest.json").read_text())["preparation"][
        "channels"
    ]
    assert [(one["channels"], one["native_rate"]) for one in stored] == [(["x"], 1.0)]
    argv = (
        "pretrain",
        "--preset",
        "tiny",
        "--data",
        name,
        "--objective",
        "next-previous-strict",
        "--steps",
        "1",
        "--batch-size",
        "4",
    )
    done = call(
        capsys,
        noise,
        *argv,
        "--set",
        "model.tokenizer=patch",
        "--set",
        "model.patch=4",
        "--run",
        name,
    )
    assert done["leak_free"] == STAMPS[name]
    run = json.loads((noise / "runs" / name / "run.json").read_text())
    assert run["leak_free"] == STAMPS[name]
    card = (noise / "runs" / name / "model_card.md").read_text()
    page = (noise / "runs" / name / "report.html").read_text()
    for text in (card, page):
        assert (f"leak-free {STAMPS[name]}" in text) == (STAMPS[name] is not True)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENS)
def test_analyze_leakage_changes_native_samples(
    capsys: pytest.CaptureFixture[str], noise: Path, name: str
) -> None:
    """The measured stamp agrees with that of the run, and the stage that leaks is named by its
    influence.
    """
    patches = (
        "--set",
        "model.tokenizer=patch",
        "--set",
        "model.patch=4",
        "--objective",
        "next-previous-strict",
        "--preset",
        "tiny",
    )
    if not (noise / "runs" / name).is_dir():
        call(capsys, noise, "tokenize", "generic", "--name", name, *TOKENS[name])
        call(
            capsys,
            noise,
            "pretrain",
            "--data",
            name,
            *patches,
            "--steps",
            "1",
            "--batch-size",
            "4",
            "--run",
            name,
        )
    found = call(capsys, noise, "analyze", "leakage", name, "--steps", "1")
    assert found["leak_free"] is (STAMPS[name] is True)
    summary = json.loads((noise / "reports" / f"leakage-{name}" / "summary.json").read_text())
    (native,) = summary["native"]
    assert summary["stamped"] == STAMPS[name]
    assert (native["resampling"] > 0.1, native["copied"] > 0.5) == (
        name in {"interpolated", "held"},
        name in {"interpolated", "held"},
    )
    assert native["filters"] == 0
    if name == "interpolated":  # without a run
        again = call(
            capsys,
            noise,
            "analyze",
            "leakage",
            "--data",
            name,
            "--objective",
            "next-previous-strict",
            "--steps",
            "1",
            "--name",
            "d",
        )
        assert again["leak_free"] is False
        assert (
            "given interpolated channels" in (noise / "reports" / "d" / "report.html").read_text()
        )
