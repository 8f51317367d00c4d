"""What a recipe will take, before anything runs: parameters, floating-point operations, hours on the present device, disk. Rough, and said so."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from bitimely_core import registry, storage
from bitimely_core.config import ModelConfig, build_model_config, load_preset, merge_layers, parse_assignments, read_toml
from bitimely_core.errors import UserError
from bitimely_core.pipeline.plan import Plan
from bitimely_core.training.tuning import SHARE
from bitimely_core.workflows.catalog import COSTS
from bitimely_core.workspace import dataset_and_view

REACHED = 0.3  # share of the speed of a large matrix product that a training step reaches: an estimate
TRAINED = 0.8  # of all windows, where nothing has been cut yet
STATES = 3  # a checkpoint holds the weights and the two moments of AdamW
PASSES = {"next-previous-strict": 2, "crt": 2, "ts2vec": 2, "ts-tcc": 2, "tf-c": 4}  # forward passes of one step, where it is not one
QUADRATIC = {"attention"}  # families whose maps grow with the square of the length


def table(plan: Plan, mine: set[str], workspace: Path) -> dict[str, Any]:
    """The plan as rows, with the estimates of every training and their sum; `assumptions` says what they rest on."""
    speed = measured_speed() if plan.trainings else None
    rows: list[dict[str, Any]] = []
    for label in plan.nodes:
        if label not in mine:
            continue
        row: dict[str, Any] = {"stage": label, "state": "planned", "detail": "", "exit_code": 0}
        if label in plan.trainings:
            found = training(plan, label, workspace)
            row |= (
                {**found, "seconds": None if found["flops"] is None else found["flops"] * found["slow"] / (REACHED * speed)}
                if speed
                else found
            )
        rows.append(row)
    known = [row for row in rows if row.get("flops") is not None]
    total = {key: sum(row[key] for row in known) for key in ("flops", "seconds", "bytes")}
    trainings = sum(row["stage"] in plan.trainings for row in rows)
    return {
        "stages": rows,
        "report": None,
        "total": {**total, "stages": len(rows), "trainings": trainings, "unknown": trainings - len(known)},
        "assumptions": f"6 operations a parameter, token and pass; {REACHED:.0%} of this device's speed in a matrix product ({(speed or 0) / 1e9:,.0f} "
        "GFLOP/s); sizes of data that is not here as the paper gives them",
    }


def training(plan: Plan, label: str, workspace: Path) -> dict[str, Any]:
    """`parameters`, `windows` seen in all, `flops`, `bytes` on the disk, and `slow`: measured time for an operation beside that of GPT."""
    asked = plan.trainings[label]
    first = plan.trainings[f"pretrain {asked['source']}"] if asked["verb"] == "finetune" else asked
    preset = first["preset"] or "tiny"
    unknown = {"parameters": None, "windows": None, "flops": None, "bytes": None, "slow": 1.0}
    data = {entry["name"]: entry for entry in (_data(name, plan, workspace) for name in asked["flags"]["data"]["names"])}
    pairs = parse_assignments(asked["assignments"])
    flags = merge_layers(asked["flags"], pairs)
    wide = max((_data(name, plan, workspace) for name in first["flags"]["data"]["names"]), key=lambda entry: entry["length"])
    model = {**first["flags"].get("model", {}), **pairs.get("model", {})}
    entry = registry.models[model.get("name", "bitimelygpt")]
    try:
        config, parameters = _counted(
            storage.encode_json({**model, "name": entry.name}).decode(),
            preset,
            first["budget"] or "table",
            wide["channels"],
            wide["length"],
            wide["codes"],
        )
    except UserError:
        return unknown
    shipped = load_preset(preset).get("train" if asked["verb"] == "pretrain" else "finetune", {})
    chosen = {**shipped, **flags.get("train", {})}
    steps = chosen.get("steps")
    if steps is not None:
        seen = steps * chosen.get("batch_size", 64)
    elif any(entry["windows"] is None for entry in data.values()):
        return {**unknown, "parameters": parameters}
    else:
        windows = sum(entry["windows"] for entry in data.values()) * flags.get("data", {}).get("fraction", 1.0)
        seen = min(windows, flags.get("data", {}).get("limit") or windows) * chosen.get("epochs", 20)
    tokens = max(entry.get("events") or _tokens(config, entry["length"]) for entry in data.values())
    objective = flags.get("objective", {}).get("name") or entry.facts.objective
    passes = PASSES.get(objective, 1) if asked["verb"] == "pretrain" else 1
    flops = 6.0 * parameters * tokens + (12.0 * config.layers * tokens**2 * config.dim if entry.facts.family in QUADRATIC else 0.0)
    rates = flags.get("tune", {}).get("rates")
    trials = (rates if isinstance(rates, int) else len(rates)) / SHARE if rates else 0.0
    weights = 4 * parameters
    return {
        "parameters": parameters,
        "windows": int(seen),
        "flops": flops * passes * seen * (1 + trials),
        "bytes": weights + 2 * STATES * weights,
        "slow": _slow(entry.name),
    }


def _data(name: str, plan: Plan, workspace: Path) -> dict[str, Any]:
    """Training windows, channels, length and codes of tokens: their own where they exist, else what the cache, the view and the paper say."""
    from bitimely_core import models

    made = workspace / "tokens" / name / "manifest.json"
    node = plan.nodes.get(f"tokenize {name}")
    dataset, view = dataset_and_view(str(node.settings["data"]) if node else name)
    facts = registry.datasets[dataset].facts
    if made.is_file():
        opened = _opened(made.parent)
        return {
            "name": name,
            "windows": len(opened["train"]),
            "channels": opened.channels,
            "length": opened.length,
            "codes": getattr(opened, "codes", None),
            "events": float(opened.lengths().mean()) if hasattr(opened, "lengths") else None,  # most are far shorter than the longest
        }
    if facts.kind == "events":
        shape = models.typical("3m")
        return {
            "name": name,
            "windows": (_cached(workspace / "cache" / dataset, 0.0) or facts.paper.get("subjects", 0)) * TRAINED or None,
            "channels": 1,
            "length": 254,
            "codes": shape.get("codes"),
        }
    stated = facts.paper.get(view, {})
    cut = facts.views.get(view)
    length = (node.settings.get("window") if node else None) or (cut.window if cut else 0) or stated.get("length")
    options = node.settings if node else {}
    rate = options.get("rate") or (cut.rate if cut else 0)
    seconds = options["window"] / rate if options.get("window") and rate else cut.window / cut.rate if cut and cut.rate else 0.0
    count = _cached(workspace / "cache" / dataset, seconds) or stated.get("sequences")
    return {
        "name": name,
        "windows": count * TRAINED if count else None,
        "channels": len(cut.channels) if cut and cut.channels else stated.get("channels", 1),
        "length": length if isinstance(length, int) else 3000,
        "codes": None,
    }


@cache
def _cached(folder: Path, seconds: float) -> int:
    """Windows of so many seconds that the recordings of a cache hold, labelled or not; 0 seconds: recordings, of claims subjects. 0 without a cache."""
    import polars as pl

    from bitimely_core.cache import open_cache

    if not (folder / storage.MANIFEST).is_file():
        return 0
    opened = open_cache(folder, verify=False)
    if "funnel" in opened.manifest:
        return int(opened.manifest["funnel"]["subjects"])
    lasting = opened.signals().group_by("recording_id", "channel").agg(seconds=(pl.col("n_samples") / pl.col("rate")).sum())
    lasting = lasting.group_by("recording_id").agg(pl.col("seconds").max())
    return lasting.height if seconds <= 0 else int((lasting["seconds"] / seconds + 1e-6).floor().sum())


@cache
def _opened(folder: Path) -> Any:
    from bitimely_core import tokens

    return tokens.open_tokens(folder, verify=False)


@cache
def _counted(model: str, preset: str, budget: str, channels: int, length: int, codes: int | None) -> tuple[ModelConfig, int]:
    import json

    from bitimely_core import models
    from bitimely_core.models.adapters import grid_shape

    own = json.loads(model)
    name = own.pop("name")
    entry = registry.models[name]
    family = load_preset(preset).get(entry.facts.family, {})
    shape = {"channels": channels, "length": length, **({"codes": codes, "tokenizer": "codes"} if codes else {})}
    reads = shape
    if codes and "grid" in {own.get("events"), family.get("events"), None if "events" in entry.facts.input else "grid"}:
        reads = {**grid_shape(codes, own.get("horizon", ModelConfig().horizon)), "events": "grid"}
    config = build_model_config(name, entry.facts.family, preset, **merge_layers(reads, own))
    if budget == "matched":
        return config, models.count(build_model_config("bitimelygpt", "retention", preset, **shape))
    return config, models.count(config)


def _tokens(config: ModelConfig, length: int) -> float:
    """Tokens of a window of `length` samples."""
    return {"patch": length / max(config.patch, 1), "conv": length / 4}.get(config.tokenizer, length)


@cache
def _slow(model: str) -> float:
    """Measured time of `model` for an operation beside GPT's, at the preset of the measurement (`models/costs.toml`); 1 where nobody measured."""
    measured: Mapping[str, Any] = read_toml(COSTS) if COSTS.is_file() else {}
    costs = measured.get("models", {})
    if model not in costs or "gpt" not in costs:
        return 1.0
    sizes = [_counted(f'{{"name": "{name}"}}', measured["preset"], "table", 7, 1000, None)[1] for name in (model, "gpt")]
    return float(max(1.0, costs[model]["train"] / costs["gpt"]["train"] * sizes[1] / sizes[0]))


@cache
def measured_speed(size: int = 1024, seconds: float = 0.2) -> float:
    """Operations a second of a matrix product in float32 on the device that a training would take."""
    import torch

    from bitimely_core.training.devices import select_device

    where = select_device("auto")
    a = torch.ones(size, size, device=where)
    best = 0.0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        start = time.perf_counter()
        value = (a @ a)[0, 0].item()  # waits for the device
        best = max(best, 2.0 * size**3 / (time.perf_counter() - start))
        assert value == size
    return best
