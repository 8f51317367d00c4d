"""Times to event from the cache to a page: labels against a reading subject by subject, finetune
and evaluate, baselines, what is withheld.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
from scipy.sparse import csr_matrix
from sksurv.linear_model import CoxPHSurvivalAnalysis
from sksurv.nonparametric import cumulative_incidence_competing_risks
from sksurv.util import Surv

from bitimely_cli.main import main
from bitimely_core import tokens
from bitimely_core.claims import protected_scores
from bitimely_core.claims.event_labels import Landmark
from bitimely_core.claims.event_times import add_event_times, add_record_times, parse_horizons
from bitimely_core.evaluate import survival_metrics
from bitimely_core.methods import counts as method
from bitimely_core.methods import hazards
from bitimely_core.methods.method_contract import FittedMethod
from bitimely_core.report import score_blocks
from bitimely_core.schemas.scores import RiskGroup, RiskGroups, RiskPoint


def read_one(landmark, row, data_end):
    """Time and event of one subject by the definition, day by day."""
    if row["y_chf"] is None or row["index_day"] is None:
        return None
    low = row["index_day"] + landmark.gap_days
    last = min(
        low + landmark.horizon_days, row["obs_end"] if row["obs_end"] is not None else data_end
    )
    if any(row[name] is not None and row[name] <= low for name in ("onset_chf", "death_day")):
        return None
    for day in range(low + 1, last + 1):
        if row["onset_chf"] == day:
            return day - low, 1
        if row["death_day"] == day:
            return day - low, 2
    if last <= low:
        return None
    return last - low + 0.5, 0


@pytest.mark.parametrize("seed", range(4))
def test_times_are_those_of_a_reading_day_by_day(seed):
    draw = np.random.default_rng(seed)
    landmark = Landmark(landmark_days=100, gap_days=int(draw.integers(0, 20)), horizon_days=60)

    def days(low, high, missing):
        return [
            None if draw.random() < missing else int(draw.integers(low, high)) for _ in range(400)
        ]

    frame = pl.DataFrame(
        {
            "index_day": days(90, 110, 0.1),
            "obs_end": days(60, 260, 0.3),
            "onset_chf": days(60, 260, 0.4),
            "death_day": days(60, 260, 0.6),
            "y_chf": [None if draw.random() < 0.1 else int(draw.integers(2)) for _ in range(400)],
        },
        schema_overrides=dict.fromkeys(("obs_end", "onset_chf", "death_day"), pl.Int32),
    )
    found = add_event_times(frame, frame, ["chf"], landmark, 200)
    seen = set()
    for row in found.iter_rows(named=True):
        wanted = read_one(landmark, row, 200)
        assert (row["time_chf"], row["event_chf"]) == (wanted or (None, None)), row
        seen.add(row["event_chf"])
    assert seen == {None, 0, 1, 2}


@pytest.mark.parametrize("wrong", ["", "365,365", "a", "0", [1, -2]])
def test_horizons_are_different_days(wrong):
    with pytest.raises(ValueError, match="different numbers of days"):
        parse_horizons(wrong)
    assert parse_horizons("730,365") == (365, 730)


@pytest.mark.slow
def test_hazards_of_a_logistic_regression_find_the_true_risk():
    """Two features with known rates of event and death, and heavy censoring; the third is noise."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(9000, 3))
    rate, deadly = np.exp(x[:, 0] - 6), np.exp(0.5 * x[:, 1] - 7)
    times = np.stack(
        [draw.exponential(1 / rate), draw.exponential(1 / deadly), draw.exponential(300, 9000)]
    )
    time, event = times.min(0), np.array([1, 2, 0])[times.argmin(0)]
    target = np.repeat(np.stack([time, event], 1)[:, None], 2, 1)
    target[::50] = np.nan
    rows = {"train": slice(0, 5000), "validation": slice(5000, 7000), "test": slice(7000, 9000)}
    parts = {name: x[at] for name, at in rows.items()}
    y = {name: target[rows[name]] for name in ("train", "validation")}
    fitted = hazards.fit_logistic(parts, y, ["chf@100d", "chf@365d"], (1.0, 100.0))
    stored = hazards.unpack_hazards(hazards.pack_hazards(fitted))
    found = hazards.predict_logistic(stored, parts["test"])
    for k, day in enumerate((100, 365)):
        true = (rate / (rate + deadly) * (1 - np.exp(-(rate + deadly) * day)))[7000:]
        assert found[:, k].mean() == pytest.approx(true.mean(), abs=0.015)
        slope, _ = np.polyfit(np.log(found[:, k] / (1 - found[:, k])), np.log(true / (1 - true)), 1)
        assert slope == pytest.approx(1, abs=0.12)
        assert np.corrcoef(found[:, k], true)[0, 1] > 0.98


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A cohort of made-up claims with a fine-tuned and evaluated run on times to event."""
    home = str(tmp_path_factory.mktemp("home"))
    build = (
        "--landmark 365,30,730 --time-to-event 365,730 --no-select --min-codes 3 --max-events 32"
    )
    for line in (
        "ingest synthetic-claims --subjects 1200",
        f"tokenize synthetic-claims {build} --no-small-counts --leakage drop-phecode --name times",
        "pretrain --preset tiny --data times --steps 3 --batch-size 16 --run base",
        "finetune base --data times --fraction 1 --steps 40 --batch-size 32 --lr 1e-3 --run risk",
        "evaluate risk",
    ):
        assert main([*line.split(), "-w", home]) in (0, 3), line
    return SimpleNamespace(path=Path(home))


@pytest.mark.slow
def test_from_claims_to_scores_of_times_to_event(home):
    rows = tokens.open_tokens(home.path / "tokens" / "times")
    assert rows.task == "survival"
    target = rows.targets(None)
    assert target.shape == (len(rows), rows.classes, 2)
    scores = json.loads((home.path / "runs" / "risk" / "scores.json").read_bytes())
    assert scores["main"] == "c_index"
    assert set(scores["metrics"]) == {"c_index", "auroc", "brier"}
    assert {"prior", "length_only", "single_code", "hazard_counts", "hazard_trees"} <= set(
        scores["baselines"]
    )
    assert (
        scores["baselines"]["hazard_counts"]["settings"]
        == scores["baselines"]["hazard_trees"]["settings"]
        == 4
    )
    best = max(
        (one["c_index"]["value"], name)
        for name, one in scores["baselines"].items()
        if one.get("c_index")
    )
    assert scores["lift"]["baseline"] == best[1]
    assert scores["lift"]["difference"] == pytest.approx(
        scores["metrics"]["c_index"]["value"] - best[0], abs=1e-9
    )
    frame = pl.read_parquet(home.path / "runs" / "risk" / "predictions.parquet")
    for name, one in scores["by_class"].items():
        time, event, risk = (frame[f"{what}_{name}"].to_numpy() for what in ("time", "event", "p"))
        kept = np.isfinite(time)
        assert set(np.unique(event[kept])) <= {0, 1, 2}
        found = survival_metrics.estimate_concordance(
            time[kept], event[kept], risk[kept], np.arange(kept.sum()), int(kept.sum())
        ).value
        assert one["c_index"]["value"] == (
            None if np.isnan(found) else pytest.approx(found, abs=1e-12)
        )
    assert any(one["c_index"]["value"] is not None for one in scores["by_class"].values())


@pytest.mark.slow
def test_the_page_has_curves_numbers_at_risk_and_calibration(home):
    page = (home.path / "runs" / "risk" / "report.html").read_text()
    assert "numbers at risk" in page
    assert "calibration" in page
    scores = json.loads((home.path / "runs" / "risk" / "scores.json").read_bytes())
    frame = pl.read_parquet(home.path / "runs" / "risk" / "predictions.parquet")
    for label, found in scores["risk_groups"].items():
        time, event = (frame[f"{what}_{label}@730d"].to_numpy() for what in ("time", "event"))
        kept = np.isfinite(time)
        assert sum(group["n"] for group in found["groups"]) == kept.sum()
        for day in found["horizons"]:
            points = [
                next(one for one in group["points"] if one["day"] == day)
                for group in found["groups"]
            ]
            assert sum(one["events"] for one in points) == ((event == 1) & (time <= day)).sum()
            assert sum(one["at_risk"] for one in points) == (time[kept] > day).sum()
    shared = home.path / "runs" / "risk" / "scores_shared.json"
    for found in json.loads(shared.read_bytes())["risk_groups"].values():
        for group in [*found["groups"], *found["deciles"]]:
            shown = [
                group["n"],
                *(one["at_risk"] for one in group["points"]),
                *(one["events"] for one in group["points"]),
            ]
            assert all(n is None or n == 0 or n > 10 for n in shown)
            events = [0, *(one["events"] for one in group["points"])]
            assert all(
                a is None or b is None or b - a == 0 or b - a > 10 for a, b in pairwise(events)
            )
            assert all(one["incidence"] is None for one in group["points"] if one["events"] is None)


def test_groups_of_risk_have_the_observed_incidence():
    draw = np.random.default_rng(0)
    risk = draw.uniform(0.05, 0.6, 3000)
    time = np.where(draw.random(3000) < risk, draw.integers(1, 366, 3000), 365.5)
    event = (time < 365.5).astype(float)
    target = np.stack([time, event], 1)[:, None]
    found = survival_metrics.describe_groups(target, risk[:, None], ["chf@365d"], 4)["chf"]
    assert [group.name for group in found.groups] == ["lowest", "middle", "highest"]
    for group, low, high in zip(found.groups, (0, 1, 2), (1, 2, 3), strict=True):
        own = (risk > np.quantile(risk, low / 3)) & (risk <= np.quantile(risk, high / 3))
        last = group.points[-1]
        assert last.incidence == pytest.approx(event[own].mean(), abs=0.002)
        assert group.predicted[0] == pytest.approx(risk[own].mean(), abs=1e-3)
        assert last.incidence == pytest.approx(group.predicted[0], abs=0.04)
        assert last.hi - last.lo == pytest.approx(
            2 * 1.96 * np.sqrt(last.incidence * (1 - last.incidence) / 1000), rel=0.05
        )


def draw_times(n, seed=0):
    """Times with an event rate of exp(x - 6), deaths and censoring; x is the first of three
    features.
    """
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(n, 3))
    rate, deadly = np.exp(x[:, 0] - 6), np.exp(0.5 * x[:, 1] - 7)
    times = np.stack(
        [draw.exponential(1 / rate), draw.exponential(1 / deadly), draw.exponential(300, n)]
    )
    return x, rate, deadly, times.min(0), np.array([1, 2, 0])[times.argmin(0)]


def test_tenths_of_risk_have_the_incidence_of_scikit_survival():
    _, rate, deadly, time, event = draw_times(3000)
    time = np.ceil(time)
    risk = np.stack(
        [rate / (rate + deadly) * (1 - np.exp(-(rate + deadly) * day)) for day in (100, 365)], 1
    )
    target = np.repeat(np.stack([time, event], 1)[:, None], 2, 1)
    found = survival_metrics.describe_groups(target, risk, ["chf@100d", "chf@365d"], 4)["chf"]
    assert [group.n for group in found.deciles] == [300] * 10
    order = np.argsort(risk[:, 1])
    for k, group in enumerate(found.deciles):
        own = order[300 * k : 300 * (k + 1)]
        at, incidence = cumulative_incidence_competing_risks(event[own], time[own])
        for h, day in enumerate((100, 365)):
            expected = incidence[1][np.searchsorted(at, day, "right") - 1]
            assert group.points[h].incidence == pytest.approx(expected, abs=1e-9)
            assert group.predicted[h] == pytest.approx(risk[own, h].mean(), abs=1e-12)
            assert group.points[h].lo <= expected <= group.points[h].hi
    (figure,) = score_blocks._calibration_figures("chf", found)
    for h, line in enumerate(figure.data.series[:2]):
        np.testing.assert_allclose(line.x, [100 * group.predicted[h] for group in found.deciles])
        np.testing.assert_allclose(
            line.y, [100 * group.points[h].incidence for group in found.deciles]
        )
    assert figure.data.series[2].reference


def test_counts_between_thirds_and_tenths_are_withheld():
    _, rate, deadly, time, event = draw_times(1500, 3)
    risk = (rate / (rate + deadly))[:, None]
    found = survival_metrics.describe_groups(
        np.stack([np.ceil(time), event], 1)[:, None], risk, ["chf@365d"], 4
    )["chf"]
    shown = protected_scores.protect_groups(found, 1500)
    for key in ("events", "at_risk"):
        tenths, thirds = (
            [getattr(group.points[-1], key) for group in of] for of in (shown.deciles, shown.groups)
        )
        assert all(n is None or n == 0 or n > 10 for n in [*tenths, *thirds])
        assert any(n is not None for n in thirds)
        inner = [tenths[:3], tenths[4:6], tenths[7:]]  # the tenths inside each third
        for total, parts in zip(thirds, inner, strict=True):
            if total is not None and None not in parts:
                assert not 0 < total - sum(parts) < 11
    assert shown.deciles != found.deciles


@pytest.mark.slow
def test_trees_of_hazards_find_the_true_risk():
    x, rate, deadly, time, event = draw_times(6000)
    target = np.stack([time, event], 1)[:, None]
    rows = {"train": slice(0, 4000), "validation": slice(4000, 5000), "test": slice(5000, 6000)}
    parts = {name: x[at] for name, at in rows.items()}
    y = {name: target[rows[name]] for name in ("train", "validation")}
    fitted = hazards.fit_trees(parts, y, ["chf@365d"], 3)
    stored = hazards.unpack_hazards(hazards.pack_hazards(fitted))
    found = hazards.predict_trees(stored, parts["test"])[:, 0]
    true = (rate / (rate + deadly) * (1 - np.exp(-(rate + deadly) * 365)))[5000:]
    assert found.mean() == pytest.approx(true.mean(), abs=0.03)
    assert np.corrcoef(found, true)[0, 1] > 0.93


def test_the_single_code_is_the_one_that_drives_the_hazard(monkeypatch):
    draw = np.random.default_rng(1)
    counts = draw.poisson(0.7, (3000, 9)).astype(float)
    counts[:, 8] = draw.poisson(20, 3000)  # frequent, without effect
    time, censored = draw.exponential(np.exp(6 - 0.6 * counts[:, 4])), draw.exponential(600, 3000)
    event, time = (time < censored).astype(float), np.minimum(time, censored)
    assert hazards.select_code(csr_matrix(counts), np.stack([time, event]), 365.0) == 4
    target = np.stack([time, event], 1)[:, None]
    names = ("chf@365d",)
    monkeypatch.setattr(method, "count_ever", lambda rows: csr_matrix(rows))
    arrays = method.fit_codes_to_events(counts[:2000], target[:2000], names)
    config = method.CountsConfig(name="counts", form="single-code")
    fitted = FittedMethod(config, "survival", names, arrays)
    found = method.score(fitted, counts[2000:])[:, 0]
    alone = CoxPHSurvivalAnalysis().fit(
        counts[:2000, 4:5], Surv.from_arrays(event[:2000] == 1, time[:2000])
    )
    expected = np.array(
        [1 - curve(365) for curve in alone.predict_survival_function(counts[2000:, 4:5])]
    )
    np.testing.assert_allclose(found, expected, atol=0.04)
    assert len(np.unique(found.round(9))) == len(np.unique(counts[2000:, 4])), (
        "one code alone decides"
    )


@pytest.mark.parametrize("seed", range(8))
def test_where_all_events_are_on_one_day_the_single_code_has_the_largest_correlation(
    seed: int,
) -> None:
    """With one interval the score statistic is n r^2, whose sign does not matter."""
    draw = np.random.default_rng(seed)
    counts = draw.poisson(0.7, (60, 20)).astype(float)
    event = (draw.random(60) < 0.3).astype(float)
    pairs = np.stack([np.where(event, 100.0, 400.0), event])
    correlations = [np.corrcoef(column, event)[0, 1] for column in counts.T]
    expected = int(np.argmax(np.abs(correlations)))
    assert hazards.select_code(csr_matrix(counts), pairs, 365.0) == expected


def test_no_interval_of_an_incidence_has_width_zero():
    time = np.full(8, 365.5)
    value, lo, hi = survival_metrics.find_incidence_interval(time, np.zeros(8), 365)
    assert (value, lo) == (0, 0)
    assert hi == pytest.approx(1 - 0.025 ** (1 / 8))  # Clopper and Pearson


def test_small_counts_and_their_increments_are_withheld():
    points = [
        RiskPoint(day=d, at_risk=n, events=e, incidence=0.1, lo=0.0, hi=0.2)
        for d, n, e in ((100, 400, 50), (200, 300, 55))
    ]
    group = RiskGroup(name="lowest", n=500, predicted=[0.1], points=points)
    enough = RiskGroups(horizons=[200], groups=[group])
    one = protected_scores.protect_groups(enough, 900).groups[0]
    assert not protected_scores.has_few_events(enough)
    assert None in {one.points[0].events, one.points[1].events}  # 5 between them
    few = [points[0].model_copy(update={"events": 7}), points[1].model_copy(update={"events": 9})]
    rare = RiskGroups(horizons=[200], groups=[group.model_copy(update={"points": few})])
    found = protected_scores.protect_groups(rare, 900)
    assert protected_scores.has_few_events(rare)
    assert all(point.events is None and point.incidence is None for point in found.groups[0].points)


def test_times_of_a_cohort_are_those_of_its_record():
    record = pl.DataFrame(
        {
            "risk_start": [11, 11, 11, 11, 11],
            "risk_end": [100, 100, 60, 100, 100],
            "outcome_day": [11, None, None, 100, 40],
            "death_day": [None, 50, None, None, None],
            "left_out": [None, None, None, None, "age"],
        }
    )
    found = add_record_times(pl.DataFrame({"subject_id": range(5)}), record, "chf")
    assert found["time_chf"].to_list() == [1, 40, 50.5, 90, None]
    assert found["event_chf"].to_list() == [1, 2, 0, 1, None]
