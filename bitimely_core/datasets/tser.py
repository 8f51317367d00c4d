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
from dataclasses import dataclass, replace
from functools import partial
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
    "splits": "cases of TEST are test; a tenth of the recordings of TRAIN is validation. A recording whose cases stand in both files is "
    "train throughout; where most of them do, the files split inside recordings and all are split again, 80/10/10 by recording",
    "recordings": f"cases of at least {MIN_VALUES} values that share a stretch of a quarter of a case are of one recording, and so are equal cases",
    "labels": "a case without a label, with one that is no class or not finite, or with another number of channels is excluded and counted",
    "missing": "? and NaN are missing values (mask), never numbers",
}
LENGTHS = "cases that differ in length are filled up at their ends with missing values to the longest, so that one window is one case"


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
    "classification": View(
        channels=(),
        rate=0.0,
        window=0,
        task="classification",
        target="label",
        split="official",
        help="the class of a case",
    ),
    "regression": replace(CASES, task="regression", target="value", help="the number of a case"),
}


def name_unit(subjects: Iterable[str], recordings: Iterable[str]) -> str:
    """Whether the subjects of windows are recordings that were found by shared samples, since the
    archives hold no subjects.
    """
    return "recording" if all(GROUP.fullmatch(subject) for subject in subjects) else "subject"


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
            "rate": "the files name neither channels, nor units, nor rates: channel 1, 2, ... at 1 Hz; with timestamps, at their clock",
            "lengths": LENGTHS,
            "subjects": "recordings that were found by their shared samples; other cases count as independent, as in the archives",
        },
    )
)
def ts(source: Source | None, options: IngestOptions) -> Iterator[IngestUnit | Finding]:
    """A problem in .ts files: NAME_TRAIN.ts and NAME_TEST.ts, one recording a case."""
    source = require_source(source)
    found = find_problems(source)
    if len(found) > 1:
        raise usage_error(
            f"{len(found)} problems: {', '.join(safe_text(name, 60) for name in list(found)[:10])}",
            "expected one",
            "Give the folder of one of them",
        )
    yield from report_unclaimed(source, found, LAYOUT)
    for files in found.values():
        yield from list_units(source, {"": files}, {"": TserLayout()})


def find_problems(source: Source) -> dict[str, dict[str, str]]:
    """Problem (folder and name) -> TRAIN or TEST -> file. A .ts file whose name has neither counts
    as TRAIN.
    """
    found: dict[str, dict[str, str]] = {}
    for rel in [*source.files, *source.rejected]:
        if PurePosixPath(rel).suffix.lower() == ".ts":
            named = NAME.fullmatch(rel)
            problem, kind = (named[1], named[2].upper()) if named else (rel[:-3], "TRAIN")
            found.setdefault(problem, {})[kind] = rel
    return found


# --- a problem, or several of one source


def list_units(
    source: Source, found: Mapping[str, Mapping[str, str]], layouts: Mapping[str, TserLayout]
) -> Iterator[IngestUnit | Finding]:
    """The files of one or several problems that were cut from the same recordings, as units;
    `found`: problem -> TRAIN or TEST -> file.

    Raises UserError: faults that make a file, and so the problem, unusable: header_syntax,
    schema_mismatch, empty_file and so on.
    """
    heads: dict[str, format_ts.TsHeader] = {}
    notes: dict[str, list[Finding]] = {}
    for files in found.values():
        for rel in files.values():
            with locate_errors(rel):
                heads[rel] = format_ts.read_header(source.path(rel))
            notes[rel] = []
        if len(files) == 2:
            train, test = files["TRAIN"], files["TEST"]
            try:
                format_ts.check_compatible(heads[train], heads[test], test)
            except UserError as error:  # both files are named: either may be the wrong one
                error.requirement = error.requirement.replace("TRAIN", PurePosixPath(train).name, 1)
                raise
            repeated = format_ts.find_duplicates(source.path(train), source.path(test))
            notes[test] += [repeated.at(test)] if repeated else []
        else:
            ((kind, rel),) = files.items()
            missing = "TEST" if kind == "TRAIN" else "TRAIN"
            text, wanted = f"has no {missing} file", "split 80/10/10 by recording"
            notes[rel].append(input_warning(Reason.MISSING_PAIR, text, wanted, file=rel))
    names = [(rel, kind) for files in found.values() for kind, rel in files.items()]
    windows = any(layout.windows for layout in layouts.values())
    length = (
        None
        if any(layout.channels for layout in layouts.values())
        else _find_padded_length([source.path(rel) for rel, _ in names], list(heads.values()))
    )
    groups, known = group_cases([(source.path(rel), heads[rel]) for rel, _ in names])
    placed, findings = assign_case_splits(
        groups, [kind for _, kind in names], windows=windows and not known
    )
    yield from (finding.at(names[-1][0]) for finding in findings)
    if windows and not known:
        yield input_warning(
            Reason.IDENTIFIER,
            "no two cases share samples, so their recordings cannot be identified",
            "the archive's own split is kept; a split by subject would be one by random windows",
            file=names[0][0],
        )
    layout_of = {
        rel: layouts[problem] for problem, files in found.items() for rel in files.values()
    }
    for (rel, _), group, split in zip(names, groups, placed, strict=True):
        file = TserFile(
            rel=rel,
            header=heads[rel],
            layout=layout_of[rel],
            groups=group,
            splits=split,
            length=length,
        )
        yield IngestUnit(
            name=rel,
            files=(rel,),
            read=partial(read_problem, source.path(rel), file),
            findings=tuple(notes[rel]),
        )


def read_problem(path: Path, file: TserFile) -> Records:
    """All cases of a file, each a recording with its label; faulty ones are counted."""
    stem = PurePosixPath(file.rel).stem
    records: list[Record] = []
    faults: list[Finding] = []
    findings = [finding.at(file.rel) for finding in file.header.findings]
    number = touched = 0
    with locate_errors(file.rel):
        for item in format_ts.read_cases(path, file.header):
            if isinstance(item, Finding):
                if item.row is None:
                    findings.append(item.at(file.rel))
                    continue
                faults.append(item.at(file.rel))
            else:
                try:
                    signals = _make_signals(item, file)
                except UserError as error:
                    faults.append(replace(error.finding, row=item.row, file=file.rel))
                else:
                    group = int(file.groups[number])
                    attributes: dict[str, AttributeValue] = {"split": SPLITS[file.splits[number]]}
                    if item.label is not None:
                        attributes[
                            file.layout.target
                            or ("label" if isinstance(item.label, str) else "value")
                        ] = item.label
                    subject = f"{file.layout.subject or problem_name(stem)}-{group + 1:05d}"
                    recording = f"{stem}-{number + 1:06d}"
                    records.append(
                        Record(
                            recording_id=recording,
                            subject_id=subject,
                            signals=signals,
                            attributes=attributes,
                        )
                    )
                    touched += any(bool(np.isnan(signal.samples).any()) for signal in signals)
            number += 1
    account = SourceRows(
        file=file.rel,
        kind="cases",
        seen=file.header.cases,
        quarantined=count_reasons(faults),
        warned={str(Reason.MISSING_VALUES): touched} if touched else {},
    )
    return Records(records=records, rows=[account], findings=[*findings, *report_faults(faults)])


def problem_name(stem: str) -> str:
    """The problem's name in that of a file."""
    return re.sub(r"_(TRAIN|TEST)$", "", stem, flags=re.IGNORECASE)


def _make_signals(case: format_ts.TsCase, file: TserFile) -> list[Signal]:
    """The channels of a case, named by their lengths where the layout states them, else in order.

    Raises UserError: length, dimensions, timestamps.
    """
    layout = file.layout
    if not layout.channels:
        clocks = case.times or (None,) * len(case.channels)
        placed = [
            place_on_grid(values, clock)
            for values, clock in zip(case.channels, clocks, strict=True)
        ]
        return [
            Signal(f"channel {i}", rate, "", _pad_values(values, file.length))
            for i, (values, rate) in enumerate(placed, 1)
        ]
    left = list(case.channels)
    out = []
    for channel in layout.channels:
        at = next(
            (i for i, values in enumerate(left) if channel.length in {None, len(values)}), None
        )
        if at is None:
            lengths = ", ".join(str(len(values)) for values in case.channels[:8])
            wanted = ", ".join(str(channel.length) for channel in layout.channels)
            raise input_error(
                Reason.LENGTH, f"has channels of {lengths} values", f"expected {wanted}"
            )
        out.append(Signal(channel.name, channel.rate, channel.unit, left.pop(at)))
    if left:
        raise input_error(
            Reason.DIMENSIONS,
            f"has {len(case.channels)} channels",
            f"expected {len(layout.channels)}",
        )
    return out


def _pad_values(values: np.ndarray, length: int | None) -> np.ndarray:
    """float32, NaN after the last value up to `length`."""
    if length is None or len(values) >= length:
        return values
    return np.concatenate([values, np.full(length - len(values), np.nan, np.float32)])


def _find_padded_length(paths: Sequence[Path], heads: Sequence[format_ts.TsHeader]) -> int | None:
    """Length of the longest channel of a problem whose cases differ in length; None where none is
    to be filled up.
    """
    if any(head.timestamps for head in heads) or len(
        {head.lengths for head in heads} - {None}
    ) == 1 == len({head.lengths for head in heads}):
        return None
    longest = total = channels = 0
    for path, head in zip(paths, heads, strict=True):
        for row, line, _ in format_ts.read_lines(path):
            if row > head.data:
                found = format_ts.count_values(line, timestamps=False, labelled=head.task != "none")
                longest, total, channels = (
                    max(longest, *found),
                    total + sum(found),
                    channels + len(found),
                )
    return longest if longest * channels <= MAX_SPREAD * total else None


def place_on_grid(values: np.ndarray, times: np.ndarray | None) -> tuple[np.ndarray, float]:
    """Values [n] on the grid of their smallest step (NaN where there is none) and its rate in Hz; 1
    Hz without a clock.

    `times`: float64 [n], increasing, in seconds. Raises UserError: timestamps, for times that do
    not fit a grid.
    """
    if times is None or len(times) < 2:
        return values, 1.0
    step = float(np.diff(times).min())
    places = (times - times[0]) / step
    at = np.rint(places).astype(np.int64)
    if at[-1] + 1 > MAX_SPREAD * len(at) or np.abs(places - at).max() > 0.01:
        raise input_error(
            Reason.TIMESTAMPS, "the times do not fit a regular grid", "resample or remove the case"
        )
    if at[-1] + 1 == len(at):
        return values, 1.0 / step
    grid = np.full(int(at[-1]) + 1, np.nan, np.float32)
    grid[at] = values
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
    marks: list[np.ndarray] = []
    owners: list[np.ndarray] = []
    counts = [header.cases for _, header in files]
    first = 0
    for path, header in files:
        for i, chosen in enumerate(_hash_cases(path, header)):
            if len(chosen):
                marks.append(chosen)
                owners.append(np.full(len(chosen), first + i, np.int64))
        first += header.cases
    parent = list(range(first))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    if marks:
        mark, owner = np.concatenate(marks), np.concatenate(owners)
        order = np.lexsort((owner, mark))
        mark, owner = mark[order], owner[order]
        same = np.flatnonzero((mark[1:] == mark[:-1]) & (owner[1:] != owner[:-1]))
        for a, b in zip(owner[same].tolist(), owner[same + 1].tolist(), strict=True):
            one, other = sorted((root(a), root(b)))
            parent[other] = one
    roots = np.array([root(i) for i in range(first)], np.int64)
    names, groups = np.unique(roots, return_inverse=True)  # roots are first cases, hence in order
    return np.split(groups.astype(np.int32), np.cumsum(counts)[:-1]), bool(2 * len(names) <= first)


def _hash_cases(path: Path, header: format_ts.TsHeader) -> Iterator[np.ndarray]:
    """Hashes (uint64) of each case: of its text without the label, and of the chosen stretches of
    one that is long enough.
    """
    powers = _hash_powers(1024)
    for row, line, _ in format_ts.read_lines(path):
        if row <= header.data:
            continue
        chosen = np.frombuffer(
            hashlib.blake2b(format_ts.strip_label(line, header), digest_size=8).digest(), np.uint64
        )
        field = b"" if header.timestamps else line.split(b":", 1)[0]
        if field.count(b",") + 1 >= MIN_VALUES and not field.translate(None, format_ts.PLAIN):
            try:
                values = np.array(list(map(float, field.split(b","))), np.float32)
            except ValueError:
                values = np.zeros(0, np.float32)
            if len(values) >= MIN_VALUES:
                while len(powers[0]) <= len(values):
                    powers = _hash_powers(2 * len(powers[0]))
                chosen = np.concatenate([chosen, hash_stretches(values, *powers)])
        yield chosen


def _hash_powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Powers [count] of an odd number modulo 2^64, and of its inverse."""
    base = 0x9E3779B97F4A7C15
    inverse = pow(base, -1, 1 << 64)
    out = []
    for x in (base, inverse):
        factors = np.full(count, x, np.uint64)
        factors[0] = 1
        out.append(np.cumprod(factors))
    return out[0], out[1]


def hash_stretches(values: np.ndarray, powers: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    """Hashes (uint64) of stretches of a quarter of `values` (float32 [n]), of every n/8 places in a
    row the smallest one.
    """
    n = len(values)
    length, width = n // 4, max(1, n // 8)
    bits = np.ascontiguousarray(values + 0.0).view(np.uint32).astype(np.uint64)  # + 0.0: one zero
    mixed = _mix_hash(bits) * powers[:n]
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed)])
    rolling = _mix_hash((sums[length:] - sums[:-length]) * inverse[: n - length + 1])
    changes = np.concatenate([[0], np.cumsum(values[1:] != values[:-1])])
    flat = changes[length - 1 :] - changes[: n - length + 1] < MIN_CHANGES
    worst = np.uint64(2**64 - 1)
    rolling[flat] = worst
    smallest = np.lib.stride_tricks.sliding_window_view(rolling, min(width, len(rolling))).min(
        axis=1
    )
    chosen = np.unique(smallest)
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
    held_out = ["validation"] * validation + ["test"] * (tests if test else 0)
    return dict(zip(order, ["train"] * (len(order) - len(held_out)) + held_out, strict=True))


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
    both = inside["TRAIN"] & inside["TEST"]
    findings: list[Finding] = []
    split: dict[int, str] = {}
    if inside["TRAIN"] and inside["TEST"] and 2 * len(both) <= len(inside["TEST"]):
        split = dict.fromkeys(inside["TEST"], "test") | dict.fromkeys(both, "train")
        free = sorted(inside["TRAIN"] - both)
        split |= (
            _split_groups_in_order(free, test=False)
            if windows
            else _split_groups_by_hash(free, test=False)
        )
        if both:
            findings.append(_shared_finding(len(both), "they are train throughout"))
    else:
        every = sorted(inside["TRAIN"] | inside["TEST"])
        split = (
            _split_groups_in_order(every, test=True)
            if windows
            else _split_groups_by_hash(every, test=True)
        )
        if both:
            findings.append(
                _shared_finding(
                    len(both),
                    "the files split inside recordings: all are split again, by recording",
                )
            )
    return [
        np.array([SPLITS.index(split[g]) for g in group.tolist()], np.int8) for group in groups
    ], findings


def _split_groups_by_hash(groups: Sequence[int], *, test: bool) -> dict[int, str]:
    found = split_by_hash([str(group) for group in groups], test=test)
    return {group: found[str(group)] for group in groups}


def _split_groups_in_order(groups: Sequence[int], *, test: bool) -> dict[int, str]:
    """The last tenth in the order of the file is test (with `test`), the tenth before it
    validation.
    """
    tenth = math.ceil(len(groups) / 10) if len(groups) >= 3 else 0
    held_out = ["validation"] * tenth + (["test"] * tenth if test else [])
    return dict(zip(groups, ["train"] * (len(groups) - len(held_out)) + held_out, strict=True))


def _shared_finding(count: int, done: str) -> Finding:
    text = f"{count} recording{'s' * (count > 1)} {'have' if count > 1 else 'has'} cases in TRAIN and in TEST"
    return input_warning(Reason.DUPLICATE_ACROSS_SPLITS, text, done, count=count)
