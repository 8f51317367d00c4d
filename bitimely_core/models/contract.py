"""What all models agree on: the directions in which a layer reads, the two predictions, and the
errors of settings that do not fit together.
"""

from __future__ import annotations

from typing import Literal

from bitimely_core.config import ModelConfig
from bitimely_core.errors import UserError, usage_error
from bitimely_core.registry import models

Direction = Literal["forward", "backward", "both"]
Which = Literal["next", "previous"]


def config_error(problem: str, requirement: str, field: str, hint: str = "") -> UserError:
    """Settings that do not fit together (config, exit 2)."""
    return usage_error(problem, requirement, hint, field=field)


def require_divisible(config: ModelConfig, *fields: str) -> None:
    """Raises UserError (config, exit 2) for a width that the heads do not divide."""
    for field in fields:
        width = getattr(config, field)
        if width % config.heads:
            raise config_error(
                f"{width} for {config.heads} heads",
                "expected a multiple of the heads",
                f"model.{field}",
            )


def refuse_codes(config: ModelConfig, why: str = "") -> None:
    """Raises UserError (config, exit 2) for events, of models that read signals alone."""
    if config.tokenizer == "codes":
        raise config_error(
            f"codes for {config.name}",
            f"expected signals: {why}" if why else "expected signals",
            "model.tokenizer",
            "Choose another model",
        )


def objective_error(config: ModelConfig, problem: str, requirement: str) -> UserError:
    """An objective that asks for what a model cannot do (config, exit 2)."""
    return config_error(
        problem,
        requirement,
        "objective.name",
        f"Use the objective {models[config.name].facts.objective}",
    )
