"""PTB-XL 1.0.1 and 1.0.3: 10-second 12-lead ECGs with diagnostic statements, at 100 and at 500 Hz.

The records are the rows of ptbxl_database.csv; scp_statements.csv maps statements to the five
diagnostic superclasses. The official folds are by patient: 1-8 train, 9 validation, 10 test.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath

from bitimely_core.datasets import physiology
from bitimely_core.datasets.raw_files import (
    is_constant,
    list_paths,
    list_rejected,
    make_unit,
    parse_integer,
    report_count,
    restrict_source,
)
from bitimely_core.errors import (
    Finding,
    Reason,
    UserError,
    input_error,
    input_warning,
    safe_text,
    usage_error,
)
from bitimely_core.formats import tables, wfdb
from bitimely_core.formats.source import Source, locate_errors, require_source
from bitimely_core.formats.units import find_factor, require_rate, scale_signal
from bitimely_core.recordings.channels import make_missing_channel_error
from bitimely_core.registry import DatasetBaseline, DatasetFacts, View, datasets
from bitimely_core.types import (
    Attributes,
    AttributeValue,
    IngestOptions,
    IngestUnit,
    Record,
    Signal,
    SourceRows,
    count_nouns,
    count_reasons,
)

TABLE, STATEMENTS = "ptbxl_database.csv", "scp_statements.csv"
RECORD = {100: "filename_lr", 500: "filename_hr"}  # rate in Hz -> column that names the record
LEADS = ("I", "II", "III", "AVR", "AVL", "AVF", "V1", "V2", "V3", "V4", "V5", "V6")
SECONDS = 10
SUPERCLASSES = ("NORM", "MI", "STTC", "CD", "HYP")
SPLIT_OF = {**dict.fromkeys(range(1, 9), "train"), 9: "validation", 10: "test"}
SEX = {0: "M", 1: "F"}
OVER_89 = 300  # the table's code for ages above 89
MAX_CODES = 2000  # characters of a cell of statements

STATEMENT = r"""\s*+(?:'([^'"\\]{1,32})'|"([^'"\\]{1,32})")\s*+:\s*+(\d{1,3}(?:\.\d{0,9})?)\s*+"""
ONE = re.compile(STATEMENT, re.ASCII)
ALL = re.compile(rf"\s*+\{{(?:{STATEMENT}(?:,{STATEMENT})*+,?+)?+\s*+\}}\s*+", re.ASCII)
CODE = re.compile(r"[A-Z0-9_/()+-]{1,12}", re.ASCII)  # codes that are safe to show
RECORDED = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d", re.ASCII)

RULES = {
    "units": f"one record a row of {TABLE}; the file RECORDS is no inventory",
    "superclasses": (
        f"a statement with diagnostic 1 in {STATEMENTS} counts for its diagnostic_class; "
        "rhythm and form statements do not"
    ),
    "scp_likelihood_0": (
        "0 means that the likelihood is unknown: such a statement counts like any other, as in the "
        "official example; counted"
    ),
    "superclass": (
        "records with exactly one diagnostic superclass; the others are excluded from this view"
    ),
    "multilabel": (
        "records with at least one diagnostic superclass; the others are excluded from this view"
    ),
    "split": (
        "official folds: 1-8 train, 9 validation, 10 test; a patient in folds of several splits "
        "refuses the data set"
    ),
    "subjects": "patient_id as a whole number ('1001.0' is '1001')",
    "leads": (
        "the 12 leads by name, whatever their order and letter case, in mV; other signals are not "
        "kept"
    ),
    "age": f"{OVER_89} stands for older than 89: kept as age_over_89, not as a number",
    "quality": "a constant lead is reported (flat_channel)",
}
BASE_VIEW = View(
    channels=LEADS,
    rate=100.0,
    window=1000,
    split="official",
    help=(
        "12 leads of all records, no labels; 5000 samples at 500 Hz after `ingest ptb-xl --rate "
        "500`"
    ),
)
PAPER = {"channels": 12, "timesteps": 109_200_000, "sequences": 21_837, "length": 5000}


@dataclass(frozen=True, kw_only=True)
class PtbXlEntry:
    """A row of the table. `faults`: why the row makes its record unusable."""

    row: int
    record: str = ""  # path without extension, relative to the table's folder
    subject: str = ""
    fold: int = 0
    attributes: Attributes = field(default_factory=dict)
    recorded: str = ""  # date and time
    likelihoods: Mapping[str, float] = field(default_factory=dict)  # of statements
    unused: tuple[str, ...] = ()  # why age or sex is not used as written
    faults: tuple[Finding, ...] = ()


@datasets(
    DatasetFacts(
        title="PTB-XL: diagnoses from 12-lead ECGs of 10 seconds",
        views={
            "": BASE_VIEW,
            "superclass": replace(
                BASE_VIEW,
                task="classification",
                classes=SUPERCLASSES,
                target="superclass",
                help="diagnostic superclass of the records that have exactly one",
            ),
            "multilabel": replace(
                BASE_VIEW,
                task="multilabel",
                classes=SUPERCLASSES,
                target="superclasses",
                help="all diagnostic superclasses of the records that have any",
            ),
        },
        licence="CC BY 4.0",
        url="https://physionet.org/content/ptb-xl/1.0.3/",
        download=(
            "wget -r -N -c -np -nH --cut-dirs=3 https://physionet.org/files/ptb-xl/1.0.3/   (3.0 "
            "GB; no account needed)"
        ),
        layout=(
            "ptbxl_database.csv and scp_statements.csv beside records100/ or, with --rate 500, "
            "records500/"
        ),
        paper={
            "": PAPER,
            "superclass": {**PAPER, "classes": 5},
            "note": "21,837 are the records of 1.0.1 at 500 Hz; 1.0.3 has 38 duplicates less",
        },
        rules=RULES,
        options={"rate": 100},
        baselines=(
            DatasetBaseline(
                name="ecg-intervals",
                about=(
                    "logistic regression on RR, PR, QRS and QT intervals (Lepeschkin and Surawicz "
                    "1952), variability, and the heights of the waves of each lead"
                ),
                channels=LEADS,
                measure=partial(physiology.measure_window_ecg, leads=LEADS),
                fitted=True,
            ),
        ),
    )
)
def ptb_xl(
    source: Source | None, options: IngestOptions
) -> Iterator[IngestUnit | SourceRows | Finding]:
    """PTB-XL (PhysioNet): 21,799 ECGs of 18,869 patients with diagnostic statements."""
    source = require_source(source)
    rate = options.get("rate", 100)
    if rate not in RECORD:
        raise usage_error(
            f"the rate is {safe_text(rate)}",
            "the data set comes at 100 and at 500 Hz",
            field="--rate",
        )
    table, *others = _list_tables(source)
    for rel in others:
        yield input_warning(
            Reason.FILE_NAME,
            "is another table",
            f"{safe_text(table)} is read, and its records",
            file=rel,
        )
    statements = (PurePosixPath(table).parent / STATEMENTS).as_posix()
    with locate_errors(statements):
        if statements not in source.files:
            raise input_error(
                Reason.NO_INPUT,
                "is missing",
                "it states which statements are diagnoses",
                "Download it",
            )
        superclass_of, findings = _read_superclasses(source.path(statements))
    yield from (finding.at(statements) for finding in findings)
    with locate_errors(table):
        entries, rows, findings = _read_entries(source.path(table), table, rate, superclass_of)
    yield rows
    yield from (finding.at(table) for finding in findings)
    with locate_errors(table):
        check_official_split(entries)
    yield from (finding.at(table) for finding in _report_missing_classes(entries))
    # what a record's name begins with -> its files
    beside: dict[str, list[str]] = defaultdict(list)
    for rel in list_paths(source):
        beside[_record_stem(rel)].append(rel)
    claimed: set[str] = set()
    for name, entry in entries.items():
        unit = _list_unit(source, table, name, entry, beside, options)
        claimed.update(unit.files)
        yield unit
    yield from _report_unlisted(source, claimed)


def _list_tables(source: Source) -> list[str]:
    """The metadata table, the one nearest to the root, and others of its name, which are not
    read.
    """
    paths = [rel for rel in source.files if PurePosixPath(rel).name == TABLE]
    paths.sort(key=lambda rel: (rel.count("/"), rel))
    if not paths:
        raise input_error(
            Reason.NO_INPUT,
            f"no {TABLE} among {len(source.files)} files",
            hint="Give the folder that holds it, with records100, records500 and scp_statements.csv",
        )
    nearest = sum(rel.count("/") == paths[0].count("/") for rel in paths)
    if nearest > 1:
        raise input_error(
            Reason.NO_INPUT,
            f"{TABLE} exists {nearest} times",
            "expected one",
            "Give the folder of one of them",
            file=paths[0],
        )
    return paths


# --- metadata


def _read_superclasses(path: Path) -> tuple[dict[str, str | None], list[Finding]]:
    """Statement -> diagnostic superclass, None for statements about rhythm and form; and findings.

    Raises UserError: as `tables.read_rows`.
    """
    columns = (tables.read_names(path)[0], "diagnostic", "diagnostic_class")
    superclass_of: dict[str, str | None] = {}
    findings: list[Finding] = []
    for row in tables.read_rows(path, columns, key=columns[:1]):
        if isinstance(row, Finding):
            findings.append(replace(row, level="warning"))
            continue
        code, diagnostic, name = (cell.strip() for cell in row.cells)
        is_diagnostic = diagnostic in {"1", "1.0"}
        if is_diagnostic and name not in SUPERCLASSES:
            findings.append(
                input_warning(
                    Reason.METADATA,
                    f"row {row.row} has no diagnostic superclass",
                    f"expected {', '.join(SUPERCLASSES)}",
                    row=row.row,
                )
            )
        superclass_of[code] = name if is_diagnostic and name in SUPERCLASSES else None
    return superclass_of, tables.group_findings(findings)


def _report_identifier(row: int) -> Finding:
    """A row without an id of a record."""
    return Finding(
        Reason.IDENTIFIER,
        f"the id in row {row} is not a whole number",
        "every row needs one",
        field="ecg_id",
        row=row,
    )


def _read_entries(
    path: Path, rel: str, rate: int, superclass_of: Mapping[str, str | None]
) -> tuple[dict[str, PtbXlEntry], SourceRows, list[Finding]]:
    """Record -> its row, the account of the rows, and findings about them; `rel` names the file.

    Raises UserError: duplicate_key for a record with two rows that differ, csv_syntax, and as
    `tables.read_rows`.
    """
    columns = ["ecg_id", "patient_id", "age", "sex", "scp_codes", "strat_fold", RECORD[rate]]
    is_dated = "recording_date" in tables.read_names(path)
    entries: dict[str, PtbXlEntry] = {}
    cells: dict[str, tuple[str, ...]] = {}
    faults: list[Finding] = []  # rows without a record
    seen = repeated = 0
    for row in tables.read_rows(path, [*columns, "recording_date"] if is_dated else columns):
        seen += 1
        if isinstance(row, Finding):
            faults.append(row)
        elif (name := _parse_identifier(row.cells[0])) is None:
            faults.append(_report_identifier(row.row))
        elif name not in entries:
            entries[name] = _parse_entry(row, superclass_of)
            cells[name] = row.cells[1:]
        elif cells[name] == row.cells[1:]:
            repeated += 1
        else:
            raise input_error(
                Reason.DUPLICATE_KEY,
                f"rows {entries[name].row} and {row.row} have the same ecg_id and differ",
                "expected one row a record",
                "Correct the table: the right row is unknown",
                field="ecg_id",
                row=row.row,
            )
    entries = _refuse_shared(entries)
    findings = [
        *tables.group_findings(faults),
        *report_count(Reason.DUPLICATES, "rows that repeat another one", repeated, "used once"),
        *_report_entries(entries.values(), superclass_of),
    ]
    faults += [entry.faults[0] for entry in entries.values() if entry.faults]
    odd = sum(bool(entry.unused) for entry in entries.values())
    return entries, _account_entries(rel, seen, repeated, odd, faults), findings


def _account_entries(
    rel: str, seen: int, repeated: int, odd: int, faults: Sequence[Finding]
) -> SourceRows:
    """The account of the rows.

    `odd`: those used without age or sex; `faults`: of those left out.
    """
    return SourceRows(
        file=rel,
        seen=seen,
        dropped={str(Reason.DUPLICATES): repeated} if repeated else {},
        quarantined=dict(sorted(count_reasons(faults).items())),
        warned={str(Reason.METADATA): odd} if odd else {},
    )


def _refuse_shared(entries: Mapping[str, PtbXlEntry]) -> dict[str, PtbXlEntry]:
    """The entries, with a fault where several rows name one record."""
    rows: dict[str, list[int]] = defaultdict(list)
    for entry in entries.values():
        rows[entry.record].append(entry.row)
    checked = dict(entries)
    for name, entry in entries.items():
        same = rows[entry.record]
        if len(same) > 1 and not entry.faults:
            fault = Finding(
                Reason.DUPLICATE_KEY,
                f"rows {', '.join(map(str, same[:5]))} name the same record",
                "expected one row a record",
                row=entry.row,
            )
            checked[name] = replace(entry, faults=(fault,))
    return checked


def _report_entries(
    entries: Collection[PtbXlEntry], superclass_of: Mapping[str, str | None]
) -> Iterator[Finding]:
    """Remarks on rows that are used."""
    odd = [entry for entry in entries if entry.unused]
    if odd:
        reasons = Counter(chain.from_iterable(entry.unused for entry in odd))
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        yield input_warning(
            Reason.METADATA,
            f"rows whose age or sex is not used as written: {len(odd)} ({counts})",
            "the signals are kept",
            count=len(odd),
            examples=tuple(str(entry.row) for entry in odd[:5]),
        )
    statements = list(chain.from_iterable(entry.likelihoods.items() for entry in entries))
    uncertain = [code for code, likelihood in statements if not likelihood]
    yield from report_count(
        Reason.METADATA,
        "diagnostic statements of likelihood 0, which means unknown",
        sum(superclass_of.get(code) is not None for code in uncertain),
        "counted like the others, see scp_likelihood_0 in rules",
        level="info",
    )
    unknown = [code for code, _ in statements if code not in superclass_of]
    yield from report_count(
        Reason.UNKNOWN_LABEL,
        f"statements that are not in {STATEMENTS}",
        len(unknown),
        "not mapped to a superclass",
        examples=tuple(sorted(filter(CODE.fullmatch, set(unknown)))[:5]),
    )


def _parse_identifier(cell: str) -> str | None:
    """An integer without leading zeros and decimals, as text; None for anything else."""
    number = parse_integer(cell)
    return None if number is None or number < 0 else str(number)


def _parse_entry(row: tables.TableRow, superclass_of: Mapping[str, str | None]) -> PtbXlEntry:
    """The record of a row, or the faults of the row."""
    _, patient, age, sex, codes, fold_cell, record_cell, *date = row.cells
    subject, fold = _parse_identifier(patient), parse_integer(fold_cell)
    record, likelihoods = record_cell.strip(), parse_statements(codes)
    statements = "expected statements with likelihoods from 0 to 100, such as {'NORM': 100.0}"
    checks = (
        (subject, Reason.IDENTIFIER, "patient_id", "is not usable", "expected a whole number"),
        (
            fold in SPLIT_OF,
            Reason.METADATA,
            "strat_fold",
            "is not usable",
            "expected a fold from 1 to 10",
        ),
        (record, Reason.METADATA, "filename", "is empty", "expected the name of a record"),
        (likelihoods is not None, Reason.METADATA_SYNTAX, "scp_codes", "is not usable", statements),
    )
    faults = tuple(
        Finding(code, f"the cell of row {row.row} {problem}", wanted, field=field, row=row.row)
        for is_usable, code, field, problem, wanted in checks
        if not is_usable
    )
    record = record.removesuffix(".hea")
    if faults or subject is None or fold is None or likelihoods is None:
        return PtbXlEntry(row=row.row, record=record, faults=faults)
    person, unused = _parse_person(age, sex)
    present = set(map(superclass_of.get, likelihoods))
    superclasses = [name for name in SUPERCLASSES if name in present]
    attributes: dict[str, AttributeValue] = {"fold": fold, **person}
    if superclasses:
        attributes["superclasses"] = superclasses
    if len(superclasses) == 1:
        attributes["superclass"] = superclasses[0]
    return PtbXlEntry(
        row=row.row,
        record=record,
        subject=subject,
        fold=fold,
        attributes=attributes,
        recorded="".join(date).strip(),
        likelihoods=likelihoods,
        unused=unused,
    )


def _parse_person(age: str, sex: str) -> tuple[dict[str, AttributeValue], tuple[str, ...]]:
    """Age and sex as far as they are usable, and why they are not used as written."""
    person: dict[str, AttributeValue] = {}
    unused = []
    years = None
    with suppress(UserError):
        years = tables.parse_number(age)
    if years == OVER_89:
        person["age_over_89"] = True
        unused.append("above 89")
    elif years is not None and 0 <= years < 120:
        person["age"] = years
    else:
        unused.append("ages unknown" if age.strip().lower() in {"", "nan"} else "ages unusable")
    if (code := parse_integer(sex)) in SEX:
        person["sex"] = SEX[code]
    else:
        unused.append("sexes unknown")
    return person, tuple(unused)


def parse_statements(text: str) -> dict[str, float] | None:
    """Statement -> likelihood of a cell such as "{'NORM': 100.0, 'SR': 0.0}"; None for anything
    else. Nothing is evaluated.
    """
    if len(text) > MAX_CODES or not ALL.fullmatch(text):
        return None
    likelihoods = {
        single or double: float(likelihood) for single, double, likelihood in ONE.findall(text)
    }
    return likelihoods if all(value <= 100 for value in likelihoods.values()) else None


def check_official_split(entries: Mapping[str, PtbXlEntry]) -> None:
    """Checks that no patient has records in several splits. Raises UserError: subject_leakage."""
    splits: dict[str, set[str]] = defaultdict(set)
    for entry in entries.values():
        if not entry.faults:
            splits[entry.subject].add(SPLIT_OF[entry.fold])
    leaking = {subject for subject, names in splits.items() if len(names) > 1}
    if not leaking:
        return
    rows = [str(entry.row) for entry in entries.values() if entry.subject in leaking]
    patients = count_nouns(len(leaking), "patient")
    raise input_error(
        Reason.SUBJECT_LEAKAGE,
        f"{patients} in folds of several splits (rows {', '.join(rows[:10])})",
        "folds 1-8, 9 and 10 must not share a patient",
        "Correct strat_fold or patient_id in the table",
        field="strat_fold",
    )


def _report_missing_classes(entries: Mapping[str, PtbXlEntry]) -> Iterator[Finding]:
    """Superclasses that a split lacks: scores on it are undefined for them."""
    present: dict[str, set[str]] = {split: set() for split in SPLIT_OF.values()}
    for entry in entries.values():
        superclasses = entry.attributes.get("superclasses")
        if isinstance(superclasses, list) and not entry.faults:
            present[SPLIT_OF[entry.fold]].update(superclasses)
    for split, names in present.items():
        lacking = tuple(name for name in SUPERCLASSES if name not in names)
        if lacking:
            yield input_warning(
                Reason.CLASS_MISSING,
                f"no record with {', '.join(lacking)} in {split}",
                "scores of it are undefined there",
                count=len(lacking),
                examples=lacking,
            )


# --- records


def _record_stem(rel: str) -> str:
    """What the names of all files of a record begin with: `records100/00000/00003` of
    `records100/00000/00003_lr.dat`.
    """
    folder, slash, name = rel.rpartition("/")
    return folder + slash + re.split("[_.]", name, maxsplit=1)[0]


def _list_unit(
    source: Source,
    table: str,
    name: str,
    entry: PtbXlEntry,
    beside: Mapping[str, Sequence[str]],
    options: IngestOptions,
) -> IngestUnit:
    """The record of a row, or why it cannot be read."""
    rate = options.get("rate", 100)
    header = (PurePosixPath(table).parent / f"{entry.record}.hea").as_posix()
    files = beside.get(_record_stem(header), ()) if entry.record else ()
    if entry.faults:
        return make_unit(name, files, [fault.at(table) for fault in entry.faults], None)
    if escape := _find_escape(source, entry.record):
        escape = replace(escape, file=table, field=RECORD[rate], row=entry.row)
        return make_unit(name, (), (escape,), None)
    # some systems write names in capitals
    header = next((rel for rel in files if rel.lower() == header.lower()), header)
    faults = list_rejected(source, files)
    if not faults and header not in source.files:
        error = input_error(
            Reason.MISSING_SIGNAL_FILE,
            "is missing",
            f"row {entry.row} of {TABLE} names it",
            file=header,
        )
        faults = [error.finding]
    if faults:
        return make_unit(name, files, faults, None)
    start = _parse_time(entry.recorded) if options.get("keep_dates") else None
    read = partial(
        read_record,
        restrict_source(source, files),
        header,
        Record(
            recording_id=name,
            subject_id=entry.subject,
            signals=[],
            attributes=entry.attributes,
            start_time=start,
        ),
        rate=rate,
        keep_phi=bool(options.get("keep_phi")),
    )
    return make_unit(name, files, (), read)


def _find_escape(source: Source, record: str) -> Finding | None:
    """Why a record's name leads out of the data set's folder."""
    try:
        source.path(f"{record}.hea")
    except UserError as error:
        if error.code == Reason.PATH_ESCAPE:
            return error.finding
    return None


def _parse_time(text: str) -> str | None:
    """A date and time of the table, as ISO 8601; None for another text."""
    with suppress(ValueError):
        if RECORDED.fullmatch(text):
            return datetime.fromisoformat(text).isoformat()
    return None


def _report_unlisted(source: Source, claimed: set[str]) -> Iterator[Finding]:
    """Headers beside the records of this rate that no row names."""
    folders = {rel.rpartition("/")[0] for rel in claimed}
    unlisted = [
        rel
        for rel in source.files
        if rel.lower().endswith(".hea") and rel not in claimed and rel.rpartition("/")[0] in folders
    ]
    if unlisted:
        yield from report_count(
            Reason.FILE_NAME,
            f"records that no row of {TABLE} names, like this one",
            len(unlisted),
            "they are not read",
            file=unlisted[0],
            examples=tuple(safe_text(PurePosixPath(rel).name) for rel in unlisted[:5]),
        )


def read_record(
    source: Source, rel: str, record: Record, *, rate: int, keep_phi: bool = False
) -> Record:
    """One ECG: its 12 leads, in the order of `LEADS`, in mV.

    Args:
        source: opens the files of this record alone.
        rel: the header.
        record: what the table says of it; it has no signals yet.
        rate: Hz that the record must have.
        keep_phi: keep the comments of the header as an attribute.

    Raises:
        UserError: what keeps the record out of the cache.
    """
    recording = wfdb.read_recording(rel, source, keep_phi=keep_phi)
    with locate_errors(rel):
        signals, findings = select_leads(recording.signals, rate)
    comments = recording.header.comments
    return replace(
        record,
        signals=signals,
        attributes={**record.attributes, **({"comments": list(comments)} if comments else {})},
        findings=[finding.at(rel) for finding in (*recording.findings, *findings)],
    )


def select_leads(signals: Sequence[Signal], rate: int) -> tuple[list[Signal], list[Finding]]:
    """The 12 leads by name, checked and converted to mV by their scale.

    Raises UserError: duplicate_channel, missing_channel, sampling_rate, length, unit.
    """
    named: dict[str, list[Signal]] = defaultdict(list)
    for signal in signals:
        named[signal.channel.strip().upper()].append(signal)
    if missing := [lead for lead in LEADS if lead not in named]:
        names = (signal.channel for signal in signals)
        problem = f"has no lead {', '.join(missing)}"
        raise make_missing_channel_error(problem, names, "description", missing[0])
    leads: list[Signal] = []
    converted: list[str] = []
    flat: list[str] = []
    for lead in LEADS:
        signal = _check_lead(lead, named[lead], rate)
        factor = find_factor(signal, "mV", f"lead {lead}")
        if factor != 1.0:
            converted.append(lead)
        if is_constant(signal.samples):
            flat.append(lead)
        leads.append(scale_signal(signal, factor, "mV")._replace(channel=lead))
    findings = []
    if converted:
        findings.append(
            input_warning(
                Reason.UNIT,
                f"not in mV: {', '.join(converted)}",
                "converted to mV by the scale",
                count=len(converted),
            )
        )
    if flat:
        findings.append(
            input_warning(Reason.FLAT_CHANNEL, f"constant: {', '.join(flat)}", count=len(flat))
        )
    return leads, findings


def _check_lead(lead: str, segments: Sequence[Signal], rate: int) -> Signal:
    """The signal of a lead. Raises UserError: duplicate_channel, sampling_rate, length."""
    first, *others = segments
    if any(other.onset == first.onset for other in others):
        raise input_error(
            Reason.DUPLICATE_CHANNEL,
            f"several signals are lead {lead}",
            "expected one",
            field="description",
            found=lead,
        )
    require_rate(first, rate, f"lead {lead}")
    if others or len(first.samples) != rate * SECONDS:
        length = f"{len(segments)} segments" if others else f"{len(first.samples) / rate:g} s"
        raise input_error(
            Reason.LENGTH,
            f"lead {lead} has {length}",
            f"expected {SECONDS} s without a gap: nothing is padded or cut",
            field="length",
            found=length,
            expected=f"{SECONDS} s",
        )
    return first
