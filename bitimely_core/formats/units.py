"""Checks sampling rates, physical values and units of signals; one table of units and spellings.

What leaves the plausible ranges cannot be normalized in float32: every reader refuses it.
"""

from __future__ import annotations

import math
import re
from typing import Literal, NamedTuple

import numpy as np

from bitimely_core.errors import Reason, input_error, safe_text
from bitimely_core.types import Signal


class Unit(NamedTuple):
    """A unit: the spelling that is stored, and its size in the first unit of its quantity."""

    name: str
    quantity: str
    size: float


class Strength(NamedTuple):
    """How strong a kind of signal is: half of the range of the middle 90 % of its values, in V."""

    pattern: re.Pattern[str]  # of the name of the channel
    least: float
    most: float


# quantity -> unit as it is stored -> its size, and further spellings in small letters
UNITS: dict[str, dict[str, tuple[float, str]]] = {
    "voltage": {
        "V": (1.0, "volt volts"),
        "mV": (1e-3, "millivolt millivolts milliv"),
        # I V is what pyedflib makes of a Greek mu
        "uV": (1e-6, "microvolt microvolts microv mcv mkv muv \u00e2uv iv"),
        "nV": (1e-9, "nanovolt nanovolts nanov"),
    },
    "conductance": {
        "S": (1.0, "siemens mho"),
        "mS": (1e-3, "millisiemens"),
        "uS": (1e-6, "microsiemens micros mcs mksiemens umho"),
        "nS": (1e-9, "nanosiemens"),
    },
    "resistance": {
        "Ohm": (1.0, "ohms \u03c9 \u2126"),
        "kOhm": (1e3, "kohms k\u03c9 k\u2126 kiloohm"),
        "MOhm": (1e6, "megaohm"),
    },
    "magnetic field": {
        "T": (1.0, "tesla"),
        "uT": (1e-6, "microtesla"),
        "nT": (1e-9, "nanotesla"),
        "pT": (1e-12, "picotesla"),
        "fT": (1e-15, "femtotesla"),
    },
    "amount in a volume": {"mmol/L": (1.0, "")},
    "mass in a volume": {"mg/dL": (1.0, "mg/100ml")},
    "pressure": {
        "Pa": (1.0, "pascal"),
        "hPa": (1e2, "mbar millibar"),
        "kPa": (1e3, "kilopascal"),
        "mmHg": (133.322387415, "torr"),
        "cmH2O": (98.0665, "cmh\u2082o cmwater cmwg"),
    },
    "acceleration": {
        "m/s2": (1.0, "m/s^2 m/s\u00b2 m/s/s ms-2 m*s-2 m/(s^2"),
        "g": (9.80665, "gravity gravities"),
        "mg": (9.80665e-3, "milli-g"),
    },
    "angular velocity": {
        "deg/s": (1.0, "dps \u00b0/s degrees/s deg/sec"),
        "rad/s": (180 / math.pi, "rad/sec"),
    },
    "frequency": {
        "Hz": (1.0, "hertz 1/s"),
        "bpm": (
            1 / 60,
            "beats/min beatsperminute beats/minute count/min /min 1/min min-1 brpm rpm",
        ),
    },
    "share": {"%": (1.0, "percent pct prozent")},
    "temperature": {"C": (1.0, "\u00b0c \u2103 degc celsius grad degrees deg.c")},
    "flow": {"L/s": (1.0, "l/sec"), "L/min": (1 / 60, "lpm"), "mL/s": (1e-3, "ml/sec")},
    "volume": {"L": (1.0, "liter litre liters"), "mL": (1e-3, "milliliter cc")},
    "time": {"s": (1.0, "sec secs second seconds"), "ms": (1e-3, "msec millisecond")},
}


def _list_spellings() -> dict[str, Unit]:
    """Spelling in small letters, with u for any sign of micro and without blanks -> unit.

    A name in its own capitals comes before others: mS is no ms.
    """
    spellings: dict[str, Unit] = {}
    names: dict[str, Unit] = {}
    for quantity, units in UNITS.items():
        for name, (size, others) in units.items():
            unit = Unit(name, quantity, size)
            names[name] = unit
            for text in (name.casefold(), *others.split()):
                spellings.setdefault(text, unit)
    return spellings | names


SPELLINGS = _list_spellings()
PREFIXES = {
    **dict.fromkeys(("u", "au", "\u00e2u", "micro", "mikro", "mc", "mk", "-6"), "u"),
    **dict.fromkeys(("m", "milli", "-3"), "m"),
    **dict.fromkeys(("n", "nano", "-9"), "n"),
    "": "",
}
VOLTS = re.compile(
    r"([a\u00e2]?u|mikro|micro|mc|mk|milli|m|nano|n|)(?:volts?|(?<=.)vol|v)(?:pp|p-p|rms|peak)?"
)
POWER = re.compile(r"x?(?:10(?:\^|\*\*)?|1?e)(-[369])v(?:olts?)?")
# a V after a sign that some program could not write, where the micro sign was
MANGLED = re.compile(r"[^A-Za-z0-9\s]+V", re.IGNORECASE)
ELECTRODE = r"(?<![a-z0-9])(fp|af|fc|ft|cp|tp|po|[fctpoima])(z|\d{1,2})(?![a-z0-9])"
STRENGTHS = (
    Strength(re.compile(r"\b(ecg|ekg|emg|chin|leg|tib)", re.IGNORECASE), 5e-6, 5e-3),
    Strength(re.compile(rf"\b(eeg|eog|loc|roc)|{ELECTRODE}", re.IGNORECASE), 1e-6, 1e-3),
)

FAR_OFF = 20.0  # times beyond the strengths of a kind of signal
SPREAD_SAMPLES = 1 << 14  # of a channel, whose spread is measured
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
    volts = find_unit_factor(unit, "V")
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


def find_unit(text: str) -> Unit | None:
    """The unit of a spelling; blanks, brackets and most capitals do not count; None: unknown."""
    bare = re.sub(r"\s|^[\[(]|[\])]$", "", text)
    folded = bare.casefold().replace("\u03bc", "u")  # the micro sign folds to the Greek letter
    return SPELLINGS.get(bare) or SPELLINGS.get(folded) or _find_voltage(folded)


def _find_voltage(text: str) -> Unit | None:
    """A unit of voltage in words, cut to eight letters, with a power of ten or peak to peak."""
    words, power = VOLTS.fullmatch(text), POWER.fullmatch(text)
    prefix = words[1] if words else power[1] if power else None
    return None if prefix is None else SPELLINGS[f"{PREFIXES[prefix]}V"]


def find_unit_factor(unit: str, target: str) -> float | None:
    """Factor from `unit` to `target`, in any spelling; None for different quantities."""
    source, wanted = find_unit(unit), find_unit(target)
    if source is None or wanted is None:
        return 1.0 if unit.strip().casefold() == target.strip().casefold() else None
    if source.quantity != wanted.quantity:
        return None
    return source.size / wanted.size


def measure_spread(signal: Signal) -> float:
    """Half of the range of the middle 90 % of its values, as numbers of its unit; 0: no values."""
    values = signal.samples[:: max(1, len(signal.samples) // SPREAD_SAMPLES)]
    finite = values[np.isfinite(values)]
    if not finite.size:
        return 0.0
    low, high = np.percentile(finite, (5, 95))
    return float(high - low) / 2 * abs(signal.scale)


def _find_strength(channel: str) -> Strength | None:
    """How strong signals are whose channel has such a name; None: any may be."""
    return next((kind for kind in STRENGTHS if kind.pattern.search(channel)), None)


def list_plausible_units(channel: str, spread: float) -> list[str]:
    """Units of voltage in which values of this spread are those of such a channel.

    There is none for a channel whose name does not say that it is a voltage of the body.
    """
    kind = _find_strength(channel)
    if kind is None:
        return []
    sizes = {name: size for name, (size, _) in UNITS["voltage"].items()}
    return [name for name, size in sizes.items() if kind.least <= spread * size < kind.most]


def is_voltage_channel(channel: str) -> bool:
    """Whether the name of a channel says that it is a voltage of the body."""
    return _find_strength(channel) is not None


def is_far_off(channel: str, unit: Unit, spread: float) -> bool:
    """Whether values of this spread cannot be those of such a channel in a unit of voltage."""
    kind = _find_strength(channel)
    if kind is None or unit.quantity != "voltage" or not spread:
        return False
    return not kind.least / FAR_OFF <= spread * unit.size <= kind.most * FAR_OFF


def find_factor(signal: Signal, unit: Literal["mV", "uV"], name: str = "") -> float:
    """Factor from the unit of a signal, called `name`, to `unit`.

    Raises UserError (unit) for what is no voltage.
    """
    factor = find_unit_factor(signal.unit, unit)
    if factor is None:
        text = safe_text(signal.unit)
        problem, wanted = f"{name} is in {text}".strip(), "expected mV, uV or V"
        raise input_error(Reason.UNIT, problem, wanted, field="unit", found=text, expected=unit)
    return factor


def scale_signal(signal: Signal, factor: float, unit: str) -> Signal:
    """The signal in `unit`, `factor` times its present one; samples stay as they are."""
    return signal._replace(unit=unit, scale=signal.scale * factor, offset=signal.offset * factor)
