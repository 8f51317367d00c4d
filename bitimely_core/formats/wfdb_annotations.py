"""Reads the annotation files of WFDB records (`.atr` and the like): beats, rhythms and notes.

The package `wfdb` decodes them; times are in seconds. A beat is an annotation without a duration,
called by its symbol (`N`, `V`, `/`); a rhythm lasts until the next one, the last one to the end of
the record, and is called by its text without the bracket (`(AFIB` is `AFIB`); a note lasts until the next note.
"""

import math
import re
import warnings
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

import numpy as np

from bitimely_core.errors import Reason, input_error
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import Annotation

AnnotationKind = Literal["beats", "rhythms", "both", "notes"]
BEATS = frozenset("NLRBAaJSVrFejnE/fQ?")
COMMENT = '"'  # symbol of an annotation that is a text
BRACKETS = "[]"  # symbols of the beginning and the end of a stretch
WRITTEN = "bta"  # ending of the annotations that are written
RHYTHM = re.compile(r"\([A-Z][A-Z0-9]{0,4}")  # a code: other texts can hold names

NOTE = 22  # the code of a text
SLOWEST = 5.0  # seconds from mark to mark, above which marks in equal steps are no beats
# texts of sleep stages, before those of events, as in the MIT-BIH Polysomnographic Database
STAGES = {
    stage: f"Sleep stage {stage}"
    for stage in ("W", "1", "2", "3", "4", "R", "MT", "M", "N1", "N2", "N3")
}


class WfdbAnnotations(NamedTuple):
    """The annotations of a file. Times are seconds from the beginning of the record."""

    beats: list[Annotation]
    rhythms: list[Annotation]
    notes: list[Annotation]  # free texts
    others: int  # of other kinds: noise, waves, pauses
    # seconds between marks that all follow each other in equal steps, and last until the next one
    step: float = 0.0
    are_stages: bool = False  # the beats

    def list_codes(self, kind: AnnotationKind) -> list[Annotation]:
        """Those of `kind` whose texts are codes, in order of time."""
        beats = self.beats if kind in {"beats", "both"} or self.are_stages else []
        rhythms = self.rhythms if kind in {"rhythms", "both"} else []
        return sorted([*beats, *rhythms])


def read_annotations(path: Path, frame_rate: float) -> WfdbAnnotations:
    """The annotations in `path`, called as above. Arguments and errors are those of `read_rows`."""
    hint = "Download it again, or leave its ending out of `annotators` in [[files]] of the map"
    beats: list[Annotation] = []
    rhythms: list[tuple[float, str]] = []
    notes: list[tuple[float, str]] = []
    marks: list[tuple[float, str]] = []
    others = 0
    for time, symbol, text in read_rows(path, frame_rate, hint):
        if symbol in BEATS:
            beats.append(Annotation(time, 0.0, symbol))
            continue
        others += not text
        if symbol == "+":
            rhythms.append((time, text[1:] if RHYTHM.fullmatch(text) else ""))
        elif text:
            notes.append((time, text))
        else:
            marks.append((time, symbol))
    spans = _list_spans(marks, len(beats) + len(rhythms))
    others -= 2 * len(spans)
    events, rest = _pair_brackets(notes)
    stages = [] if beats or rhythms else _list_stages(rest)
    if stages:
        beats, notes, spans = stages, [], [*spans, *events]
    step = _measure_step(beats)
    if step:
        beats = [note._replace(duration=step) for note in beats]
    stretches = [*_extend_to_next(rhythms), *spans]
    free = _extend_to_next(notes)
    return WfdbAnnotations(beats, stretches, free, others, step, bool(stages))


def _list_spans(marks: Sequence[tuple[float, str]], others: int) -> list[Annotation]:
    """The stretches between marks of a beginning and an end, as of the seizures of CHB-MIT; none
    beside beats and rhythms, of which there are `others`.
    """
    if others:
        return []
    return [
        Annotation(start, stop - start, BRACKETS)
        for (start, first), (stop, last) in pairwise(marks)
        if first + last == BRACKETS
    ]


def _pair_brackets(
    notes: Sequence[tuple[float, str]],
) -> tuple[list[Annotation], list[tuple[float, str]]]:
    """The stretches between notes such as `(arousal` and `arousal)`, and the other notes."""
    events: list[Annotation] = []
    rest: list[tuple[float, str]] = []
    begun: dict[str, float] = {}
    for time, text in notes:
        if text.startswith("("):
            begun[text[1:]] = time
        elif text.removesuffix(")") in begun:
            name = text.removesuffix(")")
            events.append(Annotation(begun[name], time - begun.pop(name), name))
        else:
            rest.append((time, text))
    return events, rest


def _list_stages(notes: Sequence[tuple[float, str]]) -> list[Annotation]:
    """The sleep stages of notes that all state one, and follow each other in equal steps, or each
    at the end of the one before it.
    """
    stages = [Annotation(time, 0.0, STAGES.get(text.split()[0], "")) for time, text in notes]
    texts = {stage.label for stage in stages}
    if "" in texts:
        return []
    step = _measure_step(stages)
    # those of AASM are noted where they change
    if "Sleep stage N2" in texts and not step:
        return _extend_to_next([(stage.onset, stage.label) for stage in stages])
    return stages if step else []


def _measure_step(marks: Sequence[Annotation]) -> float:
    """Seconds between marks in equal steps, which score stretches of time; 0 for others.

    Hearts do not beat so slowly and evenly.
    """
    steps = {round(b.onset - a.onset, 3) for a, b in pairwise(marks)}
    step = min(steps, default=0.0)
    return step if len(steps) == 1 and step >= SLOWEST else 0.0


def _parse_file(path: Path, frame_rate: float) -> tuple[float, list[tuple[float, str, str]]]:
    """Hz, and the rows of `read_rows`. Raises whatever the parser raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports, too
        import wfdb

        content = wfdb.rdann(str(path.with_suffix("")), path.suffix[1:])
    rate = float(content.fs or frame_rate)
    times = [float(sample) / (rate or math.nan) for sample in content.sample]
    texts = [text.strip("\0 \t\r\n") for text in content.aux_note]
    rows = sorted(zip(times, content.symbol, texts, strict=True), key=itemgetter(0))
    return rate, [*((0.0, '"', text) for text in _list_first_notes(path)), *rows]


def read_rows(
    path: Path, frame_rate: float, hint: str = "Download it again"
) -> list[tuple[float, str, str]]:
    """Seconds, symbol and text of each annotation in `path`, in order of time.

    Args:
        path: the file.
        frame_rate: Hz, frames of the record a second, where the file states no resolution.
        hint: what to do with a damaged file.

    Raises:
        UserError: annotation_syntax for a file that is none of annotations.
    """
    refuse = partial(input_error, Reason.ANNOTATION_SYNTAX, hint=hint)
    data = path.read_bytes()
    if len(data) % 2 or data[-2:] != b"\0\0":
        raise refuse("does not end as annotations do", "expected two zero bytes")
    try:
        rate, rows = _parse_file(path, frame_rate)
    except Exception as error:  # its parser fails in many ways on bytes that are no annotations
        raise_system_error(error, path, stored=False)
        raise refuse(f"does not read as annotations ({type(error).__name__})") from None
    if not 0 < rate < math.inf:
        problem, wanted = "states no sampling frequency", "expected the header of its record"
        raise refuse(problem, wanted, hint="Put the .hea file of the record beside it")
    if any(time < 0 for time, *_ in rows):
        problem = "has annotations before the beginning of the record"
        raise refuse(problem, hint="Download it again")
    return rows


def encode_annotations(
    record: str, times: Sequence[float], classes: Sequence[str], rate: float
) -> bytes:
    """Content of an annotation file of a WFDB record.

    Args:
        record: name of the record.
        times: seconds, in order.
        classes: one a time. A symbol of WFDB is stored as such, another text as a comment.
        rate: Hz, of the record.
    """
    samples = np.rint(np.asarray(times) * rate).astype(np.int64)
    name = re.sub(r"[^A-Za-z0-9_-]", "-", record)
    with warnings.catch_warnings(), TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        import wfdb

        symbols = set(wfdb.io.annotation.ann_label_table["symbol"]) - {COMMENT, " "}
        wfdb.wrann(
            name,
            WRITTEN,
            samples,
            symbol=[text if text in symbols else COMMENT for text in classes],
            aux_note=["" if text in symbols else text for text in classes],
            fs=rate,
            write_dir=folder,
        )
        return (Path(folder) / f"{name}.{WRITTEN}").read_bytes()


def _list_first_notes(path: Path) -> list[str]:
    """The notes at sample 0, which `wfdb.rdann` takes for definitions."""
    from wfdb.io import annotation

    pairs = annotation.load_byte_pairs(str(path.with_suffix("")), path.suffix[1:], None)
    samples, codes, _, _, _, texts = annotation.proc_ann_bytes(pairs, 1)
    notes: list[str] = []
    is_definition = False
    for sample, code, raw in zip(samples, codes, texts, strict=True):
        text = raw.strip("\0 \t\r\n")
        if sample != 0 or code != NOTE:
            continue
        if text.startswith("## annotation type definitions"):
            is_definition = True
        if text and not text.startswith("##") and not is_definition:
            notes.append(text)
        if text.startswith("## end of definitions"):
            is_definition = False
    return notes


def _extend_to_next(texts: Sequence[tuple[float, str]]) -> list[Annotation]:
    """Annotations that last until the next one, the last without an end.

    An empty text ends the one before it.
    """
    ends = [*(time for time, _ in texts[1:]), math.inf]
    return [
        Annotation(time, end - time, text)
        for (time, text), end in zip(texts, ends, strict=False)
        if text and end > time
    ]
