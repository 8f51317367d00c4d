"""The builder against a second, naive reading of its rules, and properties that hold for any table.

The oracle below works row by row on dates and texts, with lists and dicts; it shares nothing with the library but the reading of single
codes, which has tests of its own.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import random
from collections import Counter, defaultdict
from datetime import date, timedelta
from fractions import Fraction
from hashlib import sha256
from typing import Any

import polars as pl
import pytest

from bitimely_core.claims import clean, codes, engines, label_rules, phecode_maps, splits, steps
from bitimely_core.claims.build import build_sequences

needs_duckdb = pytest.mark.skipif(not importlib.util.find_spec("duckdb"), reason="duckdb is not installed")

MAP = [
    *[("icd9", *pair) for pair in [("250", "250"), ("250.0", "250"), ("250.00", "250.2"), ("250.01", "250.1"), ("357.2", "250.6")]],
    *[("icd9", *pair) for pair in [("428", "428"), ("428.0", "428.1"), ("428.9", "428.2"), ("496", "496"), ("401", "401")]],
    *[("icd9", *pair) for pair in [("401.9", "401.1"), ("402.91", "401.21"), ("402.91", "428.1"), ("008", "008"), ("008.5", "008.5")]],
    *[("icd9", *pair) for pair in [("V58.67", "250.3"), ("E888.9", "1000"), ("414", "411"), ("414.01", "411.4"), ("585.6", "585.32")]],
    *[("icd10", *pair) for pair in [("E11.9", "250.2"), ("E11.3", "250.23"), ("I13.0", "428.1"), ("I13.0", "401.2"), ("I50.9", "428.1")]],
    *[("icd10", *pair) for pair in [("J44.9", "496"), ("J44", "496"), ("J44.9", "411.4")]],
]
ICD9 = ["250.00", "25000", "250", "2500", "428.0", "4280", "4289", "496", "4960", "401.9", "40291", "0085", "8.5", "v58.67", " 414.01 "]
ICD9 += ["E888.9", "58560", "357.2", "999.9", "4149", "85", "8", "XX000", None, "NA", "'250.01'", "I50.9"]
ICD10 = ["E119", "e11.9", "I13.0", "I50", "J449", "J44.1", "Z99", "UNK", "428.0", None]
DATES = ["", None, "2001-02-30", "20010115", "2001-3-4", "2001-03", "15/01/2001", "2002-01-01T10:00", "1900-01-01"]


def random_tables(seed: int, subjects: int = 14, rows: int = 240) -> tuple[pl.DataFrame, pl.DataFrame | None, pl.DataFrame]:
    """Events full of mess, a register that knows some of the subjects and some others, the map."""
    rng = random.Random(seed)
    names = [f"s{i}" for i in range(subjects)]
    events = []
    for _ in range(rows):
        vocab = rng.choice(["icd9", "icd9cm", "icd10", "icd10cm", None, "icd9", "icd9"])
        day = (date(2000, 1, 1) + timedelta(days=rng.choice([rng.randrange(1200), 30 * rng.randrange(12)]))).isoformat()
        when = rng.choice(DATES) if rng.random() < 0.06 else day
        code = rng.choice(ICD10 if vocab in {"icd10", "icd10cm"} else ICD9)
        source = rng.choice(["inpatient", "physician", "physician", "outpatient", "emergency", "other", None])
        events.append((rng.choice(names), when, code, vocab, source))
    cohort = []
    for name in [*rng.sample(names, subjects * 3 // 4), "registered", "nobody"]:
        birth = rng.choice(
            [None, "unknown", "1960-02-29", "1965-07", "1990-1-01", "19990615", "2000-03-01", "1961-05-05", "1950-12-31", "1958-08"]
        )
        cohort.append((name, birth, rng.choice([None, None, "2003-06-30", "2001-12-31", "?"])))
    texts = dict.fromkeys
    return (
        pl.DataFrame(events, schema=texts(("subject_id", "date", "code", "vocab", "source"), pl.String), orient="row"),
        pl.DataFrame(cohort, schema=texts(("subject_id", "birth", "obs_end"), pl.String), orient="row") if seed % 5 else None,
        pl.DataFrame(MAP, schema=texts(("vocab", "code", "phecode"), pl.String), orient="row"),
    )


RULES: list[dict[str, Any]] = [
    {
        "name": "diabetes",
        "min_age_years": 1,
        "codes": {"icd9": ["250"], "icd10": ["E10", "E11"]},
        "exclude": {"icd9": ["250.01"]},
        "any": [{"sources": ["inpatient"]}, {"sources": ["physician", "outpatient"], "count": 2, "window_days": 200, "min_gap_days": 20}],
    },
    {
        "name": "chf",
        "min_age_years": 40,
        "codes": {"icd9": ["428", "402.91"], "icd10": ["I50", "I13"]},
        "any": [{"count": 3, "window_days": 700}],
    },
    {
        "name": "copd",
        "codes": {"icd9": ["496"], "icd10": ["J44"]},
        "any": [{"sources": ["physician"], "count": 2}, {"sources": ["emergency"]}],
    },
]


def random_params(seed: int) -> dict[str, Any]:
    rng = random.Random(seed + 1000)
    mark = {"gap_days": rng.choice([0, 30]), "horizon_days": rng.choice([200, 365])}
    mark |= {"landmark_days": rng.choice([0, 100, 365])} if rng.random() < 0.7 else {"date": "2001-03-01"}
    return {
        "rules": [
            {**rule, **({"min_age_years": 0} if rule["name"] == "copd" and seed % 3 == 0 else {})}
            for rule in rng.sample(RULES, rng.choice([0, 1, 2, 3, 3]))
        ],
        "vocab": rng.choice(["icd9", "icd10"]),
        "pad_undotted": rng.choice([True, False]),
        "fallback": rng.choice([*[["exact", "trailing_zero", "parent"]] * 4, ["exact"], ["parent", "exact"], ["trailing_zero"], []]),
        "level": rng.choice(["integer", "first_decimal", "full"]),
        "leakage": rng.choice(["keep", "keep", "drop_icd", "drop_phecode"]),
        "landmark": rng.choice([None, mark]),
        "population": rng.choice(["subjects", "observed"]),
        "denominator": rng.choice(["all", "controls"]),
        "threshold": rng.choice([5.0, 1.2, 1.0, 0.5]),
        "top_k": rng.choice([0, 2, 5, 5]),
        "min_case_support": rng.choice([1, 2]),
        "min_case_fraction": rng.choice([0.0, 0.5]),
        "select": rng.choice([True, False, False]),
        "dedupe": rng.choice(["day", "month", "none", "first_per_age30"]),
        "min_codes": rng.choice([0, 1, 3, 5]),
        "min_codes_unit": rng.choice(["events", "records", "unique"]),
        "max_events": rng.choice([None, 1, 4]),
        "time": rng.choice(["months", "calendar_month", "age30"]),
        "split": rng.choice([None, {"seed": 3, "train": 0.6, "validation": 0.2}, {"train": 1.0}]),
    }


# --- the oracle


def read_date(text: str | None) -> date | None:
    parts = (text or "").strip()[:10]
    fields = parts.split("-") if "-" in parts else [parts[:4], parts[4:6], parts[6:]] if len(parts) == 8 else []
    fields = [*fields, "1"] if len(fields) == 2 else fields
    if len(fields) != 3 or not all(f.isdecimal() and f.isascii() for f in fields) or len(fields[0]) != 4:
        return None
    if any(len(f) > 2 for f in fields[1:]):
        return None
    try:
        return date(*map(int, fields))
    except ValueError:
        return None


def oracle(events: pl.DataFrame, subjects: pl.DataFrame | None, phemap: pl.DataFrame, **p: Any) -> dict[str, Any]:
    family = {"icd9": "icd9", "icd9cm": "icd9", "icd10": "icd10", "icd10cm": "icd10"}
    table: dict[tuple[str, str], set[str]] = defaultdict(set)
    for vocab, code, phecode in phemap.iter_rows():
        table[vocab, code].add(phecode)
    cohort = {} if subjects is None else {s: (read_date(b), read_date(e)) for s, b, e in subjects.iter_rows()}

    funnel: dict[str, Any] = {
        "rows": events.height,
        "bad_date": 0,
        "before_birth": 0,
        "unmapped": 0,
        "bad_code": Counter(),
        "mapped": Counter(),
    }
    valid = []
    for place, (subject, text, raw, vocab, source) in enumerate(events.iter_rows()):
        vocab, source = vocab or p["vocab"], source or "outpatient"
        day, birth = read_date(text), cohort.get(subject, (None, None))[0]
        code, fault = codes.normalise_code(raw, vocab, pad_undotted=p["pad_undotted"])
        if day is None:
            funnel["bad_date"] += 1
        elif birth and day < birth:
            funnel["before_birth"] += 1
        elif code is None:
            funnel["bad_code"][fault] += 1
        else:
            own = {c: tuple(v) for (f, c), v in table.items() if f == family[vocab]}
            found, step = codes.find_phecodes(code, own, p["fallback"])
            if found:
                funnel["mapped"][step] += 1
            else:
                funnel["unmapped"] += 1
            valid.append((subject, day, family[vocab], code, source, place, found))
    everybody = sorted({*cohort, *(row[0] for row in valid)})
    data_end = max((row[1] for row in valid), default=None)

    def in_set(rule: dict[str, Any], fam: str, code: str) -> bool:
        def hit(lists: dict[str, list[str]]) -> bool:
            return any(code.replace(".", "").startswith(prefix.replace(".", "")) for prefix in lists.get(fam, []))

        return hit(rule["codes"]) and not hit(rule.get("exclude", {}))

    def old_enough(birth: date, day: date, years: int) -> bool:
        return day.year - birth.year - ((day.month, day.day) < (birth.month, birth.day)) >= years

    def clause_onset(days: list[date], clause: dict[str, Any]) -> date | None:
        best = None
        for start in days:
            chosen = [start]
            while len(chosen) < clause.get("count", 1):
                later = [d for d in days if (d - chosen[-1]).days >= max(1, clause.get("min_gap_days", 1))]
                if not later:
                    break
                chosen.append(later[0])
            window = clause.get("window_days", 10**6)
            if len(chosen) == clause.get("count", 1) and (chosen[-1] - chosen[0]).days <= window and (best is None or chosen[-1] < best):
                best = chosen[-1]
        return best

    label: dict[str, dict[str, Any]] = {s: {} for s in everybody}
    onset: dict[str, dict[str, Any]] = {s: {} for s in everybody}
    for rule in p["rules"]:
        for s in everybody:
            birth, limit = cohort.get(s, (None, None))[0], rule.get("min_age_years")
            rows = [
                r
                for r in valid
                if r[0] == s and in_set(rule, r[2], r[3]) and (limit is None or birth is None or old_enough(birth, r[1], limit))
            ]
            found_days = []
            for clause in rule["any"]:
                days = sorted({r[1] for r in rows if "sources" not in clause or r[4] in clause["sources"]})
                found_days.append(clause_onset(days, clause))
            first = min((d for d in found_days if d), default=None)
            unknown = first is not None and birth is None and limit is not None
            label[s][rule["name"]] = None if unknown else int(first is not None)
            onset[s][rule["name"]] = None if unknown else first

    index: dict[str, date] = {}
    if p["landmark"]:
        mark = p["landmark"]
        for s in everybody:
            days = [r[1] for r in valid if r[0] == s]
            if days:
                index[s] = read_date(mark["date"]) if "date" in mark else min(days) + timedelta(days=mark["landmark_days"])  # type: ignore[assignment]
            end = cohort.get(s, (None, None))[1] or data_end
            for name, value in label[s].items():
                if not days or value is None:
                    label[s][name] = None
                    continue
                low = index[s] + timedelta(days=mark["gap_days"])
                high = low + timedelta(days=mark["horizon_days"])
                when = onset[s][name]
                if when and when <= low:
                    label[s][name] = None
                elif when and when <= high:
                    label[s][name] = 1
                else:
                    label[s][name] = 0 if end >= high else None

    def roll(phecode: str) -> str:
        head, _, rest = phecode.partition(".")
        return phecode if p["level"] == "full" or not rest else head if p["level"] == "integer" else f"{head}.{rest[0]}"

    gone = {
        roll(x)
        for (fam, code), found in table.items()
        for x in found
        if p["leakage"] == "drop_phecode" and any(in_set(rule, fam, code) for rule in p["rules"])
    }
    record = []
    for s, day, fam, code, _, place, found in valid:
        if p["leakage"] == "drop_icd" and any(in_set(rule, fam, code) for rule in p["rules"]):
            continue
        if not p["landmark"] or day <= index[s]:
            record += [(s, day, x, place) for x in sorted({roll(y) for y in found} - gone, key=float)]

    def place_of(s: str) -> str:
        given = {"seed": 0, "train": 0.8, "validation": 0.1} | (p["split"] or {})
        u = Fraction(int(sha256(f"{given['seed']}|{s}".encode()).hexdigest()[:16], 16), 2**64)
        return "train" if u < given["train"] else "validation" if u < given["train"] + given["validation"] else "test"

    split = {s: place_of(s) for s in everybody}
    carried: dict[str, set[str]] = defaultdict(set)
    for s, _, x, _ in record:
        carried[s].add(x)
    ratios: dict[str, dict[str, Any]] = {}
    chosen: set[str] = set()
    for rule in p["rules"]:
        name = rule["name"]
        group = [
            s for s in everybody if split[s] == "train" and label[s][name] is not None and (p["population"] == "subjects" or carried[s])
        ]
        cases = [s for s in group if label[s][name] == 1]
        reference = group if p["denominator"] == "all" else [s for s in group if label[s][name] == 0]
        own = {}
        if cases and reference:
            for x in {x for s in cases for x in carried[s]}:
                a, b = sum(x in carried[s] for s in cases), sum(x in carried[s] for s in reference)
                if a >= max(p["min_case_support"], math.ceil(p["min_case_fraction"] * len(cases))):
                    ratio = (a / len(cases)) / (b / len(reference)) if b else math.inf
                    own[x] = {"ratio": ratio, "n_case_with": a, "n_case": len(cases), "n_ref_with": b, "n_ref": len(reference)}
        ratios[name] = own
        above = [x for x in own if own[x]["ratio"] > p["threshold"]]
        chosen |= set(above or sorted(own, key=lambda x: (-own[x]["ratio"], -own[x]["n_case_with"], float(x)))[: p["top_k"]])
    if not p["select"]:
        chosen = {x for _, _, x, _ in record}
    selected = sorted(chosen, key=lambda x: (float(x), x))
    ids = {x: i for i, x in enumerate(selected, 5)}

    def age_month(s: str, day: date) -> int:
        return round(Fraction((day - cohort[s][0]).days, 30))

    kept: dict[str, Any] = {}
    no_birth = 0
    for s in everybody:
        own_records = [(day, ids[x], place) for who, day, x, place in record if who == s and x in ids]
        n_records, birth = len(own_records), cohort.get(s, (None, None))[0]
        if own_records and birth is None and "age30" in p["time"] + p["dedupe"]:
            no_birth += 1
            continue
        if p["dedupe"] == "none":
            found = [(day, i) for day, i, _ in own_records]
        elif p["dedupe"] == "day":
            found = list({(day, i) for day, i, _ in own_records})
        elif p["dedupe"] == "month":
            earliest: dict[Any, date] = {}
            for day, i, _ in own_records:
                key = (day.year, day.month, i)
                earliest[key] = min(day, earliest.get(key, day))
            found = [(day, key[2]) for key, day in earliest.items()]
        else:
            firsts: dict[int, tuple[date, int]] = {}
            for day, i, _ in sorted(own_records, key=lambda r: (r[2], r[1])):
                firsts.setdefault(age_month(s, day), (day, i))
            found = list(firsts.values())
        found.sort()
        amount = {"events": len(found), "records": n_records, "unique": len({i for _, i in found})}[p["min_codes_unit"]]
        if not found or amount < p["min_codes"]:
            continue
        found = found[-(p["max_events"] or len(found)) :]
        start = found[0][0]
        clock = {
            "months": lambda d, start=start: (d - start).days / 30.4375,
            "calendar_month": lambda d, start=start: float(12 * (d.year - start.year) + d.month - start.month),
            "age30": lambda d, s=s: float(age_month(s, d)),
        }[p["time"]]
        times = [clock(d) for d, _ in found]
        end = clock(index[s]) if p["landmark"] and p["time"] == "months" else times[-1]
        kept[s] = {
            "codes": [i for _, i in found],
            "phecodes": [selected[i - 5] for _, i in found],
            "times": times,
            "gaps": [0.0, 0.0, *(b - a for a, b in itertools.pairwise(times)), end - times[-1]],
            "split": split[s],
            "labels": label[s],
            "age0_months": None if birth is None else math.floor(Fraction((start - birth).days) / Fraction("30.4375")),
        }
    funnel |= {
        "events": sum(len(one["codes"]) for one in kept.values()),
        "subjects_in": len(everybody),
        "subjects_out": len(kept),
        "no_birth": no_birth,
    }
    return {
        "selected": selected,
        "vocab": ids,
        "labels": label,
        "onset": {s: {name: day and day.isoformat() for name, day in own.items()} for s, own in onset.items()},
        "split": split,
        "ratios": ratios,
        "sequences": kept,
        "funnel": funnel,
    }


def agreed(expected: dict[str, Any], found: dict[str, Any]) -> None:
    for key in expected.keys() - {"funnel", "sequences"}:
        assert expected[key] == found[key], key
    for key, value in expected["funnel"].items():
        own = found["funnel"][key]
        assert (dict(+Counter(own)) == dict(value)) if isinstance(value, Counter) else own == value, key
    assert expected["sequences"].keys() == found["sequences"].keys()
    for subject, one in expected["sequences"].items():
        other = found["sequences"][subject]
        assert one["gaps"] == pytest.approx(other["gaps"], abs=1e-9)
        assert {key: one[key] for key in one if key != "gaps"} == {key: other[key] for key in other if key != "gaps"}


@pytest.mark.parametrize("block", range(8))
def test_equals_the_naive_reading(block: int) -> None:
    for seed in range(block * 12, block * 12 + 12):
        tables, params = random_tables(seed), random_params(seed)
        agreed(oracle(*tables, **params), build_sequences(*tables, **params))


# --- properties


def built(seed: int, **changes: Any) -> tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]:
    """The result for random tables, with the arguments."""
    tables, params = random_tables(seed), random_params(seed) | changes
    return build_sequences(*tables, **params), tables, params


@pytest.mark.parametrize("seed", range(20))
def test_1_the_order_of_the_rows_means_nothing(seed: int) -> None:
    dedupe = "day" if random_params(seed)["dedupe"] == "first_per_age30" else random_params(seed)["dedupe"]
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
    chosen = {"select": True, "rules": RULES, "threshold": 1.0, "top_k": 5, "fallback": codes.STEPS, "min_case_support": 1}
    result, (events, subjects, phemap), params = built(seed, landmark=None, split=None, min_codes=1, **chosen)
    new = next(name for name in (f"new{i}" for i in range(99)) if splits.assign_split(splits.hash_subject(name)) == "test")
    rows = events.filter(pl.col("subject_id") == "s1").with_columns(subject_id=pl.lit(new))
    again = build_sequences(pl.concat([rows, events]), subjects, phemap, **params)
    assert again["ratios"] == result["ratios"]
    assert again["selected"] == result["selected"] != []
    assert {s: one for s, one in again["sequences"].items() if s != new} == result["sequences"]


@pytest.mark.parametrize("seed", range(6))
def test_3_held_out_subjects_decide_on_no_code(seed: int) -> None:
    """Other diagnoses of all subjects outside of the training split, some that nobody else has: the same vocabulary, ratios and training rows."""
    events, subjects, phemap = random_tables(seed)
    chosen = {"landmark": None, "rules": RULES, "select": True, "threshold": 1.0, "min_codes": 1, "fallback": codes.STEPS}
    params = random_params(seed) | chosen
    names = [s for s in events["subject_id"].unique(maintain_order=True) if s is not None]
    params["split_override"] = {s: ("train", "train", "validation", "test")[k % 4] for k, s in enumerate(names)}
    params["split_override"] |= dict.fromkeys(subjects["subject_id"] if subjects is not None else (), "train") | params["split_override"]
    held_out = [s for s in names if params["split_override"][s] != "train"]
    new = pl.DataFrame({"vocab": ["icd9"], "code": ["V70.0"], "phecode": ["999.5"]}, schema=phemap.schema)
    other = pl.when(pl.col("subject_id").is_in(held_out)).then(pl.lit("V70.0")).otherwise("code").alias("code")
    changed = events.with_columns(
        other, pl.when(pl.col("subject_id").is_in(held_out)).then(pl.lit("icd9")).otherwise("vocab").alias("vocab")
    )
    phemap = pl.concat([phemap, new])
    before, after = (build_sequences(table, subjects, phemap, **params) for table in (events, changed))
    assert before["selected"] == after["selected"]
    assert before["vocab"] == after["vocab"]
    assert before["ratios"] == after["ratios"]
    assert "999.5" not in after["vocab"]
    kept = [{s: one for s, one in found["sequences"].items() if s not in held_out} for found in (before, after)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("seed", range(10))
def test_4_a_week_later_is_the_same_sequence(seed: int) -> None:
    chosen = {"landmark": None, "time": "months", "dedupe": "day", "rules": [RULES[2]], "select": False, "min_codes": 1}
    events, _, phemap = random_tables(seed)
    params = random_params(seed) | chosen
    day = pl.col("date").str.strptime(pl.Date, "%Y-%m-%d", strict=False)
    later = (day + timedelta(days=7)).dt.to_string("%Y-%m-%d")
    good = events.filter(day.is_not_null())
    moved = good.with_columns(date=pl.when(pl.col("subject_id") == "s3").then(later).otherwise("date"))
    before, after = (build_sequences(table, None, phemap, **params) for table in (good, moved))
    assert before["labels"] == after["labels"]
    assert before["sequences"] == after["sequences"] != {}


@needs_duckdb
@pytest.mark.parametrize("block", range(3))
def test_5_engines_agree(block: int) -> None:
    for seed in range(block * 8, block * 8 + 8):
        result, tables, params = built(seed)
        assert build_sequences(*tables, **params, engine="duckdb") == result


def coded(events: pl.DataFrame, phemap: pl.DataFrame) -> steps.ClaimsShard:
    """All subjects as one shard, by the functions that the commands call."""
    own = label_rules.parse_rules(RULES)
    tables = phecode_maps.group_phecodes(phemap.iter_rows())
    book = codes.Codebook(tables)
    rows, _ = clean.clean_rows(events, book)
    cohort = rows.select("subject_id").unique().sort("subject_id")
    placed = [splits.assign_split(splits.hash_subject(name), 0.6, 0.2) for name in cohort["subject_id"]]
    unknown = [pl.lit(None, pl.Int32).alias(name) for name in ("birth_day", "obs_end")]
    cohort = cohort.with_columns(*unknown, pl.Series("split", placed))
    numbers = cohort.select("subject_id", subject=pl.int_range(pl.len(), dtype=pl.Int32))
    defining = {phecode for found in label_rules.find_defining_phecodes(own, tables).values() for phecode in found}
    return steps.ClaimsShard(rows=rows.join(numbers, on="subject_id"), codes=book.codes, cohort=cohort, rules=own, defining=defining)


def split_shard(shard: steps.ClaimsShard, shards: int) -> list[steps.ClaimsShard]:
    """Its subjects by their hash, each shard with its own numbers."""
    place = [splits.assign_shard(name, shards) for name in shard.cohort["subject_id"]]
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
    params = random_params(seed) | {"min_codes": 1, "threshold": 1.0, "select": [True, False, "frequency"][seed % 3]}
    names = {field.name for field in dataclasses.fields(steps.SequenceChoices)}
    choices = steps.SequenceChoices(**{key: value for key, value in params.items() if key in names - {"landmark", "time", "dedupe"}})
    choices = dataclasses.replace(choices, landmark=steps.parse_landmark({"landmark_days": 200, "gap_days": 0, "horizon_days": 300}))

    def run(parts: list[steps.ClaimsShard]) -> tuple[Any, dict[str, Any]]:
        with engines.open_engine("polars") as engine:
            parts = [steps.label_shard(part, engine) for part in parts]
            end = max(part.last_day for part in parts if part.last_day is not None)
            parts = [steps.set_index_days(part, choices, end, engine) for part in parts]
            counts = sum((steps.count_shard(part, choices, engine) for part in parts), start=steps.CodeCounts())
            selection = steps.select_vocabulary(counts, parts[0].labels, choices)
            kept = {}
            for part in parts:
                own = steps.build_shard(part, choices, selection, engine)
                for i, subject in enumerate(part.cohort["subject_id"].gather(own.subjects)):
                    span = slice(own.offsets[i], own.offsets[i + 1])
                    kept[subject] = (own.ids[span].tolist(), own.times[span].tolist(), own.gaps(i).tolist())
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
        return rng.choice([code, code.replace(".", ""), f"  {code.lower()}", f"{code}\t", f"'{code}'"])

    others = [spelt(vocab, raw) for vocab, raw in events.select("vocab", "code").iter_rows()]
    assert build_sequences(events.with_columns(pl.Series("code", others)), subjects, phemap, **params) == result


@pytest.mark.parametrize("seed", range(20))
def test_8_9_10_11_accounts_splits_inputs_and_gaps(seed: int) -> None:
    result, (events, _, _), params = built(seed)
    funnel = result["funnel"]
    lost = funnel["bad_date"] + funnel["before_birth"] + sum(funnel["bad_code"].values())
    assert funnel["rows"] == events.height == lost + sum(funnel["mapped"].values()) + funnel["unmapped"]
    assert result["split"].keys() == result["labels"].keys() == result["onset"].keys() >= result["sequences"].keys()
    assert set(result["split"].values()) <= {"train", "validation", "test"}
    defining = label_rules.find_defining_phecodes(
        label_rules.parse_rules(params["rules"]), phecode_maps.group_phecodes(random_tables(seed)[2].iter_rows())
    )
    gone = {codes.roll_up_phecode(phecode, params["level"]) for own in defining.values() for phecode in own}
    for one in result["sequences"].values():
        times, gaps = one["times"], one["gaps"]
        assert len(gaps) == len(times) + 2
        assert gaps[:2] == [0.0, 0.0]
        assert min(gaps) >= 0
        assert sum(gaps) >= times[-1] - times[0] - 1e-9  # more: under a landmark the index day comes after the last event
        if params["landmark"] is None or params["time"] != "months":
            assert sum(gaps) == pytest.approx(times[-1] - times[0])
        assert params["leakage"] != "drop_phecode" or not gone & set(one["phecodes"])
        assert [result["vocab"][phecode] for phecode in one["phecodes"]] == one["codes"]


@pytest.mark.parametrize("seed", range(6))
def test_the_cache_gives_the_same_sequences(seed: int) -> None:
    """Rows as the cache keeps them, on each subject's own clock, without map: what `tokenize` does."""
    events, _, phemap = random_tables(seed)
    mark = {"landmark_days": 200, "gap_days": 10, "horizon_days": 300}
    params = random_params(seed) | {"landmark": mark, "select": False, "min_codes": 1, "dedupe": "day", "time": "months"}
    params |= {"fallback": codes.STEPS, "vocab": "icd9", "pad_undotted": False, "rules": RULES, "split": {"train": 0.6, "validation": 0.2}}
    wanted = build_sequences(events, None, phemap, **params)
    names = {field.name for field in dataclasses.fields(steps.SequenceChoices)} - {"landmark"}
    choices = steps.SequenceChoices(**{key: value for key, value in params.items() if key in names}, landmark=steps.parse_landmark(mark))
    with engines.open_engine("polars") as engine:
        shard = steps.label_shard(coded(events, phemap), engine)
        cohort = shard.cohort.with_columns(obs_end=shard.last_day - pl.col("first_day"))
        onsets = [(pl.col(name) - pl.col("first_day")) for name in cohort.columns if name.startswith("onset_")]
        cohort = cohort.with_columns(*onsets)
        spoken = pl.DataFrame({"text": [c.text for c in shard.codes], "phecodes": [list(c.phecodes) for c in shard.codes]})
        rows = shard.rows.join(cohort.select("subject_id", "first_day"), on="subject_id")
        cached = rows.select(
            "subject_id",
            pl.col("day") - pl.col("first_day"),
            spoken["text"].gather(rows["code"]).alias("code"),
            pl.col("source").replace_strict(range(5), label_rules.SOURCES, return_dtype=pl.String),
            spoken["phecodes"].gather(rows["code"]).alias("phecodes"),
        ).sample(fraction=1.0, shuffle=True, seed=seed)
        again = steps.load_shard(
            cached, cohort.drop("first_day"), rule_labels=shard.rule_labels, rules=shard.rules, defining=shard.defining
        )
        again = steps.set_index_days(again, choices, None, engine)
        selection = steps.select_vocabulary(steps.count_shard(again, choices, engine), again.labels, choices)
        own = steps.build_shard(again, choices, selection, engine)
    assert sorted([*selection.phecodes, *selection.unseen], key=wanted["selected"].index) == wanted["selected"]
    split = dict(again.cohort.select("subject_id", "split").iter_rows())
    carried = {phecode for s, one in wanted["sequences"].items() for phecode in one["phecodes"] if split[s] == "train"}
    assert carried <= set(selection.phecodes), "what a training subject has is in the vocabulary"
    ids = dict.fromkeys(selection.unseen, 4) | {phecode: i for i, phecode in enumerate(selection.phecodes, 5)}
    kept = again.cohort["subject_id"].gather(own.subjects).to_list()
    assert kept == sorted(wanted["sequences"]) != []
    for i, subject in enumerate(kept):
        one = wanted["sequences"][subject]
        read = sorted(zip(one["times"], map(ids.__getitem__, one["phecodes"]), strict=True))
        assert own.ids[own.offsets[i] : own.offsets[i + 1]].tolist() == [number for _, number in read]
        assert own.gaps(i).tolist() == pytest.approx(wanted["sequences"][subject]["gaps"], abs=1e-9)
    for name in again.labels:
        assert again.cohort[f"y_{name}"].to_list() == [wanted["labels"][s][name] for s in again.cohort["subject_id"]]


# --- arguments


def table(rows: list[tuple[Any, ...]], names: str, **types: Any) -> pl.DataFrame:
    columns = names.split()
    return pl.DataFrame(rows, schema={name: types.get(name, pl.String) for name in columns}, orient="row")


def small(**params: Any) -> dict[str, Any]:
    events = table([("a", "2001-01-01", "496"), ("b", "2001-01-02", "4280")], "subject_id date code")
    return build_sequences(
        params.pop("events", events),
        params.pop("subjects", None),
        params.pop("phemap", random_tables(0)[2]),
        **{"select": False, "min_codes": 1} | params,
    )


@pytest.mark.parametrize(
    "params",
    [
        *(
            {name: "other"}
            for name in ("engine", "vocab", "level", "leakage", "population", "denominator", "dedupe", "min_codes_unit", "time")
        ),
        *({name: value} for name in ("pad_undotted", "select") for value in (None, 1, "frequency")),
        *({name: value} for name in ("top_k", "min_codes", "max_events", "min_case_support") for value in (-1, 1.5, True, "1")),
        {"max_events": 0},
        {"min_case_support": 0},
        {"min_case_fraction": 1.1},
        {"threshold": "5"},
        {"threshold": float("nan")},
        {"fallback": ["exact", "nearest"]},
        {"fallback": "exact"},
        {"landmark": {"days": 3}},
        {"landmark": {"landmark_days": 3, "date": "2001-01-01"}},
        {"landmark": {"date": "soon"}},
        {"landmark": {"landmark_days": -1}},
        {"landmark": {"landmark_days": 1.0}},
        {"split": {"seeds": 1}},
        {"split": {"seed": "1"}},
        {"split": {"train": 80}},
        {"split_override": {"a": "train"}},
        {"split_override": {"a": "train", "b": "tuning"}},
        {"rules": [{"name": "x"}]},
        {"subjects": table([("a",), ("a",)], "subject_id")},
        {"subjects": table([(None,)], "subject_id")},
        {"subjects": table([(1,)], "subject_id", subject_id=pl.Int64)},
        {"subjects": table([("a", 19600101)], "subject_id birth", birth=pl.Int64)},
        {"subjects": table([("1960-01-01",)], "birth")},
        {"events": table([("a", "2001-01-01", 496)], "subject_id date code", code=pl.Int64)},
        {"events": table([("a", "2001-01-01", 250.0)], "subject_id date code", code=pl.Float64)},
        {"events": table([("a", 20010101, "496")], "subject_id date code", date=pl.Int64)},
        {"events": table([(1, "2001-01-01", "496")], "subject_id date code", subject_id=pl.Int32)},
        {"events": table([(None, "2001-01-01", "496")], "subject_id date code")},
        {"events": table([("a", "bad", "496", "icd8")], "subject_id date code vocab")},
        {"events": table([("a", "2001-01-01")], "subject_id date")},
        {"phemap": table([("icd9", "496")], "vocab code")},
        {"phemap": table([("icd8", "496", "496")], "vocab code phecode")},
        {"phemap": table([("icd9", "496", 496.0)], "vocab code phecode", phecode=pl.Float64)},
    ],
)
def test_what_is_no_value_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        small(**params)


def test_unknown_keywords_and_other_types_are_refused() -> None:
    with pytest.raises(TypeError):
        small(treshold=5)
    with pytest.raises(TypeError):
        small(events=[])


def test_none_stands_for_a_default_that_is_none() -> None:
    assert small(landmark=None, max_events=None, split=None, split_override=None) == small()


@pytest.mark.parametrize("engine", ["polars", pytest.param("duckdb", marks=needs_duckdb)])
def test_tables_without_rows(engine: str) -> None:
    none = table([], "subject_id date code")
    empty = small(events=none, engine=engine, rules=RULES)
    assert (empty["labels"], empty["sequences"], empty["selected"]) == ({}, {}, [])
    cohort = table([(7, "1960-01-01")], "subject_id birth", subject_id=pl.Int64)
    alone = small(events=none, subjects=cohort, engine=engine, rules=RULES, time="age30", dedupe="first_per_age30")
    assert alone["labels"] == {"7": {"diabetes": 0, "chf": 0, "copd": 0}}
    assert small(events=none, subjects=cohort, rules=RULES, landmark={}, engine=engine)["labels"] == {
        "7": dict.fromkeys(("diabetes", "chf", "copd"))
    }
    rubbish = table([("a", None, None)], "subject_id date code", date=pl.Null, code=pl.Null)
    assert small(events=rubbish, engine=engine, dedupe="month")["funnel"]["bad_date"] == 1


@pytest.mark.parametrize("limit", [{"min_age_years": 0}, {}])
def test_a_limit_of_no_years_is_a_limit(limit: dict[str, int]) -> None:
    """Section 6, unknown age: no birth date, an age limit and an onset without it give no label; without an event the label is 0."""
    events = table(
        [(s, "2001-01-01", "496") for s in ("born", "unborn", "old")] + [("other", "2001-01-01", "4280")], "subject_id date code"
    )
    cohort = table([("born", "2001-01-01"), ("unborn", None), ("old", "1960-01-01"), ("other", None)], "subject_id birth")
    rule = {"name": "copd", "codes": {"icd9": ["496"]}, "any": [{}], **limit}
    found = {s: of["copd"] for s, of in small(events=events, subjects=cohort, rules=[rule])["labels"].items()}
    assert found == {"born": 1, "unborn": None if limit else 1, "old": 1, "other": 0}


def test_typed_dates_and_integers_and_extra_columns() -> None:
    rows = [(10, date(2001, 1, 1), "496", "x", 3), (9, date(2001, 1, 3), "496", "y", 4), (10, date(2001, 1, 2), "4280", "z", 5)]
    events = table(rows, "subject_id date code row birth_day", subject_id=pl.Int64, date=pl.Date, birth_day=pl.Int64)
    cohort = table([(10, date(1960, 1, 1), 1)], "subject_id birth code", subject_id=pl.Int64, birth=pl.Date, code=pl.Int64)
    found = small(events=events, subjects=cohort, split_override={"9": "test", "10": "train"})
    assert list(found["sequences"]) == ["9", "10"]
    assert found["sequences"]["10"]["phecodes"] == ["496", "428"]
    assert found["sequences"]["10"]["age0_months"] == 492
    assert found["split"] == {"9": "test", "10": "train"}
