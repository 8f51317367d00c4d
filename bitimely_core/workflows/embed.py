"""The verb `embed`: the vectors of a run, one row a window or sequence."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from bitimely_core import registry
from bitimely_core.errors import check_choice
from bitimely_core.evaluate.prediction import Computation, map_batches
from bitimely_core.run import FORMAT, Run, mark_subject
from bitimely_core.store import storage
from bitimely_core.store.records import refuse_other_manifest, write_results
from bitimely_core.workflows.prepare import Execution, open_run

if TYPE_CHECKING:
    from bitimely_core.tokens import Windows


class EmbedResult(TypedDict, total=False):
    """Result of `embed`; a dry run does not know the width."""

    format_version: int
    run: str
    data: str
    readout: str
    layers: str
    out: str
    n: int
    width: int


def embed(
    run: str | Path,
    *,
    data: str | None = None,
    readout: str | None = None,
    layers: str = "last",
    split: str = "all",
    out: Path | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    workspace: Path = Path("workspace"),
    verify: bool = True,
    dry_run: bool = False,
) -> EmbedResult:
    """Write `embeddings-<data>.parquet` beside the run (or `out`): window, subject_id,
    recording_id, start, label, split, embedding.

    The vector is the input of a head: `readout` over the last layer or the last two. The metadata
    of the file declare what the run was trained on, for `evaluate --vectors`.
    """
    import polars as pl

    from bitimely_core import heads
    from bitimely_core.train.devices import select_device

    check_choice("split", split, ["train", "validation", "test", "all"])
    check_choice("layers", layers, ["last", "last-two"])
    check_choice("readout", readout, heads.POOLS)
    select_device(device)
    opened = open_run(run, Execution(workspace, verify=verify, dry_run=dry_run), data)
    windows = opened.require_network().windows()
    opened.adapter_for(windows)
    rows = windows if split == "all" else windows[split]
    kind = (
        readout
        or opened.record.settings.finetune.readout
        or registry.models[opened.record.model].facts.readout
    )
    target = out or opened.folder / f"embeddings-{windows.name}.parquet"
    storage.refuse_link(target.parent if out is None else target)
    refuse_other_manifest(target.parent)
    if dry_run:
        return {"out": str(target), "n": len(rows), "readout": kind, "layers": layers}
    model = opened.model()
    compute = partial(heads.compute_vectors, model, readout=kind, layers=layers)
    vectors = map_batches(model, compute, rows, "embed", Computation(batch_size, device))
    matrix = np.concatenate(vectors) if vectors else np.zeros((0, 1), np.float32)
    frame = rows.index.with_columns(
        embedding=pl.Series(matrix, dtype=pl.Array(pl.Float32, matrix.shape[1]))
    )
    table = frame.to_arrow().replace_schema_metadata(_declare_training(opened, windows, kind))
    write_results(target.parent, {target.name: storage.encode_parquet(table)})
    return {
        "format_version": FORMAT,
        "run": opened.name,
        "data": windows.name,
        "readout": kind,
        "layers": layers,
        "out": str(target),
        "n": len(rows),
        "width": int(matrix.shape[1]),
    }


def _declare_training(run: Run, windows: Windows, readout: str) -> dict[str, str]:
    """The metadata of a file of vectors: the run and its readout, its data sets, and the subjects
    of `windows` that its training had, where they are known.
    """
    declared = {"encoder": f"{run.name}, {readout}", "tokens": windows.fingerprint}
    if run.train_subjects is None:
        return declared
    marks = set(run.train_subjects.marks)
    seen = sorted(
        subject
        for subject in set(windows.subjects())
        if mark_subject(windows.dataset, subject) in marks
    )
    return {
        **declared,
        "pretrained_on": json.dumps(sorted({data.dataset for data in run.record.data})),
        "pretrained_subjects": json.dumps(seen),
    }
