"""The first pass: rows cleaned as they stream by and laid down as integers, under pseudonyms, a stretch of the source at a time.

Each stretch that is laid down is noted, with all that has been counted until then: what a killed run has done is not done again. What is held
in memory does not grow with the data. The parts of a job array are stretches of their own; `joined` makes one numbering of them all.
"""

from __future__ import annotations

import hmac
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bitimely_core import storage
from bitimely_core.claims import splits
from bitimely_core.claims.job import FILE_SHIFT, ClaimsJob, CleaningFindings, account_from_json, account_to_json
from bitimely_core.claims.spill import SpillFile, write_partitioned

if TYPE_CHECKING:
    import polars as pl

    from bitimely_core.claims.codes import IcdCode

SPILL_ROWS = 1 << 20  # valid rows that are laid down together
CACHED_SUBJECTS = 1 << 21  # subjects whose pseudonym is kept in memory: 28 bytes each


def findings_path(home: Path, stem: str, part: int) -> Path:
    """The note of a part."""
    return home / f"{stem}-{part}.json"


def is_finished(home: Path, stem: str, part: int) -> bool:
    """Whether a part of the first pass is whole."""
    note = findings_path(home, stem, part)
    return note.is_file() and bool(json.loads(note.read_bytes())["done"])


def clean_source(job: ClaimsJob, part: int = 1, parts: int = 1) -> CleaningFindings:
    """Clean all rows, or every `parts`-th block of them from the `part`-th on, and lay them down by shard; go on where a note ends."""
    import polars as pl

    from bitimely_core.claims import clean

    run, claims = job.run, job.claims
    found = _load_findings(findings_path(job.home, job.stem, part))
    if found.done:
        return found
    job.book.recall(found.codes)
    found.codes = job.book.codes
    lives, seen = _select_life_dates(claims.subjects, claims.labels), PseudonymCache()
    rows: list[pl.DataFrame] = []
    people: list[pl.DataFrame] = []

    def lay_down() -> None:
        for kind, frames in (("rows", rows), ("people", people)):
            write_partitioned(_spill_path(job, part, kind, found.stretches), pl.concat(frames), job.shards)
            frames.clear()
        found.stretches += 1

    for number, frame in enumerate(claims.events()):
        run.stop.check()
        if number < found.blocks or number % parts != part - 1:
            continue
        for (name,), block in frame.group_by("file", maintain_order=True):
            file = str(name)
            if file not in found.files:
                found.files.append(file)
            valid, account = clean.clean_rows(block, job.book, vocab=claims.vocab, source=claims.source, lives=lives, twins=True)
            found.accounts.setdefault(file, clean.RowAccount()).__iadd__(account)
            found.days.update(dict(valid["day"].value_counts().iter_rows()))
            found.spoken.update(dict(valid["code"].value_counts().iter_rows()))
            found.sources.update(dict(valid["source"].value_counts().iter_rows()))
            if valid.height:
                names, fresh = pseudonymize(seen, valid["subject_id"], job)
                valid = valid.join(names, on="subject_id", how="left", maintain_order="left").drop("subject_id")
                rows.append(valid.with_columns(pl.col("row") + (found.files.index(file) << FILE_SHIFT)))
                people.append(fresh)
        found.blocks = number + 1
        if sum(part.height for part in rows) >= SPILL_ROWS:
            lay_down()
            _save_findings(job, part, found)
        if run.progress is not None:
            run.progress(f"clean {run.dataset.name}", sum(account.rows for account in found.accounts.values()), None)
    if rows:
        lay_down()
    found.done = True
    _save_findings(job, part, found)
    return found


def _select_life_dates(subjects: pl.DataFrame | None, labels: pl.DataFrame | None) -> pl.DataFrame | None:
    """What of a subject says which of its rows are valid: subject_id, birth_day, death_day, index_day, as far as known."""
    from bitimely_core.claims import dates

    lives: pl.DataFrame | None = None
    if subjects is not None:
        lives = subjects.select("subject_id", birth_day=dates.parse_days(subjects["birth"]), death_day=dates.parse_days(subjects["death"]))
    if labels is not None and "index_date" in labels.columns:
        ends = labels.select("subject_id", index_day=dates.parse_days(labels["index_date"]))
        lives = ends if lives is None else lives.join(ends, on="subject_id", how="full", coalesce=True)
    return lives


def _spill_path(job: ClaimsJob, part: int, kind: str, stretch: int) -> Path:
    return job.home / f"{job.stem}-{part}-{kind}-{stretch}.parquet"


# ---- pseudonyms


def _make_empty() -> np.ndarray:
    return np.empty(0, np.uint64)


@dataclass
class PseudonymCache:
    """Subjects whose pseudonym need not be computed again, sorted by their mark; of two subjects with one mark only the first."""

    marks: np.ndarray = field(default_factory=_make_empty)  # two hashes of the raw id, together 128 bits
    checks: np.ndarray = field(default_factory=_make_empty)
    keys: np.ndarray = field(default_factory=_make_empty)
    shards: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))


def pseudonymize(seen: PseudonymCache, ids: pl.Series, job: ClaimsJob) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The pseudonyms of some raw ids.

    Returns:
        subject_id, key (the first 8 bytes of the digest as a number), shard; and of those not seen before `digests`.
    """
    import polars as pl

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
    import polars as pl

    return pl.DataFrame(
        {
            "digest": pl.Series([hmac.digest(job.key, name.encode(), "sha256") for name in names], dtype=pl.Binary),
            "split_bin": pl.Series(splits.compute_bins(names, job.given["seed"]), dtype=pl.UInt16),
            "shard": pl.Series([splits.assign_shard(name, job.shards) if job.shards > 1 else 0 for name in names], dtype=pl.Int32),
        }
    )


def to_keys(digests: pl.Series) -> np.ndarray:
    """The first 8 bytes of each digest as a number, in whose order the digests are, [n] uint64."""
    whole = np.frombuffer(b"".join(digests), ">u8").reshape(len(digests), 4)
    return whole[:, 0].astype(np.uint64)


# ---- notes


def _save_findings(job: ClaimsJob, part: int, found: CleaningFindings) -> None:
    storage.write_json(
        findings_path(job.home, job.stem, part),
        {
            "blocks": found.blocks,
            "stretches": found.stretches,
            "done": found.done,
            "files": found.files,
            "accounts": {file: account_to_json(account) for file, account in found.accounts.items()},
            "days": [[day, n] for day, n in found.days.items()],
            "spoken": [[code, n] for code, n in found.spoken.items()],
            "sources": [[source, n] for source, n in found.sources.items()],
            "codes": [list(code) for code in found.codes],
        },
    )


def _load_findings(path: Path) -> CleaningFindings:
    """What a note says; nothing where there is none."""
    from bitimely_core.claims.codes import IcdCode

    if not path.is_file():
        return CleaningFindings()
    told = json.loads(path.read_bytes())
    return CleaningFindings(
        blocks=told["blocks"],
        stretches=told["stretches"],
        done=told["done"],
        files=told["files"],
        accounts={file: account_from_json(account) for file, account in told["accounts"].items()},
        days=Counter(dict(told["days"])),
        spoken=Counter(dict(told["spoken"])),
        sources=Counter(dict(told["sources"])),
        codes=[IcdCode(vocab, code, tuple(phecodes), step) for vocab, code, phecodes, step in told["codes"]],
    )


def join_parts(job: ClaimsJob, parts: int) -> tuple[CleaningFindings, list[SpillFile]]:
    """The first pass from its finished parts, codes and files under one numbering."""
    from bitimely_core.claims import clean

    whole, piles = CleaningFindings(done=True), []
    code_of: dict[IcdCode, int] = {}
    for part in range(1, parts + 1):
        one = _load_findings(findings_path(job.home, job.stem, part))
        codes = np.array([code_of.setdefault(code, len(code_of)) for code in one.codes], np.int32)
        whole.files += [file for file in one.files if file not in whole.files]
        files = np.array([whole.files.index(file) for file in one.files], np.int64)
        for file, account in one.accounts.items():
            whole.accounts.setdefault(file, clean.RowAccount()).__iadd__(account)
        whole.days.update(one.days)
        whole.spoken.update({int(codes[code]): n for code, n in one.spoken.items()})
        whole.sources.update(one.sources)
        piles += [
            SpillFile(_spill_path(job, part, "rows", i), _spill_path(job, part, "people", i), codes, files) for i in range(one.stretches)
        ]
    whole.codes = list(code_of)
    whole.latest = clean.find_data_end(whole.days)
    return whole, piles
