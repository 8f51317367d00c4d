"""Sources behind a URL: listed, compared with the free disk, and brought into a folder beside the
cache, from which they are ingested.

    cache/<dataset>/.staged-<hash of the URL>/
      .files.jsonl    a line for each finished file: name, size, version, SHA-256
      .parts/         unfinished files, named by the hash of name, size and version
      ...             the files under their names

The version of a file is what the server states of its content: ETag, checksum, or time of change. A
file whose version or size has changed is brought anew; one without a version is never taken from an
earlier try. Names are foreign text: what could leave the folder is not brought.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import threading
import time
import unicodedata
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from html.parser import HTMLParser
from importlib.util import find_spec
from multiprocessing import TimeoutError as StillRunning
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urljoin

from bitimely_core import locks, storage
from bitimely_core.cache.workers import StopFlag, catch_signals
from bitimely_core.errors import (
    Exit,
    Finding,
    Reason,
    UserError,
    clean,
    hide_credentials,
    input_error,
    safe_text,
    split_url,
    unknown_name_error,
    usage_error,
)
from bitimely_core.formats.source import Source, scan_folder
from bitimely_core.system_errors import RETRY_HINT, format_size, raise_system_error
from bitimely_core.types import Progress

CACHE_RATIO = 0.75  # bytes of cache a byte of source: an estimate
# bytes a request of an object store, and the most that is lost when a connection breaks
CHUNK = 8 << 20
CONNECTIONS = 8
TRIES = 4  # in a row without a byte
PAUSE = 0.5  # seconds before the second try, then twice as long each time
MAX_FILES = 1_000_000
MAX_DEPTH = 32  # folders
MAX_PAGE = 64 << 20  # bytes of a listing of a web server
FINISHED, PARTS = ".files.jsonl", ".parts"
VERSIONS = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "Content-MD5",
    "checksum",
    "mtime",
    "LastModified",
    "Last-Modified",
    "modified",
    "created",
)
WRAPPERS = {
    "async_wrapper",
    "blockcache",
    "cached",
    "data",
    "dir",
    "filecache",
    "generic",
    "libarchive",
    "reference",
    "simplecache",
    "tar",
    "zip",
}
TRANSIENT_STATUS = {408, 425, 429}
# that another try does not change
REFUSALS = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EISDIR}
NO_ACCESS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "CredentialRetrievalError",
    "TokenRetrievalError",
}
# bases of errors of aiohttp, botocore and fsspec
TRANSIENT = {"ClientError", "BotoCoreError", "FSTimeoutError"}

T = TypeVar("T")
RemoteEntry = tuple[str, str, Mapping[str, object], bool]
"""Of what a folder lists: name in the folder, path as the file system takes it, facts, whether it
is a folder.
"""


class RemoteFile(NamedTuple):
    """A file behind the URL; `size` in bytes."""

    path: str  # as the file system of the URL takes it
    size: int
    version: str  # empty: not known


@dataclass(frozen=True)
class RemoteSource:
    """What a URL lists: files by relative POSIX path, and those that are not brought, with the
    reason.
    """

    url: str  # without credentials
    opened: Any  # fsspec's file system
    scheme: str
    files: dict[str, RemoteFile] = field(default_factory=dict)
    rejected: dict[str, Finding] = field(default_factory=dict)

    @property
    def is_web(self) -> bool:
        """Whether a web server lists the files, without sizes."""
        return self.scheme in {"http", "https"}

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    def stat(self, path: str) -> RemoteFile | None:
        """The file as it is now; None where its size is not stated."""
        return _read_facts(
            path,
            self.opened.info(path, **({"refresh": True} if self.scheme in {"s3", "s3a"} else {})),
        )


def is_url(source: str | Path | None) -> bool:
    """Whether a source is a URL and no path."""
    return isinstance(source, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", source) is not None


def is_remote(source: str | Path | None) -> bool:
    """Whether a source is a URL whose files are not on this machine."""
    return is_url(source) and not re.match(r"(?i)(file|local)://", str(source))


def measure_free(folder: Path) -> int:
    """Bytes that are free on the disk of a folder, which need not be there."""
    return shutil.disk_usage(
        next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
    ).free


@contextmanager
def open_source(
    source: str | Path | None,
    out: Path,
    *,
    follow_symlinks: bool = False,
    keep: bool = False,
    wait: float = 0.0,
    progress: Progress | None = None,
) -> Iterator[Source | None]:
    """The raw folder: `source` itself, or the folder in `out` that the files behind a URL are
    brought into.

    That folder is removed when the block has ended without an error, unless `keep`.

    Raises UserError: of `scan_folder`; for a URL config, unknown_name, missing_extra or not_found
    (exit 2), io_error or no_input (4: no permission, a file that keeps changing, nothing to read),
    disk_full or io_error (6: no space, no answer), locked (7), interrupted.
    """
    if source is None or not is_url(source):
        yield None if source is None else scan_folder(Path(source), follow_symlinks=follow_symlinks)
        return
    if not is_remote(source):
        yield scan_folder(_parse_local(str(source)), follow_symlinks=follow_symlinks)
        return
    with catch_signals() as stop:
        remote = list_remote(str(source), stop)
        folder = storage.make_folder(locate_folder(str(source), out))
    with locks.lock_folder(folder, wait):
        with catch_signals() as stop:
            _Download(remote, folder, stop, progress or (lambda step, done, total: None)).run()
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


def list_remote(source: str, stop: StopFlag) -> RemoteSource:
    """The files behind a URL, with their sizes; only listings and headers are read. Raises
    UserError, see `open_source`.
    """
    remote, root = _connect(source)
    folders = {"": root}
    listed: dict[str, RemoteFile | None] = {}
    pages: dict[str, str] = {}  # files of a web server, whose listings have no sizes

    def list_one(folder: str) -> tuple[str, list[RemoteEntry]]:
        return folder, _retry(
            partial(_list_folder, remote, folders[folder]), remote.url, folder, stop
        )

    def stat_page(name: str) -> tuple[str, RemoteFile | None]:
        return name, _retry(partial(remote.stat, pages[name]), remote.url, name, stop)

    # also of one request: a signal need not wait for its answer
    with ThreadPool(CONNECTIONS) as pool:
        while folders:
            inner_folders: dict[str, str] = {}
            for folder, entries in _watch(pool.imap(list_one, folders), stop):
                for name, path, facts, is_folder in entries:
                    rel = folder + name
                    if name.startswith(".") and name.strip("."):  # hidden, as in a local folder
                        continue
                    if fault := _find_name_fault(rel):
                        remote.rejected[clean(rel)] = replace(fault, file=clean(rel))
                    elif is_folder:
                        inner_folders[rel + "/"] = path
                    elif remote.is_web:
                        pages[rel] = path
                    else:
                        listed[rel] = _read_facts(path, facts)
                    if (
                        rel.count("/") >= MAX_DEPTH
                        or len(listed) + len(pages) + len(inner_folders) > MAX_FILES
                    ):
                        problem = (
                            f"lists more than {MAX_FILES:,} files, or folders {MAX_DEPTH} deep"
                        )
                        raise input_error(
                            Reason.RESOURCE_LIMIT,
                            problem,
                            "no data set has so many",
                            "Give the folder of one",
                            file=remote.url,
                        )
            folders = inner_folders
        listed |= dict(_watch(pool.imap(stat_page, pages), stop))
    _select_files(remote, listed)
    if not remote.files and not remote.rejected:
        raise input_error(
            Reason.NO_INPUT,
            "nothing is listed there",
            "expected a folder with files",
            "Check the URL",
            file=remote.url,
        )
    return remote


def _connect(source: str) -> tuple[RemoteSource, str]:
    """The opened file system of a URL, and the path of the folder in it."""
    found = split_url(source)
    assert found is not None
    (scheme, user, rest), shown = found, hide_credentials(source)
    if "?" in rest or "::" in source:
        problem = "has a query" if "?" in rest else "is a chain of URLs"
        raise usage_error(
            problem,
            "expected the URL of one folder",
            "Give it without, credentials in the environment",
            file=shown,
        )
    name, _, secret = (unquote(part) for part in user.partition(":"))
    try:
        import fsspec

        options: dict[str, Any] = {}
        target = source
        if scheme in {"http", "https"}:
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=30)
            headers = {"Accept-Encoding": "identity"}
            if user:
                headers["Authorization"] = (
                    f"Basic {b64encode(f'{name}:{secret}'.encode()).decode()}"
                )
            # nothing unpacks to more than was sent
            limits = {"timeout": timeout, "auto_decompress": False}
            options = {"client_kwargs": {"trust_env": True, "headers": headers, **limits}}
            target = f"{scheme}://{rest.rstrip('/')}/"
        elif scheme in {"s3", "s3a"}:
            config = {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 1}}
            options = {
                "config_kwargs": config,
                **({"key": name, "secret": secret} if user else _find_s3_access()),
            }
            target = f"{scheme}://{rest.rstrip('/')}"
        elif scheme in {"gs", "gcs"}:
            options = {"use_listings_cache": False}
        known = [name for name in fsspec.available_protocols() if name not in WRAPPERS]
        if scheme not in known:
            raise unknown_name_error("scheme of a URL", scheme, known)
        opened, root = fsspec.core.url_to_fs(target, **options)
        opened.invalidate_cache()
    except ImportError as error:
        raise_system_error(error)
        raise _describe_missing(scheme) from None
    except UserError:
        raise
    except Exception as error:
        raise_system_error(error, stored=False)
        raise _describe_failure(error, shown, "") from None
    return RemoteSource(shown, opened, scheme), root


def _find_s3_access() -> dict[str, Any]:
    """Public buckets are read without a signature where this machine has no credentials."""
    from botocore.session import get_session
    from fsspec.config import conf

    if find_spec("s3fs") is None:
        raise ImportError("s3fs")
    return {} if conf.get("s3") or get_session().get_credentials() is not None else {"anon": True}


def _describe_missing(scheme: str) -> UserError:
    from_extra = {
        "s3": "s3fs",
        "s3a": "s3fs",
        "http": "aiohttp",
        "https": "aiohttp",
        "gs": "gcsfs",
        "gcs": "gcsfs",
        "az": "adlfs",
        "abfs": "adlfs",
    }
    package = from_extra.get(scheme, "a further package")
    hint = (
        "Install it with `pip install 'bitimely[s3]'`"
        if package in {"s3fs", "aiohttp"}
        else f"Install {package}, see fsspec"
    )
    return usage_error(
        f"{scheme}:// needs {package}, which is not installed", hint=hint, code=Reason.MISSING_EXTRA
    )


def _list_folder(remote: RemoteSource, path: str) -> list[RemoteEntry]:
    """What a folder lists."""
    if remote.is_web:
        return _list_page(remote.opened, path)
    entries = remote.opened.ls(path, detail=True)
    found = []
    base = path.rstrip("/") + "/" if path.strip("/") else path
    for entry in entries:
        inner = str(entry["name"])
        if inner.rstrip("/") == path.rstrip("/"):
            if entry["type"] == "file" and len(entries) == 1 and not inner.endswith("/"):
                raise input_error(
                    Reason.NO_INPUT,
                    "is a file",
                    "a folder was expected",
                    "Give the folder that holds it",
                    file=remote.url,
                )
            continue  # the marker of the folder itself
        name = inner.removeprefix(base)
        is_marker = name.endswith("/") and entry["type"] != "directory"
        found += (
            []
            if is_marker
            else [(name.removesuffix("/"), inner, entry, entry["type"] == "directory")]
        )
    return found


class _PageLinks(HTMLParser):
    """The targets of the links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links += [value for name, value in attrs if name == "href" and value]


def _list_page(opened: Any, url: str) -> list[RemoteEntry]:
    """As `_list_folder`, from the links of a page to what is below it."""
    with opened.open(url, "rb", block_size=0, size=1) as page:  # a size saves a request
        if page.r.headers.get("Content-Type", "text/html").partition(";")[0] != "text/html":
            return []
        # after redirections; the files are asked for below `url`, where they are redirected too
        here = urljoin(str(page.r.url), ".")
        text = bytearray()
        while block := page.read(CHUNK):
            text += block
            if len(text) > MAX_PAGE:
                raise input_error(
                    Reason.RESOURCE_LIMIT,
                    f"a listing of more than {format_size(MAX_PAGE)}",
                    file=url,
                )
    found: dict[str, RemoteEntry] = {}
    for link in _PageLinks(text.decode(errors="replace")).links:
        if re.search(r"[?#]", link):  # another order of the same page
            continue
        relative = "" if re.match(r"[A-Za-z][\w+.-]*:|/", link) else link.removeprefix("./")
        target = url + relative if relative else urljoin(here, link)
        if not target.startswith(url) and target.startswith(here):
            target = url + target.removeprefix(here)
        if target.startswith(url) and target != url:
            name = target.removeprefix(url)
            found[target] = (unquote(name).removesuffix("/"), target, {}, name.endswith("/"))
    return [entry for entry in found.values() if entry[0] != ".."]  # the link to the folder above


def _read_facts(path: str, facts: Mapping[str, object]) -> RemoteFile | None:
    size = facts.get("size")
    if not isinstance(size, int) or size < 0 or facts.get("type", "file") != "file":
        return None
    return RemoteFile(
        path, size, next((str(facts[key]).strip('"') for key in VERSIONS if facts.get(key)), "")
    )


def _find_name_fault(name: str) -> Finding | None:
    """Why a remote name is not used as a path."""
    parts = name.split("/")
    if (
        name.startswith("/")
        or any(part.strip(". ") == "" and part for part in parts)
        or "\\" in name
        or ".." in parts
    ):
        return Finding(
            Reason.PATH_ESCAPE,
            f"a file is called {safe_text(name)}",
            "which may leave the folder",
            "It is not read",
        )
    if (
        not name.isprintable()
        or "" in parts
        or any(len(part.encode(errors="replace")) > 200 for part in parts)
        or len(name) > 1000
    ):
        return Finding(
            Reason.FILE_NAME,
            f"a file is called {safe_text(name)}",
            "which cannot be the name of a file here",
            "It is not read",
        )
    return None


def _select_files(remote: RemoteSource, listed: Mapping[str, RemoteFile | None]) -> None:
    """The files of a listing that can lie in one folder; names that are equal but for case or
    accents, or a file's and a folder's, cannot.
    """
    owners: dict[str, list[str]] = {}
    folders = {
        _fold(name.rsplit("/", depth)[0])
        for name in listed
        for depth in range(1, name.count("/") + 1)
    }
    for name in listed:
        owners.setdefault(_fold(name), []).append(name)
    for folded, names in sorted(owners.items()):
        for name in names:
            file = listed[name]
            if len(names) > 1 or folded in folders:
                other = next((other for other in names if other != name), f"the folder {name}")
                problem, requirement = (
                    f"has the name of {safe_text(other)} where case and accents do not count",
                    "neither is read",
                )
                remote.rejected[name] = Finding(
                    Reason.DUPLICATE_KEY, problem, requirement, "Rename one", file=name
                )
            elif file is None:
                remote.rejected[name] = Finding(
                    Reason.NOT_REGULAR_FILE, "has no size", "the server must state it", file=name
                )
            else:
                remote.files[name] = file


def _fold(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


# --- download


class _EndedEarlyError(ConnectionError):
    """A file had fewer bytes than stated, without an error of the connection."""


class _Download:
    """Brings the files of a source into a folder whose lock is held."""

    def __init__(self, remote: RemoteSource, folder: Path, stop: StopFlag, show: Progress) -> None:
        self.remote, self.folder, self.stop, self.show = remote, folder, stop, show
        self.is_over = threading.Event()  # threads end at their next block
        self.guard = threading.Lock()
        self.done = 0  # bytes

    def run(self) -> None:
        """Raises UserError; what is finished by then is kept."""
        storage.remove_temporary_files(self.folder)
        self._remove_others()
        left = self._find_missing()
        need = sum(file.size for file in left.values())
        self.done = self.remote.size - need
        storage.require_space(self.folder, int(need + CACHE_RATIO * self.remote.size))
        storage.make_folder(self.folder / PARTS)
        free = format_size(measure_free(self.folder))
        step = f"download {len(left)} files, {format_size(need)} ({free} free)"
        with ThreadPool(CONNECTIONS) as pool:
            try:
                for _ in _watch(
                    pool.imap_unordered(lambda item: self._bring(*item), left.items()), self.stop
                ):
                    self.show(step, self.done // 1_000_000, -(-self.remote.size // 1_000_000))
            finally:
                self.is_over.set()
        storage.remove_folder(self.folder / PARTS)

    def _find_missing(self) -> dict[str, RemoteFile]:
        """The files that an earlier try did not finish, or whose version or content here is another
        one.
        """
        known: dict[str, list[Any]] = {}
        with suppress(FileNotFoundError):
            for line in (self.folder / FINISHED).read_bytes().splitlines():
                with suppress(ValueError, TypeError):
                    name, *facts = json.loads(line)
                    known[name] = facts
        missing = {}
        for name, file in self.remote.files.items():
            self.stop.check()
            size, version, digest = known.get(name, (None, "", ""))
            place = self.folder / name
            if (
                not version
                or (size, version) != (file.size, file.version)
                or not place.is_file()
                or storage.hash_file(place) != digest
            ):
                missing[name] = file
        return missing

    def _remove_others(self) -> None:
        """Remove files of an earlier listing, what is no file in the place of one, and parts of
        earlier versions.
        """
        found = scan_folder(self.folder)
        for name in [*found.files, *found.rejected]:
            if name not in self.remote.files or name in found.rejected:
                (storage.remove_folder if (self.folder / name).is_dir() else storage.remove_file)(
                    self.folder / name
                )
        wanted = {self._locate_part(name, file).name for name, file in self.remote.files.items()}
        for path in (
            storage.list_folder(self.folder / PARTS) if (self.folder / PARTS).is_dir() else []
        ):
            if path.name not in wanted:
                storage.remove_file(path)

    def _locate_part(self, name: str, file: RemoteFile) -> Path:
        return self.folder / PARTS / storage.fingerprint([name, file.size, file.version])[:32]

    def _bring(self, name: str, file: RemoteFile) -> None:
        """Bring one file: in one piece, or on from its part. Raises UserError."""
        for _ in range(TRIES):
            digest = self._bring_version(name, file)
            now = _retry(partial(self.remote.stat, file.path), self.remote.url, name, self.stop)
            if now == file and digest:
                target = self.folder / name
                storage.make_folder(target.parent)
                storage.remove_folder(target)  # where an earlier listing had one
                storage.rename(self._locate_part(name, file), target)
                with self.guard:
                    storage.append_line(
                        self.folder / FINISHED, [name, file.size, file.version, digest]
                    )
                return
            storage.remove_file(self._locate_part(name, file))
            self.remote.opened.invalidate_cache()
            if now is None:
                break
            if now == file and self.remote.is_web:
                problem, hint = (
                    "is longer than the server states",
                    "Bring the folder here by other means",
                )
                raise input_error(
                    Reason.IO_ERROR,
                    problem,
                    f"expected {file.size} bytes",
                    hint,
                    file=self._show(name),
                )
            file = now
        hint = f"Wait until nothing writes there. {RETRY_HINT}"
        raise input_error(
            Reason.IO_ERROR,
            "changed while it was read",
            "expected files that stay as they are",
            hint,
            file=self._show(name),
        )

    def _check(self) -> None:
        """Raises UserError when another thread has failed, or after a signal."""
        self.stop.check()
        if self.is_over.is_set():
            raise UserError(
                Reason.INTERRUPTED, "another file has failed", exit_code=Exit.INTERRUPTED
            )

    def _show(self, name: str) -> str:
        return f"{self.remote.url.rstrip('/')}/{name}"

    def _bring_version(self, name: str, file: RemoteFile) -> str:
        """Fill the part of one version of a file; its SHA-256, empty where it is another one. A
        broken connection is taken up where it broke.
        """
        part, left = self._locate_part(name, file), TRIES
        if not file.version or not part.is_file():
            storage.create_file(part)
        while True:
            self._check()
            before = part.stat().st_size
            try:
                return self._fill(part, name, file)
            except Exception as error:
                raise_system_error(error, stored=False)
                fault = _describe_failure(error, self.remote.url, name)
                left = TRIES if part.stat().st_size > before else left - 1
                if not left or fault.exit_code != Exit.RESOURCES or isinstance(error, UserError):
                    raise fault from None
                if type(error).__name__ == "FileExpired":
                    return ""  # another version, which `_bring` finds
            _wait_between_tries(TRIES - left, self.stop)

    def _fill(self, part: Path, name: str, file: RemoteFile) -> str:
        """Append what a part lacks; its SHA-256, empty where a web server sends more than it has
        stated. Raises UserError.
        """
        total, at = hashlib.sha256(), 0
        with part.open("rb") as known:
            while block := known.read(CHUNK):
                total.update(block)
                at += len(block)
        if at < file.size:
            with self._open(file.path, at) as stream:
                # the server sends all of it
                if self.remote.is_web and at and stream.r.status != 206:
                    storage.create_file(part)
                    total, at = hashlib.sha256(), 0
                elif (
                    self.remote.is_web
                    and at
                    and not stream.r.headers.get("Content-Range", "").startswith(f"bytes {at}-")
                ):
                    found, wanted = (
                        "the server sends another part of the file",
                        f"asked for its bytes from {at} on",
                    )
                    raise input_error(
                        Reason.IO_ERROR,
                        found,
                        wanted,
                        "Bring the folder here by other means",
                        file=self._show(name),
                    )
                while at < file.size and (block := stream.read(min(CHUNK, file.size - at))):
                    self._check()
                    storage.append_bytes(part, block)
                    total.update(block)
                    at += len(block)
                    self.done += len(block)
                if self.remote.is_web and at == file.size and stream.read(1):
                    return ""
        if at != file.size:
            storage.create_file(part) if at > file.size else None
            raise _EndedEarlyError
        storage.sync_file(part)
        return total.hexdigest()

    def _open(self, path: str, at: int) -> Any:
        """The stream of a remote file from byte `at` on."""
        if self.remote.is_web:
            return self.remote.opened.open(
                path, "rb", block_size=0, size=1, headers={"Range": f"bytes={at}-"} if at else {}
            )
        stream = self.remote.opened.open(path, "rb", block_size=CHUNK, cache_type="none")
        stream.seek(at)
        return stream


def _watch(results: Any, stop: StopFlag) -> Iterator[Any]:
    """Items of a thread pool; a signal ends the wait within a moment. Raises UserError."""
    while True:
        stop.check()
        try:
            yield results.next(timeout=0.2)
        except StillRunning:
            continue
        except StopIteration:
            return


def _wait_between_tries(count: int, stop: StopFlag) -> None:
    until = time.monotonic() + PAUSE * 2 ** max(0, count - 1)
    while (left := until - time.monotonic()) > 0:
        stop.check()
        time.sleep(min(left, 0.2))


def _retry(call: Callable[[], T], url: str, name: str, stop: StopFlag) -> T:
    """The result of `call`, tried a few times where the server or the network fails. Raises
    UserError.
    """
    for count in range(1, TRIES + 1):
        stop.check()
        try:
            return call()
        except UserError:
            raise
        except Exception as error:
            raise_system_error(error, stored=False)
            fault = _describe_failure(error, url, name)
            if count == TRIES or fault.exit_code != Exit.RESOURCES:
                raise fault from None
        _wait_between_tries(count, stop)
    raise AssertionError


def _describe_failure(error: BaseException, url: str, name: str) -> UserError:
    """An error of a remote file system; exit 6 where another try may succeed. Its text is not
    shown: it may hold credentials.
    """
    if isinstance(error, UserError):
        return error
    if isinstance(error, FileNotFoundError) and type(error.__cause__).__module__.startswith(
        ("aiohttp", "asyncio")
    ):
        error = error.__cause__ or error  # fsspec gives every failure of a web server that name
    where = f"{url.rstrip('/')}/{name}" if name else url
    kinds = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(error, "status", 0) or 0
    if isinstance(error, PermissionError) or status in {401, 403} or kinds & NO_ACCESS:
        hint = "Give credentials in the environment, as its own tools take them"
        return input_error(
            Reason.IO_ERROR,
            "no permission",
            "expected to be allowed to list and read it",
            hint,
            file=where,
        )
    if isinstance(error, FileNotFoundError | NotADirectoryError) or status in {404, 410}:
        if name and not name.endswith("/"):
            return usage_error(
                "it is no longer there",
                "expected the file that was listed",
                RETRY_HINT,
                code=Reason.NOT_FOUND,
                file=where,
            )
        hint = "Check the path. Of a single file, give the folder that it lies in"
        return usage_error(
            "there is no such folder",
            "expected the URL of a folder",
            hint,
            code=Reason.NOT_FOUND,
            file=where,
        )
    refused = 400 <= status < 500 and status not in TRANSIENT_STATUS
    refused = refused or getattr(error, "errno", None) in REFUSALS
    if "FileExpired" in kinds or (
        not refused and (isinstance(error, OSError | TimeoutError) or kinds & TRANSIENT)
    ):
        hint = f"Check the network. {RETRY_HINT}"
        problem = (
            "ends before the size that the server states"
            if isinstance(error, _EndedEarlyError)
            else "the server does not answer"
        )
        return UserError(
            Reason.IO_ERROR, problem, f"tried {TRIES} times", hint, where, exit_code=Exit.RESOURCES
        )
    problem = f"the server refuses the request ({status or type(error).__name__})"
    return input_error(
        Reason.IO_ERROR,
        problem,
        "expected a folder that can be listed",
        "Check the URL",
        file=where,
    )
