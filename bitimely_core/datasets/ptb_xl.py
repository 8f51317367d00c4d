"""PTB-XL 1.0.1 and 1.0.3: 10-second 12-lead ECGs with diagnostic statements, at 100 and at 500 Hz.

The records are the rows of ptbxl_database.csv; scp_statements.csv maps statements to the five
diagnostic superclasses. The official folds are by patient: 1-8 train, 9 validation, 10 test.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import PurePosixPath

import numpy as np

from bitimely_core.datasets import physiology
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
from bitimely_core.registry import DatasetBaseline, DatasetFacts, View, datasets
from bitimely_core.types import (
    Attributes,
    AttributeValue,
    IngestOptions,
    IngestUnit,
    Record,
    Signal,
    SourceRows,
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
    "superclasses": f"a statement with diagnostic 1 in {STATEMENTS} counts for its diagnostic_class; rhythm and form statements do not",
    "scp_likelihood_0": "0 means that the likelihood is unknown: such a statement counts like any other, as in the official example; counted",
    "superclass": "records with exactly one diagnostic superclass; the others are excluded from this view",
    "multilabel": "records with at least one diagnostic superclass; the others are excluded from this view",
    "split": "official folds: 1-8 train, 9 validation, 10 test; a patient in folds of several splits refuses the data set",
    "subjects": "patient_id as a whole number ('1001.0' is '1001')",
    "leads": "the 12 leads by name, whatever their order and letter case, in mV; other signals are not kept",
    "age": f"{OVER_89} stands for older than 89: kept as age_over_89, not as a number",
    "quality": "a constant lead is reported (flat_channel)",
}
BASE_VIEW = View(
    channels=LEADS,
    rate=100.0,
    window=1000,
    split="official",
    help="12 leads of all records, no labels; 5000 samples at 500 Hz after `ingest ptb-xl --rate 500`",
)


@dataclass(frozen=True, kw_only=True)
class PtbXlEntry:
    """A row of the table. `faults`: why the row makes its record unusable."""

    row: int
    record: str = ""  # path without extension, relative to the table's folder
    subject: str = ""
    fold: int = 0
    attributes: Attributes = field(default_factory=dict)
    recorded: str | None = None
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
        download="wget -r -N -c -np -nH --cut-dirs=3 https://physionet.org/files/ptb-xl/1.0.3/   (3.0 GB; no account needed)",
        layout="ptbxl_database.csv and scp_statements.csv beside records100/ or, with --rate 500, records500/",
        paper={
            "": {
                "channels": 12,
                "timesteps": 109_200_000,
                "sequences": 21_837,
                "length": 5000,
                "subjects": None,
                "classes": None,
            },
            "superclass": {
                "channels": 12,
                "timesteps": 109_200_000,
                "sequences": 21_837,
                "length": 5000,
                "classes": 5,
            },
            "note": "21,837 are the records of 1.0.1 at 500 Hz; 1.0.3 has 38 duplicates less",
        },
        rules=RULES,
        options={"rate": 100},
        baselines=(
            DatasetBaseline(
                name="ecg-intervals",
                about="logistic regression on RR, PR, QRS and QT intervals (Lepeschkin and Surawicz 1952), variability, and the heights of the waves of each lead",
                predict=partial(physiology.predict_from_ecg, leads=LEADS),
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
    folder = PurePosixPath(table).parent
    statements = (folder / STATEMENTS).as_posix()
    with locate_errors(statements):
        if statements not in source.files:
            raise input_error(
                Reason.NO_INPUT,
                "is missing",
                "it states which statements are diagnoses",
                "Download it",
            )
        known, findings = _read_superclasses(source, statements)
    yield from findings
    with locate_errors(table):
        entries, rows, findings = _read_entries(source, table, rate, known)
    yield rows
    yield from findings
    with locate_errors(table):
        check_official_split(entries)
    yield from (finding.at(table) for finding in _report_missing_classes(entries))
    # what a record's name begins with -> its files
    beside: dict[str, list[str]] = defaultdict(list)
    for rel in sorted({*source.files, *source.rejected}):
        beside[_record_stem(rel)].append(rel)
    claimed: set[str] = set()
    for name, entry in entries.items():
        unit = _make_unit(source, table, name, entry, beside, options)
        claimed.update(unit.files)
        yield unit
    yield from _report_unlisted(source, claimed)


def _list_tables(source: Source) -> list[str]:
    """The metadata table, the one nearest to the root, and others of its name, which are not
    read.
    """
    found = sorted(
        (rel.count("/"), rel) for rel in source.files if rel == TABLE or rel.endswith(f"/{TABLE}")
    )
    if not found:
        action = "Give the folder that holds it, with records100, records500 and scp_statements.csv"
        raise input_error(
            Reason.NO_INPUT, f"no {TABLE} among {len(source.files)} files", hint=action
        )
    if len(found) > 1 and found[0][0] == found[1][0]:
        text = f"{TABLE} exists {sum(depth == found[0][0] for depth, _ in found)} times"
        raise input_error(
            Reason.NO_INPUT,
            text,
            "expected one",
            "Give the folder of one of them",
            file=found[0][1],
        )
    return [rel for _, rel in found]


# --- metadata


def _read_superclasses(source: Source, rel: str) -> tuple[dict[str, str | None], list[Finding]]:
    """Statement -> diagnostic superclass, None for statements about rhythm and form. Raises
    UserError: as `tables.read_rows`.
    """
    path = source.path(rel)
    columns = (tables.read_names(path)[0], "diagnostic", "diagnostic_class")
    known: dict[str, str | None] = {}
    findings: list[Finding] = []
    for item in tables.read_rows(path, columns, key=columns[:1]):
        if isinstance(item, Finding):
            findings.append(replace(item, level="warning", file=rel))
            continue
        code, diagnostic, kind = (cell.strip() for cell in item.cells)
        named = diagnostic in {"1", "1.0"}
        if named and kind not in SUPERCLASSES:
            text = f"row {item.row} has no diagnostic superclass"
            findings.append(
                replace(
                    input_warning(Reason.METADATA, text, f"expected {', '.join(SUPERCLASSES)}"),
                    row=item.row,
                    file=rel,
                )
            )
        known[code] = kind if named and kind in SUPERCLASSES else None
    return known, tables.group_findings(findings)


def _read_entries(
    source: Source, rel: str, rate: int, known: dict[str, str | None]
) -> tuple[dict[str, PtbXlEntry], SourceRows, list[Finding]]:
    """Record -> its row, the account of the rows, and findings about them.

    Raises UserError: duplicate_key for a record with two rows that differ, csv_syntax, and as
    `tables.read_rows`.
    """
    path = source.path(rel)
    wanted = ("ecg_id", "patient_id", "age", "sex", "scp_codes", "strat_fold", RECORD[rate])
    dated = "recording_date" in tables.read_names(path)
    entries: dict[str, PtbXlEntry] = {}
    cells_of: dict[str, tuple[str, ...]] = {}
    rejected: list[Finding] = []  # rows without a record
    quarantined, dropped, remarks = Counter[str](), Counter[str](), _RowRemarks()
    seen = 0
    for item in tables.read_rows(path, (*wanted, "recording_date") if dated else wanted):
        seen += 1
        if isinstance(item, Finding):
            rejected.append(replace(item, file=rel))
            continue
        name = _parse_identifier(item.cells[0])
        if name is None:
            text = f"the id in row {item.row} is not a whole number"
            rejected.append(
                Finding(
                    Reason.IDENTIFIER,
                    text,
                    "every row needs one",
                    field="ecg_id",
                    row=item.row,
                    file=rel,
                )
            )
        elif name not in entries:
            entries[name] = replace(
                _parse_entry(item, known, remarks),
                recorded=item.cells[-1].strip() if dated else None,
            )
            cells_of[name] = item.cells[1:]
        elif cells_of[name] == item.cells[1:]:
            dropped[Reason.DUPLICATES] += 1
        else:
            text = f"rows {entries[name].row} and {item.row} have the same ecg_id and differ"
            action = "Correct the table: the right row is unknown"
            raise input_error(
                Reason.DUPLICATE_KEY,
                text,
                "expected one row a record",
                action,
                field="ecg_id",
                row=item.row,
            )
    if (counted := tables.count_rows(path)) != seen:
        raise input_error(
            Reason.CSV_SYNTAX,
            f"{counted} records were counted, {seen} read",
            "expected the same number",
        )
    rows_of: dict[str, list[int]] = defaultdict(list)
    for entry in entries.values():
        rows_of[entry.record].append(entry.row)
    for name, entry in entries.items():
        if entry.record and len(rows_of[entry.record]) > 1 and not entry.faults:
            text = f"rows {', '.join(map(str, rows_of[entry.record][:5]))} name the same record"
            fault = Finding(
                Reason.DUPLICATE_KEY, text, "expected one row a record", row=entry.row, file=rel
            )
            entries[name] = entry = replace(entry, faults=(fault,))
        quarantined.update(fault.code for fault in entry.faults[:1])
        entries[name] = replace(entry, faults=tuple(fault.at(rel) for fault in entry.faults))
    quarantined.update(finding.code for finding in rejected)
    findings = tables.group_findings(rejected)
    if repeated := dropped[Reason.DUPLICATES]:
        findings.append(
            input_warning(
                Reason.DUPLICATES,
                f"rows that repeat another one: {repeated}",
                "used once",
                count=repeated,
            )
        )
    rows = SourceRows(
        file=rel,
        seen=seen,
        dropped={str(code): count for code, count in dropped.items()},
        quarantined={str(code): count for code, count in sorted(quarantined.items())},
        warned={str(Reason.METADATA): len(remarks.rows)} if remarks.rows else {},
    )
    return entries, rows, [finding.at(rel) for finding in (*findings, *remarks.findings())]


class _RowRemarks:
    """Remarks on rows that are used."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.rows: list[int] = []  # with an age or sex that is not used as a number
        self.unknown: Counter[str] = Counter()

    def findings(self) -> Iterator[Finding]:
        if self.rows:
            counts = ", ".join(
                f"{count} {what}"
                for what, count in sorted(self.counts.items())
                if what != "likelihood 0"
            )
            text = f"rows whose age or sex is not used as written: {len(self.rows)} ({counts})"
            yield input_warning(
                Reason.METADATA,
                text,
                "the signals are kept",
                count=len(self.rows),
                examples=tuple(map(str, self.rows[:5])),
            )
        if zero := self.counts["likelihood 0"]:
            text = f"diagnostic statements of likelihood 0, which means unknown: {zero}"
            yield replace(
                input_warning(
                    Reason.METADATA,
                    text,
                    "counted like the others, see scp_likelihood_0 in rules",
                    count=zero,
                ),
                level="info",
            )
        if self.unknown:
            shown = tuple(sorted(code for code in self.unknown if CODE.fullmatch(code))[:5])
            text = f"statements that are not in {STATEMENTS}: {self.unknown.total()}"
            yield input_warning(
                Reason.UNKNOWN_LABEL,
                text,
                "not mapped to a superclass",
                count=self.unknown.total(),
                examples=shown,
            )


def _parse_identifier(cell: str) -> str | None:
    """An integer without leading zeros and decimals, as text; None for anything else."""
    with suppress(UserError):
        number = tables.parse_integer(cell)
        return None if number is None or number < 0 else str(number)
    return None


def _parse_entry(
    row: tables.TableRow, known: dict[str, str | None], remarks: _RowRemarks
) -> PtbXlEntry:
    """The record of a row, or the faults of the row."""
    _, patient, age, sex, codes, fold, record = row.cells[:7]
    faults: list[Finding] = []

    def fault(code: Reason, field: str, wanted: str, what: str = "is not usable") -> None:
        faults.append(
            Finding(code, f"the cell of row {row.row} {what}", wanted, field=field, row=row.row)
        )

    subject, fold_number = _parse_identifier(patient), _parse_identifier(fold)
    if subject is None:
        fault(Reason.IDENTIFIER, "patient_id", "expected a whole number")
    if fold_number is None or int(fold_number) not in SPLIT_OF:
        fault(Reason.METADATA, "strat_fold", "expected a fold from 1 to 10")
    if not record.strip():
        fault(Reason.METADATA, "filename", "expected the name of a record", "is empty")
    likelihoods = parse_statements(codes)
    if likelihoods is None:
        fault(
            Reason.METADATA_SYNTAX,
            "scp_codes",
            "expected statements with likelihoods from 0 to 100, such as {'NORM': 100.0}",
        )
    name = record.strip().removesuffix(".hea")
    if faults:
        return PtbXlEntry(row=row.row, record=name, faults=tuple(faults))
    assert subject is not None
    assert fold_number is not None
    assert likelihoods is not None
    attributes: dict[str, AttributeValue] = {
        "fold": int(fold_number),
        **_parse_person(row.row, age, sex, remarks),
    }
    classes = {known[code] for code in likelihoods if known.get(code) is not None}
    superclasses = [name for name in SUPERCLASSES if name in classes]
    if superclasses:
        attributes["superclasses"] = superclasses
    if len(superclasses) == 1:
        attributes["superclass"] = superclasses[0]
    remarks.unknown.update(code for code in likelihoods if code not in known)
    remarks.counts["likelihood 0"] += sum(
        known.get(code) is not None and likelihood == 0 for code, likelihood in likelihoods.items()
    )
    return PtbXlEntry(
        row=row.row, record=name, subject=subject, fold=int(fold_number), attributes=attributes
    )


def _parse_person(row: int, age: str, sex: str, remarks: _RowRemarks) -> dict[str, AttributeValue]:
    """Age and sex as far as they are usable."""
    out: dict[str, AttributeValue] = {}
    unused = []
    years = None
    with suppress(UserError):
        years = tables.parse_number(age)
    if years == OVER_89:
        out["age_over_89"] = True
        unused.append("above 89")
    elif years is not None and 0 <= years < 120:
        out["age"] = years
    else:
        unused.append("ages unknown" if age.strip().lower() in {"", "nan"} else "ages unusable")
    kind = _parse_identifier(sex)
    if kind is not None and int(kind) in SEX:
        out["sex"] = SEX[int(kind)]
    else:
        unused.append("sexes unknown")
    remarks.counts.update(unused)
    if unused:
        remarks.rows.append(row)
    return out


def parse_statements(text: str) -> dict[str, float] | None:
    """Statement -> likelihood of a cell such as "{'NORM': 100.0, 'SR': 0.0}"; None for anything
    else. Nothing is evaluated.
    """
    if len(text) > MAX_CODES or not ALL.fullmatch(text):
        return None
    found = {
        single or double: float(likelihood) for single, double, likelihood in ONE.findall(text)
    }
    return found if all(likelihood <= 100 for likelihood in found.values()) else None


def check_official_split(entries: dict[str, PtbXlEntry]) -> None:
    """Checks that no patient has records in several splits. Raises UserError: subject_leakage."""
    splits: dict[str, set[str]] = defaultdict(set)
    for entry in entries.values():
        if not entry.faults:
            splits[entry.subject].add(SPLIT_OF[entry.fold])
    leaking = {subject for subject, found in splits.items() if len(found) > 1}
    if not leaking:
        return
    rows = [str(entry.row) for entry in entries.values() if entry.subject in leaking]
    raise input_error(
        Reason.SUBJECT_LEAKAGE,
        f"{len(leaking)} patient{'s' * (len(leaking) > 1)} in folds of several splits (rows {', '.join(rows[:10])})",
        "folds 1-8, 9 and 10 must not share a patient",
        "Correct strat_fold or patient_id in the table",
        field="strat_fold",
    )


def _report_missing_classes(entries: dict[str, PtbXlEntry]) -> Iterator[Finding]:
    """Superclasses that a split lacks: scores on it are undefined for them."""
    present: dict[str, set[str]] = {split: set() for split in SPLIT_OF.values()}
    for entry in entries.values():
        if not entry.faults:
            superclasses = entry.attributes.get("superclasses")
            present[SPLIT_OF[entry.fold]].update(
                superclasses if isinstance(superclasses, list) else ()
            )
    for split, found in present.items():
        if lacking := [name for name in SUPERCLASSES if name not in found]:
            text = f"no record with {', '.join(lacking)} in {split}"
            yield input_warning(
                Reason.CLASS_MISSING,
                text,
                "scores of it are undefined there",
                count=len(lacking),
                examples=tuple(lacking),
            )


# --- records


def _record_stem(rel: str) -> str:
    """What the names of all files of a record begin with: `records100/00000/00003` of
    `records100/00000/00003_lr.dat`.
    """
    folder, slash, name = rel.rpartition("/")
    return folder + slash + re.split("[_.]", name, maxsplit=1)[0]


def _make_unit(
    source: Source,
    table: str,
    name: str,
    entry: PtbXlEntry,
    beside: dict[str, list[str]],
    options: IngestOptions,
) -> IngestUnit:
    """The record of a row, or why it cannot be read."""
    rate = options.get("rate", 100)
    rel = (PurePosixPath(table).parent / f"{entry.record}.hea").as_posix()
    files = tuple(beside.get(_record_stem(rel), ())) if entry.record else ()
    if entry.faults:
        return IngestUnit(name=name, files=files, read=None, findings=entry.faults)
    try:
        source.path(f"{entry.record}.hea")  # nothing that leaves the data set's folder
    except UserError as error:
        if error.code == Reason.PATH_ESCAPE:
            found = replace(error.finding, file=table, field=RECORD[rate], row=entry.row)
            return IngestUnit(name=name, files=(), read=None, findings=(found,))
    # some systems write names in capitals
    rel = next((file for file in files if file.lower() == rel.lower()), rel)
    faults = tuple(source.rejected[file] for file in files if file in source.rejected)
    if not faults and rel not in source.files:
        text, wanted = "is missing", f"row {entry.row} of {TABLE} names it"
        faults = (Finding(Reason.MISSING_SIGNAL_FILE, text, wanted, "Download it again", file=rel),)
    if faults:
        return IngestUnit(name=name, files=files, read=None, findings=faults)
    recorded = (
        entry.recorded
        if options.get("keep_dates") and RECORDED.fullmatch(entry.recorded or "")
        else None
    )
    read = partial(
        read_record,
        # a record opens its own files only
        Source(source.root, {file: source.files[file] for file in files}, {}),
        rel,
        recording_id=name,
        subject_id=entry.subject,
        attributes=entry.attributes,
        rate=rate,
        recorded=recorded,
        keep_phi=bool(options.get("keep_phi")),
    )
    return IngestUnit(name=name, files=files, read=read)


def _report_unlisted(source: Source, claimed: set[str]) -> Iterator[Finding]:
    """Headers beside the records of this rate that no row names."""
    folders = {rel.rpartition("/")[0] for rel in claimed}
    left = [
        rel
        for rel in source.files
        if rel.lower().endswith(".hea") and rel not in claimed and rel.rpartition("/")[0] in folders
    ]
    if left:
        shown = tuple(safe_text(PurePosixPath(rel).name) for rel in left[:5])
        text = f"records that no row of {TABLE} names, like this one: {len(left)}"
        yield replace(
            input_warning(
                Reason.FILE_NAME, text, "they are not read", count=len(left), examples=shown
            ),
            file=left[0],
        )


def read_record(
    source: Source,
    rel: str,
    *,
    recording_id: str,
    subject_id: str,
    attributes: Attributes,
    rate: int,
    recorded: str | None = None,
    keep_phi: bool = False,
) -> Record:
    """One ECG: its 12 leads, in the order of `LEADS`, in mV; `rate` (Hz) is that which the record
    must have.

    `recorded`: ISO time of the recording by the table, where dates are kept; `keep_phi`: keep the
    comments of the header as an attribute.
    Raises UserError: what keeps the record out of the cache.
    """
    found = wfdb.read_recording(rel, source, keep_phi=keep_phi)
    with locate_errors(rel):
        signals, findings = select_leads(found.signals, rate)
    start = None
    if recorded is not None:
        with suppress(ValueError):
            start = datetime.fromisoformat(recorded).isoformat()
    comments = found.header.comments
    return Record(
        recording_id=recording_id,
        subject_id=subject_id,
        signals=signals,
        attributes={**attributes, **({"comments": list(comments)} if comments else {})},
        start_time=start,
        findings=[finding.at(rel) for finding in (*found.findings, *findings)],
    )


def _is_constant(samples: np.ndarray) -> bool:
    """Whether all samples are equal, or all are missing."""
    if len(samples) and (
        samples[0] < samples[len(samples) // 2] or samples[0] > samples[len(samples) // 2]
    ):
        return False  # usually two samples suffice
    return not np.fmin.reduce(samples) < np.fmax.reduce(samples)


def select_leads(signals: Sequence[Signal], rate: int) -> tuple[list[Signal], list[Finding]]:
    """The 12 leads by name, checked and converted to mV by their scale.

    Raises UserError: duplicate_channel, missing_channel, sampling_rate, length, unit.
    """
    named: dict[str, list[Signal]] = defaultdict(list)
    for signal in signals:
        named[signal.channel.strip().upper()].append(signal)
    if missing := [lead for lead in LEADS if lead not in named]:
        text, wanted = (
            f"has no lead {', '.join(missing)}",
            f"found {', '.join(safe_text(signal.channel) for signal in signals[:12])}",
        )
        raise input_error(
            Reason.MISSING_CHANNEL, text, wanted, field="description", expected=missing[0]
        )
    out: list[Signal] = []
    converted: list[str] = []
    flat: list[str] = []
    for lead in LEADS:
        first, *others = named[lead]
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
            found = f"{len(others) + 1} segments" if others else f"{len(first.samples) / rate:g} s"
            text, wanted = (
                f"lead {lead} has {found}",
                f"expected {SECONDS} s without a gap: nothing is padded or cut",
            )
            raise input_error(
                Reason.LENGTH, text, wanted, field="length", found=found, expected=f"{SECONDS} s"
            )
        factor = find_factor(first, "mV", f"lead {lead}")
        if factor != 1.0:
            converted.append(lead)
        if _is_constant(first.samples):
            flat.append(lead)
        out.append(scale_signal(first, factor, "mV")._replace(channel=lead))
    findings = []
    if converted:
        problem = f"not in mV: {', '.join(converted)}"
        findings.append(
            input_warning(
                Reason.UNIT, problem, "converted to mV by the scale", count=len(converted)
            )
        )
    if flat:
        findings.append(
            input_warning(Reason.FLAT_CHANNEL, f"constant: {', '.join(flat)}", count=len(flat))
        )
    return out, findings
