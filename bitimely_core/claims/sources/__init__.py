"""Sources of claims: one module per layout with a reader `(source, options) -> ClaimsSource`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bitimely_core.claims.dataset import ClaimsOptions
from bitimely_core.claims.sources import claims, meds, mimic3, mimic4, omop, synpuf
from bitimely_core.claims.sources.claims_source import ClaimsSource
from bitimely_core.errors import UserError
from bitimely_core.formats.source import Source
from bitimely_core.registry import unknown

__all__ = ["SOURCES", "ClaimsSource", "read_source"]

SOURCES: dict[str, Callable[[Source, ClaimsOptions], ClaimsSource]] = {
    "claims": claims.read_claims,
    "synpuf": synpuf.read_synpuf,
    "mimic3": mimic3.read_mimic3,
    "mimic4": mimic4.read_mimic4,
    "omop": omop.read_omop,
    "meds": meds.read_meds,
}


def read_source(source: Source, options: ClaimsOptions) -> ClaimsSource:
    """Find the tables of a source in the layout `options.source` and check each of them; rows are cleaned later.

    Raises UserError: exit 4 for what cannot be read or trusted, exit 2 for options that are not understood.
    """
    if options.source not in SOURCES:
        raise unknown("source of claims", options.source, list(SOURCES))
    try:
        return SOURCES[options.source](source, options)
    except UserError as error:
        if error.file is not None and Path(error.file).is_relative_to(source.root):
            error.file = Path(error.file).relative_to(source.root).as_posix()
        raise
