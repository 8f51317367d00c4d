"""Registers the verbs and runs one. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import typer

from bitimely_cli import data, experiments, training
from bitimely_cli.app import app
from bitimely_cli.data_help import DataCommand
from bitimely_core.errors import Exit, UserError, safe_text, unknown_name_error, usage_error

# click's, whether typer brings its own copy of click or not
UsageError: Any = typer.BadParameter.__mro__[1]

for verbs in (data, training, experiments):
    for verb in verbs.VERBS:
        # options of the kind of analysis
        extra = {"ignore_unknown_options": True} if verb is training.analyze else {}
        kind = DataCommand if verb in {data.ingest, data.tokenize} else None
        app.command(name=verb.__name__.rstrip("_"), cls=kind, context_settings=extra)(verb)


def run_command(arguments: Sequence[str]) -> int:
    """Run one verb; its exit code. Raises UserError, also for wrong usage, and
    KeyboardInterrupt.
    """
    try:
        code = typer.main.get_command(app).main(
            args=list(arguments), prog_name="bitimely", standalone_mode=False
        )
    except UsageError as error:
        raise convert_usage_error(error) from None
    except typer.Exit as error:
        return error.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    return int(code) if isinstance(code, int) else Exit.OK


def convert_usage_error(error: Any) -> UserError:
    """A usage error of Click as a UserError, with the closest known names."""
    context = error.ctx
    action = f"See {context.command_path} --help" if context is not None else "See bitimely --help"
    option = getattr(error, "option_name", None)
    if option is not None and hasattr(error, "possibilities"):
        known = (
            [name for parameter in context.command.params for name in parameter.opts]
            if context is not None
            else []
        )
        # before the verb, where there are few
        is_early = context is not None and hasattr(context.command, "commands")
        close = difflib.get_close_matches(option, known, n=2, cutoff=0.8 if is_early else 0.5)
        action = (
            f"Did you mean {' or '.join(close)}?"
            if close
            else "Write the options of a verb after it"
            if is_early
            else action
        )
        return usage_error(f"no option {safe_text(option)}", hint=action)
    commands = list(getattr(context.command, "commands", {})) if context is not None else []
    if commands and "No such command" in error.message:
        name = error.message.split("'")[1] if "'" in error.message else ""
        return unknown_name_error("command", name, commands)
    return usage_error(error.format_message().rstrip("."), hint=action)
