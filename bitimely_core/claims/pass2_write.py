"""The second pass: one shard of subjects after another becomes events, subjects and labels of the cache.

A finished shard is noted: its events stand under their name, its subjects, labels and hashes wait for the others in files of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bitimely_core import storage
from bitimely_core.claims import pass1_clean, spill, subjects
from bitimely_core.claims.clean import EXAMPLES, RowAccount
from bitimely_core.claims.job import DAY_COLUMNS, FILE_SHIFT, SPAN_DAYS, ClaimsJob, CleaningFindings, account_from_json, account_to_json
from bitimely_core.errors import Reason, safe_text

if TYPE_CHECKING:
    import polars as pl

    from bitimely_core.claims.engines import Engine
    from bitimely_core.claims.spill import SpillFile
    from bitimely_core.claims.steps import ClaimsShard

SHARD_TABLES = ("subjects", "labels", "contents")  # what waits for the other shards
AgreementCounts = Counter[tuple[str, str, str]]
"""(rule, flag, cell) -> subjects."""


class FinishedShard(NamedTuple):
    """A finished shard."""

    events: tuple[str, dict[str, Any]]  # name, and what it is
    accounts: dict[str, RowAccount]  # file -> what became of its rows since the first pass
    agreement: AgreementCounts


def write_shards(
    job: ClaimsJob, found: CleaningFindings, laid: Sequence[SpillFile], told: Path | None, keys: np.ndarray
) -> Iterator[FinishedShard]:
    """Every shard in its turn, those from their notes that are finished."""
    from bitimely_core.claims import engines

    ranks = np.argsort(np.argsort([code.text for code in found.codes])) if found.codes else np.empty(0, np.int64)
    with engines.open_engine(job.given["engine"]) as engine:
        for number in range(job.shards):
            job.run.stop.check()
            done = _load_shard(job, number)
            if done is None:
                everyone = subjects.present_subjects(job, found, laid, told, number)
                done = _write_shard(job, found, spill.read_rows(laid, number), everyone, keys, ranks, number, engine)
            yield done
            if job.run.progress is not None:
                job.run.progress(f"ingest {job.run.dataset.name}", number + 1, job.shards)


def list_shard_files(job: ClaimsJob, kind: str) -> list[Path]:
    """The files of all shards of one of KINDS."""
    return [job.home / f"{job.stem}-{kind}-{number}.parquet" for number in range(job.shards)]


def _write_shard(
    job: ClaimsJob,
    found: CleaningFindings,
    rows: pl.DataFrame,
    everyone: pl.DataFrame,
    keys: np.ndarray,
    ranks: np.ndarray,
    number: int,
    engine: Engine,
) -> FinishedShard:
    """One shard: its files, and the note that they are whole."""
    import polars as pl

    from bitimely_core.claims import labels, steps

    accounts: dict[str, RowAccount] = {}
    agreement = AgreementCounts()
    own = pass1_clean.to_keys(everyone["digest"])
    everyone = everyone.drop("digest").with_columns(subject_id=pl.Series(np.searchsorted(keys, own), dtype=pl.Int64))
    rows = _resolve_duplicates(rows, found, own, accounts)
    shard = steps.ClaimsShard(rows=rows, codes=found.codes, people=everyone, rules=job.rules)
    shard = _apply_labels(steps.label_shard(shard, engine), job, agreement, engine)
    shard = _subtract_first_days(shard, keep_dates=job.run.options["keep_dates"])
    hashes = _hash_subjects(shard, job.names, ranks)
    told = shard.people
    frames = {
        "subjects": told.select(name for name in ("subject_id", *DAY_COLUMNS, "sex", "split_bin", "split") if name in told.columns),
        "labels": labels.to_long_labels(told, job.names),
        "contents": pl.DataFrame(
            {"head": [int.from_bytes(one[:4], "big") for one in hashes], "content": hashes}, schema={"head": pl.Int64, "content": pl.Binary}
        ),
    }
    for kind in SHARD_TABLES:
        storage.write_file(list_shard_files(job, kind)[number], spill.make_parquet_writer(frames[kind]))
    events = spill.write_table(job.run.out, f"events-{number:05d}", [_make_events(shard)])
    done = FinishedShard(events, accounts, agreement)
    note = {
        "events": list(events),
        "accounts": {file: account_to_json(account) for file, account in accounts.items()},
        "agreement": [[list(key), n] for key, n in agreement.items()],
    }
    storage.write_json(_shard_path(job, number), note)
    return done


def _shard_path(job: ClaimsJob, number: int) -> Path:
    return job.home / f"{job.stem}-shard-{number}.json"


def _load_shard(job: ClaimsJob, number: int) -> FinishedShard | None:
    """A shard that is finished and whole."""
    note = _shard_path(job, number)
    if not note.is_file():
        return None
    told = json.loads(note.read_bytes())
    name, facts = told["events"]
    path = job.run.out / name
    if not path.is_file() or storage.hash_with_size(path) != (facts["sha256"], facts["size"]):
        return None
    accounts = {file: account_from_json(account) for file, account in told["accounts"].items()}
    return FinishedShard((name, facts), accounts, AgreementCounts({tuple(key): n for key, n in told["agreement"]}))


def _resolve_duplicates(rows: pl.DataFrame, found: CleaningFindings, keys: np.ndarray, accounts: dict[str, RowAccount]) -> pl.DataFrame:
    """The rows that stay, with `subject` as the place of their key; what leaves is counted in the account of its file."""
    import polars as pl

    columns = {"subject": pl.Int32, "day": pl.Int32, "code": pl.Int32, "source": pl.Int8, "row": pl.Int64, "late": pl.Boolean}
    if rows.is_empty():
        return pl.DataFrame(schema=columns)

    def remark(file: int, reason: Reason, count: int, *examples: str) -> RowAccount:
        account = accounts.setdefault(found.files[file], RowAccount())
        account.reasons[reason] += count
        account.examples[reason] = [*account.examples.get(reason, []), *examples][:EXAMPLES]
        return account

    if found.latest is not None:
        gone = rows.filter(pl.col("day") > found.latest)
        rows = rows.filter(pl.col("day") <= found.latest)
        for row, code in gone.select("row", "code").iter_rows():
            account = remark(row >> FILE_SHIFT, Reason.DATE_OUTSIDE_LIFE, 1, f"row {row % (1 << FILE_SHIFT)}")
            account.steps[found.codes[code].step] -= 1
            account.faults["future"] += 1
    subject = np.searchsorted(keys, rows["key"].to_numpy()).astype(np.int32)
    rows = rows.drop("key").with_columns(subject=pl.Series(subject))
    copy = np.zeros(rows.height, bool)
    packed = pl.Series(_pack_keys(rows["subject"], rows["day"], rows["code"].to_numpy(), len(found.codes)))
    suspects = np.flatnonzero(packed.is_duplicated().to_numpy())  # the few that can be copies
    twins = rows[suspects].select(~pl.struct("subject", "day", "code", "twin").is_first_distinct()).to_series()
    copy[suspects] = twins.to_numpy()
    copies, kept = rows.filter(pl.Series(copy)), rows.filter(pl.Series(~copy))
    silent = pl.Series([not code.phecodes for code in found.codes], dtype=pl.Boolean).gather(kept["code"])
    late = kept["late"] if "late" in kept.columns else pl.repeat(value=False, n=kept.height, eager=True, dtype=pl.Boolean)
    for reason, lost in (
        (Reason.DUPLICATES, copies),
        (Reason.UNMAPPED_CODE, kept.filter(silent)),
        (Reason.LABEL_LEAKAGE, kept.filter(late & ~silent)),
    ):
        for (file,), part in lost.group_by(pl.col("row") // (1 << FILE_SHIFT), maintain_order=True):
            shown = part.head(EXAMPLES)
            if reason == Reason.UNMAPPED_CODE:
                texts = [safe_text(found.codes[code].code) for code in shown["code"]]
            else:
                texts = [f"row {row % (1 << FILE_SHIFT)}" for row in shown["row"]]
            remark(int(str(file)), reason, part.height, *texts)
    return kept.with_columns(late=late).select(*columns)


def _pack_keys(subject: pl.Series, day: pl.Series, rest: np.ndarray | None = None, size: int = 1) -> np.ndarray:
    """Subject, day and a number below `size` as one integer, in whose order they are sorted, int64."""
    key = subject.to_numpy().astype(np.int64) * SPAN_DAYS + (day.to_numpy().astype(np.int64) + SPAN_DAYS // 2)
    return key if rest is None else key * size + rest


def _apply_labels(shard: ClaimsShard, job: ClaimsJob, agreement: AgreementCounts, engine: Engine) -> ClaimsShard:
    """The labels that hold: of rules or of the source's columns, and how they agree; late rows, needed for labels alone, leave."""
    import polars as pl

    from bitimely_core.claims import label_rules, labels, phecode_maps

    people = shard.people
    cells = {(1, 1): "tp", (1, 0): "fp", (0, 1): "fn", (0, 0): "tn"}
    for rule in job.rules:
        for flag in job.flags:
            pairs = people.select(f"y_{rule.name}", f"flag_{flag}").drop_nulls()
            agreement.update((rule.name, flag, cells[pair]) for pair in pairs.iter_rows())
    if not job.ruled:
        people = people.drop(*(f"{kind}_{rule.name}" for rule in job.rules for kind in ("y", "onset")))
    own = {rule.name for rule in job.rules} if job.ruled else set()
    people = people.rename({f"flag_{flag}": f"y_{flag}_source" if flag in own else f"y_{flag}" for flag in job.flags})
    people = people.with_columns(
        pl.lit(None, pl.Int32).alias(f"onset_{name}") for name in job.names if f"onset_{name}" not in people.columns
    )
    if job.given["control_exclusions"] and job.ruled:
        near = phecode_maps.related_phecodes(job.codemap, label_rules.find_defining_phecodes(job.rules, job.codemap.tables))
        people = labels.exclude_controls(shard.rows, shard.codes, near, people, engine)
    return replace(shard, people=people, rows=shard.rows.filter(~pl.col("late")).drop("late"), labels=tuple(job.names))


def _subtract_first_days(shard: ClaimsShard, *, keep_dates: bool) -> ClaimsShard:
    """All days of a subject less that of its first valid row; a subject without any has no days."""
    import polars as pl

    if keep_dates:
        return shard
    people = shard.people
    days = [name for name in people.columns if name in DAY_COLUMNS or name.startswith("onset_")]
    begin = people["first_day"].fill_null(0).gather(shard.rows["subject"])
    rows = shard.rows.with_columns((pl.col("day") - begin).cast(pl.Int32))
    people = people.with_columns((pl.col(name) - pl.col("first_day")).cast(pl.Int32).alias(name) for name in days)
    return replace(shard, rows=rows, people=people.with_columns(first_day=pl.col("first_day") * 0))


def _make_events(shard: ClaimsShard) -> pl.DataFrame:
    """The rows in MEDS columns, by subject and time; `row` is their order in the source."""
    import polars as pl

    from bitimely_core.claims.label_rules import SOURCES

    rows = shard.rows[np.argsort(_pack_keys(shard.rows["subject"], shard.rows["day"]), kind="stable")]
    texts = pl.Series([code.text for code in shard.codes], dtype=pl.String)
    phecodes = pl.Series([list(code.phecodes) for code in shard.codes], dtype=pl.List(pl.String))
    return pl.DataFrame(
        {
            "subject_id": shard.people["subject_id"].gather(rows["subject"]),
            "time": (rows["day"].cast(pl.Int64) * 86_400_000_000).cast(pl.Datetime("us")),
            "code": texts.gather(rows["code"]),
            "numeric_value": pl.repeat(None, rows.height, dtype=pl.Float32, eager=True),
            "source": pl.Series(SOURCES, dtype=pl.String).gather(rows["source"]).cast(pl.Enum(SOURCES)),
            "phecodes": phecodes.gather(rows["code"]),
            "row": rows["row"],
        }
    )


def _hash_subjects(shard: ClaimsShard, names: list[str], ranks: np.ndarray) -> list[bytes]:
    """Of each subject the SHA-256 of its rows, in an order of their own, and of its labels; no id in it."""
    from bitimely_core.claims.label_rules import SOURCES

    rows, people = shard.rows, shard.people
    size = max(len(ranks), 1) * len(SOURCES)
    rank = ranks[rows["code"].to_numpy()] * len(SOURCES) + rows["source"].to_numpy()
    packed = np.sort(_pack_keys(rows["subject"], rows["day"], rank, size))
    bounds = np.searchsorted(packed, np.arange(people.height + 1) * (SPAN_DAYS * size))
    packed %= SPAN_DAYS * size
    known = people.select(*(f"{kind}_{name}" for name in names for kind in ("y", "onset"))).rows() if names else [()] * people.height
    return [hashlib.sha256(packed[bounds[i] : bounds[i + 1]].tobytes() + repr(known[i]).encode()).digest() for i in range(people.height)]


def hash_content(job: ClaimsJob, found: CleaningFindings, slices: int) -> str:
    """SHA-256 over the sorted hashes of the subjects and over the codes that their rows speak of."""
    whole = hashlib.sha256()
    for frame in spill.merge_sorted(list_shard_files(job, "contents"), "head", 1 << 32, slices, ("content",)):
        whole.update("".join(f"{digest.hex()}\n" for digest in frame["content"]).encode())
    whole.update(repr(sorted((code.text, code.phecodes) for code in found.codes)).encode())
    return whole.hexdigest()
