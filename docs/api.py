"""docs/api.md: every public name of `bitimely` by the place of its definition, from which the site
takes its docstring. Called by generate.py.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import bitimely

PAGE = Path(__file__).parent / "api.md"
GROUPS = {
    "Verbs": " ".join([*bitimely.VERBS, "run"]),
    "Data": "open_cache open_tokens batches collate read_tables Record Batch",
    "Models": "build_model load_model from_pretrained get_objective fit retention Encoder Classifier MultiLabel Regressor Encoded",
    "Runs, settings, errors": "Run Settings UserError",
}
MODULES = {
    "cache": "ingest verify",
    "tokens": "build",
    "data": "",
    "models": "",
    "objectives": "leak_free",
    "heads": "cross_entropy binary_cross_entropy mean_squared_error hazard_loss load",
}  # with what is used as bt.MODULE.NAME


def format_entry(name: str, value: object) -> list[str]:
    """An anchor with the public name, and the block that the site replaces by signature and
    docstring.
    """
    place = f"{value.__module__}.{value.__qualname__}"  # type: ignore[attr-defined]
    return [
        f'<a id="bitimely.{name}"></a>',
        "",
        f"::: {place}",
        f"    options: {{heading: {name}, toc_label: {name}}}",
        "",
    ]


def format_page() -> str:
    """The page as Markdown."""
    parts = [
        "# API",
        "",
        "The public names of `import bitimely as bt`, from their docstrings; made by `python docs/generate.py`.",
    ]
    parts += [
        "Shapes: B batch, T timesteps, V channels, N tokens, D model width. How they work together: [Python](python.md).",
        "",
    ]
    for title, names in GROUPS.items():
        parts += [f"## {title}", ""]
        for name in names.split():
            parts += format_entry(name, getattr(bitimely, name))
    parts += ["## Modules", ""]
    for name, names in MODULES.items():
        module = importlib.import_module(f"bitimely_core.{name}")
        assert module.__doc__ is not None
        parts += [
            f"### {name} {{#bitimely.{name}}}",
            "",
            module.__doc__.split("\n\n")[0].replace("\n", " "),
            "",
        ]
        for member in names.split():
            parts += format_entry(f"{name}.{member}", getattr(module, member))
    return "\n".join(parts).rstrip() + "\n"
