"""Operations on recordings (signals on a regular clock), see `registry.DataKind`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bitimely_core.cache.ingest import ingest_recordings
from bitimely_core.registry import Choices, DataKind, DatasetFacts, data_kinds
from bitimely_core.tokens import building
from bitimely_core.tokens.windows import Windows, open_windows
from bitimely_core.types import SPLITS

if TYPE_CHECKING:
    from bitimely_core.cache import Cache

LENGTH = 3000  # samples a window where neither view nor paper gives them


def audit_splits(windows: Windows) -> dict[str, Any]:
    """Subjects, windows and windows a class in each split."""
    out = {}
    for split in SPLITS:
        part = windows[split]
        target, classes = part.targets(None) if len(part) else None, [0] * windows.classes
        if target is not None and windows.task == "classification":
            classes = np.bincount(
                np.asarray(target, dtype=np.int64), minlength=windows.classes
            ).tolist()
        elif target is not None and windows.task == "multilabel":
            classes = [int(n) for n in np.nansum(target, axis=0)]
        counts = (
            dict(zip(windows.class_names, classes, strict=False))
            if target is not None and windows.task != "regression"
            else {}
        )
        out[split] = {
            "subjects": len(set(part.subjects())),
            "windows": len(part),
            "classes": counts,
        }
    return out


def summarize_windows(folder: Path) -> Choices:
    """Shape, notices, findings and audit of the windows in `folder`."""
    windows = open_windows(folder, verify=False)
    return {
        "windows": len(windows),
        "length": windows.length,
        "channels": windows.channels,
        "channel_names": list(windows.channel_names),
        "rate": windows.rate,
        "task": windows.task,
        "class_names": list(windows.class_names),
        "split": windows.split,
        "bandpass": windows.options.bandpass,
        "notch": windows.options.notch,
        "fingerprint": windows.fingerprint,
        "notices": windows.notices,
        "findings": [finding.model_dump() for finding in windows.manifest.findings],
        "audit": audit_splits(windows),
    }


def describe_windows(summary: Choices) -> tuple[str, str]:
    """Number, shape and place of new windows, and the next verb."""
    shape = f"{summary['windows']:,} windows of {summary['length']} samples x {summary['channels']} channels at {summary['rate']:g} Hz"
    return f"{shape} in {summary['folder']}", "pretrain" if summary[
        "task"
    ] == "none" else "finetune RUN"


def estimate_windows(
    facts: DatasetFacts, view: str, cache: Cache | None, window: int | None, rate: float | None
) -> Choices:
    """Windows (None: unknown), channels and samples a window of a view, from its cache, else from
    the view and the paper.
    """
    stated, cut = facts.paper.get(view, {}), facts.views.get(view)
    seconds = cut.window / cut.rate if cut and cut.rate else 0.0
    if window and (rate := rate or (cut.rate if cut else 0)):
        seconds = window / rate
    length = (
        window or round(seconds * (rate or 0)) or (cut.window if cut else 0) or stated.get("length")
    )
    return {
        "windows": (count_windows(cache, seconds) if cache else 0) or stated.get("sequences"),
        "channels": len(cut.channels) if cut and cut.channels else stated.get("channels", 1),
        "length": length if isinstance(length, int) else LENGTH,
        "observed": cut.observed if cut else 1.0,
    }


def count_windows(cache: Cache, seconds: float) -> int:
    """Windows of `seconds` in the recordings of a cache, labelled or not; 0 seconds: recordings."""
    import polars as pl

    lasting = (
        cache.signals()
        .group_by("recording_id", "channel")
        .agg(seconds=(pl.col("n_samples") / pl.col("rate")).sum())
    )
    lasting = lasting.group_by("recording_id").agg(pl.col("seconds").max())
    return (
        lasting.height if seconds <= 0 else int((lasting["seconds"] / seconds + 1e-6).floor().sum())
    )


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
