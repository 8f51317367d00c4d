"""Exported graphs take batches of any size."""

import pytest
import torch
from torch import nn

from bitimely_core import heads, models, registry
from bitimely_core.types import Batch

torch.set_num_threads(1)

QUICK = {"raindrop", "seft"}


class Windows(nn.Module):
    """A head as a function of windows."""

    def __init__(self, head: heads.Head) -> None:
        super().__init__()
        self.head = head

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.head(Batch(values))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in registry.models
    ],
)
def test_a_graph_exported_with_a_dynamic_batch_equals_eager(name):
    torch.manual_seed(0)
    head = Windows(
        heads.Classifier(models.build(name, preset="tiny", channels=3, length=64), outputs=3)
    ).eval()
    rows = torch.export.Dim("rows", min=2, max=64)
    with torch.no_grad():
        graph = torch.export.export(
            head, (torch.randn(3, 64, 3),), dynamic_shapes=({0: rows},)
        ).module()
        for count in (2, 7):
            values = torch.randn(count, 64, 3)
            torch.testing.assert_close(graph(values), head(values), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("clock", ["regular", "irregular"])
def test_retention_of_more_tokens_than_two_chunks_is_exported(clock):
    """Beyond 128 tokens the chunkwise form reads the clock to choose how it multiplies, which a
    graph cannot.
    """
    torch.manual_seed(0)
    settings = (
        {"tokenizer": "codes", "codes": 20} if clock == "irregular" else {"tokenizer": "steps"}
    )
    model = models.build(
        "bitimelygpt", preset="tiny", channels=3, length=200, layers=2, **settings
    ).eval()

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, values: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
            return self.model(Batch(values, times=times if clock == "irregular" else None)).hidden[
                -1
            ]

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = (
            torch.randint(5, 20, (count, 200))
            if clock == "irregular"
            else torch.randn(count, 200, 3)
        )
        return values, torch.rand(count, 200).mul(3).cumsum(1)

    rows = torch.export.Dim("rows", min=2, max=64)
    with torch.no_grad():
        graph = torch.export.export(Rows(), draw(3), dynamic_shapes=({0: rows}, {0: rows})).module()
        for count in (2, 7):
            given = draw(count)
            torch.testing.assert_close(graph(*given), Rows()(*given), rtol=1e-5, atol=1e-5)
