"""Finds the columns of codes of a table of claims, and the vocabularies that their names state."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from bitimely_core.claims.codes import FAMILIES, normalise_code
from bitimely_core.claims.sources import words
from bitimely_core.claims.sources.columns import peek_columns, select_columns, warn_of_rows
from bitimely_core.claims.sources.source_table import OpenTable, Stated
from bitimely_core.errors import Finding, Reason, input_warning, safe_text, usage_error

CERTAINTIES = words.WORDS["certainties"]
CODE_NAMES = set(map(words.fold_name, words.WORDS["claims"]["code"]))
MAIN_NAMES = set(map(words.fold_name, words.WORDS["wide"]["main"]))
KINDS = words.index_words("cells_of_kinds")
# a folded name of a column of codes without its numbers
STEM = re.compile(
    "(?!poa)(?:{before})*(?:{diagnosis})+(?:{behind})*".format(
        **{part: "|".join(texts) for part, texts in words.WORDS["wide"].items()}
    )
)
VOCABULARY = re.compile(
    r"(?:icd|cim|cie|(?<![^\W_])i|dx(?=(?:9|10)code))[\W_]*(9|10)(?!\d)[\W_]*(cm)?",
    re.IGNORECASE | re.ASCII,
)
VERSION = re.compile(r"version|vrsn|vers?")  # in the folded name of a column of vocabularies
KEY = re.compile(r"(?<!c)id$", re.IGNORECASE)  # of a name such as DIAGNOSISID, not of cid
# a code behind its vocabulary: ICD10CM:E11.9, ICD-9-CM 250.00
PREFIXED_CODE = re.compile(r"([A-Za-z]{2}[\w -]*?)(?:\s*[:|/]+\s*|\s+)([A-Za-z]?\d.*)", re.ASCII)
CODED_ROWS = 100_000  # of the columns that are read, whose codes are compared
CODE_LIKE = re.compile(r"(?=.*\d).{3,}")  # a text that may be a code, of any vocabulary
# of UK Biobank: 41270-0.0, p41270, participant.p41270
FIELD = re.compile(r"(?:participant\.)?[fp]?[._]?(\d{5})(?!\d).*", re.ASCII)
CODE_FIELDS = {codes: vocab for vocab, (codes, _) in words.WORDS["fields"].items()}


def find_wide_columns(names: Sequence[str], pattern: str | None) -> tuple[str, ...]:
    """The columns of codes of a table with several: main diagnoses and a series with numbers, one
    for ICD-9 beside one for ICD-10, or the arrays of UK Biobank.

    `pattern`: of their names, as of files, or names with commas between them; a name without either
    is that of a single column.
    """
    if pattern is not None:
        return match_pattern(names, pattern)
    if fields := [name for name in names if find_field(name) in CODE_FIELDS]:
        return tuple(sorted(fields, key=list_numbers))
    series = _find_series(names)
    apart = [name for name in names if name not in series]
    if both := _find_two_vocabularies(apart):
        return both
    return _join_main(apart, series)


def _join_main(names: Sequence[str], series: Sequence[str]) -> tuple[str, ...]:
    """The columns of one diagnosis each, which a row has beside each other, and the series.

    None where one column alone holds the codes.
    """
    if any(words.fold_name(name) in CODE_NAMES - MAIN_NAMES for name in names):
        return ()
    main = [name for name in names if words.fold_name(name) in MAIN_NAMES]
    return (*main, *series) if series or len(main) > 1 else ()


def _find_two_vocabularies(names: Sequence[str]) -> tuple[str, ...]:
    """The columns of codes whose names state ICD-9 or ICD-10, where there are both."""
    stated = {name: _match_name(name) for name in names if _is_code_name(name)}
    families = {FAMILIES[vocab] for vocab in stated.values() if vocab}
    return tuple(filter(stated.get, stated)) if len(families) > 1 else ()


def _find_series(names: Sequence[str]) -> list[str]:
    """The columns of codes that differ by a number, which is not that of their vocabulary."""
    coded = [
        name for name in names if re.search(r"\d", name) and STEM.fullmatch(_cut_numbers(name))
    ]
    numbered = {_cut_numbers(name) for name in coded if re.search(r"\d", VOCABULARY.sub("", name))}
    # icd_9 and icd_10 beside icd_1 are no vocabularies
    return sorted((name for name in coded if _cut_numbers(name) in numbered), key=list_numbers)


def _cut_numbers(name: str) -> str:
    return re.sub(r"\d", "", words.fold_name(name))


def _is_code_name(name: str) -> bool:
    """Whether a name is that of a column of codes, perhaps with the number of its vocabulary."""
    return words.fold_name(name) in CODE_NAMES or STEM.fullmatch(_cut_numbers(name)) is not None


def find_field(name: str) -> str:
    """The field of UK Biobank that a column holds a part of; "" where its name has none."""
    match = FIELD.fullmatch(name)
    return match[1] if match else ""


def match_pattern(names: Sequence[str], pattern: str, key: str = "code") -> tuple[str, ...]:
    """The columns that `--col KEY=PATTERN` names. Raises UserError: config (exit 2)."""
    if not re.search(r"[*?\[,]", pattern):
        return ()
    wide = list[str]()
    for part in map(str.strip, pattern.split(",")):
        matches = [name for name in names if fnmatchcase(name.lower(), part.lower())]
        if not matches:
            raise usage_error(
                f"--col {key}={safe_text(part)} names no column",
                f"found {', '.join(map(safe_text, names[:60]))}",
            )
        wide += sorted(matches, key=list_numbers)
    return tuple(dict.fromkeys(wide))


def list_numbers(name: str) -> list[int]:
    """Sort key of names that differ by a number: dx2 comes before dx10."""
    return list(map(int, re.findall(r"\d+", name)))


def match_vocabularies(columns: Sequence[str]) -> dict[int, str]:
    """Number of a column of codes, from 1 on -> the vocabulary that its name states; {} where not
    all state one, or all the same.
    """
    stated = list(map(_match_name, columns))
    if None in stated or len(set(stated)) < 2:
        return {}
    return {i: vocab for i, vocab in enumerate(stated, 1) if vocab}


def _match_name(column: str) -> str | None:
    """The vocabulary that the name of a column states."""
    if field := CODE_FIELDS.get(find_field(column)):
        return field
    match = VOCABULARY.search(column)
    return f"icd{match[1]}{(match[2] or '').lower()}" if match else None


def find_versions(names: Sequence[str], codes: Sequence[str]) -> tuple[str, ...]:
    """The columns of the vocabularies of columns of codes, each called as its own: `dx_ver` beside
    `dx`, ICD_DGNS_VRSN_CD1 beside ICD_DGNS_CD1. Empty where one has none.
    """
    version_of = {
        _cut_version(name): name for name in names if VERSION.search(words.fold_name(name))
    }
    versions = [version_of.get(_cut_version(code), "") for code in codes]
    return tuple(versions) if all(versions) else ()


def _cut_version(name: str) -> str:
    """A folded name without the words that tell the code from its version."""
    return re.sub(r"codes?|cd", "", VERSION.sub("", words.fold_name(name)))


def find_vocabulary(
    code_column: str, constant: str | None, since: int | None
) -> tuple[str, Stated]:
    """The vocabulary of rows without one, and what states it."""
    by_name = _match_name(code_column)
    if constant or since is not None:
        return constant or by_name or "icd9", "surely"
    return (by_name, "by name") if by_name else ("icd9", "nowhere")


def report_other_codes(table: OpenTable, wide: Sequence[str]) -> list[Finding]:
    """A warning of columns that hold codes, by their names or since they are those of the columns
    that are read, but are not read.

    `wide`: the columns of codes that are read where there are several.
    """
    read = [*wide] or [table.columns["code"]]
    unread = [name for name in table.list_unread() if name not in read and not KEY.search(name)]
    named = {*words.find_lookalikes("diagnosis", unread), *_find_series(unread)}
    coded = select_columns(table, [name for name in unread if name in named], _is_code)
    same = select_columns(table, unread, _list_codes(table, read).__contains__) if unread else []
    others = [name for name in unread if name in {*coded, *same}]
    listed = " and ".join(map(safe_text, others))
    sources = f"{safe_text(read[0])}{' and others like it' if wide else ''}"
    return warn_of_rows(
        len(others),
        Reason.HEADER,
        "columns of codes are not read",
        f"{listed}; the code is read from {sources}",
        hint=f"Give --col code={','.join(map(safe_text, [*read, *others]))} to read all of them",
        file=table.file,
        row=1,
    )


def _list_codes(table: OpenTable, names: Sequence[str]) -> set[str]:
    """The first codes of columns, in any form."""
    texts = itertools.chain(*peek_columns(table, names, CODED_ROWS).values())
    return set(filter(CODE_LIKE.fullmatch, texts))


def find_certainties(names: Sequence[str], wide: Sequence[str]) -> tuple[str, ...]:
    """The columns of certainties of columns of codes, a series with as many: SUSPECT1, SUSPECT2."""
    alike = sorted(words.find_lookalikes("certainty", names), key=list_numbers)
    stems = {_cut_numbers(name) for name in alike}
    return tuple(alike) if len(alike) == len(wide) > 1 and len(stems) == 1 else ()


def report_certainties(table: OpenTable) -> list[Finding]:
    """A warning of a column that is called and written as one of certainties, but is not read."""
    if "certainty" in table.columns:
        return []
    alike = words.find_lookalikes("certainty", table.list_unread())
    states = {*CERTAINTIES["not_diagnosed"], *CERTAINTIES["diagnosed"], *CERTAINTIES["yes"], "0"}
    return [
        input_warning(
            Reason.HEADER,
            f"{safe_text(name)} may state which diagnoses are suspected or ruled out",
            "not read: they count as the disease",
            f"Give --col certainty={safe_text(name)} to leave them out",
            file=table.file,
            row=1,
        )
        for name in select_columns(table, alike, lambda text: text.lower() in states)[:1]
    ]


def report_kinds(table: OpenTable, default: str) -> list[Finding]:
    """A warning of a column that is written as one of kinds of claims, but is not read.

    `default`: the kind of rows that state none.
    """
    unread = [] if "source" in table.columns else table.list_unread()
    cells = peek_columns(table, unread)
    kinds = {name: meant for name in cells if (meant := _read_kinds(cells[name]))}
    return [
        input_warning(
            Reason.HEADER,
            f"{safe_text(name)} may tell the kinds of the claims, which label rules need",
            f"not read: all rows are {default}",
            " ".join(
                [f"Give --col source={safe_text(name)}", *map(_map_word, sorted(meant.items()))]
            ),
            file=table.file,
            row=1,
        )
        for name, meant in list(kinds.items())[:1]
    ]


def _map_word(pair: tuple[str, str]) -> str:
    """The option that states the kind of a word."""
    return f"--source-value {safe_text(pair[0])}={pair[1]}"


def _read_kinds(texts: Sequence[str]) -> dict[str, str]:
    """Word in lower case -> kind of claims; {} for a column whose words mostly are none, or all the
    same.
    """
    written = {text.lower() for text in texts}
    meant = {
        text: KINDS[words.fold_name(text)] for text in written if words.fold_name(text) in KINDS
    }
    return meant if len(set(meant.values())) > 1 and 2 * len(meant) > len(written) else {}


def report_versions(
    table: OpenTable, wide: Sequence[str], meanings: Mapping[str, str]
) -> list[Finding]:
    """A warning of a column that is called and written as one of vocabularies, but is not read.

    `wide`: the columns of codes where there are several; `meanings`: folded word -> vocabulary.
    """
    if "vocab" in table.columns:
        return []
    unread = [name for name in table.list_unread() if name not in wide]
    alike = words.find_lookalikes("vocab", unread)
    columns = select_columns(
        table, alike, lambda text: meanings.get(words.fold_name(text)) in FAMILIES
    )
    return [
        input_warning(
            Reason.HEADER,
            f"{safe_text(name)} may hold the vocabularies of the codes",
            "not read",
            f"Give --col vocab={safe_text(name)} to read it",
            file=table.file,
            row=1,
        )
        for name in columns[:1]
    ]


def _is_code(text: str) -> bool:
    """Whether a text has the form of a code of a diagnosis."""
    return any(normalise_code(text, vocab)[0] for vocab in FAMILIES)


def split_prefix(
    text: str | None, vocabularies: Mapping[str, str]
) -> tuple[str | None, str | None]:
    """Vocabulary and code of a cell; no vocabulary where the cell has none.

    `vocabularies`: folded word -> vocabulary.
    """
    match = PREFIXED_CODE.fullmatch(text.strip()) if text else None
    if match and words.fold_name(match[1]) in vocabularies:
        return match[1], match[2]
    return None, text
