"""Texts in the place of paths: whoever works in a notebook writes `workspace="ws"`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

Options = ParamSpec("Options")
Result = TypeVar("Result")

# option of the command line -> the parameter that has another name
PARAMETERS = {"at": "times", "map": "channel_map", "set": "assignments"}


def accept_texts(verb: Callable[Options, Result]) -> Callable[Options, Result]:
    """`verb`, which takes a text wherever its parameter is a path, and a single text or path where
    it takes several. Options may have their names on the command line (`PARAMETERS`).
    """
    annotations = {
        name: str(parameter.annotation).removesuffix(" | None")
        for name, parameter in inspect.signature(verb).parameters.items()
    }

    def rename(name: str) -> str:
        parameter = PARAMETERS.get(name, name)
        return parameter if parameter in annotations else name

    def convert(name: str, value: Any) -> Any:
        annotation = annotations.get(name, "")
        if annotation.startswith(("Sequence[", "list[")) and isinstance(value, str | Path):
            value = [value]
        if annotation == "Path" and isinstance(value, str):
            return Path(value)
        return list(map(Path, value)) if annotation == "Sequence[Path]" else value

    @functools.wraps(verb)
    def call(*arguments: Any, **options: Any) -> Result:
        placed = tuple(map(convert, annotations, arguments)) + arguments[len(annotations) :]
        named = {rename(name): value for name, value in options.items()}
        return verb(*placed, **{name: convert(name, value) for name, value in named.items()})

    return call
