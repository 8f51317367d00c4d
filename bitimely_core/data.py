"""Batches of tensors from stored windows. The order of an epoch is a function of (seed, epoch): a
resumed run sees the same batches.

Legend: B rows of a global batch, n rows of this process, T samples, V channels, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from bitimely_core.errors import Reason, input_error
from bitimely_core.registry import row_readers
from bitimely_core.tokens import TokenSet, Windows
from bitimely_core.tokens.splits import hash_to_share
from bitimely_core.types import Batch, Batches

BLOCK = 1024  # rows that are copied to a device at once
Rows = TypeVar("Rows", bound=TokenSet)


@dataclass(eq=False)
class EpochBatches:
    """The `Batches` of one or more sets of windows; every batch is of one set, see
    `mix_batches`.
    """

    sets: tuple[TokenSet, ...]
    size: int  # B
    seed: int
    shuffle: bool
    ties: str = "canonical"
    least: int = 1  # rows below which the short last batch is left out
    # set -> values and affine of its rows, on a device
    resident: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    # global batches an epoch, the short last one of each set included
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        self.steps = sum(
            len(one) // self.size + (len(one) % self.size >= max(self.least, 1))
            for one in self.sets
        )

    def order(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        """The batches of the epoch: which set, and the positions in it (int64)."""
        draw = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        rows = [
            draw.permutation(len(one)) if self.shuffle else np.arange(len(one)) for one in self.sets
        ]
        blocks = [
            (at, part[i : i + self.size])
            for at, part in enumerate(rows)
            for i in range(0, len(part), self.size)
        ]
        cut = [(at, part) for at, part in blocks if len(part) >= min(self.least, self.size)]
        return (
            [cut[i] for i in draw.permutation(len(cut))]
            if self.shuffle and len(self.sets) > 1
            else cut
        )

    def __call__(
        self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """Batches `start`.. of `epoch`; process `rank` of `world` gets every world-th row of each,
        of a short last one possibly none.
        """
        yield from self._read(epoch, start, rank, world, narrow=False)

    def read_narrow(
        self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """The same with values as they are stored where that is int16, for a device that scales
        them, see `Batch.affine`.
        """
        yield from self._read(epoch, start, rank, world, narrow=True)

    @contextmanager
    def keep_on(self, device: torch.device, most: float) -> Iterator[None]:
        """Inside, `read_narrow` takes values from a copy of all rows on `device`, if they are
        stored as int16 and take less than `most` bytes.
        """
        narrow = {
            at: one for at, one in enumerate(self.sets) if isinstance(one, Windows) and one.narrow
        }
        if sum(len(one) * one.length * one.channels * 2 for one in narrow.values()) >= most:
            narrow = {}
        for at, one in narrow.items():
            values = torch.empty(
                len(one), one.length, one.channels, dtype=torch.int16, device=device
            )
            affine = torch.empty(len(one), 2, one.channels, device=device)
            for start in range(0, len(one), BLOCK):
                part = collate(one, one.rows[start : start + BLOCK], narrow=True)
                assert part.affine is not None
                values[start : start + BLOCK], affine[start : start + BLOCK] = (
                    part.values.to(device),
                    part.affine.to(device),
                )
            self.resident[at] = values, affine
        try:
            yield
        finally:
            self.resident.clear()

    def _read(
        self, epoch: int, start: int, rank: int, world: int, *, narrow: bool
    ) -> Iterator[Batch]:
        for at, positions in self.order(epoch)[start:]:
            one, own_positions = self.sets[at], positions[rank::world]
            if narrow and at in self.resident:
                target, place = (
                    one.targets(rows := one.rows[own_positions]),
                    torch.from_numpy(own_positions),
                )
                values, affine = (whole[place] for whole in self.resident[at])
                batch = Batch(
                    values,
                    target=None if target is None else torch.from_numpy(target),
                    index=torch.from_numpy(rows.copy()),
                )
                batch = batch._replace(affine=affine)
            else:
                batch = collate(
                    one,
                    one.rows[own_positions],
                    draw=(self.seed, epoch) if self.ties == "shuffle" else None,
                    narrow=narrow,
                )
            if len(self.sets) > 1:
                before = sum(earlier.whole_index.height for earlier in self.sets[:at])
                assert batch.index is not None
                batch = batch._replace(
                    index=batch.index + before,
                    target=None,
                    source=torch.full((len(own_positions),), at),
                )
            yield batch


def batches(
    windows: TokenSet,
    size: int,
    *,
    seed: int = 0,
    shuffle: bool = True,
    fraction: float = 1.0,
    ties: str = "canonical",
    least: int = 1,
) -> Batches:
    """`epoch -> iterator of Batch` over windows or event sequences.

    Args:
        windows: usually one split of a token set. An empty one gives no steps.
        size: rows of a global batch (B); the last batch of an epoch may be shorter.
        seed: of the order, and of the draw of subjects.
        shuffle: a new permutation each epoch (numpy's PCG64 seeded with (seed, epoch)); False =
            stored order.
        fraction: share of the training subjects, see `sample_subjects`.
        ties: of events: `shuffle` gives those of equal times a new order each epoch; models apply
            the other settings.
        least: a last batch of fewer rows is left out of the epoch, for objectives that compare the
            rows of a batch with each other.
    """
    return EpochBatches(
        (sample_subjects(windows, fraction, seed),), _check_size(size), seed, shuffle, ties, least
    )


def mix_batches(
    sets: Sequence[TokenSet],
    size: int,
    *,
    seed: int = 0,
    shuffle: bool = True,
    ties: str = "canonical",
    least: int = 1,
) -> Batches:
    """Batches over several sets of windows, of any shapes, without their labels; every batch is of
    one set (`Batch.source`).

    Each epoch holds every row of every set once: rows are shuffled within their set, and the
    batches of all sets with each other.
    `Batch.index` continues from set to set: the row in the first index, or that plus the lengths of
    the full indexes before.
    """
    return EpochBatches(tuple(sets), _check_size(size), seed, shuffle, ties, least)


def _check_size(size: int) -> int:
    if size < 1:
        raise ValueError(f"expected a batch of at least 1 row, found {size}")
    return size


def collate(
    windows: TokenSet,
    rows: Sequence[int] | np.ndarray | None = None,
    *,
    draw: tuple[int, int] | None = None,
    narrow: bool = False,
) -> Batch:
    """The windows or event sequences at `rows` (positions in the full index; None = all of
    `windows`) as one batch.

    Signals: values [n, T, V] float32, mask [n, T, V] bool (None when nothing is missing in the
    set). Events: values [n, N] int64, times [n, N] and end [n] float32 months, mask [n, N], numbers
    [n, N] float32 (NaN: none); `draw` = (seed, epoch) shuffles events of equal times. Both: target
    [n] int64 class ids, [n] float32 numbers or [n, C] float32 indicators (NaN: not known; None
    without labels), index [n] int64. `narrow`: values that are stored as int16 stay so, with their
    scale as `affine`.
    """
    rows = windows.rows if rows is None else np.asarray(rows, dtype=np.int64)
    as_stored = narrow and isinstance(windows, Windows) and windows.narrow
    values = cast(Windows, windows).narrow_arrays(rows) if as_stored else windows.arrays(rows, draw)
    arrays = {**values, "target": windows.targets(rows), "index": rows.copy()}
    return Batch(
        **{  # type: ignore[arg-type]
            name: None if array is None else torch.from_numpy(array)
            for name, array in arrays.items()
        }
    )


def read_item(windows: TokenSet, row: int) -> Tensor | tuple[Tensor, Tensor] | dict[str, Tensor]:
    """The item of torch's data set at `row`, a position in the full index, see
    `TokenSet.__getitem__`.
    """
    arrays = {**windows.arrays([row]), "target": windows.targets([row])}
    fields = {
        name: torch.as_tensor(array[0]) for name, array in arrays.items() if array is not None
    }
    if not windows.regular:
        padding = {
            name: windows.length - len(fields[name])
            for name in ("values", "times", "mask", "numbers")
            if name in fields
        }
        return {
            **fields,
            **{
                name: F.pad(fields[name], (0, 0) * (fields[name].dim() - 1) + (0, count))
                for name, count in padding.items()
            },
        }
    values = (
        torch.where(fields["mask"], fields["values"], torch.nan)
        if "mask" in fields
        else fields["values"]
    )
    return (values, fields["target"]) if "target" in fields else values


row_readers.add("tensors", read_item)


def limit_windows(windows: Rows, limit: int | None, seed: int) -> Rows:
    """`windows` with at most `limit` windows of each split, drawn by `seed`; None: all."""
    if limit is None:
        return windows
    keep = np.zeros(len(windows), dtype=bool)
    split = windows.index["split"].to_numpy()
    draw = np.random.Generator(np.random.PCG64([seed, limit]))
    for name in ("train", "validation", "test"):
        keep[draw.permutation(np.flatnonzero(split == name))[:limit]] = True
    return windows.subset(keep)


def draw_held_out(windows: TokenSet, count: int, seed: int) -> tuple[np.ndarray, str]:
    """Positions in the index of up to `count` windows of the first non-empty split of test,
    validation and train, and that split's name.

    They are drawn without replacement; runs on the same windows get the same ones. Raises
    UserError: no_input, without windows.
    """
    for split in ("test", "validation", "train"):
        rows = windows[split].rows
        if len(rows):
            return np.sort(
                np.random.default_rng(seed).choice(rows, min(count, len(rows)), replace=False)
            ), split
    raise input_error(
        Reason.NO_INPUT,
        f"{windows.name} has no windows",
        hint="Tokenize it again with a shorter --window",
    )


def sample_subjects(windows: Rows, fraction: float, seed: int) -> Rows:
    """`windows` with a share of the training subjects; rows of other splits stay (method notes,
    section 12, row 16).

    Of the m training subjects max(1, round(fraction * m)) are drawn, by the hash of (seed,
    subject): once a seed, whatever the epoch, and a larger fraction holds the smaller one.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"expected a fraction in (0, 1], found {fraction}")
    if fraction == 1:
        return windows
    training = (windows.index["split"] == "train").to_numpy()
    subjects = windows.subjects()
    ranked = sorted(
        set(subjects[training]),
        key=lambda subject: (hash_to_share(f"fraction|{seed}|{subject}"), subject),
    )
    drawn = ranked[: max(1, round(fraction * len(ranked)))]
    return windows.subset(~training | np.isin(subjects, drawn))


def find_device(module: torch.nn.Module) -> torch.device:
    """The device of the parameters of a module; without any the CPU."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on another device."""
    return Batch(
        batch.values.to(device), *(None if part is None else part.to(device) for part in batch[1:])
    )
