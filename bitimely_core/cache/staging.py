"""Downloads the sources behind a URL into a folder beside the cache, from which they are ingested.

    cache/<dataset>/.staged-<hash of the URL>/
      .files.jsonl    a line for each finished file: name, size, version, SHA-256
      .parts/         unfinished files, named by the hash of name, size and version
      ...             the files under their names

The version of a file is what the server states of its content: ETag, checksum, or time of change. A
file whose version or size has changed is brought anew; one without a version is never taken from an
earlier try. Names are foreign text: what could leave the folder is not brought.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from bitimely_core.cache.remote_errors import (
    TRIES,
    EndedEarlyError,
    describe_failure,
    retry,
    wait_between_tries,
    watch,
)
from bitimely_core.cache.remote_files import RemoteFile, RemoteSource, is_remote, is_url
from bitimely_core.cache.remote_listing import CHUNK, CONNECTIONS, list_remote
from bitimely_core.cache.workers import StopFlag, catch_signals
from bitimely_core.errors import (
    Exit,
    Reason,
    UserError,
    hide_credentials,
    input_error,
    safe_text,
    usage_error,
)
from bitimely_core.formats.source import Source, scan_folder
from bitimely_core.progress import report_progress
from bitimely_core.store import locks, storage
from bitimely_core.system_errors import RETRY_HINT, find_folder, format_size, raise_system_error

CACHE_RATIO = 0.75  # bytes of cache a byte of source: an estimate
FINISHED, PARTS = ".files.jsonl", ".parts"


def measure_free(folder: Path) -> int:
    """Bytes that are free on the disk of a folder, which need not be there."""
    return shutil.disk_usage(find_folder(folder)).free


@contextmanager
def open_source(
    source: str | Path | None,
    out: Path,
    *,
    follow_symlinks: bool = False,
    keep: bool = False,
    wait: float = 0.0,
) -> Iterator[Source | None]:
    """The raw folder: `source` itself, or the one in `out` for the files behind a URL.

    The files behind a URL are brought first. Their folder is removed when the block has ended
    without an error, unless `keep`.

    Raises UserError: of `scan_folder`; for a URL config, unknown_name, missing_extra or not_found
    (exit 2), io_error or no_input (4: no permission, a file that keeps changing, nothing to read),
    disk_full or io_error (6: no space, no answer), locked (7), interrupted.
    """
    if source is None:
        yield None
        return
    if not is_remote(source):
        path = _parse_local(str(source)) if is_url(source) else Path(source)
        yield scan_folder(path, follow_symlinks=follow_symlinks)
        return
    with catch_signals() as stop:
        remote = list_remote(str(source), stop)
        folder = storage.make_folder(locate_folder(str(source), out))
    with locks.lock_folder(folder, wait):
        with catch_signals() as stop:
            _Download(remote, folder, stop).run()
        scanned = scan_folder(folder)
        yield replace(scanned, rejected={**scanned.rejected, **remote.rejected})
        if not keep:
            storage.remove_folder(folder)


def locate_folder(source: str, out: Path) -> Path:
    """The folder in `out` for the files behind a URL."""
    return out / f".staged-{storage.fingerprint(hide_credentials(source).rstrip('/'))[:16]}"


def _parse_local(source: str) -> Path:
    rest = re.sub(r"(?i)^localhost(?=/)", "", source.partition("://")[2])
    if not rest.startswith("/"):
        raise usage_error(
            f"found {safe_text(source)}",
            "expected file:/// and an absolute path",
            "Or give the path alone",
        )
    return Path(unquote(rest))


# --- listing


# --- download


class _Download:
    """Brings the files of a source into a folder whose lock is held."""

    def __init__(self, remote: RemoteSource, folder: Path, stop: StopFlag) -> None:
        self.remote, self.folder, self.stop = remote, folder, stop
        self.is_over = threading.Event()  # threads end at their next block
        self.guard = threading.Lock()
        self.done = 0  # bytes

    def run(self) -> None:
        """Raises UserError; what is finished by then is kept."""
        storage.remove_temporary_files(self.folder)
        self._remove_others()
        missing = self._find_missing()
        need = sum(file.size for file in missing.values())
        self.done = self.remote.size - need
        storage.require_space(self.folder, int(need + CACHE_RATIO * self.remote.size))
        storage.make_folder(self.folder / PARTS)
        free = format_size(measure_free(self.folder))
        step = f"download {len(missing)} files, {format_size(need)} ({free} free)"
        with ThreadPool(CONNECTIONS) as pool:
            finished = pool.imap_unordered(lambda item: self._bring(*item), missing.items())
            try:
                for _ in watch(finished, self.stop):
                    report_progress(step, self.done // 1_000_000, -(-self.remote.size // 1_000_000))
            finally:
                self.is_over.set()
        storage.remove_folder(self.folder / PARTS)

    def _find_missing(self) -> dict[str, RemoteFile]:
        """The files that an earlier try did not finish, or that have changed here or there."""
        finished: dict[str, list[Any]] = {}
        with suppress(FileNotFoundError):
            for line in (self.folder / FINISHED).read_bytes().splitlines():
                with suppress(ValueError, TypeError):
                    name, *facts = json.loads(line)
                    finished[name] = facts
        missing = {}
        for name, file in self.remote.files.items():
            self.stop.check()
            size, version, digest = finished.get(name, (None, "", ""))
            path = self.folder / name
            is_same = version and (size, version) == (file.size, file.version)
            if not is_same or not path.is_file() or storage.hash_file(path) != digest:
                missing[name] = file
        return missing

    def _remove_others(self) -> None:
        """Remove what the listing does not have: files, odd things in their place, old parts."""
        scanned = scan_folder(self.folder)
        for name in scanned.rejected.keys() | (scanned.files.keys() - self.remote.files.keys()):
            path = self.folder / name
            (storage.remove_folder if path.is_dir() else storage.remove_file)(path)
        wanted = {self._locate_part(name, file) for name, file in self.remote.files.items()}
        parts = self.folder / PARTS
        for path in storage.list_folder(parts) if parts.is_dir() else []:
            if path not in wanted:
                storage.remove_file(path)

    def _locate_part(self, name: str, file: RemoteFile) -> Path:
        return self.folder / PARTS / storage.fingerprint([name, file.size, file.version])[:32]

    def _bring(self, name: str, file: RemoteFile) -> None:
        """Bring one file: in one piece, or on from its part. Raises UserError."""
        for _ in range(TRIES):
            digest = self._bring_version(name, file)
            part = self._locate_part(name, file)
            now = retry(partial(self.remote.stat, file.path), self.remote, name, self.stop)
            if now == file and digest:
                target = self.folder / name
                storage.make_folder(target.parent)
                storage.remove_folder(target)  # where an earlier listing had one
                storage.rename(part, target)
                with self.guard:
                    line = [name, file.size, file.version, digest]
                    storage.append_line(self.folder / FINISHED, line)
                return
            storage.remove_file(part)
            self.remote.opened.invalidate_cache()
            if now is None:
                break
            if now == file and self.remote.is_web:
                raise input_error(
                    Reason.IO_ERROR,
                    "is longer than the server states",
                    f"expected {file.size} bytes",
                    "Bring the folder here by other means",
                    file=self.remote.locate(name),
                )
            file = now
        raise input_error(
            Reason.IO_ERROR,
            "changed while it was read",
            "expected files that stay as they are",
            f"Wait until nothing writes there. {RETRY_HINT}",
            file=self.remote.locate(name),
        )

    def _check(self) -> None:
        """Raises UserError when another thread has failed, or after a signal."""
        self.stop.check()
        if self.is_over.is_set():
            raise UserError(
                Reason.INTERRUPTED, "another file has failed", exit_code=Exit.INTERRUPTED
            )

    def _bring_version(self, name: str, file: RemoteFile) -> str:
        """Fill the part of one version of a file; its SHA-256, empty where it is another version.

        A broken connection is taken up where it broke.
        """
        part, tries = self._locate_part(name, file), TRIES
        if not file.version or not part.is_file() or part.stat().st_size > file.size:
            storage.create_file(part)
        while True:
            self._check()
            before = part.stat().st_size
            try:
                return self._fill(part, name, file)
            except Exception as error:
                raise_system_error(error, stored=False)
                fault = describe_failure(error, self.remote.locate(name), is_file=True)
                tries = TRIES if part.stat().st_size > before else tries - 1
                if not tries or fault.exit_code != Exit.RESOURCES or isinstance(error, UserError):
                    raise fault from None
                if type(error).__name__ == "FileExpired":
                    return ""  # another version, which `_bring` finds
            wait_between_tries(TRIES - tries, self.stop)

    def _fill(self, part: Path, name: str, file: RemoteFile) -> str:
        """Append what a part lacks; its SHA-256.

        Empty where a web server sends more than it has stated. Raises UserError.
        """
        with part.open("rb") as stored:
            total = hashlib.file_digest(stored, "sha256")
            size = stored.tell()
        if size < file.size:
            with self._open(file.path, size) as stream:
                if not self._is_resumed(stream, name, size):
                    storage.create_file(part)
                    total, size = hashlib.sha256(), 0
                while size < file.size and (block := stream.read(min(CHUNK, file.size - size))):
                    self._check()
                    storage.append_bytes(part, block)
                    total.update(block)
                    size += len(block)
                    self.done += len(block)
                if self.remote.is_web and size == file.size and stream.read(1):
                    return ""
        if size != file.size:
            raise EndedEarlyError
        storage.sync_file(part)
        return total.hexdigest()

    def _is_resumed(self, stream: Any, name: str, start: int) -> bool:
        """Whether a server sends the bytes from `start` on and not all; raises UserError where it
        sends others.
        """
        if not self.remote.is_web or not start:
            return True
        if stream.r.status != 206:
            return False
        if not stream.r.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            raise input_error(
                Reason.IO_ERROR,
                "the server sends another part of the file",
                f"asked for its bytes from {start} on",
                "Bring the folder here by other means",
                file=self.remote.locate(name),
            )
        return True

    def _open(self, path: str, start: int) -> Any:
        """The stream of a remote file from byte `start` on."""
        if self.remote.is_web:
            headers = {"Range": f"bytes={start}-"} if start else {}
            return self.remote.opened.open(path, "rb", block_size=0, size=1, headers=headers)
        stream = self.remote.opened.open(path, "rb", block_size=CHUNK, cache_type="none")
        stream.seek(start)
        return stream
