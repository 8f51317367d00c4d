"""Reads windows from disk through a memory map: verified on opening, normalised on reading.

Legend: n windows, T samples a window, V channels, C classes.
"""

from __future__ import annotations

import os
import resource
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from bitimely_core.errors import Reason, input_error, safe_text
from bitimely_core.formats.units import find_unit_factor
from bitimely_core.schemas.runs import RunData
from bitimely_core.schemas.tokens import (
    Preprocessing,
    SamplePreparation,
    WindowManifest,
    WindowOptions,
    WindowStatistics,
)
from bitimely_core.system_errors import raise_system_error
from bitimely_core.tokens.moments import compute_normalisation
from bitimely_core.tokens.sets import TokenSet, check_subjects, open_manifest, token_error
from bitimely_core.types import RECORDING

if TYPE_CHECKING:
    import polars as pl

RUN = 128  # samples that are normalised in one go: long inner loops and a small table


@dataclass(frozen=True)
class UnmappedWindows:
    """The windows of one file, open but not mapped: data of any size needs no address space.

    The file stays readable when it is replaced.
    """

    path: Path
    file: int  # descriptor, closed with this object
    dtype: np.dtype[Any]
    start: int  # byte of the first window
    shape: tuple[int, int, int]  # n, T, V

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.file)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, row: int) -> np.ndarray:
        """The window at `row` [T, V].

        Raises UserError (integrity, exit 5) when the file has shrunk.
        """
        window = np.empty(self.shape[1:], dtype=self.dtype)
        start = self.start + row * window.nbytes
        if os.preadv(self.file, [window.data.cast("B")], start) != window.nbytes:
            raise token_error(self.path, f"ends before window {row}", f"expected {len(self)}")
        return window


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Windows(TokenSet):
    """Windows of a biosignal view, see `TokenSet`."""

    inputs = "signals"
    manifest: WindowManifest
    statistics: WindowStatistics
    # memory maps [rows of the file, T, V] int16 or float32
    shards: tuple[np.ndarray | UnmappedWindows, ...]
    firsts: np.ndarray  # [shards + 1] int64: the first row of each, and the number of rows
    recording: np.ndarray  # [all rows] int32: position in the tables below
    centre: np.ndarray  # [recordings, V] float32: what is read becomes (value - centre) * factor
    factor: np.ndarray  # [recordings, V] float32

    @property
    def options(self) -> WindowOptions:
        """The resolved choices that made the windows."""
        return self.manifest.options

    @property
    def channel_names(self) -> tuple[str, ...]:
        """The V names, in the order of the values."""
        return self.options.value_channels

    @property
    def channels(self) -> int:
        """V."""
        return len(self.options.value_channels)

    @property
    def irregular(self) -> bool:
        """Whether rows have times of their own."""
        return self.options.irregular

    @property
    def regular(self) -> bool:
        """Whether all rows have values at the same times."""
        return not self.irregular

    @property
    def length(self) -> int:
        """T."""
        return self.options.window

    @property
    def rate(self) -> float:
        """Hz."""
        return self.options.rate

    @property
    def preparation(self) -> SamplePreparation:
        """From native samples to values."""
        return self.manifest.preparation

    def find_adapters(self, data: Sequence[RunData], channels: Sequence[int]) -> list[int]:
        """Those of as many channels, of a run on signals."""
        if any(part.vocabulary for part in data):
            return []
        return [number for number, count in enumerate(channels) if count == self.channels]

    def describe_misfit(self, data: Sequence[RunData], channels: Sequence[int]) -> tuple[str, str]:
        """Numbers of channels."""
        reads_events = any(part.vocabulary for part in data)
        wanted = "events" if reads_events else " or ".join(map(str, channels))
        return f"{self.channels} channels", wanted

    def take_classes(self, names: tuple[str, ...]) -> Self:
        """As `TokenSet.take_classes`: ids of labels follow the run's names."""
        if self.class_names in {(), names} or not set(self.class_names) <= set(names):
            return self
        classes = list(names)
        return replace(
            self,
            manifest=self.manifest.model_copy(update={"class_names": classes}),
            target=encode_targets(self.whole_index["label"], self.task, classes),
        )

    def read_as(self, trained: Preprocessing) -> Self:
        """The set with the normalisation of a training in the place of its own, and with a mask
        where the training had one; as it is where the training had another number of channels.

        Units of one quantity are converted. Raises UserError: unit (exit 4) for other quantities.
        """
        import polars as pl

        if len(trained.units) != len(self.manifest.units):
            return self
        units = zip(self.options.channels, self.manifest.units, trained.units, strict=True)
        convert = np.array([_find_factor(*channel) for channel in units])
        table = pl.read_parquet(self.folder / "recordings.parquet", glob=False)
        scale, offset = _read_affine(table, len(convert))
        trained_as = self.statistics.model_copy(update={"channels": list(trained.channels)})
        affine = compute_affine(trained_as, self.options, scale * convert, offset * convert)
        missing = self.manifest.missing or trained.missing
        return replace(
            self,
            statistics=trained_as,
            manifest=self.manifest.model_copy(update={"missing": missing}),
            centre=affine[0],
            factor=affine[1],
        )

    def arrays(
        self, rows: Sequence[int] | np.ndarray | None = None, draw: tuple[int, int] | None = None
    ) -> dict[str, np.ndarray | None]:
        """What a `Batch` of these rows holds besides labels.

        values [n, T, V] float32, mask [n, T, V] bool or None. Of irregular samples also their times
        [n, T] float32, in samples of the view's rate; 0 behind the last.
        """
        values, mask, times = self._read_rows(rows)
        return {"values": values, "mask": mask} | ({} if times is None else {"times": times})

    def values(self, rows: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
        """Normalised windows [n, T, V] float32 in the order of `rows`.

        0 where a value is missing.
        """
        return self.read(rows)[0]

    def mask(self, rows: Sequence[int] | np.ndarray | None = None) -> np.ndarray | None:
        """True = observed [n, T, V]; None when no value of the set is missing."""
        return self.read(rows)[1]

    def read(
        self, rows: Sequence[int] | np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """`values` and `mask` at once."""
        return self._read_rows(rows)[:2]

    @property
    def narrow(self) -> bool:
        """Whether `arrays` are the stored int16 values, scaled.

        Then nothing is missing, and no window has a scale of its own.
        """
        plain = not (self.manifest.missing or self.irregular or self.options.normalise == "window")
        return plain and all(shard.dtype == np.int16 for shard in self.shards)

    def narrow_arrays(self, rows: Sequence[int] | np.ndarray) -> dict[str, np.ndarray | None]:
        """Of windows that are `narrow`: values [n, T, V] int16, and affine [n, 2, V] float32.

        The affine is the centre and factor that `arrays` apply.
        """
        rows = self._check_rows(rows)
        recording = self.recording[rows]
        return {
            "values": self._gather(rows, np.int16),
            "affine": np.stack((self.centre[recording], self.factor[recording]), 1),
        }

    def find_places(self) -> np.ndarray:
        """`Batch.place` of all rows of the index, whatever the subset, [all rows] int64.

        Of windows around points the place is their rank in time.
        """
        start, options = self.whole_index["start"].to_numpy(), self.options
        order = np.lexsort((start, self.recording))
        recording, start = self.recording[order], start[order]
        first = np.searchsorted(recording, recording)
        if options.points:
            steps = np.arange(len(order)) - first
        else:
            steps = np.rint((start - start[first]) / (options.epoch or options.stride / self.rate))
        places = np.empty(len(order), np.int64)
        places[order] = recording.astype(np.int64) * RECORDING + steps.astype(np.int64)
        return places

    def read_stored(self, rows: np.ndarray) -> np.ndarray:
        """The stored values [n, T, V] int16 or float32 of the windows of one recording."""
        shard = self.shards[int(np.searchsorted(self.firsts, rows[0], side="right")) - 1]
        return self._gather(rows, shard.dtype.type)

    def _gather(self, rows: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
        x = np.empty((len(rows), self.length, len(self.options.channels)), dtype=dtype)
        order = np.argsort(rows, kind="stable")  # pages of the map in the order of the disk
        shards = np.searchsorted(self.firsts, rows, side="right") - 1
        numbers, places = shards.tolist(), (rows - self.firsts[shards]).tolist()
        for i in order.tolist():
            x[i] = self.shards[numbers[i]][places[i]]
        return x

    def _read_rows(
        self, rows: Sequence[int] | np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        rows = self._check_rows(rows)
        x = self._gather(rows, np.float32)
        mask = np.isfinite(x) if self.manifest.missing else None
        scale_values(x, self.centre[self.recording[rows]], self.factor[self.recording[rows]])
        times = None
        if self.irregular:
            times = np.nan_to_num(x[:, :, -1] * np.float32(self.rate))
            x = np.ascontiguousarray(x[:, :, :-1])
            mask = None if mask is None else np.ascontiguousarray(mask[:, :, :-1])
        if self.options.normalise == "window":
            x = normalise_windows(x, mask)
        if mask is not None:
            x[~mask] = 0
        return x, mask, times


def _find_factor(channel: str, unit: str, wanted: str) -> float:
    """From the unit of a channel to the one `wanted`; 1 where one of them is not known. Raises
    UserError: unit (exit 4).
    """
    factor = find_unit_factor(unit, wanted)
    if factor is None and unit.strip() and wanted.strip():
        raise input_error(
            Reason.UNIT,
            f"{safe_text(channel)} is in {safe_text(unit)}",
            f"the run reads {safe_text(wanted)}",
            "Convert it, or name the channel of that quantity at tokenize (--channels)",
            field="unit",
            found=safe_text(unit),
        )
    return 1.0 if factor is None else factor


def _read_affine(table: pl.DataFrame, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale and offset [recordings, V] of `recordings.parquet`."""
    scale, offset = table["scale", "offset"].to_numpy().T.reshape(2, -1, channels)
    return scale, offset


def scale_values(x: np.ndarray, centre: np.ndarray, factor: np.ndarray) -> None:
    """`x` [n, T, V] becomes (x - centre) * factor, in place; both [n, V]."""
    n, length, channels = x.shape
    # runs of several samples: numpy's inner loops over V numbers alone would cost three times as
    # much
    run = next(k for k in range(min(RUN, length), 0, -1) if length % k == 0)
    runs = x.reshape(n, length // run, run * channels)
    runs -= np.tile(centre, (1, run))[:, None]
    runs *= np.tile(factor, (1, run))[:, None]


def normalise_windows(x: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """Each window and channel of `x` [n, T, V] less its mean, over its standard deviation.

    The deviation is 1 where it is constant; sums are float64.
    """
    seen = np.ones((), dtype=bool) if mask is None else mask
    count = np.maximum(np.broadcast_to(seen, x.shape).sum(axis=1, keepdims=True), 1)
    x = x - np.sum(x, axis=1, keepdims=True, where=seen, dtype=np.float64) / count
    std = np.sqrt(np.sum(x * x, axis=1, keepdims=True, where=seen) / count)
    return (x / np.where(std > 0, std, 1.0)).astype(np.float32)


def open_windows(folder: str | Path, verify: bool = True) -> Windows:
    """Open the windows in `folder`. Raises UserError as `tokens.open_tokens`."""
    import polars as pl

    folder = Path(folder)
    manifest = open_manifest(folder, WindowManifest, verify)
    options = manifest.options
    index = pl.read_parquet(folder / "index.parquet", glob=False)
    check_subjects(index, options.split, folder)
    statistics = WindowStatistics.load(folder / "statistics.json")
    shape = (options.window, len(options.channels))
    shards = tuple(
        map_windows(folder / shard.name, np.dtype(shard.dtype), shape) for shard in manifest.shards
    )
    count = sum(map(len, shards))
    if count != index.height:
        raise token_error(folder, f"{count} windows", f"the index has {index.height}")
    table = pl.read_parquet(folder / "recordings.parquet", glob=False)
    recordings = table["recording_id"].unique(maintain_order=True)
    affine = _read_affine(table, shape[1])
    return assemble_windows(folder, manifest, statistics, index, shards, recordings, affine)


def assemble_windows(
    folder: Path,
    manifest: WindowManifest,
    statistics: WindowStatistics,
    index: pl.DataFrame,
    shards: tuple[np.ndarray | UnmappedWindows, ...],
    recordings: pl.Series,
    affine: tuple[np.ndarray, np.ndarray],
) -> Windows:
    """The set of these parts.

    `affine` is scale and offset [recordings, V]: physical = stored value * scale + offset.
    """
    import polars as pl

    options = manifest.options
    centre, factor = compute_affine(statistics, options, *affine)
    numbers = pl.Series(range(len(recordings)), dtype=pl.Int32)
    recording = index["recording_id"].replace_strict(recordings, numbers, return_dtype=pl.Int32)
    return Windows(
        folder=folder,
        manifest=manifest,
        statistics=statistics,
        rows=np.arange(index.height),
        whole_index=index,
        target=encode_targets(index["label"], options.task, manifest.class_names),
        shards=shards,
        firsts=np.cumsum([0, *map(len, shards)]),
        recording=recording.to_numpy(),
        centre=centre,
        factor=factor,
    )


def compute_affine(
    statistics: WindowStatistics, options: WindowOptions, scale: np.ndarray, offset: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`centre` and `factor` [recordings, V] float32 of `Windows`.

    Physical = stored value * scale + offset, both [recordings, V].
    """
    mean, std = np.zeros(scale.shape[1]), np.ones(scale.shape[1])
    if options.normalise == "channel":
        mean, std = compute_normalisation(statistics.channels)
    if options.irregular:  # times stay as they are
        mean[-1], std[-1] = 0.0, 1.0
    return ((mean - offset) / scale).astype(np.float32), (scale / std).astype(np.float32)


def encode_targets(label: pl.Series, task: str, class_names: list[str]) -> np.ndarray | None:
    """The index's labels as numbers, see `Windows.targets`."""
    import polars as pl

    if label.null_count() == len(label):
        return None
    if task == "regression":
        return label.to_numpy().astype(np.float32)
    if task == "multilabel":
        columns = [label.list.contains(name).to_numpy() for name in class_names]
        return np.array(columns, dtype=np.float32).reshape(-1, len(label)).T
    ids = pl.Series(range(len(class_names)), dtype=pl.Int64)
    return label.replace_strict(pl.Series(class_names), ids, return_dtype=pl.Int64).to_numpy()


def map_windows(
    path: Path, dtype: np.dtype[Any], shape: tuple[int, int]
) -> np.ndarray | UnmappedWindows:
    """The windows of one Arrow file [n, T, V], in place.

    Under a limit of the address space (RLIMIT_AS) the file is mapped only to find its windows,
    which are then read one by one: maps of a large set would use up what the limit leaves.

    Raises UserError: integrity (exit 5) when the file has another layout, resource_limit (exit 6)
    when not even one file can be mapped.
    """
    import pyarrow as pa

    try:
        raw = pa.memory_map(str(path), "r")
        begin = raw.read_buffer().address
        file = pa.ipc.open_file(raw)
        array = file.get_batch(0).column(0)
        buffer = array.buffers()[1]
        values = shape[0] * shape[1]
        flat = np.frombuffer(buffer, dtype=dtype.newbyteorder("<"), count=len(array) * values)
        layout = file.num_record_batches, array.offset, array.type.byte_width
    except (OSError, pa.ArrowException, ValueError) as error:
        raise_system_error(error, path)
        raise token_error(
            path, f"not readable: {safe_text(str(error))}", "expected an Arrow file of windows"
        ) from error
    if layout != (1, 0, values * dtype.itemsize):
        raise token_error(
            path,
            "another layout",
            f"expected one batch of windows of {shape[0]} x {shape[1]} {dtype}",
        )
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return UnmappedWindows(
            path,
            os.open(path, os.O_RDONLY | os.O_CLOEXEC),
            flat.dtype,
            buffer.address - begin,
            (len(array), *shape),
        )
    return flat.reshape(len(array), *shape)
