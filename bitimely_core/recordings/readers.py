"""Readers of a user's own recordings, one a format: signals, annotations and header of a file as a
record, by the mapping file.
"""

from __future__ import annotations

import fnmatch
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path, PurePosixPath

import numpy as np

from bitimely_core.errors import Finding, Reason, UserError, input_error, input_warning, safe_text
from bitimely_core.formats import edf as format_edf
from bitimely_core.formats import (
    edf_header,
    matlab,
    nsrr_xml,
    stage_texts,
    tables,
    wfdb_annotations,
)
from bitimely_core.formats import wfdb as format_wfdb
from bitimely_core.formats.source import Source, locate_errors, report_faults
from bitimely_core.formats.text import list_names, sanitize_label
from bitimely_core.formats.units import VOLTS, narrow_samples, scale_signal
from bitimely_core.recordings.mapping import EMPTY_CELLS, RecordingInfo, find_suffix
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import Annotation, Record, Records, Signal, SourceRows

# kinds of channel that mne gives in volts
ELECTRIC = {"eeg", "eog", "ecg", "emg", "seeg", "ecog", "dbs", "bio"}


def read_edf(path: Path, rel: str, info: RecordingInfo, events: tuple[Path, ...] = ()) -> Record:
    """A file in EDF, EDF+ or BDF with the NSRR `events` beside it. Raises UserError as
    `formats.edf.read`, and for faulty events.
    """
    for file in events:
        with locate_errors(file):
            info = replace(
                info,
                notes=(
                    *info.notes,
                    *(_name_event(note, info.labels) for note in nsrr_xml.read_events(file)),
                ),
            )
    with locate_errors(rel):
        found = format_edf.read_recording(path, required=tuple(info.channels))
        if info.keep_phi:
            found = replace(
                found,
                header=edf_header.read_header(path, required=tuple(info.channels), keep_phi=True),
            )
    start = found.header.start
    begin = start + timedelta(seconds=found.origin) if start else None
    return _make_record(
        rel, info, found.signals, found.annotations, found.findings, begin, found.header.phi
    )


def _name_event(note: Annotation, labels: Mapping[str, str] | None) -> Annotation:
    """An event called by its stage, where it is one, or by its concept without the code; as the map
    has it, where there is one.
    """
    name = note.label.partition("|")[0].strip()
    stage = stage_texts.STAGE_OF.get(name.lower())
    return note._replace(
        label=(stage or name) if labels is None else note.label if note.label in labels else name
    )


def read_wfdb(source: Source, rel: str, info: RecordingInfo) -> Record:
    """A WFDB record with its segments and its annotation files. Raises UserError as
    `formats.wfdb.read_recording`, and for faulty annotations.
    """
    found = format_wfdb.read_recording(
        rel, source, required=tuple(info.channels), keep_phi=info.keep_phi
    )
    phi = {"comments": "\n".join(found.header.comments)} if found.header.comments else {}
    findings, codes, notes = list(found.findings), list[Annotation](), list[Annotation]()
    for name in info.annotation_files:
        with locate_errors(name):
            read = wfdb_annotations.read_annotations(source.path(name), found.header.frame_rate)
        codes += read.list_codes(info.events)
        notes += read.notes
        if (
            left := read.others
            + len(read.beats)
            + len(read.rhythms)
            - len(read.list_codes(info.events))
        ):
            text = f"annotations that are not {'beats or rhythms' if info.events == 'both' else info.events}: {left}"
            findings.append(
                Finding(
                    Reason.LEFT_OUT, text, "counted, not kept", level="info", file=name, count=left
                )
            )
    if info.labels is not None:  # the map may name a rhythm with its bracket, as the file does
        codes = [
            note._replace(label=f"({note.label}")
            if note.duration and f"({note.label}" in info.labels
            else note
            for note in codes
        ]
    info = replace(info, notes=(*info.notes, *codes))
    return _make_record(rel, info, found.signals, notes, findings, found.header.start, phi)


def read_table(path: Path, rel: str, info: RecordingInfo) -> Record:
    """A csv or Parquet table with a column a channel and a row a sample; empty cells are missing
    values.
    """
    with locate_errors(rel):
        columns = tables.read_names(path, delimiter=info.delimiter)
        names = list(info.channels) or [name for name in columns if name and name != info.time]
        if names and all(map(tables.NUMBER.fullmatch, names)) and not info.channels:
            raise input_error(
                Reason.HEADER,
                "the first line holds numbers",
                "expected names of channels: is the header line absent?",
                row=1,
            )
        order = [*([info.time] if info.time else []), *names]
        values = tables.read_number_table(
            path, order, missing=EMPTY_CELLS, delimiter=info.delimiter
        )
        if not len(values):
            raise input_error(Reason.TRUNCATED, "has no rows below its header")
        rate = _check_clock(values[:, 0], info) if info.time else info.rate
        if rate is None:
            raise input_error(
                Reason.SAMPLING_RATE,
                "has no sampling rate",
                "needs --map with a rate (`rate` or `time` in [[files]])",
            )
        own = values[:, 1:] if info.time else values
        signals = [
            Signal(name, rate, "", narrow_samples(own[:, i], name)) for i, name in enumerate(names)
        ]
    return _make_record(
        rel, replace(info, rate=None), signals, [], _report_missing(signals, "cells are empty")
    )


def _report_missing(signals: list[Signal], what: str) -> list[Finding]:
    """The warning about missing values, with the channels that have no others."""
    counts = {
        signal.channel: int(np.isnan(signal.samples).sum())
        for signal in signals
        if signal.samples.dtype.kind == "f"
    }
    lost = sum(counts.values())
    whole = [
        signal.channel for signal in signals if counts.get(signal.channel) == len(signal.samples)
    ]
    text = f"{lost} {what}" + (f", all of {list_names(whole)}" if whole else "")
    return (
        [input_warning(Reason.MISSING_VALUES, text, "kept as missing (NaN)", count=lost)]
        if lost
        else []
    )


def read_series(path: Path, rel: str, info: RecordingInfo) -> Records:
    """A table with a recording a row: the columns of `info.series` are its samples. Faulty rows are
    counted and left out.
    """
    with locate_errors(rel):
        if info.rate is None:
            raise input_error(
                Reason.CONFIG, "has no sampling rate", "expected `rate` in [[files]] of the map"
            )
        columns = tables.read_names(path, delimiter=info.delimiter)
        samples = [
            name
            for name in columns
            if fnmatch.fnmatchcase(name, info.series) and name not in info.columns.values()
        ]
        if not samples:
            text = f"has no column that matches {safe_text(info.series)}"
            raise input_error(
                Reason.SCHEMA,
                text,
                f"found {', '.join(map(safe_text, columns[:12]))}",
                field="series",
            )
        key = [info.columns["id"]] if "id" in info.columns else []
        order = [*info.columns.values(), *samples]
        records: list[Record] = []
        faults: list[Finding] = []
        dropped: Counter[str] = Counter()
        for row in tables.read_rows(path, order, key=key, delimiter=info.delimiter):
            if isinstance(row, Finding) and row.level == "warning":
                dropped[str(row.code)] += 1
                continue
            found = row if isinstance(row, Finding) else _make_series_record(row, samples, info)
            if isinstance(found, Finding):
                faults.append(found.at(rel))
            else:
                records.append(found)
        seen = tables.count_rows(path, delimiter=info.delimiter)
    findings = report_faults(faults)
    if len(records) > 1 and "subject" not in info.columns:
        text = f"{len(records)} rows with unknown subjects, each counted as a subject of its own"
        wanted = "recordings of one person in two splits make scores optimistic"
        findings.append(
            input_warning(Reason.IDENTIFIER, text, wanted, "Give subject_column", file=rel)
        )
    account = SourceRows(
        file=rel,
        kind="segments",
        seen=seen,
        dropped=dict(dropped),
        quarantined=dict(Counter(str(fault.code) for fault in faults)),
    )
    return Records(records=records, rows=[account], findings=findings)


def _make_series_record(
    row: tables.TableRow, samples: list[str], info: RecordingInfo
) -> Record | Finding:
    """One row as a recording, or its fault."""
    cells = {key: cell.strip() for key, cell in zip(info.columns, row.cells, strict=False)}
    values = tables.parse_numbers(tables.TableRow(row.row, row.cells[len(info.columns) :]), samples)
    if isinstance(values, Finding):
        return values
    attributes = dict(info.attributes)
    if cells.get("label", "").lower() not in EMPTY_CELLS:
        attributes["label"] = cells["label"]
    try:
        value = tables.parse_number(cells.get("value", ""))
    except UserError as error:
        return replace(
            error.finding,
            row=row.row,
            field=info.columns["value"],
            problem=f"the cell of row {row.row} {error.problem}",
        )
    if value is not None:
        attributes["value"] = value
    if "subject" in cells and cells["subject"].lower() in EMPTY_CELLS:
        return Finding(
            Reason.IDENTIFIER,
            f"row {row.row} has no subject",
            "expected one",
            field=info.columns["subject"],
            row=row.row,
        )
    assert info.rate is not None
    name, unit = next(iter(info.channels.values()), ("channel 1", ""))
    try:
        narrow = narrow_samples(values, name)
    except UserError as error:
        return replace(error.finding, row=row.row, problem=f"row {row.row} has {error.problem}")
    signal = Signal(name, info.rate, unit or info.unit, narrow)
    recording = f"{info.recording_id}-{cells.get('id') or f'{row.row:06d}'}"
    return Record(
        recording_id=recording,
        subject_id=cells.get("subject") or recording,
        signals=[signal],
        attributes=attributes,
    )


def _check_clock(times: np.ndarray, info: RecordingInfo) -> float:
    """Sampling rate in Hz of a column of times in seconds.

    Raises UserError: timestamps for gaps in time or repeated times, sampling_rate where the map
    states another rate.
    """
    if len(times) < 2 or np.isnan(times).any() or times[-1] <= times[0]:
        raise input_error(
            Reason.TIMESTAMPS, "the times do not increase, or one is missing", field=info.time
        )
    rate = info.rate or (len(times) - 1) / float(times[-1] - times[0])
    off = np.abs(times - times[0] - np.arange(len(times)) / rate) * rate
    if off.max() > 0.75:  # of a sample: times may be rounded
        row = int(np.argmax(off > 0.75))
        code = Reason.SAMPLING_RATE if info.rate else Reason.TIMESTAMPS
        text = (
            f"the time of sample {row + 1} is {off[row]:.3g} samples off a clock of {rate:.6g} Hz"
        )
        raise input_error(code, text, "expected a row for every sample", field=info.time)
    return rate


def read_npy(path: Path, rel: str, info: RecordingInfo) -> Record:
    """An array [samples] or [samples, channels] of int16 (kept) or other numbers (float32)."""
    with locate_errors(rel):
        try:
            values = np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            unsafe = "pickle" in str(error).lower() or "object" in str(error).lower()
            code = Reason.UNSAFE_PICKLE if unsafe else Reason.CORRUPT
            raise input_error(
                code, "is not a .npy file of numbers", "only arrays of numbers are read"
            ) from None
        except (OSError, EOFError, SyntaxError) as error:
            raise_system_error(error, path, stored=False)
            raise input_error(
                Reason.CORRUPT,
                f"does not read as .npy ({type(error).__name__})",
                hint="Save it again",
            ) from None
        if values.dtype.kind not in "iuf" or values.ndim not in {1, 2} or values.size == 0:
            raise input_error(
                Reason.DIMENSIONS,
                f"is an array of {values.ndim} dimensions of {values.dtype}",
                "expected [samples, channels]",
            )
        signals = _make_array_signals(np.asarray(values).reshape(len(values), -1), info)
    return _make_record(rel, info, signals, [], _report_missing(signals, "values are NaN"))


def read_mat(path: Path, rel: str, info: RecordingInfo) -> Record:
    """An array of a MATLAB 5 file, as `read_npy`; one with a row a channel, by the channels of the
    map or because it is wider than tall, is turned.
    """
    with locate_errors(rel):
        values = matlab.read_array(path, info.variable)
        if values.ndim != 2 or values.size == 0:
            text = f"is an array of {' x '.join(map(str, values.shape))}"
            raise input_error(
                Reason.DIMENSIONS,
                text,
                "expected [samples, channels] or [channels, samples]",
                field="variable",
            )
        tall, wide = (count == len(info.channels) for count in values.shape[::-1])
        if (wide and not tall) or (wide == tall and values.shape[0] < values.shape[1]):
            values = values.T
        signals = _make_array_signals(values, info)
    return _make_record(rel, info, signals, [], _report_missing(signals, "values are NaN"))


def _make_array_signals(table: np.ndarray, info: RecordingInfo) -> list[Signal]:
    """The columns of [samples, channels] as signals: int16 as it is, else float32. Raises
    UserError: dimensions, physical_range.
    """
    names = list(info.channels) or [f"channel {i}" for i in range(1, table.shape[1] + 1)]
    if len(names) != table.shape[1]:
        raise input_error(
            Reason.DIMENSIONS,
            f"has {table.shape[1]} columns",
            f"the map names {len(names)} channels",
        )
    samples = (
        np.ascontiguousarray(column) if table.dtype == np.int16 else narrow_samples(column, name)
        for name, column in zip(names, table.T, strict=True)
    )
    return [
        Signal(name, info.rate or 1.0, "", column)
        for name, column in zip(names, samples, strict=True)
    ]


def read_mne(path: Path, rel: str, info: RecordingInfo) -> Record:
    """Any other format, through mne; volts become uV."""
    import mne

    with locate_errors(rel):
        if find_suffix(rel) == ".vhdr":
            _require_same_folder(
                re.findall(
                    r"^\s*(?:DataFile|MarkerFile)\s*=\s*(.+?)\s*$",
                    path.read_text("latin-1"),
                    re.MULTILINE,
                )
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                raw = mne.io.read_raw(path, preload=False, verbose="ERROR")
                for name in raw.filenames:
                    if name is not None and os.path.normpath(Path(name).parent) != os.path.normpath(
                        path.parent
                    ):
                        raise input_error(
                            Reason.PATH_ESCAPE,
                            "names a file in another folder",
                            "which is not read",
                        )
                values = raw.get_data(verbose="ERROR")
            kinds = raw.get_channel_types()
            rate = float(raw.info["sfreq"])
            start = raw.info["meas_date"]
            found = [
                Annotation(float(a["onset"]), float(a["duration"]), str(a["description"]))
                for a in raw.annotations
            ]
        except UserError:
            raise
        except Exception as error:  # each of mne's readers fails in ways of its own
            raise_system_error(error, path, stored=False)
            raise input_error(
                Reason.CORRUPT,
                f"mne does not read it ({type(error).__name__})",
                hint="Open it with mne to see more",
            ) from None
        signals: list[Signal] = []
        for name, kind, channel in zip(raw.ch_names, kinds, values, strict=True):
            electric = kind in ELECTRIC
            with np.errstate(over="ignore"):
                samples = (channel * 1e6 if electric else channel).astype(np.float32)
            signals.append(
                Signal(
                    sanitize_label(name) or f"channel {len(signals) + 1}",
                    rate,
                    "uV" if electric else "",
                    samples,
                )
            )
    return _make_record(
        rel, info, signals, found, [], start.replace(tzinfo=None) if start else None
    )


def _require_same_folder(names: Iterable[str]) -> None:
    """Raises UserError (path_escape) for a name that is more than that of a file in the same
    folder.
    """
    for name in names:
        if PurePosixPath(name).name != name or "\\" in name:
            raise input_error(
                Reason.PATH_ESCAPE,
                f"names the file {safe_text(name)}",
                "which must be in the same folder",
            )


def _make_record(
    rel: str,
    info: RecordingInfo,
    signals: list[Signal],
    notes: list[Annotation],
    findings: Iterable[Finding],
    start: datetime | None = None,
    phi: Mapping[str, str] | None = None,
) -> Record:
    """The recording with the channels, units and labels of the map.

    Raises UserError: no_input without signals, missing_channel, unit, sampling_rate.
    """
    out = [finding.at(rel) for finding in findings]
    with locate_errors(rel):
        chosen = _select_channels(signals, info)
    end = max(signal.onset + len(signal.samples) / signal.rate for signal in chosen)
    kept, remarks = _select_annotations(notes, info, end)
    return Record(
        recording_id=info.recording_id,
        subject_id=info.subject_id,
        signals=chosen,
        annotations=kept,
        attributes={**info.attributes, **(phi or {})},
        start_time=start.isoformat() if start and info.keep_dates else None,
        findings=[*out, *(finding.at(rel) for finding in remarks)],
    )


def _select_channels(signals: list[Signal], info: RecordingInfo) -> list[Signal]:
    """The channels of the map under their names, else all; in the units of the map."""
    if not signals or not any(len(signal.samples) for signal in signals):
        raise input_error(
            Reason.NO_INPUT, "holds no signals", "files of annotations alone are no recordings"
        )
    names = dict.fromkeys(signal.channel for signal in signals)
    channels = info.channels or {name: (name, "") for name in names}
    missing = [name for name in channels if name not in names]
    if missing:
        text = f"has no channel {safe_text(missing[0])}" + (
            f" and {len(missing) - 1} more" if missing[1:] else ""
        )
        wanted = f"found {', '.join(safe_text(name) for name in list(names)[:12])}"
        raise input_error(
            Reason.MISSING_CHANNEL, text, wanted, field="channels", expected=safe_text(missing[0])
        )
    out = []
    for name, (to, unit) in channels.items():
        for signal in (
            signal for signal in signals if signal.channel == name and len(signal.samples)
        ):
            if info.rate is not None and not math.isclose(signal.rate, info.rate, rel_tol=1e-6):
                text = f"{safe_text(name)} is sampled at {signal.rate:g} Hz"
                raise input_error(
                    Reason.SAMPLING_RATE, text, f"the map states {info.rate:g} Hz", field="rate"
                )
            out.append(_convert_unit(signal, unit or info.unit)._replace(channel=to))
    return out


def _convert_unit(signal: Signal, unit: str) -> Signal:
    """The signal in `unit`: a signal without a unit is assumed to have it, volts are converted,
    others are refused.
    """
    stored, wanted = signal.unit.strip().casefold(), unit.strip().casefold()
    if not wanted or stored == wanted:
        return signal
    if not stored:
        return signal._replace(unit=unit)
    if stored not in VOLTS or wanted not in VOLTS:
        text = f"{safe_text(signal.channel)} is in {safe_text(signal.unit)}"
        raise input_error(
            Reason.UNIT,
            text,
            f"the map states {safe_text(unit)}",
            field="unit",
            found=safe_text(signal.unit),
        )
    return scale_signal(signal, VOLTS[stored] / VOLTS[wanted], unit)


def _select_annotations(
    notes: list[Annotation], info: RecordingInfo, end: float
) -> tuple[list[Annotation], list[Finding]]:
    """Annotations of the file and of tables, mapped and clipped to the signal; findings on the
    excluded ones.
    """
    mapped = info.labels
    outside = (
        [note._replace(label=mapped[note.label]) for note in info.notes if note.label in mapped]
        if mapped is not None
        else info.notes
    )
    stages, others, ambiguous = (
        stage_texts.read_stages(notes)
        if info.stages and mapped is None and not info.keep_phi
        else ([], notes, [])
    )
    inside = (
        [note._replace(label=mapped[note.label]) for note in notes if note.label in mapped]
        if mapped is not None
        else notes
        if info.keep_phi
        else stages
    )
    findings = []
    if ambiguous:
        text = (
            f"annotations {', '.join(map(repr, ambiguous))} are sleep stages in some systems alone"
        )
        findings.append(
            input_warning(
                Reason.UNKNOWN_LABEL,
                text,
                "they are not read",
                "State their stages in [labels] of the map",
            )
        )
    left = len(others) if mapped is None and not info.keep_phi else len(notes) - len(inside)
    if left := left + len(info.notes) - len(outside):
        text = f"annotations whose texts are no labels of the map: {left}"
        findings.append(
            Finding(
                Reason.UNKNOWN_LABEL,
                text,
                "counted, not kept: texts can hold names",
                level="info",
                count=left,
            )
        )
    kept, cut = [], 0
    for note in sorted([*inside, *outside, *info.numbers]):
        begin, stop = max(note.onset, 0.0), min(note.onset + note.duration, end)
        cut += (
            note.onset < 0 or note.onset > end or end + 1e-6 < note.onset + note.duration < math.inf
        )
        if begin < end and stop >= begin:
            kept.append(note._replace(onset=begin, duration=stop - begin))
    if cut:
        text = f"annotations that reach beyond the signal: {cut}"
        findings.append(
            input_warning(Reason.ANNOTATION_OUT_OF_RANGE, text, "that part is dropped", count=cut)
        )
    return kept, findings
