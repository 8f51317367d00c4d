"""Sleep stages in the spellings of AASM and of Rechtschaffen and Kales, as scoring programs write
them.

They are read without a map. All texts here are in small letters with single blanks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bitimely_core.types import Annotation

STAGES = ("W", "N1", "N2", "N3", "REM")
WAKE = (
    "sleep stage w",
    "sleep stage wake",
    "sleep stage 0",
    "stage w",
    "stage wake",
    "stage 0",
    "sleep-s0",
    "wake",
    "awake",
    "wake|0",
)
NREM = (  # {0}: 1 to 4
    "sleep stage n{0}",
    "sleep stage {0}",
    "stage n{0}",
    "stage {0}",
    "sleep-s{0}",
    "n{0}",
    "nrem{0}",
    "nrem {0}",
    "stage {0} sleep",
    "stage {0} sleep|{0}",
)
NREM_STAGES = {"1": "N1", "2": "N2", "3": "N3", "4": "N3"}
REM = (
    "sleep stage r",
    "sleep stage rem",
    "stage r",
    "stage rem",
    "sleep-rem",
    "rem",
    "rem sleep",
    "rem sleep|5",
)
# texts that are stages only beside another text: alone they can be triggers or sides of the body
BARE = {"w": "W", "r": "REM", "s0": "W", "s1": "N1", "s2": "N2", "s3": "N3", "s4": "N3"}
# stages in one system or another: only a map can say which
AMBIGUOUS = frozenset("012345") | {"s", "n", "nrem", "s5", "sleep"}
UNSCORED = {  # epochs without a stage
    "sleep stage ?",
    "sleep stage m",
    "sleep stage n",
    "sleep stage u",
    "sleep stage",
    "movement time",
    "sleep-mt",
    "mt",
    "movement",
    "unscored",
    "unscored|9",
    "movement|6",
    "unknown",
    "?",
    "artifact",
    "sleep-unscored",
    "stage ?",
    "stage mt",
}
EPOCH = 30.0  # seconds, of the last stage of a recording whose annotations state no duration


def _list_stage_texts() -> dict[str, str]:
    """Text -> stage, of the texts that are stages wherever they stand."""
    stages = dict.fromkeys(WAKE, "W")
    for digit, stage in NREM_STAGES.items():
        stages |= dict.fromkeys([form.format(digit) for form in NREM], stage)
    return stages | dict.fromkeys(REM, "REM")


def _list_labels() -> dict[str, str]:
    """Text -> stage, in the letter cases that files have."""
    labels: dict[str, str] = {}
    for text, stage in (STAGE_OF | BARE).items():
        labels |= dict.fromkeys((text, text.upper(), text.title(), text.capitalize()), stage)
    for text, stage in STAGE_OF.items():
        head, name = text[:12], text[12:]
        if head == "sleep stage ":
            labels[f"Sleep stage {name.upper()}"] = stage
    return labels


STAGE_OF = _list_stage_texts()
LABELS = _list_labels()


def read_stages(
    notes: Iterable[Annotation],
) -> tuple[list[Annotation], list[Annotation], list[str]]:
    """The stages among the annotations of a recording, the others, and the ambiguous texts of these.

    A stage is called as in `STAGES`. Letter case and the kind of blanks do not count. Stages that
    state no duration last until the next stage or unscored epoch, the last one for `EPOCH` seconds.
    """
    texts = [(note, " ".join(note.label.replace("_", " ").lower().split())) for note in notes]
    is_scored = any(text in STAGE_OF for _, text in texts)
    stages = STAGE_OF | BARE if is_scored else STAGE_OF
    scored: list[tuple[Annotation, str]] = []
    others: list[Annotation] = []
    ambiguous: set[str] = set()
    for note, text in texts:
        stage = stages.get(text, "")
        if stage or text in UNSCORED:
            scored.append((note, stage))
        if not stage:
            others.append(note)
            ambiguous |= {text} & (AMBIGUOUS | BARE.keys())
    return _fill_durations(sorted(scored)), others, sorted(ambiguous)


def _fill_durations(scored: Sequence[tuple[Annotation, str]]) -> list[Annotation]:
    """The stages of scored epochs, in order of time, those without a stage left out."""
    onsets = [note.onset for note, _ in scored]
    ends = [*onsets[1:], *(onset + EPOCH for onset in onsets[-1:])]
    return [
        Annotation(note.onset, note.duration or end - note.onset, stage)
        for (note, stage), end in zip(scored, ends, strict=True)
        if stage
    ]
