"""The cache of a data set: what is read comes back bit for bit, bad units are named, and no fault, kill or change goes unnoticed."""

from __future__ import annotations

import errno
import functools
import json
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import scipy.signal
from damage import Damage, append, delete, flip, truncate, zero4k
from samples import SAMPLES, require_sample

from bitimely_core import cache, registry, storage
from bitimely_core.cache import quality, shards, units
from bitimely_core.errors import Exit, Finding, Reason, UserError, input_error
from bitimely_core.formats.source import Source
from bitimely_core.schemas.ingest import IngestReport
from bitimely_core.types import Annotation, IngestUnit, Record, Records, Signal, SourceRows

HERE = Path(__file__).parent
READ: list[str] = []  # units that were read in this process
FACTS = registry.DatasetFacts(
    title="", views={}, licence="", url="", download="", paper={}, rules={"gain": "as given"}, options={"gain": 0.5}
)
CALLS = ("os_open", "os_write", "os_fsync", "os_replace", "os_link", "os_unlink", "os_mkdir")


# ---- a data set for these tests: one JSON file a recording


def read_toy(path: Path, gain: float) -> Record | Records:
    """A recording made of what its file says; `fault` is how it is bad."""
    READ.append(path.stem)
    body = json.loads(path.read_bytes())
    fault = body.get("fault")
    if fault == "header":
        raise input_error(Reason.HEADER_BYTES, "found 1024", "expected 2048", file=str(path), field="header_bytes")
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
        Signal("EEG", 100.0, "uV", rng.integers(-2048, 2048, n).astype(np.int16), gain, 0.1, rails=body.get("rails")),
        Signal("temperature", 1.0, "degC", np.float32(rng.normal(size=n // 100 + 1)), 1.0, 37.0),
    ]
    if fault == "inf":
        signals[1].samples[0] = np.inf
    if fault == "table":
        lost = SourceRows(file=path.name, kind="segments", seen=10, quarantined={"not_numeric": body["bad"]}, dropped={"duplicates": 1})
        parts = [
            Record(recording_id=f"{path.stem}/{i}", subject_id=f"s{i}", signals=signals[:1], attributes={"label": i}) for i in range(3)
        ]
        return Records(records=parts, rows=[lost])
    findings = [Finding(code=Reason.CLIPPED, level="warning", problem="80 % at the rail", file=path.name)] if fault == "warn" else []
    return Record(
        recording_id=path.stem,
        subject_id=path.stem[:2],
        signals=signals,
        annotations=[Annotation(0.0, 2.0, "W"), Annotation(2.0, 2.0, "N1")],
        attributes={"age": 40 + body["seed"], "sex": None},
        start_time="1989-04-24T16:13:00",
        findings=findings,
    )


def toy(source: Source | None, options: dict[str, Any]) -> Iterator[IngestUnit | Finding | SourceRows]:
    """Recordings described by JSON files."""
    assert source is not None
    if "refuse" in source.files:
        raise input_error(Reason.SCHEMA_MISMATCH, "train and test differ", file="refuse")
    for name in source.files:
        if name.endswith(".json"):
            yield IngestUnit(name=name[:-5], files=(name,), read=functools.partial(read_toy, source.path(name), options["gain"]))
        elif name.endswith(".csv"):
            yield SourceRows(file=name, seen=5, dropped={"duplicates": 1})
        elif name != "SHA256SUMS.txt":
            yield Finding(code=Reason.FILE_NAME, level="warning", problem="belongs to no unit", file=name)


@pytest.fixture(autouse=True)
def dataset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(storage, "os_fsync", lambda fd: None)  # slow, and no test can see what it does
    registry.datasets["toy"] = registry.Entry("toy", toy, FACTS)
    READ.clear()
    yield
    del registry.datasets["toy"]


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
    return {p.name: p.read_bytes() for p in sorted(out.iterdir()) if p.is_file() and not p.name.startswith(".")}


def clean(raw: Path, tmp_path: Path, **options: Any) -> dict[str, bytes]:
    """The tree of an undisturbed ingest."""
    ingest(raw, tmp_path / "clean", **options)
    found = tree(tmp_path / "clean")
    shutil.rmtree(tmp_path / "clean")
    return found


def content(out: Path) -> dict[str, bytes]:
    """The published shards, whatever the generation."""
    return {name: (out / name).read_bytes() for name in storage.read_manifest(out)["files"]}


def same(one: Record, other: Record) -> bool:
    return all(
        a[:3] == b[:3] and a[4:7] == b[4:7] and a.samples.dtype == b.samples.dtype and a.samples.tobytes() == b.samples.tobytes()
        for a, b in zip(one.signals, other.signals, strict=True)
    ) and (one.recording_id, one.subject_id, one.annotations, one.attributes) == (
        other.recording_id,
        other.subject_id,
        other.annotations,
        other.attributes,
    )


# ---- what is read comes back


def test_records_come_back_bit_for_bit_in_the_order_of_names(raw: Path, tmp_path: Path) -> None:
    ingest(raw, tmp_path / "out")
    opened = cache.open_cache(tmp_path / "out")
    found = list(opened.records())
    assert opened.dataset == "toy"
    assert [r.recording_id for r in found] == opened.recording_ids() == ["a1", "b1", "c1"]
    for record in found:
        wanted = read_toy(raw / f"{record.recording_id}.json", 0.5)
        assert isinstance(wanted, Record)
        assert same(record, wanted)
    assert opened.subjects().rows() == [(f"{x}1", f"{x}1", 40 + i, None) for i, x in enumerate("abc")]
    assert opened.signals()["n_samples"].to_list() == [400, 5] * 3
    assert opened.annotations().rows()[:2] == [("a1", 0.0, 2.0, "W"), ("a1", 2.0, 2.0, "N1")]


def test_parts_are_read_side_by_side_but_not_beside_a_publication(raw: Path, tmp_path: Path) -> None:
    out = storage.make_folder(tmp_path / "out")
    with storage.lock(out, shared=True):  # as the other part holds it
        assert cache.ingest("toy", raw, out, shard=(1, 2))["parts_missing"] == 1
    with storage.lock(out):
        assert refused(raw, out, shard=(2, 2)).exit_code == Exit.LOCKED


def test_quality_figures_outlive_the_shard_they_were_written_to(raw: Path, tmp_path: Path) -> None:
    put(raw, "a1", rails=[-100.0, 100.0])  # known to the reader alone
    ingest(raw, tmp_path / "out")
    figures = [json.loads(text) for text in cache.open_cache(tmp_path / "out").signals()["qc"]]
    assert figures[0]["out_of_range"] > 0.9
    assert figures[2]["out_of_range"] is None
    put(raw, "d1", 3)
    ingest(raw, tmp_path / "out")
    wanted = clean(raw, tmp_path)
    assert content(tmp_path / "out") == {name: wanted[name] for name in storage.read_manifest(tmp_path / "out")["files"]}


def test_channels_and_recordings_can_be_chosen(raw: Path, tmp_path: Path) -> None:
    ingest(raw, tmp_path / "out")
    opened = cache.open_cache(tmp_path / "out")
    assert [[s.channel for s in r.signals] for r in opened.records(["EEG"])] == [["EEG"]] * 3
    assert [r.signals for r in opened.records(["EMG"])] == [[], [], []]
    assert [r.recording_id for r in opened.records(only={"b1"})] == ["b1"]


def test_odd_shapes_survive(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    nan = np.float32(rng.normal(size=50))
    nan[3:7] = np.nan
    records = [
        Record(
            recording_id="gaps, \u00e9",
            subject_id="1",
            signals=[Signal("x", 0.1, "", np.array([-32768, 32767], np.int16), 0.1, 1e-9, onset) for onset in (0.0, 300.5)],
        ),
        Record(
            recording_id="nan", subject_id="2", signals=[Signal("y", 250.0, "mV", nan), Signal("empty", 1.0, "", np.zeros(0, np.int16))]
        ),
    ]
    wanted = [shards.validate_record(record, keep_dates=False) for record in records]
    names, files = shards.write_shard(tmp_path, wanted, "toy")
    assert names.annotations is None
    assert [facts.rows for facts in files.values()] == [4]
    found = list(shards.read_shard(tmp_path, names, {record.recording_id: {} for record in records}))
    assert all(same(a, b) for a, b in zip(found, wanted, strict=True))


def test_long_recordings_get_a_row_group_a_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "ROW_GROUP", 1000)
    long = [Signal(f"c{i}", 100.0, "", np.full(600, i, np.int16)) for i in range(3)]
    record = Record(recording_id="r", subject_id="s", signals=[*long, Signal("slow", 1.0, "", np.zeros(6, np.int16))])
    names, _ = shards.write_shard(tmp_path, [record], "toy")
    assert names.recordings is not None
    assert pq.ParquetFile(tmp_path / names.recordings).num_row_groups == 4
    (found,) = shards.read_shard(tmp_path, names, {"r": {}})
    assert same(found, record)


def test_shards_follow_the_recommended_form(raw: Path, tmp_path: Path) -> None:
    ingest(raw, tmp_path / "out")
    (name,) = (n for n in tree(tmp_path / "out") if n.startswith("recordings-"))
    file = pq.ParquetFile(tmp_path / "out" / name)
    columns = {file.schema_arrow.names[i]: file.metadata.row_group(0).column(i) for i in range(file.metadata.num_columns)}
    assert str(file.schema_arrow.field("samples").type) == "large_binary"
    assert "RLE_DICTIONARY" not in columns["samples"].encodings
    assert columns["samples"].statistics is None
    assert {c.compression for c in columns.values()} == {"ZSTD"}
    assert json.loads(file.schema_arrow.metadata[b"bitimely"])["channels"] == [["EEG", 100.0], ["temperature", 1.0]]


def figures(*signals: Signal) -> dict[str, float | None]:
    """Those of the last; the others are looked at with it."""
    return quality.measure_quality(signals)[-1]


def test_columns_of_a_shard_are_those_that_pyarrow_makes() -> None:
    import pyarrow as pa

    for values, kind in (
        (["a", "", "\u00e9\u8133", "long" * 100], pa.string()),
        (["a", None, "b", None, None, "c", "d", "e", "f", None], pa.string()),
        ([None, None], pa.string()),
        ([], pa.string()),
        ([1.5, -0.0, float("nan"), None], pa.float64()),
        ([2**40, -1], pa.int64()),
    ):
        found = shards._make_array(values, kind)
        found.validate(full=True)
        assert repr(found.to_pylist()) == repr(pa.array(values, kind).to_pylist())
        assert found.null_count == values.count(None)


def test_writing_a_shard_does_not_import_pandas(tmp_path: Path) -> None:
    """pyarrow would: half a second in every worker process."""
    code = (
        "import sys, pathlib, numpy as np\n"
        "from bitimely_core.types import Annotation, Record, Signal\n"
        "from bitimely_core.cache import shards\n"
        "signal = Signal('x', 1.0, 'mV', np.arange(9, dtype=np.int16))\n"
        "record = Record(recording_id='r', subject_id='s', signals=[signal], annotations=[Annotation(0.0, 1.0, 'W')])\n"
        "shards.write_shard(pathlib.Path(sys.argv[1]), [record], 'toy'); shards.write_subjects(pathlib.Path(sys.argv[1]), [('r', 's', '{}')])\n"
        "assert 'pyarrow' in sys.modules and 'pandas' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=HERE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_quality_figures_against_a_plain_count() -> None:
    x = np.concatenate([np.arange(1000) % 97 - 48, np.full(300, 7), np.full(50, -48)]).astype(np.int16)
    found = figures(Signal("x", 100.0, "uV", x, -0.5, 1.0, rails=(-48, 47)))
    assert found["out_of_range"] == pytest.approx((x > 47).sum() / len(x), rel=1e-5)
    assert found["clipped"] == pytest.approx(((x <= -48) | (x >= 47)).sum() / len(x), rel=1e-5)
    assert (found["flat"], found["flat_longest"]) == (pytest.approx(350 / 1350, rel=1e-5), 3.5)
    assert (found["min"], found["max"]) == (1 - 0.5 * 48, 1 + 0.5 * 48)
    assert found["median"] == pytest.approx(1 - 0.5 * np.median(x))
    assert found["iqr"] == pytest.approx(0.5 * np.subtract(*np.percentile(x, [75, 25])))
    y = np.array([np.nan, 1, 2, np.nan], np.float32)
    assert figures(Signal("y", 1.0, "", y))["missing"] == 0.5
    assert figures(Signal("y", 1.0, "", y))["median"] == 1.5
    assert figures(Signal("y", 1.0, "", y[:1]))["max"] is None
    assert figures(Signal("y", 1.0, "", y[:0]))["missing"] is None
    long = np.random.default_rng(0).normal(0, 3000, 70_001).clip(-32768, 32767).astype(np.int16)  # long enough to be counted, not sorted
    found = figures(Signal("x", 100.0, "uV", long, -0.5, 1.0))
    assert found["median"] == pytest.approx(1 - 0.5 * np.median(long), rel=1e-5)
    assert found["iqr"] == pytest.approx(0.5 * np.subtract(*np.percentile(long, [75, 25])), rel=1e-5)
    rest = np.arange(1017, dtype=np.int16)
    rest[300:400] = rest[950:1017] = 7  # a full second, and the shorter one at the end with some of the second before
    rest[[500, 550]] = 9  # equal where one looks first, moving between
    found = figures(Signal("x", 100.0, "", rest))
    assert (found["flat"], found["flat_longest"]) == (pytest.approx(117 / 1017, rel=1e-5), 1.0)
    constant = figures(Signal("z", 100.0, "", np.zeros(1000, np.int16), rails=(-(2**31), 2**31)))
    assert (constant["flat"], constant["flat_longest"], constant["clipped"]) == (1.0, 10.0, 0.0)


def test_channels_that_are_looked_at_together_get_the_figures_of_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    signals = []
    for i in range(60):
        n, rate = rng.choice([0, 1, 17, 700, 1000]), rng.choice([1.0, 100.0, 250.0])
        x = rng.normal(size=n).cumsum() * 20
        x[: n // 3] = 5
        kept = np.where(rng.random(n) < (i % 4) / 3, np.nan, x).astype(np.float32) if i % 3 == 0 else x.astype(np.int16)
        signals.append(Signal(f"c{i}", rate, "", kept, -0.5 * (i % 2) or 0.1, i % 5, rails=(-100.2, 100) if i % 4 == 0 else None))
    monkeypatch.setattr(quality, "GROUP_SAMPLES", 3000)  # several chunks
    assert quality.measure_quality(signals) == [figures(signal) for signal in signals]


@pytest.mark.parametrize("mains", [50.0, 60.0])
def test_line_noise_is_the_share_of_the_power_near_the_mains(mains: float) -> None:
    """Sines of amplitudes 3 (mains, also 0.5 Hz beside it) and 4: powers 4.5 and 8, hence 4.5 / 12.5 = 0.36, whatever the drift."""
    t = np.arange(int(250 * 61.3)) / 250
    drift = 500 + 300 * t / t[-1] + 50 * np.sin(2 * np.pi * 0.02 * t)
    for f in (mains, mains - 0.5):
        x = (4 * np.sin(2 * np.pi * 10 * t) + 3 * np.cos(2 * np.pi * f * t) + drift).astype(np.float32)
        found = figures(Signal("x", 250.0, "uV", x, -0.25, 7.0))
        assert found["line_noise"] == pytest.approx(0.36, abs=0.003)
        assert found["line_frequency"] == mains
    x[2000:5000] = np.nan  # what is missing is passed over
    assert figures(Signal("x", 250.0, "uV", x))["line_noise"] == pytest.approx(0.36, abs=0.003)
    beside = np.round(100 * np.sin(2 * np.pi * (mains + 2) * t)).astype(np.int16)
    assert figures(Signal("x", 250.0, "uV", beside))["line_noise"] == pytest.approx(0.0, abs=1e-3)


def test_line_noise_of_white_noise_is_that_of_its_band() -> None:
    x = np.random.default_rng(0).normal(size=(400, 2000)) * 300
    found = quality.measure_quality([Signal("x", 200.0, "", row.astype(np.int16)) for row in x])
    one_band = 9 / 398  # of the frequencies from 0.75 to 100 Hz, a quarter of a hertz apart, nine are within 1 Hz
    means = [np.mean([f["line_noise"] for f in found if f["line_frequency"] == mains]) for mains in (50.0, 60.0)]
    assert np.mean(means) == pytest.approx(one_band, rel=0.4)  # the larger of two bands
    assert 0.4 < np.mean([f["line_frequency"] == 50.0 for f in found]) < 0.6


def test_line_noise_of_a_long_recording_is_that_of_eight_stretches_of_four_seconds() -> None:
    n = 200 * 4 * 40 + 117
    hum = (np.arange(n) // 1000 % 3) * np.sin(2 * np.pi * 50 * np.arange(n) / 200)  # comes and goes
    x = (100 * (hum + np.random.default_rng(0).normal(size=n))).astype(np.int16)
    frequency, power = scipy.signal.periodogram([x[i * (n - 800) // 7 :][:800] for i in range(8)], 200, "hann", detrend="constant")
    near, above = np.abs(frequency - 50) <= 1, frequency > 0.5
    assert figures(Signal("x", 200.0, "", x))["line_noise"] == pytest.approx(power[:, near].sum() / power[:, above].sum(), rel=1e-3)


def test_line_noise_is_not_reported_where_it_is_not_measurable() -> None:
    hum = np.round(1000 * np.sin(2 * np.pi * 50 * np.arange(4000) / 1000)).astype(np.int16)
    for channel in (
        Signal("slow", 121.0, "", hum),
        Signal("short", 1000.0, "", hum[:1900]),
        Signal("constant", 250.0, "", np.full(4000, 9, np.int16)),
        Signal("lost", 250.0, "", np.full(4000, np.nan, np.float32)),
    ):
        found = figures(Signal("whole", channel.rate, "", hum), channel)
        assert (found["line_noise"], found["line_frequency"]) == (None, None), channel.channel
    assert figures(Signal("x", 1000.0, "", hum[:2000]))["line_noise"] == pytest.approx(1.0, abs=1e-3)


def test_quality_figures_stand_with_each_channel_of_the_cache(raw: Path, tmp_path: Path) -> None:
    ingest(raw, tmp_path / "out")
    rows = cache.open_cache(tmp_path / "out").signals()
    found = [json.loads(text) for text in rows["qc"]]
    assert {tuple(sorted(row)) for row in found} == {tuple(sorted(quality.FIGURES))}
    assert all(-2048 * 0.5 + 0.1 <= row["min"] < row["median"] < row["max"] <= 2047 * 0.5 + 0.1 for row in found[::2])


def test_start_times_and_header_text_are_stored_only_on_request(raw: Path, tmp_path: Path) -> None:
    ingest(raw, tmp_path / "out")
    assert not any(b"1989" in data for data in tree(tmp_path / "out").values())
    assert {r.start_time for r in cache.open_cache(tmp_path / "out").records()} == {None}
    ingest(raw, tmp_path / "dates", keep_dates=True)
    assert {r.start_time for r in cache.open_cache(tmp_path / "dates").records()} == {"1989-04-24T16:13:00"}


# ---- the report


def test_report_has_every_field_and_no_clock(raw: Path, tmp_path: Path) -> None:
    put(raw, "d1", 3, fault="warn")
    put(raw, "e1", 4, fault="header")
    report = ingest(raw, tmp_path / "out")
    assert set(report) == {
        *(
            "schema",
            "format_version",
            "dataset",
            "source",
            "status",
            "exit_code",
            "published",
            "generation",
            "manifest_sha256",
            "content_sha256",
        ),
        *("units", "units_listed", "counts", "rows", "reasons", "reason_counts", "options", "rules", "tool", "error"),
    }
    assert json.loads((tmp_path / "out" / "ingest_report.json").read_bytes()) == report
    assert (report["status"], report["exit_code"], report["published"], report["generation"]) == ("partial", 3, True, 1)
    assert report["counts"] == {"units_seen": 5, "accepted": 3, "accepted_with_warning": 1, "quarantined": 1}
    assert report["reason_counts"] == {"clipped": 1, "header_bytes": 1}
    assert (report["source"]["files"], report["source"]["sha256sums"]) == (5, "absent")
    bad = report["units"][4]
    assert bad["unit"] == "e1"
    assert (bad["status"], bad["files"], bad["content_sha256"], bad["samples"], bad["channels"]) == (
        "quarantined",
        ["e1.json"],
        None,
        None,
        None,
    )
    assert bad["reasons"] == [
        {
            "code": "header_bytes",
            "level": "error",
            "file": "e1.json",
            "field": "header_bytes",
            "row": None,
            "count": 1,
            "examples": [],
            "message": "e1.json:header_bytes: found 1024, expected 2048.",
            "found": None,
            "expected": None,
        }
    ]
    assert report["units"][0]["samples"] == 400
    assert report["units"][0]["channels"] == 2
    assert [f.line() for f in cache.list_findings(IngestReport(**report))] == [
        "warning[clipped] d1.json: 80 % at the rail.",
        "error[header_bytes] e1.json:header_bytes: found 1024, expected 2048.",
    ]
    manifest = storage.read_manifest(tmp_path / "out")
    assert manifest["report"] == report | {"manifest_sha256": None}
    assert manifest["manifest_sha256"] == report["manifest_sha256"]


def test_source_hash_is_that_of_the_sorted_lines(raw: Path, tmp_path: Path) -> None:
    import hashlib

    put(raw, "sub/a0", 9)
    lines = sorted(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(raw).as_posix()}\n" for p in raw.rglob("*.json"))
    assert ingest(raw, tmp_path / "out")["source"]["sha256"] == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_the_same_input_gives_the_same_bytes_anywhere(raw: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "raw"
    shutil.copytree(raw, moved)
    ingest(raw, tmp_path / "one")
    ingest(moved, tmp_path / "two")
    one, two = tree(tmp_path / "one"), tree(tmp_path / "two")
    of_the_source = {"manifest.json", "ingest_report.json", "results.json"}
    assert {name: data for name, data in one.items() if name not in of_the_source} == {
        name: data for name, data in two.items() if name not in of_the_source
    }
    shutil.rmtree(raw)
    moved.rename(raw)
    ingest(raw, tmp_path / "three")
    assert tree(tmp_path / "three") == one


def test_content_hashes_know_no_names(raw: Path, tmp_path: Path) -> None:
    first = ingest(raw, tmp_path / "one")
    (raw / "a1.json").rename(raw / "z9.json")
    second = ingest(raw, tmp_path / "two")
    assert second["content_sha256"] == first["content_sha256"]
    assert second["manifest_sha256"] != first["manifest_sha256"]
    put(raw, "z9", 5)
    assert ingest(raw, tmp_path / "three")["content_sha256"] != first["content_sha256"]


def test_rows_of_tables_are_accounted_for(raw: Path, tmp_path: Path) -> None:
    put(raw, "t1", 3, fault="table", bad=2)
    (raw / "labels.csv").write_text("")
    report = ingest(raw, tmp_path / "out")
    assert (report["exit_code"], report["status"]) == (3, "partial")
    assert report["counts"]["accepted_with_warning"] == 1
    table, segments = report["rows"]
    assert (table["file"], table["used"], table["dropped_by_reason"]) == ("labels.csv", 4, {"duplicates": 1})
    assert (segments["kind"], segments["seen"], segments["used"], segments["quarantined"], segments["dropped"]) == ("segments", 10, 7, 2, 1)
    assert report["reason_counts"] == {"duplicate_across_splits": 2, "duplicates": 2, "not_numeric": 2}
    assert len(list(cache.open_cache(tmp_path / "out").records())) == 6
    assert refused(raw, tmp_path / "strict", strict=True).code == Reason.NOT_NUMERIC
    put(raw, "t1", 3, fault="table", bad=6)
    error = refused(raw, tmp_path / "more")
    assert (error.exit_code, error.file) == (4, "t1.json")


def test_file_sums_are_compared(raw: Path, tmp_path: Path) -> None:
    sums = raw / "SHA256SUMS.txt"
    lines = [f"{storage.hash_file(raw / f'{name}.json')}  {name}.json\n" for name in ("a1", "b1", "c1")]
    sums.write_text("".join(lines))
    assert ingest(raw, tmp_path / "out")["source"]["sha256sums"] == "verified"
    sums.write_text(f"{'0' * 64}  a1.json\n{lines[1]}{'1' * 64} *gone.json\nnonsense\n")
    report = ingest(raw, tmp_path / "out")
    assert (report["exit_code"], report["source"]["sha256sums"]) == (3, "mismatch")
    assert [u["status"] for u in report["units"]] == ["quarantined", "accepted", "accepted"]
    assert report["units"][0]["reasons"][0]["code"] == "source_checksum"
    levels = {reason["message"].partition(": ")[2]: reason["level"] for reason in report["reasons"]}
    assert levels == {
        "files that are listed and not here: 1.": "warning",
        "files that are here and not listed: 1.": "warning",
        "lines that are no checksums: 1.": "warning",
    }
    report = ingest(raw, tmp_path / "out", verify=False)
    assert (report["exit_code"], report["source"]["sha256sums"], report["options"]["verify"]) == (0, "skipped", False)
    (raw / "labels.csv").write_text("1")  # the data set needs this one
    sums.write_text(f"{'0' * 64}  labels.csv\n")
    error = refused(raw, tmp_path / "out")
    assert (error.code, error.file) == (Reason.SOURCE_CHECKSUM, "labels.csv")


# ---- bad units


@pytest.mark.parametrize(
    ("fault", "code"),
    [("header", "header_bytes"), ("bug", "internal"), ("memory", "resource_limit"), ("io", "io_error"), ("inf", "non_finite")],
)
def test_a_bad_unit_is_left_out_and_named_and_the_others_are_as_without_it(raw: Path, tmp_path: Path, fault: str, code: str) -> None:
    good = ingest(raw, tmp_path / "good")
    put(raw, "b0", 9, fault=fault)
    report = ingest(raw, tmp_path / "out")
    assert report["exit_code"] == 3
    (reason,) = report["units"][1]["reasons"]
    assert reason["code"] == code
    assert "b0.json" in reason["message"]
    assert "Haagse" not in json.dumps(report)
    assert report["content_sha256"] == good["content_sha256"]
    assert [r.recording_id for r in cache.open_cache(tmp_path / "out").records()] == ["a1", "b1", "c1"]
    assert ingest(raw, tmp_path / "out") == report


def test_a_file_that_changes_during_reading_is_refused(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = storage.hash_file

    def meddled(path: Path) -> str:
        found = hashed(path)
        if path.stem == "b1":
            path.write_text(path.read_text() + " ")
        return found

    monkeypatch.setattr(storage, "hash_file", meddled)
    report = ingest(raw, tmp_path / "out")
    assert [[reason["code"] for reason in unit["reasons"]] for unit in report["units"]] == [[], ["io_error"], []]


def test_strict_and_max_bad_refuse_and_leave_the_former_generation(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ingest(raw, out)
    before = {name: data for name, data in tree(out).items() if name not in {"ingest_report.json", "results.json"}}
    put(raw, "a1", fault="header")
    for options in ({"strict": True}, {"max_bad": 0.3}):
        error = refused(raw, out, **options)
        assert (error.exit_code, error.code) == (4, Reason.HEADER_BYTES)
        assert error.report is not None
        assert (error.report["status"], error.report["exit_code"], error.report["published"]) == ("refused", 4, False)
        assert (error.report["generation"], error.report["content_sha256"]) == (None, None)
        assert error.report["error"]["message"] == str(error)
        assert [f.line() for f in error.details] == ["error[header_bytes] a1.json:header_bytes: found 1024, expected 2048."]
        assert json.loads((out / "ingest_report.json").read_bytes()) == error.report
    assert before.items() <= tree(out).items()
    assert ingest(raw, out, max_bad=0.34)["generation"] == 2


def test_nothing_left_is_refused(raw: Path, tmp_path: Path) -> None:
    for name in ("a1", "b1", "c1"):
        put(raw, name, fault="header")
    assert "nothing is left" in str(refused(raw, tmp_path / "out", max_bad=1.0))
    for path in raw.iterdir():
        path.unlink()
    error = refused(raw, tmp_path / "out")
    assert (error.code, error.exit_code) == (Reason.NO_INPUT, 4)
    assert error.report is not None
    assert error.report["reason_counts"] == {"no_input": 1}
    with pytest.raises(UserError) as caught:
        cache.open_cache(tmp_path / "out")
    assert (caught.value.code, caught.value.exit_code) == (Reason.INCOMPLETE, 4)


def test_a_data_set_that_its_reader_refuses(raw: Path, tmp_path: Path) -> None:
    (raw / "refuse").write_text("")
    error = refused(raw, tmp_path / "out")
    assert (error.code, error.exit_code) == (Reason.SCHEMA_MISMATCH, 4)
    assert error.report is not None
    assert [r["code"] for r in error.report["reasons"]] == ["schema_mismatch"]
    assert error.report["source"]["files"] == 4


def test_two_units_with_one_recording_are_refused(raw: Path, tmp_path: Path) -> None:
    put(raw, "sub/a1", 7)
    error = refused(raw, tmp_path / "out")
    assert (error.code, error.exit_code) == (Reason.DUPLICATE_KEY, 4)


def of(function: Callable[..., Any]) -> None:
    """Let `function` be the toy data set."""
    registry.datasets["toy"] = registry.Entry("toy", function, FACTS)


def test_a_unit_that_is_there_twice_is_refused(raw: Path, tmp_path: Path) -> None:
    of(lambda source, options: [*toy(source, options), IngestUnit(name="a1", files=(), read=None)])
    assert refused(raw, tmp_path / "out").code == Reason.DUPLICATE_KEY


def test_a_unit_without_a_reader_and_without_a_reason_is_quarantined(raw: Path, tmp_path: Path) -> None:
    of(lambda source, options: [*toy(source, options), IngestUnit(name="d1", files=("gone.json",), read=None)])
    report = ingest(raw, tmp_path / "out")
    assert report["units"][3]["status"] == "quarantined"
    assert [reason["code"] for reason in report["units"][3]["reasons"]] == ["internal"]
    assert "gone.json" in report["units"][3]["reasons"][0]["message"]


@pytest.mark.parametrize(
    "signals",
    [
        [],
        [Signal("x", 1.0, "", np.zeros(3))],
        [Signal("x", 1.0, "", np.zeros((3, 1), np.int16))],
        [Signal("x", 0.0, "", np.zeros(3, np.int16))],
        [Signal("x", 1.0, "", np.zeros(3, np.int16), float("nan"))],
        [Signal("x", 1.0, "", np.zeros(3, np.int16))] * 2,
    ],
)
def test_what_a_reader_must_never_return_costs_its_unit(raw: Path, tmp_path: Path, signals: list[Signal]) -> None:
    record = Record(recording_id="d1", subject_id="d", signals=signals)
    of(lambda source, options: [*toy(source, options), IngestUnit(name="d1", files=(), read=lambda: record)])
    report = ingest(raw, tmp_path / "out")
    assert report["reason_counts"] == {"internal": 1}
    assert "ValueError in shards.py" in report["units"][3]["reasons"][0]["message"]


def test_files_that_cannot_be_read_are_named(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (raw / "notes.txt").write_text("")
    hashed, number = storage.hash_file, errno.EIO

    def failing(path: Path) -> str:
        if path.name in {"b1.json", "notes.txt"}:
            raise OSError(number, os.strerror(number))
        return hashed(path)

    monkeypatch.setattr(storage, "hash_file", failing)
    report = ingest(raw, tmp_path / "out")
    assert [f.line() for f in cache.list_findings(IngestReport(**report))] == [
        "error[io_error] b1.json: cannot be read (Input/output error).",
        "warning[file_name] notes.txt: belongs to no unit.",
        "warning[io_error] notes.txt: cannot be read (Input/output error).",
    ]
    assert report["source"]["files"] == 2
    number = errno.EMFILE  # not the file's fault
    error = refused(raw, tmp_path / "out")
    assert (error.code, error.exit_code) == (Reason.RESOURCE_LIMIT, Exit.RESOURCES)
    monkeypatch.setattr(storage, "hash_file", hashed)
    assert ingest(raw, tmp_path / "out")["exit_code"] == 0


def test_arguments_of_a_reader_decide_whether_it_runs_again(tmp_path: Path) -> None:
    def key(value: Any, root: Path = tmp_path) -> Any:
        return units.describe_arguments(functools.partial(read_toy, value), root)

    alike = [
        (tmp_path / "a", Path("elsewhere") / "a", Path("elsewhere")),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, tmp_path),
        ({1, 2}, {2, 1}, tmp_path),
        (np.arange(3), np.arange(3), tmp_path),
        (Source(tmp_path, {"a": 1}, {}), Source(tmp_path, {"b": 2}, {}), tmp_path),
        (Annotation(0, 1, "W"), Annotation(0, 1, "W"), tmp_path),
    ]
    for one, other, root in alike:
        assert key(one) == key(other, root)
    values = [
        None,
        1,
        "1",
        1.5,
        [1],
        {"a": 1},
        {"a": 2},
        {1},
        np.arange(3),
        np.arange(4),
        np.arange(3.0),
        Path("a"),
        np.float64(2),
        Reason.GAIN,
    ]
    assert len({storage.encode_json(key(value)) for value in values}) == len(values)
    for hidden in (lambda: tmp_path, object(), functools.partial(lambda: tmp_path)):
        with pytest.raises(TypeError):
            key(hidden)


def test_a_reader_that_hides_its_arguments_runs_every_time(raw: Path, tmp_path: Path) -> None:
    of(lambda source, options: [IngestUnit(name="a1", files=("a1.json",), read=lambda: read_toy(source.path("a1.json"), 0.5))])
    first = ingest(raw, tmp_path / "out")
    assert ingest(raw, tmp_path / "out") == first
    assert READ == ["a1", "a1"]


def test_what_is_odd_and_claimed_by_nobody_is_a_warning(raw: Path, tmp_path: Path) -> None:
    os.mkfifo(raw / "pipe")
    (raw / "notes.txt").write_text("")
    report = ingest(raw, tmp_path / "out")
    assert report["exit_code"] == 0
    assert {r["code"]: r["level"] for r in report["reasons"]} == {"not_regular_file": "warning", "file_name": "warning"}


def test_usage_is_checked_before_anything_is_made(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for options, code in (
        ({"options": {"gian": 1}}, Reason.UNKNOWN_NAME),
        ({"jobs": 0}, Reason.CONFIG),
        ({"max_bad": 1.5}, Reason.CONFIG),
        ({"shard": (3, 2)}, Reason.CONFIG),
    ):
        error = refused(raw, out, **options)
        assert (error.code, error.exit_code) == (code, Exit.USAGE)
    assert "Did you mean gain?" in str(refused(raw, out, options={"gian": 1}))
    for source in (tmp_path / "absent", None):
        with pytest.raises(UserError) as caught:
            cache.ingest("toy", source, out)
        assert caught.value.exit_code == Exit.USAGE
    assert not out.exists()


def test_a_dry_run_writes_nothing(raw: Path, tmp_path: Path) -> None:
    plan = ingest(raw, tmp_path / "out", dry_run=True)
    assert [unit["unit"] for unit in plan["units"]] == ["a1", "b1", "c1"]
    assert plan["bytes"] == sum(p.stat().st_size for p in raw.iterdir())
    assert READ == []
    assert not (tmp_path / "out").exists()


def test_a_cache_inside_of_its_source_is_no_input(raw: Path) -> None:
    first = ingest(raw, raw / "workspace" / "toy")
    assert ingest(raw, raw / "workspace" / "toy") == first
    assert first["source"]["files"] == 3


# ---- the second run


def test_a_second_run_changes_nothing_and_reads_nothing(raw: Path, tmp_path: Path) -> None:
    put(raw, "d1", 3, fault="header")
    first = ingest(raw, tmp_path / "out")
    before = tree(tmp_path / "out")
    READ.clear()
    assert ingest(raw, tmp_path / "out") == first
    assert READ == []
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize("change", ["mended", "edited", "added", "removed", "renamed"])
def test_only_what_has_changed_is_read_again_and_the_result_is_that_of_a_clean_run(raw: Path, tmp_path: Path, change: str) -> None:
    put(raw, "b0", 5, fault="header" if change == "mended" else None)
    ingest(raw, tmp_path / "out")
    READ.clear()
    if change in {"mended", "edited"}:
        path = put(raw, "b0", 5 if change == "mended" else 6)
        os.utime(path, ns=(0, 0))
    elif change == "added":
        put(raw, "d1", 7)
    else:
        (raw / "b0.json").unlink()
        if change == "renamed":
            put(raw, "e1", 5)
    report = ingest(raw, tmp_path / "out")
    assert {"mended": ["b0"], "edited": ["b0"], "added": ["d1"], "removed": [], "renamed": ["e1"]}[change] == READ
    assert report["generation"] == 2
    ingest(raw, tmp_path / "clean")
    assert content(tmp_path / "out") == content(tmp_path / "clean")
    assert cache.verify(tmp_path / "out", deep=True) == []


def test_a_change_that_keeps_size_and_time_is_seen(raw: Path, tmp_path: Path) -> None:
    ingest(raw, tmp_path / "out")
    path = raw / "b1.json"
    before = path.stat()
    path.write_text(path.read_text().replace("1", "7"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert ingest(raw, tmp_path / "out")["generation"] == 2


def test_order_of_arrival_does_not_matter(raw: Path, tmp_path: Path) -> None:
    both = ingest(raw, tmp_path / "both")
    for names in (["a1"], ["b1", "c1"]):
        part = tmp_path / "-".join(names)
        for name in names:
            part.mkdir(exist_ok=True)
            shutil.copy(raw / f"{name}.json", part)
        ingest(part, tmp_path / "out" / names[0])
        shutil.copytree(raw, part, dirs_exist_ok=True)
        assert ingest(part, tmp_path / "out" / names[0])["content_sha256"] == both["content_sha256"]
        assert content(tmp_path / "out" / names[0]) == content(tmp_path / "both")


def test_passing_faults_are_tried_again(raw: Path, tmp_path: Path) -> None:
    put(raw, "d1", fault="memory")
    ingest(raw, tmp_path / "out")
    READ.clear()
    assert ingest(raw, tmp_path / "out")["generation"] == 1
    assert READ == ["d1"]


def test_other_options_are_refused_with_what_differs_unless_all_is_new(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ingest(raw, out)
    before = tree(out)
    error = refused(raw, out, options={"gain": 2.0}, keep_dates=True)
    assert (error.code, error.exit_code) == (Reason.SETTINGS_DIFFER, Exit.USAGE)
    assert sorted(f.field or "" for f in (error.finding, *error.details)) == ["gain", "keep_dates"]
    assert tree(out) == before
    READ.clear()
    assert ingest(raw, out, options={"gain": 2.0}, force_new=True)["generation"] == 2
    assert len(READ) == 3
    assert {s.scale for r in cache.open_cache(out).records(["EEG"]) for s in r.signals} == {2.0}


def test_a_stopped_ingest_goes_on_and_only_under_its_own_options(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "LARGE_UNIT", 1)
    out = tmp_path / "out"
    ingest(raw, out)
    for force_new in (False, True):
        options = {"options": {"gain": 2.0}} if force_new else {}
        put(raw, "b1", 5, fault="stop")
        if not force_new:
            put(raw, "a1", 6)
        READ.clear()
        with pytest.raises(KeyboardInterrupt):
            ingest(raw, out, force_new=force_new, **options)
        put(raw, "b1", 5)
        assert refused(raw, out, options={"gain": 3.0}).code == Reason.SETTINGS_DIFFER
        ingest(raw, out, force_new=force_new, **options)
        assert (["a1", "b1", "b1", "c1"] if force_new else ["a1", "b1", "b1"]) == READ
        ingest(raw, tmp_path / f"clean{force_new}", **options)
        assert content(out) == content(tmp_path / f"clean{force_new}")


def test_an_ingest_that_was_never_published_keeps_its_options_too(raw: Path, tmp_path: Path) -> None:
    put(raw, "c1", fault="stop")
    with pytest.raises(KeyboardInterrupt):
        ingest(raw, tmp_path / "out")
    error = refused(raw, tmp_path / "out", options={"gain": 2.0})
    assert (error.code, error.field) == (Reason.SETTINGS_DIFFER, "gain")


def test_a_note_that_was_changed_is_passed_over(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "LARGE_UNIT", 1)
    put(raw, "c1", fault="stop")
    with pytest.raises(KeyboardInterrupt):
        ingest(raw, tmp_path / "out")
    put(raw, "c1", 2)
    changed = 0
    for path in (tmp_path / "out" / ".progress").glob("*.json"):
        text = path.read_text()
        path.write_text(text.replace('"channels":2', '"channels":9'))
        changed += path.read_text() != text
    assert changed == 2
    assert [u["channels"] for u in ingest(raw, tmp_path / "out")["units"]] == [2, 2, 2]


def test_old_generations_and_notes_go(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    named = []
    for i in range(4):
        put(raw, "b1", 50 + i)
        ingest(raw, out)
        named.append(set(storage.read_manifest(out)["files"]))
        assert list((out / ".progress").glob("*.json")) == []
    kept = {name for name in tree(out) if shards.NAMES.fullmatch(name)}
    assert kept == named[-1] | named[-2]
    assert [path.name for path in out.glob("manifest-*")] == ["manifest-3.json"]


def test_the_share_that_may_be_bad_is_inclusive(raw: Path, tmp_path: Path) -> None:
    put(raw, "d1", fault="header")
    assert ingest(raw, tmp_path / "out", max_bad=0.25)["exit_code"] == 3


def test_content_hash_does_not_depend_on_the_order_of_channels() -> None:
    signals = [Signal(name, 1.0, "", np.full(3, i, np.int16)) for i, name in enumerate("xy")]
    one, other = (Record(recording_id="r", subject_id="s", signals=order) for order in (signals, signals[::-1]))
    assert shards.hash_content([one]) == shards.hash_content([other])
    assert shards.hash_content([one, one]) != shards.hash_content([one])


def test_a_flipped_bit_is_noticed_by_the_pages_too(tmp_path: Path) -> None:
    """Without the comparison of hashes: noise is stored as it is, so nothing but the checksum of the page can tell."""
    noise = np.random.default_rng(0).integers(-(2**15), 2**15, 20_000).astype(np.int16)
    names, _ = shards.write_shard(tmp_path, [Record(recording_id="r", subject_id="s", signals=[Signal("x", 1.0, "", noise)])], "toy")
    path = tmp_path / str(names.recordings)
    original = path.read_bytes()
    here = original.index(noise.tobytes()[1000:1032])
    for i in range(20):
        data = bytearray(original)
        data[here + 100 * i] ^= 1 << (i % 8)
        path.write_bytes(data)
        with pytest.raises(OSError, match="CRC"):
            list(shards.read_shard(tmp_path, names, {"r": {}}))


def test_out_of_memory_outside_of_a_reader_is_reported(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(shards, "write_shard", full)
    error = refused(raw, tmp_path / "out")
    assert (error.code, error.exit_code) == (Reason.RESOURCE_LIMIT, Exit.RESOURCES)
    assert error.report is not None
    assert error.report["status"] == "failed"
    assert error.report["reasons"] == []
    assert error.report["error"]["code"] == "resource_limit"


def test_a_damaged_shard_is_made_again_by_the_next_ingest(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = ingest(raw, out)
    (shard,) = out.glob("recordings-*")
    good = shard.read_bytes()
    shard.write_bytes(good[:-1])
    assert ingest(raw, out) == first
    assert shard.read_bytes() == good
    (out / "manifest.json").write_bytes(b"{}")
    assert refused(raw, out).exit_code == Exit.INTEGRITY
    assert ingest(raw, out, force_new=True)["content_sha256"] == first["content_sha256"]


def test_units_are_grouped_so_that_a_change_stays_where_it_is() -> None:
    names = [f"r{i:05d}" for i in range(6000)]
    made = [IngestUnit(name=name, files=(name,), read=None) for name in names]
    sizes = dict.fromkeys(names, 1000)
    groups = [[unit.name for unit in group] for group in units.group_units(made, sizes)]
    assert [name for group in groups for name in group] == names
    assert max(map(len, groups)) <= 4 * units.MEAN_UNITS
    assert 4 <= len(groups) <= 40
    fewer = [[unit.name for unit in group] for group in units.group_units(made[:2500] + made[2501:], sizes)]
    assert len([group for group in fewer if group not in groups]) <= 2
    big = units.group_units(made[:3], {"r00000": 5, "r00001": units.LARGE_UNIT, "r00002": 5})
    assert [len(group) for group in big] == [1, 1, 1]


# ---- processes


def test_the_number_of_processes_changes_no_byte(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "LARGE_UNIT", 1)  # a shard a unit
    put(raw, "d1", 3, fault="header")
    ingest(raw, tmp_path / "one")
    seen: list[tuple[str, int, int | None]] = []
    ingest(raw, tmp_path / "two", jobs=2, progress=lambda *event: seen.append(event))
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    assert seen[-1] == ("ingest toy", 4, 4)


def test_a_reader_that_kills_its_process_costs_its_unit_alone(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "LARGE_UNIT", 1)
    put(raw, "b0", 4, fault="kill")
    put(raw, "c0", 5, fault="kill once", mark=str(tmp_path / "mark"))  # killed from outside: tried again
    report = ingest(raw, tmp_path / "out", jobs=2)
    assert {u["unit"]: u["status"] for u in report["units"]} == {**dict.fromkeys(("a1", "b1", "c0", "c1"), "accepted"), "b0": "quarantined"}
    assert report["reason_counts"] == {"reader_crash": 1}


def test_parts_make_the_same_cache(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "LARGE_UNIT", 1)
    for i in range(5):
        put(raw, f"x{i}", i)
    expected = clean(raw, tmp_path)
    out = tmp_path / "out"
    parts = [ingest(raw, out, shard=(k, 3)) for k in (1, 2, 3)]
    assert [part["schema"] for part in parts] == ["bitimely.ingest_part/1"] * 2 + ["bitimely.ingest_report/1"]
    assert [part["parts_missing"] for part in parts[:2]] == [2, 1]
    assert sum(part["counts"]["units_seen"] for part in parts[:2]) < 8
    assert tree(out) == expected
    before = parts[2]
    put(raw, "x3", 30)
    parts = [ingest(raw, out, shard=(k, 3)) for k in (1, 2, 3)]
    assert parts[2]["generation"] == before["generation"] + 1


def test_parts_side_by_side_publish_once(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "LARGE_UNIT", 1)
    expected = clean(raw, tmp_path)
    out = tmp_path / "out"
    threads = [threading.Thread(target=ingest, args=(raw, out), kwargs={"shard": (k, 2)}) for k in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tree(out) == expected


def test_a_cache_in_use_is_left_alone(raw: Path, tmp_path: Path) -> None:
    with storage.lock(tmp_path / "out"):
        error = refused(raw, tmp_path / "out")
        assert (error.code, error.exit_code) == (Reason.LOCKED, Exit.LOCKED)
        assert str(os.getpid()) in str(error)
    assert tree(tmp_path / "out") == {}


def test_readers_see_one_generation_while_the_next_is_published(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    hashes = {ingest(raw, out)["content_sha256"]}
    stop, errors, passes = threading.Event(), [], []

    def look() -> None:
        while not stop.is_set():
            try:
                opened = cache.open_cache(out)
                found = shards.hash_lines(shards.hash_lines([shards.hash_record(record)]) for record in opened.records())
                assert found == opened.manifest.content_sha256
                passes.append(found)
                assert not [f for f in cache.verify(out) if f.level == "error"]
            except BaseException as error:
                errors.append(error)
                return

    readers = [threading.Thread(target=look) for _ in range(3)]
    for reader in readers:
        reader.start()
    for i in range(8):
        put(raw, "b1", 100 + i)
        hashes.add(ingest(raw, out)["content_sha256"])
        time.sleep(0.1)
    stop.set()
    for reader in readers:
        reader.join()
    assert errors == []
    assert set(passes) <= hashes


# ---- faults, kills, full disks


class Faults:
    """Makes the n-th call of the operating system in `storage` fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n = self.number = self.seen = 0
        for name in CALLS:
            monkeypatch.setattr(storage, name, functools.partial(self.call, getattr(storage, name)))

    def call(self, real: Callable[..., Any], *arguments: Any) -> Any:
        self.seen += 1
        if self.seen == self.n:
            raise OSError(self.number, os.strerror(self.number))
        return real(*arguments)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EINTR])
def test_any_failing_call_leaves_one_generation_or_the_other_and_the_rerun_is_clean(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    out = tmp_path / "out"
    ingest(raw, out)
    former = tmp_path / "former"
    shutil.copytree(out, former)
    first = storage.read_manifest(out)
    put(raw, "b1", 77)
    ingest(raw, out)
    second, wanted = storage.read_manifest(out), tree(out)
    faults = Faults(monkeypatch)
    passed = False
    for n in range(1, 400):
        shutil.rmtree(out)
        shutil.copytree(former, out)
        faults.n, faults.number, faults.seen = n, number, 0
        try:
            report = ingest(raw, out)
        except UserError as error:
            report = {"exit_code": error.exit_code}
        passed = faults.seen < n
        faults.n = 0
        assert report["exit_code"] in ({0} if passed else {0, 3, 6})  # 3: a file of the source could not be read
        now = storage.read_manifest(out)
        assert storage.find_damage(out, now) == []
        assert now in (first, second) or now["generation"] == 2
        ingest(raw, out)
        if now in (first, second):
            assert tree(out) == wanted, n
        else:  # partial: mended in a generation of its own
            assert content(out) == {name: wanted[name] for name in second["files"]}
        if passed:
            break
    assert passed
    assert n > 60


def start(raw: Path, out: Path, *, jobs: int = 1, big: int = units.LARGE_UNIT, **limits: int) -> subprocess.Popen[str]:
    """`ingest` of the toy data in a process group of its own; exits with the code of the report."""
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import test_cache; test_cache.main()",
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
    jobs, units.LARGE_UNIT = options.pop("jobs"), options.pop("big")
    for name, value in options.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    registry.datasets["toy"] = registry.Entry("toy", toy, FACTS)
    try:
        report = cache.ingest("toy", raw, out, jobs=jobs, progress=lambda what, done, total: show(done))
    except UserError as error:
        show(error)
        sys.exit(error.exit_code)
    sys.exit(report["exit_code"])


def test_a_kill_anywhere_is_followed_by_the_same_cache(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "LARGE_UNIT", 1)
    for name in ("a1", "b1", "c1"):
        put(raw, name, 1, sleep=0.05)
    wanted = clean(raw, tmp_path)
    chance = random.Random(0)
    for n in range(4):
        out = tmp_path / f"out{n}"
        process = start(raw, out, big=1)
        assert process.stdout is not None
        for _ in range(n):
            process.stdout.readline()
        time.sleep(chance.uniform(0, 0.06))
        process.kill()
        process.wait()
        process.stdout.close()
        if (out / "manifest.json").exists():
            assert tree(out).items() >= {name: wanted[name] for name in storage.read_manifest(out)["files"]}.items()
        elif out.exists():
            assert [f.code for f in cache.verify(out)] == [Reason.INCOMPLETE]
            with pytest.raises(UserError, match="finished parts are kept"):
                cache.open_cache(out)
        done = len(list((out / ".progress").glob("*.json"))) - 1 if (out / ".progress").exists() else 0
        READ.clear()
        ingest(raw, out)
        assert len(READ) <= 3 - max(done, 0)
        assert tree(out) == wanted


def test_two_at_once_make_what_one_makes(raw: Path, tmp_path: Path) -> None:
    wanted = clean(raw, tmp_path)
    both = [start(raw, tmp_path / "out") for _ in range(2)]
    for process in both:
        process.communicate(timeout=60)
    assert sorted(process.returncode for process in both) in ([0, 0], [0, Exit.LOCKED])
    assert tree(tmp_path / "out") == wanted


@pytest.mark.parametrize(("number", "code", "jobs"), [(signal.SIGTERM, 143, 1), (signal.SIGINT, 130, 2)])
def test_a_signal_stops_soon_and_the_rerun_goes_on(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int, jobs: int
) -> None:
    monkeypatch.setattr(units, "LARGE_UNIT", 1)
    for name in ("a1", "b1", "c1", "d1", "e1"):
        put(raw, name, 1, sleep=0.3)
    out = tmp_path / "out"
    process = start(raw, out, jobs=jobs, big=1)
    assert process.stdout is not None
    assert "2" in (line.strip() for line in iter(process.stdout.readline, ""))  # reads until the third unit is taken up
    os.killpg(process.pid, number)
    text, _ = process.communicate(timeout=10)
    assert process.returncode == code
    assert "goes on where it stopped" in text
    assert "Traceback" not in text
    report = json.loads((out / "ingest_report.json").read_bytes())
    assert (report["status"], report["exit_code"], report["error"]["code"]) == ("interrupted", code, "interrupted")
    assert 1 <= report["counts"]["units_seen"] < 5
    assert not list(out.glob("*tmp*"))
    wanted = clean(raw, tmp_path)
    READ.clear()
    ingest(raw, out)
    assert len(READ) < 5
    assert tree(out) == wanted


def test_a_file_size_limit_is_a_full_disk(raw: Path, tmp_path: Path) -> None:
    put(raw, "d1", 5, n=400_000)
    process = start(raw, tmp_path / "out", FSIZE=100_000)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == Exit.RESOURCES
    assert "file size limit" in text
    assert not list((tmp_path / "out").glob("*tmp*"))
    assert not list((tmp_path / "out").glob("*.parquet"))
    assert json.loads((tmp_path / "out" / "ingest_report.json").read_bytes())["status"] == "failed"
    wanted = clean(raw, tmp_path)
    ingest(raw, tmp_path / "out")
    assert tree(tmp_path / "out") == wanted


def test_missing_disk_space_is_reported_before_writing(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))  # type: ignore[attr-defined]
    error = refused(raw, tmp_path / "out")
    assert (error.code, error.exit_code) == (Reason.DISK_FULL, Exit.RESOURCES)
    assert "have 1 bytes" in str(error)


def test_many_small_units_need_few_descriptors(tmp_path: Path) -> None:
    for i in range(600):
        put(tmp_path / "raw", f"u{i:04d}", i, n=100)
    process = start(tmp_path / "raw", tmp_path / "out", NOFILE=40)
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert len(list((tmp_path / "out").glob("recordings-*"))) <= 8
    assert len(list(cache.open_cache(tmp_path / "out").records())) == 600


def test_everything_is_for_its_owner_alone_whatever_the_umask(raw: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        ingest(raw, tmp_path / "workspace" / "toy")
    finally:
        os.umask(before)
    for path in [tmp_path / "workspace", *(tmp_path / "workspace").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


# ---- damage


def swap(path: Path, rng: random.Random) -> None:
    others = [p for p in path.parent.iterdir() if p.name.split("-")[0] == path.name.split("-")[0] and p != path]
    other = rng.choice(others) if others else path.parent / "subjects.parquet"
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two if two != one else b"")
    other.write_bytes(one)


@pytest.mark.parametrize("harm", [flip, zero4k, truncate, append, delete, swap])
def test_damage_is_noticed_before_the_first_use(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Damage) -> None:
    monkeypatch.setattr(units, "LARGE_UNIT", 1)
    out = tmp_path / "out"
    ingest(raw, out)
    original = tree(out)
    rng = random.Random(0)
    for name in [*storage.read_manifest(out)["files"], "manifest.json"] * 2:
        if harm is swap and name == "manifest.json":
            continue
        harm(out / name, rng)
        with pytest.raises(UserError) as caught:
            cache.open_cache(out)
        missing = harm is delete and name == "manifest.json"
        assert caught.value.exit_code == (Exit.REFUSED if missing else Exit.INTEGRITY)
        findings = [caught.value.finding, *caught.value.details]
        assert missing or name in [Path(str(f.file)).name for f in findings]
        found = cache.verify(out)
        assert [f.code for f in found if f.level == "error"][:1] == [Reason.INCOMPLETE if missing else Reason.INTEGRITY]
        for old, data in original.items():
            (out / old).write_bytes(data)
    assert cache.verify(out, deep=True) == []


def test_foreign_files_are_reported_and_not_read(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ingest(raw, out)
    (shard,) = out.glob("recordings-*")
    shutil.copy(shard, out / "recordings-copy.parquet")
    shutil.copy(shard, out / "recordings-0123456789abcdef.parquet")
    assert [(f.code, f.level, Path(str(f.file)).name) for f in cache.verify(out)] == [
        (Reason.FILE_NAME, "warning", "recordings-0123456789abcdef.parquet"),
        (Reason.FILE_NAME, "warning", "recordings-copy.parquet"),
    ]
    assert len(list(cache.open_cache(out).records())) == 3


def test_a_verification_that_is_deep_decodes_the_content(raw: Path, tmp_path: Path) -> None:
    """Shards and manifest that agree with each other but not with the hashes of the content."""
    out = tmp_path / "out"
    ingest(raw, out)
    body = storage.read_manifest(out)
    records = list(cache.open_cache(out).records())
    records[0].signals[0] = records[0].signals[0]._replace(samples=records[0].signals[0].samples[::-1].copy())
    names, files = shards.write_shard(out, records, "toy")
    body["files"] |= {name: file.model_dump() for name, file in files.items()}
    body["shards"] = [list(names)]
    body = {key: value for key, value in body.items() if key != "manifest_sha256"}
    storage.write_json(out / "manifest.json", body | {"manifest_sha256": storage.fingerprint(body)})
    assert not [f for f in cache.verify(out) if f.level == "error"]
    assert ["the content of the unit a1" in f.message for f in cache.verify(out, deep=True) if f.level == "error"] == [True]


def test_times_alone_are_no_damage_and_reading_writes_nothing(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ingest(raw, out)
    for path in out.rglob("*"):
        os.utime(path, (0, 2**31))
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(out.rglob("*"))}
    out.chmod(0o500)
    assert cache.verify(out, deep=True) == []
    assert len(list(cache.open_cache(out).records())) == 3
    out.chmod(0o700)
    assert before == {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(out.rglob("*"))}


def test_a_shard_that_goes_while_it_is_read_is_named(raw: Path, tmp_path: Path) -> None:
    ingest(raw, tmp_path / "out")
    opened = cache.open_cache(tmp_path / "out")
    (shard,) = (tmp_path / "out").glob("recordings-*")
    data = shard.read_bytes()
    for harm in (shard.unlink, lambda: shard.write_bytes(data[:500] + b"\x00" * 100 + data[600:])):
        harm()
        with pytest.raises(UserError, match=shard.name) as caught:
            list(opened.records())
        assert caught.value.exit_code == Exit.INTEGRITY


def test_folders_that_are_no_cache_have_distinct_errors(tmp_path: Path) -> None:
    storage.publish(tmp_path, {"schema": "bitimely.tokens/1"}, {}, 1)
    with pytest.raises(UserError) as caught:
        cache.open_cache(tmp_path)
    assert (caught.value.code, caught.value.exit_code) == (Reason.UNSUPPORTED_FORMAT, Exit.REFUSED)
    storage.publish(tmp_path, {"schema": "bitimely.cache/9", "format_version": 9, "kind": "recordings"}, {}, 2)
    assert [f.code for f in cache.verify(tmp_path)] == [Reason.UNSUPPORTED_FORMAT]


# ---- the real thing


def test_real_sleep_edf(tmp_path: Path) -> None:
    source = require_sample(SAMPLES / "sleep-edf")
    report = cache.ingest("sleep-edf", source, tmp_path / "out")
    assert report["exit_code"] == 0
    assert report["source"]["sha256sums"] == "verified"
    assert [(u["unit"], u["samples"], u["channels"]) for u in report["units"]] == [("SC4001", 30_000, 7)]
    (record,) = cache.open_cache(tmp_path / "out").records(["EEG Fpz-Cz"])
    pyedflib = pytest.importorskip("pyedflib")
    with pyedflib.EdfReader(str(source / "sleep-cassette" / "SC4001E0-PSG.edf")) as reader:
        wanted = reader.readSignal(reader.getSignalLabels().index("EEG Fpz-Cz"))
    signal_ = record.signals[0]
    np.testing.assert_allclose(signal_.samples * signal_.scale + signal_.offset, wanted, rtol=0, atol=1e-9)
