"""The first pass: rows are cleaned as they stream by and spilled to disk as integers under pseudonyms.

After each spill file the counts so far are saved, so that a run continues where a killed one ended. Memory does not grow with the data. The
parts of a job array have separate spill files; `join_parts` renumbers codes and files of all parts.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl

from bitimely_core.claims import clean, dates, splits
from bitimely_core.claims.codes import IcdCode
from bitimely_core.claims.job import FILE_SHIFT, ClaimsJob, CleaningFindings
from bitimely_core.claims.spill import SpillFile, write_partitioned

SPILL_ROWS = 1 << 20  # valid rows of a spill file
CACHED_SUBJECTS = 1 << 21  # subjects whose pseudonym is kept in memory: 28 bytes each


def findings_path(home: Path, stem: str, part: int) -> Path:
    """The saved findings of a part."""
    return home / f"{stem}-{part}.json"


def clean_source(job: ClaimsJob, part: int = 1, parts: int = 1) -> CleaningFindings:
    """Clean all rows, or every `parts`-th block from the `part`-th on, and spill them by shard; continues from saved findings."""
    run, claims = job.run, job.claims
    notes = findings_path(job.home, job.stem, part)
    findings = CleaningFindings.load(notes)
    if findings.done:
        return findings
    job.book.resume(findings.codes)
    findings.codes = job.book.codes
    life_dates, seen = _select_life_dates(claims.subjects, claims.labels), PseudonymCache()
    rows: list[pl.DataFrame] = []
    cohort: list[pl.DataFrame] = []

    def spill() -> None:
        for kind, frames in (("rows", rows), ("people", cohort)):
            write_partitioned(_spill_path(job, part, kind, findings.stretches), pl.concat(frames), job.shards)
            frames.clear()
        findings.stretches += 1

    for number, frame in enumerate(claims.events()):
        run.stop.check()
        if number < findings.blocks or number % parts != part - 1:
            continue
        for (name,), block in frame.group_by("file", maintain_order=True):
            file = str(name)
            if file not in findings.files:
                findings.files.append(file)
            valid, account = clean.clean_rows(
                block, job.book, vocab=claims.vocab, source=claims.source, life_dates=life_dates, copy_key=True
            )
            findings.accounts.setdefault(file, clean.RowAccount()).__iadd__(account)
            for counts, column in ((findings.days, "day"), (findings.code_counts, "code"), (findings.sources, "source")):
                counts.update(dict(valid[column].value_counts().iter_rows()))
            if valid.height:
                names, fresh = pseudonymize(seen, valid["subject_id"], job)
                valid = valid.join(names, on="subject_id", how="left", maintain_order="left").drop("subject_id")
                rows.append(valid.with_columns(pl.col("row") + (findings.files.index(file) << FILE_SHIFT)))
                cohort.append(fresh)
        findings.blocks = number + 1
        if sum(part.height for part in rows) >= SPILL_ROWS:
            spill()
            findings.save(notes)
        if run.progress is not None:
            run.progress(f"clean {run.dataset.name}", sum(account.rows for account in findings.accounts.values()), None)
    if rows:
        spill()
    findings.done = True
    findings.save(notes)
    return findings


def _select_life_dates(subjects: pl.DataFrame | None, labels: pl.DataFrame | None) -> pl.DataFrame | None:
    """Days that decide which rows of a subject are valid: subject_id, birth_day, death_day, index_day, as far as known."""
    life_dates: pl.DataFrame | None = None
    if subjects is not None:
        birth, death = dates.parse_days(subjects["birth"]), dates.parse_days(subjects["death"])
        life_dates = subjects.select("subject_id", birth_day=birth, death_day=death)
    if labels is not None and "index_date" in labels.columns:
        ends = labels.select("subject_id", index_day=dates.parse_days(labels["index_date"]))
        life_dates = ends if life_dates is None else life_dates.join(ends, on="subject_id", how="full", coalesce=True)
    return life_dates


def _spill_path(job: ClaimsJob, part: int, kind: str, stretch: int) -> Path:
    return job.home / f"{job.stem}-{part}-{kind}-{stretch}.parquet"


@dataclass
class PseudonymCache:
    """Pseudonyms computed so far, sorted by `marks`; of two subjects with equal marks only the first."""

    marks: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))  # two hashes of the raw id, together 128 bits
    checks: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    keys: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    shards: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))


def pseudonymize(seen: PseudonymCache, ids: pl.Series, job: ClaimsJob) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Of raw ids: subject_id, key (the first 8 bytes of the digest as a number), shard; and `compute_digests` of those not seen before."""
    distinct = ids.unique()
    marks, checks = distinct.hash().to_numpy(), ("|" + distinct).hash().to_numpy()
    known = np.zeros(len(distinct), bool)
    keys, shards = np.zeros(len(distinct), np.uint64), np.zeros(len(distinct), np.int32)
    at = np.searchsorted(seen.marks, marks)
    if len(seen.marks):
        place = np.minimum(at, len(seen.marks) - 1)
        known = (seen.marks[place] == marks) & (seen.checks[place] == checks)
        keys[known], shards[known] = seen.keys[place[known]], seen.shards[place[known]]
    new = np.flatnonzero(~known)
    fresh = compute_digests(distinct.gather(new).to_list(), job)
    keys[new], shards[new] = to_keys(fresh["digest"]), fresh["shard"].to_numpy()
    kept = new[np.argsort(marks[new])][: max(0, CACHED_SUBJECTS - len(seen.marks))] if len(new) else new
    for name, values in (("marks", marks), ("checks", checks), ("keys", keys), ("shards", shards)):
        setattr(seen, name, np.insert(getattr(seen, name), at[kept], values[kept]))
    return pl.DataFrame({"subject_id": distinct, "key": keys, "shard": shards}), fresh


def compute_digests(names: list[str], job: ClaimsJob) -> pl.DataFrame:
    """Of raw ids: digest (Binary: HMAC-SHA256 under the key), split_bin UInt16, shard Int32."""
    return pl.DataFrame(
        {
            "digest": pl.Series([hmac.digest(job.key, name.encode(), "sha256") for name in names], dtype=pl.Binary),
            "split_bin": pl.Series(splits.compute_bins(names, job.options.seed), dtype=pl.UInt16),
            "shard": pl.Series([splits.assign_shard(name, job.shards) if job.shards > 1 else 0 for name in names], dtype=pl.Int32),
        }
    )


def to_keys(digests: pl.Series) -> np.ndarray:
    """The first 8 bytes of each digest as a number, in whose order the digests are, [n] uint64."""
    words = np.frombuffer(b"".join(digests), ">u8").reshape(len(digests), 4)
    return words[:, 0].astype(np.uint64)


def join_parts(job: ClaimsJob, parts: int) -> tuple[CleaningFindings, list[SpillFile]]:
    """The findings and spill files of all finished parts, with common numbers of codes and files."""
    total, spilled = CleaningFindings(done=True), []
    code_of: dict[IcdCode, int] = {}
    for part in range(1, parts + 1):
        one = CleaningFindings.load(findings_path(job.home, job.stem, part))
        codes = np.array([code_of.setdefault(code, len(code_of)) for code in one.codes], np.int32)
        total.files += [file for file in one.files if file not in total.files]
        files = np.array([total.files.index(file) for file in one.files], np.int64)
        for file, account in one.accounts.items():
            total.accounts.setdefault(file, clean.RowAccount()).__iadd__(account)
        total.days.update(one.days)
        total.code_counts.update({int(codes[code]): n for code, n in one.code_counts.items()})
        total.sources.update(one.sources)
        pairs = ((_spill_path(job, part, "rows", i), _spill_path(job, part, "people", i)) for i in range(one.stretches))
        spilled += [SpillFile(*pair, codes, files) for pair in pairs]
    total.codes = list(code_of)
    total.latest = clean.find_data_end(total.days)
    return total, spilled
