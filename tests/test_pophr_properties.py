"""The builder against a naive reading of its rules, and properties that hold for any table."""

from __future__ import annotations

import dataclasses
import random
from datetime import timedelta
from typing import Any

import polars as pl
import pytest
from engines import SPARK_ENGINE
from naive_builder import RULES, assert_same_result, build_naively, random_params, random_tables

from bitimely_core.claims import (
    clean,
    codebook,
    codes,
    label_rules,
    phecode_maps,
    prevalence,
    steps,
    subject_splits,
)
from bitimely_core.claims.build import build_sequences
from bitimely_core.claims.sequence_choices import SequenceChoices, parse_landmark


@pytest.mark.parametrize("block", range(8))
def test_equals_the_naive_reading(block: int) -> None:
    for seed in range(block * 12, block * 12 + 12):
        tables, params = random_tables(seed), random_params(seed)
        assert_same_result(build_naively(*tables, **params), build_sequences(*tables, **params))


# --- properties


def built(seed: int, **changes: Any) -> tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]:
    """The result for random tables, with the arguments."""
    tables, params = random_tables(seed), random_params(seed) | changes
    return build_sequences(*tables, **params), tables, params


@pytest.mark.parametrize("seed", range(20))
def test_1_the_order_of_the_rows_means_nothing(seed: int) -> None:
    dedupe = (
        "day"
        if random_params(seed)["dedupe"] == "first_per_age30"
        else random_params(seed)["dedupe"]
    )
    result, (events, subjects, phemap), params = built(seed, dedupe=dedupe)
    others = None if subjects is None else subjects.sample(fraction=1.0, shuffle=True, seed=seed)
    shuffled = events.sample(fraction=1.0, shuffle=True, seed=seed)
    assert build_sequences(shuffled, others, phemap.reverse(), **params) == result


@pytest.mark.parametrize("seed", range(10))
def test_2_every_row_twice_changes_row_counts_alone(seed: int) -> None:
    result, (events, subjects, phemap), params = built(seed, dedupe="day", min_codes_unit="events")
    again = build_sequences(pl.concat([events, events]), subjects, phemap, **params)
    assert again["funnel"]["rows"] == 2 * result["funnel"]["rows"]
    assert again["funnel"]["unmapped"] == 2 * result["funnel"]["unmapped"]
    for key in ("events", "subjects_in", "subjects_out", "no_birth"):
        assert again["funnel"][key] == result["funnel"][key]
    assert again | {"funnel": 0} == result | {"funnel": 0}


@pytest.mark.parametrize("seed", range(10))
def test_3_a_subject_of_the_test_split_changes_nothing_for_others(seed: int) -> None:
    chosen = {
        "select": True,
        "rules": RULES,
        "threshold": 1.0,
        "top_k": 5,
        "fallback": codes.STEPS,
        "min_case_support": 1,
    }
    result, (events, subjects, phemap), params = built(
        seed, landmark=None, split=None, min_codes=1, **chosen
    )
    new = next(
        name
        for name in (f"new{i}" for i in range(99))
        if subject_splits.assign_split(subject_splits.hash_subject(name)) == "test"
    )
    rows = events.filter(pl.col("subject_id") == "s1").with_columns(subject_id=pl.lit(new))
    again = build_sequences(pl.concat([rows, events]), subjects, phemap, **params)
    assert again["ratios"] == result["ratios"]
    assert again["selected"] == result["selected"] != []
    assert {s: one for s, one in again["sequences"].items() if s != new} == result["sequences"]


@pytest.mark.parametrize("seed", range(6))
def test_3_held_out_subjects_decide_on_no_code(seed: int) -> None:
    """Other diagnoses of all subjects outside of the training split, some that nobody else has: the
    same vocabulary, ratios and training rows.
    """
    events, subjects, phemap = random_tables(seed)
    chosen = {
        "landmark": None,
        "rules": RULES,
        "select": True,
        "threshold": 1.0,
        "min_codes": 1,
        "fallback": codes.STEPS,
    }
    params = random_params(seed) | chosen
    names = [s for s in events["subject_id"].unique(maintain_order=True) if s is not None]
    params["split_override"] = {
        s: ("train", "train", "validation", "test")[k % 4] for k, s in enumerate(names)
    }
    params["split_override"] |= (
        dict.fromkeys(subjects["subject_id"] if subjects is not None else (), "train")
        | params["split_override"]
    )
    held_out = [s for s in names if params["split_override"][s] != "train"]
    new = pl.DataFrame(
        {"vocab": ["icd9"], "code": ["V70.0"], "phecode": ["999.5"]}, schema=phemap.schema
    )
    other = (
        pl.when(pl.col("subject_id").is_in(held_out))
        .then(pl.lit("V70.0"))
        .otherwise("code")
        .alias("code")
    )
    changed = events.with_columns(
        other,
        pl.when(pl.col("subject_id").is_in(held_out))
        .then(pl.lit("icd9"))
        .otherwise("vocab")
        .alias("vocab"),
    )
    phemap = pl.concat([phemap, new])
    before, after = (
        build_sequences(table, subjects, phemap, **params) for table in (events, changed)
    )
    assert before["selected"] == after["selected"]
    assert before["vocab"] == after["vocab"]
    assert before["ratios"] == after["ratios"]
    assert "999.5" not in after["vocab"]
    kept = [
        {s: one for s, one in found["sequences"].items() if s not in held_out}
        for found in (before, after)
    ]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("seed", range(10))
def test_4_a_week_later_is_the_same_sequence(seed: int) -> None:
    chosen = {
        "landmark": None,
        "time": "months",
        "dedupe": "day",
        "rules": [RULES[2]],
        "select": False,
        "min_codes": 1,
    }
    events, _, phemap = random_tables(seed)
    params = random_params(seed) | chosen
    day = pl.col("date").str.strptime(pl.Date, "%Y-%m-%d", strict=False)
    later = (day + timedelta(days=7)).dt.to_string("%Y-%m-%d")
    good = events.filter(day.is_not_null())
    moved = good.with_columns(
        date=pl.when(pl.col("subject_id") == "s3").then(later).otherwise("date")
    )
    before, after = (build_sequences(table, None, phemap, **params) for table in (good, moved))
    assert before["labels"] == after["labels"]
    assert before["sequences"] == after["sequences"] != {}


@pytest.mark.parametrize("engine", [SPARK_ENGINE])
@pytest.mark.parametrize("block", range(3))
def test_5_engines_agree(block: int, engine: str) -> None:
    for seed in range(block * 8, block * 8 + 8):
        result, tables, params = built(seed)
        assert build_sequences(*tables, **params, engine=engine) == result


def coded(events: pl.DataFrame, phemap: pl.DataFrame) -> steps.ClaimsShard:
    """All subjects as one shard, by the functions that the commands call."""
    own = label_rules.parse_rules(RULES)
    tables = phecode_maps.group_phecodes(phemap.iter_rows())
    book = codebook.Codebook(tables)
    rows, _ = clean.clean_rows(events, book)
    cohort = rows.select("subject_id").unique().sort("subject_id")
    placed = [
        subject_splits.assign_split(subject_splits.hash_subject(name), 0.6, 0.2)
        for name in cohort["subject_id"]
    ]
    unknown = [pl.lit(None, pl.Int32).alias(name) for name in ("birth_day", "obs_end")]
    cohort = cohort.with_columns(*unknown, pl.Series("split", placed))
    numbers = cohort.select("subject_id", subject=pl.int_range(pl.len(), dtype=pl.Int32))
    defining = {
        phecode
        for found in label_rules.find_defining_phecodes(own, tables).values()
        for phecode in found
    }
    return steps.ClaimsShard(
        rows=rows.join(numbers, on="subject_id"),
        codes=book.codes,
        cohort=cohort,
        rules=own,
        defining=defining,
    )


def split_shard(shard: steps.ClaimsShard, shards: int) -> list[steps.ClaimsShard]:
    """Its subjects by their hash, each shard with its own numbers."""
    place = subject_splits.assign_shards(shard.cohort["subject_id"], shards).tolist()
    found = []
    for k in range(shards):
        cohort = shard.cohort.filter(pl.Series(place) == k)
        numbers = cohort.select("subject_id", subject=pl.int_range(pl.len(), dtype=pl.Int32))
        rows = shard.rows.drop("subject").join(numbers, on="subject_id")
        found.append(dataclasses.replace(shard, rows=rows, cohort=cohort))
    return found


@pytest.mark.parametrize("shards", [2, 5])
@pytest.mark.parametrize("seed", range(6))
def test_6_any_number_of_shards_agrees(seed: int, shards: int) -> None:
    events, _, phemap = random_tables(seed, rows=300)
    params = random_params(seed) | {
        "min_codes": 1,
        "threshold": 1.0,
        "select": [True, False, "frequency"][seed % 3],
    }
    names = {field.name for field in dataclasses.fields(SequenceChoices)}
    choices = SequenceChoices(
        **{
            key: value
            for key, value in params.items()
            if key in names - {"landmark", "time", "dedupe"}
        }
    )
    choices = dataclasses.replace(
        choices, landmark=parse_landmark({"landmark_days": 200, "gap_days": 0, "horizon_days": 300})
    )

    def run(parts: list[steps.ClaimsShard]) -> tuple[Any, dict[str, Any]]:
        parts = [steps.label_shard(part) for part in parts]
        end = max(part.last_day for part in parts if part.last_day is not None)
        parts = [steps.set_index_days(part, choices, end) for part in parts]
        counts = sum((steps.count_shard(part, choices) for part in parts), start=steps.CodeCounts())
        selection = prevalence.select_codes(counts, parts[0].labels, choices)
        kept = {}
        for part in parts:
            own = steps.build_shard(part, choices, selection)
            for i, subject in enumerate(part.cohort["subject_id"].gather(own.subjects)):
                span = slice(own.offsets[i], own.offsets[i + 1])
                kept[subject] = (
                    own.ids[span].tolist(),
                    own.times[span].tolist(),
                    own.gaps(i).tolist(),
                )
        return selection, kept

    single = coded(events, phemap)
    one, many = run([single]), run(split_shard(single, shards))
    assert one == many
    assert one[1] or not one[0].phecodes


@pytest.mark.parametrize("seed", range(6))
def test_7_spellings_agree(seed: int) -> None:
    result, (events, subjects, phemap), params = built(seed, pad_undotted=False)
    rng = random.Random(seed)

    def spelt(vocab: str | None, raw: str | None) -> str | None:
        own = vocab or params["vocab"]
        code = codes.normalise_code(raw, own)[0]
        if code is None or raw is None:
            return raw
        return rng.choice(
            [code, code.replace(".", ""), f"  {code.lower()}", f"{code}\t", f"'{code}'"]
        )

    others = [spelt(vocab, raw) for vocab, raw in events.select("vocab", "code").iter_rows()]
    assert (
        build_sequences(events.with_columns(pl.Series("code", others)), subjects, phemap, **params)
        == result
    )


@pytest.mark.parametrize("seed", range(20))
def test_8_9_10_11_accounts_splits_inputs_and_gaps(seed: int) -> None:
    result, (events, _, _), params = built(seed)
    funnel = result["funnel"]
    lost = funnel["bad_date"] + funnel["before_birth"] + sum(funnel["bad_code"].values())
    assert (
        funnel["rows"]
        == events.height
        == lost + sum(funnel["mapped"].values()) + funnel["unmapped"]
    )
    assert (
        result["split"].keys()
        == result["labels"].keys()
        == result["onset"].keys()
        >= result["sequences"].keys()
    )
    assert set(result["split"].values()) <= {"train", "validation", "test"}
    defining = label_rules.find_defining_phecodes(
        label_rules.parse_rules(params["rules"]),
        phecode_maps.group_phecodes(random_tables(seed)[2].iter_rows()),
    )
    gone = {
        codes.roll_up_phecode(phecode, params["level"])
        for own in defining.values()
        for phecode in own
    }
    for one in result["sequences"].values():
        times, gaps = one["times"], one["gaps"]
        assert len(gaps) == len(times) + 2
        assert gaps[:2] == [0.0, 0.0]
        assert min(gaps) >= 0
        # more: under a landmark the index day comes after the last event
        assert sum(gaps) >= times[-1] - times[0] - 1e-9
        if params["landmark"] is None or params["time"] != "months":
            assert sum(gaps) == pytest.approx(times[-1] - times[0])
        assert params["leakage"] != "drop_phecode" or not gone & set(one["phecodes"])
        assert [result["vocab"][phecode] for phecode in one["phecodes"]] == one["codes"]


@pytest.mark.parametrize("seed", range(6))
def test_the_cache_gives_the_same_sequences(seed: int) -> None:
    """Rows as the cache keeps them, on each subject's own clock, without map: what `tokenize`
    does.
    """
    events, _, phemap = random_tables(seed)
    mark = {"landmark_days": 200, "gap_days": 10, "horizon_days": 300}
    params = random_params(seed) | {
        "landmark": mark,
        "select": False,
        "min_codes": 1,
        "dedupe": "day",
        "time": "months",
    }
    params |= {
        "fallback": codes.STEPS,
        "vocab": "icd9",
        "pad_undotted": False,
        "rules": RULES,
        "split": {"train": 0.6, "validation": 0.2},
    }
    wanted = build_sequences(events, None, phemap, **params)
    names = {field.name for field in dataclasses.fields(SequenceChoices)} - {"landmark"}
    choices = SequenceChoices(
        **{key: value for key, value in params.items() if key in names},
        landmark=parse_landmark(mark),
    )
    shard = steps.label_shard(coded(events, phemap))
    cohort = shard.cohort.with_columns(obs_end=shard.last_day - pl.col("first_day"))
    onsets = [
        (pl.col(name) - pl.col("first_day")) for name in cohort.columns if name.startswith("onset_")
    ]
    cohort = cohort.with_columns(*onsets)
    spoken = pl.DataFrame(
        {"text": [c.text for c in shard.codes], "phecodes": [list(c.phecodes) for c in shard.codes]}
    )
    rows = shard.rows.join(cohort.select("subject_id", "first_day"), on="subject_id")
    cached = rows.select(
        "subject",
        pl.col("day") - pl.col("first_day"),
        spoken["text"].gather(rows["code"]).alias("code"),
        pl.col("source").replace_strict(
            range(5), label_rules.SOURCES, return_dtype=pl.Enum(label_rules.SOURCES)
        ),
        spoken["phecodes"].gather(rows["code"]).alias("phecodes"),
    ).sample(fraction=1.0, shuffle=True, seed=seed)
    numbered, spelt = steps.number_codes(cached, {}, by_sex=False)
    again = dataclasses.replace(shard, rows=numbered, codes=spelt, cohort=cohort.drop("first_day"))
    again = steps.set_index_days(again, choices, None)
    selection = prevalence.select_codes(steps.count_shard(again, choices), again.labels, choices)
    own = steps.build_shard(again, choices, selection)
    assert (
        sorted([*selection.phecodes, *selection.unseen], key=wanted["selected"].index)
        == wanted["selected"]
    )
    split = dict(again.cohort.select("subject_id", "split").iter_rows())
    carried = {
        phecode
        for s, one in wanted["sequences"].items()
        for phecode in one["phecodes"]
        if split[s] == "train"
    }
    assert carried <= set(selection.phecodes), "what a training subject has is in the vocabulary"
    ids = dict.fromkeys(selection.unseen, 4) | {
        phecode: i for i, phecode in enumerate(selection.phecodes, 5)
    }
    kept = again.cohort["subject_id"].gather(own.subjects).to_list()
    assert kept == sorted(wanted["sequences"]) != []
    for i, subject in enumerate(kept):
        one = wanted["sequences"][subject]
        read = sorted(zip(one["times"], map(ids.__getitem__, one["phecodes"]), strict=True))
        assert own.ids[own.offsets[i] : own.offsets[i + 1]].tolist() == [
            number for _, number in read
        ]
        assert own.gaps(i).tolist() == pytest.approx(wanted["sequences"][subject]["gaps"], abs=1e-9)
    for name in again.labels:
        assert again.cohort[f"y_{name}"].to_list() == [
            wanted["labels"][s][name] for s in again.cohort["subject_id"]
        ]
