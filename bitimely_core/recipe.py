"""Recipes: experiments of several stages as TOML files, and the settings of one run
(`--config`).
"""

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
    read_toml,
    validate,
    validate_settings,
)
from bitimely_core.errors import UserError, usage_error
from bitimely_core.registry import check_name


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
    batch_size: int | None = Field(None, ge=1)
    accumulate: int | None = Field(None, ge=1)
    lr: float | None = Field(None, gt=0)
    tune: Rates = None
    precision: str | None = None
    device: str | None = None
    devices: int | None = Field(None, ge=1)
    compile: bool | Literal["auto"] | None = None
    checkpoint: Literal["last", "best"] | None = None
    seed: int | None = Field(None, ge=0)
    ties: str | None = None
    rotary: str | None = None
    clock: str | None = None
    readout: str | None = None
    layers: str | None = None
    freeze: bool | None = None
    from_scratch: bool | None = None
    fraction: float | None = Field(None, gt=0, le=1)

    def flags(self) -> SettingsLayer:
        """As nested settings, without `preset` and `budget`; of `data` only what `pretrain`
        reads.
        """
        out: SettingsLayer = {}
        for name, value in self.model_dump(exclude_none=True).items():
            if name in {"preset", "budget"}:
                continue
            section, key = FLAG_FIELDS.get(name, ("train", name))
            out.setdefault(section, {})[key] = (
                (value,)
                if (section, key) == ("data", "names") and isinstance(value, str)
                else value
            )
        return out


FLAG_FIELDS = {
    "data": ("data", "names"),
    "model": ("model", "name"),
    "objective": ("objective", "name"),
    "tune": ("tune", "rates"),
    "ties": ("model", "ties"),
    "rotary": ("model", "rotary"),
    "clock": ("model", "clock"),
    "readout": ("finetune", "readout"),
    "layers": ("finetune", "layers"),
    "freeze": ("finetune", "freeze"),
    "from_scratch": ("finetune", "from_scratch"),
    "fraction": ("data", "fraction"),
}


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
    columns: tuple[
        str, ...
    ] = ()  # of the page: `data:metric` or `data:class` (AUPRC of that class); else those of [paper], or the main metric
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
    """One `[[block]]`: a pre-training and the columns of the table that come out of it. What it
    leaves open is the recipe's own.
    """

    name: StageName | Literal[""] = ""
    tokenize: DataConfig = DataConfig()
    build: SettingsLayer = {}
    pretrain: RecipeStage = RecipeStage()
    finetune: RecipeStage = RecipeStage()


class RecipeArm(RecipeStage):
    """One `[[arm]]`: a row that is no point of a product. `set` holds settings that have no flag,
    by section.
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
    """`[tuning]`: one choice of learning rates for each arm, from trainings of its own that are
    never scored; all its other trainings take them.
    """

    seed: int = Field(99, ge=0)
    fold: int | None = Field(None, ge=1, le=10)  # one of `folds`
    rates: Rates = 3


class RegisteredFamily(Section):
    """One `[[family]]`: differences of a row to its rivals that are one family of tests, corrected
    together. Without a margin: superiority.

    A descriptive family has no tests: each of its intervals stands by itself, without correction
    and without a verdict.
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
    def _check_points(self) -> Recipe:
        known = {"arm", "block", *self.matrix}
        for name in (name for out in self.leave_out for name in out.where):
            if name not in known:
                raise ValueError(
                    f"found {name!r} in leave_out.where, expected one of {', '.join(sorted(known))}"
                )
        fold = self.tuning.fold if self.tuning else None
        if (self.tuning and (fold is None) != (not self.folds)) or (
            fold is not None and fold not in self.folds
        ):
            raise ValueError(
                f"expected tuning.fold to be one of the folds {list(self.folds)}, found {fold}"
            )
        if self.folds and self.tokenize.folds and max(self.folds) > self.tokenize.folds:
            raise ValueError(
                f"found fold {max(self.folds)} of tokenize.folds = {self.tokenize.folds}"
            )
        return self

    @model_validator(mode="after")
    def _read_all(self) -> Recipe:
        beside = self.model_fields_set - {"title", "description", "recipes", "family"}
        if len({one.name for one in self.family}) < len(self.family):
            raise ValueError("expected families of different names")
        if self.family and not self.recipes:
            raise ValueError("expected `recipes`, whose results the families test")
        if self.recipes and beside:
            named = ", ".join(name for name in type(self).model_fields if name in beside)
            raise ValueError(
                f"found {named} beside `recipes`: expected families alone, the recipes have their own settings"
            )
        return self

    def overrides(self, stage: str, *, tokenize: bool = True) -> SettingsLayer:
        """Nested settings of one stage (pretrain, finetune): how windows are made if they are
        missing, the general sections, the stage's own flags.
        """
        general = {
            name: getattr(self, name)
            for name in ("model", "objective", "data", "train")
            if getattr(self, name)
        }
        windows = self.tokenize.model_dump(exclude_unset=True) if tokenize else {}
        return merge_layers(
            {"data": windows} if windows else {}, general, getattr(self, stage).flags()
        )


def load_recipe(
    path: Path, *, leak_free: bool = False, changes: SettingsLayer | None = None
) -> Recipe:
    """A recipe file with `changes` laid over it, and before them its section `[literal]` unless
    `leak_free`.

    Raises UserError (config, exit 2) naming the key, with the nearest right one, or a device that
    no machine has.
    """
    values = read_toml(path)
    if leak_free and not values.get("literal"):
        raise usage_error(
            "no section [literal]",
            "expected one for --leak-free to leave out",
            "Leave --leak-free out: there is one variant",
            file=str(path),
        )
    read = validate(
        Recipe,
        merge_layers(values, {} if leak_free else values.get("literal", {}), changes or {}),
        str(path),
    )
    check_settings(read, {}, str(path))
    if "matrix" not in (changes or {}):  # a change may leave values out
        _check_left_out(read, str(path))
    return read


def replace_preset(recipe: Recipe, preset: str) -> Recipe:
    """The recipe with all of its trainings at another preset; `paper`: the one that it names as the
    paper's. Arms with a preset of their own keep it.

    Of a recipe that lists others only the title changes. Raises UserError (config, exit 2) where
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
        one.model_copy(update={"pretrain": change(one.pretrain)}) if one.pretrain.preset else one
        for one in recipe.block
    ]
    title = f"{recipe.title}, preset {chosen}"
    return recipe.model_copy(
        update={"pretrain": change(recipe.pretrain), "block": tuple(blocks), "title": title}
    )


def _check_left_out(recipe: Recipe, file: str) -> None:
    """Check that `[[leave_out]]` names values that exist: a misspelt one would leave nothing
    out.
    """
    known = {
        "arm": [one.name for one in recipe.arm],
        "block": [one.name for one in recipe.block],
        **recipe.matrix,
    }
    for name, values in (
        (name, values) for out in recipe.leave_out for name, values in out.where.items()
    ):
        if odd := [value for value in values if value not in known[name]]:
            wanted = f"expected some of {', '.join(map(str, known[name]))}"
            raise usage_error(
                f"found {odd[0]!r}",
                wanted,
                "Correct it",
                file=file,
                field=f"leave_out.where.{name}",
            )


def check_settings(recipe: Recipe, changes: SettingsLayer, file: str | None = None) -> None:
    """Check the free sections of a recipe, with `changes` laid over them, against the settings of
    every model that it trains.

    Raises UserError (config, exit 2) naming the key, with the nearest right one, or a device that
    no machine has.
    """
    rows: list[SettingsLayer] = [arm.settings() for arm in recipe.arm] or [{}]
    for key in SECTIONS:
        values = recipe.matrix.get(key) or (None,)
        rows = [
            merge_layers(row, {key: {"name": value}} if value else {})
            for row, value in itertools.product(rows, values)
        ]
    for stage, row in itertools.product(("pretrain", "finetune"), rows):
        chosen = {
            key: {"name": name} for key in SECTIONS if (name := getattr(recipe.pretrain, key))
        }
        check_device_name(
            validate_settings(
                merge_layers(chosen, recipe.overrides(stage), row, changes), file
            ).train.device
        )


def resolve_settings(
    stage: Literal["pretrain", "finetune"],
    base: SettingsLayer,
    *,
    config: Recipe | None,
    pairs: list[str],
    flags: SettingsLayer,
) -> Settings:
    """Field defaults <- `base` (the preset, or the source run) <- recipe <- command line; `--set`
    after the flags.
    """
    layers = [base, config.overrides(stage) if config else {}, flags, parse_assignments(pairs)]
    chosen = validate_settings(merge_layers(*layers))
    if "core_precision" not in type(chosen.model).model_fields:
        return chosen
    return chosen.model_copy(
        update={
            "model": chosen.model.model_copy(update={"core_precision": chosen.train.core_precision})
        }
    )
