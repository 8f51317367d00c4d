"""Tables read as text: strict csv (also gzip, or alone in a zip archive) and Parquet, every fault a
finding with its row and column.

Types are never guessed: that would merge the patients '000123' and '123'. Every cell is text until
the caller parses it as a number, a row
has the width of the header or is dropped, and an open quote costs one row, not the rest of the
file. Cells are never shown in messages: they hold ids and values of patients.

`read_rows` reads record by record by the grammar of `csv_text`. `read_frames` is for long tables:
blocks in which each line is plainly a record go to a fast parser, all others through the same
grammar; both give the same cells.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bitimely_core.errors import (
    Exit,
    Finding,
    Reason,
    UserError,
    input_error,
    input_warning,
    safe_text,
    usage_error,
)
from bitimely_core.formats.csv_text import (
    ParsedRecord,
    TableSpan,
    count_records,
    parse_header,
    parse_records,
    read_blocks,
    read_lines,
    record_pattern,
    split_plain_blocks,
    split_text,
    split_unquoted,
)
from bitimely_core.formats.source import locate_errors
from bitimely_core.formats.text import list_names, require_plain_names
from bitimely_core.formats.units import LARGEST, MAX_FLOAT32
from bitimely_core.system_errors import raise_system_error

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa


NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,4})?", re.ASCII)
NOT_FINITE = re.compile(r"[+-]?(?:nan|inf(?:inity)?)", re.IGNORECASE | re.ASCII)
INTEGER = re.compile(r"[+-]?\d{1,18}(?:\.0*)?", re.ASCII)
PLAIN = str.maketrans("", "", "0123456789+-.eE, ")


class TableRow(NamedTuple):
    """One record of a table."""

    # csv: 1-based line on which it begins (the header is line 1); Parquet: 1-based number of the
    # row
    row: int
    cells: tuple[str, ...]  # in the order of the requested columns


class TableBlock(NamedTuple):
    """A stretch of a table."""

    # `row` Int64 (as of TableRow) and the requested columns, String, null where a cell is empty
    frame: pl.DataFrame
    faults: list[Finding]  # records that are not in the frame, of level error
    seen: int  # records, counted without the parser that made the frame
    blanks: bool = True  # whether any cell holds one


# --- the table


def read_names(path: Path, *, delimiter: str = ",") -> tuple[str, ...]:
    """Names of the columns, without blanks around them.

    Raises UserError: empty_file, encoding, csv_syntax, corrupt, truncated, expansion_limit,
    io_error.
    """
    with locate_errors(path, replace=False):
        if _is_parquet(path):
            return tuple(read_types(path))
        with closing(read_lines(path)) as lines:
            return parse_header(lines, delimiter)


def read_types(path: Path) -> dict[str, str]:
    """Type of each column as stored: 'text' throughout a csv file, the Arrow type's name in a
    Parquet file (a code stored as a double has lost its zeros, whatever its text looks like).
    """
    if not _is_parquet(path):
        return dict.fromkeys(read_names(path), "text")
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise_system_error(error, path, stored=False)
        raise input_error(
            Reason.CORRUPT, f"does not open as Parquet ({type(error).__name__})", file=str(path)
        ) from None
    with locate_errors(path):
        require_plain_names(schema.names)
    texts = {pa.string(), pa.large_string(), pa.string_view()}
    if len({field.name.strip() for field in schema}) < len(schema):
        raise input_error(
            Reason.HEADER, "columns have equal names", "expected different ones", file=str(path)
        )
    types = {
        field.name.strip(): field.type.value_type
        if pa.types.is_dictionary(field.type)
        else field.type
        for field in schema
    }
    return {name: "text" if kind in texts else str(kind) for name, kind in types.items()}


def count_rows(path: Path, *, delimiter: str = ",") -> int:
    """Number of records below the header, counted independently of the parser: by the parity of
    quotes, and a regular expression for rows that run over several lines. Blank lines are no
    records; what an open quote would swallow is counted line by line.

    Raises UserError: as `read_names`.
    """
    with locate_errors(path, replace=False):
        if _is_parquet(path):
            import pyarrow.parquet as pq

            read_types(path)  # raises where the file does not open
            return int(pq.read_metadata(path).num_rows)
        with closing(read_lines(path)) as lines:
            pattern = record_pattern(len(parse_header(lines, delimiter)), delimiter)
            return sum(count_records((raw.decode() for _, raw, _ in lines), pattern, []))


def read_rows(
    path: Path,
    columns: Sequence[str] | None = None,
    *,
    key: Sequence[str] = (),
    delimiter: str = ",",
) -> Iterator[TableRow | Finding]:
    """All records of a table.

    Args:
        path: .csv, .csv.gz (or another name: csv is assumed, gzip is recognised by its first bytes)
            or .parquet.
        columns: names of the columns to return, in this order; None: all.
        key: names of the columns that identify a record. A repeated record that is equal in all
            columns is dropped with a warning (duplicates); of several different ones with one key
            none is kept (duplicate_key), since the right one is unknown.
        delimiter: of csv.

    Yields: One item a record, in the order of the file: the record, or a finding with its `row`
        when it must be dropped, of level error for a fault (row_width, csv_syntax, encoding,
        truncated, identifier, duplicate_key) and of level warning for an exact duplicate.

    Raises:
        UserError: header (absent, or a wanted name twice), schema (columns missing: the message
            names those found and those wanted), identifier (most rows share their key with rows
            that differ), and as `read_names`.
    """
    names = read_names(path, delimiter=delimiter)
    with locate_errors(path, replace=False):
        selected = list(range(len(names))) if columns is None else _find_columns(names, columns)
        if key:
            items = _read_unique_rows(path, names, _find_columns(names, key), delimiter)
        else:
            items = _read_records(path, names, selected, delimiter)
        for item in items:
            yield (
                item
                if isinstance(item, Finding)
                else TableRow(item.row, tuple(item.cells[i] for i in selected))
            )


def read_number_table(
    path: Path, columns: Sequence[str], *, missing: Collection[str], delimiter: str = ","
) -> np.ndarray:
    """Samples of a table of numbers, float64 [rows, columns]; NaN for empty cells and for the texts
    `missing` (in lower case).

    Raises:
        UserError: as `read_rows` and `parse_number`; the fault of the first row that has one, since
            a lost row would shift all that follow.
    """
    cells: array[float] = array("d")
    for row in read_rows(path, columns, delimiter=delimiter):
        if isinstance(row, Finding):
            raise input_error(
                row.code, row.problem, "a lost row would shift what follows", row=row.row
            )
        for name, cell in zip(columns, row.cells, strict=True):
            try:
                value = None if cell.strip().lower() in missing else parse_number(cell)
            except UserError as error:
                problem = f"the cell of row {row.row} {error.problem}"
                raise input_error(
                    error.code, problem, error.requirement, field=name, row=row.row
                ) from None
            cells.append(math.nan if value is None else value)
    return (
        np.frombuffer(cells, np.float64).reshape(-1, len(columns))
        if len(cells)
        else np.zeros((0, len(columns)))
    )


def _read_unique_rows(
    path: Path, names: Sequence[str], key: Sequence[int], delimiter: str
) -> Iterator[TableRow | Finding]:
    """Two passes: the first keeps a hash of key and record of each row.

    Raises UserError: identifier, when most rows share their key with rows that differ.
    """
    columns = range(len(names))
    field = ", ".join(names[i] for i in key)
    first: dict[bytes, bytes] = {}
    ambiguous: set[bytes] = set()
    counts: Counter[bytes] = Counter()
    for item in _read_records(path, names, columns, delimiter):
        if isinstance(item, TableRow):
            mark, digest = _hash_cells(item.cells[i].strip() for i in key), _hash_cells(item.cells)
            counts[mark] += 1
            if first.setdefault(mark, digest) != digest:
                ambiguous.add(mark)
    if len(ambiguous) > 1 and 2 * sum(counts[mark] for mark in ambiguous) > counts.total():
        problem = f"most of the {counts.total()} rows share their {safe_text(field)} with a row that differs"
        raise input_error(
            Reason.IDENTIFIER, problem, "it identifies no row: are columns swapped?", field=field
        )
    seen: set[bytes] = set()
    for item in _read_records(path, names, columns, delimiter):
        if isinstance(item, Finding):
            yield item
            continue
        mark = _hash_cells(item.cells[i].strip() for i in key)
        if not all(item.cells[i].strip() for i in key):
            yield Finding(
                Reason.IDENTIFIER,
                f"the value in row {item.row} is empty",
                "every row needs one",
                field=field,
                row=item.row,
            )
        elif mark in ambiguous:
            problem = f"the value in row {item.row} is also in other rows, which differ"
            yield Finding(
                Reason.DUPLICATE_KEY, problem, "none of them is used", field=field, row=item.row
            )
        elif mark in seen:
            yield input_warning(Reason.DUPLICATES, "repeats a row above", "used once", row=item.row)
        else:
            seen.add(mark)
            yield item


def _hash_cells(cells: Iterable[str]) -> bytes:
    return blake2b("\0".join(cells).encode(), digest_size=16).digest()


def _read_records(
    path: Path, names: Sequence[str], required: Sequence[int], delimiter: str
) -> Iterator[TableRow | Finding]:
    """All records with the cells of all columns; those that are not `required` may be empty."""
    if _is_parquet(path):
        yield from _read_parquet_rows(path, names, required)
        return
    with closing(read_lines(path)) as lines:
        parse_header(lines, delimiter)
        for row, cells, ended in parse_records(lines, len(names), delimiter):
            if isinstance(cells, UserError):
                cut = not ended and cells.code == Reason.ROW_WIDTH
                yield Finding(
                    Reason.TRUNCATED if cut else cells.code,
                    cells.problem,
                    cells.requirement,
                    row=row,
                )
            else:
                yield TableRow(row, tuple(cells))


def _find_columns(names: Sequence[str], wanted: Sequence[str]) -> list[int]:
    """Positions of the wanted columns.

    Raises:
        UserError: header, schema. Names found are shown only when the first line is the header
            beyond doubt: else it holds a patient's row.
    """
    missing = [name for name in wanted if name not in names]
    repeated = [name for name in wanted if names.count(name) > 1]
    if repeated:
        problem = f"the column {safe_text(repeated[0])} occurs {names.count(repeated[0])} times"
        raise input_error(Reason.HEADER, problem, "expected once", field=repeated[0])
    folded = {name.casefold(): name for name in names}
    if respelled := [
        (name, folded[name.casefold()]) for name in missing if name.casefold() in folded
    ]:
        problem = (
            f"the column {safe_text(respelled[0][0])} is written {safe_text(respelled[0][1])}"
            + (f", and {len(respelled) - 1} more" if len(respelled) > 1 else "")
        )
        raise input_error(
            Reason.SCHEMA,
            problem,
            "case counts in this table",
            "Rename the columns in its header",
            field=respelled[0][0],
            row=1,
        )
    if missing and len(missing) == len(wanted):
        problem = f"the first line names none of the columns wanted ({list_names(wanted, 5)})"
        raise input_error(
            Reason.HEADER, problem, "is the header line absent, or the separator another?"
        )
    if missing:
        problem = f"the column{'s' * (len(missing) > 1)} {list_names(missing)} {'are' if len(missing) > 1 else 'is'} missing"
        raise input_error(Reason.SCHEMA, problem, f"found {list_names(names)}", field=missing[0])
    return [names.index(name) for name in wanted]


def group_findings(findings: Iterable[Finding]) -> list[Finding]:
    """The findings of one code, level and file as one: the first, with their number and up to five
    of their rows as examples.
    """
    groups: dict[tuple[str, str, str | None], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.code, finding.level, finding.file), []).append(finding)
    grouped = []
    for first, *others in groups.values():
        rows = [str(one.row) for one in (first, *others) if one.row is not None]
        count = sum(one.count for one in (first, *others))
        more = f" (and {len(others)} more rows)" if others else ""
        grouped.append(
            replace(first, problem=first.problem + more, count=count, examples=tuple(rows[:5]))
        )
    return grouped


# --- frames


def split_table(path: Path, size: int, *, delimiter: str = ",") -> list[TableSpan | None]:
    """Spans of about `size` bytes for `read_frames`; one None where a table cannot be split. Raises
    UserError: as `read_names`.
    """
    names = read_names(path, delimiter=delimiter)
    if not _is_parquet(path):
        with locate_errors(path, replace=False):
            return split_text(path, len(names), delimiter, size)
    import pyarrow.parquet as pq

    spans: list[TableSpan | None] = []
    row = first = begin = held = 0
    metadata = pq.read_metadata(path)  # it has been read for the names
    for i in range(metadata.num_row_groups):
        row, held = (
            row + metadata.row_group(i).num_rows,
            held + metadata.row_group(i).total_byte_size,
        )
        if held >= size or i == metadata.num_row_groups - 1:
            spans.append(TableSpan(begin, i + 1, first))
            begin, first, held = i + 1, row, 0
    return spans or [None]


def read_frames(
    path: Path,
    columns: Sequence[str],
    *,
    delimiter: str = ",",
    quotes: bool = True,
    span: TableSpan | None = None,
    categories: Collection[str] = (),
) -> Iterator[TableBlock]:
    """A long table in stretches of about 16 MiB, every cell text: the same cells as `read_rows`,
    much faster, in bounded memory.

    Args:
        path: as for `read_rows`.
        columns: names of the columns to return, in this order.
        delimiter: of csv.
        quotes: False: a quote is an ordinary character (tab-separated exports of vocabularies).
        span: of `split_table`, to read only that.
        categories: columns of csv with few distinct texts, read as Categorical, each block with its
            own.

    Yields:
        Blocks, in the order of the file. Of a Parquet file every column is given as
        text: dates ISO, time stamps with a zone as the civil time there.

    Raises:
        UserError: as `read_rows`; csv_syntax when the independent count of the records differs from
            what was read.
    """
    names = read_names(path, delimiter=delimiter)
    with locate_errors(path, replace=False):
        selected = _find_columns(names, columns)
        if _is_parquet(path):
            blocks = _read_parquet_frames(path, selected, columns, span)
        else:
            blocks = _read_csv_frames(
                path,
                len(names),
                selected,
                columns,
                delimiter,
                quotes=quotes,
                span=span,
                categories=categories,
            )
        seen = read = 0
        for block in blocks:
            seen += block.seen
            read += block.frame.height + len(block.faults)
            yield block
        if seen != read:
            raise input_error(
                Reason.CSV_SYNTAX,
                f"{seen} records were counted, {read} read",
                "expected the same number",
            )


def refuse_faults(block: TableBlock, file: str) -> None:
    """Refuse a table with a malformed record: its other records cannot be trusted either.

    Raises UserError: csv_syntax, row_width, truncated.
    """
    if block.faults:
        first, *others = (finding.at(file) for finding in group_findings(block.faults))
        wanted = first.requirement if first.code == Reason.ROW_WIDTH else "expected a record"
        action = "Correct the table; none of it is used"
        raise input_error(
            first.code, first.problem, wanted, action, file=file, row=first.row, details=others
        )


def strip_blanks(column: pl.Expr) -> pl.Expr:
    """Text without surrounding blanks; null where empty."""
    import polars as pl

    text = column.str.strip_chars()
    return pl.when(text != "").then(text)


def read_table(path: Path, file: str, columns: Mapping[str, str], mark: str = ",") -> pl.DataFrame:
    """A table that fits in memory: `row` and the columns by key, text without surrounding blanks,
    null where empty.

    Args:
        path: as for `read_frames`.
        file: its name in messages.
        columns: key -> name in the header.
        mark: delimiter of csv.

    Raises:
        UserError: as `refuse_faults` and `read_frames`.
    """
    import polars as pl

    parts = []
    for block in read_frames(path, tuple(columns.values()), delimiter=mark):
        refuse_faults(block, file)
        parts.append(
            block.frame.select(
                "row", *(strip_blanks(pl.col(name)).alias(key) for key, name in columns.items())
            )
        )
    return pl.concat(parts)


def read_option_table(
    path: Path, columns: Sequence[str], option: str, wanted: str, *, integers: Collection[str] = ()
) -> pl.DataFrame:
    """The table that an option names, as by `read_table`; the columns `integers` are Int64.
    `wanted` describes it in messages.

    Raises UserError (config, exit 2) with the row, where the table or a number cannot be read.
    """
    import polars as pl

    try:
        frame = read_table(path, str(path), {name: name for name in columns})
        for name in integers:
            text, number = frame[name], frame[name].cast(pl.Int64, strict=False)
            if (wrong := frame["row"].filter(text.is_not_null() & number.is_null())).len():
                problem = f"the cell of row {wrong[0]} is not a whole number"
                raise input_error(
                    Reason.NOT_NUMERIC, problem, f"expected one in {name}", row=wrong[0]
                )
            frame = frame.with_columns(number)
    except UserError as error:
        if error.exit_code != Exit.REFUSED:
            raise
        requirement = "; ".join(filter(None, (error.requirement, wanted)))
        raise usage_error(
            error.problem, requirement, error.hint, file=str(path), field=option, row=error.row
        ) from error
    return frame


def _read_csv_frames(
    path: Path,
    width: int,
    selected: Sequence[int],
    columns: Sequence[str],
    delimiter: str,
    *,
    quotes: bool,
    span: TableSpan | None,
    categories: Collection[str],
) -> Iterator[TableBlock]:
    import polars as pl

    pattern = record_pattern(width, delimiter)
    # of the parser, and of the count: lines whose record may go on in the next block
    waiting: list[tuple[int, str, bool]] = []
    uncounted: list[str] = []
    row = 0 if span is None else span.row  # lines so far
    below_header = row > 0
    for text, last in read_blocks(path, span):
        if not below_header:
            blank = len(text) - len(text.lstrip())
            below_header = blank < len(text)
            end = text.find(b"\n", blank) + 1 or len(text)
            row += text.count(b"\n", 0, end)
            text = text[end:]
        parts: list[pl.DataFrame] = []
        faults: list[Finding] = []
        seen = 0
        category = (
            pl.Categorical(pl.Categories.random())
            if hasattr(pl, "Categories")
            else pl.Categorical()
        )
        kinds = dict.fromkeys(categories, category)
        for piece, plain in split_plain_blocks(text, width, delimiter, quotes=quotes):
            if plain is not None and not waiting and not uncounted:
                parts.append(
                    _parse_plain_block(
                        piece, row, plain, width, selected, columns, kinds, delimiter, quotes=quotes
                    )
                )
                row += plain
                seen += plain
                continue
            lines = piece.removesuffix(b"\n").split(b"\n")
            numbered = [
                (row + i, line, i < len(lines) or piece.endswith(b"\n"))
                for i, line in enumerate(lines, 1)
            ]
            row += len(lines)
            if not quotes:
                records = split_unquoted(numbered, width, delimiter)
                seen += sum(bool(line.strip()) for line in lines)
            else:
                records = parse_records(numbered, width, delimiter, waiting, last=False)
                seen += sum(count_records(map(bytes.decode, lines), pattern, uncounted, last=False))
            _collect_records(records, parts, faults, selected, columns)
        if last:
            _collect_records(
                parse_records([], width, delimiter, waiting), parts, faults, selected, columns
            )
            seen += sum(count_records([], pattern, uncounted))
        frame = pl.concat(
            [
                part.with_columns(pl.col(name).cast(category) for name in categories)
                for part in parts
            ]
            or [_make_frame([], [], columns)]
        )
        yield TableBlock(frame, faults, seen, b" " in text or b"\t" in text)


def _collect_records(
    records: Iterable[ParsedRecord],
    parts: list[pl.DataFrame],
    faults: list[Finding],
    selected: Sequence[int],
    columns: Sequence[str],
) -> None:
    """Appends the valid records to `parts` as a frame, and the others to `faults`."""
    kept: list[tuple[int, list[str]]] = []
    for row, cells, ended in records:
        if isinstance(cells, UserError):
            cut = not ended and cells.code == Reason.ROW_WIDTH
            faults.append(
                Finding(
                    Reason.TRUNCATED if cut else cells.code,
                    cells.problem,
                    cells.requirement,
                    row=row,
                )
            )
        else:
            kept.append((row, cells))
    if kept:
        parts.append(
            _make_frame(
                [row for row, _ in kept],
                [[cells[i] or None for _, cells in kept] for i in selected],
                columns,
            )
        )


def _make_frame(
    rows: Sequence[int], cells: Sequence[Sequence[str | None]], columns: Sequence[str]
) -> pl.DataFrame:
    import polars as pl

    texts = cells or [[] for _ in columns]
    schema = {"row": pl.Int64, **dict.fromkeys(columns, pl.String)}
    return pl.DataFrame({"row": rows, **dict(zip(columns, texts, strict=True))}, schema=schema)


def _parse_plain_block(
    text: bytes,
    row: int,
    height: int,
    width: int,
    selected: Sequence[int],
    columns: Sequence[str],
    kinds: Mapping[str, pl.Categorical],
    delimiter: str,
    *,
    quotes: bool,
) -> pl.DataFrame:
    """The frame of a text in which each line is a record of `width` cells; `row` lines precede
    it.
    """
    import polars as pl

    frame = pl.read_csv(
        text,
        has_header=False,
        columns=sorted(set(selected)),
        schema={str(i): pl.String for i in range(width)}
        | {str(i): kinds[name] for i, name in zip(selected, columns, strict=True) if name in kinds},
        separator=delimiter,
        quote_char='"' if quotes and b'"' in text else None,
    )
    if frame.height != height:
        raise input_error(
            Reason.CSV_SYNTAX,
            f"{height} records were counted, {frame.height} read",
            "expected the same number",
        )
    named = [pl.col(str(i)).alias(name) for i, name in zip(selected, columns, strict=True)]
    return frame.select(
        pl.int_range(row + 1, row + 1 + height, dtype=pl.Int64).alias("row"), *named
    )


# --- Parquet


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() in {".parquet", ".pq"}


def _read_parquet_rows(
    path: Path, names: Sequence[str], required: Sequence[int]
) -> Iterator[TableRow]:
    """Rows of a Parquet file, every required column as text: missing cells are empty, dates ISO,
    numbers as Arrow prints them.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    row = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(
                8192, columns=[file.schema_arrow.names[i] for i in required]
            ):
                batch.validate(full=True)
                texts: list[list[str]] = [[""] * len(batch) for _ in names]
                for i, column in zip(required, batch.columns, strict=True):
                    texts[i] = pc.fill_null(_to_text(column), "").to_pylist()
                for cells in zip(*texts, strict=True) if texts else [()] * len(batch):
                    row += 1
                    yield TableRow(row, cells)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise_system_error(error, path, stored=False)
        problem = f"does not read as Parquet after row {row} ({type(error).__name__})"
        raise input_error(
            Reason.CORRUPT, problem, "expected columns of text, numbers and dates"
        ) from None


def _to_text(column: pa.Array) -> pa.Array:
    """A column as text: dates ISO, time stamps with a zone as the civil time there."""
    import pyarrow as pa
    import pyarrow.compute as pc

    zoned = pa.types.is_timestamp(column.type) and column.type.tz is not None
    return pc.cast(pc.local_timestamp(column) if zoned else column, pa.string())


def _read_parquet_frames(
    path: Path, selected: Sequence[int], columns: Sequence[str], span: TableSpan | None = None
) -> Iterator[TableBlock]:
    import polars as pl
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0 if span is None else span.row
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            groups = (
                range(file.metadata.num_row_groups)
                if span is None
                else range(span.start, span.stop)
            )
            rows_end = row + sum(file.metadata.row_group(i).num_rows for i in groups)
            stored = [file.schema_arrow.names[i] for i in selected]
            for batch in file.iter_batches(1 << 19, row_groups=list(groups), columns=stored):
                batch.validate(full=True)  # texts that are not UTF-8 end polars
                texts = {}
                for name, column in zip(
                    columns, (batch.column(name) for name in stored), strict=True
                ):
                    texts[name] = pl.Series(name, _to_text(column), pl.String)
                rows = pl.int_range(
                    row + 1, row + 1 + len(batch), dtype=pl.Int64, eager=True
                ).alias("row")
                row += len(batch)
                yield TableBlock(pl.DataFrame([rows, *texts.values()]), [], len(batch))
            if row != rows_end:
                raise input_error(
                    Reason.CORRUPT,
                    f"{row} rows were read, its footer states {rows_end}",
                    "expected the same number",
                )
    except (OSError, ValueError, pa.ArrowException) as error:
        raise_system_error(error, path, stored=False)
        problem = f"does not read as Parquet after row {row} ({type(error).__name__})"
        raise input_error(
            Reason.CORRUPT, problem, "expected columns of text, numbers and dates"
        ) from None


# --- cells


def parse_number(text: str) -> float | None:
    """A cell as a finite number; None for an empty one. Raises UserError: not_numeric, non_finite,
    physical_range, without its text.
    """
    text = text.strip()
    if not text:
        return None
    if NOT_FINITE.fullmatch(text):
        raise input_error(Reason.NON_FINITE, "is not finite", "expected a finite number")
    if not NUMBER.fullmatch(text):
        raise input_error(Reason.NOT_NUMERIC, "is not a number", "expected a finite number")
    if abs(value := float(text)) > MAX_FLOAT32:
        raise input_error(Reason.NON_FINITE, "is not finite in float32", "expected a finite number")
    if abs(value) > LARGEST:
        raise input_error(
            Reason.PHYSICAL_RANGE,
            f"is beyond {LARGEST:g}",
            "expected a value whose square float32 holds",
        )
    return value


def parse_integer(text: str) -> int | None:
    """A cell as an integer ('5' and '5.0', as tools write columns with gaps); None for an empty
    one.

    Raises UserError: not_numeric, without the cell's text.
    """
    text = text.strip()
    if not text:
        return None
    if not INTEGER.fullmatch(text):
        raise input_error(Reason.NOT_NUMERIC, "is not a whole number", "expected one")
    return int(text.split(".")[0])


def parse_numbers(row: TableRow, columns: Sequence[str]) -> np.ndarray | Finding:
    """All cells of a row as finite numbers, float64 [len(cells)]; `columns` are their names, for
    the finding.

    A finding of level error instead for the first cell that is missing_values, not_numeric,
    non_finite or beyond the physical_range.
    """
    plain = ",".join(row.cells)
    if not plain.translate(PLAIN):
        with suppress(ValueError):
            values = np.array(list(map(float, row.cells)), np.float64)
            if np.abs(values).max(initial=0.0) <= LARGEST:
                return values
    found = []
    for name, cell in zip(columns, row.cells, strict=True):
        try:
            value = parse_number(cell)
        except UserError as error:
            return Finding(
                error.code,
                f"the cell of row {row.row} {error.problem}",
                error.requirement,
                field=name,
                row=row.row,
            )
        if value is None:
            return Finding(
                Reason.MISSING_VALUES,
                f"the cell of row {row.row} is empty",
                "expected a number",
                field=name,
                row=row.row,
            )
        found.append(value)
    return np.array(found, np.float64)
