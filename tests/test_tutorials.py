"""The tutorials: every command runs from an empty folder within ten minutes of one core, and prints
what the page shows.
"""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

import pytest
from samples import SAMPLES

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))
import tutorials  # noqa: E402

PAGES = sorted(tutorials.PAGES.glob("*.md"))


def measure_children() -> float:
    """CPU seconds of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_runs_and_prints_what_it_shows(page: Path, tmp_path: Path) -> None:
    start, text = measure_children(), page.read_text()
    found = tutorials.run_page(text, tmp_path)
    assert tutorials.hide_numbers(found) == tutorials.hide_numbers(text), (
        "run: python docs/tutorials.py"
    )
    assert measure_children() - start < tutorials.LIMIT, (
        "seconds of one core; on a busy machine the clock says more"
    )
    sample = SAMPLES / "sleep-edf" / "sleep-cassette" / "SC4001E0-PSG.edf"
    if page.stem == "sleep" and sample.is_file():  # what the page says about nights of one's own
        output = tutorials.run_command(
            f"bitimely predict features-staging '{sample}' --out own", tmp_path
        )
        assert "1 recordings in own" in output or "1 recording in own" in output


def test_there_is_a_tutorial_for_each_reader_with_outputs_of_all_its_blocks() -> None:
    assert [page.stem for page in PAGES] == ["claims", "method", "sleep"]
    for page in PAGES:
        blocks = re.findall(r"^```console\n(.*?)^```$", page.read_text(), flags=re.M | re.S)
        assert len(blocks) >= 3
        for block in blocks:
            assert block.startswith(("$ bitimely ", "$ python ", "$ cp "))
            assert re.search(r"^(?!\$).", block, flags=re.M), (
                "a block without output; run: python docs/tutorials.py"
            )


def test_the_runner_stores_outputs_and_files_and_stops_at_a_fault(tmp_path: Path) -> None:
    text = 'a\n\n```text title="x.txt"\n1\n```\n\n```console\n$ cat x.txt\nold\n$ echo 2.5e-3 >> x.txt\n$ wc -l x.txt\n```\n'
    found = tutorials.run_page(text, tmp_path)
    assert (
        found
        == 'a\n\n```text title="x.txt"\n1\n```\n\n```console\n$ cat x.txt\n1\n\n$ echo 2.5e-3 >> x.txt\n\n$ wc -l x.txt\n2 x.txt\n```\n'
    )
    assert tutorials.hide_numbers("a  1,234.5 ──── -2e-3") == "a # #"
    with pytest.raises(RuntimeError, match="exit 2"):
        tutorials.run_page("```console\n$ bitimely analyse\n```\n", tmp_path)
