"""Reads the formats that mne knows: BrainVision, EEGLAB, GDF, CNT and FIF."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from os.path import normpath
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from bitimely_core.errors import Reason, UserError, input_error, safe_text
from bitimely_core.formats.source import locate_errors
from bitimely_core.formats.text import sanitize_label
from bitimely_core.recordings.mapping import RecordingInfo, find_suffix
from bitimely_core.recordings.selection import make_record
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import Annotation, Record, Signal

# kinds of channel that mne gives in volts
ELECTRIC = {"eeg", "eog", "ecg", "emg", "seeg", "ecog", "dbs", "bio"}


def read_mne(path: Path, rel: str, info: RecordingInfo) -> Record:
    """Any other format, through mne; volts become uV."""
    with locate_errors(rel):
        if find_suffix(rel) == ".vhdr":
            pattern = r"^\s*(?:DataFile|MarkerFile)\s*=\s*(.+?)\s*$"
            _require_same_folder(re.findall(pattern, path.read_text("latin-1"), re.MULTILINE))
        try:
            raw, values = _load_raw(path)
            kinds = raw.get_channel_types()
            rate = float(raw.info["sfreq"])
            start = raw.info["meas_date"]
            notes = [
                Annotation(float(note["onset"]), float(note["duration"]), str(note["description"]))
                for note in raw.annotations
            ]
        except UserError:
            raise
        except Exception as error:  # each of mne's readers fails in ways of its own
            raise_system_error(error, path, stored=False)
            problem, hint = (
                f"mne does not read it ({type(error).__name__})",
                "Open it with mne to see more",
            )
            raise input_error(Reason.CORRUPT, problem, hint=hint) from None
    signals: list[Signal] = []
    for number, (name, kind, channel) in enumerate(
        zip(raw.ch_names, kinds, values, strict=True), 1
    ):
        factor, unit = (1e6, "uV") if kind in ELECTRIC else (1, "")
        with np.errstate(over="ignore"):
            samples = (channel * factor).astype(np.float32)
        signals.append(Signal(sanitize_label(name) or f"channel {number}", rate, unit, samples))
    return make_record(
        rel, info, signals, notes, start=start.replace(tzinfo=None) if start else None
    )


def _load_raw(path: Path) -> tuple[Any, np.ndarray]:
    """The recording of mne and its values. Raises UserError (path_escape), and mne's exceptions."""
    import mne

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        raw = mne.io.read_raw(path, preload=False, verbose="ERROR")
        for name in filter(None, raw.filenames):
            if normpath(Path(name).parent) != normpath(path.parent):
                problem = "names a file in another folder"
                raise input_error(Reason.PATH_ESCAPE, problem, "which is not read")
        return raw, raw.get_data(verbose="ERROR")


def _require_same_folder(names: Iterable[str]) -> None:
    """Raises UserError (path_escape) for a name that is not that of a file in the same folder."""
    for name in names:
        if PurePosixPath(name).name != name or "\\" in name:
            problem = f"names the file {safe_text(name)}"
            raise input_error(Reason.PATH_ESCAPE, problem, "which must be in the same folder")
