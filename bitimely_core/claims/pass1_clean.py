"""The first pass of an ingest: rows are cleaned as they stream by, and spilled to disk by shard, as
integers under pseudonyms.

So memory does not grow with the data. After each spill file the counts so far are saved, and a run
continues where a killed one ended. The parts of a job array have separate spill files; `join_parts`
renumbers codes and files of all parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from bitimely_core.claims import clean, spill, subjects
from bitimely_core.claims.codes import IcdCode
from bitimely_core.claims.distinct import count_integers
from bitimely_core.claims.job import FILE_SHIFT, ClaimsJob, CleaningFindings
from bitimely_core.claims.pseudonyms import PseudonymCache, pseudonymize
from bitimely_core.claims.spill import PartNumbers, SpilledStretch
from bitimely_core.progress import report_progress

SPILL_ROWS = 1 << 20  # valid rows of a stretch
LIFE_DAYS = {"birth_day", "death_day", "index_day"}


def findings_path(home: Path, stem: str, part: int) -> Path:
    """The saved findings of a part."""
    return home / f"{stem}-{part}.json"


def clean_source(job: ClaimsJob, part: int = 1, parts: int = 1) -> None:
    """Clean and spill all rows, or every `parts`-th block from the `part`-th on.

    Continues from what is spilled.
    """
    notes = findings_path(job.home, job.stem, part)
    findings = CleaningFindings.load(notes)
    if findings.done:
        return
    job.book.resume(findings.codes)
    findings.codes = job.book.codes
    findings.subjects = findings.subjects or [0] * job.shards
    seen, life_dates = PseudonymCache(), _select_life_dates(job)
    blocks: list[tuple[pl.DataFrame, pl.DataFrame]] = []  # of the stretch
    for number, frame in enumerate(job.claims.read()):
        job.run.stop.check()
        if number < findings.blocks or number % parts != (part - 1) % parts:
            continue
        valid, cohort = _clean_block(job, findings, frame, seen, life_dates)
        if valid.height:
            blocks.append((valid, cohort))
        findings.blocks = number + 1
        if sum(rows.height for rows, _ in blocks) >= SPILL_ROWS:
            _spill_blocks(job, part, findings, blocks)
            blocks = []
            findings.save(notes)
        rows = sum(account.rows for account in findings.accounts.values())
        report_progress(f"clean {job.run.dataset.name}", rows, None)
    _spill_blocks(job, part, findings, blocks)
    findings.done = True
    findings.save(notes)


def _clean_block(
    job: ClaimsJob,
    findings: CleaningFindings,
    frame: pl.DataFrame,
    seen: PseudonymCache,
    life_dates: pl.DataFrame | None,
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The valid rows of a block of the source and its new subjects, with their shards."""
    file = str(frame["file"][0])
    if file not in findings.files:
        findings.files.append(file)
    valid, account = clean.clean_rows(
        frame,
        job.book,
        form=clean.RowForm(
            job.claims.survey.vocab,
            job.claims.source,
            job.options.time_unit == "minute",
            job.unknown_days,
        ),
        life_dates=life_dates,
        copy_key=True,
    )
    findings.add_account(file, account)
    for counts, name in (
        (findings.days, "day"),
        (findings.code_counts, "code"),
        (findings.sources, "source"),
    ):
        counts.update(count_integers(valid[name]))
    numbers, shards, cohort = pseudonymize(seen, valid["subject_id"], job, findings.subjects)
    rows = valid.drop("subject_id").with_columns(
        pl.col("row") + (findings.files.index(file) << FILE_SHIFT),
        subject=pl.Series(numbers),
        shard=pl.Series(shards),
    )
    return rows, cohort


def _spill_blocks(
    job: ClaimsJob,
    part: int,
    findings: CleaningFindings,
    blocks: Sequence[tuple[pl.DataFrame, pl.DataFrame]],
) -> None:
    """Spill a stretch of the source, if it has valid rows."""
    if not blocks:
        return
    paths = _name_spill_files(job, part, findings.stretches)
    for path, frames in zip(paths, zip(*blocks, strict=True), strict=True):
        spill.write_partitions(path, pl.concat(frames), job.shards)
    findings.stretches += 1


def _select_life_dates(job: ClaimsJob) -> pl.DataFrame | None:
    """Days that decide which rows of a subject are valid: subject_id, birth_day, death_day,
    index_day, as far as known.
    """
    facts = subjects.join_subject_tables(job)
    return (
        None
        if facts is None
        else facts.select("subject_id", *sorted(LIFE_DAYS & set(facts.columns)))
    )


def _name_spill_files(job: ClaimsJob, part: int, number: int) -> tuple[Path, Path]:
    """Of the rows of a stretch, and of its subjects."""
    return (
        job.home / f"{job.stem}-{part}-rows-{number}.arrow",
        job.home / f"{job.stem}-{part}-people-{number}.arrow",
    )


def join_parts(job: ClaimsJob, parts: int) -> tuple[CleaningFindings, list[SpilledStretch]]:
    """The findings and stretches of all parts, with common numbers of codes and files."""
    total, spilled = CleaningFindings(done=True), []
    code_numbers: dict[IcdCode, int] = {}
    before = np.zeros(job.shards, np.int64)  # subjects of other parts, by shard
    for part in range(1, parts + 1):
        findings = CleaningFindings.load(findings_path(job.home, job.stem, part))
        codes = np.array(
            [code_numbers.setdefault(code, len(code_numbers)) for code in findings.codes], np.int32
        )
        total.files += [file for file in findings.files if file not in total.files]
        files = np.array(list(map(total.files.index, findings.files)), np.int64)
        for file, account in findings.accounts.items():
            total.add_account(file, account)
        total.days.update(findings.days)
        total.code_counts.update({int(codes[code]): n for code, n in findings.code_counts.items()})
        total.sources.update(findings.sources)
        numbers = PartNumbers(codes, files, before)
        spilled += [
            SpilledStretch(*_name_spill_files(job, part, number), numbers)
            for number in range(findings.stretches)
        ]
        before = before + findings.subjects
    total.codes = list(code_numbers)
    total.latest = clean.find_data_end(total.days)
    return total, spilled
