"""The cache of a data set: what is read comes back bit for bit, and the report says what was
read.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import scipy.signal
from samples import SAMPLES, require_sample
from toys import HERE, clean, content, ingest, put, read_toy, refused, same, tree

from bitimely_core import cache, workflows
from bitimely_core.cache import quality, shards
from bitimely_core.errors import Exit, Reason
from bitimely_core.schemas.ingest_records import IngestReport
from bitimely_core.store import locks, manifests, storage
from bitimely_core.types import Record, Signal

pytestmark = pytest.mark.usefixtures("toys")


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
    assert opened.subjects().rows() == [
        (f"{x}1", f"{x}1", 40 + i, None) for i, x in enumerate("abc")
    ]
    assert opened.signals()["n_samples"].to_list() == [400, 5] * 3
    assert opened.annotations().rows()[:2] == [("a1", 0.0, 2.0, "W"), ("a1", 2.0, 2.0, "N1")]


def test_parts_are_read_side_by_side_but_not_beside_a_publication(
    raw: Path, tmp_path: Path
) -> None:
    out = storage.make_folder(tmp_path / "out")
    with locks.lock_folder(out, shared=True):  # as the other part holds it
        assert cache.ingest("toy", raw, out, shard=(1, 2))["parts_missing"] == 1
    with locks.lock_folder(out):
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
    assert content(tmp_path / "out") == {
        name: wanted[name] for name in manifests.read_manifest(tmp_path / "out")["files"]
    }


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
            signals=[
                Signal("x", 0.1, "", np.array([-32768, 32767], np.int16), 0.1, 1e-9, onset)
                for onset in (0.0, 300.5)
            ],
        ),
        Record(
            recording_id="nan",
            subject_id="2",
            signals=[
                Signal("y", 250.0, "mV", nan),
                Signal("empty", 1.0, "", np.zeros(0, np.int16)),
            ],
        ),
    ]
    wanted = [shards.validate_record(record, keep_dates=False) for record in records]
    names, files = shards.write_shard(tmp_path, wanted, "toy")
    assert names.annotations is None
    assert [facts.rows for facts in files.values()] == [4]
    found = list(
        shards.read_shard(tmp_path, names, {record.recording_id: {} for record in records})
    )
    assert all(same(a, b) for a, b in zip(found, wanted, strict=True))


def test_long_recordings_get_a_row_group_a_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "ROW_GROUP", 1000)
    long = [Signal(f"c{i}", 100.0, "", np.full(600, i, np.int16)) for i in range(3)]
    record = Record(
        recording_id="r",
        subject_id="s",
        signals=[*long, Signal("slow", 1.0, "", np.zeros(6, np.int16))],
    )
    names, _ = shards.write_shard(tmp_path, [record], "toy")
    assert names.recordings is not None
    assert pq.ParquetFile(tmp_path / names.recordings).num_row_groups == 4
    (found,) = shards.read_shard(tmp_path, names, {"r": {}})
    assert same(found, record)


def test_shards_follow_the_recommended_form(raw: Path, tmp_path: Path) -> None:
    ingest(raw, tmp_path / "out")
    (name,) = (n for n in tree(tmp_path / "out") if n.startswith("recordings-"))
    file = pq.ParquetFile(tmp_path / "out" / name)
    columns = {
        file.schema_arrow.names[i]: file.metadata.row_group(0).column(i)
        for i in range(file.metadata.num_columns)
    }
    assert str(file.schema_arrow.field("samples").type) == "large_binary"
    assert "RLE_DICTIONARY" not in columns["samples"].encodings
    assert columns["samples"].statistics is None
    assert {c.compression for c in columns.values()} == {"ZSTD"}
    assert json.loads(file.schema_arrow.metadata[b"bitimely"])["channels"] == [
        ["EEG", 100.0],
        ["temperature", 1.0],
    ]


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
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], cwd=HERE.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_quality_figures_against_a_plain_count() -> None:
    x = np.concatenate([np.arange(1000) % 97 - 48, np.full(300, 7), np.full(50, -48)]).astype(
        np.int16
    )
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
    # long enough to be counted, not sorted
    long = np.random.default_rng(0).normal(0, 3000, 70_001).clip(-32768, 32767).astype(np.int16)
    found = figures(Signal("x", 100.0, "uV", long, -0.5, 1.0))
    assert found["median"] == pytest.approx(1 - 0.5 * np.median(long), rel=1e-5)
    assert found["iqr"] == pytest.approx(
        0.5 * np.subtract(*np.percentile(long, [75, 25])), rel=1e-5
    )
    rest = np.arange(1017, dtype=np.int16)
    # a full second, and the shorter one at the end with some of the second before
    rest[300:400] = rest[950:1017] = 7
    rest[[500, 550]] = 9  # equal where one looks first, moving between
    found = figures(Signal("x", 100.0, "", rest))
    assert (found["flat"], found["flat_longest"]) == (pytest.approx(117 / 1017, rel=1e-5), 1.0)
    constant = figures(Signal("z", 100.0, "", np.zeros(1000, np.int16), rails=(-(2**31), 2**31)))
    assert (constant["flat"], constant["flat_longest"], constant["clipped"]) == (1.0, 10.0, 0.0)


def test_channels_that_are_looked_at_together_get_the_figures_of_each_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    signals = []
    for i in range(60):
        n, rate = rng.choice([0, 1, 17, 700, 1000]), rng.choice([1.0, 100.0, 250.0])
        x = rng.normal(size=n).cumsum() * 20
        x[: n // 3] = 5
        kept = (
            np.where(rng.random(n) < (i % 4) / 3, np.nan, x).astype(np.float32)
            if i % 3 == 0
            else x.astype(np.int16)
        )
        signals.append(
            Signal(
                f"c{i}",
                rate,
                "",
                kept,
                -0.5 * (i % 2) or 0.1,
                i % 5,
                rails=(-100.2, 100) if i % 4 == 0 else None,
            )
        )
    monkeypatch.setattr(quality, "GROUP_SAMPLES", 3000)  # several chunks
    assert quality.measure_quality(signals) == [figures(signal) for signal in signals]


@pytest.mark.parametrize("mains", [50.0, 60.0])
def test_line_noise_is_the_share_of_the_power_near_the_mains(mains: float) -> None:
    """Sines of amplitudes 3 (mains, also 0.5 Hz beside it) and 4: powers 4.5 and 8, hence 4.5 /
    12.5 = 0.36, whatever the drift.
    """
    t = np.arange(int(250 * 61.3)) / 250
    drift = 500 + 300 * t / t[-1] + 50 * np.sin(2 * np.pi * 0.02 * t)
    for f in (mains, mains - 0.5):
        x = (4 * np.sin(2 * np.pi * 10 * t) + 3 * np.cos(2 * np.pi * f * t) + drift).astype(
            np.float32
        )
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
    # of the frequencies from 0.75 to 100 Hz, a quarter of a hertz apart, nine are within 1 Hz
    one_band = 9 / 398
    means = [
        np.mean([f["line_noise"] for f in found if f["line_frequency"] == mains])
        for mains in (50.0, 60.0)
    ]
    assert np.mean(means) == pytest.approx(one_band, rel=0.4)  # the larger of two bands
    assert 0.4 < np.mean([f["line_frequency"] == 50.0 for f in found]) < 0.6


def test_line_noise_of_a_long_recording_is_that_of_eight_stretches_of_four_seconds() -> None:
    n = 200 * 4 * 40 + 117
    hum = (np.arange(n) // 1000 % 3) * np.sin(2 * np.pi * 50 * np.arange(n) / 200)  # comes and goes
    x = (100 * (hum + np.random.default_rng(0).normal(size=n))).astype(np.int16)
    frequency, power = scipy.signal.periodogram(
        [x[i * (n - 800) // 7 :][:800] for i in range(8)], 200, "hann", detrend="constant"
    )
    near, above = np.abs(frequency - 50) <= 1, frequency > 0.5
    assert figures(Signal("x", 200.0, "", x))["line_noise"] == pytest.approx(
        power[:, near].sum() / power[:, above].sum(), rel=1e-3
    )


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
    assert figures(Signal("x", 1000.0, "", hum[:2000]))["line_noise"] == pytest.approx(
        1.0, abs=1e-3
    )


def test_quality_figures_stand_with_each_channel_of_the_cache(raw: Path, tmp_path: Path) -> None:
    ingest(raw, tmp_path / "out")
    rows = cache.open_cache(tmp_path / "out").signals()
    found = [json.loads(text) for text in rows["qc"]]
    assert {tuple(sorted(row)) for row in found} == {tuple(sorted(quality.FIGURES))}
    assert all(
        -2048 * 0.5 + 0.1 <= row["min"] < row["median"] < row["max"] <= 2047 * 0.5 + 0.1
        for row in found[::2]
    )


def test_start_times_and_header_text_are_stored_only_on_request(raw: Path, tmp_path: Path) -> None:
    ingest(raw, tmp_path / "out")
    assert not any(b"1989" in data for data in tree(tmp_path / "out").values())
    assert {r.start_time for r in cache.open_cache(tmp_path / "out").records()} == {None}
    ingest(raw, tmp_path / "dates", keep_dates=True)
    assert {r.start_time for r in cache.open_cache(tmp_path / "dates").records()} == {
        "1989-04-24T16:13:00"
    }


# ---- the report


def test_report_has_every_field_and_no_clock(raw: Path, tmp_path: Path) -> None:
    put(raw, "d1", 3, fault="warn")
    put(raw, "e1", 4, fault="header")
    report = ingest(raw, tmp_path / "out")
    keys = (
        "schema format_version dataset source status exit_code published generation "
        "manifest_sha256 content_sha256 units units_listed counts rows reasons reason_counts "
        "options rules tool error use tokens"
    )
    assert set(report) == set(keys.split())
    assert json.loads((tmp_path / "out" / "ingest_report.json").read_bytes()) == report
    assert (report["status"], report["exit_code"], report["published"], report["generation"]) == (
        "partial",
        3,
        True,
        1,
    )
    assert report["counts"] == {
        "units_seen": 5,
        "accepted": 3,
        "accepted_with_warning": 1,
        "quarantined": 1,
    }
    assert report["reason_counts"] == {"clipped": 1, "header_bytes": 1}
    assert (report["source"]["files"], report["source"]["sha256sums"]) == (5, "absent")
    bad = report["units"][4]
    assert bad["unit"] == "e1"
    assert (
        bad["status"],
        bad["files"],
        bad["content_sha256"],
        bad["samples"],
        bad["channels"],
    ) == ("quarantined", ["e1.json"], None, None, None)
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
    manifest = manifests.read_manifest(tmp_path / "out")
    listed = [unit for unit in report["units"] if unit["status"] != "accepted"]
    assert manifest["report"] == report | {
        "manifest_sha256": None,
        "units": listed,
        "units_listed": "not_accepted",
    }
    assert manifest["manifest_sha256"] == report["manifest_sha256"]


def test_source_hash_is_that_of_the_sorted_lines(raw: Path, tmp_path: Path) -> None:
    import hashlib

    put(raw, "sub/a0", 9)
    lines = sorted(
        f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(raw).as_posix()}\n"
        for p in raw.rglob("*.json")
    )
    assert (
        ingest(raw, tmp_path / "out")["source"]["sha256"]
        == hashlib.sha256("".join(lines).encode()).hexdigest()
    )


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
    assert (table["file"], table["used"], table["dropped_by_reason"]) == (
        "labels.csv",
        4,
        {"duplicates": 1},
    )
    assert (
        segments["kind"],
        segments["seen"],
        segments["used"],
        segments["quarantined"],
        segments["dropped"],
    ) == ("segments", 10, 7, 2, 1)
    assert report["reason_counts"] == {
        "duplicate_across_splits": 2,
        "duplicates": 2,
        "not_numeric": 2,
    }
    assert len(list(cache.open_cache(tmp_path / "out").records())) == 6
    assert refused(raw, tmp_path / "strict", strict=True).code == Reason.NOT_NUMERIC
    put(raw, "t1", 3, fault="table", bad=6)
    error = refused(raw, tmp_path / "more")
    assert (error.exit_code, error.file) == (4, "t1.json")


def test_file_sums_are_compared(raw: Path, tmp_path: Path) -> None:
    sums = raw / "SHA256SUMS.txt"
    lines = [
        f"{storage.hash_file(raw / f'{name}.json')}  {name}.json\n" for name in ("a1", "b1", "c1")
    ]
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
    assert (report["exit_code"], report["source"]["sha256sums"], report["options"]["verify"]) == (
        0,
        "skipped",
        False,
    )
    (raw / "labels.csv").write_text("1")  # the data set needs this one
    sums.write_text(f"{'0' * 64}  labels.csv\n")
    error = refused(raw, tmp_path / "out")
    assert (error.code, error.file) == (Reason.SOURCE_CHECKSUM, "labels.csv")


def test_verify_and_ingest_read_file_sums_alike(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("a1.json", "b1.json", "c1.json")
    good = {name: storage.hash_file(raw / name) for name in names}
    (raw / "extra.txt").write_text("1")
    lines = [
        f"{good['a1.json'].upper()} *./a1.json",
        f"{'0' * 64}  b1.json",
        f"{good['c1.json']}  c1.json",
        "",
    ]
    lines += [f"{'1' * 64}  ../beyond", f"{'2' * 40}  short", f"{'z' * 64}  c1.json"]
    (raw / "SHA256SUMS.txt").write_text("\n".join(lines))
    hash_file = storage.hash_file

    def fail(path: Path) -> str:
        if path.name == "c1.json":
            raise PermissionError(13, "Permission denied", str(path))
        return hash_file(path)

    monkeypatch.setattr(storage, "hash_file", fail)
    result = workflows.verify(raw)
    assert (result["exit_code"], [one["files"] for one in result["checked"]]) == (5, [3])
    assert {
        (f.file, f.level, f.code, f.problem.partition(" (")[0]) for f in result["findings"]
    } == {
        ("b1.json", "error", "source_checksum", f"sha256 is {good['b1.json'][:16]}"),
        ("c1.json", "error", "io_error", "cannot be read"),
        ("SHA256SUMS.txt", "warning", "source_checksum", "files that are listed and not here: 1"),
        ("SHA256SUMS.txt", "warning", "source_checksum", "files that are here and not listed: 1"),
        ("SHA256SUMS.txt", "warning", "source_checksum", "lines that are no checksums: 2"),
    }


# ---- the real thing


def test_real_sleep_edf(tmp_path: Path) -> None:
    source = require_sample(SAMPLES / "sleep-edf")
    report = cache.ingest("sleep-edf", source, tmp_path / "out")
    assert report["exit_code"] == 0
    assert report["source"]["sha256sums"] == "verified"
    assert [(u["unit"], u["samples"], u["channels"]) for u in report["units"]] == [
        ("SC4001", 30_000, 7)
    ]
    (record,) = cache.open_cache(tmp_path / "out").records(["EEG Fpz-Cz"])
    pyedflib = pytest.importorskip("pyedflib")
    with pyedflib.EdfReader(str(source / "sleep-cassette" / "SC4001E0-PSG.edf")) as reader:
        wanted = reader.readSignal(reader.getSignalLabels().index("EEG Fpz-Cz"))
    signal_ = record.signals[0]
    np.testing.assert_allclose(
        signal_.samples * signal_.scale + signal_.offset, wanted, rtol=0, atol=1e-9
    )
