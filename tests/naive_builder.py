"""A second, naive builder of sequences from claims, the oracle of tests: row by row on dates and
texts, with lists and dicts.

It shares nothing with the library but the reading of single codes, which has tests of its own.
"""

from __future__ import annotations

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

from bitimely_core.claims import codes

MAP = [
    *[
        ("icd9", *pair)
        for pair in [
            ("250", "250"),
            ("250.0", "250"),
            ("250.00", "250.2"),
            ("250.01", "250.1"),
            ("357.2", "250.6"),
        ]
    ],
    *[
        ("icd9", *pair)
        for pair in [
            ("428", "428"),
            ("428.0", "428.1"),
            ("428.9", "428.2"),
            ("496", "496"),
            ("401", "401"),
        ]
    ],
    *[
        ("icd9", *pair)
        for pair in [
            ("401.9", "401.1"),
            ("402.91", "401.21"),
            ("402.91", "428.1"),
            ("008", "008"),
            ("008.5", "008.5"),
        ]
    ],
    *[
        ("icd9", *pair)
        for pair in [
            ("V58.67", "250.3"),
            ("E888.9", "1000"),
            ("414", "411"),
            ("414.01", "411.4"),
            ("585.6", "585.32"),
        ]
    ],
    *[
        ("icd10", *pair)
        for pair in [
            ("E11.9", "250.2"),
            ("E11.3", "250.23"),
            ("I13.0", "428.1"),
            ("I13.0", "401.2"),
            ("I50.9", "428.1"),
        ]
    ],
    *[("icd10", *pair) for pair in [("J44.9", "496"), ("J44", "496"), ("J44.9", "411.4")]],
]
ICD9 = [
    "250.00",
    "25000",
    "250",
    "2500",
    "428.0",
    "4280",
    "4289",
    "496",
    "4960",
    "401.9",
    "40291",
    "0085",
    "8.5",
    "v58.67",
    " 414.01 ",
]
ICD9 += [
    "E888.9",
    "58560",
    "357.2",
    "999.9",
    "4149",
    "85",
    "8",
    "XX000",
    None,
    "NA",
    "'250.01'",
    "I50.9",
]
ICD10 = ["E119", "e11.9", "I13.0", "I50", "J449", "J44.1", "Z99", "UNK", "428.0", None]
DATES = [
    "",
    None,
    "2001-02-30",
    "20010115",
    "2001-3-4",
    "2001-03",
    "15/01/2001",
    "2002-01-01T10:00",
    "1900-01-01",
]


def random_tables(
    seed: int, subjects: int = 14, rows: int = 240
) -> tuple[pl.DataFrame, pl.DataFrame | None, pl.DataFrame]:
    """Events full of mess, a register that knows some of the subjects and some others, the map."""
    rng = random.Random(seed)
    names = [f"s{i}" for i in range(subjects)]
    events = []
    for _ in range(rows):
        vocab = rng.choice(["icd9", "icd9cm", "icd10", "icd10cm", None, "icd9", "icd9"])
        day = (
            date(2000, 1, 1)
            + timedelta(days=rng.choice([rng.randrange(1200), 30 * rng.randrange(12)]))
        ).isoformat()
        when = rng.choice(DATES) if rng.random() < 0.06 else day
        code = rng.choice(ICD10 if vocab in {"icd10", "icd10cm"} else ICD9)
        source = rng.choice(
            ["inpatient", "physician", "physician", "outpatient", "emergency", "other", None]
        )
        events.append((rng.choice(names), when, code, vocab, source))
    cohort = []
    for name in [*rng.sample(names, subjects * 3 // 4), "registered", "nobody"]:
        birth = rng.choice(
            [
                None,
                "unknown",
                "1960-02-29",
                "1965-07",
                "1990-1-01",
                "19990615",
                "2000-03-01",
                "1961-05-05",
                "1950-12-31",
                "1958-08",
            ]
        )
        cohort.append((name, birth, rng.choice([None, None, "2003-06-30", "2001-12-31", "?"])))
    texts = dict.fromkeys
    return (
        pl.DataFrame(
            events,
            schema=texts(("subject_id", "date", "code", "vocab", "source"), pl.String),
            orient="row",
        ),
        pl.DataFrame(
            cohort, schema=texts(("subject_id", "birth", "obs_end"), pl.String), orient="row"
        )
        if seed % 5
        else None,
        pl.DataFrame(MAP, schema=texts(("vocab", "code", "phecode"), pl.String), orient="row"),
    )


RULES: list[dict[str, Any]] = [
    {
        "name": "diabetes",
        "min_age_years": 1,
        "codes": {"icd9": ["250"], "icd10": ["E10", "E11"]},
        "exclude": {"icd9": ["250.01"]},
        "any": [
            {"sources": ["inpatient"]},
            {
                "sources": ["physician", "outpatient"],
                "count": 2,
                "window_days": 200,
                "min_gap_days": 20,
            },
        ],
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
    mark |= (
        {"landmark_days": rng.choice([0, 100, 365])}
        if rng.random() < 0.7
        else {"date": "2001-03-01"}
    )
    return {
        "rules": [
            {**rule, **({"min_age_years": 0} if rule["name"] == "copd" and seed % 3 == 0 else {})}
            for rule in rng.sample(RULES, rng.choice([0, 1, 2, 3, 3]))
        ],
        "vocab": rng.choice(["icd9", "icd10"]),
        "pad_undotted": rng.choice([True, False]),
        "fallback": rng.choice(
            [
                *[["exact", "trailing_zero", "parent"]] * 4,
                ["exact"],
                ["parent", "exact"],
                ["trailing_zero"],
                [],
            ]
        ),
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


def read_date(text: str | None) -> date | None:
    parts = (text or "").strip()[:10]
    fields = (
        parts.split("-")
        if "-" in parts
        else [parts[:4], parts[4:6], parts[6:]]
        if len(parts) == 8
        else []
    )
    fields = [*fields, "1"] if len(fields) == 2 else fields
    if (
        len(fields) != 3
        or not all(f.isdecimal() and f.isascii() for f in fields)
        or len(fields[0]) != 4
    ):
        return None
    if any(len(f) > 2 for f in fields[1:]):
        return None
    try:
        return date(*map(int, fields))
    except ValueError:
        return None


def build_naively(
    events: pl.DataFrame, subjects: pl.DataFrame | None, phemap: pl.DataFrame, **p: Any
) -> dict[str, Any]:
    family = {"icd9": "icd9", "icd9cm": "icd9", "icd10": "icd10", "icd10cm": "icd10"}
    table: dict[tuple[str, str], set[str]] = defaultdict(set)
    for vocab, code, phecode in phemap.iter_rows():
        table[vocab, code].add(phecode)
    cohort = (
        {}
        if subjects is None
        else {s: (read_date(b), read_date(e)) for s, b, e in subjects.iter_rows()}
    )

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
            return any(
                code.replace(".", "").startswith(prefix.replace(".", ""))
                for prefix in lists.get(fam, [])
            )

        return hit(rule["codes"]) and not hit(rule.get("exclude", {}))

    def old_enough(birth: date, day: date, years: int) -> bool:
        return day.year - birth.year - ((day.month, day.day) < (birth.month, birth.day)) >= years

    def clause_onset(days: list[date], clause: dict[str, Any]) -> date | None:
        best = None
        for start in days:
            chosen = [start]
            while len(chosen) < clause.get("count", 1):
                later = [
                    d
                    for d in days
                    if (d - chosen[-1]).days >= max(1, clause.get("min_gap_days", 1))
                ]
                if not later:
                    break
                chosen.append(later[0])
            window = clause.get("window_days", 10**6)
            if (
                len(chosen) == clause.get("count", 1)
                and (chosen[-1] - chosen[0]).days <= window
                and (best is None or chosen[-1] < best)
            ):
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
                if r[0] == s
                and in_set(rule, r[2], r[3])
                and (limit is None or birth is None or old_enough(birth, r[1], limit))
            ]
            found_days = []
            for clause in rule["any"]:
                days = sorted(
                    {r[1] for r in rows if "sources" not in clause or r[4] in clause["sources"]}
                )
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
                index[s] = (
                    read_date(mark["date"])
                    if "date" in mark
                    else min(days) + timedelta(days=mark["landmark_days"])
                )  # type: ignore[assignment]
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
        return (
            phecode
            if p["level"] == "full" or not rest
            else head
            if p["level"] == "integer"
            else f"{head}.{rest[0]}"
        )

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
            record += [
                (s, day, x, place) for x in sorted({roll(y) for y in found} - gone, key=float)
            ]

    def place_of(s: str) -> str:
        given = {"seed": 0, "train": 0.8, "validation": 0.1} | (p["split"] or {})
        u = Fraction(int(sha256(f"{given['seed']}|{s}".encode()).hexdigest()[:16], 16), 2**64)
        return (
            "train"
            if u < given["train"]
            else "validation"
            if u < given["train"] + given["validation"]
            else "test"
        )

    split = {s: place_of(s) for s in everybody}
    carried: dict[str, set[str]] = defaultdict(set)
    for s, _, x, _ in record:
        carried[s].add(x)
    ratios: dict[str, dict[str, Any]] = {}
    chosen: set[str] = set()
    for rule in p["rules"]:
        name = rule["name"]
        group = [
            s
            for s in everybody
            if split[s] == "train"
            and label[s][name] is not None
            and (p["population"] == "subjects" or carried[s])
        ]
        cases = [s for s in group if label[s][name] == 1]
        reference = (
            group if p["denominator"] == "all" else [s for s in group if label[s][name] == 0]
        )
        own = {}
        if cases and reference:
            for x in {x for s in cases for x in carried[s]}:
                a, b = sum(x in carried[s] for s in cases), sum(x in carried[s] for s in reference)
                if a >= max(p["min_case_support"], math.ceil(p["min_case_fraction"] * len(cases))):
                    ratio = (a / len(cases)) / (b / len(reference)) if b else math.inf
                    own[x] = {
                        "ratio": ratio,
                        "n_case_with": a,
                        "n_case": len(cases),
                        "n_ref_with": b,
                        "n_ref": len(reference),
                    }
        ratios[name] = own
        above = [x for x in own if own[x]["ratio"] > p["threshold"]]
        chosen |= set(
            above
            or sorted(own, key=lambda x: (-own[x]["ratio"], -own[x]["n_case_with"], float(x)))[
                : p["top_k"]
            ]
        )
    if not p["select"]:
        chosen = {x for _, _, x, _ in record}
    selected = sorted(chosen, key=lambda x: (float(x), x))
    ids = {x: i for i, x in enumerate(selected, 5)}

    def age_month(s: str, day: date) -> int:
        return round(Fraction((day - cohort[s][0]).days, 30))

    kept: dict[str, Any] = {}
    no_birth = 0
    for s in everybody:
        own_records = [
            (day, ids[x], place) for who, day, x, place in record if who == s and x in ids
        ]
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
        amount = {"events": len(found), "records": n_records, "unique": len({i for _, i in found})}[
            p["min_codes_unit"]
        ]
        if not found or amount < p["min_codes"]:
            continue
        found = found[-(p["max_events"] or len(found)) :]
        start = found[0][0]
        clock = {
            "months": lambda d, start=start: (d - start).days / 30.4375,
            "calendar_month": lambda d, start=start: float(
                12 * (d.year - start.year) + d.month - start.month
            ),
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
            "age0_months": None
            if birth is None
            else math.floor(Fraction((start - birth).days) / Fraction("30.4375")),
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
        "onset": {
            s: {name: day and day.isoformat() for name, day in own.items()}
            for s, own in onset.items()
        },
        "split": split,
        "ratios": ratios,
        "sequences": kept,
        "funnel": funnel,
    }


def assert_same_result(expected: dict[str, Any], found: dict[str, Any]) -> None:
    for key in expected.keys() - {"funnel", "sequences"}:
        assert expected[key] == found[key], key
    for key, value in expected["funnel"].items():
        own = found["funnel"][key]
        assert (
            (dict(+Counter(own)) == dict(value)) if isinstance(value, Counter) else own == value
        ), key
    assert expected["sequences"].keys() == found["sequences"].keys()
    for subject, one in expected["sequences"].items():
        other = found["sequences"][subject]
        assert one["gaps"] == pytest.approx(other["gaps"], abs=1e-9)
        assert {key: one[key] for key in one if key != "gaps"} == {
            key: other[key] for key in other if key != "gaps"
        }
