"""The gallery of the site: runs the scripts of docs/gallery/ and makes a page of what they print
and draw. `python docs/gallery.py` runs what has changed.
"""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
ORDER = ("stages", "spectra", "splits", "filters", "retention", "noise", "hypnodensity", "length")
SCRIPTS = tuple(ROOT / "docs" / "gallery" / f"{name}.py" for name in ORDER)
KEPT = ROOT / "build" / "gallery"  # results by the hash of script and packages


class Example(NamedTuple):
    """A script that was run."""

    name: str
    title: str
    text: str
    code: str
    printed: str
    figure: bytes  # SVG


def hash_sources(script: Path) -> str:
    """The SHA-256 of a script with all of the packages."""
    found = hashlib.sha256(script.read_bytes())
    for package in ("bitimely", "bitimely_cli", "bitimely_core"):
        for path in sorted((ROOT / package).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


def run_script(script: Path) -> Example:
    """What a script prints and draws, in an empty folder, on one thread, with warnings as errors.
    Raises RuntimeError with its errors.
    """
    tree = ast.parse(script.read_text())
    about = ast.get_docstring(tree) or ""
    title, _, text = about.partition(".\n\n")
    code = "\n".join(script.read_text().splitlines()[tree.body[0].end_lineno :]).strip() + "\n"
    kept = KEPT / hash_sources(script)
    if not (kept / "figure.svg").is_file():
        with TemporaryDirectory() as folder:
            path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
            environment = {
                **os.environ,
                "MPLBACKEND": "agg",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": path,
            }
            command = [sys.executable, "-W", "error", str(script), "figure.svg"]
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
            )
            if done.returncode:
                raise RuntimeError(f"{script.name}: {done.stderr}")
            kept.mkdir(parents=True, exist_ok=True)  # another build may be at it
            (kept / "printed.txt").write_text(done.stdout)
            own = kept / f"figure.svg.{os.getpid()}"
            own.write_bytes((Path(folder) / "figure.svg").read_bytes())
            own.replace(kept / "figure.svg")
    return Example(
        script.stem,
        title,
        text.replace("\n", " "),
        code,
        (kept / "printed.txt").read_text(),
        (kept / "figure.svg").read_bytes(),
    )


def list_scripts() -> str:
    """The page without results, as Markdown: what each script shows, and where it is."""
    lines = [
        "# Gallery",
        "",
        "Eight short scripts. `make gallery` builds this site with their figures.",
        "",
    ]
    for script in SCRIPTS:
        about = ast.get_docstring(ast.parse(script.read_text())) or ""
        title, _, text = about.partition(".\n\n")
        lines.append(f"* **{title}** (`docs/gallery/{script.name}`). " + text.replace("\n", " "))
    return "\n".join(lines)


def format_page(examples: list[Example]) -> str:
    """The page as Markdown, with the figures beside it."""
    parts = [
        "# Gallery",
        "",
        "Eight short scripts, run when this site was built. Data are made up; with real ones the first lines change.",
        "",
    ]
    for one in examples:
        code = "".join(
            f"    {line}".rstrip() + "\n" for line in ["```python", *one.code.splitlines(), "```"]
        )
        parts += [
            f"## {one.title}",
            "",
            one.text,
            "",
            f"![{one.title}]({one.name}.svg)",
            "",
            "```text",
            one.printed.rstrip(),
            "```",
            "",
        ]
        parts += [f'??? example "The script: {one.name}.py"', "", code]
    return "\n".join(parts)


if __name__ == "__main__":
    for script in SCRIPTS:
        print(run_script(script).name)
