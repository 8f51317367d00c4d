"""Who is in which split.

Nobody is in two splits: each person is dealt by a hash of the name, so that a new one moves no
other. One column is one person, with the classes of their windows; the numbers below are people.
"""

import sys

import matplotlib.pyplot as plt
import numpy as np

import bitimely as bt

bt.ingest("synthetic", None, "cache")
windows = bt.tokens.build("cache", view="staging", out="tokens")

figure, axis = plt.subplots(figsize=(8, 3.5), layout="constrained")
place, members = 0, {}
for split in ("train", "validation", "test"):
    labels, people = windows[split].targets(), np.array(windows[split].subjects())
    members[split] = sorted(set(people))
    axis.text(
        place + len(members[split]) / 2,
        -4,
        f"{split}: {len(members[split])}",
        ha="center",
        fontsize=9,
    )
    for person in members[split]:
        counts = np.bincount(labels[people == person], minlength=windows.classes)
        for index, bottom in enumerate(np.cumsum(counts) - counts):
            label = windows.class_names[index] if place == 0 else None
            axis.bar(place, counts[index], bottom=bottom, color=f"C{index}", width=0.9, label=label)
        place += 1
    place += 1
axis.set(ylabel="windows", xticks=[], ylim=(-6, None), yticks=range(0, 41, 10))
axis.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1), fontsize=8)
figure.savefig(sys.argv[1])
shared = set(members["train"]) & set(members["validation"]) | set(members["test"]) & (
    set(members["train"]) | set(members["validation"])
)
print({split: len(names) for split, names in members.items()}, "in two splits:", len(shared))
