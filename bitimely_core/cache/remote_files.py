"""The files behind a URL, as its file system states them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bitimely_core.errors import Finding

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
WEB, S3 = {"http", "https"}, {"s3", "s3a"}  # schemes


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
        return read_facts(path, self.opened.info(path, **options))


def is_url(source: str | Path | None) -> bool:
    """Whether a source is a URL and no path."""
    return isinstance(source, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", source) is not None


def is_remote(source: str | Path | None) -> bool:
    """Whether a source is a URL whose files are not on this machine."""
    return is_url(source) and not re.match(r"(?i)(file|local)://", str(source))


def read_facts(path: str, facts: Mapping[str, object]) -> RemoteFile | None:
    """A file by what its file system states of it; None where it has no size."""
    size = facts.get("size")
    if not isinstance(size, int) or size < 0 or facts.get("type", "file") != "file":
        return None
    versions = (str(facts[key]).strip('"') for key in VERSIONS if facts.get(key))
    return RemoteFile(path, size, next(versions, ""))
