"""The steps from claims to sequences for one shard of subjects, in two passes over all shards
(sections 2 and 13 of the builder's reference).

1. `label_shard` each shard. The latest of their last days is the end of the data. Then
   `set_index_days` and `count_shard` each shard; the counts are added up.
2. `prevalence.select_codes` chooses the vocabulary by these counts; `build_shard` each shard.

No decision on all subjects is made in a shard.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from bitimely_core.claims import codes, event_times, labels, prevalence, sequence_builder
from bitimely_core.claims.choices import SequenceChoices
from bitimely_core.claims.codes import IcdCode
from bitimely_core.claims.distinct import number_texts
from bitimely_core.claims.label_rules import SOURCES, LabelRule, match_rules
from bitimely_core.claims.prevalence import CodeCounts, CodeSelection
from bitimely_core.claims.sequence_builder import CodeSequences

PhecodesOfCodes = dict[str, Sequence[str]]
"""Code, as in a cache -> its PheCodes."""


@dataclass(frozen=True, kw_only=True)
class ClaimsShard:
    """Some subjects with all their valid rows, as integers."""

    # Int32 subject (row of `cohort`), day and code (index into `codes`), Int8 source; Int64 row for
    # input_order
    rows: pl.DataFrame
    codes: Sequence[IcdCode]
    cohort: pl.DataFrame  # subject_id, birth_day Int32, obs_end Int32, split; steps add columns
    labels: tuple[str, ...] = ()  # names with a column y_<name> in `cohort`
    # those made by rules: only they have onsets and change under a landmark
    rule_labels: frozenset[str] = frozenset()
    rules: Sequence[LabelRule] = ()
    # PheCodes that the map gives to the code sets of the rules (`rules.defining`)
    defining: Collection[str] = ()

    @property
    def last_day(self) -> int | None:
        """The last valid day of the shard."""
        last = self.rows["day"].max()
        return last if isinstance(last, int) else None


def load_shard(
    events: pl.DataFrame,
    cohort: pl.DataFrame,
    *,
    rule_labels: Collection[str] = (),
    rules: Sequence[LabelRule] = (),
    defining: Collection[str] = (),
    by_sex: bool = False,
    phecodes_of_codes: PhecodesOfCodes | None = None,
) -> ClaimsShard:
    """A shard from the cache's rows.

    `events`: subject (row of `cohort`) and day Int32, code (`ICD9CM//428.0`), source, phecodes,
    perhaps minute and value, in any order.
    `cohort`: one row a subject, with the columns of `ClaimsShard.cohort` and of its labels.
    `rule_labels`: labels made by rules. `rules` of the
    ingest and `defining` PheCodes of their code sets: for the leakage policies. `by_sex`: rows of
    one code may have other PheCodes.
    `phecodes_of_codes`: grows by the codes of the shard, and gives their PheCodes where `events`
    has none.
    """
    keys = pl.concat_str(
        pl.col("code").cast(pl.String),
        pl.col("phecodes").cast(pl.List(pl.String)).list.join(","),
        separator="|",
    )
    first, code = _number_texts(events.select(keys if by_sex else "code").to_series())
    source = events["source"]
    if source.dtype != pl.Enum(SOURCES):
        source = source.cast(pl.String).replace_strict(
            SOURCES, range(len(SOURCES)), default=SOURCES.index("other"), return_dtype=pl.Int8
        )
    measures = [name for name in sequence_builder.MEASURES if name in events.columns]
    numbered: dict[str, pl.Series | pl.Expr] = {
        "code": pl.Series(code),
        "source": source.to_physical().cast(pl.Int8),
        "row": pl.int_range(pl.len(), dtype=pl.Int64),
    }
    return ClaimsShard(
        rows=events.select("subject", "day", **numbered).with_columns(events.select(measures)),
        codes=_read_codes(events[first], {} if phecodes_of_codes is None else phecodes_of_codes),
        cohort=cohort,
        labels=tuple(
            column.removeprefix("y_") for column in cohort.columns if column.startswith("y_")
        ),
        rule_labels=frozenset(rule_labels),
        rules=rules,
        defining=defining,
    )


def _read_codes(rows: pl.DataFrame, phecodes_of_codes: PhecodesOfCodes) -> list[IcdCode]:
    """The codes of some rows of the cache; `phecodes_of_codes` as in `load_shard`."""
    texts = rows["code"].cast(pl.String).to_list()
    phecodes = (
        rows["phecodes"].to_list()
        if "phecodes" in rows.columns
        else [phecodes_of_codes[text] for text in texts]
    )
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
    cohort = labels.add_first_days(shard.rows, shard.cohort)
    cohort = labels.add_onsets(shard.rows, shard.codes, shard.rules, cohort)
    names = tuple(rule.name for rule in shard.rules)
    return replace(
        shard,
        cohort=cohort,
        labels=(*shard.labels, *names),
        rule_labels=shard.rule_labels.union(names),
    )


def set_index_days(
    shard: ClaimsShard, choices: SequenceChoices, data_end: int | None
) -> ClaimsShard:
    """Pass 1: index days and the labels at them. `data_end`: last valid day of all shards; None
    where every obs_end is known.
    """
    cohort = shard.cohort
    if "first_day" not in cohort.columns:
        cohort = labels.add_first_days(shard.rows, cohort)
    names = sorted(shard.rule_labels)
    indexed = labels.apply_landmark(cohort, names, choices.landmark, data_end)
    if choices.time_to_event and choices.landmark:
        indexed = event_times.add_event_times(indexed, cohort, names, choices.landmark, data_end)
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
    return (
        sequence_builder.hide_codes(built, numbers[selection.unseen[0]])
        if selection.unseen
        else built
    )


def _select_records(shard: ClaimsShard, choices: SequenceChoices) -> tuple[pl.DataFrame, list[str]]:
    """Records that may enter the input, and the PheCodes, in numeric order, that their `phecode`
    indexes.

    A row up to the index day gives a record for each of its distinct rolled-up PheCodes. Records:
    subject, day and phecode, with row, minute and value where the rows have them and they are
    needed.
    """
    phecodes_of_codes = _roll_up_codes(shard, choices)
    phecodes = prevalence.sort_phecodes(set().union(*phecodes_of_codes))
    index = {phecode: i for i, phecode in enumerate(phecodes)}
    pairs = [
        (code, number)
        for code, names in enumerate(phecodes_of_codes)
        for number in sorted(index[name] for name in names)
    ]
    table = pl.DataFrame(pairs, schema={"code": pl.Int32, "phecode": pl.Int32}, orient="row")
    rows = shard.rows.drop("source", *([] if choices.input_order else ["row"]), strict=False)
    if "index_day" in shard.cohort.columns:
        # none of subjects without an index day
        rows = rows.filter(rows["day"] <= shard.cohort["index_day"].gather(rows["subject"]))
    return rows.join(table, on="code").drop("code"), phecodes


def _roll_up_codes(shard: ClaimsShard, choices: SequenceChoices) -> list[set[str]]:
    """Of each code the rolled-up PheCodes that may enter the input.

    drop_icd: none for codes in the code set of any rule. drop_phecode: none of the PheCodes that
    the map gives to these code sets, at any level.
    """
    dropped = set[str]()
    if choices.leakage == "drop_phecode":
        dropped = {codes.roll_up_phecode(phecode, choices.level) for phecode in shard.defining}
    phecodes_of_codes = []
    for code in shard.codes:
        if choices.leakage == "drop_icd" and match_rules(shard.rules, code):
            phecodes_of_codes.append(set[str]())
        else:
            phecodes_of_codes.append(
                {codes.roll_up_phecode(phecode, choices.level) for phecode in code.phecodes}
                - dropped
            )
    return phecodes_of_codes
