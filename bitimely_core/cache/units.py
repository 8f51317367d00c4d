"""What happens to one group of units, in this process or in a worker: hash, compare, read, quarantine, write.

Units are sorted by name and cut into groups, one shard each. Where a group ends depends on names and sizes near the cut alone, so a
unit that is added, removed or mended changes its own shard and no other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from bitimely_core import storage
from bitimely_core.cache import shards
from bitimely_core.cache.report import rows_to_json, unit_to_json
from bitimely_core.errors import Finding, Reason, UserError, input_error, safe_text
from bitimely_core.formats.source import Source
from bitimely_core.types import IngestUnit, Record, Records

LARGE_UNIT = 8 << 20  # bytes of source from which on a unit has a shard of its own
MEAN_BYTES = 16 << 20  # bytes of source of a shard of small units, on average
MAX_BYTES = 64 << 20  # and at most
MEAN_UNITS = 512  # units of a shard, on average; at most four times as many
TRANSIENT_FAULTS = {Reason.IO_ERROR, Reason.READER_CRASH, Reason.RESOURCE_LIMIT, Reason.INTERNAL}  # faults that may be gone the next time
V1_NAMES = {  # names as they are in the keys of stored units, which would else be read again
    "RecordingInfo": "Told",
    "TserFile": "File",
    "TserLayout": "Layout",
    "TsHeader": "Header",
    "bitimely_core.datasets.tser.read_problem": "bitimely_core.datasets.tser.read",
}


class IngestTask(NamedTuple):
    """One group of units and all that is needed to work on it in another process."""

    group: str  # stable name, of the names of its units
    units: tuple[IngestUnit, ...]  # sorted by name
    dataset: str
    identity: str  # hash of what decides the content besides the files: data set, options, version
    root: Path | None
    out: Path
    sizes: dict[str, int]  # the files of its units that are there
    sums: dict[str, str]  # what SHA256SUMS.txt says about them
    former: dict[str, dict[str, Any]]  # unit -> what an earlier ingest found
    files: dict[str, dict[str, Any]]  # the shards of `former`
    keep_dates: bool
    crashed: frozenset[str] = frozenset()  # units whose reader killed its process


def group_units(units: Sequence[IngestUnit], sizes: dict[str, int]) -> Iterator[list[IngestUnit]]:
    """`units`, sorted by name, in groups; a big unit, or one that is made and not read, is alone."""
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
        if chance < max(size / MEAN_BYTES, 1 / MEAN_UNITS) or total >= MAX_BYTES or len(group) >= 4 * MEAN_UNITS:
            yield group
            group, total = [], 0
    if group:
        yield group


def ingest_group(task: IngestTask, alive: Callable[[str], None]) -> dict[str, Any]:
    """Bring the units of `task` into the cache.

    Args:
        task: the group.
        alive: called with the name of a unit before it is hashed and before it is read, with "" before the shard is written; may raise.

    Returns:
        `units`: name -> entry (key, sources, report, rows, recordings, shard); `files`: shard name -> sha256, size, rows.

    Raises:
        UserError: what is wrong with our own files (exit 5, 6) or with this machine; never what is wrong with a unit.
    """
    entries: dict[str, dict[str, Any]] = {}
    fresh: set[str] = set()
    stamps: dict[str, tuple[int, int]] = {}
    damaged: dict[str, bool] = {}

    def whole(name: str | None) -> bool:
        if name is not None and name not in damaged:
            damaged[name] = name not in task.files or bool(storage.find_damage(task.out, {"files": task.files}, [name]))
        return name is None or not damaged[name]

    for unit in task.units:
        alive(unit.name)
        entry = entries[unit.name] = _hash_unit(unit, task, stamps)
        known = task.former.get(unit.name, {})
        if entry["report"] is None:
            if entry["key"] and entry["key"] == known.get("key") and all(whole(name) for name in known["shard"]):
                entries[unit.name] = known
            else:
                fresh.add(unit.name)
    files = None if fresh else _find_complete_shard(entries, task.files)
    if files is not None:
        return {"units": entries, "files": files}
    kept, figures = _read_cached([entry for name, entry in entries.items() if name not in fresh], task.out)
    records: list[Record] = []
    for unit in task.units:
        if unit.name in fresh:
            alive(unit.name)
            entries[unit.name], read = _read_unit(unit, task, entries[unit.name], stamps)
            records += read
        else:
            records += [kept[row[0]] for row in entries[unit.name]["recordings"]]
    alive("")
    names, files = shards.write_shard(task.out, records, task.dataset, figures)
    for name, entry in entries.items():
        entries[name] = entry | {"shard": list(names) if entry["recordings"] else [None, None]}
    return {"units": entries, "files": files}


def _find_complete_shard(entries: dict[str, dict[str, Any]], files: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]] | None:
    """The files of the one shard that holds exactly `entries`; None when there is no such shard."""
    names = {tuple(entry["shard"]) for entry in entries.values() if entry["recordings"]}
    if len(names) > 1:
        return None
    pair = next(iter(names), (None, None))
    held = [sum(row[i] for entry in entries.values() for row in entry["recordings"]) for i in (3, 4)]
    if any(name is not None and files[name]["rows"] != rows for name, rows in zip(pair, held, strict=True)):
        return None
    return {name: files[name] for name in pair if name is not None}


def _read_cached(entries: list[dict[str, Any]], out: Path) -> tuple[dict[str, Record], dict[tuple[str, str, float], str]]:
    """recording_id -> record, of units that are in the cache; and their quality figures."""
    found: dict[str, Record] = {}
    known: dict[tuple[str, str, float], str] = {}
    for pair in sorted({tuple(entry["shard"]) for entry in entries if entry["recordings"]}):
        here = [entry for entry in entries if tuple(entry["shard"]) == pair]
        subjects = {row[0]: row[2] for entry in here for row in entry["recordings"]}
        found |= {record.recording_id: record for record in shards.read_shard(out, shards.CacheShard(*pair), subjects)}
        known |= shards.read_figures(out, shards.CacheShard(*pair), subjects)
    return found, known


def _hash_unit(unit: IngestUnit, task: IngestTask, stamps: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """The entry of a unit before it is read: hashes of its files, the key by which it is known again, its report where it is refused.

    Adds size and time of each file to `stamps`.
    """
    sources: dict[str, str] = {}
    faults = [_describe_crash()] if unit.name in task.crashed else []
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
        listed = task.sums.get(file)
        if listed is not None and listed != sources[file]:
            faults.append(describe_mismatch(file, sources[file], listed))
    entry: dict[str, Any] = {"key": None, "sources": sources, "report": None, "rows": [], "recordings": [], "shard": [None, None]}
    if faults or unit.read is None:
        return entry | {"report": unit_to_json(unit, [*unit.findings, *faults])}
    said = [finding.as_dict() for finding in unit.findings]
    with contextlib.suppress(TypeError):  # arguments that cannot be compared: the unit is read every time
        entry["key"] = storage.fingerprint(
            [task.identity, unit.name, list(unit.files), sources, said, describe_arguments(unit.read, task.root)]
        )
    return entry


def _stat_file(path: Path) -> tuple[int, int]:
    info = path.stat()
    return info.st_size, info.st_mtime_ns


def describe_mismatch(file: str, found: str, listed: str, *, level: Any = "error") -> Finding:
    """A file differs from its line in SHA256SUMS.txt."""
    return Finding(
        code=Reason.SOURCE_CHECKSUM,
        level=level,
        problem=f"sha256 is {found[:16]}",
        requirement=f"SHA256SUMS.txt says {safe_text(listed[:16])}",
        hint="Download the file again",
        file=file,
        found=found[:16],
        expected=listed[:16],
    )


def _describe_crash() -> Finding:
    return Finding(
        code=Reason.READER_CRASH, problem="its reader killed the worker process twice", hint="Report it, with the file if you may share it"
    )


def _describe_unreadable(error: OSError, path: Path, file: str | None) -> Finding:
    """A file of the source that cannot be read. Raises UserError (exit 6) when it is this machine that lacks something."""
    if error.errno in storage.RESOURCE_ERRORS:
        raise storage.os_error(error, path) from error
    return Finding(code=Reason.IO_ERROR, problem=f"cannot be read ({error.strerror or type(error).__name__})", file=file)


def _read_unit(
    unit: IngestUnit, task: IngestTask, entry: dict[str, Any], stamps: dict[str, tuple[int, int]]
) -> tuple[dict[str, Any], list[Record]]:
    """Read a unit: its finished entry and its records, none when it is quarantined."""
    assert unit.read is not None
    file = unit.files[0] if unit.files else unit.name
    try:
        content = unit.read()
        held = content if isinstance(content, Records) else Records(records=[content])
        records = [shards.validate_record(record, keep_dates=task.keep_dates) for record in held.records]
        if not records and not held.rows:
            raise ValueError("a unit without records")
        digest = shards.hash_content(records)
        for name in entry["sources"]:
            if task.root is not None and _stat_file(task.root / name) != stamps[name]:
                raise input_error(Reason.IO_ERROR, "changed while it was read", hint="Repeat the command", file=name)
    except UserError as error:
        return _quarantine_unit(unit, entry, [_make_relative(finding, task.root) for finding in (error.finding, *error.details)]), []
    except MemoryError:
        fault = Finding(
            code=Reason.RESOURCE_LIMIT, problem="does not fit into memory", hint="Use fewer --jobs or a larger machine", file=file
        )
        return _quarantine_unit(unit, entry, [fault]), []
    except OSError as error:
        return _quarantine_unit(unit, entry, [_describe_unreadable(error, Path(file), file)]), []
    except Exception as error:  # a defect of a reader costs its unit, never the whole
        fault = Finding(code=Reason.INTERNAL, problem=_locate_exception(error), hint="This is a defect of the reader: report it", file=file)
        return _quarantine_unit(unit, entry, [fault]), []
    findings = [*unit.findings, *held.findings, *(finding for record in held.records for finding in record.findings)]
    findings = [_make_relative(finding, task.root) for finding in findings]
    tables = [rows_to_json(rows) for rows in held.rows]
    lost = {
        code: count for table in tables for kind in ("quarantined_by_reason", "dropped_by_reason") for code, count in table[kind].items()
    }
    if lost and not any(finding.level != "info" for finding in findings):
        findings += [
            Finding(code=Reason(code), level="warning", problem=f"{count} rows", count=count, file=file) for code, count in lost.items()
        ]
    report = unit_to_json(
        unit,
        findings,
        content=digest,
        samples=sum(_count_samples(record) for record in records),
        channels=len({signal.channel for record in records for signal in record.signals}),
    )
    recordings = [[r.recording_id, r.subject_id, r.attributes, len(r.signals), len(r.annotations)] for r in records]
    return entry | {"report": report, "rows": tables, "recordings": recordings}, records


def _count_samples(record: Record) -> int:
    """Samples of the channel with the highest rate."""
    fastest = max(record.signals, key=lambda signal: (signal.rate, len(signal.samples)))
    return sum(len(signal.samples) for signal in record.signals if signal.channel == fastest.channel)


def _quarantine_unit(unit: IngestUnit, entry: dict[str, Any], faults: list[Finding]) -> dict[str, Any]:
    passing = any(fault.code in TRANSIENT_FAULTS for fault in faults)
    return entry | {"key": None if passing else entry["key"], "report": unit_to_json(unit, [*unit.findings, *faults])}


def _make_relative(finding: Finding, root: Path | None) -> Finding:
    """The finding with its file relative to the source."""
    if finding.file is None or root is None or not Path(finding.file).is_relative_to(root):
        return finding
    return dataclasses.replace(finding, file=Path(finding.file).relative_to(root).as_posix())


def _locate_exception(error: BaseException) -> str:
    """Kind and place of an unexpected exception; never its text, which may hold values of the data."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    return f"unexpected {type(error).__name__}{where}"


def describe_arguments(value: Any, root: Path | None) -> Any:
    """The arguments of a reader as JSON, with paths relative to the source: a change of them is seen, a moved folder is not.

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
            return ["set", *sorted(storage.encode_json(describe_arguments(item, root)).decode() for item in value)]
        case dict():
            return [
                "dict",
                *sorted([str(key), storage.encode_json(describe_arguments(item, root)).decode()] for key, item in value.items()),
            ]
        case functools.partial():
            return [
                "partial",
                describe_arguments(value.func, root),
                describe_arguments(value.args, root),
                describe_arguments(value.keywords, root),
            ]
        case np.ndarray():
            return ["array", value.dtype.str, list(value.shape), hashlib.sha256(np.ascontiguousarray(value).data).hexdigest()]
        case FunctionType() if value.__closure__ is None:
            name = f"{value.__module__}.{value.__qualname__}"
            return V1_NAMES.get(name, name)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = type(value).__qualname__
        return [V1_NAMES.get(name, name), describe_arguments({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, root)]
    raise TypeError(f"{type(value).__name__} cannot be compared")
