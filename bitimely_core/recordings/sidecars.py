"""Reads what lies beside a recording of a BIDS folder: its channels table, rate and events.

A file of a folder above counts, too, for all recordings whose names have its parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from bitimely_core.errors import Finding, Reason, input_error
from bitimely_core.formats import tables
from bitimely_core.formats.source import Source, locate_errors
from bitimely_core.formats.stage_texts import name_stage
from bitimely_core.formats.text import sanitize_label
from bitimely_core.formats.units import find_rate_fault
from bitimely_core.recordings.arrays import RATE_WORDS
from bitimely_core.recordings.folder_tables import PARTICIPANTS, is_missing
from bitimely_core.recordings.mapping import ChannelFacts, LabelFile, strip_suffix
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import find_only

COLUMNS = ("name", "type", "units", "status")  # of a channels table; the first must be there
RATE, HEADERS, START = "SamplingFrequency", "Columns", "StartTime"
MAX_DESCRIPTION = 1 << 20  # bytes


class Sidecars(NamedTuple):
    """What the files beside a recording say of it."""

    facts: dict[str, ChannelFacts]  # channel -> its type, unit and status
    rate: float | None  # Hz
    files: tuple[str, ...]


def is_bids(source: Source) -> bool:
    """Whether a folder is one of BIDS: it says so, or lists participants of files called `sub-`."""
    has_participants = PARTICIPANTS in source.files and any("sub-" in rel for rel in source.files)
    return "dataset_description.json" in source.files or has_participants


def read_sidecars(source: Source, rel: str) -> Sidecars:
    """The channels table and the rate of a recording, by the nearest file that states each.

    Raises UserError: the faults of these files.
    """
    table = find_inherited(source, rel, "channels.tsv")[:1]
    facts = _read_channels(source, table[0]) if table else {}
    kind = strip_suffix(PurePosixPath(rel).name).rpartition("_")[2]
    described = find_inherited(source, rel, f"{kind}.json")
    for name in described:
        rate = _read_rate(source, name)
        if rate is not None:
            return Sidecars(facts, rate, (*table, name))
    return Sidecars(facts, None, tuple(table))


def find_inherited(source: Source, rel: str, ending: str) -> list[str]:
    """Files `..._<ending>` of the folder of a recording and of those above it, the nearest first.

    All parts of their names must be in that of the recording.
    """
    parts = set(strip_suffix(PurePosixPath(rel).name).split("_"))
    folders = list(PurePosixPath(rel).parents)
    fits: list[tuple[int, int, str]] = []
    for name in filter(lambda name: name.endswith(ending), source.files):
        path = PurePosixPath(name)
        *entities, last = path.name.split("_")
        if path.parent in folders and last == ending and parts.issuperset(entities):
            fits.append((folders.index(path.parent), -len(entities), name))
    return [name for *_, name in sorted(fits)]


def _read_channels(source: Source, name: str) -> dict[str, ChannelFacts]:
    facts: dict[str, ChannelFacts] = {}
    with locate_errors(name):
        path = source.path(name)
        present = tables.read_names(path, delimiter="\t")
        columns = [column for column in COLUMNS if column in present]
        if COLUMNS[0] not in columns:
            return {}
        for row in tables.read_rows(path, columns, delimiter="\t"):
            if not isinstance(row, Finding):
                cells = ("" if is_missing(cell) else cell.strip() for cell in row.cells)
                texts = dict(zip(columns, cells, strict=True))
                kind, unit = texts.get("type", "").upper(), texts.get("units", "")
                is_bad = texts.get("status", "").lower() == "bad"
                facts[texts["name"]] = ChannelFacts(kind, unit, is_bad)
    return facts


def _read_rate(source: Source, name: str) -> float | None:
    with locate_errors(name):
        try:
            content = json.loads(source.path(name).read_bytes())
        except ValueError:
            raise input_error(
                Reason.METADATA_SYNTAX, "is no JSON", "expected the description of a recording"
            ) from None
    rate = content.get(RATE) if isinstance(content, dict) else None
    return float(rate) if isinstance(rate, int | float) and rate > 0 else None


class TableDescription(NamedTuple):
    """What the file `X.json` beside a table of samples says of it."""

    rate: float | None = None  # Hz
    start: float = 0.0  # seconds of its first sample on the clock of the events
    headers: tuple[tuple[str, str], ...] = ()  # name and unit of each column
    files: tuple[str, ...] = ()


def describe_table(source: Source, rel: str) -> TableDescription:
    """The rate and the columns of a table by the description beside it, as BIDS has one beside
    physiology; nothing where there is none.
    """
    stem = strip_suffix(rel)
    names = [f"{stem}.json"]
    if is_bids(source):
        names = find_inherited(source, rel, f"{stem.rpartition('_')[2]}.json")
    name = next((name for name in names if name in source.files), "")
    if not name:
        return TableDescription()
    content = _read_object(source, name)
    texts = content.get(HEADERS)
    headers = tuple(
        _read_header(content, text)
        for text in (texts if isinstance(texts, list) else [])
        if isinstance(text, str)
    )
    rate, start = _find_rate(content), content.get(START)
    seconds = float(start) if isinstance(start, int | float) else 0.0
    return TableDescription(rate, seconds, headers, (name,) if rate or headers else ())


def _read_object(source: Source, name: str) -> dict[str, object]:
    """The content of a file of JSON; {} where it is no object, such as a list of labels."""
    path = source.path(name)
    try:
        content = json.loads(path.read_bytes()[:MAX_DESCRIPTION])
    except (ValueError, OSError, RecursionError) as error:
        raise_system_error(error, path, stored=False)
        return {}
    return content if isinstance(content, dict) else {}


def _find_rate(content: Mapping[str, object]) -> float | None:
    """Hz, where a description states one rate, under any of its names."""
    numbers = [value for key, value in content.items() if key.lower() in RATE_WORDS]
    rates = {float(n) for n in numbers if isinstance(n, int | float) and not find_rate_fault(n)}
    return find_only(rates, None)


def _read_header(content: Mapping[str, object], name: str) -> tuple[str, str]:
    """The name and the unit of a column."""
    described = content.get(name)
    unit = described.get("Units") if isinstance(described, dict) else None
    return sanitize_label(name), sanitize_label(unit) if isinstance(unit, str) else ""


def find_all_events(source: Source, recordings: Iterable[str]) -> Iterator[tuple[str, LabelFile]]:
    """Each recording that has events, and its events table with the words of its description."""
    for rel in recordings:
        tables_of_events = find_inherited(source, rel, "events.tsv")
        if rel in source.rejected or not tables_of_events:
            continue
        table = tables_of_events[0]
        descriptions = find_inherited(source, rel, "events.json")
        levels = _read_levels(source, descriptions[0]) if descriptions else {}
        yield rel, LabelFile(source.path(table), table, "bids", levels=levels)


def _read_levels(source: Source, rel: str) -> dict[str, str]:
    """Text -> word, by `Levels` of the columns of labels; sentences that describe are no words.

    A level is a word where it is a sleep stage, or where the text is a number.
    """
    try:
        with locate_errors(rel):
            content = json.loads(source.path(rel).read_text("utf-8-sig"))
    except (ValueError, OSError, RecursionError) as error:
        raise_system_error(error, source.root / rel, stored=False)
        return {}
    levels: dict[str, str] = {}
    for column in ("value", "trial_type"):
        described = content.get(column) if isinstance(content, dict) else None
        words = described.get("Levels") if isinstance(described, dict) else None
        for text, word in words.items() if isinstance(words, dict) else ():
            is_code = re.fullmatch(r"-?\d+", text) is not None and len(str(word)) <= 40
            if isinstance(word, str) and (is_code or name_stage(word)):
                levels[text] = word
    return levels
