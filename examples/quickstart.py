"""Pre-train BiTimelyGPT on unlabelled windows, fine-tune its [SOS] token, compare with training
from scratch.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bitimely_core import cache, data, models, objectives, tokens
from bitimely_core.heads import Classifier, cross_entropy
from bitimely_core.train.loop import fit


def accuracy(windows: tokens.Windows, pretrain_epochs: int) -> float:
    """Test accuracy after fine-tuning for one epoch."""
    torch.manual_seed(0)
    # epoch -> batches, in an order fixed by (seed, epoch)
    batches = data.batches(windows["train"], 32, seed=0)
    model = models.build(
        "bitimelygpt",
        preset="tiny",
        channels=windows.channels,
        length=windows.length,
        tokenizer="patch",
        patch=24,
    )
    fit(model, batches, objectives.get("next-previous"), epochs=pretrain_epochs, lr=1e-3)
    classifier = Classifier(model, outputs=windows.classes, readout="sos")
    fit(classifier, batches, cross_entropy, epochs=1, lr=1e-3)
    test = data.collate(windows["test"])
    with torch.inference_mode():
        return float((classifier.eval()(test).argmax(-1) == test.target).float().mean())


with TemporaryDirectory() as home:  # the windows are memory-mapped: use them before the folder goes
    cache.ingest("synthetic", None, Path(home) / "cache")  # raw -> Parquet
    windows = tokens.build(Path(home) / "cache", view="staging", out=Path(home) / "tokens")
    print(f"from scratch {accuracy(windows, 0):.2f}   pre-trained {accuracy(windows, 2):.2f}")
