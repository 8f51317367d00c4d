"""Retention and its reach.

Each head forgets at its own rate, so that some read the last tokens and some the full window.
Layers read forward and backward in turns; two of them in a row reach everything, which makes the
representation two-sided and the paper's objective leak.
"""

import sys

import matplotlib.pyplot as plt
import torch

import bitimely as bt
from bitimely_core.ops.retention import retention_matrix

torch.manual_seed(0)
tokens, width, decay = 48, 16, torch.log(torch.tensor([0.7, 0.9, 0.99]))
q = k = torch.ones(1, tokens, 3, width, dtype=torch.float64)
maps = {
    way: retention_matrix(q, k, log_decay=decay, direction=way)[0]
    for way in ("forward", "backward")
}
maps["backward after forward"] = maps["backward"] @ maps["forward"]

figure, axes = plt.subplots(3, 3, figsize=(7, 7), sharex=True, sharey=True, layout="constrained")
for row, (name, found) in zip(axes, maps.items(), strict=True):
    for axis, one, rate in zip(row, found, decay.exp().tolist(), strict=True):
        axis.imshow((one / one.max()).numpy(), cmap="magma")
        axis.set_title(f"{name}, {rate:.2f}", fontsize=8)
figure.supxlabel("key")
figure.supylabel("query")
figure.savefig(sys.argv[1])

v = torch.randn(1, tokens, 3, width, dtype=torch.float64)
forms = [
    bt.retention(q, k, v, log_decay=decay, form=form)
    for form in ("parallel", "recurrent", "chunkwise")
]
print(
    "largest difference of the three forms:",
    f"{max(float((form - forms[0]).abs().max()) for form in forms):.0e}",
)
