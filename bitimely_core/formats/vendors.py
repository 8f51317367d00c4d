"""Tables of samples as makers of devices write them: the forms of `vendors.toml`."""

from __future__ import annotations

import fnmatch
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import NamedTuple

FORM_LINES = 60  # by which a form is known
NO_COLUMNS: Mapping[str, str] = MappingProxyType({})


class VendorForm(NamedTuple):
    """One [[form]]; `vendors.toml` says what each key means."""

    title: str
    head: str
    file: str = ""
    skip: int | None = None
    rate: str | float = ""
    interval: str = ""
    start: str = ""
    clock: Sequence[str] = ()
    names: str | Sequence[str] = ()
    last: str = ""
    columns: Mapping[str, str] = NO_COLUMNS
    unit: str = ""
    width: int = 0
    irregular: bool = False
    missing: Sequence[str] = ()
    right: bool = False
    pairs: bool = False
    blanks: bool = False
    units: str = ""
    counts: str = ""
    remark: str = ""
    block: str = ""
    device: str = ""
    events: str = ""

    def matches(self, name: str, head: str) -> bool:
        """Whether a file of this name that begins with `head` has the form."""
        is_named = not self.file or re.search(self.file, name) is not None
        return is_named and re.search(self.head, head, re.MULTILINE) is not None

    def read_rate(self, head: str) -> float | None:
        """Hz, by the rate or the interval in the first lines."""
        if isinstance(self.rate, float | int):
            return float(self.rate)
        rate = _search(self.rate, head).replace(",", ".")
        if rate:
            return float(rate) or None
        seconds = 0.0
        interval = _search(self.interval, head).replace(",", ".")
        for part in interval.removesuffix("msec").strip().split(":"):
            seconds = 60 * seconds + float(part or 0)
        seconds *= 1e-3 if interval.endswith("msec") else 1.0
        return 1 / seconds if seconds else None

    def read_names(self, head: str) -> list[str]:
        """The names of the columns."""
        if isinstance(self.names, str):
            text = _search(self.names, head)
            names = text.split() if self.blanks else _split_list(text)
            return names[::2] if self.pairs else names
        return list(self.names)

    def read_units(self, head: str) -> list[str]:
        """The units of the columns that have names, one a name; []: the form states none."""
        if self.pairs and isinstance(self.names, str):
            return _split_list(_search(self.names, head))[1::2]
        return _split_list(_search(self.units, head))

    def count_last(self, head: str) -> int | None:
        """How many columns at the end are channels; None: the form does not say."""
        return len(_split_list(_search(self.last, head))) or None

    def read_unit(self, head: str) -> str:
        """The unit of all channels."""
        return _search(self.unit, head) if "(" in self.unit else self.unit

    def find_unit(self, header: str) -> str | None:
        """The unit of the column with this header; None: it is none of `columns`."""
        units = self.columns.items()
        return next(
            (u for form, u in units if fnmatch.fnmatchcase(header.lower(), form.lower())), None
        )

    def read_start(self, head: str) -> str:
        """The text of the time of the first row."""
        return _search(self.start, head)

    def read_events(self, text: str) -> list[float]:
        """Seconds since 1970 of the events in a text, NaN of a row without a time."""
        start = float(_search(self.start, text) or 0)
        rows = filter(str.strip, text.splitlines()[self.skip :])
        return [start + _parse_seconds(row.partition(",")[0]) for row in rows]


def _search(pattern: str, head: str) -> str:
    """The first group of a pattern; "": there is no pattern, or it is not found."""
    match = re.search(pattern, head, re.MULTILINE) if pattern else None
    return match[1] if match else ""


def _parse_seconds(cell: str) -> float:
    return float(cell) if re.fullmatch(r" *-?\d+(\.\d+)? *", cell) else math.nan


def _split_list(text: str) -> list[str]:
    mark = next((mark for mark in ("\n", "\t") if mark in text), ",")
    return [item.strip(" \"'") for item in text.split(mark) if item.strip(" \"'")]


@cache
def read_forms() -> tuple[VendorForm, ...]:
    """All forms, in the order in which they are tried."""
    text = resources.files(__package__).joinpath("vendors.toml").read_text("utf-8")
    return tuple(VendorForm(**form) for form in tomllib.loads(text)["form"])


def find_form(name: str, head: str) -> VendorForm | None:
    """The form of a file by its name and its first lines."""
    return next((form for form in read_forms() if form.matches(name, head)), None)
