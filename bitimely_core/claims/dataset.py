"""Claims and EHR tables of diagnoses as a data set, and the options of their ingest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bitimely_core.formats.source import Source
from bitimely_core.registry import DatasetFacts, View, datasets
from bitimely_core.types import IngestUnit

LABELS = ("chf", "copd", "diabetes")
VIEW = View(channels=(), rate=0.0, window=0, task="multilabel", classes=LABELS, help="sequences of PheCodes, one a subject")


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
    code_pattern: Sequence[str] = ()
    default_source: str = ""
    date_format: str = ""  # of `strptime`
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
    engine: str = "polars"
    codes: str = ""  # all: also codes that are not ICD, with their numeric values
    time_unit: str = ""  # minute


OPTIONS = asdict(ClaimsOptions())
RULES = {
    "codes": "ICD-9 and ICD-10 in one spelling; looked up as they are, without trailing zeros, then by their parents",
    "duplicates": "exact copies of a row, or of a code on one claim and day, are used once",
    "unmapped": "codes without PheCode stay for the label rules alone",
    "labels": "by the rules (default: Canadian chronic disease surveillance), or by columns of the source",
    "pseudonyms": "subjects are numbered by the rank of HMAC-SHA256 of their id; days count from the first valid row of each",
}


@datasets(
    DatasetFacts(
        title="Claims, EHR, MIMIC, OMOP or MEDS as irregular histories of PheCodes (PopHR of the paper)",
        views={"": VIEW},
        licence="that of the source; PopHR itself is not public",
        url="",
        download="your own claims; DE-SynPUF from cms.gov, MIMIC from physionet.org; a PheCode map: pip download --no-deps phetk",
        layout="claims.csv with patient_id, date, icd9 (patients.csv, labels.csv beside it), or the layout that --source names",
        paper={"subjects": 47_000, "records": 2_200_000, "codes": 47, "labels": "CHF, COPD, diabetes"},
        rules=RULES,
        options=OPTIONS,
        kind="events",
    )
)
def pophr(source: Source | None, options: dict[str, Any]) -> Iterator[IngestUnit]:
    """Diagnoses with dates -> canonical events, subjects and labels."""
    return iter(())
