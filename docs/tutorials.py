"""Runs the commands of the tutorials and stores what they print: `python docs/tutorials.py
[NAME...]`, some minutes each.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

PAGES = Path(__file__).parent / "tutorials"
FENCE = re.compile(r'^```(console|\w+ title="([\w.-]+)")\n(.*?)^```$', flags=re.M | re.S)
LIMIT = 600.0  # seconds to the end of a page


def run_command(line: str, folder: Path) -> str:
    """What a command prints on stdout in a terminal of 100 columns, on one thread. Raises
    RuntimeError with its errors.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    environment.pop("BITIMELY_WORKSPACE", None)
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    if done.returncode not in {0, 3}:  # 3: some rows are quarantined
        raise RuntimeError(f"$ {line}\nexit {done.returncode}: {done.stderr}{done.stdout}")
    return "\n".join(text.rstrip() for text in done.stdout.splitlines()).strip("\n")


def run_page(text: str, folder: Path) -> str:
    """The page with the outputs of its commands, run one after the other in an empty folder; blocks
    with a title are written to files first.
    """

    def run_block(found: re.Match[str]) -> str:
        kind, name, body = found.groups()
        if name:
            (folder / name).write_text(body)
            return found[0]
        parts = []
        for line in re.findall(r"^\$ (.*)$", body, flags=re.M):
            output = run_command(line, folder)
            parts.append(f"$ {line}\n{output}\n" if output else f"$ {line}\n")
        return f"```{kind}\n" + "\n".join(parts) + "```"

    return FENCE.sub(run_block, text)


def hide_numbers(text: str) -> str:
    """A page without numbers, units of time, widths of columns and verdicts: what every machine
    prints alike.
    """
    kept = "\n".join(line for line in text.splitlines() if "Holm-corrected" not in line)
    return re.sub(r"[ ─]+", " ", re.sub(r"[-+−]?\d[\d.,]*(e[-+]?\d+)?( (s|min|h)\b)?", "#", kept))


def main(names: list[str]) -> None:
    """Rewrite all, or those with these names."""
    for page in sorted(PAGES.glob("*.md")):
        if not names or page.stem in names:
            start = time.monotonic()
            with TemporaryDirectory() as folder:
                page.write_text(run_page(page.read_text(), Path(folder)))
            print(page.name, round(time.monotonic() - start), "s")


if __name__ == "__main__":
    main(sys.argv[1:])
