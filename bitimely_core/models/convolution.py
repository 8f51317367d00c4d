"""Convolutions in float32 on the CPU, whatever autocast wants, and the residual block of them.

oneDNN's convolutions in bfloat16 are wrong on processors with AMX for some shapes, without a word:
torch 2.13, kernel 8, 8 channels, 9 timesteps are off by the size of the result
(https://github.com/pytorch/pytorch/issues/169688 is a case of it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

KERNEL, STRIDE = 5, 2  # of residual blocks


def convolve(
    function: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """`function`, F.conv1d or F.conv2d, of a signal and its weights."""
    if not (x.device.type == "cpu" and torch.is_autocast_enabled("cpu")):
        return function(x, weight, bias, **options)
    with torch.autocast("cpu", enabled=False):
        return function(x.to(weight.dtype), weight, bias, **options)


class Conv1d(nn.Conv1d):
    """torch's, computed by `convolve`."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return convolve(super()._conv_forward, x, weight, bias)


class ResidualBlock(nn.Module):
    """Two convolutions of kernel `KERNEL`, the first of stride `STRIDE`, beside a linear map of the
    same stride: y = f(conv(f(conv y)) + y W).

    `conv(inputs, outputs, kernel, stride)` is a convolution with its norm, `activate` is f.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        conv: Callable[..., nn.Module],
        activate: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.first = conv(inputs, outputs, KERNEL, STRIDE)
        self.second = conv(outputs, outputs, KERNEL)
        self.shortcut = conv(inputs, outputs, 1, STRIDE)
        self.activate = activate

    def forward(self, y: Tensor, counts: Tensor | None = None) -> Tensor:
        """[B, C, n] -> [B, outputs, ceil(n / 2)], of which the first `counts` [B] are a row's own
        (None: all).
        """
        inner = self.activate(self.first(y, counts))
        joined: Tensor = self.second(inner, counts) + self.shortcut(y, counts)
        return self.activate(joined)
