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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from itertools import starmap, zip_longest
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from bitimely_core.datasets.raw_files import list_paths, list_rejected, make_unit, report_count
from bitimely_core.errors import Finding, Reason, UserError, input_error, input_warning, safe_text
from bitimely_core.formats import edf, edf_header
from bitimely_core.formats.source import Source, locate_errors, report_unclaimed, require_source
from bitimely_core.formats.units import find_factor, find_unit_factor, require_rate, scale_signal
from bitimely_core.recordings.channels import group_segments, make_missing_channel_error
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
CLIPPED = 0.01  # share of the samples at the smallest or largest value that is reported

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
        help=(
            "7 channels at 100 Hz, no labels: the 1-Hz channels are interpolated, the marker is "
            "held"
        ),
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
        help=(
            "sleep stage of a 30-s epoch from one EEG channel; wake is kept to 30 minutes around "
            "sleep"
        ),
    ),
}
RULES = {
    "sleep_stages": (
        "W, 1 -> N1, 2 -> N2, 3+4 -> N3, R -> REM; ? and movement give no label; other texts are "
        "counted and never mapped"
    ),
    "pairs": (
        "PSG and hypnogram by the first 6 characters of their names; start date and time are "
        "compared as far as both are valid"
    ),
    "subjects": (
        "SC4ssN and ST7ssN: subject ss, night N; both nights of a subject stay together, cassette "
        "and telemetry are different subjects"
    ),
    "channels": (
        f"needed are {', '.join(NEEDED)} at 100 Hz; the others are kept at their own rates; "
        "volts are converted to uV by their scale"
    ),
    "labels_beyond_signal": (
        "stages are clipped to the signal; the part beyond it, or in a gap, is dropped and counted"
    ),
    "quality": (
        f"reported on needed channels: {FLAT:g} s of one value (flat_channel), {CLIPPED:.0%} "
        "of the samples at a rail (clipped)"
    ),
}


@datasets(
    DatasetFacts(
        title="Sleep-EDF Expanded: sleep stages from EEG, EOG, EMG, respiration and temperature",
        views=VIEWS,
        licence="ODC-BY 1.0",
        url="https://physionet.org/content/sleep-edfx/1.0.0/",
        download=(
            "wget -r -N -c -np -nH --cut-dirs=3 https://physionet.org/files/sleep-edfx/1.0.0/   "
            "(8.1 GB; no account needed)"
        ),
        layout="sleep-cassette/ and sleep-telemetry/ with pairs such as SC4001E0-PSG.edf and "
        "SC4001EC-Hypnogram.edf, SC-subjects.xls and ST-subjects.xls; also any folder of such "
        "pairs",
        paper={
            "": {
                "channels": 7,
                "timesteps": 1_200_000_000,
                "sequences": 400_700,
                "length": 3000,
                "subjects": 153,
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
    for rel in list_paths(source):
        name = PurePosixPath(rel).name
        if match := NAME.fullmatch(name):
            kind = "PSG" if match[1].upper() == "PSG" else "Hypnogram"
            pairs.setdefault(name[:6].upper(), {"PSG": [], "Hypnogram": []})[kind].append(rel)
        elif rel in source.rejected:
            yield replace(source.rejected[rel], level="warning")
    claimed = {
        unit: {rel: rel for same in files.values() for rel in same} for unit, files in pairs.items()
    }
    yield from report_unclaimed(source, claimed, LAYOUT)
    if not pairs:
        yield Finding(
            Reason.NO_INPUT,
            f"no PSG and hypnogram among {len(source.files)} files",
            "expected names such as SC4001E0-PSG.edf and SC4001EC-Hypnogram.edf",
            "Give the folder that holds sleep-cassette and sleep-telemetry. "
            "Nights in another layout are read by: bitimely ingest generic FOLDER",
        )
    tables: dict[str, SubjectTable] = {}
    for study in sorted({unit[:2] for unit in pairs}):
        tables[study], findings = _load_subjects(source, f"{study}-subjects.xls")
        yield from findings
    for unit, files in sorted(pairs.items()):
        yield _list_unit(source, unit, files, tables[unit[:2]], options)


def _list_unit(
    source: Source,
    unit: str,
    files: Mapping[str, Sequence[str]],
    table: SubjectTable,
    options: IngestOptions,
) -> IngestUnit:
    """The recording `unit`, or why it cannot be read."""
    names = (*files["PSG"], *files["Hypnogram"])
    faults = list_rejected(source, names)
    for kind, other in (("PSG", "Hypnogram"), ("Hypnogram", "PSG")):
        if paths := files[kind]:
            text, action = f"{len(paths)} {kind} files for one {other}", "Keep one of them"
        else:
            text = f"has no {kind} file"
            action = "Download the missing file; PSGs without stages are read by `ingest edf`"
        if len(paths) != 1:
            wanted = f"expected one, {unit}??-{kind}.edf"
            file = (paths or names)[0]
            faults.append(Finding(Reason.MISSING_PAIR, text, wanted, action, file=file))
    if faults:
        return make_unit(unit, names, faults, None)
    psg, hypnogram = names
    subject, night = int(unit[3:5]), int(unit[5])
    attributes = {"night": night, **table.get((subject, night), {})}
    if not options.get("keep_dates"):
        attributes.pop("lights_off", None)
    read = partial(
        read_recording,
        source.root / psg,
        source.root / hypnogram,
        Record(
            recording_id=unit,
            subject_id=f"{unit[:3]}-{unit[3:5]}",
            signals=[],
            attributes=attributes,
        ),
        names=(psg, hypnogram),
        keep_dates=bool(options.get("keep_dates")),
        keep_phi=bool(options.get("keep_phi")),
    )
    return make_unit(unit, names, (), read)


# --- one recording


def read_recording(
    psg: Path,
    hypnogram: Path,
    record: Record,
    *,
    names: tuple[str, str],
    keep_dates: bool = False,
    keep_phi: bool = False,
    marks: str = "",
) -> Record:
    """Signals, sleep stages and findings of one night.

    Args:
        psg: an EDF(+) file with the signals.
        hypnogram: an EDF+ file whose annotations are the stages.
        record: what is known of the night without its files; it has no signals yet.
        names: the two paths for messages, relative to the source.
        keep_dates: keep the date and time at which the PSG starts.
        keep_phi: keep the patient and recording fields of the PSG's header as attributes.
        marks: annotations inside the PSG that begin with this text are kept as they are; the others
            are only counted.

    Raises:
        UserError: what keeps the recording out of the cache.
    """
    with locate_errors(names[0]):
        night = edf.read_recording(psg, required=NEEDED, keep_phi=keep_phi)
        signals, findings = _check_signals(night.signals)
        inside = [note for note in night.annotations if marks and note.label.startswith(marks)]
        findings += report_count(
            Reason.UNKNOWN_LABEL,
            "annotations inside the PSG that are not read",
            len(night.annotations) - len(inside),
            "stages are in the hypnogram",
            level="info",
        )
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
    start = None
    if keep_dates and night.header.start is not None:
        start = (night.header.start + timedelta(seconds=night.origin)).isoformat()
    return replace(
        record,
        signals=signals,
        annotations=sorted([*scored, *inside]),
        attributes={**record.attributes, **night.header.phi},
        start_time=start,
        findings=[
            *(finding.at(names[0]) for finding in (*night.findings, *findings)),
            *(finding.at(names[1]) for finding in (*scores.findings, *notices)),
        ],
    )


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


def _check_signals(signals: Sequence[Signal]) -> tuple[list[Signal], list[Finding]]:
    """All channels with volts brought to uV, after the needed ones were checked for presence, rate,
    unit and quality.
    """
    segments = group_segments(signals)
    if missing := [channel for channel in NEEDED if channel not in segments]:
        problem = f"has no channel {' and no channel '.join(missing)}"
        raise make_missing_channel_error(problem, segments, "label", missing[0])
    converted: list[Signal] = []
    findings: list[Finding] = []
    for channel, parts in segments.items():
        scaled, remarks = _convert_channel(channel, parts)
        converted += scaled
        findings += remarks
    return converted, findings


def _convert_channel(channel: str, parts: list[Signal]) -> tuple[list[Signal], list[Finding]]:
    """A channel (one part a segment) in uV if it is a voltage, and findings."""
    first = parts[0]
    factor = find_unit_factor(first.unit, "uV")
    findings: list[Finding] = []
    if channel in NEEDED:
        factor = find_factor(first, "uV", channel)
        require_rate(first, RATE, channel, field="samples_per_record")
        findings = _check_quality(channel, [part.samples for part in parts])
    if factor is None:
        return parts, findings
    if factor != 1.0:
        findings.append(
            input_warning(
                Reason.UNIT,
                f"{safe_text(channel)} is in {first.unit}",
                "converted to uV by its scale",
                field="unit",
            )
        )
    return [scale_signal(part, factor, "uV") for part in parts], findings


def _check_quality(channel: str, parts: Sequence[np.ndarray]) -> list[Finding]:
    """Constant runs and saturation of a needed channel, from the digital values of its segments."""
    low, high = min(int(part.min()) for part in parts), max(int(part.max()) for part in parts)
    if low == high:
        return [input_warning(Reason.FLAT_CHANNEL, "is constant", field=channel)]
    findings = []
    seconds = max(_longest_run(part, int(FLAT * RATE)) for part in parts) / RATE
    if seconds:
        findings.append(
            input_warning(Reason.FLAT_CHANNEL, f"does not change for {seconds:g} s", field=channel)
        )
    total = sum(map(len, parts))
    at_end = max(sum(int(np.count_nonzero(part == end)) for part in parts) for end in (low, high))
    if at_end > max(CLIPPED * total, 100):
        findings.append(
            input_warning(
                Reason.CLIPPED,
                f"{at_end / total:.1%} of the samples are at one end of the range",
                field=channel,
                count=at_end,
            )
        )
    return findings


def _longest_run(samples: np.ndarray, least: int) -> int:
    """Length of the longest run of equal values, 0 where none has `least`."""
    # such a run fills one of the blocks of half its length: most recordings need no closer look
    size = least // 2
    blocks = samples[: len(samples) // size * size].reshape(-1, size)
    if not (blocks.min(1) == blocks.max(1)).any():
        return 0
    changes = np.flatnonzero(samples[1:] != samples[:-1])
    longest = int(np.diff(changes, prepend=-1, append=len(samples) - 1).max())
    return longest if longest >= least else 0


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
    stages, findings = _select_stages(notes)
    pieces: list[Annotation] = []
    lost: dict[bool, list[float]] = {True: [], False: []}  # whether it is scored -> seconds
    for note in stages:
        inside = _clip_note(note._replace(onset=note.onset + shift), segments)
        pieces += inside
        beyond = note.duration - sum(piece.duration for piece in inside)
        if beyond > 1e-6:
            lost[note.label in STAGES].append(beyond)
    findings += _report_lost(lost[True], len(lost[False]))
    single, repeated = _remove_overlap(sorted(pieces))
    unlabelled = sum(end - begin for begin, end in segments) - sum(note.duration for note in single)
    epochs = max(0, math.ceil(unlabelled / EPOCH - 1e-6))
    findings += [
        *report_count(
            Reason.ANNOTATION_OVERLAP,
            "stages that repeat a part of the one before",
            repeated,
            "that part is kept once",
        ),
        *report_count(
            Reason.UNLABELLED_EPOCHS,
            "epochs without a known annotation",
            epochs,
            "they get no stage",
        ),
    ]
    return single, findings


def _select_stages(notes: Sequence[Annotation]) -> tuple[list[Annotation], list[Finding]]:
    """Annotations with texts of `STAGES` or `UNSCORED`, and findings on the others.

    Raises UserError: annotation_syntax for one without duration.
    """
    stages: list[Annotation] = []
    others: Counter[str] = Counter()
    for note in notes:
        if note.label not in STAGES and note.label not in UNSCORED:
            others[note.label if note.label.startswith("Sleep stage") else ""] += 1
        elif note.duration <= 0:
            raise input_error(
                Reason.ANNOTATION_SYNTAX,
                f"{note.label!r} at {note.onset:g} s has no duration",
                "every stage has one",
            )
        else:
            stages.append(note)
    return stages, list(starmap(_unknown_label_finding, sorted(others.items())))


def _clip_note(note: Annotation, segments: Sequence[tuple[float, float]]) -> list[Annotation]:
    """The parts of an annotation that lie in the segments."""
    stop = note.onset + note.duration
    first = bisect_right(segments, note.onset, key=itemgetter(1))
    last = bisect_left(segments, stop, key=itemgetter(0))
    spans = [(max(note.onset, begin), min(stop, end)) for begin, end in segments[first:last]]
    return [
        Annotation(begin, end - begin, note.label) for begin, end in spans if end - begin > 1e-6
    ]


def _report_lost(scored: Sequence[float], unscored: int) -> list[Finding]:
    """A warning on stages beyond the signal, by their seconds there, else a note on the number of
    other annotations beyond it.
    """
    effect = "that part is dropped"
    if not scored:
        text = "annotations without a stage (? or movement) that reach beyond the signal"
        code = Reason.ANNOTATION_OUT_OF_RANGE
        return report_count(code, text, unscored, effect, level="info")
    epochs = sum(scored) / EPOCH
    return [
        input_warning(
            Reason.ANNOTATION_OUT_OF_RANGE,
            (
                f"scored stages that reach beyond the signal: {len(scored)}, by {epochs:g} "
                "epochs in all"
            ),
            effect,
            count=len(scored),
        )
    ]


def _unknown_label_finding(label: str, count: int) -> Finding:
    """A text that does not begin with 'Sleep stage' may hold a name: it is counted, never shown."""
    text = safe_text(label) if label else "with other texts than sleep stages"
    return input_warning(
        Reason.UNKNOWN_LABEL,
        f"annotations {text}: {count}",
        "not mapped to a stage",
        count=count,
        found=safe_text(label) if label else None,
    )


def _remove_overlap(notes: list[Annotation]) -> tuple[list[Annotation], int]:
    """Annotations in order of onset with no time covered twice, and how many repeated the label
    before them.
    """
    single: list[Annotation] = []
    repeated = 0
    for note in notes:
        last = single[-1] if single else Annotation(-math.inf, 0.0, "")
        end = last.onset + last.duration
        over = end - note.onset
        if over <= 1e-6:
            single.append(note)
            continue
        if note.label != last.label:
            raise input_error(
                Reason.ANNOTATION_OVERLAP,
                f"{last.label!r} lasts until {end:g} s, {note.label!r} begins at {note.onset:g} s",
                "expected one stage at a time",
                found=f"{over:g} s",
            )
        repeated += 1
        if note.duration - over > 1e-6:
            single.append(Annotation(end, note.duration - over, note.label))
    return single, repeated


# --- subject tables


HEADINGS = {
    "subject": "^(subject|nr)$",
    "age": "^age$",
    "sex": r"([mf])\s*=?\s*(\d)",
    "night": "^night",
    "lights": "light",
}


class SubjectColumns(NamedTuple):
    """Positions of the columns of a subject table."""

    subject: int
    age: int
    sex: int | None
    letters: Mapping[int | None, str]  # number in the column of the sex -> F or M
    nights: Sequence[tuple[int, int | None]]  # night, and when the lights were switched off


def _load_subjects(source: Source, name: str) -> tuple[SubjectTable, list[Finding]]:
    """The table called `name`; without it, or when it is damaged, an empty one and a finding."""
    paths = [rel for rel in source.files if PurePosixPath(rel).name == name]
    effect = "age and sex stay unknown"
    if not paths:
        return {}, [Finding(Reason.METADATA, f"{name} is missing", effect, level="info")]
    try:
        table, bad = read_subjects(source.root / paths[0])
    except UserError as error:
        raise_system_error(error)
        return {}, [input_warning(error.code, error.problem, effect, file=paths[0])]
    return table, report_count(
        Reason.METADATA,
        "cells for subject, night, age or sex that are not usable",
        bad,
        "dropped",
        file=paths[0],
    )


def read_subjects(path: Path) -> tuple[SubjectTable, int]:
    """An official subject table (old .xls): age, sex ('F' or 'M'), lights_off ('HH:MM') by subject
    and night; number of unusable cells.

    Columns are found by their headings. SC codes sex as F = 1; ST as M = 1, F = 2, with two nights
    a row under a heading of two rows.

    Raises UserError: metadata, when the file is not such a table.
    """
    rows = _read_sheet(path)
    texts = [[str(cell).strip().lower() for cell in row] for row in rows]
    top = next((i for i, row in enumerate(texts[:5]) if "age" in row), None)
    if top is None:
        raise input_error(Reason.METADATA, "has no column 'age' in its first rows")
    columns = _find_columns(texts[top])
    table: SubjectTable = {}
    bad = 0
    for row, text in zip(rows[top + 1 :], texts[top + 1 :], strict=True):
        if any(text):
            nights, unusable = _parse_row(row, columns)
            table |= nights
            bad += unusable
    return table, bad


def _read_sheet(path: Path) -> list[list[object]]:
    """The cells of the first sheet of an .xls file. Raises UserError (metadata)."""
    import xlrd

    try:
        data = path.read_bytes() if path.stat().st_size <= 1 << 22 else b""
        sheet = xlrd.open_workbook(file_contents=data, logfile=io.StringIO()).sheet_by_index(0)
        return [[cell.value for cell in sheet.row(i)] for i in range(sheet.nrows)]
    except Exception as error:  # the reader raises nearly anything on a damaged file
        raise_system_error(error, path, stored=False)
        raise input_error(
            Reason.METADATA, f"is not a readable .xls table ({type(error).__name__})"
        ) from None


def _find_columns(heads: Sequence[str]) -> SubjectColumns:
    """The columns by their headings. Raises UserError (metadata)."""
    places = {
        name: [i for i, head in enumerate(heads) if re.search(pattern, head)]
        for name, pattern in HEADINGS.items()
    }
    if not places["subject"] or not places["night"]:
        raise input_error(Reason.METADATA, "has no columns for subject and night")
    sex = next(iter(places["sex"]), None)
    codes = re.findall(HEADINGS["sex"], heads[sex]) if sex is not None else []
    letters: dict[int | None, str] = {int(number): letter.upper() for letter, number in codes}
    if len(letters) == 1:  # 'sex (F=1)': whatever is not 1 is the other
        ((letter, number),) = codes
        letters[3 - int(number)] = "M" if letter == "f" else "F"
    nights = list(zip_longest(places["night"], places["lights"][: len(places["night"])]))
    return SubjectColumns(places["subject"][0], places["age"][0], sex, letters, nights)


def _parse_row(row: Sequence[object], columns: SubjectColumns) -> tuple[SubjectTable, int]:
    """The nights of a subject, and the number of unusable cells."""
    subject, age = _to_integer(row[columns.subject]), _to_integer(row[columns.age])
    attributes: dict[str, AttributeValue] = {}
    if age is not None and 0 < age < 120:
        attributes["age"] = age
    if columns.sex is not None and (sex := columns.letters.get(_to_integer(row[columns.sex]))):
        attributes["sex"] = sex
    bad = (subject is None) + ("age" not in attributes) + ("sex" not in attributes)
    table: SubjectTable = {}
    for column, light in columns.nights:
        night = _to_integer(row[column])
        bad += night is None
        if subject is not None and night is not None:
            lights_off = _parse_clock(row[light]) if light is not None else {}
            table[subject, night] = {**attributes, **lights_off}
    return table, bad


def _parse_clock(cell: object) -> dict[str, str]:
    """A time of day, which a sheet holds as a part of the day."""
    if not isinstance(cell, float) or not 0 <= cell < 1:
        return {}
    minutes = round(cell * 1440) % 1440
    return {"lights_off": f"{minutes // 60:02d}:{minutes % 60:02d}"}


def _to_integer(cell: object) -> int | None:
    return int(cell) if isinstance(cell, float) and cell.is_integer() else None
