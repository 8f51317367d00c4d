"""Tables of samples as makers and their devices write them: forms, and sessions of several files.

Values are compared with what was written.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from sample_tables import ROWS, WAVE, comma, find_values, lines, messages, read, read_folder

from bitimely_core import tokens
from bitimely_core.formats import vendors
from bitimely_core.formats.source import scan_folder
from bitimely_core.recordings.template import write_template
from bitimely_core.schemas.tokens import WindowOptions
from bitimely_core.tokens.channel_maps import ChannelMap
from bitimely_core.tokens.new_recordings import find_recordings

# --- vendor forms


HEADER = (
    "------------ Data File Created By ActiGraph GT3X+ ActiLife v6.13.3 Firmware v3.2.1 date format"
    " M/d/yyyy at 30 Hz  Filter Normal -----------\nSerial Number: MOS2D0001\nStart Time 10:00:00\n"
    "Start Date 1/1/2020\nEpoch Period (hh:mm:ss) {}\nDownload Time 10:02:04\nDownload Date"
    " 1/2/2020\nCurrent Memory Address: 0\nCurrent Battery Voltage: 4.05     Mode = 12\n"
    "--------------------------------------------------\n"
)
APPLE = (
    'Name,Jane Doe\nDate of Birth,"Jan 1, 1980"\nRecorded Date,2020-01-01 10:00:00 +0100\n'
    'Classification,Sinus Rhythm\nSymptoms,\nSoftware Version,1.2\nDevice,"Watch4,1"\n'
    "Sample Rate,512 hertz\n\nLead,Lead I\nUnit,µV\n\n"
)
SIGNALS = (
    '# OpenSignals Text File Format\n# {"00:07:80": {"sensor": ["ECG"], "column": ["nSeq", "DI",'
    ' "ECG"], "sampling rate": 500, "channels": [2]}}\n# EndOfHeader\n'
)
SPIKE2 = lines(
    '"INFORMATION"\n"Jane Doe"\n"SUMMARY"\n\n"CHANNEL"\t"1"\n"Waveform"\n"No comment"\n'
    '"EEG"\n"mV"\n"START"\t0.00000\t0.00200\n',
    lambda _, v: f"{v}",
)
FORMS = {
    "Apple ECG": ("ecg_2020-01-01.csv", lines(APPLE, lambda _, v: f"{v}"), [("Lead I", "uV", 512)]),
    "Apple ECG in German": (
        "ecg.csv",
        lines(APPLE.replace("Sample Rate,512 hertz", "Messrate,512 Hertz"), lambda _, v: comma(v)),
        [("Lead I", "uV", 512)],
    ),
    "ActiGraph (raw acceleration)": (
        "a.csv",
        lines(
            HEADER.format("00:00:00") + "Accelerometer X,Accelerometer Y\n",
            lambda _, v: f"{v},{-v}",
        ),
        [("Accelerometer X", "g", 30), ("Accelerometer Y", "g", 30)],
    ),
    "ActiGraph (counts an epoch)": (
        "a.csv",
        lines(HEADER.format("00:01:00"), lambda _, v: f"{v},0,1"),
        [(f"channel {i}", "", 1 / 60) for i in (1, 2, 3)],
    ),
    "Empatica E4 (heart rate)": (
        "HR.csv",
        lines("1544027010.00\n1.0\n", lambda _, v: f"{v}"),
        [("HR", "bpm", 1)],
    ),
    "OpenBCI (before version 5)": (
        "a.txt",
        lines(
            "%OpenBCI Raw EEG Data\n%Number of channels = 8\n%Sample Rate = 250.0 Hz\n"
            "%First Column = SampleIndex\n%Last Column = Timestamp\n",
            lambda i, v: (
                f"{i % 256}, {v}, 1, 2, 3, 4, 5, 6, 7, 0.0, 0.0, 0.9, 12:00:0{i / 250:.3f}, 1"
            ),
        ),
        [(f"EXG Channel {number}", "uV", 250) for number in range(8)],
    ),
    "OpenSignals": ("a.txt", lines(SIGNALS, lambda i, v: f"{i}\t0\t{v}\t"), [("ECG", "", 500)]),
    "Polar": (
        "a.txt",
        lines(
            "Phone timestamp;sensor timestamp [ns];timestamp [ms];ecg [uV]\n",
            lambda i, v: (
                f"2021-04-12T10:41:23.1;{671 * 10**15 + round(i * 1e9 / 130)};{i / 0.13};{v}"
            ),
        ),
        [("ecg", "uV", 130)],
    ),
    "Shimmer": (
        "a.csv",
        lines(
            '"sep=\t"\nShimmer_1_Timestamp_Unix_CAL\tShimmer_1_ECG_CAL\t\nms\tmV\t\n',
            lambda i, v: f"{1600000000000 + i * 1000 / 512:.3f}\t{v}\t",
        ),
        [("Shimmer_1_ECG_CAL", "mV", 512)],
    ),
    "GENEActiv": (
        "left.csv",
        lines(
            "Device Type,GENEActiv\n"
            + "\n" * 9
            + "Measurement Frequency,50 Hz\n"
            + "Field,x\n" * 89,
            lambda i, v: (
                f"2013-06-01 10:00:{i // 50:02d}:{i % 50 * 20:03d},{v},{-v},1,{i % 3},0,25.4"
            ),
        ),
        [(f"ACC {axis}", "g", 50) for axis in "xyz"]
        + [("light", "lux", 50), ("temperature", "C", 50)],
    ),
    "Biopac AcqKnowledge": (
        "a.txt",
        lines(
            "s1.acq\n2 msec/sample\n2 channels\nECG\nmV\nBreath\nVolts\nmin,CH1,CH2,\n,999,999,\n",
            lambda i, v: f"{i * 0.002 / 60:.8f},{v},{-v},",
        ),
        [("ECG", "mV", 500), ("Breath", "V", 500)],
    ),
    "Biopac AcqKnowledge with decimal commas": (
        "a.txt",
        lines(
            "s1.acq\n0,5 msec/sample\n2 channels\nECG\nmV\nBreath\nVolts\nmin\tCH1\tCH2\t\n\t999\t999\t\n",
            lambda i, v: f"{i / 120000:.8f}\t{comma(v)}\t{comma(-v)}\t".replace(".", ","),
        ),
        [("ECG", "mV", 2000), ("Breath", "V", 2000)],
    ),
    "LabChart": (
        "a.txt",
        lines(
            "Interval=\t0.001 s\nExcelDateTime=\t4.41975e+04\t01/01/2021\nTimeFormat=\tStartOfBlock\n"
            "ChannelTitle=\tECG\tBreath\nRange=\t10.000 V\t2.000 V\nUnitName=\tmV\tV\n",
            lambda i, v: f"{i / 1000:.3f}\t{v}\t{-v}",
        ),
        [("ECG", "mV", 1000), ("Breath", "V", 1000)],
    ),
    "LabChart with comments": (
        "a.txt",
        lines(
            "Interval=\t0.001 s\nChannelTitle=\tECG\nRange=\t10.000 V\nUnitName=\tmV\n",
            lambda i, v: f"{i / 1000:.3f}\t{v}" + "\t#* Jane Doe moves" * (i in {0, 100, ROWS - 1}),
        ),
        [("ECG", "mV", 1000)],
    ),
    "Mind Monitor (Muse)": (
        "a.csv",
        lines(
            "TimeStamp,Delta_TP9,RAW_TP9,RAW_AF7,Battery,Elements\n",
            lambda i, v: f"2020-06-01 10:{i // 240:02d}:{i % 240 / 4:06.3f},0.5,{v},{-v},90,",
        )
        + "2020-06-01 10:01:14.750,,,,,/muse/elements/blink\n",
        [("RAW_TP9", "uV", 4), ("RAW_AF7", "uV", 4)],
    ),
    "Mind Monitor (Muse) with decimal commas": (
        "a.csv",
        lines(
            "TimeStamp;RAW_TP9;RAW_AF7;Elements\n",
            lambda i, v: (
                f"2020-06-01 10:{i // 240:02d}:{i % 240 / 4:06.3f};{comma(v)};{comma(-v)};"
            ),
        ),
        [("RAW_TP9", "uV", 4), ("RAW_AF7", "uV", 4)],
    ),
    "Emotiv": (
        "a.csv",
        lines(
            "title:x, recorded:01.06.20, sampling:128, subject:Jane Doe, labels:COUNTER AF3 F7, chan:3\n",
            lambda i, v: f"{i % 129},{v},{-v}",
        ),
        [("AF3", "uV", 128), ("F7", "uV", 128)],
    ),
    "EmotivPRO": (
        "a.csv",
        lines(
            "title:x,start timestamp:1600000000.5,stop timestamp:1600000010.5,headset serial:E1,"
            "channels:14,sampling rate:eeg_256;mot_32\nTimestamp,EEG.Counter,EEG.Interpolated,"
            "EEG.AF3,EEG.Pz,EEG.RawCq,CQ.AF3,MOT.AccX,MarkerIndex\n",
            lambda i, v: f"{1600000000.5 + i / 256:.6f},{i % 256},0,{v},{-v},0,4,{v},",
        ),
        [("EEG.AF3", "uV", 256), ("EEG.Pz", "uV", 256)],
    ),
    "Polar Flow": (
        "a.csv",
        lines(
            "Name,Sport,Date,Start time\nJane Doe,RUNNING,01-01-2021,07:00:00\n"
            "Sample rate,Time,HR (bpm),Pace (min/km),Temperatures (C)\n",
            lambda i, v: f"{'1' if not i else ''},00:{i // 60:02d}:{i % 60:02d},{v},,",
        ),
        [("HR", "bpm", 1)],
    ),
    "FreeStyle Libre": (
        "a.csv",
        lines(
            "Glucose Data,Generated on,01-05-2023 10:00 UTC,Generated by,Jane Doe\n"
            "Device,Serial Number,Device Timestamp,Record Type,Historic Glucose mmol/L,Scan Glucose mmol/L,Notes\n",
            lambda i, v: (
                f"Libre,A1,{datetime(2023, 5, 1) + timedelta(minutes=15 * i):%d-%m-%Y %H:%M},0,{v},,"
            ),
        ),
        [("Historic Glucose mmol/L", "mmol/L", 1 / 900)],
    ),
    "FreeStyle Libre in German": (
        "a.csv",
        lines(
            "Glukose-Werte,Erstellt am,01-05-2023 10:00 UTC,Erstellt von,Jane Doe\n"
            "Gerät,Seriennummer,Gerätezeitstempel,Aufzeichnungstyp,Glukosewert-Verlauf mg/dL,Glukose-Scan mg/dL\n",
            lambda i, v: (
                f"Libre,A1,{datetime(2023, 5, 1) + timedelta(minutes=15 * i):%d-%m-%Y %H:%M},0,{v},"
            ),
        ),
        [("Glukosewert-Verlauf mg/dL", "mg/dL", 1 / 900)],
    ),
    "FreeStyle Libre with Spanish names": (
        "a.csv",
        lines(
            "Datos de glucosa,Generado el,01-05-2023 10:00 UTC,Generado por,Jane Doe\n"
            "Dispositivo,Número de serie,Sello de tiempo del dispositivo,Tipo de registro,"
            "Historial de glucosa mg/dL,Escaneo de glucosa mg/dL,Notas\n",
            lambda i, v: (
                "FreeStyle LibreLink,A1,"
                f"{datetime(2023, 5, 1) + timedelta(minutes=15 * i):%d-%m-%Y %H:%M},0,{v},,"
            ),
        ),
        [("Historial de glucosa mg/dL", "mg/dL", 1 / 900)],
    ),
    "Apple Health": (
        "a.csv",
        lines(
            "type,sourceName,sourceVersion,unit,creationDate,startDate,endDate,value\n",
            lambda i, v: (
                "HKQuantityTypeIdentifierHeartRate,Jane Doe's Watch,9.1,count/min,"
                "2024-03-02 08:00:00 +0100,"
                f"{datetime(2024, 3, 1) + timedelta(seconds=5 * i)} +0100,"
                f"{datetime(2024, 3, 1) + timedelta(seconds=5 * i)} +0100,{v}"
            ),
        ),
        [("value", "bpm", 0.2)],
    ),
    "Spike2": ("a.txt", SPIKE2, [("EEG", "mV", 500)]),
    "Spike2 with channels below one another": (
        "a.txt",
        SPIKE2 + "\n" + SPIKE2.partition("\n\n")[2].replace("EEG", "EMG"),
        [("EEG", "mV", 500), ("EMG", "mV", 500)],
    ),
    "Dexcom Clarity": (
        "a.csv",
        lines(
            "Index,Timestamp (YYYY-MM-DDThh:mm:ss),Event Type,Glucose Value (mg/dL)\n"
            "1,,FirstName,\n2,,LastName,\n",
            lambda i, v: (
                f"{i + 3},{datetime(2021, 3, 4) + timedelta(minutes=5 * i):%Y-%m-%dT%H:%M:%S}"
                f",EGV,{v}"
            ),
        ),
        [("Glucose Value", "mg/dL", 1 / 300)],
    ),
    "Dexcom Clarity with another unit": (
        "a.csv",
        lines(
            "Index,Timestamp (YYYY-MM-DDThh:mm:ss),Event Type,Glucose Value (mmol/L)\n",
            lambda i, v: (
                f"{i + 1},{datetime(2021, 3, 4) + timedelta(minutes=5 * i):%Y-%m-%dT%H:%M:%S}"
                f",EGV,{v}"
            ),
        ),
        [("Glucose Value", "mmol/L", 1 / 300)],
    ),
    "Dexcom Clarity in German": (
        "a.csv",
        lines(
            "Index,Zeitstempel (JJJJ-MM-TThh:mm:ss),Ereignistyp,Glukosewert (mmol/l)\n"
            "1,,Vorname,\n2,,Nachname,\n",
            lambda i, v: (
                f"{i + 3},{datetime(2021, 3, 4) + timedelta(minutes=5 * i):%Y-%m-%dT%H:%M:%S}"
                f",EGV,{v}"
            ),
        )
        + "303,2021-03-05T01:00:00,EGV,Niedrig\n",
        [("Glukosewert", "mmol/L", 1 / 300)],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_vendor_form_is_read(tmp_path: Path, form: str) -> None:
    name, text, wanted = FORMS[form]
    record = read(tmp_path, name, text)
    assert [(s.channel, s.unit) for s in record.signals] == [item[:2] for item in wanted]
    np.testing.assert_allclose([s.rate for s in record.signals], [item[2] for item in wanted])
    np.testing.assert_array_equal(record.signals[0].samples[:ROWS], WAVE.astype(np.float32))
    said = messages(tmp_path)
    assert re.sub(" (in German|with .*)$", "", form) in said
    assert not re.search(r"Doe|MOS2D|\b1980\b", said)  # hashes have digits, too


def test_a_table_of_two_devices_loses_no_channel(tmp_path: Path) -> None:
    device = '"sensor": ["ECG"], "column": ["nSeq", "DI", "ECG"], "sampling rate": 500'
    head = f'# OpenSignals Text File Format\n# {{"a": {{{device}}}, "b": {{{device}}}}}\n'
    text = lines(f"{head}# EndOfHeader\n", lambda i, v: f"{i % 16}\t0\t{v}\t{i % 16}\t0\t{-v}\t")
    values = [s.samples for s in read(tmp_path, "a.txt", text).signals]
    assert sum(np.array_equal(v, WAVE.astype(np.float32)) for v in values) == 1
    assert sum(np.array_equal(v, -WAVE.astype(np.float32)) for v in values) == 1


def test_every_form_has_a_title_and_a_rate_or_a_clock() -> None:
    for form in vendors.read_forms():
        assert form.title
        assert form.rate or form.interval or form.clock, form.title


# --- sessions of devices with a file a sensor

E4_START = 1544027337.0
E4_RATES = {"ACC": 32, "BVP": 64, "EDA": 4, "TEMP": 4, "HR": 1}
E4_DELAYS = {"EDA": 0.5, "HR": 10.0}
E4_BEATS = np.cumsum(np.random.default_rng(3).uniform(0.6, 1.1, 60)).round(6) + 4


def write_e4(folder: Path, prefix: str = "", seed: int = 0) -> dict[str, np.ndarray]:
    """A session of 80 s as the maker describes it; the values of each sensor."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    values: dict[str, np.ndarray] = {}
    for sensor, rate in E4_RATES.items():
        start = E4_START + E4_DELAYS.get(sensor, 0.0)
        width = 3 if sensor == "ACC" else 1
        table = random.integers(-64, 64, (80 * rate, width)) + (0 if sensor == "ACC" else 0.25)
        rows = [[start] * width, [float(rate)] * width, *table.tolist()]
        text = "".join(", ".join(f"{cell:.6f}" for cell in row) + "\n" for row in rows)
        (folder / f"{prefix}{sensor}.csv").write_text(text)
        values[sensor] = table
    beats = "".join(f"{time:.6f},0.8\n" for time in E4_BEATS)
    (folder / f"{prefix}IBI.csv").write_text(f"{E4_START:.6f}, IBI\n{beats}")
    (folder / f"{prefix}tags.csv").write_text(f"{E4_START + 30.25:.2f}\n{E4_START + 61:.2f}\n")
    return values


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(
    ("folders", "prefixes", "names"),
    [
        (("a/154_A1", "b"), ("", ""), ["a/154_A1", "b"]),
        ((".",), ("",), ["raw"]),
        ((".", "."), ("P1_", "P2_"), ["P1", "P2"]),
    ],
)
def test_the_files_of_an_e4_session_are_one_recording(
    tmp_path: Path,
    folders: tuple[str, ...],
    prefixes: tuple[str, ...],
    names: list[str],
    mapped: bool,
) -> None:
    written = [
        write_e4(tmp_path / "raw" / folder, prefix, seed)
        for seed, (folder, prefix) in enumerate(zip(folders, prefixes, strict=True))
    ]
    (tmp_path / "map.toml").write_text(write_template(scan_folder(tmp_path / "raw")))
    records = read_folder(tmp_path, tmp_path / "map.toml" if mapped else None)
    assert list(records) == names
    for record, values in zip(records.values(), written, strict=True):
        assert record.start_time == "2018-12-05T16:28:57"
        units = {signal.channel: (signal.unit, signal.rate) for signal in record.signals}
        assert units == {f"ACC {axis}": ("g", 32) for axis in "xyz"} | {
            "BVP": ("", 64),
            "EDA": ("uS", 4),
            "TEMP": ("C", 4),
            "HR": ("bpm", 1),
        }
        for sensor, rate in E4_RATES.items():
            scale = 1 / 64 if sensor == "ACC" else 1.0
            for column, axis in zip(values[sensor].T, "xyz", strict=False):
                times, found = find_values(record, f"ACC {axis}" if sensor == "ACC" else sensor)
                np.testing.assert_array_equal(found, (column * scale).astype(np.float32))
                expected = E4_DELAYS.get(sensor, 0.0) + np.arange(80 * rate) / rate
                assert np.abs(times - expected).max() <= 0.5 / rate
        beats = [note.onset for note in record.annotations if note.label == "beat"]
        np.testing.assert_allclose(beats, E4_BEATS, atol=1e-6)
        marks = [note for note in record.annotations if note.label == "tag"]
        assert [(note.onset, note.duration) for note in marks] == [(30.25, 0.0), (61.0, 0.0)]


def test_an_e4_session_gives_windows_and_an_empty_file_of_marks_is_none(tmp_path: Path) -> None:
    write_e4(tmp_path / "raw")
    (tmp_path / "raw" / "tags.csv").write_text("")
    (record,) = read_folder(tmp_path).values()
    assert {note.label for note in record.annotations} == {"beat"}
    made = tokens.build(tmp_path / "cache", out=tmp_path / "t")
    assert len(made.channel_names) == 7
    assert len(made) == 7  # of 10 s, from where the heart rate begins to 80 s


@pytest.mark.parametrize("chosen", ["", '[[files]]\nmatch = "(?P<recording>s)/"\n'])
def test_labels_in_the_folder_of_a_session_are_its_own_and_count_once(
    tmp_path: Path, chosen: str
) -> None:
    write_e4(tmp_path / "raw" / "s")
    text = f"{E4_START + 20:.0f},{E4_START + 40:.0f},stress\n{E4_START + 50:.0f},,mark\n"
    (tmp_path / "raw" / "s" / "labels.csv").write_text(f"start,end,label\n{text}")
    path = tmp_path / "map.toml"
    path.write_text(f'{chosen}pattern = "*.csv"\nlabels = "{{folder}}/labels.csv"\n')
    (record,) = read_folder(tmp_path, path if chosen else None).values()
    notes = [note for note in record.annotations if note.label not in {"beat", "tag"}]
    assert notes == [(20.0, 20.0, "stress"), (50.0, 0.0, "mark")]


def test_intervals_without_their_session_are_a_channel(tmp_path: Path) -> None:
    write_e4(tmp_path / "whole")
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "IBI.csv").write_bytes((tmp_path / "whole" / "IBI.csv").read_bytes())
    (record,) = read_folder(tmp_path).values()
    assert [signal.channel for signal in record.signals] == ["IBI"]


def test_an_e4_session_is_applied_as_it_is_read(tmp_path: Path) -> None:
    values = write_e4(tmp_path / "raw")
    options = WindowOptions.model_construct(
        channels=["BVP", "ACC y"], rate=64.0, length=10.0, clock=None
    )
    (recording,) = find_recordings([tmp_path / "raw"], options, ChannelMap())
    record = recording.read()
    assert (recording.name, record.annotations) == ("raw", [])
    _, pulse = find_values(record, "BVP")
    np.testing.assert_array_equal(pulse, values["BVP"][:, 0].astype(np.float32))


@pytest.mark.slow
def test_sensors_of_polar_are_one_recording(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    start = datetime(2023, 5, 1, 10, 11, 12, 100000)
    sensors = {  # columns, Hz, seconds after the start
        "ECG": ("ecg [uV]", 130, 0.0),
        "ACC": ("X [mg];Y [mg];Z [mg]", 50, 0.34),
        "GYRO": ("X [dps];Y [dps];Z [dps]", 50, 0.2),
        "MAGN": ("X [G];Y [G];Z [G]", 50, 0.2),
    }
    for sensor, (columns, rate, delay) in sensors.items():
        rows = [f"Phone timestamp;sensor timestamp [ns];{columns}"]
        for i in range(rate * 30):
            phone = (start + timedelta(seconds=delay + i / rate)).isoformat(timespec="milliseconds")
            cells = [str(i % 50 + k) for k in range(columns.count(";") + 1)]
            rows.append(";".join([phone, str(599616 * 10**12 + round(i * 1e9 / rate)), *cells]))
        (raw / f"Polar_H10_12_20230501_101112_{sensor}.txt").write_text("\n".join(rows) + "\n")
    records = read_folder(tmp_path)
    assert list(records) == ["Polar_H10_12_20230501_101112"]
    (record,) = records.values()
    units = {signal.channel: signal.unit for signal in record.signals}
    assert units == {
        "ecg": "uV",
        **dict.fromkeys(("X", "Y", "Z"), "mg"),
        **{f"GYRO {axis}": "deg/s" for axis in "xyz"},
        **{f"MAGN {axis}": "gauss" for axis in "xyz"},
    }
    for channel, delay in (("ecg", 0.0), ("Y", 0.34), ("MAGN z", 0.2)):
        times, _ = find_values(record, channel)
        assert abs(times[0] - delay) < 0.002
        assert times[-1] == pytest.approx(delay + 30, abs=0.03)
    assert "hold no labels that are known" not in messages(tmp_path)


def test_the_minutes_of_an_embrace_plus_are_one_recording(tmp_path: Path) -> None:
    folder = tmp_path / "raw" / "2023-01-20" / "105-3YK"
    folder.mkdir(parents=True)
    sensors = {
        "eda": ("eda_scl_usiemens", "uS"),
        "pulse-rate": ("pulse_rate_bpm", "bpm"),
        "temperature": ("temperature_celsius", "C"),
        "activity-counts": ("activity_counts", ""),
    }
    for sensor, (column, _) in sensors.items():
        head = f"timestamp_unix,timestamp_iso,participant_full_id,{column},missing_value_reason\n"
        rows = [
            f"{1674172800000 + 60000 * i},2023-01-20T{i // 60:02d}:{i % 60:02d}:00Z,1-1-105,"
            + (",device_not_recording" if i % 40 == 5 else f"{30 + i / 8},")
            for i in range(200)
        ]
        (folder / f"1-1-105_2023-01-20_{sensor}.csv").write_text(head + "\n".join(rows) + "\n")
    records = read_folder(tmp_path)
    assert list(records) == ["2023-01-20/105-3YK/1-1-105_2023-01-20"]
    (record,) = records.values()
    units = {signal.channel: signal.unit for signal in record.signals}
    assert units == dict(sensors.values())
    wanted = np.where(np.arange(200) % 40 == 5, np.nan, 30 + np.arange(200) / 8)
    for signal in record.signals:
        assert signal.rate == pytest.approx(1 / 60)
        np.testing.assert_array_equal(signal.samples, wanted.astype(np.float32))
