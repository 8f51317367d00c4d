"""What a caller may choose about windows, and the options that come of it on a cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from bitimely_core import registry
from bitimely_core.cache import Cache
from bitimely_core.config import Section, WindowConfig
from bitimely_core.errors import check_choice, safe_text, usage_error
from bitimely_core.registry import Choices, View
from bitimely_core.schemas.tokens import WindowOptions
from bitimely_core.tokens import filters, open_views
from bitimely_core.tokens.epochs import choose_scored, count_durations, is_shorter
from bitimely_core.types import select_keys


class WindowChoices(Section, WindowConfig):
    """Options of `build` and `plan`. None: as the view says."""

    view: str = ""  # of the cache's data set, "" for its own


def resolve_options(cache: Cache, choices: WindowChoices) -> WindowOptions:
    """The facts of the view with the choices of the caller.

    What a view leaves open (no channels, rate or window 0) is as `open_views` says. Raises
    UserError: unknown_name or config (exit 2) for choices that do not fit, and those of
    `open_views.complete_view`.
    """
    view = _find_view(cache, choices.view)
    band, stops = filters.validate_filters(choices.bandpass, choices.notch)
    view = _complete_view(cache, _select_channels(cache, view, choices.channels or ()))
    factor = _scale_rate(view, choices.rate)
    window, stride = _scale_window(view, choices, factor)
    by_epoch = _is_cut_by_epoch(view)
    if by_epoch:
        view = _choose_epoch(cache, view, choices, window / (view.rate * factor))
    _check_combination(view, choices, by_epoch=by_epoch, has_filter=bool(band or stops))
    rate = float(view.rate * factor)
    resolved = {
        "dataset": cache.dataset,
        "channels": _list_read_channels(view),
        "rate": rate,
        "window": window,
        "stride": stride,
        "resample": choices.rate is not None,
        "epoch": (view.epoch or window / rate) if by_epoch else None,
        "trim": view.trim if by_epoch else None,
        "split": choices.split or view.split,
        "bandpass": band,
        "notch": stops,
        "clock": view.clock or None,
        "resampling": choices.resampling or "two-sided",
        "filtering": choices.filtering or "zero-phase",
    }
    return WindowOptions(**_list_facts(view) | choices.model_dump() | resolved)


def _is_cut_by_epoch(view: View) -> bool:
    """Whether each labelled epoch is a window."""
    return view.epoch is not None and view.target is None


def _select_channels(cache: Cache, view: View, channels: Sequence[str]) -> View:
    """The view of these channels, of all where there are none. Raises UserError (unknown_name, exit
    2) for one that no recording has.
    """
    names = sorted(cache.signals()["channel"].unique()) if channels else []
    for channel in channels:
        check_choice("channel", channel, names)
    return replace(view, channels=tuple(channels)) if channels else view


def _list_facts(view: View) -> Choices:
    """What the options take from the view as it is."""
    return select_keys(vars(view), WindowOptions.model_fields)


def _scale_rate(view: View, rate: float | None) -> float:
    """The rate that is asked for over that of the view. Raises UserError (config, exit 2)."""
    factor = 1.0 if rate is None else rate / view.rate
    if not 0 < factor < math.inf:
        raise usage_error(f"found {rate}", "expected a positive number of Hz", field="--rate")
    return factor


def _list_read_channels(view: View) -> tuple[str, ...]:
    """The channels of the values, and that of the times of irregular samples."""
    return (*view.channels, view.clock) if view.clock and not view.grid else view.channels


def _choose_epoch(cache: Cache, view: View, choices: WindowChoices, seconds: float) -> View:
    """The view with the epoch for windows of `seconds`.

    It is that of the view, or that of the windows where these and the annotations are shorter.
    """
    if not view.epoch or view.points or choices.window is None or seconds >= view.epoch:
        return view
    rows = cache.annotations().select("duration", "label").iter_rows()
    scored = choose_scored(count_durations(rows, view.labels))
    return replace(view, epoch=seconds) if is_shorter(scored, view.epoch) else view


def _check_combination(
    view: View, choices: WindowChoices, *, by_epoch: bool, has_filter: bool
) -> None:
    """Raises UserError (config, exit 2) for choices that windows of this kind do not have."""
    if by_epoch and choices.stride is not None:
        raise usage_error(
            f"found {choices.stride}",
            "this view takes one window a labelled epoch",
            field="--stride",
        )
    if view.clock and (has_filter or (choices.rate is not None and not view.grid)):
        raise usage_error(
            "the samples of this view are irregular",
            "expected no filter, and no rate without a grid",
            field="--rate",
        )


def _find_view(cache: Cache, name: str) -> View:
    """A view of the cache's data set. Raises UserError (unknown_name, exit 2)."""
    views = registry.datasets[cache.dataset].facts.views
    names = {view: f"{cache.dataset}/{view}".rstrip("/") for view in views}
    check_choice("view", names.get(name, f"{cache.dataset}/{name}"), names.values())
    return views[name]


def _complete_view(cache: Cache, view: View) -> View:
    """The view at the rate of the cache, with what it leaves open."""
    rate = cache.manifest.settings.options.get("rate")
    # a data set that comes at several rates: the windows of the view keep their duration
    if rate and view.rate > 0:
        view = replace(view, rate=float(rate), window=round(view.window * rate / view.rate))
    if not view.channels or view.rate <= 0 or view.window <= 0:
        view = open_views.complete_view(cache, view)
    if len(set(view.channels)) < len(view.channels):
        names = ", ".join(map(safe_text, view.channels))
        raise usage_error(f"found {names}", "expected each once", field="--channels")
    return view


def _scale_window(view: View, choices: WindowChoices, factor: float) -> tuple[int, int]:
    """Samples of a window and between two, at `factor` times the rate of the view."""
    window = max(1, round(view.window * factor)) if choices.window is None else choices.window
    stride = window
    if choices.stride is not None:
        stride = choices.stride
    elif view.stride is not None and choices.window is None:
        stride = max(1, round(view.stride * factor))
    if window < 1 or stride < 1:
        raise usage_error(
            f"found {window} samples every {stride}", "expected at least 1 each", field="--window"
        )
    return window, stride
