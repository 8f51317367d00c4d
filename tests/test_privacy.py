"""No count of 1 to 10 people can be recovered from what is printed about claims: an attacker with
integer programs against random builds.
"""

from __future__ import annotations

import base64
import csv
import html
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from bitimely_cli.main import main
from bitimely_core import evaluate, privacy
from bitimely_core.claims.protected_scores import protect_scores
from bitimely_core.page import BarPlot, Page, PageBuilder
from bitimely_core.privacy import Sharing
from bitimely_core.schemas.scores import Comparison, PairedScores, Scores
from bitimely_core.schemas.tokens import SequenceStatistics
from bitimely_core.store import manifests
from bitimely_core.tokens.sequences import open_sequences
from bitimely_core.workflows.analyze import protect_page

CODES = {
    "428.0": "428",
    "250.00": "250",
    "496": "496",
    "401.9": "401",
    "008.5": "008",
    "486": "480",
    "585": "585",
    "714.0": "714",
    "340": "335",
}
LEAST = 5  # possible values of a hidden count
SMALL = range(1, 11)
FEW_ROWS = re.compile(r"(?<!at most )\b([1-9]|10) rows?\b")
PARTS = ("train", "validation", "test")
Table = list[dict[str, str]]


def write_cohort(folder: Path, seed: int) -> Path:
    """Claims with labels, in which some groups are of 1 to 10 people: cases of a label, carriers of
    a code, disagreements, faulty rows.
    """
    draw = np.random.default_rng(seed)
    n = int(draw.integers(120, 420))
    folder.mkdir(parents=True)
    shares = {code: draw.choice([0.01, 0.03, 0.1, 0.3, 0.6]) for code in CODES}
    cases = {name: draw.random(n) < draw.choice([0.02, 0.05, 0.3]) for name in ("chf", "flu")}
    rows = []
    for i in range(n):
        for code, share in shares.items():
            if draw.random() < share * (4 if cases["flu"][i] and code in {"486", "008.5"} else 1):
                rows += [(f"P{i}", f"2005-01-{int(draw.integers(10, 28))}", code)] * (
                    2 if code == "428.0" else 1
                )
        if draw.random() < 0.02:
            rows.append(
                (
                    f"P{i}",
                    draw.choice(["nonsense", "2005-03-01"]),
                    draw.choice(["XX", "799.9", "V70.0"]),
                )
            )
    tables = {
        "claims.csv": [("patient_id", "date", "icd9"), *rows],
        "patients.csv": [
            ("patient_id", "birth_date"),
            *((f"P{i}", "1940-05-17") for i in range(n)),
        ],
        "labels.csv": [
            ("patient_id", *cases),
            *(
                (f"P{i}", *("" if draw.random() < 0.01 else int(of[i]) for of in cases.values()))
                for i in range(n)
            ),
        ],
        "icd9_phecode.csv": [("icd9", "phecode"), *CODES.items()],
    }
    for name, lines in tables.items():
        with (folder / name).open("w", newline="") as file:
            csv.writer(file).writerows(lines)
    return folder


@dataclass
class Published:
    """All that a build prints: tables of the page, its text, and the JSON results of the verbs."""

    tables: dict[str, Table]
    text: str
    report: dict[str, Any]
    result: dict[str, Any]
    folder: Path


def read_page(path: Path) -> tuple[dict[str, Table], str]:
    """The tables of a page by their first columns, with the digits of the downloads, and the
    text.
    """
    page = path.read_text("utf-8")
    tables = {}
    for data in re.findall(r'href="data:text/csv;charset=utf-8;base64,([^"]+)"', page):
        rows = list(csv.DictReader(io.StringIO(base64.b64decode(data).decode())))
        if rows:
            tables[" ".join(list(rows[0])[:2])] = rows
    return tables, html.unescape(
        re.sub(r"<script.*?</script>|<style.*?</style>|<[^>]+>", " ", page, flags=re.S)
    )


def build(home: Path, seed: int, capsys: pytest.CaptureFixture[str], *flags: str) -> Published:
    raw = home / "raw"
    if not raw.exists():
        write_cohort(raw, seed)
    selection = [
        ["--no-select"],
        ["--ratio-threshold", "1.2"],
        ["--ratio-denominator", "controls"],
        ["--min-codes", "1"],
    ][seed % 4]
    choices = [
        *selection,
        *(["--min-codes", "2"] if "--min-codes" not in selection else []),
        *flags,
    ]
    argv = ["--workspace", str(home / "w"), "--json"]
    assert main(
        [
            "ingest",
            "pophr",
            str(raw),
            "--rules",
            "ccdss",
            "--default-source",
            "physician",
            *choices,
            *argv,
        ]
    ) in {0, 3}
    report = json.loads(capsys.readouterr().out)
    assert main(["tokenize", "pophr", *choices, *argv]) == 0
    result = json.loads(capsys.readouterr().out)
    folder = home / "w" / "tokens" / "pophr"
    return Published(*read_page(folder / "report.html"), report, result, folder)


def to_number(text: Any) -> float | None:
    """A printed number; None: withheld, absent, or below 11."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def tolerance(text: Any) -> float:
    """Half a unit of the last digit of a printed number."""
    digits = str(text).partition(".")[2]
    return 0.5 * 10.0 ** -len(digits) if digits else 1e-9


# --- linked counts


@dataclass
class Equations:
    """Integer unknowns with what is known of them."""

    names: list[str] = field(default_factory=list)
    # low <= sum <= high
    rows: list[tuple[dict[str, float], float, float]] = field(default_factory=list)

    def know(self, weights: dict[str, float], low: float, high: float = math.inf) -> None:
        self.names += [name for name in weights if name not in self.names]
        self.rows.append((weights, low, high))

    def know_ratio(self, top: str, bottom: str, printed: Any) -> None:
        """A printed ratio of two unknowns, with its rounding."""
        value = to_number(printed)
        if value is not None:
            self.know({top: 1, bottom: -(value + tolerance(printed))}, -math.inf, 1e-6)
            self.know({top: 1, bottom: -(value - tolerance(printed))}, -1e-6)

    def find_range(self, weights: dict[str, float]) -> tuple[int, int]:
        """Least and largest value of a sum of unknowns that everything known allows."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        place = {name: i for i, name in enumerate(self.names)}
        matrix = np.zeros((len(self.rows), len(place)))
        for i, (of, _, _) in enumerate(self.rows):
            for name, weight in of.items():
                matrix[i, place[name]] += weight
        cost = np.zeros(len(place))
        for name, weight in weights.items():
            cost[place[name]] += weight
        limits = LinearConstraint(
            matrix, [low for _, low, _ in self.rows], [high for _, _, high in self.rows]
        )
        ends = []
        for sign in (1, -1):
            found = milp(
                sign * cost,
                constraints=limits,
                integrality=np.ones(len(place)),
                bounds=Bounds(0, 5000),
            )
            assert found.status in {0, 4}, found.message
            ends.append(round(sign * found.fun))
        return ends[0], ends[1]


def write_equations(seen: Published) -> Equations:
    """What the page and the JSON say about subjects and labels, and the sums that everybody
    knows.
    """
    known = Equations()

    def know_count(name: str, printed: Any) -> None:
        value = to_number(printed)
        known.know({name: 1}, *((value, value) if value is not None else (0, math.inf)))

    funnel = {
        row["step"]: row["count"] for row in seen.tables["unit step"] if row["unit"] == "subjects"
    }
    know_count("in", funnel["known"])
    know_count("out", funnel["with a sequence"])
    know_count("out", seen.result["windows"])
    known.know({"in": 1, "out": -1}, 0)
    known.know({"out": 1, **{f"out {p}": -1 for p in PARTS}}, 0, 0)
    for p in PARTS:
        know_count(f"out {p}", seen.result["audit"][p]["windows"])
    ratios = {row["label"]: row for row in seen.tables.get("label PheCode", [])}
    for row in seen.tables["label cases"]:
        label = row["label"]
        for p in PARTS:
            know_count(f"{label} after {p} cases", seen.result["audit"][p]["classes"].get(label, 0))
            known.know({f"{label} after {p} known": 1, f"{label} after {p} cases": -1}, 0)
            known.know({f"out {p}": 1, f"{label} after {p} known": -1}, 0)
            for kind, sign in itertools.product(("cases", "others"), (1,)):
                weights = {
                    f"{label} {stage} {p} cases": (sign if kind == "cases" else -sign) * s
                    for stage, s in (("before", 1), ("after", -1))
                }
                more = (
                    {f"{label} {stage} {p} known": s for stage, s in (("before", 1), ("after", -1))}
                    if kind == "others"
                    else {}
                )
                known.know({**weights, **more}, 0)
            known.know({f"{label} before {p} known": 1, f"{label} before {p} cases": -1}, 0)
        for stage in ("before", "after"):
            for kind in ("known", "cases"):
                known.know(
                    {
                        f"{label} {stage} {kind}": 1,
                        **{f"{label} {stage} {p} {kind}": -1 for p in PARTS},
                    },
                    0,
                    0,
                )
        known.know({"in": 1, f"{label} before known": -1}, 0)
        known.know({"in": 1, "out": -1, f"{label} before known": -1, f"{label} after known": 1}, 0)
        know_count(f"{label} after cases", row["cases"])
        known.know_ratio(f"{label} after cases", f"{label} after known", row["prevalence"])
        known.know_ratio(
            f"{label} before cases", f"{label} before known", row["prevalence before filters"]
        )
        ceiling = to_number(row["largest possible ratio"])
        if ceiling is not None:
            known.know_ratio(
                f"{label} before train known",
                f"{label} before train cases",
                row["largest possible ratio"],
            )
        if label in ratios:
            know_count(f"{label} before train cases", ratios[label]["cases"])
            others = {f"{label} before train cases": -1} if is_controls(seen) else {}
            reference = to_number(ratios[label]["reference"])
            if reference is not None:
                known.know({f"{label} before train known": 1, **others}, reference, reference)
    add_flow(known, seen, know_count)
    for row in seen.tables.get("rule flag", []):
        cells = {cell: f"{row['rule']} {row['flag']} {cell}" for cell in ("tp", "fp", "fn", "tn")}
        for cell, name in cells.items():
            know_count(name, row[cell])
        for label, other in ((row["rule"], "fp"), (row["flag"], "fn")):
            if f"{label} before cases" in known.names:
                known.know({f"{label} before cases": 1, cells["tp"]: -1, cells[other]: -1}, 0)
    return known


def add_flow(known: Equations, seen: Published, know_count: Callable[[str, Any], None]) -> None:
    """The steps of a cohort: each has its left out and its left; the last are those who have the
    label, and those with a sequence.
    """
    rows = seen.tables.get("step left out", [])
    before = "in"
    for i, row in enumerate(rows[1:-1]):
        left = f"left {i}" if i < len(rows) - 3 else "out"
        know_count(left, row["left"])
        know_count(f"gone {i}", row["left out"])
        known.know({before: 1, left: -1, f"gone {i}": -1}, 0, 0)
        before = left
    if rows:
        (label,) = {row["label"] for row in seen.tables["label cases"]}
        know_count("in", rows[0]["left"])
        known.know({f"left {len(rows) - 4}": 1, f"{label} before known": -1}, 0, 0)
        know_count(f"{label} before cases", rows[-1]["left"])
        assert seen.result["cohort"][0]["step"] == "all subjects"
        for row, printed in zip(rows, seen.result["cohort"], strict=True):
            assert to_number(row["left"]) == printed["left"]


def is_controls(seen: Published) -> bool:
    options = manifests.read_manifest(seen.folder)["options"]
    return options["denominator"] == "controls"


def list_small_counts(seen: Published) -> dict[str, tuple[int, dict[str, float]]]:
    """Every count of 1 to 10 people of a build with its unknown, by name, from the exact
    statistics.
    """
    statistics = SequenceStatistics.load(seen.folder / "statistics.json")
    exact = {"in": statistics.funnel.subjects_in, "out": statistics.funnel.subjects_out}
    for label, by_part in statistics.prevalence["after"].items():
        for stage in ("before", "after"):
            for part in ("all", *PARTS):
                found = statistics.prevalence[stage][label][part]
                name = f"{label} {stage}" if part == "all" else f"{label} {stage} {part}"
                exact |= {f"{name} known": found.subjects, f"{name} cases": found.cases}
        assert by_part["all"].subjects <= exact["out"]
    sums: list[dict[str, float]] = [
        {"in": 1, "out": -1},
        *({name: 1} for name in exact if name.endswith("cases")),
    ]
    for label in statistics.prevalence["after"]:
        for part in ("", *(f" {p}" for p in PARTS)):
            sums.append({f"{label} after{part} known": 1, f"{label} after{part} cases": -1})
            sums.append({f"{label} before{part} cases": 1, f"{label} after{part} cases": -1})
        sums.append({"out": 1, f"{label} after known": -1})
    for cell in statistics.agreement:
        name = f"{cell.rule} {cell.flag} {cell.cell}"
        exact[name] = cell.n
        sums.append({name: 1})
    if statistics.cohort is not None:
        assert exact["in"] == statistics.cohort.subjects
        counts = {**{f"gone {i}": s.left_out for i, s in enumerate(statistics.cohort.steps)}}
        counts |= {f"left {i}": s.left for i, s in enumerate(statistics.cohort.steps)}
        counts[f"gone {len(statistics.cohort.steps)}"] = (
            statistics.cohort.steps[-1].left - exact["out"]
        )
        exact |= counts
        sums += [{name: 1} for name in counts]
    values = {
        " ".join(f"{'+' if w > 0 else '-'}{name}" for name, w in of.items()): (
            sum(int(w) * exact[n] for n, w in of.items()),
            of,
        )
        for of in sums
    }
    return {name: one for name, one in values.items() if one[0] in SMALL}


def find_narrow_counts(seen: Published) -> list[str]:
    """Counts of 1 to 10 for which fewer than LEAST values fit what is printed."""
    known = write_equations(seen)
    found = []
    for name, (value, weights) in list_small_counts(seen).items():
        if not set(weights) <= set(known.names):
            continue
        low, high = known.find_range(weights)
        assert low <= value <= high, (
            f"{name}: {value} is not between {low} and {high}: the attacker's equations are wrong"
        )
        if high - low + 1 < LEAST:
            found.append(f"{name} = {value} in {low}..{high}")
    return found


# --- rows of the table of PheCodes


def interval(a: int, n1: int, c: int, n: int, controls: bool) -> tuple[float, float, float] | None:
    """Ratio and limits by the formula of the docs; `a` of `n1` cases and `c` of `n` subjects carry
    the code.
    """
    a0, n0 = c - a, n - n1
    if not n1 or not n0 or not (a0 if controls else c):
        return None
    ratio = (a / n1) / (a0 / n0 if controls else c / n)
    p1, p0 = (a + 0.5) / (n1 + 1), (a0 + 0.5) / (n0 + 1)
    share = n1 / n
    q = share * p1 + (1 - share) * p0
    variance = (
        (1 - p1) / (n1 * p1) + (1 - p0) / (n0 * p0)
        if controls
        else (1 / p1 - share / q) ** 2 * p1 * (1 - p1) / n1
        + ((1 - share) / q) ** 2 * p0 * (1 - p0) / n0
    )
    reach = math.exp(1.96 * math.sqrt(variance))
    return ratio, ratio / reach, ratio * reach


def list_candidates(
    row: dict[str, str], n1: int, n: int, carriers: float | None, controls: bool
) -> list[tuple[int, int, int, int]]:
    """Tables (cases with, cases without, others with, others without) that fit a row of the
    page.
    """
    printed = [(row[name], to_number(row[name])) for name in ("ratio", "95 % CI lower", "upper")]
    found = []
    for a in range(n1 + 1):
        for a0 in range(n - n1 + 1):
            cells = (a, n1 - a, a0, n - n1 - a0)
            with_code, reference = to_number(row["cases with"]), to_number(row["reference with"])
            if (with_code is not None and a != with_code) or (
                row["cases with"] == "<11" and a not in SMALL
            ):
                continue
            if (reference is not None and (a0 if controls else a + a0) != reference) or (
                carriers is not None and a + a0 != carriers
            ):
                continue
            if row["cases with"] == privacy.WITHHELD and not any(cell in SMALL for cell in cells):
                continue
            numbers = (
                interval(a, n1, a + a0, n, controls)
                if any(value is not None for _, value in printed)
                else (None,) * 3
            )
            if numbers is None or any(
                value is not None and abs(number - value) > tolerance(text) + 1e-9 * abs(value)
                for (text, value), number in zip(printed, numbers, strict=True)
            ):
                continue
            found.append(cells)
    return found


def find_narrow_ratios(seen: Published) -> tuple[list[str], int]:
    """Cells of 1 to 10 of the table of PheCodes for which fewer than LEAST values fit, and how many
    such cells there are.
    """
    controls, rows = is_controls(seen), seen.tables.get("label PheCode", [])
    exact = {
        (row["target"], row["code"]): row
        for row in pl.read_parquet(seen.folder / "ratios.parquet").iter_rows(named=True)
    }
    carriers: dict[tuple[str, float], float] = {}
    for row in rows:
        if to_number(row["reference with"]) is not None and not controls:
            carriers[row["PheCode"], float(row["reference"])] = float(row["reference with"])
    leaks, n_small = [], 0
    for row in rows:
        of = exact[row["label"], row["PheCode"].lstrip("'")]
        n1, n = of["n_case"], of["n_ref"] + of["n_case"] * controls
        a, c = of["n_case_with"], of["n_ref_with"] + of["n_case_with"] * controls
        truth = (a, n1 - a, c - a, n - n1 - c + a)
        if not any(cell in SMALL for cell in truth) or to_number(row["cases"]) is None:
            continue
        found = list_candidates(row, n1, n, carriers.get((row["PheCode"], float(n))), controls)
        assert truth in found, (row, truth)
        for k, cell in enumerate(truth):
            if cell in SMALL:
                n_small += 1
                if len({one[k] for one in found}) < LEAST:
                    leaks.append(
                        f"{row['label']} {row['PheCode']} cell {k} = {cell} of {sorted({one[k] for one in found})}"
                    )
    return leaks, n_small


def find_narrow_scores(seen: Published) -> list[str]:
    """Carriers of the best single code: every count of codes is 1 here, so that its average
    precision is a formula of four counts.
    """
    leaks = []
    counts = SequenceStatistics.load(seen.folder / "statistics.json").leaks
    frame = pl.concat([pl.read_parquet(path) for path in seen.folder.glob("sequences-*.parquet")])
    ids = dict(pl.read_parquet(seen.folder / "vocab.parquet").select("code", "id").iter_rows())
    for row, (part, column) in itertools.product(
        seen.tables["label cases"], (("all", "best single code"), ("test", "single code, test"))
    ):
        printed, scores = to_number(row[column]), counts[row["label"]]
        if printed is None or scores.best is None:
            continue
        with_code = pl.col("codes").list.contains(ids[scores.best.phecode])
        if frame.select(
            (pl.col("codes").list.count_matches(ids[scores.best.phecode]) > 1).any()
        ).item():
            continue
        part_frame = (
            frame if part == "all" else frame.filter(pl.col("split").cast(pl.String) == part)
        )
        y = part_frame.filter(with_code)[f"y_{row['label']}"].drop_nulls()
        n, n1 = scores.subjects[part], scores.cases[part]
        truth = (
            int((y == 1).sum()),
            n1 - int((y == 1).sum()),
            int((y == 0).sum()),
            n - n1 - int((y == 0).sum()),
        )
        found = []
        for a, b in itertools.product(range(n1 + 1), range(n - n1 + 1)):
            value = (a / n1 * a / (a + b) if a else 0.0) + (n1 - a) / n1 * n1 / n
            if abs(value - printed) <= tolerance(row[column]) + 1e-9:
                found.append((a, n1 - a, b, n - n1 - b))
        assert truth in found
        leaks += [
            f"{row['label']} {part} {truth}"
            for k in range(4)
            if truth[k] in SMALL and len({one[k] for one in found}) < LEAST
        ]
    return leaks


def find_narrow_rows(seen: Published) -> list[str]:
    """Counts of 1 to 10 rows that the printed sums of the funnel and of the report pin down."""
    exact = manifests.read_manifest(seen.folder.parents[1] / "cache" / "pophr")["report"]
    (table,) = [one for one in seen.report["rows"] if one["file"] == "claims.csv"]
    (truth,) = [one for one in exact["rows"] if one["file"] == "claims.csv"]
    read = int(
        float(next(row["count"] for row in seen.tables["unit step"] if row["step"] == "read"))
    )
    leaves = {("used",): (table["used"], truth["used"])}
    for kind in ("dropped_by_reason", "quarantined_by_reason"):
        leaves |= {(kind, reason): (n, truth[kind][reason]) for reason, n in table[kind].items()}
    leaks = []
    for key, (printed, value) in leaves.items():
        others = [shown for other, (shown, _) in leaves.items() if other != key]
        low = max(printed - 9, read - 9 - sum(others), 0)
        high = min(printed, read - sum(max(0, shown - 9) for shown in others))
        assert low <= value <= high
        if value in SMALL and high - low + 1 < LEAST:
            leaks.append(f"{key} = {value} in {low}..{high}")
    assert "patients.csv" not in {one["file"] for one in seen.report["rows"]}
    return leaks


def attack(seen: Published) -> list[str]:
    return [
        *find_narrow_counts(seen),
        *find_narrow_ratios(seen)[0],
        *find_narrow_scores(seen),
        *find_narrow_rows(seen),
    ]


# --- the builds


BUILDS = [
    0,
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8)),
    *(pytest.param(seed, marks=pytest.mark.long) for seed in range(8, 20)),
]


@pytest.mark.slow
@pytest.mark.parametrize("seed", BUILDS)
def test_no_small_count_can_be_recovered(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = build(tmp_path, seed, capsys)
    assert len(list_small_counts(seen)) > 3, "there is something to find"
    assert not attack(seen)
    people = {
        text
        for rows in seen.tables.values()
        for row in rows
        for name, text in row.items()
        if name in {"cases", "cases with", "fp", "fn"}
    }
    people |= {row["count"] for row in seen.tables["unit step"] if row["unit"] == "subjects"}
    assert not {str(n) for n in SMALL} & people
    assert "timelines" not in seen.text


COHORT = """
name = "flu"
rule = [{ name = "flu", codes = { icd9 = ["486"] }, any = [{ count = 1 }] }]
index = { at = "first_row", after_days = 8, min_observation_days = 1 }
outcome = { rule = "flu", washout_days = %d, lookback_days = 3 }
risk = { to_day = 9, min_days = 2 }
%s
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [
        1,
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3)),
        *(pytest.param(seed, marks=pytest.mark.long) for seed in (4, 5, 6, 7, 8, 9, 11, 13, 14)),
    ],
)
def test_no_small_count_of_a_cohort_can_be_recovered(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flu.toml"
    path.write_text(
        COHORT % (seed % 3, "controls = { ratio = 1, sex = false }" if seed % 4 == 3 else "")
    )
    seen = build(
        tmp_path,
        seed,
        capsys,
        "--cohort",
        str(path),
        "--leakage",
        "drop-icd",
        "--min-codes",
        "1",
        "--force-new",
    )
    assert len(list_small_counts(seen)) > 3, "there is something to find"
    assert not attack(seen)
    people = {row[name] for row in seen.tables["step left out"] for name in ("left out", "left")}
    assert not {str(n) for n in SMALL} & people
    chart = re.search(
        r"<svg.*?</svg>", (seen.folder / "report.html").read_text("utf-8"), flags=re.S
    )
    assert chart
    drawn = re.findall(r"n = ([\d,]+)", html.unescape(chart[0]))
    assert set(drawn) <= {
        f"{int(float(text)):,}" for text in people if text not in {"", privacy.WITHHELD}
    }


def hide_as_before(seen: Published) -> Published:
    """A page that hides counts of carriers below 11 and prints everything beside them."""
    tables = {name: [dict(row) for row in rows] for name, rows in seen.tables.items()}
    for row in tables["label PheCode"]:
        if float(row["cases with"]) < 11:
            row |= {"cases with": "<11", "reference with": ""}
    for row in tables.get("rule flag", []):
        if any(0 < float(row[cell]) < 11 for cell in ("tp", "fp", "fn", "tn")):
            row |= {cell: "<11" for cell in ("tp", "fp", "fn", "tn") if float(row[cell]) < 11}
    return Published(tables, seen.text, seen.report, seen.result, seen.folder)


@pytest.mark.slow
def test_the_attack_recovers_what_a_page_hides_in_one_column_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leaks, hidden = [], 0
    for seed in (0, 1, 4):  # without infinite ratios
        found, n = find_narrow_ratios(
            hide_as_before(build(tmp_path / str(seed), seed, capsys, "--small-counts"))
        )
        leaks += found
        hidden += n
    assert hidden > 20
    assert len(leaks) > 0.9 * hidden


@pytest.mark.slow
def test_small_counts_on_demand_are_exact_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = build(tmp_path, 1, capsys, "--small-counts", "--individual-timelines")
    statistics = SequenceStatistics.load(seen.folder / "statistics.json")
    options = manifests.read_manifest(seen.folder)["options"]
    assert (options["small_counts"], options["individual_timelines"]) == (True, True)
    assert {row["label"]: int(float(row["cases"])) for row in seen.tables["label cases"]} == {
        label: scores.cases["all"] for label, scores in statistics.leaks.items()
    }
    assert "--small-counts" in seen.text
    assert find_narrow_counts(seen), "the attack sees what is printed"
    exact = manifests.read_manifest(tmp_path / "w" / "cache" / "pophr")["report"]["rows"]
    assert seen.report["rows"] == exact


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 6))])
def test_scores_do_not_show_how_few_have_a_label(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sequences = open_sequences(build(tmp_path, seed, capsys).folder)
    rows, draw = sequences["test"], np.random.default_rng(seed)
    truth = rows.targets()
    assert truth is not None
    guess = np.clip(draw.random(truth.shape) * 0.6 + 0.4 * np.nan_to_num(truth), 0, 1)
    options = {
        "class_names": sequences.class_names,
        "train_target": sequences["train"].targets(),
        "bootstrap": 50,
    }
    found = evaluate.score("multilabel", truth, guess, rows.subjects(), **options)
    exact = Scores(
        run="r",
        data="pophr",
        split="test",
        **{name: getattr(found, name) for name in type(found).model_fields},
    )
    reason = "2 rows of class flu, at least 5 required"  # as `evaluate.explain_rare_class` words it
    paired = {
        name: PairedScores(difference=0.25, undefined_reason=f"no CI: {reason}")
        for name in exact.metrics
    }
    comparison = Comparison(
        run="s", metrics=paired, sentence=f"r and s on pophr: +0.25, no verdict ({reason})."
    )
    exact = exact.model_copy(update={"comparison": comparison, "compared": exact.baselines})
    shown = protect_scores(exact, sequences)
    assert not FEW_ROWS.search(shown.model_dump_json())
    few = [k for k, y in enumerate(truth.T) if (y == 1).sum() in SMALL or (y == 0).sum() in SMALL]
    assert few, "there is something to hide"
    names = sequences.class_names
    for k in few:
        one = shown.by_class[names[k]]
        assert (one.support, one.subjects, one.base_rate, one.unknown) == (None,) * 4
        assert all(
            getattr(one, metric).value is None
            for metric in ("precision", "recall", "f1", "auroc", "auprc")
        )
        assert all(
            names[k] not in (baseline.by_class or {}) for baseline in shown.baselines.values()
        )
    for metric in ("auroc", "auprc"):  # a mean over labels and all but one of them show the last
        defined = [
            name
            for name in shown.by_class
            if getattr(exact.by_class[name], metric).value is not None
        ]
        hidden = [name for name in defined if getattr(shown.by_class[name], metric).value is None]
        assert len(hidden) != 1 or shown.metrics[metric].value is None
    assert all(
        metric.value is None
        for name in ("majority", "prior")
        for metric in shown.baselines[name].metrics.values()
    )
    for name, one in shown.by_class.items():
        if (
            one.recall.value is not None
            and one.precision.value is not None
            and one.support is not None
        ):
            hits = one.recall.value * one.support
            wrong = hits / one.precision.value - hits if one.precision.value else 0
            assert not {round(hits), round(one.support - hits), round(wrong)} & set(SMALL), name


def list_solutions(
    counts: dict[str, int], sums: Iterable[tuple[str, list[str]]], hidden: list[str], most: int
) -> np.ndarray:
    """The hidden counts [solutions, hidden] of all non-negative tables with the other counts, by
    trying every value up to `most`.
    """
    axes = np.indices((most + 1,) * len(hidden), dtype=np.int16).reshape(len(hidden), -1)
    value = {
        name: axes[hidden.index(name)] if name in hidden else np.int16(n)
        for name, n in counts.items()
    }
    fits = np.ones(axes.shape[1], bool)
    for total, parts in sums:
        fits &= value[total] == sum(value[part] for part in parts)
    return axes[:, fits].T


@pytest.mark.slow
def test_withheld_counts_keep_five_values_by_trial_of_all_tables() -> None:
    tried = 0
    for seed in range(200):
        draw = np.random.default_rng(seed)
        parts = {
            name: int(n)
            for name, n in zip("abcd", draw.choice([0, 1, 2, 5, 9, 12, 14], 4), strict=True)
        }
        counts = {**parts, "ab": parts["a"] + parts["b"], "all": sum(parts.values())}
        sums = [("ab", ["a", "b"]), ("all", ["ab", "c", "d"])]
        withheld = privacy.find_withheld(
            counts, sums, [], {name: i for i, name in enumerate(("all", "ab", "d", "c", "b", "a"))}
        )
        assert {name for name, n in counts.items() if n in SMALL} <= withheld
        if not 0 < len(withheld) < 4 or tried == 40:
            continue
        tried += 1
        hidden = sorted(withheld)
        tables = list_solutions(counts, sums, hidden, 70)
        for name, values in zip(hidden, tables.T, strict=True):
            assert counts[name] not in SMALL or len(set(values.tolist())) >= LEAST, (
                counts,
                withheld,
            )
    assert tried == 40


def test_a_rounded_message_stays_as_it_is_when_it_is_rounded_again() -> None:
    once = privacy.round_message("37 of 1,234 rows have no known code")
    assert once == "at most 40 of at most 1,240 rows have no known code"
    assert privacy.round_message(once) == once


def test_the_facts_of_an_analysis_do_not_count_few_people() -> None:
    facts = {
        "Runs": "one",
        "Seed": "0, 0 (of this analysis)",
        "Model": "bitimelygpt",
        "Neighbours": "10",
    }
    counted = {
        "Rows": "1,200 train, 7 test",
        "Subjects": "7, numbered at random",
        "Bootstrap": "1,000 resamples of 7 subjects",
    }
    page = Page(
        title="",
        verdict="",
        notices=[],
        blocks=[],
        facts={**facts, **counted, "Sequences": "12 of the test split"},
        fact_sharing=dict.fromkeys(facts, Sharing.OPEN),
        summary={},
    )
    assert protect_page(page).facts == {**facts, "Sequences": "12 of the test split"}
    assert protect_page(page, withhold=True).facts == facts
    # (8 - 1) / 3: a number from which the rows could be counted
    derived = {"t-SNE": "perplexity 2.33"}
    owned = replace(page, facts={**facts, **derived}, fact_sharing={"t-SNE": Sharing.OWNER})
    assert "t-SNE" not in protect_page(owned).facts


@pytest.mark.parametrize("sharing", [None, Sharing.OPEN])
def test_a_part_of_a_page_with_a_small_count_is_shared_where_it_is_declared_open(
    sharing: Sharing | None,
) -> None:
    page = PageBuilder("an analysis of an extension")
    page.table("cells", "", "", ["anything", "value"], [["a", 0.25], ["b", 7]], sharing)
    page.figure("bars", "", "", BarPlot(["a", "b"], [1 / 3, 2 / 3]), sharing)
    page.fact("Anything", "7 of 12", sharing)
    page.table("large", "", "", ["anything"], [[0], [11]])
    page.table("owner", "", "", ["share"], [[1 / 3]], Sharing.OWNER)  # of few people
    shared = protect_page(page.finish(""))
    blocks = [block.name for block in shared.blocks if not isinstance(block, str)]
    assert blocks == (["large"] if sharing is None else ["cells", "bars", "large"])
    assert bool(shared.facts) is (sharing is not None)
