"""How pages write text and numbers: foreign text made safe for HTML, Markdown and LaTeX, numbers
with their decimals, names of files, and values for JSON.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bitimely_core.errors import clean

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def clean_text(value: object, limit: int = 2000) -> str:
    """Foreign text on one line, without characters that XML, a terminal or a spreadsheet would
    interpret.
    """
    text = re.sub(r"[\n\r\t]+", " ", str(value))
    return clean(re.sub("[\ufffe\uffff]", "?", text), limit)


def format_power(exponent: int) -> str:
    """A power of ten, such as 10⁻⁷."""
    return "10" + str(exponent).translate(SUPERSCRIPTS)


def format_number(value: float | None, digits: int | None = None) -> str:
    """A displayed number: three decimals where they suffice, a dash where it is not defined.

    >>> format_number(0.8421), format_number(12345), format_number(3.2e-7), format_number(None)
    ('0.842', '12,345', '3.2×10⁻⁷', '–')
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return _format_finite(value, digits).replace("-", "−")


def _format_finite(value: float, digits: int | None) -> str:
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    size = abs(value)
    if digits is None and size and not 1e-3 <= size < 1e6:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}×{format_power(int(exponent))}"
    if digits is None:
        digits = sum(size < limit for limit in (10, 100, 1000))
    return f"{value:,.{digits}f}"


def make_slug(name: str, used: set[str]) -> str:
    """`name` as a file name and anchor that is not in `used`, to which it is added."""
    base = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60] or "figure"
    slug, number = base, 1
    while slug in used:
        number += 1
        slug = f"{base}-{number}"
    used.add(slug)
    return slug


def to_json(value: Any) -> Any:
    """`value` for JSON: arrays as lists, NaN and infinities as null, keys as text."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): to_json(part) for key, part in value.items()}
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)
    if isinstance(value, list | tuple):
        return list(map(to_json, value))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float) else str(value)


def is_number(value: object) -> bool:
    """Whether a value is a number; a truth value is none."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def is_numeric(values: Sequence[Any]) -> bool:
    """Whether all values of a column are numbers or None, and at least one is a number."""
    present = [value for value in values if value is not None]
    return bool(present) and all(map(is_number, present))


def markdown_row(cells: Iterable[str]) -> str:
    """A row of a Markdown table, of cells that are Markdown."""
    return f"| {' | '.join(cells)} |"


def markdown_text(value: object) -> str:
    """Foreign text as Markdown shows it, also in a cell of a table; addresses do not become
    links.
    """
    special = r"([\\`*_{}\[\]#|<>~&]|:(?=//)|(?<=www)\.)"
    return re.sub(special, r"\\\1", clean_text(value), flags=re.IGNORECASE)


def tex_text(value: object) -> str:
    """Foreign text as LaTeX prints it, every special character written out."""
    special = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "–": "--",
        "−": "$-$",
    }
    special |= {sign: f"\\{sign}" for sign in "&%$#_{}"}
    special |= {sign: f"{{{sign}}}" for sign in "<>|\"'`[]"}
    return "".join(special.get(sign, sign) for sign in clean_text(value))


def text_cell(
    value: float | None, text: str, note: str = "", **numbers: float | None
) -> dict[str, float | str | None]:
    """A cell that sorts by `value` and shows `text` with `note` below it.

    `numbers` are further columns of its data.
    """
    return {"value": value, "text": text, "note": note, **numbers}


def scale_number(value: float | None, factor: float) -> float | None:
    """A number times `factor`; None stays None."""
    return None if value is None else value * factor


def format_duration(seconds: float) -> str:
    """A length of time: `2.5 h`, `12.0 min`, `30 s`."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.{1 if seconds < 100 * size else 0}f} {unit}"
    return f"{seconds:.3g} s"
