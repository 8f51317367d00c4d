"""Cache to windows on disk: one pass over the recordings, memory bounded by one of them and one shard.

Legend: n windows, T samples a window, V channels.
"""

from __future__ import annotations

import hashlib
import math

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from bitimely_core import registry, store
from bitimely_core.batch import Progress, Record
from bitimely_core.errors import Exit, Finding, Level, Reason, UserError, safe_text
from bitimely_core.tokens import splits
from bitimely_core.tokens.cutting import Cut, Place, Plan, blocks, cut, refused
from bitimely_core.tokens.windows import FORMAT, Windows, check_subjects, open_tokens

if TYPE_CHECKING:
    import polars as pl

    from bitimely_core.cache import Cache

SHARD = 128 << 20  # bytes of windows a file; each file is one record batch, so that it is one array in memory
NORMALISE = ("channel", "window", "none")


def build(
    cache: str | Path | Cache,
    *,
    view: str = "",
    out: str | Path,
    window: int | None = None,
    stride: int | None = None,
    rate: float | None = None,
    channels: Sequence[str] | None = None,
    normalise: str = "channel",
    split: str | None = None,
    seed: int = 0,
    verify: bool = True,
    force_new: bool = False,
    progress: Progress | None = None,
) -> Windows:
    """Cut the cached recordings of `cache` into the windows of `view`, write them to the folder `out` and open them.

    What is not given is the view's own. `rate` alone keeps the windows' duration. `normalise` decides how values are read, not what is stored.
    The same choices on the same cache again do nothing; a new generation of the cache makes new windows.

    Raises UserError: unknown_name or config (exit 2) for choices that do not fit; settings_differ (exit 2, one detail a key) where `out` holds
    windows made otherwise, unless `force_new`; sampling_rate, no_input, subject_leakage (exit 4); integrity (exit 5) for a damaged cache.
    """
    from bitimely_core.cache import open_cache

    out = Path(out)
    opened = open_cache(Path(cache), verify=False) if isinstance(cache, str | Path) else cache
    plan = resolved(opened, view, window, stride, rate, channels, normalise, split, seed)
    if not force_new and is_current(out, plan, store.fingerprint(opened.manifest)):
        return open_tokens(out, verify=verify)
    if verify and isinstance(cache, str | Path):
        opened = open_cache(Path(cache), verify=True)
    fingerprint = store.fingerprint(opened.manifest)
    store.make_folder(out)
    with store.lock(out):
        if not force_new and is_current(out, plan, fingerprint):  # another process was faster
            return open_tokens(out, verify=verify)
        store.sweep(out)
        write(opened, plan, fingerprint, out, progress)
    return open_tokens(out, verify=False)  # what was written was read back and compared


def resolved(
    cache: Cache,
    view: str,
    window: int | None,
    stride: int | None,
    rate: float | None,
    channels: Sequence[str] | None,
    normalise: str,
    split: str | None,
    seed: int,
) -> Plan:
    """The view's facts with the caller's choices. A view without channels or rate takes those of the first recording."""
    registry.members("bitimely_core.datasets")
    views = registry.datasets[cache.dataset].facts.views
    if view not in views:
        raise registry.unknown("view", f"{cache.dataset}/{view}", [f"{cache.dataset}/{name}".rstrip("/") for name in views])
    own = views[view]
    if normalise not in NORMALISE:
        raise registry.unknown("normalisation", normalise, list(NORMALISE))
    if (split or own.split) not in splits.SCHEMES:
        raise registry.unknown("split", split or own.split, list(splits.SCHEMES))
    names, own_rate = tuple(channels or own.channels), own.rate
    if not names or own_rate <= 0 or own.window <= 0:
        first = next(iter(cache.records()), None)
        signals = [s for s in first.signals if s.channel in names or not names] if first else []
        names = names or tuple(dict.fromkeys(s.channel for s in signals))
        own_rate = own_rate if own_rate > 0 else max((s.rate for s in signals), default=1.0)
        longest = min((math.floor(len(s.samples) * own_rate / s.rate + 1e-6) for s in signals), default=1)
        own_window = own.window if own.window > 0 else longest
    else:
        own_window = own.window
    if len(set(names)) < len(names):
        raise refused(f"channels {', '.join(map(safe_text, names))}", "expected each once", "Name every channel once", "channels")
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise refused(f"rate {rate}", "expected a positive number of Hz", "Give for example --rate 100", "rate")
    factor = (rate or own_rate) / own_rate
    length = window if window is not None else max(1, round(own_window * factor))
    step = stride if stride is not None else length if own.stride is None or window is not None else max(1, round(own.stride * factor))
    if length < 1 or step < 1:
        raise refused(f"window {length}, stride {step}", "expected at least 1 sample each", "Give numbers of samples", "window")
    if stride is not None and own.epoch is not None and own.target is None:
        raise refused("a stride", "this view takes one window a labelled epoch", "Leave --stride away", "stride")
    return Plan(
        dataset=cache.dataset, view=view, channels=names, rate=float(rate or own_rate), window=length, stride=step, resample=rate is not None,
        decimate=own.decimate, hold=own.hold, task=own.task, classes=own.classes, labels=own.labels, epoch=own.epoch, trim=own.trim,
        target=own.target, normalise=normalise, split=split or own.split, seed=seed,
    )  # fmt: skip


def is_current(out: Path, plan: Plan, fingerprint: str) -> bool:
    """Whether `out` holds these windows of this cache. False: to be made. Raises UserError (settings_differ) for windows made otherwise."""
    if not (out / "manifest.json").is_file():
        return False
    manifest = store.manifest(out)
    old, new = manifest.get("options", {}), plan.options()
    differing = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    if differing:
        first, *rest = [
            Finding(
                code=Reason.SETTINGS_DIFFER, file=str(out), field=key, text=f"the windows there have {safe_text(str(old.get(key)))}",
                wanted=f"now {safe_text(str(new.get(key)))}",
            )
            for key in differing
        ]  # fmt: skip
        raise UserError(
            Reason.SETTINGS_DIFFER, first.text, wanted=first.wanted, action="Give another --name, or --force-new to replace them",
            file=first.file, field=first.field, exit_code=Exit.USAGE, details=rest,
        )  # fmt: skip
    return bool(manifest["cache"] == fingerprint)


class Taken(NamedTuple):
    """What was taken from one recording, without its samples."""

    subject_id: str
    recording_id: str
    found: Cut  # emptied of segments
    places: list[Place]
    splits: list[str]
    moments: list[list[tuple[int, float, float]]]  # a piece: [V] of (count, mean, sum of squared deviations), training windows only
    content: str  # hash of the windows


def write(cache: Cache, plan: Plan, fingerprint: str, out: Path, progress: Progress | None) -> None:
    """All files of the token set, the manifest last. What a failed attempt wrote is removed; the former set stays until the end."""
    before = store.manifest(out) if (out / "manifest.json").is_file() else None
    generation = 1 + (before or {"generation": 0})["generation"]
    taken: list[Taken] = []
    left_out: Counter[str] = Counter()
    scheme = splits.scheme(
        plan.split, subjects=cache.subjects()["subject_id"].to_list() if plan.split == "subject" else (), seed=plan.seed, length=plan.length
    )
    files: dict[str, dict[str, Any]] = {}
    pieces = _pieces(cache, plan, scheme, taken, left_out, progress)
    try:
        for number, (rows, shard) in enumerate(_shards(pieces)):
            name = f"windows-{generation:03d}-{number:05d}.arrow"
            files[name] = {**_written(out / name, lambda file, shard=shard: _write_arrow(file, shard, plan)), "rows": rows}  # type: ignore[misc]
        index, class_names = _index(taken, plan)
        findings = _findings(index, taken, class_names, plan, left_out)
        if index.is_empty():
            raise UserError(
                Reason.NO_INPUT, "no window fits this view", wanted=f"expected recordings with {', '.join(plan.channels)}",
                action="Look at the details for what was left out", details=findings,
            )  # fmt: skip
        check_subjects(index, plan.split)
        if before is not None:  # from here on the former set is no longer whole
            store.retire(out)
        files["index.parquet"] = _written(out / "index.parquet", lambda file: index.write_parquet(file, statistics=False)) | {"rows": index.height}
        affine = _recordings(taken, plan)
        files["recordings.parquet"] = _written(out / "recordings.parquet", lambda file: affine.write_parquet(file, statistics=False)) | {"rows": affine.height}
        sha256, size = store.write_json(out / "statistics.json", statistics(taken, index, class_names, plan))
        files["statistics.json"] = {"sha256": sha256, "size": size}
    except BaseException:
        for name in files:
            (out / name).unlink(missing_ok=True)
        raise
    body = {
        "format_version": FORMAT,
        "kind": "windows",
        "cache": fingerprint,
        "options": plan.options(),
        "class_names": class_names,
        "units": list(taken[0].found.units),
        "windows": index.height,
        "missing": any(f["dtype"] == "float32" for f in ()),
        "counts": audit(index, class_names),
        "left_out": dict(sorted((+left_out).items())),
        "notices": [splits.SHARED[plan.split]] if plan.split in splits.SHARED else [],
        "findings": [finding.as_dict() for finding in findings],
    }
    store.publish(out, body, files, generation)
