"""Converts event sequences to monthly grids, and signals or events to rows with times.

* `grid`: one row per month, one channel per code, 1 where the code occurs; for models of signals
  (`model.events = "grid"`), made by `Model.expand_channels`.
* `rows`: only the times (signals: timesteps) with observations, with observation masks; for models
  of irregular times. The index day, or the last event, is a row without observations, and the clock
  ends there: at `get_time_span`.

A month is 1 / 12 year, counted from the first event of the row: month(t) = floor(t). Rows are
months without `exact_times`, and without `index_day` their clock begins with the first event.

Legend: B batch, N events, M months, T rows, V channels (events: codes).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from bitimely_core.config import ModelConfig
from bitimely_core.models.contract import config_error
from bitimely_core.models.tokenizers import FIRST, NumberScale, StepTokenizer
from bitimely_core.ops.constants import send_constants
from bitimely_core.types import Batch

# of models: what they read of events beside their codes
EVENT_SETTINGS = ("index_day", "exact_times", "person")
PERSON = 4  # width of `Batch.person`


def configure_events(config: ModelConfig) -> ModelConfig:
    """Without events none of `EVENT_SETTINGS`; for models that read events as a grid one channel
    per code and `horizon` months.
    """
    if config.codes is None:
        return config.model_copy(update={**dict.fromkeys(EVENT_SETTINGS, False), "numbers": None})
    if config.events != "grid":
        return config
    tokenizer = "conv" if config.tokenizer == "codes" else config.tokenizer
    shape = grid_shape(config.codes, config.horizon, numbers=bool(config.numbers))
    return config.model_copy(update=shape | {"tokenizer": tokenizer, "exact_times": False})


def grid_shape(codes: int, horizon: int, *, numbers: bool = False) -> dict[str, int]:
    """Channels, length and vocabulary size of a grid of events."""
    return {"channels": (codes - FIRST) * (3 if numbers else 1), "length": horizon, "codes": codes}


def _read_events(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes from 0 on (int64), which events have one, which are real (bool), and months (0 for
    padding), each [B, N].
    """
    ids = batch.values.long()
    real = torch.ones_like(ids, dtype=torch.bool) if batch.mask is None else batch.mask.bool()
    times = (
        torch.arange(ids.shape[1], device=ids.device).expand_as(ids).to(torch.get_default_dtype())
        if batch.times is None
        else batch.times
    )
    return ids - FIRST, real & (ids >= FIRST), real, torch.where(real, times, 0.0)


def find_end_times(batch: Batch) -> Tensor:
    """Months of the index day of each row, else of its last event, [B]."""
    times = _read_events(batch)[3].amax(1)
    return times if batch.end is None else torch.maximum(times, batch.end.to(times))


def make_grid(batch: Batch, codes: int, months: int, scale: NumberScale | None = None) -> Batch:
    """Events on a grid of M = `months`: values [B, M, V] are 1 where a code occurs, else 0, in the
    dtype of the times.

    The batch holds ids [B, N] and times [B, N] in months; `codes` is the size of the vocabulary, of
    which special ids have no channel. The last month is that of `batch.end` (the index day under a
    landmark), else of the last event. Longer rows keep the last `months`. The mask [B, M] marks the
    months of the row in order; none for a row without events. With the `scale` of numbers V more
    channels hold the mean standardised number of each code in the month, 0 without any, and V more
    are 1 where there is one.
    """
    code, counted, real, times = _read_events(batch)
    last = find_end_times(batch)
    shift = (last.floor().long() + 1 - months).clamp(min=0)
    month = times.floor().long() - shift[:, None]
    in_grid = counted & (month >= 0)
    values = times.new_zeros(code.shape[0], months, codes - FIRST)
    row = torch.arange(code.shape[0], device=code.device)[:, None].expand_as(code)
    # no wait
    values.index_put_(
        (row, month.clamp(min=0), code.clamp(min=0)), in_grid.to(values), accumulate=True
    ).clamp_(max=1)
    if scale is not None:
        values = torch.cat(
            (values, *_average_numbers(scale, batch, values, (row, month, code), in_grid)), -1
        )
    inside = torch.arange(months, device=code.device) <= (last.floor().long() - shift)[:, None]
    return batch._replace(
        values=values, times=None, mask=inside & real.any(1, keepdim=True), end=None, numbers=None
    )


def _average_numbers(
    scale: NumberScale,
    batch: Batch,
    like: Tensor,
    places: tuple[Tensor, Tensor, Tensor],
    counted: Tensor,
) -> tuple[Tensor, Tensor]:
    """Mean standardised number of each code in each row of time, 0 without any, and 1 where there
    is one, as `like` [B, T, V].

    `places` [B, N] are those of the events in it, of which the `counted` [B, N] ones are read.
    """
    z, numbered = scale(batch.values.long(), batch.numbers)
    index = tuple(place.clamp(min=0) for place in places)
    read = (numbered & counted).to(like)
    total, count = torch.zeros_like(like), torch.zeros_like(like)
    total.index_put_(index, z.to(like) * read, accumulate=True)
    count.index_put_(index, read, accumulate=True)
    return total / count.clamp(min=1), count.clamp(max=1)


def get_time_span(config: ModelConfig) -> float:
    """Unit of time of models of irregular times: `horizon` months; signals: window length in
    samples.
    """
    return float(config.horizon if config.tokenizer == "codes" else config.length)


def encode_times(times: Tensor, span: float, width: int) -> Tensor:
    """[sin(t / s_j), cos(t / s_j)] of times [B, T] -> [B, T, width], s_j = span^(j / (width / 2 -
    1)) for j = 0 .. width / 2 - 1.
    """
    half = width // 2
    scales = send_constants([span ** (j / max(half - 1, 1)) for j in range(half)], times)
    angle = times[..., None] / scales
    return torch.cat((angle.sin(), angle.cos()), -1)


class TimedRows(NamedTuple):
    """A batch as rows with times."""

    values: Tensor  # [B, T, V] float, 0 where nothing was observed
    mask: Tensor  # [B, T, V] bool, what was observed
    times: Tensor  # [B, T] months; signals: sample index; padding has the time of the last row
    real: Tensor  # [B, T] bool; padding is on the right


def require_codes(config: ModelConfig) -> int:
    """Size of the input vocabulary of events. Raises UserError (config, exit 2) without one."""
    if config.codes is None or config.codes <= FIRST:
        raise config_error(
            f"{config.codes} codes",
            f"expected the size of the input vocabulary, above {FIRST}",
            "model.codes",
        )
    return config.codes


def count_channels(config: ModelConfig) -> int:
    """V of the rows that a model of signals reads."""
    return 1 if config.channel_independent else config.channels


class RowTokenizer(StepTokenizer):
    """Rows as tokens, of `width` = `target_width` = V: times with events, with the count of each
    code; timesteps of signals.

    A code is observed where it occurs; with `absent` all codes are observed at these times, absent
    ones as 0. With numbers of events V more channels, no targets, hold the mean standardised number
    of each code, observed where there is one: `width` = 2 V.
    """

    def __init__(self, config: ModelConfig, *, absent: bool = False) -> None:
        self.events = config.tokenizer == "codes"
        super().__init__(require_codes(config) - FIRST if self.events else count_channels(config))
        self.absent, self.exact, self.span = absent, config.exact_times, get_time_span(config)
        self.ends = self.events and config.index_day
        self.numbers: NumberScale | None = None
        if self.events and config.numbers:
            self.numbers = NumberScale(config.codes or 0)
            self.width *= 2

    def rows(self, batch: Batch) -> TimedRows:
        """The batch as rows."""
        if self.events:
            return self._group_events(batch)
        values, _, real = super().forward(batch)
        times = torch.arange(values.shape[1], device=values.device, dtype=values.dtype).expand(
            values.shape[0], -1
        )
        times = (
            times
            if batch.times is None
            else torch.where(real, batch.times, 0.0).to(values).cummax(1).values
        )
        return TimedRows(values, super().find_targets(batch) & real[..., None], times, real)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Values [B, T, V], targets (the same), mask of real rows [B, T]."""
        rows = self.rows(batch)
        return rows.values, rows.values[..., : self.target_width].detach(), rows.real

    def find_real(self, batch: Batch) -> Tensor:
        """Which rows are real, bool [B, T]."""
        return self._group_events(batch).real if self.events else super().find_real(batch)

    def find_targets(self, batch: Batch) -> Tensor:
        """Which values were observed, bool [B, T, V]."""
        return self.rows(batch).mask[..., : self.target_width]

    def _group_events(self, batch: Batch) -> TimedRows:
        code, counted, _, times = _read_events(batch)
        month = times if self.exact else times.floor()
        latest = torch.where(counted, month, -1.0).cummax(1).values
        # the first event of each time
        new = counted & (month > F.pad(latest, (1, 0), value=-1.0)[:, :-1])
        group = (new.cumsum(1) - 1).clamp(min=0)
        counts = new.sum(1)
        most = max(int(counts.max()) + self.ends, 1) if len(counts) else 1
        row = torch.arange(code.shape[0], device=code.device)[:, None].expand_as(code)
        values = times.new_zeros(code.shape[0], most, self.target_width)
        values.index_put_(
            (row[counted], group[counted], code[counted]), times.new_ones(()), accumulate=True
        )
        clock = times.new_zeros(code.shape[0], most)
        clock[row[new], group[new]] = month[new]
        number = torch.arange(most, device=code.device)
        real = number < counts[:, None]
        mask = real[..., None].expand_as(values) if self.absent else values > 0
        if self.numbers is not None:
            means, seen = _average_numbers(self.numbers, batch, values, (row, group, code), counted)
            values, mask = torch.cat((values, means), -1), torch.cat((mask, seen > 0), -1)
        if not self.ends:
            return TimedRows(values, mask, clock.cummax(1).values, real)
        end = find_end_times(batch)[:, None]
        end = end if self.exact else end.floor()
        clock = torch.where(real, clock, end) + self.span - end
        return TimedRows(values, mask, clock, number <= counts[:, None])
