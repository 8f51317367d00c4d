"""The options that verbs share, each written once: name, type, help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bitimely_cli.screen import screen
from bitimely_core.errors import Exit, Reason, UserError, safe_text


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
Precision = Annotated[str | None, typer.Option("--precision", help="fp32 or bf16.")]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda or mps.")]
Devices = Annotated[int | None, typer.Option("--devices", help="Processes that train together.")]
Compile = Annotated[bool, typer.Option("--compile", help="Use torch.compile.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of weights, batches and masks.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an unfinished run (done anyway when the settings are the same).")]
ForceNew = Annotated[bool, typer.Option("--force-new", help="Replace what exists under other settings.")]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Do not compare checksums; said in every report.")]
Out = Annotated[Path | None, typer.Option("--out", help="Where to write.")]


def given(**flags: Any) -> dict[str, Any]:
    """The flags that were given: `{"train.lr": 1e-3}` for `given(**{"train.lr": 1e-3, "train.seed": None})`, nested."""
    out: dict[str, Any] = {}
    for name, value in flags.items():
        if value is None or value is False:
            continue
        section, key = name.split("__")
        out.setdefault(section, {})[key] = value
    return out


def shard(text: str | None) -> tuple[int, int] | None:
    """`k/n` as (k, n) with 1 <= k <= n. Raises UserError (config)."""
    if text is None:
        return None
    k, _, n = text.partition("/")
    if k.isdigit() and n.isdigit() and 1 <= int(k) <= int(n):
        return int(k), int(n)
    raise UserError(
        Reason.CONFIG,
        f"--shard {safe_text(text)}",
        wanted="expected k/n with 1 <= k <= n",
        action="For example --shard 1/4",
        exit_code=Exit.USAGE,
    )
