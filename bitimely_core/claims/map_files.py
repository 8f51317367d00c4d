"""Opens the table of a PheCode map: a file, a member of an archive, or a file of an installed
package.

Archives and packages are read in place: nothing is extracted, nothing imported.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import polars as pl

from bitimely_core.claims.map_layouts import detect_layout
from bitimely_core.errors import Finding, Reason, UserError, input_error, safe_text, usage_error
from bitimely_core.formats import tables
from bitimely_core.formats.text import decode_table
from bitimely_core.store import storage
from bitimely_core.system_errors import raise_system_error

MAX_BYTES = 1 << 28  # bytes of a table when unpacked; the largest one in circulation has 30 MB
BLOCK = 1 << 20  # bytes
TABLE_ENDINGS = (".csv", ".csv.gz", ".parquet")
ARCHIVE_ENDINGS = (".zip", ".whl", ".tar.gz", ".tgz", ".tar")
PREFERRED_TABLE = "phecode12.csv"  # of an archive with several tables
PACKAGE = "phetk"  # has all published maps
PACKAGE_PREFIX = "pkg:"  # of the path of a file in an installed package
PHECODEX_LICENCE = "PhecodeX states no licence of its own; the package is under GPL-3.0"
PUBLISHED_MAPS = {  # name -> table of PheTK, and licence
    "phecode12": (
        "phecode12.csv",
        "PheCode 1.2: cite phewascatalog.org; the package is under GPL-3.0",
    ),
    "phecodex": ("phecodeX.csv", PHECODEX_LICENCE),
    "phecodex-who": ("phecodeX_WHO.csv", PHECODEX_LICENCE),
}
DOWNLOAD_HINT = (
    "Get the full PheCode 1.2 map with `pip download --no-deps phetk` and give the .whl file as "
    "--phecode-map"
)
UNREADABLE = (  # what archives and tables raise that are none
    pl.exceptions.PolarsError,
    OSError,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    tarfile.TarError,
    RuntimeError,
    LookupError,
    ValueError,
)


class MapSheet(NamedTuple):
    """A table as text."""

    name: str  # of the file, or of the member of an archive
    sha256: str  # of the file or the archive
    columns: dict[str, list[str]]  # lower-case name -> cells
    numbers: frozenset[str] = frozenset()  # columns that were stored as numbers
    # of a malformed record: raised only if this is the table to read
    fault: UserError | None = None


def locate_map(path: str) -> str:
    """Where the table of a published map is, given by its name; other paths stay as they are.

    It is in a wheel of PheTK in the current folder, else in the installed package. Raises
    UserError: not_found (exit 2) where it is in neither.
    """
    if path.lower() not in PUBLISHED_MAPS or Path(path).exists():
        return path
    member, licence = PUBLISHED_MAPS[path.lower()]
    if wheels := sorted(Path().glob(f"{PACKAGE}-*.whl")):
        return f"{wheels[-1]}/{member}"
    try:
        metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise usage_error(
            f"no {PACKAGE}-*.whl in the current folder, and the package {PACKAGE} is not installed",
            f"expected one of them for --phecode-map {path}",
            f"Get it with `pip download --no-deps {PACKAGE}` ({licence})",
            code=Reason.NOT_FOUND,
        ) from None
    return f"{PACKAGE_PREFIX}{PACKAGE}/{member}"


def is_map_path(path: str) -> bool:
    """Whether a located path is in a package, a file, or a member of a file."""
    return path.startswith(PACKAGE_PREFIX) or any(map(Path.is_file, _list_parents(path)))


def _list_parents(path: str) -> list[Path]:
    """A path and the folders above it; one of them may be an archive."""
    return [Path(path), *Path(path).parents]


def hash_map(path: str) -> str:
    """What identifies a map: as `hash_file_or_path`; of a published map its name with the hash of
    its wheel.
    """
    place = locate_map(path)
    if place == path:
        return hash_file_or_path(path)
    wheel = Path(place).parent
    return f"{path.lower()} {storage.hash_file(wheel) if wheel.is_file() else place}"


def hash_file_or_path(path: str) -> str:
    """SHA-256 of a file; the text of a path that is no file."""
    return storage.hash_file(Path(path)) if Path(path).is_file() else safe_text(path)


def open_sheet(path: str) -> MapSheet:
    """The table at a path, in an archive, or in an installed package. Raises UserError: not_found
    (exit 2), format, corrupt.
    """
    try:
        sheet = _open_package(path) if path.startswith(PACKAGE_PREFIX) else _open_file(path)
    except UNREADABLE as error:
        raise_system_error(error, path, stored=False)
        raise input_error(
            Reason.CORRUPT, f"cannot be read ({type(error).__name__})", file=path
        ) from None
    if sheet.fault:
        raise sheet.fault
    return sheet


def _open_file(path: str) -> MapSheet:
    """The table of a file, or of the archive that the path goes through."""
    place = next(filter(Path.is_file, _list_parents(path)), None)
    member = "/".join(Path(path).parts[len(place.parts) :]) if place else ""
    is_archive = place is not None and place.name.lower().endswith(ARCHIVE_ENDINGS)
    if place is None or (member and not is_archive):
        raise usage_error(
            "no such file", hint="Check the path of the map", code=Reason.NOT_FOUND, file=path
        )
    with place.open("rb") as stream:
        if zipfile.is_zipfile(stream):
            with zipfile.ZipFile(stream) as archive:
                names, digest = archive.namelist(), storage.hash_file(place)
                return _choose_member(path, names, archive.open, member, digest)
        stream.seek(0)
        if not is_archive:
            return _read_sheet(place.name, stream)
        data = io.BytesIO(_unpack(_read_limited(stream, place.name), place.name))
    with tarfile.open(fileobj=data, mode="r:") as archive:
        # opened as they are: a link of the same name is not followed
        items = {item.name: item for item in archive if item.isfile()}
        digest = storage.hash_file(place)
        return _choose_member(
            path, items, lambda name: archive.extractfile(items[name]), member, digest
        )


def _open_package(path: str) -> MapSheet:
    """A table among the files of an installed package, which is not imported."""
    package, _, member = path.removeprefix(PACKAGE_PREFIX).partition("/")
    try:
        files = metadata.distribution(package).files or []
    except metadata.PackageNotFoundError:
        raise usage_error(
            f"package {safe_text(package)} is not installed",
            hint=DOWNLOAD_HINT,
            code=Reason.NOT_FOUND,
        ) from None
    places = {str(file): Path(str(file.locate())) for file in files}
    return _choose_member(path, places, lambda name: places[name].open("rb"), member)


def _choose_member(
    path: str,
    names: Iterable[str],
    open_member: Callable[[str], Any],
    ending: str,
    digest: str | None = None,
) -> MapSheet:
    """The only map table of a collection of files, or the preferred one.

    `ending`: of its name; `digest`: of the collection, None where each file has its own. Raises
    UserError: format.
    """
    candidates = [
        name
        for name in sorted(names)
        if name.lower().endswith(TABLE_ENDINGS) and name.endswith(ending)
    ]
    maps = []
    for name in candidates:
        with open_member(name) as stream:
            sheet = _read_sheet(name, stream, digest)
        if detect_layout(sheet.columns) is not None:
            maps.append(sheet)
    maps = [sheet for sheet in maps if Path(sheet.name).name == PREFERRED_TABLE] or maps
    if len(maps) == 1:
        return maps[0]
    listed = ", ".join(safe_text(sheet.name) for sheet in maps[:5])
    listed = listed or f"{len(candidates)} other tables"
    raise input_error(
        Reason.FORMAT,
        f"holds {len(maps)} map tables" if maps else "holds no map table",
        f"found {listed}",
        "Give the map as ARCHIVE/member",
        file=path,
    )


def _read_sheet(name: str, stream: IO[bytes], digest: str | None = None) -> MapSheet:
    """The cells of a csv, csv.gz or Parquet file. A malformed record ends it, as its `fault`."""
    packed = _read_limited(stream, name)
    digest = digest or hashlib.sha256(packed).hexdigest()
    data = _unpack(packed, name)
    if data[:4] == b"PAR1":
        return _read_parquet(name, digest, data)
    header: tuple[str, ...] = ()
    records: list[tuple[str, ...]] = []
    fault = None
    try:
        # as published maps are: their codes are ASCII
        header, rows = tables.parse_table(decode_table(data, fallback="latin-1"))
        for row in rows:
            if isinstance(row, Finding):
                action = "Correct the table; none of it is used"
                raise input_error(row.code, row.problem, row.requirement, action, row=row.row)
            if any(row.cells):
                records.append(row.cells)
    except UserError as error:
        raise_system_error(error)
        error.file, fault = name, error
    columns = {
        column.lower(): [cells[i].strip() for cells in records] for i, column in enumerate(header)
    }
    return MapSheet(name, digest, columns, fault=fault)


def _unpack(data: bytes, name: str) -> bytes:
    """The content of a file that may be packed with gzip."""
    if data[:2] != b"\x1f\x8b":
        return data
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
        return _read_limited(stream, name)


def _read_limited(stream: IO[bytes] | gzip.GzipFile, name: str) -> bytes:
    """Everything, in pieces: one call with a limit reserves all of it."""
    blocks = islice(iter(lambda: stream.read(BLOCK), b""), MAX_BYTES // BLOCK + 1)
    data = b"".join(blocks)
    if len(data) > MAX_BYTES:
        raise input_error(
            Reason.EXPANSION_LIMIT,
            f"more than {MAX_BYTES} bytes",
            "expected a smaller map",
            file=name,
        )
    return data


def _read_parquet(name: str, digest: str, data: bytes) -> MapSheet:
    frame = pl.read_parquet(io.BytesIO(data))
    names = {column: column.strip().lower() for column in frame.columns}
    numbers = frozenset(names[column] for column, kind in frame.schema.items() if kind.is_numeric())
    columns = {
        name: frame[column].cast(pl.String).fill_null("").to_list()
        for column, name in names.items()
    }
    return MapSheet(name, digest, columns, numbers)
