"""A label that the length gives away.

Labels of claims come from codes, and ill people have more of them. So the length of a history alone
separates cases from others; every score on claims stands beside this baseline.
"""

import sys

import matplotlib.pyplot as plt
import numpy as np
from sklearn.metrics import roc_auc_score

import bitimely as bt

bt.ingest("synthetic-claims", None, "cache", options={"subjects": 3000})
cache = bt.open_cache("cache")
lengths = {}
for events in cache.events():
    for (person,), rows in events.group_by("subject_id"):
        lengths[person] = len(rows)
labels = cache.labels()
names = labels["name"].unique(maintain_order=True).to_list()

figure, axes = plt.subplots(1, len(names), figsize=(9, 3.5), sharey=True, layout="constrained")
for axis, name in zip(axes, names, strict=True):
    known = [
        row
        for row in labels.iter_rows(named=True)
        if row["name"] == name and row["value"] is not None and row["subject_id"] in lengths
    ]
    value = np.array([row["value"] for row in known]).astype(int)
    length = np.array([lengths[row["subject_id"]] for row in known])
    area = roc_auc_score(value, length)
    axis.boxplot(
        [length[value == 0], length[value == 1]], tick_labels=["others", "cases"], showfliers=False
    )
    axis.set_title(f"{name}: AUROC {area:.2f}", fontsize=9)
    print(name, f"AUROC of the length alone {area:.3f}")
axes[0].set(ylabel="rows of claims", yscale="log")
figure.savefig(sys.argv[1])
