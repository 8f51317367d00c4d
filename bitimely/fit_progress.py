"""Training from Python: `fit` with its progress where somebody looks at it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from bitimely_core.train import loop
from bitimely_core.train.metrics_log import LogLine
from bitimely_core.train.state import Log

Options = ParamSpec("Options")
Result = TypeVar("Result")


def with_progress(train: Callable[Options, Result]) -> Callable[Options, Result]:
    """`train` with a bar of steps on stderr, in a terminal or a notebook, where it has no `log`."""

    @functools.wraps(train)
    def run(*arguments: Options.args, **options: Options.kwargs) -> Result:
        if options.get("log") is not None:
            return train(*arguments, **options)
        with show_steps() as log:
            options["log"] = log
            return train(*arguments, **options)

    return run


@contextmanager
def show_steps() -> Iterator[Log | None]:
    """What draws a bar from the lines of a log; None where nobody looks: in a pipe, in a file."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    screen = Console(file=sys.stderr)
    if not (screen.is_terminal or screen.is_jupyter):
        yield None
        return
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen) as bar:
        steps = bar.add_task("training", total=None, loss="")

        def draw(line: LogLine) -> None:
            loss = line.get("loss")
            text = "" if loss is None else f"loss {loss:.4g}"
            bar.update(steps, completed=line["step"], total=line["of"], loss=text)

        yield draw


fit = with_progress(loop.fit)
