"""Data whose subjects are no people: no page, screen or JSON of them speaks of subjects."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import small

from bitimely_cli.main import main
from bitimely_core import registry
from bitimely_core.page import BarPlot, PageBuilder, rename_units

SMALL = [
    "--set",
    "model.tokenizer=patch",
    "--set",
    "model.patch=50",
    "--set",
    "model.layers=2",
    "--steps",
    "2",
    "--batch-size",
    "8",
]
QUICK = {
    "attention": ["--sequences", "8"],
    "saliency": ["--sequences", "8"],
    "shapelets": ["--sequences", "24"],
}


class VisibleText(HTMLParser):
    """The text of a page without style and script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.hidden, self.text = False, ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.hidden = tag in {"style", "script"}

    def handle_endtag(self, tag: str) -> None:
        self.hidden = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self.hidden else f"{data}\n"


def list_texts(value: Any) -> Iterator[str]:
    """The texts of a JSON value; its keys, and settings that are named `by`, are the same for all
    data.
    """
    if isinstance(value, dict):
        for key, part in value.items():
            yield from () if key == "by" else list_texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from list_texts(part)
    elif isinstance(value, str):
        yield value


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The synthetic cohort, as one of segments: a fine-tuned run of it."""
    folder = small.copy_nights(tmp_path_factory.mktemp("units"))
    entry = registry.datasets["synthetic"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            registry.datasets._items,
            "synthetic",
            replace(entry, facts=replace(entry.facts, subject_unit="segment")),
        )
        assert (
            main(
                [
                    "pretrain",
                    "--data",
                    "synthetic/staging",
                    *SMALL,
                    "--run",
                    "base",
                    "-w",
                    str(folder),
                ]
            )
            == 0
        )
        assert (
            main(
                [
                    "finetune",
                    "base",
                    "--data",
                    "synthetic/staging",
                    *SMALL[-4:],
                    "--augment",
                    "default",
                    "--run",
                    "tuned",
                    "-w",
                    str(folder),
                ]
            )
            == 0
        )
        yield folder


def check(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the verb prints; nothing in it, in the page of `folder` and in its JSON speaks of
    subjects.
    """
    capsys.readouterr()
    assert main([*words]) == 0
    printed = "".join(capsys.readouterr())
    page = VisibleText((folder / "report.html").read_text("utf-8")).text
    for where, text in (("screen", printed), ("page", page)):
        assert not (found := re.findall(r".{0,60}subject.{0,60}", text, re.IGNORECASE)), (
            where,
            found,
        )
    for file in ("summary.json", "scores.json"):
        body = json.loads((folder / file).read_bytes()) if (folder / file).is_file() else {}
        assert not (found := [text for text in list_texts(body) if "subject" in text.lower()]), (
            file,
            found,
        )
    return page


@pytest.mark.slow
def test_scores_name_the_unit(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = home / "runs" / "tuned"
    page = check(
        folder,
        capsys,
        "evaluate",
        "tuned",
        "--bootstrap",
        "20",
        "--baselines",
        "cheap",
        "-w",
        str(home),
    )
    assert "95 % CI over segments" in page
    assert "8 segments (people may be shared)" in page
    assert "no segment is in two splits" in (folder / "model_card.md").read_text("utf-8").lower()
    report = home / "reports" / "page-report"
    check(report, capsys, "report", "tuned", "--out", str(report), "-w", str(home))


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [
        "attention",
        "augmentation",
        "calibration",
        "embedding",
        "leakage",
        "probing",
        "saliency",
        "shapelets",
        "svd",
    ],
)
def test_analyses_name_the_unit(home: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    of = (
        ["--data", "synthetic/staging"]
        if registry.analyses[kind].facts.takes == "data"
        else ["tuned"]
    )
    folder = home / "reports" / f"page-{kind}"
    page = check(
        folder,
        capsys,
        "analyze",
        kind,
        *of,
        *QUICK.get(kind, [])[:2],
        "--name",
        folder.name,
        "-w",
        str(home),
    )
    assert json.loads((folder / "summary.json").read_bytes())["subject_unit"] == "segment"
    if kind in {"attention", "calibration", "embedding", "probing", "saliency"}:
        assert "over segments" in page


def test_every_analysis_of_data_is_tried() -> None:
    tried = next(
        mark for mark in test_analyses_name_the_unit.pytestmark if mark.name == "parametrize"
    ).args[1]  # type: ignore[attr-defined]
    ours = {
        name
        for name, one in registry.analyses.items()
        if one.function.__module__.startswith("bitimely_core.")
    }
    assert ours - {"complexity"} == set(tried), "complexity has no data"


def test_words_are_replaced_and_keys_are_not() -> None:
    page = PageBuilder("Scores of subject-7")
    page.fact("Subjects", "12, numbered at random; by subject")
    page.notice("Give --subjects FILE; a subject/night in subject.csv has no subject_id.")
    page.figure(
        "subjects",
        "Scores by subject",
        "The subjects' scores.",
        BarPlot(["subject 1"], [0.5], ylabel="Subject"),
    )
    page.table("rows", "", "", ["subject", "n"], [["subject 1", 3]])
    done = rename_units(
        page.finish("Of 12 subjects, one subject.", {"n_subjects": 12, "reason": "3 subjects"}),
        "segment",
    )
    assert (done.title, done.verdict) == ("Scores of subject-7", "Of 12 segments, one segment.")
    assert done.facts == {"Segments": "12, numbered at random; by segment"}
    assert done.notices == [
        "Give --subjects FILE; a subject/night in subject.csv has no subject_id."
    ]
    figure, table = done.blocks
    assert (figure.name, figure.title, figure.caption) == (
        "subjects",
        "Scores by segment",
        "The segments' scores.",
    )
    assert (figure.data.names, figure.data.ylabel) == (["segment 1"], "Segment")
    assert (table.columns, table.rows) == (["segment", "n"], [["segment 1", 3]])
    assert done.summary == {"n_subjects": 12, "reason": "3 segments"}
    plain = page.finish("One subject.")
    assert rename_units(plain, "subject") is plain
