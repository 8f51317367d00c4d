"""Reads the formats that mne knows: BrainVision, EEGLAB, GDF, CNT and FIF.

Times are seconds from the first sample of the file: mne counts those of a FIF file from the start
of the measurement, of which the file may be a later part.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import chain, filterfalse
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from bitimely_core.errors import Finding, Reason, UserError, input_error, safe_text
from bitimely_core.formats.source import Source, locate_errors
from bitimely_core.formats.text import sanitize_label
from bitimely_core.recordings.gdf import find_gaps, read_gdf_channels
from bitimely_core.recordings.mapping import ChannelFacts, RecordingInfo, find_suffix, strip_suffix
from bitimely_core.recordings.pieces import name_epochs, place_in_row, report_epochs
from bitimely_core.recordings.selection import make_record
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import Annotation, Record, Signal

# kinds of channel that mne gives in volts, whatever unit it states
ELECTRIC = {"eeg", "eog", "ecg", "emg", "seeg", "ecog", "dbs", "bio"}
MICRO = 1e6
VOLT = 107
UNITS: dict[int | str, tuple[float, str]] = {
    # code of FIF, or unit of a BrainVision header -> factor and unit of the cache
    6: (1.0, "mol"),
    VOLT: (MICRO, "uV"),
    110: (MICRO, "uS"),
    112: (1.0, "T"),
    114: (1.0, "C"),
    201: (1.0, "T/m"),
    **dict.fromkeys(("S", "uS", "\u00b5S", "\u03bcS"), (MICRO, "uS")),  # mne divides by a million
    "\u00b0C": (1.0, "C"),
    **dict.fromkeys(("", "n/a"), (1.0, "")),
}
NAMED_FILES = re.compile(r"^\s*(DataFile|MarkerFile)\s*=\s*(.+?)\s*$", re.MULTILINE)
# name, reference, resolution and unit; commas of a name are written as \1
CHANNEL_LINE = re.compile(r"^Ch\d+=([^,]*),[^,]*,[^,]*,([^,\r\n]*)", re.MULTILINE)
AVERAGES = re.compile(r"[-_]ave\.fif(\.gz)?$", re.IGNORECASE)
ANT_HINT = (
    "Export it as EDF+ in the program that recorded it, or, with the package antio, by "
    "mne.io.read_raw_ant(FILE).save('NAME_raw.fif')"
)
MATLAB_HINT = "Save it again as version 6: pop_saveset(EEG, 'filename', NAME, 'version', '6')"
CORRUPT_HINT = "Copy it again, or export it as EDF+ in the program that recorded it"
SAMPLES_HINT = "its samples and markers lie beside it"
FIRST_SPLIT = re.compile(r"_split-(0*)1(?=_)")  # of a name of BIDS
UNNAMED = {"unknown", "boundary"}  # names of mne and of EEGLAB for what is no event
# annotations where two recordings meet, and of a pause that is filled with zeros
JOINTS = {"boundary", "New Segment/", "BAD boundary", "EDGE boundary"}
PAUSE = "BAD_ACQ_SKIP"
HALF_SAMPLE = 0.5 + 1e-3  # EEGLAB resamples times of events and not those of epochs
BAD_CHANNEL = ChannelFacts("", bad=True)


class MneContent(NamedTuple):
    """What mne reads of a file."""

    info: Any  # mne.Info
    pieces: list[tuple[float, np.ndarray]]  # seconds of the first sample, and values [V, T]
    notes: list[Annotation]  # their texts can hold names
    events: list[Annotation]  # classes of epochs
    start: datetime | None
    findings: list[Finding]
    units: Sequence[tuple[float, str]] = ()  # of GDF: factor and unit of the cache


def read_mne(path: Path, rel: str, info: RecordingInfo) -> Record:
    """Any other format, through mne; volts become uV. Epochs are segments called by their event."""
    stated: dict[str, str] = {}
    with locate_errors(rel):
        if find_suffix(rel) == ".vhdr":
            header = _decode_header(path.read_bytes())
            names: dict[str, str] = dict(NAMED_FILES.findall(header))
            _require_same_folder(names.values())
            lines = CHANNEL_LINE.findall(header)
            stated = {name.replace("\\1", ","): unit.strip() for name, unit in lines}
            with _correct_names(path, header, names) as corrected:
                content = _read_content(corrected)
        else:
            content = _read_content(path)
    signals = _make_signals(content, stated)
    bad = {sanitize_label(name): BAD_CHANNEL for name in content.info["bads"]}
    notes = (*info.notes, *content.events)
    info = replace(info, notes=notes, facts=bad | info.facts)
    start = content.start.replace(tzinfo=None) if content.start else None
    return make_record(rel, info, signals, content.notes, content.findings, start)


def _decode_header(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content.decode("latin-1")  # of older files, whose units have a micro sign


@contextmanager
def _correct_names(path: Path, header: str, names: Mapping[str, str]) -> Iterator[Path]:
    """A header of BrainVision whose names are those of the files: `path`, or a corrected copy.

    `$b` stands for the name of the header; capitals that another system changed do not count.
    Raises UserError (not_found) for a file that is not there.
    """
    beside = {file.name.casefold(): file.name for file in path.parent.iterdir()}
    actual = {key: _find_beside(path, name, beside) for key, name in names.items()}
    if actual == dict(names):
        yield path
        return
    encoding = "utf-8" if path.read_bytes() == header.encode() else "latin-1"
    with TemporaryDirectory() as folder:
        for key, name in actual.items():
            header = re.sub(rf"(?m)^(\s*{key}\s*=).*$", rf"\g<1>{name}", header)
            (Path(folder) / name).symlink_to(path.parent.resolve() / name)
        copy = Path(folder) / path.name
        copy.write_bytes(header.encode(encoding))
        yield copy


def list_named_files(path: Path) -> list[str]:
    """Names of the files of samples and markers in a header of BrainVision, as it has them."""
    names = dict(NAMED_FILES.findall(_decode_header(path.read_bytes()))).values()
    return [name.replace("$b", path.stem) for name in names]


def _find_beside(path: Path, name: str, beside: Mapping[str, str]) -> str:
    """The file that a header means by `name`; `beside`: folded name -> file."""
    wanted = name.replace("$b", path.stem)
    renamed = beside.get(f"{path.stem}{PurePosixPath(wanted).suffix}".casefold())
    if renamed and wanted.casefold() in beside and renamed.casefold() != wanted.casefold():
        problem = f"names the file {safe_text(wanted)}, and {safe_text(renamed)} lies beside it"
        raise input_error(Reason.HEADER, problem, "expected one", "Write the right name into it")
    if wanted.casefold() in beside:
        return wanted if (path.parent / wanted).exists() else beside[wanted.casefold()]
    hint = f"Copy {safe_text(wanted)} beside it"
    if renamed:
        hint = f"If {safe_text(renamed)} is it, write that name into the header"
    problem = f"names the file {safe_text(wanted)}, which is not there"
    raise input_error(Reason.NOT_FOUND, problem, SAMPLES_HINT, hint)


def _make_signals(content: MneContent, stated: Mapping[str, str]) -> list[Signal]:
    """The channels of all pieces; `stated`: units of a header of BrainVision."""
    rate = float(content.info["sfreq"])
    kinds = content.info.get_channel_types()
    signals: list[Signal] = []
    for onset, values in content.pieces:
        for number, (channel, kind, row) in enumerate(
            zip(content.info["chs"], kinds, values, strict=True), 1
        ):
            name = channel["ch_name"]
            factor, unit = _find_unit(channel, kind, stated.get(name, ""))
            if content.units and kind != "stim":
                factor, unit = content.units[number - 1]
            with np.errstate(over="ignore"):
                samples = (row * factor).astype(np.float32)
            label = sanitize_label(name) or f"channel {number}"
            signals.append(Signal(label, rate, unit, samples, onset=onset))
    return signals


def _find_unit(channel: Mapping[str, Any], kind: str, stated: str) -> tuple[float, str]:
    """Factor and unit of the values of a channel.

    mne brings volts and siemens to the unit without a prefix, and drops other units of a header.
    """
    if kind == "stim":  # codes, for which mne states volts
        return 1.0, ""
    code = int(channel["unit"])
    if kind in ELECTRIC or code == VOLT:
        return UNITS[VOLT]
    if stated:
        return UNITS.get(stated) or (1.0, sanitize_label(stated))
    return UNITS.get(code, (1.0, ""))


def _read_content(path: Path) -> MneContent:
    """The recording or the epochs in a file. Raises UserError: path_escape, corrupt."""
    failures: list[Exception] = []
    for load in (_load_raw, _load_epochs):
        try:
            with _silence_mne():
                return load(path)
        except UserError:
            raise
        except Exception as error:  # each of mne's readers fails in ways of its own
            raise_system_error(error, path, stored=False)
            failures.append(error)
    raise _refuse_content(path, failures[0]) from None  # the first error tells more


def _refuse_content(path: Path, failure: Exception) -> UserError:
    """The error for a file that mne does not read, with what it holds instead."""
    with path.open("rb") as file:
        head = file.read(10)
    if head == b"MATLAB 7.3":
        problem = "is a file of MATLAB 7.3"
        return input_error(Reason.UNSUPPORTED_FORMAT, problem, hint=MATLAB_HINT)
    if head.startswith(b"RIFF") and find_suffix(path.name) == ".cnt":
        problem = "is a .cnt of ANT Neuro, and those of Neuroscan are read"
        return input_error(Reason.UNSUPPORTED_FORMAT, problem, hint=ANT_HINT)
    if isinstance(failure, FileNotFoundError) and find_suffix(path.name) == ".set":
        hint = f"Copy {safe_text(f'{path.stem}.fdt')} beside it"
        return input_error(Reason.NOT_FOUND, "names a file that is not there", SAMPLES_HINT, hint)
    if AVERAGES.search(path.name):
        problem = "holds averages of epochs, which are no recording"
        return input_error(Reason.UNSUPPORTED_FORMAT, problem, hint="Give the raw file or epochs")
    problem = f"mne does not read it ({type(failure).__name__})"
    return input_error(Reason.CORRUPT, problem, hint=CORRUPT_HINT)


@contextmanager
def _silence_mne() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _load_raw(path: Path) -> MneContent:
    """A continuous recording. Raises UserError (path_escape), and mne's exceptions."""
    import mne

    raw = mne.io.read_raw(path, preload=False, verbose="ERROR")
    _require_inside(raw.filenames, path)
    first = float(raw.first_time)
    shortest = 1.5 / float(raw.info["sfreq"])  # a length of one sample says that there is none
    notes = [
        Annotation(
            float(note["onset"]) - first,
            float(note["duration"]) if note["duration"] > shortest else 0.0,
            str(note["description"]),
        )
        for note in raw.annotations
    ]
    start = raw.info["meas_date"]
    start = start + timedelta(seconds=first) if start else None
    breaks, events = list(filter(_is_break, notes)), list(filterfalse(_is_break, notes))
    values, rate = raw.get_data(verbose="ERROR"), float(raw.info["sfreq"])
    units: Sequence[tuple[float, str]] = ()
    if find_suffix(path.name) == ".gdf":
        units, lowest = read_gdf_channels(path)
        gaps = find_gaps(values, lowest)
        breaks += [Annotation(a / rate, (b - a) / rate, PAUSE) for a, b in gaps]
    pieces = _cut_pieces(values, rate, breaks)
    return MneContent(raw.info, pieces, events, [], start, _report_pieces(pieces), units)


def _is_break(note: Annotation) -> bool:
    return note.label in {*JOINTS, PAUSE}


def _cut_pieces(
    values: np.ndarray, rate: float, breaks: Iterable[Annotation]
) -> list[tuple[float, np.ndarray]]:
    """The stretches [V, T] between joints and pauses, and the second at which each begins."""
    starts, stops = [0], []
    for note in sorted(breaks):
        is_pause = note.label == PAUSE
        begin, end = note.onset, note.onset + note.duration * is_pause
        stops.append(_find_sample(begin, rate))
        starts.append(max(_find_sample(end, rate), starts[-1]))
    bounds = zip(starts, [*stops, values.shape[1]], strict=True)
    return [(begin / rate, values[:, begin:end]) for begin, end in bounds if begin < end]


def _find_sample(seconds: float, rate: float) -> int:
    """The first sample at or after a time; EEGLAB writes joints half a sample before it."""
    return max(0, math.ceil(seconds * rate - 1e-3))


def _report_pieces(pieces: Sequence[Any]) -> list[Finding]:
    """What is said of a recording that was interrupted."""
    if len(pieces) < 2:
        return []
    problem = f"was interrupted: {len(pieces)} stretches"
    action = "no window spans two of them"
    return [Finding(Reason.DISCONTINUOUS, problem, action, level="info", count=len(pieces))]


def _load_epochs(path: Path) -> MneContent:
    """Epochs of EEGLAB or of a FIF file.

    They lie at their times where the file states them and they do not overlap, else one after the
    other. Raises UserError (path_escape), and mne's exceptions.
    """
    import mne

    names: list[str] = []
    if find_suffix(path.name) == ".set":
        names = _list_eeglab_events(path)
        epochs = mne.read_epochs_eeglab(path, verbose="ERROR")
        onsets = None
    else:
        epochs = mne.read_epochs(path, preload=False, verbose="ERROR")
        _require_inside([part.fid.name for part in epochs._raw], path)
        onsets = _find_onsets(epochs)
    values = epochs.get_data(copy=False, verbose="ERROR")
    texts = {code: name for name, code in epochs.event_id.items()}
    classes = [texts[code] for code in epochs.events[:, 2]]
    if len(names) == len(classes):
        classes = names
    seconds = values.shape[2] / float(epochs.info["sfreq"])
    finding = report_epochs(len(values), seconds, timed=onsets is not None)
    onsets = onsets or place_in_row(len(values), seconds)
    labels = [None if name in UNNAMED else name for name in classes]
    events = name_epochs(onsets, seconds, labels)
    pieces = list(zip(onsets, values, strict=True))
    return MneContent(epochs.info, pieces, [], events, None, [finding])


def _find_onsets(epochs: Any) -> list[float] | None:
    """Seconds of the first samples of epochs in their recording; None where the file has none.

    Epochs that overlap have none: they are cuts of the same samples, or their events are numbers.
    """
    rates = np.unique(
        [] if epochs._raw_sfreq is None else epochs._raw_sfreq
    )  # Hz of the recording, before a decimation
    if rates.size != 1:
        return None
    onsets = epochs.events[:, 0] / rates.item() + float(epochs.tmin)
    length = len(epochs.times) / float(epochs.info["sfreq"])
    if np.diff(onsets).min(initial=length) < length - 1e-6:
        return None
    return list((onsets - min(0.0, onsets[0])).tolist())


def _list_eeglab_events(path: Path) -> list[str]:
    """The type of the event of each epoch: its only one, or where there are several that at time 0.

    mne joins the types of all, and reads them only from the field `epoch`, which is not always
    filled in. The list is empty where an epoch has no such event. Raises UserError (path_escape)
    for samples in another folder.
    """
    import scipy.io

    content = scipy.io.loadmat(path, squeeze_me=True, simplify_cells=True)
    content = content.get("EEG", content)
    named = content.get("data", "")
    if isinstance(named, str):
        _require_same_folder([named])
    length, count = int(content["pnts"]), int(content["trials"])
    zero = -float(content["xmin"]) * float(content["srate"])  # samples from the start of an epoch
    types: dict[int, list[str]] = {}
    locking: dict[int, list[str]] = {}
    for event in np.atleast_1d(content.get("event", [])).tolist():
        epoch, place = divmod(float(event["latency"]) - 1, length)
        name = str(event["type"])
        if name not in UNNAMED:
            types.setdefault(int(epoch), []).append(name)
        if name not in UNNAMED and abs(place - zero) <= HALF_SAMPLE:
            locking.setdefault(int(epoch), []).append(name)
    single = all(len(names) == 1 for names in types.values())
    chosen = types if single else locking
    epochs = range(count)
    return ["/".join(chosen[epoch]) for epoch in epochs] if set(epochs) == chosen.keys() else []


def _require_inside(names: Iterable[str | Path | None], path: Path) -> None:
    """Raises UserError (path_escape) for a file beside `path` that is in another folder."""
    folders = {path.parent.resolve(), path.resolve().parent}  # the file may be a link
    for name in names:
        if name and Path(name).parent.resolve() not in folders:
            problem = "names a file in another folder"
            raise input_error(Reason.PATH_ESCAPE, problem, "which is not read")


def _require_same_folder(names: Iterable[str]) -> None:
    """Raises UserError (path_escape) for a name that is not that of a file in the same folder."""
    for name in names:
        if PurePosixPath(name).name != name or "\\" in name:
            problem = f"names the file {safe_text(name)}"
            raise input_error(Reason.PATH_ESCAPE, problem, "which must be in the same folder")


def find_later_parts(source: Source, rels: Iterable[str]) -> set[str]:
    """Those of the files that are later parts of a FIF file among them."""
    return set(chain.from_iterable(list_later_parts(source, rel) for rel in rels))


def list_later_parts(source: Source, rel: str) -> list[str]:
    """The files that go on where a FIF file was split for its size.

    Names alone do not tell (`run-1.fif` may be another recording): the first part must name them.
    """
    if not find_suffix(rel).startswith(".fif") or rel in source.rejected:
        return []
    stem = strip_suffix(rel)
    seconds = {f"{stem}-1", FIRST_SPLIT.sub(r"_split-\g<1>2", stem)} - {stem}
    if source.files.keys().isdisjoint(f"{second}{rel[len(stem) :]}" for second in seconds):
        return []
    folder = PurePosixPath(rel).parent
    names = [(folder / name).as_posix() for name in _list_parts(source.path(rel))]
    return [name for name in names if name != rel and name in source.files]


def _list_parts(path: Path) -> Sequence[str]:
    """Names of the files that hold a FIF recording, or epochs; none where it cannot be read."""
    opened = _open_lazily(path)
    if opened is None:
        return []
    parts: list[Any] = list(getattr(opened, "filenames", ()))
    parts = parts or [part.fid.name for part in opened._raw]
    return [Path(name).name for name in parts]


def _open_lazily(path: Path) -> Any:
    """The recording or the epochs in a file, without samples; None where it cannot be read."""
    import mne

    with _silence_mne():
        for read in (mne.io.read_raw, mne.read_epochs):
            try:
                return read(path, preload=False, verbose="ERROR")
            except Exception as error:  # its unit reports that
                raise_system_error(error, path, stored=False)
    return None


def describe_content(path: Path) -> tuple[list[tuple[str, float]], list[str]]:
    """Channels with their rates, and texts of annotations; none of what cannot be read."""
    opened = _open_lazily(path)
    if opened is None:
        return [], []
    rate = float(opened.info["sfreq"])
    notes = getattr(opened, "annotations", None)
    texts = [] if notes is None else [str(text) for text in notes.description]
    channels = [(sanitize_label(name), rate) for name in opened.ch_names]
    return channels, [text for text in texts if text not in {*JOINTS, PAUSE}]
