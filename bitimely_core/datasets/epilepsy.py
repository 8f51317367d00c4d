"""Epileptic Seizure Recognition (UCI): 500 EEG segments of 23.6 s, each cut into 23 chunks of 178 samples, as one csv table.

The id of a row says where it comes from: X21.V1.791 is chunk 21 of segment V1.791. The segment is the subject: the chunks of one segment
are neighbours in time, and a split by rows would put them into training and test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np

from bitimely_core.errors import Finding, Reason, UserError, input_error, input_warning
from bitimely_core.formats import tables
from bitimely_core.formats.source import Source, locate_errors, require_source
from bitimely_core.registry import DatasetFacts, View, datasets
from bitimely_core.types import Attributes, AttributeValue, IngestOptions, IngestUnit, Record, Records, Signal, SourceRows, count_reasons

TABLE = "data.csv"
SAMPLES = 178
RATE = 173.61  # Hz: 4,097 samples in 23.6 s
CHANNEL = "EEG"
UNIT = "uV"
VALUES = tuple(f"X{i}" for i in range(1, SAMPLES + 1))
LABEL = "y"
CONDITIONS = {1: "seizure", 2: "tumour area", 3: "healthy area", 4: "eyes closed", 5: "eyes open"}
BINARY = ("no seizure", "seizure")
ID = re.compile(r"X(\d{1,3})\.(V\d{1,4}\.\d{1,6})", re.ASCII)

RULES = {
    "units": f"the table {TABLE}; other tables in the folder are not read",
    "columns": f"by name: {VALUES[0]} to {VALUES[-1]}, {LABEL}, and one more, which holds the id of the row",
    "subjects": "X<chunk>.V<a>.<b>: the segment V<a>.<b> is the subject, its 23 chunks stay together",
    "labels": f"{'; '.join(f'{number} {name}' for number, name in CONDITIONS.items())}; binary: 1 is seizure, the others are not",
    "duplicates": "a row that repeats another one is used once; rows with one id that differ are all excluded",
    "rate": f"{RATE} Hz (4,097 samples in 23.6 s), amplitudes in {UNIT} by the publication: the table states neither",
    "majority": "binary: four of five rows are no seizure, so an accuracy of 80 % is that of a constant prediction",
}


@datasets(
    DatasetFacts(
        title="Epileptic Seizure Recognition: seizures from one second of EEG",
        views={
            "": View(
                channels=(CHANNEL,),
                rate=RATE,
                window=SAMPLES,
                task="classification",
                classes=BINARY,
                target="binary",
                help="seizure or not, from 178 samples of one EEG channel; split by segment",
            ),
            "five": View(
                channels=(CHANNEL,),
                rate=RATE,
                window=SAMPLES,
                task="classification",
                classes=tuple(CONDITIONS.values()),
                target="condition",
                help="all five conditions; split by segment",
            ),
        },
        licence="CC BY 4.0",
        url="https://archive.ics.uci.edu/dataset/388/epileptic+seizure+recognition",
        download="data.csv (7 MB) of the page; where UCI has withdrawn the files, a mirror with the same 11,500 rows",
        layout="data.csv: one row a second of EEG, with the id of the segment first, X1 to X178, and the label y last",
        paper={
            "": {"channels": 1, "timesteps": 2_000_000, "sequences": 11_500, "length": 178, "subjects": 500, "classes": 2},
            "note": "the 500 subjects are segments of 23.6 s, 100 a class; they come from fewer people",
        },
        rules=RULES,
    )
)
def epilepsy(source: Source | None, options: IngestOptions) -> Iterator[IngestUnit | Finding]:
    """Epileptic Seizure Recognition (UCI): 11,500 seconds of EEG in five conditions."""
    source = require_source(source)
    found = sorted(rel for rel in {*source.files, *source.rejected} if PurePosixPath(rel).name.lower() == TABLE)
    if len(found) != 1:
        action = "Give the folder that holds it; tables in another form are read by `ingest generic` with --map"
        text = f"{TABLE} exists {len(found)} times" if found else f"no {TABLE} among {len(source.files)} files"
        raise input_error(Reason.NO_INPUT, text, "expected one", action)
    for rel in source.files:
        if rel not in found and PurePosixPath(rel).suffix.lower() in {".csv", ".parquet", ".tsv", ".txt"} and not _is_official(rel):
            yield input_warning(Reason.FILE_NAME, f"is not {TABLE}", "it is not read", file=rel)
    rel = found[0]
    if rel in source.rejected:
        yield IngestUnit(name=rel, files=(rel,), read=None, findings=(source.rejected[rel],))
    else:
        yield IngestUnit(name=rel, files=(rel,), read=partial(read_table, source.path(rel), rel))


def _is_official(rel: str) -> bool:
    return PurePosixPath(rel).name.upper().startswith(("SHA256SUMS", "README", "LICENSE"))


def read_table(path: Path, rel: str) -> Records:
    """All valid rows of the table: one record a row, `binary` and `condition` as its attributes; `rel` names the file in findings.

    Raises UserError: header or schema where columns are missing, identifier where ids, label where labels are all invalid, and as
    `tables.read_rows`.
    """
    with locate_errors(rel):
        key = _find_id_column(tables.read_names(path))
        records: list[Record] = []
        faults: list[Finding] = []
        seen = 0
        for item in tables.read_rows(path, (key, LABEL, *VALUES), key=(key,)):
            seen += 1
            found = item if isinstance(item, Finding) else _parse_row(item, key)
            if isinstance(found, Finding):
                faults.append(replace(found, field=found.field or ("id" if found.field == "" else None)))
            else:
                records.append(found)
        if (counted := tables.count_rows(path)) != seen:
            raise input_error(Reason.CSV_SYNTAX, f"{counted} records were counted, {seen} read", "expected the same number")
        findings = tables.group_findings(faults)
        if not records:
            raise _no_rows_error(findings, seen)
    quarantined = count_reasons(fault for fault in faults if fault.level == "error")
    dropped = count_reasons(fault for fault in faults if fault.level != "error")
    return Records(
        records=records,
        rows=[SourceRows(file=rel, kind="segments", seen=seen, dropped=dropped, quarantined=quarantined)],
        findings=[finding.at(rel) for finding in (*findings, *_report_mixed_segments(records))],
    )


def _no_rows_error(findings: list[Finding], seen: int) -> UserError:
    """The error for a table without a usable row, with the commonest fault."""
    worst = max(findings, key=lambda finding: finding.count, default=Finding(Reason.EMPTY_FILE, "has no rows"))
    return input_error(worst.code, f"no row of {seen} can be used: {worst.problem}", worst.requirement, field=worst.field, row=worst.row)


def _find_id_column(names: tuple[str, ...]) -> str:
    """The column that is neither value nor label. Raises UserError: header."""
    expected = {*VALUES, LABEL}
    other = [name for name in names if name not in expected]
    if len(expected & set(names)) < 2:
        text = f"the first line names none of the columns {VALUES[0]} to {VALUES[-1]} and {LABEL}"
        raise input_error(Reason.HEADER, text, "is the header line absent?")
    if len(other) != 1:
        text = f"{len(other)} columns besides {VALUES[0]} to {VALUES[-1]} and {LABEL}"
        raise input_error(Reason.HEADER, text, "expected one, which holds the id of the row")
    return other[0]


def _parse_row(row: tables.TableRow, key: str) -> Record | Finding:
    """One chunk, or why it is dropped."""
    name, label, *cells = row.cells
    identifier = ID.fullmatch(name.strip())
    if identifier is None:
        text = f"the id in row {row.row} is not of the form X21.V1.791"
        return Finding(Reason.IDENTIFIER, text, "it states which rows belong together", field=key or "id", row=row.row)
    number = None
    with suppress(UserError):
        number = tables.parse_integer(label)
    if number not in CONDITIONS:
        text, wanted = f"the label in row {row.row} is not a class", f"expected {', '.join(map(str, CONDITIONS))}"
        return Finding(Reason.LABEL, text, wanted, field=LABEL, row=row.row)
    values = tables.parse_numbers(tables.TableRow(row.row, tuple(cells)), VALUES)
    if isinstance(values, Finding):
        return values
    is_integer = np.abs(values).max() <= 32767 and np.array_equal(values, np.rint(values))
    signal = Signal(CHANNEL, RATE, UNIT, values.astype(np.int16 if is_integer else np.float32))
    attributes: Attributes = {"binary": BINARY[number == 1], "condition": CONDITIONS[number], "chunk": int(identifier[1])}
    return Record(recording_id=identifier[0], subject_id=identifier[2], signals=[signal], attributes=attributes)


def _report_mixed_segments(records: list[Record]) -> list[Finding]:
    """A warning for segments whose chunks have different classes: official ones have one."""
    classes: dict[str, set[AttributeValue]] = {}
    for record in records:
        classes.setdefault(record.subject_id, set()).add(record.attributes["condition"])
    mixed = sum(len(found) > 1 for found in classes.values())
    text = f"segments whose chunks have different classes: {mixed}"
    return [input_warning(Reason.LABEL, text, "expected one class a segment", count=mixed)] if mixed else []
