"""What all methods share: the rows that they read, and a fitted method as settings and arrays.

A method is two functions: one fits arrays on the rows of train and validation, one computes the
predictions of other rows from those arrays. It is stored as `config.json` and `model.safetensors`,
as a network is.

Legend: n rows, K classes or labels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import JsonValue

from bitimely_core.config import ModelConfig, validate
from bitimely_core.errors import Reason, input_error, integrity_error, safe_text, usage_error
from bitimely_core.progress import report_progress
from bitimely_core.registry import methods
from bitimely_core.store import storage
from bitimely_core.store.records import (
    Part,
    StoredRecord,
    check_result,
    require_manifest,
    write_results,
)
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import NativeWindow, Record

Array = npt.NDArray[Any]
T = TypeVar("T")
Arrays = dict[str, Array]  # name -> weights of a fitted method

BLOCK = 256  # windows that are read at a time


class MethodConfig(ModelConfig):
    """Settings of a method. Those of networks, which it inherits, are not read."""


@dataclass(frozen=True)
class MethodRows:
    """Rows of a token set as a method reads them, in their order.

    `records` are the recordings that windows were cut from, where they are not in a cache.
    """

    windows: Any
    records: tuple[Record, ...] | None = None

    def __len__(self) -> int:
        return len(self.windows)

    def read_blocks(self, size: int = BLOCK) -> Iterator[Array]:
        """The windows as networks read them, blocks [b, T, V] float32."""
        rows = self.windows.rows
        for start in range(0, len(rows), size):
            yield self.windows.values(rows[start : start + size])

    def labels(self) -> Array:
        """Class ids [n], labels [n, K] (NaN: not known) or values [n]."""
        return np.asarray(self.windows.targets(None))

    def map_native(
        self, channels: Collection[str], function: Callable[[NativeWindow], Any]
    ) -> list[Any]:
        """`function` of the recording under each window, from the cache that the windows were made
        of.

        Raises UserError (incomplete, exit 4) where that cache has gone or changed.
        """
        windows = self.windows
        places = defaultdict[str, list[int]](list)
        for place, recording in enumerate(windows.index["recording_id"].to_list()):
            places[recording].append(place)
        starts, seconds = windows.index["start"].to_list(), windows.length / windows.rate
        results: list[Any] = [None] * len(starts)
        for recording, record in self._open_records(channels, places):
            for place in places[recording]:
                window = _cut_native(record, channels, starts[place], seconds)
                results[place] = function(window)
        return results

    def _open_records(
        self, channels: Collection[str], recordings: Collection[str]
    ) -> Iterator[tuple[str, Record]]:
        """The recordings of the windows with their ids."""
        if self.records is not None:
            yield from zip(recordings, self.records, strict=True)
            return
        from bitimely_core import cache

        windows = self.windows
        folder = windows.folder.parents[1] / "cache" / windows.dataset
        opened = cache.open_cache(folder, verify=False)
        if opened.manifest.manifest_sha256 != windows.manifest.cache:
            raise input_error(
                Reason.INCOMPLETE,
                "another cache than that of the windows",
                "expected the recordings",
                "Tokenize again",
                file=str(folder),
            )
        for record in opened.records(channels, recordings, labels=False):
            yield record.recording_id, record


def _cut_native(
    record: Record, channels: Collection[str], start: float, duration: float
) -> NativeWindow:
    """The samples of each channel in a window, of its longest segment there, in its unit."""
    samples, rates = dict.fromkeys(channels, np.zeros(0)), dict.fromkeys(channels, 0.0)
    for signal in record.signals:
        if signal.channel not in samples:
            continue
        first = round((start - signal.onset) * signal.rate)
        last = first + round(duration * signal.rate)
        inside = signal.samples[max(first, 0) : max(last, 0)]
        if len(inside) > len(samples[signal.channel]):
            samples[signal.channel] = inside * float(signal.scale) + signal.offset
            rates[signal.channel] = signal.rate
    return NativeWindow(samples, rates)


class MethodFit(NamedTuple):
    """What a method is fitted on."""

    train: MethodRows
    validation: MethodRows
    seed: int

    def map_splits(self, function: Callable[[MethodRows], T]) -> dict[str, T]:
        """`function` of the rows of both splits."""
        return {"train": function(self.train), "validation": function(self.validation)}

    def labels(self) -> dict[str, Array]:
        """The labels of both splits."""
        return self.map_splits(MethodRows.labels)

    def report(self, text: str, done: int, total: int) -> None:
        """Show the progress."""
        report_progress(f"{text} {self.train.windows.name}", done, total)


class MethodTask(Part):
    """What a fitted method predicts."""

    task: str
    class_names: tuple[str, ...] = ()


class MethodRecord(StoredRecord):
    """`config.json` of a fitted method."""

    REPAIR: ClassVar[str] = "Restore a copy, or train again under --force-new"

    model: dict[str, JsonValue]  # settings
    method: MethodTask


@dataclass(frozen=True, eq=False)
class FittedMethod:
    """A method with the arrays that it was fitted to."""

    config: ModelConfig
    task: str  # classification, multilabel, regression or survival
    class_names: tuple[str, ...]
    arrays: Arrays = field(repr=False)

    @property
    def name(self) -> str:
        """The method."""
        return self.config.name

    def count_parameters(self) -> int:
        """Numbers that were fitted or drawn."""
        return sum(array.size for array in self.arrays.values())

    def predict(self, rows: MethodRows) -> Array:
        """Probabilities [n, K], of times to event incidences, or values [n] in their unit."""
        if not len(rows):
            shape = (0,) if self.task == "regression" else (0, max(len(self.class_names), 1))
            return np.zeros(shape)
        return np.asarray(methods[self.name].facts.score(self, rows), np.float64)

    def save(self, folder: str | Path) -> None:
        """`model.safetensors` with all arrays and `config.json`; read them with `load`."""
        from safetensors.numpy import save

        shape = {"name", "channels", "length"}
        read = shape | (type(self.config).model_fields.keys() - ModelConfig.model_fields.keys())
        record = MethodRecord(
            model=self.config.model_dump(mode="json", include=read),
            method=MethodTask(task=self.task, class_names=self.class_names),
        )
        arrays = {name: np.ascontiguousarray(array) for name, array in self.arrays.items()}
        files: dict[str, storage.Content | None] = {
            "model.safetensors": save(arrays),
            "config.json": record.encode(),
        }
        write_results(Path(folder), files)


def make_config(name: str, windows: Any, **settings: Any) -> ModelConfig:
    """The settings of a method for these windows. Raises UserError (config, exit 2)."""
    shape = {"name": name, "channels": windows.channels, "length": windows.length}
    config = validate(methods[name].facts.config, {**shape, **settings})
    return resolve_config(config, windows)


def resolve_config(config: ModelConfig, windows: Any) -> ModelConfig:
    """The settings with what the windows decide. Raises UserError (config, exit 2) for windows
    that the method does not read.
    """
    facts = methods[config.name].facts
    if windows.inputs not in facts.input or windows.task not in facts.tasks:
        fitting = [
            name
            for name, other in sorted(methods.items())
            if windows.inputs in other.facts.input and windows.task in other.facts.tasks
        ]
        raise usage_error(
            f"{config.name} does not read {windows.inputs} with a task of {windows.task}",
            f"expected one of {', '.join(fitting) or 'the networks'}",
            "See: bitimely list models",
            field="MODEL",
        )
    shape = {"channels": windows.channels, "length": windows.length}
    resolved: ModelConfig = facts.resolve(config.model_copy(update=shape), windows)
    return resolved


def fit_method(config: ModelConfig, inputs: MethodFit) -> FittedMethod:
    """The method of resolved settings, fitted."""
    windows = inputs.train.windows
    arrays = methods[config.name](config, inputs)
    return FittedMethod(config, windows.task, tuple(windows.class_names), arrays)


def load(folder: str | Path) -> FittedMethod:
    """The method that `FittedMethod.save` wrote. Raises UserError: a file is missing, damaged or of
    another form (integrity, exit 5).
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = Path(folder) / "config.json"
    record = MethodRecord.load(path)
    try:
        arrays = load_file(check_result(path.with_name("model.safetensors"))[0])
    except (OSError, SafetensorError, ValueError) as error:
        raise_system_error(error, folder)
        raise integrity_error(
            str(folder), f"damaged ({safe_text(str(error))})", "", MethodRecord.REPAIR
        ) from error
    require_manifest(path.parent)
    kind = methods[str(record.model.get("name"))].facts.config
    config = validate(kind, record.model, str(path))
    return FittedMethod(config, record.method.task, record.method.class_names, arrays)
