"""Whole experiments: a recipe is data, `run` is the verbs in order, and a finished stage is skipped because its verb finds it finished."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from bitimely_core import registry, runs, settings
from bitimely_core.batch import Progress
from bitimely_core.errors import Exit, UserError

Say = Callable[[str], None]


def load(name: str) -> settings.Recipe:
    """A shipped recipe by name, or a TOML file by path. Raises UserError (unknown_name or config, exit 2)."""
    shipped = {p.stem: p for p in registry.RECIPES.glob("*.toml")}
    path = Path(name)
    if name in shipped:
        return settings.recipe(shipped[name])
    if path.suffix == ".toml" or os.sep in name:
        return settings.recipe(path)
    raise registry.unknown("pipeline", name, list(shipped))


def cells(recipe: settings.Recipe) -> Iterator[dict[str, Any]]:
    """The product of `[matrix]`: one dict of flags a cell; a recipe without a matrix is one cell."""
    names = list(recipe.matrix)
    for values in itertools.product(*(recipe.matrix[n] for n in names)):
        yield dict(zip(names, values, strict=True))


def run(
    pipeline: str,
    *,
    workspace: Path = Path("workspace"),
    only: list[str] | None = None,
    jobs: int = 1,
    devices: int = 1,
    shard: tuple[int, int] | None = None,
    assignments: list[str] | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    say: Say | None = None,
) -> dict[str, Any]:
    """Run a recipe: ingest, then for each cell pretrain, finetune, evaluate, then the analyses and one comparison page.

    A stage that fails is reported, what hangs on it is left out, the others go on. Returns stages (stage, state, detail), report, exit_code: 0, 3 when a
    data set was partly quarantined, else that of the first failed stage.
    """
    recipe = load(pipeline)
    name = Path(pipeline).stem
    chosen = [c for c in cells(recipe) if not only or any(text in " ".join(map(str, c.values())) for text in only)]
    if shard is not None:
        k, n = shard
        chosen = [c for c in chosen if int(sha256(repr(sorted(c.items())).encode()).hexdigest(), 16) % n == k - 1]
    stages: list[dict[str, Any]] = []

    def stage(label: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Run one verb and note how it ended; None when it failed or is only planned."""
        if dry_run:
            stages.append({"stage": label, "state": "planned", "detail": "", "exit_code": 0})
            return None
        try:
            result = call()
        except UserError as error:
            stages.append({"stage": label, "state": "failed", "detail": error.finding.line(), "exit_code": int(error.exit_code)})
            return None
        state = "partial" if result.get("exit_code") == Exit.PARTIAL else "already done" if result.get("trained") is False else "done"
        stages.append({"stage": label, "state": state, "detail": "", "exit_code": 3 if state == "partial" else 0})
        return result

    def ingested(dataset: str) -> dict[str, Any]:
        options = recipe.ingest.options.get(dataset, {})
        out = workspace / "cache" / dataset
        source = recipe.ingest.sources.get(dataset)
        if runs.of_events(dataset):
            return runs.ingest_claims(dataset, source, out, build=recipe.build, options=options, progress=progress)
        return runs.ingest(dataset, source, out, options=options, jobs=recipe.ingest.jobs, progress=progress)

    def pretrained(run: str, flags: dict[str, Any]) -> dict[str, Any]:
        flags = settings.merged(recipe.overrides("pretrain"), flags, {"train": {"devices": devices}} if devices > 1 else {})
        stage = recipe.pretrain
        return runs.pretrain(
            preset=stage.preset,
            budget=stage.budget,
            flags=flags,
            assignments=assignments,
            run=run,
            workspace=workspace,
            progress=progress,
            say=say,
        )

    def finetuned(source: str, view: str, run: str, flags: dict[str, Any]) -> dict[str, Any]:
        own: dict[str, Any] = {section: flags[section] for section in ("train", "finetune") if section in flags}
        flags = settings.merged(recipe.overrides("finetune"), own, {"data": {"names": (view,)}})
        return runs.finetune(
            source, data=view, flags=flags, assignments=assignments, run=run, workspace=workspace, progress=progress, say=say
        )

    def evaluated(run: str, compare: str | None = None) -> dict[str, Any]:
        wanted = recipe.evaluate
        return runs.evaluate(
            run, split=wanted.split, bootstrap=wanted.bootstrap, by=wanted.by, compare=compare, workspace=workspace, progress=progress
        )

    def analyzed(analysis: settings.AnalyzeStage, run: str) -> dict[str, Any]:
        options = {key: str(value) for key, value in analysis.options.items()}
        return runs.analyze(
            analysis.kind, [run], data=analysis.data, sequences=analysis.sequences, options=options, workspace=workspace, progress=progress
        )

    def base_of(values: dict[str, Any]) -> str:
        """The name of a cell's pre-trained run."""
        return "-".join([name, *map(str, values.values())])

    def cell(values: dict[str, Any]) -> list[str]:
        """All stages of one cell; the names of its evaluated runs."""
        base = base_of(values)
        flags = settings.Stage.model_validate(values).flags()
        scored = []
        if stage(f"pretrain {base}", partial(pretrained, base, flags)) is None and not dry_run:
            return []
        views = recipe.finetune.data or ()
        for view in (views,) if isinstance(views, str) else views:
            tuned = f"{base}-{view.partition('/')[2] or view}"
            done = stage(f"finetune {tuned}", partial(finetuned, base, view, tuned, flags))
            if (done is not None or dry_run) and stage(f"evaluate {tuned}", partial(evaluated, tuned)) is not None:
                scored.append(tuned)
        for analysis in recipe.analyze:
            stage(f"analyze {analysis.kind} {base}", partial(analyzed, analysis, base))
        return scored

    for dataset in recipe.ingest.datasets:
        stage(f"ingest {dataset}", partial(ingested, dataset))
    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:  # cells spend their time inside torch, which releases the lock
        scored = list(itertools.chain.from_iterable(pool.map(cell, chosen)))
    for values in chosen if recipe.evaluate.compare else ():
        other = {key: next((v for v in recipe.matrix[key] if str(v) == recipe.evaluate.compare), value) for key, value in values.items()}
        for run_name in scored if other != values else ():
            if run_name.startswith(f"{base_of(values)}-"):
                second = run_name.replace(base_of(values), base_of(other), 1)
                stage(f"compare {run_name} with {second}", partial(evaluated, run_name, second))
    page = (
        stage("report", partial(runs.report, scored, out=workspace / "reports" / name, workspace=workspace)) if scored or dry_run else None
    )
    failed = [s["exit_code"] for s in stages if s["state"] == "failed"]
    quarantined = any(s["state"] == "partial" for s in stages)
    return {
        "format_version": 1,
        "pipeline": pipeline,
        "stages": stages,
        "report": page["report"] if page else None,
        "exit_code": int(failed[0] if failed else Exit.PARTIAL if quarantined else Exit.GOOD),
    }
