"""Longitudinal claims -> irregularly timed PheCode sequences with rule-based labels.

    dates, codes, maps     text -> days, codes, PheCodes; each distinct text once
    rules                  labels as data
    cleaning               claims as text -> integers, every row accounted for
    labels, records        onsets, landmark; what may enter the input
    ratios, sequences      which PheCodes, which events, on which clock
    building               these steps for a shard of subjects, in two passes
    engines                polars, DuckDB or Spark for the table steps
    probe                  how much the labels leak into the input
    sources                raw files -> claims as text

The steps and their order are normative (section 2 of the builder's reference). Heavy libraries are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bitimely_core.claims import clean, dates, phecode_maps, prevalence, sequence_builder, splits, steps
from bitimely_core.claims.codes import FAMILIES, STEPS, Codebook
from bitimely_core.claims.engines import ENGINES, open_engine
from bitimely_core.claims.label_rules import LabelRule, find_defining_phecodes, parse_rules
from bitimely_core.claims.steps import ClaimsShard, SequenceChoices

if TYPE_CHECKING:
    import polars as pl


def build_sequences(
    events: pl.DataFrame,
    subjects: pl.DataFrame | None,
    phemap: pl.DataFrame,
    *,
    engine: str = "polars",
    vocab: str = "icd9",
    pad_undotted: bool = False,
    fallback: Sequence[str] = STEPS,
    level: str = "integer",
    rules: Iterable[Mapping[str, Any]] = (),
    leakage: str = "keep",
    landmark: Mapping[str, Any] | None = None,
    population: str = "subjects",
    denominator: str = "all",
    threshold: float = 5.0,
    top_k: int = 5,
    min_case_support: int = 1,
    min_case_fraction: float = 0.0,
    select: bool = True,
    dedupe: str = "day",
    min_codes: int = 10,
    min_codes_unit: str = "events",
    max_events: int | None = None,
    time: str = "months",
    split: Mapping[str, Any] | None = None,
    split_override: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Sequences, labels, ratios and the account of rows from tables in memory: the steps of the commands on raw ids and true days.

    Args:
        events: subject_id (String or Int64), date, code, and where there are any vocab and source; one row a claim line, all text.
        subjects: the registered population: subject_id, and where known birth, obs_end; None: whoever has a valid row.
        phemap: vocab (icd9 or icd10), code (normalised), phecode, in long form.
        engine: polars, duckdb or spark, with the same result.
        vocab: of rows that name none.
        pad_undotted: read an undotted ICD-9 number of 1 or 2 digits as a category that has lost its zeros.
        fallback: steps of the lookup that are allowed.
        level: roll-up of PheCodes.
        rules: label rules (`rules.parse`).
        leakage: keep, drop_icd or drop_phecode.
        landmark: landmark_days or date, gap_days, horizon_days.
        population: who is in the reference group of the ratios: all subjects, or those observed.
        denominator: the reference group: all of them, or controls.
        threshold: PheCodes with a greater ratio are selected.
        top_k: how many are taken for a rule that has none.
        min_case_support: carriers among the cases that a PheCode needs to be a candidate.
        min_case_fraction: the same as a share of the cases.
        select: False keeps every PheCode that occurs.
        dedupe: day, month, none or first_per_age30.
        min_codes: subjects with fewer are left out.
        min_codes_unit: events, records or unique.
        max_events: the last so many events stay.
        time: months, calendar_month or age30.
        split: seed, train, validation of the hash split.
        split_override: subject -> split instead.

    Returns:
        selected, vocab, labels, onset, split, ratios, sequences and funnel, in plain Python values.

    Raises:
        ValueError: for parameters and tables that are not as described. Bad rows never raise, they are counted in the funnel.
    """
    parsed = parse_rules(rules)
    choices = SequenceChoices(
        level=level,
        leakage=leakage,
        landmark=steps.parse_landmark(landmark),
        population=population,
        denominator=denominator,
        threshold=threshold,
        top_k=top_k,
        min_case_support=min_case_support,
        min_case_fraction=min_case_fraction,
        select=_check_choice("select", select, (True, False)),
        dedupe=dedupe,
        min_codes=min_codes,
        min_codes_unit=min_codes_unit,
        max_events=max_events,
        time=time,
    )
    _check_choice("vocab", vocab, tuple(FAMILIES))
    _check_choice("pad_undotted", pad_undotted, (True, False))
    _check_choice("engine", engine, ENGINES)
    if isinstance(fallback, str) or not set(fallback) <= set(STEPS):
        raise ValueError(f"fallback is a list of {', '.join(STEPS)}, found {fallback!r}")
    tables = _read_phemap(phemap)
    rows, people, account = _clean_events(
        events, _select_registered(subjects, events), book := Codebook(tables, tuple(fallback), pad_undotted), vocab
    )
    people = _assign_splits(people, split, split_override)
    own = {phecode for found in find_defining_phecodes(parsed, tables).values() for phecode in found}
    shard = ClaimsShard(rows=rows, codes=book.codes, people=people, rules=parsed, defining=own)

    with open_engine(engine) as run:
        labelled = steps.label_shard(shard, run)
        marked = steps.set_index_days(labelled, choices, labelled.last_day, run)
        counts = steps.count_shard(marked, choices, run)
        selection = steps.select_vocabulary(counts, marked.labels, choices)
        built = steps.build_shard(marked, choices, selection, run)
    return _assemble_result(marked, selection, built, account, parsed)


# --- arguments


def _check_choice(name: str, value: Any, known: Sequence[Any]) -> Any:
    if not any(value is one or (isinstance(value, str) and value == one) for one in known):
        raise ValueError(f"{name} is one of {', '.join(map(str, known))}, found {value!r}")
    return value


def _require_columns(frame: Any, name: str, needed: Sequence[str]) -> None:
    import polars as pl

    if not isinstance(frame, pl.DataFrame):
        raise TypeError(f"{name} is a polars DataFrame, found {type(frame).__name__}")
    if missing := [column for column in needed if column not in frame.columns]:
        raise ValueError(f"{name} has no column {missing[0]!r}")


def _check_subject_ids(frame: pl.DataFrame, name: str) -> pl.DataFrame:
    import polars as pl

    dtype = frame.schema["subject_id"]
    if dtype not in (pl.String, pl.Int64) and not (dtype == pl.Null and frame.is_empty()):
        raise ValueError(f"subject_id of {name} is {dtype}, expected String or Int64")
    if frame["subject_id"].null_count():
        raise ValueError(f"subject_id of {name} is null in some row")
    return frame


def _read_phemap(phemap: pl.DataFrame) -> dict[str, dict[str, tuple[str, ...]]]:
    import polars as pl

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
    import polars as pl

    _require_columns(events, "events", ("subject_id", "date", "code"))
    dtype = _check_subject_ids(events, "events").schema["subject_id"]
    if subjects is None:
        return pl.DataFrame(schema={"subject_id": dtype, "birth_day": pl.Int32, "obs_end": pl.Int32})
    _require_columns(subjects, "subjects", ("subject_id",))
    own = _check_subject_ids(subjects, "subjects").schema["subject_id"]
    if subjects["subject_id"].is_duplicated().any():
        raise ValueError("subject_id of subjects is there twice")
    if own != dtype and not (events.is_empty() or subjects.is_empty()):
        raise ValueError(f"subject_id is {dtype} in events and {own} in subjects")
    unknown = pl.repeat(None, subjects.height, dtype=pl.Int32, eager=True)
    return subjects.select(
        pl.col("subject_id").cast(dtype if subjects.is_empty() else own),
        *(
            (dates.parse_days(subjects[old]) if old in subjects.columns else unknown).alias(new)
            for old, new in (("birth", "birth_day"), ("obs_end", "obs_end"))
        ),
    )


def _clean_events(
    events: pl.DataFrame, registered: pl.DataFrame, book: Codebook, vocab: str
) -> tuple[pl.DataFrame, pl.DataFrame, clean.RowAccount]:
    """The valid rows, and the subjects: registered, or with a valid row."""
    import polars as pl

    used = events.select(name for name in ("subject_id", "date", "code", "vocab", "source") if name in events.columns)
    events = used.cast({"subject_id": registered.schema["subject_id"]}) if used.is_empty() else used
    rows, account = clean.clean_rows(events, book, vocab=vocab, lives=registered.select("subject_id", "birth_day"))
    known = pl.concat([registered.select("subject_id"), rows.select("subject_id")]).unique()
    people = known.join(registered, on="subject_id", how="left").sort("subject_id")
    numbers = people.select("subject_id", subject=pl.int_range(pl.len(), dtype=pl.Int32))
    rows = rows.join(numbers, on="subject_id", maintain_order="left").select("subject", "day", "code", "source", "row")
    return rows, people, account


def _assign_splits(people: pl.DataFrame, split: Mapping[str, Any] | None, override: Mapping[str, str] | None) -> pl.DataFrame:
    """`people` with their splits."""
    import polars as pl

    names = [str(subject) for subject in people["subject_id"]]
    chosen = {"seed": splits.SEED, "train": splits.TRAIN, "validation": splits.VALIDATION} | dict(split or {})
    if len(chosen) > 3:
        raise ValueError(f"split has seed, train and validation, found {split!r}")
    seed = chosen["seed"]
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"seed of split is a whole number, found {seed!r}")  # noqa: TRY004
    for name in ("train", "validation"):
        if isinstance(chosen[name], bool) or not isinstance(chosen[name], int | float) or not 0 <= chosen[name] <= 1:
            raise ValueError(f"{name} of split is a share, found {chosen[name]!r}")
    if override is None:
        placed = [splits.assign_split(splits.hash_subject(name, seed), chosen["train"], chosen["validation"]) for name in names]
    else:
        if missing := [name for name in names if name not in override]:
            raise ValueError(f"split_override misses {len(missing)} of {len(names)} subjects")
        placed = [_check_choice("a split", override[name], splits.SPLITS) for name in names]
    return people.with_columns(pl.Series("split", placed, dtype=pl.String))


# --- result


def _assemble_result(
    shard: ClaimsShard,
    selection: prevalence.CodeSelection,
    built: sequence_builder.CodeSequences,
    account: clean.RowAccount,
    rules: Sequence[LabelRule],
) -> dict[str, Any]:
    people = shard.people
    names = [str(subject) for subject in people["subject_id"]]
    placed = people["split"].to_list()
    values = {rule.name: people[f"y_{rule.name}"].to_list() for rule in rules}
    days = {rule.name: people[f"onset_{rule.name}"].to_list() for rule in rules}
    labels = [{name: of[i] for name, of in values.items()} for i in range(len(names))]
    onsets = [{name: None if of[i] is None else dates.format_day(of[i]) for name, of in days.items()} for i in range(len(names))]
    phecode = dict(enumerate(selection.phecodes, len(sequence_builder.SPECIAL)))
    kept = {}
    for n, (i, age) in enumerate(zip(built.subjects.tolist(), sequence_builder.compute_ages(built, people), strict=True)):
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
    funnel = account.funnel() | {"events": len(built.ids), "subjects_in": len(names), "subjects_out": len(kept), "no_birth": built.no_birth}
    return {
        "selected": selection.phecodes,
        "vocab": sequence_builder.number_phecodes(selection.phecodes),
        "labels": dict(zip(names, labels, strict=True)),
        "onset": dict(zip(names, onsets, strict=True)),
        "split": dict(zip(names, placed, strict=True)),
        "ratios": {name: {one: found.counts() for one, found in own.items()} for name, own in selection.ratios.items()},
        "sequences": kept,
        "funnel": funnel,
    }
