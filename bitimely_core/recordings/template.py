"""Writes a mapping file for a folder from what lies there; comments show where there is a choice."""

from __future__ import annotations

import glob
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from bitimely_core.config import validate
from bitimely_core.errors import Reason, UserError, clean, input_error
from bitimely_core.formats import edf, edf_header, sniffer, table_facts, tables, wfdb
from bitimely_core.formats.source import Source
from bitimely_core.formats.stage_texts import name_listed_stage, name_stage, split_mark
from bitimely_core.formats.wfdb_annotations import read_annotations
from bitimely_core.recordings.arrays import find_label_arrays, find_rate
from bitimely_core.recordings.channels import is_no_signal
from bitimely_core.recordings.file_choice import DERIVED, LAYOUT, find_segments
from bitimely_core.recordings.files import name_joined
from bitimely_core.recordings.label_sources import read_label_file
from bitimely_core.recordings.label_times import RecordingTime
from bitimely_core.recordings.labels import FoundLabels, find_labels
from bitimely_core.recordings.mapping import (
    CLASSES,
    NO_RULES,
    PARTS,
    PEOPLE,
    SUFFIXES,
    FileRule,
    Format,
    LabelFile,
    RecordingInfo,
    RecordingMap,
    assign_recording_keys,
    find_suffix,
    fold_column,
    list_recording_keys,
)
from bitimely_core.recordings.mne_files import describe_content, find_later_parts
from bitimely_core.recordings.reference_tables import find_reference_table
from bitimely_core.recordings.sample_tables import find_subjects, list_channel_names
from bitimely_core.recordings.sidecars import is_bids
from bitimely_core.recordings.sniffed_tables import holds_samples, sniff_file
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import group_by

MOST_WORDS = 100  # texts of labels that are listed
# by which label files are read for their texts alone
ANY_TIME = RecordingTime(datetime(2000, 1, 1, 20), 7 * 86400.0, 1.0)
FILES = 200  # of a group whose headers are read
NIGHTS = 20  # of a group whose annotations are read
ROWS = 1000  # of a table
GROUPS = 12  # folders and endings in groups of their own
FOLDERS = 3  # that hold the same, from which on one pattern stands for all
WIDE = 64  # columns, from which on each may be a sample
LISTED = 60  # channels of a group
ASSUMED_RATE = 1.0  # Hz, of files that state none
NAMED_RATE = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)[ _-]?hz(?![a-z])", re.IGNORECASE)
MATCH_LINE = (
    '# match = "(?P<subject>[^/_]+)_"  # TO STATE where several recordings are of one person: '
    "a regular expression on the path"
)
PERSON_LINE = '# match = "(?P<subject>[^/]+)/[^/]*$"  # TO STATE where a folder is a person'
CLASS_LINE = '# match = "(?P<label>[^/]+)/[^/]*$"  # TO STATE where a folder is a class'
JOINING_LINE = 'match = "(?P<recording>.+)/"  # the files of a folder are channels of one recording'
NAMES_LINE = (
    'match = "(?P<recording>.+){0}[^/{0}]*$"  # names that begin alike are of one recording'
)
ROOT_LINE = 'match = "^(?P<recording>)"  # the files here are channels of one recording'
LABELS_LINE = (
    "# [labels]  # texts of annotations -> classes; "
    "with this section the texts that are not in it are left out"
)
ARRAY_LINE = '# channels = ["..."]  # TO STATE: names of the columns; else channel 1, channel 2 ...'
VARIABLE_LINE = '# variable = "..."  # TO STATE: the array, unless it is the only one'
ONSETS = ("onset", "start", "begin", "onset_s")
# key of [table] -> usual names of its column
ROLES = {"subject": PEOPLE, "label": CLASSES, "split": PARTS}


class LabelWord(NamedTuple):
    """A text of annotations."""

    text: str
    is_listed: bool = False  # in a list of stages, in which letters and digits alone are stages
    is_code: bool = False  # of a beat or a rhythm of WFDB


TableContent = dict[str, list[str]]
"""The first rows of a table: name of a column -> its cells."""


class FolderContents(NamedTuple):
    """The files of a folder by what they are."""

    groups: dict[tuple[str, str], list[str]]  # folder and ending -> recordings
    others: list[str]  # tables that are none of samples
    tables: dict[str, str]  # table of all recordings -> its column with their names
    rows: dict[str, TableContent]  # table -> its first rows
    labels: FoundLabels
    people: str  # the table with a row a subject; "": none


def write_template(source: Source) -> str:
    """The text of a map with which `source` is read as it is.

    What has to be filled in is marked so. Raises UserError: no_input (exit 4) for a folder without
    recordings.
    """
    contents = _sort_files(source)
    if not contents.groups:
        problem, wanted = "no recordings there", f"expected {', '.join(SUFFIXES)}"
        raise input_error(Reason.NO_INPUT, problem, wanted, file=str(source.root))
    lines = [
        "# Map of a folder for: bitimely ingest generic FOLDER --map THIS-FILE",
        "# All keys: docs/generic.md. Lines with TO STATE hold what no file says.",
    ]
    named = (clean(rel, 100) for rel in contents.others[:LISTED])
    lines += [f"# {name} is no table of samples: not read" for name in named]
    if contents.people:
        name = clean(contents.people, 100)
        lines.append(f"# {name} has a row a subject: read, unless there is a [table]")
    texts: Counter[LabelWord] = Counter()
    lines += _describe_groups(source, contents, texts)
    for rel, column in contents.tables.items():
        lines += ["", *_describe_table(rel, column, contents.rows[rel])]
    lines += _describe_words(texts)
    text = "\n".join(lines) + "\n"
    validate(RecordingMap, tomllib.loads(text), "the map")
    return text


def _sort_files(source: Source) -> FolderContents:
    """Recordings, label files and tables of a folder, as `ingest` takes them."""
    rels = _list_recordings(source)
    rows = _read_tables(source, rels)
    shared = _find_label_tables(rels, rows)
    people = _find_subject_table(source, rels, rows)
    shared.pop(people, None)
    candidates = [rel for rel in rels if rel not in {*shared, people}]
    labels = find_labels(
        source,
        dict.fromkeys(candidates, FileRule()),
        NO_RULES,
        _list_annotation_files(candidates).union(shared),
    )
    candidates = [rel for rel in candidates if rel not in labels.list_taken() | labels.lone]
    others = [rel for rel in candidates if rel in rows and not holds_samples(source, rel)]
    recordings = [rel for rel in candidates if rel not in others] or candidates
    groups = _group_files(source, recordings)
    return FolderContents(groups, others, shared, rows, labels, people)


def _find_subject_table(
    source: Source, rels: Sequence[str], contents: Mapping[str, TableContent]
) -> str:
    """The table with a row a subject that `ingest` reads without a [table]; "": none."""
    names = assign_recording_keys(
        rel for rel in rels if rel not in contents or holds_samples(source, rel)
    )
    keys = {key: rel for rel, same in names.keys.items() for key in same}
    return find_reference_table(source, contents, keys).people


def _list_annotation_files(rels: Iterable[str]) -> set[str]:
    """Names that annotation files of WFDB records among `rels` have."""
    stems = [rel.removesuffix(".hea") for rel in rels if rel.endswith(".hea")]
    return {f"{stem}.{ending}" for stem in stems for ending in FileRule().annotators}


def _describe_groups(
    source: Source, contents: FolderContents, texts: Counter[LabelWord]
) -> Iterator[str]:
    """Lines of [[files]]; the texts of annotations are counted in `texts`."""
    rels = list(chain.from_iterable(contents.groups.values()))
    recordings = {rel: (SUFFIXES[find_suffix(rel)], FileRule()) for rel in rels}
    joined = name_joined(source, recordings, is_stated=False)
    for (folder, ending), same in contents.groups.items():
        untimed = _list_untimed(source, same)
        for rel in untimed[:GROUPS]:  # the first group that fits a file counts
            yield from ["", "[[files]]", f"pattern = {_quote(glob.escape(rel))}", MATCH_LINE]
            yield from _describe_group(source, [rel], texts)
        members = [rel for rel in same if rel not in untimed]
        pattern = f"*{ending}" if folder == "." else f"{glob.escape(folder)}/*{ending}"
        count = f"{len(members)} files, such as {clean(members[0], 100)}"
        match = _describe_joining(members[0], joined.get(members[0], ("", ""))[1])
        yield from ["", "[[files]]", f"pattern = {_quote(pattern)}  # {count}", match]
        if "/" in members[0] and match == MATCH_LINE:
            yield from (PERSON_LINE, CLASS_LINE)
        yield from _describe_group(source, members, texts)
        beside = [contents.labels.files.get(rel, ()) for rel in members]
        yield from _describe_label_files(beside, texts)


def _describe_joining(rel: str, name: str) -> str:
    """The line of a map that joins a file to the recording `name`; "": it is alone."""
    folder = str(PurePosixPath(rel).parent)
    if not name:
        return MATCH_LINE
    if name != folder:
        return NAMES_LINE.format(rel[len(name)])
    return ROOT_LINE if folder == "." else JOINING_LINE


def _list_untimed(source: Source, rels: Sequence[str]) -> list[str]:
    """The tables of a group that state no rate, where others do: these keep their clocks."""
    if SUFFIXES[find_suffix(rels[0])] != "table":
        return []
    facts = {rel: sniff_file(source, rel) for rel in rels[:FILES]}
    untimed = [rel for rel, sniffed in facts.items() if not (sniffed and sniffed.found_rate)]
    return untimed if len(untimed) < len(rels) else []


def _describe_label_files(
    files: Sequence[Sequence[LabelFile]], texts: Counter[LabelWord]
) -> list[str]:
    """Lines on the label files of a group of recordings; their texts are counted in `texts`."""
    named = list(filter(None, files))
    if not named:
        return ['# labels = "folder/{stem}*"  # TO STATE where label files have other names']
    unique = {file.rel: file for file in chain.from_iterable(named[:NIGHTS])}
    for file in unique.values():
        with suppress(UserError):  # the ingest says what is wrong with it
            source = read_label_file(file, ANY_TIME, NO_RULES)
            texts.update(LabelWord(note.label, source.is_listed) for note in source.notes)
    return [
        f"# labels: {len(named)} of {len(files)} have a file of labels, "
        f"such as {clean(named[0][0].rel, 100)}"
    ]


def _describe_words(texts: Counter[LabelWord]) -> list[str]:
    """Lines of [labels]: each text with its count, and the stage that it is read as."""
    if not texts:
        return []
    lines = ["", LABELS_LINE]
    unique = {word.text: (word, times) for word, times in reversed(texts.most_common(MOST_WORDS))}
    for word, times in reversed(unique.values()):
        text = split_mark(word.text)[0]
        stage = name_listed_stage(text) if word.is_listed else name_stage(text)
        counted = f"{times} times" if times > 1 else "once"
        if word.is_code:
            lines.append(f"# {_quote(word.text)} = {_quote(word.text)}  # {counted}")
        elif stage:
            lines.append(f"# {_quote(word.text)} = {_quote(stage)}  # {counted}, read so")
        elif stage == "":
            lines.append(f"# {_quote(word.text)}  # {counted}, an epoch that is not scored")
        else:
            line = f"# {_quote(word.text)} = {_quote(word.text)}"
            lines.append(f"{line}  # {counted}; TO STATE where it is a stage or a class")
    if len(texts) > MOST_WORDS:
        lines.append(f"# and {len(texts) - MOST_WORDS} further texts")
    return lines


def _list_recordings(source: Source) -> list[str]:
    """Files that are recordings or tables of them.

    Files of MATLAB, which are often copies, count where there are no others.
    """
    bids = is_bids(source)
    rels = [
        rel
        for rel in source.files
        if find_suffix(rel) in SUFFIXES and not (bids and rel.startswith(DERIVED))
    ]
    by_ending = group_by(rels, find_suffix)
    arrays = by_ending.pop(".mat", [])
    left_out = find_segments(source, by_ending.get(".hea", ())) | find_later_parts(source, rels)
    left_out.update(find_label_arrays(source, rels).list_files())
    left_out |= {*arrays, *(by_ending.get(".tsv", ()) if bids else ())}
    chosen = [rel for rel in rels if rel not in left_out and not _is_layout(source, rel)]
    return chosen or arrays


def _is_layout(source: Source, rel: str) -> bool:
    """Whether a file describes others, such as a README; a text of samples may have its name."""
    is_named = LAYOUT.fullmatch(PurePosixPath(rel).name) is not None
    return is_named and not (find_suffix(rel).startswith(".txt") and holds_samples(source, rel))


def _read_tables(source: Source, rels: Iterable[str]) -> dict[str, TableContent]:
    contents: dict[str, TableContent] = {}
    for rel in rels:
        content = _read_content(source, rel) if SUFFIXES[find_suffix(rel)] == "table" else None
        if content is not None:
            contents[rel] = content
    return contents


def _find_label_tables(rels: Sequence[str], contents: Mapping[str, TableContent]) -> dict[str, str]:
    """Table that is none of recordings -> its column with their names."""
    names = {rel: set(list_recording_keys(rel)) for rel in rels}
    keys = set().union(*(names[rel] for rel in rels if rel not in contents))
    beside: dict[str, str] = {}
    for rel, content in contents.items():
        others = keys or set().union(*(names[other] for other in rels if other != rel))
        column = _find_file_column(content, others)
        if column:
            beside[rel] = column
    return beside


def _group_files(source: Source, rels: Iterable[str]) -> dict[tuple[str, str], list[str]]:
    """Folder and ending -> files, deep folders first: the first pattern that fits a file counts.

    There is one folder for all where there are too many groups, and for an ending of which many
    folders hold the same, such as one folder a person.
    """
    places = {rel: (str(PurePosixPath(rel).parent), find_suffix(rel)) for rel in rels}
    firsts = {place: rel for rel, place in reversed(places.items())}
    merged = set(places.values()) if len(firsts) > GROUPS else _find_same(source, firsts)
    groups: dict[tuple[str, str], list[str]] = {}
    for rel, (folder, ending) in places.items():
        group = (".", ending) if (folder, ending) in merged else (folder, ending)
        groups.setdefault(group, []).append(rel)
    order = sorted(groups, key=lambda group: (-group[0].count("/"), group[0] == ".", group))
    return {group: groups[group] for group in order}


def _find_same(source: Source, firsts: Mapping[tuple[str, str], str]) -> set[tuple[str, str]]:
    """The folders and endings that one pattern can stand for: the first files of all folders with
    this ending are described alike. `firsts`: folder and ending -> the first file.
    """
    same: set[tuple[str, str]] = set()
    for places in group_by(firsts, lambda place: place[1]).values():
        described = {tuple(_describe_group(source, [firsts[place]], Counter())) for place in places}
        if len(places) >= FOLDERS and len(described) == 1:
            same.update(places)
    return same


def _quote(text: str) -> str:
    return json.dumps(clean(text, 200), ensure_ascii=False)


def _read_content(source: Source, rel: str) -> TableContent | None:
    """The first rows of a table, None for one that does not read."""
    try:
        path = source.path(rel)
        mark = sniffer.find_delimiter(path)
        names = tables.read_names(path, delimiter=mark)
        columns: TableContent = {name: [] for name in names}
        for row in islice(tables.read_rows(path, delimiter=mark), ROWS):
            if isinstance(row, tables.TableRow):
                for name, cell in zip(names, row.cells, strict=True):
                    columns[name].append(cell)
    except UserError as error:
        raise_system_error(error)
        return None  # the ingest says why
    return columns


def _find_file_column(content: TableContent, keys: set[str]) -> str:
    """The column of a table that names most recordings; "" for a table that is a recording."""
    for name, cells in content.items():
        named = sum(cell.strip() in keys for cell in cells)
        if name and 2 * named > len(cells):
            return name
    return ""


def _describe_group(source: Source, rels: Sequence[str], texts: Counter[LabelWord]) -> list[str]:
    """Lines of a group of files: rates and channels; their annotations are counted in `texts`."""
    kind = SUFFIXES[find_suffix(rels[0])]
    if kind == "table":
        return _describe_columns(source, rels)
    if kind in {"mat", "npy"}:
        return _describe_arrays(source, rels, kind)
    channels: Counter[tuple[str, float]] = Counter()
    for number, rel in enumerate(rels[:FILES]):
        try:
            header = _read_header(source, rel, kind, texts if number < NIGHTS else None)
        except UserError as error:
            raise_system_error(error)  # the ingest says what is wrong with the file
            continue
        channels.update(list(dict.fromkeys(header)))
    lines = [
        f"#   {_quote(name)} at {rate:g} Hz, in {count} of {min(len(rels), FILES)} files"
        for (name, rate), count in channels.most_common(LISTED)
    ]
    most = _quote(channels.most_common(1)[0][0][0]) if channels else '"name in the file"'
    head = ["# channels:"] if lines else []
    rule = '{name = "name in the cache", unit = "uV"}'
    return [*head, *lines, f"# channels = {{{most} = {rule}}}  # each must be there"]


def _read_header(
    source: Source, rel: str, kind: Format, texts: Counter[LabelWord] | None
) -> list[tuple[str, float]]:
    """Channels and rates by the header of a file; its annotations are counted in `texts`."""
    if kind == "edf":
        channels, words = _read_edf_header(source.path(rel), with_texts=texts is not None)
    elif kind == "wfdb":
        channels, words = _read_wfdb_header(source, rel, with_texts=texts is not None)
    else:
        channels, labels = describe_content(source.path(rel))
        words = map(LabelWord, labels)
    if texts is not None:
        texts.update(words)
    return channels


def _read_edf_header(
    path: Path, *, with_texts: bool
) -> tuple[list[tuple[str, float]], Iterable[LabelWord]]:
    """Channels and rates of an EDF file, and texts of its annotations."""
    header = edf_header.read_header(path, required=())
    notes = edf.read_annotations(path, header)[0] if with_texts else []
    channels = [(channel.label, header.rate(channel)) for channel in header.channels]
    return channels, [LabelWord(note.label) for note in notes]


def _read_wfdb_header(
    source: Source, rel: str, *, with_texts: bool
) -> tuple[list[tuple[str, float]], Iterable[LabelWord]]:
    """Channels and rates of a record of WFDB, and texts of its annotations."""
    record = wfdb.read_header(rel, source, required=())
    channels = [(channel.name, record.rate(channel)) for channel in record.channels]
    beside = f"{rel.removesuffix('.hea')}.atr"
    if not with_texts or beside not in source.files:
        return channels, []
    notes = read_annotations(source.path(beside), record.frame_rate)
    codes = [LabelWord(note.label, is_code=True) for note in notes.list_codes("both")]
    return channels, [*codes, *(LabelWord(note.label) for note in notes.notes)]


def _describe_arrays(source: Source, rels: Sequence[str], kind: str) -> list[str]:
    """Lines of files of arrays; those that hold a rate need none in the map."""
    rates = [find_rate(source.path(rel)) for rel in rels[:NIGHTS] if rel in source.files]
    rate = [] if rates and all(rates) else [_propose_rate(rels)]
    return [*([VARIABLE_LINE] if kind == "mat" else []), *rate, ARRAY_LINE]


def _propose_rate(rels: Sequence[str]) -> str:
    """The line of a rate that no file states: what all names say, such as `ecg_250Hz.csv`."""
    rates = {float(match[1]) if (match := NAMED_RATE.search(rel)) else None for rel in rels}
    rate = rates.pop() if len(rates) == 1 else None
    reason = "the names say it" if rate else f"no file says it, and {ASSUMED_RATE:g} is assumed"
    return f"rate = {rate or ASSUMED_RATE}  # TO STATE: Hz; {reason}"


def _describe_columns(source: Source, rels: Sequence[str]) -> list[str]:
    """Lines of tables with a column a channel: how they are read, their clock, their channels."""
    sniffed = [facts for rel in rels[:FILES] if (facts := sniff_file(source, rel)) is not None]
    if not sniffed:
        return [_propose_rate(rels)]
    first = sniffed[0]
    counts = Counter(chain.from_iterable(list_channel_names(facts) for facts in sniffed))
    person = _find_person(source, rels[0], first)
    common = _list_common(first, counts, len(sniffed), person)
    lines = [
        f"#   {_quote(name)} in {count} of {len(sniffed)} files"
        for name, count in counts.most_common(LISTED)
    ]
    head = [f"# read as: {clean(table_facts.describe_facts(first), 600)}"]
    is_timed = all(facts.found_rate for facts in sniffed)
    head += _describe_clock(first) if is_timed else [_propose_rate(rels)]
    head += [f"subject_column = {quoted}  # a recording for each value" for quoted in person]
    head += [] if is_timed else _propose_series(list_channel_names(first))
    return [*head, "# channels:", *lines, f"channels = [{', '.join(common)}]"]


def _propose_series(names: Sequence[str]) -> list[str]:
    """Lines for a table without a clock whose columns may be the samples of a recording a row."""
    if len(names) < WIDE:
        return []
    stem = re.sub(r"\d+$", "", names[len(names) // 2])
    return [
        f"# series = {_quote(glob.escape(stem) + '*')}  # TO STATE in place of channels, where a "
        "row is a recording and these columns are its samples",
        f"# label_column = {_quote(names[-1])}  # the column with their classes",
    ]


def _list_common(
    facts: table_facts.TableFacts, counts: Counter[str], files: int, others: Sequence[str]
) -> list[str]:
    """The channels of a table that all files have, in quotes, without `others`."""
    names = [_quote(name) for name in list_channel_names(facts) if counts[name] == files]
    return [name for name in names if name not in others and not is_no_signal(name.strip('"'))]


def _find_person(source: Source, rel: str, facts: table_facts.TableFacts) -> list[str]:
    """The header of the column of a table that names several people, in quotes; []: none does."""
    with suppress(UserError):  # the ingest says what is wrong with it
        info = RecordingInfo(recording_id="", subject_id="")
        if people := find_subjects(source.path(rel), facts, info):
            return [_quote(facts.columns[people.place].header)]
    return []


def _describe_clock(facts: table_facts.TableFacts) -> list[str]:
    """The column of the times, and its unit where that is in doubt; none of a stated rate or of a
    vendor's form.
    """
    clock = facts.clock
    if clock is None or facts.rate or facts.vendor or clock.form == table_facts.INTERVALS:
        return []
    header = facts.columns[clock.places[-1]].header
    mark = "" if header else "# "
    rate = f"{facts.found_rate:.6g} Hz"
    lines = [f"{mark}time = {_quote(header)}  # {rate}; the times of the rows"]
    if doubt := table_facts.describe_doubt(facts):
        lines.append(f'clock = "{clock.unit}"  # TO CHECK: {clean(doubt, 300)}')
    return lines


def _describe_table(rel: str, column: str, content: TableContent) -> list[str]:
    """Lines of a table with one row a recording, or an annotation."""
    names = {fold_column(name): name for name in content if name and name != column}
    onsets = [_quote(names[name]) for name in ONSETS if name in names]
    roles = _find_roles(names)
    head = [f"path = {_quote(rel)}", f"file = {_quote(column)}"]
    if find_suffix(rel) == ".tsv":
        head.append('delimiter = "\\t"')
    if onsets and "label" in roles:
        duration, label = _quote(names.get("duration", "")), roles["label"]
        times = [f"onset = {onsets[0]}", f"duration = {duration}"]
        return ["[annotations]", *head, *times, f"label = {label}"]
    lines = [f"{role} = {name}" for role, name in roles.items()]
    if "label" not in roles:
        lines.append('# label = "..."  # TO STATE: the column of classes (value: of numbers)')
    return ["[table]", *head, *lines, f"# columns: {', '.join(map(_quote, names.values()))}"]


def _find_roles(names: Mapping[str, str]) -> dict[str, str]:
    """Role -> the first column, in quotes, of a usual name for it; `names`: as written, by the name
    in lower case.
    """
    usual = {role: [name for name in names if name in ROLES[role]] for role in ROLES}
    return {role: _quote(names[columns[0]]) for role, columns in usual.items() if columns}
