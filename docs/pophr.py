"""The table of docs/pophr.md, measured: the DE-SynPUF sample under each leakage policy, through the
command line.

BITIMELY_TEST_DATA=FOLDER python docs/pophr.py
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("pophr.md")
MARK = "<!-- measured by docs/pophr.py -->"
POLICIES = {
    "keep": "",
    "drop-icd": "--leakage drop-icd",
    "drop-phecode": "--leakage drop-phecode",
    "landmark": "--landmark 365,30,365 --leakage drop-phecode --min-codes 5",
}
LABELS = ("chf", "copd", "diabetes")


def run_command(line: str, home: str) -> dict[str, Any]:
    """The JSON output of a command."""
    from bitimely_cli.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = main([*line.split(), "-w", home, "--json"])
    if code not in (0, 3):
        raise SystemExit(f"bitimely {line}: exit {code}")
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def format_metric(metric: dict[str, Any]) -> str:
    """A value with its interval."""
    if metric["value"] is None:
        return "not defined"
    return f"{metric['value']:.2f}" + (
        f" ({metric['lo']:.2f} to {metric['hi']:.2f})" if metric["lo"] is not None else ""
    )


def main() -> None:
    """Measure and write the table."""
    data = Path(os.environ["BITIMELY_TEST_DATA"])
    rows = [
        "| input | label | test subjects (cases) | chance | sequence length only | best single code | model (95 % CI over subjects) |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as home:
        source = f"{data / 'de-synpuf'} --source synpuf --phecode-map {data / 'phecode' / 'phecode_map_v1_2_icd9cm.csv'}"
        # the sample is public; a random key would change the order of the subjects each time
        key = Path(home) / "public.key"
        key.write_bytes(bytes(32))
        run_command(f"ingest pophr {source} --rules ccw --no-select --id-key {key}", home)
        for name, options in POLICIES.items():
            # synthetic persons
            run_command(f"tokenize pophr --no-select --small-counts --name {name} {options}", home)
            run_command(
                f"pretrain --preset tiny --data {name} --objective next-previous-strict --epochs 10 --lr 1e-3 --run {name}",
                home,
            )
            run_command(
                f"finetune {name} --data {name} --fraction 1 --epochs 20 --lr 1e-3 --run {name}-labels",
                home,
            )
            scores = run_command(f"evaluate {name}-labels", home)
            baselines = json.loads((Path(home) / "tokens" / name / "statistics.json").read_bytes())[
                "leaks"
            ]
            for label in LABELS:
                entry, leak = scores["by_class"][label], baselines[label]
                n = leak["subjects"]["test"]
                alone, best = leak["length"]["test"], leak["best"]
                lines = [
                    f"{v:.2f}" if v is not None else "not defined"
                    for v in (entry["base_rate"], alone, best["count"]["test"] if best else None)
                ]
                code = f" ({best['phecode']})" if best else ""
                rows.append(
                    f"| {name} | {label} | {n} ({entry['support']}) | {lines[0]} | {lines[1]} | {lines[2]}{code} | {format_metric(entry['auprc'])} |"
                )
    head, _, rest = PAGE.read_text().partition(MARK)
    _, _, tail = rest.partition(MARK)
    PAGE.write_text(f"{head}{MARK}\n\n" + "\n".join(rows) + f"\n\n{MARK}{tail}")


if __name__ == "__main__":
    main()
