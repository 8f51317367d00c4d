"""Context between windows: what a head reads beside the vector of a window, of its neighbours.

The stage of an epoch of sleep, or the rhythm of a beat, is told from what comes before and after.
Layers of dilated convolutions run over the vectors of the windows of a recording, at their places
in time: each layer joins the states at distance d before and after to that of a window, and the
distances sum to K. A window that is more than K places away is never read, and one that is absent,
at an edge or in a gap, counts as zeros. All windows of a sequence share the layers, so that their
cost does not grow with K.

The form of the layers is that of WaveNet (van den Oord and others, 2016), without its gates and in
both directions.

Legend: M windows with vectors, D width of a vector, H width of the states.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from bitimely_core.types import RECORDING

WIDTH, DROPOUT = 32, 0.2  # H; of what the layers read
CLOCK = 1000  # windows from the start of a recording that count as 1


def choose_distances(reach: int) -> list[int]:
    """Distances of the layers: 1, 2, 4 and so on, the last one such that their sum is `reach`."""
    distances: list[int] = []
    while (rest := reach - sum(distances)) > 0:
        distances.append(min(2 ** len(distances), rest))
    return distances


def find_sides(places: Tensor, distance: int) -> Tensor:
    """Positions in `places` (`Batch.place`, [M] int64) of the windows `distance` before and after
    each, int64 [M, 2]; M where there is none.
    """
    ordered, order = places.sort()
    wanted = places[:, None] + torch.tensor([-distance, distance], device=places.device)
    nearest = torch.searchsorted(ordered, wanted).clamp(max=len(ordered) - 1)
    return torch.where(ordered[nearest] == wanted, order[nearest], len(ordered))


class Context(nn.Module):
    """Vectors of windows, and beside them states that have read their neighbours.

    With `clock` the states also read how far a window is from the start of its recording.
    """

    def __init__(self, width: int, reach: int, *, clock: bool = False) -> None:
        super().__init__()
        self.reach, self.clock, self.width = reach, clock, width + WIDTH
        self.distances = choose_distances(reach)
        self.project = nn.Linear(width + clock, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(3 * WIDTH),
                nn.Dropout(DROPOUT),
                nn.Linear(3 * WIDTH, WIDTH),
                nn.GELU(),
                nn.Linear(WIDTH, WIDTH),
            )
            for _ in self.distances
        )

    def forward(self, vectors: Tensor, places: Tensor) -> Tensor:
        """[M, D + H] of `vectors` [M, D] of windows at `places` [M] (`Batch.place`)."""
        inputs = vectors
        if self.clock:
            since = (places % RECORDING).to(vectors.dtype) / CLOCK
            inputs = torch.cat([vectors, since[:, None]], 1)
        states = self.project(inputs)
        for distance, layer in zip(self.distances, self.layers, strict=True):
            padded = F.pad(states, (0, 0, 0, 1))  # zeros, of the windows that are absent
            sides = padded[find_sides(places, distance)].flatten(1)
            states = states + layer(torch.cat([states, sides], 1))
        return torch.cat([vectors, states], 1)
