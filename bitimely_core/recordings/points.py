"""Reads the times at which a run on points, such as beats, is applied (`predict --at`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from bitimely_core.errors import Finding, Reason, UserError, input_error, safe_text, usage_error
from bitimely_core.formats import edf, tables
from bitimely_core.formats.sniffer import find_delimiter
from bitimely_core.formats.source import finding_to_error, locate_errors
from bitimely_core.formats.wfdb_annotations import BEATS, read_rows
from bitimely_core.formats.wfdb_header import parse_header
from bitimely_core.recordings.mapping import SUFFIXES, find_suffix, strip_suffix

# usual names of the columns, in small letters
TIMES = ("onset", "time", "t", "seconds", "sec", "time_s", "onset_s", "time (s)", "time [s]")
RECORDINGS = ("recording", "record", "recording_id", "file")
ANY = ""  # recording of the times of a file that names none


class PointTimes(NamedTuple):
    """Times of a file: recording -> seconds from its start."""

    file: str
    by_recording: dict[str, list[float]]

    @property
    def names_recordings(self) -> bool:
        """Whether the file says of which recordings its times are."""
        return ANY not in self.by_recording

    def list_of(self, file: str) -> list[float]:
        """The times of the recording in `file`. Raises UserError (unmatched_labels) without one."""
        name = PurePosixPath(file).name
        for key in (ANY, name, strip_suffix(name)):
            if key in self.by_recording:
                return self.by_recording[key]
        problem = f"{safe_text(PurePosixPath(self.file).name)} has no time of it"
        raise input_error(Reason.UNMATCHED_LABELS, problem, "expected a row that names it")


def read_times(path: Path, recordings: Sequence[Path] = ()) -> PointTimes:
    """The times in a table, a file of EDF+ annotations, or one of WFDB annotations.

    A table has one time a line, or a column `onset` or `time`, in seconds; with a column
    `recording` its rows are of several recordings. Of annotations those without a duration count
    (of WFDB the beats), else the onsets of all.

    Args:
        path: the file.
        recordings: files that are predicted: the header of a single WFDB record states the rate of
            annotations without one.

    Raises:
        UserError: not_found (exit 2), no_input for a file without a time, and the faults of the
            file.
    """
    if not path.is_file():
        raise usage_error("no such file", code=Reason.NOT_FOUND, file=str(path), field="--at")
    kind = "table" if find_suffix(path.name) == ".txt" else SUFFIXES.get(find_suffix(path.name))
    with locate_errors(path):
        if kind == "table":
            by_recording = _read_table_times(path)
        elif kind == "edf":
            by_recording = {ANY: _read_edf_times(path)}
        else:
            by_recording = {ANY: _read_wfdb_times(path, recordings)}
        if not any(by_recording.values()):
            raise input_error(Reason.NO_INPUT, "holds no time", "expected seconds, one a line")
    return PointTimes(str(path), by_recording)


def _read_edf_times(path: Path) -> list[float]:
    notes = edf.read_recording(path, required=()).annotations
    points = [note.onset for note in notes if note.duration == 0]
    return points or [note.onset for note in notes]


def _read_wfdb_times(path: Path, recordings: Iterable[Path]) -> list[float]:
    rows = read_rows(path, _find_frame_rate(path, recordings))
    beats = [seconds for seconds, symbol, _ in rows if symbol in BEATS]
    return beats or [seconds for seconds, _, _ in rows]


def _read_table_times(path: Path) -> dict[str, list[float]]:
    """The times of a table. Raises UserError: schema, not_numeric, and the faults of its rows."""
    delimiter = find_delimiter(path)
    names = tables.read_names(path, delimiter=delimiter)
    rows: list[tuple[int, tuple[str, ...]]] = []
    for row in tables.read_rows(path, delimiter=delimiter):
        if isinstance(row, Finding):
            raise finding_to_error(row)
        rows.append((row.row, tuple(row.cells)))
    column, recording = _find_column(names, TIMES), _find_column(names, RECORDINGS)
    if column is None and len(names) == 1 and tables.NUMBER.fullmatch(names[0]):
        rows.insert(0, (1, names))
        column = 0
    if column is None:
        problem = f"names none of the columns {', '.join(TIMES[:4])}"
        raise input_error(Reason.SCHEMA, problem, "expected one time a line, or such a column")
    times: dict[str, list[float]] = {}
    for number, cells in rows:
        name = ANY if recording is None else PurePosixPath(cells[recording].strip()).name
        times.setdefault(name, []).append(_parse_time(cells[column], number, names[column]))
    return times


def _find_column(names: Sequence[str], usual: Sequence[str]) -> int | None:
    """The position of the first of the usual names that a column has."""
    places = {name.lower(): place for place, name in enumerate(names)}
    return next((places[name] for name in usual if name in places), None)


def _parse_time(cell: str, row: int, column: str) -> float:
    try:
        seconds = tables.parse_number(cell)
    except UserError as error:
        raise finding_to_error(tables.locate_cell(error, row, column)) from None
    if seconds is None:
        problem, wanted = f"row {row} has no time", "expected seconds"
        raise input_error(Reason.MISSING_VALUES, problem, wanted, row=row, field=column)
    return seconds


def _find_frame_rate(path: Path, recordings: Iterable[Path]) -> float:
    """Hz of the record that annotations belong to: by the header beside them, else that given."""
    headers = [path.with_suffix(".hea"), *recordings]
    header = next((file for file in headers if file.suffix == ".hea" and file.is_file()), None)
    if header is None:
        return 0.0
    return parse_header(header.read_bytes(), header.stem, required=()).rate
