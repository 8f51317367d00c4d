"""Every benchmark runs in its quick form and prints peers, ratios and bounds in the same columns."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from side_by_side import HEAD, Row, make_parser, report  # of benchmarks/

FOLDER = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if path.name != "side_by_side.py")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_runs_and_prints_the_table(script: str) -> None:
    """No figure is looked at: the machine may be busy."""
    command = [sys.executable, FOLDER / script, "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    title, *table = done.stdout.splitlines()
    if title.startswith(f"{script}: "):
        assert title.endswith("nothing measured")
        assert not table
        return
    assert table[0].split() == list(HEAD)
    rows = [re.split(r" {2,}", line.strip()) for line in table[1:]]
    for _, _, value, *bound in rows:
        assert re.match(r"-?[\d.,e+-]+$|nan$", value.split()[0])
        assert not bound or re.fullmatch(r"[<>]= [\d.e+-]+", bound[0])
    assert {row[1] for row in rows} - {"-"} or " is skipped: " in done.stderr


def test_a_missed_bound_is_marked_and_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    parser = make_parser("", "little")
    rows = [
        Row(figure="a step", peer="a peer", value=1.4, least=1.5),
        Row(figure="a page", value=0.2, unit="CPU s", most=0.3),
    ]
    assert report("both", rows, parser.parse_args([])) == 1
    *_, missed, kept = capsys.readouterr().out.splitlines()
    assert missed.split() == ["a", "step", "a", "peer", "1.4", ">=", "1.5", "MISSED"]
    assert kept.split() == ["a", "page", "-", "0.2", "CPU", "s", "<=", "0.3"]
    assert report("both", rows, parser.parse_args(["--quick"])) == 0
    assert "MISSED" not in capsys.readouterr().out
    assert report("one", rows[1:], parser.parse_args([])) == 0
