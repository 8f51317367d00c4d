"""Tokens, caches and runs that a verb reads; missing tokens and caches are made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitimely_core import registry
from bitimely_core.config import DataConfig
from bitimely_core.errors import Reason, input_error
from bitimely_core.run import Run
from bitimely_core.types import Progress
from bitimely_core.workspace import is_events, locate, locate_new, name_tokens, parse_view

if TYPE_CHECKING:
    from bitimely_core.tokens import Windows


def prepare_windows(data: str, workspace: Path, config: DataConfig, *, verify: bool = True, progress: Progress | None = None) -> Windows:
    """The tokens called `data`, or those of the view `data`, made now when they are missing.

    Of processes that train together the first makes them and the others wait.

    Raises UserError (incomplete, exit 4) when the cache is missing and the data set needs a source.
    """
    from bitimely_core.training.distributed import barrier, get_rank, get_world_size

    if get_rank() > 0:
        barrier()
    windows = _open_or_build(data, workspace, config, verify=verify, progress=progress)
    if get_world_size() > 1 and get_rank() == 0:
        barrier()
    return windows


def open_run(run: str | Path, workspace: Path, *, data: str | None = None, verify: bool = True, progress: Progress | None = None) -> Run:
    """The finished run called `run`; its windows are made when they are missing. Raises UserError: not_found (2), incomplete (4)."""

    def open_windows(name: str) -> Windows:
        return prepare_windows(name, workspace, DataConfig(), verify=verify, progress=progress)

    return Run.open(run, workspace, data=data, open_windows=open_windows).require_finished()


def make_windows_opener(workspace: Path) -> Callable[[str], Any]:
    """A function from the name of tokens to the windows or sequences in `workspace`, made when they are missing."""
    return lambda data: prepare_windows(data, workspace, DataConfig(), verify=False)


def _open_or_build(data: str, workspace: Path, config: DataConfig, *, verify: bool, progress: Progress | None) -> Windows:
    from bitimely_core import tokens

    folder = locate(workspace, "tokens", name_tokens(data))
    if (folder / "manifest.json").is_file() and not _has_window_options(config):
        return tokens.open_tokens(folder, verify=verify)
    dataset, view = parse_view(data)
    out = locate_new(workspace, "tokens", name_tokens(data))
    folder = ensure_cache(dataset, workspace, progress=progress)
    if registry.datasets[dataset].facts.kind == "events":
        from bitimely_core.workflows.tokenize_claims import tokenize_claims

        tokenize_claims(data, workspace=workspace, verify=verify, progress=progress)
        return tokens.open_tokens(out, verify=False)
    return tokens.build(
        folder,
        view=view,
        out=out,
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


def _has_window_options(config: DataConfig) -> bool:
    """Whether any option of the windows differs from its default: then `build` must compare."""
    return config.model_copy(update={"names": (), "fraction": 1.0, "limit": None}) != DataConfig()


def ensure_cache(dataset: str, workspace: Path, *, progress: Progress | None = None) -> Path:
    """The cache folder of `dataset`; data sets that need no source are ingested when they are missing."""
    from bitimely_core.workflows.ingest import ingest
    from bitimely_core.workflows.ingest_claims import ingest_claims

    folder = locate(workspace, "cache", dataset)
    if (folder / "manifest.json").is_file():
        return folder
    if registry.datasets[dataset].facts.needs_source:
        raise input_error(
            Reason.INCOMPLETE,
            "no cache of this data set",
            "expected manifest.json in it",
            f"Run: bitimely ingest {dataset} SOURCE",
            file=str(folder),
        )
    folder = locate_new(workspace, "cache", dataset)
    if is_events(dataset):
        ingest_claims(dataset, None, folder, progress=progress)
    else:
        ingest(dataset, None, folder, progress=progress)
    return folder
