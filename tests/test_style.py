"""Each figure of style stays within its ceiling, and what is counted is what is meant."""

from __future__ import annotations

import ast

import pytest
import style


@pytest.mark.slow
@pytest.mark.parametrize("bound", style.BOUNDS, ids=lambda bound: bound.figure)
def test_figures_stay_within_their_bounds(bound: style.Bound) -> None:
    value = style.measure(bound.figure)
    assert bound.holds(value), (
        f"{bound.figure}: {value:g}, the bound is {bound.ceiling:g}; see python tests/style.py --list {bound.figure}"
    )


def test_every_figure_has_a_bound() -> None:
    assert [bound.figure for bound in style.BOUNDS] == list(style.LISTS)


def test_reads_by_key_are_loads_of_constant_strings() -> None:
    code = "x['a']; x.get('a', 0); x['a'] = 1; del x['a']; x[0]; x[name]; x.get(name); x.pop('a')"
    assert [type(n).__name__ for n in ast.walk(ast.parse(code)) if style.read_container(n)] == [
        "Subscript",
        "Call",
    ]


def test_participles_are_single_words() -> None:
    names = [
        "_told",
        "opened",
        "_ending",
        "taken",
        "is_opened",
        "load_masked",
        "embed",
        "split",
        "read",
        "warning",
        "OPENED",
    ]
    assert [name for name in names if style.is_participle(name)] == [
        "_told",
        "opened",
        "_ending",
        "taken",
    ]


def test_branches_are_the_places_with_two_cases() -> None:
    code = """
def f(a, b, c):
    if a and b or c:
        return [x for x in a if x]
    elif b:
        return 1 if c else 2
    for x in a:
        try:
            x()
        except ValueError:
            x(1)
    match c:
        case 1: x()
        case _: x()
    with a: assert b
"""
    # if, and, or, for x in, if x, elif, ternary, for, except, two cases
    assert style.count_branches(ast.parse(code)) == 11


def test_a_circle_is_found_through_type_checking_and_late_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sources = {
        "core/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from core.b import x\n",
        "core/b.py": "def f():\n    from core import c\n",
        "core/c.py": "import importlib\nimportlib.import_module('core.a')\n",
        "core/d.py": "import core.a\n",
        "core/__init__.py": "",
    }
    monkeypatch.setattr(
        style, "parse_sources", lambda: {path: ast.parse(text) for path, text in sources.items()}
    )
    assert style.list_import_circles() == ["core.a core.b core.c"]
