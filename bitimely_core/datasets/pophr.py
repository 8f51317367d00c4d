"""Claims and EHR tables of diagnoses as the data set `pophr`. What is done with them is in
`bitimely_core.claims`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bitimely_core.claims.claims_reading import LABELS, ClaimsOptions
from bitimely_core.formats.source import Source
from bitimely_core.registry import DatasetFacts, View, datasets
from bitimely_core.types import IngestUnit

if TYPE_CHECKING:
    from bitimely_core.claims.build import build_sequences as build_sequences

VIEW = View(
    channels=(),
    rate=0.0,
    window=0,
    task="multilabel",
    classes=LABELS,
    help="sequences of PheCodes, one a subject",
)
OPTIONS = asdict(ClaimsOptions())
RULES = {
    "codes": (
        "ICD-9 and ICD-10 in one spelling; looked up as they are, without trailing zeros, then by "
        "their parents"
    ),
    "duplicates": "exact copies of a row, or of a code on one claim and day, are used once",
    "unmapped": "codes without PheCode stay for the label rules alone",
    "labels": (
        "by the rules (default: Canadian chronic disease surveillance), or by columns of the source"
    ),
    "pseudonyms": (
        "subjects are numbered by the rank of HMAC-SHA256 of their id; days count from the first "
        "valid row of each"
    ),
}


@datasets(
    DatasetFacts(
        title=(
            "Claims, EHR, MIMIC, OMOP or MEDS as irregular histories of PheCodes (PopHR of the "
            "paper)"
        ),
        views={"": VIEW},
        licence="that of the source; PopHR itself is not public",
        url="",
        download=(
            "your own claims; DE-SynPUF from cms.gov, MIMIC from physionet.org; a PheCode map: pip "
            "download --no-deps phetk"
        ),
        layout=(
            "claims.csv with patient_id, date, icd9 (patients.csv, labels.csv beside it), or the "
            "layout that --source names"
        ),
        paper={
            "subjects": 47_000,
            "records": 2_200_000,
            "codes": 47,
            "labels": "CHF, COPD, diabetes",
        },
        rules=RULES,
        options=OPTIONS,
        kind="events",
    )
)
def pophr(source: Source | None, options: dict[str, Any]) -> Iterator[IngestUnit]:
    """Diagnoses with dates -> canonical events, subjects and labels."""
    return iter(())


def __getattr__(name: str) -> Any:
    """`build_sequences`, the builder on tables in memory, which loads the libraries of tables."""
    if name == "build_sequences":
        from bitimely_core.claims.build import build_sequences

        return build_sequences
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
