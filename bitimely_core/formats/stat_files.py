"""Reads tables of Stata, SAS and SPSS as text: names and types of columns, and stretches of rows.

pyreadstat (the extra `stat`) does the reading. Missing cells are null, dates and times ISO by the
format of their column, and whole numbers have no fraction: these programs store every number as a
double.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import date, time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitimely_core.errors import Reason, UserError, input_error, usage_error
from bitimely_core.formats.parquet import TextBatch
from bitimely_core.formats.text import require_plain_names
from bitimely_core.system_errors import raise_system_error

if TYPE_CHECKING:
    import polars as pl

READERS = {  # ending -> function of pyreadstat
    ".dta": "read_dta",
    ".sas7bdat": "read_sas7bdat",
    ".xpt": "read_xport",
    ".sav": "read_sav",
    ".zsav": "read_sav",
    ".por": "read_por",
}
NUMBER = "number"  # type of a column that is not text


def is_stat_file(path: Path) -> bool:
    """Whether a file is one of Stata, SAS or SPSS, by its ending."""
    return path.suffix.lower() in READERS


def _find_reader(path: Path) -> tuple[Any, Callable[..., Any]]:
    """pyreadstat, and its function for a file. Raises UserError: missing_extra (exit 2)."""
    try:
        import pyreadstat
    except ImportError as error:
        raise_system_error(error)
        raise usage_error(
            "pyreadstat is not installed, which reads files of Stata, SAS and SPSS",
            hint="Install it with `pip install 'bitimely[stat]'`, or write the table as csv",
            code=Reason.MISSING_EXTRA,
            file=path.name,
        ) from None
    return pyreadstat, getattr(pyreadstat, READERS[path.suffix.lower()])


def read_stat_types(path: Path) -> dict[str, str]:
    """Type of each column: 'text', or `NUMBER`, also of dates.

    Raises UserError: missing_extra (exit 2), corrupt, label_chars.
    """
    return {
        name.strip(): "text" if kind == "string" else NUMBER
        for name, kind in _read_metadata(path).readstat_variable_types.items()
    }


def read_value_labels(path: Path, column: str) -> dict[str, str]:
    """Cell as `read_stat_batches` writes it -> the label that the file gives to it, as 1 -> male.

    Raises UserError: as `read_stat_types`.
    """
    labels = _read_metadata(path).variable_value_labels.get(column, {})
    return {_write_number(value): str(label) for value, label in labels.items()}


def _read_metadata(path: Path) -> Any:
    pyreadstat, read = _find_reader(path)
    try:
        _, metadata = read(path, metadataonly=True, output_format="dict")
    except _list_faults(pyreadstat) as error:
        raise _stat_error(error, path) from None
    require_plain_names(tuple(metadata.column_names))
    return metadata


def read_stat_batches(path: Path, columns: Sequence[int], size: int) -> Iterator[TextBatch]:
    """The rows of a file in stretches of up to `size` rows.

    `columns`: positions of those to read, in the order of the result. Raises UserError: as
    `read_stat_types`.
    """
    pyreadstat, read = _find_reader(path)
    metadata = _read_metadata(path)
    names = [metadata.column_names[i] for i in columns]
    before, rows = 0, size
    try:
        while rows == size:  # SAS transport files do not state their number of rows
            cells, _ = read(
                path, usecols=names, output_format="dict", row_offset=before, row_limit=size
            )
            texts = [_write_column(cells[name]) for name in names]
            rows = len(texts[0]) if texts else 0
            yield TextBatch(before, rows, [text.to_arrow() for text in texts])
            before += rows
    except _list_faults(pyreadstat) as error:
        raise _stat_error(error, path) from None


def _write_column(cells: Sequence[Any]) -> pl.Series:
    """A column as text, null where empty."""
    import polars as pl

    example = next((cell for cell in cells if cell is not None and cell == cell), None)
    if example is None:
        return pl.repeat(None, len(cells), dtype=pl.String, eager=True)
    if isinstance(example, int | float):
        column = pl.Series(cells, dtype=pl.Float64, strict=False).fill_nan(None)
        whole = column.cast(pl.Int64, strict=False)
        is_whole = (column == whole).fill_null(value=False)
        return whole.cast(pl.String).zip_with(is_whole, column.cast(pl.String))
    if isinstance(example, date | time):  # a datetime is a date
        return pl.Series(cells, strict=False).cast(pl.String)
    text = pl.Series(cells, dtype=pl.String, strict=False)
    return text.set(text == "", None)


def _write_number(value: object) -> str:
    """A number as `_write_column` writes it."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _list_faults(pyreadstat: Any) -> tuple[type[Exception], ...]:
    """What pyreadstat raises for files that it cannot read."""
    faults = (pyreadstat.ReadstatError, pyreadstat.PyreadstatError)
    return (*faults, OSError, ValueError, OverflowError)


def _stat_error(error: Exception, path: Path) -> UserError:
    raise_system_error(error, path, stored=False)
    text = f"does not read as {path.suffix.lower()} ({type(error).__name__})"
    return input_error(Reason.CORRUPT, text, file=str(path))
