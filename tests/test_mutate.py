"""`mutate.py` on a toy package: which operators change, that the draw is stable, and that tested
changes are found killed.
"""

from __future__ import annotations

from pathlib import Path

import mutate
import pytest

TOY = '''
"""Not 1 == 1."""
from __future__ import annotations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    LIMIT = 3


def is_within(x: int | None, limit: int) -> bool:
    """Not x < 1."""
    assert limit > 0
    if x is None:
        raise ValueError(f"{1 + 1} == 2 {3}" + str(4 * 5))
    return x <= (  # below, not < limit
        limit
    )


def span(values: list[int]) -> int:
    return max(values) - 2
'''
TESTS = """
import pytest
from toy.limits import is_within, span

def test_is_within():
    assert is_within(3, 3)
    assert span([1, 1])
"""
AREA = mutate.Area(
    ("toy/*.py", "absent/**/*.py", "!toy/__init__.py"), ("test_none.py", "test_*.py")
)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    files = {
        "toy/__init__.py": "ONE = 1\n",
        "toy/limits.py": TOY,
        "tests/test_limits.py": TESTS,
        "tests/test_another.py": "",
    }
    files["pyproject.toml"] = '[tool.pytest.ini_options]\nmarkers = ["slow", "gpu", "spark"]\n'
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_operators_change_where_they_act_and_nowhere_else(toy: Path) -> None:
    found = mutate.draw_mutants(toy, "toy", AREA, 100, seed=0)
    assert {(m.kind, m.line, m.before, m.after) for m in found} == {
        ("comparison", 13, "if x is None:", "if x is not None:"),
        ("comparison", 15, "return x <= (", "return x < ("),
        ("arithmetic", 21, "return max(values) - 2", "return max(values) + 2"),
        ("call", 21, "return max(values) - 2", "return min(values) - 2"),
        ("constant", 21, "return max(values) - 2", "return max(values) - 3"),
    }
    assert {m.file for m in found} == {"toy/limits.py"}


@pytest.mark.parametrize(
    ("source", "mutated"),
    [
        ("a not  in b", ["a in b"]),
        ("not a or b and c", ["a or b and c", "not a and b and c", "not a or b or c"]),
        ("-a[1:] ** 2", ["+a[1:] ** 2", "-a[2:] ** 2", "-a[1:] * 2", "-a[1:] ** 3"]),
        (
            "é < f(b=True, strict=True)",
            ["é <= f(b=True, strict=True)", "é < f(b=False, strict=True)"],
        ),
        ("sorted(a for a in b)", ["sorted(a for a in b)[::-1]"]),
        ("x: int | None = path / 'a'", []),
        ("isinstance(x, int | Path)", []),
        ("a | b", ["a & b"]),
        ("a += 'b' * n", ["a -= 'b' * n"]),
        ("log.warning(1 + x)", []),
    ],
)
def test_each_operator(source: str, mutated: list[str]) -> None:
    text = source.encode()
    assert sorted(
        mutate.mutate(text, change).decode() for change in mutate.ChangeFinder(text).changes
    ) == sorted(mutated)


def test_the_draw_depends_on_the_seed_and_not_on_the_path(toy: Path) -> None:
    first, other = (mutate.draw_mutants(toy, "toy", AREA, 100, seed=seed) for seed in (0, 1))
    assert {m.kind for m in first[:4]} == {"comparison", "arithmetic", "constant", "call"}
    assert sorted(map(str, first)) == sorted(map(str, other))
    (toy / "toy" / "limits.py").rename(toy / "toy" / "a_bounds.py")
    assert [m.after for m in mutate.draw_mutants(toy, "toy", AREA, 100, seed=0)] == [
        m.after for m in first
    ]


def test_the_tests_of_a_file_go_first(toy: Path) -> None:
    assert mutate.select_tests(toy, AREA) == ["tests/test_another.py", "tests/test_limits.py"]
    assert mutate.select_tests(toy, AREA, "toy/limits.py") == [
        "tests/test_limits.py",
        "tests/test_another.py",
    ]


def test_tests_that_name_the_function_or_a_user_of_it_go_before_all_others(toy: Path) -> None:
    (toy / "toy" / "limits.py").write_text(
        "def _add(a): return a + 1\n\ndef total(a): return _add(a)\n"
    )
    (toy / "tests" / "test_far.py").write_text(
        "def test_total(): total(1)\n\ndef test_b(): totally(_addition)\n\ndef test_c(): _add(2)\n"
    )
    mutant = mutate.draw_mutants(toy, "toy", AREA, 1, seed=0)[0]
    assert mutate.find_near_tests(toy, AREA, mutant) == [
        "tests/test_far.py::test_c",
        "tests/test_far.py::test_total",
    ]


@pytest.mark.slow
def test_tested_changes_are_killed_and_others_survive(toy: Path) -> None:
    killed = next(
        m for m in mutate.draw_mutants(toy, "toy", AREA, 100, seed=0) if m.after == "return x < ("
    )
    survivor = mutate.Mutant(
        "toy", "constant", "toy/__init__.py", 1, 6, 7, "2", "ONE = 1", "ONE = 2"
    )
    runner = mutate.Runner(toy, toy.parent / "work", timeout=60, memory=4)
    outcomes = [runner.run_mutant(mutant, AREA) for mutant in (killed, survivor)]
    assert [(o.status, o.test) for o in outcomes] == [
        ("killed", "tests/test_limits.py::test_is_within"),
        ("survived", None),
    ]
    for name in ("limits.py", "__init__.py"):
        assert (runner.tree / "toy" / name).read_bytes() == (toy / "toy" / name).read_bytes()
    report = mutate.format_report(outcomes).splitlines()
    assert report[1].split() == ["toy", "1", "2"]
    assert report[-1] == "  toy/__init__.py:1: ONE = 1  ->  ONE = 2"


def test_slow_tests_run_for_survivors_of_the_fast_ones(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = dict.fromkeys(mutate.SELECTIONS, ("survived", None))
    calls: list[str] = []
    runner = mutate.Runner(toy, toy.parent / "work", timeout=60, memory=4)
    monkeypatch.setattr(
        runner, "run_tests", lambda tests, selection: calls.append(selection) or results[selection]
    )
    results[mutate.SELECTIONS[1]] = ("killed", "test")
    assert runner.run_selections(["tests/test_limits.py"]) == ("killed", "test")
    assert calls == list(mutate.SELECTIONS)
    results[mutate.SELECTIONS[0]] = ("timeout", None)
    assert runner.run_selections(["tests/test_limits.py"]) == ("timeout", None)
    assert len(calls) == 3


@pytest.mark.slow
def test_a_tree_whose_tests_fail_is_refused(toy: Path) -> None:
    (toy / "tests" / "test_another.py").write_text(
        "import time, toy\n\ndef test_a():\n    time.sleep(100 * toy.ONE)\n"
    )
    runner = mutate.Runner(toy, toy.parent / "work", timeout=0.5, memory=4)
    with pytest.raises(SystemExit, match=r"do not pass without a mutant \(timeout"):
        runner.confirm(AREA, None)
    (toy / "tests" / "test_limits.py").write_text("def test_a(): assert False\n")
    mutant = mutate.draw_mutants(toy, "toy", AREA, 1, seed=0)[0]
    with pytest.raises(
        SystemExit, match=r"do not pass without a mutant \(killed: tests/test_limits.py::test_a\)"
    ):
        mutate.Runner(toy, toy.parent / "again", timeout=60, memory=4).run_mutant(mutant, AREA)
