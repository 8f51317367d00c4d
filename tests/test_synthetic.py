"""The synthetic cohort: the same for the same seed, planted where it says, learnable and not
trivially so, and readable as Sleep-EDF.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pyedflib
import pytest

from bitimely_core.datasets import synthetic as module
from bitimely_core.datasets.sleep_edf import sleep_edf
from bitimely_core.datasets.synthetic import encode_night, make_night, make_waveform, synthetic
from bitimely_core.errors import Exit, UserError
from bitimely_core.formats.source import scan_folder
from bitimely_core.registry import datasets
from bitimely_core.types import IngestUnit, Record


@pytest.fixture(scope="module")
def cohort() -> list[Record]:
    records = []
    for unit in synthetic(None, {"size": "small", "seed": 0}):
        assert isinstance(unit, IngestUnit)
        assert unit.read is not None
        record = unit.read()
        assert isinstance(record, Record)
        records.append(record)
    return records


def stages_of(record: Record) -> np.ndarray:
    """Stage of each epoch, int [E]."""
    labels = np.full(len(record.signals[0].samples) // 3000, -1)
    for note in record.annotations:
        if note.label in module.SCORES:
            labels[int(note.onset // 30) : int((note.onset + note.duration) // 30)] = (
                module.SCORES.index(note.label)
            )
    return labels


def physical(record: Record, channel: str) -> np.ndarray:
    signal = next(signal for signal in record.signals if signal.channel == channel)
    return signal.samples.astype(float) * signal.scale + signal.offset


def test_small_cohort(cohort: list[Record]) -> None:
    assert len(cohort) == 80
    assert len({record.subject_id for record in cohort}) == 40
    assert len({record.recording_id for record in cohort}) == 80
    for record in cohort:
        assert [(s.channel, s.rate, s.unit) for s in record.signals] == [
            (c.label, 100.0 if i < 3 else 1.0, c.unit) for i, c in enumerate(module.CHANNELS)
        ]
        assert record.findings == []
        assert stages_of(record)[0] == 0
        assert record.start_time is None
    assert sum(np.bincount(stages_of(record), minlength=5) for record in cohort).min() >= 100
    pairs = {
        record.subject_id: {
            r.attributes["age"] for r in cohort if r.subject_id == record.subject_id
        }
        for record in cohort
    }
    assert all(len(ages) == 1 for ages in pairs.values())


def test_seed_decides(cohort: list[Record]) -> None:
    def first(seed: int) -> Record:
        unit = next(synthetic(None, {"size": "small", "seed": seed}))
        assert isinstance(unit, IngestUnit)
        assert unit.read is not None
        record = unit.read()
        assert isinstance(record, Record)
        return record

    assert all(
        np.array_equal(a.samples, b.samples)
        for a, b in zip(first(0).signals, cohort[0].signals, strict=True)
    )
    assert first(0).annotations == cohort[0].annotations
    assert not np.array_equal(first(1).signals[0].samples, cohort[0].signals[0].samples)
    assert not np.array_equal(cohort[0].signals[0].samples, cohort[1].signals[0].samples)


def test_staging_can_be_learned_and_is_not_trivial(cohort: list[Record]) -> None:
    from scipy.signal import welch
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    features, labels, subjects = [], [], []
    for record in cohort:
        rate, power = welch(physical(record, "EEG Fpz-Cz").reshape(-1, 3000), 100, nperseg=400)
        features.append(
            np.log(
                [
                    power[:, (rate >= low) & (rate < high)].mean(1)
                    for low, high in module.BANDS.values()
                ]
            ).T
        )
        labels.append(stages_of(record))
        subjects += [record.subject_id] * len(labels[-1])
    x, y, who = np.concatenate(features), np.concatenate(labels), np.array(subjects)
    right = np.zeros(len(y), bool)
    for fold in range(3):
        test = np.isin(who, np.unique(who)[fold::3])
        fitted = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(
            x[~test], y[~test]
        )
        right[test] = fitted.predict(x[test]) == y[test]
    assert 0.65 < right.mean() < 0.85
    assert np.bincount(y).max() / len(y) < 0.4


def test_planted_waveforms_are_at_their_recorded_positions(cohort: list[Record]) -> None:
    notes = [
        (record, note)
        for record in cohort
        for note in record.annotations
        if note.label.startswith(module.MARK)
    ]
    assert {note.label.removeprefix(module.MARK) for _, note in notes} == set(module.PLANTED)
    ends: dict[str, float] = {}
    matches: list[float] = []
    for record, note in notes:
        assert note.onset >= ends.get(record.recording_id, 0.0) - 1e-9
        ends[record.recording_id] = note.onset + note.duration
        stage = stages_of(record)[int(note.onset // 30)]
        name = note.label.removeprefix(module.MARK)
        assert module.PLANTED[name][0][stage] > 0
        if name == "k-complex":
            at, length = round(note.onset * 100), round(note.duration * 100)
            found = physical(record, "EEG Fpz-Cz")[at : at + length]
            matches.append(float(np.corrcoef(found, make_waveform(name, length))[0, 1]))
    assert np.median(matches) > 0.6
    assert len(matches) > 100


def test_values_without_planting_differ_only_there() -> None:
    night = make_night(20, 0, 3, 1)
    assert all(len(values) == 20 * (3000 if i < 3 else 30) for i, values in enumerate(night.values))
    assert all(np.isfinite(values).all() for values in night.values)
    assert np.abs(night.values[0]).max() < 250  # inside the range of the file


def test_in_the_planted_cohort_only_the_waveforms_distinguish_the_stages() -> None:
    """Between the planted waveforms every stage has the same loudness; in the small cohort N3 is
    far louder than W.
    """
    ratio = {}
    for alike in (False, True):
        level: dict[int, list[float]] = {module.W: [], module.N3: []}
        for subject in range(6):
            night = make_night(20, 0, subject, 1, alike=alike)
            own = night.values[0].copy()
            for note in night.planted:
                own[int(note.onset * 100) : int((note.onset + note.duration) * 100)] = np.nan
            for epoch, stage in enumerate(night.stages):
                if int(stage) in level:
                    level[int(stage)].append(
                        float(np.nanstd(own[3000 * epoch : 3000 * (epoch + 1)]))
                    )
            assert night.planted
        ratio[alike] = np.mean(level[module.N3]) / np.mean(level[module.W])
    assert ratio[False] > 1.8
    assert 0.85 < ratio[True] < 1.15


def test_cohort_on_disk_is_sleep_edf(
    tmp_path: Path, cohort: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module.SIZES, "small", (2, 20))
    folder = tmp_path / "sleep-cassette"
    folder.mkdir()
    for subject, night in itertools.product((0, 1), (1, 2)):
        psg, hypnogram = encode_night("small", 0, subject, night)
        (folder / f"SC4{subject:02d}{night}E0-PSG.edf").write_bytes(psg)
        (folder / f"SC4{subject:02d}{night}EC-Hypnogram.edf").write_bytes(hypnogram)
    units = [
        found for found in sleep_edf(scan_folder(tmp_path), {}) if isinstance(found, IngestUnit)
    ]
    assert [unit.name for unit in units] == ["SC4001", "SC4002", "SC4011", "SC4012"]
    for unit, made in zip(units, cohort, strict=False):
        assert unit.read is not None
        record = unit.read()
        assert isinstance(record, Record)
        assert all(
            np.array_equal(a.samples, b.samples)
            for a, b in zip(record.signals, made.signals, strict=True)
        )
        assert record.annotations == [
            note for note in made.annotations if not note.label.startswith(module.MARK)
        ]
        assert {finding.level for finding in record.findings} == {"info"}
    reader = pyedflib.EdfReader(str(folder / "SC4001E0-PSG.edf"))
    assert np.array_equal(reader.readSignal(0, digital=True), cohort[0].signals[0].samples)
    reader.close()


def test_options_are_checked() -> None:
    for options in ({"size": "smal"}, {"seed": -1}, {"seed": "x"}, {"seed": True}):
        with pytest.raises(UserError) as caught:
            next(synthetic(None, options))
        assert caught.value.exit_code == Exit.USAGE
    assert datasets["synthetic"].facts.needs_source is False
    assert datasets["synthetic"].facts.options == {"size": "small", "seed": 0}


def test_needs_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        next(synthetic(scan_folder(tmp_path), {}))
