"""BIDMC PPG and Respiration: 53 recordings of 8 minutes of 46 patients in intensive care, with respiratory rate, heart rate and oxygen saturation.

Three forms: the regression archive's BIDMC32RR, BIDMC32HR and BIDMC32SpO2 (.ts: windows of 32 s), and PhysioNet's csv or WFDB files
(full recordings with the monitor's numbers once a second, and breaths marked by two annotators). All give the same channels and windows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np

from bitimely_core import storage
from bitimely_core.datasets import physiology, tser
from bitimely_core.errors import Finding, Reason, UserError, input_error, input_warning, safe_text, usage_error
from bitimely_core.formats import tables, wfdb
from bitimely_core.formats.source import Source, locate_errors, require_source
from bitimely_core.registry import DatasetBaseline, DatasetFacts, View, datasets
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import IngestOptions, IngestUnit, Record, Signal

RATE = 125.0  # Hz
WINDOW, STEP = 32.0, 3.0  # s of a label, and from one to the next: 150 windows a recording, as in the archive
KINDS = ("Signals", "Breaths", "Numerics", "Fix")
CSV = re.compile(rf"(?:.*/)?(bidmc_(\d\d))_({'|'.join(KINDS)})\.(?:csv|txt)", re.IGNORECASE)
WFDB = re.compile(r"(?:.*/)?(bidmc(\d\d))(n?)\.hea", re.IGNORECASE)
PROBLEM = re.compile(r"(?:.*/)?BIDMC(?:32)?(RR|HR|SpO2)", re.IGNORECASE)
LAYOUT = re.compile(
    r"(RECORDS|SHA256SUMS|LICENSE|README|ANNOTATORS|index\.html).*|bidmc_?\d\d.*\.(dat|hea|breath|txt|csv)|bidmc_data\.mat|.*\.(txt|md)",
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
FIRST_OF = {  # recording -> the first of the same patient: one MIMIC II subject in the Fix files, with one age and sex
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
            "": View(channels=NEEDED, rate=RATE, window=4000, split="official", help="PPG and ECG at 125 Hz, no labels"),
            "rr": _make_view("rr", "respiratory rate (breaths a minute)"),
            "hr": _make_view("hr", "heart rate (beats a minute)"),
            "spo2": _make_view("spo2", "oxygen saturation (percent)"),
        },
        licence="ODC-BY 1.0",
        url="https://physionet.org/content/bidmc/1.0.0/",
        download="wget -r -N -c -np -nH --cut-dirs=3 https://physionet.org/files/bidmc/1.0.0/   or the BIDMC32*.ts files of "
        "https://zenodo.org/records/4001463 (RR), 4001456 (HR) and 4001464 (SpO2)",
        layout="bidmc_csv/ with bidmc_01_Signals.csv, bidmc_01_Numerics.csv and bidmc_01_Breaths.csv, or the WFDB records bidmc01 and bidmc01n, "
        "or BIDMC32RR_TRAIN.ts and BIDMC32RR_TEST.ts (HR, SpO2)",
        paper={
            "rr": {"channels": 2, "timesteps": 31_500_000, "sequences": 7870, "length": 4000, "classes": None},
            "hr": {"channels": 2, "timesteps": 31_800_000, "sequences": 7949, "length": 4000, "classes": None},
            "spo2": {"channels": 2, "timesteps": 31_800_000, "sequences": 7949, "length": 4000, "classes": None},
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
            "forms": "where a recording exists as csv and as WFDB, csv is read: it has the breaths",
        },
        baselines=(
            DatasetBaseline(
                name="ppg-peaks",
                about="heart rate from the median interval of the peaks of the PPG, 0.5 to 8 Hz (Elgendi et al. 2013); no training",
                predict=partial(physiology.predict_rates, channels=("PPG",), measure=physiology.measure_pulse_rate),
                views=("hr",),
            ),
            DatasetBaseline(
                name="ecg-peaks",
                about="heart rate from the median interval of the R peaks of the ECG (Pan and Tompkins 1985); no training",
                predict=partial(physiology.predict_rates, channels=("ECG",), measure=physiology.measure_heart_rate),
                views=("hr",),
            ),
            DatasetBaseline(
                name="ppg-level",
                about="respiratory rate from the strongest frequency of the PPG between 0.1 and 0.5 Hz (Karlen et al. 2013); no training",
                predict=partial(physiology.predict_rates, channels=("PPG",), measure=physiology.measure_breathing_rate),
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
    """BIDMC (PhysioNet csv or WFDB, or .ts of the regression archive): RR, HR and SpO2 from PPG and ECG."""
    source = require_source(source)
    found = tser.find_problems(source)
    tables_of: dict[str, dict[str, list[str]]] = {}
    headers: dict[str, dict[str, list[str]]] = {}
    for rel in [*source.files, *source.rejected]:
        if named := CSV.fullmatch(rel):
            kind = next(kind for kind in KINDS if kind.lower() == named[3].lower())
            tables_of.setdefault(f"bidmc_{named[2]}", {}).setdefault(kind, []).append(rel)
        elif named := WFDB.fullmatch(rel):
            headers.setdefault(f"bidmc_{named[2]}", {}).setdefault("numerics" if named[3] else "signals", []).append(rel)
    names = sorted(
        {name for name, files in tables_of.items() if "Signals" in files} | {name for name, files in headers.items() if "signals" in files}
    )
    if found and names:
        text, action = f"{len(found)} problems in .ts files and {len(names)} recordings", "Give the folder of one form"
        raise usage_error(text, "expected one form of one data set", action)
    claimed = {name: {rel: rel for same in files.values() for rel in same} for of in (tables_of, headers) for name, files in of.items()}
    yield from tser.report_unclaimed(source, {**found, **claimed}, LAYOUT)
    if found:
        yield from _list_problem_units(source, found)
    placed = tser.split_by_hash([find_patient(name) for name in RECORDINGS])
    for name in names:
        split = placed.get(find_patient(name), "train")
        is_table = "Signals" in tables_of.get(name, {})
        files, repeated = _choose_copies(source, tables_of[name] if is_table else headers[name])
        if differing := tuple(finding for finding in repeated if finding.level == "error"):
            yield IngestUnit(name=name, files=tuple(finding.file or "" for finding in differing), read=None, findings=differing)
            continue
        yield from repeated
        yield _make_csv_unit(source, name, files, split) if is_table else _make_wfdb_unit(source, name, files, split)
    for name, kinds in tables_of.items():
        if name not in names:
            rels = [rel for same in kinds.values() for rel in same]
            fault = Finding(Reason.MISSING_SIGNAL_FILE, "has no Signals file", hint="Download it again", file=rels[0])
            yield IngestUnit(name=name, files=tuple(rels), read=None, findings=(fault,))


def find_patient(name: str) -> str:
    """The patient of a recording, named as the patient's first recording."""
    return FIRST_OF.get(name, name)


def _choose_copies(source: Source, places: dict[str, list[str]]) -> tuple[dict[str, str], list[Finding]]:
    """One file of each kind, and findings on the others: warnings on equal copies, errors on all where they differ."""
    files: dict[str, str] = {}
    findings: list[Finding] = []
    for kind, found in places.items():
        same = sorted(rel for rel in found if rel.lower().endswith(".csv")) or sorted(found)  # Fix comes as text
        files[kind], others = same[0], same[1:]
        contents = {_hash_parts(source, rel) for rel in same} if others else set()
        if len(contents) > 1:
            text, hint = f"is there {len(same)} times, with different contents", "Keep the right one"
            findings += [Finding(Reason.DUPLICATE_KEY, text, "expected one copy of each file", hint, file=rel) for rel in same]
        else:
            findings += [input_warning(Reason.DUPLICATES, f"is a copy of {safe_text(same[0])}", "used once", file=rel) for rel in others]
    return files, findings


def _hash_parts(source: Source, rel: str) -> tuple[str, ...]:
    """SHA-256 of a file, and of a WFDB header's signal files after it; the name of one that cannot be read, which is no copy of another."""
    try:
        rels = [rel, *(wfdb.read_header(rel, source, required=()).files if rel.lower().endswith(".hea") else ())]
        return tuple(storage.hash_file(source.path(one)) for one in rels)
    except UserError as error:
        raise_system_error(error)
        return (rel,)


def _list_problem_units(source: Source, found: dict[str, dict[str, str]]) -> Iterator[IngestUnit | Finding]:
    """The problems in .ts files; their recordings are the same, so they are split together."""
    layouts: dict[str, tser.TserLayout] = {}
    for problem, files in found.items():
        named = PROBLEM.fullmatch(problem)
        if named is None:
            text = f"the problem {safe_text(PurePosixPath(problem).name)}"
            raise usage_error(text, "expected BIDMC32RR, BIDMC32HR, BIDMC32SpO2", file=next(iter(files.values())))
        channels = tuple(tser.TserChannel(name, RATE, "", 4000) for name in NEEDED)
        layouts[problem] = tser.TserLayout(target=named[1].lower(), channels=channels, subject="bidmc", windows=True)
    if len({layout.target for layout in layouts.values()}) < len(layouts):
        raise usage_error("one of the problems occurs twice", hint="Give the folder of one copy")
    yield from tser.list_units(source, found, layouts)


# --- PhysioNet: csv


def _make_csv_unit(source: Source, name: str, files: dict[str, str], split: str) -> IngestUnit:
    """The recording `name` from its csv files."""
    faults = tuple(source.rejected[rel] for rel in files.values() if rel in source.rejected)
    ordered = tuple(files[kind] for kind in KINDS if kind in files)
    if faults:
        return IngestUnit(name=name, files=ordered, read=None, findings=faults)
    paths: dict[str, tuple[Path, str]] = {
        kind: (source.path(files[kind]), files[kind]) for kind in ("Signals", "Breaths", "Numerics") if kind in files
    }
    return IngestUnit(name=name, files=ordered, read=partial(read_tables, name, paths, split))


def read_tables(name: str, files: dict[str, tuple[Path, str]], split: str) -> Record:
    """One recording from Signals, Breaths and Numerics tables.

    Raises UserError: faults of a table: schema, sampling_rate, row_width, not_numeric and so on.
    """
    path, rel = files["Signals"]
    with locate_errors(rel):
        columns, values = _read_columns(path, "Time [s]", "Time")
        rows = len(values[0])
        start = float(values[0][0])  # a part of a recording may begin later: breaths and numbers have the clock of the whole
        late = np.abs(values[0] - start - np.arange(rows) / RATE).max()
        if late > 0.75 / RATE:  # the official files round the times to a hundredth of a second
            text = f"{rows} rows whose times do not run at {RATE:g} Hz"
            raise input_error(Reason.SAMPLING_RATE, text, f"expected a row every {1 / RATE:g} s", field="Time [s]")
        signals = [_make_signal(label, "", values[i]) for i, label in enumerate(columns) if i > 0]
    seconds = rows / RATE
    labels: dict[str, np.ndarray] = {}
    findings: list[Finding] = []
    if abs(start) > 0.5 / RATE:
        text = f"the signals begin at {start:g} s"
        findings.append(
            input_warning(Reason.TIMESTAMPS, text, "breaths and numbers of other times are not used", field="Time [s]", file=rel)
        )
    if "Breaths" in files:
        with locate_errors(files["Breaths"][1]):
            annotators = [times - start for times in _read_breaths(files["Breaths"][0])]
            labels["rr"] = compute_breathing_rates(annotators, seconds)
        findings += [finding.at(files["Breaths"][1]) for finding in _report_breaths(annotators, seconds)]
    if "Numerics" in files:
        with locate_errors(files["Numerics"][1]):
            columns, values = _read_columns(files["Numerics"][0], "Time [s]", "Time")
            numbers, clock = {label: values[i] for i, label in enumerate(columns)}, values[0] - start
            labels |= average_numbers(numbers, clock, seconds)
        findings += [finding.at(files["Numerics"][1]) for finding in (*_report_clock(clock, seconds), *_report_numbers(numbers, labels))]
    return _make_record(name, signals, labels, split, rel, findings)


def _read_columns(path: Path, *clocks: str) -> tuple[list[str], list[np.ndarray]]:
    """Names and values (float64, NaN where a cell is empty or NaN) of a table of numbers, the column of times first."""
    names = tables.read_names(path)
    clock = next((name for name in clocks if name in names), None)
    if clock is None or len(set(names)) < len(names):
        wanted = f"expected {clocks[0]} and channels of different names"
        raise input_error(Reason.SCHEMA, f"has the columns {', '.join(map(safe_text, names[:12]))}", wanted, field=clocks[0])
    order = [clock, *(name for name in names if name and name != clock)]
    table = tables.read_number_table(path, order, missing=("nan",))
    if not len(table) or np.isnan(table[:, 0]).any():
        raise input_error(Reason.TIMESTAMPS, "has rows without a time" if len(table) else "has no rows", field=clock)
    return order, list(np.ascontiguousarray(table.T))


def _read_breaths(path: Path) -> list[np.ndarray]:
    """Breaths that each annotator marked, in seconds, in the order of the rows; NaN where the cell is empty or NaN."""
    table = tables.read_number_table(path, tables.read_names(path), missing=("nan",))
    return list(np.ascontiguousarray(table.T) / RATE)


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
            (end, Reason.MISSING_VALUES, f"rows at the end without a breath of {who}: {end}", "the breaths that are marked are used"),
            (inner, Reason.MISSING_VALUES, f"breaths of {who} missing between others: {inner}", "the intervals over them are not used"),
            (unordered, Reason.TIMESTAMPS, f"breaths of {who} that do not follow the one before: {unordered}", "they are put in order"),
            (outside, Reason.ANNOTATION_OUT_OF_RANGE, f"breaths of {who} outside of the signal: {outside}", "not used"),
        ):
            if count:
                found.append(input_warning(code, text, effect, field=f"ann{number}", count=count))
    return found


def _report_clock(clock: np.ndarray, seconds: float) -> list[Finding]:
    """A warning where the numbers, one a second, do not reach from the beginning of the signals to their end; `clock`: their times in s."""
    absent = max(0.0, clock[0]) + max(0.0, seconds - 1.0 - clock[-1])
    if absent <= 1.0:
        return []
    text = f"numbers from {clock[0]:g} to {clock[-1]:g} s of signals of {seconds:g} s"
    return [input_warning(Reason.TIMESTAMPS, text, "windows without numbers have no labels of them", field="Time [s]")]


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
                found.append(input_warning(Reason.MISSING_VALUES, f"seconds without a number: {absent}", effect, field=label, count=absent))
            if wrong:
                text = f"numbers outside of {low:g} to {high:g} {UNITS[key]}, which are not used: {wrong}"
                found.append(input_warning(Reason.PHYSICAL_RANGE, text, effect, field=label, count=wrong))
    return found


# --- PhysioNet: WFDB


def _make_wfdb_unit(source: Source, name: str, files: dict[str, str], split: str) -> IngestUnit:
    """The recording `name` from its WFDB records."""
    names: list[str] = []
    try:
        for rel in files.values():
            with locate_errors(rel):
                names += wfdb.read_header(rel, source, required=()).files
    except UserError as error:
        raise_system_error(error)
        return IngestUnit(name=name, files=tuple(files.values()), read=None, findings=(error.finding,))
    own = replace(source, files={rel: source.files[rel] for rel in names}, rejected={})
    return IngestUnit(name=name, files=tuple(dict.fromkeys(names)), read=partial(read_records, name, own, files, split))


def read_records(name: str, source: Source, files: dict[str, str], split: str) -> Record:
    """One recording from its record of signals and, if present, that of the monitor's numbers."""
    rel = files["signals"]
    found = wfdb.read_recording(rel, source, required=())
    findings = [finding.at(rel) for finding in found.findings]
    with locate_errors(rel):
        if any(abs(signal.rate - RATE) > 1e-6 or signal.onset for signal in found.signals):
            raise input_error(Reason.SAMPLING_RATE, "the signals are not in one piece at one rate", f"expected {RATE:g} Hz")
    signals = [signal._replace(channel=_channel_name(signal.channel)) for signal in found.signals]
    seconds = max(len(signal.samples) for signal in signals) / RATE
    labels: dict[str, np.ndarray] = {}
    if "numerics" in files:
        numbers = wfdb.read_recording(files["numerics"], source, required=())
        findings += [finding.at(files["numerics"]) for finding in numbers.findings]
        columns = {s.channel.strip(" ,"): s.samples.astype(np.float64) * s.scale + s.offset for s in numbers.signals}
        clock = np.arange(max(map(len, columns.values()))) / numbers.signals[0].rate
        labels = average_numbers({label: values for label, values in columns.items() if len(values) == len(clock)}, clock, seconds)
    return _make_record(name, signals, labels, split, rel, findings)


# --- what the forms share


def _channel_name(label: str) -> str:
    """A channel's name: PhysioNet's headers end the labels with a comma."""
    label = label.strip(" ,")
    return LEADS.get(label.upper(), label)


def _make_signal(label: str, unit: str, values: np.ndarray) -> Signal:
    with np.errstate(over="ignore"):
        return Signal(_channel_name(label), RATE, unit, values.astype(np.float32))


def _make_record(name: str, signals: list[Signal], labels: dict[str, np.ndarray], split: str, rel: str, findings: list[Finding]) -> Record:
    """The recording, with its labels as channels whose values belong to the 32 s that follow."""
    channels = [signal.channel for signal in signals]
    if len(set(channels)) < len(channels):
        raise input_error(Reason.DUPLICATE_CHANNEL, f"found {', '.join(map(safe_text, channels))}", "expected each once", file=rel)
    if missing := [channel for channel in NEEDED if channel not in channels]:
        findings.append(input_warning(Reason.MISSING_CHANNEL, f"has no {' and no '.join(missing)}", "excluded from the views", file=rel))
    for signal in signals:
        if lost := int(np.count_nonzero(np.isnan(signal.samples))) if signal.samples.dtype.kind == "f" else 0:
            text = f"{lost} values of {safe_text(signal.channel)} are missing"
            findings.append(input_warning(Reason.MISSING_VALUES, text, count=lost, file=rel))
    absent = [key for key in PLAUSIBLE if key not in labels or not np.isfinite(labels[key]).any()]
    if absent:
        text = f"has no labels for {', '.join(absent)}"
        findings.append(input_warning(Reason.UNMATCHED_LABELS, text, "rr comes from Breaths, hr and spo2 from Numerics", file=rel))
    clocks = [Signal(key, 1 / STEP, UNITS[key], values.astype(np.float32)) for key, values in labels.items() if key not in absent]
    return Record(
        recording_id=name, subject_id=find_patient(name), signals=[*signals, *clocks], attributes={"split": split}, findings=findings
    )


def window_starts(seconds: float) -> np.ndarray:
    """Beginnings of the windows in seconds: every 3 s, as long as 32 s follow."""
    return np.arange(max(0, int((seconds - WINDOW) / STEP + 1e-6) + 1)) * STEP


def average_numbers(columns: dict[str, np.ndarray], clock: np.ndarray, seconds: float) -> dict[str, np.ndarray]:
    """Mean of the plausible numbers [n] of each window, NaN where fewer than half of its seconds have one; `clock` [n] and `seconds` in s."""
    out = {}
    for label, values in columns.items():
        key = NUMERICS.get(label.upper())
        if key is not None:
            low, high = PLAUSIBLE[key]
            known = np.isfinite(values) & (values >= low) & (values <= high)
            inside = [known & (clock >= t) & (clock < t + WINDOW) for t in window_starts(seconds)]
            out[key] = np.array([values[rows].mean() if 2 * rows.sum() >= WINDOW else np.nan for rows in inside])
    return out


def compute_breathing_rates(annotators: Sequence[np.ndarray], seconds: float) -> np.ndarray:
    """Respiratory rate of each window, a minute: from the first to the last breath in it, the mean over annotators who marked two or more.

    `annotators`: seconds of the breaths of each, float64 [n]; NaN stands for a breath that is known to be missing: the interval over it does
    not count.
    """
    low, high = PLAUSIBLE["rr"]
    marked = [_order_breaths(times) for times in annotators]
    out = []
    for t in window_starts(seconds):
        rates = []
        for times, resumes in marked:
            rows = (times >= t) & (times < t + WINDOW)
            inside, broken = times[rows], resumes[rows][1:]
            duration = inside[-1] - inside[0] - np.diff(inside)[broken].sum() if len(inside) else 0.0
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
