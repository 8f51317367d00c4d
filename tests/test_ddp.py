"""Two processes that train together (gloo, CPU): the curve of one, what happens to one happens to
both, and how they are started.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from planted import use_paper_tokens
from safetensors.torch import load_file, save_file
from test_resume import Forge, log_of
from test_resume import warm as warm
from test_train import Outcome, Rows, Tiny, squares, valid
from torch import nn

from bitimely_cli.main import convert_error, report_error
from bitimely_cli.screen import screen
from bitimely_core import models, objectives, registry
from bitimely_core.config import TrainConfig, validate
from bitimely_core.errors import Exit, Reason, UserError, input_error
from bitimely_core.models.tokenizers import FIRST
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.system_errors import is_later_process
from bitimely_core.train import checkpoints, distributed, gradients, loop, metrics_log
from bitimely_core.train.devices import select_device
from bitimely_core.train.distributed import barrier, get_rank, get_world_size, is_resuming, launch
from bitimely_core.types import Batch

pytestmark = pytest.mark.usefixtures("one_thread")


class Series(Rows):
    """Rows with three channels, of ragged lengths, as the batches of a data set have them."""

    def __call__(
        self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        for batch in super().__call__(epoch, start=start, rank=rank, world=world):
            assert batch.index is not None
            draws = [torch.Generator().manual_seed(int(row)) for row in batch.index]
            values = [torch.randn(32, 3, dtype=torch.float64, generator=draw) for draw in draws]
            lengths = torch.tensor([24 + int(row) % 3 * 4 for row in batch.index]).reshape(-1, 1)
            values_of_rows = (
                torch.stack(values) if values else torch.zeros(0, 32, 3, dtype=torch.float64)
            )
            yield Batch(values_of_rows, mask=torch.arange(32) < lengths, index=batch.index)


class Histories(Rows):
    """Events of ragged lengths, of a row each."""

    def __call__(
        self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        for batch in super().__call__(epoch, start=start, rank=rank, world=world):
            assert batch.index is not None
            draws = [torch.Generator().manual_seed(int(row)) for row in batch.index]
            codes = [torch.randint(FIRST, 20, (12,), generator=draw) for draw in draws]
            times = [
                torch.rand(12, dtype=torch.float64, generator=draw).mul(3).floor().cumsum(0)
                for draw in draws
            ]
            mask = torch.arange(12) < torch.tensor(
                [1 + int(row) % 4 * 3 for row in batch.index]
            ).reshape(-1, 1)
            values = torch.stack(codes) if codes else torch.zeros(0, 12, dtype=torch.int64)
            yield Batch(
                values * mask,
                torch.stack(times) if times else torch.zeros(0, 12, dtype=torch.float64),
                mask,
                index=batch.index,
            )


class Two(nn.Module):
    """Two heads, of which each row uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = (Tiny(seed, dropout=0.0, batch_norm=False) for seed in (1, 2))

    def forward(self, batch: Batch, odd: bool) -> torch.Tensor:
        return (self.odd if odd else self.even)(batch)


def by_parity(model: nn.Module, batch: Batch, generator: torch.Generator | None = None) -> Outcome:
    """Rows with an even index go through one head, the others through the other: a process may
    leave a head without gradient.
    """
    assert batch.index is not None
    parts = {}
    for parity, name in enumerate(("even", "odd")):
        values = batch.values[batch.index % 2 == parity]
        if len(values):
            parts[name] = (
                model(batch._replace(values=values), bool(parity)) - values
            ).square().sum() / len(batch.values)
    return {"loss": torch.stack(list(parts.values())).sum(), "rel": 1.0, "parts": parts}


def failing(model: nn.Module, batch: Batch, generator: torch.Generator | None = None) -> Outcome:
    """Memory is exhausted in process 1 alone."""
    if get_rank() == 1 and model.training:
        raise MemoryError
    return squares(model, batch)


def broken(model: nn.Module, batch: Batch, generator: torch.Generator | None = None) -> Outcome:
    """A bug in process 1 alone."""
    if get_rank() == 1:
        raise ZeroDivisionError
    return squares(model, batch)


def unlike(model: nn.Module, batch: Batch, generator: torch.Generator | None = None) -> Outcome:
    """Not finite in process 1 alone."""
    out = squares(model, batch)
    return {**out, "loss": out["loss"] * (float("nan") if get_rank() == 1 else 1.0)}


def terminated_at_step_3(
    model: nn.Module, batch: Batch, generator: torch.Generator | None = None
) -> Outcome:
    """Process 1 alone is terminated, in its third step."""
    STEPS.append(1)
    if get_rank() == 1 and len(STEPS) == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    return squares(model, batch)


def killed_at_step_3(
    model: nn.Module, batch: Batch, generator: torch.Generator | None = None
) -> Outcome:
    """Process 1 alone is killed, in its third step."""
    STEPS.append(1)
    if get_rank() == 1 and len(STEPS) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return squares(model, batch)


STEPS: list[int] = []  # of this process; terminated_at_step_3 is called once a step


OBJECTIVES = {
    o.__name__: o
    for o in (
        squares,
        valid,
        by_parity,
        failing,
        broken,
        unlike,
        terminated_at_step_3,
        killed_at_step_3,
    )
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Tiny(dropout=0.0, batch_norm=False),
    "two": Two,
    "statistics": lambda: Tiny(dropout=0.0),
}


SMALL = {"layers": 2, "heads": 2, "dim": 16, "ffn_dim": 16}
STACK = {**SMALL, "value_dim": 16}
# objective -> model, its settings, those of the objective
CURVES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "next-previous": ("bitimelygpt", STACK, {}),
    "next-previous-strict": ("bitimelygpt", STACK, {"direction_sampling": True}),
    "next": ("bitimelygpt", STACK, {}),
    "masked": ("bitimelygpt", STACK, {}),
    "gap": ("bitimelygpt", {**STACK, "channel_independent": True}, {}),
    "masked-runs": ("bitimelygpt", {**STACK, "tokenizer": "steps"}, {}),
    "masked-patches": ("bitimelygpt", {**STACK, "tokenizer": "patch"}, {}),
    "vae": ("mtand", {**SMALL, "reference": 8, "latent": 3}, {"samples": 2}),
    "cpc": ("s4", {**SMALL, "ahead": 2, "encoder_norm": "layer"}, {"negatives": 5}),
}
EVENTS = {"tokenizer": "codes", "codes": 20}
EVENT_CURVES = {
    "next-previous": ("bitimelygpt", {**STACK, **EVENTS}, {}),
    "next-previous group": ("bitimelygpt", {**STACK, **EVENTS, "ties": "group"}, {}),
    "next-previous-strict": ("lstm", {**SMALL, **EVENTS}, {}),
    "next-previous-strict sampled": (
        "bitimelygpt",
        {**STACK, **EVENTS},
        {"direction_sampling": True},
    ),
    "next": ("gpt", {**SMALL, **EVENTS}, {}),
}


def member(folder: str, task: dict[str, Any]) -> int:
    """One process: trains, writes its weights and its error message beside the run."""
    rank = distributed.get_rank()
    rows: type[Rows] = Rows
    if (size := task.get("build")) is not None:
        torch.manual_seed(0)
        model: nn.Module = models.build(
            task["model"],
            **use_paper_tokens(
                task["model"], {"channels": 3, "length": 32, "dropout": 0.0, **size}
            ),
        ).double()
        objective: Any = objectives.get(task["objective"], **task.get("settings", {}))
        rows = Histories if "codes" in size else Series
    else:
        model, objective = (
            MODELS[task.get("model", "plain")]().double(),
            OBJECTIVES[task.get("objective", "squares")],
        )
    if rank == 1:  # process 0 decides
        nn.init.constant_(next(model.parameters()), 7.0)
    values = {"epochs": 2, "lr": 1e-2, "log_every": 1, "device": "cpu", **task.get("config", {})}
    code, message = 0, ""
    try:
        loop.fit(
            model,
            rows(rows=task.get("rows", 21), dtype=torch.float64),
            objective,
            validation=rows(rows=7, dtype=torch.float64),
            folder=Path(folder) / "run",
            config=validate(TrainConfig, values),
        )
    except (UserError, RuntimeError) as error:
        fault = error if isinstance(error, UserError) else distributed.find_lost_peer(error)
        assert fault is not None
        code, message = int(fault.exit_code), str(fault)
    save_file(model.state_dict(), str(Path(folder) / f"rank{rank}.safetensors"))
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(message))
    return code


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    made = Forge("test_ddp")
    yield made
    made.close()


def find_free_port() -> int:
    """A port below those that the system gives away: until process 0 listens, another socket could
    be given it, and the group would wait.
    """
    while True:
        port = secrets.choice(range(20_000, 32_000))
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def together(
    forge: Forge, folder: Path, world: int, call: str = "member", *arguments: Any, **task: Any
) -> list[int]:
    """The exit codes of `world` processes that run `member`, or another function."""
    folder.mkdir(exist_ok=True)
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
        "WORLD_SIZE": str(world),
    }
    pids = [
        forge.start(
            call, str(folder), *(arguments or (task,)), RANK=str(r), LOCAL_RANK=str(r), **place
        )
        for r in range(world)
    ]
    return [forge.wait(pid) for pid in pids]


def weights_of(folder: Path, rank: int = 0) -> dict[str, torch.Tensor]:
    return load_file(folder / f"rank{rank}.safetensors")


def agree(a: Path, b: Path) -> None:
    """The same weights and curve to rounding."""
    for name, value in weights_of(a).items():
        torch.testing.assert_close(weights_of(b)[name], value, rtol=1e-9, atol=1e-11)
    for one, two in zip(log_of(a / "run"), log_of(b / "run"), strict=True):
        assert [one[key] for key in ("step", "epoch", "split")] == [
            two[key] for key in ("step", "epoch", "split")
        ]
        for key in {"loss", "rel", "lr", "grad_norm", "first", "rest"} & one.keys():
            assert one[key] == pytest.approx(two[key], rel=1e-9, abs=1e-11)


@pytest.mark.parametrize(
    "task",
    [
        {},
        {"objective": "valid"},
        {"objective": "by_parity", "model": "two"},
        pytest.param({"config": {"accumulate": 2}}, marks=pytest.mark.slow),
        {"config": {"accumulate": 2, "precision": "bf16"}, "loose": True},
    ],
)
def test_two_processes_are_one(task: dict[str, Any], forge: Forge, tmp_path: Path) -> None:
    """21 rows in batches of four: in the last batch of an epoch process 1 has no row."""
    loose = task.pop("loose", False)
    assert together(forge, tmp_path / "one", 1, **task) == [0]
    assert together(forge, tmp_path / "two", 2, **task) == [0, 0]
    assert all(
        torch.equal(value, weights_of(tmp_path / "two", 1)[name])
        for name, value in weights_of(tmp_path / "two").items()
    )
    if loose:
        assert log_of(tmp_path / "two" / "run")[-1]["loss"] == pytest.approx(
            log_of(tmp_path / "one" / "run")[-1]["loss"], rel=0.05
        )
    else:
        agree(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize(
    "curve", [*CURVES.items(), *EVENT_CURVES.items()], ids=lambda curve: f"{curve[0]} {curve[1][0]}"
)
def test_one_two_and_three_processes_have_one_curve(
    curve: tuple[str, Any], forge: Forge, tmp_path: Path
) -> None:
    """What is drawn by row does not know the processes: 21 rows of three lengths in batches of
    four, two parts a batch in one case.

    On histories next has a target more a row than previous, [EOS], and both terms are means over
    their own.
    """
    name, (model, build, settings) = curve
    task = {
        "model": model,
        "objective": name.split()[0],
        "build": build,
        "settings": settings,
        "config": {"epochs": 1},
    }
    for world in (1, 2, 3):
        assert together(forge, tmp_path / str(world), world, **task) == [0] * world
    task["config"]["accumulate"] = 2
    assert together(forge, tmp_path / "parts", 2, **task) == [0, 0]
    alone = log_of(tmp_path / "1" / "run")
    assert len({line["loss"] for line in alone}) == len(alone) == 7
    for other in ("2", "3", "parts"):
        for one, two in zip(
            log_of(tmp_path / "1" / "run"), log_of(tmp_path / other / "run"), strict=True
        ):
            assert one.pop("split") == two.pop("split")
            assert one == pytest.approx(two, rel=1e-6)  # rel, parts and norms of gradients too
        for name, value in weights_of(tmp_path / "1").items():
            torch.testing.assert_close(
                weights_of(tmp_path / other)[name], value, rtol=1e-5, atol=1e-7
            )


def test_every_objective_that_compares_no_rows_has_its_curve_tested() -> None:
    """drop is CRT's alone, whose batch norms have the statistics of a process."""
    alone = {
        name
        for name, entry in registry.objectives.items()
        if entry.facts.rows == 1 and name != "none"
    }
    assert {"drop", *CURVES} >= alone


def test_batch_statistics_are_the_same_in_all_processes(forge: Forge, tmp_path: Path) -> None:
    assert together(forge, tmp_path, 2, model="statistics", rows=20) == [0, 0]
    first, second = weights_of(tmp_path), weights_of(tmp_path, 1)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not torch.equal(first["statistics.running_mean"], torch.zeros(6, dtype=torch.float64))


def test_another_number_of_processes_continues(forge: Forge, tmp_path: Path) -> None:
    assert together(forge, tmp_path / "one", 1) == [0]
    codes = together(forge, tmp_path / "mixed", 2, objective="terminated_at_step_3")
    assert codes == [Exit.TERMINATED, Exit.TERMINATED]
    saved = checkpoints.load_latest_checkpoint(tmp_path / "mixed" / "run")
    assert saved is not None
    assert (saved.step, saved.meta.processes) == (3, 2)
    assert together(forge, tmp_path / "mixed", 1) == [0]
    agree(tmp_path / "one", tmp_path / "mixed")


def test_stopped_and_continued_together_is_the_same_bit_for_bit(
    forge: Forge, tmp_path: Path
) -> None:
    assert together(forge, tmp_path / "whole", 2) == [0, 0]
    assert together(forge, tmp_path / "parts", 2, objective="terminated_at_step_3") == [
        Exit.TERMINATED,
        Exit.TERMINATED,
    ]
    assert together(forge, tmp_path / "parts", 2) == [0, 0]
    assert all(
        torch.equal(value, weights_of(tmp_path / "parts")[name])
        for name, value in weights_of(tmp_path / "whole").items()
    )
    assert log_of(tmp_path / "parts" / "run") == log_of(tmp_path / "whole" / "run")
    # finished: nothing is called
    assert together(forge, tmp_path / "parts", 2, objective="broken") == [0, 0]


@pytest.mark.parametrize(
    ("objective", "code", "words"),
    [
        ("failing", Exit.RESOURCES, "out of memory at batch 1"),
        ("unlike", Exit.REFUSED, "non-finite loss"),
        ("broken", Exit.INTERNAL_ERROR, "ZeroDivisionError in process 1"),
    ],
)
def test_an_error_of_one_process_is_reported_by_all(
    objective: str, code: Exit, words: str, forge: Forge, tmp_path: Path
) -> None:
    begun = time.monotonic()
    assert together(forge, tmp_path, 2, objective=objective) == [code, code]
    assert words in json.loads((tmp_path / "rank0.json").read_text())
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("world", [2, 3])
def test_a_killed_process_ends_the_others_and_loses_nothing(
    world: int, forge: Forge, tmp_path: Path
) -> None:
    begun = time.monotonic()
    codes = together(
        forge,
        tmp_path / "killed",
        world,
        objective="killed_at_step_3",
        config={"checkpoint_every": 1},
    )
    assert codes == [-signal.SIGKILL if rank == 1 else Exit.RESOURCES for rank in range(world)]
    assert time.monotonic() - begun < 10
    words = json.loads((tmp_path / "killed" / "rank0.json").read_text())
    assert f"process 0 of {world} has lost another one" in words
    saved = checkpoints.load_latest_checkpoint(tmp_path / "killed" / "run")
    assert saved is not None
    assert saved.step == 2
    assert together(forge, tmp_path / "killed", world) == [0] * world
    assert together(forge, tmp_path / "whole", world) == [0] * world
    assert log_of(tmp_path / "killed" / "run") == log_of(tmp_path / "whole" / "run")
    assert all(
        torch.equal(value, weights_of(tmp_path / "killed")[name])
        for name, value in weights_of(tmp_path / "whole").items()
    )


def bereaved(folder: str, task: dict[str, Any]) -> int:
    """One process of a group that no torchrun started, whose store is that of process 0, which is
    killed.
    """
    barrier()
    if get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as lost:
        barrier()
    assert distributed.find_lost_peer(lost.value) is not None
    return 10 + distributed.claim_report(of_loss=True)


def test_the_loss_of_the_first_process_is_reported_once(forge: Forge, tmp_path: Path) -> None:
    assert together(forge, tmp_path, 3, "bereaved") == [-signal.SIGKILL, 11, 10]


def report(folder: str, failed: list[int]) -> int:
    """One process that ends with an error of its own, which others learn of as a loss."""
    screen.silent, error = (
        is_later_process(),
        input_error(Reason.CORRUPT, f"what process {get_rank()} has found"),
    )
    os.dup2(os.open(Path(folder) / f"shown{get_rank()}", os.O_CREAT | os.O_WRONLY), 2)
    barrier()
    if get_rank() in failed:
        return report_error(error)
    with pytest.raises(RuntimeError) as lost:
        barrier()
    return report_error(convert_error(lost.value))


@pytest.mark.parametrize("failed", [[0], [1], [0, 1, 2]])
def test_an_error_is_shown_once_by_the_process_that_has_it(
    failed: list[int], forge: Forge, tmp_path: Path
) -> None:
    """Not by process 0 as a loss. Where all have it, by one of them."""
    codes = together(forge, tmp_path, 3, "report", failed)
    assert codes == [Exit.REFUSED if rank in failed else Exit.RESOURCES for rank in range(3)]
    shown = "".join((tmp_path / f"shown{rank}").read_text() for rank in range(3)).splitlines()
    (line,) = (line for line in shown if line.startswith("error[corrupt]"))
    hint = "Download it again."
    assert line in {f"error[corrupt] what process {rank} has found. {hint}" for rank in failed}
    losses = sum(line.startswith("error[incomplete]") for line in shown)
    assert losses <= (failed == [0])  # its store has ended with it: it may have been killed


ORPHANED = """
import datetime, sys
from bitimely_cli.main import main
assert main(["list", "objectives", "--json"]) == 0
import torch.distributed as dist
server = dist.TCPStore("127.0.0.1", 0, is_master=True)
store = dist.TCPStore("127.0.0.1", server.port, timeout=datetime.timedelta(seconds=5))
store.add("a", 1)
del server
try:
    store.add("a", 1)
except RuntimeError:
    sys.exit(5)
"""


@pytest.mark.slow
def test_a_lost_store_prints_no_stack() -> None:
    """Beside the line that names the loss."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    found = subprocess.run(
        [sys.executable, "-c", ORPHANED],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=300,
    )
    assert (found.returncode, found.stderr) == (5, "")


def exchange(folder: str, accumulate: int) -> int:
    """One process: the order in which gradients arrive and buckets leave in each step, beside the
    run.
    """
    events: list[list[str]] = []
    model = Tiny(dropout=0.0, batch_norm=False).double()
    send = gradients.Bucket.send

    def record(bucket: gradients.Bucket) -> None:
        events[-1].append(f"bucket of {len(bucket.parameters)}")
        send(bucket)

    def begin(model: nn.Module, batch: Batch, generator: torch.Generator | None = None) -> Outcome:
        events.append([])
        return squares(model, batch)

    gradients.Bucket.send = record  # type: ignore[method-assign]
    # bytes of a bucket, for the 38 float64 of the model in four
    gradients.LIMIT = 8 * 14
    model.enter.weight.register_post_accumulate_grad_hook(
        lambda _: events[-1].append("gradient of the first layer")
    )
    config = validate(TrainConfig, {"steps": 2, "accumulate": accumulate, "device": "cpu"})
    loop.fit(model, Rows(rows=8, dtype=torch.float64), begin, config=config)
    (Path(folder) / f"events{get_rank()}.json").write_text(json.dumps(events))
    return 0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_travel_during_the_last_backward_pass(
    accumulate: int, forge: Forge, tmp_path: Path
) -> None:
    assert together(forge, tmp_path, 2, "exchange", accumulate) == [0, 0]
    for rank in (0, 1):
        events = json.loads((tmp_path / f"events{rank}.json").read_text())
        assert len(events) == 2 * accumulate
        for at, one in enumerate(events):
            first = one.index("gradient of the first layer")
            sent = [event for event in one if event.startswith("bucket")]
            assert len(sent) == (4 if (at + 1) % accumulate == 0 else 0)
            assert one[:first] == sent[:3]


def test_settings_that_differ_stop_all_processes(forge: Forge, tmp_path: Path) -> None:
    assert together(forge, tmp_path, 2, config={"epochs": 1}) == [0, 0]
    assert together(forge, tmp_path, 2, config={"epochs": 1, "lr": 2e-2}) == [
        Exit.USAGE,
        Exit.USAGE,
    ]


# -- how they are started
# ------------------------------------------------------------------------------------------------------------

STARTED = """
import os, pathlib, signal, sys, time
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
words = ["started", rank, world, os.environ["LOCAL_RANK"], os.environ["OMP_NUM_THREADS"], *sys.argv[1:]]
os.write(1, (" ".join(words) + "\\n").encode())
mark = pathlib.Path(__file__).with_name(sys.argv[1])  # both have said so before one of them ends, which ends the other
pathlib.Path(f"{mark}-{rank}").touch()
while sys.argv[1] in ("fail", "die") and not all(pathlib.Path(f"{mark}-{each}").exists() for each in "01"):
    time.sleep(0.01)
if sys.argv[1] == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    time.sleep(60)
if sys.argv[1] == "fail" and rank == "1":
    sys.exit(int(sys.argv[2]))
if sys.argv[1] == "die" and rank == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""
LAUNCHER = """
import sys
from bitimely_core.errors import UserError
from bitimely_core.train import distributed
for arguments in sys.argv[1:]:
    try:
        code = distributed.launch(arguments.split(), 2, module="started")
        print("exit", code, flush=True)
    except UserError as error:
        print("error", int(error.exit_code), error.problem, flush=True)
"""


def launcher(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "started.py").write_text(STARTED)
    root = Path(__file__).parent.parent
    environment = {
        k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "OMP_NUM_THREADS"}
    }
    environment["PYTHONPATH"] = f"{folder}:{root}"
    command = [sys.executable, "-c", LAUNCHER, *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


@pytest.mark.slow
def test_launch_passes_the_exit_code_on(tmp_path: Path) -> None:
    process = launcher(tmp_path, "fail 6 --json", "die", "well")
    out, err = process.communicate(timeout=60)
    threads = max(1, (os.cpu_count() or 1) // 2)
    lines = out.splitlines()
    assert [lines[at] for at in (2, 5, 8)] == [
        "exit 6",
        "error 6 process 0 of 2 was ended by SIGKILL",
        "exit 0",
    ]
    for at, argument in ((0, "fail 6 --json"), (3, "die"), (6, "well")):
        assert sorted(lines[at : at + 2]) == [
            f"started {r} 2 {r} {threads} {argument}" for r in (0, 1)
        ]
    assert err == ""


@pytest.mark.slow
def test_launch_passes_a_signal_on(tmp_path: Path) -> None:
    process = launcher(tmp_path, "wait")
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline().startswith("started")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert out == f"exit {int(Exit.TERMINATED)}\n"
    assert err == ""


AUTOMATIC = """
import sys
from bitimely_core.train import devices
devices.WORTH_PROCESSES = 0.0
devices.count_free_cores = lambda: 2
from bitimely_cli.main import main
sys.exit(main())
"""


@pytest.mark.slow
def test_free_cores_are_used_with_the_curve_of_one_process(tmp_path: Path) -> None:
    home = small.copy_data(tmp_path / "home")
    ours = "pretrain --preset tiny --data generic/classification --batch-size 8 --steps 4 --device cpu --set train.log_every=1 --set model.layers=2 --set model.dim=8 --set model.tokenizer=patch"
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "OMP_NUM_THREADS": "1",
    }
    for run, devices in (("one", "1"), ("two", "auto")):
        words = [*ours.split(), "--run", run, "--devices", devices, "-w", str(home)]
        subprocess.run([sys.executable, "-c", AUTOMATIC, *words], env=environment, check=True)
    records = [RunRecord.load(home / "runs" / run / "run.json") for run in ("one", "two")]
    environments = [record.environment for record in records]
    assert [place and place.processes for place in environments] == [1, 2]
    assert records[1].settings.train.devices == "auto"
    one, two = (metrics_log.read_metrics(home / "runs" / run) for run in ("one", "two"))
    for line, other in zip(one, two, strict=True):
        assert line["step"] == other["step"]
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)


@pytest.mark.slow
def test_two_nodes_train_a_contrastive_objective_with_a_short_last_batch(tmp_path: Path) -> None:
    """23 windows in batches of ten: of the last three, one process would have one window, which has
    no other to be compared with.
    """
    home = small.copy_data(tmp_path / "home")
    torchrun = f"-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --local-addr 127.0.0.1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{find_free_port()}"
    ours = "-m bitimely -- pretrain --run two --model ts2vec --preset tiny --data generic/classification --batch-size 10 --epochs 2"
    command = [sys.executable, *torchrun.split(), *ours.split(), "-w", str(home)]
    for name, value in {"model.layers": 2, "model.dim": 8, "train.device": "cpu"}.items():
        command += ["--set", f"{name}={value}"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "OMP_NUM_THREADS": "1",
    }
    nodes = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        for _ in range(2)
    ]
    shown = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], shown
    record = RunRecord.load(home / "runs" / "two" / "run.json")
    assert record.environment is not None
    assert record.environment.processes == 2
    assert [
        line["step"]
        for line in metrics_log.read_metrics(home / "runs" / "two")
        if line["split"] == "train"
    ][-1] == 4


def test_launch_leaves_one_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch(["pretrain"], 1) is None
    monkeypatch.setenv("RANK", "0")
    assert launch(["pretrain"], 2) is None


def test_place_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert (get_rank(), get_world_size(), is_resuming()) == (0, 1, False)
    barrier()
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert (get_rank(), get_world_size(), is_resuming()) == (3, 4, True)


GROUP = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29"}


def set_group(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    """The variables of a launcher; empty ones are not set."""
    for name, value in {**GROUP, "LOCAL_RANK": "", "BITIMELY_LAUNCHED": "", **changes}.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE"),
        ({"RANK": ""}, "RANK"),
        ({"RANK": "x"}, "RANK"),
        ({"RANK": "7"}, "RANK"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR"),
        ({"MASTER_PORT": ""}, "MASTER_PORT"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK"),
    ],
)
def test_a_group_that_cannot_be_is_refused_by_the_name_of_the_variable(
    changes: dict[str, str],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_group(monkeypatch, **changes)
    with pytest.raises(UserError) as caught:
        barrier()
    assert (caught.value.code, caught.value.exit_code, caught.value.field) == ("config", 2, name)
    monkeypatch.setattr(screen, "silent", False)
    assert report_error(caught.value) == 2
    assert name in capsys.readouterr().err or changes == {"RANK": "7"}  # for a later process


def test_a_taken_port_is_a_fault_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        set_group(monkeypatch, MASTER_PORT=str(taken.getsockname()[1]))
        with pytest.raises(UserError, match="MASTER_PORT to a free port") as caught:
            barrier()
    assert caught.value.exit_code == Exit.RESOURCES


def test_more_processes_than_gpus_are_refused_by_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Process 0 has a GPU, but it alone prints, and the last one has none."""
    set_group(monkeypatch, LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="cuda:1") as caught:
        select_device("cuda")
    assert caught.value.exit_code == Exit.USAGE
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert select_device("cuda") == torch.device("cuda", 0)


@pytest.mark.slow
def test_only_a_training_waits_for_other_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A container may export the number of processes to every command."""
    from bitimely_core.workflows import prepare

    set_group(monkeypatch, RANK="", MASTER_ADDR="", MASTER_PORT="")
    built: list[str] = []
    monkeypatch.setattr(
        prepare, "_open_or_build", lambda data, *args, **options: built.append(data) or "windows"
    )
    assert prepare.prepare_windows("a", prepare.Execution(tmp_path)) == "windows"
    assert (
        prepare.prepare_windows("b", prepare.Execution(tmp_path, dry_run=True), together=True)
        == "windows"
    )
    with pytest.raises(UserError, match="RANK"):
        prepare.prepare_windows("c", prepare.Execution(tmp_path), together=True)
    assert built == ["a", "b"]  # refused before the minutes that windows take


@pytest.mark.slow
def test_devices_that_a_launcher_overrules_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bitimely_cli.run_verbs import _launch_processes

    monkeypatch.setattr(screen, "n_printed", 0)
    set_group(monkeypatch, WORLD_SIZE="3")
    _launch_processes(3)
    assert capsys.readouterr().err == ""
    _launch_processes(2)
    assert "--devices" in capsys.readouterr().err
