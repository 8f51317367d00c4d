"""Rough estimates before an experiment runs: parameters, floating-point operations, hours on the
present device, disk.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from bitimely_core import manifests, registry, storage
from bitimely_core.catalog import COSTS
from bitimely_core.config import (
    ModelConfig,
    build_model_config,
    load_preset,
    merge_layers,
    parse_assignments,
    parse_learning_rates,
    read_toml,
)
from bitimely_core.errors import UserError, unknown_name_error
from bitimely_core.pipeline.plan import ExperimentPlan
from bitimely_core.system_errors import raise_system_error
from bitimely_core.train.tuning import TRIAL_SHARE
from bitimely_core.types import Progress
from bitimely_core.workspace import find_data_kind, locate, name_tokens, parse_view

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
    each: float | None = None  # seconds a window, timed here
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
        return OVERHEAD + (
            self.seen * self.each
            if self.each is not None
            else self.flops * self.slowness / (UTILIZATION * speed)
        )


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


def estimate_costs(
    plan: ExperimentPlan,
    selected: set[str],
    workspace: Path,
    *,
    on: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The plan as rows, with the estimates of every training and their sum; `assumptions` says what
    they rest on.
    """
    device = None if on is None else ACCELERATORS.get(on.lower())
    if on is not None and device is None:
        raise unknown_name_error("accelerator", on, list(ACCELERATORS))
    speed = measure_speed() if plan.trainings and device is None else 0.0
    labels = [label for label in plan.nodes if label in selected]
    costs, trainings = {}, [label for label in labels if label in plan.trainings]
    for done, label in enumerate(trainings, 1):
        costs[label] = estimate_training(plan, label, workspace, timed=device is None)
        if progress is not None:
            progress("estimates", done, len(trainings))
    rows = []
    for label in labels:
        row: dict[str, object] = {"stage": label, "state": "planned", "detail": "", "exit_code": 0}
        if label in costs:
            cost = costs[label]
            row |= {key: getattr(cost, key) for key in ("parameters", "windows", "flops", "bytes")}
            row |= {"slow": cost.slowness, "seconds": cost.seconds(speed, device)}
        rows.append(row)
    known = [cost for cost in costs.values() if cost.flops is not None]
    timed = (
        f"{on}: {device.flops / 1e12:.0f} TFLOP/s in float32 and {device.launch * 1e3:.2f} ms a layer and step, computed, not measured"
        if device
        else f"steps of this device, timed now; where that takes long, {UTILIZATION:.0%} of its speed in a matrix product ({speed / 1e9:,.0f} GFLOP/s)"
    )
    return {
        "stages": rows,
        "report": None,
        "total": {
            "flops": sum(cost.flops or 0.0 for cost in known),
            "seconds": sum(cost.seconds(speed, device) or 0.0 for cost in known),
            "bytes": sum(cost.bytes or 0 for cost in known),
            "stages": len(rows),
            "trainings": len(costs),
            "unknown": len(costs) - len(known),
        },
        "assumptions": "nothing is trained; ingest, tokens and pages are not counted"
        if not costs
        else f"6 operations per parameter, token and pass; {timed}; one training at a time; evaluations and analyses are not counted; "
        "sizes of missing data as the paper gives them",
    }


def estimate_training(
    plan: ExperimentPlan, label: str, workspace: Path, *, timed: bool = False
) -> TrainingCost:
    """The cost of one training; `timed`: with steps that are run now, on windows of the shape of
    its own data.
    """
    training, first = plan.trainings[label], plan.pretraining_of(label)
    preset = first.preset or "tiny"
    sizes = [
        _measure_data(name, plan, workspace)
        for name in dict.fromkeys(training.flags["data"]["names"])
    ]
    pairs = parse_assignments(list(training.assignments))
    flags = merge_layers(training.flags, pairs)
    widest = max(
        (_measure_data(name, plan, workspace) for name in first.flags["data"]["names"]),
        key=lambda size: size.length,
    )
    model = {**first.flags.get("model", {}), **pairs.get("model", {})}
    entry = registry.models[model.get("name", "bitimelygpt")]
    own = storage.encode_json({**model, "name": entry.name}).decode()
    try:
        config, parameters = _count_parameters(
            own, preset, first.budget or "table", widest.channels, widest.length, widest.codes
        )
    except UserError as error:
        raise_system_error(error)
        return TrainingCost()
    defaults = load_preset(preset).get("train" if training.verb == "pretrain" else "finetune", {})
    train, data = {**defaults, **flags.get("train", {})}, flags.get("data", {})
    objective = flags.get("objective", {}).get("name") or entry.facts.objective
    steps = 0 if training.verb == "pretrain" and objective == "none" else train.get("steps")
    if steps is not None:
        windows = steps * train.get("batch_size", 64)
    elif any(size.windows is None for size in sizes):
        return TrainingCost(parameters=parameters)
    else:
        available = sum(size.windows or 0.0 for size in sizes) * data.get("fraction", 1.0)
        windows = min(available, data.get("limit") or available) * train.get("epochs", 20)
    samples = {"patch": max(config.patch, 1), "conv": 4}.get(config.tokenizer, 1)  # of a token
    tokens = max(size.events or size.length / samples for size in sizes)
    passes = registry.objectives[objective].facts.passes if training.verb == "pretrain" else 1
    flops = 6.0 * parameters * tokens + (
        12.0 * config.layers * tokens**2 * config.dim if entry.facts.family in QUADRATIC else 0.0
    )
    rates = parse_learning_rates(flags.get("tune", {}).get("rates"))  # text where --set gives them
    trials = (rates if isinstance(rates, int) else len(rates)) / TRIAL_SHARE if rates else 0.0
    weights, batch = 4 * parameters, train.get("batch_size", 64)
    seen, updates = windows * (1 + trials), windows * (1 + trials) / batch
    every = (
        train.get("checkpoint_every")
        or (sum(size.windows or 0.0 for size in sizes) * data.get("fraction", 1.0)) / batch
    )
    held = sum(size.held for size in sizes) * updates / max(every, 1.0)
    reads = max(sizes, key=lambda size: size.length)
    tried = (
        config
        if reads.codes
        else config.model_copy(update={"channels": reads.channels, "length": reads.length})
    )
    cheap = (
        windows > 0
        and flops * passes < EXACT
        and _predict_trial(entry.name, config, parameters, tokens) < TRIAL
    )
    return TrainingCost(
        parameters=parameters,
        windows=int(windows),
        flops=flops * passes * windows * (1 + trials),
        bytes=weights + 2 * STATES * weights,
        slowness=_measured_slowness(entry.name),
        seen=seen + held * HELD_SHARE,
        each=_time_window(
            tried, objective if training.verb == "pretrain" else "none", batch, sizes[0].observed
        )
        if cheap and timed
        else None,
        steps=updates,
        layers=config.layers,
    )


@cache
def _time_window(config: ModelConfig, objective: str, batch: int, observed: float) -> float | None:
    """Seconds of a training step for one window of signals, of which a share is observed, timed
    here; None where the model cannot be tried without its data.
    """
    import torch

    from bitimely_core import models, objectives
    from bitimely_core.train.estimate import estimate
    from bitimely_core.types import Batch

    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            loss = None if objective == "none" else objectives.get(objective)
            values = torch.randn(batch, config.length, config.channels)
            mask = None if observed == 1 else torch.rand(values.shape) < observed
            times = None if mask is None else torch.arange(float(config.length)).expand(batch, -1)
            found = estimate(
                models.from_config(config), Batch(values, times, mask), 1, objective=loss
            )
    except (UserError, RuntimeError) as error:
        raise_system_error(error)
        return None
    return found["seconds_per_step"] / batch


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

    own = json.loads(model)
    name = own.pop("name")
    entry = registry.models[name]
    family = load_preset(preset).get(entry.facts.family, {})
    shape = {
        "channels": channels,
        "length": length,
        **({"codes": codes, "tokenizer": "codes"} if codes else {}),
    }
    reads = shape
    if codes and "grid" in {
        own.get("events"),
        family.get("events"),
        None if "events" in entry.facts.input else "grid",
    }:
        reads = {**grid_shape(codes, own.get("horizon", ModelConfig().horizon)), "events": "grid"}
    config = build_model_config(name, preset, **merge_layers(reads, own))
    if budget == "matched":
        widths = models.match_parameters(
            name, preset, channels=channels, length=length, codes=codes, events=config.events
        )
        config = build_model_config(name, preset, **merge_layers(reads, own, widths))
    return config, models.count_configured(config)


def _predict_trial(model: str, config: ModelConfig, parameters: int, tokens: float) -> float:
    """Seconds of a window of signals from `models/costs.toml` (of a model that is not in it: from
    the slowest), were they to grow with its square.
    """
    if config.tokenizer == "codes":
        return math.inf
    # models of the measurement took 4 samples a token
    samples = 4 * tokens if config.tokenizer == "patch" else config.length
    measured = _read_costs()
    costs, share = measured.get("models", {}), (samples / 1000) ** 2
    if model not in costs:
        return float(
            max((row["train"] for row in costs.values()), default=0.0)
            / 1000
            * share
            * parameters
            / 10_000
        )
    larger = (
        parameters
        / _count_parameters(f'{{"name": "{model}"}}', measured["preset"], "table", 7, 1000, None)[1]
    )
    return float(
        costs[model]["train"] / 1000 * share * max(1.0, config.channels / 7) * max(1.0, larger)
    )


@cache
def _read_costs() -> Mapping[str, Any]:
    return read_toml(COSTS) if COSTS.is_file() else {}


@cache
def _measured_slowness(model: str) -> float:
    """Measured time of `model` for an operation beside GPT's, at the preset of the measurement
    (`models/costs.toml`); 1 where it was not measured.
    """
    measured = _read_costs()
    costs = measured.get("models", {})
    if model not in costs or "gpt" not in costs:
        return 1.0
    sizes = [
        _count_parameters(f'{{"name": "{name}"}}', measured["preset"], "table", 7, 1000, None)[1]
        for name in (model, "gpt")
    ]
    return float(max(1.0, costs[model]["train"] / costs["gpt"]["train"] * sizes[1] / sizes[0]))


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
