"""What version 0.1 wrote still opens, verifies, evaluates, resumes and exports (`fixtures/v1`, made
by `fixtures/make_v1.py`).
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from fixtures import make_v1
from safetensors.numpy import load_file

from bitimely_cli.main import main
from bitimely_core import cache, data, heads, models, storage, tokens
from bitimely_core.records import StoredRecord
from bitimely_core.schemas.ingest import CacheManifest, IngestReport
from bitimely_core.schemas.scores import Scores
from bitimely_core.schemas.tokens import SequenceStatistics, TokenManifest, WindowStatistics

FIXTURE = Path(__file__).parent / "fixtures" / "v1"
EXPECTED: dict[str, Any] = json.loads((FIXTURE / "expected.json").read_text())
SIGNALS = np.stack([make_v1.make_signals(subject)[0] for subject in range(make_v1.SUBJECTS)])
LABELS = [make_v1.make_signals(subject)[1] for subject in range(make_v1.SUBJECTS)]
FINISHED = [run for run in make_v1.COMMANDS if run != "unfinished"]
CLOSE = 5e-6  # relative, the rounding of another processor: 1.1e-6 was seen after three steps
SPEED = {"tokens_per_second", "data_wait"}  # of the log: differs between repeats


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A copy of the workspace: nothing is written into the fixture."""
    return Path(shutil.copytree(FIXTURE / make_v1.HOME, tmp_path / "another-name"))


def call(*argv: str | Path, home: Path, code: int = 0) -> None:
    assert main([*map(str, argv), "-w", str(home)]) == code


def call_json(
    capsys: pytest.CaptureFixture[str], *argv: str | Path, home: Path, code: int = 0
) -> dict[str, Any]:
    capsys.readouterr()
    call(*argv, "--json", home=home, code=code)
    return json.loads(capsys.readouterr().out)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def read_log(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in SPEED} for line in lines]


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of every file, but for the empty files of locks."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in files
    }


def assert_close(found: Any, expected: Any, where: str = "") -> None:
    """Equal, numbers to `CLOSE`; `found` may hold further keys, which a later version adds."""
    if isinstance(expected, dict):
        assert set(expected) <= set(found), where
        for key, value in expected.items():
            assert_close(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for at, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_close(one, other, f"{where}[{at}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=CLOSE, abs=CLOSE), where
    else:
        assert found == expected, where


def test_the_fixture_is_small_and_names_no_path_of_a_machine() -> None:
    files = [path for path in FIXTURE.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_500_000
    texts = [path for path in files if path.suffix in {".json", ".jsonl", ".md", ".html"}]
    assert len(texts) > 30
    assert not [
        path
        for path in texts
        if re.search(r'"/\w|/(tmp|root|work|home/\w+|Users)/', path.read_text())
    ]
    assert not [
        path
        for path in files
        if path.suffix in {".parquet", ".arrow"}
        and re.search(rb"/(tmp|root|work)/", path.read_bytes())
    ]


def test_the_cache_of_recordings_holds_the_source(home: Path) -> None:
    opened = cache.open_cache(home / "cache" / "generic")
    assert opened.manifest.report.counts.model_dump() == {
        "units_seen": 30,
        "accepted": 30,
        "accepted_with_warning": 0,
        "quarantined": 0,
    }
    records = list(opened.records())
    assert [record.subject_id for record in records] == [
        f"p{subject:02d}" for subject in range(make_v1.SUBJECTS)
    ]
    for record, expected in zip(records, SIGNALS, strict=True):
        assert [(s.channel, s.rate, s.unit) for s in record.signals] == [
            ("C3", 50.0, "uV"),
            ("C4", 50.0, "uV"),
        ]
        for signal, column in zip(record.signals, expected.T, strict=True):
            np.testing.assert_array_equal(signal.samples * signal.scale + signal.offset, column)


@pytest.mark.parametrize("name", ["generic", "generic-classification"])
def test_tokens_of_recordings_hold_the_normalised_source(home: Path, name: str) -> None:
    windows = tokens.open_tokens(home / "tokens" / name)
    assert (len(windows), windows.length, windows.channels, windows.rate, windows.split) == (
        30,
        200,
        2,
        50.0,
        "subject",
    )
    assert [len(windows[split]) for split in ("train", "validation", "test")] == [23, 2, 5]
    subjects = [int(subject[1:]) for subject in windows.subjects()]
    train = np.isin(subjects, [int(subject[1:]) for subject in windows["train"].subjects()])
    source = SIGNALS[subjects].astype(np.float64)
    expected = (source - source[train].mean((0, 1))) / source[train].std((0, 1))
    np.testing.assert_allclose(windows.values(), expected, rtol=1e-5, atol=1e-5)
    assert windows.mask() is None
    if name == "generic":
        assert windows.task == "none"
    else:
        assert (windows.task, windows.class_names) == ("classification", ("fast", "slow"))
        assert [windows.class_names[target] for target in windows.targets(None)] == [
            LABELS[subject] for subject in subjects
        ]


def test_the_cache_of_events_holds_the_same_rows(home: Path) -> None:
    rows = pl.concat(list(cache.open_cache(home / "cache" / "synthetic-claims").events()))
    expected = EXPECTED["events"]
    assert rows.columns == expected["columns"]
    assert rows.height == expected["rows"] > 3000
    assert dict(rows["code"].value_counts().iter_rows()) == expected["codes"]


def test_tokens_of_events_hold_the_same_sequences(home: Path) -> None:
    sequences = tokens.open_tokens(home / "tokens" / "synthetic-claims")
    assert (len(sequences), sequences.task, sequences.classes) == (55, "multilabel", 4)
    arrays = sequences.arrays()
    for name, expected in EXPECTED["sequences"].items():
        np.testing.assert_allclose(arrays[name], expected, rtol=1e-12, err_msg=name)


def test_verify_names_the_unfinished_run_alone(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checked = call_json(capsys, "verify", home=home, code=4)["checked"]
    states = {Path(item["path"]).name: item["state"] for item in checked if item["kind"] == "run"}
    assert states == {**dict.fromkeys(FINISHED, "good"), "unfinished": "incomplete"}
    kinds = [item["kind"] for item in checked if item["state"] == "good"]
    assert [kinds.count(kind) for kind in ("cache", "tokens", "run", "checkpoint")] == [2, 3, 9, 4]
    shutil.rmtree(home / "runs" / "unfinished")
    call("verify", home=home)


def test_verify_finds_damage(home: Path) -> None:
    path = home / "runs" / "fedformer" / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    call("verify", home=home, code=5)


@pytest.mark.parametrize("run", FINISHED)
def test_a_finished_run_under_the_same_command_is_left_alone(
    home: Path, capsys: pytest.CaptureFixture[str], run: str
) -> None:
    before = snapshot(home)
    body = call_json(capsys, *make_v1.COMMANDS[run], "--run", run, home=home)
    assert body["trained"] is False
    # the page of the workspace is new
    assert {name: file for name, file in snapshot(home).items() if name != "index.html"} == before


def test_a_finished_run_refuses_another_value_of_a_setting_of_its_model(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = make_v1.COMMANDS["timesnet"]
    body = call_json(
        capsys, *argv, "--set", "model.top_periods=3", "--run", "timesnet", home=home, code=2
    )
    assert body["error"]["code"] == "settings_differ"
    assert body["error"]["field"] == "settings.model.top_periods"


def test_the_unfinished_run_resumes_to_the_end_of_the_undisturbed_one(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, undisturbed = home / "runs" / "unfinished", home / "runs" / "plain"
    assert read(run / "run.json")["finished"] is False
    assert read_log(run)[-1]["step"] == 7, "killed in the step after the checkpoint of step 6"
    before = (run / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in before if json.loads(line)["step"] <= 6]
    assert len(kept) == len(before) - 1 == 8
    body = call_json(capsys, *make_v1.COMMANDS["unfinished"], "--run", "unfinished", home=home)
    assert body["trained"] is True
    assert body["steps"] == 9
    after = (run / "metrics.jsonl").read_text().splitlines()
    assert after[:8] == kept, (
        "continued from the checkpoint: a repeated step would log another speed"
    )
    assert_close(read_log(run), read_log(undisturbed))
    weights = load_file(undisturbed / "model" / "model.safetensors")
    resumed = load_file(run / "model" / "model.safetensors")
    assert set(resumed) == set(weights)
    for name, expected in weights.items():
        np.testing.assert_allclose(resumed[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)
    assert_close(read(run / "run.json")["final"], read(undisturbed / "run.json")["final"])
    call("verify", home=home)


@pytest.mark.parametrize("run", list(make_v1.EVALUATIONS))
def test_an_evaluation_gives_the_same_scores(home: Path, run: str) -> None:
    folder = home / "runs" / run
    expected = read(folder / "scores.json")
    predictions = (
        pl.read_parquet(folder / "predictions.parquet")
        if (folder / "predictions.parquet").is_file()
        else None
    )
    for name in ("scores.json", "predictions.parquet"):
        (folder / name).unlink(missing_ok=True)
    call("evaluate", run, *make_v1.EVALUATIONS[run], home=home)
    scores = read(folder / "scores.json")
    for key in (
        "run",
        "data",
        "split",
        "n",
        "n_subjects",
        "leak_free",
        "subjects_shared_with_training",
    ):
        assert scores[key] == expected[key]
    assert {name: set(value) for name, value in scores["metrics"].items()} == {
        name: set(v) for name, v in expected["metrics"].items()
    }
    for name, values in expected["metrics"].items():
        found = scores["metrics"][name]
        assert_close(found["value"], values["value"], name)
        # no longer by percentiles of a bootstrap
        assert found["lo"] is None or found["lo"] <= found["value"] <= found["hi"], name
    for name, baseline in expected["baselines"].items():
        for metric in set(baseline) & set(expected["metrics"]):
            assert_close(
                scores["baselines"][name][metric]["value"],
                baseline[metric]["value"],
                f"{name} {metric}",
            )
    for name, values in expected.get("comparison", {}).get("metrics", {}).items():
        assert_close(
            scores["comparison"]["metrics"][name]["difference"], values["difference"], name
        )
    assert (folder / "report.html").stat().st_size > 1000
    if predictions is not None:
        assert_close(
            pl.read_parquet(folder / "predictions.parquet").to_dict(as_series=False),
            predictions.to_dict(as_series=False),
        )


def test_settings_of_single_models_and_objectives_are_read(home: Path) -> None:
    timesnet = models.load(home / "runs" / "timesnet" / "model").config
    assert (timesnet.name, timesnet.top_periods, timesnet.kernels) == ("timesnet", 2, 2)
    fedformer = models.load(home / "runs" / "fedformer" / "model").config
    assert (fedformer.name, fedformer.modes, fedformer.mode_select, fedformer.moving_average) == (
        "fedformer",
        4,
        "lowest",
        (5,),
    )
    assert read(home / "runs" / "masked" / "run.json")["settings"]["objective"]["ratio"] == 0.3


@pytest.mark.parametrize("run", ["plain", "masked", "timesnet", "fedformer"])
def test_a_pretrained_model_is_finite(home: Path, run: str) -> None:
    model = models.load(home / "runs" / run / "model").eval()
    batch = data.collate(tokens.open_tokens(home / "tokens" / "generic-classification")["test"])
    with torch.no_grad():
        encoded = model(batch)
    assert all(torch.isfinite(hidden).all() for hidden in encoded.hidden)


def test_exports_load(home: Path) -> None:
    batch = data.collate(tokens.open_tokens(home / "tokens" / "generic-classification")["test"])
    model = models.load(home / "exports" / "plain").eval()
    classifier = heads.load(home / "exports" / "plain-class").eval()
    with torch.no_grad():
        hidden, logits = model(batch).hidden[-1], classifier(batch)
    assert torch.isfinite(hidden).all()
    assert hidden.shape[0] == 5
    scores = pl.read_parquet(home / "runs" / "plain-class" / "predictions.parquet")
    assert logits.argmax(-1).tolist() == scores["prediction"].to_list()


def test_an_export_starts_a_new_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        *make_v1.COMMANDS["plain"],
        "--init",
        str(home / "exports" / "plain"),
        "--run",
        "continued",
    ]
    assert call_json(capsys, *argv, home=home)["trained"] is True
    assert (
        read_log(home / "runs" / "continued")[0]["loss"]
        < read_log(home / "runs" / "plain")[0]["loss"]
    )


def test_embeddings_are_the_same(home: Path) -> None:
    call("embed", "plain", "--split", "test", "--out", home / "embeddings.parquet", home=home)
    assert_close(
        pl.read_parquet(home / "embeddings.parquet").to_dict(as_series=False),
        EXPECTED["embeddings"],
    )


def test_an_analysis_gives_the_same_summary(home: Path) -> None:
    expected = read(home / "reports" / "svd-plain" / "summary.json")
    call("analyze", "svd", "plain", "--sequences", "4", "--name", "again", home=home)
    found = read(home / "reports" / "again" / "summary.json")
    # the condition number of a rank-deficient map is rounding
    numbers = ("effective_rank", "auc", "n90", "stable_rank")
    compared = 0
    for layer, head in ((layer, head) for layer in ("1", "2") for head in ("1", "2")):
        maps = expected["plain"][layer][head]
        for kind, name in ((kind, name) for kind in maps for name in numbers):
            assert found["plain"][layer][head][kind][name] == pytest.approx(
                maps[kind][name], rel=1e-4
            ), (layer, head, kind, name)
            compared += 1
    assert compared >= 32


def test_a_report_compares_two_runs(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = call_json(
        capsys, "report", "plain-class", "plain-scratch", "--out", home / "page", home=home
    )
    page = Path(body["report"]).read_text()
    assert "plain-class" in page
    assert "plain-scratch" in page


@pytest.mark.parametrize("run", ["timesnet", "fedformer"])
def test_a_run_with_masks_is_repeated_with_masks_by_row(
    home: Path, capsys: pytest.CaptureFixture[str], run: str
) -> None:
    """Version 0.1 drew the masks of a batch from one stream: the repetition says that they are
    others, and is itself reproduced.
    """
    body = call_json(capsys, "reproduce", run, home=home, code=5)
    assert "masked draws each row from a stream of its own since version 0.2" in body["differences"]
    assert body["reproduced"] is False
    assert body["loss"][1] == pytest.approx(body["loss"][0], rel=0.2)
    again = call_json(capsys, "reproduce", f"{run}-again", home=home)
    assert (again["reproduced"], again["same_weights"], again["differences"]) == (True, True, [])


@pytest.mark.parametrize("run", ["plain", "plain-scratch", "events-labels"])
def test_a_run_is_reproduced(home: Path, capsys: pytest.CaptureFixture[str], run: str) -> None:
    body = call_json(capsys, "reproduce", run, home=home)
    assert body["reproduced"] is True
    assert body["loss"][1] == pytest.approx(body["loss"][0], rel=CLOSE)
    for at, folder in enumerate(
        home / "runs" / name for name in (run, f"{run}-again") if body["metrics"]
    ):
        shown = Scores.load_shared(folder).metrics
        assert {name: pair[at] for name, pair in body["metrics"].items()} == {
            name: shown[name].value for name in body["metrics"]
        }


@pytest.mark.parametrize("source", ["masked", "fedformer"])
def test_a_run_is_fine_tuned(home: Path, capsys: pytest.CaptureFixture[str], source: str) -> None:
    argv = [
        "finetune",
        source,
        "--data",
        make_v1.VIEW,
        "--fraction",
        "1",
        "--steps",
        "2",
        "--batch-size",
        "8",
        "--run",
        "new",
    ]
    body = call_json(capsys, *argv, home=home)
    assert body["steps"] == 2
    assert read(home / "runs" / "new" / "run.json")["source"]["run"] == source


def test_a_second_ingest_reads_nothing_new(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_v1.write_raw(tmp_path / "raw")
    monkeypatch.chdir(tmp_path)
    before = snapshot(home / "cache" / "generic")
    call("ingest", "generic", "raw", "--map", "raw/map.toml", home=home)
    shards = {name: content for name, content in before.items() if name.startswith("recordings-")}
    assert shards
    assert {name: snapshot(home / "cache" / "generic").get(name) for name in shards} == shards
    assert (
        read(home / "cache" / "generic" / "manifest.json")["generation"]
        == json.loads(before["manifest.json"][0])["generation"]
    )


@pytest.mark.parametrize(
    ("record", "files"),
    [
        (CacheManifest, "cache/*/manifest.json"),
        (IngestReport, "cache/*/ingest_report.json"),
        (TokenManifest, "tokens/*/manifest.json"),
        (WindowStatistics, "tokens/generic*/statistics.json"),
        (SequenceStatistics, "tokens/synthetic-claims/statistics.json"),
    ],
)
def test_records_keep_the_stored_bytes(record: type[StoredRecord], files: str) -> None:
    paths = sorted((FIXTURE / make_v1.HOME).glob(files))
    assert paths
    for path in paths:
        loaded = record.load(path)
        assert storage.encode_json(loaded.to_json()) + b"\n" == path.read_bytes()
        assert isinstance(loaded, IngestReport) or not loaded.model_extra
