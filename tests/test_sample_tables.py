"""Tables of samples in the dialects of people and makers: marks, clocks, gaps.

Values are compared with what was written, or with numpy and pandas.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import polars as pl
import pytest
from sample_tables import ROWS, WAVE, comma, find_values, lines, messages, read, read_folder
from samples import SAMPLES, require_sample

from bitimely_core import tokens
from bitimely_core.cache import ingest, open_cache
from bitimely_core.errors import UserError
from bitimely_core.formats import sniffer, table_facts
from bitimely_core.formats.source import scan_folder
from bitimely_core.recordings.template import write_template
from bitimely_core.schemas.tokens import WindowOptions
from bitimely_core.tokens.channel_maps import ChannelMap
from bitimely_core.tokens.new_recordings import find_recordings

# --- dialects


DIALECTS = {
    "tabs and UTF-16": (
        "a.txt",
        lines("Zeit [ms]\tEKG [µV]\n", lambda i, v: f"{2 * i}\t{comma(v)}").encode("utf-16"),
        [("EKG", "uV", 500.0)],
    ),
    "a row of units": (
        "a.csv",
        lines(
            "time,EKG,volume,score\ns,mV,L,points\n", lambda i, v: f"{i / 500},{v},1,{i % 3}"
        ).encode(),
        [("EKG", "mV", 500.0), ("volume", "L", 500.0), ("score", "points", 500.0)],
    ),
    "latin-1": (
        "a.csv",
        lines("Zeit [ms];EKG [µV]\n", lambda i, v: f"{2 * i};{comma(v)}").encode("latin-1"),
        [("EKG", "uV", 500.0)],
    ),
    "sep line and round brackets": (
        "a.csv",
        lines("sep=;\nTime (s);ECG (mV)\n", lambda i, v: f"{i / 100};{v}").encode(),
        [("ECG", "mV", 100.0)],
    ),
    "blanks and a commented header": (
        "a.txt",
        lines("# t ecg\n", lambda i, v: f"  {i / 100:.2f}   {v}").encode(),
        [("ecg", "", 100.0)],
    ),
    "no header": (
        "a.tsv",
        lines("", lambda i, v: f"{i * 0.004:.3f}\t{v}").encode(),
        [("channel 1", "", 250.0)],
    ),
    "a rate above the table": (
        "a.txt",
        lines("Sampling rate: 200 Hz\nName: Jane Doe\n\n", lambda _, v: f"{v}|{-v}").encode(),
        [("channel 1", "", 200.0), ("channel 2", "", 200.0)],
    ),
    "quotes and units in a row of their own": (
        "a.csv",
        lines(
            "'Elapsed time','MLII'\n'hh:mm:ss.mmm','mV'\n",
            lambda i, v: f"'0:{i // 250:02d}.{i % 250 * 4:03d}',{v}",
        ).encode(),
        [("MLII", "mV", 250.0)],
    ),
    "dates of rdsamp": (
        "a.csv",
        lines(
            "'Time and date','MLII'\n'hh:mm:ss.mmm dd/mm/yyyy','mV'\n",
            lambda i, v: f"'[10:00:{i // 250:02d}.{i % 250 * 4:03d} 24/11/2016]',{v}",
        ).encode(),
        [("MLII", "mV", 250.0)],
    ),
    "quoted decimal commas": (
        "a.csv",
        lines('"Zeit [s]","EKG"\n', lambda i, v: f'"{comma(i / 250)}","{comma(v)}"').encode(),
        [("EKG", "", 250.0)],
    ),
    "LabChart": (
        "a.txt",
        lines("Interval=\t0.002 s\nRange=\t10 V\n", lambda i, v: f"{i / 500}\t{v}").encode(),
        [("channel 1", "", 500.0)],
    ),
    "steps above the table": (
        "a.txt",
        lines("x.acq\n0.5 msec/sample\nCH1\tCH2\n", lambda _, v: f"{v}\t{-v}\t").encode(),
        [("CH1", "", 2000.0), ("CH2", "", 2000.0)],
    ),
    "a column of texts": (
        "a.csv",
        lines("time_s,acc,activity\n", lambda i, v: f"{i / 50},{v},walking").encode(),
        [("acc", "", 50.0)],
    ),
    "gzip": (
        "a.csv.gz",
        gzip.compress(lines("time_ms,ecg_mV\n", lambda i, v: f"{4 * i},{v}").encode()),
        [("ecg_mV", "mV", 250.0)],
    ),
    "a unit above the table": (
        "a.csv",
        lines("# units: mV\ntime,ecg\n", lambda i, v: f"{i / 100},{v}").encode(),
        [("ecg", "mV", 100.0)],
    ),
    "a unit above the table and in a header": (
        "a.csv",
        lines("# unit: mV\nt,ecg,bp [mmHg]\n", lambda i, v: f"{i / 100},{v},{-v}").encode(),
        [("ecg", "", 100.0), ("bp", "mmHg", 100.0)],
    ),
    "a unit in a column": (
        "a.csv",
        lines("time_s,value,unit\n", lambda i, v: f"{i / 4},{v},count/min").encode(),
        [("value", "bpm", 4.0)],
    ),
    "an address behind a unit": (
        "a.csv",
        lines(
            "time [s/256],ECG_I [NA](/api/datatype/4113/),hr [bpm](/api/datatype/19/)\n",
            lambda i, v: f"{437000000000 + i},{v},{-v}",
        ).encode(),
        [("ECG_I", "", 256.0), ("hr", "bpm", 256.0)],
    ),
    "units as names": (
        "a.csv",
        lines("s,mV,ABP mmHg\n", lambda i, v: f"{i / 250},{v},{-v}").encode(),
        [("mV", "mV", 250.0), ("ABP mmHg", "mmHg", 250.0)],
    ),
    "a minus of typesetters": (
        "a.csv",
        lines("t,x\n", lambda i, v: f"{i / 100},{v}".replace("-", "\u2212")).encode(),
        [("x", "", 100.0)],
    ),
    "names that are not units": (
        "a.csv",
        lines("t,EEG(sec),EOG(L)\n", lambda i, v: f"{i / 100},{v},{-v}").encode(),
        [("EEG(sec)", "", 100.0), ("EOG(L)", "", 100.0)],
    ),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_dialect_is_read(tmp_path: Path, dialect: str) -> None:
    name, text, wanted = DIALECTS[dialect]
    record = read(tmp_path, name, text)
    assert [(s.channel, s.unit, s.rate) for s in record.signals] == wanted
    np.testing.assert_array_equal(record.signals[0].samples, WAVE.astype(np.float32))
    assert "Doe" not in messages(tmp_path)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (lines(",ecg\n", lambda i, v: f"{i},{v}"), ["ecg"]),
        (lines("0,1\n", lambda _, v: f"{v},{-v}"), ["0", "1"]),
        (lines("EKG\n", lambda _, v: comma(v)), ["EKG"]),
        (lines("", lambda _, v: comma(v)), ["channel 1"]),
        (lines("ecg,quality\n", lambda _, v: f"{v},good"), ["ecg"]),
    ],
)
def test_a_table_without_a_clock_takes_the_rate_of_the_map(
    tmp_path: Path, text: str, names: list[str]
) -> None:
    record = read(tmp_path, "a.csv", text, "[[files]]\nrate = 100\n")
    assert [(s.channel, s.rate) for s in record.signals] == [(name, 100.0) for name in names]
    np.testing.assert_array_equal(record.signals[0].samples, WAVE.astype(np.float32))


def test_a_table_without_a_rate_is_refused_with_advice_that_works(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.txt").write_text(lines("ecg\n", lambda _, v: f"{v}"))
    with pytest.raises(UserError, match="states no sampling rate, needs --map with a rate"):
        ingest("generic", tmp_path / "raw", tmp_path / "cache")


@pytest.mark.parametrize("kind", [list, np.array])
def test_a_list_in_a_cell_is_no_columns(tmp_path: Path, kind: Callable[[Any], Any]) -> None:
    """As pandas writes the packets of a wearable: `0,"[12, 34]",5000,60`."""
    rng = np.random.default_rng(0)
    packets = [kind(rng.integers(-500, 500, 12).tolist()) for _ in range(100)]
    times = 5000 + 128 * np.arange(100)
    table = pd.DataFrame({"ecg": packets, "time": times, "hr": 60 + times % 9})
    (signal,) = read(tmp_path, "a.csv", table.to_csv()).signals
    assert (signal.channel, signal.rate) == ("hr", 7.8125)
    np.testing.assert_array_equal(signal.samples, table["hr"])


def test_texts_that_are_no_samples_are_left_alone(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "a.csv").write_text(lines("time,ecg\n", lambda i, v: f"{i / 100},{v}"))
    (raw / "README.txt").write_text("Three people, two nights.\n" * 80)
    (raw / "stages.txt").write_text("".join(f"{i % 5}\n" for i in range(900)))
    (raw / "words.txt").write_text("W\nN1\nN2\n" * 300)
    (raw / "epochs.txt").write_text("".join(f"{30 * i},{i % 5}\n" for i in range(900)))
    (raw / "notes.csv").write_text("onset,duration,trial\n" + "1.5,2,1\n" * 80)
    ingest("generic", raw, tmp_path / "cache")
    assert [record.recording_id for record in open_cache(tmp_path / "cache").records()] == ["a"]


# --- clocks


def clock_text(step: timedelta, form: str) -> str:
    begin = datetime(2016, 11, 24, 23, 59, 59)
    return lines("Zeit;x\n", lambda i, v: f"{(begin + i * step).strftime(form)};{v}")


@pytest.mark.parametrize(
    "form",
    [
        "%Y-%m-%d %H:%M:%S.%f",
        "%Y-%m-%dT%H:%M:%S.%fZ",
        "%Y-%m-%dT%H:%M:%S.%f+01:00",
        "%Y-%m-%d %H:%M:%S.%f CET",
        "%Y-%m-%d %H:%M:%S.%f+0100 [Europe/Berlin]",
        "%d.%m.%Y %H:%M:%S,%f",
        "%m/%d/%Y %I:%M:%S.%f %p",
        "%d-%b-%Y %H:%M:%S.%f",
        "%Y/%m/%d;%H:%M:%S.%f",
    ],
)
def test_date_times_are_clocks_over_midnight(tmp_path: Path, form: str) -> None:
    text = clock_text(timedelta(milliseconds=8), form)
    text = text.replace("Zeit;x", "Datum;Zeit;x") if ";" in form else text
    record = read(tmp_path, "a.csv", text)
    assert [(s.rate, len(s.samples)) for s in record.signals] == [(125.0, ROWS)]
    begin = datetime(2016, 11, 24, 23, 59, 59)
    assert record.start_time == begin.isoformat()
    assert "2016" not in messages(tmp_path)


@pytest.mark.parametrize(
    ("step", "form", "rate"),
    [(timedelta(seconds=1), "%H:%M:%S", 1.0), (timedelta(milliseconds=8), "%H:%M:%S.%f", 125.0)],
)
def test_times_of_day_pass_midnight(
    tmp_path: Path, step: timedelta, form: str, rate: float
) -> None:
    record = read(tmp_path, "a.csv", clock_text(step, form))
    assert [(s.rate, len(s.samples)) for s in record.signals] == [(rate, ROWS)]
    assert record.start_time is None


@pytest.mark.parametrize(
    ("header", "step", "rate"),
    [
        ("time [s/256]", 1, 256.0),
        ("time (1/1024 s)", 4, 256.0),
        ("t [10 ms]", 1, 100.0),
        ("Time (x10 ms)", 2, 50.0),
    ],
)
def test_a_clock_may_count_parts_of_a_unit(
    tmp_path: Path, header: str, step: int, rate: float
) -> None:
    text = lines(f"{header},ECG\n", lambda i, v: f"{35600000000 + i * step},{v}")
    (signal,) = read(tmp_path, "a.csv", text).signals
    assert (signal.channel, signal.rate) == ("ECG", rate)


@pytest.mark.parametrize("clock", ["2024-10-26T23:30:{s}+02:00", "{unix}"])
def test_labels_are_of_the_civil_time_where_a_table_states_its_zone(
    tmp_path: Path, clock: str
) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    begin = 1729978200  # of 23:30 in Berlin
    times = [clock.format(s=f"{i:02d}", unix=begin + i) for i in range(60)]
    (raw / "a.csv").write_text("time,HR\n" + "".join(f"{t},{i}\n" for i, t in enumerate(times)))
    hour = 23 if "T" in clock else 21
    (raw / "a_labels.csv").write_text(
        f"start,stage\n2024-10-26 {hour}:30:00,N2\n2024-10-26 {hour}:30:30,W\n"
    )
    report = ingest("generic", raw, tmp_path / "cache")
    (record,) = open_cache(tmp_path / "cache").records()
    assert [(note.onset, note.label) for note in record.annotations] == [(0.0, "N2"), (30.0, "W")]
    said = [reason for unit in report["units"] for reason in unit["reasons"]]
    assert any(reason["code"] == "start_mismatch" for reason in said) == ("T" not in clock)


NUMBERED: dict[str, tuple[str, Callable[[int], str]]] = {  # steps of 0.5 s from 2021-03-04 on
    "days of a spreadsheet": ("Time", lambda i: f"{44259 + i / 172800:.9f}"),
    "days of MATLAB": ("datenum", lambda i: f"{738219 + i / 172800:.9f}"),
    "ticks of .NET": ("Timestamp", lambda i: f"{637504128000000000 + i * 5_000_000}"),
    "a month in letters": (
        "when",
        lambda i: f'"{datetime(2021, 3, 4) + timedelta(seconds=i / 2):%B %d, %Y %I:%M:%S.%f %p}"',
    ),
    "a month behind the time": (
        "Time",
        lambda i: f'"{datetime(2021, 3, 4) + timedelta(seconds=i / 2):%I:%M:%S.%f %p %b %d, %Y}"',
    ),
    "a day behind the time": (
        "Time",
        lambda i: f"{datetime(2021, 3, 4) + timedelta(seconds=i / 2):%H:%M:%S.%f %d %b %Y}",
    ),
    "years of two digits": (
        "DateTime",
        lambda i: f"{datetime(2021, 3, 4) + timedelta(seconds=i / 2):%d-%m-%y %H:%M:%S.%f}",
    ),
}


@pytest.mark.parametrize("form", NUMBERED)
def test_calendars_of_programs_are_clocks(tmp_path: Path, form: str) -> None:
    header, time = NUMBERED[form]
    record = read(tmp_path, "a.csv", lines(f"{header},x\n", lambda i, v: f"{time(i)},{v}"))
    assert record.signals[0].rate == pytest.approx(2, rel=1e-5)
    assert record.start_time is not None
    begin = datetime.fromisoformat(record.start_time)
    assert abs((begin - datetime(2021, 3, 4)).total_seconds()) < 1e-3
    np.testing.assert_array_equal(record.signals[0].samples, WAVE.astype(np.float32))


@pytest.mark.parametrize(
    "word", ["NULL", "#N/A", "-", "--", "?", "None", ".", "*", "missing", "-1.#IND", "#NV"]
)
def test_words_for_a_missing_value(tmp_path: Path, word: str) -> None:
    text = lines("time_s,x\n", lambda i, v: f"{i / 4},{word if i % 10 == 3 else v}")
    expected = np.where(np.arange(ROWS) % 10 == 3, np.nan, WAVE)
    samples = read(tmp_path, "a.csv", text).signals[0].samples
    np.testing.assert_array_equal(samples, expected.astype(np.float32))


@pytest.mark.parametrize("number", ["-999", "9999", "-3276.8"])
def test_a_number_for_a_missing_value_is_said_and_the_map_settles_it(
    tmp_path: Path, number: str
) -> None:
    is_missing = np.arange(ROWS) % 10 == 3
    text = lines("time_s,x\n", lambda i, v: f"{i / 4},{number if is_missing[i] else v}")
    samples = read(tmp_path, "a.csv", text).signals[0].samples
    np.testing.assert_array_equal(np.isnan(samples), is_missing)
    said = messages(tmp_path)
    assert "taken for missing" in said
    assert "write missing = [] in [[files]]" in said
    (tmp_path / "kept").mkdir()
    kept = read(tmp_path / "kept", "a.csv", text, "[[files]]\nmissing = []\n").signals[0].samples
    assert set(kept[is_missing].tolist()) == {float(np.float32(number))}
    (tmp_path / "own").mkdir()
    chosen = '[[files]]\nmissing = ["7777"]\n'
    other = read(tmp_path / "own", "a.csv", text.replace(number, "7777"), chosen).signals[0].samples
    np.testing.assert_array_equal(np.isnan(other), is_missing)


def swap(text: str) -> str:
    """A number with a comma for each point, and a point for each comma."""
    return text.translate(str.maketrans(",.", ".,"))


GROUPED = {  # table, and the first number with such a mark
    "times": (lines('"time_ms"|"x"\n', lambda i, _: f'"{i * 10:,}"|"{i + 7}"'), "1,000"),
    "beside decimal points": (lines("t|x\n", lambda i, _: f"{i / 100}|{990 + i:,}"), "1,000"),
    "beside decimal commas": (
        lines("t;x\n", lambda i, _: f"{swap(f'{i / 100}')};{swap(f'{990 + i:,}')}"),
        "1.000",
    ),
    "with decimals": (
        lines("t;x\n", lambda i, v: f"{swap(f'{i / 100}')};{swap(f'{1990 + v:,.2f}')}"),
        "1.990,00",
    ),
}


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("kind", GROUPED)
def test_marks_between_thousands_are_refused(tmp_path: Path, kind: str, *, mapped: bool) -> None:
    text, example = GROUPED[kind]
    chosen = "[[files]]\npattern = '*.csv'\nrate = 100\n" if mapped else ""
    with pytest.raises(UserError) as caught:
        read(tmp_path, "a.csv", text, chosen)
    said = f"{caught.value} {caught.value.details}"
    assert f"such as {example} have marks between thousands" in said


@pytest.mark.parametrize("zone", ["+0100", "+01:00", "Z"])
def test_whole_numbers_beside_dates_with_a_zone_keep_their_column(
    tmp_path: Path, zone: str
) -> None:
    text = lines(
        "Date/Time of Record,Heart Rate\n",
        lambda i, _: f"2023-05-01 10:{i // 60:02d}:{i % 60:02d} {zone},{60 + i % 9}",
    )
    record = read(tmp_path, "a.csv", text)
    (signal,) = record.signals
    assert (signal.channel, signal.rate) == ("Heart Rate", 1.0)
    assert record.start_time == "2023-05-01T10:00:00"
    np.testing.assert_array_equal(signal.samples, 60 + np.arange(ROWS) % 9)


RATES = [  # above a table, its mark before decimals, Hz
    ("Sampling rate: 1,000 Hz", ".", 1000),
    ("Sampling rate: 1,024.5 Hz", ".", 1024.5),
    ("Abtastrate: 1.000 Hz", ",", 1000),
    ("Abtastrate: 1.000,0 Hz", ",", 1000),
    ("Sampling rate: 250.000 Hz", ",", 250),
    ("Sampling rate: 250,000 Hz", ".", 250),
    ("Abtastrate: 62,5 Hz", ",", 62.5),
    ("Sampling rate: 2.5 kHz", ".", 2500),
    ("Sampling rate: 100 Hz\nSampling rate: 100.0 Hz", ".", 100),
    ("Sample interval: 1,000 ms", ".", 1000),
    ("Original sampling rate: 1000 Hz\nSampling rate: 100 Hz", ".", None),
]


@pytest.mark.parametrize(("text", "decimal", "rate"), RATES)
def test_a_rate_above_a_table_is_read_with_its_marks(
    tmp_path: Path, text: str, decimal: str, rate: float | None
) -> None:
    table = lines("I\tII\n", lambda _, v: f"{v}\t{-v}").replace(".", decimal)
    if rate is None:
        with pytest.raises(UserError, match="states no sampling rate"):
            read(tmp_path, "a.txt", f"{text}\n{table}")
        return
    record = read(tmp_path, "a.txt", f"{text}\n{table}")
    assert [signal.rate for signal in record.signals] == [rate, rate]


PHYSIO = {"Columns": ["cardiac", "trigger"], "cardiac": {"Units": "mV"}, "StartTime": -22.3}
DESCRIBED = {  # table, its description, channels with units, Hz
    "of BIDS": (
        lines("", lambda i, v: f"{v}\t{i % 2}"),
        {**PHYSIO, "SamplingFrequency": 100.0},
        [("cardiac", "mV")],
        100,
    ),
    "a rate alone": (
        lines("ECG\tEMG\n", lambda _, v: f"{v}\t{-v}"),
        {"fs": 250, "device": "x"},
        [("ECG", ""), ("EMG", "")],
        250,
    ),
    "beside a clock": (
        lines("time_s\tECG\n", lambda i, v: f"{i / 50}\t{v}"),
        {"sampling_rate": 250, "Columns": ["a", "b"]},
        [("ECG", "")],
        50,
    ),
    "two rates": (lines("ECG\n", lambda _, v: f"{v}"), {"fs": 250, "srate": 100}, [], None),
    "no rate": (lines("ECG\n", lambda _, v: f"{v}"), {"fs": "fast", "rate": -1}, [], None),
}


@pytest.mark.parametrize("ending", ["tsv", "tsv.gz"])
@pytest.mark.parametrize("kind", DESCRIBED)
def test_a_description_beside_a_table_states_its_rate(
    tmp_path: Path, kind: str, ending: str
) -> None:
    text, description, channels, rate = DESCRIBED[kind]
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a_physio.json").write_text(json.dumps(description))
    content = gzip.compress(text.encode()) if ending == "tsv.gz" else text
    if rate is None:
        with pytest.raises(UserError, match="states no sampling rate"):
            read(tmp_path, f"a_physio.{ending}", content)
        return
    record = read(tmp_path, f"a_physio.{ending}", content)
    assert [(s.channel, s.unit, s.rate) for s in record.signals] == [(*c, rate) for c in channels]
    np.testing.assert_array_equal(record.signals[0].samples, WAVE.astype(np.float32))


@pytest.mark.parametrize("place", ["sub-01/func/sub-01_task-rest_physio", "task-rest_physio"])
def test_physiology_of_a_bids_folder_is_read_where_nothing_else_is(
    tmp_path: Path, place: str
) -> None:
    folder = tmp_path / "raw" / "sub-01" / "func"
    folder.mkdir(parents=True)
    (tmp_path / "raw" / "dataset_description.json").write_text("{}")
    description = json.dumps({**PHYSIO, "SamplingFrequency": 100.0, "StartTime": -2.0})
    (tmp_path / "raw" / f"{place}.json").write_text(description)
    events = "onset\tduration\ttrial_type\n-1.5\t0\tpress\n"
    (folder / "sub-01_task-rest_events.tsv").write_text(events)
    name = "sub-01/func/sub-01_task-rest_physio.tsv.gz"
    record = read(tmp_path, name, gzip.compress(lines("", lambda i, v: f"{v}\t{i % 2}").encode()))
    assert record.subject_id == "01"
    assert [(note.onset, note.label) for note in record.annotations] == [(0.5, "press")]
    assert [(s.channel, s.unit, s.rate) for s in record.signals] == [("cardiac", "mV", 100.0)]
    options = WindowOptions.model_construct(
        channels=["cardiac"], rate=100.0, length=1.0, clock=None
    )
    (recording,) = find_recordings([tmp_path / "raw"], options, ChannelMap())
    _, values = find_values(recording.read(), "cardiac")
    np.testing.assert_array_equal(values, WAVE.astype(np.float32))


NEWEST_FIRST = {
    "numbers": pd.DataFrame({"time_s": np.arange(ROWS) / 50, "x": WAVE}),
    "dates": pd.DataFrame(
        {"time": pd.date_range("2023-05-01", periods=ROWS, freq="20ms"), "x": WAVE}
    ),
    "minutes": pd.DataFrame(
        {"Zeit": pd.date_range("2023-05-01", periods=ROWS, freq="5min"), "x": WAVE}
    ),
}


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize("kind", NEWEST_FIRST)
def test_rows_with_the_newest_first_are_turned(tmp_path: Path, kind: str, ending: str) -> None:
    frame = NEWEST_FIRST[kind].iloc[::-1]
    path = tmp_path / f"frame.{ending}"
    frame.to_csv(path, index=False) if ending == "csv" else frame.to_parquet(path, index=False)
    record = read(tmp_path, f"a.{ending}", path.read_bytes())
    (signal,) = record.signals
    assert signal.rate == (1 / 300 if kind == "minutes" else 50.0)
    assert record.start_time == (None if kind == "numbers" else "2023-05-01T00:00:00")
    np.testing.assert_array_equal(signal.samples, WAVE.astype(np.float32))
    assert "its rows lie the newest first" in messages(tmp_path)


@pytest.mark.parametrize(("mark", "month"), [("/", 5), ("-", 1)])
def test_the_month_is_first_beside_am_and_pm(tmp_path: Path, mark: str, month: int) -> None:
    text = lines("Time,x\n", lambda i, v: f"5/1/2023 10:{i // 60:02d}:{i % 60:02d} PM,{v}")
    record = read(tmp_path, "a.csv", text.replace("/", mark))
    day = 6 - month
    assert record.start_time == f"2023-{month:02d}-{day:02d}T22:00:00"


def test_a_page_in_place_of_a_table_is_called_none(tmp_path: Path) -> None:
    page = "<!DOCTYPE html><html><body>404</body></html>\n"
    with pytest.raises(UserError) as caught:
        read(tmp_path, "a.csv", page)
    assert "has no column of numbers" in str(caught.value)


@pytest.mark.parametrize("factor", [1, 1000, 10**6, 10**9])
def test_times_since_1970_are_clocks(tmp_path: Path, factor: int) -> None:
    begin = 1_600_000_000
    text = lines("ts,x\n", lambda i, v: f"{begin * factor + i * factor / 125:.6f},{v}")
    if factor > 1:
        text = lines("ts,x\n", lambda i, v: f"{begin * factor + i * factor * 8 // 1000},{v}")
    record = read(tmp_path, "a.csv", text)
    assert [s.rate for s in record.signals] == [125.0]
    assert record.start_time == datetime.fromtimestamp(begin, UTC).replace(tzinfo=None).isoformat()


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        *((f"datetime64[{unit}]", "2020-01-01T23:59:59") for unit in ("ns", "us", "ms")),
        *((f"timedelta64[{unit}]", None) for unit in ("ns", "us", "ms")),
    ],
)
def test_parquet_time_stamps_and_durations_are_clocks(
    tmp_path: Path, kind: str, start: str | None
) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    moments = pd.date_range("2020-01-01 23:59:59", periods=ROWS, freq="8ms")
    times = (moments if start else moments - moments[0]).astype(kind)
    pd.DataFrame({"when": times, "x": WAVE, "y": np.arange(ROWS) % 7}).to_parquet(raw / "a.parquet")
    ingest("generic", raw, tmp_path / "cache", keep_dates=True)
    (record,) = open_cache(tmp_path / "cache").records()
    assert [(s.channel, s.rate) for s in record.signals] == [("x", 125.0), ("y", 125.0)]
    assert record.start_time == start
    np.testing.assert_array_equal(record.signals[0].samples, WAVE.astype(np.float32))


@pytest.mark.parametrize(
    ("step", "unit", "rate", "doubted"),
    [
        (0.02, "s", 50.0, False),
        (1.0, "s", 1.0, True),
        (4.0, "ms", 250.0, True),
        (30.0, "s", 1 / 30, True),
        (300.0, "s", 1 / 300, True),
        (2000.0, "us", 500.0, True),
        (1e7, "ns", 100.0, True),
    ],
)
def test_the_unit_of_times_is_found_by_their_step(
    tmp_path: Path, step: float, unit: str, rate: float, doubted: bool
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(lines("time,x\n", lambda i, v: f"{i * step:.10g},{v}"))
    facts = sniffer.sniff_table(path)
    assert facts.clock is not None
    assert (facts.clock.unit, bool(table_facts.describe_doubt(facts))) == (unit, doubted)
    assert facts.found_rate == pytest.approx(rate)


def test_a_clock_that_nothing_explains_is_asked_about(tmp_path: Path) -> None:
    text = lines("time,x\n", lambda i, v: f"{i * 1e13},{v}")
    with pytest.raises(UserError, match="states no sampling rate"):
        read(tmp_path, "a.csv", text)
    (tmp_path / "map.toml").write_text('[[files]]\ntime = "time"\n')
    with pytest.raises(UserError) as caught:
        ingest(
            "generic", tmp_path / "raw", tmp_path / "x", options={"map": str(tmp_path / "map.toml")}
        )
    assert 'such as clock = "ms"' in json.dumps(caught.value.report).replace('\\"', '"')


def test_numbers_of_samples_are_a_clock_with_a_rate(tmp_path: Path) -> None:
    text = lines("sample;ecg\n", lambda i, v: f"{i if i < 100 else i + 3};{v}")
    record = read(
        tmp_path, "a.csv", text, '[[files]]\nrate = 100\ntime = "sample"\nclock = "samples"\n'
    )
    assert [(len(s.samples), s.onset) for s in record.signals] == [(100, 0.0), (200, 1.03)]


# --- gaps


def test_gaps_are_segments_and_jitter_is_none(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    times = np.arange(ROWS) * 0.02 + rng.uniform(-0.006, 0.006, ROWS)
    times[100:] += 2.0
    times[200:] += 0.06
    record = read(tmp_path, "a.csv", lines("time,x\n", lambda i, v: f"{times[i]:.4f},{v}"))
    assert [len(s.samples) for s in record.signals] == [100, 100, 100]
    assert record.signals[0].rate == pytest.approx(50.0, rel=2e-3)
    np.testing.assert_allclose([s.onset for s in record.signals], [0.0, 4.0, 6.06], atol=0.012)
    values = np.concatenate([s.samples for s in record.signals])
    np.testing.assert_array_equal(values, WAVE.astype(np.float32))


def test_a_clock_that_drifts_is_read_and_said(tmp_path: Path) -> None:
    places = np.arange(ROWS)
    times = places * 0.01 * (1 + 9e-5 * places)  # 2 samples off a straight line at most
    record = read(tmp_path, "a.csv", lines("time,x\n", lambda i, v: f"{times[i]:.6f},{v}"))
    assert [len(s.samples) for s in record.signals] == [ROWS]
    assert "samples are treated as evenly spaced" in messages(tmp_path)


@pytest.mark.parametrize(("digits", "rate"), [(5, 125), (4, 256), (5, 1000)])
def test_times_of_few_significant_digits_give_the_rate(
    tmp_path: Path, digits: int, rate: int
) -> None:
    """As MATLAB's dlmwrite and `%g` write them: 100.008 s is 100.01 s, and so is 100.012 s."""
    values = np.random.default_rng(0).normal(size=140 * rate).round(3)
    rows = [f"{k / rate:.{digits}g},{value}" for k, value in enumerate(values)]
    record = read(tmp_path, "a.csv", "\n".join(["time (s),ECG (mV)", *rows]))
    (signal,) = record.signals
    assert (signal.rate, len(signal.samples)) == (rate, len(values))
    assert "the times are rounded to" in messages(tmp_path)


def test_times_rounded_to_seconds_give_the_rate(tmp_path: Path) -> None:
    text = lines("time,x\n", lambda i, v: f"2020-03-01 10:00:{(i + 20) // 50:02d},{v}")
    record = read(tmp_path, "a.csv", text)
    assert [(s.rate, len(s.samples)) for s in record.signals] == [(50.0, ROWS)]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (lambda i, v: f"{(i - (i == 100)) * 0.02:.2f},{v}", "line 102 has the time of the line"),
        (lambda i, v: f"{i % 150 * 0.02:.2f},{v}", "the time of line 152 lies before"),
        (lambda i, v: f"{i * 0.02:.2f},{'x' if i == 100 else v}", "the cell of row 102 is not a"),
        (lambda i, v: f"{i * 0.02:.2f},{v}{',7' * (i == 100)}", "line 102 has 3 cells"),
        (lambda i, v: f"{'' if i == 100 else i * 0.02},{v}", "the time of line 102 is missing"),
    ],
)
def test_a_faulty_row_is_named_by_its_line(
    tmp_path: Path, row: Callable[[int, float], str], said: str
) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, "a.csv", lines("time,x\n", row))
    assert said in json.dumps(caught.value.report)


def test_rows_that_repeat_are_used_once(tmp_path: Path) -> None:
    text = lines("time,x\n", lambda i, v: f"{i * 0.02:.2f},{v}")
    record = read(tmp_path, "a.csv", text + text.splitlines()[-1] + "\n")
    assert [(s.rate, len(s.samples)) for s in record.signals] == [(50.0, ROWS)]
    assert "1 rows repeat the row above" in messages(tmp_path)


def test_a_wrong_rate_of_the_map_is_named(tmp_path: Path) -> None:
    text = lines("time,x\n", lambda i, v: f"{i * 0.02:.2f},{v}")
    chosen = '[[files]]\nrate = 100\ntime = "time"\n'
    with pytest.raises(UserError) as caught:
        read(tmp_path, "a.csv", text, chosen)
    assert "its clock is one of 50 Hz, the map states 100 Hz" in json.dumps(caught.value.report)
    record = read(tmp_path, "a.csv", text, "[[files]]\nrate = 100\n")
    assert [s.rate for s in record.signals] == [100.0]
    assert "the rate of the map, 100 Hz, is used" in messages(tmp_path)


# --- irregular observations


def test_irregular_observations_lie_on_a_grid(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    times = np.cumsum(rng.choice([1.0, 4.0, 5.0, 7.0, 9.0], ROWS)) - 200.0
    text = lines("", lambda i, v: f"{times[i]:.5f},{v}")
    record = read(tmp_path, "a.txt", text)
    (signal,) = record.signals
    assert (signal.rate, signal.onset) == (0.2, 0.0)
    bins = np.floor(times / 5).astype(int)
    wanted = pd.Series(WAVE).groupby(bins).mean().reindex(range(bins[0], bins[-1] + 1))
    np.testing.assert_allclose(signal.samples, wanted.to_numpy(), rtol=1e-6)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(
    ("name", "header", "factor", "unit"),
    [
        ("p1_rr.txt", "", 1, "ms"),
        ("p1_hrv.txt", "", 1, "ms"),
        ("a.csv", "RR (s)\n", 1000, "s"),
        ("a.csv", "IBI_ms\n", 1, "ms"),
        ("NN-intervals.csv", "", 1000, "s"),
    ],
)
def test_intervals_between_beats_are_their_own_clock(
    tmp_path: Path, name: str, header: str, factor: int, unit: str, *, mapped: bool
) -> None:
    intervals = 850 + (150 * WAVE).round()
    intervals[7] = 0  # an artefact
    text = header + "".join(f"{value / factor:.10g}\n" for value in intervals)
    record = read(tmp_path, name, text, "[[files]]\npattern = '*'\n" if mapped else "")
    (signal,) = record.signals
    assert (signal.unit, signal.rate) == (unit, 1.0)
    seconds = np.floor(np.cumsum(intervals) / 1000 + 1e-6).astype(int)
    means = pd.Series(intervals / factor).groupby(seconds).mean()
    wanted = means.reindex(range(seconds[0], seconds[-1] + 1)).to_numpy()
    np.testing.assert_allclose(signal.samples, wanted, rtol=1e-6)


@pytest.mark.parametrize(("name", "shift"), [("ecg.csv", 850), ("rr.csv", -50), ("rr.csv", 90_000)])
def test_other_columns_are_no_intervals_between_beats(
    tmp_path: Path, name: str, shift: int
) -> None:
    text = "".join(f"{value:g}\n" for value in shift + (150 * WAVE).round())
    with pytest.raises(UserError, match=r"states no sampling rate.*_rr at the end of its name"):
        read(tmp_path, name, text)


@pytest.mark.slow
def test_heart_rates_and_stages_of_one_person(tmp_path: Path) -> None:
    """Stages of 30 s count from 0 of the clock on which heart rates begin days before."""
    folder = require_sample(SAMPLES / "complete" / "sleep-accel-hr")
    name = "8173033"
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / f"{name}.txt").write_bytes(
        (folder / "heart_rate" / f"{name}_heartrate.txt").read_bytes()
    )
    stages = np.loadtxt(folder / "labels" / f"{name}_labeled_sleep.txt", delimiter=",")
    scored = stages[stages[:, 1] > 0]
    rows = [f"{name},{onset:g},30,S{stage:g}" for onset, stage in scored]
    (raw / "stages.csv").write_text("\n".join(["file,onset,duration,label", *rows]) + "\n")
    (tmp_path / "map.toml").write_text(
        '[[files]]\npattern = "*.txt"\n[annotations]\npath = "stages.csv"\nfile = "file"\n'
    )
    options = {"map": str(tmp_path / "map.toml")}
    ingest("generic", raw, tmp_path / "cache", options=options)
    windows = tokens.build(
        tmp_path / "cache", view="annotations", out=tmp_path / "t", normalise="none"
    )
    rates = np.loadtxt(folder / "heart_rate" / f"{name}_heartrate.txt", delimiter=",")
    rates = rates[rates[:, 0].argsort()]
    begin = np.floor(rates[0, 0] / 5) * 5
    assert (windows.rate, windows.length) == (0.2, 6)
    assert len(windows) > 0.9 * len(scored)
    means = {}
    for onset, stage in scored:
        seen = rates[(rates[:, 0] >= onset) & (rates[:, 0] < onset + 30)]
        cells = np.floor(seen[:, 0] / 5).astype(int)
        means[round(onset - begin, 3)] = (
            pd.Series(seen[:, 1]).groupby(cells).mean().mean(),
            f"S{stage:g}",
        )
    index = windows.index
    mask = windows.mask(None)
    assert mask is not None
    values = np.where(mask, windows.values(None), np.nan)[:, :, 0]
    for row, (start, label) in enumerate(zip(index["start"], index["label"], strict=True)):
        mean, stage = means[round(start, 3)]
        assert label == stage
        assert np.nanmean(values[row]) == pytest.approx(mean, rel=1e-5)


# --- tables of several people


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("header", ["id", "Subject ID", "recording"])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_long_table_is_a_recording_a_person(
    tmp_path: Path, header: str, mixed: bool, mapped: bool
) -> None:
    values = {name: WAVE + k for k, name in enumerate(("7", "12", "30"))}
    rows = [
        (name, i, value)
        for name, column in values.items()
        for i, value in enumerate(column.tolist())
    ]
    if mixed:
        rows.sort(key=lambda row: row[1])
    (tmp_path / "raw").mkdir()
    delay = 0 if mixed else 100
    text = "".join(f"{name},{delay * int(name) + i / 4},{value:.4f}\n" for name, i, value in rows)
    (tmp_path / "raw" / "all.csv").write_text(f"{header},time_s,hr\n{text}")
    template = write_template(scan_folder(tmp_path / "raw"))
    assert f'subject_column = "{header}"' in template
    (tmp_path / "map.toml").write_text(template)
    records = read_folder(tmp_path, tmp_path / "map.toml" if mapped else None)
    assert list(records) == [f"all-{name}" for name in values]
    for name, column in values.items():
        record = records[f"all-{name}"]
        assert record.subject_id == (name if header != "recording" or mapped else f"all-{name}")
        (signal,) = record.signals
        assert (signal.channel, signal.rate, signal.onset) == ("hr", 4.0, 0.0)
        np.testing.assert_array_equal(signal.samples, column.round(4).astype(np.float32))
    report = (tmp_path / ("mapped" if mapped else "cache") / "ingest_report.json").read_text()
    assert "3 recordings, one for each value of the column" in report


@pytest.mark.parametrize("mixed", [False, True])
def test_a_row_for_each_channel_is_refused_with_advice_that_works(
    tmp_path: Path, mixed: bool
) -> None:
    rows = [(i / 100, name, i + k) for i in range(50) for k, name in enumerate(("ECG", "PPG"))]
    rows.sort(key=lambda row: (not mixed) * (row[1] == "PPG"))
    (tmp_path / "raw").mkdir()
    path = tmp_path / "raw" / "a.csv"
    frame = pd.DataFrame(rows, columns=["time", "sensor", "value"])
    frame.to_csv(path, index=False)
    with pytest.raises(UserError) as caught:
        ingest("generic", tmp_path / "raw", tmp_path / "cache")
    message = "\n".join(map(str, caught.value.details))
    line = re.search(r"has a row for each 'sensor' at .*(subject_column = '.*?')", message)
    assert line is not None
    (tmp_path / "map.toml").write_text(f"[[files]]\n{line[1]}\n")
    assert list(read_folder(tmp_path, tmp_path / "map.toml")) == ["a-ECG", "a-PPG"]
    frame.pivot(index="time", columns="sensor", values="value").to_csv(path)
    (record,) = read_folder(tmp_path).values()
    assert [(s.channel, s.rate, s.samples[0]) for s in record.signals] == [
        ("ECG", 100.0, 0.0),
        ("PPG", 100.0, 1.0),
    ]


def test_times_in_whole_seconds_beside_texts_are_no_rows_of_channels(tmp_path: Path) -> None:
    text = lines("time_s,task,x\n", lambda i, v: f"{i // 50},{'rest' if i < 200 else 'run'},{v}")
    record = read(tmp_path, "a.csv", text)
    np.testing.assert_array_equal(record.signals[0].samples, WAVE.astype(np.float32))


@pytest.mark.parametrize("header", ["Id", "patient", "recording"])
@pytest.mark.parametrize("name", ["2022484408", "P7"])
def test_a_table_of_one_person_has_no_channel_of_the_name(
    tmp_path: Path, header: str, name: str
) -> None:
    text = lines(f"{header},time_s,x\n", lambda i, v: f"{name},{i / 50},{v}")
    record = read(tmp_path, "a.csv", text)
    assert [signal.channel for signal in record.signals] == ["x"]
    assert record.recording_id == "a"
    assert record.subject_id == ("a" if header == "recording" else name)


def test_a_column_that_numbers_the_rows_names_nobody(tmp_path: Path) -> None:
    record = read(tmp_path, "a.csv", lines("id,time_s,x\n", lambda i, v: f"{i},{i / 4},{v}"))
    np.testing.assert_array_equal(record.signals[-1].samples, WAVE.astype(np.float32))
    assert record.recording_id == "a"


def test_rows_of_nobody_among_those_of_people_are_refused(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    text = lines("id,time_s,x\n", lambda i, v: f"{('', 'a', 'b')[i // 100]},{i % 100 / 4},{v}")
    (tmp_path / "raw" / "a.csv").write_text(text)
    with pytest.raises(UserError) as caught:
        ingest("generic", tmp_path / "raw", tmp_path / "cache")
    assert "rows without a value in 'id'" in str(caught.value.details)


# --- clocks that start again


def write_local(seconds: float) -> str:
    """The time in Berlin in the night in which summer time ends."""
    moment = datetime(2021, 10, 31, 0, 57, tzinfo=UTC) + timedelta(seconds=seconds)
    return f"{moment.astimezone(ZoneInfo('Europe/Berlin')):%Y-%m-%d %H:%M:%S}"


CLOCKS: dict[str, tuple[str, float, Callable[[float], str]]] = {  # header, Hz, seconds -> text
    "ms of 16 bits": ("time_ms", 5.0, lambda t: f"{(65_000 + 1000 * t) % (1 << 16):.0f}"),
    "us of 32 bits": ("micros", 500.0, lambda t: f"{(4_294_960_000 + 1e6 * t) % (1 << 32):.0f}"),
    "seconds of the day": ("time", 10.0, lambda t: f"{(86_380 + t) % 86_400:.1f}"),
    "minutes of the hour": (
        "time",
        10.0,
        lambda t: f"{(3580 + t) % 3600 // 60:02.0f}:{(3580 + t) % 60:04.1f}",
    ),
    "the end of summer time": ("time", 0.5, write_local),
}


@pytest.mark.parametrize("form", CLOCKS)
def test_a_clock_that_starts_again_goes_on(tmp_path: Path, form: str) -> None:
    header, rate, show = CLOCKS[form]
    text = "".join(f"{show(i / rate)},{v}\n" for i, v in enumerate(WAVE.tolist()))
    (signal,) = read(tmp_path, "a.csv", f"{header},hr\n{text}").signals
    assert signal.rate == rate
    np.testing.assert_array_equal(signal.samples, WAVE.astype(np.float32))
    assert "the clock starts again after" in messages(tmp_path)


def test_another_recording_below_is_no_clock_that_starts_again(tmp_path: Path) -> None:
    rows = [f"{i / 50},{i % 7}\n" for i in range(2000)]
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "a.csv").write_text("time,hr\n" + "".join(rows + rows))
    with pytest.raises(UserError):
        ingest("generic", raw, tmp_path / "cache")


# --- labels in a column


STATES = ["W", "N1", "N2", "R"]
STATE_NOTES = [(0.0, 30.0, "W"), (30.0, 30.0, "N1"), (60.0, 30.0, "N2"), (90.0, 30.0, "REM")]


@pytest.mark.parametrize("form", ["csv", "parquet", "two people", "a lost stretch"])
def test_texts_beside_samples_are_the_labels_of_their_time(tmp_path: Path, form: str) -> None:
    """A column of stages, as in DREAMT and in exports for machine learning."""
    frame = pl.DataFrame(
        {
            "time": np.arange(1200) / 10,
            "BVP": np.random.default_rng(0).normal(0, 20, 1200),
            "Sleep_Stage": np.repeat(STATES, 300),
        }
    )
    raw = tmp_path / "raw"
    raw.mkdir()
    wanted = {"s1": STATE_NOTES}
    if form == "parquet":
        frame.write_parquet(raw / "s1.parquet")
    elif form == "two people":
        two = [frame.with_columns(pl.lit(name).alias("subject")) for name in ("a", "b")]
        pl.concat(two).write_csv(raw / "s1.csv")
        wanted = {"s1-a": STATE_NOTES, "s1-b": STATE_NOTES}
    elif form == "a lost stretch":
        pl.concat([frame[:400], frame[500:]]).write_csv(raw / "s1.csv")
        wanted = {
            "s1": [(0.0, 30.0, "W"), (30.0, 10.0, "N1"), (50.0, 10.0, "N1"), *STATE_NOTES[2:]]
        }
    else:
        frame.write_csv(raw / "s1.csv")
    ingest("generic", raw, tmp_path / "cache")
    for record in open_cache(tmp_path / "cache").records():
        notes = [(round(n.onset, 6), round(n.duration, 6), n.label) for n in record.annotations]
        assert notes == wanted.pop(record.recording_id)
        assert {signal.channel for signal in record.signals} == {"BVP"}
    assert not wanted


def test_seldom_texts_beside_samples_are_points(tmp_path: Path) -> None:
    events = [""] * 3000
    events[750], events[1500] = "stim A", "stim B"
    rows = "".join(f"{i / 250},{i % 7},{event}\n" for i, event in enumerate(events))
    record = read(tmp_path, "s1.csv", "time,EEG,Event\n" + rows)
    assert [tuple(note) for note in record.annotations] == [
        (3.0, 0.0, "stim A"),
        (6.0, 0.0, "stim B"),
    ]


def test_texts_beside_irregular_samples_last_until_the_next(tmp_path: Path) -> None:
    times = np.cumsum(np.random.default_rng(1).uniform(2, 9, 400))
    activity = ["walk"] * 150 + ["sit"] * 250
    rows = [f"{t:.3f},{60 + t % 9:.1f},{a}\n" for t, a in zip(times, activity, strict=True)]
    chosen = '[[files]]\npattern = "*.csv"\ntime = "time"\n'
    record = read(tmp_path, "s1.csv", "time,hr,activity\n" + "".join(rows), chosen)
    step = 1 / record.signals[0].rate
    first, second = record.annotations
    assert (first.label, second.label) == ("walk", "sit")
    assert abs(second.onset - (times[150] - times[0])) <= step
    assert first.onset + first.duration == second.onset
    assert abs(second.onset + second.duration - (times[-1] - times[0])) <= 2 * step


def test_remarks_beside_samples_are_no_labels(tmp_path: Path) -> None:
    rows = "".join(f"{i / 50},{i % 7},remark {i} of the night\n" for i in range(600))
    record = read(tmp_path, "s1.csv", "time,PPG,label\n" + rows)
    assert (record.annotations, len(record.signals)) == ([], 1)


# --- what stands around the numbers


BELOW = {
    "totals": ("time_s,ecg\n", "", "Mean,0.1\nMax,1\n"),
    "a remark": ("time_s,ecg\n", "", "\n# exported by Doe\n"),
    "words": ("Sampling period (ms): 4\ntime\tecg\n", "\t", "End of file"),
}


@pytest.mark.parametrize("kind", BELOW)
def test_lines_below_the_rows_are_left_out_and_said(tmp_path: Path, kind: str) -> None:
    head, mark, below = BELOW[kind]
    text = lines(head, lambda i, v: f"{i / 250}{mark or ','}{v}")
    record = read(tmp_path, "a.txt", text + below)
    assert [(s.channel, s.rate) for s in record.signals] == [("ecg", 250.0)]
    np.testing.assert_array_equal(record.signals[0].samples, WAVE.astype(np.float32))
    assert "left out: texts where the rows have numbers" in messages(tmp_path)
    assert "Doe" not in messages(tmp_path)


def test_a_row_that_was_cut_off_is_no_remark(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    text = lines("time,ecg,emg\n", lambda i, v: f"{i / 250},{v},{v}") + "1.2,0."
    (tmp_path / "raw" / "a.csv").write_text(text)
    with pytest.raises(UserError, match="quarantined"):
        ingest("generic", tmp_path / "raw", tmp_path / "cache")


def test_units_may_stand_behind_numbers(tmp_path: Path) -> None:
    text = lines(
        "Time;SpO2;Temp;Pulse\n",
        lambda i, v: (
            f'{i // 60:02d}:{i % 60:02d};{95 + i % 3}%;"{comma(36 + v)} °C";{60 + i % 9} bpm'
        ),
    )
    record = read(tmp_path, "a.csv", text)
    units = [(s.channel, s.unit) for s in record.signals]
    assert units == [("SpO2", "%"), ("Temp", "C"), ("Pulse", "bpm")]
    np.testing.assert_array_equal(record.signals[0].samples, 95 + np.arange(ROWS) % 3)
    np.testing.assert_allclose(record.signals[1].samples, 36 + WAVE, rtol=1e-6)


def test_cells_below_a_limit_are_missing_where_the_map_says_so(tmp_path: Path) -> None:
    text = lines("time_s,CRP\n", lambda i, v: f"{i},{'<0.1' if i % 5 == 0 else v}")
    with pytest.raises(UserError, match="quarantined"):
        read(tmp_path, "a.csv", text)
    assert "write their texts into [[files]] of --map: missing" in messages(tmp_path)
    chosen = '[[files]]\nmissing = ["<0.1"]\n'
    samples = read(tmp_path / "own", "a.csv", text, chosen).signals[0].samples
    np.testing.assert_array_equal(np.isnan(samples), np.arange(ROWS) % 5 == 0)


def test_codes_of_a_monitor_without_a_patient_are_missing(tmp_path: Path) -> None:
    off = range(50, 90)
    text = lines(
        "time_s,SpO2,HR,PPG\n",
        lambda i, v: f"{i},{127 if i in off else 97},{255 if i in off else 70 + i % 3},{i % 256}",
    )
    record = read(tmp_path, "a.csv", text)
    missing = [np.flatnonzero(np.isnan(s.samples)).tolist() for s in record.signals]
    assert missing == [list(off), list(off), []]
    kept = read(tmp_path / "kept", "a.csv", text, "[[files]]\nmissing = []\n")
    assert kept.signals[0].samples.max() == 127


RATE_LINES = {
    "Sampling period (s): 0.004": 250.0,
    "dt = 0.004": 250.0,
    "Sample interval (ms): 4": 250.0,
    "SampleInterval=4000 us": 250.0,
    "Samples per second: 250": 250.0,
    "Frequency: 0.25 kHz": 250.0,
    "Recording period: 600 s": None,
}


@pytest.mark.parametrize("line", RATE_LINES)
def test_a_line_above_a_table_may_state_its_step(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.txt").write_text(lines(f"{line}\nECG,EMG\n", lambda _, v: f"{v},{v}"))
    found = sniffer.sniff_table(tmp_path / "a.txt").found_rate
    assert found == pytest.approx(RATE_LINES[line])


@pytest.mark.parametrize("mark", [".", ","])
def test_blocks_of_labchart_are_parts_of_one_recording(tmp_path: Path, mark: str) -> None:
    day = 45000 + 10 / 24

    def block(seconds: float, values: np.ndarray) -> str:
        head = f"Interval=\t0.01 s\nExcelDateTime=\t{day + seconds / 86400:.16e}\t3/15/2023 10:00\n"
        head += "TimeFormat=\tStartOfBlock\nChannelTitle=\tECG\tResp\nRange=\t10 mV\t1 V\n"
        head += "UnitName=\tmV\tV\nTopValue=\t10.000\t1.0\nBottomValue=\t-10.000\t-1.0\n"
        rows = "".join(f"{i / 100}\t{v}\t{-v}\n" for i, v in enumerate(values.tolist()))
        return (head + rows).replace(".", mark)

    text = block(0, WAVE[:100]) + block(13.5, WAVE[100:])
    record = read(tmp_path, "a.txt", text)
    assert record.start_time == "2023-03-15T10:00:00"
    pieces = [(s.channel, s.rate, s.onset) for s in record.signals]
    assert sorted(pieces) == [
        *(("ECG", 100.0, 0.0), ("ECG", 100.0, 13.5)),
        *(("Resp", 100.0, 0.0), ("Resp", 100.0, 13.5)),
    ]
    joined = np.concatenate([s.samples for s in record.signals if s.channel == "ECG"])
    np.testing.assert_array_equal(joined, WAVE.astype(np.float32))
    (tmp_path / "raw" / "a.txt").write_text(re.sub("ExcelDateTime=.*\n", "", text))
    with pytest.raises(UserError) as caught:
        ingest("generic", tmp_path / "raw", tmp_path / "other")
    assert "Cut it above each of them" in str(caught.value.details)


# --- columns with clocks, rates and kinds of their own


def fill(values: list[float], step: int) -> list[str]:
    """The values `step` rows apart, with empty cells between."""
    return [f"{values[i // step]:g}" if i % step == 0 else "" for i in range(ROWS)]


def test_slow_columns_that_are_filled_up_have_their_own_rate(tmp_path: Path) -> None:
    heart, pressure = np.arange(60.0, 75.0), np.arange(115.0, 135.0)
    slow = [fill(heart.tolist(), 20), fill(pressure.tolist(), 15)]
    text = lines("Time,ECG,HR,ABP\n", lambda i, v: f"{i / 100:.2f},{v},{slow[0][i]},{slow[1][i]}")
    record = read(tmp_path, "case.csv", text)
    found = {s.channel: (s.rate, s.onset, s.samples.tolist()) for s in record.signals}
    assert found["ECG"] == (100, 0.0, WAVE.astype("f4").tolist())
    assert found["HR"] == (5, 0.0, heart.tolist())
    assert found["ABP"] == (pytest.approx(100 / 15), 0.0, pressure.tolist())
    built = tokens.build(tmp_path / "cache", out=tmp_path / "tokens", window=100)
    assert (len(built), built.channels) == (3, 3)


@pytest.mark.parametrize("first", [3, 10, 17, 57])
def test_a_slow_column_may_begin_behind_the_first_row(tmp_path: Path, first: int) -> None:
    heart = pd.Series(np.nan, range(ROWS))
    heart[first::20] = np.arange(len(heart[first::20])) + 60.0
    frame = pd.DataFrame({"Time": np.arange(ROWS) / 100, "ECG": WAVE, "HR": heart})
    record = read(tmp_path, "case.csv", frame.to_csv(index=False))
    found = {signal.channel: signal for signal in record.signals}
    assert (found["HR"].rate, found["ECG"].rate) == (5, 100)
    times = found["HR"].onset + np.arange(len(found["HR"].samples)) / 5
    seen = ~np.isnan(found["HR"].samples)
    wanted = heart.dropna()
    np.testing.assert_array_equal(found["HR"].samples[seen], wanted)
    off = times[seen] - frame["Time"][wanted.index]
    assert np.abs(off).max() <= 0.1 + 1e-9, "half a sample of the slow channel"
    assert len(tokens.build(tmp_path / "cache", out=tmp_path / "tokens", window=100)) == 3


def test_numbered_channels_of_an_amplifier_count_milliseconds(tmp_path: Path) -> None:
    names = [f"channel{k}" for k in range(1, 9)]  # UCI, EMG data for gestures
    frame = pd.DataFrame(dict.fromkeys(names, WAVE) | {"class": np.arange(ROWS) // 100})
    frame.insert(0, "time", np.arange(1, ROWS + 1))
    record = read(tmp_path, "1_raw.txt", frame.to_csv(index=False, sep="\t"))
    assert {(signal.channel, signal.rate) for signal in record.signals} == {
        (n, 1000) for n in names
    }
    notes = [(round(n.onset, 6), round(n.duration, 6), n.label) for n in record.annotations]
    assert notes == [(0.0, 0.1, "0"), (0.1, 0.1, "1"), (0.2, 0.1, "2")]
    frame = frame[["time", "channel1", "class"]]  # of one sensor seconds are as likely
    record = read(tmp_path / "one", "1_raw.txt", frame.to_csv(index=False, sep="\t"))
    assert record.signals[0].rate == 1


@pytest.mark.parametrize("delay", [0.0, 0.001])
def test_a_line_of_an_event_is_no_sample(tmp_path: Path, delay: float) -> None:
    def row(i: int, value: float) -> str:
        mark = f"\n{i / 250 + delay:.3f},," if i % 50 == 30 else ""
        return f"{i / 250:.3f},{value},{-value}{mark}"

    record = read(tmp_path, "eeg.csv", lines("time,TP9,AF7\n", row))
    assert [(s.channel, s.rate, s.onset) for s in record.signals] == [
        ("TP9", 250, 0.0),
        ("AF7", 250, 0.0),
    ]
    np.testing.assert_array_equal(record.signals[0].samples, WAVE.astype("f4"))


def test_samples_without_a_value_at_rounded_times_keep_their_places(tmp_path: Path) -> None:
    text = lines(
        "time,ECG\n", lambda i, v: f"2020-01-01 10:00:{i // 10:02d},{'' if 95 < i < 130 else v}"
    )
    (signal,) = read(tmp_path, "a.csv", text).signals
    wanted = WAVE.astype("f4")
    wanted[96:130] = np.nan
    assert signal.rate == 10
    np.testing.assert_array_equal(signal.samples, wanted)


@pytest.mark.parametrize(
    "header",
    [
        "EMG 1 Time Series (s),EMG 1 (mV),ACC X Time Series (s),ACC X (g)",
        "X[s],EMG 1,X[s],ACC X",
        "Time,EMG 1,Time,ACC X",
    ],
)
def test_channels_behind_clocks_of_their_own(tmp_path: Path, header: str) -> None:
    def row(i: int, value: float) -> str:
        other = f"{i / 40:.3f},{i}" if i < 60 else ","
        return f"{i / 200:.3f},{value},{other}"

    chosen = '[[files]]\npattern = "walk.csv"\nchannels = ["EMG 1", "ACC X"]\n'
    for text in ("", chosen):
        events = tmp_path / f"{len(text)}" / "raw" / "walk_events.csv"
        events.parent.mkdir(parents=True)
        events.write_text("onset,duration,label\n0.2,1,step\n")
        record = read(events.parents[1], "walk.csv", lines(f"{header}\n", row), text)
        found = {s.channel: (s.rate, s.samples.tolist()) for s in record.signals}
        assert found == {"EMG 1": (200, WAVE.astype("f4").tolist()), "ACC X": (40, list(range(60)))}
        assert [tuple(note) for note in record.annotations] == [(0.2, 1.0, "step")]


def test_a_second_clock_of_the_same_times_changes_nothing(tmp_path: Path) -> None:
    text = lines("time,EMG 1,time 2,ACC X\n", lambda i, v: f"{i / 200},{v},{i / 200},{i}")
    record = read(tmp_path, "walk.csv", text)
    assert {s.channel: (s.rate, len(s.samples)) for s in record.signals} == {
        "EMG 1": (200, ROWS),
        "ACC X": (200, ROWS),
    }


@pytest.mark.parametrize(
    ("header", "step", "rate"),
    [
        ("time,EMG_biceps", 1, 1000),
        ("t,ecg lead 2", 2, 500),
        ("time,EEG", 4, 250),
        ("time,heart", 1, 1),
        ("time,ecg rate", 1, 1),
    ],
)
def test_names_of_channels_tell_milliseconds_from_seconds(
    tmp_path: Path, header: str, step: int, rate: float
) -> None:
    record = read(tmp_path, "a.csv", lines(f"{header}\n", lambda i, v: f"{step * i},{v}"))
    assert record.signals[0].rate == rate


def test_slow_observations_with_many_lost_rows_are_one_stretch(tmp_path: Path) -> None:
    steps = np.random.default_rng(0).choice([5, 5, 5, 10, 15], ROWS)
    times = np.cumsum(steps) - steps[0]
    text = lines("time (s),HR\n", lambda i, _: f"{times[i]},{60 + i % 30}")
    (signal,) = read(tmp_path, "watch.csv", text).signals
    assert (signal.rate, len(signal.samples)) == (0.2, times[-1] // 5 + 1)
    at = np.flatnonzero(~np.isnan(signal.samples))
    np.testing.assert_array_equal(at, times // 5)
    np.testing.assert_array_equal(signal.samples[at], 60 + np.arange(ROWS) % 30)


def test_columns_of_actigraphy_that_are_no_inputs(tmp_path: Path) -> None:
    head = "mesaid,line,linetime,activity,whitelight,wake,latitude,longitude,interval\n"

    def row(i: int, _: float) -> str:
        seconds = 72_000 + 30 * i
        clock = f"{seconds // 3600 % 24}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
        interval = "ACTIVE" if i < 60 else "REST-S"
        return f"7,{i + 1},{clock},{i % 40},{i % 3},{int(i % 100 < 40)},48.{i},11.{i},{interval}"

    record = read(tmp_path, "mesa-sleep-0007.csv", lines(head, row))
    assert record.subject_id == "7"
    assert [(s.channel, s.rate) for s in record.signals] == [
        ("activity", pytest.approx(1 / 30)),
        ("whitelight", pytest.approx(1 / 30)),
    ]
    notes = [(n.onset, n.duration, n.label) for n in record.annotations]
    assert notes[:3] == [(0, 1200, "1"), (1200, 1800, "0"), (3000, 1200, "1")]


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_texts_beside_times_with_a_zone_are_cells(tmp_path: Path, mark: str) -> None:
    """An export of Apple Health: by blanks and decimal commas, +0200,60 would be 200.6."""
    start = datetime(2023, 5, 1, 10, 11, 12)

    def row(i: int, _: float) -> str:
        time = f"{start + timedelta(seconds=5 * i)} +0200"
        return mark.join(["HeartRate", "Watch", "count/min", time, time, str(60 + i % 9)])

    head = mark.join(["type", "sourceName", "unit", "startDate", "endDate", "value"]) + "\n"
    record = read(tmp_path, "HeartRate.csv", lines(head, row))
    (signal,) = record.signals
    assert (signal.channel, signal.rate) == ("value", pytest.approx(0.2))
    np.testing.assert_array_equal(signal.samples[:12], 60 + np.arange(12) % 9)


def test_a_column_of_marks_does_not_make_samples_labels(tmp_path: Path) -> None:
    start = datetime(2020, 3, 2, 10)

    def row(i: int, _: float) -> str:
        moment = start + timedelta(minutes=i)
        return f"{moment:%d/%m/%Y %H:%M:%S};{int(i == 50)};{30 + i % 3},5;{i}"

    head = "+---+\nINTERVAL : 60\nDATE_TIME;EVENT;TEMPERATURE;PIM\n"
    record = read(tmp_path, "Log.txt", lines(head, row))
    assert [(s.channel, s.samples[:3].tolist()) for s in record.signals] == [
        ("TEMPERATURE", [30.5, 31.5, 32.5]),
        ("PIM", [0, 1, 2]),
    ]
    assert [(n.onset, n.label) for n in record.annotations] == [(3000, "1")]


def test_files_of_unicorn_need_no_map(tmp_path: Path) -> None:
    names = [f"EEG {i}" for i in range(1, 9)]
    names += [f"{kind} {axis}" for kind in ("Accelerometer", "Gyroscope") for axis in "XYZ"]
    head = ",".join([*names, "Battery Level", "Counter", "Validation Indicator"]) + "\n"
    cells = ",".join(["0.1"] * 13)
    record = read(tmp_path, "u.csv", lines(head, lambda i, v: f"{v},{cells},93.3,{i + 1},1"))
    assert [s.channel for s in record.signals] == names
    assert {(s.rate, s.unit) for s in record.signals[:8]} == {(250, "uV")}
    np.testing.assert_array_equal(record.signals[0].samples, WAVE.astype("f4"))


def test_a_column_of_lists_and_a_series_without_names_say_what_to_do(tmp_path: Path) -> None:
    rows = [WAVE.tolist(), (2 * WAVE).tolist()]
    frame = pd.DataFrame({"who": ["a", "b"], "signal": rows, "y": ["x", "z"]})
    raw = tmp_path / "raw"
    raw.mkdir()
    frame.to_parquet(raw / "t.parquet")
    with pytest.raises(UserError, match="holds several values a row"):
        ingest("generic", raw, tmp_path / "cache")
    (raw / "t.parquet").unlink()
    np.savetxt(raw / "t.csv", rows, delimiter=",", fmt="%g")
    chosen = '[[files]]\npattern = "*.csv"\nrate = 100\nseries = "x*"\n'
    (tmp_path / "map.toml").write_text(chosen)
    options = {"map": str(tmp_path / "map.toml")}
    with pytest.raises(UserError) as caught:
        ingest("generic", raw, tmp_path / "cache", options=options)
    assert "no column that matches 'x*', found 'channel 1'" in str(caught.value.report)
    # as the refusals say
    pd.read_csv(raw / "t.csv", header=None).add_prefix("x").to_csv(raw / "t.csv", index=False)
    samples = pd.DataFrame(frame.pop("signal").tolist()).add_prefix("x")
    frame.join(samples).to_csv(raw / "u.csv", index=False)
    ingest("generic", raw, tmp_path / "cache", options=options)
    found = [record.signals[0].samples for record in open_cache(tmp_path / "cache").records()]
    assert len(found) == 4
    for samples, wanted in zip(found, rows * 2, strict=True):
        np.testing.assert_allclose(samples, wanted, atol=1e-6)


def test_damage_is_named_with_what_to_do(tmp_path: Path) -> None:
    text = lines("time,ECG\n", lambda i, v: f"{i / 100},{v}")
    raw = tmp_path / "raw"
    raw.mkdir()
    packed = gzip.compress(text.encode())
    for k in range(3):
        (raw / f"whole{k}.csv").write_text(text.replace("ECG", f"ECG {k}"))
    (raw / "cut.csv.gz").write_bytes(packed[:-200])
    (raw / "twice.csv").write_text(text + text)
    report = ingest("generic", raw, tmp_path / "cache")
    assert report["exit_code"] == 3
    status = {unit["unit"]: unit["status"] for unit in report["units"]}
    assert {name for name in status if status[name] == "quarantined"} == {"cut", "twice"}
    assert len(status) == 5
    assert "repeats the names of the columns" in messages(tmp_path)


@pytest.mark.slow
def test_rows_without_names_of_columns_are_recordings(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()  # heartbeats of MIT-BIH as they are shared: 187 samples, a class
    values = np.random.default_rng(3).random((120, 100)).round(4)
    values[:, 99] = np.arange(120) % 3
    np.savetxt(tmp_path / "raw" / "beats.csv", values, delimiter=",")
    text = write_template(scan_folder(tmp_path / "raw"))
    stated = [line[2:] for line in text.splitlines() if line.startswith(("# series", "# label_c"))]
    lines = ["[[files]]", 'pattern = "*.csv"', "rate = 125", *stated]
    (tmp_path / "map.toml").write_text("\n".join(lines))
    ingest("generic", tmp_path / "raw", tmp_path / "cache", options={"map": tmp_path / "map.toml"})
    records = list(open_cache(tmp_path / "cache").records())
    assert [record.attributes["label"] for record in records] == ["0", "1", "2"] * 40
    for record, row in zip(records, values, strict=True):
        np.testing.assert_allclose(record.signals[0].samples, row[:99], atol=1e-6)


def test_pressures_leave_the_other_channels_readable(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    rows = [f"{k},{60 + k % 7},{120 + k % 9}/{80 - k % 5}" for k in range(200)]
    (tmp_path / "raw" / "p.csv").write_text("\n".join(["time (s),HR,BP", *rows]) + "\n")
    report = ingest("generic", tmp_path / "raw", tmp_path / "cache")
    (record,) = open_cache(tmp_path / "cache").records()
    assert [signal.channel for signal in record.signals] == ["HR"]
    np.testing.assert_array_equal(record.signals[0].samples, 60 + np.arange(200) % 7)
    assert "not channels: 'BP'" in str(report["reasons"])


def test_columns_of_one_name_are_channels_with_their_numbers(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(0, 20, (300, 4)).round(3)
    rows = [f"{k / 100:.2f},{','.join(map(str, row))}" for k, row in enumerate(values)]
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.csv").write_text("\n".join(["time,EEG,EEG,eeg,ECG", *rows]) + "\n")
    ingest("generic", tmp_path / "raw", tmp_path / "cache")
    (record,) = open_cache(tmp_path / "cache").records()
    names = ["EEG (1)", "EEG (2)", "eeg", "ECG"]
    assert [signal.channel for signal in record.signals] == names
    for signal, column in zip(record.signals, values.T, strict=True):
        np.testing.assert_allclose(signal.samples, column, atol=1e-4)
