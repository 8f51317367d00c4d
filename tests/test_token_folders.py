"""The folder of a set of windows: equal bytes, stops at any write, damage, what is refused."""

import itertools
import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from made_cache import Memory, build, damage, files, missing, planned, record, records
from made_cache import tiny as tiny

from bitimely_core import tokens
from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.progress import show_progress
from bitimely_core.store import locks, manifests, storage
from bitimely_core.tokens import cutting


def test_same_input_same_bytes_and_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = records()
    first = build(held, tmp_path / "a", view="staging")
    build(held, tmp_path / "b", view="staging")
    assert files(tmp_path / "a") == files(tmp_path / "b")
    stamps = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "a").iterdir()}
    monkeypatch.setattr(locks, "lock_folder", None)
    again = build(held, tmp_path / "a", view="staging")
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "a").iterdir()} == stamps
    assert (
        again.fingerprint
        == first.fingerprint
        == json.loads((tmp_path / "a/manifest.json").read_text())["manifest_sha256"]
    )


def test_size_of_files_does_not_change_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = missing(records(6))
    single = build(held, tmp_path / "a")
    monkeypatch.setattr(cutting, "PIECE_BYTES", 4 * 240)
    from bitimely_core.tokens import building

    monkeypatch.setattr(building, "SHARD_BYTES", 10 * 240)
    many = build(held, tmp_path / "b")
    assert len(many.shards) > 10
    assert many.values().tobytes() == single.values().tobytes()
    assert many.index.equals(single.index)
    assert many.values([80, 2, 44]).tobytes() == single.values()[[80, 2, 44]].tobytes()


def test_other_choices_in_the_same_folder_are_refused(tmp_path: Path) -> None:
    held = records()
    first = build(held, tmp_path, view="staging")
    before = files(tmp_path)
    with pytest.raises(UserError) as error:
        build(held, tmp_path, view="staging", seed=1, normalise="window")
    assert (error.value.code, error.value.exit_code) == (Reason.SETTINGS_DIFFER, Exit.USAGE)
    assert {error.value.field, *(d.field for d in error.value.details)} == {"seed", "normalise"}
    assert files(tmp_path) == before
    second = build(held, tmp_path, view="staging", seed=1, normalise="window", force_new=True)
    assert (second.seed, second.normalise) == (1, "window")
    assert second.fingerprint != first.fingerprint
    tokens.open_tokens(tmp_path)


def test_another_cache_makes_new_windows_and_no_leftovers(tmp_path: Path) -> None:
    held = records(5)
    first = build(held, tmp_path, view="staging")
    old = first.values().tobytes()
    second = build(
        [record(i, seed=50 + i) for i in range(5)], tmp_path, view="staging", generation=2
    )
    assert first.values().tobytes() == old  # the map that is open lives on
    assert second.values().tobytes() != old
    names = {p.name for p in tmp_path.iterdir()} - {locks.LOCK_FILE, manifests.MANIFEST}
    assert names == set(second.manifest.files)


def test_a_failed_attempt_leaves_the_former_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = records(5)
    build(held, tmp_path)
    before = files(tmp_path)
    broken = [
        *held[:3],
        replace(held[3], signals=[held[3].signals[0]._replace(rate=1e3), *held[3].signals[1:]]),
    ]
    with pytest.raises(UserError):
        build(broken, tmp_path, generation=2)
    assert files(tmp_path) == before
    assert len(tokens.open_tokens(tmp_path)) == 75


def test_a_stop_at_any_write_leaves_the_former_set_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, changed = records(4), [record(i, seed=50 + i) for i in range(4)]
    former = build(held, tmp_path / "0").fingerprint
    wanted = build(changed, tmp_path / "clean", generation=2).fingerprint
    real, seen = storage.os_replace, set()
    for stop in range(1, 20):
        folder, calls = tmp_path / str(stop), itertools.count(1)
        build(held, folder)

        def replacing(old: Path, new: Path, calls: Iterator[int] = calls, stop: int = stop) -> None:
            if next(calls) == stop:
                raise KeyboardInterrupt
            real(old, new)

        with monkeypatch.context() as patch:
            patch.setattr(storage, "os_replace", replacing)
            with suppress(KeyboardInterrupt):
                build(changed, folder, generation=2)
                break
        try:
            seen.add(tokens.open_tokens(folder).fingerprint)
        except UserError as error:
            seen.add(error.code)
        assert build(changed, folder, generation=2).fingerprint == wanted
        assert {p.name for p in folder.iterdir()} == {
            p.name for p in (tmp_path / "clean").iterdir()
        }
    assert seen == {former, Reason.INCOMPLETE}


def test_recordings_without_a_channel_are_left_out_and_reported(tmp_path: Path) -> None:
    held = records(4)
    held[2] = replace(held[2], signals=held[2].signals[:2])
    windows = build(held, tmp_path)
    assert set(windows.subjects()) == {"s000", "s001", "s003"}
    finding = next(f for f in windows.manifest.findings if f.code == Reason.MISSING_CHANNEL)
    assert (finding.count, finding.level) == (1, "warning")
    with pytest.raises(UserError) as error:
        build(held[2:3], tmp_path / "none", channels=["eeg", "temp"], window=10_000)
    assert (error.value.code, error.value.exit_code) == (Reason.NO_INPUT, Exit.REFUSED)
    assert error.value.details[0].code == Reason.LENGTH


def test_a_channel_that_no_recording_has_is_a_mistyped_name(tmp_path: Path) -> None:
    for make in (
        lambda: build(records(2), tmp_path / "t", channels=["eeg", "tenp"]),
        lambda: planned(records(2), channels=["tenp"]),
    ):
        with pytest.raises(UserError, match="Did you mean temp") as error:
            make()
        assert (error.value.code, error.value.exit_code) == (Reason.UNKNOWN_NAME, Exit.USAGE)
    assert not (tmp_path / "t").exists()


def test_equal_recordings_in_two_splits_are_reported(tmp_path: Path) -> None:
    held = records()
    placed = tokens.assign_splits([r.subject_id for r in held])
    a = next(i for i, r in enumerate(held) if placed[r.subject_id] == "train")
    b = next(i for i, r in enumerate(held) if placed[r.subject_id] == "test")
    held[b] = replace(held[b], signals=held[a].signals)
    duplicates = [
        f
        for f in build(held, tmp_path).manifest.findings
        if f.code == Reason.DUPLICATE_ACROSS_SPLITS
    ]
    assert [f.count for f in duplicates] == [1]


def test_dry_run_counts_what_build_makes(tmp_path: Path) -> None:
    held = records(9)
    windows = build(held, tmp_path, view="staging")
    memory: Any = Memory(held)
    planned = tokens.plan(memory, view="staging")
    assert planned["audit"] == {
        split: counts.model_dump() for split, counts in windows.manifest.counts.items()
    }
    assert planned["windows"] == len(windows)
    assert planned["bytes"] == sum(shard.nbytes for shard in windows.shards)
    assert planned["findings"] == [finding.model_dump() for finding in windows.manifest.findings]


STORED = (
    "windows-*.arrow",
    "index.parquet",
    "recordings.parquet",
    "statistics.json",
    "manifest.json",
)
# the last is an unfinished set
DAMAGE = [(pattern, how) for pattern in STORED for how in ("flip", "append", "truncate", "delete")][
    :-1
]


@pytest.mark.parametrize(("pattern", "how"), DAMAGE)
def test_damage_is_noticed_on_opening(tmp_path: Path, pattern: str, how: str) -> None:
    build(records(4), tmp_path)
    path = next(tmp_path.glob(pattern))
    damage(path, how)
    with pytest.raises(UserError) as error:
        tokens.open_tokens(tmp_path)
    assert (error.value.code, error.value.exit_code) == (Reason.INTEGRITY, Exit.INTEGRITY)
    assert path.name in str(error.value)


def test_without_a_manifest_the_set_is_unfinished_and_made_again(tmp_path: Path) -> None:
    first = build(records(4), tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(UserError) as error:
        tokens.open_tokens(tmp_path)
    assert (error.value.code, error.value.exit_code) == (Reason.INCOMPLETE, Exit.REFUSED)
    assert build(records(4), tmp_path).fingerprint == first.fingerprint


def test_a_damaged_set_is_replaced_only_on_request(tmp_path: Path) -> None:
    held = records(4)
    first = build(held, tmp_path)
    for name in ("manifest.json", "index.parquet"):
        damage(tmp_path / name, "flip")
        with pytest.raises(UserError) as error:
            build(held, tmp_path)
        assert error.value.exit_code == Exit.INTEGRITY
        assert build(held, tmp_path, force_new=True).fingerprint == first.fingerprint


def test_a_moved_subject_is_refused_even_with_matching_hashes(tmp_path: Path) -> None:
    """ST02: one window of a test subject put into training, hashes made to fit."""
    windows = build(records(), tmp_path)
    index = windows.index
    row = int(windows["test"].rows[0])
    subject = index.filter(pl.col("window") == row)["subject_id"][0]
    moved = pl.when(pl.col("window") == row).then(pl.lit("train")).otherwise("split")
    index.with_columns(split=moved).write_parquet(tmp_path / "index.parquet")
    body = windows.manifest.model_dump(mode="json", exclude={"manifest_sha256"})
    sha256, size = storage.hash_with_size(tmp_path / "index.parquet")
    body["files"] = {**body["files"], "index.parquet": {"sha256": sha256, "size": size}}
    storage.write_json(
        tmp_path / "manifest.json", {**body, "manifest_sha256": storage.fingerprint(body)}
    )
    with pytest.raises(UserError) as error:
        tokens.open_tokens(tmp_path)
    assert (error.value.code, error.value.exit_code) == (Reason.SUBJECT_LEAKAGE, Exit.REFUSED)
    assert f"1 subjects are in more than one split: '{subject}'" in error.value.problem


def test_without_verification_a_wrong_layout_is_still_noticed(tmp_path: Path) -> None:
    windows = build(records(4), tmp_path / "a")
    other = build(records(4), tmp_path / "b", view="staging")
    name, foreign = (next(iter(w.manifest.shards)).name for w in (windows, other))
    shutil.copyfile(tmp_path / "b" / foreign, tmp_path / "a" / name)
    with pytest.raises(UserError) as error:
        tokens.open_tokens(tmp_path / "a", verify=False)
    assert error.value.exit_code == Exit.INTEGRITY
    (tmp_path / "a" / name).write_bytes(b"not arrow at all")
    with pytest.raises(UserError):
        tokens.open_tokens(tmp_path / "a", verify=False)


def test_newer_formats_are_refused(tmp_path: Path) -> None:
    windows = build(records(3), tmp_path)
    body = windows.manifest.model_dump(mode="json", exclude={"manifest_sha256"}) | {
        "format_version": 99
    }
    storage.write_json(
        tmp_path / "manifest.json", {**body, "manifest_sha256": storage.fingerprint(body)}
    )
    with pytest.raises(UserError, match="99") as error:
        tokens.open_tokens(tmp_path)
    assert error.value.code == Reason.UNSUPPORTED_FORMAT


def test_progress_is_reported(tmp_path: Path) -> None:
    events: list[tuple[str, int, int | None]] = []

    def report(what: str, done: int, total: int | None) -> None:
        events.append((what, done, total))

    with show_progress(report):
        build(records(3), tmp_path)
    assert events == [("windows", i, 3) for i in range(4)]
