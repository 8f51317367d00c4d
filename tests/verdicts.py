"""Verdicts on the shared family of malformed inputs as a table: `python tests/verdicts.py [--only
FAMILY]`.

A case is right when the exit code, the verdict, the reason and the named file are those of its
manifest, nothing forbidden is printed or written, and no traceback is shown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from test_bad_inputs import FAMILIES, SCRIPT, check_refusal, check_report, command

ALL = f"{FAMILIES}|CL"
TITLES = {
    "EDF": "EDF and BDF",
    "WF": "WFDB",
    "PX": "PTB-XL metadata",
    "UC": "epilepsy table",
    "TS": ".ts",
    "SE": "archives and pickles",
    "CL": "claims",
}


def judge(case: dict[str, Any], out: Path) -> tuple[int, str]:
    """Exit code of a case, and what is wrong with it ("": nothing)."""
    folder, workspace = out / case["command"]["dir"], out / f"{case['id']}-space"
    code, printed, err = command(
        [
            part.replace("{dir}", str(folder)).replace("{workspace}", str(workspace))
            for part in case["command"]["argv"]
        ]
    )
    try:
        assert "Traceback" not in err
        written = (
            b"".join(path.read_bytes() for path in sorted(workspace.rglob("*")) if path.is_file())
            + (printed + err).encode()
        )
        assert not [text for text in case["forbid"] if text.encode() in written], "forbidden text"
        if case["command"]["dataset"] is None:
            check_refusal(case, code, err)
        else:
            # of claims they are subjects and codes
            units = {} if case["command"]["dataset"] != "pophr" else {"good": [], "bad": []}
            check_report({**case, **units}, code, json.loads(printed), err)
    except (AssertionError, KeyError, ValueError) as fault:
        return code, f"{type(fault).__name__}: {str(fault)[:200]}"
    return code, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=ALL, help="a family, an id, or a regular expression")
    only = parser.parse_args().only
    right: dict[str, Counter[str]] = defaultdict(Counter)
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    exits: dict[str, Counter[int]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cases"
        subprocess.run(
            [sys.executable, str(SCRIPT), str(out), "--only", only], check=True, capture_output=True
        )
        for case in json.loads((out / "manifest.json").read_text()):
            family = next(name for name in TITLES if case["id"].startswith(name))
            code, fault = judge(case, out)
            seen[family][case["severity"]] += 1
            right[family][case["severity"]] += not fault
            exits[family][code] += 1
            if fault:
                print(f"{case['id']} exit {code}: {fault}", file=sys.stderr, flush=True)
    print("| family | S1 | S2 | S3 | exit codes |\n|---|---|---|---|---|")
    for family, title in TITLES.items():
        if family in seen:
            cells = [
                f"{right[family][s]} of {seen[family][s]}" if seen[family][s] else ""
                for s in ("S1", "S2", "S3")
            ]
            print(
                f"| {title} | {' | '.join(cells)} | {', '.join(f'{code}: {n}' for code, n in sorted(exits[family].items()))} |"
            )


if __name__ == "__main__":
    main()
