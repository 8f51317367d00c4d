"""Checks sampling rates, physical values and units of signals, and converts units of voltage.

What leaves the plausible ranges cannot be normalized in float32: every reader refuses it.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from bitimely_core.errors import Reason, input_error, safe_text
from bitimely_core.types import Signal

MICRO = ("uv", "\u00b5v", "\u03bcv")  # u, micro sign, Greek mu
VOLTS = {"v": 1.0, "mv": 1e-3, **dict.fromkeys(MICRO, 1e-6), "nv": 1e-9}
FACTORS = {  # to unit -> from unit, in lower case -> factor
    "mV": {"nv": 1e-6, **dict.fromkeys(MICRO, 1e-3), "mv": 1.0, "v": 1e3},
    "uV": {"nv": 1e-3, **dict.fromkeys(MICRO, 1.0), "mv": 1e3, "v": 1e6},
}

SLOWEST, FASTEST = 1e-5, 1e6  # Hz: a sample a day is 1.2e-5
# physical values: float32 holds their squares, and sums of some of them
SMALLEST, LARGEST = 1e-18, 1e18
MAX_FLOAT32 = float(np.finfo(np.float32).max)
LEVELS = 256  # steps of the converter that one step of float32 may hide
CONVERTER = 1 << 16  # its steps over the middle of the values, where a file states none
MOST_VOLTS = 1.0  # a step of the converter
LEAST_VOLTS = 1e-9  # the range of the converter


def find_rate_fault(rate: float) -> str:
    """What is wrong with a sampling rate in Hz; "" for a plausible one."""
    return "" if SLOWEST <= rate <= FASTEST else f"expected between {SLOWEST:g} and {FASTEST:g} Hz"


def find_range_fault(low: float, high: float, step: float, unit: str = "") -> str:
    """What is wrong with physical values from `low` to `high`; "" for plausible ones.

    They go in steps of `step` (0: unknown) of `unit`.
    """
    largest, span = max(abs(low), abs(high)), abs(high - low)
    volts = VOLTS.get(unit.strip().lower())
    if not largest <= LARGEST:
        return f"expected values below {LARGEST:g}: float32 holds no squares of larger ones"
    if 0 < largest < SMALLEST or (step and span < SMALLEST):
        return f"expected a range above {SMALLEST:g}: float32 holds no squares of smaller values"
    if step and np.spacing(np.float32(largest)) > LEVELS * abs(step):
        return f"steps of {abs(step):g} vanish beside {largest:g} in float32"
    if not step or volts is None:
        return ""
    if abs(step) * volts > MOST_VOLTS or span * volts < LEAST_VOLTS:
        return f"expected steps up to {MOST_VOLTS:g} V and a range above {LEAST_VOLTS:g} V"
    return ""


def narrow_samples(values: np.ndarray, name: str) -> np.ndarray:
    """Samples of the channel `name`, [samples] of real numbers, as float32.

    Raises UserError (physical_range) where they vary so little beside their offset that float32
    drops it, by `find_range_fault`. A file of numbers states no converter: 90 % of the values are
    taken for the range of one of 16 bits.
    """
    with np.errstate(over="ignore"):
        narrow = np.ascontiguousarray(values, np.float32)
    finite = values[np.isfinite(values)]
    is_exact = values.dtype.itemsize <= (4 if values.dtype.kind == "f" else 2)
    if is_exact or not finite.size:
        return narrow
    low, high = finite.min().item(), finite.max().item()
    least, most = np.percentile(finite, (5, 95))
    step = (float(most - least) or float(high - low)) / CONVERTER
    if not find_range_fault(low, high, 0.0) and find_range_fault(low, high, step):
        count = len(np.unique(finite.astype(np.float32)))
        text = f"values from {low:.12g} to {high:.12g}, of which float32 keeps {count}"
        raise input_error(
            Reason.PHYSICAL_RANGE,
            f"{text} of {len(np.unique(finite))}",
            "expected values that are not small beside their offset",
            "Subtract the offset, or leave the channel out",
            field=name,
        )
    return narrow


def require_rate(
    signal: Signal, rate: float, name: str = "", *, field: str = "sampling_rate"
) -> None:
    """Raises UserError (sampling_rate) for a signal, called `name`, with another rate in Hz."""
    if not math.isclose(signal.rate, rate, rel_tol=1e-6):
        raise input_error(
            Reason.SAMPLING_RATE,
            f"{name} is sampled at {signal.rate:g} Hz".strip(),
            f"expected {rate:g} Hz",
            field=field,
            found=f"{signal.rate:g}",
            expected=f"{rate:g}",
        )


def find_factor(signal: Signal, unit: Literal["mV", "uV"], name: str = "") -> float:
    """Factor from the unit of a signal, called `name`, to `unit`.

    Raises UserError (unit) for what is no voltage.
    """
    factor = FACTORS[unit].get(signal.unit.lower())
    if factor is None:
        text = safe_text(signal.unit)
        problem, wanted = f"{name} is in {text}".strip(), "expected mV, uV or V"
        raise input_error(Reason.UNIT, problem, wanted, field="unit", found=text, expected=unit)
    return factor


def scale_signal(signal: Signal, factor: float, unit: str) -> Signal:
    """The signal in `unit`, `factor` times its present one; samples stay as they are."""
    return signal._replace(unit=unit, scale=signal.scale * factor, offset=signal.offset * factor)
