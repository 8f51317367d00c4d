"""What a model is asked during pre-training: functions (model, batch) -> loss and its parts; one file a kind, each registers its own.

`tokens` holds the objectives that predict tokens; the others are those of one method each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, nn

from bitimely_core import registry
from bitimely_core.batch import Batch, Batches
from bitimely_core.models.stack import Model
from bitimely_core.objectives.tokens import Part, Result, refuse_overlap, result
from bitimely_core.registry import models, objectives
from bitimely_core.settings import ObjectiveConfig, Settings, validated

__all__ = ["Objective", "Part", "Result", "get", "leak_free", "measure_scale", "result"]


@dataclass(frozen=True)
class Objective:
    """A registered objective with its numbers, ready to be called. An empty name is the model's own objective."""

    config: ObjectiveConfig

    def __call__(self, model: Model, batch: Batch, generator: Generator | None = None) -> Result:
        """See `get`."""
        name = self.config.name or models[model.config.name].facts.objective
        found: Result = objectives[name](model, model.spread(batch), generator, config=self.config)
        return found


def get(name: str | ObjectiveConfig = "", **numbers: Any) -> Objective:
    """The objective `name` with its numbers (`ratio`, `span`, `direction_sampling`), or that of a configuration.

    Returns:
        `f(model, batch, generator=None)` -> dict of `loss` (scalar with gradient), `rel` (loss / Var(target), codes: / unigram entropy,
        mean over the parts), `parts` (scalars), `prediction` and `target` [B, M, P] (codes: logits [B, M, P] and class ids [B, M]; the
        parts one after another along M), `valid` (bool, as the target), `slices` (name of a part -> its slice of M), `count` (valid targets, by
        which micro-batches are weighted). Random choices are drawn row by row from `generator` (CPU), else from torch's global one.

    Raises:
        UserError: unknown name, or numbers out of range (exit 2).
    """
    config = name if isinstance(name, ObjectiveConfig) else validated(ObjectiveConfig, {"name": name, **numbers})
    if config.name:
        objectives[config.name]  # an unknown name is told here
    return Objective(config)


def leak_free(settings: Settings | dict[str, Any], *, normalise: str | None = None) -> bool | str | None:
    """The stamp of a run: True, False, None (the objective has no target of its own), or a text with the condition.

    Args:
        settings: resolved settings, or the same as plain values.
        normalise: how the windows were really normalised; None = as the settings say.

    Raises:
        UserError: overlapping patches under an objective that claims to be leak-free (exit 2).
    """
    chosen = settings if isinstance(settings, Settings) else validated(Settings, settings)
    name = chosen.objective.name or models[chosen.model.name].facts.objective
    stamp = objectives[name].facts.leak_free
    if stamp is not True:
        return stamp
    model = chosen.model
    refuse_overlap(model)
    if model.target == "tokens" and model.tokenizer == "conv":
        return False  # neighbouring tokens share samples, and a tokenizer that is trained moves its content there
    conditions = []
    windowed = (normalise or chosen.data.normalise) == "window" or (model.name == "patchtst" and model.revin)
    if windowed and model.tokenizer != "codes":
        conditions.append("given window statistics")
    if model.temporal_conv == "causal" and model.temporal_norm == "batch" and models[model.name].facts.family == "retention":
        conditions.append("up to batch statistics")
    return " and ".join(conditions) or True


@torch.no_grad()
def measure_scale(model: nn.Module, batches: Batches | Iterable[Batch], limit: int = 256) -> float:
    """Measure Var(target) (codes: unigram entropy; heads: that of the labels) on up to `limit` batches; kept in `model.target_scale`."""
    stream = batches(0) if callable(batches) else batches
    where = next(model.parameters()).device
    taken = (_on(batch, where) for batch in itertools.islice(stream, limit))
    scale = float(model.measure(taken))  # type: ignore[operator]
    model.target_scale.fill_(scale)  # type: ignore[operator]
    return scale


def _on(batch: Batch, where: torch.device) -> Batch:
    parts = (None if part is None else part.to(where) for part in batch)
    return Batch(*parts)  # type: ignore[arg-type]


registry.members(__name__)
