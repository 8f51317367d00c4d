"""Reads pickles of numpy arrays without running their code.

A pickle is a program: the ordinary reader calls whatever it names. This one knows five names, of
the seven globals by which old and new numpy write arrays, and gives each a stand-in that only
records its arguments; arrays are made from the recorded bytes afterwards. An opcode that could
reach anything else is refused, so even a file that is crafted against this reader runs no code.
"""

from __future__ import annotations

import pickle  # the opcodes and the interpreter; its load functions are never called
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np

from bitimely_core.errors import Reason, UserError, input_error, safe_text
from bitimely_core.formats.source import translate_read_errors
from bitimely_core.system_errors import raise_system_error

TYPES = re.compile(r"([<>|=]?)([biuf])([1248])")
SCALARS = (type(None), bool, int, float, str, bytes)


class _DtypeStandIn:
    """Stand-in of numpy.dtype: plain numbers alone."""

    def __init__(self, code: str) -> None:
        match = TYPES.fullmatch(code)
        if match is None:
            raise _UnsafePickle(f"an array of type {safe_text(code)}")
        self.order, self.kind = match[1] or "|", match[2] + match[3]

    def build(self, state: Any) -> None:
        """Sets the byte order; the other fields of the state are those of structured types."""
        if (
            not isinstance(state, tuple)
            or len(state) < 5
            or state[1] not in {"<", ">", "|", "="}
            or any(state[2:5])
        ):
            raise _UnsafePickle("a structured array")
        self.order = state[1]

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(("<" if self.order in "|=" else self.order) + self.kind)


class _ArrayStandIn:
    """Stand-in of numpy.ndarray."""

    def __init__(self) -> None:
        self.value: np.ndarray | None = None

    def build(self, state: Any) -> None:
        """Makes the array of `(version, shape, type, is_fortran, bytes)`."""
        if not isinstance(state, tuple) or len(state) != 5:
            raise ValueError("the state of an array has 5 parts")
        _, shape, kind, fortran, raw = state
        if isinstance(raw, str):  # written by Python 2
            raw = raw.encode("latin-1")
        if not isinstance(kind, _DtypeStandIn) or not isinstance(raw, bytes):
            raise _UnsafePickle("an array of objects")
        if not isinstance(shape, tuple) or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError("a shape is a tuple of whole numbers")
        self.value = np.frombuffer(raw, kind.dtype).reshape(shape, order="F" if fortran else "C")


class _UnsafePickle(Exception):  # noqa: N818
    """Content that a pickle of arrays does not have."""


class _AllowedName:
    """A global of the allow-list, as a value on the reader's stack."""

    def __init__(self, name: str) -> None:
        self.name = name


NAMES = {
    ("numpy", "ndarray"): _AllowedName("ndarray"),
    ("numpy", "dtype"): _AllowedName("dtype"),
    ("_codecs", "encode"): _AllowedName("encode"),
    **{
        (f"numpy.{core}.multiarray", name): _AllowedName(name)
        for core in ("core", "_core")
        for name in ("_reconstruct", "scalar")
    },
}


def _apply_call(function: Any, arguments: Any) -> Any:
    """Result of a call of an allow-listed name. Raises _UnsafePickle: for any other call."""
    match function, arguments:
        case _AllowedName(name="_reconstruct"), (_AllowedName(name="ndarray"), *_):
            return _ArrayStandIn()
        case _AllowedName(name="dtype"), (str(code), *_):
            return _DtypeStandIn(code)
        case _AllowedName(name="encode"), (str(text), "latin1" | "latin-1"):
            return text.encode("latin-1")
        case _AllowedName(name="scalar"), (_DtypeStandIn() as kind, bytes() | str() as raw):
            data = raw.encode("latin-1") if isinstance(raw, str) else raw
            return np.frombuffer(data, kind.dtype, count=1)[0].item()
    raise _UnsafePickle("a call that makes no array")


def _insert_items(target: Any, items: list[Any]) -> None:
    """Inserts `[key, value, ...]` into a dictionary. Keys are texts and numbers: hashing nested
    tuples can take exponential time.
    """
    if not isinstance(target, dict) or not all(isinstance(key, SCALARS) for key in items[::2]):
        raise _UnsafePickle("a dictionary with other keys than texts and numbers")
    target.update(zip(items[::2], items[1::2], strict=True))


# the Python version: the memo of the C version can be made to grow without bound
class _ArrayUnpickler(pickle._Unpickler):
    """An unpickler that knows the names above and the opcodes below."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """A name of the allow-list. Raises _Unsafe for every other."""
        if (module, name) not in NAMES:
            raise _UnsafePickle(f"names {safe_text(f'{module}.{name}')}")
        return NAMES[module, name]

    def load_reduce(self) -> None:
        """A call."""
        arguments = self.stack.pop()
        self.stack[-1] = _apply_call(self.stack[-1], arguments)

    def load_build(self) -> None:
        """The state of an array or of its type."""
        state = self.stack.pop()
        target = self.stack[-1]
        if not isinstance(target, _ArrayStandIn | _DtypeStandIn):
            raise _UnsafePickle("sets what is no array")
        target.build(state)

    def load_setitem(self) -> None:
        """One entry of a dictionary."""
        value, key = self.stack.pop(), self.stack.pop()
        _insert_items(self.stack[-1], [key, value])

    def load_setitems(self) -> None:
        """Entries of a dictionary."""
        items = self.pop_mark()  # type: ignore[attr-defined]
        _insert_items(self.stack[-1], items)

    def load_dict(self) -> None:
        """A dictionary with its entries."""
        items = self.pop_mark()  # type: ignore[attr-defined]
        self.stack.append({})
        _insert_items(self.stack[-1], items)

    def refuse(self) -> None:
        """An opcode that no pickle of arrays needs."""
        raise _UnsafePickle("an opcode that arrays do not need")


for _code in (
    pickle.PERSID,
    pickle.BINPERSID,
    pickle.INST,
    pickle.OBJ,
    pickle.NEWOBJ,
    pickle.NEWOBJ_EX,
    pickle.EXT1,
    pickle.EXT2,
    pickle.EXT4,
    pickle.NEXT_BUFFER,
    pickle.READONLY_BUFFER,
    pickle.BYTEARRAY8,
    pickle.EMPTY_SET,
    pickle.ADDITEMS,
    pickle.FROZENSET,
):
    _ArrayUnpickler.dispatch[_code[0]] = _ArrayUnpickler.refuse
_ArrayUnpickler.dispatch |= {
    pickle.REDUCE[0]: _ArrayUnpickler.load_reduce,
    pickle.BUILD[0]: _ArrayUnpickler.load_build,
    pickle.SETITEM[0]: _ArrayUnpickler.load_setitem,
    pickle.SETITEMS[0]: _ArrayUnpickler.load_setitems,
    pickle.DICT[0]: _ArrayUnpickler.load_dict,
}


class _BoundedFile:
    """A file from which no more is read than it has: lengths in a pickle are not trusted."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size = file, size

    def read(self, count: int = -1) -> bytes:
        """The next `count` bytes. Raises EOFError where there are fewer."""
        if count < 0 or count > self.size - self.file.tell():
            raise EOFError
        return self.file.read(count)

    def readline(self) -> bytes:
        """The next line."""
        return self.file.readline(1 << 20)


def load_pickle(path: Path) -> Any:
    """Content of a pickle of containers, numbers, texts and numeric arrays; texts of Python 2 are
    read as Latin-1.

    Args:
        path: a regular file; it is read into memory.

    Returns:
        Dictionaries, lists and tuples of numbers, texts, bytes and numpy arrays (read-only).

    Raises:
        UserError: unsafe_pickle for a name, call or type that is not on the list; truncated,
            corrupt, empty_file, io_error.
    """
    with translate_read_errors(path):
        try:
            return _read_content(path)
        except _UnsafePickle as error:
            wanted = "only arrays of numbers are read, and nothing was run"
            hint = (
                "Do not open this file with other tools; download it again from its official source"
            )
            raise input_error(Reason.UNSAFE_PICKLE, str(error), wanted, hint) from None
        except EOFError:
            raise input_error(Reason.TRUNCATED, "the pickle ends early") from None
        except pickle.UnpicklingError as error:
            is_cut = "truncated" in str(error) or "exhausted" in str(error)
            code = Reason.TRUNCATED if is_cut else Reason.CORRUPT
            raise input_error(code, "the pickle does not decode") from None
        except (UserError, OSError):
            raise
        except Exception as error:
            # damaged bytes can make the interpreter of opcodes raise anything
            raise_system_error(error, path, stored=False)
            problem = f"the pickle does not decode ({type(error).__name__})"
            raise input_error(Reason.CORRUPT, problem) from None


def _read_content(path: Path) -> Any:
    size = path.stat().st_size
    if size == 0:
        raise input_error(Reason.EMPTY_FILE, "has 0 bytes")
    with path.open("rb") as file:
        bounded = _BoundedFile(file, size)
        content = _ArrayUnpickler(bounded, encoding="latin1").load()
    return _replace_stand_ins(content, {})


def _replace_stand_ins(value: Any, seen: dict[int, Any]) -> Any:
    """The value with arrays in the place of their stand-ins.

    Shared objects stay shared, as in the pickle; `seen` holds them by their id.
    """
    if isinstance(value, SCALARS):
        return value
    if isinstance(value, _ArrayStandIn):
        if value.value is None:
            raise ValueError("an array without data")
        return value.value
    if id(value) in seen:
        return seen[id(value)]
    replace = partial(_replace_stand_ins, seen=seen)
    replaced: Any
    match value:
        case dict():
            seen[id(value)] = replaced = {}
            replaced.update(zip(value, map(replace, value.values()), strict=True))
        case list():
            seen[id(value)] = replaced = []
            replaced.extend(map(replace, value))
        case tuple():
            seen[id(value)] = replaced = tuple(map(replace, value))
        case _:
            raise _UnsafePickle("something that is no array")
    return replaced
