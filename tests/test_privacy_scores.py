"""What is withheld of scores and ratios beside withheld counts, against all tables that fit what is
printed.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from bitimely_core.claims import disclosure, protected_scores
from bitimely_core.claims.disclosure import CountDisclosure
from bitimely_core.report.new_subjects_page import _find_hidden, new_subjects_page
from bitimely_core.report.renderer import write_report
from bitimely_core.schemas.scores import (
    Baseline,
    ClassScores,
    Difference,
    LabelCalibration,
    MetricValue,
    RiskGroup,
    RiskGroups,
    RiskPoint,
    Scores,
)

Table = tuple[int, int, int, int]  # cases with the code, cases, subjects with it, subjects
TABLES: dict[tuple[str, str], Table] = {
    ("flu", "480"): (50, 100, 200, 400),
    ("flu", "490"): (40, 100, 100, 400),
    ("flu", "9"): (5, 100, 205, 400),  # small, but any of 1 to 10 fits
    ("flu", "10"): (95, 100, 205, 400),
    ("chf", "500"): (198, 396, 200, 400),  # 2 of 4 others: at most 4 values
    ("flu", "500"): (50, 100, 200, 400),  # shows the 200
    ("chf", "490"): (100, 200, 100, 400),
}
SHOWN = [("chf", "490"), ("flu", "490"), ("flu", "480")]  # the largest ratio of a label first
HIDDEN = [("chf", "500"), ("flu", "9"), ("flu", "10"), ("flu", "500")]  # by code


def list_cells(with_code: int, cases: int, carriers: int, subjects: int) -> tuple[int, ...]:
    return (
        with_code,
        cases - with_code,
        carriers - with_code,
        subjects - cases - carriers + with_code,
    )


def has_few_tables(table: Table) -> bool:
    """Whether a cell of 1 to 10 has fewer than five values of 1 to 10 beside the margins, by trial
    of all tables.
    """
    fits = [
        cells
        for with_code in range(table[1] + 1)
        if min(cells := list_cells(with_code, *table[1:])) >= 0
    ]
    values = [{cells[k] for cells in fits} & set(range(1, 11)) for k in range(4)]
    return any(0 < cell < 11 and len(values[k]) < 5 for k, cell in enumerate(list_cells(*table)))


def test_a_table_is_narrow_where_fewer_than_five_tables_fit() -> None:
    tried = set()
    for cases, carriers, subjects in itertools.product((4, 6, 13, 30), (3, 5, 12, 31), (31, 36)):
        for with_code in range(min(cases, carriers) + 1):
            table = (with_code, cases, carriers, subjects)
            if min(list_cells(*table)) >= 0:
                expected = has_few_tables(table)
                assert disclosure._is_narrow(*table) is expected, table
                tried.add(expected)
    assert tried == {False, True}


@pytest.mark.parametrize("controls", [False, True])
def test_withheld_ratios_are_the_last_and_in_an_order_that_shows_nothing(
    controls: bool, tmp_path: Path
) -> None:
    rows = []
    for (label, code), (with_code, cases, carriers, subjects) in TABLES.items():
        ratio = with_code / cases / (carriers / subjects)
        reference = (carriers - with_code, subjects - cases) if controls else (carriers, subjects)
        rows.append((label, code, ratio, ratio / 2, ratio * 2, with_code, cases, *reference, True))
    rows.append(("flu", "999", 9.0, 8.0, 10.0, 50, 100, *rows[0][7:9], False))
    names = [
        "target",
        "code",
        "ratio",
        "lo",
        "hi",
        "n_case_with",
        "n_case",
        "n_ref_with",
        "n_ref",
        "selected",
    ]
    pl.DataFrame(rows, schema=names, orient="row").write_parquet(tmp_path / "ratios.parquet")
    options = SimpleNamespace(model_extra={"denominator": "controls"} if controls else {})
    built: Any = SimpleNamespace(folder=tmp_path, manifest=SimpleNamespace(options=options))

    assert disclosure._count_ratio_groups(tmp_path, built.manifest) == [
        ("flu", 400, 100),
        ("chf", 400, 396),
    ]
    shared = disclosure.list_ratio_rows(built, CountDisclosure(exact=False))
    open_rows = [(row.label, row.code) for row in shared if row.numbers[0] is not None]
    closed_rows = [(row.label, row.code) for row in shared if row.numbers[0] is None]
    assert (open_rows, closed_rows) == (SHOWN, HIDDEN)
    assert [row.label for row in shared] == ["chf"] * 2 + ["flu"] * 5
    for row in shared:
        assert (row.counts[0] is None) == (row.counts[2] is None) == (row.numbers[0] is None)
        assert row.counts[1] == TABLES[row.label, row.code][1]
    exact = disclosure.list_ratio_rows(built, CountDisclosure())
    assert {(row.label, row.code): row.counts[0] for row in exact} == {
        key: table[0] for key, table in TABLES.items()
    }
    key = ("flu", "ratio", "train", "cases")
    for row in disclosure.list_ratio_rows(
        built, CountDisclosure(withheld=frozenset({key}), exact=False)
    ):
        if row.label == "flu":
            assert row.numbers == (None, None, None)
            assert row.counts[1] is None
            assert (row.counts[3] is None) is controls, "of cases and controls each shows the other"


def test_counts_of_a_label_are_open_where_both_are_printed() -> None:
    for kind in ("known", "cases", "others"):
        shared = CountDisclosure(withheld=frozenset({("a", "after", "all", kind)}))
        assert shared.has_counts("a", "after") is (kind == "others")
        assert shared.has_counts("a", "after", "test")
        assert shared.has_counts("b", "after")


# ---- scores of several labels


def make_scores(areas: dict[str, float | None], support: dict[str, int]) -> Scores:
    """Scores of 400 people with all decisions right, and means over the labels with an area."""
    right = MetricValue(value=1.0)
    values = [area for area in areas.values() if area is not None]
    mean = MetricValue(value=sum(values) / len(values), n_defined=len(values))
    return Scores(
        run="r",
        data="d",
        split="test",
        task="multilabel",
        n=400,
        n_subjects=400,
        metrics=dict.fromkeys(("auroc", "auprc"), mean),
        by_class={
            name: ClassScores(
                support=support[name],
                subjects=support[name],
                precision=right,
                recall=right,
                f1=right,
                auroc=MetricValue(value=area),
                auprc=MetricValue(value=area),
            )
            for name, area in areas.items()
        },
        baselines={"prior": Baseline(metrics={"auroc": mean})},
        risk_calibration={
            name: LabelCalibration(slope=mean, intercept=mean, brier=mean, observed=1 / 3)
            for name in areas
        },
    )


@pytest.mark.parametrize("closed", [set(), {"a"}, {"b"}, {"a", "b"}, {"a", "b", "c"}])
@pytest.mark.parametrize("undefined", [set(), {"b"}, {"b", "c"}])
def test_no_area_of_a_withheld_label_follows_from_the_mean(
    closed: set[str], undefined: set[str]
) -> None:
    areas = {
        name: None if name in undefined else 0.6 + 0.01234567 * k for k, name in enumerate("abc")
    }
    exact = make_scores(areas, support := {"a": 100, "b": 90, "c": 50})
    keys = frozenset((name, "after", "test", "cases") for name in closed)
    withheld = protected_scores._choose_labels(exact, CountDisclosure(withheld=keys, exact=False))
    shown = protected_scores._protect_labels(exact, withheld)
    ranked = {name for name, area in areas.items() if area is not None}
    hidden = {name for name in ranked if shown.by_class[name].auroc.value is None}
    assert hidden >= closed & ranked
    assert len(hidden) != 1 or shown.metrics["auroc"].value is None
    for name in hidden - closed:  # the companion: no other one has fewer cases
        assert closed & ranked
        assert support[name] == min(support[label] for label in ranked - closed)
    assert len(hidden - closed) == (len(closed & ranked) == 1 and bool(ranked - closed))
    if len(hidden) != 1:
        assert shown.metrics["auroc"].value == pytest.approx(
            exact.metrics["auroc"].value, abs=6e-4 if closed else 0
        )
    for name, label in shown.by_class.items():
        is_open = name not in closed
        assert (label.support is not None) is is_open
        assert (label.precision.value is not None) is is_open
    assert (shown.baselines["prior"].metrics["auroc"].value is None) is (
        bool(closed) or len(hidden) == 1
    )
    assert set(shown.risk_calibration or {}) == set(areas) - hidden - closed
    for calibration in (shown.risk_calibration or {}).values():
        assert calibration.observed == 0.333


@pytest.mark.parametrize(
    ("hits", "wrong", "missed", "few"),
    [
        (50, 20, 20, False),
        (50, 10, 20, True),
        (50, 20, 10, True),
        (10, 20, 40, True),
        (0, 20, 40, True),  # precision 0: how many decisions there were is not known
        (50, 345, 0, True),  # 5 right without the label
        (50, 0, 20, False),
    ],
)
def test_decisions_are_withheld_with_a_small_cell(
    hits: int, wrong: int, missed: int, few: bool
) -> None:
    support = hits + missed
    label = ClassScores(
        support=support,
        precision=MetricValue(value=hits / (hits + wrong)),
        recall=MetricValue(value=hits / support),
    )
    assert protected_scores._has_few_in_confusion(label, 400) is few


def test_rounded_numbers_keep_three_digits_and_lose_counts() -> None:
    difference = Difference(difference=0.123456, p=0.0123456, n_defined=7)
    metric = MetricValue(value=0.98765, se=0.0123456, lo=0.9, n_defined=7, difference=difference)
    shown = protected_scores._round_metric(metric)
    assert (shown.value, shown.se, shown.lo, shown.hi) == (0.988, 0.012, 0.9, None)
    assert shown.difference is not None
    assert (shown.difference.difference, shown.difference.p) == (0.123, 0.012)
    assert (shown.n_defined, shown.difference.n_defined) == (None, None)
    assert shown.undefined_reason is None
    rare = metric.model_copy(update={"undefined_reason": "2 rows of class flu"})
    assert "2" not in str(protected_scores._round_metric(rare).undefined_reason)


# ---- times to event


def test_a_share_of_a_group_without_anybody_gone_is_exact_beside_printed_counts() -> None:
    point = RiskPoint(day=1, at_risk=15, events=25, incidence=0.625, lo=0.4321, hi=0.789)
    for closed in (None, ("n", "d2"), ("risk", "d2", "0"), ("events", "d2", "0")):
        withheld = frozenset([closed] if closed else [])
        group = RiskGroup(name="low", n=40, predicted=[0.12345], points=[point])
        shown = protected_scores._withhold_group(group, "d2", withheld)
        (printed,) = shown.points
        assert (printed.incidence, printed.lo) == ((None, None) if closed else (0.625, 0.4321))
        assert shown.predicted == [0.123]
        assert (shown.n, printed.at_risk, printed.events) == (
            None if closed == ("n", "d2") else 40,
            None if closed == ("risk", "d2", "0") else 15,
            None if closed == ("events", "d2", "0") else 25,
        )


@pytest.mark.parametrize(
    ("counts", "withheld"),
    [([(40, 12)], False), ([(0, 0), (40, 12)], False), ([(40, 12), (None, 3)], True), ([], True)],
)
def test_a_page_withholds_where_a_count_of_the_thirds_is_missing(
    counts: list[tuple[int | None, int]], withheld: bool
) -> None:
    share = dict.fromkeys(("incidence", "lo", "hi"))
    points = [RiskPoint(day=1, at_risk=risk, events=events, **share) for risk, events in counts]
    groups = [RiskGroup(name="low", n=52, predicted=None, points=[point]) for point in points]
    assert protected_scores.has_withheld(RiskGroups(horizons=[1], groups=groups)) is withheld


# ---- the choice of a cohort


def test_the_rows_of_a_cohort_add_up() -> None:
    lefts = [400, 330, 300]
    steps = [
        SimpleNamespace(text=f"step {k}", reason=f"r{k}", left_out=before - left, left=left)
        for k, (before, left) in enumerate(itertools.pairwise(lefts))
    ]
    flow = SimpleNamespace(subjects=400, steps=steps, cases=57)
    built: Any = SimpleNamespace(
        cohort=flow, funnel=SimpleNamespace(subjects_out=280), prevalence={"before": {"flu": {}}}
    )
    rows = disclosure.flow_table(built, CountDisclosure())
    assert [row.left for row in rows] == [*lefts, 280, 57]
    assert [row.left_out for row in rows] == [None, 70, 30, 20, None]
    keys = frozenset({("left", "r0"), ("left out", "too few"), ("out", "all"), ("in",)})
    closed = disclosure.flow_table(built, CountDisclosure(withheld=keys, exact=False))
    assert [row.left for row in closed] == [None, None, 300, None, 57]


def test_nobody_at_risk_is_a_count_of_zero() -> None:
    point = RiskPoint(day=1, at_risk=0, events=25, incidence=None, lo=None, hi=None)
    system = disclosure.CountSystem()
    group = RiskGroup(name="low", n=40, predicted=None, points=[point])
    protected_scores._link_group(system, "d2", group, 0)
    expected = {("n", "d2"): 40, ("risk", "d2", "0"): 0, ("events", "d2", "0"): 25}
    expected |= {("gone", "d2", "0"): 15, ("left", "d2", "0"): 40}
    assert system.counts == expected


# ---- risks of new people


def count_values(shown: dict[str, Any], true: dict[str, int], sums: list[list[str]]) -> list[int]:
    """How many values each count of 1 to 10 can have, by an integer program, for a reader who knows
    which of those that are not shown are of 1 to 10; `sums`: a total and its parts.
    """
    names = list(true)
    place = {name: k for k, name in enumerate(names)}
    low, high = np.zeros(len(names)), np.full(len(names), 1e4)
    for k, (name, count) in enumerate(true.items()):
        if shown.get(name) is not None:
            low[k] = high[k] = shown[name]
        elif name in shown:
            low[k], high[k] = (1, 10) if count < 11 else (11, 1e4)
    rows = np.zeros((len(sums), len(names)))
    for row, (total, *parts) in zip(rows, sums, strict=True):
        row[place[total]] = -1
        row[[place[part] for part in parts]] = 1
    fixed = LinearConstraint(rows, 0, 0)
    values = []
    for k in (k for k, n in enumerate(true.values()) if 0 < n < 11):
        sides = np.eye(len(names))[k] * np.array([[1], [-1]])
        least, most = (
            milp(c, integrality=np.ones(len(c)), bounds=Bounds(low, high), constraints=fixed).x[k]
            for c in sides
        )
        values.append(round(most - least) + 1)
    return values


@pytest.mark.parametrize("seed", range(6))
def test_bands_of_risk_show_no_few_people_beside_the_people_and_the_other_labels(
    seed: int, tmp_path: Path
) -> None:
    draw, labels = np.random.default_rng(seed), ("flu", "chf", "gout")
    died = np.arange(400) < draw.integers(0, 9)
    state = np.where(died, "died", np.where(draw.random(400) < 0.1, "few", "as trained"))
    risks = {f"risk_{name}": draw.beta(1, 2 + 9 * k, 400) for k, name in enumerate(labels)}
    frame = pl.DataFrame({"status": state, "rows": 1, "unknown_rows": 0, **risks})
    frame = frame.with_columns(
        pl.when(pl.col("status") != "died").then(f"risk_{name}").alias(f"risk_{name}")
        for name in labels
    )
    unknown = pl.DataFrame(schema=dict.fromkeys(("code", "reason", "rows", "people"), pl.String))
    record: Any = SimpleNamespace(
        run="r", model="trees", data=[SimpleNamespace(class_names=labels)]
    )
    record.data[0].name = "north"
    made: Any = SimpleNamespace(frame=frame, unknown=unknown, exact=False)
    page = new_subjects_page(record, "calibrated", made)
    write_report(tmp_path / "out", page)

    true = {"all": 400, "living": int((~died).sum())}
    shown: dict[str, Any] = {"all": page.summary["people"]}
    people = pl.read_parquet(tmp_path / "out/people.parquet")
    cells = people["people"].cast(pl.String).cast(pl.Int64, strict=False)
    shown |= dict(zip(people["history"], cells, strict=True))
    true |= {name: int((state == name).sum()) for name in shown if name != "all"}
    sums = [["all", *people["history"]], ["living", *(set(people["history"]) - {"died"})]]
    for name in labels:
        bands = pl.read_parquet(tmp_path / f"out/risk-{name}.parquet")["value"].fill_nan(None)
        keys = [f"{name} {k}" for k in range(10)]
        shown |= dict(zip(keys, bands, strict=True))
        living = frame[f"risk_{name}"].drop_nulls().to_numpy()
        true |= dict(zip(keys, np.histogram(living, np.linspace(0, 1, 11))[0], strict=True))
        sums.append(["living", *keys])
    assert not any(0 < (n or 0) < 11 for n in shown.values())
    assert min(count_values(shown, true, sums), default=5) >= 5


def test_bands_of_risk_show_not_how_few_had_one_of_the_diseases() -> None:
    """Five had chf, who have no risk of it; 50 had gout, or both."""
    status = {"as trained": 300, "had": 50}
    bands = {"chf": {"low": 200, "high": 145}, "gout": {"low": 180, "high": 120}}
    hidden = _find_hidden(status, status, bands)
    true, shown, sums = {"all": 350, **status}, {"all": 350, **status}, [["all", *status]]
    shown |= dict.fromkeys(key[0] for key in hidden if len(key) == 1)
    for label, people in bands.items():
        keys = [f"{label} {band}" for band in people]
        true |= dict(zip(keys, people.values(), strict=True))
        shown |= {
            f"{label} {band}": None if (label, band) in hidden else n for band, n in people.items()
        }
        true[f"without {label}"] = 350 - sum(people.values())
        sums.append(["all", f"without {label}", *keys])
    assert min(count_values(shown, true, sums)) >= 5


@pytest.mark.parametrize("exact", [False, True])
def test_codes_that_nearly_all_have_tell_not_how_few_lack_them(exact: bool, tmp_path: Path) -> None:
    carriers = (400, 399, 390, 389, 200, 11, 10, 1)
    rows = [(f"ICD10//Z{n:03d}", "no PheCode", n + 3, n) for n in carriers]
    unknown = pl.DataFrame(rows, schema=["code", "reason", "rows", "people"], orient="row")
    frame = pl.DataFrame({"status": "as trained", "rows": 9, "risk_flu": np.linspace(0, 1, 400)})
    record: Any = SimpleNamespace(run="r", model="trees", data=[SimpleNamespace(name="north")])
    record.data[0].class_names = ("flu",)
    made: Any = SimpleNamespace(
        frame=frame.with_columns(unknown_rows=0), unknown=unknown, exact=exact
    )
    write_report(tmp_path / "out", new_subjects_page(record, "calibrated", made))
    table = pl.read_parquet(tmp_path / "out/unknown.parquet")
    shown = dict(zip(table["code"], table["people"].cast(pl.String), strict=True))
    known = {
        code: str(n) if exact or 400 - n == 0 or 400 - n > 10 else "withheld"
        for code, _, _, n in rows
        if exact or n > 10
    }
    assert shown == known
