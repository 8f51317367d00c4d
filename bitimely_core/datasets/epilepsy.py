"""Epileptic Seizure Recognition: the 500 EEG segments of Bonn (Andrzejak et al. 2001), each cut
into 23 chunks of 178 samples.

Two forms: Bonn's sets Z, O, N, F and S, a text file a segment, as folders or as the archives of
their site; and the csv table of UCI, which was cut from them. Both give the same chunks. The id of a
row of the table says where it comes from: X21.V1.791 is chunk 21 of segment V1.791.

The segment is the subject: its chunks are neighbours in time, and a split by rows would put them
into training and test. Segments are not people.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, starmap
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from bitimely_core.datasets import physiology
from bitimely_core.datasets.raw_files import (
    list_paths,
    list_rejected,
    make_unit,
    parse_integer,
    report_count,
    report_other_files,
    two_forms_error,
)
from bitimely_core.errors import (
    Exit,
    Finding,
    Reason,
    UserError,
    input_error,
    input_warning,
    select_errors,
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
from bitimely_core.recordings.folder_tables import account_rows, parse_rows
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
    group_by,
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
ARCHIVE = re.compile(r"(?:.*/)?(?:set[ _-]?)?[A-FNOSZ]\.(?:zip|tar\.gz|tgz|tar)")
SET_FILE = re.compile(f"{SEGMENT.pattern}|{ARCHIVE.pattern}", SEGMENT.flags)
LAYOUT = re.compile(r"(SHA256SUMS|README|LICENSE).*", re.IGNORECASE)
SEGMENTS, CHUNKS = 100, 23  # of a set, of a segment
LENGTHS = (4097, 4096)  # samples of a segment; some copies end a sample early
SEGMENT_BYTES = 1 << 18  # more is no segment
NOTICE = (
    "Epilepsy: the segments are not people. They come from 5 healthy people (eyes open, eyes "
    "closed) and 5 patients (healthy area, tumour area, seizure), and whose a segment is was not "
    "published: training and test share people, so these scores apply to further segments of these "
    "people, not to new people."
)
ID = re.compile(r"X(\d{1,3})\.(V\d{1,4}\.\d{1,6})", re.ASCII)

RULES = {
    "units": f"the table {TABLE} (or Epileptic Seizure Recognition.csv), other tables are not "
    f"read; or `{BONN}`: all segments Z001.txt to "
    "S100.txt, in folders or archives (.zip, .tar.gz)",
    "faults": "--max-bad counts the segments of each folder or archive, and, as the segments of a "
    "damaged archive cannot be counted, damaged archives among all folders and archives",
    "segments": (
        "samples 178 k to 178 (k + 1) of a segment are chunk k + 1 of 23; the last 3 of its 4,097 "
        "samples are left out"
    ),
    "people": (
        "the 500 segments come from 10 people, and which is whose was not published: a split by "
        "segment does not keep people apart"
    ),
    "columns": (
        f"by name: {VALUES[0]} to {VALUES[-1]}, {LABEL}, and one more, which holds the id of "
        "the row"
    ),
    "subjects": (
        "X<chunk>.V<a>.<b>: the segment V<a>.<b> (of Bonn: Z001) is the subject, its 23 chunks "
        "stay together"
    ),
    "labels": (
        f"{'; '.join(f'{number} {name}' for number, name in CONDITIONS.items())}; binary: 1 "
        "is seizure, the others are not"
    ),
    "duplicates": (
        "a row or segment that repeats another one is used once; those of one name that differ are "
        "all excluded"
    ),
    "quality": "rows and segments of one value alone (flat_channel), and segments of Bonn with "
    "values that are not whole numbers (unit), are used and reported",
    "rate": (
        f"{RATE} Hz (4,097 samples in 23.6 s), amplitudes in {UNIT} by the publication: the "
        "table states neither"
    ),
    "majority": (
        "binary: four of five rows are no seizure, so an accuracy of 80 % is that of a constant "
        "prediction"
    ),
}
BINARY_VIEW = View(
    channels=(CHANNEL,),
    rate=RATE,
    window=SAMPLES,
    task="classification",
    classes=BINARY,
    target="binary",
    notice=NOTICE,
    help="seizure or not, from 178 samples of one EEG channel; split by segment",
)


@datasets(
    DatasetFacts(
        subject_unit="segment",
        title="Epileptic Seizure Recognition: seizures from one second of EEG",
        views={
            "": BINARY_VIEW,
            "five": replace(
                BINARY_VIEW,
                classes=tuple(CONDITIONS.values()),
                target="condition",
                help="all five conditions; split by segment",
            ),
        },
        licence="CC BY 4.0",
        url="https://archive.ics.uci.edu/dataset/388/epileptic+seizure+recognition",
        download="data.csv (7 MB) of the page; where UCI has withdrawn the files, a mirror with "
        "the same 11,500 rows. Or the sets Z.zip, O.zip, N.zip, F.zip and S.zip of "
        "https://www.ukbonn.de/epileptologie/arbeitsgruppen/ag-lehnertz-neurophysik/downloads/",
        layout="data.csv: one row a second of EEG, with the id of the segment first, X1 to X178, "
        "and the label y last; or the sets of Bonn, as folders with Z001.txt to S100.txt (4,097 "
        "lines of one integer) or as their zip archives",
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
                about=(
                    "logistic regression on the power in five bands, the standard deviation and "
                    "the line length (Esteller et al. 2001)"
                ),
                channels=(CHANNEL,),
                measure=partial(physiology.measure_window_eeg, channel=CHANNEL),
                fitted=True,
            ),
        ),
    )
)
def epilepsy(source: Source | None, options: IngestOptions) -> Iterator[IngestUnit | Finding]:
    """Epileptic Seizure Recognition (UCI table, or the sets of Bonn): 11,500 seconds of EEG in five
    conditions.
    """
    source = require_source(source)
    paths = list_paths(source)
    copies = [path for path in paths if PurePosixPath(path).name.lower() in TABLES]
    sets = list(filter(SET_FILE.fullmatch, paths))
    if copies and sets:
        raise two_forms_error(TABLE, f"{len(sets)} files of the sets of Bonn")
    if not copies and not sets:
        raise input_error(
            Reason.NO_INPUT,
            f"no {TABLE} and no Z001.txt or Z.zip among {len(source.files)} files",
            "expected one",
            "Give the folder that holds it; tables in another form are read by `ingest generic` "
            "with --map",
        )
    yield from report_unclaimed(source, {"": {path: path for path in (*copies, *sets)}}, LAYOUT)
    if copies:
        rel, findings = choose_copy(source, copies)
        yield make_unit(rel, copies, findings, partial(read_table, source.root / rel, rel))
    else:
        yield from _list_sets(source, sets)


def _list_sets(source: Source, paths: Sequence[str]) -> Iterator[IngestUnit | Finding]:
    """The sets of Bonn as one unit."""
    yield input_warning(
        Reason.IDENTIFIER,
        "the segments are not people",
        "they come from 10 people, and which is whose is unknown",
    )
    readable = {path: source.path(path) for path in paths if path in source.files}
    faults = [replace(fault, level="warning") for fault in list_rejected(source, paths)]
    yield make_unit(BONN, readable, faults, partial(read_segments, readable))


def read_table(path: Path, rel: str) -> Records:
    """All valid rows of the table: one record a row, `binary` and `condition` as its attributes;
    `rel` names the file in findings.

    Raises UserError: header or schema where columns are missing, identifier where ids, label where
    labels are all invalid, and as `tables.read_rows`.
    """
    with locate_errors(rel):
        key = _find_id_column(tables.read_names(path))
        rows = tables.read_rows(path, (key, LABEL, *VALUES), key=(key,))
        records, faults = parse_rows(rows, partial(_parse_row, key=key))
        # the column of ids may have no name
        faults = [replace(fault, field="id") if fault.field == "" else fault for fault in faults]
        seen = len(records) + len(faults)
        findings = tables.group_findings(faults)
        if not records:
            raise _no_rows_error(findings, seen)
    flat = _report_flat(
        "rows", {record.recording_id: record.signals[0].samples for record in records}
    )
    findings = [*findings, *flat, *_report_mixed_segments(records)]
    return Records(
        records=records,
        rows=[account_rows(rel, "segments", seen, faults)],
        findings=[finding.at(rel) for finding in findings],
    )


def _no_rows_error(findings: list[Finding], seen: int) -> UserError:
    """The error for a table without a usable row, with the commonest fault."""
    none = Finding(Reason.EMPTY_FILE, "has no rows")
    worst = max(findings, key=lambda finding: finding.count, default=none)
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
        raise input_error(
            Reason.HEADER,
            f"the first line names none of the columns {VALUES[0]} to {VALUES[-1]} and {LABEL}",
            "is the header line absent?",
        )
    if len(other) != 1:
        raise input_error(
            Reason.HEADER,
            f"{len(other)} columns besides {VALUES[0]} to {VALUES[-1]} and {LABEL}",
            "expected one, which holds the id of the row",
        )
    return other[0]


def _parse_row(row: tables.TableRow, key: str) -> Record | Finding:
    """One chunk, or why it is dropped."""
    name, label, *cells = row.cells
    identifier = ID.fullmatch(name.strip())
    if identifier is None:
        return Finding(
            Reason.IDENTIFIER,
            f"the id in row {row.row} is not of the form X21.V1.791",
            "it states which rows belong together",
            field=key,
            row=row.row,
        )
    number = parse_integer(label)
    if number not in CONDITIONS:
        return Finding(
            Reason.LABEL,
            f"the label in row {row.row} is not a class",
            f"expected {', '.join(map(str, CONDITIONS))}",
            field=LABEL,
            row=row.row,
        )
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
    flat = [name for name, samples in values.items() if (samples == samples[0]).all()]
    return _report_names(
        Reason.FLAT_CHANNEL,
        f"{what} of one value alone",
        flat,
        "they are used",
        "Was the electrode detached?",
    )


def _report_names(
    code: Reason, text: str, names: Sequence[str], effect: str, action: str
) -> list[Finding]:
    """A warning about what is odd and used, with names and their number; none without names."""
    if not names:
        return []
    first, count = tuple(names[:5]), len(names)
    return [
        input_warning(
            code,
            f"{text}: {count}, {', '.join(first)}{' and so on' * (count > len(first))}",
            effect,
            action,
            count=count,
            examples=first,
        )
    ]


def _report_mixed_segments(records: Sequence[Record]) -> list[Finding]:
    """A warning for segments whose chunks have different classes: official ones have one."""
    classes: dict[str, set[AttributeValue]] = {}
    for record in records:
        classes.setdefault(record.subject_id, set()).add(record.attributes["condition"])
    mixed = sum(len(conditions) > 1 for conditions in classes.values())
    return report_count(
        Reason.LABEL,
        "segments whose chunks have different classes",
        mixed,
        "expected one class a segment",
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
    so is an archive that is damaged: the other sets are used.

    Raises UserError: as `archives.read_members` where nothing else is left.
    """
    segments: list[BonnSegment] = []
    remarks: list[Finding] = []
    for rel, path in files.items():
        held, findings = _read_segment_file(rel, path)
        segments += held
        remarks += findings
    copies = group_by(segments, lambda segment: segment.name)
    used: dict[str, np.ndarray] = {}
    faults: list[Finding] = []
    for name, same in sorted(copies.items()):
        values, findings = _choose_values(name, same)
        faults += findings
        if values is not None:
            used[name] = values
    damaged = select_errors(remarks)
    grouped = tables.group_findings(faults)
    if not used:
        raise finding_to_error(damaged[0]) if damaged else _no_rows_error(grouped, len(segments))
    notes = [remark for remark in remarks if remark.level != "error"]
    return Records(
        records=list(chain.from_iterable(starmap(_cut_segment, used.items()))),
        rows=_account_segments(segments, faults, damaged),
        findings=[*damaged, *grouped, *notes, *_report_segments(used)],
    )


def _choose_values(
    name: str, copies: Sequence[BonnSegment]
) -> tuple[np.ndarray | None, list[Finding]]:
    """The values of a segment, None where none can be used or copies differ; and findings on the
    copies.
    """
    items = [(segment, segment.values) for segment in copies]
    usable = [(segment, item) for segment, item in items if not isinstance(item, Finding)]
    faults = [item.at(segment.file) for segment, item in items if isinstance(item, Finding)]
    if not usable:
        return None, faults
    contents = [(segment.file, (values + 0.0).tobytes()) for segment, values in usable]
    repeated = compare_copies(contents, name)
    if select_errors(repeated):
        return None, faults + repeated
    for finding, (segment, _) in zip(repeated, usable[1:], strict=True):
        faults.append(replace(finding, file=segment.place))  # equal ones are counted by place
    return usable[0][1], faults


def _cut_segment(name: str, values: np.ndarray) -> list[Record]:
    """The 23 chunks of a segment; the samples after them are left out."""
    chunks = values[: CHUNKS * SAMPLES].reshape(CHUNKS, SAMPLES)
    return [
        _make_record(chunk, f"X{number}.{name}", number, name, SETS[name[0]])
        for number, chunk in enumerate(chunks, 1)
    ]


def _account_segments(
    segments: Sequence[BonnSegment], faults: Sequence[Finding], damaged: Sequence[Finding]
) -> list[SourceRows]:
    """The account of the segments of each folder and archive, and that of folders and archives
    where some are damaged, as how many segments these have is unknown.
    """
    places = {segment.place: segment.place for segment in segments}
    places |= {segment.file: segment.place for segment in segments}
    by_place = group_by(faults, lambda fault: places[str(fault.file)])
    seen = Counter(segment.place for segment in segments)
    rows = [
        account_rows(place, "segments", count, by_place.get(place, []))
        for place, count in sorted(seen.items())
    ]
    if not damaged:
        return rows
    count = len(seen) + len(damaged)
    return [account_rows(str(damaged[0].file), "sets", count, damaged), *rows]


def _report_segments(used: Mapping[str, np.ndarray]) -> Iterator[Finding]:
    """Warnings about segments that are used, with counts: flat ones, values that Bonn does not
    have, and sets that lack some.
    """
    broken = [name for name, values in used.items() if not np.array_equal(values, np.rint(values))]
    text, effect = "segments with values that are not whole numbers", f"they are taken for {UNIT}"
    action = "Give the files as published"
    for finding in (
        *_report_flat("segments", used),
        *_report_names(Reason.UNIT, text, broken, effect, action),
    ):
        yield finding.at(BONN)
    counts = Counter(name[0] for name in used)
    for name, label in SETS.items():
        if lacking := SEGMENTS - counts[name]:
            text = f"set {name} ({CONDITIONS[label]}): {counts[name]} of {SEGMENTS} segments"
            yield input_warning(
                Reason.CLASS_MISSING, f"{text} are used", "expected all", file=BONN, count=lacking
            )


def _read_segment_file(rel: str, path: Path) -> tuple[list[BonnSegment], list[Finding]]:
    """The segments of a text or an archive, and findings on an archive.

    Raises UserError: io_error, and faults of this machine.
    """
    match = SEGMENT.fullmatch(rel)
    if match is None:
        return _read_archive(rel, path)
    with path.open("rb") as file:
        values = parse_segment(file.read(SEGMENT_BYTES + 1))
    place = PurePosixPath(rel).parent.as_posix()
    return [BonnSegment(place, rel, match[1].upper(), values)], []


def _read_archive(rel: str, path: Path) -> tuple[list[BonnSegment], list[Finding]]:
    """The segments of an archive, none where it is damaged; why, or what else it holds."""
    segments: list[BonnSegment] = []
    others: list[str] = []
    try:
        for inner, content in archives.read_members(path):
            if match := SEGMENT.fullmatch(inner):
                values = parse_segment(content, f"{match[1]}: ")
                segments.append(BonnSegment(rel, rel, match[1].upper(), values))
            elif not LAYOUT.fullmatch(PurePosixPath(inner).name):
                others.append(inner)
    except UserError as error:
        # it may be gone the next time
        if error.exit_code != Exit.REFUSED or error.code == Reason.IO_ERROR:
            raise
        effect = "none of its segments is used"
        wanted = f"{error.requirement}: {effect}" if error.requirement else effect
        action = error.hint or "Download it again"
        return [], [replace(error.finding, file=rel, requirement=wanted, hint=action)]
    if not segments:
        return [], [
            Finding(
                Reason.NO_INPUT,
                "holds no segment",
                "expected files such as Z001.txt",
                "Download it again",
                file=rel,
            )
        ]
    return segments, report_other_files("files that are no segments", others, rel)


def parse_segment(content: bytes, prefix: str = "") -> np.ndarray | Finding:
    """The values of a segment, float64 [4097], or why it cannot be used; `prefix` begins the
    message.
    """
    wanted = f"expected {LENGTHS[0]}"
    if len(content) > SEGMENT_BYTES:
        return Finding(
            Reason.LENGTH,
            f"{prefix}more than {SEGMENT_BYTES} bytes",
            f"{wanted} integers, one a line",
        )
    try:
        cells = decode_table(content).split()
    except UserError as error:
        return replace(error.finding, problem=prefix + error.problem)
    if len(cells) not in LENGTHS:
        return Finding(Reason.LENGTH, f"{prefix}{len(cells)} values", f"{wanted}, one a line")
    lines = [f"line {i}" for i in range(1, len(cells) + 1)]
    values = tables.parse_numbers(tables.TableRow(1, tuple(cells)), lines)
    if isinstance(values, Finding):
        return replace(
            values, problem=f"{prefix}{values.field} is no usable number", field=None, row=None
        )
    return values
