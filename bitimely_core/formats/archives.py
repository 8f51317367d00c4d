"""Reads the members of zip and tar archives, one by one into memory.

Nothing is unpacked to disk, and no member's name is used as a path. An archive is foreign data: it
may hold links, devices, paths that lead elsewhere, and far more bytes than it has. All of it is
refused before it costs memory: an archive unpacks to at most `MAX_EXPANDED` bytes or `MAX_RATIO`
times its size, a member to at most `MAX_MEMBER`.
"""

from __future__ import annotations

import gzip
import io
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from bitimely_core.errors import Reason, UserError, input_error, safe_text
from bitimely_core.formats.source import leaves_folder, translate_read_errors
from bitimely_core.system_errors import raise_system_error

# bytes that an archive may always hold; beyond it at most MAX_RATIO times its size
MAX_EXPANDED = 1 << 26
MAX_RATIO = 50
MAX_MEMBER = 1 << 24  # bytes
MAX_MEMBERS = 100_000
EXPECTED = "expected a plain .zip, .tar or .tar.gz"
DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    struct.error,
    LookupError,
    ValueError,
    OverflowError,
)


class ArchiveMember(NamedTuple):
    """A file of an archive."""

    name: str  # POSIX path inside of the archive
    size: int  # bytes, as its header states
    read: Callable[[], bytes]  # only until the next member is asked for


def read_members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of the files of a .zip, .tar or .tar.gz, in their order.

    Folders and what macOS adds are passed over.

    Raises UserError: path_escape for a name that leads out of the archive; unsupported_format for
    links, devices, encryption and packings that are not read; duplicate_key for two files of one
    name; expansion_limit, resource_limit; corrupt, truncated, io_error.
    """
    with translate_read_errors(path):
        limit = max(MAX_EXPANDED, MAX_RATIO * path.stat().st_size)
        try:
            with path.open("rb") as packed, closing(_list_members(packed, limit)) as members:
                yield from _check_members(members, limit)
        except (EOFError, zipfile.LargeZipFile):
            raise input_error(Reason.TRUNCATED, "the archive ends early") from None
        except RuntimeError as error:  # of zipfile, for what it cannot unpack
            raise_system_error(error, path, stored=False)
            raise packing_error(EXPECTED) from None
        except DAMAGED as error:
            raise_system_error(error, path, stored=False)
            raise input_error(Reason.CORRUPT, "the archive is damaged") from None


def _check_members(members: Iterator[ArchiveMember], limit: int) -> Iterator[tuple[str, bytes]]:
    names: set[str] = set()
    total = 0
    for member in members:
        path = PurePosixPath(member.name.replace("\\", "/"))
        if path.parts[:1] == ("__MACOSX",) or path.name.startswith("._"):
            continue
        if leaves_folder(str(path)):
            raise input_error(
                Reason.PATH_ESCAPE,
                f"holds the name {safe_text(member.name)}",
                "which must lie inside of the archive",
            )
        if member.name in names:
            problem = f"holds {safe_text(member.name)} twice"
            raise input_error(Reason.DUPLICATE_KEY, problem, "expected each file once")
        names.add(member.name)
        total += member.size
        if member.size > MAX_MEMBER:
            raise _expansion_error(f"{min(limit, MAX_MEMBER)} bytes")
        if total > limit:
            raise _expansion_error(f"{limit} bytes")
        if len(names) > MAX_MEMBERS:
            problem = f"holds more than {MAX_MEMBERS} files"
            raise input_error(Reason.RESOURCE_LIMIT, problem, "no data set has so many")
        yield path.as_posix(), member.read()


def _expansion_error(size: str) -> UserError:
    problem = f"unpacks to more than {size}"
    return input_error(Reason.EXPANSION_LIMIT, problem, "no data set is compressed that well")


def _list_members(packed: io.BufferedReader, limit: int) -> Generator[ArchiveMember, None, None]:
    head = packed.peek(4)[:4]
    if not head:
        raise input_error(Reason.EMPTY_FILE, "has 0 bytes")
    if head[:2] == b"PK":
        yield from _list_zip(packed)
    elif head[:2] == b"\x1f\x8b":
        with gzip.GzipFile(fileobj=packed) as unpacked:
            yield from _list_tar(BoundedReader(unpacked, limit))
    else:
        yield from _list_tar(BoundedReader(packed, limit))


def _list_zip(packed: BinaryIO) -> Iterator[ArchiveMember]:
    with zipfile.ZipFile(packed) as archive:
        for info in archive.infolist():
            mode = stat.S_IFMT(info.external_attr >> 16)
            if info.is_dir():
                continue
            if mode not in {0, stat.S_IFREG}:
                raise _special_file_error(info.filename)
            if not can_unpack(info):
                raise packing_error(EXPECTED)
            read = partial(_read_zip_member, archive, info)
            yield ArchiveMember(info.filename, info.file_size, read)


def can_unpack(info: zipfile.ZipInfo) -> bool:
    """Whether a file of a zip archive is neither encrypted nor packed in an unusual way."""
    return not info.flag_bits & 1 and info.compress_type in {
        zipfile.ZIP_STORED,
        zipfile.ZIP_DEFLATED,
    }


def packing_error(expected: str) -> UserError:
    """The error of an archive that cannot be unpacked."""
    problem = "is an archive that is encrypted or packed in an unusual way"
    return input_error(Reason.UNSUPPORTED_FORMAT, problem, expected)


def _read_zip_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    # without a number of bytes it would allocate what the header states of the packed ones
    with archive.open(info) as file:
        return file.read(info.file_size)


def _list_tar(stream: BoundedReader) -> Iterator[ArchiveMember]:
    file_object: Any = stream  # it needs no more than `read`
    with tarfile.open(fileobj=file_object, mode="r|") as archive:
        for info in archive:
            if info.isdir():
                continue
            if not info.isreg() or info.issparse():
                raise _special_file_error(info.name)
            file = archive.extractfile(info)
            assert file is not None
            yield ArchiveMember(info.name, info.size, file.read)
    while stream.read(1 << 16):  # to the checksum at the end
        pass


def _special_file_error(name: str) -> UserError:
    text = f"holds {safe_text(name)}, which is no regular file"
    return input_error(Reason.UNSUPPORTED_FORMAT, text, "expected files and folders alone")


class BoundedReader:
    """A stream that ends with an error when more than `limit` bytes were read.

    Raises UserError: expansion_limit.
    """

    def __init__(self, stream: BinaryIO | gzip.GzipFile, limit: int) -> None:
        self.stream, self.allowed = stream, limit

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes."""
        data: bytes = self.stream.read(size)
        self.allowed -= len(data)
        if self.allowed < 0:
            raise _expansion_error("it should")
        return data
