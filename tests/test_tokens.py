"""Cache to windows: epochs, trimming, rates, statistics. Oracles: slices of physical values, closed
forms.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import small
from hypothesis import given, settings
from hypothesis import strategies as st
from made_cache import RATE, build, damage, labels, missing, physical, record, records
from made_cache import tiny as tiny
from samples import SAMPLES, require_sample

from bitimely_core import cache, tokens
from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.store import locks
from bitimely_core.tokens import moments, resampling, splits
from bitimely_core.types import Annotation, Signal

# ---- what is in a window


def test_values_are_the_recordings_own(tmp_path: Path) -> None:
    """eeg as stored; temp between its samples on a line, marker held; less the training mean, over
    the training deviation.
    """
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
        raw[name] = np.stack(
            [physical(found, "eeg"), digital * temp.scale + temp.offset, marker], axis=1
        )
        assert (
            np.abs(np.interp(at, np.arange(30), physical(found, "temp")) - raw[name][:, 1]).max()
            <= temp.scale / 2 + 1e-9
        )
    train = np.concatenate(
        [raw[name] for name in windows["train"].index["recording_id"].unique(maintain_order=True)]
    )
    mean, std = train.mean(0), train.std(0)
    for row, (name, start) in enumerate(windows.index.select("recording_id", "start").iter_rows()):
        wanted = (raw[name][round(start * RATE) :][:40] - mean) / std
        np.testing.assert_allclose(windows.values([row])[0], wanted, atol=2e-5)
    assert windows.mask() is None
    stored = (
        [c.mean for c in windows.statistics.channels],
        [c.std for c in windows.statistics.channels],
    )
    np.testing.assert_allclose(stored, [mean, std], rtol=1e-12)
    assert (windows.channels, windows.length, windows.rate, windows.classes, windows.task) == (
        3,
        40,
        RATE,
        0,
        "none",
    )
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
    np.testing.assert_allclose(
        windows.values([0])[0, :, 0],
        physical(found, "eeg")[round(row["start"] * RATE) :][:40],
        rtol=1e-6,
    )


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
    windows = build(
        held, tmp_path / "a", window=50, stride=25, channels=["marker", "eeg"], normalise="none"
    )
    assert len(windows) == 3 * (600 - 50 + 25) // 25
    assert windows.channel_names == ("marker", "eeg")
    assert windows.index["start"].to_list()[:3] == [0.0, 1.25, 2.5]
    np.testing.assert_allclose(
        windows.values([1])[0, :, 1], physical(held[0], "eeg")[25:75], rtol=1e-6
    )
    faster = build(held, tmp_path / "b", rate=40.0)
    assert (faster.length, faster.rate, len(faster)) == (80, 40.0, len(held) * 15)
    with pytest.raises(UserError, match="labelled epoch"):
        build(held, tmp_path / "c", view="staging", stride=3)
    for wrong in (
        {"rate": 0.0},
        {"rate": float("nan")},
        {"window": 0},
        {"stride": 0},
        {"channels": ["eeg", "eeg"]},
    ):
        with pytest.raises(UserError) as error:
            build(held, tmp_path / "c", **wrong)
        assert error.value.exit_code == Exit.USAGE
    assert not (tmp_path / "c" / "manifest.json").exists()


def test_a_view_that_leaves_all_open_follows_the_recordings(tmp_path: Path) -> None:
    windows = build(records(3, seconds=7), tmp_path, view="open")
    assert (windows.channel_names, windows.rate, windows.length, len(windows)) == (
        ("eeg", "temp"),  # a marker is no input
        RATE,
        140,
        3,
    )


# ---- epochs, labels, trimming


def test_one_window_a_scored_epoch_trimmed_to_4_seconds_of_wake(tmp_path: Path) -> None:
    stages = ["W"] * 9 + ["1", "2", "?", "W", "2"] + ["W"] * 6  # 20 epochs of 2 s
    notes = [
        Annotation(0.0, 18.0, "Sleep stage W"),
        *(Annotation(2.0 * i, 2.0, f"Sleep stage {stages[i]}") for i in range(9, 20)),
    ]
    notes += [Annotation(40.0, 6.0, "Sleep stage 2"), Annotation(1.0, 3.0, "Mrs Somebody woke")]
    held = [replace(r, annotations=notes) for r in records(3, seconds=40)]
    windows = build(held, tmp_path, view="staging", normalise="none")
    own = windows.index.filter(pl.col("subject_id") == "s001")
    assert own["start"].to_list() == [14.0, 16.0, 18.0, 20.0, 24.0, 26.0, 28.0, 30.0]
    assert own["label"].to_list() == ["W", "W", "N1", "N2", "W", "N2", "W", "W"]
    rows = own["window"].to_numpy()
    np.testing.assert_allclose(
        windows.values(rows)[2, :, 0], physical(held[1], "eeg")[360:400], rtol=1e-6
    )
    assert labels(windows, rows).tolist() == [0, 0, 1, 2, 0, 2, 0, 0]
    left_out = windows.manifest.left_out
    assert left_out == {
        "unlabelled_epochs": 3 * 2,
        "annotation_out_of_range": 3 * 3,
        "trimmed": 3 * 11,
    }
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
    """Two segments of 11 s and 9 s, 30 s apart; the epoch from 10 to 12 s has no signal to its
    end.
    """
    eeg = record(0).signals[0]
    parts = [
        eeg._replace(samples=eeg.samples[:220]),
        eeg._replace(samples=eeg.samples[220:400], onset=41.0),
    ]
    held = [record(0, signals=parts, annotations=[Annotation(0.0, 50.0, "Sleep stage 1")])]
    windows = build(held, tmp_path, view="staging", normalise="none")
    assert windows.index["start"].to_list() == [0.0, 2.0, 4.0, 6.0, 8.0, 42.0, 44.0, 46.0, 48.0]
    for row, start in enumerate(windows.index["start"]):
        first = round(start * RATE) if start < 41 else 220 + round((start - 41) * RATE)
        np.testing.assert_allclose(
            windows.values([row])[0, :, 0], physical(held[0], "eeg")[first : first + 40], rtol=1e-6
        )
    slid = build(held, tmp_path / "b", view="age", normalise="none", window=50)
    assert slid.index["start"].to_list() == [0.0, 2.5, 5.0, 7.5, 41.0, 43.5, 46.0]


def test_recording_level_labels(tmp_path: Path) -> None:
    held = [
        *records(6),
        record(6, attributes={}),
        record(7, attributes={"age": float("nan"), "sex": None, "finds": ["A", "Z"]}),
    ]
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
    assert [sex.class_names[k] for k in labels(sex)] == [
        "mf"[int(s[1:]) % 2] for s in sex.subjects()
    ]
    finds = build(held, tmp_path / "finds", view="finds")
    wanted = [
        [float(name in (["A", "C"][: int(s[1:]) % 3] if s < "s007" else ["A"])) for name in "ABC"]
        for s in finds.subjects()
    ]
    assert labels(finds).tolist() == wanted
    assert (finds.classes, labels(finds).dtype.name) == (3, "float32")
    assert finds.manifest.left_out == {"unmatched_labels": 1, "unknown_label": 1}


# ---- rates, units, missing values


def at_rate(signal: Signal, rate: float, **choices: Any) -> np.ndarray:
    plan: Any = SimpleNamespace(
        rate=rate, **{"resample": False, "decimate": (), "hold": (), "resampling": None, **choices}
    )
    return resampling.resample(signal, plan)


def test_interpolation_is_exact_on_lines_and_keeps_samples() -> None:
    line = Signal("x", 4.0, "", np.arange(0, 400, 10, dtype=np.int16))
    out = at_rate(line, 100.0)
    assert (out.dtype.name, len(out)) == ("int16", 1000)
    np.testing.assert_array_equal(out[:976], np.rint(np.arange(976) * 0.4))
    np.testing.assert_array_equal(out[976:], 390)
    ragged = Signal("x", 64.0, "", np.random.default_rng(0).normal(size=65).astype(np.float32))
    at = np.arange(101) * 0.64
    np.testing.assert_allclose(
        at_rate(ragged, 100.0), np.interp(at, np.arange(65), ragged.samples), atol=1e-6
    )
    np.testing.assert_array_equal(at_rate(line, 10.0, hold=("x",))[:6], [0, 0, 0, 10, 10, 20])


def test_interpolation_in_steps_equals_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Signal("x", 3.0, "", np.random.default_rng(1).integers(-99, 99, 50).astype(np.int16))
    full = at_rate(slow, 100.0)
    monkeypatch.setattr(resampling, "STEP_VALUES", 7)
    np.testing.assert_array_equal(at_rate(slow, 100.0), full)


def test_interpolation_next_to_a_missing_value_keeps_what_was_seen() -> None:
    out = at_rate(Signal("x", 1.0, "", np.array([1, np.nan, 3, 4], np.float32)), 2.0)
    np.testing.assert_array_equal(
        out, np.array([1, np.nan, np.nan, np.nan, 3, 3.5, 4, 4], np.float32)
    )


def test_faster_channels_are_refused_unless_the_rate_is_requested(tmp_path: Path) -> None:
    held = [
        replace(r, signals=[s._replace(rate=s.rate * 2) for s in r.signals]) for r in records(3)
    ]
    with pytest.raises(UserError, match=r"Give --rate 20") as error:
        build(held, tmp_path, view="staging")
    assert (error.value.code, error.value.exit_code) == (Reason.SAMPLING_RATE, Exit.REFUSED)
    assert [p.name for p in tmp_path.iterdir()] == [locks.LOCK_FILE]
    windows = build(held, tmp_path, rate=20.0)
    assert windows.manifest.shards[0].dtype == "float32"
    assert len(windows) == 3 * 7


def test_resampling_filters_the_full_segment() -> None:
    """NU11: a 45-Hz tone at 200 Hz is gone at 60 Hz, a 10-Hz tone stays; length floor(n * 60 /
    200); no edges, no drop at the ends.
    """
    at = np.arange(200 * 30 + 7) / 200
    high = at_rate(
        Signal("x", 200.0, "", np.sin(2 * np.pi * 45 * at).astype(np.float32)), 60.0, resample=True
    )
    assert len(high) == int((200 * 30 + 7) * 0.3)
    assert 20 * np.log10(np.abs(high[60:-60]).max()) < -40
    low = at_rate(
        Signal("x", 200.0, "", np.sin(2 * np.pi * 10 * at).astype(np.float32)),
        60.0,
        decimate=("x",),
    )
    np.testing.assert_allclose(
        low[60:-60], np.sin(2 * np.pi * 10 * np.arange(len(low)) / 60)[60:-60], atol=5e-3
    )
    flat = at_rate(Signal("x", 200.0, "", np.full(999, 1000, np.int16)), 60.0, resample=True)
    np.testing.assert_allclose(flat, 1000, rtol=1e-6)
    gap = np.full(999, 5.0, np.float32)
    gap[500:600] = np.nan
    out = at_rate(Signal("x", 200.0, "", gap), 60.0, resample=True)
    assert np.isnan(out[150:180]).all()
    np.testing.assert_allclose(np.delete(out, slice(149, 181)), 5, rtol=1e-5)
    assert np.isnan(
        at_rate(Signal("x", 200.0, "", np.full(10, np.nan, np.float32)), 60.0, resample=True)
    ).all()


def test_units_of_volts_are_brought_together_and_others_left_out(tmp_path: Path) -> None:
    held = records(4)
    for i, (unit, scale) in enumerate((("mV", 1e-3), ("uV", 1.0), ("C", 1.0)), 1):
        first = held[i].signals[0]
        held[i].signals[0] = first._replace(
            unit=unit, scale=first.scale * scale, offset=first.offset * scale
        )
    windows = build(held, tmp_path, view="age", normalise="none")
    assert set(windows.subjects()) == {"s000", "s001", "s002"}
    assert windows.manifest.units == ["uV"]
    for i in range(3):
        row = int(np.flatnonzero(windows.subjects() == f"s00{i}")[0])
        volts = physical(held[i], "eeg")[:100] * (1000 if i == 1 else 1)
        np.testing.assert_allclose(windows.values([row])[0, :, 0], volts, rtol=1e-5)
    assert windows.manifest.left_out == {"unit": 1}


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
    n = sum(
        np.isfinite(physical(r, "eeg")).sum()
        for r in held
        if r.subject_id in set(windows["train"].subjects())
    )
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
    np.testing.assert_allclose(
        values[np.isin(windows.subjects(), list(set(windows["train"].subjects())))][..., 2].std(),
        1,
        rtol=1e-3,
    )


# ---- statistics


@given(
    st.lists(st.lists(st.integers(-32768, 32767), min_size=1, max_size=20), min_size=1, max_size=8),
    st.randoms(),
)
@settings(max_examples=60, deadline=None)
def test_moments_are_those_of_the_union_in_any_order(parts: list[list[int]], random: Any) -> None:
    scale, offset = np.array([0.3]), np.array([1e4])
    found = [
        moments.compute_moments(np.array(part, np.int16).reshape(1, -1, 1), scale, offset)[0]
        for part in parts
    ]
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
    """ST05: other data, other dtype and more recordings of the subjects in validation and test
    change no bit of statistics.json.
    """
    held = records()
    first = build(held, tmp_path / "a", view="staging")
    others = {*first["test"].subjects(), *first["validation"].subjects()}
    changed = [
        r if r.subject_id not in others else record(int(r.subject_id[1:]), seed=999) for r in held
    ]
    odd = next(r for r in changed if r.subject_id in others)
    odd.signals[0] = odd.signals[0]._replace(
        samples=odd.signals[0].samples.astype(np.float32) * np.nan
    )
    second = build(
        [*changed, *(record(int(s[1:]), night=1) for s in sorted(others))],
        tmp_path / "b",
        view="staging",
    )
    assert (tmp_path / "a/statistics.json").read_bytes() == (
        tmp_path / "b/statistics.json"
    ).read_bytes()
    assert first.fingerprint != second.fingerprint
    assert first.values(first["train"].rows).tobytes() == second["train"].values().tobytes()


def test_windows_without_a_sample_are_left_out_and_counted_by_split(tmp_path: Path) -> None:
    """Window by window what the set without gaps has; a window with one sample stays, and channels
    that are missing make none empty.
    """
    held, gaps = records(24), records(24)
    complete = build(held, tmp_path / "a", view="staging", normalise="none")
    subjects = {split: complete[split].subjects()[0] for split in splits.SPLITS}
    for found in gaps:
        if found.subject_id in subjects.values():
            x = found.signals[0].samples.astype(np.float32)
            x[40:120] = np.nan  # the second and the third epoch
            x[200 if found.subject_id == subjects["train"] else 119] = 7.0
            found.signals[0] = found.signals[0]._replace(samples=x)
    windows = build(gaps, tmp_path / "b", view="staging", normalise="none")
    gone = {
        (name, start)
        for split, name in subjects.items()
        for start in ((2.0, 4.0) if split == "train" else (2.0,))
    }
    places = [(row["subject_id"], row["start"]) for row in complete.index.iter_rows(named=True)]
    left = [place for place in places if place not in gone]
    assert sorted(
        (row["subject_id"], row["start"]) for row in windows.index.iter_rows(named=True)
    ) == sorted(left)
    for row, place in enumerate(windows.index.select("subject_id", "start").iter_rows()):
        now, then = windows.values([row]), complete.values([places.index(place)])
        mask = windows.mask([row])
        assert mask is not None
        assert mask.any()
        if place[0] not in subjects.values():
            assert np.array_equal(now, then)
        assert labels(windows, [row]) == labels(complete, [places.index(place)])
    assert windows.index["window"].to_list() == list(range(len(left)))
    counts = windows.manifest.counts
    assert {split: counts[split].empty for split in splits.SPLITS} == {
        "train": 2,
        "validation": 1,
        "test": 1,
    }
    assert windows.manifest.left_out["empty_windows"] == 4
    finding = next(one for one in windows.manifest.findings if one.code == Reason.MISSING_VALUES)
    assert (
        "4 windows without a sample were left out (2 train, 1 validation, 1 test)"
        in finding.message
    )
    silent = [
        replace(
            one,
            signals=[
                one.signals[0]._replace(samples=np.full(600, np.nan, np.float32)),
                *one.signals[1:],
            ],
        )
        for one in gaps
    ]
    # temp and marker are there
    assert len(build(silent, tmp_path / "c")) == len(build(held, tmp_path / "d"))
    with pytest.raises(UserError, match="no window fits") as refused:
        build(silent, tmp_path / "e", view="staging")
    assert any(one.code == Reason.MISSING_VALUES for one in refused.value.details)


def test_statistics_do_not_depend_on_the_order_of_recordings(tmp_path: Path) -> None:
    held = records()
    build(held, tmp_path / "a")
    build(held[::-1], tmp_path / "b")
    assert (tmp_path / "a/statistics.json").read_bytes() == (
        tmp_path / "b/statistics.json"
    ).read_bytes()


# ---- the real path


def test_synthetic_nights_from_ingest_to_windows(tmp_path: Path) -> None:
    """Every stage of every epoch is the hypnogram's, every window the recording's own samples."""
    nights = small.copy_nights(tmp_path) / "cache" / "synthetic"
    windows = tokens.build(nights, view="staging", out=tmp_path / "tokens", normalise="none")
    assert windows.notices == []
    for found in itertools.islice(cache.open_cache(nights).records(), 4):
        own = windows.index.filter(pl.col("recording_id") == found.recording_id)
        stages = [
            a
            for a in found.annotations
            if a.label.startswith("Sleep stage") and a.label[-1] in "W123R"
        ]
        assert own.height == sum(round(a.duration / 30) for a in stages)
        stage = np.repeat(
            [{"1": "N1", "2": "N2", "3": "N3", "R": "REM"}.get(a.label[-1], "W") for a in stages],
            [round(a.duration / 30) for a in stages],
        )
        assert own["label"].to_list() == stage.tolist()
        values = windows.values(own["window"].to_numpy())[..., 0]
        np.testing.assert_allclose(
            values.ravel(), physical(found, "EEG Fpz-Cz")[: values.size], rtol=1e-5, atol=1e-4
        )
    again = tokens.build(nights, view="staging", out=tmp_path / "tokens", normalise="none")
    assert again.fingerprint == windows.fingerprint
    shard = next(nights.glob("recordings-*.parquet"))
    damage(shard, "flip")
    with pytest.raises(UserError) as error:
        tokens.build(nights, view="staging", out=tmp_path / "other")
    assert (error.value.exit_code, (tmp_path / "other").exists()) == (Exit.INTEGRITY, False)


def test_sleep_edf_sample_gives_ten_epochs_of_wake(tmp_path: Path) -> None:
    """300 s of the official SC4001: seven channels and the hypnogram of the full night, clipped to
    the signal.
    """
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
