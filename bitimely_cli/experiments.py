"""Commands that run experiments of several stages: run, demo."""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer import Argument, Option

from bitimely_cli.app import app
from bitimely_cli.completion import complete
from bitimely_cli.following import name_next
from bitimely_cli.options import (
    BuildOptions,
    CommonOptions,
    OptionGroup,
    Out,
    Run,
    Set,
    WriteOptions,
    expand_options,
    parse_shard,
    refresh_page,
)
from bitimely_cli.screen import screen, span
from bitimely_core.errors import Exit, Reason, UserError, usage_error
from bitimely_core.registry import Choices
from bitimely_core.store import storage

On = Annotated[
    str | None,
    Option(
        "--on",
        metavar="DEVICE",
        help="As --estimate, on this accelerator, h100 or h200; nothing is timed.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(OptionGroup):
    """What of a recipe is run, how, and where."""

    only: Annotated[
        list[str] | None,
        Option(help="Only trainings whose row or data hold this text; may be repeated."),
    ] = None
    jobs: Annotated[int, Option(min=1, max=1024, help="Cells at a time.")] = 1
    devices: Annotated[
        int | None,
        Option(min=1, max=1024, help="Number of processes of a training (one per device)."),
    ] = None
    part: Annotated[
        str | None, Option("--shard", metavar="k/n", help="Part k of n, for a job array.")
    ] = None
    leak_free: Annotated[
        bool,
        Option(
            "--leak-free",
            help="Split by subject, strict objective, where the recipe has the paper's.",
        ),
    ] = False
    preset: Annotated[
        str | None,
        Option(
            help="Train at this preset, under a name of its own; paper: the paper's.",
            autocompletion=complete("presets"),
        ),
    ] = None
    set_: Set = None
    estimate: Annotated[
        bool,
        Option(
            "--estimate",
            help="As --dry-run, with parameters, operations, hours and disk; steps are timed here.",
        ),
    ] = False
    on: On = None
    slurm: Annotated[
        Path | None,
        Option(
            metavar="OUT.sh",
            help="Write a script for sbatch in the place of running: an array of --jobs tasks.",
        ),
    ] = None
    sbatch: Annotated[
        list[str] | None,
        Option(metavar="NAME=VALUE", help="With --slurm: an option of sbatch; may be repeated."),
    ] = None


@expand_options
def run(
    pipeline: Annotated[
        str,
        Argument(
            help="Name of a shipped recipe or path of a TOML file.",
            metavar="PIPELINE",
            autocompletion=complete("pipelines"),
        ),
    ],
    *,
    options: RecipeOptions,
    write: WriteOptions,
) -> int:
    """Run an experiment; finished stages are skipped, stopped ones continue. Several calls on one
    workspace share the work.

    Example: bitimely run smoke
    """
    from bitimely_core import pipeline as recipes

    arguments = {**options.collect(), **write.collect()}
    slurm, sbatch = (arguments.pop(name, None) for name in ("slurm", "sbatch"))
    script = None
    if slurm is not None or sbatch:
        script = _format_script(pipeline, options, write.workspace)
        arguments["dry_run"] = True
    arguments["assignments"] = arguments.pop("set_", [])
    arguments["shard"] = parse_shard(arguments.pop("part", None))
    with (
        screen.show_partial(lambda computed: _list_stages(computed["stages"])),
        screen.stages() as watch,
    ):
        result = recipes.run(pipeline, watch=watch, **arguments)
    if script is not None:
        return _show_script(result, script, slurm, write.dry_run)
    if "assumptions" in result:
        return _show_estimates(result, options.on or "this device")
    if "total" in result:
        return _show_plan(result)
    rows = [[s["stage"], s["state"], span(s["seconds"]), s["detail"]] for s in result["stages"]]
    screen.table(["stage", "state", "time", "detail"], rows)
    screen.result(result, [f"report: {result['report']}"] if result.get("report") else [])
    return int(result["exit_code"])


def _show_script(result: Mapping[str, Any], script: str, path: Path, dry_run: bool) -> int:
    """Write the script of `--slurm`, or show it."""
    lines = script.splitlines()
    if not dry_run:
        storage.write_bytes(path, script.encode())
        lines = [f"script: {path}", f"submit it with: sbatch {shlex.quote(str(path))}"]
    screen.result({**result, "script": str(path), "text": script}, lines)
    return Exit.OK


def _show_plan(result: Choices) -> int:
    """The stages of a dry run."""
    screen.table(["stage"], [[stage["stage"]] for stage in result["stages"]])
    total = result["total"]
    line = f"{total['stages']} stages, {total['trainings']} trainings; --estimate adds their hours"
    screen.result(result, [line])
    return Exit.OK


def _show_estimates(result: Mapping[str, Any], device: str) -> int:
    """The table of estimates, and its sum."""
    rows = []
    for stage in result["stages"]:
        flops = stage.get("flops")
        work = round(flops / 1e12, 2) if flops else None
        time = span(stage.get("seconds"))
        rows.append([stage["stage"], stage.get("parameters"), stage.get("windows"), work, time])
    screen.table(["stage", "parameters", "windows", "TFLOP", "time"], rows)
    total = result["total"]
    line = (
        f"{total['stages']} stages, {total['trainings']} trainings: about "
        f"{span(total['seconds'])} on {device}, {total['bytes'] / 2**30:.1f} GiB of runs"
    )
    if total["unknown"]:
        line += f"; {total['unknown']} not counted, their data is not here"
    screen.result(result, [line, f"rough: {result['assumptions']}"])
    return Exit.OK


def _format_script(pipeline: str, options: RecipeOptions, workspace: Path) -> str:
    """The script of `--slurm`. Raises UserError (exit 2) for options that do not go together, and
    where it cannot be written.
    """
    from bitimely_core.pipeline import slurm

    if options.slurm is None or options.part is not None:
        text = "--shard with --slurm, whose tasks share the stages by themselves"
        raise usage_error(
            "--sbatch without --slurm" if options.slurm is None else text,
            "expected --slurm OUT.sh with --jobs N and --sbatch NAME=VALUE",
            "Leave one of them out",
        )
    slurm.check_script(options.slurm)
    arguments = [pipeline]
    values = {**options.collect(), "workspace": workspace}
    for name in ("only", "preset", "set_", "devices", "workspace"):
        value = values.get(name, [])
        flag = f"--{name.rstrip('_')}"
        arguments += [f"{flag}={item}" for item in (value if isinstance(value, list) else [value])]
    if options.leak_free:
        arguments.append("--leak-free")
    return slurm.format_script(pipeline, arguments, options.jobs, options.sbatch or [])


def _list_stages(stages: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{stage['state']}: {stage['stage']}" + (f": {stage['detail']}" if stage["detail"] else "")
        for stage in stages
    ]


class Tour(NamedTuple):
    """What a user would type, from data to predictions; `{home}` is the folder of the tour."""

    steps: tuple[str, ...]
    runs: tuple[str, ...]  # that they train
    page: str  # of its predictions, in `{home}`


NIGHTS = Tour(
    steps=(
        "ingest synthetic",
        "train --data synthetic/staging --steps 300",
        "train features --data synthetic/staging",
        "evaluate resnet-staging",
        "evaluate features-staging --compare resnet-staging",
        "ingest synthetic --size night --seed 7 -w {home}/new",
        "predict features-staging {home}/new/cache/synthetic --out {home}/night",
    ),
    runs=("resnet-staging", "features-staging"),
    page="night/report.html",
)
COHORT = Tour(
    steps=(
        "ingest synthetic-claims --subjects 3000 --no-select",
        "train --data synthetic-claims",
        "evaluate trees-synthetic-claims",
        "ingest synthetic-claims --subjects 500 --seed 7 --no-select -w {home}/new",
        "predict trees-synthetic-claims {home}/new/cache/synthetic-claims --out {home}/cohort",
    ),
    runs=("trees-synthetic-claims",),
    page="cohort/report.html",
)


@expand_options
def demo(
    *,
    claims: Annotated[bool, Option("--claims", help="The cohort of claims alone.")] = False,
    out: Out = None,
    write: WriteOptions,
) -> int:
    """Stage a night and score a cohort of claims with the recommended models, on made-up data, in a
    few minutes. Prints the commands that it runs, on one thread each.

    Example: bitimely demo
    """
    home = out or write.workspace / "demo"
    tours = (COHORT,) if claims else (NIGHTS, COHORT)
    steps = itertools.chain.from_iterable(tour.steps for tour in tours)
    commands = [_make_command(step, home) for step in steps]
    lines = [shlex.join(["bitimely", *command]) for command in commands]
    if write.dry_run:
        screen.result({"format_version": 1, "commands": lines}, lines)
        return 0
    from bitimely_core import workflows

    _run_commands(commands)
    runs = itertools.chain.from_iterable(tour.runs for tour in tours)
    result = workflows.demonstrate(home, list(runs), [home / tour.page for tour in tours])
    refresh_page(home)
    closing = [
        *result["verdict"].splitlines(),
        *(f"report: {page}" for page in result["pages"]),
        *(f"next, with your own {kind}" for kind in NEXT),
    ]
    screen.result({**result, "commands": lines}, closing)
    return 0


NEXT = ("recordings: bitimely ingest generic FOLDER", "claims: bitimely ingest pophr FOLDER")


def _run_commands(commands: Sequence[Sequence[str]]) -> None:
    """On one thread, for the same digits with any OMP_NUM_THREADS; all they print goes to stderr
    under --json.
    """
    from bitimely_core.train.devices import use_threads

    with redirect_stdout(sys.stderr if screen.json else sys.stdout), use_threads(1):
        wanted, screen.json = screen.json, False
        try:
            for command in commands:
                _run_command(command)
        finally:
            screen.json = wanted  # also for the object of an error
    # the made-up claims have faulty rows on purpose: the tour itself is complete
    screen.has_errors = False


def _make_command(step: str, home: Path) -> list[str]:
    """The arguments of a step, in the workspace `home` where it names none."""
    words = [word.format(home=home) for word in step.split()]
    return words if "-w" in words else [*words, "-w", str(home)]


def _run_command(command: Sequence[str]) -> None:
    """Raises UserError where it ends with another exit code than 0 or 3."""
    line = shlex.join(["bitimely", *command])
    screen.print_line(f"$ {line}")
    code = typer.main.get_command(app).main(
        args=list(command), prog_name="bitimely", standalone_mode=False
    )
    screen.print_line()
    if code not in {None, Exit.OK, Exit.PARTIAL}:
        raise UserError(
            Reason.INCOMPLETE,
            f"ended with exit code {code}",
            "expected 0 or 3",
            file=line,
            exit_code=int(code),
        )


@expand_options
def reproduce(run: Run, build: BuildOptions) -> int:
    """Train a run again from what it says about itself, and compare weights and loss, or say what
    differs.

    Example: bitimely reproduce tiny-staging
    """
    from bitimely_core import workflows

    with screen.progress():
        result = workflows.reproduce(run, **build.collect())
    lines = [f"differs: {line}" for line in result["differences"]] or [
        "data, versions and environment are as they were"
    ]
    if build.dry_run:
        screen.result(result, lines)
        return Exit.OK
    if not result["trained"]:
        lines.append(f"{result['again']} was there already; --force-new trains it again")
    if result["same_weights"]:
        lines.append("the weights are the same, bit for bit")
    else:
        former, loss = result["loss"]
        verdict = "the same to rounding" if result["same_loss"] else "the numbers differ"
        lines.append(f"last loss {loss}, it was {former}: {verdict}")
    lines += [f"differs: {line}" for line in result["changes"]]
    if result["changes"]:
        lines.append("one seed cannot decide between two methods")
    screen.result(result, lines)
    return int(Exit.OK if result["reproduced"] else Exit.INTEGRITY)


@expand_options
def export(
    run: Run,
    *,
    out: Out = None,
    push: Annotated[
        str | None, Option(metavar="REPO", help="Repository of a model hub (extra hub).")
    ] = None,
    format: Annotated[  # noqa: A002
        str, Option(metavar="safetensors|onnx", help="onnx: with model.onnx as well (extra onnx).")
    ] = "safetensors",
    write: WriteOptions,
) -> int:
    """Weights, settings, card and scores of a run in one folder for others; nothing in it is about
    a person.

    Example: bitimely export tiny --out ./tiny
    """
    from bitimely_core import workflows

    result = workflows.export(run, out=out, push=push, format=format, **write.collect())
    sizes = {name: Path(result["out"], name) for name in result["files"]}
    rows = [[name, path.stat().st_size] for name, path in sizes.items() if path.is_file()]
    screen.table(["file", "bytes"], rows)
    screen.result(
        result,
        [
            *screen.summarize(result["notices"], write.workspace),
            f"{len(result['files'])} files in {result['out']}",
            *filter(None, [result["next"] and f"read by: {result['next']}"]),
            name_next(run, write.workspace),
        ],
    )
    return Exit.OK


@expand_options
def dashboard(
    *,
    out: Out = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Show what would be written; write nothing.")
    ] = False,
    common: CommonOptions,
) -> int:
    """One page that leads to all data, runs, scores and reports of the workspace. Verbs that write
    refresh it.

    Example: bitimely dashboard
    """
    from bitimely_core import workflows

    result = workflows.dashboard(workspace=common.workspace, out=out, dry_run=dry_run)
    notices = [] if dry_run else result["notices"]  # those that are shown are stored
    lines = screen.summarize(notices, common.workspace, result["verdict"])
    screen.result(result, [*lines, f"page: {result['page']}"])
    return Exit.OK


VERBS = (run, demo, dashboard, reproduce, export)
