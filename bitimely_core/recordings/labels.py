"""Finds the files that hold the labels of a recording: beside it, or in a folder of their own.

A label file belongs to the recording that its name fits (`LabelNames`), to those that its BIDS name
fits, or to those for which the map names it. Whether a file holds labels its content tells.
"""

from __future__ import annotations

import fnmatch
import glob
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from bitimely_core.errors import Finding, Reason, UserError, input_warning, usage_error
from bitimely_core.formats import label_files, nsrr_xml
from bitimely_core.formats.source import Source, locate_errors
from bitimely_core.formats.stage_texts import EPOCH, name_stage
from bitimely_core.formats.text import decode_table, list_names
from bitimely_core.recordings.mapping import (
    FileRule,
    LabelFile,
    LabelForm,
    LabelRules,
    strip_suffix,
)
from bitimely_core.system_errors import raise_system_error

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
}
WFDB_ENDINGS = {".atr", ".apn", ".st", ".ecg", ".ari", ".qrs", ".event", ".seizures", ".arousal"}
# words in the names of label files, and in those of recordings, that do not tell which recording
LABEL_WORD = re.compile(
    r"hyp(?:no\w*)?|stages?|staging|sleep|sleepstages?|labels?|labell?ed|annotations?|annot|ann"
    r"|events?|scor(?:e|es|ed|ing|ings)|scorers?\w*|raters?\w*|experts?\w*|nsrr|profusion|base"
    r"|epochs?|remlogic|nox|compumedics|txt|csv|edf|aasm|rk|manual|auto|visual|arousals?|markers?"
    r"|marks?|corrected|export|exported|tags?|targets?|truth|predictions?|predicted|final"
)
RECORDING_WORD = re.compile(r"psg|polysomnography|eeg|ecg|raw|signals?|recordings?|rec|edf|sleep")
# the eighth letter is the hypnogram's scorer, or the kind of recorder
SLEEP_EDF = re.compile(r"((?:SC|ST)\d{4}[A-Z])\w(?:-PSG|-Hypnograms?)", re.IGNORECASE)
HYPNOGRAM_SIGNALS = re.compile(r"sleep ?stages?|hypno\w*|stages?|scoring", re.IGNORECASE)
EVENTS = "events"  # of BIDS


class FoundLabels(NamedTuple):
    """The label files of a folder."""

    files: dict[str, tuple[LabelFile, ...]]  # recording -> its label files
    lone: set[str]  # files of EDF that hold labels alone, of no recording
    findings: list[Finding]

    def list_taken(self) -> set[str]:
        """The files that hold labels, and are no recordings."""
        return {file.rel for same in self.files.values() for file in same}


class ReadForm(NamedTuple):
    """What a candidate is by its content."""

    form: LabelForm
    codes: frozenset[str] = frozenset()  # digits that stand for stages


def find_labels(
    source: Source,
    recordings: Mapping[str, FileRule],
    rules: LabelRules,
    *,
    bids: bool,
    skipped: Iterable[str] = (),
) -> FoundLabels:
    """The label files of each recording.

    Args:
        source: the folder.
        recordings: file of a recording -> its group in the map; label files may be among them.
        rules: `[labels]` of the map.
        bids: whether events tables are those of BIDS.
        skipped: files that are read otherwise.
    """
    others = set(skipped)
    if bids:
        others |= {rel for rel in source.files if rel.endswith((".tsv", ".json"))}
    candidates = [rel for rel in source.files if rel not in others and _may_hold_labels(rel)]
    forms = {rel: ReadForm("edf") for rel in candidates if holds_annotations_alone(source, rel)}
    stated, findings = _follow_map(source, recordings, forms)
    for file in {file for files in stated.values() for file in files if file not in forms}:
        forms[file] = _recognise(source, file) or ReadForm("text")  # read as such, or refused
    annotations_alone = set(forms)
    pairs, lone, unread = _pair_by_name(source, recordings, candidates, forms, stated)
    four = "N3" if any("5" in form.codes for form in forms.values()) else ""
    files = {
        rel: tuple(LabelFile(source.path(f), f, forms[f].form, four) for f in sorted(same))
        for rel, same in pairs.items()
        if same
    }
    for rel, events in _find_all_events(source, recordings) if bids else ():
        files[rel] = (*files.get(rel, ()), events)
    findings += [*_report_lone(lone), *_report_unread(unread), *_report_digits(forms, files, rules)]
    paired = {file.rel for same in files.values() for file in same}
    return FoundLabels(files, annotations_alone - paired, findings)


def _pair_by_name(
    source: Source,
    recordings: Mapping[str, FileRule],
    candidates: Sequence[str],
    forms: dict[str, ReadForm],
    stated: Mapping[str, list[str]],
) -> tuple[dict[str, list[str]], list[str], list[str]]:
    """Recording -> its label files, those of `stated` as they are; label files of no recording;
    and texts named as a recording that hold no labels.

    `forms` gets what the files are.
    """
    names = LabelNames(rel for rel in recordings if rel not in forms)
    pairs = dict(stated)
    taken = {file for files in stated.values() for file in files}
    lone: list[str] = []
    unread: list[str] = []
    for file in candidates:
        owner = "" if file in taken else names.find_owner(file)
        if file in taken or (file in recordings and not owner):
            continue
        form = forms.get(file) or _recognise(source, file)
        if form is None:
            # other endings are listed among the files that are not read
            unread += [file] if owner and file.lower().endswith(".txt") else []
        elif not owner:
            lone.append(file)
        elif owner not in stated:
            forms[file] = form
            pairs.setdefault(owner, []).append(file)
    return pairs, lone, unread


def _find_all_events(source: Source, recordings: Iterable[str]) -> Iterator[tuple[str, LabelFile]]:
    """Recording and its events table, of BIDS."""
    events = list_events(source)
    for rel in recordings:
        if rel not in source.rejected and (file := find_events(source, rel, events)):
            yield rel, file


def _may_hold_labels(rel: str) -> bool:
    ending = PurePosixPath(rel).suffix.lower()
    return ending in TEXTS | WFDB_ENDINGS | {".xml", ".edf", ".bdf"}


# --- which recording


class LabelNames:
    """Which recording a label file belongs to by its name, in its own folder or in all of them.

    In this order: the name of the recording; the same without words such as `hypnogram` and `PSG`;
    the name of the recording and further words; a name that a single recording begins with; in a
    folder with one recording a name of such words alone.
    """

    def __init__(self, recordings: Iterable[str]) -> None:
        self.places: dict[tuple[str | None, str], list[str]] = {}  # folder, exact name
        self.cores: dict[tuple[str | None, str], list[str]] = {}
        self.beginnings: dict[tuple[str | None, str], list[str]] = {}
        self.folders: dict[str, list[str]] = {}
        for rel in recordings:
            folder, stem = str(PurePosixPath(rel).parent), PurePosixPath(strip_suffix(rel)).name
            tokens = _split_name(stem)
            self.folders.setdefault(folder, []).append(rel)
            for place in (folder, None):
                _add(self.places, place, stem.casefold(), rel)
                _add(self.places, place, PurePosixPath(rel).name.casefold(), rel)
                for core in {
                    "_".join(tokens),
                    _find_core(tokens, RECORDING_WORD),
                    _name_sleep_edf(stem),
                }:
                    _add(self.cores, place, core, rel)
                for count in range(1, len(tokens)):
                    _add(self.beginnings, place, "_".join(tokens[:count]), rel)

    def find_owner(self, file: str) -> str:
        """The recording of a label file, "" where there is none or more than one."""
        folder, stem = str(PurePosixPath(file).parent), PurePosixPath(strip_suffix(file)).name
        tokens = _split_name(stem)
        core = _find_core(tokens, LABEL_WORD)
        for place in (folder, None):
            for owners in self._list_owners(place, stem, tokens, core):
                others = [rel for rel in owners if rel != file]
                if others:
                    return others[0] if len(others) == 1 else ""
        inside = [rel for rel in self.folders.get(folder, ()) if rel != file]
        return inside[0] if not core and len(inside) == 1 else ""

    def _list_owners(
        self, place: str | None, stem: str, tokens: Sequence[str], core: str
    ) -> Iterator[list[str]]:
        yield self.places.get((place, stem.casefold()), [])
        yield self.cores.get((place, _name_sleep_edf(stem)), [])
        yield self.cores.get((place, core), []) if core else []
        for count in range(len(tokens) - 1, 0, -1):
            if not any(token[0].isdigit() for token in tokens[count:]):
                yield self.cores.get((place, "_".join(tokens[:count])), [])
        if any(character.isdigit() for character in core):
            yield self.beginnings.get((place, core), [])


def _add(
    index: dict[tuple[str | None, str], list[str]], place: str | None, name: str, rel: str
) -> None:
    if name:
        index.setdefault((place, name), []).append(rel)


def _split_name(stem: str) -> list[str]:
    text = stem.casefold().replace("r&k", "rk")
    return [token for token in re.split(r"[^a-z0-9]+", text) if token]


def _find_core(tokens: Sequence[str], word: re.Pattern[str]) -> str:
    """A name without the words at its ends that do not tell which recording it is."""
    kept = list(tokens)
    while kept and word.fullmatch(kept[-1]):
        kept.pop()
    while kept and word.fullmatch(kept[0]):
        kept.pop(0)
    return "_".join(kept)


def _name_sleep_edf(stem: str) -> str:
    """The night of a file of Sleep-EDF, "" for another."""
    match = SLEEP_EDF.fullmatch(stem)
    return f"sleep-edf {match[1].lower()}" if match else ""


def _follow_map(
    source: Source, recordings: Mapping[str, FileRule], forms: Mapping[str, ReadForm]
) -> tuple[dict[str, list[str]], list[Finding]]:
    """Recording -> its label files by `labels` of its group, and warnings about those without."""
    stated: dict[str, list[str]] = {}
    lacking: list[str] = []
    for rel, rule in recordings.items():
        if not rule.labels or rel in forms:
            continue
        pattern = _fill_pattern(rel, rule)
        files = [
            file for file in source.files if file != rel and fnmatch.fnmatchcase(file, pattern)
        ]
        stated[rel] = files
        if not files:
            lacking.append(rel)
    if not lacking:
        return stated, []
    problem = f"{len(lacking)} recordings have no file that `labels` of the map names"
    hint = f"For the first it names {_fill_pattern(lacking[0], recordings[lacking[0]])}"
    return stated, [
        input_warning(
            Reason.UNMATCHED_LABELS,
            problem,
            "they have no labels",
            hint,
            file=lacking[0],
            count=len(lacking),
        )
    ]


def _fill_pattern(rel: str, rule: FileRule) -> str:
    """The pattern of the label files of a recording, a path in the source."""
    path = PurePosixPath(strip_suffix(rel))
    match = re.search(rule.match, rel) if rule.match else None
    groups = match.groupdict() if match else {}
    values = {"stem": path.name, "folder": str(path.parent), "subject": rule.subject}
    values |= {key: text for key, text in groups.items() if text is not None}
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


# --- BIDS


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
    own = _list_entities(PurePosixPath(strip_suffix(rel)).name.split("_"))
    folders = [str(parent) for parent in PurePosixPath(rel).parents]

    def find_nearest(ending: str) -> str:
        fitting = [
            (folders.index(str(PurePosixPath(file).parent)), -len(entities), file)
            for file, entities in events.items()
            if file.endswith(ending)
            and str(PurePosixPath(file).parent) in folders
            and entities.items() <= own.items()
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


# --- what is said


def _report_lone(files: Sequence[str]) -> list[Finding]:
    if not files:
        return []
    problem = f"{len(files)} files of labels belong to no recording by their names"
    hint = 'Say whose they are: labels = "folder/{stem}*" in [[files]] of the map'
    return [
        input_warning(
            Reason.UNMATCHED_LABELS,
            f"{problem}: {list_names(files, 3)}",
            "not read",
            hint,
            file=files[0],
            count=len(files),
        )
    ]


def _report_unread(files: Sequence[str]) -> list[Finding]:
    if not files:
        return []
    return [
        input_warning(
            Reason.FILE_NAME,
            f"{len(files)} texts are named as recordings and hold no labels that are known: "
            f"{list_names(files, 3)}",
            "not read",
            "Known are one stage a line, and tables with the columns onset, duration and label",
            file=files[0],
            count=len(files),
        )
    ]


def _report_digits(
    forms: Mapping[str, ReadForm], found: Mapping[str, Sequence[LabelFile]], rules: LabelRules
) -> list[Finding]:
    """The line on what digits are taken for, and the question where a 4 is not clear."""
    used = {file.rel for same in found.values() for file in same}
    words = rules.words or {}
    codes = {rel: form.codes - words.keys() for rel, form in forms.items() if rel in used}
    codes = {rel: digits for rel, digits in codes.items() if digits - {"-1"}}
    if not codes:
        return []
    digits = frozenset().union(*codes.values())
    first = min(codes)
    epoch = rules.epoch or EPOCH
    stages = {"0": "W", "1": "N1", "2": "N2", "3": "N3", "4": "N3", "5": "REM"}
    is_clear = "5" in digits or "4" not in digits
    legend = ", ".join(
        f"{d} {s}" for d, s in stages.items() if d in digits and (is_clear or d != "4")
    )
    findings = [
        input_warning(
            Reason.LABEL,
            f"digits in {len(codes)} files of labels are read as sleep stages: {legend}",
            f"others are not scored; a stage a line lasts {epoch:g} s",
            'If not, write what they are in [labels] of the map, such as "5" = "W" '
            f"and epoch = {epoch:g}",
            file=first,
            count=len(codes),
        )
    ]
    if not is_clear:
        files = [rel for rel, same in codes.items() if "4" in same]
        findings.append(
            input_warning(
                Reason.UNKNOWN_LABEL,
                f"the digit 4 in {len(files)} files of labels, which hold no 5, is REM in some "
                "programs (YASA) and N3 in others (Rechtschaffen and Kales)",
                "it is not read",
                'Write "4" = "REM" or "4" = "N3" in [labels] of the map',
                file=files[0],
                count=len(files),
            )
        )
    return findings
