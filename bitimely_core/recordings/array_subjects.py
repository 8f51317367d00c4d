"""Whose the epochs of a file of arrays are, where an array beside them says it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from bitimely_core.errors import Finding, Reason, input_error
from bitimely_core.recordings.mapping import PEOPLE, RecordingInfo

# of arrays with the subject of each epoch, or of all; `id` may number the epochs
ARRAY_SUBJECTS = (PEOPLE - {"id"}) | {
    "subjects", "subject_ids", "subjs", "patients", "patient_ids", "participants", "pids",
    "persons", "users",
}  # fmt: skip
# scikit-learn's word for whose the rows are; without labels beside it, it may be that of classes
GROUPS = "groups"


def find_subjects(arrays: Mapping[str, np.ndarray], *, has_labels: bool) -> dict[str, np.ndarray]:
    """The vectors of an archive that are called as those of subjects."""
    names = ARRAY_SUBJECTS | ({GROUPS} if has_labels else set())
    return {
        name: array.reshape(-1)
        for name, array in arrays.items()
        if name.lower() in names and array.size == max(array.shape, default=1)
    }


def name_subjects(values: Iterable[str | float]) -> list[str]:
    """Subjects as texts: 7 of 7.0; "" for a missing one."""
    return [_name_subject(value) for value in values]


def _name_subject(value: str | float) -> str:
    if isinstance(value, float):
        return f"{value:g}" if math.isfinite(value) else ""
    return str(value).strip()


def add_subject(
    info: RecordingInfo, subjects: Sequence[str]
) -> tuple[RecordingInfo, Sequence[str]]:
    """`info` with the only person that a file names, and the subjects where they are several.

    A subject that the map or the folder states comes before those of the file.
    """
    if info.has_subject or not subjects:
        return info, ()
    if len(set(subjects)) > 1:
        return info, subjects
    return (replace(info, subject_id=subjects[0]) if subjects[0] else info), ()


def split_epochs(subjects: Sequence[str], count: int) -> dict[str, np.ndarray]:
    """Subject -> numbers of the epochs, of which there are `count`.

    Raises UserError: dimensions for another number of subjects, identifier for epochs of nobody.
    """
    if len(subjects) != count:
        problem = f"holds {len(subjects)} subjects of {count} epochs"
        raise input_error(Reason.DIMENSIONS, problem, "expected one each")
    if not all(subjects):
        problem = f"holds no subject for {subjects.count('')} of {count} epochs"
        hint = "Name them, or save the file without these epochs"
        raise input_error(Reason.IDENTIFIER, problem, "whose they are is unknown", hint)
    names = np.array(subjects)
    return {name: np.flatnonzero(names == name) for name in dict.fromkeys(subjects)}


def name_person(info: RecordingInfo, name: str) -> RecordingInfo:
    """What is known of the epochs of one of several people."""
    return replace(info, recording_id=f"{info.recording_id}-{name}", subject_id=name)


def report_subjects(count: int) -> Finding:
    """What is said of a file with epochs of so many people."""
    problem = f"holds epochs of {count} subjects"
    return Finding(Reason.IDENTIFIER, problem, "each is a recording of its own", level="info")
