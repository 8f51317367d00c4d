"""Checks how ids are written: in one case, and with all their digits."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import polars as pl

from bitimely_core.claims.distinct import sort_distinct
from bitimely_core.errors import Finding, Reason, input_error, input_warning

COMPARED_IDS = 1 << 18  # beyond which no further ones are compared: memory stays bounded
# 1.23457E+11 of spreadsheets, 1.2346E9 of SAS, 1.23e+09 of %g; 1e+05 of R has all its digits
ROUNDED_ID = r"^[0-9]([.,][0-9]+[Ee]\+?[0-9]{1,2}|[Ee]\+(1[1-9]|[2-9][0-9]))$"
NO_IDS = np.empty(0, np.uint64)


@dataclass
class IdSpellings:
    """The distinct ids with letters of all tables of a source, as hashes."""

    written: np.ndarray = field(default_factory=NO_IDS.copy)
    folded: np.ndarray = field(default_factory=NO_IDS.copy)  # without their case

    def add(self, ids: pl.Series) -> None:
        """Compare the ids of a block."""
        if self.written.size >= COMPARED_IDS:
            return
        lettered = ids.unique().str.strip_chars()
        lettered = lettered.filter(lettered.str.contains("[A-Za-z]"))
        hashes = lettered.hash(), lettered.str.to_lowercase().hash()
        self.written, self.folded = (
            sort_distinct(np.append(old, new.to_numpy()))
            for old, new in zip((self.written, self.folded), hashes, strict=True)
        )

    def report(self) -> list[Finding]:
        """A warning of such ids."""
        other = self.written.size - self.folded.size
        if not other:
            return []
        problem = f"{other} ids differ from others in nothing but their case"
        rule = "each spelling counts as a person"
        hint = "Write the ids of all tables in one case where they are of the same people"
        return [input_warning(Reason.IDENTIFIER, problem, rule, hint, count=other)]


def refuse_rounded_ids(frame: pl.DataFrame, key: str, file: str) -> None:
    """Raises UserError: identifier for ids whose last digits a program has cut off, so that
    different people look the same.
    """
    rounded = frame.filter(pl.col(key).str.contains(ROUNDED_ID))["row"]
    if rounded.is_empty():
        return
    raise input_error(
        Reason.IDENTIFIER,
        "ids are written as 9.99999E+11, without their last digits",
        "expected all digits: people whose ids differ in these would be one",
        "Write the table again from its origin, with the ids as text",
        file=file,
        row=int(rounded[0]),
        field="subject",
    )
