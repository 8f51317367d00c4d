"""What of a source an ingest has used, as a record and in plain words."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import PurePosixPath

from bitimely_core.errors import Reason, safe_text
from bitimely_core.schemas.ingest_records import (
    CachedRecording,
    CachedUnit,
    DroppedRows,
    FileGroup,
    FindingRecord,
    SourceUse,
    TableReport,
)
from bitimely_core.types import Annotation, Record
from bitimely_core.wording import list_first

# files about a data set, which nobody expects to be read
DOCUMENTS = re.compile(
    r"(RECORDS|SHA256SUMS|LICENSE|README|CHANGES|ANNOTATORS)[^/]*|index\.html"
    r"|dataset_description\.json",
    re.IGNORECASE,
)
# formats that do not state their rate
BARE = {".csv", ".gz", ".tsv", ".parquet", ".pq", ".npy", ".mat"}
EXAMPLES = 3  # files of a group that are named
CHANNELS = 6  # channels that are named


def measure_seconds(record: Record) -> tuple[float, float]:
    """Seconds of a recording, and those of them that annotations cover."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for signal in record.signals:
        seconds[signal.channel] += len(signal.samples) / signal.rate
    return max(seconds.values(), default=0.0), measure_cover(record.annotations)


def measure_cover(annotations: Iterable[Annotation]) -> float:
    """Seconds that any of the annotations covers."""
    covered = end = 0.0
    for note in sorted(annotations):
        stop = note.onset + note.duration
        covered += max(0.0, stop - max(note.onset, end))
        end = max(end, stop)
    return covered


def group_unread(
    files: Iterable[str], used: set[str], *, has_map: bool, is_open: bool
) -> list[FileGroup]:
    """The files that were not read, by their endings.

    Args:
        files: of the source.
        used: those that were read.
        has_map: whether a map says what is read.
        is_open: whether the data set reads all kinds of recordings.
    """
    by_kind: dict[str, list[str]] = {}
    for rel in files:
        path = PurePosixPath(rel)
        if rel not in used and not DOCUMENTS.fullmatch(path.name):
            by_kind.setdefault(path.suffix.lower(), []).append(rel)
    bare = "nothing in the map names them" if has_map else "they need --map"
    return [
        FileGroup(
            kind=ending,
            count=len(rels),
            reason=bare if is_open and ending in BARE else "",
            examples=rels[:EXAMPLES],
        )
        for ending, rels in sorted(by_kind.items(), key=lambda item: -len(item[1]))
    ]


def summarize_use(
    entries: Mapping[str, CachedUnit],
    unread: Sequence[FileGroup],
    files: int,
    tables: Sequence[TableReport],
    reasons: Iterable[FindingRecord],
    targets: Set[str],
) -> SourceUse:
    """What was used, by what is stored of the units.

    `files` is the number of files that were read; `reasons` are those of the data set; `targets`
    the attributes and channels that its views predict.
    """
    channels: Counter[str] = Counter()
    for entry in entries.values():
        channels.update(entry.channels)
    recordings = list(itertools.chain.from_iterable(entry.recordings for entry in entries.values()))
    attributes = itertools.chain.from_iterable(row.attributes for row in recordings)
    reports = [entry.report for entry in entries.values() if entry.report]
    findings = list(itertools.chain(reasons, *(report.reasons for report in reports)))
    alone = _count_unknown_subjects(recordings)
    return SourceUse(
        files_read=files,
        files_left=list(unread),
        recordings=len(recordings),
        channels=dict(channels.most_common()),
        annotated=sum(row.annotations > 0 for row in recordings),
        annotations=sum(row.annotations for row in recordings),
        seconds=round(sum(row.seconds for row in recordings), 3),
        labelled_seconds=round(sum(row.labelled for row in recordings), 3),
        labels_known=not targets.isdisjoint(itertools.chain(channels, attributes)),
        unknown_texts=_sum_counts(findings, Reason.UNKNOWN_LABEL),
        unknown_subjects=min(alone, _sum_counts(findings, Reason.IDENTIFIER, "subject")),
        rows_dropped=list(_list_dropped(tables)),
    )


def _sum_counts(findings: Iterable[FindingRecord], code: Reason, field: str = "") -> int:
    """What findings of a reason count, those on one field where it is given."""
    return sum(
        finding.count
        for finding in findings
        if finding.code == code and field in {"", finding.field}
    )


def _count_unknown_subjects(recordings: Sequence[CachedRecording]) -> int:
    """Recordings that count as subjects of their own; none where a source names each person by
    one of that person's recordings, as BIDMC does.
    """
    alone = {row.recording_id for row in recordings if row.subject_id == row.recording_id}
    shared = any(row.subject_id in alone and row.recording_id not in alone for row in recordings)
    return 0 if shared else len(alone)


def _list_dropped(tables: Iterable[TableReport]) -> Iterator[DroppedRows]:
    for table in tables:
        for code, rows in table.dropped_by_reason.items():
            yield DroppedRows(file=table.file, reason=code, count=rows)


def describe_use(use: SourceUse) -> list[str]:
    """The summary in at most eight lines; nothing about a point that leaves no question."""
    lines = [
        _describe_files(use),
        _describe_channels(use.channels, use.recordings),
        _describe_labels(use),
    ]
    if use.unknown_texts:
        lines.append(
            f"label texts not known: {use.unknown_texts:,} annotations, which are not kept"
        )
    if use.rows_dropped:
        rows = (f"{d.count:,} of {safe_text(d.file)} ({d.reason})" for d in use.rows_dropped[:4])
        lines.append(f"rows dropped: {', '.join(rows)}")
    if use.unknown_subjects and use.recordings > 1:
        lines.append(f"subjects: unknown for {use.unknown_subjects:,} of {use.recordings:,}")
    return list(filter(None, lines))


def _describe_files(use: SourceUse) -> str:
    if not use.files_left:
        return ""
    groups = []
    for group in use.files_left[:4]:
        names = ", ".join(map(safe_text, group.examples[:2]))
        rest = ", ..." if group.count > 2 else ""
        reason = f": {group.reason}" if group.reason else ""
        kind = safe_text(group.kind, 20).strip("'") or "without an ending"
        groups.append(f"{group.count:,} {kind} ({names}{rest}){reason}")
    others = sum(group.count for group in use.files_left[4:])
    groups += [f"{others:,} others"] if others else []
    return f"files: {use.files_read:,} read; not read: {'; '.join(groups)}"


def _describe_channels(channels: Mapping[str, int], recordings: int) -> str:
    """Channels that not all recordings have."""
    partial = {name: count for name, count in channels.items() if count < recordings}
    if not partial:
        return ""
    common = [safe_text(name) for name, count in channels.items() if count >= recordings]
    shared = f"{', '.join(common[:CHANNELS])} in all {recordings:,} recordings" if common else ""
    named = [f"{safe_text(name)} in {count:,}" for name, count in partial.items()]
    others = list_first(named, CHANNELS)
    return f"channels: {'; '.join(filter(None, (shared, others)))}"


def _describe_labels(use: SourceUse) -> str:
    if not use.annotated:
        return "" if use.labels_known or not use.recordings else "labels: no recording has any"
    where = f"in {use.annotated:,} of {use.recordings:,} recordings"
    if not use.labelled_seconds:
        return f"labels: {use.annotations:,} points in time, {where}"
    # a label may last over a gap, which is no part of the time
    share = min(1.0, use.labelled_seconds / use.seconds) if use.seconds else 0.0
    text = f"{share:.0%}" if share >= 0.01 else "less than 1%"
    return f"labels: {text} of the time has one, {where}"
