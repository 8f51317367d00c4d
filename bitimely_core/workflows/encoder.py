"""`Encoder`: any model as an estimator of scikit-learn, trained on an array in memory.

Nothing is written to disk.

Legend: n rows, T samples, V channels, D width of a vector, K classes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import ClassifierTags, RegressorTags, check_random_state
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from bitimely_core import data, heads, models, objectives, registry
from bitimely_core.config import TrainConfig, build_model_config, validate
from bitimely_core.errors import usage_error
from bitimely_core.models.base import to_batch
from bitimely_core.tokens import TokenSet
from bitimely_core.train.devices import select_device
from bitimely_core.train.loop import fit
from bitimely_core.types import Batch
from bitimely_core.workflows.new_subjects import HistoryPredictor

Array = npt.NDArray[Any]

TOKENS = 32  # of a window, where nothing says how it is cut


def _to_array(values: Any) -> Any:
    """Tensors without their gradient, windows, and masked values as NaN; all else as it is."""
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    if np.ma.is_masked(values):
        return values.astype(np.float64).filled(np.nan)
    return np.asarray(values) if isinstance(values, TokenSet) else values


def _warn_of_channels_first(length: int, channels: int) -> None:
    """Arrays of MNE are (n, channels, length), which reads as short rows of many channels."""
    if length < channels:
        warnings.warn(
            f"X is read as (n, length, channels): {length} samples of {channels} channels. "
            "Where channels come first, give X.transpose(0, 2, 1).",
            stacklevel=4,
        )


@dataclass
class ArrayBatches:
    """`Batches` of an array in memory, in the order that `data.batches` has for the seed and
    epoch.
    """

    values: Array  # [n, T, V] float32, NaN: missing
    target: Array | None
    size: int
    seed: int
    least: int = 1  # rows below which the short last batch is left out
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        self.steps = len(self.values) // self.size + (
            len(self.values) % self.size >= max(self.least, 1)
        )

    def __call__(
        self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """Batches `start`.. of `epoch`; process `rank` of `world` gets every world-th row of
        each.
        """
        order = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(
            len(self.values)
        )
        for step in range(start, self.steps):
            rows = order[step * self.size : (step + 1) * self.size][rank::world]
            target = None if self.target is None else torch.from_numpy(self.target[rows])
            yield to_batch(torch.from_numpy(self.values[rows]))._replace(target=target)


def _is_classifier(encoder: Encoder) -> bool:
    if encoder.task != "classification":
        raise AttributeError(f"there are no probabilities for task {encoder.task!r}")
    return True


class Encoder(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A model that is pre-trained on arrays without labels, gives a vector a row and, fitted with
    labels, predicts them.

    X is (n, T, V), or (n, T) for one channel: any real dtype, NaN where a value is missing. Each
    channel is standardised by its mean and standard deviation over the rows of `fit`.

    Args:
        model: a registered model, for instance `bitimelygpt`, `timelygpt`, `patchtst`, `ts2vec`.
        preset: dimensions; `tiny` is for two cores.
        task: what `y` holds: `classification` or `regression`.
        objective: of the pre-training; empty: the model's own. Models that learn from labels alone
            (resnet) have none and are fitted with y.
        epochs: passes of the pre-training over X; 0: none, the control with random weights.
        head_epochs: passes of the fine-tuning over X and y.
        batch_size: rows of a step, and of the batches of `transform` and `predict`.
        lr: largest learning rate of both trainings.
        readout: the vector of a row (`bitimely.heads.POOLS`); None: the model's own.
        freeze: with y, train the head alone, so that the vectors stay those of the pre-training.
        random_state: of weights, order, masks and dropout; an int gives the same numbers on the
            same kind of device.
        device: auto, cpu, cuda or mps.
        settings: further settings of the model (docs/settings.md), for instance `layers=2`,
            `tokenizer="conv"`. Without one on how it is cut, a window becomes 16 patches, each read
            by a network, of other models 32, where it has so many samples.

    Attributes:
        model_: the trained `Model`, in eval mode.
        head_: model and head; None when fitted without y.
        classes_: the labels [K] in the order of the probabilities.
        mean_, scale_: of the channels [V], float64.
        n_channels_in_: V.

    Raises UserError (config, exit 2) in `fit` for a name or setting that there is not; ValueError,
    NotFittedError as scikit-learn does.
    """

    _settings: dict[str, Any] = {}  # noqa: RUF012  replaced, never changed

    def __init__(
        self,
        model: str = "timelygpt",
        *,
        preset: str | None = "tiny",
        task: Literal["classification", "regression"] = "classification",
        objective: str = "",
        epochs: int = 5,
        head_epochs: int = 20,
        batch_size: int = 32,
        lr: float = 1e-3,
        readout: str | None = None,
        freeze: bool = False,
        random_state: Any = None,
        device: str = "auto",
        **settings: Any,
    ) -> None:
        self.model, self.preset, self.task, self.objective = model, preset, task, objective
        self.epochs, self.head_epochs = epochs, head_epochs
        self.batch_size, self.lr = batch_size, lr
        self.readout, self.freeze = readout, freeze
        self.random_state, self.device = random_state, device
        if settings:
            self._settings = settings

    @staticmethod
    def from_pretrained(
        run: str | Path, *, workspace: str | Path = Path("workspace")
    ) -> HistoryPredictor:
        """The encoder of histories of a fine-tuned run or export: `transform(table)` gives vectors
        and `predict(table)` risks, for a table with columns of people, dates and codes (polars), a
        folder or a cache.

        Raises UserError: as `bitimely.from_pretrained`; config (exit 2) for a run on recordings.
        """
        from bitimely_core.workflows.predict import from_pretrained

        model = from_pretrained(run, workspace=Path(workspace))
        if isinstance(model, HistoryPredictor):
            return model
        raise usage_error(
            f"{model.run.name} reads recordings",
            "expected a run on histories",
            "Use bitimely.from_pretrained(RUN).predict(files)",
            field="run",
        )

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """All parameters by name, the settings of the model among them."""
        return {**super().get_params(deep), **self._settings}

    def set_params(self, **params: Any) -> Self:
        """Change parameters or settings of the model; unknown settings are refused by `fit`."""
        names = params.keys() & self._get_param_names()
        super().set_params(**{name: params.pop(name) for name in names})
        if params:
            self._settings = {**self._settings, **params}
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        classifies = self.task == "classification"
        tags.estimator_type = "classifier" if classifies else "regressor"
        tags.classifier_tags, tags.regressor_tags = (
            (ClassifierTags(), None) if classifies else (None, RegressorTags())
        )
        tags.target_tags.required, tags.target_tags.single_output = False, True
        tags.input_tags.allow_nan, tags.input_tags.three_d_array = True, True
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags

    def fit(self, X: Any, y: Any = None) -> Self:
        """Pre-train on X; with y [n] class labels of any kind, or numbers, fine-tune the model with
        a head on them.
        """
        if self.task not in ("classification", "regression"):
            raise usage_error(
                f"task {self.task!r}", "expected classification or regression", field="task"
            )
        values, target = self._read(X, y, reset=True)
        name = self.objective or registry.find_network(self.model).facts.objective
        if target is None and name == "none":
            problem, expected = f"no labels for {self.model}", "expected a class or a number a row"
            raise usage_error(problem, expected, "Use fit(X, y)", field="y")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.model_ = models.from_config(self._configure(values.shape[1])).eval()
            if name != "none":  # of a model that learns from labels alone
                least = registry.objectives[name].facts.rows
                self._train(
                    self.model_,
                    ArrayBatches(values, None, self.batch_size, seed, least),
                    objectives.get(self.objective),
                    self.epochs,
                )
            self.head_ = None
            if target is not None:
                outputs = len(self.classes_) if self.task == "classification" else 1
                self.head_ = heads.Head(
                    self.model_,
                    task=self.task,
                    outputs=outputs,
                    readout=self.readout,
                    freeze=self.freeze,
                ).eval()
                self._train(
                    self.head_,
                    ArrayBatches(values, target, self.batch_size, seed),
                    heads.losses[self.task],
                    self.head_epochs,
                )
        self.readout_ = self.readout or heads.find_readout(self.model_.config)
        self._n_features_out = self._compute(
            values[:1], lambda batch: heads.compute_vectors(self.model_, batch, self.readout_)
        ).shape[1]
        return self

    def transform(self, X: Any) -> Array:
        """The vector of each row, [n, D] float32: what the head reads."""
        check_is_fitted(self)
        return self._compute(
            self._read(X)[0], lambda batch: heads.compute_vectors(self.model_, batch, self.readout_)
        )

    def predict(self, X: Any) -> Array:
        """Labels [n] of the most probable classes, or values [n] float64 in the unit of y."""
        prediction = self._predict(X)
        if self.task == "classification":
            return np.asarray(self.classes_[prediction.argmax(1)])
        return prediction.astype(np.float64)

    @available_if(_is_classifier)  # type: ignore[untyped-decorator, unused-ignore]
    def predict_proba(self, X: Any) -> Array:
        """Probabilities [n, K] in the order of `classes_`."""
        return self._predict(X)

    def score(self, X: Any, y: Any) -> float:
        """Accuracy, or for a regression R squared."""
        return float(
            (accuracy_score if self.task == "classification" else r2_score)(y, self.predict(X))
        )

    def _predict(self, X: Any) -> Array:
        check_is_fitted(self)
        check_is_fitted(
            self,
            "classes_",
            msg="This %(name)s was fitted without labels: "
            "it transforms, and predicts after fit(X, y).",
        )
        return self._compute(self._read(X)[0], self.head_.predict)  # type: ignore[union-attr]

    def _configure(self, length: int) -> Any:
        """The configuration of the model for windows of `length`."""
        settings = {"channels": self.n_channels_in_, "length": length, **self._settings}
        config = build_model_config(registry.models[self.model].name, self.preset, **settings)
        if (
            config.tokenizer == "conv"
            and not {"tokenizer", "patch", "stride"} & self._settings.keys()
        ):
            config = build_model_config(
                config.name,
                self.preset,
                **settings,
                tokenizer="patch",
                patch=max(1, length // TOKENS),
            )
        return config

    def _train(
        self,
        module: Any,
        batches: ArrayBatches,
        objective: Callable[..., dict[str, Any]],
        epochs: int,
    ) -> None:
        if epochs and not batches.steps:
            raise ValueError(
                f"Found array with {len(batches.values)} sample(s) "
                f"while a minimum of {batches.least} is required."
            )
        settings = {"epochs": epochs, "lr": self.lr, "seed": batches.seed, "device": self.device}
        fit(module, batches, objective, config=validate(TrainConfig, settings))
        module.eval()

    def _read(self, X: Any, y: Any = None, *, reset: bool = False) -> tuple[Array, Array | None]:
        """Standardised values [n, T, V] float32, NaN where one is missing, and class ids [n] int64
        or numbers [n] float32.
        """
        options: dict[str, Any] = {
            "dtype": [np.float64, np.float32],
            "allow_nd": True,
            "ensure_all_finite": "allow-nan",
        }
        options |= {"ensure_min_features": 2 if reset else 1, "reset": reset}
        X, y = _to_array(X), _to_array(y)
        if y is not None:
            X, y = validate_data(self, X, y, y_numeric=self.task == "regression", **options)
        else:
            X = validate_data(self, X, **options)
        if X.ndim > 3:
            raise ValueError(
                f"Found array with dim {X.ndim}, expected (n, length, channels) or (n, length)."
            )
        x = X[..., None] if X.ndim == 2 else X
        if reset:
            _warn_of_channels_first(*x.shape[1:])
            seen = np.isfinite(x)
            count = np.maximum(seen.sum((0, 1)), 1)
            self.n_channels_in_ = x.shape[2]
            self.mean_ = np.sum(x, axis=(0, 1), where=seen, dtype=np.float64) / count
            spread = np.sqrt(
                np.sum((x - self.mean_) ** 2, axis=(0, 1), where=seen, dtype=np.float64) / count
            )
            self.scale_ = np.where(spread > 0, spread, 1.0)
            if hasattr(self, "classes_"):
                del self.classes_
        elif x.shape[2] != self.n_channels_in_:
            raise ValueError(
                f"X has {x.shape[2]} channels, "
                f"but Encoder is expecting {self.n_channels_in_} channels as input."
            )
        return ((x - self.mean_) / self.scale_).astype(
            np.float32
        ), None if y is None else self._encode_labels(y)

    def _encode_labels(self, y: Array) -> Array:
        if self.task == "regression":
            self.classes_ = np.empty(0)
            return y.astype(np.float32)
        check_classification_targets(y)
        self.classes_, ids = np.unique(y, return_inverse=True)
        return ids.astype(np.int64)

    def _compute(self, values: Array, call: Callable[[Batch], Tensor]) -> Array:
        """`call` of batches of one shape, so that the result of a row does not depend on those
        beside it, and on its place by rounding alone.
        """
        place, out = select_device(self.device), []
        module = (self.model_ if self.head_ is None else self.head_).to(place)
        with torch.inference_mode():
            for start in range(0, len(values), self.batch_size):
                rows = values[start : start + self.batch_size]
                filled = np.pad(
                    rows, ((0, self.batch_size - len(rows)), (0, 0), (0, 0)), mode="edge"
                )
                out.append(
                    call(data.to_device(to_batch(torch.from_numpy(filled)), place))
                    .float()
                    .cpu()
                    .numpy()[: len(rows)]
                )
        module.to("cpu")  # a pickle opens on every machine
        return np.concatenate(out)
