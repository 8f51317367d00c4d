"""The steps of section 2 for one shard of subjects, in the two passes of section 13. `build_sequences` is one shard.

Pass 1: `label` each shard; the last of their last days is the data's end; `mark` and `count` each shard; add the counts up.
Between: `ratios.select` decides once, in plain Python. Pass 2: `build` each shard. Nothing that is global is decided in a shard.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bitimely_core.claims import codes, dates, labels, leakage_policy, prevalence, sequence_builder
from bitimely_core.claims.codes import IcdCode
from bitimely_core.claims.label_rules import SOURCES, LabelRule
from bitimely_core.claims.labels import Landmark
from bitimely_core.claims.prevalence import CodeCounts, CodeSelection
from bitimely_core.claims.sequence_builder import CodeSequences

if TYPE_CHECKING:
    import narwhals as nw
    import polars as pl

    from bitimely_core.claims.engines import Engine

CHOICES = {
    "level": codes.LEVELS,
    "leakage": leakage_policy.LEAKAGE_POLICIES,
    "population": prevalence.POPULATIONS,
    "denominator": prevalence.DENOMINATORS,
    "dedupe": sequence_builder.DEDUPES,
    "min_codes_unit": sequence_builder.UNITS,
    "time": sequence_builder.TIMES,
    "select": (True, False, "frequency"),
}
LEAST_VALUES = {"top_k": 0, "min_case_support": 1, "min_codes": 0, "max_events": 1}  # least value
VALUE_RANGES = {"threshold": (-math.inf, math.inf), "min_case_fraction": (0.0, 1.0), "min_record_frequency": (0.0, 1.0)}


@dataclass(frozen=True, kw_only=True)
class SequenceChoices:
    """What can be chosen without reading the source again. Defaults: the preset `paper`.

    Raises ValueError for a value that is not known.
    """

    level: str = "integer"
    leakage: str = "keep"
    landmark: Landmark | None = None
    population: str = "subjects"
    denominator: str = "all"
    threshold: float = 5.0
    top_k: int = 5
    min_case_support: int = 1
    min_case_fraction: float = 0.0
    select: bool | str = True
    min_record_frequency: float = 0.001
    dedupe: str = "day"
    min_codes: int = 10
    min_codes_unit: str = "events"
    max_events: int | None = None
    time: str = "months"

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if not any(value is one or (isinstance(value, str) and value == one) for one in known):
                raise ValueError(f"{name} is one of {', '.join(map(str, known))}, found {value!r}")
        for name, smallest in LEAST_VALUES.items():
            value = getattr(self, name)
            if not (name == "max_events" and value is None):
                check_integer(name, value, smallest)
        for name, (least, most) in VALUE_RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise ValueError(f"{name} is a number from {least} to {most}, found {value!r}")

    @property
    def input_order(self) -> bool:
        """Whether the rows need the column `row`, the order of the input."""
        return self.dedupe == "first_per_age30"


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "original": {"select": "frequency", "min_codes": 50, "min_codes_unit": "records", "time": "age30", "dedupe": "first_per_age30"},
    "strict": {"landmark": Landmark(), "leakage": "drop_phecode", "min_case_support": 20, "min_case_fraction": 0.005},
}


def check_integer(name: str, value: object, least: int) -> int:
    """`value`, when it is a whole number of at least `least`; else a ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is a whole number of at least {least}, found {value!r}")
    return value


def parse_landmark(given: Mapping[str, Any] | None) -> Landmark | None:
    """A landmark from its parameters: landmark_days or date, gap_days, horizon_days; what is absent has its default.

    Raises:
        ValueError: for others, or values that are none.
    """
    if given is None:
        return None
    names = {"landmark_days", "gap_days", "horizon_days"}
    if not isinstance(given, Mapping) or not set(given) <= names | {"date"} or {"date", "landmark_days"} <= set(given):
        raise ValueError(f"a landmark has landmark_days or date, gap_days and horizon_days, found {given!r}")
    found: dict[str, Any] = {name: check_integer(name, given[name], 0) for name in names & set(given)}
    if "date" in given:
        day = dates.parse_day(given["date"]) if isinstance(given["date"], str) else None
        if day is None:
            raise ValueError(f"the date of a landmark is YYYY-MM-DD, found {given['date']!r}")
        found |= {"day": day, "landmark_days": None}
    return Landmark(**found)


@dataclass(frozen=True, kw_only=True)
class ClaimsShard:
    """Some subjects with all their valid rows, as integers."""

    rows: pl.DataFrame  # subject Int32 (row of `people`), day Int32, code Int32 (place in `codes`), source Int8; row Int64 for input_order
    codes: Sequence[IcdCode]
    people: pl.DataFrame  # subject_id, birth_day Int32, obs_end Int32, split; what is known of each subject is added as columns
    labels: tuple[str, ...] = ()  # names with a column y_<name> in `people`
    dated: frozenset[str] = frozenset()  # those of them that rules gave: only they have onsets, so only they change under a landmark
    rules: Sequence[LabelRule] = ()
    defining: Collection[str] = ()  # PheCodes that the map gives to the code sets of the rules (`rules.defining`)

    @property
    def last_day(self) -> int | None:
        """The last valid day of the shard."""
        last = self.rows["day"].max()
        return last if isinstance(last, int) else None


def load_shard(
    events: pl.DataFrame,
    people: pl.DataFrame,
    *,
    dated: Collection[str] = (),
    rules: Sequence[LabelRule] = (),
    defining: Collection[str] = (),
) -> ClaimsShard:
    """A shard from the cache's rows.

    Args:
        events: subject_id, day Int32, code (`ICD9CM//428.0`), source, phecodes, in any order.
        people: one row a subject, with the columns of `Shard.people` and of its labels (`labels.wide`).
        dated: labels that rules gave.
        rules: those of the ingest, for the leakage policies.
        defining: likewise.
    """
    import polars as pl

    table = events.select("code", "phecodes").unique("code").sort("code")
    found = []
    for text, phecodes in table.iter_rows():
        vocab, _, code = text.partition("//")
        found.append(IcdCode(vocab.lower(), code, tuple(phecodes or ())))
    numbers = people.select("subject_id", subject=pl.int_range(pl.len(), dtype=pl.Int32))
    rows = events.with_row_index("row").join(numbers, on="subject_id", maintain_order="left")
    rows = rows.select(
        "subject",
        "day",
        pl.col("code").replace_strict(table["code"], range(table.height), return_dtype=pl.Int32),
        pl.col("source").cast(pl.String).replace_strict(SOURCES, range(len(SOURCES)), default=SOURCES.index("other"), return_dtype=pl.Int8),
        pl.col("row").cast(pl.Int64),
    )
    names = tuple(column.removeprefix("y_") for column in people.columns if column.startswith("y_"))
    return ClaimsShard(rows=rows, codes=found, people=people, labels=names, dated=frozenset(dated), rules=rules, defining=defining)


def label_shard(shard: ClaimsShard, engine: Engine) -> ClaimsShard:
    """Pass 1: first day, onsets and labels of every subject, from all valid rows."""
    people = labels.add_first_days(shard.rows, shard.people, engine)
    people = labels.add_onsets(shard.rows, shard.codes, shard.rules, people, engine)
    names = tuple(rule.name for rule in shard.rules)
    return replace(shard, people=people, labels=(*shard.labels, *names), dated=shard.dated.union(names))


def set_index_days(shard: ClaimsShard, choices: SequenceChoices, data_end: int | None, engine: Engine) -> ClaimsShard:
    """Pass 1: index days and the labels that hold at them. `data_end`: last valid day of all shards; None where every obs_end is known."""
    people = shard.people
    if "first_day" not in people.columns:
        people = labels.add_first_days(shard.rows, people, engine)
    return replace(shard, people=labels.apply_landmark(people, sorted(shard.dated), choices.landmark, data_end))


def count_shard(shard: ClaimsShard, choices: SequenceChoices, engine: Engine) -> CodeCounts:
    """Pass 1: the counts on which ratios and selection rest."""
    lazy, phecodes = _select_records(shard, choices, engine)
    frequency = choices.select == "frequency"
    return prevalence.count_codes(lazy, phecodes, shard.people, shard.labels, engine, population=choices.population, frequency=frequency)


def select_vocabulary(counts: CodeCounts, names: Sequence[str], choices: SequenceChoices) -> CodeSelection:
    """Between the passes: ratios and vocabulary."""
    wanted = ("select", "denominator", "threshold", "top_k", "min_case_support", "min_case_fraction", "min_record_frequency")
    return prevalence.select_codes(counts, names, **{name: getattr(choices, name) for name in wanted})


def build_shard(shard: ClaimsShard, choices: SequenceChoices, selection: CodeSelection, engine: Engine) -> CodeSequences:
    """Pass 2: the sequences."""
    lazy, phecodes = _select_records(shard, choices, engine)
    return sequence_builder.build_code_sequences(
        lazy,
        phecodes,
        sequence_builder.number_phecodes(selection.phecodes),
        shard.people,
        engine,
        dedupe=choices.dedupe,
        min_codes=choices.min_codes,
        min_codes_unit=choices.min_codes_unit,
        max_events=choices.max_events,
        time=choices.time,
    )


def _select_records(shard: ClaimsShard, choices: SequenceChoices, engine: Engine) -> tuple[nw.LazyFrame[Any], list[str]]:
    """What may enter the input, and the names of its PheCodes."""
    voices = leakage_policy.list_input_phecodes(
        shard.codes, level=choices.level, leakage=choices.leakage, rules=shard.rules, defining=shard.defining
    )
    rows = shard.rows if choices.input_order else shard.rows.drop("row", strict=False)
    return leakage_policy.select_records(rows, voices, shard.people, engine)
