"""Windows to batches of tensors. The order of an epoch is a function of (seed, epoch), so a resumed run sees what it would have seen.

Legend: B rows of a global batch, n rows of this process, T samples, V channels, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from bitimely_core.batch import Batch, Batches
from bitimely_core.tokens import Windows
from bitimely_core.tokens.splits import share


@dataclass(eq=False)
class Shuffled:
    """The `Batches` of one or more sets of windows. `mixed` says how several sets share an epoch."""

    sets: tuple[Windows, ...]
    size: int  # B
    seed: int
    shuffle: bool
    steps: int = field(init=False)  # global batches an epoch, the short last one included

    def __post_init__(self) -> None:
        self.steps = -(-sum(map(len, self.sets)) // self.size)

    def order(self, epoch: int) -> np.ndarray:
        """Positions in the concatenated sets, in the order of the epoch [sum of lengths] int64."""
        total = sum(map(len, self.sets))
        return np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(total) if self.shuffle else np.arange(total)

    def __call__(self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Batches `start`.. of `epoch`; process `rank` of `world` gets every world-th row of each, of a short last one possibly none."""
        order = self.order(epoch)
        for step in range(start, self.steps):
            yield self._at(order[step * self.size : (step + 1) * self.size][rank::world])

    def _at(self, positions: np.ndarray) -> Batch:
        if len(self.sets) == 1:
            return collate(self.sets[0], self.sets[0].rows[positions])
        firsts = np.cumsum([0, *map(len, self.sets)])
        offsets = np.cumsum([0, *(one.whole_index.height for one in self.sets)])
        of = np.searchsorted(firsts, positions, side="right") - 1
        back = np.empty(len(positions), dtype=np.int64)
        back[np.argsort(of, kind="stable")] = np.arange(len(positions))
        found = [collate(one, one.rows[positions[of == i] - firsts[i]]) for i, one in enumerate(self.sets)]
        index = torch.cat([part.index + int(offset) for part, offset in zip(found, offsets[:-1], strict=True) if part.index is not None])
        values = torch.cat([part.values for part in found])
        masks = [torch.ones_like(part.values, dtype=torch.bool) if part.mask is None else part.mask for part in found]
        mask = None if all(part.mask is None for part in found) else torch.cat(masks)[back]
        return Batch(values=values[back], mask=mask, index=index[back])


def batches(windows: Windows, size: int, *, seed: int = 0, shuffle: bool = True, fraction: float = 1.0) -> Batches:
    """`epoch -> iterator of Batch` over `windows`.

    Args:
        windows: usually one split of a token set. An empty one gives no steps.
        size: rows of a global batch (B); the last batch of an epoch may be shorter.
        seed: of the order, and of the draw of subjects.
        shuffle: a new permutation each epoch (numpy's PCG64 seeded with (seed, epoch)); False = stored order.
        fraction: share of the training subjects, see `fraction_of`.
    """
    return Shuffled((fraction_of(windows, fraction, seed),), _positive(size), seed, shuffle)


def mixed(sets: Sequence[Windows], size: int, *, seed: int = 0, shuffle: bool = True) -> Batches:
    """Batches over several sets of windows of one shape, without their labels: each epoch shuffles all rows together.

    `Batch.index` counts on from set to set: the row in the first index, or that plus the lengths of the whole indexes before.
    """
    shapes = {(one.length, one.channels) for one in sets}
    if len(shapes) != 1:
        raise ValueError(f"expected sets of one shape (T, V), found {sorted(shapes)}")
    return Shuffled(tuple(sets), _positive(size), seed, shuffle)


def _positive(size: int) -> int:
    if size < 1:
        raise ValueError(f"expected a batch of at least 1 row, found {size}")
    return size


def collate(windows: Windows, rows: Sequence[int] | np.ndarray | None = None) -> Batch:
    """The windows at `rows` (positions in the whole index; None = all of `windows`) as one batch.

    values [n, T, V] float32, mask [n, T, V] bool (None when nothing is missing in the set), target [n] int64 class ids, [n] float32 numbers
    or [n, C] float32 indicators (None without labels), index [n] int64.
    """
    rows = windows.rows if rows is None else np.asarray(rows, dtype=np.int64)
    values, mask = windows.read(rows)
    target = windows.targets(rows)
    return Batch(
        values=torch.from_numpy(values),
        mask=None if mask is None else torch.from_numpy(mask),
        target=None if target is None else torch.from_numpy(target),
        index=torch.from_numpy(rows.copy()),
    )


def fraction_of(windows: Windows, fraction: float, seed: int) -> Windows:
    """`windows` with the windows of a share of the training subjects alone; rows of other splits stay (method notes, section 12, row 16).

    Of the m training subjects max(1, round(fraction * m)) are drawn, by the hash of (seed, subject): once a seed, whatever the epoch, and a
    larger fraction holds the smaller one.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"expected a fraction in (0, 1], found {fraction}")
    if fraction == 1:
        return windows
    training = (windows.index["split"] == "train").to_numpy()
    subjects = windows.subjects()
    ranked = sorted(set(subjects[training]), key=lambda subject: (share(f"fraction|{seed}|{subject}"), subject))
    drawn = ranked[: max(1, round(fraction * len(ranked)))]
    return windows.subset(~training | np.isin(subjects, drawn))


def moved(batch: Batch, device: torch.device) -> Batch:
    """The batch on another device."""
    return Batch(batch.values.to(device), *(None if part is None else part.to(device) for part in batch[1:]))
