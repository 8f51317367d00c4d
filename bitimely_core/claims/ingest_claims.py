"""Ingests claims: source tables become events, subjects and labels under pseudonyms (builder's
reference, 2, 11, 13).

The first pass (`pass1_clean`) cleans the rows as they stream by and spills them by shard of
subjects. What is global (the last day of the data, the pseudonyms, the table of codes) is decided
between the passes (`subjects`). The second pass (`pass2_write`) writes each shard's files, and
`ingest_report` accounts for every row. Finished work is recorded in `.parts/`: a killed run is
continued from there. A run on other files or with other options discards it.

A subject's pseudonym is its rank under HMAC-SHA256 of its raw id. Its days count from its first
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

import numpy as np
import polars as pl

from bitimely_core.cache import ingest_report as cache_report
from bitimely_core.cache.ingest_run import REPORT, IngestRun
from bitimely_core.cache.ingest_units import PART_LOCK_WAIT, load_previous
from bitimely_core.claims import (
    claims_report,
    cluster,
    code_forms,
    gaps,
    label_rules,
    map_files,
    pass1_clean,
    pass2_write,
    phecode_maps,
    sources,
    spill,
    subject_splits,
    subjects,
    unknown_dates,
)
from bitimely_core.claims.claims_reading import ClaimsOptions
from bitimely_core.claims.codebook import Codebook
from bitimely_core.claims.job import ClaimsJob, CleaningFindings, clear_folder
from bitimely_core.claims.subjects import CleanedSource, SubjectCounts
from bitimely_core.errors import Exit, Reason, UserError, input_warning, usage_error
from bitimely_core.formats.source import Source, scan_folder
from bitimely_core.registry import Choices
from bitimely_core.schemas.ingest_records import (
    AgreementCell,
    CacheManifest,
    CodeCount,
    CodeMap,
    EventsManifest,
    IngestPart,
    IngestReport,
)
from bitimely_core.schemas.tokens import HistoryPreparation
from bitimely_core.store import locks, manifests, storage
from bitimely_core.store.records import StoredFile
from bitimely_core.store.workspace import refuse_inside_workspace
from bitimely_core.system_errors import translate_system_errors
from bitimely_core.tokens.sequences import HISTORIES

NAMES = re.compile(r"(events-\d{5}|subjects|labels|codemap)-[0-9a-f]{16}\.(parquet|json)")
RAW, PARTS = ".raw", ".parts"
GENERATED = "made.json"  # in PARTS: the raw files of a generated data set are complete
SHARD_BYTES = 48 << 20  # of the source: a shard is a million rows or two
FEW_SHARDS = 8  # shards
KEY = 32  # bytes
UNMAPPED_LISTED = 50  # codes without PheCode that are listed
WORK_FORMAT = 5  # of unfinished work
# options that do not change the cache, or only through the key
RUN_ONLY = ("keep_ids", "engine", "id_key", "for_cohort")


def ingest_events(
    run: IngestRun, shard: tuple[int, int] | None, wait: float, *, force_new: bool
) -> IngestReport | IngestPart:
    """Claims: part k of n of the first pass, or everything that is not done yet."""
    part_number, parts = shard or (1, 1)
    if parts > 1:
        with locks.lock_folder(run.out, wait, shared=True):
            part = ingest_part(run.restart(), (part_number, parts), force_new=force_new)
        if part is not None and part.parts_missing:
            return part
        wait = max(wait, PART_LOCK_WAIT)
    with locks.lock_folder(run.out, wait), claims_report.round_refusal():
        storage.remove_temporary_files(run.out)
        return _build_cache(run, parts, force_new=force_new)


def _build_cache(run: IngestRun, parts: int, *, force_new: bool) -> IngestReport:
    """Read claims, publish, report. The caller holds the lock.

    `force_new` reads everything again but continues unfinished work of such an ingest; `parts`
    finished parts (`ingest_part`) hold the cleaned rows. Raises UserError: as `cache.ingest`.
    """
    home, previous = run.out / PARTS, load_previous(run, force_new=force_new)
    usable = None if force_new else previous
    with run.record_failure(), _generate_source(run, usable):
        run.read_checksums()
        run.hash_remaining()
        if usable is not None and _is_unchanged(run, usable):
            digest, report = usable.manifest_sha256, usable.report
            clear_folder(run.out / RAW)
        else:
            work = _name_work(run, force_new=force_new)
            clear_folder(home, work, GENERATED)
            storage.remove_temporary_files(storage.make_folder(home))
            try:
                # a continued run leaves out cleaned blocks, and so surveys the source before
                is_new = not pass1_clean.findings_path(home, f"{work}-1", 1).is_file()
                uses_spark = run.given_options.get("engine") == "spark"
                once = parts == 1 and is_new and not uses_spark
                job = _open_job(run, f"{work}-{parts}", once=once)
                manifest, unusable = _write_cache(job, parts)
            except UserError as error:
                _enter_refusal(run, error)
                raise
            refused = run.find_refusal() or unusable
            if refused is not None:
                for name in manifest.files:
                    storage.os_unlink(run.out / name)
                clear_folder(home)
                raise refused
            generation = previous.generation + 1 if previous else 1
            report = cache_report.publish_report(run.report(), generation, manifest.content_sha256)
            manifest = manifest.model_copy(update={"report": report})
            digest = manifest.publish(run.out, generation).manifest_sha256
        report = report.model_copy(update={"manifest_sha256": digest})
        report.save(run.out / REPORT)
        manifests.remove_old_files(run.out, NAMES)
        clear_folder(home)
    return report


def _enter_refusal(run: IngestRun, error: UserError) -> None:
    """After a refusal, remove unfinished work and enter the file that is at fault into the
    report.
    """
    if error.exit_code not in {Exit.REFUSED, Exit.USAGE}:
        return
    clear_folder(run.out / PARTS)
    file = f"/{error.file or ''}"
    name = next((name for name in run.sizes if file.endswith(f"/{name}")), None)
    if name and error.exit_code == Exit.REFUSED:
        claims_report.add_unit(run, name, [replace(error.finding, file=name)], None)


def ingest_part(run: IngestRun, shard: tuple[int, int], *, force_new: bool) -> IngestPart | None:
    """Part k of n of the first pass: every n-th block of rows, cleaned and spilled, not published;
    None for an unchanged source.

    A part that is finished for the same source and options is not read again.
    """
    part, parts = shard
    previous = None if force_new else load_previous(run, force_new=force_new)
    run.hash_remaining()
    if previous is not None and _is_unchanged(run, previous):
        return None
    home = storage.make_folder(run.out / PARTS)
    stem = f"{_name_work(run, force_new=force_new)}-{parts}"

    def is_finished(number: int) -> bool:
        return CleaningFindings.load(pass1_clean.findings_path(home, stem, number)).done

    if not is_finished(part):
        pass1_clean.clean_source(_open_job(run, stem), part, parts)
    missing = sum(not is_finished(number) for number in range(1, parts + 1))
    return IngestPart.from_report(run.report(), shard, missing)


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


def pin_options(options: Choices, out: Path) -> Choices:
    """Options as a manifest keeps them: hashes of files instead of paths, so that equal files
    elsewhere are the same choice.

    Raises UserError: as `sources.check_options`, `load_key` and `label_rules.load_rules`.
    """
    pinned: Choices = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in options.items()
        if name not in RUN_ONLY
    }
    if "phecode_map" not in options:  # of a generated data set
        return pinned
    sources.check_options(ClaimsOptions(**options))
    if not options["split_file"]:
        del pinned["split_file"]
    for name in ("map_overrides", "split_file"):
        if options[name]:
            pinned[name] = map_files.hash_file_or_path(options[name])
    pinned["phecode_map"] = [map_files.hash_map(str(path)) for path in options["phecode_map"]]
    if options["rules"]:
        pinned["rules"] = storage.fingerprint(label_rules.load_rules(options["rules"]))
    key = load_key(options["id_key"], out)
    pinned["pseudonyms"] = hashlib.sha256(b"bitimely id key" + key).hexdigest()[:16]
    return pinned


def load_key(file: str, out: Path) -> bytes:
    """The key of the pseudonyms: `file`, else `id.key` of the workspace of the cache, created if
    missing.

    Raises UserError: config (exit 2) for a file that cannot be the key.
    """
    workspace = out.parent.parent if out.parent.name == "cache" else out.parent
    path = Path(file) if file else workspace / "id.key"
    if not file:
        storage.write_secret(path, KEY)
    with translate_system_errors(path):
        key = path.read_bytes()
    if len(key) != KEY:
        raise usage_error(
            f"{len(key)} bytes",
            f"expected {KEY} random bytes",
            f"Make one with: head -c {KEY} /dev/urandom > FILE",
            file=str(path),
            field="--id-key",
        )
    return key


@contextmanager
def _generate_source(run: IngestRun, previous: CacheManifest | None) -> Iterator[None]:
    """The raw files of a generated data set, until they are ingested or refused; complete ones of
    the same options are used again.
    """
    if run.source is not None or (previous is not None and not previous.find_damage(run.out)):
        yield
        return
    folder, run_options = run.out / RAW, run.given_options
    try:
        options = _write_raw_files(run, folder)
        options |= {name: run_options.get(name, options[name]) for name in RUN_ONLY}
        run.given_options = options
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


def _write_raw_files(run: IngestRun, folder: Path) -> Choices:
    """Generate the raw files, unless complete ones of the same options are there; the options to
    ingest them with.
    """
    note = run.out / PARTS / GENERATED
    identity = storage.fingerprint([run.settings.model_dump(mode="json"), str(folder)])
    if note.is_file() and folder.is_dir():
        made, options = json.loads(note.read_bytes())
        if made == identity:
            return dict(options)
    clear_folder(folder)
    clear_folder(note.parent)
    options = run.dataset.function(storage.make_folder(folder), dict(run.given_options))
    storage.make_folder(note.parent)
    storage.write_json(note, [identity, options])
    return dict(options)


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
        refuse_inside_workspace(Path(options.keep_ids), run.out.parent.parent)
    claims = sources.read_source(run.source, options, once=once)
    placed = claims.splits
    if options.split_file:
        placed = subject_splits.read_split_file(Path(options.split_file), "the ids of the source")
    codemap = _read_map(run.source, claims, options)
    sample = code_forms.sample_columns(claims.events, claims.survey.vocab)
    forms = code_forms.judge_forms(
        sample, codemap.tables, pads=options.pad_undotted, max_bad=run.run_options["max_bad"]
    )
    claims.survey.findings += forms.findings
    table = label_rules.load_rules(options.rules or "ccdss")
    label_columns = [] if claims.labels is None else claims.labels.columns
    return ClaimsJob(
        run=run,
        options=options,
        claims=claims,
        splits=placed,
        codemap=codemap,
        rule_table=table,
        rules=label_rules.parse_rules(table),
        flags=tuple(name for name in label_columns if name not in {"subject_id", "index_date"}),
        book=Codebook(codemap.tables, strict=True, forms=forms.forms),
        unknown_days=unknown_dates.find_unknown_days(sample.days),
        key=load_key(options.id_key, run.out),
        shards=count_shards(sum(run.sizes.values())),
        home=run.out / PARTS,
        stem=stem,
    )


def _read_map(
    source: Source, claims: sources.ClaimsSource, options: ClaimsOptions
) -> phecode_maps.PhecodeMap:
    """The PheCode map of the options, else the one beside the claims."""
    if [Path(path).name for path in options.phecode_map] == [HISTORIES]:
        prepared = HistoryPreparation.load(Path(options.phecode_map[0]))
        return phecode_maps.PhecodeMap(
            prepared.codemap.phecodes,
            prepared.names,
            prepared.categories,
            sexes=prepared.codemap.sexes,
        )
    codemap = phecode_maps.read_map(
        options.phecode_map or [str(source.path(file)) for file in claims.map_files],
        repair=options.map_repair,
        overrides=options.map_overrides,
        keep_ignored=options.keep_ignored,
        vocab=options.map_vocab,
    )
    if options.sex_restrictions and not codemap.sexes:
        raise usage_error(
            "the map states no sexes",
            "expected a column sex, or sex_restriction.csv beside the map of the R package",
            "Leave --sex-restrictions out",
            field="--sex-restrictions",
        )
    return codemap


def _write_cache(job: ClaimsJob, parts: int) -> tuple[EventsManifest, UserError | None]:
    """Write all files of the cache; its manifest, with the report so far, and why it may not be
    published.
    """
    if parts == 1 and job.options.engine == "spark":
        job, parts = cluster.clean_parts(job)
    elif parts == 1:
        pass1_clean.clean_source(job)
    findings, stretches = pass1_clean.join_parts(job, parts)
    run, codemap = job.run, job.codemap
    cleaned = CleanedSource(findings, stretches, subjects.write_subject_facts(job))
    keys, counts = subjects.assign_pseudonyms(job, cleaned)
    subjects.write_id_table(job, keys)
    events, agreement = _write_events(job, cleaned, keys)
    slices = -(-max(len(keys), 1) // spill.SLICE)
    merged = {}
    for kind, by in (("subjects", ("subject_id",)), ("labels", ("subject_id", "name"))):
        paths = pass2_write.list_shard_files(job, kind)
        frames = spill.merge_sorted(paths, "subject_id", len(keys), slices, by)
        merged[kind] = spill.write_table(run.out, kind, frames)
    content = pass2_write.hash_content(job, findings, slices)
    unusable = _find_gaps(job, findings, counts, run.out / merged["labels"][0])
    codemap_file = _write_codemap(run.out, codemap)
    claims_report.write_ingest_report(job, findings, content)
    keep_dates, span = run.options["keep_dates"], findings.span
    manifest = EventsManifest(
        dataset=run.dataset.name,
        settings=run.settings,
        content_sha256=content,
        report=run.report(),
        files=events | dict([*merged.values(), codemap_file]),
        subjects=merged["subjects"][0],
        labels=merged["labels"][0],
        codemap=codemap_file[0],
        shards=list(events),
        names=job.names,
        rules=job.rule_table,
        ruled=job.ruled,
        defining=label_rules.find_defining_phecodes(job.rules, codemap.tables),
        phenotypes=codemap.names,
        categories=codemap.categories,
        map=codemap.facts,
        clock="calendar" if keep_dates else "subject",
        data_end=span[1] if span and keep_dates else None,
        days=span[1] - span[0] + 1 if span else 0,
        seed=job.options.seed,
        split="official" if job.splits is not None else "subject",
        agreement=agreement,
        funnel=findings.total.funnel().model_copy(update={"subjects": len(keys)}),
        unmapped=_list_unmapped(findings),
        facts={"tables": [table.file for table in job.claims.rows], **job.claims.facts},
    )
    return manifest, unusable


def _write_codemap(out: Path, codemap: phecode_maps.PhecodeMap) -> tuple[str, StoredFile]:
    """Write the map, by which a run reads the codes of new people; its name, size and hash."""
    content = CodeMap(phecodes=codemap.tables, sexes=codemap.sexes).encode()
    name, sha256, size = storage.write_hashed(out, "codemap", ".json", content)
    return name, StoredFile(sha256=sha256, size=size)


def _find_gaps(
    job: ClaimsJob, findings: CleaningFindings, counts: SubjectCounts, labels: Path
) -> UserError | None:
    """Enter what the source does not tell into the report; why the cache may not be published."""
    label_counts = gaps.count_labels(labels, job.names)
    caseless = gaps.find_caseless_labels(job, findings, counts, label_counts)
    refusal = gaps.find_row_refusal(job, findings, counts)
    if refusal is None:
        refusal = gaps.find_label_refusal(job, label_counts, caseless)
        caseless = [] if job.options.for_cohort else caseless
        job.run.reasons += [] if refusal else caseless
    said = {finding.field for finding in caseless}
    missing = gaps.find_missing_facts(job, counts)
    job.run.reasons += [finding for finding in missing if finding.field not in said]
    return refusal


def _write_events(
    job: ClaimsJob, cleaned: CleanedSource, keys: np.ndarray
) -> tuple[dict[str, StoredFile], list[AgreementCell]]:
    """The second pass: file of each shard -> its size and hash, and the agreement of the labels.

    The rows that leave are added to the accounts of `cleaned`.
    """
    events: dict[str, StoredFile] = {}
    agreement = Counter[tuple[str, str, str]]()
    other_sex = 0
    for shard in pass2_write.write_shards(job, cleaned, keys):
        name, events[name] = shard.events
        agreement.update(dict(shard.agreement))
        for file, account in shard.accounts.items():
            cleaned.findings.add_account(file, account)
        other_sex += shard.other_sex
    if other_sex:
        job.run.reasons.append(
            input_warning(
                Reason.METADATA,
                f"{other_sex} rows have a PheCode of the other sex",
                "it is left out",
                field="--sex-restrictions",
                count=other_sex,
            )
        )
    return events, [
        AgreementCell(rule=rule, flag=flag, cell=cell, n=n)
        for (rule, flag, cell), n in sorted(agreement.items())
    ]


def _list_unmapped(findings: CleaningFindings) -> list[CodeCount]:
    """The most frequent codes without PheCode."""
    unmapped = [
        CodeCount(code=findings.codes[number].text, n=n)
        for number, n in findings.code_counts.items()
        if not findings.codes[number].phecodes
    ]
    return sorted(unmapped, key=lambda count: (-count.n, count.code))[:UNMAPPED_LISTED]
