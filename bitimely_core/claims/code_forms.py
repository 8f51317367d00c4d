"""Finds how the codes of a source are written, by what the map knows under each reading.

The evidence is the first rows of each table: so a source is read alike in one pass, in parts and
on a cluster. What is assumed is said, with the option that settles it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from bitimely_core.claims import code_cells, codes
from bitimely_core.claims.code_cells import EXACT, CodeForm
from bitimely_core.claims.codes import FAMILIES, PhecodeTable, list_shapes, shape_text
from bitimely_core.claims.sources.source_survey import EventReader
from bitimely_core.claims.unknown_dates import count_days
from bitimely_core.errors import Finding, Reason, UserError, input_error, input_warning

FULL_MAP = 5000  # codes: a map with so many knows most diagnoses, a shorter one few on purpose
SAMPLE_ROWS = 100_000
LEAST_ROWS = 11  # rows without which a share says nothing
KNOWN_SHARE = 0.8  # of a few codes in another form, for them to be codes
UNKNOWN_LONG = 1 / 3  # share of long codes that the map lacks, above which some are procedures
LETTERS_SHARE = 0.1  # share of rows with letters behind the code that is no accident
READ_SHARE = 0.05
# five characters, in CPRD with the two digits of the term
READ_CODE = re.compile(r"(?=.{5}(\d\d)?$)([0-9A-Z]{1,4}\.{1,4}|X[A-Z0-9]{4})(\d\d)?", re.ASCII)
LONG_NUMBER = re.compile(r"\d{6,18}", re.ASCII)  # of SNOMED CT: no code of ICD has so many digits
FOREIGN_CODES = {  # codes without PheCodes -> what they are
    LONG_NUMBER: "Numbers of six digits and more are concepts, as of SNOMED CT",
    READ_CODE: "Codes of five characters with points behind them are Read codes",
}
NAMES = {"icd9": "ICD-9", "icd10": "ICD-10"}


@dataclass
class ColumnSample:
    """Codes and dates of the first rows of the tables."""

    cells: dict[str, Counter[str]] = field(default_factory=dict)  # vocabulary -> code as written
    files: dict[str, str] = field(default_factory=dict)  # the first with the vocabulary
    days: Counter[int] = field(default_factory=Counter)  # rows by day


def sample_columns(events: EventReader, vocab: str) -> ColumnSample:
    """The first rows of each table, about `SAMPLE_ROWS`. `vocab`: of rows without one."""
    sample = ColumnSample()
    for table in events.tables:
        rows = 0
        for block in EventReader([table])():
            frame = block.head(SAMPLE_ROWS)
            cells = frame.select("vocab", "code").drop_nulls("code")
            for written, code, n in cells.group_by("vocab", "code").len().iter_rows():
                name = written or vocab
                if name in FAMILIES:
                    sample.cells.setdefault(name, Counter())[code] += n
                    sample.files.setdefault(name, table.file)
            sample.days.update(count_days(frame["date"]))
            rows += frame.height
            if rows >= SAMPLE_ROWS:
                break
    return sample


class _Column(NamedTuple):
    """The cells of one vocabulary, with the table of the map for it."""

    vocab: str
    cells: Mapping[str, int]  # upper case, without blanks around -> rows
    table: PhecodeTable
    icd10: code_cells.Reading | None = None  # of codes of ICD-10 beside those of ICD-9

    @property
    def is_map_full(self) -> bool:
        """Whether the map knows most diagnoses of the vocabulary."""
        return len(self.table) >= FULL_MAP

    def count(self, test: Callable[[str], object]) -> int:
        """Rows whose cell passes a test."""
        return sum(n for text, n in self.cells.items() if test(text))

    def select(self, test: Callable[[str], object]) -> _Column:
        """The column of the cells that pass a test."""
        return self._replace(cells={text: n for text, n in self.cells.items() if test(text)})

    @property
    def rows(self) -> int:
        """Rows of all cells."""
        return sum(self.cells.values())

    def has(self, text: str) -> bool:
        """Whether the map has the code itself; numbers before the point may lack zeros."""
        code = codes.normalise_code(text, self.vocab)[0]
        return bool(code and codes.find_phecodes(code, self.table, EXACT)[0])

    @property
    def shapes(self) -> str:
        """The most frequent shapes."""
        counts: Counter[str] = Counter()
        for text, n in self.cells.items():
            counts[shape_text(text)] += n
        return list_shapes(counts)


class JudgedForms(NamedTuple):
    """The forms of the vocabularies of a source, and what is to be said of them."""

    forms: dict[str, CodeForm]
    findings: list[Finding]


def judge_forms(
    sample: ColumnSample, tables: Mapping[str, PhecodeTable], *, pads: bool, max_bad: float
) -> JudgedForms:
    """How the codes of each vocabulary are written.

    `pads`: codes have lost their zeros, by option. `max_bad`: share of the rows that may be
    unknown. Raises UserError: ambiguous_code for a column that has lost its zeros, bad_code for one
    most of whose codes the map does not know.
    """
    judged = JudgedForms({vocab: CodeForm(vocab, pads=pads) for vocab in FAMILIES}, [])
    for vocab, cells in sorted(sample.cells.items()):
        icd10 = None
        if other := codes.BESIDE.get(vocab):
            icd10 = code_cells.Reading(judged.forms[other], codes.choose_table(tables, other))
        column = _Column(vocab, _trim_cells(cells), codes.choose_table(tables, vocab), icd10)
        try:
            form = _judge_column(column, pads)
            _refuse_unknown(column, form, max_bad)
        except UserError as error:
            error.file = sample.files[vocab]
            raise
        judged.forms[vocab] = form
        place = sample.files[vocab]
        judged.findings.extend(finding.at(place) for finding in _describe_form(column, form))
    return judged


def _trim_cells(cells: Mapping[str, int]) -> Counter[str]:
    """Rows by cell in one spelling, without missing ones."""
    trimmed: Counter[str] = Counter()
    for text, n in cells.items():
        if not code_cells.is_empty(text):
            trimmed[code_cells.fold_cell(text)] += n
    return trimmed


def _judge_column(column: _Column, pads: bool) -> CodeForm:
    """The form of one vocabulary. Raises UserError: ambiguous_code."""
    form = CodeForm(column.vocab, pads=pads, no_point=_judge_points(column))
    if form.family == "icd9":
        if not pads:
            _refuse_lost_zeros(column)
        return form
    reads = column.count(READ_CODE.fullmatch) >= max(LEAST_ROWS, READ_SHARE * column.rows)
    return form._replace(letters=_judge_letters(column), reads=reads)


def _refuse_lost_zeros(column: _Column) -> None:
    """Raises UserError (ambiguous_code) for ICD-9 codes without their leading zeros.

    In such a column no code begins with 0, and the map has most of its short codes with zeros. Else
    short codes are of procedures: 38.93.
    """
    short = column.select(code_cells.SHORT_HEAD.fullmatch)
    if not short.rows or any(text.startswith("0") for text in column.cells):
        return
    if column.is_map_full and 2 * short.count(column.has) < short.rows:
        return
    raise input_error(
        Reason.AMBIGUOUS_CODE,
        f"codes have lost their leading zeros (they look like {short.shapes}), none begins with 0",
        "expected three digits before the point",
        "Write the table again from its origin, with the codes as text; if only zeros before the "
        "first digit are missing, --pad-undotted puts them back",
    )


def _judge_points(column: _Column) -> Literal["all", "exact_long", "exact", "none"]:
    """Which codes without a point are codes of the vocabulary.

    In a column with points they are procedures (CPT, HCPCS), unless the map has nearly all of them.
    In a column without, long ones that the map lacks are, where they are many.
    """
    plain = column.select(code_cells.NO_POINT[FAMILIES[column.vocab]].fullmatch)
    if not column.is_map_full or not plain.rows:
        return "all"
    if plain.rows < column.count(lambda text: "." in text):
        is_known = plain.count(plain.has) >= KNOWN_SHARE * plain.rows
        return "exact" if is_known else "none"
    long = plain.select(lambda text: len(text) == code_cells.LONG)
    knows_long = sum(len(code) > code_cells.LONG for code in column.table) > FULL_MAP / 2
    unknown = long.rows - long.count(long.has)
    is_mixed = unknown >= max(LEAST_ROWS, UNKNOWN_LONG * long.rows)
    return "exact_long" if knows_long and is_mixed else "all"


def _judge_letters(column: _Column) -> Literal["code", "certainty", "dagger"]:
    """What letters directly behind codes of ICD-10 are."""
    if column.count(_has_dagger) and not column.count(re.compile(r".*[GVZ][RLB]?").fullmatch):
        return "dagger"
    certain = Counter[str]()  # code without its letters -> rows
    for text, n in column.cells.items():
        qualified = code_cells.QUALIFIED.fullmatch(text)
        if qualified and column.has(qualified[1]) and not column.has(text):
            certain[qualified[1]] += n
    least = max(LEAST_ROWS, LETTERS_SHARE * column.rows)
    is_certain = certain.total() >= least and len(certain) > 1
    return "certainty" if is_certain and column.vocab == "icd10" else "code"


def _has_dagger(text: str) -> bool:
    """Whether a D, the dagger of HES, is behind a code."""
    match = code_cells.DAGGER.fullmatch(text)
    return match is not None and match[2] == "D"


def _refuse_unknown(column: _Column, form: CodeForm, max_bad: float) -> None:
    """Raises UserError: wrong_vocabulary for codes of the other one, bad_code where a full map
    knows too few of the codes.
    """
    if column.table and not column.is_map_full:
        return
    unknown = column.select(lambda text: not _is_known(text, form, column))
    if column.rows < LEAST_ROWS or unknown.rows <= max_bad * column.rows:
        return
    name, other = NAMES[form.family], codes.get_other_family(form.vocab)
    others = unknown.count(lambda text: code_cells.read_cell(text, CodeForm(other), {})[0].code)
    if 2 * others > unknown.rows:
        raise input_error(
            Reason.WRONG_VOCABULARY,
            f"{others} of {column.rows} rows hold codes of {NAMES[other]} (they look like "
            f"{unknown.shapes})",
            f"expected codes of {name}",
            f"Give --col vocab={other}, or --col vocab=NAME of the column that states the "
            "vocabulary, or --icd10-from DATE",
        )
    if not column.table:  # the rows may be for the label rules alone
        return
    hint = (
        f"Give the column with codes of {name} as --col code=NAME, or the vocabulary of the codes "
        "as --col vocab=icd9 or icd10, and a --phecode-map of it"
    )
    for pattern, what in FOREIGN_CODES.items():
        if 2 * unknown.count(pattern.fullmatch) > unknown.rows:
            hint = (
                f"{what}, without PheCodes: write the codes of ICD-10 that a map of the NLM or the "
                "NHS gives for them in a column icd10"
            )
    raise input_error(
        Reason.BAD_CODE,
        f"{unknown.rows} of {column.rows} rows hold no code of {name} that the map knows (they "
        f"look like {unknown.shapes})",
        f"more than --max-bad {max_bad:g}",
        hint,
    )


def _is_known(text: str, form: CodeForm, column: _Column) -> bool:
    """Whether a cell holds a code that the map knows, or without a map one of the vocabulary's
    form, or a diagnosis that is known not to be one.
    """
    return any(
        cell.fault == code_cells.NOT_DIAGNOSED
        or (cell.code and not column.table)
        or code_cells.is_mapped(cell, column.table, column.icd10)
        for cell in code_cells.read_cell(text, form, column.table, column.icd10)
    )


def _has_both(text: str, form: CodeForm, column: _Column) -> bool:
    """Whether a cell holds a code of ICD-10 beside one of ICD-9."""
    cells = code_cells.read_cell(text, form, column.table, column.icd10)
    return any(cell.vocab for cell in cells)


def _describe_form(column: _Column, form: CodeForm) -> Iterator[Finding]:
    """A line for each assumption that decides on rows of the column."""
    short = column.select(code_cells.SHORT_HEAD.fullmatch)
    if form.family == "icd9" and short.rows:
        yield _describe_short(short, form)
    if form.no_point != "all":
        yield from _describe_points(column, form)
    if n_both := column.count(lambda text: _has_both(text, form, column)):
        problem, rule = "cells hold codes of ICD-9 and of ICD-10", "each is read as its own"
        yield input_warning(Reason.CODE_FORM, problem, rule, count=n_both)
    if form.letters == "certainty":
        yield input_warning(
            Reason.CODE_FORM,
            "letters directly behind codes of ICD-10 are read as certainty (G confirmed, V "
            "suspected, A ruled out, Z state after) and side (R, L, B)",
            "diagnoses with V, A or Z are dropped",
            "Give --col vocab=icd10cm if the letters belong to the codes",
        )


def _describe_short(short: _Column, form: CodeForm) -> Finding:
    """What is assumed of codes with fewer than three digits before the point."""
    problem = f"codes with fewer than three digits before the point (they look like {short.shapes})"
    if form.pads:
        rule = "are taken for diagnoses that have lost their zeros"
        hint = "Leave --pad-undotted out if they are procedures"
    else:
        rule = (
            "are taken for procedures and are no diagnoses: others have kept their zeros, or the "
            "map lacks them"
        )
        hint = "Give --pad-undotted if they are diagnoses that have lost their zeros"
    return input_warning(Reason.CODE_FORM, problem, rule, hint, count=short.rows)


def _describe_points(column: _Column, form: CodeForm) -> Iterator[Finding]:
    """What is assumed of codes without a point, where it decides on any."""
    plain = column.select(
        lambda text: (
            code_cells.NO_POINT[form.family].fullmatch(text)
            and code_cells.read_cell(text, form, column.table)[0].fault
        )
    )
    if plain.rows:
        yield input_warning(
            Reason.CODE_FORM,
            f"codes without a point that the map lacks (they look like {plain.shapes})",
            "are taken for procedures and are no diagnoses",
            "Write the point if they are codes of " + NAMES[form.family],
            count=plain.rows,
        )
