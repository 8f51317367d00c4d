"""IEEEPPG: heart rate while running, from two PPG and three acceleration channels.

Two forms: the .ts files of the regression archive, and what they were cut from, the recordings of
the IEEE Signal Processing Cup 2015 (TROIKA) as MATLAB 5 files. Both give the same windows; only the
recordings say who is who.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath

import numpy as np

from bitimely_core.datasets import physiology, tser
from bitimely_core.datasets.raw_files import list_paths, make_unit, report_count, two_forms_error
from bitimely_core.errors import Finding, Reason, input_error, input_warning, safe_text, usage_error
from bitimely_core.formats import matlab
from bitimely_core.formats.source import (
    Source,
    choose_copy,
    locate_errors,
    report_unclaimed,
    require_source,
)
from bitimely_core.formats.units import narrow_samples
from bitimely_core.registry import DatasetBaseline, DatasetFacts, View, datasets
from bitimely_core.types import IngestOptions, IngestUnit, Record, Signal

RATE = 125.0  # Hz
NAMES = ("PPG 1", "PPG 2", "ACC x", "ACC y", "ACC z")
CHANNELS = tuple(tser.TserChannel(name, RATE, "", 1000) for name in NAMES)
WINDOW, STEP = 1000, 250  # samples of a label, and from one to the next: 8 s every 2 s
ROWS = {6: ("ECG", *NAMES), 5: NAMES}  # of `sig`
LOWEST = -1024.0  # of the converter
PLAUSIBLE = (20.0, 250.0)  # beats a minute
FILE = re.compile(
    r"(?:.*/)?(?:(?P<train>DATA_(?P<number>\d\d)_TYPE\d\d)(?P<trace>_BPMtrace)?"
    r"|(?P<kind>TEST|True|DATA|BPM)_(?P<test>(?P<person>S\d\d)_T\d\d))\.mat",
    re.IGNORECASE | re.ASCII,
)
LAYOUT = re.compile(r"(SHA256SUMS|LICENSE|README).*|.*\.(txt|md|pdf|docx?|m)", re.IGNORECASE)


@dataclass(kw_only=True)
class CupRecording:
    """The files of a recording of the cup: one of each, and copies of it."""

    person: str
    part: str  # train, test, extra
    signals: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)

    @property
    def files(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.signals, *self.labels)


def _measure_rate(
    first: np.ndarray, second: np.ndarray, x: np.ndarray, y: np.ndarray, z: np.ndarray, rate: float
) -> float:
    return physiology.measure_motion_free_rate((first, second), (x, y, z), rate)


@datasets(
    DatasetFacts(
        subject_unit=tser.name_unit,
        title="IEEEPPG: heart rate of runners from wrist PPG and acceleration",
        views={
            "": View(
                channels=NAMES,
                rate=RATE,
                window=WINDOW,
                stride=STEP,
                task="regression",
                target="hr",
                unit="/min",
                label_scales="rate",
                split="official",
                help=(
                    "heart rate in beats a minute from 8 s of two PPG and three acceleration "
                    "channels at 125 Hz"
                ),
            )
        },
        licence="CC-BY 4.0; the recordings of the cup are free for research",
        url="https://zenodo.org/records/3902710",
        download="IEEEPPG_TRAIN.ts and IEEEPPG_TEST.ts from the url, into one folder; or the "
        "recordings of the IEEE Signal Processing Cup 2015: "
        "https://sites.google.com/site/researchbyzhang/ieeespcup2015",
        layout="IEEEPPG_TRAIN.ts and IEEEPPG_TEST.ts; or DATA_01_TYPE01.mat with "
        "DATA_01_TYPE01_BPMtrace.mat to DATA_12_TYPE02.mat, and TEST_S01_T01.mat with "
        "True_S01_T01.mat and so on, in any folders",
        paper={"": {"channels": 5, "timesteps": 3_100_000, "sequences": 3096, "length": 1000}},
        rules={
            **tser.RULES,
            "channels": ".ts files name no channels: the order is that of the challenge's "
            "recordings without the ECG, from which the label comes; rows of `sig` in .mat files: "
            "ECG (training alone), PPG 1, PPG 2, acceleration x, y, z",
            "units": "the files name none",
            "labels": "of .mat files: BPM0[k] is the heart rate of the 8 s from second 2 k on",
            "quality": "of .mat files: a constant channel is reported (flat_channel)",
            "copies": (
                "of .mat files: one file in two places is used once, with a warning; a recording "
                "whose files of one name differ is left out"
            ),
            "people": "of .mat files: each training recording is of another person; of the ten "
            "test recordings two are of S02 and two of S06, so they are eight people. TEST "
            "recordings are test, the recordings of a tenth of the training people validation: no "
            "test person is lost",
            "extra": "DATA_S04_T01 is not part of the official training set: it is left out but "
            "under --extra S04_T01, and then it is test, since S04 is a test person",
        },
        options={"extra": None},
        baselines=(
            DatasetBaseline(
                name="spectral-peak",
                about="heart rate from the strongest frequency of the PPGs less that of the "
                "acceleration (subtraction of spectra, Zhang 2015); no training",
                channels=NAMES,
                measure=partial(physiology.measure_channels, channels=NAMES, measure=_measure_rate),
            ),
        ),
    )
)
def ieee_ppg(source: Source | None, options: IngestOptions) -> Iterator[IngestUnit | Finding]:
    """IEEEPPG (.ts of the regression archive, or .mat of the Signal Processing Cup 2015): heart
    rate of runners from 5 channels.
    """
    source = require_source(source)
    problems = tser.find_problems(source)
    recordings = _find_recordings(source)
    text = f"{len(problems)} problems in .ts files"
    if problems and recordings:
        raise two_forms_error(text, f"{len(recordings)} recordings")
    if len(problems) > 1:
        raise usage_error(
            text, "expected one", "Give the folder of IEEEPPG_TRAIN.ts and IEEEPPG_TEST.ts"
        )
    claimed = {
        name: {path: path for path in recording.files} for name, recording in recordings.items()
    }
    yield from report_unclaimed(source, {**problems, **claimed}, LAYOUT)
    layout = tser.TserLayout(target="hr", channels=CHANNELS, subject="ieee-ppg", windows=True)
    for files in problems.values():
        yield from tser.list_units(source, [tser.TserProblem(files, layout)])
    yield from _list_recordings(source, recordings, options.get("extra"))


# --- recordings of the Signal Processing Cup


def _find_recordings(source: Source) -> dict[str, CupRecording]:
    """Name (DATA_01_TYPE01, TEST_S01_T01, DATA_S04_T01) -> its files."""
    recordings: dict[str, CupRecording] = {}
    for path in list_paths(source):
        if match := FILE.fullmatch(path):
            name, is_label, recording = _parse_name(match)
            recording = recordings.setdefault(name, recording)
            (recording.labels if is_label else recording.signals).append(path)
    return recordings


def _parse_name(match: re.Match[str]) -> tuple[str, bool, CupRecording]:
    """The recording of a file, by its name: its own name, whether the file holds its labels, and
    the recording without files.
    """
    if match["train"]:
        recording = CupRecording(person=f"train-{match['number']}", part="train")
        return match["train"].upper(), bool(match["trace"]), recording
    kind = match["kind"].lower()
    part = "test" if kind in {"test", "true"} else "extra"
    name = f"{'TEST' if part == 'test' else 'DATA'}_{match['test'].upper()}"
    recording = CupRecording(person=f"test-{match['person'].upper()}", part=part)
    return name, kind in {"true", "bpm"}, recording


def _list_recordings(
    source: Source, recordings: Mapping[str, CupRecording], extra: str | None
) -> Iterator[IngestUnit | Finding]:
    """The units; `extra`: name of a recording that is left out by default."""
    included = _find_extra(recordings, extra)
    people = [recording.person for recording in recordings.values() if recording.part == "train"]
    splits = tser.split_by_hash(people, test=False)
    for name, recording in recordings.items():
        if recording.part == "extra":
            yield _report_extra(name, recording, is_used=name == included)
            if name != included:
                continue
        yield _list_unit(source, name, recording, splits.get(recording.person, "test"))


def _find_extra(recordings: Mapping[str, CupRecording], extra: str | None) -> str | None:
    """The recording that `--extra` names. Raises UserError (config, exit 2) for another name."""
    if extra is None:
        return None
    names = {
        name.removeprefix("DATA_"): name
        for name, recording in recordings.items()
        if recording.part == "extra"
    }
    if extra.upper() not in names:
        wanted = ", ".join(names) or "none"
        if not recordings:
            wanted += ": the files are not those of the cup"
        raise usage_error(
            f"no extra recording {safe_text(extra)}", f"expected {wanted}", field="--extra"
        )
    return names[extra.upper()]


def _report_extra(name: str, recording: CupRecording, *, is_used: bool) -> Finding:
    """What is done with a recording that is not part of the official training set."""
    if is_used:
        return input_warning(
            Reason.LEFT_OUT,
            f"{name} is of the test person {recording.person[-3:]}",
            "it is added to the test set",
            file=recording.files[0],
        )
    return input_warning(
        Reason.LEFT_OUT,
        f"{name} is not part of the official training set",
        "left out",
        f"To include it: --extra {name.removeprefix('DATA_')}",
        file=recording.files[0],
        level="info",
    )


def _list_unit(source: Source, name: str, recording: CupRecording, split: str) -> IngestUnit:
    """A recording, or why it cannot be read."""
    chosen = [
        choose_copy(source, paths) for paths in (recording.signals, recording.labels) if paths
    ]
    findings = list(chain.from_iterable(remarks for _, remarks in chosen))
    if not recording.signals:
        error = input_error(
            Reason.MISSING_SIGNAL_FILE, f"has no {name}.mat beside it", file=recording.labels[0]
        )
        findings = [error.finding]
    files = [(source.root / path, path) for path, _ in chosen]
    read = partial(read_recording, name, recording.person, split, *files)
    return make_unit(name, recording.files, findings, read)


def read_recording(
    name: str,
    person: str,
    split: str,
    file: tuple[Path, str],
    labels: tuple[Path, str] | None = None,
) -> Record:
    """A recording with the heart rates of its windows as a channel `hr` (one every 2 s), where it
    has `labels`; files with their names.

    Raises UserError: dimensions, non_finite, physical_range, and as `matlab.read_array`.
    """
    path, rel = file
    with locate_errors(rel):
        rows = _read_rows(path)
        channels = ROWS[len(rows)]
        signals = [
            Signal(channel, RATE, "", narrow_samples(values, channel))
            for channel, values in zip(channels, rows, strict=True)
        ]
    findings = list(chain.from_iterable(map(_check_channel, channels, rows)))
    windows = (rows.shape[1] - WINDOW) // STEP + 1
    remarks: list[Finding] = []
    if labels is None:
        findings.append(
            input_warning(
                Reason.UNMATCHED_LABELS, "has no file of heart rates", "its windows have no labels"
            )
        )
    else:
        with locate_errors(labels[1]):
            rates, remarks = _read_rates(labels[0], windows)
        signals.append(Signal("hr", RATE / STEP, "/min", rates))
        remarks = [remark.at(labels[1]) for remark in remarks]
    programme = PurePosixPath(name).name.rpartition("_")[2]
    return Record(
        recording_id=name,
        subject_id=person,
        signals=signals,
        attributes={"split": split, "programme": programme},
        findings=[finding.at(rel) for finding in (*findings, *remarks)],
    )


def _read_rows(path: Path) -> np.ndarray:
    """The channels of a recording, [5 or 6, samples]. Raises UserError: dimensions, non_finite."""
    rows = matlab.read_array(path, "sig")
    if rows.ndim != 2 or rows.shape[0] not in ROWS or rows.shape[1] < WINDOW:
        raise input_error(
            Reason.DIMENSIONS,
            f"`sig` is {' x '.join(map(str, rows.shape))}",
            "expected 5 or 6 rows of at least 1,000 samples",
            field="sig",
        )
    if np.isinf(rows).any():
        raise input_error(
            Reason.NON_FINITE, "holds infinite values", "expected finite numbers", field="sig"
        )
    return rows


def _check_channel(channel: str, values: np.ndarray) -> list[Finding]:
    """Warnings on a constant channel, missing values, and values at the end of the converter."""
    is_flat = (values == values[0]).all()
    lost, low = int(np.isnan(values).sum()), int((values == LOWEST).sum())
    return [
        *([input_warning(Reason.FLAT_CHANNEL, "is constant", field=channel)] if is_flat else ()),
        *report_count(Reason.MISSING_VALUES, "missing values", lost, field=channel),
        *report_count(
            Reason.CLIPPED,
            f"samples at the lowest value of the converter, {LOWEST:g}",
            low,
            "kept",
            field=channel,
        ),
    ]


def _read_rates(path: Path, windows: int) -> tuple[np.ndarray, list[Finding]]:
    """Heart rate of each window, float32, NaN where it is not plausible; findings."""
    values = matlab.read_array(path, "BPM0")
    # MATLAB writes an empty column as 0 x 0
    if values.ndim != 2 or (values.size and 1 not in values.shape):
        raise input_error(
            Reason.DIMENSIONS,
            f"`BPM0` is {' x '.join(map(str, values.shape))}",
            "expected one column",
            field="BPM0",
        )
    rates = values.ravel().astype(np.float64)
    low, high = PLAUSIBLE
    wrong = ~((rates >= low) & (rates <= high))
    findings = report_count(
        Reason.LABEL,
        f"heart rates that are missing or outside of {low:g} to {high:g}",
        int(wrong.sum()),
        "not used",
        field="BPM0",
    )
    surplus = len(rates) - windows
    if surplus:
        findings.append(
            input_warning(
                Reason.UNMATCHED_LABELS,
                f"{len(rates)} heart rates for {windows} windows",
                "the others have none" if surplus < 0 else "the last are not used",
                field="BPM0",
                count=abs(surplus),
            )
        )
    return np.where(wrong, np.nan, rates).astype(np.float32), findings
