"""Readers of a user's own recordings, one a format: a file as a record, by the mapping file."""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from os.path import normpath
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from bitimely_core.errors import Finding, Reason, UserError, input_error, input_warning, safe_text
from bitimely_core.formats import edf, matlab, nsrr_xml, stage_texts, tables, wfdb, wfdb_annotations
from bitimely_core.formats.source import Source, locate_errors, report_faults
from bitimely_core.formats.text import list_names, sanitize_label
from bitimely_core.formats.units import narrow_samples
from bitimely_core.recordings.mapping import EMPTY_CELLS, Format, RecordingInfo, find_suffix
from bitimely_core.recordings.selection import make_record
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import (
    Annotation,
    AttributeValue,
    Record,
    Records,
    Signal,
    SourceRows,
    count_reasons,
)

# kinds of channel that mne gives in volts
ELECTRIC = {"eeg", "eog", "ecg", "emg", "seeg", "ecog", "dbs", "bio"}


def read_edf(path: Path, rel: str, info: RecordingInfo, events: tuple[Path, ...] = ()) -> Record:
    """A file in EDF, EDF+ or BDF with the NSRR `events` beside it.

    Raises UserError as `formats.edf.read_recording`, and for faulty events.
    """
    for file in events:
        with locate_errors(file):
            scored = [_name_event(note, info.labels) for note in nsrr_xml.read_events(file)]
        info = replace(info, notes=(*info.notes, *scored))
    with locate_errors(rel):
        recording = edf.read_recording(path, required=tuple(info.channels), keep_phi=info.keep_phi)
    header, findings = recording.header, recording.findings
    start = header.start + timedelta(seconds=recording.origin) if header.start else None
    return make_record(
        rel, info, recording.signals, recording.annotations, findings, start, header.phi
    )


def _name_event(note: Annotation, labels: Mapping[str, str] | None) -> Annotation:
    """An event called by its stage, where it is one, or by its concept without the code.

    A map may name it with its code.
    """
    name = note.label.partition("|")[0].strip()
    if labels is None:
        return note._replace(label=stage_texts.STAGE_OF.get(name.lower(), name))
    return note if note.label in labels else note._replace(label=name)


def read_wfdb(source: Source, rel: str, info: RecordingInfo) -> Record:
    """A WFDB record with its segments and its annotation files.

    Raises UserError as `formats.wfdb.read_recording`, and for faulty annotations.
    """
    recording = wfdb.read_recording(
        rel, source, required=tuple(info.channels), keep_phi=info.keep_phi
    )
    header, findings = recording.header, list(recording.findings)
    codes: list[Annotation] = []
    notes: list[Annotation] = []
    for name in info.annotation_files:
        with locate_errors(name):
            content = wfdb_annotations.read_annotations(source.path(name), header.frame_rate)
        selected = content.list_codes(info.events)
        codes += selected
        notes += content.notes
        excluded = content.others + len(content.beats) + len(content.rhythms) - len(selected)
        if excluded:
            what = "beats or rhythms" if info.events == "both" else info.events
            problem = f"annotations that are not {what}: {excluded}"
            action = "counted, not kept"
            findings.append(
                Finding(Reason.LEFT_OUT, problem, action, level="info", file=name, count=excluded)
            )
    codes = [_name_rhythm(note, info.labels or {}) for note in codes]
    info = replace(info, notes=(*info.notes, *codes))
    phi = {"comments": "\n".join(header.comments)} if header.comments else {}
    return make_record(rel, info, recording.signals, notes, findings, header.start, phi)


def _name_rhythm(note: Annotation, labels: Mapping[str, str]) -> Annotation:
    """A rhythm with its bracket, as the file has it, where the map names it so."""
    name = f"({note.label}"
    return note._replace(label=name) if note.duration and name in labels else note


def read_table(path: Path, rel: str, info: RecordingInfo) -> Record:
    """A csv or Parquet table with a column a channel and a row a sample.

    Empty cells are missing values.
    """
    with locate_errors(rel):
        names = list(info.channels) or _list_table_channels(path, info)
        columns = [info.time, *names] if info.time else names
        values = tables.read_number_table(
            path, columns, missing=EMPTY_CELLS, delimiter=info.delimiter
        )
        if not len(values):
            raise input_error(Reason.TRUNCATED, "has no rows below its header")
        rate = measure_rate(values[:, 0], info.rate, info.time) if info.time else info.rate
        if rate is None:
            wanted = "needs --map with a rate (`rate` or `time` in [[files]])"
            raise input_error(Reason.SAMPLING_RATE, "has no sampling rate", wanted)
        signals = [
            Signal(name, rate, "", narrow_samples(column, name))
            for name, column in zip(names, values.T[-len(names) :], strict=True)
        ]
    findings = _report_missing(signals, "cells are empty")
    return make_record(rel, replace(info, rate=None), signals, findings=findings)


def _list_table_channels(path: Path, info: RecordingInfo) -> list[str]:
    """All columns but that of the times. Raises UserError: header."""
    columns = tables.read_names(path, delimiter=info.delimiter)
    names = [name for name in columns if name not in {"", info.time}]
    if names and all(map(tables.NUMBER.fullmatch, names)):
        wanted = "expected names of channels: is the header line absent?"
        raise input_error(Reason.HEADER, "the first line holds numbers", wanted, row=1)
    return names


def measure_rate(times: np.ndarray, stated: float | None, column: str) -> float:
    """Sampling rate in Hz of a column of times in seconds; `stated`: that of the map.

    Raises UserError: timestamps for gaps in time or repeated times, sampling_rate where the map
    states another rate.
    """
    if len(times) < 2 or np.isnan(times).any() or times[-1] <= times[0]:
        problem = "the times do not increase, or one is missing"
        raise input_error(Reason.TIMESTAMPS, problem, field=column)
    rate = stated or (len(times) - 1) / float(times[-1] - times[0])
    distance = np.abs(times - times[0] - np.arange(len(times)) / rate) * rate
    if distance.max() > 0.75:  # of a sample: times may be rounded
        row = int(np.argmax(distance > 0.75))
        clock = f"a clock of {rate:.6g} Hz"
        problem = f"the time of sample {row + 1} is {distance[row]:.3g} samples off {clock}"
        code = Reason.SAMPLING_RATE if stated else Reason.TIMESTAMPS
        raise input_error(code, problem, "expected a row for every sample", field=column)
    return rate


def _report_missing(signals: Sequence[Signal], what: str) -> list[Finding]:
    """The warning about missing values, with the channels that have no others."""
    floats = [signal for signal in signals if signal.samples.dtype.kind == "f"]
    counts = {signal.channel: int(np.isnan(signal.samples).sum()) for signal in floats}
    missing = sum(counts.values())
    if not missing:
        return []
    empty = [signal.channel for signal in floats if counts[signal.channel] == len(signal.samples)]
    problem = f"{missing} {what}" + (f", all of {list_names(empty)}" if empty else "")
    action = "kept as missing (NaN)"
    return [input_warning(Reason.MISSING_VALUES, problem, action, count=missing)]


def read_series(path: Path, rel: str, info: RecordingInfo) -> Records:
    """A table with a recording a row: the columns of `info.series` are its samples.

    Faulty rows are counted and left out.
    """
    records: list[Record] = []
    faults: list[Finding] = []
    dropped: Counter[str] = Counter()
    with locate_errors(rel):
        if info.rate is None:
            wanted = "expected `rate` in [[files]] of the map"
            raise input_error(Reason.CONFIG, "has no sampling rate", wanted)
        samples = _find_sample_columns(path, info)
        key = [info.columns["id"]] if "id" in info.columns else []
        columns = [*info.columns.values(), *samples]
        for row in tables.read_rows(path, columns, key=key, delimiter=info.delimiter):
            if isinstance(row, Finding) and row.level == "warning":
                dropped[str(row.code)] += 1
                continue
            record = row if isinstance(row, Finding) else _make_series_record(row, samples, info)
            if isinstance(record, Finding):
                faults.append(record.at(rel))
            else:
                records.append(record)
        seen = tables.count_rows(path, delimiter=info.delimiter)
    findings = report_faults(faults)
    if len(records) > 1 and "subject" not in info.columns:
        findings.append(
            input_warning(
                Reason.IDENTIFIER,
                f"{len(records)} rows with unknown subjects, each counted as a subject of its own",
                "recordings of one person in two splits make scores optimistic",
                "Give subject_column",
                file=rel,
            )
        )
    account = SourceRows(
        file=rel,
        kind="segments",
        seen=seen,
        dropped=dict(dropped),
        quarantined=count_reasons(faults),
    )
    return Records(records=records, rows=[account], findings=findings)


def _find_sample_columns(path: Path, info: RecordingInfo) -> list[str]:
    """The columns that match `info.series`. Raises UserError: schema."""
    columns = tables.read_names(path, delimiter=info.delimiter)
    others = info.columns.values()
    samples = [
        name for name in columns if fnmatch.fnmatchcase(name, info.series) and name not in others
    ]
    if not samples:
        problem = f"has no column that matches {safe_text(info.series)}"
        wanted = f"found {', '.join(map(safe_text, columns[:12]))}"
        raise input_error(Reason.SCHEMA, problem, wanted, field="series")
    return samples


def _make_series_record(
    row: tables.TableRow, samples: list[str], info: RecordingInfo
) -> Record | Finding:
    """One row as a recording, or its fault."""
    cells = {key: cell.strip() for key, cell in zip(info.columns, row.cells, strict=False)}
    values = tables.parse_numbers(tables.TableRow(row.row, row.cells[len(info.columns) :]), samples)
    if isinstance(values, Finding):
        return values
    try:
        value = tables.parse_number(cells.get("value", ""))
    except UserError as error:
        return tables.locate_cell(error, row.row, info.columns["value"])
    if cells.get("subject", "?").lower() in EMPTY_CELLS:
        problem, field = f"row {row.row} has no subject", info.columns["subject"]
        return Finding(Reason.IDENTIFIER, problem, "expected one", field=field, row=row.row)
    name, unit = next(iter(info.channels.values()), ("channel 1", ""))
    try:
        narrow = narrow_samples(values, name)
    except UserError as error:
        return replace(error.finding, row=row.row, problem=f"row {row.row} has {error.problem}")
    attributes: dict[str, AttributeValue] = dict(info.attributes)
    if cells.get("label", "").lower() not in EMPTY_CELLS:
        attributes["label"] = cells["label"]
    if value is not None:
        attributes["value"] = value
    recording = f"{info.recording_id}-{cells.get('id') or f'{row.row:06d}'}"
    assert info.rate is not None
    return Record(
        recording_id=recording,
        subject_id=cells.get("subject") or recording,
        signals=[Signal(name, info.rate, unit or info.unit, narrow)],
        attributes=attributes,
    )


def read_npy(path: Path, rel: str, info: RecordingInfo) -> Record:
    """An array [samples] or [samples, channels] of int16 (kept) or other numbers (float32)."""
    with locate_errors(rel):
        values = _load_npy(path)
        if values.dtype.kind not in "iuf" or values.ndim not in {1, 2} or values.size == 0:
            problem = f"is an array of {values.ndim} dimensions of {values.dtype}"
            raise input_error(Reason.DIMENSIONS, problem, "expected [samples, channels]")
        signals = _make_array_signals(np.asarray(values).reshape(len(values), -1), info)
    return make_record(rel, info, signals, findings=_report_missing(signals, "values are NaN"))


def _load_npy(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        is_unsafe = re.search("pickle|object", str(error).lower()) is not None
        code = Reason.UNSAFE_PICKLE if is_unsafe else Reason.CORRUPT
        problem = "is not a .npy file of numbers"
        raise input_error(code, problem, "only arrays of numbers are read") from None
    except (OSError, EOFError, SyntaxError) as error:
        raise_system_error(error, path, stored=False)
        problem = f"does not read as .npy ({type(error).__name__})"
        raise input_error(Reason.CORRUPT, problem, hint="Save it again") from None


def read_mat(path: Path, rel: str, info: RecordingInfo) -> Record:
    """An array of a MATLAB 5 file, as `read_npy`.

    One with a row a channel is turned: the map names as many channels, or it is wider than tall.
    """
    with locate_errors(rel):
        values = matlab.read_array(path, info.variable)
        if values.ndim != 2 or values.size == 0:
            problem = f"is an array of {' x '.join(map(str, values.shape))}"
            wanted = "expected [samples, channels] or [channels, samples]"
            raise input_error(Reason.DIMENSIONS, problem, wanted, field="variable")
        tall, wide = (count == len(info.channels) for count in values.shape[::-1])
        if (wide and not tall) or (wide == tall and values.shape[0] < values.shape[1]):
            values = values.T
        signals = _make_array_signals(values, info)
    return make_record(rel, info, signals, findings=_report_missing(signals, "values are NaN"))


def _make_array_signals(table: np.ndarray, info: RecordingInfo) -> list[Signal]:
    """The columns of [samples, channels] as signals: int16 as it is, else float32.

    Raises UserError: dimensions, physical_range.
    """
    names = list(info.channels) or [f"channel {i}" for i in range(1, table.shape[1] + 1)]
    if len(names) != table.shape[1]:
        problem = f"has {table.shape[1]} columns"
        raise input_error(Reason.DIMENSIONS, problem, f"the map names {len(names)} channels")
    signals: list[Signal] = []
    for name, column in zip(names, table.T, strict=True):
        is_stored = table.dtype == np.int16
        samples = np.ascontiguousarray(column) if is_stored else narrow_samples(column, name)
        signals.append(Signal(name, info.rate or 1.0, "", samples))
    return signals


def read_mne(path: Path, rel: str, info: RecordingInfo) -> Record:
    """Any other format, through mne; volts become uV."""
    with locate_errors(rel):
        if find_suffix(rel) == ".vhdr":
            pattern = r"^\s*(?:DataFile|MarkerFile)\s*=\s*(.+?)\s*$"
            _require_same_folder(re.findall(pattern, path.read_text("latin-1"), re.MULTILINE))
        try:
            raw, values = _load_raw(path)
            kinds = raw.get_channel_types()
            rate = float(raw.info["sfreq"])
            start = raw.info["meas_date"]
            notes = [
                Annotation(float(note["onset"]), float(note["duration"]), str(note["description"]))
                for note in raw.annotations
            ]
        except UserError:
            raise
        except Exception as error:  # each of mne's readers fails in ways of its own
            raise_system_error(error, path, stored=False)
            problem, hint = (
                f"mne does not read it ({type(error).__name__})",
                "Open it with mne to see more",
            )
            raise input_error(Reason.CORRUPT, problem, hint=hint) from None
    signals: list[Signal] = []
    for number, (name, kind, channel) in enumerate(
        zip(raw.ch_names, kinds, values, strict=True), 1
    ):
        factor, unit = (1e6, "uV") if kind in ELECTRIC else (1, "")
        with np.errstate(over="ignore"):
            samples = (channel * factor).astype(np.float32)
        signals.append(Signal(sanitize_label(name) or f"channel {number}", rate, unit, samples))
    return make_record(
        rel, info, signals, notes, start=start.replace(tzinfo=None) if start else None
    )


def _load_raw(path: Path) -> tuple[Any, np.ndarray]:
    """The recording of mne and its values. Raises UserError (path_escape), and mne's exceptions."""
    import mne

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        raw = mne.io.read_raw(path, preload=False, verbose="ERROR")
        for name in filter(None, raw.filenames):
            if normpath(Path(name).parent) != normpath(path.parent):
                problem = "names a file in another folder"
                raise input_error(Reason.PATH_ESCAPE, problem, "which is not read")
        return raw, raw.get_data(verbose="ERROR")


def _require_same_folder(names: Iterable[str]) -> None:
    """Raises UserError (path_escape) for a name that is not that of a file in the same folder."""
    for name in names:
        if PurePosixPath(name).name != name or "\\" in name:
            problem = f"names the file {safe_text(name)}"
            raise input_error(Reason.PATH_ESCAPE, problem, "which must be in the same folder")


READERS: dict[Format, Callable[[Path, str, RecordingInfo], Record]] = {
    "edf": read_edf,
    "table": read_table,
    "npy": read_npy,
    "mat": read_mat,
    "mne": read_mne,
}
