"""Vectors of any encoder in Parquet (docs/encoders.md): ids compared with a token set, vectors
checked, the declared pre-training.

Legend: n rows, D width of a vector.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from bitimely_core.errors import Reason, UserError, clean, input_error, safe_text, usage_error
from bitimely_core.formats.units import MAX_FLOAT32
from bitimely_core.schemas.scores import EncoderDeclaration
from bitimely_core.store import storage
from bitimely_core.store.records import describe_invalid
from bitimely_core.system_errors import raise_system_error

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from bitimely_core.tokens import Windows

Array = npt.NDArray[Any]

IDS = ("window", "window_id")
LISTS = ("vector", "embedding")
NUMBERED = re.compile(r"v(0|[1-9]\d{0,5})")
IDENTITY = ("subject_id", "recording_id", "start")  # compared where the file has them
BATCH = 4096  # rows that are read at a time
WHERE = "Make them from the windows that tokens/<name>/index.parquet lists"


class EncoderVectors(NamedTuple):
    """The content of a file of vectors."""

    path: Path
    sha256: str
    declared: EncoderDeclaration
    vectors: Array  # [n, D] float32 or float64, of the requested rows
    has_identity: bool  # whether the file had more than numbers of windows, which were compared

    @property
    def name(self) -> str:
        """The declared name of the encoder, else that of the file."""
        return clean(self.declared.encoder or self.path.stem, 60).strip() or "encoder"


def read_vectors(path: Path, windows: Windows, rows: Array) -> EncoderVectors:
    """The vectors of `rows` from a file that has those of all `windows`.

    Raises UserError: not_found (exit 2); corrupt, schema, metadata, identifier, duplicate_key,
    incomplete, settings_differ, dimensions, non_finite (exit 4) with the number of faults and an
    example.
    """
    import polars as pl
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        wanted = "expected Parquet with window ids and vectors"
        raise usage_error("no such file", wanted, code=Reason.NOT_FOUND, file=str(path))
    try:
        with pq.ParquetFile(path) as file:
            declared = _read_declaration(path, file.metadata.metadata or {})
            if declared.tokens not in {None, windows.fingerprint}:
                wanted = f"expected those of {windows.name}"
                problem = "was made from other tokens"
                raise input_error(Reason.SETTINGS_DIFFER, problem, wanted, WHERE)
            columns = _find_columns(file.schema_arrow)
            ids = _read_ids(file, windows)
            compared = _compare_identity(file, ids, windows)
            vectors = _read_matrix(file, columns, ids, rows)
    except UserError as error:
        raise replace(error, file=error.file or str(path)) from None
    except (OSError, ValueError, pa.ArrowException, pl.exceptions.PolarsError) as error:
        raise_system_error(error, path, stored=False)
        problem = f"does not read as Parquet ({type(error).__name__})"
        raise input_error(Reason.CORRUPT, problem, hint="Write it again", file=str(path)) from None
    has_identity = compared or declared.tokens is not None
    return EncoderVectors(path, storage.hash_file(path), declared, vectors, has_identity)


def _refuse(
    examples: Array | list[int], total: int, code: Reason, problem: str, wanted: str, field: str
) -> None:
    """Raise the error of rows or windows with a fault, if there are any."""
    if len(examples):
        text = f"{len(examples):,} of {total:,} {problem}, for example {examples[0]}"
        raise input_error(code, text, wanted, WHERE, field=field)


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _find_columns(schema: pa.Schema) -> list[str]:
    """The columns of the vectors: one of lists, or v0, v1 ... Raises UserError (schema, exit 4)."""
    lists = [name for name in schema.names if name in LISTS]
    numbered = sorted(filter(NUMBERED.fullmatch, schema.names), key=lambda name: int(name[1:]))
    if len(set(schema.names)) < len(schema.names) or len(lists) + bool(numbered) != 1:
        names = ", ".join(safe_text(name, 30) for name in schema.names[:8])
        wanted = "expected window and either vector (a list of numbers) or v0, v1 ..."
        raise input_error(Reason.SCHEMA, f"has the columns {names}", wanted)
    for k, name in enumerate(numbered):
        if name != f"v{k}":
            wanted = f"expected v0 to {numbered[-1]}"
            raise input_error(Reason.SCHEMA, f"v{k} is missing", wanted)
    _check_types(schema, lists or numbered, in_lists=bool(lists))
    return lists or numbered


def _check_types(schema: pa.Schema, names: list[str], *, in_lists: bool) -> None:
    """Raises UserError (schema, exit 4) for columns of the vectors that are no lists of numbers, or
    no numbers.
    """
    import pyarrow as pa

    for name in names:
        kind = schema.field(name).type
        is_list = isinstance(kind, (pa.ListType, pa.LargeListType, pa.FixedSizeListType))
        if is_list != in_lists or not _is_number(kind.value_type if is_list else kind):
            problem = f"has the type {clean(str(kind), 60)}"
            wanted = "expected lists of numbers" if in_lists else "expected numbers"
            raise input_error(Reason.SCHEMA, problem, wanted, field=name)


def _read_ids(file: pq.ParquetFile, windows: Windows) -> Array:
    """The window of each row of the file. Raises UserError: see `read_vectors`."""
    schema, count = file.schema_arrow, windows.whole_index.height
    names = [name for name in IDS if name in schema.names]
    if len(names) != 1 or not _is_number(schema.field(names[0]).type):
        kinds = ", ".join(clean(str(schema.field(name).type), 60) for name in names)
        problem = f"window ids are of type {kinds}" if names else "has no column window"
        wanted = "expected one column window, of whole numbers"
        raise input_error(Reason.SCHEMA, problem, wanted, WHERE)
    (name,) = names
    numbers = np.asarray(file.read(names).column(0).to_numpy())
    total = len(numbers)
    absent = np.flatnonzero(~np.isfinite(numbers.astype(np.float64))) + 1
    wanted = "expected the number of a window in each row"
    _refuse(absent, total, Reason.IDENTIFIER, "rows have no window id", wanted, name)
    unknown = numbers[(numbers < 0) | (numbers >= count) | (numbers != np.floor(numbers))]
    wanted = f"{windows.name} has the windows 0 to {count - 1:,}"
    _refuse(unknown, total, Reason.UNMATCHED_LABELS, "window ids are unknown", wanted, name)
    ids = numbers.astype(np.int64)
    times = np.bincount(ids, minlength=count)
    wanted = "expected one row a window"
    repeated = np.flatnonzero(times > 1)
    _refuse(repeated, count, Reason.DUPLICATE_KEY, "windows occur more than once", wanted, name)
    missing = windows.rows[times[windows.rows] == 0]
    wanted = f"expected those of all splits of {windows.name}"
    total = len(windows.rows)
    _refuse(missing, total, Reason.INCOMPLETE, "windows have no vector", wanted, name)
    return ids


def _compare_identity(file: pq.ParquetFile, ids: Array, windows: Windows) -> bool:
    """Whether the file has columns of `IDENTITY`. Raises UserError (settings_differ, exit 4) where
    they are not those of the windows.
    """
    import polars as pl

    names = [name for name in IDENTITY if name in file.schema_arrow.names]
    frame = pl.DataFrame(pl.from_arrow(file.read(names)))
    for name in names:
        kind = pl.Float64() if name == "start" else pl.String()
        expected = windows.whole_index[name][ids].cast(kind)
        stored = frame[name].cast(kind, strict=False)
        differs = expected.ne_missing(stored)
        if name == "start":
            differs = (expected - stored).abs().fill_null(np.inf) > 1e-6
        wanted = f"expected the {name} of {windows.name}"
        others = ids[differs.to_numpy()]
        _refuse(others, len(ids), Reason.SETTINGS_DIFFER, "windows differ", wanted, name)
    return bool(names)


def _read_matrix(file: pq.ParquetFile, columns: list[str], ids: Array, rows: Array) -> Array:
    """The vectors of `rows`; those of all others are checked and left. Raises UserError:
    dimensions, non_finite (exit 4).
    """
    import pyarrow as pa

    place = np.full(int(ids.max(initial=-1)) + 1, -1)
    place[rows] = np.arange(len(rows))
    kinds = [file.schema_arrow.field(name).type for name in columns]
    narrow = {pa.float32(), pa.float16(), pa.int16(), pa.int8(), pa.uint8()}
    is_narrow = {getattr(kind, "value_type", kind) for kind in kinds} <= narrow
    dtype = np.float32 if is_narrow else np.float64
    width, start, vectors = 0, 0, np.zeros((0, 0), dtype)
    short: list[int] = []
    infinite: list[int] = []
    for batch in file.iter_batches(BATCH, columns=columns):
        numbers = ids[start : start + batch.num_rows]
        start += len(numbers)
        lengths = _measure_lengths(batch, columns)
        if not width:
            width = int(next(iter(lengths[lengths > 0]), 0))
            vectors = np.zeros((len(rows), width), dtype)
        wrong = lengths != width
        short += numbers[wrong].tolist()
        if width and not wrong.any():
            block = _to_matrix(batch, columns, width)
            infinite += numbers[~(np.abs(block) <= MAX_FLOAT32).all(1)].tolist()
            needed = place[numbers] >= 0
            vectors[place[numbers][needed]] = block[needed]
    name = columns[0]
    if not width:
        wanted = "expected at least one number in each"
        raise input_error(Reason.DIMENSIONS, "all vectors are empty", wanted, field=name)
    problem = "windows have no vector or one of another length"
    wanted = f"expected {width:,} numbers as in the first one"
    _refuse(short, len(ids), Reason.DIMENSIONS, problem, wanted, name)
    problem = "windows have NaN, infinity or more than float32 holds"
    _refuse(infinite, len(ids), Reason.NON_FINITE, problem, "expected finite numbers", name)
    return vectors


def _measure_lengths(batch: pa.RecordBatch, columns: list[str]) -> Array:
    """The number of numbers in each row, NaN where there is no list, [n]."""
    import pyarrow.compute as pc

    if columns[0] not in LISTS:
        return np.full(batch.num_rows, float(len(columns)))
    lengths = pc.list_value_length(batch.column(0))
    return np.asarray(lengths.to_numpy(zero_copy_only=False), np.float64)


def _to_matrix(batch: pa.RecordBatch, columns: list[str], width: int) -> Array:
    """The vectors of a batch whose rows are all of `width` numbers, [n, D]; NaN where one is
    missing.
    """
    if columns[0] in LISTS:
        numbers = batch.column(0).flatten().to_numpy(zero_copy_only=False)
        return np.asarray(numbers).reshape(-1, width)
    return np.column_stack([column.to_numpy(zero_copy_only=False) for column in batch.columns])


def _read_declaration(path: Path, metadata: Mapping[bytes, bytes]) -> EncoderDeclaration:
    """From the key-value metadata of the file, and from the TOML file beside it, which is
    preferred. Raises UserError (metadata, exit 4).
    """
    keys, sidecar = EncoderDeclaration.model_fields.keys(), path.with_suffix(".toml")
    where = str(path)
    try:
        stored = {key.decode(errors="replace"): text for key, text in metadata.items()}
        values = {key: _read_value(key, stored[key].decode()) for key in stored.keys() & keys}
        if sidecar.is_file():
            where = str(sidecar)
            added = tomllib.loads(sidecar.read_bytes().decode())
            for key in sorted(added.keys() - keys):
                wanted = f"expected {', '.join(keys)}"
                problem = "is no key of a declaration"
                raise input_error(Reason.METADATA, problem, wanted, file=where, field=key)
            values |= added
        return EncoderDeclaration.model_validate(values)
    except ValidationError as error:
        field, value, message = describe_invalid(error)
        raise input_error(Reason.METADATA, value, message, file=where, field=field) from None
    except (ValueError, RecursionError) as error:
        problem, wanted = f"not readable: {safe_text(str(error))}", "expected TOML or JSON in UTF-8"
        raise input_error(Reason.METADATA_SYNTAX, problem, wanted, file=where) from None


def _read_value(key: str, text: str) -> object:
    """The value of a key in the metadata of Parquet: JSON, or text."""
    if key in {"encoder", "tokens"}:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return [text] if key.startswith("pretrained") else text


def count_declared_subjects(declared: EncoderDeclaration, windows: Windows) -> int | None:
    """Subjects of the test split that were in the declared pre-training; None: it is not known.

    Subjects are compared by id where they are declared, else the names of the data sets: `NAME` is
    all of it, `NAME:train` that split of it.
    """
    scored = set(windows["test"].subjects())
    if declared.pretrained_subjects is not None:
        return len(scored & set(declared.pretrained_subjects))
    nameless = windows.dataset == "generic" and declared.tokens is None  # many data have that name
    if declared.pretrained_on is None or (declared.pretrained_on and nameless):
        return None
    seen: set[str] = set()
    for text in declared.pretrained_on:
        name, _, part = text.rpartition(":")
        is_split = name and part in {"train", "validation", "test"}
        if _has_name(name if is_split else text, windows.dataset):
            seen |= set(windows[part].subjects()) if is_split else scored
    return len(scored & seen)


def _has_name(text: str, dataset: str) -> bool:
    """Whether words of `text` that follow each other are the name of the data set: "Sleep-EDF
    Expanded" has sleep-edf.
    """
    words, name = (re.findall(r"[a-z0-9]+", part.lower()) for part in (text, dataset))
    pieces = combinations(range(len(words) + 1), 2)
    return any("".join(words[i:j]) == "".join(name) for i, j in pieces)
