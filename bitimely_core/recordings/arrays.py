"""Reads arrays of samples: files of NumPy and of MATLAB."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from bitimely_core.errors import Reason, input_error
from bitimely_core.formats import matlab
from bitimely_core.formats.source import locate_errors
from bitimely_core.formats.units import narrow_samples
from bitimely_core.recordings.mapping import RecordingInfo
from bitimely_core.recordings.selection import make_record, report_missing
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import Record, Signal


def read_npy(path: Path, rel: str, info: RecordingInfo) -> Record:
    """An array [samples] or [samples, channels] of int16 (kept) or other numbers (float32)."""
    with locate_errors(rel):
        values = _load_npy(path)
        if values.dtype.kind not in "iuf" or values.ndim not in {1, 2} or values.size == 0:
            problem = f"is an array of {values.ndim} dimensions of {values.dtype}"
            raise input_error(Reason.DIMENSIONS, problem, "expected [samples, channels]")
        signals = _make_array_signals(np.asarray(values).reshape(len(values), -1), info)
    return make_record(rel, info, signals, findings=report_missing(signals, "values are NaN"))


def _load_npy(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        is_unsafe = re.search("pickle|object", str(error).lower()) is not None
        code = Reason.UNSAFE_PICKLE if is_unsafe else Reason.CORRUPT
        problem = "is not a .npy file of numbers"
        raise input_error(code, problem, "only arrays of numbers are read") from None
    except (OSError, EOFError, SyntaxError) as error:
        raise_system_error(error, path, stored=False)
        problem = f"does not read as .npy ({type(error).__name__})"
        raise input_error(Reason.CORRUPT, problem, hint="Save it again") from None


def read_mat(path: Path, rel: str, info: RecordingInfo) -> Record:
    """An array of a MATLAB 5 file, as `read_npy`.

    One with a row a channel is turned: the map names as many channels, or it is wider than tall.
    """
    with locate_errors(rel):
        values = matlab.read_array(path, info.variable)
        if values.ndim != 2 or values.size == 0:
            problem = f"is an array of {' x '.join(map(str, values.shape))}"
            wanted = "expected [samples, channels] or [channels, samples]"
            raise input_error(Reason.DIMENSIONS, problem, wanted, field="variable")
        tall, wide = (count == len(info.channels) for count in values.shape[::-1])
        if (wide and not tall) or (wide == tall and values.shape[0] < values.shape[1]):
            values = values.T
        signals = _make_array_signals(values, info)
    return make_record(rel, info, signals, findings=report_missing(signals, "values are NaN"))


def _make_array_signals(table: np.ndarray, info: RecordingInfo) -> list[Signal]:
    """The columns of [samples, channels] as signals: int16 as it is, else float32.

    Raises UserError: dimensions, physical_range.
    """
    names = list(info.channels) or [f"channel {i}" for i in range(1, table.shape[1] + 1)]
    if len(names) != table.shape[1]:
        problem = f"has {table.shape[1]} columns"
        raise input_error(Reason.DIMENSIONS, problem, f"the map names {len(names)} channels")
    signals: list[Signal] = []
    for name, column in zip(names, table.T, strict=True):
        is_stored = table.dtype == np.int16
        samples = np.ascontiguousarray(column) if is_stored else narrow_samples(column, name)
        signals.append(Signal(name, info.rate or 1.0, "", samples))
    return signals
