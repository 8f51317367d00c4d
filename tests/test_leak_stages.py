"""What each stage adds to a leak: against closed forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_preparation import make_options

from bitimely_cli.main import main
from bitimely_core import objectives
from bitimely_core.analyses import leak_stages, leakage
from bitimely_core.analyses.leak_stages import LeakStage
from bitimely_core.config import ModelConfig, build_model_config
from bitimely_core.schemas.tokens import WindowOptions
from bitimely_core.tokens.cutting import describe_preparation

torch.set_num_threads(1)


def measure(
    native_rate: float,
    options: WindowOptions,
    objective: str,
    normalise: str = "channel",
    **model: Any,
) -> dict[str, LeakStage]:
    """The stages of a view of one channel."""
    name = {"cpc": "s4", "masked-patches": "patchtst"}.get(objective, "bitimelygpt")
    chosen = {"tokenizer": "patch", "patch": 4} if name == "bitimelygpt" else {}
    config = leakage._shrink_config(
        build_model_config(name, "tiny", channels=1, **{**chosen, **model})
    )
    settings = {"source": "rows"} if objective == "cpc" else {}
    found = {
        mode: leakage.measure_jacobian(
            config, objectives.get(objective, **settings), 0, training=mode == "train"
        )
        for mode in ("eval", "train")
    }
    preparation = describe_preparation([("x", native_rate)], options)
    native = leak_stages.measure_native(config, found["eval"], options, preparation, normalise)
    return {
        one.stage: one
        for one in leak_stages.measure_stages(config, found, native, options, normalise)
    }


def list_causes(stages: dict[str, LeakStage]) -> set[str]:
    """Stages that add to a leak; the others have no figure at all."""
    assert all(
        one.reach == 0 and one.verdict != "reaches forbidden samples"
        for one in stages.values()
        if one.influence == 0
    )
    return {name for name, one in stages.items() if one.verdict != "adds nothing"}


def test_statistics_of_a_window_show_every_sample_to_the_first_one_and_those_of_the_training_split_none() -> (
    None
):
    config = ModelConfig(length=24)
    noise = np.random.default_rng(0).normal(size=24)

    def standardise(values: np.ndarray) -> np.ndarray:
        return (values - values.sum() / 24) / np.sqrt(
            ((values - values.sum() / 24) ** 2).sum() / 24
        )

    expected = np.array(
        [np.abs(standardise(noise + (np.arange(24) == j)) - standardise(noise)) for j in range(24)]
    ).T
    found = leak_stages.measure_normalisation(config, "window")
    assert found == pytest.approx(expected, abs=1e-5)
    assert (found[0] > 1e-4).all()
    assert leak_stages.measure_normalisation(config, "channel") == pytest.approx(
        np.eye(24), abs=1e-5
    )
    assert np.count_nonzero(leak_stages.measure_normalisation(config, "none")) == 24
    assert leak_stages.find_normalisation_reach(config, "window", 3000) == 2999
    assert leak_stages.find_normalisation_reach(config, "channel", 3000) == 0


@pytest.mark.parametrize("objective", ["next", "next-previous-strict", "gap"])
@pytest.mark.parametrize("normalise", ["channel", "window", "none"])
def test_normalisation_alone_leaks_by_the_statistics_of_a_window(
    objective: str, normalise: str
) -> None:
    stages = measure(100, make_options(100, 1000), objective, normalise)
    assert list_causes(stages) == ({"normalisation"} if normalise == "window" else set())
    assert stages["normalisation"].seconds == pytest.approx(9.99 if normalise == "window" else 0)


@pytest.mark.parametrize("objective", ["next", "next-previous-strict"])
def test_linear_interpolation_shows_what_it_leads_to(objective: str) -> None:
    """A value 99/100 on the way to the next native sample, and the value right behind this one,
    hold it to 99 %; it is up to 99 values away.
    """
    stages = measure(1, make_options(100, 1000), objective)
    assert list_causes(stages) == {"resampling"}
    assert stages["resampling"].influence == pytest.approx(0.99, abs=1e-6)
    assert stages["resampling"].reach == 99
    assert stages["resampling"].seconds == pytest.approx(0.99)
    assert "1 to 100 Hz" in stages["resampling"].action


def test_held_values_repeat_what_was_read() -> None:
    """38 values in tokens of 4, the sixth of which begins a native sample: it and the first token,
    before which nothing is read, are no copies.
    """
    held = measure(1, make_options(100, 1000, resampling="causal"), "next")
    assert list_causes(held) == {"resampling"}
    assert (held["resampling"].influence, held["resampling"].reach, held["resampling"].verdict) == (
        0,
        0,
        "repeats what was read",
    )
    assert held["resampling"].copied == pytest.approx(30 / 38)
    pointwise = measure(1, make_options(100, 1000, resampling="pointwise"), "next")
    assert list_causes(pointwise) == set()


@pytest.mark.slow
def test_decimation_is_a_stage_of_its_own() -> None:
    assert list_causes(measure(200, make_options(100, 1000), "next")) == {"decimation"}
    assert list_causes(measure(200, make_options(100, 1000, resampling="causal"), "next")) == set()
    assert list_causes(measure(200, make_options(100, 1000, resampling="causal"), "gap")) == {
        "decimation"
    }
    assert (
        list_causes(measure(200, make_options(100, 1000, resampling="pointwise"), "gap")) == set()
    )


@pytest.mark.slow
def test_filters_are_a_stage_of_their_own() -> None:
    assert list_causes(measure(100, make_options(100, 1000, bandpass=(None, 20.0)), "next")) == {
        "filters"
    }
    assert (
        list_causes(
            measure(100, make_options(100, 1000, bandpass=(None, 20.0), filtering="causal"), "next")
        )
        == set()
    )
    assert list_causes(measure(1, make_options(100, 1000, bandpass=(None, 0.2)), "next")) == {
        "filters",
        "resampling",
    }


@pytest.mark.parametrize(
    ("objective", "causes"), [("next", set()), ("gap", set()), ("next-previous", {"objective"})]
)
@pytest.mark.parametrize("tokenizer", ["conv", "patch", "steps"])
def test_the_objective_alone(objective: str, causes: set[str], tokenizer: str) -> None:
    assert (
        list_causes(measure(100, make_options(100, 1000), objective, tokenizer=tokenizer)) == causes
    )


def test_tokens_that_share_samples_are_a_leak_of_the_tokenizer() -> None:
    """Of cpc the target is a token: by conv, token n reads up to 4n + 3, and the next one from 4n +
    1 on. Of steps, each reads its own.
    """
    shared = measure(
        100,
        make_options(100, 1000),
        "cpc",
        tokenizer="conv",
        encoder_norm="layer",
        predictor="each",
        ahead=1,
    )
    assert list_causes(shared) == {"tokenizer"}
    assert shared["tokenizer"].reach == 3  # 4n + 1 .. 4n + 3 of the target that begins there
    assert (
        list_causes(
            measure(
                100, make_options(100, 1000), "cpc", encoder_norm="layer", predictor="each", ahead=1
            )
        )
        == set()
    )


def test_batch_statistics_and_normalisation_in_the_model() -> None:
    assert list_causes(measure(100, make_options(100, 1000), "cpc", predictor="each", ahead=1)) == {
        "batch statistics"
    }
    assert list_causes(measure(100, make_options(100, 1000), "masked-patches")) == {"normalisation"}
    assert (
        list_causes(measure(100, make_options(100, 1000), "masked-patches", revin=False)) == set()
    )


def test_a_window_holds_the_values_of_its_place_alone() -> None:
    found = leak_stages.measure_windows(make_options(100, 1000, stride=3), 12)
    assert found == pytest.approx(np.eye(12, 36, 12), abs=1e-6)


@pytest.mark.slow
def test_the_page_of_a_view_has_a_figure_for_each_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "raw").mkdir()
    for i in range(4):
        np.save(
            tmp_path / "raw" / f"p{i}.npy",
            np.random.default_rng(i).normal(size=60).astype(np.float32),
        )
    (tmp_path / "map.toml").write_text(
        '[[files]]\nmatch = "p(?P<subject>.)"\nrate = 1\nchannels = ["x"]\n'
    )
    home = ["-w", str(tmp_path)]
    assert main(
        ["ingest", "generic", str(tmp_path / "raw"), "--map", str(tmp_path / "map.toml"), *home]
    ) in {0, 3}
    assert (
        main(
            [
                "tokenize",
                "generic",
                "--name",
                "fast",
                "--rate",
                "100",
                "--window",
                "1600",
                "--normalise",
                "window",
                *home,
            ]
        )
        == 0
    )
    assert (
        main(
            [
                "analyze",
                "leakage",
                "--data",
                "fast",
                "--objective",
                "next",
                "--steps",
                "1",
                "--name",
                "page",
                *home,
            ]
        )
        == 0
    )
    stages = {
        one["stage"]: one
        for one in json.loads((tmp_path / "reports" / "page" / "summary.json").read_text())[
            "stages"
        ]
    }
    assert list(stages) == [
        "filters",
        "resampling",
        "decimation",
        "normalisation",
        "windows",
        "tokenizer",
        "objective",
        "batch statistics",
    ]
    assert {name for name, one in stages.items() if one["verdict"] != "adds nothing"} == {
        "resampling",
        "normalisation",
    }
    assert (stages["resampling"]["seconds"], stages["normalisation"]["seconds"]) == (
        pytest.approx(0.99),
        pytest.approx(15.99),
    )
    page = (tmp_path / "reports" / "page" / "report.html").read_text()
    assert all(
        text in page
        for text in (
            "reaches forbidden samples",
            "linear interpolation, 1 to 100 Hz: x",
            "statistics of each window",
        )
    )
