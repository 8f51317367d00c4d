"""Vectors of every readout and layer of a model, and the metrics of rows grouped by subject, for
calibration, embedding and probing.

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
from bitimely_core.errors import UserError, check_choice, usage_error
from bitimely_core.evaluate.predict import map_batches
from bitimely_core.evaluate.verdicts import choose_places
from bitimely_core.heads import POOLS, average_channels, pool
from bitimely_core.page import PageBuilder
from bitimely_core.registry import models
from bitimely_core.run import Run
from bitimely_core.schemas.scores import Difference, MetricValue, TaskScores
from bitimely_core.tokens import Windows
from bitimely_core.types import Batch, Progress

Array = npt.NDArray[Any]

MAX_WIDTH = 4096  # widest vector that is probed
WORDS = {
    "sos": "[SOS]",
    "eos": "[EOS]",
    "sos+eos": "[SOS] + [EOS]",
    "mean": "average pooling",
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
        layers = {"last": "l = L", "last-two": "l = {L − 1, L}"}.get(
            self.layers, f"l = {self.layers}"
        )
        return (
            WORDS[self.readout] if self.readout == "native" else f"{WORDS[self.readout]} ({layers})"
        )


def require_labels(run: Run, kind: str) -> Windows:
    """The windows of a run with labels. Raises UserError (config, exit 2) where they have none."""
    windows = run.windows()
    if windows.task == "none":
        raise usage_error(
            f"{windows.name} has no labels",
            "expected a labelled view",
            f"Name one: bitimely analyze {kind} {run.name} --data synthetic/staging",
            field="--data",
        )
    return windows


def draw_rows(windows: Windows, split: str, count: int, seed: int) -> Array:
    """Positions in the index of up to `count` rows of a split, drawn without replacement,
    ascending; () for an empty split.
    """
    rows = windows[split].rows
    return (
        np.sort(np.random.default_rng(seed).choice(rows, min(count, len(rows)), replace=False))
        if len(rows)
        else rows
    )


def default_choice(run: Run) -> VectorChoice:
    """The readout of the head of a fine-tuned run, else the default of the model."""
    head: Any = run.head()
    if head is not None:
        return VectorChoice(head.readout, head.layers)
    return VectorChoice(models[str(run.model().config.name)].facts.readout, "last")


def list_choices(
    model: Any, windows: Windows, row: int, readouts: Sequence[str] | None = None
) -> list[VectorChoice]:
    """Every readout of every layer of a model, by default without `flatten`. Raises UserError
    (unknown_name, exit 2) for an unknown readout.
    """
    for name in readouts or ():
        check_choice("readout", name, POOLS)
    out = []
    with torch.inference_mode():
        batch = data.collate(windows, [row])
        encoded = model(data.to_device(batch, data.find_device(model)))
        depth = len(encoded.hidden)
        for readout in readouts or [name for name in POOLS if name != "flatten"]:
            layers = (
                ["last"]
                if readout == "native"
                else ["last", *(["last-two"] if depth > 1 else []), *map(str, range(1, depth))]
            )
            try:
                width = pool(encoded, model, readout, "last").shape[-1]
            except UserError:  # the model has no such vector
                if readouts:
                    raise
                continue
            if width <= MAX_WIDTH or readouts:
                out += [VectorChoice(readout, at) for at in layers]
    return out


def extract_vectors(
    model: Any,
    windows: Windows,
    rows: Array,
    choices: Sequence[VectorChoice],
    *,
    device: str = "cpu",
    progress: Progress | None = None,
    label: str = "vectors",
) -> dict[VectorChoice, Array]:
    """The vectors of `rows` for each of `choices`, [n, D] float32, from one pass through the model;
    on one device the bits of `embed`.
    """
    widths: list[int] = []

    def compute(batch: Batch) -> torch.Tensor:
        encoded, found = model(batch), []
        for choice in choices:
            below = (
                encoded._replace(hidden=encoded.hidden[: int(choice.layers)])
                if choice.layers.isdigit()
                else encoded
            )
            vectors = pool(
                below, model, choice.readout, "last-two" if choice.layers == "last-two" else "last"
            )
            found.append(average_channels(vectors, batch))
        widths[:] = [one.shape[1] for one in found]
        return torch.cat(found, 1)

    parts = map_batches(model, compute, windows, label, device=device, rows=rows, progress=progress)
    if not parts:
        return {choice: np.zeros((0, 1), np.float32) for choice in choices}
    return dict(
        zip(choices, np.split(np.concatenate(parts), np.cumsum(widths)[:-1], axis=1), strict=True)
    )


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
    """A metric with its bootstrap standard error and 95 % interval from the `draws` of its
    replicates; below 5 subjects without.
    """
    kept = draws[np.isfinite(draws)]
    if not np.isfinite(value):
        return MetricValue(n_defined=len(kept), undefined_reason="not defined by these rows")
    if units < evaluate.MINIMUM_UNITS:
        reason = f"no CI: {units} subjects, at least {evaluate.MINIMUM_UNITS} required"
    elif bootstrap < 2 or len(kept) < evaluate.MINIMUM_DEFINED * bootstrap:
        reason = "no CI: defined in too few replicates"
    else:
        lo, hi = np.percentile(kept, [2.5, 97.5])
        return MetricValue(
            value=float(value),
            se=float(kept.std(ddof=1)),
            lo=float(lo),
            hi=float(hi),
            n_defined=len(kept),
        )
    return MetricValue(value=float(value), n_defined=len(kept), undefined_reason=reason)


def number_subjects(subjects: Array, seed: int) -> tuple[Array, int]:
    """Subjects as numbers from 0 in random order, which does not disclose their names, [n], and
    their count.
    """
    names, codes = np.unique(subjects.astype(str), return_inverse=True)
    return np.random.default_rng([seed, len(names)]).permutation(len(names))[codes], len(names)


def format_metric(metric: MetricValue | Difference) -> str:
    """A metric or a difference as text: 0.842 (95 % CI 0.801 to 0.880)."""
    value, form, factor, unit = (
        metric.value if isinstance(metric, MetricValue) else None,
        ".3f",
        1.0,
        "",
    )
    if isinstance(metric, Difference):
        printed = evaluate.MetricUnit(metric.unit or "1", metric.factor or 1.0)
        bounds = (
            None if one is None else one * printed.factor
            for one in (metric.se, metric.lo, metric.hi)
        )
        places = choose_places(1 if printed.factor > 1 else 3, *bounds)
        value, form, factor, unit = (
            metric.difference,
            f"+.{places}f",
            printed.factor,
            printed.suffix,
        )
    if value is None:
        return "undefined"
    lo, hi = (f"{(end or 0.0) * factor:{form}}" for end in (metric.lo, metric.hi))
    return f"{value * factor:{form}}{unit} " + (
        f"(95 % CI {lo} to {hi})" if metric.lo is not None else "(no CI)"
    )


def start_scored_page(title: str, run: Run, split: str, n_subjects: int, seed: int) -> PageBuilder:
    """A page of scores of one run, with the caveats of its windows and of few subjects."""
    page = start_page(title, [run], [split], seed)
    page.notice(*run.windows().notices)
    shared = run.count_shared_subjects()
    if shared:
        page.notice(
            f"{shared} subjects of the test split were also in the training (split: {run.windows().split})."
        )
    if n_subjects < evaluate.MINIMUM_UNITS:
        page.notice(
            f"The {split} split has {n_subjects} subject{'s' * (n_subjects != 1)}: there are no confidence intervals, and the variance "
            "between subjects cannot be estimated."
        )
    return page


def describe_rows(page: PageBuilder, windows: Windows, rows: Mapping[str, Array]) -> None:
    """Add the number of rows of each split to the facts, and a notice where a split was sampled."""
    page.fact("Rows", ", ".join(f"{len(at):,} {split}" for split, at in rows.items()))
    for split, at in rows.items():
        if len(at) < len(windows[split]):
            page.notice(
                f"{len(at):,} of the {len(windows[split]):,} {split} windows were used (--sequences)."
            )
