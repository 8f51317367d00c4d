"""`bitimely`: runs a verb and turns every error into one line and an exit code.

The verbs and their libraries are imported when one runs: an error of their import is reported too.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from bitimely_cli.screen import screen
from bitimely_cli.signals import stop_error, watch_signals
from bitimely_core import registry
from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.system_errors import find_system_error

COLLECT_EVERY = (50_000, 20, 100)  # the default takes a tenth of a short verb, while libraries load


def __getattr__(name: str) -> Any:
    """`app`, the Typer application with all verbs."""
    if name != "app":
        raise AttributeError(name)
    from bitimely_cli import app, verbs  # noqa: F401  the verbs register themselves

    return app.app


def main(argv: Sequence[str] | None = None) -> int:
    """Run `bitimely` with `argv` (default: the process's own) and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    screen.json = "--json" in arguments
    screen.debug = screen.has_errors = False
    screen.n_printed, screen.workspace_option = 0, ""
    prepare_streams()
    prepare_libraries()
    return close_output(run_verb(arguments))


def prepare_streams() -> None:
    """Make the standard streams safe to print to.

    What is written to a closed stream goes nowhere, and no file gets its descriptor. Characters
    that a stream cannot show are replaced.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123  open to the end
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def prepare_libraries() -> None:
    """Set what libraries read when they are loaded, and how often Python searches for garbage."""
    # threads that wait by spinning make a step ten times slower beside any other busy process
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # 2^4 cycles, not 2^26
    # no stack of C++ where another process of a training is lost
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    gc.set_threshold(*COLLECT_EVERY)
    atexit.register(skip_last_search)


def skip_last_search() -> None:
    """End the process without one more search for garbage in all that the libraries hold."""
    if "triton" not in sys.modules:  # it would report the rest as leaks
        gc.freeze()


def run_verb(arguments: list[str]) -> int:
    """The exit code of a verb; its error is printed."""
    try:
        return run_until_stopped(arguments)
    except BrokenPipeError:
        return Exit.OK  # the reader closed the pipe
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich has closed the stream
            return Exit.OK
        raise
    except BaseException as error:  # Rust's panics are no Exceptions
        return report_error(convert_error(error))


def run_until_stopped(arguments: list[str]) -> int:
    """The exit code of a verb, or of the signal that stopped it, which is printed.

    Raises what the verb raises.
    """
    with watch_signals(report_error) as received:
        try:
            from bitimely_cli.verbs import run_command

            code = run_command(arguments)
        except KeyboardInterrupt:
            return report_error(stop_error(received[0] if received else signal.SIGINT))
        if code == Exit.INTERRUPTED and received:  # newer versions of typer catch KeyboardInterrupt
            return report_error(stop_error(received[0]))
    print_broken_plugins()
    return Exit.PARTIAL if code == Exit.OK and screen.has_errors else code


def print_broken_plugins() -> None:
    """Warnings of plug-ins that could not be loaded, each once."""
    for finding in registry.broken_plugins.values():
        screen.print_finding(finding)
    registry.broken_plugins.clear()


def convert_error(error: BaseException) -> UserError:
    """Any error that ends a verb as a UserError."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return stop_error(signal.SIGINT)
    if screen.debug:
        traceback.print_exception(error)
    return (
        find_system_error(error)
        or find_lost_peer(error)
        or registry.find_plugin_error(error)
        or make_internal_error(error)
    )


def find_lost_peer(error: BaseException) -> UserError | None:
    """As `distributed.find_lost_peer`, without an import of torch."""
    distributed = sys.modules.get("bitimely_core.train.distributed")
    return None if distributed is None else distributed.find_lost_peer(error)


def make_internal_error(error: BaseException) -> UserError:
    """The UserError (internal, exit 1) of a defect: type and place of the exception.

    Its text is left out, which may hold values of the data.
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return UserError(
        Reason.INTERNAL,
        f"{type(error).__name__}{place}",
        hint="This is a bug; repeat with --debug and report it",
        exit_code=Exit.INTERNAL_ERROR,
    )


def report_error(error: UserError) -> int:
    """Print an error's lines, under --json also its object, and return its exit code.

    Of several processes of a training, the first one that has an error prints.
    """
    if (distributed := sys.modules.get("bitimely_core.train.distributed")) is not None:
        screen.silent = not distributed.claim_report(of_loss=error.code is Reason.INCOMPLETE)
    if screen.debug and error.exit_code != Exit.INTERNAL_ERROR:
        traceback.print_exc()
    first, *details = [error.finding, *error.details]
    if error.exact and not screen.json:
        first, *details = error.exact
    details = [detail for detail in details if detail.message != first.message]
    report_name = "ingest_report.json" if error.report else "the message of --json"
    with suppress(OSError):  # the screen may be a file on a full disk
        screen.make_room()
        screen.print_findings([first, *details], report_name)
        if screen.json:
            screen.result(error.report or make_error_object(error))
    return int(error.exit_code)


def make_error_object(error: UserError) -> dict[str, object]:
    """What --json prints for an error, with what was computed before it."""
    details = [detail.as_dict() for detail in error.details]
    computed = {} if error.result is None else {"result": error.result}
    body = {**error.finding.as_dict(), "details": details}
    return {"error": body, **computed, "exit_code": int(error.exit_code)}


def close_output(code: int) -> int:
    """Flush what was printed; the exit code, that of a full disk where it could not be printed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            discard_output(stream)  # the reader closed the pipe
        except OSError as error:
            discard_output(stream)
            if code == Exit.OK and stream is sys.stdout:
                code = report_error(convert_error(error))
            code = code or int(Exit.RESOURCES)
    return code


def discard_output(stream: TextIO) -> None:
    """What is left in a stream goes nowhere: it would raise a second error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
