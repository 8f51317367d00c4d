"""Autoformer, FEDformer and TimesNet against PyPOTS with the same weights: pip install
'bitimely[parity]'.

PyPOTS writes a file into the user's home and prints when it is imported, so it runs in a process of
its own, with another home. Its attention layers read [B, H, N, E] as [B, N, H E] behind several
heads: full Autoformer encoders are compared with one head, whose number does not matter here, and
of FEDformer the Fourier block.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bitimely_core import models
from bitimely_core.config import build_model_config
from bitimely_core.zoo.autoformer import SeriesDecomposition
from bitimely_core.zoo.fedformer import FourierMixer

torch.set_num_threads(1)
pytestmark = pytest.mark.parity

SCRIPT = """
import sys
import torch
from safetensors.torch import load_file, save_file
from pypots.nn.modules.autoformer import AutoformerEncoder, SeriesDecompositionBlock
from pypots.nn.modules.fedformer.layers import FourierBlock
from pypots.nn.modules.timesnet import BackboneTimesNet

torch.set_num_threads(1)
given = load_file(sys.argv[1])
x = given.pop("x")
with torch.no_grad():
    if sys.argv[3] == "autoformer":
        theirs = AutoformerEncoder(2, 8, 1, 12, 3, 25, 0.0, "gelu").eval()
        theirs.load_state_dict(given)
        found = {"states": theirs(x)[0], "trend": SeriesDecompositionBlock(25)(x)[1]}
    elif sys.argv[3] == "fedformer":
        theirs = FourierBlock(16, 16, 40, modes=7)
        theirs.index = given["modes"].tolist()
        theirs.weights1.data = torch.view_as_complex(given["weight"].movedim(0, -1).contiguous())
        found = {"out": theirs(x, x, x)[0]}
    else:
        theirs = BackboneTimesNet(2, x.shape[1], 0, 3, 8, 12, 6).eval()
        theirs.load_state_dict(given)
        found = {"states": theirs(x)}
save_file({key: value.contiguous() for key, value in found.items()}, sys.argv[2])
"""


@pytest.fixture
def theirs(tmp_path):
    """Run the reference: name and tensors -> its tensors."""
    if importlib.util.find_spec("pypots") is None:
        pytest.skip("pypots is not installed: pip install 'bitimely[parity]'")

    def run(name, tensors):
        save_file(
            {key: value.detach().contiguous() for key, value in tensors.items()}, tmp_path / "in"
        )
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            SCRIPT,
            tmp_path / "in",
            tmp_path / "out",
            name,
        ]
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            env={**os.environ, "HOME": str(tmp_path)},
            timeout=300,
        )
        return load_file(tmp_path / "out")

    return run


def made(name, **options):
    torch.manual_seed(0)
    model = models.build(
        name, **{"preset": "tiny", "length": 60, "dim": 8, "ffn_dim": 12, "layers": 2, **options}
    ).eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    return model


def test_autoformer_states_equal_those_of_pypots(theirs):
    model = made("autoformer", lag_factor=3.0)
    x, weights = torch.randn(3, 60, 8), {}
    for at, (mixer, layer) in enumerate(zip(model.mixers, model.layers, strict=True)):
        for name, linear in (
            ("w_qs", mixer.query),
            ("w_ks", mixer.key),
            ("w_vs", mixer.value),
            ("fc", mixer.out),
        ):
            nn.init.zeros_(linear.bias)  # PyPOTS has none
            weights[f"encoder.attn_layers.{at}.attention.{name}.weight"] = linear.weight
        weights[f"encoder.attn_layers.{at}.conv1.weight"] = layer.first.weight[..., None]
        weights[f"encoder.attn_layers.{at}.conv2.weight"] = layer.second.weight[..., None]
    weights |= {
        f"encoder.norm.layer_norm.{key}": value for key, value in model.centred.state_dict().items()
    }
    found = theirs("autoformer", {"x": x, **weights})
    torch.testing.assert_close(model.encode_rows(x)[-1], found["states"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        SeriesDecomposition((25,))(x)[1], found["trend"], rtol=1e-5, atol=1e-6
    )


def test_the_fourier_block_equals_that_of_pypots(theirs):
    """In the layout of the reference, which it needs to be compared at all."""
    torch.manual_seed(0)
    config = build_model_config(
        "fedformer", "tiny", dim=16, heads=8, length=40, modes=7, reference_layout=True
    )
    block = FourierMixer(config)
    nn.init.normal_(block.weight)
    q = torch.randn(3, 40, 16)
    found = theirs(
        "fedformer", {"x": q.unflatten(-1, (8, 2)), "modes": block.modes, "weight": block.weight}
    )
    torch.testing.assert_close(block(q, 40), found["out"].reshape(3, 40, 16), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 4])
def test_timesnet_states_equal_those_of_pypots(theirs, rows):
    """With periods common to a batch; of one row also with its own."""
    x = torch.randn(rows, 60, 8)
    for per_sample in {False, rows == 1}:
        model = made("timesnet", per_sample=per_sample, kernels=6)
        weights = {
            f"layer_norm.{key}": value for key, value in model.layer_norm.state_dict().items()
        }
        for at, layer in enumerate(model.layers):
            for part, inception in ((0, layer.widen), (2, layer.narrow)):
                for i, weight in enumerate(inception.weights):
                    weights[f"model.{at}.conv.{part}.kernels.{i}.weight"] = weight
                    weights[f"model.{at}.conv.{part}.kernels.{i}.bias"] = inception.biases[i]
        found, states = theirs("timesnet", {"x": x, **weights}), x
        for layer in model.layers:  # without the positions, which PyPOTS adds elsewhere
            states = model.layer_norm(layer(states))
        torch.testing.assert_close(states, found["states"], rtol=1e-3, atol=1e-4)
