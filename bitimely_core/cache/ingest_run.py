"""One run of `ingest`: what was asked for, what its source holds, what has been found so far, and the report of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bitimely_core import __version__, storage
from bitimely_core.cache import report as accounting
from bitimely_core.cache import shards
from bitimely_core.cache.units import describe_mismatch
from bitimely_core.cache.workers import StopFlag
from bitimely_core.errors import Exit, Finding, Reason, UserError, input_error, safe_text
from bitimely_core.formats.source import Source
from bitimely_core.registry import DatasetFacts, Entry
from bitimely_core.types import IngestUnit, Progress, SourceRows

REPORT = "ingest_report.json"
PAGE = "report.html"  # what people look at; made by whoever can draw, never read
CHECKSUM_FILE = "SHA256SUMS.txt"


@dataclass
class IngestRun:
    """The first fields are what was asked for; the others fill up on the way."""

    dataset: Entry[DatasetFacts]
    source: Source | None
    source_path: str | None  # the source as given
    out: Path
    options: dict[str, Any]  # decide the content: those of the data set, keep_phi, keep_dates
    run_options: dict[str, Any]  # leave it as it is: strict, max_bad, follow_symlinks, verify
    jobs: int
    progress: Progress | None
    stop: StopFlag
    given_options: dict[str, Any] = field(default_factory=dict)  # as given, where `options` has contents in the place of paths
    units: list[IngestUnit] = field(default_factory=list)  # sorted by name
    reasons: list[Finding] = field(default_factory=list)  # of the data set as a whole
    rows: list[dict[str, Any]] = field(default_factory=list)  # of tables that are no units
    checksums: dict[str, str] = field(default_factory=dict)  # file -> SHA-256 by SHA256SUMS.txt
    checksum_status: str = "absent"  # verified, mismatch, absent or skipped
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)  # unit -> what became of it
    hashes: dict[str, str] = field(default_factory=dict)  # file -> SHA-256 as read

    @property
    def settings(self) -> dict[str, Any]:
        """What a cache must have been made with to be continued."""
        return {"dataset": self.dataset.name, "version": __version__, "options": self.options}

    @property
    def sizes(self) -> dict[str, int]:
        """File -> bytes."""
        return {} if self.source is None else self.source.files

    def list_units(self) -> None:
        """Run the data set's function: its units, and what it says about the whole. Raises UserError when it refuses the data set."""
        for item in self.dataset.function(self.source, dict(self.options)):
            if isinstance(item, IngestUnit):
                self.units.append(item)
            elif isinstance(item, SourceRows):
                self.rows.append(accounting.rows_to_json(item))
            else:
                self.reasons.append(item)
        self.units.sort(key=lambda unit: unit.name)
        for unit, following in zip(self.units, self.units[1:], strict=False):
            if unit.name == following.name:
                text = f"the unit {safe_text(unit.name)} is there twice"
                raise input_error(Reason.DUPLICATE_KEY, text, "expected one", file=next(iter(following.files), None))
        if self.source is not None:
            named = {file for unit in self.units for file in unit.files} | {reason.file for reason in self.reasons}
            self.reasons += [replace(fault, level="warning") for name, fault in self.source.rejected.items() if name not in named]

    def read_checksums(self) -> None:
        """What SHA256SUMS.txt at the root of the source says; one warning each for files that are not listed, or listed and not there."""
        source = self.source
        if source is None or CHECKSUM_FILE not in source.files:
            return
        if not self.run_options["verify"]:
            self.checksum_status = "skipped"
            return
        self.checksum_status, odd = "verified", 0
        try:
            text = source.path(CHECKSUM_FILE).read_text("utf-8", errors="replace")
        except OSError as error:
            self.reasons.append(_warn_of_unreadable(CHECKSUM_FILE, error))
            return
        for line in text.splitlines():
            digest, _, name = line.strip().partition(" ")
            name = name.strip().removeprefix("*").removeprefix("./")
            if len(digest) == 64 and name:
                self.checksums[name] = digest.lower()
            elif line.strip():
                odd += 1
        absent = sorted(name for name in self.checksums if name not in source.files and name not in source.rejected)
        unlisted = sorted(name for name in source.files if name not in self.checksums and name != CHECKSUM_FILE)
        for names, said in ((absent, "files that are listed and not here"), (unlisted, "files that are here and not listed")):
            if names:
                self.reasons.append(_warn_of_checksums(f"{said}: {len(names)}", len(names), tuple(safe_text(name) for name in names[:5])))
        if odd:
            self.reasons.append(_warn_of_checksums(f"lines that are no checksums: {odd}", odd))

    def hash_remaining(self) -> None:
        """Hash the files that have no hash yet, and compare those of no unit with SHA256SUMS.txt. Raises UserError when interrupted."""
        if self.source is None:
            return
        claimed = {file for unit in self.units for file in unit.files}
        for name in self.source.files:
            if name in self.hashes:
                continue
            self.stop.check()
            try:
                self.hashes[name] = storage.hash_file(self.source.root / name)
            except OSError as error:
                if name not in claimed:  # else its unit says so
                    self.reasons.append(_warn_of_unreadable(name, error))
        for name, listed in self.checksums.items():
            if self.hashes.get(name, listed) != listed:
                self.checksum_status = "mismatch"
                if name not in claimed:
                    level = "error" if name in self.tables else "warning"
                    self.reasons.append(describe_mismatch(name, self.hashes[name], listed, level=level))

    @property
    def tables(self) -> set[str]:
        """Files that the whole data set needs."""
        return {table["file"] for table in self.rows}

    def find_refusal(self) -> UserError | None:
        """Why nothing may be published (exit 4)."""
        for reason in self.reasons:
            if reason.code == Reason.SOURCE_CHECKSUM and reason.level == "error":
                return input_error(
                    reason.code,
                    reason.problem,
                    reason.requirement,
                    reason.hint,
                    file=reason.file,
                    found=reason.found,
                    expected=reason.expected,
                )
        found = accounting.find_refusal(self.report(), strict=self.run_options["strict"], max_bad=self.run_options["max_bad"])
        if found is not None and found.file is None:
            found.file = self.source_path
        return found

    def report(self) -> dict[str, Any]:
        """The report as far as things have come, without a verdict."""
        sizes, entries = self.sizes, self.entries
        source = {
            "path": self.source_path,
            "kind": self.options.get("source"),
            "files": len(self.hashes),
            "bytes": sum(sizes[name] for name in self.hashes),
            "sha256": shards.hash_lines(f"{digest}  {name}" for name, digest in self.hashes.items()),
            "sha256sums": self.checksum_status,
        }
        return accounting.build_report(
            self.dataset.name,
            source,
            [entry["report"] for entry in entries.values()],
            rows=[*self.rows, *(row for name in sorted(entries) for row in entries[name]["rows"])],
            reasons=self.reasons,
            options=self.options | self.run_options,
            rules=dict(self.dataset.facts.rules),
        )

    @contextmanager
    def record_failure(self, *, write: bool = True) -> Iterator[None]:
        """What ends the block early is told in the report, which goes with the error and, with `write`, into the folder."""
        try:
            with _translate_errors(self.out):
                yield
        except UserError as error:
            if error.exit_code in {Exit.USAGE, Exit.LOCKED}:  # nothing has been tried
                raise
            with suppress(UserError):  # interrupted once more
                if error.exit_code == Exit.REFUSED:  # else there may be much left to hash, and little time or disk
                    self.hash_remaining()
            if error.exit_code == Exit.REFUSED and str(error.code) not in self.report()["reason_counts"]:
                self.reasons.append(error.finding)
            error.report = accounting.finish_report(self.report(), error.exit_code, error)
            said = error.finding.line()
            error.details = [*error.details, *(finding for finding in accounting.list_findings(error.report) if finding.line() != said)]
            if write:
                with suppress(UserError):  # the disk may be what is wrong
                    storage.write_json(self.out / REPORT, error.report)
            raise


@contextmanager
def _translate_errors(out: Path) -> Iterator[None]:
    """What this machine lacks as a UserError (exit 6)."""
    try:
        yield
    except MemoryError as error:
        action = "Use fewer --jobs, or a larger machine"
        raise UserError(Reason.RESOURCE_LIMIT, "out of memory", hint=action, file=str(out), exit_code=Exit.RESOURCES) from error
    except OSError as error:
        raise storage.os_error(error, out / storage.MANIFEST) from error


def _warn_of_checksums(text: str, count: int, examples: tuple[str, ...] = ()) -> Finding:
    return Finding(code=Reason.SOURCE_CHECKSUM, level="warning", problem=text, file=CHECKSUM_FILE, count=count, examples=examples)


def _warn_of_unreadable(name: str, error: OSError) -> Finding:
    text = f"cannot be read ({error.strerror or type(error).__name__})"
    return Finding(code=Reason.IO_ERROR, level="warning", problem=text, file=name)
