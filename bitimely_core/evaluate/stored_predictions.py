"""Predictions stored in the folder of a run, so that nothing is predicted twice.

They have no windows, which name subjects.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bitimely_core.evaluate.prediction import Computation, predict
from bitimely_core.run import Run
from bitimely_core.store import storage
from bitimely_core.store.records import has_result, read_result_table, write_results
from bitimely_core.tokens import Windows

Array = npt.NDArray[Any]

FOLDER = "baselines"  # in the folder of a run: predictions of its baselines, and its own
PACKAGE = Path(__file__).parents[1]


def find_prediction(file: str, folders: Iterable[Path], task: str) -> Array | None:
    """The predictions [n, K], of a regression [n], in `file` of the first of the folders that has
    it. Raises UserError: integrity (exit 5).
    """
    path = next(filter(has_result, (folder / file for folder in folders)), None)
    if path is None:
        return None
    columns = np.ascontiguousarray(read_result_table(path).to_numpy())
    return columns[:, 0] if task == "regression" else columns


def store_prediction(path: Path, prediction: Array) -> None:
    """Write predictions [n] or [n, K]."""
    import polars as pl

    columns = prediction.reshape(len(prediction), -1)
    table = pl.DataFrame(columns, schema=[f"p{k}" for k in range(columns.shape[1])])
    write_results(path.parent, {path.name: storage.encode_parquet(table)})


def predict_run(opened: Run, rows: Windows, place: Computation) -> Array:
    """As `prediction.predict`, of rows of one split by a fine-tuned run.

    A network predicts again where its files, the windows, the device or the code of bitimely have
    changed; so does one whose code is not that of bitimely.
    """
    if opened.record.is_method or not len(rows):
        return predict(opened.head(), rows, place)
    folder = opened.verified_weights()
    inputs = {
        "model": storage.hash_files([folder / "config.json", folder / "model.safetensors"]),
        "code": storage.hash_files(sorted(PACKAGE.rglob("*.py"))),
        "data": [rows.name, rows.fingerprint, str(rows.index["split"][0])],
        "place": place,
    }
    file = f"run-{storage.fingerprint(inputs)[:24]}.parquet"
    stored = find_prediction(file, [opened.folder / FOLDER], rows.task)
    if stored is not None:
        return stored
    head: Any = opened.head()
    prediction = predict(head, rows, place)
    if type(head.model).__module__.startswith("bitimely_core."):
        store_prediction(opened.folder / FOLDER / file, prediction)
    return prediction
