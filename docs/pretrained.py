"""Write the folder of a model that comes with the package from its evaluated run.

`python docs/pretrained.py NAME -w WORKSPACE`. `bitimely_core/pretrained/models.toml` has the
commands that train it, and the source of its data, which the card gets.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from bitimely_core import registry
from bitimely_core.config import read_toml
from bitimely_core.store.records import list_results, read_result, write_results
from bitimely_core.workflows.export import export

FACTS = {"data": "Data", "attribution": "Please cite", "licence": "Licence of the data"}


def write_model(name: str, workspace: Path) -> None:
    """Export the run and put its title, data, limits and commands before its card."""
    facts = read_toml(registry.PRETRAINED / "models.toml")[name]
    folder = registry.PRETRAINED / name
    shutil.rmtree(folder, ignore_errors=True)
    export(facts["run"], out=folder, workspace=workspace)
    content = {path: read_result(folder / path) for path in list_results(folder)}
    card = content["model_card.md"].decode().partition("\n")[2]
    content["model_card.md"] = (format_head(name, facts) + card).encode()
    write_results(folder, content)
    (folder / ".lock").unlink(missing_ok=True)


def format_head(name: str, facts: dict[str, object]) -> str:
    """The first part of a card, in Markdown."""
    rows = "\n".join(f"| {title} | {facts[key]} |" for key, title in FACTS.items())
    commands = "\n".join(map(str, facts["commands"]))  # type: ignore[call-overload]
    return f"""# {name}: {facts["title"]}

For research. It comes with bitimely: `bitimely predict {name} FILES` or
`bitimely.from_pretrained("{name}")`.

| | |
|---|---|
{rows}

{facts["limits"]}

These commands made it:

```bash
{commands}
```
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("-w", "--workspace", type=Path, default=Path("workspace"))
    given = parser.parse_args()
    write_model(given.name, given.workspace)
