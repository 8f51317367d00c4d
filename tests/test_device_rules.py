"""Trainings and verbs on a pretended device, which refuses what CUDA refuses: no GPU is needed. See
`pretend_device.py`.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import small

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="builds a device guard with g++"),
    pytest.mark.skipif(
        "+cpu" not in importlib.metadata.version("torch"),
        reason="a CUDA build of torch brings the real device guard",
    ),
]

WAITS = {  # where the host may wait for the device between two log lines
    "zoo/ts2vec.py compute_ts2vec_loss": "lengths of the rows, to draw crops",
    "zoo/contrast.py permute_segments": "likewise",
    "zoo/s4.py draw_negatives": "tokens of other rows, to draw from (cpc with source = rows)",
    "zoo/mtand.py vae": "points that are reconstructed",
    "zoo/crt.py embed_patches": "patches are packed",
    "zoo/crt.py _gather": "likewise",
    "zoo/crt.py reconstruct": "likewise",
    "zoo/crt.py _spectrum": "rows are transformed by their length",
    "zoo/tf_c.py spectrum": "likewise",
    "zoo/autoformer.py apply_by_length": "likewise",
    "zoo/timesnet.py forward": "periods are shapes",
    "models/layers.py normalise_tokens": "batch norm of the real tokens, which are selected",
    "models/adapters.py _group_events": "the number of distinct times is a shape",
    "zoo/seft.py elements": "the number of observations is a shape",
    "ops/retention.py check_order": "times that decrease are refused, once a batch",
    "autograd/Dummy-1": "gradients of the selections above",
}


def run_sweep(*arguments: str) -> dict[str, Any]:
    """The findings of `device_rules.py`, none of which may be a failure."""
    done = subprocess.run(
        [sys.executable, str(HERE / "device_rules.py"), *arguments],
        capture_output=True,
        text=True,
        cwd=HERE.parent,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert not found["failed"]
    assert not found["refused"]
    assert {what.partition(" @ ")[2] for what in found["waits"]} <= set(WAITS)
    return found


@pytest.mark.slow
def test_every_model_trains_on_one_device_with_the_losses_of_the_cpu() -> None:
    assert run_sweep("training", "--kinds", "regular", "--own")["done"] >= 44


@pytest.mark.slow
def test_a_stack_never_waits_between_log_lines() -> None:
    found = run_sweep("training", "--kinds", "regular,mixed", "--models", "bitimelygpt")
    assert found["done"] == 7 + 6  # fine-tuning is on one data set
    assert not found["waits"]


@pytest.mark.slow
def test_settings_of_a_stack_do_not_make_it_wait() -> None:
    found = run_sweep("settings", "--models", "bitimelygpt")
    assert found["done"] == 14
    # of events
    assert set(found["waits"]) <= {"aten::_local_scalar_dense @ ops/retention.py check_order"}


@pytest.mark.slow
def test_settings_of_models_objectives_and_heads() -> None:
    assert run_sweep("settings")["done"] >= 39


@pytest.mark.slow
def test_nothing_needs_float64_of_a_device() -> None:
    assert run_sweep("narrow")["done"] >= 30


@pytest.mark.slow
def test_streams_and_a_resumed_training() -> None:
    assert run_sweep("streams")["done"] == 9


@pytest.mark.slow
def test_an_unusable_step_is_named_and_never_applied() -> None:
    assert run_sweep("faults")["done"] == 3


@pytest.mark.slow
def test_windows_reach_the_device_as_they_are_stored() -> None:
    found = run_sweep("stored")
    assert found["done"] == 4
    assert not found["waits"]


@pytest.mark.slow
def test_every_objective() -> None:
    assert run_sweep("training", "--kinds", "regular,mixed")["done"] >= 160


@pytest.mark.long
def test_ragged_windows_and_events() -> None:
    assert run_sweep("training", "--kinds", "ragged,events,mixed")["done"] >= 170


@pytest.mark.long
def test_long_sequences_in_the_form_for_gpus() -> None:
    assert (
        run_sweep(
            "training",
            "--models",
            "bitimelygpt,timelygpt,timelybert",
            "--length",
            "1280",
            "--kinds",
            "regular,ragged",
        )["done"]
        >= 30
    )


@pytest.mark.slow
def test_verbs_and_analyses_give_the_numbers_of_the_cpu(tmp_path: Path) -> None:
    home = small.copy_workspace(tmp_path / "home")
    values, _ = small.make_signals(0)
    (tmp_path / "recording.csv").write_text(
        "C3,C4\n" + "\n".join(",".join(map(str, row)) for row in values.tolist()) + "\n"
    )
    (tmp_path / "map.toml").write_text("rate = 50\n")
    assert run_sweep("verbs", "--home", str(home))["done"] == 18


# Of one step of 18m at batch 64 in bf16, as counted: launches, elementwise KB a token and layer, GB
# saved.
STEP = {"conv": (505, 57, 8.4), "patch": (495, 59, 4.3)}


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", STEP)
def test_a_step_of_18m_asks_no_more_of_a_gpu(tokenizer: str) -> None:
    command = [
        sys.executable,
        str(HERE / "count_step.py"),
        "--precision",
        "bf16",
        "--core",
        "bf16",
        "--objective",
        "next-previous",
        "--json",
    ]
    done = subprocess.run(
        [*command, "--set", f"tokenizer={tokenizer}"],
        capture_output=True,
        text=True,
        cwd=HERE.parent,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    launches, kilobytes, saved = STEP[tokenizer]
    assert found["launches"] <= launches
    assert found["elementwise_kb_token_layer"] <= kilobytes
    assert found["saved_gb"] <= saved
    assert found["host_waits"] == {}
