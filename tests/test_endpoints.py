"""Endpoints of nights and events against their definitions, written out epoch by epoch, window by
window.
"""

from __future__ import annotations

import itertools

import numpy as np
import polars as pl
import pytest
from sklearn.metrics import cohen_kappa_score

from bitimely_core.evaluate import endpoints

STAGES = ["W", "N1", "N2", "N3", "REM"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (STAGES, True),
        (["wake", "n2"], True),
        (["W", "S1", "S2", "S3", "S4", "R"], True),
        (["W"], False),
        (["W", "WAKE"], False),
        (["N1", "N2", "REM"], False),
        (["W", "N1", "movement"], False),
        (["healthy", "ill"], False),
        ([], False),
    ],
)
def test_sleep_stages_are_wake_and_some_sleep_and_nothing_else(names, expected):
    assert endpoints.is_staging(names) is expected


def test_epochs_stand_at_their_times_from_the_first_window_or_from_an_origin():
    starts, stages = [90.0, 30.0, 61.0], [2, 0, 1]
    assert endpoints.place_epochs(starts, stages, 30.0).tolist() == [0, 1, 2]
    from_zero = endpoints.place_epochs(starts, stages, 30.0, origin=0.0)
    assert from_zero.tolist() == [-1, 0, 1, 2]
    assert endpoints.place_epochs([], [], 30.0).tolist() == []


def test_what_an_empty_night_cannot_define_says_so():
    found = endpoints.compute_endpoints(np.zeros(0, np.int64), STAGES, 30.0)
    assert found["time_in_bed"].value == found["total_sleep_time"].value == 0.0
    assert found["sleep_efficiency"].value is None
    assert found["sleep_efficiency"].undefined_reason == "no epochs"
    assert found["latency_N3"].undefined_reason == "no epoch of N3"


def test_only_stages_that_the_classes_have_are_counted():
    hypnogram = np.array([0, 1, -1, 1, 2, 0])
    found = endpoints.compute_endpoints(hypnogram, ["W", "N2", "REM"], 60.0)
    assert "minutes_N1" not in found
    assert "latency_N1" not in found
    assert "percent_W" not in found
    values = {name: endpoint.value for name, endpoint in found.items()}
    assert values["minutes_W"] == 2.0
    assert values["minutes_N2"] == 2.0
    assert values["percent_N2"] == pytest.approx(200 / 3)
    assert values["minutes_not_scored"] == 1.0
    assert values["rem_latency_from_onset"] == 3.0
    assert values["latency_REM"] == 4.0
    assert values["wake_after_sleep_onset"] == 0.0, "wake after the last sleep is none"
    assert found["percent_N2"].unit == "%"
    assert found["minutes_N2"].unit == "min"


def test_kappa_is_that_of_scikit_learn_and_undefined_where_chance_agrees_always():
    rng = np.random.default_rng(0)
    for _ in range(20):
        first, second = rng.integers(0, 5, (2, 40))
        value = endpoints.compute_kappa(first, second, 5)
        assert value == pytest.approx(cohen_kappa_score(first, second), abs=1e-12)
    assert np.isnan(endpoints.compute_kappa(np.zeros(4, int), np.zeros(4, int), 5))


def make_nights(seed: int = 0, nights: int = 9, subjects: int = 4, epochs: int = 60):
    """Windows of several nights a subject in a shuffled order, with two hypnograms."""
    rng = np.random.default_rng(seed)
    rows = [
        (f"r{night}", f"s{night % subjects}", 30.0 * (k + 7))
        for night in range(nights)
        for k in range(epochs)
    ]
    order = rng.permutation(len(rows))
    index = pl.DataFrame(rows, ["recording_id", "subject_id", "start"], orient="row")[order]
    target = rng.integers(0, 5, len(rows))
    prediction = np.where(rng.random(len(rows)) < 0.6, target, rng.integers(0, 5, len(rows)))
    return index, target, prediction


def test_nights_are_measured_recording_by_recording_in_order_of_time():
    index, target, prediction = make_nights()
    found = endpoints.measure_nights(index, target, prediction, STAGES, 30.0)
    names = index["recording_id"].to_numpy()
    for i, name in enumerate(dict.fromkeys(names.tolist())):
        rows = sorted(np.flatnonzero(names == name), key=lambda row: index["start"][int(row)])
        assert found.units[i] == int(index["subject_id"][int(rows[0])].removeprefix("s"))
        assert found.kappa[i] == pytest.approx(cohen_kappa_score(target[rows], prediction[rows]))
        assert found.scored[i] == endpoints.compute_endpoints(target[rows], STAGES, 30.0)
        assert found.predicted[i] == endpoints.compute_endpoints(prediction[rows], STAGES, 30.0)


def test_agreement_of_nights_is_that_of_bland_and_altman():
    index, target, prediction = make_nights()
    nights = endpoints.measure_nights(index, target, prediction, STAGES, 30.0)
    found = endpoints.summarize_nights(nights, bootstrap=200)
    assert (found.nights, found.subjects) == (9, 4)
    assert found.kappa_range == (nights.kappa.min(), nights.kappa.max())
    agreement = found.endpoints["minutes_N2"]
    pairs = np.array(
        [
            (a["minutes_N2"].value, b["minutes_N2"].value)
            for a, b in zip(nights.scored, nights.predicted, strict=True)
        ]
    )
    assert np.array_equal(endpoints.pair_endpoint(nights, "minutes_N2"), pairs)
    assert (agreement.scored, agreement.predicted) == pytest.approx(tuple(pairs.mean(0)))
    assert agreement.bias.value == pytest.approx((pairs[:, 1] - pairs[:, 0]).mean())
    assert (agreement.nights, agreement.unit) == (9, "min")
    expected = agree_by_hand(pairs[:, 1] - pairs[:, 0], nights.units)
    assert (agreement.lower_limit.value, agreement.upper_limit.value) == pytest.approx(expected[:2])


def test_one_night_has_its_difference_and_no_limits() -> None:
    index, target, prediction = make_nights(nights=1, subjects=1)
    nights = endpoints.measure_nights(index, target, prediction, STAGES, 30.0)
    found = endpoints.summarize_nights(nights, bootstrap=0).endpoints["minutes_N2"]
    number = STAGES.index("N2")
    minutes = [(stages == number).sum() / 2 for stages in (target, prediction)]
    assert (found.unit, found.nights) == ("min", 1)
    assert found.bias.value == pytest.approx(minutes[1] - minutes[0])
    assert found.upper_limit.value is None


def agree_by_hand(difference, units):
    """Limits by the components of a one-way analysis of variance, and the standard error of each
    with the subject as unit: sd sqrt(1 / U + 1.96^2 / (2 (U - 1))).
    """
    groups = [difference[units == unit] for unit in np.unique(units)]
    sizes = np.array(list(map(len, groups)))
    subjects, nights = len(groups), len(difference)
    if subjects == nights:
        sd = np.std(difference, ddof=1)
    else:
        mean = difference.mean()
        within = sum(((group - group.mean()) ** 2).sum() for group in groups) / (nights - subjects)
        between = sum(len(group) * (group.mean() - mean) ** 2 for group in groups) / (subjects - 1)
        size = (nights - (sizes**2).sum() / nights) / (subjects - 1)
        sd = np.sqrt(within + max(0.0, (between - within) / size))
    se = sd * np.sqrt(1 / subjects + 1.96**2 / (2 * (subjects - 1)))
    return difference.mean() - 1.96 * sd, difference.mean() + 1.96 * sd, se


@pytest.mark.parametrize("spread", [0.0, 4.0])
@pytest.mark.parametrize("sizes", [(1,) * 8, (2, 1, 3, 2, 2, 1, 4), (2,) * 6])
def test_limits_have_the_components_and_the_interval_of_their_definition(sizes, spread):
    from scipy import stats

    rng = np.random.default_rng(len(sizes))
    units = np.repeat(np.arange(len(sizes)), sizes)
    difference = spread * rng.standard_normal(len(sizes))[units] + rng.standard_normal(len(units))
    low, high, se = agree_by_hand(difference, units)
    for value, limit in zip(
        (low, high), endpoints.limits_of_agreement(difference, units), strict=True
    ):
        assert limit.value == pytest.approx(value)
        assert limit.se == pytest.approx(se)
        reach = stats.t.ppf(0.975, len(sizes) - 1) * se
        assert (limit.lo, limit.hi) == pytest.approx((value - reach, value + reach))
        assert limit.n_defined == len(sizes)


def test_limits_of_few_nights_and_of_few_subjects_say_what_is_missing():
    for limit in endpoints.limits_of_agreement(np.array([3.0]), np.array([0])):
        assert limit.value is None
        assert "one night" in (limit.undefined_reason or "")
    two_nights = endpoints.limits_of_agreement(np.array([3.0, 5.0]), np.array([0, 0]))
    assert [limit.value for limit in two_nights] == pytest.approx(
        [4 - 1.96 * np.sqrt(2), 4 + 1.96 * np.sqrt(2)]
    )
    assert two_nights[0].lo is None
    assert "1 subjects" in (two_nights[0].undefined_reason or "")
    (five, _), (four, _) = (
        endpoints.limits_of_agreement(np.arange(float(n)), np.arange(n)) for n in (5, 4)
    )
    assert five.lo is not None
    assert four.lo is None
    many = endpoints.limits_of_agreement(np.arange(8.0), np.arange(8), bootstrap=0)
    assert many[1].lo is None
    assert many[1].undefined_reason == "no CI: none was requested"


def test_an_endpoint_that_no_night_defines_keeps_its_reason():
    index, target, prediction = make_nights(nights=6, subjects=6)
    nights = endpoints.measure_nights(index, np.zeros_like(target), prediction, STAGES, 30.0)
    found = endpoints.summarize_nights(nights, bootstrap=0).endpoints["latency_REM"]
    assert (found.nights, found.bias.value) == (0, None)
    assert found.bias.undefined_reason == "no epoch of REM"
    assert found.upper_limit.undefined_reason == "no epoch of REM"


def list_runs(rows, positive, starts, step):
    """Runs of positive windows that follow each other without a gap, one window after the other."""
    spans: list[list[float]] = []
    for row in rows:
        if positive[row]:
            if spans and abs(starts[row] - spans[-1][1]) < step / 4:
                spans[-1][1] = starts[row] + step
            else:
                spans.append([starts[row], starts[row] + step])
    return [tuple(span) for span in spans]


def test_events_end_where_windows_are_missing():
    rows, step = np.arange(6), 5.0
    starts = np.array([0.0, 5.0, 15.0, 20.0, 25.0, 40.0])
    positive = np.array([True, True, True, False, True, True])
    found = endpoints.find_events(rows, positive, starts, step)
    assert found == [(0.0, 10.0), (15.0, 20.0), (25.0, 30.0), (40.0, 45.0)]
    assert found == list_runs(rows, positive, starts, step)


@pytest.mark.parametrize("seed", range(5))
def test_events_and_false_alarms_are_counted_as_by_hand(seed):
    rng = np.random.default_rng(seed)
    step, rows = 4.0, []
    for recording in range(12):
        clock = np.flatnonzero(rng.random(60) < 0.9) * step
        rows += [(f"r{recording}", f"s{recording % 7}", start) for start in clock]
    index = pl.DataFrame(rows, ["recording_id", "subject_id", "start"], orient="row")
    index = index[rng.permutation(len(rows))]
    target, prediction = (rng.random((2, len(rows))) < 0.3).astype(int)
    starts = index["start"].to_numpy()
    hits, alarms = [], 0
    for name in index["recording_id"].unique(maintain_order=True):
        own = np.flatnonzero(index["recording_id"].to_numpy() == name)
        own = own[np.argsort(starts[own])]
        true = list_runs(own, target == 1, starts, step)
        predicted = list_runs(own, prediction == 1, starts, step)
        meets = [[a < d and c < b for c, d in predicted] for a, b in true]
        hits += [any(row) for row in meets]
        alarms += sum(not any(column) for column in zip(*meets, strict=True))
    found = endpoints.score_events(index, target, prediction, step)
    assert (found.events, found.false_alarms) == (len(hits), alarms)
    assert found.hours == pytest.approx(len(rows) * step / 3600)
    assert found.sensitivity.value == pytest.approx(np.mean(hits))
    rate = found.false_alarms_per_hour
    assert rate.value == pytest.approx(alarms / found.hours)
    assert rate.lo is not None
    assert rate.hi is not None
    assert 0.0 <= rate.lo < rate.value < rate.hi


def test_touching_events_do_not_overlap():
    index = pl.DataFrame(
        {"recording_id": ["a"] * 4, "subject_id": ["a"] * 4, "start": [0.0, 2.0, 4.0, 6.0]}
    )
    for true, predicted in itertools.permutations(([0, 1, 0, 0], [0, 0, 1, 0])):
        found = endpoints.score_events(index, np.array(true), np.array(predicted), 2.0)
        assert (found.sensitivity.value, found.false_alarms) == (0.0, 1)


@pytest.mark.parametrize(
    ("names", "event"),
    [
        (("AF", "sinus"), "AF"),
        (("atrial fibrillation", "Sinus rhythm"), "atrial fibrillation"),
        (("apnea", "normal"), "apnea"),
        (("no seizure", "seizure"), "seizure"),
        (("seizure", "non-seizure"), "seizure"),
        (("artifact", "background_activity"), "artifact"),
        (("0", "1"), "1"),
        (("normality", "novel"), "novel"),  # neither says that nothing happens
        (("rest", "move"), "move"),
    ],
)
def test_the_event_is_the_class_in_which_something_happens(
    names: tuple[str, str], event: str
) -> None:
    assert names[endpoints.choose_event(names)] == event
