"""`bitimely`: runs a verb and turns errors into exit codes. Imports nothing heavy, so that lack of memory while a verb loads is reported too."""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

LAST_WORDS = b"error[resource_limit] bitimely: out of memory or open files. Raise the limits of this process (ulimit -v, ulimit -n).\n"
try:
    from bitimely_cli import supervision
    from bitimely_cli.screen import screen
    from bitimely_cli.signals import stop_error, watch_signals
    from bitimely_core import registry
    from bitimely_core.errors import Exit, Reason, UserError
    from bitimely_core.system_errors import describe_tight_memory, find_system_error
except (ImportError, MemoryError, OSError) as lack:
    if isinstance(lack, ModuleNotFoundError):
        raise
    os.write(
        2, b"error[resource_limit] bitimely: out of memory or open files while it was loaded. Raise the limits (ulimit -v, ulimit -n).\n"
    )
    raise SystemExit(6) from None

COLLECT_EVERY = (50_000, 20, 100)  # by default the search for garbage takes a tenth of a short verb, most of it while libraries load
RESERVE = 2 << 20  # bytes that are given back before an error is printed


def __getattr__(name: str) -> Any:
    """`app`, the Typer application with all verbs."""
    if name != "app":
        raise AttributeError(name)
    from bitimely_cli import app, verbs  # noqa: F401  the verbs register themselves

    return app.app


def main(argv: Sequence[str] | None = None) -> int:
    """Run `bitimely` with `argv` (default: the process's own) and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    screen.json, screen.debug, screen.n_printed, screen.has_errors = "--json" in arguments, False, 0, False
    prepare_streams()
    return supervision.run_supervised(
        lambda: run_guarded(lambda: run_verb(arguments)), lambda fault: run_guarded(lambda: report_error(fault))
    )


def prepare_streams() -> None:
    """Streams that are closed go nowhere, and no file takes their place; characters that they cannot show are replaced."""
    with suppress(OSError):  # no descriptor is left: the verb says so
        while (free := os.open(os.devnull, os.O_RDWR)) < 3:
            pass
        os.close(free)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123  open to the end
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def run_guarded(run: Callable[[], int]) -> int:
    """The exit code of `run` when all of its output is written; where memory does not even suffice for an error, a prepared line."""
    try:
        return close_output(run())
    except (MemoryError, OSError):
        with suppress(OSError):
            os.write(2, LAST_WORDS)
        return 6


def run_verb(arguments: list[str]) -> int:
    """The exit code of a verb, its error printed."""
    # threads that wait by spinning make a step ten times slower beside any other busy process; OpenBLAS: 2^4 cycles, not 2^26
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no stack of C++ where another process of a training is lost
    atexit.register(skip_last_search)
    gc.set_threshold(*COLLECT_EVERY)
    reserve: list[bytearray] = []
    try:
        reserve.append(bytearray(RESERVE))
        with watch_signals(report_error) as received:
            try:
                from bitimely_cli.verbs import run_command

                code = run_command(arguments)
            except KeyboardInterrupt:
                return report_error(stop_error(next(iter(received), signal.SIGINT)))
            if code == Exit.INTERRUPTED and received:  # newer versions of typer return it for a KeyboardInterrupt
                return report_error(stop_error(received[0]))
        for finding in registry.broken_plugins.values():
            screen.print_finding(finding)
        registry.broken_plugins.clear()
        return Exit.PARTIAL if code == Exit.OK and screen.has_errors else code
    except BrokenPipeError:
        return Exit.OK  # the reader closed the pipe
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich has closed the stream
            return Exit.OK
        raise
    except GeneratorExit:
        raise
    except BaseException as error:  # Rust's panics are no Exceptions
        reserve.clear()
        return report_error(convert_error(error))


def skip_last_search() -> None:
    """The end of the process without one more search for garbage in all that the libraries hold; triton would report the rest as leaks."""
    if "triton" not in sys.modules:
        gc.freeze()


def convert_error(error: BaseException) -> UserError:
    """Any error that ends a verb as a UserError."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return stop_error(signal.SIGINT)
    if screen.debug:
        traceback.print_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""  # noqa: PTH119  a name, not a path
    text = f"{type(error).__name__}{where}"
    hint = "This is a bug; repeat with --debug and report it"
    return (
        find_system_error(error)
        or find_lost_peer(error)
        or registry.find_plugin_error(error)
        or describe_tight_memory(text)
        or UserError(Reason.INTERNAL, text, hint=hint, exit_code=Exit.INTERNAL_ERROR)
    )


def find_lost_peer(error: BaseException) -> UserError | None:
    """As `distributed.find_lost_peer`, without an import of torch."""
    distributed = sys.modules.get("bitimely_core.train.distributed")
    return None if distributed is None else distributed.find_lost_peer(error)


def report_error(error: UserError) -> int:
    """Print an error's lines (and its JSON object), of several processes of a training the first that has one, and return its exit code."""
    if (distributed := sys.modules.get("bitimely_core.train.distributed")) is not None:
        screen.silent = not distributed.claim_report(of_loss=error.code is Reason.INCOMPLETE)
    if screen.debug and error.exit_code != Exit.INTERNAL_ERROR:
        traceback.print_exc()
    shown = [error.finding, *(f for f in error.details if f.message != error.finding.message)]
    with suppress(OSError):  # the screen may be a file on a full disk
        screen.print_findings(shown, "ingest_report.json" if error.report else "the message of --json")
        if screen.json:
            fault = {**error.finding.as_dict(), "details": [f.as_dict() for f in error.details]}
            computed = {} if error.result is None else {"result": error.result}
            screen.result(error.report or {"error": fault, **computed, "exit_code": int(error.exit_code)})
    return int(error.exit_code)


def close_output(code: int) -> int:
    """Flush what was printed; the exit code, that of a full disk where it could not be printed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # prevents a second error at exit
            if isinstance(error, BrokenPipeError):
                continue
            code = report_error(convert_error(error)) if stream is sys.stdout and code == Exit.OK else code or int(Exit.RESOURCES)
    return code
