"""Pre-training objectives: functions (model, batch) -> loss and its parts.

`tokens` holds the objectives that predict tokens; those of one method each stand beside their model
in `bitimely_core.zoo`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, nn

from bitimely_core.config import (
    ModelConfig,
    ObjectiveConfig,
    Settings,
    StoredObjectiveConfig,
    find_objective_config,
    validate,
    validate_settings,
)
from bitimely_core.models.base import Model
from bitimely_core.models.contract import config_error
from bitimely_core.objectives.token_objectives import LossPart, Result, make_result, refuse_overlap
from bitimely_core.preparation import list_conditions
from bitimely_core.registry import Entry, ObjectiveFacts, models, objectives
from bitimely_core.schemas.tokens import SamplePreparation
from bitimely_core.types import Batch, Batches

SCALE_BATCHES = 256  # batches on which the scale of a target is measured, at most

__all__ = [
    "LossPart",
    "Objective",
    "Result",
    "check_compatible",
    "check_name",
    "compatible_objectives",
    "get",
    "leak_free",
    "make_result",
    "measure_features",
    "measure_scale",
]


@dataclass(frozen=True)
class Objective:
    """A registered objective with its settings, ready to be called. An empty name is the model's
    own objective.
    """

    config: ObjectiveConfig

    def __call__(self, model: Model, batch: Batch, generator: Generator | None = None) -> Result:
        """See `get`."""
        entry, config = self._find_entry(model)
        if batch.draws is None:
            batch = self.draw(model, batch, [generator] * len(batch.values))
        rows = model.expand_channels(batch)
        if batch.draws is not None:
            rows = rows._replace(draws=batch.draws.flatten(0, 1).to(rows.values.device))
        result: Result = entry(model, rows, generator, config=config)
        return result

    def draw(self, model: Model, batch: Batch, generators: Iterable[Generator | None]) -> Batch:
        """`batch` with what the objective draws for each of its rows (`draws`), each from a
        generator of its own, where it draws by row.

        Neither weights nor the progress of the training decide it: `fit` draws ahead, on the host.
        """
        entry, config = self._find_entry(model)
        if entry.facts.draw is None or not len(batch.values):
            return batch
        rows = model.expand_channels(batch)
        times = len(rows.values) // len(batch.values)
        repeated = [generator for generator in generators for _ in range(times)]
        drawn = entry.facts.draw(model, rows, repeated, config)
        return batch if drawn is None else batch._replace(draws=drawn.unflatten(0, (-1, times)))

    def _find_entry(self, model: Model) -> tuple[Entry[ObjectiveFacts], ObjectiveConfig]:
        """The objective of this name, or the model's own, and its settings."""
        name = self.config.name or models[model.config.name].facts.objective
        check_compatible(model.config, name)
        kind, config = find_objective_config(name), self.config
        if type(config) is not kind:
            config = validate(kind, config.model_dump())
        return objectives[name], config


def get(name: str | ObjectiveConfig = "", **settings: Any) -> Objective:
    """The objective `name` with its settings (for example `ratio`, `span`), or that of a
    configuration.

    Returns:
        `f(model, batch, generator=None)` -> dict of `loss` (scalar with gradient), `rel` (loss /
        Var(target), codes: / unigram entropy, mean over the parts), `parts` (scalars), `prediction`
        and `target` [B, M, P] (codes: logits [B, M, P] and class ids [B, M]; the parts one after
        another along M), `valid` (bool, as the target), `slices` (name of a part -> its slice of
        M), `count` (valid targets, by which micro-batches are weighted) and `rel_count` (what `rel`
        is a mean over). Random choices are those of `Batch.draws`, else drawn row by row from
        `generator` (CPU), else from torch's global one.

    Raises UserError: unknown name, or settings that it does not have or that are out of range (exit
    2).
    """
    if isinstance(name, ObjectiveConfig):
        return Objective(name)
    return Objective(
        validate(
            find_objective_config(name) if name else StoredObjectiveConfig,
            {"name": name, **settings},
        )
    )


REASONS = {
    "one-way": "its layers look both ways",
    "alternating": "its layers cannot read forward and backward in turns",
    "hidden": "it has no tokens that could be hidden",
}


def list_capabilities(model: str) -> tuple[str, ...]:
    """The requirements of objectives that a model meets: those that it declares, else that of its
    own objective.
    """
    facts = models[model].facts
    return (
        (objectives[facts.objective].facts.requires,)
        if facts.capabilities is None
        else facts.capabilities
    )


def compatible_objectives(model: str) -> list[str]:
    """The objectives that a model can be pre-trained with, its own first; some of them only with
    certain settings (`check_compatible`).
    """
    capabilities = list_capabilities(model)
    fitting = [name for name, entry in objectives.items() if entry.facts.requires in capabilities]
    return [*dict.fromkeys((models[model].facts.objective, *fitting))]


def check_name(model: str, objective: str) -> None:
    """Refuse an objective that no configuration of a model meets. Raises UserError (config, exit 2)
    naming those that fit.
    """
    requires, capabilities = objectives[objective].facts.requires, list_capabilities(model)
    if not requires or requires in capabilities:
        return
    *others, last = compatible_objectives(model)
    hint = "Leave --objective out for the model's own"
    if models[model].facts.capabilities is None:
        why, hint = (
            f"it does not declare the capability {requires}",
            f"If it has it, name it in ModelFacts.capabilities. {hint}",
        )
    elif not capabilities:
        why = "it has no pre-training"
    else:
        owners = [
            name for name, entry in models.items() if requires in (entry.facts.capabilities or ())
        ]
        why = REASONS.get(requires, f"that is the objective of {' and '.join(owners)}")
    expected = f"{', '.join(others)} or {last}" if others else last
    raise config_error(
        f"{objective} for {model}", f"{why}; expected {expected}", "objective.name", hint
    )


def check_compatible(config: ModelConfig, objective: str) -> None:
    """Refuse an objective that a model of this configuration cannot be pre-trained with. Raises
    UserError (config, exit 2).
    """
    check_name(config.name, objective)
    facts = objectives[objective].facts
    if facts.requires == "alternating" and config.layers % 2:
        raise config_error(
            f"{config.layers} layers",
            "expected an even number: the objective alternates directions",
            "model.layers",
            f"Use {config.layers + 1} layers",
        )
    facts.check(config)


def leak_free(
    settings: Settings | dict[str, Any],
    *,
    normalise: str | None = None,
    preparation: Sequence[SamplePreparation] = (),
) -> bool | str | None:
    """The stamp of a run: True, False, None (the objective has no target of its own), or a text
    with the condition.

    `settings` are resolved, or plain values; `normalise` is how the windows were really normalised
    (None: as the settings say); `preparation` is that of the data sets (without any: the values are
    what was recorded).

    Raises UserError: overlapping patches under an objective that claims to be leak-free (exit 2).
    """
    chosen = settings if isinstance(settings, Settings) else validate_settings(settings)
    name = chosen.objective.name or models[chosen.model.name].facts.objective
    facts = objectives[name].facts
    if facts.leak_free is not True:
        return facts.leak_free
    model = chosen.model
    refuse_overlap(model)
    if (model.target == "tokens" or facts.states) and model.tokenizer == "conv":
        # neighbouring tokens share samples, and a tokenizer that is trained moves its content there
        return False
    windowed = (normalise or chosen.data.normalise) == "window" and model.tokenizer != "codes"
    statistics = ("given window statistics",) if windowed else ()
    conditions = dict.fromkeys(
        (*list_conditions(preparation, model, facts.context), *statistics, *model.leak_conditions())
    )
    return " and ".join(conditions) or True


@torch.no_grad()
def measure_scale(model: nn.Module, batches: Batches | Iterable[Batch]) -> float:
    """Measure Var(target) (codes: unigram entropy; heads: that of the labels) on up to
    `SCALE_BATCHES`; kept in `model.target_scale`.
    """
    scale = float(model.measure(_read_first(model, batches)))  # type: ignore[operator]
    model.target_scale.fill_(scale)  # type: ignore[operator]
    return scale


def measure_features(model: nn.Module, batches: Batches) -> None:
    """Measure what standardises the features of patches, on up to `SCALE_BATCHES`, where the model
    or the one below its head has any that are not measured.
    """
    network = getattr(model, "model", model)
    if isinstance(network, Model):
        network.fit_features(lambda: _read_first(model, batches))


def _read_first(model: nn.Module, batches: Batches | Iterable[Batch]) -> Iterator[Batch]:
    """The first `SCALE_BATCHES` where the model is."""
    where = next(model.parameters()).device
    for batch in itertools.islice(batches(0) if callable(batches) else batches, SCALE_BATCHES):
        yield Batch._make(part if part is None else part.to(where) for part in batch)
