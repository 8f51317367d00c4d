"""Texts that come from files, recipes and stored records: no page, table, card, line or JSON takes
them for more than text.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import unicodedata
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from bitimely_cli.main import main
from bitimely_cli.screen import screen
from bitimely_core.errors import quote_formula
from bitimely_core.report.numbers import to_csv
from bitimely_core.report.page_text import markdown_text

HOSTILE = {
    "script": "<script>alert(1)</script>",
    "image": '"><img src=x onerror=alert(1)>',
    "rich": "[/red]x[bold]",
    "escape": "a\x1b[2J\x1b]0;owned\x07b",
    "c1": "a\x9b31mb\x85c\x7f",
    "rtl": "a\u202egpj.exe\u2066\u200f",
    "line": "a\nerror[corrupt] forged: x",
    "separator": "a\u2028error[corrupt] forged\u2029",
    "markdown": "a|b`c`![d](http://evil.example)[e](javascript:1) https://evil.example www.evil.example",
    "shell": "$(touch PWNED)`touch PWNED`",
    "formula": "=1+cmd|'/C calc'!A0",
    "format": "{0.__class__} %s ${HOME}",
}
CONTROL = {"Cc", "Cf", "Cs", "Zl", "Zp"}
TAGS = {"script": 1, "img": 0, "iframe": 0, "object": 0, "link": 0, "base": 0, "form": 0}


class Dom(HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def check_page(path: Path) -> None:
    page = path.read_text("utf-8")
    dom = Dom(page)
    for tag, most in TAGS.items():
        assert sum(name == tag for name, _ in dom.tags) <= most, (path, tag)
    for _, attributes in dom.tags:
        assert not [name for name in attributes if name.startswith("on")], path
        link = attributes.get("href") or "#"
        assert (
            link.startswith(("#", "data:text/csv;", "data:image/png;"))
            or (path.parent / link).is_file()
        ), (path, link)
        if link.startswith("data:text"):
            check_csv(base64.b64decode(link.partition(",")[2]).decode())
    check_text(page, path)


def check_csv(text: str) -> None:
    for row in csv.reader(io.StringIO(text, newline="")):
        for cell in row:
            number = re.fullmatch(r"-?\d[\d.e+-]*|-?inf", cell)
            assert number or not re.match(r"\s*[=+@-]|[\t\r]", cell), cell


def check_text(text: str, where: object = "") -> None:
    found = [c for c in text if c != "\n" and unicodedata.category(c) in CONTROL]
    assert not found, (where, found[:5])


def check_card(path: Path) -> None:
    text = path.read_text("utf-8")
    check_text(text, path)
    assert not re.search(r"(?<!\\)\]\(|(?<!\\)<(?!https)|http://|(?<!\\)://evil|www\.evil", text), (
        path
    )


def write_recordings(folder: Path, names: list[str]) -> Path:
    """12 subjects with two channels, with `names` as channel, unit, class and attribute."""
    channel, unit, label = names
    rng = np.random.default_rng(0)
    rows = io.StringIO(newline="")
    table = csv.writer(rows)
    table.writerow(["recording", "patient", "diagnosis", "sex"])
    for k in range(12):
        cells = io.StringIO(newline="")
        writer = csv.writer(cells)
        writer.writerow([channel, "x"])
        writer.writerows([f"{a:.3f}", f"{b:.3f}"] for a, b in rng.normal(size=(80, 2)))
        (folder / "data").mkdir(parents=True, exist_ok=True)
        (folder / "data" / f"r{k}.csv").write_text(cells.getvalue(), "utf-8", newline="")
        table.writerow([f"r{k}", f"p{k}", label if k % 2 else f"{label} 2", label])
    (folder / "table.csv").write_text(rows.getvalue(), "utf-8", newline="")
    path = folder / "map.toml"
    path.write_text(
        f'[[files]]\npattern = "data/*.csv"\nrate = 8\nunit = {json.dumps(unit)}\n'
        '[table]\npath = "table.csv"\nfile = "recording"\nsubject = "patient"\nlabel = "diagnosis"\nattributes = ["sex"]\n',
        "utf-8",
    )
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(list(HOSTILE)[k : k + 3], marks=[pytest.mark.slow] if k else [])
        for k in range(0, len(HOSTILE), 3)
    ],
    ids="-".join,
)
def test_texts_of_files_stay_texts_from_ingest_to_export(
    kinds: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    texts, ws = [HOSTILE[kind] for kind in kinds], tmp_path / "ws"
    source = tmp_path / "raw"
    path = write_recordings(source, texts)
    for text in texts:
        (source / "data" / f"{text.replace('/', '_')}.csv").write_text(
            "not,a\nrecording\n", "utf-8"
        )
    steps = ["--steps", "1", "--batch-size", "4"]
    data = "generic/classification"
    window = ["--window", "40"]
    calls = [
        ["ingest", "generic", str(source), "--map", str(path), "--quarantine", "left.json"],
        ["tokenize", data, *window],
        ["pretrain", "--preset", "tiny", "--data", data, *steps, "--set", "model.tokenizer=patch"],
        ["finetune", "tiny", "--data", data, "--fraction", "1", *steps],
        ["evaluate", "tiny-classification", "--bootstrap", "20"],
        ["report", "tiny-classification"],
        ["export", "tiny-classification"],
        ["list", "runs"],
        ["verify"],
    ]
    for argv in calls:
        for more in ([], ["--json"]):
            code = main([*argv, *more, "-w", str(ws)])
            out, err = capsys.readouterr()
            assert code in {0, 2, 3, 4}, (argv, err)
            check_text(out + err, argv)
            assert not re.search(r"^error\[corrupt\]", out + err, re.MULTILINE), argv
            if more:
                json.loads(out)
        if code not in {0, 3}:
            break
    for page in ws.rglob("*.html"):
        check_page(page)
    for card in ws.rglob("*.md"):
        check_card(card)
    for file in [*ws.rglob("*.json"), *tmp_path.glob("*.json")]:
        json.loads(file.read_bytes())
    assert not list(tmp_path.rglob("PWNED"))


@pytest.mark.parametrize("text", HOSTILE.values())
def test_markdown_shows_foreign_text_without_links(text: str) -> None:
    shown = markdown_text(text)
    assert not re.search(r"(?<!\\)[\[\]<>|`]|(?<!\\)://|www\.", shown)
    check_text(shown)


@pytest.mark.parametrize(
    "start",
    [
        "=",
        "+",
        "-",
        "@",
        "\t=",
        "\r=",
        " =",
        "\n=",
        "\uff1d",
        "\uff0b",
        "\uff0d",
        "\uff20",
        "\u00a0=",
    ],
)
def test_no_cell_or_header_of_a_csv_file_is_a_formula(start: str) -> None:
    text = to_csv(
        {
            f"{start}SUM(A1)": np.array([f"{start}1+1", f"{start}cmd|' /C calc'!A0", "plain"]),
            "n": np.array([-1.5, 2.0, -3e-9]),
        }
    )
    head, *rows = csv.reader(io.StringIO(text, newline=""))
    assert head[0].startswith("'")
    assert [row[0][0] for row in rows] == ["'", "'", "p"]
    assert [float(row[1]) for row in rows] == [-1.5, 2.0, -3e-9]


@pytest.mark.parametrize("number", ["-1", "+2.5", "-.5", "-1e-9", "7"])
def test_numbers_in_columns_of_text_stay_numbers(number: str) -> None:
    assert quote_formula(number) == number
    assert quote_formula(f"{number}+A1") == (f"{number}+A1" if number == "7" else f"'{number}+A1")


@pytest.mark.parametrize("text", [*HOSTILE.values(), "a\udcffb"])
def test_the_screen_shows_one_line_and_valid_json(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(screen, "json", False)
    screen.print_line(text)
    screen.note(text)
    screen.table([text], [[text]], title=text)
    out, err = capsys.readouterr()
    check_text(out + err)
    assert err.count("\n") == 1
    monkeypatch.setattr(screen, "json", True)
    screen.result({text: [text]})
    out = capsys.readouterr().out
    check_text(out)
    assert out.count("\n") == 1
    assert json.loads(out) == {text: [text]}
