"""Tells by its name which recording a label file belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from posixpath import commonpath

from bitimely_core.recordings.mapping import strip_suffix
from bitimely_core.types import find_only

# words in the names of label files, and in those of recordings, that do not tell which recording
LABEL_WORD = re.compile(
    r"hyp(?:no\w*)?|stages?|staging|sleep|sleepstages?|labels?|labell?ed|annotations?|annot|ann"
    r"|events?|scor(?:e|es|ed|ing|ings)|scorers?\w*|raters?\w*|experts?\w*|nsrr|profusion|base"
    r"|epochs?|remlogic|nox|compumedics|txt|csv|edf|aasm|rk|manual|auto|visual|arousals?|markers?"
    r"|marks?|corrected|export|exported|tags?|targets?|truth|predictions?|predicted|final"
)
RECORDING_WORD = re.compile(r"psg|polysomnography|eeg|ecg|raw|signals?|recordings?|rec|edf|sleep")
# the eighth letter is the hypnogram's scorer, or the kind of recorder
SLEEP_EDF = re.compile(r"((?:SC|ST)\d{4}[A-Z])\w(?:-PSG|-Hypnograms?)", re.IGNORECASE)


class LabelNames:
    """Which recording a label file belongs to by its name, in its own folder or in all of them.

    In this order: the name of the recording; the same without words such as `hypnogram` and `PSG`;
    the name of the recording and further words, or in its folder the number of a scorer; a name
    that a single recording begins with; in a folder with one recording a name of such words alone.
    Of several such recordings it is the one that shares most of its path with the file.
    The files `later` are parts of recordings in the same folder.
    """

    def __init__(self, recordings: Iterable[str], later: Iterable[str] = ()) -> None:
        parts = set(later)
        self.places: dict[tuple[str | None, str], list[str]] = {}  # folder, exact name
        self.cores: dict[tuple[str | None, str], list[str]] = {}
        self.beginnings: dict[tuple[str | None, str], list[str]] = {}
        self.folders: dict[str, list[str]] = {}
        for rel in recordings:
            folder, stem = str(PurePosixPath(rel).parent), PurePosixPath(strip_suffix(rel)).name
            tokens = _split_name(stem)
            if rel not in parts:
                self.folders.setdefault(folder, []).append(rel)
            for place in (folder, None):
                _add(self.places, place, stem.casefold(), rel)
                _add(self.places, place, PurePosixPath(rel).name.casefold(), rel)
                for core in {
                    "_".join(tokens),
                    _find_core(tokens, RECORDING_WORD),
                    _name_sleep_edf(stem),
                }:
                    _add(self.cores, place, core, rel)
                for count in range(1, len(tokens)):
                    _add(self.beginnings, place, "_".join(tokens[:count]), rel)

    def find_owner(self, file: str) -> str:
        """The recording of a label file, "" where there is none or more than one."""
        folder, stem = str(PurePosixPath(file).parent), PurePosixPath(strip_suffix(file)).name
        tokens = _split_name(stem)
        core = _find_core(tokens, LABEL_WORD)
        for place in (folder, None):
            for owners in self._list_owners(place, stem, tokens, core):
                others = [rel for rel in owners if rel != file]
                if others:
                    return _find_nearest(others, folder)
        inside = [rel for rel in self.folders.get(folder, ()) if rel != file]
        return inside[0] if not core and len(inside) == 1 else ""

    def _list_owners(
        self, place: str | None, stem: str, tokens: Sequence[str], core: str
    ) -> Iterator[list[str]]:
        yield self.places.get((place, stem.casefold()), [])
        yield self.cores.get((place, _name_sleep_edf(stem)), [])
        yield self.cores.get((place, core), []) if core else []
        for count in range(len(tokens) - 1, 0, -1):
            if not any(token[0].isdigit() for token in tokens[count:]):
                yield self.cores.get((place, "_".join(tokens[:count])), [])
        if place and (numbered := re.fullmatch(r"(\w+)_\d", "_".join(tokens))):
            yield self.cores.get((place, numbered[1]), [])
        if any(character.isdigit() for character in core):
            yield self.beginnings.get((place, core), [])


def _find_nearest(rels: Sequence[str], folder: str) -> str:
    """The only one of files that shares most of its path with a folder; "" where several do."""
    shared = [len(commonpath([f"/{rel}", f"/{folder}"])) for rel in rels]
    return find_only([rel for rel, n in zip(rels, shared, strict=True) if n == max(shared)], "")


def _add(
    index: dict[tuple[str | None, str], list[str]], place: str | None, name: str, rel: str
) -> None:
    if name:
        index.setdefault((place, name), []).append(rel)


def _split_name(stem: str) -> list[str]:
    text = stem.casefold().replace("r&k", "rk")
    text = re.sub(rf"(?<=\d)(?=(?:{LABEL_WORD.pattern})$)", "_", text)
    return list(filter(None, re.split(r"[^a-z0-9]+", text)))


def _find_core(tokens: Sequence[str], word: re.Pattern[str]) -> str:
    """A name without the words at its ends that do not tell which recording it is."""
    rest = list(tokens)
    while rest and word.fullmatch(rest[-1]):
        rest.pop()
    while rest and word.fullmatch(rest[0]):
        rest.pop(0)
    return "_".join(rest)


def _name_sleep_edf(stem: str) -> str:
    """The night of a file of Sleep-EDF, "" for another."""
    match = SLEEP_EDF.fullmatch(stem)
    return f"sleep-edf {match[1].lower()}" if match else ""
