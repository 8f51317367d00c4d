"""No path is a pattern: folders with brackets, stars, question marks and spaces work in every verb."""

from pathlib import Path

import pytest
import small

from bitimely_cli.main import main

ODD = "a [1] *b? {c}"
STEPS = ["--steps", "2", "--set", "train.device=cpu"]


def run(home: Path, *lines: list[str], codes: tuple[int, ...] = (0,)) -> None:
    for line in lines:
        assert main([*line, "-w", str(home)]) in codes, line


@pytest.mark.slow
def test_recordings_in_a_folder_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    raw, home = tmp_path / ODD / "raw [0-9]", tmp_path / ODD / "home"
    small.write_raw(raw)
    (tmp_path / "a 1 b").mkdir()  # what the name would match as a pattern
    rate = raw / "rate.toml"
    rate.write_text(f'rate = {small.RATE}\n[units]\nC3 = "uV"\nC4 = "uV"\n')
    recording = str(raw / "data" / "p00_a.csv")
    run(
        home,
        ["ingest", "generic", str(raw), "--map", str(raw / "map.toml")],
        ["ingest", "generic", str(raw), "--map", str(raw / "map.toml"), "--exclude", "data/p01_a"],
        ["tokenize", small.VIEW, "--window", str(small.SAMPLES)],
        ["train", "features", "--data", small.VIEW, "--run", "features"],
        ["train", "resnet", "--data", small.VIEW, "--run", "net", *STEPS],
        ["evaluate", "features", "--bootstrap", "20", "--baselines", "cheap"],
        ["evaluate", "net", "--bootstrap", "20", "--compare", "features"],
        ["predict", "net", recording, "--map", str(rate)],
        ["report", "features", "net"],
        ["export", "net"],
        ["verify", str(home)],
        ["dashboard"],
    )


@pytest.mark.slow
def test_claims_in_a_folder_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    home = tmp_path / ODD / "home [x]"
    data = ["--data", small.EVENTS]
    choices = ["--no-select", "--min-codes", "2", "--max-events", "24"]
    run(home, ["ingest", small.EVENTS, "--subjects", "60", *choices], codes=(0, 3))
    run(
        home,
        ["pretrain", *small.TINY, *small.RETENTION, *data, "--steps", "2", "--run", "events"],
        ["train", "counts", *data, "--run", "counts"],
        ["finetune", "events", *data, "--steps", "2", "--batch-size", "8", "--run", "labels"],
        ["evaluate", "labels", "--bootstrap", "20", "--baselines", "cheap"],
        ["evaluate", "counts", "--bootstrap", "20", "--compare", "labels"],
        ["predict", "labels", str(home / "cache" / small.EVENTS)],
        ["report", "labels", "counts"],
        ["export", "labels"],
        ["verify", str(home)],
    )
