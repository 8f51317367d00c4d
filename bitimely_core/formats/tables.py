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

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bitimely_core.errors import Finding, Reason, UserError, input_error, input_warning, safe_text
from bitimely_core.formats.csv_text import (
    ParsedRecord,
    count_records,
    decode_line,
    is_decodable,
    parse_header,
    parse_records,
    read_blocks,
    read_lines,
    record_pattern,
    split_plain_blocks,
    split_unquoted,
    to_utf8,
)

if TYPE_CHECKING:
    import polars as pl


NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,4})?", re.ASCII)
NOT_FINITE = re.compile(r"[+-]?(?:nan|inf(?:inity)?)", re.IGNORECASE | re.ASCII)
INTEGER = re.compile(r"[+-]?\d{1,18}(?:\.0*)?", re.ASCII)
PLAIN = str.maketrans("", "", "0123456789+-.eE, ")


class TableRow(NamedTuple):
    """One record of a table."""

    row: int  # csv: 1-based line on which it begins (the header is line 1); Parquet: 1-based number of the row
    cells: tuple[str, ...]  # in the order of the columns that were asked for


class TableBlock(NamedTuple):
    """A stretch of a table."""

    frame: pl.DataFrame  # `row` Int64 (as of Row) and the columns asked for, String, null where a cell is empty
    faults: list[Finding]  # records that are not in the frame, of level error
    seen: int  # records, counted without the parser that made the frame
    foreign: int = 0  # lines that are not valid UTF-8 and were read as latin-1
    blanks: bool = True  # whether any cell holds one


# --- the table


def read_names(path: Path, *, delimiter: str = ",") -> tuple[str, ...]:
    """Names of the columns, without blanks around them.

    Raises:
        UserError: empty_file, encoding, csv_syntax, corrupt, truncated, expansion_limit, io_error.
    """
    try:
        if _is_parquet(path):
            return tuple(read_types(path))
        with closing(read_lines(path)) as lines:
            return parse_header(lines, delimiter)
    except UserError as error:
        error.file = error.file or str(path)
        raise


def read_types(path: Path) -> dict[str, str]:
    """Type of each column as stored: 'text' throughout a csv file, the Arrow type's name in a Parquet file (a code stored as a double has
    lost its zeros, whatever its text looks like).
    """
    if not _is_parquet(path):
        return dict.fromkeys(read_names(path), "text")
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


def count_rows(path: Path, *, delimiter: str = ",") -> int:
    """Number of records below the header, counted without the parser of `rows`: by the parity of quotes, and a regular expression for rows
    that run over several lines. Blank lines are no records; what an open quote would swallow is counted line by line.

    Raises:
        UserError: as `names`.
    """
    try:
        if _is_parquet(path):
            import pyarrow.parquet as pq

            read_types(path)  # raises where the file does not open
            return int(pq.read_metadata(path).num_rows)
        with closing(read_lines(path)) as lines:
            whole = record_pattern(len(parse_header(lines, delimiter)), delimiter)
            return sum(count_records((decode_line(raw) for _, raw, _ in lines), whole, []))
    except UserError as error:
        error.file = error.file or str(path)
        raise


def read_rows(
    path: Path, columns: Sequence[str] | None = None, *, key: Sequence[str] = (), delimiter: str = ","
) -> Iterator[TableRow | Finding]:
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
    every = read_names(path, delimiter=delimiter)
    try:
        chosen = list(range(len(every))) if columns is None else _find_columns(every, columns)
        keyed = _find_columns(every, key)
        for item in (
            _read_unique_rows(path, every, chosen, keyed, delimiter) if key else _read_records(path, every, chosen, chosen, delimiter)
        ):
            yield item if isinstance(item, Finding) else TableRow(item.row, tuple(item.cells[i] for i in chosen))
    except UserError as error:
        error.file = error.file or str(path)
        raise


def _read_unique_rows(
    path: Path, every: Sequence[str], chosen: Sequence[int], keyed: Sequence[int], delimiter: str
) -> Iterator[TableRow | Finding]:
    """Two passes: the first keeps a hash of key and record of each row.

    Raises:
        UserError: identifier, when the key is no key.
    """
    whole = range(len(every))
    field = ", ".join(every[i] for i in keyed)
    first: dict[bytes, bytes] = {}
    torn: set[bytes] = set()
    often: Counter[bytes] = Counter()
    for item in _read_records(path, every, whole, chosen, delimiter):
        if isinstance(item, TableRow):
            mark, digest = _hash_cells(item.cells[i].strip() for i in keyed), _hash_cells(item.cells)
            often[mark] += 1
            if first.setdefault(mark, digest) != digest:
                torn.add(mark)
    if len(torn) > 1 and 2 * sum(often[mark] for mark in torn) > often.total():
        text = f"most of the {often.total()} rows share their {safe_text(field)} with a row that differs"
        raise input_error(Reason.IDENTIFIER, text, "it identifies no row: are columns swapped?", field=field)
    seen: set[bytes] = set()
    for item in _read_records(path, every, whole, chosen, delimiter):
        if isinstance(item, Finding):
            yield item
            continue
        mark = _hash_cells(item.cells[i].strip() for i in keyed)
        if not all(item.cells[i].strip() for i in keyed):
            yield Finding(Reason.IDENTIFIER, f"the one of row {item.row} is empty", "every row needs one", field=field, row=item.row)
        elif mark in torn:
            text = f"the one of row {item.row} is that of other rows too, which differ"
            yield Finding(Reason.DUPLICATE_KEY, text, "none of them is used", field=field, row=item.row)
        elif mark in seen:
            yield input_warning(Reason.DUPLICATES, "repeats a row above", "used once", row=item.row)
        else:
            seen.add(mark)
            yield item


def _hash_cells(cells: Iterable[str]) -> bytes:
    return blake2b("\0".join(cells).encode("utf-8", "surrogateescape"), digest_size=16).digest()


def _read_records(
    path: Path, every: Sequence[str], needed: Sequence[int], shown: Sequence[int], delimiter: str
) -> Iterator[TableRow | Finding]:
    """All records with the cells of all columns; those that are not `needed` may be empty, those `shown` must be valid text."""
    if _is_parquet(path):
        yield from _read_parquet_rows(path, every, needed)
        return
    with closing(read_lines(path)) as lines:
        parse_header(lines, delimiter)
        for row, cells, ended in parse_records(lines, len(every), delimiter):
            if isinstance(cells, UserError):
                cut = not ended and cells.code == Reason.ROW_WIDTH
                yield Finding(Reason.TRUNCATED if cut else cells.code, cells.problem, cells.requirement, row=row)
            elif odd := [i for i in shown if not cells[i].isascii() and not is_decodable(cells[i])]:
                text = f"the cell of row {row} is not valid UTF-8"
                yield Finding(Reason.ENCODING, text, "the row is left out", field=every[odd[0]], row=row)
            else:
                yield TableRow(row, tuple(cells))


def _find_columns(every: Sequence[str], wanted: Sequence[str]) -> list[int]:
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
        text = f"the first line names none of the columns wanted ({list_names(wanted, 5)})"
        raise input_error(Reason.HEADER, text, "is the header line absent, or the separator another?")
    if missing:
        text = f"the column{'s' * (len(missing) > 1)} {list_names(missing)} {'are' if len(missing) > 1 else 'is'} missing"
        raise input_error(Reason.SCHEMA, text, f"found {list_names(every)}", field=missing[0])
    return [every.index(name) for name in wanted]


def list_names(found: Sequence[str], most: int = 30) -> str:
    """The first names, for a message."""
    return ", ".join(map(safe_text, found[:most])) + (f" and {len(found) - most} more" if len(found) > most else "")


def group_findings(findings: Iterable[Finding]) -> list[Finding]:
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


# --- frames


def read_frames(path: Path, columns: Sequence[str], *, delimiter: str = ",", quotes: bool = True) -> Iterator[TableBlock]:
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
    every = read_names(path, delimiter=delimiter)
    try:
        chosen = _find_columns(every, columns)
        seen = read = 0
        for block in (
            _read_parquet_frames(path, chosen, columns)
            if _is_parquet(path)
            else _read_csv_frames(path, every, chosen, columns, delimiter, quotes=quotes)
        ):
            seen += block.seen
            read += block.frame.height + len(block.faults)
            yield block
        if seen != read:
            raise input_error(Reason.CSV_SYNTAX, f"{seen} records were counted, {read} read", "expected the same number")
    except UserError as error:
        error.file = error.file or str(path)
        raise


def _read_csv_frames(
    path: Path, every: Sequence[str], chosen: Sequence[int], columns: Sequence[str], delimiter: str, *, quotes: bool
) -> Iterator[TableBlock]:
    import polars as pl

    width = len(every)
    whole = record_pattern(width, delimiter)
    waiting: list[tuple[int, str, bool]] = []  # of the parser, and of the count: lines that only later ones can place
    uncounted: list[str] = []
    row = 0  # lines so far
    below = False  # the header
    for text, last in read_blocks(path):
        text, foreign = to_utf8(text)
        if not below:
            above = len(text) - len(text.lstrip())  # blank lines
            below = above < len(text)
            end = text.find(b"\n", above) + 1 or len(text)
            row += text.count(b"\n", 0, end)
            text = text[end:]
        parts: list[pl.DataFrame] = []
        faults: list[Finding] = []
        seen = 0
        for piece, plain in split_plain_blocks(text, width, delimiter, quotes=quotes):
            if plain is not None and not waiting and not uncounted:
                parts.append(_parse_plain_block(piece, row, plain, width, chosen, columns, delimiter, quotes=quotes))
                row += plain
                seen += plain
                continue
            lines = piece.removesuffix(b"\n").split(b"\n")
            numbered = [(row + i, line, i < len(lines) or piece.endswith(b"\n")) for i, line in enumerate(lines, 1)]
            row += len(lines)
            if not quotes:
                records = split_unquoted(numbered, width, delimiter)
                seen += sum(bool(line.strip()) for line in lines)
            else:
                records = parse_records(numbered, width, delimiter, waiting, last=False)
                seen += sum(count_records(map(decode_line, lines), whole, uncounted, last=False))
            _collect_records(records, parts, faults, chosen, columns)
        if last:
            _collect_records(parse_records([], width, delimiter, waiting), parts, faults, chosen, columns)
            seen += sum(count_records([], whole, uncounted))
        yield TableBlock(pl.concat(parts) if parts else _make_frame([], [], columns), faults, seen, foreign, b" " in text or b"\t" in text)


def _collect_records(
    records: Iterable[ParsedRecord], parts: list[pl.DataFrame], faults: list[Finding], chosen: Sequence[int], columns: Sequence[str]
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
        parts.append(_make_frame([row for row, _ in kept], [[cells[i] or None for _, cells in kept] for i in chosen], columns))


def _make_frame(rows: Sequence[int], cells: Sequence[Sequence[str | None]], columns: Sequence[str]) -> pl.DataFrame:
    import polars as pl

    texts = cells or [[] for _ in columns]
    schema = {"row": pl.Int64, **dict.fromkeys(columns, pl.String)}
    return pl.DataFrame({"row": rows, **dict(zip(columns, texts, strict=True))}, schema=schema)


def _parse_plain_block(
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


# --- Parquet


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() in {".parquet", ".pq"}


def _read_parquet_rows(path: Path, every: Sequence[str], needed: Sequence[int]) -> Iterator[TableRow]:
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
                    yield TableRow(row, cells)
    except (OSError, pa.ArrowException) as error:
        text = f"does not read as Parquet after row {row} ({type(error).__name__})"
        raise input_error(Reason.CORRUPT, text, "expected columns of text, numbers and dates") from None


def _read_parquet_frames(path: Path, chosen: Sequence[int], columns: Sequence[str]) -> Iterator[TableBlock]:
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
                yield TableBlock(pl.DataFrame([rows, *texts.values()]), [], len(batch))
            if row != file.metadata.num_rows:
                raise input_error(
                    Reason.CORRUPT, f"{row} rows were read, its footer says {file.metadata.num_rows}", "expected the same number"
                )
    except (OSError, pa.ArrowException) as error:
        text = f"does not read as Parquet after row {row} ({type(error).__name__})"
        raise input_error(Reason.CORRUPT, text, "expected columns of text, numbers and dates") from None


# --- cells


def parse_number(text: str) -> float | None:
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


def parse_integer(text: str) -> int | None:
    """A cell as a whole number ('5' and '5.0', as tools write columns with gaps); None for an empty one.

    Raises:
        UserError: not_numeric, without the cell's text.
    """
    text = text.strip()
    if not text:
        return None
    if not INTEGER.fullmatch(text):
        raise input_error(Reason.NOT_NUMERIC, "is no whole number", "expected one")
    return int(text.split(".")[0])


def parse_numbers(row: TableRow, columns: Sequence[str]) -> np.ndarray | Finding:
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
            value = parse_number(cell)
        except UserError as error:
            return Finding(error.code, f"the cell of row {row.row} {error.problem}", error.requirement, field=name, row=row.row)
        if value is None:
            return Finding(Reason.MISSING_VALUES, f"the cell of row {row.row} is empty", "expected a number", field=name, row=row.row)
        found.append(value)
    return np.array(found, np.float64)
