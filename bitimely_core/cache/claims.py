"""`ingest` of claims: tables of rows -> canonical events, subjects and labels of pseudonymous subjects (builder's reference, 2, 11, 13).

Two passes. The first cleans the rows as they stream by and lays them down as integers, one pile a shard of subjects; raw ids stay in memory.
What is global (the last day of the data, the pseudonyms, the table of codes) is decided between. The second makes each shard's files.

A subject's pseudonym is its rank under HMAC-SHA256 of its raw id; its days count from its own first valid row unless dates are kept.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from bitimely_core import store
from bitimely_core.batch import Rows, Unit
from bitimely_core.cache import accounting
from bitimely_core.cache.attempt import REPORT, Attempt
from bitimely_core.errors import Exit, Finding, Reason, UserError, safe_text
from bitimely_core.formats.source import scan

if TYPE_CHECKING:
    import polars as pl

    from bitimely_core.datasets.pophr.building import Shard
    from bitimely_core.datasets.pophr.cleaning import Account
    from bitimely_core.datasets.pophr.codes import Codebook
    from bitimely_core.datasets.pophr.engines import Engine
    from bitimely_core.datasets.pophr.maps import PhecodeMap
    from bitimely_core.datasets.pophr.rules import Rule
    from bitimely_core.datasets.pophr.sources import Claims

SCHEMA = "bitimely.cache/1"
NAMES = re.compile(r"(events-\d{5}|subjects|labels)-[0-9a-f]{16}\.parquet")
PILE, RAW, PARTS = ".piles", ".raw", ".parts"
SHARD_BYTES = 48 << 20  # of the source: a shard is a million rows or two, and what it takes in memory does not grow with the data
FILE = 40  # bits of a line number; those above say of which file
KEY = 32  # bytes
SPAN_DAYS = 1 << 19  # days, before and after 1970, are fewer than half of it
NONE = int(np.iinfo(np.int32).max)  # first day of a subject without any valid row
SPAN = {"birth": "birth_day", "obs_start": "obs_start", "obs_end": "obs_end", "death": "death_day"}
DAYS = (*SPAN.values(), "index_day")
UNMAPPED = 50  # codes without PheCode that are listed
RUN_ONLY = ("keep_ids", "engine", "id_key")  # options that do not shape the cache, or do so through the key alone
WANTED = {
    Reason.DATE: "expected a calendar date",
    Reason.DATE_OUTSIDE_LIFE: "expected a day between birth and death, within the data",
    Reason.EMPTY_CODE: "expected a code",
    Reason.AMBIGUOUS_CODE: "expected a code with its leading zeros",
    Reason.WRONG_VOCABULARY: "expected a code of the row's own vocabulary",
    Reason.BAD_CODE: "expected an ICD code",
    Reason.IDENTIFIER: "expected a subject",
    Reason.UNMAPPED_CODE: "no PheCode: kept for the label rules alone",
    Reason.DUPLICATES: "exact copies, used once",
    Reason.LABEL_LEAKAGE: "after the index date of the labels: no input",
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What an ingest of claims works with, read and checked before any row."""

    attempt: Attempt
    given: dict[str, Any]  # options as given
    claims: Claims
    codemap: PhecodeMap
    table: list[dict[str, Any]]  # rules as the manifest keeps them
    rules: tuple[Rule, ...]
    flags: tuple[str, ...]  # label columns of the source
    book: Codebook
    key: bytes
    shards: int

    @property
    def ruled(self) -> bool:
        """Whether the rules make the labels; else the source's columns do, and rules are compared with them alone."""
        return not self.flags or bool(self.given["rules"])

    @property
    def names(self) -> list[str]:
        """The labels: of the rules, and the columns, those that share a rule's name under `<name>_source`."""
        own = [rule.name for rule in self.rules] if self.ruled else []
        return [*own, *(f"{flag}_source" if flag in own else flag for flag in self.flags)]


@dataclass
class First:
    """What the first pass finds."""

    known: pl.DataFrame  # subject_id (raw), number Int32: in the order in which they were met
    digests: list[bytes] = field(default_factory=list)
    bins: list[int] = field(default_factory=list)  # of the split
    shards: list[int] = field(default_factory=list)
    earliest: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # valid day of each number
    files: list[str] = field(default_factory=list)
    accounts: dict[str, Account] = field(default_factory=dict)  # file -> what became of its rows
    days: Counter[int] = field(default_factory=Counter)  # valid day -> rows
    spoken: Counter[int] = field(default_factory=Counter)  # code -> valid rows
    sources: Counter[int] = field(default_factory=Counter)  # kind of claim -> valid rows
    latest: int | None = None  # days after it are in the future of the data

    @property
    def span(self) -> tuple[int, int] | None:
        """First and last day of the data."""
        valid = [day for day in self.days if self.latest is None or day <= self.latest]
        return (min(valid), max(valid)) if valid else None


def ingest(attempt: Attempt, *, force_new: bool, former: dict[str, Any] | None, parts: int = 1) -> dict[str, Any]:
    """Read claims, publish, report. The caller holds the lock and has compared the settings of a former cache.

    Args:
        attempt: what was asked for.
        force_new: read everything again.
        former: the published manifest.
        parts: of these parts (`part`), all finished, the rows are taken.

    Raises:
        UserError: as `cache.ingest`.
    """
    with attempt.reported(), _made_up(attempt, former if not force_new else None):
        attempt.read_sums()
        attempt.hash_rest()
        if former is not None and not force_new and _unchanged(attempt, former):
            kept = {key: former[key] for key in ("generation", "manifest_sha256", "content_sha256")}
            report: dict[str, Any] = former["report"] | kept
            store.write_json(attempt.out / REPORT, report)
            return report
        try:
            job = _job(attempt)
            body, files = _made(job, parts)
        except UserError as error:
            name = next((name for name in attempt.sizes if error.file and (error.file == name or error.file.endswith(f"/{name}"))), None)
            if name and error.exit_code == Exit.REFUSED:
                _unit(attempt, name, [replace(error.finding, file=name)], None)
            raise
        refused = attempt.refusal()
        if refused is not None:
            for name in files:
                store.os_unlink(attempt.out / name)
            raise refused
        generation = former["generation"] + 1 if former else 1
        report = attempt.report()
        report = accounting.ended(report, accounting.passed(report)) | {"generation": generation, "content_sha256": body["content_sha256"]}
        manifest = store.publish(attempt.out, body | {"report": report}, files, generation)
        report |= {"manifest_sha256": manifest["manifest_sha256"]}
        store.write_json(attempt.out / REPORT, report)
        store.prune(attempt.out, NAMES)
        _clear(attempt.out / PARTS)
    return report


def part(attempt: Attempt, shard: tuple[int, int], former: dict[str, Any] | None) -> dict[str, Any]:
    """Part k of n of the first pass: every n-th block of rows, cleaned and laid down. It is noted, not published.

    A part that was finished for the same source and options is not done again.
    """
    k, n = shard
    if attempt.given_options["keep_ids"]:
        text = "--keep-ids with --shard"
        raise UserError(
            Reason.CONFIG, text, wanted="raw ids are in several processes", action="Ingest without --shard", exit_code=Exit.USAGE
        )
    attempt.hash_rest()
    if former is not None and _unchanged(attempt, former):
        return {"parts_missing": 0}
    home = store.make_folder(attempt.out / PARTS)
    mark = _mark(attempt, n)
    note = home / f"{mark}-{k}.json"
    if not note.is_file():
        job = _job(attempt)
        found = _first_pass(job, Piles(home, job.shards, f"{mark}-{k}-"), (k, n))
        people = _people_met(found)
        name = f"{mark}-{k}-people.parquet"
        store.write_file(home / name, parquet(people))
        store.write_json(note, _noted(found, job.book))
    missing = sum(not (home / f"{mark}-{i}.json").is_file() for i in range(1, n + 1))
    return {
        "schema": "bitimely.ingest_part/1",
        "format_version": 1,
        "status": "part",
        "dataset": attempt.dataset.name,
        "shard": f"{k}/{n}",
        "exit_code": int(Exit.GOOD),
        "published": False,
        "parts_missing": missing,
        **{key: attempt.report()[key] for key in ("units", "counts", "rows", "reasons", "reason_counts", "options")},
    }


def _mark(attempt: Attempt, parts: int) -> str:
    """What the notes of parts are called: another source, other options or another number of parts, another name."""
    return store.fingerprint([attempt.settings, attempt.report()["source"]["sha256"], parts])[:16]


def _clear(folder: Path) -> None:
    """Away with a folder of files."""
    if folder.is_dir():
        for path in folder.iterdir():
            with suppress(OSError):
                store.os_unlink(path)
        with suppress(OSError):
            folder.rmdir()


def pinned(options: dict[str, Any], out: Path) -> dict[str, Any]:
    """Options as a manifest keeps them: contents in the place of paths, so that the same files elsewhere are the same choice.

    Raises UserError: as `secret` and `rules.load`.
    """
    from bitimely_core.datasets.pophr import rules

    def content(path: str) -> str:
        file = Path(path)
        return store.sha256(file) if file.is_file() else safe_text(path)

    told = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items() if name not in RUN_ONLY}
    if "phecode_map" not in options:  # of a data set that is made
        return told
    return told | {
        "phecode_map": [content(path) for path in options["phecode_map"]],
        "map_overrides": content(options["map_overrides"]) if options["map_overrides"] else "",
        "rules": store.fingerprint(rules.load(options["rules"])) if options["rules"] else "",
        "pseudonyms": hashlib.sha256(b"bitimely id key" + secret(options["id_key"], out)).hexdigest()[:16],
    }


def secret(file: str, out: Path) -> bytes:
    """The key of the pseudonyms: `file`, else `id.key` of the workspace that the cache lies in, made when there is none.

    Raises UserError: not_found or config (exit 2) for a file that cannot be the key.
    """
    path = Path(file) if file else (out.parent.parent if out.parent.name == "cache" else out.parent) / "id.key"
    if not file:
        store.secret(path, KEY)
    try:
        key = path.read_bytes()
    except OSError as error:
        text = f"cannot be read ({error.strerror})"
        wanted = f"expected {KEY} random bytes"
        raise UserError(Reason.NOT_FOUND, text, wanted=wanted, file=str(path), field="--id-key", exit_code=Exit.USAGE) from error
    if len(key) != KEY:
        raise UserError(
            Reason.CONFIG,
            f"{len(key)} bytes",
            wanted=f"expected {KEY} random bytes",
            file=str(path),
            field="--id-key",
            action=f"Make one with: head -c {KEY} /dev/urandom > FILE",
            exit_code=Exit.USAGE,
        )
    return key


@contextmanager
def _made_up(attempt: Attempt, former: dict[str, Any] | None) -> Iterator[None]:
    """For a data set that is made: its raw files, while they are needed. What there is of its options is not made again."""
    if attempt.source is not None or (former is not None and not store.damage(attempt.out, former)):
        yield
        return
    folder = store.make_folder(attempt.out / RAW)
    try:
        options = attempt.dataset.function(folder, dict(attempt.given_options))
        attempt.given_options = {**options, "id_key": attempt.given_options.get("id_key", "")}
        attempt.source = scan(folder)
        yield
    finally:
        attempt.source, attempt.given_options = None, {}
        for path in folder.iterdir():
            store.os_unlink(path)
        folder.rmdir()


def _unchanged(attempt: Attempt, former: dict[str, Any]) -> bool:
    """Whether the same files, under the same options, are in a whole cache already."""
    same = attempt.source is None or former["report"]["source"]["sha256"] == attempt.report()["source"]["sha256"]
    return same and not store.damage(attempt.out, former)


def _job(attempt: Attempt) -> Job:
    from bitimely_core.datasets.pophr import maps, rules, sources
    from bitimely_core.datasets.pophr.codes import Codebook

    given = attempt.given_options
    assert attempt.source is not None
    claims = sources.read(attempt.source, given["source"], given)
    paths = [*given["phecode_map"]]
    if not paths and "phecode_map" in claims.facts:
        paths = [str(attempt.source.path(claims.facts["phecode_map"]))]
    codemap = maps.read(
        paths,
        repair=given["map_repair"] or None,
        overrides=given["map_overrides"] or None,
        keep_ignored=given["keep_ignored"],
        vocab=given["map_vocab"] or None,
    )
    table = rules.load(given["rules"] or "ccdss")
    flags = () if claims.labels is None else tuple(name for name in claims.labels.columns if name not in {"subject_id", "index_date"})
    return Job(
        attempt=attempt,
        given=given,
        claims=claims,
        codemap=codemap,
        table=table,
        rules=rules.parse(table),
        flags=flags,
        book=Codebook(codemap.tables, pad_undotted=given["pad_undotted"], strict=True),
        key=secret(given["id_key"], attempt.out),
        shards=max(1, -(-sum(attempt.sizes.values()) // SHARD_BYTES)),
    )


def _made(job: Job, parts: int = 1) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """All files of the cache, and what its manifest says beside them."""
    from bitimely_core.datasets.pophr import building, engines, labels, rules

    attempt, book = job.attempt, job.book
    files: dict[str, dict[str, Any]] = {}
    events: list[str] = []
    tables: dict[str, list[pl.DataFrame]] = {"subjects": [], "labels": []}
    hashes: list[bytes] = []
    agreement: Counter[tuple[str, str, str]] = Counter()

    def keep(stem: str, frame: pl.DataFrame) -> str:
        name, digest, size = store.write_named(attempt.out, stem, ".parquet", parquet(frame))
        files[name] = {"sha256": digest, "size": size, "rows": frame.height}
        return name

    with piles(attempt.out, job.shards) as heap, engines.opened(job.given["engine"]) as engine:
        first = _first_pass(job, heap) if parts == 1 else _joined(job, heap, parts)
        everyone = _everyone(job, first)
        ranks = np.argsort(np.argsort([code.text for code in book.codes])) if book.codes else np.empty(0, np.int64)
        for number in range(job.shards):
            attempt.stop.check()
            people = everyone.filter(shard=number).drop("shard")
            rows = _settled(heap.take(number), first, book, people)
            shard = building.Shard(rows=rows, codes=book.codes, people=people.drop("number"), rules=job.rules)
            shard = _labelled(building.label(shard, engine), job, agreement, engine)
            shard = _on_the_subjects_clock(shard, keep_dates=attempt.options["keep_dates"])
            events.append(keep(f"events-{number:05d}", _events(shard)))
            tables["subjects"].append(shard.people)
            tables["labels"].append(labels.long(shard.people, job.names))
            hashes += _contents(shard, job.names, ranks)
            if attempt.progress is not None:
                attempt.progress(f"ingest {attempt.dataset.name}", number + 1, job.shards)
    import polars as pl

    subjects = pl.concat(tables["subjects"])
    columns = ["subject_id", *(name for name in (*DAYS, "sex", "split_bin", "split") if name in subjects.columns)]
    whole = {"subjects": subjects.select(columns).sort("subject_id"), "labels": _sorted(pl.concat(tables["labels"]))}
    body: dict[str, Any] = {stem: keep(stem, frame) for stem, frame in whole.items()}
    content = _content(hashes, book, ranks)
    _account(job, first, content)
    span = first.span
    total = _total(first)
    unmapped = [(book.codes[index], n) for index, n in first.spoken.most_common() if not book.codes[index].phecodes][:UNMAPPED]
    return body | {
        "schema": SCHEMA,
        "format_version": 1,
        "kind": "events",
        "dataset": attempt.dataset.name,
        "settings": attempt.settings,
        "content_sha256": content,
        "shards": events,
        "names": job.names,
        "rules": job.table,
        "ruled": job.ruled,
        "defining": rules.defining(job.rules, job.codemap.tables),
        "phenotypes": job.codemap.names,
        "categories": job.codemap.categories,
        "map": job.codemap.facts,
        "clock": "calendar" if attempt.options["keep_dates"] else "subject",
        "data_end": span[1] if span and attempt.options["keep_dates"] else None,
        "days": span[1] - span[0] + 1 if span else 0,
        "seed": job.given["seed"],
        "split": "official" if job.claims.splits else "subject",
        "agreement": [{"rule": rule, "flag": flag, "cell": cell, "n": n} for (rule, flag, cell), n in sorted(agreement.items())],
        "funnel": total.funnel() | {"subjects": subjects.height},
        "unmapped": [{"code": code.text, "n": n} for code, n in unmapped],
        "facts": {key: value for key, value in job.claims.facts.items() if key != "phecode_map"},
    }, files


# ---- first pass: rows as integers, subjects as numbers


def _first_pass(job: Job, heap: Piles, only: tuple[int, int] = (1, 1)) -> First:
    """Clean all rows, or every n-th block of them from the k-th on, and lay them down by shard."""
    import polars as pl

    from bitimely_core.datasets.pophr import cleaning, dates

    attempt, claims = job.attempt, job.claims
    found = First(known=pl.DataFrame(schema={"subject_id": pl.String, "number": pl.Int32}))
    lives: pl.DataFrame | None = None
    if claims.subjects is not None:
        _meet(found, claims.subjects["subject_id"], job)
        lives = claims.subjects.select(
            "subject_id", birth_day=dates.days(claims.subjects["birth"]), death_day=dates.days(claims.subjects["death"])
        )
    if claims.labels is not None and "index_date" in claims.labels.columns:
        ends = claims.labels.select("subject_id", index_day=dates.days(claims.labels["index_date"]))
        lives = ends if lives is None else lives.join(ends, on="subject_id", how="full", coalesce=True)
    for number, frame in enumerate(claims.events()):
        attempt.stop.check()
        if number % only[1] != only[0] - 1:
            continue
        for (name,), part in frame.group_by("file", maintain_order=True):
            file = str(name)
            if file not in found.files:
                found.files.append(file)
            rows, account = cleaning.clean(part, job.book, vocab=claims.vocab, source=claims.source, lives=lives, twins=True)
            found.accounts.setdefault(file, cleaning.Account()).__iadd__(account)
            _meet(found, rows["subject_id"], job)
            rows = rows.join(found.known, on="subject_id", how="left", maintain_order="left").drop("subject_id")
            rows = rows.with_columns(pl.col("row") + (found.files.index(file) << FILE))
            found.days.update(dict(rows["day"].value_counts().iter_rows()))
            found.spoken.update(dict(rows["code"].value_counts().iter_rows()))
            found.sources.update(dict(rows["source"].value_counts().iter_rows()))
            np.minimum.at(found.earliest, rows["number"].to_numpy(), rows["day"].to_numpy())
            heap.add(rows, np.array(found.shards, np.int32))
        if attempt.progress is not None:
            attempt.progress(f"clean {attempt.dataset.name}", sum(account.rows for account in found.accounts.values()), None)
    found.latest = cleaning.future(found.days)
    return found


def _meet(found: First, ids: pl.Series, job: Job) -> None:
    """Number the subjects that were not met before."""
    import polars as pl

    from bitimely_core.datasets.pophr import splits

    new = pl.DataFrame({"subject_id": ids}).drop_nulls().unique().join(found.known, on="subject_id", how="anti").sort("subject_id")
    if new.is_empty():
        return
    names, start = new["subject_id"].to_list(), len(found.digests)
    numbered = new.with_columns(number=pl.int_range(start, start + len(names), dtype=pl.Int32))
    found.known = pl.concat([found.known, numbered])
    found.digests += [hmac.digest(job.key, name.encode(), "sha256") for name in names]
    found.bins += splits.bins(names, job.given["seed"])
    found.shards += [splits.shard(name, job.shards) for name in names] if job.shards > 1 else [0] * len(names)
    found.earliest = np.append(found.earliest, np.full(len(names), NONE, np.int32))


def _people_met(found: First) -> pl.DataFrame:
    """The subjects that a part has met, by their digests: no raw id goes to the disk."""
    import polars as pl

    return pl.DataFrame(
        {
            "digest": pl.Series(found.digests, dtype=pl.Binary),
            "split_bin": pl.Series(found.bins, dtype=pl.UInt16),
            "shard": pl.Series(found.shards, dtype=pl.Int32),
            "earliest": pl.Series(found.earliest, dtype=pl.Int32),
        }
    )


def _noted(found: First, book: Codebook) -> dict[str, Any]:
    """What else a part leaves."""
    accounts = {
        file: {
            "rows": account.rows,
            "faults": dict(account.faults),
            "reasons": {str(reason): n for reason, n in account.reasons.items()},
            "steps": dict(account.steps),
            "examples": {str(reason): shown for reason, shown in account.examples.items()},
        }
        for file, account in found.accounts.items()
    }
    return {
        "files": found.files,
        "accounts": accounts,
        "days": [[day, n] for day, n in found.days.items()],
        "spoken": [[code, n] for code, n in found.spoken.items()],
        "sources": [[source, n] for source, n in found.sources.items()],
        "codes": [list(code) for code in book.codes],
    }


def _joined(job: Job, heap: Piles, parts: int) -> First:
    """The first pass from its finished parts: subjects and codes under one numbering."""
    import polars as pl

    from bitimely_core.datasets.pophr import cleaning
    from bitimely_core.datasets.pophr.codes import Code

    home, mark, book = job.attempt.out / PARTS, _mark(job.attempt, parts), job.book
    found = First(known=pl.DataFrame(schema={"subject_id": pl.String, "number": pl.Int32}))
    for table in (job.claims.subjects, job.claims.labels):
        if table is not None:
            _meet(found, table["subject_id"], job)
    if job.claims.splits:
        _meet(found, pl.Series(list(job.claims.splits), dtype=pl.String), job)
    number_of = {digest: number for number, digest in enumerate(found.digests)}
    code_of: dict[Code, int] = {}
    for k in range(1, parts + 1):
        note = json.loads((home / f"{mark}-{k}.json").read_bytes())
        people = pl.read_parquet(home / f"{mark}-{k}-people.parquet")
        fresh = people.filter(pl.Series([digest not in number_of for digest in people["digest"]], dtype=pl.Boolean))
        number_of |= {digest: len(number_of) + i for i, digest in enumerate(fresh["digest"])}
        found.digests += fresh["digest"].to_list()
        found.bins += fresh["split_bin"].to_list()
        found.shards += fresh["shard"].to_list()
        found.earliest = np.append(found.earliest, np.full(fresh.height, NONE, np.int32))
        numbers = np.array([number_of[digest] for digest in people["digest"]], np.int32)
        np.minimum.at(found.earliest, numbers, people["earliest"].to_numpy())
        codes = [Code(vocab, code, tuple(phecodes), step) for vocab, code, phecodes, step in note["codes"]]
        for code in codes:
            if code not in code_of:
                code_of[code] = len(book.codes)
                book.codes.append(code)
        code_numbers = np.array([code_of[code] for code in codes], np.int32)
        found.files += [file for file in note["files"] if file not in found.files]
        file_numbers = np.array([found.files.index(file) for file in note["files"]], np.int64)
        for file, told in note["accounts"].items():
            account = cleaning.Account(rows=told["rows"], faults=Counter(told["faults"]), steps=Counter(told["steps"]))
            account.reasons = Counter({Reason(reason): n for reason, n in told["reasons"].items()})
            account.examples = {Reason(reason): shown for reason, shown in told["examples"].items()}
            found.accounts.setdefault(file, cleaning.Account()).__iadd__(account)
        found.days.update(dict(note["days"]))
        found.spoken.update({int(code_numbers[code]): n for code, n in note["spoken"]})
        found.sources.update(dict(note["sources"]))
        for shard in range(job.shards):
            for path in sorted(home.glob(f"{mark}-{k}-{shard}-*.parquet"), key=lambda path: int(path.stem.rsplit("-", 1)[1])):
                rows = pl.read_parquet(path)
                row = rows["row"].to_numpy()
                again = rows.with_columns(
                    number=pl.Series(numbers[rows["number"].to_numpy()]),
                    code=pl.Series(code_numbers[rows["code"].to_numpy()]),
                    row=pl.Series((file_numbers[row >> FILE] << FILE) + row % (1 << FILE)),
                )
                heap.keep(shard, again)
    known = pl.DataFrame({"subject_id": pl.Series([None] * len(found.digests), dtype=pl.String), "number": range(len(found.digests))})
    known = known.with_columns(pl.col("number").cast(pl.Int32)).join(found.known, on="number", how="left", maintain_order="left")
    found.known = known.select(subject_id="subject_id_right", number="number")
    found.latest = cleaning.future(found.days)
    return found


class Piles:
    """Cleaned rows by shard: in memory for one shard, else in files that go away at the end. They hold numbers, no ids."""

    def __init__(self, folder: Path, shards: int, stem: str = "") -> None:
        self.folder, self.shards, self.stem = folder, shards, stem
        self.held: dict[int, list[pl.DataFrame | Path]] = {shard: [] for shard in range(shards)}

    def add(self, rows: pl.DataFrame, shard_of: np.ndarray) -> None:
        """Lay down rows; `shard_of` a subject's number."""
        import polars as pl

        if self.shards == 1:
            self.keep(0, rows)
            return
        for (shard,), part in rows.with_columns(shard=pl.Series(shard_of[rows["number"].to_numpy()])).group_by("shard"):
            self.keep(int(str(shard)), part.drop("shard"))

    def keep(self, shard: int, rows: pl.DataFrame) -> None:
        """Lay down rows of one shard."""
        if self.shards == 1 and not self.stem:
            self.held[shard].append(rows)
            return
        path = self.folder / f"{self.stem}{shard}-{len(self.held[shard])}.parquet"
        store.write_file(path, parquet(rows))
        self.held[shard].append(path)

    def take(self, shard: int) -> pl.DataFrame:
        """All rows of a shard, in the order of the source."""
        import polars as pl

        parts = [pl.read_parquet(part) if isinstance(part, Path) else part for part in self.held.pop(shard)]
        return pl.concat(parts) if parts else pl.DataFrame()


@contextmanager
def piles(out: Path, shards: int) -> Iterator[Piles]:
    """Piles that do not outlive what is done with them."""
    folder = out / PILE
    _clear(folder)
    if shards > 1:
        store.make_folder(folder)
    try:
        yield Piles(folder, shards)
    finally:
        _clear(folder)


# ---- between: who is there


def _everyone(job: Job, first: First) -> pl.DataFrame:
    """All subjects, registered or with a valid row, in the order of their pseudonyms: number, shard, subject_id, and what is known of each."""
    import polars as pl

    from bitimely_core.datasets.pophr import dates

    claims, span = job.claims, first.span
    frame = first.known.with_columns(
        shard=pl.Series(first.shards, dtype=pl.Int32),
        split_bin=pl.Series(first.bins, dtype=pl.UInt16),
        digest=pl.Series(first.digests, dtype=pl.Binary),
        first=pl.Series(first.earliest),
    )
    unknown = {**dict.fromkeys(SPAN.values(), pl.lit(None, pl.Int32)), "sex": pl.lit(None, pl.UInt8)}
    if claims.subjects is None:
        frame = frame.with_columns(registered=False, **unknown)
    else:
        days = claims.subjects.select(
            "subject_id", "sex", registered=pl.lit(value=True), **{new: dates.days(claims.subjects[old]) for old, new in SPAN.items()}
        )
        frame = frame.join(days, on="subject_id", how="left", maintain_order="left").with_columns(
            pl.col("registered").fill_null(value=False)
        )
    if claims.labels is not None:
        flags = claims.labels.select("subject_id", *(pl.col(name).alias(f"flag_{name}") for name in job.flags))
        if "index_date" in claims.labels.columns:
            flags = flags.with_columns(index_day=dates.days(claims.labels["index_date"]))
        frame = frame.join(flags, on="subject_id", how="left", maintain_order="left")
    if claims.splits:
        placed = pl.DataFrame({"subject_id": list(claims.splits), "split": list(claims.splits.values())})
        frame = frame.join(placed, on="subject_id", how="left", maintain_order="left")
    last = span[1] if span else None
    there = pl.col("registered") | (pl.col("first") <= (last if last is not None else -NONE))
    frame = frame.filter(there).sort("digest").with_row_index("subject_id_new").drop("subject_id", "digest", "first", "registered")
    frame = frame.rename({"subject_id_new": "subject_id"}).with_columns(pl.col("subject_id").cast(pl.Int64))
    if job.given["keep_ids"]:
        _keep_ids(job, first, frame)
    return frame.with_columns(pl.col("obs_end").fill_null(pl.lit(last, pl.Int32)))


def _keep_ids(job: Job, first: First, everyone: pl.DataFrame) -> None:
    """Raw and new ids, for its owner alone. Raises UserError (config, exit 2) for a path inside the workspace."""
    path, home = Path(job.given["keep_ids"]), job.attempt.out.parent.parent
    if path.resolve().is_relative_to(home.resolve()):
        raise UserError(
            Reason.CONFIG,
            "lies in the workspace",
            wanted="expected a place that is not shared with caches and reports",
            file=str(path),
            field="--keep-ids",
            exit_code=Exit.USAGE,
        )
    table = everyone.select("number", new="subject_id").join(first.known, on="number").sort("new").select("subject_id", "new")
    text = table.select(pl_safe("subject_id"), "new").write_csv()
    store.write_bytes(path, text.encode())


def pl_safe(column: str) -> pl.Expr:
    """Ids that a spreadsheet would run as a formula, with a quote before them."""
    import polars as pl

    return pl.when(pl.col(column).str.contains(r"^[=+\-@]")).then("'" + pl.col(column)).otherwise(pl.col(column)).alias(column)


# ---- second pass: one shard


def _settled(rows: pl.DataFrame, first: First, book: Codebook, people: pl.DataFrame) -> pl.DataFrame:
    """The rows that stay, with `subject` as the row of `people`; what leaves is counted in the account of its file."""
    import polars as pl

    from bitimely_core.datasets.pophr import cleaning

    empty = pl.DataFrame(schema={"subject": pl.Int32, "day": pl.Int32, "code": pl.Int32, "source": pl.Int8, "row": pl.Int64})
    if rows.is_empty():
        return empty
    if first.latest is not None:
        gone = rows.filter(pl.col("day") > first.latest)
        rows = rows.filter(pl.col("day") <= first.latest)
        for file, number, code in gone.select(
            file=pl.col("row") // (1 << FILE), number=pl.col("row") % (1 << FILE), code="code"
        ).iter_rows():
            account = first.accounts[first.files[file]]
            account.steps[book.codes[code].step] -= 1
            account.faults["future"] += 1
            _note(account, Reason.DATE_OUTSIDE_LIFE, 1, f"row {number}")
    copy = np.zeros(rows.height, bool)
    suspects = np.flatnonzero(
        pl.Series(_packed(rows["number"], rows["day"], rows["code"].to_numpy(), len(book.codes))).is_duplicated().to_numpy()
    )  # the few that can be copies
    twins = rows[suspects].select(~pl.struct("number", "day", "code", "twin").is_first_distinct()).to_series()
    copy[suspects] = twins.to_numpy()
    copies, kept = rows.filter(pl.Series(copy)), rows.filter(pl.Series(~copy))
    silent = pl.Series([not code.phecodes for code in book.codes], dtype=pl.Boolean).gather(kept["code"])
    late = kept["late"] if "late" in kept.columns else pl.repeat(value=False, n=kept.height, eager=True, dtype=pl.Boolean)
    for reason, lost in (
        (Reason.DUPLICATES, copies),
        (Reason.UNMAPPED_CODE, kept.filter(silent)),
        (Reason.LABEL_LEAKAGE, kept.filter(late & ~silent)),
    ):
        for (file,), part in lost.group_by(pl.col("row") // (1 << FILE), maintain_order=True):
            shown = part.head(cleaning.EXAMPLES)
            if reason == Reason.UNMAPPED_CODE:
                texts = [safe_text(book.codes[code].code) for code in shown["code"]]
            else:
                texts = [f"row {row % (1 << FILE)}" for row in shown["row"]]
            _note(first.accounts[first.files[int(str(file))]], reason, part.height, *texts)
    place = np.zeros(1 + int(people["number"].max() or 0), np.int32)  # type: ignore[arg-type]
    place[people["number"].to_numpy()] = np.arange(people.height)
    return kept.with_columns(late=late, subject=pl.Series(place[kept["number"].to_numpy()])).select(*empty.columns, "late")


def _packed(subject: pl.Series, day: pl.Series, rest: np.ndarray | None = None, size: int = 1) -> np.ndarray:
    """Subject, day and a number below `size` as one integer, in whose order they are sorted, int64."""
    key = subject.to_numpy().astype(np.int64) * SPAN_DAYS + (day.to_numpy().astype(np.int64) + SPAN_DAYS // 2)
    return key if rest is None else key * size + rest


def _note(account: Account, reason: Reason, count: int, *examples: str) -> None:
    from bitimely_core.datasets.pophr import cleaning

    account.reasons[reason] += count
    account.examples[reason] = [*account.examples.get(reason, []), *examples][: cleaning.EXAMPLES]


def _labelled(shard: Shard, job: Job, agreement: Counter[tuple[str, str, str]], engine: Engine) -> Shard:
    """The labels that hold: of rules or of the source's columns, and how they agree; late rows, needed for labels alone, leave."""
    import polars as pl

    from bitimely_core.datasets.pophr import labels, maps, rules

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
        near = maps.near(job.codemap, rules.defining(job.rules, job.codemap.tables))
        people = labels.exclude_controls(shard.rows, shard.codes, near, people, engine)
    return replace(shard, people=people, rows=shard.rows.filter(~pl.col("late")).drop("late"), labels=tuple(job.names))


def _on_the_subjects_clock(shard: Shard, *, keep_dates: bool) -> Shard:
    """All days of a subject less that of its first valid row; a subject without any has no days."""
    import polars as pl

    if keep_dates:
        return shard
    people = shard.people
    days = [name for name in people.columns if name in DAYS or name.startswith("onset_")]
    begin = people["first_day"].fill_null(0).gather(shard.rows["subject"])
    rows = shard.rows.with_columns((pl.col("day") - begin).cast(pl.Int32))
    people = people.with_columns((pl.col(name) - pl.col("first_day")).cast(pl.Int32).alias(name) for name in days)
    return replace(shard, rows=rows, people=people.with_columns(first_day=pl.col("first_day") * 0))


def _events(shard: Shard) -> pl.DataFrame:
    """The rows in MEDS columns, by subject and time; `row` is their order in the source."""
    import polars as pl

    from bitimely_core.datasets.pophr.rules import SOURCES

    rows = shard.rows[np.argsort(_packed(shard.rows["subject"], shard.rows["day"]), kind="stable")]
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


def parquet(frame: pl.DataFrame) -> Callable[[BinaryIO], None]:
    """Writes a frame as Parquet, the same bytes for the same content."""
    import pyarrow.parquet as pq

    return lambda stream: pq.write_table(frame.to_arrow(), stream, compression="zstd", version="2.6", row_group_size=1 << 20)


def _sorted(labels: pl.DataFrame) -> pl.DataFrame:
    import polars as pl

    if not labels.width:
        return pl.DataFrame(schema={"subject_id": pl.Int64, "name": pl.String, "value": pl.Int8, "onset_day": pl.Int32})
    return labels.sort("subject_id", "name", maintain_order=True)


# ---- what it was


def _contents(shard: Shard, names: list[str], ranks: np.ndarray) -> list[bytes]:
    """Of each subject the SHA-256 of its rows, in an order of their own, and of its labels; no id in it."""
    from bitimely_core.datasets.pophr.rules import SOURCES

    rows, people = shard.rows, shard.people
    size = max(len(ranks), 1) * len(SOURCES)
    rank = ranks[rows["code"].to_numpy()] * len(SOURCES) + rows["source"].to_numpy()
    packed = np.sort(_packed(rows["subject"], rows["day"], rank, size))
    bounds = np.searchsorted(packed, np.arange(people.height + 1) * (SPAN_DAYS * size))
    packed %= SPAN_DAYS * size
    known = people.select(*(f"{kind}_{name}" for name in names for kind in ("y", "onset"))).rows() if names else [()] * people.height
    return [hashlib.sha256(packed[bounds[i] : bounds[i + 1]].tobytes() + repr(known[i]).encode()).digest() for i in range(people.height)]


def _content(hashes: list[bytes], book: Codebook, ranks: np.ndarray) -> str:
    """SHA-256 over the sorted hashes of the subjects and over the codes that their rows speak of."""
    whole = hashlib.sha256()
    for digest in sorted(hashes):
        whole.update(f"{digest.hex()}\n".encode())
    whole.update(repr(sorted((code.text, code.phecodes) for code in book.codes)).encode())
    return whole.hexdigest()


def _total(first: First) -> Account:
    from bitimely_core.datasets.pophr.cleaning import Account

    total = Account()
    for account in first.accounts.values():
        total += account
    return total


def _account(job: Job, first: First, content: str) -> None:
    """Units, rows and findings of the report: one of each a table, and what was said about the whole."""
    attempt, claims = job.attempt, job.claims
    of_file: dict[str, list[Finding]] = {}
    for finding in (*claims.findings, *job.codemap.findings):
        if finding.file in {table.file for table in claims.rows}:
            of_file.setdefault(str(finding.file), []).append(finding)
        else:
            attempt.reasons.append(finding)
    rows: list[Rows] = []
    for table in claims.rows:
        account = first.accounts.get(table.file)
        if account is not None:
            dropped, quarantined = account.split()
            table = replace(
                table,
                dropped=dict(Counter(table.dropped) + Counter(dropped)),
                quarantined=dict(Counter(table.quarantined) + Counter(quarantined)),
            )
            of_file.setdefault(table.file, []).extend(
                Finding(
                    code=reason,
                    level="warning" if str(reason) in dropped else "error",
                    text=f"{n} {table.kind}",
                    wanted=WANTED.get(reason, ""),
                    file=table.file,
                    count=n,
                    examples=tuple(account.examples.get(reason, ())),
                )
                for reason, n in sorted(account.reasons.items())
                if n
            )
        rows.append(table)
    attempt.reasons += _silent_rules(job, first)
    attempt.rows = [accounting.rows_object(table) for table in rows]
    for table in rows:
        _unit(
            attempt,
            table.file,
            of_file.get(table.file, []),
            content if table.file in first.accounts else attempt.hashes.get(table.file, content),
        )


def _silent_rules(job: Job, first: First) -> list[Finding]:
    """Rules that look at kinds of claims of which the data have none."""
    from bitimely_core.datasets.pophr.rules import SOURCES

    there = {SOURCES[kind] for kind in first.sources}
    if not job.ruled or not there:
        return []
    wanted = {rule.name: {kind for clause in rule.clauses for kind in clause.sources} for rule in job.rules}
    return [
        Finding(
            code=Reason.CLASS_MISSING,
            level="warning",
            text=f"rule {safe_text(name)} looks at {' and '.join(sorted(kinds))} rows, and there are only {' and '.join(sorted(there))} ones",
            wanted="nobody can have this label",
            action="Name the kind of claims: --default-source, or --col source=COLUMN",
        )
        for name, kinds in wanted.items()
        if not kinds & there
    ]


def _unit(attempt: Attempt, file: str, reasons: list[Finding], content: str | None) -> None:
    """Enter a table into the report."""
    unit = Unit(name=file, files=(file,), read=None)
    attempt.entries[file] = {"report": accounting.unit_object(unit, reasons, content=content), "rows": []}
