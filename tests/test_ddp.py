"""Two processes that train together (gloo, CPU): the curve of one, what happens to one happens to both, and how they are started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_resume import Forge, log_of
from test_resume import warm as warm
from test_train import Outcome, Rows, Tiny, squares, valid
from torch import nn

from bitimely_core.config import TrainConfig, validate
from bitimely_core.errors import Exit, UserError
from bitimely_core.training import distributed, loop
from bitimely_core.training.distributed import barrier, get_rank, get_world_size, is_resuming, launch
from bitimely_core.types import Batch

pytestmark = pytest.mark.usefixtures("one_thread")


class Two(nn.Module):
    """Two heads, of which each row uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = (Tiny(seed, dropout=0.0, batch_norm=False) for seed in (1, 2))

    def forward(self, batch: Batch, odd: bool) -> torch.Tensor:
        return (self.odd if odd else self.even)(batch)


def by_parity(model: nn.Module, batch: Batch, generator: torch.Generator | None = None) -> Outcome:
    """Rows with an even index go through one head, the others through the other: a process may leave a head without gradient."""
    assert batch.index is not None
    parts = {}
    for parity, name in enumerate(("even", "odd")):
        values = batch.values[batch.index % 2 == parity]
        if len(values):
            parts[name] = (model(batch._replace(values=values), bool(parity)) - values).square().sum() / len(batch.values)
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


def terminated_at_step_3(model: nn.Module, batch: Batch, generator: torch.Generator | None = None) -> Outcome:
    """Process 1 alone is terminated, in its third step."""
    STEPS.append(1)
    if get_rank() == 1 and len(STEPS) == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    return squares(model, batch)


STEPS: list[int] = []  # of this process; terminated_at_step_3 is called once a step


OBJECTIVES = {o.__name__: o for o in (squares, valid, by_parity, failing, broken, unlike, terminated_at_step_3)}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Tiny(dropout=0.0, batch_norm=False),
    "two": Two,
    "statistics": lambda: Tiny(dropout=0.0),
}


def member(folder: str, task: dict[str, Any]) -> int:
    """One process: trains, writes its weights and its error message beside the run."""
    rank = distributed.get_rank()
    model: nn.Module = MODELS[task.get("model", "plain")]().double()
    if rank == 1:  # process 0 decides
        nn.init.constant_(next(model.parameters()), 7.0)
    values = {"epochs": 2, "lr": 1e-2, "log_every": 1, "device": "cpu", **task.get("config", {})}
    code, message = 0, ""
    try:
        loop.fit(
            model,
            Rows(rows=task.get("rows", 21), dtype=torch.float64),
            OBJECTIVES[task.get("objective", "squares")],
            validation=Rows(rows=7, dtype=torch.float64),
            folder=Path(folder) / "run",
            config=validate(TrainConfig, values),
        )
    except UserError as error:
        code, message = int(error.exit_code), str(error)
    save_file(model.state_dict(), str(Path(folder) / f"rank{rank}.safetensors"))
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(message))
    return code


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    made = Forge("test_ddp")
    yield made
    made.close()


def together(forge: Forge, folder: Path, world: int, **task: Any) -> list[int]:
    """The exit codes of `world` processes that run `member`."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
    pids = [forge.start("member", str(folder), task, RANK=str(r), LOCAL_RANK=str(r), **place) for r in range(world)]
    return [forge.wait(pid) for pid in pids]


def weights_of(folder: Path, rank: int = 0) -> dict[str, torch.Tensor]:
    return load_file(folder / f"rank{rank}.safetensors")


def agree(a: Path, b: Path) -> None:
    """The same weights and curve to rounding."""
    for name, value in weights_of(a).items():
        torch.testing.assert_close(weights_of(b)[name], value, rtol=1e-9, atol=1e-11)
    for one, two in zip(log_of(a / "run"), log_of(b / "run"), strict=True):
        assert [one[key] for key in ("step", "epoch", "split")] == [two[key] for key in ("step", "epoch", "split")]
        for key in {"loss", "rel", "lr", "grad_norm", "first", "rest"} & one.keys():
            assert one[key] == pytest.approx(two[key], rel=1e-9, abs=1e-11)


@pytest.mark.parametrize(
    "task",
    [
        {},
        {"objective": "valid"},
        {"objective": "by_parity", "model": "two"},
        {"config": {"accumulate": 2}},
        {"config": {"accumulate": 2, "precision": "bf16"}, "loose": True},
    ],
)
def test_two_processes_are_one(task: dict[str, Any], forge: Forge, tmp_path: Path) -> None:
    """21 rows in batches of four: in the last batch of an epoch process 1 has no row."""
    loose = task.pop("loose", False)
    assert together(forge, tmp_path / "one", 1, **task) == [0]
    assert together(forge, tmp_path / "two", 2, **task) == [0, 0]
    assert all(torch.equal(value, weights_of(tmp_path / "two", 1)[name]) for name, value in weights_of(tmp_path / "two").items())
    if loose:
        assert log_of(tmp_path / "two" / "run")[-1]["loss"] == pytest.approx(log_of(tmp_path / "one" / "run")[-1]["loss"], rel=0.05)
    else:
        agree(tmp_path / "one", tmp_path / "two")


def test_batch_statistics_are_the_same_in_all_processes(forge: Forge, tmp_path: Path) -> None:
    assert together(forge, tmp_path, 2, model="statistics", rows=20) == [0, 0]
    first, second = weights_of(tmp_path), weights_of(tmp_path, 1)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not torch.equal(first["statistics.running_mean"], torch.zeros(6, dtype=torch.float64))


def test_another_number_of_processes_continues(forge: Forge, tmp_path: Path) -> None:
    assert together(forge, tmp_path / "one", 1) == [0]
    codes = together(forge, tmp_path / "mixed", 2, objective="terminated_at_step_3")
    assert codes == [Exit.TERMINATED, Exit.TERMINATED]
    saved = loop.load_latest_checkpoint(tmp_path / "mixed" / "run")
    assert saved is not None
    assert (saved.step, saved.meta.processes) == (3, 2)
    assert together(forge, tmp_path / "mixed", 1) == [0]
    agree(tmp_path / "one", tmp_path / "mixed")


def test_stopped_and_continued_together_is_the_same_bit_for_bit(forge: Forge, tmp_path: Path) -> None:
    assert together(forge, tmp_path / "whole", 2) == [0, 0]
    assert together(forge, tmp_path / "parts", 2, objective="terminated_at_step_3") == [Exit.TERMINATED, Exit.TERMINATED]
    assert together(forge, tmp_path / "parts", 2) == [0, 0]
    assert all(torch.equal(value, weights_of(tmp_path / "parts")[name]) for name, value in weights_of(tmp_path / "whole").items())
    assert log_of(tmp_path / "parts" / "run") == log_of(tmp_path / "whole" / "run")
    assert together(forge, tmp_path / "parts", 2, objective="broken") == [0, 0]  # finished: nothing is called


@pytest.mark.parametrize(
    ("objective", "code", "words"),
    [
        ("failing", Exit.RESOURCES, "out of memory at batch 1"),
        ("unlike", Exit.REFUSED, "non-finite loss"),
        ("broken", Exit.INTERNAL_ERROR, "another process"),
    ],
)
def test_an_error_of_one_process_is_reported_by_all(objective: str, code: Exit, words: str, forge: Forge, tmp_path: Path) -> None:
    begun = time.monotonic()
    assert together(forge, tmp_path, 2, objective=objective) == [code, code]
    assert words in json.loads((tmp_path / "rank0.json").read_text())
    assert time.monotonic() - begun < 20


def test_settings_that_differ_stop_all_processes(forge: Forge, tmp_path: Path) -> None:
    assert together(forge, tmp_path, 2, config={"epochs": 1}) == [0, 0]
    assert together(forge, tmp_path, 2, config={"epochs": 1, "lr": 2e-2}) == [Exit.USAGE, Exit.USAGE]


# -- how they are started ------------------------------------------------------------------------------------------------------------

STARTED = """
import os, signal, sys, time
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
words = ["started", rank, world, os.environ["LOCAL_RANK"], os.environ["OMP_NUM_THREADS"], *sys.argv[1:]]
os.write(1, (" ".join(words) + "\\n").encode())
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
from bitimely_core.training import distributed
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
    environment = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "OMP_NUM_THREADS"}}
    environment["PYTHONPATH"] = f"{folder}:{root}"
    command = [sys.executable, "-c", LAUNCHER, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_launch_passes_the_exit_code_on(tmp_path: Path) -> None:
    process = launcher(tmp_path, "fail 6 --json", "die", "well")
    out, err = process.communicate(timeout=60)
    threads = max(1, (os.cpu_count() or 1) // 2)
    lines = out.splitlines()
    assert [lines[at] for at in (2, 5, 8)] == ["exit 6", "error 6 process 0 of 2 was ended by SIGKILL", "exit 0"]
    for at, argument in ((0, "fail 6 --json"), (3, "die"), (6, "well")):
        assert sorted(lines[at : at + 2]) == [f"started {r} 2 {r} {threads} {argument}" for r in (0, 1)]
    assert err == ""


def test_launch_passes_a_signal_on(tmp_path: Path) -> None:
    process = launcher(tmp_path, "wait")
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline().startswith("started")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert out == f"exit {int(Exit.TERMINATED)}\n"
    assert err == ""


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
