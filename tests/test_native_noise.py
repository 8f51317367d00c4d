"""White noise at the native rate through the whole path: tokenize, pretrain, evaluate. Where the
stamp is true, nothing of it can be predicted.

Every recording has mean 0 and variance 1 exactly, and windows without overlap cover all of it. So a
prediction p that knows nothing of its target x has held-out loss / variance 1 + mean p^2 - 2 mean x
p: above 1 by its own size, below it by chance alone. What is learned by heart in so few steps is
small: mean p^2 is at most 0.05. With the 3,200 targets of the one held-out recording, chance has a
standard deviation of at most 2 sqrt(0.05 / 3200) = 0.008, and 0.97 is nearly four of them below 1.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from test_preparation import call

from bitimely_cli.main import main

torch.set_num_threads(1)

SAMPLES = 3200
PATH = {  # tokenize -> stamp of next-previous-strict, patches of 4 values
    "native": (["--window", "64"], True),
    # held, and a native sample a patch
    "short": (["--rate", "4", "--window", "256", "--resampling", "causal"], True),
    "pointwise": (["--rate", "100", "--window", "400", "--resampling", "pointwise"], True),
    "slow-interpolated": (["--rate", "20", "--window", "160"], "given interpolated channels"),
    "interpolated": (["--rate", "100", "--window", "400"], "given interpolated channels"),
}
FAST = {"native", "short", "slow-interpolated"}


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a cache of white noise at 1 Hz: 8 recordings."""
    home = tmp_path_factory.mktemp("native")
    (home / "raw").mkdir()
    for i in range(8):
        drawn = np.random.default_rng(i).normal(size=SAMPLES)
        np.save(
            home / "raw" / f"p{i}.npy", ((drawn - drawn.mean()) / drawn.std()).astype(np.float32)
        )
    (home / "map.toml").write_text(
        '[[files]]\nmatch = "p(?P<subject>.)"\nrate = 1\nchannels = ["x"]\n'
    )
    assert main(
        ["ingest", "generic", str(home / "raw"), "--map", str(home / "map.toml"), "-w", str(home)]
    ) in {0, 3}
    return home


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.long]) for name in PATH]
)
def test_noise_is_predicted_only_under_a_condition(
    capsys: pytest.CaptureFixture[str], noise: Path, name: str
) -> None:
    choices, stamp = PATH[name]
    call(capsys, noise, "tokenize", "generic", "--name", name, *choices)
    model = [
        part
        for value in ("model.tokenizer=patch", "model.patch=4", "train.lr=0.002")
        for part in ("--set", value)
    ]
    argv = (
        "pretrain",
        "--preset",
        "tiny",
        "--data",
        name,
        "--objective",
        "next-previous-strict",
        "--steps",
        "40",
        "--batch-size",
        "16",
    )
    assert call(capsys, noise, *argv, *model, "--run", name)["leak_free"] == stamp
    found = call(capsys, noise, "evaluate", name)["metrics"]["rel"]["value"]
    assert json.loads((noise / "runs" / name / "scores.json").read_text())["leak_free"] == stamp
    if stamp is True:
        assert 0.97 <= found <= 1.05
    else:
        assert found < 0.15
