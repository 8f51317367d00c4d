"""BIDMC in its two forms of PhysioNet: both give the same samples and labels, each fills the gaps
of the other; tables that are not as published.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from samples import SAMPLES, require_sample

from bitimely_core.cache import ingest, open_cache
from bitimely_core.types import Record

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its imports
    import wfdb

CSV = SAMPLES / "complete" / "bidmc" / "bidmc_csv"
STEPS = 10_000  # of the WFDB form, a unit


def make_tables(seconds: int = 70, seed: int = 3) -> dict[str, pd.DataFrame]:
    """Signals of `seconds`, breaths of two annotators who mark different numbers, the monitor's
    numbers with a gap.
    """
    rng = np.random.default_rng(seed)
    signals = pd.DataFrame(
        np.round(rng.normal(0, 0.5, (seconds * 125, 3)), 4), columns=["RESP", "PLETH", "II"]
    )
    signals.insert(0, "Time [s]", [f"{i / 125:.5g}" for i in range(len(signals))])
    first = np.cumsum(rng.integers(200, 500, seconds // 4))
    second = first[:-2] + rng.integers(-40, 40, len(first) - 2)
    breaths = pd.DataFrame(
        {
            f"breaths ann{i} [signal sample no]": pd.Series(x, dtype="Int64")
            for i, x in ((1, first), (2, second))
        }
    )
    numbers = pd.DataFrame(
        {"Time [s]": range(seconds + 1), "HR": rng.integers(60, 90, seconds + 1), "SpO2": 97.0}
    )
    numbers.loc[20:50, "SpO2"] = np.nan
    return {"Signals": signals, "Breaths": breaths, "Numerics": numbers}


def write_csv(folder: Path, number: int, tables: dict[str, pd.DataFrame]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kind, table in tables.items():
        table.to_csv(folder / f"bidmc_{number:02d}_{kind}.csv", index=False, na_rep="NaN")


def write_wfdb(folder: Path, number: int, tables: dict[str, pd.DataFrame]) -> None:
    """The same as PhysioNet's records, their names ending in commas: signals in format 16, breaths
    of both annotators in one file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for kind, name, rate, gain in (
        ("Signals", f"bidmc{number:02d}", 125, STEPS),
        ("Numerics", f"bidmc{number:02d}n", 1, 1),
    ):
        if kind in tables:
            columns = [name for name in tables[kind] if name.strip() != "Time [s]"]
            many = len(columns)
            values = tables[kind][columns].to_numpy(np.float64)
            labels = [f"{column.strip()}," for column in columns]
            given: dict[str, Any] = {
                "fmt": ["16"] * many,
                "adc_gain": [gain] * many,
                "baseline": [0] * many,
            }
            wfdb.wrsamp(
                name,
                fs=rate,
                units=["NU"] * many,
                sig_name=labels,
                p_signal=values,
                write_dir=str(folder),
                **given,
            )
    if "Breaths" in tables:
        marks = sorted(
            (int(x), f"ann{i}")
            for i, column in enumerate(tables["Breaths"], 1)
            for x in tables["Breaths"][column].dropna()
        )
        samples, texts = np.array([x for x, _ in marks]), [text for _, text in marks]
        wfdb.wrann(
            f"bidmc{number:02d}",
            "breath",
            samples,
            symbol=['"'] * len(marks),
            aux_note=texts,
            write_dir=str(folder),
        )


def read(raw: Path, out: Path) -> tuple[dict[str, Any], dict[str, Record]]:
    """The report, and the recordings by name."""
    report = ingest("bidmc", raw, out)
    return report, {record.recording_id: record for record in open_cache(out).records()}


def find(report: dict[str, Any], code: str) -> list[tuple[str | None, str | None, int]]:
    """File, field and count of all findings with this reason."""
    reasons = [
        *report["reasons"],
        *(reason for unit in report["units"] for reason in unit["reasons"]),
    ]
    return [
        (reason["file"], reason["field"], reason["count"])
        for reason in reasons
        if reason["code"] == code
    ]


def compare(record: Record, other: Record) -> None:
    """Samples equal to half a step of the WFDB form, labels bit for bit."""
    mine, theirs = ({signal.channel: signal for signal in one.signals} for one in (record, other))
    assert mine.keys() == theirs.keys() > {"PPG", "ECG", "rr", "hr", "spo2"}
    for name, signal in mine.items():
        values = [
            one.samples.astype(np.float64) * one.scale + one.offset
            for one in (signal, theirs[name])
        ]
        if name in {"rr", "hr", "spo2"}:
            np.testing.assert_array_equal(*values)
            assert np.isfinite(values[0]).any()
        else:
            np.testing.assert_allclose(*values, atol=0.5 / STEPS + 1e-6, rtol=0)
    assert (record.subject_id, record.attributes) == (other.subject_id, other.attributes)


@pytest.mark.slow
def test_both_forms_of_the_real_recordings_are_the_same(tmp_path: Path) -> None:
    require_sample(CSV)
    for number in (1, 2, 13):  # 2 and 13: the annotators marked different numbers of breaths
        tables = {
            kind: pd.read_csv(CSV / f"bidmc_{number:02d}_{kind}.csv", skipinitialspace=True)
            for kind in make_tables()
        }
        write_wfdb(tmp_path / "wfdb", number, tables)
        for path in CSV.glob(f"bidmc_{number:02d}_*"):
            (tmp_path / "csv").mkdir(exist_ok=True)
            shutil.copy(path, tmp_path / "csv")
    report, records = read(tmp_path / "wfdb", tmp_path / "a")
    assert (report["exit_code"], find(report, "unmatched_labels")) == (0, [])
    _, others = read(tmp_path / "csv", tmp_path / "b")
    assert records.keys() == others.keys() == {"bidmc_01", "bidmc_02", "bidmc_13"}
    for name, record in records.items():
        compare(record, others[name])


def test_each_form_fills_the_gaps_of_the_other_and_capitals_do_not_count(tmp_path: Path) -> None:
    tables = make_tables()
    write_csv(tmp_path / "csv", 2, tables)
    write_wfdb(tmp_path / "wfdb", 2, tables)
    _, (expected) = read(tmp_path / "csv", tmp_path / "a")
    for case, kinds in enumerate(
        (["Signals"], ["Breaths"], ["Numerics", "Breaths"], [], ["Signals", "Breaths", "Numerics"])
    ):
        raw = tmp_path / f"raw{case}"
        shutil.copytree(tmp_path / "wfdb", raw)
        for kind in kinds:
            shutil.copy(tmp_path / "csv" / f"bidmc_02_{kind}.csv", raw)
        if case % 2:
            for path in list(raw.iterdir()):
                path.rename(raw / path.name.upper())
        report, records = read(raw, tmp_path / f"cache{case}")
        assert (
            report["exit_code"],
            find(report, "file_name"),
            find(report, "unmatched_labels"),
        ) == (0, [], [])
        compare(records["bidmc_02"], expected["bidmc_02"])


@pytest.mark.parametrize("kept", [".breath", "n.hea", ".dat"])
def test_a_recording_without_signals_is_named(tmp_path: Path, kept: str) -> None:
    write_wfdb(tmp_path / "raw", 2, make_tables())
    write_wfdb(tmp_path / "raw", 3, make_tables(seed=4))
    for path in (tmp_path / "raw").glob("bidmc02*"):
        if path.name != f"bidmc02{kept}":
            path.unlink()
    report, records = read(tmp_path / "raw", tmp_path / "cache")
    assert (report["exit_code"], set(records)) == (3, {"bidmc_03"})
    assert find(report, "missing_signal_file") == [(f"bidmc02{kept}", None, 1)]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "annotation_syntax"),
        (b"<html>", "annotation_syntax"),
        (b"\x01\x58\xff\xfc\x00\x00", "annotation_syntax"),
    ],
)
def test_damaged_annotations_cost_their_recording(
    tmp_path: Path, content: bytes, code: str
) -> None:
    write_wfdb(tmp_path / "raw", 2, make_tables())
    write_wfdb(tmp_path / "raw", 3, make_tables(seed=4))
    (tmp_path / "raw" / "bidmc02.breath").write_bytes(content)
    report, records = read(tmp_path / "raw", tmp_path / "cache")
    assert (report["exit_code"], set(records)) == (3, {"bidmc_03"})
    assert find(report, code) == [("bidmc02.breath", None, 1)]


def test_annotations_of_nobody_are_counted(tmp_path: Path) -> None:
    write_wfdb(tmp_path / "raw", 2, make_tables())
    wfdb.wrann(
        "bidmc02",
        "breath",
        np.array([100, 700, 900]),
        symbol=['"'] * 3,
        aux_note=["ann1", "Doe, John", ""],
        write_dir=str(tmp_path / "raw"),
    )
    report, _ = read(tmp_path / "raw", tmp_path / "cache")
    assert find(report, "unknown_label") == [("bidmc02.breath", None, 2)]
    assert ("bidmc02.breath", "ann2", 1) in find(report, "missing_values")
    assert "Doe" not in str(report)


def test_breaths_are_columns_by_name(tmp_path: Path) -> None:
    """A spreadsheet or pandas adds a column of row numbers: it is no third annotator. One annotator
    alone is named; a lost header refuses.
    """
    tables = make_tables()
    write_csv(tmp_path / "raw", 2, tables)
    _, plain = read(tmp_path / "raw", tmp_path / "plain")
    write_csv(tmp_path / "raw", 2, {"Breaths": tables["Breaths"].iloc[:, ::-1].reset_index()})
    report, records = read(tmp_path / "raw", tmp_path / "cache")
    compare(records["bidmc_02"], plain["bidmc_02"])
    write_csv(tmp_path / "raw", 2, {"Breaths": tables["Breaths"].iloc[:, :1]})
    report, records = read(tmp_path / "raw", tmp_path / "one")
    assert find(report, "missing_values")[0] == ("bidmc_02_Breaths.csv", "ann2", 1)
    write_csv(tmp_path / "raw", 3, make_tables(seed=4))
    tables["Breaths"].to_csv(tmp_path / "raw" / "bidmc_02_Breaths.csv", index=False, header=False)
    report, records = read(tmp_path / "raw", tmp_path / "none")
    assert (report["exit_code"], set(records), find(report, "schema")) == (
        3,
        {"bidmc_03"},
        [("bidmc_02_Breaths.csv", None, 1)],
    )


def test_numbers_count_once_a_second(tmp_path: Path) -> None:
    """Rows that are there again, in any order, change no label; seconds without a row are
    counted.
    """
    tables = make_tables()
    write_csv(tmp_path / "raw", 2, tables)
    _, plain = read(tmp_path / "raw", tmp_path / "plain")
    numbers = tables["Numerics"]
    write_csv(tmp_path / "raw", 2, {"Numerics": pd.concat([numbers.iloc[::-1], numbers.iloc[:25]])})
    report, records = read(tmp_path / "raw", tmp_path / "cache")
    compare(records["bidmc_02"], plain["bidmc_02"])
    assert find(report, "duplicates") == [("bidmc_02_Numerics.csv", "Time [s]", 25)]
    assert find(report, "timestamps") == []
    write_csv(tmp_path / "raw", 2, {"Numerics": numbers.drop(index=range(10, 40))})
    report, _ = read(tmp_path / "raw", tmp_path / "gap")
    assert find(report, "timestamps") == [("bidmc_02_Numerics.csv", "Time [s]", 30)]


def test_a_constant_channel_and_a_foreign_file_are_named(tmp_path: Path) -> None:
    tables = make_tables()
    write_csv(tmp_path / "raw", 2, tables)
    write_csv(tmp_path / "raw", 2, {"Signals": tables["Signals"].assign(PLETH=0.5)})
    shutil.copy(
        tmp_path / "raw" / "bidmc_02_Signals.csv", tmp_path / "raw" / "bidmc_02_Signals (1).csv"
    )
    report, _ = read(tmp_path / "raw", tmp_path / "cache")
    assert report["exit_code"] == 0
    assert find(report, "flat_channel") == [("bidmc_02_Signals.csv", "PPG", 1)]
    assert find(report, "file_name") == [("bidmc_02_Signals (1).csv", None, 1)]
