"""New recordings without labels: found, read and cut into windows in memory, by the code that made
the windows of the training.

Labels beside the recordings (hypnograms, events, annotation files) are never opened, but for those
that are given to calibrate on. Legend: n windows, T samples a window, V channels.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from pydantic import Field

from bitimely_core import manifests
from bitimely_core.cache import open_cache
from bitimely_core.config import Section, read_toml, validate
from bitimely_core.errors import (
    Finding,
    Reason,
    UserError,
    input_error,
    input_warning,
    safe_text,
    usage_error,
)
from bitimely_core.formats import edf_header, tables, wfdb
from bitimely_core.formats.source import Source, locate_errors, scan_folder
from bitimely_core.recordings import files
from bitimely_core.recordings.mapping import (
    SUFFIXES,
    Format,
    RecordingInfo,
    find_suffix,
    strip_suffix,
)
from bitimely_core.schemas.tokens import (
    Preprocessing,
    WindowManifest,
    WindowOptions,
    WindowStatistics,
)
from bitimely_core.tokens.cutting import (
    RecordCut,
    choose_resampling,
    cut_record,
    describe_preparation,
    find_observed,
    find_unit_factor,
    make_windows,
)
from bitimely_core.tokens.windows import Windows, compute_affine, encode_targets
from bitimely_core.types import Annotation, Record, Signal

LABEL_FILE = re.compile(
    r"(?i)(?:^|[-_.])(hypnogram|hyp|stages?|scoring|annotations?|events|labels?|participants|channels|scans|electrodes)$"
)
HOW_RESAMPLED = {
    "interpolated": "by interpolation, which adds no faster activity",
    "held": "by repeating samples, which adds no faster activity",
    "placed": "with missing values between its samples",
    "resampled": "with an anti-alias filter",
    "causal": "with a one-sided anti-alias filter",
    "averaged": "by means",
}
UNLABELLED = ""  # the only class of the epochs that windows are cut from


class ChannelMap(Section):
    """`--map`: the channels of the run in the files, and what tables and arrays do not state."""

    channels: dict[str, str | tuple[str, ...]] = Field(
        default_factory=dict
    )  # name in the run -> name in the file, or several of which the first one there is read
    rate: float | None = Field(None, gt=0)  # Hz, of tables and arrays
    time: str = ""  # column with seconds, of tables
    delimiter: str = ","

    def list_names(self, wanted: str) -> tuple[str, ...]:
        """Names under which a file may have the channel, in their order."""
        given = self.channels.get(wanted, ())
        return (*((given,) if isinstance(given, str) else given), wanted)


def parse_map(items: Sequence[str], channels: Sequence[str]) -> ChannelMap:
    """The map of `WANTED=FOUND` items and TOML files, later ones added; `channels`: those of the
    run. Raises UserError (exit 2).
    """
    out = ChannelMap()
    for item in items:
        wanted, sign, found = item.partition("=")
        if not sign or (wanted not in channels and item.lower().endswith(".toml")):
            values: dict[str, object] = read_toml(Path(item))
        else:
            values = {"channels": {wanted: found}}
        new = validate(ChannelMap, values, "--map" if sign else item)
        for name in new.channels:
            if name not in channels:
                close = difflib.get_close_matches(name, channels, n=2, cutoff=0.3)
                known, hint = (
                    ", ".join(map(safe_text, channels)),
                    f"Did you mean {' or '.join(map(safe_text, close))}?" if close else "",
                )
                raise usage_error(
                    f"the run reads no channel {safe_text(name)}",
                    f"it reads {known}",
                    hint,
                    field="--map",
                )
        merged = {
            name: (*out.list_names(name)[:-1], *new.list_names(name)[:-1])
            for name in {**out.channels, **new.channels}
        }
        out = validate(ChannelMap, {**out.model_dump(), **values, "channels": merged}, "--map")
    return out


class ReadingPlan(NamedTuple):
    """What is read of a recording: channels of the run under the names of the map, and labels only
    where `labels` maps their texts.
    """

    options: WindowOptions
    mapping: ChannelMap
    labels: Mapping[str, str] | None = None


class NewRecording(NamedTuple):
    """A recording that was found: its name for outputs, its file, and the function that reads
    it.
    """

    name: str
    file: str
    read: Callable[[], Record]  # raises UserError


def find_recordings(
    paths: Sequence[Path],
    options: WindowOptions,
    mapping: ChannelMap,
    labels: Mapping[str, str] | None = None,
) -> Iterator[NewRecording]:
    """The recordings of files, folders (also BIDS) and caches, with unique names; the channels of
    `options` under the names of `mapping`.

    `labels`: text of an annotation -> class, of recordings whose labels are read (`cut_labelled`);
    None: no label is opened. A folder without recordings and a path that is not there are
    recordings whose `read` raises.
    """
    used: set[str] = set()
    beside: dict[Path, Source] = {}
    for path in paths:
        for found in _list_recordings(path, ReadingPlan(options, mapping, labels), beside):
            stem = re.sub(r"[^A-Za-z0-9._+-]+", "-", found.name).strip("-._+")[:100] or "recording"
            numbered = (f"{stem}-{k}" for k in itertools.count(2))
            # `night-2` may be a file, too
            name = next(
                one for one in itertools.chain((stem,), numbered) if one.casefold() not in used
            )
            used.add(name.casefold())
            yield found._replace(name=name)


def _list_recordings(
    path: Path, plan: ReadingPlan, beside: dict[Path, Source]
) -> Iterator[NewRecording]:
    try:
        if path.is_dir() and (path / manifests.MANIFEST).is_file():
            cache = open_cache(path, verify=False)
            for recording in cache.recording_ids():
                yield NewRecording(
                    recording, f"{path}:{recording}", partial(_read_cached, path, recording, plan)
                )
            return
        if path.is_dir():
            source = scan_folder(path)
            rels = list(list_signal_files(source))
            if not rels:
                raise input_error(
                    Reason.NO_INPUT,
                    "no recordings there",
                    f"expected {', '.join(SUFFIXES)}",
                    file=str(path),
                )
        else:
            if not path.exists():
                raise usage_error(
                    "no such file",
                    "expected a recording, a folder or a cache",
                    code=Reason.NOT_FOUND,
                    file=str(path),
                )
            if path.parent not in beside:
                beside[path.parent] = scan_folder(path.parent, follow_symlinks=True, is_flat=True)
            source = beside[path.parent]
            rels = [path.name]
    except UserError as error:
        yield NewRecording(path.stem or "recording", str(path), partial(_raise_error, error))
        return
    for rel in rels:
        stem = strip_suffix(rel if path.is_dir() else path.name)
        yield NewRecording(stem, str(source.root / rel), partial(read_recording, source, rel, plan))


def list_signal_files(source: Source) -> Iterator[str]:
    """Files of a folder that can be recordings: neither labels, by their names, nor tables of a
    BIDS folder, nor segments of a record.
    """
    is_bids = any(name in source.files for name in ("participants.tsv", "dataset_description.json"))
    suffixes = SUFFIXES.keys() - {".mat"}  # often copies of the recordings
    rels = [rel for rel in (*source.files, *source.rejected) if find_suffix(rel) in suffixes]
    segments = files.find_segments(source, [rel for rel in rels if find_suffix(rel) == ".hea"])
    for rel in sorted(set(rels) - segments):
        is_table = is_bids and PurePosixPath(rel).suffix == ".tsv"
        derived = is_bids and rel.startswith(files.DERIVED)
        if (
            not is_table
            and not derived
            and not LABEL_FILE.search(PurePosixPath(strip_suffix(rel)).name)
        ):
            yield rel


def _raise_error(error: UserError) -> Record:
    raise error


def _read_cached(path: Path, recording: str, plan: ReadingPlan) -> Record:
    names = [
        name for wanted in plan.options.read_channels for name in plan.mapping.list_names(wanted)
    ]
    records = open_cache(path, verify=False).records(
        names, only=[recording], labels=plan.labels is not None
    )
    return select_channels(next(iter(records)), plan)


def read_recording(source: Source, rel: str, plan: ReadingPlan) -> Record:
    """The recording in a file of `source`, with the channels of `plan` alone, under their names in
    the run. Raises UserError naming the file.
    """
    mapping, kind = plan.mapping, SUFFIXES.get(find_suffix(rel))
    with locate_errors(rel):
        if kind is None:
            known = ", ".join(SUFFIXES)
            raise input_error(
                Reason.UNSUPPORTED_FORMAT,
                "no format of recordings has this ending",
                f"expected one of {known}",
            )
        info = RecordingInfo(
            recording_id=PurePosixPath(strip_suffix(rel)).name,
            subject_id="unknown",
            rate=(plan.options.rate if plan.options.clock else mapping.rate)
            if kind in {"table", "npy", "mat"}
            else None,
            time="" if plan.options.clock else mapping.time,
            labels={} if plan.labels is None else dict(plan.labels),
            delimiter="\t" if find_suffix(rel) == ".tsv" else mapping.delimiter,
        )
        names = _list_channels(source, rel, kind, info)
        if names is not None:
            info = replace(
                info,
                channels={
                    name: (name, "")
                    for name in choose_channels(names, plan.options.read_channels, mapping).values()
                },
            )
        if kind in {"npy", "mat"} and info.rate is None:
            raise input_error(
                Reason.SAMPLING_RATE,
                "has no sampling rate",
                "expected `rate` in the file of --map",
                "Give --map FILE.toml",
            )
        unit = files.make_unit(
            source,
            rel,
            kind,
            info,
            bids=plan.labels is not None,
            annotators=() if plan.labels is None else ("atr",),
        )
        assert unit.read is not None
        read = unit.read()
        assert isinstance(read, Record)
        return select_channels(read, plan)


def _list_channels(source: Source, rel: str, kind: Format, info: RecordingInfo) -> list[str] | None:
    """Names of the channels by the header alone; None: known when the file is read."""
    if kind == "edf":
        return [
            channel.label
            for channel in edf_header.read_header(source.path(rel), required=()).channels
        ]
    if kind == "wfdb":
        return [channel.name for channel in wfdb.read_header(rel, source, required=()).channels]
    if kind == "table":
        return [
            name
            for name in tables.read_names(source.path(rel), delimiter=info.delimiter)
            if name and name != info.time
        ]
    return None


def choose_channels(
    names: Iterable[str], channels: Sequence[str], mapping: ChannelMap
) -> dict[str, str]:
    """Channel of the run -> its name among `names`. Raises UserError (missing_channel, exit 4) with
    the nearest names.
    """
    known = list(dict.fromkeys(names))
    out = {
        wanted: found
        for wanted in channels
        if (found := next((n for n in mapping.list_names(wanted) if n in known), None)) is not None
    }
    if missing := [wanted for wanted in channels if wanted not in out]:
        pairs = {wanted: suggest_channel(wanted, known) for wanted in missing}
        given = [
            f"--map {safe_text(f'{wanted}={near}')}"
            for wanted, near in pairs.items()
            if near is not None
        ]
        listed = ", ".join(map(safe_text, known[:12])) + (
            f" and {len(known) - 12} more" if len(known) > 12 else ""
        )
        asked = " or ".join(map(safe_text, mapping.list_names(missing[0])))
        raise input_error(
            Reason.MISSING_CHANNEL,
            f"has no channel {asked}"
            + (f" and {len(missing) - 1} more of the run" if missing[1:] else ""),
            f"found {listed or 'none'}",
            f"If it is the same signal, give {' '.join(given)}"
            if given
            else "Name it with --map WANTED=FOUND",
            field="channels",
            expected=safe_text(missing[0]),
        )
    return out


def suggest_channel(wanted: str, names: Sequence[str]) -> str | None:
    """The nearest of `names`: by letters and digits alone, then by the longest common part; None:
    none is near.
    """
    plain = {name: re.sub(r"[^a-z0-9]", "", name.casefold()) for name in names}
    own = re.sub(r"[^a-z0-9]", "", wanted.casefold())
    ratio = {name: difflib.SequenceMatcher(None, own, text).ratio() + (0.5 if text and (text in own or own in text) else 0.0)
             for name, text in plain.items()}  # fmt: skip
    best = max(ratio, key=lambda name: ratio[name], default=None)
    return best if best is not None and ratio[best] >= 0.5 else None


def select_channels(record: Record, plan: ReadingPlan) -> Record:
    """The record with the channels of `plan` alone, under their names in the run, and without
    labels unless it maps them.
    """
    found = choose_channels(
        (signal.channel for signal in record.signals), plan.options.read_channels, plan.mapping
    )
    signals = [
        signal._replace(channel=wanted)
        for wanted, name in found.items()
        for signal in record.signals
        if signal.channel == name
    ]
    if plan.labels is not None:
        known = (
            note for note in record.annotations if note.label in plan.labels or not plan.labels
        )
        notes = [note._replace(label=plan.labels.get(note.label, note.label)) for note in known]
        return replace(record, signals=signals, annotations=notes, start_time=None)
    return replace(record, signals=signals, annotations=[], attributes={}, start_time=None)


# --- windows


@dataclass(frozen=True, kw_only=True)
class UnlabelledWindows:
    """The windows of a recording in memory, with labels where they were read, and what was
    converted or left out.
    """

    windows: Windows
    findings: list[Finding] = field(default_factory=list)


def prediction_options(options: WindowOptions) -> WindowOptions:
    """Those of the training without labels: every window of the recording, at any rate that can be
    resampled.
    """
    changed = {
        "resample": True,
        "trim": None,
        "target": None,
        "overlap": None,
        "labels": {UNLABELLED: UNLABELLED},
    }
    return options.model_copy(update=changed)


def label_texts(preprocessing: Preprocessing) -> dict[str, str]:
    """Text of an annotation -> class: as the view reads them, and the classes themselves."""
    return {
        **(preprocessing.options.labels or {}),
        **{name: name for name in preprocessing.class_names},
    }


def cut_unlabelled(
    record: Record, name: str, preprocessing: Preprocessing, *, labels: bool = False
) -> UnlabelledWindows:
    """The windows of `record` as the run of `preprocessing` reads them.

    Views of epochs have a window for each full epoch from the start of a segment, others one every
    stride; with `labels` those that the view labels, as at the training.

    Windows without a sample are left out, but for irregular ones. Raises UserError: unit,
    sampling_rate, length (no full window), missing_values (no sample), timestamps (of irregular
    samples), all exit 4; those of `cut_record`.
    """
    import polars as pl

    options = prediction_options(preprocessing.options)
    if labels:
        options = preprocessing.options.model_copy(update={"resample": True, "labels": None})
    signals, findings = match_units(record.signals, preprocessing)
    findings = [
        *record.findings,
        *findings,
        *(
            _report_rates(signals, options)
            if options.clock is None
            else _check_times(signals, options)
        ),
    ]
    if not labels:
        record = replace(
            record, annotations=_cover_segments(signals) if options.epoch is not None else []
        )
    record = replace(record, signals=signals)
    left_out: Counter[str] = Counter()
    cut = cut_record(record, options, preprocessing.units, left_out)
    if cut is not None and options.irregular:
        del cut.places[1:]  # rows behind the first window
    if cut is None or not cut.places:
        longest = max((len(signal.samples) / signal.rate for signal in signals), default=0.0)
        problem = (
            f"{longest:.6g} s of signal" if cut is not None else "no stretch of it has all channels"
        )
        if labels and cut is not None:
            raise input_error(
                Reason.UNMATCHED_LABELS,
                "no window of it has a label",
                f"expected one of {', '.join(preprocessing.class_names)}",
            )
        raise input_error(
            Reason.LENGTH,
            problem,
            f"expected at least one window of {options.length:g} s",
            "Give a longer recording",
        )
    for key, text in (
        ("annotation_out_of_range", "epochs at the edges have no full window"),
        ("too_short", "segments are too short"),
    ):
        if left_out[key]:
            findings.append(
                input_warning(
                    Reason.LENGTH,
                    f"{left_out[key]} {text}",
                    "they have no prediction",
                    count=left_out[key],
                )
            )
    _drop_empty(cut, options, findings)
    shards = tuple(make_windows(cut, cut.places, options))
    missing = preprocessing.missing or any(
        s.dtype.kind == "f" and not bool(np.isfinite(s).all()) for s in shards
    )
    n = len(cut.places)
    index = pl.DataFrame(
        {
            "window": pl.Series(range(n), dtype=pl.Int64),
            "subject_id": pl.Series([name] * n, dtype=pl.String),
            "recording_id": pl.Series([name] * n, dtype=pl.String),
            "start": pl.Series([place.start for place in cut.places], dtype=pl.Float64),
            "label": pl.Series([place.label for place in cut.places])
            if labels
            else pl.Series([None] * n, dtype=pl.String),
            "split": pl.Series(["test"] * n, dtype=pl.String),
        }
    )
    rates = {(signal.channel, signal.rate) for segment in cut.segments for signal in segment}
    manifest = WindowManifest(
        cache="", options=options, class_names=list(preprocessing.class_names), units=list(cut.units), windows=n, missing=missing,
        shards=[], counts={}, left_out={}, preparation=describe_preparation(rates, options), notices=[], findings=[],
    )  # fmt: skip
    statistics = WindowStatistics(windows=0, channels=list(preprocessing.channels))
    centre, factor = compute_affine(statistics, options, cut.scale[None], cut.offset[None])
    windows = Windows(
        folder=Path(name), manifest=manifest, statistics=statistics, rows=np.arange(n), whole_index=index, shards=shards,
        target=encode_targets(index["label"], options.task, list(preprocessing.class_names)) if labels else None,
        firsts=np.cumsum([0, *map(len, shards)]), recording=np.zeros(n, np.int32), centre=centre, factor=factor,
    )  # fmt: skip
    return UnlabelledWindows(windows=windows, findings=findings)


def _drop_empty(cut: RecordCut, options: WindowOptions, findings: list[Finding]) -> None:
    """Keep the windows with a sample, of which there is something to predict; a warning about the
    others is added to `findings`.

    Raises UserError: missing_values (exit 4), where all are empty.
    """
    kept = find_observed(cut, cut.places, options)
    if not kept.any():
        raise input_error(
            Reason.MISSING_VALUES,
            f"none of {len(kept)} windows has a sample",
            "expected a measured signal",
        )
    if empty := int((~kept).sum()):
        findings.append(
            input_warning(
                Reason.MISSING_VALUES,
                f"{empty} windows have no sample",
                "they have no prediction",
                count=empty,
            )
        )
    cut.places[:] = [place for place, keep in zip(cut.places, kept, strict=True) if keep]


def match_units(
    signals: Sequence[Signal], preprocessing: Preprocessing
) -> tuple[list[Signal], list[Finding]]:
    """The signals in units that `cut_record` converts, and what is to be said of them. Raises
    UserError (unit, exit 4).
    """
    units: Mapping[str, str] = dict(
        zip(preprocessing.options.channels, preprocessing.units, strict=True)
    )
    out, findings = [], {}
    for signal in signals:
        if signal.channel not in units:  # the times of samples that are brought to a grid
            out.append(signal)
            continue
        wanted, name = units[signal.channel], safe_text(signal.channel)
        if find_unit_factor(signal.unit, wanted) is None:
            if signal.unit.strip() and wanted:
                problem, hint = (
                    f"{name} is in {safe_text(signal.unit)}",
                    "Convert it, or map another channel",
                )
                raise input_error(
                    Reason.UNIT,
                    problem,
                    f"the run reads {safe_text(wanted)}",
                    hint,
                    field="unit",
                    found=safe_text(signal.unit),
                )
            text = f"{name} states no unit" if wanted else f"{name} is in {safe_text(signal.unit)}"
            requirement = (
                f"taken for {safe_text(wanted)}"
                if wanted
                else "the run was trained without a unit: nothing was converted"
            )
            findings[text] = input_warning(Reason.UNIT, text, requirement, field="unit")
            signal = signal._replace(unit=wanted)
        elif signal.unit.strip().casefold() != wanted.strip().casefold():
            text = f"{name} is in {safe_text(signal.unit)}"
            findings[text] = input_warning(
                Reason.UNIT, text, f"converted to {safe_text(wanted)}", field="unit"
            )
        out.append(signal)
    return out, list(findings.values())


def _report_rates(signals: Sequence[Signal], options: WindowOptions) -> Iterator[Finding]:
    for channel, rate in sorted({(signal.channel, signal.rate) for signal in signals}):
        text = f"{safe_text(channel)} has {rate:g} Hz"
        how = HOW_RESAMPLED.get(choose_resampling(channel, rate, options))
        if how is None:
            continue
        yield input_warning(
            Reason.SAMPLING_RATE,
            text,
            f"resampled to the {options.rate:g} Hz of the run {how}",
            field="rate",
        )


def _check_times(signals: Sequence[Signal], options: WindowOptions) -> Iterator[Finding]:
    """Rows of irregular samples that are not read. Raises UserError (timestamps, exit 4) for times
    that are not seconds from the start in order.
    """
    clock = next(signal for signal in signals if signal.channel == options.clock)
    times = clock.samples.astype(np.float64) * clock.scale + clock.offset
    if not np.isfinite(times).all() or (times < 0).any() or (np.diff(times) < 0).any():
        wanted = "expected seconds since the start, of 0 or more, in order, in every row"
        raise input_error(
            Reason.TIMESTAMPS,
            f"{safe_text(clock.channel)} is not a time in each row",
            wanted,
            field=safe_text(clock.channel),
        )
    beyond = int((times > options.length).sum()) if options.grid else len(times) - options.window
    if beyond > 0:
        limit = f"{options.length:g} s" if options.grid else f"{options.window} rows"
        yield input_warning(
            Reason.LENGTH,
            f"{beyond} rows behind the first {limit}",
            "they are not read, as at the training",
            count=beyond,
        )


def _cover_segments(signals: Sequence[Signal]) -> list[Annotation]:
    """One unlabelled stretch for each segment: as long as its shortest channel."""
    length: dict[float, float] = {}
    for signal in signals:
        seconds = len(signal.samples) / signal.rate
        length[signal.onset] = min(length.get(signal.onset, seconds), seconds)
    return [Annotation(onset, seconds, UNLABELLED) for onset, seconds in sorted(length.items())]
