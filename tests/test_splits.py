"""Subjects to splits: by hash, by rank, by blocks of time, official; nobody in two of them."""

import hashlib
import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_cache import build, record, records
from made_cache import tiny as tiny

from bitimely_core import tokens
from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.store import locks
from bitimely_core.tokens import splits


def u(seed: int, subject: str) -> float:
    return int(hashlib.sha256(f"{seed}|{subject}".encode()).hexdigest()[:16], 16) / 2**64


@pytest.mark.slow
@given(
    st.sets(
        st.text(min_size=1, max_size=8).filter(lambda s: s.isprintable()), min_size=20, max_size=60
    ),
    st.integers(0, 5),
)
@settings(max_examples=40, deadline=None)
def test_many_subjects_are_placed_by_their_own_hash(subjects: set[str], seed: int) -> None:
    found = tokens.assign_splits(subjects, seed=seed)
    for subject in subjects:
        assert found[subject] == (
            "train"
            if u(seed, subject) < 0.8
            else "validation"
            if u(seed, subject) < 0.9
            else "test"
        )


@given(st.lists(st.text("abcdef", min_size=1, max_size=6), min_size=1, max_size=80), st.randoms())
@settings(max_examples=60, deadline=None)
def test_order_and_repetition_of_subjects_do_not_count_and_adding_moves_nobody(
    subjects: list[str], random: Any
) -> None:
    found = tokens.assign_splits(subjects)
    shuffled = subjects * 2
    random.shuffle(shuffled)
    assert list(tokens.assign_splits(shuffled).items()) == sorted(found.items()), (
        "sorted by subject"
    )
    if len(found) >= 20:
        larger = tokens.assign_splits([*subjects, "somebody new"])
        assert {subject: larger[subject] for subject in found} == found


@pytest.mark.parametrize("count", range(1, 20))
def test_few_subjects_are_placed_by_rank(count: int) -> None:
    names = [f"p{i}" for i in range(count)]
    found = tokens.assign_splits(names, seed=3)
    held = 0 if count < 3 else max(1, round(count / 10))
    assert Counter(found.values()) == Counter(
        {"train": count - 2 * held, "validation": held, "test": held}
    )
    ranked = sorted(names, key=lambda name: u(3, name))
    assert [found[name] for name in ranked] == ["train"] * (count - 2 * held) + [
        "validation"
    ] * held + ["test"] * held


def test_shares_of_many_subjects_are_80_10_10() -> None:
    found = Counter(tokens.assign_splits(map(str, range(20_000))).values())
    assert found["train"] / 20_000 == pytest.approx(0.8, abs=0.01)
    assert found["test"] / 20_000 == pytest.approx(0.1, abs=0.01)


@given(
    st.integers(1, 120), st.sampled_from([0.375, 0.5, 1.0, 30.0]), st.sampled_from([0.5, 1.0, 2.0])
)
@example(4, 30.0, 1.0)
@example(5, 30.0, 1.0)
@settings(max_examples=80, deadline=None)
def test_blocks_of_time_are_in_order_and_a_window_apart(n: int, length: float, step: float) -> None:
    starts = [i * length * step for i in range(n)]
    places = splits.split_by_time(starts, length)
    if n < 5:
        assert places == ["train"] * n
        return
    assert places[-1] == "test"
    assert places.count("test") == max(1, round(n / 10))
    blocks = [
        (min(i), max(i))
        for name in splits.SPLITS
        if (i := [j for j, place in enumerate(places) if place == name])
    ]
    for (_, last), (first, _) in itertools.pairwise(blocks):
        assert last < first
        assert starts[first] - (starts[last] + length) >= length * (1 - 1e-5)


def test_no_subject_in_two_splits_and_both_nights_together(tmp_path: Path) -> None:
    windows = build(records() + records(night=1), tmp_path)
    subjects = [set(windows[split].subjects()) for split in splits.SPLITS]
    assert all(subjects)
    assert not subjects[0] & subjects[1] | subjects[0] & subjects[2] | subjects[1] & subjects[2]
    assert windows.manifest.counts["test"].recordings == 2 * len(subjects[2])
    assert sum(len(windows[split]) for split in splits.SPLITS) == len(windows) == 48 * 15


def test_views_of_one_cache_agree_on_few_subjects(tmp_path: Path) -> None:
    """A subject that the one view has to leave out does not change the ranks in the other."""
    held = records(9)
    held[4] = replace(held[4], signals=held[4].signals[:1])
    full, staging = build(held, tmp_path / "a"), build(held, tmp_path / "b", view="staging")
    placed = dict(zip(staging.subjects(), staging.index["split"], strict=True))
    assert "s004" not in set(full.subjects())
    assert all(
        placed[subject] == split
        for subject, split in zip(full.subjects(), full.index["split"], strict=True)
    )


def test_official_folds(tmp_path: Path) -> None:
    windows = build(records(), tmp_path, split="official")
    for subject, split in windows.index.select("subject_id", "split").unique().iter_rows():
        fold = int(subject[1:]) % 10 + 1
        assert split == ("train" if fold <= 8 else "validation" if fold == 9 else "test")


def test_official_names(tmp_path: Path) -> None:
    held = [
        replace(r, attributes={"split": name})
        for r, name in zip(records(4), ("TRAIN", "train", "Validation", "TEST"), strict=True)
    ]
    assert build(held, tmp_path, split="official").index["split"].unique(
        maintain_order=True
    ).to_list() == ["train", "validation", "test"]


def test_official_without_folds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no official split") as error:
        build([record(1), replace(record(0), attributes={})], tmp_path, split="official")
    assert error.value.exit_code == Exit.USAGE
    assert record(0).recording_id in error.value.problem
    assert not (tmp_path / "manifest.json").exists()


def test_official_folds_that_share_a_subject_are_refused(tmp_path: Path) -> None:
    held = [record(0), record(0, night=1, attributes={"fold": 10})]
    with pytest.raises(UserError) as error:
        build(held, tmp_path, split="official")
    assert (error.value.code, error.value.exit_code) == (Reason.SUBJECT_LEAKAGE, Exit.REFUSED)
    assert f"split: '{held[0].subject_id}'" in error.value.problem
    assert [p.name for p in tmp_path.iterdir()] == [locks.LOCK_FILE]


@pytest.mark.parametrize("split", ["random-window", "time"])
def test_splits_that_share_subjects_are_stamped(tmp_path: Path, split: str) -> None:
    windows = build(records(3, seconds=60), tmp_path, split=split)
    assert len(windows.notices) == 1
    assert "train" in windows.notices[0]
    assert windows.manifest.options.split == split
    for part in splits.SPLITS:
        assert set(windows[part].subjects()) == {"s000", "s001", "s002"}
    if split == "time":
        for name in ("r000-0", "r001-0", "r002-0"):
            own = windows.index.filter(pl.col("recording_id") == name)
            assert own.height == 30 - 2
            assert own["split"].to_list() == ["train"] * 22 + ["validation"] * 3 + ["test"] * 3
        assert windows.manifest.left_out["gap"] == 6
    else:
        for recording, start, part in windows.index.select(
            "recording_id", "start", "split"
        ).iter_rows():
            assert part == splits.split_by_share(u(0, f"{recording}|{start}"))


def test_unknown_choices_suggest_the_closest(tmp_path: Path) -> None:
    for wrong, hint in (
        ({"split": "subjects"}, "subject"),
        ({"view": "stagin"}, "staging"),
        ({"normalise": "chanel"}, "channel"),
    ):
        with pytest.raises(
            UserError, match=f"Did you mean {'tiny/' if 'view' in wrong else ''}{hint}"
        ) as error:
            build(records(2), tmp_path, **wrong)
        assert error.value.exit_code == Exit.USAGE
