"""Sums of gradients over processes, which travel while the backward pass goes on.

Gradients of about 25 MB share a bucket, those of the last parameters first, as the backward pass
reaches them. A bucket leaves once all of its gradients and all buckets before it are there, so that
the order is the same in every process. A gradient that a process lacks counts as 0, and one that
all lack stays None.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bitimely_core.train.distributed import get_world_size

LIMIT = 25 * 2**20  # bytes of a bucket


class Bucket:
    """Gradients of one dtype that travel together."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.sums = torch.empty(
            sum(map(Tensor.numel, parameters)),
            dtype=parameters[0].dtype,
            device=parameters[0].device,
        )
        self.pieces = [
            piece.view_as(p)
            for p, piece in zip(
                parameters, self.sums.split([*map(Tensor.numel, parameters)]), strict=True
            )
        ]
        self.missing = len(parameters)  # gradients that the last micro-batch has not reached yet
        self.work: dist.Work | None = None

    @torch.no_grad()
    def send(self) -> None:
        """Start the sum over all processes."""
        for parameter, piece in zip(self.parameters, self.pieces, strict=True):
            piece.zero_() if parameter.grad is None else piece.copy_(parameter.grad)
        self.work = dist.all_reduce(self.sums, async_op=True)

    def receive(self) -> None:
        """Wait for the sum."""
        assert self.work is not None
        self.work.wait()
        self.work, self.missing = None, len(self.parameters)


class GradientSum:
    """The gradients of `parameters`, summed over all processes; nothing for a single one.

    Each step: `is_last` before the backward pass of the last micro-batch, `send_all` in every
    process, whatever happened there, `receive_all`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        trained = [p for p in parameters if p.requires_grad] if get_world_size() > 1 else []
        self.buckets = list(map(Bucket, split_parameters(trained[::-1], LIMIT)))
        self.sent = 0  # buckets of this step
        self.is_last = False
        self.hooks = [
            p.register_post_accumulate_grad_hook(partial(self._count, bucket))
            for bucket in self.buckets
            for p in bucket.parameters
        ]

    def _count(self, bucket: Bucket, parameter: Tensor) -> None:
        """A gradient is there: send every bucket that is full, up to the first that is not."""
        if self.is_last:
            bucket.missing -= 1
            while self.sent < len(self.buckets) and not self.buckets[self.sent].missing:
                self._send_next()

    def _send_next(self) -> None:
        self.buckets[self.sent].send()
        self.sent += 1

    def send_all(self) -> None:
        """Send what is left: gradients that this process has not used, or all where it had no rows
        or has failed.
        """
        self.is_last = False
        while self.sent < len(self.buckets):
            self._send_next()

    def receive_all(self) -> None:
        """Wait for the sums, and put them in the place of the gradients."""
        if not self.buckets:
            return
        pairs = list(
            chain.from_iterable(
                zip(bucket.parameters, bucket.pieces, strict=True) for bucket in self.buckets
            )
        )
        used = torch.tensor([p.grad is not None for p, _ in pairs], dtype=torch.float32)
        dist.all_reduce(used)
        for bucket in self.buckets:
            bucket.receive()
        for (parameter, piece), count in zip(pairs, used.tolist(), strict=True):
            parameter.grad = piece if count else None
        self.sent = 0

    def close(self) -> None:
        """The parameters as they were."""
        for hook in self.hooks:
            hook.remove()


def split_parameters(parameters: list[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Runs of parameters of one dtype and device, of at most `limit` bytes, or of a single
    parameter.
    """
    parts: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        bytes_needed = parameter.numel() * parameter.element_size()
        if (
            not parts
            or (parts[-1][0].dtype, parts[-1][0].device) != (parameter.dtype, parameter.device)
            or size + bytes_needed > limit
        ):
            parts, size = [*parts, []], 0
        parts[-1].append(parameter)
        size += bytes_needed
    return parts
