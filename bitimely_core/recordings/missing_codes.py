"""Finds numbers that stand for a missing value, such as -999, or 127 of an oximeter without a
finger.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bitimely_core.errors import Finding, Reason, input_warning, safe_text
from bitimely_core.types import count_nouns

# numbers that programs write, and the ends of the ranges of converters
CODES = (
    -999.0, -9999.0, -99999.0, -999999.0, 9999.0, 99999.0, 999999.0, 32767.0, -32768.0, -3276.8,
    3276.7, 65535.0, 8388607.0, -8388608.0, 2147483647.0, -2147483648.0, 4294967295.0,
)  # fmt: skip
FAR = 2.0  # times the range of the others, and their size
APART = 0.2  # of the median of a vital sign, to its nearest other value


class VitalSign(NamedTuple):
    """Numbers that monitors write for a vital sign which they do not measure."""

    name: re.Pattern[str]  # of the channel
    codes: Sequence[float]
    low: float  # of the median of those that are measured
    high: float


VITAL_SIGNS = (
    VitalSign(
        re.compile(r"sp?[ao]?o2|saturation|oxygen", re.IGNORECASE),
        (-1.0, 0.0, 127.0, 255.0, 511.0),
        30.0,
        100.0,
    ),
    VitalSign(
        re.compile(r"\b(hr|pr|puls|pulse|heart|herzfrequenz|bpm)(?![a-z])", re.IGNORECASE),
        (-1.0, 0.0, 255.0, 511.0),
        20.0,
        240.0,
    ),
)


def drop_codes(values: np.ndarray, names: Sequence[str]) -> list[Finding]:
    """Makes numbers that stand for a missing value NaN in `values`, [rows, channels], and says so.

    They are those of `CODES` that occur again and lie far from all others of their channel, and
    those of a vital sign that lie apart from all others.
    """
    findings: list[Finding] = []
    for column, name in zip(values.T, names, strict=True):
        finite = column[np.isfinite(column)]
        for code in [*_find_far(finite), *_find_vital_codes(finite, name)]:
            places = column == code
            column[places] = np.nan
            others = column[np.isfinite(column)]
            findings.append(_report_code(name, code, int(places.sum()), others))
    return findings


def _find_far(values: np.ndarray) -> list[float]:
    """The codes of any channel among its values."""
    others = values[~np.isin(values, CODES)]
    if others.size == values.size or not others.size:
        return []
    low, high = float(others.min()), float(others.max())
    least = FAR * max(high - low, abs(low), abs(high))
    far = (code for code in CODES if max(low - code, code - high) > least)
    return [code for code in far if np.count_nonzero(values == code) > 1]


def _find_vital_codes(values: np.ndarray, name: str) -> list[float]:
    """The codes of a vital sign among its values."""
    sign = next((sign for sign in VITAL_SIGNS if sign.name.search(name.replace("_", " "))), None)
    if sign is None:
        return []
    others = values[~np.isin(values, [*sign.codes, *CODES])]
    middle = float(np.median(others)) if others.size else 0.0
    if not sign.low <= middle <= sign.high:
        return []
    present = (code for code in sign.codes if (values == code).any())
    return [code for code in present if float(np.abs(others - code).min()) > APART * middle]


def _report_code(name: str, code: float, count: int, others: np.ndarray) -> Finding:
    span = f"others {others.min():g} to {others.max():g}"
    return input_warning(
        Reason.MISSING_VALUES,
        f"{count_nouns(count, 'value')} of {safe_text(name)} at {code:g}, {span}",
        "taken for missing",
        "If they are measured, write missing = [] in [[files]] of --map",
        count=count,
    )
