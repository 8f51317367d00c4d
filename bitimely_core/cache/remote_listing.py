"""Lists the files behind a URL: of object stores, and of web servers by links of their pages."""

from __future__ import annotations

import re
import unicodedata
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from importlib.util import find_spec
from multiprocessing.pool import ThreadPool
from typing import Any
from urllib.parse import unquote, urljoin

from bitimely_core.cache.remote_errors import describe_failure, retry, watch
from bitimely_core.cache.remote_files import S3, WEB, RemoteFile, RemoteSource, read_facts
from bitimely_core.cache.workers import StopFlag
from bitimely_core.errors import (
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
from bitimely_core.system_errors import format_size, raise_system_error

StoreOptions = dict[str, Any]  # of a file system of fsspec
CONNECTIONS = 8
# bytes a request of an object store, and the most that is lost when a connection breaks
CHUNK = 8 << 20
MAX_FILES = 1_000_000
MAX_DEPTH = 32  # folders
MAX_PAGE = 64 << 20  # bytes of a listing of a web server
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
PACKAGES = {  # scheme -> what fsspec needs for it
    **dict.fromkeys(WEB, "aiohttp"),
    **dict.fromkeys(S3, "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs"), "adlfs"),
}
RemoteEntry = tuple[str, str, Mapping[str, object], bool]
"""Of what a folder lists: name in the folder, path as the file system takes it, facts, whether it
is a folder.
"""
ListedFile = tuple[str, Mapping[str, object]]  # path and facts, as in `RemoteEntry`


def list_remote(source: str, stop: StopFlag) -> RemoteSource:
    """The files behind a URL, with their sizes; only listings and headers are read.

    Raises UserError, see `open_source`.
    """
    remote, root = _connect(source)
    folders = {"": root}
    listed: dict[str, ListedFile] = {}  # name -> path, facts

    def list_folder(name: str) -> tuple[str, list[RemoteEntry]]:
        return name, retry(partial(_list_folder, remote, folders[name]), remote, name, stop)

    def stat_page(name: str) -> tuple[str, RemoteFile | None]:
        return name, retry(partial(remote.stat, listed[name][0]), remote, name, stop)

    # also of one request: a signal need not wait for its answer
    with ThreadPool(CONNECTIONS) as pool:
        while folders:
            inner_folders: dict[str, str] = {}
            for folder, entries in watch(pool.imap(list_folder, folders), stop):
                _sort_entries(remote, folder, entries, listed, inner_folders)
            folders = inner_folders
        if remote.is_web:  # its listings have no sizes
            files = dict(watch(pool.imap(stat_page, listed), stop))
        else:
            files = {name: read_facts(*listed[name]) for name in listed}
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

        target, options = _choose_target(source, scheme, user, rest.rstrip("/"))
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
        raise describe_failure(error, url) from None
    return RemoteSource(url, opened, scheme), root


def _choose_target(source: str, scheme: str, user: str, rest: str) -> tuple[str, StoreOptions]:
    """What fsspec opens for a URL, and its options; `rest`: behind the scheme and the user."""
    if scheme in WEB:
        return f"{scheme}://{rest}/", _make_web_options(user)
    if scheme in S3:
        return f"{scheme}://{rest}", _make_s3_options(user)
    if scheme in {"gs", "gcs"}:
        return source, {"use_listings_cache": False}
    return source, {}


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
