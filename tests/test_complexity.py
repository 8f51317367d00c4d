"""Slopes on planted timings, bytes that can be counted by hand, rounds that interleave, and the
page.
"""

import itertools

import numpy as np
import pytest
import torch

from bitimely_core import report
from bitimely_core.config import build_model_config
from bitimely_core.errors import UserError
from bitimely_core.insight.complexity import (
    CHUNKWISE,
    FUSED,
    PARALLEL,
    RECURRENT,
    SOFTMAX,
    complexity,
    fit_slope,
    fit_slopes,
    make_operators,
    peak_bytes,
    time_calls,
)
from bitimely_core.page import Figure, Table

LENGTHS = [64, 128, 256, 512]


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0, 3.0])
def test_the_slope_of_a_power_is_the_power(power):
    assert fit_slope(LENGTHS, [7.0 * n**power for n in LENGTHS]) == pytest.approx(power, abs=1e-12)


def test_the_slope_is_that_of_a_least_squares_line():
    rng = np.random.default_rng(0)
    values = rng.uniform(1, 9, 4)
    x, y = np.log(LENGTHS), np.log(values)
    by_hand = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    assert fit_slope(LENGTHS, values.tolist()) == pytest.approx(by_hand)


def test_fixed_costs_flatten_the_slope_and_the_last_one_less():
    rounds = [[c * (1000.0 + n) for c in (1.0, 1.1, 0.9)] for n in LENGTHS]
    found = fit_slopes(LENGTHS, rounds)
    assert found.value < found.last < 1
    assert found.lo == pytest.approx(found.hi) == pytest.approx(found.value)


def test_rounds_give_the_range_of_the_slope():
    found = fit_slopes([10, 100], [[1.0, 1.0, 1.0], [10.0, 100.0, 1000.0]])
    assert found[:3] == pytest.approx((2.0, 1.0, 3.0))
    assert fit_slopes([10], [[1.0]]) == (None, None, None, None)
    assert fit_slope([10, 20], [0.0, 1.0]) is None


def test_rounds_interleave_and_the_clock_is_read_around_each_call():
    order = []
    ticks = itertools.count()
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    taken = time_calls(calls, 2, clock=lambda: float(next(ticks)))
    assert order == ["a", "a", "b", "b", "c", "c"] * 2  # the first of each pair is not timed
    assert taken == {name: [1.0, 1.0] for name in "abc"}


def test_bytes_are_those_alive_at_one_time():
    x = torch.zeros(1000)
    assert peak_bytes(lambda: x + 1) == 4000
    assert peak_bytes(lambda: x.view(10, 100)) == 0  # what was there before does not count

    def two_after_another():
        for _ in range(5):
            (x + 1).sum()

    assert 4000 <= peak_bytes(two_after_another) <= 4100

    def together():
        return [x + k for k in range(5)]

    assert peak_bytes(together) == 20_000


@pytest.mark.slow
def test_bytes_of_the_forms_grow_as_their_maps():
    config = build_model_config("bitimelygpt", "tiny", channels=1)
    found = {
        n: {name: peak_bytes(call) for name, call in make_operators(config, n, 0).items()}
        for n in (256, 512)
    }
    growth = {name: found[512][name] / found[256][name] for name in found[256]}
    assert growth[PARALLEL] == pytest.approx(4, rel=0.1)
    assert growth[SOFTMAX] == pytest.approx(4, rel=0.1)
    assert growth[RECURRENT] == pytest.approx(2, rel=0.1)
    assert growth[FUSED] == pytest.approx(2, rel=0.1)
    assert growth[CHUNKWISE] < 2.2
    assert found[512][SOFTMAX] >= 512 * 512 * 4 * 4  # four heads of float32


def test_plain_and_fused_attention_are_the_same_function():
    made = make_operators(build_model_config("bitimelygpt", "tiny", channels=1), 40, 0)
    for a, b in zip(made[SOFTMAX](), made[FUSED](), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for a, b, c in zip(made[PARALLEL](), made[CHUNKWISE](), made[RECURRENT](), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "preset"), [("bitimelygpt", "tiny"), ("gpt", "tiny"), ("bitimelygpt", "3m")]
)
def test_page(model, preset, tmp_path):
    threads = torch.get_num_threads()
    page = complexity(model=model, preset=preset, lengths="16,32", rounds=2)
    assert torch.get_num_threads() == threads
    found = page.summary["candidates"]
    assert set(found) == {PARALLEL, CHUNKWISE, RECURRENT, SOFTMAX, FUSED, f"whole model, {model}"}
    assert all(set(one["seconds"]) == {"16", "32"} for one in found.values())
    assert [b.name for b in page.blocks if isinstance(b, Figure)] == ["time", "memory"]
    assert len(next(b for b in page.blocks if isinstance(b, Table)).rows) == 6
    assert report.write_report(tmp_path, page).stat().st_size < report.LIMIT


def test_slow_candidates_are_left_out_and_named():
    page = complexity(lengths="16,32", rounds=1, slowest=0.0)
    assert page.summary["candidates"] == {}
    assert len(page.summary["left_out"]) == 6
    assert "Too few" in page.verdict


def test_what_is_no_length_is_refused():
    for lengths in ("64", "64,32", "a,b", "2,64", ""):
        with pytest.raises(UserError, match="ascending"):
            complexity(lengths=lengths)
    with pytest.raises(UserError, match="rounds"):
        complexity(lengths="16,32", rounds=0)
