"""Chooses between several scorers of one recording: two in one file, or several label files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np

from bitimely_core.errors import Finding, Reason, input_error, input_warning, safe_text
from bitimely_core.formats.stage_texts import EPOCH
from bitimely_core.types import Annotation

CONSENSUS = "consensus"
TOLERANCE = 0.01  # of a stage, by which it may reach into the next one


class Scoring(NamedTuple):
    """The stages of a recording by one scorer."""

    file: str  # that holds them
    scorer: str  # by the texts or by the order in the file, "" where there is one alone
    stages: list[Annotation]  # in order of time

    @property
    def name(self) -> str:
        """What a message calls it."""
        return self.scorer or self.file

    def is_called(self, name: str) -> bool:
        """Whether `[labels] scorer` names this one: the scorer, or a part of the file's path."""
        wanted = name.strip().casefold()
        path = PurePosixPath(self.file.casefold())
        parts = {*path.parts, path.stem, *path.stem.replace("-", "_").replace(" ", "_").split("_")}
        return wanted in {self.scorer.casefold(), self.scorer.casefold().split(" ")[-1], *parts}


class Agreement(NamedTuple):
    """How far two scorers agree."""

    epochs: int  # that both have scored
    differing: int
    kappa: float  # Cohen's: 1 where they agree in all, 0 where no more than by chance


def split_scorers(file: str, stages: Sequence[Annotation], marks: Sequence[str]) -> list[Scoring]:
    """The stages of a file by scorer: by the marks of their texts, else by the order at one time.

    Stages that do not overlap are of one scorer.
    """
    if not stages:
        return []
    order = sorted(range(len(stages)), key=lambda i: stages[i].onset)
    ordered = [stages[i] for i in order]
    if not _overlap(ordered):
        return [Scoring(file, "", ordered)]
    names = [marks[i] for i in order]
    if len(set(names)) == 1:
        names = _number_places(ordered)
    by_name: dict[str, list[Annotation]] = {}
    for name, note in zip(names, ordered, strict=True):
        by_name.setdefault(name, []).append(note)
    return [Scoring(file, name or "no name", notes) for name, notes in by_name.items()]


def _number_places(ordered: Sequence[Annotation]) -> list[str]:
    """Which label of its time each one is, from 1; all "1" where most times have only one."""
    times = Counter(round(note.onset, 3) for note in ordered)
    if 2 * sum(count for count in times.values() if count > 1) < len(ordered):
        return ["1"] * len(ordered)
    places: Counter[float] = Counter()
    numbers: list[str] = []
    for note in ordered:
        places[round(note.onset, 3)] += 1
        numbers.append(str(places[round(note.onset, 3)]))
    return numbers


def _overlap(stages: Sequence[Annotation]) -> bool:
    end = -np.inf
    for note in stages:
        if note.onset < end - max(TOLERANCE * note.duration, 1e-3):
            return True
        end = max(end, note.onset + note.duration)
    return False


def choose_scorer(
    scorings: Sequence[Scoring], wanted: str, findings: list[Finding]
) -> list[Annotation]:
    """The stages of one scorer, or those in which all agree; what they differ in is said.

    Args:
        scorings: by the order in which they are taken without a choice.
        wanted: `[labels] scorer`: a name, "consensus", or "" for the first.
        findings: gets what is said.

    Raises:
        UserError: label, where nobody is called so.
    """
    if len(scorings) < 2:
        return list(scorings[0].stages) if scorings else []
    epoch = _find_epoch(scorings)
    first, *others = scorings
    compared = [_compare(first, other, epoch) for other in others]
    if not any(agreement.epochs for agreement in compared):  # each has scored another time
        return sorted(chain.from_iterable(scoring.stages for scoring in scorings))
    if not any(agreement.differing for agreement in compared):
        return _merge(scorings, findings)
    if wanted == CONSENSUS:
        return _find_consensus(first, others, epoch)
    if wanted:
        return list(_find_scorer(scorings, wanted).stages)
    worst = max(compared, key=lambda agreement: agreement.differing)
    findings.append(_report_scorers(scorings, worst, epoch))
    return list(first.stages)


def _find_scorer(scorings: Sequence[Scoring], wanted: str) -> Scoring:
    """The scorer that is called so. Raises UserError: label."""
    for scoring in scorings:
        if scoring.is_called(wanted):
            return scoring
    names = ", ".join(safe_text(scoring.name) for scoring in scorings)
    problem = f"has no scorer called {safe_text(wanted)}"
    raise input_error(Reason.LABEL, problem, f"found {names}", field="labels.scorer")


def _report_scorers(scorings: Sequence[Scoring], worst: Agreement, epoch: float) -> Finding:
    """The warning that several scorers differ, of whom the first is used."""
    first, second, *_ = scorings
    names = ", ".join(safe_text(scoring.name) for scoring in scorings)
    return input_warning(
        Reason.ANNOTATION_OVERLAP,
        f"{len(scorings)} scorers: {names}; they differ in {worst.differing} of {worst.epochs} "
        f"epochs of {epoch:g} s (Cohen's kappa {worst.kappa:.2f})",
        f"those of {safe_text(first.name)} are used",
        f'Write scorer = "{_suggest(second)}", "{_suggest(first)}" or "{CONSENSUS}" '
        "(the epochs in which they agree) in [labels] of the map",
        count=worst.differing,
    )


def _suggest(scoring: Scoring) -> str:
    """A name that `[labels] scorer` may have, safe to print."""
    return safe_text(scoring.scorer or PurePosixPath(scoring.file).name)[1:-1]


def _find_epoch(scorings: Sequence[Scoring]) -> float:
    """The commonest duration of a stage, at most 30 s."""
    lengths = Counter(round(note.duration, 3) for same in scorings for note in same.stages)
    length = lengths.most_common(1)[0][0]
    return min(length, EPOCH) if length > 0 else EPOCH


def _label_times(scoring: Scoring, times: np.ndarray) -> np.ndarray:
    """The stage of a scorer at each time, "" where there is none."""
    onsets = np.array([note.onset for note in scoring.stages])
    ends = onsets + np.array([note.duration for note in scoring.stages])
    labels = np.array([note.label for note in scoring.stages])
    place = np.searchsorted(onsets, times, side="right") - 1
    inside = (place >= 0) & (times < ends[place])
    return np.where(inside, labels[place], "")


def _list_middles(scoring: Scoring, epoch: float) -> np.ndarray:
    """The middle of each epoch that a scorer has scored, in seconds."""
    middles = [
        note.onset + (np.arange(max(round(note.duration / epoch), 1)) + 0.5) * epoch
        for note in scoring.stages
    ]
    return np.concatenate(middles)


def _compare(first: Scoring, other: Scoring, epoch: float) -> Agreement:
    """How far two scorers agree in the epochs that both have scored.

    kappa = (p - c) / (1 - c), with p the share in which they agree and c that by chance.
    """
    times = _list_middles(first, epoch)
    a, b = _label_times(first, times), _label_times(other, times)
    both = (a != "") & (b != "")
    a, b = a[both], b[both]
    if not len(a):
        return Agreement(0, 0, 1.0)
    agreed = float(np.mean(a == b))
    chance = sum(float(np.mean(a == c) * np.mean(b == c)) for c in set(a.tolist()))
    kappa = 1.0 if chance == 1 else (agreed - chance) / (1 - chance)
    return Agreement(len(a), int((a != b).sum()), kappa)


def _merge(scorings: Sequence[Scoring], findings: list[Finding]) -> list[Annotation]:
    """Scorings that agree as one: the first, and what others have scored besides."""
    merged = list(scorings[0].stages)
    doubled = 0
    for other in scorings[1:]:
        middles = np.array([note.onset + note.duration / 2 for note in other.stages])
        covered = _label_times(Scoring("", "", sorted(merged)), middles) != ""
        merged += [
            note for note, is_there in zip(other.stages, covered, strict=True) if not is_there
        ]
        doubled += int(covered.sum())
    problem = f"stages that are there twice and are equal: {doubled}"
    findings.append(Finding(Reason.DUPLICATES, problem, "used once", level="info", count=doubled))
    return sorted(merged)


def _find_consensus(first: Scoring, others: Sequence[Scoring], epoch: float) -> list[Annotation]:
    """The epochs in which all scorers agree."""
    agreed: list[Annotation] = []
    for note in first.stages:
        count = max(round(note.duration / epoch), 1)
        length = note.duration / count
        times = note.onset + (np.arange(count) + 0.5) * length
        same = np.all([_label_times(other, times) == note.label for other in others], axis=0)
        agreed += [
            Annotation(note.onset + i * length, length, note.label)
            for i in np.flatnonzero(same).tolist()
        ]
    return agreed
