"""What ingest accepts can be tokenized and trained on; the rest is refused by file, place and remedy."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitimely_cli.main import main

CLAIMS = [(f"p{i:02d}", f"200{k}-0{1 + i % 9}-1{k}", code) for i in range(12) for k, code in enumerate(("428.0", "496", "250.00", "401.9"))]
MAP = "icd9,phecode\n428.0,428.2\n496,496\n250.00,250.2\n401.9,401.1\n"


def run(*argv: str | Path) -> tuple[int, str]:
    """Exit code and messages of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(one) for one in argv])
    return code, err.getvalue()


def write_claims(folder: Path, **texts: str | bytes) -> Path:
    """A folder of claims; `texts` replace tables by name."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = sorted({row[0] for row in CLAIMS})
    whole: dict[str, str | bytes] = {
        "claims": "patient_id,date,icd9\n" + "".join(",".join(row) + "\n" for row in CLAIMS),
        "patients": "patient_id,birth_date,sex\n" + "".join(f"{one},1950-01-01,f\n" for one in ids),
        "labels": "patient_id,chf,copd\n" + "".join(f"{one},{i % 2},{i // 2 % 2}\n" for i, one in enumerate(ids)),
        "icd9_phecode": MAP,
        **texts,
    }
    for name, text in whole.items():
        (folder / f"{name}.csv").write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def write_epilepsy(folder: Path) -> Path:
    """A table of 12 segments of two chunks."""
    rng = np.random.default_rng(0)
    head = ",".join(["id", *(f"X{i}" for i in range(1, 179)), "y"])
    rows = [",".join([f"X{c}.V1.{s}", *map(str, rng.integers(-99, 99, 178)), str(1 + s % 5)]) for s in range(1, 13) for c in (1, 2)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.csv").write_text("\n".join([head, *rows, ""]))
    return folder


def ingest(dataset: str, folder: Path, workspace: Path, *more: str | Path) -> tuple[int, str, dict[str, Any]]:
    """Exit code, messages and report of an ingest."""
    claims = ["--min-codes", "1", "--no-select"] if dataset == "pophr" else []
    code, err = run("ingest", dataset, folder, *claims, "--workspace", workspace, *more)
    report = workspace / "cache" / dataset / "ingest_report.json"
    return code, err, json.loads(report.read_text()) if report.is_file() else {}


# --- encodings


GENERIC_MAP = '[[files]]\npattern = "*_rec.csv"\nrate = 50\n[table]\npath = "recordings.csv"\nfile = "recording"\nsubject = "patient"\nlabel = "label"\n'


def write_generic(folder: Path, channel: str = "l\u00e9ft", label: str = "\u00e9pilepsie") -> Path:
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(4):
        text = f"{channel},b\n" + "".join(f"{a:.3f},{b:.3f}\n" for a, b in rng.normal(size=(600, 2)))
        (folder / f"{i}_rec.csv").write_text(text, "utf-8")
    rows = "".join(f"{i}_rec,s{i},{label if i % 2 else 'sain'}\n" for i in range(4))
    (folder / "recordings.csv").write_text("recording,patient,label\n" + rows, "utf-8")
    (folder.parent / "map.toml").write_text(GENERIC_MAP)
    return folder


def recode(folder: Path, name: str, encoding: str) -> None:
    for path in folder.glob(name):
        path.write_bytes(path.read_text("utf-8").encode(encoding))


TABLES = [
    ("pophr", "claims.csv"),
    ("pophr", "patients.csv"),
    ("pophr", "labels.csv"),
    ("epilepsy", "data.csv"),
    ("generic", "*_rec.csv"),
    ("generic", "recordings.csv"),
]


def write_source(dataset: str, folder: Path) -> Path:
    """A source whose tables all hold letters beyond ASCII."""
    if dataset == "generic":
        return write_generic(folder)
    if dataset == "epilepsy":
        path = write_epilepsy(folder) / "data.csv"
        path.write_text(path.read_text().replace("id,", "identit\u00e9,", 1), "utf-8")
        return folder
    write_claims(folder)
    for path in folder.glob("*s.csv"):
        text = path.read_text()
        path.write_text(text.replace("p03", "p\u00e903").replace("chf", "d\u00e9pression"), "utf-8")
    return folder


@pytest.mark.parametrize(("dataset", "name"), TABLES)
def test_every_table_follows_one_rule_of_encodings(tmp_path: Path, dataset: str, name: str) -> None:
    extra = ["--map", tmp_path / "map.toml"] if dataset == "generic" else []
    hashes = {}
    for encoding, stated in (("utf-8", ""), ("utf-8-sig", ""), ("utf-16", ""), ("latin-1", "latin-1"), ("latin-1", "")):
        folder = write_source(dataset, tmp_path / f"raw-{encoding}-{stated}")
        recode(folder, name if not stated else "*.csv", encoding)
        more = [*extra, *(["--encoding", stated] if stated else [])]
        code, err, report = ingest(dataset, folder, tmp_path / f"work-{encoding}-{stated}", *more)
        if encoding != "latin-1" or stated:
            assert code == 0, err
            hashes[encoding, stated] = report["content_sha256"]
            continue
        lines = [line for line in err.splitlines() if line.startswith("error[encoding]")]
        assert code == 4
        assert all(name.lstrip("*") in line for line in lines)
        line = next(line for line in lines if "byte" in line)
        assert "row" in line
        assert "--encoding" in line
    assert len(set(hashes.values())) == 1


def test_a_stated_encoding_is_a_setting_of_the_cache(tmp_path: Path) -> None:
    folder = write_generic(tmp_path / "raw", "left", "sick")
    extra = ["--map", tmp_path / "map.toml"]
    assert ingest("generic", folder, tmp_path / "w", *extra)[0] == 0
    code, err, _ = ingest("generic", folder, tmp_path / "w", *extra, "--encoding", "latin-1")
    assert code == 2
    assert "encoding" in err
    code, err, _ = ingest("generic", folder, tmp_path / "v", *extra, "--encoding", "rot13")
    assert code == 2
    assert "rot13" in err
