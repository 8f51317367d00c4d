"""Reads what lies beside a recording of a BIDS folder: its channels table and its rate.

A file of a folder above counts, too, for all recordings whose names have its parts.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import NamedTuple

from bitimely_core.errors import Finding, Reason, input_error
from bitimely_core.formats import tables
from bitimely_core.formats.source import Source, locate_errors
from bitimely_core.recordings.mapping import EMPTY_CELLS, ChannelFacts, strip_suffix

COLUMNS = ("name", "type", "units", "status")  # of a channels table; the first must be there
RATE = "SamplingFrequency"


class Sidecars(NamedTuple):
    """What the files beside a recording say of it."""

    facts: dict[str, ChannelFacts]  # channel -> its type, unit and status
    rate: float | None  # Hz
    files: tuple[str, ...]


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
    parts = set(strip_suffix(PurePosixPath(rel).name).split("_")[:-1])
    names: list[str] = []
    for folder in PurePosixPath(rel).parents:
        fits: list[tuple[int, str]] = []
        for name in source.files:
            path = PurePosixPath(name)
            if path.parent == folder and (path.name == ending or name.endswith(f"_{ending}")):
                own_parts = set(path.name.removesuffix(ending).rstrip("_").split("_")) - {""}
                if own_parts <= parts:
                    fits.append((-len(own_parts), name))
        names += [name for _, name in sorted(fits)]
    return names


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
                cells = (("" if c.strip().lower() in EMPTY_CELLS else c.strip()) for c in row.cells)
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
