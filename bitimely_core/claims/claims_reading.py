"""The record of the options of an ingest of claims and EHR tables, and the labels that its rules
make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LABELS = ("chf", "copd", "diabetes")


@dataclass(frozen=True, kw_only=True)
class ClaimsOptions:
    """Options of an ingest of claims, called as the flags of the command. Empty: not given."""

    source: str = "claims"  # layout
    phecode_map: Sequence[str] = ()
    map_repair: str = ""
    map_overrides: str = ""
    map_vocab: str = ""
    rules: str = ""
    label_column: Sequence[str] = ()  # COLUMN:NAME:VALUE[@YEAR]
    col: Sequence[str] = ()  # KEY=NAME
    source_value: Sequence[str] = ()  # WORD=KIND
    source_vocab: Sequence[str] = ()  # WORD=VOCABULARY
    code_pattern: Sequence[str] = ()
    default_source: str = ""
    # FORM of all dates, COLUMN=FORM of some (`sources.options.parse_date_forms`)
    date_format: str | Sequence[str] = ()
    icd10_from: str = ""  # YYYY-MM-DD
    pad_undotted: bool = False
    admitting: bool = False
    keep_ignored: bool = False
    control_exclusions: bool = False
    sex_restrictions: bool = False
    split_file: str = ""
    seed: int = 0
    keep_ids: str = ""
    id_key: str = ""
    for_cohort: bool = False  # the sequences are those of a cohort, whose outcome is their label
    engine: str = "polars"
    codes: str = "icd"  # all: also codes that are not ICD, with their numeric values
    time_unit: str = "day"  # minute: times as exact as the source has them
