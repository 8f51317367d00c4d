"""Sleep-EDF Expanded 1.0.0: whole-night polysomnograms with hypnograms, 153 cassette and 44
telemetry recordings.

A recording is a PSG and a hypnogram whose names share their first six characters: SC4ssN (cassette)
or ST7ssN (telemetry), ss the subject, N the night. `read_recording` reads any such pair, so the
synthetic cohort goes through the same code.
"""

from __future__ import annotations

import io
import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np

from bitimely_core.errors import Finding, Reason, UserError, input_error, input_warning, safe_text
from bitimely_core.formats import edf, edf_header
from bitimely_core.formats.source import Source, locate_errors, require_source
from bitimely_core.formats.units import FACTORS, find_factor, require_rate, scale_signal
from bitimely_core.registry import DatasetFacts, View, datasets
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import (
    Annotation,
    Attributes,
    AttributeValue,
    IngestOptions,
    IngestUnit,
    Record,
    Signal,
)

NEEDED = ("EEG Fpz-Cz", "EEG Pz-Oz", "EOG horizontal")
SLOW = ("Resp oro-nasal", "EMG submental", "Temp rectal", "Event marker")
RATE = 100.0  # Hz of the needed channels
EPOCH = 30.0  # s
STAGES = {
    "Sleep stage W": "W",
    "Sleep stage 1": "N1",
    "Sleep stage 2": "N2",
    "Sleep stage 3": "N3",
    "Sleep stage 4": "N3",
    "Sleep stage R": "REM",
}
UNSCORED = ("Sleep stage ?", "Movement time")
FLAT = 60.0  # s of one and the same value on a needed channel are reported
BLOCK = 1 << 17  # samples looked at together: they stay in the processor's cache
CLIPPED = 0.01  # share of the samples at the smallest or largest value that is reported
MAX_LISTED = 50  # ignored files named one by one

SubjectTable = dict[tuple[int, int], Attributes]
"""(subject, night) -> attributes by the subject table."""

NAME = re.compile(r"(?:SC4|ST7)\d\d\d[A-Z0-9]{2}-(PSG|Hypnogram)\.edf", re.IGNORECASE | re.ASCII)
LAYOUT = re.compile(
    r"(RECORDS|SHA256SUMS|LICENSE|README|ANNOTATORS|index\.html).*|.*\.xls", re.IGNORECASE
)

NATIVE_RATES = dict.fromkeys(SLOW, 1.0)
VIEWS = {
    "": View(
        channels=(*NEEDED, *SLOW),
        rate=RATE,
        window=3000,
        hold=("Event marker",),
        help="7 channels at 100 Hz, no labels: the 1-Hz channels are interpolated, the marker is held",
    ),
    "staging": View(
        channels=("EEG Fpz-Cz",),
        rate=RATE,
        window=3000,
        task="classification",
        classes=("W", "N1", "N2", "N3", "REM"),
        labels=STAGES,
        epoch=EPOCH,
        trim=("W", 1800.0),
        help="sleep stage of a 30-s epoch from one EEG channel; wake is kept to 30 minutes around sleep",
    ),
}
RULES = {
    "sleep_stages": "W, 1 -> N1, 2 -> N2, 3+4 -> N3, R -> REM; ? and movement give no label; other texts are counted and never mapped",
    "pairs": "PSG and hypnogram by the first 6 characters of their names; start date and time are compared as far as both are valid",
    "subjects": "SC4ssN and ST7ssN: subject ss, night N; both nights of a subject stay together, cassette and telemetry are different subjects",
    "channels": f"needed are {', '.join(NEEDED)} at 100 Hz; the others are kept at their own rates; volts are converted to uV by their scale",
    "labels_beyond_signal": "stages are clipped to the signal; the part beyond it, or in a gap, is dropped and counted",
    "quality": f"reported on needed channels: {FLAT:g} s of one value (flat_channel), {CLIPPED:.0%} of the samples at a rail (clipped)",
}


@datasets(
    DatasetFacts(
        title="Sleep-EDF Expanded: sleep stages from EEG, EOG, EMG, respiration and temperature",
        views=VIEWS,
        licence="ODC-BY 1.0",
        url="https://physionet.org/content/sleep-edfx/1.0.0/",
        download="wget -r -N -c -np -nH --cut-dirs=3 https://physionet.org/files/sleep-edfx/1.0.0/   (8.1 GB; no account needed)",
        layout="sleep-cassette/ and sleep-telemetry/ with pairs such as SC4001E0-PSG.edf and SC4001EC-Hypnogram.edf, SC-subjects.xls and "
        "ST-subjects.xls; also any folder of such pairs",
        paper={
            "": {
                "channels": 7,
                "timesteps": 1_200_000_000,
                "sequences": 400_700,
                "length": 3000,
                "subjects": 153,
                "classes": None,
            },
            "staging": {
                "channels": 1,
                "timesteps": 586_400_000,
                "sequences": 195_500,
                "length": 3000,
                "classes": 5,
            },
            "note": "153 are the cassette recordings, of 78 subjects",
        },
        rules=RULES,
        native_rates=NATIVE_RATES,
    )
)
def sleep_edf(source: Source | None, options: IngestOptions) -> Iterator[IngestUnit | Finding]:
    """Sleep-EDF Expanded (PhysioNet): 197 whole-night recordings with sleep stages."""
    source = require_source(source)
    pairs: dict[str, dict[str, list[str]]] = {}
    other: list[str] = []
    for rel in sorted({*source.files, *source.rejected}):
        name = PurePosixPath(rel).name
        if found := NAME.fullmatch(name):
            kind = "PSG" if found[1].upper() == "PSG" else "Hypnogram"
            pairs.setdefault(name[:6].upper(), {"PSG": [], "Hypnogram": []})[kind].append(rel)
        elif rel in source.rejected or not LAYOUT.fullmatch(name):
            other.append(rel)
    yield from _report_ignored(source, other)
    if not pairs:
        yield Finding(
            Reason.NO_INPUT,
            f"no PSG and hypnogram among {len(source.files)} files",
            "expected names such as SC4001E0-PSG.edf and SC4001EC-Hypnogram.edf",
            "Give the folder that holds sleep-cassette and sleep-telemetry",
        )
    tables: dict[str, SubjectTable] = {}
    for study in sorted({unit[:2] for unit in pairs}):
        tables[study], findings = _load_subjects(source, f"{study}-subjects.xls")
        yield from findings
    for unit, files in sorted(pairs.items()):
        yield _make_unit(source, unit, files, tables[unit[:2]], options)


def _make_unit(
    source: Source,
    unit: str,
    files: dict[str, list[str]],
    table: SubjectTable,
    options: IngestOptions,
) -> IngestUnit:
    """The recording `unit`, or why it cannot be read."""
    names = (*files["PSG"], *files["Hypnogram"])
    faults = [source.rejected[rel] for rel in names if rel in source.rejected]
    for kind, found in files.items():
        if len(found) != 1:
            other = "Hypnogram" if kind == "PSG" else "PSG"
            text = f"{len(found)} {kind} files for one {other}" if found else f"has no {kind} file"
            action = (
                "Keep one of them"
                if found
                else "Download the missing file; PSGs without stages are read by `ingest edf`"
            )
            faults.append(
                Finding(
                    Reason.MISSING_PAIR,
                    text,
                    f"expected one, {unit}??-{kind}.edf",
                    action,
                    file=(found or names)[0],
                )
            )
    if faults:
        return IngestUnit(name=unit, files=names, read=None, findings=tuple(faults))
    subject, night = int(unit[3:5]), int(unit[5])
    attributes = {"night": night, **table.get((subject, night), {})}
    if not options.get("keep_dates"):
        attributes.pop("lights_off", None)
    read = partial(
        read_recording,
        source.root / names[0],
        source.root / names[1],
        names=(names[0], names[1]),
        recording_id=unit,
        subject_id=f"{unit[:3]}-{unit[3:5]}",
        attributes=attributes,
        keep_dates=bool(options.get("keep_dates")),
        keep_phi=bool(options.get("keep_phi")),
    )
    return IngestUnit(name=unit, files=names, read=read)


def _report_ignored(source: Source, other: Sequence[str]) -> Iterator[Finding]:
    """Files that belong neither to a recording nor to the official layout."""
    for rel in other[:MAX_LISTED]:
        if rel in source.rejected:
            yield replace(source.rejected[rel], level="warning")
        else:
            yield input_warning(Reason.FILE_NAME, "belongs to no recording", "it is not read").at(
                rel
            )
    if more := len(other[MAX_LISTED:]):
        yield input_warning(
            Reason.FILE_NAME,
            f"{more} more files belong to no recording",
            "they are not read",
            count=more,
        )


# --- one recording


def read_recording(
    psg: Path,
    hypnogram: Path,
    *,
    names: tuple[str, str],
    recording_id: str,
    subject_id: str,
    attributes: Attributes,
    keep_dates: bool = False,
    keep_phi: bool = False,
    marks: str | None = None,
) -> Record:
    """Signals, sleep stages and findings of one night, from an EDF(+) file with signals and an EDF+
    file whose annotations are the stages.

    `names`: the two paths for messages, relative to the source. `attributes`: kept as they are.
    `marks`: annotations inside the PSG that begin with this text are kept as they are; the others
    are only counted. `keep_phi`: keep the patient and recording fields of the PSG's
    header as attributes. Raises UserError: what keeps the recording out of the cache.
    """
    with locate_errors(names[0]):
        night = edf.read_recording(psg, required=NEEDED, keep_phi=keep_phi)
        signals, findings = _check_signals(night.signals)
        inside = [
            note for note in night.annotations if marks is not None and note.label.startswith(marks)
        ]
        if left := len(night.annotations) - len(inside):
            text = f"annotations inside the PSG that are not read: {left}"
            notice = input_warning(
                Reason.UNKNOWN_LABEL, text, "stages are in the hypnogram", count=left
            )
            findings.append(replace(notice, level="info"))
    with locate_errors(names[1]):
        scores = edf.read_recording(hypnogram, required=())
        if not scores.header.annotation_spans:
            raise input_error(
                Reason.ANNOTATION_SYNTAX, "has no annotation signal", "stages are EDF+ annotations"
            )
        _check_same_start(night.header, scores.header)
        scored, notices = clip_stages(
            scores.annotations, night.segments, shift=scores.origin - night.origin
        )
    start = night.header.start
    return Record(
        recording_id=recording_id,
        subject_id=subject_id,
        signals=signals,
        annotations=sorted([*scored, *inside]),
        attributes={**attributes, **night.header.phi},
        start_time=_format_start(start, night.origin) if keep_dates and start is not None else None,
        findings=[f.at(names[0]) for f in (*night.findings, *findings)]
        + [f.at(names[1]) for f in (*scores.findings, *notices)],
    )


def _format_start(start: datetime, origin: float) -> str:
    return (start + timedelta(seconds=origin)).isoformat()


def _check_same_start(psg: edf_header.EdfHeader, hypnogram: edf_header.EdfHeader) -> None:
    """Refuse a hypnogram that starts at another time, as far as date or time of day are valid in
    both. The message holds the difference alone.
    """
    if psg.start is not None and hypnogram.start is not None:
        seconds = (hypnogram.start - psg.start).total_seconds()
    elif psg.clock is not None and hypnogram.clock is not None:
        today = datetime(2000, 1, 1)
        seconds = (
            datetime.combine(today, hypnogram.clock) - datetime.combine(today, psg.clock)
        ).total_seconds()
    elif psg.day is not None and hypnogram.day is not None:
        seconds = (hypnogram.day - psg.day).total_seconds()
    else:
        return
    if seconds:
        raise input_error(
            Reason.START_MISMATCH,
            f"starts {abs(seconds):g} s {'after' if seconds > 0 else 'before'} the PSG",
            "expected the same start, else every label is shifted",
            field="start_time",
        )


def _check_signals(signals: list[Signal]) -> tuple[list[Signal], list[Finding]]:
    """All channels with volts brought to uV, after the needed ones were checked for presence, rate,
    unit and quality.
    """
    findings = []
    labels = list(dict.fromkeys(signal.channel for signal in signals))
    if missing := [name for name in NEEDED if name not in labels]:
        raise input_error(
            Reason.MISSING_CHANNEL,
            f"has no channel {' and no channel '.join(missing)}",
            f"found {', '.join(safe_text(label) for label in labels[:12])}",
            field="label",
            expected=missing[0],
        )
    converted: list[Signal] = []
    for name in labels:
        parts = [signal for signal in signals if signal.channel == name]
        unit = parts[0].unit
        factor = FACTORS["uV"].get(unit.lower())
        if name in NEEDED:
            factor = find_factor(parts[0], "uV", name)
            require_rate(parts[0], RATE, name, field="samples_per_record")
            findings += _check_quality(name, parts)
        if factor not in {None, 1.0}:
            findings.append(
                input_warning(
                    Reason.UNIT,
                    f"{safe_text(name)} is in {unit}",
                    "converted to uV by its scale",
                    field="unit",
                )
            )
        if factor is not None:
            parts = [scale_signal(part, factor, "uV") for part in parts]
        converted += parts
    return converted, findings


def _check_quality(name: str, parts: list[Signal]) -> list[Finding]:
    """Constant runs and saturation of a needed channel (one part a segment), from its digital
    values.
    """
    arrays = [part.samples for part in parts]
    blocks = [x[at : at + BLOCK] for x in arrays for at in range(0, len(x), BLOCK)]
    ends = [(int(x.min()), int(x.max())) for x in blocks]
    low, high = min(least for least, _ in ends), max(most for _, most in ends)
    total = sum(len(x) for x in arrays)
    if low == high:
        return [input_warning(Reason.FLAT_CHANNEL, "is constant", field=name)]
    findings = []
    longest = (
        max((_longest_run(x) for x in arrays if _may_hold_run(x, int(FLAT * RATE))), default=0)
        / RATE
    )
    if longest >= FLAT:
        findings.append(
            input_warning(Reason.FLAT_CHANNEL, f"does not change for {longest:g} s", field=name)
        )
    rail = max(
        sum(
            int(np.count_nonzero(x == edge))
            for x, range_ in zip(blocks, ends, strict=True)
            if edge in range_
        )
        for edge in (low, high)
    )
    if rail > max(CLIPPED * total, 100):
        text = f"{rail / total:.1%} of the samples are at one end of the range"
        findings.append(input_warning(Reason.CLIPPED, text, field=name, count=rail))
    return findings


def _may_hold_run(x: np.ndarray, run: int) -> bool:
    """Whether `run` equal values in a row are possible: then some of every sixteenth of it are
    equal in a row too. Cheap, without false negatives.
    """
    step = max(run // 16, 1)
    few = x[::step]
    fewest = run // step - 1  # equal neighbours that such a run leaves at least
    equal = few[1:] == few[:-1]
    return len(equal) >= fewest and bool(
        np.lib.stride_tricks.sliding_window_view(equal, max(fewest, 1)).all(-1).any()
    )


def _longest_run(x: np.ndarray) -> int:
    """Length of the longest run of equal values, block by block: a night at once does not fit the
    processor's cache.
    """
    best, edge = 0, -1
    for at in range(0, len(x) - 1, BLOCK):
        part = x[at : at + BLOCK + 1]
        changes = np.flatnonzero(part[1:] != part[:-1]) + at
        if len(changes):
            best = max(best, int(changes[0]) - edge, int(np.diff(changes).max(initial=0)))
            edge = int(changes[-1])
    return max(best, len(x) - 1 - edge)


def clip_stages(
    notes: Sequence[Annotation], segments: Sequence[tuple[float, float]], *, shift: float = 0.0
) -> tuple[list[Annotation], list[Finding]]:
    """The stages of a hypnogram, with texts of `STAGES` or `UNSCORED`, clipped to the signal and
    free of overlap; findings.

    `segments`: (onset, end) in seconds of the stretches with signal, in order; `shift`: seconds to
    add to the onsets of `notes`. Raises
    UserError: annotation_syntax for a stage without duration, annotation_overlap for two stages at
    one time.
    """
    known: list[Annotation] = []
    unknown: Counter[str] = Counter()
    for note in notes:
        if note.label not in STAGES and note.label not in UNSCORED:
            unknown[note.label if note.label.startswith("Sleep stage") else ""] += 1
        elif note.duration <= 0:
            raise input_error(
                Reason.ANNOTATION_SYNTAX,
                f"{note.label!r} at {note.onset:g} s has no duration",
                "every stage has one",
            )
        else:
            known.append(note._replace(onset=note.onset + shift))
    findings = [_unknown_label_finding(label, count) for label, count in sorted(unknown.items())]
    kept: list[Annotation] = []
    lost: Counter[bool] = Counter()  # scored? -> annotations
    beyond = 0.0
    begins, ends = [begin for begin, _ in segments], [end for _, end in segments]
    for note in known:
        stop = note.onset + note.duration
        touched = segments[bisect_right(ends, note.onset) : bisect_left(begins, stop)]
        spans = [(max(note.onset, begin), min(stop, end)) for begin, end in touched]
        pieces = [
            Annotation(begin, end - begin, note.label) for begin, end in spans if end - begin > 1e-6
        ]
        kept += pieces
        left = note.duration - sum(piece.duration for piece in pieces)
        if left > 1e-6:
            lost[note.label in STAGES] += 1
            beyond += left if note.label in STAGES else 0.0
    if count := lost[True]:
        text = f"scored stages that reach beyond the signal: {count}, by {beyond / EPOCH:g} epochs in all"
        findings.append(
            input_warning(Reason.ANNOTATION_OUT_OF_RANGE, text, "that part is dropped", count=count)
        )
    elif count := lost[False]:
        text = f"annotations without a stage (? or movement) that reach beyond the signal: {count}"
        findings.append(
            replace(
                input_warning(
                    Reason.ANNOTATION_OUT_OF_RANGE, text, "that part is dropped", count=count
                ),
                level="info",
            )
        )
    single, repeated = _remove_overlap(sorted(kept))
    if repeated:
        text = f"stages that repeat a part of the one before: {repeated}"
        findings.append(
            input_warning(Reason.ANNOTATION_OVERLAP, text, "that part is kept once", count=repeated)
        )
    unlabelled = sum(end - begin for begin, end in segments) - sum(note.duration for note in single)
    if unlabelled > 1e-6:
        epochs = math.ceil(unlabelled / EPOCH - 1e-6)
        text = f"epochs without a known annotation: {epochs}"
        findings.append(
            input_warning(Reason.UNLABELLED_EPOCHS, text, "they get no stage", count=epochs)
        )
    return single, findings


def _unknown_label_finding(label: str, count: int) -> Finding:
    """A text that does not begin with 'Sleep stage' may hold a name: it is counted, never shown."""
    text = f"annotations {safe_text(label) if label else 'with other texts than sleep stages'}: {count}"
    warning = input_warning(Reason.UNKNOWN_LABEL, text, "not mapped to a stage", count=count)
    return replace(warning, found=safe_text(label) if label else None)


def _remove_overlap(notes: list[Annotation]) -> tuple[list[Annotation], int]:
    """Annotations in order of onset with no time covered twice, and how many repeated the label
    before them.
    """
    single: list[Annotation] = []
    repeated = 0
    for note in notes:
        last = single[-1] if single else Annotation(-math.inf, 0.0, "")
        over = last.onset + last.duration - note.onset
        if over <= 1e-6:
            single.append(note)
            continue
        if note.label != last.label:
            text = f"{last.label!r} lasts until {last.onset + last.duration:g} s, {note.label!r} begins at {note.onset:g} s"
            raise input_error(
                Reason.ANNOTATION_OVERLAP, text, "expected one stage at a time", found=f"{over:g} s"
            )
        repeated += 1
        if note.duration - over > 1e-6:
            single.append(Annotation(note.onset + over, note.duration - over, note.label))
    return single, repeated


# --- subject tables


def _load_subjects(source: Source, name: str) -> tuple[SubjectTable, list[Finding]]:
    """The table called `name`; without it, or when it is damaged, an empty one and a finding."""
    found = [rel for rel in source.files if PurePosixPath(rel).name == name]
    unknown = "age and sex stay unknown"
    if not found:
        return {}, [Finding(Reason.METADATA, f"{name} is missing", unknown, level="info")]
    try:
        table, bad = read_subjects(source.root / found[0])
    except UserError as error:
        raise_system_error(error)
        return {}, [input_warning(error.code, error.problem, unknown).at(found[0])]
    text = f"cells for subject, night, age or sex that are not usable: {bad}"
    return table, [
        input_warning(Reason.METADATA, text, "dropped", count=bad).at(found[0])
    ] if bad else []


def read_subjects(path: Path) -> tuple[SubjectTable, int]:
    """An official subject table (old .xls): age, sex ('F' or 'M'), lights_off ('HH:MM') by subject
    and night; number of unusable cells.

    Columns are found by their headings. SC codes sex as F = 1; ST as M = 1, F = 2, with two nights
    a row under a heading of two rows.

    Raises UserError: metadata, when the file is not such a table.
    """
    import xlrd

    try:
        data = path.read_bytes() if path.stat().st_size <= 1 << 22 else b""
        sheet = xlrd.open_workbook(file_contents=data, logfile=io.StringIO()).sheet_by_index(0)
        rows = [[cell.value for cell in sheet.row(i)] for i in range(sheet.nrows)]
    except Exception as error:  # the reader raises nearly anything on a damaged file
        raise_system_error(error, path, stored=False)
        raise input_error(
            Reason.METADATA, f"is not a readable .xls table ({type(error).__name__})"
        ) from None
    top = next(
        (
            i
            for i, row in enumerate(rows[:5])
            if any(str(cell).strip().lower() == "age" for cell in row)
        ),
        None,
    )
    if top is None:
        raise input_error(Reason.METADATA, "has no column 'age' in its first rows")
    heads = [str(cell).strip().lower() for cell in rows[top]]
    nights = [i for i, head in enumerate(heads) if head.startswith("night")]
    lights = [i for i, head in enumerate(heads) if "light" in head]
    subject = next((i for i, head in enumerate(heads) if head in {"subject", "nr"}), None)
    sex = next((i for i, head in enumerate(heads) if SEX.search(head)), None)
    if subject is None or not nights:
        raise input_error(Reason.METADATA, "has no columns for subject and night")
    code = (
        {int(number): letter.upper() for letter, number in SEX.findall(heads[sex])}
        if sex is not None
        else {}
    )
    if len(code) == 1:  # 'sex (F=1)': whatever is not 1 is the other
        ((number, letter),) = code.items()
        code[3 - number] = "M" if letter == "F" else "F"
    table: SubjectTable = {}
    bad = 0
    for row in (row for row in rows[top + 1 :] if any(str(cell).strip() for cell in row)):
        who, age = _to_integer(row[subject]), _to_integer(row[heads.index("age")])
        kind = code.get(_to_integer(row[sex]) or -1) if sex is not None else None
        bad += (who is None) + (age is None or not 0 < age < 120) + (kind is None)
        known: dict[str, AttributeValue] = {"age": age} if age is not None and 0 < age < 120 else {}
        known |= {"sex": kind} if kind else {}
        for column, light in zip(nights, [*lights, *[-1] * len(nights)], strict=False):
            night = _to_integer(row[column])
            bad += night is None
            if who is not None and night is not None:
                off = row[light] if light >= 0 else None
                minutes = (
                    round(off * 1440) % 1440 if isinstance(off, float) and 0 <= off < 1 else None
                )
                table[who, night] = known | (
                    {}
                    if minutes is None
                    else {"lights_off": f"{minutes // 60:02d}:{minutes % 60:02d}"}
                )
    return table, bad


SEX = re.compile(r"([mf])\s*=?\s*(\d)")


def _to_integer(cell: object) -> int | None:
    return int(cell) if isinstance(cell, float) and cell.is_integer() else None
