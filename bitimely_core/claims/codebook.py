"""Keeps the distinct codes of a data set, and reads each distinct cell of its tables once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bitimely_core.claims import code_cells
from bitimely_core.claims.code_cells import CodeForm
from bitimely_core.claims.codes import (
    BESIDE,
    OTHER,
    STEPS,
    UNMAPPED,
    IcdCode,
    PhecodeTable,
    RowFault,
    choose_table,
    classify_fault,
    find_phecodes,
    is_foreign_code,
    make_token,
    normalise_code,
)
from bitimely_core.errors import Reason


class CodeReading(NamedTuple):
    """The code of one distinct vocabulary and text, or why it has none."""

    position: int  # in `Codebook.codes`, -1 when it cannot be read
    fault: RowFault | None = None


@dataclass
class Codebook:
    """The distinct codes of a data set. A spelling is read when it is first seen, and so is its
    code looked up.

    A vocabulary with a form is read by it, cell by cell: the command finds them (`code_forms`).
    Without one a cell is a code in any spelling, as in `build_sequences`.

    `strict` refuses what only the command refuses: ICD-9 E codes that do not exist (and in
    `clean.clean_rows` empty subject ids).
    """

    tables: Mapping[str, PhecodeTable]
    fallback: Sequence[str] = STEPS
    pad_undotted: bool = False
    strict: bool = False
    forms: Mapping[str, CodeForm] = field(default_factory=dict)
    codes: list[IcdCode] = field(default_factory=list)
    _readings: dict[tuple[str, str | None], tuple[CodeReading, ...]] = field(default_factory=dict)
    _positions: dict[tuple[str, str], int] = field(default_factory=dict)

    def resume(self, codes: Sequence[IcdCode]) -> None:
        """Continue after these codes, which another book has read from the same tables."""
        self.codes = list(codes)
        self._positions = {(code.vocab, code.code): i for i, code in enumerate(codes)}

    def read(self, vocab: str, raw: str | None) -> CodeReading:
        """The first code that `raw` spells, or why it spells none."""
        return self.read_cell(vocab, raw)[0]

    def read_cell(self, vocab: str, raw: str | None) -> tuple[CodeReading, ...]:
        """The codes of a cell, at least one; where it cannot be read, why."""
        key = (vocab, raw)
        if key not in self._readings:
            self._readings[key] = tuple(map(self._enter, self._find_codes(vocab, raw)))
        return self._readings[key]

    def _enter(self, code: IcdCode | RowFault) -> CodeReading:
        if isinstance(code, RowFault):
            return CodeReading(-1, code)
        position = self._positions.setdefault((code.vocab, code.code), len(self.codes))
        if position == len(self.codes):
            self.codes.append(code)
        return CodeReading(position)

    def _find_codes(self, vocab: str, raw: str | None) -> Sequence[IcdCode | RowFault]:
        form = self.forms.get(vocab)
        if form is None:
            return [self._find_code(vocab, raw)]
        table, icd10 = choose_table(self.tables, vocab), None
        if (other := BESIDE.get(vocab, "")) in self.forms:
            icd10 = code_cells.Reading(self.forms[other], choose_table(self.tables, other))
        return [
            cell.fault or self._look_up(cell.vocab or vocab, str(cell.code))
            for cell in code_cells.read_cell(raw, form, table, icd10)
        ]

    def _look_up(self, vocab: str, code: str) -> IcdCode:
        table = choose_table(self.tables, vocab)
        return IcdCode(vocab, code, *find_phecodes(code, table, self.fallback))

    def _find_code(self, vocab: str, raw: str | None) -> IcdCode | RowFault:
        if vocab == OTHER:
            text = (raw or "").strip()
            if not text:
                return RowFault("missing", Reason.EMPTY_CODE)
            token = make_token(text)
            return IcdCode(OTHER, token, (token,), OTHER)
        code, fault = normalise_code(raw, vocab, pad_undotted=self.pad_undotted)
        if code is None:
            name = fault or ""
            return RowFault(name, classify_fault(raw, vocab, name))
        if self.strict and is_foreign_code(code, vocab):
            return RowFault(UNMAPPED, Reason.WRONG_VOCABULARY)
        return self._look_up(vocab, code)
