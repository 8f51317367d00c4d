"""SIGKILL at random moments, then the same command: the weights are those of the undisturbed run,
bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bitimely_cli.main import main

ROUNDS = int(os.environ.get("BITIMELY_KILL_ROUNDS", "3"))


@pytest.mark.long
def test_pretrain_killed_at_random_moments_ends_in_the_same_weights(tmp_path: Path) -> None:
    workspace = tmp_path / "w"
    argv = [
        "pretrain",
        "--preset",
        "tiny",
        "--data",
        "synthetic/staging",
        "--epochs",
        "2",
        "--set",
        "model.tokenizer=patch",
        "--set",
        "train.checkpoint_every=3",
    ]
    argv += [
        "--set",
        "model.layers=2",
        "--set",
        "model.dropout=0.1",
        "--objective",
        "masked",
        "--model",
        "timelybert",
        "--batch-size",
        "64",
        "-w",
        str(workspace),
    ]
    assert main(["ingest", "synthetic", "-w", str(workspace)]) == 0
    assert main(["tokenize", "synthetic/staging", "-w", str(workspace)]) == 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    log = tmp_path / "log"

    def started(name: str) -> subprocess.Popen[bytes]:
        with log.open("wb") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "bitimely_cli", *argv, "--run", name],
                env=environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    begun = time.monotonic()
    assert started("whole").wait() == 0, log.read_text()
    span = time.monotonic() - begun
    weights = (workspace / "runs" / "whole" / "model" / "model.safetensors").read_bytes()
    losses = _losses(workspace / "runs" / "whole")
    draw = random.Random(0)
    for number in range(ROUNDS):
        name, kills = f"killed-{number}", 0
        while True:
            process = started(name)
            try:
                code = process.wait(timeout=draw.uniform(0.3, 1.0) * span if kills < 2 else None)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                kills += 1
                continue
            assert code == 0, log.read_text()
            break
        assert (workspace / "runs" / name / "model" / "model.safetensors").read_bytes() == weights
        assert _losses(workspace / "runs" / name) == losses
        assert not [p for p in (workspace / "runs" / name).rglob("*") if ".tmp" in p.name]


def _losses(folder: Path) -> list[tuple[int, str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["split"], line["loss"]) for line in lines]
