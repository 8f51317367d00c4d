"""Folders of claims for tests of their sources: files by name, what was read of them after the
checks of every source, and refusals.
"""

from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from samples import SAMPLES, needs_sample

from bitimely_core.claims.claims_reading import ClaimsOptions
from bitimely_core.claims.sources import ClaimsSource, read_source
from bitimely_core.errors import UserError
from bitimely_core.formats.source import scan_folder

COLUMNS = {
    "subject_id": pl.String,
    "date": pl.String,
    "code": pl.String,
    "vocab": pl.String,
    "source": pl.String,
    "claim": pl.String,
    "position": pl.Int16,
    "file": pl.String,
    "row": pl.Int64,
}
SUBJECTS = {
    "subject_id": pl.String,
    "birth": pl.String,
    "death": pl.String,
    "obs_start": pl.String,
    "obs_end": pl.String,
    "sex": pl.UInt8,
}

HEAD = "patient_id,date,icd9\n"
GOOD = "a1,2001-02-03,428.0\na2,2002-03-04,038.9\n"


def needs(name: str) -> pytest.MarkDecorator:
    return needs_sample(SAMPLES / name)


def write_files(root: Path, **files: str | bytes) -> Path:
    """Files by name, with __ for the dot and ___ for a folder."""
    for name, content in files.items():
        path = root / name.replace("___", "/").replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def check_source(claims: ClaimsSource) -> pl.DataFrame:
    """All events, after what must hold for every source."""
    frames = list(pickle.loads(pickle.dumps(claims.events))())
    assert all(dict(frame.schema) == COLUMNS for frame in frames)
    events = pl.concat(frames)
    assert events.equals(pl.concat(list(claims.events())))  # as often as needed
    for row in claims.rows:
        assert row.seen >= sum(row.dropped.values()) + sum(row.quarantined.values())
    kept = dict(events["file"].value_counts().iter_rows())
    listed = {row.file: row.seen - sum(row.dropped.values()) for row in claims.rows}
    assert {file: listed[file] for file in kept} == kept
    if claims.subjects is not None:
        assert dict(claims.subjects.schema) == SUBJECTS
        assert claims.subjects["subject_id"].is_unique().all()
    json.dumps(claims.facts)
    return events


def read_folder(
    root: Path, kind: str = "claims", **options: Any
) -> tuple[ClaimsSource, pl.DataFrame]:
    claims = read_source(scan_folder(root), ClaimsOptions(source=kind, **options))
    return claims, check_source(claims)


def catch_refusal(root: Path, kind: str = "claims", **options: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        read_source(scan_folder(root), ClaimsOptions(source=kind, **options))
    error = caught.value
    assert str(root) not in error.finding.line()
    return error


def list_cells(events: pl.DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    return list(events.select(columns).iter_rows())


def read_csv(path: Path) -> list[dict[str, str]]:
    """Python's own reader, names in lower case."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {name.lower(): cell for name, cell in row.items()}
            for row in csv.DictReader(file, strict=True)
        ]


def find_codes(claims: ClaimsSource) -> set[str]:
    return {str(finding.code) for finding in claims.findings}
