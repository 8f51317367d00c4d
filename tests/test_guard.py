"""Results are guarded like data: any change of a file of a run, report, model or export is noticed
by `verify` and by the verb that reads it.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest
import small
from damage import Damage, append, delete, flip, truncate, zero4k

from bitimely_cli.main import main
from bitimely_core import workflows

SEEDS = 20


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = small.copy_data(tmp_path_factory.mktemp("guard"))
    for verb in small.VERBS:
        small.call(made, verb)
    return made


# --- damage, each by a seed and restored afterwards


def change_number(path: Path, draw: random.Random) -> None:
    """Another digit in a number of JSON or text; a flipped bit where there is none."""
    content = path.read_bytes()
    places = (
        [match.start() for match in re.finditer(rb"\d", content)]
        if path.suffix in {".json", ".jsonl", ".md", ".html"}
        else []
    )
    if not places:
        return flip(path, draw)
    at = draw.choice(places)
    other = draw.choice([digit for digit in b"123456789" if digit != content[at]])
    path.write_bytes(content[:at] + bytes([other]) + content[at + 1 :])
    return None


def add_foreign(path: Path, draw: random.Random) -> None:
    path.with_name(f"copy-{draw.randrange(99)}{path.suffix}").write_bytes(path.read_bytes())


def swap(path: Path, draw: random.Random) -> None:
    """Content of another file of the folder, of the same kind where there is one; a flipped bit
    where there is no other.
    """
    mine = path.read_bytes()
    others = [
        one
        for one in sorted(path.parent.iterdir())
        if one.is_file() and one.name != "manifest.json" and one.stat().st_size
    ]
    others = [one for one in others if one != path and one.read_bytes() != mine]
    others = [one for one in others if one.suffix == path.suffix] or others
    if not others:
        return flip(path, draw)
    other = draw.choice(others)
    path.write_bytes(other.read_bytes())
    other.write_bytes(mine)
    return None


MODES: list[Damage] = [flip, zero4k, truncate, append, change_number, delete, add_foreign, swap]


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def restore(folder: Path, before: dict[Path, bytes]) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path not in before:
            path.unlink()
    for path, content in before.items():
        if not path.is_file() or path.read_bytes() != content:
            path.write_bytes(content)


FOLDERS = (
    "runs/plain",
    "runs/tuned",
    "runs/scratch",
    "reports/svd-plain",
    "reports/compare-tuned-scratch",
    "exports/tuned",
)
LONG = {"runs/tuned", "runs/scratch"}  # files of the same kinds as in runs/plain


def list_files(home: Path, folder: str) -> list[Path]:
    return sorted(
        path for path in (home / folder).rglob("*") if path.is_file() and path.name != ".lock"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(folder, marks=[pytest.mark.slow] if folder in LONG else [])
        for folder in FOLDERS
    ],
)
def test_verify_notices_twenty_damages_of_every_file(home: Path, folder: str) -> None:
    root = home / folder
    assert workflows.verify(root)["exit_code"] == 0
    before, unnoticed = snapshot(root), []
    for path in list_files(home, folder):
        draw = random.Random(str(path.relative_to(home)))
        for seed in range(SEEDS):
            mode = MODES[seed % len(MODES)]
            mode(path, draw)
            if snapshot(root) != before:
                found = workflows.verify(root)
                if found["exit_code"] != 5:
                    unnoticed.append((mode.__name__, path.name))
                restore(root, before)
    assert unnoticed == []
    assert workflows.verify(root)["exit_code"] == 0


@pytest.mark.parametrize("mode", MODES)
def test_verify_names_the_file(home: Path, mode: Damage) -> None:
    root = home / "runs" / "tuned"
    before, path = snapshot(root), root / "scores.json"
    mode(path, random.Random(1))
    changed = {
        one.name for one in root.iterdir() if one.is_file() and before.get(one) != one.read_bytes()
    } | {one.name for one in before if not one.exists()}
    findings = workflows.verify(root)["findings"]
    restore(root, before)
    assert {Path(str(one.file)).name for one in findings} == changed


READERS = {  # verb -> files that it reads
    "report": [
        "runs/tuned/scores.json",
        "runs/tuned/run.json",
        "runs/tuned/predictions.parquet",
        "runs/scratch/predictions.parquet",
        "runs/tuned/metrics.jsonl",
    ],
    "evaluate": [
        "runs/tuned/run.json",
        "runs/tuned/model/config.json",
        "runs/tuned/model/model.safetensors",
        "runs/scratch/scores.json",
        "runs/tuned/train_subjects.json",
    ],
    "embed": [
        "runs/plain/run.json",
        "runs/plain/model/config.json",
        "runs/plain/model/model.safetensors",
    ],
    "analyze": [
        "runs/plain/run.json",
        "runs/plain/model/config.json",
        "runs/plain/model/model.safetensors",
    ],
    "export": [
        "runs/tuned/run.json",
        "runs/tuned/scores.json",
        "runs/tuned/model_card.md",
        "runs/tuned/model/model.safetensors",
        "runs/tuned/model/config.json",
    ],
    "finetune": ["runs/plain/run.json", "runs/tuned/run.json"],
    "pretrain": ["runs/plain/run.json", "runs/plain/manifest.json"],
}
READ = [(verb, file) for verb, files in READERS.items() for file in files]


@pytest.mark.parametrize(("verb", "file"), READ)
@pytest.mark.parametrize("mode", [flip, truncate, change_number, swap])
def test_the_verb_that_reads_a_damaged_file_refuses_it(
    home: Path, verb: str, file: str, mode: Damage
) -> None:
    path = home / file
    root = path.parent
    before = snapshot(root)
    mode(path, random.Random(file))
    try:
        small.call(home, verb, code=5)
    finally:
        restore(root, before)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "run.json"])
def test_a_damaged_export_is_no_start_of_a_training(
    home: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = home / "exports" / "tuned"
    before = snapshot(root)
    change_number(root / file, random.Random(2))
    argv = [*small.VERBS["pretrain"][:-1], "again", "--init", str(root), "-w", str(home)]
    try:
        assert main(argv) == 5
        assert file in capsys.readouterr().err
    finally:
        restore(root, before)
        shutil.rmtree(home / "runs" / "again", ignore_errors=True)


# --- what stands beside data, and outside of the workspace


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with ingests of recordings and of claims, with their pages and the key of the
    pseudonyms.
    """
    raw, home = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("data")
    small.write_raw(raw)
    assert (
        main(["ingest", "generic", str(raw), "--map", str(raw / "map.toml"), "-w", str(home)]) == 0
    )
    assert main(
        [
            "ingest",
            "synthetic-claims",
            "--subjects",
            "60",
            "--no-select",
            "--min-codes",
            "2",
            "-w",
            str(home),
        ]
    ) in {0, 3}
    return home


@pytest.mark.parametrize(
    "file",
    [
        *(
            f"cache/{name}/{file}"
            for name in ("generic", "synthetic-claims")
            for file in ("ingest_report.json", "report.html")
        ),
        *(
            "cache/generic/results.json",
            "tokens/synthetic-claims/report.html",
            "id.key",
            "id.key.sha256",
        ),
    ],
)
def test_reports_and_pages_of_data_and_the_key_are_guarded(data: Path, file: str) -> None:
    path = data / file
    content, draw = path.read_bytes(), random.Random(file)
    assert workflows.verify(data)["exit_code"] == 0
    modes = [
        flip,
        zero4k,
        truncate,
        append,
        change_number,
        *([] if path.suffix == ".sha256" else [delete]),
    ]
    named = path.name.removesuffix(".sha256")
    for seed in range(SEEDS):
        modes[seed % len(modes)](path, draw)
        if not path.exists() or path.read_bytes() != content:
            found = workflows.verify(data)
            assert found["exit_code"] == 5, (file, seed)
            assert {
                Path(str(one.file)).name for one in found["findings"] if one.level == "error"
            } == {named}
        path.write_bytes(content)
    assert workflows.verify(data)["exit_code"] == 0


def test_a_repeated_ingest_makes_a_damaged_report_and_page_again(data: Path) -> None:
    root = data / "cache" / "synthetic-claims"
    argv = [
        "ingest",
        "synthetic-claims",
        "--subjects",
        "60",
        "--no-select",
        "--min-codes",
        "2",
        "-w",
        str(data),
    ]
    assert main(argv) in {0, 3}  # a refused ingest before this one left its own report
    before = snapshot(root)
    for name in ("ingest_report.json", "report.html"):
        flip(root / name, random.Random(name))
    assert main(argv) in {0, 3}
    assert snapshot(root) == before


@pytest.mark.slow
def test_a_damaged_key_makes_no_pseudonyms(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, argv = (
        data / "id.key",
        ["ingest", "synthetic-claims", "--subjects", "60", "-w", str(data), "--force-new"],
    )
    content = path.read_bytes()
    for mode in (flip, truncate, delete):
        mode(path, random.Random(3))
        assert main(argv) == 5
        assert "id.key" in capsys.readouterr().err
        path.write_bytes(content)


def test_vectors_in_a_folder_of_the_user_are_guarded(home: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("of the user")
    path = tmp_path / "vectors.parquet"
    assert main([*small.VERBS["embed"], "--out", str(path), "-w", str(home)]) == 0
    content = path.read_bytes()
    assert workflows.verify(tmp_path)["exit_code"] == 0
    for seed in range(SEEDS):
        [flip, zero4k, truncate, append, delete][seed % 5](path, random.Random(seed))
        found = workflows.verify(tmp_path)
        assert (found["exit_code"], [Path(str(one.file)).name for one in found["findings"]]) == (
            5,
            ["vectors.parquet"],
        )
        path.write_bytes(content)
    for folder in (home / "cache" / "generic", home / "tokens" / "generic-classification"):
        before = snapshot(folder)
        assert (
            main([*small.VERBS["embed"], "--out", str(folder / "vectors.parquet"), "-w", str(home)])
            == 2
        )
        assert snapshot(folder) == before


# --- the manifest itself


@pytest.mark.parametrize("folder", [*FOLDERS, "runs/tuned/model", "runs/tuned/tuning/lr-0.001"])
def test_a_deleted_manifest_is_damage(home: Path, folder: str) -> None:
    path = home / folder / "manifest.json"
    content = path.read_bytes()
    path.unlink()
    found = workflows.verify(home / folder)
    path.write_bytes(content)
    assert found["exit_code"] == 5
    assert any("manifest.json" in str(one.file) for one in found["findings"])


# --- unfinished trainings


@pytest.mark.slow
def test_an_unfinished_run_is_guarded_up_to_its_last_checkpoint(tmp_path: Path) -> None:
    home = small.copy_data(tmp_path)
    small.stop_training(home, 3, "plain")
    root = home / "runs" / "plain"
    assert workflows.verify(root)["exit_code"] == 4
    before = snapshot(root)
    damaged = {
        "run.json": 5,
        "manifest.json": 5,
        "metrics.jsonl": 5,
        "checkpoints/step-2/meta.json": 5,
        "checkpoints/step-2/optimizer.safetensors": 5,
    }
    for name, code in damaged.items():
        for seed in range(SEEDS):
            draw = random.Random(f"{name} {seed}")
            content = bytearray((root / name).read_bytes())
            last = content.index(b'"step":3') if name == "metrics.jsonl" else len(content)
            content[
                draw.randrange(content.rindex(b"\n", 0, last) if name == "metrics.jsonl" else last)
            ] ^= 1 << draw.randrange(8)
            (root / name).write_bytes(content)
            assert workflows.verify(root)["exit_code"] == code, (name, seed)
        small.call(home, "pretrain", code=code)
        restore(root, before)
    # after the checkpoint: written again
    (root / "metrics.jsonl").write_bytes(before[root / "metrics.jsonl"] + b'{"step":3,"sp')
    small.call(home, "pretrain")
    assert [
        json.loads(line)["step"]
        for line in (root / "metrics.jsonl").read_text().splitlines()
        if '"train"' in line
    ] == [1, 2, 3, 4]
    assert workflows.verify(root)["exit_code"] == 0


# --- what can be made again


@pytest.mark.parametrize(
    ("verb", "file"),
    [
        ("pretrain", "runs/plain/report.html"),
        ("pretrain", "runs/plain/model_card.md"),
        ("pretrain", "runs/plain/train_subjects.json"),
        ("evaluate", "runs/tuned/report.html"),
        ("evaluate", "runs/tuned/scores.json"),
        ("evaluate", "runs/tuned/predictions.parquet"),
        ("embed", "runs/plain/embeddings-generic-classification.parquet"),
        ("analyze", "reports/svd-plain/report.html"),
        ("analyze", "reports/svd-plain/summary.json"),
        ("report", "reports/compare-tuned-scratch/report.html"),
        ("export", "exports/tuned/model_card.md"),
    ],
)
def test_a_deleted_result_is_missing_and_made_again(home: Path, verb: str, file: str) -> None:
    path = home / file
    before = snapshot(path.parent)
    path.unlink()
    found = workflows.verify(path.parent)
    assert found["exit_code"] == 5
    assert [(Path(str(one.file)).name, one.problem) for one in found["findings"]] == [
        (path.name, "is missing")
    ]
    small.call(home, verb)
    assert path.read_bytes() == before[path]
    assert snapshot(path.parent) == before
