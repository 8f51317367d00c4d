"""Bad units of a data set are named and the good ones go through; a second run reads what has
changed.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys import FACTS, READ, content, ingest, list_toys, put, read_toy, refused, tree

from bitimely_core import cache, registry
from bitimely_core.cache import shards, unit_groups
from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.formats.source import Source
from bitimely_core.schemas.ingest_records import IngestReport
from bitimely_core.store import manifests, storage
from bitimely_core.types import Annotation, IngestUnit, Record, Records, Signal

pytestmark = pytest.mark.usefixtures("toys")


# ---- bad units


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("header", "header_bytes"),
        ("bug", "internal"),
        ("memory", "resource_limit"),
        ("io", "io_error"),
        ("inf", "non_finite"),
    ],
)
def test_a_bad_unit_is_left_out_and_named_and_the_others_are_as_without_it(
    raw: Path, tmp_path: Path, fault: str, code: str
) -> None:
    good = ingest(raw, tmp_path / "good")
    put(raw, "b0", 9, fault=fault)
    report = ingest(raw, tmp_path / "out")
    assert report["exit_code"] == 3
    (reason,) = report["units"][1]["reasons"]
    assert reason["code"] == code
    assert "b0.json" in reason["message"]
    assert "Haagse" not in json.dumps(report)
    assert report["content_sha256"] == good["content_sha256"]
    assert [r.recording_id for r in cache.open_cache(tmp_path / "out").records()] == [
        "a1",
        "b1",
        "c1",
    ]
    assert ingest(raw, tmp_path / "out") == report


def test_a_file_that_changes_during_reading_is_refused(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = storage.hash_file

    def meddled(path: Path) -> str:
        found = hashed(path)
        if path.stem == "b1":
            path.write_text(path.read_text() + " ")
        return found

    monkeypatch.setattr(storage, "hash_file", meddled)
    report = ingest(raw, tmp_path / "out")
    assert [[reason["code"] for reason in unit["reasons"]] for unit in report["units"]] == [
        [],
        ["io_error"],
        [],
    ]


def test_strict_and_max_bad_refuse_and_leave_the_former_generation(
    raw: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ingest(raw, out)
    before = {
        name: data
        for name, data in tree(out).items()
        if name not in {"ingest_report.json", "results.json"}
    }
    put(raw, "a1", fault="header")
    for options in ({"strict": True}, {"max_bad": 0.3}):
        error = refused(raw, out, **options)
        assert (error.exit_code, error.code) == (4, Reason.HEADER_BYTES)
        assert error.report is not None
        assert (error.report["status"], error.report["exit_code"], error.report["published"]) == (
            "refused",
            4,
            False,
        )
        assert (error.report["generation"], error.report["content_sha256"]) == (None, None)
        assert error.report["error"]["message"] == str(error)
        assert [f.line() for f in error.details] == [
            "error[header_bytes] a1.json:header_bytes: found 1024, expected 2048."
        ]
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
    assert "the unit 'sub/a1' holds the recording 'a1', and the unit 'a1' too" in error.problem


def test_a_unit_with_one_recording_twice_is_refused_as_such(raw: Path, tmp_path: Path) -> None:
    of(
        lambda source, options: [
            replace(unit, read=functools.partial(read_twice, unit.read))
            for unit in list_toys(source, options)
        ]
    )
    error = refused(raw, tmp_path / "out")
    assert (error.code, error.problem) == (
        Reason.DUPLICATE_KEY,
        "the unit 'a1' holds the recording 'a1' twice",
    )


def read_twice(read: Callable[[], Record]) -> Records:
    return Records(records=[read(), read()])


def of(function: Callable[..., Any]) -> None:
    """Let `function` be the toy data set."""
    registry.datasets._items["toy"] = registry.Entry("toy", function, FACTS)


def test_a_unit_that_is_there_twice_is_refused(raw: Path, tmp_path: Path) -> None:
    of(
        lambda source, options: [
            *list_toys(source, options),
            IngestUnit(name="a1", files=(), read=None),
        ]
    )
    assert refused(raw, tmp_path / "out").code == Reason.DUPLICATE_KEY


def test_a_unit_without_a_reader_and_without_a_reason_is_quarantined(
    raw: Path, tmp_path: Path
) -> None:
    of(
        lambda source, options: [
            *list_toys(source, options),
            IngestUnit(name="d1", files=("gone.json",), read=None),
        ]
    )
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
def test_what_a_reader_must_never_return_costs_its_unit(
    raw: Path, tmp_path: Path, signals: list[Signal]
) -> None:
    record = Record(recording_id="d1", subject_id="d", signals=signals)
    of(
        lambda source, options: [
            *list_toys(source, options),
            IngestUnit(name="d1", files=(), read=lambda: record),
        ]
    )
    report = ingest(raw, tmp_path / "out")
    assert report["reason_counts"] == {"internal": 1}
    assert "ValueError in shards.py" in report["units"][3]["reasons"][0]["message"]


def test_files_that_cannot_be_read_are_named(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        return unit_groups.describe_arguments(functools.partial(read_toy, value), root)

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
    of(
        lambda source, options: [
            IngestUnit(
                name="a1", files=("a1.json",), read=lambda: read_toy(source.path("a1.json"), 0.5)
            )
        ]
    )
    first = ingest(raw, tmp_path / "out")
    assert ingest(raw, tmp_path / "out") == first
    assert READ == ["a1", "a1"]


def test_what_is_odd_and_claimed_by_nobody_is_a_warning(raw: Path, tmp_path: Path) -> None:
    os.mkfifo(raw / "pipe")
    (raw / "notes.txt").write_text("")
    report = ingest(raw, tmp_path / "out")
    assert report["exit_code"] == 0
    assert {r["code"]: r["level"] for r in report["reasons"]} == {
        "not_regular_file": "warning",
        "file_name": "warning",
    }


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
def test_only_what_has_changed_is_read_again_and_the_result_is_that_of_a_clean_run(
    raw: Path, tmp_path: Path, change: str
) -> None:
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
    assert {"mended": ["b0"], "edited": ["b0"], "added": ["d1"], "removed": [], "renamed": ["e1"]}[
        change
    ] == READ
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


def test_other_options_are_refused_with_what_differs_unless_all_is_new(
    raw: Path, tmp_path: Path
) -> None:
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


def test_a_stopped_ingest_goes_on_and_only_under_its_own_options(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_groups, "LARGE_UNIT", 1)
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


def test_an_ingest_that_was_never_published_binds_nobody(raw: Path, tmp_path: Path) -> None:
    put(raw, "c1", fault="stop")
    with pytest.raises(KeyboardInterrupt):
        ingest(raw, tmp_path / "out")
    put(raw, "c1")
    assert ingest(raw, tmp_path / "out", options={"gain": 2.0})["generation"] == 1
    ingest(raw, tmp_path / "clean", options={"gain": 2.0})
    assert content(tmp_path / "out") == content(tmp_path / "clean")


def test_parts_of_one_ingest_need_the_same_options(raw: Path, tmp_path: Path) -> None:
    for k in (1, 2, 3):
        if ingest(raw, tmp_path / "out", shard=(k, 3))["counts"]["units_seen"]:
            break
    error = refused(raw, tmp_path / "out", options={"gain": 2.0}, shard=(1, 3))
    assert (error.code, error.field) == (Reason.SETTINGS_DIFFER, "gain")


def test_a_note_that_was_changed_is_passed_over(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_groups, "LARGE_UNIT", 1)
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
        named.append(set(manifests.read_manifest(out)["files"]))
        assert list((out / ".progress").glob("*.json")) == []
    kept = {name for name in tree(out) if shards.NAMES.fullmatch(name)}
    assert kept == named[-1] | named[-2]
    assert [path.name for path in out.glob("manifest-*")] == ["manifest-3.json"]


def test_the_share_that_may_be_bad_is_inclusive(raw: Path, tmp_path: Path) -> None:
    put(raw, "d1", fault="header")
    assert ingest(raw, tmp_path / "out", max_bad=0.25)["exit_code"] == 3


def test_content_hash_does_not_depend_on_the_order_of_channels() -> None:
    signals = [Signal(name, 1.0, "", np.full(3, i, np.int16)) for i, name in enumerate("xy")]
    one, other = (
        Record(recording_id="r", subject_id="s", signals=order)
        for order in (signals, signals[::-1])
    )
    assert shards.hash_content([one]) == shards.hash_content([other])
    assert shards.hash_content([one, one]) != shards.hash_content([one])


def test_a_flipped_bit_is_noticed_by_the_pages_too(tmp_path: Path) -> None:
    """Without the comparison of hashes: noise is stored as it is, so nothing but the checksum of
    the page can tell.
    """
    noise = np.random.default_rng(0).integers(-(2**15), 2**15, 20_000).astype(np.int16)
    names, _ = shards.write_shard(
        tmp_path,
        [Record(recording_id="r", subject_id="s", signals=[Signal("x", 1.0, "", noise)])],
        "toy",
    )
    path = tmp_path / str(names.recordings)
    original = path.read_bytes()
    here = original.index(noise.tobytes()[1000:1032])
    for i in range(20):
        data = bytearray(original)
        data[here + 100 * i] ^= 1 << (i % 8)
        path.write_bytes(data)
        with pytest.raises(OSError, match="CRC"):
            list(shards.read_shard(tmp_path, names, {"r": {}}))


def test_out_of_memory_outside_of_a_reader_is_reported(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    groups = [[unit.name for unit in group] for group in unit_groups.group_units(made, sizes)]
    assert [name for group in groups for name in group] == names
    assert max(map(len, groups)) <= 4 * unit_groups.MEAN_UNITS
    assert 4 <= len(groups) <= 40
    fewer = [
        [unit.name for unit in group]
        for group in unit_groups.group_units(made[:2500] + made[2501:], sizes)
    ]
    assert len([group for group in fewer if group not in groups]) <= 2
    big = unit_groups.group_units(
        made[:3], {"r00000": 5, "r00001": unit_groups.LARGE_UNIT, "r00002": 5}
    )
    assert [len(group) for group in big] == [1, 1, 1]


def test_recordings_are_left_out_by_name_and_come_back_without_it(
    raw: Path, tmp_path: Path
) -> None:
    """The cache is that of a source without their files; the report says so."""
    out, smaller = tmp_path / "out", tmp_path / "smaller"
    ingest(raw, out)
    report = ingest(raw, out, exclude=["b1"])
    assert READ == ["a1", "b1", "c1"], "nothing is read again"
    assert cache.open_cache(out).recording_ids() == ["a1", "c1"]
    assert report["options"]["exclude"] == ["b1"]
    (reason,) = report["reasons"]
    assert (reason["code"], reason["level"], reason["file"]) == ("left_out", "info", "b1.json")
    assert "'b1' is left out, as --exclude asks" in reason["message"]
    stored = json.loads((out / "manifest.json").read_bytes())["report"]
    assert (stored["options"]["exclude"], stored["reasons"]) == (["b1"], report["reasons"])
    shutil.copytree(raw, smaller)
    (smaller / "b1.json").unlink()
    assert ingest(smaller, tmp_path / "clean")["content_sha256"] == report["content_sha256"]
    assert ingest(raw, out)["counts"]["accepted"] == 3


def test_an_unknown_recording_to_leave_out_is_refused(raw: Path, tmp_path: Path) -> None:
    for dry_run in (True, False):
        error = refused(raw, tmp_path / "out", exclude=["a1", "b2"], dry_run=dry_run)
        assert (error.code, error.exit_code, error.field) == ("unknown_name", 2, "--exclude")
        assert "'b2'" in error.problem
        assert "Did you mean" in error.hint
        assert "b1" in error.hint
    for number in range(80):
        put(raw, f"night{number:02d}", number)
    error = refused(raw, tmp_path / "out", exclude=["night99"])
    assert error.requirement.endswith("night16 and 63 more")
    assert len(error.requirement) < 400
