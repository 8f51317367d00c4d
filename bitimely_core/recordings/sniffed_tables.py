"""Which tables of a folder are recordings, and what is said of how they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bitimely_core.errors import Finding, Reason, UserError, input_warning
from bitimely_core.formats import table_facts
from bitimely_core.formats.sniffer import sniff_table
from bitimely_core.formats.source import Source
from bitimely_core.formats.table_facts import ClockChoice, TableFacts, looks_like_samples
from bitimely_core.recordings.mapping import FileRule, Format, find_suffix
from bitimely_core.recordings.sidecars import describe_table
from bitimely_core.system_errors import raise_system_error

DESCRIBED = 200  # tables whose first lines are looked at for what is said of them


def sniff_file(source: Source, rel: str, rule: FileRule | None = None) -> TableFacts | None:
    """How the table `rel` is written; None for what does not read as a table."""
    if rel in source.rejected:
        return None
    rule = rule or FileRule()
    try:
        facts = sniff_table(source.path(rel), rule.delimiter, ClockChoice(rule.time, rule.clock))
        described = describe_table(source, rel)
        return table_facts.add_description(facts, described.rate, described.headers)
    except UserError as error:
        raise_system_error(error)
        return None  # its unit says why


def is_timed_table(facts: TableFacts | None) -> bool:
    """Whether a table is one of samples with a rate, so that it is read without a map."""
    return facts is not None and looks_like_samples(facts) and bool(facts.found_rate)


def is_sample_table(source: Source, rel: str, rule: FileRule, *, has_map: bool) -> bool:
    """Whether a table is a recording.

    Without a map it must look like one and have a rate; with one its group says so, but a text
    file (.txt) that no pattern names must look like one, and a table without a rate of its own, in
    a group that states none.
    """
    if not has_map:
        facts = sniff_file(source, rel)
        # one that is packed and cut off would be taken for another kind of file
        return is_timed_table(facts) or (facts is None and find_suffix(rel) == ".csv.gz")
    if _lacks_rate(source, rel, rule):
        return False
    is_named = rule.format or find_suffix(rule.pattern) == find_suffix(rel)
    if is_named or not find_suffix(rel).startswith(".txt"):
        return True
    return holds_samples(source, rel)


def _lacks_rate(source: Source, rel: str, rule: FileRule) -> bool:
    """Whether neither a table that looks like no samples nor its group states a rate."""
    if "*" not in rule.pattern or rule.rate or rule.time or rule.series or rule.format:
        return False
    facts = sniff_file(source, rel)
    return facts is not None and not facts.found_rate and not looks_like_samples(facts)


def holds_samples(source: Source, rel: str) -> bool:
    """Whether a file is a table that looks like samples."""
    facts = sniff_file(source, rel)
    return facts is not None and looks_like_samples(facts)


def describe_tables(
    source: Source, recordings: Mapping[str, tuple[Format, FileRule]]
) -> Iterator[Finding]:
    """How the tables are read: a line a group of files, a warning where a unit was assumed."""
    rules = [(rel, rule) for rel, (kind, rule) in recordings.items() if kind == "table"]
    groups: dict[TableFacts, list[tuple[str, FileRule, TableFacts]]] = {}
    for rel, rule in rules[:DESCRIBED]:
        facts = None if rule.series else sniff_file(source, rel, rule)
        if facts is not None:
            groups.setdefault(table_facts.strip_values(facts), []).append((rel, rule, facts))
    for same in groups.values():
        yield from _describe_group(*same[0], len(same))


def _describe_group(rel: str, rule: FileRule, facts: TableFacts, count: int) -> Iterator[Finding]:
    """The line and the warning of the tables of one group, by the first of them."""
    files = f" ({count} files)" if count > 1 else ""
    if rule.rate is None or not table_facts.is_plain(facts):
        line = f"read as: {table_facts.describe_facts(facts)}{files}"
        yield Finding(Reason.FORMAT, line, level="info", file=rel, count=count)
    doubt = "" if rule.clock or rule.rate else table_facts.describe_doubt(facts)
    if doubt:
        action = "Where that is wrong, state `clock` in [[files]] of --map"
        problem = doubt + files
        yield input_warning(Reason.SAMPLING_RATE, problem, "", action, file=rel, count=count)
