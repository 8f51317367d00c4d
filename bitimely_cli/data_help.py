"""Help of verbs on data: the options that the named data set takes, those of claims in groups of
their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from typer.core import TyperCommand

from bitimely_cli.claims_options import BUILDING, READING
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
        panels = registry.data_kinds[facts.kind].option_groups if facts is not None else ()
        groups: dict[str, list[tuple[str, str]]] = {
            "Arguments": [],
            "Options": [],
            READING: [],
            BUILDING: [],
        }
        for parameter in self.get_params(ctx):
            group = find_group(parameter)
            is_shown = group in ("Arguments", "Options", *panels)
            if is_shown and self.name == "ingest" and facts is not None:
                is_shown = is_taken(parameter, group, facts.options or ())
            record = parameter.get_help_record(ctx)
            if is_shown and record is not None:
                groups[group].append(record)
        write_groups(formatter, groups)
        if not panels:
            with formatter.section("Claims"):
                formatter.write_text(
                    f"bitimely {self.name} pophr --help shows the options of claims and EHR data."
                )


def find_group(parameter: Any) -> str:
    """The group of the help that a parameter belongs to."""
    if parameter.param_type_name == "argument":
        return "Arguments"
    return getattr(parameter, "rich_help_panel", None) or "Options"


def write_groups(formatter: Any, groups: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Each group that has options under its title."""
    for title, records in groups.items():
        if records:
            with formatter.section(title):
                formatter.write_dl(records)


def is_taken(parameter: Any, group: str, options: Collection[str]) -> bool:
    """Whether a data set with these `options` of its own takes an option of `ingest`."""
    if group != READING and parameter.name not in OF_DATASETS:
        return True
    name = parameter.name.rstrip("_").removeprefix("init_")
    return ("source" if name == "kind" else name) in options
