"""EDF+ hypnograms of automatic scoring, written by pyedflib: one annotation an epoch, and the
stages as a signal.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import numpy as np

from bitimely_core.system_errors import describe_os_error

# of EDF+; others are as the class
STANDARD_TEXTS = {"REM": "R", "WAKE": "W", "S1": "1", "S2": "2", "S3": "3", "S4": "4"}
NOT_SCORED = "Sleep stage ?"


def encode_hypnogram(
    starts: Sequence[float], stages: Sequence[int], class_names: Sequence[str], epoch: float
) -> bytes:
    """The content of an EDF+C file: annotations `Sleep stage W` .. of `epoch` seconds at `starts`,
    and a signal of class numbers.

    `stages` are positions in `class_names`, -1 for an epoch without one. The file states no person
    and no date (1 January 1985). Raises UserError: the temporary folder is full or cannot be
    written (exit 6).
    """
    import pyedflib

    texts = [f"Sleep stage {STANDARD_TEXTS.get(name.upper(), name)}" for name in class_names]
    place = np.rint(np.asarray(starts) / epoch).astype(int)
    signal = np.full(max(int(place.max(initial=0)) + 1, 1), -1, np.int32)
    signal[place] = stages
    header: dict[str, str | int | float | None] = {
        "label": "Sleep stage",
        "dimension": "",
        "sample_frequency": 1 / epoch,
        "physical_min": -1.0,
        "physical_max": float(len(class_names)),
        "digital_min": -1,
        "digital_max": len(class_names),
        "transducer": "",
        "prefilter": "",
    }
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a record duration that is stated
            path = Path(folder) / "hypnogram.edf"
            with pyedflib.EdfWriter(str(path), 1, file_type=pyedflib.FILETYPE_EDFPLUS) as writer:
                writer.setStartdatetime(datetime(1985, 1, 1))
                writer.setDatarecordDuration(epoch)
                writer.setSignalHeader(0, header)
                writer.writeSamples([signal], digital=True)
                for start, stage in zip(starts, stages, strict=True):
                    writer.writeAnnotation(
                        float(start), epoch, texts[stage] if stage >= 0 else NOT_SCORED
                    )
            return path.read_bytes()
    except OSError as error:
        raise describe_os_error(error, Path(tempfile.gettempdir())) from None
