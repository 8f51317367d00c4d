"""Registers what verbs do with recordings (signals on a regular clock), see `DataKind`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bitimely_core import registry
from bitimely_core.cache.ingest_units import ingest_recordings
from bitimely_core.formats.text import list_names
from bitimely_core.registry import Choices, DataKind, DatasetFacts, View, data_kinds
from bitimely_core.tokens import building
from bitimely_core.tokens.windows import open_windows
from bitimely_core.types import SPLITS

if TYPE_CHECKING:
    from bitimely_core.cache import Cache

NAMES = 12  # channels in a line
LENGTH = 3000  # samples a window where neither view nor paper gives them


def summarize_windows(folder: Path) -> Choices:
    """Shape, notices, findings and audit of the windows in `folder`."""
    windows = open_windows(folder, verify=False)
    manifest = windows.manifest
    audit = {}
    for split in SPLITS:
        counts = manifest.counts[split]
        classes = {name: counts.classes[name] for name in manifest.class_names}
        audit[split] = {
            "subjects": counts.subjects,
            "windows": counts.windows,
            "classes": classes if counts.windows else {},
        }
    return {
        "windows": len(windows),
        **building.describe_options(manifest.options, manifest.class_names),
        "fingerprint": windows.fingerprint,
        "notices": windows.notices,
        "findings": [finding.model_dump() for finding in manifest.findings],
        "use": None if manifest.use is None else manifest.use.model_dump(),
        "audit": audit,
    }


def describe_windows(summary: Choices) -> tuple[str, str]:
    """Number, shape and place of new windows, and the next verb.

    Channels that the view leaves open are named.
    """
    dataset, _, view = summary["data"].partition("/")
    is_open = not registry.datasets[dataset].facts.views[view].channels
    names = f" ({list_names(summary['channel_names'], NAMES)})" if is_open else ""
    line = (
        f"{summary['windows']:,} windows of {summary['length']} samples x {summary['channels']} "
        f"channels{names} at {summary['rate']:g} Hz in {summary['folder']}"
    )
    return line, "pretrain" if summary["task"] == "none" else "finetune RUN"


def estimate_windows(
    facts: DatasetFacts, view: str, cache: Cache | None, window: int | None, rate: float | None
) -> Choices:
    """Windows (None: unknown), channels and samples a window of a view.

    They are those of its cache, else of the view and the paper.
    """
    stated = facts.paper.get(view, {})
    cut = facts.views.get(view, View(channels=(), rate=0.0, window=0))
    seconds = cut.window / cut.rate if cut.rate else 0.0
    if window and (rate or cut.rate):
        seconds = window / (rate or cut.rate)
    length = window or round(seconds * (rate or 0)) or cut.window or stated.get("length")
    return {
        "windows": (count_windows(cache, seconds) if cache else 0) or stated.get("sequences"),
        "channels": len(cut.channels) or stated.get("channels", 1),
        "length": length if isinstance(length, int) else LENGTH,
        "observed": cut.observed,
    }


def count_windows(cache: Cache, seconds: float) -> int:
    """Windows of `seconds` in the recordings of a cache, labelled or not; 0 seconds: recordings."""
    import polars as pl

    seconds_each = (pl.col("n_samples") / pl.col("rate")).sum()
    channels = cache.signals().group_by("recording_id", "channel").agg(seconds=seconds_each)
    recordings = channels.group_by("recording_id").agg(pl.col("seconds").max())
    if seconds <= 0:
        return recordings.height
    return int((recordings["seconds"] / seconds + 1e-6).floor().sum())


KIND = DataKind(
    section="tokenize",
    # choices of sequences are refused by name
    split_choices=lambda options, choices: ({**options, **(choices or {})}, None),
    pin_options=lambda options, folder: options,
    ingest=ingest_recordings,
    plan_tokens=lambda cache, out, **choices: {
        **building.plan(cache, **choices),
        "folder": str(out),
    },
    write_tokens=building.build_windows,
    open_tokens=open_windows,
    summarize_tokens=summarize_windows,
    describe_tokens=describe_windows,
    estimate_size=estimate_windows,
)

data_kinds.add("recordings", KIND)
