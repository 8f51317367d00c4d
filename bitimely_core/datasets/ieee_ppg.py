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
from pathlib import Path, PurePosixPath

import numpy as np

from bitimely_core.datasets import physiology, tser
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
    r"(?:.*/)?(?:(?P<train>DATA_(?P<number>\d\d)_TYPE\d\d)(?P<trace>_BPMtrace)?|(?P<kind>TEST|True|DATA|BPM)_(?P<test>(?P<person>S\d\d)_T\d\d))\.mat",
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
                split="official",
                help="heart rate in beats a minute from 8 s of two PPG and three acceleration channels at 125 Hz",
            )
        },
        licence="CC-BY 4.0; the recordings of the cup are free for research",
        url="https://zenodo.org/records/3902710",
        download="IEEEPPG_TRAIN.ts and IEEEPPG_TEST.ts from the url, into one folder; or the recordings of the IEEE Signal Processing Cup 2015: "
        "https://sites.google.com/site/researchbyzhang/ieeespcup2015",
        layout="IEEEPPG_TRAIN.ts and IEEEPPG_TEST.ts; or DATA_01_TYPE01.mat with DATA_01_TYPE01_BPMtrace.mat to DATA_12_TYPE02.mat, and "
        "TEST_S01_T01.mat with True_S01_T01.mat and so on, in any folders",
        paper={
            "": {
                "channels": 5,
                "timesteps": 3_100_000,
                "sequences": 3096,
                "length": 1000,
                "classes": None,
            }
        },
        rules={
            **tser.RULES,
            "channels": ".ts files name no channels: the order is that of the challenge's recordings without the ECG, from which the label comes; "
            "rows of `sig` in .mat files: ECG (training alone), PPG 1, PPG 2, acceleration x, y, z",
            "units": "the files name none",
            "labels": "of .mat files: BPM0[k] is the heart rate of the 8 s from second 2 k on",
            "quality": "of .mat files: a constant channel is reported (flat_channel)",
            "copies": "of .mat files: one file in two places is used once, with a warning; a recording whose files of one name differ is left out",
            "people": "of .mat files: each training recording is of another person; of the ten test recordings two are of S02 and two of S06, so "
            "they are eight people. TEST recordings are test, the recordings of a tenth of the training people validation: no test person is lost",
            "extra": "DATA_S04_T01 is not part of the official training set: it is left out but under --extra S04_T01, and then it is test, since "
            "S04 is a test person",
        },
        options={"extra": None},
        baselines=(
            DatasetBaseline(
                name="spectral-peak",
                about="heart rate from the strongest frequency of the PPGs less that of the acceleration (subtraction of spectra, Zhang 2015); "
                "no training",
                predict=partial(physiology.predict_rates, channels=NAMES, measure=_measure_rate),
            ),
        ),
    )
)
def ieee_ppg(source: Source | None, options: IngestOptions) -> Iterator[IngestUnit | Finding]:
    """IEEEPPG (.ts of the regression archive, or .mat of the Signal Processing Cup 2015): heart
    rate of runners from 5 channels.
    """
    source = require_source(source)
    found = tser.find_problems(source)
    recordings = _find_recordings(source)
    if found and recordings:
        text = f"{len(found)} problems in .ts files and {len(recordings)} recordings"
        raise usage_error(text, "expected one form of one data set", "Give the folder of one form")
    if len(found) > 1:
        raise usage_error(
            f"{len(found)} problems in .ts files",
            "expected one",
            "Give the folder of IEEEPPG_TRAIN.ts and IEEEPPG_TEST.ts",
        )
    claimed = {
        name: {rel: rel for rel in (*one.signals, *one.labels)} for name, one in recordings.items()
    }
    yield from report_unclaimed(source, {**found, **claimed}, LAYOUT)
    for files in found.values():
        yield from tser.list_units(
            source,
            {"": files},
            {"": tser.TserLayout(target="hr", channels=CHANNELS, subject="ieee-ppg", windows=True)},
        )
    yield from _list_recordings(source, recordings, options.get("extra"))


# --- recordings of the Signal Processing Cup


def _find_recordings(source: Source) -> dict[str, CupRecording]:
    """Name (DATA_01_TYPE01, TEST_S01_T01, DATA_S04_T01) -> its files."""
    found: dict[str, CupRecording] = {}
    for rel in sorted({*source.files, *source.rejected}):
        if (named := FILE.fullmatch(rel)) is None:
            continue
        if named["train"]:
            name, person, part, is_label = (
                named["train"].upper(),
                f"train-{named['number']}",
                "train",
                bool(named["trace"]),
            )
        else:
            part = "test" if named["kind"].lower() in {"test", "true"} else "extra"
            name = f"{'TEST' if part == 'test' else 'DATA'}_{named['test'].upper()}"
            person, is_label = (
                f"test-{named['person'].upper()}",
                named["kind"].lower() in {"true", "bpm"},
            )
        one = found.setdefault(name, CupRecording(person=person, part=part))
        (one.labels if is_label else one.signals).append(rel)
    return found


def _list_recordings(
    source: Source, recordings: Mapping[str, CupRecording], extra: str | None
) -> Iterator[IngestUnit | Finding]:
    """The units; `extra`: name of a recording that is left out by default."""
    others = {
        name.removeprefix("DATA_"): name for name, one in recordings.items() if one.part == "extra"
    }
    if extra is not None and extra.upper() not in others:
        known = (
            f"expected {', '.join(others) or 'none'}"
            if recordings
            else "expected none: the files are not those of the cup"
        )
        raise usage_error(f"no extra recording {safe_text(extra)}", known, field="--extra")
    people = sorted({one.person for one in recordings.values() if one.part == "train"})
    placed = tser.split_by_hash(people, test=False)
    for name, one in recordings.items():
        if one.part == "extra":
            if extra is None or name != others[extra.upper()]:
                text, wanted = f"{name} is not part of the official training set", "left out"
                action = f"To include it: --extra {name.removeprefix('DATA_')}"
                yield input_warning(
                    Reason.LEFT_OUT,
                    text,
                    wanted,
                    action,
                    file=[*one.signals, *one.labels][0],
                    level="info",
                )
                continue
            text, wanted = (
                f"{name} is of the test person {one.person[-3:]}",
                "it is added to the test set",
            )
            yield input_warning(Reason.LEFT_OUT, text, wanted, file=[*one.signals, *one.labels][0])
        split = placed[one.person] if one.part == "train" else "test"
        chosen = [choose_copy(source, same) for same in (one.signals, one.labels) if same]
        findings = tuple(finding for _, found in chosen for finding in found)
        if not one.signals:
            text = f"has no {name}.mat beside it"
            findings = (
                Finding(
                    Reason.MISSING_SIGNAL_FILE, text, hint="Download it again", file=one.labels[0]
                ),
            )
        is_faulty = any(finding.level == "error" for finding in findings)
        files = [(source.path(rel), rel) for rel, _ in chosen] if not is_faulty else []
        read = partial(read_recording, name, one.person, split, *files) if files else None
        yield IngestUnit(name=name, files=(*one.signals, *one.labels), read=read, findings=findings)


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
    with locate_errors(file[1]):
        rows = matlab.read_array(file[0], "sig")
        if rows.ndim != 2 or rows.shape[0] not in ROWS or rows.shape[1] < WINDOW:
            text = f"`sig` is {' x '.join(map(str, rows.shape))}"
            raise input_error(
                Reason.DIMENSIONS,
                text,
                "expected 5 or 6 rows of at least 1,000 samples",
                field="sig",
            )
        if np.isinf(rows).any():
            raise input_error(
                Reason.NON_FINITE, "holds infinite values", "expected finite numbers", field="sig"
            )
    findings = []
    signals = []
    for channel, values in zip(ROWS[len(rows)], rows, strict=True):
        with locate_errors(file[1]):
            signals.append(Signal(channel, RATE, "", narrow_samples(values, channel)))
        if (values == values[0]).all():
            findings.append(input_warning(Reason.FLAT_CHANNEL, "is constant", field=channel))
        if lost := int(np.isnan(values).sum()):
            findings.append(
                input_warning(
                    Reason.MISSING_VALUES, f"missing values: {lost}", field=channel, count=lost
                )
            )
        if low := int((values == LOWEST).sum()):
            text = f"samples at the lowest value of the converter, {LOWEST:g}: {low}"
            findings.append(input_warning(Reason.CLIPPED, text, "kept", field=channel, count=low))
    windows = (rows.shape[1] - WINDOW) // STEP + 1
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
        findings += [finding.at(labels[1]) for finding in remarks]
    findings = [finding.at(file[1]) for finding in findings]
    programme = PurePosixPath(name).name.rpartition("_")[2]
    return Record(
        recording_id=name,
        subject_id=person,
        signals=signals,
        attributes={"split": split, "programme": programme},
        findings=findings,
    )


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
    findings = []
    wrong = ~((rates >= PLAUSIBLE[0]) & (rates <= PLAUSIBLE[1]))
    if count := int(wrong.sum()):
        text = f"heart rates that are missing or outside of {PLAUSIBLE[0]:g} to {PLAUSIBLE[1]:g}: {count}"
        findings.append(input_warning(Reason.LABEL, text, "not used", field="BPM0", count=count))
    if len(rates) != windows:
        text, wanted = (
            f"{len(rates)} heart rates for {windows} windows",
            "the others have none" if len(rates) < windows else "the last are not used",
        )
        findings.append(
            input_warning(
                Reason.UNMATCHED_LABELS, text, wanted, field="BPM0", count=abs(len(rates) - windows)
            )
        )
    return np.where(wrong, np.nan, rates).astype(np.float32), findings
