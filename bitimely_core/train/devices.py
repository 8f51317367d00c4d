"""The device of a training and how it computes there: precision, compilation, kernels, threads."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bitimely_core import registry
from bitimely_core.config import (
    ModelConfig,
    Settings,
    TrainConfig,
    check_device_name,
    missing_device,
)
from bitimely_core.errors import Finding, Reason, input_warning, usage_error
from bitimely_core.models.layers import BidirectionalConfig
from bitimely_core.ops import operator
from bitimely_core.preparation import find_token_grid
from bitimely_core.schemas.runs import RunEnvironment
from bitimely_core.train.distributed import get_world_size

# from which retention in a compiled graph is the chunkwise operator, whose backward on a CPU
# repeats the forward
COMPILED_TOKENS = 128
WORTH_PROCESSES = 120.0  # seconds of a training; processes take up to ten to start


@contextmanager
def restore_model(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Afterwards `model` has its device and mode again, and the random numbers of the CPU and of
    `device` go on as if nothing had been drawn.
    """
    home = next((p.device for p in model.parameters()), torch.device("cpu"))
    training = model.training
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            model.train(training)
            model.to(home)


@contextmanager
def deterministic_kernels(where: torch.device) -> Iterator[None]:
    """Deterministic forms of operations on the CPU that otherwise add in the order of threads;
    other devices keep their setting.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    if where.type == "cpu":
        settings.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)
        settings.fill_uninitialized_memory = fill


def select_device(name: str = "auto") -> torch.device:
    """The device called `name`; `auto` prefers CUDA, then MPS, then the CPU. Each of several
    processes uses the GPU of its local rank.

    Raises UserError (config, exit 2) when the machine does not have it.
    """
    check_device_name(name)
    if name == "auto":
        name = _choose_device()
    kind, _, index = name.partition(":")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise missing_device(name, "found no MPS device")
    if kind != "cuda":
        return torch.device(kind)
    number, last = int(index or 0), 0
    if get_world_size() > 1:
        # all processes of a machine are refused, since the first alone prints
        number = int(os.environ.get("LOCAL_RANK", "0"))
        last = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) - 1
    present = torch.cuda.device_count()
    if max(number, last) >= present:
        raise missing_device(f"cuda:{max(number, last)}", f"found {present} CUDA devices")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    # torch's default for convolutions alone; a training in TF32 allows it for its time
    torch.backends.cudnn.allow_tf32 = False
    return device


def _choose_device() -> str:
    """The device that `auto` stands for on this machine."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() and get_world_size() == 1 else "cpu"


def _is_on_cuda(config: TrainConfig) -> bool:
    return (
        config.device == "auto" or config.device.startswith("cuda")
    ) and torch.cuda.is_available()


def resolve_precision(config: TrainConfig) -> TrainConfig:
    """The settings of [train] with `precision` auto replaced by what it is on their device.

    Raises UserError (config, exit 2) for tf32, which CUDA alone has, on another device.
    """
    named = config.device.startswith("cuda")  # `select_device` refuses missing CUDA
    if config.precision == "tf32" and not named and not _is_on_cuda(config):
        requirement = "expected auto, fp32 or bf16 on this device"
        raise usage_error(
            "tf32 without CUDA", requirement, "Use --precision auto", field="train.precision"
        )
    if config.precision != "auto":
        return config
    # not on CPUs with AMX, where bf16 is faster: rates are missed by more (docs/decisions/010)
    fast = _is_on_cuda(config) and torch.cuda.get_device_capability() >= (8, 0)
    return config.model_copy(
        update={"precision": "bf16", "core_precision": "bf16"} if fast else {"precision": "fp32"}
    )


def resolve_compile(
    config: TrainConfig, where: torch.device, *, stack: bool
) -> tuple[TrainConfig, list[Finding]]:
    """The settings of [train] with `compile` as it is on a device; `stack`: of a stack.

    With a warning where it is wanted on CUDA without Triton, or elsewhere without the C++ compiler
    of torch.compile: $CXX, else g++ (on a Mac clang++).
    """
    missing = _find_missing_compiler(where)
    if config.compile == "auto":
        able = where.type == "cuda" and missing is None
        return config.model_copy(update={"compile": able and stack}), []
    if not config.compile or missing is None:
        return config, []
    finding = input_warning(
        Reason.CONFIG,
        f"is left out: torch.compile needs {missing[0]}",
        "",
        f"Install {missing[1]}, or leave train.compile at auto",
        field="train.compile",
    )
    return config.model_copy(update={"compile": False}), [finding]


def refuse_slow_compile(config: TrainConfig, model: ModelConfig) -> None:
    """Raises UserError (config, exit 2) where a compiled step would be slower than one that is not:
    of retention on long windows on a CPU (`python benchmarks/precision.py`).
    """
    tokens = model.length // find_token_grid(model)[0]
    is_retention = registry.models[model.name].facts.family == "retention"
    if config.compile is not True or not is_retention or tokens <= COMPILED_TOKENS:
        return
    if select_device(config.device).type == "cpu":
        raise usage_error(
            f"{tokens} tokens a window on a CPU",
            f"expected at most {COMPILED_TOKENS}: "
            "a compiled step of 750 takes 1.15 times as long as one that is not compiled",
            "Leave --compile out",
            field="train.compile",
        )


def _find_missing_compiler(where: torch.device) -> tuple[str, str] | None:
    """What torch.compile needs on a device and this machine lacks, and what to install."""
    if where.type == "cuda":
        ready = operator.find_backend() == "triton" and (torch.version.cuda or torch.version.hip)
        return None if ready else ("Triton on CUDA", "Triton and a C compiler")
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    return None if shutil.which(compiler) else (f"the C++ compiler {compiler}", "it")


def resolve_arithmetic(settings: Settings) -> Settings:
    """`resolve_precision` and `resolve_compile` of all settings: a core of retention has the
    precision of [train].
    """
    train, model = resolve_precision(settings.train), settings.model
    where = torch.device("cuda" if _is_on_cuda(train) else "cpu")
    resolved, missing = resolve_compile(train, where, stack=is_stack(model))
    train = train if missing else resolved  # the training says what it misses
    if "core_precision" in type(model).model_fields:
        model = model.model_copy(update={"core_precision": train.core_precision})
    return settings.model_copy(update={"train": train, "model": model})


def is_stack(model: ModelConfig) -> bool:
    """Whether a model is a stack of layers of retention or attention."""
    families = {"retention", "attention"}
    return (
        isinstance(model, BidirectionalConfig)
        and registry.models[model.name].facts.family in families
    )


@contextmanager
def use_arithmetic(where: torch.device, precision: str) -> Iterator[None]:
    """On CUDA products of float32 in TF32 under `tf32`, else in full precision; on the CPU numbers
    below 1e-38 as 0, as on CUDA.

    Gradients that vanish over many steps take a CPU up to ten times as long otherwise.
    """
    if where.type != "cuda":
        denormals = bool((torch.tensor(1e-39) * 1.0).item())
        torch.set_flush_denormal(where.type == "cpu" or not denormals)
        try:
            yield
        finally:
            torch.set_flush_denormal(not denormals)
        return
    before, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions


def choose_processes(
    model: nn.Module, settings: Settings, seconds: float
) -> tuple[int, str | None]:
    """What `--devices auto` stands for, and why where it is one process: the most for which a CPU
    has free cores and that divide the rows of a batch.

    One for a training that takes `seconds` below `WORTH_PROCESSES`, whose start is what they save,
    and one where the curve would change by more than rounding.
    """
    train = settings.train
    if select_device(train.device).type != "cpu":
        return 1, "it is for CPUs"
    if seconds < WORTH_PROCESSES:
        return 1, f"the training takes less than {WORTH_PROCESSES / 60:g} minutes"
    if not _has_one_curve(model, settings):
        return 1, "dropout, batch norms or the objective would change the curve"
    fitting = [n for n in range(2, count_free_cores() + 1) if train.batch_size % n == 0]
    if not fitting:
        return 1, "no more cores are free that divide the rows of a batch"
    return max(fitting), None


def _has_one_curve(model: nn.Module, settings: Settings) -> bool:
    """Whether each row of a batch is trained as it would be beside any others: in a stack without
    dropout and batch norms, by an objective that compares no rows.
    """
    config = settings.model
    shared = (
        settings.objective.least_rows > 1,
        config.dropout > 0,
        config.target == "tokens",
        getattr(config, "temporal_conv", "off") != "off",  # has dropout of its own
        any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules()),
        any(isinstance(part, nn.Dropout) and part.p > 0 for part in model.modules()),
    )
    return is_stack(config) and not any(shared)


def count_free_cores() -> int:
    """Cores that this process may use and that had nothing to do in the last minute."""
    usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    return len(usable) - round(os.getloadavg()[0])


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Torch computes with `count` threads on the CPU, whatever OMP_NUM_THREADS."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe_environment(where: torch.device) -> RunEnvironment:
    """How a training on the device `where` computes in this process."""
    on_gpu = where.type == "cuda"
    return RunEnvironment(
        device=where.type,
        hardware=torch.cuda.get_device_name(where)
        if on_gpu
        else f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        threads=torch.get_num_threads(),
        processes=get_world_size(),
        # see `deterministic_kernels`
        deterministic=where.type == "cpu" or torch.are_deterministic_algorithms_enabled(),
        matmul=torch.get_float32_matmul_precision(),
        kernels=operator.find_backend() if on_gpu else None,
    )
