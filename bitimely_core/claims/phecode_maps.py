"""Published PheCode maps, read in their layouts and refused when a spreadsheet has damaged them
(section 5).

No map is shipped. Spreadsheets remove leading zeros, after which `1` is both 001 and 001.0: such a
table is refused. Archives and installed
packages are read in place: nothing is extracted, nothing imported.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import re
import tarfile
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

import polars as pl

from bitimely_core import storage
from bitimely_core.claims import codes
from bitimely_core.errors import Finding, Reason, UserError, input_error, safe_text, usage_error
from bitimely_core.formats.csv_text import parse_header, parse_records, split_lines
from bitimely_core.formats.text import decode_table
from bitimely_core.system_errors import raise_system_error

MAX_BYTES = 1 << 28  # bytes of a table when unpacked; the largest one in circulation has 30 MB
BLOCK = 1 << 20  # bytes
FULL_ROWS = 10_000  # ICD-9 rows from which on a 1.2 table must be complete
# of the ICD-9 codes of such a table: fewer in no form of ICD-9 are errors of its authors
# (PhecodeX has 51.692), not damage
STRAY_SHARE = 1e-3
TABLE_ENDINGS = (".csv", ".csv.gz", ".parquet")
ARCHIVE_ENDINGS = (".zip", ".whl", ".tar.gz", ".tgz", ".tar")
SEXES = {"male": 1, "female": 2}
REPAIRS = ("phecode-zeros",)
PREFERRED_TABLE = "phecode12.csv"  # of an archive with several tables
PACKAGE = "phetk"  # has all published maps
PUBLISHED_MAPS = {  # name -> table of PheTK, and licence
    "phecode12": (
        "phecode12.csv",
        "PheCode 1.2: cite phewascatalog.org; the package is under GPL-3.0",
    ),
    "phecodex": (
        "phecodeX.csv",
        "PhecodeX states no licence of its own; the package is under GPL-3.0",
    ),
    "phecodex-who": (
        "phecodeX_WHO.csv",
        "PhecodeX states no licence of its own; the package is under GPL-3.0",
    ),
}
DOWNLOAD_HINT = "Get the full PheCode 1.2 map with `pip download --no-deps phetk` and give the .whl file as --phecode-map"

NUMERIC = re.compile(r"\d+(\.\d*)?", re.ASCII)
PLAIN_KEY = re.compile(r"[A-Z0-9.]+", re.ASCII)
VOCABULARIES = {
    "icd9": "icd9",
    "icd9cm": "icd9",
    "9": "icd9",
    "icd10": "icd10",
    "icd10who": "icd10",
    "icd10cm": "icd10cm",
    "10": "icd10cm",
}


@dataclass(frozen=True, kw_only=True)
class MapLayout:
    """Columns by which a published table is recognised, and those that are read; lower-case
    names.
    """

    name: str
    needs: frozenset[str]
    code: str  # column
    vocab: str | None = None  # of all rows
    vocab_column: str | None = None
    title: str | None = None  # column with the PheCode's name
    category: str | None = None
    single: bool = False  # one row an ICD-9 code


def _make_catalog_layout(column: str) -> MapLayout:
    needs = frozenset({column, f"{column} string", "phecode"})
    return MapLayout(
        name=f"catalog-{column}",
        needs=needs,
        code=column,
        vocab=VOCABULARIES[column],
        title="phenotype",
        single=column == "icd9",
    )


_phetk = partial(
    MapLayout, code="icd", vocab_column="flag", title="phecode_string", category="phecode_category"
)

LAYOUTS = (
    *(_make_catalog_layout(column) for column in ("icd9", "icd10", "icd10cm")),
    _phetk(name="phetk-1.2", needs=frozenset({"phecode", "icd", "flag", "phecode_unrolled"})),
    _phetk(name="phetk-x", needs=frozenset({"phecode", "icd", "flag", "code_val"})),
    MapLayout(
        name="r",
        needs=frozenset({"vocabulary_id", "code", "phecode"}),
        code="code",
        vocab_column="vocabulary_id",
        single=True,
    ),
    *(
        MapLayout(
            name="plain",
            needs=frozenset({name, "phecode"}),
            code=name,
            vocab=name,
            vocab_column="vocab",
        )
        for name in VOCABULARIES
    ),
    *(
        MapLayout(name="plain", needs=frozenset({name, "phecode"}), code=name, vocab_column="vocab")
        for name in ("icd", "code")
    ),
)


MapFacts = dict[str, str | int | dict[str, int]]
"""File name, SHA-256, layout, rows and repairs of a map file, as the manifest keeps them."""


class MapSheet(NamedTuple):
    """A table as text."""

    name: str  # of the file or of the member of an archive
    sha256: str
    columns: dict[str, list[str]]  # lower-case name -> cells
    numbers: frozenset[str]  # columns that were stored as numbers
    # of a malformed record: raised only if this is the table to read
    fault: UserError | None = None


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


def group_phecodes(rows: Iterable[tuple[str, str, str]]) -> dict[str, dict[str, tuple[str, ...]]]:
    """(vocab, code, phecode) in any order -> the PheCodes of each code, distinct and in numeric
    order.
    """
    grouped: dict[str, defaultdict[str, set[str]]] = {}
    for vocab, code, phecode in rows:
        grouped.setdefault(vocab, defaultdict(set))[code].add(phecode)
    return {
        vocab: {code: tuple(sorted(own, key=codes.phecode_sort_key)) for code, own in table.items()}
        for vocab, table in grouped.items()
    }


def is_excluded(phecode: str, items: Iterable[str]) -> bool:
    """Whether a PheCode is among exclusions, each a PheCode or a range `714-716.99` with both ends
    included.
    """
    prefix, number, _ = codes.phecode_sort_key(phecode)
    for item in items:
        low, dash, high = item.partition("-")
        if item == phecode or (
            dash
            and not prefix
            and codes.phecode_sort_key(low)[1] <= number <= codes.phecode_sort_key(high)[1]
        ):
            return True
    return False


def related_phecodes(
    codemap: PhecodeMap, defining: Mapping[str, Iterable[str]]
) -> dict[str, frozenset[str]]:
    """Label -> the PheCodes that exclude its controls: those in the exclusions of the label's own
    (`find_defining_phecodes`).
    """
    every = {
        phecode
        for table in codemap.tables.values()
        for found in table.values()
        for phecode in found
    }
    items = {
        name: [item for phecode in own for item in codemap.exclusions.get(phecode, ())]
        for name, own in defining.items()
    }
    return {
        name: frozenset(phecode for phecode in every if is_excluded(phecode, own))
        for name, own in items.items()
    }


def locate_map(path: str) -> str:
    """The table of a published map given by its name: in a wheel of PheTK in the current folder,
    else in the installed package. Other paths stay as they are.

    Raises UserError: not_found (exit 2) for a name whose table is in neither.
    """
    if path.lower() not in PUBLISHED_MAPS or Path(path).exists():
        return path
    member, licence = PUBLISHED_MAPS[path.lower()]
    if wheels := sorted(Path().glob(f"{PACKAGE}-*.whl")):
        return f"{wheels[-1]}/{member}"
    try:
        metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        found = (
            f"no {PACKAGE}-*.whl in the current folder, and the package {PACKAGE} is not installed"
        )
        hint = f"Get it with `pip download --no-deps {PACKAGE}` ({licence})"
        raise usage_error(
            found, f"expected one of them for --phecode-map {path}", hint, code=Reason.NOT_FOUND
        ) from None
    return f"pkg:{PACKAGE}/{member}"


def hash_map(path: str) -> str:
    """SHA-256 of a map file, of a published map its name and that of its wheel; the text of another
    place.
    """
    if (place := locate_map(path)) != path:
        return f"{path.lower()} {storage.hash_file(Path(place).parent) if Path(place).parent.is_file() else place}"
    return storage.hash_file(Path(path)) if Path(path).is_file() else safe_text(path)


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
        repair: `phecode-zeros` restores the leading zeros of PheCodes if the map has no other
            damage.
        overrides: a csv with code, vocab, phecode that replaces the PheCodes of its codes; an empty
            PheCode removes the code.
        keep_ignored: keep the catalog's PheCodes marked Ignore.
        vocab: vocabulary of the ICD-10 codes, and of a plain table without one (default icd9).

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
    if repair is not None and repair not in REPAIRS:
        raise usage_error(f"unknown repair {safe_text(repair)}", f"expected {', '.join(REPAIRS)}")
    codemap = PhecodeMap({})
    for path in map(locate_map, map(str, paths)):
        one = _parse_map(_open_sheet(path), repair=repair, keep_ignored=keep_ignored, vocab=vocab)
        twice = sorted(set(one.tables) & set(codemap.tables))
        if twice:
            text = f"a second table for {', '.join(twice)}"
            raise input_error(
                Reason.DUPLICATE_KEY,
                text,
                "expected one a vocabulary",
                "Give one of them",
                file=path,
            )
        _add_companions(path, one)
        for merged, other in (
            (codemap.tables, one.tables),
            (codemap.names, one.names),
            (codemap.categories, one.categories),
            (codemap.exclusions, one.exclusions),
            (codemap.sexes, one.sexes),
        ):
            merged.update(other)  # type: ignore[arg-type]
        codemap.facts += one.facts
        codemap.findings += one.findings
    if overrides is not None:
        _apply_overrides(codemap, _open_sheet(str(overrides)))
    return codemap


# --- files, archives, packages


def _open_sheet(path: str) -> MapSheet:
    """The table at a path, in an archive, or in an installed package. Raises UserError: not_found
    (exit 2), format, corrupt.
    """
    try:
        sheet = _open_package(path) if path.startswith("pkg:") else _open_file(path)
    except (
        OSError,
        EOFError,
        zlib.error,
        lzma.LZMAError,
        zipfile.BadZipFile,
        tarfile.TarError,
        RuntimeError,
        LookupError,
        ValueError,
    ) as error:
        raise_system_error(error, path, stored=False)
        raise input_error(
            Reason.CORRUPT,
            f"cannot be read ({type(error).__name__})",
            hint="Download it again",
            file=path,
        ) from None
    if sheet.fault:
        raise sheet.fault
    return sheet


def _open_file(path: str) -> MapSheet:
    parts = Path(path).parts
    place = next(
        (file for n in range(len(parts), 0, -1) if (file := Path(*parts[:n])).is_file()), None
    )
    member = "/".join(parts[len(place.parts) :]) if place else path
    if place is None or (member and not place.name.lower().endswith(ARCHIVE_ENDINGS)):
        raise usage_error(
            "no such file", hint="Check the path of the map", code=Reason.NOT_FOUND, file=path
        )
    with place.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        stream.seek(0)
        if zipfile.is_zipfile(stream):
            with zipfile.ZipFile(stream) as archive:
                return _open_member(path, digest, archive.namelist(), archive.open, member)
        stream.seek(0)
        if place.name.lower().endswith(ARCHIVE_ENDINGS):
            with tarfile.open(fileobj=_unpack(stream, place.name), mode="r:") as bundle:
                # opened as they are: a link of the same name is not followed
                items = {item.name: item for item in bundle if item.isfile()}
                return _open_member(
                    path, digest, items, lambda name: bundle.extractfile(items[name]), member
                )
        return _read_sheet(place.name, digest, stream)


def _open_package(path: str) -> MapSheet:
    """A table among the files of an installed package, which is not imported."""
    name, _, member = path.removeprefix("pkg:").partition("/")
    try:
        files = metadata.distribution(name).files or []
    except metadata.PackageNotFoundError:
        raise usage_error(
            f"package {safe_text(name)} is not installed", hint=DOWNLOAD_HINT, code=Reason.NOT_FOUND
        ) from None
    places = {str(file): file.locate() for file in files}
    return _open_member(
        path, None, list(places), lambda name: Path(str(places[name])).open("rb"), member
    )


def _open_member(
    path: str, digest: str | None, names: Iterable[str], opened: Callable[[str], Any], wanted: str
) -> MapSheet:
    """The only map table of a collection of files; `wanted` is the end of its name."""
    candidates = [
        name
        for name in sorted(names)
        if name.lower().endswith(TABLE_ENDINGS) and name.endswith(wanted)
    ]
    found = []
    for name in candidates:
        with opened(name) as stream:
            own = digest or hashlib.file_digest(stream, "sha256").hexdigest()
            if not digest:
                stream.seek(0)
            sheet = _read_sheet(name, own, stream)
        if _detect_layout(sheet) is not None:
            found.append(sheet)
    if len(found) > 1:
        found = [
            sheet for sheet in found if sheet.name.rpartition("/")[2] == PREFERRED_TABLE
        ] or found
    if len(found) == 1:
        return found[0]
    text = f"holds {len(found)} map tables" if found else "holds no map table"
    listed = (
        ", ".join(safe_text(sheet.name) for sheet in found[:5]) or f"{len(candidates)} other tables"
    )
    raise input_error(
        Reason.FORMAT, text, f"found {listed}", "Give the map as ARCHIVE/member", file=path
    )


def _read_sheet(name: str, digest: str, stream: BinaryIO) -> MapSheet:
    """The cells of a csv, csv.gz or Parquet file."""
    data = _unpack(stream, name).getvalue()
    if data[:4] == b"PAR1":
        return _read_parquet(name, digest, data)
    header: tuple[str, ...] = ()
    kept: list[list[str]] = []
    fault = None
    try:
        # as published maps are: their codes are ASCII
        lines = split_lines(decode_table(data, fallback="latin-1"))
        header = parse_header(lines, ",")
        for row, cells, _ in parse_records(lines, len(header), ","):
            if isinstance(cells, UserError):
                raise input_error(
                    cells.code,
                    cells.problem,
                    cells.requirement,
                    "Correct the table; none of it is used",
                    row=row,
                )
            if any(cells):
                kept.append(cells)
    except UserError as error:
        raise_system_error(error)
        error.file, fault = name, error
    columns = {
        column.lower(): [cells[i].strip() for cells in kept] for i, column in enumerate(header)
    }
    return MapSheet(name, digest, columns, frozenset(), fault)


def _unpack(stream: IO[bytes], name: str) -> io.BytesIO:
    """The content of a file that may be packed with gzip."""
    data = _read_limited(stream, name)
    if data[:2] == b"\x1f\x8b":
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as unpacked:
            data = _read_limited(unpacked, name)
    return io.BytesIO(data)


def _read_limited(stream: IO[bytes] | gzip.GzipFile, name: str) -> bytes:
    """Everything, in pieces: one call with a limit reserves all of it."""
    blocks = islice(iter(lambda: stream.read(BLOCK), b""), MAX_BYTES // BLOCK + 1)
    if len(data := b"".join(blocks)) > MAX_BYTES:
        raise input_error(
            Reason.EXPANSION_LIMIT,
            f"more than {MAX_BYTES} bytes",
            "expected a smaller map",
            file=name,
        )
    return data


def _read_parquet(name: str, digest: str, data: bytes) -> MapSheet:
    try:
        frame = pl.read_parquet(io.BytesIO(data))
    except pl.exceptions.PolarsError as error:
        raise_system_error(error, name, stored=False)
        raise input_error(
            Reason.CORRUPT, f"does not open as Parquet ({type(error).__name__})", file=name
        ) from None
    numbers = frozenset(
        column.strip().lower() for column, dtype in frame.schema.items() if dtype.is_numeric()
    )
    columns = {
        column.strip().lower(): frame[column].cast(pl.String).fill_null("").to_list()
        for column in frame.columns
    }
    return MapSheet(name, digest, columns, numbers)


# --- layouts


def _detect_layout(sheet: MapSheet) -> MapLayout | None:
    return next((layout for layout in LAYOUTS if layout.needs <= set(sheet.columns)), None)


def _parse_map(
    sheet: MapSheet, *, repair: str | None, keep_ignored: bool, vocab: str | None
) -> PhecodeMap:
    """One table, checked."""
    layout = _detect_layout(sheet)
    if layout is None:
        found = ", ".join(safe_text(name) for name in list(sheet.columns)[:12]) or "nothing"
        wanted = "expected a code column (ICD9, ICD10, ICD, code) and one called phecode"
        raise input_error(
            Reason.FORMAT,
            f"is in no layout of a PheCode map: found columns {found}",
            wanted,
            file=sheet.name,
        )
    kept, left = _select_rows(sheet, layout, keep_ignored=keep_ignored, vocab=vocab)
    if not kept:
        raise input_error(
            Reason.FORMAT,
            "maps no code",
            "expected rows with a code and a PheCode",
            "Download it again",
            file=sheet.name,
        )
    stray = _find_stray(kept)
    kept = [row for row in kept if row[1] not in stray]
    failed = _find_damage(kept, layout, sheet.numbers)
    findings = []
    if stray:
        text = f"{len(stray)} ICD-9 codes have no form of ICD-9 and are left out ({', '.join(map(safe_text, stray[:3]))})"
        findings.append(
            Finding(Reason.MAP_DAMAGED, text, level="warning", file=sheet.name, count=len(stray))
        )
    if layout.name == "plain" and 5 in failed:
        shown = tuple(failed.pop(5))
        text = f"holds numbers as a spreadsheet writes them ({', '.join(shown)})"
        findings.append(
            Finding(
                Reason.MAP_DAMAGED,
                text,
                level="warning",
                hint="Check the map",
                file=sheet.name,
                examples=shown,
            )
        )
    repaired = 0
    if set(failed) == {3} and repair == "phecode-zeros":
        repaired_rows = [(own, code, _pad_zeros(phecode)) for own, code, phecode in kept]
        repaired = sum(a != b for a, b in zip(kept, repaired_rows, strict=True))
        kept = repaired_rows
    elif failed:
        raise _damage_error(sheet.name, failed)
    pairs = set(kept)
    facts: MapFacts = {
        "file": sheet.name,
        "sha256": sheet.sha256,
        "layout": layout.name,
        "rows": len(sheet.columns["phecode"]),
        "pairs": dict(sorted(Counter(own for own, _, _ in pairs).items())),
        "left_out": dict(sorted(left.items())),
        "repaired": repaired,
    }
    fill = _pad_zeros if repaired else str.strip
    return PhecodeMap(
        group_phecodes(pairs),
        _read_descriptions(sheet, layout.title, fill),
        _read_descriptions(sheet, layout.category or "category_string", fill),
        {
            code: tuple(part.strip() for part in text.split(","))
            for column in ("excl. phecodes", "exclude_range")
            for code, text in _read_descriptions(sheet, column, fill).items()
        },
        {
            code: SEXES[text.lower()]
            for code, text in _read_descriptions(sheet, "sex", fill).items()
            if text.lower() in SEXES
        },
        [facts],
        findings,
    )


def _select_rows(
    sheet: MapSheet, layout: MapLayout, *, keep_ignored: bool, vocab: str | None
) -> tuple[list[tuple[str, str, str]], Counter[str]]:
    """(vocab, code, phecode) of the used rows, and the number of others by reason. ICD-9 codes stay
    as written, to be tested.
    """
    kept, left = [], Counter[str]()
    cells = sheet.columns
    ignored = cells.get("ignore bool", [""] * len(cells["phecode"]))
    for own, code, phecode, ignore in zip(
        _read_vocabularies(sheet, layout, vocab),
        cells[layout.code],
        cells["phecode"],
        ignored,
        strict=True,
    ):
        text: str | None = code
        if codes.FAMILIES[own] == "icd10":
            # blocks such as A00-A09 are no codes
            text = codes.normalise_code(code, own)[0] if PLAIN_KEY.fullmatch(code.upper()) else None
        if not phecode:
            left["without_phecode"] += 1
        elif ignore.lower() in {"1", "true"} and not keep_ignored:
            left["ignored"] += 1
        elif not text:
            left["unreadable"] += 1
        else:
            kept.append((own, text, phecode))
    return kept, left


def _read_vocabularies(sheet: MapSheet, layout: MapLayout, vocab: str | None) -> list[str]:
    """The vocabulary of each row: icd9, icd10 or icd10cm."""
    size = len(sheet.columns[layout.code])
    cells = sheet.columns.get(layout.vocab_column or "", [""] * size)
    fallback = VOCABULARIES[layout.vocab or vocab or "icd9"]
    icd10 = vocab or ("icd10" if "who" in sheet.name.rpartition("/")[2].lower() else None)
    known: dict[str, str] = {"": fallback}
    for cell in set(cells) - {""}:
        name = re.sub(r"[^a-z0-9]", "", cell.lower()).removesuffix(
            "0" if cell.endswith(".0") else ""
        )
        if name not in VOCABULARIES:
            text = f"names the vocabulary {safe_text(cell)}"
            raise input_error(
                Reason.FORMAT,
                text,
                f"known: {', '.join(VOCABULARIES)}",
                file=sheet.name,
                field=layout.vocab_column,
            )
        known[cell] = VOCABULARIES[name]
    if icd10 is not None and codes.FAMILIES[icd10] == "icd10":
        known = {
            cell: icd10 if codes.FAMILIES[own] == "icd10" else own for cell, own in known.items()
        }
    return [known[cell] for cell in cells]


def _read_descriptions(
    sheet: MapSheet, column: str | None, fill: Callable[[str], str]
) -> dict[str, str]:
    """PheCode -> its cell in a descriptive column; empty without such a column."""
    cells = sheet.columns.get(column or "", [])
    return {
        fill(code): cell
        for code, cell in zip(sheet.columns["phecode"], cells, strict=False)
        if code and cell
    }


# --- damage


def _pad_zeros(phecode: str) -> str:
    """A numeric PheCode with leading zeros: 8 -> 008, 38.1 -> 038.1."""
    head, dot, rest = phecode.partition(".")
    return f"{head.zfill(3)}{dot}{rest}" if NUMERIC.fullmatch(phecode) else phecode


def _find_stray(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """The ICD-9 codes of a full table that are in no form of ICD-9, if they are very few and not
    written as a spreadsheet writes numbers.
    """
    keys = {code for vocab, code, _ in rows if vocab == "icd9"}
    found = sorted(
        code
        for code in keys
        if codes.normalise_code(code, "icd9")[1] == "bad_format"
        and not codes.SCIENTIFIC.fullmatch(code.upper())
    )
    return found if len(keys) >= FULL_ROWS and len(found) < STRAY_SHARE * len(keys) else []


def _find_damage(
    rows: Sequence[tuple[str, str, str]], layout: MapLayout, numbers: frozenset[str]
) -> dict[int, list[str]]:
    """The tests of section 5 that a table fails, by number, each with up to three damaged keys."""
    icd9 = [(code, phecode) for vocab, code, phecode in rows if vocab == "icd9"]
    keys, targets = Counter(code for code, _ in icd9), {phecode for _, _, phecode in rows}
    # PheCode 1.2, not PhecodeX
    original = all(NUMERIC.fullmatch(p) or codes.SCIENTIFIC.fullmatch(p.upper()) for p in targets)
    failed = {
        1: [code for code in keys if codes.normalise_code(code, "icd9")[0] != code],
        2: [code for code, n in keys.items() if n > 1] if layout.single and original else [],
        3: [phecode for phecode in sorted(targets) if _pad_zeros(phecode) != phecode],
        4: [],
        5: [code for _, code, _ in rows if codes.SCIENTIFIC.fullmatch(code.upper())]
        + [
            p
            for p in sorted(targets)
            if codes.SCIENTIFIC.fullmatch(p.upper())
            or (original and re.fullmatch(r"\d+\.\d*0", p, re.ASCII))
        ],
        6: sorted(numbers & {layout.code, "phecode"}),
    }
    if len(icd9) >= FULL_ROWS and original:
        failed[4] = [f"no {code}" for code in ("001", "001.0") if code not in keys] + [
            "no PheCode 008"
        ] * ("008" not in targets)
    return {test: list(dict.fromkeys(found))[:3] for test, found in failed.items() if found}


DAMAGE = {
    1: "ICD-9 codes have lost zeros or are invalid",
    2: "ICD-9 codes are duplicated",
    3: "PheCodes have lost leading zeros",
    4: "codes of the full map are missing",
    5: "numbers are written as a spreadsheet writes them",
    6: "codes are stored as numbers",
}


def _damage_error(name: str, failed: Mapping[int, Sequence[str]]) -> UserError:
    text = "; ".join(
        f"{DAMAGE[test]} ({', '.join(map(safe_text, found))})" for test, found in failed.items()
    )
    action = (
        "Give --map-repair phecode-zeros"
        if set(failed) == {3}
        else f"It cannot be repaired: use an intact copy. {DOWNLOAD_HINT}"
    )
    return input_error(
        Reason.MAP_DAMAGED,
        f"is damaged: {text}",
        hint=action,
        file=name,
        found=next(iter(failed.values()))[0],
    )


# --- companions, overrides


def _add_companions(path: str, one: PhecodeMap) -> None:
    """Names, categories, exclusions and sexes from the files that are published beside the R
    export.
    """
    folder = Path(path).parent
    if one.facts[0]["layout"] != "r" or not Path(path).is_file():
        return
    for name in ("pheinfo.csv", "phecode_exclude.csv", "sex_restriction.csv"):
        if not (folder / name).is_file():
            continue
        columns = _open_sheet(str(folder / name)).columns
        if {"phecode", "description", "group"} <= set(columns):
            one.names.update(zip(columns["phecode"], columns["description"], strict=True))
            one.categories.update(zip(columns["phecode"], columns["group"], strict=True))
        elif {"phecode", "male_only", "female_only"} <= set(columns):
            for phecode, *flags in zip(
                columns["phecode"], columns["male_only"], columns["female_only"], strict=True
            ):
                only = [flag.lower() in {"true", "1"} for flag in flags]
                one.sexes.update({phecode: 1 if only[0] else 2} if any(only) else {})
        elif {"code", "exclusion_criteria"} <= set(columns):
            found = defaultdict(list)
            for code, target in zip(columns["code"], columns["exclusion_criteria"], strict=True):
                found[target].append(code)
            one.exclusions.update({code: tuple(others) for code, others in found.items()})


def _apply_overrides(codemap: PhecodeMap, sheet: MapSheet) -> None:
    """Replace the PheCodes of the codes of a table; a code without PheCode is removed from the
    map.
    """
    wanted = ("code", "vocab", "phecode")
    if not set(wanted) <= set(sheet.columns):
        raise usage_error(
            "columns are missing",
            f"expected {', '.join(wanted)}",
            code=Reason.FORMAT,
            file=sheet.name,
        )
    overrides: dict[tuple[str, str], set[str]] = {}
    for code, vocab, phecode in zip(*(sheet.columns[name] for name in wanted), strict=True):
        own = VOCABULARIES.get(re.sub(r"[^a-z0-9]", "", vocab.lower()))
        text = codes.normalise_code(code, own)[0] if own else None
        if own is None or text is None or (phecode and not codes.PHECODE.fullmatch(phecode)):
            row = f"row {safe_text(code)}, {safe_text(vocab)}, {safe_text(phecode)}"
            raise input_error(
                Reason.FORMAT,
                row,
                "expected an ICD code, its vocabulary, a PheCode",
                file=sheet.name,
            )
        overrides.setdefault((own, text), set()).update({phecode} - {""})
    for (vocab, code), phecodes in overrides.items():
        table = codemap.tables.setdefault(vocab, {})
        table.pop(code, None)
        if phecodes:
            table[code] = tuple(sorted(phecodes, key=codes.phecode_sort_key))
    facts: MapFacts = {
        "file": sheet.name,
        "sha256": sheet.sha256,
        "layout": "overrides",
        "rows": len(sheet.columns["code"]),
        "codes": len(overrides),
    }
    codemap.facts.append(facts)
