"""Reads scored events in XML, in seconds: those of the National Sleep Research Resource
(`-nsrr.xml`) and of Profusion (`-profusion.xml`), which also has a stage an epoch.

The parser reads elements alone: a document type, hence every entity, is refused. Of the first
concepts are read that are coded, as `Stage 1 sleep|1` or `SDO:WakeState`; other texts, such as
start times and comments, are not.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple
from xml.parsers import expat

from bitimely_core.errors import Reason, UserError, input_error, safe_text
from bitimely_core.formats import tables
from bitimely_core.formats.stage_texts import EPOCH
from bitimely_core.types import Annotation

RESOURCE, PROFUSION = "PSGAnnotation", "CMPStudyConfig"
FIELDS = ("EventConcept", "Name", "Start", "Duration")


class XmlTexts(NamedTuple):
    """The texts of a file, not yet understood."""

    root: str
    rows: list[dict[str, str]]  # scored events: name of an element -> its text
    stages: list[str]  # of Profusion: digits, one an epoch
    epoch: str  # seconds, "" where the file states none


def read_scored(path: Path) -> tuple[list[Annotation], list[Annotation]]:
    """The stages of Profusion, labelled by their digits, and the scored events of either form.

    Raises UserError: annotation_syntax for a file that is no such XML, for a document type, and for
    an event without times.
    """
    texts = _parse(path)
    if texts.root == RESOURCE:
        return [], _list_coded(texts.rows)
    is_stated = tables.NUMBER.fullmatch(texts.epoch) is not None
    length = float(texts.epoch) if is_stated else EPOCH
    if not 0 < length <= 600:
        raise _syntax_error(f"states epochs of {length:g} s", "expected up to 600 s")
    stages = [Annotation(i * length, length, text.strip()) for i, text in enumerate(texts.stages)]
    events = [
        _make_event(row, number, row["Name"])
        for number, row in enumerate(texts.rows, 1)
        if row.get("Name", "").strip()
    ]
    return stages, events


def read_events(path: Path) -> list[Annotation]:
    """The scored events of the National Sleep Research Resource, in the order of the file.

    Raises UserError: as `read_scored`.
    """
    texts = _parse(path)
    if texts.root != RESOURCE:
        problem = f"begins with the element {safe_text(texts.root)}"
        raise _syntax_error(problem, f"expected {RESOURCE}")
    return _list_coded(texts.rows)


def is_scored(head: bytes) -> bool:
    """Whether a file that begins so may be one of these forms."""
    letters = head.replace(b"\0", b"")  # also of UTF-16
    return RESOURCE.encode() in letters or PROFUSION.encode() in letters


def _list_coded(rows: list[dict[str, str]]) -> list[Annotation]:
    concepts = [row.get("EventConcept", "") for row in rows]
    return [
        _make_event(row, number, concept)
        for number, (row, concept) in enumerate(zip(rows, concepts, strict=True), 1)
        if "|" in concept or concept.strip().startswith("SDO:")
    ]


def _parse(path: Path) -> XmlTexts:
    rows: list[dict[str, str]] = []
    stages: list[str] = []
    epoch: list[str] = []
    names: list[str] = []
    roots: list[str] = []

    def refuse(*_: object) -> None:
        raise _syntax_error("declares a document type or an entity", "expected elements alone")

    def open_element(name: str, _: dict[str, str]) -> None:
        if not names:
            if name not in {RESOURCE, PROFUSION}:
                problem = f"begins with the element {safe_text(name)}"
                raise _syntax_error(problem, f"expected {RESOURCE} or {PROFUSION}")
            roots.append(name)
        names.append(name)
        if name == "ScoredEvent":
            rows.append({})
        if name == "SleepStage":
            stages.append("")

    def add_text(text: str) -> None:
        if names[-2:-1] == ["ScoredEvent"] and names[-1] in FIELDS:
            rows[-1][names[-1]] = rows[-1].get(names[-1], "") + text
        elif names[-1] == "SleepStage":
            stages[-1] += text
        elif names[1:] == ["EpochLength"]:
            epoch.append(text)

    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = parser.ExternalEntityRefHandler = (
        refuse  # type: ignore[assignment]
    )
    parser.StartElementHandler, parser.CharacterDataHandler = open_element, add_text
    parser.EndElementHandler = lambda _: names.pop()
    try:
        parser.Parse(path.read_bytes(), True)  # noqa: FBT003
    except (expat.ExpatError, ValueError, LookupError) as error:
        # LookupError: of an unknown encoding
        problem = f"is no XML ({safe_text(str(error))})"
        raise _syntax_error(problem, hint="Download it again") from None
    return XmlTexts(roots[0], rows, stages, "".join(epoch).strip())


def _syntax_error(
    problem: str, requirement: str = "expected scored events", hint: str = ""
) -> UserError:
    return input_error(Reason.ANNOTATION_SYNTAX, problem, requirement, hint)


def _make_event(row: dict[str, str], number: int, label: str) -> Annotation:
    try:
        start, duration = (
            tables.parse_number(row.get(name, "").strip()) for name in ("Start", "Duration")
        )
    except UserError:
        start = duration = None
    if start is None or duration is None or not (math.isfinite(start + duration) and duration >= 0):
        problem = f"scored event {number} has no start or duration in seconds"
        raise _syntax_error(problem, "expected numbers")
    return Annotation(start, duration, label.strip())
