"""Checks of the sampling rate and unit of a signal, and factors between units of voltage, which the data sets share."""

from __future__ import annotations

import math
from typing import Literal

from bitimely_core.errors import Reason, input_error, safe_text
from bitimely_core.types import Signal

MICRO = ("uv", "\u00b5v", "\u03bcv")  # u, micro sign, Greek mu
VOLTS = {"v": 1.0, "mv": 1e-3, **dict.fromkeys(MICRO, 1e-6), "nv": 1e-9}
FACTORS = {  # to unit -> from unit, in lower case -> factor
    "mV": {"nv": 1e-6, **dict.fromkeys(MICRO, 1e-3), "mv": 1.0, "v": 1e3},
    "uV": {"nv": 1e-3, **dict.fromkeys(MICRO, 1.0), "mv": 1e3, "v": 1e6},
}


def require_rate(signal: Signal, rate: float, name: str = "", *, field: str = "sampling_rate") -> None:
    """Raises UserError (sampling_rate) for a signal, called `name`, with another rate in Hz."""
    if not math.isclose(signal.rate, rate, rel_tol=1e-6):
        problem, found, expected = f"{name} is sampled at {signal.rate:g} Hz".strip(), f"{signal.rate:g}", f"{rate:g}"
        raise input_error(Reason.SAMPLING_RATE, problem, f"expected {rate:g} Hz", field=field, found=found, expected=expected)


def find_factor(signal: Signal, unit: Literal["mV", "uV"], name: str = "") -> float:
    """Factor from the unit of a signal, called `name`, to `unit`. Raises UserError (unit) for what is no voltage."""
    factor = FACTORS[unit].get(signal.unit.lower())
    if factor is None:
        found = safe_text(signal.unit)
        raise input_error(Reason.UNIT, f"{name} is in {found}".strip(), "expected mV, uV or V", field="unit", found=found, expected=unit)
    return factor


def scale_signal(signal: Signal, factor: float, unit: str) -> Signal:
    """The signal in `unit`, `factor` times its present one; samples stay as they are."""
    return signal._replace(unit=unit, scale=signal.scale * factor, offset=signal.offset * factor)
