"""Base class of models without pre-training (gru-d, seft, raindrop, mtand-enc): no targets, final norm or output projection."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import Tensor, nn

from bitimely_core.config import ModelConfig
from bitimely_core.errors import UserError
from bitimely_core.models.adapters import RowTokenizer
from bitimely_core.models.base import Adapter, Direction, Model, config_error
from bitimely_core.registry import models
from bitimely_core.types import Batch


class RowAdapter(Adapter):
    """The adapter of a model that reads rows; what else depends on the channels its subclasses add."""

    tokenizer: RowTokenizer

    def __init__(self, config: ModelConfig, norm_width: int | None = None) -> None:
        nn.Module.__init__(self)
        self.tokenizer = RowTokenizer(config)
        self.output = nn.ModuleDict()


class SupervisedModel(Model):
    """A model that is trained with its head alone: every objective of pre-training is refused."""

    adapter_type: type[Adapter] = RowAdapter

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.norms = nn.ModuleDict({"next": nn.Identity()})

    def make_refusal(self) -> UserError:
        """The answer to an objective that asks for tokens."""
        name = self.config.name
        own = models[name].facts.objective
        return config_error(f"pre-training of {name}", f"its own objective is {own}", "objective.name", f"Use the objective {own}")

    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Raises UserError (config, exit 2)."""
        raise self.make_refusal()

    def erase(self, batch: Batch, chosen: Tensor) -> NoReturn:
        """Raises UserError (config, exit 2)."""
        raise self.make_refusal()

    def measure(self, batches: Iterable[Batch]) -> float:
        """NaN: there are no targets."""
        return float("nan")

    def prepare_batch(self, batch: Batch, directions: Iterable[Direction] | None, hide: Tensor | None) -> Batch:
        """The batch that `forward` reads. Raises UserError (config, exit 2) for directions and hidden tokens, which these models do not know."""
        if directions is not None or hide is not None:
            raise self.make_refusal()
        return self.expand_channels(batch)


def encode_times(times: Tensor, span: float, width: int) -> Tensor:
    """[sin(t / s_j), cos(t / s_j)] of times [B, T] -> [B, T, width], s_j = span^(j / (width / 2 - 1)) for j = 0 .. width / 2 - 1."""
    half = width // 2
    scales = torch.tensor([span ** (j / max(half - 1, 1)) for j in range(half)], dtype=times.dtype, device=times.device)
    angle = times[..., None] / scales
    return torch.cat((angle.sin(), angle.cos()), -1)
