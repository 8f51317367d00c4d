"""Describes a recording by the map, the tables of its folder and its path."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from bitimely_core.formats import tables
from bitimely_core.formats.source import Source, locate_errors
from bitimely_core.recordings.channels import list_choices, list_plain
from bitimely_core.recordings.labels import FoundLabels
from bitimely_core.recordings.mapping import (
    FileRule,
    RecordingInfo,
    RecordingMap,
    read_label_rules,
    search_groups,
)
from bitimely_core.types import Annotation, Attributes, AttributeValue, IngestOptions, drop_empty

# names of files that state a subject: of BIDS and of the EEG corpus of Temple University
BIDS = re.compile(r"(?:^|/)sub-([A-Za-z0-9]+)(?=[_/])")
TEMPLE = re.compile(r"(?:^|/)([a-z]{8})_s\d{3}_t\d{3}\.edf$")


class LabelTables(NamedTuple):
    """What the tables of a folder say of its recordings."""

    rows: dict[str, Attributes]  # recording or subject -> attributes
    notes: dict[str, list[Annotation]]  # recording -> annotations
    subjects: dict[str, str]  # recording -> subject, of a table of subjects

    def find_row(self, keys: Iterable[str]) -> Attributes:
        """The row of the first of these names that has one."""
        return next((self.rows[key] for key in keys if key in self.rows), {})

    def list_notes(self, keys: Iterable[str]) -> tuple[Annotation, ...]:
        """The annotations of a recording with these names."""
        notes: list[Annotation] = []
        for key in dict.fromkeys(keys):
            notes += self.notes.get(key, ())
        return tuple(sorted(notes))


class FolderFacts(NamedTuple):
    """What is known of a folder when its files are described."""

    source: Source
    chosen: RecordingMap
    keys: dict[str, tuple[str, ...]]  # recording -> its names in tables
    labels: LabelTables
    beside: FoundLabels
    label_arrays: Mapping[str, str]  # file of epochs -> that of their classes
    unfilled: frozenset[str]  # folders whose WFDB checksums are not filled in
    options: IngestOptions


def describe_recording(
    folder: FolderFacts, rel: str, name: str, keys: Sequence[str], rule: FileRule
) -> RecordingInfo:
    """Subject, labels, channels and properties of a recording by the map, its tables and the path.

    `keys`: its names in tables.
    """
    chosen, labels, options = folder.chosen, folder.labels, folder.options
    groups = search_groups(rule.match, rel)
    named = groups.get("subject") or rule.subject
    subject = named or _find_named_subject(rel) or labels.subjects.get(rel, "")
    row = labels.find_row([*keys, subject])
    owner = named or str(row.get("subject") or subject)
    notes = labels.list_notes(keys)
    is_numeric = chosen.annotations is not None and bool(chosen.annotations.value)
    rules = read_label_rules(chosen)
    info = RecordingInfo(
        recording_id=name,
        subject_id=owner or name,
        has_subject=bool(owner),
        attributes=_list_attributes(rel, row, groups, rule, rules.words or {}),
        notes=() if is_numeric else notes,
        numbers=notes if is_numeric else (),
        units=chosen.units,
        label_rules=rules,
        keep_dates=bool(options.get("keep_dates")),
        keep_phi=bool(options.get("keep_phi")),
    )
    return apply_rule(info, rule)


def _find_named_subject(rel: str) -> str:
    """The subject that the name of a file states in the way of its data set; "": none."""
    named = BIDS.search(rel) or TEMPLE.search(rel)
    return named[1] if named else ""


def apply_rule(info: RecordingInfo, rule: FileRule) -> RecordingInfo:
    """`info` with the channels and the properties of a file that its group in the map states."""
    choices = list_choices(rule)
    channels = list_plain(choices)
    return replace(
        info,
        channels=channels,
        choices=() if channels else choices,
        rate=rule.rate,
        unit=rule.unit,
        variable=rule.variable,
        time=rule.time,
        clock=rule.clock,
        series=rule.series,
        columns=_list_columns(rule),
        delimiter=rule.delimiter,
        missing=rule.missing,
        events=rule.events,
    )


def _list_attributes(
    rel: str, row: Attributes, groups: Mapping[str, str], rule: FileRule, words: Mapping[str, str]
) -> dict[str, AttributeValue]:
    """The attributes of a recording: those of the table, then those of its path and its group. A
    class is called as `words` has it.
    """
    attributes = {key: value for key, value in row.items() if key != "subject"}
    if label := groups.get("label") or rule.label:
        attributes.setdefault("label", label)
    if (label := str(attributes.get("label", ""))) in words:
        attributes["label"] = words[label]
    if "value" in groups:
        with locate_errors(rel):
            attributes.setdefault("value", tables.parse_number(groups["value"]))
    return attributes


def _list_columns(rule: FileRule) -> dict[str, str]:
    """id, subject, label, value -> column of a table of series."""
    columns = {key: getattr(rule, f"{key}_column") for key in ("id", "subject", "label", "value")}
    return drop_empty(columns)
