"""Chooses channels, rate and window for views that leave them open, by what most recordings have.

Views of a user's own recordings leave them open.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bitimely_core import registry
from bitimely_core.cache import Cache, open_cache
from bitimely_core.errors import Finding, Reason, UserError, input_error, input_warning, safe_text
from bitimely_core.formats.text import list_names
from bitimely_core.recordings.channels import fold_name, has_electrode, is_no_signal
from bitimely_core.registry import View
from bitimely_core.schemas.tokens import WindowOptions
from bitimely_core.tokens.epochs import choose_scored
from bitimely_core.types import drop_empty, group_by
from bitimely_core.wording import list_first

NAMES = 12  # channels in a line
LONGEST_LINE = 600  # characters of a line of a map in an advice
MOST_CODES = 20  # whole numbers that can be those of classes
UNLABELLED_HISTORIES = "Tokenize with a --cohort, or ingest with --rules or --label-column"
LABELS_NEEDED = "Give labels at ingest (--map)"
LONG = 0.99  # of a recording: an annotation of this share of it states no length of windows


class StoredSignal(NamedTuple):
    """A channel of a recording, or of one segment of it, without its samples."""

    channel: str
    rate: float  # Hz
    samples: int


Recordings = dict[str, list[StoredSignal]]  # id -> its channels


def complete_view(cache: Cache, view: View) -> View:
    """The view with channels, their rate in Hz and the samples of a window; what it states stays.

    They are those of recordings with a label, where the view has labels: `choose_channels`, the
    rate of most recordings that have these (`choose_rate`), and the commonest length of an
    annotation (`choose_epoch`), else `view.seconds`. Where the first recording is shorter, its
    length is the window.

    Raises UserError: unmatched_labels (exit 4) where no recording has an annotation, or none with a
    duration.
    """
    recordings = _list_signals(cache, _list_labelled(cache, view))
    channels = view.channels or choose_channels(_list_inputs(recordings))
    recordings = _select_channels(recordings, channels)
    rate = view.rate
    if rate <= 0:
        rate = choose_rate(
            max((signal.rate for signal in signals), default=1.0) for signals in recordings.values()
        )
    window = view.window if view.window > 0 else _choose_window(cache, view, recordings, rate)
    return replace(view, channels=channels, rate=rate, window=window)


def _list_inputs(recordings: Recordings) -> dict[str, list[str]]:
    """Id -> names of channels that can be inputs of a model; all of a recording without such."""
    names = {
        recording: list(dict.fromkeys(signal.channel for signal in signals))
        for recording, signals in recordings.items()
    }
    inputs = {
        recording: list(itertools.filterfalse(is_no_signal, channels))
        for recording, channels in names.items()
    }
    return inputs if any(inputs.values()) else names


def report_channels(cache: Cache, options: WindowOptions) -> list[Finding]:
    """What a view that leaves the channels open takes and what it leaves out, in one line.

    It is a warning where channels are left out, and names those that may be one signal in several
    spellings. None where the caller chose the channels.
    """
    view = registry.datasets[options.dataset].facts.views[options.view]
    if view.channels:
        return []
    recordings = _list_signals(cache, _list_labelled(cache, view))
    inputs = _list_inputs(recordings)
    if set(choose_channels(inputs)) != set(options.channels):
        return []
    names = [{signal.channel for signal in signals} for signals in recordings.values()]
    counts = Counter(itertools.chain.from_iterable(names))
    complete = sum(map(set(options.channels).issubset, names))
    others = [name for name, _ in counts.most_common() if name not in options.channels]
    listed = [f"{safe_text(name)} in {counts[name]}" for name in others]
    taken = list_names(options.channels, NAMES)
    line = f"channels {taken}, which {complete} of {len(names)} recordings have"
    if not others:
        return [input_warning(Reason.LEFT_OUT, line, field="channels", level="info")]
    return [
        input_warning(
            Reason.LEFT_OUT,
            line,
            f"left out are {list_first(listed, NAMES)}",
            _advise_alternatives(inputs, options.channels) or "Give --channels to take others",
            field="channels",
            count=len(others),
        )
    ]


def _advise_alternatives(inputs: Mapping[str, list[str]], channels: Sequence[str]) -> str:
    """The line of a map that makes one channel of several spellings; "" where there are none."""
    groups = find_alternatives(inputs)
    if not groups:
        return ""
    several = [f"{list_names(names)} are" for names in groups.values()]
    grouped = set().union(*groups.values())
    others = {name: name for name in channels if name not in grouped}
    entries = [
        f"{_quote(name)} = [{', '.join(map(_quote, names))}]" for name, names in groups.items()
    ]
    entries += [f"{_quote(name)} = {_quote(name)}" for name in others]
    line = f"files = [{{channels = {{{', '.join(entries)}}}}}]"
    if len(line) > LONGEST_LINE:
        line = f"channels = {{{entries[0]}, ...}} in [[files]], with every channel that is to stay"
    return (
        f"If {' and '.join(several)} one signal, write in the map: {line} and ingest again with "
        "--map FILE --force-new"
    )


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def find_alternatives(inputs: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Name for the cache -> channels that may be one signal: no recording has two of them, and
    their names are spellings of one, or begin with the same word.
    """
    channels = list(map(set, inputs.values()))
    counts = Counter(itertools.chain.from_iterable(channels))
    partial = [name for name, count in counts.items() if count < len(channels)]
    groups: dict[str, list[str]] = {}
    for key in (_find_word, fold_name):
        grouped = set().union(*groups.values())
        for names in _group_names([name for name in partial if name not in grouped], key):
            if len(names) > 1 and all(len(present.intersection(names)) < 2 for present in channels):
                groups[_name_group(names, {*counts, *groups})] = names
    return groups


def _group_names(names: Iterable[str], key: Callable[[str], str]) -> list[list[str]]:
    """The names in groups of one key."""
    return list(group_by(names, key).values())


def _find_word(name: str) -> str:
    """The word that a name begins with; the name itself where it names an electrode."""
    match = re.match("[a-z]{3,}", name.casefold().replace("ekg", "ecg"))
    return match[0] if match and not has_electrode(name) else name


def _name_group(names: Sequence[str], used: Collection[str]) -> str:
    """The word that all names begin with, unless a channel is called so; else the first name."""
    text = re.split("[^A-Za-z]", names[0], maxsplit=1)[0]
    same = all(name.casefold().startswith(text.casefold()) for name in names)
    if len(text) > 2 and same and text not in used:
        return text
    return names[0]


def _list_signals(cache: Cache, names: set[str]) -> Recordings:
    """The channels of these recordings, in the order of the cache."""
    signals: Recordings = {name: [] for name in cache.recording_ids() if name in names}
    columns = cache.signals().select("recording_id", "channel", "rate", "n_samples")
    for recording, *values in columns.iter_rows():
        if recording in signals:
            signals[recording].append(StoredSignal(*values))
    return drop_empty(signals)


def _select_channels(recordings: Recordings, channels: tuple[str, ...]) -> Recordings:
    """These channels alone, of the recordings that have them all; of all if none has."""
    selected = {
        name: [signal for signal in signals if signal.channel in channels]
        for name, signals in recordings.items()
    }
    complete = {
        name: signals
        for name, signals in selected.items()
        if {signal.channel for signal in signals} == set(channels)
    }
    return complete or selected


def _choose_window(cache: Cache, view: View, recordings: Recordings, rate: float) -> int:
    """Samples of a window at `rate` Hz, at most those of the longest stretches of the first
    recording that is no faster.
    """
    stored = list(recordings.values())
    slow = [signals for signals in stored if all(signal.rate <= rate for signal in signals)]
    first = next(iter([*slow, *stored]), [])
    longest: dict[str, int] = {}
    for signal in first:
        samples = math.floor(signal.samples * rate / signal.rate + 1e-6)
        longest[signal.channel] = max(samples, longest.get(signal.channel, 0))
    shortest = min(longest.values(), default=1)
    seconds = view.epoch or view.seconds
    if view.epoch == 0 and not view.points:
        seconds = choose_epoch(_list_durations(cache, recordings)) or view.seconds
    window = round(seconds * rate)
    return window if 0 < window <= shortest else shortest


def _list_durations(cache: Cache, recordings: Recordings) -> list[float]:
    """Seconds of each annotation that lasts, but not nearly as long as its recording."""
    lengths = {
        name: max((signal.samples / signal.rate for signal in signals), default=0.0)
        for name, signals in recordings.items()
    }
    notes = cache.annotations().select("recording_id", "duration").iter_rows()
    return [seconds for name, seconds in notes if 0 < seconds < LONG * lengths.get(name, 0.0)]


def _list_labelled(cache: Cache, view: View) -> set[str]:
    """Recordings that can have a window of the view."""
    if view.target is not None:
        subjects = cache.subjects()
        if view.target in subjects.columns:
            labelled = subjects.filter(subjects[view.target].is_not_null())
            subjects = labelled if labelled.height else subjects
        return set(subjects["recording_id"])
    if view.epoch is None:
        return set(cache.recording_ids())
    notes = cache.annotations()
    if not notes.height:
        hint = _advise_view(cache)
        raise _label_error(cache, "no recording has an annotation", hint)
    points = notes["duration"] <= 0
    recordings = set(notes.filter(points if view.points else ~points)["recording_id"])
    if not recordings:
        problem, other = (
            ("no annotation is a point in time", "annotations")
            if view.points
            else ("no annotation has a duration", "points")
        )
        raise _label_error(cache, problem, f"Take the view {cache.dataset}/{other}")
    return recordings


def suggest_view(cache: Cache) -> str:
    """The view of a cache that reads the labels it has, "" for that without labels.

    Of a published data set the first view with labels.
    """
    views = registry.datasets[cache.dataset].facts.views
    if not _are_open(views):
        return next((name for name, view in views.items() if view.task != "none"), "")
    notes = cache.annotations()
    lasting = notes.filter(notes["duration"] > 0)["label"]
    texts = set(lasting)
    columns = cache.subjects().columns
    for name, view in views.items():
        if view.target in columns or (view.labels and texts & view.labels.keys()):
            return name
    if not notes.height:
        return ""
    if not texts:
        return "points"
    return "values" if _are_measured(texts) else "annotations"


def _are_open(views: Mapping[str, View]) -> bool:
    """Whether they are those of a user's own recordings, whose labels may be of any kind."""
    return {"", "annotations", "points"} <= views.keys()


def _advise_view(cache: Cache) -> str:
    """The advice to take the view whose labels the cache has; else to give it labels."""
    view = suggest_view(cache)
    return f"Take the view {cache.dataset}/{view}" if view else LABELS_NEEDED


def advise_labels(dataset: str, folder: Path) -> str:
    """The advice for tokens without labels: a view of the data set that has some, where `folder`
    holds the cache one that it has.
    """
    entry = registry.datasets.get(dataset)
    views = entry.facts.views if entry else {}
    names = [f"{dataset}/{name}" for name, view in views.items() if view.task != "none"]
    if not names:
        return UNLABELLED_HISTORIES
    if _are_open(views) and (folder / "manifest.json").is_file():
        return _advise_view(open_cache(folder, verify=False))
    return f"Take a view with labels: {', '.join(names)}"


def _are_measured(texts: set[str]) -> bool:
    """Whether annotations are numbers over time; a few whole ones are numbers of classes."""
    import polars as pl

    numbers = pl.Series(sorted(texts), dtype=pl.String).cast(pl.Float64, strict=False)
    are_codes = len(numbers) <= MOST_CODES and bool((numbers % 1 == 0).all())
    return numbers.null_count() == 0 and not are_codes


def _label_error(cache: Cache, problem: str, hint: str) -> UserError:
    return input_error(Reason.UNMATCHED_LABELS, problem, hint=hint, file=str(cache.folder))


def choose_channels(recordings: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """The channels that the largest number of recordings have together.

    Of two such sets it is the larger, then that of the earlier recording. They are in the order of
    the first recording that has them. `recordings`: id -> channels.
    """
    counts = Counter(itertools.chain.from_iterable(recordings.values()))
    most = max(counts.values(), default=0)
    best: tuple[str, ...] = ()
    for channel, count in counts.items():
        if count < most or channel in best:
            continue
        first, *others = (
            tuple(channels) for channels in recordings.values() if channel in channels
        )
        common = set(first).intersection(*others)
        if len(common) > len(best):
            best = tuple(name for name in first if name in common)
    return best


def choose_rate(rates: Iterable[float]) -> float:
    """The rate of most recordings, in Hz, of two the higher; 1 where there is none."""
    counts = Counter(rates)
    return max(counts, key=lambda rate: (counts[rate], rate), default=1.0)


def choose_epoch(durations: list[float]) -> float:
    """The commonest duration in seconds, of two the longer.

    0 where no more than half of them are multiples of it, as of rhythms.
    """
    best = choose_scored(Counter(durations))
    multiples = sum(
        seconds >= best and abs(seconds / best - round(seconds / best)) < 1e-3
        for seconds in durations
    )
    return best if 2 * multiples > len(durations) else 0.0
