"""`ingest`: raw files to the cache of one data set. Bad units are left out and named, and a second run redoes only what has changed.

The commit: shards first, each whole or not there, and for each finished part a note in `.progress/`; then, under the lock, one manifest
that names everything. A kill anywhere leaves the former generation or none, and the same command goes on from the notes.
"""

from __future__ import annotations

import json
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bitimely_core import registry, storage
from bitimely_core.cache import report as accounting
from bitimely_core.cache import shards
from bitimely_core.cache.ingest_run import REPORT, IngestRun
from bitimely_core.cache.units import MEAN_BYTES, MEAN_UNITS, IngestTask, group_units
from bitimely_core.cache.workers import IngestWorker, catch_signals, run_tasks, start_workers
from bitimely_core.errors import Exit, Finding, Reason, UserError, input_error, safe_text, usage_error
from bitimely_core.formats.source import Source, scan_folder
from bitimely_core.types import Progress

SCHEMA = "bitimely.cache/1"
PROGRESS = ".progress"
SUBJECTS_COPY = "subjects.parquet"  # for people; nothing reads it
CACHE_RATIO = 0.75  # bytes of cache a byte of source: an estimate
SOURCE_SPEED = 60e6  # bytes of source a second and core: an estimate
PART_LOCK_WAIT = 60.0  # seconds that parts of one ingest wait for each other

Part = dict[str, Any]
"""A finished group of units: `units`: name -> entry, `files`: shard -> sha256, size, rows."""


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
        The ingest report (schema `bitimely.ingest_report/1`), status published or partial; `findings` of it are the lines for the screen.
        A part that is not the last: `{"schema": "bitimely.ingest_part/1", ...}`; a dry run: `{"schema": "bitimely.ingest_plan/1", ...}`.

    Raises:
        UserError: usage, and settings that differ from those of the cache (exit 2), refused (4), a damaged manifest (5), disk or memory
            (6), locked (7), interrupted (130, 143). Once the source is being read, `report` is what was written to `ingest_report.json`,
            and `details` are its findings.
    """
    folder = Path(out)
    entry, resolved = _resolve_options(dataset, options or {})
    _check_arguments(entry, source, jobs, max_bad, shard)
    found = None if source is None else _exclude_cache(scan_folder(Path(source), follow_symlinks=follow_symlinks), folder)
    kind = registry.load_data_kind(entry.facts.kind)
    with catch_signals() as stop:
        run = IngestRun(
            dataset=entry,
            source=found,
            source_path=None if source is None else str(source),
            out=folder,
            options={**kind.pin_options(resolved, folder), "keep_phi": keep_phi, "keep_dates": keep_dates},
            given_options=resolved,
            run_options={"strict": strict, "max_bad": max_bad, "follow_symlinks": follow_symlinks, "verify": verify},
            jobs=jobs,
            progress=progress,
            stop=stop,
        )
        if dry_run:
            return _plan_ingest(run)
        return kind.ingest(run, shard, wait, force_new=force_new)


def ingest_recordings(run: IngestRun, shard: tuple[int, int] | None, wait: float, *, force_new: bool) -> dict[str, Any]:
    """Recordings: part k of n of the units, or all that is left to do."""
    folder = run.out
    if shard is not None and shard[1] > 1:
        with storage.lock(folder, wait, shared=True):
            part = _ingest_part(
                replace(run, units=[], reasons=[], rows=[], checksums={}, entries={}, hashes={}), shard, force_new=force_new
            )
        if part["parts_missing"]:
            return part
        try:  # the others may be just as far
            with storage.lock(folder, max(wait, PART_LOCK_WAIT)):
                return _ingest_all(run, force_new=force_new)
        except UserError as error:
            if error.code == Reason.LOCKED:  # whoever holds it finds all parts done and publishes
                return part
            raise
    with storage.lock(folder, wait):
        return _ingest_all(run, force_new=force_new)


# ---- what was asked for


def _resolve_options(dataset: str, given: dict[str, Any]) -> tuple[registry.Entry[registry.DatasetFacts], dict[str, Any]]:
    """The data set and its options, defaults filled in. Raises UserError (exit 2) for unknown names."""
    registry.load_members("bitimely_core.datasets")
    entry = registry.datasets[dataset]
    known = entry.facts.options or {}
    for name in given:
        if name not in known:
            raise registry.unknown(f"option of {entry.name}", name, list(known))
    return entry, {name: str(value) if isinstance(value, Path) else value for name, value in {**known, **given}.items()}


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
        raise usage_error(said[0], said[1])


def _exclude_cache(source: Source, out: Path) -> Source:
    """The source without the cache, should that lie inside of it."""
    root, inner = source.root.resolve(), out.resolve()
    if not inner.is_relative_to(root):
        return source
    prefix = f"{inner.relative_to(root).as_posix()}/"
    files = {name: size for name, size in source.files.items() if not name.startswith(prefix)}
    return replace(source, files=files, rejected={name: fault for name, fault in source.rejected.items() if not name.startswith(prefix)})


def _plan_ingest(run: IngestRun) -> dict[str, Any]:
    """What an ingest would read, and about how long that takes."""
    run.list_units()
    sizes = run.sizes
    bytes_of = {unit.name: sum(sizes.get(file, 0) for file in unit.files) for unit in run.units}
    total = sum(bytes_of.values())
    return {
        "schema": "bitimely.ingest_plan/1",
        "format_version": 1,
        "status": "planned",
        "dataset": run.dataset.name,
        "source": {"path": run.source_path, "files": len(sizes), "bytes": sum(sizes.values())},
        "out": str(run.out),
        "units": [
            {"unit": unit.name, "files": list(unit.files), "bytes": bytes_of[unit.name], "readable": unit.read is not None}
            for unit in run.units
        ],
        "bytes": total,
        "options": run.options | run.run_options,
        "estimate": {"cache_bytes": int(total * CACHE_RATIO), "seconds": round(total / SOURCE_SPEED / run.jobs, 1)},
    }


# ---- the whole, under the lock


def _ingest_all(run: IngestRun, *, force_new: bool) -> dict[str, Any]:
    """Read what has changed, publish, report."""
    storage.remove_temporary_files(run.out)
    former, parts = load_previous(run, force_new=force_new)
    notes = _open_notes(run, force_new=force_new)
    storage.remove_temporary_files(notes)
    try:
        with run.record_failure():
            with start_workers(_count_early_workers(run), (run.dataset.function.__module__, "pyarrow.parquet")) as workers:
                run.list_units()
                run.read_checksums()
                done = _run_tasks(run, _make_tasks(run, parts + _read_finished_parts(notes)), workers)
            run.hash_remaining()
            refused = run.find_refusal()
            if refused is not None:
                raise refused
            manifest = _publish_cache(run, former, done)
            report = run.report()
            report = accounting.finish_report(report, accounting.derive_exit_code(report)) | {key: manifest[key] for key in RESULT}
            _clean_up(run.out, manifest, report)
    finally:
        with suppress(UserError):
            storage.remove_temporary_files(run.out)  # of workers that were stopped while they wrote
    return report


RESULT = ("generation", "manifest_sha256", "content_sha256")


def load_previous(run: IngestRun, *, force_new: bool) -> tuple[dict[str, Any] | None, list[Part]]:
    """The published manifest and what it is made of, unless everything is to be read again.

    Raises UserError: settings_differ (exit 2), integrity (exit 5).
    """
    path = run.out / storage.MANIFEST
    if not path.exists():
        return None, []
    try:
        former = storage.read_manifest(run.out)
    except UserError as error:
        if not force_new:
            error.hint = "Restore a copy, or give --force-new to read everything again"
            raise
        for old in run.out.glob("manifest*.json"):
            storage.os_unlink(old)
        return None, []
    if force_new:
        return former, []
    _compare_settings(former["settings"], run.settings, path)
    if former["kind"] == "events":
        return former, []
    if storage.find_damage(run.out, former, [former["units"]]):  # then what is in the cache is read again
        return former, []
    return former, [{"files": former["files"], **json.loads((run.out / former["units"]).read_bytes())}]


def _compare_settings(old: dict[str, Any], new: dict[str, Any], path: Path) -> None:
    """Raises UserError (settings_differ, exit 2) with one finding for each key that differs."""
    before, now = ({**settings, **settings["options"], "options": None} for settings in (old, new))
    found = [
        Finding(
            code=Reason.SETTINGS_DIFFER,
            problem=f"was made with {safe_text(before.get(key))}",
            requirement=f"now it is {safe_text(now.get(key))}",
            hint="Give the same options, another folder, or --force-new to read everything again",
            file=str(path),
            field=key,
        )
        for key in sorted(set(before) | set(now))
        if before.get(key) != now.get(key)
    ]
    if found:
        one, *rest = found
        raise usage_error(one.problem, one.requirement, one.hint, code=one.code, file=one.file, field=one.field, details=rest)


def _open_notes(run: IngestRun, *, force_new: bool) -> Path:
    """The folder of finished parts; emptied when everything is to be read again, unless an ingest for that reason is under way.

    Raises UserError (settings_differ, exit 2).
    """
    folder = storage.make_folder(run.out / PROGRESS)
    path = folder / "settings.json"
    new = {"settings": run.settings, "force_new": force_new}
    with storage.lock(folder, PART_LOCK_WAIT):
        found = _read_json(path)
        if found is not None and not force_new:
            _compare_settings(found["settings"], run.settings, path)
        elif found != new:
            _remove_notes(folder)
            storage.write_json(path, new)
    return folder


def _read_json(path: Path) -> Any:
    with suppress(OSError, ValueError):
        return json.loads(path.read_bytes())
    return None


def _remove_notes(folder: Path) -> None:
    """Remove all notes; the settings last, so that after a kill in between the others still have them."""
    for path in sorted(folder.glob("*.json"), key=lambda path: path.name == "settings.json"):
        storage.os_unlink(path)


def _read_finished_parts(notes: Path) -> list[Part]:
    """The parts that were finished before; a note that does not agree with its own hash is passed over."""
    found = [_read_json(path) for path in sorted(notes.glob("*.json")) if path.name != "settings.json"]
    return [part["body"] for part in found if isinstance(part, dict) and part.get("sha256") == storage.fingerprint(part.get("body"))]


def _make_tasks(run: IngestRun, known: list[Part]) -> list[IngestTask]:
    """The groups of units, each with what is known about them; of two parts the later one wins."""
    units: dict[str, dict[str, Any]] = {}
    files: dict[str, dict[str, Any]] = {}
    for part in known:
        units |= part["units"]
        files |= part["files"]
    tasks = []
    for group in group_units(run.units, run.sizes):
        here = {file for unit in group for file in unit.files}
        former = {unit.name: units[unit.name] for unit in group if unit.name in units}
        held = {name for entry in former.values() for name in entry["shard"]}
        tasks.append(
            IngestTask(
                group=storage.fingerprint([unit.name for unit in group])[:16],
                units=tuple(group),
                dataset=run.dataset.name,
                identity=storage.fingerprint(run.settings),
                root=None if run.source is None else run.source.root,
                out=run.out,
                sizes={file: run.sizes[file] for file in here if file in run.sizes},
                sums={file: run.checksums[file] for file in here if file in run.checksums},
                former=former,
                files={name: files[name] for name in held if name in files},
                keep_dates=run.options["keep_dates"],
            )
        )
    return tasks


def _count_early_workers(run: IngestRun) -> int:
    """How many worker processes will surely have something to do, by what lies in the source."""
    expected = len(run.sizes) // (2 * MEAN_UNITS) + sum(run.sizes.values()) // MEAN_BYTES
    return min(run.jobs, expected) if run.jobs > 1 else 0


def _run_tasks(run: IngestRun, tasks: list[IngestTask], workers: list[IngestWorker]) -> list[Part]:
    """Work on `tasks`, in whatever order; each that is finished is noted at once. The parts in the order of the tasks."""
    what, total = f"ingest {run.dataset.name}", sum(len(task.units) for task in tasks)
    tell = run.progress or (lambda what, done, total: None)
    seen: set[str] = set()

    def taken(unit: str) -> None:
        if unit and unit not in seen:
            tell(what, len(seen), total)
            seen.add(unit)

    parts: dict[str, Part] = {}
    with closing(run_tasks(tasks, run.jobs, run.stop, taken, workers)) as results:  # no worker outlives what goes wrong here
        for task, part in results:
            storage.write_json(run.out / PROGRESS / f"{task.group}.json", {"body": part, "sha256": storage.fingerprint(part)})
            parts[task.group] = part
            run.entries |= part["units"]
            for entry in part["units"].values():
                run.hashes |= entry["sources"]
    tell(what, total, total)
    return [parts[task.group] for task in tasks]


def _publish_cache(run: IngestRun, former: dict[str, Any] | None, parts: list[Part]) -> dict[str, Any]:
    """Name everything in a manifest; the former one is returned when nothing differs from it.

    Raises UserError: duplicate_key (exit 4) when two units hold the same recording, and those of `store.publish`.
    """
    out = run.out
    subjects: dict[str, tuple[str, str, str]] = {}
    for part in parts:
        for name in sorted(part["units"]):
            for recording, subject, attributes, *_ in part["units"][name]["recordings"]:
                if recording in subjects:
                    text = f"the unit {safe_text(name)} holds the recording {safe_text(recording)}, and another unit too"
                    raise input_error(Reason.DUPLICATE_KEY, text, "expected a name of its own for each", file=run.source_path)
                subjects[recording] = (recording, subject, storage.encode_json(attributes).decode())
    files: dict[str, dict[str, Any]] = {}
    for part in parts:
        files |= part["files"]
    table, files_of_table = shards.write_subjects(out, list(subjects.values()))
    known = storage.encode_json({"units": run.entries}) + b"\n"
    units, digest, size = storage.write_hashed(out, "units", ".json", known)
    files |= files_of_table | {units: {"sha256": digest, "size": size, "rows": len(run.entries)}}
    report = run.report()
    content = shards.hash_lines(unit["report"]["content_sha256"] for unit in run.entries.values() if unit["report"]["content_sha256"])
    body = {
        "schema": SCHEMA,
        "format_version": 1,
        "kind": "recordings",
        "dataset": run.dataset.name,
        "settings": run.settings,
        "content_sha256": content,
        "shards": [pair for part in parts if any(pair := _find_shard(part))],
        "subjects": table,
        "units": units,
        "recordings": len(subjects),
    }
    if former is not None and _is_unchanged(former, body, files, report):
        return former
    generation = former["generation"] + 1 if former else 1
    embedded = accounting.finish_report(report, accounting.derive_exit_code(report)) | {"generation": generation, "content_sha256": content}
    return storage.publish(out, body | {"report": embedded}, files, generation)


def _find_shard(part: Part) -> shards.CacheShard:
    """The recordings and annotations of a part."""
    return shards.CacheShard(
        *(next((name for name in part["files"] if name.startswith(stem)), None) for stem in ("recordings-", "annotations-"))
    )


def _is_unchanged(former: dict[str, Any], body: dict[str, Any], files: dict[str, Any], report: dict[str, Any]) -> bool:
    """Whether a published manifest already says this; path of the source, versions of libraries and options of the run aside."""

    def told(report: dict[str, Any]) -> str:
        said = {key: report[key] for key in ("units", "counts", "rows", "reasons", "rules")}
        return storage.fingerprint(said | {"source": report["source"] | {"path": None}})

    new = {**body, "files": files}
    return storage.fingerprint({key: former.get(key) for key in new}) == storage.fingerprint(new) and told(former["report"]) == told(report)


def _clean_up(out: Path, manifest: dict[str, Any], report: dict[str, Any]) -> None:
    """After the commit: the report, the copy of the subjects for people, and away with what nobody needs any more."""
    storage.write_json(out / REPORT, report)
    subjects = (out / manifest["subjects"]).read_bytes()
    if not (out / SUBJECTS_COPY).is_file() or (out / SUBJECTS_COPY).read_bytes() != subjects:
        storage.write_bytes(out / SUBJECTS_COPY, subjects)
    storage.remove_old_files(out, shards.NAMES)
    _remove_notes(out / PROGRESS)


# ---- parts, beside other parts


def _ingest_part(run: IngestRun, shard: tuple[int, int], *, force_new: bool) -> dict[str, Any]:
    """Part k of n: the groups that fall to it by the hash of their names. It is noted, not published."""
    k, n = shard
    _, before = load_previous(run, force_new=force_new)
    notes = _open_notes(run, force_new=force_new)
    with run.record_failure(write=False):
        run.list_units()
        run.read_checksums()
        tasks = _make_tasks(run, before + _read_finished_parts(notes))
        _run_tasks(run, [task for task in tasks if int(task.group, 16) % n == k - 1], [])
    missing = {int(task.group, 16) % n for task in tasks if not (notes / f"{task.group}.json").is_file()}
    report = run.report()
    return {
        "schema": "bitimely.ingest_part/1",
        "format_version": 1,
        "status": "part",
        "dataset": run.dataset.name,
        "shard": f"{k}/{n}",
        "exit_code": int(Exit.OK),
        "published": False,
        "parts_missing": len(missing),
        **{key: report[key] for key in ("units", "counts", "rows", "reasons", "reason_counts", "options")},
    }
