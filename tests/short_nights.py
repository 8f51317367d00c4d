"""Small recordings with stages, which are read in no time."""

from pathlib import Path

import numpy as np
import pyedflib

STAGES = ("W", "N1", "N2", "N3", "R")
EPOCHS, RATE = 20, 8  # of 30 s; Hz


def write_nights(folder: Path, count: int) -> None:
    """`count` EDF recordings of noise, of a person each, with a stage for every epoch beside."""
    folder.mkdir(parents=True)
    for night in range(count):
        draw = np.random.default_rng(night)
        path = str(folder / f"night{night}.edf")
        with pyedflib.EdfWriter(path, 1, file_type=pyedflib.FILETYPE_EDFPLUS) as writer:
            header = {
                "label": "EEG",
                "dimension": "uV",
                "sample_frequency": RATE,
                "physical_max": 100.0,
                "physical_min": -100.0,
                "digital_max": 32767,
                "digital_min": -32768,
            }
            writer.setSignalHeaders([header])
            writer.writeSamples([draw.uniform(-90, 90, EPOCHS * 30 * RATE)])
        stages = draw.permutation(np.resize(STAGES, EPOCHS))
        (folder / f"night{night}.txt").write_text("\n".join(stages) + "\n")
