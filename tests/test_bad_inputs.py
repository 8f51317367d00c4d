"""Malformed, hostile and unusual but valid inputs of every biosignal data set, through the command
line, against their manifest.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from samples import BAD_INPUTS

from bitimely_cli.main import main
from bitimely_core import cache
from bitimely_core.registry import datasets
from bitimely_core.report import ingest_page
from bitimely_core.store import manifests

SCRIPT = BAD_INPUTS / "make_bad_inputs.py"
FAMILIES = "EDF|WF|PX|UC|TS|SE"
LANDED = ("accepted", "accepted_with_warning")
BAR = {"S1": 1.0, "S2": 0.98, "S3": 0.9}  # share of the cases of a severity
HANG = 30.0  # seconds
MEMORY = 300 << 20  # bytes above what a good ingest takes
GOOD = {  # a complete source of the same kind, by data set: valid cases of the generator
    "sleep-edf": "EDF18-record-1s",
    "ptb-xl": "WF00-control",
    "epilepsy": "UC00-control",
    "ts": "TS00-control",
    "ppg-dalia": "SE02-pkl-valid-latin1",
}
# foreign text that must not get into the page; for the others none is drawn
PAGED = ("EDF23", "EDF24", "EDF25", "EDF26", "WF17")
UNIT = {"sleep-edf": "SC4021", "ptb-xl": "00003"}  # how the files of the bad unit begin
# lines of one table are quarantined
ROW_LOST = ("UC02", "UC03", "UC04", "UC08", "TS04", "TS06", "TS08", "TS09")

pytestmark = pytest.mark.slow


def load_manifest() -> dict[str, str]:
    """Severity of every case by its id, without building any."""
    if not SCRIPT.is_file():
        return {}
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--list"], check=True, capture_output=True, text=True
    )
    lines = [
        line.split()
        for line in run.stdout.splitlines()
        if line.startswith(tuple(FAMILIES.split("|")))
    ]
    return {words[0]: words[4] for words in lines}


CASES = load_manifest()


def picture(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Kind, size and time of everything in a folder; opens nothing (there is a pipe)."""
    found = {str(path.relative_to(folder)): path.lstat() for path in folder.rglob("*")}
    return {name: (info.st_mode, info.st_size, info.st_mtime_ns) for name, info in found.items()}


def peak() -> int:
    """Most bytes of memory of this process since the last call; 0 where the system does not
    tell.
    """
    with contextlib.suppress(OSError):
        most = next(
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("VmHWM")
        )
        Path("/proc/self/clear_refs").write_text("5")
        return int(most.split()[1]) << 10
    return 0


def command(argv: list[str]) -> tuple[int, str, str]:
    """Exit code, output and messages of `bitimely`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    return code, out.getvalue(), err.getvalue()


def ingest_folder(dataset: str, folder: Path, workspace: Path) -> dict[str, Any]:
    """The report of an ingest without options."""
    return dict(cache.ingest(dataset, folder, workspace / "cache" / dataset))


def load_report(workspace: Path, dataset: str) -> dict[str, Any]:
    """Hashes of all that is published, names of shards included."""
    return dict(manifests.read_manifest(workspace / "cache" / dataset)["files"])


def reasons_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [*report["reasons"], *(reason for unit in report["units"] for reason in unit["reasons"])]


def verdict(code: int, report: dict[str, Any]) -> str:
    """What became of the case, in the manifest's words."""
    lost = report["counts"]["quarantined"] or any(table["quarantined"] for table in report["rows"])
    if code == 4:
        return (
            "quarantine"
            if lost and report["counts"]["quarantined"] < report["counts"]["units_seen"]
            else "fail"
        )
    if code == 3:
        return "quarantine"
    assert code == 0
    assert not lost
    return (
        "accept_warn"
        if any(reason["level"] == "warning" for reason in reasons_of(report))
        else "accept"
    )


def check_refusal(case: dict[str, Any], code: int, err: str) -> None:
    """A command that is no ingest of a folder: one line with a reason code and the file's name."""
    assert code in case["exits"], (code, err)
    lines = [line for line in err.splitlines() if line.startswith("error[")]
    codes = {line[6:].partition("]")[0] for line in lines}
    assert codes & {case["reason"], *case["reason_alt"]}, err
    assert any(name in line for name in case["names"] for line in lines), err


def check_report(case: dict[str, Any], code: int, report: dict[str, Any], err: str) -> None:
    """Verdict, reason, file name, units and accounting of an ingest."""
    allowed = {case["expect"], *case["alt"]}
    found = verdict(code, report)
    # the only unit is quarantined: nothing is left
    if code == 4 and case["expect"] == "quarantine" and 4 in case["exits"]:
        assert report["counts"]["quarantined"] == report["counts"]["units_seen"] > 0
        found = "quarantine"
    assert found in (allowed | {"accept_warn"} if "accept" in allowed else allowed), err
    assert report["exit_code"] == code
    if found == case["expect"] and found not in {"quarantine", "accept"}:
        assert code in case["exits"]
    codes = {case["reason"], *case["reason_alt"]}
    matching = [reason for reason in reasons_of(report) if reason["code"] in codes]
    if case["reason"] != "-" and found != "accept":
        if case["reason"] == "phi":
            assert matching
        else:
            assert any(reason["level"] != "info" for reason in matching), reasons_of(report)
            messages = "\n".join(
                [
                    *(reason["message"] for reason in matching),
                    (report["error"] or {}).get("message", ""),
                ]
            )
            assert any(base in messages for base in case["names"]), messages
    elif case["reason"] == "phi":
        assert matching
    assert "internal" not in report["reason_counts"]
    status = {unit["unit"]: unit["status"] for unit in report["units"]}
    if found != "fail":
        assert all(status[unit] in LANDED for unit in case["good"])
    for bad in case["bad"] if found == "quarantine" else ():
        if bad.startswith("row "):
            row = int(bad.removeprefix("row "))
            assert any(
                reason["row"] == row or str(row) in reason["examples"] for reason in matching
            )
        else:
            assert status[bad] == "quarantined"
    counts = report["counts"]
    assert (
        counts["units_seen"]
        == sum(counts[key] for key in (*LANDED, "quarantined"))
        == len(report["units"])
    )
    for table in report["rows"]:
        assert table["seen"] == table["used"] + table["dropped"] + table["quarantined"]


def check_neighbours(
    case: dict[str, Any], report: dict[str, Any], folder: Path, workspace: Path
) -> None:
    """What is good lands as if there was nothing bad beside it: against an ingest of the source
    without the bad unit or rows.
    """
    dataset = case["command"]["dataset"]
    units = case["good"] and case["bad"]
    if not units and not case["id"].startswith(ROW_LOST):
        return
    less, again = workspace / "less", workspace / "less-space"
    shutil.copytree(
        folder,
        less,
        ignore=lambda _, names: [
            name for name in names if units and name.startswith(UNIT[dataset])
        ],
    )
    lost = {
        (Path(r["file"]).name, row.removeprefix("row "))
        for r in reasons_of(report)
        for row in r["examples"] or [f"row {r['row']}"]
        if r["file"]
    }
    for path in less.rglob("*.csv" if units else "*"):
        lines = path.read_bytes().splitlines(keepends=True)
        bad = [
            line.startswith(b"3,") if units else (path.name, str(row)) in lost
            for row, line in enumerate(lines, 1)
        ]
        path.write_bytes(
            b"".join(line for line, left_out in zip(lines, bad, strict=True) if not left_out)
        )
    alone = ingest_folder(dataset, less, again)
    assert alone["exit_code"] == 0
    if units:
        hashes, wanted = (
            {unit["unit"]: unit["content_sha256"] for unit in found["units"]}
            for found in (report, alone)
        )
        assert {unit: hashes[unit] for unit in case["good"]} == {
            unit: wanted[unit] for unit in case["good"]
        }
        return
    kept, matching = (
        [
            [signal.samples.tobytes() for signal in record.signals]
            for record in cache.open_cache(space / "cache" / dataset).records()
        ]
        for space in (workspace, again)
    )
    assert kept
    assert kept == matching


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What is wrong with the handling of a case, "" for nothing; each case is run once, all in this
    process.
    """
    root = tmp_path_factory.mktemp("bad")
    out = root / "cases"
    subprocess.run(
        [sys.executable, str(SCRIPT), str(out), "--only", FAMILIES], check=True, capture_output=True
    )
    manifest = {case["id"]: case for case in json.loads((out / "manifest.json").read_text())}

    @functools.cache
    def ingest_valid(dataset: str) -> tuple[Path, dict[str, Any], dict[str, Any], int]:
        """Of a good source: a copy, the report and files of its ingest, the memory that took."""
        folder, workspace = root / f"{dataset}-good", root / f"{dataset}-clean"
        shutil.copytree(out / GOOD[dataset], folder)
        peak()
        report = ingest_folder(dataset, folder, workspace)
        assert report["exit_code"] == 0
        return folder, report, load_report(workspace, dataset), peak()

    def run(case: dict[str, Any]) -> None:
        assert case["build_error"] is None
        name, dataset = case["id"], case["command"]["dataset"]
        folder, workspace = out / case["command"]["dir"], root / f"{name}-space"
        workspace.mkdir()
        argv = [
            part.replace("{dir}", str(folder)).replace("{workspace}", str(workspace))
            for part in case["command"]["argv"]
        ]
        good, clean, files, usual = ingest_valid(dataset or "sleep-edf")
        before, began = picture(folder), time.monotonic()
        peak()
        with pytest.MonkeyPatch.context() as patch:
            if not name.startswith(PAGED):
                patch.setattr(ingest_page, "write_ingest_page", lambda *_: [])
            code, output, err = command(argv)
            most = peak()
            shards = {path: path.stat().st_mtime_ns for path in workspace.rglob("recordings-*")}
            again = command(argv)
        assert time.monotonic() - began < HANG
        # torch and matplotlib are not the input's doing
        assert most < usual + MEMORY or argv[0] != "ingest" or name.startswith(PAGED)
        assert "Traceback" not in err
        assert picture(folder) == before

        # nothing that must not be anywhere is anywhere
        written = (
            b"".join(path.read_bytes() for path in sorted(workspace.rglob("*")) if path.is_file())
            + (output + err).encode()
        )
        assert not [text for text in case["forbid"] if text.encode() in written]
        assert not [
            path
            for path in (folder, workspace, root, Path())
            if (path / "PWNED").exists() or (path / "evil.txt").exists()
        ]
        assert again[0] == code
        if dataset is None:
            check_refusal(case, code, err)
            return
        report, repeated = json.loads(output), json.loads(again[1])
        check_report(case, code, report, err)

        # a second run does nothing, and says the same
        assert all(
            repeated[key] == report[key]
            for key in ("units", "counts", "rows", "generation", "content_sha256")
        )
        assert {path: path.stat().st_mtime_ns for path in workspace.rglob("recordings-*")} == shards
        if report["published"]:
            check_neighbours(case, report, folder, workspace)

        # with good files in the place of the bad ones it is as if they had always been there
        folder.rename(root / f"{name}-was")
        shutil.copytree(good, folder)
        repaired = ingest_folder(dataset, folder, workspace)
        assert (repaired["exit_code"], repaired["content_sha256"]) == (0, clean["content_sha256"])
        assert load_report(workspace, dataset) == files

    @functools.cache
    def judge_file(name: str) -> str:
        try:
            run(manifest[name])
        except Exception as error:  # a failing one is not run twice
            return f"{type(error).__name__}: {error}"
        return ""

    return judge_file


@pytest.mark.skipif(
    not CASES, reason="the generator of bad inputs is not there: set BITIMELY_BAD_INPUTS"
)
def test_cases_of_every_biosignal_data_set_are_found() -> None:
    assert set(GOOD) <= set(datasets)
    assert len(CASES) >= 101
    assert set(CASES.values()) == set(BAR)


@pytest.mark.parametrize("name", CASES)
def test_bad_inputs_follow_their_manifest(name: str, judge: Callable[[str], str]) -> None:
    assert judge(name) == ""


@pytest.mark.skipif(
    not CASES, reason="the generator of bad inputs is not there: set BITIMELY_BAD_INPUTS"
)
def test_the_account_by_severity(
    judge: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Counter(severity for name, severity in CASES.items() if judge(name) == "")
    seen = Counter(CASES.values())
    with capsys.disabled():
        print(
            "\nbad inputs: "
            + ", ".join(
                f"{severity} {kept[severity]} of {seen[severity]}" for severity in sorted(seen)
            )
        )
    assert all(kept[severity] >= share * seen[severity] for severity, share in BAR.items())
