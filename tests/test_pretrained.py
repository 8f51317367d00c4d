"""Models that come with the package: small, documented, right on recordings that they were not
trained on, and never changed by a verb.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import bitimely
from bitimely_cli.main import main
from bitimely_core import registry
from bitimely_core.catalog import list_rows
from bitimely_core.config import read_toml
from bitimely_core.store.storage import hash_file

DATA = Path(os.environ.get("BITIMELY_TEST_DATA", "../shared/data")).resolve()
CINC = DATA / "complete" / "cinc2017" / "training2017"
BIDMC = DATA / "complete" / "bidmc" / "bidmc_csv"
NAMES = list(read_toml(registry.PRETRAINED / "models.toml"))


def hash_folder(folder: Path) -> dict[str, str]:
    return {path.name: hash_file(path) for path in sorted(folder.iterdir()) if path.is_file()}


def test_all_are_listed_with_scores_licence_and_card(tmp_path: Path) -> None:
    rows = {row["name"]: row for row in list_rows("pretrained", tmp_path)}
    assert list(rows) == NAMES
    assert sum(path.stat().st_size for path in registry.PRETRAINED.rglob("*.safetensors")) < 4e6
    for name, row in rows.items():
        card = (registry.PRETRAINED / name / "model_card.md").read_text()
        for text in (row["licence"], row["attribution"], row["limits"], *row["commands"]):
            assert text in card
        assert "## Scores" in card
        assert "Not evaluated" not in card
        assert row["subjects"] >= 5


@pytest.mark.slow
@pytest.mark.skipif(not CINC.is_dir(), reason="CinC 2017 is not here")
def test_rhythms_of_records_are_found_and_the_package_stays_as_it_is(tmp_path: Path) -> None:
    classes = dict(csv.reader((CINC / "REFERENCE.csv").read_text().splitlines()))
    words = {"A": "atrial fibrillation", "N": "normal"}
    chosen = [name for letter in words for name in sorted(classes) if classes[name] == letter]
    chosen = [*chosen[:20], *chosen[-20:]]
    for name in chosen:
        for ending in ("hea", "mat"):
            shutil.copy(CINC / f"{name}.{ending}", tmp_path)
    before = hash_folder(registry.PRETRAINED / "ecg-rhythm")
    out = tmp_path / "out"
    command = ["predict", "ecg-rhythm", str(tmp_path), "--out", str(out)]
    assert main([*command, "-w", str(tmp_path / "ws")]) in {0, 3}
    frame = pl.read_parquet(out / "predictions.parquet")
    means = frame.group_by("recording_id").agg(pl.col("^p_.*$").mean())
    right = [
        row["p_atrial fibrillation"] > row["p_normal"]
        if classes[row["recording_id"]] == "A"
        else row["p_atrial fibrillation"] < row["p_normal"]
        for row in means.iter_rows(named=True)
    ]
    assert np.mean(right) > 0.9
    shown = json.loads((out / "summary.json").read_text())["recordings"]
    for row in shown:
        own = means.filter(pl.col("recording_id") == row["recording"]).drop("recording_id")
        best = max(own.columns, key=lambda name: own[name][0])
        assert row["prediction"] == f"{best.removeprefix('p_')} {own[best][0]:.2f}"
    model = bitimely.from_pretrained("ecg-rhythm", workspace=tmp_path / "none")
    assert model.predict(CINC / f"{chosen[0]}.hea").equals(
        frame.filter(pl.col("recording_id") == chosen[0])
    )
    assert hash_folder(registry.PRETRAINED / "ecg-rhythm") == before


@pytest.mark.skipif(not BIDMC.is_dir(), reason="BIDMC is not here")
@pytest.mark.parametrize("number", [10, 18, 25])
@pytest.mark.parametrize(
    ("name", "column"), [("ppg-heart-rate", "HR"), ("ppg-respiration", "RESP")]
)
def test_the_rates_of_a_patient_of_the_test_split_are_those_of_the_monitor(
    name: str, column: str, number: int
) -> None:
    monitor = pl.read_csv(BIDMC / f"bidmc_{number}_Numerics.csv").rename(str.strip)
    rates = monitor[column].cast(pl.Float64, strict=False)
    model = bitimely.from_pretrained(name)
    signals = BIDMC / f"bidmc_{number}_Signals.csv"
    frame = model.predict(signals, channel_map=["PPG=PLETH"])
    error = [
        row["prediction"] - rates.slice(round(row["start"]), 32).mean()
        for row in frame.iter_rows(named=True)
    ]
    assert np.mean(np.abs(error)) < 2.5


@pytest.mark.slow
def test_a_verb_that_writes_beside_a_model_takes_a_copy(tmp_path: Path) -> None:
    before = hash_folder(registry.PRETRAINED / "ecg-rhythm")
    work = ["-w", str(tmp_path)]
    rng = np.random.default_rng(0)
    (tmp_path / "raw").mkdir()
    for number in range(8):
        frame = pl.DataFrame({"time": np.arange(3000) / 300, "ECG": rng.normal(size=3000).round(4)})
        frame.write_csv(tmp_path / "raw" / f"r{number}.csv")
    lines = ["file,label", *(f"r{k},{'normal' if k % 2 else 'noise'}" for k in range(8))]
    (tmp_path / "raw" / "labels.csv").write_text("\n".join(lines))
    (tmp_path / "map.toml").write_text(
        '[[files]]\npattern = "r*.csv"\nunit = "mV"\n[table]\npath = "labels.csv"\n'
        'file = "file"\nlabel = "label"\n'
    )
    ingest = ["ingest", "generic", str(tmp_path / "raw"), "--map", str(tmp_path / "map.toml")]
    assert main([*ingest, *work]) in {0, 3}
    assert main(["tokenize", "generic/classification", "--window", "3000", *work]) == 0
    assert main(["embed", "ecg-rhythm", "--data", "generic/classification", *work]) == 0
    assert (tmp_path / "runs" / "ecg-rhythm" / "model.safetensors").is_file()
    assert hash_folder(registry.PRETRAINED / "ecg-rhythm") == before
    tune = ["finetune", "ecg-rhythm", "--data", "generic/classification", "--steps", "2"]
    assert main([*tune, "--run", "mine", *work]) == 0
