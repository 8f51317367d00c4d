"""What sleep stages look like.

Ten seconds of each stage from the cache, in microvolts. The nights are made up: spindles and
K-complexes in N2, slow waves in N3, planted at known places.
"""

import sys

import matplotlib.pyplot as plt
import numpy as np

import bitimely as bt

bt.ingest("synthetic", None, "cache")  # of real nights: bt.ingest("sleep-edf", "raw", "cache")
record = next(bt.open_cache("cache").records(channels=["EEG Fpz-Cz"]))
signal = record.signals[0]
microvolts = signal.samples * signal.scale + signal.offset
onsets = {
    note.label: note.onset for note in record.annotations if note.label.startswith("Sleep stage")
}
names = sorted(onsets)

figure, axes = plt.subplots(
    len(names), 1, figsize=(8, 6), sharex=True, sharey=True, layout="constrained"
)
for axis, name in zip(axes, names, strict=True):
    first = int((onsets[name] + 10) * signal.rate)
    axis.plot(
        np.arange(10 * int(signal.rate)) / signal.rate,
        microvolts[first : first + 10 * int(signal.rate)],
        lw=0.7,
    )
    axis.set_ylabel(name.removeprefix("Sleep stage "), rotation=0, ha="right")
axes[-1].set_xlabel("seconds")
figure.suptitle(f"{signal.channel}, {signal.unit}")
figure.savefig(sys.argv[1])
print(
    record.recording_id,
    f"{len(microvolts) / signal.rate:.0f} s at {signal.rate:.0f} Hz,",
    len(record.annotations),
    "annotations",
)
