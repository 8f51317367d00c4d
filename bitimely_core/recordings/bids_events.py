"""Finds the events table that a recording of a BIDS folder has, or inherits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath

from bitimely_core.formats.source import Source, locate_errors
from bitimely_core.formats.stage_texts import name_stage
from bitimely_core.recordings.mapping import LabelFile, strip_suffix
from bitimely_core.system_errors import raise_system_error

EVENTS = "events"


def find_all_events(source: Source, recordings: Iterable[str]) -> Iterator[tuple[str, LabelFile]]:
    """Each recording that has events, and its events table."""
    events = list_events(source)
    for rel in recordings:
        if rel not in source.rejected and (file := find_events(source, rel, events)):
            yield rel, file


def list_events(source: Source) -> dict[str, dict[str, str]]:
    """Events table or its description -> the entities in its name."""
    files: dict[str, dict[str, str]] = {}
    for rel in source.files:
        *parts, last = PurePosixPath(rel).name.split("_")
        if last in {f"{EVENTS}.tsv", f"{EVENTS}.json"}:
            files[rel] = _list_entities(parts)
    return files


def _list_entities(parts: Iterable[str]) -> dict[str, str]:
    return {key: value for key, _, value in (part.partition("-") for part in parts) if value}


def find_events(source: Source, rel: str, events: Mapping[str, dict[str, str]]) -> LabelFile | None:
    """The events table that a recording inherits, with the words of its description.

    All entities in its name are those of the recording, and it lies in the recording's folder or
    in one above; the nearest wins, in one folder the one with more entities.
    """
    entities_of_recording = _list_entities(PurePosixPath(strip_suffix(rel)).name.split("_"))
    folders = [str(parent) for parent in PurePosixPath(rel).parents]

    def find_nearest(ending: str) -> str:
        fitting = [
            (folders.index(str(PurePosixPath(file).parent)), -len(entities), file)
            for file, entities in events.items()
            if file.endswith(ending)
            and str(PurePosixPath(file).parent) in folders
            and entities.items() <= entities_of_recording.items()
        ]
        return min(fitting)[2] if fitting else ""

    table, description = find_nearest(".tsv"), find_nearest(".json")
    if not table:
        return None
    levels = _read_levels(source, description) if description else {}
    return LabelFile(source.path(table), table, "bids", levels=levels)


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
