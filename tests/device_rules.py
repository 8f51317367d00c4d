"""Training, fine-tuning and the verbs on runs on the pretended device and on the CPU beside it: a
program, since it replaces `cuda` for its process.

    python tests/device_rules.py training [--models NAME,...] [--kinds regular,ragged,events,mixed] [--own]    three steps and a validation each
    python tests/device_rules.py settings [--models NAME,...]    the same with the settings of models, objectives and heads in `SETTINGS`
    python tests/device_rules.py narrow    the same with each model's own objective on a device without float64, which has to stay unused
    python tests/device_rules.py streams    streams, and a training that goes on from a checkpoint
    python tests/device_rules.py faults    a step with an unusable loss or gradient is named and neither it nor one after it is applied
    python tests/device_rules.py stored    windows of int16 are scaled on the device
    python tests/device_rules.py verbs --home WORKSPACE    evaluate, embed, predict and every analysis of a small workspace

The last line of the output is a JSON object: `failed` and `refused` (lists of texts), `done`
(number of cases) and `waits`: place where the host waits in a step between two log lines -> cases.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import math
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pretend_device as pretend  # before torch
import torch

from bitimely_core import heads, models, objectives, registry
from bitimely_core.config import TrainConfig
from bitimely_core.errors import UserError
from bitimely_core.models.tokenizers import FIRST
from bitimely_core.train import loop
from bitimely_core.types import Batch

# of the first loss and of the last: AdamW moves a weight by its full rate where rounding decides
# the sign
TOLERANCE, LATER = 1e-5, 1e-4
STEPS = 3  # the first and the last are logged


class Rows:
    """Random batches of a kind; the same ones for both devices."""

    length = 64  # timesteps; 20 events

    def __init__(
        self, kind: str, *, size: int = 4, steps: int = STEPS, task: str | None = None
    ) -> None:
        self.kind, self.size, self.steps, self.task = kind, size, steps, task

    def __call__(
        self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        for step in range(start, self.steps):
            draw, rows = torch.Generator().manual_seed(epoch * 100 + step), self.size
            index = torch.arange(rows)
            target = None if self.task is None else draw_target(self.task, rows, draw)
            if self.kind == "events":
                mask = torch.arange(20) < torch.randint(5, 21, (rows, 1), generator=draw)
                codes = torch.where(mask, torch.randint(FIRST, 40, (rows, 20), generator=draw), 0)
                times = (torch.rand(rows, 20, generator=draw) * 5).cumsum(1)
                numbers = torch.where(
                    torch.rand(rows, 20, generator=draw) < 0.7,
                    torch.randn(rows, 20, generator=draw),
                    torch.nan,
                )
                person = torch.tensor([0.5, 1.0, 0.0, 1.0]).repeat(rows, 1)
                yield Batch(
                    codes,
                    times,
                    mask,
                    target,
                    index,
                    times.amax(1) + 3,
                    person=person,
                    numbers=numbers,
                )
                continue
            mask = None
            if self.kind == "irregular":
                mask = torch.rand(rows, self.length, 3, generator=draw) < 0.5
                yield Batch(
                    torch.randn(mask.shape, generator=draw),
                    torch.rand(rows, self.length, generator=draw).cumsum(1),
                    mask,
                    target,
                    index,
                )
                continue
            if self.kind == "ragged":
                lengths = torch.randint(24, self.length + 1, (rows, 1), generator=draw)
                lengths[0] = self.length
                mask = (
                    (torch.arange(self.length) < lengths)[..., None].expand(-1, -1, 3).contiguous()
                )
            source = step % 2 if self.kind == "mixed" else 0
            batch = Batch(
                torch.randn(rows, self.length, 3 - source, generator=draw),
                None,
                mask,
                target,
                index,
            )
            yield (
                batch._replace(source=torch.full((rows,), source))
                if self.kind == "mixed"
                else batch
            )


OUTPUTS = {"classification": 3, "multilabel": 3, "regression": 1, "survival": 4}
EDGES, HORIZONS = (0.0, 50.0, 120.0, 300.0), (100.0, 200.0)  # days


def draw_target(task: str, rows: int, draw: torch.Generator) -> torch.Tensor:
    """Labels of a task, some of which are not known."""
    if task == "classification":
        return torch.randint(0, 3, (rows,), generator=draw)
    if task == "regression":
        return 20 + 3 * torch.randn(rows, generator=draw)
    if task == "multilabel":
        return torch.where(
            torch.rand(rows, 3, generator=draw) < 0.2,
            torch.nan,
            torch.randint(0, 2, (rows, 3), generator=draw).float(),
        )
    time, event = (
        torch.rand(rows, 2, generator=draw) * 400,
        torch.randint(0, 3, (rows, 2), generator=draw).float(),
    )
    return torch.stack((time, event), -1).repeat_interleave(len(HORIZONS), 1)


def name_phases(objective: Any, label: str) -> Any:
    """The objective; the phase of the counters is `label` from its second call on until the third,
    else "other".
    """
    calls = 0

    @functools.wraps(objective if hasattr(objective, "__name__") else type(objective).__call__)
    def call(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        pretend.PHASE[0] = label if calls == 2 else "other"
        return objective(*args, **options)

    for name in {"config", "draw"} & set(dir(objective)):
        setattr(call, name, getattr(objective, name))
    return call


def train(
    name: str,
    options: dict[str, Any],
    kind: str,
    objective: str,
    device: str,
    label: str,
    own: dict[str, Any] | None = None,
) -> tuple[float, float]:
    """The losses of the first and the last step; `objective` may be a task, `own` are its settings
    or those of the head.
    """
    torch.manual_seed(0)
    model: Any = models.build(name, **options)
    model.fit_numbers(dict.fromkeys(range(FIRST, 40), (0.1, 1.0)))
    config = TrainConfig(epochs=1, device=device, batch_size=4, precision="fp32", log_every=1000)
    task, call, own = (
        (objective if objective in OUTPUTS else None),
        heads.losses.get(objective),
        own or {},
    )
    if task is not None:
        grid = (
            {"grid": (own.pop("hazard", "discrete"), EDGES, HORIZONS)} if task == "survival" else {}
        )
        model = heads.Head(model, task=task, outputs=OUTPUTS[task], **grid, **own)  # type: ignore[arg-type]
    call = call or objectives.get(objective, **own)
    rows, validation = Rows(kind, task=task), Rows(kind, steps=1, task=task)
    lines: list[Any] = []
    found = loop.fit(
        model,
        rows,
        name_phases(call, label),
        config=config,
        validation=validation,
        log=lines.append,
    )
    assert found["loss"] is not None
    return lines[0]["loss"], found["loss"]


def make_shape(kind: str) -> dict[str, Any]:
    """Options of a small model for a kind of data."""
    shape: dict[str, Any] = {"preset": "tiny", "channels": 3, "length": Rows.length, "layers": 2}
    return {**shape, "codes": 40, "tokenizer": "codes", "length": 20} if kind == "events" else shape


def list_cases(
    names: list[str], kinds: list[str], own: bool
) -> Iterator[tuple[str, dict[str, Any], str, str]]:
    """Model, its options, kind of data and objective or task (fine-tuning)."""
    for name in names:
        for kind in kinds:
            if kind == "events" and "events" not in registry.models[name].facts.input:
                continue
            options = make_shape(kind)
            if kind == "mixed":
                options["others"] = (2,)
            fitting = [one for one in objectives.compatible_objectives(name) if one != "none"]
            for objective in [
                *fitting[: 1 if own else None],
                *([] if kind == "mixed" else ["classification"]),
            ]:
                yield name, options, kind, objective


def describe(error: Exception) -> str:
    """The error and the innermost place of the package."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "bitimely_core" in f.filename]
    place = (
        f" @ {frames[-1].filename.rpartition('bitimely_core/')[2]}:{frames[-1].lineno}"
        if frames
        else ""
    )
    return f"{type(error).__name__}: {str(error)[:300]}{place}"


class Findings:
    """What the program reports."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.done = 0

    def print(self) -> None:
        """The last line."""
        waits: dict[str, list[str]] = collections.defaultdict(list)
        # they wait for all that is under way
        blocking = [(phase, what) for phase, what in pretend.COPY if what.startswith("BLOCKING")]
        for phase, what in [*pretend.SYNC, *blocking]:
            if phase != "other":
                waits[what].append(phase)
        refused = [f"{phase}: {what}" for phase, what in pretend.MIX]
        print(
            json.dumps(
                {"failed": self.failed, "refused": refused, "done": self.done, "waits": waits}
            )
        )


def sweep_training(found: Findings, names: list[str], kinds: list[str], *, own: bool) -> None:
    """Each case on both devices: the same losses."""
    for name, options, kind, objective in list_cases(names, kinds, own):
        compare_training(found, name, options, kind, objective)


def compare_training(
    found: Findings, name: str, options: dict[str, Any], kind: str, objective: str, **own: Any
) -> None:
    """One case on both devices."""
    label = " ".join(
        [
            f"{name} {objective} {kind}",
            *(f"{key}={value}" for key, value in {**options, **own}.items()),
        ]
    )
    try:
        here, there = (
            train(name, options, kind, objective, device, label, dict(own))
            for device in ("cuda", "cpu")
        )
        if not all(
            abs(a - b) <= far * abs(b)
            for a, b, far in zip(here, there, (TOLERANCE, LATER), strict=True)
        ):
            found.failed.append(f"{label}: losses {here}, {there} on the CPU")
    except UserError:  # an objective with a certain tokenizer; the CPU refuses it too
        return
    except Exception as error:
        found.failed.append(f"{label}: {describe(error)}")
    found.done += 1


Settings = dict[str, Any]
# model, kind, objective or task, settings of the model, and of that
SETTINGS: list[tuple[str, str, str, Settings, Settings]] = [
    (
        "bitimelygpt",
        "ragged",
        "next-previous",
        {"decay": {"kind": "learnable"}, "retention_norm": "rms"},
        {},
    ),
    (
        "bitimelygpt",
        "ragged",
        "next-previous",
        {"xpos_scale": True, "decay": {"kind": "retnet"}},
        {},
    ),
    ("bitimelygpt", "regular", "next-previous", {"temporal_conv": "causal", "ffn": "plain"}, {}),
    (
        "bitimelygpt",
        "ragged",
        "next-previous",
        {"temporal_conv": "causal", "temporal_norm": "layer", "ffn_act": "silu"},
        {},
    ),
    (
        "bitimelygpt",
        "ragged",
        "gap",
        {"form": "chunkwise", "chunk": 8, "dropout": 0.1},
        {"ratio": 0.3, "span": 2},
    ),
    (
        "bitimelygpt",
        "ragged",
        "masked",
        {"tokenizer": "patch", "patch": 7, "crop": "start", "channel_independent": True},
        {"ratio": 0.2},
    ),
    (
        "bitimelygpt",
        "ragged",
        "masked",
        {"tokenizer": "patch", "patch": 8, "stride": 12, "form": "recurrent"},
        {},
    ),
    (
        "bitimelygpt",
        "ragged",
        "next-previous-strict",
        {"output_heads": "separate", "target": "tokens", "tokenizer": "conv"},
        {"direction_sampling": True},
    ),
    (
        "bitimelygpt",
        "ragged",
        "regression",
        {"tokenizer": "steps"},
        {"readout": "flatten", "layers": "last-two", "freeze": True},
    ),
    ("bitimelygpt", "ragged", "multilabel", {}, {"readout": "max"}),
    (
        "bitimelygpt",
        "events",
        "next-previous",
        {"ties": "group", "rotary": "time", "decay": {"kind": "half-life"}},
        {},
    ),
    (
        "bitimelygpt",
        "events",
        "next-previous",
        {"events": "grid", "horizon": 40, "numbers": True},
        {},
    ),
    ("bitimelygpt", "events", "survival", {"clock": "index", "numbers": True}, {}),
    (
        "bitimelygpt",
        "events",
        "survival",
        {"exact_times": False, "index_day": False},
        {"hazard": "piecewise-exponential"},
    ),
    ("timelygpt", "ragged", "next", {"temporal_conv": "causal"}, {}),
    ("gpt", "events", "next", {"exact_times": False, "person": False}, {}),
    ("lstm", "ragged", "masked", {"connections": "residual-norm"}, {}),
    ("bilstm", "ragged", "masked", {"direction_width": "half", "connections": "norm"}, {}),
    ("elmo", "ragged", "classification", {"elmo_mix": "all", "connections": "residual"}, {}),
    ("patchtst", "ragged", "masked", {"revin": False, "positions": "sinusoid"}, {}),
    ("tst", "events", "masked-runs", {"positions": "sinusoid"}, {"bernoulli": True}),
    ("tst", "ragged", "masked-runs", {}, {"concurrent": True, "ratio": 0.9}),
    ("autoformer", "ragged", "masked", {"per_sample": False, "moving_average": (5, 9)}, {}),
    (
        "fedformer",
        "ragged",
        "masked",
        {"modes": 8, "mode_select": "lowest", "reference_layout": True},
        {},
    ),
    ("timesnet", "ragged", "masked", {"per_sample": False, "kernels": 2}, {}),
    ("crt", "ragged", "drop", {"decoder_layers": 1}, {"dropped": 0.4}),
    (
        "s4",
        "ragged",
        "cpc",
        {"discretisation": "bilinear", "start": "inv", "predictor": "last", "ahead": 3},
        {"negatives": 3},
    ),
    (
        "s4",
        "ragged",
        "cpc",
        {"encoder_norm": "layer", "norm_first": True, "form": "fft"},
        {"source": "rows"},
    ),
    ("s4", "ragged", "masked", {"sides": "two", "form": "recurrent"}, {}),
    ("ts2vec", "ragged", "ts2vec", {}, {"temporal_unit": 2}),
    ("ts-tcc", "regular", "ts-tcc", {"ahead": 3}, {"segments": 2}),
    ("tf-c", "regular", "tf-c", {}, {"bank": True}),
    ("mtand", "irregular", "vae", {"reference": 16}, {"samples": 2}),
    (
        "mtand-enc",
        "events",
        "classification",
        {"time_code": "fixed", "numbers": True, "reference": 16},
        {},
    ),
    (
        "gru-d",
        "events",
        "classification",
        {"cell": "concat", "gap_unit": None, "numbers": True},
        {},
    ),
    ("gru-d", "irregular", "classification", {}, {}),
    ("raindrop", "irregular", "classification", {"message": "paper", "graph_distance": 0.02}, {}),
    ("raindrop", "events", "classification", {"numbers": True, "index_day": False}, {}),
    ("seft", "irregular", "classification", {}, {}),
    ("seft", "events", "classification", {"numbers": True, "exact_times": False}, {}),
]


def sweep_settings(found: Findings, names: list[str]) -> None:
    """The cases of `SETTINGS`: the losses of the CPU."""
    for name, kind, objective, options, own in SETTINGS:
        if name in names:
            compare_training(found, name, {**make_shape(kind), **options}, kind, objective, **own)


def sweep_narrow(found: Findings, names: list[str]) -> None:
    """Models on a device without float64, as MPS is: nothing there is made in it, in a training or
    while the target scale is measured.
    """
    from bitimely_core.ops import rotary

    rotary.WITHOUT_FLOAT64.add("cuda")
    for name in names:
        for kind in sorted({"ragged", "events"} & {"ragged", *registry.models[name].facts.input}):
            objective, *_ = [
                one for one in objectives.compatible_objectives(name) if one != "none"
            ] or ["classification"]
            compare_training(found, name, make_shape(kind), kind, objective)
            if objective in registry.objectives:
                objectives.measure_scale(
                    models.build(name, **make_shape(kind)).to("cuda"), Rows(kind)
                )
    head = heads.Head(
        models.build("gpt", **make_shape("events")),
        task="survival",
        outputs=4,
        grid=("piecewise-exponential", EDGES, HORIZONS),
    )
    objectives.measure_scale(head.to("cuda"), Rows("events", task="survival"))
    found.failed += sorted({f"float64: {what}" for _, what in pretend.WIDE})


def sweep_streams(found: Findings) -> None:
    """The states of a stream are those of the CPU; a training that was stopped goes on to the same
    bits.
    """
    pretend.PHASE[0] = "other"
    for name, options in (
        ("timelygpt", {"xpos_scale": True}),
        ("timelygpt", {"temporal_conv": "causal"}),
        ("lstm", {}),
        ("s4", {}),
    ):
        for kind in ("regular", "events"):
            states = []
            for device in (torch.device("cuda"), torch.device("cpu")):
                torch.manual_seed(0)
                model = models.build(name, **make_shape(kind), **options).to(device).eval()  # type: ignore[arg-type]
                stream = models.open_stream(model)
                batch = next(Rows(kind)(0))
                values, times, person = (
                    None if x is None else x[:1].to(device)
                    for x in (batch.values, batch.times, batch.person)
                )
                values = values.clamp(min=FIRST) if kind == "events" else values  # type: ignore[union-attr]  # no padding
                for start, stop in ((0, 7), (7, 8), (8, 20)):
                    piece = Batch(
                        values[:, start:stop],
                        None if times is None else times[:, start:stop],
                        person=person,
                    )  # type: ignore[index]
                    states.append(stream.feed(piece).hidden[-1].cpu())
                states.append(stream.finish().hidden[-1].cpu())
            if not all(
                torch.allclose(a, b, atol=1e-5) for a, b in zip(states[:4], states[4:], strict=True)
            ):
                found.failed.append(
                    f"a stream of {name} on {kind} {options}: other states than on the CPU"
                )
            found.done += 1
    weights = [resume_training(stopped=stopped) for stopped in (False, True)]
    if not all(map(torch.equal, *weights)):
        found.failed.append("a resumed training ends with other weights")
    found.done += 1


def resume_training(*, stopped: bool) -> list[torch.Tensor]:
    """The weights after four steps, of which the last two are made by a second call where the first
    one is `stopped`.
    """
    objective, calls = objectives.get("masked"), 0

    def call(*given: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if stopped and calls == 3:
            raise KeyboardInterrupt
        return objective(*given, **options)

    call.config, call.draw = objective.config, objective.draw  # type: ignore[attr-defined]
    config = TrainConfig(
        epochs=1,
        device="cuda",
        batch_size=4,
        precision="fp32",
        checkpoint_every=1,
        checkpoint="best",
    )
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(1 + stopped):
            torch.manual_seed(0)
            model: Any = models.build("bitimelygpt", **make_shape("ragged"), dropout=0.1)
            with contextlib.suppress(UserError):  # interrupted
                loop.fit(
                    model,
                    Rows("ragged", steps=4),
                    call,
                    config=config,
                    validation=Rows("ragged", steps=1),
                    folder=folder,
                )
    assert calls == 5 + stopped  # four steps and a validation, and the interrupted call
    return [p.detach().cpu() for p in model.parameters()]


class BadRows(Rows):
    """Three good batches, one that makes `what` unusable, then good ones."""

    def __init__(self, what: str) -> None:
        super().__init__("regular", steps=6)
        self.what = what

    def __call__(
        self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        for step, batch in enumerate(super().__call__(epoch, start=start), start):
            if step == 3 and self.what == "count":
                batch = batch._replace(mask=torch.zeros(batch.values.shape, dtype=torch.bool))
            elif step == 3:
                batch.values[1, 5] = {"loss": math.inf, "norm": 1e25}[self.what]
            yield batch


def sweep_faults(found: Findings) -> None:
    """The message and the weights are those of the CPU, which checks every step."""
    pretend.PHASE[0] = "other"
    for what in ("loss", "norm", "count"):
        texts, weights = [], []
        for device in ("cuda", "cpu"):
            before: list[list[torch.Tensor]] = []  # the weights that each step starts from
            torch.manual_seed(0)
            model: Any = models.build(
                "bitimelygpt", preset="tiny", tokenizer="conv", channels=3, length=64, layers=2
            )
            model.target_scale.fill_(1.0)
            config = TrainConfig(
                epochs=1, device=device, batch_size=4, precision="fp32", log_every=1000
            )
            objective = objectives.get("next-previous")

            def call(
                model: Any,
                *given: Any,
                before: Any = before,
                objective: Any = objective,
                **options: Any,
            ) -> Any:
                before.append([p.detach().cpu().clone() for p in model.parameters()])
                return objective(model, *given, **options)

            try:
                loop.fit(model, BadRows(what), call, config=config)
                texts.append("no error")
            except UserError as error:
                texts.append(str(error))
            weights.append([p.detach().cpu() for p in model.parameters()])
            if not all(map(torch.equal, weights[-1], before[3])):
                found.failed.append(f"{what}: the weights are not those before step 4")
        if texts[0] != texts[1] or "step 4" not in texts[1]:
            found.failed.append(f"{what}: {texts[0]!r}, on the CPU {texts[1]!r}")
        far = max(float((a - b).norm() / b.norm()) for a, b in zip(*weights, strict=True))
        single = max(float((a - b).abs().max()) for a, b in zip(*weights, strict=True))
        # AdamW, which moves them by 1e-4, makes the rounding of a gradient near 0 that large
        if not (far <= 5e-6 and single <= 1e-5):
            found.failed.append(
                f"{what}: weights differ from those of the CPU by {far} of their norm, one by {single}"
            )
        found.done += 1


def sweep_stored(found: Findings) -> None:
    """Windows of int16 reach the device as they are stored, also where the objective draws by row:
    the losses of the CPU.
    """
    from test_data import V, narrow_windows

    from bitimely_core import data

    for objective, resident in (
        ("next-previous", False),
        ("masked", False),
        ("next-previous", "auto"),
        ("masked", "auto"),
    ):
        losses, dtypes, devices = [], set(), set()
        for device in ("cuda", "cpu"):
            pretend.PHASE[0] = "other"
            torch.manual_seed(0)
            model: Any = models.build(
                "bitimelygpt", preset="tiny", channels=V, length=6, tokenizer="steps", layers=2
            )
            batches = data.batches(narrow_windows(11), 4)
            kept = batches.read_narrow  # type: ignore[attr-defined]

            def read(
                *given: Any,
                kept: Any = kept,
                dtypes: set[Any] = dtypes,
                devices: set[str] = devices,
                **options: Any,
            ) -> Iterator[Batch]:
                for batch in kept(*given, **options):
                    dtypes.add(batch.values.dtype)
                    devices.add(batch.values.device.type)
                    yield batch

            batches.read_narrow = read  # type: ignore[attr-defined]
            config = TrainConfig(
                epochs=1,
                device=device,
                batch_size=4,
                precision="fp32",
                log_every=1000,
                resident=resident,
            )
            losses.append(
                loop.fit(
                    model, batches, name_phases(objectives.get(objective), objective), config=config
                )["loss"]
            )
        if (
            dtypes != {torch.int16}
            or devices != {"cuda" if resident else "cpu"}
            or not abs(losses[0] - losses[1]) <= TOLERANCE * abs(losses[1])
        ):
            found.failed.append(f"{objective}: losses {losses}, {dtypes} on {devices}")
        found.done += 1


def list_numbers(value: Any, at: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a JSON value with its place."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from list_numbers(part, f"{at}.{key}")
    elif isinstance(value, list):
        for key, part in enumerate(value):
            yield from list_numbers(part, f"{at}[{key}]")
    elif isinstance(value, int | float):
        yield at, float(value)


def compare(found: Findings, label: str, here: Any, there: Any, tolerance: float) -> None:
    """Every number of the results of both devices."""
    a, b = dict(list_numbers(here)), dict(list_numbers(there))
    if a.keys() != b.keys():
        found.failed.append(
            f"{label}: other numbers than on the CPU: {sorted(a.keys() ^ b.keys())[:5]}"
        )
    far = [
        key
        for key in a.keys() & b.keys()
        if not (abs(a[key] - b[key]) <= tolerance * max(1, abs(b[key])) or math.isnan(b[key]))
    ]
    found.failed += [f"{label}: {key} is {a[key]}, {b[key]} on the CPU" for key in sorted(far)[:3]]


VERBS: dict[str, list[str]] = {
    "evaluate": ["evaluate", "tuned", "--bootstrap", "0", "--baselines", "cheap"],
    "evaluate objective": ["evaluate", "plain", "--bootstrap", "0"],
    "embed": ["embed", "plain", "--split", "test"],
    "predict": ["predict", "tuned", "FOLDER/recording.csv", "--map", "FOLDER/map.toml"],
    "attention": ["analyze", "attention", "plain", "--start", "0", "--stop", "1"],
    "svd": ["analyze", "svd", "plain", "--sequences", "2"],
    "saliency": [
        "analyze",
        "saliency",
        "tuned",
        "--sequences",
        "4",
        "--masks",
        "1",
        "--lengths",
        "0.5",
        "--bootstrap",
        "0",
    ],
    "leakage": ["analyze", "leakage", "plain", "--steps", "3"],
    "embedding": ["analyze", "embedding", "plain", "--sequences", "20", "--bootstrap", "0"],
    "probing": [
        "analyze",
        "probing",
        "tuned",
        "--sequences",
        "40",
        "--readouts",
        "mean",
        "--bootstrap",
        "0",
    ],
    "calibration": ["analyze", "calibration", "tuned", "--bootstrap", "0"],
    "complexity": ["analyze", "complexity", "--lengths", "8,16", "--rounds", "1"],
    "shapelets": [
        "analyze",
        "shapelets",
        "--data",
        "generic/classification",
        "--permutations",
        "5",
        "--candidates",
        "50",
    ],
    "evaluate events": ["evaluate", "event-labels", "--bootstrap", "0", "--baselines", "cheap"],
    "embed events": ["embed", "events", "--split", "test"],
    "attention events": ["analyze", "attention", "events", "--start", "0", "--stop", "1"],
    "calibration events": ["analyze", "calibration", "event-labels", "--bootstrap", "0"],
    "search of a rate": [
        "finetune",
        "plain",
        "--data",
        "generic/classification",
        "--steps",
        "2",
        "--tune",
        "2",
        "--precision",
        "fp32",
    ],
}


def call_verb(home: Path, arguments: list[str], device: str) -> Any:
    """The JSON result of a verb on a device, in a copy of the workspace; of the vectors of embed
    their sums.
    """
    import io

    from bitimely_cli.main import main

    copy = home.parent / f"{home.name}-{device}"
    shutil.copytree(home, copy)
    try:
        arguments = [one.replace("FOLDER", str(home.parent)) for one in arguments]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = main([*arguments, "--device", device, "--json", "-w", str(copy)])
        result = json.loads(out.getvalue().splitlines()[-1])
        if code:
            raise RuntimeError(f"exit {code}: {json.dumps(result)[:300]}")
        for file in copy.rglob("*.npy"):
            import numpy as np

            result[file.name] = np.load(file).astype(float).sum(0).tolist()
        return result
    finally:
        shutil.rmtree(copy)


def sweep_verbs(found: Findings, home: Path) -> None:
    """Every verb and analysis of `VERBS` on both devices: the same numbers."""
    missing = set(registry.analyses) - set(VERBS) - {"augmentation"}  # no network reads it
    found.failed += [f"the analysis {name} is not among those swept" for name in sorted(missing)]
    for name, arguments in VERBS.items():
        pretend.PHASE[0] = "other"
        try:
            here, there = (call_verb(home, arguments, device) for device in ("cuda", "cpu"))
            if name != "complexity":  # seconds
                compare(found, name, here, there, 1e-4)
        except Exception as error:
            found.failed.append(f"{name}: {describe(error)}")
        found.done += 1


def main() -> None:
    """Run one sweep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sweep", choices=("training", "settings", "narrow", "streams", "faults", "stored", "verbs")
    )
    parser.add_argument("--models", default="")
    parser.add_argument("--kinds", default="regular,ragged,events")
    parser.add_argument(
        "--own", action="store_true", help="each model with its own objective alone, and fine-tuned"
    )
    parser.add_argument(
        "--length",
        type=int,
        default=64,
        help="timesteps; from 640 on retention takes its chunkwise form",
    )
    parser.add_argument("--home", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pretend.install()
    pretend.PHASE[0] = "other"
    Rows.length = given.length
    names, kinds, found = (
        given.models.split(",") if given.models else list(registry.models),
        given.kinds.split(","),
        Findings(),
    )
    if given.sweep == "training":
        sweep_training(found, names, kinds, own=given.own)
    elif given.sweep in {"settings", "narrow"}:
        {"settings": sweep_settings, "narrow": sweep_narrow}[given.sweep](found, names)
    elif given.sweep in {"faults", "stored", "streams"}:
        {"faults": sweep_faults, "stored": sweep_stored, "streams": sweep_streams}[given.sweep](
            found
        )
    else:
        sweep_verbs(found, given.home)
    found.print()


if __name__ == "__main__":
    sys.exit(main())
