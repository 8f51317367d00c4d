"""Ingests one group of units: hash, compare, read, quarantine, write.

Units are sorted by name and cut into groups, one shard each. Where a group ends depends on names
and sizes near the cut alone, so a unit that is added, removed or corrected changes its own shard
and no other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from bitimely_core.cache import shards
from bitimely_core.cache.ingest_report import report_rows, report_unit
from bitimely_core.cache.quality import report_constant_stretches, report_repeated_blocks
from bitimely_core.cache.source_use import measure_seconds
from bitimely_core.errors import (
    Finding,
    Level,
    Reason,
    UserError,
    input_error,
    input_warning,
    safe_text,
)
from bitimely_core.formats.source import Source
from bitimely_core.formats.text import use_encoding
from bitimely_core.schemas.ingest_records import (
    CachedPart,
    CachedRecording,
    CachedUnit,
    CacheShard,
    TableReport,
)
from bitimely_core.store import manifests, storage
from bitimely_core.store.records import StoredFile
from bitimely_core.system_errors import find_system_error, is_out_of_memory, raise_system_error
from bitimely_core.types import IngestUnit, Record, Records

LARGE_UNIT = 8 << 20  # bytes of source from which on a unit has its own shard
MEAN_BYTES = 16 << 20  # bytes of source of a shard of small units, on average
MAX_BYTES = 64 << 20  # and at most
COPY_BYTES = 1 << 10
MEAN_UNITS = 512  # units of a shard, on average; at most four times as many
# faults that may be gone the next time
TRANSIENT_FAULTS = {Reason.IO_ERROR, Reason.READER_CRASH, Reason.RESOURCE_LIMIT, Reason.INTERNAL}


Stamps = dict[str, tuple[int, int]]
"""File -> its size in bytes and time of change in nanoseconds, when it was hashed."""


class IngestTask(NamedTuple):
    """One group of units and all that another process needs to ingest it."""

    group: str  # stable name, from the names of its units
    units: tuple[IngestUnit, ...]  # sorted by name
    dataset: str
    identity: str  # hash of what decides the content besides the files: data set, options, version
    root: Path | None
    out: Path
    sizes: dict[str, int]  # bytes of the files of its units
    checksums: dict[str, str]  # of these files, from SHA256SUMS.txt
    previous: dict[str, CachedUnit]  # results of an earlier ingest
    files: dict[str, StoredFile]  # the shards of `previous`
    keep_dates: bool
    encoding: str | None = None  # of text tables
    crashed: frozenset[str] = frozenset()  # units whose reader killed its process


def group_units(units: Sequence[IngestUnit], sizes: dict[str, int]) -> Iterator[list[IngestUnit]]:
    """`units`, sorted by name, in groups; a large unit, or one without files, is alone."""
    group: list[IngestUnit] = []
    total = 0
    for unit in units:
        size = sum(sizes.get(file, 0) for file in unit.files)
        if size >= LARGE_UNIT or not unit.files:
            if group:
                yield group
            yield [unit]
            group, total = [], 0
            continue
        group.append(unit)
        total += size
        chance = int.from_bytes(hashlib.sha256(unit.name.encode()).digest()[:8], "big") / 2**64
        if (
            chance < max(size / MEAN_BYTES, 1 / MEAN_UNITS)
            or total >= MAX_BYTES
            or len(group) >= 4 * MEAN_UNITS
        ):
            yield group
            group, total = [], 0
    if group:
        yield group


def ingest_group(task: IngestTask, alive: Callable[[str], None]) -> CachedPart:
    """Bring the units of `task` into the cache.

    `alive` is called with the name of a unit before it is hashed and before it is read, with ""
    before the shard is written; it may raise. Raises UserError: faults of our own files (exit 5, 6)
    or of this machine; never those of a unit.
    """
    entries: dict[str, CachedUnit] = {}
    stamps: Stamps = {}
    for unit in task.units:
        alive(unit.name)
        entries[unit.name] = _hash_unit(unit, task, stamps)
    entries |= _find_unchanged(entries, task)
    changed = {name for name, entry in entries.items() if entry.report is None}
    files = None if changed else _find_complete_shard(entries, task.files)
    if files is not None:
        return CachedPart(units=entries, files=files)
    cached, figures = _read_cached(entries.values(), task.out)
    records: list[Record] = []
    for unit in task.units:
        if unit.name in changed:
            alive(unit.name)
            entries[unit.name], read = _read_unit(unit, task, entries[unit.name], stamps)
            records += read
        else:
            records += [cached[row.recording_id] for row in entries[unit.name].recordings]
    alive("")
    shard, files = shards.write_shard(task.out, records, task.dataset, figures)
    units = {
        name: entry.model_copy(update={"shard": shard if entry.recordings else CacheShard()})
        for name, entry in entries.items()
    }
    return CachedPart(units=units, files=files)


def _find_unchanged(entries: dict[str, CachedUnit], task: IngestTask) -> dict[str, CachedUnit]:
    """The results of an earlier ingest that still hold: same key, and shards that are intact."""
    unchanged = {
        name: previous
        for name, previous in task.previous.items()
        if previous.key and previous.key == entries[name].key
    }
    used = set(itertools.chain.from_iterable(entry.shard for entry in unchanged.values()))
    intact: set[str | None] = {None}
    for name, facts in task.files.items():
        stored = {"files": {name: facts.model_dump()}}
        if name in used and not manifests.find_damage(task.out, stored):
            intact.add(name)
    return {name: entry for name, entry in unchanged.items() if intact.issuperset(entry.shard)}


def _find_complete_shard(
    entries: dict[str, CachedUnit], files: dict[str, StoredFile]
) -> dict[str, StoredFile] | None:
    """The files of the one shard that holds exactly `entries`; None when there is no such shard."""
    pairs = {entry.shard for entry in entries.values() if entry.recordings}
    if len(pairs) > 1:
        return None
    names = list(filter(None, next(iter(pairs), ())))
    signals = sum(row.signals for entry in entries.values() for row in entry.recordings)
    if names and files[names[0]].rows != signals:  # other recordings are in it too
        return None
    return {name: files[name] for name in names}


def _read_cached(
    entries: Iterable[CachedUnit], folder: Path
) -> tuple[dict[str, Record], shards.FigureTexts]:
    """recording_id -> record, of units that are in the cache; and their quality figures."""
    records: dict[str, Record] = {}
    figures: shards.FigureTexts = {}
    attributes: dict[CacheShard, dict[str, Any]] = {}  # by shard and recording
    for entry in entries:
        for row in entry.recordings:
            attributes.setdefault(entry.shard, {})[row.recording_id] = row.attributes
    for shard, subjects in attributes.items():
        for record in shards.read_shard(folder, shard, subjects):
            records[record.recording_id] = record
        figures |= shards.read_figures(folder, shard, subjects)
    return records, figures


def _hash_unit(unit: IngestUnit, task: IngestTask, stamps: Stamps) -> CachedUnit:
    """A unit before it is read: hashes of its files and its key.

    A unit that is quarantined already has its report too. Adds size and time of each file to
    `stamps`.
    """
    sources: dict[str, str] = {}
    hint = "Report it, with the file if you may share it"
    crash = Finding(Reason.READER_CRASH, "its reader killed the worker process twice", hint=hint)
    faults = [crash] if unit.name in task.crashed else []
    for file in unit.files:
        if file not in task.sizes or task.root is None:
            continue
        path = task.root / file
        try:
            stamps[file] = _stat_file(path)
            sources[file] = storage.hash_file(path)
        except OSError as error:
            faults.append(describe_unreadable(error, path, file))
            continue
        listed = task.checksums.get(file)
        if listed is not None and listed != sources[file]:
            faults.append(describe_mismatch(file, sources[file], listed))
    if faults or unit.read is None:
        report = report_unit(unit, [*unit.findings, *faults])
        return CachedUnit(key=None, sources=sources, report=report)
    key = None
    # arguments that cannot be compared: the unit is read every time
    with contextlib.suppress(TypeError):
        findings = [finding.as_dict() for finding in unit.findings]
        arguments = describe_arguments(unit.read, task.root)
        key = storage.fingerprint(
            [task.identity, unit.name, list(unit.files), sources, findings, arguments]
        )
    return CachedUnit(key=key, sources=sources, report=None)


def _stat_file(path: Path) -> tuple[int, int]:
    info = path.stat()
    return info.st_size, info.st_mtime_ns


def describe_mismatch(file: str, digest: str, listed: str, *, level: Level = "error") -> Finding:
    """A file differs from its line in SHA256SUMS.txt."""
    return Finding(
        Reason.SOURCE_CHECKSUM,
        f"sha256 is {digest[:16]}",
        f"SHA256SUMS.txt says {safe_text(listed[:16])}",
        "Download the file again",
        level=level,
        file=file,
        found=digest[:16],
        expected=listed[:16],
    )


def _hash_samples(record: Record) -> str:
    """The same for recordings with the same samples, whatever their files say of them.

    Empty where all channels are constant.
    """
    if not any((signal.samples != signal.samples[:1]).any() for signal in record.signals):
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for signal in record.signals:
        digest.update(signal.samples.data)
    return digest.hexdigest()


def find_copies(entries: Mapping[str, CachedUnit], sizes: Mapping[str, int]) -> Iterator[Finding]:
    """Warnings about recordings of two subjects that are equal to the sample.

    One of them is the other's. Units of less than `COPY_BYTES` may be equal by chance.
    """
    holders: dict[str, list[tuple[str, str]]] = {}  # hash of samples -> subjects and files
    for name, entry in sorted(entries.items()):
        file = max(entry.sources, key=lambda file: sizes.get(file, 0), default=name)
        first, copies = _find_copies_within(entry)
        if sizes.get(file, 0) >= COPY_BYTES:
            for digest, subject in first.items():
                holders.setdefault(digest, []).append((subject, file))
        if copies:
            others = " and so on" if len(copies) > 1 else ""
            yield input_warning(
                Reason.DUPLICATE_ACROSS_SPLITS,
                "recordings with the samples of another subject's: "
                f"{len(copies)}, {copies[0]}{others}",
                "they can be in training and test",
                "Remove the wrong ones",
                # any of several files may hold them
                file=file if len(entry.sources) == 1 else name,
                count=len(copies),
                examples=tuple(copies[:5]),
            )
    for subjects in holders.values():
        yield from _warn_of_copies(*subjects)


def _find_copies_within(entry: CachedUnit) -> tuple[dict[str, str], list[str]]:
    """Hash of samples -> the subject that has them first; and the copies that others have."""
    first: dict[str, CachedRecording] = {}
    copies = []
    for row, digest in zip(entry.recordings, entry.samples, strict=True):
        if digest:
            original = first.setdefault(digest, row)
            if original.subject_id != row.subject_id:
                copies.append(
                    f"{safe_text(row.recording_id)} as {safe_text(original.recording_id)}"
                )
    return {digest: row.subject_id for digest, row in first.items()}, copies


def _warn_of_copies(first: tuple[str, str], *others: tuple[str, str]) -> Iterator[Finding]:
    """A warning where units of other subjects have the same samples; (subject, file) of each."""
    subject, file = first
    copied = list(dict.fromkeys(name for who, name in others if who != subject and name != file))
    if copied:
        rest = f" and {len(copied) - 1} more" if len(copied) > 1 else ""
        yield input_warning(
            Reason.DUPLICATE_ACROSS_SPLITS,
            f"has the same samples as {safe_text(Path(copied[0]).name)}{rest}, of another subject",
            "one recording under two subjects can be in training and test",
            "Remove the wrong one, or give both the same subject",
            file=file,
            count=len(copied),
        )


def describe_unreadable(
    error: OSError, path: Path, file: str, *, level: Level = "error"
) -> Finding:
    """A file of the source that cannot be read.

    Raises UserError (exit 6) when this machine lacks resources.
    """
    raise_system_error(error, path, stored=False)
    problem = f"cannot be read ({error.strerror or type(error).__name__})"
    return Finding(Reason.IO_ERROR, problem, level=level, file=file)


def _read_unit(
    unit: IngestUnit, task: IngestTask, entry: CachedUnit, stamps: Stamps
) -> tuple[CachedUnit, list[Record]]:
    """Read a unit: its result and its records, none when it is quarantined."""
    file = next(iter(unit.files), unit.name)
    try:
        content = _read_content(unit, task)
        digest = shards.hash_content(content.records)
        _check_stamps(entry.sources, task.root, stamps)
    except Exception as error:
        return _quarantine_unit(unit, entry, describe_failure(error, task.root, file)), []
    records = content.records
    tables = list(map(report_rows, content.rows))
    of_records = list(itertools.chain.from_iterable(record.findings for record in records))
    findings = _make_relative([*unit.findings, *content.findings, *of_records], task.root)
    if all(finding.level == "info" for finding in findings):
        findings += _warn_of_lost_rows(tables, file)
    paths = [] if task.root is None else [task.root / name for name in unit.files]
    repeated = _make_relative(report_repeated_blocks(records, paths), task.root)
    findings += report_constant_stretches(records) + repeated
    return entry.model_copy(
        update={
            "report": report_unit(unit, findings, content=digest, records=records),
            "rows": tables,
            "recordings": list(map(_describe_recording, records)),
            "channels": _count_channels(records),
            "samples": list(map(_hash_samples, records)),
        }
    ), records


def _read_content(unit: IngestUnit, task: IngestTask) -> Records:
    """What the reader of a unit returns, its records validated. Raises whatever the reader does."""
    assert unit.read is not None
    with use_encoding(task.encoding):
        read = unit.read()
    content = read if isinstance(read, Records) else Records(records=[read])
    if not content.records and not content.rows:
        raise ValueError("a unit without records")
    records = [
        shards.validate_record(record, keep_dates=task.keep_dates) for record in content.records
    ]
    return dataclasses.replace(content, records=records)


def _check_stamps(files: Iterable[str], root: Path | None, stamps: Stamps) -> None:
    """Raises UserError (io_error) for a file with another size or time than in `stamps`."""
    for name in files:
        if root is not None and _stat_file(root / name) != stamps[name]:
            raise input_error(
                Reason.IO_ERROR, "changed while it was read", hint="Repeat the command", file=name
            )


def _warn_of_lost_rows(tables: list[TableReport], file: str) -> list[Finding]:
    """A warning for each reason of rows that are not used."""
    lost: dict[str, int] = {}
    for table in tables:
        lost |= table.quarantined_by_reason | table.dropped_by_reason
    return [
        input_warning(Reason(code), f"{count} rows", count=count, file=file)
        for code, count in lost.items()
    ]


def _describe_recording(record: Record) -> CachedRecording:
    return CachedRecording(
        record.recording_id,
        record.subject_id,
        dict(record.attributes),
        len(record.signals),
        len(record.annotations),
        *measure_seconds(record),
    )


def _count_channels(records: Sequence[Record]) -> dict[str, int]:
    """Channel -> recordings that have it."""
    names = (dict.fromkeys(signal.channel for signal in record.signals) for record in records)
    return dict(Counter(itertools.chain.from_iterable(names)))


def describe_failure(error: Exception, root: Path | None, file: str) -> list[Finding]:
    """Why a unit is quarantined, with files relative to `root`.

    Raises UserError (exit 6) where this machine lacks something. Lack of memory alone costs the
    unit, which may be too large.
    """
    fault = find_system_error(error, file, stored=False)
    if fault is not None and is_out_of_memory(fault):
        problem, hint = "does not fit into memory", "Use fewer --jobs or a larger machine"
        return [Finding(Reason.RESOURCE_LIMIT, problem, hint=hint, file=file)]
    if fault is not None:
        raise fault from error
    if isinstance(error, UserError):
        return _make_relative([error.finding, *error.details], root)
    if isinstance(error, OSError):
        return [describe_unreadable(error, Path(file), file)]
    hint = "This is a defect of the reader: report it"  # it costs its unit, not the ingest
    return [Finding(Reason.INTERNAL, _locate_exception(error), hint=hint, file=file)]


def _quarantine_unit(unit: IngestUnit, entry: CachedUnit, faults: list[Finding]) -> CachedUnit:
    transient = any(fault.code in TRANSIENT_FAULTS for fault in faults)
    report = report_unit(unit, [*unit.findings, *faults])
    return entry.model_copy(update={"key": None if transient else entry.key, "report": report})


def _make_relative(findings: Iterable[Finding], root: Path | None) -> list[Finding]:
    """The findings with their files relative to the source."""
    relative = []
    for finding in findings:
        path = Path(finding.file or "")
        if root is not None and path.is_relative_to(root):
            finding = dataclasses.replace(finding, file=path.relative_to(root).as_posix())
        relative.append(finding)
    return relative


def _locate_exception(error: BaseException) -> str:
    """Kind and place of an unexpected exception, without its text, which may hold data."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    return f"unexpected {type(error).__name__}{where}"


def describe_arguments(value: Any, root: Path | None) -> Any:
    """The arguments of a reader as JSON.

    Paths are relative to the source, so that a moved folder changes nothing. Raises TypeError for
    what may hide a difference.
    """
    match value:
        case None | bool() | int():
            return value
        case float() | Enum() | np.generic():
            return repr(value)
        case Source():
            return "source"
        case str():
            return str(value)
        case np.ndarray():
            digest = hashlib.sha256(np.ascontiguousarray(value).data).hexdigest()
            return ["array", value.dtype.str, list(value.shape), digest]
        case FunctionType() if value.__closure__ is None:
            return f"{value.__module__}.{value.__qualname__}"
        case Path():
            return _shorten_path(value, root)
    return _describe_nested(value, root)


def _describe_nested(value: Any, root: Path | None) -> Any:
    """An argument that holds others. Raises TypeError for what may hide a difference."""
    match value:
        case list() | tuple():
            return [describe_arguments(item, root) for item in value]
        case set() | frozenset():
            return ["set", *sorted(_encode_argument(item, root) for item in value)]
        case dict():
            items = ([str(key), _encode_argument(item, root)] for key, item in value.items())
            return ["dict", *sorted(items)]
        case functools.partial():
            parts = [value.func, value.args, value.keywords]
            return ["partial", *describe_arguments(parts, root)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return [type(value).__qualname__, describe_arguments(fields, root)]
    raise TypeError(f"{type(value).__name__} cannot be compared")


def _shorten_path(path: Path, root: Path | None) -> str:
    if root is not None and path.is_relative_to(root):
        return path.relative_to(root).as_posix()
    return str(path)


def _encode_argument(value: Any, root: Path | None) -> str:
    return storage.encode_json(describe_arguments(value, root)).decode()
