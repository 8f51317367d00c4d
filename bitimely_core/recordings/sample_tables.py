"""Reads tables of samples: a column a channel and a row a sample, or a row a recording."""

from __future__ import annotations

import fnmatch
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from bitimely_core.errors import Finding, Reason, UserError, input_error, input_warning, safe_text
from bitimely_core.formats import tables
from bitimely_core.formats.source import locate_errors, report_faults
from bitimely_core.formats.units import narrow_samples
from bitimely_core.recordings.channels import list_needed
from bitimely_core.recordings.mapping import EMPTY_CELLS, RecordingInfo
from bitimely_core.recordings.selection import make_record, report_missing
from bitimely_core.types import AttributeValue, Record, Records, Signal, SourceRows, count_reasons


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
    findings = report_missing(signals, "cells are empty")
    return make_record(rel, replace(info, rate=None), signals, findings=findings)


def _list_table_channels(path: Path, info: RecordingInfo) -> list[str]:
    """The columns to read: those of the map, else all but that of the times. Raises UserError: header."""
    columns = tables.read_names(path, delimiter=info.delimiter)
    names = [name for name in columns if name not in {"", info.time}]
    if names and all(map(tables.NUMBER.fullmatch, names)):
        wanted = "expected names of channels: is the header line absent?"
        raise input_error(Reason.HEADER, "the first line holds numbers", wanted, row=1)
    return list_needed(names, info)


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
