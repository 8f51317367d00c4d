"""The page of event sequences: choices, shortcut baselines, selected codes and example
sequences.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bitimely_core import privacy
from bitimely_core.claims.disclosure import (
    CountDisclosure,
    flow_table,
    group_agreement,
    list_ratio_rows,
    open_disclosure,
    shortcut_table,
)
from bitimely_core.claims.shortcut_baselines import ShortcutRow, list_attrition
from bitimely_core.page import FlowPlot, Page, PageBuilder, Timeline, TimelinePlot
from bitimely_core.privacy import show_count
from bitimely_core.records import write_results
from bitimely_core.report.renderer import render_html
from bitimely_core.schemas.tokens import CohortFlow, SequenceStatistics

if TYPE_CHECKING:
    from bitimely_core.tokens import EventSequences

DRAWN = 24  # example sequences
SHOWN = 30  # codes of a table
HEADERS = {  # column of the page -> key of `shortcut_table`, which users read as JSON
    "label": "label",
    "cases": "cases",
    "prevalence before filters": "prevalence before",
    "prevalence": "prevalence (chance)",
    "sequence length only": "length alone",
    "best single code": "best single code",
    "code": "which",
    "sequence length only, test": "length alone, test",
    "single code, test": "single code, test",
    "largest possible ratio": "largest possible ratio",
}
CHOICES = (
    "The paper specifies neither label rules, nor dates, nor removal of duplicates, nor split, nor whether patients were filtered before the "
    "selection. Surveillance rules, days, one code a day, a split by subject and selection on training subjects are choices of this project."
)


def open_examples(out: Path) -> EventSequences:
    """As many shards of sequences as are needed for the examples: all of them may not fit into
    memory.
    """
    from bitimely_core.tokens.sequences import open_sequences

    shards = 1
    while True:
        sequences = open_sequences(out, verify=False, shards=shards)
        if len(sequences["train"]) >= DRAWN or shards >= len(sequences.manifest.shards):
            return sequences
        shards *= 2


def write_claims_page(folder: Path) -> Path:
    """Write `report.html` of the sequences in `folder`."""
    path = folder / "report.html"
    write_results(
        folder,
        {path.name: render_html(claims_page(open_examples(folder)), alone=True).encode()},
        beside=True,
    )
    return path


def claims_page(sequences: EventSequences) -> Page:
    """Shortcut baselines, funnel, selected and unmapped codes, agreement with source labels, and on
    demand sequences as timelines.
    """
    statistics, options = sequences.code_statistics, sequences.options
    disclosure = open_disclosure(sequences.folder)
    lengths = statistics.sequences
    n = disclosure.get(lengths.n, "out", "all")
    page = PageBuilder(f"Sequences {sequences.name}")
    page.notice(*sequences.notices)
    if options.preset == "paper":
        page.notice(CHOICES)
    page.notice(privacy.SHOWN if disclosure.exact else privacy.NOTICE)
    page.fact("Preset", options.preset)
    page.fact("Leakage policy", options.leakage)
    page.fact("Landmark", str(options.landmark.model_dump()) if options.landmark else "none")
    page.fact("Split", f"{sequences.split}, seed {sequences.seed}")
    page.fact(
        "Sequences",
        f"{privacy.WITHHELD if n is None else f'{n:,}'}, median length {lengths.median_length:g}",
    )
    page.fact("Events", f"{statistics.funnel.events:,}")
    page.fact("Fingerprint", sequences.fingerprint[:16])
    if statistics.cohort is not None:
        _add_cohort(page, statistics, statistics.cohort, disclosure)
    rows = shortcut_table(statistics, disclosure)
    page.section("Shortcut baselines")
    page.table(
        "honesty",
        "Average precision of chance, of sequence length only, and of the best single code",
        "All subjects with a sequence and a known label, unless a column says test. A useful model must exceed these baselines; a model that "
        "only equals the best single code has recovered the label from its definition.",
        HEADERS if rows else ["label"],
        [
            [show_count(row[key]) if key == "cases" else row[key] for key in HEADERS.values()]
            for row in rows
        ],
    )
    page.section("Funnel and selection")
    page.table(
        "funnel",
        "From rows to sequences",
        "Every row is counted once, at the first check that it fails.",
        ["unit", "step", "count"],
        [
            (unit, step, _print_attrition(disclosure, unit, step, n))
            for unit, step, n in list_attrition(statistics.funnel)
        ],
    )
    _add_ratios(page, sequences, disclosure)
    if unmapped := _list_unmapped(statistics, disclosure):
        caption = "The most frequent ones. An informative code in this table indicates a wrong map or spelling."
        page.table("unmapped", "Codes without PheCode", caption, ["code", "rows"], unmapped)
    if statistics.agreement:
        _add_agreement(page, statistics, disclosure)
    if options.individual_timelines:
        page.section("Example sequences")
        _add_timelines(page, sequences, statistics)
    return page.finish(
        _summarize(statistics, n, rows),
        {
            "honesty": rows,
            **({"cohort": flow_table(statistics, disclosure)} if statistics.cohort else {}),
            **({"statistics": statistics.to_json()} if disclosure.exact else {}),
        },
    )


def _add_cohort(
    page: PageBuilder, statistics: SequenceStatistics, flow: CohortFlow, disclosure: CountDisclosure
) -> None:
    """The flow chart of the cohort, and its counts as a table."""
    rows = flow_table(statistics, disclosure)
    page.fact("Cohort", flow.title)
    page.section("Cohort")
    steps = rows[1:-1]
    page.figure(
        "cohort",
        flow.title,
        "Subjects; each is counted at the first requirement that it does not meet.",
        FlowPlot(
            [
                "All subjects of the data",
                *("" for _ in flow.steps[:-1]),
                "The cohort",
                "With a sequence",
            ],
            [row.left for row in rows[:-1]],
            [row.step for row in steps],
            [row.left_out for row in steps],
        ),
    )
    page.table(
        "cohort-counts",
        "From all subjects to the cohort",
        "The outcome is counted among the members of the cohort, with a sequence or without.",
        ["step", "left out", "left"],
        [
            [row.step, show_count(row.left_out) if row in steps else "", show_count(row.left)]
            for row in rows
        ],
    )


def _summarize(statistics: SequenceStatistics, n: int | None, rows: list[ShortcutRow]) -> str:
    """Number of sequences and PheCodes, and the label with the highest score of a single code."""
    verdict = (
        f"{'Sequences' if n is None else f'{n:,} sequences'} of {statistics.selected} PheCodes."
    )
    scored = [
        (score, row)
        for row in rows
        if isinstance(score := row["best single code"], float)
        and row["prevalence (chance)"] is not None
    ]
    if not scored:
        return verdict
    score, row = max(scored, key=lambda one: one[0])
    return (
        f"{verdict} For {row['label']} the count of one code ({row['which']}) has average precision {score:.3f} where chance is "
        f"{row['prevalence (chance)']:.3f}: a useful model must exceed this baseline."
    )


def _print_attrition(disclosure: CountDisclosure, unit: str, step: str, n: int) -> int | str:
    """A count of the funnel: of subjects as decided, of rows rounded up, of events as it is."""
    keys = {
        "known": ("in",),
        "excluded: no birth date": ("no birth",),
        "with a sequence": ("out", "all"),
    }
    return (
        show_count(disclosure.get(n, *keys[step]))
        if unit == "subjects"
        else n
        if unit == "events" or disclosure.exact
        else privacy.round_rows(n)
    )


def _list_unmapped(
    statistics: SequenceStatistics, disclosure: CountDisclosure
) -> list[list[object]]:
    """The most frequent codes without PheCode with their rows; codes of few rows are not named."""
    if disclosure.exact:
        return [[row.code, row.n] for row in statistics.unmapped[:SHOWN]]
    known = [
        (privacy.round_rows(row.n), row.code)
        for row in statistics.unmapped
        if not privacy.is_small(row.n)
    ]
    return [[code, n] for n, code in sorted(known, key=lambda one: (-one[0], one[1]))[:SHOWN]]


def _add_ratios(page: PageBuilder, sequences: EventSequences, disclosure: CountDisclosure) -> None:
    import polars as pl

    names = dict(
        pl.read_parquet(sequences.folder / "vocab.parquet").select("code", "name").iter_rows()
    )
    page.table(
        "ratios",
        "Selected PheCodes",
        "Prevalence among the cases over that in the reference group, training subjects only. Large ratios of few cases are not informative.",
        [
            "label",
            "PheCode",
            "name",
            "ratio",
            "95 % CI lower",
            "upper",
            "cases with",
            "cases",
            "reference with",
            "reference",
        ],
        [
            [
                row.label,
                row.code,
                names.get(row.code, ""),
                *row.numbers,
                *map(show_count, row.counts),
            ]
            for row in list_ratio_rows(sequences, disclosure)[: 3 * SHOWN]
        ],
    )


def _add_agreement(
    page: PageBuilder, statistics: SequenceStatistics, disclosure: CountDisclosure
) -> None:
    rows: list[list[object]] = []
    for (rule, flag), n in group_agreement(statistics.agreement).items():
        is_open = not {(rule, flag, cell) for cell in n} & disclosure.withheld
        rows.append([rule, flag, *(show_count(count if is_open else None) for count in n.values())])
    caption = "Subjects. tp: positive by both; fp: by the rule only; fn: by the source only; tn: by neither."
    page.table(
        "agreement",
        "Label rules against labels of the source",
        caption,
        ["rule", "flag", "tp", "fp", "fn", "tn"],
        rows,
    )


def _add_timelines(
    page: PageBuilder, sequences: EventSequences, statistics: SequenceStatistics
) -> None:
    """The first sequences of the training split, codes of the labels' own definitions in colour."""
    train = sequences["train"] if len(sequences["train"]) else sequences
    rows = train.rows[:DRAWN]
    arrays = sequences.arrays(rows)
    values, times, mask = arrays["values"], arrays["times"], arrays["mask"]
    assert values is not None
    assert times is not None
    assert mask is not None
    own = {
        label: set(codes)
        for label, codes in statistics.own.items()
        if not label.endswith("_source")
    }
    labels = list(own)
    target = sequences.targets(rows)
    lanes = []
    for i in range(len(rows)):
        codes = [sequences.vocabulary[code] for code in values[i][mask[i]]]
        groups = [
            next((k for k, label in enumerate(labels, 1) if code in own[label]), 0)
            for code in codes
        ]
        positive = (
            []
            if target is None
            else [
                name
                for k, name in enumerate(sequences.class_names)
                if target[i, k] == 1 and name in own
            ]
        )
        lanes.append(Timeline(", ".join(positive) or "none", times[i][mask[i]].tolist(), groups))
    page.figure(
        "timelines",
        f"{len(lanes)} sequences of the training split, labels at the left",
        "One mark per event, months since the first event that is read. Coloured: PheCodes of a label's own definition. If colour and label "
        "agree line by line, the label can be read from the input.",
        TimelinePlot(
            lanes, ["other PheCodes", *(f"codes of {label}" for label in labels)], "months"
        ),
    )
