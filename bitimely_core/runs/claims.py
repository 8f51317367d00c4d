"""The verbs ingest and tokenize on claims: cache, sequences, and the page on which every choice and every leak can be seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitimely_core import cache, store
from bitimely_core.batch import Figure, Page, Progress, Table
from bitimely_core.errors import Exit, Finding, Reason, UserError
from bitimely_core.runs import folders

if TYPE_CHECKING:
    from bitimely_core.tokens import Sequences

FEW = 11  # counts below it are not shown: the rule of the publisher of Medicare's data
DRAWN = 24  # sequences that are drawn
SHOWN = 30  # codes of a table


def ingest(
    dataset: str,
    source: str | Path | None,
    out: str | Path,
    *,
    build: dict[str, Any] | None = None,
    name: str | None = None,
    said: Callable[[Finding], object] | None = None,
    **given: Any,
) -> dict[str, Any]:
    """`cache.ingest` of claims, then the sequences at once; what a build must warn of goes into the ingest report too.

    Args:
        dataset: pophr or synthetic-claims.
        source: raw folder.
        out: folder of the cache, `<workspace>/cache/<dataset>`.
        build: choices of the sequences (`tokens.histories.resolved`); but `split_file` goes by the ids of the source, and into the cache.
        name: of the sequences.
        said: called with a warning where the sequences could not be made though the cache is whole.
        **given: the other arguments of `cache.ingest`.

    Raises:
        UserError: those of `cache.ingest`, and exit 2 for choices that do not fit.
    """
    from bitimely_core.datasets.pophr import building

    build = dict(build or {})
    if "split_file" in build:
        given["options"] = {**(given.get("options") or {}), "split_file": build.pop("split_file")}
    if (preset := build.get("preset")) and preset not in building.PRESETS:
        from bitimely_core.registry import unknown

        raise unknown("preset of the builder", preset, list(building.PRESETS))
    folder = Path(out)
    report = cache.ingest(dataset, source, folder, **given)
    if not report.get("published"):
        return report
    workspace = folder.parent.parent
    try:
        built = tokenize(dataset, workspace=workspace, name=name, options=build, force_new=True, progress=given.get("progress"))
        found = built["findings"]
        report["tokens"] = {key: built[key] for key in ("folder", "windows", "events", "codes", "honesty", "selected")}
    except UserError as error:
        if error.exit_code != Exit.REFUSED:
            raise
        found = [Finding(code=Reason.MIN_CODES, level="warning", text=error.text, wanted=error.wanted, action=error.action).as_dict()]
        if said is not None:
            said(error.finding)
    report["reasons"] = [*report["reasons"], *found]
    counts = Counter(report["reason_counts"])
    counts.update({reason["code"]: reason["count"] for reason in found})
    report["reason_counts"] = dict(sorted(counts.items()))
    store.write_json(folder / "ingest_report.json", report)
    return report


def tokenize(
    data: str,
    *,
    workspace: Path = Path("workspace"),
    name: str | None = None,
    options: dict[str, Any] | None = None,
    verify: bool = True,
    force_new: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Sequences of cached claims under `tokens/<name>`, with `report.html`; returns folder, counts, honesty table and audit of the split.

    With `options["task"]`, a folder of MEDS labels (and `ids`): sequences up to its prediction times, of the codes of `tokens/<data>`.

    Raises UserError: settings_differ, config (2), incomplete, no_input (4), integrity (5).
    """
    from bitimely_core import report as pages
    from bitimely_core.tokens import histories

    dataset, _ = folders.dataset_and_view(data)
    opened = cache.open_cache(folders.cached(dataset, workspace, progress=progress), verify=False)
    if "task" in (options or {}):
        return _of_task(
            data, opened, workspace, name, options or {}, verify=verify, force_new=force_new, dry_run=dry_run, progress=progress
        )
    plan = histories.resolved(opened, **(options or {}))
    out = workspace / "tokens" / (name or folders.tokens_name(data))
    if dry_run:
        return {"folder": str(out), "options": plan.options, "subjects": opened.people().height}
    histories.make(plan, out, verify=verify, force_new=force_new, progress=progress)
    sequences = _some(out)
    statistics = sequences.statistics
    shown = page(sequences)
    store.write_bytes(out / "report.html", pages.html(shown, alone=True).encode())
    if opened.manifest["clock"] == "calendar":
        from bitimely_core.tokens import meds
        from bitimely_core.tokens.sequences import open_sequences

        meds.write(out / "meds", opened, open_sequences(out, verify=False))
    return {
        **_built(data, sequences),
        "honesty": honesty(statistics),
        "selected": statistics["selected"],
        "report": str(out / "report.html"),
    }


def _some(out: Path) -> Sequences:
    """As many shards of sequences as are needed to draw some of the training split: not all of them fit into memory."""
    from bitimely_core.tokens.sequences import open_sequences

    shards = 1
    while True:
        found = open_sequences(out, verify=False, shards=shards)
        if len(found["train"]) >= DRAWN or shards >= len(found.manifest["shards"]):
            return found
        shards *= 2


def _built(data: str, sequences: Sequences) -> dict[str, Any]:
    """What a build of sequences says on the screen; of them some of the shards may be open."""
    from bitimely_core.tokens.sequences import counted

    audit = counted(sequences.folder)
    return {
        "format_version": folders.FORMAT,
        "name": sequences.name,
        "data": data,
        "folder": str(sequences.folder),
        "windows": sum(split["windows"] for split in audit.values()),
        "events": int(sequences.manifest["events"]),
        "codes": sequences.codes - 5,
        "task": sequences.task,
        "class_names": list(sequences.class_names),
        "split": sequences.split,
        "fingerprint": sequences.fingerprint,
        "notices": list(sequences.manifest["notices"]),
        "findings": list(sequences.manifest["findings"]),
        "audit": audit,
    }


def _of_task(
    data: str,
    opened: cache.Cache,
    workspace: Path,
    name: str | None,
    options: dict[str, Any],
    *,
    verify: bool,
    force_new: bool,
    dry_run: bool,
    progress: Progress | None,
) -> dict[str, Any]:
    """Sequences up to the prediction times of a MEDS label folder. Raises UserError (config, exit 2) for other options or no name."""
    from bitimely_core.tokens import open_tokens, tasks

    base = workspace / "tokens" / folders.tokens_name(data)
    out = workspace / "tokens" / (name or base.name)
    wrong = next((f"--{key.replace('_', '-')}" for key in options if key not in {"task", "ids"}), "" if out != base else "no --name")
    if wrong:
        wanted = f"the choices of --task are those of {base.name}, and its sequences have a name of their own"
        raise UserError(Reason.CONFIG, wrong, wanted=wanted, field="--task", action="Give --name alone", exit_code=Exit.USAGE)
    if dry_run:
        return {"folder": str(out), "base": str(base), "rows": tasks.labels(options["task"]).height}
    codes = open_tokens(base, verify=verify)
    made = tasks.build(opened, codes, options["task"], out, ids=options.get("ids"), verify=verify, force_new=force_new, progress=progress)
    return {**_built(data, made), "honesty": []}


def honesty(statistics: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a label: what chance, the length alone and a single code achieve, before and after the filters. Average precision."""
    rows = []
    for label, leak in statistics["leaks"].items():
        best = leak["best"]
        before = statistics["prevalence"]["before"][label]["all"]
        rows.append(
            {
                "label": label,
                "cases": leak["cases"]["all"],
                "prevalence before": before["prevalence"],
                "prevalence (chance)": leak["prevalence"]["all"],
                "length alone": leak["length"]["all"],
                "best single code": best["count"]["all"] if best else None,
                "which": best["phecode"] if best else None,
                "length alone, test": leak["length"].get("test"),
                "single code, test": best["count"].get("test") if best else None,
                "largest possible ratio": statistics["max_attainable"].get(label),
            }
        )
    return rows


def page(sequences: Sequences) -> Page:
    """The page of a build: honesty table, funnel, selected codes, unmapped codes, agreement, the first sequences as timelines."""
    from bitimely_core.datasets.pophr import probe

    statistics, options = sequences.statistics, sequences.options
    rows = honesty(statistics)
    columns = list(rows[0]) if rows else ["label"]
    attained = statistics["leaks"]
    worst = max(attained, key=lambda name: _leak(attained[name]), default=None)
    verdict = f"{statistics['sequences']['n']:,} sequences of {statistics['selected']} PheCodes."
    if worst is not None and attained[worst]["best"]:
        one = attained[worst]
        verdict += (
            f" For {worst} the count of one code ({one['best']['phecode']}) scores {_leak(one):.3f} where chance is "
            f"{one['prevalence']['all']:.3f}: a model has to beat that to have learnt anything."
        )
    blocks: list[Figure | Table | str] = [
        "## What needs no model",
        Table(
            name="honesty",
            title="Average precision of chance, of the length alone, of one code alone",
            caption="All subjects with a sequence and a known label unless a column says test. A model means something only above these lines; "
            "if its score equals that of the best single code, it has read the label off its definition.",
            columns=columns,
            rows=[[_few(key, row[key]) for key in columns] for row in rows],
        ),
        "## What was kept",
        Table(
            name="funnel",
            title="From rows to sequences",
            caption="Every row is counted once, at the first check that it fails.",
            columns=["unit", "step", "count"],
            rows=[[line["unit"], line["step"], line["count"]] for line in probe.attrition(statistics["funnel"])],
        ),
        _ratios(sequences),
    ]
    if statistics["unmapped"]:
        unmapped = [[row["code"], _few("cases", row["n"])] for row in statistics["unmapped"][:SHOWN]]
        blocks.append(
            Table(
                name="unmapped",
                title="Codes without PheCode",
                caption="The most frequent ones. A code here that should mean something points to a wrong map or spelling.",
                columns=["code", "rows"],
                rows=unmapped,
            )
        )
    if statistics["agreement"]:
        blocks.append(_agreement(statistics["agreement"]))
    blocks += ["## The first sequences", _timelines(sequences)]
    return Page(
        title=f"Sequences {sequences.name}",
        verdict=verdict,
        notices=[*sequences.notices, *_choices(options)],
        blocks=blocks,
        facts={
            "Preset": options["preset"],
            "Leakage policy": options["leakage"],
            "Landmark": str(options["landmark"]) if options["landmark"] else "none",
            "Split": f"{sequences.split}, seed {sequences.seed}",
            "Sequences": f"{statistics['sequences']['n']:,}, median length {statistics['sequences']['median_length']:g}",
            "Events": f"{statistics['funnel']['events']:,}",
            "Fingerprint": sequences.fingerprint[:16],
        },
        summary={"honesty": rows, "statistics": statistics},
    )


def _leak(leak: dict[str, Any]) -> float:
    return float(leak["best"]["count"]["all"] or 0.0) if leak["best"] else 0.0


def _few(column: str, value: Any) -> Any:
    """Counts of few people are not shown."""
    return f"<{FEW}" if column == "cases" and isinstance(value, int) and 0 < value < FEW else value


def _choices(options: dict[str, Any]) -> list[str]:
    """What the paper leaves open and this build has decided."""
    if options["preset"] != "paper":
        return []
    return [
        "The paper names neither label rules, nor dates, nor dedupe, nor split, nor whether patients were filtered before the selection: what "
        "is used here (surveillance rules, days, one code a day, split by subject, selection on training subjects first) is this project's choice."
    ]


def _ratios(sequences: Sequences) -> Table:
    import polars as pl

    ratios = pl.read_parquet(sequences.folder / "ratios.parquet")
    names = dict(pl.read_parquet(sequences.folder / "vocab.parquet").select("code", "name").iter_rows())
    chosen = ratios.filter("selected").sort("target", "ratio", descending=[False, True])
    rows = []
    for row in chosen.head(3 * SHOWN).iter_rows(named=True):
        few = row["n_case_with"] < FEW
        counts = [f"<{FEW}" if few else row["n_case_with"], row["n_case"], "" if few else row["n_ref_with"], row["n_ref"]]
        rows.append([row["target"], row["code"], names.get(row["code"], ""), row["ratio"], row["lo"], row["hi"], *counts])
    return Table(
        name="ratios",
        title="Selected PheCodes",
        caption="Prevalence among the cases over that in the reference group, training subjects alone, with 95 % intervals. Few cases make "
        "large ratios of no meaning.",
        columns=["label", "PheCode", "name", "ratio", "lo", "hi", "cases with", "cases", "reference with", "reference"],
        rows=rows,
    )


def _agreement(cells: list[dict[str, Any]]) -> Table:
    found: dict[tuple[str, str], dict[str, int]] = {}
    for cell in cells:
        found.setdefault((cell["rule"], cell["flag"]), {})[cell["cell"]] = cell["n"]
    rows: list[list[Any]] = []
    for (rule, flag), n in sorted(found.items()):
        hidden = any(0 < n.get(key, 0) < FEW for key in ("tp", "fp", "fn", "tn"))
        rows.append([rule, flag, *(f"<{FEW}" if hidden and n.get(key, 0) < FEW else n.get(key, 0) for key in ("tp", "fp", "fn", "tn"))])
    return Table(
        name="agreement",
        title="Rules against the flags of the source",
        caption="Subjects. tp: both say yes; fp: the rule alone; fn: the flag alone.",
        columns=["rule", "flag", "tp", "fp", "fn", "tn"],
        rows=rows,
    )


def _timelines(sequences: Sequences) -> Figure:
    """The first sequences of the training split, codes of the labels' own definitions in colour."""
    train = sequences["train"] if len(sequences["train"]) else sequences
    rows = train.rows[:DRAWN]
    arrays = sequences.arrays(rows)
    values, times, mask = arrays["values"], arrays["times"], arrays["mask"]
    assert values is not None
    assert times is not None
    assert mask is not None
    own = {label: set(codes) for label, codes in sequences.statistics["own"].items() if not label.endswith("_source")}
    labels = list(own)
    target = sequences.targets(rows)
    lanes = []
    for i in range(len(rows)):
        codes = [sequences.vocabulary[code] for code in values[i][mask[i]]]
        groups = [next((k for k, label in enumerate(labels, 1) if code in own[label]), 0) for code in codes]
        said = [] if target is None else [name for k, name in enumerate(sequences.class_names) if target[i, k] == 1 and name in own]
        lanes.append({"name": ", ".join(said) or "none", "times": times[i][mask[i]].tolist(), "groups": groups})
    return Figure(
        name="timelines",
        title=f"{len(lanes)} sequences of the training split, labels at the left",
        caption="One mark an event, months since the first event that is read. Coloured: PheCodes of a label's own definition. If colour "
        "and label go together line by line, the label can be read off the input.",
        kind="timelines",
        data={"lanes": lanes, "groups": ["other PheCodes", *(f"codes of {label}" for label in labels)], "xlabel": "months"},
    )
