"""`ingest`: raw files to the cache of one data set. Bad units are left out and named, good ones survive, a second run redoes what has changed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bitimely_core import __version__, registry, store
from bitimely_core.batch import Progress, Rows, Unit
from bitimely_core.cache import accounting, shards
from bitimely_core.cache.units import Task, grouped, mismatch, work
from bitimely_core.cache.workers import Stop, run, stopping
from bitimely_core.errors import Exit, Finding, Reason, UserError, safe_text
from bitimely_core.formats.source import Source, scan

SCHEMA = "bitimely.cache/1"
REPORT = "ingest_report.json"
PROGRESS = ".progress"
SUMS = "SHA256SUMS.txt"
SIZE = 0.75  # bytes of cache a byte of source: an estimate
SPEED = 60e6  # bytes of source a second and core: an estimate
PART_WAIT = 60.0  # seconds that the last part of a sharded ingest waits for the others to let go


@dataclass
class _Attempt:
    """One run of `ingest`: what was asked for, and what has been found so far."""

    entry: registry.Entry[registry.DatasetFacts]
    source: Source | None
    given: str | None  # the source as given
    out: Path
    options: dict[str, Any]  # of the data set, resolved
    keep_dates: bool
    run_options: dict[str, Any]  # of this run, they leave the content as it is
    jobs: int
    progress: Progress | None
    stop: Stop
    reasons: list[Finding] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    sums: dict[str, str] | None = None
    summed: str = "absent"
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """What a cache must have been made with to be continued."""
        return {"dataset": self.entry.name, "version": __version__, "options": self.options}

    @property
    def sizes(self) -> dict[str, int]:
        return {} if self.source is None else self.source.files


def ingest(
    dataset: str,
    source: str | Path | None,
    out: str | Path,
    *,
    options: dict[str, Any] | None = None,
    jobs: int = 1,
    strict: bool = False,
    max_bad: float = 0.5,
    shard: tuple[int, int] | None = None,
    follow_symlinks: bool = False,
    keep_phi: bool = False,
    keep_dates: bool = False,
    verify: bool = True,
    force_new: bool = False,
    wait: float = 0.0,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Read a data set into its cache.

    Args:
        dataset: registered name.
        source: raw folder; None for data sets that are made.
        out: folder of this data set's cache; made if missing.
        options: the data set's own.
        jobs: worker processes; 1 reads in this process. The result does not depend on it.
        strict: refuse when anything is quarantined.
        max_bad: refuse when a larger share of the units, or of the rows of one table, is quarantined.
        shard: (k, n): do part k of n of the units (k from 1); the process that finds all parts done publishes.
        follow_symlinks: follow links that leave the source.
        keep_phi: keep identifying header fields, where the reader knows them.
        keep_dates: keep start times of recordings.
        verify: compare the source with its SHA256SUMS.txt.
        force_new: read everything again, whatever is there.
        wait: seconds to wait for another process that works on this cache.
        progress: called with what is being done, units done and units in all.
        dry_run: say what would be read, and write nothing.

    Returns:
        The ingest report (schema `bitimely.ingest_report/1`) of status published or partial, `findings` of it are the lines for the screen.
        A part that is not the last: `{"schema": "bitimely.ingest_part/1", ...}`; a dry run: `{"schema": "bitimely.ingest_plan/1", ...}`.

    Raises:
        UserError: usage and settings that differ from those of the cache (exit 2), refused (4), a damaged manifest (5), disk and memory (6),
            locked (7), interrupted (130, 143). Where the source could be read, `report` is what was written to `ingest_report.json` and
            `details` are its findings.
    """
    entry, resolved = _resolved(dataset, options or {}, {"keep_phi": keep_phi, "keep_dates": keep_dates})
    _check_arguments(entry, source, jobs, max_bad, shard)
    folder = Path(out)
    found = None if source is None else _outside(scan(Path(source), follow_symlinks=follow_symlinks), folder)
    with stopping() as stop:
        attempt = _Attempt(
            entry=entry,
            source=found,
            given=None if source is None else str(source),
            out=folder,
            options=resolved,
            keep_dates=keep_dates,
            run_options={"strict": strict, "max_bad": max_bad, "follow_symlinks": follow_symlinks, "verify": verify},
            jobs=jobs,
            progress=progress,
            stop=stop,
        )
        if dry_run:
            return _planned(attempt)
        if shard is not None and shard[1] > 1:
            with store.lock(folder, wait, shared=True), _reported(attempt, write=False):
                part = _part(attempt, shard, force_new)
            if part["parts_missing"]:
                return part
            try:  # what this process knows is thrown away: files may have changed since, and hashing them again is cheap
                with store.lock(folder, max(wait, PART_WAIT)):
                    fresh = replace(attempt, reasons=[], rows=[], units=[], sums=None, summed="absent", entries={}, hashes={})
                    return _whole(fresh, force_new=False)
            except UserError as error:
                if error.code == Reason.LOCKED:  # whoever holds it will find all parts done
                    return part
                raise
        with store.lock(folder, wait):
            return _whole(attempt, force_new=force_new)


# ---- what was asked for


def _resolved(dataset: str, given: dict[str, Any], kept: dict[str, bool]) -> tuple[registry.Entry[registry.DatasetFacts], dict[str, Any]]:
    """The data set and its options with defaults filled in. Raises UserError (exit 2) for unknown names."""
    registry.members("bitimely_core.datasets")
    entry = registry.datasets[dataset]
    known = entry.facts.options or {}
    for name in given:
        if name not in known:
            raise registry.unknown(f"option of {entry.name}", name, list(known))
    return entry, {**known, **given, **kept}


def _check_arguments(
    entry: registry.Entry[registry.DatasetFacts], source: str | Path | None, jobs: int, max_bad: float, shard: tuple[int, int] | None
) -> None:
    said = None
    if entry.facts.needs_source and source is None:
        said = (f"no source for {entry.name}", "expected a folder in the official layout")
    elif not entry.facts.needs_source and source is not None:
        said = (f"{entry.name} takes no source", "it is made, not read")
    elif jobs < 1:
        said = (f"jobs is {jobs}", "expected at least 1")
    elif not 0 <= max_bad <= 1:
        said = (f"max_bad is {max_bad}", "expected a share from 0 to 1")
    elif shard is not None and not 1 <= shard[0] <= shard[1]:
        said = (f"shard is {shard[0]}/{shard[1]}", "expected k/n with k from 1 to n")
    if said:
        raise UserError(Reason.CONFIG, said[0], wanted=said[1], exit_code=Exit.USAGE)


def _outside(source: Source, out: Path) -> Source:
    """The source without the cache, should that lie inside of it."""
    root, inner = source.root.resolve(), out.resolve()
    if not inner.is_relative_to(root):
        return source
    prefix = inner.relative_to(root).as_posix() + "/"
    keep = {name: size for name, size in source.files.items() if not name.startswith(prefix)}
    return Source(source.root, keep, {name: fault for name, fault in source.odd.items() if not name.startswith(prefix)})


def _listed(attempt: _Attempt) -> None:
    """Run the data set's function: its units, and what it says about the whole. Raises UserError when it refuses the data set."""
    for item in attempt.entry.function(attempt.source, dict(attempt.options)):
        if isinstance(item, Unit):
            attempt.units.append(item)
        elif isinstance(item, Rows):
            attempt.rows.append(accounting.rows_object(item))
        else:
            attempt.reasons.append(item)
    attempt.units.sort(key=lambda unit: unit.name)
    for unit, following in zip(attempt.units, attempt.units[1:], strict=False):
        if unit.name == following.name:
            raise UserError(
                Reason.DUPLICATE_KEY, f"the unit {safe_text(unit.name)} is there twice", wanted="expected one", file=following.files[0]
            )
    if attempt.source is not None:
        claimed = {file for unit in attempt.units for file in unit.files} | {reason.file for reason in attempt.reasons}
        attempt.reasons += [replace(fault, level="warning") for name, fault in attempt.source.odd.items() if name not in claimed]


def _planned(attempt: _Attempt) -> dict[str, Any]:
    """What an ingest would read."""
    _listed(attempt)
    sizes = attempt.sizes
    units = [
        {
            "unit": unit.name,
            "files": list(unit.files),
            "bytes": sum(sizes.get(file, 0) for file in unit.files),
            "readable": unit.read is not None,
        }
        for unit in attempt.units
    ]
    total = sum(unit["bytes"] for unit in units)
    return {
        "schema": "bitimely.ingest_plan/1",
        "format_version": 1,
        "dataset": attempt.entry.name,
        "source": {"path": attempt.given, "files": len(sizes), "bytes": sum(sizes.values())},
        "out": str(attempt.out),
        "units": units,
        "bytes": total,
        "options": attempt.options | attempt.run_options,
        "estimate": {"cache_bytes": int(total * SIZE), "seconds": round(total / SPEED / attempt.jobs, 1)},
    }


# ---- the commit


def _whole(attempt: _Attempt, *, force_new: bool) -> dict[str, Any]:
    """All units, under the lock: read what has changed, publish, report."""
    out = attempt.out
    store.sweep(out)
    former, before = _former(attempt, force_new)
    progress = _begin(attempt, force_new)
    store.sweep(progress)
    with _reported(attempt):
        _listed(attempt)
        _read_sums(attempt)
        tasks = _tasks(attempt, before | _finished(progress))
        results = _run(attempt, tasks)
        refused = accounting.refusal(_report(attempt), strict=attempt.run_options["strict"], max_bad=attempt.run_options["max_bad"])
        if refused is not None:
            refused.file = refused.file or attempt.given
            raise refused
        manifest = _publish(attempt, former, [results[task.group] for task in tasks])
    report = _verdict(attempt, manifest)
    with _reported(attempt):
        _tidy(out, manifest, report)
    return report


def _former(attempt: _Attempt, force_new: bool) -> tuple[dict[str, Any] | None, dict[str, dict[str, Any]]]:
    """The published manifest and, unless everything is to be read again, the shards and units of it.

    Raises UserError: settings_differ (exit 2), integrity (exit 5).
    """
    path = attempt.out / store.MANIFEST
    if not path.exists():
        return None, {}
    try:
        former = store.manifest(attempt.out)
    except UserError as error:
        if not force_new:
            error.action = "Restore a copy, or give --force-new to read everything again"
            raise
        store.os_unlink(path)
        return None, {}
    if force_new:
        return former, {}
    _compare(former["settings"], attempt.settings, path)
    name = former["units"]
    if store.damage(attempt.out, former, [name]):
        return former, {}
    return former, {name: {"files": former["files"], **json.loads((attempt.out / name).read_bytes())}}


def _compare(old: dict[str, Any], new: dict[str, Any], path: Path) -> None:
    """Raises UserError (settings_differ, exit 2) with one finding a key that differs."""
    before, now = ({**settings, **settings["options"], "options": None} for settings in (old, new))
    found = [
        Finding(
            code=Reason.SETTINGS_DIFFER,
            text=f"was made with {safe_text(before.get(key))}",
            wanted=f"now it is {safe_text(now.get(key))}",
            action="Give the same options, another folder, or --force-new to read everything again",
            file=str(path),
            field=key,
        )
        for key in sorted(set(before) | set(now))
        if before.get(key) != now.get(key)
    ]
    if found:
        first, *others = found
        raise UserError(
            first.code, first.text, first.wanted, first.action, file=first.file, field=first.field, exit_code=Exit.USAGE, details=others
        )  # fmt: skip


def _begin(attempt: _Attempt, force_new: bool) -> Path:
    """The folder of finished parts, emptied when everything is to be read again, unless an ingest for that reason is under way.

    Raises UserError (settings_differ, exit 2).
    """
    folder = store.make_folder(attempt.out / PROGRESS)
    path = folder / "settings.json"
    with store.lock(folder, PART_WAIT):
        found = _json(path)
        new = {"settings": attempt.settings, "force_new": force_new}
        if found is not None and force_new and found != new:
            _clear(folder)
        elif found is not None and not force_new:
            _compare(found["settings"], attempt.settings, path)
            return folder
        if found != new:
            store.write_json(path, new)
    return folder


def _json(path: Path) -> Any:
    with suppress(OSError, ValueError):
        return json.loads(path.read_bytes())
    return None


def _clear(folder: Path) -> None:
    """Remove the parts; the settings last, so that a kill in between leaves parts that still say what they were made with."""
    for path in sorted(folder.glob("*.json"), key=lambda path: path.name == "settings.json"):
        store.os_unlink(path)


def _finished(progress: Path) -> dict[str, dict[str, Any]]:
    """The parts that were finished before: name -> units and files. What does not agree with its own hash is passed over."""
    found = {}
    for path in sorted(progress.glob("*.json")):
        part = _json(path)
        if path.name != "settings.json" and isinstance(part, dict) and part.get("sha256") == store.fingerprint(part.get("body")):
            found[path.name] = part["body"]
    return found


def _tasks(attempt: _Attempt, known: dict[str, dict[str, Any]]) -> list[Task]:
    """The groups of units, with what `known` parts and generations say about them; later ones win."""
    units: dict[str, dict[str, Any]] = {}
    files: dict[str, dict[str, Any]] = {}
    for part in known.values():
        units |= part["units"]
        files |= part["files"]
    sizes, sums = attempt.sizes, attempt.sums or {}
    tasks = []
    for group in grouped(attempt.units, sizes):
        here = {file for unit in group for file in unit.files}
        former = {unit.name: units[unit.name] for unit in group if unit.name in units}
        named = {name for entry in former.values() for name in entry["shard"] if name in files}
        tasks.append(
            Task(
                group=store.fingerprint([unit.name for unit in group])[:16],
                units=tuple(group),
                dataset=attempt.entry.name,
                identity=store.fingerprint(attempt.settings),
                root=None if attempt.source is None else attempt.source.root,
                out=attempt.out,
                sizes={file: sizes[file] for file in here if file in sizes},
                sums={file: sums[file] for file in here if file in sums},
                former=former,
                files={name: files[name] for name in named},
                keep_dates=attempt.keep_dates,
            )
        )
    return tasks


def _run(attempt: _Attempt, tasks: list[Task]) -> dict[str, dict[str, Any]]:
    """Work on `tasks`; each finished one is put down at once, so that a killed run loses no more than what it was at."""
    seen: set[str] = set()
    total = sum(len(task.units) for task in tasks)

    def tell(unit: str) -> None:
        if unit and unit not in seen:
            if attempt.progress is not None:
                attempt.progress(f"ingest {attempt.entry.name}", len(seen), total)
            seen.add(unit)

    results: dict[str, dict[str, Any]] = {}
    for task, result in run(tasks, attempt.jobs, attempt.stop, tell):
        store.write_json(attempt.out / PROGRESS / f"{task.group}.json", {"body": result, "sha256": store.fingerprint(result)})
        results[task.group] = result
        attempt.entries |= result["units"]
    if attempt.progress is not None:
        attempt.progress(f"ingest {attempt.entry.name}", total, total)
    for entry in attempt.entries.values():
        attempt.hashes |= entry["sources"]
    return results


def _publish(attempt: _Attempt, former: dict[str, Any] | None, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Name everything in a manifest; the former one is returned when nothing differs from it."""
    out = attempt.out
    recordings = [row for result in results for name in sorted(result["units"]) for row in result["units"][name]["recordings"]]
    seen: dict[str, str] = {}
    for name, entry in sorted(attempt.entries.items()):
        for row in entry["recordings"]:
            if seen.setdefault(row[0], name) != name:
                text = f"the units {safe_text(seen[row[0]])} and {safe_text(name)} hold the same recording"
                raise UserError(Reason.DUPLICATE_KEY, text, wanted="expected a name of its own for each", file=attempt.given)
    files: dict[str, dict[str, Any]] = {name: facts for result in results for name, facts in result["files"].items()}
    subjects, facts, _ = shards.write_subjects(out, [(row[0], row[1], store.canonical(row[2]).decode()) for row in recordings])
    files[subjects] = facts
    known = store.canonical({"units": attempt.entries}) + b"\n"
    units, digest, size = store.write_named(out, "units", ".json", lambda stream: stream.write(known))
    files[units] = {"sha256": digest, "size": size, "rows": len(attempt.entries)}
    body = {
        "schema": SCHEMA,
        "format_version": 1,
        "kind": "recordings",
        "dataset": attempt.entry.name,
        "settings": attempt.settings,
        "content_sha256": _content(attempt.entries),
        "shards": [pair for result in results if any(pair := _pair(result))],
        "subjects": subjects,
        "units": units,
        "recordings": len(recordings),
    }
    report = _report(attempt)
    code = accounting.passed(report)
    generation = former["generation"] + 1 if former else 1
    if former is not None and _same(former, body, files, report):
        return former
    embedded = accounting.ended(report, code) | {"generation": generation, "content_sha256": body["content_sha256"]}
    return store.publish(out, body | {"report": embedded}, files, generation)


def _pair(result: dict[str, Any]) -> list[str | None]:
    """Names of the recordings and annotations of a finished part."""
    return [next((name for name in result["files"] if name.startswith(stem)), None) for stem in ("recordings-", "annotations-")]


def _content(entries: dict[str, dict[str, Any]]) -> str:
    """The hash of the data set: of the sorted hashes of its units."""
    return shards.joined_hash(entry["report"]["content_sha256"] for entry in entries.values() if entry["report"]["content_sha256"])


def _same(former: dict[str, Any], body: dict[str, Any], files: dict[str, Any], report: dict[str, Any]) -> bool:
    """Whether a published manifest already says this; path of the source, versions of libraries and options of the run aside."""

    def told(report: dict[str, Any]) -> dict[str, Any]:
        said = {key: report[key] for key in ("units", "counts", "rows", "reasons", "rules")}
        return said | {"source": {**report["source"], "path": None}}

    return former["files"] == files and all(former[key] == body[key] for key in body) and told(former["report"]) == told(report)


def _verdict(attempt: _Attempt, manifest: dict[str, Any]) -> dict[str, Any]:
    """The report of what is published."""
    report = _report(attempt)
    return accounting.ended(report, accounting.passed(report)) | {
        key: manifest[key] for key in ("generation", "manifest_sha256", "content_sha256")
    }


def _tidy(out: Path, manifest: dict[str, Any], report: dict[str, Any]) -> None:
    """After the commit: the report, the copy of the subjects for people, and what nobody needs any more."""
    store.write_json(out / REPORT, report)
    subjects = (out / manifest["subjects"]).read_bytes()
    copy = out / "subjects.parquet"
    if not copy.is_file() or copy.read_bytes() != subjects:
        store.write_bytes(copy, subjects)
    store.prune(out, shards.NAMES)
    with suppress(OSError):
        _clear(out / PROGRESS)


# ---- parts


def _part(attempt: _Attempt, shard: tuple[int, int], force_new: bool) -> dict[str, Any]:
    """Part k of n, beside other parts: which groups belong to it is a hash of their names."""
    k, n = shard
    _, before = _former(attempt, force_new)
    progress = _begin(attempt, force_new)
    _listed(attempt)
    _read_sums(attempt)
    tasks = _tasks(attempt, before | _finished(progress))
    mine = [task for task in tasks if int(task.group, 16) % n == k - 1]
    _run(attempt, mine)
    done = _finished(progress)
    left = [task for task in tasks if f"{task.group}.json" not in done]
    report = _report(attempt)
    return {
        "schema": "bitimely.ingest_part/1",
        "format_version": 1,
        "dataset": attempt.entry.name,
        "shard": f"{k}/{n}",
        "exit_code": int(Exit.GOOD),
        "published": False,
        "parts_missing": len({int(task.group, 16) % n for task in left}),
        **{key: report[key] for key in ("units", "counts", "rows", "reasons", "options")},
    }


# ---- the report


@contextmanager
def _reported(attempt: _Attempt, *, write: bool = True) -> Iterator[None]:
    """Whatever ends the block early is told in the report, and the report goes with the error."""
    try:
        try:
            yield
        except MemoryError as error:
            text, action = "out of memory", "Use fewer --jobs, or a larger machine"
            raise UserError(Reason.RESOURCE_LIMIT, text, action=action, file=str(attempt.out), exit_code=Exit.RESOURCES) from error
        except OSError as error:
            raise store.fault(error, attempt.out / store.MANIFEST) from error
    except UserError as error:
        if error.exit_code == Exit.REFUSED and error.finding not in attempt.reasons and not attempt.entries:
            attempt.reasons.append(error.finding)
        stopped = error.exit_code != Exit.REFUSED  # then not every file has been hashed, and the rest may be large
        error.report = accounting.ended(_report(attempt, hashed=not stopped), error.exit_code, error)
        error.details = [
            *error.details,
            *(finding for finding in accounting.findings(error.report) if finding.line() != error.finding.line()),
        ]
        if write:
            with suppress(UserError):  # the disk may be what is wrong
                store.write_json(attempt.out / REPORT, error.report)
        raise


def _report(attempt: _Attempt, *, hashed: bool = True) -> dict[str, Any]:
    """The report without a verdict; the files that no unit claims are hashed here, once."""
    entries = attempt.entries
    if hashed:
        _hash_rest(attempt)
    sizes = attempt.sizes
    source = {
        "path": attempt.given,
        "kind": attempt.options.get("source"),
        "files": len(attempt.hashes),
        "bytes": sum(sizes[name] for name in attempt.hashes),
        "sha256": shards.joined_hash(f"{digest}  {name}" for name, digest in attempt.hashes.items()),
        "sha256sums": attempt.summed,
    }
    return accounting.report(
        attempt.entry.name,
        source,
        [entry["report"] for entry in entries.values()],
        rows=[*attempt.rows, *(row for name in sorted(entries) for row in entries[name]["rows"])],
        reasons=attempt.reasons,
        options=attempt.options | attempt.run_options,
        rules=dict(attempt.entry.facts.rules),
    )


def _read_sums(attempt: _Attempt) -> None:
    """SHA256SUMS.txt at the root of the source: what it says, and one warning each for what it does not list and what is not there."""
    source = attempt.source
    if source is None or SUMS not in source.files:
        return
    if not attempt.run_options["verify"]:
        attempt.summed = "skipped"
        return
    attempt.sums, odd = {}, 0
    for line in source.path(SUMS).read_text("utf-8", errors="replace").splitlines():
        digest, _, name = line.strip().partition(" ")
        name = name.strip().removeprefix("*").removeprefix("./")
        if len(digest) == 64 and name:
            attempt.sums[name] = digest.lower()
        elif line.strip():
            odd += 1
    attempt.summed = "verified"
    absent = sorted(name for name in attempt.sums if name not in source.files and name not in source.odd)
    unlisted = sorted(name for name in source.files if name not in attempt.sums and name != SUMS)
    for names, text in ((absent, "listed files are not here"), (unlisted, "files are not listed")):
        if names:
            attempt.reasons.append(_sums_warning(f"{len(names)} {text}", len(names), names))
    if odd:
        attempt.reasons.append(_sums_warning(f"{odd} lines are no checksums", odd, []))


def _sums_warning(text: str, count: int, names: Iterable[str]) -> Finding:
    examples = tuple(safe_text(name) for name in list(names)[:5])
    return Finding(code=Reason.SOURCE_CHECKSUM, level="warning", text=text, file=SUMS, count=count, examples=examples)


def _hash_rest(attempt: _Attempt) -> None:
    """Hash the files that belong to no unit, and compare all with SHA256SUMS.txt.

    Raises UserError (source_checksum) when a table that the whole data set needs differs from it.
    """
    source = attempt.source
    if source is None or attempt.hashes.keys() >= source.files.keys():
        return
    claimed = {file for unit in attempt.units for file in unit.files}
    for name in source.files:
        if name in attempt.hashes or name in claimed:  # a claimed file without a hash could not be read: its unit says so
            continue
        attempt.stop.check()
        try:
            attempt.hashes[name] = store.sha256(source.root / name)
        except OSError as error:
            text = f"cannot be read ({error.strerror or type(error).__name__})"
            attempt.reasons.append(Finding(code=Reason.IO_ERROR, level="warning", text=text, file=name))
    for name, listed in (attempt.sums or {}).items():
        if attempt.hashes.get(name, listed) != listed:
            attempt.summed = "mismatch"
            if name not in claimed:
                needed = any(table["file"] == name for table in attempt.rows)
                attempt.reasons.append(mismatch(name, attempt.hashes[name], listed, level="error" if needed else "warning"))
                if needed:
                    raise UserError(
                        Reason.SOURCE_CHECKSUM, "a needed table differs from SHA256SUMS.txt", action="Download it again", file=name
                    )


__all__ = ["ingest", "work"]
