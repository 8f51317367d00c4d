"""The second pass: one shard of subjects after another becomes events, subjects and labels of the
cache.

The events of a finished shard are in their final file; its subjects, labels and hashes are kept in
files of their own until all are merged.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
from pydantic import BaseModel

from bitimely_core import storage
from bitimely_core.claims import (
    cluster,
    engines,
    label_rules,
    labels,
    pass1_clean,
    phecode_maps,
    shortcut_baselines,
    spill,
    steps,
    subjects,
)
from bitimely_core.claims.clean import EXAMPLES, RowAccount
from bitimely_core.claims.job import DAY_COLUMNS, FILE_SHIFT, SPAN_DAYS, ClaimsJob, CleaningFindings
from bitimely_core.claims.label_rules import SOURCES
from bitimely_core.claims.spill import Stretch
from bitimely_core.claims.steps import ClaimsShard
from bitimely_core.errors import Reason, safe_text
from bitimely_core.records import StoredFile

MEASURES = ("value", "minute")  # columns of rows that not every ingest has
DAY_MINUTES = 1440
AgreementCounts = Counter[tuple[str, str, str]]
"""(rule, flag, cell) -> subjects."""


class FinishedShard(BaseModel):
    """A finished shard."""

    events: tuple[str, StoredFile]  # name, and size and hash
    accounts: dict[str, RowAccount]  # by file: rows that left after the first pass
    agreement: list[tuple[tuple[str, str, str], int]]  # (rule, flag, cell), subjects
    other_sex: int = 0  # rows with a PheCode of the other sex


def write_shards(
    job: ClaimsJob,
    findings: CleaningFindings,
    spilled: Sequence[Stretch],
    facts_file: Path | None,
    keys: np.ndarray,
) -> Iterator[FinishedShard]:
    """Every shard in turn; one that an earlier run has finished is not made again."""
    made: dict[int, FinishedShard] = {}
    if job.options.engine == "spark":
        keys_file = job.home / f"{job.stem}-keys.npy"
        storage.write_file(
            keys_file, lambda stream: np.lib.format.write_array(stream, keys, allow_pickle=False)
        )
        missing = [number for number in range(job.shards) if _load_shard(job, number) is None]
        task = partial(
            _finish_shard_remotely,
            cluster.detach_job(job),
            findings,
            spilled,
            facts_file,
            keys_file,
        )
        made = dict(zip(missing, engines.run_tasks(task, missing, job.run.stop), strict=True))
    for number in range(job.shards):
        job.run.stop.check()
        done = made.get(number) or _load_shard(job, number)
        yield done or _finish_shard(job, findings, spilled, facts_file, keys, number)
        if job.run.progress is not None:
            job.run.progress(f"ingest {job.run.dataset.name}", number + 1, job.shards)


def _finish_shard_remotely(
    job: ClaimsJob,
    findings: CleaningFindings,
    spilled: Sequence[Stretch],
    facts_file: Path | None,
    keys_file: Path,
    number: int,
) -> FinishedShard:
    """As `_finish_shard`, on an executor, where the keys are in a file."""
    return _finish_shard(
        job, findings, spilled, facts_file, np.load(keys_file, mmap_mode="r"), number
    )


def _finish_shard(
    job: ClaimsJob,
    findings: CleaningFindings,
    spilled: Sequence[Stretch],
    facts_file: Path | None,
    keys: np.ndarray,
    number: int,
) -> FinishedShard:
    cohort = subjects.present_subjects(job, findings, spilled, facts_file, number)
    done = _write_shard(job, findings, _take_rows(spilled, cohort, number), cohort, keys, number)
    storage.write_json(_shard_path(job, number), done.model_dump(mode="json"))
    return done


def _take_rows(spilled: Sequence[Stretch], cohort: pl.DataFrame, number: int) -> pl.DataFrame:
    """The rows of a shard, `subject` as position in its cohort; memory holds them no longer."""
    rows = spill.read_rows(spilled, number)
    spill.release_rows(spilled, number)
    if rows.is_empty():
        return rows
    place = np.searchsorted(
        pass1_clean.to_keys(cohort["digest"]),
        pass1_clean.to_keys(spill.read_subjects(spilled, number)["digest"]),
    )
    return rows.with_columns(subject=pl.Series(place.astype(np.int32)).gather(rows["subject"]))


def _shard_path(job: ClaimsJob, number: int) -> Path:
    return job.home / f"{job.stem}-shard-{number}.json"


def list_shard_files(job: ClaimsJob, kind: str) -> list[Path]:
    """The files of all shards of one kind (subjects, labels, contents), to be merged when all
    shards are finished.
    """
    return [job.home / f"{job.stem}-{kind}-{number}.parquet" for number in range(job.shards)]


def _write_shard(
    job: ClaimsJob,
    findings: CleaningFindings,
    rows: pl.DataFrame,
    cohort: pl.DataFrame,
    keys: np.ndarray,
    number: int,
) -> FinishedShard:
    agreement = AgreementCounts()
    own = pass1_clean.to_keys(cohort["digest"])
    cohort = cohort.drop("digest").with_columns(
        subject_id=pl.Series(np.searchsorted(keys, own), dtype=pl.Int64)
    )
    rows, accounts = resolve_duplicates(rows, findings)
    shard = steps.ClaimsShard(rows=rows, codes=findings.codes, cohort=cohort, rules=job.rules)
    shard = _apply_labels(steps.label_shard(shard), job, agreement)
    shard = _subtract_first_days(shard, keep_dates=job.run.options["keep_dates"])
    hashes = _hash_subjects(shard, job.names)
    heads = np.frombuffer(b"".join(hashes), ">u4")[::8].astype(np.int64)
    cohort = shard.cohort
    frames = {
        "subjects": cohort.select(
            name
            for name in ("subject_id", *DAY_COLUMNS, "sex", "split_bin", "split")
            if name in cohort.columns
        ),
        "labels": labels.to_long_labels(cohort, job.names),
        "contents": pl.DataFrame({"head": heads, "content": pl.Series(hashes, dtype=pl.Binary)}),
    }
    for kind, frame in frames.items():
        storage.write_parquet(list_shard_files(job, kind)[number], frame.to_arrow())
    frame, other_sex = _make_events(shard), 0
    if job.options.sex_restrictions:
        frame, other_sex = _remove_other_sex(frame, shard, job.codemap.sexes)
    events = spill.write_table(job.run.out, f"events-{number:05d}", [frame])
    return FinishedShard(
        events=events, accounts=accounts, agreement=list(agreement.items()), other_sex=other_sex
    )


def _load_shard(job: ClaimsJob, number: int) -> FinishedShard | None:
    """A shard that is finished and intact."""
    path = _shard_path(job, number)
    if not path.is_file():
        return None
    done = FinishedShard.model_validate_json(path.read_bytes())
    name, file = done.events
    events = job.run.out / name
    return (
        done
        if events.is_file() and storage.hash_with_size(events) == (file.sha256, file.size)
        else None
    )


def resolve_duplicates(
    rows: pl.DataFrame, findings: CleaningFindings
) -> tuple[pl.DataFrame, dict[str, RowAccount]]:
    """The rows of a shard without copies and days after the end of the data, by subject and day;
    file -> account of those that leave or have no input.

    Rows: subject (position in the cohort), day, code, source, row, late. Rows without PheCode and
    those after the index day are counted too; they stay for the label rules.
    """
    columns = {
        "subject": pl.Int32,
        "day": pl.Int32,
        "code": pl.Int32,
        "source": pl.Int8,
        "row": pl.Int64,
        "late": pl.Boolean,
    }
    accounts: dict[str, RowAccount] = {}
    if rows.is_empty():
        return pl.DataFrame(schema=columns), accounts

    def add(file: int, reason: Reason, count: int, *examples: str) -> RowAccount:
        account = accounts.setdefault(findings.files[file], RowAccount())
        account.reasons[reason] += count
        account.examples[reason] = [*account.examples.get(reason, []), *examples][:EXAMPLES]
        return account

    if findings.latest is not None:
        gone = rows.filter(pl.col("day") > findings.latest)
        rows = rows.filter(pl.col("day") <= findings.latest)
        for row, code in gone.select("row", "code").iter_rows():
            account = add(
                row >> FILE_SHIFT, Reason.DATE_OUTSIDE_LIFE, 1, f"row {row % (1 << FILE_SHIFT)}"
            )
            account.steps[findings.codes[code].step] -= 1
            account.faults["future"] += 1
    order, copy = _find_copies(rows, len(findings.codes))
    silent = np.array([not code.phecodes for code in findings.codes], bool)[rows["code"].to_numpy()]
    if "late" not in rows.columns:
        rows = rows.with_columns(late=pl.lit(value=False))
    late = rows["late"].to_numpy()
    for reason, mask in (
        (Reason.DUPLICATES, copy),
        (Reason.UNMAPPED_CODE, ~copy & silent),
        (Reason.LABEL_LEAKAGE, ~copy & late & ~silent),
    ):
        lost = rows.select("row", "code").filter(pl.Series(mask))
        for (file,), part in lost.group_by(pl.col("row") // (1 << FILE_SHIFT), maintain_order=True):
            shown = part.head(EXAMPLES)
            texts = [f"row {row % (1 << FILE_SHIFT)}" for row in shown["row"]]
            if reason == Reason.UNMAPPED_CODE:
                texts = [safe_text(findings.codes[code].code) for code in shown["code"]]
            add(int(str(file)), reason, part.height, *texts)
    return rows.select(*columns, *(name for name in MEASURES if name in rows.columns))[
        order[~copy[order]]
    ], accounts


def _find_copies(rows: pl.DataFrame, n_codes: int) -> tuple[np.ndarray, np.ndarray]:
    """The order of the rows by subject and day, those of a day in the order of the source; and of
    each row whether an earlier one is the same.
    """
    subject, day, code = (
        rows[name].to_numpy().astype(np.int64) for name in ("subject", "day", "code")
    )
    size = len(day)
    if not size:
        return np.empty(0, np.int64), np.empty(0, bool)
    low = int(day.min())
    place = subject * (int(day.max()) - low + 1) + (day - low)
    bits = size.bit_length()
    # numpy sorts integers several times faster than it finds an order
    fits = int(place.max(initial=0)) < 1 << (62 - bits)
    if fits:
        packed = np.sort((place << bits) + np.arange(size))
        order, place = packed & ((1 << bits) - 1), packed >> bits
    else:
        order = np.argsort(place, kind="stable")
        place = place[order]
    same = place[1:] == place[:-1]
    several = np.append(same, False) | np.append(False, same)  # of their subject on that day
    shared = order[several]
    keys = pl.Series(place[several] * n_codes + code[shared])
    suspects = shared[keys.is_duplicated().to_numpy()]
    copy = np.zeros(size, bool)
    found = (
        rows[suspects]
        .select(~pl.struct("subject", "day", "code", "copy_key").is_first_distinct())
        .to_series()
    )
    copy[suspects] = found.to_numpy()
    return order, copy


def _pack_keys(
    subject: pl.Series, day: pl.Series, rest: np.ndarray | None = None, size: int = 1
) -> np.ndarray:
    """Subject, day and a number below `size` as one integer, in whose order they are sorted,
    int64.
    """
    key = subject.to_numpy().astype(np.int64) * SPAN_DAYS + (
        day.to_numpy().astype(np.int64) + SPAN_DAYS // 2
    )
    return key if rest is None else key * size + rest


def _apply_labels(shard: ClaimsShard, job: ClaimsJob, agreement: AgreementCounts) -> ClaimsShard:
    """The shard with its labels, of rules or of columns of the source; rows after the index day,
    needed only for labels, leave.
    """
    cohort = shard.cohort
    for rule in job.rules:
        for flag in job.flags:
            label, given = (
                cohort[name].fill_null(-1).to_numpy() for name in (f"y_{rule.name}", f"flag_{flag}")
            )
            cells = shortcut_baselines.count_agreement(label, given)
            agreement.update({(rule.name, flag, cell): n for cell, n in cells.items() if n})
    if not job.ruled:
        cohort = cohort.drop(
            *(f"{kind}_{rule.name}" for rule in job.rules for kind in ("y", "onset"))
        )
    own = {rule.name for rule in job.rules} if job.ruled else set()
    cohort = cohort.rename(
        {f"flag_{flag}": f"y_{flag}_source" if flag in own else f"y_{flag}" for flag in job.flags}
    )
    cohort = cohort.with_columns(
        pl.lit(None, pl.Int32).alias(f"onset_{name}")
        for name in job.names
        if f"onset_{name}" not in cohort.columns
    )
    if job.options.control_exclusions and job.ruled:
        near = phecode_maps.related_phecodes(
            job.codemap, label_rules.find_defining_phecodes(job.rules, job.codemap.tables)
        )
        cohort = labels.exclude_controls(shard.rows, shard.codes, near, cohort)
    return replace(shard, cohort=cohort, rows=shard.rows.filter(~pl.col("late")).drop("late"))


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
    return replace(shard, rows=rows, cohort=cohort.with_columns(first_day=pl.col("first_day") * 0))


def _make_events(shard: ClaimsShard) -> pl.DataFrame:
    """The rows, which are ordered by subject and day, in MEDS columns by time; `row` is their order
    in the source.
    """
    rows = shard.rows
    minute = rows["day"].cast(pl.Int64) * DAY_MINUTES
    if "minute" in rows.columns:
        packed = _pack_keys(rows["subject"], rows["day"])
        order = np.argsort(packed * DAY_MINUTES + rows["minute"].to_numpy(), kind="stable")
        rows, minute = rows[order], (minute + rows["minute"])[order]
    texts = pl.Series([code.text for code in shard.codes], dtype=pl.String)
    phecodes = pl.Series([list(code.phecodes) for code in shard.codes], dtype=pl.List(pl.String))
    return pl.DataFrame(
        {
            "subject_id": shard.cohort["subject_id"].gather(rows["subject"]),
            "time": (minute * 60_000_000).cast(pl.Datetime("us")),
            "code": texts.gather(rows["code"]),
            "numeric_value": rows["value"]
            if "value" in rows.columns
            else pl.repeat(None, rows.height, dtype=pl.Float32, eager=True),
            "source": pl.Series(SOURCES, dtype=pl.Enum(SOURCES)).gather(rows["source"]),
            "phecodes": phecodes.gather(rows["code"]),
            "row": rows["row"],
        }
    )


def _remove_other_sex(
    events: pl.DataFrame, shard: ClaimsShard, sexes: Mapping[str, int]
) -> tuple[pl.DataFrame, int]:
    """Events without the PheCodes of the other sex, and how many rows had one. Of unknown sex all
    stay.
    """
    other = [{phecode for phecode, only in sexes.items() if only == 3 - sex} for sex in (1, 2)]
    known = shard.cohort.select("subject_id", pl.col("sex").fill_null(0))
    sex = events.select("subject_id").join(
        known, on="subject_id", how="left", maintain_order="left"
    )["sex"]
    lists = events["phecodes"].to_list()
    affected = [
        i for i, own in enumerate(sex) if own in (1, 2) and not other[own - 1].isdisjoint(lists[i])
    ]
    for i in affected:
        lists[i] = [phecode for phecode in lists[i] if phecode not in other[sex[i] - 1]]
    return events.with_columns(phecodes=pl.Series(lists, dtype=pl.List(pl.String))), len(affected)


def _hash_subjects(shard: ClaimsShard, names: list[str]) -> list[bytes]:
    """SHA-256 of the rows of each subject, in a canonical order, and of its labels; ids do not
    enter.
    """
    rows, cohort = shard.rows, shard.cohort
    ranks = np.argsort(np.argsort(np.array([code.text for code in shard.codes], str)))
    size = max(len(ranks), 1) * len(SOURCES)
    rank = ranks[rows["code"].to_numpy()] * len(SOURCES) + rows["source"].to_numpy()
    packed = _pack_keys(rows["subject"], rows["day"], rank, size)
    parts = [
        rows[name].fill_null(float("nan")) if name == "value" else rows[name]
        for name in MEASURES
        if name in rows.columns
    ]
    order = np.lexsort((*(part.to_numpy() for part in parts), packed)) if parts else None
    packed = np.sort(packed) if order is None else packed[order]
    bounds = np.searchsorted(packed, np.arange(cohort.height + 1) * (SPAN_DAYS * size))
    packed %= SPAN_DAYS * size
    cells = [
        pl.col(f"{kind}_{name}").cast(pl.String).fill_null("None")
        for name in names
        for kind in ("y", "onset")
    ]
    # as Python writes tuples
    texts = pl.format("({})", pl.concat_str(cells, separator=", ") if cells else pl.lit(""))
    known = cohort.with_columns(known=texts.cast(pl.Binary))["known"]
    held = [column.data for column in (packed, *(part.to_numpy()[order] for part in parts))]
    return [
        hashlib.sha256(b"".join([*(part[low:high] for part in held), own])).digest()
        for own, (low, high) in zip(known, itertools.pairwise(bounds.tolist()), strict=True)
    ]


def hash_content(job: ClaimsJob, findings: CleaningFindings, slices: int) -> str:
    """SHA-256 over the sorted hashes of the subjects and over their codes."""
    digest = hashlib.sha256(b"sex restrictions" if job.options.sex_restrictions else b"")
    for frame in spill.merge_sorted(
        list_shard_files(job, "contents"), "head", 1 << 32, slices, ("content",)
    ):
        digest.update("".join(f"{one.hex()}\n" for one in frame["content"]).encode())
    digest.update(repr(sorted((code.text, code.phecodes) for code in findings.codes)).encode())
    return digest.hexdigest()
