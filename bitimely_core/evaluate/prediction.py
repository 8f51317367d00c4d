"""Predictions of a fine-tuned run on windows, and the metric that tuning goes by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bitimely_core.methods.method_contract import FittedMethod, MethodRows
from bitimely_core.progress import report_progress
from bitimely_core.types import Batch, Record

if TYPE_CHECKING:
    from torch import Tensor

    from bitimely_core.tokens import Windows
    from bitimely_core.train.tuning import TrainValidation, TrialScores

EVALUATION_BATCH = 64
# of predictions: the activations of fewer rows stay in the cache of the processor, and give the
# same bits
CPU_BATCH = 32


class Computation(NamedTuple):
    """How predictions are computed."""

    batch_size: int | None = None  # windows; None: what the device is given
    device: str = "auto"


ANYWHERE = Computation()


def map_batches(
    model: Any,
    call: Callable[[Batch], Tensor],
    windows: Windows,
    action: str,
    place: Computation = ANYWHERE,
    rows: np.ndarray | None = None,
) -> list[np.ndarray]:
    """`call` of each batch of the windows (of `rows`, positions in the full index) on the device,
    without gradients; `model` is moved there first. `action` names it on the screen.

    The last batch is filled up with repeated rows: in batches of one shape the result of a row does
    not depend on the rows beside it, so that the same windows give the same bits in another set.
    """
    import torch

    from bitimely_core import data
    from bitimely_core.train.devices import select_device

    device = select_device(place.device)
    model.to(device).eval()
    out: list[np.ndarray] = []
    size = place.batch_size or (CPU_BATCH if device.type == "cpu" else EVALUATION_BATCH)
    every = windows.rows if rows is None else rows
    steps = -(-len(every) // size)
    with torch.inference_mode():
        for step in range(steps):
            part = every[step * size : (step + 1) * size]
            batch = data.collate(windows, np.pad(part, (0, size - len(part)), mode="edge"))
            out.append(call(data.to_device(batch, device)).float().cpu().numpy()[: len(part)])
            report_progress(
                action if rows is not None else f"{action} {windows.name}", step + 1, steps
            )
    return out


def predict(
    model: Any, windows: Windows, place: Computation = ANYWHERE, record: Record | None = None
) -> np.ndarray:
    """Predictions of a fine-tuned model or fitted method, in the order of the rows: probabilities
    [n, K], or values [n] in the target's unit. `record`: the recording of windows of no cache.
    """
    if isinstance(model, FittedMethod):
        return model.predict(MethodRows(windows, None if record is None else (record,)))
    return predict_rows(model, windows, None, "predict", place)


def predict_rows(
    head: Any, windows: Windows, rows: np.ndarray | None, action: str, place: Computation = ANYWHERE
) -> np.ndarray:
    """As `predict`, of the windows at `rows`, positions in the full index (None: all), by a network
    `head`; `action` names it on the screen.

    With context the neighbours of a window are those of its recording in the full index, in
    whatever split; their labels are not read.
    """
    if not len(windows.rows if rows is None else rows):
        return np.zeros((0, max(windows.classes, 1)), np.float32)
    compute = partial(map_batches, head, action=action, place=place)
    if head.context is None:
        return np.concatenate(compute(head.predict, windows, rows=rows))
    return _predict_in_context(head, windows, windows.rows if rows is None else rows, compute)


def _predict_in_context(
    head: Any, windows: Windows, rows: np.ndarray, compute: Callable[..., list[np.ndarray]]
) -> np.ndarray:
    """The vectors of all windows that are needed, once each, then the predictions recording by
    recording.
    """
    import torch

    places, reach = windows.find_places(), head.context.reach
    wanted = np.sort(places[rows])
    before = wanted[np.maximum(np.searchsorted(wanted, places, "right") - 1, 0)]
    after = wanted[np.minimum(np.searchsorted(wanted, places), len(wanted) - 1)]
    near = np.minimum(np.abs(places - before), np.abs(after - places))
    needed = np.flatnonzero(near <= reach)
    needed = needed[np.argsort(places[needed], kind="stable")]
    everything = replace(windows, rows=np.arange(len(places)))
    vectors = np.concatenate(compute(head.compute_vectors, everything, rows=needed))
    first = np.flatnonzero(np.diff(windows.recording[needed], prepend=-1))
    place = next(head.parameters()).device
    out: list[np.ndarray] = []
    with torch.inference_mode():
        for start, stop in pairwise([*first, len(needed)]):
            parts = vectors[start:stop], places[needed[start:stop]]
            predicted = head.predict_in_context(*(torch.from_numpy(x).to(place) for x in parts))
            out.append(predicted.cpu().numpy())
    predictions = np.concatenate(out)
    position = np.empty(len(places), np.int64)
    position[needed] = np.arange(len(needed))
    return predictions[position[rows]]


def measure_task(head: Any, views: Sequence[TrainValidation], device: str = "auto") -> TrialScores:
    """The main metric of the task on the validation windows; a `measure` of a learning-rate
    search.
    """
    from bitimely_core import evaluate

    rows = views[0]["validation"]
    target = rows.targets(None)
    assert target is not None, "a view with a task has targets"
    scores = evaluate.score(
        rows.task,
        target,
        predict(head, rows, Computation(device=device)),
        rows.subjects(),
        class_names=rows.class_names,
        bootstrap=0,
    )
    return {str(scores.main): scores.metrics[str(scores.main)].value}
