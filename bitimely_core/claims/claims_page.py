"""The page of a set of event sequences: choices, shortcut baselines, selected codes and example
sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

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
from bitimely_core.page import FlowPlot, Page, PageBuilder, Timeline, TimelinePlot, make_tables
from bitimely_core.privacy import show_count
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
    "The paper specifies neither label rules, nor dates, nor removal of duplicates, nor split, nor "
    "whether patients were filtered before the selection. Surveillance rules, days, one code a "
    "day, a split by subject and selection on training subjects are choices of this project."
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


def claims_page(sequences: EventSequences) -> Page:
    """Shortcut baselines, funnel, selected and unmapped codes, agreement with source labels, and on
    demand sequences as timelines.
    """
    statistics = sequences.code_statistics
    disclosure = open_disclosure(sequences.folder)
    page = PageBuilder(f"Sequences {sequences.name}")
    count = disclosure.get(statistics.sequences.n, "out", "all")
    _add_facts(page, sequences, disclosure, count)
    rows = shortcut_table(statistics, disclosure)
    summary: dict[str, object] = {"honesty": rows}
    if statistics.cohort is not None:
        _add_cohort(page, statistics, statistics.cohort, disclosure)
        summary["cohort"] = flow_table(statistics, disclosure)
    if disclosure.exact:
        summary["statistics"] = statistics.to_json()
    page.section("Shortcut baselines")
    lines = [
        [show_count(row[key]) if key == "cases" else row[key] for key in HEADERS.values()]
        for row in rows
    ]
    page.table(
        "honesty",
        "Average precision of chance, of sequence length only, and of the best single code",
        "All subjects with a sequence and a known label, unless a column says test. A useful model "
        "must exceed these baselines; a model that only equals the best single code has recovered "
        "the label from its definition.",
        HEADERS if rows else ["label"],
        lines,
    )
    _add_selection(page, sequences, disclosure)
    if sequences.options.individual_timelines:
        page.section("Example sequences")
        _add_timelines(page, sequences, statistics)
    return page.finish(_summarize(statistics, count, rows), summary)


def _add_facts(
    page: PageBuilder, sequences: EventSequences, disclosure: CountDisclosure, count: int | None
) -> None:
    """Notices and facts at the top; `count`: sequences, None: withheld."""
    statistics, options = sequences.code_statistics, sequences.options
    page.notice(*sequences.notices)
    if options.preset == "paper":
        page.notice(CHOICES)
    page.notice(privacy.SHOWN if disclosure.exact else privacy.NOTICE)
    page.fact("Preset", options.preset)
    page.fact("Leakage policy", options.leakage)
    page.fact("Landmark", str(options.landmark.model_dump()) if options.landmark else "none")
    page.fact("Split", f"{sequences.split}, seed {sequences.seed}")
    length = f"median length {statistics.sequences.median_length:g}"
    page.fact("Sequences", f"{privacy.format_count(count)}, {length}")
    page.fact("Events", f"{statistics.funnel.events:,}")
    page.fact("Fingerprint", sequences.fingerprint[:16])


def _add_selection(
    page: PageBuilder, sequences: EventSequences, disclosure: CountDisclosure
) -> None:
    """The way from rows to selected codes, codes without PheCode, and other labels."""
    statistics = sequences.code_statistics
    page.section("Funnel and selection")
    page.table(
        "funnel",
        "From rows to sequences",
        "Every row is counted once, at the first check that it fails.",
        ["unit", "step", "count"],
        [
            (unit, step, _print_attrition(disclosure, unit, step, count))
            for unit, step, count in list_attrition(statistics.funnel)
        ],
    )
    _add_ratios(page, sequences, disclosure)
    caption = (
        "The most frequent ones. An informative code in this table indicates a wrong map or "
        "spelling."
    )
    rows = _list_unmapped(statistics, disclosure)
    page.add(*make_tables("unmapped", "Codes without PheCode", caption, ["code", "rows"], rows))
    _add_agreement(page, statistics, disclosure)


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
                *[""] * (len(flow.steps) - 1),
                "The cohort",
                "With a sequence",
            ],
            [row.left for row in rows[:-1]],
            [row.step for row in steps],
            [row.left_out for row in steps],
        ),
    )
    lines = []
    for row in rows:
        left_out = show_count(row.left_out) if row in steps else ""
        lines.append([row.step, left_out, show_count(row.left)])
    page.table(
        "cohort-counts",
        "From all subjects to the cohort",
        "The outcome is counted among the members of the cohort, with a sequence or without.",
        ["step", "left out", "left"],
        lines,
    )


def _summarize(statistics: SequenceStatistics, count: int | None, rows: list[ShortcutRow]) -> str:
    """Number of sequences and PheCodes, and the label with the highest score of a single code."""
    sequences = "Sequences" if count is None else f"{count:,} sequences"
    verdict = f"{sequences} of {statistics.selected} PheCodes."
    scored = []
    for row in rows:
        score, chance = row["best single code"], row["prevalence (chance)"]
        if isinstance(score, float) and chance is not None:
            scored.append((score, chance, row))
    if not scored:
        return verdict
    score, chance, row = max(scored, key=lambda entry: entry[0])
    return (
        f"{verdict} For {row['label']} the count of one code ({row['which']}) has average "
        f"precision {score:.3f} where chance is {chance:.3f}: a useful model must exceed this "
        "baseline."
    )


def _print_attrition(disclosure: CountDisclosure, unit: str, step: str, count: int) -> int | str:
    """A count of the funnel: of subjects as decided, of rows rounded up, of events as it is."""
    keys = {
        "known": ("in",),
        "excluded: no birth date": ("no birth",),
        "with a sequence": ("out", "all"),
    }
    if unit == "subjects":
        return show_count(disclosure.get(count, *keys[step]))
    return count if unit == "events" or disclosure.exact else privacy.round_rows(count)


def _list_unmapped(
    statistics: SequenceStatistics, disclosure: CountDisclosure
) -> list[list[object]]:
    """The most frequent codes without PheCode with their rows; codes of few rows are not named."""
    if disclosure.exact:
        return [[row.code, row.n] for row in statistics.unmapped[:SHOWN]]
    codes = [
        (-privacy.round_rows(row.n), row.code)
        for row in statistics.unmapped
        if not privacy.is_small(row.n)
    ]
    return [[code, -count] for count, code in sorted(codes)[:SHOWN]]


def _add_ratios(page: PageBuilder, sequences: EventSequences, disclosure: CountDisclosure) -> None:
    """Selected codes with their ratios, some for each label."""
    import polars as pl

    vocabulary = pl.read_parquet(sequences.folder / "vocab.parquet", glob=False)
    names = dict(vocabulary.select("code", "name").iter_rows())
    ratio = ("ratio", "95 % CI lower", "upper")
    counts = ("cases with", "cases", "reference with", "reference")
    rows = []
    for row in list_ratio_rows(sequences, disclosure)[: 3 * SHOWN]:
        name = names.get(row.code, "")
        rows.append([row.label, row.code, name, *row.numbers, *map(show_count, row.counts)])
    page.table(
        "ratios",
        "Selected PheCodes",
        "Prevalence among the cases over that in the reference group, training subjects only. "
        "Large ratios of few cases are not informative.",
        ["label", "PheCode", "name", *ratio, *counts],
        rows,
    )


def _add_agreement(
    page: PageBuilder, statistics: SequenceStatistics, disclosure: CountDisclosure
) -> None:
    """Label rules against labels of the source, where it has some."""
    rows: list[list[object]] = []
    for (rule, flag), counts in group_agreement(statistics.agreement).items():
        is_open = not {(rule, flag, cell) for cell in counts} & disclosure.withheld
        cells = [show_count(count if is_open else None) for count in counts.values()]
        rows.append([rule, flag, *cells])
    tables = make_tables(
        "agreement",
        "Label rules against labels of the source",
        "Subjects. tp: positive by both; fp: by the rule only; fn: by the source only; tn: by "
        "neither.",
        ["rule", "flag", "tp", "fp", "fn", "tn"],
        rows,
    )
    page.add(*tables)


def _number_codes(definitions: Sequence[Iterable[str]]) -> dict[str, int]:
    """Code -> number of its definition, from 1; a code of several has that of the first."""
    groups: dict[str, int] = {}
    for number, codes in enumerate(definitions, 1):
        groups = dict.fromkeys(codes, number) | groups
    return groups


def _list_labels(sequences: EventSequences, target: np.ndarray) -> list[str]:
    """The labels that a sequence has; `target` [labels], 1 where it has one."""
    return [sequences.class_names[k] for k in np.flatnonzero(target == 1)]


def _add_timelines(
    page: PageBuilder, sequences: EventSequences, statistics: SequenceStatistics
) -> None:
    """The first sequences of the training split, codes of the labels' own definitions in colour."""
    train = sequences["train"] if len(sequences["train"]) else sequences
    rows = train.rows[:DRAWN]
    arrays, target = sequences.arrays(rows), sequences.targets(rows)
    values, times, mask = arrays["values"], arrays["times"], arrays["mask"]
    assert values is not None
    assert times is not None
    assert mask is not None
    definitions = {
        label: codes for label, codes in statistics.own.items() if not label.endswith("_source")
    }
    groups = _number_codes(list(definitions.values()))
    lanes = []
    for i, is_event in enumerate(mask):
        colours = [groups.get(sequences.vocabulary[code], 0) for code in values[i][is_event]]
        labels = [] if target is None else _list_labels(sequences, target[i])
        name = ", ".join(filter(definitions.__contains__, labels)) or "none"
        lanes.append(Timeline(name, times[i][is_event].tolist(), colours))
    page.figure(
        "timelines",
        f"{len(lanes)} sequences of the training split, labels at the left",
        "One mark per event, months since the first event that is read. Coloured: PheCodes of a "
        "label's own definition. If colour and label agree line by line, the label can be read "
        "from the input.",
        TimelinePlot(
            lanes, ["other PheCodes", *(f"codes of {label}" for label in definitions)], "months"
        ),
    )
