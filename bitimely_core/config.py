"""Declares what can be set of models, objectives and training, and merges settings.

The later wins: field defaults <- preset <- recipe file (`--config`) <- command line (`--set
section.key=value` and the flags).
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
)

from bitimely_core.errors import (
    Finding,
    Reason,
    UserError,
    check_choice,
    join_findings,
    safe_text,
    usage_error,
)
from bitimely_core.registry import RECIPES, Registry, methods, models, objectives
from bitimely_core.system_errors import raise_system_error


class Section(BaseModel):
    """A frozen section of settings.

    It refuses unknown keys, NaN, infinities, and sizes that no tensor can have. A field is written
    here alone: records, checks, docs/settings.md and the command line take it from the class.
    """

    # verb -> the fields that have an option there; the others are given by --set
    OPTIONS: ClassVar[dict[str, tuple[str, ...]]] = {}

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, strict=False, defer_build=True
    )

    @field_validator("*")
    @classmethod
    def _limit_sizes(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, int) and abs(value) >= 1 << 31 and info.field_name != "seed":
            raise ValueError("expected a magnitude below 2,147,483,648")
        return value


class ModelConfig(Section):
    """What all models share.

    A model with settings of its own inherits this class in its file and names it in
    `ModelFacts.config`.
    """

    name: str = Field("bitimelygpt", description="Model.")
    channels: int = Field(1, ge=1, description="Channels of a window, V; not used for codes.")
    others: tuple[int, ...] = Field(
        (),
        description="Channels of the further data sets of a joint pre-training; "
        "each has its own adapter.",
    )
    channel_independent: bool = Field(
        False,
        description="Read each channel as a sequence with V = 1; "
        "vectors are averaged over channels.",
    )
    length: int = Field(
        3000, ge=1, description="Samples of a window, T: the size of learned positions."
    )
    layers: int = Field(4, ge=1, description="Layers.")
    heads: int = Field(4, ge=1, description="Heads of a layer.")
    dim: int = Field(64, ge=2, description="Model width, which is also the width of the keys.")
    value_dim: int = Field(128, ge=2, description="Width of the values.")
    ffn_dim: int = Field(128, ge=1, description="Hidden width of the feed-forward network.")
    tokenizer: Literal["conv", "patch", "patch-cnn", "steps", "codes"] = Field(
        "conv",
        description="How a window is cut; patch-cnn: patches, each read by a network (bitimelygpt, "
        "gpt, lstm and their variants start with it); steps: a token a timestep.",
    )
    patch: int = Field(
        0,
        ge=0,
        description="Samples of a patch; 0: 8, with patch-cnn by the kind of signal and its rate.",
    )
    patch_features: bool | None = Field(
        None,
        description="patch-cnn: also read log amplitudes, mean and size of a patch; "
        "none: by the kind of signal.",
    )
    stride: int | None = Field(
        None, ge=1, description="Samples between patches; none: the patch, without overlap."
    )
    crop: Literal["pad", "start"] = Field(
        "pad",
        description="If T is no multiple of the patch: repeat the last sample, or crop the start.",
    )
    codes: int | None = Field(
        None, description="Size of the input vocabulary, for tokenizer codes."
    )
    target: Literal["raw", "tokens", "spectrum"] | None = Field(
        None,
        description="Predict raw samples, the detached, standardised tokens, or with patch-cnn the "
        "log amplitudes and mean of a patch; none: raw, of long patches of patch-cnn spectrum.",
    )
    ffn: Literal["glu", "plain"] = Field(
        "glu", description="Feed-forward network: gated, or two linear maps."
    )
    ffn_act: Literal["gelu", "silu"] = Field(
        "gelu", description="Activation of the feed-forward network."
    )
    ties: Literal["canonical", "shuffle", "group"] = Field(
        "canonical", description="Order of events at one time; group: without order."
    )
    events: Literal["code-embed", "grid"] = Field(
        "code-embed", description="grid: a month a timestep and a code a channel."
    )
    horizon: int = Field(
        240, ge=2, description="Months of the grid; models of irregular times divide by it."
    )
    index_day: bool = Field(
        True, description="Events end at the index day of a landmark; false: at the last event."
    )
    exact_times: bool = Field(
        True,
        description="Times of events as they are; false: whole months, of gpt and lstm no times.",
    )
    person: bool = Field(True, description="Events come with age at the first event and sex.")
    numbers: bool | None = Field(
        None,
        description="Events come with their numbers (tokenize --values raw); "
        "none: where the token set has them.",
    )
    output_heads: Literal["shared", "separate"] = Field(
        "shared", description="Output projections of next and previous tokens."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout rate.")

    @property
    def cuts_patches(self) -> bool:
        """Whether a token is a patch of `patch` samples."""
        return self.tokenizer in {"patch", "patch-cnn"}

    @property
    def map_stride(self) -> int:
        """Samples from one step of the last map of a convolutional network to the next."""
        return 1

    @property
    def normalises_windows(self) -> bool:
        """Whether the model standardises each window by its own statistics."""
        return False

    def leak_conditions(self) -> tuple[str, ...]:
        """Conditions under which a leak-free objective is leak-free for this configuration."""
        return ("given window statistics",) if self.normalises_windows else ()


class ObjectiveConfig(Section):
    """What all objectives share.

    An objective with settings of its own inherits this class and names it in
    `ObjectiveFacts.config`.
    """

    name: str = Field("", description="Objective; empty: the model's default.")

    @property
    def least_rows(self) -> int:
        """Fewest rows of a micro-batch; 2: the objective compares rows with each other."""
        return objectives[self.name].facts.rows if self.name else 1


RESUME_EXEMPT = frozenset(  # of [train]: may change between a stop and its continuation
    {
        "device",
        "devices",
        "compile",
        "recompute",
        "resident",
        "log_every",
        "checkpoint_every",
        "keep",
        "track",
    }
)


class TrainConfig(Section):
    """One training run. The paper gives epochs alone; the optimiser is that of method.md 6."""

    OPTIONS: ClassVar = dict.fromkeys(
        ("pretrain", "finetune", "train"),
        (
            *("epochs", "steps", "minutes", "batch_size", "accumulate", "lr", "precision"),
            *("device", "devices", "compile", "checkpoint", "patience", "track", "seed"),
        ),
    )

    epochs: int = Field(20, ge=0, description="Passes over the training split.")
    steps: int | None = Field(
        None, ge=0, description="Stop after so many optimizer steps, whatever the epochs."
    )
    minutes: float | None = Field(
        None,
        gt=0,
        description="Train for so many minutes, whatever the epochs and steps; "
        "the learning rate follows the time.",
    )
    batch_size: int = Field(64, ge=1, description="Windows per step, over all processes.")
    accumulate: int = Field(
        1, ge=1, description="Micro-batches a batch is split into, to save memory."
    )
    lr: float = Field(3e-4, gt=0, description="Largest learning rate.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay of AdamW.")
    warmup: float = Field(
        0.05, ge=0, lt=1, description="Share of all steps with a rising learning rate."
    )
    clip: float = Field(1.0, gt=0, description="Largest norm of the gradient.")
    ema: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Decay of a moving average of the weights, which validation and run take; "
        "0: none.",
    )
    patience: int | None = Field(
        None,
        ge=1,
        description="Stop after so many epochs in a row without a better validation "
        "(default: never).",
    )
    precision: Literal["auto", "fp32", "tf32", "bf16"] = Field(
        "auto",
        description="Arithmetic of the training; "
        "auto: bf16 with a core in bf16 on CUDA from capability 8.0, else fp32.",
    )
    core_precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="Arithmetic of the retention core under precision bf16."
    )
    device: str = Field("auto", description="auto, cpu, cuda or mps.")
    devices: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        1,
        description="Number of processes (one per device); "
        "auto: as many as a CPU has free cores, in a training that takes minutes "
        "and whose curve stays the same.",
        json_schema_extra={"metavar": "N|auto"},
    )
    compile: bool | Literal["auto"] = Field(
        "auto",
        description="Use torch.compile, of a stack for one layer after the other; "
        "auto: for stacks on CUDA with Triton. "
        "Refused on a CPU for retention on more than 128 tokens, which it slows down.",
    )
    resident: bool | Literal["auto"] = Field(
        "auto",
        description="Keep windows of int16 on a CUDA device; "
        "auto: where they take less than a quarter of its free memory.",
    )
    recompute: Literal["none", "layers"] = Field(
        "none",
        description="layers: compute the inside of each layer again in the backward pass, "
        "to save memory for about a third more time.",
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, description="Seed of weights, batches and masks.")
    log_every: int = Field(10, ge=1, description="Steps between lines of the log.")
    checkpoint_every: int | None = Field(
        None, ge=1, description="Steps between checkpoints (default: an epoch)."
    )
    keep: int = Field(2, ge=2, description="Checkpoints to keep.")
    checkpoint: Literal["last", "best"] = Field(
        "last",
        description="Weights of the run: those of the last step, as in the paper, or of the best "
        "validation: by the metric of the task where at least 20 people validate, or 5 with 500 "
        "windows, else the last; in a pre-training by the loss.",
    )
    track: bool = Field(
        False,
        description="Write the curves for TensorBoard, too, while they grow (extra track): "
        "tensorboard --logdir.",
    )

    def count_steps(self, per_epoch: int) -> int:
        """Optimizer steps of the training, with `per_epoch` of them in an epoch.

        Of minutes it is an epoch, until steps have been timed.
        """
        if self.minutes is not None:
            return max(per_epoch, 1)
        return self.epochs * per_epoch if self.steps is None else self.steps


Resampling = Literal["two-sided", "causal", "pointwise"]
Filtering = Literal["zero-phase", "causal"]
Normalise = Literal["channel", "window", "none"]
Split = Literal["subject", "official", "time", "random-window", "external"]


def parse_frequencies(value: Any) -> Any:
    """`"0.5,40"` or `",40"` as a tuple of numbers, None for an empty place.

    What is no text stays as it is. Raises ValueError.
    """
    if not isinstance(value, str):
        return value
    try:
        return tuple(float(part) if part.strip() else None for part in value.split(","))
    except ValueError:
        raise ValueError("expected numbers of Hz, separated by commas") from None


def parse_band(value: Any) -> Any:
    """Two frequencies as `parse_frequencies` reads them. Raises ValueError."""
    edges = parse_frequencies(value)
    if isinstance(edges, list | tuple) and len(edges) != 2:
        raise ValueError("expected LOW,HIGH in Hz; one of them may be left out")
    return edges


def parse_names(value: Any) -> Any:
    """`"stretch,gain"` as a tuple of names; `"none"`, alone or among others, is no name.

    What is no text stays as it is.
    """
    if not isinstance(value, str):
        return value
    names = (name.strip() for name in value.split(","))
    return tuple(name for name in names if name and name != "none")


class WindowConfig(BaseModel):
    """How recordings are cut into windows, and windows into splits. None: as the view says.

    Each field is an option of `tokenize` and stands in the manifest of the windows.
    """

    window: int | None = Field(None, ge=1, description="Samples per window.")
    stride: int | None = Field(None, ge=1, description="Samples between the starts of windows.")
    rate: float | None = Field(
        None,
        gt=0,
        description="Sampling rate in Hz; others are resampled with an anti-alias filter.",
    )
    channels: Annotated[tuple[str, ...] | None, BeforeValidator(parse_names)] = Field(
        None, description="Names of channels, separated by commas."
    )
    normalise: Normalise = Field(
        "channel", description="Default: channel, by statistics of the training split."
    )
    split: Split | None = Field(None, description="Default: the data set's own.")
    seed: int = Field(0, ge=0, description="Seed of the split.")
    test_fold: int | None = Field(
        None,
        ge=1,
        description="Test on this one of the ten official folds, or tenths of the subjects; "
        "the fold before it validates.",
    )
    folds: int | None = Field(
        None,
        ge=2,
        description="Deal subjects evenly to so many test folds "
        "(default: each by its own hash, to ten).",
    )
    stratify: str | None = Field(
        None,
        description="Attribute of recordings, such as the label, "
        "whose values are spread evenly over the folds.",
    )
    bandpass: Annotated[tuple[float | None, float | None] | None, BeforeValidator(parse_band)] = (
        Field(
            None,
            description="Band-pass filter in Hz, without phase shift; one side may be empty.",
            json_schema_extra={"metavar": "LOW,HIGH"},
        )
    )
    notch: Annotated[tuple[float, ...] | None, BeforeValidator(parse_frequencies)] = Field(
        None,
        description="Frequencies in Hz to remove, for example 50 for line noise.",
        json_schema_extra={"metavar": "FREQ[,FREQ...]"},
    )
    resampling: Resampling | None = Field(
        None,
        description="Default: two-sided. causal: from past samples alone; "
        "pointwise: from those at its time, else missing.",
    )
    filtering: Filtering | None = Field(
        None, description="Default: zero-phase. causal: filters run forward only, with a delay."
    )


class DataConfig(Section, WindowConfig):
    """Which tokens, and how they are made when they are missing."""

    OPTIONS: ClassVar = {"tokenize": tuple(WindowConfig.model_fields)}

    names: tuple[str, ...] = Field(
        (), description="Data set or view, for example sleep-edf/staging."
    )
    fraction: float = Field(1.0, gt=0, le=1, description="Share of the training subjects.")
    limit: int | None = Field(
        None, ge=1, description="Largest number of windows of each split, drawn by the seed."
    )


class FinetuneConfig(Section):
    """What a supervised head reads and how it learns. None = the model's own readout."""

    OPTIONS: ClassVar = {
        "finetune": ("readout", "layers", "freeze", "from_scratch", "augment", "context"),
        "train": ("readout", "augment", "context"),
    }

    readout: (
        Literal["sos", "eos", "sos+eos", "mean", "mean+tokens", "last", "max", "flatten", "native"]
        | None
    ) = Field(
        None,
        description="Vector that the head reads (default: the model's own, with patch-cnn "
        "mean+tokens: the mean of the states beside mean and largest of the tokens).",
    )
    layers: Literal["last", "last-two"] = Field("last", description="Layers that the head reads.")
    layer_merge: Literal["concat", "mean"] = Field(
        "concat", description="How two layers are joined."
    )
    freeze: bool = Field(False, description="Train the head alone.")
    dropout: float | None = Field(
        None, ge=0, lt=1, description="Dropout before the head; none: 0.1 with patch-cnn, else 0."
    )
    context: int = Field(
        0,
        ge=0,
        le=1000,
        description="Windows before and after a window that its prediction also reads, of the same "
        "recording.",
    )
    context_clock: bool = Field(
        False,
        description="With context: the prediction also reads how many windows after the start of "
        "its recording a window is, for recordings of one night.",
    )
    hazard: Literal["discrete", "piecewise-exponential"] = Field(
        "discrete", description="Time to event: shares of intervals, or constant rates."
    )
    intervals: int = Field(
        8, ge=1, le=100, description="Intervals of time to event, as many events in each."
    )
    from_scratch: bool = Field(
        False,
        description="Random weights of the same architecture: the control without pre-training.",
    )
    augment: Annotated[tuple[str, ...], BeforeValidator(parse_names)] = Field(
        (),
        description="Augmentations of training windows, separated by commas, applied in this "
        "order, see: bitimely list augmentations. default: stretch,gain where the label is a rate "
        "or a duration, gain for classes, else none.",
        json_schema_extra={"metavar": "NAME,NAME...|default|none"},
    )
    class_weights: Literal["none", "balanced"] = Field(
        "none", description="balanced: all classes count the same in the training loss."
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="Share of a label that is spread over all classes in training."
    )
    label_scales: Literal["rate", "duration", "none"] | None = Field(
        None,
        description="What the augmentation stretch takes the label for (default: as the view "
        "states).",
    )


def parse_learning_rates(value: Any) -> Any:
    """How many rates to try (2 to 9), or which ones, as numbers.

    Text is as `--tune` takes it (`"4"`, `"1e-4,1e-3"`). Raises ValueError.
    """
    if value is None:
        return None
    parts = value.split(",") if isinstance(value, str) else value
    try:
        rates = list(map(float, [parts] if isinstance(parts, int) else parts))
    except (TypeError, ValueError):
        rates = []
    if len(rates) == 1 and rates[0] in range(2, 10):
        return int(rates[0])
    if len(rates) < 2 or len(set(rates)) < len(rates) or not all(0 < x < math.inf for x in rates):
        raise ValueError(
            "expected how many learning rates to try, 2 to 9, "
            "or two or more different ones above 0, separated by commas"
        )
    return tuple(rates)


Rates = Annotated[int | tuple[float, ...] | None, BeforeValidator(parse_learning_rates)]


class TuneConfig(Section):
    """How the learning rate is chosen, on the validation split alone (`training.tuning`)."""

    rates: Rates = Field(
        None,
        description="Number of rates around train.lr, half a decade apart, or the rates; "
        "none: train.lr.",
    )
    steps: int | None = Field(
        None, ge=1, description="Steps of each trial; none: a tenth of the training, at least 50."
    )


class Settings(Section):
    """All sections of one run, resolved, as `run.json` stores them.

    `validate_settings` selects the classes of model and objective.
    """

    model: SerializeAsAny[ModelConfig] = ModelConfig()
    objective: SerializeAsAny[ObjectiveConfig] = ObjectiveConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    finetune: FinetuneConfig = FinetuneConfig()
    tune: TuneConfig = TuneConfig()


S = TypeVar("S", bound=Section)
SettingsLayer: TypeAlias = dict[str, Any]  # nested values: section -> key -> value
SECTIONS = ("model", "objective")  # of `Settings`, whose keys depend on the name in them


def list_presets() -> dict[str, Path]:
    """Names of the shipped presets and their files."""
    return {path.stem: path for path in sorted((RECIPES / "presets").glob("*.toml"))}


def load_preset(name: str) -> SettingsLayer:
    """The preset as written.

    Its keys: description, paper_parameters, data, [retention], [attention], [recurrent], those of
    other models and of tokenizers, [train], [finetune]. Raises UserError (unknown_name, exit 2).
    """
    files = list_presets()
    check_choice("preset", name, files)
    return read_toml(files[name])


def read_toml(path: Path) -> SettingsLayer:
    """A TOML file. Raises UserError (config, exit 2) that names file and line."""
    if path.suffix.lower() != ".toml":
        raise usage_error(
            f"found {safe_text(path.suffix)}",
            "expected a .toml file",
            "Write the settings as TOML",
            file=str(path),
        )
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise_system_error(error, path, stored=False)
        raise usage_error(
            error.strerror or str(error),
            hint="Give the path of a TOML file",
            code=Reason.NOT_FOUND,
            file=str(path),
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise usage_error(f"not valid TOML: {error}", file=str(path)) from error


def merge_layers(*layers: SettingsLayer) -> SettingsLayer:
    """Nested dicts, later ones win key by key."""
    out: SettingsLayer = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, dict) and isinstance(out.get(key), dict):
                value = merge_layers(out[key], value)
            out[key] = value
    return out


# options of trainings whose names are not those of their settings
RENAMED = {
    "data": ("data", "names"),
    "model": ("model", "name"),
    "objective": ("objective", "name"),
    "tune": ("tune", "rates"),
}
PLACES = {
    **{key: ("train", key) for key in TrainConfig.model_fields},
    **{key: ("finetune", key) for key in FinetuneConfig.model_fields},
    **{key: ("model", key) for key in ("ties", "rotary", "clock", "tokenizer")},
    "fraction": ("data", "fraction"),
    **RENAMED,
}  # option of a training -> section and key of its setting


PRETRAINING = frozenset(name for name, (section, _) in PLACES.items() if section != "finetune")


def place_options(
    options: Mapping[str, Any], names: Collection[str] = PLACES.keys()
) -> SettingsLayer:
    """Options of a training in the sections of its settings: `{"train": {"lr": 1e-3}}` for
    `{"lr": 1e-3}`. None: not given.

    Raises UserError (config, exit 2) for an option that is none of `names`.
    """
    out: SettingsLayer = {}
    for name, value in options.items():
        check_choice("option of a training", name, names)
        if value is not None:
            section, key = PLACES[name]
            out.setdefault(section, {})[key] = value
    return out


def parse_assignments(pairs: list[str]) -> SettingsLayer:
    """`["model.tokenizer=patch", "train.lr=1e-3"]` as a nested dict.

    Values are TOML, else plain text.
    """
    out: SettingsLayer = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        parts = key.strip().split(".")
        if not sign or len(parts) < 2 or not all(parts):
            raise usage_error(
                f"--set {safe_text(pair)}",
                "expected section.key=value",
                "For example --set model.tokenizer=patch",
            )
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except (tomllib.TOMLDecodeError, RecursionError):
            value = text.strip()
        section: Any = out
        for part in parts[:-1]:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise usage_error(
                    f"--set {safe_text(pair)}",
                    f"{part} has a value of its own",
                    "Leave one of the two out",
                )
        section[parts[-1]] = value
    return out


# torch would take 128 for -128 and 256 for 0
DEVICES = re.compile(r"auto|(cpu|mps)(:0)?|cuda(:(0|[1-9][0-9]{0,8}))?")


def check_device_name(name: str) -> None:
    """Refuse a name that no machine's device has. Raises UserError (config, exit 2)."""
    if not DEVICES.fullmatch(name):
        raise missing_device(name, "expected auto, cpu, cuda or mps")


def missing_device(name: str, requirement: str) -> UserError:
    """The error for a device that this machine does not have."""
    return usage_error(f"no device {name!r}", requirement, "Use --device auto", field="--device")


def validate(kind: type[S], values: SettingsLayer, file: str | None = None) -> S:
    """`kind(**values)`, with pydantic's findings as one UserError (config, exit 2).

    It names the nearest right one of an unknown key.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        items = sorted(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
        by_setting: dict[str, Finding] = {}
        for item in items:
            finding = _describe_config_error(kind, item, file)
            setting = _name_setting(kind, item["loc"])
            if first := by_setting.get(setting):
                other = finding.requirement.removeprefix("expected ")
                finding = replace(first, requirement=f"{first.requirement}, or {other}")
            by_setting[setting] = replace(finding, field=setting)
        raise join_findings(by_setting.values()) from error


SYNONYMS = {
    "learning_rate": "lr",
    "epoch": "epochs",
    "batchsize": "batch_size",
    "batch": "batch_size",
    "n_layers": "layers",
    "n_heads": "heads",
    "width": "dim",
}


def _list_keys(kind: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Every key of `kind` and of the sections in it: bare name -> dotted name.

    The first section that has it wins.
    """
    keys: dict[str, str] = {}
    for name, info in kind.model_fields.items():
        keys.setdefault(name, prefix + name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            keys = _list_keys(info.annotation, f"{prefix}{name}.") | keys
    return keys


def suggest_key(kind: type[BaseModel], key: str) -> str:
    """The dotted name of the key of `kind` that `key` was probably meant to be, or ""."""
    keys = _list_keys(kind)
    close = difflib.get_close_matches(key, [*keys, *SYNONYMS], n=1, cutoff=0.6)
    return keys.get(SYNONYMS.get(close[0], close[0]), "") if close else ""


def _list_sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _list_sections(part)


def _find_owner(kind: type[BaseModel], place: Sequence[str | int]) -> type[BaseModel]:
    """The section in which an error of pydantic is.

    `place` also holds positions in lists, which lead no further, and names of types in unions.
    """
    owner = kind
    for part in place:
        if part in owner.model_fields:
            sections = _list_sections(owner.model_fields[str(part)].annotation)
        else:
            sections = (
                section
                for info in owner.model_fields.values()
                for section in _list_sections(info.annotation)
                if section.__name__ == part
            )
        owner = next(sections, owner)
    return owner


def _name_setting(kind: type[BaseModel], place: Sequence[str | int]) -> str:
    """The dotted name of the setting that is wrong, without the kind of value that it failed to be:
    a number or "auto" has an error for each.
    """
    holder = str(place[-2]) if len(place) > 1 else ""
    field = _find_owner(kind, place[:-2]).model_fields.get(holder)
    annotation = field.annotation if field else None
    is_union = get_origin(annotation) in {Union, UnionType}
    names = place[:-1] if is_union and not any(_list_sections(annotation)) else place
    return ".".join(map(str, names))


def _describe_config_error(kind: type[Section], item: Any, file: str | None) -> Finding:
    where = ".".join(map(str, item["loc"]))
    if item["type"] != "extra_forbidden":
        return Finding(
            Reason.CONFIG,
            "missing" if item["type"] == "missing" else f"found {safe_text(item.get('input'))}",
            _rephrase_pydantic(str(item["msg"])),
            _suggest_choice(item) if item["type"] == "literal_error" else "",
            file=file,
            field=where,
        )
    owner, key = _find_owner(kind, item["loc"][:-1]), str(item["loc"][-1])
    near = suggest_key(owner, key) or suggest_key(kind, key)
    others = list_owners(owner, key)
    hints = (
        f"Did you mean {near}?" if near else "",
        f"A setting of {', '.join(others)}" if others else "",
    )
    return Finding(
        Reason.CONFIG,
        "unknown key",
        f"known here are {', '.join(owner.model_fields)}",
        " ".join(filter(None, hints)),
        file=file,
        field=where,
    )


def _suggest_choice(item: Any) -> str:
    """The choice of a Literal that is closest to what was found; "" where none is close."""
    choices = re.findall("'([^']+)'", item["ctx"]["expected"])
    close = difflib.get_close_matches(str(item["input"]), choices, n=1, cutoff=0.5)
    return f"Did you mean {close[0]}?" if close else ""


def list_owners(section: type[BaseModel], key: str) -> list[str]:
    """The models, or objectives, that have the setting `key`; none for other sections."""
    registry: Registry[Any] = Registry("")
    if issubclass(section, ModelConfig):
        registry = models
    elif issubclass(section, ObjectiveConfig):
        registry = objectives
    return [
        name
        for name, entry in registry.items()
        if entry.facts.config and key in entry.facts.config.model_fields
    ]


def _rephrase_pydantic(message: str) -> str:
    """A message of pydantic in the wording of the other errors."""
    for old, new in {
        "Value error, ": "",
        "Input should be ": "expected ",
        "Field required": "expected a value",
        "a valid integer, unable to parse string as an integer": "a whole number",
        "a valid number, unable to parse string as a number": "a number",
        "a valid boolean, unable to interpret input": "true or false",
        "tuple": "list",
    }.items():
        message = message.replace(old, new)
    return message


# --- models and objectives


def find_model_config(name: str) -> type[ModelConfig]:
    """The configuration class of a model or method. Raises UserError (unknown_name, exit 2)."""
    if name in methods:
        kind: type[ModelConfig] = methods[name].facts.config
        return kind
    return models[name].facts.config or ModelConfig


def find_objective_config(name: str) -> type[ObjectiveConfig]:
    """The configuration class of an objective. Raises UserError (unknown_name, exit 2)."""
    return objectives[name].facts.config or ObjectiveConfig


def _find_configs(values: SettingsLayer) -> tuple[type[ModelConfig], type[ObjectiveConfig]]:
    """The classes of the sections `model` and `objective`, selected by their names."""
    model, objective = (_read_name(values.get(key)) for key in SECTIONS)
    model = ModelConfig().name if model is None else model
    return (
        find_model_config(model),
        find_objective_config(objective or models[model].facts.objective),
    )


def _read_name(section: Any) -> str | None:
    """The name in a section, which is a dict or settings; None without one."""
    name = section.get("name") if isinstance(section, dict) else getattr(section, "name", None)
    return name if isinstance(name, str) else None


@cache
def _settings_class(model: type[ModelConfig], objective: type[ObjectiveConfig]) -> type[Settings]:
    return create_model(
        "Settings", __base__=Settings, model=(model, model()), objective=(objective, objective())
    )


def validate_settings(values: SettingsLayer, file: str | None = None) -> Settings:
    """`values` as settings; the names in them select the classes of `model` and `objective`.

    Raises UserError (config, exit 2): unknown keys, with the nearest known one, those of other
    models included; values out of range.
    """
    return validate(_settings_class(*_find_configs(values)), values, file)


class StoredModelConfig(ModelConfig):
    """The section `model` of a stored run.

    What the model has beyond `ModelConfig` is unchecked, so the model need not be installed.
    """

    model_config = ConfigDict(extra="allow")


class StoredObjectiveConfig(ObjectiveConfig):
    """The section `objective`, with unchecked keys of the objective."""

    model_config = ConfigDict(extra="allow")


class StoredSettings(Settings):
    """Settings as a run stores them."""

    model: StoredModelConfig = StoredModelConfig()
    objective: StoredObjectiveConfig = StoredObjectiveConfig()


def parse_stored_settings(values: Any) -> Any:
    """A dict as `StoredSettings`; other values unchanged. Raises pydantic.ValidationError."""
    return StoredSettings.model_validate(values) if isinstance(values, dict) else values


M = TypeVar("M", bound=ModelConfig)
PATCH, PATCHES = 8, 16  # samples of a patch; patches of a window of signals of no known kind
LONG_PATCH = 200  # samples from which `patch-cnn` reads a patch by residual blocks


def choose_tokens(config: M) -> M:
    """With the size of a patch, what is read of it and predicted, where they were not chosen."""
    if config.tokenizer != "patch-cnn":
        chosen = {"patch": config.patch or PATCH, "target": config.target or "raw"}
        return config.model_copy(update=chosen)
    patch = config.patch or max(PATCH, -(-config.length // PATCHES))
    is_short, features = patch < LONG_PATCH, config.patch_features
    chosen = {
        "patch": patch,
        "patch_features": is_short if features is None else features,
        "target": config.target or ("raw" if is_short else "spectrum"),
    }
    return config.model_copy(update=chosen)


# of tokenizers that cut no patches
TOKENS = {
    "steps": "a token for each sample",
    "codes": "a token for each code",
    "conv": "a token for every 4 samples, by convolutions",
}


def describe_tokens(config: ModelConfig, rate: float | None) -> str:
    """The tokens of a model in words; `rate` in Hz of signals."""
    if not config.cuts_patches:
        return TOKENS[config.tokenizer]
    seconds = f" ({config.patch / rate:.3g} s)" if rate else ""
    beside = ", log amplitudes beside them" if config.patch_features else ""
    return f"{config.tokenizer} tokens of {config.patch} samples{seconds}{beside}"


def find_dimensions(
    name: str, preset: str | None, chosen: SettingsLayer | None = None
) -> SettingsLayer:
    """The settings of a model in a preset: of its family, and of its tokenizer where the preset has
    a section of that; the user has `chosen` some.
    """
    facts, shipped = models[name].facts, load_preset(preset) if preset else {}
    # events on a grid of months are no signals
    is_grid = (chosen or {}).get("events") == "grid"
    section = {"tokenizer": facts.tokenizer} if facts.tokenizer and not is_grid else {}
    section |= shipped.get(facts.family, {})
    tokenizer = (chosen or {}).get("tokenizer", section.get("tokenizer", ""))
    return {**section, **shipped.get(tokenizer, {})}


def build_model_config(name: str, preset_name: str | None = None, **overrides: Any) -> ModelConfig:
    """The configuration of a model: defaults <- its family's section of the preset <- overrides."""
    kind = find_model_config(name)
    base = find_dimensions(name, preset_name, overrides)
    return choose_tokens(validate(kind, merge_layers(base, {"name": name}, overrides)))
