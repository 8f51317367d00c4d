"""Rows of `bitimely list` and checks of `bitimely doctor`.

Counting parameters takes torch and seconds, so the rows of what is shipped are stored beside this
file (`python docs/generate.py`) and read while the files that they were made from are unchanged and
no plug-in is installed.
"""

from __future__ import annotations

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

from bitimely_core import __version__, registry
from bitimely_core.config import build_model_config, list_presets, load_preset, read_toml
from bitimely_core.errors import check_choice
from bitimely_core.store import storage

Row = dict[str, Any]  # of a listing, column -> value
SIZES = ("18m", "7.5m", "3m", "tiny")  # presets with a column of parameters
MODEL_FACTS = ("family", "objective", "readout", "attention", "source", "known")
DIMENSIONS = ("layers", "heads", "dim", "value_dim", "ffn_dim")
COLUMNS = {
    "datasets": ["name", "title", "views", "licence", "paper"],
    "views": ["name", "task", "channels", "rate", "window", "classes", "split"],
    "models": [
        *("name", "alias", "family", "input", "objective", "readout", "attention"),
        *(*SIZES, "train s", "infer s"),
    ],
    "pretrained": ["name", "title", "score", "subjects", "data", "licence"],
    "objectives": ["name", "leak_free", "help"],
    "augmentations": ["name", "help"],
    "presets": ["name", *DIMENSIONS, "data", "parameters", "paper_parameters"],
    "analyses": ["name", "takes", "options", "help"],
    "pipelines": ["name", "title", "description"],
    "runs": ["name", "kind", "model", "data", "finished", "step", "leak_free"],
}
# second table of models: what the paper claims, what is known
CLAIMED = ["name", "data kept", "both ways", "full rank", "known", "paper"]
CLAIMS = {  # the paper's table of key advantages: data preserved, bidirectional, full rank
    "patchtst": (False, True, False),
    "crt": (False, True, False),
    "timelygpt": (True, False, True),
    "timelybert": (False, True, False),
    "bitimelygpt": (True, True, True),
}
KNOWN = {
    "data kept": "nothing is hidden in pre-training; next-previous shows the model its targets "
    "instead, gap hides tokens and alters none that is seen",
    "both ways": "a layer of an alternating stack reads one way, the stack both; "
    "the same holds of any encoder and of TimelyBERT in every layer",
    "full rank": "any triangular map with a non-zero diagonal has it, with random weights too: "
    "compare effective ranks (bitimely analyze svd)",
}
COSTS = Path(__file__).parent / "models" / "costs.toml"
LISTINGS = Path(__file__).with_name("listings.json")
SOURCES = (
    *("models", "methods", "objectives", "augment"),
    *("zoo", "analyses", "insight", "datasets", "claims", "pretrained"),
    *("config.py", "registry.py", "catalog.py"),
)


def list_kinds(workspace: Path) -> list[Row]:
    """The kinds that `bitimely list` knows, with the number of rows of each."""
    return [{"kind": kind, "number": len(list_rows(kind, workspace))} for kind in COLUMNS]


def list_rows(kind: str, workspace: Path) -> list[Row]:
    """The rows of `bitimely list KIND`. Raises UserError (unknown_name, exit 2)."""
    check_choice("kind", kind, COLUMNS)
    if kind == "runs":
        return _list_runs(workspace)
    plugins = entry_points(group="bitimely.plugins")
    has_plugins = not all(map(registry.is_own, plugins))
    stored = {} if has_plugins or not LISTINGS.is_file() else json.loads(LISTINGS.read_bytes())
    if stored.get("sources") != hash_sources():
        return compute_rows(kind)
    rows: list[Row] = stored["rows"][kind]
    book = getattr(registry, kind, None)
    # registered by the program that calls
    added = book is not None and set(book.list_loaded()) - {row["name"] for row in rows}
    return compute_rows(kind) if added else rows


def compute_rows(kind: str) -> list[Row]:
    """The rows of everything that is registered, with parameters counted."""
    kinds: dict[str, Callable[[], list[Row]]] = {
        "datasets": _list_datasets,
        "views": _list_views,
        "models": _list_models,
        "pretrained": _list_pretrained,
        "objectives": _list_objectives,
        "augmentations": _list_augmentations,
        "presets": _list_presets,
        "analyses": _list_analyses,
        "pipelines": _list_pipelines,
    }
    return kinds[kind]()


def hash_sources() -> str:
    """SHA-256 of the names and contents of all files that the stored rows were made from."""
    core = Path(__file__).parent
    paths: list[Path] = []
    for root in (*(core / name for name in SOURCES), registry.RECIPES):
        paths += [root] if root.is_file() else root.rglob("*")
    paths = [path for path in paths if path.suffix in {".py", ".toml"}]
    return storage.hash_files(sorted(paths, key=lambda path: (path.parent.name, path.name)))


def format_listings() -> str:
    """The stored rows of every kind but runs, as JSON with a line for each."""
    kinds = []
    for kind in COLUMNS:
        if kind != "runs":
            rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in compute_rows(kind))
            kinds.append(f'"{kind}": [\n{rows}\n]')
    head = f'{{"format_version": 1, "sources": "{hash_sources()}", "rows": {{\n'
    return head + ",\n".join(kinds) + "\n}}\n"


def list_notes(kind: str) -> list[str]:
    """Notes on the columns of `bitimely list KIND`."""
    if kind != "models":
        return []
    costs = _read_costs()
    measured = "train s, infer s: CPU seconds for 1,000 windows, preset {preset}, {device}, {date}."
    claims = (f"{claim}: what the paper says of a model. Known: {KNOWN[claim]}." for claim in KNOWN)
    return [*([measured.format(**costs)] if costs else []), *claims]


def _read_costs() -> dict[str, Any]:
    """Measured CPU seconds of the models, and on what they were measured."""
    return read_toml(COSTS) if COSTS.is_file() else {}


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
    texts = []
    for view, facts in statistics.items():
        if isinstance(facts, dict) and "sequences" in facts:
            name = f"{view}: " if view else ""
            texts.append(f"{name}{facts['sequences']:,} x {facts['length']}")
    return "; ".join(texts)


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


def _list_models() -> list[Row]:
    """Every model, its true parameters in each preset, the paper's claims, and CPU seconds for
    1,000 windows where they were measured.
    """
    from bitimely_core import objectives

    costs = _read_costs()
    measured = costs.pop("models", {})
    presets = _list_presets()
    aliases = registry.models.aliases.items()
    rows = []
    for name, entry in registry.models.items():
        facts = entry.facts
        sizes = {
            preset["name"]: preset["models"][name] for preset in presets if name in preset["models"]
        }
        seconds = measured.get(name, {})
        claims = dict.fromkeys(KNOWN) | dict(zip(KNOWN, CLAIMS.get(name, ()), strict=False))
        rows.append(
            {
                "name": name,
                "alias": [alias for alias, model in aliases if model == name],
                **{size: _format_millions(sizes.get(size)) for size in SIZES},
                "parameters": sizes,
                "train s": seconds.get("train"),
                "infer s": seconds.get("infer"),
                "measured": costs,
                "claims": claims if name in CLAIMS else None,
                **claims,
                "paper": re.split(r"(?<=\d{4})", facts.source)[0],
                **{key: getattr(facts, key) for key in MODEL_FACTS},
                "input": list(facts.input),
                "objectives": objectives.compatible_objectives(name),
                "directions": list(facts.directions),
                "help": entry.help,
            }
        )
    return rows + _list_methods()


def _list_methods() -> list[Row]:
    """The methods without a network, which `train` offers too; what they have not is null."""
    from dataclasses import asdict

    rows = []
    for name, entry in sorted(registry.methods.items()):
        facts = asdict(entry.facts)
        rows.append(
            {
                **dict.fromkeys((*COLUMNS["models"], *CLAIMED, *MODEL_FACTS, "claims", "measured")),
                "name": name,
                "alias": [],
                "family": "no network",
                "input": list(facts["input"]),
                "source": facts["source"],
                "paper": re.split(r"(?<=\d{4})", facts["source"])[0],
                "known": "Fitted at once on labels, without pre-training",
                "parameters": {},
                "objectives": [],
                "directions": [],
                "help": entry.help,
            }
        )
    return rows


def _format_millions(count: int | None) -> str | None:
    return None if count is None else f"{count / 1e6:.2f} M"


def _list_pretrained() -> list[Row]:
    """The models that come with the package, with their score on people who were held out."""
    from bitimely_core.schemas.scores import Scores

    rows = []
    for name, facts in read_toml(registry.PRETRAINED / "models.toml").items():
        scores = Scores.load(registry.PRETRAINED / name / "scores.json")
        assert scores.main is not None, "scored on labels"
        metric = scores.metrics[scores.main]
        interval = f"{metric.lo:.3g} to {metric.hi:.3g}"
        score = f"{scores.main} {metric.value:.3g} ({interval})"
        rows.append({"name": name, **facts, "score": score, "subjects": scores.n_subjects})
    return rows


def _list_objectives() -> list[Row]:
    import bitimely_core.objectives  # noqa: F401  registers them

    return [
        {"name": name, "leak_free": e.facts.leak_free, "help": e.help, "notice": e.facts.notice}
        for name, e in registry.objectives.items()
    ]


def _list_augmentations() -> list[Row]:
    return [
        {"name": name, "help": e.help, "mixes_labels": e.facts.mixes_labels}
        for name, e in sorted(registry.augmentations.items())
    ]


def _list_presets() -> list[Row]:
    """Every preset with the dimensions of BiTimelyGPT; parameters of every model that can be built
    with it are counted, not quoted.
    """
    from bitimely_core import models

    rows = []
    for name in sorted(list_presets(), key=lambda n: -load_preset(n).get("paper_parameters", 0)):
        shipped = load_preset(name)
        counts, dimensions = {}, {}
        for model, entry in registry.models.items():
            family = shipped.get(entry.facts.family)
            reads_codes = family is not None and family.get("tokenizer") == "codes"
            if family is None or (reads_codes and "events" not in entry.facts.input):
                continue
            config = build_model_config(model, name, **models.default_shape(name))
            counts[model] = models.count_configured(config)
            dimensions[model] = {key: getattr(config, key) for key in DIMENSIONS}
        rows.append(
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
    return rows


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

    rows = []
    for path in sorted((workspace / "runs").glob("*/run.json")):
        name = path.parent.name
        if storage.is_temporary(name):
            continue
        record = RunRecord.load(path)
        rows.append(
            {
                **{key: getattr(record, key) for key in ("kind", "model", "finished", "leak_free")},
                "name": name,
                "data": [data.name for data in record.data],
                "step": record.final.step if record.final else None,
            }
        )
    return rows


EXTRAS = {
    "stat": ("pyreadstat", "tables of Stata, SAS and SPSS"),
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

    threads, memory = (
        torch.get_num_threads(),
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )
    folder = workspace if workspace.exists() else Path()
    free = _format_gib(shutil.disk_usage(folder).free)
    backend = operator.find_backend()
    kernels = {
        "triton": "kernels of Triton",
        "torch": "products with masks: pip install 'bitimely[triton]', and a C compiler",
    }[backend]
    rows = [
        ("bitimely", __version__, ""),
        ("python", platform.python_version(), platform.platform()),
        ("cores", str(os.cpu_count()), f"torch uses {threads} threads"),
        ("memory", _format_gib(memory), ""),
        ("disk", f"{free} free", f"at {folder.resolve()}"),
        *_list_devices(),
        ("retention", backend if torch.cuda.is_available() else "cpu", f"on CUDA {kernels}"),
    ]
    missing = []
    for name in NEEDED:
        try:
            rows.append((name, version(name), ""))
        except PackageNotFoundError:
            missing.append(name)
            rows.append((name, "missing", f"pip install -c constraints.txt {name}"))
    for extra, (module, purpose) in EXTRAS.items():
        if find_spec(module) is not None:
            rows.append((f"extra {extra}", "installed", purpose))
        else:
            note = f"{purpose}: pip install 'bitimely[{extra}]'"
            rows.append((f"extra {extra}", "not installed", note))
    checks: list[InstallationCheck] = [
        {"what": what, "found": state, "note": note} for what, state, note in rows
    ]
    return {"format_version": 1, "checks": checks, "missing": missing, "good": not missing}


def _list_devices() -> list[tuple[str, str, str]]:
    """Name, product and memory of each GPU; one row where there is none."""
    import torch

    if not torch.cuda.is_available():
        note = "Metal is used" if torch.backends.mps.is_available() else "training runs on the CPU"
        return [("cuda", "none", note)]
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        (f"cuda:{i}", device.name, _format_gib(device.total_memory))
        for i, device in enumerate(devices)
    ]


def _format_gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
