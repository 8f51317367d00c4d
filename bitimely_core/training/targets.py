"""Targets of the terms of a loss, where the terms have different numbers of them.

A term is a mean over its own targets. On histories `next` has [EOS] of each row besides the targets of `previous`, so that micro-batches and
processes cannot be weighted by one count: their terms are, with the sums over all of them, which are needed before the first backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bitimely_core.models.tokenizers import CodeTokenizer
from bitimely_core.training import distributed, draws
from bitimely_core.types import Batch

if TYPE_CHECKING:
    from bitimely_core.training.loop import Objective

TERMS = ("next", "previous")
Counts = dict[str, Tensor]  # term -> number of its targets
Counter = Callable[[Any, Batch], Counts]


class Part(NamedTuple):
    """A micro-batch, and what makes the result of the objective on it a part of that of the whole batch."""

    batch: Batch
    weigh: Callable[[dict[str, Any]], dict[str, Any]] | None = None


def weigh_parts(batches: Sequence[Batch], counts: Sequence[Counts], device: torch.device) -> list[Part]:
    """The micro-batches of this process with the weights of their terms; every process calls it, also with none."""
    total = sum_targets(counts, device)
    return [Part(batch, partial(weigh_terms, own=own, total=total)) for batch, own in zip(batches, counts, strict=True)]


def find_counter(objective: Objective, model: nn.Module, parts: int) -> Counter | None:
    """What counts the targets of each term; None where one count weighs all terms, or the batch is in one part: `parts` in this process."""
    facts = draws.find_facts(objective, model)
    reads_codes = isinstance(getattr(getattr(model, "adapter", None), "tokenizer", None), CodeTokenizer)
    is_divided = parts > 1 or distributed.get_world_size() > 1
    return facts.targets if facts is not None and reads_codes and is_divided else None


def sum_targets(counts: Sequence[Counts], device: torch.device) -> Counts:
    """The sum of `counts` over all processes; a process without rows, or that has failed, gives none."""
    none = torch.zeros(len(TERMS), dtype=torch.int64, device=device)
    total = torch.stack([none, *(torch.stack([own[name] for name in TERMS]) for own in counts)]).sum(0)
    if distributed.get_world_size() > 1:
        dist.all_reduce(total)
    return dict(zip(TERMS, total, strict=True))


def weigh_terms(out: dict[str, Any], own: Counts, total: Counts) -> dict[str, Any]:
    """The result of an objective on a micro-batch, its terms weighted so that the mean over `count` is the loss of the whole batch.

    That is the sum of the terms, each a mean over its targets: `own` of the micro-batch, `total` of the batch.
    """
    here, whole = (torch.stack([of[name] for name in out["terms"]]).to(out["loss"].dtype) for of in (own, total))
    weights = here / whole.clamp(min=1) * (whole.sum() / here.sum().clamp(min=1))
    terms = dict(zip(out["terms"], weights * torch.stack(list(out["terms"].values())), strict=True))
    loss = torch.stack(list(terms.values())).sum()
    ratio = torch.where(out["loss"] == 0, 1.0, loss / out["loss"]).detach()
    return {**out, "loss": loss, "rel": out["rel"] * ratio, "parts": {name: term.detach() for name, term in terms.items()}}
