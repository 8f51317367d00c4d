"""Time to event: incidence and metrics against scikit-survival, losses against closed forms, heads
that find the true risk under censoring.
"""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sksurv.metrics import brier_score, concordance_index_censored, cumulative_dynamic_auc
from sksurv.nonparametric import (
    CensoringDistributionEstimator,
    cumulative_incidence_competing_risks,
    kaplan_meier_estimator,
)
from sksurv.util import Surv
from test_event_inputs import GRID, OWN

from bitimely_core import evaluate, heads, models
from bitimely_core.analyses.calibration import calibration
from bitimely_core.analyses.embedding import embedding
from bitimely_core.analyses.probing import probing
from bitimely_core.errors import UserError
from bitimely_core.evaluate import survival_metrics
from bitimely_core.models import survival as hazards
from bitimely_core.types import Batch, name_horizon


def draw_times(seed, n=300, days=False, deaths=False):
    """time [n], event [n] and a risk [n] that is related to them; whole days have ties."""
    draw = np.random.default_rng(seed)
    score = draw.normal(size=n)
    event_time, censor_time = draw.exponential(400 * np.exp(-score)), draw.exponential(500, n)
    death_time = draw.exponential(900, n) if deaths else np.full(n, np.inf)
    time = np.minimum(np.minimum(event_time, censor_time), death_time)
    event = np.select([time == event_time, time == death_time], [1, 2], 0)
    risk = 1 / (1 + np.exp(-(score + draw.normal(size=n))))
    time, risk = (np.ceil(time / 20), np.round(risk, 2)) if days else (time, risk)
    # scikit-survival refuses a censoring at the very end
    return time, np.where(time == time.max(), 1, event), risk


@pytest.mark.parametrize("days", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_curves_weights_and_metrics_are_those_of_scikit_survival(seed, days):
    time, event, risk = draw_times(seed, days=days)
    outcome = Surv.from_arrays(event == 1, time)
    x, y = kaplan_meier_estimator(event == 1, time, reverse=True)
    assert survival_metrics.estimate_censoring(time, event).evaluate(x) == pytest.approx(
        y, abs=1e-12
    )
    free = CensoringDistributionEstimator().fit(outcome)
    assert survival_metrics.weigh_uncensored(time, event, np.inf) == pytest.approx(
        free.predict_ipcw(outcome), abs=1e-9
    )
    units = np.arange(len(time))
    found = survival_metrics.estimate_concordance(time, event, risk, units, len(time))
    assert found.value == pytest.approx(
        concordance_index_censored(event == 1, time, risk)[0], abs=1e-9
    )
    for horizon in np.quantile(time, [0.2, 0.5, 0.8]):
        auroc, brier = survival_metrics.estimate_horizon(
            time, event, risk, horizon, units, len(time)
        )
        assert auroc.value == pytest.approx(
            cumulative_dynamic_auc(outcome, outcome, risk, [horizon])[0][0], abs=1e-9
        )
        assert brier.value == pytest.approx(
            brier_score(outcome, outcome, (1 - risk)[:, None], [horizon])[1][0], abs=1e-9
        )


def test_incidence_under_competing_risks_is_that_of_scikit_survival():
    time, event, _ = draw_times(0, deaths=True, days=True)
    x, y, _ = cumulative_incidence_competing_risks(event, time, conf_type="log-log")
    swapped = np.where(event > 0, 3 - event, 0)  # death is the event
    curves = [survival_metrics.estimate_incidence(time, causes) for causes in (event, swapped)]
    for cause, curve in enumerate(curves, 1):
        assert curve.evaluate(x) == pytest.approx(y[cause], abs=1e-12)
    x, alive = kaplan_meier_estimator(event > 0, time)
    total = sum(curve.evaluate(x) for curve in curves)
    assert total == pytest.approx(1 - alive, abs=1e-12)


def weigh_pairs(time, event, risk, weights):
    """Harrell's C by its definition, pair by pair, of rows with weights."""
    top = bottom = 0.0
    for i in np.flatnonzero(event == 1):
        for j in np.flatnonzero((event == 2) | (time > time[i])):
            top += weights[i] * weights[j] * ((risk[i] > risk[j]) + 0.5 * (risk[i] == risk[j]))
            bottom += weights[i] * weights[j]
    return top / bottom


def test_influences_are_derivatives_and_death_leaves_a_subject_without_the_event():
    time, event, risk = draw_times(3, n=40, deaths=True)
    found = survival_metrics.estimate_concordance(time, event, risk, np.arange(40), 40)
    ones = np.ones(40)
    assert found.value == pytest.approx(weigh_pairs(time, event, risk, ones), abs=1e-12)
    assert abs(found.influence.sum()) < 1e-12
    for u in range(0, 40, 7):
        up, down = (
            weigh_pairs(time, event, risk, ones + sign * 1e-5 * (np.arange(40) == u))
            for sign in (1, -1)
        )
        assert found.influence[u] == pytest.approx((up - down) / 2e-5, abs=1e-8)


def test_scores_have_intervals_over_subjects_and_differences():
    names = ("chf@300d", "chf@600d")
    time, event, risk = draw_times(1, n=400, deaths=True)
    target = np.repeat(np.stack([time, event], 1)[:, None], 2, 1)
    target[:7] = np.nan
    prediction = np.stack([risk / 2, risk], 1)
    noise = np.random.default_rng(0).random((400, 2))
    found = evaluate.score(
        "survival",
        target,
        prediction,
        np.arange(400),
        class_names=names,
        baselines={"noise": noise},
        train_target=target,
    )
    assert found.main == "c_index"
    own = survival_metrics.estimate_concordance(
        time[7:], event[7:], risk[7:], np.arange(393), 393
    ).value
    assert found.metrics["c_index"].value == pytest.approx(own, abs=1e-12)
    assert all(
        found.metrics[name].lo < found.metrics[name].value < found.metrics[name].hi
        for name in found.metrics
    )
    assert found.baselines["noise"].metrics["c_index"].difference.lo > 0
    assert found.baselines["noise"].metrics["brier"].difference.hi < 0
    assert found.baselines["prior"].metrics["c_index"].value == 0.5
    at_300 = survival_metrics.estimate_horizon(
        time[7:], event[7:], risk[7:] / 2, 300, np.arange(393), 393
    )
    assert (
        found.by_class["chf@300d"].auroc.value,
        found.by_class["chf@300d"].brier.value,
    ) == pytest.approx([one.value for one in at_300])
    same = evaluate.score(
        "survival", target[::-1], prediction[::-1], np.arange(400)[::-1], class_names=names
    )
    assert same.metrics == found.metrics


def test_a_horizon_that_nobody_is_observed_to_has_no_score():
    """The weights leave out everybody who is censored, so that a constant would score 0;
    scikit-survival refuses such a horizon.
    """
    rng = np.random.default_rng(0)
    event = (rng.random(60) < 0.3).astype(float)
    time = rng.integers(10, 300, 60) + np.where(event, 0.0, 0.5)
    time[0], event[0] = 300.5, 0.0
    with pytest.raises(ValueError, match="must be within follow-up time"):
        brier_score(*[Surv.from_arrays(event == 1, time)] * 2, np.zeros((60, 1)), [365])
    target, names = np.repeat(np.stack([time, event], 1)[:, None], 2, 1), ("chf@200d", "chf@365d")
    both = evaluate.score("survival", target, np.ones((60, 2)), np.arange(60), class_names=names)
    for one in (both.by_class["chf@365d"].brier, both.by_class["chf@365d"].auroc):
        assert (one.value, one.undefined_reason) == (None, "nobody is observed past day 365")
    assert both.metrics["brier"].value == both.by_class["chf@200d"].brier.value > 0.5
    alone = evaluate.score(
        "survival", target[:, 1:], np.ones((60, 1)), np.arange(60), class_names=names[1:]
    )
    assert (
        alone.metrics["brier"].undefined_reason
        == alone.metrics["auroc"].undefined_reason
        == "nobody is observed past day 365"
    )
    event[time > 300] = 1.0  # the last one has the event: everybody's state is known or stood for
    found = survival_metrics.estimate_horizon(
        time, event, np.full(60, 0.5), 365, np.arange(60), 60
    )[1]
    assert found.value == pytest.approx(0.25)


def test_no_interval_of_a_brier_score_exceeds_one():
    time, event = np.arange(1.0, 11.0), np.r_[np.zeros(3), np.ones(7)]
    target = np.stack([time, event], 1)[:, None]
    found = evaluate.score(
        "survival",
        target,
        np.where(event, 0.02, 1.0)[:, None],
        np.arange(10),
        class_names=("chf@9d",),
    )
    assert found.metrics["brier"].lo < found.metrics["brier"].value < found.metrics["brier"].hi <= 1


# --- hazards ---------------------------------------------------------------------------------------------------------------------------------

EDGES = (0.0, 90.0, 250.0, 365.0)


def spell_out(kind, logits, time, event):
    """The negative log-likelihood of one row by its definition, interval by interval, in Python
    floats.
    """
    total = 0.0
    if time > EDGES[-1]:
        time, event = EDGES[-1], 0
    for j, (low, high) in enumerate(pairwise(EDGES)):
        lived = min(max((time - low) / (high - low), 0.0), 1.0)
        first, second = math.exp(logits[0][j]), math.exp(logits[1][j])
        here = event and low < time <= high
        if kind == "discrete":
            stay = 1 / (1 + first + second)
            total -= math.log((first, second)[event - 1] * stay) if here else lived * math.log(stay)
        else:
            total += (first + second) * lived * (high - low) / 365.25 - (
                logits[event - 1][j] if here else 0.0
            )
    return total


@pytest.mark.parametrize("kind", ["discrete", "piecewise-exponential"])
def test_losses_and_incidences_are_the_closed_forms(kind):
    draw = np.random.default_rng(0)
    grid = hazards.HazardGrid(kind, EDGES, (30.0, 300.0, 365.0))
    logits = torch.tensor(draw.normal(size=(60, 2, 2, 3)) - 1)
    time = torch.tensor(draw.choice([*EDGES[1:], 10.0, 100.5, 364.5, 365.5, 500.0], (60, 2)))
    event = torch.tensor(draw.integers(0, 3, (60, 2)).astype(float))
    found = hazards.measure_loss(logits, time, event, grid)
    for i in range(60):
        for k in range(2):
            assert float(found[i, k]) == pytest.approx(
                spell_out(kind, logits[i, k].tolist(), float(time[i, k]), int(event[i, k])),
                abs=1e-10,
            )
    incidence = hazards.compute_incidence(logits, grid)
    days = np.linspace(0, 365, 36501)
    for i in range(3):
        rates = logits[i, 0].exp().numpy()
        if kind == "discrete":
            rates = (
                -np.log1p(-rates.sum(0) / (1 + rates.sum(0)))
                * rates
                / rates.sum(0)
                / np.diff(EDGES)
            )
        else:
            rates = rates / 365.25
        place = np.searchsorted(EDGES, (days[1:] + days[:-1]) / 2) - 1
        whole = np.append(0, np.cumsum(rates.sum(0)[place] * 0.01))
        path = np.append(
            0, np.cumsum(rates[0][place] * np.exp(-(whole[1:] + whole[:-1]) / 2) * 0.01)
        )
        assert incidence[i, 0].numpy() == pytest.approx(
            np.interp(grid.horizons, days, path), abs=1e-6
        )


@pytest.mark.parametrize("kind", ["discrete", "piecewise-exponential"])
def test_heads_find_the_true_risk_and_censoring_does_not_bias_them(kind):
    """Constant rates of event and death that depend on one input; two thirds are censored, more of
    those with much to come later.
    """
    draw = np.random.default_rng(0)
    n, x = 20000, draw.uniform(-1, 1, 20000)
    rate, deadly = 1.2 / 365 * np.exp(x), 0.5 / 365 * np.exp(-0.5 * x)
    times = np.stack(
        [draw.exponential(1 / rate), draw.exponential(1 / deadly), draw.exponential(250, n)]
    )
    time, event = times.min(0), np.array([1, 2, 0])[times.argmin(0)]
    assert 0.3 < (event == 0).mean() < 0.6
    grid = hazards.HazardGrid(kind, hazards.make_edges(time, event, 365.0, 8), (365.0,))
    target = torch.tensor(np.stack([time, event], 1), dtype=torch.float32)[:, None]
    weight = torch.zeros(2, 2 * (len(grid.edges) - 1), requires_grad=True)
    start = hazards.find_null_logits(target[..., 0], target[..., 1], grid).float().flatten()
    inputs = torch.tensor(np.stack([x, np.ones(n)], 1), dtype=torch.float32)
    optimizer = torch.optim.LBFGS([weight], max_iter=60, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        logits = (inputs @ weight + start).reshape(n, 1, 2, -1)
        value = hazards.measure_loss(logits, target[..., 0], target[..., 1], grid).mean()
        value.backward()
        return value

    optimizer.step(loss)
    with torch.no_grad():
        risk = hazards.compute_incidence((inputs @ weight + start).reshape(n, 1, 2, -1), grid)[
            :, 0, 0
        ].numpy()
    true = rate / (rate + deadly) * (1 - np.exp(-(rate + deadly) * 365))
    slope, offset = np.polyfit(np.log(risk / (1 - risk)), np.log(true / (1 - true)), 1)
    assert slope == pytest.approx(1, abs=0.07)
    assert offset == pytest.approx(0, abs=0.05)
    assert risk.mean() == pytest.approx(true.mean(), abs=0.01)
    null = hazards.compute_incidence(start.reshape(1, 1, 2, -1), grid)
    assert float(null) == pytest.approx(
        float(survival_metrics.estimate_incidence(time, event).evaluate(365.0)), abs=0.01
    )


@pytest.mark.parametrize("name", [*OWN, *GRID])
def test_a_head_of_hazards_on_every_event_model_is_stored(tmp_path, name):
    torch.manual_seed(0)
    way = {"tokenizer": "codes"} if name in OWN else {"events": "grid", "horizon": 60}
    model = models.build(name, preset="tiny", codes=9, **way)
    head = heads.Head(
        model,
        task="survival",
        outputs=4,
        grid=hazards.HazardGrid("discrete", EDGES, (180.0, 365.0)),
    )
    codes = torch.randint(5, 9, (64, 6))
    time = torch.where((codes == 5).any(1), 50.0, 365.5)
    target = torch.stack([time, (time < 100).float()], 1)[:, None].repeat(1, 4, 1)
    target[:5, 2:] = torch.nan
    batch = Batch(
        codes, torch.arange(6.0).repeat(64, 1), torch.ones(64, 6, dtype=torch.bool), target
    )
    assert 0 < head.standardise(target) < 5
    first = heads.losses["survival"](head, batch)
    first["loss"].backward()
    assert all(torch.isfinite(one.grad).all() for one in head.linear.parameters())
    assert head.linear.weight.grad.any()
    head.eval().save(tmp_path)
    stored = heads.load(tmp_path)
    assert stored.grid == head.grid
    with torch.no_grad():
        risk = head.predict(batch)
        assert torch.equal(stored.predict(batch), risk)
    assert risk.shape == (64, 4)
    assert (risk[:, 0] <= risk[:, 1]).all()
    if name not in {"bitimelygpt", "gru-d"}:
        return
    optimizer = torch.optim.Adam(head.train().parameters(), 3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        loss = heads.losses["survival"](head, batch)
        loss["loss"].backward()
        optimizer.step()
    assert float(loss["rel"]) < 0.6 * float(first["rel"])


@pytest.mark.parametrize("days", [False, True])
def test_intervals_of_incidence_are_those_of_dinse_and_larson(days):
    time, event, _ = draw_times(5, n=80, days=days, deaths=True)
    event = np.where(time == time.max(), 0, event)  # scikit-survival divides by who is left
    x, y, bounds = cumulative_incidence_competing_risks(
        event, time, conf_type="log-log", var_type="Dinse_Approx"
    )
    compared = 0
    for day, value, low, high in zip(x, y[1], *bounds[1], strict=True):
        if 0 < value < 1:
            found = survival_metrics.find_incidence_interval(time, event, day)
            assert found == pytest.approx((value, low, high), abs=1e-9), day
            compared += 1
    assert compared > 15


def test_an_incidence_that_nobody_or_everybody_reaches_has_the_interval_of_a_share():
    from bitimely_core.evaluate.intervals import bound_share

    time, event = np.array([5.0, 7.0, 9.0, 9.0]), np.array([0, 2, 1, 0])
    value, *bounds = survival_metrics.find_incidence_interval(time, event, 8.0)
    # three are known on the day 8: the death and those who are seen later
    assert (value, *bounds) == (0.0, *bound_share(0.0, 3.0))
    value, *bounds = survival_metrics.find_incidence_interval(time, event, 1.0)
    assert (value, *bounds) == (0.0, *bound_share(0.0, 4.0))
    everybody = np.ones(4, np.int64)
    value, *bounds = survival_metrics.find_incidence_interval(time, everybody, 9.0)
    assert (value, *bounds) == (1.0, *bound_share(1.0, 4.0))
    assert survival_metrics.find_incidence_interval(np.zeros(0), np.zeros(0), 9.0)[0] == 0.0


def test_who_has_an_event_or_dies_on_a_day_is_not_at_risk_to_be_censored_on_it():
    time = np.array([1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 4.0])
    event = np.array([0, 1, 2, 0, 2, 0, 1])
    found = survival_metrics.estimate_censoring(time, event)
    at_risk = {1.0: 7, 2.0: 4, 3.0: 2, 4.0: 1}  # without events and deaths of the day
    expected = np.cumprod(
        [
            1 - censored / at_risk[day]
            for day, censored in zip((1.0, 2.0, 3.0), (1, 1, 1), strict=True)
        ]
    )
    assert found.evaluate(np.array([0.5, 1.0, 2.5, 3.0])) == pytest.approx([1.0, *expected])


def test_an_event_on_the_day_on_which_all_others_are_censored_has_no_weight():
    time, event = np.array([1.0, 5.0, 5.0, 5.0]), np.array([1, 1, 0, 0])
    weights = survival_metrics.weigh_uncensored(time, event, 6.0)
    assert weights.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_the_leverage_of_a_concordance_is_the_larger_share_in_events_and_in_people():
    time, event, risk = draw_times(2, n=30)
    units = np.arange(30) % 6
    found = survival_metrics.estimate_concordance(time, event, risk, units, 6).weights
    events = np.bincount(units, event == 1, 6) / (event == 1).sum()
    assert found.leverage == pytest.approx(np.maximum(events, 1 / 6))
    assert found.df == pytest.approx(found.leverage.sum() ** 2 / (found.leverage**2).sum() - 2)


def test_groups_are_thirds_and_tenths_of_the_risk_with_their_observed_incidence():
    time, event, risk = draw_times(1, n=200, deaths=True)
    names = [name_horizon("d", day) for day in (100, 400)]
    target = np.repeat(np.stack([time, event], 1)[:, None], 2, axis=1)
    target[0] = np.nan  # not known: in no group
    prediction = np.stack([risk / 2, risk], 1)
    (label, groups), *others = survival_metrics.describe_groups(
        target, prediction, names, 5
    ).items()
    assert (label, others) == ("d", [])
    assert groups.horizons == [100.0, 400.0]
    assert [group.name for group in groups.groups] == ["lowest", "middle", "highest"]
    assert [group.name for group in groups.deciles] == [str(k) for k in range(1, 11)]
    time, event, risk = time[1:], event[1:], risk[1:]
    for found, parts in ((groups.groups, 3), (groups.deciles, 10)):
        edges = np.quantile(risk, np.arange(parts + 1) / parts)
        for k, group in enumerate(found):
            rows = (risk > edges[k]) & (risk <= edges[k + 1])
            rows |= (k == 0) & (risk == edges[0])
            assert group.n == rows.sum()
            assert group.predicted == pytest.approx([(risk / 2)[rows].mean(), risk[rows].mean()])
            for point in group.points:
                assert point.at_risk == (time[rows] > point.day).sum()
                assert point.events == ((event[rows] == 1) & (time[rows] <= point.day)).sum()
                expected = survival_metrics.find_incidence_interval(
                    time[rows], event[rows], point.day
                )
                assert (point.incidence, point.lo, point.hi) == pytest.approx(expected)
    days = [point.day for point in groups.groups[0].points]
    assert days == [80.0, 100.0, 160.0, 240.0, 320.0, 400.0]
    assert [point.day for point in groups.deciles[0].points] == [100.0, 400.0]


def test_people_of_one_risk_are_one_group():
    target = np.array([[[4.0, 1.0]], [[5.0, 0.0]], [[6.0, 1.0]]])
    names = [name_horizon("d", 10)]
    same = survival_metrics.describe_groups(target, np.full((3, 1), 0.3), names, 2)["d"]
    assert [(group.name, group.n) for group in same.groups] == [("all", 3)]
    two = survival_metrics.describe_groups(target, np.array([[0.3], [0.3], [0.9]]), names, 2)["d"]
    assert [(group.name, group.n) for group in two.groups] == [("lower", 2), ("higher", 1)]


def score_by_weights(time, event, risk, horizon, weights):
    """AUROC and Brier score at a horizon by their definitions, of rows with weights beside those
    against censoring, which are held.
    """
    inverse = survival_metrics.weigh_uncensored(time, event, horizon)
    case = (event == 1) & (time <= horizon)
    brier = np.average(inverse * (case - risk) ** 2, weights=weights)
    w, v = inverse * weights * case, inverse * weights * ~case
    wins = (risk[:, None] > risk) + 0.5 * (risk[:, None] == risk)
    return w @ wins @ v / (w.sum() * v.sum()), brier


def test_influences_at_a_horizon_are_derivatives():
    time, event, risk = draw_times(4, n=50, deaths=True)
    risk = np.round(risk, 1)  # with ties
    units = np.arange(50)
    for horizon in (100.0, 300.0):
        found = survival_metrics.estimate_horizon(time, event, risk, horizon, units, 50)
        exact = score_by_weights(time, event, risk, horizon, np.ones(50))
        assert [estimate.value for estimate in found] == pytest.approx(exact, abs=1e-12)
        for u in range(50):
            up, down = (
                score_by_weights(time, event, risk, horizon, 1 + sign * 1e-6 * (units == u))
                for sign in (1, -1)
            )
            for estimate, high, low in zip(found, up, down, strict=True):
                assert estimate.influence[u] == pytest.approx((high - low) / 2e-6, abs=1e-6)


def test_means_over_columns_take_c_at_the_longest_horizon_alone():
    time, event, risk = draw_times(6, n=60)
    names = [name_horizon("a", 100), name_horizon("a", 300), name_horizon("b", 200)]
    target = np.repeat(np.stack([time, event], 1)[:, None], 3, axis=1)
    prediction = np.stack([np.sqrt(risk), risk, 1 - risk], 1)
    target[:10, 2] = np.nan
    found = evaluate.score("survival", target, prediction, np.arange(60), class_names=names)
    c = [
        concordance_index_censored(event[rows] == 1, time[rows], score[rows])[0]
        for rows, score in ((slice(60), risk), (slice(10, 60), 1 - risk))
    ]
    assert found.metrics["c_index"].value == pytest.approx(np.mean(c), abs=1e-9)


@pytest.mark.parametrize("analysis", [calibration, embedding, probing])
def test_analyses_of_classes_and_labels_refuse_times_to_event(analysis):
    run = SimpleNamespace(windows=lambda: SimpleNamespace(task="survival", name="times"))
    with pytest.raises(UserError, match="times has times to event") as refused:
        analysis([run])
    assert "--time-to-event" in str(refused.value)
