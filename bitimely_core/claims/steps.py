"""The steps from claims to sequences for one shard of subjects, in two passes over all shards
(sections 2 and 13 of the builder's reference).

1. `label_shard` each shard. The latest of their last days is the end of the data. Then
   `set_index_days` and `count_shard` each shard; the counts are added up.
2. `prevalence.select_codes` chooses the vocabulary by these counts; `build_shard` each shard.

No decision on all subjects is made in a shard.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from bitimely_core.claims import codes, event_labels, event_times, prevalence, sequence_builder
from bitimely_core.claims.codes import IcdCode
from bitimely_core.claims.distinct import number_texts
from bitimely_core.claims.label_rules import LabelRule
from bitimely_core.claims.prevalence import CodeCounts, CodeSelection
from bitimely_core.claims.sequence_builder import CodeSequences
from bitimely_core.claims.sequence_choices import SequenceChoices

PhecodesOfCodes = dict[str, Sequence[str]]
"""Code, as in a cache -> its PheCodes."""


@dataclass(frozen=True, kw_only=True)
class ClaimsShard:
    """Some subjects with all their valid rows, as integers."""

    # Int32 subject (row of `cohort`), day and code (index into `codes`), Int8 source; Int64 row,
    # the order of the input, where it matters
    rows: pl.DataFrame
    codes: Sequence[IcdCode]
    cohort: pl.DataFrame  # subject_id, birth_day Int32, obs_end Int32, split; steps add columns
    # labels made by rules: only they have onsets and change under a landmark
    rule_labels: frozenset[str] = frozenset()
    rules: Sequence[LabelRule] = ()
    # PheCodes that the map gives to the code sets of the rules (`rules.defining`)
    defining: Collection[str] = ()
    number: int = 0  # among the shards of its cache

    @property
    def labels(self) -> list[str]:
        """Names with a column y_<name> in `cohort`."""
        columns = self.cohort.columns
        return [column.removeprefix("y_") for column in columns if column.startswith("y_")]

    @property
    def input_rows(self) -> pl.DataFrame:
        """The rows up to the index days; none of subjects without one, where there are any."""
        if "index_day" not in self.cohort.columns:
            return self.rows
        index_days = self.cohort["index_day"].gather(self.rows["subject"])
        return self.rows.filter(self.rows["day"] <= index_days)

    @property
    def last_day(self) -> int | None:
        """The last valid day of the shard."""
        last = self.rows["day"].max()
        return last if isinstance(last, int) else None


def number_codes(
    events: pl.DataFrame, phecodes_of_codes: PhecodesOfCodes, *, by_sex: bool
) -> tuple[pl.DataFrame, list[IcdCode]]:
    """Rows of the cache as those of a `ClaimsShard`, and their codes.

    Args:
        events: subject (row of the cohort) and day Int32, code (`ICD9CM//428.0`), source, phecodes,
            perhaps minute and value, in any order.
        by_sex: whether rows of one code may have other PheCodes.
        phecodes_of_codes: gives the PheCodes where `events` has none; grows by those of the shard.
    """
    keys = pl.concat_str(
        pl.col("code").cast(pl.String), pl.col("phecodes").list.join(","), separator="|"
    )
    first, code = _number_texts(events.select(keys if by_sex else "code").to_series())
    measures = [name for name in sequence_builder.MEASURES if name in events.columns]
    rows = events.select(
        "subject",
        "day",
        *measures,
        code=pl.Series(code),
        source=pl.col("source").to_physical().cast(pl.Int8),
        row=pl.int_range(pl.len(), dtype=pl.Int64),
    )
    return rows, _read_codes(events[first], phecodes_of_codes)


def _read_codes(rows: pl.DataFrame, phecodes_of_codes: PhecodesOfCodes) -> list[IcdCode]:
    """The codes of some rows of the cache; `phecodes_of_codes` as in `number_codes`."""
    texts = rows["code"].cast(pl.String).to_list()
    if "phecodes" not in rows.columns:
        return [_parse_code(text, phecodes_of_codes[text]) for text in texts]
    phecodes = rows["phecodes"].to_list()
    phecodes_of_codes.update(zip(texts, phecodes, strict=True))
    return list(map(_parse_code, texts, phecodes))


def _parse_code(text: str, phecodes: Sequence[str] | None) -> IcdCode:
    """A code as the cache writes it: one that is not ICD is its own PheCode."""
    if phecodes == [text]:
        return IcdCode(codes.OTHER, text, (text,))
    vocabulary, _, code = text.partition("//")
    return IcdCode(vocabulary.lower(), code, tuple(phecodes or ()))


def _number_texts(texts: pl.Series) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Of the distinct texts in their order a row that holds each, and of each row the number of its
    text [n].
    """
    row, number = number_texts(texts)
    order = texts.gather(row).cast(pl.String).arg_sort().to_numpy()
    rank = np.zeros(len(row), np.int32)
    rank[order] = np.arange(len(row))
    return row[order], rank[number]


def label_shard(shard: ClaimsShard) -> ClaimsShard:
    """Pass 1: first day, onsets and labels of every subject, from all valid rows."""
    first = event_labels.find_first_days(shard.rows, shard.cohort.height)
    cohort = shard.cohort.with_columns(first_day=first)
    cohort = event_labels.add_onsets(shard.rows, shard.codes, shard.rules, cohort)
    made = frozenset(rule.name for rule in shard.rules)
    return replace(shard, cohort=cohort, rule_labels=shard.rule_labels | made)


def set_index_days(
    shard: ClaimsShard, choices: SequenceChoices, data_end: int | None
) -> ClaimsShard:
    """Pass 1: index days and the labels at them. `data_end`: last valid day of all shards; None
    where every obs_end is known.
    """
    cohort, landmark, names = shard.cohort, choices.landmark, sorted(shard.rule_labels)
    if "first_day" not in cohort.columns:
        first = event_labels.find_first_days(shard.rows, cohort.height)
        cohort = cohort.with_columns(first_day=first)
    if landmark is None:
        return replace(shard, cohort=cohort)
    indexed = event_labels.apply_landmark(cohort, names, landmark, data_end)
    if choices.time_to_event:
        indexed = event_times.add_event_times(indexed, cohort, names, landmark, data_end)
    return replace(shard, cohort=indexed)


def count_shard(shard: ClaimsShard, choices: SequenceChoices) -> CodeCounts:
    """Pass 1: the counts for ratios and selection."""
    records, phecodes = _select_records(shard, choices)
    return prevalence.count_codes(records, phecodes, shard.cohort, shard.labels, choices)


def build_shard(
    shard: ClaimsShard, choices: SequenceChoices, selection: CodeSelection
) -> CodeSequences:
    """Pass 2: the sequences."""
    records, phecodes = _select_records(shard, choices)
    numbers = sequence_builder.number_phecodes([*selection.phecodes, *selection.unseen])
    built = sequence_builder.build_code_sequences(records, phecodes, numbers, shard.cohort, choices)
    if not selection.unseen:
        return built
    return sequence_builder.hide_codes(built, numbers[selection.unseen[0]])


def _select_records(shard: ClaimsShard, choices: SequenceChoices) -> tuple[pl.DataFrame, list[str]]:
    """Records that may enter the input, and the PheCodes, in numeric order, that their `phecode`
    indexes.

    A row up to the index day gives a record for each of its distinct rolled-up PheCodes. Records:
    subject, day and phecode, with row, minute and value where the rows have them and they are
    needed.
    """
    phecodes_of_codes = roll_up_codes(shard, choices)
    phecodes = prevalence.sort_phecodes(set().union(*phecodes_of_codes))
    index = {phecode: i for i, phecode in enumerate(phecodes)}
    numbers = [sorted(index[name] for name in names) for names in phecodes_of_codes]
    table = pl.DataFrame(
        {"code": range(len(numbers)), "phecode": numbers},
        schema={"code": pl.Int32, "phecode": pl.List(pl.Int32)},
    )
    table = table.explode("phecode").drop_nulls()
    unused = ["source"] if choices.input_order else ["source", "row"]
    rows = shard.input_rows.drop(unused, strict=False)
    return rows.join(table, on="code").drop("code"), phecodes


def roll_up_codes(shard: ClaimsShard, choices: SequenceChoices) -> list[set[str]]:
    """Of each code the rolled-up PheCodes that may enter the input.

    drop_icd: none for codes in the code set of any rule. drop_phecode: none of the PheCodes that
    the map gives to these code sets, at any level.
    """

    def roll_up(phecodes: Iterable[str]) -> set[str]:
        return {codes.roll_up_phecode(phecode, choices.level) for phecode in phecodes}

    rolled = [roll_up(code.phecodes) for code in shard.codes]
    if choices.leakage == "drop_icd":
        for number, code in enumerate(shard.codes):
            if any(rule.matches(code) for rule in shard.rules):
                rolled[number] = set()
    elif choices.leakage == "drop_phecode":
        dropped = roll_up(shard.defining)
        rolled = [phecodes - dropped for phecodes in rolled]
    return rolled
