"""Registers the verbs and runs one. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import chain
from typing import Any

import typer

from bitimely_cli import data_verbs, experiments, run_verbs
from bitimely_cli.app import app
from bitimely_cli.data_help import DataCommand
from bitimely_core.errors import Exit, UserError, safe_text, unknown_name_error, usage_error

# click's, whether typer brings its own copy of click or not
UsageError: Any = typer.BadParameter.__mro__[1]

for verbs in (data_verbs, run_verbs, experiments):
    for verb in verbs.VERBS:
        # options of the kind of analysis
        extra = {"ignore_unknown_options": True} if verb is run_verbs.analyze else {}
        kind = DataCommand if verb in {data_verbs.ingest, data_verbs.tokenize} else None
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
    command = None if context is None else context.command
    option = getattr(error, "option_name", None)
    if option is not None and hasattr(error, "possibilities"):
        hint = _suggest_option(option, command) or _suggest_help(context)
        return usage_error(f"no option {safe_text(option)}", hint=hint)
    commands = list(getattr(command, "commands", ()))
    if commands and "No such command" in error.message:
        name = error.message.partition("'")[2].partition("'")[0]
        return unknown_name_error("command", name, commands)
    hint = _suggest_help(context)
    if "unexpected extra argument" in error.message and "--data" in _list_options(command):
        hint = f"Data are given as --data NAME. {hint}"
    return usage_error(error.format_message().rstrip("."), "", hint)


def _list_options(command: Any) -> list[str]:
    return (
        [] if command is None else list(chain.from_iterable(item.opts for item in command.params))
    )


def _suggest_help(context: Any) -> str:
    return f"See {'bitimely' if context is None else context.command_path} --help"


def _suggest_option(option: str, command: Any) -> str:
    """The closest options, or where options stand; empty: neither."""
    # before the verb, where there are few
    is_early = hasattr(command, "commands")
    least = 0.8 if is_early else 0.5
    close = difflib.get_close_matches(option, _list_options(command), 2, least)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    return "Write the options of a verb after it" if is_early else ""
