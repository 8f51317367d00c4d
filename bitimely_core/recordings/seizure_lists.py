"""Reads lists of seizures: a text for all recordings of a patient, as CHB-MIT and Siena have."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from bitimely_core.errors import Finding, Reason, input_warning
from bitimely_core.formats import clocks
from bitimely_core.formats.source import Source
from bitimely_core.formats.text import decode_table
from bitimely_core.types import Annotation, SourceRows
from bitimely_core.wording import list_first

SEIZURE, BETWEEN = "seizure", "no seizure"
LIST_NAME = re.compile(r".*(?:summary|seizures?[-_ ]?list).*\.txt", re.IGNORECASE)
# `Seizure 1 Start Time: 1467 seconds` of CHB-MIT, `Seizure start time: 19.58.36` of Siena
LINE = re.compile(
    r"\s*(?:(?P<name>file name)|(?:file|registration) (?P<begin>start time)"
    r"|seizure(?: n? ?\d+)? (?:(?P<onset>start time)|(?P<end>end time)))\s*:\s*(?P<value>.*)",
    re.IGNORECASE,
)
CLOCK = re.compile(r"(\d{1,2})[.:](\d{2})[.:](\d{2})")
SECONDS = re.compile(r"(\d+(?:\.\d+)?)(?: *s(?:ec(?:onds?)?)?)?", re.IGNORECASE)


class SeizureLists(NamedTuple):
    """The seizures of the recordings of a folder."""

    files: list[str]  # the lists, and the annotations of WFDB that they stand for
    notes: dict[str, list[Annotation]]  # recording -> its seizures and what is between them
    findings: list[SourceRows | Finding]


def find_seizure_lists(source: Source, keys: Mapping[str, Sequence[str]]) -> SeizureLists:
    """The lists that name recordings; `keys`: recording -> its names in tables.

    A recording with a time that does not read has no labels: what is no seizure is not known.
    """
    owners = {name: rel for rel, names in keys.items() for name in names}
    lists = SeizureLists([], {}, [])
    for rel in filter(_is_list_name, source.files):
        text = decode_table(source.path(rel).read_bytes(), fallback="latin-1")
        seizures = parse_seizures(text)
        listed = {owners[name]: seizures[name] for name in seizures.keys() & owners.keys()}
        if not listed:
            continue
        timed = {name: spans for name, spans in listed.items() if all(map(_is_span, spans))}
        lists.files.append(rel)
        lists.files.extend(f"{name}.seizures" for name in timed)
        lists.notes.update({name: _fill_up(spans) for name, spans in timed.items()})
        lists.findings.extend(_describe_list(rel, listed, sorted(listed.keys() - timed.keys())))
    return lists


def _is_list_name(rel: str) -> bool:
    return LIST_NAME.fullmatch(PurePosixPath(rel).name) is not None


def parse_seizures(text: str) -> dict[str, list[tuple[float, float]]]:
    """Recording -> beginnings and ends of its seizures in seconds of the recording, NaN where a
    time does not read; {}: the text is no such list.
    """
    seizures: dict[str, list[tuple[float, float]]] = {}
    name, begin, onset = "", math.nan, math.nan
    for line in filter(None, map(LINE.fullmatch, text.splitlines())):
        value = line["value"].strip()
        if line["name"]:
            name, begin = value, math.nan
            seizures.setdefault(name, [])
        elif line["begin"]:
            begin = _read_time(value, 0.0)
        elif line["onset"]:
            onset = _read_time(value, begin)
        elif name:
            seizures[name].append((onset, _read_time(value, begin)))
    return seizures


def _read_time(text: str, begin: float) -> float:
    """Seconds from the beginning of a recording, which is at `begin` by the clock of the day."""
    if clock := CLOCK.match(text):
        hours, minutes, seconds = map(int, clock.groups())
        return (3600 * hours + 60 * minutes + seconds - begin) % clocks.DAY
    number = SECONDS.fullmatch(text)
    return float(number[1]) if number else math.nan


def _fill_up(spans: Iterable[tuple[float, float]]) -> list[Annotation]:
    """The seizures, and the stretches before, between and behind them."""
    notes: list[Annotation] = []
    last = 0.0
    for onset, end in sorted(spans):
        notes.append(Annotation(last, onset - last, BETWEEN))
        notes.append(Annotation(onset, end - onset, SEIZURE))
        last = end
    notes.append(Annotation(last, math.inf, BETWEEN))
    return [note for note in notes if note.duration > 0]


def _is_span(span: tuple[float, float]) -> bool:
    onset, end = span
    return onset < end


def _describe_list(
    rel: str, listed: Mapping[str, Sequence[tuple[float, float]]], faulty: Sequence[str]
) -> Iterator[SourceRows | Finding]:
    """The account of a list, what it is read as, and a warning on `faulty` recordings."""
    total = sum(map(len, listed.values()))
    lost = sum(len(listed[name]) for name in faulty)
    reason = Reason.ANNOTATION_SYNTAX
    yield SourceRows(
        file=rel, kind="seizures", seen=total, dropped={str(reason): lost} if lost else {}
    )
    problem = f"lists {total} seizures of {len(listed)} recordings"
    action = f"read as '{SEIZURE}', and the time between them as '{BETWEEN}'"
    yield Finding(Reason.LABEL, problem, action, level="info", file=rel, count=total)
    if faulty:
        problem = f"states no times that read for the seizures of {list_first(faulty, 3)}"
        action = "they have no labels"
        hint = "Write the seconds from the beginning of the recording"
        yield input_warning(reason, problem, action, hint, file=rel, count=len(faulty))
