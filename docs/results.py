"""The tables of docs/results.md, from a workspace in which the recipes have been run: python docs/results.py WORKSPACE [RECIPE...].

Each section names the commands that make its table; sections of recipes that are not given stay as they are.
"""

from __future__ import annotations

import datetime
import json
import platform
import re
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("results.md")
COMMANDS = {
    "emg": ("bitimely ingest ptb-xl PTB-XL", "bitimely ingest emg EMG", "bitimely run emg"),
    "ptb-xl": ("bitimely ingest ptb-xl PTB-XL", "bitimely run ptb-xl"),
    "synpuf": ("bitimely ingest pophr DE-SYNPUF --source synpuf --phecode-map PHECODE_ICD9 --rules ccw --no-select", "bitimely run synpuf"),
    "ablation-small": ("bitimely ingest ptb-xl PTB-XL", "bitimely ingest emg EMG", "bitimely run ablation-small"),
}


def section(recipe: str, workspace: Path) -> str:
    """The table of one recipe as its page has it, with the commands, the day and the device."""
    import torch

    table = (workspace / "reports" / recipe / "results.md").read_text("utf-8")
    table = re.sub(r"^# ", "## ", table, count=1, flags=re.MULTILINE)
    stages = [json.loads(path.read_bytes()) for path in (workspace / "pipelines" / recipe).glob("*/stage.json")]
    day = datetime.datetime.fromtimestamp(max(stage["time"] for stage in stages), datetime.UTC).date()
    lines = "\n".join(f"    {line}" for line in COMMANDS[recipe])
    about = f"{day}, CPU ({platform.machine()}), torch {torch.__version__.partition('+')[0]}."
    return f"<!-- {recipe} -->\n{table.strip()}\n\n{lines}\n\n{about}\n<!-- end of {recipe} -->"


def main(workspace: Path, recipes: list[str]) -> None:
    """Put the sections of `recipes` (none: all that the workspace has) into the page."""
    page = PAGE.read_text("utf-8")
    for recipe in recipes or [name for name in COMMANDS if (workspace / "reports" / name / "results.md").is_file()]:
        new = section(recipe, workspace)
        old = re.compile(rf"<!-- {recipe} -->.*<!-- end of {recipe} -->", re.DOTALL)
        page = old.sub(lambda _, new=new: new, page) if old.search(page) else f"{page.rstrip()}\n\n{new}\n"  # type: ignore[misc]
    PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
