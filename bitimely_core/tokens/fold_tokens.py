"""Windows that exist already, split anew by subject for one test fold: the same files of values, an
index with other splits, and the statistics of the new training split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bitimely_core.schemas.tokens import WindowManifest, WindowOptions
from bitimely_core.store import locks, manifests, storage
from bitimely_core.store.records import store_file
from bitimely_core.tokens.building import compute_statistics, is_current
from bitimely_core.tokens.moments import Moments, compute_moments
from bitimely_core.tokens.sets import check_subjects, open_manifest
from bitimely_core.tokens.splits import assign_dealt_splits
from bitimely_core.tokens.survey import CacheSurvey, audit, list_notices

if TYPE_CHECKING:
    import polars as pl

    from bitimely_core.tokens.windows import Windows


def name_fold(tokens: str, fold: int, folds: int) -> str:
    """The name of the tokens of one test fold."""
    return f"{tokens}-fold-{fold}-of-{folds}"


def write_fold(windows: Windows, out: Path, fold: int, folds: int, *, verify: bool = True) -> None:
    """Write `windows` to the folder `out`, with the subjects of `fold`, from 1, of `folds` as test.

    The subjects that have a window are dealt to the folds by `splits.assign_dealt_splits`, whatever
    the split of `windows` is. Windows that are there already stay.

    Raises UserError: config (exit 2) for more folds than subjects; settings_differ (exit 2) where
    `out` holds windows made otherwise.
    """
    changes = {"split": "subject", "folds": folds, "test_fold": fold, "stratify": None}
    options = windows.options.model_copy(update=changes)
    storage.make_folder(out)
    with locks.lock_folder(out):
        if is_current(out, options, windows.manifest.cache):
            open_manifest(out, WindowManifest, verify)
            return
        storage.remove_temporary_files(out)
        _write_split(windows, options, out)


def _write_split(windows: Windows, options: WindowOptions, out: Path) -> None:
    """All files of the token set, the manifest last."""
    import polars as pl

    index = windows.whole_index
    placed = assign_dealt_splits(
        index["subject_id"],
        {},
        seed=options.seed,
        folds=options.folds or 1,
        test_fold=options.test_fold,
    )
    index = index.with_columns(split=pl.col("subject_id").replace_strict(placed))
    check_subjects(index, options.split, out)
    manifest = windows.manifest
    survey = CacheSurvey(
        units=tuple(manifest.units), moments=list(_measure_training(windows, index))
    )
    if (out / manifests.MANIFEST).exists():  # of another generation of the cache
        storage.os_unlink(out / manifests.MANIFEST)
    names = {shard.name for shard in manifest.shards} | {"recordings.parquet"}
    for name in names:
        storage.link_file(windows.folder / name, out / name)
    statistics = compute_statistics(survey, index, manifest.class_names, options)
    content = storage.encode_parquet(index)
    files = {
        "index.parquet": store_file(out / "index.parquet", content, index.height),
        "statistics.json": store_file(out / "statistics.json", statistics.encode()),
    }
    changes = {
        "options": options,
        "counts": audit(index, Counter(), manifest.class_names),
        "notices": list_notices(options),
        "generation": 0,
        "manifest_sha256": "",
        "files": {**{name: manifest.files[name] for name in sorted(names)}, **files},
    }
    manifest.model_copy(update=changes).publish(out)


def _measure_training(windows: Windows, index: pl.DataFrame) -> Iterator[list[Moments]]:
    """Moments of each channel in the training windows, recording by recording."""
    import polars as pl

    affine = pl.read_parquet(windows.folder / "recordings.parquet", glob=False)
    of_recording = affine.partition_by("recording_id", as_dict=True)
    training = index.filter(pl.col("split") == "train")
    for (recording,), part in training.group_by("recording_id", maintain_order=True):
        scale, offset = of_recording[recording,]["scale", "offset"].to_numpy().T
        yield compute_moments(windows.read_stored(part["window"].to_numpy()), scale, offset)
