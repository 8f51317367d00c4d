"""A run on disk: its record, scores, windows and model."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast

import numpy as np

from bitimely_core import __version__
from bitimely_core.config import RESUME_EXEMPT as TRAIN_EXEMPT
from bitimely_core.errors import (
    Reason,
    UserError,
    input_error,
    integrity_error,
    raise_differences,
    usage_error,
)
from bitimely_core.registry import find_versions
from bitimely_core.schemas.runs import (
    ReadingOptions,
    RunData,
    RunRecord,
    SplitCount,
    TrainSubjects,
    flatten_keys,
)
from bitimely_core.schemas.scores import Scores
from bitimely_core.schemas.tokens import HistoryPreparation, Preprocessing
from bitimely_core.store import locks, manifests, storage
from bitimely_core.store.records import (
    ResultManifest,
    complete_results,
    has_result,
    is_listed,
    write_results,
)
from bitimely_core.store.workspace import find_run_folder, locate
from bitimely_core.system_errors import raise_system_error
from bitimely_core.tokens.sequences import HISTORIES
from bitimely_core.tokens.sets import name_subjects
from bitimely_core.tokens.splits import EXTERNAL

if TYPE_CHECKING:
    from pydantic import JsonValue

    from bitimely_core.heads import Head
    from bitimely_core.methods.method_contract import FittedMethod
    from bitimely_core.models.base import Model
    from bitimely_core.tokens import TokenSet, Windows

FORMAT = 1
PREPROCESSING = "preprocessing.json"  # of a run with a head on recordings
OTHER_SEEDS = "Tokenize all views with the same --seed and train again"
OTHER_PSEUDONYMS = "Train again: after another ingest people have other pseudonyms"
SPLITS = ("train", "validation", "test")


def load_predictor(folder: Path, record: RunRecord) -> Head | FittedMethod:
    """What predicts the labels of a run, from the `folder` of its model."""
    if record.is_method:
        from bitimely_core.methods import method_contract

        return method_contract.load(folder)
    from bitimely_core import heads  # with torch

    return heads.load(folder).eval()


@dataclass(eq=False)
class Run:
    """A run in `folder` (`runs/<run>`, or another folder with the same files). Windows, model and
    scores are read when they are used, and once.

    `data` is the name of the tokens that `windows` opens by `open_windows`: name of tokens ->
    windows with all splits.
    """

    folder: Path
    record: RunRecord
    data: str
    open_windows: Callable[[str], Windows]

    @classmethod
    def open(
        cls,
        run: str | Path,
        workspace: str | Path,
        *,
        data: str | None = None,
        open_windows: Callable[[str], Windows] | None = None,
    ) -> Self:
        """The run called `run`, or the one in the folder `run`, with `runs/` and `tokens/` in
        `workspace`.

        `data` names the tokens to read; None: the first that the run was trained on. `open_windows`
        opens them (`workflows.prepare` also builds missing ones); None: those in `workspace`.
        Raises UserError: not_found (exit 2), integrity (exit 5).
        """
        from bitimely_core import tokens

        workspace = Path(workspace)
        folder = find_run_folder(run, workspace)
        record = RunRecord.load(folder / "run.json")
        return cls(
            folder,
            record,
            data or record.data[0].name,
            open_windows or (lambda name: tokens.open_tokens(locate(workspace, "tokens", name))),
        )

    @property
    def name(self) -> str:
        """The name under which it was trained."""
        return self.record.run

    def windows(self) -> Windows:
        """The windows called `data`, all splits. Raises UserError: incomplete (exit 4), integrity
        (exit 5).
        """
        return self._windows

    def model(self) -> Model:
        """The backbone in eval mode, with the adapter of `windows`. Raises UserError: config (exit
        2), also for a method without a network; integrity (exit 5).
        """
        self.require_network()
        return self._model if self._head is None else cast("Head", self._head).model

    def head(self) -> Head | FittedMethod | None:
        """What predicts labels: the fine-tuned model with its head, in eval mode, or a fitted
        method; None for a pre-training. Raises UserError: config (exit 2), integrity (exit 5).
        """
        return self._head

    @cached_property
    def _windows(self) -> Windows:
        windows = self.require_single().open_windows(self.data)
        if self.record.is_finetuned:
            windows = windows.take_classes(self.record.data[0].class_names)
        if windows.split != EXTERNAL or windows.vocabulary:
            return windows
        if not self.record.is_finetuned:
            raise usage_error(
                f"{windows.name} has no training split",
                f"expected one: {self.name} has no statistics to read values by",
                f"Fine-tune it first, or run: bitimely tokenize {windows.dataset}/{windows.view} "
                "--split subject",
                field="--data",
            )
        return windows.read_as(self.preprocessing())

    @cached_property
    def _head(self) -> Head | FittedMethod | None:
        if not self.record.is_finetuned:
            return None
        self.adapter_for(self.windows())
        return self.load_head()

    @cached_property
    def _model(self) -> Model:
        from bitimely_core import models

        adapter = self.adapter_for(self.windows())
        model = models.load(self.verified_weights())
        model.select_adapter(adapter)
        return model.eval()

    @cached_property
    def scores(self) -> Scores | None:
        """`scores.json`; None before the run is evaluated."""
        path = self.folder / "scores.json"
        return Scores.load(path) if has_result(path) else None

    @cached_property
    def train_subjects(self) -> TrainSubjects | None:
        """Hashes of the training subjects; None for an unfinished training and an export."""
        path = self.folder / "train_subjects.json"
        # without them nobody would notice that people were trained on
        return TrainSubjects.load(path) if has_result(path) or is_listed(path) else None

    def find_training(self, workspace: Path) -> TokenSet | None:
        """The rows of the subjects that the run was trained on; None where `workspace` does not
        hold these tokens, or files of the run or the tokens are damaged.
        """
        windows = self.find_tokens(workspace)
        try:
            subjects = self.train_subjects
        except UserError as error:
            raise_system_error(error)
            return None  # less can be said; who needs this file refuses it
        if subjects is None or windows is None:
            return None
        train, marks = windows["train"], frozenset(subjects.marks)
        keep = [mark_subject(windows.dataset, subject) in marks for subject in train.subjects()]
        return train.subset(np.array(keep))

    def find_tokens(self, workspace: Path) -> TokenSet | None:
        """The tokens that the run was trained on, all splits; None where `workspace` does not hold
        them as they were, or they are damaged.
        """
        from bitimely_core import tokens

        data = self.record.data[0]
        windows: TokenSet
        try:
            windows = tokens.open_tokens(locate(workspace, "tokens", data.name), verify=False)
        except UserError as error:
            raise_system_error(error)
            return None
        return windows if windows.fingerprint == data.fingerprint else None

    def require_finished(self) -> Self:
        """The run itself. Raises UserError: incomplete (exit 4) with the command that ends it where
        its training has not ended; as `require_single`.
        """
        if not self.record.finished:
            raise input_error(
                Reason.INCOMPLETE,
                "the training of this run has not ended",
                "expected a finished run",
                "Repeat the command that started it: it resumes where it stopped",
                file=str(self.folder),
            )
        return self.require_single()

    def require_single(self) -> Self:
        """The run itself. Raises UserError (config, exit 2) where it pools folds or seeds."""
        members = self.record.members
        if members is not None:
            raise usage_error(
                f"{self.name} pools {members.describe()} and has no weights of its own",
                "expected a run with one model",
                f"Choose one of them, for example {members.runs[0]}",
                file=str(self.folder),
            )
        return self

    def require_network(self) -> Self:
        """The run itself. Raises UserError (config, exit 2) for a method without a network."""
        if self.record.is_method:
            raise usage_error(
                f"{self.name} is a run of {self.record.model}, which has no network",
                "expected a run of a network",
                "See: bitimely list runs",
                field="RUN",
            )
        return self

    def verified_weights(self) -> Path:
        """The model folder, its weights compared with the hash in `run.json`. Raises UserError:
        integrity (exit 5); config (exit 2) for a run over folds or seeds.
        """
        self.require_single()
        path = self.folder / "model" / "model.safetensors"
        if not path.is_file() and (self.folder / path.name).is_file():  # of an export
            path = self.folder / path.name
        # its hashes are compared with the files where they are read
        manifest = ResultManifest.find(path.parent)
        if (
            not path.is_file()
            or (storage.hash_file(path) if manifest is None else manifest.files[path.name].sha256)
            != self.record.weights
        ):
            raise integrity_error(
                str(path),
                "missing" if not path.is_file() else "differs from its hash",
                "expected the weights that the training wrote",
                "Restore the file, or train again under --force-new",
            )
        return path.parent

    def load_head(self) -> Head | FittedMethod:
        """What predicts labels, whatever the windows. Raises UserError: as `head`."""
        return load_predictor(self.verified_weights(), self.record)

    def preprocessing(self) -> Preprocessing:
        """What turns new recordings into windows of a run that was fine-tuned on recordings. Raises
        UserError: integrity (exit 5).
        """
        return Preprocessing.load(self.folder / PREPROCESSING)

    def histories(self) -> HistoryPreparation:
        """What turns histories of new people into sequences of a run on events. Raises UserError:
        integrity (exit 5).
        """
        return HistoryPreparation.load(self.folder / HISTORIES)

    def find_adapter(self, windows: Windows) -> int | None:
        """The adapter for `windows`: that of the same tokens, of the same data set, of as many
        channels; None: none fits.
        """
        if self.record.settings.model.channel_independent:
            return 0
        data = self.record.data
        fitting = windows.find_adapters(data, self.record.channels)
        trained = [adapter for adapter in fitting if adapter < len(data)]
        same = [adapter for adapter in trained if data[adapter].name == windows.name]
        same += [adapter for adapter in trained if data[adapter].dataset == windows.dataset]
        return next(iter([*same, *fitting]), None)

    def adapter_for(self, windows: Windows) -> int:
        """As `find_adapter`. Raises UserError (config, exit 2) where none fits."""
        adapter, misfit = (
            self.find_adapter(windows),
            windows.describe_misfit(self.record.data, self.record.channels),
        )
        if adapter is not None:
            needs_numbers = (
                self.record.settings.model.numbers and self.record.data[0].reading.numbers
            )
            if not needs_numbers or getattr(windows.options, "numbers", False):
                return adapter
            misfit = "no numbers of events", "them (--values raw)"
        raise usage_error(
            f"{windows.name} has {misfit[0]}",
            f"the run reads {misfit[1]}",
            f"Fine-tune on it first: bitimely finetune {self.name} --data {windows.name}",
            file=str(self.folder),
        )

    def require_labels(self) -> None:
        """Raises UserError (config, exit 2) for windows without labels, or with other classes than
        those of the run: their order is that of its outputs.
        """
        windows, trained = self.windows(), self.record.data[0].class_names
        if windows.target is not None and windows.class_names == trained:
            return
        hint = "Name a view with labels, see: bitimely list views"
        labels = "no labels"
        if windows.target is not None:
            labels = f"the labels {', '.join(windows.class_names) or 'of a regression'}"
            hint = (
                "Leave rows with other labels out of the table of labels, or train on it: bitimely "
                f"train {self.record.model} --data {windows.name}"
            )
        raise usage_error(
            f"{windows.name} has {labels}",
            f"the run predicts {', '.join(trained) or 'numbers'}",
            hint,
            file=str(self.folder),
        )

    def count_shared_subjects(self, split: str = "test") -> int:
        """Subjects of `split` of the windows that were in the training of the run, or in the
        pre-training before it.

        Raises UserError (subject_leakage, exit 4) for a held-out split by subject.
        """
        if split == "train" or self.train_subjects is None:
            return 0
        windows = self.windows()
        if windows.split == EXTERNAL:  # other pseudonyms, which cannot be compared
            return 0
        marks = frozenset(self.train_subjects.marks)
        subjects = sorted(set(windows[split].subjects()))
        shared = [s for s in subjects if mark_subject(windows.dataset, s) in marks]
        if shared and windows.split not in {"random-window", "time"}:
            raise input_error(
                Reason.SUBJECT_LEAKAGE,
                f"{len(shared)} subjects of the {split} split were in the training of this run: "
                f"{name_subjects(shared)}",
                "expected none",
                OTHER_PSEUDONYMS if windows.vocabulary else OTHER_SEEDS,
                file=str(windows.name),
            )
        return len(shared)


def hash_subjects(windows: list[Windows], split: str) -> list[str]:
    """Hashes of the subjects of one split, bound to the data set: enough to find overlaps, not to
    read identifiers.
    """
    return sorted({mark_subject(w.dataset, s) for w in windows for s in set(w[split].subjects())})


def mark_subject(dataset: str, subject: str) -> str:
    """The entry of a subject in `train_subjects.json`."""
    return hashlib.sha256(f"{dataset}|{subject}".encode()).hexdigest()[:16]


def describe_data(windows: Windows) -> RunData:
    """The entry of `windows` in `run.json`."""
    options = windows.options
    reading = {
        name: getattr(options, name)
        for name in ReadingOptions.model_fields
        if hasattr(options, name)
    }
    return RunData(
        name=windows.name,
        dataset=windows.dataset,
        view=windows.view,
        fingerprint=windows.fingerprint,
        channels=windows.channels,
        channel_names=windows.channel_names,
        length=windows.length,
        rate=windows.rate,
        reading=ReadingOptions(**reading),
        split=windows.split,
        windows=len(windows.index),
        audit={
            split: SplitCount(
                windows=len(windows[split]), subjects=len(set(windows[split].subjects()))
            )
            for split in SPLITS
        },
        class_names=windows.class_names,
        vocabulary=windows.vocabulary_sha256,
        small_counts=getattr(options, "small_counts", False),
    )


def describe_preprocessing(windows: Windows) -> Preprocessing:
    """What turns recordings into such windows."""
    manifest, statistics = windows.manifest, windows.statistics
    return Preprocessing(
        fingerprint=windows.fingerprint,
        options=manifest.options,
        units=tuple(manifest.units),
        class_names=windows.class_names,
        missing=manifest.missing,
        channels=tuple(statistics.channels),
    )


def list_versions() -> dict[str, str]:
    """Versions of the packages that numbers depend on."""
    libraries = ("torch", "numpy", "polars", "pyarrow", "scikit-learn", "scipy", "safetensors")
    return {
        "bitimely": __version__,
        "python": platform.python_version(),
        **find_versions(libraries),
    }


COMPARED = ("kind", "model", "preset", "settings", "data", "source", "init", "members")
RESUME_EXEMPT = {f"settings.train.{name}" for name in TRAIN_EXEMPT}


def claim_folder(folder: Path, record: RunRecord, *, force_new: bool) -> bool:
    """Take `folder` for the run that `record` describes: False when it is already finished under
    the same description.

    Compared are kind, model, settings, data and source. `force_new` removes the other run. Raises
    UserError: settings_differ (exit 2) with the differing keys, integrity (exit 5), locked (exit
    7).
    """
    path = folder / "run.json"
    storage.refuse_link(folder)
    if folder.parent.is_dir():
        storage.remove_temporary_files(folder.parent)
    if path.is_file() or (folder / manifests.MANIFEST).is_file():
        if not force_new:
            complete_results(folder)
            stored = RunRecord.load(path)
            difference_hint = "Give another --run NAME, or --force-new to replace this one"
            raise_differences(
                flatten_compared(stored), flatten_compared(record), path, difference_hint
            )
            return not stored.finished
        with locks.lock_folder(folder):  # not while another process trains there
            storage.remove_folder(folder)
    write_results(folder, {path.name: record.encode()}, finished=False)
    return True


def describe_identity(record: RunRecord) -> dict[str, JsonValue]:
    """What must agree between a checkpoint and the run that resumes from it."""
    data: list[JsonValue] = [windows.fingerprint for windows in record.data]
    source = {} if record.source is None else {"source": record.source.model_dump(mode="json")}
    return {
        "data": data,
        "settings": dict(flatten_compared(record, ("model", "settings", "init"))),
        **source,
    }


def flatten_compared(record: RunRecord, keys: tuple[str, ...] = COMPARED) -> dict[str, JsonValue]:
    """What must agree between two runs of one name: dotted key -> value, of `keys` without
    `RESUME_EXEMPT`.
    """
    stored = record.to_json()
    return {
        name: value
        for key in keys
        for name, value in flatten_keys(stored.get(key), key).items()
        if name not in RESUME_EXEMPT
    }
