"""Settings of models, objectives and training: what can be set, the presets, and the order in which they win.

Field defaults <- preset <- recipe file (`--config`) <- command line (`--set section.key=value` and the flags).
"""

from __future__ import annotations

import difflib
import math
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from bitimely_core.errors import Finding, Reason, safe_text, usage_error
from bitimely_core.registry import RECIPES, unknown


class Section(BaseModel):
    """A frozen section of settings: unknown keys, NaN and infinities are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=False)


class Decay(Section):
    """The decay of the retention heads (method.md 1.4). `from`, `to`: gamma = 1 - 1/x, log-spaced over the heads."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)
    kind: Literal["log", "retnet", "half-life", "learnable"] = "log"
    start: float = Field(32.0, alias="from", gt=1)
    end: float = Field(512.0, alias="to", gt=1)
    months: tuple[float, ...] = (6.0, 24.0, 96.0, 384.0)  # half-lives, used by kind half-life


class ModelConfig(Section):
    """Every dimension and switch of the models that share the stack. Widths follow the paper's table of configurations."""

    name: str = "bitimelygpt"
    channels: int = Field(1, ge=1)  # V; for codes ignored
    others: tuple[int, ...] = ()  # V of the further data sets of a mixed pre-training: each has an adapter of its own
    channel_independent: bool = False  # every channel is a sequence of its own with V = 1; vectors are averaged over the channels
    length: int = Field(3000, ge=1)  # T of the windows: sizes learned positions
    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    dim: int = Field(64, ge=2)  # model width = key width
    value_dim: int = Field(128, ge=2)
    ffn_dim: int = Field(128, ge=1)
    tokenizer: Literal["conv", "patch", "steps", "codes"] = "conv"  # steps: every timestep a token, for models that read those
    patch: int = Field(8, ge=1)
    stride: int | None = Field(None, ge=1)  # patches; None = patch (not overlapping)
    crop: Literal["pad", "start"] = "pad"  # T not a multiple of the patch: repeat the last sample, or crop at the start
    codes: int | None = None  # size of the input vocabulary, for tokenizer codes
    target: Literal["raw", "tokens"] = "raw"
    ffn: Literal["glu", "plain"] = "glu"
    ffn_act: Literal["gelu", "silu"] = "gelu"
    temporal_conv: Literal["off", "causal"] = "off"
    temporal_norm: Literal["batch", "layer"] = "batch"
    retention_norm: Literal["group", "rms"] = "group"
    decay: Decay = Decay()
    xpos_scale: bool = False
    rotary: Literal["index", "time"] = "index"
    clock: Literal["time", "index"] = "time"  # of events: decay by months, or by positions alone (the control for what times bring)
    ties: Literal["canonical", "shuffle", "group"] = "canonical"
    form: Literal["auto", "parallel", "chunkwise", "recurrent"] = "auto"
    chunk: int = Field(64, ge=1)
    core_precision: Literal["fp32", "bf16"] = "fp32"  # set by train.core_precision
    events: Literal["code-embed", "grid"] = "code-embed"  # grid: events as months in a row, a channel a code, for models of signals
    horizon: int = Field(240, ge=2)  # months of events: length of the grid; what mtand, gru-d, seft and raindrop take for a time of 1
    output_heads: Literal["shared", "separate"] = "shared"
    dropout: float = Field(0.0, ge=0, lt=1)
    revin: bool = True  # patchtst: each channel of each window standardised by its own mean and variance
    positions: Literal["learned", "sinusoid"] = "learned"  # patchtst, tst: of signals; sinusoid has no longest window
    decoder_layers: int | None = Field(None, ge=1)  # crt: of all layers, how many decode; None = half of them
    connections: Literal["plain", "residual", "norm", "residual-norm"] = "plain"  # lstm and its kin: around each layer from the second on
    direction_width: Literal["full", "half"] = "full"  # bilstm: dim, or half of it, in each direction
    elmo_mix: Literal["last", "all"] = "last"  # elmo: its own vector from the last layer, or from a learned mix of all layers
    moving_average: tuple[Annotated[int, Field(ge=1)], ...] = ()  # autoformer, fedformer: windows of the trend; several are mixed; () = own
    lag_factor: float = Field(1.0, gt=0)  # autoformer: floor(factor * ln N) lags are used
    per_sample: bool = True  # autoformer (lags), timesnet (periods): each window has its own; false: common ones, as in the references
    modes: int = Field(64, ge=1)  # fedformer: frequencies that are read, at most N / 2
    mode_select: Literal["random", "lowest"] = "random"  # fedformer: which ones
    reference_layout: bool = False  # fedformer: the reference's frequencies and memory layout, both mistaken, to compare with its results
    top_periods: int = Field(3, ge=1)  # timesnet: periods by which a window is folded
    kernels: int = Field(6, ge=1)  # timesnet: convolutions of 1, 3, 5 ... side by side
    first_kernel: int = Field(8, ge=1)  # ts-tcc, tf-c: samples that the first convolution reads at once
    first_stride: int = Field(1, ge=1)  # ts-tcc, tf-c: and how far it moves on
    ahead: int | None = Field(None, ge=1)  # ts-tcc: steps of the map that are predicted; None = two fifths of the map

    reference: int = Field(128, ge=2)  # mtand: reference points
    latent: int = Field(20, ge=1)  # mtand: width of the latent at each of them
    cell: Literal["paper", "concat"] = "paper"  # gru-d: concat also reads the state among the inputs, in torch's cell
    graph_distance: float = Field(0.0, ge=0)  # raindrop: weight of the distance between two samples' graphs in the loss; the paper has 0.02
    message: Literal["paper", "self"] = "paper"  # raindrop: self = as its authors' code, no channel hears of another


class ObjectiveConfig(Section):
    """The objective and its numbers. An empty name means the model's own."""

    name: str = ""
    ratio: float = Field(0.4, gt=0, lt=1)  # share of hidden tokens, masked and gap
    span: int = Field(5, ge=1)  # longest hidden span, gap
    direction_sampling: bool = False  # strict: one direction a batch instead of two passes
    concurrent: bool = False  # masked-runs: all channels together
    bernoulli: bool = False  # masked-runs: each value by itself, no runs
    dropped: float = Field(0.7, gt=0, lt=1)  # drop: largest share of dropped patches, reached over the training
    temporal_unit: int = Field(0, ge=0)  # ts2vec: times are told apart from scale 2^n on; larger ones spare time and memory
    jitter: float = Field(0.8, ge=0)  # ts-tcc, tf-c: standard deviation of added noise
    scaling: float = Field(1.1, ge=0)  # ts-tcc, tf-c: standard deviation of the factor of each timestep, around 2
    segments: int = Field(8, ge=2)  # ts-tcc, tf-c: a window is cut into fewer than so many pieces, in a new order
    bank: bool = False  # tf-c: one of jitter, scaling, permutation and masking a window, not always jitter

    samples: int = Field(1, ge=1)  # vae: latents drawn for each row


class TrainConfig(Section):
    """One training run. The paper gives epochs; the optimiser is method.md 6 (the paper is silent)."""

    epochs: int = Field(20, ge=0)
    steps: int | None = Field(None, ge=0)  # stop after so many optimizer steps, whatever the epochs
    batch_size: int = Field(64, ge=1)  # global
    accumulate: int = Field(1, ge=1)
    lr: float = Field(3e-4, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    warmup: float = Field(0.05, ge=0, lt=1)  # share of all steps
    clip: float = Field(1.0, gt=0)
    precision: Literal["fp32", "bf16"] = "fp32"
    core_precision: Literal["fp32", "bf16"] = "fp32"  # of the retention core under precision bf16
    device: str = "auto"
    devices: int = Field(1, ge=1)
    compile: bool = False
    seed: int = Field(0, ge=0)
    log_every: int = Field(10, ge=1)  # steps
    checkpoint_every: int | None = Field(None, ge=1)  # steps; None = every epoch
    keep: int = Field(2, ge=2)  # checkpoints

    def count_steps(self, per_epoch: int) -> int:
        """Optimizer steps of the training, with `per_epoch` of them in an epoch."""
        return self.epochs * per_epoch if self.steps is None else self.steps


def parse_frequencies(value: Any) -> Any:
    """`"0.5,40"` or `",40"` as a tuple of numbers, None for an empty place; what is no text stays as it is. Raises ValueError."""
    if not isinstance(value, str):
        return value
    try:
        return tuple(float(part) if part.strip() else None for part in value.split(","))
    except ValueError:
        raise ValueError("expected numbers of Hz, separated by commas") from None


class DataConfig(Section):
    """Which tokens, and how they are made when they are missing."""

    names: tuple[str, ...] = ()
    fraction: float = Field(1.0, gt=0, le=1)  # of the training subjects
    limit: int | None = Field(None, ge=1)  # windows of each split that a training sees, drawn by its seed
    window: int | None = Field(None, ge=1)
    stride: int | None = Field(None, ge=1)
    rate: float | None = Field(None, gt=0)
    channels: tuple[str, ...] | None = None
    normalise: Literal["channel", "window", "none"] = "channel"
    split: Literal["subject", "official", "time", "random-window"] | None = None
    seed: int = Field(0, ge=0)  # of the split
    test_fold: int | None = Field(None, ge=1, le=10)  # tested in the place of the tenth; the one before it validates
    bandpass: Annotated[tuple[float | None, float | None] | None, BeforeValidator(parse_frequencies)] = None  # Hz, also as text "LOW,HIGH"
    notch: Annotated[tuple[float, ...] | None, BeforeValidator(parse_frequencies)] = None  # Hz, also as text "FREQ,FREQ"


class FinetuneConfig(Section):
    """What a supervised head reads. None = the model's own readout."""

    readout: Literal["sos", "eos", "sos+eos", "mean", "last", "max", "flatten", "native"] | None = None
    layers: Literal["last", "last-two"] = "last"
    layer_merge: Literal["concat", "mean"] = "concat"
    freeze: bool = False
    from_scratch: bool = False


def parse_learning_rates(value: Any) -> Any:
    """How many rates to try (2 to 9), or which: numbers, or text as `--tune` takes it (`"4"`, `"1e-4,1e-3"`). Raises ValueError."""
    try:
        found = [
            float(part) for part in (value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else value or ())
        ]
    except (TypeError, ValueError):
        found = [math.nan]
    if value is None or (len(found) == 1 and found[0] in range(2, 10)):
        return None if value is None else int(found[0])
    if len(set(found)) == len(found) > 1 and all(0 < rate < math.inf for rate in found):
        return tuple(found)
    raise ValueError("expected how many learning rates to try, 2 to 9, or two or more different ones above 0, separated by commas")


Rates = Annotated[int | tuple[float, ...] | None, BeforeValidator(parse_learning_rates)]


class TuneConfig(Section):
    """How the learning rate is chosen, on the validation split alone (`runs.tuning`)."""

    rates: Rates = None  # how many around train.lr, half a decade apart, or which; None: train.lr is taken as it is
    steps: int | None = Field(None, ge=1)  # of each trial; None = a tenth of the training, at least 50


class Settings(Section):
    """All sections of one run, resolved. Stored in `run.json`."""

    model: ModelConfig = ModelConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    finetune: FinetuneConfig = FinetuneConfig()
    tune: TuneConfig = TuneConfig()


S = TypeVar("S", bound=Section)
FAMILY_KEYS = ("layers", "heads", "dim", "value_dim", "ffn_dim", "dropout", "decay", "tokenizer")


def list_presets() -> dict[str, Path]:
    """Names of the shipped presets and their files."""
    return {p.stem: p for p in sorted((RECIPES / "presets").glob("*.toml"))}


def load_preset(name: str) -> dict[str, Any]:
    """The preset as written: description, paper_parameters, data, [retention], [attention], [recurrent], [train], [finetune].

    Raises UserError (unknown_name, exit 2).
    """
    files = list_presets()
    if name not in files:
        raise unknown("preset", name, list(files))
    return read_toml(files[name])


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file. Raises UserError (config, exit 2) that names file and line; other formats are refused."""
    if path.suffix.lower() != ".toml":
        raise usage_error(f"found {safe_text(path.suffix)}", "expected a .toml file", "Write the settings as TOML", file=str(path))
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise usage_error(
            error.strerror or str(error), hint="Give the path of a TOML file", code=Reason.NOT_FOUND, file=str(path)
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise usage_error(f"not valid TOML: {error}", file=str(path)) from error


def merge_layers(*layers: dict[str, Any]) -> dict[str, Any]:
    """Nested dicts, later ones win key by key."""
    out: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            out[key] = merge_layers(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def parse_assignments(pairs: list[str]) -> dict[str, Any]:
    """`["model.tokenizer=patch", "train.lr=1e-3"]` as a nested dict; values are TOML, else plain text."""
    out: dict[str, Any] = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        parts = key.strip().split(".")
        if not sign or len(parts) < 2 or not all(parts):
            raise usage_error(f"--set {safe_text(pair)}", "expected section.key=value", "For example --set model.tokenizer=patch")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        here = out
        for part in parts[:-1]:
            here = here.setdefault(part, {})
        here[parts[-1]] = value
    return out


def validate(kind: type[S], values: dict[str, Any], file: str | None = None) -> S:
    """`kind(**values)`, with pydantic's findings as one UserError (config, exit 2), unknown keys with the nearest right one."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        findings = [
            _describe_config_error(kind, item, file) for item in sorted(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
        ]
        first = findings[0]
        raise usage_error(first.problem, first.requirement, first.hint, file=file, field=first.field, details=findings[1:]) from error


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
    """Every key of `kind` and of the sections in it: bare name -> dotted name (the first section that has it wins)."""
    out: dict[str, str] = {}
    for name, info in kind.model_fields.items():
        out.setdefault(name, prefix + name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            for inner, dotted in _list_keys(info.annotation, f"{prefix}{name}.").items():
                out.setdefault(inner, dotted)
    return out


def suggest_key(kind: type[BaseModel], key: str) -> str:
    """The dotted name of the key of `kind` that `key` was probably meant to be, or an empty text."""
    known = _list_keys(kind)
    close = difflib.get_close_matches(key, [*known, *SYNONYMS], n=1, cutoff=0.6)
    return known.get(SYNONYMS.get(close[0], close[0]), "") if close else ""


def _find_section(annotation: Any, name: str = "") -> type[BaseModel] | None:
    """The first section inside an annotation, or inside those of a section's fields; with `name` the one that is called so."""
    if isinstance(annotation, dict):
        return next((found for info in annotation.values() if (found := _find_section(info.annotation, name))), None)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation if name in {"", annotation.__name__} else None
    return next((found for part in get_args(annotation) if (found := _find_section(part, name))), None)


def _describe_config_error(kind: type[Section], item: Any, file: str | None) -> Finding:
    where = ".".join(str(part) for part in item["loc"])
    if item["type"] != "extra_forbidden":
        text = "missing" if item["type"] == "missing" else f"found {safe_text(item.get('input'))}"
        return Finding(code=Reason.CONFIG, file=file, field=where, problem=text, requirement=_rephrase_pydantic(str(item["msg"])))
    owner: type[BaseModel] = kind
    for part in item["loc"][:-1]:  # of lists and unions also positions and names of types, which lead no further
        if part in owner.model_fields:
            owner = _find_section(owner.model_fields[part].annotation) or owner
        elif isinstance(part, str) and (named := _find_section(owner.model_fields, part)):
            owner = named
    right = suggest_key(owner, str(item["loc"][-1])) or suggest_key(kind, str(item["loc"][-1]))
    return Finding(
        code=Reason.CONFIG,
        file=file,
        field=where,
        problem="unknown key",
        requirement=f"known here are {', '.join(owner.model_fields)}",
        hint=f"Did you mean {right}?" if right else "",
    )


def _rephrase_pydantic(message: str) -> str:
    """What pydantic says, in the words of every other error."""
    for theirs, ours in {
        "Value error, ": "",
        "Input should be ": "expected ",
        "Field required": "expected a value",
        "tuple": "list",
    }.items():
        message = message.replace(theirs, ours)
    return message


def build_model_config(name: str, family: str, preset_name: str | None, **overrides: Any) -> ModelConfig:
    """The configuration of model `name`: defaults <- the preset's section of its family <- overrides."""
    base = load_preset(preset_name).get(family, {}) if preset_name else {}
    return validate(ModelConfig, merge_layers(base, {"name": name}, overrides))
