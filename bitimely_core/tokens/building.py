"""Cache to windows on disk: one pass over the recordings. Memory holds one recording and two files
at most.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypedDict, Unpack, get_args

import numpy as np

from bitimely_core import locks, manifests, registry, storage
from bitimely_core.cache import Cache, open_cache
from bitimely_core.config import Filtering, Resampling
from bitimely_core.errors import (
    Finding,
    Level,
    Reason,
    UserError,
    check_choice,
    input_error,
    raise_differences,
    safe_text,
    unknown_name_error,
    usage_error,
)
from bitimely_core.records import FORMAT, StoredFile
from bitimely_core.schemas.ingest import FindingRecord
from bitimely_core.schemas.tokens import (
    ChannelStatistics,
    SplitCounts,
    TargetStatistics,
    TokenManifest,
    WindowManifest,
    WindowOptions,
    WindowShard,
    WindowStatistics,
)
from bitimely_core.system_errors import raise_system_error
from bitimely_core.tokens import filters, moments, open_views, splits
from bitimely_core.tokens.cutting import (
    RecordCut,
    WindowPlace,
    count_unfiltered,
    cut_record,
    describe_preparation,
    find_observed,
    make_windows,
)
from bitimely_core.tokens.sets import check_subjects, open_manifest
from bitimely_core.types import SPLITS, Progress

if TYPE_CHECKING:
    import polars as pl

# bytes of windows a file; each file is one record batch, so that it is one array in memory
SHARD_BYTES = 128 << 20
SHARDS = re.compile(r"windows-\d+-[0-9a-f]{16}\.arrow")
NORMALISE = ("channel", "window", "none")


class WindowChoices(TypedDict, total=False):
    """Options of `build` and `plan`; what is not given is as the view says."""

    view: str  # of the cache's data set, "" for its own
    window: int | None  # samples a window at `rate` (T)
    stride: int | None  # samples between the starts of windows; not for views of epochs
    # Hz; alone it keeps the duration of windows; only with it are faster channels resampled
    rate: float | None
    channels: Sequence[str] | None  # names, in the order of the values (V)
    # on reading: channel (statistics of the training split), window (its own z-score), none
    # (physical)
    normalise: str
    split: str | None  # subject, official, time or random-window
    seed: int  # of the split
    # edges in Hz, None for an open side; at the recording's own rate, see `tokens.filters`
    bandpass: Sequence[float | None] | None
    notch: Sequence[float] | None  # Hz
    # causal: from past samples alone; pointwise: each native sample in one value
    resampling: Resampling | None
    filtering: Filtering | None  # causal: forward only
    # of ten, tested instead of the tenth; the one before it validates. Official folds, or of
    # subjects
    test_fold: int | None
    folds: int | None  # 5 or 10 of subjects, dealt evenly
    stratify: str | None  # attribute of recordings: subjects of each value are dealt evenly


def build_windows(
    cache: str | Path | Cache,
    *,
    out: str | Path,
    verify: bool = True,
    force_new: bool = False,
    progress: Progress | None = None,
    **choices: Unpack[WindowChoices],
) -> None:
    """Cut the cached recordings of `cache` into windows by the `choices` and write them to the
    folder `out`.

    The same choices on the same cache again do nothing; a new generation of the cache makes new
    windows. `verify` compares the cache with its checksums first, `force_new` replaces windows that
    were made with other choices, and `progress` is called after every recording.

    Raises UserError: unknown_name or config (exit 2) for choices that do not fit; settings_differ
    (exit 2, one detail a key) where `out` holds windows made otherwise; sampling_rate, no_input,
    subject_leakage (exit 4); integrity (exit 5) for a damaged cache or token set.
    """
    out = Path(out)
    opened = _open_cache(cache, verify=False)
    options = resolve_options(opened, **choices)
    if not force_new and is_current(out, options, opened.manifest.manifest_sha256):
        storage.remove_temporary_files(out)
        open_manifest(out, WindowManifest, verify)
        return
    opened = _open_cache(cache, verify=verify)
    storage.make_folder(out)
    with locks.lock_folder(out):
        # another process was faster
        if not force_new and is_current(out, options, opened.manifest.manifest_sha256):
            open_manifest(out, WindowManifest, verify)
            return
        storage.remove_temporary_files(out)
        write_windows(opened, options, out, progress)


def plan(cache: str | Path | Cache, **choices: Unpack[WindowChoices]) -> dict[str, Any]:
    """What `build` would make, without writing: number of windows, bytes, shape, audit of the
    splits, notices, findings.

    Only windows that may have no sample are resampled.
    """
    opened = _open_cache(cache, verify=False)
    options = resolve_options(opened, **choices)
    survey = CacheSurvey()
    values = sum(
        len(kept) * (2 if cut.digital else 4) for cut, kept in survey_cache(opened, options, survey)
    )
    class_names = list_classes(survey, options)
    return {
        "format_version": FORMAT,
        "dataset": options.dataset,
        "view": options.view,
        "windows": len(survey.rows),
        "bytes": values * options.window * len(options.channels),
        "length": options.window,
        "channels": len(options.value_channels),
        "channel_names": list(options.value_channels),
        "rate": options.rate,
        "task": options.task,
        "class_names": class_names,
        "split": options.split,
        "bandpass": None if options.bandpass is None else list(options.bandpass),
        "notch": None if options.notch is None else list(options.notch),
        "audit": {
            split: counts.model_dump() for split, counts in audit(survey, class_names).items()
        },
        "notices": list_notices(options),
        "findings": [finding.as_dict() for finding in list_findings(survey, class_names)],
    }


def _open_cache(cache: str | Path | Cache, *, verify: bool) -> Cache:
    """An open cache as it is: it was verified when it was opened."""
    return open_cache(cache, verify=verify) if isinstance(cache, str | Path) else cache


def resolve_options(
    cache: Cache,
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
    folds: int | None = None,
    stratify: str | None = None,
    resampling: Resampling | None = None,
    filtering: Filtering | None = None,
) -> WindowOptions:
    """The view's facts with the choices of the caller. What a view leaves open (no channels, rate
    or window 0) is as `open_views` says.
    """
    views = registry.datasets[cache.dataset].facts.views
    if view not in views:
        raise unknown_name_error(
            "view",
            f"{cache.dataset}/{view}",
            [f"{cache.dataset}/{name}".rstrip("/") for name in views],
        )
    own = views[view]
    named = [("normalisation", normalise, NORMALISE), ("split", split or own.split, splits.SCHEMES)]
    for kind, name, known in [
        *named,
        ("resampling", resampling, get_args(Resampling)),
        ("filtering", filtering, get_args(Filtering)),
    ]:
        check_choice(kind, name, known)
    band, stops = filters.validate_filters(bandpass, notch)
    if channels:
        _check_channels(cache, channels)
    names, own_rate, own_window = tuple(channels or own.channels), own.rate, own.window
    ingested = cache.manifest.settings.options.get("rate")
    # a data set that comes at several rates: the view's windows keep their duration
    if ingested and own_rate > 0:
        own_rate, own_window = float(ingested), round(own_window * ingested / own_rate)
    if not names or own_rate <= 0 or own_window <= 0:
        names, own_rate, own_window = open_views.choose_open_values(
            cache, replace(own, rate=own_rate, window=own_window), names
        )
    by_epoch = own.epoch is not None and own.target is None
    factor = (own_rate if rate is None else rate) / own_rate
    if not (math.isfinite(factor) and factor > 0):
        raise usage_error(f"found {rate}", "expected a positive number of Hz", field="--rate")
    length = max(1, round(own_window * factor)) if window is None else window
    step = (
        stride
        if stride is not None
        else length
        if own.stride is None or window is not None
        else max(1, round(own.stride * factor))
    )
    if len(set(names)) < len(names):
        raise usage_error(
            f"found {', '.join(map(safe_text, names))}", "expected each once", field="--channels"
        )
    if length < 1 or step < 1:
        raise usage_error(
            f"found {length} samples every {step}", "expected at least 1 each", field="--window"
        )
    if own.clock and (band or stops or (rate is not None and not own.grid)):
        raise usage_error(
            "the samples of this view are irregular",
            "expected no filter, and no rate without a grid",
            field="--rate",
        )
    if stride is not None and by_epoch:
        raise usage_error(
            f"found {stride}", "this view takes one window a labelled epoch", field="--stride"
        )
    return WindowOptions(
        dataset=cache.dataset,
        view=view,
        channels=(*names, own.clock) if own.clock and not own.grid else names,
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
        folds=folds,
        stratify=stratify,
        clock=own.clock or None,
        grid=own.grid,
        points=own.points,
        resampling=resampling or "two-sided",
        filtering=filtering or "zero-phase",
    )


def _check_channels(cache: Cache, channels: Sequence[str]) -> None:
    """Raises UserError (unknown_name, exit 2) for a channel that no recording has."""
    known = cache.signals()
    names = sorted(known["channel"].unique()) if known.height else []
    for name in channels:
        if name not in names:
            error = unknown_name_error("channel", name, names)
            if len(names) > 20:
                error.requirement = f"known are {', '.join(names[:20])} and {len(names) - 20} more"
            raise error


def is_current(out: Path, options: WindowOptions, fingerprint: str) -> bool:
    """Whether `out` holds these windows of this cache. Raises UserError (settings_differ, exit 2)
    for windows made otherwise.
    """
    if not (out / manifests.MANIFEST).is_file():
        return False
    manifest = TokenManifest.read(out)
    old, new = manifest.options.model_dump(mode="json"), options.model_dump(mode="json")
    raise_differences(
        old, new, out, "Tokenize under another --name, or with --force-new to replace them"
    )
    return manifest.cache == fingerprint


class WindowRow(NamedTuple):
    """A window that is kept."""

    subject_id: str
    recording_id: str
    start: float  # seconds
    label: Any
    split: str
    digital: bool  # int16, else float32


@dataclass
class CacheSurvey:
    """Results of a pass over the cache: rows and counts, no samples."""

    rows: list[WindowRow] = field(default_factory=list)
    # recording, channel, scale, offset
    affine: list[tuple[str, str, float, float]] = field(default_factory=list)
    units: tuple[str, ...] | None = None
    rates: set[tuple[str, float]] = field(default_factory=set)  # channel and native Hz
    left_out: Counter[str] = field(default_factory=Counter)
    # split -> windows that were left out for having no sample
    empty: Counter[str] = field(default_factory=Counter)
    # recording -> what it lacks, of those that were left out for it
    lacking: dict[str, str] = field(default_factory=dict)


def survey_cache(
    cache: Cache, options: WindowOptions, survey: CacheSurvey, progress: Progress | None = None
) -> Iterator[tuple[RecordCut, list[tuple[WindowPlace, str]]]]:
    """Each recording's cut, with the windows that are kept and their splits; added to `survey`."""
    table = cache.subjects()
    split_of = splits.make_scheme(
        options.split,
        subjects=table["subject_id"].to_list() if options.split == "subject" else [],
        seed=options.seed,
        length=options.length,
        test_fold=options.test_fold,
        folds=options.folds,
        strata=None if options.stratify is None else _read_strata(table, options.stratify),
    )
    total = len(cache.recording_ids())
    skip_faster = (
        registry.datasets[options.dataset].facts.views[options.view].rate <= 0
        and not options.resample
    )
    for done, record in enumerate(
        cache.records([*options.channels, *filter(None, (options.target, options.clock))])
    ):
        if progress is not None:
            progress("windows", done, total)
        if skip_faster and (
            faster := {
                signal.rate for signal in record.signals if signal.rate > options.rate * (1 + 1e-9)
            }
        ):
            survey.left_out["faster"] += 1
            survey.lacking[record.recording_id] = f"has {max(faster):g} Hz"
            continue
        before = survey.left_out["missing_channel"]
        cut = cut_record(record, options, survey.units, survey.left_out)
        if survey.left_out["missing_channel"] > before:
            absent = [
                name
                for name in options.channels
                if all(signal.channel != name for signal in record.signals)
            ]
            survey.lacking[record.recording_id] = (
                f"lacks {', '.join(map(safe_text, absent)) or 'them at one time'}"
            )
        if cut is None or not cut.places:
            continue
        names = split_of(
            record.subject_id,
            record.recording_id,
            record.attributes,
            [place.start for place in cut.places],
        )
        kept = [
            (place, name) for place, name in zip(cut.places, names, strict=True) if name is not None
        ]
        survey.left_out["gap"] += len(names) - len(kept)
        # each run of windows of one split is a block: a filter over several would mix the splits
        if options.split == "time":
            runs = (
                [place.start for place, _ in run]
                for _, run in itertools.groupby(kept, key=lambda one: one[1])
            )
            cut = cut._replace(
                blocks=tuple((starts[0], starts[-1] + options.length) for starts in runs)
            )
        observed = find_observed(cut, [place for place, _ in kept], options)
        survey.empty.update(
            name for (_, name), seen in zip(kept, observed, strict=True) if not seen
        )
        survey.left_out["empty_windows"] = survey.empty.total()
        survey.left_out["unfiltered"] += count_unfiltered(
            cut, [place for place, _ in kept], options
        )
        kept = [one for one, seen in zip(kept, observed, strict=True) if seen]
        survey.units = cut.units
        survey.rates |= {
            (signal.channel, signal.rate) for segment in cut.segments for signal in segment
        }
        survey.rows += [
            WindowRow(
                record.subject_id, record.recording_id, place.start, place.label, name, cut.digital
            )
            for place, name in kept
        ]
        affine = zip(options.channels, cut.scale.tolist(), cut.offset.tolist(), strict=True)
        survey.affine += [
            (record.recording_id, channel, scale, offset) for channel, scale, offset in affine
        ]
        yield cut, kept
    if progress is not None:
        progress("windows", total, total)


def _read_strata(subjects: pl.DataFrame, attribute: str) -> dict[str, str]:
    """Subject -> the value of an attribute of its recordings, the smallest where there are several;
    "" without one.
    """
    check_choice(
        "attribute",
        attribute,
        [name for name in subjects.columns if name not in {"subject_id", "recording_id"}],
    )
    pairs = sorted(
        (str(s), "" if v is None else str(v))
        for s, v in zip(subjects["subject_id"], subjects[attribute], strict=True)
    )
    return dict(reversed(pairs))


def write_windows(
    cache: Cache, options: WindowOptions, out: Path, progress: Progress | None
) -> None:
    """All files of the token set, the manifest last. A failure removes the new files; the previous
    set stays complete until the end.
    """
    previous: set[str] = set()
    try:
        previous = set(manifests.read_manifest(out)["files"])
    except UserError as error:  # none, or a damaged one that is replaced under force_new
        raise_system_error(error)
    survey = CacheSurvey()
    parts: list[list[moments.Moments]] = []
    contents: dict[bytes, list[set[str]]] = {}
    missing = False

    def make_pieces() -> Iterator[np.ndarray]:
        nonlocal missing
        for cut, kept in survey_cache(cache, options, survey, progress):
            training = np.array([name == "train" for _, name in kept], dtype=bool)
            done, digest = (
                0,
                hashlib.blake2b(cut.scale.tobytes() + cut.offset.tobytes(), digest_size=16),
            )
            for piece in make_windows(cut, [place for place, _ in kept], options):
                parts.append(
                    moments.compute_moments(
                        piece[training[done : done + len(piece)]], cut.scale, cut.offset
                    )
                )
                missing |= piece.dtype.kind == "f" and not bool(np.isfinite(piece).all())
                done += len(piece)
                digest.update(piece.data)
                yield piece
            contents.setdefault(digest.digest(), []).append({name for _, name in kept})

    files: dict[str, StoredFile] = {}
    shards: list[WindowShard] = []
    try:
        for number, pieces in enumerate(gather_shards(make_pieces())):
            name, sha256, size = storage.write_hashed(
                out, f"windows-{number:05d}", ".arrow", encode_arrow(pieces, options)
            )
            shards.append(
                WindowShard(name=name, rows=sum(map(len, pieces)), dtype=str(pieces[0].dtype))
            )
            files[name] = StoredFile(sha256=sha256, size=size, rows=shards[-1].rows)
        class_names = list_classes(survey, options)
        found = list_findings(survey, class_names) + find_duplicates(contents)
        if not survey.rows:
            raise input_error(
                Reason.NO_INPUT,
                "no window fits this view",
                f"expected recordings with {', '.join(options.channels)}"
                + (" and with labels" if options.task != "none" else ""),
                "See the details for what was left out",
                file=str(cache.folder),
                details=found,
            )
        survey.rows.sort(key=lambda row: not row.digital)  # stable: int16 first, as the shards
        shards.sort(key=lambda shard: shard.dtype != "int16")
        index, affine = make_tables(survey, options)
        check_subjects(index, options.split, out)
    except BaseException:
        for name in files.keys() - previous:
            storage.os_unlink(out / name)
        raise
    # the names below do not change: until the end there is no set, rather than a mixed one
    if (out / manifests.MANIFEST).exists():
        storage.os_unlink(out / manifests.MANIFEST)
    for name, frame in (("index.parquet", index), ("recordings.parquet", affine)):
        sha256, size = storage.write_parquet(out / name, frame)
        files[name] = StoredFile(sha256=sha256, size=size, rows=frame.height)
    sha256, size = storage.write_json(
        out / "statistics.json", compute_statistics(parts, survey, class_names, options).to_json()
    )
    manifest = WindowManifest(
        cache=cache.manifest.manifest_sha256,
        options=options,
        class_names=class_names,
        units=list(survey.units or ()),
        windows=index.height,
        missing=missing,
        shards=shards,
        counts=audit(survey, class_names),
        left_out=dict(sorted((+survey.left_out).items())),
        preparation=describe_preparation(survey.rates, options),
        notices=list_notices(options),
        findings=[FindingRecord.from_finding(finding) for finding in found],
        files=files | {"statistics.json": StoredFile(sha256=sha256, size=size)},
    )
    manifest.publish(out)
    manifests.remove_old_files(out, SHARDS)


def gather_shards(pieces: Iterable[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Pieces in groups of about SHARD_BYTES bytes and one dtype."""
    groups: dict[str, list[np.ndarray]] = {}
    for piece in pieces:
        group = groups.setdefault(str(piece.dtype), [])
        if group and sum(p.nbytes for p in group) + piece.nbytes > SHARD_BYTES:
            yield group
            group = groups[str(piece.dtype)] = []
        group.append(piece)
    yield from groups.values()


def encode_arrow(pieces: list[np.ndarray], options: WindowOptions) -> Callable[[BinaryIO], None]:
    """Writes the windows as one uncompressed record batch of fixed-size binary: T x V values,
    little-endian, time before channel.
    """
    import pyarrow as pa

    def fill(file: BinaryIO) -> None:
        block = np.concatenate(pieces)
        block = block.astype(block.dtype.newbyteorder("<"), copy=False)
        kind = pa.binary(options.window * len(options.channels) * block.dtype.itemsize)
        about = {
            "format_version": str(FORMAT),
            "dtype": str(block.dtype),
            "window": str(options.window),
            "rate": repr(options.rate),
            "channels": "\n".join(options.channels),
        }
        schema = pa.schema([pa.field("values", kind, nullable=False)], metadata=about)
        array = pa.FixedSizeBinaryArray.from_buffers(kind, len(block), [None, pa.py_buffer(block)])
        with pa.ipc.new_file(
            file, schema, options=pa.ipc.IpcWriteOptions(compression=None)
        ) as writer:
            writer.write_batch(pa.record_batch([array], schema=schema))

    return fill


def make_tables(survey: CacheSurvey, options: WindowOptions) -> tuple[pl.DataFrame, pl.DataFrame]:
    """One row a window, as stored; and one a recording and channel: physical = stored value * scale
    + offset.

    Label: class, list of classes, number, or null for every row of a view without labels.
    """
    import polars as pl

    label = {"regression": pl.Float64(), "multilabel": pl.List(pl.String())}.get(
        options.task, pl.String()
    )
    kinds = {
        "subject_id": pl.String(),
        "recording_id": pl.String(),
        "start": pl.Float64(),
        "label": label,
        "split": pl.String(),
    }
    columns = {
        name: pl.Series(name, [getattr(row, name) for row in survey.rows], dtype=kind)
        for name, kind in kinds.items()
    }
    affine = {
        "recording_id": pl.String,
        "channel": pl.String,
        "scale": pl.Float64,
        "offset": pl.Float64,
    }
    index = pl.DataFrame(
        {"window": pl.Series("window", range(len(survey.rows)), dtype=pl.Int64), **columns}
    )
    return index, pl.DataFrame(survey.affine, schema=affine, orient="row")


def count_labels(rows: Iterable[WindowRow]) -> Counter[str]:
    """Occurrences of each class; a multi-label window counts for each of its classes."""
    return Counter(
        name
        for row in rows
        for name in (row.label if isinstance(row.label, tuple) else (row.label,))
    )


def list_classes(survey: CacheSurvey, options: WindowOptions) -> list[str]:
    """The view's classes; of a view that names none, those that occur, sorted."""
    if options.classes or options.task not in {"classification", "multilabel"}:
        return list(options.classes)
    return sorted(count_labels(survey.rows))


def audit(survey: CacheSurvey, class_names: list[str]) -> dict[str, SplitCounts]:
    """Windows, subjects, recordings and windows a class in each split."""
    out = {}
    for split in SPLITS:
        rows = [row for row in survey.rows if row.split == split]
        labels = count_labels(rows)
        out[split] = SplitCounts(
            windows=len(rows),
            subjects=len({row.subject_id for row in rows}),
            recordings=len({row.recording_id for row in rows}),
            classes={name: labels[name] for name in class_names},
            empty=survey.empty[split],
        )
    return out


def list_notices(options: WindowOptions) -> list[str]:
    """Caveats that are shown with every score on these windows."""
    own = registry.datasets[options.dataset].facts.views[options.view].notice
    out = [own] if own else []
    out += [splits.SHARED[options.split]] if options.split in splits.SHARED else []
    if options.normalise == "window":
        out.append(
            "Each window is normalised by its own mean and spread: objectives are leak-free only given these."
        )
    if words := filters.describe_filters(options.bandpass, options.notch):
        if options.filtering == "causal":
            out.append(
                f"Filtered forward ({words}): each value depends on what comes before it, beyond its window too, and is delayed."
            )
        else:
            out.append(
                f"Filtered forward and backward ({words}): each value depends on what comes before and after it, beyond its window too."
            )
    return out


LEFT_OUT_REASONS: dict[str, tuple[Reason, Level, str]] = {  # what `left_out` counts
    "missing_channel": (
        Reason.MISSING_CHANNEL,
        "warning",
        "recordings without a channel of this view were left out",
    ),
    "faster": (
        Reason.SAMPLING_RATE,
        "warning",
        "recordings that are sampled faster than most were left out",
    ),
    "segments_without_channel": (
        Reason.MISSING_CHANNEL,
        "warning",
        "segments without a channel of this view were left out",
    ),
    "unit": (Reason.UNIT, "warning", "recordings in another unit than the first one were left out"),
    "too_short": (Reason.LENGTH, "warning", "recordings or segments are shorter than a window"),
    "times_behind": (
        Reason.LENGTH,
        "warning",
        "times of irregular recordings behind their windows were left out",
    ),
    "unmatched_labels": (
        Reason.UNMATCHED_LABELS,
        "warning",
        "recordings without a label of this view were left out",
    ),
    "unlabelled_windows": (
        Reason.UNMATCHED_LABELS,
        "info",
        "windows that begin where there is no label were left out",
    ),
    "unknown_label": (
        Reason.UNKNOWN_LABEL,
        "warning",
        "labels that are no class of this view were left out",
    ),
    "unlabelled_epochs": (
        Reason.UNLABELLED_EPOCHS,
        "info",
        "epochs without a class of this view were left out",
    ),
    "annotation_out_of_range": (
        Reason.ANNOTATION_OUT_OF_RANGE,
        "info",
        "scored epochs outside of the signal or over a gap were left out",
    ),
    "trimmed": (
        Reason.LEFT_OUT,
        "info",
        "windows outside of this view's trimming rule were left out",
    ),
    "class_missing": (
        Reason.CLASS_MISSING,
        "warning",
        "recordings have only the class that is trimmed: nothing was trimmed there",
    ),
    "unmeasured_windows": (
        Reason.UNMATCHED_LABELS,
        "info",
        "windows of which numeric annotations cover too little were left out",
    ),
    "unfiltered": (
        Reason.LENGTH,
        "warning",
        "stretches of a channel are too short for the filter: they are missing values",
    ),
    "gap": (Reason.LEFT_OUT, "info", "windows in the gaps between blocks of time were left out"),
    "empty_windows": (Reason.MISSING_VALUES, "warning", "windows without a sample were left out"),
}


HOW_TO_KEEP = {
    "missing_channel": "Give --channels that they have too, or one name to equal channels in [[files]] of the map at ingest (generic)",
    "faster": "Give --rate to resample with an anti-alias filter",
}


def describe_lacking(key: str, lacking: Mapping[str, str]) -> Finding:
    """A finding with the first recordings of `lacking` that were left out for the reason `key`, and
    the option that would keep them.
    """
    named = [
        f"{safe_text(name)} {what}"
        for name, what in lacking.items()
        if what.startswith("has ") == (key == "faster")
    ]
    if key not in HOW_TO_KEEP or not named:
        return Finding(Reason.LEFT_OUT)
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    return Finding(
        Reason.LEFT_OUT,
        requirement="; ".join(named[:3]) + more,
        hint=HOW_TO_KEEP[key],
        examples=tuple(named[:20]),
    )


def list_findings(survey: CacheSurvey, class_names: list[str]) -> list[Finding]:
    """What was left out, and what the splits lack."""
    by_split = ", ".join(
        f"{survey.empty[split]:,} {split}" for split in SPLITS if survey.empty[split]
    )
    out = [
        replace(
            describe_lacking(key, survey.lacking),
            code=code,
            problem=f"{survey.left_out[key]:,} {text}"
            + (f" ({by_split})" if key == "empty_windows" else ""),
            level=level,
            count=survey.left_out[key],
        )
        for key, (code, level, text) in LEFT_OUT_REASONS.items()
        if survey.left_out[key]
    ]
    counts = audit(survey, class_names)
    empty = [split for split in SPLITS if not counts[split].windows]
    if empty and survey.rows:
        out.append(
            Finding(
                Reason.SPLIT_EMPTY,
                f"no windows in {', '.join(empty)}",
                level="warning",
                count=len(empty),
            )
        )
    absent = tuple(safe_text(name) for name in class_names if not counts["train"].classes[name])
    if absent and survey.rows:
        text = f"{len(absent)} of {len(class_names)} classes have no training window"
        out.append(
            Finding(
                Reason.CLASS_MISSING, text, level="warning", count=len(absent), examples=absent[:5]
            )
        )
    return out


def find_duplicates(contents: dict[bytes, list[set[str]]]) -> list[Finding]:
    """A warning for recordings with equal content in different splits."""
    count = sum(
        len(found) - 1
        for found in contents.values()
        if len(found) > 1 and len(set.union(*found)) > 1
    )
    text, hint = (
        f"{count:,} recordings repeat one of another split",
        "Remove the copies from the source: scores on them are optimistic",
    )
    return (
        [Finding(Reason.DUPLICATE_ACROSS_SPLITS, text, hint=hint, level="warning", count=count)]
        if count
        else []
    )


def compute_statistics(
    parts: list[list[moments.Moments]],
    survey: CacheSurvey,
    class_names: list[str],
    options: WindowOptions,
) -> WindowStatistics:
    """Statistics for normalisation, and label frequencies: of the training split alone (method
    notes, 3.4 and 12, row 30).
    """
    training = [row for row in survey.rows if row.split == "train"]
    found = [moments.pool_moments(part[v] for part in parts) for v in range(len(options.channels))]
    counts = count_labels(training) if class_names else {}
    target = (
        moments.pool_moments(moments.Moments(1, row.label, 0.0) for row in training)
        if options.task == "regression"
        else None
    )
    return WindowStatistics(
        windows=len(training),
        channels=[
            ChannelStatistics(channel=channel, unit=unit, n=of.n, mean=of.mean, std=of.std)
            for channel, unit, of in zip(options.channels, survey.units or (), found, strict=True)
        ],
        labels={name: counts[name] for name in class_names} if class_names else None,
        target=None
        if target is None
        else TargetStatistics(n=target.n, mean=target.mean, std=target.std),
    )
