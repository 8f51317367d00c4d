"""`export`: a finished run as one self-contained folder to share."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from bitimely_core import manifests, storage
from bitimely_core.errors import safe_text, usage_error
from bitimely_core.privacy import is_small
from bitimely_core.records import has_result, list_results, read_result, write_results
from bitimely_core.run import FORMAT, Run
from bitimely_core.schemas.scores import Scores
from bitimely_core.schemas.tokens import Preprocessing
from bitimely_core.workflows import hub
from bitimely_core.workflows.calibrate import CALIBRATION, find_calibration
from bitimely_core.workspace import locate_new

PREPROCESSING = "preprocessing.json"
FORMATS = ("safetensors", "onnx")
PARTS = ("run.json", "model_card.md", "scores.json")


class ExportResult(TypedDict, total=False):
    """Result of `export`."""

    format_version: int
    run: str
    out: str
    files: list[str]
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
    from bitimely_core import heads, onnx_graph
    from bitimely_core.models import factory

    if format not in FORMATS:
        raise usage_error(
            f"format {safe_text(format)}", f"expected {' or '.join(FORMATS)}", field="--format"
        )
    opened = Run.open(run, workspace).require_finished()
    target = out or locate_new(workspace, "exports", opened.name)
    weights = opened.verified_weights()
    files = {
        "config.json": weights / "config.json",
        "model.safetensors": weights / "model.safetensors",
    }
    files |= {name: opened.folder / name for name in PARTS if has_result(opened.folder / name)}
    described = (
        {PREPROCESSING: found.encode()}
        if (found := _find_preprocessing(opened)) is not None
        else {}
    )
    graph = {onnx_graph.FILE} if format == "onnx" else set()
    names = sorted({*files, *described, *graph})
    result: ExportResult = {
        "format_version": FORMAT,
        "run": opened.name,
        "out": str(target),
        "files": names,
    }
    if dry_run:
        return {**result, "pushed": push}
    if push is not None:
        hub.load_client("--push")
    if target.is_dir() and (
        foreign := set(list_results(target)) - {*names, onnx_graph.FILE, CALIBRATION}
    ):
        text = f"holds {len(foreign)} other files"
        raise usage_error(text, "expected an empty folder", file=str(target), field="--out")
    if described:
        fitted = find_calibration(opened, heads.load(weights).eval(), store=False)
        described |= {} if fitted is None else {CALIBRATION: fitted.encode()}
    content = (
        {name: read_result(path) for name, path in files.items()}
        | _protect_counts(opened, set(files))
        | described
    )
    if graph:
        model = heads.load(weights) if opened.record.is_finetuned else factory.load(weights)
        content[onnx_graph.FILE] = onnx_graph.encode_onnx(model, field="--format")
    write_results(target, content)
    hashes = {name: storage.hash_file(target / name) for name in content}
    revision = (
        None
        if push is None
        else hub.upload_folder(target, push, sorted([*content, manifests.MANIFEST]))
    )
    return {
        **result,
        "files": sorted(content),
        "sha256": hashes,
        "pushed": push,
        "revision": revision,
    }


def _find_preprocessing(run: Run) -> Preprocessing | None:
    """What `predict` needs; None for a pre-training and for events."""
    if not run.record.is_finetuned or run.record.data[0].vocabulary:
        return None
    return run.preprocessing()


def _protect_counts(run: Run, names: set[str]) -> dict[str, bytes]:
    """Of claims the scores as pages print them, and the settings without counts of labels and of
    splits with few people.
    """
    data, out = run.record.data[0], {}
    if has_result(run.folder / Scores.SHARED) and "scores.json" in names:
        out["scores.json"] = read_result(run.folder / Scores.SHARED)
    if data.vocabulary and not data.small_counts and "run.json" in names:
        own = tuple(
            one.model_copy(
                update={"audit": {s: a for s, a in one.audit.items() if not is_small(a.subjects)}}
            )
            for one in run.record.data
        )
        out["run.json"] = storage.encode_json(
            run.record.model_copy(update={"data": own, "train_label_counts": None}).to_json()
        )
    return out
