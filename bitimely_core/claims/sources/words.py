"""Names of columns and words in their cells that sources are known to use (`words.toml`), and the
columns of published layouts (`layouts.toml`).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

FOLDER = Path(__file__).parent
WORDS: dict[str, dict[str, list[str]]] = tomllib.loads((FOLDER / "words.toml").read_text("utf-8"))
LAYOUTS: dict[str, dict[str, dict[str, str]]] = tomllib.loads(
    (FOLDER / "layouts.toml").read_text("utf-8")
)
# what a column may hold -> the words of names that hold something else
OTHERS = {"diagnosis": "other", "code": "other", "subject": "other_subject"}
NO_DIAGNOSIS = "none"  # the word of vocabularies that no map of diagnoses reads


def fold_name(name: str) -> str:
    """A name or word without case, blanks and punctuation, and without the entity that the research
    platform of UK Biobank writes before the names of fields: participant.eid.
    """
    return re.sub(r"^participant\.|[\W_]", "", name).lower()


def list_names(table: str) -> dict[str, tuple[str, ...]]:
    """Key -> accepted names of its column, the preferred one first."""
    return {key: tuple(names) for key, names in WORDS[table].items()}


def index_words(table: str) -> dict[str, str]:
    """Word -> what it means."""
    return {word: key for key, words in WORDS[table].items() for word in words}


NAME_PARTS = re.compile(r"[\W_\d]+|(?<=[a-z])(?=[A-Z])")  # what separates the words of a name


def find_lookalikes(key: str, names: Iterable[str]) -> list[str]:
    """The names of columns that may hold what `key` stands for."""
    beginnings = tuple(WORDS["looks"].get(key, ()))
    others = tuple(WORDS["looks"].get(OTHERS.get(key, ""), ()))
    parts = {name: NAME_PARTS.split(name.strip()) for name in names}
    lower = {name: [word.lower() for word in texts] for name, texts in parts.items()}
    return [
        name
        for name, texts in lower.items()
        if any(text.startswith(beginnings) for text in texts)
        and not any(text.endswith(others) for text in texts)
    ]


def translate_words(pairs: Mapping[str, str], table: str) -> dict[str, str]:
    """Folded word -> what it means: those of `table`, then those that the user states."""
    return {**index_words(table), **fold_keys(pairs)}


def fold_keys(pairs: Mapping[str, str]) -> dict[str, str]:
    """`pairs` with folded keys."""
    return {fold_name(word): key for word, key in pairs.items()}
