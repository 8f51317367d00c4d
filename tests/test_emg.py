"""EMG examples: the paper's 204 windows, values against the package `wfdb`, the split by time and
its notices.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import SAMPLES, needs_sample

from bitimely_core import cache, tokens
from bitimely_core.datasets.emg import CLASSES, emg
from bitimely_core.errors import Finding, UserError
from bitimely_core.formats.source import scan_folder
from bitimely_core.types import IngestUnit, Record

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # its import sets off pandas'
    import wfdb

DATA = SAMPLES / "emg"

real = needs_sample(DATA)


def write(
    folder: Path,
    name: str,
    *,
    rate: str = "4000",
    gain: str = "10000/mV",
    channel: str = "EMG",
    tail: str = "",
    flat: bool = False,
) -> np.ndarray:
    values = np.random.default_rng(len(name)).integers(-900, 900, 9000).astype("<i2")
    values = np.full_like(values, 3) if flat else values
    folder.mkdir(parents=True, exist_ok=True)
    line = f"{name}.dat 16 {gain} 16 0 {values[0]} {int(values.sum(dtype=np.int64)) & 0xFFFF} 0 {channel}"
    (folder / f"{name}.hea").write_text(f"{name} 1 {rate} {len(values)}\n{line}\n{tail}")
    (folder / f"{name}.dat").write_bytes(values.tobytes())
    return values


def units(folder: Path, **options: Any) -> tuple[dict[str, Record | str], list[Finding]]:
    """Unit -> its record, or the code that refused it; findings of the folder."""
    out: dict[str, Record | str] = {}
    findings: list[Finding] = []
    for item in emg(scan_folder(folder), options):
        if isinstance(item, Finding):
            findings.append(item)
            continue
        unit: IngestUnit = pickle.loads(pickle.dumps(item))
        try:
            assert unit.read is not None
            got = unit.read()
            assert isinstance(got, Record)
            out[unit.name] = got
        except UserError as error:
            out[unit.name] = str(error.code)
    return out, findings


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"rate": "1000"}, "sampling_rate"),
        ({"gain": "10000/bpm"}, "unit"),
        ({"channel": "ECG"}, "missing_channel"),
    ],
)
def test_a_recording_that_is_not_as_it_must_be_is_refused_alone(
    tmp_path: Path, change: dict[str, str], code: str
) -> None:
    for name in CLASSES:
        write(tmp_path, f"emg_{name}", **(change if name == "myopathy" else {}))
    found, _ = units(tmp_path)
    assert found["emg_myopathy"] == code
    assert isinstance(found["emg_healthy"], Record)


def test_units_of_volts_are_brought_to_millivolts(tmp_path: Path) -> None:
    write(tmp_path, "emg_healthy", gain="10/uV")
    values = write(tmp_path, "emg_myopathy", gain="10000/mv")
    found, findings = units(tmp_path)
    micro, milli = found["emg_healthy"], found["emg_myopathy"]
    assert isinstance(micro, Record)
    assert isinstance(milli, Record)
    assert micro.signals[0].scale == pytest.approx(milli.signals[0].scale) == pytest.approx(1e-4)
    assert np.array_equal(milli.signals[0].samples, values)
    assert [str(finding.code) for finding in micro.findings] == ["unit"]
    assert milli.findings == []
    assert {str(finding.code) for finding in findings} == {"label_leakage", "class_missing"}


def test_comments_need_keep_phi_and_other_records_are_listed(tmp_path: Path) -> None:
    write(tmp_path, "emg_healthy", tail="# Jane Doe, 44\n", flat=True)
    write(tmp_path, "emg_else")
    found, findings = units(tmp_path)
    got = found["emg_healthy"]
    assert isinstance(got, Record)
    assert got.attributes == {"condition": "healthy"}
    assert {str(finding.code) for finding in got.findings} == {"phi", "flat_channel"}
    assert [finding.file for finding in findings if finding.code == "file_name"] == ["emg_else.hea"]
    kept = units(tmp_path, keep_phi=True)[0]["emg_healthy"]
    assert isinstance(kept, Record)
    assert kept.attributes["comments"] == ["Jane Doe, 44"]


def test_a_folder_without_its_records_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "emg_else")
    with pytest.raises(UserError) as caught:
        units(tmp_path)
    assert caught.value.code == "no_input"


@real
def test_the_sample_gives_the_windows_of_the_paper_and_warns_that_the_class_is_the_person(
    tmp_path: Path,
) -> None:
    report = cache.ingest("emg", DATA, tmp_path / "cache")
    # the last 2,000 bytes of the neuropathy are its first ones, which is a warning
    counts = report["counts"]
    assert (
        report["exit_code"],
        counts["accepted"],
        counts["accepted_with_warning"],
        counts["quarantined"],
    ) == (0, 2, 1, 0)
    lengths = {}
    for got in cache.open_cache(tmp_path / "cache").records():
        oracle = wfdb.rdrecord(str(DATA / got.recording_id), physical=False)
        (signal,) = got.signals
        lengths[got.attributes["condition"]] = len(signal.samples) // 1500
        assert np.array_equal(signal.samples, oracle.d_signal[:, 0])
        physical = wfdb.rdrecord(str(DATA / got.recording_id)).p_signal[:, 0]
        assert np.allclose(
            signal.samples * signal.scale + signal.offset, physical, rtol=1e-12, atol=1e-15
        )
        assert (signal.unit, signal.rate) == ("mV", 4000.0)
    assert lengths == {"healthy": 33, "myopathy": 73, "neuropathy": 98}
    assert sum(lengths.values()) == 204

    windows = tokens.build(tmp_path / "cache", out=tmp_path / "tokens")
    assert (windows.length, windows.channels, tuple(windows.class_names), windows.split) == (
        1500,
        1,
        CLASSES,
        "time",
    )
    assert len(windows) == 204 - 2 * 3  # a gap of one window before validation and before test
    for recording in windows.index.partition_by("recording_id"):
        ends = {
            split: (part["start"].min(), part["start"].max())
            for (split,), part in recording.partition_by("split", as_dict=True).items()
        }
        assert ends["train"][1] + 2 * 0.375 <= ends["validation"][0] + 1e-9
        assert ends["validation"][1] + 2 * 0.375 <= ends["test"][0] + 1e-9
    notices = " ".join(windows.manifest.notices)
    assert "each class is one person" in notices
    assert "same subjects" in notices
