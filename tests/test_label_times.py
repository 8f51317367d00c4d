"""Labels timed by the clock: their days, clocks that are put forward or back, lists that begin again.

Expected times are those from which the files are written.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from test_generic import attempt, recordings
from test_labels_beside import labels, messages, write, write_night

pytestmark = pytest.mark.slow  # each writes and ingests hours or days

DAYS = datetime(2020, 3, 7, 9, 0, 0)
EVENTS = [3600.0, 86_400.0 + 7200, 2 * 86_400.0 + 60]  # seconds of a recording of three days
NIGHT = datetime(2020, 3, 1, 23, 0, 0)
HOURS = 3600


def read_labels(tmp_path: Path, table: str, start: datetime, seconds: int) -> tuple[list, str]:
    """The labels of a recording beside which `table` lies, and what is said of them."""
    write_night(tmp_path / "raw" / "s1.edf", seconds, start=start, rate=1)
    write(tmp_path / "raw" / "s1.csv", table)
    report = attempt("generic", tmp_path / "raw", tmp_path / "cache")
    return labels(recordings(tmp_path / "cache")["s1"]), messages(report)


def write_times(form: str, times: list[datetime], texts: list[str]) -> str:
    return "".join(f"{time:{form}},{text}\n" for time, text in zip(times, texts, strict=True))


MOMENTS = [DAYS + timedelta(seconds=second) for second in EVENTS]
TEXTS = ["AFIB", "VT", "AFIB"]


@pytest.mark.parametrize(
    ("head", "form"),
    [
        ("time,event", "%Y-%m-%d %H:%M:%S"),
        ("time,event", "%Y-%m-%dT%H:%M:%S.500"),
        ("time,event", "%m/%d/%Y %I:%M:%S %p"),
        ("time,event", "%d.%m.%Y %H:%M:%S"),
        ("time,event", "%d-%b-%Y %H:%M:%S"),
        ("Date,Time,Event", "%d/%m/%Y,%H:%M:%S"),
        ("Datum,Uhrzeit,Event", "%d.%m.%Y,%H:%M:%S"),
    ],
)
def test_labels_with_dates_lie_on_their_days(tmp_path: Path, head: str, form: str) -> None:
    table = f"{head}\n" + write_times(form, MOMENTS, TEXTS)
    found, said = read_labels(tmp_path, table, DAYS, 3 * 86_400)
    half = 0.5 if form.endswith(".500") else 0.0
    assert [(n[0] - half, n[2]) for n in found] == list(zip(EVENTS, TEXTS, strict=True))
    assert "label" not in said


def test_times_since_1970_lie_on_their_days(tmp_path: Path) -> None:
    seconds = [f"{time.replace(tzinfo=UTC).timestamp():.0f}" for time in MOMENTS]
    rows = "".join(f"{time},{text}\n" for time, text in zip(seconds, TEXTS, strict=True))
    found, _ = read_labels(tmp_path, "timestamp,event\n" + rows, DAYS, 3 * 86_400)
    assert [note[::2] for note in found] == list(zip(EVENTS, TEXTS, strict=True))


def test_labels_last_over_days(tmp_path: Path) -> None:
    end = f"{DAYS + timedelta(hours=40):%Y-%m-%d %H:%M:%S}"
    table = f"start,end,event\n{MOMENTS[0]:%Y-%m-%d %H:%M:%S},{end},AFIB\n"
    found, _ = read_labels(tmp_path, table, DAYS, 3 * 86_400)
    assert found == [(3600.0, 39.0 * HOURS, "AFIB")]


STAGES = ["W", "N1", "N2", "N2", "N2", "REM"] * 60
EPOCHS = [NIGHT + timedelta(seconds=30 * i) for i in range(len(STAGES))]
EXPECTED = [(30.0 * i, 30.0, stage) for i, stage in enumerate(STAGES)]


@pytest.mark.parametrize("days", [2, -1, 40])
def test_dates_of_another_night_are_said(tmp_path: Path, days: int) -> None:
    epochs = [epoch + timedelta(days=days) for epoch in EPOCHS]
    table = "time,stage\n" + write_times("%Y-%m-%d %H:%M:%S", epochs, STAGES)
    found, said = read_labels(tmp_path, table, NIGHT, 3 * HOURS)
    assert found == EXPECTED
    number = f"{abs(days)} day{'s' * (abs(days) > 1)}"
    assert f"its dates are {number} {'after' if days > 0 else 'before'} those of" in said
    assert "2020" not in said


def test_dates_that_devices_write_for_none_are_not_said(tmp_path: Path) -> None:
    delay = datetime(2000, 1, 1, 23, 0, 0) - NIGHT
    epochs = [epoch + delay for epoch in EPOCHS]
    table = "time,stage\n" + write_times("%Y-%m-%d %H:%M:%S", epochs, STAGES)
    found, said = read_labels(tmp_path, table, NIGHT, 3 * HOURS)
    assert found == EXPECTED
    assert "its dates" not in said


def test_the_date_of_the_evening_is_not_that_of_the_morning(tmp_path: Path) -> None:
    """Some programs write the date of the night in each row."""
    table = "Date,Time,Stage\n" + write_times("01/03/2020,%H:%M:%S", EPOCHS, STAGES)
    found, said = read_labels(tmp_path, table, NIGHT, 3 * HOURS)
    assert found == EXPECTED
    assert "label" not in said


@pytest.mark.parametrize(
    ("evening", "hour"),
    [
        (datetime(2020, 3, 28, 23, 0, 0), 1),  # summer time begins in Europe
        (datetime(2020, 3, 7, 23, 0, 0), 1),  # in the USA
        (datetime(2020, 10, 24, 23, 0, 0), -1),  # and ends in Europe
    ],
)
@pytest.mark.parametrize("form", ["%H:%M:%S", "%Y-%m-%d %H:%M:%S"])
def test_epochs_go_on_where_clocks_are_changed(
    tmp_path: Path, evening: datetime, hour: int, form: str
) -> None:
    change = datetime(evening.year, evening.month, evening.day + 1, 2 + (hour < 0))
    stages = STAGES * 2
    epochs = [evening + timedelta(seconds=30 * i) for i in range(len(stages))]
    shown = [epoch + timedelta(hours=hour * (epoch >= change)) for epoch in epochs]
    table = "time,stage\n" + write_times(form, shown, stages)
    found, _ = read_labels(tmp_path, table, evening, 6 * HOURS)
    assert found == [(30.0 * i, 30.0, stage) for i, stage in enumerate(stages)]


def test_an_hour_without_epochs_is_no_change_of_the_clock(tmp_path: Path) -> None:
    steps = [30.0 * i + HOURS * (i >= 200) for i in range(len(STAGES))]
    epochs = [NIGHT + timedelta(seconds=step) for step in steps]
    table = "time,stage\n" + write_times("%H:%M:%S", epochs, STAGES)
    found, _ = read_labels(tmp_path, table, NIGHT, 5 * HOURS)
    assert [note[0] for note in found] == steps


def test_events_by_type_begin_again_in_the_evening(tmp_path: Path) -> None:
    hours = {"Apnea": [0.5, 2, 6], "Arousal": [0.25, 1.5, 5], "Leg movement": [0.1, 7]}
    events = [(3600.0 * hour, text) for text, times in hours.items() for hour in times]
    moments = [NIGHT + timedelta(seconds=seconds) for seconds, _ in events]
    table = "time,event\n" + write_times("%H:%M:%S", moments, [text for _, text in events])
    found, said = read_labels(tmp_path, table, NIGHT, 8 * HOURS)
    assert [(note[0], note[2]) for note in found] == sorted(events)
    assert "label" not in said


def test_a_second_scorer_begins_again_in_the_evening(tmp_path: Path) -> None:
    pairs = [f"{stage},{'N3' if i % 6 == 4 else stage}" for i, stage in enumerate(STAGES)]
    rows = write_times("%H:%M:%S", EPOCHS, pairs)
    found, said = read_labels(tmp_path, "time,scorer_1,scorer_2\n" + rows, NIGHT, 3 * HOURS)
    assert found == EXPECTED
    assert "differ in 60 of 360 epochs" in said


@pytest.mark.parametrize("name", ["Hora local", "Clock (local)", "wall time", "Oras"])
def test_a_column_of_times_of_day_counts_under_any_name(tmp_path: Path, name: str) -> None:
    """The list begins 10 minutes into the recording."""
    begin = NIGHT - timedelta(minutes=10)
    table = f"{name},stage\n" + write_times("%H:%M:%S", EPOCHS, STAGES)
    found, _ = read_labels(tmp_path, table, begin, 4 * HOURS)
    assert found == [(600 + onset, length, stage) for onset, length, stage in EXPECTED]
