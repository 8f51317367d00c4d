"""Members of zip and tar archives, read one by one into memory: nothing is unpacked to disk, and no
member's name is used as a path.

An archive is foreign data: it may hold links, devices, paths that lead elsewhere, and far more
bytes than it has. All of it is refused before
it costs memory: an archive unpacks to at most `MAX_EXPANDED` bytes or `MAX_RATIO` times its size, a
member to at most `MAX_MEMBER`.
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
from typing import BinaryIO, NamedTuple

from bitimely_core.errors import Reason, UserError, input_error, safe_text
from bitimely_core.system_errors import raise_system_error

# bytes that an archive may always hold; beyond it at most MAX_RATIO times its size
MAX_EXPANDED = 1 << 26
MAX_RATIO = 50
MAX_MEMBER = 1 << 24  # bytes
MAX_MEMBERS = 100_000
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
    """(name, content) of the files of a .zip, .tar or .tar.gz, in their order; folders and what
    macOS adds are passed over.

    Raises UserError: path_escape for a name that leads out of the archive; unsupported_format for
    links, devices, encryption and packings that are not read; duplicate_key for two files of one
    name; expansion_limit, resource_limit; corrupt, truncated, io_error.
    """
    hint = "Download it again"
    try:
        size = path.stat().st_size
        with (
            path.open("rb") as packed,
            closing(_list_members(packed, max(MAX_EXPANDED, MAX_RATIO * size))) as members,
        ):
            yield from _check_members(members, max(MAX_EXPANDED, MAX_RATIO * size))
    except (EOFError, zipfile.LargeZipFile):
        raise input_error(
            Reason.TRUNCATED, "the archive ends early", hint=hint, file=str(path)
        ) from None
    except RuntimeError as error:  # of zipfile, for what it cannot unpack
        raise_system_error(error, path, stored=False)
        raise _unusual_error(str(path)) from None
    except DAMAGED as error:
        raise_system_error(error, path, stored=False)
        raise input_error(
            Reason.CORRUPT, "the archive is damaged", hint=hint, file=str(path)
        ) from None
    except OSError as error:
        raise_system_error(error, path, stored=False)
        raise input_error(
            Reason.IO_ERROR, f"cannot be read ({error.strerror})", file=str(path)
        ) from None
    except UserError as error:
        error.file = error.file or str(path)
        raise


def _check_members(members: Iterator[ArchiveMember], limit: int) -> Iterator[tuple[str, bytes]]:
    names: set[str] = set()
    total = 0
    for member in members:
        where = PurePosixPath(member.name.replace("\\", "/"))
        if where.parts[:1] == ("__MACOSX",) or where.name.startswith("._"):
            continue
        if where.is_absolute() or ".." in where.parts:
            raise input_error(
                Reason.PATH_ESCAPE,
                f"holds the name {safe_text(member.name)}",
                "which must lie inside of the archive",
            )
        if member.name in names:
            raise input_error(
                Reason.DUPLICATE_KEY,
                f"holds {safe_text(member.name)} twice",
                "expected each file once",
            )
        names.add(member.name)
        total += member.size
        if total > limit or member.size > MAX_MEMBER:
            text = f"unpacks to more than {min(limit, MAX_MEMBER) if member.size > MAX_MEMBER else limit} bytes"
            raise input_error(Reason.EXPANSION_LIMIT, text, "no data set is compressed that well")
        if len(names) > MAX_MEMBERS:
            raise input_error(
                Reason.RESOURCE_LIMIT,
                f"holds more than {MAX_MEMBERS} files",
                "no data set has so many",
            )
        yield where.as_posix(), member.read()


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
            if info.flag_bits & 1 or info.compress_type not in {
                zipfile.ZIP_STORED,
                zipfile.ZIP_DEFLATED,
            }:
                raise _unusual_error()
            yield ArchiveMember(
                info.filename, info.file_size, partial(_read_zip_member, archive, info)
            )


def _unusual_error(file: str | None = None) -> UserError:
    text = "is an archive that is encrypted or packed in an unusual way"
    return input_error(
        Reason.UNSUPPORTED_FORMAT, text, "expected a plain .zip, .tar or .tar.gz", file=file
    )


def _read_zip_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    # without a number of bytes it would allocate what the header states of the packed ones
    with archive.open(info) as file:
        return file.read(info.file_size)


def _list_tar(stream: BoundedReader) -> Iterator[ArchiveMember]:
    with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]  # it needs no more than `read`
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
    """A stream that ends with an error when more than `limit` bytes were read. Raises UserError:
    expansion_limit.
    """

    def __init__(self, stream: BinaryIO | gzip.GzipFile, limit: int) -> None:
        self.stream, self.left = stream, limit

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes."""
        data: bytes = self.stream.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise input_error(
                Reason.EXPANSION_LIMIT,
                "unpacks to more bytes than it should",
                "no data set is compressed that well",
            )
        return data
