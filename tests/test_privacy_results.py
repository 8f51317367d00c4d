"""What is shared of runs on claims (pages, drawings, tables, cards, exports, recipes, JSON)
holds nothing that the scores withhold.
"""

from __future__ import annotations

import base64
import html
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import test_privacy
from pydantic import BaseModel

from bitimely_cli.main import main
from bitimely_core import privacy
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.schemas.scores import Scores
from bitimely_core.tokens.sequences import open_sequences

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
SEEDS = [1, pytest.param(3, marks=pytest.mark.long), pytest.param(6, marks=pytest.mark.long)]
MODEL = ["--steps", "2", "--batch-size", "12", "--set", "model.layers=2"]
SHARED = (
    "report.html",
    "model_card.md",
    "summary.json",
    "scores_shared.json",
    "results.csv",
    "results.md",
    "results.tex",
)
DIGITS = 7  # of a number, from which on it is recognised
PEOPLE = r"(?:subjects?|people|persons?|patients?|cases|others|controls|sequences?|windows?|rows?)"
ANALYSES = ("calibration", "embedding", "probing", "attention", "svd")
RECIPE = """
title = "Claims"
[build]
select = false
min_codes = 2
[pretrain]
preset = "tiny"
data = "pophr"
steps = 2
[finetune]
data = ["pophr"]
fraction = 1.0
steps = 2
[evaluate]
bootstrap = 20
[model]
layers = 2
[train]
batch_size = 12
"""


@pytest.fixture(scope="module", params=SEEDS)
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """A workspace in which every verb has worked on claims with rare labels, and all that was
    printed under `--json`; the lines without it are for who owns the data.
    """
    folder = tmp_path_factory.mktemp("shared")
    raw, home, screen = test_privacy.write_cohort(folder / "raw", request.param), folder / "w", []
    capture = request.getfixturevalue("capture_all")
    recipe = folder / "claims.toml"
    recipe.write_text(RECIPE)
    for argv in list_commands(raw, recipe):
        code = main([*argv, "-w", str(home), *([] if "--json" in argv else ["--json"])])
        screen.append(f"$ {' '.join(argv[:3])} -> {code}\n{capture()}")
        assert code in ({0, 2, 3, 4} if argv[0] == "analyze" else {0, 3}), screen[-1]
    return home, "\n".join(screen)


def list_commands(raw: Path, recipe: Path) -> list[list[str]]:
    """Every verb."""
    return [
        [
            "ingest",
            "pophr",
            str(raw),
            "--rules",
            "ccdss",
            "--default-source",
            "physician",
            "--no-select",
            "--min-codes",
            "2",
        ],
        ["pretrain", "--preset", "tiny", "--data", "pophr", "--run", "base", *MODEL],
        *(
            [
                "finetune",
                "base",
                "--data",
                "pophr",
                "--fraction",
                "1",
                "--run",
                name,
                "--seed",
                seed,
                *MODEL[:4],
            ]
            for name, seed in (("one", "0"), ("two", "1"))
        ),
        ["evaluate", "one", "--bootstrap", "20"],
        ["evaluate", "two", "--bootstrap", "20", "--compare", "one"],
        ["evaluate", "two", "--bootstrap", "20", "--compare", "one", "--json"],
        ["report", "one", "two"],
        ["report", "one", "two", "--json"],
        ["export", "two"],
        ["embed", "two"],
        *(
            [
                "evaluate",
                "one",
                "--data",
                "pophr",
                "--vectors",
                str(raw.parent / "w/runs/two/embeddings-pophr.parquet"),
                *more,
            ]
            for more in ([], ["--json"])
        ),
        ["reproduce", "two"],
        ["run", str(recipe)],
        *(["analyze", kind, "two"] for kind in ANALYSES),
        *(["analyze", kind, "two", "--json"] for kind in ANALYSES[:3]),
        ["verify"],
    ]


@pytest.fixture(scope="module")
def capture_all() -> Iterator[Any]:
    """A function that returns what was printed since its last call."""
    import contextlib
    import io

    out = io.StringIO()

    def take() -> str:
        text = out.getvalue()
        out.seek(0)
        out.truncate()
        return text

    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        yield take


def list_shared(home: Path) -> list[Path]:
    """The files that docs/pophr.md calls results."""
    results = [
        path
        for part in ("runs", "tokens", "cache")
        for path in (home / part).rglob("*")
        if path.name in SHARED or path.suffix == ".svg"
    ]
    return [
        *results,
        *(
            path
            for part in ("reports", "exports")
            for path in (home / part).rglob("*")
            if path.is_file()
        ),
    ]


def list_texts(path: Path) -> Iterator[str]:
    """What a file shows: its text, its downloads, the cells of its table."""
    if path.suffix == ".parquet":
        for row in pl.read_parquet(path).iter_rows():
            yield " ; ".join(str(cell) for cell in row)
    elif path.suffix in {".html", ".svg", ".md", ".tex", ".csv", ".json", ".txt"}:
        text = path.read_text("utf-8")
        for data in re.findall(r'href="data:[^;"]+;(?:charset=utf-8;)?base64,([^"]+)"', text):
            yield base64.b64decode(data).decode("utf-8", "replace")
        yield html.unescape(re.sub(r"<style.*?</style>|data:[^\"]+", " ", text, flags=re.S))


def list_numbers(value: Any) -> Iterator[float]:
    match value:
        case dict():
            for one in value.values():
                yield from list_numbers(one)
        case list():
            for one in value:
                yield from list_numbers(one)
        case float() if math.isfinite(value):
            yield value


def shorten(value: float) -> str | None:
    """The first digits of a number, where there are enough of them to recognise it."""
    text = re.sub(r"^0\.0*|\.|^-|e.*", "", repr(abs(value)))
    return text[:DIGITS] if len(text) > DIGITS + 2 else None


def find_secrets(home: Path, run: str) -> set[str]:
    """Digits of the scores that `scores.json` has and `scores_shared.json` has not."""
    exact, shown = (
        set(list_numbers(json.loads((home / "runs" / run / name).read_text())))
        for name in ("scores.json", "scores_shared.json")
    )
    # 1/3 stands in many places
    plain = {
        value
        for value in exact
        if any(abs(value * n - round(value * n)) < 1e-12 for n in range(1, 13))
    }
    return {text for value in exact - shown - plain if (text := shorten(value)) is not None}


def list_rare_labels(home: Path) -> set[str]:
    """Labels with 1 to 10 cases or others in the test split."""
    sequences = open_sequences(home / "tokens" / "pophr")
    truth = sequences["test"].targets()
    assert truth is not None
    return {
        name
        for name, y in zip(sequences.class_names, truth.T, strict=True)
        if (y == 1).sum() in test_privacy.SMALL or (y == 0).sum() in test_privacy.SMALL
    }


def test_there_is_something_to_find(shared: tuple[Path, str]) -> None:
    home, screen = shared
    assert list_rare_labels(home)
    assert find_secrets(home, "two")
    kinds = {path.suffix for path in list_shared(home)}
    assert {".html", ".svg", ".parquet", ".json", ".md", ".csv"} <= kinds
    assert (home / "exports" / "two").is_dir()
    done = re.findall(r"\$ analyze (\w+) two -> (\d)", screen)
    assert sum(code == "0" for _, code in done) >= 3, done


def list_ranks(folder: Path) -> set[str]:
    """Digits of the shares of singular values on a page of weights: ratios of small numbers, which
    may equal an accuracy by chance.
    """
    tables = [
        pl.read_parquet(path) for path in folder.glob("*.parquet") if folder.name.startswith("svd-")
    ]
    return {
        text
        for one in tables
        if "n90" in one.columns
        for value in one["n90"].drop_nulls()
        if (text := shorten(float(value)))
    }


def find_withheld_scores(home: Path, screen: str) -> list[tuple[str, ...]]:
    secrets = find_secrets(home, "one") | find_secrets(home, "two")
    found = []
    for path in list_shared(home):
        for text in list_texts(path):
            for number in re.findall(r"(?<![\w.])-?\d+\.\d{4,}(?:e-?\d+)?", text):
                if (digits := shorten(float(number))) in secrets - list_ranks(path.parent):
                    found.append((str(path.relative_to(home)), number, digits))
    found += [
        ("screen", number, "")
        for number in re.findall(r"(?<![\w.])-?\d+\.\d{4,}", screen)
        if shorten(float(number)) in secrets
    ]
    return found


def find_few_in_texts(home: Path, screen: str) -> list[tuple[str, ...]]:
    texts = [
        (str(path.relative_to(home)), text)
        for path in list_shared(home)
        if path.suffix != ".parquet"
        for text in list_texts(path)
    ]
    few = rf"(?<!at most )(?<![\w.,/-])(?:[1-9]|10) (?:of \d+ )?(?:test |training |validation )?{PEOPLE}\b|\bof (?:[1-9]|10) {PEOPLE}\b"
    found = [
        (name, text[max(0, hit.start() - 50) : hit.end() + 30])
        for name, text in [*texts, ("screen", screen)]
        for hit in re.finditer(few, text)
    ]
    return [one for one in found if "people are withheld" not in one[1]]


def find_few_in_tables(home: Path, _: str) -> list[tuple[object, ...]]:
    rare, found = list_rare_labels(home), []
    for path in list_shared(home):
        if path.suffix != ".parquet":
            continue
        frame = pl.read_parquet(path)
        counted = [
            name
            for name in frame.columns
            if re.fullmatch(rf"n|support|(?:\w+ )?{PEOPLE}", name.replace("_", " "))
            and name != "sequence"
        ]
        for row in frame.iter_rows(named=True):
            found += [
                (path.name, name, row[name])
                for name in counted
                if str(row[name]).removesuffix(".0") in map(str, test_privacy.SMALL)
            ]
            if rare & {str(cell) for cell in row.values()}:
                shown = [
                    cell
                    for name, cell in row.items()
                    if isinstance(cell, float)
                    and math.isfinite(cell)
                    and re.search("au|f1|recall|precision|value", name)
                ]
                found += [(path.name, str(row))] if shown else []
    return found


@pytest.mark.parametrize("find", [find_withheld_scores, find_few_in_texts, find_few_in_tables])
def test_nothing_that_is_shared_shows_what_is_withheld(
    find: Callable[[Path, str], list[Any]], shared: tuple[Path, str]
) -> None:
    assert find(*shared) == []


def test_shared_records_are_as_the_filter_leaves_them(shared: tuple[Path, str]) -> None:
    home, _ = shared
    records: list[BaseModel] = [
        *map(Scores.load, home.rglob("scores_shared.json")),
        *map(RunRecord.load, (home / "exports").rglob("run.json")),
        *map(Scores.load, (home / "exports").rglob("scores.json")),
    ]
    assert len(records) >= 4
    for record in records:
        assert privacy.share_record(record) == record
    run = RunRecord.load(home / "exports" / "two" / "run.json")
    assert run.data[0].windows is None


def test_the_scan_sees_what_small_counts_shows(shared: tuple[Path, str], tmp_path: Path) -> None:
    """The scores in full on a page, in a drawing, in a table: each is found."""
    home, _ = shared
    value = next(
        iter(set(list_numbers(json.loads((home / "runs" / "two" / "scores.json").read_text()))))
    )
    secrets = find_secrets(home, "two")
    exact = next(
        v
        for v in list_numbers(json.loads((home / "runs" / "two" / "scores.json").read_text()))
        if shorten(v) in secrets
    )
    folder = tmp_path / "reports"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "a.svg").write_text(f"<svg><text>{exact}</text></svg>")
    (folder / "b.html").write_text(f"<p>{exact:.6f}</p>")
    pl.DataFrame({"label": ["x"], "auroc": [exact]}).write_parquet(folder / "c.parquet")
    assert isinstance(value, float)
    for path in sorted(folder.iterdir()):
        numbers = [
            number for text in list_texts(path) for number in re.findall(r"-?\d+\.\d{4,}", text)
        ]
        assert {shorten(float(number)) for number in numbers} & secrets or path.suffix == ".html", (
            path
        )
