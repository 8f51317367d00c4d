"""docs/settings.md: every setting of models, objectives and the other sections, as the code
declares it; written by docs/generate.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from bitimely_core import (
    models,  # noqa: F401  registers the models
    objectives,  # noqa: F401  and the objectives
    registry,
)
from bitimely_core.config import (
    ModelConfig,
    ObjectiveConfig,
    Settings,
    find_model_config,
    find_objective_config,
)

PAGE = Path(__file__).parent / "settings.md"
HEAD = """# Settings

Made by `python docs/generate.py` from the code. `--set section.key=value`, or the same key in a recipe; the command line wins over a recipe, that over the preset, that over the defaults. Meaning, source and what other
codes do otherwise are on the pages of the [models](models/README.md), those of BiTimelyGPT's family on [theirs](models/bitimelygpt.md).
"""


def format_value(value: Any) -> str:
    """A default as it is typed after `--set`."""
    if isinstance(value, BaseModel):
        return f"`{{ kind = {next(iter(value.model_dump().values()))!r} }}`".replace("'", '"')
    words = {None: "none", True: "true", False: "false", "": "empty", (): "empty"}
    if isinstance(value, bool | None | str | tuple) and value in words:
        return words[value]
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def list_words(annotation: Any) -> list[str]:
    """The words that a setting takes, if it is a choice."""
    if get_origin(annotation) is Literal:
        return [str(word) for word in get_args(annotation)]
    return [word for part in get_args(annotation) for word in list_words(part)]


def list_fields(
    kind: type[BaseModel], prefix: str, without: type[BaseModel] | None = None
) -> list[tuple[str, str]]:
    """Key and row of every setting of a section, nested ones included, that `without` does not
    have.
    """
    rows = []
    for name, info in kind.model_fields.items():
        if without is not None and name in without.model_fields:
            continue
        key = f"{prefix}.{info.alias or name}"
        default = "" if info.default is PydanticUndefined else format_value(info.default)
        values = ", ".join(f"`{word}`" for word in list_words(info.annotation))
        rows.append((key, f"| `{key}` | {default} | {values} | {info.description or ''} |"))
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            rows += list_fields(info.annotation, key)
    return rows


def list_sections() -> dict[str, list[tuple[str, str]]]:
    """Title -> keys and rows: what all models share, each model's own settings, the same of
    objectives, the other sections.
    """
    sections = {"Models: all": list_fields(ModelConfig, "model")}
    for kind in dict.fromkeys(find_model_config(name) for name in sorted(registry.models)):
        owners = [name for name in sorted(registry.models) if find_model_config(name) is kind]
        sections[f"Models: {', '.join(owners)}"] = list_fields(kind, "model", ModelConfig)
    for name, entry in sorted(registry.methods.items()):
        title = f"Methods without a network: {name}"
        sections[title] = list_fields(entry.facts.config, "model", ModelConfig)
    sections["Objectives: all"] = list_fields(ObjectiveConfig, "objective")
    for kind in dict.fromkeys(find_objective_config(name) for name in sorted(registry.objectives)):
        owners = [
            name for name in sorted(registry.objectives) if find_objective_config(name) is kind
        ]
        sections[f"Objectives: {', '.join(owners)}"] = list_fields(
            kind, "objective", ObjectiveConfig
        )
    for name in ("data", "train", "finetune", "tune"):
        kind = Settings.model_fields[name].annotation
        assert isinstance(kind, type)
        sections[name.capitalize()] = list_fields(kind, name)
    return {title: rows for title, rows in sections.items() if rows}


def format_page() -> str:
    """The page."""
    head = "| key | default | values | meaning |\n|---|---|---|---|\n"
    return HEAD + "".join(
        f"\n## {title}\n\n{head}" + "".join(f"{row}\n" for _, row in rows)
        for title, rows in list_sections().items()
    )
