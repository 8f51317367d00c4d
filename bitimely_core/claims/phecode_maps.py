"""Reads published PheCode maps, and refuses those that a spreadsheet has damaged (section 5).

No map is shipped. `map_files` opens their tables, `map_layouts` says what the columns mean, and
`map_damage` tests them.
"""

from __future__ import annotations

import operator
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from bitimely_core.claims import codes
from bitimely_core.claims.map_damage import (
    Damage,
    MapRow,
    damage_error,
    find_damage,
    find_stray_codes,
    pad_zeros,
)
from bitimely_core.claims.map_files import DOWNLOAD_HINT, MapSheet, locate_map, open_sheet
from bitimely_core.claims.map_layouts import VOCABULARIES, MapLayout, detect_layout
from bitimely_core.errors import (
    Finding,
    Reason,
    check_choice,
    input_error,
    input_warning,
    safe_text,
    usage_error,
)

PLAIN_KEY = re.compile(r"[A-Z0-9.]+", re.ASCII)
SEXES = {"male": 1, "female": 2}
TRUE = {"1", "true"}
ZERO_REPAIR = "phecode-zeros"

MapFacts = dict[str, str | int | dict[str, int]]
"""File name, SHA-256, layout, rows and repairs of a map file, as the manifest keeps them."""


@dataclass
class PhecodeMap:
    """Code -> PheCodes, by vocabulary: icd9 (with icd9cm), icd10 (WHO), icd10cm."""

    tables: dict[str, dict[str, tuple[str, ...]]]
    names: dict[str, str] = field(default_factory=dict)  # PheCode -> phenotype
    categories: dict[str, str] = field(default_factory=dict)
    # PheCode -> PheCodes and ranges `001-009.99`
    exclusions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # PheCode of one sex alone -> 1 male, 2 female
    sexes: dict[str, int] = field(default_factory=dict)
    facts: list[MapFacts] = field(default_factory=list)  # of each file, for the manifest
    findings: list[Finding] = field(default_factory=list)


def group_phecodes(rows: Iterable[MapRow]) -> dict[str, dict[str, tuple[str, ...]]]:
    """(vocab, code, phecode) in any order -> the PheCodes of each code, distinct and in numeric
    order.
    """
    tables: dict[str, defaultdict[str, set[str]]] = {}
    for vocab, code, phecode in rows:
        tables.setdefault(vocab, defaultdict(set))[code].add(phecode)
    return {
        vocab: {code: _sort_phecodes(phecodes) for code, phecodes in table.items()}
        for vocab, table in tables.items()
    }


def _sort_phecodes(phecodes: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(phecodes, key=codes.phecode_sort_key))


def is_excluded(phecode: str, items: Iterable[str]) -> bool:
    """Whether a PheCode is among exclusions: PheCodes, and ranges `714-716.99` that include both
    ends.
    """
    letters, number, _ = codes.phecode_sort_key(phecode)
    for item in items:
        low, dash, high = item.partition("-")
        first, last = (codes.phecode_sort_key(text)[1] for text in (low, high))
        if item == phecode or (dash and not letters and first <= number <= last):
            return True
    return False


def related_phecodes(
    codemap: PhecodeMap, defining: Mapping[str, Iterable[str]]
) -> dict[str, frozenset[str]]:
    """Label -> the PheCodes that exclude its controls.

    They are in the exclusions of the label's own PheCodes (`label_rules.find_defining_phecodes`).
    """
    every: set[str] = set()
    for table in codemap.tables.values():
        every.update(*table.values())
    related = {}
    for label, phecodes in defining.items():
        items = list(
            chain.from_iterable(codemap.exclusions.get(phecode, ()) for phecode in phecodes)
        )
        related[label] = frozenset(phecode for phecode in every if is_excluded(phecode, items))
    return related


class MapOptions(NamedTuple):
    """How the tables of a map are read."""

    # `phecode-zeros` restores the leading zeros of PheCodes if the map has no other damage
    repair: str | None
    keep_ignored: bool  # keep the catalog's PheCodes marked Ignore
    # vocabulary of the ICD-10 codes, and of a plain table without one (default icd9)
    vocab: str | None


def read_map(
    paths: Sequence[str | Path],
    *,
    repair: str | None = None,
    overrides: str | Path | None = None,
    keep_ignored: bool = False,
    vocab: str | None = None,
) -> PhecodeMap:
    """One or more map files as one map.

    Args:
        paths: a name of `PUBLISHED_MAPS`; .csv, .csv.gz, .parquet; .zip, .whl or .tar.gz with such
            a table inside, or `ARCHIVE/member`; `pkg:NAME[/path]` of an installed package.
        repair: as in `MapOptions`, with keep_ignored and vocab.
        overrides: a csv with code, vocab, phecode that replaces the PheCodes of its codes; an empty
            PheCode removes the code.
        keep_ignored: as in `MapOptions`.
        vocab: as in `MapOptions`.

    Raises:
        UserError: no_input without a path (exit 2); map_damaged, format, not_found, duplicate_key
            for two tables of one vocabulary.
    """
    if not paths:
        raise usage_error(
            "no PheCode map",
            "expected --phecode-map, none is shipped",
            DOWNLOAD_HINT,
            code=Reason.NO_INPUT,
        )
    check_choice("--map-repair", repair or None, (ZERO_REPAIR,))
    options = MapOptions(repair, keep_ignored, vocab)
    codemap = PhecodeMap({})
    for path in map(locate_map, map(str, paths)):
        _add_table(codemap, open_sheet(path), options)
        _add_companions(path, codemap)
    if overrides:
        _apply_overrides(codemap, open_sheet(str(overrides)))
    return codemap


def _add_table(codemap: PhecodeMap, sheet: MapSheet, options: MapOptions) -> None:
    """Add one table, checked."""
    layout = _require_layout(sheet)
    rows, left_out = _select_rows(sheet, layout, options)
    stray = find_stray_codes(rows)
    rows = [row for row in rows if row[1] not in stray]
    damage = find_damage(rows, layout, sheet.numbers)
    odd = "ICD-9 codes have no form of ICD-9 and are left out"
    codemap.findings += _warn_of_texts(sheet.name, odd, stray)
    if layout.name == "plain":
        numbers = damage.pop(Damage.SPREADSHEET_NUMBERS, [])
        odd = "numbers are written as a spreadsheet writes them: check the map"
        codemap.findings += _warn_of_texts(sheet.name, odd, numbers)
    is_repaired = set(damage) == {Damage.LOST_ZEROS} and options.repair == ZERO_REPAIR
    if damage and not is_repaired:
        raise damage_error(sheet.name, damage)
    repaired = [(vocab, code, pad_zeros(phecode)) for vocab, code, phecode in rows]
    pairs = set(repaired if is_repaired else rows)
    facts: MapFacts = {
        "file": sheet.name,
        "sha256": sheet.sha256,
        "layout": layout.name,
        "rows": len(sheet.columns["phecode"]),
        "pairs": dict(sorted(Counter(vocab for vocab, _, _ in pairs).items())),
        "left_out": dict(sorted(left_out.items())),
        "repaired": sum(map(operator.ne, rows, repaired)) if is_repaired else 0,
    }
    tables = group_phecodes(pairs)
    if twice := sorted(tables.keys() & codemap.tables.keys()):
        raise input_error(
            Reason.DUPLICATE_KEY,
            f"a second table for {', '.join(twice)}",
            "expected one a vocabulary",
            "Give one of them",
            file=sheet.name,
        )
    codemap.tables.update(tables)
    codemap.facts.append(facts)
    _add_columns(codemap, sheet, layout, pad_zeros if is_repaired else str.strip)


def _require_layout(sheet: MapSheet) -> MapLayout:
    """The layout of a table. Raises UserError: format."""
    layout = detect_layout(sheet.columns)
    if layout is None:
        columns = ", ".join(map(safe_text, list(sheet.columns)[:12])) or "nothing"
        raise input_error(
            Reason.FORMAT,
            f"is in no layout of a PheCode map: found columns {columns}",
            "expected a code column (ICD9, ICD10, ICD, code) and one called phecode",
            file=sheet.name,
        )
    return layout


def _select_rows(
    sheet: MapSheet, layout: MapLayout, options: MapOptions
) -> tuple[list[MapRow], Counter[str]]:
    """The rows that are used, and the number of others by reason. Raises UserError: format where
    none is.

    ICD-9 codes stay as written, to be tested.
    """
    rows, left_out = [], Counter[str]()
    cells = sheet.columns
    ignored = cells.get("ignore bool", [""] * len(cells["phecode"]))
    vocabularies = _read_vocabularies(sheet, layout, options.vocab)
    for vocab, code, phecode, ignore in zip(
        vocabularies, cells[layout.code], cells["phecode"], ignored, strict=True
    ):
        # ICD-9 as written, to be tested; blocks such as A00-A09 are no codes
        text: str | None = code
        if codes.FAMILIES[vocab] != "icd9":
            is_plain = PLAIN_KEY.fullmatch(code.upper())
            text = codes.normalise_code(code, vocab)[0] if is_plain else None
        if not phecode:
            left_out["without_phecode"] += 1
        elif ignore.lower() in TRUE and not options.keep_ignored:
            left_out["ignored"] += 1
        elif not text:
            left_out["unreadable"] += 1
        else:
            rows.append((vocab, text, phecode))
    if not rows:
        raise input_error(
            Reason.FORMAT,
            "maps no code",
            "expected rows with a code and a PheCode",
            "Download it again",
            file=sheet.name,
        )
    return rows, left_out


def _read_vocabularies(sheet: MapSheet, layout: MapLayout, vocab: str | None) -> list[str]:
    """The vocabulary of each row: icd9, icd10 or icd10cm. Raises UserError: format."""
    cells = sheet.columns.get(layout.vocab_column, [""] * len(sheet.columns[layout.code]))
    written = {"": VOCABULARIES[layout.vocab or vocab or "icd9"]}
    for cell in set(cells) - {""}:
        # 9.0 is what a spreadsheet makes of 9
        name = re.sub(r"[^a-z0-9]", "", cell.lower().removesuffix(".0"))
        if name not in VOCABULARIES:
            raise input_error(
                Reason.FORMAT,
                f"names the vocabulary {safe_text(cell)}",
                f"known: {', '.join(VOCABULARIES)}",
                file=sheet.name,
                field=layout.vocab_column,
            )
        written[cell] = VOCABULARIES[name]
    icd10 = vocab or ("icd10" if "who" in Path(sheet.name).name.lower() else "icd9")
    if codes.FAMILIES[icd10] == "icd10":
        for cell, name in written.items():
            written[cell] = icd10 if codes.FAMILIES[name] == "icd10" else name
    return [written[cell] for cell in cells]


def _warn_of_texts(file: str, problem: str, texts: Sequence[str]) -> list[Finding]:
    """A warning of codes or numbers of a map; none where there are none."""
    text = f"{len(texts)} {problem} ({', '.join(map(safe_text, texts[:3]))})"
    warning = input_warning(Reason.MAP_DAMAGED, text, file=file, count=len(texts))
    return [warning] if texts else []


def _add_columns(
    codemap: PhecodeMap, sheet: MapSheet, layout: MapLayout, read_phecode: Callable[[str], str]
) -> None:
    """Add names, categories, exclusions and sexes from the descriptive columns of a table."""

    def describe(column: str | None) -> dict[str, str]:
        """PheCode -> its cell in a column; empty without such a column."""
        cells = sheet.columns.get(column or "", [])
        pairs = zip(sheet.columns["phecode"], cells, strict=False)
        return {read_phecode(phecode): cell for phecode, cell in pairs if phecode and cell}

    codemap.names.update(describe(layout.title))
    codemap.categories.update(describe(layout.category))
    for phecode, text in (describe("excl. phecodes") | describe("exclude_range")).items():
        codemap.exclusions[phecode] = tuple(part.strip() for part in text.split(","))
    for phecode, text in describe("sex").items():
        if text.lower() in SEXES:
            codemap.sexes[phecode] = SEXES[text.lower()]


# --- companions, overrides


def _add_companions(path: str, codemap: PhecodeMap) -> None:
    """Add what the files that are published beside the R export say of its PheCodes."""
    if codemap.facts[-1]["layout"] != "r" or not Path(path).is_file():
        return

    def read(name: str, *wanted: str) -> list[list[str]]:
        """Columns of a file, empty where it has none."""
        file = Path(path).with_name(name)
        columns = open_sheet(str(file)).columns if file.is_file() else {}
        return [columns.get(column, []) for column in wanted]

    phecodes, names, groups = read("pheinfo.csv", "phecode", "description", "group")
    codemap.names.update(zip(phecodes, names, strict=False))
    codemap.categories.update(zip(phecodes, groups, strict=False))
    excluded = defaultdict(list)  # cases of a PheCode are no controls of the target
    pairs = read("phecode_exclude.csv", "code", "exclusion_criteria")
    for phecode, target in zip(*pairs, strict=False):
        excluded[target].append(phecode)
    codemap.exclusions.update({target: tuple(texts) for target, texts in excluded.items()})
    sexes = read("sex_restriction.csv", "phecode", "male_only", "female_only")
    for phecode, male, female in zip(*sexes, strict=False):
        if male.lower() in TRUE:
            codemap.sexes[phecode] = SEXES["male"]
        elif female.lower() in TRUE:
            codemap.sexes[phecode] = SEXES["female"]


def _apply_overrides(codemap: PhecodeMap, sheet: MapSheet) -> None:
    """Replace the PheCodes of the codes of a table; a code without PheCode is removed from the
    map.
    """
    wanted = ("code", "vocab", "phecode")
    if not set(wanted) <= set(sheet.columns):
        expected = f"expected {', '.join(wanted)}"
        raise usage_error("columns are missing", expected, code=Reason.FORMAT, file=sheet.name)
    overrides: dict[tuple[str, str], set[str]] = {}
    for code, vocab, phecode in zip(*(sheet.columns[name] for name in wanted), strict=True):
        family = VOCABULARIES.get(re.sub(r"[^a-z0-9]", "", vocab.lower()), "")
        text = codes.normalise_code(code, family)[0] if family else None
        if text is None or (phecode and not codes.PHECODE.fullmatch(phecode)):
            expected = "expected an ICD code, its vocabulary, a PheCode"
            raise input_error(
                Reason.FORMAT,
                f"row {safe_text(code)}, {safe_text(vocab)}, {safe_text(phecode)}",
                expected,
                file=sheet.name,
            )
        overrides.setdefault((family, text), set()).update({phecode} - {""})
    for (vocab, code), phecodes in overrides.items():
        table = codemap.tables.setdefault(vocab, {})
        table.pop(code, None)
        if phecodes:
            table[code] = _sort_phecodes(phecodes)
    facts: MapFacts = {
        "file": sheet.name,
        "sha256": sheet.sha256,
        "layout": "overrides",
        "rows": len(sheet.columns["code"]),
        "codes": len(overrides),
    }
    codemap.facts.append(facts)
