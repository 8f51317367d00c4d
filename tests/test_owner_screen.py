"""Who owns the data sees exact counts on the screen; JSON, pages and files have those that may be
shared. Of synthetic people nothing is withheld.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
import test_privacy

from bitimely_cli.main import main
from bitimely_core import privacy
from bitimely_core.claims.disclosure import is_open_source
from bitimely_core.tokens.sequences import open_sequences

CHOICES = ("--no-select", "--min-codes", "2")
RARE = ("chf_source", "flu")  # labels of the columns, with 1 to 10 cases
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """What a command prints on stdout."""

    def call(*words: str, folder: str = "w") -> str:
        capsys.readouterr()
        assert main([*words, "-w", str(tmp_path / folder)]) in {0, 3}
        return capsys.readouterr().out

    return call


def read_cells(text: str, row: str) -> list[str]:
    """The cells of the first row of that name in the tables of a text."""
    (line, *_) = re.findall(rf"^ {re.escape(row)} +(.+?) *$", text, flags=re.M)
    return re.split(r" {2,}", line)


def count_cases(folder: Path, split: str | None = None) -> dict[str, int]:
    """Label -> cases, counted in the shards."""
    frame = pl.concat([pl.read_parquet(path) for path in folder.glob("sequences-*.parquet")])
    if split:
        frame = frame.filter(pl.col("split").cast(pl.String) == split)
    return {
        name.removeprefix("y_"): int((frame[name] == 1).sum())
        for name in frame.columns
        if name.startswith("y_")
    }


@pytest.mark.slow
def test_the_owner_sees_exact_counts_and_others_do_not(run: Run, tmp_path: Path) -> None:
    raw = test_privacy.write_cohort(tmp_path / "raw", 1)
    read = ("ingest", "pophr", str(raw), "--rules", "ccdss", "--default-source", "physician")
    screen, shared = run(*read, *CHOICES), json.loads(run(*read, *CHOICES, "--json"))
    tokens = tmp_path / "w/tokens/pophr"
    cases = count_cases(tokens)
    claims = pl.read_csv(raw / "claims.csv", infer_schema=False)
    assert read_cells(screen, "claims.csv")[1] == f"{claims.height:,}"
    (table,) = [row for row in shared["rows"] if row["file"] == "claims.csv"]
    assert table["seen"] % 10 == 0
    honest = {row["label"]: row["cases"] for row in shared["tokens"]["honesty"]}
    for label in RARE:
        assert 0 < cases[label] < 11
        assert read_cells(screen, label)[0] == str(cases[label])
        assert honest[label] is None
    assert "exact" not in shared["tokens"]
    assert "withheld" in (tokens / "report.html").read_text("utf-8")

    screen = run("tokenize", "pophr", *CHOICES)
    shared = json.loads(run("tokenize", "pophr", *CHOICES, "--json"))
    train = count_cases(tokens, "train")
    names = open_sequences(tokens).class_names
    assert read_cells(screen, "train")[2:] == [str(train[name]) for name in names]
    assert shared["audit"]["train"]["classes"]["flu"] is None
    assert "exact" not in shared


@pytest.mark.slow
def test_scores_and_analyses_on_the_own_screen(run: Run, tmp_path: Path) -> None:
    raw = test_privacy.write_cohort(tmp_path / "raw", 1)
    read = ("ingest", "pophr", str(raw), "--rules", "ccdss", "--default-source", "physician")
    run(*read, *CHOICES)
    run("train", "counts", "--data", "pophr", "--run", "c")
    words = ("evaluate", "c", "--bootstrap", "0", "--baselines", "cheap")
    screen, shared = run(*words), json.loads(run(*words, "--json"))
    table = pl.read_parquet(tmp_path / "w/runs/c/predictions.parquet")
    for label in RARE:
        observed, mean = read_cells(screen, label)[:2]
        target = table[f"target_{label}"].fill_nan(None)
        assert float(observed) == pytest.approx(target.mean(), abs=1e-4)
        risk = table.filter(target.is_not_null())[f"p_{label}"].mean()
        assert isinstance(risk, float)
        assert float(mean) == pytest.approx(risk, rel=1e-3)
        assert shared["risk_calibration"][label]["predicted"] in (None, round(risk, 3))
    analyze = ("analyze", "calibration", "c")
    assert "Subjects: " in run(*analyze)
    assert "Subjects: " not in run(*analyze, "--json")
    assert "Withheld" in (tmp_path / "w/reports/calibration-c/report.html").read_text("utf-8")


@pytest.mark.slow
def test_notices_of_a_training_are_exact_on_the_own_screen(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = test_privacy.write_cohort(tmp_path / "raw", 1)
    read = ("ingest", "pophr", str(raw), "--rules", "ccdss", "--default-source", "physician")
    run(*read, *CHOICES)
    shards = (tmp_path / "w/tokens/pophr").glob("sequences-*.parquet")
    splits = pl.concat([pl.read_parquet(path, columns=["split"]) for path in shards])["split"]
    n = splits.cast(pl.String).value_counts().to_dict(as_series=False)
    sizes = dict(zip(n["split"], n["count"], strict=True))
    used = 16
    share = str(used / sizes["train"])
    exact = f"on {used} of {sizes['train']} training subjects"
    rounded = f"on at most 20 of at most {math.ceil(sizes['train'] / 10)}0 training subjects"
    words = ["train", "counts", "--data", "pophr", "--fraction", share, "-w", str(tmp_path / "w")]
    for more in ([], ["--dry-run"]):
        shown = []
        for reader in ([], ["--json"]):
            assert main([*words, *more, *reader]) == 0
            shown.append("\n".join(capsys.readouterr()))
        assert exact in shown[0]
        assert rounded in shown[1]
        assert exact not in shown[1]
    run("export", "counts-pophr")
    folders = [tmp_path / "w" / part / "counts-pophr" for part in ("runs", "exports")]
    for path in (folders[0] / "report.html", *folders[1].rglob("*.*")):
        text = path.read_bytes().decode(errors="replace")
        assert exact not in text
        assert rounded in text or path.name not in {"report.html", "run.json"}

    validation = f"{sizes['validation']} validation subjects are too few"
    words = ("train", "seft", "--preset", "tiny", "--data", "pophr", "--steps", "2", "--dry-run")
    assert validation in run(*words)
    assert validation not in (shared := run(*words, "--json"))
    assert "at most 20 validation subjects are too few" in shared


@pytest.mark.slow
def test_windows_of_few_people_are_withheld_in_json_alone(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = test_privacy.write_cohort(tmp_path / "raw", 1)
    run("ingest", "pophr", str(raw), *CHOICES)
    monkeypatch.setattr(privacy, "SMALL", 25)
    words = ("train", "counts", "--data", "pophr", "--dry-run")
    shared = json.loads(run(*words, "--json"))["windows"]
    assert shared["validation"] is None
    assert shared["train"] > 25
    assert re.search(r"windows: train \d+, validation \d+, test \d+", run(*words))


@pytest.mark.slow
def test_nothing_is_withheld_of_synthetic_people(run: Run, tmp_path: Path) -> None:
    words = ("synthetic-claims", *CHOICES)
    made = json.loads(run("ingest", *words, "--subjects", "60", "--seed", "1", "--json"))
    tokens = tmp_path / "w/tokens/synthetic-claims"
    cases = count_cases(tokens)
    assert {row["label"]: row["cases"] for row in made["tokens"]["honesty"]} == cases
    assert any(0 < n < 11 for n in cases.values())
    assert "subjects" in {row["kind"] for row in made["rows"]}
    for folder in (tokens, tmp_path / "w/cache/synthetic-claims"):
        assert "withheld" not in (folder / "report.html").read_text("utf-8")
    closed = json.loads(run("tokenize", *words, "--no-small-counts", "--name", "c", "--json"))
    assert None in {row["cases"] for row in closed["honesty"]}


@pytest.mark.parametrize(
    ("dataset", "layout", "expected"),
    [
        ("synthetic-claims", None, True),
        ("pophr", "synpuf", True),
        ("pophr", "claims", False),
        ("pophr", "omop", False),
        ("pophr", None, False),
    ],
)
def test_which_people_are_synthetic(dataset: str, layout: str | None, expected: bool) -> None:
    assert is_open_source(dataset, layout) is expected
