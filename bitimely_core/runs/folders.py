"""Where things lie in a workspace, what a run is called, and what `run.json` says."""

from __future__ import annotations

import hashlib
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitimely_core import __version__, registry, store
from bitimely_core.batch import Progress
from bitimely_core.errors import Exit, Reason, UserError, safe_text
from bitimely_core.settings import DataConfig, Settings, validated

if TYPE_CHECKING:
    from bitimely_core.tokens import Sequences, Windows

FORMAT = 1


def dataset_and_view(data: str) -> tuple[str, str]:
    """`sleep-edf/staging` -> (`sleep-edf`, `staging`). Raises UserError (unknown_name) with the closest names."""
    registry.members("bitimely_core.datasets")
    dataset, _, view = data.partition("/")
    facts = registry.datasets[dataset].facts
    if view not in facts.views:
        known = [f"{dataset}/{name}" if name else dataset for name in facts.views]
        raise registry.unknown("view", data, known)
    return dataset, view


def of_events(data: str) -> bool:
    """Whether a data set or view is of claims. Raises UserError (unknown_name) with the closest names."""
    registry.members("bitimely_core.datasets")
    return registry.datasets[data.partition("/")[0]].facts.kind == "events"


def dataset_of(data: str, workspace: Path) -> str:
    """The data set of `DATASET[/VIEW]`, or of the tokens that are called `data`."""
    path = workspace / "tokens" / data / "manifest.json"
    return str(json.loads(path.read_bytes())["options"]["dataset"]) if "/" not in data and path.is_file() else data.partition("/")[0]


def tokens_name(data: str) -> str:
    """The name that tokens of `DATASET[/VIEW]` get by default."""
    return data.replace("/", "-")


def windows_for(data: str, workspace: Path, config: DataConfig, *, verify: bool = True, progress: Progress | None = None) -> Windows:
    """The tokens called `data`, or those of the view `data`, made now when they are missing.

    Of processes that train together the first makes them and the others wait.

    Raises UserError (incomplete, exit 4) when the cache is missing and the data set needs a source.
    """
    from bitimely_core import train

    if train.rank() > 0:
        train.barrier()
    windows = _opened_or_built(data, workspace, config, verify=verify, progress=progress)
    if train.world() > 1 and train.rank() == 0:
        train.barrier()
    return windows


def _opened_or_built(data: str, workspace: Path, config: DataConfig, *, verify: bool, progress: Progress | None) -> Windows:
    from bitimely_core import tokens

    for folder in (workspace / "tokens" / data, workspace / "tokens" / tokens_name(data)):
        if "/" not in folder.name and (folder / "manifest.json").is_file() and not _asked(config):
            return tokens.open_tokens(folder, verify=verify)
    dataset, view = dataset_and_view(data)
    folder = cached(dataset, workspace, progress=progress)
    if registry.datasets[dataset].facts.kind == "events":
        from bitimely_core.runs import claims

        claims.tokenize(data, workspace=workspace, verify=verify, progress=progress)
        return tokens.open_tokens(workspace / "tokens" / tokens_name(data), verify=False)
    return tokens.build(
        folder,
        view=view,
        out=workspace / "tokens" / tokens_name(data),
        window=config.window,
        stride=config.stride,
        rate=config.rate,
        channels=config.channels,
        normalise=config.normalise,
        split=config.split,
        seed=config.seed,
        bandpass=config.bandpass,
        notch=config.notch,
        test_fold=config.test_fold,
        verify=verify,
        progress=progress,
    )


def channels(body: dict[str, Any]) -> tuple[int, ...]:
    """The channels that the adapters of a run read, in their order."""
    model = body["settings"]["model"]
    return (model["channels"], *model.get("others", ()))


def vocabulary(windows: Windows | Sequences) -> str:
    """SHA-256 of the names of the codes; "" for signals."""
    names = getattr(windows, "vocabulary", ())
    return hashlib.sha256("\n".join(names).encode()).hexdigest() if names else ""


def adapter(windows: Windows, body: dict[str, Any]) -> int | None:
    """Which adapter of a run fits `windows`: that of the same tokens, of the same data set, of as many channels; None: none does."""
    if body["settings"]["model"].get("channel_independent"):
        return 0
    if vocabulary(windows):
        return next((0 for data in body["data"] if data.get("vocabulary") == vocabulary(windows)), None)
    fits = [at for at, count in enumerate(channels(body)) if count == windows.channels]
    trained = {at: body["data"][at] for at in fits if at < len(body["data"])}
    same = [at for at, data in trained.items() if data["name"] == windows.name]
    same += [at for at, data in trained.items() if data["dataset"] == windows.dataset]
    return next(iter([*same, *fits]), None)


def _asked(config: DataConfig) -> bool:
    """Whether any option of the windows differs from its default: then `build` must compare."""
    return config.model_copy(update={"names": (), "fraction": 1.0, "limit": None}) != DataConfig()


def cached(dataset: str, workspace: Path, *, progress: Progress | None = None) -> Path:
    """The cache folder of `dataset`; data sets that need no source are ingested when they are missing."""
    from bitimely_core.runs import claims, ingesting

    folder = workspace / "cache" / dataset
    if (folder / "manifest.json").is_file():
        return folder
    if registry.datasets[dataset].facts.needs_source:
        raise UserError(
            Reason.INCOMPLETE,
            "no cache of this data set",
            wanted="expected manifest.json in it",
            action=f"Run: bitimely ingest {dataset} SOURCE",
            file=str(folder),
        )
    if of_events(dataset):
        claims.ingest(dataset, None, folder, progress=progress)
    else:
        ingesting.ingest(dataset, None, folder, progress=progress)
    return folder


def run_folder(run: str | Path, workspace: Path) -> Path:
    """The folder of an existing run, given by name or path. Raises UserError (not_found, exit 2) with the closest names."""
    for folder in (workspace / "runs" / str(run), Path(run)):
        if (folder / "run.json").is_file():
            return folder
    known = sorted(p.parent.name for p in (workspace / "runs").glob("*/run.json"))
    error = registry.unknown("run", str(run), known)
    error.file = str(workspace / "runs")
    raise error


def read(folder: Path) -> dict[str, Any]:
    """`run.json` of a run folder. Raises UserError (integrity, exit 5) when it does not parse."""
    path = folder / "run.json"
    try:
        body: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(
            Reason.INTEGRITY,
            f"not readable: {safe_text(str(error))}",
            wanted="expected JSON",
            action="Repeat the training under --force-new",
            file=str(path),
            exit_code=Exit.INTEGRITY,
        ) from error
    if body.get("format_version", 0) > FORMAT:
        raise UserError(
            Reason.UNSUPPORTED_FORMAT,
            f"format version {body.get('format_version')}",
            wanted=f"expected at most {FORMAT}",
            action="Use a newer bitimely",
            file=str(path),
        )
    return body


def weights(folder: Path, body: dict[str, Any]) -> Path:
    """The model folder of a finished run, its weights compared with the hash in `run.json`. Raises UserError (integrity, exit 5)."""
    path = folder / "model" / "model.safetensors"
    if not path.is_file() or store.sha256(path) != body["weights"]:
        raise UserError(
            Reason.INTEGRITY,
            "missing" if not path.is_file() else "differs from its hash",
            wanted="expected the weights that the training wrote",
            action="Restore the file, or train again under --force-new",
            file=str(path),
            exit_code=Exit.INTEGRITY,
        )
    return folder / "model"


def run_name(preset: str, model: str, objective: str, defaults: tuple[str, str]) -> str:
    """`<preset>[-<model>][-<objective>]`, without what is the default."""
    default_model, default_objective = defaults
    parts = [preset, *([model] if model != default_model else []), *([objective] if objective != default_objective else [])]
    return "-".join(parts)


def versions() -> dict[str, str]:
    """Versions of what decides numbers."""
    out = {"bitimely": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "polars", "pyarrow", "scikit-learn", "scipy", "safetensors"):
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            out[name] = "absent"
    return out


def claim(folder: Path, body: dict[str, Any], *, force_new: bool) -> bool:
    """Take `folder` for the run described by `body`: False when it is already finished under the same description.

    What must agree: settings, data, source. Raises UserError (settings_differ, exit 2) with the differing keys unless `force_new`,
    which removes the old run.
    """
    import shutil

    from bitimely_core.errors import Finding

    if (folder / "run.json").is_file():
        old = _completed(read(folder))
        differing = [key for key in flat(body) | flat(old) if flat(body).get(key) != flat(old).get(key)]
        if not differing and not force_new:
            return not old.get("finished", False)
        if not force_new:
            shown = [
                Finding(
                    code=Reason.SETTINGS_DIFFER,
                    file=str(folder / "run.json"),
                    field=key,
                    text=f"the run has {safe_text(flat(old).get(key))}",
                    wanted=f"now {safe_text(flat(body).get(key))}",
                )
                for key in sorted(differing)
            ]
            first, *rest = shown
            raise UserError(
                Reason.SETTINGS_DIFFER,
                first.text,
                wanted=first.wanted,
                action="Give another --run NAME, or --force-new to replace this one",
                file=first.file,
                field=first.field,
                exit_code=Exit.USAGE,
                details=rest,
            )
        with store.lock(folder):
            pass  # not while another process trains there
        shutil.rmtree(folder)
    store.make_folder(folder)
    store.write_json(folder / "run.json", {**body, "finished": False})
    return True


def _completed(body: dict[str, Any]) -> dict[str, Any]:
    """A run as an earlier version wrote it, with the settings that did not exist then at their defaults."""
    try:
        known = validated(Settings, body["settings"]).model_dump(mode="json", by_alias=True)
    except UserError:  # settings that no longer exist: the comparison names them
        return body
    return {**body, "settings": known}


COMPARED = ("kind", "model", "preset", "settings", "data", "source", "init")
FREE = {  # may change between a stop and its continuation: they do not change the numbers, or only where they are computed
    "settings.train.device",
    "settings.train.devices",
    "settings.train.compile",
    "settings.train.log_every",
    "settings.train.keep",
    "settings.train.checkpoint_every",
}


def flat(body: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """What must agree between two runs of one name: dotted key -> value, of the keys in `COMPARED` without those in `FREE`."""
    out: dict[str, Any] = {}
    for key, value in body.items():
        if not prefix and key not in COMPARED:
            continue
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            out |= flat(value, f"{name}.")
        elif name not in FREE:
            out[name] = list(value) if isinstance(value, tuple) else value
    return out
