"""Reads arrays of samples: files of NumPy and of MATLAB."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path, PurePosixPath
from tokenize import TokenError
from typing import NamedTuple
from zipfile import BadZipFile, ZipFile

import numpy as np

from bitimely_core.errors import Finding, Reason, UserError, input_error, input_warning, safe_text
from bitimely_core.formats import matlab
from bitimely_core.formats.label_tables import STAGE_NAMES
from bitimely_core.formats.source import Source, locate_errors
from bitimely_core.formats.text import sanitize_label
from bitimely_core.formats.units import find_rate_fault, find_unit, narrow_samples
from bitimely_core.recordings.array_splits import divide_by_split, name_split, report_splits
from bitimely_core.recordings.array_subjects import (
    ARRAY_SUBJECTS,
    add_subject,
    find_subjects,
    name_person,
    name_subjects,
    report_subjects,
    split_epochs,
)
from bitimely_core.recordings.mapping import RecordingInfo, find_suffix, strip_suffix
from bitimely_core.recordings.pieces import EPOCH_GAP, name_epochs, place_in_row, report_epochs
from bitimely_core.recordings.selection import make_record, report_missing
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import Annotation, Record, Records, Signal, find_only

# of the names of arrays: what is left tells which labels are of which samples
SAMPLE_WORDS = {"x", "data", "epochs", "epo", "raw", "eeg", "signals", "trials"}
LABEL_WORDS = {"y", "label", "labels", "target", "targets", "class", "classes"}
ARRAY_LABELS = LABEL_WORDS | STAGE_NAMES  # of arrays in a file
# of arrays of texts in a file that are the names of its channels
NAME_WORDS = {
    "ch_names", "chnames", "channels", "channel_names", "channelnames", "chans", "leads",
    "sig_name", "sig_names", "signal_names", "names", "ch_label", "ch_labels",
}  # fmt: skip
UNIT_WORDS = {"unit", "units"}  # of texts in a file that are the units of its channels
# names of a vector that say nothing of its channel
PLAIN_WORDS = {
    "x", "data", "raw", "signal", "signals", "val", "values", "samples", "array",
}  # fmt: skip
# names of a single number in a file that is its rate
RATE_WORDS = {
    "fs", "srate", "sfreq", "rate", "sampling_rate", "samplingrate", "sample_rate", "samplerate",
    "samp_rate", "sampling_frequency", "samplingfrequency", "frequency", "freq", "hz", "f_s", "sr",
    "fsample", "sampling_freq", "samplingfreq", "sample_freq", "samplefreq", "fs_hz", "sampfreq",
}  # fmt: skip
TIME_WORDS = {"t", "time", "times", "timestamps", "time_s"}  # of vectors of seconds in a file
NO_SAMPLES = ARRAY_LABELS | TIME_WORDS | ARRAY_SUBJECTS
LEAST_RATE, MOST_RATE = 20.0, 50_000.0  # Hz, of times that state no unit: slower ones may be in ms
MOST_CHANNELS = 128  # of a recording, beside labels of which each row has one
# bytes that an archive may always hold; beyond it at most MAX_RATIO times its size
MAX_EXPANDED = 1 << 28
MAX_RATIO = 200


def read_npy(
    path: Path, rel: str, info: RecordingInfo, labels: Path | None = None
) -> Record | Records:
    """An array of int16 (kept) or other numbers (float32).

    Its shape is [samples], [samples, channels] or turned, or that of epochs: [epochs, channels,
    samples] or [epochs, samples, channels], whose classes may be in the array `labels`. Epochs of
    several people are a recording for each, and so are arrays of several splits.
    """
    with locate_errors(rel):
        contents = _load_arrays(path, info.variable)
    if len(contents) == 1:
        return _make_record(contents.popitem()[1], path, rel, info, labels)
    whole = Records(records=[], findings=[report_splits(contents).at(rel)])
    for split, content in contents.items():
        part = _make_record(content, path, rel, name_split(info, split), None)
        whole.records.extend(part.records if isinstance(part, Records) else [part])
        whole.findings.extend(part.findings if isinstance(part, Records) else [])
    return whole


def _make_record(
    content: NumpyContent, path: Path, rel: str, info: RecordingInfo, labels: Path | None
) -> Record | Records:
    """The recording of one array of samples, or one for each person whose epochs it holds."""
    with locate_errors(rel):
        values, inside, names, units, people = content
        info, people = add_subject(info, people)
        info = _add_units(_name_channels(info, names, np.atleast_2d(values).shape), units)
        info, inside = _add_class(info, inside)
        if values.dtype.kind not in "iuf" or values.ndim not in {1, 2, 3} or values.size == 0:
            problem = f"is an array of {values.ndim} dimensions of {values.dtype}"
            wanted = "expected [samples, channels], or [epochs, channels, samples]"
            raise input_error(Reason.DIMENSIONS, problem, wanted)
        count = 0 if inside is None else inside.size
        if _has_epochs_as_rows(values.shape, info, {len(people), count}):
            values = values[:, None]
        if values.ndim == 3:
            inside = _load_npy(labels) if labels else inside
            return _make_by_subject(np.asarray(values), rel, info, inside, people)
        remarks = [*report_other_rate(path, info.rate), *_report_unread(count, "labels")]
        remarks += _report_unread(len(people), "subjects")
    return _make_table_record(np.asarray(values), rel, info, remarks)


def _make_table_record(
    values: np.ndarray, rel: str, info: RecordingInfo, remarks: Iterable[Finding]
) -> Record:
    """The recording of [samples], [samples, channels] or [channels, samples]."""
    with locate_errors(rel):
        table = values.reshape(len(values), -1)
        turned = is_turned(table.shape, info)
        signals = _make_array_signals(table.T if turned else table, info)
    findings = [*remarks, *report_missing(signals, "values are NaN")]
    if turned and len(info.channels) != len(table):
        findings.append(_report_turned(table.shape))
    return make_record(rel, info, signals, findings=findings)


def _report_unread(count: int, what: str) -> list[Finding]:
    """The warning about labels or subjects of an array that holds no epochs."""
    if not count:
        return []
    problem = f"holds {count} {what} beside an array of two dimensions"
    hint = "Where each row is an epoch, save values[:, None] in place of the array"
    if what == "labels":
        hint += "; write stages, one a line, to a text file of its name beside it"
    return [input_warning(Reason.UNMATCHED_LABELS, problem, "they are not read", hint)]


def _has_epochs_as_rows(
    shape: tuple[int, ...], info: RecordingInfo, counts: Container[int]
) -> bool:
    """Whether each row of an array is an epoch of one channel: each has a label or a subject, of
    which there are `counts`, and no recording has as many channels as it has columns.
    """
    if len(shape) != 2 or info.channels or shape[0] not in counts:
        return False
    return shape[1] > max(1, min(MOST_CHANNELS, shape[0]))


def _name_channels(
    info: RecordingInfo, names: Sequence[str], shape: tuple[int, ...]
) -> RecordingInfo:
    """`info` with the channels as a file calls them, where the map does not and the number fits."""
    if info.channels or len(names) not in shape:
        return info
    return replace(info, channels={name: (name, "") for name in names})


def _add_units(info: RecordingInfo, units: Sequence[str]) -> RecordingInfo:
    """`info` with the known units that a file states, of all channels or one each, where the map
    states none.
    """
    spelled = [unit.name if (unit := find_unit(text)) else "" for text in units]
    if info.unit or not any(spelled):
        return info
    if len(set(spelled)) == 1:
        return replace(info, unit=spelled[0])
    names = info.channels or {name: (name, "") for name in _number_channels(len(spelled))}
    if len(names) != len(spelled):
        return info
    pairs = zip(names.items(), spelled, strict=True)
    return replace(info, channels={key: (name, old or new) for (key, (name, old)), new in pairs})


def _number_channels(count: int) -> list[str]:
    """The names of channels that have none."""
    return [f"channel {i}" for i in range(1, count + 1)]


def _add_class(
    info: RecordingInfo, labels: np.ndarray | None
) -> tuple[RecordingInfo, np.ndarray | None]:
    """`info` with the only label of a file, the class of the whole recording; and `labels` where
    they are several.
    """
    if labels is None or labels.size != 1:
        return info, labels
    name = _name_class(labels.item())
    return replace(info, attributes={"label": name, **info.attributes}) if name else info, None


def find_rate(path: Path) -> float | None:
    """Hz, where an archive of NumPy or a file of MATLAB holds a single number called so."""
    suffix = find_suffix(path.name)
    values: np.ndarray | None = None
    try:
        if suffix == ".mat":
            values = _read_matlab_rate(path)
        elif suffix == ".npz":
            arrays = _load_npz(path)
            numbers = [a for name, a in arrays.items() if name.lower() in RATE_WORDS]
            values = numbers[0] if len(numbers) == 1 and numbers[0].size == 1 else None
    except UserError as error:
        raise_system_error(error)  # its unit says what is wrong
    if values is None or values.dtype.kind not in "iuf":
        return None
    rate = float(values.reshape(-1)[0])
    return None if find_rate_fault(rate) else rate


def _read_matlab_rate(path: Path) -> np.ndarray | None:
    """Hz of a file of MATLAB, by a number or by even times in seconds; None: it states none.

    Raises UserError: as `matlab.read_vector`.
    """
    stated = matlab.read_vector(path, RATE_WORDS, 1)
    times = None if stated is not None else matlab.read_vector(path, TIME_WORDS, None)
    if times is None or times.size < 3:
        return stated
    steps = np.diff(times.astype(np.float64))
    step = float(np.mean(steps))
    is_even = step > 0 and float(np.abs(steps - step).max()) < 0.1 * step
    rate = float(f"{1 / step:.6g}") if is_even else 0.0
    return np.array([rate]) if LEAST_RATE <= rate <= MOST_RATE else None


def report_other_rate(path: Path, rate: float | None) -> list[Finding]:
    """The warning about a file that holds another rate than the map states."""
    stated = find_rate(path)
    if stated is None or rate is None or math.isclose(stated, rate, rel_tol=1e-6):
        return []
    problem = f"holds a rate of {stated:g} Hz, the map states {rate:g}"
    hint = "Leave `rate` out of the map to use that of the file"
    return [input_warning(Reason.SAMPLING_RATE, problem, "that of the map is used", hint)]


def is_turned(shape: tuple[int, ...], info: RecordingInfo) -> bool:
    """Whether an array of two dimensions has a row a channel.

    The map names as many channels, or it is wider than tall.
    """
    tall, wide = (count == len(info.channels) for count in shape[::-1])
    return (wide and not tall) or (wide == tall and shape[0] < shape[1])


def _report_turned(shape: tuple[int, ...]) -> Finding:
    rows, columns = shape
    return input_warning(
        Reason.DIMENSIONS,
        f"is an array of {rows} x {columns}",
        f"taken for {rows} channels of {columns} samples",
        f"If it has {columns} channels, name them: `channels` in [[files]] of the map",
        field="channels",
    )


def _make_by_subject(
    values: np.ndarray,
    rel: str,
    info: RecordingInfo,
    labels: np.ndarray | None,
    subjects: Sequence[str],
) -> Record | Records:
    """Epochs as a recording, or as one for each of `subjects`, of which each epoch has one.

    Raises UserError: dimensions, physical_range, identifier.
    """
    if labels is not None and len(labels) != len(values):
        problem = f"{len(labels)} labels of {len(values)} epochs"
        raise input_error(Reason.DIMENSIONS, problem, "expected one each")
    if not subjects:
        return _make_epochs(values, rel, info, labels)
    rows_by_subject = split_epochs(subjects, len(values))
    by_subject = [
        _make_epochs(
            values[rows], rel, name_person(info, name), None if labels is None else labels[rows]
        )
        for name, rows in rows_by_subject.items()
    ]
    return Records(records=by_subject, findings=[report_subjects(len(by_subject)).at(rel)])


def _make_epochs(
    values: np.ndarray, rel: str, info: RecordingInfo, labels: np.ndarray | None
) -> Record:
    """Epochs [epochs, channels, samples] or [epochs, samples, channels] as segments.

    `labels`: their classes or numbers. Raises UserError: dimensions, physical_range.
    """
    names: list[str | None] = [None] * len(values)
    findings: list[Finding] = []
    column = None if labels is None else _find_label_column(labels)
    if column is not None:  # None: a missing one (NaN, empty)
        names = list(map(_name_class, column.tolist()))
    elif labels is not None:
        problem = f"has {labels.shape[1]} labels an epoch, in an array of {_list_shape(labels)}"
        hint = "Keep one column of them, such as labels[:, 0], in place of the array"
        findings.append(input_warning(Reason.UNMATCHED_LABELS, problem, "they are not read", hint))
    if not is_turned(values.shape[1:], info):
        values = values.transpose(0, 2, 1)
    count, channels, length = values.shape
    seconds = length / (info.rate or 1.0)
    onsets = place_in_row(count, seconds)
    signals = [
        signal._replace(onset=onset)
        for onset, epoch in zip(onsets, values, strict=True)
        for signal in _make_array_signals(epoch.T, info)
    ]
    events = name_epochs(onsets, seconds, names)
    finding = report_epochs(count, seconds, timed=False)
    requirement = f"of {channels} channels; {finding.requirement}"
    findings += report_missing(signals, "values are NaN")
    findings.append(replace(finding, requirement=requirement))
    return make_record(rel, replace(info, notes=(*info.notes, *events)), signals, findings=findings)


def _find_label_column(labels: np.ndarray) -> np.ndarray | None:
    """A label for each epoch: the only one, or the number of the column, from 0, that is 1 where
    all others are 0 (one-hot); None: there are several.
    """
    rows = labels.reshape(len(labels), -1)
    if rows.shape[1] == 1:
        return rows[:, 0]
    is_one_hot = labels.dtype.kind in "iufb" and bool(
        np.isin(rows, (0, 1)).all() and (rows.sum(axis=1) == 1).all()
    )
    return rows.argmax(axis=1) if is_one_hot else None


def _list_shape(array: np.ndarray) -> str:
    return " x ".join(map(str, array.shape))


def _name_class(cell: str | float) -> str | None:
    if isinstance(cell, float):
        return f"{cell:g}" if math.isfinite(cell) else None
    return str(cell).strip() or None


class LabelArrays(NamedTuple):
    """The arrays of a folder that hold labels, and are no recordings."""

    of_epochs: dict[str, str]  # array of epochs -> array of their labels
    unused: set[str]  # of subjects, and of a label a row of arrays that are no epochs

    def list_files(self) -> set[str]:
        """All of them."""
        return {*self.of_epochs.values(), *self.unused}


def find_label_arrays(source: Source, rels: Iterable[str]) -> LabelArrays:
    """The arrays with the labels of the recordings among `rels`.

    An array of labels has one dimension, whole numbers or texts, and the length of an array in its
    folder; beside epochs it may have other numbers, or columns, where its name has a word such as
    `y` or `labels`. Of several the one is taken whose name is that of the epochs but for such
    words and `X`; beside an array that is no epochs its name must have one. A file of MATLAB that
    is called `label` is of the trials of the others in its folder.
    """
    rels = list(rels)
    arrays = [rel for rel in rels if find_suffix(rel) == ".npy"]
    shapes = {rel: _read_shape(source, rel) for rel in arrays}
    places = {_name_place(rel, shape) for rel, shape in shapes.items() if len(shape) > 1}
    epochs = {rel: _name_place(rel, shape) for rel, shape in shapes.items() if len(shape) == 3}
    flat = _list_flat_arrays(source, places, set(epochs.values())) if places else {}
    subjects = set(filter(_is_named_subject, chain.from_iterable(flat.values())))
    flat = {place: sorted(set(same) - subjects) for place, same in flat.items()}
    of_epochs = _pair_labels(epochs, flat) | _pair_matlab(source, rels)
    named = set(filter(_is_named_label, chain.from_iterable(flat.values())))
    return LabelArrays(of_epochs, subjects | (named - set(of_epochs.values())))


Place = tuple[PurePosixPath, int]
"""The folder of an array, and its length."""


def _list_flat_arrays(
    source: Source, places: Container[Place], of_epochs: Container[Place]
) -> dict[Place, list[str]]:
    """The arrays of a folder that can hold labels, by their place, where it is one of `places`;
    `of_epochs`: those of them where epochs are.
    """
    flat: dict[Place, list[str]] = {}
    for rel in source.files:
        if find_suffix(rel) != ".npy":
            continue
        shape = _read_shape(source, rel)
        place = _name_place(rel, shape)
        is_named = place in of_epochs and len(shape) < 3 and _is_named_label(rel)
        if is_named or (place in places and _holds_labels(source.path(rel))):
            flat.setdefault(place, []).append(rel)
    return flat


def _pair_labels(epochs: Mapping[str, Place], flat: Mapping[Place, list[str]]) -> dict[str, str]:
    """Array of epochs -> the array of its labels, where it is clear which one that is."""
    counts = Counter(epochs.values())
    pairs: dict[str, str] = {}
    for rel, place in epochs.items():
        beside = flat.get(place, [])
        same = [other for other in beside if _strip_words(other) == _strip_words(rel)]
        chosen = same or (beside if counts[place] == 1 else [])
        if len(chosen) == 1:
            pairs[rel] = chosen[0]
    return pairs


def _pair_matlab(source: Source, rels: Sequence[str]) -> dict[str, str]:
    """File of MATLAB with trials -> the file with their labels."""
    pairs: dict[str, str] = {}
    matlab_files = [rel for rel in source.files if find_suffix(rel) == ".mat"]
    for rel in matlab_files:
        if LABEL_WORDS.issuperset(_list_words(rel)):
            others = _list_beside(rel, set(rels).intersection(matlab_files))
            if others and _has_trials(source.path(others[0])):
                pairs |= dict.fromkeys(others, rel)
    return pairs


def _list_beside(rel: str, rels: Iterable[str]) -> list[str]:
    """The other files in the folder of `rel`."""
    folder = PurePosixPath(rel).parent
    return sorted(other for other in rels if other != rel and PurePosixPath(other).parent == folder)


def _has_trials(path: Path) -> bool:
    try:
        return bool(matlab.read_trials(path, NO_SAMPLES))
    except UserError as error:  # its unit reports that
        raise_system_error(error)
        return False


def _name_place(rel: str, shape: tuple[int, ...]) -> Place:
    return PurePosixPath(rel).parent, shape[0] if shape else -1


def _read_shape(source: Source, rel: str) -> tuple[int, ...]:
    """The shape of an array by its header; () where it cannot be read, which its unit reports."""
    try:
        return _load_npy(source.path(rel)).shape
    except UserError as error:
        raise_system_error(error)
        return ()


def _holds_labels(path: Path) -> bool:
    values = _load_npy(path)
    if values.size != len(values):
        return False
    if values.dtype.kind != "f":
        return values.dtype.kind in "iubU"
    finite = values[np.isfinite(values)]
    return bool((finite == np.round(finite)).all())


def _is_named_label(rel: str) -> bool:
    return not LABEL_WORDS.isdisjoint(_list_words(rel))


def _is_named_subject(rel: str) -> bool:
    """Whether a name is that of an array of subjects; one with a number is that of a person."""
    words = _list_words(rel)
    return not (ARRAY_SUBJECTS.isdisjoint(words) or any(map(str.isdigit, words)))


def _strip_words(rel: str) -> str:
    """The name of a file without the words for samples and labels."""
    return " ".join(w for w in _list_words(rel) if w not in SAMPLE_WORDS | LABEL_WORDS)


def _list_words(rel: str) -> list[str]:
    return re.split(r"[-_. ]+", PurePosixPath(strip_suffix(rel)).name.lower())


class NumpyContent(NamedTuple):
    """What a file of NumPy holds."""

    samples: np.ndarray
    labels: np.ndarray | None  # of the samples; None: it holds none
    names: tuple[str, ...] = ()  # of the channels
    units: tuple[str, ...] = ()  # of all channels, or one each
    subjects: Sequence[str] = ()  # of all samples, or one an epoch


def _load_arrays(path: Path, variable: str) -> dict[str, NumpyContent]:
    """Split -> the samples in a file of NumPy, with what lies beside them in an archive (.npz); the
    split is "" where the archive states none.
    """
    if find_suffix(path.name) != ".npz":
        return {"": NumpyContent(_load_npy(path), None)}
    arrays = _load_npz(path)
    divided = {} if variable in arrays else divide_by_split(arrays)
    by_split = divided or {"": arrays}
    return {split: _find_content(parts, variable) for split, parts in by_split.items()}


def _find_content(arrays: Mapping[str, np.ndarray], variable: str) -> NumpyContent:
    """The only array of samples, with what lies beside it. Raises UserError: schema."""
    labels = _name_labels(arrays)
    subjects = find_subjects(arrays, has_labels=bool(labels))
    beside = labels | subjects.keys()
    samples = {name for name in arrays if _may_be_samples(arrays[name])} - beside
    samples &= {variable} if variable else samples
    if len(samples) != 1:
        problem = f"holds the arrays {', '.join(map(safe_text, arrays))}"
        hint = "Name that of the samples: `variable` in [[files]] of the map"
        raise input_error(Reason.SCHEMA, problem, "expected one of samples", hint)
    classes = [arrays[name] for name in labels]
    name = samples.pop()
    names = _check_names(_find_texts(arrays, NAME_WORDS)) or _name_vector(name, arrays[name].shape)
    units = _find_texts(arrays, UNIT_WORDS)
    people = name_subjects(next(iter(subjects.values())).tolist()) if subjects else ()
    return NumpyContent(arrays[name], find_only(classes, None), names, units, people)


def _name_vector(name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """The name of the only channel, where that of its array says what it is: one with a number may
    be that of a recording.
    """
    is_named = name.isalpha() and name.lower() not in PLAIN_WORDS
    is_plain = math.prod(shape) > max(shape) or not is_named
    return () if is_plain else _check_names([name])


def _name_labels(arrays: Mapping[str, np.ndarray]) -> set[str]:
    """Which arrays are labels by their names: vectors, and tables beside epochs."""
    most = 2 if any(array.ndim == 3 for array in arrays.values()) else 1
    return {n for n in arrays if n.lower() in ARRAY_LABELS and arrays[n].ndim <= most}


def _may_be_samples(array: np.ndarray) -> bool:
    return array.size > 1 and array.dtype.kind not in "SU"


def _find_texts(arrays: Mapping[str, np.ndarray], words: Container[str]) -> tuple[str, ...]:
    """The texts of the array that is called as one of `words`; (): there is none."""
    for name, array in arrays.items():
        if name.lower() in words and array.dtype.kind == "U" and array.ndim < 2:
            return tuple(np.atleast_1d(array).tolist())
    return ()


def _check_names(texts: Iterable[str]) -> tuple[str, ...]:
    """Texts as names of channels; () where two are equal or one is empty."""
    names = tuple(map(sanitize_label, texts))
    return names if len({*names, ""}) > len(names) else ()


@contextmanager
def _translate_errors(path: Path, ending: str) -> Iterator[None]:
    """Errors of numpy in this block become UserErrors: unsafe_pickle, corrupt."""
    try:
        yield
    except ValueError as error:
        is_unsafe = re.search("pickle|object", str(error).lower()) is not None
        code = Reason.UNSAFE_PICKLE if is_unsafe else Reason.CORRUPT
        problem = "is not a file of arrays of numbers"
        raise input_error(code, problem, "only arrays of numbers are read") from None
    # a TokenError: of a header that is cut off
    except (OSError, EOFError, SyntaxError, TokenError, BadZipFile) as error:
        raise_system_error(error, path, stored=False)
        problem = f"does not read as {ending} ({type(error).__name__})"
        raise input_error(Reason.CORRUPT, problem, hint="Save it again") from None


def _load_npz(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an archive. Raises UserError: expansion_limit, and as `_translate_errors`."""
    with _translate_errors(path, ".npz"):
        with ZipFile(path) as archive:
            size = sum(info.file_size for info in archive.infolist())
        if size > max(MAX_EXPANDED, MAX_RATIO * path.stat().st_size):
            problem = f"unpacks to {size} bytes"
            wanted = "no recording is compressed that well"
            raise input_error(Reason.EXPANSION_LIMIT, problem, wanted)
        with np.load(path, allow_pickle=False) as content:
            return {name: content[name] for name in content.files}


def _load_npy(path: Path) -> np.ndarray:
    with _translate_errors(path, ".npy"):
        return np.load(path, mmap_mode="r", allow_pickle=False)


def read_mat(
    path: Path, rel: str, info: RecordingInfo, labels: Path | None = None
) -> Record | Records:
    """An array of a MATLAB file, as `read_npy`; epochs may also be the last of three dimensions.

    `labels`: the file with those of trials, which hold none themselves.
    """
    with locate_errors(rel):
        info, people = add_subject(info, _read_subjects(path))
        trials = _read_trials(path, info)
        if trials:
            classes = matlab.read_vector(path, ARRAY_LABELS, len(trials))
            if classes is None and labels:
                classes = _read_trial_labels(labels, len(trials))
            info = _read_names(path, info, next(iter(trials.values())))
            return _make_trials(trials, rel, info, classes)
        info = _add_matlab_class(path, info)
        values, names = find_samples(path, info)
        units = matlab.read_texts(path, UNIT_WORDS)
        if names:
            info = _add_units(_name_channels(info, names, values.shape), units)
            return _make_mat_record(path, rel, info, values)
        if values.ndim not in {2, 3} or values.size == 0:
            problem = f"is an array of {_list_shape(values)}"
            wanted = "expected [samples, channels] or [channels, samples]"
            raise input_error(Reason.DIMENSIONS, problem, wanted, field="variable")
        info = _add_units(_read_names(path, info, values), units)
        if values.ndim == 3:
            if _has_epochs_last(values.shape, info):
                values = np.moveaxis(values, 2, 0)
            classes = matlab.read_labels(path, ARRAY_LABELS, len(values))
            return _make_by_subject(values, rel, info, classes, people)
        turned = is_turned(values.shape, info)
        return _make_mat_record(path, rel, info, values.T if turned else values)


def _read_subjects(path: Path) -> list[str]:
    """The subjects in a MATLAB file, in numbers or texts: of all samples, or one an epoch."""
    numbers = matlab.read_vector(path, ARRAY_SUBJECTS, None)
    texts = matlab.read_texts(path, ARRAY_SUBJECTS) if numbers is None else numbers.tolist()
    return name_subjects(texts)


def check_samples(path: Path, info: RecordingInfo) -> None:
    """Raises UserError for a MATLAB file without samples: as `matlab.read_array`."""
    if not _read_trials(path, info):
        find_samples(path, info)


def _read_trials(path: Path, info: RecordingInfo) -> dict[str, np.ndarray]:
    return {} if info.variable else matlab.read_trials(path, NO_SAMPLES)


def _read_trial_labels(path: Path, count: int) -> np.ndarray:
    """The labels of `count` trials in a file beside theirs. Raises UserError: dimensions."""
    labels = matlab.read_vector(path, ARRAY_LABELS, None)
    if labels is None or len(labels) != count:
        problem = f"{0 if labels is None else len(labels)} labels in {safe_text(path.name)}"
        hint = "Move that file elsewhere where it is not of these trials"
        raise input_error(
            Reason.DIMENSIONS, problem, f"expected one for each of {count} arrays", hint
        )
    return labels


def _read_names(path: Path, info: RecordingInfo, values: np.ndarray) -> RecordingInfo:
    """`info` with the channels as texts in a MATLAB file call them; `label`, which those of epochs
    may be called, too, is that of the channels of FieldTrip.
    """
    words = NAME_WORDS if values.ndim == 3 else NAME_WORDS | {"label", "labels"}
    names = _check_names(matlab.read_texts(path, words))
    if names in {(), (info.attributes.get("label"),)}:
        name, *others = [*matlab.read_channels(path, NO_SAMPLES, least=1), ""]
        names = _name_vector(name, values.shape) if others == [""] else ()
    return _name_channels(info, names, values.shape)


def _add_matlab_class(path: Path, info: RecordingInfo) -> RecordingInfo:
    """As `_add_class`, by a number or a text of MATLAB; a cell is the name of a channel."""
    number = matlab.read_vector(path, ARRAY_LABELS, 1)
    label = np.array(matlab.read_texts(path, LABEL_WORDS, {"text"})) if number is None else number
    return _add_class(info, label)[0]


def _name_trials(trials: Iterable[str], labels: np.ndarray | None) -> list[str]:
    """The texts of trials: their classes, else the last word and the number of their names."""
    if labels is not None:
        return [_name_class(label) or "" for label in labels.tolist()]
    return [re.sub(r"^.*_(?=[A-Za-z]+_?\d+$)", "", name) for name in trials]


def _make_trials(
    trials: Mapping[str, np.ndarray], rel: str, info: RecordingInfo, labels: np.ndarray | None
) -> Record:
    """Arrays of one recording as segments, each under an annotation with its class in `labels`, or
    with the last word and the number of its name: `eeg1` of `xy_eeg1`.

    Raises UserError: dimensions, physical_range.
    """
    tables = [table.T if is_turned(table.shape, info) else table for table in trials.values()]
    widths = {table.shape[1] for table in tables}
    if len(widths) > 1:
        problem = f"holds arrays of {', '.join(map(str, sorted(widths)))} channels"
        hint = "Name one: `variable` in [[files]] of the map"
        raise input_error(Reason.DIMENSIONS, problem, "expected one number", hint)
    names = _name_trials(trials, labels)
    signals: list[Signal] = []
    notes: list[Annotation] = []
    begin = 0.0
    for name, table in zip(names, tables, strict=True):
        seconds = len(table) / (info.rate or 1.0)
        signals += [s._replace(onset=begin) for s in _make_array_signals(table, info)]
        notes.append(Annotation(begin, seconds, name))
        begin += seconds + EPOCH_GAP
    problem = f"holds {len(tables)} arrays, '{names[0]}' to '{names[-1]}'"
    action = f"each is a segment under its name, one after the other, {EPOCH_GAP:g} s apart"
    finding = Finding(Reason.DISCONTINUOUS, problem, action, level="info", count=len(tables))
    info = replace(info, notes=(*info.notes, *notes))
    missing = report_missing(signals, "values are NaN")
    return make_record(rel, info, signals, findings=[*missing, finding])


def find_samples(path: Path, info: RecordingInfo) -> tuple[np.ndarray, tuple[str, ...]]:
    """The array of a MATLAB file; or its vectors as columns, and their names.

    Raises UserError: as `matlab.read_array`.
    """
    channels = {} if info.variable else matlab.read_channels(path, NO_SAMPLES)
    if channels:
        return np.column_stack(list(channels.values())), tuple(channels)
    return matlab.read_array(path, info.variable, NO_SAMPLES), ()


def _make_mat_record(path: Path, rel: str, info: RecordingInfo, values: np.ndarray) -> Record:
    """The recording of [samples, channels] in a MATLAB file."""
    signals = _make_array_signals(values, info)
    missing = report_missing(signals, "values are NaN")
    return make_record(rel, info, signals, findings=[*report_other_rate(path, info.rate), *missing])


def _has_epochs_last(shape: tuple[int, ...], info: RecordingInfo) -> bool:
    """Whether an array is [channels, samples, epochs], as EEGLAB has it, or [samples, ...].

    Samples are the longest dimension. Where they are the last one epochs are the first.
    """
    if len(info.channels) in shape:
        place = shape.index(len(info.channels))
        return place == 0 or (place == 1 and max(shape) == shape[0])
    return max(shape) != shape[2]


def _make_array_signals(table: np.ndarray, info: RecordingInfo) -> list[Signal]:
    """The columns of [samples, channels] as signals: int16 as it is, else float32.

    Raises UserError: dimensions, physical_range.
    """
    names = list(info.channels) or _number_channels(table.shape[1])
    if len(names) != table.shape[1]:
        problem = f"has {table.shape[1]} columns"
        raise input_error(Reason.DIMENSIONS, problem, f"the map names {len(names)} channels")
    signals: list[Signal] = []
    for name, column in zip(names, table.T, strict=True):
        is_stored = table.dtype == np.int16
        samples = np.ascontiguousarray(column) if is_stored else narrow_samples(column, name)
        signals.append(Signal(name, info.rate or 1.0, "", samples))
    return signals
