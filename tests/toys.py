"""A data set of small recordings, one JSON file each, which can be bad in every way; fixtures
`toys` and `raw` are those of conftest.py.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitimely_core import cache, registry
from bitimely_core.cache import unit_groups
from bitimely_core.errors import Finding, Reason, UserError, input_error
from bitimely_core.formats.source import Source
from bitimely_core.progress import show_progress
from bitimely_core.store import manifests
from bitimely_core.types import Annotation, IngestUnit, Record, Records, Signal, SourceRows

HERE = Path(__file__).parent
READ: list[str] = []  # units that were read in this process
FACTS = registry.DatasetFacts(
    title="",
    views={},
    licence="",
    url="",
    download="",
    paper={},
    rules={"gain": "as given"},
    options={"gain": 0.5},
)


def read_toy(path: Path, gain: float) -> Record | Records:
    """A recording made of what its file says; `fault` is how it is bad."""
    READ.append(path.stem)
    body = json.loads(path.read_bytes())
    fault = body.get("fault")
    if fault == "header":
        raise input_error(
            Reason.HEADER_BYTES, "found 1024", "expected 2048", file=str(path), field="header_bytes"
        )
    if fault == "memory":
        raise MemoryError
    if fault == "bug":
        raise KeyError("Haagse")
    if fault == "io":
        raise OSError(errno.EIO, "Input/output error")
    if fault == "kill" or (fault == "kill once" and not Path(body["mark"]).exists()):
        Path(body.get("mark", os.devnull)).write_text("here")
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        raise KeyboardInterrupt
    time.sleep(body.get("sleep", 0))
    rng = np.random.default_rng(body["seed"])
    n = body.get("n", 400)
    signals = [
        Signal(
            "EEG",
            100.0,
            "uV",
            rng.integers(-2048, 2048, n).astype(np.int16),
            gain,
            0.1,
            rails=body.get("rails"),
        ),
        Signal("temperature", 1.0, "degC", np.float32(rng.normal(size=n // 100 + 1)), 1.0, 37.0),
    ]
    if fault == "inf":
        signals[1].samples[0] = np.inf
    if fault == "table":
        lost = SourceRows(
            file=path.name,
            kind="segments",
            seen=10,
            quarantined={"not_numeric": body["bad"]},
            dropped={"duplicates": 1},
        )
        parts = [
            Record(
                recording_id=f"{path.stem}/{i}",
                subject_id=f"s{i}",
                signals=signals[:1],
                attributes={"label": i},
            )
            for i in range(3)
        ]
        return Records(records=parts, rows=[lost])
    findings = (
        [Finding(code=Reason.CLIPPED, level="warning", problem="80 % at the rail", file=path.name)]
        if fault == "warn"
        else []
    )
    return Record(
        recording_id=path.stem,
        subject_id=path.stem[:2],
        signals=signals,
        annotations=[Annotation(0.0, 2.0, "W"), Annotation(2.0, 2.0, "N1")],
        attributes={"age": 40 + body["seed"], "sex": None},
        start_time="1989-04-24T16:13:00",
        findings=findings,
    )


def list_toys(
    source: Source | None, options: dict[str, Any]
) -> Iterator[IngestUnit | Finding | SourceRows]:
    """Recordings described by JSON files."""
    assert source is not None
    if "refuse" in source.files:
        raise input_error(Reason.SCHEMA_MISMATCH, "train and test differ", file="refuse")
    for name in source.files:
        if name.endswith(".json"):
            yield IngestUnit(
                name=name[:-5],
                files=(name,),
                read=functools.partial(read_toy, source.path(name), options["gain"]),
            )
        elif name.endswith(".csv"):
            yield SourceRows(file=name, seen=5, dropped={"duplicates": 1})
        elif name != "SHA256SUMS.txt":
            yield Finding(
                code=Reason.FILE_NAME, level="warning", problem="belongs to no unit", file=name
            )


@pytest.fixture
def toys() -> Iterator[None]:
    registry.datasets._items["toy"] = registry.Entry("toy", list_toys, FACTS)
    READ.clear()
    yield
    del registry.datasets._items["toy"]


def put(raw: Path, name: str, seed: int = 0, **body: Any) -> Path:
    """One file of the toy data set."""
    path = raw / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"seed": seed, **body}))
    return path


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Three good recordings."""
    for i, name in enumerate(("a1", "b1", "c1")):
        put(tmp_path / "raw", name, i)
    return tmp_path / "raw"


def ingest(raw: Path, out: Path, **options: Any) -> dict[str, Any]:
    return cache.ingest("toy", raw, out, **options)


def refused(raw: Path, out: Path, **options: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        ingest(raw, out, **options)
    return caught.value


def tree(out: Path) -> dict[str, bytes]:
    """Every file but locks and notes."""
    return {
        p.name: p.read_bytes()
        for p in sorted(out.iterdir())
        if p.is_file() and not p.name.startswith(".")
    }


def clean(raw: Path, tmp_path: Path, **options: Any) -> dict[str, bytes]:
    """The tree of an undisturbed ingest."""
    ingest(raw, tmp_path / "clean", **options)
    found = tree(tmp_path / "clean")
    shutil.rmtree(tmp_path / "clean")
    return found


def content(out: Path) -> dict[str, bytes]:
    """The published shards, whatever the generation."""
    return {name: (out / name).read_bytes() for name in manifests.read_manifest(out)["files"]}


def same(one: Record, other: Record) -> bool:
    return all(
        a[:3] == b[:3]
        and a[4:7] == b[4:7]
        and a.samples.dtype == b.samples.dtype
        and a.samples.tobytes() == b.samples.tobytes()
        for a, b in zip(one.signals, other.signals, strict=True)
    ) and (one.recording_id, one.subject_id, one.annotations, one.attributes) == (
        other.recording_id,
        other.subject_id,
        other.annotations,
        other.attributes,
    )


def start(
    raw: Path, out: Path, *, jobs: int = 1, big: int = unit_groups.LARGE_UNIT, **limits: int
) -> subprocess.Popen[str]:
    """`ingest` of the toy data in a process group of its own; exits with the code of the report."""
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import toys; toys.main()",
            str(raw),
            str(out),
            json.dumps({"jobs": jobs, "big": big, **limits}),
        ],
        env={**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parent}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def main() -> None:
    """For `start`."""

    def show(what: object) -> None:
        sys.stdout.write(f"{what}\n")
        sys.stdout.flush()

    raw, out, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    jobs, unit_groups.LARGE_UNIT = options.pop("jobs"), options.pop("big")
    for name, value in options.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    registry.datasets._items["toy"] = registry.Entry("toy", list_toys, FACTS)
    try:
        with show_progress(lambda what, done, total: show(done)):
            report = cache.ingest("toy", raw, out, jobs=jobs)
    except UserError as error:
        show(error)
        sys.exit(error.exit_code)
    sys.exit(report["exit_code"])
