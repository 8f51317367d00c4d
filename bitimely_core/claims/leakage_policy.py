"""Records that may enter the input: leakage policy, index cut, roll-up (section 2, step 5). One row gives one record per distinct PheCode.

rows     subject, day, code, source (and `row`, the order of the input, where the dedupe needs it)
records  subject, day, phecode (and `row`)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import narwhals as nw
import polars as pl

from bitimely_core.claims import codes
from bitimely_core.claims.codes import IcdCode
from bitimely_core.claims.engines import Engine
from bitimely_core.claims.label_rules import LabelRule, match_rules

LEAKAGE_POLICIES = ("keep", "drop_icd", "drop_phecode")


def list_input_phecodes(
    found: Sequence[IcdCode], *, level: str, leakage: str = "keep", rules: Sequence[LabelRule] = (), defining: Collection[str] = ()
) -> list[tuple[str, ...]]:
    """For each code of the data its rolled-up PheCodes in the input, distinct, in numeric order.

    `level`: integer, first_decimal or full. `leakage`: keep; drop_icd: without codes in the code set of any rule; drop_phecode: without the
    PheCodes in `defining`, which the map gives to the code sets of the rules (`label_rules.find_defining_phecodes`), at any level.
    """
    dropped = {codes.roll_up_phecode(phecode, level) for phecode in defining} if leakage == "drop_phecode" else set()
    return [
        ()
        if leakage == "drop_icd" and match_rules(rules, code)
        else tuple(sorted({codes.roll_up_phecode(phecode, level) for phecode in code.phecodes} - dropped, key=codes.phecode_sort_key))
        for code in found
    ]


def select_records(
    rows: pl.DataFrame, phecodes_of_code: Sequence[Sequence[str]], cohort: pl.DataFrame, engine: Engine
) -> tuple[nw.LazyFrame[Any], list[str]]:
    """The records of the input as a lazy frame, `phecode` being an index into the list of PheCodes, which is in numeric order.

    `rows`: subject, day, code, and `row` where it is needed. `cohort`: with `index_day` if the input ends on it.
    """
    phecodes = sorted({phecode for own in phecodes_of_code for phecode in own}, key=codes.phecode_sort_key)
    index = {phecode: i for i, phecode in enumerate(phecodes)}
    pairs = [(code, index[phecode]) for code, own in enumerate(phecodes_of_code) for phecode in own]
    table = engine(pl.DataFrame(pairs, schema={"code": pl.Int32, "phecode": pl.Int32}, orient="row"))
    lazy = engine(rows.drop("source", strict=False))
    if "index_day" in cohort.columns:
        ends = cohort.select(subject=pl.int_range(pl.len(), dtype=pl.Int32), index_day="index_day").drop_nulls()
        lazy = lazy.join(engine(ends), on="subject").filter(nw.col("day") <= nw.col("index_day")).drop("index_day")
    return lazy.join(table, on="code").drop("code"), phecodes
