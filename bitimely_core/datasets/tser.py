"""Problems of the UEA, UCR and Monash archives in .ts files; the code is shared by PPG-DaLiA,
IEEEPPG and BIDMC in that form.

A problem is two files, `NAME_TRAIN.ts` and `NAME_TEST.ts`; a case is a recording of its own with
one label. The archives hold no subjects: cases that were cut from one recording with overlap are
identified by the samples they share, so that no recording is in two splits. Each case carries its
split as an attribute: TEST is test, a part of TRAIN is validation (see RULES).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

import numpy as np

from bitimely_core.datasets.raw_files import make_unit
from bitimely_core.errors import (
    Finding,
    Reason,
    UserError,
    input_error,
    input_warning,
    safe_text,
    usage_error,
)
from bitimely_core.formats import ts as format_ts
from bitimely_core.formats.source import (
    Source,
    locate_errors,
    report_faults,
    report_unclaimed,
    require_source,
)
from bitimely_core.registry import DatasetFacts, View, datasets
from bitimely_core.types import (
    SPLITS,
    AttributeValue,
    IngestOptions,
    IngestUnit,
    Record,
    Records,
    Signal,
    SourceRows,
    count_reasons,
)

Name = TypeVar("Name", str, int)

NAME = re.compile(r"(.+)_(TRAIN|TEST)\.ts", re.IGNORECASE | re.DOTALL)
GROUP = re.compile(r".*-[0-9]{5}", re.DOTALL)  # a subject id
LAYOUT = re.compile(
    r"(RECORDS|SHA256SUMS|LICENSE|README|index\.html).*|.*\.(txt|md|json|py)", re.IGNORECASE
)
MIN_VALUES = 64  # values below which shared samples prove nothing
# in a stretch of samples that may prove that two cases share it: a flat line proves nothing
MIN_CHANGES = 8
MAX_SPREAD = 16  # a clock may leave this many grid points empty for each sample

RULES = {
    "splits": "cases of TEST are test; a tenth of the recordings of TRAIN is validation. A "
    "recording whose cases stand in both files is train throughout; where most of them do, the "
    "files split inside recordings and all are split again, 80/10/10 by recording",
    "recordings": (
        f"cases of at least {MIN_VALUES} values that share a stretch of a quarter of a case "
        "are of one recording, and so are equal cases"
    ),
    "labels": (
        "a case without a label, with one that is no class or not finite, or with another number "
        "of channels is excluded and counted"
    ),
    "missing": "? and NaN are missing values (mask), never numbers",
}
LENGTHS = (
    "cases that differ in length are filled up at their ends with missing values to the longest, "
    "so that one window is one case"
)


class TserChannel(NamedTuple):
    """A channel of every case."""

    name: str
    rate: float  # Hz
    unit: str
    length: int | None = None  # values a case; None: any


@dataclass(frozen=True, kw_only=True)
class TserLayout:
    """Properties of a problem beyond its files, which name nothing."""

    # attribute of a case that holds its label; "": label (classes) or value (numbers)
    target: str = ""
    channels: tuple[TserChannel, ...] = ()  # (): channel 1, 2, ... at 1 Hz
    subject: str = ""  # prefix of the names of subjects; "": the problem's name
    # cases are cut from long recordings: neighbours in a file may be neighbours in time
    windows: bool = False


class TserProblem(NamedTuple):
    """A problem of a source."""

    files: Mapping[str, str]  # TRAIN or TEST -> path
    layout: TserLayout


@dataclass(frozen=True, kw_only=True)
class TserFile:
    """One file of a problem. `groups` and `splits` have one entry a case: its recording, and the
    position of its split in SPLITS.
    """

    rel: str
    header: format_ts.TsHeader
    layout: TserLayout
    groups: np.ndarray  # int32 [cases]
    splits: np.ndarray  # int8 [cases]
    length: int | None = None  # every channel is filled up with missing values to this many


CASES = View(
    channels=(),
    rate=0.0,
    window=0,
    split="official",
    help="all channels of a case, no labels; one case is one window",
)
OPEN = {
    "": CASES,
    "classification": replace(
        CASES, task="classification", target="label", help="the class of a case"
    ),
    "regression": replace(CASES, task="regression", target="value", help="the number of a case"),
}


def name_unit(subjects: Iterable[str], recordings: Iterable[str]) -> str:
    """Whether the subjects of windows are recordings that were found by shared samples, since the
    archives hold no subjects.
    """
    return "recording" if all(map(GROUP.fullmatch, subjects)) else "subject"


@datasets(
    DatasetFacts(
        subject_unit=name_unit,
        title="One problem of the UEA, UCR or Monash archives (.ts), classification or regression",
        views=OPEN,
        licence="as the problem's",
        url="https://www.timeseriesclassification.com/",
        download="NAME_TRAIN.ts and NAME_TEST.ts of one problem from the archive, into one folder",
        layout="NAME_TRAIN.ts and NAME_TEST.ts of one problem; either alone is split by recording",
        paper={},
        rules={
            **RULES,
            "rate": (
                "the files name neither channels, nor units, nor rates: channel 1, 2, ... at 1 Hz; "
                "with timestamps, at their clock"
            ),
            "lengths": LENGTHS,
            "subjects": (
                "recordings that were found by their shared samples; other cases count as "
                "independent, as in the archives"
            ),
        },
    )
)
def ts(source: Source | None, options: IngestOptions) -> Iterator[IngestUnit | Finding]:
    """A problem in .ts files: NAME_TRAIN.ts and NAME_TEST.ts, one recording a case."""
    source = require_source(source)
    problems = find_problems(source)
    if len(problems) > 1:
        names = ", ".join(safe_text(name, 60) for name in list(problems)[:10])
        raise usage_error(
            f"{len(problems)} problems: {names}", "expected one", "Give the folder of one of them"
        )
    yield from report_unclaimed(source, problems, LAYOUT)
    for files in problems.values():
        yield from list_units(source, [TserProblem(files, TserLayout())])


def find_problems(source: Source) -> dict[str, dict[str, str]]:
    """Problem (folder and name) -> TRAIN or TEST -> file. A .ts file whose name has neither counts
    as TRAIN.
    """
    problems: dict[str, dict[str, str]] = {}
    for path in [*source.files, *source.rejected]:
        if PurePosixPath(path).suffix.lower() == ".ts":
            match = NAME.fullmatch(path)
            problem, kind = (match[1], match[2].upper()) if match else (path[:-3], "TRAIN")
            problems.setdefault(problem, {})[kind] = path
    return problems


# --- a problem, or several of one source


def list_units(source: Source, problems: Sequence[TserProblem]) -> Iterator[IngestUnit | Finding]:
    """The files of one or several problems that were cut from the same recordings, as units.

    Raises UserError: faults that make a file, and so the problem, unusable: header_syntax,
    schema_mismatch, empty_file and so on.
    """
    headers: dict[str, format_ts.TsHeader] = {}
    remarks: dict[str, list[Finding]] = {}
    for problem in problems:
        headers |= _read_headers(source, problem.files)
        remarks |= _check_pair(source, problem.files, headers)
    rows = [
        (rel, kind, problem.layout) for problem in problems for kind, rel in problem.files.items()
    ]
    opened = [(source.path(rel), headers[rel]) for rel, _, _ in rows]
    has_channels = any(layout.channels for _, _, layout in rows)
    length = None if has_channels else _find_padded_length(opened)
    groups, is_credible = group_cases(opened)
    # neighbours in a file may overlap although they share no samples
    is_unknown = not is_credible and any(layout.windows for _, _, layout in rows)
    splits, findings = assign_case_splits(groups, [kind for _, kind, _ in rows], windows=is_unknown)
    yield from (finding.at(rows[-1][0]) for finding in findings)
    if is_unknown:
        yield input_warning(
            Reason.IDENTIFIER,
            "no two cases share samples, so their recordings cannot be identified",
            "the archive's own split is kept; a split by subject would be one by random windows",
            file=rows[0][0],
        )
    for (rel, _, layout), (path, header), group, split in zip(
        rows, opened, groups, splits, strict=True
    ):
        file = TserFile(
            rel=rel, header=header, layout=layout, groups=group, splits=split, length=length
        )
        findings = remarks.get(rel, [])
        yield make_unit(rel, (rel,), findings, partial(read_problem, path, file))


def _read_headers(source: Source, files: Mapping[str, str]) -> dict[str, format_ts.TsHeader]:
    """File -> its header."""
    headers = {}
    for rel in files.values():
        with locate_errors(rel):
            headers[rel] = format_ts.read_header(source.path(rel))
    return headers


def _check_pair(
    source: Source, files: Mapping[str, str], headers: Mapping[str, format_ts.TsHeader]
) -> dict[str, list[Finding]]:
    """File -> warnings about TRAIN and TEST: one is missing, or cases are in both. Raises UserError
    (schema_mismatch) where they do not fit.
    """
    if len(files) == 1:
        ((kind, rel),) = files.items()
        return {
            rel: [
                input_warning(
                    Reason.MISSING_PAIR,
                    f"has no {'TEST' if kind == 'TRAIN' else 'TRAIN'} file",
                    "split 80/10/10 by recording",
                    file=rel,
                )
            ]
        }
    train, test = files["TRAIN"], files["TEST"]
    try:
        format_ts.check_compatible(headers[train], headers[test], test)
    except UserError as error:  # both files are named: either may be the wrong one
        error.requirement = error.requirement.replace("TRAIN", PurePosixPath(train).name, 1)
        raise
    repeated = format_ts.find_duplicates(source.path(train), source.path(test))
    return {test: [repeated.at(test)] if repeated else []}


def read_problem(path: Path, file: TserFile) -> Records:
    """All cases of a file, each a recording with its label; faulty ones are counted."""
    records: list[Record] = []
    faults: list[Finding] = []
    findings = [finding.at(file.rel) for finding in file.header.findings]
    number = 0
    with locate_errors(file.rel):
        for case in format_ts.read_cases(path, file.header):
            if isinstance(case, Finding) and case.row is None:
                findings.append(case.at(file.rel))
                continue
            if isinstance(case, Finding):
                faults.append(case.at(file.rel))
            else:
                try:
                    records.append(_make_record(case, number, file))
                except UserError as error:
                    faults.append(replace(error.finding, row=case.row, file=file.rel))
            number += 1
    incomplete = sum(map(_has_missing_values, records))
    account = SourceRows(
        file=file.rel,
        kind="cases",
        seen=file.header.cases,
        quarantined=count_reasons(faults),
        warned={str(Reason.MISSING_VALUES): incomplete} if incomplete else {},
    )
    return Records(records=records, rows=[account], findings=[*findings, *report_faults(faults)])


def _make_record(case: format_ts.TsCase, number: int, file: TserFile) -> Record:
    """Case `number`, from 0, of a file. Raises UserError as `_make_signals`."""
    stem = PurePosixPath(file.rel).stem
    attributes: dict[str, AttributeValue] = {"split": SPLITS[file.splits[number]]}
    if case.label is not None:
        key = "label" if isinstance(case.label, str) else "value"
        attributes[file.layout.target or key] = case.label
    group = int(file.groups[number]) + 1
    return Record(
        recording_id=f"{stem}-{number + 1:06d}",
        subject_id=f"{file.layout.subject or problem_name(stem)}-{group:05d}",
        signals=_make_signals(case, file),
        attributes=attributes,
    )


def _has_missing_values(record: Record) -> bool:
    return any(bool(np.isnan(signal.samples).any()) for signal in record.signals)


def problem_name(stem: str) -> str:
    """The problem's name in that of a file."""
    return re.sub(r"_(TRAIN|TEST)$", "", stem, flags=re.IGNORECASE)


def _make_signals(case: format_ts.TsCase, file: TserFile) -> list[Signal]:
    """The channels of a case, named by their lengths where the layout states them, else in order.

    Raises UserError: length, dimensions, timestamps.
    """
    channels = file.layout.channels
    if channels:
        return _name_by_length(case.channels, channels)
    signals = []
    clocks = case.times or (None,) * len(case.channels)
    for i, (values, clock) in enumerate(zip(case.channels, clocks, strict=True), 1):
        placed, rate = place_on_grid(values, clock)
        signals.append(Signal(f"channel {i}", rate, "", _pad_values(placed, file.length)))
    return signals


def _name_by_length(values: Sequence[np.ndarray], channels: Sequence[TserChannel]) -> list[Signal]:
    """The values of each channel: of those that no channel has yet the first of its length."""
    remaining = list(values)
    signals = []
    for channel in channels:
        fitting = [i for i, x in enumerate(remaining) if channel.length in {None, len(x)}]
        if not fitting:
            lengths = ", ".join(str(len(x)) for x in values[:8])
            wanted = ", ".join(str(channel.length) for channel in channels)
            raise input_error(
                Reason.LENGTH, f"has channels of {lengths} values", f"expected {wanted}"
            )
        samples = remaining.pop(fitting[0])
        signals.append(Signal(channel.name, channel.rate, channel.unit, samples))
    if remaining:
        raise input_error(
            Reason.DIMENSIONS, f"has {len(values)} channels", f"expected {len(channels)}"
        )
    return signals


def _pad_values(values: np.ndarray, length: int | None) -> np.ndarray:
    """float32, NaN after the last value up to `length`."""
    if length is None or len(values) >= length:
        return values
    return np.concatenate([values, np.full(length - len(values), np.nan, np.float32)])


def _find_padded_length(files: Sequence[tuple[Path, format_ts.TsHeader]]) -> int | None:
    """Length of the longest channel of a problem whose cases differ in length; None where none is
    to be filled up.
    """
    headers = [header for _, header in files]
    lengths = {header.lengths for header in headers}
    if any(header.timestamps for header in headers) or (len(lengths) == 1 and None not in lengths):
        return None
    counts: list[int] = []  # values of each channel of each case
    for path, header in files:
        labelled = header.task != "none"
        for row, line, _ in format_ts.read_lines(path):
            if row > header.data:
                counts += format_ts.count_values(line, timestamps=False, labelled=labelled)
    longest = max(counts, default=0)
    return longest if longest * len(counts) <= MAX_SPREAD * sum(counts) else None


def place_on_grid(values: np.ndarray, times: np.ndarray | None) -> tuple[np.ndarray, float]:
    """Values [n] on the grid of their smallest step (NaN where there is none) and its rate in Hz; 1
    Hz without a clock.

    `times`: float64 [n], increasing, in seconds. Raises UserError: timestamps, for times that do
    not fit a grid.
    """
    if times is None or len(times) < 2:
        return values, 1.0
    step = float(np.diff(times).min())
    exact = (times - times[0]) / step
    places = np.rint(exact).astype(np.int64)
    size = int(places[-1]) + 1
    if size > MAX_SPREAD * len(places) or np.abs(exact - places).max() > 0.01:
        raise input_error(
            Reason.TIMESTAMPS, "the times do not fit a regular grid", "resample or remove the case"
        )
    if size == len(places):
        return values, 1.0 / step
    grid = np.full(size, np.nan, np.float32)
    grid[places] = values
    return grid, 1.0 / step


# --- recordings, found by the samples that cases share


def group_cases(files: Sequence[tuple[Path, format_ts.TsHeader]]) -> tuple[list[np.ndarray], bool]:
    """Which cases of `files` were cut from one recording.

    Of the first channel of each case a few stretches are chosen by their content, so that two cases
    that overlap by three eighths choose a common one wherever they begin; equal stretches join
    their cases, and so do equal cases.

    Returns:
        int32 [cases] for each file, recordings numbered in the order of their first case; whether
        they are credible (at most half as many recordings as cases).
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    marks: list[np.ndarray] = []
    owners: list[np.ndarray] = []
    for path, header in files:
        for hashes in _hash_cases(path, header):
            owners.append(np.full(len(hashes), len(marks)))
            marks.append(hashes)
    mark, owner = np.concatenate(marks), np.concatenate(owners)
    order = np.lexsort((owner, mark))
    mark, owner = mark[order], owner[order]
    same = np.flatnonzero(mark[1:] == mark[:-1])
    cases = len(marks)
    pairs = coo_array((np.ones(len(same)), (owner[same], owner[same + 1])), shape=(cases, cases))
    count, numbers = connected_components(pairs, directed=False)
    _, firsts, groups = np.unique(numbers, return_index=True, return_inverse=True)
    groups = np.argsort(np.argsort(firsts))[groups].astype(np.int32)
    ends = np.cumsum([header.cases for _, header in files])
    return np.split(groups, ends[:-1]), bool(2 * count <= cases)


def _hash_cases(path: Path, header: format_ts.TsHeader) -> Iterator[np.ndarray]:
    """Hashes (uint64) of each case: of its text without the label, and of the chosen stretches of
    one that is long enough.
    """
    for row, line, _ in format_ts.read_lines(path):
        if row <= header.data:
            continue
        text = hashlib.blake2b(format_ts.strip_label(line, header), digest_size=8).digest()
        hashes = np.frombuffer(text, np.uint64)
        field = b"" if header.timestamps else line.split(b":", 1)[0]
        if field.count(b",") + 1 >= MIN_VALUES and not field.translate(None, format_ts.PLAIN):
            with suppress(ValueError):
                values = np.array(list(map(float, field.split(b","))), np.float32)
                hashes = np.concatenate([hashes, hash_stretches(values)])
        yield hashes


@lru_cache(1)
def _hash_powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Powers [count] of an odd number modulo 2^64, and of its inverse."""
    base = 0x9E3779B97F4A7C15
    factors = np.ones((2, count), np.uint64)
    factors[:, 1:] = np.array([[base], [pow(base, -1, 1 << 64)]], np.uint64)
    powers, inverse = np.cumprod(factors, axis=1)
    return powers, inverse


def hash_stretches(values: np.ndarray) -> np.ndarray:
    """Hashes (uint64) of stretches of a quarter of `values` (float32 [n]), of every n/8 places in a
    row the smallest one.
    """
    n = len(values)
    length, width = n // 4, max(1, n // 8)
    powers, inverse = _hash_powers(n)
    bits = np.ascontiguousarray(values + 0.0).view(np.uint32).astype(np.uint64)  # + 0.0: one zero
    mixed = _mix_hash(bits) * powers
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed)])
    rolling = _mix_hash((sums[length:] - sums[:-length]) * inverse[: n - length + 1])
    changes = np.concatenate([[0], np.cumsum(values[1:] != values[:-1])])
    flat = changes[length - 1 :] - changes[: n - length + 1] < MIN_CHANGES
    worst = np.uint64(2**64 - 1)
    rolling[flat] = worst
    windows = np.lib.stride_tricks.sliding_window_view(rolling, min(width, len(rolling)))
    chosen = np.unique(windows.min(axis=1))
    return chosen[chosen != worst]


def _mix_hash(x: np.ndarray) -> np.ndarray:
    """The finaliser of MurmurHash3 on uint64."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ (x >> np.uint64(33))) * np.uint64(factor)
    return x ^ (x >> np.uint64(33))


# --- splits


def split_by_hash(
    names: Sequence[str], *, test: bool = True, sizes: tuple[int, int] | None = None
) -> dict[str, str]:
    """Name -> split: in the order of the names' hashes the last are test, those before them
    validation, the others train.

    `sizes`: numbers of validation and test; None: a tenth each, at least one. Fewer than 3 names
    are all train.
    """
    order = sorted(set(names), key=lambda name: hashlib.sha256(f"0|{name}".encode()).digest())
    if len(order) < 3:
        return dict.fromkeys(order, "train")
    tenth = max(1, round(len(order) / 10))
    validation, tests = sizes or (tenth, tenth)
    return _name_splits(order, validation, tests if test else 0)


def _name_splits(names: Sequence[Name], validation: int, tests: int) -> dict[Name, str]:
    """Name -> split: the last are test, those before them validation, the others train."""
    held_out = ["validation"] * validation + ["test"] * tests
    return dict(zip(names, ["train"] * (len(names) - len(held_out)) + held_out, strict=True))


def assign_case_splits(
    groups: Sequence[np.ndarray], kinds: Sequence[str], *, windows: bool
) -> tuple[list[np.ndarray], list[Finding]]:
    """The split of every case, by its recording: int8 [cases] a file, positions in SPLITS;
    findings.

    `groups`: recordings, int32 [cases], one array a file; `kinds`: TRAIN or TEST, one a file.
    `windows`: recordings are unknown and cases
    may overlap: then validation is a stretch at the end of TRAIN, not a random part.
    """
    inside: dict[str, set[int]] = {"TRAIN": set(), "TEST": set()}
    for group, kind in zip(groups, kinds, strict=True):
        inside[kind] |= set(group.tolist())
    train, test = inside["TRAIN"], inside["TEST"]
    both = train & test
    split_groups = _split_groups_in_order if windows else _split_groups_by_hash
    split: dict[int, str] = {}
    if train and test and 2 * len(both) <= len(test):
        split = dict.fromkeys(test, "test") | dict.fromkeys(both, "train")
        split |= split_groups(sorted(train - both), test=False)
        effect = "they are train throughout"
    else:
        split = split_groups(sorted(train | test), test=True)
        effect = "the files split inside recordings: all are split again, by recording"
    places = [
        np.array([SPLITS.index(split[i]) for i in group.tolist()], np.int8) for group in groups
    ]
    return places, [_shared_finding(len(both), effect)] if both else []


def _split_groups_by_hash(groups: Sequence[int], *, test: bool) -> dict[int, str]:
    splits = split_by_hash(list(map(str, groups)), test=test)
    return {group: splits[str(group)] for group in groups}


def _split_groups_in_order(groups: Sequence[int], *, test: bool) -> dict[int, str]:
    """The last tenth in the order of the file is test (with `test`), the tenth before it
    validation.
    """
    tenth = math.ceil(len(groups) / 10) if len(groups) >= 3 else 0
    return _name_splits(groups, tenth, tenth if test else 0)


def _shared_finding(count: int, effect: str) -> Finding:
    recordings = f"{count} recordings have" if count > 1 else "1 recording has"
    return input_warning(
        Reason.DUPLICATE_ACROSS_SPLITS,
        f"{recordings} cases in TRAIN and in TEST",
        effect,
        count=count,
    )
