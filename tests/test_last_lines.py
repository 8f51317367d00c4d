"""What verbs end with: a short answer, notices once a workspace, and a next command that works."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from small import VERBS, copy_workspace

from bitimely_cli.following import name_next
from bitimely_cli.main import main, report_error
from bitimely_cli.screen import MOST_LINES, screen
from bitimely_core.errors import Finding, Reason, usage_error
from bitimely_core.notices import select_unseen
from bitimely_core.schemas.scores import Scores
from bitimely_core.wording import MOST_WORDS

SHOWING = (
    "evaluate tuned --bootstrap 0 --baselines cheap",
    "report tuned scratch",
    "embed plain --split test",
    "analyze svd plain --sequences 2",
    "export scratch",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_workspace(tmp_path_factory.mktemp("last") / "home with a blank")


def run(line: str, home: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    assert main([*shlex.split(line), "-w", str(home)]) == 0, line
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("line", SHOWING)
def test_a_verb_shows_a_table_a_short_answer_and_a_next_command(
    line: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(home / "exports" / "scratch", ignore_errors=True)
    said = run(line, home, capsys)
    assert any("──" in text for text in said), "a table"
    assert said[-1].startswith("next: bitimely ")
    table_end = max(k for k, text in enumerate(said) if not text.strip())
    for text in said[table_end + 1 :]:
        sentence = text.partition(": /")[0]
        assert len(sentence.split()) <= MOST_WORDS or text.startswith("next: "), text


@pytest.mark.slow
def test_the_next_command_is_that_of_the_state_and_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = copy_workspace(tmp_path / "home")
    for folder in ("reports", "exports", "runs/tuned", "runs/scratch/scores.json"):
        path = home / folder
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
    assert name_next("plain", home) == (
        f"next: bitimely finetune plain --data generic/classification -w {home}"
    ) or "scratch" in str(list((home / "runs").iterdir()))
    assert name_next("scratch", home) == f"next: bitimely evaluate scratch -w {home}"
    assert name_next("elsewhere", home) == f"next: bitimely dashboard -w {home}"
    seen = []
    for _ in range(4):
        line = name_next("scratch", home)
        seen.append(shlex.split(line)[2])
        words = shlex.split(line.removeprefix("next: bitimely "))
        extra = ["--bootstrap", "0", "--baselines", "cheap"] if words[0] == "evaluate" else []
        assert main([*words, *extra]) == 0, line
    assert seen == ["evaluate", "export", "dashboard", "dashboard"]
    main([*VERBS["finetune"], "-w", str(home)])
    main(["evaluate", "tuned", "--bootstrap", "0", "--baselines", "cheap", "-w", str(home)])
    line = name_next("tuned", home)
    assert line == f"next: bitimely report tuned scratch -w {home}"
    assert main(shlex.split(line.removeprefix("next: bitimely "))) == 0
    assert name_next("tuned", home) == f"next: bitimely export tuned -w {home}"


def test_a_damaged_record_leads_to_the_page_of_the_workspace(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{")
    assert name_next("a", tmp_path) == f"next: bitimely dashboard -w {tmp_path}"


def test_a_notice_is_shown_once_a_workspace_and_what_speaks_of_data_each_time(
    tmp_path: Path,
) -> None:
    general, data = "The objective can see its targets.", "generic/staging: no test scores."
    changed = "Of run a these files are not as they were written: b."
    assert select_unseen([general, data, changed, general], tmp_path) == [general, data, changed]
    assert select_unseen([general, data, changed], tmp_path) == [data, changed]
    assert select_unseen([general, "Another one."], tmp_path) == ["Another one."]
    assert select_unseen([general], tmp_path) == []
    other = tmp_path / "other"
    assert select_unseen([general], other) == [general]
    assert not other.exists(), "no workspace is made for a notice"


def test_json_holds_every_notice_each_time(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "report tuned scratch --json"
    first, second = (run(line, home, capsys)[-1] for _ in range(2))
    assert first == second


@pytest.mark.slow
def test_the_method_that_beats_a_run_comes_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three steps of a network against features, whose correct advice is the features."""
    workspace = str(tmp_path)
    assert main(["ingest", "synthetic", "-w", workspace]) == 0
    data = ["--data", "synthetic/staging", "-w", workspace]
    assert main(["train", "resnet", *data, "--steps", "3"]) == 0
    capsys.readouterr()
    assert main(["evaluate", "resnet-staging", "--bootstrap", "20", "-w", workspace]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"next: bitimely train features --data synthetic/staging -w {workspace}"
    assert main([*last.split()[2:]]) == 0
    assert main(["evaluate", "resnet-staging", "--bootstrap", "20", "-w", workspace]) == 0
    assert "train features" not in capsys.readouterr().out.splitlines()[-1]


def test_reasons_without_intervals_stand_below_the_values_of_the_baseline(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run("evaluate tuned --bootstrap 0 --baselines cheap", home, capsys)
    scores = Scores.load(home / "runs/tuned/scores.json")
    for name, metric in scores.baselines["majority"].metrics.items():
        (row,) = (line for line in said if line.split()[:1] == [name])
        assert float(row.split()[-1]) == pytest.approx(metric.value, rel=1e-3)
    assert [line for line in said if "no CI" in line] == ["all metrics: no CI: none was requested"]


@pytest.mark.slow
def test_scores_of_numbers_stand_beside_those_of_the_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They stood beside a majority, which numbers have none of."""
    raw = tmp_path / "raw"
    raw.mkdir()
    rng, values = np.random.default_rng(0), range(24)
    for k in values:
        np.savetxt(raw / f"p{k}.csv", rng.normal(0, k + 1, (200, 1)), header="EEG", comments="")
    table = [f"p{k}.csv,p{k},{k}" for k in values]
    (raw / "people.csv").write_text("\n".join(["file,subject,hr", *table]))
    map_file = tmp_path / "map.toml"
    map_file.write_text(
        'files = [{pattern = "p*.csv", rate = 20}]\n'
        '[table]\npath = "people.csv"\nfile = "file"\nsubject = "subject"\nvalue = "hr"\n'
    )
    run(f"ingest generic {raw} --map {map_file}", tmp_path, capsys)
    run("train features --data generic/regression", tmp_path, capsys)
    said = run("evaluate features-regression --baselines cheap", tmp_path, capsys)
    index = pl.read_parquet(tmp_path / "tokens/generic-regression/index.parquet")
    train, test = (index.filter(pl.col("split") == name)["label"] for name in ("train", "test"))
    assert next(line for line in said if "metric" in line).endswith("mean baseline ")
    (row,) = (line for line in said if line.split()[:1] == ["mae"])
    expected = (test.cast(float) - train.cast(float).mean()).abs().mean()
    assert float(row.split()[-1]) == pytest.approx(expected, rel=1e-3)


def test_a_dry_run_says_what_there_is(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = run("train resnet --data generic/classification --steps 5 --dry-run", home, capsys)
    assert not any(line.endswith(": -") for line in said)
    assert not any(".," in line for line in said), "sentences stand for themselves"
    assert "tokens: a token for each sample" in said


def test_the_error_that_ends_a_verb_is_shown_after_any_number_of_warnings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "silent", False)
    warnings = [
        Finding("warning", Reason.CORRUPT, f"night {number} is odd") for number in range(MOST_LINES)
    ]
    screen.print_findings(warnings)
    screen.print_findings(warnings)
    assert report_error(usage_error("5 steps", "expected 6")) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error[config] 5 steps, expected 6."


def test_a_command_that_an_error_advises_finds_the_workspace(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["train", "resnet", "--data", "sleep-edf/staging", "-w", str(home)]) == 4
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"bitimely ingest sleep-edf SOURCE -w {shlex.quote(str(home))}." in line
