"""What long work reports on its way, and whoever called it may show: how far it is, and lines.

The command line draws bars and prints lines inside `show_progress` and `show_lines`. Outside of
them a report does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Draw = Callable[[str, int, int | None], None]
"""What is counted, how much of it is done, and how much there is (None: not known).

Changing values (a loss) follow in the text behind a tab.
"""
Show = Callable[[str], None]

_DRAW: ContextVar[Draw | None] = ContextVar("draw", default=None)
_SHOW: ContextVar[Show | None] = ContextVar("show", default=None)


@contextmanager
def show_progress(draw: Draw) -> Iterator[None]:
    """Call `draw` for what `report_progress` is given inside."""
    token = _DRAW.set(draw)
    try:
        yield
    finally:
        _DRAW.reset(token)


@contextmanager
def show_lines(show: Show) -> Iterator[None]:
    """Call `show` for the lines that are announced inside."""
    token = _SHOW.set(show)
    try:
        yield
    finally:
        _SHOW.reset(token)


@contextmanager
def show_lines_once(earlier: set[str]) -> Iterator[None]:
    """Show the lines that are announced inside, but for those in `earlier`, which gets them."""
    outer = _SHOW.get()
    if outer is None:
        yield
        return

    def show(line: str) -> None:
        if line not in earlier:
            outer(line)
        earlier.add(line)

    with show_lines(show):
        yield


def report_progress(what: str, done: int, total: int | None) -> None:
    """Say that `done` of `total` are finished."""
    draw = _DRAW.get()
    if draw is not None:
        draw(what, done, total)


def announce(line: str) -> None:
    """A line for whoever waits."""
    show = _SHOW.get()
    if show is not None:
        show(line)


def are_lines_shown() -> bool:
    """Whether anybody is shown what is announced."""
    return _SHOW.get() is not None
