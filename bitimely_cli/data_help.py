"""Help of verbs on data: the options that the named data set takes, those of claims in groups of
their own.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from bitimely_cli.claims import BUILDING, READING
from bitimely_core import registry

# options of `ingest` that only some data sets take
OF_DATASETS = ("size", "seed", "rate", "map_", "init_map", "extra")


class DataCommand(TyperCommand):
    """A command whose first argument names a data set: `--help` shows what that one takes; without
    a name, what recordings take.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the name for the help, then parse as usual."""
        ctx.meta["bitimely.dataset"] = next(
            (word.partition("/")[0] for word in args if not word.startswith("-")), ""
        )
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options in groups."""
        name = ctx.meta.get("bitimely.dataset", "")
        facts = registry.datasets[name].facts if name in registry.datasets else None
        shown = registry.data_kinds[facts.kind].option_groups if facts is not None else ()
        own = {**(facts.options or {})} if facts is not None else None
        groups: dict[str, list[tuple[str, str]]] = {
            "Arguments": [],
            "Options": [],
            READING: [],
            BUILDING: [],
        }
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            panel = getattr(parameter, "rich_help_panel", None)
            if record is None or (panel in {READING, BUILDING} and panel not in shown):
                continue
            key = (parameter.name or "").rstrip("_").removeprefix("init_")
            if self.name == "ingest" and own is not None:
                if parameter.name in OF_DATASETS and key not in own:
                    continue
                if panel == READING and {"kind": "source"}.get(key, key) not in own:
                    continue
            kind = (
                "Arguments"
                if parameter.param_type_name == "argument"
                else panel
                if panel in groups
                else "Options"
            )
            groups[kind].append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
        if not shown:
            with formatter.section("Claims"):
                formatter.write_text(
                    f"bitimely {self.name} pophr --help shows the options of claims and EHR data."
                )
