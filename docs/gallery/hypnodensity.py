"""A night, stage by stage.

The probability of each stage in every epoch of a night that the model has not seen, with the scored
stages above. Three epochs of training from scratch: this shows the figure, not a good model.
"""

import sys

import matplotlib.pyplot as plt
import numpy as np
import torch

import bitimely as bt

bt.ingest("synthetic", None, "cache")
windows = bt.tokens.build("cache", view="staging", out="tokens")
torch.manual_seed(0)
model = bt.build_model(
    "timelygpt",
    preset="tiny",
    channels=windows.channels,
    length=windows.length,
    layers=2,
    tokenizer="patch",
    patch=50,
)
classifier = bt.Classifier(model, outputs=windows.classes)
bt.fit(
    classifier, bt.batches(windows["train"], 32, seed=0), bt.heads.cross_entropy, epochs=3, lr=2e-3
)

test = windows["test"]
nights = windows.index["recording_id"].to_numpy()[test.rows]
night = nights == nights[0]
stages, density = (
    test.targets()[night],
    classifier.eval().predict(torch.from_numpy(np.asarray(test)[night])).detach().numpy(),
)
minutes = np.arange(len(stages)) / 2

figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 5), sharex=True, layout="constrained")
top.step(minutes, stages, where="post", color="black")
top.set(yticks=range(windows.classes), yticklabels=windows.class_names, ylabel="scored")
top.invert_yaxis()
bottom.stackplot(minutes, density.T, labels=windows.class_names, step="post")
bottom.set(xlabel="minutes", ylabel="probability", ylim=(0, 1))
bottom.legend(ncols=5, fontsize=8)
figure.savefig(sys.argv[1])
print(f"{len(stages)} epochs of one night, {np.mean(density.argmax(1) == stages):.0%} as scored")
