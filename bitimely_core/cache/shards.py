"""Records to Parquet shards and back: the columns, the hash of the content.

Samples are one little-endian binary value a row, compressed with zstd, without a dictionary: 2.6
times smaller and 5 to 25 times faster to read than lists of floats. Every page has a checksum, and
the same records give the same bytes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bitimely_core import storage
from bitimely_core.cache.quality import measure_quality
from bitimely_core.errors import Finding, Reason, input_error, input_warning
from bitimely_core.formats.text import MARKUP, escape_controls, has_unsafe_characters, list_names
from bitimely_core.formats.units import find_range_fault, find_rate_fault
from bitimely_core.records import StoredFile
from bitimely_core.system_errors import format_size
from bitimely_core.types import Annotation, Record, Signal

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

NAMES = re.compile(
    r"(recordings|annotations|subjects)-[0-9a-f]{16}\.parquet|units-[0-9a-f]{16}\.json"
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


class CacheShard(NamedTuple):
    """The files of one group of units; None where there is nothing to hold."""

    recordings: str | None = None
    annotations: str | None = None


def validate_record(record: Record, *, keep_dates: bool) -> Record:
    """The record with plain numbers and contiguous little-endian samples, its start time left out
    unless `keep_dates`.

    Raises UserError: non_finite for infinities, physical_range and sampling_rate for what
    `formats.units` finds implausible, resource_limit for a channel that Parquet cannot hold;
    ValueError: what no reader may return.
    """
    if not record.signals:
        raise ValueError("a record without signals")
    signals = [_validate_signal(signal) for signal in record.signals]
    if len({(s.channel, s.onset) for s in signals}) != len(signals):
        raise ValueError("a channel twice at one onset")
    notes = [
        Annotation(float(a.onset), float(a.duration), str(a.label)) for a in record.annotations
    ]
    attributes = json.loads(storage.encode_json(record.attributes))
    start = record.start_time if keep_dates else None
    names = (str(record.recording_id), str(record.subject_id))
    read = plain = Record(
        recording_id=names[0],
        subject_id=names[1],
        signals=signals,
        annotations=notes,
        attributes=attributes,
        start_time=start,
    )
    values = (
        item
        for value in attributes.values()
        for item in (value if isinstance(value, list) else (value,))
    )
    texts = (
        *names,
        *(s.channel + s.unit for s in signals),
        *(note.label for note in notes),
        *map(str, values),
    )
    if not "".join(texts).isprintable():
        plain = replace(
            read,
            recording_id=escape_controls(names[0]),
            subject_id=escape_controls(names[1]),
            signals=[
                s._replace(channel=escape_controls(s.channel), unit=escape_controls(s.unit))
                for s in signals
            ],
            annotations=[note._replace(label=escape_controls(note.label)) for note in notes],
            attributes={key: _escape_attribute(value) for key, value in attributes.items()},
        )
    return replace(plain, findings=[*record.findings, *_report_oddities(read, plain)])


def _report_oddities(read: Record, plain: Record) -> Iterator[Finding]:
    """Warnings about a recording as it was read, and `plain`, as it is stored."""
    beyond = [
        s.channel
        for s in read.signals
        if s.rails is not None
        and s.samples.size
        and not s.rails[0] <= s.samples.min() <= s.samples.max() <= s.rails[1]
    ]
    if beyond:
        problem, requirement = (
            f"samples beyond the digital range of {list_names(beyond, 5)}",
            "the header or the samples are wrong",
        )
        yield input_warning(
            Reason.DIGITAL_RANGE, problem, requirement, field="digital_min", count=len(beyond)
        )
    label = plain.attributes.get("label")
    unsafe = any(has_unsafe_characters(s.channel) for s in plain.signals)
    if unsafe or (isinstance(label, str) and MARKUP.search(label)):
        problem = (
            f"markup or formula characters in the name of {'a channel' if unsafe else 'the label'}"
        )
        yield input_warning(Reason.LABEL_CHARS, problem, "kept, and escaped where it is shown")
    if plain is read:
        return
    kept = {
        "recording": plain.recording_id == read.recording_id,
        "subject": plain.subject_id == read.subject_id,
        "channels or units": [s[:3] for s in plain.signals] == [s[:3] for s in read.signals],
        "annotations": plain.annotations == read.annotations,
        "attributes": plain.attributes == read.attributes,
    }
    if not all(kept.values()):
        problem = f"control characters in the {', '.join(name for name, same in kept.items() if not same)}"
        yield input_warning(Reason.LABEL_CHARS, problem, "stored as escapes")


def _escape_attribute(value: Any) -> Any:
    if isinstance(value, list):
        return [_escape_attribute(item) for item in value]
    return escape_controls(value) if isinstance(value, str) else value


def _validate_signal(signal: Signal) -> Signal:
    name = DTYPE_NAMES.get(signal.samples.dtype, "")
    if not name or signal.samples.ndim != 1:
        found = f"{signal.samples.ndim}-dimensional {signal.samples.dtype.name}"
        raise ValueError(f"samples are {found}, expected one dimension of int16 or float32")
    samples = np.ascontiguousarray(signal.samples, dtype=DTYPES[name])
    if samples.nbytes > MAX_VALUE_BYTES:
        size, limit = format_size(samples.nbytes), format_size(MAX_VALUE_BYTES)
        raise input_error(
            Reason.RESOURCE_LIMIT,
            f"{size} in one channel",
            f"expected at most {limit}",
            "Cut the recording into parts",
        )
    # the former are several times as fast
    extremes = (np.minimum, np.maximum) if samples.dtype.kind == "i" else (np.fmin, np.fmax)
    least, most = (float(extreme.reduce(samples)) if samples.size else 0.0 for extreme in extremes)
    if math.isinf(least) or math.isinf(most):
        raise input_error(
            Reason.NON_FINITE,
            "holds infinite values",
            "expected finite numbers",
            field=signal.channel,
        )
    rate, scale, offset, onset = numbers = [
        float(x) for x in (signal.rate, signal.scale, signal.offset, signal.onset)
    ]
    if not all(math.isfinite(x) for x in numbers) or rate <= 0:
        raise ValueError("rate, scale, offset and onset must be finite, the rate positive")
    if fault := find_rate_fault(rate):
        raise input_error(Reason.SAMPLING_RATE, f"{rate:g} Hz", fault, field=signal.channel)
    low, high = least * scale + offset, most * scale + offset
    if not math.isnan(least) and (fault := find_range_fault(low, high, 0.0, signal.unit)):
        raise input_error(
            Reason.PHYSICAL_RANGE,
            f"values from {low:.3g} to {high:.3g}",
            fault,
            field=signal.channel,
        )
    return Signal(
        str(signal.channel), rate, str(signal.unit), samples, scale, offset, onset, signal.rails
    )


def hash_content(records: Iterable[Record]) -> str:
    """SHA-256 of the cached content of a unit: samples, times, labels, attributes, in any order;
    without names of files and subjects.
    """
    return hash_lines(hash_record(record) for record in records)


def hash_lines(hashes: Iterable[str]) -> str:
    """SHA-256 over the sorted lines."""
    return hashlib.sha256("".join(f"{line}\n" for line in sorted(hashes)).encode()).hexdigest()


def hash_record(record: Record) -> str:
    """The part of one record in `content_hash`."""
    total = hashlib.sha256()
    for s in sorted(record.signals, key=lambda s: (s.channel, s.onset)):
        facts = [
            s.channel,
            s.rate,
            s.unit,
            DTYPE_NAMES[s.samples.dtype],
            s.scale,
            s.offset,
            s.onset,
            len(s.samples),
        ]
        total.update(storage.encode_json(facts))
        total.update(s.samples.data)
    total.update(
        storage.encode_json([sorted(record.annotations), record.attributes, record.start_time])
    )
    return total.hexdigest()


def write_shard(
    folder: Path,
    records: Sequence[Record],
    dataset: str,
    figures: dict[tuple[str, str, float], str] | None = None,
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
        name, digest, size = storage.write_hashed(folder, stem, ".parquet", data)
        files[name] = StoredFile(sha256=digest, size=size, rows=rows)
        return name

    rows = [(record, signal) for record in records for signal in record.signals]
    channels = sorted({(signal.channel, signal.rate) for _, signal in rows})
    recordings, annotations = _make_schemas({"dataset": dataset, "channels": channels})
    notes = [(record.recording_id, *note) for record in records for note in record.annotations]
    plain = ["samples", "qc", "n_samples", "offset", "scale", "onset"]
    shard = CacheShard(
        write(
            "recordings",
            recordings,
            _make_row_groups(rows, recordings, figures or {}),
            len(rows),
            plain,
        ),
        write(
            "annotations",
            annotations,
            [_make_table(notes, annotations)] if notes else [],
            len(notes),
            ["onset", "duration"],
        ),
    )
    return shard, files


def write_subjects(folder: Path, rows: Sequence[tuple[str, str, str]]) -> tuple[str, StoredFile]:
    """One row a recording: recording_id, subject_id, attributes as JSON text. Returns the name and
    what the manifest says of it.
    """
    import pyarrow as pa

    schema = pa.schema(
        [("recording_id", pa.string()), ("subject_id", pa.string()), ("attributes", pa.string())]
    )
    data = _encode_parquet(
        schema.with_metadata(_make_metadata("subjects", {})), [_make_table(rows, schema)], []
    )
    name, digest, size = storage.write_hashed(folder, "subjects", ".parquet", data)
    return name, StoredFile(sha256=digest, size=size, rows=len(rows))


def _make_metadata(kind: str, facts: dict[str, Any]) -> dict[bytes, bytes]:
    return {
        b"bitimely": storage.encode_json(
            {"schema": f"bitimely.{kind}/1", "format_version": 1, **facts}
        )
    }


def _make_schemas(facts: dict[str, Any]) -> tuple[pa.Schema, pa.Schema]:
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
    return (
        pa.schema(recordings).with_metadata(_make_metadata("recordings", facts)),
        pa.schema(notes).with_metadata(
            _make_metadata("annotations", {"dataset": facts["dataset"]})
        ),
    )


def _make_table(rows: Sequence[Sequence[Any]], schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    return pa.Table.from_arrays(
        [_make_array(column, field.type) for column, field in zip(columns, schema, strict=True)],
        schema=schema,
    )


def _make_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """As `pa.array` of texts or numbers (None: missing), which would import pandas: half a second
    in every process.
    """
    import pyarrow as pa

    there = np.array([value is not None for value in values], bool)
    known = None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little"))
    if not pa.types.is_string(kind):
        numbers = np.array(
            [0 if value is None else value for value in values], kind.to_pandas_dtype()
        )
        return pa.Array.from_buffers(kind, len(values), [known, pa.py_buffer(numbers)])
    texts = [b"" if value is None else value.encode() for value in values]
    offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError("a column of more than 2 GB of text")
    buffers = [known, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(b"".join(texts))]
    return pa.Array.from_buffers(kind, len(values), buffers)


def _make_row_groups(
    rows: Sequence[tuple[Record, Signal]],
    schema: pa.Schema,
    figures: dict[tuple[str, str, float], str],
) -> Iterator[pa.Table]:
    """Tables of rows with about ROW_GROUP bytes of samples each."""
    import pyarrow as pa

    start = size = 0
    for stop, (_, signal) in enumerate(rows, 1):
        size += signal.samples.nbytes
        if size < ROW_GROUP and stop - start < ROWS and stop < len(rows):
            continue
        chosen = rows[start:stop]
        known = [figures.get((r.recording_id, s.channel, s.onset)) for r, s in chosen]
        measured = iter(
            measure_quality([s for (_, s), text in zip(chosen, known, strict=True) if text is None])
        )
        columns: dict[str, Sequence[Any]] = {
            "recording_id": [r.recording_id for r, _ in chosen],
            "subject_id": [r.subject_id for r, _ in chosen],
            "start_time": [r.start_time for r, _ in chosen],
            **{
                name: [getattr(s, name) for _, s in chosen]
                for name in ("channel", "rate", "unit", "scale", "offset", "onset")
            },
            "dtype": [DTYPE_NAMES[s.samples.dtype] for _, s in chosen],
            "n_samples": [len(s.samples) for _, s in chosen],
            "qc": [
                storage.encode_json(next(measured)).decode() if text is None else text
                for text in known
            ],
        }
        samples = _make_binary([s.samples for _, s in chosen])
        arrays = [
            samples if field.name == "samples" else _make_array(columns[field.name], field.type)
            for field in schema
        ]
        yield pa.Table.from_arrays(arrays, schema=schema)
        start, size = stop, 0


def _make_binary(arrays: Sequence[np.ndarray]) -> pa.Array:
    """The bytes of each array as one value; a single array is not copied."""
    import pyarrow as pa

    offsets = np.cumsum([0, *(a.nbytes for a in arrays)], dtype=np.int64)
    data = arrays[0] if len(arrays) == 1 else np.concatenate([a.view(np.uint8) for a in arrays])
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(arrays), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )


def _encode_parquet(schema: pa.Schema, tables: Iterable[pa.Table], plain: list[str]) -> memoryview:
    """A Parquet file in memory, one row group a table; `plain`: columns without a dictionary and
    statistics.
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
    folder: Path,
    shard: CacheShard,
    subjects: dict[str, Any],
    channels: Collection[str] | None = None,
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
    file: pq.ParquetFile, group: int, subjects: dict[str, Any], channels: Collection[str] | None
) -> Iterator[tuple[dict[str, Any], Signal | None]]:
    """The rows of a row group; the signal is None where it is not selected."""
    names = [name for name in file.schema_arrow.names if name not in {"samples", "qc"}]
    facts = file.read_row_group(group, columns=names, use_threads=False).to_pylist()
    selected = [
        row["recording_id"] in subjects and (channels is None or row["channel"] in channels)
        for row in facts
    ]
    samples = (
        file.read_row_group(group, columns=["samples"], use_threads=False)[
            "samples"
        ].combine_chunks()
        if any(selected)
        else None
    )
    for i, row in enumerate(facts):
        if samples is None or not selected[i]:
            yield row, None
            continue
        values = np.frombuffer(samples[i].as_buffer(), dtype=DTYPES[row["dtype"]])
        yield (
            row,
            Signal(
                row["channel"],
                row["rate"],
                row["unit"],
                values,
                row["scale"],
                row["offset"],
                row["onset"],
            ),
        )


def read_table(
    path: Path, columns: Collection[str] | None = None, categories: Sequence[str] = ()
) -> pa.Table:
    """All rows of a file: all columns but the samples, or those of `columns` that are there;
    `categories` as dictionaries. Raises OSError.
    """
    with _open_parquet(path, categories) as file:
        names = [
            name
            for name in file.schema_arrow.names
            if (name != "samples" if columns is None else name in columns)
        ]
        # a thread needs more memory than these columns, and saves no time
        return file.read(columns=names, use_threads=False)


def read_figures(
    folder: Path, shard: CacheShard, subjects: Collection[str]
) -> dict[tuple[str, str, float], str]:
    """Quality figures as text by recording, channel and onset. Signals that were read here cannot
    give them again: they have no rails.

    Raises OSError.
    """
    rows = read_table(folder / shard.recordings).to_pylist() if shard.recordings else []
    return {
        (row["recording_id"], row["channel"], row["onset"]): row["qc"]
        for row in rows
        if row["recording_id"] in subjects
    }


def _read_annotations(path: Path) -> dict[str, list[Annotation]]:
    rows = read_table(path).to_pylist()
    found: dict[str, list[Annotation]] = {}
    for row in rows:
        found.setdefault(row["recording_id"], []).append(
            Annotation(row["onset"], row["duration"], row["label"])
        )
    return found
