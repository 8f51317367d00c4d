"""Finds the sessions of devices that write a file a sensor, as `vendors.toml` knows them.

The tables of one device in one folder whose names begin alike are one recording, its channels at
their own rates. Tables of events beside them, such as beats, are its labels.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from pathlib import PurePosixPath
from typing import NamedTuple

from bitimely_core.errors import Finding, Reason, UserError
from bitimely_core.formats import vendors
from bitimely_core.formats.source import Source
from bitimely_core.formats.table_text import open_text
from bitimely_core.recordings.mapping import SUFFIXES, find_suffix, strip_suffix
from bitimely_core.recordings.sample_tables import list_channel_names
from bitimely_core.recordings.sidecars import is_bids
from bitimely_core.recordings.sniffed_tables import sniff_file
from bitimely_core.system_errors import raise_system_error

HEAD = 1 << 12  # bytes by which a form is known
ROOT = "."  # name of the session of a folder itself


class Session(NamedTuple):
    """The files of a session."""

    name: str  # of its recording
    parts: list[str]  # tables of samples
    events: list[str]  # tables with a row an event

    @property
    def is_joined(self) -> bool:
        """Whether its tables are one recording."""
        return len(self.parts) > 1


def find_sessions(source: Source, recordings: Collection[str]) -> list[Session]:
    """The sessions among the tables of a folder, none in BIDS, whose events are found by its names.

    `recordings`: those that may hold samples.
    """
    if is_bids(source):
        return []
    groups: dict[tuple[str, str], Session] = {}
    for rel in source.files:
        form = read_form(source, rel)
        if form is None or not form.device:
            continue
        name = _name_session(rel, form)
        session = groups.setdefault((name, form.device), Session(name, [], []))
        if form.events:
            session.events.append(rel)
        elif rel in recordings:
            session.parts.append(rel)
    names = Counter(session.name for session in groups.values())
    return [
        session
        for session in groups.values()
        if session.parts and names[session.name] == 1 and _are_of_one(source, session.parts)
    ]


def read_form(source: Source, rel: str) -> vendors.VendorForm | None:
    """The vendor's form of a table; None for another file, and one that does not read."""
    if SUFFIXES.get(find_suffix(rel)) != "table" or find_suffix(rel) in {".parquet", ".pq"}:
        return None
    try:
        with open_text(source.path(rel)) as stream:
            head = stream.file.read(HEAD).decode("latin-1")
    except UserError as error:
        raise_system_error(error)
        return None  # its unit says what is wrong
    lines = "".join(f"{line}\n" for line in head.splitlines())
    return vendors.find_form(PurePosixPath(rel).name, lines)


def _name_session(rel: str, form: vendors.VendorForm) -> str:
    """The folder of a file with the beginning of its name, which the name of the sensor ends."""
    path = PurePosixPath(rel)
    match = re.search(form.file, path.name) if form.file else None
    stem = PurePosixPath(strip_suffix(rel)).name
    beginning = path.name[: match.start()] if match else stem.rpartition("_")[0]
    return (path.parent / beginning).as_posix()


def _are_of_one(source: Source, parts: Sequence[str]) -> bool:
    """Whether tables hold different channels."""
    if len(parts) < 2:
        return True
    sniffed = [sniff_file(source, rel) for rel in parts]
    names = list(chain.from_iterable(map(list_channel_names, filter(None, sniffed))))
    return all(sniffed) and len(set(names)) == len(names)


def report_events(source: Source, sessions: Sequence[Session]) -> Iterator[Finding]:
    """How tables of events are read: a line a form."""
    titles: dict[str, list[str]] = {}
    for rel in chain.from_iterable(session.events for session in sessions):
        form = read_form(source, rel)
        if form is not None:
            titles.setdefault(f"{form.title}; a row a point, called '{form.events}'", []).append(
                rel
            )
    for line, rels in titles.items():
        files = f" ({len(rels)} files)" if rels[1:] else ""
        problem = f"read as: {line}{files}"
        yield Finding(Reason.FORMAT, problem, level="info", file=rels[0], count=len(rels))
