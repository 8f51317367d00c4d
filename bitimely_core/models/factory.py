"""Builds models from a name or a configuration, loads saved ones, and counts parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitimely_core import registry
from bitimely_core.config import (
    ModelConfig,
    build_model_config,
    choose_tokens,
    find_model_config,
    load_preset,
    validate,
)
from bitimely_core.errors import Exit, Reason, UserError, integrity_error, safe_text, usage_error
from bitimely_core.models.adapters import configure_events
from bitimely_core.models.base import Model
from bitimely_core.store.records import FORMAT, check_result, read_result, require_manifest
from bitimely_core.system_errors import raise_system_error

# shapes of the paper's pre-training data; PopHR: 47 PheCodes and 5 special ids
DEFAULT_SHAPES: dict[str, dict[str, Any]] = {
    "18m": {"channels": 7, "length": 3000},
    "7.5m": {"channels": 12, "length": 5000},
    "7.5m-regression": {"channels": 12, "length": 5000},
    "3.8m-ecg": {"channels": 12, "length": 1000},
    "3m": {"codes": 52, "length": 254, "person": False},
    "tiny": {"channels": 7, "length": 3000},
}


def build(
    name: str, *, preset: str | None = None, channels: int = 1, length: int = 3000, **overrides: Any
) -> Model:
    """A randomly initialised model, from torch's global generator.

    Args:
        name: a registered model, for instance `bitimelygpt`.
        preset: `18m`, `7.5m`, `7.5m-regression`, `3.8m-ecg`, `3m` or `tiny`; the section of the
            model's family gives the dimensions.
        channels: V of the windows.
        length: T of the windows; only learned positions and readout `flatten` depend on it.
        overrides: fields of `ModelConfig`, for instance `layers=2`, `tokenizer="patch"`; events
            need `codes`, the size of the input vocabulary.

    Raises:
        UserError: unknown name or preset, or invalid settings (exit 2).
    """
    entry = registry.models[name]
    return from_config(
        build_model_config(entry.name, preset, channels=channels, length=length, **overrides)
    )


def from_config(config: ModelConfig) -> Model:
    """A randomly initialised model of a configuration. Raises UserError (config, exit 2) for
    unknown settings.
    """
    kind = find_model_config(config.name)
    complete = (
        config if isinstance(config, kind) else validate(kind, config.model_dump(by_alias=True))
    )
    model: Model = registry.models[config.name](choose_tokens(configure_events(complete)))
    return model


def complete_config(config: ModelConfig) -> ModelConfig:
    """A configuration as its model reads it, without allocating weights. Raises UserError as
    `from_config`.
    """
    with torch.device("meta"):
        return from_config(config).config


def count_parameters(model: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def count_configured(config: ModelConfig) -> int:
    """Number of trainable parameters of a configuration, without allocating them."""
    with torch.device("meta"):
        return count_parameters(from_config(config))


def default_shape(preset: str) -> dict[str, Any]:
    """Channels and length (events: vocabulary size) of the data of a preset, to count parameters
    without data.
    """
    return dict(DEFAULT_SHAPES.get(preset, {}))


def match_parameters(name: str, preset: str, **chosen: Any) -> dict[str, Any]:
    """The widths at which model `name` comes closest to the parameter count of BiTimelyGPT at
    `preset` (`--budget matched`).

    Layers and heads stay. The width is a multiple of 2 x heads and the other widths keep their
    ratio to it; if the count is still more than 5 % off, the feed-forward width is adjusted. The
    result includes `ModelFacts.budget_changes`. `chosen`: fields of `ModelConfig` that the data or
    the user decide: channels, length, codes, events, person, numbers, and the tokenizer of models
    that take several.
    """
    entry, data = registry.models[name], dict(chosen)
    events = {"events": data.pop("events", "code-embed")}
    tokens = _choose_matched_tokens(data.pop("tokenizer", None), data)
    goal = count_configured(build_model_config("bitimelygpt", preset, **data, **tokens))
    if entry.facts.tokenizer or data.get("codes"):
        data |= tokens
    base = build_model_config(entry.name, preset, **data, **events)
    first = entry.facts.budget_changes(base)
    base = base.model_copy(update=first)

    def widths(dim: int) -> dict[str, int]:
        return {
            "dim": dim,
            "value_dim": base.value_dim * dim // base.dim,
            "ffn_dim": base.ffn_dim * dim // base.dim,
        }

    def size(dim: int) -> int:
        return count_configured(base.model_copy(update=widths(dim)))

    step = entry.facts.step or 2 * (
        base.heads if "heads" in load_preset(preset).get(entry.facts.family, {}) else 1
    )
    low, high = 1, 2
    while size(high * step) < goal:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle * step) < goal else (low, middle)
    chosen = widths(min((low * step, high * step), key=lambda dim: abs(size(dim) - goal)))
    now = count_configured(base.model_copy(update=chosen))
    # the steps of the width are too coarse (raindrop: one width per channel)
    if abs(now / goal - 1) > 0.05:
        unit = (
            count_configured(base.model_copy(update={**chosen, "ffn_dim": chosen["ffn_dim"] + 1}))
            - now
        )
        chosen["ffn_dim"] = max(1, chosen["ffn_dim"] + (round((goal - now) / unit) if unit else 0))
    return {**first, **chosen}


def _choose_matched_tokens(tokenizer: str | None, data: Mapping[str, object]) -> dict[str, str]:
    """The tokens with which BiTimelyGPT is counted: of signals the paper's, but beside a model with
    those of a network the same.
    """
    if data.get("codes"):
        return {"tokenizer": "codes"}
    if tokenizer is None:
        return {}
    return {"tokenizer": tokenizer if tokenizer == "patch-cnn" else "conv"}


def load(folder: str | Path) -> Model:
    """The model that `Model.save` wrote into `folder`, in eval mode; of a fine-tuned model without
    its head.

    Raises:
        UserError: a file is missing (exit 2) or damaged (exit 5), or the weights do not match
            config.json (exit 5).
    """
    stored, weights = read_model(folder)
    if "method" in stored:
        raise usage_error(
            f"the method {safe_text(stored['model'].get('name'))}, which has no network",
            "expected a network",
            "See: bitimely list models",
            file=str(Path(folder) / "config.json"),
        )
    if "head" in stored:
        weights = {
            key.removeprefix("model."): weight
            for key, weight in weights.items()
            if key.startswith("model.")
        }
    model = from_config(read_config(stored, folder))
    load_weights(model, weights, Path(folder) / "model.safetensors")
    return model.eval()


def read_model(folder: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and the tensors of a saved model. Raises UserError as `load`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(folder) / "config.json"
    try:
        stored = json.loads(read_result(path))
        weights = load_file(check_result(path.with_name("model.safetensors"))[0])
    except FileNotFoundError as error:
        raise usage_error(
            "no model here",
            "expected config.json and model.safetensors",
            "Give the folder of a saved model",
            code=Reason.NOT_FOUND,
            file=str(folder),
        ) from error
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise_system_error(error, folder)
        raise integrity_error(
            str(folder), f"damaged ({safe_text(str(error))})", hint="Restore it from a copy"
        ) from error
    if (
        not isinstance(stored, dict)
        or stored.get("format_version") != FORMAT
        or not isinstance(stored.get("model"), dict)
    ):
        version = (
            safe_text(stored.get("format_version")) if isinstance(stored, dict) else "no object"
        )
        raise UserError(
            Reason.UNSUPPORTED_FORMAT,
            f"format version {version}",
            f"expected {FORMAT}",
            "Update bitimely",
            file=str(path),
            exit_code=Exit.INTEGRITY,
        )
    require_manifest(path.parent)
    return stored, weights


def read_config(stored: dict[str, Any], folder: str | Path) -> ModelConfig:
    """The configuration in the `config.json` of a saved model. Raises UserError (config,
    unknown_name, exit 2).
    """
    return validate(
        find_model_config(str(stored["model"].get("name"))),
        stored["model"],
        str(Path(folder) / "config.json"),
    )


def load_weights(module: nn.Module, weights: dict[str, Tensor], file: Path) -> None:
    """Load all weights. Raises UserError (shapes_differ, exit 5) that names missing, unexpected and
    misshapen ones.
    """
    state = module.state_dict()
    wrong = [f"{key} is missing" for key in state.keys() - weights.keys()]
    wrong += [f"{key} is unexpected" for key in weights.keys() - state.keys()]
    both = state.keys() & weights.keys()
    wrong += [
        f"{key} is {list(weights[key].shape)} for {list(state[key].shape)}"
        for key in both
        if state[key].shape != weights[key].shape
    ]
    if wrong:
        raise UserError(
            Reason.SHAPES_DIFFER,
            f"{len(wrong)} weights do not fit: {'; '.join(sorted(wrong)[:5])}",
            "expected the weights of this model",
            "Use the config.json that they were saved with",
            file=str(file),
            exit_code=Exit.INTEGRITY,
        )
    module.load_state_dict(weights)
