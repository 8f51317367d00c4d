"""Sleep stages in the words of languages and scoring programs, which are read without a map.

The words are in `stages.toml`. They are compared as `fold_text` makes them.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import filterfalse
from pathlib import Path
from typing import NamedTuple

from bitimely_core.types import Annotation

STAGES = ("W", "N1", "N2", "N3", "REM")
NREM_STAGES = {"1": "N1", "2": "N2", "3": "N3", "4": "N3"}
EPOCH = 30.0  # seconds, of the last stage of a recording whose annotations state no duration
SCORER = re.compile(
    r"\b(?:scorer|rater|expert|reader|annotator|reviewer|technician|tech)s?[ ]?\w{0,20}\b",
    re.IGNORECASE,
)
MOST_WORDS = 4  # of a text that names a stage
EDGES = " \t-_:;/|,()[]"  # between a text and the name of a scorer


class StageReading(NamedTuple):
    """The annotations of a recording by what they are."""

    stages: list[Annotation]  # called as in `STAGES`, in order of time
    marks: list[str]  # of each stage: the scorer or channel that its text names, or ""
    others: list[Annotation]  # epochs without a stage left out
    ambiguous: list[str]  # texts among the others that are stages in some systems


@cache
def fold_text(text: str) -> str:
    """A text in small letters, without accents, codes and channels, with single blanks."""
    text = re.split(r"\||@@", text, maxsplit=1)[0]
    text = "".join(filterfalse(unicodedata.combining, unicodedata.normalize("NFKD", text)))
    text = text.casefold().translate(str.maketrans("øæœ", "oao"))
    return " ".join(re.sub(r"[_\-–:=\s]+", " ", text).split())


def _list_stage_texts(forms: Iterable[str], words: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Folded text -> stage; `forms` hold {n}, the number of a stage that is not REM."""
    stages = {form.format(n=digit): stage for form in forms for digit, stage in NREM_STAGES.items()}
    stages |= {text: stage for stage, texts in words.items() for text in texts}
    return {fold_text(text): stage for text, stage in stages.items()}


WORDS = tomllib.loads((Path(__file__).parent / "stages.toml").read_text("utf-8"))
STAGE_OF = _list_stage_texts(WORDS["nrem"], WORDS["stages"])
# texts that are stages only beside another text: alone they can be triggers or sides of the body
BARE = _list_stage_texts(WORDS["nrem_beside"], WORDS["bare"])
UNSCORED = frozenset(WORDS["unscored"]["texts"])  # epochs without a stage
# stages in one system or another: only a map can say which
AMBIGUOUS = frozenset(WORDS["ambiguous"]["texts"])
DIGITS = {  # of one stage a line and of Profusion; "" is not scored
    text: "" if stage == "unscored" else stage
    for stage, texts in WORDS["digits"].items()
    for text in texts
}
COUNTED_DOWN = {d: stage for stage, digits in WORDS["counted_down"].items() for d in digits}
STAGE_OF_WORD = DIGITS | BARE | STAGE_OF  # of one word of a text
LIKELY: dict[str, str] = WORDS["likely"]  # what is proposed for an ambiguous text
BESIDE, STAGED = (frozenset(WORDS["beside"][kind]) for kind in ("words", "staged"))
VOCABULARY = frozenset(WORDS["vocabulary"]["words"])


def _list_labels() -> dict[str, str]:
    """Text -> stage, in the letter cases that files have."""
    labels: dict[str, str] = {}
    for text, stage in (STAGE_OF | BARE).items():
        labels |= dict.fromkeys((text, text.upper(), text.title(), text.capitalize()), stage)
        if text.startswith("sleep stage "):
            labels[f"Sleep stage {text[12:].upper()}"] = stage
        if text.startswith("sleep "):
            labels[text.replace(" ", "-", 1).upper()] = stage
    return labels


LABELS = _list_labels()


def name_stage(text: str) -> str | None:
    """The stage of a text that is one wherever it stands, "" for an epoch without, else None."""
    folded = fold_text(text)
    stage = STAGE_OF.get(folded, "" if folded in UNSCORED else None)
    return _read_words_of(folded) if stage is None else stage


@cache
def _read_words_of(folded: str) -> str | None:
    """The stage on which the words of a text agree, such as `stage 2 (n2)` or `stagen2`.

    None where one of them is no stage. Letters and digits alone need a word such as stage.
    """
    words = re.findall(r"[^\W_]+", re.sub(r"^(sleep)?(stage)(?=\w)", "stage ", folded))
    rest = [word for word in words if word not in BESIDE | STAGED]
    stages = set(map(STAGE_OF_WORD.get, rest))
    is_sure = not STAGE_OF.keys().isdisjoint(rest) or not STAGED.isdisjoint(words)
    if not is_sure or len(stages) != 1 or len(words) > MOST_WORDS:
        return None
    return stages.pop() or None


def name_listed_stage(text: str) -> str | None:
    """As `name_stage`, for a text in a list of stages: letters and digits alone count, too."""
    text = text.strip()
    stage = _name_beside(text)
    if stage is None and re.fullmatch(r"-?\d+(?:\.0+)?", text):
        stage = DIGITS.get(text.partition(".")[0])
    return stage


def split_mark(text: str, scorers: Sequence[str] = ()) -> tuple[str, str]:
    """A text without what names its scorer or channel, and that name, "" where none is.

    Channels stand behind @@; scorers are words such as `scorer 1`, or one of `scorers`, at either
    end of the text.
    """
    head, separator, channel = text.partition("@@")
    if separator:
        return head.strip(), channel.strip()
    for name in scorers:
        place = re.search(rf"(?:^|(?<=\W|_)){re.escape(name)}(?:$|(?=\W|_))", text, re.IGNORECASE)
        if place and (place.start() == 0 or place.end() == len(text.rstrip(EDGES))):
            return (text[: place.start()] + text[place.end() :]).strip(EDGES), name
    match = SCORER.search(text.replace("_", " "))
    if match:
        return (text[: match.start()] + text[match.end() :]).strip(EDGES), match[0].strip()
    return text, ""


def read_stages(
    notes: Iterable[Annotation],
    words: Mapping[str, str] | None = None,
    *,
    listed: bool = False,
    scorers: Sequence[str] = (),
) -> StageReading:
    """The stages among the annotations of a recording.

    Letter case and the kind of blanks do not count. Stages that state no duration last until the
    next stage or unscored epoch of their scorer, the last one for `EPOCH` seconds.

    Args:
        notes: the annotations.
        words: further texts, as the files have them -> stage, "" for an epoch without one.
        listed: they are a list of stages, in which letters and digits alone are stages.
        scorers: names in the texts, as `split_mark`.
    """
    texts = [(note, *split_mark(note.label, scorers)) for note in notes]
    find = _choose_naming([text for _, text, _ in texts], listed)
    scored: list[tuple[Annotation, str, str]] = []
    others: list[Annotation] = []
    ambiguous: set[str] = set()
    for note, text, mark in texts:
        stage = words.get(note.label, words.get(text)) if words else None
        stage = find(text) if stage is None else stage
        if stage is None:
            others.append(note)
            ambiguous |= {fold_text(text)} & (AMBIGUOUS | BARE.keys())
        else:
            scored.append((note, stage, mark))
    filled = _fill_durations(scored)
    stages = [(note, mark) for note, stage, mark in filled if stage]
    return StageReading(
        stages=[note for note, _ in stages],
        marks=[mark for _, mark in stages],
        others=others,
        ambiguous=sorted(ambiguous),
    )


def _choose_naming(texts: Iterable[str], listed: bool) -> Callable[[str], str | None]:
    """How texts are named: in no list, bare ones count where another text is a stage."""
    if listed:
        return name_listed_stage
    is_scored = any(name_stage(text) is not None for text in texts)
    return _name_beside if is_scored else name_stage


def _name_beside(text: str) -> str | None:
    """As `name_stage`, for a text beside other stages."""
    stage = name_stage(text)
    return BARE.get(fold_text(text)) if stage is None else stage


def _fill_durations(
    scored: Sequence[tuple[Annotation, str, str]],
) -> list[tuple[Annotation, str, str]]:
    """Scored epochs with their durations, in order of time, the stages called by their names."""
    order = sorted(scored, key=lambda row: row[0].onset)
    last: dict[str, float] = {}  # mark -> onset of the next epoch that begins later
    upcoming: dict[str, float] = {}
    filled: list[tuple[Annotation, str, str]] = []
    for note, stage, mark in reversed(order):
        if mark in last and last[mark] > note.onset:
            upcoming[mark] = last[mark]
        end = upcoming.get(mark, note.onset + EPOCH)
        last[mark] = note.onset
        label = stage or note.label
        filled.append(
            (Annotation(note.onset, note.duration or end - note.onset, label), stage, mark)
        )
    return filled[::-1]
