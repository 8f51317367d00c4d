"""Names that the shell completes: data sets, views, models, pretrained, objectives, presets,
analyses, pipelines, runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import typer

from bitimely_core.errors import UserError


def complete(*kinds: str) -> Callable[[typer.Context, str], list[str]]:
    """The completion of an argument or option that takes a name of these kinds, as `bitimely list`
    knows them; of `kinds`: their names.
    """

    def complete_name(context: typer.Context, incomplete: str) -> list[str]:
        from bitimely_core import catalog

        # of several names, with commas between them, the last
        head, comma, incomplete = incomplete.rpartition(",")
        workspace = Path(context.params.get("workspace") or "workspace")
        names: list[str] = []
        for kind in kinds:
            with suppress(OSError, UserError):  # a shell shows nothing of an error
                names += (
                    list(catalog.COLUMNS)
                    if kind == "kinds"
                    else [row["name"] for row in catalog.list_rows(kind, workspace)]
                )
        return [head + comma + name for name in dict.fromkeys(names) if name.startswith(incomplete)]

    return complete_name
