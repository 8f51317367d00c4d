"""Reads a cell of a column of codes by the grammar of its vocabulary and the codes of the map.

A cell holds one code, or several with marks between them, each perhaps with the qualifiers of a
national form. What is none of these is no code: nothing is made one by deleting marks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple
from unicodedata import normalize

from bitimely_core.claims import codes
from bitimely_core.claims.codes import FAMILIES, PhecodeTable, RowFault
from bitimely_core.errors import Reason

MISSING = RowFault("missing", Reason.EMPTY_CODE)
NOT_DIAGNOSED = RowFault("not_diagnosed", Reason.NOT_DIAGNOSED)
FOREIGN = RowFault("bad_format", Reason.WRONG_VOCABULARY)  # a code of something else by its form

# further words for an empty cell
EMPTY = re.compile(r"0+|\\N|#N/A|<NA>|NIL|NAT|NI|UN|MISSING|BLANK", re.ASCII)
BRACKETS = re.compile(r"[\[{(](.*)[\])}]")  # around a whole cell
# a code with its title behind or before it: E11.9 - Diabetes, [E11.9] Diabetes, Diabetes (E11.9)
TITLED = re.compile(
    r"[\[(]?(?P<code>[A-Z]?\d[0-9A-Z.]{1,7})(?:[\])]|\s*[-–:=])\s*\D*[A-Z]{3}.*"
    r"|.*[A-Z]{3}.*[\[(](?P<last>[A-Z]?\d[0-9A-Z.]{1,7})[\])]",
    re.ASCII,
)
DOUBTED = re.compile(r"RULED? OUT|R/O|SUSPECTED|VERDACHT|AUSSCHLU|AUSGESCHL|EXCLUDED")
# between codes: those that nothing else uses, and all; + and * are marks of ICD-10 elsewhere
SURE_SEPARATOR = re.compile(r"[;,|^~\t\r\n]|[+*!†‡](?=\s*[A-Z]\d)")
# codes of ICD-10 with their points, whatever is between them
POINTED_PAIR = re.compile(r"[A-Z]\d\d\.\d+\W+[A-Z]\d\d\.\d", re.ASCII)
SEPARATOR = re.compile(r"[;,|^~\t\r\n/:&\\]+|[+*!†‡](?=\s*[A-Z]\d)")
RANGES = {"-", "–", "TO", "BIS"}  # between the ends of a block: E10 - E14
QUOTES = " \t\r\n'\"\u00a0\ufeff"
DECIMAL = re.compile(r"([EV]?\d{2,3}|[A-Z]\d\d)\s*[ ,]\s*(\d{1,2})", re.ASCII)  # E11 9 and 38,9
# a comma that is the point of a code: what is behind it begins no code of the vocabulary
DECIMAL_COMMA = {
    "icd9": re.compile(r"(?<![\w.])(E?\d{3}|[A-Z]\d\d),(?=\d{1,2}(?![\w.]))", re.ASCII),
    "icd10": re.compile(r"(?<![\w.])([A-Z]\d[0-9A-Z]),(?=\d[0-9A-Z]{0,3}(?![\w.]))", re.ASCII),
}

# dagger, asterisk and the like behind a code; +0 is an extension of the French PMSI
MARKS = re.compile(r"\s*(\+\d{0,2}|[*!#†‡]+)$", re.ASCII)
FILLER = re.compile(r"\.?-+$|(?<=^...)\.$")  # I10-, 4019- and I10.- of fixed columns, I10.
# the Chinese clinical edition: I10.x00, E11.900x001
EXTENSION = re.compile(r"X\d{3}$", re.ASCII)
PLACEHOLDER = re.compile(r"(?<=^...)\.?(X+|X\d\d)$", re.ASCII)  # I10X, I10.X00
ICD10_FORM = re.compile(r"([A-Z]\d[0-9A-Z])(?:\.|-(?=\d+$))?([0-9A-Z]{0,4})", re.ASCII)
# tails behind the category that no edition of ICD-10 has: ATC (A10BA02), procedures (0DTJ4ZZ)
FOREIGN_TAIL = re.compile(r"(?!XX)[A-Z]{2}(\d\d)?|...?.?Z|..Z.", re.ASCII)
SPLIT_CODE = re.compile(r"[A-Z] ?\d ?\d ?\.? ?\d{0,2}", re.ASCII)  # I 50.9

# letters before a code of ICD-10: whether it is a diagnosis
PREFIXES = {
    "D": True,  # Denmark (SKS)
    "P": True,  # Australia (VAED): principal, associated, complication
    "A": True,
    "C": True,
    "Q": False,  # Canada (DAD): query
}
PREFIXED = re.compile(r"([A-Z]):?([A-Z]\d[0-9A-Z].*)", re.ASCII)
# letters behind a code of ICD-10-GM: G confirmed, V suspected, A ruled out, Z state after; side
QUALIFIER = re.compile(r"[GVAZ][RLB]?|[RLB][GVAZ]?", re.ASCII)
QUALIFIED = re.compile(r"([A-Z]\d[0-9A-Z]\.?[0-9]{0,2})([GVAZ][RLB]?|[RLB][GVAZ])", re.ASCII)
DAGGER = re.compile(r"([A-Z]\d[0-9A-Z][.-]?[0-9X-]{0,2}) *-?([DA])", re.ASCII)
NOT_CONFIRMED = set("VAZ")

SHORT_HEAD = re.compile(r"\d{1,2}\.\d{1,2}", re.ASCII)  # 38.93: a category has three digits
NO_POINT = {"icd9": re.compile(r"\d{4,5}", re.ASCII), "icd10": re.compile(r"[A-Z]\d{4}", re.ASCII)}
LONG = 5  # characters of a code without its point that may be one of procedures
EXACT = ("exact", "trailing_zero")  # steps that show that the map has the code itself


class CodeForm(NamedTuple):
    """How the codes of a vocabulary are written in a source, by the evidence of the columns."""

    vocab: str
    # numbers before the point have lost their zeros: 38.9 is 038.9
    pads: bool = False
    # which codes without a point are codes: all, long ones or all if the map has them, or none
    no_point: Literal["all", "exact_long", "exact", "none"] = "all"
    # letters directly behind the code: part of it, certainty (ICD-10-GM), dagger and asterisk (HES)
    letters: Literal["code", "certainty", "dagger"] = "code"
    reads: bool = False  # Read codes stand beside them: five characters are one of those

    @property
    def family(self) -> str:
        """icd9 or icd10."""
        return FAMILIES[self.vocab]


class Reading(NamedTuple):
    """How the codes of a vocabulary are written, and what the map knows of them."""

    form: CodeForm
    table: PhecodeTable


class CellCode(NamedTuple):
    """A code of a cell, or why it has none."""

    code: str | None  # normalised
    fault: RowFault | None = None
    vocab: str = ""  # of a code of another vocabulary than that of the row


FOREIGN_CELL = CellCode(None, FOREIGN)


def read_cell(
    raw: str | None, form: CodeForm, table: PhecodeTable, icd10: Reading | None = None
) -> tuple[CellCode, ...]:
    """The codes of a cell: one, or those between separators where each part is a code.

    Parts between blanks and slashes must all be known to the map, with their parents; of parts
    between semicolons, commas and bars one must be, of codes of ICD-10 with their points none.
    `icd10`: how parts beside a code of ICD-9 are read that can be none themselves, as in
    401.9, I10 of eICU.
    """
    if is_empty(raw):
        return (CellCode(None, MISSING),)
    text = DECIMAL_COMMA[form.family].sub(r"\1.", _strip_cell(raw or ""))
    whole = _read_part(text, form, table)
    if whole.code is not None:
        return (_drop_code(whole),)
    parts = _read_parts(_split_text(text), Reading(form, table), icd10)
    read = [part.code for part in parts if part.code is not None]
    if not parts or len(read) < len(parts):
        return (_drop_code(_read_titled(text, form, table, whole)),)
    n_known = sum(is_mapped(part, table, icd10) for part in parts)
    is_list = n_known >= _count_needed(text, len(parts))
    return tuple(map(_drop_code, parts)) if is_list else (whole,)


def _count_needed(text: str, n_parts: int) -> int:
    """How many parts of a cell the map must know for them to be codes."""
    if POINTED_PAIR.search(text):
        return 0
    return n_parts if SURE_SEPARATOR.search(text) is None else min(1, n_parts - 1)


def is_mapped(cell: CellCode, table: PhecodeTable, icd10: Reading | None) -> bool:
    """Whether the map knows the code of a cell, which `read_cell` has read with the same tables."""
    mapped = icd10.table if icd10 and cell.vocab else table
    return bool(cell.code and codes.find_phecodes(cell.code, mapped)[0])


def _read_parts(texts: Sequence[str], reading: Reading, icd10: Reading | None) -> list[CellCode]:
    """The parts of a cell. Beside a code of ICD-9 others may be of ICD-10."""
    parts = [_read_part(text, *reading) for text in texts]
    if icd10 is None or not any(part.code for part in parts):
        return parts
    vocab = icd10.form.vocab
    return [
        part if part.code else _read_part(text, *icd10)._replace(vocab=vocab)
        for part, text in zip(parts, texts, strict=True)
    ]


def fold_cell(raw: str) -> str:
    """A cell in capitals of usual width, without quotes and blanks around it."""
    plain = raw if raw.isascii() else normalize("NFKC", raw)
    return plain.strip(QUOTES).upper()


def is_empty(raw: str | None) -> bool:
    """Whether a cell holds nothing, a word for nothing, or neither letters nor digits."""
    text = _strip_cell(raw or "")
    is_word = text in codes.MISSING or EMPTY.fullmatch(text) is not None
    return is_word or not any(letter.isalnum() for letter in text)


def _strip_cell(raw: str) -> str:
    """A cell in capitals, without quotes, blanks and brackets around it."""
    text = fold_cell(raw)
    bracketed = BRACKETS.fullmatch(text)
    return bracketed[1].strip(QUOTES) if bracketed else text


def _read_titled(text: str, form: CodeForm, table: PhecodeTable, whole: CellCode) -> CellCode:
    """The code of a cell that also holds its title, where the map knows it; else `whole`."""
    match = TITLED.fullmatch(text)
    if match is None or DOUBTED.search(text):
        return whole
    cell = _read_part(match["code"] or match["last"], form, table)
    return cell if cell.code and codes.find_phecodes(cell.code, table)[0] else whole


def _drop_code(cell: CellCode) -> CellCode:
    """The cell without a code that is no diagnosis."""
    return cell._replace(code=None) if cell.fault else cell


def _split_text(text: str) -> list[str]:
    """The parts of a cell, each with the qualifiers behind it; [] for one alone and a range."""
    parts: list[str] = []
    for piece in SEPARATOR.split(text):
        words = piece.split()
        if set(words) & RANGES:
            return []
        for i, word in enumerate(words):
            if i and QUALIFIER.fullmatch(word):
                parts[-1] += f" {word}"
            elif word.strip(QUOTES) not in codes.MISSING:
                parts.append(word.strip(QUOTES))
    return parts if len(parts) > 1 or SURE_SEPARATOR.search(text) else []


def _read_part(text: str, form: CodeForm, table: PhecodeTable) -> CellCode:
    """A single code. One that is no diagnosis has both a code and a fault."""
    read = _read_icd9 if form.family == "icd9" else _read_icd10
    return read(text, form, table)


def _read_icd9(text: str, form: CodeForm, table: PhecodeTable) -> CellCode:
    if SHORT_HEAD.fullmatch(text) and not form.pads:
        return FOREIGN_CELL
    joined = _join_blanks(FILLER.sub("", text), form.vocab, table)
    code, fault = codes.normalise_code(joined, form.vocab, pad_undotted=form.pads)
    if code is None or re.search(r"\s|\.\.", joined):
        name = fault or "bad_format"
        return CellCode(None, RowFault(name, codes.classify_fault(text, form.vocab, name)))
    if codes.is_foreign_code(code, form.vocab):
        return CellCode(None, RowFault(codes.UNMAPPED, Reason.WRONG_VOCABULARY))
    return CellCode(code) if _is_code_without_point(joined, code, form, table) else FOREIGN_CELL


def _read_icd10(text: str, form: CodeForm, table: PhecodeTable) -> CellCode:
    body, letters = _cut_qualifiers(text, form)
    is_diagnosis = not NOT_CONFIRMED & set(letters)
    prefixed = PREFIXED.fullmatch(body)
    if prefixed and prefixed[1] in PREFIXES:
        is_diagnosis &= PREFIXES[prefixed[1]]
        body = prefixed[2]
    body = _cut_marks(_join_blanks(body, form.vocab, table))
    # no edition has a letter O behind the first digit: a zero was meant
    body = body[:2] + body[2:].replace("O", "0")
    match = ICD10_FORM.fullmatch(body)
    if match is None:
        fault = codes.classify_fault(text, form.vocab, "bad_format")
        return CellCode(None, RowFault("bad_format", fault))
    head, tail = match.groups()
    is_read_code = form.reads and len(text) == LONG and "." not in text
    code = f"{head}.{tail}" if tail else head
    is_foreign = is_read_code or FOREIGN_TAIL.fullmatch(tail)
    if is_foreign or not _is_code_without_point(body, code, form, table):
        return FOREIGN_CELL
    return CellCode(code, None if is_diagnosis else NOT_DIAGNOSED)


def _cut_qualifiers(text: str, form: CodeForm) -> tuple[str, str]:
    """The code without the letters behind it, and those that state certainty."""
    if form.letters == "dagger":
        dagger = DAGGER.fullmatch(text)
        return (dagger[1], "") if dagger else (text, "")
    body, *words = text.split()
    if words and all(map(QUALIFIER.fullmatch, words)):
        return body, "".join(words)
    qualified = QUALIFIED.fullmatch(text) if form.letters == "certainty" else None
    return (qualified[1], qualified[2]) if qualified else (text, "")


def _cut_marks(text: str) -> str:
    """A code of ICD-10 without marks, fillers and national extensions behind it."""
    for pattern in (MARKS, FILLER, EXTENSION, PLACEHOLDER):
        text = pattern.sub("", text)
    return text


def _join_blanks(text: str, vocab: str, table: PhecodeTable) -> str:
    """A code with a comma or a blank for its point, or blanks in it, as a code of the map.

    Other texts stay as they are.
    """
    decimal = DECIMAL.fullmatch(text)
    joined = f"{decimal[1]}.{decimal[2]}" if decimal else re.sub(r"\s", "", text)
    is_icd9 = FAMILIES[vocab] == "icd9"
    if joined == text or not (is_icd9 or decimal or SPLIT_CODE.fullmatch(text)):
        return text
    code = codes.normalise_code(joined, vocab)[0]
    return joined if code and codes.find_phecodes(code, table, EXACT)[0] else text


def _is_code_without_point(text: str, code: str, form: CodeForm, table: PhecodeTable) -> bool:
    """Whether a text is a code by the form of its column, as far as it has no point."""
    if form.no_point == "all" or not NO_POINT[form.family].fullmatch(text):
        return True
    if form.no_point == "exact_long" and len(text) < LONG:
        return True
    return form.no_point != "none" and bool(codes.find_phecodes(code, table, EXACT)[0])
