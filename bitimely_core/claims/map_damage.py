"""Finds what a spreadsheet has done to a PheCode map (section 5).

Spreadsheets remove leading zeros, after which `1` is both 001 and 001.0: such a table is refused.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum

from bitimely_core.claims import codes
from bitimely_core.claims.map_files import DOWNLOAD_HINT
from bitimely_core.claims.map_layouts import MapLayout
from bitimely_core.errors import Reason, UserError, input_error, safe_text

FULL_ROWS = 10_000  # ICD-9 rows from which on a 1.2 table must be complete
# of the ICD-9 codes of such a table: fewer in no form of ICD-9 are errors of its authors
# (PhecodeX has 51.692), not damage
STRAY_SHARE = 1e-3
EXAMPLES = 3  # keys that a message shows
NUMERIC = re.compile(r"\d+(\.\d*)?", re.ASCII)
ZERO_AT_END = re.compile(r"\d+\.\d*0", re.ASCII)

MapRow = tuple[str, str, str]
"""Vocabulary, code and PheCode."""


class Damage(StrEnum):
    """The tests of section 5 in their order, each by what it finds."""

    INVALID_CODES = "ICD-9 codes have lost zeros or are invalid"
    REPEATED_CODES = "ICD-9 codes are duplicated"
    LOST_ZEROS = "PheCodes have lost leading zeros"
    MISSING_CODES = "codes of the full map are missing"
    SPREADSHEET_NUMBERS = "numbers are written as a spreadsheet writes them"
    STORED_NUMBERS = "codes are stored as numbers"


def pad_zeros(phecode: str) -> str:
    """A numeric PheCode with its leading zeros: 8 -> 008, 38.1 -> 038.1."""
    head, dot, decimals = phecode.partition(".")
    return f"{head.zfill(3)}{dot}{decimals}" if NUMERIC.fullmatch(phecode) else phecode


def find_stray_codes(rows: Iterable[MapRow]) -> list[str]:
    """The ICD-9 codes of a full table that are in no form of ICD-9, if they are very few.

    Codes that are written as a spreadsheet writes numbers are damage, not stray.
    """
    keys = {code for vocab, code, _ in rows if vocab == "icd9"}
    stray = sorted(
        code
        for code in keys
        if codes.normalise_code(code, "icd9")[1] == "bad_format" and not _is_scientific(code)
    )
    return stray if len(keys) >= FULL_ROWS and len(stray) < STRAY_SHARE * len(keys) else []


def find_damage(
    rows: Sequence[MapRow], layout: MapLayout, numbers: Collection[str]
) -> dict[Damage, list[str]]:
    """The tests that a table fails, each with up to three damaged keys.

    `numbers`: columns that were stored as numbers.
    """
    keys = _find_damaged_keys(rows, layout, numbers)
    distinct = {damage: list(dict.fromkeys(keys.get(damage, ()))) for damage in Damage}
    return {damage: texts[:EXAMPLES] for damage, texts in distinct.items() if texts}


def _find_damaged_keys(
    rows: Sequence[MapRow], layout: MapLayout, numbers: Collection[str]
) -> dict[Damage, Iterable[str]]:
    """All damaged keys of a table by test, some of them several times."""
    counts = Counter(code for vocab, code, _ in rows if vocab == "icd9")
    phecodes = sorted({phecode for _, _, phecode in rows})
    # PheCodes of version 1.2 are numbers, those of PhecodeX begin with letters
    is_original = all(map(_is_number, phecodes))
    keys: dict[Damage, Iterable[str]] = {
        Damage.INVALID_CODES: filter(_is_invalid, counts),
        Damage.LOST_ZEROS: [text for text in phecodes if pad_zeros(text) != text],
        Damage.SPREADSHEET_NUMBERS: [
            *filter(_is_scientific, map(operator.itemgetter(1), rows)),
            *filter(_has_spreadsheet_form if is_original else _is_scientific, phecodes),
        ],
        Damage.STORED_NUMBERS: [name for name in (layout.code, "phecode") if name in numbers],
    }
    if is_original and layout.single:
        keys[Damage.REPEATED_CODES] = [code for code, n in counts.items() if n > 1]
    if is_original and counts.total() >= FULL_ROWS:
        keys[Damage.MISSING_CODES] = _list_missing_codes(counts, phecodes)
    return keys


def _list_missing_codes(icd9_codes: Collection[str], phecodes: Collection[str]) -> list[str]:
    """Those of cholera that a whole map has; without zeros both of its codes are 1."""
    missing = [code for code in ("001", "001.0") if code not in icd9_codes]
    return missing if "008" in phecodes else [*missing, "PheCode 008"]


def _is_invalid(code: str) -> bool:
    """Whether an ICD-9 code is not in the one spelling of its vocabulary."""
    return codes.normalise_code(code, "icd9")[0] != code


def _is_scientific(text: str) -> bool:
    """Whether a text is a number with an exponent."""
    return codes.SCIENTIFIC.fullmatch(text.upper()) is not None


def _is_number(phecode: str) -> bool:
    return NUMERIC.fullmatch(phecode) is not None or _is_scientific(phecode)


def _has_spreadsheet_form(phecode: str) -> bool:
    return _is_scientific(phecode) or ZERO_AT_END.fullmatch(phecode) is not None


def damage_error(file: str, damage: Mapping[Damage, Sequence[str]]) -> UserError:
    """The refusal of a damaged map, with the repair where there is one."""
    text = "; ".join(
        f"{kind.value} ({', '.join(map(safe_text, keys))})" for kind, keys in damage.items()
    )
    hint = f"It cannot be repaired: use an intact copy. {DOWNLOAD_HINT}"
    if set(damage) == {Damage.LOST_ZEROS}:
        hint = "Give --map-repair phecode-zeros"
    return input_error(
        Reason.MAP_DAMAGED,
        f"is damaged: {text}",
        hint=hint,
        file=file,
        found=next(iter(damage.values()))[0],
    )
