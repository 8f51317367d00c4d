"""Predicts the time to an event, with death as a competing risk: losses under censoring, and
cumulative incidences.

There is one output for each label, cause (the event, death) and interval of a grid of days.
`make_edges` draws the intervals from the training events. Two kinds of hazard:

* discrete: the share of those at risk at the start of an interval who have the event, or die, in it
  (Lee et al. 2018 without the ranking loss; Gensheimer and Narasimhan 2019).
* piecewise-exponential: a constant rate of each cause within an interval (Friedman 1982; MOTOR,
  Steinberg et al. 2023).

Legend: B rows, K labels, J intervals, H horizons; logits [B, K, 2, J], time [B, K] days, event [B,
K] 0, 1 (event) or 2 (death).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from bitimely_core.ops.constants import send_constants

HazardKind = Literal["discrete", "piecewise-exponential"]
YEAR = 365.25  # days: the unit of the rates
SMOOTHING = 0.5  # events added to those of an interval where its hazard starts a training


class HazardGrid(NamedTuple):
    """What a head for time to event predicts: kept in its `config.json`."""

    kind: HazardKind
    edges: tuple[float, ...]  # [J + 1] days, the first 0
    horizons: tuple[float, ...]  # [H] days of the predicted incidences

    def measure_exposure(self, time: Tensor) -> Tensor:
        """Share of each interval that is lived through until `time`, [..., J]."""
        edges = send_constants(self.edges, time)
        return ((time[..., None] - edges[:-1]) / edges.diff()).clamp(0, 1)

    def find_interval(self, time: Tensor) -> Tensor:
        """The interval (open, closed] that holds `time`, int64 [...]."""
        edges = send_constants(self.edges, time)
        return torch.searchsorted(edges[1:], time.contiguous()).clamp(max=len(self.edges) - 2)

    def censor(self, time: Tensor, event: Tensor) -> tuple[Tensor, Tensor]:
        """Times and events, those beyond the grid censored at its end."""
        late = time > self.edges[-1]
        return time.clamp(max=self.edges[-1]), torch.where(late, 0, event)


def make_edges(
    time: np.ndarray, event: np.ndarray, end: float, intervals: int
) -> tuple[float, ...]:
    """Edges in days: quantiles of the times [n] of the events (1), so that each interval holds as
    many, from 0 to `end`.
    """
    times = time[(event == 1) & (time < end)]
    inner = np.empty(0)
    if len(times):
        inner = np.unique(np.round(np.quantile(times, np.arange(1, intervals) / intervals)))
    inner = inner[(inner > 0) & (inner < end)]
    return (0.0, *map(float, inner), float(end))


def measure_loss(logits: Tensor, time: Tensor, event: Tensor, grid: HazardGrid) -> Tensor:
    """Negative log-likelihood [B, K].

    An interval that a row leaves by censoring counts with its share: a share f of it without event
    is (1 - h)^f, exp(-f a) of a rate.
    """
    time, event = grid.censor(time, event)
    lived, interval = grid.measure_exposure(time), grid.find_interval(time)
    happened = event > 0
    cause = (event.clamp(min=1) - 1).long()
    # logit of the cause in the interval of the event
    logit = logits.gather(3, interval[..., None, None].expand(*logits.shape[:3], 1))[..., 0]
    logit = logit.gather(2, cause[..., None])[..., 0]
    if grid.kind == "discrete":
        stay = -torch.logsumexp(F.pad(logits, (0, 0, 1, 0)), 2)  # log(1 - h), [B, K, J]
        last = F.one_hot(interval, stay.shape[-1]).bool() & happened[..., None]
        chance = logit + stay.gather(2, interval[..., None])[..., 0]
        return -(torch.where(last, 0.0, stay * lived).sum(-1) + torch.where(happened, chance, 0.0))
    years = lived * send_constants(np.diff(grid.edges) / YEAR, lived)
    return (logits.exp().sum(2) * years).sum(-1) - torch.where(happened, logit, 0.0)


def compute_incidence(logits: Tensor, grid: HazardGrid) -> Tensor:
    """Cumulative incidence of the event at the horizons, [B, K, H]; hazards are constant within an
    interval.
    """
    if grid.kind == "discrete":
        # the hazard of an interval, summed over its time
        total = torch.logsumexp(F.pad(logits, (0, 0, 1, 0)), 2)
        share = logits.softmax(2)[:, :, 0]
    else:
        rates = logits.exp() * send_constants(np.diff(grid.edges) / YEAR, logits)
        total = rates.sum(2)
        share = rates[:, :, 0] / total
    lived = grid.measure_exposure(send_constants(grid.horizons, logits))
    before = torch.exp(-F.pad(total.cumsum(-1), (1, 0))[..., :-1]) * share
    gone = -torch.expm1(-total[..., None, :] * lived)  # [B, K, H, J]
    return (before[..., None, :] * gone).sum(-1)


def find_null_logits(time: Tensor, event: Tensor, grid: HazardGrid) -> Tensor:
    """Logits [K, 2, J] of the hazards of all rows together; time and event [n, K], NaN: unknown."""
    valid = torch.isfinite(time)
    time, event = grid.censor(
        torch.where(valid, time, 0.0).double(), torch.where(valid, event, 0.0)
    )
    lived = grid.measure_exposure(time)
    interval = F.one_hot(grid.find_interval(time), len(grid.edges) - 1)
    cases = [(interval * (event == cause)[..., None]).sum(0) for cause in (1, 2)]
    events = torch.stack(cases, 1) + SMOOTHING  # [K, 2, J]
    if grid.kind == "discrete":
        until_event = torch.maximum(lived, interval.double())
        ended = torch.where((event > 0)[..., None], until_event, lived).sum(0)[:, None]
        rest = (ended - events.sum(1, keepdim=True)).clamp(min=SMOOTHING)
        return torch.log(events) - torch.log(rest)
    years = lived.sum(0)[:, None] * send_constants(np.diff(grid.edges) / YEAR, lived)
    return torch.log(events) - torch.log(years.clamp(min=SMOOTHING / YEAR))
