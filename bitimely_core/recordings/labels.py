"""Finds the files that hold the labels of a recording: beside it, or in a folder of their own.

A label file belongs to the recording that its name fits (`LabelNames`), to those that its BIDS name
fits, or to those for which the map names it. Whether a file holds labels its content tells.
"""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import filterfalse, product
from pathlib import PurePosixPath
from typing import NamedTuple

from bitimely_core.errors import Finding, Reason, UserError, input_warning, usage_error
from bitimely_core.formats import label_files, matlab, nsrr_xml
from bitimely_core.formats.label_tables import STAGE_NAMES
from bitimely_core.formats.source import Source
from bitimely_core.formats.stage_texts import EPOCH
from bitimely_core.formats.text import decode_table, list_names
from bitimely_core.recordings.folder_tables import EVENT_TEXTS
from bitimely_core.recordings.label_names import LabelNames
from bitimely_core.recordings.mapping import (
    FileRule,
    LabelFile,
    LabelForm,
    LabelRules,
    find_suffix,
    search_groups,
    strip_suffix,
)
from bitimely_core.recordings.sessions import Session, find_sessions, report_events
from bitimely_core.recordings.sidecars import find_all_events, is_bids
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import drop_none

HEAD = 1 << 16  # bytes by which the form of a file is known
TEXTS = {
    ".txt",
    ".csv",
    ".tsv",
    ".annot",
    ".eannot",
    ".hyp",
    ".hypno",
    ".hypnogram",
    ".stages",
    ".ann",
    ".tse",
}
WFDB_ENDINGS = {".atr", ".apn", ".st", ".ecg", ".ari", ".qrs", ".event", ".seizures", ".arousal"}
ARRAY_SUFFIXES = {".npy", ".npz", ".mat"}
STAGED_NAME = re.compile(r"hyp|stag|scor|sleep", re.IGNORECASE)
LEGEND = {"0": "W", "1": "N1", "2": "N2", "3": "N3", "4": "N3", "5": "REM"}
HYPNOGRAM_SIGNALS = re.compile(r"sleep ?stages?|hypno\w*|stages?|scoring", re.IGNORECASE)


class FoundLabels(NamedTuple):
    """The label files of a folder."""

    files: dict[str, tuple[LabelFile, ...]]  # recording -> its label files
    lone: set[str]  # files of EDF that hold labels alone, of no recording
    findings: list[Finding]

    def list_taken(self) -> set[str]:
        """The files that hold labels, and are no recordings."""
        return {file.rel for rel, same in self.files.items() for file in same if file.rel != rel}


class ReadForm(NamedTuple):
    """What a candidate is by its content."""

    form: LabelForm
    codes: frozenset[str] = frozenset()  # digits that stand for stages


def find_labels(
    source: Source,
    recordings: Mapping[str, FileRule],
    rules: LabelRules,
    skipped: Iterable[str] = (),
) -> FoundLabels:
    """The label files of each recording.

    Args:
        source: the folder.
        recordings: file of a recording -> its group in the map; label files may be among them.
        rules: `[labels]` of the map.
        skipped: files that are read otherwise.
    """
    candidates = _list_candidates(source, skipped)
    forms = {rel: ReadForm("edf") for rel in candidates if holds_annotations_alone(source, rel)}
    annotations_alone = set(forms)
    stated, findings = _follow_map(source, recordings, forms)
    named = set().union(*stated.values())
    for file in named - forms.keys():
        forms[file] = _recognise(source, file) or ReadForm("text")  # read as such, or refused
    candidates = [file for file in candidates if file not in named]
    sessions = find_sessions(source, recordings)
    later = _list_later(sessions, recordings)
    names = LabelNames(filterfalse(forms.__contains__, recordings), later)
    pairs, lone, unread = _pair_by_name(source, recordings, candidates, forms, names)
    pairs = _pair_with_themselves(source, recordings, pairs, forms) | pairs
    inherited = dict(find_all_events(source, recordings)) if is_bids(source) else {}
    staged = _pair_staged(source, inherited, forms)
    files = _describe_files(source, pairs | stated | staged, forms)
    for rel in inherited.keys() - staged.keys():
        files[rel] = (*files.get(rel, ()), inherited[rel])
    for rel, events in _list_events(source, sessions):
        files[rel] = (*files.get(rel, ()), events)
    findings += report_events(source, sessions)
    findings += _report_files(
        Reason.UNMATCHED_LABELS,
        "files of labels belong to no recording by their names",
        'Say whose they are: labels = "folder/{stem}*" in [[files]] of the map',
        lone,
    )
    findings += _report_files(
        Reason.FILE_NAME,
        "texts are named as recordings and hold no labels that are known",
        "Known are one stage a line or in a list, and tables with the columns onset, duration "
        "and label",
        unread,
    )
    beside = FoundLabels(files, annotations_alone, findings)
    taken = beside.list_taken()
    findings += _report_digits({rel: forms[rel].codes for rel in forms.keys() & taken}, rules)
    return beside._replace(lone=annotations_alone - taken)


def _list_candidates(source: Source, skipped: Iterable[str]) -> list[str]:
    """Files that may hold labels, without those that are read otherwise."""
    of_bids = (".tsv", ".json") if is_bids(source) else ()
    others = {*skipped, *(rel for rel in source.files if rel.endswith(of_bids))}
    return [rel for rel in source.files if rel not in others and _may_hold_labels(rel)]


def _pair_staged(
    source: Source, inherited: Mapping[str, LabelFile], forms: dict[str, ReadForm]
) -> dict[str, list[str]]:
    """Recording -> its events table of BIDS that has stages in a column that BIDS does not know.

    `forms` gets what these tables are.
    """
    for rel in {events.rel for events in inherited.values()}:
        form = _recognise(source, rel)
        if form and EVENT_TEXTS.isdisjoint(_read_head(source, rel).partition(b"\n")[0].split()):
            forms[rel] = form
    return {rel: [events.rel] for rel, events in inherited.items() if events.rel in forms}


def _list_later(sessions: Iterable[Session], recordings: Mapping[str, FileRule]) -> Iterator[str]:
    """The tables of sessions that are joined to the first of them: the map states nothing of them.

    The labels of a session come with its first table.
    """
    for session in sessions:
        if not any(recordings[rel].model_fields_set for rel in session.parts):
            yield from (*session.parts[1:], *session.events)


def _list_events(source: Source, sessions: Iterable[Session]) -> Iterator[tuple[str, LabelFile]]:
    """Each table of a session with each of its files of events."""
    for session in sessions:
        for rel, events in product(session.parts, session.events):
            yield rel, LabelFile(source.path(events), events, "device")


def _describe_files(
    source: Source, pairs: Mapping[str, Sequence[str]], forms: Mapping[str, ReadForm]
) -> dict[str, tuple[LabelFile, ...]]:
    """Recording -> its label files; a 4 is N3 where some file of the folder has a 5, as REM."""
    four = "N3" if any("5" in form.codes for form in forms.values()) else ""
    return {
        rel: tuple(LabelFile(source.path(f), f, forms[f].form, four) for f in sorted(same))
        for rel, same in pairs.items()
        if same
    }


def _pair_by_name(
    source: Source,
    recordings: Mapping[str, FileRule],
    candidates: Sequence[str],
    forms: dict[str, ReadForm],
    names: LabelNames,
) -> tuple[dict[str, list[str]], list[str], list[str]]:
    """Recording -> its label files; label files of no recording; and texts named as a recording
    that hold no labels.

    `forms` gets what the files are. Files of recordings for which the map names others are of none.
    """
    owners = _find_owners(recordings, candidates, names)
    recognised = {file: forms.get(file) or _recognise(source, file) for file in owners}
    labelled = drop_none(recognised)
    pairs: dict[str, list[str]] = {}
    for file, form in labelled.items():
        owner = owners[file]
        if owner and not recordings[owner].labels:
            forms[file] = form
            pairs.setdefault(owner, []).append(file)
    lone = [file for file in labelled if not owners[file]]
    unknown = [file for file in owners.keys() - labelled.keys() - recordings.keys() if owners[file]]
    return pairs, lone, sorted(filter(_may_be_missed, unknown))


def _pair_with_themselves(
    source: Source,
    recordings: Mapping[str, FileRule],
    pairs: Mapping[str, list[str]],
    forms: dict[str, ReadForm],
) -> dict[str, list[str]]:
    """Recordings of MATLAB without a label file that hold their stages; `forms` gets their form."""
    staged: dict[str, list[str]] = {}
    taken = set().union(*pairs.values())
    for rel, rule in recordings.items():
        if find_suffix(rel) != ".mat" or rule.labels or rel in pairs or rel in taken:
            continue
        form = _recognise(source, rel)
        if form and matlab.has_vector_beside(source.path(rel), STAGE_NAMES):
            staged[rel] = [rel]
            forms[rel] = form
    return staged


def _find_owners(
    recordings: Mapping[str, FileRule], candidates: Sequence[str], names: LabelNames
) -> dict[str, str]:
    """File -> the recording that it is named after, empty for none, of files that may hold labels:
    no recordings by themselves, and no arrays of recordings that are arrays.
    """
    owners = {file: names.find_owner(file) for file in candidates}
    return {
        file: owner
        for file, owner in owners.items()
        if (owner or file not in recordings) and not _are_arrays(file, owner)
    }


def _are_arrays(file: str, owner: str) -> bool:
    """Whether a file is an array and no recording of another format has it: `find_label_arrays`
    knows those of arrays.
    """
    return find_suffix(file) in ARRAY_SUFFIXES and find_suffix(owner) in {"", *ARRAY_SUFFIXES}


def _may_be_missed(rel: str) -> bool:
    """Whether a file that holds no labels is named: the list of unread files leaves it out."""
    is_staged = STAGED_NAME.search(PurePosixPath(rel).name) is not None
    return rel.lower().endswith(".txt") or (rel.lower().endswith(".json") and is_staged)


def _may_hold_labels(rel: str) -> bool:
    ending = PurePosixPath(rel).suffix.lower()
    return ending in TEXTS | WFDB_ENDINGS | label_files.ARRAYS | {".xml", ".edf", ".bdf"}


# --- which recording


def _follow_map(
    source: Source, recordings: Mapping[str, FileRule], forms: Mapping[str, ReadForm]
) -> tuple[dict[str, list[str]], list[Finding]]:
    """Recording -> its label files by `labels` of its group, and warnings about those without."""
    stated: dict[str, list[str]] = {}
    for rel, rule in recordings.items():
        if not rule.labels or rel in forms:
            continue
        files = fnmatch.filter(source.files, _fill_pattern(rel, rule))
        stated[rel] = [file for file in files if file != rel]
    lacking = [rel for rel, files in stated.items() if not files]
    if not lacking:
        return stated, []
    first, count = lacking[0], len(lacking)
    problem = f"{count} recordings have no file that `labels` of the map names"
    action = "they have no labels"
    hint = f"For the first it names {_fill_pattern(first, recordings[first])}"
    code = Reason.UNMATCHED_LABELS
    return stated, [input_warning(code, problem, action, hint, file=first, count=count)]


def _fill_pattern(rel: str, rule: FileRule) -> str:
    """The pattern of the label files of a recording, a path in the source."""
    path = PurePosixPath(strip_suffix(rel))
    values = {"stem": path.name, "folder": str(path.parent), "subject": rule.subject}
    values |= search_groups(rule.match, rel)
    escaped = {key: glob.escape(text) for key, text in values.items()}
    try:
        pattern = rule.labels.format_map(escaped)
    except (KeyError, ValueError, IndexError, AttributeError):
        names = ", ".join(f"{{{key}}}" for key in values)
        problem = f"found {rule.labels!r}"
        raise usage_error(problem, f"expected a path with {names}", field="files.labels") from None
    return re.sub(r"^(?:\./)+", "", pattern)


# --- which content


def _read_head(source: Source, rel: str) -> bytes:
    with source.path(rel).open("rb") as file:
        return file.read(HEAD)


def _recognise(source: Source, rel: str) -> ReadForm | None:
    """What a candidate is by its content; None for what is no file of labels, or does not read."""
    ending = PurePosixPath(rel).suffix.lower()
    try:
        if ending in label_files.ARRAYS:
            table = label_files.read_label_text(source.path(rel))
            return ReadForm("text", table.codes) if table else None
        head = _read_head(source, rel)
        if ending == ".xml" or head.lstrip(b"\xef\xbb\xbf \r\n").startswith(b"<?xml"):
            return ReadForm("xml") if nsrr_xml.is_scored(head) else None
        if ending in WFDB_ENDINGS:
            return ReadForm("wfdb") if _ends_as_annotations(source, rel) else None
        return _recognise_text(source, rel, head)
    except (OSError, UserError) as error:
        raise_system_error(error, source.root / rel, stored=False)
        return None  # named among the files that are not read


def _ends_as_annotations(source: Source, rel: str) -> bool:
    size = source.files[rel]
    if size < 4 or size % 2:
        return False
    with source.path(rel).open("rb") as file:
        file.seek(-2, 2)
        return file.read() == b"\0\0"


def _recognise_text(source: Source, rel: str, head: bytes) -> ReadForm | None:
    if len(head) == HEAD:  # of a table of samples the beginning is enough
        text = decode_table(head[: head.rfind(b"\n") + 1], fallback="latin-1")
        if label_files.parse_label_text(text) is None:
            return None
    table = label_files.read_label_text(source.path(rel))
    return ReadForm("text", table.codes) if table else None


def holds_annotations_alone(source: Source, rel: str) -> bool:
    """Whether a file is of EDF, and all its signals are annotations or hypnograms."""
    if not rel.lower().endswith((".edf", ".bdf")) or rel not in source.files:
        return False
    try:
        with source.path(rel).open("rb") as file:
            fixed = file.read(256)
            count = int(fixed[252:256])
            labels = file.read(16 * min(max(count, 0), 64)).decode("latin-1")
    except (OSError, ValueError, UserError) as error:
        raise_system_error(error, source.root / rel, stored=False)
        return False  # its unit says what is wrong
    names = [labels[i : i + 16].strip() for i in range(0, len(labels), 16)]
    signals = [name for name in names if name not in {"EDF Annotations", "BDF Annotations"}]
    return len(signals) < len(names) and all(map(HYPNOGRAM_SIGNALS.fullmatch, signals))


# --- what is said


def _report_files(code: Reason, what: str, hint: str, files: Sequence[str]) -> list[Finding]:
    """The warning about files that are not read; none without files."""
    if not files:
        return []
    problem, count = f"{len(files)} {what}: {list_names(files, 3)}", len(files)
    return [input_warning(code, problem, "not read", hint, file=files[0], count=count)]


def _report_digits(digits_in: Mapping[str, frozenset[str]], rules: LabelRules) -> list[Finding]:
    """The line on what digits are taken for, and the question where a 4 is not clear.

    `digits_in`: label file -> the digits in it.
    """
    stated = set(rules.words or {})
    codes = {rel: digits - stated for rel, digits in digits_in.items() if digits - stated - {"-1"}}
    if not codes:
        return []
    digits = set().union(*codes.values())
    is_clear = "5" in digits or "4" not in digits
    clear = digits if is_clear else digits - {"4"}
    legend = ", ".join(f"{d} {stage}" for d, stage in LEGEND.items() if d in clear)
    epoch = rules.epoch or EPOCH
    assumed = input_warning(
        Reason.LABEL,
        f"digits in {len(codes)} files of labels are read as sleep stages: {legend}",
        f"others are not scored; a stage a line lasts {epoch:g} s where nothing states otherwise",
        'If they mean something else, write a line a digit in [labels] of the map, "0" = "W" for '
        "wake, and epoch = the seconds of a line",
        file=min(codes),
        count=len(codes),
    )
    return [assumed] if is_clear else [assumed, _report_four(codes)]


def _report_four(codes: Mapping[str, frozenset[str]]) -> Finding:
    files = [rel for rel, digits in codes.items() if "4" in digits]
    return input_warning(
        Reason.UNKNOWN_LABEL,
        f"the digit 4 in {len(files)} files of labels, which hold no 5, is REM in some "
        "programs (YASA) and N3 in others (Rechtschaffen and Kales)",
        "it is not read",
        'Write "4" = "REM" or "4" = "N3" in [labels] of the map',
        file=files[0],
        count=len(files),
    )
