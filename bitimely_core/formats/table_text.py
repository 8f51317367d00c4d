"""Opens the text of a table and gives it in blocks of whole lines.

Files may be packed with gzip, or alone in a zip archive. A byte order mark, CRLF, CR and a last
line without an end are allowed. The encoding is that of `formats.text`; all text that leaves this
module is UTF-8 with line feeds.
"""

from __future__ import annotations

import gzip
import io
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np

from bitimely_core.errors import Reason, input_error
from bitimely_core.formats.archives import can_unpack, packing_error
from bitimely_core.formats.source import translate_read_errors
from bitimely_core.formats.text import UTF8, DecodedStream, detect_encoding, require_utf8
from bitimely_core.system_errors import raise_system_error

# a first line such as sep=; by which spreadsheets know the delimiter
STATED_MARK = re.compile(r'"?sep=(.)"?[;,\t ]*', re.IGNORECASE)
# the rule of dashes that tools of databases draw below the names of columns
RULE = re.compile(rb"(?=.*--)[-+ ,;|\t]+\r?\n?")
MAX_LINE = 1 << 24  # bytes
# bytes that a packed table may always hold; beyond it at most MAX_RATIO times its size
MAX_EXPANDED = 1 << 30
MAX_RATIO = 200
BLOCK = 1 << 24  # bytes
LEAST_READ = 1 << 16  # bytes
LINE_FEED = ord("\n")
MINUS_SIGN = "\u2212".encode()
MINUS = re.compile(MINUS_SIGN + rb"(?=[\d.,])")
HEAD = 1 << 12  # bytes by which encoding and line ends are known


class TextStream(NamedTuple):
    """A text as UTF-8, without a byte order mark."""

    file: BinaryIO | io.BufferedReader
    limit: float  # bytes that it may hold
    start: int  # bytes before the first of `file`: a mark
    verified: bool  # it is known to be UTF-8, because it was decoded


@contextmanager
def open_text(path: Path) -> Iterator[TextStream]:
    """The text of a table, unpacked where it begins like gzip or like a zip archive of one table.

    Raises UserError: also from the block: truncated or corrupt (gzip, zip), unsupported_format
    (zip), encoding, io_error.
    """
    with translate_read_errors(path):
        most = max(MAX_EXPANDED, MAX_RATIO * path.stat().st_size)
        try:
            with path.open("rb") as packed:
                head = packed.peek(4)[:4]
                if head[:2] == b"\x1f\x8b":
                    with gzip.GzipFile(fileobj=packed) as file:
                        yield _decode_stream(io.BufferedReader(file), most)
                elif head in {b"PK\x03\x04", b"PK\x05\x06"}:  # the second: an empty archive
                    with open_member(packed) as (_, inner):
                        raw: Any = inner  # it has readinto
                        yield _decode_stream(io.BufferedReader(raw), most)
                else:
                    yield _decode_stream(packed, math.inf)
        except EOFError:
            raise input_error(Reason.TRUNCATED, "the packed text ends early") from None
        except (gzip.BadGzipFile, zipfile.BadZipFile, zlib.error) as error:
            raise_system_error(error, path, stored=False)
            raise input_error(Reason.CORRUPT, "the packed text is damaged") from None


def _decode_stream(file: io.BufferedReader, limit: float) -> TextStream:
    """A stream of text as UTF-8 with line feeds at the ends of lines."""
    head = file.peek(HEAD)[:HEAD]
    encoding, mark = detect_encoding(head)
    file.read(mark)
    mac = b"\r" in head and b"\n" not in head
    if encoding == UTF8 and not mac:
        return TextStream(file, limit, mark, verified=False)
    return TextStream(
        io.BufferedReader(DecodedStream(file, encoding, mark, mac=mac)), limit, 0, verified=True
    )


@contextmanager
def open_member(packed: BinaryIO) -> Iterator[tuple[str, IO[bytes]]]:
    """Name and content of the one table that a zip archive holds.

    Raises UserError: unsupported_format where there is not exactly one, or it is encrypted or
    packed in an unknown way; corrupt.
    """
    with ExitStack() as stack:
        try:
            archive = stack.enter_context(zipfile.ZipFile(packed))
            members = [
                info
                for info in archive.infolist()
                if not info.is_dir() and not info.filename.startswith("__MACOSX/")
            ]
            if len(members) != 1:
                problem = f"is an archive of {len(members)} files"
                raise input_error(Reason.UNSUPPORTED_FORMAT, problem, "expected a table")
            if not can_unpack(members[0]):
                raise packing_error("expected a table")
            content = stack.enter_context(archive.open(members[0]))
        except RuntimeError as error:  # of zipfile, for what it cannot unpack
            raise_system_error(error, stored=False)
            raise packing_error("expected a table") from None
        except (zipfile.BadZipFile, EOFError, LookupError, ValueError, struct.error) as error:
            # LookupError, ValueError: names
            raise_system_error(error, stored=False)
            raise input_error(Reason.CORRUPT, "the packed text is damaged") from None
        yield members[0].filename, content


def read_first_line(path: Path) -> tuple[int, str, int]:
    """Number and text of the first line that is neither blank nor states the delimiter alone, and
    the number of lines before the rows below it.

    Raises UserError: empty_file, expansion_limit, resource_limit, and as `open_text`.
    """
    row = 0
    with open_text(path) as (file, limit, size, verified):
        while line := file.readline(MAX_LINE):
            row += 1
            if not verified:
                require_utf8(line, size, row)
            size += len(line)
            _check_size(size, limit, len(line), row)
            text = line.decode().removesuffix("\n").removesuffix("\r")
            if text.strip() and not STATED_MARK.fullmatch(text):
                return row, text, row + bool(RULE.fullmatch(file.readline(MAX_LINE)))
    problem = "holds nothing but blank lines" if row else "has 0 bytes"
    raise input_error(Reason.EMPTY_FILE, problem)


class TableSpan(NamedTuple):
    """A part of a table with complete records, which can be read alone.

    Bytes of a plain text, or row groups of a Parquet file.
    """

    start: int
    stop: int
    row: int  # lines (of Parquet: rows) before it; 0: the header is in it


def read_blocks(path: Path, span: TableSpan | None = None) -> Iterator[tuple[bytes, bool]]:
    """Blocks of complete lines, and whether a block is the last.

    Each is ended by a line feed; the last one may have none. `span`: to read only that.

    Raises UserError: expansion_limit, resource_limit, and as `open_text`.
    """
    with open_text(path) as (file, limit, start, verified):
        rest = b""
        size, lines, most = 0, 0, math.inf
        if span is not None:
            start, lines, most = span.start, span.row, span.stop - span.start
            file.seek(start)
        # a read takes memory for all that it asks for
        step = min(BLOCK, max(path.stat().st_size, LEAST_READ))
        while chunk := file.read(int(min(step, most - size))):
            size += len(chunk)
            rest += chunk
            _check_size(size, limit, 0, lines)
            # the last line stays: the reader must know which block is the last
            if end := rest.rfind(b"\n", 0, -1) + 1:
                place = start + size - len(rest)
                block, rest, chunk = rest[:end], rest[end:], b""  # one copy while others use it
                if not verified:
                    require_utf8(block, place, lines + 1)
                # three times as fast as bytes.count
                lines += int(np.count_nonzero(np.frombuffer(block, np.uint8) == LINE_FEED))
                yield normalize_line_ends(block), False
            _check_size(size, limit, len(rest), lines + 1)
        if not verified:
            require_utf8(rest, start + size - len(rest), lines + 1)
        yield normalize_line_ends(rest).removesuffix(b"\r"), True


def normalize_minus(text: bytes) -> bytes:
    """A text with the hyphen before numbers, where a program wrote the sign of typesetters."""
    return MINUS.sub(b"-", text) if MINUS_SIGN in text else text


def normalize_line_ends(text: bytes) -> bytes:
    """A text with line feeds alone."""
    return text.replace(b"\r\n", b"\n") if b"\r" in text else text


def _check_size(size: float, limit: float, line: int, row: int) -> None:
    """Raises UserError: expansion_limit, resource_limit (`line` bytes in line `row`)."""
    if size > limit:
        problem = f"holds more than {limit:.0f} bytes when unpacked"
        raise input_error(Reason.EXPANSION_LIMIT, problem, "no table is compressed that well")
    if line >= MAX_LINE:
        problem = f"line {row} has more than {MAX_LINE} bytes"
        raise input_error(Reason.RESOURCE_LIMIT, problem, "no row is that long")
