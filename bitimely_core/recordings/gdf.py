"""Reads of GDF headers what mne does not use: units, and values that stand for no sample."""

from __future__ import annotations

import struct
from itertools import starmap
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bitimely_core.formats.text import sanitize_label
from bitimely_core.formats.units import find_unit_factor

FIXED = 256  # bytes of the header before those of the channels
# bytes of the fields of one channel before a field: texts of version 1 and codes of 2 are units
TEXTS, CODES, MINIMA, TYPES = 96, 102, 104, 220
FLOATS = 16  # the first type of samples that are no whole numbers
# codes of ISO/IEEE 11073: a unit in steps of 32, and a power of ten
BASES = {
    544: "%", 2496: "Hz", 3840: "Pa", 3872: "mmHg", 4256: "V", 4288: "Ohm", 6048: "C", 8320: "S",
}  # fmt: skip
PREFIXES = {0: "", 2: "h", 3: "k", 4: "M", 18: "m", 19: "u", 20: "n", 21: "p"}
GAINS = {"uV": 1e-6, "mV": 1e-3}  # units that mne brings to V: it takes others for V


class GdfChannels(NamedTuple):
    """What a header states of each channel."""

    units: list[tuple[float, str]]  # factor of the values of mne, and unit of the cache
    lowest: np.ndarray  # physical minimum as mne gives it [V]; -inf for samples of floats


def read_gdf_channels(path: Path) -> GdfChannels:
    """Units and lowest values of the channels of a GDF file that mne reads."""
    with path.open("rb") as file:
        fixed = file.read(FIXED)
        is_old = float(fixed[4:8]) < 1.9
        (count,) = struct.unpack_from("<I" if is_old else "<H", fixed, 252)
        header = file.read(FIXED * count)
    minima = np.frombuffer(header, "<f8", count, MINIMA * count)
    types = np.frombuffer(header, "<i4", count, TYPES * count)
    if is_old:
        cells = np.frombuffer(header, "S8", count, TEXTS * count)
        units = [sanitize_label(cell.decode("latin-1")) for cell in cells]
        gains = [GAINS["uV"] if unit.startswith("uV") else 1.0 for unit in units]
    else:
        codes = np.frombuffer(header, "<u2", count, CODES * count)
        units = [_name_unit(code) for code in codes.tolist()]
        gains = [GAINS.get(unit, 1.0) for unit in units]
    lowest = np.where(types < FLOATS, minima * gains, -np.inf)
    return GdfChannels(list(starmap(_scale, zip(units, gains, strict=True))), lowest)


def _name_unit(code: int) -> str:
    """The unit of a code; "" for none, and for one that is not known."""
    base, prefix = BASES.get(code & ~31, ""), PREFIXES.get(code & 31)
    return "" if not base or prefix is None else f"{prefix}{base}"


def _scale(unit: str, gain: float) -> tuple[float, str]:
    """Factor of values that were brought to another unit by `gain`, and the unit of the cache."""
    microvolts = find_unit_factor(unit, "uV")
    return (1 / gain, unit) if microvolts is None else (microvolts / gain, "uV")


def find_gaps(values: np.ndarray, lowest: np.ndarray) -> list[tuple[int, int]]:
    """Begin and end of the stretches [V, T] where all of several channels are at their lowest.

    Programs that write GDF put this value where there is no sample, as between two runs.
    """
    if len(values) < 2:
        return []
    tolerance = 1e-9 * np.abs(lowest, where=np.isfinite(lowest), out=np.zeros(len(lowest)))
    is_empty = (values <= (lowest + tolerance)[:, None]).all(0)
    edges = np.flatnonzero(np.diff(is_empty, prepend=False, append=False))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
