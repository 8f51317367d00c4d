"""What holds for several models alike: half precision, and budgets of parameters."""

import pytest
import torch

from bitimely_core import models, objectives, registry
from bitimely_core.config import build_model_config
from bitimely_core.types import Batch


@pytest.mark.parametrize("name", registry.models)
def test_bf16_is_finite_and_near(name):
    """Under autocast, on windows of four lengths: hidden states within 15 % of float32, finite
    gradients of the model's own objective.
    """
    torch.manual_seed(0)
    model = models.build(name, preset="tiny", channels=3, length=50).eval()
    ragged = torch.arange(50) < torch.tensor([[50], [40], [30], [20]])
    batch = Batch(torch.randn(4, 50, 3, generator=torch.Generator().manual_seed(0)), mask=ragged)
    exact = model(batch)
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(batch)
        objective = registry.models[name].facts.objective
        if objective == "none":
            loss = rough.pooled.float().square().mean()
        else:
            loss = objectives.get(objective)(
                model.train(), batch, generator=torch.Generator().manual_seed(1)
            )["loss"]
    loss.backward()
    states = [encoded.hidden[-1] for encoded in (rough, exact)]
    if exact.mask is not None and exact.mask.shape == exact.hidden[-1].shape[:2]:
        states = [hidden[exact.mask] for hidden in states]
    assert (states[0].float() - states[1]).norm() / states[1].norm() < 0.15
    assert all(
        torch.isfinite(weight.grad).all()
        for weight in model.parameters()
        if weight.grad is not None
    )


@pytest.mark.parametrize(
    ("preset", "blocks"), [("18m", 12 * 1_774_464), ("7.5m", 8 * 999_072), ("3m", 8 * 250_704)]
)
@pytest.mark.parametrize("name", ["patchtst", "tst"])
def test_layers_are_standard_ones_and_a_matched_budget_is_within_five_percent(name, preset, blocks):
    data = models.default_shape(preset)
    config = build_model_config(name, preset, **data)
    with torch.device("meta"):
        assert models.count_parameters(models.from_config(config).layers) == blocks
    goal = models.count_configured(build_model_config("bitimelygpt", preset, **data))
    matched = config.model_copy(update=models.match_parameters(name, preset, **data))
    assert models.count_configured(matched) == pytest.approx(goal, rel=0.05)
