"""Files of a run that were altered or removed after it was written: every verb that opens the run
names them on the screen and its page, and refuses what it needs.
"""

import shutil
from pathlib import Path

import pytest
import small

from bitimely_cli.main import main

FILES = (
    "run.json",
    "scores.json",
    "predictions.parquet",
    "metrics.jsonl",
    "preprocessing.json",
    "train_subjects.json",
    "main-score.parquet",
    "checkpoints/LATEST",
    "model/config.json",
    "model/model.safetensors",
)
MODEL = {"model/config.json", "model/model.safetensors"}
COMMANDS = {
    "report": ["report", "tuned", "scratch"],
    "compare": ["evaluate", "scratch", "--baselines", "cheap", "--compare", "tuned"],
    "analyze": ["analyze", "calibration", "tuned", "--bootstrap", "20"],
    "predict": ["predict", "tuned", "raw/data/p00_a.csv", "--map", "rate.toml"],
    "export": ["export", "tuned"],
    "dashboard": ["dashboard"],
}
RECORD = {"run.json"}
NEEDED: dict[str, set[str]] = {  # what the verb reads of the run
    "report": RECORD | {"scores.json", "predictions.parquet", "metrics.jsonl"},
    "compare": RECORD | {"scores.json", "predictions.parquet"},
    "analyze": RECORD | MODEL | {"scores.json", "train_subjects.json"},
    "predict": RECORD | MODEL | {"preprocessing.json"},
    "export": RECORD | MODEL | {"preprocessing.json", "scores.json"},
    "dashboard": set(),
}
OPTIONAL = {  # without it there is less to show
    ("report", "predictions.parquet"),
    ("report", "metrics.jsonl"),
    ("analyze", "scores.json"),
    ("export", "scores.json"),
}
PAGES = {
    "report": "reports/compare-tuned-scratch/report.html",
    "compare": "runs/scratch/report.html",
    "analyze": "reports/calibration-tuned/report.html",
    "predict": "reports/predict-tuned/report.html",
    "dashboard": "index.html",
}


def damage(folder: Path, name: str, *, remove: bool) -> None:
    path = folder / name
    path.unlink() if remove else path.write_bytes(path.read_bytes() + b"\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "verb",
    [pytest.param(verb, marks=[pytest.mark.slow] if verb == "report" else []) for verb in COMMANDS],
)
def test_altered_and_missing_files_of_a_run_are_named_and_what_is_needed_is_refused(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = small.copy_workspace(tmp_path / "home")
    monkeypatch.chdir(home)
    small.write_raw(home / "raw")
    (home / "rate.toml").write_text(f'rate = {small.RATE}\n[units]\nC3 = "uV"\nC4 = "uV"\n')
    run = home / "runs" / "tuned"
    needed = NEEDED[verb]

    def call(expected: set[int]) -> str:
        shutil.rmtree(home / "exports", ignore_errors=True)
        assert main([*COMMANDS[verb], "-w", "."]) in expected
        return "".join(capsys.readouterr())

    assert "not as they were written" not in call({0})
    shutil.copytree(run, tmp_path / "sound")
    for name in sorted(needed):
        for remove in (False, True):
            damage(run, name, remove=remove)
            refused = not (remove and (verb, name) in OPTIONAL)
            assert name in call({4, 5} if refused else {0}), (name, remove)
            shutil.rmtree(run)
            shutil.copytree(tmp_path / "sound", run)
    others = [name for name in FILES if name not in needed]
    for k, name in enumerate(others):
        damage(run, name, remove=k % 2 == 0)
    printed = call({0}).replace("\n", " ")
    page = (home / PAGES[verb]).read_text() if verb in PAGES else printed
    for name in others:
        assert name in printed, name
        assert name in page, name
