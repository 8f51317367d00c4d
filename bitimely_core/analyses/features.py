"""What probing and embedding read of a model: vectors of every readout and layer, and of the raw input as the control.

Legend: n rows, V channels, T samples, D width of a vector, K classes or labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bitimely_core import data, evaluate
from bitimely_core.analyses.attention import collect_facts, collect_notices, randomise_model
from bitimely_core.errors import UserError, usage_error
from bitimely_core.models.heads import POOLS, over_channels, pool
from bitimely_core.registry import models, unknown
from bitimely_core.types import Progress

if TYPE_CHECKING:
    from bitimely_core.analyses import LoadedRun
    from bitimely_core.tokens import Windows

Array = npt.NDArray[Any]

BATCH_ROWS = 32  # of a batch

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

    def words(self) -> str:
        """As the paper's table calls it."""
        where = {"last": "l = L", "last-two": "l = {L − 1, L}"}.get(self.layers, f"l = {self.layers}")
        return WORDS[self.readout] if self.readout == "native" else f"{WORDS[self.readout]} ({where})"


def require_labels(run: LoadedRun, kind: str) -> Windows:
    """The windows of a run with labels. Raises UserError (config, exit 2) where they have none."""
    if run.windows.task == "none":
        raise usage_error(
            f"{run.windows.name} has no labels",
            "expected a labelled view",
            f"Name one: bitimely analyze {kind} {run.name} --data synthetic/staging",
            field="--data",
        )
    return run.windows


def draw_rows(windows: Windows, split: str, count: int, seed: int) -> Array:
    """Positions in the index of up to `count` rows of a split, drawn without replacement, ascending; () where the split is empty."""
    rows = windows[split].rows
    return np.sort(np.random.default_rng(seed).choice(rows, min(count, len(rows)), replace=False)) if len(rows) else rows


def default_choice(run: LoadedRun) -> VectorChoice:
    """What fine-tuning reads: the head's own readout, else the model's."""
    head: Any = run.head
    if head is not None:
        return VectorChoice(head.readout, head.layers)
    return VectorChoice(models[str(run.model.config.name)].facts.readout, "last")  # type: ignore[union-attr]


def list_choices(model: Any, windows: Windows, row: int, readouts: Sequence[str] | None = None) -> list[VectorChoice]:
    """Every readout of every layer that the model has; without `readouts` those that need no more than one vector a layer.

    Raises UserError: unknown_name (exit 2) for a readout that is not known.
    """
    for name in readouts or ():
        if name not in POOLS:
            raise unknown("readout", name, list(POOLS))
    out = []
    with torch.inference_mode():
        batch = data.collate(windows, [row])
        encoded = model(batch)
        depth = len(encoded.hidden)
        for readout in readouts or [name for name in POOLS if name != "flatten"]:
            layers = ["last"] if readout == "native" else ["last", *(["last-two"] if depth > 1 else []), *map(str, range(1, depth))]
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
    cells: Sequence[VectorChoice],
    *,
    merge: str = "concat",
    progress: Progress | None = None,
    what: str = "",
) -> dict[VectorChoice, Array]:
    """The vectors of `rows` in every way of `cells`, [n, D] float32 each, from one pass through the model."""
    out: dict[VectorChoice, list[Array]] = {cell: [] for cell in cells}
    model = model.eval()
    with torch.inference_mode():
        for start in range(0, len(rows), BATCH_ROWS):
            batch = data.collate(windows, rows[start : start + BATCH_ROWS])
            encoded = model(batch)
            for cell in cells:
                upto = encoded if not cell.layers.isdigit() else encoded._replace(hidden=encoded.hidden[: int(cell.layers)])
                found = pool(upto, model, cell.readout, "last-two" if cell.layers == "last-two" else "last", merge)
                out[cell].append(over_channels(found, batch).float().numpy())
            if progress is not None:
                progress(what or "vectors", min(start + BATCH_ROWS, len(rows)), len(rows))
    return {cell: np.concatenate(parts) if parts else np.zeros((0, 1), np.float32) for cell, parts in out.items()}


def random_weights(model: Any, seed: int) -> Any:
    """The same architecture with random weights, in float32."""
    return randomise_model(model, seed).float()


def make_metric(values: Array, draws: Array, units: int, bootstrap: int) -> dict[str, Any]:
    """A metric object as those of `evaluate`: value, se, lo, hi, n_defined, undefined_reason. Below 5 subjects there is no interval."""
    kept = draws[np.isfinite(draws)]
    value = float(values) if np.isfinite(values) else None
    out: dict[str, Any] = {"value": value, "se": None, "lo": None, "hi": None, "n_defined": len(kept), "undefined_reason": None}
    if value is None:
        return {**out, "undefined_reason": "not defined by these rows"}
    if units < evaluate.MINIMUM_UNITS or bootstrap < 2 or len(kept) < evaluate.MINIMUM_DEFINED * bootstrap:
        few = units < evaluate.MINIMUM_UNITS
        why = f"{units} subjects, an interval needs at least {evaluate.MINIMUM_UNITS}" if few else "too few replicates define it"
        return {**out, "undefined_reason": f"no interval: {why}"}
    lo, hi = np.percentile(kept, [2.5, 97.5])
    return {**out, "se": float(kept.std(ddof=1)), "lo": float(lo), "hi": float(hi)}


def number_subjects(subjects: Array, seed: int) -> tuple[Array, int]:
    """Subjects as numbers from 0 in an order that tells nothing of their names, [n], and how many they are."""
    names, codes = np.unique(subjects.astype(str), return_inverse=True)
    return np.random.default_rng([seed, len(names)]).permutation(len(names))[codes], len(names)


def format_metric(value: dict[str, Any] | None, digits: int = 3) -> str:
    """A metric object in words: 0.842 (95 % 0.801 to 0.880)."""
    if value is None or value.get("value", value.get("difference")) is None:
        return "undefined"
    number = value.get("value", value.get("difference"))
    sign = "+" if "difference" in value else ""
    text = f"{number:{sign}.{digits}f}"
    return text + (
        f" (95 % {value['lo']:{sign}.{digits}f} to {value['hi']:{sign}.{digits}f})" if value["lo"] is not None else " (no interval)"
    )


def notices(run: LoadedRun, split: str, n_subjects: int) -> list[str]:
    """What must stand above scores of one run."""
    out = collect_notices([run], [split])
    out += [line for line in run.windows.manifest.get("notices", []) if line not in out]
    if run.shared:
        out.append(f"{run.shared} subjects of the test split were also in the training (split: {run.windows.split}).")
    if n_subjects < evaluate.MINIMUM_UNITS:
        out.append(
            f"The {split} split has {n_subjects} subject{'s' * (n_subjects != 1)}: there are no intervals, and nothing here can be "
            "told from the difference between one person and another."
        )
    return out


def facts(run: LoadedRun, seed: int, more: dict[str, str]) -> dict[str, str]:
    """The table at the top of a page about one run."""
    codes = getattr(run.windows, "vocabulary", ())
    events = {"Data": f"{run.windows.name} (events of {len(codes):,} codes, the last {run.windows.length} of a subject)"} if codes else {}
    return {**collect_facts([run], seed), **events, **more}
