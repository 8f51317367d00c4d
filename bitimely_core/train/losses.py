"""Losses of micro-batches, added up on the host or on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Parts = dict[str, tuple[float, float]]  # name -> (count, count x value)


@dataclass(frozen=True)
class BatchLoss:
    """The objective on one micro-batch."""

    loss: Tensor
    count: Tensor | float  # what the loss is a mean over
    rel: Tensor | float
    parts: dict[str, Tensor | float]
    rel_count: Tensor | float  # what rel is a mean over


@dataclass
class DeviceLosses:
    """Losses that stay on a device between log lines, so that the host does not wait for every
    step.

    A step whose loss, gradient norm or count is not usable is not applied and none after it
    (`found_inf` of the fused AdamW), and the host finds out which it was when it reads.
    """

    found_inf: Tensor  # [] 1 from the first unusable step on
    first: Tensor  # [4] number, count, loss sum and gradient norm of that step, else -1
    # [4 + parts] count, count x loss, rel_count x rel, rel_count, count x part of the last step
    last: Tensor
    names: tuple[str, ...] = ()  # of its parts
    norm: Tensor | None = None  # of its gradient

    def add(self, out: BatchLoss) -> None:
        """Add a micro-batch to the last step."""
        count, loss, rel, rel_count, *parts = map(
            self._place, (out.count, out.loss, out.rel, out.rel_count, *out.parts.values())
        )
        row = torch.stack(
            [count, count * loss, rel_count * rel, rel_count, *(count * part for part in parts)]
        ).detach()
        self.last = row if len(row) != len(self.last) else self.last + row
        self.names = tuple(out.parts)

    def _place(self, value: Tensor | float) -> Tensor:
        """On the device, without a wait: a number is filled in, since `torch.as_tensor` would copy
        it from the host and wait.
        """
        if isinstance(value, Tensor):
            return value.to(self.last, non_blocking=True)
        return self.last.new_full((), value)

    def judge(self, norm: Tensor, step: int) -> None:
        """Mark the step as unusable where its count is 0, or its loss or norm is not finite."""
        count, loss = self.last[0], self.last[1]
        bad = (count == 0) | ~torch.isfinite(loss) | ~torch.isfinite(norm)
        row = torch.stack([torch.full_like(loss, step), count, loss, norm.to(loss.dtype)])
        self.first = torch.where(bad & (self.found_inf == 0), row, self.first)
        self.found_inf = torch.maximum(self.found_inf, bad.to(self.found_inf.dtype))
        self.norm = norm


def accumulate(sums: list[float], parts: Parts, out: BatchLoss) -> None:
    """Add count, count x loss, rel_count x rel and rel_count to `sums`, and each part to `parts`,
    in one transfer from the device.
    """
    kind = torch.promote_types(out.loss.dtype, torch.float32)
    values = [out.count, out.loss, out.rel, out.rel_count, *out.parts.values()]
    count, loss, rel, per, *rest = torch.stack(
        [torch.as_tensor(v, dtype=kind, device=out.loss.device).detach() for v in values]
    ).tolist()
    sums[:] = [a + b for a, b in zip(sums, (count, count * loss, per * rel, per), strict=True)]
    for name, number in zip(out.parts, rest, strict=True):
        counted, weighted = parts.get(name, (0.0, 0.0))
        parts[name] = (counted + count, weighted + count * number)
