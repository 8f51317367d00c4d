"""The verb `export`: a finished run as one self-contained folder to share."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from bitimely_core.errors import safe_text, usage_error
from bitimely_core.run import FORMAT, PREPROCESSING, Run
from bitimely_core.schemas.scores import Scores
from bitimely_core.store import manifests, storage
from bitimely_core.store.records import (
    describe_changes,
    has_result,
    list_results,
    read_result,
    write_results,
)
from bitimely_core.store.workspace import locate_new
from bitimely_core.tokens.sequences import HISTORIES
from bitimely_core.workflows import hub
from bitimely_core.workflows.calibrate import CALIBRATION, find_calibration

if TYPE_CHECKING:
    from bitimely_core.heads import Head
    from bitimely_core.models.base import Model

FORMATS = ("safetensors", "onnx")
PARTS = ("run.json", "model_card.md", "scores.json")


class ExportResult(TypedDict, total=False):
    """Result of `export`."""

    format_version: int
    run: str
    out: str
    files: list[str]
    next: str | None  # the command that reads it
    notices: list[str]  # altered files of the run that the folder does not hold
    sha256: dict[str, str]
    pushed: str | None  # the repository
    revision: str | None  # the commit


def export(
    run: str | Path,
    *,
    out: Path | None = None,
    push: str | None = None,
    format: str = "safetensors",  # noqa: A002  # the name of its flag
    workspace: Path = Path("workspace"),
    dry_run: bool = False,
) -> ExportResult:
    """Weights, configuration, card, settings and scores of a finished run in one folder that
    `--init` and `models.load` read.

    No cache, no tokens, no predictions, no subject: no data about persons. `out` is `export-<run>`
    beside the workspace's runs when not given, and must hold nothing else. With `push`
    (`OWNER/NAME` of a model hub, extra `hub`) it is uploaded, to a private repository if it is new.
    `format` onnx adds `model.onnx` (extra `onnx`), a graph with free batch and length, of the
    models of signals in `models.onnx_graph.MODELS`.

    Raises UserError: incomplete (exit 4), config (2): the folder holds something, or the extra is
    missing; not_found (4): the hub cannot be reached.
    """
    from bitimely_core import onnx_graph

    opened = Run.open(run, workspace).require_finished()
    _check_format(format, opened)
    target = out or locate_new(workspace, "exports", opened.name)
    weights = opened.verified_weights()
    files = _list_files(opened, weights)
    described = _encode_preprocessing(opened)
    graph = {onnx_graph.FILE} if format == "onnx" else set()
    names = sorted({*files, *described, *graph})
    result: ExportResult = {
        "format_version": FORMAT,
        "run": opened.name,
        "out": str(target),
        "files": names,
        "next": _name_next(opened, target),
        "notices": describe_changes(opened.folder),
        "pushed": push,
    }
    if dry_run:
        return result
    if push is not None:
        hub.load_client("--push")
    _require_empty(target, {*names, onnx_graph.FILE, CALIBRATION})
    if described and opened.record.is_finetuned:
        described |= _encode_calibration(opened)
    content = {name: read_result(path) for name, path in files.items()}
    content |= _protect_counts(opened, set(files)) | described
    if graph:
        model = _load_model(opened, weights)
        content[onnx_graph.FILE] = onnx_graph.encode_onnx(model, field="--format")
    write_results(target, content)
    revision = None
    if push is not None:
        revision = hub.upload_folder(target, push, sorted([*content, manifests.MANIFEST]))
    return {
        **result,
        "files": sorted(content),
        "sha256": {name: storage.hash_file(target / name) for name in content},
        "revision": revision,
    }


def _check_format(name: str, run: Run) -> None:
    """Raises UserError (config, exit 2) for an unknown format, or a graph of no network."""
    if name not in FORMATS:
        raise usage_error(
            f"format {safe_text(name)}", f"expected {' or '.join(FORMATS)}", field="--format"
        )
    if name == "onnx" and run.record.is_method:
        raise usage_error(
            f"{run.record.model} has no network",
            "expected a run of a network for a graph",
            "Leave --format out: the folder holds arrays that any language reads",
            field="--format",
        )


def _name_next(run: Run, target: Path) -> str | None:
    """The command that reads the folder; none for a method on histories."""
    folder = shlex.quote(str(target))
    if run.record.is_finetuned and not run.record.data[0].vocabulary:
        return f"bitimely predict {folder} FILES"
    return None if run.record.is_method else f"bitimely pretrain --init {folder}"


def _require_empty(folder: Path, names: set[str]) -> None:
    """Raises UserError (config, exit 2) where the folder holds files beside `names`."""
    foreign = set(list_results(folder)) - names if folder.is_dir() else ()
    if foreign:
        raise usage_error(
            f"holds {len(foreign)} other files",
            "expected an empty folder",
            file=str(folder),
            field="--out",
        )


def _list_files(run: Run, weights: Path) -> dict[str, Path]:
    """The files that are copied, by the names that they get."""
    files = {name: weights / name for name in ("config.json", "model.safetensors")}
    return files | {name: run.folder / name for name in PARTS if has_result(run.folder / name)}


def _load_model(run: Run, weights: Path) -> Model | Head:
    from bitimely_core import heads
    from bitimely_core.models import factory

    return heads.load(weights) if run.record.is_finetuned else factory.load(weights)


def _encode_calibration(run: Run) -> dict[str, bytes]:
    """The file of the calibration, where it is stored or can be fitted."""
    fitted = find_calibration(run, run.load_head(), store=False)
    return {} if fitted is None else {CALIBRATION: fitted.encode()}


def _encode_preprocessing(run: Run) -> dict[str, bytes]:
    """The file of what `predict` needs; none for a pre-training on signals."""
    if run.record.data[0].vocabulary:
        return {HISTORIES: run.histories().encode()} if has_result(run.folder / HISTORIES) else {}
    if not run.record.is_finetuned:
        return {}
    return {PREPROCESSING: run.preprocessing().encode()}


def _protect_counts(run: Run, names: set[str]) -> dict[str, bytes]:
    """Of claims the scores as pages print them, and the settings without counts of labels and of
    splits with few people.
    """
    record, protected = run.record, {}
    if has_result(run.folder / Scores.SHARED) and "scores.json" in names:
        protected["scores.json"] = read_result(run.folder / Scores.SHARED)
    shared = record.share()
    if shared != record and "run.json" in names:
        protected["run.json"] = storage.encode_json(shared.to_json())
    return protected
