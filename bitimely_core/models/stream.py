"""Reads a sequence that arrives in pieces with a one-way model, in constant memory.

The states equal those of one pass over the sequence so far: [SOS] stands before the first token,
positions and times are counted from there. The length of the training windows has no effect. A
token is read as soon as its samples are complete. `finish` reads the incomplete rest and [EOS].

Legend: B batch, T timesteps, V channels, N tokens, M positions, D width, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from bitimely_core.config import ModelConfig
from bitimely_core.errors import Reason, UserError, usage_error
from bitimely_core.models.base import Model, to_batch
from bitimely_core.models.contract import config_error
from bitimely_core.models.layers import Positions, StackConfig
from bitimely_core.models.stack import BidirectionalModel
from bitimely_core.models.tokenizers import PAD, ConvTokenizer, PatchTokenizer
from bitimely_core.registry import models
from bitimely_core.types import Batch, Encoded

PIECE = 512  # positions that go through the layers at a time


class Progress(NamedTuple):
    """What a stream keeps."""

    layers: tuple[Any, ...]  # state of each layer
    positions: int = 0  # read so far, with [SOS]
    # [B, t, V] or [B, t], of which some before the next token are its context
    samples: Tensor | None = None
    context: int = 0
    first: Tensor | None = None  # [B, 1] months of the first event and of the last one
    last: Tensor | None = None
    person: Tensor | None = None  # [B, 4]
    end: Tensor | None = None  # [B] months of the index day, as fed last
    padded: bool = False  # the last event or sample of some row is none


def open_stream(model: Model) -> Stream:
    """A sequence that arrives in pieces, read by a model in eval mode in constant memory.

    Raises UserError (config, exit 2) for a model that needs the future, or all of the past, or is
    in training mode.
    """
    if not isinstance(model, BidirectionalModel):
        raise stream_error(model.config, "it reads windows as a unit")
    if set(model.directions) != {"forward"}:
        raise stream_error(model.config, "its layers also read backward and need the future")
    if models[model.config.name].facts.family == "attention":
        raise stream_error(
            model.config,
            "softmax attention keeps every token, and its positions are learned up to a length",
        )
    return Stream(model)


def stream_error(config: ModelConfig, why: str) -> UserError:
    """A model that no stream can read (config, exit 2)."""
    return config_error(
        f"no stream of {config.name}: {why}",
        "expected a model that needs its past alone and keeps it in constant memory: "
        "timelygpt, lstm or s4",
        "model.name",
    )


class Stream:
    """A sequence in pieces, made by `open_stream`. Rows of a batch are sequences side by side that
    all advance by the same samples.
    """

    def __init__(self, model: BidirectionalModel) -> None:
        _require_eval(model)
        _require_readable(model)
        self.model, tokenizer = model, model.adapter.tokenizer
        # samples from token to token, of a token, and before it
        self.stride, self.span, self.context = 1, 1, 0
        if isinstance(tokenizer, PatchTokenizer):
            self.stride, self.span = tokenizer.stride, tokenizer.patch
        elif isinstance(tokenizer, ConvTokenizer):
            self.stride, self.span, self.context = 4, 4, 4
        self._progress = Progress((None,) * model.config.layers)

    @property
    def tokens(self) -> int:
        """Tokens read so far."""
        return max(self._progress.positions - 1, 0)

    @torch.no_grad()
    def feed(self, rows: Batch | Tensor | Mapping[str, Tensor]) -> Encoded:
        """Read the next samples or events; any number, also none of a token's last ones.

        Args:
            rows: as a model takes them: signals [B, T, V], or events [B, N] with times in months
                that never decrease. NaN and what is masked are missing values. `end` [B] is kept
                for `finish`.

        Returns the tokens that are complete now, their targets and states: `hidden` are L states
        [B, N, D], N = 0 possible. `model.output` of the last one predicts the next token.
        Raises UserError: `shapes_differ` for other rows or channels than before or than the
        model's, `timestamps` for times that are not finite or lie before those read, `config` in
        training mode (exit 2).
        """
        model, before = self.model, self._progress
        _require_eval(model)
        batch = model.expand_channels(to_batch(rows, model.special.dtype))
        times = None if model.config.clock == "index" else batch.times
        samples, seen = self._fill_missing(batch)
        self._check_times(times)
        self._check_rows(samples, times)
        if samples.shape[1]:
            before = before._replace(padded=not bool(seen[:, -1].all()))
        if before.samples is not None:
            samples = torch.cat((before.samples, samples), 1)
        if before.person is None and batch.person is not None:
            before = before._replace(person=batch.person)
        if batch.end is not None:
            before = before._replace(end=batch.end)
        count = max(samples.shape[1] - before.context - self.span, -self.stride) // self.stride + 1
        used = before.context + count * self.stride
        complete = used + self.span - self.stride if count else 0
        encoded, after = self._read(before, samples[:, :complete], times, batch.numbers)
        start = max(used - self.context, 0)  # of the samples that are needed again
        self._progress = after._replace(samples=samples[:, start:].clone(), context=used - start)
        return encoded

    @torch.no_grad()
    def finish(self, end: Tensor | None = None) -> Encoded:
        """The incomplete last token, if there is one, and [EOS] at the index day `end` [B] in
        months (None: as fed, else the last event).

        As in a full pass, models of events without `index_day` have no index day.

        The stream itself stays as it is: it may be fed further, and finished again. `hidden` are L
        states [B, N + 1, D], N <= 1, and `eos` is the index of [EOS], which the readouts `eos` and,
        with `index_day`, `last` read.
        Raises UserError: `config` for a stream without samples or in training mode, `timestamps`
        for an end before the last event, `shapes_differ` for another number of ends than rows, and
        for rows that end with padding or missing samples, not with [EOS] (exit 2).
        """
        before = self._progress
        _require_eval(self.model)
        rest = 0 if before.samples is None else before.samples.shape[1] - before.context
        if before.samples is None or not (before.positions or rest):
            raise usage_error(
                "a stream without samples", "samples before its end", "call feed first"
            )
        if before.padded:
            raise usage_error(
                "rows that end with padding or missing samples",
                "rows that end with an event or a sample",
                "Feed other lengths in streams of their own, 0 for missing samples",
                code=Reason.SHAPES_DIFFER,
            )
        end = self._choose_end(before.end if end is None else end)
        begun = rest > (self.span - self.stride if before.positions else 0)
        samples = before.samples if begun else before.samples[:, :0]
        encoded, _ = self._read(before, samples, None, finish=True, end=end)
        last = encoded.hidden[-1].shape[1] - 1
        eos = torch.full((len(samples),), last, device=samples.device)
        return encoded._replace(eos=eos, last=eos if self.model.config.index_day else None)

    def _fill_missing(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Samples with 0 and events with [PAD] where there is none, and where a row has some, bool
        [B, T].
        """
        seen = ~batch.values.isnan()
        if batch.mask is not None:
            seen = (
                seen
                & (batch.mask if batch.mask.dim() == seen.dim() else batch.mask[..., None]).bool()
            )
        samples = batch.values.masked_fill(~seen, PAD)
        return samples, samples != PAD if samples.dim() == 2 else seen.any(-1)

    def _choose_end(self, end: Tensor | None) -> Tensor | None:
        """The index day of the rows where the model reads one."""
        last, config = self._progress.last, self.model.config
        if end is None or last is None or (config.codes is not None and not config.index_day):
            return None
        if end.shape != last.shape[:1]:
            raise usage_error(
                f"ends {list(end.shape)}",
                f"expected [{len(last)}], one a row",
                code=Reason.SHAPES_DIFFER,
            )
        if not bool((end.to(last) >= last[:, 0]).all() & end.isfinite().all()):
            raise usage_error(
                "an end before the last event",
                "an index day at it or later",
                code=Reason.TIMESTAMPS,
            )
        return end

    def _check_times(self, times: Tensor | None) -> None:
        if times is None:
            return
        if self.span > 1:
            raise config_error(
                "times of samples",
                f"expected none: a token has {self.span} samples",
                "model.tokenizer",
            )
        last = self._progress.last
        months = times if last is None else torch.cat((last, times), 1)
        if not bool((months.diff(dim=1) >= 0).all() & months.isfinite().all()):
            raise usage_error(
                "times decrease or are not finite",
                "finite times that never decrease, also from piece to piece",
                code=Reason.TIMESTAMPS,
            )

    def _check_rows(self, samples: Tensor, times: Tensor | None) -> None:
        """Refuse a piece that does not continue the ones before."""
        before = self._progress
        if before.samples is None:
            return
        shape, wanted = ([*x.shape[:1], "T", *x.shape[2:]] for x in (samples, before.samples))
        if shape != wanted:
            raise usage_error(
                f"samples {shape}",
                f"expected {wanted} as before",
                "start a new stream",
                code=Reason.SHAPES_DIFFER,
            )
        if before.positions and (times is None) != (before.last is None):
            raise usage_error(
                "times in some pieces alone",
                "times in all pieces or in none",
                code=Reason.TIMESTAMPS,
            )

    def _read(
        self,
        before: Progress,
        samples: Tensor,
        times: Tensor | None,
        numbers: Tensor | None = None,
        *,
        finish: bool = False,
        end: Tensor | None = None,
    ) -> tuple[Encoded, Progress]:
        """Tokens of `samples`, behind their context, through the layers, with [SOS] before the
        first one and [EOS] on `finish`.
        """
        tokens, targets, real = self._cut_tokens(samples, before.context)
        after = _note_times(before, times)
        x = self.model.adapter.embed(tokens, numbers)
        begins = not before.positions and (tokens.shape[1] > 0 or finish)
        parts = [(x, times)]
        if begins:
            parts.insert(0, (self._make_special(0, x, before.person), after.first))
        if finish:
            months = after.last
            if months is not None and end is not None:
                months = end[:, None].to(months)
            parts.append((self._make_special(1, x, before.person), months))
        x, times = _join_parts(parts)
        if times is not None and after.first is not None:
            last = after.first if before.last is None else before.last
            x = self.model.add_clock(x, times, after.first, last)
        states, after = self._run(x, times, after)
        hidden = tuple(state[:, int(begins) :] for state in states)  # without [SOS]
        return Encoded(tokens, targets, real, hidden), after

    def _cut_tokens(self, samples: Tensor, context: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, targets and mask of `samples` behind their `context`."""
        skip = context // self.stride
        if not samples.shape[1]:  # a token of zeros, which is left out
            samples, skip = samples.new_zeros(len(samples), self.span, *samples.shape[2:]), 1
        tokens, targets, real = self.model.adapter.tokenizer(Batch(samples))
        return tokens[:, skip:], targets[:, skip:], real[:, skip:]

    def _make_special(self, which: int, like: Tensor, person: Tensor | None) -> Tensor:
        """[SOS] (0) or [EOS] (1), [B, 1, D], with age and sex."""
        vector = self.model.special[which].to(like.dtype).expand(len(like), 1, -1)
        if self.model.person_map is None or person is None:
            return vector
        return vector + self.model.person_map(person.to(like.dtype))[:, None]

    def _run(
        self, x: Tensor, times: Tensor | None, before: Progress
    ) -> tuple[list[Tensor], Progress]:
        """States of each layer [B, M, D] and what is kept after them, in pieces so that the memory
        does not grow with M.
        """
        layers, positions = list(before.layers), self._find_positions(x, times, before)
        pieces: list[list[Tensor]] = [[] for _ in layers]
        for start in range(0, x.shape[1], PIECE):
            part = slice(start, start + PIECE)
            y = self.model.enter_layers(x[:, part])
            months = None if times is None else times[:, part]
            places = Positions(positions[..., part], months, None, None)
            for depth, layer in enumerate(cast(nn.ModuleList, self.model.layers)):
                y, layers[depth] = layer.advance(y, places, layers[depth])  # type: ignore[operator]
                pieces[depth].append(y)
        empty = x.new_zeros(len(x), 0, self.model.width)
        states = [torch.cat(piece, 1) if piece else empty for piece in pieces]
        after = before._replace(layers=tuple(layers), positions=before.positions + x.shape[1])
        return states, after

    def _find_positions(self, x: Tensor, times: Tensor | None, before: Progress) -> Tensor:
        """What the rotation reads: indices [M], or months since the first event [B, M]."""
        config = self.model.config
        by_time = isinstance(config, StackConfig) and config.rotary == "time"
        if by_time and times is not None and before.first is not None:
            return times - before.first
        return torch.arange(x.shape[1], device=x.device) + before.positions


def _note_times(before: Progress, times: Tensor | None) -> Progress:
    """With the first and the last of the events read so far."""
    if times is None or not times.shape[1]:
        return before
    first = times[:, :1].clone() if before.first is None else before.first
    return before._replace(first=first, last=times[:, -1:].clone())


def _join_parts(parts: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Embedded positions [B, M, D] with their months [B, M], one after another."""
    months = [times for _, times in parts if times is not None]
    return torch.cat([x for x, _ in parts], 1), torch.cat(months, 1) if months else None


def _require_readable(model: BidirectionalModel) -> None:
    """Refuse what cannot be read piece by piece. Raises UserError (config, exit 2)."""
    config, tokenizer = model.config, model.adapter.tokenizer
    if model.others:
        raise config_error(
            "a stream of a model of several data sets",
            "expected a model with the adapter of one data set",
            "model.others",
            "Call model.select_adapter(k) before",
        )
    if isinstance(config, StackConfig) and config.ties == "group":
        raise stream_error(
            config, "with ties = group no event is read before all of its time are known"
        )
    if config.tokenizer == "codes" and config.events == "grid":
        raise stream_error(config, "a grid of months ends with the last event")
    if isinstance(tokenizer, PatchTokenizer) and (
        tokenizer.crop == "start" or tokenizer.stride > tokenizer.patch
    ):
        raise stream_error(
            config,
            "patches that start according to the length (crop = start) or leave samples out "
            "(stride > patch)",
        )


def _require_eval(model: BidirectionalModel) -> None:
    """Training would drop states out and overwrite statistics, also after the stream was made."""
    if model.training:
        raise config_error(
            "a stream of a model in training mode",
            "expected eval mode",
            "model",
            "Call model.eval() before",
        )
