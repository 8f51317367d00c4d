"""Reads recipes: experiments of several stages as TOML files, or the settings of one run."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from bitimely_core.config import (
    SECTIONS,
    DataConfig,
    Rates,
    Section,
    Settings,
    SettingsLayer,
    check_device_name,
    merge_layers,
    parse_assignments,
    place_options,
    read_toml,
    validate,
    validate_settings,
)
from bitimely_core.errors import UserError, usage_error
from bitimely_core.registry import check_name
from bitimely_core.types import drop_empty


def check_stage_name(name: str) -> str:
    """A name that names of runs are made from. Raises ValueError."""
    try:
        return check_name(name, "stage")
    except UserError as error:
        raise ValueError(f"{error.requirement}. {error.hint}") from None


PAPER_PRESET = "paper"  # of `run --preset`: the one that a recipe names as the paper's
StageName = Annotated[str, AfterValidator(check_stage_name)]


Margin = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RecipeStage(Section):
    """A section of a recipe that is a training verb: its keys are the flags' names."""

    preset: str | None = None
    data: str | tuple[str, ...] | None = None
    model: str | None = None
    budget: Literal["table", "matched"] | None = None
    objective: str | None = None
    epochs: int | None = Field(None, ge=0)
    steps: int | None = Field(None, ge=0)
    minutes: float | None = Field(None, gt=0)
    batch_size: int | None = Field(None, ge=1)
    accumulate: int | None = Field(None, ge=1)
    lr: float | None = Field(None, gt=0)
    tune: Rates = None
    precision: str | None = None
    device: str | None = None
    devices: int | None = Field(None, ge=1)
    compile: bool | Literal["auto"] | None = None
    checkpoint: Literal["last", "best"] | None = None
    patience: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=0)
    ties: str | None = None
    rotary: str | None = None
    clock: str | None = None
    tokenizer: str | None = None
    readout: str | None = None
    layers: str | None = None
    freeze: bool | None = None
    from_scratch: bool | None = None
    augment: str | tuple[str, ...] | None = None
    fraction: float | None = Field(None, gt=0, le=1)

    def flags(self) -> SettingsLayer:
        """As nested settings, without `preset` and `budget`; of `data` what `pretrain` reads."""
        values = self.model_dump(exclude_none=True, exclude={"preset", "budget"})
        if isinstance(self.data, str):
            values["data"] = (self.data,)
        return place_options(values)


class IngestStage(Section):
    """`[ingest]`: data sets, their sources and options."""

    datasets: tuple[str, ...] = ()
    sources: dict[str, str] = {}
    options: dict[str, SettingsLayer] = {}
    encoding: dict[str, str] = {}  # data set -> encoding of its text tables
    jobs: int = Field(1, ge=1, le=1024)


class EvaluateStage(Section):
    """`[evaluate]`: the flags of the verb."""

    split: Literal["train", "validation", "test"] = "test"
    bootstrap: int = Field(1000, ge=0, le=1_000_000)
    by: Literal["subject", "window"] = "subject"
    # cheap: without those that are fitted, on the pages of single runs
    baselines: Literal["all", "cheap"] = "all"
    # of non-inferiority and equivalence, in printed units; by column, "" for the others
    margin: Margin | dict[str, Margin] | None = None
    # of the page: `data:metric` or `data:class` (AUPRC of that class); else those of [paper], or
    # the main metric
    columns: tuple[str, ...] = ()
    # a value of the matrix: every other run is compared with that of the cell which has this one
    compare: str | None = None


class AnalyzeStage(Section):
    """One `[[analyze]]`: the kind, the runs that it reads and its options."""

    kind: str
    # both: a pre-training with all fine-tunings of it on one view
    of: Literal["pretrain", "finetune", "both"] = "pretrain"
    together: bool = False  # one page about all rows in the place of one for each
    data: str | None = None
    sequences: int | None = Field(None, ge=1)
    options: SettingsLayer = {}


class RecipeBlock(Section):
    """One `[[block]]`: a pre-training and the columns of the table that come out of it.

    What it leaves open is as in the recipe.
    """

    name: StageName | Literal[""] = ""
    tokenize: DataConfig = DataConfig()
    build: SettingsLayer = {}
    pretrain: RecipeStage = RecipeStage()
    finetune: RecipeStage = RecipeStage()


class RecipeArm(RecipeStage):
    """One `[[arm]]`: a row that is no point of a product.

    `set` holds settings that have no flag, by section.
    """

    name: StageName
    set: dict[str, SettingsLayer] = {}

    def settings(self) -> SettingsLayer:
        """The flags and `set` as nested settings."""
        flags = RecipeStage.model_validate(
            self.model_dump(exclude_none=True, exclude={"name", "set"})
        ).flags()
        return merge_layers(flags, self.set)


class LeaveOut(Section):
    """One `[[leave_out]]`: points of the matrix that cannot be, key -> values, and why."""

    where: dict[str, tuple[Any, ...]] = Field(min_length=1)  # arm, block: their names
    why: str


class TuningStage(Section):
    """`[tuning]`: one choice of learning rates for each arm.

    It comes from trainings that are never scored; all other trainings of the arm take it.
    """

    seed: int = Field(99, ge=0)
    fold: int | None = Field(None, ge=1, le=10)  # one of `folds`
    rates: Rates = 3


class RegisteredFamily(Section):
    """One `[[family]]`: differences of a row to its rivals that are one family of tests.

    They are corrected together. Without a margin they test superiority. A descriptive family has no
    tests: each of its intervals stands by itself, without correction and without a verdict.
    """

    name: str
    question: str
    row: str
    # rows; or baselines: features, kernels, signal (the first that the data set registers)
    rivals: tuple[str, ...]
    columns: tuple[str, ...]
    margin: dict[str, Margin] = {}  # column -> printed units
    margin_share: Margin | None = None  # of the rival's value, in columns without a margin
    descriptive: bool = False

    @model_validator(mode="after")
    def _check_names(self) -> RegisteredFamily:
        if self.descriptive and (self.margin or self.margin_share is not None):
            raise ValueError("expected no margin in a descriptive family, which has no tests")
        if odd := set(self.margin) - set(self.columns):
            raise ValueError(
                f"expected margins of the columns alone, found {', '.join(sorted(odd))}"
            )
        if self.row in self.rivals:
            raise ValueError(f"expected rivals other than the row {self.row}")
        return self


class Recipe(Section):
    """A whole experiment as data (`pipelines/*.toml`), or the settings of one run (`--config`)."""

    title: str = ""
    description: str = ""
    ingest: IngestStage = IngestStage()
    tokenize: DataConfig = DataConfig()
    # choices of the sequences of claims, named as the options of `tokenize pophr`
    build: SettingsLayer = {}
    pretrain: RecipeStage = RecipeStage()
    paper_preset: str | None = None  # the paper's for these data: that of `run --preset paper`
    finetune: RecipeStage = RecipeStage()
    evaluate: EvaluateStage = EvaluateStage()
    analyze: tuple[AnalyzeStage, ...] = ()
    matrix: dict[str, tuple[Any, ...]] = {}
    block: tuple[RecipeBlock, ...] = ()
    arm: tuple[RecipeArm, ...] = ()
    leave_out: tuple[LeaveOut, ...] = ()
    # row -> column -> value, or [value, standard error], in the paper's units
    paper: dict[str, Any] = {}
    # test folds: everything once for each, the test sets scored together
    folds: tuple[Annotated[int, Field(ge=1, le=10)], ...] = ()
    tuning: TuningStage | None = None
    # shipped recipes that are run one after another; this one tests the families over them
    recipes: tuple[str, ...] = ()
    family: tuple[RegisteredFamily, ...] = ()
    statistics: tuple[str, ...] = ()  # views whose windows are counted beside the paper's table
    objectives: dict[str, str] = {}  # a model's own objective -> the one in its place
    # laid over the recipe unless `run --leak-free`: what the paper does and a fair evaluation would
    # not
    literal: SettingsLayer = {}
    model: SettingsLayer = {}
    objective: SettingsLayer = {}
    data: SettingsLayer = {}
    train: SettingsLayer = {}

    @field_validator("folds")
    @classmethod
    def _check_folds(cls, folds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(folds)) < len(folds):
            raise ValueError("expected each fold once")
        return folds

    @field_validator("matrix")
    @classmethod
    def _check_matrix(cls, matrix: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        for name, values in matrix.items():
            # equal values would be one cell
            if not values or any(value in values[:k] for k, value in enumerate(values)):
                raise ValueError(f"expected each value of {name} once, found {list(values)}")
        return matrix

    @field_validator("arm")
    @classmethod
    def _check_arms(cls, arms: tuple[RecipeArm, ...]) -> tuple[RecipeArm, ...]:
        if len({arm.name for arm in arms}) < len(arms):
            raise ValueError("expected arms of different names")
        return arms

    @model_validator(mode="after")
    def _check_leave_out(self) -> Recipe:
        keys = {"arm", "block", *self.matrix}
        for name in itertools.chain(*(rule.where for rule in self.leave_out)):
            if name not in keys:
                raise ValueError(
                    f"found {name!r} in leave_out.where, expected one of {', '.join(sorted(keys))}"
                )
        return self

    @model_validator(mode="after")
    def _check_test_folds(self) -> Recipe:
        if self.tuning and self.tuning.fold not in (self.folds or (None,)):
            raise ValueError(
                f"expected tuning.fold to be one of the folds {list(self.folds)}, "
                f"found {self.tuning.fold}"
            )
        if self.folds and self.tokenize.folds and max(self.folds) > self.tokenize.folds:
            raise ValueError(
                f"found fold {max(self.folds)} of tokenize.folds = {self.tokenize.folds}"
            )
        return self

    @model_validator(mode="after")
    def _read_all(self) -> Recipe:
        beside = self.model_fields_set - {"title", "description", "recipes", "family"}
        if len({family.name for family in self.family}) < len(self.family):
            raise ValueError("expected families of different names")
        if self.family and not self.recipes:
            raise ValueError("expected `recipes`, whose results the families test")
        if self.recipes and beside:
            names = ", ".join(name for name in type(self).model_fields if name in beside)
            raise ValueError(
                f"found {names} beside `recipes`: expected families alone, "
                "the recipes have their own settings"
            )
        return self

    def overrides(self, stage: str, *, tokenize: bool = True) -> SettingsLayer:
        """Nested settings of one stage (pretrain, finetune).

        They are how windows are made if they are missing, the general sections and the flags of the
        stage.
        """
        layer = {name: getattr(self, name) for name in ("model", "objective", "data", "train")}
        general = drop_empty(layer)
        windows = self.tokenize.model_dump(exclude_unset=True) if tokenize else {}
        made = {"data": windows} if windows else {}
        return merge_layers(made, general, getattr(self, stage).flags())


def load_recipe(
    path: Path, *, leak_free: bool = False, changes: SettingsLayer | None = None
) -> Recipe:
    """A recipe file with `changes` over it, and before them its `[literal]` unless `leak_free`.

    Raises UserError (config, exit 2) naming the key, with the nearest right one, or a device that
    no machine has.
    """
    values, file = read_toml(path), str(path)
    if leak_free and not values.get("literal"):
        raise usage_error(
            "no section [literal]",
            "expected one for --leak-free to leave out",
            "Leave --leak-free out: there is one variant",
            file=file,
        )
    literal = {} if leak_free else values.get("literal", {})
    changes = changes or {}
    recipe = validate(Recipe, merge_layers(values, literal, changes), file)
    check_settings(recipe, {}, file)
    if "matrix" not in changes:  # a change may leave values out
        _check_left_out(recipe, file)
    return recipe


def replace_preset(recipe: Recipe, preset: str) -> Recipe:
    """The recipe with all of its trainings at another preset.

    `paper` is the one that it names as the paper's. Arms with a preset of their own keep it. Of a
    recipe that lists others only the title changes. Raises UserError (config, exit 2) where
    presets are what it compares, or it names none of the paper.
    """
    if recipe.recipes:
        return recipe.model_copy(update={"title": f"{recipe.title}, preset {preset}"})
    if "preset" in recipe.matrix:
        raise usage_error(
            "the recipe compares presets",
            "expected one preset for all",
            "Leave --preset out",
            field="--preset",
        )
    if preset == PAPER_PRESET and recipe.paper_preset is None:
        raise usage_error(
            "no paper_preset in the recipe",
            "expected the paper's preset for its data",
            "Name one",
            field="--preset",
        )
    chosen = recipe.paper_preset if preset == PAPER_PRESET else preset

    def change(stage: RecipeStage) -> RecipeStage:
        return stage.model_copy(update={"preset": chosen})

    blocks = [
        block.model_copy(update={"pretrain": change(block.pretrain)})
        if block.pretrain.preset
        else block
        for block in recipe.block
    ]
    title = f"{recipe.title}, preset {chosen}"
    return recipe.model_copy(
        update={"pretrain": change(recipe.pretrain), "block": tuple(blocks), "title": title}
    )


def _check_left_out(recipe: Recipe, file: str) -> None:
    """Check that `[[leave_out]]` names values that exist: others would leave nothing out."""
    choices = {
        "arm": [arm.name for arm in recipe.arm],
        "block": [block.name for block in recipe.block],
        **recipe.matrix,
    }
    for name, values in itertools.chain(*(rule.where.items() for rule in recipe.leave_out)):
        for value in values:
            if value not in choices[name]:
                raise usage_error(
                    f"found {value!r}",
                    f"expected some of {', '.join(map(str, choices[name]))}",
                    "Correct it",
                    file=file,
                    field=f"leave_out.where.{name}",
                )


def check_settings(recipe: Recipe, changes: SettingsLayer, file: str | None = None) -> None:
    """Check the free sections of a recipe against the settings of every model that it trains.

    `changes` are laid over them. Raises UserError (config, exit 2) naming the key, with the nearest
    right one, or a device that no machine has.
    """
    rows: list[SettingsLayer] = [arm.settings() for arm in recipe.arm] or [{}]
    for key in SECTIONS:
        names = recipe.matrix.get(key) or (None,)
        layers: list[SettingsLayer] = [{key: {"name": name}} if name else {} for name in names]
        rows = list(itertools.starmap(merge_layers, itertools.product(rows, layers)))
    chosen = {}
    for key in SECTIONS:
        if getattr(recipe.pretrain, key):
            chosen[key] = {"name": getattr(recipe.pretrain, key)}
    for stage, row in itertools.product(("pretrain", "finetune"), rows):
        layer = merge_layers(chosen, recipe.overrides(stage), row, changes)
        check_device_name(validate_settings(layer, file).train.device)


def resolve_settings(
    stage: Literal["pretrain", "finetune"],
    base: SettingsLayer,
    *,
    config: Recipe | None,
    pairs: list[str],
    flags: SettingsLayer,
) -> Settings:
    """Field defaults <- `base` (preset or source run) <- recipe <- flags <- `--set`."""
    layers = [base, config.overrides(stage) if config else {}, flags, parse_assignments(pairs)]
    chosen = validate_settings(merge_layers(*layers))
    if "core_precision" not in type(chosen.model).model_fields:
        return chosen
    precision = {"core_precision": chosen.train.core_precision}
    return chosen.model_copy(update={"model": chosen.model.model_copy(update=precision)})
