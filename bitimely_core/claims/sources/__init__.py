"""Reads sources of claims: one module for each layout, with a reader that makes a `ClaimsSource`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath

from bitimely_core.claims.claims_reading import ClaimsOptions
from bitimely_core.claims.sources import claims, meds, mimic3, mimic4, omop, synpuf
from bitimely_core.claims.sources.claims_source import ClaimsSource
from bitimely_core.claims.sources.columns import find_table, open_table
from bitimely_core.claims.sources.source_options import check_options as check_layout_options
from bitimely_core.errors import UserError, check_choice
from bitimely_core.formats.source import Source
from bitimely_core.types import find_only

__all__ = ["SOURCES", "ClaimsSource", "read_source"]

SOURCES: dict[str, Callable[[Source, ClaimsOptions], ClaimsSource]] = {
    "claims": claims.read_claims,
    "synpuf": synpuf.read_synpuf,
    "mimic3": mimic3.read_mimic3,
    "mimic4": mimic4.read_mimic4,
    "omop": omop.read_omop,
    "meds": meds.read_meds,
}


TABLES = {  # layout -> tables that all of its copies have
    "claims": ("claims",),
    "omop": ("person", "condition_occurrence"),
    "mimic4": ("patients", "admissions", "diagnoses_icd"),
    "mimic3": ("patients", "admissions", "diagnoses_icd"),
}


def recognize_layout(source: Source) -> str:
    """The layout that the names of the files show; "" where they show none or several.

    Both versions of MIMIC have the same tables: a column of the patients tells them apart.
    """
    layouts = _match_layouts(source)
    if layouts == ["mimic4", "mimic3"]:
        return "mimic4" if _has_anchor_year(source) else "mimic3"
    return find_only(layouts, "")


def _match_layouts(source: Source) -> list[str]:
    """The layouts whose tables are among the files."""
    paths = list(map(PurePosixPath, source.files))
    stems = {path.name.lower().split(".")[0] for path in paths}
    layouts = [layout for layout, tables in TABLES.items() if stems.issuperset(tables)]
    if any(stem.startswith("de1_0_") for stem in stems):
        layouts.append("synpuf")
    if any(path.suffix.lower() == ".parquet" and "data" in path.parts[:-1] for path in paths):
        layouts.append("meds")
    return layouts


def _has_anchor_year(source: Source) -> bool:
    try:
        open_table(source, find_table(source, "patients"), {"year": "anchor_year"})
    except UserError:
        return False
    return True


def check_options(options: ClaimsOptions) -> None:
    """Check what can be checked without the source. Raises UserError (config, unknown_name or
    not_found; exit 2).
    """
    check_choice("source of claims", options.source, SOURCES)
    check_layout_options(options)


def read_source(source: Source, options: ClaimsOptions, *, once: bool = False) -> ClaimsSource:
    """Find the tables of a source in the layout `options.source`, and check each of them.

    Rows are cleaned later. `once`: as `claims.read_claims`, for plain claims. Raises UserError:
    exit 4 for what cannot be read or trusted, exit 2 for options that are not understood.
    """
    check_options(options)
    try:
        if options.source == "claims":
            return claims.read_claims(source, options, once=once)
        return SOURCES[options.source](source, options)
    except UserError as error:
        if error.file is not None and Path(error.file).is_relative_to(source.root):
            error.file = Path(error.file).relative_to(source.root).as_posix()
        raise
