"""Objectives that predict tokens: the next, the previous or hidden ones.

Targets are fixed functions of the input.

Index map (token i stands at position i + 1): position p of a forward layer predicts token p, its
right neighbour ([SOS]: token 0); position p of a backward layer predicts token p - 2, its left
neighbour ([EOS]: the last token). With [EOS] at a row's true end the same slices serve padded rows.
Signals: mean squared error over valid values. Codes: cross-entropy over the codes and one class for
[EOS]; `ties = "group"`: all codes of the next or former time at once, binary cross-entropy.

Legend: B batch, N tokens, P target width (codes: classes), M predictions a row, L layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Generator, Tensor
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig, ObjectiveConfig
from bitimely_core.errors import usage_error
from bitimely_core.models.base import Model
from bitimely_core.models.contract import Direction, Which, config_error
from bitimely_core.models.tokenizers import IGNORE, CodeTokenizer, take_steps
from bitimely_core.ops.fused import widen
from bitimely_core.registry import ObjectiveFacts, objectives
from bitimely_core.types import Batch, Encoded

Result = dict[str, Any]
Generators = Sequence[Generator | None]  # one a row; None: torch's global one


class LossPart(NamedTuple):
    """One term of a loss: predictions, targets and their validity mask."""

    name: str
    prediction: Tensor  # [B, M, P]
    target: Tensor  # [B, M, P]; class ids [B, M]
    valid: Tensor  # bool, as the target
    sets: bool = False  # the target marks every code of a set


class StrictConfig(ObjectiveConfig):
    """Settings of next-previous-strict."""

    direction_sampling: bool = Field(
        False, description="One direction a batch instead of two passes."
    )


class MaskedConfig(ObjectiveConfig):
    """Settings of objectives that hide tokens."""

    ratio: float = Field(0.4, gt=0, lt=1, description="Share of hidden tokens.")


class GapConfig(MaskedConfig):
    """Settings of gap."""

    span: int = Field(5, ge=1, description="Longest hidden span, tokens.")


NOTICE = (
    "next-previous: this objective can see its targets (leak_free: false); its loss measures "
    "copying, not forecasting. next-previous-strict asks the same without the leak."
)


def count_targets(model: Model, batch: Batch) -> dict[str, Tensor]:
    """Targets of the terms next and previous on histories, of which next alone has [EOS]; the terms
    of signals have the same ones.
    """
    tokenizer = model.adapter.tokenizer
    assert isinstance(tokenizer, CodeTokenizer)
    real = tokenizer.find_real(batch)
    if model.config.ties == "group":
        return {
            "next": real.sum() + len(real),
            "previous": (real & (tokenizer.sets(batch)[1] > 0)).sum() + real.any(1).sum(),
        }
    valid = (tokenizer.find_targets(batch) & real).sum()
    return {"next": valid + len(real), "previous": valid}


@objectives(
    ObjectiveFacts(leak_free=False, requires="alternating", notice=NOTICE, targets=count_targets)
)
def next_previous(
    model: Model, batch: Batch, generator: Generator | None = None, *, config: ObjectiveConfig
) -> Result:
    """The paper's: one alternating pass, next token read at layer L - 1, previous token at layer L
    (Eq. 9). It can see its targets.
    """
    encoded = model(batch, directions=cycle_directions(model, "forward", "backward"))
    hidden = encoded.hidden
    return make_result(
        model,
        batch,
        [
            _make_part(model, batch, encoded, hidden[-2], "next"),
            _make_part(model, batch, encoded, hidden[-1], "previous"),
        ],
    )


@objectives(
    ObjectiveFacts(
        leak_free=True,
        context="past or future",
        requires="one-way",
        config=StrictConfig,
        passes=2,
        shared=True,
        targets=count_targets,
    )
)
def next_previous_strict(
    model: Model, batch: Batch, generator: Generator | None = None, *, config: StrictConfig
) -> Result:
    """The leak-free form: two passes of the same weights, all layers forward (next token), all
    backward (previous token).
    """
    refuse_overlap(model.config)
    chosen: list[tuple[Direction, Which]] = [("forward", "next"), ("backward", "previous")]
    if config.direction_sampling:
        chosen = [chosen[int(torch.randint(2, (), generator=generator))]]
    parts = []
    for direction, which in chosen:
        encoded = model(batch, directions=cycle_directions(model, direction))
        parts.append(_make_part(model, batch, encoded, encoded.hidden[-1], which))
    return make_result(model, batch, parts)


@objectives(ObjectiveFacts(leak_free=True, context="past", requires="one-way"), name="next")
def next_token(
    model: Model, batch: Batch, generator: Generator | None = None, *, config: ObjectiveConfig
) -> Result:
    """All layers forward, next token read at layer L."""
    refuse_overlap(model.config)
    encoded = model(batch, directions=cycle_directions(model, "forward"))
    return make_result(
        model, batch, [_make_part(model, batch, encoded, encoded.hidden[-1], "next")]
    )


def draw_hidden(
    model: Model,
    batch: Batch,
    generators: Generators,
    draw: Callable[[int, Generator | None], Tensor],
) -> Tensor:
    """Tokens to hide, bool [B, N], on the CPU: `draw(n, generator)` gives those of a row with n
    tokens.
    """
    refuse_overlap(model.config)
    real = model.adapter_of(batch).tokenizer.find_real(batch)
    chosen = torch.zeros(real.shape, dtype=real.dtype)
    for row, count, generator in zip(chosen, real.sum(1).tolist(), generators, strict=True):
        row[draw(count, generator)] = True
    return chosen


def draw_masked(model: Model, batch: Batch, generators: Generators, config: MaskedConfig) -> Tensor:
    """Tokens to hide, each by itself."""
    return draw_hidden(
        model,
        batch,
        generators,
        lambda n, generator: torch.rand(n, generator=generator).argsort()[
            : count_share(config.ratio, n)
        ],
    )


def draw_gaps(model: Model, batch: Batch, generators: Generators, config: GapConfig) -> Tensor:
    """Tokens to hide, in spans."""
    return draw_hidden(
        model, batch, generators, lambda n, generator: _draw_spans(n, config, generator)
    )


def refuse_normalisation(config: ModelConfig) -> None:
    """Raises UserError (config, exit 2) for masking before RevIN, whose statistics it would
    change.
    """
    if config.normalises_windows:
        raise config_error(
            "masked before RevIN",
            "expected masked-patches, which masks after it",
            "objective.name",
            "Use masked-patches, or model.revin=false",
        )


@objectives(
    ObjectiveFacts(
        leak_free=True,
        requires="hidden",
        config=MaskedConfig,
        check=refuse_normalisation,
        draw=draw_masked,
    )
)
def masked(
    model: Model, batch: Batch, generator: Generator | None = None, *, config: MaskedConfig
) -> Result:
    """40 % of the tokens set to zero after normalisation, all channels together (codes: [MASK]);
    reconstruct them.
    """
    return predict_hidden("masked", model, batch, lambda chosen: model(model.erase(batch, chosen)))


@objectives(ObjectiveFacts(leak_free=True, requires="hidden", config=GapConfig, draw=draw_gaps))
def gap(
    model: Model, batch: Batch, generator: Generator | None = None, *, config: GapConfig
) -> Result:
    """40 % of the tokens hidden in spans: a learned vector in their place, and no key in any layer;
    fill them in.
    """
    return predict_hidden("gap", model, batch, lambda chosen: model(batch, hide=chosen))


@objectives(
    ObjectiveFacts(
        leak_free=None,
        notice="Without pre-training: the model and its head learn from the labels alone.",
    ),
    name="none",
)
def no_pretraining(
    model: Model, batch: Batch, generator: Generator | None = None, *, config: ObjectiveConfig
) -> Result:
    """No pre-training."""
    raise usage_error(
        "objective none",
        "expected an objective that trains",
        "Skip pretrain, and fine-tune from scratch",
        field="objective.name",
    )


def cycle_directions(model: Model, *cycle: Direction) -> tuple[Direction, ...]:
    """Directions of the layers, cycled."""
    return tuple(itertools.islice(itertools.cycle(cycle), model.config.layers))


def _make_part(
    model: Model, batch: Batch, encoded: Encoded, hidden: Tensor, which: Which
) -> LossPart:
    """Read the next or previous token from states [B, N + 2, D] by the index map."""
    assert encoded.mask is not None
    tokenizer = model.adapter.tokenizer
    if isinstance(tokenizer, CodeTokenizer) and model.config.ties == "group":
        return _make_set_part(model, tokenizer, batch, encoded.mask, hidden, which)
    target, valid = model.targets(batch)
    if which == "previous":
        return LossPart(which, model.output(hidden[:, 2:], which, batch), target, valid)
    if not isinstance(tokenizer, CodeTokenizer):
        return LossPart(which, model.output(hidden[:, :-2], which, batch), target, valid)
    target = F.pad(target, (0, 1), value=IGNORE)  # behind the last code stands [EOS]
    at_end = torch.arange(target.shape[1], device=target.device) == encoded.mask.sum(
        1, keepdim=True
    )
    return LossPart(
        which,
        model.output(hidden[:, :-1], which),
        target.masked_fill(at_end, tokenizer.eos),
        F.pad(valid, (0, 1)) | at_end,
    )


def _make_set_part(
    model: Model, tokenizer: CodeTokenizer, batch: Batch, real: Tensor, hidden: Tensor, which: Which
) -> LossPart:
    """All codes of the next or previous distinct time, predicted by every event, [SOS] (next) and
    [EOS] (previous).
    """
    sets, group = tokenizer.sets(batch)
    ends = real.sum(1, keepdim=True)
    last = group[:, -1:]
    # positions 0 .. N: [SOS] predicts the first time, an event the time after its own
    if which == "next":
        wanted, asks = F.pad(group + 1, (1, 0)), F.pad(real, (1, 0), value=True)
        hidden = hidden[:, :-1]
    else:  # positions 1 .. N + 1: an event predicts the time before its own, [EOS] the last one
        at_end = torch.arange(real.shape[1] + 1, device=real.device) == ends
        wanted, asks = (
            torch.where(at_end, last, F.pad(group, (0, 1)) - 1),
            (F.pad(real, (0, 1)) | at_end) & (ends > 0),
        )
        hidden = hidden[:, 1:]
    valid = asks & (wanted >= 0)
    target = take_steps(sets, wanted.clamp(min=0))
    return LossPart(
        which, model.output(hidden, which), target, valid[..., None].expand_as(target), sets=True
    )


def make_hidden_part(
    model: Model,
    batch: Batch,
    encoded: Encoded,
    target: Tensor,
    valid: Tensor,
    chosen: Tensor,
    name: str,
) -> LossPart:
    """Read each chosen token, or each chosen value [B, N, P] of it, at its own position of layer
    L.
    """
    states = encoded.hidden[-1] if encoded.eos is None else encoded.hidden[-1][:, 1:-1]
    return LossPart(
        name,
        model.output(states, batch=batch),
        target,
        valid & (chosen if valid.dim() == chosen.dim() else chosen[..., None]),
    )


def make_result(model: Model, batch: Batch, parts: list[LossPart]) -> Result:
    """Sum of the parts; rel is their mean divided by the measured target scale, else by that of
    this batch.
    """
    losses = {part.name: _compute_loss(part) for part in parts}
    slices, start = {}, 0
    for part in parts:
        slices[part.name] = slice(start, start + part.target.shape[1])
        start += part.target.shape[1]
    loss = torch.stack(list(losses.values())).sum()
    joined = {
        key: torch.cat([getattr(part, key) for part in parts], 1)
        for key in ("prediction", "target", "valid")
    }
    return {
        **pack_result(
            loss,
            loss.detach() / len(parts) / find_target_scale(model, batch),
            losses,
            joined["valid"].sum(),
            slices=slices,
            **joined,
        ),
        "terms": losses,
    }


def find_target_scale(model: Model, batch: Batch) -> Tensor | float:
    """The measured scale of the targets, else that of this batch; whether it is measured is read
    from a device only once after each change.
    """
    scale, seen = model.target_scale, getattr(model, "scale_seen", None)
    version = -1 if scale.is_inference() else scale._version
    if seen is None or seen[0] is not scale or seen[1] != version or version < 0:
        seen = scale, version, bool(torch.isfinite(scale))
        object.__setattr__(model, "scale_seen", seen)  # of this object alone: no buffer
    return scale if seen[2] else model.measure([batch])


def pack_result(
    loss: Tensor,
    rel: Tensor,
    parts: dict[str, Tensor],
    count: Tensor | int,
    *,
    prediction: Tensor | None = None,
    target: Tensor | None = None,
    valid: Tensor | None = None,
    slices: dict[str, slice] | None = None,
    rel_count: Tensor | int | None = None,
) -> Result:
    """What an objective returns, see `objectives.get`; the parts are detached."""
    detached = {name: value.detach() for name, value in parts.items()}
    aligned = {"prediction": prediction, "target": target, "valid": valid, "slices": slices or {}}
    return {
        "loss": loss,
        "rel": rel,
        "parts": detached,
        **aligned,
        "count": count,
        "rel_count": count if rel_count is None else rel_count,
    }


def _compute_loss(part: LossPart) -> Tensor:
    """Mean over the valid targets, in float32 at least; 0 where there is none."""
    prediction = widen(part.prediction)
    count = part.valid.sum().clamp(min=1)
    if part.target.dim() == 2:
        target = torch.where(part.valid, part.target, IGNORE).flatten()
        losses = F.cross_entropy(
            prediction.flatten(0, 1), target, ignore_index=IGNORE, reduction="sum"
        )
        return losses / count
    if part.prediction.shape != part.target.shape:
        raise ValueError(
            f"prediction {list(part.prediction.shape)} and target {list(part.target.shape)} "
            "are not aligned"
        )
    target = part.target.to(prediction.dtype)
    if part.sets:
        losses = F.binary_cross_entropy_with_logits(prediction, target, reduction="none")
    else:
        losses = (prediction - target).square()
    return torch.where(part.valid, losses, 0.0).sum() / count


def predict_hidden(
    name: str, model: Model, batch: Batch, encode: Callable[[Tensor], Encoded]
) -> Result:
    """Predict the tokens that were drawn to be hidden (`Batch.draws`); `encode(chosen)` reads the
    batch without them.
    """
    refuse_overlap(model.config)
    assert batch.draws is not None
    target, valid = model.targets(batch)
    chosen = batch.draws
    return make_result(
        model, batch, [make_hidden_part(model, batch, encode(chosen), target, valid, chosen, name)]
    )


def count_share(ratio: float, count: int) -> int:
    """floor(ratio * count), robust to rounding of `ratio`."""
    return int(ratio * count + 1e-9)


def _draw_spans(count: int, config: GapConfig, generator: Generator | None) -> Tensor:
    """Tokens of spans of 1 .. `span` at uniform places, until the share is hidden."""
    wanted, hidden = count_share(config.ratio, count), dict[int, None]()
    while len(hidden) < wanted:
        starts = torch.randint(count, (count,), generator=generator).tolist()
        lengths = torch.randint(1, config.span + 1, (count,), generator=generator).tolist()
        for start, length in zip(starts, lengths, strict=True):
            hidden.update(dict.fromkeys(range(start, min(start + length, count))))
            if len(hidden) >= wanted:
                break
    return torch.tensor(list(hidden)[:wanted], dtype=torch.int64)


def refuse_overlap(config: ModelConfig) -> None:
    """Raises UserError (config, exit 2) for overlapping patches, which leak neighbouring
    targets.
    """
    if config.cuts_patches and config.stride is not None and config.stride < config.patch:
        raise usage_error(
            f"patches of {config.patch} with stride {config.stride} overlap",
            "expected stride >= patch for a leak-free objective",
            "Leave model.stride out, or use next-previous",
            field="model.stride",
        )
