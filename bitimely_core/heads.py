"""Readouts (one vector per sequence), heads and supervised losses.

The vector is read behind the final norm, from the last layer or the last two. [SOS] of the last
layer is the paper's choice: that layer runs backward, so [SOS] has seen every token.

Legend: B batch, N tokens, M positions (N + 2 with [SOS] and [EOS]), D width, K outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import FinetuneConfig, ModelConfig
from bitimely_core.errors import Reason, usage_error
from bitimely_core.models import factory, survival
from bitimely_core.models.adapters import PERSON
from bitimely_core.models.base import Model, bernoulli_entropy, to_batch, write_model
from bitimely_core.models.context import Context
from bitimely_core.models.contract import Which
from bitimely_core.models.layers import BidirectionalConfig
from bitimely_core.models.tokenizers import average_tokens, take_state
from bitimely_core.ops.fused import widen
from bitimely_core.registry import models
from bitimely_core.types import Batch, Encoded

HEAD_DROPOUT = 0.1  # with tokens of a network
LossResult = dict[str, Any]  # of a supervised loss, in the form of an objective
Task = Literal["classification", "multilabel", "regression", "survival"]


def _select_special(states: Tensor, encoded: Encoded, name: str) -> Tensor:
    if encoded.eos is None:
        raise usage_error(
            f"readout {name}",
            "this model has no [SOS] and [EOS]",
            "Use mean, last, max or flatten",
            field="finetune.readout",
        )
    return states[:, 0] if name == "sos" else take_state(states, encoded.eos)


def _tokens(
    states: Tensor, encoded: Encoded, padding: float | None = None
) -> tuple[Tensor, Tensor]:
    """States of the tokens [B, N, D], `padding` in place of those that are not real, and which of
    them are real, bool [B, N, 1].
    """
    inner = states if encoded.eos is None else states[:, 1:-1]
    real = (
        torch.ones_like(inner[..., :1], dtype=torch.bool)
        if encoded.mask is None
        else encoded.mask[..., None]
    )
    return inner if padding is None else torch.where(real, inner, padding), real


def _mean(states: Tensor, encoded: Encoded) -> Tensor:
    inner, real = _tokens(states, encoded)
    return average_tokens(inner, real[..., 0])


def _max(states: Tensor, encoded: Encoded) -> Tensor:
    inner, real = _tokens(states, encoded, -torch.inf)
    return torch.where(real.any(1), inner.amax(1), 0.0)


def _last(states: Tensor, encoded: Encoded) -> Tensor:
    if encoded.last is not None:
        return take_state(states, encoded.last)
    inner, real = _tokens(states, encoded)
    return take_state(inner, (real.sum((1, 2)) - 1).clamp(min=0))


def _native(states: Tensor, encoded: Encoded) -> Tensor:
    if encoded.pooled is None:
        raise usage_error(
            "readout native",
            "this model has no vector of its own",
            "Use sos, eos or mean",
            field="finetune.readout",
        )
    return encoded.pooled


def _mean_beside_tokens(states: Tensor, encoded: Encoded) -> Tensor:
    """The mean of the states, and mean and maximum of the tokens before the first layer."""
    if encoded.embedded is None:
        raise usage_error(
            "readout mean+tokens",
            "this model does not give its tokens",
            "Use mean or the model's own",
            field="finetune.readout",
        )
    tokens = encoded._replace(eos=None)
    parts = [_mean(states, encoded), *(read(encoded.embedded, tokens) for read in (_mean, _max))]
    return torch.cat(parts, -1)


POOLS: dict[str, Callable[[Tensor, Encoded], Tensor]] = {
    "sos": lambda states, encoded: _select_special(states, encoded, "sos"),
    "eos": lambda states, encoded: _select_special(states, encoded, "eos"),
    "sos+eos": lambda states, encoded: torch.cat(
        [_select_special(states, encoded, name) for name in ("sos", "eos")], -1
    ),
    "mean": _mean,
    "mean+tokens": _mean_beside_tokens,
    "last": _last,
    "max": _max,
    "flatten": lambda states, encoded: _tokens(states, encoded, 0.0)[0].flatten(1),
    "native": _native,
}
"""Readout -> function of states [B, M, D] and the rest of `Encoded`. Means, maxima and `last` run
over real tokens without [SOS], [EOS].
"""


def pool(
    encoded: Encoded, model: Model, readout: str, layers: str = "last", merge: str = "concat"
) -> Tensor:
    """One vector per sequence, [B, width] of the readout, twice as wide for two concatenated
    layers.

    `readout` is a key of `POOLS`, `layers` `last` or `last-two` (layers L - 1 and L, the paper's
    probing study), `merge` of two layers `concat` or `mean`. Raises UserError: the model has no
    such vector (config, exit 2).
    """
    if readout == "native":
        return _native(torch.empty(0), encoded)
    # they differ with separate heads
    last: Which = "previous" if model.directions[-1:] == ("backward",) else "next"
    full = _vector_width(model, readout, "last", merge) if readout == "flatten" else 0

    def read(states: Tensor) -> Tensor:
        vector = POOLS[readout](states, encoded)
        # shorter sequences are padded with zeros
        return F.pad(vector, (0, max(0, full - vector.shape[-1])))

    vectors = [read(model.norm(encoded.hidden[-1], last))]
    if layers == "last-two":
        if len(encoded.hidden) < 2:
            raise usage_error(
                "layers last-two",
                f"{model.config.name} has the states of one layer",
                "Use --layers last",
                field="finetune.layers",
            )
        vectors.insert(0, read(model.norm(encoded.hidden[-2], "next")))
    return torch.cat(vectors, -1) if merge == "concat" else torch.stack(vectors).mean(0)


def compute_vectors(
    model: Model, batch: Batch, readout: str, layers: str = "last", merge: str = "concat"
) -> Tensor:
    """One vector per row of the batch, as `pool`; channel-independent models:
    `average_channels`.
    """
    return average_channels(pool(model(batch), model, readout, layers, merge), batch)


def average_channels(vectors: Tensor, batch: Batch) -> Tensor:
    """One vector per row of the batch; vectors per row and channel are averaged over the observed
    channels.
    """
    rows = batch.values.shape[0]
    if vectors.shape[0] == rows:
        return vectors
    vectors = vectors.reshape(rows, -1, vectors.shape[-1])
    if batch.mask is None or batch.mask.dim() == 2:
        return vectors.mean(1)
    seen = batch.mask.any(1).to(vectors.dtype)[..., None]
    return (vectors * seen).sum(1) / seen.sum(1).clamp(min=1)


def _vector_width(model: Model, readout: str, layers: str, merge: str) -> int:
    if readout == "native":
        if model.pooled_width is None:
            raise usage_error(
                "readout native",
                f"{model.config.name} has no vector of its own",
                "Use sos, eos or mean",
                field="finetune.readout",
            )
        return model.pooled_width
    states = {"sos+eos": 2, "flatten": model.adapter.tokenizer.count(model.config.length)}
    width = states.get(readout, 1) * model.width
    width += 2 * model.config.dim if readout == "mean+tokens" else 0
    return 2 * width if layers == "last-two" and merge == "concat" else width


def find_readout(config: ModelConfig) -> str:
    """The readout of a supervised head where none is chosen."""
    if config.tokenizer == "patch-cnn" and isinstance(config, BidirectionalConfig):
        return "mean+tokens"
    return models[config.name].facts.readout


def choose_head(tuned: FinetuneConfig, config: ModelConfig) -> FinetuneConfig:
    """The settings of a head with what the tokens of the model decide."""
    dropout = tuned.dropout
    if dropout is None:
        dropout = HEAD_DROPOUT if config.tokenizer == "patch-cnn" else 0.0
    readout = tuned.readout or find_readout(config)
    return tuned.model_copy(update={"readout": readout, "dropout": dropout})


class Head(nn.Module):
    """A model and a linear head on one vector a sequence; `readout` None: the model's own.

    With `context` K the head also reads the vectors of up to K windows before and after
    (`models.context`), of those in the batch whose `Batch.place` says where they are.

    Raises UserError: a readout that the model does not have (config, exit 2).

    Attributes:
        model: the part below the head.
        task: `classification` (logits of K classes), `multilabel` (K logits), `regression` (K
            values, standardised), `survival` (hazards; K incidences, labels by horizons).
        grid: of a survival head, what it predicts.
        target_scale: entropy of the training labels in nats (multilabel: mean over labels;
            regression: 1, targets are standardised); NaN until it is measured.
        target_mean: float32 [K], of the training targets of a regression; else 0.
        target_std: float32 [K]; else 1.
    """

    target_scale: Tensor
    target_mean: Tensor
    target_std: Tensor

    def __init__(
        self,
        model: Model,
        *,
        task: Task,
        outputs: int,
        readout: str | None = None,
        layers: str = "last",
        layer_merge: str = "concat",
        freeze: bool = False,
        dropout: float = 0.0,
        grid: Sequence[Any] | None = None,
        context: int = 0,
        context_clock: bool = False,
    ) -> None:
        super().__init__()
        self.grid = survival.HazardGrid(grid[0], tuple(grid[1]), tuple(grid[2])) if grid else None
        self.task, self.outputs = task, outputs
        self.readout = readout or find_readout(model.config)
        self.layers, self.layer_merge, self.freeze = layers, layer_merge, freeze
        if self.readout not in POOLS:
            raise usage_error(
                f"no readout is called {self.readout!r}",
                f"known are {', '.join(POOLS)}",
                code=Reason.UNKNOWN_NAME,
                field="finetune.readout",
            )
        if not isinstance(outputs, SupportsIndex):
            problem = f"found {outputs!r}"
            raise usage_error(problem, "expected the number of classes or values", field="outputs")
        self.model = model.requires_grad_(not freeze)
        self.dropout = nn.Dropout(dropout)
        width = outputs
        if self.grid is not None:
            width = outputs // len(self.grid.horizons) * 2 * (len(self.grid.edges) - 1)
        vector_width = _vector_width(model, self.readout, layers, layer_merge)
        self.context = Context(vector_width, context, clock=context_clock) if context else None
        self.linear = nn.Linear(self.context.width if self.context else vector_width, width)
        # age and sex of events, where the model itself has no place for them
        self.person: nn.Linear | None = None
        if model.config.person and getattr(model, "person_map", None) is None:
            self.person = nn.Linear(PERSON, width, bias=False)
            nn.init.zeros_(self.person.weight)
        self.register_buffer("target_scale", torch.tensor(torch.nan))
        self.register_buffer("target_mean", torch.zeros(outputs))
        self.register_buffer("target_std", torch.ones(outputs))

    def train(self, mode: bool = True) -> Head:
        """As `nn.Module.train`, but a frozen model stays in eval mode."""
        super().train(mode)
        if self.freeze:
            self.model.eval()
        return self

    def __call__(self, batch: Batch | Tensor | Mapping[str, Tensor]) -> Tensor:
        """As `forward`, of whatever `to_batch` reads."""
        out: Tensor = super().__call__(to_batch(batch))
        return out

    def forward(self, batch: Batch) -> Tensor:
        """Logits, for regression standardised values, [B, K]; of hazards [B, labels * 2 *
        intervals].
        """
        vectors = self.compute_vectors(batch)
        if self.context is not None:
            place = batch.place
            if place is None:  # no neighbours
                place = torch.arange(len(vectors), device=vectors.device) << 32
            vectors = self.context(vectors, place)
        out = self.linear(self.dropout(vectors))
        if self.person is None or batch.person is None:
            return out
        return out + self.person(batch.person.to(out.dtype))

    def compute_vectors(self, batch: Batch) -> Tensor:
        """The vectors [B, D] of the rows themselves."""
        return compute_vectors(self.model, batch, self.readout, self.layers, self.layer_merge)

    def predict(self, batch: Batch | Tensor | Mapping[str, Tensor]) -> Tensor:
        """Probabilities [B, K], or values in the target's own unit: [B] for one output, else [B,
        K].
        """
        return self._scale_outputs(self(batch).float())

    def predict_in_context(self, vectors: Tensor, places: Tensor) -> Tensor:
        """As `predict`, of vectors [M, D] by `compute_vectors` of windows at `places` [M]."""
        assert self.context is not None, "the caller has asked"
        return self._scale_outputs(self.linear(self.context(vectors, places)).float())

    def _scale_outputs(self, out: Tensor) -> Tensor:
        """Predictions of what `forward` returns."""
        if self.task == "classification":
            return out.softmax(-1)
        if self.task == "multilabel":
            return out.sigmoid()
        if self.grid is not None:
            return survival.compute_incidence(
                out.reshape(len(out), -1, 2, len(self.grid.edges) - 1), self.grid
            ).flatten(1)
        return (out * self.target_std + self.target_mean)[
            :, 0 if self.outputs == 1 else slice(None)
        ]

    @torch.no_grad()
    def measure(self, batches: Iterable[Batch]) -> float:
        """The scale of the loss from the labels in `batches`; regression also keeps their mean and
        standard deviation.
        """
        # some devices have no float64
        labels = [batch.target.cpu() for batch in batches if batch.target is not None]
        return self.standardise(torch.cat(labels)) if labels else torch.nan

    @torch.no_grad()
    def standardise(self, targets: Tensor) -> float:
        """Store the scale of the training labels [n] or [n, K]; returns `target_scale`. NaN labels
        are ignored.
        """
        if self.grid is not None:  # a training starts from the hazards of all rows together
            time, event = targets[:, :: len(self.grid.horizons)].double().unbind(-1)
            null = survival.find_null_logits(time, event, self.grid)
            self.linear.bias.copy_(null.flatten())
            each = survival.measure_loss(
                null.expand(len(time), -1, -1, -1),
                time.nan_to_num(0.0),
                event.nan_to_num(0.0),
                self.grid,
            )
            scale = float(each[torch.isfinite(time)].mean())
        elif self.task == "classification":
            share = torch.bincount(targets.long(), minlength=self.outputs).double() / max(
                len(targets), 1
            )
            scale = float(torch.special.entr(share).sum())
        else:
            values = targets.reshape(len(targets), self.outputs).double()
            mean = values.nanmean(0)
            if self.task == "multilabel":
                scale = float(bernoulli_entropy(mean).nanmean())
            else:
                spread = (values - mean).square().nanmean(0).sqrt()
                self.target_mean.copy_(mean.nan_to_num(0.0))
                self.target_std.copy_(torch.where(spread > 0, spread, 1.0))
                scale = 1.0
        self.target_scale.fill_(scale)
        return scale

    def describe(self) -> dict[str, Any]:
        """Contents of `config.json`."""
        head = {
            name: getattr(self, name)
            for name in ("task", "outputs", "readout", "layers", "layer_merge", "freeze")
        }
        head |= {"dropout": self.dropout.p} if self.dropout.p else {}
        head |= {"context": self.context.reach} if self.context else {}
        head |= {"context_clock": True} if self.context and self.context.clock else {}
        return {
            **self.model.describe(),
            "head": head | ({} if self.grid is None else {"grid": self.grid}),
        }

    def save(self, folder: str | Path) -> None:
        """`model.safetensors` and `config.json` in `folder`; read them with `heads.load`, the part
        below with `models.load`.
        """
        write_model(folder, self, self.describe())


class Classifier(Head):
    """A head for one of K classes: `Classifier(model, outputs=5)`."""

    def __init__(self, model: Model, outputs: int, **options: Any) -> None:
        super().__init__(model, task="classification", outputs=outputs, **options)


class MultiLabel(Head):
    """A head for K labels of which any may hold."""

    def __init__(self, model: Model, outputs: int, **options: Any) -> None:
        super().__init__(model, task="multilabel", outputs=outputs, **options)


class Regressor(Head):
    """A head for K values."""

    def __init__(self, model: Model, outputs: int = 1, **options: Any) -> None:
        super().__init__(model, task="regression", outputs=outputs, **options)


build = Head


def standardise(head: Head, targets: np.ndarray) -> None:
    """Set the scale of the loss (regression: mean and standard deviation) from the training labels
    [n] or [n, K].
    """
    head.standardise(torch.as_tensor(targets))


def start_at_prevalence(head: Head, targets: np.ndarray) -> None:
    """Let the risks of labels that may hold together start near their shares in the training labels
    [n, K]. NaN labels are ignored.

    From risks of a half, the first hundreds of steps lower all risks of rare labels together and
    learn little else. Half a case is added on either side: a label without a case stays finite.
    """
    labels = torch.as_tensor(targets, dtype=torch.float64)
    cases, controls = (labels == 1).sum(0) + 0.5, (labels == 0).sum(0) + 0.5
    with torch.no_grad():
        head.linear.bias.copy_(torch.log(cases / controls))


def load(folder: str | Path) -> Head:
    """The head, with its model, that `Head.save` wrote, in eval mode. Raises UserError as
    `models.load`.
    """
    stored, weights = factory.read_model(folder)
    where = Path(folder) / "config.json"
    if "head" not in stored:
        raise usage_error(
            "a model without a head",
            "expected a fine-tuned model",
            "Use models.load",
            file=str(where),
        )
    head = Head(factory.from_config(factory.read_config(stored, folder)), **stored["head"])
    factory.load_weights(head, weights, where.with_name("model.safetensors"))
    return head.eval()


def cross_entropy(
    head: Head,
    batch: Batch,
    generator: Generator | None = None,
    *,
    smoothing: float = 0.0,
    weights: Tensor | None = None,
) -> LossResult:
    """Cross-entropy of class ids [B] or shares [B, C] in the objective form; parts: accuracy.

    In training `smoothing` of each label is spread over all classes, and the terms of class c are
    multiplied by `weights[c]`; validation losses have neither.
    """
    assert batch.target is not None
    logits = head(batch).float()
    shares = batch.target if batch.target.dim() > 1 else None
    target = batch.target.long() if shares is None else shares.argmax(-1)
    accuracy = (logits.argmax(-1) == target).float().mean()
    smoothing, weights = _choose_options(head, smoothing, weights, logits)
    each = F.cross_entropy(
        logits,
        target if shares is None else shares.to(logits.dtype),
        weight=weights,
        label_smoothing=smoothing,
        reduction="none",
    )
    return _make_result(
        head,
        each.mean(),
        {"accuracy": accuracy},
        logits,
        target,
        torch.ones_like(target, dtype=torch.bool),
    )


def binary_cross_entropy(
    head: Head,
    batch: Batch,
    generator: Generator | None = None,
    *,
    smoothing: float = 0.0,
    weights: Tensor | None = None,
) -> LossResult:
    """Binary cross-entropy of labels [B, K] in {0, 1, NaN = unknown} in the objective form.

    In training labels are moved to 1/2 by `smoothing`, and terms of label k that holds are
    multiplied by `weights[k]`; validation losses have neither.
    """
    logits, target, valid = _align_labels(head, batch)
    smoothing, weights = _choose_options(head, smoothing, weights, logits)
    each = F.binary_cross_entropy_with_logits(
        logits,
        torch.where(valid, target * (1 - smoothing) + smoothing / 2, 0.0),
        pos_weight=weights,
        reduction="none",
    )
    return _make_result(
        head,
        torch.where(valid, each, 0.0).sum() / valid.sum().clamp(min=1),
        {},
        logits,
        target,
        valid,
    )


def _choose_options(
    head: Head, smoothing: float, weights: Tensor | None, like: Tensor
) -> tuple[float, Tensor | None]:
    """Label smoothing and weights of a training; validation losses have neither."""
    if not head.training:
        return 0.0, None
    return smoothing, None if weights is None else weights.to(like)


def mean_squared_error(head: Head, batch: Batch, generator: Generator | None = None) -> LossResult:
    """Squared error on standardised targets [B] or [B, K] (NaN = unknown) in the objective form;
    parts: absolute error in their unit.
    """
    prediction, target, valid = _align_labels(head, batch)
    target = (target - head.target_mean) / head.target_std
    error = torch.where(valid, prediction - torch.where(valid, target, 0.0), 0.0)
    count = valid.sum().clamp(min=1)
    absolute = (error.detach().abs() * head.target_std).sum() / count
    return _make_result(
        head, error.square().sum() / count, {"mae": absolute}, prediction, target, valid
    )


def hazard_loss(head: Head, batch: Batch, generator: Generator | None = None) -> LossResult:
    """Negative log-likelihood of times to event [B, K H, 2] (NaN: not known) in the objective form
    (`models.survival`).
    """
    assert head.grid is not None
    assert batch.target is not None
    target = batch.target[:, :: len(head.grid.horizons)]
    logits = widen(head(batch)).reshape(*target.shape[:2], 2, -1)
    valid = torch.isfinite(target).all(-1)
    time, event = torch.where(valid[..., None], target, 0.0).to(logits.dtype).unbind(-1)
    each = torch.where(valid, survival.measure_loss(logits, time, event, head.grid), 0.0)
    loss = each.sum() / valid.sum().clamp(min=1)
    incidence = survival.compute_incidence(logits, head.grid)[..., -1]
    return _make_result(head, loss, {}, incidence, event, valid)


losses: dict[str, Callable[..., LossResult]] = {
    "classification": cross_entropy,
    "multilabel": binary_cross_entropy,
    "regression": mean_squared_error,
    "survival": hazard_loss,
}
"""Task -> its loss."""


def make_loss(
    task: Task, targets: np.ndarray, classes: int, config: FinetuneConfig
) -> Callable[..., LossResult]:
    """The loss of a task with the class weights and the label smoothing of the settings.

    Balanced weights make all classes count the same in the training labels `targets`: n / (C n_c)
    for class c, of a label that may hold beside others (n - n_k) / n_k.

    Raises UserError: config (exit 2) for a task without classes.
    """
    smoothing, is_balanced = config.label_smoothing, config.class_weights == "balanced"
    if not smoothing and not is_balanced:
        return losses[task]
    if task not in {"classification", "multilabel"}:
        raise usage_error(
            f"the labels of a {task}",
            "class weights and label smoothing are for classes",
            "Leave it out",
            field="finetune.class_weights" if is_balanced else "finetune.label_smoothing",
        )
    weights = None
    if is_balanced and task == "classification":
        counts = np.bincount(np.asarray(targets, np.int64), minlength=classes)
        weights = len(targets) / (classes * np.maximum(counts, 1))
    elif is_balanced:
        held, counts = np.nansum(targets, 0), np.isfinite(targets).sum(0)
        weights = np.maximum(counts - held, 1) / np.maximum(held, 1)
    balance = None if weights is None else torch.from_numpy(weights).float()
    return partial(losses[task], smoothing=smoothing, weights=balance)


def _align_labels(head: Head, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, labels and which of them are known, all [B, K]."""
    assert batch.target is not None
    out = widen(head(batch))
    target = batch.target.reshape(out.shape).to(out.dtype)
    return out, target, ~torch.isnan(target)


def _make_result(
    head: Head,
    loss: Tensor,
    parts: dict[str, Tensor],
    prediction: Tensor,
    target: Tensor,
    valid: Tensor,
) -> LossResult:
    penalty, head.model.penalty = head.model.penalty, None
    return {
        "loss": loss if penalty is None else loss + penalty,
        "rel": loss.detach() / head.target_scale,
        "parts": parts if penalty is None else {**parts, "penalty": penalty.detach()},
        "prediction": prediction,
        "target": target,
        "valid": valid,
        "count": valid.sum(),
    }
