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
from bitimely_core.progress import report_progress
from bitimely_core.store import locks, storage
from bitimely_core.system_errors import RETRY_HINT, find_folder, format_size, raise_system_error

StoreOptions = dict[str, Any]  # of a file system of fsspec

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
# names of errors and of their bases, and status of a web server, by what they mean
NO_ACCESS = {
    "PermissionError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "CredentialRetrievalError",
    "TokenRetrievalError",
    401,
    403,
}
ABSENT = {"FileNotFoundError", "NotADirectoryError", 404, 410}
TRANSIENT = {"OSError", "ClientError", "BotoCoreError", "FSTimeoutError"}
WEB_CLIENTS = ("aiohttp", "asyncio")  # modules of their errors
ABSENT_FILE = ("it is no longer there", "expected the file that was listed", RETRY_HINT)
ABSENT_FOLDER = (
    "there is no such folder",
    "expected the URL of a folder",
    "Check the path. Of a single file, give the folder that it lies in",
)
WEB, S3 = {"http", "https"}, {"s3", "s3a"}  # schemes
PACKAGES = {  # scheme -> what fsspec needs for it
    **dict.fromkeys(WEB, "aiohttp"),
    **dict.fromkeys(S3, "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs"), "adlfs"),
}

T = TypeVar("T")
RemoteEntry = tuple[str, str, Mapping[str, object], bool]
"""Of what a folder lists: name in the folder, path as the file system takes it, facts, whether it
is a folder.
"""


ListedFile = tuple[str, Mapping[str, object]]  # path and facts, as in `RemoteEntry`


class RemoteFile(NamedTuple):
    """A file behind the URL; `size` in bytes."""

    path: str  # as the file system of the URL takes it
    size: int
    version: str  # empty: not known


@dataclass(frozen=True)
class RemoteSource:
    """What a URL lists: files by relative POSIX path, and the faults of those not brought."""

    url: str  # without credentials
    opened: Any  # fsspec's file system
    scheme: str
    files: dict[str, RemoteFile] = field(default_factory=dict)
    rejected: dict[str, Finding] = field(default_factory=dict)

    @property
    def is_web(self) -> bool:
        """Whether a web server lists the files, without sizes."""
        return self.scheme in WEB

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    def locate(self, name: str) -> str:
        """The URL of a file or folder, without credentials."""
        return f"{self.url.rstrip('/')}/{name}" if name else self.url

    def stat(self, path: str) -> RemoteFile | None:
        """The file as it is now; None where its size is not stated."""
        options = {"refresh": True} if self.scheme in S3 else {}
        return _read_facts(path, self.opened.info(path, **options))


def is_url(source: str | Path | None) -> bool:
    """Whether a source is a URL and no path."""
    return isinstance(source, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", source) is not None


def is_remote(source: str | Path | None) -> bool:
    """Whether a source is a URL whose files are not on this machine."""
    return is_url(source) and not re.match(r"(?i)(file|local)://", str(source))


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


def list_remote(source: str, stop: StopFlag) -> RemoteSource:
    """The files behind a URL, with their sizes; only listings and headers are read.

    Raises UserError, see `open_source`.
    """
    remote, root = _connect(source)
    folders = {"": root}
    listed: dict[str, ListedFile] = {}  # name -> path, facts

    def list_folder(name: str) -> tuple[str, list[RemoteEntry]]:
        return name, _retry(partial(_list_folder, remote, folders[name]), remote, name, stop)

    def stat_page(name: str) -> tuple[str, RemoteFile | None]:
        return name, _retry(partial(remote.stat, listed[name][0]), remote, name, stop)

    # also of one request: a signal need not wait for its answer
    with ThreadPool(CONNECTIONS) as pool:
        while folders:
            inner_folders: dict[str, str] = {}
            for folder, entries in _watch(pool.imap(list_folder, folders), stop):
                _sort_entries(remote, folder, entries, listed, inner_folders)
            folders = inner_folders
        if remote.is_web:  # its listings have no sizes
            files = dict(_watch(pool.imap(stat_page, listed), stop))
        else:
            files = {name: _read_facts(*listed[name]) for name in listed}
    _select_files(remote, files)
    if not remote.files and not remote.rejected:
        raise input_error(
            Reason.NO_INPUT,
            "nothing is listed there",
            "expected a folder with files",
            "Check the URL",
            file=remote.url,
        )
    return remote


def _sort_entries(
    remote: RemoteSource,
    folder: str,
    entries: list[RemoteEntry],
    files: dict[str, ListedFile],
    folders: dict[str, str],
) -> None:
    """Add what `folder` lists to `files`, to `folders` or to what is not brought."""
    for name, path, facts, is_folder in entries:
        rel = folder + name
        if name.startswith(".") and name.strip("."):  # hidden, as in a local folder
            continue
        if fault := _find_name_fault(rel):
            remote.rejected[clean(rel)] = replace(fault, file=clean(rel))
        elif is_folder:
            folders[rel + "/"] = path
        else:
            files[rel] = path, facts
        if rel.count("/") >= MAX_DEPTH or len(files) + len(folders) > MAX_FILES:
            raise input_error(
                Reason.RESOURCE_LIMIT,
                f"lists more than {MAX_FILES:,} files, or folders {MAX_DEPTH} deep",
                "no data set has so many",
                "Give the folder of one",
                file=remote.url,
            )


def _connect(source: str) -> tuple[RemoteSource, str]:
    """The opened file system of a URL, and the path of the folder in it."""
    parts = split_url(source)
    assert parts is not None
    (scheme, user, rest), url = parts, hide_credentials(source)
    if "?" in rest or "::" in source:
        problem = "has a query" if "?" in rest else "is a chain of URLs"
        hint = "Give it without, credentials in the environment"
        raise usage_error(problem, "expected the URL of one folder", hint, file=url)
    try:
        import fsspec

        target, options = source, StoreOptions()
        if scheme in WEB:
            target = f"{scheme}://{rest.rstrip('/')}/"
            options = _make_web_options(user)
        elif scheme in S3:
            target = f"{scheme}://{rest.rstrip('/')}"
            options = _make_s3_options(user)
        elif scheme in {"gs", "gcs"}:
            options = {"use_listings_cache": False}
        schemes = set(fsspec.available_protocols()) - WRAPPERS
        if scheme not in schemes:
            raise unknown_name_error("scheme of a URL", scheme, schemes)
        opened, root = fsspec.core.url_to_fs(target, **options)
        opened.invalidate_cache()
    except ImportError as error:
        raise_system_error(error)
        raise _describe_missing(scheme) from None
    except UserError:
        raise
    except Exception as error:
        raise_system_error(error, stored=False)
        raise _describe_failure(error, url) from None
    return RemoteSource(url, opened, scheme), root


def _make_web_options(user: str) -> StoreOptions:
    """Options of fsspec for a web server; `user`: user information of the URL, often empty."""
    import aiohttp

    headers = {"Accept-Encoding": "identity"}
    if user:
        name, _, secret = map(unquote, user.partition(":"))
        headers["Authorization"] = f"Basic {b64encode(f'{name}:{secret}'.encode()).decode()}"
    return {
        "client_kwargs": {
            "trust_env": True,
            "headers": headers,
            "timeout": aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=30),
            "auto_decompress": False,  # nothing unpacks to more than was sent
        }
    }


def _make_s3_options(user: str) -> StoreOptions:
    """Options of fsspec for a bucket; `user`: user information of the URL, often empty.

    A public bucket is read without a signature where this machine has no credentials.
    """
    from botocore.session import get_session
    from fsspec.config import conf

    if find_spec("s3fs") is None:
        raise ImportError("s3fs")
    config = {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 1}}
    options: StoreOptions = {"config_kwargs": config}
    if user:
        options["key"], _, options["secret"] = map(unquote, user.partition(":"))
    elif not conf.get("s3") and get_session().get_credentials() is None:
        options["anon"] = True
    return options


def _describe_missing(scheme: str) -> UserError:
    package = PACKAGES.get(scheme, "a further package")
    hint = f"Install {package}, see fsspec"
    if scheme in WEB | S3:
        hint = "Install it with `pip install 'bitimely[s3]'`"
    problem = f"{scheme}:// needs {package}, which is not installed"
    return usage_error(problem, hint=hint, code=Reason.MISSING_EXTRA)


def _list_folder(remote: RemoteSource, path: str) -> list[RemoteEntry]:
    """What a folder lists."""
    if remote.is_web:
        return _list_page(remote.opened, path)
    entries = []
    base = path.rstrip("/") + "/" if path.strip("/") else path
    listed = remote.opened.ls(path, detail=True)
    for facts in listed:
        inner, is_folder = str(facts["name"]), facts["type"] == "directory"
        is_marker = inner.endswith("/") and not is_folder
        if inner.rstrip("/") == path.rstrip("/"):  # the folder itself
            if facts["type"] == "file" and len(listed) == 1 and not is_marker:
                raise input_error(
                    Reason.NO_INPUT,
                    "is a file",
                    "a folder was expected",
                    "Give the folder that holds it",
                    file=remote.url,
                )
        elif not is_marker:
            entries.append((inner.removeprefix(base).removesuffix("/"), inner, facts, is_folder))
    return entries


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
    base, text = _read_page(opened, url)
    entries: dict[str, RemoteEntry] = {}
    for link in _PageLinks(text).links:
        target = _resolve_link(link, url, base)
        if target.startswith(url) and target != url:
            name = target.removeprefix(url)
            entries[target] = (unquote(name).removesuffix("/"), target, {}, name.endswith("/"))
    return [entry for entry in entries.values() if entry[0] != ".."]  # the folder above


def _read_page(opened: Any, url: str) -> tuple[str, str]:
    """The URL that answers for `url` after redirections, and the text of the page, if it is one."""
    with opened.open(url, "rb", block_size=0, size=1) as page:  # a size saves a request
        base = urljoin(str(page.r.url), ".")
        if page.r.headers.get("Content-Type", "text/html").partition(";")[0] != "text/html":
            return base, ""
        text = bytearray()
        while block := page.read(CHUNK):
            text += block
            if len(text) > MAX_PAGE:
                problem = f"a listing of more than {format_size(MAX_PAGE)}"
                raise input_error(Reason.RESOURCE_LIMIT, problem, file=url)
    return base, text.decode(errors="replace")


def _resolve_link(link: str, url: str, base: str) -> str:
    """The target of a link of the page `url`, which `base` has answered.

    What is below `base` is asked for below `url`, where it is redirected too. Empty for another
    order of the same page.
    """
    if re.search(r"[?#]", link):
        return ""
    if not re.match(r"[A-Za-z][\w+.-]*:|/", link):
        return url + link.removeprefix("./")
    target = urljoin(base, link)
    if not target.startswith(url) and target.startswith(base):
        return url + target.removeprefix(base)
    return target


def _read_facts(path: str, facts: Mapping[str, object]) -> RemoteFile | None:
    size = facts.get("size")
    if not isinstance(size, int) or size < 0 or facts.get("type", "file") != "file":
        return None
    versions = (str(facts[key]).strip('"') for key in VERSIONS if facts.get(key))
    return RemoteFile(path, size, next(versions, ""))


def _find_name_fault(name: str) -> Finding | None:
    """Why a remote name is not used as a path."""
    parts = name.split("/")
    leaves = any(part and not part.strip(". ") for part in parts)
    if leaves or name.startswith("/") or "\\" in name:
        code, requirement = Reason.PATH_ESCAPE, "which may leave the folder"
    elif (
        not name.isprintable()
        or "" in parts
        or any(len(part.encode(errors="replace")) > 200 for part in parts)
        or len(name) > 1000
    ):
        code, requirement = Reason.FILE_NAME, "which cannot be the name of a file here"
    else:
        return None
    return Finding(code, f"a file is called {safe_text(name)}", requirement, "It is not read")


def _select_files(remote: RemoteSource, listed: Mapping[str, RemoteFile | None]) -> None:
    """Add the files of a listing that can lie in one folder to the source, others to its faults.

    Names that are equal but for case or accents, or a file's and a folder's, cannot.
    """
    owners: dict[str, list[str]] = {}
    folders = set()
    for name in listed:
        owners.setdefault(_fold(name), []).append(name)
        depths = range(1, name.count("/") + 1)
        folders |= {_fold(name.rsplit("/", depth)[0]) for depth in depths}
    for folded, names in sorted(owners.items()):
        for name in names:
            file = listed[name]
            if len(names) > 1 or folded in folders:
                other = next((other for other in names if other != name), f"the folder {name}")
                problem = f"has the name of {safe_text(other)} where case and accents do not count"
                remote.rejected[name] = Finding(
                    Reason.DUPLICATE_KEY, problem, "neither is read", "Rename one", file=name
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
                for _ in _watch(finished, self.stop):
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
            now = _retry(partial(self.remote.stat, file.path), self.remote, name, self.stop)
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
                fault = _describe_failure(error, self.remote.locate(name), is_file=True)
                tries = TRIES if part.stat().st_size > before else tries - 1
                if not tries or fault.exit_code != Exit.RESOURCES or isinstance(error, UserError):
                    raise fault from None
                if type(error).__name__ == "FileExpired":
                    return ""  # another version, which `_bring` finds
            _wait_between_tries(TRIES - tries, self.stop)

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
            raise _EndedEarlyError
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
    while (rest := until - time.monotonic()) > 0:
        stop.check()
        time.sleep(min(rest, 0.2))


def _retry(call: Callable[[], T], remote: RemoteSource, name: str, stop: StopFlag) -> T:
    """The result of `call`, tried a few times where the server or the network fails.

    `name`: the file or folder that it asks for. Raises UserError.
    """
    for count in range(1, TRIES + 1):
        stop.check()
        try:
            return call()
        except UserError:
            raise
        except Exception as error:
            raise_system_error(error, stored=False)
            is_file = name != "" and not name.endswith("/")
            fault = _describe_failure(error, remote.locate(name), is_file=is_file)
            if count == TRIES or fault.exit_code != Exit.RESOURCES:
                raise fault from None
        _wait_between_tries(count, stop)
    raise AssertionError


def _describe_failure(error: BaseException, url: str, *, is_file: bool = False) -> UserError:
    """An error of a remote file system; exit 6 where another try may succeed.

    Its text is not shown: it may hold credentials. `is_file`: `url` is a file that was listed.
    """
    if isinstance(error, UserError):
        return error
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and type(cause).__module__.startswith(WEB_CLIENTS):
        assert cause is not None
        error = cause  # fsspec gives every failure of a web server that name
    status = getattr(error, "status", 0)
    signs = {kind.__name__ for kind in type(error).__mro__} | {status}
    if signs & NO_ACCESS:
        return input_error(
            Reason.IO_ERROR,
            "no permission",
            "expected to be allowed to list and read it",
            "Give credentials in the environment, as its own tools take them",
            file=url,
        )
    if signs & ABSENT:
        problem, requirement, hint = ABSENT_FILE if is_file else ABSENT_FOLDER
        return usage_error(problem, requirement, hint, code=Reason.NOT_FOUND, file=url)
    if _is_transient(error, signs, status):
        problem = "the server does not answer"
        if isinstance(error, _EndedEarlyError):
            problem = "ends before the size that the server states"
        tried, hint = f"tried {TRIES} times", f"Check the network. {RETRY_HINT}"
        return UserError(Reason.IO_ERROR, problem, tried, hint, url, exit_code=Exit.RESOURCES)
    return input_error(
        Reason.IO_ERROR,
        f"the server refuses the request ({status or type(error).__name__})",
        "expected a folder that can be listed",
        "Check the URL",
        file=url,
    )


def _is_transient(error: BaseException, signs: set[str | int], status: int) -> bool:
    """Whether another try may succeed."""
    if "FileExpired" in signs:
        return True
    if 400 <= status < 500 and status not in TRANSIENT_STATUS:
        return False
    return bool(signs & TRANSIENT) and getattr(error, "errno", None) not in REFUSALS
