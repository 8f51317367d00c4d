"""The verbs ingest and tokenize on claims: cache, sequences, and the page on which every choice and every leak can be seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitimely_core.page import Figure, Page, Table

if TYPE_CHECKING:
    from bitimely_core.tokens import EventSequences

FEW = 11  # counts below it are not shown: the rule of the publisher of Medicare's data
DRAWN = 24  # sequences that are drawn
SHOWN = 30  # codes of a table


def _open_sequences(out: Path) -> EventSequences:
    """As many shards of sequences as are needed to draw some of the training split: not all of them fit into memory."""
    from bitimely_core.tokens.sequences import open_sequences

    shards = 1
    while True:
        found = open_sequences(out, verify=False, shards=shards)
        if len(found["train"]) >= DRAWN or shards >= len(found.manifest["shards"]):
            return found
        shards *= 2


def shortcut_table(statistics: dict[str, Any]) -> list[dict[str, Any]]:
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


def claims_page(sequences: EventSequences) -> Page:
    """The page of a build: honesty table, funnel, selected codes, unmapped codes, agreement, the first sequences as timelines."""
    from bitimely_core.claims import shortcut_baselines

    statistics, options = sequences.statistics, sequences.options
    rows = shortcut_table(statistics)
    columns = list(rows[0]) if rows else ["label"]
    attained = statistics["leaks"]
    worst = max(attained, key=lambda name: _leak_score(attained[name]), default=None)
    verdict = f"{statistics['sequences']['n']:,} sequences of {statistics['selected']} PheCodes."
    if worst is not None and attained[worst]["best"]:
        one = attained[worst]
        verdict += (
            f" For {worst} the count of one code ({one['best']['phecode']}) scores {_leak_score(one):.3f} where chance is "
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
            rows=[[_suppress(key, row[key]) for key in columns] for row in rows],
        ),
        "## What was kept",
        Table(
            name="funnel",
            title="From rows to sequences",
            caption="Every row is counted once, at the first check that it fails.",
            columns=["unit", "step", "count"],
            rows=[[line["unit"], line["step"], line["count"]] for line in shortcut_baselines.count_attrition(statistics["funnel"])],
        ),
        _ratio_table(sequences),
    ]
    if statistics["unmapped"]:
        unmapped = [[row["code"], _suppress("cases", row["n"])] for row in statistics["unmapped"][:SHOWN]]
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
        blocks.append(_agreement_table(statistics["agreement"]))
    blocks += ["## The first sequences", _timeline_figure(sequences)]
    return Page(
        title=f"Sequences {sequences.name}",
        verdict=verdict,
        notices=[*sequences.notices, *_describe_choices(options)],
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


def _leak_score(leak: dict[str, Any]) -> float:
    return float(leak["best"]["count"]["all"] or 0.0) if leak["best"] else 0.0


def _suppress(column: str, value: Any) -> Any:
    """Counts of few people are not shown."""
    return f"<{FEW}" if column == "cases" and isinstance(value, int) and 0 < value < FEW else value


def _describe_choices(options: dict[str, Any]) -> list[str]:
    """What the paper leaves open and this build has decided."""
    if options["preset"] != "paper":
        return []
    return [
        "The paper names neither label rules, nor dates, nor dedupe, nor split, nor whether patients were filtered before the selection: what "
        "is used here (surveillance rules, days, one code a day, split by subject, selection on training subjects first) is this project's choice."
    ]


def _ratio_table(sequences: EventSequences) -> Table:
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


def _agreement_table(cells: list[dict[str, Any]]) -> Table:
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


def _timeline_figure(sequences: EventSequences) -> Figure:
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
