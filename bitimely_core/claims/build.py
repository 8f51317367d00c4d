"""`build_sequences`: claims in memory to irregularly timed PheCode sequences with labels by rules.

The steps and their order are normative (section 2 of the builder's reference).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, TypedDict

import numpy as np
import polars as pl
import polars.selectors as cs
from pydantic import BaseModel, ConfigDict, Field

from bitimely_core.claims import (
    clean,
    dates,
    engines,
    phecode_maps,
    prevalence,
    sequence_builder,
    steps,
    subject_splits,
)
from bitimely_core.claims.codebook import Codebook
from bitimely_core.claims.codes import FAMILIES, STEPS
from bitimely_core.claims.label_rules import (
    LabelRule,
    RuleTable,
    find_defining_phecodes,
    parse_rules,
)
from bitimely_core.claims.prevalence import CodeCounts, CodeSelection
from bitimely_core.claims.sequence_builder import CodeSequences
from bitimely_core.claims.sequence_choices import SequenceChoices, check_value, parse_landmark
from bitimely_core.claims.steps import ClaimsShard
from bitimely_core.tokens.sequences import SPECIAL

Share = Annotated[float, Field(ge=0, le=1)]
RATIO_COUNTS = ("ratio", "n_case_with", "n_case", "n_ref_with", "n_ref")


class HashSplit(BaseModel):
    """Seed and shares of the split by the hash of a subject."""

    model_config = ConfigDict(extra="forbid", strict=True)

    seed: int = subject_splits.SEED
    train: Share = subject_splits.TRAIN
    validation: Share = subject_splits.VALIDATION


class BuiltSequence(TypedDict):
    """The sequence of one subject; `gaps` includes [SOS] and [EOS]."""

    codes: list[int]
    phecodes: list[str]
    times: list[float]
    gaps: list[float]
    split: str
    labels: dict[str, int | None]
    age0_months: int | None


class BuildResult(TypedDict):
    """What `build_sequences` returns: plain Python values, subjects by `str(subject_id)`."""

    selected: list[str]
    vocab: dict[str, int]
    labels: dict[str, dict[str, int | None]]
    onset: dict[str, dict[str, str | None]]
    split: dict[str, str]
    ratios: dict[str, dict[str, dict[str, float]]]  # label -> PheCode -> `RATIO_COUNTS`
    sequences: dict[str, BuiltSequence]
    funnel: dict[str, int | dict[str, int]]


def build_sequences(
    events: pl.DataFrame,
    subjects: pl.DataFrame | None,
    phemap: pl.DataFrame,
    *,
    engine: str = "polars",
    vocab: str = "icd9",
    pad_undotted: bool = False,
    fallback: Sequence[str] = STEPS,
    rules: Iterable[RuleTable] = (),
    landmark: Mapping[str, object] | None = None,
    split: Mapping[str, object] | None = None,
    split_override: Mapping[str, str] | None = None,
    **choices: Any,
) -> BuildResult:
    """Sequences, labels, ratios and funnel from tables in memory: the steps of the commands on raw
    ids and true days.

    Args:
        events: subject_id (String or Int64), date, code, optional vocab and source; one row per
            claim line, all text.
        subjects: the registered population: subject_id, optional birth, obs_end; None: the subjects
            with a valid row.
        phemap: vocab (icd9 or icd10), code (normalised), phecode, in long form.
        engine: polars: in this process; spark: on executors of Spark, with the same result.
        vocab: of rows without one.
        pad_undotted: read an undotted ICD-9 number of 1 or 2 digits as a category that has lost its
            zeros.
        fallback: steps of the lookup that are allowed.
        rules: label rules (`label_rules.parse_rules`).
        landmark: landmark_days or date, gap_days, horizon_days.
        split: seed, train, validation of the hash split.
        split_override: subject -> split instead.
        choices: the other fields of `choices.SequenceChoices`, with its defaults; `select` is True
            or False.

    Raises ValueError: for invalid parameters and tables. Bad rows never raise, they are counted in
    the funnel.
    """
    parsed = parse_rules(rules)
    check_value("select", choices.get("select", True), (True, False))
    chosen = SequenceChoices(landmark=parse_landmark(landmark), **choices)
    if isinstance(fallback, str) or not set(fallback) <= set(STEPS):
        raise ValueError(f"fallback is a list of {', '.join(STEPS)}, found {fallback!r}")
    book = Codebook(
        _read_phemap(phemap),
        tuple(fallback),
        check_value("pad_undotted", pad_undotted, (True, False)),
    )
    check_value("vocab", vocab, tuple(FAMILIES))
    check_value("engine", engine, engines.ENGINES)
    rows, cohort, account = _clean_events(events, _select_registered(subjects, events), book, vocab)
    defining = set[str]().union(*find_defining_phecodes(parsed, book.tables).values())
    cohort = _assign_splits(cohort, split, split_override)
    shard = ClaimsShard(rows=rows, codes=book.codes, cohort=cohort, rules=parsed, defining=defining)
    on_spark = engine == "spark"
    apply: Callable[..., Iterable[Any]] = engines.run_tasks if on_spark else map
    shards = _split_shard(shard, engines.open_spark().defaultParallelism if on_spark else 1)
    labelled, counts = zip(
        *apply(partial(_label_and_count, chosen, shard.last_day), shards), strict=True
    )
    selection = prevalence.select_codes(sum(counts, start=CodeCounts()), labelled[0].labels, chosen)
    every = prevalence.sort_phecodes([*selection.phecodes, *selection.unseen])
    # only what a model reads has a vocabulary of training subjects
    selection = replace(selection, phecodes=every, unseen=())
    built = list(apply(partial(steps.build_shard, choices=chosen, selection=selection), labelled))
    return _assemble_result(labelled, selection, built, account, parsed)


def _label_and_count(
    choices: SequenceChoices, data_end: int | None, shard: ClaimsShard
) -> tuple[ClaimsShard, CodeCounts]:
    """Pass 1 over a shard: the shard with labels at the index days, and its counts."""
    labelled = steps.set_index_days(steps.label_shard(shard), choices, data_end)
    return labelled, steps.count_shard(labelled, choices)


def _split_shard(shard: ClaimsShard, parts: int) -> list[ClaimsShard]:
    """Shards of consecutive subjects, about equally many, each with the rows of its subjects; one
    shard where there are no subjects.
    """
    parts = max(1, min(parts, shard.cohort.height))
    bounds = np.linspace(0, shard.cohort.height, parts + 1).astype(int).tolist()
    shards = []
    for first, end in pairwise(bounds):
        in_part = pl.col("subject").is_between(first, end, closed="left")
        numbered = shard.rows.filter(in_part).with_columns(pl.col("subject") - first)
        shards.append(replace(shard, rows=numbered, cohort=shard.cohort[first:end]))
    return shards


def _check_table(frame: object, name: str, kinds: Mapping[str, Sequence[object]]) -> None:
    """Refuse a table without a column, or with nulls or another type where the types of a column
    are given. Raises TypeError, ValueError.
    """
    if not isinstance(frame, pl.DataFrame):
        raise TypeError(f"{name} is a polars DataFrame, found {type(frame).__name__}")
    for column, expected in kinds.items():
        if column not in frame.columns:
            raise ValueError(f"{name} has no column {column!r}")
        dtype = frame.schema[column]
        is_empty = dtype == pl.Null and frame.is_empty()
        if expected and dtype not in expected and not is_empty:
            kind = " or ".join(map(str, expected))
            raise ValueError(f"{column} of {name} is {dtype}, expected {kind}")
        if expected and frame[column].null_count():
            raise ValueError(f"{column} of {name} is null in some row")


def _read_phemap(phemap: pl.DataFrame) -> dict[str, dict[str, tuple[str, ...]]]:
    columns = ("vocab", "code", "phecode")
    _check_table(phemap, "phemap", dict.fromkeys(columns, (pl.String,)))
    frame = phemap.select(columns)
    for name in frame["vocab"].unique():
        check_value("vocab of phemap", name, tuple(FAMILIES))
    return phecode_maps.group_phecodes(frame.unique().iter_rows())


def _select_registered(subjects: pl.DataFrame | None, events: pl.DataFrame) -> pl.DataFrame:
    """subject_id, birth_day, obs_end of the registered population."""
    ids = {"subject_id": [pl.String, pl.Int64]}
    _check_table(events, "events", {**ids, "date": (), "code": ()})
    dtype = events.schema["subject_id"]
    if subjects is None:
        return pl.DataFrame(
            schema={"subject_id": dtype, "birth_day": pl.Int32, "obs_end": pl.Int32}
        )
    _check_table(subjects, "subjects", ids)
    registered = subjects.schema["subject_id"]
    if subjects["subject_id"].is_duplicated().any():
        raise ValueError("a subject_id of subjects has two rows")
    if subjects.is_empty():
        registered = dtype
    elif registered != dtype and not events.is_empty():
        raise ValueError(f"subject_id is {dtype} in events and {registered} in subjects")
    days = {
        name: dates.parse_days(subjects[column])
        if column in subjects.columns
        else pl.lit(None, pl.Int32)
        for name, column in (("birth_day", "birth"), ("obs_end", "obs_end"))
    }
    return subjects.select(pl.col("subject_id").cast(registered), **days)


def _clean_events(
    events: pl.DataFrame, registered: pl.DataFrame, book: Codebook, vocab: str
) -> tuple[pl.DataFrame, pl.DataFrame, clean.RowAccount]:
    """The valid rows, and the subjects: registered, or with a valid row."""
    columns = ("subject_id", "date", "code", "vocab", "source")
    events = events.select(name for name in columns if name in events.columns)
    if events.is_empty():
        events = events.cast({"subject_id": registered.schema["subject_id"]})
    rows, account = clean.clean_rows(
        events,
        book,
        form=clean.RowForm(vocab),
        life_dates=registered.select("subject_id", "birth_day"),
    )
    ids = pl.concat([registered.select("subject_id"), rows.select("subject_id")]).unique()
    cohort = ids.join(registered, on="subject_id", how="left").sort("subject_id")
    numbers = cohort.select("subject_id", subject=pl.int_range(pl.len(), dtype=pl.Int32))
    rows = rows.join(numbers, on="subject_id", maintain_order="left").select(
        "subject", "day", "code", "source", "row"
    )
    return rows, cohort, account


def _assign_splits(
    cohort: pl.DataFrame, split: Mapping[str, object] | None, override: Mapping[str, str] | None
) -> pl.DataFrame:
    """The subjects with their split: that of `override`, or by their hash."""
    subjects = list(map(str, cohort["subject_id"]))
    shares = HashSplit.model_validate(split or {})
    if override is None:
        numbers = [subject_splits.hash_subject(subject, shares.seed) for subject in subjects]
        names = [subject_splits.assign_split(u, shares.train, shares.validation) for u in numbers]
    else:
        if missing := [subject for subject in subjects if subject not in override]:
            raise ValueError(f"split_override misses {len(missing)} of {len(subjects)} subjects")
        names = [
            check_value("a split", override[subject], subject_splits.SPLITS) for subject in subjects
        ]
    return cohort.with_columns(pl.Series("split", names, dtype=pl.String))


def _assemble_result(
    shards: Sequence[ClaimsShard],
    selection: CodeSelection,
    built: Sequence[CodeSequences],
    account: clean.RowAccount,
    rules: Sequence[LabelRule],
) -> BuildResult:
    """The result of all shards together, with subjects in their order."""
    labels: dict[str, dict[str, int | None]] = {}
    onsets: dict[str, dict[str, str | None]] = {}
    split: dict[str, str] = {}
    sequences: dict[str, BuiltSequence] = {}
    for shard, shard_sequences in zip(shards, built, strict=True):
        subjects = list(map(str, shard.cohort["subject_id"]))
        # days as YYYY-MM-DD
        dated = shard.cohort.with_columns(cs.starts_with("onset_").cast(pl.Date).cast(pl.String))
        for subject, row in zip(subjects, dated.iter_rows(named=True), strict=True):
            labels[subject] = {rule.name: row[f"y_{rule.name}"] for rule in rules}
            onsets[subject] = {rule.name: row[f"onset_{rule.name}"] for rule in rules}
            split[subject] = row["split"]
        ages = sequence_builder.compute_ages(shard_sequences, shard.cohort)
        for i, (number, age) in enumerate(zip(shard_sequences.subjects, ages, strict=True)):
            subject = subjects[number]
            events = slice(shard_sequences.offsets[i], shard_sequences.offsets[i + 1])
            ids = shard_sequences.ids[events].tolist()
            sequences[subject] = {
                "codes": ids,
                "phecodes": [selection.phecodes[code - len(SPECIAL)] for code in ids],
                "times": shard_sequences.times[events].tolist(),
                "gaps": shard_sequences.gaps(i).tolist(),
                "split": split[subject],
                "labels": dict(labels[subject]),
                "age0_months": age,
            }
    counts = {
        "events": sum(len(shard_sequences.ids) for shard_sequences in built),
        "subjects_in": len(labels),
        "subjects_out": len(sequences),
        "no_birth": sum(shard_sequences.no_birth for shard_sequences in built),
    }
    return {
        "selected": selection.phecodes,
        "vocab": sequence_builder.number_phecodes(selection.phecodes),
        "labels": labels,
        "onset": onsets,
        "split": split,
        "ratios": _list_ratios(selection),
        "sequences": sequences,
        "funnel": account.funnel().model_dump() | counts,
    }


def _list_ratios(selection: CodeSelection) -> dict[str, dict[str, dict[str, float]]]:
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    for name, candidates in selection.ratios.items():
        ratios[name] = {
            phecode: {count: getattr(ratio, count) for count in RATIO_COUNTS}
            for phecode, ratio in candidates.items()
        }
    return ratios
