"""Write what is made from the code: the file index in README.md, docs/cli.md and docs/datasets.md. Run it after a change; a test compares.

python docs/generate.py
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import datasets

ROOT = Path(__file__).parent.parent
HEADING = "## File index"


def summary(path: Path) -> str:
    """First sentence of a module's docstring, or of a TOML file's title or first comment."""
    text = path.read_text()
    if path.suffix == ".toml":
        title = re.search(r'^(?:title|description) = "(.*)"', text, flags=re.M)
        return title.group(1) if title else text.splitlines()[0].lstrip("# ")
    doc = ast.get_docstring(ast.parse(text)) or ""
    return " ".join(doc.split("\n\n")[0].split()).split(". ")[0].rstrip(".")


def file_index() -> str:
    """The section of the README: one line a file."""
    lines = [HEADING, ""]
    for folder in ("bitimely_cli", "bitimely_core", "pipelines", "examples", "benchmarks"):
        files = sorted(
            (p for p in (ROOT / folder).rglob("*") if p.suffix in {".py", ".toml"} and "__pycache__" not in p.parts),
            key=lambda p: (len(p.parts) > 0, p.as_posix()),
        )
        lines += [f"**{folder}/**", "", "| file | what |", "|---|---|"]
        lines += [f"| `{p.relative_to(ROOT / folder).as_posix()}` | {summary(p)} |" for p in files if summary(p)]
        lines.append("")
    return "\n".join(lines)


def command_line() -> str:
    """docs/cli.md: the help of every verb, as Typer says it."""
    import typer

    from bitimely_cli.main import app

    group = typer.main.get_command(app)
    parts = ["# Command line", "", "Made by `python docs/generate.py` from the commands themselves.", ""]
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        context = command.make_context(name, [], resilient_parsing=True)
        context.info_name = f"bitimely {name}"
        context.terminal_width = 110
        parts += [f"## {name}", "", "```", command.get_help(context).strip(), "```", ""]
    return "\n".join(parts)


def main() -> None:
    """Rewrite all."""
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, _, rest = text.partition(HEADING if HEADING in text else "INDEX\n")
    after = rest[rest.index("\n## ") + 1 :] if "\n## " in rest else rest
    readme.write_text(f"{before}{file_index()}\n{after}")
    (ROOT / "docs" / "cli.md").write_text(command_line())
    datasets.PAGE.write_text(datasets.document(datasets.kept()))


if __name__ == "__main__":
    main()
