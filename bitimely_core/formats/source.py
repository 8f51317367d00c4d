"""The files of a raw folder: regular ones with their sizes, the others with the reason why they are
not read.

No file is opened for that. What bitimely wrote is no source: caches, tokens, runs, reports and
exports of any workspace, its page and its key.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import NamedTuple

from bitimely_core.errors import (
    Finding,
    Place,
    Reason,
    UserError,
    clean,
    input_error,
    input_warning,
    safe_text,
    usage_error,
)
from bitimely_core.store import storage
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import group_by

RECORDING_SUFFIXES = (".edf", ".bdf", ".hea", ".dat")  # a folder with such a name is not entered
ARCHIVE_SUFFIXES = (
    ".zip",
    ".tar",
    ".tgz",
    ".tbz2",
    ".txz",
    ".gz",
    ".bz2",
    ".xz",
    ".zst",
    ".7z",
    ".rar",
)
STORED = {  # file of bitimely -> a key that it holds
    "manifest.json": b'"manifest_sha256"',
    "ingest_report.json": b'"bitimely.',
    "run.json": b'"leak_free"',
    "stage.json": b'"stage"',
    "summary.json": b'"verdict"',
}
# one of them beside a lock: work that was stopped
UNFINISHED = {".progress", ".parts", "run.json", "manifest.json"}
# of a workspace; the text is among its first bytes
PAGE = "index.html", b'name="generator" content="bitimely '
CHECKSUM_FILE = "SHA256SUMS.txt"
CHECKSUM_LINE = re.compile(r"([0-9A-Fa-f]{64}) +\*?(?:\./)?(\S.*)")  # as sha256sum writes it
NO_HINTS: Mapping[str, str] = MappingProxyType({})
MAX_LISTED = 5  # faulty lines named one by one
KEY_FILES = {"id.key": 32, "id.key.sha256": 73}  # name -> bytes


@dataclass(frozen=True)
class Source:
    """A raw folder."""

    root: Path
    files: dict[str, int]  # path, relative and POSIX -> bytes
    rejected: dict[str, Finding]  # path that must not be opened -> the reason

    def lists(self, rel: str) -> bool:
        """Whether a file of this path, in POSIX form, is there, be it one that is not read."""
        return rel in self.files or rel in self.rejected

    def path(self, rel: str, hint: str | None = None) -> Path:
        """Absolute path of a file of this source; `hint`: what to do where it is missing.

        `rel`, a POSIX path, may have been read in a file, hence is not trusted. Raises UserError:
        path_escape for a path that leaves the root, the reason in `rejected`, or
        missing_signal_file.
        """
        pure = PurePosixPath(rel)
        if leaves_folder(rel):
            raise input_error(
                Reason.PATH_ESCAPE,
                f"names the file {safe_text(rel)}",
                "which must be inside the data set's folder",
            )
        name = pure.as_posix()
        if name in self.rejected:
            raise finding_to_error(self.rejected[name])
        if name not in self.files:
            problem = f"the file {safe_text(rel)} is missing"
            raise input_error(Reason.MISSING_SIGNAL_FILE, problem, "", hint)
        return self.root / name


def leaves_folder(name: str) -> bool:
    """Whether a path of a file may lead out of its folder."""
    pure = PurePosixPath(name)
    return pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name


def finding_to_error(finding: Finding) -> UserError:
    """A finding as the error that quarantines its unit."""
    place = {name: getattr(finding, name) for name in Place.__annotations__}
    return UserError(finding.code, finding.problem, finding.requirement, finding.hint, **place)


def compare_copies(copies: Sequence[tuple[str, Hashable]], name: str = "") -> list[Finding]:
    """Findings on several files that hold the same thing.

    Where all are equal the first is used: a warning for each of the others. Where they differ none
    is used, since the right one is unknown: an error for each.

    Args:
        copies: each file with its content, or with a hash of it.
        name: of the thing, where its files hold others too.
    """
    files = [file for file, _ in copies]
    if len({content for _, content in copies}) > 1:
        text = f"{name} is there {len(files)} times, with different contents".lstrip()
        return [
            Finding(
                Reason.DUPLICATE_KEY,
                text,
                "none of them is used",
                "Remove the wrong ones",
                file=file,
            )
            for file in files
        ]
    first = safe_text(files[0])
    text = f"{name} here is a copy of that in {first}" if name else f"is a copy of {first}"
    return [input_warning(Reason.DUPLICATES, text, "used once", file=file) for file in files[1:]]


def choose_copy(
    source: Source, rels: Sequence[str], read: Callable[[str], Hashable] | None = None
) -> tuple[str, list[Finding]]:
    """The first of the files of one name, and findings on the others.

    The findings are those of `compare_copies`, or say why a file cannot be compared. `read` gives
    the content of a file; None: its SHA-256.
    """
    faults = [source.rejected[rel] for rel in rels if rel in source.rejected]
    if faults or len(rels) == 1:
        return rels[0], faults
    copies: list[tuple[str, Hashable]] = []
    for rel in rels:
        try:
            with translate_read_errors(rel):
                copies.append((rel, read(rel) if read else storage.hash_file(source.path(rel))))
        except UserError as error:
            raise_system_error(error)
            return rels[0], [error.finding]
    return rels[0], compare_copies(copies)


@contextmanager
def locate_errors(file: str | Path, *, replace: bool = True) -> Iterator[None]:
    """Errors that leave this block name `file`; without `replace` only those that name none."""
    try:
        yield
    except UserError as error:
        error.file = str(file) if replace or not error.file else error.file
        raise


@contextmanager
def translate_read_errors(path: Path | str, name: str = "") -> Iterator[None]:
    """An OSError in this block becomes a UserError: io_error, or a fault of the machine (exit 6).

    Errors that leave the block and name no file name `path`. `name`, as a header has it, is said
    where the message is about another file.
    """
    try:
        yield
    except OSError as error:
        raise_system_error(error, path, stored=False)
        what = f"{safe_text(name)} cannot" if name else "cannot"
        problem = f"{what} be read ({error.strerror})"
        raise input_error(Reason.IO_ERROR, problem, file=str(path)) from None
    except UserError as error:
        error.file = error.file or str(path)
        raise


def scan_folder(root: Path, *, follow_symlinks: bool = False, is_flat: bool = False) -> Source:
    """All files under `root`, recursively, by `lstat` alone.

    Hidden names are skipped, and what bitimely wrote (`is_own_folder`).

    Args:
        root: a folder.
        follow_symlinks: also follow links that leave the root (links to files inside of it are
            always followed).
        is_flat: only the files of the folder itself.

    Returns:
        The source, both dictionaries sorted by path. Pipes, devices, sockets, links that leave the
        root or are broken, folders that cannot be listed or that have a recording's name, and names
        that are not valid UTF-8 are in `rejected`.

    Raises:
        UserError: not_found or no_input when `root` is no folder, unsupported_format for an
            archive, not_regular_file for a pipe or device.
    """
    root = Path(root)
    _require_folder(root)
    files: dict[str, int] = {}
    rejected: dict[str, Finding] = {}
    real = root.resolve()
    visited: set[tuple[int, int]] = set()
    written: dict[Path, bool] = {}
    pending = [""]
    while pending:
        folder = pending.pop()
        entries = _list_entries(root, folder, visited)
        if isinstance(entries, Finding):
            rejected[entries.file or folder] = entries
            continue
        for name in entries:
            rel = folder + name
            info = _inspect_entry(root / rel, rel, real, written, follow=follow_symlinks)
            if isinstance(info, Finding):
                rejected[info.file or rel] = info
            elif info is not None and stat.S_ISDIR(info.st_mode):
                pending.append(rel + "/")
            elif info is not None:
                files[rel] = info.st_size
        if is_flat:
            break
    return Source(root, dict(sorted(files.items())), dict(sorted(rejected.items())))


def _require_folder(root: Path) -> None:
    """Raises UserError for what is no folder, as `scan_folder`."""
    try:
        mode = root.stat().st_mode
    except OSError as error:
        raise_system_error(error, root, stored=False)
        missing = isinstance(error, FileNotFoundError)
        text = "no such folder" if missing else f"cannot be read ({error.strerror})"
        raise usage_error(
            text, hint="Check the path", code=Reason.NOT_FOUND, file=str(root)
        ) from None
    if stat.S_ISDIR(mode):
        return
    code, problem, hint = Reason.NO_INPUT, "is a file", "Give the folder that holds it"
    if not stat.S_ISREG(mode):
        code, problem = Reason.NOT_REGULAR_FILE, f"is a {_describe_mode(mode)}"
        hint = "Give a folder"
    elif root.suffix.lower() in ARCHIVE_SUFFIXES:
        code, problem = Reason.UNSUPPORTED_FORMAT, "is an archive"
        hint = "Unpack it and give the folder"
    raise input_error(code, problem, "a folder was expected", hint, file=str(root))


def _list_entries(root: Path, folder: str, visited: set[tuple[int, int]]) -> list[str] | Finding:
    """The names in a folder, sorted, or why it cannot be listed.

    None for a folder that bitimely wrote, and none for one that was visited before.
    """
    path = root / folder
    try:
        info = path.stat()
        if (info.st_dev, info.st_ino) in visited:  # only links can lead there twice
            return []
        visited.add((info.st_dev, info.st_ino))
        names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise_system_error(error, path, stored=False)
        problem = f"the folder cannot be listed ({error.strerror})"
        return Finding(Reason.IO_ERROR, problem, file=folder.rstrip("/") or ".")
    return [] if folder and is_own_folder(path) else names


def is_own_folder(folder: Path) -> bool:
    """Whether bitimely wrote `folder`: a cache, token set, run, stage, report or export.

    It may be unfinished.
    """
    try:
        names = {path.name for path in folder.iterdir()}
        if ".lock" in names and (
            names & UNFINISHED or folder.parent.name in {"cache", "tokens", "runs"}
        ):
            return True
        return any(
            key in (folder / name).read_bytes() for name, key in STORED.items() if name in names
        )
    except OSError as error:
        raise_system_error(error, folder, stored=False)
        return False


def is_own_page(path: Path) -> bool:
    """Whether `path` is the page of a workspace."""
    name, mark = PAGE
    try:
        if path.name != name or not path.is_file():
            return False
        with path.open("rb") as file:
            return mark in file.read(2000)
    except OSError as error:
        raise_system_error(error, path, stored=False)
        return False


def _leads_to_own_folder(link: Path, real: Path, written: dict[Path, bool]) -> bool:
    """Whether a link leads into a folder of bitimely; `written` holds the folders seen before."""
    try:
        target = link.resolve()
    except (OSError, RuntimeError) as error:
        raise_system_error(error, link, stored=False)
        return False  # the caller finds out why
    if is_own_page(target):
        return True
    if target.name in KEY_FILES and target.is_file():
        return target.stat().st_size == KEY_FILES[target.name]
    for folder in target.parents:
        if folder == real:
            return False
        if folder not in written:
            written[folder] = is_own_folder(folder)
        if written[folder]:
            return True
    return False


def _inspect_entry(
    path: Path, rel: str, real: Path, written: dict[Path, bool], *, follow: bool
) -> os.stat_result | Finding | None:
    """The state of a regular file or of a folder to descend into, or why the entry is not read.

    None for what bitimely wrote, and for a link to a folder of this root, which is found anyway.
    """
    try:
        rel.encode()
        state = path.lstat()
        info: os.stat_result | Finding | None = state
        if stat.S_ISLNK(state.st_mode):
            info = _follow_link(path, rel, real, written, follow=follow)
    except UnicodeEncodeError:
        return input_warning(
            Reason.FILE_NAME, "the name is not valid UTF-8, the file is not read", file=clean(rel)
        )
    except (OSError, RuntimeError) as error:
        raise_system_error(error, path, stored=False)
        why = getattr(error, "strerror", None) or "loop of links"  # a RuntimeError
        return Finding(Reason.NOT_REGULAR_FILE, f"cannot be followed ({why})", file=rel)
    if info is None or isinstance(info, Finding):
        return info
    if stat.S_ISDIR(info.st_mode) and not rel.lower().endswith(RECORDING_SUFFIXES):
        return info
    if not stat.S_ISREG(info.st_mode):
        problem = f"is a {_describe_mode(info.st_mode)}"
        return Finding(Reason.NOT_REGULAR_FILE, problem, "a regular file was expected", file=rel)
    is_own = info.st_size == KEY_FILES.get(path.name) or is_own_page(path)
    return None if is_own else info


def _follow_link(
    link: Path, rel: str, real: Path, written: dict[Path, bool], *, follow: bool
) -> os.stat_result | Finding | None:
    """The state of what a link leads to; see `_inspect_entry`."""
    if _leads_to_own_folder(link, real, written):
        return None
    inside = link.resolve().is_relative_to(real)
    if not inside and not follow:
        return Finding(
            Reason.SYMLINK_OUTSIDE_ROOT,
            "is a link that leaves the data set's folder",
            "which is not followed",
            "Copy the file, or give --follow-symlinks",
            file=rel,
        )
    info = link.stat()
    return None if inside and stat.S_ISDIR(info.st_mode) else info


def _describe_mode(mode: int) -> str:
    kinds = {
        stat.S_IFIFO: "pipe",
        stat.S_IFSOCK: "socket",
        stat.S_IFCHR: "device",
        stat.S_IFBLK: "device",
        stat.S_IFDIR: "folder",
    }
    return kinds.get(stat.S_IFMT(mode), "special file")


class ChecksumList(NamedTuple):
    """What SHA256SUMS.txt states."""

    files: dict[str, str]  # path relative to its folder -> SHA-256 in small letters
    malformed: int  # lines that are no checksums

    def compare(self, source: Source) -> list[Finding]:
        """A warning each for files that are listed and not in `source`, that are there and not
        listed, and for malformed lines.
        """
        listed, there = set(self.files), set(source.files)
        absent = sorted(listed - there - set(source.rejected))
        unlisted = sorted(there - listed - {CHECKSUM_FILE})
        rows: tuple[tuple[int, str, list[str]], ...] = (
            (len(absent), "files that are listed and not here", absent),
            (len(unlisted), "files that are here and not listed", unlisted),
            (self.malformed, "lines that are no checksums", []),
        )
        return [
            input_warning(
                Reason.SOURCE_CHECKSUM,
                f"{text}: {count}",
                file=CHECKSUM_FILE,
                count=count,
                examples=_list_examples(names),
            )
            for count, text, names in rows
            if count
        ]


def _list_examples(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(map(safe_text, names[:5]))


def parse_checksums(text: str) -> ChecksumList:
    """The lines of SHA256SUMS.txt: 64 hexadecimal digits, a space, and a path.

    Empty lines count for nothing.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    matches = list(filter(None, map(CHECKSUM_LINE.fullmatch, lines)))
    files = {match[2]: match[1].lower() for match in matches}
    return ChecksumList(files, len(lines) - len(matches))


def require_source(source: Source | None) -> Source:
    """The source. Raises UserError (no_input) without one."""
    if source is None:
        raise input_error(
            Reason.NO_INPUT, "needs the folder of the data set", hint="Give it as SOURCE"
        )
    return source


def report_unclaimed(
    source: Source,
    units: Mapping[str, Mapping[str, str]],
    layout: re.Pattern[str],
    hints: Mapping[str, str] = NO_HINTS,
) -> Iterator[Finding]:
    """Warnings about files that belong to no unit and whose names `layout` does not match.

    There is one for each ending. `units` holds the files of each unit; `hints`: ending -> what to
    do with such files.
    """
    claimed = set(chain.from_iterable(files.values() for files in units.values()))
    by_ending: dict[str, list[str]] = {}
    for rel in source.files:
        name = PurePosixPath(rel).name
        if rel not in claimed and not layout.fullmatch(name):
            endings = filter(name.lower().endswith, hints)  # .tsv.gz before .gz
            ending = next(endings, PurePosixPath(rel).suffix.lower())
            by_ending.setdefault(ending, []).append(rel)
    for ending, files in sorted(by_ending.items()):
        what = "files" if files[1:] else "file"
        how = f"ending in {safe_text(ending)}" if ending else "without an ending"
        yield input_warning(
            Reason.UNSUPPORTED_FORMAT if not claimed else Reason.FILE_NAME,
            f"{len(files)} {what} {how}",
            "not read",
            hints.get(ending, ""),
            file=files[0],
            count=len(files),
            examples=_list_examples(files),
        )


def report_faults(faults: Iterable[Finding]) -> list[Finding]:
    """Findings on faulty lines, the first few of each reason one by one, the others counted."""
    by_code = group_by(faults, lambda fault: fault.code)
    findings: list[Finding] = []
    for same in by_code.values():
        findings += same[:MAX_LISTED]
        if rest := same[MAX_LISTED:]:
            findings.append(
                replace(
                    rest[0],
                    problem=f"{len(rest)} more lines with this fault",
                    requirement="",
                    count=len(rest),
                    examples=tuple(f"row {fault.row}" for fault in rest[:5]),
                )
            )
    return findings
