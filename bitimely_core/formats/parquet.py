"""Reads Parquet files as text: names and types of columns, and stretches of rows.

Missing cells are null, dates ISO, time stamps with a zone the civil time there, and numbers as
Arrow prints them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bitimely_core.errors import Reason, UserError, input_error
from bitimely_core.formats.source import locate_errors
from bitimely_core.formats.table_text import TableSpan
from bitimely_core.formats.text import require_plain_names
from bitimely_core.system_errors import raise_system_error

if TYPE_CHECKING:
    import pyarrow as pa


class TextBatch(NamedTuple):
    """A stretch of rows."""

    before: int  # rows of the file before it
    rows: int
    columns: list[pa.Array]  # of strings


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet, by its ending."""
    return path.suffix.lower() in {".parquet", ".pq"}


def read_column_types(path: Path) -> dict[str, str]:
    """Type of each column: 'text', else the name of the Arrow type.

    Raises UserError: corrupt, header, label_chars.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _parquet_error(error, path, "does not open as Parquet") from None
    with locate_errors(path):
        require_plain_names(schema.names)
        if len({name.strip() for name in schema.names}) < len(schema):
            problem = "columns have equal names"
            raise input_error(Reason.HEADER, problem, "expected different ones")
    return {field.name.strip(): _name_type(field.type) for field in schema}


def _name_type(kind: pa.DataType) -> str:
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return "text" if kind in {pa.string(), pa.large_string(), pa.string_view()} else str(kind)


def split_row_groups(path: Path, size: int) -> list[TableSpan | None]:
    """Spans of row groups of about `size` bytes in memory; one None for a file without rows."""
    import pyarrow.parquet as pq

    spans: list[TableSpan | None] = []
    metadata = pq.read_metadata(path)  # it has been read for the names
    row = first = begin = held = 0
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        row, held = row + group.num_rows, held + group.total_byte_size
        if held >= size or i == metadata.num_row_groups - 1:
            spans.append(TableSpan(begin, i + 1, first))
            begin, first, held = i + 1, row, 0
    return spans or [None]


def read_batches(
    path: Path, columns: Sequence[int], size: int, span: TableSpan | None = None
) -> Iterator[TextBatch]:
    """The rows of a file, or of a span of it, in stretches of up to `size` rows.

    `columns`: positions of those to read, in the order of the result. Raises UserError: corrupt.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0 if span is None else span.row
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            groups = range(file.num_row_groups) if span is None else range(span.start, span.stop)
            end = row + sum(file.metadata.row_group(i).num_rows for i in groups)
            names = [file.schema_arrow.names[i] for i in columns]
            for batch in file.iter_batches(size, row_groups=list(groups), columns=names):
                batch.validate(full=True)  # texts that are not UTF-8 end polars
                texts = [_to_text(batch.column(name)) for name in names]
                yield TextBatch(row, len(batch), texts)
                row += len(batch)
    except (OSError, ValueError, pa.ArrowException) as error:
        problem = f"does not read as Parquet after row {row}"
        wanted = "expected columns of text, numbers and dates"
        raise _parquet_error(error, path, problem, wanted) from None
    if row != end:
        problem = f"{row} rows were read, its footer states {end}"
        raise input_error(Reason.CORRUPT, problem, "expected the same number")


def _parquet_error(error: Exception, path: Path, problem: str, requirement: str = "") -> UserError:
    raise_system_error(error, path, stored=False)
    text = f"{problem} ({type(error).__name__})"
    return input_error(Reason.CORRUPT, text, requirement, file=str(path))


def _to_text(column: pa.Array) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_floating(column.type):
        column = _drop_fractions(column)
    zoned = pa.types.is_timestamp(column.type) and column.type.tz is not None
    return pc.cast(pc.local_timestamp(column) if zoned else column, pa.string())


def _drop_fractions(column: pa.Array) -> pa.Array:
    """Integers where all numbers of a column are whole, whose text has no exponent."""
    import pyarrow as pa
    import pyarrow.compute as pc

    numbers = pc.if_else(pc.is_nan(column), None, column)
    with suppress(pa.ArrowInvalid):
        return pc.cast(numbers, pa.int64())
    return column
