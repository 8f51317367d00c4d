"""Where claims come from: one module a layout, each `(source, options) -> Claims`; what is raw ends here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bitimely_core.claims.sources import claims, meds, mimic3, mimic4, omop, synpuf
from bitimely_core.claims.sources.claims_source import ClaimsSource
from bitimely_core.errors import UserError
from bitimely_core.formats.source import Source
from bitimely_core.registry import unknown

__all__ = ["SOURCES", "ClaimsSource", "read_source"]

SOURCES: dict[str, Callable[[Source, dict[str, Any]], ClaimsSource]] = {
    "claims": claims.read_claims,
    "synpuf": synpuf.read_synpuf,
    "mimic3": mimic3.read_mimic3,
    "mimic4": mimic4.read_mimic4,
    "omop": omop.read_omop,
    "meds": meds.read_meds,
}


def read_source(source: Source, kind: str, options: dict[str, Any]) -> ClaimsSource:
    """Finds the tables of a source and checks each as a whole; rows are cleaned later.

    Args:
        source: raw folder.
        kind: layout, a key of `SOURCES`.
        options: of the command, named as its flags with underscores: col, source_value, code_pattern, label_column (lists of texts);
            default_source, date_format, icd10_from (texts); admitting (bool). Flags of other steps are passed over.

    Raises:
        UserError: exit 4 for what cannot be read or trusted, exit 2 for options that are not understood.
    """
    if kind not in SOURCES:
        raise unknown("source of claims", kind, list(SOURCES))
    try:
        return SOURCES[kind](source, options)
    except UserError as error:
        if error.file is not None and Path(error.file).is_relative_to(source.root):
            error.file = Path(error.file).relative_to(source.root).as_posix()
        raise
