"""Verbs on whole experiments: run, demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitimely_cli.options import Debug, Devices, DryRun, Json, Out, Set, Workspace, shard
from bitimely_cli.screen import screen


def run(
    pipeline: Annotated[str, typer.Argument(help="Name of a shipped recipe or path of a TOML file.", metavar="PIPELINE")],
    only: Annotated[list[str] | None, typer.Option("--only", help="Only cells that hold this text, for example a model or a data set; may be repeated.")] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Cells at a time.")] = 1,
    devices: Devices = None,
    part: Annotated[str | None, typer.Option("--shard", metavar="k/n", help="Part k of n, for a job array.")] = None,
    set_: Set = None,
    dry_run: DryRun = False,
    workspace: Workspace = Path("workspace"),
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Run a whole experiment; finished stages are skipped, stopped ones continue.

    Example: bitimely run smoke
    """
    from bitimely_core import pipeline as recipes

    with screen.progress() as progress:
        result = recipes.run(
            pipeline, workspace=workspace, only=only or [], jobs=jobs, devices=devices or 1, shard=shard(part), assignments=set_ or [],
            dry_run=dry_run, progress=progress, say=screen.note,
        )  # fmt: skip
    screen.table(["stage", "state", "detail"], [[s["stage"], s["state"], s["detail"]] for s in result["stages"]])
    screen.result(result, [f"report: {result['report']}"] if result.get("report") else [])
    return int(result["exit_code"])


def demo(
    claims: Annotated[bool, typer.Option("--claims", help="Claims histories in the place of sleep recordings.")] = False,
    out: Out = None,
    dry_run: DryRun = False,
    workspace: Workspace = Path("workspace"),
    json: Json = False,
    debug: Debug = False,
) -> int:
    """All verbs on data that it makes itself, to a report, in a few minutes on two cores. Prints the commands that it runs.

    Example: bitimely demo
    """
    from bitimely_core import pipeline as recipes

    with screen.progress() as progress:
        result = recipes.demo(claims=claims, out=out or workspace / "demo", dry_run=dry_run, progress=progress, say=screen.say)
    screen.result(result, [] if dry_run else [result["verdict"], f"report: {result['report']}"])
    return 0


VERBS = (run, demo)
