"""Reading a cache: only files that its manifest names, after a comparison of their hashes. No lock,
no writing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bitimely_core import manifests, storage
from bitimely_core.cache import shards
from bitimely_core.cache.ingest import SUBJECTS_COPY
from bitimely_core.cache.ingest_run import PAGE, REPORT
from bitimely_core.errors import (
    Finding,
    Reason,
    UserError,
    clean,
    input_error,
    input_warning,
    integrity_error,
)
from bitimely_core.records import BESIDE, STAGED_NAME
from bitimely_core.schemas.ingest import (
    CachedPart,
    CacheManifest,
    EventsManifest,
    RecordingsManifest,
)
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import Record

if TYPE_CHECKING:
    import polars as pl

T = TypeVar("T")


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
        """Of claims: the rows of one shard of subjects after another, in MEDS columns
        (`claims.ingest`).
        """
        for number in range(len(self.events_manifest.shards)):
            yield self.shard(number)

    def shard(
        self, number: int, columns: Collection[str] | None = None, categories: Sequence[str] = ()
    ) -> pl.DataFrame:
        """Of claims: one shard of `events`; of `columns` those that are there, `categories` (plain
        columns of text) as Categorical.
        """
        return self._read_frame(self.events_manifest.shards[number], columns, categories)

    def cohort(self, columns: Collection[str] | None = None) -> pl.DataFrame:
        """Of claims: one row a subject, days on the subject's clock unless dates were kept; of
        `columns` those that are there.
        """
        return self._read_frame(self.manifest.subjects, columns)

    def labels(self, columns: Collection[str] | None = None) -> pl.DataFrame:
        """Of claims: subject_id, name, value, onset_day, one row a subject and label in this order;
        of `columns` those that are there.
        """
        return self._read_frame(self.events_manifest.labels, columns)

    def records(
        self,
        channels: Collection[str] | None = None,
        only: Collection[str] | None = None,
        *,
        labels: bool = True,
    ) -> Iterator[Record]:
        """The recordings (of `only`, by id) in a stable order, with one shard in memory at a time;
        None: all.

        `channels`: decode these alone; recordings without any of them come without signals;
        `labels` False: annotations are not read.
        Raises UserError: integrity (exit 5) for a shard that has gone or changed since the cache
        was opened.
        """
        attributes = {
            row["recording_id"]: json.loads(row["attributes"]) for row in self._read_subjects()
        }
        selected = (
            attributes
            if only is None
            else {recording: attributes[recording] for recording in attributes if recording in only}
        )
        left = len(selected)
        for names in self.recordings_manifest.shards:
            if not left:
                return
            shard = shards.CacheShard(names[0], names[1] if labels else None)
            for record in self._translate_errors(
                shard.recordings, partial(shards.read_shard, self.folder, shard, selected, channels)
            ):
                left -= 1
                yield record

    def recording_ids(self) -> list[str]:
        """In the order of `records`."""
        return [row["recording_id"] for row in self._read_subjects()]

    def subjects(self) -> pl.DataFrame:
        """One row a recording, in the order of `records`: recording_id, subject_id, and a column
        for each attribute.
        """
        import polars as pl

        rows = self._read_subjects()
        schema = dict.fromkeys(("recording_id", "subject_id"), pl.String)
        frame = pl.DataFrame({key: [row[key] for row in rows] for key in schema}, schema=schema)
        more = [json.loads(row["attributes"]) for row in rows]
        keys = sorted({key for attributes in more for key in attributes})
        return frame.with_columns(
            pl.Series(key, [attributes.get(key) for attributes in more], strict=False)
            for key in keys
        )

    def signals(self) -> pl.DataFrame:
        """One row a recording, channel and segment, without the samples: rates, lengths, scales,
        quality figures.
        """
        import polars as pl

        names = [name for name, _ in self.recordings_manifest.shards if name]
        return pl.concat([self._read_frame(name) for name in names]) if names else pl.DataFrame()

    def annotations(self) -> pl.DataFrame:
        """One row a label: recording_id, onset and duration in seconds, label."""
        import polars as pl

        schema = {
            "recording_id": pl.String,
            "onset": pl.Float64,
            "duration": pl.Float64,
            "label": pl.String,
        }
        return pl.concat(
            [
                pl.DataFrame(schema=schema),
                *(self._read_frame(name) for _, name in self.recordings_manifest.shards if name),
            ]
        )

    def _read_frame(
        self, name: str, columns: Collection[str] | None = None, categories: Sequence[str] = ()
    ) -> pl.DataFrame:
        import polars as pl

        found = pl.from_arrow(
            next(
                self._translate_errors(
                    name, lambda: iter([shards.read_table(self.folder / name, columns, categories)])
                )
            )
        )
        assert isinstance(found, pl.DataFrame)
        return found

    def _read_subjects(self) -> list[dict[str, Any]]:
        name = self.manifest.subjects
        return list(
            self._translate_errors(
                name, lambda: iter(shards.read_table(self.folder / name).to_pylist())
            )
        )

    def _translate_errors(self, name: str | None, read: Callable[[], Iterator[T]]) -> Iterator[T]:
        """Items of `read`; an error of a damaged or missing file becomes a UserError that names
        it.
        """
        import pyarrow as pa

        try:
            yield from read()
        except (OSError, pa.ArrowException) as error:
            raise_system_error(error, self.folder / (name or ""))
            text, before = (
                f"cannot be read ({clean(str(error), 80)})",
                "it could be read when the cache was opened",
            )
            hint = "Open the cache again; when that fails, ingest again"
            raise integrity_error(str(self.folder / (name or "")), text, before, hint) from error


def open_cache(folder: str | Path, *, verify: bool = True) -> Cache:
    """The published generation of the cache of one data set; `verify`: compare every file with its
    SHA-256 before anything is read.

    Raises UserError: not_found or incomplete (exit 4) when nothing is published, unsupported_format
    (exit 4), integrity (exit 5).
    """
    folder = Path(folder)
    manifest, found = _read_stable_manifest(
        folder, lambda manifest: manifest.find_damage(folder) if verify else []
    )
    if found:
        raise storage.damage_error(*found)
    return Cache(folder, manifest)


def verify(folder: str | Path, *, deep: bool = False) -> list[Finding]:
    """Compare the cache of one data set with its manifest; `deep`: also decode every shard and
    compare the content with each unit's hash.

    Returns findings of level error, code integrity: damaged or missing (exit 5); code incomplete or
    not_found: nothing is published there (exit 4). Level warning: files that the manifest does not
    name. Empty: all is well.
    """
    folder = Path(folder)
    try:
        manifest, found = _read_stable_manifest(
            folder, lambda manifest: manifest.find_damage(folder)
        )
    except UserError as error:
        raise_system_error(error)
        return [error.finding]
    if deep and not found and isinstance(manifest, RecordingsManifest):
        found = _check_content(Cache(folder, manifest))
    return [*found, *_find_foreign_files(folder, manifest)]


def _read_stable_manifest(
    folder: Path, check: Callable[[CacheManifest], list[Finding]]
) -> tuple[CacheManifest, list[Finding]]:
    """The manifest and the findings of `check`; once more when another generation was published
    meanwhile.
    """
    while True:
        values = manifests.read_manifest(folder)
        if not str(values.get("schema")).startswith("bitimely.cache/"):
            text = f"is {clean(str(values.get('schema')), 80)}"
            raise input_error(
                Reason.UNSUPPORTED_FORMAT,
                text,
                "expected a cache",
                "Give a folder made by ingest",
                file=str(folder),
            )
        manifest = CacheManifest.parse(values, folder / manifests.MANIFEST)
        found = check(manifest)
        if not found or manifests.read_manifest(folder)["generation"] == manifest.generation:
            return manifest, found


def _check_content(cache: Cache) -> list[Finding]:
    """Units whose content, as it is decoded, differs from their hash."""
    manifest = cache.recordings_manifest
    units = CachedPart.model_validate_json((cache.folder / manifest.units).read_bytes()).units
    owner = {row.recording_id: name for name, entry in units.items() for row in entry.recordings}
    hashes: dict[str, list[str]] = {name: [] for name in units}
    try:
        for record in cache.records():
            hashes[owner[record.recording_id]].append(shards.hash_record(record))
    except UserError as error:
        raise_system_error(error)
        return [error.finding]
    expected = {
        name: entry.report.content_sha256
        for name, entry in units.items()
        if entry.report and entry.report.content_sha256
    }
    faults = [
        (
            f"the content of the unit {clean(name, 80)} differs from its hash",
            units[name].shard[0] or manifests.MANIFEST,
        )
        for name, digest in expected.items()
        if shards.hash_lines(hashes[name]) != digest
    ]
    if shards.hash_lines(expected.values()) != manifest.content_sha256:
        faults.append(("the units do not add up to the content", manifests.MANIFEST))
    hint = "Ingest again under --force-new"
    return [
        Finding(Reason.INTEGRITY, text, hint=hint, file=str(cache.folder / file))
        for text, file in faults
    ]


def _find_foreign_files(folder: Path, manifest: CacheManifest) -> list[Finding]:
    """Files that neither this generation nor the one before names, and a copy of the subjects that
    differs from the original.
    """
    named = {manifests.MANIFEST, BESIDE, REPORT, PAGE, SUBJECTS_COPY, *manifest.files}
    for path in folder.glob("manifest-*.json"):
        if manifests.OLD_MANIFEST.fullmatch(path.name):
            named.add(path.name)
            with suppress(OSError, ValueError, KeyError, TypeError):
                named |= set(json.loads(path.read_bytes())["files"])
    faults = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in named or STAGED_NAME.fullmatch(path.name):
            continue
        if storage.TEMPORARY_NAME.search(path.name) or shards.NAMES.fullmatch(path.name):
            faults.append(
                (path, "was left by an ingest that did not end", "The next ingest removes it")
            )
        else:
            faults.append((path, "does not belong to this cache", "Remove it"))
    copy, original = folder / SUBJECTS_COPY, manifest.files.get(manifest.subjects)
    if copy.is_file() and original and storage.hash_file(copy) != original.sha256:
        faults.append(
            (copy, "differs from the subjects of this cache", "The next ingest replaces it")
        )
    return [
        input_warning(Reason.FILE_NAME, text, "it is not read", hint, file=str(path))
        for path, text, hint in faults
    ]
