"""The parts that all models share: the adapter of a data set, the final norm and output projection, targets, saving.

Legend: B batch, T timesteps, V channels, N tokens, D width, P target width, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig
from bitimely_core.errors import Reason, UserError, usage_error
from bitimely_core.models.adapters import make_grid
from bitimely_core.models.tokenizers import FIRST, CodeTokenizer, ConvTokenizer, PatchTokenizer, StepTokenizer
from bitimely_core.registry import models
from bitimely_core.types import Batch

if TYPE_CHECKING:
    from typing import BinaryIO


FORMAT = 2  # of config.json; 1 held the settings of all models


Direction = Literal["forward", "backward", "both"]


Which = Literal["next", "previous"]


def config_error(text: str, wanted: str, field: str, action: str = "") -> UserError:
    """Settings that do not fit together (config, exit 2)."""
    return usage_error(text, wanted, action, field=field)


class Adapter(nn.Module):
    """What belongs to a data set: tokenizer, input projection and output projections. `Model.reset_adapter` replaces it as one part.

    `norm_width` is the width of the states that the output projections read, None = D.
    """

    def __init__(self, config: ModelConfig, norm_width: int | None = None) -> None:
        super().__init__()
        self.tokenizer: ConvTokenizer | PatchTokenizer | StepTokenizer | CodeTokenizer
        self.embedding: nn.Linear | nn.Embedding
        if config.tokenizer == "codes":
            if config.channel_independent:
                raise config_error(
                    "true for codes", "expected signals: events have no channels", "model.channel_independent", "Leave it out"
                )
            if config.codes is None or config.codes <= FIRST:
                raise config_error(f"{config.codes} codes", f"expected the size of the input vocabulary, above {FIRST}", "model.codes")
            self.tokenizer = CodeTokenizer(config.codes)
            self.embedding = nn.Embedding(self.tokenizer.width, config.dim)
        else:
            channels = 1 if config.channel_independent else config.channels
            if config.tokenizer == "patch":
                self.tokenizer = PatchTokenizer(channels, config.patch, stride=config.stride, crop=config.crop)
            else:
                self.tokenizer = StepTokenizer(channels) if config.tokenizer == "steps" else ConvTokenizer(channels)
            self.embedding = nn.Linear(self.tokenizer.width, config.dim)
            nn.init.normal_(self.embedding.bias, std=0.02)  # like [SOS] and [EOS]: hidden tokens hold it alone
        names = ("next", "previous") if config.output_heads == "separate" else ("next",)
        self.output = nn.ModuleDict({name: nn.Linear(norm_width or config.dim, self.tokenizer.target_width) for name in names})
        if models[config.name].facts.family == "attention":
            for module in (self.embedding, *self.output.values()):
                nn.init.normal_(cast(Tensor, module.weight), std=0.02)

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens [B, N, F] or ids [B, N] -> [B, N, D]; pointwise, nothing is mixed over time."""
        return self.embedding((tokens - FIRST + 1).clamp(min=0)) if isinstance(self.tokenizer, CodeTokenizer) else self.embedding(tokens)

    @property
    def blank(self) -> Tensor:
        """The learned vector [D] at hidden positions: the embedding of a token that says nothing (zeros; codes: [MASK])."""
        return self.embedding.weight[0] if isinstance(self.embedding, nn.Embedding) else self.embedding.bias


class Model(nn.Module):
    """What all models share: the adapter of a data set, the final norm and output projection, targets, saving.

    A model adds `forward(batch, *, directions=None, hide=None, attention=False) -> Encoded`.

    Attributes:
        config: all dimensions and switches.
        target_scale: float32 scalar; Var(target), for codes the unigram entropy in nats, of the training split. NaN until it is measured.
        pooled_width: width of the method's own sequence vector `Encoded.pooled`, None where it has none.
        adapter_type: class of its adapters.
        penalty: what the last forward pass in training adds to a supervised loss, None = nothing.
        progress: share of the training that is done; `fit` keeps it, for objectives that change on the way.
    """

    target_scale: Tensor
    adapter_type: type[Adapter] = Adapter
    progress: float = 0.0
    pooled_width: int | None = None
    penalty: Tensor | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.adapter = self.adapter_type(config, self.norm_width)
        self.others = nn.ModuleList(
            self.adapter_type(config.model_copy(update={"channels": channels}), self.norm_width) for channels in config.others
        )
        self.norms = nn.ModuleDict({name: nn.LayerNorm(self.norm_width) for name in self.adapter.output})
        self.register_buffer("target_scale", torch.tensor(torch.nan))

    @property
    def width(self) -> int:
        """Width of the states, D unless a model puts two directions side by side."""
        return self.config.dim

    @property
    def norm_width(self) -> int:
        """Width that the final norm and the output projection read."""
        return self.width

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The model's own direction of each layer."""
        cycle = models[self.config.name].facts.directions
        return tuple(cycle[i % len(cycle)] for i in range(self.config.layers if cycle else 0))  # type: ignore[misc]

    def norm(self, hidden: Tensor, which: Which = "next") -> Tensor:
        """The final norm before any head; one for both losses unless `output_heads` is separate."""
        return self.norms[which if which in self.norms else "next"](hidden)

    def adapter_of(self, batch: Batch | None) -> Adapter:
        """The adapter of the data set that the rows of `batch` are of."""
        at = 0 if batch is None or batch.source is None or not self.others else int(batch.source[0])
        return cast(Adapter, self.others[at - 1]) if at else self.adapter

    def expand_channels(self, batch: Batch) -> Batch:
        """Events on a grid where the model reads them so; one row a channel, [B, T, V] -> [B * V, T, 1], where it reads channels one by one."""
        if self.config.events == "grid" and self.config.codes is not None and batch.values.dim() == 2:
            batch = make_grid(batch, self.config.codes, self.config.horizon)
        if not self.config.channel_independent or batch.values.shape[-1] == 1:
            return batch
        rows, steps, channels = batch.values.shape
        mask = None if batch.mask is None else batch.mask if batch.mask.dim() == 3 else batch.mask[..., None].expand_as(batch.values)
        return Batch(
            values=batch.values.transpose(1, 2).reshape(rows * channels, steps, 1),
            times=None if batch.times is None else batch.times.repeat_interleave(channels, 0),
            mask=None if mask is None else mask.transpose(1, 2).reshape(rows * channels, steps, 1),
        )

    def output(self, hidden: Tensor, which: Which = "next", batch: Batch | None = None) -> Tensor:
        """Final norm and output projection: states [..., D] -> predictions [..., P] (codes: logits of the classes).

        Several data sets have projections of their own; `batch` says whose (None: the first).
        """
        return self.adapter_of(batch).output[which if which in self.norms else "next"](self.norm(hidden, which))

    @torch.no_grad()
    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The targets of a batch and which of them count, both [B, N, P] (codes: [B, N])."""
        batch, tokenizer = self.expand_channels(batch), self.adapter_of(batch).tokenizer
        tokens, targets, real = tokenizer(batch)
        if self.config.target == "tokens" and self.config.tokenizer != "codes":
            return standardise_tokens(tokens, real), real[..., None].expand_as(tokens)
        seen = tokenizer.find_targets(batch)
        return targets, seen & (real if seen.dim() == 2 else real[..., None])

    def erase(self, batch: Batch, chosen: Tensor) -> Batch:
        """The batch without the contents of the `chosen` [B, N] tokens."""
        return self.adapter_of(batch).tokenizer.erase(self.expand_channels(batch), chosen)

    @torch.no_grad()
    def measure(self, batches: Iterable[Batch]) -> float:
        """Var(target) around the mean of each target dimension, for codes the unigram entropy in nats, over `batches`.

        Codes of equal times as one target (`ties` = group): the mean entropy of a class being in the set or not.
        """
        zero = torch.zeros((), dtype=torch.float64)
        count = total = zero
        sums: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # of each data set: its target dimensions are its own
        tokenizer = self.adapter.tokenizer
        for batch in batches:
            target, valid = self.targets(batch)
            if isinstance(tokenizer, CodeTokenizer):
                if self.config.ties == "group":
                    sets, _ = tokenizer.sets(batch)
                    count, total = count + sets.any(-1).sum(), total + sets.sum((0, 1)).double()
                else:
                    total = total + F.one_hot(target[valid], tokenizer.target_width).sum(0).double()
                continue
            target = torch.where(valid, target, 0.0).double().flatten(0, 1)
            at = 0 if batch.source is None else int(batch.source[0])
            found = (valid.flatten(0, 1).sum(0), target.sum(0), target.square().sum(0))
            sums[at] = cast(tuple[Tensor, Tensor, Tensor], tuple(a + b for a, b in zip(sums.get(at, (zero,) * 3), found, strict=True)))
        if isinstance(tokenizer, CodeTokenizer) and self.config.ties == "group":
            return float(bernoulli_entropy(total / count).mean())
        if isinstance(tokenizer, CodeTokenizer):
            return float(torch.special.entr(total / total.sum()).sum())
        within = torch.stack([(square - total.square() / count.clamp(min=1)).sum() for count, total, square in sums.values()])
        return float(within.sum() / torch.stack([count.sum() for count, _, _ in sums.values()]).sum())

    def select_adapter(self, source: int) -> None:
        """After a mixed pre-training: keep the adapter of data set `source` alone."""
        if source:
            self.adapter = cast(Adapter, self.others[source - 1])
            self.config = self.config.model_copy(update={"channels": self.config.others[source - 1]})
        self.others = nn.ModuleList()
        self.config = self.config.model_copy(update={"others": ()})

    @torch.no_grad()
    def reset_adapter(self, channels: int, length: int, codes: int | None = None, *, renew: bool = False) -> list[str]:
        """Fit another data set: a new adapter where the channels (or codes) differ in number; trunk, [SOS], [EOS] and final norm stay.

        Args:
            channels: V of the data set.
            length: T of its windows.
            codes: size of its input vocabulary.
            renew: the same number of codes means other codes: a new adapter all the same.

        Returns:
            The names of the parameters that are random now, empty where all stay.
        """
        old = self.config
        self.others = nn.ModuleList()
        changes = {"channels": channels, "length": length, "codes": old.codes if codes is None else codes, "others": ()}
        self.config = old.model_copy(update=changes)
        if (old.channels == channels or old.channel_independent) and old.codes == self.config.codes and not (renew and old.codes):
            return []
        like = next(self.parameters())
        self.adapter = self.adapter_type(self.config, self.norm_width).to(like.device, like.dtype)
        self.target_scale.fill_(torch.nan)
        return [f"adapter.{name}" for name, _ in self.adapter.named_parameters()]

    def save(self, folder: str | Path) -> None:
        """`model.safetensors` and `config.json` in `folder`; read them with `models.load`."""
        write_model(folder, self, self.describe())

    def describe(self) -> dict[str, Any]:
        """What `config.json` holds: the configuration as plain values, and what a reader of the weights must know."""
        model = self.config.model_dump(mode="json", by_alias=True)
        return {"format_version": FORMAT, "model": model, "rotary_convention": "absolute-forward"}


def write_model(folder: str | Path, module: nn.Module, values: dict[str, Any]) -> None:
    """`model.safetensors` with all weights and buffers, then `config.json`."""
    from safetensors.torch import save

    from bitimely_core import storage

    folder = Path(folder)
    storage.make_folder(folder)
    data = save({name: weight.detach().cpu().contiguous() for name, weight in module.state_dict().items()})

    def fill(file: BinaryIO) -> None:
        file.write(data)

    storage.write_file(folder / "model.safetensors", fill)
    storage.write_json(folder / "config.json", values)


def bernoulli_entropy(share: Tensor) -> Tensor:
    """-p ln p - (1 - p) ln(1 - p), in nats."""
    return torch.special.entr(share) + torch.special.entr(1 - share)


def extend_positions(positions: Tensor, count: int, draw: Callable[[int, int], Tensor]) -> nn.Parameter:
    """Learned positions [N, D] for `count` places: the first ones, continued by random ones of `draw` where there are more."""
    more = draw(max(0, count - len(positions)), positions.shape[1]).to(positions)
    return nn.Parameter(torch.cat((positions.detach(), more))[:count])


def require_learned_positions(count: int, learned: int, what: str = "positions") -> None:
    """More places than were learned. Raises UserError (shapes_differ, exit 2)."""
    if count > learned:
        raise usage_error(
            f"{count} {what}",
            f"this model has learned {learned}",
            "Cut shorter windows, or build it with their length",
            code=Reason.SHAPES_DIFFER,
        )


def standardise_tokens(tokens: Tensor, real: Tensor) -> Tensor:
    """Tokens as targets: no gradient, each channel standardised over the real tokens of the batch, else the loss has no scale."""
    tokens = tokens.detach()
    weight = real[..., None] / real.sum().clamp(min=1)
    centred = tokens - (tokens * weight).sum((0, 1))
    return centred * torch.rsqrt((centred.square() * weight).sum((0, 1)) + 1e-12)
