"""Assigns subjects, recordings and windows to train, validation and test.

It goes by hashes, so that the order of the subjects has no influence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from bitimely_core.errors import UserError, check_choice, safe_text, usage_error
from bitimely_core.schemas.tokens import WindowOptions
from bitimely_core.types import SPLITS, Attributes

if TYPE_CHECKING:
    import polars as pl

SMALL = 20  # subjects; fewer are ranked
EXTERNAL = "external"  # other people than those of the training: all are tested
# schemes in which a subject may be in several splits, and the caveat that is shown with scores
SHARED = {
    "time": "Split by time inside each recording: the same subjects stand in train and test, "
    "so scores say nothing about other subjects.",
    "random-window": "Split by random windows: neighbouring windows of one recording stand in "
    "train and test, so scores are optimistic.",
}
# PTB-XL's recommendation
FOLDS = {**dict.fromkeys(range(1, 9), "train"), 9: "validation", 10: "test"}

Scheme = Callable[[str, str, Attributes, Sequence[float]], list[str | None]]
"""`(subject_id, recording_id, attributes, starts in seconds) -> split of each window`, None = left
out (the gap of `time`).
"""


def hash_to_share(text: str) -> float:
    """A number in [0, 1) that depends on `text` alone.

    It is the first 8 bytes, big-endian, of its SHA-256 over 2^64.
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def split_by_share(u: float) -> str:
    """80/10/10: below 0.8 train, below 0.9 validation, else test."""
    return "train" if u < 0.8 else "validation" if u < 0.9 else "test"


def split_by_fold(fold: int, test_fold: int) -> str:
    """The split of one of ten folds, when `test_fold` is tested; 10 gives `FOLDS`.

    The fold before the tested one (10 before 1) validates, the others train.
    """
    return FOLDS[(fold - test_fold - 1) % 10 + 1]


def find_tenth(u: float) -> int:
    """The fold of u in [0, 1), 1 to 10: `split_by_share(u)` is `FOLDS[find_tenth(u)]`."""
    return 1 + sum(u >= t / 10 for t in range(1, 10))


def assign_dealt_splits(
    subject_ids: Iterable[str],
    strata: Mapping[str, str],
    *,
    seed: int = 0,
    folds: int = 10,
    test_fold: int | None = None,
) -> dict[str, str]:
    """Subject -> split, with fold `test_fold` (None: the last) of `folds` tested.

    Subjects are ranked stratum by stratum, within each by `hash_to_share("{seed}|{subject_id}")`,
    and dealt in turn to parts: two a fold, or one of ten and more folds and of few subjects. Parts
    differ by at most one subject, in all and of each stratum. The part before the tested fold
    validates. Adding a subject moves others.

    Raises UserError (config, exit 2) for fewer than 3 subjects or fewer than folds, and for a fold
    that there is not.
    """
    ranked = sorted(
        set(subject_ids),
        key=lambda subject: (strata.get(subject, ""), hash_to_share(f"{seed}|{subject}"), subject),
    )
    tested = test_fold or folds
    size = 2 if folds < 10 and len(ranked) >= 2 * folds else 1
    if len(ranked) < max(3, folds) or folds * size < 3 or not 1 <= tested <= folds:
        raise _fold_error(
            f"{len(ranked)} subjects, fold {tested} of {folds}",
            f"expected at least {max(3, folds)} subjects, and a fold from 1 to {folds}",
        )
    parts = list(range(folds * size))
    if len(ranked) < SMALL:  # the first parts of all folds come first, so that folds are even
        parts = [*parts[::size], *parts[1::size]] if size > 1 else parts
    first = size * (tested - 1)
    splits = {
        **dict.fromkeys(range(first, first + size), "test"),
        (first - 1) % len(parts): "validation",
    }
    placed = {
        subject: splits.get(parts[place % len(parts)], "train")
        for place, subject in enumerate(ranked)
    }
    return dict(sorted(placed.items()))


def assign_splits(
    subject_ids: Iterable[str], *, seed: int = 0, test_fold: int | None = None
) -> dict[str, str]:
    """Subject -> split, by u = `hash_to_share("{seed}|{subject_id}")` (method notes, section 12,
    row 15).

    From `SMALL` subjects on each is placed by its own u, so adding subjects moves no other. Fewer
    than `SMALL` (n of them) are ranked by u: the last max(1, round(n / 10)) are test, as many
    before them validation, the rest train (halves round to even: n = 15 gives 2). Fewer than 3 are
    all train. Duplicates and order of `subject_ids` have no influence; the result is sorted by
    subject.

    With `test_fold` k, 1 to 10, those of u in the k-th tenth are test and those of the tenth before
    validation, so that the ten test sets hold every subject once; 10 is the split without it.
    Raises UserError (config, exit 2) for fewer than `SMALL`.
    """
    u = {subject: hash_to_share(f"{seed}|{subject}") for subject in sorted(set(subject_ids))}
    if len(u) >= SMALL:
        return {
            subject: split_by_fold(find_tenth(value), test_fold or 10)
            for subject, value in u.items()
        }
    if test_fold is not None:
        raise _fold_error(f"{len(u)} subjects", f"expected at least {SMALL} to make ten folds of")
    if len(u) < 3:
        return dict.fromkeys(u, "train")
    held = max(1, round(len(u) / 10))
    ranked = sorted(u, key=lambda subject: (u[subject], subject))
    places = ["train"] * (len(u) - 2 * held) + ["validation"] * held + ["test"] * held
    placed = dict(zip(ranked, places, strict=True))
    return {subject: placed[subject] for subject in u}


def split_by_time(starts: Sequence[float], length: float) -> list[str | None]:
    """The splits of the windows of one recording by time.

    The last tenth is test, the tenth before validation, with a gap of one window before each.
    `starts` ascending and `length` in seconds. A tenth is max(1, round(n / 10)) windows; fewer than
    5 windows are all train. Windows that end less than `length` before the next block begins fall
    into the gap (None), so that no sample, and no sample that was interpolated from a neighbour, is
    in two splits.
    """
    n = len(starts)
    if n < 5:
        return ["train"] * n
    held = max(1, round(n / 10))
    places: list[str | None] = [None] * n
    end, edge = n, float("inf")
    for name, count in (("test", held), ("validation", held), ("train", n)):
        # rounding of the clock
        while end > 0 and starts[end - 1] + 2 * length > edge + 1e-6 * length:
            end -= 1
        first = max(0, end - count)
        places[first:end] = [name] * (end - first)
        end, edge = first, starts[first] if first < n else edge
    return places


def _fold_error(problem: str, requirement: str) -> UserError:
    return usage_error(
        problem,
        requirement,
        "Take fewer folds, leave --test-fold out, or use --split subject or official",
        field="--test-fold",
    )


def read_official_split(attributes: Attributes, test_fold: int | None = None) -> str | None:
    """The official split of a recording, by its attributes; None without one.

    It is `split`, unless `test_fold` is chosen, or `fold` (1-8, 9, 10).
    """
    split, fold = attributes.get("split"), attributes.get("fold")
    if test_fold is None and isinstance(split, str) and split.lower() in SPLITS:
        return split.lower()
    if isinstance(fold, bool) or not isinstance(fold, int | float) or fold not in FOLDS:
        return None
    return split_by_fold(int(fold), test_fold or 10)


def make_scheme(options: WindowOptions, table: pl.DataFrame) -> Scheme:
    """The function that places the windows of one recording.

    `table` holds the recordings of the cache: all of them, whatever the view, so that views agree.
    With `folds` or `stratify` subjects are dealt to the folds, else each is placed by its hash.

    Raises UserError: unknown_name for an attribute, config for a fold of a split that has none
    (exit 2). With `official` the function raises it (config, exit 2) for a recording without an
    official split.
    """
    name, seed, test_fold = options.split, options.seed, options.test_fold
    _check_folds(options, deals=options.folds is not None or options.stratify is not None)
    if name == "official":
        return lambda subject, recording, attributes, starts: (
            [_require_official_split(recording, attributes, test_fold)] * len(starts)
        )
    if name == "time":
        return lambda subject, recording, attributes, starts: split_by_time(starts, options.length)
    if name == EXTERNAL:
        return lambda subject, recording, attributes, starts: ["test"] * len(starts)
    if name == "random-window":
        return lambda subject, recording, attributes, starts: [
            split_by_share(hash_to_share(f"{seed}|{recording}|{float(start)!r}"))
            for start in starts
        ]
    placed = _place_subjects(options, table)
    return lambda subject, recording, attributes, starts: [placed[subject]] * len(starts)


def _place_subjects(options: WindowOptions, table: pl.DataFrame) -> dict[str, str]:
    """Subject -> split: dealt to folds, or each by its hash. Raises UserError: as `make_scheme`."""
    subjects, seed, test_fold = table["subject_id"].to_list(), options.seed, options.test_fold
    if options.folds is None and options.stratify is None:
        return assign_splits(subjects, seed=seed, test_fold=test_fold)
    strata = {} if options.stratify is None else _read_strata(table, options.stratify)
    return assign_dealt_splits(
        subjects, strata, seed=seed, folds=options.folds or 10, test_fold=test_fold
    )


def _check_folds(options: WindowOptions, *, deals: bool) -> None:
    """Raises UserError (config, exit 2) for folds or dealt subjects of a split without them."""
    split, fold, folds = options.split, options.test_fold, options.folds or 10
    if fold is not None and fold > folds:
        raise _fold_error(f"fold {fold}", f"expected one from 1 to {folds}")
    if fold is not None and split not in {"subject", "official"}:
        raise _fold_error(
            f"a split by {split} has no folds", "expected one by subject or the official one"
        )
    if deals and split != "subject":
        raise _fold_error(f"a split by {split} deals no subjects", "expected one by subject")


def _read_strata(subjects: pl.DataFrame, attribute: str) -> dict[str, str]:
    """Subject -> the value of an attribute of its recordings.

    It is the smallest where there are several, "" without one.
    """
    attributes = [name for name in subjects.columns if name not in {"subject_id", "recording_id"}]
    check_choice("attribute", attribute, attributes)
    pairs = sorted(
        (str(subject), "" if value is None else str(value))
        for subject, value in zip(subjects["subject_id"], subjects[attribute], strict=True)
    )
    return dict(reversed(pairs))


def _require_official_split(recording: str, attributes: Attributes, test_fold: int | None) -> str:
    """`read_official_split`. Raises UserError (config, exit 2) for a recording without one."""
    split = read_official_split(attributes, test_fold)
    if split is None:
        kind, names = ("folds", "'fold'") if test_fold else ("split", "'split' or 'fold'")
        raise usage_error(
            f"the recording {safe_text(recording)} has no official {kind}",
            f"expected an attribute {names} of every recording",
            "Use --split subject, or leave it out by --exclude of ingest",
            field="split",
            found=safe_text(attributes.get("fold")),
        )
    return split
