"""Reads arrays of numbers from MATLAB 5 files (.mat, saved with -v6 or -v7).

scipy decodes them after every size in the file has been checked.

A file is a header of 128 bytes and elements, each a tag (type, bytes) and a body: a matrix, or a
compressed one. A matrix holds flags, dimensions, a name and values, each with a tag of its own.
Only matrices of real numbers are decoded, and texts, alone or in cells, where names are looked for:
structs, sparse matrices, functions and objects are named, never built. What a tag states must be
there, and equal to what the dimensions state, before anything is allocated.
"""

from __future__ import annotations

import io
import math
import re
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bitimely_core.errors import Reason, input_error, safe_text
from bitimely_core.formats.source import translate_read_errors
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
CONTAINERS = ("cell array", "struct", "object", "text", "sparse matrix")
KINDS = dict(enumerate((*CONTAINERS, *NUMBERS, "function", "opaque object"), 1))
TEXTS = {"cell array", "text"}
COMPLEX = 0x08  # flag
# type of characters -> their encoding; uint16 and UTF-16 by the byte order of the file
ENCODINGS = {1: "latin-1", 2: "latin-1", 4: "utf-16-{}", 16: "utf-8", 17: "utf-16-{}"}
ORDERS = {"<": "le", ">": "be"}
NUMBERED = re.compile(r"(.*?)_?(\d+)")
NAME = re.compile(r"[A-Za-z]\w{0,254}", re.ASCII)
MARK = re.compile(rb"(?:\x00\x01|\x01\x00)(?:IM|MI)")  # version and byte order
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

    def is_vector_of(self, names: Collection[str]) -> bool:
        """Whether it is a row or a column of numbers with one of these names."""
        is_vector = math.prod(self.shape) == max(self.shape, default=0)
        return is_vector and self.is_called(names)

    def is_called(self, names: Collection[str]) -> bool:
        """Whether it is an array of numbers with one of these names."""
        return self.kind in NUMBERS and self.name.lower() in names

    def is_beside(self, names: Collection[str], most: int) -> bool:
        """Whether it is such a vector, or a table beside an array of `most` = 3 dimensions."""
        is_table = len(self.shape) < most == 3
        return self.is_called(names) if is_table else self.is_vector_of(names)


def read_array(path: Path, name: str = "", beside: Collection[str] = ()) -> np.ndarray:
    """The array of real numbers called `name`, or the only one of the file, in the shape that
    MATLAB shows. Vectors called as one of `beside` (in small letters) do not count.

    Raises UserError: unsupported_format for versions 4 and 7.3; schema where the variable is
    absent, no array of numbers, or there are several; truncated, corrupt, header_implausible,
    expansion_limit, duplicate_key, empty_file, io_error.
    """
    with translate_read_errors(path):
        data = _read_bytes(path)
        variables = list_variables(data)
        names = [f"{variable.name} ({variable.kind})" for variable in variables.values()]
        content = f"the file holds {list_names(names) or 'no variable'}"
        refuse = partial(input_error, Reason.SCHEMA, field="variable")
        if name:
            variable = variables.get(name)
            if variable is None:
                problem = f"has no variable {safe_text(name)}"
                raise refuse(problem, content, "Save it under this name")
            if variable.kind not in NUMBERS:
                problem = f"{safe_text(name)} is a {variable.kind}"
                raise refuse(problem, "expected an array of real numbers")
            return _decode(variable, data)
        numeric = _list_numeric(variables.values(), beside)
        if len(numeric) != 1:
            problem = f"has {len(numeric)} arrays of real numbers"
            hint = "Name it: `variable` in [[files]] of the map"
            struct = next((v.name for v in variables.values() if v.kind == "struct"), "")
            if struct and not numeric:
                hint = (
                    f"In MATLAB: {struct} = load(FILE).{struct}; save(NAME, '-struct', '{struct}')"
                )
                hint += "; of FieldTrip: eeg = cell2mat(data.trial); fs = data.fsample; "
                hint += "save(NAME, 'eeg', 'fs')"
            raise refuse(problem, f"expected one; {content}", hint)
        return _decode(numeric[0], data)


def read_channels(path: Path, beside: Collection[str], least: int = 2) -> dict[str, np.ndarray]:
    """Name -> numbers of the vectors of one length of a file that holds at least so many and no
    other array.

    `beside`: names, in small letters, of those that are none of them. Raises UserError: as
    `read_array`.
    """
    with translate_read_errors(path):
        data = _read_bytes(path)
        numeric = _list_numeric(list_variables(data).values(), beside)
        lengths = {math.prod(variable.shape) for variable in numeric}
        are_vectors = all(lengths == {max(variable.shape)} for variable in numeric)
        if len(numeric) < least or not are_vectors:
            return {}
        return {variable.name: _decode(variable, data).reshape(-1) for variable in numeric}


def read_trials(path: Path, beside: Collection[str]) -> dict[str, np.ndarray]:
    """Name -> array of two dimensions, of a file that holds several called by one word and numbers,
    in the order of these, and no other array; {}: it holds none.

    `beside`: as for `read_channels`. Raises UserError: as `read_array`.
    """
    with translate_read_errors(path):
        data = _read_bytes(path)
        numeric = _list_numeric(list_variables(data).values(), beside)
        numeric.sort(key=lambda variable: _split_number(variable.name))
        stems = {_split_number(variable.name)[0] for variable in numeric}
        are_arrays = all(len(v.shape) == 2 and min(v.shape) > 1 for v in numeric)
        if len(numeric) < 2 or len(stems) > 1 or not are_arrays:
            return {}
        return {variable.name: _decode(variable, data) for variable in numeric}


def _split_number(name: str) -> tuple[str, int]:
    """The words and the number of a name; -1: it ends without."""
    match = NUMBERED.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, -1)


def read_texts(
    path: Path, names: Collection[str], kinds: Collection[str] = TEXTS
) -> tuple[str, ...]:
    """The cells or the rows of the texts that are called as one of `names` (in small letters);
    (): there are none, or other values among them. `kinds`: text for rows alone.

    Raises UserError: as `read_array`.
    """
    with translate_read_errors(path):
        data = _read_bytes(path)
        for variable in list_variables(data).values():
            if variable.kind in kinds and variable.name.lower() in names:
                return _read_cells(_read_element(variable, data), _find_order(data))
    return ()


def _read_cells(element: bytes, order: str) -> tuple[str, ...]:
    """The texts of a matrix of cells or of characters, with its tag."""
    kind, shape, place = _read_matrix_head(element, order)
    if kind == "text":
        return tuple(_read_rows(element, order))
    rows: list[Sequence[str]] = []
    for _ in range(min(math.prod(shape), len(element))):
        tag = _read_tag(element, place, order)
        rows.append(_read_rows(element[place : tag.end], order))
        place = tag.following
    are_texts = set(map(len, rows)) == {1}
    return tuple(chain.from_iterable(rows)) if are_texts else ()


def _read_rows(element: bytes, order: str) -> Sequence[str]:
    """The rows of a matrix of characters, which lie column by column; () of another matrix."""
    kind, shape, place = _read_matrix_head(element, order)
    if kind != "text" or len(shape) < 2 or not math.prod(shape):
        return ()
    tag = _read_tag(element, place, order)
    encoding = ENCODINGS.get(tag.kind, "latin-1").format(ORDERS[order])
    text = element[tag.start : tag.end].decode(encoding, "replace")
    return [text[row :: shape[0]].strip() for row in range(min(shape[0], len(text)))]


def _read_matrix_head(element: bytes, order: str) -> tuple[str, tuple[int, ...], int]:
    """Kind and shape of a matrix, and where its values begin."""
    end = len(element)
    flags, place = _read_part(element, 8, end, order, 6)
    dimensions, place = _read_part(element, place, end, order, 5)
    _, place = _read_part(element, place, end, order, 1)
    shape = struct.unpack_from(f"{order}{len(dimensions) // 4}i", dimensions)
    word = struct.unpack_from(f"{order}I", flags.ljust(4, b"\0"))[0]
    return KINDS.get(word & 0xFF, ""), shape, place


def _list_numeric(
    variables: Iterable[MatlabVariable], beside: Collection[str]
) -> list[MatlabVariable]:
    """The arrays of real numbers; where there are several, without single numbers, and without
    those named in `beside` that are vectors, or tables beside an array of three dimensions.
    """
    numeric = [variable for variable in variables if variable.kind in NUMBERS]
    if len(numeric) == 1:
        return numeric
    arrays = [variable for variable in numeric if math.prod(variable.shape) > 1]
    most = max((len(variable.shape) for variable in arrays), default=0)
    return [variable for variable in arrays if not variable.is_beside(beside, most)]


def read_vector(path: Path, names: Collection[str], length: int | None) -> np.ndarray | None:
    """The numbers of the vector of this length (None: any) with one of `names`; None without one.

    Raises UserError: as `read_array`.
    """
    with translate_read_errors(path):
        data = _read_bytes(path)
        for variable in list_variables(data).values():
            if variable.is_vector_of(names) and length in {None, math.prod(variable.shape)}:
                return _decode(variable, data).reshape(-1)
    return None


def read_labels(path: Path, names: Collection[str], count: int) -> np.ndarray | None:
    """The numbers [count, labels] of the array with one of `names` that has a row, or a value, for
    each of `count` epochs; None without one.

    Raises UserError: as `read_array`.
    """
    with translate_read_errors(path):
        data = _read_bytes(path)
        for variable in list_variables(data).values():
            shape = variable.shape
            rows = (math.prod(shape),) if variable.is_vector_of(names) else shape[:1]
            if variable.is_called(names) and (rows, len(shape)) == ((count,), 2):
                return _decode(variable, data).reshape(count, -1)
    return None


def has_vector_beside(path: Path, names: Collection[str]) -> bool:
    """Whether a vector with one of `names` is beside an array of two dimensions.

    Raises UserError: as `read_array`.
    """
    with translate_read_errors(path):
        variables = _list_numeric(list_variables(_read_bytes(path)).values(), ())
    is_named = [variable.is_vector_of(names) for variable in variables]
    others = [v for v, named in zip(variables, is_named, strict=True) if not named]
    return any(is_named) and len(others) == 1 and len(others[0].shape) == 2


def _read_bytes(path: Path) -> bytes:
    if path.stat().st_size > MAX_BYTES:
        problem = f"has more than {MAX_BYTES} bytes"
        raise input_error(Reason.RESOURCE_LIMIT, problem, "MATLAB 5 files are smaller")
    data = path.read_bytes()
    if not data:
        raise input_error(Reason.EMPTY_FILE, "has 0 bytes")
    if data.startswith((b"MATLAB 7.3", b"\x89HDF")):
        problem, hint = "is a MATLAB 7.3 file", "Save it in MATLAB with -v7, or in Python: "
        hint += "numpy.savez('NAME.npz', data=h5py.File(FILE)['VARIABLE'][:], fs=HZ)"
        raise input_error(Reason.UNSUPPORTED_FORMAT, problem, "expected version 5", hint)
    if len(data) < HEADER or not MARK.fullmatch(data, 124, HEADER):
        hint = "Download it again, or save it in MATLAB with -v7"
        problem, wanted = "is no MATLAB 5 file", "expected its header of 128 bytes"
        raise input_error(Reason.UNSUPPORTED_FORMAT, problem, wanted, hint)
    return data


def list_variables(data: bytes) -> dict[str, MatlabVariable]:
    """The variables of a file, by name; values are not decoded.

    Raises UserError: see `read_array`.
    """
    order = _find_order(data)
    variables: dict[str, MatlabVariable] = {}
    for kind, body in _list_elements(memoryview(data), order):
        packed = kind == COMPRESSED
        head = _inflate_head(body) if packed else bytes(body[:HEAD])
        variable = _parse_head(head, order)._replace(packed=packed, body=body)
        if not NAME.fullmatch(variable.name):
            continue  # what MATLAB keeps for itself
        if variable.name in variables:
            problem = f"holds {safe_text(variable.name)} twice"
            raise input_error(Reason.DUPLICATE_KEY, problem, "expected each variable once")
        variables[variable.name] = variable
    return variables


def _find_order(data: bytes) -> str:
    """The byte order as `struct` has it."""
    return "<" if data[126:128] == b"IM" else ">"


def _list_elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    place = HEADER
    while place < len(data):
        rest = len(data) - place - 8
        if rest < 0:
            raise input_error(Reason.TRUNCATED, f"ends inside the tag at byte {place}")
        kind, size = struct.unpack_from(f"{order}II", data, place)
        if kind not in {MATRIX, COMPRESSED}:
            problem = f"holds an element of type {kind} at byte {place}"
            raise input_error(Reason.CORRUPT, problem, "expected matrices")
        if size > rest:
            problem = f"the element at byte {place} has {size} bytes, the file {rest} more"
            raise input_error(Reason.TRUNCATED, problem)
        end = place + 8 + size
        yield kind, data[place + 8 * (kind == COMPRESSED) : end]
        place = end


def _inflate_head(body: memoryview) -> bytes:
    try:
        return zlib.decompressobj().decompress(body, HEAD)
    except zlib.error:
        raise _corrupt_error("does not decompress") from None


def _corrupt_error(problem: str) -> Exception:
    return input_error(Reason.CORRUPT, f"a matrix {problem}")


def _parse_head(head: bytes, order: str) -> MatlabVariable:
    """Name, kind and shape of a matrix by its first bytes, from its tag on.

    Sizes are compared; values are not there yet.
    """
    if len(head) < 8:
        raise _corrupt_error("has no tag")
    element, size = struct.unpack_from(f"{order}II", head)
    if element != MATRIX:
        raise _corrupt_error(f"has the type {element}")
    end = 8 + size
    flags, place = _read_part(head, 8, end, order, 6)
    if len(flags) != 8:
        raise _corrupt_error("has no flags")
    word = struct.unpack_from(f"{order}I", flags)[0]
    kind = KINDS.get(word & 0xFF, "matrix of an unknown class")
    if kind not in (*NUMBERS, *CONTAINERS):
        return MatlabVariable("", kind, (), packed=False, body=memoryview(b""))
    dimensions, place = _read_part(head, place, end, order, 5)
    shape = struct.unpack_from(f"{order}{len(dimensions) // 4}i", dimensions)
    label, place = _read_part(head, place, end, order, 1)
    name = label.decode("latin-1")
    if not 2 <= len(shape) <= MAX_DIMENSIONS or min(shape) < 0:
        raise _corrupt_error("has impossible dimensions")
    if word >> 8 & COMPLEX and kind in NUMBERS:
        kind = "complex matrix"
    if kind in NUMBERS and math.prod(shape):
        _check_values(_read_tag(head, place, order), name, shape, end)
    return MatlabVariable(name, kind, shape, packed=False, body=memoryview(b""))


def _check_values(values: PartTag, name: str, shape: Sequence[int], end: int) -> None:
    """Raises UserError for values that do not fill the dimensions, or lie beyond byte `end`."""
    width = SIZES.get(values.kind)
    if width is None or values.end > end or values.size != math.prod(shape) * width:
        problem = f"the dimensions {' x '.join(map(str, shape))} of {safe_text(name)}"
        wanted = f"do not fit its {values.size} bytes"
        raise input_error(Reason.HEADER_IMPLAUSIBLE, problem, wanted, "Download it again")


class PartTag(NamedTuple):
    """The tag of a part of a matrix."""

    kind: int
    size: int  # bytes
    start: int  # first byte of the content
    following: int  # first byte of the next part

    @property
    def end(self) -> int:
        """First byte behind the content."""
        return self.start + self.size


def _read_tag(head: bytes, place: int, order: str) -> PartTag:
    if place + 8 > len(head):
        raise _corrupt_error("ends inside a tag")
    kind, size = struct.unpack_from(f"{order}II", head, place)
    if kind >> 16:  # up to four bytes, in the tag
        return PartTag(kind & 0xFFFF, kind >> 16, place + 4, place + 8)
    return PartTag(kind, size, place + 8, place + 8 + -(-size // 8) * 8)


def _read_part(head: bytes, place: int, end: int, order: str, kind: int) -> tuple[bytes, int]:
    """Content of the part at `place`, and where the next one begins.

    The part must be of type `kind` and lie within the matrix, which ends at byte `end`.
    """
    tag = _read_tag(head, place, order)
    if tag.kind != kind or tag.end > min(end, len(head)):
        raise _corrupt_error("has a damaged head")
    return head[tag.start : tag.end], tag.following


def _decode(variable: MatlabVariable, data: bytes) -> np.ndarray:
    """The values of a checked matrix."""
    import scipy.io

    element = _read_element(variable, data)
    # without the place of objects
    plain = io.BytesIO(data[:116] + bytes(8) + data[124:HEADER] + element)
    try:
        value = scipy.io.loadmat(plain, variable_names=[variable.name])[variable.name]
    except Exception as error:  # scipy's readers fail in many ways
        raise_system_error(error, stored=False)
        raise _corrupt_error("does not decode") from None
    is_numeric = isinstance(value, np.ndarray) and value.dtype.kind in "iuf"
    if not is_numeric or value.shape != variable.shape:
        raise _corrupt_error("is not what its head states")
    return value


def _read_element(variable: MatlabVariable, data: bytes) -> bytes:
    """The element of a matrix, with its tag."""
    return _inflate(variable, data) if variable.packed else bytes(variable.body)


def _inflate(variable: MatlabVariable, data: bytes) -> bytes:
    """The element of a compressed matrix, with its tag."""
    limit = max(MAX_EXPANDED, MAX_RATIO * len(data))
    inflater = zlib.decompressobj()
    try:
        element = inflater.decompress(variable.body, limit + 1)
    except zlib.error:
        raise _corrupt_error("does not decompress") from None
    if len(element) > limit:
        problem = f"unpacks to more than {limit} bytes"
        wanted = "no recording is compressed that well"
        raise input_error(Reason.EXPANSION_LIMIT, problem, wanted)
    size = int.from_bytes(element[4:8], "little" if _find_order(data) == "<" else "big")
    if not inflater.eof or len(element) < 8 or size != len(element) - 8:
        raise input_error(Reason.TRUNCATED, f"{variable.name} ends early")
    return element
