"""Spectra of the stages.

Mean power of the training windows of each class, with the spread over people. Simple features read
these bands, and are therefore a baseline on every page of scores.
"""

import sys

import matplotlib.pyplot as plt
import numpy as np
from scipy.signal import welch

import bitimely as bt

bt.ingest("synthetic", None, "cache")
windows = bt.tokens.build("cache", view="staging", out="tokens", normalise="none")
train = windows["train"]
hertz, power = welch(np.asarray(train)[..., 0], fs=windows.rate, nperseg=400)
labels, people = train.targets(), np.array(train.subjects())

figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
for index, name in enumerate(windows.class_names):
    means = [
        np.log10(power[(labels == index) & (people == person)].mean(0))
        for person in np.unique(people[labels == index])
    ]
    centre, spread = np.mean(means, 0), np.std(means, 0)
    axis.plot(hertz, centre, label=f"{name}, {len(means)} people")
    axis.fill_between(hertz, centre - spread, centre + spread, alpha=0.2)
axis.set(xlim=(0.5, 30), xlabel="Hz", ylabel="log10 of the power density")
axis.legend()
figure.savefig(sys.argv[1])
print(len(train), "windows of", len(np.unique(people)), "people")
