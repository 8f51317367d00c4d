"""`ingest`: raw files to the cache of one data set. Bad units are quarantined, and a second run
reads only what has changed.

First the shards, each in an atomic write, and for each finished part a note in `.progress/`; then,
under the lock, one manifest that names everything. A kill leaves the previous generation or none,
and the same command resumes from the notes.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from bitimely_core import locks, manifests, registry, storage
from bitimely_core.cache import ingest_report, shards, staging
from bitimely_core.cache.ingest_run import REPORT, IngestRun
from bitimely_core.cache.units import MEAN_BYTES, MEAN_UNITS, IngestTask, find_copies, group_units
from bitimely_core.cache.workers import IngestWorker, catch_signals, run_tasks, start_workers
from bitimely_core.errors import (
    Reason,
    UserError,
    check_choice,
    hide_credentials,
    input_error,
    raise_differences,
    safe_text,
    usage_error,
)
from bitimely_core.formats.text import use_encoding
from bitimely_core.records import FORMAT, StoredFile
from bitimely_core.schemas.ingest import (
    CachedPart,
    CachedUnit,
    CacheManifest,
    CacheSettings,
    IngestPart,
    IngestReport,
    RecordingsManifest,
)
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import Progress

PROGRESS = ".progress"
SUBJECTS_COPY = "subjects.parquet"  # for people, never read
SOURCE_SPEED = 60e6  # bytes of source a second and core: an estimate
PART_LOCK_WAIT = 60.0  # seconds that parts of one ingest wait for each other


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
    encoding: str | None = None,
    verify: bool = True,
    force_new: bool = False,
    wait: float = 0.0,
    progress: Progress | None = None,
    dry_run: bool = False,
    keep_staged: bool = False,
) -> dict[str, Any]:
    """Read a data set into its cache.

    Args:
        dataset: registered name.
        source: raw folder, or the URL of one (see `cache.staging`); None for generated data sets.
        out: folder of this data set's cache; made if missing.
        options: the data set's own.
        jobs: worker processes; 1 reads in this process. The result does not depend on it.
        strict: refuse when anything is quarantined.
        max_bad: refuse when a larger share of the units, or of the rows of one table, is
            quarantined.
        shard: (k, n): do part k of n of the units (k from 1); the process that finds all parts done
            publishes.
        follow_symlinks: follow links that leave the source.
        keep_phi: keep identifying header fields, where the reader knows them.
        keep_dates: keep start times of recordings.
        encoding: of text tables without a byte order mark; None: UTF-8.
        verify: compare the source with its SHA256SUMS.txt.
        force_new: read everything again.
        wait: seconds to wait for another process that works on this cache.
        progress: called with the current step, units done and units in all.
        dry_run: return what would be read, and write nothing.
        keep_staged: of a URL keep the files that were brought here; else they are removed once the
            cache is published.

    Returns:
        The ingest report (`schemas.IngestReport`) as JSON, status published or partial. A part that
        is not the last: `{"schema": "bitimely.ingest_part/1", ...}`; a dry run: `{"schema":
        "bitimely.ingest_plan/1", ...}`.

    Raises:
        UserError: usage, and settings that differ from those of the cache (exit 2), refused (4), a
            damaged manifest (5), disk or memory (6), locked (7), interrupted (130, 143). Once the
            source is being read, its `report` is that of `ingest_report.json`, and `details` are
            the findings.
    """
    folder = Path(out)
    entry, resolved = _resolve_options(dataset, options or {})
    _check_arguments(entry, source, jobs, max_bad, shard)
    kind = registry.data_kinds[entry.facts.kind]

    def pin(values: dict[str, Any], *, scratch: bool) -> dict[str, Any]:
        # where a dry run makes the key
        with use_encoding(encoding), tempfile.TemporaryDirectory() as home:
            return kind.pin_options(values, Path(home) / dataset if scratch else folder)

    if staging.is_remote(source):
        # what is wrong with them is found before anything is downloaded
        pin({**resolved}, scratch=True)
        if dry_run:
            return _plan_download(entry.name, str(source), folder)
    with staging.open_source(
        source,
        folder,
        follow_symlinks=follow_symlinks,
        keep=keep_staged,
        wait=wait,
        progress=progress,
    ) as scanned:
        if scanned is not None:
            resolved |= {
                name: value
                for name, value in kind.recognize_source(scanned).items()
                if name not in (options or {})
            }
        stated = {} if encoding is None else {"encoding": encoding}
        pinned = pin(resolved, scratch=dry_run)
        with use_encoding(encoding), catch_signals() as stop:
            run = IngestRun(
                dataset=entry,
                source=scanned,
                source_path=None if source is None else hide_credentials(str(source)),
                out=folder,
                options={**pinned, "keep_phi": keep_phi, "keep_dates": keep_dates, **stated},
                given_options=resolved,
                run_options={
                    "strict": strict,
                    "max_bad": max_bad,
                    "follow_symlinks": follow_symlinks,
                    "verify": verify,
                },
                jobs=jobs,
                progress=progress,
                stop=stop,
            )
            if dry_run:
                return _plan_ingest(run)
            return kind.ingest(run, shard, wait, force_new=force_new).to_json()


def ingest_recordings(
    run: IngestRun, shard: tuple[int, int] | None, wait: float, *, force_new: bool
) -> IngestReport | IngestPart:
    """Recordings: part k of n of the units, or all that is left to do."""
    folder = run.out
    if shard is not None and shard[1] > 1:
        with locks.lock_folder(folder, wait, shared=True):
            part = _ingest_part(run.restart(), shard, force_new=force_new)
        if part.parts_missing:
            return part
        try:  # other processes may have come as far
            with locks.lock_folder(folder, max(wait, PART_LOCK_WAIT)):
                return _ingest_all(run, force_new=force_new)
        except UserError as error:
            # the process that holds the lock finds all parts finished and publishes
            if error.code == Reason.LOCKED:
                return part
            raise
    with locks.lock_folder(folder, wait):
        return _ingest_all(run, force_new=force_new)


def _resolve_options(
    dataset: str, given: dict[str, Any]
) -> tuple[registry.Entry[registry.DatasetFacts], dict[str, Any]]:
    """The data set and its options, defaults filled in. Raises UserError (exit 2) for unknown
    names.
    """
    entry = registry.datasets[dataset]
    known = entry.facts.options or {}
    for name in given:
        check_choice(f"option of {entry.name}", name, known)
    return entry, {
        name: str(value) if isinstance(value, Path) else value
        for name, value in {**known, **given}.items()
    }


def _check_arguments(
    entry: registry.Entry[registry.DatasetFacts],
    source: str | Path | None,
    jobs: int,
    max_bad: float,
    shard: tuple[int, int] | None,
) -> None:
    if entry.facts.needs_source and source is None:
        raise usage_error(f"no source for {entry.name}", "expected a folder in the official layout")
    if not entry.facts.needs_source and source is not None:
        raise usage_error(f"{entry.name} takes no source", "it is generated, not read")
    if jobs < 1:
        raise usage_error(f"jobs is {jobs}", "expected at least 1")
    if not 0 <= max_bad <= 1:
        raise usage_error(f"max_bad is {max_bad}", "expected a share from 0 to 1")
    if shard is not None and not 1 <= shard[0] <= shard[1]:
        raise usage_error(f"shard is {shard[0]}/{shard[1]}", "expected k/n with k from 1 to n")
    if shard is not None and shard[1] > 1 and staging.is_remote(source):
        raise usage_error(
            "--shard with a URL",
            "expected a folder that all parts can read",
            "Ingest without --shard, or copy the files first",
        )


def _plan_ingest(run: IngestRun) -> dict[str, Any]:
    """What an ingest would read, and an estimate of its duration."""
    # else its files are not made yet
    if run.source is not None or run.dataset.facts.kind != "events":
        run.list_units()
    sizes = run.sizes
    bytes_of = [sum(sizes.get(file, 0) for file in unit.files) for unit in run.units]
    total = sum(bytes_of)
    return {
        "schema": "bitimely.ingest_plan/1",
        "format_version": 1,
        "status": "planned",
        "dataset": run.dataset.name,
        "source": {"path": run.source_path, "files": len(sizes), "bytes": sum(sizes.values())},
        "out": str(run.out),
        "units": [
            {
                "unit": unit.name,
                "files": list(unit.files),
                "bytes": size,
                "readable": unit.read is not None,
            }
            for unit, size in zip(run.units, bytes_of, strict=True)
        ],
        "bytes": total,
        "options": run.options | run.run_options,
        "estimate": {
            "cache_bytes": int(total * staging.CACHE_RATIO),
            "seconds": round(total / SOURCE_SPEED / run.jobs, 1),
        },
    }


def _plan_download(dataset: str, source: str, folder: Path) -> dict[str, Any]:
    """What an ingest of a URL would bring here, from its listing alone."""
    with catch_signals() as stop:
        remote = staging.list_remote(source, stop)
    return {
        "schema": "bitimely.ingest_plan/1",
        "format_version": 1,
        "status": "planned",
        "dataset": dataset,
        "source": {"path": remote.url, "files": len(remote.files), "bytes": remote.size},
        "out": str(folder),
        "units": [],
        "bytes": remote.size,
        "staged": str(staging.locate_folder(source, folder)),
        "rejected": [finding.message for finding in remote.rejected.values()],
        "estimate": {
            "cache_bytes": int(remote.size * staging.CACHE_RATIO),
            "free_bytes": staging.measure_free(folder),
        },
    }


def _ingest_all(run: IngestRun, *, force_new: bool) -> IngestReport:
    """Read what has changed, publish, report."""
    storage.remove_temporary_files(run.out)
    previous, parts = load_previous_parts(run, force_new=force_new)
    notes = _open_notes(run, force_new=force_new)
    storage.remove_temporary_files(notes)
    try:
        with run.record_failure():
            # workers that the source needs at least
            early = len(run.sizes) // (2 * MEAN_UNITS) + sum(run.sizes.values()) // MEAN_BYTES
            early = min(run.jobs, early) if run.jobs > 1 else 0
            with start_workers(
                early, (run.dataset.function.__module__, "pyarrow.parquet")
            ) as workers:
                run.list_units()
                run.read_checksums()
                done = _run_tasks(
                    run, _make_tasks(run, parts + _read_finished_parts(notes)), workers
                )
            run.hash_remaining()
            run.reasons += find_copies(run.entries, run.sizes)
            refusal = run.find_refusal()
            if refusal is not None:
                raise refusal
            manifest = _publish_cache(run, previous, done)
            report = ingest_report.publish_report(
                run.report(), manifest.generation, manifest.content_sha256
            )
            report = report.model_copy(update={"manifest_sha256": manifest.manifest_sha256})
            _clean_up(run.out, manifest, report)
    finally:
        with suppress(UserError):
            storage.remove_temporary_files(run.out)  # of workers that were stopped while they wrote
    return report


def load_previous(run: IngestRun, *, force_new: bool) -> CacheManifest | None:
    """The published manifest of the folder; None without one. Raises UserError: settings_differ
    (exit 2), integrity (exit 5).
    """
    path = run.out / manifests.MANIFEST
    if not path.exists():
        return None
    try:
        previous = CacheManifest.read(run.out)
    except UserError as error:
        raise_system_error(error)
        if not force_new:
            error.hint = "Restore a copy, or give --force-new to read everything again"
            raise
        for old in run.out.glob("manifest*.json"):
            storage.os_unlink(old)
        return None
    if not force_new:
        _compare_settings(previous.settings, run.settings, path)
    return previous


def load_previous_parts(
    run: IngestRun, *, force_new: bool
) -> tuple[RecordingsManifest | None, list[CachedPart]]:
    """As `load_previous`, and the units of the cache, unless everything is to be read again."""
    previous = load_previous(run, force_new=force_new)
    if previous is None:
        return None, []
    assert isinstance(previous, RecordingsManifest)
    if force_new or previous.find_damage(run.out, [previous.units]):
        return previous, []
    units = CachedPart.model_validate_json((run.out / previous.units).read_bytes())
    return previous, [units.model_copy(update={"files": previous.files})]


def _compare_settings(old: CacheSettings, new: CacheSettings, path: Path) -> None:
    """Raises UserError (settings_differ, exit 2) with one finding for each key that differs."""
    before, now = (
        {"dataset": one.dataset, "version": one.version, **one.options} for one in (old, new)
    )
    raise_differences(
        before,
        now,
        path,
        "Give the same options, another folder, or --force-new to read everything again",
    )


def _open_notes(run: IngestRun, *, force_new: bool) -> Path:
    """The folder of finished parts; emptied when everything is to be read again, unless such an
    ingest is under way.

    Raises UserError (settings_differ, exit 2).
    """
    folder = storage.make_folder(run.out / PROGRESS)
    path = folder / "settings.json"
    new = {"settings": run.settings.model_dump(mode="json"), "force_new": force_new}
    with locks.lock_folder(folder, PART_LOCK_WAIT):
        stored = _read_json(path)
        if stored is not None and not force_new:
            _compare_settings(CacheSettings(**stored["settings"]), run.settings, path)
        elif stored != new:
            _remove_notes(folder)
            storage.write_json(path, new)
    return folder


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise_system_error(error, path)
        return None


def _remove_notes(folder: Path) -> None:
    """Remove all notes; the settings last, so that after a kill in between the others still have
    them.
    """
    for path in sorted(folder.glob("*.json"), key=lambda path: path.name == "settings.json"):
        storage.os_unlink(path)


def _read_finished_parts(notes: Path) -> list[CachedPart]:
    """The parts that were finished before; a note that differs from its own hash is ignored."""
    found = [
        _read_json(path) for path in sorted(notes.glob("*.json")) if path.name != "settings.json"
    ]
    bodies = [
        note["body"]
        for note in found
        if isinstance(note, dict) and note.get("sha256") == storage.fingerprint(note.get("body"))
    ]
    return [CachedPart(**body) for body in bodies]


def _make_tasks(run: IngestRun, known: list[CachedPart]) -> list[IngestTask]:
    """The groups of units, each with its previous results; of two parts the later one wins."""
    units: dict[str, CachedUnit] = {}
    files: dict[str, StoredFile] = {}
    for part in known:
        units |= part.units
        files |= part.files
    identity = storage.fingerprint(run.settings.model_dump(mode="json"))
    tasks = []
    for group in group_units(run.units, run.sizes):
        sources = {file for unit in group for file in unit.files}
        previous = {unit.name: units[unit.name] for unit in group if unit.name in units}
        tasks.append(
            IngestTask(
                group=storage.fingerprint([unit.name for unit in group])[:16],
                units=tuple(group),
                dataset=run.dataset.name,
                identity=identity,
                root=None if run.source is None else run.source.root,
                out=run.out,
                sizes={file: run.sizes[file] for file in sources if file in run.sizes},
                checksums={file: run.checksums[file] for file in sources if file in run.checksums},
                previous=previous,
                files={
                    name: files[name]
                    for entry in previous.values()
                    for name in entry.shard
                    if name in files
                },
                keep_dates=run.options["keep_dates"],
                encoding=run.options.get("encoding"),
            )
        )
    return tasks


def _run_tasks(
    run: IngestRun, tasks: list[IngestTask], workers: list[IngestWorker]
) -> list[CachedPart]:
    """Run `tasks` in any order and note each that is finished. The parts in the order of the
    tasks.
    """
    step, total = f"ingest {run.dataset.name}", sum(len(task.units) for task in tasks)
    show = run.progress or (lambda step, done, total: None)
    seen: set[str] = set()

    def count_unit(unit: str) -> None:
        if unit and unit not in seen:
            show(step, len(seen), total)
            seen.add(unit)

    parts: dict[str, CachedPart] = {}
    # an error here leaves no worker behind
    with closing(run_tasks(tasks, run.jobs, run.stop, count_unit, workers)) as results:
        for task, part in results:
            body = part.model_dump(mode="json")
            storage.write_json(
                run.out / PROGRESS / f"{task.group}.json",
                {"body": body, "sha256": storage.fingerprint(body)},
            )
            parts[task.group] = part
            run.entries |= part.units
            for entry in part.units.values():
                run.hashes |= entry.sources
    show(step, total, total)
    return [parts[task.group] for task in tasks]


def _publish_cache(
    run: IngestRun, previous: RecordingsManifest | None, parts: list[CachedPart]
) -> RecordingsManifest:
    """Name everything in a manifest; the previous one is returned when nothing has changed.

    Raises UserError: duplicate_key (exit 4) when two units hold the same recording, and those of
    `manifests.publish`.
    """
    subjects: dict[str, tuple[str, str, str]] = {}
    files: dict[str, StoredFile] = {}
    holders: dict[str, str] = {}  # recording -> unit
    for part in parts:
        files |= part.files
        for name in sorted(part.units):
            for recording, subject, attributes, *_ in part.units[name].recordings:
                if (holder := holders.setdefault(recording, name)) != name or recording in subjects:
                    again = (
                        f", and the unit {safe_text(holder)} too" if holder != name else " twice"
                    )
                    text = f"the unit {safe_text(name)} holds the recording {safe_text(recording)}{again}"
                    action = "Remove or rename one of them"
                    raise input_error(
                        Reason.DUPLICATE_KEY,
                        text,
                        "expected unique recording names",
                        action,
                        file=run.source_path,
                    )
                subjects[recording] = (recording, subject, storage.encode_json(attributes).decode())
    table, files[table] = shards.write_subjects(run.out, list(subjects.values()))
    entries = {
        "format_version": FORMAT,
        "units": {name: entry.model_dump(mode="json") for name, entry in run.entries.items()},
    }
    units, digest, size = storage.write_hashed(
        run.out, "units", ".json", storage.encode_json(entries) + b"\n"
    )
    reports = [entry.report for entry in run.entries.values() if entry.report is not None]
    content = shards.hash_lines(
        report.content_sha256 for report in reports if report.content_sha256
    )
    generation = previous.generation + 1 if previous else 1
    manifest = RecordingsManifest(
        dataset=run.dataset.name,
        settings=run.settings,
        content_sha256=content,
        shards=[pair for part in parts if any(pair := _find_shard(part))],
        subjects=table,
        units=units,
        recordings=len(subjects),
        files=files | {units: StoredFile(sha256=digest, size=size, rows=len(run.entries))},
        report=ingest_report.publish_report(run.report(), generation, content),
    )
    if previous is not None and _hash_content(previous) == _hash_content(manifest):
        return previous
    return manifest.publish(run.out, generation)


def _find_shard(part: CachedPart) -> tuple[str | None, str | None]:
    """The files of recordings and annotations of a part."""
    recordings, annotations = (
        next((n for n in part.files if n.startswith(stem)), None)
        for stem in ("recordings-", "annotations-")
    )
    return recordings, annotations


def _hash_content(manifest: RecordingsManifest) -> str:
    """Hash of a manifest without generation, the words of the rules, path of the source, versions
    of libraries and options of the run.
    """
    body = manifest.model_dump(
        mode="json",
        include=set(RecordingsManifest.model_fields) - {"report", "generation", "manifest_sha256"},
    )
    source = manifest.report.source.model_copy(update={"path": None})
    report = manifest.report.model_dump(mode="json", include={"units", "counts", "rows", "reasons"})
    return storage.fingerprint([body, report, source.model_dump(mode="json")])


def _clean_up(out: Path, manifest: RecordingsManifest, report: IngestReport) -> None:
    """After the commit: write the report and the copy of the subjects, remove old files and
    notes.
    """
    report.save(out / REPORT)
    subjects = (out / manifest.subjects).read_bytes()
    if not (out / SUBJECTS_COPY).is_file() or (out / SUBJECTS_COPY).read_bytes() != subjects:
        storage.write_bytes(out / SUBJECTS_COPY, subjects)
    manifests.remove_old_files(out, shards.NAMES)
    _remove_notes(out / PROGRESS)


def _ingest_part(run: IngestRun, shard: tuple[int, int], *, force_new: bool) -> IngestPart:
    """Part k of n: the groups whose names have this hash. It is noted, not published."""
    k, n = shard
    _, previous = load_previous_parts(run, force_new=force_new)
    notes = _open_notes(run, force_new=force_new)
    with run.record_failure(write=False):
        run.list_units()
        run.read_checksums()
        tasks = _make_tasks(run, previous + _read_finished_parts(notes))
        _run_tasks(run, [task for task in tasks if int(task.group, 16) % n == k - 1], [])
    missing = {
        int(task.group, 16) % n for task in tasks if not (notes / f"{task.group}.json").is_file()
    }
    return IngestPart.from_report(run.report(), shard, len(missing))
