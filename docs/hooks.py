"""Hooks of mkdocs.yml: pages that are written for GitHub, as python-markdown reads them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
import gallery

ROOT = Path(__file__).parent.parent
REPOSITORY = "https://github.com/bitimely/bitimely"


def link_outside(target: str, folder: Path) -> str:
    """The address of a link of a page in `folder`: unchanged where the site has the file, else that
    of the file in the repository.
    """
    path, _, anchor = target.partition("#")
    if not path or "://" in path:
        return target
    found = (folder / path).resolve()
    is_made = found == ROOT / "docs" / "gallery" / "index.md"  # by `on_files`
    if is_made or (
        found.is_relative_to(ROOT / "docs") and found.is_file() and found.suffix != ".py"
    ):
        return target
    kind = "tree" if found.is_dir() else "blob"
    return f"{REPOSITORY}/{kind}/main/{found.relative_to(ROOT)}" + (f"#{anchor}" if anchor else "")


def separate_blocks(markdown: str) -> str:
    """A blank line before each list and table that follows a paragraph at once, which
    python-markdown requires.
    """
    out: list[str] = []
    inside, fenced = "", False  # the first character of the list or table that goes on
    for line in markdown.splitlines():
        fenced ^= line.startswith("```")
        mark = found[0][0] if not fenced and (found := re.match(r"\* |[0-9]+\. |\|", line)) else ""
        mark = "1" if mark.isdigit() else mark
        if mark and mark != inside and out and out[-1]:
            out.append("")
        inside = mark or (inside if line.startswith(" ") else "")
        out.append(line)
    return "\n".join(out)


def list_pages(entries: Any) -> list[str]:
    """The files of a navigation, at any depth."""
    if isinstance(entries, str):
        return [entries]
    return [
        page
        for entry in (entries.values() if isinstance(entries, dict) else entries)
        for page in list_pages(entry)
    ]


def on_config(config: Any) -> Any:
    """Pages that the navigation leaves out come last: the decisions, and new pages that have no
    place yet.
    """
    found = sorted(
        path.relative_to(config.docs_dir).as_posix() for path in Path(config.docs_dir).rglob("*.md")
    )
    others = [page for page in found if page not in list_pages(config.nav)]
    last = next(iter(config.nav[-1].values()))
    last += [page for page in others if not page.startswith("decisions/")]
    last.append({"Decisions": [page for page in others if page.startswith("decisions/")]})
    return config


def on_files(files: Any, *, config: Any) -> Any:
    """The gallery. `make gallery` runs its scripts, unless they and the packages are as at its last
    build; `make docs` lists them.
    """
    if not os.environ.get("GALLERY"):
        files.append(File.generated(config, "gallery/index.md", content=gallery.list_scripts()))
        return files
    examples = [gallery.run_script(script) for script in gallery.SCRIPTS]
    files.append(File.generated(config, "gallery/index.md", content=gallery.format_page(examples)))
    for example in examples:
        figure = File.generated(config, f"gallery/{example.name}.svg", content=example.figure)
        files.append(figure)
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links and blocks as the two functions above give them."""
    markdown = separate_blocks(markdown)
    if page.file.abs_src_path is None:  # the gallery
        return markdown
    folder = Path(page.file.abs_src_path).parent
    return re.sub(
        r"(\]\()([^)\s]+)(\))",
        lambda found: found[1] + link_outside(found[2], folder) + found[3],
        markdown,
    )
