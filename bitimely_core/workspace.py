"""Paths of a workspace, and names of views, tokens and runs."""

from __future__ import annotations

import json
from pathlib import Path

from bitimely_core import registry


def parse_view(data: str) -> tuple[str, str]:
    """`sleep-edf/staging` -> (`sleep-edf`, `staging`). Raises UserError (unknown_name) with the closest names."""
    registry.load_members("bitimely_core.datasets")
    dataset, _, view = data.partition("/")
    facts = registry.datasets[dataset].facts
    if view not in facts.views:
        known = [f"{dataset}/{name}" if name else dataset for name in facts.views]
        raise registry.unknown("view", data, known)
    return dataset, view


def is_events(data: str) -> bool:
    """Whether a data set or view is of claims. Raises UserError (unknown_name) with the closest names."""
    registry.load_members("bitimely_core.datasets")
    return registry.datasets[data.partition("/")[0]].facts.kind == "events"


def find_dataset(data: str, workspace: Path) -> str:
    """The data set of `DATASET[/VIEW]`, or of the tokens that are called `data`."""
    path = workspace / "tokens" / data / "manifest.json"
    return str(json.loads(path.read_bytes())["options"]["dataset"]) if "/" not in data and path.is_file() else data.partition("/")[0]


def name_tokens(data: str) -> str:
    """The default name of the tokens of `DATASET[/VIEW]`."""
    return data.replace("/", "-")


def find_run_folder(run: str | Path, workspace: Path) -> Path:
    """The folder of an existing run, given by name or path. Raises UserError (not_found, exit 2) with the closest names."""
    for folder in (workspace / "runs" / str(run), Path(run)):
        if (folder / "run.json").is_file():
            return folder
    known = sorted(p.parent.name for p in (workspace / "runs").glob("*/run.json"))
    error = registry.unknown("run", str(run), known)
    error.file = str(workspace / "runs")
    raise error


def name_run(preset: str, model: str, objective: str, defaults: tuple[str, str]) -> str:
    """`<preset>[-<model>][-<objective>]`, without the defaults."""
    default_model, default_objective = defaults
    parts = [preset, *([model] if model != default_model else []), *([objective] if objective != default_objective else [])]
    return "-".join(parts)
