"""Finds new recordings and reads them, with the channels and in the way of a run.

Labels beside the recordings (hypnograms, events, annotation files) are never opened, but for those
that are given to calibrate on.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from bitimely_core.cache import open_cache
from bitimely_core.errors import Reason, UserError, input_error, safe_text, usage_error
from bitimely_core.formats import edf_header, wfdb
from bitimely_core.formats.source import Source, locate_errors, scan_folder
from bitimely_core.formats.table_facts import looks_like_samples
from bitimely_core.formats.text import list_names
from bitimely_core.recordings import descriptions, file_choice, file_units, files
from bitimely_core.recordings.arrays import find_label_arrays, find_rate
from bitimely_core.recordings.channels import MINUS, derive_signals, find_source, suggest_source
from bitimely_core.recordings.joining import describe_part, join_units, list_shared_labels
from bitimely_core.recordings.labels import find_labels, holds_annotations_alone
from bitimely_core.recordings.mapping import (
    SUFFIXES,
    FileRule,
    Format,
    LabelFile,
    RecordingInfo,
    find_suffix,
    matches_pattern,
    read_label_rules,
    strip_suffix,
)
from bitimely_core.recordings.mne_files import find_later_parts
from bitimely_core.recordings.sample_tables import list_table_channels
from bitimely_core.recordings.sessions import find_sessions
from bitimely_core.recordings.sidecars import is_bids
from bitimely_core.recordings.sniffed_tables import holds_samples, sniff_file
from bitimely_core.schemas.tokens import WindowOptions
from bitimely_core.store import manifests
from bitimely_core.tokens.channel_maps import OF_ALL, ChannelMap
from bitimely_core.types import Annotation, IngestUnit, Record, Signal

LABEL_FILE = re.compile(
    r"(?i)(?:^|[-_.])(hypno\w*|hyp|stages?|scoring|scores?|annotations?|events|labels?"
    r"|participants|channels|scans|electrodes)$"
)
LABEL_REASONS = {Reason.UNKNOWN_LABEL, Reason.ANNOTATION_OVERLAP}
NEIGHBOURS = 100  # headers beside a record whose checksums are looked at
ANONYMOUS = "1985-01-01"  # the date of EDF files whose start is not told
UNLABELLED = ""  # the only class of the epochs that windows are cut from


class ReadingPlan(NamedTuple):
    """What is read of a recording.

    Channels of the run under the names of the map, and labels only where `labels` maps their texts.
    """

    options: WindowOptions
    mapping: ChannelMap
    labels: Mapping[str, str] | None = None
    points: bool = False  # the times of annotations without a duration, and not their texts

    @property
    def opens_labels(self) -> bool:
        """Whether files of labels beside a recording are opened."""
        return self.labels is not None or self.points

    def list_annotators(self, rule: FileRule) -> tuple[str, ...]:
        """Endings of the annotation files that are opened beside WFDB records of a group."""
        return rule.annotators if self.opens_labels else ()


class LabelledFolder(NamedTuple):
    """A folder, and the label files of its recordings."""

    source: Source
    label_files: dict[str, tuple[LabelFile, ...]]


class NewRecording(NamedTuple):
    """A recording: its name for outputs, its file, and the function that reads it."""

    name: str
    file: str
    read: Callable[[], Record]  # raises UserError


def find_recordings(
    paths: Sequence[Path],
    options: WindowOptions,
    mapping: ChannelMap,
    labels: Mapping[str, str] | None = None,
    *,
    points: bool = False,
) -> Iterator[NewRecording]:
    """The recordings of files, folders (also BIDS) and caches, with unique names.

    They hold the channels of `options` under the names of `mapping`. `labels`: text of an
    annotation -> class, of recordings whose labels are read; None: no label is opened, but with
    `points` for the times of annotations without a duration. A folder without recordings and a path
    that is not there are recordings whose `read` raises. Raises UserError (config, exit 2) without
    any path.
    """
    if not paths:
        raise usage_error("no files", "expected recordings, folders of them or a cache")
    plan = ReadingPlan(options, mapping, labels, points)
    used: set[str] = set()
    folders: dict[Path, LabelledFolder] = {}
    for path in paths:
        for recording in _list_recordings(path, plan, folders):
            stem = re.sub(r"[^A-Za-z0-9._+-]+", "-", recording.name).strip("-._+")[:100]
            name = stem = stem or "recording"
            number = 2
            while name.casefold() in used:  # `night-2` may be a file, too
                name, number = f"{stem}-{number}", number + 1
            used.add(name.casefold())
            yield recording._replace(name=name)


def _list_recordings(
    path: Path, plan: ReadingPlan, folders: dict[Path, LabelledFolder]
) -> Iterator[NewRecording]:
    """The recordings of one path. `folders` holds those whose files were scanned."""
    try:
        if path.is_dir() and (path / manifests.MANIFEST).is_file():
            yield from _list_cached(path, plan)
            return
        (source, beside), rels = _scan_files(path, plan, folders)
        groups = _group_files(path, source, rels, plan) if path.is_dir() else {}
    except UserError as error:
        yield NewRecording(path.stem or "recording", str(path), partial(_raise_error, error))
        return
    joined = set(itertools.chain(*groups.values()))
    for rel in itertools.filterfalse(joined.__contains__, rels):
        stem = strip_suffix(rel if path.is_dir() else path.name)
        read = partial(read_recording, source, rel, plan, beside.get(rel, ()))
        yield NewRecording(stem, str(source.root / rel), read)
    for name, parts in groups.items():
        label_files = {rel: beside.get(rel, ()) for rel in parts}
        read = partial(read_parts, source, name, label_files, plan)
        yield NewRecording(name, str(source.root / name), read)


def _list_cached(path: Path, plan: ReadingPlan) -> Iterator[NewRecording]:
    """The recordings of a cache."""
    for name in open_cache(path, verify=False).recording_ids():
        yield NewRecording(name, f"{path}:{name}", partial(_read_cached, path, name, plan))


def check_exists(path: Path) -> None:
    """Raises UserError (not_found, exit 2) where nothing is at `path`."""
    if not path.exists():
        raise usage_error(
            "no such file",
            "expected a recording, a folder or a cache",
            code=Reason.NOT_FOUND,
            file=str(path),
        )


def _scan_files(
    path: Path, plan: ReadingPlan, folders: dict[Path, LabelledFolder]
) -> tuple[LabelledFolder, list[str]]:
    """A source with the recordings at a path. Raises UserError: no_input, not_found."""
    if path.is_dir():
        source = scan_folder(path)
        rels = list(list_signal_files(source, plan))
        if not rels:
            ending = find_suffix(next(iter(source.files), ""))
            raise input_error(
                Reason.NO_INPUT,
                "no recordings there",
                f"expected {', '.join(SUFFIXES)}",
                files.read_advice().get(ending, ""),
                file=str(path),
            )
        return LabelledFolder(source, _find_label_files(source, plan)), rels
    check_exists(path)
    if path.parent not in folders:
        source = scan_folder(path.parent, follow_symlinks=True, is_flat=True)
        folders[path.parent] = LabelledFolder(source, _find_label_files(source, plan))
    return folders[path.parent], [path.name]


def _group_files(
    path: Path, source: Source, rels: Sequence[str], plan: ReadingPlan
) -> dict[str, list[str]]:
    """Recording -> its files, of those in several: as the map says, else as `ingest` joins them.

    The files of a lone folder are joined, too, where the run reads more channels than each has.
    """
    rules = {rel: _choose_rule(source, rel, plan) for rel in rels}
    names = files.name_joined(
        source,
        {rel: (_find_format(rel, rule), rule) for rel, rule in rules.items()},
        is_stated=not {"match", "files"}.isdisjoint(plan.mapping.model_fields_set),
        least=1 if len(plan.options.read_channels) > 1 else 2,
    )
    groups: dict[str, list[str]] = {}
    for rel, (_, name) in names.items():
        groups.setdefault(path.resolve().name if name == "." else name, []).append(rel)
    return groups


def _find_label_files(source: Source, plan: ReadingPlan) -> dict[str, tuple[LabelFile, ...]]:
    """Recording -> its label files, where labels are read."""
    if not plan.opens_labels:
        return {}
    rels = {rel: _choose_rule(source, rel, plan) for rel in list_signal_files(source, plan)}
    return find_labels(source, rels, read_label_rules(plan.mapping)).files


def list_signal_files(source: Source, plan: ReadingPlan) -> list[str]:
    """Files of a folder that can be recordings.

    These are neither labels, by their names or without a signal, nor tables of a BIDS folder, nor
    segments of a record, nor events of a session, nor tables of something else beside recordings.
    Files of MATLAB are often copies: they count where the map names them or nothing else is there.
    """
    rels = [
        rel
        for rel in (*source.files, *source.rejected)
        if file_choice.choose_format(rel, _find_rule(source, rel, plan))
    ]
    rels = list(_drop_parts(source, rels))
    signals = [rel for rel in rels if plan.options.clock or not _is_other_table(source, rel)]
    return signals or rels or list(file_choice.list_matlab(source))


def _find_rule(source: Source, rel: str, plan: ReadingPlan) -> FileRule | None:
    """The first group of the map that fits a file.

    Its path has as many folders as the pattern, which may begin above the folder that is given.
    """
    parts = (source.root / rel).absolute().parts
    for rule in plan.mapping.files:
        ending = "/".join(parts[-1 - rule.pattern.count("/") :])
        if matches_pattern(rel, rule.pattern) or matches_pattern(ending, rule.pattern):
            return rule
    return None


def _choose_rule(source: Source, rel: str, plan: ReadingPlan) -> FileRule:
    """The group of the map that fits a file, with what the map states of all of them.

    Raises UserError (config).
    """
    rule = _find_rule(source, rel, plan)
    if rule is None:
        patterns = list_names([other.pattern for other in plan.mapping.files])
        raise usage_error(
            "no group of the map fits it",
            f"expected {patterns}",
            "Change `pattern` in [[files]] of --map",
            file=rel,
        )
    return rule.model_copy(update=plan.mapping.model_dump(include=OF_ALL, exclude_defaults=True))


def _is_other_table(source: Source, rel: str) -> bool:
    """Whether a file reads as a table, and not as one of samples."""
    if SUFFIXES.get(find_suffix(rel)) != "table":
        return False
    facts = sniff_file(source, rel)
    return facts is not None and not looks_like_samples(facts)


def _drop_parts(source: Source, rels: Sequence[str]) -> Iterator[str]:
    """The files that may hold signals, without those that belong to others."""
    segments = file_choice.find_segments(
        source, [rel for rel in rels if find_suffix(rel) == ".hea"]
    )
    segments |= find_later_parts(source, rels)
    segments |= find_label_arrays(source, rels).list_files()
    sessions = find_sessions(source, rels)
    segments.update(*(session.events for session in sessions))
    for rel in sorted(set(rels) - segments):
        if _may_hold_signals(source, rel):
            yield rel


def _may_hold_signals(source: Source, rel: str) -> bool:
    """Whether a file is no table or product of a BIDS folder, no text but of samples, no label."""
    is_beside = rel.endswith(".tsv") or rel.startswith(file_choice.DERIVED)
    if is_beside and is_bids(source):
        return False
    if find_suffix(rel).startswith(".txt") and not holds_samples(source, rel):
        return False
    is_label = LABEL_FILE.search(PurePosixPath(strip_suffix(rel)).name) is not None
    return not is_label and not holds_annotations_alone(source, rel)


def _raise_error(error: UserError) -> Record:
    raise error


def _read_cached(path: Path, recording: str, plan: ReadingPlan) -> Record:
    names = list(
        itertools.chain.from_iterable(
            plan.mapping.list_names(wanted) for wanted in plan.options.read_channels
        )
    )
    is_derived = any(MINUS in name for name in names)
    records = open_cache(path, verify=False).records(
        None if is_derived else names, only=[recording], labels=plan.opens_labels
    )
    return select_channels(next(iter(records)), plan)


def read_recording(
    source: Source, rel: str, plan: ReadingPlan, label_files: tuple[LabelFile, ...] = ()
) -> Record:
    """The recording in a file of `source`, with the channels of `plan` and its labels.

    Channels have their names in the run. Raises UserError naming the file.
    """
    with locate_errors(rel):
        rule = _choose_rule(source, rel, plan)
        kind = _find_format(rel, rule)
        info = replace(_describe_file(rel, kind, rule, plan), label_files=label_files)
        info, _ = file_units.add_descriptions(source, rel, kind, info)  # they name channels
        names = None if rule.channels else _list_channels(source, rel, kind, info)
        if names is not None:
            info = replace(info, channels=_choose_sources(names, plan))
        unit = _make_unit(source, rel, kind, info, plan.list_annotators(rule))
        return select_channels(_read_record(unit), plan)


def read_parts(
    source: Source, name: str, label_files: Mapping[str, tuple[LabelFile, ...]], plan: ReadingPlan
) -> Record:
    """A recording in several files, joined by channel or by time as `ingest` does.

    `label_files`: file -> its label files. Raises UserError naming the file that is at fault.
    """
    units: list[IngestUnit] = []
    for rel, beside in label_files.items():
        with locate_errors(rel):
            rule = _choose_rule(source, rel, plan)
            kind = _find_format(rel, rule)
            info = replace(_describe_file(rel, kind, rule, plan), label_files=beside)
            part = describe_part(info, kind)
            units.append(_make_unit(source, rel, kind, part, plan.list_annotators(rule)))
    with locate_errors(name, replace=False):
        whole = _describe_recording(name, plan)
        shared = list_shared_labels(label_files.values())
        whole = replace(whole, recording_id=name, label_files=shared)
        return select_channels(_read_record(join_units(whole, units)), plan)


def _find_format(rel: str, rule: FileRule) -> Format:
    """The format of a file by its group in the map or its ending.

    Raises UserError: unsupported_format.
    """
    kind = rule.format or SUFFIXES.get(find_suffix(rel))
    if kind is None:
        raise input_error(
            Reason.UNSUPPORTED_FORMAT,
            "no format of recordings has this ending",
            f"expected one of {', '.join(SUFFIXES)}",
            files.read_advice().get(find_suffix(rel), ""),
        )
    return kind


def _choose_sources(names: Iterable[str], plan: ReadingPlan) -> dict[str, tuple[str, str]]:
    """The channels of a file that the run needs, under their names in the file."""
    sources = choose_channels(names, plan.options.read_channels, plan.mapping)
    return {name: (name, "") for name in itertools.chain(*sources.values())}


def _make_unit(
    source: Source, rel: str, kind: Format, info: RecordingInfo, endings: Sequence[str]
) -> IngestUnit:
    """The file, bound to the reader of its format. Raises UserError: sampling_rate."""
    if kind in {"npy", "mat"} and info.rate is None:
        info = replace(info, rate=find_rate(source.path(rel)))
    if kind in {"npy", "mat"} and info.rate is None:
        raise input_error(
            Reason.SAMPLING_RATE,
            "has no sampling rate",
            "expected `rate` in the file of --map",
            "Give --map FILE.toml",
        )
    if kind == "wfdb":
        info = replace(info, unfilled=_is_unfilled(source, rel))
    return file_units.make_unit(source, rel, kind, info, annotators=endings)


def _read_record(unit: IngestUnit) -> Record:
    """The one recording of a unit."""
    assert unit.read is not None, "its faults were raised"
    record = unit.read()
    if not isinstance(record, Record):
        problem, wanted = "holds several recordings", "expected one a file"
        raise input_error(Reason.DIMENSIONS, problem, wanted, "Ingest it, and give that cache")
    return record


def _is_unfilled(source: Source, rel: str) -> bool:
    """Whether no checksum is filled in beside a WFDB record; `NEIGHBOURS` there are looked at."""
    folder = PurePosixPath(rel).parent
    beside = (
        other
        for other in source.files
        if find_suffix(other) == ".hea" and PurePosixPath(other).parent == folder
    )
    headers = {rel, *itertools.islice(beside, NEIGHBOURS)}
    return bool(wfdb.find_unfilled(source, headers))


def _describe_recording(name: str, plan: ReadingPlan) -> RecordingInfo:
    """What is read of a recording, of whichever files."""
    rules = read_label_rules(plan.mapping)
    return RecordingInfo(
        recording_id=name,
        subject_id="unknown",
        label_rules=rules._replace(words={**(rules.words or {}), **(plan.labels or {})}),
        points=plan.points,
        units=plan.mapping.units,
        keep_dates=True,  # `select_channels` keeps the time of day
    )


def _describe_file(rel: str, kind: Format, rule: FileRule, plan: ReadingPlan) -> RecordingInfo:
    """What a file does not state itself; the times of irregular samples are a channel."""
    info = _describe_recording(PurePosixPath(strip_suffix(rel)).name, plan)
    info = descriptions.apply_rule(info, rule)
    if kind not in {"table", "npy", "mat"}:  # they state it, and are resampled
        return replace(info, rate=None)
    return replace(info, rate=plan.options.rate, time="") if plan.options.clock else info


def _list_channels(
    source: Source, rel: str, kind: Format, info: RecordingInfo
) -> Iterable[str] | None:
    """Names of the channels by the header alone; None: known when the file is read."""
    if kind == "edf":
        header = edf_header.read_header(source.path(rel), required=())
        return [channel.label for channel in header.channels]
    if kind == "wfdb":
        return [channel.name for channel in wfdb.read_header(rel, source, required=()).channels]
    if kind == "table":
        return list_table_channels(source.path(rel), info)
    return None


def choose_channels(
    names: Iterable[str], channels: Sequence[str], mapping: ChannelMap
) -> dict[str, tuple[str, ...]]:
    """Channel of the run -> its name among `names`, or the two whose difference it is.

    Raises UserError (missing_channel, exit 4) with the nearest names.
    """
    present = list(dict.fromkeys(names))
    chosen: dict[str, tuple[str, ...]] = {}
    missing = []
    for wanted in channels:
        sources = (find_source(name, present) for name in mapping.list_names(wanted))
        source = next(filter(None, sources), None)
        if source is None:
            missing.append(wanted)
        else:
            chosen[wanted] = source
    if missing:
        raise _missing_channel_error(missing, present, mapping)
    return chosen


def _missing_channel_error(
    missing: list[str], present: list[str], mapping: ChannelMap
) -> UserError:
    """The error for the channels of the run that a file has under none of their names."""
    wanted = " or ".join(map(safe_text, mapping.list_names(missing[0])))
    others = f" and {len(missing) - 1} more of the run" if missing[1:] else ""
    pairs = [(name, suggest_source(name, present)) for name in missing]
    options = [f"--map {safe_text(f'{name}={near}')}" for name, near in pairs if near is not None]
    hint = "Name it with --map WANTED=FOUND, or as a difference with --map 'WANTED=PLUS - MINUS'"
    if options:
        hint = f"If it is the same signal, give {' '.join(options)}"
    return input_error(
        Reason.MISSING_CHANNEL,
        f"has no channel {wanted}{others}",
        f"found {list_names(present, 12) or 'none'}",
        hint,
        field="channels",
        expected=safe_text(missing[0]),
    )


def _drop_date(start: str | None) -> str | None:
    """The time of day of a start; None where it is not told."""
    date, _, time = (start or "").partition("T")
    return time if time and date != ANONYMOUS else None


def select_channels(record: Record, plan: ReadingPlan) -> Record:
    """The record with the channels of `plan` alone, under their names in the run, and with the time
    of day of its start.

    It has no labels unless `plan` maps them.
    """
    sources = choose_channels(
        (signal.channel for signal in record.signals), plan.options.read_channels, plan.mapping
    )
    signals: list[Signal] = []
    for wanted, names in sources.items():
        parts = [[signal for signal in record.signals if signal.channel == name] for name in names]
        read = parts[0] if len(parts) == 1 else derive_signals(parts[0], parts[1])
        signals += [signal._replace(channel=wanted) for signal in read]
    record = replace(
        record,
        signals=signals,
        start_time=_drop_date(record.start_time),
        sources={wanted: MINUS.join(names) for wanted, names in sources.items()},
    )
    return _select_labels(record, plan)


def _select_labels(record: Record, plan: ReadingPlan) -> Record:
    """The record with the labels that `plan` maps; without a mapping at most with its points."""
    if plan.labels is None:  # what texts would mean is of no interest
        findings = [finding for finding in record.findings if finding.code not in LABEL_REASONS]
        record = replace(record, findings=findings)
        points = list_points(record) if plan.points else []
        return replace(record, annotations=points, attributes={})
    notes = [
        note._replace(label=plan.labels.get(note.label, note.label))
        for note in record.annotations
        if note.label in plan.labels or not plan.labels
    ]
    return replace(record, annotations=notes)


def list_points(record: Record) -> list[Annotation]:
    """The annotations without a duration, and without their texts."""
    points = [note for note in record.annotations if note.duration == 0]
    return [note._replace(label=UNLABELLED) for note in points]
