"""Turns the files of a folder into recordings: which files belong together, whose they are, which
labels they have, and how each is read.

Three functions decide: `choose_format` which reader reads a file, `find_labels` which files hold
its labels, and `describe_recording` its subject and channels.
"""

from __future__ import annotations

import itertools
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from bitimely_core.errors import Finding, Reason, UserError, input_error, usage_error
from bitimely_core.formats import tables, wfdb, wfdb_header
from bitimely_core.formats.sniffer import sniff_table
from bitimely_core.formats.source import Source, locate_errors, report_unclaimed
from bitimely_core.formats.stage_texts import EPOCH
from bitimely_core.formats.table_facts import TableFacts, looks_like_samples
from bitimely_core.recordings import readers, unmatched
from bitimely_core.recordings.arrays import (
    check_samples,
    find_label_arrays,
    find_rate,
    read_mat,
    read_npy,
)
from bitimely_core.recordings.channels import list_choices, list_plain
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
    matches_pattern,
    read_label_rules,
    search_groups,
    strip_suffix,
)
from bitimely_core.recordings.mne_files import find_later_parts, list_later_parts, list_named_files
from bitimely_core.recordings.reference_tables import (
    NO_REFERENCE,
    ReferenceTable,
    find_reference_table,
)
from bitimely_core.recordings.sample_tables import read_series
from bitimely_core.recordings.seizure_lists import SeizureLists, find_seizure_lists
from bitimely_core.recordings.sessions import ROOT, find_sessions
from bitimely_core.recordings.sidecars import describe_table, is_bids, read_sidecars
from bitimely_core.recordings.sniffed_tables import (
    describe_tables,
    is_sample_table,
    is_timed_table,
    sniff_file,
)
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import (
    Annotation,
    Attributes,
    AttributeValue,
    IngestOptions,
    IngestUnit,
    Record,
    Records,
    SourceRows,
)

COMPANIONS = {".vhdr": (".eeg", ".vmrk", ".dat"), ".set": (".fdt",)}
# names of files that lie in folders of recordings and are none
LAYOUT = re.compile(
    r"(RECORDS|SHA256SUMS|LICENSE|README|CHANGES|ANNOTATORS|index\.html|dataset_description\.json"
    r"|participants\.(tsv|json)).*|.*\.(dat|txt|md|json|xyz)"
    r"|.*_(events|channels|scans|sessions|electrodes|coordsystem)\.(tsv|json)|.*\.d\d+",
    re.IGNORECASE,
)
NO_DATA = re.compile(r"(README|LICENSE).*|.*\.md", re.IGNORECASE)
LABELS_ALONE = Finding(
    Reason.NO_INPUT,
    "holds no signals, only annotations",
    "no recording, or more than one, is called as it is",
    'Say whose they are: labels = "folder/{stem}*" in [[files]] of the map',
)
PHYSIOLOGY = re.compile(r"_physio\.tsv\.gz$")  # of BIDS, read where nothing else is
ARRAY_READERS = {"npy": read_npy, "mat": read_mat}
# names of files that state a subject: of BIDS and of the EEG corpus of Temple University
BIDS = re.compile(r"(?:^|/)sub-([A-Za-z0-9]+)(?=[_/])")
TEMPLE = re.compile(r"(?:^|/)([a-z]{8})_s\d{3}_t\d{3}\.edf$")
DERIVED = ("derivatives/", "sourcedata/", "code/", "stimuli/")


class FolderFiles(NamedTuple):
    """The files of a folder by what they are."""

    recordings: dict[str, tuple[Format, FileRule]]
    label_arrays: dict[str, str]  # array of epochs -> array of their classes
    passed_over: set[str]  # tables of the map, what a BIDS folder derives, segments of records


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


def suggest_map(source: Source) -> str:
    """The command that writes a map of a folder."""
    folder = shlex.quote(str(source.root))
    return f"Write one to fill in: bitimely ingest generic {folder} --init-map map.toml"


def refuse_tables_alone(source: Source) -> None:
    """Raises UserError (no_input, exit 4) where all recordings are files that state no rate."""
    kinds = {rel: SUFFIXES.get(find_suffix(rel)) for rel in source.files}
    if is_bids(source) or not {"edf", "wfdb", "mne"}.isdisjoint(kinds.values()):
        return
    facts = {rel: sniff_file(source, rel) for rel, kind in kinds.items() if kind == "table"}
    if _is_timed(source, kinds, facts.values()):
        return
    bare = [rel for rel, kind in kinds.items() if _is_bare(rel, kind, facts.get(rel))]
    if bare:
        raise _refuse_bare(source, bare, facts)


def _is_timed(
    source: Source, kinds: Mapping[str, Format | None], tables: Iterable[TableFacts | None]
) -> bool:
    """Whether one of the tables has a clock or a rate, or one of the arrays a rate."""
    if any(map(is_timed_table, tables)):
        return True
    return any(kind == "npy" and _states_rate(source, rel) for rel, kind in kinds.items())


def _refuse_bare(
    source: Source, rels: Sequence[str], tables: Mapping[str, TableFacts | None]
) -> UserError:
    """The error for files that state no rate; `tables`: what those of them that are tables say.

    Raises UserError: the fault of the first file, where that is a table that does not read.
    """
    rest = f", and {len(rels) - 1} more files" if rels[1:] else ""
    first = tables.get(rels[0])
    if first is None and rels[0] in tables and rels[0] not in source.rejected:
        first = sniff_table(source.path(rels[0]))
    if first is not None and not (first.rows and first.list_channels()):
        wanted = "expected a table of samples"
        return input_error(Reason.NO_INPUT, f"has no column of numbers{rest}", wanted, file=rels[0])
    is_timed = first is not None and bool(first.found_rate)
    problem = f"{'may hold labels' if is_timed else 'states no sampling rate'}{rest}"
    wanted = f"needs --map with a rate{_suggest_name(first)}"
    return input_error(Reason.NO_INPUT, problem, wanted, suggest_map(source), file=rels[0])


def _suggest_name(facts: TableFacts | None) -> str:
    """What a list of numbers needs in place of a rate where they are intervals."""
    if facts is None or len(facts.columns) > 1:
        return ""
    return ", or _rr at the end of its name if it lists intervals between beats"


def _is_bare(rel: str, kind: Format | None, facts: TableFacts | None) -> bool:
    """Whether a file is an array, or may be a table, without a rate; of .txt only those of numbers
    are tables.
    """
    if kind == "npy":
        return True
    if LAYOUT.fullmatch(PurePosixPath(rel).name):
        return facts is not None and looks_like_samples(facts)
    return kind == "table"


def list_units(
    source: Source, chosen: RecordingMap, formats: tuple[Format, ...], options: IngestOptions
) -> Iterator[IngestUnit | Finding | SourceRows]:
    """The units of a folder, findings about the folder, and the account of its tables."""
    has_map = options.get("map") is not None
    recordings, label_arrays, passed_over = _find_files(source, chosen, formats, has_map=has_map)
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


def _find_files(
    source: Source, chosen: RecordingMap, formats: tuple[Format, ...], *, has_map: bool
) -> FolderFiles:
    passed_over = _list_passed_over(source, chosen)
    recordings = _choose_files(source, chosen, formats, passed_over, has_map=has_map)
    recordings = _drop_other_tables(source, recordings, has_map=has_map)
    headers = [rel for rel, (kind, _) in recordings.items() if kind == "wfdb"]
    segments = find_segments(source, headers) | find_later_parts(source, recordings)
    label_arrays = find_label_arrays(source, recordings)
    for rel in segments | label_arrays.list_files():
        recordings.pop(rel, None)
    return FolderFiles(recordings, label_arrays.of_epochs, passed_over | segments)


def _choose_files(
    source: Source,
    chosen: RecordingMap,
    formats: tuple[Format, ...],
    passed_over: set[str],
    *,
    has_map: bool,
) -> dict[str, tuple[Format, FileRule]]:
    """The files that may be recordings, with format and rule. Of BIDS tables are recordings where
    the map says so, and physiology where nothing else is.
    """
    choices = _choose_formats(source, chosen, passed_over)
    if not is_bids(source):
        return _filter_formats(choices, formats)
    readable = formats if has_map else set(formats) - {"table"}
    physiology = {rel: choice for rel, choice in choices.items() if PHYSIOLOGY.search(rel)}
    return _filter_formats(choices, readable) or physiology


def _choose_formats(
    source: Source, chosen: RecordingMap, passed_over: set[str]
) -> dict[str, tuple[Format, FileRule]]:
    """Format and rule of the files that have one. The tables of BIDS describe other files."""
    described = ".tsv" if is_bids(source) else ()
    choices = {
        rel: choose_format(rel, _find_rule(rel, chosen))
        for rel in (*source.files, *source.rejected)
        if rel not in passed_over and not rel.endswith(described)
    }
    return {rel: choice for rel, choice in choices.items() if choice}


def _filter_formats(
    choices: Mapping[str, tuple[Format, FileRule]], formats: Collection[Format]
) -> dict[str, tuple[Format, FileRule]]:
    return {rel: choice for rel, choice in choices.items() if choice[0] in formats}


def _list_passed_over(source: Source, chosen: RecordingMap) -> set[str]:
    """The tables of the map, and what a BIDS folder derives from its recordings."""
    tables_of_map = {table.path for table in (chosen.table, chosen.annotations) if table}
    if not is_bids(source):
        return tables_of_map
    return tables_of_map.union(rel for rel in source.files if rel.startswith(DERIVED))


def _states_classes(rule: FileRule) -> bool:
    return bool(rule.label or rule.label_column or "(?P<label>" in rule.match)


def _find_unfilled(
    source: Source, recordings: Mapping[str, tuple[Format, FileRule]]
) -> dict[str, list[str]]:
    """Folder of WFDB records whose checksums were not filled in -> their headers."""
    if not any(kind == "wfdb" for kind, _ in recordings.values()):
        return {}
    return wfdb.find_unfilled(source, [rel for rel in source.files if find_suffix(rel) == ".hea"])


def _drop_other_tables(
    source: Source, recordings: Mapping[str, tuple[Format, FileRule]], *, has_map: bool
) -> dict[str, tuple[Format, FileRule]]:
    """The recordings without the tables that are none, and without a map the arrays that state no
    rate. Where a map leaves nothing else, all of them: each says what it needs.
    """
    samples = {
        rel: (kind, rule)
        for rel, (kind, rule) in recordings.items()
        if (kind != "table" or is_sample_table(source, rel, rule, has_map=has_map))
        and not _is_text(source, rel)
        and (kind != "npy" or has_map or _states_rate(source, rel))
    }
    return samples or dict(recordings if has_map else list_matlab(source))


def _is_text(source: Source, rel: str) -> bool:
    """Whether a file that ends in .rec, as some of EDF, begins with a row of numbers."""
    if find_suffix(rel) != ".rec" or rel in source.rejected:
        return False
    with source.path(rel).open("rb") as file:
        return re.match(rb"[\d.]+[,;\t]", file.read(64)) is not None


def list_matlab(source: Source) -> dict[str, tuple[Format, FileRule]]:
    """The files of MATLAB, which are recordings where nothing else is: those that state a rate, or
    all of them, so that each says what it needs.
    """
    rels = [rel for rel in source.files if find_suffix(rel) == ".mat"]
    rated = [rel for rel in rels if _states_rate(source, rel)]
    return {rel: ("mat", FileRule()) for rel in rated or rels}


def _states_rate(source: Source, rel: str) -> bool:
    return rel not in source.rejected and find_rate(source.path(rel)) is not None


def _find_rule(rel: str, chosen: RecordingMap) -> FileRule | None:
    """The first group of the map that fits a file."""
    return next((rule for rule in chosen.files if matches_pattern(rel, rule.pattern)), None)


def choose_format(rel: str, rule: FileRule | None) -> tuple[Format, FileRule] | None:
    """The format of a file, and its group in the map; None: it is no recording."""
    if rule is None:
        return None
    kind = rule.format or SUFFIXES.get(find_suffix(rel))
    is_named = rule.variable or rule.format or rule.pattern.lower().endswith(".mat")
    # many data sets have a copy of their recordings in this format
    if kind is None or (kind == "mat" and not is_named):
        return None
    return kind, rule


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
    others = {subject: row for subject, row in rows.items() if subject not in used}
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
    return {key: column for key, column in columns.items() if column}


def make_unit(
    source: Source,
    rel: str,
    kind: Format,
    info: RecordingInfo,
    *,
    bids: bool = False,
    annotators: Sequence[str] = (),
) -> IngestUnit:
    """The recording in file `rel`, bound to the reader of its format.

    `bids`: whether sidecars of BIDS are read; `annotators`: endings of the annotation files beside
    a WFDB record. Raises UserError for what is wrong with its header.
    """
    path = source.path(rel)
    if kind in {"edf", "mne"} or info.events == "notes":
        info = replace(info, stages=True)
    info, described = add_descriptions(source, rel, kind, info, bids=bids)
    files = [rel, *(file.rel for file in info.label_files), *described]
    if kind == "wfdb":
        beside = (f"{strip_suffix(rel)}.{ending}" for ending in annotators)
        info = replace(info, annotation_files=tuple(filter(source.lists, beside)))
        return _make_wfdb_unit(source, rel, info, files)
    if kind in {"npy", "mat"} and info.rate is None:
        info = replace(info, rate=_require_rate(source, rel, kind, info))
    files += [*_list_companions(source, rel), *info.annotation_files]
    read: Callable[..., Record | Records] = readers.READERS[kind]
    if kind in {"npy", "mat"} and info.annotation_files:  # epochs or trials with their classes
        read = partial(ARRAY_READERS[kind], labels=source.path(info.annotation_files[-1]))
    elif info.series:
        read = read_series
    return IngestUnit(
        name=info.recording_id, files=tuple(files), read=partial(read, path, rel, info)
    )


def _require_rate(source: Source, rel: str, kind: Format, info: RecordingInfo) -> float:
    """Hz that a file of arrays states. Raises UserError for one that states none, or that of MATLAB
    cannot be read at all.
    """
    rate = find_rate(source.path(rel))
    if rate is None:
        if kind == "mat":
            with locate_errors(rel):
                check_samples(source.path(rel), info)
        wanted = "needs --map with a rate (`rate` in [[files]])"
        raise usage_error("has no sampling rate", wanted, suggest_map(source))
    return rate


def add_descriptions(
    source: Source, rel: str, kind: Format, info: RecordingInfo, *, bids: bool = False
) -> tuple[RecordingInfo, tuple[str, ...]]:
    """`info` with what descriptions beside a recording say of it, and their files."""
    files: tuple[str, ...] = ()
    if bids:
        sidecars = read_sidecars(source, rel)
        info = replace(info, facts=sidecars.facts, stated_rate=sidecars.rate)
        files = sidecars.files
    if kind == "table":
        described = describe_table(source, rel)
        rate = described.rate or info.stated_rate
        info = replace(info, stated_rate=rate, headers=described.headers, origin=described.start)
        files = (*files, *described.files)
    return info, tuple(dict.fromkeys(files))


def _make_wfdb_unit(
    source: Source, rel: str, info: RecordingInfo, files: Sequence[str]
) -> IngestUnit:
    """A WFDB record with the files that its header names and its annotation files."""
    with locate_errors(rel):
        names = wfdb.read_header(rel, source, required=tuple(info.channels)).files
    for name in info.annotation_files:
        source.path(name)  # raises for a file that must not be opened
    names = (*names, *info.annotation_files)
    part = replace(source, files={name: source.files[name] for name in names}, rejected={})
    return IngestUnit(
        name=info.recording_id,
        files=tuple(dict.fromkeys([*files, *names])),
        read=partial(readers.read_wfdb, part, rel, info),
    )


def _list_companions(source: Source, rel: str) -> list[str]:
    """Files with the samples and markers of a recording whose file is a header or the first part.

    Raises UserError for one that must not be opened.
    """
    endings = COMPANIONS.get(find_suffix(rel), ())
    if not endings:
        return list_later_parts(source, rel)
    stem = strip_suffix(rel)
    spellings = [
        spelling
        for ending in endings
        for spelling in (ending, ending.upper(), f".{ending[1:].capitalize()}")
    ]
    names = [name for spelling in spellings if source.lists(name := stem + spelling)]
    if find_suffix(rel) == ".vhdr":  # one that is copied beside it later makes it another unit
        folder = PurePosixPath(rel).parent
        beside = ((folder / name).as_posix() for name in list_named_files(source.path(rel)))
        names = list(dict.fromkeys([*names, *filter(source.lists, beside)]))
    for name in names:
        source.path(name)
    return names


def find_segments(source: Source, headers: Iterable[str]) -> set[str]:
    """Header files that are segments of another record, or the layout of one."""
    segments: set[str] = set()
    for rel in headers:
        if rel in source.rejected:
            continue
        path = source.path(rel)
        try:
            names = _read_segment_names(path)
        except (OSError, UserError) as error:
            raise_system_error(error, path, stored=False)
            continue  # its unit reports that
        folder = PurePosixPath(rel).parent
        segments |= {(folder / f"{name}.hea").as_posix() for name in names}
    return segments & source.files.keys()


def _read_segment_names(path: Path) -> list[str]:
    """The segments that a WFDB header names; most name none, which its first line tells."""
    with path.open("rb") as file:
        head = file.read(1 << 12).split(b"\n")
        lines = (line.split() for line in head if not line.startswith(b"#"))
        record = next(filter(None, lines), [b""])
        if b"/" not in record[0]:
            return []
        file.seek(0)
        data = file.read(wfdb_header.MAX_HEADER + 1)
    parsed = wfdb_header.parse_header(data, path.stem, required=())
    return [name for name, _ in parsed.segments or () if name != "~"]
