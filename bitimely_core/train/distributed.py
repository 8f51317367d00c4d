"""Several processes that train one model: ranks, sums over processes, launch."""

from __future__ import annotations

import os
import re
import signal
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bitimely_core.errors import Exit, Reason, UserError, safe_text, usage_error
from bitimely_core.system_errors import is_later_process

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def get_rank() -> int:
    """Rank of this process; process 0 alone writes and prints."""
    return _read_number("RANK", 0) if get_world_size() > 1 else 0


def get_world_size() -> int:
    """Number of processes that train together."""
    return _read_number("WORLD_SIZE", 1, least=1)


def _read_number(name: str, default: int, least: int = 0) -> int:
    """The variable `name` of the environment as a number. Raises UserError (config, exit 2)."""
    text = os.environ.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise _environment_error(name, safe_text(text), f"expected a whole number from {least} on")
    return int(text)


def _environment_error(name: str, problem: str, requirement: str) -> UserError:
    """A variable that a launcher would have set otherwise (config, exit 2)."""
    hint = (
        "Start it with torchrun or --devices, which set it, "
        "or unset WORLD_SIZE to train in one process"
    )
    return usage_error(problem, requirement, hint, field=name)


def check_group() -> None:
    """Check what torchrun tells each process of its group. Raises UserError (config, exit 2) that
    names the variable.
    """
    world = get_world_size()
    if world == 1:
        return
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise _environment_error(name, "is not set", f"expected it beside WORLD_SIZE={world}")
    if (rank := get_rank()) >= world:
        raise _environment_error("RANK", str(rank), f"expected a number below WORLD_SIZE={world}")
    if not 0 < (port := _read_number("MASTER_PORT", 0)) < 1 << 16:
        raise _environment_error("MASTER_PORT", str(port), "expected a port, 1 to 65535")
    _read_number("LOCAL_RANK", 0)


def is_resuming() -> bool:
    """Whether torchrun restarted this process after a failure; then --force-new must not apply
    again.
    """
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def join_group() -> None:
    """Join the other processes of torchrun, once; nothing for a single one. CPU tensors go by gloo,
    CUDA tensors by nccl.

    Raises UserError: config (exit 2) as `check_group`; io_error (exit 6) where the first process
    cannot be reached or its port is taken.
    """
    if get_world_size() > 1 and not dist.is_initialized():
        import atexit

        check_group()
        try:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        except dist.DistNetworkError as error:
            where = f"no connection at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            hint = "Set MASTER_PORT to a free port, the same for all processes"
            raise UserError(
                Reason.IO_ERROR,
                where,
                "expected the port of process 0",
                hint,
                exit_code=Exit.RESOURCES,
            ) from error
        atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)


def barrier() -> None:
    """Wait for all processes."""
    join_group()
    all_reduce_sum([0.0])


def all_reduce_sum(numbers: list[float]) -> list[float]:
    """Sums over all processes."""
    if get_world_size() == 1:
        return numbers
    together = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(together)
    return list(map(float, together.tolist()))


def gather_objects(value: Any) -> list[Any]:
    """The `value` of each process."""
    if get_world_size() == 1:
        return [value]
    gathered = [None] * get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def broadcast_parameters(model: nn.Module) -> None:
    """Give every process the weights and buffers of process 0."""
    if get_world_size() > 1:
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), 0)


def all_reduce_statistics(model: nn.Module) -> None:
    """Mean over the processes of the running statistics of batch norms, so that all hold the same
    model.
    """
    if get_world_size() > 1:
        for buffer in list_statistics(model).values():
            dist.all_reduce(buffer)
            buffer.div_(get_world_size())


def list_statistics(model: nn.Module) -> dict[str, Tensor]:
    """The running statistics of batch norms by name."""
    norms = {
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm)
    }
    return {
        name: x
        for name, x in model.named_buffers()
        if name.rpartition(".")[0] in norms and x.is_floating_point()
    }


def find_first_error(error: Exception | None) -> Exception:
    """The exception to raise when any process failed: that of this process where it is a bug, else
    the first of any, a bug as a UserError that names it.
    """
    shared = error
    # the first process alone prints, so it must know
    if error is not None and not isinstance(error, UserError):
        problem = f"{type(error).__name__} in process {get_rank()}"
        hint = "This is a bug; repeat with --debug and report it"
        shared = UserError(Reason.INTERNAL, problem, hint=hint, exit_code=Exit.INTERNAL_ERROR)
    gathered = gather_objects(shared)
    if error is not None and error is not shared:
        return error
    first: Exception = next(filter(None, gathered))
    return first


LAUNCHED = "BITIMELY_LAUNCHED"  # set in the processes that `launch` has started
LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|timed? ?out|gloo|nccl|remote process",
    re.IGNORECASE,
)


def find_lost_peer(error: BaseException) -> UserError | None:
    """The UserError (incomplete, exit 6) of an error of communication with the other processes of a
    training; None for any other error.
    """
    if (
        get_world_size() == 1
        or not isinstance(error, RuntimeError)
        or not LOST_PEER.search(str(error))
    ):
        return None
    # `launch` names the lost process; another line and NCCL's waiting for it are of no use
    if LAUNCHED in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    return lost_peer_error(f"process {get_rank()} of {get_world_size()} has lost another one")


def claim_report(*, of_loss: bool = False) -> bool:
    """Whether this process is the first of its group that reports an error, `of_loss` that of
    another process: process 0 may be the lost one.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return not is_later_process()
    try:
        return int(dist.distributed_c10d._get_default_store().add("bitimely/error", 1)) == 1
    except Exception:
        # the store has ended: with its machine, or, where torchrun does not keep it, with process 0
        return get_rank() == 0 or (
            of_loss and (os.environ.get("LOCAL_RANK") == "0" or get_rank() == 1)
        )


def lost_peer_error(problem: str) -> UserError:
    """The error (incomplete, exit 6) of a training of several processes one of which has ended."""
    hint = "See whether memory or a time limit ended it, then repeat the same command to go on"
    return UserError(
        Reason.INCOMPLETE, problem, "the last checkpoint is kept", hint, exit_code=Exit.RESOURCES
    )


def launch(argv: list[str], devices: int, *, module: str = "bitimely_cli") -> int | None:
    """Run `python -m bitimely_cli ARGV` in `devices` processes under torchrun; 0, or the exit code
    of the process that failed first.

    None for one device, and in a process that torchrun started: the caller goes on itself. Raises
    UserError: incomplete (exit 6) where a signal ended a process from outside or one other than the
    first failed, config (exit 2) for more processes than this machine has cores or GPUs.
    """
    if devices <= 1 or "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return None
    cores = os.cpu_count() or 1
    usable = max(torch.cuda.device_count(), cores, 2)
    if devices > usable:
        raise usage_error(
            f"{devices} processes",
            f"expected at most {usable}, as many as this machine has GPUs or cores",
            field="--devices",
        )
    import logging
    import sys
    import uuid

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // devices)))
    os.environ[LAUNCHED] = "1"
    # of torchrun's own report of a failure; process 0 has printed the error
    os.environ.setdefault("LOGLEVEL", "CRITICAL")
    from torch.distributed.elastic.multiprocessing import errors
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=devices,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(settings, sys.executable)("-m", module, *argv)
    except errors.ChildFailedError as error:
        return _report_failure(error, devices)
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _report_failure(error: ChildFailedError, devices: int) -> int:
    """The exit code of the process that failed first, which has printed its error.

    Raises UserError (incomplete, exit 6) where a signal ended it from outside, or none is printed.
    """
    # those that have lost it end by SIGTERM
    rank, failure = min(
        error.failures.items(),
        key=lambda item: (item[1].exitcode == -signal.SIGTERM, item[1].timestamp),
    )
    code, process = failure.exitcode, f"process {rank} of {devices}"
    if code < 0 and code != -signal.SIGINT:
        name = signal.Signals(-code).name
        raise lost_peer_error(f"{process} was ended by {name}") from error
    # process 0 has not printed an error
    if rank > 0 and error.failures.get(0, failure).exitcode == -signal.SIGTERM:
        raise lost_peer_error(f"{process} has failed with exit code {code}") from error
    return 128 - code if code < 0 else int(code)


def list_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters of every group, in order."""
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
