"""The base class of all models, and the part of a model that depends on the data set.

Legend: B batch, T timesteps, V channels, N tokens, D width, P target width, L layers.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig
from bitimely_core.errors import Reason, usage_error
from bitimely_core.models.adapters import count_channels, make_grid, require_codes
from bitimely_core.models.contract import Direction, Which, config_error
from bitimely_core.models.patch_cnn import PatchCNNTokenizer
from bitimely_core.models.tokenizers import (
    FIRST,
    CodeTokenizer,
    ConvTokenizer,
    NumberEmbedding,
    NumberScale,
    PatchTokenizer,
    StepTokenizer,
    get_observed,
)
from bitimely_core.registry import models
from bitimely_core.store import storage
from bitimely_core.store.records import FORMAT, write_results
from bitimely_core.types import Batch, Encoded

Tokenizer = ConvTokenizer | PatchTokenizer | StepTokenizer | CodeTokenizer
TOKENIZERS: dict[str, Callable[[ModelConfig, int], Tokenizer]] = {
    "conv": lambda config, channels: ConvTokenizer(channels),
    "steps": lambda config, channels: StepTokenizer(channels),
    "patch": lambda config, channels: PatchTokenizer(
        channels, config.patch, stride=config.stride, crop=config.crop
    ),
    "patch-cnn": PatchCNNTokenizer,
}
"""Tokenizer of signals -> (configuration, channels) -> it."""


def _make_tokenizer(config: ModelConfig) -> Tokenizer:
    """The tokenizer of one data set. Raises UserError (config, exit 2) for codes without a
    vocabulary, or by channel.
    """
    if config.tokenizer == "codes":
        if config.channel_independent:
            raise config_error(
                "true for codes",
                "expected signals: events have no channels",
                "model.channel_independent",
                "Leave it out",
            )
        return CodeTokenizer(require_codes(config))
    if config.target == "spectrum" and config.tokenizer != "patch-cnn":
        raise config_error(
            f"spectrum with tokenizer {config.tokenizer}",
            "expected patch-cnn",
            "model.target",
            "Leave it out",
        )
    return TOKENIZERS[config.tokenizer](config, count_channels(config))


class Adapter(nn.Module):
    """Tokenizer, input and output projections of a data set. `norm_width`: width of the states that
    the output reads, None = D.
    """

    def __init__(self, config: ModelConfig, norm_width: int | None = None) -> None:
        super().__init__()
        self.tokenizer = _make_tokenizer(config)
        self.embedding: nn.Linear | nn.Embedding
        self.numbers: NumberEmbedding | None = None
        if isinstance(self.tokenizer, CodeTokenizer):
            self.embedding = nn.Embedding(self.tokenizer.width, config.dim)
            if config.numbers:
                # the other weights do not depend on what is read beside the codes
                with torch.random.fork_rng(devices=[]):
                    self.numbers = NumberEmbedding(len(self.tokenizer.classes), config.dim)
        else:
            self.embedding = nn.Linear(self.tokenizer.width, config.dim)
            # as [SOS] and [EOS]; hidden tokens are embedded as the bias alone
            nn.init.normal_(self.embedding.bias, std=0.02)
        names = ("next", "previous") if config.output_heads == "separate" else ("next",)
        self.output = nn.ModuleDict(
            {
                name: nn.Linear(norm_width or config.dim, self.tokenizer.target_width)
                for name in names
            }
        )
        if models[config.name].facts.family == "attention":
            self._draw_small_weights()

    def _draw_small_weights(self) -> None:
        """Initial weights of transformers: 0.02, but for a map of samples, which would make every
        token nearly its bias.
        """
        is_lookup = isinstance(self.embedding, nn.Embedding)
        nn.init.normal_(
            self.embedding.weight, std=0.02 if is_lookup else (3 * self.tokenizer.width) ** -0.5
        )
        for module in self.output.values():
            nn.init.normal_(cast(Tensor, module.weight), std=0.02)
        self._scale_numbers(0.02)

    @torch.no_grad()
    def _scale_numbers(self, factor: float) -> None:
        for weight in () if self.numbers is None else self.numbers.parameters():
            weight.mul_(factor)

    def embed(self, tokens: Tensor, numbers: Tensor | None = None) -> Tensor:
        """Tokens [B, N, F] or ids [B, N] with `numbers` [B, N] -> [B, N, D], pointwise over
        time.
        """
        if not isinstance(self.tokenizer, CodeTokenizer):
            return self.embedding(tokens)
        x = self.embedding((tokens - FIRST + 1).clamp(min=0))
        return x if self.numbers is None else x + self.numbers(tokens, numbers)

    @torch.no_grad()
    def copy_codes(self, other: Adapter, pairs: Sequence[tuple[int, int]]) -> None:
        """Take the weights of codes from an adapter of another vocabulary, with those of [MASK] and
        [EOS]; an adapter without a lookup of codes takes none.

        `pairs`: places of a code in this model and in the other, 0 for the first behind the special ids. Numbers
        keep the moments of these data.
        """
        if not (
            isinstance(self.embedding, nn.Embedding) and isinstance(other.embedding, nn.Embedding)
        ):
            return
        mine, others = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).T
        zero, last = torch.tensor([0]), torch.tensor([-1])  # [MASK], [EOS]
        rows = [
            (self.embedding.weight, other.embedding.weight, 1, zero),
            *(
                (getattr(module, name), getattr(other.output[key], name), 0, last)
                for key, module in self.output.items()
                if key in other.output
                for name in ("weight", "bias")
            ),
        ]
        for target, source, offset, special in rows:
            target[mine + offset], target[special] = source[others + offset], source[special]
        if self.numbers is not None and other.numbers is not None:
            slopes = other.numbers.slope.weight
            self.numbers.slope.weight[mine + FIRST] = slopes[others + FIRST]
            self.numbers.presence.copy_(other.numbers.presence)

    @property
    def blank(self) -> Tensor:
        """The learned vector [D] at hidden positions: the embedding of zeros (codes: of [MASK])."""
        return (
            self.embedding.weight[0]
            if isinstance(self.embedding, nn.Embedding)
            else self.embedding.bias
        )


class PlainAdapter(Adapter, ABC):
    """An adapter without the embedding and the output projection of `Adapter`; a subclass adds what
    depends on the channels in `build`.
    """

    def __init__(self, config: ModelConfig, norm_width: int | None = None) -> None:
        nn.Module.__init__(self)
        self.build(config)

    @abstractmethod
    def build(self, config: ModelConfig) -> None:
        """Make the tokenizer and all weights."""


class Model(nn.Module):
    """Base class of models. A subclass adds `forward(batch, *, directions=None, hide=None,
    attention=False) -> Encoded`.

    Attributes:
        config: all dimensions and switches.
        target_scale: float32 scalar; Var(target), for codes the unigram entropy in nats, of the
            training split; NaN until measured.
        pooled_width: width of the native sequence vector `Encoded.pooled`, None if there is none.
        adapter_type: class of its adapters.
        penalty: term that the last training forward pass adds to a supervised loss, or None.
        progress: completed share of the training, updated by `fit`; for objectives with a schedule.
    """

    target_scale: Tensor
    adapter_type: type[Adapter] = Adapter
    progress: float = 0.0
    pooled_width: int | None = None
    penalty: Tensor | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.grid_numbers = (
            NumberScale(config.codes or 0) if config.numbers and config.events == "grid" else None
        )
        self.adapter = self.adapter_type(config, self.norm_width)
        self.others = nn.ModuleList(
            self.adapter_type(config.model_copy(update={"channels": channels}), self.norm_width)
            for channels in config.others
        )
        self.norms = nn.ModuleDict(
            {name: nn.LayerNorm(self.norm_width) for name in self.adapter.output}
        )
        self.register_buffer("target_scale", torch.tensor(torch.nan))

    def __call__(
        self, batch: Batch | Tensor | np.ndarray | Mapping[str, Tensor], **options: Any
    ) -> Encoded:
        """As `forward`, of whatever `to_batch` reads."""
        encoded: Encoded = super().__call__(
            to_batch(batch, next(self.parameters()).dtype), **options
        )
        return encoded

    @property
    def width(self) -> int:
        """Width of the states, D unless a model concatenates two directions."""
        return self.config.dim

    @property
    def norm_width(self) -> int:
        """Width that the final norm and the output projection read."""
        return self.width

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The model's own direction of each layer."""
        cycle = cast(tuple[Direction, ...], models[self.config.name].facts.directions)
        layers = self.config.layers if cycle else 0
        return tuple(itertools.islice(itertools.cycle(cycle), layers))

    def norm(self, hidden: Tensor, which: Which = "next") -> Tensor:
        """The final norm before any head; one for both losses unless `output_heads` is separate."""
        return self.norms[which if which in self.norms else "next"](hidden)

    def adapter_of(self, batch: Batch | None) -> Adapter:
        """The adapter of the data set of `batch`."""
        if batch is None or batch.source is None or not self.others:
            return self.adapter
        return cast(Adapter, [self.adapter, *self.others][int(batch.source[0])])

    def expand_channels(self, batch: Batch) -> Batch:
        """The input of the model: events as configured; one row per channel, [B, T, V] -> [B * V,
        T, 1], if channel-independent.
        """
        if self.config.codes is not None and batch.values.dim() == 2:
            batch = self._configure_events(batch, self.config.codes)
        if not self.config.channel_independent or batch.values.shape[-1] == 1:
            return batch
        return split_channels(batch)

    def prepare(self, batch: Batch) -> Batch:
        """The input of the tokenizer."""
        return self.expand_channels(batch)

    def _configure_events(self, batch: Batch, codes: int) -> Batch:
        """Events with what the model reads of their times, on a grid of months where it reads
        one.
        """
        if not self.config.index_day:
            batch = batch._replace(end=None)
        if not self.config.exact_times and batch.times is not None:
            batch = batch._replace(times=batch.times.floor())
        if self.config.events == "grid":
            batch = make_grid(batch, codes, self.config.horizon, self.grid_numbers)
        return batch

    def output(self, hidden: Tensor, which: Which = "next", batch: Batch | None = None) -> Tensor:
        """Final norm and output projection of the data set of `batch` (None: the first): states
        [..., D] -> predictions [..., P] (codes: logits).
        """
        return self.adapter_of(batch).output[which if which in self.norms else "next"](
            self.norm(hidden, which)
        )

    @torch.no_grad()
    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Targets of a batch and their validity mask, both [B, N, P] (codes: [B, N])."""
        batch, tokenizer = self.expand_channels(batch), self.adapter_of(batch).tokenizer
        if isinstance(tokenizer, PatchCNNTokenizer):
            targets, real = tokenizer.make_targets(batch)
            return targets, tokenizer.find_targets(batch) & real[..., None]
        tokens, targets, real = tokenizer(batch)
        if self.config.target == "tokens" and self.config.tokenizer != "codes":
            return standardise_tokens(tokens, real), real[..., None].expand_as(tokens)
        seen = tokenizer.find_targets(batch)
        return targets, seen & (real if seen.dim() == 2 else real[..., None])

    def erase(self, batch: Batch, chosen: Tensor) -> Batch:
        """The batch with the `chosen` [B, N] tokens erased."""
        return self.adapter_of(batch).tokenizer.erase(self.expand_channels(batch), chosen)

    @torch.no_grad()
    def measure(self, batches: Iterable[Batch]) -> float:
        """Var(target) around the mean of each target dimension over `batches`; codes: unigram
        entropy in nats, of sets the mean binary entropy.
        """
        if not isinstance(self.adapter.tokenizer, CodeTokenizer):
            return self._measure_values(batches)
        if self.config.ties == "group":
            return self._measure_sets(batches, self.adapter.tokenizer)
        return self._measure_codes(batches, self.adapter.tokenizer.target_width)

    def _measure_codes(self, batches: Iterable[Batch], classes: int) -> float:
        """Entropy of the codes that are predicted, in nats."""
        counts = torch.zeros(classes, dtype=torch.float64)
        for batch in batches:
            # some devices have no float64
            target, valid = (part.cpu() for part in self.targets(batch))
            counts = counts + F.one_hot(target[valid], classes).sum(0).double()
        return float(torch.special.entr(counts / counts.sum()).sum())

    def _measure_sets(self, batches: Iterable[Batch], tokenizer: CodeTokenizer) -> float:
        """Mean entropy of the occurrence of a code among those of one time, in nats."""
        times = counts = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            sets = tokenizer.sets(batch)[0].cpu()
            times, counts = times + sets.any(-1).sum(), counts + sets.sum((0, 1)).double()
        return float(bernoulli_entropy(counts / times).mean())

    def _measure_values(self, batches: Iterable[Batch]) -> float:
        """Variance around the mean of each target dimension of each data set."""
        zero = torch.zeros((), dtype=torch.float64)
        # data set -> count, sum and sum of squares: target dimensions differ
        sums: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        for batch in batches:
            # some devices have no float64
            target, valid = (part.cpu() for part in self.targets(batch))
            target = torch.where(valid, target, 0.0).double().flatten(0, 1)
            source = 0 if batch.source is None else int(batch.source[0])
            added = (valid.flatten(0, 1).sum(0), target.sum(0), target.square().sum(0))
            before = sums.get(source, (zero,) * 3)
            sums[source] = cast(tuple[Tensor, Tensor, Tensor], tuple(map(torch.add, before, added)))
        within = torch.stack(
            [
                (square - total.square() / count.clamp(min=1)).sum()
                for count, total, square in sums.values()
            ]
        )
        return float(
            within.sum() / torch.stack([count.sum() for count, _, _ in sums.values()]).sum()
        )

    def select_adapter(self, source: int) -> None:
        """After a joint pre-training: keep only the adapter of data set `source`."""
        if source:
            self.adapter = cast(Adapter, self.others[source - 1])
            self.config = self.config.model_copy(
                update={"channels": self.config.others[source - 1]}
            )
        self.others = nn.ModuleList()
        self.config = self.config.model_copy(update={"others": ()})

    @torch.no_grad()
    def reset_adapter(
        self, channels: int, length: int, codes: int | None = None, *, renew: bool = False
    ) -> list[str]:
        """Adapt to another data set: a new adapter if the number of channels (or codes) differs;
        trunk, [SOS], [EOS] and final norm stay.

        `channels` V and windows of `length` T, or the vocabulary of `codes`; `renew` replaces the
        adapter even for the same number of codes. Returns the names of the randomly initialised
        parameters.
        """
        old, fresh = self.config, []
        self.others = nn.ModuleList()
        changes = {
            "channels": channels,
            "length": length,
            "codes": old.codes if codes is None else codes,
            "others": (),
        }
        self.config = old.model_copy(update=changes)
        if (
            not (old.channels == channels or old.channel_independent)
            or old.codes != self.config.codes
            or (renew and old.codes)
        ):
            like = next(self.parameters())
            self.adapter = self.adapter_type(self.config, self.norm_width).to(
                like.device, like.dtype
            )
            self.grid_numbers = (
                None
                if self.grid_numbers is None
                else NumberScale(self.config.codes or 0).to(like.device)
            )
            self.target_scale.fill_(torch.nan)
            fresh = [f"adapter.{name}" for name, _ in self.adapter.named_parameters()]
        return fresh + self._fit_length(old.length)

    def fit_numbers(self, moments: Mapping[int, tuple[float, float]]) -> None:
        """Standardise numbers of events by mean and standard deviation of each id; a model that has
        moments keeps its own.
        """
        for part in self.modules():
            if isinstance(part, NumberScale) and bool(part.mean.isnan().all()):
                part.fit(moments)

    @torch.no_grad()
    def fit_features(self, read: Callable[[], Iterable[Batch]]) -> None:
        """Standardise features of patches by their moments in the batches that `read` gives, where
        they have none.
        """
        for part in self.modules():
            if isinstance(part, PatchCNNTokenizer) and part.lacks_moments:
                part.fit(
                    self.prepare(batch)
                    for batch in read()
                    if self.adapter_of(batch).tokenizer is part
                )

    def _fit_length(self, before: int) -> list[str]:
        """Adapt what depends on the length of the windows, which was `before`; the names of the
        randomly initialised parameters.
        """
        return []

    def save(self, folder: str | Path) -> None:
        """`model.safetensors` and `config.json` in `folder`; read them with `models.load`."""
        write_model(folder, self, self.describe())

    def describe(self) -> dict[str, Any]:
        """Contents of `config.json`: format version, configuration as plain values, convention of
        the rotation.
        """
        model = self.config.model_dump(mode="json", by_alias=True)
        return {"format_version": FORMAT, "model": model, "rotary_convention": "absolute-forward"}


def to_batch(
    rows: Batch | Tensor | np.ndarray | Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> Batch:
    """A batch with samples in `dtype`, from one; its fields by name; or values alone, [B, T, V] or
    [B, T], of which NaN are missing.
    """
    if isinstance(rows, Batch):
        batch = rows
    else:
        batch = Batch(**rows) if isinstance(rows, Mapping) else _mark_missing(torch.as_tensor(rows))
    if dtype is None:
        return batch
    values = batch.values if batch.values.dim() == 2 else batch.values.to(dtype)
    return batch._replace(values=values, mask=None if batch.mask is None else batch.mask.bool())


def _mark_missing(rows: Tensor) -> Batch:
    """Values alone, [B, T, V] or [B, T], of which NaN are missing."""
    values = rows[..., None] if rows.dim() == 2 and rows.is_floating_point() else rows
    missing = values.isnan()
    if bool(missing.any()):
        return Batch(values.masked_fill(missing, 0.0), mask=~missing)
    return Batch(values)


def split_channels(batch: Batch) -> Batch:
    """One row per channel: values and mask [B, T, V] -> [B * V, T, 1]."""

    def split(x: Tensor) -> Tensor:
        return x.mT.flatten(0, 1)[..., None]

    channels = batch.values.shape[2]
    return Batch(
        values=split(batch.values),
        times=None if batch.times is None else batch.times.repeat_interleave(channels, 0),
        mask=None if batch.mask is None else split(get_observed(batch)),
    )


def write_model(folder: str | Path, module: nn.Module, values: dict[str, Any]) -> None:
    """`model.safetensors` with all weights and buffers, and `config.json`."""
    from safetensors.torch import save

    data = save(
        {name: weight.detach().cpu().contiguous() for name, weight in module.state_dict().items()}
    )
    write_results(
        Path(folder),
        {"model.safetensors": data, "config.json": storage.encode_json(values) + b"\n"},
    )


def bernoulli_entropy(share: Tensor) -> Tensor:
    """-p ln p - (1 - p) ln(1 - p), in nats."""
    return torch.special.entr(share) + torch.special.entr(1 - share)


def extend_positions(
    owner: nn.Module, name: str, count: int, draw: Callable[[int, int], Tensor]
) -> list[str]:
    """Cut the learned positions `name` [N, D] of `owner` to `count`, or continue them by random
    ones, `draw(first, added)`; then the name is returned.
    """
    before: Tensor = getattr(owner, name)
    added = draw(len(before), max(0, count - len(before))).to(before)
    setattr(owner, name, nn.Parameter(torch.cat((before.detach(), added))[:count]))
    return [name] if len(added) else []


def require_learned_positions(count: int, learned: int, what: str = "positions") -> None:
    """Raises UserError (shapes_differ, exit 2) if `count` exceeds the number of learned
    positions.
    """
    if count > learned:
        raise usage_error(
            f"{count} {what}",
            f"this model has learned {learned}",
            "Cut shorter windows, or build it with their length",
            code=Reason.SHAPES_DIFFER,
        )


def standardise_tokens(tokens: Tensor, real: Tensor) -> Tensor:
    """Detached tokens as targets, each channel standardised over the real tokens of the batch to
    fix the scale of the loss.
    """
    tokens = tokens.detach()
    weight = real[..., None] / real.sum().clamp(min=1)
    centred = tokens - (tokens * weight).sum((0, 1))
    return centred * torch.rsqrt((centred.square() * weight).sum((0, 1)) + 1e-12)
