"""The demonstration: its last step, and the same digits for any number of threads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bitimely_cli import experiments
from bitimely_cli.main import main

SHORT = {  # what makes the commands of the demonstration take seconds
    "--subjects 3000": "--subjects 700",
    "--steps 300": "--steps 3",
    "evaluate ": "evaluate --bootstrap 20 --baselines cheap ",
}


def shorten(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    tour = getattr(experiments, name)
    steps = []
    for step in tour.steps:
        for text, other in SHORT.items():
            step = step.replace(text, other)
        steps.append(step)
    monkeypatch.setattr(experiments, name, tour._replace(steps=tuple(steps)))


def run_demo(
    home: Path, capsys: pytest.CaptureFixture[str], *options: str, threads: int
) -> dict[str, Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # although some of the made-up rows are faulty
        assert main(["demo", *options, "-w", str(home), "--json"]) == 0
        assert torch.get_num_threads() == threads, (
            "the demonstration leaves the number of threads as it was"
        )
    finally:
        torch.set_num_threads(before)
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    result: dict[str, Any] = json.loads(out)
    return result


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
    monkeypatch.setattr(experiments, "NIGHTS", experiments.NIGHTS._replace(steps=(step,)))
    assert main(["demo", "-w", str(tmp_path), "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["exit_code"], found["error"]["code"]) == (code, reason)


@pytest.mark.slow
def test_the_demonstration_stages_a_night_and_scores_a_cohort(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch, "NIGHTS")
    shorten(monkeypatch, "COHORT")
    result = run_demo(tmp_path, capsys, threads=1)
    home = tmp_path / "demo"
    for run, (metric, title) in {
        "resnet-staging": ("accuracy", "accuracy"),
        "features-staging": ("accuracy", "accuracy"),
        "trees-synthetic-claims": ("auprc", "AUPRC"),
    }.items():
        scores = json.loads((home / "runs" / run / "scores.json").read_bytes())
        reached = scores["metrics"][metric]["value"]
        assert result["metrics"][run] == reached
        best = max(baseline[metric]["value"] for baseline in scores["baselines"].values())
        (line,) = (text for text in result["verdict"].splitlines() if text.startswith(run))
        assert f"{title} {reached:.3f};" in line
        assert line.endswith(f"{best:.3f}.")
    night, cohort = (Path(page).read_text() for page in result["pages"])
    assert "sleep efficiency" in night.lower()
    assert all(label in cohort for label in ("chf", "copd", "diabetes", "tempo"))
    record = json.loads((home / "runs" / "resnet-staging" / "run.json").read_bytes())
    assert record["environment"]["threads"] == 1


@pytest.mark.long
def test_the_demonstration_of_claims_says_the_same_on_any_number_of_threads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch, "COHORT")
    single, several = (
        run_demo(tmp_path / f"{threads}", capsys, "--claims", threads=threads) for threads in (1, 3)
    )
    for key in ("verdict", "metrics"):
        assert single[key] == several[key], key
    assert single["metrics"].keys() == {"trees-synthetic-claims"}
