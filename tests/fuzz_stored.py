"""Fuzz targets of claims tables, recipes and stored records: `fuzz.py` runs them beside those of
the recordings' formats.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TypeVar

import polars as pl
import small

from bitimely_core import cache, registry, tokens
from bitimely_core.errors import UserError
from bitimely_core.pipeline.plan import plan_experiment
from bitimely_core.recipe import load_recipe
from bitimely_core.run import describe_identity
from bitimely_core.schemas.ingest_records import IngestReport
from bitimely_core.schemas.reports import Summary
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.schemas.scores import Scores
from bitimely_core.store import storage
from bitimely_core.store.records import StoredRecord, write_results
from bitimely_core.workflows.verify import verify

Record = TypeVar("Record", bound=StoredRecord)
BETWEEN = b"\n\x1d\n"  # separates the files of a source in one input
TABLES = ("claims.csv", "patients.csv", "labels.csv", "icd9_phecode.csv", "rules.toml")
MAP = b"icd9,phecode\n250.00,250.2\n401.9,401.1\nV10.0,195\n428.0,428\n"
RULES = b'[[rule]]\nlabel = "dm"\n[[rule.any]]\nicd9 = ["250"]\ncount = 2\nwithin_days = 730\n'


def _ingest_claims(source: Path, home: Path, rules: bool) -> None:
    """Ingest and build sequences; whatever is published verifies."""
    out = home / "cache" / "pophr"
    for folder in (home, source.with_name("sequences")):
        shutil.rmtree(folder, ignore_errors=True)
    cache.ingest(
        "pophr",
        source,
        out,
        max_bad=1.0,
        options={"rules": str(source / "rules.toml")} if rules else {},
    )
    assert not cache.verify(out, deep=True)
    with contextlib.suppress(UserError):
        tokens.build(out, out=source.with_name("sequences"), min_codes=1)


def list_sources() -> Iterator[bytes]:
    """Claims in long and wide tables, with patients, labels, a map and rules."""
    claims = b"patient_id,date,icd9,source,claim\na,2001-02-03,250.00,hospital,1\nb,2001-05-03,401.9,,2\na,2003-02-03,V10.0,,3\n"
    patients = b"patient_id,birth_date,death_date,sex,obs_start,obs_end\na,1950-01-01,,F,,\nb,1960-01,2004-01-01,M,1999-01-01,2004-01-01\n"
    labels = b"patient_id,chf,index_date\na,1,2002-01-01\nb,0,\n"
    wide = b"patient_id;date;dx1;dx2;vocab\nx;03/02/2001;25000;4019;9\nx;04/02/2001;E11;I50;10\n"
    yield BETWEEN.join((claims, patients, labels, MAP, RULES))
    yield BETWEEN.join((wide, b"", b"", MAP))
    yield BETWEEN.join((b"\xef\xbb\xbf" + claims.replace(b"\n", b"\r\n"), patients, b"", MAP))
    yield BETWEEN.join((claims.decode().encode("utf-16"), b"", labels, MAP))


def claims_tables(data: bytes, folder: Path) -> None:
    """A source of claims as csv files, up to its sequences."""
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir()
    for name, content in zip(TABLES, data.split(BETWEEN), strict=False):
        if content:
            (source / name).write_bytes(content)
    _ingest_claims(source, folder / "home", (source / "rules.toml").exists())


def list_parquets() -> Iterator[bytes]:
    """Claims as Parquet with texts, dates, times, numbers, categories and nulls."""
    base = {
        "patient_id": ["a", "b", "a"],
        "date": ["2001-02-03", "2001-05-03", "2003-02-03"],
        "icd9": ["250.00", "401.9", "V10.0"],
    }
    days = [date(2001, 2, 3), None, date(2003, 2, 3)]
    for columns in (
        base,
        {**base, "date": days},
        {**base, "date": [datetime(2001, 2, 3, tzinfo=UTC)] * 3, "patient_id": [1, 2, None]},
        {**base, "icd9": [250.0, 401.9, None]},
        {**base, "icd9": pl.Series(base["icd9"], dtype=pl.Categorical), "claim": [[1], [2], []]},
    ):
        file = io.BytesIO()
        pl.DataFrame(columns).write_parquet(file, compression="uncompressed")
        yield file.getvalue()


def claims_parquet(data: bytes, folder: Path) -> None:
    """A source of claims as one Parquet file."""
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir()
    (source / "claims.parquet").write_bytes(data)
    (source / "icd9_phecode.csv").write_bytes(MAP)
    _ingest_claims(source, folder / "home", False)


def list_recipes() -> Iterator[bytes]:
    """The shipped recipes."""
    for path in sorted(registry.RECIPES.glob("*.toml")):
        yield path.read_bytes()


def recipe(data: bytes, folder: Path) -> None:
    """A recipe that loads can be planned or is refused."""
    path = folder / "x.toml"
    path.write_bytes(data)
    plan = plan_experiment(load_recipe(path), "x", folder / "home", assignments=[])
    assert all(training.run == Path(training.run).name for training in plan.trainings.values())


def list_records() -> Iterator[bytes]:
    """Records of runs, scores, analyses and ingests."""
    for name in ("run.json", "scores.json", "summary.json", "ingest_report.json"):
        yield from (path.read_bytes() for path in sorted(small.find_workspace().rglob(name)))


def records(data: bytes, folder: Path) -> None:
    """Each kind of record, and what is derived from that of a run."""
    for kind in (Scores, Summary, IngestReport):
        with contextlib.suppress(UserError):
            _read_twice(kind, data, folder)
    describe_identity(_read_twice(RunRecord, data, folder))


def _read_twice(kind: type[Record], data: bytes, folder: Path) -> Record:
    """The record of a file that its manifest names, which is the same once it is written again."""
    home = folder / kind.__name__
    shutil.rmtree(home, ignore_errors=True)
    write_results(storage.make_folder(home), {"x.json": data}, beside=kind is IngestReport)
    record = kind.load(home / "x.json")
    record.save(home / "y.json")
    assert kind.load(home / "y.json") == record
    return record


def list_manifests() -> Iterator[bytes]:
    """Manifests of caches and token sets, after the folder that they describe."""
    home = small.find_workspace()
    for path in sorted(
        path for kind in ("cache", "tokens") for path in home.glob(f"{kind}/*/manifest.json")
    ):
        yield path.parent.relative_to(home).as_posix().encode() + b"\n" + path.read_bytes()


def manifests(data: bytes, folder: Path) -> None:
    """A manifest with any content whose own hash is right: opened and verified without leaving the
    folder.
    """
    name, _, text = data.partition(b"\n")
    known = {line.partition(b"\n")[0] for line in list_manifests()}
    if name not in known:
        return
    home = folder / name.decode()
    if not home.exists():
        shutil.copytree(small.find_workspace() / name.decode(), home)
    with contextlib.suppress(ValueError, RecursionError):
        body = json.loads(text)
        if isinstance(body, dict):
            body.pop("manifest_sha256", None)
            text = (
                storage.encode_json({**body, "manifest_sha256": storage.fingerprint(body)}) + b"\n"
            )
    (home / "manifest.json").write_bytes(text)
    with contextlib.suppress(UserError):
        verify(home)
    if name.startswith(b"cache"):
        cache.open_cache(home)
    else:
        opened = tokens.open_tokens(home)
        assert {
            one for split in ("train", "validation", "test") for one in opened[split].subjects()
        } <= set(opened.subjects())
