"""Opens and verifies caches: only files that the manifest names are read, once their hashes agree.

It takes no lock and writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bitimely_core.cache import shards
from bitimely_core.cache.ingest_run import PAGE, REPORT
from bitimely_core.cache.ingest_units import SUBJECTS_COPY
from bitimely_core.errors import (
    Finding,
    Reason,
    UserError,
    clean,
    input_error,
    input_warning,
    integrity_error,
)
from bitimely_core.schemas.ingest_records import (
    CachedUnit,
    CacheManifest,
    EventsManifest,
    RecordingsManifest,
)
from bitimely_core.store import manifests, storage
from bitimely_core.store.records import BESIDE, STAGED_NAME
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import Record

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True)
class Cache:
    """One generation of a data set's cache. It stays readable while the next one is made."""

    folder: Path
    manifest: CacheManifest

    @property
    def recordings_manifest(self) -> RecordingsManifest:
        """The manifest of a cache of recordings."""
        assert isinstance(self.manifest, RecordingsManifest)
        return self.manifest

    @property
    def events_manifest(self) -> EventsManifest:
        """The manifest of a cache of claims."""
        assert isinstance(self.manifest, EventsManifest)
        return self.manifest

    @property
    def dataset(self) -> str:
        """Name of the data set."""
        return self.manifest.dataset

    def events(self) -> Iterator[pl.DataFrame]:
        """Of claims: the rows of one shard of subjects after another, in MEDS columns.

        `claims.ingest_claims` describes the columns.
        """
        for number in range(len(self.events_manifest.shards)):
            yield self.shard(number)

    def shard(
        self, number: int, columns: Collection[str] | None = None, categories: Sequence[str] = ()
    ) -> pl.DataFrame:
        """Of claims: one shard of `events`, of `columns` those that are there.

        `categories`: plain columns of text that are read as Categorical.
        """
        return self._read_frame(self.events_manifest.shards[number], columns, categories)

    def cohort(self, columns: Collection[str] | None = None) -> pl.DataFrame:
        """Of claims: one row a subject; of `columns` those that are there.

        Days are on the subject's clock unless dates were kept.
        """
        return self._read_frame(self.manifest.subjects, columns)

    def labels(self, columns: Collection[str] | None = None) -> pl.DataFrame:
        """Of claims: subject_id, name, value, onset_day, one row a subject and label in this order.

        Of `columns` those that are there.
        """
        return self._read_frame(self.events_manifest.labels, columns)

    def records(
        self,
        channels: Collection[str] | None = None,
        only: Collection[str] | None = None,
        *,
        labels: bool = True,
    ) -> Iterator[Record]:
        """The recordings in a stable order, with one shard in memory at a time.

        Args:
            channels: decode these alone; recordings without any of them come without signals.
            only: ids of recordings; None: all.
            labels: False: annotations are not read.

        Raises:
            UserError: integrity (exit 5) for a shard that has gone or changed since the cache was
                opened.
        """
        attributes = {
            row["recording_id"]: json.loads(row["attributes"])
            for row in self._read_rows(self.manifest.subjects)
            if only is None or row["recording_id"] in only
        }
        missing = len(attributes)
        for shard in self.recordings_manifest.shards:
            if not missing:
                return
            if not labels:
                shard = shard._replace(annotations=None)
            with self._translate_errors(shard.recordings):
                for record in shards.read_shard(self.folder, shard, attributes, channels):
                    missing -= 1
                    yield record

    def recording_ids(self) -> list[str]:
        """In the order of `records`."""
        return [row["recording_id"] for row in self._read_rows(self.manifest.subjects)]

    def subjects(self) -> pl.DataFrame:
        """One row a recording, in the order of `records`.

        The columns are recording_id, subject_id, and one for each attribute.
        """
        import polars as pl

        rows = self._read_rows(self.manifest.subjects)
        schema = dict.fromkeys(("recording_id", "subject_id"), pl.String)
        frame = pl.DataFrame({key: [row[key] for row in rows] for key in schema}, schema=schema)
        attributes = [json.loads(row["attributes"]) for row in rows]
        return frame.with_columns(
            pl.Series(key, [values.get(key) for values in attributes], strict=False)
            for key in sorted(set().union(*attributes))
        )

    def signals(self) -> pl.DataFrame:
        """One row a recording, channel and segment: rates, lengths, scales, quality figures."""
        return self._read_shards(0)

    def annotations(self) -> pl.DataFrame:
        """One row a label: recording_id, onset and duration in seconds, label."""
        return self._read_shards(1)

    def _read_shards(self, part: Literal[0, 1]) -> pl.DataFrame:
        """The rows of all shards of recordings (0) or of annotations (1), without samples."""
        import polars as pl

        empty = pl.DataFrame(shards.make_schemas()[part].empty_table())
        names = [pair[part] for pair in self.recordings_manifest.shards]
        frames = map(self._read_frame, filter(None, names))
        return pl.concat([empty.drop("samples", strict=False), *frames])

    def _read_frame(
        self, name: str, columns: Collection[str] | None = None, categories: Sequence[str] = ()
    ) -> pl.DataFrame:
        import polars as pl

        with self._translate_errors(name):
            table = shards.read_table(self.folder / name, columns, categories)
        frame = pl.from_arrow(table)
        assert isinstance(frame, pl.DataFrame)
        return frame

    def _read_rows(self, name: str) -> list[dict[str, Any]]:
        with self._translate_errors(name):
            return shards.read_table(self.folder / name).to_pylist()

    @contextmanager
    def _translate_errors(self, name: str | None) -> Iterator[None]:
        """An error of a damaged or missing file becomes a UserError that names it."""
        import pyarrow as pa

        path = self.folder / (name or "")
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise_system_error(error, path)
            raise integrity_error(
                str(path),
                f"cannot be read ({clean(str(error), 80)})",
                "it could be read when the cache was opened",
                "Open the cache again; when that fails, ingest again",
            ) from error


def open_cache(folder: str | Path, *, verify: bool = True) -> Cache:
    """The published generation of the cache of one data set.

    `verify`: compare every file with its SHA-256 before anything is read. Raises UserError:
    not_found or incomplete (exit 4) when nothing is published, unsupported_format (exit 4),
    integrity (exit 5).
    """
    folder = Path(folder)
    manifest, damage = _read_stable_manifest(folder, verify=verify)
    if damage:
        raise storage.damage_error(*damage)
    return Cache(folder, manifest)


def verify(folder: str | Path, *, deep: bool = False) -> list[Finding]:
    """Compare the cache of one data set with its manifest.

    `deep`: also decode every shard and compare the content with each unit's hash. Returns findings,
    none where all is well. Level error, code integrity: damaged or missing (exit 5); code
    incomplete or not_found: nothing is published there (exit 4). Level warning: files that the
    manifest does not name.
    """
    folder = Path(folder)
    try:
        manifest, findings = _read_stable_manifest(folder)
    except UserError as error:
        raise_system_error(error)
        return [error.finding]
    if deep and not findings and isinstance(manifest, RecordingsManifest):
        findings = _check_content(Cache(folder, manifest))
    return [*findings, *_find_foreign_files(folder, manifest)]


def _read_stable_manifest(
    folder: Path, *, verify: bool = True
) -> tuple[CacheManifest, list[Finding]]:
    """The manifest and, under `verify`, the damage of its files.

    They are compared once more when another generation was published meanwhile.
    """
    while True:
        values = manifests.read_manifest(folder)
        if not str(values.get("schema")).startswith("bitimely.cache/"):
            raise input_error(
                Reason.UNSUPPORTED_FORMAT,
                f"is {clean(str(values.get('schema')), 80)}",
                "expected a cache",
                "Give a folder made by ingest",
                file=str(folder),
            )
        manifest = CacheManifest.parse(values, folder / manifests.MANIFEST)
        damage = manifest.find_damage(folder) if verify else []
        if not damage or manifests.read_manifest(folder)["generation"] == manifest.generation:
            return manifest, damage


def _check_content(cache: Cache) -> list[Finding]:
    """Units whose content, as it is decoded, differs from their hash."""
    manifest = cache.recordings_manifest
    units = shards.read_units(cache.folder / manifest.units)
    try:
        hashes = _hash_units(cache, units)
    except UserError as error:
        raise_system_error(error)
        return [error.finding]
    faults, digests = [], []
    for name, entry in units.items():
        digest = entry.report.content_sha256 if entry.report else None
        if digest is not None:
            digests.append(digest)
            if hashes[name] != digest:
                problem = f"the content of the unit {clean(name, 80)} differs from its hash"
                faults.append((problem, entry.shard.recordings or manifests.MANIFEST))
    if shards.hash_lines(digests) != manifest.content_sha256:
        faults.append(("the units do not add up to the content", manifests.MANIFEST))
    hint = "Ingest again under --force-new"
    return [
        Finding(Reason.INTEGRITY, problem, hint=hint, file=str(cache.folder / file))
        for problem, file in faults
    ]


def _hash_units(cache: Cache, units: dict[str, CachedUnit]) -> dict[str, str]:
    """The hash of the content of each unit, as it is decoded."""
    owner = {row.recording_id: name for name, entry in units.items() for row in entry.recordings}
    hashes: dict[str, list[str]] = {name: [] for name in units}
    for record in cache.records():
        hashes[owner[record.recording_id]].append(shards.hash_record(record))
    return {name: shards.hash_lines(lines) for name, lines in hashes.items()}


def _find_foreign_files(folder: Path, manifest: CacheManifest) -> list[Finding]:
    """Warnings about files that neither this generation nor the one before names.

    One more for a copy of the subjects that differs from the original.
    """
    names, faults = _list_known_names(folder, manifest), []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in names:
            continue
        if storage.is_temporary(path.name) or shards.NAMES.fullmatch(path.name):
            problem = "was left by an ingest that did not end"
            faults.append((path, problem, "The next ingest removes it"))
        elif not STAGED_NAME.fullmatch(path.name):
            faults.append((path, "does not belong to this cache", "Remove it"))
    copy, original = folder / SUBJECTS_COPY, manifest.files[manifest.subjects]
    if copy.is_file() and storage.hash_file(copy) != original.sha256:
        problem = "differs from the subjects of this cache"
        faults.append((copy, problem, "The next ingest replaces it"))
    return [
        input_warning(Reason.FILE_NAME, problem, "it is not read", hint, file=str(path))
        for path, problem, hint in faults
    ]


def _list_known_names(folder: Path, manifest: CacheManifest) -> set[str]:
    """Names of files that belong to this generation of a cache or to an earlier one."""
    names = {manifests.MANIFEST, BESIDE, REPORT, PAGE, SUBJECTS_COPY, *manifest.files}
    for path in folder.glob("manifest-*.json"):
        if manifests.OLD_MANIFEST.fullmatch(path.name):
            names.add(path.name)
            with suppress(OSError, ValueError, KeyError, TypeError):
                names |= set(json.loads(path.read_bytes())["files"])
    return names
