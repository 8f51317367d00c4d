"""Joins files to recordings: a file a channel, or a file a part of the time.

The group `recording` of `match` says which files belong together. Without a map, folders whose
files hold one channel each are recognised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import chain
from pathlib import PurePosixPath
from typing import NamedTuple

from bitimely_core.errors import Finding, Reason, UserError, input_error, input_warning, safe_text
from bitimely_core.formats import edf_header
from bitimely_core.formats.source import Source
from bitimely_core.formats.text import list_names
from bitimely_core.recordings.mapping import SUFFIXES, Format, LabelFile, RecordingInfo, find_suffix
from bitimely_core.recordings.selection import make_record
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import (
    Annotation,
    IngestUnit,
    Record,
    Records,
    Signal,
    count_nouns,
    group_by,
)
from bitimely_core.wording import list_first

NEAR = 1.0  # seconds: headers state the start to the second
SHOWN = 3  # recordings in a line

Read = Callable[[], Record | Records]


class PlacedPart(NamedTuple):
    """A file of a recording: its contents, and where they are in time."""

    file: str
    record: Record
    onset: float  # seconds from the start of the recording

    @property
    def end(self) -> float:
        """Seconds from the start of the recording."""
        return self.onset + max(map(_end, self.record.signals))

    @property
    def channels(self) -> set[str]:
        """The channels of the file."""
        return {signal.channel for signal in self.record.signals}

    @property
    def start(self) -> datetime | None:
        """When the file begins, where it states that."""
        text = self.record.start_time
        return datetime.fromisoformat(text) if text else None


# --- which files


def find_channel_folders(
    source: Source, recordings: Mapping[str, Format], *, least: int = 2
) -> dict[str, str]:
    """File -> recording, of folders whose EDF files hold one differently named channel each, of
    equal durations, where at least `least` folders (2, or 1) have files of the same names.
    """
    folders = group_by(recordings, lambda rel: str(PurePosixPath(rel).parent))
    counts = Counter(PurePosixPath(rel).name for rel in recordings)
    chosen: dict[str, list[str]] = {}
    for folder, rels in folders.items():
        shared = sum(counts[PurePosixPath(rel).name] >= least for rel in rels)
        is_edf = all(recordings[rel] == "edf" for rel in rels)
        if shared > 1 and is_edf and _hold_one_channel_each(source, rels):
            chosen[folder] = rels
    if len(chosen) < least:
        return {}
    return {rel: folder for folder, rels in chosen.items() for rel in rels}


def _hold_one_channel_each(source: Source, rels: Sequence[str]) -> bool:
    labels: set[str] = set()
    lengths: list[float] = []
    for rel in rels:
        try:
            header = edf_header.read_header(source.path(rel), required=())
        except UserError as error:
            raise_system_error(error)  # its unit says what is wrong
            return False
        if len(header.channels) != 1:
            return False
        labels.add(header.channels[0].label)
        lengths.append(header.records * header.duration)
    return len(labels) == len(rels) and max(lengths) - min(lengths) <= NEAR


def report_joined(groups: Mapping[str, Sequence[str]], *, is_stated: bool) -> Finding:
    """The line about files that are joined. `groups`: recording -> its files."""
    listed = [
        f"{safe_text(name)} of {list_names([PurePosixPath(rel).name for rel in rels], SHOWN)}"
        for name, rels in groups.items()
    ]
    count = sum(map(len, groups.values()))
    hint = "To keep each file apart, give --map with a map of the one line: files = [{}]"
    return input_warning(
        Reason.FILE_NAME,
        f"{count} files are {count_nouns(len(groups), 'recording')}",
        f"joined {'by the group recording' if is_stated else 'since each holds other channels'}: "
        f"{list_first(listed, SHOWN)}",
        "" if is_stated else hint,
        count=count,
    )


def describe_part(info: RecordingInfo, kind: Format) -> RecordingInfo:
    """What is known of a file of a recording: all its channels are read, the map chooses later."""
    names = info.channels if kind in {"npy", "mat"} else {}
    labels = tuple(file for file in info.label_files if file.form != "device")
    return replace(
        info, channels=names, choices=(), keep_dates=True, is_part=True, label_files=labels
    )


def list_shared_labels(beside: Iterable[Sequence[LabelFile]]) -> tuple[LabelFile, ...]:
    """The label files that are of a whole session; `beside`: those of each of its parts."""
    files = {file.rel: file for same in beside for file in same if file.form == "device"}
    return tuple(files.values())


def join_units(info: RecordingInfo, parts: Sequence[IngestUnit]) -> IngestUnit:
    """The unit of a recording in several files; without `read` where one of them is faulty."""
    labels = [file.rel for file in info.label_files]
    files = tuple(dict.fromkeys([*(chain.from_iterable(part.files for part in parts)), *labels]))
    faults = tuple(finding for part in parts if part.read is None for finding in part.findings)
    reads = tuple((part.files[0], part.read) for part in parts if part.read is not None)
    read = None if faults else partial(join_records, info, reads)
    return IngestUnit(name=info.recording_id, files=files, read=read, findings=faults)


# --- their contents


def join_records(info: RecordingInfo, reads: Sequence[tuple[str, Read]]) -> Record:
    """The recording of several files: by channel, by time, or both.

    Channels that do not begin and end together are cut where one does, so that all pieces between
    are segments. Raises UserError: start_mismatch for files that do not fit together, and those of
    the readers and of `make_record`.
    """
    parts = [PlacedPart(file, _read_part(file, read), 0.0) for file, read in reads]
    starts = list(filter(None, (part.start for part in parts)))
    start = min(starts) if len(starts) == len(parts) else None
    placed = _place_parts(parts, start)
    signals = _cut_at_edges(
        [
            signal._replace(onset=signal.onset + part.onset)
            for part in placed
            for signal in part.record.signals
        ]
    )
    findings = [finding.at(part.file) for part in placed for finding in part.record.findings]
    info = replace(info, units={}, is_part=False)
    joined = make_record(placed[0].file, info, signals, findings=findings, start=start)
    notes = {  # one file of labels may be that of several parts
        Annotation(round(note.onset + part.onset, 6), note.duration, note.label)
        for part in placed
        for note in part.record.annotations
    }
    return replace(joined, annotations=sorted([*joined.annotations, *notes]))


def _read_part(file: str, read: Read) -> Record:
    record = read()
    if isinstance(record, Records):
        raise _misfit([file], "holds a recording a row", "expected one recording a file")
    return record


def _misfit(files: Iterable[str], problem: str, wanted: str) -> UserError:
    names = list_names(list(files), SHOWN)
    hint = "Leave one out of the group `recording` of match in the map"
    return input_error(Reason.START_MISMATCH, f"{names} {problem}", wanted, hint)


def _place_parts(parts: Sequence[PlacedPart], first: datetime | None) -> list[PlacedPart]:
    """The parts in order of time, with their onsets after the `first` start; they begin together
    where one states no start.

    An onset that is within a second of the start or the end of an earlier part is that. Tables of
    other channels keep their onsets: they state fractions of seconds.
    """
    if first is None:
        _require_one_length(parts)
        return list(parts)
    onsets = {part.file: ((part.start or first) - first).total_seconds() for part in parts}
    placed: list[PlacedPart] = []
    for part in sorted(parts, key=lambda part: onsets[part.file]):
        onset = onsets[part.file]
        edges = list(chain.from_iterable(_list_edges(part, other) for other in placed))
        near = [edge for edge in edges if abs(edge - onset) <= NEAR]
        placed.append(part._replace(onset=near[0] if near else onset))
    _require_no_overlap(placed)
    return placed


def _list_edges(part: PlacedPart, other: PlacedPart) -> tuple[float, ...]:
    """The times of an earlier part at which `part` may begin."""
    is_table = SUFFIXES.get(find_suffix(part.file)) == "table"
    if is_table and part.channels.isdisjoint(other.channels):
        return ()
    return other.onset, other.end


def _require_one_length(parts: Sequence[PlacedPart]) -> None:
    """Raises UserError for files without a start time that are no channels of one recording."""
    files = [part.file for part in parts]
    counts = Counter(chain.from_iterable(part.channels for part in parts))
    again = [channel for channel, count in counts.items() if count > 1]
    if again:
        problem = f"hold {safe_text(again[0])} each, and one states no start time"
        raise _misfit(files, problem, "their order is unknown")
    lengths = [part.end for part in parts]
    if max(lengths) - min(lengths) > NEAR:
        problem = f"last {min(lengths):g} to {max(lengths):g} s, and one states no start time"
        raise _misfit(files, problem, "expected one duration")


def _require_no_overlap(placed: Sequence[PlacedPart]) -> None:
    """Raises UserError for two files with a channel at the same time, and for channels that are
    never there together.
    """
    for i, part in enumerate(placed):
        for other in placed[:i]:
            shared = part.channels & other.channels
            overlap = min(other.end, part.end) - part.onset
            if shared and overlap > 1e-6:
                problem = f"both hold {safe_text(min(shared))} over {overlap:g} s"
                raise _misfit([other.file, part.file], problem, "expected parts one after another")
    first = placed[0]
    if all(part.channels.isdisjoint(first.channels) for part in placed[1:]):
        apart = [part.file for part in placed if part.onset >= first.end]
        if apart:
            problem = "hold other channels and do not overlap in time"
            raise _misfit([first.file, *apart], problem, "expected channels of one recording")


def _cut_at_edges(signals: Sequence[Signal]) -> list[Signal]:
    """The signals, cut wherever another one begins, or ends more than a second from their ends, at
    the nearest of their samples.
    """
    begins, ends = {signal.onset for signal in signals}, set(map(_end, signals))
    cut: list[Signal] = []
    for signal in signals:
        inner = {e for e in ends if signal.onset + NEAR < e < _end(signal) - NEAR}
        inner |= {begin for begin in begins if signal.onset < begin < _end(signal)}
        first, onset = 0, signal.onset
        for edge in sorted(inner):
            stop = min(round((edge - signal.onset) * signal.rate), len(signal.samples) - 1)
            if stop > first:
                cut.append(signal._replace(samples=signal.samples[first:stop], onset=onset))
            first, onset = stop, edge
        cut.append(signal._replace(samples=signal.samples[first:], onset=onset))
    return cut


def _end(signal: Signal) -> float:
    return signal.onset + len(signal.samples) / signal.rate
