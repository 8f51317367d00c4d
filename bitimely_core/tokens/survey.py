"""One pass over a cache: which windows it gives under some options, in which splits, and what is
left out.

Legend: V channels.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bitimely_core import registry
from bitimely_core.cache import Cache
from bitimely_core.errors import Finding, Level, Reason, UserError, input_error, safe_text
from bitimely_core.formats.units import find_unit_factor
from bitimely_core.progress import report_progress
from bitimely_core.schemas.tokens import SplitCounts, WindowOptions, WindowUse
from bitimely_core.tokens import filters, splits
from bitimely_core.tokens.cutting import (
    RecordCut,
    WindowPlace,
    count_unfiltered,
    cut_record,
    find_observed,
)
from bitimely_core.tokens.epochs import choose_scored, count_durations, find_class, is_shorter
from bitimely_core.tokens.moments import Moments
from bitimely_core.types import SPLITS, Record
from bitimely_core.wording import list_first

if TYPE_CHECKING:
    import polars as pl

FEW_SUBJECTS = 10  # of as few, a split by subject may have none


class RecordingWindows(NamedTuple):
    """The n windows of a recording in the token set, as columns."""

    subject_id: str
    recording_id: str
    digital: bool  # int16, else float32
    starts: np.ndarray  # [n] float64, seconds
    labels: np.ndarray  # [n] object: a class, a tuple of them, a number or None
    splits: np.ndarray  # [n] uint8: position in `SPLITS`
    scale: np.ndarray  # [V] float64: physical = stored value * scale + offset
    offset: np.ndarray  # [V] float64


@dataclass
class CacheSurvey:
    """Results of a pass over the cache. It holds places and counts, no samples."""

    recordings: list[RecordingWindows] = field(default_factory=list)
    units: tuple[str, ...] = ()  # [V]
    rates: set[tuple[str, float]] = field(default_factory=set)  # channel and native Hz
    left_out: Counter[str] = field(default_factory=Counter)  # by the keys of `LEFT_OUT`
    # split -> windows that were left out for having no sample
    empty: Counter[str] = field(default_factory=Counter)
    # key of `LEFT_OUT` -> recordings that were left out for it, and what is wrong with each
    lacking: defaultdict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    other_units: dict[str, str] = field(default_factory=dict)  # channel in several -> that of most
    unknown: Counter[str] = field(default_factory=Counter)  # texts without a class of the view
    # seconds of annotations with a class of the view -> how many last so long
    durations: Counter[float] = field(default_factory=Counter)
    # what is known once the windows were made
    moments: list[list[Moments]] = field(default_factory=list)  # [pieces][V] of the training split
    # digest of the values of a recording -> the splits of each recording that has them
    contents: dict[bytes, list[set[str]]] = field(default_factory=dict)
    missing: bool = False  # whether any value is NaN


def survey_cache(
    cache: Cache, options: WindowOptions, survey: CacheSurvey
) -> Iterator[tuple[RecordCut, list[str]]]:
    """The windows of each recording and the split of each window; counted in `survey`."""
    assign_splits = splits.make_scheme(options, cache.subjects())
    view = registry.datasets[options.dataset].facts.views[options.view]
    refuses_faster = view.rate <= 0 and not options.resample
    survey.units = _choose_units(cache, options)
    total = len(cache.recording_ids())
    channels = [*options.channels, *filter(None, (options.target, options.clock))]
    for done, record in enumerate(cache.records(channels)):
        report_progress("windows", done, total)
        fastest = max((signal.rate for signal in record.signals), default=0.0)
        if refuses_faster and fastest > options.rate * (1 + 1e-9):
            survey.left_out["faster"] += 1
            survey.lacking["faster"][record.recording_id] = f"has {fastest:g} Hz"
            continue
        cut = _cut_record(record, options, survey)
        if cut is None or not cut.places:
            continue
        starts = [place.start for place in cut.places]
        assigned = assign_splits(record.subject_id, record.recording_id, record.attributes, starts)
        cut, names = _select_windows(cut, assigned, options, survey)
        _add_recording(survey, record, cut, names, options)
        yield cut, names
    report_progress("windows", total, total)


def _choose_units(cache: Cache, options: WindowOptions) -> tuple[str, ...]:
    """The unit of each channel in most recordings, in that of the first of them; () where a channel
    is in none.

    Units of one quantity count together, because they are converted.
    """
    units: dict[str, list[str]] = {channel: [] for channel in options.channels}
    table = cache.signals().select("recording_id", "channel", "unit")
    for _, channel, unit in table.unique(maintain_order=True).iter_rows():
        if channel in units:
            units[channel].append(unit)
    chosen: list[str] = []
    for same in units.values():
        groups = [
            [unit for unit in same if find_unit_factor(unit, first) is not None]
            for first in dict.fromkeys(same)
        ]
        if not groups:
            return ()
        chosen.append(max(groups, key=lambda group: (len(group), group[0]))[0])  # "" last
    return tuple(chosen)


def _count_annotations(survey: CacheSurvey, record: Record, options: WindowOptions) -> None:
    """Count how long annotations last, which texts are no class, and recordings without a class."""
    texts = [note.label for note in record.annotations if (note.duration == 0) == options.points]
    unknown = [text for text in texts if find_class(text, options.labels) is None]
    survey.unknown.update(unknown)
    notes = ((note.duration, note.label) for note in record.annotations)
    survey.durations.update(count_durations(notes, options.labels))
    if len(unknown) == len(texts):
        survey.left_out["unmatched_labels"] += 1
        text = "has other annotations alone" if record.annotations else "has no annotation"
        survey.lacking["unmatched_labels"][record.recording_id] = text


def _cut_record(record: Record, options: WindowOptions, survey: CacheSurvey) -> RecordCut | None:
    """`cut_record`, and which channels a recording lacks that is left out for them."""
    if options.epoch is not None:
        _count_annotations(survey, record, options)
    before = survey.left_out.copy()
    cut = cut_record(record, options, survey.units, survey.left_out)
    if survey.left_out["missing_channel"] > before["missing_channel"]:
        present = {signal.channel for signal in record.signals}
        absent = [safe_text(name) for name in options.channels if name not in present]
        text = f"lacks {', '.join(absent) or 'them at one time'}"
        survey.lacking["missing_channel"][record.recording_id] = text
    if survey.left_out["unit"] > before["unit"]:
        survey.lacking["unit"][record.recording_id] = _describe_unit(record, options, survey)
    return cut


def _describe_unit(record: Record, options: WindowOptions, survey: CacheSurvey) -> str:
    """Which channel of a recording is in another unit than that of the view."""
    units = dict(zip(options.channels, survey.units, strict=True))
    differing = [
        signal
        for signal in record.signals
        if signal.channel in units and find_unit_factor(signal.unit, units[signal.channel]) is None
    ]
    for signal in differing:
        survey.other_units.setdefault(signal.channel, units[signal.channel] or signal.unit)
    first = differing[0]
    stated, others = (
        f"in {safe_text(unit)}" if unit else "without a unit"
        for unit in (first.unit, units[first.channel])
    )
    return f"has {safe_text(first.channel)} {stated}, others {others}"


def _select_windows(
    cut: RecordCut, names: list[str | None], options: WindowOptions, survey: CacheSurvey
) -> tuple[RecordCut, list[str]]:
    """The windows of a recording that are in a split and have a sample, with their splits."""
    rows = [(place, name) for place, name in zip(cut.places, names, strict=True) if name]
    survey.left_out["gap"] += len(names) - len(rows)
    blocks = _find_blocks(rows, options) if options.split == "time" else ()
    cut = cut._replace(places=[place for place, _ in rows], blocks=blocks)
    observed = find_observed(cut, options)
    survey.left_out["unfiltered"] += count_unfiltered(cut, options)
    empty = itertools.compress(rows, ~observed)
    survey.empty.update(name for _, name in empty)
    survey.left_out["empty_windows"] = survey.empty.total()
    rows = list(itertools.compress(rows, observed))
    return cut._replace(places=[place for place, _ in rows]), [name for _, name in rows]


def _find_blocks(
    rows: list[tuple[WindowPlace, str]], options: WindowOptions
) -> tuple[tuple[float, float], ...]:
    """Start and end, in seconds, of each run of windows of one split.

    A filter over several would mix the splits.
    """
    blocks = []
    for _, run in itertools.groupby(rows, key=itemgetter(1)):
        starts = [place.start for place, _ in run]
        blocks.append((starts[0], starts[-1] + options.length))
    return tuple(blocks)


def _add_recording(
    survey: CacheSurvey, record: Record, cut: RecordCut, names: list[str], options: WindowOptions
) -> None:
    survey.rates |= {(signal.channel, signal.rate) for signal in itertools.chain(*cut.segments)}
    n = len(cut.places)
    if not n:
        return
    windows = RecordingWindows(
        record.subject_id,
        record.recording_id,
        cut.digital,
        starts=np.fromiter((place.start for place in cut.places), float, n),
        labels=np.fromiter(map(_share_text, (place.label for place in cut.places)), object, n),
        splits=np.fromiter(map(SPLITS.index, names), np.uint8, n),
        scale=cut.scale,
        offset=cut.offset,
    )
    survey.recordings.append(windows)


def _share_text(label: Any) -> Any:
    """The label, of equal texts the same object: each recording has read its own."""
    return sys.intern(label) if isinstance(label, str) else label


def make_index(survey: CacheSurvey, options: WindowOptions) -> pl.DataFrame:
    """One row a window, as stored: those of int16 first, else in the order of the recordings.

    A label is a class, a list of classes, a number, or null for every row of a view without labels.
    """
    import polars as pl

    windows = sorted(survey.recordings, key=lambda recording: not recording.digital)
    counts = np.array([len(recording.starts) for recording in windows], np.int64)
    rows = np.repeat(np.arange(len(windows)), counts)
    subjects = pl.Series([recording.subject_id for recording in windows], dtype=pl.String)
    recordings = pl.Series([recording.recording_id for recording in windows], dtype=pl.String)
    labels = itertools.chain.from_iterable(recording.labels for recording in windows)
    label_types = {"regression": pl.Float64(), "multilabel": pl.List(pl.String())}
    label_type = label_types.get(options.task, pl.String())
    splits = np.concatenate([np.empty(0, np.uint8), *(recording.splits for recording in windows)])
    return pl.DataFrame(
        {
            "window": np.arange(len(rows)),
            "subject_id": subjects.gather(rows),
            "recording_id": recordings.gather(rows),
            "start": np.concatenate([np.empty(0), *(recording.starts for recording in windows)]),
            "label": pl.Series(list(labels), dtype=label_type),
            "split": pl.Series(SPLITS).gather(splits),
        }
    )


def count_labels(index: pl.DataFrame) -> dict[str, int]:
    """Occurrences of each class; a multi-label window counts for each of its classes."""
    import polars as pl

    label = index["label"]
    if isinstance(label.dtype, pl.List):
        label = label.explode()
    return dict(label.drop_nulls().value_counts(sort=False).iter_rows())


def list_classes(index: pl.DataFrame, options: WindowOptions) -> list[str]:
    """The view's classes; of a view that names none, those that occur, sorted."""
    if options.classes or options.task not in {"classification", "multilabel"}:
        return list(options.classes)
    return sorted(count_labels(index))


def audit(
    index: pl.DataFrame, empty: Counter[str], class_names: list[str]
) -> dict[str, SplitCounts]:
    """Windows, subjects, recordings and windows a class in each split."""
    counts = {}
    for split in SPLITS:
        rows = index.filter(index["split"] == split)
        labels = count_labels(rows) if class_names else {}
        counts[split] = SplitCounts(
            windows=rows.height,
            subjects=rows["subject_id"].n_unique(),
            recordings=rows["recording_id"].n_unique(),
            classes={name: labels.get(name, 0) for name in class_names},
            empty=empty[split],
        )
    return counts


def summarize_use(cache: Cache, survey: CacheSurvey, options: WindowOptions) -> WindowUse:
    """What of the cache is in windows."""
    seconds: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    channels: defaultdict[str, set[str]] = defaultdict(set)
    columns = cache.signals().select("recording_id", "channel", "rate", "n_samples")
    for recording, channel, rate, samples in columns.iter_rows():
        seconds[recording][channel] += samples / rate
        channels[channel].add(recording)
    unused = {
        channel: len(recordings)
        for channel, recordings in channels.items()
        if channel not in options.read_channels and channel != options.target
    }
    used = (_measure_union(windows.starts, options.length) for windows in survey.recordings)
    return WindowUse(
        recordings=len(cache.recording_ids()),
        recordings_used=len(survey.recordings),
        channels_left=dict(sorted(unused.items(), key=lambda item: (-item[1], item[0]))),
        seconds=round(sum(max(by_channel.values()) for by_channel in seconds.values()), 3),
        seconds_used=round(sum(used), 3),
    )


def _measure_union(starts: np.ndarray, length: float) -> float:
    """Seconds that windows of `length` seconds cover; `starts` [n] ascending."""
    return float(np.minimum(np.diff(starts), length).sum()) + length


def describe_use(use: WindowUse, task: str) -> list[str]:
    """The summary in plain words; nothing about a point that leaves no question."""
    lines = []
    if use.channels_left:
        names = [f"{safe_text(name)} (in {n:,})" for name, n in use.channels_left.items()]
        lines.append(f"channels not used: {list_first(names, 6)}; --channels chooses")
    if use.recordings_used < use.recordings:
        lines.append(f"recordings: {use.recordings_used:,} of {use.recordings:,} have a window")
    share = use.seconds_used / use.seconds if use.seconds else 0.0
    if share < 0.995:
        what = "windows" if task == "none" else "labelled windows"
        text = f"{share:.0%}" if share >= 0.01 else "less than 1%"
        lines.append(f"time: {text} of the recordings is in {what}")
    return lines


def list_notices(options: WindowOptions) -> list[str]:
    """Caveats that are shown with every score on these windows."""
    notices = [
        registry.datasets[options.dataset].facts.views[options.view].notice,
        splits.SHARED.get(options.split, ""),
    ]
    if options.normalise == "window":
        notices.append(
            "Each window is normalised by its own mean and spread: "
            "objectives are leak-free only given these."
        )
    words = filters.describe_filters(options.bandpass, options.notch)
    if words and options.filtering == "causal":
        notices.append(
            f"Filtered forward ({words}): each value depends on what comes before it, "
            "beyond its window too, and is delayed."
        )
    elif words:
        notices.append(
            f"Filtered forward and backward ({words}): each value depends on what comes before "
            "and after it, beyond its window too."
        )
    return list(filter(None, notices))


class LeftOut(NamedTuple):
    """A reason for which something is left out, as a finding words it."""

    code: Reason
    text: str  # behind the number
    level: Level = "warning"
    hint: str = ""  # how to keep the recordings


LEFT_OUT = {  # key of `left_out` -> its reason
    "missing_channel": LeftOut(
        Reason.MISSING_CHANNEL,
        "recordings without a channel of this view were left out",
        hint="Give --channels that they have too, or one name to equal channels in [[files]] of "
        "the map at ingest (generic)",
    ),
    "faster": LeftOut(
        Reason.SAMPLING_RATE,
        "recordings that are sampled faster than most were left out",
        hint="Give --rate {rate:g} to resample them with an anti-alias filter",
    ),
    "segments_without_channel": LeftOut(
        Reason.MISSING_CHANNEL, "segments without a channel of this view were left out"
    ),
    "unit": LeftOut(
        Reason.UNIT,
        "recordings in another unit than most were left out",
        hint="State the right units in the map at ingest (generic): [units]",
    ),
    "too_short": LeftOut(Reason.LENGTH, "recordings or segments are shorter than a window"),
    "times_behind": LeftOut(
        Reason.LENGTH, "times of irregular recordings behind their windows were left out"
    ),
    "unmatched_labels": LeftOut(
        Reason.UNMATCHED_LABELS, "recordings without a label of this view were left out"
    ),
    "unlabelled_windows": LeftOut(
        Reason.UNMATCHED_LABELS, "windows that begin where there is no label were left out", "info"
    ),
    "unknown_label": LeftOut(
        Reason.UNKNOWN_LABEL, "labels that are no class of this view were left out"
    ),
    "unlabelled_epochs": LeftOut(
        Reason.UNLABELLED_EPOCHS, "epochs without a class of this view were left out", "info"
    ),
    "mixed_epochs": LeftOut(
        Reason.UNLABELLED_EPOCHS, "windows would hold two labels, or one in a part of them"
    ),
    "annotation_overlap": LeftOut(
        Reason.ANNOTATION_OVERLAP,
        "epochs have a second label at the same time: the first one is used",
        hint="Where two people scored the recording, choose one of them: scorer in [labels] of "
        "the map at ingest",
    ),
    "annotation_out_of_range": LeftOut(
        Reason.ANNOTATION_OUT_OF_RANGE,
        "scored epochs outside of the signal or over a gap were left out",
        "info",
    ),
    "trimmed": LeftOut(
        Reason.LEFT_OUT, "windows outside of this view's trimming rule were left out", "info"
    ),
    "class_missing": LeftOut(
        Reason.CLASS_MISSING,
        "recordings have only the class that is trimmed: nothing was trimmed there",
    ),
    "unmeasured_windows": LeftOut(
        Reason.UNMATCHED_LABELS,
        "windows of which numeric annotations cover too little were left out",
        "info",
    ),
    "unfiltered": LeftOut(
        Reason.LENGTH,
        "stretches of a channel are too short for the filter: they are missing values",
    ),
    "gap": LeftOut(
        Reason.LEFT_OUT, "windows in the gaps between blocks of time were left out", "info"
    ),
    "empty_windows": LeftOut(Reason.MISSING_VALUES, "windows without a sample were left out"),
}


def list_findings(
    survey: CacheSurvey, counts: dict[str, SplitCounts], options: WindowOptions
) -> list[Finding]:
    """What was left out, what the splits lack, and recordings that stand in several splits."""
    findings = list_left_out(survey, options)
    if survey.recordings:
        findings += _list_gaps_of_splits(counts, options)
    return [*findings, *_find_duplicates(survey.contents)]


def list_left_out(survey: CacheSurvey, options: WindowOptions) -> list[Finding]:
    """A finding for each reason for which something was left out."""
    return [
        _describe_mixed(survey, options)
        if key == "mixed_epochs"
        else _describe_left_out(key, survey, options)
        for key in LEFT_OUT
        if survey.left_out[key]
    ]


def describe_no_window(cache: Cache, survey: CacheSurvey, options: WindowOptions) -> UserError:
    """The error for a view without a window, with the reasons that cost most."""
    reasons = sorted(list_left_out(survey, options), key=lambda finding: -finding.count)
    problems = [finding.problem for finding in reasons[:3]]
    if options.epoch is not None:
        problems += _describe_texts(survey, options)
    needed = f"a window needs {options.length:g} s of {', '.join(options.channels)}"
    if options.task != "none":
        classes = ", ".join(options.classes)
        needed += f" with one of {classes}" if classes else " with a label"
    return input_error(
        Reason.NO_INPUT,
        f"no window fits this view: {'; '.join(problems) or 'the cache has no recording'}",
        needed,
        next((finding.hint for finding in reasons if finding.hint), ""),
        file=str(cache.folder),
        details=reasons,
    )


def _describe_texts(survey: CacheSurvey, options: WindowOptions) -> list[str]:
    """That no annotation has a class, and the texts that are none."""
    texts = [safe_text(text, 20) for text, _ in survey.unknown.most_common(5)]
    problems = [f"texts without a class: {', '.join(texts)}"] if texts else []
    if not survey.durations and not options.points:
        problems.insert(0, "no annotation that lasts has a class of it")
    return problems


def _describe_left_out(key: str, survey: CacheSurvey, options: WindowOptions) -> Finding:
    """What was left out for a reason, with the first recordings and the option that keeps them."""
    reason, count = LEFT_OUT[key], survey.left_out[key]
    problem = f"{count:,} {reason.text}"
    if key == "empty_windows":
        parts = [f"{survey.empty[split]:,} {split}" for split in SPLITS if survey.empty[split]]
        problem += f" ({', '.join(parts)})"
    hint = reason.hint
    if key == "unit":
        hint = " ".join(
            [hint, *(f'"{name}" = "{unit}"' for name, unit in survey.other_units.items())]
        )
    recordings = [f"{safe_text(name)} {text}" for name, text in survey.lacking[key].items()]
    return Finding(
        reason.code,
        problem,
        list_first(recordings, 3, "; "),
        hint.format(rate=options.rate),
        level=reason.level,
        count=count,
        examples=tuple(recordings[:20]),
    )


def _describe_mixed(survey: CacheSurvey, options: WindowOptions) -> Finding:
    """How many epochs are lost because the annotations are shorter, and the window that fits."""
    reason, count = LEFT_OUT["mixed_epochs"], survey.left_out["mixed_epochs"]
    assert options.epoch is not None
    epoch = float(options.epoch)
    scored = choose_scored(survey.durations)
    problem = f"{count:,} windows of {epoch:g} s {reason.text.removeprefix('windows ')}"
    hint = ""
    if is_shorter(scored, epoch):
        problem = f"annotations of {scored:g} s: {problem}"
        hint = f"Give --window {round(scored * options.rate)} to read them as they are scored"
    return Finding(reason.code, problem, hint=hint, level=reason.level, count=count)


def _list_gaps_of_splits(
    counts: dict[str, SplitCounts], options: WindowOptions
) -> Iterator[Finding]:
    """Splits without windows, and classes without a training window, where there are to be some."""
    if options.split == splits.EXTERNAL:
        return
    empty = [split for split in SPLITS if not counts[split].windows]
    if empty:
        yield _describe_empty_splits(empty, counts, options)
    classes = counts["train"].classes
    absent = tuple(safe_text(name) for name, count in classes.items() if not count)
    if absent:
        names = list_first(absent, 5)
        yield Finding(
            Reason.CLASS_MISSING,
            f"{len(absent)} of {len(classes)} classes have no training window: {names}",
            level="warning",
            count=len(absent),
            examples=absent[:5],
        )


def _describe_empty_splits(
    empty: list[str], counts: dict[str, SplitCounts], options: WindowOptions
) -> Finding:
    """The warning about splits without windows, with a way out where there are few people."""
    subjects = sum(split.subjects for split in counts.values())
    problem, requirement, hint = f"no windows in {', '.join(empty)}", "", ""
    if options.split == "subject" and subjects < FEW_SUBJECTS:
        requirement = f"{subjects} subjects are too few for each split to have one"
        hint = "Add recordings of other people, or give --split time, which splits each recording"
    code = Reason.SPLIT_EMPTY
    return Finding(code, problem, requirement, hint, level="warning", count=len(empty))


def _find_duplicates(contents: dict[bytes, list[set[str]]]) -> Iterator[Finding]:
    """A warning for recordings with equal content in different splits."""
    count = sum(len(copies) - 1 for copies in contents.values() if len(set.union(*copies)) > 1)
    if count:
        yield Finding(
            Reason.DUPLICATE_ACROSS_SPLITS,
            f"{count:,} recordings repeat one of another split",
            hint="Remove the copies from the source: scores on them are optimistic",
            level="warning",
            count=count,
        )
