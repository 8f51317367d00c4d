"""BIDMC PPG and Respiration: 53 recordings of 8 minutes of 46 patients in intensive care, with
respiratory rate, heart rate and oxygen saturation.

Three forms: the regression archive's BIDMC32RR, BIDMC32HR and BIDMC32SpO2 (.ts: windows of 32 s),
and PhysioNet's csv or WFDB files (full recordings with the monitor's numbers once a second, and
breaths marked by two annotators). All give the same channels and windows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath

import numpy as np

from bitimely_core.datasets import physiology, tser
from bitimely_core.datasets.raw_files import (
    list_paths,
    make_unit,
    report_count,
    restrict_source,
    two_forms_error,
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
from bitimely_core.formats import tables, wfdb, wfdb_annotations
from bitimely_core.formats.source import (
    Source,
    choose_copy,
    locate_errors,
    report_unclaimed,
    require_source,
)
from bitimely_core.formats.units import narrow_samples
from bitimely_core.registry import DatasetBaseline, DatasetFacts, View, datasets
from bitimely_core.store import storage
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import IngestOptions, IngestUnit, Record, Signal

RATE = 125.0  # Hz
# s of a label, and from one to the next: 150 windows a recording, as in the archive
WINDOW, STEP = 32.0, 3.0
KINDS = ("Signals", "Breaths", "Numerics", "Fix")
CSV = re.compile(rf"(?:.*/)?(bidmc_(\d\d))_({'|'.join(KINDS)})\.(?:csv|txt)", re.IGNORECASE)
WFDB = re.compile(r"(?:.*/)?bidmc(\d\d)(\.hea|n\.hea|\.breath|n?\.dat)", re.IGNORECASE)
WFDB_KINDS = {".hea": "Signals in WFDB", ".breath": "Breaths in WFDB", "n.hea": "Numerics in WFDB"}
# a column of Breaths, the text of an annotation
ANNOTATOR = re.compile(r"(?:breaths )?ann([12])(?: \[signal sample no\])?", re.IGNORECASE)
PROBLEM = re.compile(r"(?:.*/)?BIDMC(?:32)?(RR|HR|SpO2)", re.IGNORECASE)
LAYOUT = re.compile(
    r"(RECORDS|SHA256SUMS|LICENSE|README|ANNOTATORS|DBS|index\.html).*|bidmc_data\.mat|.*\.(txt|md)",
    re.IGNORECASE,
)
# label in capitals -> channel
LEADS = {
    "PLETH": "PPG",
    "II": "ECG",
    **{name: name for name in ("RESP", "V", "AVR", "ABP", "I", "III", "MCL", "MCL1")},
}
NEEDED = ("PPG", "ECG")
# ranges of labels and of the monitor's numbers; what is outside of them counts as missing
PLAUSIBLE = {"rr": (1.0, 100.0), "hr": (10.0, 300.0), "spo2": (10.0, 100.0)}
UNITS = {"rr": "/min", "hr": "/min", "spo2": "%"}
NUMERICS = {"HR": "hr", "SPO2": "spo2"}
BREATH_FAULTS = (  # reason, what is counted with the annotator in it, effect
    (
        Reason.MISSING_VALUES,
        "rows at the end without a breath of {}",
        "the breaths that are marked are used",
    ),
    (
        Reason.MISSING_VALUES,
        "breaths of {} missing between others",
        "the intervals over them are not used",
    ),
    (Reason.TIMESTAMPS, "breaths of {} that do not follow the one before", "they are put in order"),
    (Reason.ANNOTATION_OUT_OF_RANGE, "breaths of {} outside of the signal", "not used"),
)
RECORDINGS = tuple(f"bidmc_{i:02d}" for i in range(1, 54))
# recording -> the first of the same patient: one MIMIC II subject in the Fix files, with one age
# and sex
FIRST_OF = {
    **dict.fromkeys(("bidmc_07", "bidmc_08", "bidmc_09"), "bidmc_06"),
    **dict.fromkeys(("bidmc_21", "bidmc_22", "bidmc_23"), "bidmc_20"),
    "bidmc_39": "bidmc_38",
}


OPEN = View(
    channels=NEEDED,
    rate=RATE,
    window=4000,
    split="official",
    help="PPG and ECG at 125 Hz, no labels",
)
PAPER_HR = {"channels": 2, "timesteps": 31_800_000, "sequences": 7949, "length": 4000}


def _make_view(target: str, label: str) -> View:
    return replace(
        OPEN,
        stride=375,
        task="regression",
        target=target,
        unit=UNITS[target],
        label_scales="rate" if UNITS[target] == "/min" else "",
        help=f"{label} from 32 s of PPG and ECG at 125 Hz",
    )


def _make_baseline(
    name: str, about: str, channel: str, measure: Callable[..., float], view: str
) -> DatasetBaseline:
    """A rate of one channel."""
    channels = (channel,)
    measured = partial(physiology.measure_channels, channels=channels, measure=measure)
    return DatasetBaseline(
        name=name, about=about, channels=channels, measure=measured, views=(view,)
    )


@datasets(
    DatasetFacts(
        subject_unit=tser.name_unit,
        title=(
            "BIDMC PPG and Respiration: respiratory rate, heart rate and oxygen saturation from "
            "PPG and ECG"
        ),
        views={
            "": OPEN,
            "rr": _make_view("rr", "respiratory rate (breaths a minute)"),
            "hr": _make_view("hr", "heart rate (beats a minute)"),
            "spo2": _make_view("spo2", "oxygen saturation (percent)"),
        },
        licence="ODC-BY 1.0",
        url="https://physionet.org/content/bidmc/1.0.0/",
        download="wget -r -N -c -np -nH --cut-dirs=3 https://physionet.org/files/bidmc/1.0.0/   or "
        "the BIDMC32*.ts files of https://zenodo.org/records/4001463 (RR), 4001456 (HR) and "
        "4001464 (SpO2)",
        layout="bidmc_csv/ with bidmc_01_Signals.csv, bidmc_01_Numerics.csv and "
        "bidmc_01_Breaths.csv, or the WFDB records bidmc01 and bidmc01n with bidmc01.breath, or "
        "BIDMC32RR_TRAIN.ts and BIDMC32RR_TEST.ts (HR, SpO2)",
        paper={
            "rr": {"channels": 2, "timesteps": 31_500_000, "sequences": 7870, "length": 4000},
            "hr": PAPER_HR,
            "spo2": PAPER_HR,
        },
        rules={
            **tser.RULES,
            "channels": "PLETH is the PPG, lead II the ECG, by name; a recording without lead II "
            "is kept but excluded from the views. .ts files name no channels: the archive's order "
            "is PPG, ECG",
            "labels": "of csv and WFDB every 3 s for the 32 s that follow: hr and spo2 are means "
            "of the monitor's numbers (none where fewer than half of the seconds have one), rr is "
            "that of the marked breaths, the mean of both annotators; where one has stopped or "
            "marks fewer than two, that of the other. The annotators need not mark equally many "
            "breaths: empty cells and NaN are no breaths",
            "subjects": "the 53 recordings are of 46 patients, by the MIMIC II subject in the Fix "
            "files: 06 to 09, 20 to 23, and 38 and 39 are one each, named as their first "
            "recording. Patients are split once and for all by a hash of these names; .ts files "
            "do not tell patients, there the recordings found are split",
            "copies": (
                "a file that is there twice is used once; where the copies differ, the recording "
                "is excluded"
            ),
            "forms": "csv and WFDB hold the same: of signals, breaths and numbers that exist in "
            "both forms csv is read, else the form that is there. Annotators are the columns or "
            "annotations called ann1 and ann2",
        },
        baselines=(
            _make_baseline(
                "ppg-peaks",
                "heart rate from the median interval of the peaks of the PPG, 0.5 to 8 Hz "
                "(Elgendi et al. 2013); no training",
                "PPG",
                physiology.measure_pulse_rate,
                "hr",
            ),
            _make_baseline(
                "ecg-peaks",
                "heart rate from the median interval of the R peaks of the ECG (Pan and "
                "Tompkins 1985); no training",
                "ECG",
                physiology.measure_heart_rate,
                "hr",
            ),
            _make_baseline(
                "ppg-level",
                "respiratory rate from the strongest frequency of the PPG between 0.1 and 0.5 "
                "Hz (Karlen et al. 2013); no training",
                "PPG",
                physiology.measure_breathing_rate,
                "rr",
            ),
            DatasetBaseline(
                name="mean-saturation",
                about=(
                    "the mean saturation of the training people: a PPG of one wavelength has no "
                    "ratio of red to infrared to compute it from"
                ),
                measure=physiology.measure_nothing,
                views=("spo2",),
            ),
        ),
    )
)
def bidmc(source: Source | None, options: IngestOptions) -> Iterator[IngestUnit | Finding]:
    """BIDMC (PhysioNet csv or WFDB, or .ts of the regression archive): RR, HR and SpO2 from PPG and
    ECG.
    """
    source = require_source(source)
    problems = tser.find_problems(source)
    recordings = _find_recordings(source)
    readable = sum("Signals" in kinds for kinds in recordings.values())
    if problems and readable:
        raise two_forms_error(f"{len(problems)} problems in .ts files", f"{readable} recordings")
    claimed = {
        name: {path: path for path in chain.from_iterable(kinds.values())}
        for name, kinds in recordings.items()
    }
    yield from report_unclaimed(source, {**problems, **claimed}, LAYOUT)
    yield from _list_problem_units(source, problems)
    splits = tser.split_by_hash(list(map(find_patient, RECORDINGS)))
    for name, kinds in sorted(recordings.items()):
        split = splits.get(find_patient(name), "train")
        yield from _list_recording_units(source, name, kinds, split)


def _find_recordings(source: Source) -> dict[str, dict[str, list[str]]]:
    """Recording -> kind -> its files in the form that is read; `Others`: files of the other form,
    and of samples.
    """
    recordings: dict[str, dict[str, list[str]]] = {}
    for path in list_paths(source):
        if match := CSV.fullmatch(path):
            name, kind = f"bidmc_{match[2]}", match[3].capitalize()
        elif match := WFDB.fullmatch(path):
            name, kind = f"bidmc_{match[1]}", WFDB_KINDS.get(match[2].lower(), "Others")
        else:
            continue
        recordings.setdefault(name, {}).setdefault(kind, []).append(path)
    for kinds in recordings.values():
        for kind in KINDS:
            if paths := kinds.pop(f"{kind} in WFDB", []):
                kinds.setdefault("Others" if kind in kinds else kind, []).extend(paths)
    return recordings


def _list_recording_units(
    source: Source, name: str, kinds: Mapping[str, Sequence[str]], split: str
) -> Iterator[IngestUnit | Finding]:
    """The recording `name`, or why it cannot be read, with the findings on its copies."""
    if "Signals" not in kinds:
        every = tuple(chain.from_iterable(kinds.values()))
        error = input_error(
            Reason.MISSING_SIGNAL_FILE,
            "has no Signals file",
            f"expected {name}_Signals.csv or {name.replace('_', '')}.hea",
            file=every[0],
        )
        yield make_unit(name, every, [error.finding], None)
        return
    files, findings = _choose_files(source, kinds)
    faults = select_errors(findings)
    opened: list[str] = []
    if not faults:
        opened, faults = _list_opened(source, files.values())
    if faults:
        yield make_unit(name, files.values(), faults, None)
        return
    yield from findings
    read = partial(read_recording, name, restrict_source(source, opened), files, split)
    yield make_unit(name, dict.fromkeys(opened), (), read)


def _choose_files(
    source: Source, kinds: Mapping[str, Sequence[str]]
) -> tuple[dict[str, str], list[Finding]]:
    """Kind -> the file that is read, and findings on its copies."""
    files: dict[str, str] = {}
    findings: list[Finding] = []
    for kind in KINDS:
        if paths := kinds.get(kind):
            # Fix comes as text
            preferred = [path for path in paths if path.lower().endswith(".csv")] or paths
            files[kind], repeated = choose_copy(source, preferred, partial(_hash_parts, source))
            findings += repeated
    return files, findings


def _list_opened(source: Source, paths: Iterable[str]) -> tuple[list[str], list[Finding]]:
    """The files of a recording with those that WFDB headers name, or why a header names none."""
    opened: list[str] = []
    for path in paths:
        try:
            with locate_errors(path):
                opened += _list_parts(source, path)
        except UserError as error:
            raise_system_error(error)
            return [], [error.finding]
    return opened, []


def _list_parts(source: Source, path: str) -> tuple[str, ...]:
    """A file alone, or a WFDB header with its signal files."""
    if path.lower().endswith(".hea"):
        return wfdb.read_header(path, source, required=()).files
    return (path,)


def _hash_parts(source: Source, path: str) -> tuple[str, ...]:
    """SHA-256 of a file, of a WFDB header also those of its signal files."""
    return tuple(storage.hash_file(source.path(part)) for part in _list_parts(source, path))


def find_patient(name: str) -> str:
    """The patient of a recording, named as the patient's first recording."""
    return FIRST_OF.get(name, name)


def _list_problem_units(
    source: Source, files_by_name: Mapping[str, Mapping[str, str]]
) -> Iterator[IngestUnit | Finding]:
    """The problems in .ts files; their recordings are the same, so they are split together."""
    problems = [
        tser.TserProblem(files, _make_layout(name, files)) for name, files in files_by_name.items()
    ]
    if len({problem.layout.target for problem in problems}) < len(problems):
        raise usage_error("one of the problems occurs twice", hint="Give the folder of one copy")
    if problems:
        yield from tser.list_units(source, problems)


def _make_layout(problem: str, files: Mapping[str, str]) -> tser.TserLayout:
    """The layout of a problem by its name. Raises UserError (config, exit 2) for another name."""
    match = PROBLEM.fullmatch(problem)
    if match is None:
        raise usage_error(
            f"the problem {safe_text(PurePosixPath(problem).name)}",
            "expected BIDMC32RR, BIDMC32HR, BIDMC32SpO2",
            file=next(iter(files.values())),
        )
    channels = tuple(tser.TserChannel(name, RATE, "", 4000) for name in NEEDED)
    return tser.TserLayout(
        target=match[1].lower(), channels=channels, subject="bidmc", windows=True
    )


# --- PhysioNet: csv and WFDB


def read_recording(name: str, source: Source, files: Mapping[str, str], split: str) -> Record:
    """One recording from its `files`: Signals and, as far as they are there, Breaths and Numerics,
    each a table or in WFDB.

    Raises UserError: faults of a file: schema, sampling_rate, row_width, not_numeric,
    annotation_syntax and so on.
    """
    path = files["Signals"]
    read = _read_signal_record if path.lower().endswith(".hea") else _read_signal_table
    signals, start, findings = read(path, source)
    seconds = max(len(signal.samples) for signal in signals) / RATE
    labels: dict[str, np.ndarray] = {}
    # breaths and numbers have the clock of the whole recording
    if breaths := files.get("Breaths"):
        with locate_errors(breaths):
            annotators, remarks = _read_breaths(breaths, source)
            annotators = [times - start for times in annotators]
            labels["rr"] = compute_breathing_rates(annotators, seconds)
        remarks += _report_breaths(annotators, seconds)
        findings += [finding.at(breaths) for finding in remarks]
    if numerics := files.get("Numerics"):
        with locate_errors(numerics):
            clock, numbers, remarks = _read_numbers(numerics, source)
            times, first = np.unique(clock - start, return_index=True)
            numbers = {
                label: values[first]
                for label, values in numbers.items()
                if label.upper() in NUMERICS
            }
            labels |= average_numbers(numbers, times, seconds)
        remarks += _report_clock(times, len(clock) - len(times), seconds)
        remarks += _report_numbers(numbers, labels)
        findings += [finding.at(numerics) for finding in remarks]
    return _make_record(name, signals, labels, split, path, findings)


def _read_signal_table(path: str, source: Source) -> tuple[list[Signal], float, list[Finding]]:
    """Signals of a csv file, the time in seconds at which they begin, and findings.

    A part of a recording does not begin at 0.
    """
    with locate_errors(path):
        columns, values = _read_columns(source.path(path), "Time [s]", "Time")
        rows, start = len(values[0]), float(values[0][0])
        late = np.abs(values[0] - start - np.arange(rows) / RATE).max()
        if late > 0.75 / RATE:  # the official files round the times to a hundredth of a second
            raise input_error(
                Reason.SAMPLING_RATE,
                f"{rows} rows whose times do not run at {RATE:g} Hz",
                f"expected a row every {1 / RATE:g} s",
                field="Time [s]",
            )
        signals = [
            Signal(_name_channel(label), RATE, "", narrow_samples(samples, label))
            for label, samples in zip(columns[1:], values[1:], strict=True)
        ]
        if not signals:
            raise input_error(
                Reason.SCHEMA, "has no column but the times", "expected PLETH, II and so on"
            )
    if abs(start) <= 0.5 / RATE:
        return signals, start, []
    warning = input_warning(
        Reason.TIMESTAMPS,
        f"the signals begin at {start:g} s",
        "breaths and numbers of other times are not used",
        field="Time [s]",
        file=path,
    )
    return signals, start, [warning]


def _read_signal_record(path: str, source: Source) -> tuple[list[Signal], float, list[Finding]]:
    """Signals of a WFDB record, 0 for the time at which they begin, and findings."""
    recording = wfdb.read_recording(path, source, required=())
    with locate_errors(path):
        if any(abs(signal.rate - RATE) > 1e-6 or signal.onset for signal in recording.signals):
            raise input_error(
                Reason.SAMPLING_RATE,
                "the signals are not in one piece at one rate",
                f"expected {RATE:g} Hz",
            )
    signals = [
        signal._replace(channel=_name_channel(signal.channel)) for signal in recording.signals
    ]
    return signals, 0.0, [finding.at(path) for finding in recording.findings]


def _read_columns(path: Path, *clocks: str) -> tuple[list[str], list[np.ndarray]]:
    """Names and values (float64, NaN where a cell is empty or NaN) of a table of numbers, the
    column of times first.
    """
    names = tables.read_names(path)
    clock = next((name for name in clocks if name in names), None)
    if clock is None or len(set(names)) < len(names):
        raise input_error(
            Reason.SCHEMA,
            f"has the columns {', '.join(map(safe_text, names[:12]))}",
            f"expected {clocks[0]} and channels of different names",
            field=clocks[0],
        )
    order = [clock, *(name for name in names if name and name != clock)]
    table = tables.read_number_table(path, order, missing=("nan",))
    if not len(table) or np.isnan(table[:, 0]).any():
        problem = "has rows without a time" if len(table) else "has no rows"
        raise input_error(Reason.TIMESTAMPS, problem, field=clock)
    return order, list(np.ascontiguousarray(table.T))


def _read_breaths(path: str, source: Source) -> tuple[list[np.ndarray], list[Finding]]:
    """Breaths that annotators 1 and 2 marked, in seconds and in the order of the rows, NaN where a
    cell is empty or NaN; and findings.
    """
    read = _read_breath_record if path.lower().endswith(".breath") else _read_breath_table
    breaths, others = read(source.path(path))
    annotators = [breaths.get(number, np.zeros(0)) for number in "12"]
    remarks = [
        input_warning(
            Reason.MISSING_VALUES,
            f"has no breaths of annotator {number}",
            "rr is that of the other, if there is one",
            field=f"ann{number}",
        )
        for number, times in enumerate(annotators, 1)
        if not len(times)
    ]
    return annotators, remarks + report_count(
        Reason.UNKNOWN_LABEL, "annotations that are neither of ann1 nor of ann2", others, "not used"
    )


def _read_breath_record(path: Path) -> tuple[dict[str, np.ndarray], int]:
    """Number of an annotator -> breaths in seconds; and how many annotations are of nobody."""
    breaths: dict[str, list[float]] = {"1": [], "2": []}
    others = 0
    for time, _, text in wfdb_annotations.read_rows(path, RATE):
        if match := ANNOTATOR.fullmatch(text):
            breaths[match[1]].append(time)
        else:
            others += 1
    return {number: np.array(times) for number, times in breaths.items()}, others


def _read_breath_table(path: Path) -> tuple[dict[str, np.ndarray], int]:
    """The same of a csv file, whose other columns do not count."""
    matches = filter(None, map(ANNOTATOR.fullmatch, tables.read_names(path)))
    columns = {match[1]: match[0] for match in matches}
    if not columns:
        raise input_error(
            Reason.SCHEMA,
            "has no column of breaths",
            "expected breaths ann1 [signal sample no] and that of ann2",
            row=1,
        )
    table = tables.read_number_table(path, list(columns.values()), missing=("nan",)) / RATE
    return dict(zip(columns, np.ascontiguousarray(table.T), strict=True)), 0


def _read_numbers(
    path: str, source: Source
) -> tuple[np.ndarray, dict[str, np.ndarray], list[Finding]]:
    """Times in seconds, the numbers of the monitor by their labels, and findings."""
    if not path.lower().endswith(".hea"):
        columns, values = _read_columns(source.path(path), "Time [s]", "Time")
        return values[0], dict(zip(columns[1:], values[1:], strict=True)), []
    recording = wfdb.read_recording(path, source, required=())
    numbers = {
        signal.channel.strip(" ,"): signal.samples.astype(np.float64) * signal.scale + signal.offset
        for signal in recording.signals
    }
    longest = max(map(len, numbers.values()))
    numbers = {label: values for label, values in numbers.items() if len(values) == longest}
    return np.arange(longest) / recording.signals[0].rate, numbers, list(recording.findings)


def _report_breaths(annotators: Sequence[np.ndarray], seconds: float) -> list[Finding]:
    """Warnings on missing, unordered and impossible breaths; `annotators`: their breaths in
    seconds.
    """
    findings: list[Finding] = []
    for number, times in enumerate(annotators, 1):
        marked = np.flatnonzero(~np.isnan(times))
        breaths = times[marked]
        missing_at_end = len(times) - 1 - (marked[-1] if len(marked) else -1)
        missing_between = len(times) - missing_at_end - len(marked)
        unordered = int((np.diff(breaths) <= 0).sum())
        outside = int(((breaths < 0) | (breaths >= seconds)).sum())
        counts = (missing_at_end, missing_between, unordered, outside)
        for (code, text, effect), count in zip(BREATH_FAULTS, counts, strict=True):
            problem = text.format(f"annotator {number}")
            findings += report_count(code, problem, count, effect, field=f"ann{number}")
    return findings


def _report_clock(clock: np.ndarray, repeated: int, seconds: float) -> list[Finding]:
    """Warnings on seconds of the signals without a row of numbers, and on rows whose time is that
    of an earlier one; `clock`: seconds, in order.
    """
    whole = int(seconds)
    inside = np.floor(clock + 1e-6)
    absent = whole - len(np.unique(inside[(inside >= 0) & (inside < whole)]))
    findings = []
    if absent > 1:
        findings.append(
            input_warning(
                Reason.TIMESTAMPS,
                f"seconds of the signals without numbers: {absent} of {whole}",
                "windows that have them in half of their seconds have labels",
                field="Time [s]",
                count=absent,
            )
        )
    return findings + report_count(
        Reason.DUPLICATES,
        "rows whose time is that of an earlier one",
        repeated,
        "the first row of a time is used",
        field="Time [s]",
    )


def _report_numbers(columns: dict[str, np.ndarray], labels: dict[str, np.ndarray]) -> list[Finding]:
    """Warnings on seconds without a number, and on the windows that have no label for it."""
    findings: list[Finding] = []
    for label, values in columns.items():
        key = NUMERICS[label.upper()]
        low, high = PLAUSIBLE[key]
        absent = int(np.isnan(values).sum())
        wrong = int(((values < low) | (values > high)).sum())
        unlabelled, windows = int(np.isnan(labels[key]).sum()), len(labels[key])
        effect = f"{unlabelled} of {windows} windows have no label {key}"
        findings += [
            *report_count(
                Reason.MISSING_VALUES, "seconds without a number", absent, effect, field=label
            ),
            *report_count(
                Reason.PHYSICAL_RANGE,
                f"numbers outside of {low:g} to {high:g} {UNITS[key]}, which are not used",
                wrong,
                effect,
                field=label,
            ),
        ]
    return findings


def _name_channel(label: str) -> str:
    """A channel's name: PhysioNet's headers end the labels with a comma."""
    label = label.strip(" ,")
    return LEADS.get(label.upper(), label)


def _make_record(
    name: str,
    signals: list[Signal],
    labels: dict[str, np.ndarray],
    split: str,
    path: str,
    findings: list[Finding],
) -> Record:
    """The recording, with its labels as channels whose values belong to the 32 s that follow."""
    channels = [signal.channel for signal in signals]
    if len(set(channels)) < len(channels):
        raise input_error(
            Reason.DUPLICATE_CHANNEL,
            f"found {', '.join(map(safe_text, channels))}",
            "expected each once",
            file=path,
        )
    remarks = _check_signals(signals)
    absent = [key for key in PLAUSIBLE if key not in labels or not np.isfinite(labels[key]).any()]
    if absent:
        remarks.append(
            input_warning(
                Reason.UNMATCHED_LABELS,
                f"has no labels for {', '.join(absent)}",
                "rr comes from Breaths, hr and spo2 from Numerics",
            )
        )
    clocks = [
        Signal(key, 1 / STEP, UNITS[key], values.astype(np.float32))
        for key, values in labels.items()
        if key not in absent
    ]
    return Record(
        recording_id=name,
        subject_id=find_patient(name),
        signals=[*signals, *clocks],
        attributes={"split": split},
        findings=[*findings, *(remark.at(path) for remark in remarks)],
    )


def _check_signals(signals: Sequence[Signal]) -> list[Finding]:
    """Warnings on channels that are missing, have missing values or are constant."""
    findings: list[Finding] = []
    channels = {signal.channel for signal in signals}
    if missing := [channel for channel in NEEDED if channel not in channels]:
        findings.append(
            input_warning(
                Reason.MISSING_CHANNEL,
                f"has no {' and no '.join(missing)}",
                "excluded from the views",
            )
        )
    for channel, samples in ((signal.channel, signal.samples) for signal in signals):
        if lost := int(np.isnan(samples).sum()):
            findings.append(
                input_warning(
                    Reason.MISSING_VALUES,
                    f"{lost} values of {safe_text(channel)} are missing",
                    count=lost,
                )
            )
        if channel in NEEDED and (samples == samples[0]).all():
            findings.append(input_warning(Reason.FLAT_CHANNEL, "is constant", field=channel))
    return findings


def window_starts(seconds: float) -> np.ndarray:
    """Beginnings of the windows in seconds: every 3 s, as long as 32 s follow."""
    return np.arange(max(0, int((seconds - WINDOW) / STEP + 1e-6) + 1)) * STEP


def average_numbers(
    columns: dict[str, np.ndarray], clock: np.ndarray, seconds: float
) -> dict[str, np.ndarray]:
    """Mean of the plausible numbers [n] of each window, NaN where fewer than half of its seconds
    have one; `clock` [n] and `seconds` in s.
    """
    means = {}
    for label, values in columns.items():
        key = NUMERICS[label.upper()]
        low, high = PLAUSIBLE[key]
        plausible = (values >= low) & (values <= high)
        inside = [
            plausible & (clock >= start) & (clock < start + WINDOW)
            for start in window_starts(seconds)
        ]
        means[key] = np.array(
            [values[rows].mean() if 2 * rows.sum() >= WINDOW else np.nan for rows in inside]
        )
    return means


def compute_breathing_rates(annotators: Sequence[np.ndarray], seconds: float) -> np.ndarray:
    """Respiratory rate of each window, a minute: from the first to the last breath in it, the mean
    over annotators who marked two or more.

    `annotators`: seconds of the breaths of each, float64 [n]; NaN stands for a breath that is known
    to be missing: the interval over it does not count.
    """
    low, high = PLAUSIBLE["rr"]
    marked = list(map(_order_breaths, annotators))
    rates = []
    for start in window_starts(seconds):
        by_annotator = []
        for times, resumes in marked:
            rows = (times >= start) & (times < start + WINDOW)
            inside, broken = times[rows], resumes[rows][1:]
            duration = (
                inside[-1] - inside[0] - np.diff(inside)[broken].sum() if len(inside) else 0.0
            )
            if duration > 0:
                by_annotator.append(60.0 * np.count_nonzero(~broken) / duration)
        mean = float(np.mean(by_annotator)) if by_annotator else np.nan
        rates.append(mean if low <= mean <= high else np.nan)
    return np.array(rates)


def _order_breaths(times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The marked breaths in order, and whether a missing one precedes each."""
    marked = np.flatnonzero(~np.isnan(times))
    resumes = np.diff(marked, prepend=-1) > 1
    order = np.argsort(times[marked], kind="stable")
    return times[marked][order], resumes[order]
