"""The first pass: rows are cleaned as they stream by and kept by shard as integers under
pseudonyms, those of a small source in memory.

Those of a larger one are spilled to disk. After each spill file the counts so far are saved, so
that a run continues where a killed one ended. Memory does not grow with the data. The parts of a
job array have separate spill files; `join_parts` renumbers codes and files of all parts.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from bitimely_core.claims import clean, dates, spill, splits
from bitimely_core.claims.codes import IcdCode
from bitimely_core.claims.distinct import count_integers, number_texts
from bitimely_core.claims.job import FILE_SHIFT, ClaimsJob, CleaningFindings
from bitimely_core.claims.spill import PartNumbers, Stretch

SPILL_ROWS = 1 << 20  # valid rows of a stretch
# of the stretches that one process keeps in memory from one pass to the next: some ten million rows
HELD_BYTES = 320 << 20
CACHED_SUBJECTS = 1 << 21  # subjects whose number is kept in memory: 24 bytes each


def findings_path(home: Path, stem: str, part: int) -> Path:
    """The saved findings of a part."""
    return home / f"{stem}-{part}.json"


def clean_source(
    job: ClaimsJob, part: int = 1, parts: int = 1, *, held: int = 0
) -> tuple[CleaningFindings, list[Stretch]]:
    """Clean all rows, or every `parts`-th block from the `part`-th on; more than `held` bytes are
    spilled. Continues from what is spilled.
    """
    run, claims = job.run, job.claims
    notes = findings_path(job.home, job.stem, part)
    findings, stretches = load_part(job, part)
    if findings.done:
        return findings, stretches
    job.book.resume(findings.codes)
    findings.codes = job.book.codes
    findings.subjects = findings.subjects or [0] * job.shards
    life_dates, seen = _select_life_dates(claims.subjects, claims.labels), PseudonymCache()
    # of the stretch: rows and subjects by shard
    blocks: list[tuple[list[pl.DataFrame], list[pl.DataFrame]]] = []
    waiting = size = 0  # rows of the stretch; bytes of all stretches

    def keep() -> None:
        nonlocal waiting, size
        rows, cohort = map(spill.join_partitions, zip(*blocks, strict=True))
        stretches.append(Stretch(rows, cohort))
        size += sum(int(part.estimated_size()) for part in (*rows, *cohort))
        blocks.clear()
        waiting = 0
        while findings.stretches < len(stretches) and (findings.stretches or size > held):
            at = findings.stretches
            stretches[at] = _spill_stretch(job, part, at, stretches[at])
            findings.stretches += 1

    for number, frame in enumerate((claims.survey or claims.events)()):
        run.stop.check()
        if number < findings.blocks or number % parts != (part - 1) % parts:
            continue
        file = str(frame["file"][0])
        if file not in findings.files:
            findings.files.append(file)
        valid, account = clean.clean_rows(
            frame,
            job.book,
            vocab=claims.vocab,
            source=claims.source,
            life_dates=life_dates,
            copy_key=True,
            minutes=job.options.time_unit == "minute",
        )
        findings.accounts.setdefault(file, clean.RowAccount()).__iadd__(account)
        for counts, column in (
            (findings.days, "day"),
            (findings.code_counts, "code"),
            (findings.sources, "source"),
        ):
            counts.update(count_integers(valid[column]))
        if valid.height:
            numbers, shards, fresh = pseudonymize(seen, valid["subject_id"], job, findings.subjects)
            row = pl.col("row") + (findings.files.index(file) << FILE_SHIFT)
            rows = valid.drop("subject_id").with_columns(
                row, subject=pl.Series(numbers), shard=pl.Series(shards)
            )
            blocks.append(
                (spill.partition_rows(rows, job.shards), spill.partition_rows(fresh, job.shards))
            )
            waiting += valid.height
        findings.blocks = number + 1
        if waiting >= SPILL_ROWS:
            keep()
            if findings.stretches:
                findings.save(notes)
        if run.progress is not None:
            run.progress(
                f"clean {run.dataset.name}",
                sum(account.rows for account in findings.accounts.values()),
                None,
            )
    if blocks:
        keep()
    findings.done = True
    if findings.stretches == len(stretches):
        findings.save(notes)
    return findings, stretches


def load_part(job: ClaimsJob, part: int) -> tuple[CleaningFindings, list[Stretch]]:
    """The saved findings of a part, and its spill files."""
    findings = CleaningFindings.load(findings_path(job.home, job.stem, part))
    return findings, [
        Stretch(*_name_spill_files(job, part, number)) for number in range(findings.stretches)
    ]


def _select_life_dates(
    subjects: pl.DataFrame | None, labels: pl.DataFrame | None
) -> pl.DataFrame | None:
    """Days that decide which rows of a subject are valid: subject_id, birth_day, death_day,
    index_day, as far as known.
    """
    life_dates: pl.DataFrame | None = None
    if subjects is not None:
        birth, death = dates.parse_days(subjects["birth"]), dates.parse_days(subjects["death"])
        life_dates = subjects.select("subject_id", birth_day=birth, death_day=death)
    if labels is not None and "index_date" in labels.columns:
        ends = labels.select("subject_id", index_day=dates.parse_days(labels["index_date"]))
        life_dates = (
            ends
            if life_dates is None
            else life_dates.join(ends, on="subject_id", how="full", coalesce=True)
        )
    return life_dates


def _name_spill_files(job: ClaimsJob, part: int, number: int) -> tuple[Path, Path]:
    """Of the rows of a stretch, and of its subjects."""
    return (
        job.home / f"{job.stem}-{part}-rows-{number}.parquet",
        job.home / f"{job.stem}-{part}-people-{number}.parquet",
    )


def _spill_stretch(job: ClaimsJob, part: int, number: int, stretch: Stretch) -> Stretch:
    """The stretch on disk."""
    paths = _name_spill_files(job, part, number)
    for path, parts in zip(paths, (stretch.rows, stretch.cohort), strict=True):
        assert not isinstance(parts, Path)
        spill.write_partitions(path, parts)
    return Stretch(*paths)


@dataclass
class PseudonymCache:
    """Subjects seen so far, sorted by `marks`; of two with equal marks only the first."""

    # two hashes of the raw id, together 128 bits
    marks: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    checks: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    numbers: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint32))  # in the shard
    shards: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))


def pseudonymize(
    seen: PseudonymCache, ids: pl.Series, job: ClaimsJob, counts: list[int]
) -> tuple[np.ndarray, np.ndarray, pl.DataFrame]:
    """Of rows with raw ids: number and shard of each; and `compute_digests` of ids not seen before,
    numbered by shard from `counts` on, which grows.
    """
    marks, checks = ids.hash().to_numpy(), ids.hash(seed=1).to_numpy()
    numbers, shards = np.zeros(len(ids), np.uint32), np.zeros(len(ids), np.int32)
    order = _sort_marks(marks)  # a search goes much faster in order
    known = np.zeros(len(ids), bool)
    if len(seen.marks):
        place = np.empty(len(ids), np.int64)
        place[order] = np.minimum(np.searchsorted(seen.marks, marks[order]), len(seen.marks) - 1)
        known = (seen.marks[place] == marks) & (seen.checks[place] == checks)
        numbers, shards = seen.numbers[place], seen.shards[place]
    new = np.flatnonzero(~known)
    row, number = number_texts(ids.gather(new))
    fresh = compute_digests(ids.gather(new[row]).to_list(), job)
    own = {
        "marks": marks[new[row]],
        "checks": checks[new[row]],
        "shards": fresh["shard"].to_numpy(),
    }
    in_block = (
        fresh.select(pl.int_range(pl.len(), dtype=pl.UInt32).over("shard")).to_series().to_numpy()
    )
    own["numbers"] = np.array(counts, np.uint32)[own["shards"]] + in_block
    counts[:] = (counts + np.bincount(own["shards"], minlength=len(counts))).tolist()
    numbers[new], shards[new] = own["numbers"][number], own["shards"][number]
    kept = np.argsort(own["marks"])[: max(0, CACHED_SUBJECTS - len(seen.marks))]
    at = np.searchsorted(seen.marks, own["marks"][kept])
    for name, values in own.items():
        setattr(seen, name, np.insert(getattr(seen, name), at, values[kept]))
    return numbers, shards, fresh


def _sort_marks(marks: np.ndarray) -> np.ndarray:
    """The order of numbers by their first bits, [n] int64: numpy sorts integers several times
    faster than it finds an order.
    """
    bits = np.uint64(max(len(marks), 1).bit_length())
    packed: NDArray[Any] = (marks >> bits << bits) + np.arange(len(marks), dtype=np.uint64)
    packed.sort()
    return (packed & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)


def compute_digests(names: list[str], job: ClaimsJob) -> pl.DataFrame:
    """Of raw ids: digest (Binary: HMAC-SHA256 under the key), split_bin UInt16, shard Int32."""
    return pl.DataFrame(
        {
            "digest": pl.Series(
                [hmac.digest(job.key, name.encode(), "sha256") for name in names], dtype=pl.Binary
            ),
            "split_bin": splits.compute_bins(names, job.options.seed),
            "shard": splits.assign_shards(names, job.shards)
            if job.shards > 1
            else np.zeros(len(names), np.int32),
        }
    )


def to_keys(digests: pl.Series) -> np.ndarray:
    """The first 8 bytes of each digest as a number, in whose order the digests are, [n] uint64."""
    return digests.bin.head(8).bin.reinterpret(dtype=pl.UInt64, endianness="big").to_numpy()


def join_parts(
    cleaned: Sequence[tuple[CleaningFindings, list[Stretch]]],
) -> tuple[CleaningFindings, list[Stretch]]:
    """The findings and stretches of all parts, with common numbers of codes and files."""
    total, spilled = CleaningFindings(done=True), []
    code_of: dict[IcdCode, int] = {}
    subjects = np.zeros(len(cleaned[0][0].subjects), np.int64)  # of the parts before, by shard
    for part, (one, stretches) in enumerate(cleaned):
        codes = np.array([code_of.setdefault(code, len(code_of)) for code in one.codes], np.int32)
        total.files += [file for file in one.files if file not in total.files]
        files = np.array([total.files.index(file) for file in one.files], np.int64)
        for file, account in one.accounts.items():
            total.accounts.setdefault(file, clean.RowAccount()).__iadd__(account)
        total.days.update(one.days)
        total.code_counts.update({int(codes[code]): n for code, n in one.code_counts.items()})
        total.sources.update(one.sources)
        numbers = PartNumbers(codes, files, subjects) if part else None
        spilled += [stretch._replace(numbers=numbers) for stretch in stretches]
        subjects = subjects + one.subjects
    total.codes = list(code_of)
    total.latest = clean.find_data_end(total.days)
    return total, spilled
