"""Reads the raw files of a data set into its cache.

Units that cannot be read are quarantined, and a second run reads only what has changed. Each shard
is written in one step, and a note in `.progress/` says that it is finished. At the end one manifest
names everything. A kill leaves the previous cache or none, and the same command resumes from the
notes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from bitimely_core import registry
from bitimely_core.cache import ingest_report, remote_files, remote_listing, shards, staging
from bitimely_core.cache.comparison import compare_levels, summarize_left_out
from bitimely_core.cache.ingest_run import REPORT, IngestRun
from bitimely_core.cache.unit_groups import IngestTask, find_copies, group_units
from bitimely_core.cache.workers import catch_signals, run_tasks
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
from bitimely_core.progress import report_progress
from bitimely_core.registry import Choices
from bitimely_core.schemas.ingest_records import (
    CachedPart,
    CachedUnit,
    CacheManifest,
    CacheSettings,
    CacheShard,
    IngestPart,
    IngestReport,
    RecordingsManifest,
)
from bitimely_core.store import locks, manifests, storage
from bitimely_core.store.records import StoredFile
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import IngestUnit, drop_empty

T = TypeVar("T")

PROGRESS, SETTINGS = ".progress", "settings.json"  # folder of notes; settings of its ingest
PLAN = {"schema": "bitimely.ingest_plan/1", "format_version": 1, "status": "planned"}
SUBJECTS_COPY = "subjects.parquet"  # for people, never read
# kind of data -> bytes of source a second and core, and bytes of cache a byte of it: estimates
COSTS = {"recordings": (60e6, staging.CACHE_RATIO), "events": (8e6, 0.2)}
PART_LOCK_WAIT = 60.0  # seconds that parts of one ingest wait for each other


def ingest(
    dataset: str,
    source: str | Path | None,
    out: str | Path,
    *,
    options: Choices | None = None,
    jobs: int = 1,
    strict: bool = False,
    max_bad: float = 0.5,
    shard: tuple[int, int] | None = None,
    follow_symlinks: bool = False,
    exclude: Sequence[str] = (),
    keep_phi: bool = False,
    keep_dates: bool = False,
    encoding: str | None = None,
    verify: bool = True,
    force_new: bool = False,
    wait: float = 0.0,
    dry_run: bool = False,
    keep_staged: bool = False,
) -> Choices:
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
        exclude: names of recordings to leave out, as the report has them; recorded there.
        keep_phi: keep identifying header fields, where the reader knows them.
        keep_dates: keep start times of recordings.
        encoding: of text tables without a byte order mark; None: UTF-8.
        verify: compare the source with its SHA256SUMS.txt.
        force_new: read everything again.
        wait: seconds to wait for another process that works on this cache.
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
    entry = registry.datasets[dataset]
    resolved = _resolve_options(entry, options or {})
    _check_arguments(entry, source, jobs, max_bad, shard)
    _check_names(entry, exclude)
    kind = registry.data_kinds[entry.facts.kind]
    if remote_files.is_remote(source):
        with use_encoding(encoding):  # what is wrong is found before anything is downloaded
            _pin_in_scratch(kind, resolved)
        if dry_run:
            return _plan_download(entry.name, str(source), folder)
    with (
        use_encoding(encoding),
        staging.open_source(
            source, folder, follow_symlinks=follow_symlinks, keep=keep_staged, wait=wait
        ) as scanned,
        catch_signals() as stop,
    ):
        if scanned is not None:
            recognized = kind.recognize_source(scanned)
            resolved = _resolve_options(entry, {**recognized, **(options or {})})
        pinned = _pin_in_scratch(kind, resolved) if dry_run else kind.pin_options(resolved, folder)
        reading: Choices = {"keep_phi": keep_phi, "keep_dates": keep_dates}
        reading |= _drop_empty({"encoding": encoding})
        run = IngestRun(
            dataset=entry,
            source=scanned,
            source_path=None if source is None else hide_credentials(str(source)),
            out=folder,
            options={**pinned, **reading},
            given_options=resolved,
            run_options={
                "strict": strict,
                "max_bad": max_bad,
                "follow_symlinks": follow_symlinks,
                "verify": verify,
                **_drop_empty({"exclude": sorted(set(exclude))}),
            },
            jobs=jobs,
            stop=stop,
        )
        if dry_run:
            return _plan_ingest(run)
        return kind.ingest(run, shard, wait, force_new=force_new).to_json()


def ingest_recordings(
    run: IngestRun, shard: tuple[int, int] | None, wait: float, *, force_new: bool
) -> IngestReport | IngestPart:
    """Ingest recordings: part k of n of the units, or all that are not done yet."""
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


def _resolve_options(entry: registry.Entry[registry.DatasetFacts], choices: Choices) -> Choices:
    """The options of a data set: `choices`, and the defaults of the others.

    Raises UserError (exit 2) for unknown names.
    """
    defaults = entry.facts.options or {}
    for name in choices:
        check_choice(f"option of {entry.name}", name, defaults)
    options = {**defaults, **choices}
    return {
        name: str(value) if isinstance(value, Path) else value for name, value in options.items()
    }


def _pin_in_scratch(kind: registry.DataKind, options: Choices) -> Choices:
    """Options as the manifest of a cache keeps them; a key that they need is made and forgotten."""
    with tempfile.TemporaryDirectory() as home:
        return kind.pin_options(options, Path(home) / "cache")


def _check_arguments(
    entry: registry.Entry[registry.DatasetFacts],
    source: str | Path | None,
    jobs: int,
    max_bad: float,
    shard: tuple[int, int] | None,
) -> None:
    if entry.facts.needs_source and source is None:
        raise usage_error(f"no source for {entry.name}", "expected the folder of its files")
    if not entry.facts.needs_source and source is not None:
        raise usage_error(f"{entry.name} takes no source", "it is generated, not read")
    if jobs < 1:
        raise usage_error(f"jobs is {jobs}", "expected at least 1")
    if not 0 <= max_bad <= 1:
        raise usage_error(f"max_bad is {max_bad}", "expected a share from 0 to 1")
    k, n = shard or (1, 1)
    if not 1 <= k <= n:
        raise usage_error(f"shard is {k}/{n}", "expected k/n with k from 1 to n")
    if n > 1 and remote_files.is_remote(source):
        raise usage_error(
            "--shard with a URL",
            "expected a folder that all parts can read",
            "Ingest without --shard, or copy the files first",
        )


def _check_names(entry: registry.Entry[registry.DatasetFacts], exclude: Sequence[str]) -> None:
    """Raises UserError (config, exit 2) for names of recordings where there are none."""
    if exclude and entry.facts.kind != "recordings":
        raise usage_error(
            f"{entry.name} has no recordings",
            "expected a data set of recordings",
            "Leave it out",
            field="--exclude",
        )


def _drop_empty(options: Choices) -> Choices:
    """The options that are given."""
    return drop_empty(options)


def _plan_ingest(run: IngestRun) -> Choices:
    """What an ingest would read, and an estimate of its duration."""
    # the files of generated events are not made yet
    if run.source is not None or run.dataset.facts.kind != "events":
        run.list_units()
    sizes = run.sizes
    units: list[Choices] = [
        {
            "unit": unit.name,
            "files": list(unit.files),
            "bytes": sum(sizes.get(file, 0) for file in unit.files),
            "readable": unit.read is not None,
        }
        for unit in run.units
    ]
    kind = run.dataset.facts.kind
    speed, size = COSTS[kind]
    # the tables of events are no units: all of them are read together
    total = sum(sizes.values()) if kind == "events" else sum(unit["bytes"] for unit in units)
    return {
        **PLAN,
        "dataset": run.dataset.name,
        "source": {"path": run.source_path, "files": len(sizes), "bytes": sum(sizes.values())},
        "out": str(run.out),
        "units": units,
        "bytes": total,
        "options": run.options | run.run_options,
        "estimate": {
            "cache_bytes": int(total * size),
            "seconds": round(total / speed / run.jobs, 1),
        },
    }


def _plan_download(dataset: str, source: str, folder: Path) -> Choices:
    """What an ingest of a URL would bring here, from its listing alone."""
    with catch_signals() as stop:
        remote = remote_listing.list_remote(source, stop)
    return {
        **PLAN,
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
            run.list_units()
            run.read_checksums()
            tasks = _make_tasks(run, parts + _read_finished_parts(notes))
            done = _run_tasks(run, tasks)
            run.hash_remaining()
            run.reasons += find_copies(run.entries, run.sizes)
            run.reasons += summarize_left_out(run.entries)
            if run.dataset.facts.own_files:
                run.reasons += compare_levels(run.out, done)
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
        _compare_settings(previous.settings, run, path)
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
    units = shards.read_units(run.out / previous.units)
    return previous, [CachedPart(units=units, files=previous.files)]


def _compare_settings(old: CacheSettings, run: IngestRun, path: Path) -> None:
    """Raises UserError (settings_differ, exit 2) with a finding for each key that differs.

    A map is an input, as the files are: what it changes is read again.
    """
    hint = "Give the same options, another folder, or --force-new to read everything again"
    if run.dataset.facts.kind == "recordings":
        hint = f"To replace it: {run.command} --force-new"
    before, now = (settings.flatten() | {"map": None} for settings in (old, run.settings))
    raise_differences(before, now, path, hint)


def _open_notes(run: IngestRun, *, force_new: bool, is_part: bool = False) -> Path:
    """The folder of notes on finished parts.

    Notes made with other settings bind nobody, since nothing of them was published: they are
    removed, but where this run reads a part and others have finished theirs. Under `force_new` all
    are removed, unless such an ingest has been interrupted. Raises UserError (settings_differ, exit
    2).
    """
    folder = storage.make_folder(run.out / PROGRESS)
    path = folder / SETTINGS
    settings = run.settings.model_dump(mode="json")
    new = {"settings": settings, "force_new": force_new}
    with locks.lock_folder(folder, PART_LOCK_WAIT):
        stored = _read_json(path)
        if stored == new or (
            stored is not None and not force_new and stored["settings"] == settings
        ):
            return folder
        if stored is not None and is_part and not force_new and _read_finished_parts(folder):
            _compare_settings(CacheSettings(**stored["settings"]), run, path)
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
    """Remove all notes, the settings last: after a kill in between the others still have them."""
    for path in sorted(folder.glob("*.json"), key=lambda path: path.name == SETTINGS):
        storage.os_unlink(path)


def _read_finished_parts(notes: Path) -> list[CachedPart]:
    """The parts that were finished before; a note that differs from its own hash is ignored."""
    parts = []
    for path in sorted(notes.glob("*.json")):
        note = _read_json(path)
        if isinstance(note, dict) and note.get("sha256") == storage.fingerprint(note.get("body")):
            parts.append(CachedPart(**note["body"]))
    return parts


def _make_tasks(run: IngestRun, parts: list[CachedPart]) -> list[IngestTask]:
    """A task for each group of units.

    `parts`: results of earlier ingests; where two hold the same unit, the later one counts.
    """
    units: dict[str, CachedUnit] = {}
    files: dict[str, StoredFile] = {}
    for part in parts:
        units |= part.units
        files |= part.files
    earlier = CachedPart(units=units, files=files)
    groups = group_units(run.units, run.sizes)
    identity = storage.fingerprint(run.settings.model_dump(mode="json"))
    return [_make_task(run, group, identity, earlier) for group in groups]


def _make_task(
    run: IngestRun, group: list[IngestUnit], identity: str, earlier: CachedPart
) -> IngestTask:
    names = [unit.name for unit in group]
    sources = set(chain.from_iterable(unit.files for unit in group))
    previous = _select(earlier.units, names)
    shard_files = set(chain.from_iterable(entry.shard for entry in previous.values()))
    return IngestTask(
        group=storage.fingerprint(names)[:16],
        units=tuple(group),
        dataset=run.dataset.name,
        identity=identity,
        root=None if run.source is None else run.source.root,
        out=run.out,
        sizes=_select(run.sizes, sources),
        checksums=_select(run.checksums, sources),
        previous=previous,
        files=_select(earlier.files, shard_files),
        keep_dates=run.options["keep_dates"],
        encoding=run.options.get("encoding"),
    )


def _select(items: Mapping[str, T], names: Iterable[str | None]) -> dict[str, T]:
    """The items with these names, as far as there are any."""
    return {name: items[name] for name in names if name is not None and name in items}


def _run_tasks(run: IngestRun, tasks: list[IngestTask]) -> list[CachedPart]:
    """Run `tasks` in any order and note each that is finished. The parts in the order of the
    tasks.
    """
    step, total = f"ingest {run.dataset.name}", sum(len(task.units) for task in tasks)
    seen: set[str] = set()

    def count_unit(unit: str) -> None:
        if unit and unit not in seen:
            report_progress(step, len(seen), total)
            seen.add(unit)

    parts: dict[str, CachedPart] = {}
    # an error here leaves no worker behind
    with closing(run_tasks(tasks, run.jobs, run.stop, count_unit)) as results:
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
    report_progress(step, total, total)
    return [parts[task.group] for task in tasks]


def _publish_cache(
    run: IngestRun, previous: RecordingsManifest | None, parts: list[CachedPart]
) -> RecordingsManifest:
    """Name everything in a manifest; the previous one is returned when nothing has changed.

    Raises UserError: as `_list_subjects` and `manifests.publish`.
    """
    subjects = _list_subjects(parts, run.source_path)
    files: dict[str, StoredFile] = {}
    pairs: dict[CacheShard, None] = {}  # in the order of the parts
    for part in parts:
        files |= part.files
        pairs |= {entry.shard: None for entry in part.units.values() if entry.recordings}
    table, files[table] = shards.write_subjects(run.out, subjects)
    units, files[units] = shards.write_units(run.out, run.entries)
    report = run.report()
    content = shards.hash_lines(
        entry.report.content_sha256
        for entry in run.entries.values()
        if entry.report and entry.report.content_sha256
    )
    generation = previous.generation + 1 if previous else 1
    manifest = RecordingsManifest(
        dataset=run.dataset.name,
        settings=run.settings,
        content_sha256=content,
        shards=list(pairs),
        subjects=table,
        units=units,
        recordings=len(subjects),
        files=files,
        report=ingest_report.leave_out_accepted(
            ingest_report.publish_report(report, generation, content)
        ),
    )
    if previous is not None and _hash_content(previous) == _hash_content(manifest):
        return previous
    return manifest.publish(run.out, generation)


def _list_subjects(parts: list[CachedPart], source: str | None) -> list[tuple[str, str, str]]:
    """A row for each recording: its name, its subject, its attributes as JSON.

    Raises UserError: duplicate_key (exit 4) for a recording that is there twice.
    """
    rows = []
    holders: dict[str, str] = {}  # recording -> unit
    for part in parts:
        for name, entry in sorted(part.units.items()):
            for row in entry.recordings:
                recording = row.recording_id
                holder = holders.get(recording)
                if holder is not None:
                    again = (
                        " twice" if holder == name else f", and the unit {safe_text(holder)} too"
                    )
                    raise input_error(
                        Reason.DUPLICATE_KEY,
                        f"the unit {safe_text(name)} holds the recording "
                        f"{safe_text(recording)}{again}",
                        "expected unique recording names",
                        "Remove or rename one of them",
                        file=source,
                    )
                holders[recording] = name
                attributes = storage.encode_json(row.attributes).decode()
                rows.append((recording, row.subject_id, attributes))
    return rows


def _hash_content(manifest: RecordingsManifest) -> str:
    """Hash of what a reader of the cache gets.

    Left out are the generation, the words of the rules, the path of the source, the versions of
    libraries and the options of the run.
    """
    body = manifest.model_dump(
        mode="json",
        include=set(RecordingsManifest.model_fields) - {"report", "generation", "manifest_sha256"},
    )
    source = manifest.report.source.model_copy(update={"path": None})
    report = manifest.report.model_dump(mode="json", include={"units", "counts", "rows", "reasons"})
    return storage.fingerprint([body, report, source.model_dump(mode="json")])


def _clean_up(out: Path, manifest: RecordingsManifest, report: IngestReport) -> None:
    """After the commit: write the report and a copy of the subjects, remove old files and notes."""
    report.save(out / REPORT)
    copy, subjects = out / SUBJECTS_COPY, (out / manifest.subjects).read_bytes()
    if not copy.is_file() or copy.read_bytes() != subjects:
        storage.write_bytes(copy, subjects)
    manifests.remove_old_files(out, shards.NAMES)
    _remove_notes(out / PROGRESS)


def _ingest_part(run: IngestRun, shard: tuple[int, int], *, force_new: bool) -> IngestPart:
    """Part k of n: the groups whose names have this hash. It is noted, not published."""
    k, n = shard
    _, previous = load_previous_parts(run, force_new=force_new)
    notes = _open_notes(run, force_new=force_new, is_part=True)
    with run.record_failure(write=False):
        run.list_units()
        run.read_checksums()
        tasks = _make_tasks(run, previous + _read_finished_parts(notes))
        _run_tasks(run, [task for task in tasks if int(task.group, 16) % n == k - 1])
    missing = {
        int(task.group, 16) % n for task in tasks if not (notes / f"{task.group}.json").is_file()
    }
    return IngestPart.from_report(run.report(), shard, len(missing))
