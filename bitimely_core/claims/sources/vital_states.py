"""Reads who has died from a column of flags or of words, and their day from that of the last
contact.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

import polars as pl

from bitimely_core.claims.distinct import map_texts
from bitimely_core.claims.sources import words
from bitimely_core.claims.sources.columns import peek_texts, warn_of_rows
from bitimely_core.claims.sources.source_table import OpenTable
from bitimely_core.claims.sources.subject_tables import TableAccounts
from bitimely_core.claims.unknown_dates import MISSING
from bitimely_core.errors import Finding, Reason, input_warning, safe_text

DEAD = "dead"  # in the column `vital` of those who have died
VITAL = words.WORDS["vital"]


def read_vital_states(
    frame: pl.DataFrame, columns: Mapping[str, str], file: str, accounts: TableAccounts
) -> pl.DataFrame:
    """A table of subjects whose column `vital` is `DEAD` or null. Those who have died did so on
    the day of the last contact, where no other is stated; for all the observation ends on it.

    A column of deaths that holds flags or words is one of vital states. States that are not
    understood are said.

    Args:
        frame: all text, with any of death, vital, last_contact, obs_end.
        columns: key -> name in the file.
        file: that of the table.
        accounts: grow.
    """
    name = columns.get("vital", "")
    if "death" in frame.columns and _holds_states(frame["death"], columns["death"]):
        name = columns["death"]
        frame = frame.drop("vital", strict=False).rename({"death": "vital"})
    if "vital" in frame.columns:
        texts = frame["vital"]
        states = map_texts(texts, lambda text: _read_state(text, name), pl.Boolean)
        is_read = states.is_not_null() | map_texts(texts, _is_missing, pl.Boolean)
        if is_discharge(name) and not states.any():
            is_read = texts.is_null()  # the code of a death is another one, or nobody has died
        accounts.findings += warn_of_rows(
            0 if "death" in frame.columns else int((~is_read).sum()),
            Reason.METADATA,
            f"states of {safe_text(name)} are not understood",
            "they count as alive: known are dead and alive, in a column such as died 1 and 0",
            hint="Give the column of the days of death, as --col death=NAME",
            file=file,
        )
        is_dead = pl.lit(states).fill_null(value=False)
        frame = frame.with_columns(vital=pl.when(is_dead).then(pl.lit(DEAD)))
    return _use_last_contact(frame)


def _use_last_contact(frame: pl.DataFrame) -> pl.DataFrame:
    """The table with the day of the last contact as that of the death, and as the end of the
    observation.
    """
    if "last_contact" not in frame.columns:
        return frame
    last = {"obs_end": pl.col("last_contact")}
    if "vital" in frame.columns:
        last["death"] = pl.when(pl.col("vital") == DEAD).then("last_contact")
    filled = (
        (pl.coalesce(name, day) if name in frame.columns else day).alias(name)
        for name, day in last.items()
    )
    return frame.with_columns(filled).drop("last_contact")


def close_vital_states(
    frame: pl.DataFrame | None, file: str, accounts: TableAccounts
) -> pl.DataFrame | None:
    """The subjects without the column `vital`. Those who have died on an unknown day are said."""
    if frame is None or "vital" not in frame.columns:
        return frame
    dead = frame.filter(pl.col("vital") == DEAD)
    undated = dead["death"].null_count() if "death" in dead.columns else dead.height
    accounts.findings += warn_of_rows(
        undated,
        Reason.METADATA,
        "subjects have died on an unknown day",
        "they count as alive to the end of their observation",
        hint="Give the column of the day of death, as --col death=NAME, or of the last contact, as "
        "--col last_contact=NAME",
        file=file,
        field="death",
    )
    return frame.drop("vital")


def is_state(text: str, column: str = DEAD) -> bool:
    """Whether a text of a column states that somebody has died or lives."""
    return _read_state(text, column) is not None


def is_discharge(column: str) -> bool:
    """Whether a column tells how a stay has ended, by its name. Who lives then may have died later:
    it states deaths alone.
    """
    return bool(_list_systems(column))


def _list_systems(column: str) -> list[list[str]]:
    """The codes of deaths in columns whose names have a part of this one, which tells how a stay
    has ended.
    """
    folded = words.fold_name(column)
    systems = words.WORDS["discharges"].items()
    return [codes for part, codes in systems if words.fold_name(part) in folded]


def report_discharges(table: OpenTable) -> list[Finding]:
    """A warning of columns of claims that state deaths in hospital and are not read."""
    candidates = list(filter(is_discharge, table.list_unread()))
    texts = {name: peek_texts(table.path, name, table.delimiter) for name in candidates}
    stating = [name for name in candidates if any(_read_state(t, name) for t in texts[name])]
    if not stating:
        return []
    name = safe_text(stating[0])
    return [
        input_warning(
            Reason.METADATA,
            f"{name} may state deaths in hospital",
            "not read: who has no other day of death counts as alive",
            f"Give --col vital={name}: they died on the day of the discharge, or of the row",
            file=table.file,
            row=1,
        )
    ]


def _holds_states(texts: pl.Series, column: str) -> bool:
    """Whether a column of deaths holds states, and no dates."""
    written = list(itertools.filterfalse(_is_missing, texts.drop_nulls().unique()))
    return bool(written) and all(is_state(text, column) for text in written)


def _is_missing(text: str | None) -> bool:
    return text is None or MISSING.fullmatch(text.strip()) is not None


def _read_state(text: str | None, column: str) -> bool | None:
    """True for dead, False for alive, None where the text states neither. Flags are of a column
    that is called as what they affirm.
    """
    word = words.fold_name(re.sub(r"\.0+$", "", text or ""))
    if systems := _list_systems(column):
        deaths = itertools.chain(VITAL["dead"], VITAL["dead_at_discharge"], *systems)
        return word in deaths
    if word in VITAL["dead"] or word in VITAL["alive"]:
        return word in VITAL["dead"]
    name = words.fold_name(column)
    if word not in {*VITAL["yes"], *VITAL["no"]}:
        return None
    for affirmed, parts in ((True, VITAL["names_of_dead"]), (False, VITAL["names_of_alive"])):
        if any(part in name for part in parts):
            return affirmed == (word in VITAL["yes"])
    return None
