"""The first pass of an ingest: rows are cleaned as they stream by, and held by shard as integers
under pseudonyms.

The rows of a small source stay in memory, those of a larger one are spilled to disk: so memory does
not grow with the data. After each spill file the counts so far are saved, and a run continues where
a killed one ended. The parts of a job array have separate spill files; `join_parts` renumbers codes
and files of all parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl

from bitimely_core.claims import clean, dates, spill
from bitimely_core.claims.codes import IcdCode
from bitimely_core.claims.distinct import count_integers
from bitimely_core.claims.job import FILE_SHIFT, ClaimsJob, CleaningFindings
from bitimely_core.claims.pseudonyms import PseudonymCache, pseudonymize
from bitimely_core.claims.sources import ClaimsSource
from bitimely_core.claims.spill import PartNumbers, Stretch
from bitimely_core.claims.subjects import join_subject_tables

SPILL_ROWS = 1 << 20  # valid rows of a stretch
# of stretches that one process holds in memory from one pass to the next: some ten million rows
HELD_BYTES = 320 << 20
LIFE_DATES = ("birth", "death")  # columns of the subjects


def findings_path(home: Path, stem: str, part: int) -> Path:
    """The saved findings of a part."""
    return home / f"{stem}-{part}.json"


def clean_source(
    job: ClaimsJob, part: int = 1, parts: int = 1, *, held: int = 0
) -> tuple[CleaningFindings, list[Stretch]]:
    """Clean all rows, or every `parts`-th block from the `part`-th on.

    Continues from what is spilled. More than `held` bytes are spilled.
    """
    notes = findings_path(job.home, job.stem, part)
    findings, stretches = load_part(job, part)
    if findings.done:
        return findings, stretches
    job.book.resume(findings.codes)
    findings.codes = job.book.codes
    findings.subjects = findings.subjects or [0] * job.shards
    cleaning = _Cleaning(job, part, held, findings, stretches, _select_life_dates(job.claims))
    for number, frame in enumerate(job.claims.read()):
        job.run.stop.check()
        if number < findings.blocks or number % parts != (part - 1) % parts:
            continue
        cleaning.add(frame)
        findings.blocks = number + 1
        if cleaning.waiting >= SPILL_ROWS:
            cleaning.end_stretch()
            if findings.stretches:
                findings.save(notes)
        if job.run.progress is not None:
            rows = sum(account.rows for account in findings.accounts.values())
            job.run.progress(f"clean {job.run.dataset.name}", rows, None)
    cleaning.end_stretch()
    findings.done = True
    if findings.stretches == len(stretches):
        findings.save(notes)
    return findings, stretches


@dataclass
class _Cleaning:
    """The cleaning of one part of the source, and the stretch that is being filled."""

    job: ClaimsJob
    part: int
    held: int  # bytes that may stay in memory
    findings: CleaningFindings
    stretches: list[Stretch]
    life_dates: pl.DataFrame | None
    seen: PseudonymCache = field(default_factory=PseudonymCache)
    # of the stretch: rows and subjects of each block, by shard
    rows: list[list[pl.DataFrame]] = field(default_factory=list)
    cohorts: list[list[pl.DataFrame]] = field(default_factory=list)
    waiting: int = 0  # rows of the stretch
    size: int = 0  # bytes of all stretches

    def add(self, frame: pl.DataFrame) -> None:
        """Clean a block of the source, and add its valid rows to the stretch."""
        job, findings = self.job, self.findings
        file = str(frame["file"][0])
        if file not in findings.files:
            findings.files.append(file)
        valid, account = clean.clean_rows(
            frame,
            job.book,
            vocab=job.claims.survey.vocab,
            source=job.claims.source,
            life_dates=self.life_dates,
            copy_key=True,
            minutes=job.options.time_unit == "minute",
        )
        findings.add_account(file, account)
        findings.days.update(count_integers(valid["day"]))
        findings.code_counts.update(count_integers(valid["code"]))
        findings.sources.update(count_integers(valid["source"]))
        if valid.is_empty():
            return
        ids = valid["subject_id"]
        numbers, shards, cohort = pseudonymize(self.seen, ids, job, findings.subjects)
        rows = valid.drop("subject_id").with_columns(
            pl.col("row") + (findings.files.index(file) << FILE_SHIFT),
            subject=pl.Series(numbers),
            shard=pl.Series(shards),
        )
        self.rows.append(spill.partition_rows(rows, job.shards))
        self.cohorts.append(spill.partition_rows(cohort, job.shards))
        self.waiting += valid.height

    def end_stretch(self) -> None:
        """Add the stretch to the others; spill them if they are too large or others are spilled."""
        if not self.rows:
            return
        rows, cohort = spill.join_partitions(self.rows), spill.join_partitions(self.cohorts)
        self.stretches.append(Stretch(rows, cohort))
        self.size += sum(int(partition.estimated_size()) for partition in (*rows, *cohort))
        self.rows, self.cohorts, self.waiting = [], [], 0
        if self.findings.stretches or self.size > self.held:
            for number in range(self.findings.stretches, len(self.stretches)):
                self.stretches[number] = self._spill(number)
            self.findings.stretches = len(self.stretches)

    def _spill(self, number: int) -> Stretch:
        """A stretch on disk."""
        stretch, paths = self.stretches[number], _name_spill_files(self.job, self.part, number)
        for path, partitions in zip(paths, (stretch.rows, stretch.cohort), strict=True):
            assert not isinstance(partitions, Path)
            spill.write_partitions(path, partitions)
        return Stretch(*paths)


def load_part(job: ClaimsJob, part: int) -> tuple[CleaningFindings, list[Stretch]]:
    """The saved findings of a part, and its spill files."""
    findings = CleaningFindings.load(findings_path(job.home, job.stem, part))
    return findings, [
        Stretch(*_name_spill_files(job, part, number)) for number in range(findings.stretches)
    ]


def _select_life_dates(claims: ClaimsSource) -> pl.DataFrame | None:
    """Days that decide which rows of a subject are valid: subject_id, birth_day, death_day,
    index_day, as far as known.
    """
    tables = []
    if claims.subjects is not None:
        days = {f"{name}_day": dates.parse_days(claims.subjects[name]) for name in LIFE_DATES}
        tables.append(claims.subjects.select("subject_id", **days))
    if claims.labels is not None and "index_date" in claims.labels.columns:
        index_day = dates.parse_days(claims.labels["index_date"])
        tables.append(claims.labels.select("subject_id", index_day=index_day))
    return join_subject_tables(tables) if tables else None


def _name_spill_files(job: ClaimsJob, part: int, number: int) -> tuple[Path, Path]:
    """Of the rows of a stretch, and of its subjects."""
    return (
        job.home / f"{job.stem}-{part}-rows-{number}.parquet",
        job.home / f"{job.stem}-{part}-people-{number}.parquet",
    )


def join_parts(
    cleaned: Sequence[tuple[CleaningFindings, list[Stretch]]],
) -> tuple[CleaningFindings, list[Stretch]]:
    """The findings and stretches of all parts, with common numbers of codes and files."""
    total, spilled = CleaningFindings(done=True), []
    code_numbers: dict[IcdCode, int] = {}
    subjects = np.zeros(len(cleaned[0][0].subjects), np.int64)  # of the parts before, by shard
    for part, (findings, stretches) in enumerate(cleaned):
        codes = np.array(
            [code_numbers.setdefault(code, len(code_numbers)) for code in findings.codes], np.int32
        )
        total.files += [file for file in findings.files if file not in total.files]
        files = np.array([total.files.index(file) for file in findings.files], np.int64)
        for file, account in findings.accounts.items():
            total.add_account(file, account)
        total.days.update(findings.days)
        total.code_counts.update({int(codes[code]): n for code, n in findings.code_counts.items()})
        total.sources.update(findings.sources)
        numbers = PartNumbers(codes, files, subjects) if part else None
        spilled += [stretch._replace(numbers=numbers) for stretch in stretches]
        subjects = subjects + findings.subjects
    total.codes = list(code_numbers)
    total.latest = clean.find_data_end(total.days)
    return total, spilled
