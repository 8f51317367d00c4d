"""The tables of docs/results-full.md, from a workspace in which the recipes have been run: python
docs/results.py WORKSPACE [RECIPE...].

Each section names the commands that make its table; sections of recipes that are not given stay as
they are.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("results-full.md")
COMMANDS = {
    "models-epilepsy": ("bitimely ingest epilepsy BONN", "bitimely run models-epilepsy"),
    "models-cinc2017": (
        "bitimely ingest generic CINC2017 --map examples/maps/cinc2017.toml",
        "bitimely run models-cinc2017",
    ),
    "open-epilepsy": ("bitimely ingest epilepsy BONN", "bitimely run open-epilepsy"),
    "open-bidmc": (
        "bitimely ingest bidmc BIDMC",
        'bitimely run open-bidmc --only "strict 0.2" --only "scratch 0.2" --only "leaking 0.2" --only "strict 0.05 bidmc/spo2"',
        'bitimely run open-bidmc --only "0.05 bidmc/hr" --only "0.05 bidmc/rr" --only "1.0 bidmc/hr" --only "1.0 bidmc/rr"',
    ),
    "open-emg": (
        "bitimely ingest ptb-xl PTB-XL",
        "bitimely ingest emg EMG",
        "bitimely run open-emg",
    ),
    "open-p12": ("bitimely ingest physionet-2012 PHYSIONET-2012", "bitimely run open-p12"),
    "open-ieee-ppg": (
        "bitimely ingest ieee-ppg IEEE-SPC2015",
        "bitimely run open-ieee-ppg --only 0.2",
    ),
    "open-ptb-xl": ("bitimely ingest ptb-xl PTB-XL", "bitimely run open-ptb-xl --only 0.2"),
    "open-ieee-ppg-fractions": (
        "bitimely ingest ieee-ppg IEEE-SPC2015",
        "bitimely run open-ieee-ppg --only 0.05 --only 1.0",
    ),
    "open-ptb-xl-fractions": (
        "bitimely ingest ptb-xl PTB-XL",
        "bitimely run open-ptb-xl --only 0.05 --only 1.0",
    ),
    "synpuf": (
        "head -c 32 /dev/zero > public.key",
        "bitimely ingest pophr DE-SYNPUF --source synpuf --phecode-map PHECODE_ICD9 --rules ccw --no-select --id-key public.key",
        "bitimely run synpuf",
    ),
    "ablation-small": (
        "bitimely ingest ptb-xl PTB-XL",
        "bitimely ingest emg EMG",
        "bitimely run ablation-small",
    ),
}


AT_PAPER = "-paper"  # name of a recipe that was run with --preset paper
FRACTIONS = "-fractions"  # a section of the rows that are not at the primary fraction of labels


def make_section(recipe: str, workspace: Path) -> str:
    """The table of one recipe from its page, with commands, day and device."""
    table = (workspace / "reports" / recipe / "results.md").read_text("utf-8")
    table = re.sub(r"^#", "##", table, flags=re.MULTILINE)
    commands = COMMANDS[recipe.removesuffix(AT_PAPER)]
    if recipe.endswith(AT_PAPER):
        commands = (*commands[:-1], f"{commands[-1]} --preset paper")
    return join_section(
        recipe, [table.strip(), "\n".join(list_further(recipe, workspace))], commands, workspace
    )


def make_fractions(section: str, workspace: Path) -> str:
    """The scores of the rows of one recipe that have run at other fractions of labels than the
    primary one.
    """
    lines = list_further(section.removesuffix(FRACTIONS), workspace, leave_out=" 0.2")
    return join_section(section, ["\n".join(lines)], COMMANDS[section], workspace)


def join_section(section: str, parts: list[str], commands: tuple[str, ...], workspace: Path) -> str:
    """The parts of a section, the last one a table of `list_further`, with its commands, the day of
    the last stage, and the device.
    """
    import torch

    recipe = section.removesuffix(FRACTIONS)
    stages = [
        json.loads(path.read_bytes())
        for path in (workspace / "pipelines" / recipe).glob("*/stage.json")
    ]
    day = datetime.datetime.fromtimestamp(
        max(stage["time"] for stage in stages), datetime.UTC
    ).date()
    runs = [
        json.loads(path.read_bytes()) for path in (workspace / "runs").glob(f"{recipe}-*/run.json")
    ]
    threads = max(run["environment"]["threads"] for run in runs)
    # its matrix products round in their own way
    (hardware,) = {run["environment"]["hardware"] for run in runs}
    about = f"{day}, CPU ({hardware}), {threads} thread{'s' * (threads > 1)}, torch {torch.__version__.partition('+')[0]}."
    spread = (
        "Means over seeds, in brackets the lowest and the highest seed; with one seed the 95 % CI."
    )
    shown = "\n".join(f"    {line}" for line in commands)
    return "\n\n".join(
        [
            f"<!-- {section} -->\n{parts[0]}",
            *parts[1:],
            spread,
            shown,
            f"{about}\n<!-- end of {section} -->",
        ]
    )


# section of the registered families of a recipe -> the commands of its trainings
FAMILIES = {
    "open-families": (
        "bitimely run open-epilepsy --only 0.2 -w W",
        "bitimely run open-bidmc --only 0.2 -w W",
        "bitimely run open --only 0.2 -w W        # the other data, then the registered families",
    ),
    "models-families": (
        'bitimely run models --only "strict 0.1" --only "scratch 0.1" '
        '--only "scratch 1.0 epilepsy/five" --only "resnet 1.0 epilepsy/five" --only "resnet 0.1" --only "masked 0.1" -w W',
    ),
    "models-augmented-families": (
        'bitimely run models-augmented --only "strict 0.1" --only "scratch 0.1" --only "resnet 0.1" -w W',
    ),
    "models-few-families": ("bitimely run models-few -w W",),
}
DESCRIPTIVE = "-descriptive"  # ending of the section of a recipe's differences without verdicts


def make_families(section: str, workspace: Path) -> str:
    """The tests of the families of a recipe that are complete, with their commands."""
    from bitimely_core.report.families_page import COLUMNS, format_result
    from bitimely_core.schemas.scores import RegisteredResult

    folder = workspace / "reports" / section.removesuffix("-families")
    summary = json.loads((folder / "summary.json").read_bytes())
    tests = map(RegisteredResult.model_validate, summary["tests"])
    rows = [format_result(test) for test in tests if test.verdict is not None]
    table = [f"| {' | '.join(row)} |" for row in (COLUMNS, ("---",) * len(COLUMNS), *rows)]
    commands = [*FAMILIES[section], f"python docs/results.py W {section}"]
    shown = [f"    {command}" for command in commands]
    lines = [summary["report"]["verdict"], "", *table, "", *shown]
    return "\n".join([f"<!-- {section} -->", *lines, f"<!-- end of {section} -->"])


def make_descriptive(section: str, workspace: Path) -> str:
    """The differences of a recipe that have no verdict and whose cells have run."""
    from bitimely_core.report.families_page import DESCRIPTIVE as COLUMNS
    from bitimely_core.report.families_page import format_description
    from bitimely_core.schemas.scores import RegisteredResult

    folder = workspace / "reports" / section.removesuffix(DESCRIPTIVE)
    summary = json.loads((folder / "summary.json").read_bytes())
    results = [
        result
        for result in map(RegisteredResult.model_validate, summary["tests"])
        if result.descriptive and result.difference is not None
    ]
    table = [
        f"| {' | '.join(row)} |"
        for row in (COLUMNS, ("---",) * len(COLUMNS), *map(format_description, results))
    ]
    return "\n".join([f"<!-- {section} -->", *table, f"<!-- end of {section} -->"])


FURTHER = {
    "classification": ("accuracy", "balanced_accuracy", "auroc"),
    "multilabel": ("auprc", "auroc"),
    "regression": ("mae",),
}


def list_further(recipe: str, workspace: Path, leave_out: str | None = None) -> list[str]:
    """A line for each row and column, but for rows that end with `leave_out`: mean of each metric
    over seeds, lowest to highest; with one seed the 95 % CI.
    """
    from bitimely_core import evaluate, pipeline
    from bitimely_core.evaluate import folds
    from bitimely_core.evaluate.result_table import ScoredRun, read_scored_run
    from bitimely_core.pipeline.plan import plan_experiment
    from bitimely_core.schemas.scores import Scores
    from bitimely_core.workflows.prepare import make_windows_opener

    loaded = pipeline.load(
        recipe.removesuffix(AT_PAPER), preset="paper" if recipe.endswith(AT_PAPER) else None
    )
    plan = plan_experiment(loaded, recipe, workspace, assignments=[])
    cells: dict[tuple[str, str, int], list[ScoredRun | None]] = {}
    for entry in plan.table:
        if entry.run is not None and (leave_out is None or not entry.row.endswith(leave_out)):
            one = read_scored_run(
                entry.row, entry.column, entry.seed, workspace / "runs" / entry.run
            )
            cells.setdefault((entry.column, entry.row, entry.seed), []).append(one)
    found: dict[tuple[str, str], list[Scores]] = {}
    for (column, row, _), parts in cells.items():
        known = [one for one in parts if one is not None]
        if len(known) < len(parts):  # the page of the recipe has no such cell either
            continue
        pooled = folds.pool_folds(
            known, workspace / "reports" / recipe / "kept", make_windows_opener(workspace)
        )
        found.setdefault((column, row), []).append(pooled.scores)
    task = next(iter(found.values()))[0].task or ""
    lines = [
        f"| data | row | seeds | {' | '.join(evaluate.NAMES[m] for m in FURTHER[task])} |",
        "|---" * (3 + len(FURTHER[task])) + "|",
    ]
    for (column, row), scores in found.items():
        shown = []
        for name in FURTHER[task]:
            metrics = [one.metrics[name] for one in scores]
            values = [m.value for m in metrics if m.value is not None]
            ends = (
                values
                if len(values) > 1
                else [v for m in metrics for v in (m.lo, m.hi) if v is not None]
            )
            mean = sum(values) / len(values) if values else None
            shown.append(
                "–"
                if mean is None
                else f"{mean:.3f}" + (f" ({min(ends):.3f} to {max(ends):.3f})" if ends else "")
            )
        lines.append(f"| {column} | {row} | {len(scores)} | {' | '.join(shown)} |")
    return lines


def make_part(section: str, workspace: Path) -> str:
    """A section of the page."""
    if section in FAMILIES:
        return make_families(section, workspace)
    if section.endswith(DESCRIPTIVE):
        return make_descriptive(section, workspace)
    make = make_fractions if section.endswith(FRACTIONS) else make_section
    return make(section, workspace)


def main(workspace: Path, recipes: list[str]) -> None:
    """Put the sections of `recipes` (none: all that the workspace has, but for the registered
    families) into the page.
    """
    page = PAGE.read_text("utf-8")
    for recipe in recipes or [
        name for name in COMMANDS if (workspace / "reports" / name / "results.md").is_file()
    ]:
        new = make_part(recipe, workspace)
        old = re.compile(rf"<!-- {recipe} -->.*<!-- end of {recipe} -->", re.DOTALL)
        page = (
            old.sub(lambda _, new=new: new, page)
            if old.search(page)
            else f"{page.rstrip()}\n\n{new}\n"
        )  # type: ignore[misc]
    PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
