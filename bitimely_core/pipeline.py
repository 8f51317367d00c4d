"""Whole experiments: a recipe is data, `run` is the verbs in order, and a finished stage is skipped because its verb finds it finished."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

from bitimely_core import cache, registry, runs, settings
from bitimely_core.batch import Progress
from bitimely_core.errors import Exit, Reason, UserError

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

    A stage that fails is reported and the others go on. Returns stages (stage, state, detail), report, exit_code: 0, 3 when a data set
    was partly quarantined, else that of the first failed stage.
    """
    recipe = load(pipeline)
    stages: list[dict[str, Any]] = []
    chosen = [c for c in cells(recipe) if not only or any(text in " ".join(map(str, c.values())) for text in only)]
    if shard is not None:
        k, n = shard
        chosen = [c for c in chosen if int(sha256(repr(sorted(c.items())).encode()).hexdigest(), 16) % n == k - 1]
    common = {"workspace": workspace, "progress": progress, "say": say}

    def stage(name: str, call: Callable[[], Any]) -> Any:
        if dry_run:
            stages.append({"stage": name, "state": "planned", "detail": ""})
            return None
        try:
            result = call()
        except UserError as error:
            stages.append({"stage": name, "state": "failed", "detail": error.finding.line(), "exit_code": int(error.exit_code)})
            return None
        partial = isinstance(result, dict) and result.get("exit_code") == Exit.PARTIAL
        trained = isinstance(result, dict) and result.get("trained") is False
        stages.append({"stage": name, "state": "partial" if partial else "already done" if trained else "done", "detail": "", "exit_code": 3 if partial else 0})
        return result

    for dataset in recipe.ingest.datasets:
        source = recipe.ingest.sources.get(dataset)
        stage(
            f"ingest {dataset}",
            lambda d=dataset, s=source: cache.ingest(
                d, s, workspace / "cache" / d, options=recipe.ingest.options.get(d, {}), jobs=recipe.ingest.jobs, progress=progress
            ),
        )

    def one(cell: dict[str, Any]) -> list[str]:
        suffix = "-".join(str(v) for v in cell.values())
        flags = settings.Stage.model_validate(cell).flags()
        first = {"train": {"devices": devices}} if devices > 1 else {}
        base = f"{Path(pipeline).stem}" + (f"-{suffix}" if suffix else "")
        views = recipe.finetune.data if isinstance(recipe.finetune.data, tuple) else (recipe.finetune.data,) if recipe.finetune.data else ()
        pretrained = stage(
            f"pretrain {base}",
            lambda: runs.pretrain(
                preset=recipe.pretrain.preset, budget=recipe.pretrain.budget, flags=settings.merged(recipe.overrides("pretrain"), flags, first),
                assignments=assignments or [], run=base, **common,
            ),
        )  # fmt: skip
        evaluated = []
        for view in views:
            tuned = f"{base}-{view.partition('/')[2] or view}"
            overrides = settings.merged(recipe.overrides("finetune"), {k: v for k, v in flags.items() if k == "train"})
            if pretrained is None and not dry_run:
                continue
            done = stage(
                f"finetune {tuned}",
                lambda v=view, t=tuned, o=overrides: runs.finetune(
                    base, data=v, flags=settings.merged(o, {"data": {"names": (v,)}}), assignments=assignments or [], run=t, **common
                ),
            )
            if done is None and not dry_run:
                continue
            scored = stage(
                f"evaluate {tuned}",
                lambda t=tuned: runs.evaluate(
                    t, split=recipe.evaluate.split, bootstrap=recipe.evaluate.bootstrap, by=recipe.evaluate.by, workspace=workspace, progress=progress
                ),
            )
            evaluated += [tuned] if scored is not None else []
        for analysis in recipe.analyze:
            if pretrained is not None or dry_run:
                stage(
                    f"analyze {analysis.kind} {base}",
                    lambda a=analysis: runs.analyze(
                        a.kind, [base], data=a.data, sequences=a.sequences, options={k: str(v) for k, v in a.options.items()}, workspace=workspace, progress=progress
                    ),
                )
        return evaluated

    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:  # cells spend their time inside torch, which releases the lock
        scored = list(itertools.chain.from_iterable(pool.map(one, chosen)))
    report = None
    if scored:
        page = stage("report", lambda: runs.report(scored, out=workspace / "reports" / Path(pipeline).stem, workspace=workspace))
        report = page["report"] if page else None
    failed = [s["exit_code"] for s in stages if s["state"] == "failed"]
    partial = any(s["state"] == "partial" for s in stages)
    return {
        "format_version": 1, "pipeline": pipeline, "stages": stages, "report": report,
        "exit_code": int(failed[0] if failed else Exit.PARTIAL if partial else Exit.GOOD),
    }  # fmt: skip


DEMO = {  # verb -> options: small enough for four minutes on two cores
    "epochs": 12,
    "finetune_epochs": 12,
    "set": ["model.tokenizer=patch", "train.lr=1e-3"],
    "finetune_set": ["train.lr=1e-3"],
    "fraction": 1.0,
}


def demo(*, claims: bool = False, out: Path = Path("workspace/demo"), dry_run: bool = False, progress: Progress | None = None, say: Say | None = None) -> dict[str, Any]:
    """All verbs on a synthetic cohort, to one report; `say` gets the commands that a user would type.

    Returns report, verdict, metrics of the pre-trained and the from-scratch run, and their paired difference.
    """
    if claims:
        registry.members("bitimely_core.datasets")
        registry.datasets["synthetic-claims"]
        raise UserError(Reason.UNKNOWN_NAME, "no data set synthetic-claims", exit_code=Exit.USAGE)
    tell = say or (lambda _: None)
    options = f"-w {out}"
    sets = " ".join(f"--set {pair}" for pair in DEMO["set"])
    tuned_sets = " ".join(f"--set {pair}" for pair in DEMO["finetune_set"])
    tuning = f"--data synthetic/staging --fraction {DEMO['fraction']:g} --epochs {DEMO['finetune_epochs']} {tuned_sets}"
    commands = [
        f"bitimely ingest synthetic {options}",
        f"bitimely tokenize synthetic {options}",
        f"bitimely tokenize synthetic/staging {options}",
        f"bitimely pretrain --preset tiny --data synthetic/staging --epochs {DEMO['epochs']} {sets} {options}",
        f"bitimely finetune tiny {tuning} --from-scratch {options}",
        f"bitimely evaluate tiny-staging-scratch {options}",
        f"bitimely finetune tiny {tuning} {options}",
        f"bitimely evaluate tiny-staging --compare tiny-staging-scratch {options}",
        f"bitimely embed tiny --data synthetic/staging {options}",
        f"bitimely analyze svd tiny --sequences 32 {options}",
        f"bitimely analyze attention tiny {options}",
        f"bitimely report tiny-staging tiny-staging-scratch {options}",
    ]
    if dry_run:
        for command in commands:
            tell(f"$ {command}")
        return {"format_version": 1, "commands": commands}
    quiet: dict[str, Any] = {"workspace": out, "progress": progress}
    tune: dict[str, Any] = {
        "data": "synthetic/staging", "assignments": DEMO["finetune_set"], **quiet,
    }  # fmt: skip
    flags = {"data": {"fraction": DEMO["fraction"]}, "train": {"epochs": DEMO["finetune_epochs"]}}
    calls: list[Callable[[], Any]] = [
        lambda: cache.ingest("synthetic", None, out / "cache" / "synthetic", progress=progress),
        lambda: runs.tokenize("synthetic", **quiet),
        lambda: runs.tokenize("synthetic/staging", **quiet),
        lambda: runs.pretrain(
            preset="tiny", flags={"data": {"names": ("synthetic/staging",)}, "train": {"epochs": DEMO["epochs"]}}, assignments=DEMO["set"], say=say, **quiet
        ),
        lambda: runs.finetune("tiny", flags=settings.merged(flags, {"finetune": {"from_scratch": True}}), **tune),
        lambda: runs.evaluate("tiny-staging-scratch", **quiet),
        lambda: runs.finetune("tiny", flags=flags, **tune),
        lambda: runs.evaluate("tiny-staging", compare="tiny-staging-scratch", **quiet),
        lambda: runs.embed("tiny", data="synthetic/staging", **quiet),
        lambda: runs.analyze("svd", ["tiny"], sequences=32, **quiet),
        lambda: runs.analyze("attention", ["tiny"], **quiet),
    ]
    results = []
    for command, call in zip(commands, calls, strict=False):
        tell(f"$ {command}")
        results.append(call())
    tell(f"$ {commands[-1]}")
    from bitimely_core import report as rendering
    from bitimely_core.runs import pages

    page = pages.comparison([out / "runs" / "tiny-staging", out / "runs" / "tiny-staging-scratch"])
    audit = pages.audit_table("synthetic/staging", results[2]["audit"], results[2]["class_names"])
    joined = pages.joined(page, [results[9]["page"], results[10]["page"]], [audit], "Demonstration on a synthetic cohort")
    path = rendering.write(out / "reports" / "demo", joined)
    tuned, scratch = results[7], results[5]
    return {
        "format_version": 1, "report": str(path), "verdict": joined.verdict, "commands": commands,
        "metrics": {"tiny-staging": tuned["metrics"], "tiny-staging-scratch": scratch["metrics"]}, "baselines": tuned["baselines"],
        "comparison": tuned["comparison"],
    }  # fmt: skip
