"""The models of the paper under one interface: `build`, `load`, `parameters`; each sibling file registers its own.

A model's `forward(batch, *, directions=None, hide=None, attention=False)` returns `Encoded`, always in forward time order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from bitimely_core import registry
from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.models.stack import FORMAT, Model
from bitimely_core.settings import ModelConfig, model_config, validated

__all__ = ["Model", "build", "load", "parameters"]


def build(name: str, *, preset: str | None = None, channels: int = 1, length: int = 3000, **overrides: Any) -> Model:
    """A model with random weights, from torch's global generator.

    Args:
        name: a registered model, for instance `bitimelygpt`.
        preset: `18m`, `7.5m`, `7.5m-regression`, `3m` or `tiny`; its section of the model's family gives the dimensions.
        channels: V of the windows.
        length: T of the windows; only learned positions and `--readout flatten` depend on it.
        overrides: fields of `ModelConfig`, for instance `layers=2`, `tokenizer="patch"`.

    Raises:
        UserError: unknown name or preset, or settings that do not fit together (exit 2).
    """
    entry = registry.models[name]
    return _made(model_config(entry.name, entry.facts.family, preset, channels=channels, length=length, **overrides))


def _made(config: ModelConfig) -> Model:
    model = registry.models[config.name](config)
    assert isinstance(model, nn.Module)
    return model  # type: ignore[return-value]


def load(folder: str | Path) -> Model:
    """The model that `Model.save` wrote into `folder`, in eval mode.

    Raises:
        UserError: a file is missing (exit 2), damaged (exit 5), or does not hold the weights of its own config.json (exit 5).
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    try:
        stored = json.loads((folder / "config.json").read_text("utf-8"))
        weights = load_file(folder / "model.safetensors")
    except FileNotFoundError as error:
        raise UserError(
            Reason.NOT_FOUND, "no model here", wanted="expected config.json and model.safetensors", action="Give the folder of a saved model",
            file=str(error.filename or folder), exit_code=Exit.USAGE,
        ) from error  # fmt: skip
    except (SafetensorError, ValueError) as error:
        raise UserError(Reason.INTEGRITY, f"damaged: {error}", action="Restore it from a copy", file=str(folder), exit_code=Exit.INTEGRITY) from error
    if not isinstance(stored, dict) or stored.get("format_version") != FORMAT:
        raise UserError(
            Reason.UNSUPPORTED_FORMAT, "format_version is not known", wanted=f"expected {FORMAT}", action="Update bitimely",
            file=str(folder / "config.json"), exit_code=Exit.INTEGRITY,
        )  # fmt: skip
    model = _made(validated(ModelConfig, stored.get("model", {}), str(folder / "config.json")))
    fit_weights(model, weights, str(folder / "model.safetensors"))
    return model.eval()


def fit_weights(model: nn.Module, weights: dict[str, Any], file: str | None = None) -> None:
    """`load_state_dict` that names every key that is missing, unexpected or of another shape (UserError shapes_differ, exit 5)."""
    own = model.state_dict()
    wrong = [f"{key}: missing" for key in own.keys() - weights.keys()] + [f"{key}: unexpected" for key in weights.keys() - own.keys()]
    wrong += [
        f"{key}: {list(weights[key].shape)} for {list(own[key].shape)}" for key in own.keys() & weights.keys() if own[key].shape != weights[key].shape
    ]
    if wrong:
        raise UserError(
            Reason.SHAPES_DIFFER, f"{len(wrong)} weights do not fit: {'; '.join(sorted(wrong)[:5])}", wanted="expected the weights of this model",
            action="Use the settings that the weights were trained with", file=file, exit_code=Exit.INTEGRITY,
        )  # fmt: skip
    model.load_state_dict(weights)


def parameters(model: nn.Module) -> int:
    """Trainable parameters, counted."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


registry.members(__name__)
