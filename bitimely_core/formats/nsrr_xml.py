"""Reads the scored events of the National Sleep Research Resource (`-nsrr.xml`), in seconds.

The parser reads elements alone: a document type, hence every entity, is refused. Concepts are coded
as `Stage 1 sleep|1`; other texts, such as start times and comments, are not read.
"""

from __future__ import annotations

import math
from pathlib import Path
from xml.parsers import expat

from bitimely_core.errors import Reason, UserError, input_error, safe_text
from bitimely_core.formats import tables
from bitimely_core.types import Annotation

FIELDS = ("EventConcept", "Start", "Duration")


def read_events(path: Path) -> list[Annotation]:
    """The scored events whose concepts are coded, in the order of the file, labelled by these.

    Raises UserError: annotation_syntax for a file that is no such XML, for a document type, and for
    an event without times.
    """
    rows: list[dict[str, str]] = []
    names: list[str] = []

    def refuse(*_: object) -> None:
        raise _syntax_error("declares a document type or an entity", "expected elements alone")

    def open_element(name: str, _: dict[str, str]) -> None:
        if not names and name != "PSGAnnotation":
            problem = f"begins with the element {safe_text(name)}"
            raise _syntax_error(problem, "expected PSGAnnotation")
        names.append(name)
        if name == "ScoredEvent":
            rows.append({})

    def add_text(text: str) -> None:
        if names[-2:-1] == ["ScoredEvent"] and names[-1] in FIELDS:
            rows[-1][names[-1]] = rows[-1].get(names[-1], "") + text

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
    return [
        _make_event(row, number)
        for number, row in enumerate(rows, 1)
        if "|" in row.get("EventConcept", "")
    ]


def _syntax_error(
    problem: str, requirement: str = "expected scored events", hint: str = ""
) -> UserError:
    return input_error(Reason.ANNOTATION_SYNTAX, problem, requirement, hint)


def _make_event(row: dict[str, str], number: int) -> Annotation:
    try:
        start, duration = (
            tables.parse_number(row.get(name, "").strip()) for name in ("Start", "Duration")
        )
    except UserError:
        start = duration = None
    if start is None or duration is None or not (math.isfinite(start + duration) and duration >= 0):
        problem = f"scored event {number} has no start or duration in seconds"
        raise _syntax_error(problem, "expected numbers")
    return Annotation(start, duration, row["EventConcept"].strip())
