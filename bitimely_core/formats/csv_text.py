"""Grammar of csv text: lines, records and cells, with the record count that checks the parser.
`tables` builds rows and frames on it.

Cells are separated by a delimiter. A cell that begins with '"' ends with '"', holds '""' for a
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
from typing import IO, BinaryIO, NamedTuple

import numpy as np

from bitimely_core.errors import Reason, UserError, input_error
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
LINE_FEED = 10
HEAD = 1 << 12  # bytes by which encoding and line ends are known
OPEN, BROKEN = (
    "open",
    "broken",
)  # results of `split_cells` for a line that ends inside a quoted cell, and for one with a quote in another place


def record_pattern(width: int, delimiter: str) -> re.Pattern[str]:
    """Pattern of a complete record of `width` cells."""
    mark = re.escape(delimiter)
    cell = rf'(?:"[^"\0]*+(?:""[^"\0]*+)*+"|[^"{mark}\n\0]*+)'
    return re.compile(rf"{cell}(?:{mark}{cell}){{{width - 1}}}")


def count_records(
    lines: Iterable[str], pattern: re.Pattern[str], waiting: list[str], *, last: bool = True
) -> Iterator[int]:
    """1 for each record, 0 for each blank line; `waiting` holds lines whose record may go on in
    later ones, unless these are the `last`.
    """
    for line in lines:
        waiting.append(line)
        while waiting and (length := record_length(waiting, pattern)):
            yield int(bool(waiting[0].strip()))
            del waiting[:length]
    while last and waiting:
        yield int(bool(waiting[0].strip()))
        del waiting[: record_length(waiting, pattern) or 1]


def record_length(waiting: Sequence[str], pattern: re.Pattern[str]) -> int:
    """Lines of the first record among the lines read so far; 0: more lines are needed."""
    if waiting[0].count('"') % 2 == 0:
        return 1
    many, full = max_record_span(waiting)
    quotes = 0
    for i, line in enumerate(waiting[:many], 1):
        quotes += line.count('"')
        if quotes % 2 == 0:
            return i if pattern.fullmatch("\n".join(waiting[:i])) else 1
    return 1 if full else 0


def max_record_span(waiting: Sequence[str]) -> tuple[int, bool]:
    """How many of the lines read so far may belong to one record, and whether no further one
    may.
    """
    many = 1
    length = len(waiting[0])
    while many < min(len(waiting), MAX_LINES) and length + len(waiting[many]) <= MAX_TEXT:
        length += len(waiting[many])
        many += 1
    return many, many < len(waiting) or many == MAX_LINES


def parse_header(lines: Iterator[tuple[int, bytes, bool]], delimiter: str) -> tuple[str, ...]:
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


# line, cells or fault, whether the line has an end
ParsedRecord = tuple[int, list[str] | UserError, bool]


def parse_records(
    lines: Iterable[tuple[int, bytes, bool]],
    width: int,
    delimiter: str,
    waiting: list[tuple[int, str, bool]] | None = None,
    *,
    last: bool = True,
) -> Iterator[ParsedRecord]:
    """All records; blank lines are none. `waiting` keeps lines whose record may go on in later
    ones, unless these are the `last`.
    """
    waiting = [] if waiting is None else waiting  # where there are several, the first opens a quote
    for row, raw, ended in lines:
        waiting.append((row, raw.decode(), ended))
        if (
            len(waiting) > 1
            and b'"' not in raw
            and not max_record_span([text for _, text, _ in waiting])[1]
        ):
            continue  # this line cannot close it
        while waiting:
            used, record = _parse_record(waiting, width, delimiter, last=False)
            if not used:
                break
            if record:
                yield record
            del waiting[:used]
    while last and waiting:
        used, record = _parse_record(waiting, width, delimiter, last=True)
        if record:
            yield record
        del waiting[:used]


def _parse_record(
    waiting: Sequence[tuple[int, str, bool]], width: int, delimiter: str, *, last: bool
) -> tuple[int, ParsedRecord | None]:
    """Lines used (0: more are needed) and the record at the head of the lines read so far (none for
    a blank line).
    """
    row, text, ended = waiting[0]
    if not text.strip():
        return 1, None
    cells = split_cells(text, delimiter)
    used = 1
    if cells is OPEN:
        many, full = max_record_span([text for _, text, _ in waiting])
        while cells is OPEN and used < many:
            text += "\n" + waiting[used][1]
            used += 1
            cells = split_cells(text, delimiter) if '"' in waiting[used - 1][1] else OPEN
        if cells is OPEN and not full and not last:
            return 0, None
    # the latter: what closed the quote was another cell's
    if not isinstance(cells, list) or (used > 1 and len(cells) != width):
        what = (
            "a quote in the wrong place, or a NUL character"
            if cells is BROKEN
            else "a quote is opened and not closed"
        )
        return 1, (
            row,
            input_error(
                Reason.CSV_SYNTAX, what, "the line is dropped, reading goes on with the next"
            ),
            ended,
        )
    if len(cells) != width:
        return 1, (
            row,
            input_error(Reason.ROW_WIDTH, f"has {len(cells)} cells", f"the header has {width}"),
            ended,
        )
    return used, (row, cells, waiting[used - 1][2])


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
            start, place = place + 1, place + 1
            while True:
                end = text.find('"', place)
                if end < 0:
                    return OPEN
                if not text.startswith('"', end + 1):
                    break
                place = end + 2
            cells.append(text[start:end].replace('""', '"'))
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


class TextStream(NamedTuple):
    """A text as UTF-8, without a byte order mark."""

    file: BinaryIO | io.BufferedReader
    limit: float  # bytes that it may hold
    start: int  # bytes before the first of `file`: a mark
    # it was decoded: else its bytes are those of the source, to be compared with UTF-8
    verified: bool


@contextmanager
def open_text(path: Path) -> Iterator[TextStream]:
    """The text of a table, unpacked where it begins like gzip or like a zip archive of one table.

    Raises UserError: also from the block: truncated or corrupt (gzip, zip), unsupported_format
    (zip), encoding, io_error.
    """
    try:
        most = max(MAX_EXPANDED, MAX_RATIO * path.stat().st_size)
        with path.open("rb") as packed:
            head = packed.peek(4)[:4]
            if head[:2] == b"\x1f\x8b":
                with gzip.GzipFile(fileobj=packed) as file:
                    yield _decode_stream(io.BufferedReader(file), most)
            elif head in {b"PK\x03\x04", b"PK\x05\x06"}:  # the second: an empty archive
                with open_member(packed) as (_, inner):
                    yield _decode_stream(io.BufferedReader(inner), most)  # type: ignore[arg-type]  # it has readinto
            else:
                yield _decode_stream(packed, math.inf)
    except EOFError:
        raise input_error(Reason.TRUNCATED, "the packed text ends early") from None
    except (gzip.BadGzipFile, zipfile.BadZipFile, zlib.error) as error:
        raise_system_error(error, path, stored=False)
        raise input_error(Reason.CORRUPT, "the packed text is damaged") from None
    except OSError as error:
        raise_system_error(error, path, stored=False)
        raise input_error(Reason.IO_ERROR, f"cannot be read ({error.strerror})") from None


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
    unusual = input_error(
        Reason.UNSUPPORTED_FORMAT,
        "is an archive that is encrypted or packed in an unusual way",
        "expected a table",
    )
    with ExitStack() as stack:
        try:
            archive = stack.enter_context(zipfile.ZipFile(packed))
            members = [
                info
                for info in archive.infolist()
                if not info.is_dir() and not info.filename.startswith("__MACOSX/")
            ]
            if len(members) != 1:
                raise input_error(
                    Reason.UNSUPPORTED_FORMAT,
                    f"is an archive of {len(members)} files",
                    "expected a table",
                )
            if members[0].flag_bits & 1 or members[0].compress_type not in {
                zipfile.ZIP_STORED,
                zipfile.ZIP_DEFLATED,
            }:
                raise unusual
            content = stack.enter_context(archive.open(members[0]))
        except RuntimeError as error:  # of zipfile, for what it cannot unpack
            raise_system_error(error, stored=False)
            raise unusual from None
        except (zipfile.BadZipFile, EOFError, LookupError, ValueError, struct.error) as error:
            # LookupError, ValueError: names
            raise_system_error(error, stored=False)
            raise input_error(Reason.CORRUPT, "the packed text is damaged") from None
        yield members[0].filename, content


def read_lines(path: Path) -> Generator[tuple[int, bytes, bool], None, None]:
    """(1-based number, UTF-8 without line end, whether it has one) of all lines.

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
                raise _expansion_error(limit)
            text = line.removesuffix(b"\n")
            yield row, text.removesuffix(b"\r"), len(text) < len(line)
    if row == 0:
        raise input_error(Reason.EMPTY_FILE, "has 0 bytes")


def split_lines(text: str) -> Iterator[tuple[int, bytes, bool]]:
    """As `read_lines`, of a text in memory."""
    lines = (
        text.replace("\r\n", "\n")
        .replace("\r", "\r" if "\n" in text else "\n")
        .encode()
        .split(b"\n")
    )
    for row, line in enumerate(lines, 1):
        if line or row < len(lines):
            yield row, line, row < len(lines)


def _line_error(row: int) -> UserError:
    return input_error(
        Reason.RESOURCE_LIMIT, f"line {row} has more than {MAX_LINE} bytes", "no row is that long"
    )


def _expansion_error(most: float) -> UserError:
    return input_error(
        Reason.EXPANSION_LIMIT,
        f"holds more than {most:.0f} bytes when unpacked",
        "no table is compressed that well",
    )


def split_unquoted(
    lines: Iterable[tuple[int, bytes, bool]], width: int, delimiter: str
) -> Iterator[ParsedRecord]:
    """Records of a text in which a quote is an ordinary character: one a line."""
    for row, raw, ended in lines:
        cells = raw.decode().split(delimiter)
        if b"\0" in raw:
            yield (
                row,
                input_error(Reason.CSV_SYNTAX, "holds a NUL character", "the line is dropped"),
                ended,
            )
        elif len(cells) == width:
            yield row, cells, ended
        elif raw.strip():
            yield (
                row,
                input_error(Reason.ROW_WIDTH, f"has {len(cells)} cells", f"the header has {width}"),
                ended,
            )


class TableSpan(NamedTuple):
    """A part of a table with complete records, read alone: bytes of a plain text, or row groups of
    a Parquet file.
    """

    start: int
    stop: int
    row: int  # lines (of Parquet: rows) before it; 0: the header is in it


def split_text(path: Path, width: int, delimiter: str, size: int) -> list[TableSpan | None]:
    """Spans of about `size` bytes, cut where all text before is plainly one record a line; None for
    a text that is packed or not in UTF-8.

    What follows a block that is not plain is one span. Raises UserError: as `open_text`.
    """
    spans: list[TableSpan | None] = []
    with open_text(path) as (file, _, start, verified):
        if verified or not isinstance(getattr(file, "raw", None), io.FileIO):
            return [None]
        place, row, rest, cut = start, 0, b"", (start, 0)
        while chunk := file.read(BLOCK):
            rest += chunk
            text = rest[: rest.rfind(b"\n") + 1]
            if (
                not text
                or _count_plain_records(_normalize_line_ends(text), width, delimiter, quotes=True)
                is None
            ):
                break
            place, row, rest = place + len(text), row + text.count(b"\n"), rest[len(text) :]
            if place - cut[0] >= size:
                spans.append(TableSpan(cut[0], place, cut[1]))
                cut = place, row
    if cut[0] < (end := path.stat().st_size) or not spans:
        spans.append(TableSpan(cut[0], end, cut[1]))
    return spans


def read_blocks(path: Path, span: TableSpan | None = None) -> Iterator[tuple[bytes, bool]]:
    """Blocks of complete lines in UTF-8, each ended by a line feed (the last one may have none),
    and whether a block is the last.

    `span`: of `split_text`, to read only that. Raises UserError: as `read_lines`.
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
                raise _expansion_error(limit)
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


def split_plain_blocks(
    text: bytes, width: int, delimiter: str, *, quotes: bool
) -> Iterator[tuple[bytes, int | None]]:
    """(text, number of its lines where each is plainly a record): the full text, or many small ones
    where it is not plain throughout.
    """
    plain = _count_plain_records(text, width, delimiter, quotes=quotes)
    if plain is not None or 0 < len(text) <= PIECE:
        yield text, plain
        return
    start = 0
    while start < len(text):
        end = text.find(b"\n", start + PIECE) + 1 or len(text)
        yield (
            text[start:end],
            _count_plain_records(text[start:end], width, delimiter, quotes=quotes),
        )
        start = end


def _count_plain_records(text: bytes, width: int, delimiter: str, *, quotes: bool) -> int | None:
    """Number of lines of a text whose delimiters, line ends and quotes show that each line is one
    record; None where they do not.

    Without quotes the marks must repeat `width - 1` delimiters and a line end. With quotes each
    pair must fill a cell of one line (a quote in a cell or a line break in quotes is left to the
    careful parser), and the marks outside of quotes must repeat so.
    """
    mark = ord(delimiter)
    kept = {mark, 10, 0, 13, 34} if quotes else {mark, 10, 0, 13}
    marks = text.translate(None, bytes(set(range(256)) - kept))
    record = delimiter.encode() * (width - 1) + b"\n"
    if width == 1 or not text.endswith(b"\n"):
        return None
    if marks == record * (len(marks) // width):
        return len(marks) // width
    if not quotes or b'"' not in marks or b"\0" in marks or b"\r" in marks:
        return None
    height = text.count(b"\n")
    expected = record * height
    data = np.frombuffer(text, np.uint8)
    is_quote = data == 34
    at = np.flatnonzero(is_quote)
    edge = np.zeros(256, bool)
    edge[[mark, 10]] = True
    # [-1], before the first, is a line's end
    if len(at) % 2 or not (edge[data[at[::2] - 1]].all() and edge[data[at[1::2] + 1]].all()):
        return None
    if marks.replace(b'""', b"") == expected:  # no delimiter or line end is inside quotes
        return height
    outside = data[edge[data] & ~np.logical_xor.accumulate(is_quote)]
    return height if outside.tobytes() == expected else None
