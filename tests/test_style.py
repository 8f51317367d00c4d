"""Each figure of style stays within its ceiling, and what is counted is what is meant."""

from __future__ import annotations

import ast

import pytest
import style


@pytest.mark.parametrize("bound", style.BOUNDS, ids=lambda bound: bound.figure)
def test_figures_stay_within_their_bounds(bound: style.Bound) -> None:
    value = style.measure(bound.figure)
    assert bound.holds(value), f"{bound.figure}: {value:g}, the bound is {bound.ceiling:g}; see python tests/style.py --list {bound.figure}"


def test_every_figure_has_a_bound() -> None:
    assert [bound.figure for bound in style.BOUNDS] == list(style.LISTS)


def test_reads_by_key_are_loads_of_constant_strings() -> None:
    code = "x['a']; x.get('a', 0); x['a'] = 1; del x['a']; x[0]; x[name]; x.get(name); x.pop('a')"
    assert [type(n).__name__ for n in ast.walk(ast.parse(code)) if style.read_container(n)] == ["Subscript", "Call"]


def test_participles_are_single_words() -> None:
    names = ["_told", "opened", "_ending", "taken", "is_opened", "load_masked", "embed", "split", "read", "warning", "OPENED"]
    assert [name for name in names if style.is_participle(name)] == ["_told", "opened", "_ending", "taken"]
