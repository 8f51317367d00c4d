"""Refuses texts whose first line does not name their columns: with a title above the names, or with
columns of fixed widths. The advice says what to change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from bitimely_core.claims.sources.columns import find_names
from bitimely_core.errors import Reason, UserError, input_error
from bitimely_core.formats.source import Source
from bitimely_core.formats.table_layout import DELIMITERS, read_head, split_line
from bitimely_core.formats.tables import is_binary

MARKS = tuple(mark for mark in DELIMITERS if mark.strip() or mark == "\t")
TITLE_LINES = 30  # below which the names of the columns are looked for
FEW_LINES = 3  # from which on lines without a mark are taken for a table


def refuse_titles(
    source: Source, files: Iterable[str], accepted: Mapping[str, Sequence[str]]
) -> None:
    """Raises UserError: header, where a later line than the first names the columns. `accepted`:
    key -> names; that of the subject and another one show the line.
    """
    for path in files:
        for i, line in enumerate(_read_lines(source, path), 1):
            if not any(_names_columns(split_line(line, mark), accepted) for mark in MARKS):
                continue
            if i == 1:
                break
            raise input_error(
                Reason.HEADER,
                f"the names of the columns are in line {i}",
                "expected them in the first line",
                f"Delete what stands above it, as with: tail -n +{i} FILE",
                file=path,
                row=i,
            )


def _names_columns(cells: Sequence[str], accepted: Mapping[str, Sequence[str]]) -> bool:
    present = {key for key, names in accepted.items() if find_names(cells, names)}
    return "subject" in present and len(present) > 1


def refuse_fixed_widths(source: Source, files: Iterable[str]) -> None:
    """Raises UserError: header, for a table in whose lines nothing separates the cells."""
    for path in files:
        lines = list(filter(str.strip, _read_lines(source, path)))
        if len(lines) < FEW_LINES or any(mark in line for line in lines for mark in MARKS):
            continue
        raise input_error(
            Reason.HEADER,
            "no comma, semicolon, tab or bar separates its columns",
            "expected such a mark: columns of fixed widths are not read",
            "Write it as .csv by the widths of its description, as with pandas: read_fwf(FILE, "
            "widths=[8, 8, 6], names=['patient_id', 'date', 'icd10'], dtype=str)"
            ".to_csv('claims.csv', index=False), and leave that alone in the folder",
            file=path,
        )


def _read_lines(source: Source, file: str) -> list[str]:
    """The first lines of a text; none of one that cannot be read, which is said when it is used."""
    with suppress(UserError):
        path = source.path(file)
        return [] if is_binary(path) else read_head(path).lines[:TITLE_LINES]
    return []
