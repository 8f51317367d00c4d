"""`ingest` of claims: source tables to canonical events, subjects and labels under pseudonyms
(builder's reference, 2, 11, 13).

The first pass (`pass1_clean`) cleans the rows as they stream by and spills them by shard of
subjects. What is global (the last day of the data, the pseudonyms, the table of codes) is decided
between the passes (`subjects`). The second pass (`pass2_write`) writes each shard's files, and
`ingest_report` accounts for every row. Finished work is recorded in `.parts/`: a killed run is
continued from there; a run on other files or with other options discards it.

A subject's pseudonym is its rank under HMAC-SHA256 of its raw id; its days count from its first
valid row unless dates are kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from bitimely_core import locks, manifests, storage
from bitimely_core.cache import ingest_report as cache_report
from bitimely_core.cache.ingest import PART_LOCK_WAIT, load_previous
from bitimely_core.cache.ingest_run import REPORT, IngestRun
from bitimely_core.claims import (
    cluster,
    ingest_report,
    label_rules,
    pass1_clean,
    pass2_write,
    phecode_maps,
    sources,
    spill,
    splits,
    subjects,
)
from bitimely_core.claims.codes import Codebook
from bitimely_core.claims.job import ClaimsJob, CleaningFindings, clear_folder
from bitimely_core.claims.options import ClaimsOptions
from bitimely_core.errors import Exit, Reason, UserError, input_warning, safe_text, usage_error
from bitimely_core.formats.source import scan_folder
from bitimely_core.privacy import round_message, round_rows
from bitimely_core.records import StoredFile
from bitimely_core.schemas.ingest import (
    AgreementCell,
    CacheManifest,
    CodeCount,
    EventsManifest,
    IngestPart,
    IngestReport,
)
from bitimely_core.system_errors import raise_system_error

NAMES = re.compile(r"(events-\d{5}|subjects|labels)-[0-9a-f]{16}\.parquet")
RAW, PARTS = ".raw", ".parts"
GENERATED = "made.json"  # in PARTS: the raw files of a generated data set are complete
SHARD_BYTES = 48 << 20  # of the source: a shard is a million rows or two
FEW_SHARDS = 8  # shards
KEY = 32  # bytes
UNMAPPED_LISTED = 50  # codes without PheCode that are listed
WORK_FORMAT = 4  # of unfinished work
# options that do not change the cache, or only through the key
RUN_ONLY = ("keep_ids", "engine", "id_key")


def ingest_events(
    run: IngestRun, shard: tuple[int, int] | None, wait: float, *, force_new: bool
) -> IngestReport | IngestPart:
    """Claims: part k of n of the first pass, or everything that is not done yet."""
    parts = 1 if shard is None else shard[1]
    if shard is not None and parts > 1:
        with locks.lock_folder(run.out, wait, shared=True):
            previous = None if force_new else load_previous(run, force_new=force_new)
            part = ingest_part(run.restart(), shard, previous, force_new=force_new)
        if part is not None and part.parts_missing:
            return part
    with locks.lock_folder(run.out, wait if parts == 1 else max(wait, PART_LOCK_WAIT)):
        storage.remove_temporary_files(run.out)
        return build_cache(
            run, force_new=force_new, previous=load_previous(run, force_new=force_new), parts=parts
        )


def build_cache(
    run: IngestRun, *, force_new: bool, previous: CacheManifest | None, parts: int = 1
) -> IngestReport:
    """Read claims, publish, report. The caller holds the lock and has compared the settings of a
    previous cache.

    `force_new` reads everything again but continues unfinished work of such an ingest; `parts`
    finished parts (`ingest_part`) hold the cleaned rows. Raises UserError: as `cache.ingest`.
    """
    home = run.out / PARTS
    with run.record_failure(), _generate_source(run, previous if not force_new else None):
        run.read_checksums()
        run.hash_remaining()
        if previous is not None and not force_new and _is_unchanged(run, previous):
            report = previous.report.model_copy(
                update={"manifest_sha256": previous.manifest_sha256}
            )
            report.save(run.out / REPORT)
            manifests.remove_old_files(run.out, NAMES)
            clear_folder(home)
            clear_folder(run.out / RAW)
            return report
        same = _name_work(run, force_new=force_new)
        clear_folder(home, same, GENERATED)
        storage.remove_temporary_files(storage.make_folder(home))
        try:
            fresh = (
                parts == 1 and not pass1_clean.findings_path(home, f"{same}-1", 1).is_file()
            )  # an earlier run has surveyed what it has cleaned
            job = _open_job(
                run, f"{same}-{parts}", once=fresh and run.given_options.get("engine") != "spark"
            )
            manifest = _write_cache(job, parts)
        except UserError as error:
            if error.exit_code not in {Exit.REFUSED, Exit.USAGE}:
                raise
            clear_folder(home)
            name = next(
                (
                    name
                    for name in run.sizes
                    if error.file and f"/{error.file}".endswith(f"/{name}")
                ),
                None,
            )
            if name and error.exit_code == Exit.REFUSED:
                ingest_report.add_unit(run, name, [replace(error.finding, file=name)], None)
            raise
        refused = run.find_refusal()
        if refused is not None:
            for name in manifest.files:
                storage.os_unlink(run.out / name)
            clear_folder(home)
            raise refused
        generation = previous.generation + 1 if previous else 1
        report = cache_report.publish_report(run.report(), generation, manifest.content_sha256)
        published = manifest.model_copy(update={"report": report}).publish(run.out, generation)
        report = report.model_copy(update={"manifest_sha256": published.manifest_sha256})
        report.save(run.out / REPORT)
        manifests.remove_old_files(run.out, NAMES)
        clear_folder(home)
    return report


def ingest_part(
    run: IngestRun,
    shard: tuple[int, int],
    previous: CacheManifest | None,
    *,
    force_new: bool = False,
) -> IngestPart | None:
    """Part k of n of the first pass: every n-th block of rows, cleaned and spilled, not published;
    None for an unchanged source.

    A part that is finished for the same source and options is not read again.
    """
    k, n = shard
    if run.given_options.get("keep_ids"):
        raise usage_error(
            "--keep-ids with --shard", "raw ids are in several processes", "Ingest without --shard"
        )
    run.hash_remaining()
    if previous is not None and _is_unchanged(run, previous):
        return None
    home = storage.make_folder(run.out / PARTS)
    stem = f"{_name_work(run, force_new=force_new)}-{n}"

    def is_finished(part: int) -> bool:
        return CleaningFindings.load(pass1_clean.findings_path(home, stem, part)).done

    if not is_finished(k):
        pass1_clean.clean_source(_open_job(run, stem), k, n)
    return IngestPart.from_report(
        run.report(), shard, sum(not is_finished(part) for part in range(1, n + 1))
    )


def _name_work(run: IngestRun, *, force_new: bool) -> str:
    """How the names of unfinished work begin: a fingerprint of source, options and key."""
    key = hashlib.sha256(load_key(run.given_options.get("id_key", ""), run.out)).hexdigest()
    settings, shards = run.settings.model_dump(mode="json"), count_shards(sum(run.sizes.values()))
    return storage.fingerprint(
        [WORK_FORMAT, settings, run.report().source.sha256, key, shards, pl.__version__, force_new]
    )[:16]


def count_shards(size: int) -> int:
    """Number of shards for a source of `size` bytes.

    Memory for data of all subjects grows with the source, by some 60 bytes in 1,500 of it; beyond
    `FEW_SHARDS` shards each is smaller by that amount, so that a build needs the same memory, but
    not below a quarter.
    """
    shards = -(-size // SHARD_BYTES)
    spared = min(max(0, shards - FEW_SHARDS) / 160, 0.75)
    return max(1, math.ceil(size / (SHARD_BYTES * (1 - spared))))


def pin_options(options: dict[str, Any], out: Path) -> dict[str, Any]:
    """Options as a manifest keeps them: hashes of files instead of paths, so that equal files
    elsewhere are the same choice.

    Raises UserError: as `load_key` and `label_rules.load_rules`.
    """

    def content(path: str) -> str:
        return storage.hash_file(Path(path)) if Path(path).is_file() else safe_text(path)

    plain: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in options.items()
        if name not in RUN_ONLY
    }
    if "phecode_map" not in options:  # of a generated data set
        return plain
    given = ClaimsOptions(**options)
    sources.check_options(given)
    if split_file := plain.pop("split_file"):
        plain["split_file"] = content(split_file)
    return plain | {
        "phecode_map": [phecode_maps.hash_map(str(path)) for path in options["phecode_map"]],
        "map_overrides": content(options["map_overrides"]) if options["map_overrides"] else "",
        "rules": storage.fingerprint(label_rules.load_rules(options["rules"]))
        if options["rules"]
        else "",
        "pseudonyms": hashlib.sha256(
            b"bitimely id key" + load_key(options["id_key"], out)
        ).hexdigest()[:16],
    }


def load_key(file: str, out: Path) -> bytes:
    """The key of the pseudonyms: `file`, else `id.key` of the workspace of the cache, created if
    missing.

    Raises UserError: not_found or config (exit 2) for a file that cannot be the key.
    """
    path = (
        Path(file)
        if file
        else (out.parent.parent if out.parent.name == "cache" else out.parent) / "id.key"
    )
    if not file:
        storage.write_secret(path, KEY)
    try:
        key = path.read_bytes()
    except OSError as error:
        raise_system_error(error, path, stored=False)
        text = f"cannot be read ({error.strerror})"
        raise usage_error(
            text,
            f"expected {KEY} random bytes",
            code=Reason.NOT_FOUND,
            file=str(path),
            field="--id-key",
        ) from error
    if len(key) != KEY:
        hint = f"Make one with: head -c {KEY} /dev/urandom > FILE"
        raise usage_error(
            f"{len(key)} bytes",
            f"expected {KEY} random bytes",
            hint,
            file=str(path),
            field="--id-key",
        )
    return key


@contextmanager
def _generate_source(run: IngestRun, previous: CacheManifest | None) -> Iterator[None]:
    """The raw files of a generated data set, until they are ingested or refused; intact ones of the
    same options are used again.
    """
    if run.source is not None or (previous is not None and not previous.find_damage(run.out)):
        yield
        return
    folder, note = run.out / RAW, run.out / PARTS / GENERATED
    given = run.given_options
    same = storage.fingerprint([run.settings.model_dump(mode="json"), str(folder)])
    try:
        stored = json.loads(note.read_bytes()) if note.is_file() else {}
        options: dict[str, Any] | None = stored.get("options")
        if (
            stored != {"same": same, "options": options, "files": _hash_files(folder)}
            or options is None
        ):
            clear_folder(folder)
            clear_folder(note.parent)
            options = run.dataset.function(storage.make_folder(folder), dict(given))
            storage.make_folder(note.parent)
            storage.write_json(
                note, {"same": same, "options": options, "files": _hash_files(folder)}
            )
        run.given_options = {
            **options,
            **{name: given.get(name, options[name]) for name in RUN_ONLY},
        }
        run.source = scan_folder(folder)
        yield
    except UserError as error:
        if error.exit_code in {Exit.REFUSED, Exit.USAGE}:
            clear_folder(folder)
        raise
    else:
        clear_folder(folder)
    finally:
        run.source, run.given_options = None, {}


def _hash_files(folder: Path) -> dict[str, list[Any]]:
    return (
        {name: list(storage.hash_with_size(folder / name)) for name in scan_folder(folder).files}
        if folder.is_dir()
        else {}
    )


def _is_unchanged(run: IngestRun, previous: CacheManifest) -> bool:
    """Whether an intact cache of the same files and options is published."""
    same = run.source is None or previous.report.source.sha256 == run.report().source.sha256
    return same and not previous.find_damage(run.out)


def _open_job(run: IngestRun, stem: str, *, once: bool = False) -> ClaimsJob:
    """The configuration of an ingest; `once`: as `read_source`. Raises UserError for a source, a
    map or rules that cannot be used.
    """
    options = ClaimsOptions(**run.given_options)
    assert run.source is not None
    if options.keep_ids:
        subjects.refuse_inside_workspace(Path(options.keep_ids), run.out.parent.parent)
    claims = sources.read_source(run.source, options, once=once)
    placed = pl.DataFrame(
        list((claims.splits or {}).items()),
        {"subject_id": pl.String, "split": pl.String},
        orient="row",
    )
    if options.split_file:
        placed = splits.read_split_file(Path(options.split_file), "the ids of the source")
    beside = (
        [str(run.source.path(claims.facts["phecode_map"]))] if "phecode_map" in claims.facts else []
    )
    repair, overrides, vocab = (
        options.map_repair or None,
        options.map_overrides or None,
        options.map_vocab or None,
    )
    paths = options.phecode_map or beside
    codemap = phecode_maps.read_map(
        paths, repair=repair, overrides=overrides, keep_ignored=options.keep_ignored, vocab=vocab
    )
    if options.sex_restrictions and not codemap.sexes:
        expected = "expected a column sex, or sex_restriction.csv beside the map of the R package"
        raise usage_error(
            "the map states no sexes",
            expected,
            "Leave --sex-restrictions out",
            field="--sex-restrictions",
        )
    table = label_rules.load_rules(options.rules or "ccdss")
    flags = (
        ()
        if claims.labels is None
        else tuple(
            name for name in claims.labels.columns if name not in {"subject_id", "index_date"}
        )
    )
    return ClaimsJob(
        run=run,
        options=options,
        claims=claims,
        splits=placed if options.split_file or claims.splits else None,
        codemap=codemap,
        rule_table=table,
        rules=label_rules.parse_rules(table),
        flags=flags,
        book=Codebook(codemap.tables, pad_undotted=options.pad_undotted, strict=True),
        key=load_key(options.id_key, run.out),
        shards=count_shards(sum(run.sizes.values())),
        home=run.out / PARTS,
        stem=stem,
    )


def _write_cache(job: ClaimsJob, parts: int) -> EventsManifest:
    """Write all files of the cache; its manifest, with the report so far."""
    run = job.run
    if parts == 1 and job.options.engine != "spark":
        cleaned = [pass1_clean.clean_source(job, held=pass1_clean.HELD_BYTES)]
        job = replace(job, claims=job.claims.complete()) if job.claims.complete else job
    else:
        job, parts = cluster.clean_parts(job) if parts == 1 else (job, parts)
        cleaned = [pass1_clean.load_part(job, part) for part in range(1, parts + 1)]
    found, spilled = pass1_clean.join_parts(cleaned)
    facts_file = subjects.write_subject_facts(job)
    keys = subjects.assign_pseudonyms(job, found, spilled, facts_file)
    if job.options.keep_ids:
        subjects.write_id_table(job, keys)
    files: dict[str, StoredFile] = {}
    agreement: pass2_write.AgreementCounts = Counter()
    other_sex = 0
    for done in pass2_write.write_shards(job, found, spilled, facts_file, keys):
        name, files[name] = done.events
        agreement.update(dict(done.agreement))
        for file, account in done.accounts.items():
            found.accounts[file] += account
        other_sex += done.other_sex
    if other_sex:
        text = round_message(f"{other_sex} rows have a PheCode of the other sex")
        run.reasons.append(
            input_warning(
                Reason.METADATA,
                text,
                "it is left out",
                field="--sex-restrictions",
                count=round_rows(other_sex),
            )
        )
    events, slices = list(files), -(-max(len(keys), 1) // spill.SLICE)
    for kind, by in (("subjects", ("subject_id",)), ("labels", ("subject_id", "name"))):
        frames = spill.merge_sorted(
            pass2_write.list_shard_files(job, kind), "subject_id", len(keys), slices, by
        )
        name, files[name] = spill.write_table(run.out, kind, frames)
    subjects_file, labels_file = list(files)[len(events) :]
    content = pass2_write.hash_content(job, found, slices)
    ingest_report.write_ingest_report(job, found, content)
    span = found.span
    without_phecode = (
        (found.codes[number], n)
        for number, n in found.code_counts.items()
        if not found.codes[number].phecodes
    )
    unmapped = sorted(without_phecode, key=lambda one: (-one[1], one[0].text))[:UNMAPPED_LISTED]
    return EventsManifest(
        dataset=run.dataset.name,
        settings=run.settings,
        content_sha256=content,
        report=run.report(),
        files=files,
        subjects=subjects_file,
        labels=labels_file,
        shards=events,
        names=job.names,
        rules=job.rule_table,
        ruled=job.ruled,
        defining=label_rules.find_defining_phecodes(job.rules, job.codemap.tables),
        phenotypes=job.codemap.names,
        categories=job.codemap.categories,
        map=job.codemap.facts,
        clock="calendar" if run.options["keep_dates"] else "subject",
        data_end=span[1] if span and run.options["keep_dates"] else None,
        days=span[1] - span[0] + 1 if span else 0,
        seed=job.options.seed,
        split="official" if job.splits is not None else "subject",
        agreement=[
            AgreementCell(rule=rule, flag=flag, cell=cell, n=n)
            for (rule, flag, cell), n in sorted(agreement.items())
        ],
        funnel=found.total.funnel().model_copy(update={"subjects": len(keys)}),
        unmapped=[CodeCount(code=code.text, n=n) for code, n in unmapped],
        facts={key: value for key, value in job.claims.facts.items() if key != "phecode_map"},
    )
