"""Displayed text and numbers, names of files, values for JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bitimely_core.errors import clean


def clean_text(value: object, limit: int = 2000) -> str:
    """Foreign text on one line, without characters that XML, a terminal or a spreadsheet would
    interpret.
    """
    return clean(
        re.sub(r"[\n\r\t]+", " ", str(value)).replace("\ufffe", "?").replace("\uffff", "?"), limit
    )


def format_number(value: float | None, digits: int | None = None) -> str:
    """A displayed number: three decimals where they suffice, a dash where it is not defined.

    >>> number(0.8421), number(12345), number(3.2e-7), number(None)
    ('0.842', '12,345', '3.2×10⁻⁷', '–')
    """
    if value is None or not math.isfinite(value):
        return "–" if value is None or math.isnan(value) else ("∞" if value > 0 else "−∞")
    if isinstance(value, int | np.integer):
        return f"{value:,}".replace("-", "−")
    size = abs(value)
    if digits is None and size and not 1e-3 <= size < 1e6:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}×10".replace("-", "−") + str(int(exponent)).translate(
            str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
        )
    places = (
        (3 if size < 10 else 2 if size < 100 else 1 if size < 1000 else 0)
        if digits is None
        else digits
    )
    return f"{value:,.{places}f}".replace("-", "−")


def make_slug(name: str, used: set[str]) -> str:
    """`name` as a file name and anchor that is not in `used`, to which it is added."""
    base = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60] or "figure"
    found, k = base, 2
    while found in used:
        found, k = f"{base}-{k}", k + 1
    used.add(found)
    return found


def to_json(value: Any) -> Any:
    """`value` for JSON: arrays as lists, NaN and infinities as null, keys as text."""
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, np.ndarray):
        return to_json(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [
            to_json(v)
            for v in (sorted(value, key=str) if isinstance(value, set | frozenset) else value)
        ]
    if isinstance(value, np.generic):
        return to_json(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def is_numeric(values: Sequence[Any]) -> bool:
    """Whether all values of a column are numbers or None, and at least one is a number."""
    return all(
        v is None or (isinstance(v, int | float | np.number) and not isinstance(v, bool))
        for v in values
    ) and any(v is not None for v in values)


def markdown_text(value: object) -> str:
    """Foreign text as Markdown shows it, in a cell of a table too; addresses do not become
    links.
    """
    return re.sub(
        r"([\\`*_{}\[\]#|<>~&]|:(?=//)|(?<=www)\.)", r"\\\1", clean_text(value), flags=re.IGNORECASE
    )


def tex_text(value: object) -> str:
    """Foreign text as LaTeX prints it, every special character written out."""
    special = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "–": "--",
        "−": "$-$",
    }
    special |= {c: f"\\{c}" for c in "&%$#_{}"} | {c: f"{{{c}}}" for c in "<>|\"'`[]"}
    return "".join(special.get(c, c) for c in clean_text(value))


def text_cell(
    value: float | None, text: str, note: str = "", **numbers: float | None
) -> dict[str, float | str | None]:
    """A cell that sorts by `value` and shows `text` with `note` below it; `numbers` are further
    columns of its data.
    """
    return {"value": value, "text": text, "note": note, **numbers}
