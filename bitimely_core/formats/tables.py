"""Tables as text first: strict csv (also gzip, or alone in a zip archive) and Parquet, every fault a finding with its row and column.

Readers that guess types make one patient of '000123' and '123', missing values of some words and none of others, and shift a short row;
lenient ones let an open quote swallow the rest of the file. Here every cell is text until the caller asks for a number by an explicit rule,
a row has the width of the header or is left out, and a line that opens a quote which nothing closes properly is one faulty row: reading
goes on with the next line. Cells are never shown: they hold ids and values of patients.

The grammar: cells separated by `delimiter`; a cell that begins with '"' ends with '"', holds '""' for a quote, and may hold line breaks; no
other cell holds a quote. A byte order mark, CRLF, blank lines and a last line without an end are allowed.

`rows` reads record by record. `frames` reads long tables: stretches whose marks alone show that each line is a record go to a fast parser,
all others through the same grammar as `rows`; both give the same cells.
"""

from __future__ import annotations

import gzip
import math
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np

from bitimely_core.errors import Finding, Reason, UserError, input_error, safe_text

if TYPE_CHECKING:
    import polars as pl

MOST_LINE = 1 << 24  # bytes
MOST_LINES = 256  # that one row with quoted line breaks may run over
MOST_TEXT = 1 << 17  # characters of such a row
MOST_EXPANDED = 1 << 30  # bytes that a compressed table may always hold; beyond it at most MOST_RATIO times its size
MOST_RATIO = 200
BLOCK = 1 << 24  # bytes of text that become one frame
PIECE = 1 << 16  # bytes that are read carefully together where a block holds something odd

NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,4})?", re.ASCII)
NOT_FINITE = re.compile(r"[+-]?(?:nan|inf(?:inity)?)", re.IGNORECASE | re.ASCII)
WHOLE = re.compile(r"[+-]?\d{1,18}(?:\.0*)?", re.ASCII)
PLAIN = str.maketrans("", "", "0123456789+-.eE, ")
OPEN, BROKEN = "open", "broken"  # what `_cells` says of a line that ends inside of a quoted cell, and of one with a quote elsewhere


class Row(NamedTuple):
    """One record of a table."""

    row: int  # csv: 1-based line on which it begins (the header is line 1); Parquet: 1-based number of the row
    cells: tuple[str, ...]  # in the order of the columns that were asked for


class Block(NamedTuple):
    """A stretch of a table."""

    frame: pl.DataFrame  # `row` Int64 (as of Row) and the columns asked for, String, null where a cell is empty
    faults: list[Finding]  # records that are not in the frame, of level error
    seen: int  # records, counted without the parser that made the frame
    foreign: int = 0  # lines that are not valid UTF-8 and were read as latin-1
    blanks: bool = True  # whether any cell holds one


# --- the table


def names(path: Path, *, delimiter: str = ",") -> tuple[str, ...]:
    """Names of the columns, without blanks around them.

    Raises:
        UserError: empty_file, encoding, csv_syntax, corrupt, truncated, expansion_limit, io_error.
    """
    try:
        if _parquet(path):
            return tuple(kinds(path))
        with closing(_lines(path)) as lines:
            return _header(lines, delimiter)
    except UserError as error:
        error.file = error.file or str(path)
        raise


def kinds(path: Path) -> dict[str, str]:
    """Type of each column as stored: 'text' throughout a csv file, the Arrow type's name in a Parquet file (a code stored as a double has
    lost its zeros, whatever its text looks like).
    """
    if not _parquet(path):
        return dict.fromkeys(names(path), "text")
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        raise input_error(Reason.CORRUPT, f"does not open as Parquet ({type(error).__name__})", file=str(path)) from None
    texts = {pa.string(), pa.large_string(), pa.string_view()}
    if len({field.name.strip() for field in schema}) < len(schema):
        raise input_error(Reason.HEADER, "columns have equal names", "expected different ones", file=str(path))
    held = {field.name.strip(): field.type.value_type if pa.types.is_dictionary(field.type) else field.type for field in schema}
    return {name: "text" if kind in texts else str(kind) for name, kind in held.items()}


def count(path: Path, *, delimiter: str = ",") -> int:
    """Number of records below the header, counted without the parser of `rows`: by the parity of quotes, and a regular expression for rows
    that run over several lines. Blank lines are no records; what an open quote would swallow is counted line by line.

    Raises:
        UserError: as `names`.
    """
    try:
        if _parquet(path):
            import pyarrow.parquet as pq

            kinds(path)  # raises where the file does not open
            return int(pq.read_metadata(path).num_rows)
        with closing(_lines(path)) as lines:
            whole = _whole(len(_header(lines, delimiter)), delimiter)
            return sum(_counted((_text(raw) for _, raw, _ in lines), whole, []))
    except UserError as error:
        error.file = error.file or str(path)
        raise


def _whole(width: int, delimiter: str) -> re.Pattern[str]:
    """What a record of `width` cells looks like."""
    mark = re.escape(delimiter)
    cell = rf'(?:"[^"\0]*+(?:""[^"\0]*+)*+"|[^"{mark}\n\0]*+)'
    return re.compile(rf"{cell}(?:{mark}{cell}){{{width - 1}}}")


def _counted(lines: Iterable[str], whole: re.Pattern[str], waiting: list[str], *, last: bool = True) -> Iterator[int]:
    """1 for each record, 0 for each blank line; `waiting` holds lines that only later ones can place, unless these are the `last`."""
    for line in lines:
        waiting.append(line)
        while waiting and (taken := _taken(waiting, whole)):
            yield int(bool(waiting[0].strip()))
            del waiting[:taken]
    while last and waiting:
        yield int(bool(waiting[0].strip()))
        del waiting[: _taken(waiting, whole) or 1]


def _taken(waiting: Sequence[str], whole: re.Pattern[str]) -> int:
    """Lines of the first record among the lines read so far; 0: more are needed to tell."""
    if waiting[0].count('"') % 2 == 0:
        return 1
    many, full = _span(waiting)
    quotes = 0
    for i, line in enumerate(waiting[:many], 1):
        quotes += line.count('"')
        if quotes % 2 == 0:
            return i if whole.fullmatch("\n".join(waiting[:i])) else 1
    return 1 if full else 0


def _span(waiting: Sequence[str]) -> tuple[int, bool]:
    """How many of the lines read so far may belong to one record, and whether no further one may."""
    many = 1
    length = len(waiting[0])
    while many < min(len(waiting), MOST_LINES) and length + len(waiting[many]) <= MOST_TEXT:
        length += len(waiting[many])
        many += 1
    return many, many < len(waiting) or many == MOST_LINES


def rows(path: Path, columns: Sequence[str] | None = None, *, key: Sequence[str] = (), delimiter: str = ",") -> Iterator[Row | Finding]:
    """All records of a table.

    Args:
        path: .csv, .csv.gz (or another name: csv is assumed, gzip is told by its first bytes) or .parquet.
        columns: names of the columns to return, in this order; None: all.
        key: names of the columns that identify a record. A repeated record that is equal in all columns is left out with a warning
            (duplicates); of several different ones with one key none is kept (duplicate_key): nobody knows which is right.
        delimiter: of csv.

    Yields:
        One item a record, in the order of the file: the record, or a finding with its `row` when it must be left out, of level error for a
        fault (row_width, csv_syntax, encoding, truncated, identifier, duplicate_key) and of level warning for an exact duplicate.

    Raises:
        UserError: header (absent, or a wanted name twice), schema (columns missing: those found and those wanted are named), identifier
            (most rows share their key with rows that differ), and as `names`.
    """
    every = names(path, delimiter=delimiter)
    try:
        chosen = list(range(len(every))) if columns is None else _positions(every, columns)
        keyed = _positions(every, key)
        for item in _unique(path, every, chosen, keyed, delimiter) if key else _records(path, every, chosen, chosen, delimiter):
            yield item if isinstance(item, Finding) else Row(item.row, tuple(item.cells[i] for i in chosen))
    except UserError as error:
        error.file = error.file or str(path)
        raise


def _unique(path: Path, every: Sequence[str], chosen: Sequence[int], keyed: Sequence[int], delimiter: str) -> Iterator[Row | Finding]:
    """Two passes: the first keeps a hash of key and record of each row.

    Raises:
        UserError: identifier, when the key is no key.
    """
    whole = range(len(every))
    field = ", ".join(every[i] for i in keyed)
    first: dict[bytes, bytes] = {}
    torn: set[bytes] = set()
    often: Counter[bytes] = Counter()
    for item in _records(path, every, whole, chosen, delimiter):
        if isinstance(item, Row):
            mark, digest = _hash(item.cells[i].strip() for i in keyed), _hash(item.cells)
            often[mark] += 1
            if first.setdefault(mark, digest) != digest:
                torn.add(mark)
    if len(torn) > 1 and 2 * sum(often[mark] for mark in torn) > often.total():
        text = f"most of the {often.total()} rows share their {safe_text(field)} with a row that differs"
        raise input_error(Reason.IDENTIFIER, text, "it identifies no row: are columns swapped?", field=field)
    seen: set[bytes] = set()
    for item in _records(path, every, whole, chosen, delimiter):
        if isinstance(item, Finding):
            yield item
            continue
        mark = _hash(item.cells[i].strip() for i in keyed)
        if not all(item.cells[i].strip() for i in keyed):
            text = f"the one of row {item.row} is empty"
            yield Finding(Reason.IDENTIFIER, text, "every row needs one", field=field, row=item.row)
        elif mark in torn:
            text = f"the one of row {item.row} is that of other rows too, which differ"
            yield Finding(Reason.DUPLICATE_KEY, text, "none of them is used", field=field, row=item.row)
        elif mark in seen:
            yield Finding(Reason.DUPLICATES, "repeats a row above", "used once", level="warning", row=item.row)
        else:
            seen.add(mark)
            yield item


def _hash(cells: Iterable[str]) -> bytes:
    return blake2b("\0".join(cells).encode("utf-8", "surrogateescape"), digest_size=16).digest()


def _records(path: Path, every: Sequence[str], needed: Sequence[int], shown: Sequence[int], delimiter: str) -> Iterator[Row | Finding]:
    """All records with the cells of all columns; those that are not `needed` may be empty, those `shown` must be valid text."""
    if _parquet(path):
        yield from _arrow(path, every, needed)
        return
    with closing(_lines(path)) as lines:
        _header(lines, delimiter)
        for row, cells, ended in _parsed(lines, len(every), delimiter):
            if isinstance(cells, UserError):
                cut = not ended and cells.code == Reason.ROW_WIDTH
                yield Finding(Reason.TRUNCATED if cut else cells.code, cells.problem, cells.requirement, row=row)
            elif odd := [i for i in shown if not cells[i].isascii() and not _is_utf8(cells[i])]:
                text = f"the cell of row {row} is not valid UTF-8"
                yield Finding(Reason.ENCODING, text, "the row is left out", field=every[odd[0]], row=row)
            else:
                yield Row(row, tuple(cells))


def _positions(every: Sequence[str], wanted: Sequence[str]) -> list[int]:
    """Where the wanted columns are.

    Raises:
        UserError: header, schema. Names found are shown only when the first line is the header beyond doubt: else it holds a patient's row.
    """
    missing = [name for name in wanted if name not in every]
    twice = [name for name in wanted if every.count(name) > 1]
    if twice:
        raise input_error(
            Reason.HEADER, f"the column {safe_text(twice[0])} is there {every.count(twice[0])} times", "expected once", field=twice[0]
        )
    if missing and len(missing) == len(wanted):
        text = f"the first line names none of the columns wanted ({_listed(wanted, 5)})"
        raise input_error(Reason.HEADER, text, "is the header line absent, or the separator another?")
    if missing:
        text = f"the column{'s' * (len(missing) > 1)} {_listed(missing)} {'are' if len(missing) > 1 else 'is'} missing"
        raise input_error(Reason.SCHEMA, text, f"found {_listed(every)}", field=missing[0])
    return [every.index(name) for name in wanted]


def _listed(found: Sequence[str], most: int = 30) -> str:
    return ", ".join(map(safe_text, found[:most])) + (f" and {len(found) - most} more" if len(found) > most else "")


def gathered(findings: Iterable[Finding]) -> list[Finding]:
    """The findings of one code, level and file as one: the first, with their number and up to five of their rows as examples."""
    groups: dict[tuple[str, str, str | None], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.code, finding.level, finding.file), []).append(finding)
    told = []
    for first, *others in groups.values():
        rows = [str(one.row) for one in (first, *others) if one.row is not None]
        many = sum(one.count for one in (first, *others))
        more = f" (and {len(others)} more rows)" if others else ""
        told.append(replace(first, problem=first.problem + more, count=many, examples=tuple(rows[:5])))
    return told


# --- csv


def _header(lines: Iterator[tuple[int, bytes, bool]], delimiter: str) -> tuple[str, ...]:
    """Column names: the first line that is not blank."""
    for row, raw, _ in lines:
        text = _text(raw)
        if not text.strip():
            continue
        cells = _cells(text, delimiter)
        if not isinstance(cells, list):
            raise input_error(Reason.CSV_SYNTAX, f"line {row}, the header, is not well formed", "expected column names")
        return tuple(cell.strip() for cell in cells)
    raise input_error(Reason.EMPTY_FILE, "holds nothing but blank lines", hint="Download it again")


Parsed = tuple[int, list[str] | UserError, bool]  # line, cells or fault, whether the line has an end


def _parsed(
    lines: Iterable[tuple[int, bytes, bool]],
    width: int,
    delimiter: str,
    waiting: list[tuple[int, str, bool]] | None = None,
    *,
    last: bool = True,
) -> Iterator[Parsed]:
    """All records; blank lines are none. `waiting` keeps what only later lines can place, unless these are the `last`."""
    waiting = [] if waiting is None else waiting  # where there are several, the first opens a quote
    for row, raw, ended in lines:
        waiting.append((row, _text(raw), ended))
        if len(waiting) > 1 and b'"' not in raw and not _span([text for _, text, _ in waiting])[1]:
            continue  # this line cannot close it
        while waiting:
            used, record = _record(waiting, width, delimiter, last=False)
            if not used:
                break
            if record:
                yield record
            del waiting[:used]
    while last and waiting:
        used, record = _record(waiting, width, delimiter, last=True)
        if record:
            yield record
        del waiting[:used]


def _record(waiting: Sequence[tuple[int, str, bool]], width: int, delimiter: str, *, last: bool) -> tuple[int, Parsed | None]:
    """Lines used (0: more are needed to tell) and the record at the head of the lines read so far (none for a blank line)."""
    row, text, ended = waiting[0]
    if not text.strip():
        return 1, None
    cells = _cells(text, delimiter)
    used = 1
    if cells is OPEN:
        many, full = _span([text for _, text, _ in waiting])
        while cells is OPEN and used < many:
            text += "\n" + waiting[used][1]
            used += 1
            cells = _cells(text, delimiter) if '"' in waiting[used - 1][1] else OPEN
        if cells is OPEN and not full and not last:
            return 0, None
    if not isinstance(cells, list) or (used > 1 and len(cells) != width):  # the latter: what closed the quote was another cell's
        what = "a quote stands where none may be, or a NUL character" if cells is BROKEN else "a quote is opened and not closed"
        return 1, (row, input_error(Reason.CSV_SYNTAX, what, "the line is left out, reading goes on with the next"), ended)
    if len(cells) != width:
        return 1, (row, input_error(Reason.ROW_WIDTH, f"has {len(cells)} cells", f"the header has {width}"), ended)
    return used, (row, cells, waiting[used - 1][2])


def _cells(text: str, delimiter: str) -> list[str] | str:
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


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _is_utf8(cell: str) -> bool:
    try:
        cell.encode()
    except UnicodeEncodeError:  # surrogates: bytes that did not decode
        return False
    return True


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, float]]:
    """The bytes of a text, unpacked where its first bytes are those of gzip or of a zip archive with one table, and how many they may be.

    Raises:
        UserError: also from the block: truncated or corrupt (gzip, zip), unsupported_format (zip), io_error.
    """
    try:
        most = max(MOST_EXPANDED, MOST_RATIO * path.stat().st_size)
        with path.open("rb") as packed:
            head = packed.read(4)
            packed.seek(0)
            if head[:2] == b"\x1f\x8b":
                with gzip.GzipFile(fileobj=packed) as file:
                    yield file, most  # type: ignore[misc]  # of the interface only read and readline are used
            elif head == b"PK\x03\x04":
                with zipfile.ZipFile(packed) as archive, archive.open(member(archive)) as inner:
                    yield inner, most  # type: ignore[misc]
            else:
                yield packed, math.inf
    except EOFError:
        raise input_error(Reason.TRUNCATED, "the packed text ends early", hint="Download it again") from None
    except (gzip.BadGzipFile, zipfile.BadZipFile, zlib.error):
        raise input_error(Reason.CORRUPT, "the packed text is damaged", hint="Download it again") from None
    except OSError as error:
        raise input_error(Reason.IO_ERROR, f"cannot be read ({error.strerror})") from None


def member(archive: zipfile.ZipFile) -> str:
    """Name of the one table that an archive holds.

    Raises:
        UserError: unsupported_format where there is not exactly one, or it is encrypted or packed in an unknown way.
    """
    held = [info for info in archive.infolist() if not info.is_dir() and not info.filename.startswith("__MACOSX/")]
    if len(held) != 1:
        raise input_error(Reason.UNSUPPORTED_FORMAT, f"is an archive of {len(held)} files", "expected a table")
    if held[0].flag_bits & 1 or held[0].compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise input_error(Reason.UNSUPPORTED_FORMAT, "is an archive that is encrypted or packed in an unusual way", "expected a table")
    return held[0].filename


def _lines(path: Path) -> Generator[tuple[int, bytes, bool], None, None]:
    """(1-based number, text without line end, whether it has one) of all lines.

    Raises:
        UserError: empty_file, encoding (UTF-16), expansion_limit, resource_limit, and as `_opened`.
    """
    row = held = 0
    with _opened(path) as (file, most):
        while line := file.readline(MOST_LINE):
            row += 1
            held += len(line)
            if row == 1:
                line = _marked(line)
            if len(line) == MOST_LINE:
                raise _too_long(row)
            if held > most:
                raise _too_much(most)
            text = line.removesuffix(b"\n")
            yield row, text.removesuffix(b"\r"), len(text) < len(line)
    if row == 0:
        raise input_error(Reason.EMPTY_FILE, "has 0 bytes", hint="Download it again")


def _marked(head: bytes) -> bytes:
    """The beginning of a text without its byte order mark."""
    if head[:2] in {b"\xff\xfe", b"\xfe\xff"}:
        raise input_error(Reason.ENCODING, "is UTF-16", "expected UTF-8")
    return head.removeprefix(b"\xef\xbb\xbf")


def _too_long(row: int) -> UserError:
    return input_error(Reason.RESOURCE_LIMIT, f"line {row} has more than {MOST_LINE} bytes", "no row is that long")


def _too_much(most: float) -> UserError:
    return input_error(Reason.EXPANSION_LIMIT, f"holds more than {most:.0f} bytes when unpacked", "no table is compressed that well")


# --- frames


def frames(path: Path, columns: Sequence[str], *, delimiter: str = ",", quotes: bool = True) -> Iterator[Block]:
    """A long table in stretches of about 16 MiB, every cell text: what `rows` gives, at a small part of its cost, in bounded memory.

    Args:
        path: as for `rows`.
        columns: names of the columns to return, in this order.
        delimiter: of csv.
        quotes: False: a quote is a character like any other (tab-separated exports of vocabularies).

    Yields:
        Blocks, in the order of the file. A line that is not valid UTF-8 is read as latin-1. Of a Parquet file every column is given as
        text: dates ISO, time stamps with a zone as the civil time there.

    Raises:
        UserError: as `rows`; csv_syntax when the independent count of the records differs from what was read.
    """
    every = names(path, delimiter=delimiter)
    try:
        chosen = _positions(every, columns)
        seen = read = 0
        for block in (
            _arrow_frames(path, chosen, columns) if _parquet(path) else _csv_frames(path, every, chosen, columns, delimiter, quotes=quotes)
        ):
            seen += block.seen
            read += block.frame.height + len(block.faults)
            yield block
        if seen != read:
            raise input_error(Reason.CSV_SYNTAX, f"{seen} records were counted, {read} read", "expected the same number")
    except UserError as error:
        error.file = error.file or str(path)
        raise


def _csv_frames(
    path: Path, every: Sequence[str], chosen: Sequence[int], columns: Sequence[str], delimiter: str, *, quotes: bool
) -> Iterator[Block]:
    import polars as pl

    width = len(every)
    whole = _whole(width, delimiter)
    waiting: list[tuple[int, str, bool]] = []  # of the parser, and of the count: lines that only later ones can place
    uncounted: list[str] = []
    row = 0  # lines so far
    below = False  # the header
    for text, last in _blocks(path):
        text, foreign = _as_utf8(text)
        if not below:
            above = len(text) - len(text.lstrip())  # blank lines
            below = above < len(text)
            end = text.find(b"\n", above) + 1 or len(text)
            row += text.count(b"\n", 0, end)
            text = text[end:]
        parts: list[pl.DataFrame] = []
        faults: list[Finding] = []
        seen = 0
        for piece, plain in _pieces(text, width, delimiter, quotes=quotes):
            if plain is not None and not waiting and not uncounted:
                parts.append(_plain_frame(piece, row, plain, width, chosen, columns, delimiter, quotes=quotes))
                row += plain
                seen += plain
                continue
            lines = piece.removesuffix(b"\n").split(b"\n")
            numbered = [(row + i, line, i < len(lines) or piece.endswith(b"\n")) for i, line in enumerate(lines, 1)]
            row += len(lines)
            if not quotes:
                records = _unquoted(numbered, width, delimiter)
                seen += sum(bool(line.strip()) for line in lines)
            else:
                records = _parsed(numbered, width, delimiter, waiting, last=False)
                seen += sum(_counted(map(_text, lines), whole, uncounted, last=False))
            _sort_out(records, parts, faults, chosen, columns)
        if last:
            _sort_out(_parsed([], width, delimiter, waiting), parts, faults, chosen, columns)
            seen += sum(_counted([], whole, uncounted))
        yield Block(pl.concat(parts) if parts else _text_frame([], [], columns), faults, seen, foreign, b" " in text or b"\t" in text)


def _sort_out(
    records: Iterable[Parsed], parts: list[pl.DataFrame], faults: list[Finding], chosen: Sequence[int], columns: Sequence[str]
) -> None:
    """Appends the whole records to `parts` as a frame, and the others to `faults`."""
    kept: list[tuple[int, list[str]]] = []
    for row, cells, ended in records:
        if isinstance(cells, UserError):
            cut = not ended and cells.code == Reason.ROW_WIDTH
            faults.append(Finding(Reason.TRUNCATED if cut else cells.code, cells.problem, cells.requirement, row=row))
        else:
            kept.append((row, cells))
    if kept:
        parts.append(_text_frame([row for row, _ in kept], [[cells[i] or None for _, cells in kept] for i in chosen], columns))


def _unquoted(lines: Iterable[tuple[int, bytes, bool]], width: int, delimiter: str) -> Iterator[Parsed]:
    for row, raw, ended in lines:
        cells = _text(raw).split(delimiter)
        if b"\0" in raw:
            yield row, input_error(Reason.CSV_SYNTAX, "holds a NUL character", "the line is left out"), ended
        elif len(cells) == width:
            yield row, cells, ended
        elif raw.strip():
            yield row, input_error(Reason.ROW_WIDTH, f"has {len(cells)} cells", f"the header has {width}"), ended


def _text_frame(rows: Sequence[int], cells: Sequence[Sequence[str | None]], columns: Sequence[str]) -> pl.DataFrame:
    import polars as pl

    texts = cells or [[] for _ in columns]
    schema = {"row": pl.Int64, **dict.fromkeys(columns, pl.String)}
    return pl.DataFrame({"row": rows, **dict(zip(columns, texts, strict=True))}, schema=schema)


def _plain_frame(
    text: bytes, row: int, height: int, width: int, chosen: Sequence[int], columns: Sequence[str], delimiter: str, *, quotes: bool
) -> pl.DataFrame:
    """The frame of a text in which each line is a record of `width` cells; `row` lines lie above it."""
    import polars as pl

    frame = pl.read_csv(
        text,
        has_header=False,
        columns=sorted(set(chosen)),
        schema={str(i): pl.String for i in range(width)},
        separator=delimiter,
        quote_char='"' if quotes and b'"' in text else None,
    )
    if frame.height != height:
        raise input_error(Reason.CSV_SYNTAX, f"{height} records were counted, {frame.height} read", "expected the same number")
    named = [pl.col(str(i)).alias(name) for i, name in zip(chosen, columns, strict=True)]
    return frame.select(pl.int_range(row + 1, row + 1 + height, dtype=pl.Int64).alias("row"), *named)


def _blocks(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Stretches of whole lines, each ended by a line feed alone (the last one of the file may have none), and whether it is the last.

    Raises:
        UserError: as `_lines`.
    """
    with _opened(path) as (file, most):
        rest = _marked(file.read(4))
        held = len(rest)
        lines = 0
        while chunk := file.read(BLOCK):
            held += len(chunk)
            if held > most:
                raise _too_much(most)
            rest += chunk
            if end := rest.rfind(b"\n", 0, -1) + 1:  # the last line stays: who reads on must know which block is the last
                lines += rest.count(b"\n", 0, end)
                yield _unix(rest[:end]), False
                rest = rest[end:]
            if len(rest) > MOST_LINE:
                raise _too_long(lines + 1)
        yield _unix(rest).removesuffix(b"\r"), True


def _unix(text: bytes) -> bytes:
    return text.replace(b"\r\n", b"\n") if b"\r" in text else text


def _as_utf8(text: bytes) -> tuple[bytes, int]:
    """The text in UTF-8, and how many of its lines were not: they are read as latin-1."""
    if text.isascii() or _decodes(text):
        return text, 0
    lines = text.split(b"\n")
    foreign = [i for i, line in enumerate(lines) if not line.isascii() and not _decodes(line)]
    for i in foreign:
        lines[i] = lines[i].decode("latin-1").encode()
    return b"\n".join(lines), len(foreign)


def _decodes(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _pieces(text: bytes, width: int, delimiter: str, *, quotes: bool) -> Iterator[tuple[bytes, int | None]]:
    """(text, number of its lines where each is plainly a record): the whole text, or, where something in it is odd, many small ones."""
    plain = _plain(text, width, delimiter, quotes=quotes)
    if plain is not None or 0 < len(text) <= PIECE:
        yield text, plain
        return
    start = 0
    while start < len(text):
        end = text.find(b"\n", start + PIECE) + 1 or len(text)
        yield text[start:end], _plain(text[start:end], width, delimiter, quotes=quotes)
        start = end


def _plain(text: bytes, width: int, delimiter: str, *, quotes: bool) -> int | None:
    """Number of lines of a text whose delimiters, line ends and quotes show that each line is one record; None where they do not.

    Without quotes the marks must repeat `width - 1` delimiters and a line end. With quotes each pair must fill a cell of one line (a quote
    in a cell or a line break in quotes is left to the careful parser), and the marks outside of them must repeat so.
    """
    mark = ord(delimiter)
    kept = {mark, 10, 0, 13, 34} if quotes else {mark, 10, 0, 13}
    marks = text.translate(None, bytes(set(range(256)) - kept))
    height = text.count(b"\n")
    expected = (delimiter.encode() * (width - 1) + b"\n") * height
    if width == 1 or not text.endswith(b"\n"):
        return None
    if marks == expected:
        return height
    if not quotes or b'"' not in marks or b"\0" in marks or b"\r" in marks:
        return None
    data = np.frombuffer(text, np.uint8)
    is_quote = data == 34
    at = np.flatnonzero(is_quote)
    edge = np.zeros(256, bool)
    edge[[mark, 10]] = True
    if len(at) % 2 or not (edge[data[at[::2] - 1]].all() and edge[data[at[1::2] + 1]].all()):  # [-1], before the first, is a line's end
        return None
    if marks.replace(b'""', b"") == expected:  # nothing stands in quotes that counts without them
        return height
    outside = data[edge[data] & ~np.logical_xor.accumulate(is_quote)]
    return height if outside.tobytes() == expected else None


# --- Parquet


def _parquet(path: Path) -> bool:
    return path.suffix.lower() in {".parquet", ".pq"}


def _arrow(path: Path, every: Sequence[str], needed: Sequence[int]) -> Iterator[Row]:
    """Rows of a Parquet file, every needed column as text: missing cells are empty, dates ISO, numbers as Arrow prints them."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    row = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(8192, columns=[file.schema_arrow.names[i] for i in needed]):
                texts: list[list[str]] = [[""] * len(batch) for _ in every]
                for i, column in zip(needed, batch.columns, strict=True):
                    texts[i] = pc.fill_null(pc.cast(column, pa.string()), "").to_pylist()
                for cells in zip(*texts, strict=True) if texts else [()] * len(batch):
                    row += 1
                    yield Row(row, cells)
    except (OSError, pa.ArrowException) as error:
        text = f"does not read as Parquet after row {row} ({type(error).__name__})"
        raise input_error(Reason.CORRUPT, text, "expected columns of text, numbers and dates") from None


def _arrow_frames(path: Path, chosen: Sequence[int], columns: Sequence[str]) -> Iterator[Block]:
    import polars as pl
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    row = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            stored = [file.schema_arrow.names[i] for i in chosen]
            for batch in file.iter_batches(1 << 19, columns=stored):
                texts = {}
                for name, column in zip(columns, (batch.column(name) for name in stored), strict=True):
                    zoned = pa.types.is_timestamp(column.type) and column.type.tz is not None
                    texts[name] = pl.Series(name, pc.cast(pc.local_timestamp(column) if zoned else column, pa.string()), pl.String)
                rows = pl.int_range(row + 1, row + 1 + len(batch), dtype=pl.Int64, eager=True).alias("row")
                row += len(batch)
                yield Block(pl.DataFrame([rows, *texts.values()]), [], len(batch))
            if row != file.metadata.num_rows:
                raise input_error(
                    Reason.CORRUPT, f"{row} rows were read, its footer says {file.metadata.num_rows}", "expected the same number"
                )
    except (OSError, pa.ArrowException) as error:
        text = f"does not read as Parquet after row {row} ({type(error).__name__})"
        raise input_error(Reason.CORRUPT, text, "expected columns of text, numbers and dates") from None


# --- cells


def number(text: str) -> float | None:
    """A cell as a finite number; None for an empty one.

    Raises:
        UserError: not_numeric, non_finite, without the cell's text.
    """
    text = text.strip()
    if not text:
        return None
    if NOT_FINITE.fullmatch(text):
        raise input_error(Reason.NON_FINITE, "is not finite", "expected a finite number")
    if not NUMBER.fullmatch(text):
        raise input_error(Reason.NOT_NUMERIC, "is no number", "expected a finite number")
    if not math.isfinite(value := float(text)):
        raise input_error(Reason.NON_FINITE, "is not finite", "expected a finite number")
    return value


def integer(text: str) -> int | None:
    """A cell as a whole number ('5' and '5.0', as tools write columns with gaps); None for an empty one.

    Raises:
        UserError: not_numeric, without the cell's text.
    """
    text = text.strip()
    if not text:
        return None
    if not WHOLE.fullmatch(text):
        raise input_error(Reason.NOT_NUMERIC, "is no whole number", "expected one")
    return int(text.split(".")[0])


def numbers(row: Row, columns: Sequence[str]) -> np.ndarray | Finding:
    """All cells of a row as finite numbers.

    Args:
        row: cells.
        columns: their names, for the finding.

    Returns:
        float64 [len(cells)], or a finding of level error about the first cell that is missing_values, not_numeric or non_finite.
    """
    plain = ",".join(row.cells)
    if not plain.translate(PLAIN):
        with suppress(ValueError):
            values = np.array(list(map(float, row.cells)), np.float64)
            if np.isfinite(values).all():
                return values
    found = []
    for name, cell in zip(columns, row.cells, strict=True):
        try:
            value = number(cell)
        except UserError as error:
            return Finding(error.code, f"the cell of row {row.row} {error.problem}", error.requirement, field=name, row=row.row)
        if value is None:
            return Finding(Reason.MISSING_VALUES, f"the cell of row {row.row} is empty", "expected a number", field=name, row=row.row)
        found.append(value)
    return np.array(found, np.float64)
