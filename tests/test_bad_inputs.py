"""Malformed, hostile and odd-but-valid inputs of every biosignal data set, through the command line, against their manifest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bitimely_cli.main import main
from bitimely_core.registry import datasets, members

members("bitimely_core.datasets")

BAD = Path(os.environ.get("BITIMELY_BAD_INPUTS", Path(__file__).parents[2] / "shared" / "tools" / "bad_inputs"))
SCRIPT = BAD / "make_bad_inputs.py"
FAMILIES = "EDF|WF|PX|UC|TS"
LANDED = ("accepted", "accepted_with_warning")

pytestmark = pytest.mark.slow


def listed() -> list[tuple[str, str]]:
    """(id, data set) of every case, without building any."""
    if not SCRIPT.is_file():
        return []
    run = subprocess.run([sys.executable, str(SCRIPT), "--list"], check=True, capture_output=True, text=True)
    found = [line.split()[:2] for line in run.stdout.splitlines() if line.startswith(tuple(FAMILIES.split("|")))]
    return [(case, dataset) for case, dataset in found if dataset in datasets]


CASES = listed()


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """The folder with all cases, and what the manifest says of each."""
    out = tmp_path_factory.mktemp("bad")
    subprocess.run([sys.executable, str(SCRIPT), str(out), "--only", FAMILIES], check=True, capture_output=True)
    return out, {case["id"]: case for case in json.loads((out / "manifest.json").read_text())}


def picture(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Kind, size and time of everything in a folder; opens nothing (there is a pipe)."""
    found = {str(path.relative_to(folder)): path.lstat() for path in folder.rglob("*")}
    return {name: (info.st_mode, info.st_size, info.st_mtime_ns) for name, info in found.items()}


def reasons_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [*report["reasons"], *(reason for unit in report["units"] for reason in unit["reasons"])]


def verdict(code: int, report: dict[str, Any]) -> str:
    """What became of the case, in the manifest's words."""
    lost = report["counts"]["quarantined"] or any(table["quarantined"] for table in report["rows"])
    if code == 4:
        return "quarantine" if lost and report["counts"]["quarantined"] < report["counts"]["units_seen"] else "fail"
    if code == 3:
        return "quarantine"
    assert code == 0
    assert not lost
    return "accept_warn" if any(reason["level"] == "warning" for reason in reasons_of(report)) else "accept"


@pytest.mark.skipif(not CASES, reason="the generator of bad inputs is not there: set BITIMELY_BAD_INPUTS")
def test_cases_of_every_biosignal_data_set_are_found() -> None:
    assert {dataset for _, dataset in CASES} >= {"sleep-edf", "ptb-xl", "epilepsy"}
    assert len(CASES) >= 75


@pytest.mark.parametrize("name", [case for case, _ in CASES])
def test_the_manifest_is_kept(
    name: str, cases: tuple[Path, dict[str, dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, manifest = cases
    case = manifest[name]
    assert case["build_error"] is None
    folder = root / case["command"]["dir"]
    argv = [part.replace("{dir}", str(folder)).replace("{workspace}", str(tmp_path)) for part in case["command"]["argv"]]
    before = picture(folder)
    code = main(argv)
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert "Traceback" not in err
    assert picture(folder) == before

    # the verdict, and its reason with the name of a file
    allowed = {case["expect"], *case["alt"]}
    found = verdict(code, report)
    assert found in (allowed | {"accept_warn"} if "accept" in allowed else allowed), err
    assert report["exit_code"] == code
    if found == case["expect"] and found not in {"quarantine", "accept"}:
        assert code in case["exits"]
    codes = {case["reason"], *case["reason_alt"]}
    told = [reason for reason in reasons_of(report) if reason["code"] in codes]
    if case["reason"] != "-" and found != "accept":
        assert any(reason["level"] != "info" for reason in told), reasons_of(report)
        messages = "\n".join([*(reason["message"] for reason in told), (report["error"] or {}).get("message", "")])
        assert any(base in messages for base in case["names"]), messages
    elif case["reason"] == "phi":
        assert told
    assert "internal" not in report["reason_counts"]

    # the units
    status = {unit["unit"]: unit["status"] for unit in report["units"]}
    if found != "fail":
        assert all(status[unit] in LANDED for unit in case["good"])
    for bad in case["bad"] if found == "quarantine" else ():
        if bad.startswith("row "):
            row = int(bad.removeprefix("row "))
            assert any(reason["row"] == row or str(row) in reason["examples"] for reason in told)
        else:
            assert status[bad] == "quarantined"
    counts = report["counts"]
    assert counts["units_seen"] == sum(counts[key] for key in (*LANDED, "quarantined")) == len(report["units"])
    for table in report["rows"]:
        assert table["seen"] == table["used"] + table["dropped"] + table["quarantined"]

    # nothing that must not be anywhere is anywhere
    written = b"".join(path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()) + (out + err).encode()
    assert not [text for text in case["forbid"] if text.encode() in written]
    assert not list(root.rglob("PWNED"))
    assert not Path("PWNED").exists()

    # a second run does nothing, and says the same
    assert main(argv) == code
    again = json.loads(capsys.readouterr().out)
    assert {key: again[key] for key in ("units", "counts", "rows", "generation")} == {
        key: report[key] for key in ("units", "counts", "rows", "generation")
    }
