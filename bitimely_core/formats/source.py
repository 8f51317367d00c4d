"""Files of a raw folder, found without opening any: regular files with their sizes, and all others
with the reason why they are not read.

What bitimely itself wrote there is no source: caches, tokens, runs, reports and exports of any
workspace, its page and its key.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from bitimely_core import storage
from bitimely_core.errors import (
    Finding,
    Reason,
    UserError,
    clean,
    input_error,
    input_warning,
    safe_text,
    usage_error,
)
from bitimely_core.system_errors import raise_system_error

# endings under which a folder is not descended into
RECORDING_SUFFIXES = (".edf", ".bdf", ".hea", ".dat")
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
STORED = {  # files of bitimely -> a key that they hold
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
MAX_LISTED = 5  # faulty lines named one by one
KEY_FILES = {"id.key": 32, "id.key.sha256": 73}  # name -> bytes


@dataclass(frozen=True)
class Source:
    """A raw folder: `files` maps relative POSIX paths to sizes in bytes, `rejected` paths that must
    not be opened to the reason.
    """

    root: Path
    files: dict[str, int]
    rejected: dict[str, Finding]

    def path(self, rel: str) -> Path:
        """Absolute path of a file of this source; `rel`, a POSIX path, may be part of a file, hence
        is not trusted.

        Raises UserError: path_escape for a path that leaves the root, the reason in `rejected`, or
        missing_signal_file.
        """
        pure = PurePosixPath(rel)
        if pure.is_absolute() or ".." in pure.parts or "\\" in rel or "\0" in rel:
            raise input_error(
                Reason.PATH_ESCAPE,
                f"names the file {safe_text(rel)}",
                "which must be inside the data set's folder",
            )
        name = pure.as_posix()
        if name in self.rejected:
            raise finding_to_error(self.rejected[name])
        if name not in self.files:
            raise input_error(Reason.MISSING_SIGNAL_FILE, f"the file {safe_text(rel)} is missing")
        return self.root / name


def finding_to_error(finding: Finding) -> UserError:
    """A finding as the error that quarantines its unit."""
    f = finding
    return UserError(
        f.code, f.problem, f.requirement, f.hint, f.file, f.field, f.row, f.found, f.expected
    )


def compare_copies(copies: Sequence[tuple[str, Hashable]], name: str = "") -> list[Finding]:
    """What it means that several files hold one thing: a warning for each further one where all are
    equal, an error for each where they differ.

    Args:
        copies: file -> content, or a hash of it; of equal ones the first is used, of others none:
            which is right is unknown.
        name: of the thing, where its files hold others too.
    """
    files = [file for file, _ in copies]
    if len({content for _, content in copies}) > 1:
        text = f"{f'{name} ' if name else ''}is there {len(files)} times, with different contents"
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
    text = f"{f'{name} here ' if name else ''}is a copy of {'that in ' if name else ''}{safe_text(files[0])}"
    return [input_warning(Reason.DUPLICATES, text, "used once", file=file) for file in files[1:]]


def choose_copy(
    source: Source, rels: Sequence[str], read: Callable[[str], Hashable] | None = None
) -> tuple[str, list[Finding]]:
    """Of the files of one name the first, and the findings of `compare_copies`, or why one of them
    cannot be compared.

    `read`: the content of a file; None: its SHA-256.
    """
    if faults := [source.rejected[rel] for rel in rels if rel in source.rejected]:
        return rels[0], faults
    if len(rels) == 1:
        return rels[0], []
    copies: list[tuple[str, Hashable]] = []
    for rel in rels:
        try:
            copies.append((rel, read(rel) if read else storage.hash_file(source.path(rel))))
        except UserError as error:
            raise_system_error(error)
            return rels[0], [error.finding.at(rel)]
        except OSError as error:
            raise_system_error(error, source.root / rel, stored=False)
            return rels[0], [
                Finding(Reason.IO_ERROR, f"cannot be read ({error.strerror})", file=rel)
            ]
    return rels[0], compare_copies(copies)


@contextmanager
def locate_errors(file: str | Path, *, replace: bool = True) -> Iterator[None]:
    """Errors that leave this block name `file`; without `replace` only those that name none."""
    try:
        yield
    except UserError as error:
        error.file = str(file) if replace or not error.file else error.file
        raise


def scan_folder(root: Path, *, follow_symlinks: bool = False, is_flat: bool = False) -> Source:
    """All files under `root`, recursively, by `lstat` alone; hidden names are skipped, and what
    bitimely wrote (`is_own_folder`).

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
    try:
        mode = root.stat().st_mode
    except OSError as error:
        raise_system_error(error, root, stored=False)
        text = (
            "no such folder"
            if isinstance(error, FileNotFoundError)
            else f"cannot be read ({error.strerror})"
        )
        raise usage_error(
            text, hint="Check the path", code=Reason.NOT_FOUND, file=str(root)
        ) from None
    if not stat.S_ISDIR(mode):
        raise _folder_error(root, mode)
    files: dict[str, int] = {}
    rejected: dict[str, Finding] = {}
    real = root.resolve()
    seen: set[tuple[int, int]] = set()
    own: dict[Path, bool] = {}
    pending = [""]
    while pending:
        folder = pending.pop()
        try:
            info = (root / folder).stat()
            if (info.st_dev, info.st_ino) in seen:  # only links can lead here twice
                continue
            seen.add((info.st_dev, info.st_ino))
            entries = sorted(os.scandir(root / folder), key=lambda entry: entry.name)
        except OSError as error:
            raise_system_error(error, root / folder, stored=False)
            where = folder.rstrip("/") or "."
            rejected[where] = Finding(
                Reason.IO_ERROR, f"the folder cannot be listed ({error.strerror})", file=where
            )
            continue
        if folder and is_own_folder(root / folder):
            continue
        for entry in entries:
            if entry.name.startswith(".") or (
                entry.is_symlink() and _leads_to_own_folder(root / folder / entry.name, real, own)
            ):
                continue
            rel = folder + entry.name
            fault = _inspect_entry(root, real, rel, follow=follow_symlinks)
            if isinstance(fault, Finding):
                rejected[fault.file or rel] = fault
            elif fault is None:
                pending += [] if is_flat else [rel + "/"]
            elif fault >= 0 and fault != KEY_FILES.get(entry.name) and not is_own_page(root / rel):
                files[rel] = fault
    return Source(root, dict(sorted(files.items())), dict(sorted(rejected.items())))


def is_own_folder(folder: Path) -> bool:
    """Whether bitimely wrote `folder`: a cache, token set, run, stage, report or export, finished
    or not.
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


def _leads_to_own_folder(link: Path, real: Path, own: dict[Path, bool]) -> bool:
    """Whether a link leads into a folder of bitimely; `own`: the folders that are known."""
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
        if own.setdefault(folder, folder not in own and is_own_folder(folder)):
            return True
    return False


def _inspect_entry(root: Path, real: Path, rel: str, *, follow: bool) -> int | Finding | None:
    """Size of a regular file, None for a folder to descend into, -1 for a link to a folder of this
    root, or why the entry is not read.
    """
    path = root / rel
    try:
        rel.encode()
    except UnicodeEncodeError:
        return input_warning(
            Reason.FILE_NAME, "the name is not valid UTF-8, the file is not read", file=clean(rel)
        )
    try:
        info = path.lstat()
        if stat.S_ISLNK(info.st_mode):
            target = path.resolve()
            inside = target.is_relative_to(real)
            if not inside and not follow:
                return Finding(
                    Reason.SYMLINK_OUTSIDE_ROOT,
                    "is a link that leaves the data set's folder",
                    "which is not followed",
                    "Copy the file, or give --follow-symlinks",
                    file=rel,
                )
            info = path.stat()
            if stat.S_ISDIR(info.st_mode) and inside:
                return -1  # what it leads to is found anyway
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise_system_error(error, path, stored=False)
        why = getattr(error, "strerror", None) or "loop of links"
        return Finding(Reason.NOT_REGULAR_FILE, f"cannot be followed ({why})", file=rel)
    if stat.S_ISDIR(info.st_mode) and not rel.lower().endswith(RECORDING_SUFFIXES):
        return None
    if stat.S_ISREG(info.st_mode):
        return info.st_size
    return Finding(
        Reason.NOT_REGULAR_FILE,
        f"is a {_describe_mode(info.st_mode)}",
        "a regular file was expected",
        file=rel,
    )


def _folder_error(root: Path, mode: int) -> UserError:
    code, problem, hint = Reason.NO_INPUT, "is a file", "Give the folder that holds it"
    if not stat.S_ISREG(mode):
        code, problem, hint = (
            Reason.NOT_REGULAR_FILE,
            f"is a {_describe_mode(mode)}",
            "Give a folder",
        )
    elif root.suffix.lower() in ARCHIVE_SUFFIXES:
        code, problem, hint = (
            Reason.UNSUPPORTED_FORMAT,
            "is an archive",
            "Unpack it and give the folder",
        )
    return input_error(code, problem, "a folder was expected", hint, file=str(root))


def _describe_mode(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "pipe"
    if stat.S_ISSOCK(mode):
        return "socket"
    return (
        "device"
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
        else "folder"
        if stat.S_ISDIR(mode)
        else "special file"
    )


class ChecksumList(NamedTuple):
    """What SHA256SUMS.txt states."""

    files: dict[str, str]  # path relative to its folder -> SHA-256 in small letters
    malformed: int  # lines that are no checksums

    def compare(self, source: Source) -> list[Finding]:
        """One warning each for files that are listed and not in `source`, that are there and not
        listed, and for malformed lines.
        """
        absent = sorted(
            name for name in self.files if name not in source.files and name not in source.rejected
        )
        unlisted = sorted(
            name for name in source.files if name not in self.files and name != CHECKSUM_FILE
        )
        found = [
            (absent, len(absent), "files that are listed and not here"),
            (unlisted, len(unlisted), "files that are here and not listed"),
            ([], self.malformed, "lines that are no checksums"),
        ]
        return [
            input_warning(
                Reason.SOURCE_CHECKSUM,
                f"{text}: {count}",
                file=CHECKSUM_FILE,
                count=count,
                examples=tuple(safe_text(name) for name in names[:5]),
            )
            for names, count, text in found
            if count
        ]


def parse_checksums(text: str) -> ChecksumList:
    """The lines of SHA256SUMS.txt: 64 hexadecimal digits, a space, and a path; empty lines count
    for nothing.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = [match for line in lines if (match := CHECKSUM_LINE.fullmatch(line))]
    return ChecksumList({match[2]: match[1].lower() for match in found}, len(lines) - len(found))


def require_source(source: Source | None) -> Source:
    """The source. Raises UserError (no_input) without one."""
    if source is None:
        raise input_error(
            Reason.NO_INPUT, "needs the folder of the data set", hint="Give it as SOURCE"
        )
    return source


def report_unclaimed(
    source: Source, found: Mapping[str, Mapping[str, str]], layout: re.Pattern[str]
) -> Iterator[Finding]:
    """Warnings about files that belong to no unit and whose names `layout` does not match, one for
    each suffix.
    """
    claimed = {rel for files in found.values() for rel in files.values()}
    left: dict[str, list[str]] = {}
    for rel in source.files:
        if rel not in claimed and not layout.fullmatch(PurePosixPath(rel).name):
            left.setdefault(PurePosixPath(rel).suffix.lower(), []).append(rel)
    for ending, files in sorted(left.items()):
        yield input_warning(
            Reason.UNSUPPORTED_FORMAT if not claimed else Reason.FILE_NAME,
            f"{len(files)} file{'s' * (len(files) > 1)} {f'ending in {safe_text(ending)}' if ending else 'without an ending'}",
            "not read",
            file=files[0],
            count=len(files),
            examples=tuple(safe_text(rel) for rel in files[:5]),
        )


def report_faults(faults: Sequence[Finding]) -> list[Finding]:
    """Findings on faulty lines, the first few of each reason one by one, the others counted."""
    out: list[Finding] = []
    for code in dict.fromkeys(fault.code for fault in faults):
        same = [fault for fault in faults if fault.code == code]
        out += same[:MAX_LISTED]
        if more := same[MAX_LISTED:]:
            rows = tuple(f"row {fault.row}" for fault in more[:5])
            out.append(
                replace(
                    more[0],
                    problem=f"{len(more)} more lines with this fault",
                    requirement="",
                    count=len(more),
                    examples=rows,
                )
            )
    return out
