"""What is learned before the training (vocabulary, ratios, statistics) and the training itself:
other held-out data change not a byte of it.
"""

from __future__ import annotations

import csv
import hashlib
import random
import shutil
from pathlib import Path

import polars as pl
import pytest
import small

from bitimely_cli.main import main

SUBJECTS = 60
CODES = {
    "250.00": "250",
    "401.9": "401",
    "428.0": "428",
    "496": "496",
    "530.81": "530",
    "715.90": "715",
    "780.4": "780",
    "V70.0": "999",
}
RARE = "V70.0"  # of held-out subjects alone
STEPS = ["--preset", "tiny", "--steps", "3", "--batch-size", "8", "--set", "model.layers=2"]


def find_split(subject: str) -> str:
    """By the documented rule: 80/10/10 of the first 8 bytes of SHA-256 of `seed|subject`."""
    u = int.from_bytes(hashlib.sha256(f"0|{subject}".encode()).digest()[:8], "big") / 2**64
    return "train" if u < 0.8 else "validation" if u < 0.9 else "test"


def write_claims(folder: Path, *, changed: bool) -> None:
    """Diagnoses of each subject from its own random numbers; with `changed` those of held-out
    subjects are other ones, at other times.
    """
    folder.mkdir()
    with (
        (folder / "claims.csv").open("w", newline="") as file,
        (folder / "labels.csv").open("w", newline="") as labels,
    ):
        rows, flags = csv.writer(file), csv.writer(labels)
        rows.writerow(["patient_id", "date", "icd9"])
        flags.writerow(["patient_id", "chf"])
        for k in range(SUBJECTS):
            subject = f"p{k:03d}"
            other = changed and find_split(subject) != "train"
            draw = random.Random(f"{subject}{other}")
            known = [code for code in CODES if code != RARE]
            for _ in range(draw.randint(6, 14)):
                code = RARE if other and draw.random() < 0.5 else draw.choice(known)
                rows.writerow(
                    [
                        subject,
                        f"200{draw.randint(0, 7)}-{draw.randint(1, 12):02d}-{draw.randint(1, 28):02d}",
                        code,
                    ]
                )
            flags.writerow([subject, int(draw.random() < 0.4)])
    (folder / "icd9_phecode.csv").write_text(
        "icd9,phecode\n" + "".join(f"{code},{phecode}\n" for code, phecode in CODES.items())
    )


@pytest.mark.slow
@pytest.mark.parametrize("selection", [["--no-select"], ["--ratio-threshold", "1.05"]])
def test_claims_of_held_out_subjects_decide_on_nothing(
    selection: list[str], tmp_path: Path
) -> None:
    homes = []
    for changed in (False, True):
        home = tmp_path / f"ws-{changed}"
        write_claims(tmp_path / f"raw-{changed}", changed=changed)
        home.mkdir()
        if homes:
            shutil.copy(homes[0] / "id.key", home / "id.key")  # the same pseudonyms
        ingest = [
            "ingest",
            "pophr",
            str(tmp_path / f"raw-{changed}"),
            "--min-codes",
            "1",
            *selection,
            "-w",
            str(home),
        ]
        assert main(ingest) in {0, 3}
        assert (
            main(
                [
                    "pretrain",
                    *STEPS,
                    "--data",
                    "pophr",
                    "--objective",
                    "next-previous-strict",
                    "--run",
                    "run",
                    "-w",
                    str(home),
                ]
            )
            == 0
        )
        homes.append(home)
    splits = {find_split(f"p{k:03d}") for k in range(SUBJECTS)}
    assert splits == {"train", "validation", "test"}
    rows = [
        pl.concat(
            [
                pl.read_parquet(path)
                for path in sorted((home / "tokens" / "pophr").glob("sequences-*.parquet"))
            ]
        )
        for home in homes
    ]
    assert not rows[0].equals(rows[1]), "the held-out sequences differ"
    for name in (
        "tokens/pophr/vocab.parquet",
        "tokens/pophr/ratios.parquet",
        "runs/run/model/model.safetensors",
    ):
        assert (homes[0] / name).read_bytes() == (homes[1] / name).read_bytes(), name
    vocabulary = pl.read_parquet(homes[1] / "tokens" / "pophr" / "vocab.parquet")
    unknown = rows[1].select(pl.col("codes").explode() == 4).to_series().sum()
    assert (unknown > 0) == (selection == ["--no-select"]), (
        "codes that no training subject has are [UNK]"
    )
    assert CODES[RARE] not in {
        str(value) for column in vocabulary.iter_columns() for value in column
    }


@pytest.mark.slow
@pytest.mark.parametrize("normalise", [pytest.param("channel", marks=pytest.mark.slow), "window"])
def test_recordings_of_held_out_subjects_decide_on_nothing(
    normalise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = []
    for changed in (False, True):
        folder = tmp_path / f"{changed}"
        folder.mkdir()
        monkeypatch.chdir(folder)
        small.write_raw(folder / "raw")
        held_out = [s for s in range(small.SUBJECTS) if find_split(f"p{s:02d}") != "train"]
        assert 0 < len(held_out) < small.SUBJECTS / 2
        for subject in held_out if changed else ():
            values, _ = small.make_signals(subject)
            lines = [",".join(map(str, row)) for row in (3 * values + 50).tolist()]
            (folder / "raw" / "data" / f"p{subject:02d}_a.csv").write_text(
                "C3,C4\n" + "\n".join(lines) + "\n"
            )
        assert main(["ingest", "generic", "raw", "--map", "raw/map.toml", "-w", "ws"]) == 0
        assert (
            main(
                [
                    "tokenize",
                    small.VIEW,
                    "--window",
                    str(small.SAMPLES),
                    "--normalise",
                    normalise,
                    "-w",
                    "ws",
                ]
            )
            == 0
        )
        patches = ["--set", "model.tokenizer=patch", "--set", "model.patch=10"]
        assert (
            main(["pretrain", *STEPS, *patches, "--data", small.VIEW, "--run", "run", "-w", "ws"])
            == 0
        )
        assert (
            main(
                [
                    "finetune",
                    "run",
                    "--data",
                    small.VIEW,
                    "--steps",
                    "3",
                    "--batch-size",
                    "8",
                    "--run",
                    "tuned",
                    "-w",
                    "ws",
                ]
            )
            == 0
        )
        homes.append(folder / "ws")
    files = [next((home / "tokens").glob("*/windows-*.arrow")).read_bytes() for home in homes]
    assert files[0] != files[1], "the held-out windows differ"
    statistics = next((homes[0] / "tokens").glob("*/statistics.json")).relative_to(homes[0])
    for name in (
        statistics,
        Path("runs/run/model/model.safetensors"),
        Path("runs/tuned/model/model.safetensors"),
    ):
        assert (homes[0] / name).read_bytes() == (homes[1] / name).read_bytes(), name
