"""A filter that sees the future.

A zero-phase filter runs forward and backward, so each value depends on samples after it. Of an
impulse half of the answer comes before it. The causal form answers later, and only later; what an
objective may call leak-free depends on which one made the windows.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import bitimely as bt

Path("raw").mkdir()
for person in range(4):  # a single sample of 1 in the middle of ten seconds
    impulse = np.random.default_rng(person).normal(0, 1e-3, (1000, 1))
    impulse[500] = 1
    np.savetxt(f"raw/p{person}.csv", impulse, delimiter=",", header="A", comments="")
Path("map.toml").write_text('[[files]]\npattern = "*.csv"\nrate = 100\nunit = "mV"\n')
bt.ingest("generic", "raw", "cache", options={"map": "map.toml"})

figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
for name in ("zero-phase", "causal"):
    windows = bt.tokens.build(
        "cache",
        out=f"tokens-{name}",
        window=1000,
        normalise="none",
        bandpass=(1, 20),
        filtering=name,
    )
    wave = windows.values([0])[0, :, 0]
    before = (wave[:500] ** 2).sum() / (wave**2).sum()
    axis.plot(
        np.arange(-500, 500) / windows.rate,
        wave,
        label=f"{name}: {before:.0%} of its energy before the impulse",
    )
    print(name, f"{before:.3f}")
axis.axvline(0, color="grey", lw=0.7)
axis.set(
    xlim=(-0.6, 0.6), xlabel="seconds from the impulse", ylabel="mV after a band-pass of 1 to 20 Hz"
)
axis.legend()
figure.savefig(sys.argv[1])
