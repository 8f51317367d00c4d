"""Vectors of any encoder in Parquet (docs/encoders.md): ids compared with a token set, vectors
checked, the declared pre-training.

Legend: n rows, D width of a vector.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from bitimely_core import storage
from bitimely_core.errors import Reason, UserError, clean, input_error, safe_text, usage_error
from bitimely_core.formats.units import MAX_FLOAT32
from bitimely_core.schemas.scores import EncoderDeclaration
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
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise usage_error(
            "no such file",
            "expected Parquet with window ids and vectors",
            code=Reason.NOT_FOUND,
            file=str(path),
        )
    try:
        with pq.ParquetFile(path) as file:
            declared = _read_declaration(path, file.metadata.metadata or {})
            if declared.tokens not in {None, windows.fingerprint}:
                raise _fault(
                    path,
                    Reason.SETTINGS_DIFFER,
                    "was made from other tokens",
                    f"expected those of {windows.name}",
                    WHERE,
                )
            columns = _find_columns(path, file.schema_arrow)
            ids = _read_ids(path, file, windows)
            compared = _compare_identity(path, file, ids, windows)
            vectors = _read_matrix(path, file, columns, ids, rows)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise_system_error(error, path, stored=False)
        raise _fault(
            path,
            Reason.CORRUPT,
            f"does not read as Parquet ({type(error).__name__})",
            "",
            "Write it again",
        ) from None
    return EncoderVectors(
        path, storage.hash_file(path), declared, vectors, compared or declared.tokens is not None
    )


def _fault(
    path: Path,
    code: Reason,
    problem: str,
    requirement: str,
    hint: str = "",
    field: str | None = None,
) -> UserError:
    return input_error(code, problem, requirement, hint, file=str(path), field=field)


def _find_columns(path: Path, schema: pa.Schema) -> list[str]:
    """The columns of the vectors: one of lists, or v0, v1 ... Raises UserError (schema, exit 4)."""
    import pyarrow as pa

    lists = [name for name in LISTS if name in schema.names]
    numbered = sorted(
        (name for name in schema.names if NUMBERED.fullmatch(name)), key=lambda name: int(name[1:])
    )
    if len(set(schema.names)) < len(schema.names) or len(lists) + bool(numbered) != 1:
        names = ", ".join(safe_text(name, 30) for name in schema.names[:8])
        raise _fault(
            path,
            Reason.SCHEMA,
            f"has the columns {names}",
            "expected window and either vector (a list of numbers) or v0, v1 ...",
        )
    gap = next((k for k, name in enumerate(numbered) if name != f"v{k}"), None)
    if gap is not None:
        raise _fault(path, Reason.SCHEMA, f"v{gap} is missing", f"expected v0 to {numbered[-1]}")
    for name in lists or numbered:
        kind = schema.field(name).type
        if lists:
            is_list = (
                pa.types.is_list(kind)
                or pa.types.is_large_list(kind)
                or pa.types.is_fixed_size_list(kind)
            )
            kind = kind.value_type if is_list else pa.string()
        if not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
            found = clean(str(schema.field(name).type), 60)
            raise _fault(
                path,
                Reason.SCHEMA,
                f"has the type {found}",
                "expected numbers" if numbered else "expected lists of numbers",
                field=name,
            )
    return lists or numbered


def _read_ids(path: Path, file: pq.ParquetFile, windows: Windows) -> Array:
    """The window of each row of the file. Raises UserError: see `read_vectors`."""
    import pyarrow as pa

    names, count = (
        [name for name in IDS if name in file.schema_arrow.names],
        windows.whole_index.height,
    )
    kind = file.schema_arrow.field(names[0]).type if len(names) == 1 else pa.string()
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        problem = (
            f"window ids are of type {clean(str(kind), 60)}" if names else "has no column window"
        )
        raise _fault(
            path, Reason.SCHEMA, problem, "expected one column window, of whole numbers", WHERE
        )
    found = np.asarray(file.read(names).column(0).to_numpy())
    absent = ~np.isfinite(found.astype(np.float64))
    if absent.any():
        problem = f"{int(absent.sum()):,} of {len(found):,} rows have no window id, for example row {int(absent.argmax()) + 1:,}"
        raise _fault(
            path,
            Reason.IDENTIFIER,
            problem,
            "expected the number of a window in each row",
            field=names[0],
        )
    unknown = (found < 0) | (found >= count) | (found != np.floor(found))
    if unknown.any():
        problem = f"{int(unknown.sum()):,} of {len(found):,} window ids are unknown, for example {found[unknown][0]}"
        raise _fault(
            path,
            Reason.UNMATCHED_LABELS,
            problem,
            f"{windows.name} has the windows 0 to {count - 1:,}",
            WHERE,
            names[0],
        )
    ids = found.astype(np.int64)
    times = np.bincount(ids, minlength=count)
    if (times > 1).any():
        problem = f"{int((times > 1).sum()):,} windows occur more than once, for example {int((times > 1).argmax())}"
        raise _fault(
            path,
            Reason.DUPLICATE_KEY,
            problem,
            "expected one row a window",
            "Keep one vector of each",
            names[0],
        )
    missing = windows.rows[times[windows.rows] == 0]
    if len(missing):
        problem = f"{len(missing):,} of {len(windows.rows):,} windows have no vector, for example {int(missing[0])}"
        raise _fault(
            path,
            Reason.INCOMPLETE,
            problem,
            f"expected those of all splits of {windows.name}",
            "Add them",
            names[0],
        )
    return ids


def _compare_identity(path: Path, file: pq.ParquetFile, ids: Array, windows: Windows) -> bool:
    """Whether the file has columns of `IDENTITY`. Raises UserError (settings_differ, exit 4) where
    they are not those of the windows.
    """
    import polars as pl

    names = [name for name in IDENTITY if name in file.schema_arrow.names]
    if not names:
        return False
    frame = pl.DataFrame(pl.from_arrow(file.read(names)))
    for name in names:
        kind = pl.Float64() if name == "start" else pl.String()
        with suppress(pl.exceptions.PolarsError):  # text is compared with numbers: all differ
            own, theirs = windows.whole_index[name][ids].cast(kind), frame[name].cast(kind)
            other = (
                ((own - theirs).abs().fill_null(np.inf) > 1e-6)
                if name == "start"
                else own.ne_missing(theirs)
            )
            if not other.any():
                continue
            example = f"{other.sum():,} of {len(ids):,} windows differ, for example {int(ids[other.arg_max() or 0])}"
            raise _fault(
                path,
                Reason.SETTINGS_DIFFER,
                example,
                f"expected the {name} of {windows.name}",
                WHERE,
                name,
            )
        raise _fault(
            path,
            Reason.SCHEMA,
            f"has the type {frame[name].dtype}",
            f"expected the {name} of {windows.name}",
            WHERE,
            name,
        )
    return True


def _read_matrix(
    path: Path, file: pq.ParquetFile, columns: Sequence[str], ids: Array, rows: Array
) -> Array:
    """The vectors of `rows`; those of all others are checked and left. Raises UserError:
    dimensions, non_finite (exit 4).
    """
    import pyarrow as pa

    place = np.full(int(ids.max(initial=-1)) + 1, -1)
    place[rows] = np.arange(len(rows))
    kinds = [file.schema_arrow.field(name).type for name in columns]
    narrow = {pa.float32(), pa.float16(), pa.int16(), pa.int8(), pa.uint8()}
    dtype = (
        np.float32
        if {kind.value_type if columns[0] in LISTS else kind for kind in kinds} <= narrow
        else np.float64
    )
    width, out, at = None, np.zeros((0, 0), dtype), 0
    faults: dict[Reason, list[int]] = {Reason.DIMENSIONS: [], Reason.NON_FINITE: []}
    for batch in file.iter_batches(BATCH, columns=list(columns)):
        of, at = ids[at : at + batch.num_rows], at + batch.num_rows
        lengths = _measure_lengths(batch, columns)
        if width is None and np.isfinite(lengths).any():
            width = int(lengths[np.isfinite(lengths)][0])
            out = np.zeros((len(rows), width), dtype)
        wrong = lengths != width
        faults[Reason.DIMENSIONS] += of[wrong].tolist()
        if wrong.any() or not width:
            continue
        block = _to_matrix(batch, columns, width)
        finite = (np.abs(block) <= MAX_FLOAT32).all(1)
        faults[Reason.NON_FINITE] += of[~finite].tolist()
        kept = place[of] >= 0
        out[place[of][kept]] = block[kept]
    if not width:
        raise _fault(
            path,
            Reason.DIMENSIONS,
            "all vectors are empty",
            "expected at least one number in each",
            field=columns[0],
        )
    for code, problem, requirement in (
        (
            Reason.DIMENSIONS,
            "vectors are missing or of another length",
            f"expected {width:,} numbers as in the first one",
        ),
        (
            Reason.NON_FINITE,
            "vectors hold NaN, infinity or more than float32 holds",
            "expected finite numbers",
        ),
    ):
        if found := faults[code]:
            text = (
                f"{len(found):,} of {len(ids):,} {problem}, for example that of window {found[0]}"
            )
            raise _fault(path, code, text, requirement, "Encode these windows again", columns[0])
    return out


def _measure_lengths(batch: pa.RecordBatch, columns: Sequence[str]) -> Array:
    """The number of numbers in each row, NaN where there is no list, [n]."""
    import pyarrow.compute as pc

    if columns[0] not in LISTS:
        return np.full(batch.num_rows, float(len(columns)))
    return np.asarray(
        pc.list_value_length(batch.column(0)).to_numpy(zero_copy_only=False), np.float64
    )


def _to_matrix(batch: pa.RecordBatch, columns: Sequence[str], width: int) -> Array:
    """The vectors of a batch whose rows are all of `width` numbers, [n, D]; NaN where one is
    missing.
    """
    if columns[0] in LISTS:
        return np.asarray(batch.column(0).flatten().to_numpy(zero_copy_only=False)).reshape(
            -1, width
        )
    return np.column_stack([one.to_numpy(zero_copy_only=False) for one in batch.columns])


# --- what the encoder was trained on ------------------------------------------------------------------------------------------------------


def _read_declaration(path: Path, metadata: Mapping[bytes, bytes]) -> EncoderDeclaration:
    """From the key-value metadata of the file, and from the TOML file beside it, which is
    preferred. Raises UserError (metadata, exit 4).
    """
    keys, sidecar = EncoderDeclaration.model_fields.keys(), path.with_suffix(".toml")
    values: dict[str, object] = {}
    where = path
    try:
        for key, raw in metadata.items():
            if (name := key.decode(errors="replace")) in keys:
                values[name] = text = raw.decode()
                if name not in {"encoder", "tokens"}:  # lists and numbers
                    with suppress(ValueError):
                        values[name] = json.loads(text)
                if isinstance(values[name], str) and name.startswith("pretrained"):
                    values[name] = [text]
        if sidecar.is_file():
            where = sidecar
            added = tomllib.loads(sidecar.read_bytes().decode())
            if unknown := sorted(added.keys() - keys):
                raise _fault(
                    sidecar,
                    Reason.METADATA,
                    "is no key of a declaration",
                    f"expected {', '.join(keys)}",
                    field=unknown[0],
                )
            values |= added
        return EncoderDeclaration.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise _fault(
            where,
            Reason.METADATA,
            f"found {safe_text(first.get('input'))}",
            str(first["msg"]),
            field=field,
        ) from None
    except (ValueError, RecursionError) as error:
        raise _fault(
            where,
            Reason.METADATA_SYNTAX,
            f"not readable: {safe_text(str(error))}",
            "expected TOML or JSON in UTF-8",
        ) from None


def count_declared_subjects(declared: EncoderDeclaration, windows: Windows) -> int | None:
    """Subjects of the test split that were in the declared pre-training; None: it is not known.

    Subjects are compared by id where they are declared, else the names of the data sets: `NAME` is
    all of it, `NAME:train` that split of it.
    """
    own = set(windows["test"].subjects())
    if declared.pretrained_subjects is not None:
        return len(own & set(declared.pretrained_subjects))
    nameless = windows.dataset == "generic" and declared.tokens is None  # many data have that name
    if declared.pretrained_on is None or (declared.pretrained_on and nameless):
        return None
    seen: set[str] = set()
    for text in declared.pretrained_on:
        name, _, part = text.rpartition(":")
        known = name and part in {"train", "validation", "test"}
        if _has_name(name if known else text, windows.dataset):
            seen |= set(windows[part].subjects()) if known else own
    return len(own & seen)


def _has_name(text: str, dataset: str) -> bool:
    """Whether words of `text` that follow each other are the name of the data set: "Sleep-EDF
    Expanded" has sleep-edf.
    """
    words, name = (re.findall(r"[a-z0-9]+", one.lower()) for one in (text, dataset))
    return any(
        "".join(words[i:j]) == "".join(name)
        for i in range(len(words))
        for j in range(i + 1, len(words) + 1)
    )
