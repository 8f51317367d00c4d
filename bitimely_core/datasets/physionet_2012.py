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
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from bitimely_core.datasets.raw_files import (
    list_paths,
    list_rejected,
    make_unit,
    parse_integer,
    report_count,
    report_other_files,
)
from bitimely_core.errors import (
    Finding,
    Reason,
    UserError,
    input_error,
    input_warning,
    safe_text,
    select_errors,
    usage_error,
)
from bitimely_core.formats import archives, tables
from bitimely_core.formats.source import Source, locate_errors, report_unclaimed, require_source
from bitimely_core.formats.text import decode_table
from bitimely_core.recordings.folder_tables import account_rows
from bitimely_core.registry import DatasetFacts, View, datasets
from bitimely_core.types import IngestOptions, IngestUnit, Record, Records, Signal, SourceRows

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
    help=(
        "37 variables and the descriptors at the times of their observations, no labels; one stay "
        "is one window of at most 216 times"
    ),
)
GRID = View(
    channels=CHANNELS,
    rate=1 / 3600,
    window=HOURS,
    clock=CLOCK,
    grid=True,
    help=(
        "the same on a grid of hours (the mean of each hour, missing where there is none), no "
        "labels"
    ),
)
NOTICE = (
    "PhysioNet 2012: the unit is the stay; whether two stays are of one patient is not published. "
    "Sets a and b are 8,000 of the 12,000 stays: published figures use other splits of all of them."
)
VOLUMES = {"Urine"}  # several of one time are parts of one amount
ODDITIES = {  # what is odd in some stays of a set -> reason, text, effect, what to do
    "unordered": (
        Reason.TIMESTAMPS,
        "stays whose rows are not in order of time",
        "they are put in order",
        "",
    ),
    "cut": (
        Reason.TRUNCATED,
        "stays whose last line has no end",
        "they are used, but may have been cut",
        "Compare them with their source",
    ),
    "repeated": (
        Reason.DUPLICATES,
        "values of a variable at a time that has a later one",
        "the last one of a time is used",
        "",
    ),
    "added": (
        Reason.DUPLICATES,
        "volumes of a variable at a time that has others",
        "the volumes of a time are added",
        "",
    ),
    "foreign": (
        Reason.UNKNOWN_LABEL,
        "values of variables that the challenge does not have",
        "not used",
        "",
    ),
    "bare": (
        Reason.MISSING_VALUES,
        "stays without any measurement",
        "their descriptors are all that is known",
        "",
    ),
}


def _predict_death(view: View, text: str) -> View:
    return replace(
        view, task="classification", classes=DEATH, target="death", notice=NOTICE, help=text
    )


@dataclass(kw_only=True)
class StaySet:
    """The files of a set."""

    outcomes: str = ""
    archive: str = ""
    stays: list[str] = field(default_factory=list)

    @property
    def files(self) -> list[str]:
        """All of them."""
        return list(filter(None, (self.archive, *self.stays, self.outcomes)))

    @property
    def place(self) -> str:
        """The archive or the folder of its stays."""
        return self.archive or _locate_form("folder", self.stays[0])

    def locate(self, rel: str) -> str:
        """The path of a stay, that of its archive before it."""
        return f"{self.archive}/{rel}" if self.archive else rel


class StayCopy(NamedTuple):
    """A stay as a set holds it."""

    letter: str
    file: str
    digest: bytes  # of its text
    death: str | None


class Stay(NamedTuple):
    """One stay as read."""

    record: Record
    odd: Counter[str]  # key of ODDITIES -> rows or values; those of the stay itself count once
    unknown: Counter[str]  # variable -> descriptors without a value
    implausible: Counter[str]  # variable -> values that are not used
    percent: int  # values of FiO2 that are percent, not fractions


@datasets(
    DatasetFacts(
        title=(
            "PhysioNet/CinC Challenge 2012: in-hospital death from the first 48 hours in intensive "
            "care, irregularly observed"
        ),
        views={
            "": IRREGULAR,
            "mortality": _predict_death(
                IRREGULAR, "in-hospital death, from the observations at their own times"
            ),
            "grid": GRID,
            "mortality-grid": _predict_death(
                GRID, "in-hospital death, from the observations on a grid of hours"
            ),
        },
        licence="ODC-BY 1.0",
        url="https://physionet.org/content/challenge-2012/1.0.0/",
        download=(
            "wget -r -N -c -np -nH --cut-dirs=3 https://physionet.org/files/challenge-2012/1.0.0/"
        ),
        layout="set-a.tar.gz, set-b.tar.gz (set-c.tar.gz) with Outcomes-a.txt, Outcomes-b.txt "
        "(Outcomes-c.txt), or the archives unpacked as set-a/132539.txt and so on; of several "
        "forms of a set one is read: the folder, else the .tar.gz, else the .zip",
        paper={},
        rules={
            "units": (
                "a set: `set-a` with all its stays; a damaged stay is counted, the others are used"
            ),
            "times": (
                "hours and minutes since admission, 00:00 to 48:00; several variables of one time "
                "are one row"
            ),
            "repeated": "of several values of one variable at one time the last one is used; "
            "volumes (Urine) are added",
            "descriptors": "Age, Gender (0 female, 1 male), Height and four indicators of ICUType "
            "are channels observed at 00:00, beside the 37 variables; -1 is unknown: missing",
            "plausible": "values outside of these ranges are missing: "
            + "; ".join(f"{name} {low:g} to {high:g}" for name, (low, high) in PLAUSIBLE.items())
            + (
                "; others below 0. FiO2 is a fraction: values from 21 to 100, which are percent, "
                "are counted and not converted"
            ),
            "copies": (
                "a stay that is there twice is used once, with a warning; one whose copies differ, "
                "in text or outcome, is left out"
            ),
            "labels": (
                f"{LABEL} of the outcomes; Length_of_stay, SAPS-I, SOFA and Survival are "
                "known only later and are not read"
            ),
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
    with_stays = {
        letter: files for letter, files in sorted(sets.items()) if files.archive or files.stays
    }
    if not with_stays:
        raise input_error(
            Reason.NO_INPUT,
            f"no stays among {len(source.files)} files",
            "expected set-a.tar.gz, or a folder set-a with 132539.txt and so on",
            "Give the folder that holds set-a and Outcomes-a.txt",
        )
    claimed = [*unread, *chain.from_iterable(files.files for files in sets.values())]
    yield from report_unclaimed(source, {"": {path: path for path in claimed}}, LAYOUT)
    yield from remarks
    copies = _find_copies(source, with_stays)
    for letter, files in sorted(sets.items()):
        if letter in with_stays:
            yield _list_unit(source, letter, files, copies[letter])
        else:
            yield input_warning(
                Reason.UNMATCHED_LABELS,
                f"has no set-{letter} beside it",
                "it is not read",
                file=files.outcomes,
            )


def _list_unit(
    source: Source, letter: str, files: StaySet, copies: Mapping[str, Finding]
) -> IngestUnit:
    """A set, or why it cannot be read; `copies`: as of `_find_copies`."""
    name = f"set-{letter}"
    faults = list_rejected(source, (files.archive, files.outcomes))
    if faults:
        return make_unit(name, files.files, faults, None)
    findings = [replace(fault, level="warning") for fault in list_rejected(source, files.stays)]
    if not files.outcomes:
        findings.append(
            input_warning(
                Reason.UNMATCHED_LABELS,
                f"{name} has no Outcomes-{letter}.txt beside it",
                "its stays have no labels",
            )
        )
    paths = {path: source.path(path) for path in files.files if path in source.files}
    return make_unit(name, paths, findings, partial(read_set, paths, files, copies))


def _find_sets(source: Source) -> tuple[dict[str, StaySet], list[str], list[Finding]]:
    """Letter -> files; the files of other forms of a set, which are not read, and a warning for
    each form.

    Raises UserError: as `_group_files`.
    """
    sets: dict[str, StaySet] = {}
    unread: list[str] = []
    remarks: list[Finding] = []
    for letter, forms in _group_files(source).items():
        files = sets[letter] = StaySet(outcomes="".join(forms.pop("outcomes", ())))
        if not forms:
            continue
        # the first that may be opened
        order = [form for form in FORMS if form in forms]
        chosen = min(order, key=lambda form: source.rejected.keys() >= set(forms[form]))
        if chosen == "folder":
            files.stays = forms[chosen]
        else:
            (files.archive,) = forms[chosen]
        for form in order:
            if form != chosen:
                unread += forms[form]
                remarks.append(
                    input_warning(
                        Reason.DUPLICATES,
                        f"set-{letter} is read from {safe_text(files.place)}",
                        "this copy of it is not read",
                        "Remove the copy that you do not want",
                        file=_locate_form(form, forms[form][0]),
                    )
                )
    return sets, unread, remarks


def _group_files(source: Source) -> dict[str, dict[str, list[str]]]:
    """Letter of a set -> `outcomes` or a form -> files.

    Raises UserError (config, exit 2) for a set that is there twice in one form: which of them is
    meant is unknown.
    """
    sets: dict[str, dict[str, list[str]]] = {}
    for path in list_paths(source):
        for form, pattern in {"outcomes": OUTCOMES, **FORMS}.items():
            match = pattern.fullmatch(path)
            if match is None:
                continue
            same = sets.setdefault(match[1].lower(), {}).setdefault(form, [])
            if same and _locate_form(form, same[0]) != _locate_form(form, path):
                what = "table" if form == "outcomes" else "set"
                other = safe_text(_locate_form(form, same[0]))
                raise usage_error(
                    f"the {what} is there twice, also as {other}",
                    "expected one copy",
                    "Remove one of them",
                    file=path,
                )
            same.append(path)
    return sets


def _locate_form(form: str, path: str) -> str:
    """The folder of a stay, any other file itself."""
    return PurePosixPath(path).parent.as_posix() if form == "folder" else path


def _find_copies(source: Source, sets: Mapping[str, StaySet]) -> dict[str, dict[str, Finding]]:
    """Letter -> RecordID -> why this set's copy of a stay that another set has too is not used.

    Of equal ones with equal outcomes one is used, of others none: which is right is unknown. A set
    that cannot be read is left to its unit.
    """
    unused: dict[str, dict[str, Finding]] = {letter: {} for letter in sets}
    copies = _gather_copies(source, sets) if len(sets) > 1 else {}
    for name, same in sorted(copies.items()):
        differ = len({copy.digest for copy in same}) > 1
        differ |= len({copy.death for copy in same} - {None}) > 1
        # one with an outcome, if any has it
        used, *others = sorted(same, key=lambda copy: (copy.death is None, copy.letter))
        for other in others:
            if other.letter == used.letter:
                continue
            for copy, counterpart in ((other, used), (used, other))[: 1 + differ]:
                unused[copy.letter][name] = _describe_copy(
                    copy.file, counterpart.file, sets[copy.letter].place, differ=differ
                )
    return unused


def _gather_copies(source: Source, sets: Mapping[str, StaySet]) -> dict[str, list[StayCopy]]:
    """RecordID -> the copies of its stay in the sets that can be read."""
    copies: dict[str, list[StayCopy]] = {}
    for letter, files in sets.items():
        if files.archive not in source.rejected:
            with suppress(UserError, OSError):
                for name, copy in _list_copies(source, letter, files):
                    copies.setdefault(name, []).append(copy)
    return copies


def _list_copies(source: Source, letter: str, files: StaySet) -> list[tuple[str, StayCopy]]:
    """RecordID and copy of each stay of a set. Raises UserError and OSError as `read_set`."""
    paths = {path: source.path(path) for path in files.files if path in source.files}
    deaths: Mapping[str, str] = {}
    if files.outcomes in paths:
        deaths = _read_outcomes(paths[files.outcomes], files.outcomes)[0]
    texts, _ = _group_texts(paths, files)
    return [
        (name, StayCopy(letter, file, sha256(content).digest(), deaths.get(name)))
        for name, same in texts.items()
        for file, content in same
    ]


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
    return Finding(
        Reason.DUPLICATE_KEY,
        f"{safe_text(other)} is of the same stay and differs, in its text or its outcome",
        "none of them is used",
        "Remove the wrong one",
        file=file,
    )


def read_set(paths: Mapping[str, Path], files: StaySet, copies: Mapping[str, Finding]) -> Records:
    """All stays of a set; damaged ones are counted. `paths`: path relative to the source -> file;
    `copies`: as of `_find_copies`.

    Raises UserError: as `archives.read_members`, and schema, duplicate_key and so on for the
    outcomes.
    """
    deaths: dict[str, str] = {}
    rows: list[SourceRows] = []
    findings: list[Finding] = []
    if files.outcomes:
        deaths, rows, findings = _read_outcomes(paths[files.outcomes], files.outcomes)
    texts, others = _group_texts(paths, files)
    faults: list[Finding] = []
    stays = dict(_read_stays(texts, files.place, copies, deaths, faults))
    seen = sum(map(len, texts.values()))
    if not stays and all(fault.level == "error" for fault in faults):
        raise _no_stays_error(faults, seen, files.place)
    rows.append(account_rows(files.place, "stays", seen, faults))
    findings += [
        *report_other_files("files that are not named as a stay (132539.txt)", others, files.place),
        *tables.group_findings(faults),
        *(finding.at(files.place) for finding in _report_stays(list(stays.values()))),
    ]
    if files.outcomes:
        findings += _report_outcomes(stays, deaths, files.outcomes)
    return Records(records=[stay.record for stay in stays.values()], rows=rows, findings=findings)


def _read_stays(
    texts: Mapping[str, Sequence[tuple[str, bytes]]],
    place: str,
    copies: Mapping[str, Finding],
    deaths: Mapping[str, str],
    faults: list[Finding],
) -> Iterator[tuple[str, Stay]]:
    """RecordID and stay of each that can be used; `faults` gets why others cannot."""
    for name, same in texts.items():
        repeated = _compare_texts(same, place)
        faults += repeated
        if select_errors(repeated):
            continue
        stay = copies.get(name) or _read_stay(name, *same[0], deaths.get(name))
        if isinstance(stay, Finding):
            faults.append(stay)
        else:
            yield name, stay


def _read_stay(name: str, file: str, content: bytes, death: str | None) -> Stay | Finding:
    """A stay from its text, or the fault of its file."""
    try:
        return parse_stay(name, content, death)
    except UserError as error:
        return replace(error.finding, file=file)


def _group_texts(
    paths: Mapping[str, Path], files: StaySet
) -> tuple[dict[str, list[tuple[str, bytes]]], list[str]]:
    """RecordID -> file and text of each copy; and names of other files."""
    texts: dict[str, list[tuple[str, bytes]]] = {}
    others: list[str] = []
    for path, content in _list_stays(paths, files):
        name = PurePosixPath(path).name
        if match := STAY.fullmatch(path):
            texts.setdefault(match[1], []).append((files.locate(path), content))
        elif not name.startswith(".") and not LAYOUT.fullmatch(name):
            others.append(name)
    return texts, others


def _compare_texts(copies: Sequence[tuple[str, bytes]], place: str) -> list[Finding]:
    """Why copies of a stay in one set are not used: all but the first where they are equal, none
    is where they differ.
    """
    (first, content), *others = copies
    different = [file for file, text in others if text != content]
    pairs = [(first, different[0])] if different else []
    pairs += [(file, first) for file, _ in others]
    return [_describe_copy(file, other, place, differ=bool(different)) for file, other in pairs]


def _no_stays_error(faults: Sequence[Finding], seen: int, place: str) -> UserError:
    """The error for a set without a usable stay."""
    none = Finding(Reason.NO_INPUT, "holds no stays")
    worst = next(iter(tables.group_findings(faults)), none)
    return input_error(
        worst.code,
        f"no stay of {seen} can be used: {worst.problem}",
        worst.requirement,
        worst.hint,
        file=place,
    )


def _report_outcomes(
    stays: Mapping[str, Stay], deaths: Mapping[str, str], file: str
) -> list[Finding]:
    """Warnings about stays without an outcome, and outcomes without a stay."""
    unlabelled = sum("death" not in stay.record.attributes for stay in stays.values())
    unused = len(deaths.keys() - stays.keys())
    report = partial(report_count, Reason.UNMATCHED_LABELS, file=file)
    return [
        *report("stays without an outcome", unlabelled, "they have no label"),
        *report("outcomes without a stay", unused, "not used"),
    ]


def _list_stays(paths: Mapping[str, Path], files: StaySet) -> Iterator[tuple[str, bytes]]:
    """Path and text of each file in the archive or the folder of a set."""
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
    deaths: dict[str, str] = {}
    rows: dict[str, int] = {}
    faults: list[Finding] = []
    seen = 0
    with locate_errors(rel):
        for row in tables.read_rows(path, ("RecordID", LABEL), key=("RecordID",)):
            seen += 1
            if isinstance(row, Finding):
                faults.append(row)
                continue
            number, death = map(parse_integer, row.cells)
            name, cell = str(number), f"the cell of row {row.row}"
            if number is None:
                fault = Finding(
                    Reason.IDENTIFIER,
                    f"{cell} is no number of a stay",
                    "expected a whole number",
                    field="RecordID",
                    row=row.row,
                )
                faults.append(fault)
            elif name in rows:  # in another spelling
                deaths.pop(name, None)
                fault = Finding(
                    Reason.DUPLICATE_KEY,
                    f"rows {rows[name]} and {row.row} are of one stay",
                    "its outcome is not used",
                    field="RecordID",
                    row=row.row,
                )
                faults.append(fault)
            elif death in {0, 1}:
                deaths[name], rows[name] = DEATH[death], row.row
            else:
                faults.append(
                    Finding(Reason.LABEL, f"{cell} is neither 0 nor 1", field=LABEL, row=row.row)
                )
    findings = [finding.at(rel) for finding in tables.group_findings(faults)]
    return deaths, [account_rows(rel, "outcomes", seen, faults)], findings


def parse_stay(name: str, content: bytes, death: str | None) -> Stay:
    """One stay from its text. Raises UserError: encoding, schema, row_width, timestamps,
    not_numeric, identifier, with the row.
    """
    table = decode_table(content)
    values: dict[tuple[int, str], float] = {}
    odd, unknown, implausible = Counter[str](), Counter[str](), Counter[str]()
    percent = latest = 0
    for row, minute, variable, value in _parse_rows(table):
        if minute < latest:
            odd["unordered"] = 1
        latest = minute
        if variable == "RecordID":
            _check_id(name, value, row)
        elif variable not in UNITS and variable not in DESCRIPTORS:
            odd["foreign"] += 1
        elif value == UNKNOWN and (variable in DESCRIPTORS or variable == "Weight"):
            unknown[variable] += 1
        elif not _is_plausible(variable, value):
            implausible[variable] += 1
            percent += variable == "FiO2" and PERCENT[0] <= value <= PERCENT[1]
        else:
            key, is_volume = (minute, variable), variable in VOLUMES
            odd["added" if is_volume else "repeated"] += key in values
            values[key] = value + (values.get(key, 0.0) if is_volume else 0.0)
    odd["cut"] = not table.endswith(("\n", "\r"))
    odd["bare"] = {variable for _, variable in values} <= {*DESCRIPTORS, "Weight"}
    return Stay(_make_record(name, values, death), odd, unknown, implausible, percent)


def _check_id(name: str, value: float, row: int) -> None:
    """Raises UserError: identifier, for a RecordID that differs from the name of the file."""
    if value != float(name):
        problem = "states another RecordID than its name"
        raise input_error(Reason.IDENTIFIER, problem, "expected the same", row=row)


def _is_plausible(variable: str, value: float) -> bool:
    low, high = PLAUSIBLE.get(variable, (0.0, np.inf))
    return low <= value <= high and value in CODES.get(variable, (value,))


def _parse_rows(table: str) -> Iterator[tuple[int, int, str, float]]:
    """Number of the row, minutes since admission, variable and value of each row."""
    header, *lines = table.splitlines() or [""]
    columns = [cell.strip() for cell in header.split(",")]
    wanted = ("Time", "Parameter", "Value")
    if not set(wanted) <= set(columns):
        raise input_error(
            Reason.SCHEMA,
            f"has no columns {', '.join(wanted)}",
            "expected them in the first line",
            row=1,
        )
    places = list(map(columns.index, wanted))
    for row, line in enumerate(lines, 2):
        if not line.strip():
            continue
        cells = line.split(",")
        if len(cells) != len(columns):
            raise input_error(
                Reason.ROW_WIDTH,
                f"row {row} has {len(cells)} cells",
                f"expected {len(columns)}",
                row=row,
            )
        clock, variable, value = (cells[i].strip() for i in places)
        minute, number = _parse_cells(clock, value, row)
        yield row, minute, variable, number


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


def _report_stays(stays: Sequence[Stay]) -> Iterator[Finding]:
    """What is odd in the stays of a set, in words with counts."""
    odd, unknown, implausible = Counter[str](), Counter[str](), Counter[str]()
    for stay in stays:
        odd.update(stay.odd)
        unknown.update(stay.unknown)
        implausible.update(stay.implausible)
    for variable, count in sorted(unknown.items()):
        yield from report_count(
            Reason.MISSING_VALUES,
            f"stays with an unknown {variable} (-1)",
            count,
            "missing",
            field=variable,
        )
    for variable, count in sorted(implausible.items()):
        yield from report_count(
            Reason.PHYSICAL_RANGE,
            f"values of {variable} that are not {_describe_range(variable)}",
            count,
            "missing",
            field=variable,
        )
    percent = [stay.percent for stay in stays if stay.percent]
    if percent:
        low, high = PERCENT
        counts = f"{sum(percent)}, in {len(percent)} stays"
        yield input_warning(
            Reason.UNIT,
            f"values of FiO2 from {low:g} to {high:g}, which are percent: {counts}",
            "expected fractions: they are missing",
            "Divide them by 100",
            field="FiO2",
            count=sum(percent),
        )
    for key, (code, text, effect, hint) in ODDITIES.items():
        yield from report_count(code, text, odd[key], effect, hint)


def _describe_range(variable: str) -> str:
    """The values that a variable may have, in words."""
    if variable in CODES:
        return f"one of {', '.join(f'{code:g}' for code in CODES[variable])}"
    if variable in PLAUSIBLE:
        low, high = PLAUSIBLE[variable]
        return f"between {low:g} and {high:g}"
    return "0 or more"
