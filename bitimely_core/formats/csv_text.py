"""The grammar of csv text: lines, records and cells.

An independent count of the records checks the parser. Cells are separated by a delimiter. A cell that begins with '"' ends with '"', holds '""' for a
quote, and may hold line breaks; no other cell holds a quote. A byte order mark, CRLF, CR, blank
lines and a last line without an end are allowed. A line that opens a quote which nothing closes
properly is one faulty record, and parsing goes on with the next line. Files may be packed with gzip
or zip; their encoding is that of `formats.text`, and every text that leaves this module is UTF-8.
"""

from __future__ import annotations

import gzip
import io
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np

from bitimely_core.errors import Reason, UserError, input_error
from bitimely_core.formats.archives import can_unpack, packing_error
from bitimely_core.formats.source import translate_read_errors
from bitimely_core.formats.text import (
    UTF8,
    DecodedStream,
    detect_encoding,
    require_plain_names,
    require_utf8,
)
from bitimely_core.system_errors import raise_system_error

MAX_LINE = 1 << 24  # bytes
MAX_LINES = 256  # that one row with quoted line breaks may run over
MAX_TEXT = 1 << 17  # characters of such a row
# bytes that a compressed table may always hold; beyond it at most MAX_RATIO times its size
MAX_EXPANDED = 1 << 30
MAX_RATIO = 200
BLOCK = 1 << 24  # bytes of text that become one frame
PIECE = 1 << 16  # bytes that go to the careful parser together where a block is not plain
LINE_FEED, QUOTE = ord("\n"), ord('"')
HEAD = 1 << 12  # bytes by which encoding and line ends are known
# results of `split_cells` for a line that ends inside a quoted cell, and for a misplaced quote
OPEN, BROKEN = "open", "broken"

Line = tuple[int, bytes, bool]
"""1-based number, UTF-8 without line end, whether it has one."""

ParsedRecord = tuple[int, list[str] | UserError, bool]
"""Number of its first line, cells or fault, whether its last line has an end."""


class CsvShape(NamedTuple):
    """What the records of a csv text have in common."""

    width: int  # cells
    delimiter: str
    quotes: bool = True  # False: a quote is an ordinary character


class RecordCounter:
    """Counts records by the parity of quotes and a regular expression, without parsing them.

    Blank lines are no records. Lines may come in several calls of `feed`; a record may go on in
    the next one.
    """

    def __init__(self, shape: CsvShape) -> None:
        mark = re.escape(shape.delimiter)
        cell = rf'(?:"[^"\0]*+(?:""[^"\0]*+)*+"|[^"{mark}\n\0]*+)'
        self.record = re.compile(rf"{cell}(?:{mark}{cell}){{{shape.width - 1}}}")
        self.quotes = shape.quotes
        self.waiting: list[str] = []

    def feed(self, lines: Iterable[Line]) -> int:
        """The number of records that these lines complete."""
        if not self.quotes:
            return sum(bool(raw.strip()) for _, raw, _ in lines)
        count = 0
        for _, raw, _ in lines:
            self.waiting.append(raw.decode())
            while self.waiting and (length := self._measure_record()):
                count += self._drop_lines(length)
        return count

    def finish(self) -> int:
        """The number of records in the lines that are left."""
        count = 0
        while self.waiting:
            count += self._drop_lines(self._measure_record() or 1)
        return count

    def _drop_lines(self, length: int) -> bool:
        is_record = bool(self.waiting[0].strip())
        del self.waiting[:length]
        return is_record

    def _measure_record(self) -> int:
        """Lines of the first record among those that wait; 0: more lines are needed."""
        if self.waiting[0].count('"') % 2 == 0:
            return 1
        most, is_full = _limit_record(self.waiting)
        quotes = 0
        for i, line in enumerate(self.waiting[:most], 1):
            quotes += line.count('"')
            if quotes % 2 == 0:
                return i if self.record.fullmatch("\n".join(self.waiting[:i])) else 1
        return 1 if is_full else 0


def _limit_record(lines: Sequence[str]) -> tuple[int, bool]:
    """How many of these lines may belong to one record, and whether no further one may."""
    most, length = 1, len(lines[0])
    while most < min(len(lines), MAX_LINES) and length + len(lines[most]) <= MAX_TEXT:
        length += len(lines[most])
        most += 1
    return most, most < len(lines) or most == MAX_LINES


def parse_header(lines: Iterator[Line], delimiter: str) -> tuple[str, ...]:
    """Column names: the first line that is not blank."""
    for row, raw, _ in lines:
        text = raw.decode()
        if not text.strip():
            continue
        cells = split_cells(text, delimiter)
        if not isinstance(cells, list):
            raise input_error(
                Reason.CSV_SYNTAX,
                f"line {row}, the header, is not well formed",
                "expected column names",
            )
        names = tuple(cell.strip() for cell in cells)
        require_plain_names(names)
        return names
    raise input_error(Reason.EMPTY_FILE, "holds nothing but blank lines")


class RecordParser:
    """Parses the lines of a text into records; blank lines are none.

    Lines may come in several calls of `feed`; a record may go on in the next one.
    """

    def __init__(self, shape: CsvShape) -> None:
        self.shape = shape
        # of several lines the first opens a quote
        self.waiting: list[tuple[int, str, bool]] = []

    def feed(self, lines: Iterable[Line]) -> Iterator[ParsedRecord]:
        """The records that these lines complete."""
        if not self.shape.quotes:
            yield from _split_unquoted(lines, self.shape)
            return
        for row, raw, ended in lines:
            self.waiting.append((row, raw.decode(), ended))
            may_close = len(self.waiting) == 1 or b'"' in raw
            if may_close or _limit_record([text for _, text, _ in self.waiting])[1]:
                yield from self._take_records(last=False)

    def finish(self) -> Iterator[ParsedRecord]:
        """The records in the lines that are left."""
        return self._take_records(last=True)

    def _take_records(self, *, last: bool) -> Iterator[ParsedRecord]:
        while self.waiting:
            length, record = self._parse_first(last=last)
            if not length:
                return
            del self.waiting[:length]
            if record:
                yield record

    def _parse_first(self, *, last: bool) -> tuple[int, ParsedRecord | None]:
        """Number of lines of the first record (0: more are needed), and that; None: a blank line.

        A record with a fault is one line: reading goes on with the next.
        """
        row, text, ended = self.waiting[0]
        if not text.strip():
            return 1, None
        cells, length, is_full = self._split_first()
        if cells is OPEN and not is_full and not last:
            return 0, None
        if isinstance(cells, list) and len(cells) == self.shape.width:
            return length, (row, cells, self.waiting[length - 1][2])
        if isinstance(cells, list) and length == 1:
            return 1, (row, _width_error(cells, self.shape), ended)
        # a list: what closed the quote was another cell's
        misplaced = "a quote in the wrong place, or a NUL character"
        problem = misplaced if cells is BROKEN else "a quote is opened and not closed"
        action = "the line is dropped, reading goes on with the next"
        return 1, (row, input_error(Reason.CSV_SYNTAX, problem, action), ended)

    def _split_first(self) -> tuple[list[str] | str, int, bool]:
        """Cells of the first record, its number of lines, and whether no further line may belong
        to it.
        """
        texts = [text for _, text, _ in self.waiting]
        cells = split_cells(texts[0], self.shape.delimiter)
        if cells is not OPEN:
            return cells, 1, False
        most, is_full = _limit_record(texts)
        length = 1
        while cells is OPEN and length < most:
            length += 1
            if '"' in texts[length - 1]:  # else it closes nothing
                cells = split_cells("\n".join(texts[:length]), self.shape.delimiter)
        return cells, length, is_full


def parse_records(lines: Iterable[Line], width: int, delimiter: str) -> Iterator[ParsedRecord]:
    """All records of a text."""
    parser = RecordParser(CsvShape(width, delimiter))
    yield from parser.feed(lines)
    yield from parser.finish()


def _width_error(cells: Sequence[str], shape: CsvShape) -> UserError:
    return input_error(Reason.ROW_WIDTH, f"has {len(cells)} cells", f"the header has {shape.width}")


def _split_unquoted(lines: Iterable[Line], shape: CsvShape) -> Iterator[ParsedRecord]:
    """Records of a text in which a quote is an ordinary character: one a line."""
    for row, raw, ended in lines:
        cells = raw.decode().split(shape.delimiter)
        if b"\0" in raw:
            fault = input_error(Reason.CSV_SYNTAX, "holds a NUL character", "the line is dropped")
            yield row, fault, ended
        elif len(cells) == shape.width:
            yield row, cells, ended
        elif raw.strip():
            yield row, _width_error(cells, shape), ended


def split_cells(text: str, delimiter: str) -> list[str] | str:
    """Cells of one record, or OPEN or BROKEN."""
    if "\0" in text:
        return BROKEN
    if '"' not in text:
        return text.split(delimiter)
    cells: list[str] = []
    place = 0
    while True:
        if text.startswith('"', place):
            end = _find_closing_quote(text, place + 1)
            if end < 0:
                return OPEN
            cells.append(text[place + 1 : end].replace('""', '"'))
            place = end + 1
            if place < len(text) and not text.startswith(delimiter, place):
                return BROKEN
        else:
            end = text.find(delimiter, place)
            cell = text[place:] if end < 0 else text[place:end]
            if '"' in cell:
                return BROKEN
            cells.append(cell)
            place += len(cell)
        if place >= len(text):
            return cells
        place += len(delimiter)


def _find_closing_quote(text: str, place: int) -> int:
    """The next quote from `place` on that is not doubled; -1: there is none."""
    end = text.find('"', place)
    while end >= 0 and text.startswith('"', end + 1):
        end = text.find('"', end + 2)
    return end


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


def read_lines(path: Path) -> Generator[Line, None, None]:
    """All lines of a table.

    Raises UserError: empty_file, expansion_limit, resource_limit, and as `open_text`.
    """
    row = 0
    with open_text(path) as (file, limit, size, verified):
        while line := file.readline(MAX_LINE):
            row += 1
            if not verified:
                require_utf8(line, size, row)
            size += len(line)
            if len(line) == MAX_LINE:
                raise _line_error(row)
            if size > limit:
                raise expansion_error(limit)
            text = line.removesuffix(b"\n")
            yield row, text.removesuffix(b"\r"), len(text) < len(line)
    if row == 0:
        raise input_error(Reason.EMPTY_FILE, "has 0 bytes")


def split_lines(text: str) -> Iterator[Line]:
    """As `read_lines`, of a text in memory."""
    text = text.replace("\r\n", "\n")
    text = text if "\n" in text else text.replace("\r", "\n")
    return iter(number_lines(text.encode(), 0))


def number_lines(text: bytes, before: int) -> list[Line]:
    """The lines of a text that follows `before` others."""
    lines = text.removesuffix(b"\n").split(b"\n") if text else []
    ended = text.endswith(b"\n")
    return [(before + i, line, ended or i < len(lines)) for i, line in enumerate(lines, 1)]


def _line_error(row: int) -> UserError:
    return input_error(
        Reason.RESOURCE_LIMIT, f"line {row} has more than {MAX_LINE} bytes", "no row is that long"
    )


def expansion_error(most: float) -> UserError:
    """The error of a packed text with more than `most` bytes."""
    return input_error(
        Reason.EXPANSION_LIMIT,
        f"holds more than {most:.0f} bytes when unpacked",
        "no table is compressed that well",
    )


class TableSpan(NamedTuple):
    """A part of a table with complete records, which can be read alone.

    Bytes of a plain text, or row groups of a Parquet file.
    """

    start: int
    stop: int
    row: int  # lines (of Parquet: rows) before it; 0: the header is in it


def split_text(path: Path, shape: CsvShape, size: int) -> list[TableSpan | None]:
    """Spans of about `size` bytes, cut where all text before is plainly one record a line.

    None for a text that is packed or not in UTF-8. What follows a block that is not plain is one
    span. Raises UserError: as `open_text`.
    """
    spans: list[TableSpan | None] = []
    with open_text(path) as (file, _, start, verified):
        if verified or not isinstance(getattr(file, "raw", None), io.FileIO):
            return [None]
        place, row, rest, cut = start, 0, b"", TableSpan(start, start, 0)
        while chunk := file.read(BLOCK):
            rest += chunk
            text = rest[: rest.rfind(b"\n") + 1]
            if not text or _count_plain_records(_normalize_line_ends(text), shape) is None:
                break
            place, row, rest = place + len(text), row + text.count(b"\n"), rest[len(text) :]
            if place - cut.start >= size:
                spans.append(cut._replace(stop=place))
                cut = TableSpan(place, place, row)
    end = path.stat().st_size
    if cut.start < end or not spans:
        spans.append(cut._replace(stop=end))
    return spans


def read_blocks(path: Path, span: TableSpan | None = None) -> Iterator[tuple[bytes, bool]]:
    """Blocks of complete lines in UTF-8, and whether a block is the last.

    Each is ended by a line feed; the last one may have none. `span`: of `split_text`, to read only
    that. Raises UserError: as `read_lines`.
    """
    with open_text(path) as (file, limit, start, verified):
        rest = b""
        size, lines, most = 0, 0, math.inf
        if span is not None:
            start, lines, most = span.start, span.row, span.stop - span.start
            file.seek(start)
        while chunk := file.read(int(min(BLOCK, most - size))):
            size += len(chunk)
            if size > limit:
                raise expansion_error(limit)
            rest += chunk
            # the last line stays: the reader must know which block is the last
            if end := rest.rfind(b"\n", 0, -1) + 1:
                if not verified:
                    require_utf8(rest[:end], start + size - len(rest), lines + 1)
                # three times as fast as bytes.count
                lines += int(np.count_nonzero(np.frombuffer(rest, np.uint8, end) == LINE_FEED))
                yield _normalize_line_ends(rest[:end]), False
                rest = rest[end:]
            if len(rest) > MAX_LINE:
                raise _line_error(lines + 1)
        if not verified:
            require_utf8(rest, start + size - len(rest), lines + 1)
        yield _normalize_line_ends(rest).removesuffix(b"\r"), True


def _normalize_line_ends(text: bytes) -> bytes:
    return text.replace(b"\r\n", b"\n") if b"\r" in text else text


def split_plain_blocks(text: bytes, shape: CsvShape) -> Iterator[tuple[bytes, int | None]]:
    """Pieces of a text, each with its number of lines where each line is plainly a record.

    There is one piece where the text is plain throughout, else many small ones.
    """
    plain = _count_plain_records(text, shape)
    if plain is not None or 0 < len(text) <= PIECE:
        yield text, plain
        return
    start = 0
    while start < len(text):
        end = text.find(b"\n", start + PIECE) + 1 or len(text)
        piece = text[start:end]
        yield piece, _count_plain_records(piece, shape)
        start = end


def _count_plain_records(text: bytes, shape: CsvShape) -> int | None:
    """Number of lines of a text whose delimiters, line ends and quotes show that each line is one
    record; None where they do not.

    Without quotes the marks must repeat `width - 1` delimiters and a line end.
    """
    width, delimiter, quotes = shape
    mark = ord(delimiter)
    special = {mark, LINE_FEED, 0, ord("\r"), QUOTE if quotes else 0}
    marks = text.translate(None, bytes(set(range(256)) - special))
    record = delimiter.encode() * (width - 1) + b"\n"
    if width == 1 or not text.endswith(b"\n"):
        return None
    if marks == record * (len(marks) // width):
        return len(marks) // width
    if not quotes or b'"' not in marks or b"\0" in marks or b"\r" in marks:
        return None
    return _count_quoted_records(text, marks, mark, record)


def _count_quoted_records(text: bytes, marks: bytes, mark: int, record: bytes) -> int | None:
    """As `_count_plain_records`, of a text with quotes.

    Each pair of quotes must fill a cell of one line: a quote in a cell or a line break in quotes is
    left to the careful parser. The marks outside of quotes must repeat `record`.
    """
    height = text.count(b"\n")
    expected = record * height
    data = np.frombuffer(text, np.uint8)
    is_quote = data == QUOTE
    places = np.flatnonzero(is_quote)
    is_edge = np.zeros(256, bool)
    is_edge[[mark, LINE_FEED]] = True
    if len(places) % 2:
        return None
    before, after = data[places[::2] - 1], data[places[1::2] + 1]  # [-1], a line end, is before [0]
    if not (is_edge[before].all() and is_edge[after].all()):
        return None
    if marks.replace(b'""', b"") == expected:  # no delimiter or line end is inside quotes
        return height
    outside = data[is_edge[data] & ~np.logical_xor.accumulate(is_quote)]
    return height if outside.tobytes() == expected else None
