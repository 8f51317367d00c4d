"""What calibration, embedding and probing share: drawn rows, vectors of every readout and layer of
a model, metrics over subjects, and the start of a page of scores.

Legend: n rows, V channels, T samples, D width of a vector, K classes or labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bitimely_core import data, evaluate
from bitimely_core.analyses import start_page
from bitimely_core.errors import Reason, UserError, check_choice, input_error
from bitimely_core.evaluate.intervals import explain_few
from bitimely_core.evaluate.prediction import Computation, map_batches
from bitimely_core.evaluate.verdicts import count_units
from bitimely_core.heads import POOLS, average_channels, find_readout, pool
from bitimely_core.page import PageBuilder
from bitimely_core.registry import models
from bitimely_core.run import Run
from bitimely_core.schemas.scores import MetricValue, TaskScores
from bitimely_core.tokens import Windows
from bitimely_core.types import Batch, Encoded

Array = npt.NDArray[Any]

MAX_WIDTH = 4096  # widest vector that is probed
WORDS = {
    "sos": "[SOS]",
    "eos": "[EOS]",
    "sos+eos": "[SOS] + [EOS]",
    "mean": "average pooling",
    "mean+tokens": "average pooling, and of the tokens",
    "last": "last token",
    "max": "maximum",
    "flatten": "all tokens",
    "native": "the method's own",
}


class VectorChoice(NamedTuple):
    """A way to read one vector from the states of a model."""

    readout: str  # a key of `heads.POOLS`
    layers: str  # last, last-two, or the number of a layer before the last

    def describe(self) -> str:
        """As the paper's table calls it."""
        if self.readout == "native":
            return WORDS["native"]
        layers = {"last": "L", "last-two": "{L − 1, L}"}.get(self.layers, self.layers)
        return f"{WORDS[self.readout]} (l = {layers})"


def draw_rows(windows: Windows, split: str, count: int, seed: int) -> Array:
    """Positions in the index of up to `count` rows of a split, drawn without replacement,
    ascending.
    """
    rows = windows[split].rows
    return np.sort(np.random.default_rng(seed).choice(rows, min(count, len(rows)), replace=False))


def require_rows(windows: Windows, split: str, rows: Array, requirement: str) -> None:
    """Raises UserError (no_input, exit 4) for a split without rows."""
    if not len(rows):
        problem = f"{windows.name} has no {split} rows"
        raise input_error(Reason.NO_INPUT, problem, requirement, "Tokenize more subjects")


def default_choice(run: Run) -> VectorChoice:
    """The readout of the head of a fine-tuned run, else the default of the model."""
    head: Any = run.require_network().head()
    if head is not None:
        return VectorChoice(head.readout, head.layers)
    return VectorChoice(models[str(run.model().config.name)].facts.readout, "last")


def list_choices(
    model: Any, windows: Windows, row: int, readouts: Sequence[str] | None = None
) -> list[VectorChoice]:
    """Every layer of `readouts`; by default of all that the model has but `flatten`, up to a width.

    Raises UserError: unknown_name (exit 2) for an unknown readout; that of `heads.pool` for one
    that the model lacks.
    """
    with torch.inference_mode():
        batch = data.collate(windows, [row])
        encoded = model(data.to_device(batch, data.find_device(model)))
        for name in readouts or ():
            check_choice("readout", name, POOLS)
            pool(encoded, model, name)
        names = readouts or [name for name in POOLS if _is_default(name, encoded, model)]
    depth = len(encoded.hidden)
    pair = ["last-two"] if depth > 1 else []
    choices = []
    for name in names:
        others = [] if name == "native" else [*pair, *map(str, range(1, depth))]
        choices += [VectorChoice(name, layers) for layers in ("last", *others)]
    return choices


def _is_default(readout: str, encoded: Encoded, model: Any) -> bool:
    """Whether a readout is probed by default: the model has it, and it is not too wide."""
    if readout == "flatten" or readout == "mean+tokens" != find_readout(model.config):
        return False
    try:
        return pool(encoded, model, readout).shape[-1] <= MAX_WIDTH
    except UserError:
        return False


def extract_vectors(
    model: Any,
    windows: Windows,
    rows: Array,
    choices: Sequence[VectorChoice],
    *,
    device: str = "cpu",
    label: str = "vectors",
) -> dict[VectorChoice, Array]:
    """The vectors of `rows` for each of `choices`, [n, D] float32, from one pass through the model.

    On one device they have the bits of `embed`.
    """
    widths: list[int] = []

    def compute(batch: Batch) -> torch.Tensor:
        encoded = model(batch)
        vectors = [
            average_channels(_read_vector(encoded, model, choice), batch) for choice in choices
        ]
        widths[:] = [vector.shape[1] for vector in vectors]
        return torch.cat(vectors, 1)

    parts = map_batches(model, compute, windows, label, Computation(device=device), rows)
    if not parts:
        return {choice: np.zeros((0, 1), np.float32) for choice in choices}
    columns = np.split(np.concatenate(parts), np.cumsum(widths)[:-1], axis=1)
    return dict(zip(choices, columns, strict=True))


def _read_vector(encoded: Encoded, model: Any, choice: VectorChoice) -> torch.Tensor:
    if not choice.layers.isdigit():
        return pool(encoded, model, choice.readout, choice.layers)
    below = encoded._replace(hidden=encoded.hidden[: int(choice.layers)])
    return pool(below, model, choice.readout)


class TestSplit(NamedTuple):
    """The rows on which everything is scored, and how."""

    windows: Windows
    rows: Array
    target: Array
    bootstrap: int

    @property
    def subjects(self) -> Array:
        """Of the rows, [n]."""
        return self.windows.whole_index["subject_id"].to_numpy()[self.rows].astype(str)

    def score(
        self,
        prediction: Array,
        baselines: Mapping[str, Array] | None = None,
        train_target: Array | None = None,
    ) -> TaskScores:
        """Scores of a prediction, with paired differences to `baselines`."""
        return evaluate.score(
            self.windows.task,
            self.target,
            prediction,
            self.subjects,
            class_names=self.windows.class_names,
            train_target=train_target,
            baselines=baselines,
            bootstrap=self.bootstrap,
            unit=self.windows.target_unit,
            subject=getattr(self.windows, "subject_unit", "subject"),
        )


def make_metric(value: float, draws: Array, units: int, bootstrap: int) -> MetricValue:
    """A metric with its standard error and 95 % interval from the `draws` of its replicates; with
    fewer than 5 subjects without.
    """
    draws = draws[np.isfinite(draws)]
    if not np.isfinite(value):
        return MetricValue(n_defined=len(draws), undefined_reason="not defined by these rows")
    metric = MetricValue(value=float(value), n_defined=len(draws))
    reason = explain_few(units, bootstrap)
    if reason is None and len(draws) < evaluate.MINIMUM_DEFINED * bootstrap:
        reason = "defined in too few replicates"
    if reason is not None:
        return metric.model_copy(update={"undefined_reason": f"no CI: {reason}"})
    lo, hi = map(float, np.percentile(draws, [2.5, 97.5]))
    return metric.model_copy(update={"se": float(draws.std(ddof=1)), "lo": lo, "hi": hi})


def number_subjects(subjects: Array, seed: int) -> tuple[Array, int]:
    """Subjects as numbers from 0 in random order, [n], and their count.

    The order does not disclose their names.
    """
    names, codes = np.unique(subjects.astype(str), return_inverse=True)
    return np.random.default_rng([seed, len(names)]).permutation(len(names))[codes], len(names)


def format_metric(metric: MetricValue) -> str:
    """A metric as text: 0.842 (95 % CI 0.801 to 0.880)."""
    if metric.value is None:
        return "undefined"
    if metric.lo is None:
        return f"{metric.value:.3f} (no CI)"
    return f"{metric.value:.3f} (95 % CI {metric.lo:.3f} to {metric.hi:.3f})"


def start_scored_page(title: str, run: Run, split: str, n_subjects: int, seed: int) -> PageBuilder:
    """A page of scores of one run, with the caveats of its windows and of few subjects."""
    page = start_page(title, [run], [split], seed)
    page.notice(*run.windows().notices)
    shared = run.count_shared_subjects()
    if shared:
        page.notice(
            f"{shared} subjects of the test split were also in the training "
            f"(split: {run.windows().split})."
        )
    if n_subjects < evaluate.MINIMUM_UNITS:
        page.notice(
            f"The {split} split has {count_units(n_subjects)}: there are no confidence "
            "intervals, and the variance between subjects cannot be estimated."
        )
    return page


def describe_rows(page: PageBuilder, windows: Windows, rows: Mapping[str, Array]) -> None:
    """Add the number of rows of each split to the facts, and a notice where a split was sampled."""
    page.fact("Rows", ", ".join(f"{len(drawn):,} {split}" for split, drawn in rows.items()))
    for split, drawn in rows.items():
        note_sample(page, len(drawn), windows, split)


def note_sample(page: PageBuilder, count: int, windows: Windows, split: str) -> None:
    """Add a notice where only `count` of the windows of a split were used."""
    total = len(windows[split])
    if count < total:
        page.notice(f"{count:,} of the {total:,} {split} windows were used (--sequences).")
