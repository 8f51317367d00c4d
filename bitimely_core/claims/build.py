"""`build_sequences`: longitudinal claims in memory to irregularly timed PheCode sequences with rule-based labels.

The steps and their order are normative (section 2 of the builder's reference). Heavy libraries are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, TypeVar

import polars as pl

from bitimely_core.claims import clean, dates, phecode_maps, prevalence, sequence_builder, splits, steps
from bitimely_core.claims.codes import FAMILIES, STEPS, Codebook
from bitimely_core.claims.engines import ENGINES, open_engine
from bitimely_core.claims.label_rules import LabelRule, RuleTable, find_defining_phecodes, parse_rules
from bitimely_core.claims.steps import ClaimsShard, SequenceChoices

T = TypeVar("T")


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
    ratios: dict[str, dict[str, prevalence.RatioCounts]]
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
    """Sequences, labels, ratios and funnel from tables in memory: the steps of the commands on raw ids and true days.

    Args:
        events: subject_id (String or Int64), date, code, optional vocab and source; one row per claim line, all text.
        subjects: the registered population: subject_id, optional birth, obs_end; None: the subjects with a valid row.
        phemap: vocab (icd9 or icd10), code (normalised), phecode, in long form.
        engine: polars, duckdb or spark, with the same result.
        vocab: of rows without one.
        pad_undotted: read an undotted ICD-9 number of 1 or 2 digits as a category that has lost its zeros.
        fallback: steps of the lookup that are allowed.
        rules: label rules (`label_rules.parse_rules`).
        landmark: landmark_days or date, gap_days, horizon_days.
        split: seed, train, validation of the hash split.
        split_override: subject -> split instead.
        choices: the other fields of `steps.SequenceChoices`, with its defaults; `select` is True or False.

    Raises ValueError: for invalid parameters and tables. Bad rows never raise, they are counted in the funnel.
    """
    parsed = parse_rules(rules)
    _check_choice("select", choices.get("select", True), (True, False))
    chosen = SequenceChoices(landmark=steps.parse_landmark(landmark), **choices)
    if isinstance(fallback, str) or not set(fallback) <= set(STEPS):
        raise ValueError(f"fallback is a list of {', '.join(STEPS)}, found {fallback!r}")
    book = Codebook(_read_phemap(phemap), tuple(fallback), _check_choice("pad_undotted", pad_undotted, (True, False)))
    _check_choice("vocab", vocab, tuple(FAMILIES))
    _check_choice("engine", engine, ENGINES)
    rows, cohort, account = _clean_events(events, _select_registered(subjects, events), book, vocab)
    defining = {phecode for found in find_defining_phecodes(parsed, book.tables).values() for phecode in found}
    cohort = _assign_splits(cohort, split, split_override)
    shard = ClaimsShard(rows=rows, codes=book.codes, cohort=cohort, rules=parsed, defining=defining)
    with open_engine(engine) as run:
        labelled = steps.label_shard(shard, run)
        marked = steps.set_index_days(labelled, chosen, labelled.last_day, run)
        selection = steps.select_vocabulary(steps.count_shard(marked, chosen, run), marked.labels, chosen)
        every = prevalence.sort_phecodes([*selection.phecodes, *selection.unseen])
        selection = replace(selection, phecodes=every, unseen=())  # only what a model reads has a vocabulary of training subjects
        built = steps.build_shard(marked, chosen, selection, run)
    return _assemble_result(marked, selection, built, account, parsed)


def _check_choice(name: str, value: T, known: Sequence[object]) -> T:
    if not any(value is one or (isinstance(value, str) and value == one) for one in known):
        raise ValueError(f"{name} is one of {', '.join(map(str, known))}, found {value!r}")
    return value


def _require_columns(frame: object, name: str, needed: Sequence[str]) -> None:
    if not isinstance(frame, pl.DataFrame):
        raise TypeError(f"{name} is a polars DataFrame, found {type(frame).__name__}")
    if missing := [column for column in needed if column not in frame.columns]:
        raise ValueError(f"{name} has no column {missing[0]!r}")


def _check_subject_ids(frame: pl.DataFrame, name: str) -> pl.DataFrame:
    dtype = frame.schema["subject_id"]
    if dtype not in (pl.String, pl.Int64) and not (dtype == pl.Null and frame.is_empty()):
        raise ValueError(f"subject_id of {name} is {dtype}, expected String or Int64")
    if frame["subject_id"].null_count():
        raise ValueError(f"subject_id of {name} is null in some row")
    return frame


def _read_phemap(phemap: pl.DataFrame) -> dict[str, dict[str, tuple[str, ...]]]:
    _require_columns(phemap, "phemap", ("vocab", "code", "phecode"))
    frame = phemap.select("vocab", "code", "phecode")
    for column, dtype in frame.schema.items():
        if dtype != pl.String and not (dtype == pl.Null and frame.is_empty()):
            raise ValueError(f"column {column!r} of phemap is {dtype}, expected text")
        if frame[column].null_count():
            raise ValueError(f"column {column!r} of phemap is null in some row")
    for name in frame["vocab"].unique():
        _check_choice("vocab of phemap", name, tuple(FAMILIES))
    return phecode_maps.group_phecodes(frame.unique().iter_rows())


def _select_registered(subjects: pl.DataFrame | None, events: pl.DataFrame) -> pl.DataFrame:
    """subject_id, birth_day, obs_end of the registered population."""
    _require_columns(events, "events", ("subject_id", "date", "code"))
    dtype = _check_subject_ids(events, "events").schema["subject_id"]
    if subjects is None:
        return pl.DataFrame(schema={"subject_id": dtype, "birth_day": pl.Int32, "obs_end": pl.Int32})
    _require_columns(subjects, "subjects", ("subject_id",))
    own = _check_subject_ids(subjects, "subjects").schema["subject_id"]
    if subjects["subject_id"].is_duplicated().any():
        raise ValueError("a subject_id of subjects has two rows")
    if own != dtype and not (events.is_empty() or subjects.is_empty()):
        raise ValueError(f"subject_id is {dtype} in events and {own} in subjects")
    known = {"birth_day": "birth", "obs_end": "obs_end"}
    days = {new: dates.parse_days(subjects[old]) if old in subjects.columns else pl.lit(None, pl.Int32) for new, old in known.items()}
    return subjects.select(pl.col("subject_id").cast(dtype if subjects.is_empty() else own), **days)


def _clean_events(
    events: pl.DataFrame, registered: pl.DataFrame, book: Codebook, vocab: str
) -> tuple[pl.DataFrame, pl.DataFrame, clean.RowAccount]:
    """The valid rows, and the subjects: registered, or with a valid row."""
    used = events.select(name for name in ("subject_id", "date", "code", "vocab", "source") if name in events.columns)
    events = used.cast({"subject_id": registered.schema["subject_id"]}) if used.is_empty() else used
    rows, account = clean.clean_rows(events, book, vocab=vocab, life_dates=registered.select("subject_id", "birth_day"))
    known = pl.concat([registered.select("subject_id"), rows.select("subject_id")]).unique()
    cohort = known.join(registered, on="subject_id", how="left").sort("subject_id")
    numbers = cohort.select("subject_id", subject=pl.int_range(pl.len(), dtype=pl.Int32))
    rows = rows.join(numbers, on="subject_id", maintain_order="left").select("subject", "day", "code", "source", "row")
    return rows, cohort, account


def _assign_splits(cohort: pl.DataFrame, split: Mapping[str, object] | None, override: Mapping[str, str] | None) -> pl.DataFrame:
    names = [str(subject) for subject in cohort["subject_id"]]
    chosen: dict[str, object] = {"seed": splits.SEED, "train": splits.TRAIN, "validation": splits.VALIDATION, **(split or {})}
    if len(chosen) > 3:
        raise ValueError(f"split has seed, train and validation, found {split!r}")
    seed = chosen["seed"]
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"seed of split is an integer, found {seed!r}")  # noqa: TRY004
    train, validation = (_check_share(name, chosen[name]) for name in ("train", "validation"))
    if override is None:
        placed = [splits.assign_split(splits.hash_subject(name, seed), train, validation) for name in names]
    else:
        if missing := [name for name in names if name not in override]:
            raise ValueError(f"split_override misses {len(missing)} of {len(names)} subjects")
        placed = [_check_choice("a split", override[name], splits.SPLITS) for name in names]
    return cohort.with_columns(pl.Series("split", placed, dtype=pl.String))


def _check_share(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name} of split is a share, found {value!r}")
    return value


def _assemble_result(
    shard: ClaimsShard,
    selection: prevalence.CodeSelection,
    built: sequence_builder.CodeSequences,
    account: clean.RowAccount,
    rules: Sequence[LabelRule],
) -> BuildResult:
    cohort = shard.cohort
    names = [str(subject) for subject in cohort["subject_id"]]
    placed = cohort["split"].to_list()
    values = {rule.name: cohort[f"y_{rule.name}"].to_list() for rule in rules}
    days = {rule.name: cohort[f"onset_{rule.name}"].to_list() for rule in rules}
    labels = [{name: of[i] for name, of in values.items()} for i in range(len(names))]
    onsets = [{name: None if of[i] is None else dates.format_day(of[i]) for name, of in days.items()} for i in range(len(names))]
    phecode = dict(enumerate(selection.phecodes, len(sequence_builder.SPECIAL)))
    kept: dict[str, BuiltSequence] = {}
    for n, (i, age) in enumerate(zip(built.subjects.tolist(), sequence_builder.compute_ages(built, cohort), strict=True)):
        span = slice(built.offsets[n], built.offsets[n + 1])
        ids = built.ids[span].tolist()
        kept[names[i]] = {
            "codes": ids,
            "phecodes": [phecode[one] for one in ids],
            "times": built.times[span].tolist(),
            "gaps": built.gaps(n).tolist(),
            "split": placed[i],
            "labels": dict(labels[i]),
            "age0_months": age,
        }
    counts = {"events": len(built.ids), "subjects_in": len(names), "subjects_out": len(kept), "no_birth": built.no_birth}
    return {
        "selected": selection.phecodes,
        "vocab": sequence_builder.number_phecodes(selection.phecodes),
        "labels": dict(zip(names, labels, strict=True)),
        "onset": dict(zip(names, onsets, strict=True)),
        "split": dict(zip(names, placed, strict=True)),
        "ratios": {name: {one: found.counts() for one, found in own.items()} for name, own in selection.ratios.items()},
        "sequences": kept,
        "funnel": account.funnel().model_dump() | counts,
    }
