"""The cells of a recipe, their trainings, and the plan in which both stand."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from bitimely_core import registry
from bitimely_core.pipeline.graph import Node
from bitimely_core.recipe import Recipe, RecipeBlock, TuningStage
from bitimely_core.types import drop_none
from bitimely_core.workflows.jobs import Flags

# they leave the pre-training as it is: it is shared
FINETUNE_FLAGS = {"readout", "layers", "freeze", "from_scratch", "fraction"}
DEFAULT_MODEL = "bitimelygpt"


@dataclass(frozen=True, kw_only=True)
class ExperimentCell:
    """One row of the table under one seed."""

    arm: str
    values: Flags  # its point of the matrix
    flags: Flags
    set: Flags = field(default_factory=dict)  # settings without a flag

    @property
    def row(self) -> str:
        """The row of the table that it belongs to: all but the seed."""
        return " ".join(
            filter(
                None,
                [self.arm, *(str(value) for key, value in self.values.items() if key != "seed")],
            )
        )

    @property
    def seed(self) -> int:
        """The seed of its trainings."""
        return int(self.flags.get("seed", 0))

    def tune(self, tuning: TuningStage, matrix: Mapping[str, tuple[Any, ...]]) -> ExperimentCell:
        """The cell that chooses the learning rates of its arm: the seed of `tuning`, the first
        value of what the fine-tuning alone reads.
        """
        first = {key: matrix[key][0] for key in self.values if key in FINETUNE_FLAGS} | {
            "seed": tuning.seed
        }
        return replace(self, values={**self.values, **first}, flags={**self.flags, **first})

    def name(self, *, pretraining: bool = False) -> str:
        """The values that tell it from other cells; of the pre-training only those that matter to
        it.
        """
        values = [
            name_value(value)
            for key, value in self.values.items()
            if not (pretraining and key in FINETUNE_FLAGS)
        ]
        is_initial = pretraining and self.flags.get("from_scratch")
        return join_names(self.arm, *values, "init" if is_initial else "")


@dataclass(frozen=True, kw_only=True)
class TrainingStage:
    """A training of a recipe: the verb and its arguments. `source` and `data` belong to
    fine-tuning, `preset` and `budget` to pre-training.
    """

    verb: str
    run: str
    flags: Flags
    assignments: tuple[str, ...]
    needs: tuple[str, ...] = ()
    source: str | None = None
    data: str | None = None
    preset: str | None = None
    budget: str | None = None
    rate_from: str | None = None  # run whose chosen learning rate it takes

    def arguments(self) -> dict[str, Any]:
        """The arguments of the verb."""
        start = (
            {"source": self.source, "data": self.data}
            if self.verb == "finetune"
            else {"preset": self.preset, "budget": self.budget}
        )
        return {
            **start,
            "run": self.run,
            "flags": self.flags,
            "assignments": list(self.assignments),
        }


@dataclass(frozen=True, kw_only=True)
class CellTrainings:
    """A cell in one block, and what its trainings share."""

    block: RecipeBlock  # of several test folds: with the settings of one
    cell: ExperimentCell
    common: Flags  # flags of all its trainings
    # view, "" for the pre-training -> run whose chosen learning rate its training takes
    rate_runs: Mapping[str, str]


class StageOwner(NamedTuple):
    """The cell that a stage belongs to, and the text that `--only` searches: its block, row,
    values, and of a fine-tuning its data.
    """

    cell: str
    search_text: str


@dataclass(frozen=True, kw_only=True)
class TableEntry:
    """A cell of the table of results: the run behind it, or why the recipe excludes it."""

    row: str
    column: str
    seed: int
    run: str | None = None
    stage: str = ""  # label of its evaluation
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class ExperimentPlan:
    """The stages of a recipe, and the cells of its table."""

    name: str
    recipe: Recipe
    nodes: dict[str, Node] = field(default_factory=dict)
    # label of a stage that belongs to one cell -> that cell
    owners: dict[str, StageOwner] = field(default_factory=dict)
    trainings: dict[str, TrainingStage] = field(default_factory=dict)
    table: list[TableEntry] = field(default_factory=list)

    def pretraining_of(self, label: str) -> TrainingStage:
        """The pre-training behind a training, or itself."""
        training = self.trainings[label]
        return (
            self.trainings[f"pretrain {training.source}"]
            if training.verb == "finetune"
            else training
        )

    def model_name(self, label: str) -> str:
        """The model of a training."""
        return str(self.pretraining_of(label).flags.get("model", {}).get("name", DEFAULT_MODEL))


def join_names(*parts: str | None) -> str:
    """The parts that are not empty, joined by hyphens: a name in the workspace."""
    return "-".join(filter(None, parts))


def name_value(value: object) -> str:
    """A value of a matrix as a part of names: `sleep-edf/staging` -> `sleep-edf-staging`."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", str(value)).strip("-")


def list_matrix_points(recipe: Recipe) -> Iterator[Flags]:
    """The product of `[matrix]`: one dict of flags a cell; a recipe without a matrix is one
    cell.
    """
    names = list(recipe.matrix)
    for values in itertools.product(*(recipe.matrix[n] for n in names)):
        yield dict(zip(names, values, strict=True))


def list_cells(recipe: Recipe) -> Iterator[ExperimentCell]:
    """Every arm at every point of the matrix."""
    arms = [
        (arm.name, arm.model_dump(exclude_none=True, exclude={"name", "set"}), arm.set)
        for arm in recipe.arm
    ] or [("", {}, {})]
    for (name, arm_flags, settings), values in itertools.product(arms, list_matrix_points(recipe)):
        flags = {**arm_flags, **values}
        model = registry.find_network(flags.get("model") or recipe.pretrain.model or DEFAULT_MODEL)
        # no pre-training of a model that could have one
        if flags.get("objective") == "none" != model.facts.objective:
            flags |= {"objective": None, "from_scratch": True}
        chosen = drop_none(flags)
        yield ExperimentCell(arm=name, values=values, flags=chosen, set=settings)
