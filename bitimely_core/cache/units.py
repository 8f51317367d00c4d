"""One group of units, in this process or in a worker: hash, compare, read, quarantine, write.

Units are sorted by name and cut into groups, one shard each. Where a group ends depends on names
and sizes near the cut alone, so a unit that is added, removed or corrected changes its own shard
and no other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from bitimely_core import manifests, storage
from bitimely_core.cache import shards
from bitimely_core.cache.ingest_report import report_rows, report_unit
from bitimely_core.cache.quality import report_constant_stretches, report_repeated_blocks
from bitimely_core.errors import Finding, Reason, UserError, input_error, input_warning, safe_text
from bitimely_core.formats.source import Source
from bitimely_core.formats.text import use_encoding
from bitimely_core.records import StoredFile
from bitimely_core.schemas.ingest import CachedPart, CachedUnit
from bitimely_core.system_errors import find_system_error, is_out_of_memory, raise_system_error
from bitimely_core.types import IngestUnit, Record, Records

LARGE_UNIT = 8 << 20  # bytes of source from which on a unit has its own shard
MEAN_BYTES = 16 << 20  # bytes of source of a shard of small units, on average
MAX_BYTES = 64 << 20  # and at most
COPY_BYTES = 1 << 10
MEAN_UNITS = 512  # units of a shard, on average; at most four times as many
# faults that may be gone the next time
TRANSIENT_FAULTS = {Reason.IO_ERROR, Reason.READER_CRASH, Reason.RESOURCE_LIMIT, Reason.INTERNAL}


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
    changed: set[str] = set()
    stamps: dict[str, tuple[int, int]] = {}

    @functools.cache
    def is_intact(name: str | None) -> bool:
        if name is None:
            return True
        facts = task.files.get(name)
        return facts is not None and not manifests.find_damage(
            task.out, {"files": {name: facts.model_dump()}}
        )

    for unit in task.units:
        alive(unit.name)
        entry = entries[unit.name] = _hash_unit(unit, task, stamps)
        previous = task.previous.get(unit.name)
        if entry.report is None:
            if (
                previous
                and entry.key
                and entry.key == previous.key
                and all(is_intact(name) for name in previous.shard)
            ):
                entries[unit.name] = previous
            else:
                changed.add(unit.name)
    files = None if changed else _find_complete_shard(entries, task.files)
    if files is not None:
        return CachedPart(units=entries, files=files)
    kept, figures = _read_cached(
        [entry for name, entry in entries.items() if name not in changed], task.out
    )
    records: list[Record] = []
    for unit in task.units:
        if unit.name in changed:
            alive(unit.name)
            entries[unit.name], read = _read_unit(unit, task, entries[unit.name], stamps)
            records += read
        else:
            records += [kept[row[0]] for row in entries[unit.name].recordings]
    alive("")
    shard, files = shards.write_shard(task.out, records, task.dataset, figures)
    shard_of = {
        name: tuple(shard) if entry.recordings else (None, None) for name, entry in entries.items()
    }
    units = {
        name: entry.model_copy(update={"shard": shard_of[name]}) for name, entry in entries.items()
    }
    return CachedPart(units=units, files=files)


def _find_complete_shard(
    entries: dict[str, CachedUnit], files: dict[str, StoredFile]
) -> dict[str, StoredFile] | None:
    """The files of the one shard that holds exactly `entries`; None when there is no such shard."""
    pairs = {entry.shard for entry in entries.values() if entry.recordings}
    if len(pairs) > 1:
        return None
    pair = next(iter(pairs), (None, None))
    rows = [row for entry in entries.values() for row in entry.recordings]
    counts = sum(row[3] for row in rows), sum(row[4] for row in rows)
    if any(
        name is not None and files[name].rows != count
        for name, count in zip(pair, counts, strict=True)
    ):
        return None
    return {name: files[name] for name in pair if name is not None}


def _read_cached(
    entries: list[CachedUnit], out: Path
) -> tuple[dict[str, Record], dict[tuple[str, str, float], str]]:
    """recording_id -> record, of units that are in the cache; and their quality figures."""
    records: dict[str, Record] = {}
    figures: dict[tuple[str, str, float], str] = {}
    for pair in sorted({entry.shard for entry in entries if entry.recordings}):
        subjects = {
            row[0]: row[2] for entry in entries if entry.shard == pair for row in entry.recordings
        }
        records |= {
            record.recording_id: record
            for record in shards.read_shard(out, shards.CacheShard(*pair), subjects)
        }
        figures |= shards.read_figures(out, shards.CacheShard(*pair), subjects)
    return records, figures


def _hash_unit(
    unit: IngestUnit, task: IngestTask, stamps: dict[str, tuple[int, int]]
) -> CachedUnit:
    """A unit before it is read: hashes of its files, its key, and its report when it is quarantined
    already.

    Adds size and time of each file to `stamps`.
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
            faults.append(_describe_unreadable(error, path, file))
            continue
        listed = task.checksums.get(file)
        if listed is not None and listed != sources[file]:
            faults.append(describe_mismatch(file, sources[file], listed))
    if faults or unit.read is None:
        return CachedUnit(
            key=None, sources=sources, report=report_unit(unit, [*unit.findings, *faults])
        )
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


def describe_mismatch(file: str, found: str, listed: str, *, level: Any = "error") -> Finding:
    """A file differs from its line in SHA256SUMS.txt."""
    texts = (
        f"sha256 is {found[:16]}",
        f"SHA256SUMS.txt says {safe_text(listed[:16])}",
        "Download the file again",
    )
    return Finding(
        Reason.SOURCE_CHECKSUM,
        *texts,
        level=level,
        file=file,
        found=found[:16],
        expected=listed[:16],
    )


def _hash_samples(record: Record) -> str:
    """The same for recordings with the same samples, whatever their files say of them; empty where
    all channels are constant.
    """
    digest = hashlib.blake2b(digest_size=16)
    for signal in record.signals:
        digest.update(signal.samples.data)
    return (
        digest.hexdigest()
        if any((signal.samples != signal.samples[:1]).any() for signal in record.signals)
        else ""
    )


def find_copies(entries: Mapping[str, CachedUnit], sizes: Mapping[str, int]) -> Iterator[Finding]:
    """Warnings about recordings of two subjects that are equal to the sample: one of them is the
    other's.

    Between units those of less than `COPY_BYTES` may be equal by chance.
    """
    owners: dict[str, list[tuple[str, str]]] = {}
    for name, unit in sorted(entries.items()):
        file = max(unit.sources, key=lambda file: sizes.get(file, 0), default=name)
        # digest -> subject and recording that have it first
        within: dict[str, tuple[str, str]] = {}
        pairs: list[str] = []
        for (recording, subject, *_), digest in zip(unit.recordings, unit.samples, strict=False):
            if digest:
                owner, first = within.setdefault(digest, (subject, recording))
                pairs += (
                    [f"{safe_text(recording)} as {safe_text(first)}"] if owner != subject else []
                )
        for digest, (subject, _) in within.items() if sizes.get(file, 0) >= COPY_BYTES else ():
            owners.setdefault(digest, []).append((subject, file))
        if pairs:
            problem = f"recordings with the samples of another subject's: {len(pairs)}, {pairs[0]}{' and so on' * (len(pairs) > 1)}"
            # of several files none is known to hold them
            place = file if len(unit.sources) == 1 else name
            requirement, shown = "they can be in training and test", tuple(pairs[:5])
            yield input_warning(
                Reason.DUPLICATE_ACROSS_SPLITS,
                problem,
                requirement,
                "Remove the wrong ones",
                file=place,
                count=len(pairs),
                examples=shown,
            )
    for same in owners.values():
        subject, first = same[0]
        copies = list(
            dict.fromkeys(file for other, file in same if other != subject and file != first)
        )
        if copies:
            more = f" and {len(copies) - 1} more" if len(copies) > 1 else ""
            problem = f"has the same samples as {safe_text(Path(copies[0]).name)}{more}, of another subject"
            requirement = "one recording under two subjects can be in training and test"
            hint = "Remove the wrong one, or give both the same subject"
            yield input_warning(
                Reason.DUPLICATE_ACROSS_SPLITS,
                problem,
                requirement,
                hint,
                file=first,
                count=len(copies),
            )


def _describe_unreadable(error: OSError, path: Path, file: str | None) -> Finding:
    """A file of the source that cannot be read. Raises UserError (exit 6) when this machine lacks
    resources.
    """
    raise_system_error(error, path, stored=False)
    return Finding(
        Reason.IO_ERROR, f"cannot be read ({error.strerror or type(error).__name__})", file=file
    )


def _read_unit(
    unit: IngestUnit, task: IngestTask, entry: CachedUnit, stamps: dict[str, tuple[int, int]]
) -> tuple[CachedUnit, list[Record]]:
    """Read a unit: its result and its records, none when it is quarantined."""
    assert unit.read is not None
    file = unit.files[0] if unit.files else unit.name
    try:
        with use_encoding(task.encoding):
            read = unit.read()
        content = read if isinstance(read, Records) else Records(records=[read])
        records = [
            shards.validate_record(record, keep_dates=task.keep_dates) for record in content.records
        ]
        if not records and not content.rows:
            raise ValueError("a unit without records")
        digest = shards.hash_content(records)
        for name in entry.sources:
            if task.root is not None and _stat_file(task.root / name) != stamps[name]:
                raise input_error(
                    Reason.IO_ERROR,
                    "changed while it was read",
                    hint="Repeat the command",
                    file=name,
                )
    except Exception as error:
        return _quarantine_unit(unit, entry, describe_failure(error, task.root, file)), []
    findings = [
        *unit.findings,
        *content.findings,
        *(finding for record in records for finding in record.findings),
    ]
    findings = [_make_relative(finding, task.root) for finding in findings]
    tables = [report_rows(rows) for rows in content.rows]
    lost = {
        code: count
        for table in tables
        for code, count in (*table.quarantined_by_reason.items(), *table.dropped_by_reason.items())
    }
    if lost and not any(finding.level != "info" for finding in findings):
        findings += [
            input_warning(Reason(code), f"{count} rows", count=count, file=file)
            for code, count in lost.items()
        ]
    repeated = report_repeated_blocks(
        records, [] if task.root is None else [task.root / name for name in unit.files]
    )
    findings += [
        *report_constant_stretches(records),
        *(_make_relative(one, task.root) for one in repeated),
    ]
    samples, channels = (
        sum(map(_count_samples, records)),
        {signal.channel for record in records for signal in record.signals},
    )
    report = report_unit(unit, findings, content=digest, samples=samples, channels=len(channels))
    recordings = [
        (r.recording_id, r.subject_id, r.attributes, len(r.signals), len(r.annotations))
        for r in records
    ]
    return entry.model_copy(
        update={
            "report": report,
            "rows": tables,
            "recordings": recordings,
            "samples": [_hash_samples(r) for r in records],
        }
    ), records


def describe_failure(error: Exception, root: Path | None, file: str) -> list[Finding]:
    """Why a unit is quarantined, with files relative to `root`.

    Raises UserError (exit 6) where this machine lacks something. Lack of memory alone costs the
    unit, which may be too large.
    """
    fault = find_system_error(error, file, stored=False)
    if fault is not None and is_out_of_memory(fault):
        return [
            Finding(
                Reason.RESOURCE_LIMIT,
                "does not fit into memory",
                hint="Use fewer --jobs or a larger machine",
                file=file,
            )
        ]
    if fault is not None:
        raise fault from error
    if isinstance(error, UserError):
        return [_make_relative(finding, root) for finding in (error.finding, *error.details)]
    if isinstance(error, OSError):
        return [_describe_unreadable(error, Path(file), file)]
    hint = "This is a defect of the reader: report it"  # it costs its unit, not the ingest
    return [Finding(Reason.INTERNAL, _locate_exception(error), hint=hint, file=file)]


def _count_samples(record: Record) -> int:
    """Samples of the channel with the highest rate."""
    fastest = max(record.signals, key=lambda signal: (signal.rate, len(signal.samples)))
    return sum(
        len(signal.samples) for signal in record.signals if signal.channel == fastest.channel
    )


def _quarantine_unit(unit: IngestUnit, entry: CachedUnit, faults: list[Finding]) -> CachedUnit:
    transient = any(fault.code in TRANSIENT_FAULTS for fault in faults)
    report = report_unit(unit, [*unit.findings, *faults])
    return entry.model_copy(update={"key": None if transient else entry.key, "report": report})


def _make_relative(finding: Finding, root: Path | None) -> Finding:
    """The finding with its file relative to the source."""
    if finding.file is None or root is None or not Path(finding.file).is_relative_to(root):
        return finding
    return dataclasses.replace(finding, file=Path(finding.file).relative_to(root).as_posix())


def _locate_exception(error: BaseException) -> str:
    """Kind and place of an unexpected exception; never its text, which may hold values of the
    data.
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    return f"unexpected {type(error).__name__}{where}"


def describe_arguments(value: Any, root: Path | None) -> Any:
    """The arguments of a reader as JSON, with paths relative to the source: a moved folder changes
    nothing.

    Raises TypeError for what may hide a difference.
    """
    match value:
        case None | bool() | int():
            return value
        case float() | Enum() | np.generic():
            return repr(value)
        case Source():
            return "source"
        case Path() if root is not None and value.is_relative_to(root):
            return value.relative_to(root).as_posix()
        case str() | Path():
            return str(value)
        case list() | tuple():
            return [describe_arguments(item, root) for item in value]
        case set() | frozenset():
            return [
                "set",
                *sorted(
                    storage.encode_json(describe_arguments(item, root)).decode() for item in value
                ),
            ]
        case dict():
            items = (
                [str(key), storage.encode_json(describe_arguments(item, root)).decode()]
                for key, item in value.items()
            )
            return ["dict", *sorted(items)]
        case functools.partial():
            return [
                "partial",
                *(
                    describe_arguments(part, root)
                    for part in (value.func, value.args, value.keywords)
                ),
            ]
        case np.ndarray():
            return [
                "array",
                value.dtype.str,
                list(value.shape),
                hashlib.sha256(np.ascontiguousarray(value).data).hexdigest(),
            ]
        case FunctionType() if value.__closure__ is None:
            return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return [type(value).__qualname__, describe_arguments(parts, root)]
    raise TypeError(f"{type(value).__name__} cannot be compared")
