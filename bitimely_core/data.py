"""Makes batches of tensors from stored windows.

The order of an epoch is a function of (seed, epoch): a resumed run sees the same batches.
Legend: B rows of a global batch, n rows of this process, T samples, V channels, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from bitimely_core.errors import usage_error
from bitimely_core.registry import row_readers
from bitimely_core.tokens import TokenSet, Windows
from bitimely_core.tokens.drawing import sample_subjects
from bitimely_core.types import RECORDING, Batch, Batches

BLOCK = 1024  # rows that are copied to a device at once


@dataclass(eq=False)
class EpochBatches:
    """The `Batches` of one or more sets of windows; every batch is of one set."""

    sets: tuple[TokenSet, ...]
    size: int  # B
    seed: int
    shuffle: bool
    ties: str = "canonical"
    least: int = 1  # rows below which the short last batch is left out
    sequence: int = 0  # windows of a recording that follow each other; 0: in any order
    # of the rows of the index of each set, see `Batch.place`; without `sequence` none
    places: tuple[np.ndarray, ...] = field(init=False)
    # set -> values and affine of its rows, on a device
    resident: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    # global batches an epoch, the short last one of each set included
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"expected a batch of at least 1 row, found {self.size}")
        sets = [part for part in self.sets if self.sequence and isinstance(part, Windows)]
        self.places = tuple(part.find_places() for part in sets)
        self.steps = sum(
            len(windows) // self.size + (len(windows) % self.size >= max(self.least, 1))
            for windows in self.sets
        )

    def order(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        """The batches of the epoch: which set, and the positions in it (int64)."""
        draw = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        blocks = []
        for number, windows in enumerate(self.sets):
            rows = draw.permutation(len(windows)) if self.shuffle else np.arange(len(windows))
            if self.places:
                places = self.places[number][windows.rows]
                rows = order_sequences(places, self.sequence, draw if self.shuffle else None)
            for i in range(0, len(rows), self.size):
                block = rows[i : i + self.size]
                if len(block) >= min(self.least, self.size):
                    blocks.append((number, block))
        if self.shuffle and len(self.sets) > 1:
            return [blocks[i] for i in draw.permutation(len(blocks))]
        return blocks

    def __call__(
        self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """Batches `start`.. of `epoch`; process `rank` of `world` gets every world-th row of each,
        of sequences as many in a row. Of a short last one these are possibly none.
        """
        return self._read(epoch, start, rank, world, narrow=False)

    def read_narrow(
        self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """The same with values as they are stored where that is int16.

        The device scales them, see `Batch.affine`.
        """
        return self._read(epoch, start, rank, world, narrow=True)

    @contextmanager
    def keep_on(self, device: torch.device, most: float) -> Iterator[None]:
        """Inside, `read_narrow` takes values from a copy of all rows on `device`.

        Only if they are stored as int16 and take less than `most` bytes.
        """
        narrow = {
            number: windows
            for number, windows in enumerate(self.sets)
            if isinstance(windows, Windows) and windows.narrow
        }
        sizes = [len(part) * part.length * part.channels * 2 for part in narrow.values()]
        if sum(sizes) < most:
            for number, windows in narrow.items():
                self.resident[number] = _copy_rows(windows, device)
        try:
            yield
        finally:
            self.resident.clear()

    def _read(
        self, epoch: int, start: int, rank: int, world: int, *, narrow: bool
    ) -> Iterator[Batch]:
        for number, block in self.order(epoch)[start:]:
            windows, positions = self.sets[number], block[rank::world]
            if self.places:
                positions = np.array_split(block, world)[rank]
            rows = windows.rows[positions]
            if narrow and number in self.resident:
                batch = self._take_resident(number, positions)
            else:
                draw = (self.seed, epoch) if self.ties == "shuffle" else None
                batch = collate(windows, rows, draw=draw, narrow=narrow)
            if self.places:
                batch = batch._replace(place=torch.from_numpy(self.places[number][rows]))
            if len(self.sets) > 1:
                before = sum(earlier.whole_index.height for earlier in self.sets[:number])
                assert batch.index is not None
                batch = batch._replace(
                    index=batch.index + before,
                    target=None,
                    source=torch.full((len(positions),), number),
                )
            yield batch

    def _take_resident(self, number: int, positions: np.ndarray) -> Batch:
        """The windows at these positions of a set whose values are on the device."""
        windows, place = self.sets[number], torch.from_numpy(positions)
        values, affine = (copy[place] for copy in self.resident[number])
        rows = windows.rows[positions]
        target = windows.targets(rows)
        return Batch(
            values,
            target=None if target is None else torch.from_numpy(target),
            index=torch.from_numpy(rows.copy()),
            affine=affine,
        )


def _copy_rows(windows: Windows, device: torch.device) -> tuple[Tensor, Tensor]:
    """All rows on a device: values [n, T, V] int16 and affine [n, 2, V] float32."""
    shape = (len(windows), windows.length, windows.channels)
    values = torch.empty(shape, dtype=torch.int16, device=device)
    affine = torch.empty(len(windows), 2, windows.channels, device=device)
    for start in range(0, len(windows), BLOCK):
        part = collate(windows, windows.rows[start : start + BLOCK], narrow=True)
        assert part.affine is not None
        values[start : start + BLOCK] = part.values.to(device)
        affine[start : start + BLOCK] = part.affine.to(device)
    return values, affine


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

    Raises UserError (config, exit 2) for an array or a list.
    """
    if isinstance(windows, np.ndarray | Tensor | list):
        raise usage_error(
            f"found {type(windows).__name__}",
            "expected windows, as bitimely.open_tokens(FOLDER)['train']",
            "Arrays are read by bitimely.Encoder",
            field="windows",
        )
    return EpochBatches(
        (sample_subjects(windows, fraction, seed),), size, seed, shuffle, ties, least
    )


def batch_sequences(
    windows: Windows, size: int, sequence: int, *, seed: int = 0, shuffle: bool = True
) -> Batches:
    """As `batches`, of windows that follow each other: `sequence` of a recording, then as many of
    another one, with `Batch.place`. Each epoch cuts the recordings at other windows.
    """
    return EpochBatches((windows,), size, seed, shuffle, sequence=sequence)


def order_sequences(
    places: np.ndarray, length: int, draw: np.random.Generator | None
) -> np.ndarray:
    """Positions of windows at `places` [n] (`Batch.place`) in sequences, int64 [n].

    Each sequence holds up to `length` windows of one recording in the order of time. With `draw`
    the first cut of each recording and the order of the sequences are random.
    """
    order = np.argsort(places, kind="stable")
    recording = places[order] // RECORDING
    first = np.searchsorted(recording, recording)
    ranks = np.arange(len(order)) - first
    if draw is None:
        return order
    ranks += draw.integers(length, size=len(order))[first]
    is_first = (np.diff(recording, prepend=-1) != 0) | (ranks % length == 0)
    sequences = np.split(order, np.flatnonzero(is_first)[1:])
    return np.concatenate([sequences[i] for i in draw.permutation(len(sequences))])


def mix_batches(
    sets: Sequence[TokenSet],
    size: int,
    *,
    seed: int = 0,
    shuffle: bool = True,
    ties: str = "canonical",
    least: int = 1,
) -> Batches:
    """Batches over several sets of windows, of any shapes, without their labels.

    Every batch is of one set (`Batch.source`). Each epoch holds every row of every set once: rows
    are shuffled within their set, and the batches of all sets with each other. `Batch.index`
    continues from set to set: the row in the first index, or that plus the lengths of the full
    indexes before.
    """
    return EpochBatches(tuple(sets), size, seed, shuffle, ties, least)


def collate(
    windows: TokenSet,
    rows: Sequence[int] | np.ndarray | None = None,
    *,
    draw: tuple[int, int] | None = None,
    narrow: bool = False,
) -> Batch:
    """The windows or event sequences at `rows` as one batch.

    Args:
        windows: the set.
        rows: positions in the full index; None = all of `windows`.
        draw: (seed, epoch) by which events of equal times are shuffled.
        narrow: values that are stored as int16 stay so, with their scale as `affine`.

    Returns:
        Signals: values [n, T, V] float32, mask [n, T, V] bool (None when nothing is missing in the
        set). Events: values [n, N] int64, times [n, N] and end [n] float32 months, mask [n, N],
        numbers [n, N] float32 (NaN: none). Both: target [n] int64 class ids, [n] float32 numbers or
        [n, C] float32 indicators (NaN: not known; None without labels), index [n] int64.
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


def read_items(
    windows: TokenSet, rows: np.ndarray
) -> Sequence[Tensor | tuple[Tensor, Tensor] | dict[str, Tensor]]:
    """The items of torch's data set at `rows` [n] int64, positions in the full index.

    See `TokenSet.__getitem__`.
    """
    arrays = {**windows.arrays(rows), "target": windows.targets(rows)}
    fields = {name: torch.from_numpy(array) for name, array in arrays.items() if array is not None}
    if not windows.regular:
        for name in fields.keys() & {"values", "times", "mask", "numbers"}:
            lacking = windows.length - fields[name].shape[1]
            padding = (0, 0) * (fields[name].dim() - 2) + (0, lacking)
            fields[name] = F.pad(fields[name], padding)
        columns = [field.unbind() for field in fields.values()]
        return [dict(zip(fields, item, strict=True)) for item in zip(*columns, strict=True)]
    values = fields["values"]
    if "mask" in fields:
        values = torch.where(fields["mask"], values, torch.nan)
    if "target" not in fields:
        return values.unbind()
    return list(zip(values.unbind(), fields["target"].unbind(), strict=True))


row_readers.add("tensors", read_items)


def find_device(module: torch.nn.Module) -> torch.device:
    """The device of the parameters of a module; without any the CPU."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on another device."""
    return Batch(
        batch.values.to(device), *(None if part is None else part.to(device) for part in batch[1:])
    )
