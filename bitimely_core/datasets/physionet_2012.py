"""PhysioNet/CinC Challenge 2012: the first 48 hours of stays in intensive care, 37 irregularly
observed variables, in-hospital death.

A stay is a recording of one row a time at which anything was observed: every variable is a channel
with missing values, and the channel `time` holds the seconds since admission. Views with `clock`
keep these times; the grid views bring the observations to hours.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from bitimely_core.errors import (
    Finding,
    Reason,
    UserError,
    input_error,
    input_warning,
    safe_text,
    usage_error,
)
from bitimely_core.formats import archives, tables
from bitimely_core.formats.source import Source, locate_errors, report_unclaimed, require_source
from bitimely_core.formats.text import decode_table
from bitimely_core.registry import DatasetFacts, View, datasets
from bitimely_core.types import (
    IngestOptions,
    IngestUnit,
    Record,
    Records,
    Signal,
    SourceRows,
    count_reasons,
)

HOURS, ROWS = 48, 216  # of a stay; times of a stay at most (203 occur in sets a and b)
RATE = ROWS / (3600 * HOURS)  # Hz: rows a second, if they were regular
CLOCK = "time"
UNITS = {
    **dict.fromkeys(
        ("Albumin", "Creatinine", "Bilirubin", "BUN", "Cholesterol", "Glucose"), "mg/dL"
    ),
    **dict.fromkeys(("ALP", "ALT", "AST"), "IU/L"),
    **dict.fromkeys(
        ("DiasABP", "MAP", "SysABP", "NIDiasABP", "NIMAP", "NISysABP", "PaCO2", "PaO2"), "mmHg"
    ),
    **dict.fromkeys(("HCO3", "Lactate", "Mg"), "mmol/L"),
    **dict.fromkeys(("K", "Na"), "mEq/L"),
    **dict.fromkeys(("TroponinI", "TroponinT"), "ug/L"),
    **dict.fromkeys(("HR", "RespRate"), "/min"),
    **dict.fromkeys(("HCT", "SaO2"), "%"),
    **dict.fromkeys(("FiO2", "GCS", "pH", "MechVent"), ""),
    **dict.fromkeys(("Platelets", "WBC"), "cells/nL"),
    "Temp": "degC",
    "Urine": "mL",
    "Weight": "kg",
}
VARIABLES = tuple(sorted(UNITS))  # 37
STATICS = ("Age", "Gender", "Height", *(f"ICUType {kind}" for kind in range(1, 5)))
CHANNELS = (*VARIABLES, *STATICS)
# Weight is one at 00:00, and a variable
DESCRIPTORS = {"RecordID", "Age", "Gender", "Height", "ICUType"}
UNKNOWN = -1.0  # of a descriptor
PLAUSIBLE = {  # no value of another variable is below 0
    **dict.fromkeys(("FiO2", "MechVent"), (0.0, 1.0)),
    **dict.fromkeys(("HCT", "SaO2"), (0.0, 100.0)),
    "Age": (0.0, 130.0),
    "GCS": (3.0, 15.0),
    "HR": (0.0, 500.0),
    "Height": (100.0, 250.0),
    "Temp": (20.0, 45.0),
    "WBC": (0.0, 1000.0),
    "Weight": (15.0, 500.0),
    "pH": (6.0, 8.5),
}
PERCENT = (21.0, 100.0)  # of FiO2: no fraction is that large, and no air has less than 21 %
CODES = {"Gender": (0.0, 1.0), "ICUType": (1.0, 2.0, 3.0, 4.0)}
DEATH = ("survived", "died")
LABEL = "In-hospital_death"
TIME = re.compile(r"(\d{1,3}):([0-5]\d)", re.ASCII)
STAY = re.compile(r"(?:.*/)?(\d{1,9})\.txt", re.IGNORECASE | re.ASCII)
FORMS = {  # what a set is published and unpacked as: of several the first is read
    "folder": re.compile(r"(?:.*/)?set[-_ ]?([abc])/\d{1,9}\.txt", re.IGNORECASE | re.ASCII),
    "tar": re.compile(r"(?:.*/)?set[-_ ]?([abc])\.(?:tar\.gz|tgz|tar)", re.IGNORECASE),
    "zip": re.compile(r"(?:.*/)?set[-_ ]?([abc])\.zip", re.IGNORECASE),
}
OUTCOMES = re.compile(r"(?:.*/)?Outcomes[-_ ]?([abc])\.(?:txt|csv)", re.IGNORECASE)
LAYOUT = re.compile(
    r"(RECORDS|SHA256SUMS|LICENSE|README|index\.html).*|.*\.(md|html|m|c)", re.IGNORECASE
)

IRREGULAR = View(
    channels=CHANNELS,
    rate=RATE,
    window=ROWS,
    clock=CLOCK,
    # 440 of 216 x 44 in sets a and b, 744 in the fullest of 32 stays, to which a batch is padded
    observed=0.08,
    help="37 variables and the descriptors at the times of their observations, no labels; one stay is one window of at most 216 times",
)
GRID = View(
    channels=CHANNELS,
    rate=1 / 3600,
    window=HOURS,
    clock=CLOCK,
    grid=True,
    help="the same on a grid of hours (the mean of each hour, missing where there is none), no labels",
)
NOTICE = (
    "PhysioNet 2012: the unit is the stay; whether two stays are of one patient is not published. Sets a and b are 8,000 of the 12,000 stays: "
    "published figures use other splits of all of them."
)
MORTALITY = {"task": "classification", "classes": DEATH, "target": "death", "notice": NOTICE}


@dataclass(kw_only=True)
class StaySet:
    """The files of a set."""

    outcomes: str = ""
    archive: str = ""
    stays: list[str] = field(default_factory=list)

    @property
    def place(self) -> str:
        """The archive or the folder of its stays."""
        return _locate_stays([self.archive] if self.archive else self.stays)

    def locate(self, rel: str) -> str:
        """The path of a stay, that of its archive before it."""
        return f"{self.archive}/{rel}" if self.archive else rel


class StayCopy(NamedTuple):
    """A stay that several sets hold."""

    letter: str
    file: str
    content: bytes
    death: str | None


class Stay(NamedTuple):
    """One stay as read."""

    record: Record
    unknown: Counter[str]  # variable -> descriptors without a value
    implausible: Counter[str]  # variable -> values that are not used
    repeated: int  # values of a variable at a time that has a later one
    foreign: int  # values of other variables
    percent: int  # values of FiO2 that are percent, not fractions
    is_unordered: bool  # a row is of an earlier time than the one before
    is_cut: bool  # its last line has no end


@datasets(
    DatasetFacts(
        title="PhysioNet/CinC Challenge 2012: in-hospital death from the first 48 hours in intensive care, irregularly observed",
        views={
            "": IRREGULAR,
            "mortality": replace(
                IRREGULAR,
                **MORTALITY,  # type: ignore[arg-type]
                help="in-hospital death, from the observations at their own times",
            ),
            "grid": GRID,
            "mortality-grid": replace(
                GRID,
                **MORTALITY,  # type: ignore[arg-type]
                help="in-hospital death, from the observations on a grid of hours",
            ),
        },
        licence="ODC-BY 1.0",
        url="https://physionet.org/content/challenge-2012/1.0.0/",
        download="wget -r -N -c -np -nH --cut-dirs=3 https://physionet.org/files/challenge-2012/1.0.0/",
        layout="set-a.tar.gz, set-b.tar.gz (set-c.tar.gz) with Outcomes-a.txt, Outcomes-b.txt (Outcomes-c.txt), or the archives unpacked as "
        "set-a/132539.txt and so on; of several forms of a set one is read: the folder, else the .tar.gz, else the .zip",
        paper={},
        rules={
            "units": "a set: `set-a` with all its stays; a damaged stay is counted, the others are used",
            "times": "hours and minutes since admission, 00:00 to 48:00; several variables of one time are one row",
            "repeated": "of several values of one variable at one time the last one is used",
            "descriptors": "Age, Gender (0 female, 1 male), Height and four indicators of ICUType are channels observed at 00:00, beside the 37 "
            "variables; -1 is unknown: missing",
            "plausible": "values outside of these ranges are missing: "
            + "; ".join(f"{name} {low:g} to {high:g}" for name, (low, high) in PLAUSIBLE.items())
            + "; others below 0. FiO2 is a fraction: values from 21 to 100, which are percent, are counted and not converted",
            "copies": "a stay that is there twice is used once, with a warning; one whose copies differ, in text or outcome, is left out",
            "labels": f"{LABEL} of the outcomes; Length_of_stay, SAPS-I, SOFA and Survival are known only later and are not read",
            "splits": "by stay: which stays are of one patient was not published",
        },
    ),
    name="physionet-2012",
)
def physionet_2012(source: Source | None, options: IngestOptions) -> Iterator[IngestUnit | Finding]:
    """PhysioNet/CinC Challenge 2012: 4,000 intensive-care stays a set, irregular times, in-hospital
    death.
    """
    source = require_source(source)
    sets, unread, remarks = _find_sets(source)
    if not any(one.archive or one.stays for one in sets.values()):
        wanted = "expected set-a.tar.gz, or a folder set-a with 132539.txt and so on"
        action = "Give the folder that holds set-a and Outcomes-a.txt"
        raise input_error(
            Reason.NO_INPUT, f"no stays among {len(source.files)} files", wanted, action
        )
    claimed = {
        letter: {str(i): rel for i, rel in enumerate([one.outcomes, one.archive, *one.stays])}
        for letter, one in sets.items()
    }
    yield from report_unclaimed(source, {**claimed, "": {rel: rel for rel in unread}}, LAYOUT)
    yield from remarks
    copies = _find_copies(
        source, {letter: one for letter, one in sorted(sets.items()) if one.archive or one.stays}
    )
    for letter, one in sorted(sets.items()):
        if not one.archive and not one.stays:
            yield input_warning(
                Reason.UNMATCHED_LABELS,
                f"has no set-{letter} beside it",
                "it is not read",
                file=one.outcomes,
            )
            continue
        findings = [
            replace(source.rejected[rel], level="warning")
            for rel in one.stays
            if rel in source.rejected
        ]
        if not one.outcomes:
            text = f"set-{letter} has no Outcomes-{letter}.txt beside it"
            findings.append(
                input_warning(Reason.UNMATCHED_LABELS, text, "its stays have no labels")
            )
        files = [rel for rel in (one.archive, *one.stays, one.outcomes) if rel]
        if faults := [
            source.rejected[rel] for rel in (one.archive, one.outcomes) if rel in source.rejected
        ]:
            yield IngestUnit(
                name=f"set-{letter}", files=tuple(files), read=None, findings=tuple(faults)
            )
            continue
        paths = {rel: source.path(rel) for rel in files if rel not in source.rejected}
        more = [copies[letter]] if letter in copies else []
        read = partial(read_set, paths, one, *more)
        yield IngestUnit(
            name=f"set-{letter}", files=tuple(paths), read=read, findings=tuple(findings)
        )


def _find_sets(source: Source) -> tuple[dict[str, StaySet], list[str], list[Finding]]:
    """Letter -> files; the files of other forms of a set, which are not read, and a warning for
    each form.

    Raises UserError (config, exit 2) for a set that is there twice in one form: which of them is
    meant is unknown.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for rel in sorted({*source.files, *source.rejected}):
        for form, pattern in {"outcomes": OUTCOMES, **FORMS}.items():
            if (named := pattern.fullmatch(rel)) is None:
                continue
            same = found.setdefault(named[1].lower(), {}).setdefault(form, [])
            if same and (
                form != "folder" or PurePosixPath(same[0]).parent != PurePosixPath(rel).parent
            ):
                there = same[0] if form == "outcomes" else _locate_stays(same)
                text = f"the {'table' if form == 'outcomes' else 'set'} is there twice, also as {safe_text(there)}"
                raise usage_error(text, "expected one copy", "Remove one of them", file=rel)
            same.append(rel)
    sets: dict[str, StaySet] = {}
    unread: list[str] = []
    remarks: list[Finding] = []
    for letter, forms in found.items():
        one = sets[letter] = StaySet(outcomes="".join(forms.get("outcomes", ())))
        held = [form for form in FORMS if form in forms]
        readable = [form for form in held if not source.rejected.keys() >= set(forms[form])]
        if not held:
            continue
        chosen = (readable or held)[0]
        one.archive, one.stays = (
            ("", forms[chosen]) if chosen == "folder" else (forms[chosen][0], [])
        )
        for form in held:
            if form != chosen:
                text, action = (
                    f"set-{letter} is read from {safe_text(one.place)}",
                    "Remove the copy that you do not want",
                )
                rel = _locate_stays(forms[form])
                remarks.append(
                    input_warning(
                        Reason.DUPLICATES, text, "this copy of it is not read", action, file=rel
                    )
                )
                unread += forms[form]
    return sets, unread, remarks


def _locate_stays(files: Sequence[str]) -> str:
    """The archive or the folder of the stays of a set."""
    return (
        files[0] if STAY.fullmatch(files[0]) is None else PurePosixPath(files[0]).parent.as_posix()
    )


def _find_copies(source: Source, sets: Mapping[str, StaySet]) -> dict[str, dict[str, Finding]]:
    """Letter -> RecordID -> why this set's copy of a stay that another set has too is not used.

    Of equal ones with equal outcomes one is used, of others none: which is right is unknown. A set
    that cannot be read is left to its unit.
    """
    if len(sets) < 2:
        return {}
    paths = {
        letter: {rel: source.path(rel) for rel in (one.archive, *one.stays) if rel in source.files}
        for letter, one in sets.items()
    }
    names: Counter[str] = Counter()
    for letter, one in sets.items():
        with suppress(UserError, OSError):
            listed = (
                (rel for rel, _ in archives.read_members(paths[letter][one.archive]))
                if one.archive
                else paths[letter]
            )
            names.update({named[1] for rel in listed if (named := STAY.fullmatch(rel))})
    shared = {name for name, count in names.items() if count > 1}
    places: dict[str, list[StayCopy]] = {}
    for letter, one in sets.items() if shared else ():
        with suppress(UserError, OSError):
            known = one.outcomes and one.outcomes in source.files
            deaths = _read_outcomes(source.path(one.outcomes), one.outcomes)[0] if known else {}
            for rel, content in _list_stays(paths[letter], one):
                if (named := STAY.fullmatch(rel)) is not None and named[1] in shared:
                    places.setdefault(named[1], []).append(
                        StayCopy(letter, one.locate(rel), content, deaths.get(named[1]))
                    )
    found: dict[str, dict[str, Finding]] = {}
    for name, same in sorted(places.items()):
        differ = (
            len({one.content for one in same}) > 1 or len({one.death for one in same} - {None}) > 1
        )
        # one with an outcome, if any has it
        used, *others = sorted(same, key=lambda one: (one.death is None, one.letter))
        for other in others:
            if other.letter != used.letter:
                place = sets[other.letter].place
                found.setdefault(other.letter, {})[name] = _describe_copy(
                    other.file, used.file, place, differ=differ
                )
                if differ:
                    found.setdefault(used.letter, {})[name] = _describe_copy(
                        used.file, other.file, place, differ=True
                    )
    return found


def _describe_copy(file: str, other: str, place: str, *, differ: bool) -> Finding:
    """Why a stay is not used that `other` holds too; `place`: that of its set, for which equal ones
    are counted.
    """
    if not differ:
        return input_warning(
            Reason.DUPLICATES,
            f"{safe_text(file)} repeats {safe_text(other)}",
            "used once",
            file=place,
        )
    text, wanted = (
        f"{safe_text(other)} is of the same stay and differs, in its text or its outcome",
        "none of them is used",
    )
    return Finding(Reason.DUPLICATE_KEY, text, wanted, "Remove the wrong one", file=file)


def read_set(
    paths: Mapping[str, Path], files: StaySet, copies: Mapping[str, Finding] | None = None
) -> Records:
    """All stays of a set; damaged ones are counted. `paths`: path relative to the source -> file;
    `copies`: as of `_find_copies`.

    Raises UserError: as `archives.read_members`, and schema, duplicate_key and so on for the
    outcomes.
    """
    outcomes, rows, findings = (
        _read_outcomes(paths[files.outcomes], files.outcomes) if files.outcomes else ({}, [], [])
    )
    place = files.place
    others: list[str] = []
    stays: dict[str, Stay] = {}
    faults: list[Finding] = []
    first: dict[str, tuple[str, bytes]] = {}  # RecordID -> file and hash of its text
    torn: set[str] = set()  # stays whose copies differ
    seen = 0
    for rel, content in _list_stays(paths, files):
        if (named := STAY.fullmatch(rel)) is None:
            others.append(PurePosixPath(rel).name)
            continue
        seen += 1
        name, file, digest = named[1], files.locate(rel), sha256(content).digest()
        there, hashed = first.setdefault(name, (file, digest))
        if there != file:
            if hashed != digest and stays.pop(name, None) is not None:
                torn.add(name)
                faults.append(_describe_copy(there, file, place, differ=True))
            faults.append(
                _describe_copy(file, there, place, differ=hashed != digest or name in torn)
            )
            continue
        if copies and name in copies:
            faults.append(copies[name])
            continue
        try:
            stays[name] = parse_stay(name, content, outcomes.get(name))
        except UserError as error:
            faults.append(replace(error.finding, file=file))
    if not stays and not any(fault.level != "error" for fault in faults):
        worst = (
            tables.group_findings(faults)[0]
            if faults
            else Finding(Reason.NO_INPUT, "holds no stays")
        )
        raise input_error(
            worst.code,
            f"no stay of {seen} can be used: {worst.problem}",
            worst.requirement,
            worst.hint,
            file=place,
        )
    dropped, quarantined = (
        count_reasons(fault for fault in faults if (fault.level == "error") == error)
        for error in (False, True)
    )
    rows.append(
        SourceRows(file=place, kind="stays", seen=seen, dropped=dropped, quarantined=quarantined)
    )
    if others := [
        name for name in others if not name.startswith(".") and not LAYOUT.fullmatch(name)
    ]:
        shown = tuple(map(safe_text, others[:5]))
        text = f"files that are not named as a stay (132539.txt): {len(others)}, {shown[0]} first"
        findings.append(
            input_warning(
                Reason.FILE_NAME, text, "not read", file=place, count=len(others), examples=shown
            )
        )
    findings += tables.group_findings(faults) + [
        finding.at(place) for finding in _report_stays([*stays.values()])
    ]
    if files.outcomes:
        unlabelled = sum("death" not in stay.record.attributes for stay in stays.values())
        unused = len(outcomes.keys() - stays.keys())
        for count, text, wanted in (
            (unlabelled, "stays without an outcome", "they have no label"),
            (unused, "outcomes without a stay", "not used"),
        ):
            if count:
                findings.append(
                    input_warning(
                        Reason.UNMATCHED_LABELS,
                        f"{text}: {count}",
                        wanted,
                        file=files.outcomes,
                        count=count,
                    )
                )
    return Records(records=[stay.record for stay in stays.values()], rows=rows, findings=findings)


def _list_stays(paths: Mapping[str, Path], files: StaySet) -> Iterator[tuple[str, bytes]]:
    if files.archive:
        yield from archives.read_members(paths[files.archive])
        return
    for rel in files.stays:
        if rel in paths:
            with paths[rel].open("rb") as file:
                yield rel, file.read(archives.MAX_MEMBER)


def _read_outcomes(path: Path, rel: str) -> tuple[dict[str, str], list[SourceRows], list[Finding]]:
    """Stay -> died or survived; the account of the rows. Columns are found by name, those of later
    days are not read.
    """
    found: dict[str, str] = {}
    faults: list[Finding] = []
    row_of: dict[str, int] = {}
    with locate_errors(rel):
        for row in tables.read_rows(path, ("RecordID", LABEL), key=("RecordID",)):
            if isinstance(row, Finding):
                faults.append(row)
            elif (name := _parse_integer(row.cells[0])) is None:
                text = f"the cell of row {row.row} is no number of a stay"
                faults.append(
                    Finding(
                        Reason.IDENTIFIER,
                        text,
                        "expected a whole number",
                        field="RecordID",
                        row=row.row,
                    )
                )
            elif str(name) in row_of:  # in another spelling
                found.pop(str(name), None)
                text, wanted = (
                    f"rows {row_of[str(name)]} and {row.row} are of one stay",
                    "its outcome is not used",
                )
                faults.append(
                    Finding(Reason.DUPLICATE_KEY, text, wanted, field="RecordID", row=row.row)
                )
            elif (death := _parse_integer(row.cells[1])) in {0, 1}:
                found[str(name)], row_of[str(name)] = DEATH[death], row.row
            else:
                faults.append(
                    Finding(
                        Reason.LABEL,
                        f"the cell of row {row.row} is neither 0 nor 1",
                        field=LABEL,
                        row=row.row,
                    )
                )
        seen = tables.count_rows(path)
    dropped, quarantined = (
        count_reasons(one for one in faults if (one.level == "error") == error)
        for error in (False, True)
    )
    rows = [
        SourceRows(file=rel, kind="outcomes", seen=seen, dropped=dropped, quarantined=quarantined)
    ]
    return found, rows, [finding.at(rel) for finding in tables.group_findings(faults)]


def _parse_integer(cell: str) -> int | None:
    """A whole number, also as 1.0; None for anything else."""
    with suppress(UserError):
        return tables.parse_integer(cell)
    return None


def parse_stay(name: str, content: bytes, death: str | None) -> Stay:
    """One stay from its text. Raises UserError: encoding, schema, row_width, timestamps,
    not_numeric, identifier, with the row.
    """
    table = decode_table(content)
    header, *lines = table.splitlines() or [""]
    columns = [cell.strip() for cell in header.split(",")]
    if {"Time", "Parameter", "Value"} - set(columns):
        raise input_error(
            Reason.SCHEMA,
            "has no columns Time, Parameter, Value",
            "expected them in the first line",
            row=1,
        )
    at = [columns.index(cell) for cell in ("Time", "Parameter", "Value")]
    values: dict[tuple[int, str], float] = {}
    unknown: Counter[str] = Counter()
    implausible: Counter[str] = Counter()
    repeated = foreign = percent = latest = 0
    is_unordered = False
    for number, line in enumerate(lines, 2):
        if not line.strip():
            continue
        cells = line.split(",")
        if len(cells) != len(columns):
            raise input_error(
                Reason.ROW_WIDTH,
                f"row {number} has {len(cells)} cells",
                f"expected {len(columns)}",
                row=number,
            )
        clock, variable, text = (cells[i].strip() for i in at)
        minute, value = _parse_cells(clock, text, number)
        is_unordered, latest = is_unordered or minute < latest, minute
        if variable == "RecordID":
            if value != float(name):
                raise input_error(
                    Reason.IDENTIFIER,
                    "states another RecordID than its name",
                    "expected the same",
                    row=number,
                )
            continue
        if variable not in UNITS and variable not in DESCRIPTORS:
            foreign += 1
            continue
        percent += variable == "FiO2" and PERCENT[0] <= value <= PERCENT[1]
        low, high = PLAUSIBLE.get(variable, (0.0, np.inf))
        if value == UNKNOWN and (variable in DESCRIPTORS or variable == "Weight"):
            unknown[variable] += 1
        elif not low <= value <= high or value not in CODES.get(variable, (value,)):
            implausible[variable] += 1
        else:
            repeated += (minute, variable) in values
            values[minute, variable] = value
    is_cut = not table.endswith(("\n", "\r"))
    return Stay(
        _make_record(name, values, death),
        unknown,
        implausible,
        repeated,
        foreign,
        percent,
        is_unordered,
        is_cut,
    )


def _parse_cells(clock: str, text: str, row: int) -> tuple[int, float]:
    """Minutes since admission, and the value."""
    time = TIME.fullmatch(clock)
    minute = 60 * int(time[1]) + int(time[2]) if time else -1
    if not 0 <= minute <= 60 * HOURS:
        raise input_error(
            Reason.TIMESTAMPS,
            f"the time of row {row} is not of the first {HOURS} hours",
            "expected 00:00 to 48:00",
            row=row,
        )
    try:
        value = tables.parse_number(text)
    except UserError as error:
        raise input_error(
            error.code, f"the value of row {row} {error.problem}", error.requirement, row=row
        ) from None
    if value is None:
        raise input_error(
            Reason.MISSING_VALUES, f"row {row} has no value", "expected a number", row=row
        )
    return minute, value


def _make_record(name: str, values: Mapping[tuple[int, str], float], death: str | None) -> Record:
    """The stay with a row a time; one without any observation has the row of its admission."""
    minutes = sorted({minute for minute, _ in values}) or [0]
    place = {minute: row for row, minute in enumerate(minutes)}
    table = np.full((len(CHANNELS), len(minutes)), np.nan, np.float32)
    channel = {variable: i for i, variable in enumerate(CHANNELS)}
    for (minute, variable), value in values.items():
        if variable == "ICUType":
            for kind in range(1, 5):
                table[channel[f"ICUType {kind}"], place[minute]] = value == kind
        else:
            table[channel[variable], place[minute]] = value
    signals = [Signal(CLOCK, RATE, "s", 60 * np.array(minutes, np.float32))]
    signals += [
        Signal(variable, RATE, UNITS.get(variable, ""), table[i]) for variable, i in channel.items()
    ]
    return Record(
        recording_id=name,
        subject_id=name,
        signals=signals,
        attributes={} if death is None else {"death": death},
    )


def _report_stays(stays: list[Stay]) -> Iterator[Finding]:
    """What is odd in the stays of a set, in words with counts."""
    unknown, implausible = (
        sum(
            (
                counts[i]
                for counts in zip(
                    [s.unknown for s in stays], [s.implausible for s in stays], strict=True
                )
            ),
            Counter(),
        )
        for i in (0, 1)
    )
    for variable, count in sorted(unknown.items()):
        yield input_warning(
            Reason.MISSING_VALUES,
            f"stays with an unknown {variable} (-1): {count}",
            "missing",
            field=variable,
            count=count,
        )
    for variable, count in sorted(implausible.items()):
        low, high = PLAUSIBLE.get(variable, (0.0, np.inf))
        wanted = f"between {low:g} and {high:g}" if variable in PLAUSIBLE else "0 or more"
        wanted = (
            f"one of {', '.join(f'{code:g}' for code in CODES[variable])}"
            if variable in CODES
            else wanted
        )
        text = f"values of {variable} that are not {wanted}: {count}"
        yield input_warning(Reason.PHYSICAL_RANGE, text, "missing", field=variable, count=count)
    if count := sum(stay.percent for stay in stays):
        text = f"values of FiO2 from {PERCENT[0]:g} to {PERCENT[1]:g}, which are percent: {count}, in {sum(stay.percent > 0 for stay in stays)} stays"
        yield input_warning(
            Reason.UNIT,
            text,
            "expected fractions: they are missing",
            "Divide them by 100",
            field="FiO2",
            count=count,
        )
    if count := sum(stay.is_unordered for stay in stays):
        yield input_warning(
            Reason.TIMESTAMPS,
            f"stays whose rows are not in order of time: {count}",
            "they are put in order",
            count=count,
        )
    if count := sum(stay.is_cut for stay in stays):
        text = f"stays whose last line has no end: {count}"
        yield input_warning(
            Reason.TRUNCATED,
            text,
            "they are used, but may have been cut",
            "Compare them with their source",
            count=count,
        )
    if count := sum(stay.repeated for stay in stays):
        text = f"values of a variable at a time that has a later one: {count}"
        yield input_warning(Reason.DUPLICATES, text, "the last one of a time is used", count=count)
    if count := sum(stay.foreign for stay in stays):
        yield input_warning(
            Reason.UNKNOWN_LABEL,
            f"values of variables that the challenge does not have: {count}",
            "not used",
            count=count,
        )
    bare = sum(
        all(
            np.isnan(s.samples).all()
            for s in stay.record.signals
            if s.channel in UNITS and s.channel != "Weight"
        )
        for stay in stays
    )
    if bare:
        yield input_warning(
            Reason.MISSING_VALUES,
            f"stays without any measurement: {bare}",
            "their descriptors are all that is known",
            count=bare,
        )
