"""Sleep stages in the spellings of AASM and of Rechtschaffen and Kales, as scoring programs write
them: one table, read without a map.
"""

from __future__ import annotations

from collections.abc import Iterable

from bitimely_core.types import Annotation

STAGES = ("W", "N1", "N2", "N3", "REM")
# stage -> texts, in small letters with single blanks; stages 3 and 4 are N3
SPELLINGS: dict[str, tuple[str, ...]] = {
    "W": ("sleep stage w", "sleep stage wake", "sleep stage 0", "stage w", "stage wake", "stage 0", "sleep-s0", "wake", "awake", "wake|0"),
    "N1": ("sleep stage n1", "sleep stage 1", "stage n1", "stage 1", "sleep-s1", "n1", "nrem1", "nrem 1", "stage 1 sleep", "stage 1 sleep|1"),
    "N2": ("sleep stage n2", "sleep stage 2", "stage n2", "stage 2", "sleep-s2", "n2", "nrem2", "nrem 2", "stage 2 sleep", "stage 2 sleep|2"),
    "N3": (
        *("sleep stage n3", "sleep stage 3", "stage n3", "stage 3", "sleep-s3", "n3", "nrem3", "nrem 3", "stage 3 sleep", "stage 3 sleep|3"),
        *("sleep stage n4", "sleep stage 4", "stage n4", "stage 4", "sleep-s4", "n4", "nrem4", "nrem 4", "stage 4 sleep", "stage 4 sleep|4"),
    ),
    "REM": ("sleep stage r", "sleep stage rem", "stage r", "stage rem", "sleep-rem", "rem", "rem sleep", "rem sleep|5"),
}  # fmt: skip
# texts that are stages only beside one of the table: alone they can be triggers or sides of the
# body
BARE: dict[str, str] = {
    "w": "W",
    "r": "REM",
    "s0": "W",
    "s1": "N1",
    "s2": "N2",
    "s3": "N3",
    "s4": "N3",
}
# stages in one system or another: only a map can say which
AMBIGUOUS = frozenset("012345") | {"5", "s", "n", "nrem", "s5", "sleep"}
UNSCORED = frozenset(
    {
        *(
            "sleep stage ?",
            "sleep stage m",
            "sleep stage n",
            "sleep stage u",
            "sleep stage",
            "movement time",
            "sleep-mt",
            "mt",
            "movement",
        ),
        *(
            "unscored",
            "unscored|9",
            "movement|6",
            "unknown",
            "?",
            "artifact",
            "sleep-unscored",
            "stage ?",
            "stage mt",
        ),
    }
)  # epochs without a stage
STAGE_OF = {text: stage for stage, texts in SPELLINGS.items() for text in texts}
LABELS = {
    form: stage
    for text, stage in {**STAGE_OF, **BARE}.items()
    for form in (text, text.upper(), text.title(), text.capitalize())
}
LABELS |= {
    form: stage
    for text, stage in STAGE_OF.items()
    if text.startswith("sleep stage ")
    for form in [f"Sleep stage {text[12:].upper()}"]
}
EPOCH = 30.0  # seconds, of the last stage of a recording whose annotations state no duration


def read_stages(
    notes: Iterable[Annotation],
) -> tuple[list[Annotation], list[Annotation], list[str]]:
    """The stages among the annotations of a recording, each called as in `STAGES`; the others; the
    ambiguous texts among these.

    Letter case and the kind of blanks do not count. Stages that state no duration last until the
    next stage or unscored epoch, the last one for `EPOCH` seconds.
    """
    rows = [(note, " ".join(note.label.replace("_", " ").lower().split())) for note in notes]
    known = STAGE_OF | (BARE if any(text in STAGE_OF for _, text in rows) else {})
    scored = sorted(
        (note, known.get(text, "")) for note, text in rows if text in known or text in UNSCORED
    )
    ends = [
        *(note.onset for note, _ in scored[1:]),
        *(note.onset + EPOCH for note, _ in scored[-1:]),
    ]
    stages = [
        Annotation(note.onset, note.duration or end - note.onset, stage)
        for (note, stage), end in zip(scored, ends, strict=True)
        if stage
    ]
    others = [note for note, text in rows if text not in known]
    return (
        stages,
        others,
        sorted(
            {text for _, text in rows if text not in known and (text in AMBIGUOUS or text in BARE)}
        ),
    )
