"""One run of `ingest`: its options, its source, its results so far, and their report."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from bitimely_core import __version__
from bitimely_core.cache import ingest_report, shards, source_use
from bitimely_core.cache.unit_groups import describe_mismatch, describe_unreadable
from bitimely_core.cache.workers import StopFlag
from bitimely_core.errors import (
    Exit,
    Finding,
    Level,
    Reason,
    UserError,
    check_choice,
    input_error,
    safe_text,
)
from bitimely_core.formats.source import CHECKSUM_FILE, Source, parse_checksums
from bitimely_core.registry import Choices, DatasetFacts, Entry
from bitimely_core.schemas.ingest_records import (
    CachedUnit,
    CacheSettings,
    ChecksumStatus,
    FileGroup,
    IngestReport,
    SourceReport,
    SourceUse,
    TableReport,
)
from bitimely_core.store import storage
from bitimely_core.system_errors import translate_system_errors
from bitimely_core.types import IngestUnit, SourceRows

REPORT = "ingest_report.json"
PAGE = "report.html"  # for people, never read again


@dataclass
class IngestRun:
    """The first fields are given; the others are filled during the run."""

    dataset: Entry[DatasetFacts]
    source: Source | None
    source_path: str | None  # the source as given
    out: Path
    options: Choices  # that decide the content: those of the data set, keep_phi, keep_dates
    run_options: Choices  # that do not: strict, max_bad, follow_symlinks, verify
    jobs: int
    stop: StopFlag
    # as given; `options` has hashes of files instead of paths
    given_options: Choices = field(default_factory=dict)
    units: list[IngestUnit] = field(default_factory=list)  # sorted by name
    reasons: list[Finding] = field(default_factory=list)  # about the data set
    rows: list[TableReport] = field(default_factory=list)  # of tables that are no units
    checksums: dict[str, str] = field(default_factory=dict)  # file -> SHA-256 by SHA256SUMS.txt
    checksum_status: ChecksumStatus = "absent"
    entries: dict[str, CachedUnit] = field(default_factory=dict)  # by name of the unit
    hashes: dict[str, str] = field(default_factory=dict)  # file -> SHA-256 as read
    left_out: set[str] = field(default_factory=set)  # files of recordings that are excluded by name

    @property
    def settings(self) -> CacheSettings:
        """Settings of a cache that this run can continue."""
        return CacheSettings(dataset=self.dataset.name, version=__version__, options=self.options)

    @property
    def sizes(self) -> dict[str, int]:
        """File -> bytes."""
        return {} if self.source is None else self.source.files

    @property
    def command(self) -> str:
        """The command line of this run, for another try."""
        words = ["bitimely", "ingest", self.dataset.name]
        words += [self.source_path] if self.source_path else []
        defaults = self.dataset.facts.options or {}
        for name, value in self.given_options.items():
            if value is not None and value != defaults.get(name):
                words += [f"--{name.replace('_', '-')}", str(value)]
        words += self._list_flags()
        if self.out.parent.name == "cache" and self.out.parent.parent != Path("workspace"):
            words += ["-w", str(self.out.parent.parent)]
        return shlex.join(words)

    def _list_flags(self) -> list[str]:
        """The words of the options that every data set has."""
        flags = ("keep_phi", "keep_dates", "strict", "follow_symlinks")
        chosen = self.options | self.run_options
        words = [f"--{name.replace('_', '-')}" for name in flags if chosen.get(name)]
        words += [f"--exclude={name}" for name in chosen.get("exclude", ())]
        return words + (["--encoding", chosen["encoding"]] if chosen.get("encoding") else [])

    def restart(self) -> IngestRun:
        """A run with the same options that has found nothing yet."""
        return replace(
            self, units=[], reasons=[], rows=[], checksums={}, entries={}, hashes={}, left_out=set()
        )

    def list_units(self) -> None:
        """Run the data set's function: units, rows of tables, findings.

        Raises UserError when it refuses the data set.
        """
        for item in self.dataset.function(self.source, dict(self.options)):
            if isinstance(item, IngestUnit):
                self.units.append(item)
            elif isinstance(item, SourceRows):
                self.rows.append(ingest_report.report_rows(item))
            else:
                self.reasons.append(item)
        self.units.sort(key=lambda unit: unit.name)
        for unit, following in itertools.pairwise(self.units):
            if unit.name == following.name:
                problem = f"the unit {safe_text(unit.name)} is there twice"
                file = next(iter(following.files), None)
                raise input_error(Reason.DUPLICATE_KEY, problem, "expected one", file=file)
        self.leave_out(self.run_options.get("exclude", ()))
        if self.source is not None:
            named = self.unit_files | self.left_out | {reason.file for reason in self.reasons}
            for name, fault in self.source.rejected.items():
                if name not in named:
                    self.reasons.append(replace(fault, level="warning"))

    def leave_out(self, names: Sequence[str]) -> None:
        """Drop the units with these names, and say so. Raises UserError: unknown_name (exit 2)."""
        for name in names:
            try:
                check_choice("recording", name, [unit.name for unit in self.units])
            except UserError as error:
                error.field = "--exclude"
                raise
        dropped = [unit for unit in self.units if unit.name in names]
        self.units = [unit for unit in self.units if unit.name not in names]
        self.left_out = (
            set(itertools.chain.from_iterable(unit.files for unit in dropped)) - self.unit_files
        )
        self.reasons += [
            Finding(
                Reason.LEFT_OUT,
                f"the recording {safe_text(unit.name)} is left out",
                "as --exclude asks",
                file=next(iter(unit.files), None),
                level="info",
            )
            for unit in dropped
        ]

    def read_checksums(self) -> None:
        """Read SHA256SUMS.txt of the source; a warning for each unlisted and each absent file."""
        source = self.source
        if source is None or CHECKSUM_FILE not in source.files:
            return
        if not self.run_options["verify"]:
            self.checksum_status = "skipped"
            return
        self.checksum_status = "verified"
        path = source.path(CHECKSUM_FILE)
        try:
            listed = parse_checksums(path.read_text("utf-8", errors="replace"))
        except OSError as error:
            self.reasons.append(describe_unreadable(error, path, CHECKSUM_FILE, level="warning"))
            return
        self.checksums = listed.files
        self.reasons += listed.compare(source)

    def hash_remaining(self) -> None:
        """Hash the files that have no hash yet, and compare all with SHA256SUMS.txt.

        Of a file of a unit the unit itself reports what is wrong. Raises UserError when
        interrupted.
        """
        if self.source is None:
            return
        claimed = self.unit_files
        for name in self.source.files:
            if name in self.hashes:
                continue
            self.stop.check()
            path = self.source.root / name
            try:
                self.hashes[name] = storage.hash_file(path)
            except OSError as error:
                finding = describe_unreadable(error, path, name, level="warning")
                if name not in claimed:
                    self.reasons.append(finding)
        for name, listed in self.checksums.items():
            digest = self.hashes.get(name, listed)
            if digest == listed:
                continue
            self.checksum_status = "mismatch"
            if name not in claimed:
                level: Level = "error" if name in self.tables else "warning"
                self.reasons.append(describe_mismatch(name, digest, listed, level=level))

    @property
    def unit_files(self) -> set[str]:
        """Files of units."""
        return set(itertools.chain.from_iterable(unit.files for unit in self.units))

    @property
    def tables(self) -> set[str]:
        """Files that all units need."""
        return {table.file for table in self.rows}

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
        report = self.report()
        refusal = ingest_report.find_refusal(
            report, strict=self.run_options["strict"], max_bad=self.run_options["max_bad"]
        )
        refusal = refusal or _find_lost_labels(report)
        if refusal is not None and refusal.file is None:
            refusal.file = self.source_path
        return refusal

    def report(self) -> IngestReport:
        """The report so far, without a verdict."""
        source = SourceReport(
            path=self.source_path,
            kind=self.options.get("source"),
            files=len(self.hashes),
            # those of a generated source are gone
            bytes=sum(self.sizes.get(name, 0) for name in self.hashes),
            sha256=shards.hash_lines(f"{digest}  {name}" for name, digest in self.hashes.items()),
            sha256sums=self.checksum_status,
        )
        rows = list(
            itertools.chain.from_iterable(entry.rows for _, entry in sorted(self.entries.items()))
        )
        report = ingest_report.build_report(
            self.dataset,
            source,
            [entry.report for entry in self.entries.values() if entry.report is not None],
            rows=self.rows + rows,
            reasons=self.reasons,
            options=self.options | self.run_options,
        )
        if self.dataset.facts.kind != "recordings":
            return report
        return report.model_copy(update={"use": self._summarize_use(report)})

    def _summarize_use(self, report: IngestReport) -> SourceUse:
        """What of the source was used.

        A published data set says itself which of its files it does not know: some of the others are
        read before the units, such as tables of subjects.
        """
        used = self.unit_files | self.tables
        unread: list[FileGroup] = []
        if self.dataset.facts.own_files:
            options = self.dataset.facts.options or {}
            unread = source_use.group_unread(
                self.sizes,
                used | self.left_out,
                has_map=self.options.get("map") is not None,
                is_open="map" in options,
            )
        read = len(used & self.sizes.keys())
        targets = {view.target for view in self.dataset.facts.views.values() if view.target}
        return source_use.summarize_use(
            self.entries, unread, read, report.rows, report.reasons, targets
        )

    @contextmanager
    def record_failure(self, *, write: bool = True) -> Iterator[None]:
        """Give an error of the block the report of the run.

        `write`: also write it into the folder.
        """
        try:
            with translate_system_errors(self.out):
                yield
        except UserError as error:
            if error.exit_code in {Exit.USAGE, Exit.LOCKED}:  # nothing was tried
                raise
            if error.exit_code == Exit.REFUSED:
                # after other errors there may be much left to hash, and little time or disk
                with suppress(UserError):  # interrupted once more
                    self.hash_remaining()
                if str(error.code) not in self.report().reason_counts:
                    self.reasons.append(error.finding)
            report = ingest_report.fail_report(self.report(), error)
            error.report = report.to_json()
            line = error.finding.line()
            findings = ingest_report.list_findings(report)
            error.details += [finding for finding in findings if finding.line() != line]
            if write:
                with suppress(UserError):  # the disk may be the fault
                    report.save(self.out / REPORT)
            raise


def _find_lost_labels(report: IngestReport) -> UserError | None:
    """The refusal where [labels] of the map names none of the texts of all annotations."""
    lost = [
        reason
        for unit in report.units
        for reason in unit.reasons
        if reason.code == Reason.UNKNOWN_LABEL and reason.field == "labels"
    ]
    if not lost or report.use is None or report.use.annotations:
        return None
    count = sum(reason.count for reason in lost)
    return input_error(
        Reason.UNKNOWN_LABEL,
        f"none of {count} annotations has a text of [labels]",
        "so that nobody has a label",
        "Write their texts as the files have them: --init-map lists them",
        field="labels",
    )
