"""Checks how ids are written: in one case, and with all their digits."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import polars as pl

from bitimely_core.claims.distinct import sort_distinct
from bitimely_core.claims.sources import words
from bitimely_core.claims.sources.columns import read_first, warn_of_rows
from bitimely_core.claims.sources.source_table import OpenTable
from bitimely_core.errors import Finding, Reason, input_error, input_warning, safe_text

COMPARED_IDS = 1 << 18  # beyond which no further ones are compared: memory stays bounded
# 1.23457E+11 of spreadsheets, 1.2346E9 of SAS, 1.23e+09 of %g; 1e+05 of R has all its digits
ROUNDED_ID = r"^[0-9]([.,][0-9]+[Ee]\+?[0-9]{1,2}|[Ee]\+(1[1-9]|[2-9][0-9]))$"
PARTED_ROWS = 100_000  # by which it is known whether an id has two parts
PARTED_SHARE = 1.2  # people with both parts for each id: fewer have changed their family
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


def report_id_parts(table: OpenTable) -> list[Finding]:
    """A warning of the first column that tells people of one id apart, as the number of a person
    in a family.
    """
    alike = words.find_lookalikes("id_part", table.list_unread())
    id_name = table.columns.get("subject")
    if not alike or not id_name:
        return []
    blocks = table._replace(columns={name: name for name in (id_name, *alike)}).read_blocks()
    first = read_first(blocks, (id_name, *alike), PARTED_ROWS)
    ids = first[id_name].n_unique()
    people = {name: first.select(id_name, name).drop_nulls().n_unique() for name in alike}
    name = max(people, key=people.__getitem__)
    is_part = people[name] > PARTED_SHARE * ids
    return warn_of_rows(
        people[name] * is_part,
        Reason.IDENTIFIER,
        f"pairs of {safe_text(id_name)} and {safe_text(name)} stand for {ids} {safe_text(id_name)}",
        f"the rows of each {safe_text(id_name)} count as of one person",
        hint="If both together name a person, write them in one column, as 17-2, and give it as "
        "--col subject=NAME",
        file=table.file,
        field="subject",
    )


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
