"""Writes docs/datasets.md: each data set by the registry, and results of the verbs on real samples.

python docs/datasets.py                                        the sections (docs/generate.py does it too; a test compares)
BITIMELY_TEST_DATA=SAMPLES python docs/datasets.py --measure   the tables as well: runs ingest and tokenize on the samples
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "datasets.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
SAMPLES: list[tuple[list[str], list[str]]] = [  # data set, folder, options; views
    (["sleep-edf", "sleep-edf"], ["", "staging"]),
    (["ptb-xl", "ptb-xl"], ["", "superclass", "multilabel"]),
    (["ptb-xl", "ptb-xl", "--rate", "500"], ["", "superclass", "multilabel"]),
    (["emg", "emg"], [""]),
    (["bidmc", "bidmc"], ["", "rr", "hr", "spo2"]),
    (["epilepsy", "esr"], ["", "five"]),
    (["ts", "tser/CardanoSentiment"], ["", "regression"]),
    (["ts", "tser/Covid3Month"], ["", "regression"]),
    (["ts", "tser/JapaneseVowels"], ["", "classification"]),
    (["ts", "tser/UnitTest"], ["", "classification"]),
    (["edf", "robust/edf"], [""]),
    (["edf", "robust/corrupt"], [""]),
    (["wfdb", "robust/wfdb"], [""]),
    (["wfdb", "robust/wfdb-multi"], [""]),
]


def format_table(columns: list[str], rows: list[list[Any]]) -> list[str]:
    """As Markdown."""
    cells = [
        [str(cell).replace("|", "\\|").replace("\n", " ") for cell in row]
        for row in [columns, *rows]
    ]
    return [
        "| " + " | ".join(row) + " |" for row in [cells[0], ["---"] * len(columns), *cells[1:]]
    ] + [""]


def run_verb(*words: str) -> tuple[int, dict[str, Any]]:
    """Exit code and output of a verb under --json, {} without output."""
    from bitimely_cli.main import main as command

    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()):
        code = command([*words, "--json"])
    return code, json.loads(out.getvalue() or "{}")


def measure_samples(samples: Path) -> list[str]:
    """The two tables: units that ingest accepts of each sample, and windows that tokenize makes of
    each view.
    """
    ingests, windows = [], []
    for words, views in SAMPLES:
        dataset, folder, *options = words
        with tempfile.TemporaryDirectory() as home:
            code, _ = run_verb("ingest", dataset, str(samples / folder), *options, "-w", home)
            report = json.loads((Path(home) / "cache" / dataset / "ingest_report.json").read_text())
            counts = report["counts"]
            reasons = report["reason_counts"]
            accepted = counts["accepted"] + counts["accepted_with_warning"]
            bad = sorted(
                {
                    r["code"]
                    for u in report["units"]
                    if u["status"] == "quarantined"
                    for r in u["reasons"]
                    if r["level"] == "error"
                }
            )
            counts_text = ", ".join(f"{name} {count}" for name, count in sorted(reasons.items()))
            ingests.append(
                [
                    f"`ingest {' '.join(words)}`",
                    code,
                    counts["units_seen"],
                    accepted,
                    counts["quarantined"],
                    ", ".join(bad) or "-",
                    counts_text or "-",
                ]
            )
            for view in views if accepted else []:
                data = f"{dataset}/{view}" if view else dataset
                code, result = run_verb("tokenize", data, "-w", home)
                if code:
                    windows.append(
                        [
                            f"`{data}` of {folder}{''.join(f' {o}' for o in options)}",
                            code,
                            *["-"] * 6,
                        ]
                    )
                    continue
                manifest = json.loads((Path(result["folder"]) / "manifest.json").read_text())
                audit = result["audit"]
                classes = [
                    f"{name} {sum(a['classes'].get(name, 0) for a in audit.values())}"
                    for name in result["class_names"]
                ]
                shape = f"{result['length']} x {result['channels']} at {result['rate']:g} Hz"
                each = {
                    key: " / ".join(
                        str(audit[split][key]) for split in ("train", "validation", "test")
                    )
                    for key in ("windows", "subjects")
                }
                windows.append(
                    [
                        f"`{data}` of {folder}{''.join(f' {o}' for o in options)}",
                        code,
                        result["windows"] + manifest["left_out"].get("gap", 0),
                        shape,
                        ", ".join(classes) or result["task"],
                        result["split"],
                        each["windows"],
                        each["subjects"],
                    ]
                )
    columns = [
        "command",
        "exit",
        "units",
        "accepted",
        "quarantined",
        "why quarantined",
        "all findings (reason, count)",
    ]
    out = format_table(columns, ingests)
    out += [
        "Windows before the split are those that lie in the recordings; a split by time leaves those in its gaps out.",
        "",
    ]
    return out + format_table(
        [
            "data",
            "exit",
            "windows before the split",
            "samples x channels",
            "windows a class",
            "split",
            "windows: train / validation / test",
            "subjects: train / validation / test",
        ],
        windows,
    )


def format_number(value: Any) -> str:
    """A count with separators, a dash for none."""
    return (
        "-"
        if value is None or value == ""
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )


def format_section(facts: dict[str, Any], views: list[dict[str, Any]]) -> list[str]:
    """One data set."""
    name = facts["name"]
    out = [f"## {name}", "", f"{facts['title']}.", ""]
    command, _, remark = facts["download"].partition("   ")
    download = f"`{command}` {remark}".strip() if command.startswith("wget") else facts["download"]
    lines = {
        "Licence": facts["licence"],
        "Source": facts["source"],
        "How to get it": download,
        "Layout": facts["layout"],
    }
    out += [f"* {key}: {value}" for key, value in lines.items() if value]
    source = "" if facts["layout"].startswith("none") else " ./raw"
    out += [
        "",
        "```bash",
        f"bitimely ingest {name}{source}",
        *(f"bitimely tokenize {view['name']}" for view in views),
        "```",
        "",
    ]
    rows = [
        [
            f"`{view['name']}`",
            view["task"],
            ", ".join(view["channels"]) or "as recorded",
            f"{view['window']:,} at {view['rate']:g} Hz" if view["window"] else "as recorded",
            ", ".join(view["classes"]) or "-",
            view["split"],
            view["help"],
        ]
        for view in views
    ]
    out += format_table(
        ["view", "task", "channels", "window", "classes", "split", "what it is"], rows
    )
    paper = {
        view: stated for view, stated in facts["statistics"].items() if isinstance(stated, dict)
    }
    if paper:
        keys = list(dict.fromkeys(key for stated in paper.values() for key in stated))
        out += ["What the paper states:", ""]
        out += format_table(
            ["view", *keys],
            [
                [
                    f"`{name}/{view}`" if view else f"`{name}`",
                    *(format_number(stated.get(key)) for key in keys),
                ]
                for view, stated in paper.items()
            ],
        )
        out += [
            f"{note}.".replace("..", ".") + "\n"
            for note in [facts["statistics"].get("note")]
            if note
        ]
    out += [f"{notice}\n" for notice in dict.fromkeys(view["notice"] for view in views) if notice]
    return [
        *out,
        "Rules:",
        "",
        *(
            f"* {key.replace('_', ' ')}: {rule.replace('<', '&lt;')}"
            for key, rule in facts["rules"].items()
        ),
        "",
    ]


def format_page(tables: str) -> str:
    """The page: sections from the registry, `tables` as they were measured."""
    from bitimely_core import catalog, registry

    views = catalog.list_rows("views", Path())
    found = [
        facts
        for facts in catalog.list_rows("datasets", Path())
        if registry.datasets[facts["name"]].facts.kind == "recordings"
    ]
    head = [
        "# Data sets of recordings",
        "",
        "Made by `python docs/generate.py` from `bitimely list datasets --json` and `bitimely list views --json`. Own recordings: [generic.md](generic.md).",
        "",
        f"Here: {', '.join(f'[{name}](#{name})' for name in (facts['name'] for facts in found))}, and [what the verbs make of real samples](#real-samples).",
        "",
    ]
    sections = [
        line
        for facts in found
        for line in format_section(
            facts, [v for v in views if v["name"].split("/")[0] == facts["name"]]
        )
    ]
    tail = [
        "## Real samples",
        "",
        "Small samples in the official layouts, through the verbs themselves. Exit 0: all is well, 3: published with something quarantined, 4: refused, here because",
        "nothing is left or there are no labels. Made by `BITIMELY_TEST_DATA=SAMPLES python docs/datasets.py --measure`.",
        "",
        BEGIN,
        "",
    ]
    return "\n".join([*head, *sections, *tail]) + f"{tables.strip()}\n\n{END}\n"


def read_tables() -> str:
    """The measured tables of the present page."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0] if PAGE.exists() else ""


def main() -> None:
    """Write the page."""
    tables = read_tables()
    if "--measure" in sys.argv:
        tables = "\n".join(measure_samples(Path(os.environ["BITIMELY_TEST_DATA"])))
    PAGE.write_text(format_page(tables))


if __name__ == "__main__":
    main()
