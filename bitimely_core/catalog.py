"""Rows of `bitimely list` and checks of `bitimely doctor`.

Counting parameters takes torch and seconds, so the rows of what is shipped are stored beside this
file (`python docs/generate.py`) and read while the files that they were made from are unchanged and
no plug-in is installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict

from bitimely_core import __version__, registry, storage
from bitimely_core.config import build_model_config, list_presets, load_preset, read_toml
from bitimely_core.errors import check_choice

Row = dict[str, Any]  # of a listing, column -> value
COLUMNS = {
    "datasets": ["name", "title", "views", "licence", "paper"],
    "views": ["name", "task", "channels", "rate", "window", "classes", "split"],
    "models": [
        "name",
        "alias",
        "family",
        "input",
        "objective",
        "readout",
        "attention",
        "18m",
        "7.5m",
        "3m",
        "tiny",
        "train s",
        "infer s",
    ],
    "objectives": ["name", "leak_free", "help"],
    "presets": [
        "name",
        "layers",
        "heads",
        "dim",
        "value_dim",
        "ffn_dim",
        "data",
        "parameters",
        "paper_parameters",
        "models",
    ],
    "analyses": ["name", "takes", "options", "help"],
    "pipelines": ["name", "title", "description"],
    "runs": ["name", "kind", "model", "data", "finished", "step", "leak_free"],
}
# second table of models: what the paper claims, what is known
CLAIMED = ["name", "data kept", "both ways", "full rank", "known", "paper"]


LISTINGS = Path(__file__).with_name("listings.json")
SOURCES = (
    "models",
    "objectives",
    "zoo",
    "analyses",
    "insight",
    "datasets",
    "claims",
    "config.py",
    "registry.py",
    "catalog.py",
)


def list_rows(kind: str, workspace: Path) -> list[Row]:
    """The rows of `bitimely list KIND`. Raises UserError (unknown_name, exit 2)."""
    check_choice("kind", kind, COLUMNS)
    if kind == "runs":
        return _list_runs(workspace)
    has_plugins = any(
        not registry.is_own(point) for point in entry_points(group="bitimely.plugins")
    )
    stored = {} if has_plugins or not LISTINGS.is_file() else json.loads(LISTINGS.read_bytes())
    rows: list[Row] = (
        stored["rows"][kind] if stored.get("sources") == hash_sources() else compute_rows(kind)
    )
    book = getattr(registry, kind, None)
    # registered by the program that calls
    added = set(() if book is None else book.list_loaded()) - {row["name"] for row in rows}
    return compute_rows(kind) if added else rows


def compute_rows(kind: str) -> list[Row]:
    """The rows of everything that is registered, with parameters counted."""
    kinds: dict[str, Callable[[], list[Row]]] = {
        "datasets": _list_datasets,
        "views": _list_views,
        "models": _list_models,
        "objectives": _list_objectives,
        "presets": _list_presets,
        "analyses": _list_analyses,
        "pipelines": _list_pipelines,
    }
    return kinds[kind]()


def hash_sources() -> str:
    """SHA-256 of the names and contents of all files that the stored rows were made from."""
    core = Path(__file__).parent
    roots = [*(core / name for name in SOURCES), registry.RECIPES]
    paths = [
        path
        for root in roots
        for path in ([root] if root.is_file() else root.rglob("*"))
        if path.suffix in {".py", ".toml"}
    ]
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda path: (path.parent.name, path.name)):
        digest.update(
            f"{path.parent.name}/{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes()
        )
    return digest.hexdigest()


def format_listings() -> str:
    """The stored rows of every kind but runs, as JSON with a line for each."""
    kinds = []
    for kind in COLUMNS:
        if kind != "runs":
            rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in compute_rows(kind))
            kinds.append(f'"{kind}": [\n{rows}\n]')
    return (
        f'{{"format_version": 1, "sources": "{hash_sources()}", "rows": {{\n'
        + ",\n".join(kinds)
        + "\n}}\n"
    )


def list_notes(kind: str) -> list[str]:
    """Notes on the columns of `bitimely list KIND`."""
    if kind != "models":
        return []
    costs = read_toml(COSTS) if COSTS.is_file() else {}
    measured = "train s, infer s: CPU seconds for 1,000 windows, preset {preset}, {device}, {date}."
    claims = (
        f"{claim}: what the paper says of a model. Known: {known}."
        for claim, known in KNOWN.items()
    )
    return [*([measured.format(**costs)] if costs else []), *claims]


def _list_datasets() -> list[Row]:
    return [
        {
            "name": name,
            "title": e.facts.title,
            "views": [f"{name}/{v}" if v else name for v in e.facts.views],
            "licence": e.facts.licence,
            "source": e.facts.url,
            "download": e.facts.download,
            "layout": e.facts.layout,
            "paper": _format_paper(e.facts.paper),
            "statistics": e.facts.paper,
            "rules": e.facts.rules,
        }
        for name, e in sorted(registry.datasets.items())
    ]


def _format_paper(statistics: Row) -> str:
    """The paper's sequences and their length by view, in words."""
    views = {
        view: facts
        for view, facts in statistics.items()
        if isinstance(facts, dict) and "sequences" in facts
    }
    return "; ".join(
        f"{view + ': ' if view else ''}{facts['sequences']:,} x {facts['length']}"
        for view, facts in views.items()
    )


def _list_views() -> list[Row]:
    return [
        {
            "name": f"{name}/{view}" if view else name,
            **{
                key: getattr(facts, key)
                for key in ("task", "rate", "window", "split", "notice", "help")
            },
            "channels": list(facts.channels),
            "classes": list(facts.classes),
        }
        for name, e in sorted(registry.datasets.items())
        for view, facts in e.facts.views.items()
    ]


CLAIMS = {  # the paper's table of key advantages: data preserved, bidirectional, full rank
    "patchtst": (False, True, False),
    "crt": (False, True, False),
    "timelygpt": (True, False, True),
    "timelybert": (False, True, False),
    "bitimelygpt": (True, True, True),
}
KNOWN = {
    "data kept": "nothing is hidden in pre-training; next-previous shows the model its targets instead, gap hides tokens and alters none that is seen",
    "both ways": "a layer of an alternating stack reads one way, the stack both; the same holds of any encoder and of TimelyBERT in every layer",
    "full rank": "any triangular map with a non-zero diagonal has it, with random weights too: compare effective ranks (bitimely analyze svd)",
}
COSTS = Path(__file__).parent / "models" / "costs.toml"


def _list_models() -> list[Row]:
    """Every model, its true parameters in each preset, the paper's claims, and CPU seconds for
    1,000 windows where they were measured.
    """
    from bitimely_core import objectives

    costs = read_toml(COSTS) if COSTS.is_file() else {}
    presets = _list_presets()
    sizes = {
        name: {
            preset["name"]: preset["models"][name] for preset in presets if name in preset["models"]
        }
        for name in registry.models
    }
    return [
        {
            "name": name,
            "alias": [alias for alias, of in registry.models.aliases.items() if of == name],
            **{
                size: f"{sizes[name][size] / 1e6:.2f} M" if size in sizes[name] else None
                for size in ("18m", "7.5m", "3m", "tiny")
            },
            "parameters": sizes[name],
            # CPU seconds for 1,000 windows
            "train s": costs.get("models", {}).get(name, {}).get("train"),
            "infer s": costs.get("models", {}).get(name, {}).get("infer"),
            "measured": {key: value for key, value in costs.items() if key != "models"},
            "claims": dict(zip(KNOWN, CLAIMS[name], strict=True)) if name in CLAIMS else None,
            **dict(zip(KNOWN, CLAIMS.get(name, (None,) * len(KNOWN)), strict=True)),
            "paper": " ".join(re.split(r"(?<=\d{4})", e.facts.source)[:1]),
            **{
                key: getattr(e.facts, key)
                for key in ("family", "objective", "readout", "attention", "source", "known")
            },
            "input": list(e.facts.input),
            "objectives": objectives.compatible_objectives(name),
            "directions": list(e.facts.directions),
            "help": e.help,
        }
        for name, e in registry.models.items()
    ]


def _list_objectives() -> list[Row]:
    import bitimely_core.objectives  # noqa: F401  registers them

    return [
        {"name": name, "leak_free": e.facts.leak_free, "help": e.help, "notice": e.facts.notice}
        for name, e in registry.objectives.items()
    ]


def _list_presets() -> list[Row]:
    """Every preset with the dimensions of BiTimelyGPT; parameters of every model that can be built
    with it are counted, not quoted.
    """
    from bitimely_core import models

    out = []
    for name in sorted(list_presets(), key=lambda n: -load_preset(n).get("paper_parameters", 0)):
        shipped = load_preset(name)
        counts, dimensions = {}, {}
        for model, entry in registry.models.items():
            family = shipped.get(entry.facts.family)
            if family is None or (
                family.get("tokenizer") == "codes" and "events" not in entry.facts.input
            ):
                continue
            config = build_model_config(model, name, **models.default_shape(name))
            counts[model] = models.count_configured(config)
            dimensions[model] = {
                key: getattr(config, key)
                for key in ("layers", "heads", "dim", "value_dim", "ffn_dim")
            }
        out.append(
            {
                "name": name,
                **dimensions["bitimelygpt"],
                "data": shipped["data"],
                "parameters": counts["bitimelygpt"],
                "paper_parameters": shipped.get("paper_parameters"),
                "models": counts,
                "dimensions": dimensions,
                "description": shipped["description"],
            }
        )
    return out


def _list_analyses() -> list[Row]:
    from bitimely_core.workflows.analyze import list_analysis_options

    return [
        {
            "name": name,
            "takes": e.facts.takes,
            "options": [
                f"--{key.replace('_', '-')} {default}"
                for key, default in list_analysis_options(e).items()
            ],
            "help": e.help,
        }
        for name, e in sorted(registry.analyses.items())
    ]


def _list_pipelines() -> list[Row]:
    from bitimely_core.recipe import load_recipe

    recipes = ((path.stem, load_recipe(path)) for path in sorted(registry.RECIPES.glob("*.toml")))
    return [
        {"name": name, "title": recipe.title, "description": recipe.description}
        for name, recipe in recipes
    ]


def _list_runs(workspace: Path) -> list[Row]:
    from bitimely_core.schemas.runs import RunRecord

    paths = [
        path
        for path in sorted((workspace / "runs").glob("*/run.json"))
        if not storage.is_temporary(path.parent.name)
    ]
    records = ((path.parent.name, RunRecord.load(path.parent / "run.json")) for path in paths)
    return [
        {
            **{key: getattr(record, key) for key in ("kind", "model", "finished", "leak_free")},
            "name": name,
            "data": [one.name for one in record.data],
            "step": record.final.step if record.final else None,
        }
        for name, record in records
    ]


EXTRAS = {
    "spark": ("pyspark", "claims builder on Spark; needs Java 17"),
    "s3": ("s3fs", "sources behind s3:// and https://: ingest"),
    "track": ("tensorboard", "curves of trainings in TensorBoard: --track"),
    "hub": ("huggingface_hub", "export --push, pretrain --init OWNER/NAME"),
    "onnx": ("onnxruntime", "graphs for ONNX Runtime: export --format onnx"),
    "triton": ("triton", "kernels of retention on CUDA; CUDA builds of torch bring it"),
}
NEEDED = (
    *(
        "torch",
        "numpy",
        "polars",
        "pyarrow",
        "pydantic",
        "typer",
        "rich",
        "safetensors",
        "scikit-learn",
        "scipy",
    ),
    *("matplotlib", "jinja2", "wfdb", "pyedflib", "mne", "xlrd"),
)


class InstallationCheck(TypedDict):
    """One line of `bitimely doctor`."""

    what: str
    found: str
    note: str


class Installation(TypedDict):
    """Result of `bitimely doctor`."""

    format_version: int
    checks: list[InstallationCheck]
    missing: list[str]
    good: bool


def check_installation(workspace: Path) -> Installation:
    """Versions, devices, memory, disk, extras; `good` is false when something that is needed is
    missing.
    """
    import torch

    from bitimely_core.ops import operator

    checks: list[InstallationCheck] = [
        {"what": "bitimely", "found": __version__, "note": ""},
        {"what": "python", "found": platform.python_version(), "note": platform.platform()},
        {
            "what": "cores",
            "found": str(os.cpu_count()),
            "note": f"torch uses {torch.get_num_threads()} threads",
        },
        {
            "what": "memory",
            "found": _format_gib(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
            "note": "",
        },
    ]
    place = workspace if workspace.exists() else Path()
    checks.append(
        {
            "what": "disk",
            "found": f"{_format_gib(shutil.disk_usage(place).free)} free",
            "note": f"at {place.resolve()}",
        }
    )
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            checks.append(
                {
                    "what": f"cuda:{i}",
                    "found": properties.name,
                    "note": _format_gib(properties.total_memory),
                }
            )
    else:
        note = "Metal is used" if torch.backends.mps.is_available() else "training runs on the CPU"
        checks.append({"what": "cuda", "found": "none", "note": note})
    backend = {
        "triton": "kernels of Triton",
        "torch": "products with masks: pip install 'bitimely[triton]', and a C compiler",
    }[operator.find_backend()]
    checks.append(
        {
            "what": "retention",
            "found": operator.find_backend() if torch.cuda.is_available() else "cpu",
            "note": f"on CUDA {backend}",
        }
    )
    missing = []
    for name in NEEDED:
        try:
            checks.append({"what": name, "found": version(name), "note": ""})
        except PackageNotFoundError:
            missing.append(name)
            checks.append(
                {"what": name, "found": "missing", "note": f"pip install -c constraints.txt {name}"}
            )
    for extra, (module, purpose) in EXTRAS.items():
        present = find_spec(module) is not None
        note = purpose if present else f"{purpose}: pip install 'bitimely[{extra}]'"
        checks.append(
            {
                "what": f"extra {extra}",
                "found": "installed" if present else "not installed",
                "note": note,
            }
        )
    return {"format_version": 1, "checks": checks, "missing": missing, "good": not missing}


def _format_gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
