"""PPG-DaLiA: wrist PPG and acceleration of 15 subjects in daily life, with the heart rate of every
8 seconds.

Two forms: the regression archive's PPGDalia_TRAIN.ts and PPGDalia_TEST.ts (windows of 8 s without
subjects), and the original archive's S1/S1.pkl ... S15/S15.pkl (full recordings), which are read
without running their code. Both give the same channels and windows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from bitimely_core.datasets import tser
from bitimely_core.datasets.raw_files import list_rejected, make_unit, two_forms_error
from bitimely_core.errors import Finding, Reason, UserError, input_error, input_warning, safe_text
from bitimely_core.formats import pickles
from bitimely_core.formats.source import Source, locate_errors, report_unclaimed, require_source
from bitimely_core.registry import DatasetFacts, View, datasets
from bitimely_core.types import AttributeValue, IngestOptions, IngestUnit, Record, Signal

PPG, ACC = 64.0, 32.0  # Hz
WINDOW, STEP = 8.0, 2.0  # s of a label, and from one to the next
SUBJECTS = tuple(f"S{i}" for i in range(1, 16))
AXES = ("ACC x", "ACC y", "ACC z")
# largest difference of numbers of labels and windows that counts as rounding of the clocks
SLACK = 4

CHANNELS = (
    tser.TserChannel("PPG", PPG, "", 512),
    *(tser.TserChannel(axis, ACC, "g", 256) for axis in AXES),
)
PICKLE = re.compile(r"(?:.*/)?(S\d{1,3})\.pkl", re.IGNORECASE)
LAYOUT = re.compile(
    r"(RECORDS|SHA256SUMS|LICENSE|README|index\.html).*|.*\.(txt|md|pdf)|S\d+_.*\.(h5|csv|zip|txt)",
    re.IGNORECASE,
)

VIEW = View(
    channels=("PPG", *AXES),
    rate=ACC,
    window=256,
    stride=64,
    task="regression",
    target="hr",
    unit="/min",
    label_scales="rate",
    split="official",
    decimate=("PPG",),
    help=(
        "heart rate in beats a minute from 8 s of PPG and acceleration; the PPG is decimated to 32 "
        "Hz with an anti-alias filter"
    ),
)


@datasets(
    DatasetFacts(
        subject_unit=tser.name_unit,
        title="PPG-DaLiA: heart rate from wrist PPG and acceleration in daily life",
        views={"": VIEW},
        licence="CC-BY 4.0",
        url="https://archive.ics.uci.edu/dataset/495/ppg+dalia",
        download=(
            "PPGDalia_TRAIN.ts and PPGDalia_TEST.ts from https://zenodo.org/records/3902728, or "
            "the original archive from the url, unpacked"
        ),
        native_rates={"PPG": PPG},
        layout="PPGDalia_TRAIN.ts and PPGDalia_TEST.ts, or S1/S1.pkl to S15/S15.pkl",
        paper={
            "": {
                "channels": 4,
                "timesteps": 16_600_000,
                "sequences": 64_697,
                "length": "256 & 512",
                "subjects": 15,
            }
        },
        rules={
            **tser.RULES,
            "channels": "in .ts files the channel of 512 values is the PPG (64 Hz), those of 256 "
            "the acceleration (32 Hz) in x, y, z; in pickles wrist BVP and wrist ACC by name; "
            "chest signals are not kept",
            "windows": (
                "a label is the heart rate of 8 s, one every 2 s; of pickles, windows without a "
                "label are excluded from the view"
            ),
            "pickles": (
                "read by an allow-list of numpy's own names; no code in them is run; age and sex "
                "are kept, other answers are not"
            ),
            "subjects": (
                "of pickles S1 ... S15, split 12/1/2 once and for all by hash (two test, one "
                "validation); of .ts files the recordings found"
            ),
        },
    )
)
def ppg_dalia(source: Source | None, options: IngestOptions) -> Iterator[IngestUnit | Finding]:
    """PPG-DaLiA (.ts of the regression archive, or the original pickles): heart rate of 15
    subjects.
    """
    source = require_source(source)
    problems = tser.find_problems(source)
    matches = filter(None, map(PICKLE.fullmatch, [*source.files, *source.rejected]))
    subjects = {match[0]: match[1].upper() for match in matches}
    if len(problems) > 1 or (problems and subjects):
        raise two_forms_error(f"{len(problems)} problems in .ts files", f"{len(subjects)} pickles")
    yield from report_unclaimed(source, {**problems, "": {path: path for path in subjects}}, LAYOUT)
    layout = tser.TserLayout(target="hr", channels=CHANNELS, subject="ppg-dalia", windows=True)
    for files in problems.values():
        yield from tser.list_units(source, [tser.TserProblem(files, layout)])
    splits = tser.split_by_hash(SUBJECTS, sizes=(1, 2))
    for path, subject in subjects.items():
        split = splits.get(subject, "train")
        read = partial(read_subject, source.root / path, path, subject, split)
        yield make_unit(PurePosixPath(path).stem, (path,), list_rejected(source, (path,)), read)


def read_subject(path: Path, rel: str, subject: str, split: str) -> Record:
    """One subject of the original archive: PPG, acceleration, and the heart rate as a channel whose
    values belong to the 8 s that follow.

    Raises UserError: unsafe_pickle, truncated, corrupt; schema for another content; record_name for
    another subject's file; length, label.
    """
    with locate_errors(rel):
        content = pickles.load_pickle(path)
        if not isinstance(content, dict):
            raise _schema_error("content", "is not a dictionary")
        wrist = _get_dict(_get_dict(content, "signal"), "wrist")
        if content.get("subject", subject) != subject:
            raise input_error(
                Reason.RECORD_NAME,
                f"is of subject {safe_text(content['subject'])}",
                f"the name of the file states {subject}",
                field="subject",
            )
        ppg = _to_numbers(_get_entry(wrist, "BVP"), "BVP", 1)[:, 0]
        motion = _to_numbers(_get_entry(wrist, "ACC"), "ACC", len(AXES))
        labels = _to_numbers(_get_entry(content, "label"), "label", 1)[:, 0]
        rates, findings = _match_rates(labels, len(ppg) / PPG, len(motion) / ACC)
        signals = [
            Signal("PPG", PPG, "", _to_float32(ppg, "BVP")),
            *(
                Signal(axis, ACC, "g", _to_float32(values, "ACC"))
                for axis, values in zip(AXES, motion.T, strict=True)
            ),
            Signal("hr", 1.0 / STEP, "bpm", rates),
        ]
    return Record(
        recording_id=subject,
        subject_id=subject,
        signals=signals,
        attributes={"split": split, **_parse_person(content.get("questionnaire"))},
        findings=[finding.at(rel) for finding in findings],
    )


def _match_rates(labels: np.ndarray, ppg: float, motion: float) -> tuple[np.ndarray, list[Finding]]:
    """Heart rate of each window, float32, NaN where it is none, and findings; `ppg`, `motion`:
    seconds of the signals.

    Raises UserError: length, label.
    """
    seconds = min(ppg, motion)
    windows = int((seconds - WINDOW) / STEP + 1e-6) + 1 if seconds >= WINDOW else 0
    if abs(ppg - motion) > WINDOW or abs(windows - len(labels)) > SLACK:
        raise input_error(
            Reason.LENGTH,
            f"{len(labels)} labels, {ppg:g} s of PPG and {motion:g} s of acceleration",
            f"expected a label every {STEP:g} s, for {WINDOW:g} s each",
            field="label",
        )
    findings = []
    if windows != len(labels):
        findings.append(
            input_warning(
                Reason.UNMATCHED_LABELS,
                f"{len(labels)} labels for {windows} windows",
                "what has no counterpart is dropped",
                field="label",
            )
        )
    rates = labels[:windows].astype(np.float32)
    invalid = ~np.isfinite(labels[:windows]) | (labels[:windows] <= 0)
    if invalid.all():
        raise input_error(
            Reason.LABEL, "no heart rate is positive", "expected beats a minute", field="label"
        )
    if count := int(invalid.sum()):
        findings.append(
            input_warning(
                Reason.LABEL,
                f"{count} heart rates are not positive",
                "their windows have no label",
                field="label",
                count=count,
            )
        )
    rates[invalid] = np.nan
    return rates, findings


def _schema_error(field: str, text: str) -> UserError:
    return input_error(
        Reason.SCHEMA, text, "expected the layout of the official archive", field=field
    )


def _get_entry(content: dict[Any, Any], name: str) -> Any:
    """An entry of a dictionary. Raises UserError (schema)."""
    if name not in content:
        raise _schema_error(name, "is missing")
    return content[name]


def _get_dict(content: dict[Any, Any], name: str) -> dict[Any, Any]:
    """An entry that is a dictionary itself. Raises UserError (schema)."""
    entry = _get_entry(content, name)
    if not isinstance(entry, dict):
        raise _schema_error(name, "is not a dictionary")
    return entry


def _to_numbers(values: Any, name: str, width: int) -> np.ndarray:
    """Values as float64 [n, width]. Raises UserError (schema)."""
    array = values
    if isinstance(values, list) and all(isinstance(value, int | float) for value in values):
        array = np.array(values)
    if (
        not isinstance(array, np.ndarray)
        or array.dtype.kind not in "iuf"
        or array.ndim > 2
        or array.size == 0
    ):
        raise _schema_error(name, "is not an array of numbers")
    array = array.reshape(-1, 1) if array.ndim < 2 else array
    if array.shape[1] != width:
        raise _schema_error(name, f"has {array.shape[1]} columns, not {width}")
    return array.astype(np.float64)


def _to_float32(values: np.ndarray, name: str) -> np.ndarray:
    """float32; NaN stays as missing. Raises UserError (non_finite)."""
    with np.errstate(over="ignore"):
        samples = np.ascontiguousarray(values, np.float32)
    if np.isinf(samples).any():
        raise input_error(
            Reason.NON_FINITE, "holds infinite values", "expected finite numbers", field=name
        )
    return samples


def _parse_person(answers: Any) -> dict[str, AttributeValue]:
    """Age and sex, of the questionnaire; other answers are not kept."""
    if not isinstance(answers, dict):
        return {}
    person: dict[str, AttributeValue] = {}
    age, sex = answers.get("AGE"), str(answers.get("Gender", "")).strip().upper()
    if isinstance(age, int | float) and 0 < age < 120:
        person["age"] = int(age)
    if sex in {"M", "F"}:
        person["sex"] = sex
    return person
