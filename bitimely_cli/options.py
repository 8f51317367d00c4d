"""The options that verbs share, each written once, and the groups in which verbs take them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from bitimely_cli.screen import screen
from bitimely_core.errors import safe_text, usage_error


def _json(value: bool) -> bool:
    screen.json = screen.json or value
    return value


def _debug(value: bool) -> bool:
    screen.debug = screen.debug or value
    return value


Workspace = Annotated[
    Path, typer.Option("--workspace", "-w", envvar="BITIMELY_WORKSPACE", help="Folder that holds cache, tokens, runs and reports.")
]
Json = Annotated[bool, typer.Option("--json", callback=_json, is_eager=True, help="One JSON object on stdout; all else on stderr.")]
Debug = Annotated[bool, typer.Option("--debug", callback=_debug, is_eager=True, help="Show tracebacks.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, sizes and estimates; write nothing.")]

Data = Annotated[list[str] | None, typer.Option("--data", help="Data set or view, for example sleep-edf/staging; may be repeated.")]
OneData = Annotated[str | None, typer.Option("--data", help="Data set or view, for example sleep-edf/staging.")]
Run = Annotated[str, typer.Argument(help="Name or folder of a run.", metavar="RUN")]
RunName = Annotated[str | None, typer.Option("--run", help="Name of the new run (default: made from the settings).")]
Config = Annotated[Path | None, typer.Option("--config", help="Recipe file (TOML).")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting, for example model.tokenizer=patch; may be repeated."),
]
Epochs = Annotated[int | None, typer.Option("--epochs", help="Passes over the training split.")]
Steps = Annotated[int | None, typer.Option("--steps", help="Stop after so many optimizer steps.")]
BatchSize = Annotated[int | None, typer.Option("--batch-size", help="Windows a step, over all processes.")]
Accumulate = Annotated[int | None, typer.Option("--accumulate", help="Parts that a batch is split into to save memory.")]
Lr = Annotated[float | None, typer.Option("--lr", help="Largest learning rate.")]
Tune = Annotated[
    str | None,
    typer.Option(
        "--tune",
        metavar="N|LR,LR...",
        help="Try N learning rates around the preset's, or these, in short trainings; the best on the validation split is used.",
    ),
]
Precision = Annotated[str | None, typer.Option("--precision", help="fp32 or bf16.")]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda or mps.")]
Devices = Annotated[int | None, typer.Option("--devices", help="Processes that train together.")]
Compile = Annotated[bool, typer.Option("--compile", help="Use torch.compile.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of weights, batches and masks.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an unfinished run (done anyway when the settings are the same).")]
ForceNew = Annotated[bool, typer.Option("--force-new", help="Replace what exists under other settings.")]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Do not compare checksums; said in every report.")]
Out = Annotated[Path | None, typer.Option("--out", help="Where to write.")]


Group = dict[str, tuple[Any, Any]]
"""Parameter -> its annotation and default."""

HOME: Group = {"workspace": (Workspace, Path("workspace")), "json": (Json, False), "debug": (Debug, False)}
WRITING: Group = {"dry_run": (DryRun, False), **HOME}
READING: Group = {"no_verify": (NoVerify, False), **WRITING}
SCORING: Group = {"batch_size": (BatchSize, None), "device": (Device, None), **READING}
MAKING: Group = {"no_verify": (NoVerify, False), "force_new": (ForceNew, False), **WRITING}
TRAINING: Group = {
    "epochs": (Epochs, None),
    "steps": (Steps, None),
    "batch_size": (BatchSize, None),
    "accumulate": (Accumulate, None),
    "lr": (Lr, None),
    "tune": (Tune, None),
    "precision": (Precision, None),
    "device": (Device, None),
    "devices": (Devices, None),
    "compile": (Compile, False),
    "seed": (Seed, None),
}
STARTING: Group = {
    "config": (Config, None),
    "assignments": (Set, None),
    "run": (RunName, None),
    "resume": (Resume, False),
    "force_new": (ForceNew, False),
    "no_verify": (NoVerify, False),
    **WRITING,
}
HEARD = ("json", "debug", "resume")  # their callbacks have acted; an unfinished run is continued anyway


def told(value: Any) -> bool:
    """Whether an option was given; 0 is."""
    return value is not None and value is not False and value != []


def taking(**groups: Group) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command the options of groups, each where the command has the parameter of the group's name.

    What was given arrives there as one dict under the names of the library: `no_verify` as `verify=False`; what was not given is absent.
    """

    def decorated(command: Callable[..., int]) -> Callable[..., int]:
        hints = get_type_hints(command, include_extras=True)
        shown = {
            name: (annotation, default)
            for parameter in inspect.signature(command).parameters.values()
            for name, (annotation, default) in groups.get(
                parameter.name, {parameter.name: (hints[parameter.name], parameter.default)}
            ).items()
        }

        @functools.wraps(command)
        def whole(**given: Any) -> int:
            taken = {
                into: {name: value for name in group if told(value := given.pop(name)) and name not in HEARD}
                for into, group in groups.items()
            }
            for options in taken.values():
                if options.pop("no_verify", False):
                    options["verify"] = False
            return command(**given, **taken)

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter(name, keyword, default=d, annotation=a) for name, (a, d) in shown.items()]
        whole.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
        whole.__annotations__ = {**{name: annotation for name, (annotation, _) in shown.items()}, "return": int}
        return whole

    return decorated


def settings_of(**sections: dict[str, Any]) -> dict[str, Any]:
    """The sections without what was not given: `{"train": {"lr": 1e-3}}` for `settings_of(train={"lr": 1e-3, "seed": None}, model={})`."""
    given = {name: {key: value for key, value in section.items() if told(value)} for name, section in sections.items()}
    return {name: section for name, section in given.items() if section}


def shard(text: str | None) -> tuple[int, int] | None:
    """`k/n` as (k, n) with 1 <= k <= n. Raises UserError (config)."""
    if text is None:
        return None
    k, _, n = text.partition("/")
    if k.isdigit() and n.isdigit() and 1 <= int(k) <= int(n):
        return int(k), int(n)
    raise usage_error(f"--shard {safe_text(text)}", "expected k/n with 1 <= k <= n", "For example --shard 1/4")
