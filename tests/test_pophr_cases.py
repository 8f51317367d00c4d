"""Every hand-made case of the builder through `build_sequences`, on every engine that is
installed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from engines import SPARK_ENGINE

from bitimely_core.claims.build import build_sequences

FOLDER = Path(os.environ.get("BITIMELY_TEST_CASES", Path(__file__).parents[2] / "shared" / "cases"))
FILE = FOLDER / "pophr_cases.json"
CASES = json.loads(FILE.read_text()) if FILE.is_file() else []


def frames(case: dict[str, Any]) -> tuple[pl.DataFrame, pl.DataFrame | None, pl.DataFrame]:
    """The arguments that a case stands for."""
    rows, people = case["events"], case["subjects"]
    integers = all(isinstance(row["subject_id"], int) for row in [*rows, *(people or [])])

    def table(
        found: list[dict[str, Any]], always: tuple[str, ...], sometimes: tuple[str, ...]
    ) -> pl.DataFrame:
        names = [
            "subject_id",
            *always,
            *(name for name in sometimes if any(name in row for row in found)),
        ]
        schema = dict.fromkeys(names, pl.String) | {
            "subject_id": pl.Int64 if integers else pl.String
        }
        return pl.DataFrame(
            [{name: row.get(name) for name in names} for row in found], schema=schema
        )

    pairs = [
        (vocab, code, phecode)
        for vocab, own in case["phemap"].items()
        for code, found in own.items()
        for phecode in ([found] if isinstance(found, str) else found)
    ]
    phemap = pl.DataFrame(
        pairs, schema=dict.fromkeys(("vocab", "code", "phecode"), pl.String), orient="row"
    )
    registered = None if people is None else table(people, (), ("birth", "obs_end"))
    return table(rows, ("date", "code"), ("vocab", "source")), registered, phemap


def differences(expected: Any, found: Any, where: str = "") -> list[str]:
    """Where `found` does not hold what is expected: the subset match of the case files."""
    if isinstance(expected, dict):
        if not isinstance(found, dict):
            return [f"{where}: {found!r} is no object"]
        own = {str(key): value for key, value in found.items()}
        wanted = {key: value for key, value in expected.items() if key != "__only__"}
        errors = [f"{where}/{key} is missing" for key in wanted if key not in own]
        if "__only__" in expected and set(expected["__only__"]) != set(own):
            errors.append(
                f"{where} has {sorted(own)}, expected {sorted(expected['__only__'])} alone"
            )
        return errors + [
            line
            for key, value in wanted.items()
            if key in own
            for line in differences(value, own[key], f"{where}/{key}")
        ]
    if isinstance(expected, list):
        if not isinstance(found, list | tuple) or len(found) != len(expected):
            return [f"{where}: {found!r}, expected {expected!r}"]
        return [
            line
            for i, (a, b) in enumerate(zip(expected, found, strict=True))
            for line in differences(a, b, f"{where}[{i}]")
        ]
    numbers = [
        isinstance(value, int | float) and not isinstance(value, bool)
        for value in (expected, found)
    ]
    if all(numbers) and isinstance(expected, float) | isinstance(found, float):
        equal = expected == found or abs(expected - found) <= 1e-6 * max(1.0, abs(expected))
    else:
        equal = type(expected) is type(found) and expected == found
    return [] if equal else [f"{where}: {found!r}, expected {expected!r}"]


def plain(value: Any) -> bool:
    """Whether a result is made of plain Python values alone."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(own) for key, own in value.items())
    return (
        all(map(plain, value))
        if isinstance(value, list)
        else value is None or type(value) in (int, float, str)
    )


@pytest.mark.skipif(not CASES, reason=f"no cases at {FILE}: set BITIMELY_TEST_CASES")
@pytest.mark.parametrize("engine", ["polars", SPARK_ENGINE])
@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case: dict[str, Any], engine: str) -> None:
    events, subjects, phemap = frames(case)
    before = [frame.clone() for frame in (events, phemap)]
    result = build_sequences(events, subjects, phemap, engine=engine, **case["params"])
    assert differences(case["expect"], result) == []
    assert plain(result)
    assert all(a.equals(b) for a, b in zip(before, (events, phemap), strict=True))


def test_the_matcher_sees_differences() -> None:
    assert differences({"a": 1}, {"a": 1, "b": 2}) == []
    assert differences({"a": 1.0}, {"a": 1}) == []
    for expected, found in [
        ({"a": 1}, {"b": 1}),
        ({"__only__": ["a"]}, {"a": 1, "b": 2}),
        ([1, 2], [1]),
        ([1, 2], [2, 1]),
        (None, 0),
        ("1", 1),
        (1.0, 1.00001),
        (1, True),
    ]:
        assert differences(expected, found)


def test_documented_import_path() -> None:
    from bitimely_core.claims import build_sequences as exported
    from bitimely_core.datasets.pophr import build_sequences as documented

    assert documented is exported is build_sequences
