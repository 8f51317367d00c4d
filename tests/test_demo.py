"""The demonstration: its last step, and the same digits for any number of threads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bitimely_cli import experiments
from bitimely_cli.main import main

SHORT = {  # what makes the commands of the demonstration take seconds
    "--subjects 6000": "--subjects 80",
    "--epochs 1 ": "--steps 3 --batch-size 8 ",
    "--epochs 2 ": "--steps 3 --batch-size 8 ",
    "evaluate ": "evaluate --bootstrap 20 ",
}
WINNERS = re.compile(r"\b(better|worse|best|highest|lowest|superior|beats)\b")


def shorten(command: str) -> str:
    for text, other in SHORT.items():
        command = command.replace(text, other)
    return command


def run_demo(home: Path, capsys: pytest.CaptureFixture[str], threads: int) -> dict[str, Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # although some of the made-up rows are faulty
        assert main(["demo", "--claims", "-w", str(home), "--json"]) == 0
        assert torch.get_num_threads() == threads, (
            "the demonstration leaves the number of threads as it was"
        )
    finally:
        torch.set_num_threads(before)
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize(
    ("step", "code", "reason"),
    [("evaluate absent", 2, "unknown_name"), ("verify", 4, "incomplete")],
)
def test_a_demonstration_that_fails_says_so_in_json(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    code: int,
    reason: str,
) -> None:
    (tmp_path / "demo" / "runs" / "begun").mkdir(parents=True)
    monkeypatch.setattr(experiments, "DEMO", experiments.DEMO._replace(steps=(step,)))
    assert main(["demo", "-w", str(tmp_path), "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["exit_code"], found["error"]["code"]) == (code, reason)


@pytest.mark.long
def test_the_demonstration_of_claims_says_the_same_on_any_number_of_threads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = tuple(map(shorten, experiments.CLAIMS.steps))
    monkeypatch.setattr(experiments, "CLAIMS", experiments.CLAIMS._replace(steps=steps))
    one, several = (run_demo(tmp_path / f"{threads}", capsys, threads) for threads in (1, 3))
    for key in ("verdict", "metrics", "baselines", "comparison"):
        assert one[key] == several[key], key
    runs = {"tiny-synthetic-claims", "tiny-synthetic-claims-scratch"}
    assert one["metrics"].keys() == runs
    page = Path(one["report"]).read_text()
    assert all(run in page for run in runs)
    assert "Data: synthetic-claims" in page
    assert not WINNERS.search(one["verdict"]), "one seed a row: nothing is said about the methods"
    record = json.loads((tmp_path / "3" / "demo" / "runs" / "tiny" / "run.json").read_bytes())
    assert record["environment"]["threads"] == 1
