"""Reads ICD codes as they are written: one spelling for each code, then its PheCodes.

There are four vocabularies in two families: `icd9` and `icd9cm` are written alike, and so are
`icd10` and `icd10cm`. This is plain Python on text, once for each distinct vocabulary and text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from bitimely_core.errors import Reason

FAMILIES = {"icd9": "icd9", "icd9cm": "icd9", "icd10": "icd10", "icd10cm": "icd10"}
STEPS = ("exact", "trailing_zero", "parent")
# vocabulary, family and step of codes that are not ICD: each is a token of its own (`--codes all`)
OTHER = "other"
MARK = "//"  # in every token of such a code, and in no PheCode
LEVELS = ("integer", "first_decimal", "full")
UNMAPPED = "unmapped"
MISSING = {"", "NA", "N/A", "NAN", "NULL", "NONE", "-", "UNK", "UNKNOWN", "OTHER"}

ICD9_DOTTED = re.compile(r"(E\d{3}|V\d{2}|\d{1,3})\.(\d{1,2})", re.ASCII)
ICD9_PLAIN = re.compile(r"(E\d{3})(\d?)|(V\d{2})(\d{0,2})|(\d{3})(\d{0,2})", re.ASCII)
ICD9_SHORT = re.compile(r"\d{1,2}", re.ASCII)
# E000-E030, E800-E999: the E codes that there are
ICD9_EXTERNAL = re.compile(r"E(0[012]\d|030|[89]\d\d)(\.\d)?", re.ASCII)
ICD10 = re.compile(r"[A-Z]\d[A-Z0-9][A-Z0-9]{0,4}", re.ASCII)
NOT_ICD10 = re.compile(r"[^A-Z0-9]")
SCIENTIFIC = re.compile(r"[+-]?\d+(\.\d*)?E[+-]?\d+", re.ASCII)
SHOWN_SHAPES = 3
SHAPE_CHARACTERS = 12
PHECODE = re.compile(r"([A-Z_]*)(\d+(?:\.\d+)?)", re.ASCII)

PhecodeTable = Mapping[str, tuple[str, ...]]
"""Normalised code -> its PheCodes in numeric order."""


class IcdCode(NamedTuple):
    """One distinct code of the data, with its PheCodes."""

    vocab: str
    code: str  # normalised
    phecodes: tuple[str, ...] = ()  # as the map gives them, in numeric order
    step: str = UNMAPPED  # how they were found

    @property
    def family(self) -> str:
        """The family of the vocabulary: icd9, icd10 or other."""
        return FAMILIES.get(self.vocab, OTHER)

    @property
    def text(self) -> str:
        """The code as the cache has it: `ICD9CM//428.0`; of other vocabularies the token."""
        return self.code if self.vocab == OTHER else f"{self.vocab.upper()}{MARK}{self.code}"


BESIDE = {"icd9": "icd10", "icd9cm": "icd10cm"}
"""Vocabulary of ICD-9 -> that of codes of ICD-10 which stand beside its own in a cell."""


def get_other_family(vocab: str) -> str:
    """The family to which a vocabulary does not belong."""
    return "icd10" if FAMILIES[vocab] == "icd9" else "icd9"


def normalise_code(
    raw: str | None, vocab: str, *, pad_undotted: bool = False
) -> tuple[str | None, str | None]:
    """Bring a code to the one spelling of its vocabulary (sections 4.1, 4.2).

    Returns (code, None), or (None, fault): `missing`, `bad_format` or `ambiguous_short`.

    Args:
        raw: the code as written.
        vocab: icd9, icd9cm, icd10 or icd10cm.
        pad_undotted: read an undotted ICD-9 number of 1 or 2 digits as a category that has lost its
            zeros.
    """
    text = (raw or "").upper()
    if FAMILIES[vocab] == "icd9":
        text = re.sub(r"[\s'\"]", "", text)
        return (None, "missing") if text in MISSING else _normalise_icd9(text, pad_undotted)
    text = NOT_ICD10.sub("", text)
    if text in MISSING:
        return None, "missing"
    if not ICD10.fullmatch(text):
        return None, "bad_format"
    return f"{text[:3]}.{text[3:]}" if len(text) > 3 else text, None


def _normalise_icd9(text: str, pad: bool) -> tuple[str | None, str | None]:
    text = text.rstrip(".")
    if dotted := ICD9_DOTTED.fullmatch(text):
        head, decimals = dotted.groups()
        if head[0] == "E" and len(decimals) == 2:
            return None, "bad_format"
        return f"{head.zfill(3)}.{decimals}", None  # E and V heads are 3 characters long or more
    if plain := ICD9_PLAIN.fullmatch(text):
        head, decimals = (part for part in plain.groups() if part is not None)
        return f"{head}.{decimals}" if decimals else head, None
    if ICD9_SHORT.fullmatch(text):
        return (text.zfill(3), None) if pad else (None, "ambiguous_short")
    return None, "bad_format"


def classify_fault(raw: str | None, vocab: str, fault: str) -> Reason:
    """The reason for which the command quarantines a code with a `fault` of `normalise_code`
    (section 3.3).
    """
    text = "".join((raw or "").split()).upper()
    if fault == "missing" or not any(letter.isalnum() for letter in text):
        return Reason.EMPTY_CODE
    if fault == "ambiguous_short" or SCIENTIFIC.fullmatch(text):
        return Reason.AMBIGUOUS_CODE
    is_other = normalise_code(raw, get_other_family(vocab))[0]
    return Reason.WRONG_VOCABULARY if is_other else Reason.BAD_CODE


def is_foreign_code(code: str, vocab: str) -> bool:
    """Whether a normalised ICD-9 code is an E code outside ICD-9: `E119` is diabetes in ICD-10."""
    return FAMILIES[vocab] == "icd9" and code[0] == "E" and not ICD9_EXTERNAL.fullmatch(code)


def shorten_code(code: str, *, zeros: bool) -> Iterator[str]:
    """The code without its last decimal, its last two, ... down to the category.

    `zeros`: only as long as it ends in 0.
    """
    while "." in code and (code.endswith("0") or not zeros):
        code = code[:-1].removesuffix(".")
        yield code


def find_phecodes(
    code: str, table: PhecodeTable, fallback: Collection[str] = STEPS
) -> tuple[tuple[str, ...], str]:
    """PheCodes of a normalised code, and the step that finds them (section 4.3).

    ((), `unmapped`) where no step of `fallback` does.
    """
    candidates = {
        "exact": (code,),
        "trailing_zero": shorten_code(code, zeros=True),
        "parent": shorten_code(code, zeros=False),
    }
    for step in STEPS:
        if step in fallback:
            for candidate in candidates[step]:
                if candidate in table:
                    return table[candidate], step
    return (), UNMAPPED


def map_codes(
    tables: Mapping[str, PhecodeTable], texts: Iterable[str]
) -> dict[str, tuple[str, ...]]:
    """The PheCodes of codes as a cache writes them (`ICD9CM//428.0`) by another map; other codes
    are left out.
    """
    mapped = {}
    for text in texts:
        vocab, _, code = text.partition(MARK)
        if vocab.lower() in FAMILIES:
            table = choose_table(tables, vocab.lower())
            mapped[text] = find_phecodes(code, table)[0]
    return mapped


def roll_up_phecode(phecode: str, level: str) -> str:
    """A PheCode at `level`: the part before the dot (zeros stay), with one decimal, or unchanged
    (section 4.4).
    """
    head, dot, decimals = phecode.partition(".")
    if level == "full" or not dot or is_other(phecode):
        return phecode
    return head if level == "integer" else f"{head}.{decimals[:1]}"


def is_other(phecode: str) -> bool:
    """Whether a token is no PheCode but a code of another vocabulary."""
    return MARK in phecode


def make_token(raw: str) -> str:
    """The token of a code that is not ICD: as written, with `CODE//` before one that names no
    vocabulary.
    """
    return raw if MARK in raw else f"CODE{MARK}{raw}"


def phecode_sort_key(phecode: str) -> tuple[str, float, str]:
    """Sort key of PheCodes, (letters, number, text): 008 < 250 < 250.2 < 1000.

    Other texts come after those of their first letters.
    """
    match = PHECODE.fullmatch(phecode)
    return (match[1], float(match[2]), phecode) if match else (phecode, math.inf, phecode)


def choose_table(tables: Mapping[str, PhecodeTable], vocab: str) -> PhecodeTable:
    """The table of a vocabulary where the map has one, else the one of its family; empty when there
    is none.

    So a map with separate WHO and CM tables is used by exact vocabulary, one with a single table by
    family.
    """
    if vocab in tables:
        return tables[vocab]
    return next((table for name, table in tables.items() if FAMILIES[name] == FAMILIES[vocab]), {})


def shape_text(text: str) -> str:
    """A text without its letters and digits: x99.9 is the shape of E11.9."""
    shape = re.sub(r"\d", "9", text.strip()[:SHAPE_CHARACTERS])
    return re.sub(r"[^\W\d_]", "x", shape)


def list_shapes(shapes: Mapping[str, int]) -> str:
    """The most frequent shapes, for a message."""
    common = sorted(shapes, key=lambda shape: (-shapes[shape], shape))[:SHOWN_SHAPES]
    return ", ".join(map(repr, common))


class RowFault(NamedTuple):
    """Why a row is left out."""

    name: str  # its column of the funnel: bad_date, missing, bad_format ...
    reason: Reason  # in the ingest report
