"""Recurrent models: LSTM, LSTM-BAAR (forward and backward layers in turns), BiLSTM (both ways in
each layer), ELMo (two stacks).

States are always in forward time order. Backward reading starts at the [EOS] of a row: a plain flip
would start in the padding. The order of events is read, their times are not.

Plain stacks of 8 to 12 layers, as in the paper's table, train badly from torch's random biases:
here they start at 0, those of the forget gates at 1. `dropout` (before each layer from the second
on, as in torch.nn.LSTM), residual connections and layer norms (`connections`) are available and off
by default.

Legend: B batch, N tokens, M = N + 2 positions, D width, H width of one direction, L layers.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bitimely_core.models.contract import Direction, Which, config_error
from bitimely_core.models.layers import BidirectionalConfig, Positions, run_layers
from bitimely_core.models.stack import (
    ALTERNATING,
    DIRECTED_CAPABILITIES,
    PAPER,
    BidirectionalModel,
    EmbeddedBatch,
    LayerDirections,
    LayerReading,
    require_even_layers,
)
from bitimely_core.models.tokenizers import take_state, take_steps
from bitimely_core.registry import ModelFacts, models
from bitimely_core.types import Batch


class RecurrentConfig(BidirectionalConfig):
    """Settings of the recurrent models."""

    connections: Literal["plain", "residual", "norm", "residual-norm"] = Field(
        "plain", description="Around each layer from the second on."
    )


class BiLSTMConfig(RecurrentConfig):
    """Settings of BiLSTM."""

    direction_width: Literal["full", "half"] = Field(
        "full", description="Width of each direction: dim, or half of it."
    )


class ELMoConfig(RecurrentConfig):
    """Settings of ELMo."""

    elmo_mix: Literal["last", "all"] = Field(
        "last",
        description="Native vector from the last layer, or from a learned mix of all layers.",
    )


def reverse_rows(x: Tensor, ends: Tensor | None) -> Tensor:
    """Reverse the first `ends` [B] positions of each row, [B, M] or [B, M, D]; the others stay. Its
    own inverse.
    """
    if ends is None:
        return x.flip(1)
    index = torch.arange(x.shape[1], device=x.device)
    mirrored = ends[:, None] - 1 - index
    source = torch.where(mirrored >= 0, mirrored, index)
    return take_steps(x, source)


@torch.no_grad()
def make_lstm(inputs: int, hidden: int) -> nn.LSTM:
    """An LSTM that starts with biases of 0, those of the forget gate 1: random ones make four
    layers nearly blind to their input.
    """
    lstm = nn.LSTM(inputs, hidden, batch_first=True)
    for name, bias in lstm.named_parameters():
        if name.startswith("bias"):
            nn.init.zeros_(bias)
        if name.startswith("bias_ih"):
            nn.init.ones_(bias[hidden : 2 * hidden])
    return lstm


class LSTMLayer(nn.Module):
    """One LSTM for either direction, or one per direction; from the second layer on with the
    `connections` of the configuration.

    i, f, o = sigmoid(W x_t + U h_(t-1) + b), g = tanh(W x_t + U h_(t-1) + b), c_t = f * c_(t-1) + i
    * g, h_t = o * tanh(c_t).

    Layers count from `depth` 0 on; `hidden` are the widths H of its LSTMs: one, or a forward and a
    backward one.
    """

    def __init__(self, config: RecurrentConfig, depth: int, inputs: int, *hidden: int) -> None:
        super().__init__()
        later = depth > 0
        self.lstms = nn.ModuleList(make_lstm(inputs, size) for size in hidden)
        self.norm = (
            nn.LayerNorm(inputs) if later and "norm" in config.connections else nn.Identity()
        )
        self.residual = later and "residual" in config.connections
        self.dropout = nn.Dropout(config.dropout if later else 0.0)

    def forward(self, x: Tensor, ends: Tensor | None, direction: Direction) -> tuple[Tensor, None]:
        """[B, M, inputs] -> [B, M, H of one direction, or of both], and no map; the first `ends`
        [B] positions of a row are real.
        """
        inner = self.dropout(self.norm(x))
        ways = ("forward", "backward") if direction == "both" else (direction,)
        read = [
            self._read(lstm, inner, way, ends) for lstm, way in zip(self.lstms, ways, strict=True)
        ]
        y = torch.cat(read, -1)
        return x + y if self.residual else y, None

    def advance(
        self, x: Tensor, places: Positions, state: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """As `StackLayer.advance`; the state is (h, c)."""
        y, state = self.lstms[0](self.dropout(self.norm(x)), state)
        return x + y if self.residual else y, state

    @staticmethod
    def _read(lstm: nn.Module, x: Tensor, way: str, ends: Tensor | None) -> Tensor:
        if way == "backward":
            return reverse_rows(run_lstm(lstm, reverse_rows(x, ends)), ends)
        return run_lstm(lstm, x)


def run_lstm(lstm: nn.Module, x: Tensor) -> Tensor:
    """[B, M, inputs] -> [B, M, H]; on the CPU in float32, whatever autocast wants: oneDNN has no
    LSTM in bfloat16 for processors without AVX-512.
    """
    if not (x.device.type == "cpu" and torch.is_autocast_enabled("cpu")):
        out: Tensor = lstm(x)[0]
        return out
    with torch.autocast("cpu", enabled=False):
        return run_lstm(lstm, x.to(next(lstm.parameters()).dtype))


def join_ends(states: Tensor, lengths: Tensor) -> Tensor:
    """Forward half of the state at the last token and backward half at the first, [B, M, W] -> [B,
    W].
    """
    forward, backward = states.chunk(2, -1)
    return torch.cat((take_state(forward, lengths), backward[:, 1]), -1)


class RecurrentModel(BidirectionalModel):
    """A stack of LSTM layers between [SOS] and [EOS]; each layer has one LSTM, which reads in
    either direction.
    """

    takes: tuple[Direction, ...] = ("forward", "backward")
    config: RecurrentConfig

    def __init__(self, config: RecurrentConfig) -> None:
        require_even_layers(config)
        super().__init__(config)
        self.layers = self._build_layers()

    def _build_layers(self) -> nn.ModuleList:
        dim = self.config.dim
        return nn.ModuleList(
            LSTMLayer(self.config, depth, dim, dim) for depth in range(self.config.layers)
        )

    def read(
        self, embedded: EmbeddedBatch, plan: LayerDirections, *, attention: bool
    ) -> LayerReading:
        """As `BidirectionalModel.read`; there are no maps."""
        lengths = embedded.real.sum(1)
        ends = None if embedded.batch.mask is None else lengths + 2
        states, pooled = self._states(embedded.x, plan, lengths, ends)
        return states, None, pooled

    def _states(
        self, x: Tensor, plan: LayerDirections, lengths: Tensor, ends: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """States of each layer and the model's own vector, from positions of which `ends` [B] are
        no padding (None: all).
        """
        return run_layers(self.layers, x, plan, ends)[0], None


class BiLSTM(RecurrentModel):
    """Both directions in each layer, each of width D (states 2 D), or of width D / 2 for
    `direction_width` = half (states D).
    """

    takes = ("both",)
    config: BiLSTMConfig

    def __init__(self, config: BiLSTMConfig) -> None:
        if config.direction_width == "half" and config.dim % 2:
            raise config_error(
                f"{config.dim} in two halves", "expected an even number", "model.dim"
            )
        super().__init__(config)
        self.pooled_width = self.width

    @property
    def width(self) -> int:
        """Width of both directions."""
        return self.config.dim * (1 if self.config.direction_width == "half" else 2)

    def _build_layers(self) -> nn.ModuleList:
        hidden = self.width // 2
        inputs = [self.config.dim] + [self.width] * (self.config.layers - 1)
        return nn.ModuleList(
            LSTMLayer(self.config, depth, size, hidden, hidden) for depth, size in enumerate(inputs)
        )

    def _states(
        self, x: Tensor, plan: LayerDirections, lengths: Tensor, ends: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None]:
        states, _ = run_layers(self.layers, x, plan, ends)
        return states, join_ends(self.norm(states[-1]), lengths)


class ELMo(RecurrentModel):
    """A forward and a backward stack without connections, with a common embedding and output
    projection.

    With one direction in all layers only that stack runs (states D); `both` concatenates them
    (states 2 D), the prediction is their mean.

    Native vector: last forward and first backward state of layer L, behind the final norm; or with
    `elmo_mix` = all, gamma * sum_j softmax(s)_j [forward_j ; backward_j] over the layers j = 0 ..
    L, where layer 0 is the embedded token twice.
    """

    takes = ("forward", "backward", "both")
    config: ELMoConfig

    def __init__(self, config: ELMoConfig) -> None:
        super().__init__(config)
        self.backward_layers = self._build_layers()
        self.pooled_width = self.width
        if config.elmo_mix == "all":
            # s, gamma
            self.weights, self.scale = (
                nn.Parameter(torch.zeros(config.layers + 1)),
                nn.Parameter(torch.ones(())),
            )

    @property
    def width(self) -> int:
        """Width of both stacks."""
        return 2 * self.config.dim

    @property
    def norm_width(self) -> int:
        """Width of one stack."""
        return self.config.dim

    def _check(self, plan: LayerDirections) -> None:
        super()._check(plan)
        if len(set(plan)) > 1:
            raise config_error(
                "layers of different directions",
                "the two stacks of elmo never meet",
                "objective.name",
                "Use the objective next-previous-strict",
            )

    def _states(
        self, x: Tensor, plan: LayerDirections, lengths: Tensor, ends: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None]:
        stacks: dict[Direction, nn.ModuleList] = {
            "forward": self.layers,
            "backward": self.backward_layers,
        }
        runs = [
            run_layers(layers, x, [way] * len(plan), ends)[0]
            for way, layers in stacks.items()
            if plan[0] in {way, "both"}
        ]
        if len(runs) == 1:
            return runs[0], None
        pairs = list(zip(*runs, strict=True))
        states = [torch.cat(pair, -1) for pair in pairs]
        if self.config.elmo_mix == "last":
            return states, join_ends(self.norm(states[-1]), lengths)
        layers = torch.stack(
            [join_ends(torch.cat(pair, -1), lengths) for pair in [(x, x), *pairs]], -1
        )
        return states, self.scale * (layers * self.weights.softmax(0)).sum(-1)

    def norm(self, hidden: Tensor, which: Which = "next") -> Tensor:
        """The final norm of the states of one stack, or of each half of concatenated ones."""
        if hidden.shape[-1] == self.norm_width:
            return super().norm(hidden, which)
        forward, backward = hidden.chunk(2, -1)
        return torch.cat((super().norm(forward, "next"), super().norm(backward, "previous")), -1)

    def output(self, hidden: Tensor, which: Which = "next", batch: Batch | None = None) -> Tensor:
        """Prediction of one stack, or the mean of both."""
        if hidden.shape[-1] == self.norm_width:
            return super().output(hidden, which, batch)
        forward, backward = hidden.chunk(2, -1)
        return (
            super().output(forward, "next", batch) + super().output(backward, "previous", batch)
        ) / 2


RecurrentFacts = partial(ModelFacts, family="recurrent", tokenizer="patch-cnn")
LSTM = "Hochreiter and Schmidhuber 1997, Long Short-Term Memory"


@models(
    RecurrentFacts(
        config=RecurrentConfig,
        objective="next",
        capabilities=DIRECTED_CAPABILITIES,
        readout="last",
        directions=("forward",),
        input=("regular", "events"),
        source=LSTM,
        known="At the paper's depth of 8 to 12 layers plain stacks train badly: "
        "model.connections=residual-norm",
    )
)
def lstm(config: RecurrentConfig) -> RecurrentModel:
    """LSTM: every layer forward."""
    return RecurrentModel(config)


@models(
    RecurrentFacts(
        config=RecurrentConfig,
        objective="next-previous-strict",
        capabilities=DIRECTED_CAPABILITIES,
        readout="sos",
        directions=ALTERNATING,
        source=PAPER,
        known="Its objective shows the targets to the model, as BiTimelyGPT's does",
    )
)
def lstm_baar(config: RecurrentConfig) -> RecurrentModel:
    """LSTM layers that read forward and backward in turns."""
    return RecurrentModel(config)


@models(
    RecurrentFacts(
        config=BiLSTMConfig,
        objective="masked",
        capabilities=("hidden",),
        readout="native",
        directions=("both",),
        source="Graves and Schmidhuber 2005, Framewise Phoneme Classification with Bidirectional "
        "LSTM",
        known="Next tokens cannot be asked of it: every layer above the first has seen them",
        budget_changes=lambda config: {"direction_width": "half"},
    )
)
def bilstm(config: BiLSTMConfig) -> BiLSTM:
    """BiLSTM: both directions in each layer, pre-trained by masking."""
    return BiLSTM(config)


@models(
    RecurrentFacts(
        config=ELMoConfig,
        objective="next-previous-strict",
        capabilities=("one-way", "hidden"),
        readout="native",
        directions=("both",),
        source="Peters et al. 2018, Deep Contextualized Word Representations",
        known="The original has residual connections and projections of 512 from cells of 4096",
        budget_changes=lambda config: {"layers": max(config.layers // 2, 1)},
    )
)
def elmo(config: ELMoConfig) -> ELMo:
    """ELMo: a forward and a backward stack that never meet."""
    return ELMo(config)
