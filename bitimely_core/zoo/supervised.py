"""Base class of models without pre-training (gru-d, seft, raindrop, mtand-enc): no targets, final
norm or output projection.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import partial
from typing import NoReturn

from torch import Tensor, nn

from bitimely_core.config import ModelConfig
from bitimely_core.errors import UserError
from bitimely_core.models.adapters import RowTokenizer
from bitimely_core.models.adapters import encode_times as encode_times
from bitimely_core.models.base import Adapter, Model, PlainAdapter
from bitimely_core.models.contract import Direction, objective_error
from bitimely_core.registry import ModelFacts, models
from bitimely_core.types import Batch, Encoded

SupervisedFacts = partial(ModelFacts, objective="none", capabilities=(), readout="native")


class RowAdapter(PlainAdapter):
    """Adapter of models that read rows. Subclasses add the other parameters that depend on the
    channels.
    """

    tokenizer: RowTokenizer

    def build(self, config: ModelConfig) -> None:
        """As `PlainAdapter.build`."""
        self.tokenizer = RowTokenizer(config)
        self.output = nn.ModuleDict()


class SupervisedModel(Model, ABC):
    """A model trained with its head alone; refuses every pre-training objective. A subclass adds
    `encode`.
    """

    adapter_type: type[Adapter] = RowAdapter

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.norms = nn.ModuleDict({"next": nn.Identity()})

    @abstractmethod
    def encode(self, batch: Batch, *, attention: bool) -> Encoded:
        """States and vector of a batch, with maps on request. `batch` as `expand_channels` returns
        it.
        """

    def forward(
        self,
        batch: Batch,
        *,
        directions: Iterable[Direction] | None = None,
        hide: Tensor | None = None,
        attention: bool = False,
    ) -> Encoded:
        """Encode signals [B, T, V] or events [B, N], with `attention` maps, too. Raises UserError
        (config, exit 2): directions or hidden tokens.
        """
        if directions is not None or hide is not None:
            raise self.make_refusal()
        return self.encode(self.expand_channels(batch), attention=attention)

    def make_refusal(self) -> UserError:
        """The error for an objective that needs tokens."""
        name = self.config.name
        return objective_error(
            self.config,
            f"pre-training of {name}",
            f"its own objective is {models[name].facts.objective}",
        )

    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Raises UserError (config, exit 2)."""
        raise self.make_refusal()

    def erase(self, batch: Batch, chosen: Tensor) -> NoReturn:
        """Raises UserError (config, exit 2)."""
        raise self.make_refusal()

    def measure(self, batches: Iterable[Batch]) -> float:
        """NaN: there are no targets."""
        return float("nan")
