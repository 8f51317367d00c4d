"""Write what is made from the code: docs/api.md, docs/cli.md, docs/datasets.md, docs/leakage.md,
docs/settings.md, docs/recipe.schema.json and the rows of `bitimely list`. Run it after a change; a
test compares.

python docs/generate.py      reads the packages of its own checkout and writes into it, wherever bitimely is installed
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import api  # noqa: E402
import datasets  # noqa: E402
import settings  # noqa: E402
import stamps  # noqa: E402

from bitimely_core import catalog  # noqa: E402
from bitimely_core.recipe import Recipe  # noqa: E402


def format_command_line() -> str:
    """docs/cli.md: the help of every verb, as Typer says it."""
    import typer

    from bitimely_cli.main import app

    group = typer.main.get_command(app)
    parts = [
        "# Command line",
        "",
        "Made by `python docs/generate.py` from the commands themselves.",
        "",
    ]
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        for words in ([], ["pophr"]) if name in {"ingest", "tokenize"} else ([],):
            context = command.make_context(name, list(words), resilient_parsing=True)
            context.info_name = f"bitimely {name}"
            context.terminal_width = 110
            parts += [
                f"## {' '.join([name, *words])}",
                "",
                "```",
                command.get_help(context).strip(),
                "```",
                "",
            ]
    return "\n".join(parts)


def format_recipe_schema() -> str:
    """docs/recipe.schema.json: what a recipe may contain, for editors and other checks before
    `bitimely run`.
    """
    facts = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Recipe.model_json_schema(),
        "title": "Recipe of bitimely",
    }
    return json.dumps(facts, indent=1, sort_keys=True) + "\n"


def main() -> None:
    """Rewrite all."""
    (ROOT / "docs" / "cli.md").write_text(format_command_line())
    api.PAGE.write_text(api.format_page())
    datasets.PAGE.write_text(datasets.format_page(datasets.read_tables()))
    settings.PAGE.write_text(settings.format_page())
    stamps.PAGE.write_text(stamps.format_page())
    (ROOT / "docs" / "recipe.schema.json").write_text(format_recipe_schema())
    catalog.LISTINGS.write_text(catalog.format_listings())


if __name__ == "__main__":
    main()
