"""Augments the rows of training batches.

What is drawn for a row depends on (seed, epoch, row in the index) alone: neither the number of
processes, nor that of micro-batches, nor a stop and a continuation changes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from bitimely_core.config import FinetuneConfig
from bitimely_core.data import collate
from bitimely_core.errors import usage_error
from bitimely_core.registry import augmentations, blame_plugin
from bitimely_core.types import AugmentationContext, Batch, Batches, LabelledRow

if TYPE_CHECKING:
    from bitimely_core.tokens import Windows

STREAM = 0x417567  # tells these random numbers from others of the same seed
# By what stretching does to the labels, else by the task; none for others. White noise is not among
# them: it fills the bands of a spectrum that a filter has emptied (docs/results.md).
DEFAULTS = {
    "rate": ("stretch", "gain"),
    "duration": ("stretch", "gain"),
    "classification": ("gain",),
    "multilabel": ("gain",),
}


def resolve_augmentation(config: FinetuneConfig, windows: Windows) -> FinetuneConfig:
    """The settings with the names of the augmentations and what stretching does to the labels.

    Raises UserError: unknown_name (exit 2); config (exit 2) for rows that are not signals on a
    grid.
    """
    scales = config.label_scales or windows.label_scales or "none"
    names: Sequence[str] = config.augment
    is_signal = windows.inputs == "signals" and windows.regular
    if names == ("default",):
        usual = DEFAULTS.get(scales) or DEFAULTS.get(windows.task) or ()
        names = usual if is_signal else ()
    for name in names:
        augmentations[name]  # raises where it is not known
    if names and not is_signal:
        raise usage_error(
            f"{', '.join(names)} for {windows.name}",
            "augmentations change windows of signals on a grid of times",
            "Use --augment none",
            field="--augment",
        )
    return config.model_copy(update={"augment": tuple(names), "label_scales": scales})


def augment_batches(
    batches: Batches, windows: Windows, config: FinetuneConfig, seed: int
) -> Batches:
    """`batches` of the training rows `windows` with the augmentations of resolved settings."""
    if not config.augment:
        return batches
    return AugmentedBatches(batches, windows, config.augment, config.label_scales or "none", seed)


@dataclass(eq=False)
class AugmentedBatches:
    """The `Batches` of `windows` with each row changed by the augmentations `names`, in order."""

    batches: Batches
    windows: Windows
    names: Sequence[str]
    label_scales: str
    seed: int
    steps: int = field(init=False)
    size: int = field(init=False)
    classes: int = field(init=False)  # of ids that become shares, else 0

    def __post_init__(self) -> None:
        self.steps, self.size = self.batches.steps, self.batches.size
        mixes = any(augmentations[name].facts.mixes_labels for name in self.names)
        is_shared = mixes and self.windows.task == "classification"
        self.classes = self.windows.classes if is_shared else 0

    def __call__(
        self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """As `Batches`."""
        for batch in self.batches(epoch, start=start, rank=rank, world=world):
            yield self.augment(batch, epoch)

    def augment(self, batch: Batch, epoch: int) -> Batch:
        """The batch with its values, mask and target changed row by row."""
        if not len(batch.values):
            return batch
        assert batch.index is not None
        rows = [
            self._augment_row(row, np.random.default_rng([STREAM, self.seed, epoch, number]))
            for row, number in zip(self._list_rows(batch), batch.index.tolist(), strict=True)
        ]
        values, masks, targets = zip(*rows, strict=True)
        return batch._replace(
            values=_stack(values),
            mask=None if batch.mask is None else _stack(masks),
            target=_stack(targets),
        )

    def _augment_row(self, row: LabelledRow, draw: np.random.Generator) -> LabelledRow:
        context = AugmentationContext(self.label_scales, self._draw_partner)
        shape = row.values.shape
        for name in self.names:
            with blame_plugin(augmentations[name].function):
                row = augmentations[name](row, draw, context)
                if row.values.shape != shape:
                    raise TypeError(f"it returns no LabelledRow with values {list(shape)}")
        return row

    def _draw_partner(self, draw: np.random.Generator) -> LabelledRow:
        """Any row of the training, as it is stored."""
        number = self.windows.rows[draw.integers(len(self.windows))]
        return self._list_rows(collate(self.windows, [number]))[0]

    def _list_rows(self, batch: Batch) -> list[LabelledRow]:
        """The rows of a batch; class ids as shares [C] where labels are mixed."""
        assert batch.target is not None
        values, targets = batch.values.numpy(), batch.target.numpy()
        masks = [None] * len(values) if batch.mask is None else batch.mask.numpy()
        if self.classes:
            targets = np.eye(self.classes, dtype=np.float32)[targets]
        return [LabelledRow(*parts) for parts in zip(values, masks, targets, strict=True)]


def _stack(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.stack(arrays))
