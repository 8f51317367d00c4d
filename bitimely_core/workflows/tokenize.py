"""The verb `tokenize`: the windows or sequences of a view, with an audit of the split."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitimely_core.run import FORMAT, PREPROCESSING
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.schemas.tokens import HistoryPreparation, Preprocessing
from bitimely_core.store import manifests
from bitimely_core.store.records import has_result
from bitimely_core.store.workspace import (
    find_data_kind,
    find_run_folder,
    locate,
    locate_new,
    name_tokens,
    parse_view,
)
from bitimely_core.tokens.sequences import HISTORIES
from bitimely_core.tokens.splits import EXTERNAL
from bitimely_core.workflows.prepare import (
    Execution,
    ensure_cache,
    make_scratch_workspace,
    write_tokens,
)

if TYPE_CHECKING:
    from bitimely_core.workflows.jobs import Flags

# options by which a run cuts recordings
CUTTING = (
    "channels", "rate", "window", "stride", "normalise", "bandpass", "notch", "resampling",
    "filtering",
)  # fmt: skip


def name_applied(data: str, run: Path) -> str:
    """The name of tokens of `data` as the run in a folder reads them."""
    return f"{name_tokens(data)}-{run.resolve().name}"


def prepare_others(run: str | Path, data: str, workspace: Path) -> str:
    """The name of tokens of the recordings of other people, all of whom are tested: a view of
    another data set than that of a run, or in another workspace, cut as the run reads it. They are
    made where they are missing.

    It is `data` itself for tokens that are there, for the data set of the run in its own workspace,
    for irregular samples, and for other runs.
    """
    folder = find_run_folder(run, workspace)
    has_tokens = (locate(workspace, "tokens", name_tokens(data)) / manifests.MANIFEST).is_file()
    if has_tokens or not has_result(folder / PREPROCESSING) or _is_own(data, folder, workspace):
        return data
    options = Preprocessing.load(folder / PREPROCESSING).options
    if options.irregular or find_data_kind(data).section != "tokenize":
        return data
    choices = {name: getattr(options, name) for name in CUTTING} | {"split": EXTERNAL}
    if options.epoch is not None:  # its labels say where a window begins
        del choices["stride"]
    return _make_tokens(data, name_applied(data, folder), workspace, choices)


def _is_own(data: str, run: Path, workspace: Path) -> bool:
    """Whether `data` are of a data set of the training, in the workspace of the run."""
    is_from_here = run.resolve().parent.parent == workspace.resolve()
    trained_on = {part.dataset for part in RunRecord.load(run / "run.json").data}
    return is_from_here and parse_view(data)[0] in trained_on


def _make_tokens(data: str, name: str, workspace: Path, options: Flags) -> str:
    """Tokens of `data` under `name`, where they are not there as the cache is; the name."""
    tokenize(data, workspace=workspace, name=name, options=options)
    return name


def apply_vocabulary(run: str | Path, data: str, workspace: Path) -> str:
    """The name of tokens of `data` with the vocabulary of a run on histories, which are made where
    they are missing; `data` itself for other runs, and where its tokens are prepared as those of
    the training.
    """
    stored = find_run_folder(run, workspace) / HISTORIES
    folder = locate(workspace, "tokens", name_tokens(data))
    has_tokens = (folder / manifests.MANIFEST).is_file()
    if not has_result(stored) or (has_tokens and not has_result(folder / HISTORIES)):
        return data
    dataset, name = parse_view(data)[0] if not has_tokens else "", name_applied(data, stored.parent)
    if has_tokens:
        histories = HistoryPreparation.load(folder / HISTORIES)
        dataset = histories.options.dataset
        trained = HistoryPreparation.load(stored)
        # people of another cache have other pseudonyms: their tokens have no split
        is_placed = histories.cache == trained.cache or histories.options.split == EXTERNAL
        if is_placed and histories.vocabulary == trained.vocabulary:
            return data
    if (locate(workspace, "tokens", name) / manifests.MANIFEST).is_file():
        return name
    return _make_tokens(dataset, name, workspace, {"vocabulary": stored.parent})


def tokenize(
    data: str,
    *,
    workspace: Path = Path("workspace"),
    name: str | None = None,
    options: Flags | None = None,
    verify: bool = True,
    force_new: bool = False,
    dry_run: bool = False,
    **windows: Any,
) -> dict[str, Any]:
    """Build the tokens of `DATASET[/VIEW]` under `tokens/<name>`; returns folder, shape, notices,
    findings and the audit of the split. Choices of windows are given by name, such as stride=10,
    or as `options`.

    Of claims also the shortcut baselines and the path of a page. With `options["task"]`, a folder
    of MEDS labels (and `ids`): sequences up to its prediction times, of the codes of
    `tokens/<data>`. With `options["vocabulary"]`, a run or export: of its codes, by its map and
    choices, under the name `<data>-<run>`.

    Raises UserError: unknown_name, settings_differ, config (2), incomplete, no_input (4), integrity
    (5).
    """
    dataset, view = parse_view(data)
    kind = find_data_kind(data)
    choices = {"view": view, **(options or {}), **windows}
    if (run := choices.get("vocabulary")) is not None:
        choices["vocabulary"] = folder = find_run_folder(run, workspace)
        name = name_applied(data, folder) if name is None else name
    out = locate_new(workspace, "tokens", name if name is not None else name_tokens(data), "--name")
    if dry_run:
        return kind.plan_tokens(
            ensure_cache(dataset, make_scratch_workspace(workspace, dataset)), out, **choices
        )
    cache = ensure_cache(dataset, workspace)
    page = write_tokens(kind, cache, out, choices, Execution(workspace, force_new, verify))
    return {
        "format_version": FORMAT,
        "name": out.name,
        "data": data,
        "folder": str(out),
        **kind.summarize_tokens(out),
        **({"report": str(page)} if page else {}),
    }
