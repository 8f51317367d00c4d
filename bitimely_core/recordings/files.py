"""Turns the files of a folder into recordings: which files belong together, whose they are, which
labels they have, and how each is read.

Three functions decide: `choose_format` which reader reads a file, `find_labels` which files hold
its labels, and `describe_recording` its subject and channels.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import PurePosixPath

from bitimely_core.errors import Finding, Reason, UserError
from bitimely_core.formats import wfdb
from bitimely_core.formats.source import Source, report_unclaimed
from bitimely_core.formats.stage_texts import EPOCH
from bitimely_core.recordings import unmatched
from bitimely_core.recordings.descriptions import FolderFacts, LabelTables, describe_recording
from bitimely_core.recordings.file_choice import LAYOUT, find_files
from bitimely_core.recordings.file_units import make_unit
from bitimely_core.recordings.folder_tables import (
    PARTICIPANTS,
    read_annotations,
    read_attributes,
    read_participants,
)
from bitimely_core.recordings.joining import (
    describe_part,
    find_channel_folders,
    join_units,
    list_shared_labels,
    report_joined,
)
from bitimely_core.recordings.labels import FoundLabels, find_labels
from bitimely_core.recordings.mapping import (
    SUFFIXES,
    FileRule,
    Format,
    RecordingInfo,
    RecordingKeys,
    RecordingMap,
    TableRule,
    assign_recording_keys,
    find_suffix,
    read_label_rules,
    search_groups,
    strip_suffix,
)
from bitimely_core.recordings.reference_tables import (
    NO_REFERENCE,
    ReferenceTable,
    find_reference_table,
)
from bitimely_core.recordings.seizure_lists import SeizureLists, find_seizure_lists
from bitimely_core.recordings.sessions import ROOT, find_sessions
from bitimely_core.recordings.sidecars import is_bids
from bitimely_core.recordings.sniffed_tables import describe_tables
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import Attributes, IngestOptions, IngestUnit, SourceRows, leave_out

NO_DATA = re.compile(r"(README|LICENSE).*|.*\.md", re.IGNORECASE)
LABELS_ALONE = Finding(
    Reason.NO_INPUT,
    "holds no signals, only annotations",
    "no recording, or more than one, is called as it is",
    'Say whose they are: labels = "folder/{stem}*" in [[files]] of the map',
)


def list_units(
    source: Source, chosen: RecordingMap, formats: tuple[Format, ...], options: IngestOptions
) -> Iterator[IngestUnit | Finding | SourceRows]:
    """The units of a folder, findings about the folder, and the account of its tables."""
    has_map = options.get("map") is not None
    recordings, label_arrays, passed_over = find_files(source, chosen, formats, has_map=has_map)
    reference = _find_reference(source, chosen, recordings, formats)
    yield from reference.findings
    if reference.rule:
        chosen = chosen.model_copy(update={"table": reference.rule})
    for rel in reference.list_files():
        passed_over.add(rel)
        recordings.pop(rel, None)
    lists = _find_seizures(source, chosen, recordings)
    passed_over.update(lists.files)
    yield from lists.findings
    beside = _find_labels(source, chosen, recordings, passed_over)
    yield from beside.findings
    for rel in beside.list_taken() & recordings.keys():
        del recordings[rel]
    yield from describe_tables(source, recordings)
    names = _name_units(recordings)
    keys = assign_recording_keys(recordings)
    table_file = chosen.table.path if chosen.table else PARTICIPANTS
    findings, rows = _read_table(source, chosen, headed=reference.headed)
    yield from findings
    rows = _assign_rows(rows, reference, keys)
    for rel in recordings:
        yield from unmatched.drop_torn_rows(rel, keys.keys[rel], rows, table_file)
    notes = lists.notes
    if chosen.annotations:
        epoch = read_label_rules(chosen).epoch or EPOCH
        findings, notes = read_annotations(source, chosen.annotations, epoch)
        yield from findings
    labels = LabelTables(rows, notes, reference.subjects)
    unfilled = _find_unfilled(source, recordings)
    yield from unmatched.report_unfilled(unfilled)
    folder = FolderFacts(
        source, chosen, keys.keys, labels, beside, label_arrays, frozenset(unfilled), options
    )
    groups, joined = _group_files(source, chosen, recordings, names)
    yield from joined
    units: list[IngestUnit] = []
    infos: dict[str, RecordingInfo] = {}
    for name, rels in groups:
        unit, info = _make_recording(folder, name, {rel: recordings[rel] for rel in rels})
        units.append(unit)
        if info is not None:
            infos[rels[0]] = info
    yield from _report_unclaimed(source, units, passed_over)
    yield from _report_unmatched(infos, keys, labels, chosen)
    yield from units


def _find_seizures(
    source: Source, chosen: RecordingMap, recordings: Collection[str]
) -> SeizureLists:
    """The seizures that lists state, where the map has no table of annotations."""
    names = assign_recording_keys(() if chosen.annotations else recordings)
    return find_seizure_lists(source, names.keys)


def _find_labels(
    source: Source,
    chosen: RecordingMap,
    recordings: Mapping[str, tuple[Format, FileRule]],
    passed_over: set[str],
) -> FoundLabels:
    """The label files of each recording; some may be among `recordings`, by their endings."""
    rules = {rel: rule for rel, (_, rule) in recordings.items()}
    annotations = {
        f"{strip_suffix(rel)}.{ending}"
        for rel, (kind, rule) in recordings.items()
        if kind == "wfdb"
        for ending in rule.annotators
    }
    return find_labels(source, rules, read_label_rules(chosen), passed_over | annotations)


def _group_files(
    source: Source,
    chosen: RecordingMap,
    recordings: Mapping[str, tuple[Format, FileRule]],
    names: Mapping[str, str],
) -> tuple[list[tuple[str, list[str]]], list[Finding]]:
    """Recordings with their files, and the line about those in several files.

    They are joined by the group `recording` of the map; without a map by what the folders hold.
    The folder itself is called by its name.
    """
    is_stated = "files" in chosen.model_fields_set
    root = source.root.resolve().name
    keys = {
        rel: (subject, root if name in {"", ROOT} else name)
        for rel, (subject, name) in name_joined(source, recordings, is_stated=is_stated).items()
    }
    members: dict[tuple[str, str, str], list[str]] = {}
    for rel in recordings:
        subject, name = keys.get(rel, ("", names[rel]))
        members.setdefault((name, rel if rel not in keys else "", subject), []).append(rel)
    several = {name: rels for (name, *_), rels in members.items() if rels[1:]}
    findings = [report_joined(several, is_stated=is_stated)] if several else []
    return [(name, rels) for (name, *_), rels in members.items()], findings


def name_joined(
    source: Source,
    recordings: Mapping[str, tuple[Format, FileRule]],
    *,
    is_stated: bool,
    least: int = 2,
) -> dict[str, tuple[str, str]]:
    """File -> subject and name of its recording, of files that are joined.

    They are joined by the group `recording` of `match` (`is_stated`), else where they are a session
    of a device, or at least `least` folders hold a file a channel.
    """
    if is_stated:
        return _join_by_group(recordings)
    if is_bids(source):
        return {}
    kinds = {rel: kind for rel, (kind, _) in recordings.items() if rel in source.files}
    joined = find_channel_folders(source, kinds, least=least)
    for session in find_sessions(source, kinds):
        joined |= dict.fromkeys(session.parts if session.is_joined else (), session.name)
    return {rel: ("", name) for rel, name in joined.items()}


def _join_by_group(recordings: Mapping[str, tuple[Format, FileRule]]) -> dict[str, tuple[str, str]]:
    """File -> subject and name, by the group `recording`; a name of two subjects holds both."""
    keys: dict[str, tuple[str, str]] = {}
    for rel, (_, rule) in recordings.items():
        groups = search_groups(rule.match, rel)
        if "recording" in groups:
            keys[rel] = (groups.get("subject", ""), groups["recording"])
    subjects = Counter(recording for _, recording in set(keys.values()))
    return {
        rel: (subject, name if subjects[name] < 2 else f"{subject}/{name}")
        for rel, (subject, name) in keys.items()
    }


def _make_recording(
    folder: FolderFacts, name: str, members: Mapping[str, tuple[Format, FileRule]]
) -> tuple[IngestUnit, RecordingInfo | None]:
    """The unit of a recording with its description; None for a file that must not be opened."""
    parts = [
        _make_file_unit(folder, rel, name, kind, rule, is_part=len(members) > 1)
        for rel, (kind, rule) in members.items()
    ]
    if len(parts) == 1:
        return parts[0]
    first, (_, rule) = next(iter(members.items()))
    part_keys = tuple(itertools.chain.from_iterable(folder.keys[rel] for rel in members))
    folder.keys[first] = (name, *part_keys)
    info = describe_recording(folder, first, name, folder.keys[first], rule)
    # the annotations of files come with them
    alone = describe_recording(folder, first, name, () if name in part_keys else (name,), rule)
    shared = list_shared_labels(folder.beside.files.get(rel, ()) for rel in members)
    info = replace(info, notes=alone.notes, numbers=alone.numbers, label_files=shared)
    return join_units(info, [unit for unit, _ in parts]), info


def _make_file_unit(
    folder: FolderFacts, rel: str, name: str, kind: Format, rule: FileRule, *, is_part: bool
) -> tuple[IngestUnit, RecordingInfo | None]:
    """The unit of one file; without `read` where something is wrong with it."""
    source = folder.source
    if rel in source.rejected:
        return _make_faulty_unit(rel, name, source.rejected[rel]), None
    if rel in folder.beside.lone:
        return _make_faulty_unit(rel, name, LABELS_ALONE.at(rel)), None
    info = describe_recording(folder, rel, name, folder.keys[rel], rule)
    info = replace(info, label_files=folder.beside.files.get(rel, ()))
    if rel in folder.label_arrays:
        info = replace(info, annotation_files=(folder.label_arrays[rel],))
    elif kind == "wfdb":
        info = replace(info, unfilled=PurePosixPath(rel).parent.as_posix() in folder.unfilled)
    if is_part:
        info = describe_part(info, kind)
    try:
        unit = make_unit(source, rel, kind, info, bids=is_bids(source), annotators=rule.annotators)
        return unit, info
    except UserError as error:
        raise_system_error(error)
        return _make_faulty_unit(rel, name, error.finding.at(rel)), info


def _states_classes(rule: FileRule) -> bool:
    return bool(rule.label or rule.label_column or "(?P<label>" in rule.match)


def _find_unfilled(
    source: Source, recordings: Mapping[str, tuple[Format, FileRule]]
) -> dict[str, list[str]]:
    """Folder of WFDB records whose checksums were not filled in -> their headers."""
    if not any(kind == "wfdb" for kind, _ in recordings.values()):
        return {}
    return wfdb.find_unfilled(source, [rel for rel in source.files if find_suffix(rel) == ".hea"])


def _name_units(rels: Iterable[str]) -> dict[str, str]:
    """File -> name of its unit: the path without ending, with it where two would be equal."""
    stems = {rel: strip_suffix(rel) for rel in rels}
    counts = Counter(stems.values())
    return {rel: stem if counts[stem] == 1 else rel for rel, stem in stems.items()}


def _find_reference(
    source: Source,
    chosen: RecordingMap,
    recordings: Mapping[str, tuple[Format, FileRule]],
    formats: tuple[Format, ...],
) -> ReferenceTable:
    """The table beside recordings with the subjects, and the classes, that no map states; it is no
    recording.

    A BIDS folder has its own. Data sets of one format have no view of classes.
    """
    table = chosen.table
    if is_bids(source) or _states_owners(table):
        return NO_REFERENCE
    assigned = assign_recording_keys(recordings).keys
    keys = {key: rel for rel, same in assigned.items() for key in same}
    if table and table.subject:
        reference = find_reference_table(source, [table.path], keys, classes=False)
        return NO_REFERENCE._replace(subjects=reference.subjects)
    is_open = not table and len(formats) > 1 and not any(map(_states_classes, chosen.files))
    rels = _list_other_tables(source, chosen)
    reference = find_reference_table(source, rels, keys, classes=is_open)
    return _keep_subjects(source, reference, keys) if table else reference


def _states_owners(table: TableRule | None) -> bool:
    """Whether a table of the map has the subjects of recordings."""
    return table is not None and bool(table.file) and bool(table.subject)


def _list_other_tables(source: Source, chosen: RecordingMap) -> list[str]:
    """The tables that the map does not name."""
    named = {rule.path for rule in (chosen.annotations, chosen.table) if rule}
    return [
        rel
        for rel in source.files
        if rel not in named and SUFFIXES.get(find_suffix(rel)) == "table"
    ]


def _keep_subjects(
    source: Source, reference: ReferenceTable, keys: Mapping[str, str]
) -> ReferenceTable:
    """The subjects that a table of recordings states beside that of the map."""
    rule = reference.rule
    if rule is None:
        return reference
    account, rows = read_attributes(source, rule, headed=reference.headed)
    owners = {
        keys[name]: str(row["subject"])
        for name, row in rows.items()
        if name in keys and "subject" in row
    }
    reports = [*reference.findings, *account]
    return NO_REFERENCE._replace(findings=reports, people=rule.path, subjects=owners)


def _read_table(
    source: Source, chosen: RecordingMap, *, headed: bool
) -> tuple[list[SourceRows | Finding], dict[str, Attributes]]:
    """The table of recordings or subjects: that of the map, else that of a BIDS folder."""
    if chosen.table:
        return read_attributes(source, chosen.table, headed=headed)
    return read_participants(source) if is_bids(source) else ([], {})


def _assign_rows(
    rows: dict[str, Attributes], reference: ReferenceTable, keys: RecordingKeys
) -> dict[str, Attributes]:
    """The rows of a table of recordings; those of a table of subjects for their recordings, with
    those of other subjects.
    """
    if not reference.is_of_subjects:
        return rows
    subjects = reference.subjects
    used = set(subjects.values())
    others = leave_out(rows, used)
    return others | {
        keys.keys[rel][0]: {**rows[subject], "subject": subject}
        for rel, subject in subjects.items()
        if subject in rows
    }


def _make_faulty_unit(rel: str, name: str, fault: Finding) -> IngestUnit:
    return IngestUnit(name=name, files=(rel,), read=None, findings=(fault,))


def read_advice() -> dict[str, str]:
    """Ending of files that are not read -> what to do with them."""
    text = resources.files("bitimely_core.formats").joinpath("foreign.toml").read_text("utf-8")
    rules = tomllib.loads(text)["advice"]
    return {ending: rule["text"] for rule in rules for ending in rule["endings"]}


def _report_unclaimed(
    source: Source, units: Sequence[IngestUnit], passed_over: set[str]
) -> Iterator[Finding]:
    claimed = passed_over.union(*(unit.files for unit in units))
    stems = set(map(strip_suffix, claimed))
    for rel in source.files:
        if find_suffix(rel) == ".mat" and strip_suffix(rel) in stems:
            claimed.add(rel)  # a copy
    units_of = {"": {rel: rel for rel in claimed}}
    layout = LAYOUT if units else NO_DATA
    yield from report_unclaimed(source, units_of, layout, read_advice())


def _report_unmatched(
    infos: Mapping[str, RecordingInfo],
    keys: RecordingKeys,
    labels: LabelTables,
    chosen: RecordingMap,
) -> Iterator[Finding]:
    """Warnings about recordings without a subject or a row, and about rows of no recording."""
    yield from unmatched.report_lone_recordings(infos)
    names = set(itertools.chain.from_iterable(keys.keys[rel] for rel in infos))
    subjects = {info.subject_id for info in infos.values()}
    file = chosen.table.path if chosen.table else PARTICIPANTS
    yield from unmatched.report_unknown_rows("the table", file, labels.rows, names | subjects, keys)
    if chosen.annotations:  # they are of one recording, never of a subject
        yield from unmatched.report_unknown_rows(
            "the table of annotations", chosen.annotations.path, labels.notes, names, keys
        )
    if chosen.table or labels.rows:
        yield from unmatched.report_lacking(infos, keys.keys, labels.rows)
