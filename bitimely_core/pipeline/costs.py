"""Rough estimates before an experiment runs: parameters, floating-point operations, hours and
disk.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from bitimely_core import registry
from bitimely_core.catalog import COSTS
from bitimely_core.config import (
    ModelConfig,
    SettingsLayer,
    build_model_config,
    load_preset,
    merge_layers,
    parse_assignments,
    parse_learning_rates,
    read_toml,
)
from bitimely_core.errors import UserError, unknown_name_error
from bitimely_core.pipeline.cells import DEFAULT_MODEL, ExperimentPlan, TrainingStage
from bitimely_core.progress import report_progress
from bitimely_core.store import manifests, storage
from bitimely_core.store.workspace import find_data_kind, locate, name_tokens, parse_view
from bitimely_core.system_errors import raise_system_error
from bitimely_core.train.tuning import TRIAL_SHARE
from bitimely_core.workflows.jobs import Flags

# share of the speed of a large matrix product that a training step reaches (assumed)
UTILIZATION = 0.3
TRAIN_SHARE = 0.8  # of all windows, where nothing has been tokenized yet
STATES = 3  # a checkpoint holds the weights and the two moments of AdamW
QUADRATIC = {"attention"}  # families whose maps grow with the square of the length
OVERHEAD = 2.0  # seconds of a training or an evaluation beside its windows: opening, files, page
# operations of a window of signals up to which a step is timed: models of the preset tiny
EXACT = 1e10
TRIAL = 1.5  # seconds of a window, by the measured costs of its model, up to which a step is timed
HELD_SHARE = 1 / 3  # of a training step: a forward pass


class Accelerator(NamedTuple):
    """A device that need not be here: what a training in float32 sustains. Computed from counts of
    launches and bytes, not measured.
    """

    flops: float  # operations a second
    launch: float  # seconds a layer and step that the launches of its kernels take at least


ACCELERATORS = {"h100": Accelerator(25e12, 1.35e-3), "h200": Accelerator(33e12, 1.35e-3)}


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """Estimates of one training; None where the size of its data is unknown."""

    parameters: int | None = None
    windows: int | None = None  # seen in all
    flops: float | None = None
    bytes: int | None = None  # on the disk
    slowness: float = 1.0  # measured time for an operation relative to GPT
    seen: float = 0.0  # windows of steps, trials and validation, a forward pass as a part of one
    timed: float | None = None  # seconds a window, timed here
    steps: float = 0.0
    layers: int = 1

    def seconds(self, speed: float, on: Accelerator | None = None) -> float | None:
        """Time on an accelerator, else as timed here, else at `speed` operations a second."""
        if self.flops is None:
            return None
        if on is not None:
            return (
                max(self.flops * self.slowness / on.flops, self.steps * self.layers * on.launch)
                + OVERHEAD
            )
        if self.timed is not None:
            return OVERHEAD + self.seen * self.timed
        return OVERHEAD + self.flops * self.slowness / (UTILIZATION * speed)

    def list_cells(self, speed: float, on: Accelerator | None) -> dict[str, object]:
        """The estimates as cells of a row of the plan."""
        cells = {key: getattr(self, key) for key in ("parameters", "windows", "flops", "bytes")}
        return {**cells, "slow": self.slowness, "seconds": self.seconds(speed, on)}


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """Training windows and shape of tokens."""

    windows: float | None
    held: float = 0.0  # validation windows
    channels: int
    length: int
    codes: int | None = None
    events: float | None = None  # mean length of histories: most are far shorter than the longest
    observed: float = 1.0  # share of a window's samples


def list_stages(plan: ExperimentPlan, selected: set[str]) -> registry.Choices:
    """The plan as rows, and their number."""
    labels = [label for label in plan.nodes if label in selected]
    trainings = sum(label in plan.trainings for label in labels)
    return {
        "exit_code": 0,
        "stages": list(map(_plan_row, labels)),
        "report": None,
        "total": {"stages": len(labels), "trainings": trainings},
    }


def _plan_row(label: str) -> registry.Choices:
    return {"stage": label, "state": "planned", "detail": "", "exit_code": 0}


def estimate_costs(
    plan: ExperimentPlan, selected: set[str], workspace: Path, *, on: str | None = None
) -> dict[str, Any]:
    """The plan as rows, with the estimates of every training and their sum; `assumptions` says what
    they rest on.

    `on` is a key of `ACCELERATORS`. Raises UserError (unknown_name, exit 2).
    """
    device = _find_accelerator(on)
    speed = measure_speed() if plan.trainings and device is None else 0.0
    labels = [label for label in plan.nodes if label in selected]
    costs = _estimate_trainings(plan, labels, workspace, device is None)
    rows: list[dict[str, Any]] = []
    for label in labels:
        cells = costs[label].list_cells(speed, device) if label in costs else {}
        rows.append({**_plan_row(label), **cells})
    assumptions = "nothing is trained; ingest, tokens and pages are not counted"
    return {
        "exit_code": 0,
        "stages": rows,
        "report": None,
        "total": _sum_costs(rows, list(costs.values())),
        "assumptions": _describe_assumptions(on, device, speed) if costs else assumptions,
    }


def _find_accelerator(on: str | None) -> Accelerator | None:
    """The accelerator of a name; None: the present device. Raises UserError (unknown_name)."""
    if on is None:
        return None
    if on.lower() not in ACCELERATORS:
        raise unknown_name_error("accelerator", on, list(ACCELERATORS))
    return ACCELERATORS[on.lower()]


def _sum_costs(rows: Sequence[registry.Choices], costs: Sequence[TrainingCost]) -> dict[str, float]:
    """The sums of a plan; `unknown`: trainings whose data are not here."""
    sums = {key: sum(row.get(key) or 0 for row in rows) for key in ("flops", "seconds", "bytes")}
    unknown = sum(cost.flops is None for cost in costs)
    return {**sums, "stages": len(rows), "trainings": len(costs), "unknown": unknown}


def _estimate_trainings(
    plan: ExperimentPlan, labels: list[str], workspace: Path, timed: bool
) -> dict[str, TrainingCost]:
    """Label of each training among `labels` -> its cost."""
    trainings = [label for label in labels if label in plan.trainings]
    costs: dict[str, TrainingCost] = {}
    for done, label in enumerate(trainings, 1):
        costs[label] = estimate_training(plan, label, workspace, timed=timed)
        report_progress("estimates", done, len(trainings))
    return costs


def _describe_assumptions(on: str | None, device: Accelerator | None, speed: float) -> str:
    """What the estimates of trainings rest on."""
    if device:
        timed = (
            f"{on}: {device.flops / 1e12:.0f} TFLOP/s in float32 and {device.launch * 1e3:.2f} ms "
            "a layer and step, computed, not measured"
        )
    else:
        timed = (
            f"steps of this device, timed now; where that takes long, {UTILIZATION:.0%} of its "
            f"speed in a matrix product ({speed / 1e9:,.0f} GFLOP/s)"
        )
    return (
        f"6 operations per parameter, token and pass; {timed}; one training at a time; evaluations "
        "and analyses are not counted; sizes of missing data as the paper gives them"
    )


def estimate_training(
    plan: ExperimentPlan, label: str, workspace: Path, *, timed: bool = False
) -> TrainingCost:
    """The cost of one training; `timed`: with steps that are run now, on windows of the shape of
    its own data.
    """
    training, first = plan.trainings[label], plan.pretraining_of(label)
    pairs = parse_assignments(list(training.assignments))
    flags = merge_layers(training.flags, pairs)
    model = {**first.flags.get("model", {}), **pairs.get("model", {})}
    entry = registry.models[model.get("name", DEFAULT_MODEL)]
    preset = first.preset or "tiny"
    shape = _find_longest(_measure_tokens(first, plan, workspace))
    try:
        config, parameters = _count_parameters(
            storage.encode_json({**model, "name": entry.name}).decode(),
            preset,
            first.budget or "table",
            shape.channels,
            shape.length,
            shape.codes,
        )
    except UserError as error:
        raise_system_error(error)
        return TrainingCost()
    train, objective = _choose_training(training, preset, flags, entry.facts.objective)
    data, sizes = flags.get("data", {}), _measure_tokens(training, plan, workspace)
    windows, batch = _count_windows(train, data, sizes), train.get("batch_size", 64)
    if windows is None:
        return TrainingCost(parameters=parameters)
    tokens = _count_tokens(config, sizes)
    flops = _count_operations(entry.facts.family, config, parameters, tokens)
    flops *= registry.objectives[objective].facts.passes
    trainings = 1 + _count_trials(flags.get("tune", {}).get("rates"))
    updates = windows * trainings / batch
    between_checkpoints = train.get("checkpoint_every") or _count_available(sizes, data) / batch
    held = sum(size.held for size in sizes) * updates / max(between_checkpoints, 1.0)
    trial = _predict_trial(entry.name, config, parameters, tokens)
    seconds = None
    if timed and windows > 0 and flops < EXACT and trial < TRIAL:
        seconds = _time_window(_fit_shape(config, sizes), objective, batch, sizes[0].observed)
    return TrainingCost(
        parameters=parameters,
        windows=int(windows),
        flops=flops * windows * trainings,
        bytes=4 * parameters * (1 + 2 * STATES),
        slowness=_measured_slowness(entry.name),
        seen=windows * trainings + held * HELD_SHARE,
        timed=seconds,
        steps=updates,
        layers=config.layers,
    )


def _choose_training(
    training: TrainingStage, preset: str, flags: Flags, usual: str
) -> tuple[SettingsLayer, str]:
    """The training settings of the preset under those of the recipe, and the objective; `usual`:
    that of the model, which pre-training has by default.
    """
    sections, trained = load_preset(preset), flags.get("train", {})
    if training.verb != "pretrain":
        return sections.get("finetune", {}) | trained, "none"
    objective = flags.get("objective", {}).get("name", usual)
    if objective == "none":
        trained = trained | {"steps": 0}
    return sections.get("train", {}) | trained, objective


def _count_operations(family: str, config: ModelConfig, parameters: int, tokens: float) -> float:
    """Floating-point operations of a training step for one window."""
    operations = 6.0 * parameters * tokens
    if family in QUADRATIC:
        operations += 12.0 * config.layers * tokens**2 * config.dim
    return operations


def _count_windows(train: Flags, data: Flags, sizes: list[DataSize]) -> float | None:
    """Windows of all steps or epochs; None where the size of the data is unknown."""
    if train.get("steps") is not None:
        return float(train["steps"] * train.get("batch_size", 64))
    if any(size.windows is None for size in sizes):
        return None
    available = _count_available(sizes, data)
    return float(min(available, data.get("limit") or available) * train.get("epochs", 20))


def _count_available(sizes: list[DataSize], data: Flags) -> float:
    """Training windows in the fraction of the data that is used."""
    return float(sum(size.windows or 0.0 for size in sizes) * data.get("fraction", 1.0))


def _measure_tokens(
    training: TrainingStage, plan: ExperimentPlan, workspace: Path
) -> list[DataSize]:
    """The sizes of the tokens that a training reads."""
    names = dict.fromkeys(training.flags["data"]["names"])
    return [_measure_data(name, plan, workspace) for name in names]


def _find_longest(sizes: list[DataSize]) -> DataSize:
    return max(sizes, key=lambda size: size.length)


def _fit_shape(config: ModelConfig, sizes: list[DataSize]) -> ModelConfig:
    """The model for windows of signals of the longest data; of claims it stays as it is."""
    size = _find_longest(sizes)
    shape = {"channels": size.channels, "length": size.length}
    return config if size.codes else config.model_copy(update=shape)


def _count_tokens(config: ModelConfig, sizes: list[DataSize]) -> float:
    """Tokens of a window: the mean length of histories, or samples by those that a token takes."""
    samples = {"conv": 4}.get(config.tokenizer, 1)
    if config.cuts_patches:
        samples = config.patch
    return max(size.events or size.length / samples for size in sizes)


def _count_trials(rates: Any) -> float:
    """Trainings that the trials of learning rates amount to; `rates` is text where --set gives
    them.
    """
    rates = parse_learning_rates(rates)
    count = rates if isinstance(rates, int) else len(rates or ())
    return count / TRIAL_SHARE


@cache
def _time_window(config: ModelConfig, objective: str, batch: int, observed: float) -> float | None:
    """Seconds of a training step for one window of signals, of which a share is observed, timed
    here; None where the model cannot be tried without its data.
    """
    import torch

    from bitimely_core import models, objectives
    from bitimely_core.train.step_cost import estimate
    from bitimely_core.types import Batch

    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            loss = None if objective == "none" else objectives.get(objective)
            values = torch.randn(batch, config.length, config.channels)
            mask = None if observed == 1 else torch.rand(values.shape) < observed
            times = None if mask is None else torch.arange(float(config.length)).expand(batch, -1)
            cost = estimate(
                models.from_config(config), Batch(values, times, mask), 1, objective=loss
            )
    except (UserError, RuntimeError) as error:
        raise_system_error(error)
        return None
    return cost["seconds_per_step"] / batch


def _measure_data(name: str, plan: ExperimentPlan, workspace: Path) -> DataSize:
    """The size of tokens: their own where they exist, else from the cache, the view and the
    paper.
    """
    made = locate(workspace, "tokens", name_tokens(name)) / "manifest.json"
    node = plan.nodes.get(f"tokenize {name}")
    dataset, view = parse_view(str(node.settings["data"]) if node else name)
    if made.is_file():
        windows = _open_tokens(made.parent)
        return DataSize(
            windows=len(windows["train"]),
            held=len(windows["validation"]),
            channels=windows.channels,
            length=windows.length,
            codes=getattr(windows, "codes", None),
            observed=registry.datasets[dataset].facts.views[view].observed
            if dataset in registry.datasets and not windows.vocabulary
            else 1.0,
            events=float(windows.lengths().mean()) if windows.vocabulary else None,
        )
    options = node.settings if node else {}
    size = _estimate_size(
        dataset, view, workspace / "cache" / dataset, options.get("window"), options.get("rate")
    )
    return replace(size, windows=size.windows * TRAIN_SHARE if size.windows else None)


@cache
def _estimate_size(
    dataset: str, view: str, folder: Path, window: int | None, rate: float | None
) -> DataSize:
    """All windows of a view, from its cache where there is one."""
    from bitimely_core.cache import open_cache

    made = open_cache(folder, verify=False) if (folder / manifests.MANIFEST).is_file() else None
    return DataSize(
        **find_data_kind(dataset).estimate_size(
            registry.datasets[dataset].facts, view, made, window, rate
        )
    )


@cache
def _open_tokens(folder: Path) -> Any:
    from bitimely_core import tokens

    return tokens.open_tokens(folder, verify=False)


@cache
def _count_parameters(
    model: str, preset: str, budget: str, channels: int, length: int, codes: int | None
) -> tuple[ModelConfig, int]:
    import json

    from bitimely_core import models
    from bitimely_core.models.adapters import grid_shape

    settings = json.loads(model)
    name = settings.pop("name")
    facts = registry.models[name].facts
    family = load_preset(preset).get(facts.family, {})
    shape: dict[str, Any] = {"channels": channels, "length": length}
    events = settings.get("events"), family.get("events")
    if codes and ("grid" in events or "events" not in facts.input):
        horizon = settings.get("horizon", ModelConfig().horizon)
        shape = {**grid_shape(codes, horizon), "events": "grid"}
    elif codes:
        shape |= {"codes": codes, "tokenizer": "codes"}
    config = build_model_config(name, preset, **merge_layers(shape, settings))
    if budget == "matched":
        chosen = {"codes": codes, "events": config.events, "tokenizer": config.tokenizer}
        widths = models.match_parameters(name, preset, channels=channels, length=length, **chosen)
        config = build_model_config(name, preset, **merge_layers(shape, settings, widths))
    return config, models.count_configured(config)


def _predict_trial(model: str, config: ModelConfig, parameters: int, tokens: float) -> float:
    """Seconds of a window of signals from `models/costs.toml` (of a model that is not in it: from
    the slowest), were they to grow with its square.
    """
    if config.tokenizer == "codes":
        return math.inf
    # models of the measurement took 4 samples a token
    samples = 4 * tokens if config.cuts_patches else config.length
    measured = _read_costs()
    costs, share = measured.get("models", {}), (samples / 1000) ** 2
    if model not in costs:
        slowest = max((row["train"] for row in costs.values()), default=0.0)
        return float(slowest / 1000 * share * parameters / 10_000)
    growth = max(1.0, config.channels / 7) * max(1.0, parameters / _count_measured(model))
    return float(costs[model]["train"] / 1000 * share * growth)


@cache
def _read_costs() -> Mapping[str, Any]:
    return read_toml(COSTS) if COSTS.is_file() else {}


def _count_measured(model: str) -> int:
    """Parameters of a model in the measurement of `models/costs.toml`."""
    preset = _read_costs()["preset"]
    return _count_parameters(f'{{"name": "{model}"}}', preset, "table", 7, 1000, None)[1]


@cache
def _measured_slowness(model: str) -> float:
    """Measured time of `model` for an operation beside GPT's, at the preset of the measurement
    (`models/costs.toml`); 1 where it was not measured.
    """
    costs = _read_costs().get("models", {})
    if model not in costs or "gpt" not in costs:
        return 1.0
    relative = costs[model]["train"] / costs["gpt"]["train"]
    return float(max(1.0, relative * _count_measured("gpt") / _count_measured(model)))


@cache
def measure_speed() -> float:
    """Operations a second of a matrix product in float32 on the device that a training would take;
    of a CPU with nothing else to do.
    """
    import torch

    from bitimely_core.train.devices import select_device

    size, seconds = 1024, 0.2  # rows and columns of the matrices; how long to measure
    where = select_device("auto")
    clock = time.thread_time if where.type == "cpu" else time.perf_counter
    a = torch.ones(size, size, device=where)
    (a @ a)[0, 0].item()  # the first product warms up; item waits for the device
    products, started = 0, clock()
    while clock() - started < seconds:
        assert (a @ a)[0, 0].item() == size
        products += 1
    return products * 2.0 * size**3 / (clock() - started)
