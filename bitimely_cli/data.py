"""Verbs on data: ingest, tokenize, verify, list, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bitimely_cli import claims
from bitimely_cli.options import HOME, MAKING, shard, taking
from bitimely_cli.screen import screen
from bitimely_core import registry
from bitimely_core.errors import Exit


@taking(making=MAKING, read=claims.READ, build=claims.BUILD)
def ingest(
    dataset: Annotated[str, typer.Argument(help="Data set, see: bitimely list datasets.", metavar="DATASET")],
    *,
    source: Annotated[Path | None, typer.Argument(help="Folder in the official layout, or files.", metavar="[SOURCE]")] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Worker processes.")] = 1,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse the data set when anything is quarantined.")] = False,
    max_bad: Annotated[float, typer.Option("--max-bad", min=0.0, max=1.0, help="Largest share of quarantined units.")] = 0.5,
    part: Annotated[str | None, typer.Option("--shard", metavar="k/n", help="Read part k of n; the last part publishes.")] = None,
    size: Annotated[str | None, typer.Option("--size", help="small, large or planted (synthetic).")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed (synthetic).")] = None,
    rate: Annotated[int | None, typer.Option("--rate", help="Hz of the files to read, 100 or 500 (ptb-xl).")] = None,
    map_: Annotated[
        Path | None, typer.Option("--map", metavar="FILE.toml", help="Mapping file: patterns, subjects, channels, rates, labels (generic).")
    ] = None,
    follow_symlinks: Annotated[bool, typer.Option("--follow-symlinks", help="Follow links that leave SOURCE.")] = False,
    keep_phi: Annotated[bool, typer.Option("--keep-phi", help="Keep identifying header fields (stated in the manifest).")] = False,
    keep_dates: Annotated[bool, typer.Option("--keep-dates", help="Keep start times of recordings.")] = False,
    quarantine: Annotated[Path | None, typer.Option("--quarantine", help="Write the list of quarantined units to this file.")] = None,
    wait: Annotated[float, typer.Option("--wait", help="Seconds to wait for another process.")] = 0.0,
    making: dict[str, Any],
    read: dict[str, Any],
    build: dict[str, Any],
) -> int:
    """Read raw files into the Parquet cache; bad units are left out and named.

    Example: bitimely ingest sleep-edf ./raw
    """
    from bitimely_core import workflows
    from bitimely_core.errors import Finding

    options = {
        name: value
        for name, value in {"size": size, "seed": seed, "rate": rate, "map": None if map_ is None else str(map_)}.items()
        if value is not None
    }
    events = workflows.is_events(dataset)
    if events and "engine" in build:
        options["engine"] = build["engine"]
    extra: dict[str, Any] = {"build": claims.choices(build)} if events else {}
    undrawn: list[Finding] = []
    workspace, dry_run = making.pop("workspace"), "dry_run" in making
    with screen.progress() as progress:
        report: dict[str, Any] = (workflows.ingest_claims if events else workflows.ingest)(
            dataset,
            source,
            workspace / "cache" / dataset,
            said=undrawn.append,
            options=options | claims.reading(read) | ({} if events else build),
            **extra,
            jobs=jobs,
            strict=strict,
            max_bad=max_bad,
            shard=shard(part),
            follow_symlinks=follow_symlinks,
            keep_phi=keep_phi,
            keep_dates=keep_dates,
            wait=wait,
            progress=progress,
            **making,
        )
    if quarantine is not None and not dry_run:
        from bitimely_core import storage

        left_out = [
            {"unit": u["unit"], "files": u["files"], "reasons": u["reasons"]} for u in report["units"] if u["status"] == "quarantined"
        ]
        storage.write_json(quarantine, {"format_version": 1, "dataset": dataset, "quarantined": left_out})
    where = workspace / "cache" / dataset / "ingest_report.json"
    if dry_run:
        screen.result(report, screen.lines(report))
        return Exit.OK
    screen.findings([*(r for u in report["units"] for r in u["reasons"]), *report["reasons"], *undrawn], str(where))
    counts = report["counts"]
    screen.table(
        ["unit", "status", "channels", "samples", "why"],
        [
            [
                u["unit"],
                u["status"],
                u["channels"],
                u["samples"],
                ", ".join(sorted({r["code"] for r in u["reasons"] if r["level"] != "info"})),
            ]
            for u in report["units"][:30]
        ],
    )
    if "tokens" in report:
        screen.table(*claims.shown(report["tokens"]))
    accepted = counts["accepted"] + counts["accepted_with_warning"]
    screen.result(
        report,
        [
            *([f"... and {len(report['units']) - 30} more units in the report"] if len(report["units"]) > 30 else []),
            f"{accepted} of {counts['units_seen']} units in {where.parent}"
            + (f"; {counts['quarantined']} quarantined, see {where}" if counts["quarantined"] else ""),
            *_next(dataset, report, where, drawn=not undrawn),
        ],
    )
    return int(report["exit_code"])


def _next(dataset: str, report: dict[str, Any], where: Path, *, drawn: bool) -> list[str]:
    """Where to look, and what comes next."""
    if "tokens" in report:
        built = report["tokens"]
        return [
            f"{built['windows']:,} sequences, {built['events']:,} events of {built['codes']} PheCodes in {built['folder']}",
            f"page: {built['folder']}/report.html",
            f"next: bitimely pretrain --preset 3m --data {dataset}",
        ]
    page = [f"page: {where.with_name('report.html')}"] if drawn and report["published"] and where.with_name("report.html").is_file() else []
    return [*page, f"next: bitimely tokenize {dataset}"]


@taking(making=MAKING, build=claims.BUILD, task=claims.TASK)
def tokenize(
    data: Annotated[str, typer.Argument(help="Data set or view, for example sleep-edf/staging.", metavar="DATA")],
    *,
    window: Annotated[int | None, typer.Option("--window", min=1, help="Samples a window.")] = None,
    stride: Annotated[int | None, typer.Option("--stride", min=1, help="Samples between windows.")] = None,
    rate: Annotated[float | None, typer.Option("--rate", min=0.0, help="Hz; other rates are resampled with an anti-alias filter.")] = None,
    channels: Annotated[str | None, typer.Option("--channels", help="Names, separated by commas.")] = None,
    bandpass: Annotated[
        str | None, typer.Option("--bandpass", metavar="LOW,HIGH", help="Filter in Hz, forward and backward; one side may be empty.")
    ] = None,
    notch: Annotated[
        str | None, typer.Option("--notch", metavar="FREQ[,FREQ...]", help="Hz to take out, for example 50 of the mains.")
    ] = None,
    normalise: Annotated[str, typer.Option("--normalise", help="channel (statistics of the training split), window or none.")] = "channel",
    split: Annotated[
        str | None, typer.Option("--split", help="subject, official, time or random-window (default: the data set's own).")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the split.")] = 0,
    test_fold: Annotated[
        int | None,
        typer.Option("--test-fold", min=1, max=10, help="Of the ten official folds, or tenths of the subjects, the one to test on."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the tokens (default: DATASET[-VIEW]).")] = None,
    making: dict[str, Any],
    build: dict[str, Any],
    task: dict[str, Any],
) -> int:
    """Cut the cache into training windows, split by subject, normalised with the training split.

    Example: bitimely tokenize sleep-edf/staging
    """
    from bitimely_core import workflows
    from bitimely_core.config import DataConfig, validate

    texts = {name: text for name, text in {"bandpass": bandpass, "notch": notch}.items() if text is not None}
    filters = validate(DataConfig, texts)
    options = {
        "window": window,
        "stride": stride,
        "rate": rate,
        "channels": None if channels is None else tuple(c.strip() for c in channels.split(",")),
        "normalise": normalise,
        "split": split,
        "seed": seed,
        "bandpass": filters.bandpass,
        "notch": filters.notch,
        "test_fold": test_fold,
    }
    events = workflows.is_events(data)
    of_signals = [name for name, value in options.items() if name != "seed" and value != DataConfig.model_fields[name].default]
    if wrong := of_signals if events else [*build, *task]:
        fitting = [*claims.BUILD, *claims.TASK, "seed"] if events else options
        raise registry.unknown(f"option of {data}", f"--{wrong[0].replace('_', '-')}", [f"--{n.replace('_', '-')}" for n in fitting])
    if events:
        options = {**claims.choices(build), **task, **({"seed": seed} if seed else {})}
    with screen.progress() as progress:
        result = workflows.tokenize(data, name=name, options=options, progress=progress, **making)
    if "dry_run" in making:
        screen.result(result, screen.lines(result))
        return Exit.OK
    screen.findings(result.pop("findings", []))
    columns = ["split", "subjects", "windows", *result["class_names"]]
    screen.table(
        columns,
        [[s, a["subjects"], a["windows"], *(a["classes"].get(c, 0) for c in result["class_names"])] for s, a in result["audit"].items()],
    )
    if events:
        if not task:
            screen.table(*claims.shown(result))
        screen.result(
            result,
            [
                *result["notices"],
                f"{result['windows']:,} sequences, {result['events']:,} events of {result['codes']} PheCodes in {result['folder']}",
                *([f"page: {result['report']}"] if "report" in result else []),
                f"next: bitimely {'finetune RUN' if task else 'pretrain --preset 3m'} --data {name or data}",
            ],
        )
        return Exit.OK
    screen.result(
        result,
        [
            *result["notices"],
            f"{result['windows']:,} windows of {result['length']} samples x {result['channels']} channels at {result['rate']:g} Hz in {result['folder']}",
            f"next: bitimely {'pretrain' if result['task'] == 'none' else 'finetune RUN'} --data {name or data}",
        ],
    )
    return Exit.OK


@taking(home=HOME)
def verify(
    path: Annotated[
        Path | None,
        typer.Argument(help="Cache, tokens, run, model folder, checkpoint or raw folder (default: the workspace).", metavar="[PATH]"),
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Hash the sources again, too.")] = False,
    *,
    home: dict[str, Any],
) -> int:
    """Compare everything stored with its checksums.

    Example: bitimely verify
    """
    from bitimely_core import workflows

    with screen.progress() as progress:
        result = workflows.verify(path or home["workspace"], deep=deep, progress=progress)
    findings = result.pop("findings")
    screen.findings(findings)
    screen.table(["what", "kind", "files", "state"], [[c["path"], c["kind"], c["files"], c["state"]] for c in result["checked"]])
    screen.result(result, [f"{len(result['checked'])} checked, {sum(c['state'] != 'good' for c in result['checked'])} with findings"])
    return int(result["exit_code"])


@taking(home=HOME)
def list_(
    kind: Annotated[str, typer.Argument(help="datasets, views, models, objectives, presets, analyses, pipelines or runs.", metavar="KIND")],
    home: dict[str, Any],
) -> int:
    """What there is: data sets, views, models, objectives, presets, analyses, pipelines, runs.

    Example: bitimely list presets
    """
    from bitimely_core.workflows import catalog

    rows = catalog.rows(kind, **home)
    for columns in (catalog.COLUMNS[kind], catalog.CLAIMED) if kind == "models" else (catalog.COLUMNS[kind],):
        screen.table(columns, [[row.get(column) for column in columns] for row in rows])
    screen.result({kind: rows, "format_version": 1}, catalog.notes(kind))
    return Exit.OK


@taking(home=HOME)
def doctor(home: dict[str, Any]) -> int:
    """Versions, devices, memory and optional extras; what is missing and how to get it.

    Example: bitimely doctor
    """
    from bitimely_core.workflows import catalog

    report = catalog.doctor(**home)
    screen.table(["what", "found", "note"], [[row["what"], row["found"], row["note"]] for row in report["checks"]])
    screen.result(report)
    return Exit.OK if report["good"] else Exit.REFUSED


VERBS = (ingest, tokenize, verify, list_, doctor)
