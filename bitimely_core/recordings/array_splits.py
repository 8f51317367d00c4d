"""Arrays of an archive whose names state the split that they are of, such as X_train and y_test."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from bitimely_core.errors import Finding, Reason, input_warning
from bitimely_core.formats.text import list_names
from bitimely_core.recordings.folder_tables import SPLIT_NAMES
from bitimely_core.recordings.mapping import RecordingInfo

WORDS = "|".join(SPLIT_NAMES)
# a letter may lack the mark: Xtrain; of a longer name the letters could be part of a word
NAME = re.compile(
    rf"(?:(?P<array>.+)[-_. ]|(?P<letter>[xy]))(?P<split>{WORDS})"
    rf"|(?P<first>{WORDS})(?:[-_. ](?P<behind>.+)|(?P<last>[xy]))",
    re.IGNORECASE,
)


def divide_by_split(arrays: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Split -> its arrays by their names without it, and those of all splits; {} where the names
    state fewer than two.
    """
    common: dict[str, np.ndarray] = {}
    divided: dict[str, dict[str, np.ndarray]] = {}
    for name, array in arrays.items():
        match = NAME.fullmatch(name)
        if match is None:
            common[name] = array
            continue
        split = SPLIT_NAMES[(match["split"] or match["first"]).lower()]
        rest = next(filter(None, match.group("array", "letter", "behind", "last")))
        divided.setdefault(split, {})[rest] = array
    if len(divided) < 2:
        return {}
    return {split: {**common, **parts} for split, parts in divided.items()}


def name_split(info: RecordingInfo, split: str) -> RecordingInfo:
    """What is known of the recording of a split; nobody's where its subject is not stated."""
    name = f"{info.recording_id}-{split}"
    subject = info.subject_id if info.has_subject else name
    info = replace(info, attributes={**info.attributes, "split": split})
    return replace(info, recording_id=name, subject_id=subject)


def report_splits(splits: Iterable[str]) -> Finding:
    """The warning about a file with arrays of several splits."""
    problem = f"holds arrays of {list_names([*splits])}"
    requirement = "each is a recording of its own, for tokenize --split official"
    return input_warning(Reason.METADATA, problem, requirement)
