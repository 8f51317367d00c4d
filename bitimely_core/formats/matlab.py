"""MATLAB 5 files (.mat, saved with -v6 or -v7): arrays of numbers, decoded by scipy after every
size in the file has been checked.

A file is a header of 128 bytes and elements, each a tag (type, bytes) and a body: a matrix, or a
compressed one. A matrix holds flags, dimensions, a name and values, each with a tag of its own.
Only matrices of real numbers are decoded: texts, cells, structs, sparse matrices, functions and
objects are named, never built. What a tag states must be there, and equal to what the dimensions
state, before anything is allocated.
"""

from __future__ import annotations

import io
import math
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bitimely_core.errors import Reason, input_error, safe_text
from bitimely_core.formats.source import locate_errors
from bitimely_core.formats.text import list_names
from bitimely_core.system_errors import raise_system_error

HEADER = 128  # bytes
HEAD = 1 << 12  # bytes of a matrix that hold all but its values
MATRIX, COMPRESSED = 14, 15  # types of elements
# type of values -> bytes of one
SIZES = {1: 1, 2: 1, 3: 2, 4: 2, 5: 4, 6: 4, 7: 4, 9: 8, 12: 8, 13: 8}
NUMBERS = (
    "double",
    "single",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
)
KINDS = dict(
    enumerate(
        (
            "cell array",
            "struct",
            "object",
            "text",
            "sparse matrix",
            *NUMBERS,
            "function",
            "opaque object",
        ),
        1,
    )
)
COMPLEX = 0x08  # flag
NAME = re.compile(r"[A-Za-z]\w{0,254}", re.ASCII)
MAX_BYTES = (1 << 31) - 1  # of a file: the format holds no larger matrix
MAX_DIMENSIONS = 32
# bytes that a compressed matrix may always hold; beyond it at most MAX_RATIO times the size of the
# file
MAX_EXPANDED = 1 << 26
MAX_RATIO = 200


class MatlabVariable(NamedTuple):
    """A variable before it is decoded."""

    name: str
    kind: str  # double, ..., or what is not read: cell array, struct ...
    shape: tuple[int, ...]
    packed: bool
    body: memoryview  # the element without its tag when packed, else with it


def read_array(path: Path, name: str = "") -> np.ndarray:
    """The array of real numbers called `name`, or the only one of the file, in the shape that
    MATLAB shows.

    Raises UserError: unsupported_format for versions 4 and 7.3; schema where the variable is
    absent, no array of numbers, or there are several; truncated, corrupt, header_implausible,
    expansion_limit, duplicate_key, empty_file, io_error.
    """
    with locate_errors(path, replace=False):
        data = _read_bytes(path)
        found = list_variables(data)
        numeric = [one for one in found.values() if one.kind in NUMBERS]
        known = f"the file holds {list_names([f'{one.name} ({one.kind})' for one in found.values()]) or 'no variable'}"
        if name and name not in found:
            raise input_error(
                Reason.SCHEMA,
                f"has no variable {safe_text(name)}",
                known,
                "Save it under this name",
                field="variable",
            )
        if name and found[name].kind not in NUMBERS:
            text = f"{safe_text(name)} is a {found[name].kind}"
            raise input_error(
                Reason.SCHEMA, text, "expected an array of real numbers", field="variable"
            )
        if not name and len(numeric) != 1:
            text = f"has {len(numeric)} arrays of real numbers"
            raise input_error(
                Reason.SCHEMA,
                text,
                f"expected one; {known}",
                "Name it: `variable` in [[files]] of the map",
                field="variable",
            )
        return _decode(found[name] if name else numeric[0], data)


def _read_bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise input_error(
                Reason.RESOURCE_LIMIT,
                f"has more than {MAX_BYTES} bytes",
                "MATLAB 5 files are smaller",
            )
        data = path.read_bytes()
    except OSError as error:
        raise_system_error(error, path, stored=False)
        raise input_error(Reason.IO_ERROR, f"cannot be read ({error.strerror})") from None
    if not data:
        raise input_error(Reason.EMPTY_FILE, "has 0 bytes")
    if data.startswith((b"MATLAB 7.3", b"\x89HDF")):
        raise input_error(
            Reason.UNSUPPORTED_FORMAT,
            "is a MATLAB 7.3 file",
            "expected version 5",
            "Save it in MATLAB with -v7",
        )
    if (
        len(data) < HEADER
        or data[126:128] not in {b"IM", b"MI"}
        or data[124:126] not in {b"\x00\x01", b"\x01\x00"}
    ):
        hint = "Download it again, or save it in MATLAB with -v7"
        raise input_error(
            Reason.UNSUPPORTED_FORMAT,
            "is no MATLAB 5 file",
            "expected its header of 128 bytes",
            hint,
        )
    return data


def list_variables(data: bytes) -> dict[str, MatlabVariable]:
    """The variables of a file, by name; values are not decoded. Raises UserError: see
    `read_array`.
    """
    order = "<" if data[126:128] == b"IM" else ">"
    found: dict[str, MatlabVariable] = {}
    for kind, body in _list_elements(memoryview(data), order):
        packed = kind == COMPRESSED
        head = bytes(body[:HEAD]) if not packed else _inflate_head(body)
        variable = _parse_head(head, order)._replace(packed=packed, body=body)
        if not NAME.fullmatch(variable.name):
            continue  # what MATLAB keeps for itself
        if variable.name in found:
            raise input_error(
                Reason.DUPLICATE_KEY,
                f"holds {safe_text(variable.name)} twice",
                "expected each variable once",
            )
        found[variable.name] = variable
    return found


def _list_elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    at = HEADER
    while at < len(data):
        if len(data) - at < 8:
            raise input_error(Reason.TRUNCATED, f"ends inside the tag at byte {at}")
        kind, size = struct.unpack_from(f"{order}II", data, at)
        if kind not in {MATRIX, COMPRESSED}:
            raise input_error(
                Reason.CORRUPT, f"holds an element of type {kind} at byte {at}", "expected matrices"
            )
        if size > len(data) - at - 8:
            text = f"the element at byte {at} has {size} bytes, the file {len(data) - at - 8} more"
            raise input_error(Reason.TRUNCATED, text)
        yield kind, data[at + 8 * (kind == COMPRESSED) : at + 8 + size]
        at += 8 + size


def _inflate_head(body: memoryview) -> bytes:
    try:
        return zlib.decompressobj().decompress(body, HEAD)
    except zlib.error:
        raise _corrupt_error("does not decompress") from None


def _corrupt_error(problem: str) -> Exception:
    return input_error(Reason.CORRUPT, f"a matrix {problem}")


def _parse_head(head: bytes, order: str) -> MatlabVariable:
    """Name, kind and shape of a matrix by its first bytes, from its tag on; sizes are compared,
    values are not there yet.
    """
    if len(head) < 8:
        raise _corrupt_error("has no tag")
    kind, size = struct.unpack_from(f"{order}II", head)
    if kind != MATRIX:
        raise _corrupt_error(f"has the type {kind}")
    end = 8 + size
    flags, at = _read_part(head, 8, end, order, 6)
    if len(flags) != 8:
        raise _corrupt_error("has no flags")
    word = struct.unpack_from(f"{order}I", flags)[0]
    name = KINDS.get(word & 0xFF, "matrix of an unknown class")
    if name not in NUMBERS and name not in {
        "text",
        "sparse matrix",
        "cell array",
        "struct",
        "object",
    }:
        return MatlabVariable("", name, (), packed=False, body=memoryview(b""))
    dimensions, at = _read_part(head, at, end, order, 5)
    shape = struct.unpack(f"{order}{len(dimensions) // 4}i", dimensions[: len(dimensions) // 4 * 4])
    label, at = _read_part(head, at, end, order, 1)
    if not 2 <= len(shape) <= MAX_DIMENSIONS or min(shape) < 0:
        raise _corrupt_error("has impossible dimensions")
    kind_of = "complex matrix" if word >> 8 & COMPLEX and name in NUMBERS else name
    if kind_of in NUMBERS and math.prod(shape):
        code, length, start, _ = _read_tag(head, at, order)
        stated, held = math.prod(shape), length // SIZES.get(code, 1)
        if code not in SIZES or start + length > end or held != stated or length % SIZES[code]:
            text = f"the dimensions {' x '.join(map(str, shape))} of {safe_text(label.decode('latin-1'))}"
            raise input_error(
                Reason.HEADER_IMPLAUSIBLE,
                text,
                f"do not fit its {length} bytes",
                "Download it again",
            )
    return MatlabVariable(
        label.decode("latin-1"), kind_of, tuple(shape), packed=False, body=memoryview(b"")
    )


def _read_tag(head: bytes, at: int, order: str) -> tuple[int, int, int, int]:
    """Type, bytes, first byte of the content, and first byte behind it, of the part at `at`."""
    if at + 8 > len(head):
        raise _corrupt_error("ends inside a tag")
    kind, size = struct.unpack_from(f"{order}II", head, at)
    if kind >> 16:  # up to four bytes, in the tag
        return kind & 0xFFFF, kind >> 16, at + 4, at + 8
    return kind, size, at + 8, at + 8 + -(-size // 8) * 8


def _read_part(head: bytes, at: int, end: int, order: str, kind: int) -> tuple[bytes, int]:
    """Content of the part at `at`, which must be of type `kind` and lie within the matrix, and
    where the next one begins.
    """
    found, size, start, following = _read_tag(head, at, order)
    if found != kind or start + size > min(end, len(head)):
        raise _corrupt_error("has a damaged head")
    return head[start : start + size], following


def _decode(variable: MatlabVariable, data: bytes) -> np.ndarray:
    """The values of a checked matrix."""
    import scipy.io

    element = bytes(variable.body)
    if variable.packed:
        limit = max(MAX_EXPANDED, MAX_RATIO * len(data))
        inflater = zlib.decompressobj()
        try:
            element = inflater.decompress(element, limit + 1)
        except zlib.error:
            raise _corrupt_error("does not decompress") from None
        if len(element) > limit:
            raise input_error(
                Reason.EXPANSION_LIMIT,
                f"unpacks to more than {limit} bytes",
                "no recording is compressed that well",
            )
        order = "<" if data[126:128] == b"IM" else ">"
        if (
            not inflater.eof
            or len(element) < 8
            or struct.unpack_from(f"{order}II", element)[1] != len(element) - 8
        ):
            raise input_error(Reason.TRUNCATED, f"{variable.name} ends early")
    # without the place of objects
    plain = io.BytesIO(data[:116] + bytes(8) + data[124:HEADER] + element)
    try:
        value = scipy.io.loadmat(plain, variable_names=[variable.name])[variable.name]
    except Exception as error:  # scipy's readers fail in many ways
        raise_system_error(error, stored=False)
        raise _corrupt_error("does not decode") from None
    if (
        not isinstance(value, np.ndarray)
        or value.dtype.kind not in "iuf"
        or value.shape != variable.shape
    ):
        raise _corrupt_error("is not what its head states")
    return value
