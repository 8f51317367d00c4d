"""Cache to windows: splits, epochs, trimming, rates, statistics, storage, reading. Oracles: slices of physical values, closed forms."""

import hashlib
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from samples import SAMPLES, require_sample

from bitimely_core import cache, manifests, registry, storage, tokens
from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.registry import DatasetFacts, View
from bitimely_core.schemas.ingest import CacheManifest, CacheSettings
from bitimely_core.tokens import cutting, moments, splits
from bitimely_core.types import Annotation, Record, Signal

RATE = 20.0
STAGES = {"Sleep stage W": "W", "Sleep stage 1": "N1", "Sleep stage 2": "N2"}
VIEWS = {
    "": View(channels=("eeg", "temp", "marker"), rate=RATE, window=40, hold=("marker",)),
    "staging": View(
        channels=("eeg",), rate=RATE, window=40, task="classification", classes=("W", "N1", "N2"), labels=STAGES, epoch=2.0, trim=("W", 4.0)
    ),
    "age": View(channels=("eeg",), rate=RATE, window=100, task="regression", target="age"),
    "sex": View(channels=("eeg",), rate=RATE, window=100, task="classification", target="sex"),
    "finds": View(channels=("eeg",), rate=RATE, window=100, task="multilabel", classes=("A", "B", "C"), target="finds"),
    "open": View(channels=(), rate=0.0, window=0),
}


class Memory:
    """A cache that lives in memory, with what `tokens` uses of an open cache."""

    def __init__(self, records: list[Record], dataset: str = "tiny", generation: int = 1) -> None:
        self.held, self.dataset, self.folder = records, dataset, Path("cache") / dataset
        settings = CacheSettings(dataset=dataset, version="0", options={})
        self.manifest = CacheManifest.model_construct(
            kind="recordings", settings=settings, manifest_sha256=hashlib.sha256(f"{generation}".encode()).hexdigest()
        )

    def records(self, channels: list[str] | None = None) -> Iterator[Record]:
        for record in self.held:
            yield replace(record, signals=[s for s in record.signals if channels is None or s.channel in channels])

    def subjects(self) -> pl.DataFrame:
        return pl.DataFrame({"subject_id": [record.subject_id for record in self.held]})

    def signals(self) -> pl.DataFrame:
        rows = [(record.recording_id, s.channel, s.rate, len(s.samples)) for record in self.held for s in record.signals]
        schema = {"recording_id": pl.String, "channel": pl.String, "rate": pl.Float64, "n_samples": pl.Int64}
        return pl.DataFrame(rows, schema=schema, orient="row")

    def recording_ids(self) -> list[str]:
        return [record.recording_id for record in self.held]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = DatasetFacts(title="tiny", views=VIEWS, licence="", url="", download="", paper={}, rules={})
    monkeypatch.setitem(registry.datasets, "tiny", registry.Entry("tiny", lambda source, options: iter(()), facts))


def record(subject: int, *, seconds: float = 30.0, seed: int | None = None, night: int = 0, **change: Any) -> Record:
    """eeg at 20 Hz, temp and marker at 1 Hz, int16, each with its own scale and offset; W W N1 N1 N2 ? ... in epochs of 2 s."""
    rng = np.random.default_rng([subject if seed is None else seed, night])
    n = int(seconds)
    signals = [
        Signal("eeg", RATE, "uV", rng.integers(-3000, 3000, int(n * RATE)).astype(np.int16), 0.1 + 0.01 * subject, -3.0),
        Signal("temp", 1.0, "C", 20 * rng.integers(-25, 25, n).astype(np.int16), 0.01, 37.0),  # its interpolation never ends on half a step
        Signal("marker", 1.0, "", rng.integers(0, 3, n).astype(np.int16), 1.0, 0.0),
    ]
    cycle = ["Sleep stage W"] * 2 + ["Sleep stage 1"] * 2 + ["Sleep stage 2", "Sleep stage ?"]
    notes = [Annotation(2.0 * i, 2.0, cycle[i % 6]) for i in range(n // 2)]
    found = Record(
        recording_id=f"r{subject:03d}-{night}",
        subject_id=f"s{subject:03d}",
        signals=signals,
        annotations=notes,
        attributes={"age": 20.0 + subject, "sex": "mf"[subject % 2], "finds": ["A", "C"][: subject % 3], "fold": subject % 10 + 1},
    )
    return replace(found, **change)


def records(count: int = 24, **change: Any) -> list[Record]:
    return [record(subject, **change) for subject in range(count)]


def physical(found: Record, channel: str) -> np.ndarray:
    """The channel's physical values in float64, its segments one after the other."""
    return np.concatenate([s.samples * np.float64(s.scale) + s.offset for s in found.signals if s.channel == channel])


def files(folder: Path) -> dict[str, str]:
    return {p.name: storage.hash_file(p) for p in sorted(folder.iterdir()) if p.name != storage.LOCK}


def build(held: list[Record], folder: Path, **options: Any) -> tokens.Windows:
    memory: Any = Memory(held, generation=options.pop("generation", 1))
    return tokens.build(memory, out=folder, **options)


def planned(held: list[Record], **options: Any) -> dict[str, Any]:
    memory: Any = Memory(held)
    return tokens.plan(memory, **options)


def labels(windows: tokens.Windows, rows: Any = None) -> np.ndarray:
    found = windows.targets(rows)
    assert found is not None
    return found


# ---- splits


def u(seed: int, subject: str) -> float:
    return int(hashlib.sha256(f"{seed}|{subject}".encode()).hexdigest()[:16], 16) / 2**64


@given(st.sets(st.text(min_size=1, max_size=8).filter(lambda s: s.isprintable()), min_size=20, max_size=60), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_many_subjects_are_placed_by_their_own_hash(subjects: set[str], seed: int) -> None:
    found = tokens.assign_splits(subjects, seed=seed)
    for subject in subjects:
        assert found[subject] == ("train" if u(seed, subject) < 0.8 else "validation" if u(seed, subject) < 0.9 else "test")


@given(st.lists(st.text("abcdef", min_size=1, max_size=6), min_size=1, max_size=80), st.randoms())
@settings(max_examples=60, deadline=None)
def test_order_and_repetition_of_subjects_do_not_count_and_adding_moves_nobody(subjects: list[str], random: Any) -> None:
    found = tokens.assign_splits(subjects)
    shuffled = subjects * 2
    random.shuffle(shuffled)
    assert list(tokens.assign_splits(shuffled).items()) == sorted(found.items()), "sorted by subject"
    if len(found) >= 20:
        larger = tokens.assign_splits([*subjects, "somebody new"])
        assert {subject: larger[subject] for subject in found} == found


@pytest.mark.parametrize("count", range(1, 20))
def test_few_subjects_are_placed_by_rank(count: int) -> None:
    names = [f"p{i}" for i in range(count)]
    found = tokens.assign_splits(names, seed=3)
    held = 0 if count < 3 else max(1, round(count / 10))
    assert Counter(found.values()) == Counter({"train": count - 2 * held, "validation": held, "test": held})
    ranked = sorted(names, key=lambda name: u(3, name))
    assert [found[name] for name in ranked] == ["train"] * (count - 2 * held) + ["validation"] * held + ["test"] * held


def test_shares_of_many_subjects_are_80_10_10() -> None:
    found = Counter(tokens.assign_splits(map(str, range(20_000))).values())
    assert found["train"] / 20_000 == pytest.approx(0.8, abs=0.01)
    assert found["test"] / 20_000 == pytest.approx(0.1, abs=0.01)


@given(st.integers(1, 120), st.sampled_from([0.375, 0.5, 1.0, 30.0]), st.sampled_from([0.5, 1.0, 2.0]))
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
    blocks = [(min(i), max(i)) for name in splits.SPLITS if (i := [j for j, place in enumerate(places) if place == name])]
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
    assert all(placed[subject] == split for subject, split in zip(full.subjects(), full.index["split"], strict=True))


def test_official_folds(tmp_path: Path) -> None:
    windows = build(records(), tmp_path, split="official")
    for subject, split in windows.index.select("subject_id", "split").unique().iter_rows():
        fold = int(subject[1:]) % 10 + 1
        assert split == ("train" if fold <= 8 else "validation" if fold == 9 else "test")


def test_official_names(tmp_path: Path) -> None:
    held = [replace(r, attributes={"split": name}) for r, name in zip(records(4), ("TRAIN", "train", "Validation", "TEST"), strict=True)]
    assert build(held, tmp_path, split="official").index["split"].unique(maintain_order=True).to_list() == ["train", "validation", "test"]


def test_official_without_folds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no official split") as error:
        build([replace(record(0), attributes={})], tmp_path, split="official")
    assert error.value.exit_code == Exit.USAGE
    assert not (tmp_path / "manifest.json").exists()


def test_official_folds_that_share_a_subject_are_refused(tmp_path: Path) -> None:
    held = [record(0), record(0, night=1, attributes={"fold": 10})]
    with pytest.raises(UserError) as error:
        build(held, tmp_path, split="official")
    assert (error.value.code, error.value.exit_code) == (Reason.SUBJECT_LEAKAGE, Exit.REFUSED)
    assert [p.name for p in tmp_path.iterdir()] == [storage.LOCK]


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
        for recording, start, part in windows.index.select("recording_id", "start", "split").iter_rows():
            assert part == splits.split_by_share(u(0, f"{recording}|{start}"))


def test_unknown_choices_suggest_the_closest(tmp_path: Path) -> None:
    for wrong, hint in (({"split": "subjects"}, "subject"), ({"view": "stagin"}, "staging"), ({"normalise": "chanel"}, "channel")):
        with pytest.raises(UserError, match=f"Did you mean {'tiny/' if 'view' in wrong else ''}{hint}") as error:
            build(records(2), tmp_path, **wrong)
        assert error.value.exit_code == Exit.USAGE


# ---- what is in a window


def test_values_are_the_recordings_own(tmp_path: Path) -> None:
    """eeg as stored; temp between its samples on a line, marker held; less the training mean, over the training deviation."""
    held = records(5)
    windows = build(held, tmp_path)
    assert windows.manifest.shards[0].dtype == "int16"
    by_id = {r.recording_id: r for r in held}
    raw = {}
    for name, found in by_id.items():
        at = np.arange(600) / RATE
        temp = found.signals[1]
        digital = np.rint(np.interp(at, np.arange(30), temp.samples.astype(float)))
        marker = physical(found, "marker")[np.floor(at).astype(int)]
        raw[name] = np.stack([physical(found, "eeg"), digital * temp.scale + temp.offset, marker], axis=1)
        assert np.abs(np.interp(at, np.arange(30), physical(found, "temp")) - raw[name][:, 1]).max() <= temp.scale / 2 + 1e-9
    train = np.concatenate([raw[name] for name in windows["train"].index["recording_id"].unique(maintain_order=True)])
    mean, std = train.mean(0), train.std(0)
    for row, (name, start) in enumerate(windows.index.select("recording_id", "start").iter_rows()):
        wanted = (raw[name][round(start * RATE) :][:40] - mean) / std
        np.testing.assert_allclose(windows.values([row])[0], wanted, atol=2e-5)
    assert windows.mask() is None
    stored = [c.mean for c in windows.statistics.channels], [c.std for c in windows.statistics.channels]
    np.testing.assert_allclose(stored, [mean, std], rtol=1e-12)
    assert (windows.channels, windows.length, windows.rate, windows.classes, windows.task) == (3, 40, RATE, 0, "none")
    assert windows.targets() is None


def test_reading_order_subsets_and_foreign_rows(tmp_path: Path) -> None:
    windows = build(records(5), tmp_path)
    assert windows.values([7, 3, 3, 70]).tobytes() == windows.values()[[7, 3, 3, 70]].tobytes()
    test = windows["test"]
    assert test.index["window"].to_list() == test.rows.tolist()
    assert len(test.values()) == len(test) == len(test.subjects()) == 15
    with pytest.raises(IndexError, match="subset"):
        test.values(windows["train"].rows[:2])
    with pytest.raises(IndexError):
        windows.values([len(windows)])
    assert len(test["train"]) == 0
    assert test["train"].values().shape == (0, 40, 3)
    with pytest.raises(UserError, match="Did you mean test"):
        windows["tests"]


def test_none_reads_physical_values(tmp_path: Path) -> None:
    held = records(3)
    windows = build(held, tmp_path, view="staging", normalise="none")
    row = windows.index.row(0, named=True)
    found = next(r for r in held if r.recording_id == row["recording_id"])
    np.testing.assert_allclose(windows.values([0])[0, :, 0], physical(found, "eeg")[round(row["start"] * RATE) :][:40], rtol=1e-6)


def test_window_normalisation_is_each_windows_own_and_stamped(tmp_path: Path) -> None:
    held = records(3)
    held[1].signals[2] = held[1].signals[2]._replace(samples=np.full(30, 2, np.int16))
    windows = build(held, tmp_path, normalise="window")
    values = windows.values()
    np.testing.assert_allclose(values.mean(1), 0, atol=1e-5)
    marker = values[windows.subjects() == "s001", :, 2]
    assert not marker.any()
    np.testing.assert_allclose(values[..., :2].std(1), 1, atol=1e-4)
    assert "own mean" in windows.notices[0]


def test_strides_windows_rates_and_channels(tmp_path: Path) -> None:
    held = records(3)
    windows = build(held, tmp_path / "a", window=50, stride=25, channels=["marker", "eeg"], normalise="none")
    assert len(windows) == 3 * (600 - 50 + 25) // 25
    assert windows.channel_names == ("marker", "eeg")
    assert windows.index["start"].to_list()[:3] == [0.0, 1.25, 2.5]
    np.testing.assert_allclose(windows.values([1])[0, :, 1], physical(held[0], "eeg")[25:75], rtol=1e-6)
    faster = build(held, tmp_path / "b", rate=40.0)
    assert (faster.length, faster.rate, len(faster)) == (80, 40.0, len(held) * 15)
    with pytest.raises(UserError, match="labelled epoch"):
        build(held, tmp_path / "c", view="staging", stride=3)
    for wrong in ({"rate": 0.0}, {"rate": float("nan")}, {"window": 0}, {"stride": 0}, {"channels": ["eeg", "eeg"]}):
        with pytest.raises(UserError) as error:
            build(held, tmp_path / "c", **wrong)
        assert error.value.exit_code == Exit.USAGE
    assert not (tmp_path / "c" / "manifest.json").exists()


def test_a_view_that_leaves_all_open_follows_the_recordings(tmp_path: Path) -> None:
    windows = build(records(3, seconds=7), tmp_path, view="open")
    assert (windows.channel_names, windows.rate, windows.length, len(windows)) == (("eeg", "temp", "marker"), RATE, 140, 3)


# ---- epochs, labels, trimming


def test_one_window_a_scored_epoch_trimmed_to_4_seconds_of_wake(tmp_path: Path) -> None:
    stages = ["W"] * 9 + ["1", "2", "?", "W", "2"] + ["W"] * 6  # 20 epochs of 2 s
    notes = [Annotation(0.0, 18.0, "Sleep stage W"), *(Annotation(2.0 * i, 2.0, f"Sleep stage {stages[i]}") for i in range(9, 20))]
    notes += [Annotation(40.0, 6.0, "Sleep stage 2"), Annotation(1.0, 3.0, "Mrs Somebody woke")]
    held = [replace(r, annotations=notes) for r in records(3, seconds=40)]
    windows = build(held, tmp_path, view="staging", normalise="none")
    own = windows.index.filter(pl.col("subject_id") == "s001")
    assert own["start"].to_list() == [14.0, 16.0, 18.0, 20.0, 24.0, 26.0, 28.0, 30.0]
    assert own["label"].to_list() == ["W", "W", "N1", "N2", "W", "N2", "W", "W"]
    rows = own["window"].to_numpy()
    np.testing.assert_allclose(windows.values(rows)[2, :, 0], physical(held[1], "eeg")[360:400], rtol=1e-6)
    assert labels(windows, rows).tolist() == [0, 0, 1, 2, 0, 2, 0, 0]
    left_out = windows.manifest.left_out
    assert left_out == {"unlabelled_epochs": 3 * 2, "annotation_out_of_range": 3 * 3, "trimmed": 3 * 11}
    assert "Somebody" not in (tmp_path / "manifest.json").read_text()
    assert sum(len(windows[s]) for s in splits.SPLITS) + sum(left_out.values()) == 3 * (20 + 3 + 1)


def test_without_another_class_nothing_is_trimmed_and_a_finding_is_reported(tmp_path: Path) -> None:
    held = [replace(r, annotations=[Annotation(0.0, 30.0, "Sleep stage W")]) for r in records(3)]
    windows = build(held, tmp_path, view="staging")
    assert len(windows) == 45
    codes = {f.code for f in windows.manifest.findings if f.level == "warning"}
    assert Reason.CLASS_MISSING in codes


def test_windows_are_centred_on_their_epoch(tmp_path: Path) -> None:
    windows = build(records(3), tmp_path, view="staging", window=80)
    starts = windows.index.filter(pl.col("subject_id") == "s000")["start"].to_list()
    assert starts[:2] == [1.0, 3.0]  # that of the first epoch would begin at -1


def test_windows_never_cross_a_gap(tmp_path: Path) -> None:
    """Two segments of 11 s and 9 s, 30 s apart; the epoch from 10 to 12 s has no signal to its end."""
    eeg = record(0).signals[0]
    parts = [eeg._replace(samples=eeg.samples[:220]), eeg._replace(samples=eeg.samples[220:400], onset=41.0)]
    held = [record(0, signals=parts, annotations=[Annotation(0.0, 50.0, "Sleep stage 1")])]
    windows = build(held, tmp_path, view="staging", normalise="none")
    assert windows.index["start"].to_list() == [0.0, 2.0, 4.0, 6.0, 8.0, 42.0, 44.0, 46.0, 48.0]
    for row, start in enumerate(windows.index["start"]):
        first = round(start * RATE) if start < 41 else 220 + round((start - 41) * RATE)
        np.testing.assert_allclose(windows.values([row])[0, :, 0], physical(held[0], "eeg")[first : first + 40], rtol=1e-6)
    slid = build(held, tmp_path / "b", view="age", normalise="none", window=50)
    assert slid.index["start"].to_list() == [0.0, 2.5, 5.0, 7.5, 41.0, 43.5, 46.0]


def test_recording_level_labels(tmp_path: Path) -> None:
    held = [*records(6), record(6, attributes={}), record(7, attributes={"age": float("nan"), "sex": None, "finds": ["A", "Z"]})]
    age = build(held, tmp_path / "age", view="age")
    assert labels(age).tolist() == [20.0 + int(s[1:]) for s in age.subjects()]
    assert (age.classes, age.class_names, labels(age).dtype.name) == (1, (), "float32")
    ages = np.unique(labels(age["train"])).astype(float)
    assert age.statistics.target.model_dump() == {
        "n": len(age["train"]),
        "mean": pytest.approx(ages.mean()),
        "std": pytest.approx(ages.std()),
    }
    assert age.manifest.left_out == {"unmatched_labels": 2}
    sex = build(held, tmp_path / "sex", view="sex")
    assert sex.class_names == ("f", "m")
    assert [sex.class_names[k] for k in labels(sex)] == ["mf"[int(s[1:]) % 2] for s in sex.subjects()]
    finds = build(held, tmp_path / "finds", view="finds")
    wanted = [[float(name in (["A", "C"][: int(s[1:]) % 3] if s < "s007" else ["A"])) for name in "ABC"] for s in finds.subjects()]
    assert labels(finds).tolist() == wanted
    assert (finds.classes, labels(finds).dtype.name) == (3, "float32")
    assert finds.manifest.left_out == {"unmatched_labels": 1, "unknown_label": 1}


# ---- rates, units, missing values


def at_rate(signal: Signal, rate: float, **choices: Any) -> np.ndarray:
    plan: Any = SimpleNamespace(rate=rate, **{"resample": False, "decimate": (), "hold": (), "resampling": None, **choices})
    return cutting.resample(signal, plan)


def test_interpolation_is_exact_on_lines_and_keeps_samples() -> None:
    line = Signal("x", 4.0, "", np.arange(0, 400, 10, dtype=np.int16))
    out = at_rate(line, 100.0)
    assert (out.dtype.name, len(out)) == ("int16", 1000)
    np.testing.assert_array_equal(out[:976], np.rint(np.arange(976) * 0.4))
    np.testing.assert_array_equal(out[976:], 390)
    ragged = Signal("x", 64.0, "", np.random.default_rng(0).normal(size=65).astype(np.float32))
    at = np.arange(101) * 0.64
    np.testing.assert_allclose(at_rate(ragged, 100.0), np.interp(at, np.arange(65), ragged.samples), atol=1e-6)
    np.testing.assert_array_equal(at_rate(line, 10.0, hold=("x",))[:6], [0, 0, 0, 10, 10, 20])


def test_interpolation_in_steps_equals_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Signal("x", 3.0, "", np.random.default_rng(1).integers(-99, 99, 50).astype(np.int16))
    full = at_rate(slow, 100.0)
    monkeypatch.setattr(cutting, "STEP_VALUES", 7)
    np.testing.assert_array_equal(at_rate(slow, 100.0), full)


def test_interpolation_next_to_a_missing_value_keeps_what_was_seen() -> None:
    out = at_rate(Signal("x", 1.0, "", np.array([1, np.nan, 3, 4], np.float32)), 2.0)
    np.testing.assert_array_equal(out, np.array([1, np.nan, np.nan, np.nan, 3, 3.5, 4, 4], np.float32))


def test_faster_channels_are_refused_unless_the_rate_is_requested(tmp_path: Path) -> None:
    held = [replace(r, signals=[s._replace(rate=s.rate * 2) for s in r.signals]) for r in records(3)]
    with pytest.raises(UserError, match=r"Give --rate 20") as error:
        build(held, tmp_path, view="staging")
    assert (error.value.code, error.value.exit_code) == (Reason.SAMPLING_RATE, Exit.REFUSED)
    assert [p.name for p in tmp_path.iterdir()] == [storage.LOCK]
    windows = build(held, tmp_path, rate=20.0)
    assert windows.manifest.shards[0].dtype == "float32"
    assert len(windows) == 3 * 7


def test_resampling_filters_the_full_segment() -> None:
    """NU11: a 45-Hz tone at 200 Hz is gone at 60 Hz, a 10-Hz tone stays; length floor(n * 60 / 200); no edges, no drop at the ends."""
    at = np.arange(200 * 30 + 7) / 200
    high = at_rate(Signal("x", 200.0, "", np.sin(2 * np.pi * 45 * at).astype(np.float32)), 60.0, resample=True)
    assert len(high) == int((200 * 30 + 7) * 0.3)
    assert 20 * np.log10(np.abs(high[60:-60]).max()) < -40
    low = at_rate(Signal("x", 200.0, "", np.sin(2 * np.pi * 10 * at).astype(np.float32)), 60.0, decimate=("x",))
    np.testing.assert_allclose(low[60:-60], np.sin(2 * np.pi * 10 * np.arange(len(low)) / 60)[60:-60], atol=5e-3)
    flat = at_rate(Signal("x", 200.0, "", np.full(999, 1000, np.int16)), 60.0, resample=True)
    np.testing.assert_allclose(flat, 1000, rtol=1e-6)
    gap = np.full(999, 5.0, np.float32)
    gap[500:600] = np.nan
    out = at_rate(Signal("x", 200.0, "", gap), 60.0, resample=True)
    assert np.isnan(out[150:180]).all()
    np.testing.assert_allclose(np.delete(out, slice(149, 181)), 5, rtol=1e-5)
    assert np.isnan(at_rate(Signal("x", 200.0, "", np.full(10, np.nan, np.float32)), 60.0, resample=True)).all()


def test_units_of_volts_are_brought_together_and_others_left_out(tmp_path: Path) -> None:
    held = records(4)
    for i, (unit, scale) in enumerate((("mV", 1e-3), ("uV", 1.0), ("C", 1.0)), 1):
        first = held[i].signals[0]
        held[i].signals[0] = first._replace(unit=unit, scale=first.scale * scale, offset=first.offset * scale)
    windows = build(held, tmp_path, view="age", normalise="none")
    assert set(windows.subjects()) == {"s000", "s001", "s002"}
    assert windows.manifest.units == ["uV"]
    for i in range(3):
        row = int(np.flatnonzero(windows.subjects() == f"s00{i}")[0])
        volts = physical(held[i], "eeg")[:100] * (1000 if i == 1 else 1)
        np.testing.assert_allclose(windows.values([row])[0, :, 0], volts, rtol=1e-5)
    assert windows.manifest.left_out == {"unit": 1}


def missing(held: list[Record]) -> list[Record]:
    """The second recording has float32 eeg with a stretch of NaN, the third none observed."""
    first = held[1].signals[0].samples.astype(np.float32)
    first[30:70] = np.nan
    held[1].signals[0] = held[1].signals[0]._replace(samples=first)
    held[2].signals[0] = held[2].signals[0]._replace(samples=np.full(600, np.nan, np.float32))
    return held


@pytest.mark.parametrize("normalise", ["channel", "window", "none"])
def test_missing_values_are_zero_and_masked(tmp_path: Path, normalise: str) -> None:
    held = missing(records(6))
    windows = build(held, tmp_path, normalise=normalise)
    assert [s.dtype for s in windows.manifest.shards] == ["int16", "float32"]
    values, mask = windows.values(), windows.mask()
    assert mask is not None
    assert np.isfinite(values).all()
    assert not values[~mask].any()
    for row, (name, start) in enumerate(windows.index.select("recording_id", "start").iter_rows()):
        found = next(r for r in held if r.recording_id == name)
        wanted = np.isfinite(physical(found, "eeg"))[round(start * RATE) :][:40]
        np.testing.assert_array_equal(mask[row, :, 0], wanted)
        assert mask[row, :, 1:].all()
    n = sum(np.isfinite(physical(r, "eeg")).sum() for r in held if r.subject_id in set(windows["train"].subjects()))
    assert windows.statistics.channels[0].n == n


def test_constant_and_two_valued_channels_stay_finite(tmp_path: Path) -> None:
    """NU01: a channel without spread in the training split is only centred."""
    held = records(4)
    for r in held:
        r.signals[1] = r.signals[1]._replace(samples=np.full(30, 100, np.int16))
        r.signals[2] = r.signals[2]._replace(samples=(np.arange(30) == 4).astype(np.int16))
    windows = build(held, tmp_path)
    values = windows.values()
    assert np.isfinite(values).all()
    np.testing.assert_allclose(values[..., 1], 0, atol=1e-5)
    assert windows.statistics.channels[1].std == 0
    np.testing.assert_allclose(values[np.isin(windows.subjects(), list(set(windows["train"].subjects())))][..., 2].std(), 1, rtol=1e-3)


# ---- statistics


@given(st.lists(st.lists(st.integers(-32768, 32767), min_size=1, max_size=20), min_size=1, max_size=8), st.randoms())
@settings(max_examples=60, deadline=None)
def test_moments_are_those_of_the_union_in_any_order(parts: list[list[int]], random: Any) -> None:
    scale, offset = np.array([0.3]), np.array([1e4])
    found = [moments.compute_moments(np.array(part, np.int16).reshape(1, -1, 1), scale, offset)[0] for part in parts]
    pooled = moments.pool_moments(found)
    x = np.concatenate(parts) * 0.3
    assert pooled.mean - 1e4 == pytest.approx(x.mean(), abs=1e-7)
    assert pooled.std == pytest.approx(x.std(), rel=1e-9, abs=1e-9)
    random.shuffle(found)
    assert moments.pool_moments(found) == pooled
    digital = np.array(parts[0], np.int16).reshape(1, -1, 1)
    exact, floats = (
        moments.compute_moments(digital, scale, offset)[0],
        moments.compute_moments(digital * scale + offset, np.ones(1), np.zeros(1))[0],
    )
    assert floats.n == exact.n
    assert floats.mean == pytest.approx(exact.mean)


def test_statistics_know_nothing_of_other_splits(tmp_path: Path) -> None:
    """ST05: other data, other dtype and more recordings of the subjects in validation and test change no bit of statistics.json."""
    held = records()
    first = build(held, tmp_path / "a", view="staging")
    others = {*first["test"].subjects(), *first["validation"].subjects()}
    changed = [r if r.subject_id not in others else record(int(r.subject_id[1:]), seed=999) for r in held]
    odd = next(r for r in changed if r.subject_id in others)
    odd.signals[0] = odd.signals[0]._replace(samples=odd.signals[0].samples.astype(np.float32) * np.nan)
    second = build([*changed, *(record(int(s[1:]), night=1) for s in sorted(others))], tmp_path / "b", view="staging")
    assert (tmp_path / "a/statistics.json").read_bytes() == (tmp_path / "b/statistics.json").read_bytes()
    assert first.fingerprint != second.fingerprint
    assert first.values(first["train"].rows).tobytes() == second["train"].values().tobytes()


def test_statistics_do_not_depend_on_the_order_of_recordings(tmp_path: Path) -> None:
    held = records()
    build(held, tmp_path / "a")
    build(held[::-1], tmp_path / "b")
    assert (tmp_path / "a/statistics.json").read_bytes() == (tmp_path / "b/statistics.json").read_bytes()


# ---- the folder


def test_same_input_same_bytes_and_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = records()
    first = build(held, tmp_path / "a", view="staging")
    build(held, tmp_path / "b", view="staging")
    assert files(tmp_path / "a") == files(tmp_path / "b")
    stamps = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "a").iterdir()}
    monkeypatch.setattr(storage, "lock", None)
    again = build(held, tmp_path / "a", view="staging")
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "a").iterdir()} == stamps
    assert again.fingerprint == first.fingerprint == json.loads((tmp_path / "a/manifest.json").read_text())["manifest_sha256"]


def test_size_of_files_does_not_change_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    second = build([record(i, seed=50 + i) for i in range(5)], tmp_path, view="staging", generation=2)
    assert first.values().tobytes() == old  # the map that is open lives on
    assert second.values().tobytes() != old
    names = {p.name for p in tmp_path.iterdir()} - {storage.LOCK, manifests.MANIFEST}
    assert names == set(second.manifest.files)


def test_a_failed_attempt_leaves_the_former_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = records(5)
    build(held, tmp_path)
    before = files(tmp_path)
    broken = [*held[:3], replace(held[3], signals=[held[3].signals[0]._replace(rate=1e3), *held[3].signals[1:]])]
    with pytest.raises(UserError):
        build(broken, tmp_path, generation=2)
    assert files(tmp_path) == before
    assert len(tokens.open_tokens(tmp_path)) == 75


def test_a_stop_at_any_write_leaves_the_former_set_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert {p.name for p in folder.iterdir()} == {p.name for p in (tmp_path / "clean").iterdir()}
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
    for make in (lambda: build(records(2), tmp_path / "t", channels=["eeg", "tenp"]), lambda: planned(records(2), channels=["tenp"])):
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
    duplicates = [f for f in build(held, tmp_path).manifest.findings if f.code == Reason.DUPLICATE_ACROSS_SPLITS]
    assert [f.count for f in duplicates] == [1]


def test_dry_run_counts_what_build_makes(tmp_path: Path) -> None:
    held = records(9)
    windows = build(held, tmp_path, view="staging")
    memory: Any = Memory(held)
    planned = tokens.plan(memory, view="staging")
    assert planned["audit"] == {split: counts.model_dump() for split, counts in windows.manifest.counts.items()}
    assert planned["windows"] == len(windows)
    assert planned["bytes"] == sum(shard.nbytes for shard in windows.shards)
    assert planned["findings"] == [finding.model_dump() for finding in windows.manifest.findings]


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 1
    elif how == "append":
        data += bytes(512)
    elif how == "truncate":
        del data[-64:]
    path.write_bytes(data)
    if how == "delete":
        path.unlink()


STORED = ("windows-*.arrow", "index.parquet", "recordings.parquet", "statistics.json", "manifest.json")
DAMAGE = [(pattern, how) for pattern in STORED for how in ("flip", "append", "truncate", "delete")][:-1]  # the last is an unfinished set


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
    moved = pl.when(pl.col("window") == row).then(pl.lit("train")).otherwise("split")
    index.with_columns(split=moved).write_parquet(tmp_path / "index.parquet")
    body = windows.manifest.model_dump(mode="json", exclude={"manifest_sha256"})
    sha256, size = storage.hash_with_size(tmp_path / "index.parquet")
    body["files"] = {**body["files"], "index.parquet": {"sha256": sha256, "size": size}}
    storage.write_json(tmp_path / "manifest.json", {**body, "manifest_sha256": storage.fingerprint(body)})
    with pytest.raises(UserError) as error:
        tokens.open_tokens(tmp_path)
    assert (error.value.code, error.value.exit_code) == (Reason.SUBJECT_LEAKAGE, Exit.REFUSED)


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
    body = windows.manifest.model_dump(mode="json", exclude={"manifest_sha256"}) | {"format_version": 99}
    storage.write_json(tmp_path / "manifest.json", {**body, "manifest_sha256": storage.fingerprint(body)})
    with pytest.raises(UserError, match="99") as error:
        tokens.open_tokens(tmp_path)
    assert error.value.code == Reason.UNSUPPORTED_FORMAT


def test_progress_is_reported(tmp_path: Path) -> None:
    events: list[tuple[str, int, int | None]] = []
    report: Callable[[str, int, int | None], None] = lambda what, done, total: events.append((what, done, total))  # noqa: E731
    build(records(3), tmp_path, progress=report)
    assert events == [("windows", i, 3) for i in range(4)]


# ---- the real path


def test_synthetic_nights_from_ingest_to_windows(tmp_path: Path) -> None:
    """Every stage of every epoch is the hypnogram's, every window the recording's own samples."""
    cache.ingest("synthetic", None, tmp_path / "cache")
    windows = tokens.build(tmp_path / "cache", view="staging", out=tmp_path / "tokens", normalise="none")
    assert windows.notices == []
    for found in itertools.islice(cache.open_cache(tmp_path / "cache").records(), 4):
        own = windows.index.filter(pl.col("recording_id") == found.recording_id)
        stages = [a for a in found.annotations if a.label.startswith("Sleep stage") and a.label[-1] in "W123R"]
        assert own.height == sum(round(a.duration / 30) for a in stages)
        stage = np.repeat(
            [{"1": "N1", "2": "N2", "3": "N3", "R": "REM"}.get(a.label[-1], "W") for a in stages], [round(a.duration / 30) for a in stages]
        )
        assert own["label"].to_list() == stage.tolist()
        values = windows.values(own["window"].to_numpy())[..., 0]
        np.testing.assert_allclose(values.ravel(), physical(found, "EEG Fpz-Cz")[: values.size], rtol=1e-5, atol=1e-4)
    again = tokens.build(tmp_path / "cache", view="staging", out=tmp_path / "tokens", normalise="none")
    assert again.fingerprint == windows.fingerprint
    shard = next((tmp_path / "cache").glob("recordings-*.parquet"))
    damage(shard, "flip")
    with pytest.raises(UserError) as error:
        tokens.build(tmp_path / "cache", view="staging", out=tmp_path / "other")
    assert (error.value.exit_code, (tmp_path / "other").exists()) == (Exit.INTEGRITY, False)


def test_sleep_edf_sample_gives_ten_epochs_of_wake(tmp_path: Path) -> None:
    """300 s of the official SC4001: seven channels and the hypnogram of the full night, clipped to the signal."""
    source = require_sample(SAMPLES / "sleep-edf")
    cache.ingest("sleep-edf", source, tmp_path / "cache")
    staging = tokens.build(tmp_path / "cache", view="staging", out=tmp_path / "staging")
    assert staging.index["label"].to_list() == ["W"] * 10
    assert staging.index["split"].to_list() == ["train"] * 10
    codes = {f.code for f in staging.manifest.findings}
    assert {Reason.CLASS_MISSING, Reason.SPLIT_EMPTY} <= codes
    full = tokens.build(tmp_path / "cache", out=tmp_path / "whole", normalise="none")
    assert full.values().shape == (10, 3000, 7)
    found = next(iter(cache.open_cache(tmp_path / "cache").records()))
    marker = physical(found, "Event marker")
    np.testing.assert_allclose(full.values()[..., 6].ravel(), np.repeat(marker, 100), rtol=1e-6)
    temp = np.interp(np.arange(30_000) / 100, np.arange(300), physical(found, "Temp rectal"))
    scale = next(s.scale for s in found.signals if s.channel == "Temp rectal")
    assert np.abs(full.values()[..., 5].ravel() - temp).max() <= scale / 2 + 1e-5
