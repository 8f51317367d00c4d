"""Epileptic Seizure Recognition: the 500 EEG segments of Bonn (Andrzejak et al. 2001), each cut
into 23 chunks of 178 samples.

Two forms: Bonn's sets Z, O, N, F and S, a text file a segment, as folders or as the archives of
their site; and the csv table of UCI, which
was cut from them. Both give the same chunks. The id of a row of the table says where it comes from:
X21.V1.791 is chunk 21 of segment V1.791.
The segment is the subject: its chunks are neighbours in time, and a split by rows would put them
into training and test. Segments are not people.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from bitimely_core.datasets import physiology
from bitimely_core.errors import (
    Exit,
    Finding,
    Reason,
    UserError,
    input_error,
    input_warning,
    safe_text,
    usage_error,
)
from bitimely_core.formats import archives, tables
from bitimely_core.formats.source import (
    Source,
    choose_copy,
    compare_copies,
    finding_to_error,
    locate_errors,
    report_unclaimed,
    require_source,
)
from bitimely_core.formats.text import decode_table
from bitimely_core.registry import DatasetBaseline, DatasetFacts, View, datasets
from bitimely_core.types import (
    Attributes,
    AttributeValue,
    IngestOptions,
    IngestUnit,
    Record,
    Records,
    Signal,
    SourceRows,
    count_reasons,
)

TABLE = "data.csv"
TABLES = {TABLE, "epileptic seizure recognition.csv"}  # its name at UCI, and in copies of it
SAMPLES = 178
RATE = 173.61  # Hz: 4,097 samples in 23.6 s
CHANNEL = "EEG"
UNIT = "uV"
VALUES = tuple(f"X{i}" for i in range(1, SAMPLES + 1))
LABEL = "y"
CONDITIONS = {1: "seizure", 2: "tumour area", 3: "healthy area", 4: "eyes closed", 5: "eyes open"}
BINARY = ("no seizure", "seizure")
SETS = {"S": 1, "F": 2, "N": 3, "O": 4, "Z": 5}  # of Bonn -> label of UCI
BONN = "bonn"  # the unit of its sets
SEGMENT = re.compile(r"(?:.*/)?([ZONFS](?:0(?!00)\d\d|100))\.txt", re.IGNORECASE | re.ASCII)
ARCHIVE = re.compile(
    r"(?:.*/)?(?:set[ _-]?)?[A-FNOSZ]\.(?:zip|tar\.gz|tgz|tar)", re.IGNORECASE | re.ASCII
)
LAYOUT = re.compile(r"(SHA256SUMS|README|LICENSE).*", re.IGNORECASE)
SEGMENTS, CHUNKS = 100, 23  # of a set, of a segment
LENGTHS = (4097, 4096)  # samples of a segment; some copies end a sample early
SEGMENT_BYTES = 1 << 18  # more is no segment
NOTICE = (
    "Epilepsy: the segments are not people. They come from 5 healthy people (eyes open, eyes closed) and 5 patients (healthy area, tumour "
    "area, seizure), and whose a segment is was not published: training and test share people, so these scores apply to further segments of "
    "these people, not to new people."
)
ID = re.compile(r"X(\d{1,3})\.(V\d{1,4}\.\d{1,6})", re.ASCII)

RULES = {
    "units": f"the table {TABLE} (or Epileptic Seizure Recognition.csv), other tables are not read; or `{BONN}`: all segments Z001.txt to "
    "S100.txt, in folders or archives (.zip, .tar.gz)",
    "faults": "--max-bad counts the segments of each folder or archive, and, as the segments of a damaged archive cannot be counted, damaged archives "
    "among all folders and archives",
    "segments": "samples 178 k to 178 (k + 1) of a segment are chunk k + 1 of 23; the last 3 of its 4,097 samples are left out",
    "people": "the 500 segments come from 10 people, and which is whose was not published: a split by segment does not keep people apart",
    "columns": f"by name: {VALUES[0]} to {VALUES[-1]}, {LABEL}, and one more, which holds the id of the row",
    "subjects": "X<chunk>.V<a>.<b>: the segment V<a>.<b> (of Bonn: Z001) is the subject, its 23 chunks stay together",
    "labels": f"{'; '.join(f'{number} {name}' for number, name in CONDITIONS.items())}; binary: 1 is seizure, the others are not",
    "duplicates": "a row or segment that repeats another one is used once; those of one name that differ are all excluded",
    "quality": "rows and segments of one value alone (flat_channel), and segments of Bonn with values that are not whole numbers (unit), are "
    "used and reported",
    "rate": f"{RATE} Hz (4,097 samples in 23.6 s), amplitudes in {UNIT} by the publication: the table states neither",
    "majority": "binary: four of five rows are no seizure, so an accuracy of 80 % is that of a constant prediction",
}


@datasets(
    DatasetFacts(
        subject_unit="segment",
        title="Epileptic Seizure Recognition: seizures from one second of EEG",
        views={
            "": View(
                channels=(CHANNEL,),
                rate=RATE,
                window=SAMPLES,
                task="classification",
                classes=BINARY,
                target="binary",
                notice=NOTICE,
                help="seizure or not, from 178 samples of one EEG channel; split by segment",
            ),
            "five": View(
                channels=(CHANNEL,),
                rate=RATE,
                window=SAMPLES,
                task="classification",
                classes=tuple(CONDITIONS.values()),
                target="condition",
                notice=NOTICE,
                help="all five conditions; split by segment",
            ),
        },
        licence="CC BY 4.0",
        url="https://archive.ics.uci.edu/dataset/388/epileptic+seizure+recognition",
        download="data.csv (7 MB) of the page; where UCI has withdrawn the files, a mirror with the same 11,500 rows. Or the sets "
        "Z.zip, O.zip, N.zip, F.zip and S.zip of https://www.ukbonn.de/epileptologie/arbeitsgruppen/ag-lehnertz-neurophysik/downloads/",
        layout="data.csv: one row a second of EEG, with the id of the segment first, X1 to X178, and the label y last; or the sets of Bonn, as "
        "folders with Z001.txt to S100.txt (4,097 lines of one integer) or as their zip archives",
        paper={
            "": {
                "channels": 1,
                "timesteps": 2_000_000,
                "sequences": 11_500,
                "length": 178,
                "subjects": 500,
                "classes": 2,
            },
            "note": "the 500 subjects are segments of 23.6 s, 100 a class; they come from 10 people",
        },
        rules=RULES,
        baselines=(
            DatasetBaseline(
                name="band-powers",
                about="logistic regression on the power in five bands, the standard deviation and the line length (Esteller et al. 2001)",
                predict=partial(physiology.predict_from_eeg, channel=CHANNEL),
            ),
        ),
    )
)
def epilepsy(source: Source | None, options: IngestOptions) -> Iterator[IngestUnit | Finding]:
    """Epileptic Seizure Recognition (UCI table, or the sets of Bonn): 11,500 seconds of EEG in five
    conditions.
    """
    source = require_source(source)
    every = sorted({*source.files, *source.rejected})
    found = [rel for rel in every if PurePosixPath(rel).name.lower() in TABLES]
    sets = [rel for rel in every if SEGMENT.fullmatch(rel) or ARCHIVE.fullmatch(rel)]
    if found and sets:
        raise usage_error(
            f"{TABLE} and {len(sets)} files of the sets of Bonn",
            "expected one form of the data",
            "Give the folder of one form",
        )
    if not found and not sets:
        action = "Give the folder that holds it; tables in another form are read by `ingest generic` with --map"
        text = f"no {TABLE} and no Z001.txt or Z.zip among {len(source.files)} files"
        raise input_error(Reason.NO_INPUT, text, "expected one", action)
    yield from report_unclaimed(source, {"": {rel: rel for rel in (*found, *sets)}}, LAYOUT)
    if sets:
        yield input_warning(
            Reason.IDENTIFIER,
            "the segments are not people",
            "they come from 10 people, and which is whose is unknown",
        )
        faults = tuple(
            replace(source.rejected[rel], level="warning") for rel in sets if rel in source.rejected
        )
        readable = {rel: source.path(rel) for rel in sets if rel not in source.rejected}
        yield IngestUnit(
            name=BONN, files=tuple(readable), read=partial(read_segments, readable), findings=faults
        )
        return
    rel, findings = choose_copy(source, found)
    is_faulty = any(finding.level == "error" for finding in findings)
    read = None if is_faulty else partial(read_table, source.path(rel), rel)
    yield IngestUnit(name=rel, files=tuple(found), read=read, findings=tuple(findings))


def read_table(path: Path, rel: str) -> Records:
    """All valid rows of the table: one record a row, `binary` and `condition` as its attributes;
    `rel` names the file in findings.

    Raises UserError: header or schema where columns are missing, identifier where ids, label where
    labels are all invalid, and as `tables.read_rows`.
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
                faults.append(
                    replace(found, field=found.field or ("id" if found.field == "" else None))
                )
            else:
                records.append(found)
        if (counted := tables.count_rows(path)) != seen:
            raise input_error(
                Reason.CSV_SYNTAX,
                f"{counted} records were counted, {seen} read",
                "expected the same number",
            )
        findings = tables.group_findings(faults)
        if not records:
            raise _no_rows_error(findings, seen)
    quarantined = count_reasons(fault for fault in faults if fault.level == "error")
    dropped = count_reasons(fault for fault in faults if fault.level != "error")
    flat = _report_flat(
        "rows", {record.recording_id: record.signals[0].samples for record in records}
    )
    return Records(
        records=records,
        rows=[
            SourceRows(
                file=rel, kind="segments", seen=seen, dropped=dropped, quarantined=quarantined
            )
        ],
        findings=[
            finding.at(rel) for finding in (*findings, *flat, *_report_mixed_segments(records))
        ],
    )


def _no_rows_error(findings: list[Finding], seen: int) -> UserError:
    """The error for a table without a usable row, with the commonest fault."""
    worst = max(
        findings,
        key=lambda finding: finding.count,
        default=Finding(Reason.EMPTY_FILE, "has no rows"),
    )
    return input_error(
        worst.code,
        f"no row of {seen} can be used: {worst.problem}",
        worst.requirement,
        field=worst.field,
        row=worst.row,
    )


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
        return Finding(
            Reason.IDENTIFIER,
            text,
            "it states which rows belong together",
            field=key or "id",
            row=row.row,
        )
    number = None
    with suppress(UserError):
        number = tables.parse_integer(label)
    if number not in CONDITIONS:
        text, wanted = (
            f"the label in row {row.row} is not a class",
            f"expected {', '.join(map(str, CONDITIONS))}",
        )
        return Finding(Reason.LABEL, text, wanted, field=LABEL, row=row.row)
    values = tables.parse_numbers(tables.TableRow(row.row, tuple(cells)), VALUES)
    if isinstance(values, Finding):
        return values
    return _make_record(values, identifier[0], int(identifier[1]), identifier[2], number)


def _make_record(values: np.ndarray, name: str, chunk: int, segment: str, label: int) -> Record:
    """One chunk: `values` float64 [178], stored as int16 where that holds them."""
    is_integer = np.abs(values).max() <= 32767 and np.array_equal(values, np.rint(values))
    signal = Signal(CHANNEL, RATE, UNIT, values.astype(np.int16 if is_integer else np.float32))
    attributes: Attributes = {
        "binary": BINARY[label == 1],
        "condition": CONDITIONS[label],
        "chunk": chunk,
    }
    return Record(recording_id=name, subject_id=segment, signals=[signal], attributes=attributes)


def _report_flat(what: str, values: Mapping[str, np.ndarray]) -> list[Finding]:
    """A warning that names rows or segments of one value alone."""
    flat = [name for name, x in values.items() if (x == x[0]).all()]
    return _name_odd(
        Reason.FLAT_CHANNEL,
        f"{what} of one value alone",
        flat,
        "they are used",
        "Was the electrode detached?",
    )


def _name_odd(code: Reason, text: str, names: list[str], wanted: str, action: str) -> list[Finding]:
    """A warning about what is odd and used, with names and their number."""
    shown = f"{text}: {len(names)}, {', '.join(names[:5])}{' and so on' * (len(names) > 5)}"
    return (
        [input_warning(code, shown, wanted, action, count=len(names), examples=tuple(names[:5]))]
        if names
        else []
    )


def _report_mixed_segments(records: list[Record]) -> list[Finding]:
    """A warning for segments whose chunks have different classes: official ones have one."""
    classes: dict[str, set[AttributeValue]] = {}
    for record in records:
        classes.setdefault(record.subject_id, set()).add(record.attributes["condition"])
    mixed = sum(len(found) > 1 for found in classes.values())
    text = f"segments whose chunks have different classes: {mixed}"
    return (
        [input_warning(Reason.LABEL, text, "expected one class a segment", count=mixed)]
        if mixed
        else []
    )


# --- the sets of Bonn


class BonnSegment(NamedTuple):
    """A segment as found."""

    place: str  # folder or archive, among whose rows it is counted
    file: str  # relative to the source
    name: str  # Z001
    values: np.ndarray | Finding  # float64 [4097], or why it cannot be used


def read_segments(files: Mapping[str, Path]) -> Records:
    """The chunks of all segments; `files`: path relative to the source -> a segment's text, or the
    archive of a set.

    A segment that is damaged, or there twice with different values, is counted as quarantined, and
    so is an archive that is damaged: the other
    sets are used. Raises UserError: as `archives.read_members` where nothing else is left.
    """
    copies: dict[str, list[BonnSegment]] = {}
    damaged, remarks = list[Finding](), list[Finding]()
    for rel, path in files.items():
        found, finding = _read_segment_file(rel, path)
        if finding is not None:
            (damaged if finding.level == "error" else remarks).append(finding)
        for segment in found:
            copies.setdefault(segment.name, []).append(segment)
    records: list[Record] = []
    faults: list[tuple[str, Finding]] = []
    used: dict[str, np.ndarray] = {}
    for name, same in sorted(copies.items()):
        faults += [
            (one.place, one.values.at(one.file)) for one in same if isinstance(one.values, Finding)
        ]
        usable = [(one, one.values) for one in same if not isinstance(one.values, Finding)]
        repeated = (
            compare_copies([(one.file, (values + 0.0).tobytes()) for one, values in usable], name)
            if len(usable) > 1
            else []
        )
        differ = any(finding.level == "error" for finding in repeated)
        for (one, _), finding in zip(usable[len(usable) - len(repeated) :], repeated, strict=True):
            # equal ones are counted by place
            faults.append((one.place, finding if differ else replace(finding, file=one.place)))
        if usable and not differ:
            used[name] = usable[0][1]
            parts = used[name][: CHUNKS * SAMPLES].reshape(CHUNKS, SAMPLES)
            records += [
                _make_record(part, f"X{chunk}.{name}", chunk, name, SETS[name[0]])
                for chunk, part in enumerate(parts, 1)
            ]
    findings = tables.group_findings(fault for _, fault in faults)
    seen = Counter(segment.place for same in copies.values() for segment in same)
    if not records and damaged:
        raise finding_to_error(damaged[0])
    if not records:
        raise _no_rows_error(findings, seen.total())
    findings += [*remarks, *_report_segments(used)]
    rows = []
    # how many segments such an archive has is unknown: it is counted among the folders and archives
    if damaged:
        findings = [*damaged, *findings]
        rows.append(
            SourceRows(
                file=str(damaged[0].file),
                kind="sets",
                seen=len(seen) + len(damaged),
                quarantined=count_reasons(damaged),
            )
        )
    for place, count in sorted(seen.items()):
        lost = [
            [fault for at, fault in faults if at == place and (fault.level == "error") == error]
            for error in (False, True)
        ]
        dropped, quarantined = map(count_reasons, lost)
        rows.append(
            SourceRows(
                file=place, kind="segments", seen=count, dropped=dropped, quarantined=quarantined
            )
        )
    return Records(records=records, rows=rows, findings=findings)


def _report_segments(used: Mapping[str, np.ndarray]) -> Iterator[Finding]:
    """Warnings about segments that are used, with counts: flat ones, values that Bonn does not
    have, and sets that lack some.
    """
    broken = [name for name, values in used.items() if not np.array_equal(values, np.rint(values))]
    text, wanted = "segments with values that are not whole numbers", f"they are taken for {UNIT}"
    odd = [
        *_report_flat("segments", used),
        *_name_odd(Reason.UNIT, text, broken, wanted, "Give the files as published"),
    ]
    yield from (finding.at(BONN) for finding in odd)
    counts = Counter(name[0] for name in used)
    for name, label in SETS.items():
        if counts[name] < SEGMENTS:
            text = (
                f"set {name} ({CONDITIONS[label]}): {counts[name]} of {SEGMENTS} segments are used"
            )
            yield input_warning(
                Reason.CLASS_MISSING, text, "expected all", file=BONN, count=SEGMENTS - counts[name]
            )


def _read_segment_file(rel: str, path: Path) -> tuple[list[BonnSegment], Finding | None]:
    """The segments of a text or an archive, and why none of an archive can be used, or what else it
    holds.

    Raises UserError: io_error, and faults of this machine.
    """
    if (named := SEGMENT.fullmatch(rel)) is not None:
        size = path.stat().st_size
        content = path.read_bytes() if size <= SEGMENT_BYTES else bytes(SEGMENT_BYTES + 1)
        return [
            BonnSegment(
                PurePosixPath(rel).parent.as_posix(), rel, named[1].upper(), parse_segment(content)
            )
        ], None
    found, others = list[BonnSegment](), list[str]()
    try:
        for inner, content in archives.read_members(path):
            if (named := SEGMENT.fullmatch(inner)) is not None:
                found.append(
                    BonnSegment(rel, rel, named[1].upper(), parse_segment(content, f"{named[1]}: "))
                )
            elif not LAYOUT.fullmatch(PurePosixPath(inner).name):
                others.append(inner)
    except UserError as error:
        # it may be gone the next time
        if error.exit_code != Exit.REFUSED or error.code == Reason.IO_ERROR:
            raise
        lost = "none of its segments is used"
        wanted = f"{error.requirement}: {lost}" if error.requirement else lost
        return [], replace(
            error.finding, file=rel, requirement=wanted, hint=error.hint or "Download it again"
        )
    if not found:
        return [], Finding(
            Reason.NO_INPUT,
            "holds no segment",
            "expected files such as Z001.txt",
            "Download it again",
            file=rel,
        )
    if not others:
        return found, None
    text, shown = (
        f"files that are no segments: {len(others)}, {safe_text(others[0])} first",
        tuple(map(safe_text, others[:5])),
    )
    return found, input_warning(
        Reason.FILE_NAME, text, "not read", file=rel, count=len(others), examples=shown
    )


def parse_segment(content: bytes, prefix: str = "") -> np.ndarray | Finding:
    """The values of a segment, float64 [4097], or why it cannot be used; `prefix` begins the
    message.
    """
    if len(content) > SEGMENT_BYTES:
        return Finding(
            Reason.LENGTH,
            f"{prefix}more than {SEGMENT_BYTES} bytes",
            f"expected {LENGTHS[0]} integers, one a line",
        )
    try:
        cells = decode_table(content).split()
    except UserError as error:
        return replace(error.finding, problem=prefix + error.problem)
    if len(cells) not in LENGTHS:
        return Finding(
            Reason.LENGTH, f"{prefix}{len(cells)} values", f"expected {LENGTHS[0]}, one a line"
        )
    values = tables.parse_numbers(
        tables.TableRow(1, tuple(cells)), [f"line {i}" for i in range(1, len(cells) + 1)]
    )
    if isinstance(values, Finding):
        return Finding(
            values.code, f"{prefix}{values.field} is no usable number", values.requirement
        )
    return values
