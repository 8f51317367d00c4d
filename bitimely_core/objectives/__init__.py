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
from bitimely_core.config import ModelConfig, ObjectiveConfig, Settings, validate
from bitimely_core.models.stack import Model, wrong
from bitimely_core.objectives.tokens import Part, Result, refuse_overlap, result
from bitimely_core.registry import models, objectives
from bitimely_core.types import Batch, Batches

__all__ = ["Objective", "Part", "Result", "fitting", "get", "leak_free", "measure_scale", "refuse_pair", "refuse_unfit", "result"]


@dataclass(frozen=True)
class Objective:
    """A registered objective with its numbers, ready to be called. An empty name is the model's own objective."""

    config: ObjectiveConfig

    def __call__(self, model: Model, batch: Batch, generator: Generator | None = None) -> Result:
        """See `get`."""
        name = self.config.name or models[model.config.name].facts.objective
        refuse_unfit(model.config, name)
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
    config = name if isinstance(name, ObjectiveConfig) else validate(ObjectiveConfig, {"name": name, **numbers})
    if config.name:
        objectives[config.name]  # an unknown name is told here
    return Objective(config)


WHY = {
    "one-way": "its layers look both ways",
    "alternating": "its layers cannot read forward and backward in turns",
    "hidden": "it has no tokens that could be hidden",
}


def fitting(model: str) -> list[str]:
    """The objectives that a model can be asked, its own first; some of them only with certain settings (`refuse_unfit`)."""
    own, answers = models[model].facts.objective, models[model].facts.answers
    others = [name for name, entry in objectives.items() if name != own and (answers is None or entry.facts.asks in answers)]
    return [own, *others]


def refuse_pair(model: str, objective: str) -> None:
    """An objective that asks what a model of this name cannot answer. Raises UserError (config, exit 2) naming those that fit."""
    asks, answers = objectives[objective].facts.asks, models[model].facts.answers
    if answers is None or not asks or asks in answers:
        return
    fit = fitting(model)
    whose = [name for name, entry in models.items() if asks in (entry.facts.answers or ())]
    why = WHY.get(asks, f"that is a question for {' and '.join(whose)}") if answers else "it has no pre-training"
    said = f"{', '.join(fit[:-1])} or {fit[-1]}" if len(fit) > 1 else fit[0]
    raise wrong(f"{objective} for {model}", f"{why}; expected {said}", "objective.name", "Leave --objective out for the model's own")


def refuse_unfit(config: ModelConfig, objective: str) -> None:
    """An objective that a model of this configuration cannot be asked. Raises UserError (config, exit 2)."""
    refuse_pair(config.name, objective)
    if objectives[objective].facts.asks == "alternating" and config.layers % 2:
        said = "expected an even number: the objective alternates directions"
        raise wrong(f"{config.layers} layers", said, "model.layers", f"Use {config.layers + 1} layers")
    if objective == "masked-runs" and config.tokenizer not in {"steps", "codes"}:
        raise wrong(f"masked-runs for tokens of {config.tokenizer}", "expected timesteps", "objective.name", "Use masked-patches or gap")
    if objective == "masked" and config.name == "patchtst" and config.revin and config.tokenizer != "codes":
        said = "expected masked-patches, which masks behind it"
        raise wrong("masked before RevIN", said, "objective.name", "Use masked-patches, or model.revin=false")


def leak_free(settings: Settings | dict[str, Any], *, normalise: str | None = None) -> bool | str | None:
    """The stamp of a run: True, False, None (the objective has no target of its own), or a text with the condition.

    Args:
        settings: resolved settings, or the same as plain values.
        normalise: how the windows were really normalised; None = as the settings say.

    Raises:
        UserError: overlapping patches under an objective that claims to be leak-free (exit 2).
    """
    chosen = settings if isinstance(settings, Settings) else validate(Settings, settings)
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


registry.load_members(__name__)
