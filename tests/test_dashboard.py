"""The page of a workspace: what it leads to, that it shows what is stored, and that no verb suffers
from it.
"""

import html
import json
import os
import re
import shutil
import threading
from pathlib import Path
from urllib.parse import unquote

import pytest
from small import copy_workspace
from test_browser import chromium  # noqa: F401  a fixture

import bitimely
from bitimely_cli.main import main
from bitimely_core.report.run_page import training_page
from bitimely_core.schemas.runs import FinalLosses, RunRecord
from bitimely_core.store import storage
from bitimely_core.workflows.dashboard import refresh_dashboard

HOSTILE = "a<img src=x onerror=alert(1)>&quot;"


@pytest.fixture
def home(tmp_path):
    """A workspace with runs on recordings and on claims."""
    return copy_workspace(tmp_path / "home")


def count_runs(home: Path) -> int:
    return len(list((home / "runs").iterdir()))


def write_page(home: Path) -> str:
    assert main(["dashboard", "-w", str(home)]) == 0
    return (home / "index.html").read_text("utf-8")


def list_rows(page: str, kind: str) -> list[list[str]]:
    """Texts of the cells of a table."""
    table = re.search(rf'<section class="table" id="{kind}">.*?</section>', page, re.S)
    rows = re.findall(r"<tr>(.*?)</tr>", table[0].split("<tbody>")[1], re.S) if table else []
    return [
        [
            html.unescape(re.sub(r"<title>.*?</title>|<[^>]+>", " ", cell)).strip()
            for cell in re.split(r"<t[hd] ?", row)[1:]
        ]
        for row in rows
    ]


def read_cells(page: str, kind: str) -> dict[str, list[str]]:
    """First cell of a row -> the others."""
    return {
        re.sub(r"^[^>]*> *", "", row[0]): [re.sub(r"^[^>]*>\s*", "", cell) for cell in row[1:]]
        for row in list_rows(page, kind)
    }


def test_page_leads_to_everything_and_shows_what_is_stored(home):
    page = write_page(home)
    links = [
        unquote(html.unescape(link))
        for link in re.findall(r'href="([^"#]+)"', page)
        if not link.startswith("data:")
    ]
    assert links
    assert all((home / link).is_file() for link in links)
    assert not re.search(r"https?://", page.replace("http://www.w3.org/2000/svg", ""))
    for kind in ("cache", "tokens", "runs", "exports"):
        assert len(list_rows(page, kind)) == sum(
            path.is_dir() for path in (home / kind).iterdir()
        ), kind
    assert {f"runs/{run}/report.html" for run in ("plain", "tuned")} & set(links) == {
        f"runs/{run}/report.html"
        for run in ("plain", "tuned")
        if (home / "runs" / run / "report.html").is_file()
    }
    rows = list_rows(page, "runs")
    for path in (home / "runs").glob("*/scores.json"):
        shared = path.with_name("scores_shared.json")  # of histories
        scores = json.loads((shared if shared.is_file() else path).read_text())
        if scores.get("main"):
            value = scores["metrics"][scores["main"]]["value"]
            row = next(row for row in rows if re.search(rf">\s*{path.parent.name}$", row[0]))
            assert value is None or any(f"{value:.3f}" in cell for cell in row), path.parent.name
    for path in (home / "runs").glob("*/metrics.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        shown = [line for line in lines if line["split"] == "validation"] or [
            line for line in lines if line["split"] == "train"
        ]
        row = next(row for row in rows if re.search(rf">\s*{path.parent.name}$", row[0]))
        last = (
            shown[-1]["rel"]
            if any(line.get("rel") is not None for line in lines)
            else shown[-1]["loss"]
        )
        assert any(cell.endswith(f"{last:.3f}") for cell in row), path.parent.name


def test_counts_of_people_in_histories_are_left_out(home):
    cells = read_cells(write_page(home), "tokens")
    assert cells["synthetic-claims"][3:6] == ["–", "–", "–"]
    assert cells["generic-classification"][3] != "–"


def test_foreign_names_are_text(home):
    (home / "runs" / "plain").rename(home / "runs" / HOSTILE)
    page = write_page(home)
    assert "<img" not in page
    assert f">{html.escape(HOSTILE).replace('&quot;', '&#34;')}</a>" in page


@pytest.mark.parametrize("name", ["run.json", "scores.json", "metrics.jsonl"])
def test_damaged_runs_are_rows_of_their_own(home, name):
    (home / "runs" / "tuned" / name).write_bytes(b"\xff{")
    cells = read_cells(write_page(home), "runs")
    assert len(cells) == count_runs(home)
    assert [run for run, cell in cells.items() if cell[0].startswith("damaged")] == ["tuned"]


def test_a_log_that_a_training_is_writing_is_no_damage(home):
    (home / "runs" / "unfinished" / "metrics.jsonl").write_bytes(b"\xff{")
    cells = read_cells(write_page(home), "runs")
    assert not any(cell[0].startswith("damaged") for cell in cells.values())


def test_bytes_are_of_the_content_alone(home, tmp_path):
    first = write_page(home)
    other = shutil.copytree(
        home, tmp_path / "elsewhere" / "workspace", copy_function=shutil.copyfile
    )
    (other / "index.html").unlink()
    for path in other.rglob("*"):
        os.utime(path, (1, 1))
    assert write_page(other) == first
    before = (other / "index.html").stat().st_ino
    write_page(other)
    assert (other / "index.html").stat().st_ino == before, "an equal page is not written again"


def test_forty_five_runs_fit_in_a_page(home):
    for number in range(45 - count_runs(home)):
        shutil.copytree(home / "runs" / "tuned", home / "runs" / f"more-{number}")
    page = write_page(home)
    assert len(list_rows(page, "runs")) == 45
    assert len(page.encode()) < 1_000_000
    assert page.count("<svg") >= 45


def test_verbs_that_write_refresh_it_and_no_fault_of_it_counts(home, capsys):
    assert (
        main(
            ["report", "tuned", "scratch", "-w", str(home), "--out", str(home / "reports" / "both")]
        )
        == 0
    )
    assert "both" in [
        row[1].rpartition(">")[2].strip()
        for row in list_rows((home / "index.html").read_text(), "reports")
    ]
    (home / "index.html").unlink()
    (home / "index.html").mkdir()
    capsys.readouterr()
    assert main(["report", "tuned", "scratch", "-w", str(home), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["verdict"]
    assert err.count("warning[") == 1
    assert "bitimely dashboard" in err


def test_dry_runs_and_refusals_write_no_page(home, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["ingest", "synthetic", "--dry-run", "-w", str(empty)]) == 0
    assert main(["dashboard", "--dry-run", "-w", str(home)]) == 0
    assert main(["report", "tuned", "scratch", "--dry-run", "-w", str(home)]) == 0
    assert main(["report", "missing", "-w", str(home)]) == 2
    assert main(["dashboard", "-w", str(tmp_path / "missing")]) == 2
    refresh_dashboard(empty)
    assert list(empty.iterdir()) == []
    assert not (home / "index.html").exists()


def test_verify_does_not_read_it(home):
    before = bitimely.verify(home)
    write_page(home)
    (home / "index.html").write_text("altered")
    assert bitimely.verify(home) == before


def test_two_processes_at_once_leave_the_page_of_both(home, monkeypatch):
    """While one process writes the page that it has rendered, another one adds a run and
    refreshes.
    """
    write = storage.write_bytes
    second: list[threading.Thread] = []

    def add_run() -> None:
        refresh_dashboard(home)

    def slow(path, data):
        if path.name == "index.html" and not second:
            shutil.copytree(home / "runs" / "plain", home / "runs" / "late")
            second.append(threading.Thread(target=add_run))
            second[0].start()
        return write(path, data)

    monkeypatch.setattr(storage, "write_bytes", slow)
    refresh_dashboard(home)
    second[0].join()
    assert "late" in read_cells((home / "index.html").read_text(), "runs")


LOOK = """<script>addEventListener('load', () => {
  const box = document.querySelector('#filter'), seen = () => [...document.querySelectorAll('#runs tbody tr')].filter(r => r.offsetHeight > 0);
  const found = {width: document.documentElement.scrollWidth - innerWidth, all: seen().length};
  box.value = 'event-labels finished'; box.dispatchEvent(new Event('input')); found.filtered = seen().map(r => r.cells[0].textContent);
  found.said = document.querySelector('output').textContent;
  box.value = ''; box.dispatchEvent(new Event('input')); found.again = seen().length;
  document.querySelectorAll('#runs thead button')[9].click(); found.sorted = seen().map(r => Number(r.cells[9].dataset.v));
  found.drawn = [...document.querySelectorAll('#runs svg.spark')].filter(s => s.getBoundingClientRect().width > 40).length;
  found.first = document.querySelector('.headline').getBoundingClientRect().bottom;
  const p = document.createElement('pre'); p.textContent = JSON.stringify(found); document.body.append(p);
});</script></body>"""


@pytest.mark.slow
def test_page_filters_and_sorts_in_a_browser(home, chromium, tmp_path):  # noqa: F811  the fixture
    page = write_page(home)
    assert "CONSOLE" not in chromium(home / "index.html")[1]
    looked = tmp_path / "looked.html"
    looked.write_text(
        re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page).replace(
            "</body>", LOOK
        ),
        "utf-8",
    )
    found = json.loads(html.unescape(re.search(r"<pre>(.*?)</pre>", chromium(looked)[0])[1]))
    assert found["width"] <= 0
    assert found["all"] == found["again"] == count_runs(home)
    assert found["filtered"] == ["event-labels"]
    assert found["said"].startswith("1 of")
    assert found["sorted"] == sorted(found["sorted"])
    assert found["drawn"] == count_runs(home)
    assert found["first"] < 800


def test_what_is_kept_of_a_folder_goes_with_its_files(home):
    first = write_page(home)
    kept = home / ".index.json"
    assert write_page(home) == first
    tampered = kept.read_text().replace("finished, ", "finished after ")
    assert tampered != kept.read_text()
    kept.write_text(tampered)
    assert "finished after " in write_page(home), "folders that are as they were are not read"
    for path in (home / "runs").glob("*/run.json"):
        path.touch()
    assert write_page(home) == first
    kept.write_text("{")
    assert write_page(home) == first


def test_a_folder_in_which_nothing_was_recognised_is_no_damage(tmp_path, capsys):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "night.edf").write_bytes(b"x")
    ingest = ["ingest", "sleep-edf", str(tmp_path / "raw"), "-w", str(tmp_path / "w")]
    assert main(ingest) == 4
    assert "bitimely ingest generic" in capsys.readouterr().err
    page = write_page(tmp_path / "w")
    ((_, state, *_),) = list_rows(page, "cache")
    assert state.endswith("nothing was read")
    assert "amaged" not in page


@pytest.mark.parametrize(("steps", "words"), [(1, "1 step;"), (2000, "2,000 steps;")])
def test_a_training_of_one_step_is_named_in_the_singular(home, steps, words):
    folder = next(path for path in (home / "runs").iterdir() if (path / "run.json").is_file())
    record = RunRecord.load(folder / "run.json")
    losses = FinalLosses(step=steps, rel=0.5)
    page = training_page(folder, record.model_copy(update={"final": losses}))
    assert f": {words}" in page.verdict
