"""Writes the windows of a cache to disk in one pass over the recordings.

Memory holds one recording and two files at most. Legend: n windows, T samples a window, V channels.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from bitimely_core.cache import Cache, open_cache
from bitimely_core.config import validate
from bitimely_core.errors import Finding, UserError, raise_differences
from bitimely_core.registry import Choices
from bitimely_core.schemas.ingest_records import FindingRecord
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
from bitimely_core.store import locks, manifests, storage
from bitimely_core.store.records import FORMAT, StoredFile, store_file, store_hashed
from bitimely_core.system_errors import raise_system_error
from bitimely_core.tokens import moments, open_views
from bitimely_core.tokens.choices import WindowChoices, resolve_options
from bitimely_core.tokens.cutting import describe_preparation, make_windows
from bitimely_core.tokens.sets import check_subjects, open_manifest
from bitimely_core.tokens.survey import (
    CacheSurvey,
    audit,
    count_labels,
    describe_no_window,
    list_classes,
    list_findings,
    list_notices,
    make_index,
    summarize_use,
    survey_cache,
)

if TYPE_CHECKING:
    import polars as pl

# bytes of windows a file; each file is one record batch, so that it is one array in memory
SHARD_BYTES = 128 << 20
SHARDS = re.compile(r"windows-\d+-[0-9a-f]{16}\.arrow")


def build_windows(
    cache: str | Path | Cache,
    *,
    out: str | Path,
    verify: bool = True,
    force_new: bool = False,
    **choices: Any,
) -> None:
    """Cut the cached recordings of `cache` into windows and write them to the folder `out`.

    The same choices on the same cache again do nothing. A new generation of the cache makes new
    windows.

    Args:
        cache: an open cache, or its folder.
        out: folder of the token set.
        verify: compare the cache with its checksums first.
        force_new: replace windows that were made with other choices.
        choices: fields of `WindowChoices`.

    Raises:
        UserError: unknown_name or config (exit 2) for choices that do not fit; settings_differ
            (exit 2, one detail a key) where `out` holds windows made otherwise; sampling_rate,
            no_input, subject_leakage (exit 4); integrity (exit 5) for a damaged cache or token set.
    """
    out = Path(out)
    opened = _open_cache(cache, verify=False)
    options = resolve_options(opened, validate(WindowChoices, choices))
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
        write_windows(opened, options, out)


def plan(cache: str | Path | Cache, **choices: Any) -> Choices:
    """What `build` would make, without writing. `choices` are fields of `WindowChoices`.

    Returns the number of windows, bytes, shape, audit of the splits, notices and findings. Only
    windows that may have no sample are resampled.
    """
    opened = _open_cache(cache, verify=False)
    options = resolve_options(opened, validate(WindowChoices, choices))
    survey = CacheSurvey()
    values = sum(
        len(cut.places) * (2 if cut.digital else 4)
        for cut, _ in survey_cache(opened, options, survey)
    )
    index, class_names, counts, findings = summarize_survey(opened, survey, options)
    return {
        "format_version": FORMAT,
        "dataset": options.dataset,
        "view": options.view,
        "windows": index.height,
        "bytes": values * options.window * len(options.channels),
        **describe_options(options, class_names),
        "audit": {split: count.model_dump() for split, count in counts.items()},
        "notices": list_notices(options),
        "findings": [finding.as_dict() for finding in findings],
    }


def summarize_survey(
    cache: Cache, survey: CacheSurvey, options: WindowOptions
) -> tuple[pl.DataFrame, list[str], dict[str, SplitCounts], list[Finding]]:
    """Index, classes, audit of the splits, and findings."""
    index = make_index(survey, options)
    class_names = list_classes(index, options)
    counts = audit(index, survey.empty, class_names)
    findings = open_views.report_channels(cache, options)
    return index, class_names, counts, findings + list_findings(survey, counts, options)


def describe_options(options: WindowOptions, class_names: list[str]) -> Choices:
    """What the results of verbs say of the options of windows."""
    return {
        "length": options.window,
        "channels": len(options.value_channels),
        "channel_names": list(options.value_channels),
        "rate": options.rate,
        "task": options.task,
        "class_names": class_names,
        "split": options.split,
        "bandpass": None if options.bandpass is None else list(options.bandpass),
        "notch": None if options.notch is None else list(options.notch),
    }


def _open_cache(cache: str | Path | Cache, *, verify: bool) -> Cache:
    """An open cache as it is: it was verified when it was opened."""
    return open_cache(cache, verify=verify) if isinstance(cache, str | Path) else cache


def is_current(out: Path, options: WindowOptions, fingerprint: str) -> bool:
    """Whether `out` holds these windows of this cache.

    Raises UserError (settings_differ, exit 2) for windows made otherwise.
    """
    if not (out / manifests.MANIFEST).is_file():
        return False
    manifest = TokenManifest.read(out)
    raise_differences(
        manifest.options.model_dump(mode="json"),
        options.model_dump(mode="json"),
        out,
        "Tokenize under another --name, or with --force-new to replace them",
    )
    return manifest.cache == fingerprint


def write_windows(cache: Cache, options: WindowOptions, out: Path) -> None:
    """All files of the token set, the manifest last.

    A failure removes the new files; the previous set stays complete until the end.
    """
    previous = _list_previous(out)
    survey = CacheSurvey()
    files: dict[str, StoredFile] = {}
    try:
        shards = []
        pieces = make_pieces(cache, options, survey)
        for number, block in enumerate(gather_shards(pieces)):
            shard, files[shard.name] = _write_shard(out, number, block, options)
            shards.append(shard)
        if not survey.recordings:
            raise describe_no_window(cache, survey, options)
        shards.sort(key=lambda shard: shard.dtype != "int16")  # as the rows of the index
        index, class_names, counts, findings = summarize_survey(cache, survey, options)
        check_subjects(index, options.split, out)
    except BaseException:
        for name in files.keys() - previous:
            storage.os_unlink(out / name)
        raise
    # the names below do not change: until the end there is no set, rather than a mixed one
    if (out / manifests.MANIFEST).exists():
        storage.os_unlink(out / manifests.MANIFEST)
    for name, frame in (
        ("index.parquet", index),
        ("recordings.parquet", list_scales(survey, options)),
    ):
        files[name] = store_file(out / name, storage.encode_parquet(frame), frame.height)
    statistics = compute_statistics(survey, index, class_names, options)
    files["statistics.json"] = store_file(out / "statistics.json", statistics.encode())
    manifest = WindowManifest(
        cache=cache.manifest.manifest_sha256,
        options=options,
        class_names=class_names,
        units=list(survey.units),
        windows=index.height,
        missing=survey.missing,
        shards=shards,
        counts=counts,
        left_out=dict(sorted((+survey.left_out).items())),
        use=summarize_use(cache, survey, options),
        preparation=describe_preparation(survey.rates, options),
        notices=list_notices(options),
        findings=list(map(FindingRecord.from_finding, findings)),
        files=files,
    )
    manifest.publish(out)
    manifests.remove_old_files(out, SHARDS)


def _list_previous(out: Path) -> set[str]:
    """Files of the set in `out`; none where it is damaged and is replaced."""
    try:
        return set(manifests.read_manifest(out)["files"])
    except UserError as error:
        raise_system_error(error)
        return set()


def make_pieces(cache: Cache, options: WindowOptions, survey: CacheSurvey) -> Iterator[np.ndarray]:
    """The windows of all recordings in pieces [n, T, V], with what `survey` counts of their values.

    The moments are those of the training split.
    """
    for cut, names in survey_cache(cache, options, survey):
        is_training = np.array([name == "train" for name in names], dtype=bool)
        digest = hashlib.blake2b(cut.scale.tobytes() + cut.offset.tobytes(), digest_size=16)
        done = 0
        for piece in make_windows(cut, options):
            training = piece[is_training[done : done + len(piece)]]
            survey.moments.append(moments.compute_moments(training, cut.scale, cut.offset))
            survey.missing |= piece.dtype.kind == "f" and not bool(np.isfinite(piece).all())
            done += len(piece)
            digest.update(piece.data)
            yield piece
        survey.contents.setdefault(digest.digest(), []).append(set(names))


def _write_shard(
    out: Path, number: int, block: np.ndarray, options: WindowOptions
) -> tuple[WindowShard, StoredFile]:
    encode = encode_arrow(block, options)
    name, stored = store_hashed(out, f"windows-{number:05d}", ".arrow", encode, len(block))
    return WindowShard(name=name, rows=len(block), dtype=str(block.dtype)), stored


def gather_shards(pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Pieces [n, T, V] one after the other in blocks of one dtype and about SHARD_BYTES bytes.

    The memory of a block is used again for the next one.
    """
    blocks: dict[np.dtype[Any], np.ndarray] = {}
    filled: Counter[np.dtype[Any]] = Counter()  # windows
    for piece in pieces:
        kind, n = piece.dtype, len(piece)
        if filled[kind] and (filled[kind] + n) * piece[0].nbytes > SHARD_BYTES:
            yield blocks[kind][: filled[kind]]
            filled[kind] = 0
        if kind not in blocks or filled[kind] + n > len(blocks[kind]):
            size = max(n, SHARD_BYTES // piece[0].nbytes)
            blocks[kind] = np.empty((size, *piece.shape[1:]), kind)
        blocks[kind][filled[kind] : filled[kind] + n] = piece
        filled[kind] += n
    yield from (blocks[kind][:n] for kind, n in filled.items())


def encode_arrow(block: np.ndarray, options: WindowOptions) -> Callable[[BinaryIO], None]:
    """The function that writes the windows into a file.

    They are one uncompressed record batch of fixed-size binary: T x V values, little-endian, time
    before channel.
    """
    import pyarrow as pa

    def fill(file: BinaryIO) -> None:
        values = block.astype(block.dtype.newbyteorder("<"), copy=False)
        kind = pa.binary(options.window * len(options.channels) * block.dtype.itemsize)
        about = {
            "format_version": str(FORMAT),
            "dtype": str(block.dtype),
            "window": str(options.window),
            "rate": repr(options.rate),
            "channels": "\n".join(options.channels),
        }
        schema = pa.schema([pa.field("values", kind, nullable=False)], metadata=about)
        buffers = [None, pa.py_buffer(values)]
        array = pa.FixedSizeBinaryArray.from_buffers(kind, len(block), buffers)
        uncompressed = pa.ipc.IpcWriteOptions(compression=None)
        with pa.ipc.new_file(file, schema, options=uncompressed) as writer:
            writer.write_batch(pa.record_batch([array], schema=schema))

    return fill


def list_scales(survey: CacheSurvey, options: WindowOptions) -> pl.DataFrame:
    """One row a recording and channel: physical = stored value * scale + offset."""
    import polars as pl

    recordings = pl.Series([recording.recording_id for recording in survey.recordings])
    return pl.DataFrame(
        {
            "recording_id": recordings.gather(
                np.repeat(np.arange(len(recordings)), len(options.channels))
            ),
            "channel": list(options.channels) * len(recordings),
            "scale": np.concatenate([recording.scale for recording in survey.recordings]),
            "offset": np.concatenate([recording.offset for recording in survey.recordings]),
        }
    )


def compute_statistics(
    survey: CacheSurvey, index: pl.DataFrame, class_names: list[str], options: WindowOptions
) -> WindowStatistics:
    """Statistics for normalisation, and label frequencies.

    They are of the training split alone (method notes, 3.4 and 12, row 30).
    """
    training = index.filter(index["split"] == "train")
    channels = []
    for v, (channel, unit) in enumerate(zip(options.channels, survey.units, strict=True)):
        values = moments.pool_moments(piece[v] for piece in survey.moments)
        channels.append(
            ChannelStatistics(
                channel=channel, unit=unit, n=values.n, mean=values.mean, std=values.std
            )
        )
    labels = target = None
    if class_names:
        counts = count_labels(training)
        labels = {name: counts.get(name, 0) for name in class_names}
    if options.task == "regression":
        numbers = training["label"].to_list()
        values = moments.pool_moments(moments.Moments(1, number, 0.0) for number in numbers)
        target = TargetStatistics(n=values.n, mean=values.mean, std=values.std)
    return WindowStatistics(
        windows=training.height, channels=channels, labels=labels, target=target
    )
