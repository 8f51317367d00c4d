"""The second pass of an ingest: one shard of subjects after another becomes events, subjects and
labels of the cache.

The events of a finished shard are in their final file. Its subjects, labels and hashes wait in
files of their own until all are merged.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import BaseModel

from bitimely_core.claims import (
    cluster,
    engines,
    event_labels,
    label_rules,
    phecode_maps,
    shortcut_baselines,
    spill,
    steps,
    subjects,
)
from bitimely_core.claims.clean import EXAMPLES, RowAccount
from bitimely_core.claims.distinct import sort_stably
from bitimely_core.claims.job import DAY_COLUMNS, FILE_SHIFT, SPAN_DAYS, ClaimsJob, CleaningFindings
from bitimely_core.claims.label_rules import SOURCES
from bitimely_core.claims.periods import PERIOD_COLUMNS
from bitimely_core.claims.phecode_maps import SEXES
from bitimely_core.claims.pseudonyms import to_keys
from bitimely_core.claims.reversals import find_reversed
from bitimely_core.claims.steps import ClaimsShard
from bitimely_core.claims.subjects import CleanedSource
from bitimely_core.errors import Reason, safe_text
from bitimely_core.progress import report_progress
from bitimely_core.store import storage
from bitimely_core.store.records import StoredFile

ROWS = {  # columns of the rows of a shard
    "subject": pl.Int32,
    "day": pl.Int32,
    "code": pl.Int32,
    "source": pl.Int8,
    "row": pl.Int64,
    "late": pl.Boolean,
}
MEASURES = ("value", "minute")  # further columns, which not every ingest has
# reasons for which the second pass removes valid rows -> their fault
LATE_FAULTS = {Reason.DATE_OUTSIDE_LIFE: "future", Reason.REVERSED: "reversed"}
LABEL_KINDS = ("y", "onset")  # columns of a label: y_<name>, onset_<name>
DAY_MINUTES = 1440


class FinishedShard(BaseModel):
    """A finished shard."""

    events: tuple[str, StoredFile]  # name, and size and hash
    accounts: dict[str, RowAccount]  # by file: rows that left after the first pass
    agreement: list[tuple[tuple[str, str, str], int]]  # (rule, flag, cell), subjects
    other_sex: int  # rows with a PheCode of the other sex


def write_shards(
    job: ClaimsJob, cleaned: CleanedSource, keys: np.ndarray
) -> Iterator[FinishedShard]:
    """Every shard in turn; one that an earlier run has finished is not made again."""
    made: dict[int, FinishedShard] = {}
    if job.options.engine == "spark":  # an executor reads the keys from a file
        path = job.home / f"{job.stem}-keys.npy"
        write_keys = partial(np.lib.format.write_array, array=keys, allow_pickle=False)
        storage.write_file(path, write_keys)
        missing = [number for number in range(job.shards) if _load_shard(job, number) is None]
        task = partial(_finish_shard, cluster.detach_job(job), cleaned, path)
        made = dict(zip(missing, engines.run_tasks(task, missing, job.run.stop), strict=True))
    for number in range(job.shards):
        job.run.stop.check()
        done = made.get(number) or _load_shard(job, number)
        yield done or _finish_shard(job, cleaned, keys, number)
        report_progress(f"ingest {job.run.dataset.name}", number + 1, job.shards)


def _finish_shard(
    job: ClaimsJob, cleaned: CleanedSource, keys: np.ndarray | Path, number: int
) -> FinishedShard:
    """Write a shard, and record that it is finished. `keys`: sorted, or the file that holds
    them.
    """
    keys = np.load(keys, mmap_mode="r") if isinstance(keys, Path) else keys
    cohort, findings = subjects.present_subjects(job, cleaned, number), cleaned.findings
    rows = spill.read_rows(cleaned.stretches, number)
    if not rows.is_empty():  # `subject` becomes the position in the cohort
        row_keys = to_keys(spill.read_subjects(cleaned.stretches, number)["digest"])
        place = np.searchsorted(to_keys(cohort["digest"]), row_keys).astype(np.int32)
        rows = rows.with_columns(subject=pl.Series(place).gather(rows["subject"]))
    rows, accounts = resolve_duplicates(rows, findings)
    position = np.searchsorted(keys, to_keys(cohort["digest"]))
    cohort = cohort.drop("digest", *subjects.PRESENCE).with_columns(
        subject_id=pl.Series(position, dtype=pl.Int64)
    )
    shard = steps.label_shard(
        ClaimsShard(rows=rows, codes=findings.codes, cohort=cohort, rules=job.rules)
    )
    agreement = list(_count_agreement(shard.cohort, job))
    shard = _apply_labels(shard, job)
    shard = _subtract_first_days(shard, keep_dates=job.run.options["keep_dates"])
    _write_subject_files(job, shard, number)
    events, other_sex = _make_events(shard, job)
    done = FinishedShard(
        events=spill.write_table(job.run.out, f"events-{number:05d}", [events]),
        accounts=accounts,
        agreement=agreement,
        other_sex=other_sex,
    )
    storage.write_json(_shard_path(job, number), done.model_dump(mode="json"))
    return done


def _shard_path(job: ClaimsJob, number: int) -> Path:
    return job.home / f"{job.stem}-shard-{number}.json"


def list_shard_files(job: ClaimsJob, kind: str) -> list[Path]:
    """The files of all shards of one kind (subjects, labels, contents), to be merged when all
    shards are finished.
    """
    return [job.home / f"{job.stem}-{kind}-{number}.parquet" for number in range(job.shards)]


def _write_subject_files(job: ClaimsJob, shard: ClaimsShard, number: int) -> None:
    """Write subjects, labels and hashes of a shard, to be merged with those of the others."""
    columns = ("subject_id", *DAY_COLUMNS, *PERIOD_COLUMNS, "sex", "split_bin", "split")
    hashes = _hash_subjects(shard, job.names)
    heads = np.frombuffer(b"".join(hashes), ">u4")[::8].astype(np.int64)
    frames = {
        "subjects": shard.cohort.select(name for name in columns if name in shard.cohort.columns),
        "labels": event_labels.to_long_labels(shard.cohort, job.names),
        "contents": pl.DataFrame({"head": heads, "content": pl.Series(hashes, dtype=pl.Binary)}),
    }
    for kind, frame in frames.items():
        storage.write_parquet(list_shard_files(job, kind)[number], frame.to_arrow())


def _load_shard(job: ClaimsJob, number: int) -> FinishedShard | None:
    """A shard that is finished and intact."""
    path = _shard_path(job, number)
    if not path.is_file():
        return None
    done = FinishedShard.model_validate_json(path.read_bytes())
    name, file = done.events
    events = job.run.out / name
    is_intact = events.is_file() and storage.hash_with_size(events) == (file.sha256, file.size)
    return done if is_intact else None


def resolve_duplicates(
    rows: pl.DataFrame, findings: CleaningFindings
) -> tuple[pl.DataFrame, dict[str, RowAccount]]:
    """The rows of a shard without copies and days after the end of the data, by subject and day;
    file -> account of those that leave or have no input.

    Rows: subject (position in the cohort), day, code, source, row, late. Rows without PheCode and
    those after the index day are counted too; they stay for the label rules.
    """
    if rows.is_empty():
        return pl.DataFrame(schema=ROWS), {}
    accounts: dict[str, RowAccount] = {}
    if findings.latest is not None:
        is_future = pl.col("day") > findings.latest
        _add_lost(accounts, findings, Reason.DATE_OUTSIDE_LIFE, rows.filter(is_future))
        rows = rows.filter(~is_future)
    if "reversal" in rows.columns:
        is_reversed = find_reversed(rows)
        _add_lost(accounts, findings, Reason.REVERSED, rows.filter(is_reversed))
        rows = rows.filter(~is_reversed)
    order, copy = _find_copies(rows, len(findings.codes))
    silent = np.array([not code.phecodes for code in findings.codes], bool)[rows["code"].to_numpy()]
    if "late" not in rows.columns:
        rows = rows.with_columns(late=pl.lit(value=False))
    late = rows["late"].to_numpy()
    for reason, is_lost in (
        (Reason.DUPLICATES, copy),
        (Reason.UNMAPPED_CODE, ~copy & silent),
        (Reason.LABEL_LEAKAGE, ~copy & late & ~silent),
    ):
        _add_lost(accounts, findings, reason, rows.filter(pl.Series(is_lost)))
    measures = [name for name in MEASURES if name in rows.columns]
    return rows.select(*ROWS, *measures)[order[~copy[order]]], accounts


def _add_lost(
    accounts: dict[str, RowAccount], findings: CleaningFindings, reason: Reason, rows: pl.DataFrame
) -> None:
    """Count rows that leave, or have no input, in the accounts of their files."""
    file = pl.col("row") // (1 << FILE_SHIFT)
    for (number,), part in rows.group_by(file, maintain_order=True):
        account = accounts.setdefault(findings.files[int(str(number))], RowAccount())
        account.reasons[reason] += part.height
        examples = [f"row {row % (1 << FILE_SHIFT)}" for row in part["row"].head(EXAMPLES)]
        if reason == Reason.UNMAPPED_CODE:
            codes = part["code"].head(EXAMPLES)
            examples = [safe_text(findings.codes[code].code) for code in codes]
        account.add_examples(reason, examples)
        if fault := LATE_FAULTS.get(reason):  # the first pass has counted them as valid
            account.faults[fault] += part.height
            account.steps.subtract(findings.codes[code].step for code in part["code"])


def _find_copies(rows: pl.DataFrame, n_codes: int) -> tuple[np.ndarray, np.ndarray]:
    """The order of the rows by subject and day, those of a day as in the source; and of each row
    whether an earlier one is the same.
    """
    subject, day, code = (
        rows[name].to_numpy().astype(np.int64) for name in ("subject", "day", "code")
    )
    size = len(day)
    if not size:
        return np.empty(0, np.int64), np.empty(0, bool)
    low = int(day.min())
    order, place = sort_stably(subject * (int(day.max()) - low + 1) + (day - low))
    same = place[1:] == place[:-1]
    several = np.append(same, False) | np.append(False, same)  # rows of a subject on a day
    shared = order[several]
    keys = pl.Series(place[several] * n_codes + code[shared])
    suspects = shared[keys.is_duplicated().to_numpy()]
    copy = np.zeros(size, bool)
    is_first = pl.struct("subject", "day", "code", "copy_key").is_first_distinct()
    copy[suspects] = rows[suspects].select(~is_first).to_series().to_numpy()
    return order, copy


def _pack_keys(rows: pl.DataFrame) -> NDArray[np.int64]:
    """Subject and day of rows as one integer, in whose order they are sorted."""
    shifted = rows["day"].to_numpy().astype(np.int64) + SPAN_DAYS // 2
    return rows["subject"].to_numpy().astype(np.int64) * SPAN_DAYS + shifted


def _count_agreement(
    cohort: pl.DataFrame, job: ClaimsJob
) -> Iterator[tuple[tuple[str, str, str], int]]:
    """(rule, flag, cell), subjects: how often the label of each rule agrees with each column of the
    source.
    """
    for rule, flag in itertools.product(job.rules, job.flags):
        label, column = (
            cohort[name].fill_null(-1).to_numpy() for name in (f"y_{rule.name}", f"flag_{flag}")
        )
        for cell, n in shortcut_baselines.count_agreement(label, column).items():
            if n:
                yield (rule.name, flag, cell), n


def _apply_labels(shard: ClaimsShard, job: ClaimsJob) -> ClaimsShard:
    """The shard with its labels, of rules or of columns of the source.

    Rows after the index day leave: only the rules need them.
    """
    cohort = shard.cohort
    if not job.ruled:
        cohort = cohort.drop([f"{kind}_{rule.name}" for rule in job.rules for kind in LABEL_KINDS])
    cohort = cohort.rename({f"flag_{flag}": f"y_{job.name_flag(flag)}" for flag in job.flags})
    onsets = [f"onset_{name}" for name in job.names]
    cohort = cohort.with_columns(
        pl.lit(None, pl.Int32).alias(onset) for onset in onsets if onset not in cohort.columns
    )
    if job.options.control_exclusions and job.ruled:
        defining = label_rules.find_defining_phecodes(job.rules, job.codemap.tables)
        related = phecode_maps.related_phecodes(job.codemap, defining)
        cohort = event_labels.exclude_controls(shard.rows, shard.codes, related, cohort)
    rows = shard.rows.filter(~pl.col("late")).drop("late")
    return replace(shard, cohort=cohort, rows=rows)


def _subtract_first_days(shard: ClaimsShard, *, keep_dates: bool) -> ClaimsShard:
    """All days relative to the subject's first valid row; null for a subject without any."""
    if keep_dates:
        return shard
    cohort = shard.cohort
    days = [name for name in cohort.columns if name in DAY_COLUMNS or name.startswith("onset_")]
    begin = cohort["first_day"].fill_null(0).gather(shard.rows["subject"])
    rows = shard.rows.with_columns((pl.col("day") - begin).cast(pl.Int32))
    cohort = cohort.with_columns(
        (pl.col(name) - pl.col("first_day")).cast(pl.Int32).alias(name) for name in days
    )
    lists = [name for name in PERIOD_COLUMNS if name in cohort.columns]
    cohort = cohort.with_columns(pl.col(name) - pl.col("first_day") for name in lists)
    return replace(shard, rows=rows, cohort=cohort.with_columns(first_day=pl.col("first_day") * 0))


def _make_events(shard: ClaimsShard, job: ClaimsJob) -> tuple[pl.DataFrame, int]:
    """The rows, which are ordered by subject and day, in MEDS columns by time.

    `row` is their order in the source. Also the number of rows that had a PheCode of the other sex,
    which is left out on request.
    """
    rows = shard.rows
    minute = rows["day"].cast(pl.Int64) * DAY_MINUTES
    if "minute" in rows.columns:
        packed = _pack_keys(rows)
        order = np.argsort(packed * DAY_MINUTES + rows["minute"].to_numpy(), kind="stable")
        rows, minute = rows[order], (minute + rows["minute"])[order]
    texts = pl.Series([code.text for code in shard.codes], dtype=pl.String)
    phecodes, other_sex = _list_phecodes(shard, rows, job)
    no_value = pl.repeat(None, rows.height, dtype=pl.Float32, eager=True)
    events = pl.DataFrame(
        {
            "subject_id": shard.cohort["subject_id"].gather(rows["subject"]),
            "time": (minute * 60_000_000).cast(pl.Datetime("us")),
            "code": texts.gather(rows["code"]),
            "numeric_value": rows["value"] if "value" in rows.columns else no_value,
            "source": pl.Series(SOURCES, dtype=pl.Enum(SOURCES)).gather(rows["source"]),
            "phecodes": phecodes,
            "row": rows["row"],
        }
    )
    return events, other_sex


def _list_phecodes(shard: ClaimsShard, rows: pl.DataFrame, job: ClaimsJob) -> tuple[pl.Series, int]:
    """The PheCodes of rows, on request without those of the other sex, and how many rows had one.

    Rows of subjects of unknown sex keep all.
    """
    lists = [list(code.phecodes) for code in shard.codes]
    phecodes = every = pl.Series(lists, dtype=pl.List(pl.String)).gather(rows["code"])
    sexes = job.codemap.sexes
    if not job.options.sex_restrictions:
        return every, 0
    sex = shard.cohort["sex"].gather(rows["subject"]).fill_null(0)
    for number in SEXES.values():
        admitted = [
            [phecode for phecode in texts if sexes.get(phecode, number) == number]
            for texts in lists
        ]
        of_sex = pl.Series(admitted, dtype=pl.List(pl.String)).gather(rows["code"])
        phecodes = phecodes.zip_with(sex != number, of_sex)
    return phecodes, int((phecodes.list.len() != every.list.len()).sum())


def _hash_subjects(shard: ClaimsShard, names: list[str]) -> list[bytes]:
    """SHA-256 of the rows of each subject, in a canonical order, and of its labels; ids do not
    enter.
    """
    rows, cohort = shard.rows, shard.cohort
    ranks = np.argsort(np.argsort(np.array([code.text for code in shard.codes], str)))
    size = max(len(ranks), 1) * len(SOURCES)
    rank = ranks[rows["code"].to_numpy()] * len(SOURCES) + rows["source"].to_numpy()
    packed = _pack_keys(rows) * size + rank
    measures = [
        (rows[name].fill_null(float("nan")) if name == "value" else rows[name]).to_numpy()
        for name in MEASURES
        if name in rows.columns
    ]
    order = np.lexsort((*measures, packed))
    packed, measures = packed[order], [measure[order] for measure in measures]
    bounds = np.searchsorted(packed, np.arange(cohort.height + 1) * (SPAN_DAYS * size))
    packed %= SPAN_DAYS * size
    columns = [column.data for column in (packed, *measures)]
    return [
        hashlib.sha256(b"".join([*(column[low:high] for column in columns), label])).digest()
        for label, (low, high) in zip(
            _write_labels(cohort, names), itertools.pairwise(bounds.tolist()), strict=True
        )
    ]


def _write_labels(cohort: pl.DataFrame, names: Sequence[str]) -> pl.Series:
    """The labels and onsets of each subject as bytes, written as Python writes tuples."""
    cells = [
        pl.col(f"{kind}_{name}").cast(pl.String).fill_null("None")
        for name in names
        for kind in LABEL_KINDS
    ]
    text = pl.format("({})", pl.concat_str(cells, separator=", ") if cells else pl.lit(""))
    return cohort.with_columns(labels=text.cast(pl.Binary))["labels"]


def hash_content(job: ClaimsJob, findings: CleaningFindings, slices: int) -> str:
    """SHA-256 over the sorted hashes of the subjects and over their codes."""
    digest = hashlib.sha256(b"sex restrictions" if job.options.sex_restrictions else b"")
    for frame in spill.merge_sorted(
        list_shard_files(job, "contents"), "head", 1 << 32, slices, ("content",)
    ):
        digest.update("".join(f"{content.hex()}\n" for content in frame["content"]).encode())
    digest.update(repr(sorted((code.text, code.phecodes) for code in findings.codes)).encode())
    return digest.hexdigest()
