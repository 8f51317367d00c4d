"""Writes records to Parquet shards and reads them back.

Samples are one little-endian binary value a row, compressed with zstd, without a dictionary: 2.6
times smaller and 5 to 25 times faster to read than lists of floats. Every page has a checksum, and
the same records give the same bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bitimely_core.cache.quality import measure_quality
from bitimely_core.errors import Finding, Reason, input_error, input_warning, integrity_error
from bitimely_core.formats.text import MARKUP, escape_controls, has_unsafe_characters, list_names
from bitimely_core.formats.units import find_range_fault, find_rate_fault
from bitimely_core.schemas.ingest_records import CachedPart, CachedUnit, CacheShard
from bitimely_core.store import storage
from bitimely_core.store.records import FORMAT, StoredFile, store_hashed
from bitimely_core.system_errors import format_size
from bitimely_core.types import Annotation, Record, Signal

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

Properties = dict[str, Any]  # of a data set or a subject, as they are stored

NAMES = re.compile(
    r"(recordings|annotations|subjects)-[0-9a-f]{16}\.parquet|units-[0-9a-f]{16}\.json\.gz"
)
DTYPES = {"int16": "<i2", "float32": "<f4"}
DTYPE_NAMES = {
    np.dtype(f"{order}{dtype[1:]}"): name for name, dtype in DTYPES.items() for order in "<>"
}
# bytes of samples: a reader that wants one channel of a long recording decodes only that
ROW_GROUP = 8 << 20
ROWS = 8192  # rows a row group at most
COLUMNS = (  # of a shard of recordings
    *("recording_id", "subject_id", "channel", "rate", "unit", "samples"),
    *("dtype", "scale", "offset", "onset", "start_time", "n_samples", "qc"),
)
MAX_VALUE_BYTES = (1 << 31) - (1 << 20)  # bytes of one Parquet value


FigureTexts = dict[tuple[str, str, float], str]
"""Quality figures as JSON, by recording, channel and onset."""
Rows = Sequence[tuple[Record, Signal]]


def validate_record(record: Record, *, keep_dates: bool) -> Record:
    """The record with plain numbers and contiguous little-endian samples.

    Its start time is left out unless `keep_dates`. Raises UserError: non_finite for infinities,
    physical_range and sampling_rate for what `formats.units` finds implausible, resource_limit for
    a channel that Parquet cannot hold; ValueError: what no reader may return.
    """
    if not record.signals:
        raise ValueError("a record without signals")
    signals = list(map(_validate_signal, record.signals))
    if len({(signal.channel, signal.onset) for signal in signals}) != len(signals):
        raise ValueError("a channel twice at one onset")
    read = Record(
        recording_id=str(record.recording_id),
        subject_id=str(record.subject_id),
        signals=signals,
        annotations=[
            Annotation(float(note.onset), float(note.duration), str(note.label))
            for note in record.annotations
        ],
        attributes=json.loads(storage.encode_json(record.attributes)),
        start_time=record.start_time if keep_dates else None,
    )
    plain = _escape_record(read)
    return replace(plain, findings=[*record.findings, *_report_oddities(read, plain)])


def _escape_record(record: Record) -> Record:
    """The record with control characters as escapes."""
    return replace(
        record,
        recording_id=escape_controls(record.recording_id),
        subject_id=escape_controls(record.subject_id),
        signals=[
            signal._replace(
                channel=escape_controls(signal.channel), unit=escape_controls(signal.unit)
            )
            for signal in record.signals
        ],
        annotations=[
            note._replace(label=escape_controls(note.label)) for note in record.annotations
        ],
        attributes={key: _escape_attribute(value) for key, value in record.attributes.items()},
    )


def _report_oddities(read: Record, plain: Record) -> Iterator[Finding]:
    """Warnings about a recording as it was read, and `plain`, as it is stored."""
    beyond = [signal.channel for signal in read.signals if _exceeds_rails(signal)]
    if beyond:
        yield input_warning(
            Reason.DIGITAL_RANGE,
            f"samples beyond the digital range of {list_names(beyond, 5)}",
            "the header or the samples are wrong",
            field="digital_min",
            count=len(beyond),
        )
    label = plain.attributes.get("label")
    unsafe = any(has_unsafe_characters(signal.channel) for signal in plain.signals)
    if unsafe or (isinstance(label, str) and MARKUP.search(label)):
        place = "a channel" if unsafe else "the label"
        problem = f"markup or formula characters in the name of {place}"
        yield input_warning(Reason.LABEL_CHARS, problem, "kept, and escaped where it is shown")
    escaped = _list_escaped(read, plain)
    if escaped:
        problem = f"control characters in the {', '.join(escaped)}"
        yield input_warning(Reason.LABEL_CHARS, problem, "stored as escapes")


def _list_escaped(read: Record, plain: Record) -> list[str]:
    """What of a recording has escapes in place of control characters."""
    differs = {
        "recording": plain.recording_id != read.recording_id,
        "subject": plain.subject_id != read.subject_id,
        "channels or units": any(
            new[:3] != old[:3] for new, old in zip(plain.signals, read.signals, strict=True)
        ),
        "annotations": plain.annotations != read.annotations,
        "attributes": plain.attributes != read.attributes,
    }
    return [name for name, is_escaped in differs.items() if is_escaped]


def _exceeds_rails(signal: Signal) -> bool:
    """Whether samples are beyond what the converter can give."""
    if signal.rails is None or not signal.samples.size:
        return False
    low, high = signal.rails
    return not low <= signal.samples.min() <= signal.samples.max() <= high


def _escape_attribute(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_escape_attribute, value))
    return escape_controls(value) if isinstance(value, str) else value


def _validate_signal(signal: Signal) -> Signal:
    samples = _validate_samples(signal.samples)
    least, most = _find_extremes(samples)
    if math.isinf(least) or math.isinf(most):
        raise input_error(
            Reason.NON_FINITE,
            "holds infinite values",
            "expected finite numbers",
            field=signal.channel,
        )
    numbers = list(map(float, (signal.rate, signal.scale, signal.offset, signal.onset)))
    rate, scale, offset, onset = numbers
    if not all(map(math.isfinite, numbers)) or rate <= 0:
        raise ValueError("rate, scale, offset and onset must be finite, the rate positive")
    if fault := find_rate_fault(rate):
        raise input_error(Reason.SAMPLING_RATE, f"{rate:g} Hz", fault, field=signal.channel)
    low, high = least * scale + offset, most * scale + offset
    if not math.isnan(least) and (fault := find_range_fault(low, high, 0.0, signal.unit)):
        values = f"values from {low:.3g} to {high:.3g}"
        raise input_error(Reason.PHYSICAL_RANGE, values, fault, field=signal.channel)
    return Signal(
        str(signal.channel), rate, str(signal.unit), samples, scale, offset, onset, signal.rails
    )


def _validate_samples(samples: np.ndarray) -> np.ndarray:
    """The samples [n], contiguous and little-endian."""
    name = DTYPE_NAMES.get(samples.dtype, "")
    if not name or samples.ndim != 1:
        shape = f"{samples.ndim}-dimensional {samples.dtype.name}"
        raise ValueError(f"samples are {shape}, expected one dimension of int16 or float32")
    if samples.nbytes > MAX_VALUE_BYTES:
        raise input_error(
            Reason.RESOURCE_LIMIT,
            f"{format_size(samples.nbytes)} in one channel",
            f"expected at most {format_size(MAX_VALUE_BYTES)}",
            "Cut the recording into parts",
        )
    return np.ascontiguousarray(samples, dtype=DTYPES[name])


def _find_extremes(samples: np.ndarray) -> tuple[float, float]:
    """Least and largest sample besides NaN; 0 without samples."""
    if not samples.size:
        return 0.0, 0.0
    return float(np.fmin.reduce(samples)), float(np.fmax.reduce(samples))


def hash_content(records: Iterable[Record]) -> str:
    """SHA-256 of the cached content of a unit, whatever the order of its records.

    Samples, times, labels and attributes count, names of files and subjects do not.
    """
    return hash_lines(map(hash_record, records))


def hash_lines(hashes: Iterable[str]) -> str:
    """SHA-256 over the sorted lines."""
    return hashlib.sha256("".join(f"{line}\n" for line in sorted(hashes)).encode()).hexdigest()


def hash_record(record: Record) -> str:
    """The part of one record in `hash_content`."""
    total = hashlib.sha256()
    for signal in sorted(record.signals, key=lambda signal: (signal.channel, signal.onset)):
        facts = [
            signal.channel,
            signal.rate,
            signal.unit,
            DTYPE_NAMES[signal.samples.dtype],
            signal.scale,
            signal.offset,
            signal.onset,
            len(signal.samples),
        ]
        total.update(storage.encode_json(facts))
        total.update(signal.samples.data)
    total.update(
        storage.encode_json([sorted(record.annotations), record.attributes, record.start_time])
    )
    return total.hexdigest()


def write_shard(
    folder: Path, records: Sequence[Record], dataset: str, figures: FigureTexts | None = None
) -> tuple[CacheShard, dict[str, StoredFile]]:
    """Write `records` (as `validate_record` returns them), in their order, as one shard.

    `figures`: quality figures of records that come out of a shard, see `read_figures`. Returns the
    names of the files, and what the manifest says of each. Raises UserError (exit 6).
    """
    files: dict[str, StoredFile] = {}

    def write(
        stem: str, schema: pa.Schema, tables: Iterable[pa.Table], rows: int, plain: list[str]
    ) -> str | None:
        if not rows:
            return None
        data = _encode_parquet(schema, tables, plain)
        storage.require_space(folder, len(data))
        name, files[name] = store_hashed(folder, stem, ".parquet", data, rows)
        return name

    rows = [(record, signal) for record in records for signal in record.signals]
    notes = [(record.recording_id, *note) for record in records for note in record.annotations]
    channels = sorted({(signal.channel, signal.rate) for _, signal in rows})
    schema, note_schema = make_schemas()
    facts = {"dataset": dataset}
    schema = schema.with_metadata(_make_metadata("recordings", {**facts, "channels": channels}))
    note_schema = note_schema.with_metadata(_make_metadata("annotations", facts))
    groups = (_make_row_group(group, schema, figures or {}) for group in _group_rows(rows))
    plain = ["samples", "qc", "n_samples", "offset", "scale", "onset"]
    recordings = write("recordings", schema, groups, len(rows), plain)
    tables = [_make_table(notes, note_schema)]
    annotations = write("annotations", note_schema, tables, len(notes), ["onset", "duration"])
    return CacheShard(recordings, annotations), files


def write_subjects(folder: Path, rows: Sequence[tuple[str, str, str]]) -> tuple[str, StoredFile]:
    """Write one row a recording: recording_id, subject_id, attributes as JSON text.

    Returns the name of the file and what the manifest says of it.
    """
    import pyarrow as pa

    names = ("recording_id", "subject_id", "attributes")
    schema = pa.schema([(name, pa.string()) for name in names])
    data = _encode_parquet(
        schema.with_metadata(_make_metadata("subjects", {})), [_make_table(rows, schema)], []
    )
    return store_hashed(folder, "subjects", ".parquet", data, len(rows))


def write_units(folder: Path, units: Mapping[str, CachedUnit]) -> tuple[str, StoredFile]:
    """Write the entries of all units, by name, as JSON under gzip.

    Returns the name of the file and what the manifest says of it.
    """
    entries = {name: entry.model_dump(mode="json") for name, entry in units.items()}
    content = storage.encode_json({"format_version": FORMAT, "units": entries}) + b"\n"
    # hashes are most of it: the fastest level is 6 % larger than the best one
    data = gzip.compress(content, 1, mtime=0)
    return store_hashed(folder, "units", ".json.gz", data, len(units))


def read_units(path: Path) -> dict[str, CachedUnit]:
    """What `write_units` has written.

    Raises OSError, and UserError (integrity, exit 5) for a file of another form.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except gzip.BadGzipFile as error:
        problem, hint = "is not compressed", "Ingest again under --force-new"
        raise integrity_error(str(path), problem, "expected gzip", hint) from error
    return CachedPart.model_validate_json(content).units


def _make_metadata(kind: str, facts: Properties) -> dict[bytes, bytes]:
    values = {"schema": f"bitimely.{kind}/1", "format_version": 1, **facts}
    return {b"bitimely": storage.encode_json(values)}


def make_schemas() -> tuple[pa.Schema, pa.Schema]:
    """The schemas of shards of recordings and of annotations."""
    import pyarrow as pa

    text, number = pa.string(), pa.float64()
    kinds = {
        "rate": number,
        "scale": number,
        "offset": number,
        "onset": number,
        "n_samples": pa.int64(),
        "samples": pa.large_binary(),
    }
    recordings = [(name, kinds.get(name, text)) for name in COLUMNS]
    notes = [("recording_id", text), ("onset", number), ("duration", number), ("label", text)]
    return pa.schema(recordings), pa.schema(notes)


def _make_table(rows: Sequence[Sequence[Any]], schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    return pa.Table.from_arrays(
        [_make_array(column, field.type) for column, field in zip(columns, schema, strict=True)],
        schema=schema,
    )


def _make_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """As `pa.array` of texts or numbers (None: missing).

    `pa.array` would import pandas: half a second in every process.
    """
    import pyarrow as pa

    present = np.array([value is not None for value in values], bool)
    mask = None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))
    if not pa.types.is_string(kind):
        numbers = np.array(
            [0 if value is None else value for value in values], kind.to_pandas_dtype()
        )
        return pa.Array.from_buffers(kind, len(values), [mask, pa.py_buffer(numbers)])
    texts = [b"" if value is None else value.encode() for value in values]
    offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError("a column of more than 2 GB of text")
    buffers = [mask, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(b"".join(texts))]
    return pa.Array.from_buffers(kind, len(values), buffers)


def _group_rows(rows: Rows) -> Iterator[Rows]:
    """The rows in groups with about ROW_GROUP bytes of samples each."""
    start = size = 0
    for stop, (_, signal) in enumerate(rows, 1):
        size += signal.samples.nbytes
        if size >= ROW_GROUP or stop - start >= ROWS or stop == len(rows):
            yield rows[start:stop]
            start, size = stop, 0


def _make_row_group(rows: Rows, schema: pa.Schema, figures: FigureTexts) -> pa.Table:
    """The table of a row group."""
    import pyarrow as pa

    records, signals = zip(*rows, strict=True)
    columns: dict[str, Sequence[Any]] = {
        "dtype": [DTYPE_NAMES[signal.samples.dtype] for signal in signals],
        "n_samples": [len(signal.samples) for signal in signals],
        "qc": _list_figures(rows, figures),
    }
    for name in ("recording_id", "subject_id", "start_time"):
        columns[name] = [getattr(record, name) for record in records]
    for name in ("channel", "rate", "unit", "scale", "offset", "onset"):
        columns[name] = [getattr(signal, name) for signal in signals]
    samples = _make_binary([signal.samples for signal in signals])
    arrays = [
        samples if field.name == "samples" else _make_array(columns[field.name], field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _list_figures(rows: Rows, figures: FigureTexts) -> list[str]:
    """Quality figures of each row as JSON; those that `figures` lacks are measured."""
    texts = [
        figures.get((record.recording_id, signal.channel, signal.onset)) for record, signal in rows
    ]
    new = [signal for (_, signal), text in zip(rows, texts, strict=True) if text is None]
    measured = iter(measure_quality(new))
    return [
        storage.encode_json(next(measured)).decode() if text is None else text for text in texts
    ]


def _make_binary(arrays: Sequence[np.ndarray]) -> pa.Array:
    """The bytes of each array as one value; a single array is not copied."""
    import pyarrow as pa

    offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64)
    data = arrays[0]
    if len(arrays) > 1:
        data = np.concatenate([array.view(np.uint8) for array in arrays])
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(arrays), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )


def _encode_parquet(schema: pa.Schema, tables: Iterable[pa.Table], plain: list[str]) -> memoryview:
    """A Parquet file in memory, one row group a table.

    `plain`: columns without a dictionary and statistics.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    indexed = [name for name in schema.names if name not in plain]
    with pq.ParquetWriter(
        sink,
        schema,
        version="2.6",
        compression="zstd",
        compression_level=1,  # 3 is 2 % smaller and takes four times as long
        use_dictionary=indexed,
        write_statistics=indexed,
        write_page_checksum=True,
    ) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=max(1, table.num_rows))
    return memoryview(sink.getvalue())


def _open_parquet(path: Path, categories: Sequence[str] = ()) -> pq.ParquetFile:
    import pyarrow.parquet as pq

    return pq.ParquetFile(path, page_checksum_verification=True, read_dictionary=list(categories))


def read_shard(
    folder: Path, shard: CacheShard, subjects: Properties, channels: Collection[str] | None = None
) -> Iterator[Record]:
    """The records of one shard, in order.

    `subjects`: recording_id -> attributes; recordings that are not in it are skipped. Only
    `channels` are decoded (None: all); a recording without any of them comes without signals.
    Raises OSError (pyarrow's too) for a file that is gone or damaged.
    """
    notes = _read_annotations(folder / shard.annotations) if shard.annotations else {}
    if shard.recordings is None:
        return
    with _open_parquet(folder / shard.recordings) as file:
        rows = itertools.chain.from_iterable(
            _read_rows(file, group, subjects, channels) for group in range(file.num_row_groups)
        )
        for recording, chosen in itertools.groupby(rows, key=lambda row: row[0]["recording_id"]):
            if recording not in subjects:
                continue
            channel_rows = list(chosen)
            first = channel_rows[0][0]
            yield Record(
                recording_id=recording,
                subject_id=first["subject_id"],
                signals=[signal for _, signal in channel_rows if signal is not None],
                annotations=notes.get(recording, []),
                attributes=subjects[recording],
                start_time=first["start_time"],
            )


def _read_rows(
    file: pq.ParquetFile, group: int, subjects: Properties, channels: Collection[str] | None
) -> Iterator[tuple[Properties, Signal | None]]:
    """The rows of a row group; the signal is None where it is not selected."""
    names = [name for name in file.schema_arrow.names if name not in {"samples", "qc"}]
    rows = file.read_row_group(group, columns=names, use_threads=False).to_pylist()
    selected = [
        row["recording_id"] in subjects and (channels is None or row["channel"] in channels)
        for row in rows
    ]
    if not any(selected):
        yield from ((row, None) for row in rows)
        return
    table = file.read_row_group(group, columns=["samples"], use_threads=False)
    for row, samples, is_selected in zip(
        rows, table["samples"].combine_chunks(), selected, strict=True
    ):
        if not is_selected:
            yield row, None
            continue
        values = np.frombuffer(samples.as_buffer(), dtype=DTYPES[row["dtype"]])
        facts = {
            name: row[name] for name in ("channel", "rate", "unit", "scale", "offset", "onset")
        }
        yield row, Signal(samples=values, **facts)


def read_table(
    path: Path, columns: Collection[str] | None = None, categories: Sequence[str] = ()
) -> pa.Table:
    """All rows of a file.

    Read are all columns but the samples, or those of `columns` that are there; `categories` as
    dictionaries. Raises OSError.
    """
    with _open_parquet(path, categories) as file:
        names = file.schema_arrow.names
        wanted = set(names) - {"samples"} if columns is None else columns
        # a thread needs more memory than these columns, and saves no time
        return file.read(columns=[name for name in names if name in wanted], use_threads=False)


def read_figures(folder: Path, shard: CacheShard, subjects: Collection[str]) -> FigureTexts:
    """Quality figures as JSON by recording, channel and onset.

    Signals that are read from the shard cannot give them again: they have no rails. Raises OSError.
    """
    rows = read_table(folder / shard.recordings).to_pylist() if shard.recordings else []
    return {
        (row["recording_id"], row["channel"], row["onset"]): row["qc"]
        for row in rows
        if row["recording_id"] in subjects
    }


def _read_annotations(path: Path) -> dict[str, list[Annotation]]:
    """recording_id -> its annotations."""
    annotations: dict[str, list[Annotation]] = {}
    for row in read_table(path).to_pylist():
        annotations.setdefault(row.pop("recording_id"), []).append(Annotation(**row))
    return annotations
