"""Cache to windows on disk: one pass over the recordings, memory bounded by one of them and two files."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from bitimely_core import registry, storage
from bitimely_core.errors import Finding, Level, Reason, UserError, input_error, safe_text, usage_error
from bitimely_core.tokens import filters, moments, splits
from bitimely_core.tokens.cutting import RecordCut, WindowPlace, WindowPlan, count_unfiltered, cut_record, make_windows
from bitimely_core.tokens.sets import FORMAT, check_subjects
from bitimely_core.tokens.windows import Windows, open_windows
from bitimely_core.types import Annotation, Progress

if TYPE_CHECKING:
    import polars as pl

    from bitimely_core.cache import Cache

SHARD_BYTES = 128 << 20  # bytes of windows a file; each file is one record batch, so that it is one array in memory
SHARDS = re.compile(r"windows-\d+-[0-9a-f]{16}\.arrow")
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
    bandpass: Sequence[float | None] | None = None,
    notch: Sequence[float] | None = None,
    test_fold: int | None = None,
    verify: bool = True,
    force_new: bool = False,
    progress: Progress | None = None,
) -> Windows:
    """Cut the cached recordings of `cache` into the windows of `view`, write them to the folder `out` and open them.

    The same choices on the same cache again do nothing; a new generation of the cache makes new windows.

    Args:
        cache: a cache folder, or an open cache.
        view: name of a view of the cache's data set, "" for its own. What is not given below is as the view says.
        out: folder of the token set.
        window: samples a window at `rate` (T).
        stride: samples between the starts of windows; not for views of epochs.
        rate: Hz. Alone it keeps the windows' duration; only with it are faster channels resampled.
        channels: names, in the order of the values (V).
        normalise: how values are read: `channel` (statistics of the training split), `window` (its own z-score), `none` (physical).
        split: subject, official, time or random-window.
        seed: of the split.
        bandpass: lower and upper edge in Hz, None for an open side: Butterworth, zero phase, see `tokens.filters`. At the recording's own
            rate, before resampling. With a split by time each block is filtered on its own.
        notch: frequencies in Hz to take out, for example of the mains.
        test_fold: of ten, that is tested in the place of the tenth; the one before it validates. Of the data set's own folds, or of subjects.
        verify: compare the cache with its checksums first.
        force_new: replace windows that were made with other choices.
        progress: told after every recording.

    Raises:
        UserError: unknown_name or config (exit 2) for choices that do not fit; settings_differ (exit 2, one detail a key) where `out` holds
            windows made otherwise; sampling_rate, no_input, subject_leakage (exit 4); integrity (exit 5) for a damaged cache or token set.
    """
    out = Path(out)
    opened = _open_cache(cache, verify=False)
    chosen = resolve_plan(opened, view, window, stride, rate, channels, normalise, split, seed, bandpass, notch, test_fold)
    if not force_new and is_current(out, chosen, opened.manifest["manifest_sha256"]):
        return open_windows(out, verify=verify)
    opened = _open_cache(cache, verify=verify)
    storage.make_folder(out)
    with storage.lock(out):
        if not force_new and is_current(out, chosen, opened.manifest["manifest_sha256"]):  # another process was faster
            return open_windows(out, verify=verify)
        storage.remove_temporary_files(out)
        write_windows(opened, chosen, out, progress)
    return open_windows(out, verify=False)  # every file was read back and compared when it was written


def plan(
    cache: str | Path | Cache,
    *,
    view: str = "",
    window: int | None = None,
    stride: int | None = None,
    rate: float | None = None,
    channels: Sequence[str] | None = None,
    normalise: str = "channel",
    split: str | None = None,
    seed: int = 0,
    bandpass: Sequence[float | None] | None = None,
    notch: Sequence[float] | None = None,
    test_fold: int | None = None,
) -> dict[str, Any]:
    """What `build` would make, without writing or resampling: number of windows, bytes, shape, audit of the splits, notices, findings."""
    opened = _open_cache(cache, verify=False)
    chosen = resolve_plan(opened, view, window, stride, rate, channels, normalise, split, seed, bandpass, notch, test_fold)
    seen = CacheSurvey()
    values = sum(len(taken) * (2 if found.whole else 4) for found, taken in survey_cache(opened, chosen, seen))
    class_names = list_classes(seen, chosen)
    return {
        "format_version": FORMAT,
        "dataset": chosen.dataset,
        "view": chosen.view,
        "windows": len(seen.rows),
        "bytes": values * chosen.window * len(chosen.channels),
        "length": chosen.window,
        "channels": len(chosen.channels),
        "channel_names": list(chosen.channels),
        "rate": chosen.rate,
        "task": chosen.task,
        "class_names": class_names,
        "split": chosen.split,
        "bandpass": None if chosen.bandpass is None else list(chosen.bandpass),
        "notch": None if chosen.notch is None else list(chosen.notch),
        "audit": audit(seen, class_names),
        "notices": list_notices(chosen),
        "findings": [finding.as_dict() for finding in list_findings(seen, class_names)],
    }


def _open_cache(cache: str | Path | Cache, *, verify: bool) -> Cache:
    """A cache that is already open was verified by whoever opened it."""
    if not isinstance(cache, str | Path):
        return cache
    from bitimely_core.cache import open_cache

    return open_cache(Path(cache), verify=verify)


def resolve_plan(
    cache: Cache,
    view: str,
    window: int | None,
    stride: int | None,
    rate: float | None,
    channels: Sequence[str] | None,
    normalise: str,
    split: str | None,
    seed: int,
    bandpass: Sequence[float | None] | None,
    notch: Sequence[float] | None,
    test_fold: int | None,
) -> WindowPlan:
    """The view's facts with the caller's choices. What a view leaves open (no channels, rate or window 0) the first recording decides."""
    registry.load_members("bitimely_core.datasets")
    views = registry.datasets[cache.dataset].facts.views
    if view not in views:
        raise registry.unknown("view", f"{cache.dataset}/{view}", [f"{cache.dataset}/{name}".rstrip("/") for name in views])
    own = views[view]
    for kind, name, known in (("normalisation", normalise, NORMALISE), ("split", split or own.split, splits.SCHEMES)):
        if name not in known:
            raise registry.unknown(kind, name, list(known))
    band, stops = filters.validate_filters(bandpass, notch)
    if channels:
        _check_channels(cache, channels)
    names, own_rate, own_window = tuple(channels or own.channels), own.rate, own.window
    ingested = cache.manifest.get("settings", {}).get("options", {}).get("rate")
    if ingested and own_rate > 0:  # a data set that comes at several rates: the view's windows keep their duration
        own_rate, own_window = float(ingested), round(own_window * ingested / own_rate)
    if not names or own_rate <= 0 or own_window <= 0:
        first = next((record for record in cache.records() if record.annotations or own.epoch is None), None)
        if first is None and own.epoch is not None:
            text, action = "no recording has an annotation", "Give labels at ingest (--map), or take another view"
            raise input_error(Reason.UNMATCHED_LABELS, text, hint=action, file=str(cache.folder))
        signals = [s for s in first.signals if s.channel in names or not names] if first else []
        names = names or tuple(dict.fromkeys(s.channel for s in signals))
        own_rate = own_rate if own_rate > 0 else max((s.rate for s in signals), default=1.0)
        shortest = min((math.floor(len(s.samples) * own_rate / s.rate + 1e-6) for s in signals), default=1)
        epoch = _find_most_common_duration(first.annotations) if first and own.epoch == 0 else 0.0
        asked = round((epoch or own.seconds) * own_rate)
        own_window = own_window if own_window > 0 else asked if 0 < asked <= shortest else shortest
    by_epoch = own.epoch is not None and own.target is None
    factor = (own_rate if rate is None else rate) / own_rate
    if not (math.isfinite(factor) and factor > 0):
        raise _refused("rate", f"found {rate}", "expected a positive number of Hz")
    length = max(1, round(own_window * factor)) if window is None else window
    step = stride if stride is not None else length if own.stride is None or window is not None else max(1, round(own.stride * factor))
    if len(set(names)) < len(names):
        raise _refused("channels", f"found {', '.join(map(safe_text, names))}", "expected each once")
    if length < 1 or step < 1:
        raise _refused("window", f"found {length} samples every {step}", "expected at least 1 each")
    if stride is not None and by_epoch:
        raise _refused("stride", f"found {stride}", "this view takes one window a labelled epoch")
    return WindowPlan(
        dataset=cache.dataset,
        view=view,
        channels=names,
        rate=float(own_rate * factor),
        window=length,
        stride=step,
        resample=rate is not None,
        decimate=own.decimate,
        hold=own.hold,
        task=own.task,
        classes=own.classes,
        labels=own.labels,
        epoch=(own.epoch or length / (own_rate * factor)) if by_epoch else None,
        trim=own.trim if by_epoch else None,
        target=own.target,
        normalise=normalise,
        split=split or own.split,
        seed=seed,
        overlap=own.overlap,
        bandpass=band,
        notch=stops,
        test_fold=test_fold,
    )


def _check_channels(cache: Cache, channels: Sequence[str]) -> None:
    """Raises UserError (unknown_name, exit 2) for a channel that no recording has."""
    known = cache.signals()
    names = sorted(known["channel"].unique()) if known.height else []
    for name in channels:
        if name not in names:
            error = registry.unknown("channel", name, names)
            if len(names) > 20:
                error.requirement = f"known are {', '.join(names[:20])} and {len(names) - 20} more"
            raise error


def _find_most_common_duration(annotations: Sequence[Annotation]) -> float:
    """The commonest duration of annotations in seconds, the longer one of two; 0 without any that last."""
    counts = Counter(annotation.duration for annotation in annotations if annotation.duration > 0)
    return max(counts, key=lambda seconds: (counts[seconds], seconds), default=0.0)


def _refused(field: str, text: str, wanted: str) -> UserError:
    return usage_error(text, wanted, field=f"--{field}")


def is_current(out: Path, chosen: WindowPlan, fingerprint: str) -> bool:
    """Whether `out` holds these windows of this cache. False: to be made. Raises UserError (settings_differ) for windows made otherwise."""
    if not (out / storage.MANIFEST).is_file():
        return False
    manifest = storage.read_manifest(out)
    old, new = manifest.get("options", {}), chosen.options()
    differing = [
        Finding(
            code=Reason.SETTINGS_DIFFER,
            file=str(out),
            field=key,
            problem=f"the windows there have {safe_text(old.get(key))}",
            requirement=f"now {safe_text(new.get(key))}",
        )
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    if differing:
        first, *rest = differing
        raise usage_error(
            first.problem,
            first.requirement,
            "Tokenize under another --name, or with --force-new to replace them",
            code=first.code,
            file=first.file,
            field=first.field,
            details=rest,
        )
    return bool(manifest["cache"] == fingerprint)


class WindowRow(NamedTuple):
    """A window that is kept."""

    subject_id: str
    recording_id: str
    start: float  # seconds
    label: Any
    split: str
    whole: bool  # int16, else float32


@dataclass
class CacheSurvey:
    """What a pass over the cache leaves behind: rows and counts, no samples."""

    rows: list[WindowRow] = field(default_factory=list)
    affine: list[tuple[str, str, float, float]] = field(default_factory=list)  # recording, channel, scale, offset
    units: tuple[str, ...] | None = None
    left_out: Counter[str] = field(default_factory=Counter)


def survey_cache(
    cache: Cache, chosen: WindowPlan, seen: CacheSurvey, progress: Progress | None = None
) -> Iterator[tuple[RecordCut, list[tuple[WindowPlace, str]]]]:
    """Each recording's cut, with the windows that are kept and their splits; noted in `seen`."""
    subjects = cache.subjects()["subject_id"].to_list() if chosen.split == "subject" else []
    split_of = splits.make_scheme(chosen.split, subjects=subjects, seed=chosen.seed, length=chosen.length, test_fold=chosen.test_fold)
    total = len(cache.recording_ids())
    for done, record in enumerate(cache.records([*chosen.channels, *([chosen.target] if chosen.target else [])])):
        if progress is not None:
            progress("windows", done, total)
        found = cut_record(record, chosen, seen.units, seen.left_out)
        if found is None or not found.places:
            continue
        names = split_of(record.subject_id, record.recording_id, record.attributes, [place.start for place in found.places])
        taken = [(place, name) for place, name in zip(found.places, names, strict=True) if name is not None]
        seen.left_out["gap"] += len(names) - len(taken)
        if chosen.split == "time":
            found = found._replace(blocks=tuple(group_blocks(taken, chosen.length)))
        seen.left_out["unfiltered"] += count_unfiltered(found, [place for place, _ in taken], chosen)
        seen.units = found.units
        seen.rows += [
            WindowRow(record.subject_id, record.recording_id, place.start, place.label, name, found.whole) for place, name in taken
        ]
        affine = zip(chosen.channels, found.scale.tolist(), found.offset.tolist(), strict=True)
        seen.affine += [(record.recording_id, channel, scale, offset) for channel, scale, offset in affine]
        yield found, taken
    if progress is not None:
        progress("windows", total, total)


def group_blocks(taken: Sequence[tuple[WindowPlace, str]], length: float) -> Iterator[tuple[float, float]]:
    """Start and end in seconds of each run of windows of one split, in order of time: a filter over them would mix the splits."""
    for _, run in itertools.groupby(taken, key=lambda one: one[1]):
        starts = [place.start for place, _ in run]
        yield starts[0], starts[-1] + length


def write_windows(cache: Cache, chosen: WindowPlan, out: Path, progress: Progress | None) -> None:
    """All files of the token set, the manifest last. A failed attempt removes what it wrote; the former set stays whole until the end."""
    former: set[str] = set()
    with suppress(UserError):  # none, or a damaged one that is replaced under force_new
        former = set(storage.read_manifest(out)["files"])
    seen = CacheSurvey()
    parts: list[list[moments.Moments]] = []
    contents: dict[bytes, list[set[str]]] = {}
    missing = False

    def pieces() -> Iterator[np.ndarray]:
        nonlocal missing
        for found, taken in survey_cache(cache, chosen, seen, progress):
            training = np.array([name == "train" for _, name in taken], dtype=bool)
            done, digest = 0, hashlib.blake2b(found.scale.tobytes() + found.offset.tobytes(), digest_size=16)
            for piece in make_windows(found, [place for place, _ in taken], chosen):
                parts.append(moments.compute_moments(piece[training[done : done + len(piece)]], found.scale, found.offset))
                missing |= piece.dtype.kind == "f" and not bool(np.isfinite(piece).all())
                done += len(piece)
                digest.update(piece.data)
                yield piece
            contents.setdefault(digest.digest(), []).append({name for _, name in taken})

    files: dict[str, dict[str, Any]] = {}
    shards: list[dict[str, Any]] = []
    try:
        for number, held in enumerate(gather_shards(pieces())):
            name, sha256, size = storage.write_hashed(out, f"windows-{number:05d}", ".arrow", encode_arrow(held, chosen))
            files[name] = {"sha256": sha256, "size": size, "rows": sum(map(len, held))}
            shards.append({"name": name, "rows": files[name]["rows"], "dtype": str(held[0].dtype)})
        class_names = list_classes(seen, chosen)
        told = list_findings(seen, class_names) + find_duplicates(contents)
        if not seen.rows:
            raise input_error(
                Reason.NO_INPUT,
                "no window fits this view",
                f"expected recordings with {', '.join(chosen.channels)}" + (" and with labels" if chosen.task != "none" else ""),
                "See the details for what was left out",
                file=str(cache.folder),
                details=told,
            )
        seen.rows.sort(key=lambda row: not row.whole)  # stable: first what is stored as int16, as the shards
        shards.sort(key=lambda shard: bool(shard["dtype"] != "int16"))
        index, affine = make_index(seen, chosen), make_affine_table(seen)
        check_subjects(index, chosen.split, out)
    except BaseException:
        for name in files.keys() - former:
            storage.os_unlink(out / name)
        raise
    if (out / storage.MANIFEST).exists():  # the names below do not change: until the end there is no set, rather than a mixed one
        storage.os_unlink(out / storage.MANIFEST)
    for name, frame in (("index.parquet", index), ("recordings.parquet", affine)):
        sha256, size = storage.write_file(out / name, parquet_file(frame))
        files[name] = {"sha256": sha256, "size": size, "rows": frame.height}
    sha256, size = storage.write_json(out / "statistics.json", compute_statistics(parts, seen, class_names, chosen))
    files["statistics.json"] = {"sha256": sha256, "size": size}
    body = {
        "format_version": FORMAT,
        "kind": "windows",
        "cache": cache.manifest["manifest_sha256"],
        "options": chosen.options(),
        "class_names": class_names,
        "units": list(seen.units or ()),
        "windows": index.height,
        "missing": missing,
        "shards": shards,
        "counts": audit(seen, class_names),
        "left_out": dict(sorted((+seen.left_out).items())),
        "notices": list_notices(chosen),
        "findings": [finding.as_dict() for finding in told],
    }
    storage.publish(out, body, files, 1)
    storage.remove_old_files(out, SHARDS)


def gather_shards(pieces: Iterable[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Pieces gathered to about SHARD bytes of one dtype."""
    held: dict[str, list[np.ndarray]] = {}
    for piece in pieces:
        same = held.setdefault(str(piece.dtype), [])
        if same and sum(p.nbytes for p in same) + piece.nbytes > SHARD_BYTES:
            yield same
            same = held[str(piece.dtype)] = []
        same.append(piece)
    yield from held.values()


def encode_arrow(held: list[np.ndarray], chosen: WindowPlan) -> Callable[[BinaryIO], None]:
    """Writes the windows as one uncompressed record batch of fixed-size binary: T x V values, little-endian, time before channel."""
    import pyarrow as pa

    def fill(file: BinaryIO) -> None:
        block = np.concatenate(held)
        block = block.astype(block.dtype.newbyteorder("<"), copy=False)
        kind = pa.binary(chosen.window * len(chosen.channels) * block.dtype.itemsize)
        about = {
            "format_version": str(FORMAT),
            "dtype": str(block.dtype),
            "window": str(chosen.window),
            "rate": repr(chosen.rate),
            "channels": "\n".join(chosen.channels),
        }
        schema = pa.schema([pa.field("values", kind, nullable=False)], metadata=about)
        array = pa.FixedSizeBinaryArray.from_buffers(kind, len(block), [None, pa.py_buffer(block)])
        with pa.ipc.new_file(file, schema, options=pa.ipc.IpcWriteOptions(compression=None)) as writer:
            writer.write_batch(pa.record_batch([array], schema=schema))

    return fill


def parquet_file(frame: pl.DataFrame) -> Callable[[BinaryIO], None]:
    """Writes the frame as Parquet."""
    return lambda file: frame.write_parquet(file, compression="zstd")


def make_index(seen: CacheSurvey, chosen: WindowPlan) -> pl.DataFrame:
    """One row a window, as stored. Label: class, list of classes, number, or null for every row of a view without labels."""
    import polars as pl

    label = {"regression": pl.Float64(), "multilabel": pl.List(pl.String())}.get(chosen.task, pl.String())
    kinds = {"subject_id": pl.String(), "recording_id": pl.String(), "start": pl.Float64(), "label": label, "split": pl.String()}
    columns = {name: pl.Series(name, [getattr(row, name) for row in seen.rows], dtype=kind) for name, kind in kinds.items()}
    return pl.DataFrame({"window": pl.Series("window", range(len(seen.rows)), dtype=pl.Int64), **columns})


def make_affine_table(seen: CacheSurvey) -> pl.DataFrame:
    """One row a recording and channel: physical = stored value * scale + offset."""
    import polars as pl

    schema = {"recording_id": pl.String, "channel": pl.String, "scale": pl.Float64, "offset": pl.Float64}
    return pl.DataFrame(seen.affine, schema=schema, orient="row")


def count_labels(rows: Iterable[WindowRow]) -> Counter[str]:
    """How often each class occurs; a multi-label window counts for each of its own."""
    return Counter(name for row in rows for name in (row.label if isinstance(row.label, tuple) else (row.label,)))


def list_classes(seen: CacheSurvey, chosen: WindowPlan) -> list[str]:
    """The view's classes; of a view that names none, those that occur, sorted."""
    if chosen.classes or chosen.task not in {"classification", "multilabel"}:
        return list(chosen.classes)
    return sorted(count_labels(seen.rows))


def audit(seen: CacheSurvey, class_names: list[str]) -> dict[str, dict[str, Any]]:
    """Windows, subjects, recordings and windows a class in each split."""
    out = {}
    for split in splits.SPLITS:
        rows = [row for row in seen.rows if row.split == split]
        labels = count_labels(rows)
        out[split] = {
            "windows": len(rows),
            "subjects": len({row.subject_id for row in rows}),
            "recordings": len({row.recording_id for row in rows}),
            "classes": {name: labels[name] for name in class_names},
        }
    return out


def list_notices(chosen: WindowPlan) -> list[str]:
    """What must stand beside every score on these windows."""
    own = registry.datasets[chosen.dataset].facts.views[chosen.view].notice
    out = [own] if own else []
    out += [splits.SHARED[chosen.split]] if chosen.split in splits.SHARED else []
    if chosen.normalise == "window":
        out.append("Each window is normalised by its own mean and spread: objectives are leak-free only given these.")
    if words := filters.describe_filters(chosen.bandpass, chosen.notch):
        out.append(f"Filtered forward and backward ({words}): each value depends on what comes before and after it, beyond its window too.")
    return out


LEFT_OUT_REASONS: dict[str, tuple[Reason, Level, str]] = {  # what `left_out` counts
    "missing_channel": (Reason.MISSING_CHANNEL, "warning", "recordings without a channel of this view were left out"),
    "segments_without_channel": (Reason.MISSING_CHANNEL, "warning", "segments without a channel of this view were left out"),
    "unit": (Reason.UNIT, "warning", "recordings in another unit than the first one were left out"),
    "too_short": (Reason.LENGTH, "warning", "recordings or segments are shorter than a window"),
    "unmatched_labels": (Reason.UNMATCHED_LABELS, "warning", "recordings without a label of this view were left out"),
    "unlabelled_windows": (Reason.UNMATCHED_LABELS, "info", "windows that begin where there is no label were left out"),
    "unknown_label": (Reason.UNKNOWN_LABEL, "warning", "labels that are no class of this view were left out"),
    "unlabelled_epochs": (Reason.UNLABELLED_EPOCHS, "info", "epochs without a class of this view were left out"),
    "annotation_out_of_range": (Reason.ANNOTATION_OUT_OF_RANGE, "info", "scored epochs outside of the signal or over a gap were left out"),
    "trimmed": (Reason.LEFT_OUT, "info", "windows outside of this view's trimming rule were left out"),
    "class_missing": (Reason.CLASS_MISSING, "warning", "recordings have only the class that is trimmed: nothing was trimmed there"),
    "unmeasured_windows": (Reason.UNMATCHED_LABELS, "info", "windows of which numeric annotations cover too little were left out"),
    "unfiltered": (Reason.LENGTH, "warning", "stretches of a channel are too short for the filter: they are missing values"),
    "gap": (Reason.LEFT_OUT, "info", "windows in the gaps between blocks of time were left out"),
}


def list_findings(seen: CacheSurvey, class_names: list[str]) -> list[Finding]:
    """What was left out, and what the splits lack."""
    out = [
        Finding(code=code, level=level, problem=f"{seen.left_out[key]:,} {text}", count=seen.left_out[key])
        for key, (code, level, text) in LEFT_OUT_REASONS.items()
        if seen.left_out[key]
    ]
    found = audit(seen, class_names)
    empty = [split for split in splits.SPLITS if not found[split]["windows"]]
    if empty and seen.rows:
        out.append(Finding(code=Reason.SPLIT_EMPTY, level="warning", problem=f"no windows in {', '.join(empty)}", count=len(empty)))
    absent = tuple(safe_text(name) for name in class_names if not found["train"]["classes"][name])
    if absent and seen.rows:
        text = f"{len(absent)} of {len(class_names)} classes have no training window"
        out.append(Finding(code=Reason.CLASS_MISSING, level="warning", problem=text, count=len(absent), examples=absent[:5]))
    return out


def find_duplicates(contents: dict[bytes, list[set[str]]]) -> list[Finding]:
    """A warning for recordings of equal content that stand in different splits."""
    count = sum(len(found) - 1 for found in contents.values() if len(found) > 1 and len(set.union(*found)) > 1)
    text, action = f"{count:,} recordings repeat one of another split", "Remove the copies from the source: scores on them are optimistic"
    return [Finding(code=Reason.DUPLICATE_ACROSS_SPLITS, level="warning", problem=text, hint=action, count=count)] if count else []


def compute_statistics(parts: list[list[moments.Moments]], seen: CacheSurvey, class_names: list[str], chosen: WindowPlan) -> dict[str, Any]:
    """What values are normalised with, and the labels' frequencies: of the training split alone (method notes, 3.4 and 12, row 30)."""
    training = [row for row in seen.rows if row.split == "train"]
    found = [moments.pool_moments(part[v] for part in parts) for v in range(len(chosen.channels))]
    out: dict[str, Any] = {
        "format_version": FORMAT,
        "split": "train",
        "windows": len(training),
        "channels": [
            {"channel": channel, "unit": unit, "n": of.n, "mean": of.mean, "std": of.std}
            for channel, unit, of in zip(chosen.channels, seen.units or (), found, strict=True)
        ],
    }
    if class_names:
        counts = count_labels(training)
        out["labels"] = {name: counts[name] for name in class_names}
    if chosen.task == "regression":
        target = moments.pool_moments(moments.Moments(1, row.label, 0.0) for row in training)
        out["target"] = {"n": target.n, "mean": target.mean, "std": target.std}
    return out
