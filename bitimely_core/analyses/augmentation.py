"""Ten training windows of a run before and after augmentation, as its first epoch reads them.

Legend: n windows, T samples, V channels.
"""

from __future__ import annotations

import numpy as np

from bitimely_core.augment.augmented_batches import augment_batches
from bitimely_core.data import batches
from bitimely_core.errors import Reason, input_error, usage_error
from bitimely_core.page import Line, LinePlot, Page, PageBuilder
from bitimely_core.registry import AnalysisFacts, analyses
from bitimely_core.run import Run
from bitimely_core.types import Batch

CHANNELS = 3  # of a window that are drawn
CHANGES = "Root mean square of the change over that of the windows, of each augmentation alone."
CAPTION = "Grey: as it is stored. Coloured: as the training reads it, in the model's units."


@analyses(
    AnalysisFacts(takes="run", help="Training windows before and after the augmentations of a run")
)
def augmentation(runs: list[Run], *, sequences: int = 10, seed: int = 0) -> Page:
    """`sequences` training windows of a supervised run beside what its augmentations make of them.

    The windows and the draws are those of an epoch of a training with `seed`. The summary holds
    `augmentations` and, of each augmentation alone and of all, `changes`: the root mean square of
    the change over that of the windows.

    Raises UserError: a run without augmentation (config, exit 2); no_input without training
    windows.
    """
    run = runs[0].require_network()
    windows, tuned = run.windows()["train"], run.record.settings.finetune
    if not tuned.augment:
        raise usage_error(
            f"{run.name} was trained without augmentation",
            "expected a run of train or finetune with --augment",
            "Train it with --augment default",
            field="RUN",
        )
    if not len(windows):
        raise input_error(
            Reason.NO_INPUT,
            f"{windows.name} has no training windows",
            "expected at least one",
            "Ingest more recordings",
        )
    stored = batches(windows, sequences, seed=seed)
    before = next(iter(stored(0)))
    after = {
        name: next(iter(augment_batches(stored, windows, chosen, seed)(0)))
        for name, chosen in {
            "together": tuned,
            **{name: tuned.model_copy(update={"augment": (name,)}) for name in tuned.augment},
        }.items()
    }
    names = ", ".join(tuned.augment)
    page = PageBuilder(f"Augmentation of {run.name}")
    page.fact("Windows", f"{len(before.values)} of the training split of {windows.name}")
    page.fact("Augmentations", f"{names}, in this order")
    changes = {name: _measure_change(before, batch) for name, batch in after.items()}
    rows = [[name, f"{change:.1%}"] for name, change in changes.items()]
    page.table("changes", "Sizes of changes", CHANGES, ["augmentation", "change"], rows)
    seconds = np.arange(windows.length) / windows.rate
    for row in range(len(before.values)):
        for channel, label in enumerate(windows.channel_names[:CHANNELS]):
            curves = [
                Line("before", seconds, _read_curve(before, row, channel), reference=True),
                Line("after", seconds, _read_curve(after["together"], row, channel)),
            ]
            page.figure(
                f"window-{row + 1}-{channel + 1}",
                f"Window {row + 1}, {label}",
                CAPTION,
                LinePlot(curves, "seconds", "value"),
            )
    summary = {"augmentations": list(tuned.augment), "changes": changes}
    return page.finish(f"{names} change these windows by {changes['together']:.0%}.", summary)


def _read_curve(batch: Batch, row: int, channel: int) -> np.ndarray:
    """Values [T] float64, NaN where one is missing."""
    values = batch.values[row, :, channel].double().numpy()
    if batch.mask is None:
        return values
    return np.where(batch.mask[row, :, channel].numpy(), values, np.nan)


def _measure_change(before: Batch, after: Batch) -> float:
    """Root mean square of the change over that of the values."""
    change = (after.values - before.values).double().square().mean().sqrt()
    return float(change / before.values.double().square().mean().sqrt().clamp(min=1e-12))
