"""What a verb reads: settings, tokens, caches and runs. Missing tokens and caches are made."""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from bitimely_core import cache, registry
from bitimely_core.config import DataConfig, Settings, SettingsLayer, check_device_name
from bitimely_core.errors import Exit, Finding, Reason, UserError, input_error
from bitimely_core.privacy import EXACT, is_small
from bitimely_core.recipe import Recipe, load_recipe, resolve_settings
from bitimely_core.registry import Choices, DataKind
from bitimely_core.report.ingest_page import write_ingest_page
from bitimely_core.report.renderer import render_html
from bitimely_core.run import Run
from bitimely_core.store import storage
from bitimely_core.store.records import list_results, read_result, write_results
from bitimely_core.store.workspace import (
    find_data_kind,
    find_run_folder,
    locate,
    locate_new,
    name_tokens,
    parse_view,
)
from bitimely_core.tokens.sequences import EventSequences
from bitimely_core.tokens.sets import TokenSet

if TYPE_CHECKING:
    from bitimely_core.tokens import Windows

# settings of data that do not change the windows, at their defaults
NO_WINDOW_OPTIONS = {"names": (), "fraction": 1.0, "limit": None}


class Execution(NamedTuple):
    """Where and how a verb is carried out."""

    workspace: Path
    force_new: bool = False  # replaces what was made with other settings
    verify: bool = True  # compares files with their checksums
    dry_run: bool = False  # writes nothing that stays


def prepare_windows(
    data: str, execution: Execution, config: DataConfig | None = None, *, together: bool = False
) -> Windows:
    """The tokens called `data`, or those of the view `data`, made now when they are missing; in a
    dry run in a temporary folder.

    `config`: choices of windows, None: those of the view. `together`: of processes that train
    together the first makes them and the others wait.

    Raises UserError: incomplete (exit 4) when the cache is missing and the data set needs a source;
    config (exit 2) as `check_group`.
    """
    together = together and not execution.dry_run
    if together:
        from bitimely_core.train.distributed import barrier, check_group, get_rank  # with torch

        check_group()  # before minutes of building
        if get_rank() > 0:
            barrier()
    windows = _open_or_build(data, execution, config or DataConfig())
    if together and get_rank() == 0:
        barrier()
    return windows


def open_run(run: str | Path, execution: Execution, data: str | None = None) -> Run:
    """The finished run called `run`; its windows are made when they are missing. A model that comes
    with the package becomes a run of the workspace, since results are written beside it.

    Raises UserError: not_found (2), incomplete (4).
    """
    workspace = execution.workspace
    folder = find_run_folder(run, workspace)
    if not execution.dry_run and folder.parent == registry.PRETRAINED:
        folder = _copy_pretrained(folder, workspace)
    open_windows = partial(prepare_windows, execution=execution)
    return Run.open(folder, workspace, data=data, open_windows=open_windows).require_finished()


def _copy_pretrained(folder: Path, workspace: Path) -> Path:
    """The folder of the workspace that has the files of a model of the package."""
    copied = locate_new(workspace, "runs", folder.name)
    write_results(copied, {path: read_result(folder / path) for path in list_results(folder)})
    return copied


def hides_counts(windows: TokenSet) -> bool:
    """Whether counts of 1 to 10 people in these windows are withheld: histories without
    `small_counts`.
    """
    return isinstance(windows, EventSequences) and not windows.options.small_counts


def share_sizes(rows: TokenSet) -> dict[str, object]:
    """The numbers of rows and subjects of what would be scored; withheld where they are of few
    people, but for who owns the data.
    """
    sizes = {"n": len(rows), "n_subjects": len(set(rows.subjects()))}
    if hides_counts(rows) and is_small(sizes["n_subjects"]):
        return {"n": None, "n_subjects": None, EXACT: sizes}
    return dict(sizes)


def make_windows_opener(workspace: Path) -> Callable[[str], Any]:
    """A function from the name of tokens to the windows or sequences in `workspace`, made when they
    are missing.
    """
    return partial(prepare_windows, execution=Execution(workspace, verify=False))


def _open_or_build(data: str, execution: Execution, config: DataConfig) -> Windows:
    from bitimely_core import tokens

    workspace = execution.workspace
    folder = locate(workspace, "tokens", name_tokens(data))
    # else `write_tokens` must compare
    is_default = config.model_copy(update=NO_WINDOW_OPTIONS) == DataConfig()
    if (folder / "manifest.json").is_file() and is_default:
        return tokens.open_tokens(folder, verify=execution.verify)
    _require_view(data, folder)
    dataset, view = parse_view(data)
    if execution.dry_run and not (folder / "manifest.json").is_file():
        workspace = make_scratch_workspace(workspace, dataset)
    out = locate_new(workspace, "tokens", name_tokens(data))
    kind, source = find_data_kind(data), ensure_cache(dataset, workspace)
    choices = {"tokenize": {key: value for key, value in config if key not in NO_WINDOW_OPTIONS}}
    execution = execution._replace(force_new=False)
    write_tokens(kind, source, out, {"view": view, **choices.get(kind.section, {})}, execution)
    return tokens.open_tokens(out, verify=False)


def _require_view(data: str, folder: Path) -> None:
    """Raises UserError (incomplete, exit 4) where `data` is the name of tokens that are made from a
    view, such as those of a run from elsewhere, and they are not in `folder`.
    """
    views = (
        f"{dataset}/{view}"
        for dataset in registry.datasets
        for view in registry.datasets[dataset].facts.views
        if view
    )
    if view := next((view for view in views if name_tokens(view) == data), None):
        raise input_error(
            Reason.INCOMPLETE,
            "no tokens there",
            f"expected those of {view}",
            f"Run: bitimely tokenize {view}",
            file=str(folder),
        )


def write_tokens(
    kind: DataKind, source: Path, out: Path, choices: Choices, execution: Execution
) -> Path | None:
    """Write the tokens of a cache, with what stands beside them; returns the path of their page
    where they have one.
    """
    how = {"verify": execution.verify, "force_new": execution.force_new}
    kind.write_tokens(source, out=out, **how, **choices)
    if (page := kind.write_extras(source, out)) is None:
        return None
    write_results(out, {"report.html": render_html(page, alone=True).encode()}, beside=True)
    return out / "report.html"


def make_scratch_workspace(workspace: Path, dataset: str) -> Path:
    """A temporary workspace, removed with the process, that reads the cache of `dataset` in
    `workspace` where there is one.
    """
    scratch = tempfile.TemporaryDirectory(prefix="bitimely-dry-run-")
    atexit.register(scratch.cleanup)
    cached = locate(workspace, "cache", dataset)
    if cached.is_dir():
        (storage.make_folder(Path(scratch.name) / "cache") / dataset).symlink_to(cached.resolve())
    return Path(scratch.name)


def ensure_cache(dataset: str, workspace: Path) -> Path:
    """The cache folder of `dataset`; data sets that need no source are ingested when they are
    missing.
    """
    folder = locate(workspace, "cache", dataset)
    if (folder / "manifest.json").is_file():
        return folder
    if registry.datasets[dataset].facts.needs_source:
        hint = f"Run: bitimely ingest {dataset} SOURCE"
        raise input_error(
            Reason.INCOMPLETE,
            "no cache of this data set",
            "expected manifest.json in it",
            hint,
            file=str(folder),
        )
    folder = locate_new(workspace, "cache", dataset)
    ingest_cache(dataset, None, folder)
    return folder


def ingest_cache(
    dataset: str,
    source: str | Path | None,
    out: Path,
    *,
    extend: Callable[[Choices], None] = lambda report: None,
    notice: Callable[[Finding], object] | None = None,
    **arguments: Any,
) -> Choices:
    """`cache.ingest` and its page; `extend` adds to the report of a published cache, `notice` is
    called where the page cannot be written.
    """
    protect = find_data_kind(dataset).protect_report
    try:
        report = cache.ingest(dataset, source, out, **arguments)
    except UserError as error:
        if error.report is not None and error.exit_code == Exit.REFUSED:
            error.report = protect(error.report)
            faults = write_ingest_page(out, error.report)
            error.details, error.exact = [*error.details, *faults], [*error.exact, *faults]
        raise
    if report.get("published"):  # not of a shard or a dry run
        extend(report)
        for fault in write_ingest_page(out, protect(report)):
            if notice is not None:
                notice(fault)
    return report


def open_recipe(path: Path | None) -> Recipe:
    """The recipe of `--config`, empty without one. Raises UserError: as `load_recipe`."""
    return load_recipe(path) if path else Recipe()


def resolve_training(
    stage: Literal["pretrain", "finetune"], base: SettingsLayer, **options: Any
) -> Settings:
    """`recipe.resolve_settings` with the arithmetic of the device, which this machine must have,
    and the extra of `track`.

    Raises UserError: config (exit 2).
    """
    from bitimely_core.train.devices import resolve_arithmetic, select_device
    from bitimely_core.train.event_file import require_tensorboard

    settings = resolve_settings(stage, base, **options)
    # --set does not hide a wrong --device
    for name in (options["flags"].get("train", {}).get("device"), settings.train.device):
        check_device_name(name or "auto")
    settings = resolve_arithmetic(settings)
    select_device(settings.train.device)
    if settings.train.track:
        require_tensorboard()
    return settings
