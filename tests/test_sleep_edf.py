"""Sleep-EDF: pairing, stages, subject tables; the bad inputs one by one; the real sample."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import BAD_INPUTS, SAMPLES, require_sample

from bitimely_core.datasets import sleep_edf as module
from bitimely_core.datasets.sleep_edf import clip_stages, read_subjects, sleep_edf
from bitimely_core.errors import Finding, Reason, UserError
from bitimely_core.formats import edf, edf_header, edf_writer
from bitimely_core.formats.source import scan_folder
from bitimely_core.registry import datasets
from bitimely_core.types import Annotation, IngestUnit, Record

NAMES = (*module.NEEDED, *module.SLOW)


class Outcome(NamedTuple):
    """Result of a folder: records and quarantined units by name, findings of the folder."""

    records: dict[str, Record]
    refused: dict[str, list[Finding]]
    findings: list[Finding]

    @property
    def all(self) -> list[Finding]:
        noted = [finding for record in self.records.values() for finding in record.findings]
        return [
            *noted,
            *(finding for findings in self.refused.values() for finding in findings),
            *self.findings,
        ]


def ingest(folder: Path, **options: Any) -> Outcome:
    """Read every unit of `folder` as the cache does, pickled as for a worker process."""
    outcome = Outcome({}, {}, [])
    for found in sleep_edf(scan_folder(folder), options):
        if isinstance(found, Finding):
            outcome.findings.append(found)
            continue
        unit: IngestUnit = pickle.loads(pickle.dumps(found))
        if unit.read is None:
            outcome.refused[unit.name] = list(unit.findings)
            continue
        try:
            record = unit.read()
        except UserError as error:
            outcome.refused[unit.name] = [error.finding]
        else:
            assert isinstance(record, Record)
            outcome.records[unit.name] = record
    return outcome


def night(
    folder: Path,
    unit: str = "SC4001",
    *,
    epochs: int = 6,
    labels: list[Annotation] | None = None,
    channels: dict[str, dict[str, Any]] | None = None,
    drop: tuple[str, ...] = (),
    start: datetime = datetime(1989, 4, 24, 16, 13),
    hypnogram_start: datetime | None = None,
    **options: Any,
) -> list[np.ndarray]:
    """Write a small PSG and hypnogram; returns the digital values of the channels that are
    written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(7)
    model, values = [], []
    for i, name in enumerate(NAMES):
        channel = edf_header.EdfChannel(
            name, "uV" if i < 3 else "", -200.0, 200.0, -2048, 2047, 3000 if i < 3 else 30
        )
        channel = channel._replace(**(channels or {}).get(name, {}))
        if name not in drop:
            model.append(channel)
            values.append(rng.integers(-1000, 1000, epochs * channel.samples).astype(np.int16))
    edf_writer.write_edf(
        folder / f"{unit}E0-PSG.edf", model, values, duration=30.0, start=start, **options
    )
    labels = [Annotation(0.0, 30.0 * epochs, "Sleep stage W")] if labels is None else labels
    edf_writer.write_edf(
        folder / f"{unit}EC-Hypnogram.edf", (), (), notes=labels, start=hypnogram_start or start
    )
    return values


def codes(findings: list[Finding], *levels: str) -> set[str]:
    return {
        str(finding.code)
        for finding in findings
        if finding.level in (levels or ("warning", "error"))
    }


# --- the bad inputs


def cases() -> list[str]:
    script = BAD_INPUTS / "make_bad_inputs.py"
    return sorted(re.findall(r'"(EDF\d\d-[\w-]+)"', script.read_text())) if script.is_file() else []


@pytest.fixture(scope="session")
def bad_inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    script = require_sample(BAD_INPUTS / "make_bad_inputs.py")
    out = tmp_path_factory.mktemp("bad_inputs")
    subprocess.run(
        [sys.executable, str(script), str(out), "--only", "EDF"], check=True, capture_output=True
    )
    manifest = json.loads((out / "manifest.json").read_text())
    return {case["id"]: case | {"folder": out / case["command"]["dir"]} for case in manifest}


def test_bad_inputs_exist(bad_inputs: dict[str, dict[str, Any]]) -> None:
    assert sorted(bad_inputs) == cases()


@pytest.mark.parametrize("name", cases())
def test_bad_input(bad_inputs: dict[str, dict[str, Any]], name: str) -> None:
    case = bad_inputs[name]
    outcome = ingest(case["folder"])
    verdicts = {case["expect"], *case["alt"]}
    warned = bool(codes(outcome.all, "warning"))
    if outcome.refused:
        assert "quarantine" in verdicts
        assert set(outcome.refused) <= set(case["bad"]) | {"SC4021"}
    else:
        assert verdicts & {"accept_warn", "accept"}
        assert warned or "accept" in verdicts
    assert {"SC4001", "SC4011"} <= set(outcome.records)
    if case["reason"] != "-":
        wanted = {case["reason"], *case["reason_alt"]}
        noted = [finding for finding in outcome.all if str(finding.code) in wanted]
        assert noted
        assert any(base in finding.message for finding in noted for base in case["names"])
    shown = " ".join(finding.line() for finding in outcome.all) + repr(outcome)
    assert not [
        text for text in [*case["forbid"], "<script>", "<b onclick", "[/red]"] if text in shown
    ]
    assert not any(
        ord(c) < 32 or 127 <= ord(c) < 160 for finding in outcome.all for c in finding.line()
    )
    assert not (case["folder"] / "PWNED").exists()


def test_good_recordings_do_not_depend_on_the_bad_one(
    bad_inputs: dict[str, dict[str, Any]],
) -> None:
    for name in ("EDF04-empty-file", "EDF31-other-fs", "EDF39-overlapping-stages"):
        clean, beside = (
            ingest(bad_inputs["EDF00-control"]["folder"]),
            ingest(bad_inputs[name]["folder"]),
        )
        for unit, record in clean.records.items():
            other = beside.records[unit]
            assert all(
                np.array_equal(a.samples, b.samples)
                for a, b in zip(record.signals, other.signals, strict=True)
            )
            assert record.annotations == other.annotations


def test_short_records_give_the_same_arrays(bad_inputs: dict[str, dict[str, Any]]) -> None:
    # thirty-second records
    long = ingest(bad_inputs["EDF25-formula-label"]["folder"]).records["SC4021"]
    short = ingest(bad_inputs["EDF18-record-1s"]["folder"]).records["SC4021"]
    for a, b in zip(long.signals, short.signals, strict=True):
        assert np.array_equal(a.samples, b.samples)
        assert (a.rate, a.scale, a.offset) == (b.rate, b.scale, b.offset)


# --- the real sample


def test_real_sample() -> None:
    folder = require_sample(SAMPLES / "sleep-edf")
    outcome = ingest(folder)
    assert outcome.findings == []  # subject tables, RECORDS and checksums belong to the layout
    assert outcome.refused == {}
    record = outcome.records["SC4001"]
    assert record.subject_id == "SC4-00"
    assert record.attributes == {"night": 1, "age": 33, "sex": "F"}
    assert record.start_time is None
    assert [(s.channel, s.rate, len(s.samples)) for s in record.signals] == [
        (name, 100.0 if i < 3 else 1.0, 30_000 if i < 3 else 300) for i, name in enumerate(NAMES)
    ]
    assert record.annotations == [Annotation(0.0, 300.0, "Sleep stage W")]
    assert codes(record.findings) == {"annotation_out_of_range"}
    beyond = next(
        finding for finding in record.findings if finding.code == Reason.ANNOTATION_OUT_OF_RANGE
    )
    assert beyond.count == 153  # all scored annotations, the first one in part
    assert beyond.file == "sleep-cassette/SC4001EC-Hypnogram.edf"
    kept = ingest(folder, keep_dates=True).records["SC4001"]
    assert kept.start_time == "1989-04-24T16:13:00"
    assert kept.attributes["lights_off"] == "00:38"
    assert (
        ingest(folder, keep_phi=True).records["SC4001"].attributes["patient"] == "X F X Female_33yr"
    )


def test_real_subject_tables() -> None:
    require_sample(SAMPLES / "sleep-edf" / "SC-subjects.xls")
    cassette, bad = read_subjects(SAMPLES / "sleep-edf" / "SC-subjects.xls")
    assert (len(cassette), bad) == (153, 0)
    assert len({subject for subject, _ in cassette}) == 78
    assert cassette[2, 1] == {"age": 26, "sex": "F", "lights_off": "22:50"}  # F = 1
    telemetry, bad = read_subjects(SAMPLES / "sleep-edf" / "ST-subjects.xls")
    assert (len(telemetry), bad) == (44, 0)
    assert telemetry[1, 1] == {"age": 60, "sex": "M", "lights_off": "23:01"}  # M = 1
    assert telemetry[2, 1] == {"age": 35, "sex": "F", "lights_off": "00:00"}  # temazepam came first
    assert telemetry[2, 2] == {"age": 35, "sex": "F", "lights_off": "23:27"}


def test_damaged_subject_table_is_a_warning(tmp_path: Path) -> None:
    night(tmp_path)
    real = SAMPLES / "sleep-edf" / "SC-subjects.xls"
    damaged = [b"", b"no table", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(4000)]
    damaged += (
        [real.read_bytes()[:9000], real.read_bytes()[:600] + bytes(24000)] if real.is_file() else []
    )
    for data in damaged:
        (tmp_path / "SC-subjects.xls").write_bytes(data)
        outcome = ingest(tmp_path)
        assert [(str(f.code), f.level, f.file) for f in outcome.findings] == [
            ("metadata", "warning", "SC-subjects.xls")
        ]
        assert outcome.records["SC4001"].attributes == {"night": 1}


# --- layout


def test_layout_subjects_and_nights(tmp_path: Path) -> None:
    night(tmp_path / "sleep-cassette", "SC4001")
    night(tmp_path / "sleep-cassette", "SC4002")
    night(tmp_path / "sleep-telemetry" / "deeper", "ST7011")
    night(tmp_path, "SC4821")
    for name in (
        "RECORDS",
        "RECORDS-v1",
        "SHA256SUMS.txt",
        "LICENSE.txt",
        "README.md",
        "index.html",
    ):
        (tmp_path / name).write_text("x")
    outcome = ingest(tmp_path)
    assert {name: (r.subject_id, r.attributes["night"]) for name, r in outcome.records.items()} == {
        "SC4001": ("SC4-00", 1),
        "SC4002": ("SC4-00", 2),
        "SC4821": ("SC4-82", 1),
        "ST7011": ("ST7-01", 1),
    }
    assert codes(outcome.all) == set()
    assert codes(outcome.findings, "info") == {"metadata"}  # no subject tables


def test_halves_and_doubles_do_not_pair(tmp_path: Path) -> None:
    night(tmp_path, "SC4001")
    night(tmp_path, "SC4011")
    night(tmp_path, "SC4021")
    night(tmp_path / "again", "SC4021")
    (tmp_path / "SC4001E0-PSG.edf").unlink()
    (tmp_path / "SC4011EC-Hypnogram.edf").unlink()
    outcome = ingest(tmp_path)
    assert outcome.records == {}
    assert sorted(outcome.refused) == ["SC4001", "SC4011", "SC4021"]
    assert all(codes(findings) == {"missing_pair"} for findings in outcome.refused.values())
    assert "SC4001EC-Hypnogram.edf" in outcome.refused["SC4001"][0].message


def test_ignored_files_are_counted_by_their_endings(tmp_path: Path) -> None:
    night(tmp_path)
    for i in range(60):
        (tmp_path / f"note {i:02d}.{'edf' if i % 3 else 'doc'}").write_bytes(b"x")
    findings = [
        finding for finding in ingest(tmp_path).findings if finding.code == Reason.FILE_NAME
    ]
    assert [(finding.file, finding.count) for finding in findings] == [
        ("note 00.doc", 20),
        ("note 01.edf", 40),
    ]


def test_nothing_recognised(tmp_path: Path) -> None:
    (tmp_path / "x.edf").write_bytes(b"x")
    assert codes(ingest(tmp_path).findings, "error") == {"no_input"}
    with pytest.raises(UserError):
        list(sleep_edf(None, {}))


# --- signals


def test_values_and_calibration(tmp_path: Path) -> None:
    values = night(
        tmp_path,
        channels={
            "EEG Fpz-Cz": {"unit": "mV", "physical_min": -0.2, "physical_max": 0.2},
            "EMG submental": {"unit": "V"},
        },
    )
    record = ingest(tmp_path).records["SC4001"]
    for signal, digital in zip(record.signals, values, strict=True):
        assert np.array_equal(signal.samples, digital)
    physical = {s.channel: s.samples.astype(float) * s.scale + s.offset for s in record.signals}
    steps = 400.0 / 4095
    assert np.allclose(
        physical["EEG Fpz-Cz"], (values[0] + 2048.0) * steps - 200.0, rtol=0, atol=1e-10
    )
    assert {s.channel: s.unit for s in record.signals}["EMG submental"] == "uV"
    assert np.allclose(physical["EMG submental"], 1e6 * ((values[4] + 2048.0) * steps - 200.0))
    assert codes(record.findings) == {"unit"}


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"drop": ("EOG horizontal",)}, "missing_channel"),
        ({"channels": {"EEG Pz-Oz": {"samples": 6000}}}, "sampling_rate"),
        ({"channels": {"EOG horizontal": {"samples": 30}}}, "sampling_rate"),
        ({"channels": {"EEG Pz-Oz": {"unit": "DegC"}}}, "unit"),
        ({"channels": {"EEG Pz-Oz": {"unit": ""}}}, "unit"),
        ({"channels": {"Temp rectal": {"label": "EEG Pz-Oz"}}}, "duplicate_channel"),
        ({"hypnogram_start": datetime(1989, 4, 24, 16, 13, 1)}, "start_mismatch"),
        ({"hypnogram_start": datetime(1989, 4, 25, 16, 13)}, "start_mismatch"),
        ({"labels": [Annotation(0.0, 0.0, "Sleep stage W")]}, "annotation_syntax"),
    ],
)
def test_recordings_that_are_refused(tmp_path: Path, options: dict[str, Any], code: str) -> None:
    night(tmp_path, **options)
    assert codes(ingest(tmp_path).refused["SC4001"]) == {code}


def test_other_channels_may_be_absent_or_faulty(tmp_path: Path) -> None:
    night(tmp_path, drop=("Resp oro-nasal", "Temp rectal"))
    record = ingest(tmp_path).records["SC4001"]
    assert len(record.signals) == 5
    assert codes(record.findings) == set()


def test_the_message_holds_only_the_difference_of_the_starts(tmp_path: Path) -> None:
    night(tmp_path, hypnogram_start=datetime(1989, 4, 24, 15, 43))
    message = ingest(tmp_path).refused["SC4001"][0].message
    assert "1800 s before" in message
    assert "15" not in message.replace("1800", "")


def test_an_unknown_date_leaves_the_time_of_day_to_compare(tmp_path: Path) -> None:
    night(tmp_path, hypnogram_start=datetime(1995, 1, 1, 16, 13))
    psg = tmp_path / "SC4001E0-PSG.edf"
    psg.write_bytes(psg.read_bytes().replace(b"24.04.89", b"00.00.00"))
    assert codes(ingest(tmp_path).records["SC4001"].findings) == {"start_date"}
    night(tmp_path, hypnogram_start=datetime(1995, 1, 1, 17, 13))
    psg.write_bytes(psg.read_bytes().replace(b"24.04.89", b"00.00.00"))
    assert codes(ingest(tmp_path).refused["SC4001"]) == {"start_mismatch"}


def test_labels_stay_where_they_belong_around_a_gap(tmp_path: Path) -> None:
    labels = [
        Annotation(0.0, 90.0, "Sleep stage W"),
        Annotation(90.0, 300.0, "Sleep stage 1"),
        Annotation(390.0, 90.0, "Sleep stage 2"),
    ]
    night(tmp_path, labels=labels, onsets=[0.0, 30.0, 60.0, 390.0, 420.0, 450.0])
    record = ingest(tmp_path).records["SC4001"]
    assert codes(record.findings) == {"discontinuous", "annotation_out_of_range"}
    assert record.annotations == [labels[0], labels[2]]
    assert [(s.onset, len(s.samples)) for s in record.signals if s.channel == "EEG Fpz-Cz"] == [
        (0.0, 9000),
        (390.0, 9000),
    ]


def test_a_fraction_of_a_second_at_the_start_moves_the_labels(tmp_path: Path) -> None:
    night(
        tmp_path,
        labels=[Annotation(30.5, 30.0, "Sleep stage R")],
        onsets=[30 * i + 0.5 for i in range(6)],
    )
    assert ingest(tmp_path).records["SC4001"].annotations == [
        Annotation(30.0, 30.0, "Sleep stage R")
    ]


def test_annotations_inside_the_psg_are_counted(tmp_path: Path) -> None:
    night(tmp_path, notes=[Annotation(3.0, 1.0, "Jane Doe coughs")])
    record = ingest(tmp_path).records["SC4001"]
    assert codes(record.findings, "info") == {"unknown_label"}
    assert "Jane" not in repr(record)


def test_quality_of_needed_channels(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(-900, 900, 18000).astype(np.int16)
    for change, code in (
        (np.full(18000, 5, np.int16), "flat_channel"),
        (np.clip(values, -900, 500), "clipped"),
    ):
        night(tmp_path)
        recording = edf.read_recording(tmp_path / "SC4001E0-PSG.edf")
        arrays = [signal.samples for signal in recording.signals]
        arrays[1] = change
        edf_writer.write_edf(
            tmp_path / "SC4001E0-PSG.edf",
            recording.header.channels,
            arrays,
            duration=30.0,
            start=datetime(1989, 4, 24, 16, 13),
        )
        found = [
            finding
            for finding in ingest(tmp_path).records["SC4001"].findings
            if finding.level == "warning"
        ]
        assert [(str(finding.code), finding.field) for finding in found] == [(code, "EEG Pz-Oz")]
    run = values.copy()
    run[100:6099] = 3
    assert module._longest_run(run, 4000) == 5999
    assert module._longest_run(np.array([1, 1, 1]), 2) == 3
    assert module._longest_run(np.array([1, 2, 2]), 2) == 2


# --- stages


W, N1, N2 = "Sleep stage W", "Sleep stage 1", "Sleep stage 2"


def test_stages_are_clipped_and_counted() -> None:
    kept, findings = clip_stages(
        [Annotation(0, 30, W), Annotation(30, 100, N1), Annotation(130, 60, N2)], [(0.0, 90.0)]
    )
    assert kept == [Annotation(0, 30, W), Annotation(30, 60, N1)]
    assert [(str(f.code), f.level, f.count) for f in findings] == [
        ("annotation_out_of_range", "warning", 2)
    ]
    _, findings = clip_stages(
        [Annotation(0, 90, W), Annotation(90, 30, "Sleep stage ?")], [(0.0, 90.0)]
    )
    assert [(str(f.code), f.level) for f in findings] == [("annotation_out_of_range", "info")]
    _, findings = clip_stages([Annotation(-30, 120, W)], [(0.0, 90.0)])
    assert codes(findings) == {"annotation_out_of_range"}


def test_unknown_texts_are_counted_and_names_not_shown() -> None:
    notes = [
        Annotation(0, 30, "Sleep stage 9"),
        Annotation(30, 30, "Mary Doe"),
        Annotation(60, 30, "sleep stage w"),
        Annotation(90, 30, W),
    ]
    kept, findings = clip_stages(notes, [(0.0, 120.0)])
    assert kept == [Annotation(90, 30, W)]
    assert {(str(f.code), f.found, f.count) for f in findings} == {
        ("unknown_label", "'Sleep stage 9'", 1),
        ("unknown_label", None, 2),
        ("unlabelled_epochs", None, 3),
    }
    assert "Mary" not in repr(findings)


def test_unscored_texts_are_recognised() -> None:
    kept, findings = clip_stages(
        [
            Annotation(0, 30, "Sleep stage ?"),
            Annotation(30, 30, "Movement time"),
            Annotation(60, 30, N1),
        ],
        [(0.0, 90.0)],
    )
    assert len(kept) == 3
    assert findings == []


def test_overlaps() -> None:
    with pytest.raises(UserError) as caught:
        clip_stages([Annotation(0, 90, W), Annotation(60, 60, N2)], [(0.0, 300.0)])
    assert caught.value.code == Reason.ANNOTATION_OVERLAP
    kept, findings = clip_stages(
        [Annotation(0, 90, W), Annotation(60, 60, W), Annotation(60, 60, W)], [(0.0, 120.0)]
    )
    assert kept == [Annotation(0, 90, W), Annotation(90, 30, W)]
    assert [(str(f.code), f.level, f.count) for f in findings] == [
        ("annotation_overlap", "warning", 2)
    ]
    # beyond the signal
    kept, _ = clip_stages(
        [Annotation(0, 90, W), Annotation(120, 60, W), Annotation(130, 20, N2)], [(0.0, 90.0)]
    )
    assert kept == [Annotation(0, 90, W)]


@given(
    st.lists(
        st.tuples(
            st.integers(-4, 12), st.integers(1, 5), st.sampled_from([W, N1, "Sleep stage ?", "x"])
        ),
        max_size=6,
    ),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_every_second_of_signal_has_at_most_one_stage(
    raw: list[tuple[int, int, str]], lengths: list[int]
) -> None:
    segments, at = [], 0.0
    for length in lengths:
        segments.append((at, at + 30.0 * length))
        at += 30.0 * length + 45.0
    notes = [Annotation(15.0 * onset, 15.0 * duration, label) for onset, duration, label in raw]

    def cover(second: float, some: list[Annotation]) -> list[str]:
        return [
            note.label
            for note in some
            if note.label != "x" and note.onset <= second < note.onset + note.duration
        ]

    inside = [begin + 15.0 * i for begin, end in segments for i in range(int((end - begin) / 15))]
    clash = any(len(set(cover(second, notes))) > 1 for second in inside)
    try:
        kept, _ = clip_stages(notes, segments)
    except UserError as error:
        assert clash, error  # noqa: PT017
        return
    assert not clash
    for second in inside:
        assert cover(second, kept) == sorted(set(cover(second, notes)))
    assert sum(note.duration for note in kept) == 15.0 * sum(
        bool(cover(second, notes)) for second in inside
    )


def test_facts() -> None:
    facts = datasets["sleep-edf"].facts
    staging, plain = facts.views["staging"], facts.views[""]
    assert plain.channels == NAMES
    assert (plain.rate, plain.window, plain.task, plain.hold) == (
        100.0,
        3000,
        "none",
        ("Event marker",),
    )
    assert staging.labels is not None
    assert set(staging.labels.values()) == set(staging.classes) == {"W", "N1", "N2", "N3", "REM"}
    assert staging.labels["Sleep stage 3"] == staging.labels["Sleep stage 4"] == "N3"
    assert (staging.channels, staging.epoch, staging.trim) == (("EEG Fpz-Cz",), 30.0, ("W", 1800.0))
    assert staging.window == staging.rate * 30
    assert "197" in datasets["sleep-edf"].help
