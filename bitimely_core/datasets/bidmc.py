"""BIDMC PPG and Respiration: 53 recordings of 8 minutes of 46 patients in intensive care, with
respiratory rate, heart rate and oxygen saturation.

Three forms: the regression archive's BIDMC32RR, BIDMC32HR and BIDMC32SpO2 (.ts: windows of 32 s),
and PhysioNet's csv or WFDB files (full recordings with the monitor's numbers once a second, and
breaths marked by two annotators). All give the same channels and windows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np

from bitimely_core import storage
from bitimely_core.datasets import physiology, tser
from bitimely_core.errors import (
    Finding,
    Reason,
    UserError,
    input_error,
    input_warning,
    safe_text,
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
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import IngestOptions, IngestUnit, Record, Signal

RATE = 125.0  # Hz
# s of a label, and from one to the next: 150 windows a recording, as in the archive
WINDOW, STEP = 32.0, 3.0
KINDS = ("Signals", "Breaths", "Numerics", "Fix")
CSV = re.compile(rf"(?:.*/)?(bidmc_(\d\d))_({'|'.join(KINDS)})\.(?:csv|txt)", re.IGNORECASE)
WFDB = re.compile(r"(?:.*/)?bidmc(\d\d)(\.hea|n\.hea|\.breath|n?\.dat)", re.IGNORECASE)
WFDB_KINDS = {".hea": "Signals", ".breath": "Breaths", "n.hea": "Numerics"}
# a column of Breaths, the text of an annotation
ANNOTATOR = re.compile(r"(?:breaths )?ann([12])(?: \[signal sample no\])?", re.IGNORECASE)
PROBLEM = re.compile(r"(?:.*/)?BIDMC(?:32)?(RR|HR|SpO2)", re.IGNORECASE)
LAYOUT = re.compile(
    r"(RECORDS|SHA256SUMS|LICENSE|README|ANNOTATORS|DBS|index\.html).*|bidmc_data\.mat|.*\.(txt|md)",
    re.IGNORECASE,
)
LEADS = {
    "PLETH": "PPG",
    "II": "ECG",
    "RESP": "RESP",
    "V": "V",
    "AVR": "AVR",
    "ABP": "ABP",
    "I": "I",
    "III": "III",
    "MCL": "MCL",
    "MCL1": "MCL1",
}
NEEDED = ("PPG", "ECG")
PLAUSIBLE = {"rr": (1.0, 100.0), "hr": (10.0, 300.0), "spo2": (10.0, 100.0)}
UNITS = {"rr": "/min", "hr": "/min", "spo2": "%"}
NUMERICS = {"HR": "hr", "SPO2": "spo2"}
RECORDINGS = tuple(f"bidmc_{i:02d}" for i in range(1, 54))
# recording -> the first of the same patient: one MIMIC II subject in the Fix files, with one age
# and sex
FIRST_OF = {
    **dict.fromkeys(("bidmc_07", "bidmc_08", "bidmc_09"), "bidmc_06"),
    **dict.fromkeys(("bidmc_21", "bidmc_22", "bidmc_23"), "bidmc_20"),
    "bidmc_39": "bidmc_38",
}


def _make_view(target: str, what: str) -> View:
    return View(
        channels=NEEDED,
        rate=RATE,
        window=4000,
        stride=375,
        task="regression",
        target=target,
        unit=UNITS[target],
        split="official",
        help=f"{what} from 32 s of PPG and ECG at 125 Hz",
    )


@datasets(
    DatasetFacts(
        subject_unit=tser.name_unit,
        title="BIDMC PPG and Respiration: respiratory rate, heart rate and oxygen saturation from PPG and ECG",
        views={
            "": View(
                channels=NEEDED,
                rate=RATE,
                window=4000,
                split="official",
                help="PPG and ECG at 125 Hz, no labels",
            ),
            "rr": _make_view("rr", "respiratory rate (breaths a minute)"),
            "hr": _make_view("hr", "heart rate (beats a minute)"),
            "spo2": _make_view("spo2", "oxygen saturation (percent)"),
        },
        licence="ODC-BY 1.0",
        url="https://physionet.org/content/bidmc/1.0.0/",
        download="wget -r -N -c -np -nH --cut-dirs=3 https://physionet.org/files/bidmc/1.0.0/   or the BIDMC32*.ts files of "
        "https://zenodo.org/records/4001463 (RR), 4001456 (HR) and 4001464 (SpO2)",
        layout="bidmc_csv/ with bidmc_01_Signals.csv, bidmc_01_Numerics.csv and bidmc_01_Breaths.csv, or the WFDB records bidmc01 and bidmc01n "
        "with bidmc01.breath, or BIDMC32RR_TRAIN.ts and BIDMC32RR_TEST.ts (HR, SpO2)",
        paper={
            "rr": {
                "channels": 2,
                "timesteps": 31_500_000,
                "sequences": 7870,
                "length": 4000,
                "classes": None,
            },
            "hr": {
                "channels": 2,
                "timesteps": 31_800_000,
                "sequences": 7949,
                "length": 4000,
                "classes": None,
            },
            "spo2": {
                "channels": 2,
                "timesteps": 31_800_000,
                "sequences": 7949,
                "length": 4000,
                "classes": None,
            },
        },
        rules={
            **tser.RULES,
            "channels": "PLETH is the PPG, lead II the ECG, by name; a recording without lead II is kept but excluded from the views. .ts files "
            "name no channels: the archive's order is PPG, ECG",
            "labels": "of csv and WFDB every 3 s for the 32 s that follow: hr and spo2 are means of the monitor's numbers (none where fewer than "
            "half of the seconds have one), rr is that of the marked breaths, the mean of both annotators; where one has stopped or marks fewer "
            "than two, that of the other. The annotators need not mark equally many breaths: empty cells and NaN are no breaths",
            "subjects": "the 53 recordings are of 46 patients, by the MIMIC II subject in the Fix files: 06 to 09, 20 to 23, and 38 and 39 are one "
            "each, named as their first recording. Patients are split once and for all by a hash of these names; .ts files do not tell patients, "
            "there the recordings found are split",
            "copies": "a file that is there twice is used once; where the copies differ, the recording is excluded",
            "forms": "csv and WFDB hold the same: of signals, breaths and numbers that exist in both forms csv is read, else the form that is "
            "there. Annotators are the columns or annotations called ann1 and ann2",
        },
        baselines=(
            DatasetBaseline(
                name="ppg-peaks",
                about="heart rate from the median interval of the peaks of the PPG, 0.5 to 8 Hz (Elgendi et al. 2013); no training",
                predict=partial(
                    physiology.predict_rates,
                    channels=("PPG",),
                    measure=physiology.measure_pulse_rate,
                ),
                views=("hr",),
            ),
            DatasetBaseline(
                name="ecg-peaks",
                about="heart rate from the median interval of the R peaks of the ECG (Pan and Tompkins 1985); no training",
                predict=partial(
                    physiology.predict_rates,
                    channels=("ECG",),
                    measure=physiology.measure_heart_rate,
                ),
                views=("hr",),
            ),
            DatasetBaseline(
                name="ppg-level",
                about="respiratory rate from the strongest frequency of the PPG between 0.1 and 0.5 Hz (Karlen et al. 2013); no training",
                predict=partial(
                    physiology.predict_rates,
                    channels=("PPG",),
                    measure=physiology.measure_breathing_rate,
                ),
                views=("rr",),
            ),
            DatasetBaseline(
                name="mean-saturation",
                about="the mean saturation of the training people: a PPG of one wavelength has no ratio of red to infrared to compute it from",
                predict=physiology.predict_mean,
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
    found = tser.find_problems(source)
    recordings = _find_recordings(source)
    names = [name for name, files in recordings.items() if "Signals" in files]
    if found and names:
        text, action = (
            f"{len(found)} problems in .ts files and {len(names)} recordings",
            "Give the folder of one form",
        )
        raise usage_error(text, "expected one form of one data set", action)
    claimed = {
        name: {rel: rel for same in files.values() for rel in same}
        for name, files in recordings.items()
    }
    yield from report_unclaimed(source, {**found, **claimed}, LAYOUT)
    if found:
        yield from _list_problem_units(source, found)
    placed = tser.split_by_hash([find_patient(name) for name in RECORDINGS])
    for name, kinds in sorted(recordings.items()):
        yield from _list_recording_units(
            source, name, kinds, placed.get(find_patient(name), "train")
        )


def _find_recordings(source: Source) -> dict[str, dict[str, list[str]]]:
    """Recording -> kind -> its files in the form that is read; `Others`: files of the other form,
    and of samples.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for rel in sorted({*source.files, *source.rejected}):
        if named := CSV.fullmatch(rel):
            kind = next(kind for kind in KINDS if kind.lower() == named[3].lower())
            found.setdefault(f"bidmc_{named[2]}", {}).setdefault(kind, []).append(rel)
        elif named := WFDB.fullmatch(rel):
            form = WFDB_KINDS.get(named[2].lower())
            found.setdefault(f"bidmc_{named[1]}", {}).setdefault(
                f"{form} in WFDB" if form else "Others", []
            ).append(rel)
    for files in found.values():
        for kind in KINDS:
            if same := files.pop(f"{kind} in WFDB", []):
                files.setdefault("Others" if kind in files else kind, []).extend(same)
    return found


def _list_recording_units(
    source: Source, name: str, kinds: Mapping[str, Sequence[str]], split: str
) -> Iterator[IngestUnit | Finding]:
    """The recording `name`, or why it cannot be read, with the findings on its copies."""
    if "Signals" not in kinds:
        every = tuple(rel for same in kinds.values() for rel in same)
        text, wanted = (
            "has no Signals file",
            f"expected {name}_Signals.csv or {name.replace('_', '')}.hea",
        )
        fault = Finding(
            Reason.MISSING_SIGNAL_FILE, text, wanted, "Download it again", file=every[0]
        )
        yield IngestUnit(name=name, files=every, read=None, findings=(fault,))
        return
    files: dict[str, str] = {}
    findings: list[Finding] = []
    for kind in KINDS:
        if kind in kinds:
            # Fix comes as text
            same = [rel for rel in kinds[kind] if rel.lower().endswith(".csv")] or kinds[kind]
            files[kind], repeated = choose_copy(source, same, partial(_hash_parts, source))
            findings += repeated
    faults = tuple(finding for finding in findings if finding.level == "error")
    names: list[str] = []
    try:
        for rel in files.values() if not faults else ():
            with locate_errors(rel):
                names += (
                    wfdb.read_header(rel, source, required=()).files
                    if rel.lower().endswith(".hea")
                    else (rel,)
                )
    except UserError as error:
        raise_system_error(error)
        faults = (error.finding,)
    if faults:
        yield IngestUnit(name=name, files=tuple(files.values()), read=None, findings=faults)
        return
    yield from findings
    own = replace(source, files={rel: source.files[rel] for rel in names}, rejected={})
    yield IngestUnit(
        name=name,
        files=tuple(dict.fromkeys(names)),
        read=partial(read_recording, name, own, files, split),
    )


def find_patient(name: str) -> str:
    """The patient of a recording, named as the patient's first recording."""
    return FIRST_OF.get(name, name)


def _hash_parts(source: Source, rel: str) -> tuple[str, ...]:
    """SHA-256 of a file, and of a WFDB header's signal files after it."""
    rels = [
        rel,
        *(wfdb.read_header(rel, source, required=()).files if rel.lower().endswith(".hea") else ()),
    ]
    return tuple(storage.hash_file(source.path(one)) for one in rels)


def _list_problem_units(
    source: Source, found: dict[str, dict[str, str]]
) -> Iterator[IngestUnit | Finding]:
    """The problems in .ts files; their recordings are the same, so they are split together."""
    layouts: dict[str, tser.TserLayout] = {}
    for problem, files in found.items():
        named = PROBLEM.fullmatch(problem)
        if named is None:
            text = f"the problem {safe_text(PurePosixPath(problem).name)}"
            raise usage_error(
                text, "expected BIDMC32RR, BIDMC32HR, BIDMC32SpO2", file=next(iter(files.values()))
            )
        channels = tuple(tser.TserChannel(name, RATE, "", 4000) for name in NEEDED)
        layouts[problem] = tser.TserLayout(
            target=named[1].lower(), channels=channels, subject="bidmc", windows=True
        )
    if len({layout.target for layout in layouts.values()}) < len(layouts):
        raise usage_error("one of the problems occurs twice", hint="Give the folder of one copy")
    yield from tser.list_units(source, found, layouts)


# --- PhysioNet: csv and WFDB


def read_recording(name: str, source: Source, files: Mapping[str, str], split: str) -> Record:
    """One recording from its `files`: Signals and, as far as they are there, Breaths and Numerics,
    each a table or in WFDB.

    Raises UserError: faults of a file: schema, sampling_rate, row_width, not_numeric,
    annotation_syntax and so on.
    """
    rel = files["Signals"]
    read = _read_signal_record if rel.lower().endswith(".hea") else _read_signal_table
    signals, start, findings = read(rel, source)
    seconds = max(len(signal.samples) for signal in signals) / RATE
    labels: dict[str, np.ndarray] = {}
    if "Breaths" in files:
        with locate_errors(files["Breaths"]):
            annotators, remarks = _read_breaths(files["Breaths"], source)
            # breaths and numbers have the clock of the whole recording
            annotators = [times - start for times in annotators]
            labels["rr"] = compute_breathing_rates(annotators, seconds)
        findings += [
            finding.at(files["Breaths"])
            for finding in (*remarks, *_report_breaths(annotators, seconds))
        ]
    if "Numerics" in files:
        with locate_errors(files["Numerics"]):
            clock, numbers, remarks = _read_numbers(files["Numerics"], source)
            clock, numbers, repeated = _order_clock(clock - start, numbers)
            labels |= average_numbers(numbers, clock, seconds)
        remarks = [
            *remarks,
            *_report_clock(clock, repeated, seconds),
            *_report_numbers(numbers, labels),
        ]
        findings += [finding.at(files["Numerics"]) for finding in remarks]
    return _make_record(name, signals, labels, split, rel, findings)


def _read_signal_table(rel: str, source: Source) -> tuple[list[Signal], float, list[Finding]]:
    """Signals of a csv file, the time at which they begin, which is not 0 in a part of a recording,
    and findings.
    """
    with locate_errors(rel):
        columns, values = _read_columns(source.path(rel), "Time [s]", "Time")
        rows, start = len(values[0]), float(values[0][0])
        late = np.abs(values[0] - start - np.arange(rows) / RATE).max()
        if late > 0.75 / RATE:  # the official files round the times to a hundredth of a second
            text = f"{rows} rows whose times do not run at {RATE:g} Hz"
            raise input_error(
                Reason.SAMPLING_RATE, text, f"expected a row every {1 / RATE:g} s", field="Time [s]"
            )
        signals = [
            Signal(_channel_name(label), RATE, "", narrow_samples(values[i], label))
            for i, label in enumerate(columns)
            if i > 0
        ]
        if not signals:
            raise input_error(
                Reason.SCHEMA, "has no column but the times", "expected PLETH, II and so on"
            )
    if abs(start) <= 0.5 / RATE:
        return signals, start, []
    text, effect = (
        f"the signals begin at {start:g} s",
        "breaths and numbers of other times are not used",
    )
    return (
        signals,
        start,
        [input_warning(Reason.TIMESTAMPS, text, effect, field="Time [s]", file=rel)],
    )


def _read_signal_record(rel: str, source: Source) -> tuple[list[Signal], float, list[Finding]]:
    """Signals of a WFDB record, 0 for the time at which they begin, and findings."""
    found = wfdb.read_recording(rel, source, required=())
    with locate_errors(rel):
        if any(abs(signal.rate - RATE) > 1e-6 or signal.onset for signal in found.signals):
            raise input_error(
                Reason.SAMPLING_RATE,
                "the signals are not in one piece at one rate",
                f"expected {RATE:g} Hz",
            )
    signals = [signal._replace(channel=_channel_name(signal.channel)) for signal in found.signals]
    return signals, 0.0, [finding.at(rel) for finding in found.findings]


def _read_columns(path: Path, *clocks: str) -> tuple[list[str], list[np.ndarray]]:
    """Names and values (float64, NaN where a cell is empty or NaN) of a table of numbers, the
    column of times first.
    """
    names = tables.read_names(path)
    clock = next((name for name in clocks if name in names), None)
    if clock is None or len(set(names)) < len(names):
        wanted = f"expected {clocks[0]} and channels of different names"
        raise input_error(
            Reason.SCHEMA,
            f"has the columns {', '.join(map(safe_text, names[:12]))}",
            wanted,
            field=clocks[0],
        )
    order = [clock, *(name for name in names if name and name != clock)]
    table = tables.read_number_table(path, order, missing=("nan",))
    if not len(table) or np.isnan(table[:, 0]).any():
        raise input_error(
            Reason.TIMESTAMPS,
            "has rows without a time" if len(table) else "has no rows",
            field=clock,
        )
    return order, list(np.ascontiguousarray(table.T))


def _read_breaths(rel: str, source: Source) -> tuple[list[np.ndarray], list[Finding]]:
    """Breaths that annotators 1 and 2 marked, in seconds and in the order of the rows; NaN where a
    cell is empty or NaN. Findings.
    """
    path = source.path(rel)
    if rel.lower().endswith(".breath"):
        rows = wfdb_annotations.read_rows(path, RATE)
        marks = [(time, ANNOTATOR.fullmatch(text)) for time, _, text in rows]
        found = {
            number: np.array([time for time, named in marks if named and named[1] == number])
            for number in "12"
        }
        others = sum(named is None for _, named in marks)
    else:
        columns = {
            named[1]: name
            for name in tables.read_names(path)
            if (named := ANNOTATOR.fullmatch(name))
        }
        if not columns:
            raise input_error(
                Reason.SCHEMA,
                "has no column of breaths",
                "expected breaths ann1 [signal sample no] and that of ann2",
                row=1,
            )
        table = tables.read_number_table(path, list(columns.values()), missing=("nan",)) / RATE
        found, others = dict(zip(columns, np.ascontiguousarray(table.T), strict=True)), 0
    empty = np.zeros(0)
    remarks = [
        input_warning(
            Reason.MISSING_VALUES,
            f"has no breaths of annotator {number}",
            "rr is that of the other, if there is one",
            field=f"ann{number}",
        )
        for number in "12"
        if not len(found.get(number, empty))
    ]
    if others:
        text = f"annotations that are neither of ann1 nor of ann2: {others}"
        remarks.append(input_warning(Reason.UNKNOWN_LABEL, text, "not used", count=others))
    return [found.get(number, empty) for number in "12"], remarks


def _read_numbers(
    rel: str, source: Source
) -> tuple[np.ndarray, dict[str, np.ndarray], list[Finding]]:
    """Times in seconds, the numbers of the monitor by their labels, and findings."""
    if not rel.lower().endswith(".hea"):
        columns, values = _read_columns(source.path(rel), "Time [s]", "Time")
        return values[0], dict(zip(columns[1:], values[1:], strict=True)), []
    found = wfdb.read_recording(rel, source, required=())
    numbers = {
        s.channel.strip(" ,"): s.samples.astype(np.float64) * s.scale + s.offset
        for s in found.signals
    }
    clock = np.arange(max(map(len, numbers.values()))) / found.signals[0].rate
    return (
        clock,
        {label: values for label, values in numbers.items() if len(values) == len(clock)},
        found.findings,
    )


def _order_clock(
    clock: np.ndarray, numbers: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, dict[str, np.ndarray], int]:
    """Times and numbers in order, those of a time that is there again left out, and how many these
    are.
    """
    times, first = np.unique(clock, return_index=True)
    return (
        times,
        {label: values[first] for label, values in numbers.items()},
        len(clock) - len(times),
    )


def _report_breaths(annotators: Sequence[np.ndarray], seconds: float) -> list[Finding]:
    """Warnings on missing, unordered and impossible breaths."""
    found: list[Finding] = []
    for number, times in enumerate(annotators, 1):
        known = np.flatnonzero(~np.isnan(times))
        end = len(times) - 1 - (known[-1] if len(known) else -1)
        inner = len(times) - end - len(known)
        unordered = int((np.diff(times[known]) <= 0).sum())
        outside = int(((times[known] < 0) | (times[known] >= seconds)).sum())
        who = f"annotator {number}"
        for count, code, text, effect in (
            (
                end,
                Reason.MISSING_VALUES,
                f"rows at the end without a breath of {who}: {end}",
                "the breaths that are marked are used",
            ),
            (
                inner,
                Reason.MISSING_VALUES,
                f"breaths of {who} missing between others: {inner}",
                "the intervals over them are not used",
            ),
            (
                unordered,
                Reason.TIMESTAMPS,
                f"breaths of {who} that do not follow the one before: {unordered}",
                "they are put in order",
            ),
            (
                outside,
                Reason.ANNOTATION_OUT_OF_RANGE,
                f"breaths of {who} outside of the signal: {outside}",
                "not used",
            ),
        ):
            if count:
                found.append(input_warning(code, text, effect, field=f"ann{number}", count=count))
    return found


def _report_clock(clock: np.ndarray, repeated: int, seconds: float) -> list[Finding]:
    """Warnings on seconds of the signals without a row of numbers, and on rows whose time is there
    again; `clock`: seconds, in order.
    """
    every = int(seconds)
    inside = np.floor(clock + 1e-6)
    absent = every - len(np.unique(inside[(inside >= 0) & (inside < every)]))
    found = []
    if absent > 1:
        text = f"seconds of the signals without numbers: {absent} of {every}"
        effect = "windows that have them in half of their seconds have labels"
        found.append(input_warning(Reason.TIMESTAMPS, text, effect, field="Time [s]", count=absent))
    if repeated:
        text = f"rows whose time is that of an earlier one: {repeated}"
        found.append(
            input_warning(
                Reason.DUPLICATES,
                text,
                "the first row of a time is used",
                field="Time [s]",
                count=repeated,
            )
        )
    return found


def _report_numbers(columns: dict[str, np.ndarray], labels: dict[str, np.ndarray]) -> list[Finding]:
    """Warnings on seconds without a number, and on the windows that have no label for it."""
    found = []
    for label, values in columns.items():
        if (key := NUMERICS.get(label.upper())) is not None:
            low, high = PLAUSIBLE[key]
            absent = int(np.isnan(values).sum())
            wrong = int(((values < low) | (values > high)).sum())
            effect = f"{int(np.isnan(labels[key]).sum())} of {len(labels[key])} windows have no label {key}"
            if absent:
                found.append(
                    input_warning(
                        Reason.MISSING_VALUES,
                        f"seconds without a number: {absent}",
                        effect,
                        field=label,
                        count=absent,
                    )
                )
            if wrong:
                text = f"numbers outside of {low:g} to {high:g} {UNITS[key]}, which are not used: {wrong}"
                found.append(
                    input_warning(Reason.PHYSICAL_RANGE, text, effect, field=label, count=wrong)
                )
    return found


def _channel_name(label: str) -> str:
    """A channel's name: PhysioNet's headers end the labels with a comma."""
    label = label.strip(" ,")
    return LEADS.get(label.upper(), label)


def _make_record(
    name: str,
    signals: list[Signal],
    labels: dict[str, np.ndarray],
    split: str,
    rel: str,
    findings: list[Finding],
) -> Record:
    """The recording, with its labels as channels whose values belong to the 32 s that follow."""
    channels = [signal.channel for signal in signals]
    if len(set(channels)) < len(channels):
        raise input_error(
            Reason.DUPLICATE_CHANNEL,
            f"found {', '.join(map(safe_text, channels))}",
            "expected each once",
            file=rel,
        )
    if missing := [channel for channel in NEEDED if channel not in channels]:
        findings.append(
            input_warning(
                Reason.MISSING_CHANNEL,
                f"has no {' and no '.join(missing)}",
                "excluded from the views",
                file=rel,
            )
        )
    for signal in signals:
        if (
            lost := int(np.count_nonzero(np.isnan(signal.samples)))
            if signal.samples.dtype.kind == "f"
            else 0
        ):
            text = f"{lost} values of {safe_text(signal.channel)} are missing"
            findings.append(input_warning(Reason.MISSING_VALUES, text, count=lost, file=rel))
        if signal.channel in NEEDED and (signal.samples == signal.samples[0]).all():
            findings.append(
                input_warning(Reason.FLAT_CHANNEL, "is constant", field=signal.channel, file=rel)
            )
    absent = [key for key in PLAUSIBLE if key not in labels or not np.isfinite(labels[key]).any()]
    if absent:
        text = f"has no labels for {', '.join(absent)}"
        findings.append(
            input_warning(
                Reason.UNMATCHED_LABELS,
                text,
                "rr comes from Breaths, hr and spo2 from Numerics",
                file=rel,
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
        findings=findings,
    )


def window_starts(seconds: float) -> np.ndarray:
    """Beginnings of the windows in seconds: every 3 s, as long as 32 s follow."""
    return np.arange(max(0, int((seconds - WINDOW) / STEP + 1e-6) + 1)) * STEP


def average_numbers(
    columns: dict[str, np.ndarray], clock: np.ndarray, seconds: float
) -> dict[str, np.ndarray]:
    """Mean of the plausible numbers [n] of each window, NaN where fewer than half of its seconds
    have one; `clock` [n] and `seconds` in s.
    """
    out = {}
    for label, values in columns.items():
        key = NUMERICS.get(label.upper())
        if key is not None:
            low, high = PLAUSIBLE[key]
            known = np.isfinite(values) & (values >= low) & (values <= high)
            inside = [known & (clock >= t) & (clock < t + WINDOW) for t in window_starts(seconds)]
            out[key] = np.array(
                [values[rows].mean() if 2 * rows.sum() >= WINDOW else np.nan for rows in inside]
            )
    return out


def compute_breathing_rates(annotators: Sequence[np.ndarray], seconds: float) -> np.ndarray:
    """Respiratory rate of each window, a minute: from the first to the last breath in it, the mean
    over annotators who marked two or more.

    `annotators`: seconds of the breaths of each, float64 [n]; NaN stands for a breath that is known
    to be missing: the interval over it does not count.
    """
    low, high = PLAUSIBLE["rr"]
    marked = [_order_breaths(times) for times in annotators]
    out = []
    for t in window_starts(seconds):
        rates = []
        for times, resumes in marked:
            rows = (times >= t) & (times < t + WINDOW)
            inside, broken = times[rows], resumes[rows][1:]
            duration = (
                inside[-1] - inside[0] - np.diff(inside)[broken].sum() if len(inside) else 0.0
            )
            if duration > 0:
                rates.append(60.0 * np.count_nonzero(~broken) / duration)
        mean = float(np.mean(rates)) if rates else np.nan
        out.append(mean if low <= mean <= high else np.nan)
    return np.array(out)


def _order_breaths(times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The known breaths in order, and whether a missing one precedes each."""
    known = ~np.isnan(times)
    resumes = np.diff(np.flatnonzero(known), prepend=-1) > 1
    order = np.argsort(times[known], kind="stable")
    return times[known][order], resumes[order]
