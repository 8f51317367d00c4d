"""Targets of the terms of a loss, where the terms have different numbers of them.

A term is a mean over its targets. On histories `next` has [EOS] of each row besides the targets of
`previous`, so that one count cannot weigh micro-batches and processes. Each term has a weight
instead. It needs the sums over all parts before the first backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bitimely_core.models.tokenizers import CodeTokenizer
from bitimely_core.objectives import Result
from bitimely_core.train import distributed, draws
from bitimely_core.types import Batch

if TYPE_CHECKING:
    from bitimely_core.train.state import Objective

TERMS = ("next", "previous")
Counts = dict[str, Tensor]  # term -> number of its targets


class MicroBatch(NamedTuple):
    """Rows of a batch, and what makes the result of the objective on them a part of that of the
    whole batch.
    """

    batch: Batch
    weigh: Callable[[Result], Result] | None = None


def find_counter(
    objective: Objective, model: nn.Module, parts: int
) -> Callable[[Any, Batch], Counts] | None:
    """What counts the targets of each term; None where one count weighs all terms, or the batch is
    in one part: `parts` in this process.
    """
    facts = draws.find_facts(objective, model)
    reads_codes = isinstance(
        getattr(getattr(model, "adapter", None), "tokenizer", None), CodeTokenizer
    )
    is_divided = parts > 1 or distributed.get_world_size() > 1
    return facts.targets if facts is not None and reads_codes and is_divided else None


def weigh_batches(
    batches: Sequence[Batch], counts: Sequence[Counts], device: torch.device
) -> list[MicroBatch]:
    """The micro-batches of this process with the weights of their terms; every process calls it,
    also one without any.
    """
    none = torch.zeros(len(TERMS), dtype=torch.int64, device=device)
    parts = [torch.stack([part[name] for name in TERMS]) for part in counts]
    total = torch.stack([none, *parts]).sum(0)
    if distributed.get_world_size() > 1:
        dist.all_reduce(total)
    named = dict(zip(TERMS, total, strict=True))
    return [
        MicroBatch(batch, partial(weigh_terms, part=part, total=named))
        for batch, part in zip(batches, counts, strict=True)
    ]


def weigh_terms(out: Result, part: Counts, total: Counts) -> Result:
    """The result of an objective on a micro-batch, its terms weighted so that the mean over `count`
    is the sum of the terms of the whole batch.

    `part`: targets of the micro-batch, `total`: of the batch.
    """
    counted, whole = (
        torch.stack([counts[name] for name in out["terms"]]).to(out["loss"].dtype)
        for counts in (part, total)
    )
    weights = counted / whole.clamp(min=1) * (whole.sum() / counted.sum().clamp(min=1))
    terms = dict(zip(out["terms"], weights * torch.stack(list(out["terms"].values())), strict=True))
    loss = torch.stack(list(terms.values())).sum()
    ratio = torch.where(out["loss"] == 0, 1.0, loss / out["loss"]).detach()
    return {
        **out,
        "loss": loss,
        "rel": out["rel"] * ratio,
        "parts": {name: term.detach() for name, term in terms.items()},
    }
