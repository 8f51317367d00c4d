"""Understands the annotations of a recording: which are stages or other labels, and whose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress, pairwise
from operator import and_, not_
from typing import NamedTuple

import numpy as np

from bitimely_core.errors import Finding, Reason, input_warning, safe_text
from bitimely_core.formats.stage_texts import (
    LIKELY,
    VOCABULARY,
    StageReading,
    fold_text,
    name_listed_stage,
    read_stages,
    split_mark,
)
from bitimely_core.recordings.label_sources import LabelSource, read_label_file
from bitimely_core.recordings.label_times import RecordingTime
from bitimely_core.recordings.mapping import LabelRules, RecordingInfo
from bitimely_core.recordings.scorers import CONSENSUS, Scoring, choose_scorer, split_scorers
from bitimely_core.types import Annotation

SHORT = 24  # characters of a text that may be shown
REPEATED = 3  # times that such a text occurs
SHOWN = 6  # texts in a message
ONE_BEAT = 0.15  # seconds between two marks of one beat, as in comparisons of detectors
MOSTLY = 0.8  # of the points of a source, from which on they are those of another


class LabelledNotes(NamedTuple):
    """The annotations of one source, understood."""

    stages: Sequence[Annotation] = ()
    marks: Sequence[str] = ()  # scorer or channel that the text of each stage names
    others: Sequence[Annotation] = ()  # kept as they are called
    excluded: Sequence[Annotation] = ()  # texts that are not understood
    ambiguous: Sequence[Annotation] = ()
    unstaged: Sequence[Annotation] = ()  # of others: what a list of stages holds besides


def select_annotations(
    rel: str,
    notes: Sequence[Annotation],
    info: RecordingInfo,
    time: RecordingTime,
    findings: list[Finding],
    channels: Sequence[LabelSource] = (),
) -> list[Annotation]:
    """Annotations of the file, its channels, tables and label files as the map calls them, by time.

    Without a map those of tables are kept, and of the file only sleep stages: other texts can hold
    names. Where points alone are read they have no text. `findings` gets what was not understood.
    Raises UserError for a damaged label file, and label for a scorer that is not there.
    """
    rules = info.label_rules
    inside = LabelSource(rel, list(notes), is_free=True)
    sources = [inside, LabelSource("the tables", list(info.notes)), *channels]
    findings += list(chain.from_iterable(source.findings for source in channels))
    for file in info.label_files:
        source = read_label_file(file, time, rules)
        findings += source.findings
        sources.append(source)
    if info.points:
        points = [note for source in sources for note in source.notes if note.duration == 0]
        return sorted({note._replace(label="") for note in points})
    others: list[Annotation] = []
    excluded: list[Annotation] = []
    ambiguous: list[Annotation] = []
    scorings: list[Scoring] = []
    for source in sources:
        understood = _understand(source, info)
        others += _drop_doubled(understood.others, others, source.name, rel, findings)
        excluded += understood.excluded
        ambiguous += understood.ambiguous
        findings += _report_unstaged(understood.unstaged)
        scorings += split_scorers(source.name, understood.stages, understood.marks)
    stages = choose_scorer(scorings, rules.scorer, findings)
    findings += _report_ambiguous(ambiguous)
    findings += _report_unknown(excluded, stages, info, time.length)
    return sorted([*stages, *others, *info.numbers])


def _drop_doubled(
    notes: Sequence[Annotation],
    before: Sequence[Annotation],
    name: str,
    rel: str,
    findings: list[Finding],
) -> Sequence[Annotation]:
    """The notes without points that mark the same beats as those of the sources before.

    `name`: their source; `rel`: the recording.
    """
    points = np.array([note.onset for note in notes if not note.duration])
    times = np.sort([note.onset for note in before if not note.duration])
    if min(len(points), len(times)) < REPEATED:
        return notes
    places = np.searchsorted(times, points).clip(1, max(1, len(times) - 1))
    nearest = times[[places - 1, places.clip(max=len(times) - 1)]]
    near = float(np.mean(np.abs(nearest - points).min(0) <= ONE_BEAT))
    if near < MOSTLY:
        return notes
    ending = name.rpartition(".")[2]
    is_wfdb = rel.lower().endswith(".hea")
    key = f'annotators = ["{ending}"]' if is_wfdb else f'labels = "{{stem}}.{ending}"'
    problem = (
        f"{near:.0%} of its {len(points)} points are at those of another source of the recording"
    )
    action, hint = "they are not used", f"To use them instead, write {key} in [[files]] of the map"
    finding = input_warning(
        Reason.ANNOTATION_OVERLAP, problem, action, hint, file=name, count=len(points)
    )
    findings.append(finding)
    return [note for note in notes if note.duration]


def _understand(source: LabelSource, info: RecordingInfo) -> LabelledNotes:
    """The annotations of one source by what they are."""
    rules = info.label_rules
    notes = stretch_marks(source.notes, rules)
    words = rules.words
    if words is not None and not rules.extends:
        return _map_texts(notes, words)
    if source.is_free and not info.stages and words is None:
        return LabelledNotes(others=notes) if info.keep_phi else LabelledNotes(excluded=notes)
    reading = _read_stages(notes, source, rules)
    if info.keep_phi or (words is None and not source.is_free):
        return _keep_texts(reading, source, info)
    doubtful, rest = _part(reading.others, _find_ambiguous(reading))
    return LabelledNotes(reading.stages, reading.marks, excluded=rest, ambiguous=doubtful)


def _keep_texts(reading: StageReading, source: LabelSource, info: RecordingInfo) -> LabelledNotes:
    """Stages, and other texts as they are called; sentences of a column of remarks are excluded."""
    # what the folder's label files say of a 4 is said once for all
    are_stages = source.is_listed or bool(reading.stages)
    doubtful = compress(reading.others, _find_ambiguous(reading))
    named = [note for note in doubtful if are_stages and split_mark(note.label)[0] != "4"]
    counts = Counter(note.label for note in reading.others)
    is_whole = info.keep_phi or not source.is_prose
    is_code = [is_whole or _may_show(note.label, counts[note.label]) for note in reading.others]
    others, prose = _part(reading.others, is_code)
    unstaged = others if source.is_listed else ()
    return LabelledNotes(reading.stages, reading.marks, others, prose, named, unstaged)


def _read_stages(
    notes: Sequence[Annotation], source: LabelSource, rules: LabelRules
) -> StageReading:
    """The notes by the words of the map, else of the source, and those that are known."""
    scorers = () if rules.scorer in {"", CONSENSUS} else (rules.scorer,)
    texts = {**source.words, **(rules.words or {})}
    return read_stages(notes, texts, listed=source.is_listed, scorers=scorers)


def _map_texts(notes: Sequence[Annotation], words: Mapping[str, str]) -> LabelledNotes:
    """The notes whose texts the map names, called as it says; others are excluded."""
    named, excluded = _part(notes, [note.label in words for note in notes])
    mapped = [note._replace(label=words[note.label]) for note in named]
    return LabelledNotes(others=mapped, excluded=excluded)


def _find_ambiguous(reading: StageReading) -> list[bool]:
    """Whether each of the texts that are not read is a stage in some systems alone."""
    return [fold_text(note.label) in reading.ambiguous for note in reading.others]


def _part(
    notes: Sequence[Annotation], is_chosen: Sequence[bool]
) -> tuple[list[Annotation], list[Annotation]]:
    """The notes that are chosen, and the others."""
    return list(compress(notes, is_chosen)), list(compress(notes, map(not_, is_chosen)))


def stretch_marks(notes: Sequence[Annotation], rules: LabelRules) -> list[Annotation]:
    """Marks without a duration as the stretches that `[labels] reaches` says they stand for.

    The first one that stands for what is before it, and the last one that stands for what is after
    it, last as long as most others. Of a number of seconds each label lasts at least as long: that
    of a cue is often the time for which it is shown.
    """
    if not rules.reaches:
        return list(notes)
    is_named = [rules.words is None or note.label in rules.words for note in notes]
    if not isinstance(rules.reaches, str):
        named, rest = _part(notes, is_named)
        least = float(rules.reaches)
        return [*rest, *(note._replace(duration=max(note.duration, least)) for note in named)]
    is_point = [not note.duration for note in notes]
    marks, rest = _part(notes, list(map(and_, is_named, is_point)))
    marks.sort()
    spans = _find_spans(sorted({mark.onset for mark in marks}), to_next=rules.reaches == "next")
    for mark in marks:
        begin, end = spans[mark.onset]
        rest.append(mark._replace(onset=begin, duration=end - begin))
    return rest


def _find_spans(onsets: Sequence[float], *, to_next: bool) -> dict[float, tuple[float, float]]:
    """Onset -> begin and end of its stretch: to the next onset, or from the previous one.

    Those at the edges last as long as most others.
    """
    steps = Counter(round(b - a, 6) for a, b in pairwise(onsets))
    usual = steps.most_common(1)[0][0] if steps else 0.0
    edges = [*(o - usual for o in onsets[:1]), *onsets, *(o + usual for o in onsets[-1:])]
    stretches = list(pairwise(edges))  # from before the first onset to behind the last one
    return dict(zip(onsets, stretches[1:] if to_next else stretches, strict=False))


# --- what is said


def _count_texts(notes: Iterable[Annotation]) -> dict[str, tuple[int, float]]:
    """Text -> how often it occurs, and seconds; the one with most seconds first."""
    counts: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for note in notes:
        counts[note.label] += 1
        seconds[note.label] += note.duration  # type: ignore[assignment]
    order = sorted(counts, key=lambda text: (-seconds[text], -counts[text], text))
    return {text: (counts[text], float(seconds[text])) for text in order}


def _describe_texts(texts: Mapping[str, tuple[int, float]], named: Sequence[str]) -> str:
    """The first of the texts that may be shown, and how many there are besides."""
    parts = [
        f"{safe_text(text)} ({texts[text][0]} times, {texts[text][1]:g} s)"
        for text in named[:SHOWN]
    ]
    if rest := len(texts) - len(parts):
        parts.append(f"{rest} further text{'s' * (rest > 1)}")
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _may_show(text: str, count: int) -> bool:
    """Whether a text is a code of a vocabulary rather than a sentence, which can hold names."""
    words = fold_text(text).split()
    is_vocabulary = bool(words) and all(w in VOCABULARY or w.isdigit() for w in words)
    return len(text) <= SHORT and (count >= REPEATED or is_vocabulary)


def _report_ambiguous(notes: Sequence[Annotation]) -> list[Finding]:
    """The warning about texts that are stages in some systems alone, with the lines to write."""
    if not notes:
        return []
    texts = list(_count_texts(notes))
    named = ", ".join(map(repr, sorted(set(map(fold_text, texts)))))
    lines = ", ".join(f'{_quote(t)} = "{_propose_stage(t)}"' for t in texts[:SHOWN])
    seconds = sum(note.duration for note in notes)
    return [
        input_warning(
            Reason.UNKNOWN_LABEL,
            f"annotations {named} are sleep stages in some systems alone",
            f"they are not read: {len(notes)}, of {seconds:g} s",
            f"State their stages in [labels] of the map, such as {lines}",
            count=len(notes),
        )
    ]


def _report_unstaged(notes: Sequence[Annotation]) -> list[Finding]:
    """The warning about the few texts of a list of stages that are no stages."""
    texts = _count_texts(notes)
    if not texts:
        return []
    named = [text for text in texts if len(text) <= SHORT]
    problem = f"a list of stages holds other texts: {_describe_texts(texts, named)}"
    hint = _suggest_label(named, has_stages=True)
    return [input_warning(Reason.UNKNOWN_LABEL, problem, "they are no stages", hint)]


def _propose_stage(text: str) -> str:
    """The stage that an ambiguous text mostly is."""
    return name_listed_stage(text) or LIKELY.get(fold_text(text), "N2")


def _quote(text: str) -> str:
    return f'"{safe_text(text)[1:-1]}"'


def _report_unknown(
    excluded: Sequence[Annotation], stages: Sequence[Annotation], info: RecordingInfo, length: float
) -> list[Finding]:
    """What is said of annotations that are not kept: a warning where they may be labels."""
    if not excluded:
        return []
    texts = _count_texts(n._replace(duration=min(n.duration, length)) for n in excluded)
    named = [t for t, (count, _) in texts.items() if info.keep_phi or _may_show(t, count)]
    listing = _describe_texts(texts, named)
    may_be_labels = any(seconds or count >= REPEATED for count, seconds in texts.values())
    is_mapped = info.label_rules.words is not None
    what = "no labels of the map" if is_mapped else "no known label"
    return [
        input_warning(
            Reason.UNKNOWN_LABEL,
            f"annotations whose texts are {what}: {len(excluded)}, {listing}",
            f"counted, not kept: texts can hold names{_describe_gap(stages, length)}",
            _suggest_label(named, has_stages=bool(stages)),
            level="warning" if may_be_labels else "info",
            field="labels" if is_mapped else None,
            count=len(excluded),
        )
    ]


def _describe_gap(stages: Sequence[Annotation], length: float) -> str:
    """How much of a recording of `length` seconds has no stage; "" where none has one."""
    if not stages:
        return ""
    scored = sum(note.duration for note in stages)
    return f"; {max(0.0, 100 - 100 * scored / length):.0f} % of the time has no stage"


def _suggest_label(named: Sequence[str], *, has_stages: bool) -> str:
    """What to do about texts that are not understood; `named`: those that may be shown."""
    if not named:
        return "--init-map FILE lists them: name what they are in [labels] there"
    label = '"N2"' if has_stages else _quote(named[0])
    return f"Name what they are in [labels] of a map, such as {_quote(named[0])} = {label}"


def clip_annotations(
    notes: Iterable[Annotation], end: float, findings: list[Finding]
) -> list[Annotation]:
    """The parts of annotations between 0 and `end` seconds."""
    clipped: list[Annotation] = []
    cut = 0
    for note in notes:
        stop = note.onset + note.duration
        cut += note.onset < 0 or note.onset > end or end + 1e-6 < stop < float("inf")
        begin, stop = max(note.onset, 0.0), min(stop, end)
        if begin < end and stop >= begin:
            clipped.append(note._replace(onset=begin, duration=stop - begin))
    if cut and not any(f.code == Reason.ANNOTATION_OUT_OF_RANGE for f in findings):
        problem = f"annotations that reach beyond the signal: {cut}"
        findings.append(
            input_warning(
                Reason.ANNOTATION_OUT_OF_RANGE, problem, "that part is dropped", count=cut
            )
        )
    return clipped
