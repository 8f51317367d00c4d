"""Tasks in the form of MEDS: sequences up to prediction times, predictions that MEDS-evaluation
reads, the commands for MEDS-DEV.
"""

from __future__ import annotations

import csv
import json
import os
import random
import re
import shutil
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from damage import flip, truncate

from bitimely_cli.main import main
from bitimely_core import tokens, workflows
from bitimely_core.claims import tasks
from bitimely_core.store import storage

ROOT = Path(__file__).parent.parent
# ICD-9 -> integer PheCode
CODES = {"428.0": "428", "250.00": "250", "401.9": "401", "496": "496", "008.5": "008"}
SUBJECTS = 40
SCHEMA = {  # of MEDS-evaluation
    "subject_id": pl.Int64,
    "prediction_time": pl.Datetime("us"),
    "boolean_value": pl.Boolean,
    "predicted_boolean_value": pl.Boolean,
    "predicted_boolean_probability": pl.Float64,
}


def history(seed: int = 0) -> list[tuple[int, datetime, str]]:
    """Subject, day, code; subjects 7001, 7002 ..."""
    draw = np.random.default_rng(seed)
    codes = list(CODES)
    return [
        (
            7001 + subject,
            datetime(2004, 1, 1) + timedelta(days=int(draw.integers(0, 3000))),
            codes[int(draw.integers(len(codes)))],
        )
        for subject in range(SUBJECTS)
        for _ in range(int(draw.integers(3, 14)))
    ]


def meds(folder: Path, rows: list[tuple[int, datetime, str]]) -> Path:
    """A MEDS data set, its split, and the map of its codes beside it."""
    (folder / "data" / "train").mkdir(parents=True)
    (folder / "metadata").mkdir()
    frame = pl.DataFrame(
        [(s, t, f"ICD9CM//{c}", None) for s, t, c in rows]
        + [(7999, datetime(2005, 1, 1), "LAB//1", 1.0)],
        schema={
            "subject_id": pl.Int64,
            "time": pl.Datetime("us"),
            "code": pl.String,
            "numeric_value": pl.Float32,
        },
        orient="row",
    )
    frame.sort("subject_id", "time").write_parquet(folder / "data" / "train" / "0.parquet")
    subjects = frame["subject_id"].unique().sort()
    names = [
        "held_out" if i % 4 == 0 else "tuning" if i % 4 == 1 else "train"
        for i in range(len(subjects))
    ]
    pl.DataFrame({"subject_id": subjects, "split": names}).write_parquet(
        folder / "metadata" / "subject_splits.parquet"
    )
    with (folder.parent / "map.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [("icd9", "phecode"), *((icd, code) for icd, code in CODES.items())]
        )
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with the cache and the sequences of a MEDS data set; beside it the raw folder,
    labels and ids.
    """
    folder = tmp_path_factory.mktemp("meds")
    rows = history()
    meds(folder / "raw", rows)
    draw = np.random.default_rng(1)
    requested = [
        (
            subject,
            datetime(2003, 6, 1) + timedelta(days=int(draw.integers(0, 3600)), hours=13),
            bool(draw.random() < 0.4),
        )
        for subject in sorted({s for s, _, _ in rows})
        for _ in range(2)
    ]
    at = next(t for s, t, _ in rows if s == 7003)
    requested.append((7003, at + timedelta(hours=5), True))  # on the day of an event
    (folder / "labels" / "shards").mkdir(parents=True)
    schema = {
        "subject_id": pl.Int64,
        "prediction_time": pl.Datetime("us"),
        "boolean_value": pl.Boolean,
    }
    for number, part in enumerate((requested[:50], requested[50:])):
        pl.DataFrame(part, schema=schema, orient="row").write_parquet(
            folder / "labels" / "shards" / f"{number}.parquet"
        )
    argv = [
        "ingest",
        "pophr",
        folder / "raw",
        "--source",
        "meds",
        "--keep-dates",
        "--keep-ids",
        folder / "ids.csv",
        "--no-select",
    ]
    argv += ["--phecode-map", folder / "map.csv", "--min-codes", "2", "-w", folder / "w"]
    assert main([str(word) for word in argv]) == 0
    return folder


def tokenized(home: Path, name: str = "task", *more: str) -> int:
    argv = [
        "tokenize",
        "pophr",
        "--task",
        home / "labels",
        "--ids",
        home / "ids.csv",
        "--name",
        name,
        *more,
        "-w",
        home / "w",
    ]
    return main([str(word) for word in argv])


def raw_ids(home: Path) -> dict[int, int]:
    with (home / "ids.csv").open() as file:
        return {int(new): int(old) for old, new in list(csv.reader(file))[1:]}


def test_every_prediction_reads_what_was_coded_on_the_days_before_it(home: Path) -> None:
    assert tokenized(home) == 0
    made = tokens.open_tokens(home / "w" / "tokens" / "task")
    base = tokens.open_tokens(home / "w" / "tokens" / "pophr")
    assert made.vocabulary == base.vocabulary
    requested = tasks.read_task_labels(home / "labels")
    assert len(made) == requested.height == 2 * SUBJECTS + 1
    old = raw_ids(home)
    split = dict(pl.read_parquet(home / "raw" / "metadata" / "subject_splits.parquet").iter_rows())
    names = {"train": "train", "validation": "tuning", "test": "held_out"}
    stored = pl.concat([pl.read_parquet(made.folder / name) for name in made.manifest.shards])
    seen, silent = [], 0
    for row, (pseudonym, when, label, place) in enumerate(
        stored.select("subject_id", "prediction_time", "y_task", "split").iter_rows()
    ):
        subject = old[pseudonym]
        events = sorted(
            {(t, CODES[c]) for s, t, c in history() if s == subject and t.date() < when.date()},
            key=lambda one: one[0],
        )
        own = made.arrays([row])
        codes = [made.vocabulary[i] for i in own["values"][0][own["mask"][0]]]
        months = own["times"][0][own["mask"][0]]
        silent += not events
        assert sorted(codes) == (sorted(code for _, code in events) or ["[UNK]"])
        assert months == pytest.approx(
            [(t - events[0][0]).days / 30.4375 for t, _ in events] or [0.0], abs=1e-3
        )
        assert names[place] == split[subject]
        seen.append((subject, when, bool(label)))
    assert sorted(seen) == sorted(requested.iter_rows())
    assert silent > 0
    assert any(line.startswith(f"{silent:,} of ") for line in made.notices)
    assert (
        storage.decode_json((made.folder / "statistics.json").read_bytes())["without_codes"]
        == silent
    )
    assert not re.search(
        r"\b7\d{3}\b", stored["subject_id"].cast(pl.String).str.join(" ").item()
    ), "no raw id is in the workspace"


@pytest.mark.slow
def test_predictions_are_those_of_the_run_in_the_schema_of_meds_evaluation(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import meds as standard
    import pyarrow.parquet as pq

    w = ["-w", str(home / "w")]
    assert tokenized(home) == 0
    assert (
        main(
            [
                "pretrain",
                "--preset",
                "tiny",
                "--data",
                "pophr",
                "--run",
                "base",
                "--steps",
                "2",
                "--batch-size",
                "8",
                *w,
            ]
        )
        == 0
    )
    assert (
        main(
            [
                "finetune",
                "base",
                "--data",
                "task",
                "--run",
                "tuned",
                "--steps",
                "2",
                "--batch-size",
                "8",
                *w,
            ]
        )
        == 0
    )
    out = home / "predicted" / "predictions.parquet"
    predict = ["evaluate", "tuned", "--bootstrap", "0", "--predictions", str(out), *w]
    assert main([*predict, "--ids", str(home / "ids.csv")]) == 0
    content, found = out.read_bytes(), pl.read_parquet(out)
    for seed in range(20):
        (flip if seed % 2 else truncate)(out, random.Random(seed))
        assert workflows.verify(out.parent)["exit_code"] == 5
        out.write_bytes(content)
    assert workflows.verify(out.parent)["exit_code"] == 0
    assert dict(found.schema) == SCHEMA
    held = {
        s
        for s, place in pl.read_parquet(
            home / "raw" / "metadata" / "subject_splits.parquet"
        ).iter_rows()
        if place == "held_out"
    }
    requested = tasks.read_task_labels(home / "labels").filter(
        pl.col("subject_id").is_in(list(held))
    )
    assert sorted(
        found.select("subject_id", "prediction_time", "boolean_value").iter_rows()
    ) == sorted(requested.iter_rows())
    assert found["predicted_boolean_probability"].is_between(0, 1).all()
    assert (
        found["predicted_boolean_value"] == (found["predicted_boolean_probability"] > 0.5)
    ).all()
    standard.LabelSchema.validate(
        pq.read_table(out, columns=["subject_id", "prediction_time", "boolean_value"])
    )
    ours = pl.read_parquet(home / "w" / "runs" / "tuned" / "predictions.parquet")
    assert found["predicted_boolean_probability"].to_list() == pytest.approx(
        ours["p_task"].to_list()
    )
    old = raw_ids(home)
    assert found["subject_id"].to_list() == [old[int(subject)] for subject in ours["subject_id"]]
    capsys.readouterr()
    for wrong, message in (
        (["evaluate", "base", "--predictions", str(out), *w], "without a head"),
        (
            ["evaluate", "tuned", "--data", "pophr", "--predictions", str(out), *w],
            "no prediction times",
        ),
        ([*predict, "--ids", str(home / "map.csv")], "--keep-ids"),
    ):
        assert main(wrong) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_task_options_that_do_not_fit_are_refused(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tokenized(home, "again") == 0
    before = (home / "w" / "tokens" / "again" / "manifest.json").stat().st_mtime_ns
    assert tokenized(home, "again") == 0
    assert (home / "w" / "tokens" / "again" / "manifest.json").stat().st_mtime_ns == before, (
        "the same labels: nothing to do"
    )
    capsys.readouterr()

    def write_labels(
        rows: list[tuple[Any, ...]],
        names: tuple[str, ...] = ("subject_id", "prediction_time", "boolean_value"),
    ) -> Path:
        folder = tmp_path / f"labels-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        pl.DataFrame(rows, schema=list(names), orient="row").write_parquet(folder / "0.parquet")
        return folder

    one = (7001, datetime(2010, 1, 1), True)
    empty = tmp_path / "empty"
    empty.mkdir()
    ids, w = ["--ids", str(home / "ids.csv")], ["-w", str(home / "w")]
    for code, message, argv in (
        (
            2,
            "made from other labels",
            ["--task", str(write_labels([one])), *ids, "--name", "again"],
        ),
        (2, "no --name", ["--task", str(write_labels([one])), *ids]),
        (
            2,
            "--leakage",
            ["--task", str(write_labels([one])), *ids, "--name", "x", "--leakage", "drop-icd"],
        ),
        (2, "no such folder", ["--task", str(tmp_path / "nowhere"), *ids, "--name", "x"]),
        (4, "no .parquet", ["--task", str(empty), *ids, "--name", "x"]),
        (
            4,
            "boolean_value",
            [
                "--task",
                str(write_labels([one], ("subject_id", "prediction_time", "value"))),
                *ids,
                "--name",
                "x",
            ],
        ),
        (
            4,
            "no subject of the labels",
            ["--task", str(write_labels([(1234567, one[1], True)])), *ids, "--name", "x"],
        ),
    ):
        assert main(["tokenize", "pophr", *argv, *w]) == code
        assert message in capsys.readouterr().err
    assert (
        main(
            [
                "tokenize",
                "pophr",
                "--task",
                str(write_labels([one, (1234567, one[1], True)])),
                *ids,
                "--name",
                "y",
                *w,
            ]
        )
        == 0
    )
    assert "the cache lacks 1 subject of the labels" in capsys.readouterr().err
    assert main(["tokenize", "synthetic", "--task", str(empty), *w]) == 2
    assert "--task" in capsys.readouterr().err


def commands() -> dict[str, str]:
    """The command blocks of model.yaml, by the key before them and its parent: `unsupervised train`
    ...
    """
    found: dict[str, list[str]] = {}
    path: list[str] = []
    for line in (ROOT / "pipelines" / "meds-dev" / "model.yaml").read_text().splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        if path[:1] == ["commands"] and len(path) == 3 and depth >= 3:
            found[" ".join(path[1:])].append(line.strip())
        elif key := re.match(r" *(\w+):", line):
            path = [*path[:depth], key[1]]
            found.setdefault(" ".join(path[1:]), [])
    return {name: "\n".join(lines) for name, lines in found.items() if lines}


def test_the_commands_of_meds_dev_are_verbs_with_their_options() -> None:
    import typer

    from bitimely_cli.main import app

    verbs: dict[str, Any] = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    found = commands()
    assert list(found) == ["unsupervised train", "supervised train", "supervised predict"]
    known = {"dataset_dir", "output_dir", "demo", "labels_dir", "model_initialization_dir", "split"}
    for text in found.values():
        assert set(re.findall(r"\{(\w+)\}", text)) <= known
        for line in re.findall(r"^bitimely (.*)", text, flags=re.M):
            options = {
                name for parameter in verbs[line.split()[0]].params for name in parameter.opts
            }
            assert {word for word in line.split() if re.match(r"--?[a-z]", word)} - {
                "-eq"
            } <= options, line


@pytest.mark.long
def test_meds_dev_runs_end_to_end_on_a_folder_that_bitimely_wrote(
    home: Path, tmp_path: Path
) -> None:
    """claims -> MEDS out -> the three commands as MEDS-DEV runs them, each in a folder of its own
    -> predictions of its held-out subjects.
    """
    raw = tmp_path / "claims"
    raw.mkdir()
    with (raw / "claims.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [("patient_id", "date", "icd9"), *((f"P{s}", t.date(), c) for s, t, c in history(3))]
        )
    with (raw / "patients.csv").open("w", newline="") as file:  # the rules need an age
        people = sorted({f"P{s}" for s, _, _ in history(3)})
        csv.writer(file).writerows(
            [("patient_id", "birth_date"), *((person, "1930-05-17") for person in people)]
        )
    argv = [
        "ingest",
        "pophr",
        raw,
        "--keep-dates",
        "--no-select",
        "--min-codes",
        "2",
        "--default-source",
        "inpatient",
        "--phecode-map",
        home / "map.csv",
    ]
    assert main([str(word) for word in [*argv, "-w", tmp_path / "own"]]) == 0
    dataset = tmp_path / "own" / "tokens" / "pophr" / "meds"
    labels = dataset / "labels" / "chf"
    tool = tmp_path / "bin" / "bitimely"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m bitimely_cli "$@"\n')
    tool.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tool.parent}:{os.environ['PATH']}",
        "PHECODE_MAP": str(home / "map.csv"),
        "OMP_NUM_THREADS": "1",
    }
    environment["PYTHONPATH"] = str(ROOT)
    before = ""
    for name, text in commands().items():
        out = tmp_path / "bench" / name.replace(" ", "-")
        out.mkdir(parents=True)
        filled = text.format(
            dataset_dir=dataset,
            output_dir=out,
            demo=True,
            labels_dir=labels,
            model_initialization_dir=before,
            split="held_out",
        )
        done = subprocess.run(
            ["bash", "-c", filled], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        before = str(out)
    found = pl.read_parquet(Path(before) / "predictions.parquet")
    assert dict(found.schema) == SCHEMA
    held = pl.read_parquet(dataset / "metadata" / "subject_splits.parquet").filter(
        pl.col("split") == "held_out"
    )["subject_id"]
    requested = tasks.read_task_labels(labels).filter(pl.col("subject_id").is_in(held.implode()))
    assert requested.height > 0
    assert sorted(
        found.select("subject_id", "prediction_time", "boolean_value").iter_rows()
    ) == sorted(requested.iter_rows())
    assert [path.name for path in Path(before).rglob("*.parquet")] == ["predictions.parquet"], (
        "the benchmark scores all that it finds"
    )
    assert workflows.verify(tmp_path / "bench" / "supervised-train" / "workspace")["exit_code"] == 0


def write_stays(folder: Path) -> None:
    """Stays in hospital of made-up patients in the code strings of MIMIC-IV; those with heart
    failure often come back within 30 days.
    """
    draw, rows = np.random.default_rng(0), list[tuple[Any, ...]]()
    split = {
        s: "held_out" if s % 5 == 0 else "tuning" if s % 5 == 1 else "train" for s in range(1, 121)
    }
    for s in split:
        at = datetime(2010, 1, 1) + timedelta(days=int(draw.integers(0, 900)))
        for _ in range(int(draw.integers(2, 7))):
            out = at + timedelta(days=int(draw.integers(2, 9)), hours=5)
            weights = [0.1, 0.2, 0.4, 0.2, 0.1] if s % 2 else [0.3, 0.4, 0.05, 0.05, 0.2]
            found = draw.choice(["25000", "4019", "4280", "496", "0085"], 3, p=weights)
            rows += [(s, at, "HOSPITAL_ADMISSION//EW"), (s, out, "HOSPITAL_DISCHARGE//HOME")]
            rows += [(s, out, f"DIAGNOSIS//ICD//9//{code}") for code in found]
            at = out + timedelta(
                days=int(
                    draw.integers(5, 25)
                    if s % 2 and draw.random() < 0.7
                    else draw.integers(40, 300)
                ),
                hours=2,
            )
        rows.append((s, at + timedelta(days=60), "HOSPITAL_ADMISSION//EW"))
    schema = {"subject_id": pl.Int64, "time": pl.Datetime("us"), "code": pl.String}
    frame = pl.DataFrame(rows, schema=schema, orient="row").sort(
        "subject_id", "time", maintain_order=True
    )
    frame = frame.with_columns(numeric_value=pl.lit(None, pl.Float32))
    for part in sorted(set(split.values())):
        (folder / "data" / part).mkdir(parents=True)
        own = frame.filter(pl.col("subject_id").replace_strict(split) == part)
        own.write_parquet(folder / "data" / part / "0.parquet")
    (folder / "metadata").mkdir()
    pl.DataFrame(list(split.items()), schema=["subject_id", "split"], orient="row").write_parquet(
        folder / "metadata" / "subject_splits.parquet"
    )


@pytest.mark.long
@pytest.mark.skipif(
    "BITIMELY_MEDS_DEV" not in os.environ,
    reason="needs a virtual environment with MEDS-DEV: BITIMELY_MEDS_DEV=VENV/bin",
)
def test_the_entry_runs_inside_meds_dev(home: Path, tmp_path: Path) -> None:
    """Labels by the benchmark's task, the entry by its runner, and scores by its evaluation."""
    bench = Path(os.environ["BITIMELY_MEDS_DEV"])
    write_stays(tmp_path / "meds")
    python = [str(bench / "python"), "-c"]
    place = subprocess.run(
        [*python, "import MEDS_DEV; print(MEDS_DEV.__path__[0])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    entry = Path(place.strip()) / "models" / "bitimely"
    entry.mkdir(exist_ok=True)
    shutil.copy(ROOT / "pipelines" / "meds-dev" / "model.yaml", entry)
    (entry / "requirements.txt").write_text("")  # the bitimely of this test
    tool = tmp_path / "bin" / "bitimely"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m bitimely_cli "$@"\n')
    tool.chmod(0o755)
    path = f"{bench}:{tool.parent}:{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": path,
        "PHECODE_MAP": str(home / "map.csv"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    task, out = "readmission/general_hospital/30d", tmp_path / "out"
    predictions = out / "MIMIC-IV" / task / "predict"
    for line in (
        f"meds-dev-task task={task} dataset=MIMIC-IV dataset_dir={tmp_path}/meds output_dir={tmp_path}/labels",
        f"meds-dev-model model=bitimely dataset_type=full mode=full demo=True dataset_name=MIMIC-IV task_name={task} "
        f"dataset_dir={tmp_path}/meds labels_dir={tmp_path}/labels output_dir={out}",
        f"meds-dev-evaluation predictions_dir={predictions} output_dir={tmp_path}/scores",
        f"meds-dev-pack-result evaluation_fp={tmp_path}/scores/results.json dataset=MIMIC-IV task={task} model=bitimely result_fp={tmp_path}/r.json",
        f"meds-dev-validate-result result_fp={tmp_path}/r.json",
    ):
        done = subprocess.run(
            line.split(), env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{line}\n{done.stderr[-3000:]}"
    scores = json.loads((tmp_path / "r.json").read_text())["result"]["samples_equally_weighted"]
    assert 0 <= scores["roc_auc_score"] <= 1
    held = pl.concat(
        [pl.read_parquet(file) for file in (tmp_path / "labels" / "held_out").glob("*.parquet")]
    )
    assert pl.read_parquet(predictions / "predictions.parquet").height == held.height
