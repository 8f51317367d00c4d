"""`bitimely`: registers the verbs, runs one, turns errors into exit codes. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer

from bitimely_cli import data, experiments, training
from bitimely_cli.app import app
from bitimely_cli.data_help import DataCommand
from bitimely_cli.screen import screen
from bitimely_core.errors import Exit, Reason, UserError, safe_text, usage_error
from bitimely_core.registry import unknown
from bitimely_core.system_errors import find_system_error

UsageError: Any = typer.BadParameter.__mro__[1]  # click's, whether typer brings its own copy of click or not

for verbs in (data, training, experiments):
    for verb in verbs.VERBS:
        extra = {"ignore_unknown_options": True} if verb is training.analyze else {}  # options of the kind of analysis
        kind = DataCommand if verb in {data.ingest, data.tokenize} else None
        app.command(name=verb.__name__.rstrip("_"), cls=kind, context_settings=extra)(verb)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `bitimely` with `argv` (default: the process's own) and return its exit code."""
    screen.json, screen.debug, screen.n_printed = False, False, 0
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "PASSIVE"
    )  # threads that wait by spinning make a step ten times slower beside any other busy process
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = typer.main.get_command(app).main(args=arguments, prog_name="bitimely", standalone_mode=False)
        return int(code) if isinstance(code, int) else Exit.OK
    except UserError as error:
        return report_error(error)
    except UsageError as error:
        return report_error(convert_usage_error(error))
    except typer.Exit as error:
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return report_error(UserError(Reason.INTERRUPTED, "stopped", hint="Repeat the command to go on", exit_code=Exit.INTERRUPTED))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader closed the pipe: prevents a second error at exit
        return Exit.OK
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # Rust's panics are no Exceptions
        fault = find_system_error(error)
        if fault is not None:
            return report_error(fault)
        if screen.debug:
            traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__} in {os.path.basename(where.filename)}:{where.lineno}"  # noqa: PTH119  a name, not a path
        return report_error(
            UserError(Reason.INTERNAL, text, hint="This is a bug; repeat with --debug and report it", exit_code=Exit.INTERNAL_ERROR)
        )


def report_error(error: UserError) -> int:
    """Print an error's lines (and its JSON object) and return its exit code."""
    if screen.debug and error.exit_code != Exit.INTERNAL_ERROR:
        traceback.print_exc()
    shown = [error.finding, *(f for f in error.details if f.message != error.finding.message)]
    screen.print_findings(shown, "ingest_report.json" if error.report else "the message of --json")
    if screen.json:
        screen.result(
            error.report
            or {"error": {**error.finding.as_dict(), "details": [f.as_dict() for f in error.details]}, "exit_code": int(error.exit_code)}
        )
    return int(error.exit_code)


def convert_usage_error(error: Any) -> UserError:
    """A usage error of Click as a UserError, with the closest known names."""
    context = error.ctx
    action = f"See {context.command_path} --help" if context is not None else "See bitimely --help"
    option = getattr(error, "option_name", None)
    if option is not None and hasattr(error, "possibilities"):
        known = [name for parameter in context.command.params for name in parameter.opts] if context is not None else []
        close = difflib.get_close_matches(option, known, n=2, cutoff=0.5)
        action = f"Did you mean {' or '.join(close)}?" if close else action
        return usage_error(f"no option {safe_text(option)}", hint=action)
    commands = list(getattr(context.command, "commands", {})) if context is not None else []
    if commands and "No such command" in error.message:
        name = error.message.split("'")[1] if "'" in error.message else ""
        return unknown("command", name, commands)
    return usage_error(error.format_message().rstrip("."), hint=action)
