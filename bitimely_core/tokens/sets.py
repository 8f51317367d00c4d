"""What windows and event sequences have in common: a verified folder, an index, splits, labels.

Legend: n rows, C classes.
"""

from __future__ import annotations

import hashlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, SupportsIndex, TypeVar, overload

import numpy as np

from bitimely_core import registry
from bitimely_core.errors import (
    Reason,
    UserError,
    check_choice,
    input_error,
    integrity_error,
    safe_text,
    usage_error,
)
from bitimely_core.registry import Task, View, datasets
from bitimely_core.schemas.runs import RunData
from bitimely_core.schemas.tokens import (
    SamplePreparation,
    TokenManifest,
    TokenOptions,
    TokenStatistics,
)
from bitimely_core.store import manifests
from bitimely_core.tokens.open_views import advise_labels
from bitimely_core.tokens.splits import SHARED
from bitimely_core.types import SPLITS
from bitimely_core.wording import list_first

if TYPE_CHECKING:
    import polars as pl
    from torch.utils.data import Dataset

    MapDataset = Dataset[Any]
else:
    MapDataset = object  # torch asks for `__len__` and `__getitem__` alone

Manifest = TypeVar("Manifest", bound=TokenManifest)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TokenSet(ABC, MapDataset):
    """Training rows of one view, as a map-style data set of torch.

    They are all of them, or those of one split (`rows["train"]`). A pickle holds the folder and the
    rows: a worker process opens the files anew, and no data are copied to it.

    `rows` everywhere are positions in the full index, the numbers in `index["window"]` and in
    `Batch.index`; None = all of this subset. Reading a row that is not in the subset is an
    IndexError, so that a test row cannot slip into training.
    """

    folder: Path
    manifest: TokenManifest
    statistics: TokenStatistics
    rows: np.ndarray  # [n] int64, ascending
    whole_index: pl.DataFrame
    target: np.ndarray | None  # of all rows
    vocabulary: tuple[str, ...] = ()  # of events: names of all ids, the special ones first
    inputs: ClassVar[str]  # what a model reads: signals or events

    @property
    @abstractmethod
    def regular(self) -> bool:
        """Whether all rows have values at the same times."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Timesteps of a row, or the most that one has."""

    @property
    @abstractmethod
    def channels(self) -> int:
        """Values of a timestep."""

    @property
    def data_kind(self) -> registry.DataKind:
        """The operations on this kind of data."""
        return registry.data_kinds[registry.TOKEN_KINDS[self.manifest.kind]]

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def options(self) -> TokenOptions:
        """The resolved choices that made the windows."""
        return self.manifest.options

    @property
    def dataset(self) -> str:
        """The data set's name."""
        return self.options.dataset

    @property
    def view(self) -> str:
        """The view's name, "" for the data set's own."""
        return self.options.view

    @property
    def subject_unit(self) -> str:
        """What a subject id stands for: subject, recording, segment or window.

        One person may have several of the last three.
        """
        return registry.find_subject_unit(self.dataset, self.whole_index)

    @property
    def task(self) -> Task:
        """none, classification, multilabel or regression."""
        return self.options.task

    @property
    def class_names(self) -> tuple[str, ...]:
        """The C names, in the order of the ids; () without classes."""
        return tuple(self.manifest.class_names)

    @property
    def classes(self) -> int:
        """C; 1 for regression, 0 without labels."""
        return 1 if self.task == "regression" else len(self.class_names)

    @property
    def target_unit(self) -> str | None:
        """The unit of the labels of a regression, where the view states one."""
        view = self._find_stated_view()
        return view.unit or None if view and self.task == "regression" else None

    @property
    def label_scales(self) -> Literal["", "rate", "duration"]:
        """What stretching the time does to the labels, as the view states it."""
        view = self._find_stated_view()
        return view.label_scales if view else ""

    def _find_stated_view(self) -> View | None:
        """The view of the data set, where that is registered here."""
        return self.list_stated_views().get(self.view)

    def list_stated_views(self) -> Mapping[str, View]:
        """The views of the data set by name; none where it is not registered here."""
        entry = datasets.get(self.dataset)
        return entry.facts.views if entry else {}

    @property
    def split(self) -> str:
        """How the splits were made: subject, official, time or random-window."""
        return self.options.split

    @property
    def seed(self) -> int:
        """The seed of the split."""
        return self.options.seed

    @property
    def normalise(self) -> str:
        """How values are read: channel (statistics of the training split), window or none."""
        return self.options.normalise

    @property
    def preparation(self) -> SamplePreparation:
        """From native samples to values; empty for codes, which are native."""
        return SamplePreparation(channels=())

    @property
    def notices(self) -> list[str]:
        """Caveats that are shown with every score on these windows."""
        return list(self.manifest.notices)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the manifest, which holds those of all files.

        Runs and reports name the data by it.
        """
        return self.manifest.manifest_sha256

    @property
    def index(self) -> pl.DataFrame:
        """window, subject_id, recording_id, start (seconds), label, split of this subset's rows."""
        if len(self.rows) == self.whole_index.height:
            return self.whole_index
        return self.whole_index[self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        shape = f"{len(self):,} rows of {self.length} x {self.channels}"
        return f"{type(self).__name__}({self.name!r}: {shape}, {self.task})"

    @overload
    def __getitem__(self, key: str | slice | Sequence[int] | np.ndarray) -> Self: ...

    @overload
    def __getitem__(self, key: SupportsIndex) -> Any: ...

    def __getitem__(self, key: str | slice | Sequence[int] | np.ndarray | SupportsIndex) -> Any:
        """The rows of a split, slice, mask [n] bool or ascending positions [k], as a set; the row
        at a position, from 0, as tensors.

        A row of regular windows is `(values, target)`, values [T, V] float32 with NaN where one is
        missing, and the target as in `targets`; without labels `values` alone. A row with times of
        its own is a dict of the fields of a `Batch`, padded to one length.

        Raises UserError (unknown_name, exit 2) for another split, (config, exit 2) for positions
        in another order, IndexError.
        """
        if isinstance(key, str):
            check_choice("split", key, SPLITS)
            return self.subset((self.index["split"] == key).to_numpy())
        if isinstance(key, slice):
            return replace(self, rows=np.sort(self.rows[key]))
        choice = np.asarray(key)
        if choice.ndim:
            return self._select_rows(choice)
        return self.__getitems__([operator.index(choice.item())])[0]

    def _select_rows(self, choice: np.ndarray) -> Self:
        """The rows of a mask or of positions. Raises UserError (config, exit 2), IndexError."""
        chosen = self.subset(choice)
        if (np.diff(chosen.rows) <= 0).any():
            raise usage_error(
                "positions that repeat or fall",
                "expected ascending ones: the rows of a set keep their order",
                "Sort them, or take them of np.asarray(rows)",
            )
        return chosen

    def __getitems__(self, positions: Sequence[int]) -> Sequence[Any]:
        """The rows at these positions, each as `__getitem__` gives it.

        A loader of torch asks for a batch at once: a seventh of the time of its rows one by one.
        """
        rows = self.rows[np.asarray(positions, dtype=np.int64)]
        return registry.row_readers["tensors"](self, rows)

    def __iter__(self) -> Iterator[Any]:
        """The rows one by one, as `__getitem__` gives them."""
        return map(self.__getitem__, range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """`np.asarray(rows)`: [n, T, V] float32, NaN where a value is missing.

        Raises UserError (config, exit 2) for rows with times.
        """
        if not self.regular:
            raise usage_error(
                f"{self.name} has a time for every value",
                "expected windows at one rate for an array",
                "Read arrays() or bitimely.batches(), or tokenize at one rate",
            )
        if copy is False:
            raise ValueError("the values are normalised on reading; expected copy=None or True")
        arrays = self.arrays()
        values, mask = arrays["values"], arrays["mask"]
        assert values is not None
        if mask is not None:
            values = np.where(mask, values, np.float32(np.nan))
        return np.asarray(values, dtype=dtype)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if not (self.folder / manifests.MANIFEST).is_file():  # in memory
            return super().__reduce_ex__(protocol)
        changes = {"rows": self.rows, **self._describe_reading()}
        if self.target is None:
            changes["target"] = None
        return reopen, (self.folder.resolve(), self.fingerprint, changes)

    def _describe_reading(self) -> dict[str, Any]:
        """Further fields that may differ from those of the set as it is opened."""
        return {}

    def subset(self, keep: np.ndarray) -> Self:
        """The rows where `keep` [n] bool is true, or those at these positions."""
        return replace(self, rows=self.rows[keep])

    def subjects(self) -> np.ndarray:
        """The subject of each row [n] str."""
        return self.index["subject_id"].to_numpy()

    @property
    def vocabulary_sha256(self) -> str | None:
        """SHA-256 of the vocabulary; None without one."""
        text = "\n".join(self.vocabulary)
        return hashlib.sha256(text.encode()).hexdigest() if text else None

    @abstractmethod
    def find_adapters(self, data: Sequence[RunData], channels: Sequence[int]) -> list[int]:
        """The adapters that read this set, of a run that was trained on `data`.

        It has one for each of `channels`.
        """

    @abstractmethod
    def describe_misfit(self, data: Sequence[RunData], channels: Sequence[int]) -> tuple[str, str]:
        """What the set has and what such a run reads, where no adapter fits."""

    def take_classes(self, names: tuple[str, ...]) -> Self:
        """The set with the classes of a run in its order, also those that no label here names; as
        it is where it has others.
        """
        return self

    @abstractmethod
    def arrays(
        self, rows: Sequence[int] | np.ndarray | None = None, draw: tuple[int, int] | None = None
    ) -> dict[str, np.ndarray | None]:
        """Fields of a `Batch` of these rows besides labels.

        `draw` = (seed, epoch) of the order of ties.
        """

    def targets(self, rows: Sequence[int] | np.ndarray | None = None) -> np.ndarray | None:
        """Class ids [n] int64, indicators [n, C] float32, or numbers [n] float32.

        None without labels.
        """
        return None if self.target is None else self.target[self._check_rows(rows)]

    def _check_rows(self, rows: Sequence[int] | np.ndarray | None) -> np.ndarray:
        if rows is None:
            return self.rows
        selected = np.asarray(rows, dtype=np.int64)
        nearest = np.minimum(np.searchsorted(self.rows, selected), len(self.rows) - 1)
        if len(selected) and (len(self.rows) == 0 or (self.rows[nearest] != selected).any()):
            raise IndexError(
                "rows are positions in the full index (windows.rows), "
                "and these are not all of this subset"
            )
        return selected


def reopen(folder: Path, fingerprint: str, changes: dict[str, Any]) -> Any:
    """The set of a pickle, with the fields that differ from those of the folder.

    Raises UserError as `open_tokens`; integrity (exit 5) where the folder holds another set now.
    """
    rows: TokenSet = find_token_kind(folder).open_tokens(folder, verify=False)
    if rows.fingerprint != fingerprint:
        raise integrity_error(
            str(folder), "holds another set than when it was pickled", hint="Open the tokens again"
        )
    return replace(rows, **changes)


def find_token_kind(folder: Path) -> registry.DataKind:
    """The kind of data of a token set. Raises UserError as `manifests.read_manifest`."""
    kind = manifests.read_manifest(folder).get("kind", "")
    return registry.data_kinds[registry.TOKEN_KINDS.get(kind, "recordings")]


def open_manifest(folder: Path, record: type[Manifest], verify: bool) -> Manifest:
    """The manifest of tokens as a `record`; with `verify`, its files are compared.

    Raises UserError as `open_tokens`.
    """
    values, kind = manifests.read_manifest(folder), record.model_fields["kind"].default
    if values.get("kind") != kind:
        raise input_error(
            Reason.UNSUPPORTED_FORMAT,
            f"holds {safe_text(str(values.get('kind')))}",
            f"expected {kind}",
            "Give a folder made by tokenize",
            file=str(folder),
        )
    manifest = record.parse(values, folder / manifests.MANIFEST)
    if verify:
        manifest.check_files(folder)
    return manifest


def token_error(path: Path, problem: str, requirement: str) -> UserError:
    """The error (integrity, exit 5) for a file of a token set."""
    return integrity_error(str(path), problem, requirement, "Tokenize again")


def name_subjects(subjects: Iterable[object]) -> str:
    """The first of some subjects, as the cache names them."""
    return list_first([safe_text(str(subject)) for subject in subjects], 5)


def check_subjects(index: pl.DataFrame, split: str, folder: Path) -> None:
    """Raises UserError (subject_leakage, exit 4) when a subject is in two splits.

    Some splits allow it (time, random-window).
    """
    import polars as pl

    splits = index.group_by("subject_id").agg(pl.col("split").n_unique())
    several = splits.filter(pl.col("split") > 1)["subject_id"].cast(pl.String).sort()
    if len(several) and split not in SHARED:
        raise input_error(
            Reason.SUBJECT_LEAKAGE,
            f"{len(several):,} subjects are in more than one split: {name_subjects(several)}",
            "expected every subject in one",
            "Tokenize again with --split subject",
            file=str(folder),
            found=str(len(several)),
            expected="0",
        )


def require_labels(windows: TokenSet) -> None:
    """Raises UserError (config, exit 2) for windows without labels; it names a view of their data
    set that has some.
    """
    if windows.task != "none":
        return
    cache = windows.folder.parent.parent / "cache" / windows.dataset
    raise usage_error(
        f"{windows.name} has no labels",
        "expected a labelled view",
        advise_labels(windows.dataset, cache),
        field="--data",
    )


def require_plain_labels(windows: TokenSet) -> None:
    """As `require_labels`, and without times to event. Raises UserError (config, exit 2)."""
    require_labels(windows)
    if windows.task == "survival":
        raise usage_error(
            f"{windows.name} has times to event",
            "expected classes, labels or numbers",
            "Tokenize without --time-to-event for it; `bitimely evaluate` shows the calibration of "
            "times to event",
            field="--data",
        )
