"""The page of shapelets: short segments of a signal whose presence separates the classes.

`shapelet_mining` finds them in labelled windows; here they are tested on held-out ones and shown.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bitimely_core.analyses import describe_data
from bitimely_core.errors import Reason, check_choice, safe_text, usage_error
from bitimely_core.insight.shapelet_mining import (
    MIN_SUBJECTS,
    SCORES,
    Array,
    Ints,
    LabelledWindows,
    MinedShapelets,
    MiningOptions,
    Shapelet,
    draw_windows,
    f_statistic,
    information_gain,
    mine_shapelets,
    null_maxima,
    p_value,
    standardise_segments,
    subject_classes,
)
from bitimely_core.page import (
    BarPlot,
    Line,
    LinePlot,
    Page,
    PageBuilder,
    TimeSpan,
    Trace,
    TracePlot,
)
from bitimely_core.registry import AnalysisFacts, analyses
from bitimely_core.store.records import read_result
from bitimely_core.system_errors import raise_system_error
from bitimely_core.tokens import Windows


def read_shapelets(path: Path | str) -> list[Shapelet]:
    """The shapelets of a report of this analysis: its folder, or its summary.json. Raises UserError
    (not_found or config, exit 2).
    """
    file = Path(path) / "summary.json" if Path(path).is_dir() else Path(path)
    try:
        stored = json.loads(read_result(file))["shapelets"]
        shapelets = [Shapelet(**fields) for fields in stored]
        return [
            shapelet._replace(values=np.array(shapelet.values, np.float64))
            for shapelet in shapelets
        ]
    except OSError as error:
        raise_system_error(error, file)
        raise usage_error(
            f"no report in {safe_text(str(path))}",
            "expected a report of analyze shapelets",
            code=Reason.NOT_FOUND,
        ) from None
    except (ValueError, KeyError, TypeError):
        raise usage_error(f"{safe_text(str(file))} holds no shapelets") from None


@analyses(
    AnalysisFacts(
        takes="data",
        help="Short segments of the signal that separate the classes, tested by permutation",
    )
)
def shapelets(
    windows: Windows,
    *,
    lengths: str = "",
    count: int = 5,
    sequences: int = 100,
    candidates: int = 2000,
    score: str = "f",
    normalise: str = "z",
    permutations: int = 500,
    channel: str = "",
    seed: int = 0,
) -> Page:
    """Segments of training windows of a view with classes whose presence separates the classes,
    tested on held-out windows.

    The arguments are the fields of `MiningOptions`; here `lengths` are separated by commas (default
    0.5, 1 and 2 seconds; of shorter windows fractions of them), `sequences` is also the number of
    held-out windows for the test, and `normalise` is z (compare shapes) or none (compare values).

    Returns a page; its summary holds the shapelets, which `analyze saliency --shapelets` reads.
    Raises UserError: as `mine_shapelets`; a length that is no number or an unknown normalisation
    (exit 2).
    """
    check_choice("normalisation", normalise, ["z", "none"])
    options = MiningOptions(
        parse_seconds(lengths),
        count,
        sequences,
        candidates,
        score,
        normalise == "z",
        permutations,
        channel,
        seed,
    )
    mined = mine_shapelets(windows, options)
    held_out = _score_held_out(mined.shapelets, windows, options)
    page = PageBuilder(f"Shapelets of {windows.name}")
    page.notice(*windows.notices, *mined.notices)
    if held_out is None:
        page.notice(
            "There are no held-out windows, so the shapelets were tested only on the windows from "
            "which they were selected."
        )
    elif held_out.drawn.n_subjects < MIN_SUBJECTS:
        page.notice(
            f"Checked on {held_out.drawn.n_subjects} subjects: results may not generalise to other "
            "subjects."
        )
    _add_facts(page, mined, held_out, windows, options)
    _add_blocks(page, mined, held_out, windows, options)
    return page.finish(_verdict(mined, held_out), _summarize(mined, held_out, windows, options))


def parse_seconds(text: str) -> tuple[float, ...]:
    """`0.5,1` as numbers. Raises UserError (config, exit 2)."""
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise usage_error(
            f"found {safe_text(text)}", "expected seconds, as in 0.5,1", field="--lengths"
        ) from None


class HeldOutScore(NamedTuple):
    """A shapelet on windows from which it was not selected."""

    f: float
    gain: float
    p: float  # of the score, for this shapelet alone
    distances: Array  # [n]
    starts: Ints  # [n]


class HeldOutScores(NamedTuple):
    """Held-out windows, and every shapelet on them."""

    drawn: LabelledWindows
    scores: list[HeldOutScore]


def _score_held_out(
    shapelets: list[Shapelet], windows: Windows, options: MiningOptions
) -> HeldOutScores | None:
    """The shapelets on held-out windows; None without any."""
    drawn = draw_windows(windows, ("test", "validation"), options.sequences, options.seed)
    if drawn is None:
        return None
    labels, scores = torch.from_numpy(drawn.labels), []
    for shapelet in shapelets:
        d, starts = shapelet.find_in(windows, drawn.values, normalised=options.normalised)
        rows = d[None]
        null = null_maxima(
            rows, drawn.labels, drawn.subjects, options.score, options.permutations, options.seed
        )
        f, gain = float(f_statistic(rows, labels)), float(information_gain(rows, labels)[0])
        p = p_value(float(SCORES[options.score](rows, labels).nan_to_num(0.0)), null)
        scores.append(HeldOutScore(f, gain, p, d.numpy(), starts.numpy()))
    return HeldOutScores(drawn, scores)


def name_shapelets(shapelets: Sequence[Shapelet]) -> list[str]:
    """A name for each: number, class, channel."""
    several = len({shapelet.channel for shapelet in shapelets}) > 1
    return [
        f"{k}: {shapelet.klass}, {shapelet.seconds:g} s"
        + (f", {shapelet.channel}" if several else "")
        for k, shapelet in enumerate(shapelets, 1)
    ]


CHANCE = (
    "Score of each shapelet on the windows it was mined from, and the best score of any of the "
    "same candidates under permuted labels (the start was then moved by less than a tenth of the "
    "length, which p ignores). A shapelet below the last bar is what a search of this size finds "
    "in random labels."
)
SHAPES = (
    "The shapelets, standardised, as in their training windows. They are examples that are close "
    "to many windows of one class, not averages; their class is the closest one, which may also be "
    "the one without a feature of the others."
)
MATCHES = (
    "Shapelet 1 and the closest segment of a held-out window, one window a class: the median of "
    "its class. If it represents its class, the curve of that class coincides with it and the "
    "others do not."
)
DISTANCES = (
    "Distance of held-out windows to shapelet 1, divided by the number of samples: share of the "
    "windows of each class that are closer. {scale} Evidence against the shapelet: curves that "
    "coincide."
)
NULL = (
    "The best score of all candidates under permuted labels, in ascending order, and that of "
    "shapelet 1 (vertical)."
)
TABLE = (
    "Mined: on the training windows from which the shapelet was selected; p: share of the "
    "permutations in which any candidate scores as high. Held out: on other windows, p for this "
    "shapelet alone. F: variance between classes over that within; gain: information gain of the "
    "best threshold on the distance about the class."
)
COLUMNS = [
    "shapelet",
    "window",
    "start, s",
    "F",
    "gain, bits",
    "p",
    "F, held out",
    "gain, held out",
    "p, held out",
]


def _add_blocks(
    page: PageBuilder,
    mined: MinedShapelets,
    held_out: HeldOutScores | None,
    windows: Windows,
    options: MiningOptions,
) -> None:
    names, first = name_shapelets(mined.shapelets), mined.shapelets[0]
    unit = "F" if options.score == "f" else "information gain, bits"
    scores = [shapelet.score(options.score) for shapelet in mined.shapelets]
    chance = {"permuted labels, 95 %": np.quantile(mined.null, 0.95)} if len(mined.null) else {}
    bars = BarPlot([*names, *chance], [*scores, *map(float, chance.values())], ylabel=unit)
    page.figure("main-score", "Separation of the classes", CHANCE, bars)
    shapes = [
        _shape_line(name, shapelet.values, shapelet.rate)
        for name, shapelet in zip(names, mined.shapelets, strict=True)
    ]
    plot = LinePlot(shapes, xlabel="seconds", ylabel="standardised")
    page.figure("shapelets", "The shapelets", SHAPES, plot)
    drawn, v, start = mined.drawn, windows.channel_names.index(first.channel), first.start
    row = int(np.flatnonzero(drawn.rows == first.window)[0])
    span = TimeSpan(start / first.rate, start / first.rate + first.seconds, "shapelet")
    page.figure(
        "source",
        "Source of shapelet 1",
        f"Training window {first.window} of class {windows.class_names[drawn.labels[row]]}, "
        "as models read it.",
        TracePlot(windows.rate, [Trace(first.channel, drawn.values[row, :, v].numpy())], [span]),
    )
    if held_out is not None:
        _add_held_out(page, first, held_out, windows, normalised=options.normalised)
    if len(mined.null):
        shares = np.arange(1, len(mined.null) + 1) / len(mined.null)
        null = Line("permuted labels", np.sort(mined.null), shares)
        lines = [null, Line("shapelet 1", [scores[0]] * 2, [0.0, 1.0])]
        plot = LinePlot(lines, xlabel=f"best {unit}", ylabel="share of the permutations")
        page.figure("chance", "Null distribution", NULL, plot)
    rows = []
    for k, s in enumerate(mined.shapelets):
        test = (None, None, None) if held_out is None else held_out.scores[k][:3]
        rows.append([names[k], s.window, s.start / s.rate, s.f, s.gain, s.p, *test])
    page.table("table", "Shapelets, best first", TABLE, COLUMNS, rows)


def _add_held_out(
    page: PageBuilder,
    first: Shapelet,
    held_out: HeldOutScores,
    windows: Windows,
    *,
    normalised: bool,
) -> None:
    """The closest segments to shapelet 1, and its distances, by class."""
    drawn, test = held_out.drawn, held_out.scores[0]
    m, v = len(first.values), windows.channel_names.index(first.channel)
    matches, distances = [_shape_line("shapelet 1", first.values, first.rate)], []
    for label in np.unique(drawn.labels):
        name = windows.class_names[label]
        rows = np.flatnonzero(drawn.labels == label)
        rows = rows[np.argsort(test.distances[rows], kind="stable")]
        median = rows[len(rows) // 2]
        start = test.starts[median]
        segment = drawn.values[median, start : start + m, v].double().numpy()
        matches.append(_shape_line(name, segment, first.rate))
        shares = np.arange(1, len(rows) + 1) / len(rows)
        distances.append(Line(name, test.distances[rows] / m, shares))
    plot = LinePlot(matches, xlabel="seconds", ylabel="standardised")
    page.figure("matches", "The closest segment in each class", MATCHES, plot)
    scale = "0 is the same shape, 2 is no correlation." if normalised else "0 is the same segment."
    plot = LinePlot(distances, xlabel="distance / samples", ylabel="share of the windows")
    page.figure("distances", "Distance by class", DISTANCES.format(scale=scale), plot)


def _shape_line(name: str, values: Array, rate: float) -> Line:
    shape = standardise_segments(torch.from_numpy(np.asarray(values, np.float64))).numpy()
    return Line(name, np.arange(len(values)) / rate, shape)


def _verdict(mined: MinedShapelets, held_out: HeldOutScores | None) -> str:
    first = mined.shapelets[0]
    separates = first.p <= 0.05
    text = (
        f"The best of {mined.candidates:,} segments, {first.seconds:g} s of {first.channel} "
        f"closest to class {first.klass}, "
        f"{'separates' if separates else 'does not significantly separate'} the classes "
        f"(p = {first.p:.3g}, corrected for selection)"
    )
    if held_out is None:
        return f"{text}; there are no held-out windows to confirm it."
    test = held_out.scores[0]
    if test.p <= 0.05:
        again = "and does so again" if separates else "but does so"
    else:
        again = "but not" if separates else "nor does it"
    return (
        f"{text} {again} on held-out windows (p = {test.p:.3g}, "
        f"information gain {test.gain:.2f} bits)."
    )


def _describe_windows(drawn: LabelledWindows, windows: Windows) -> str:
    counts = np.bincount(drawn.labels, minlength=windows.classes)
    classes = ", ".join(map("{} {}".format, windows.class_names, counts))
    return (
        f"{len(drawn.rows)} windows of {drawn.n_subjects} subjects, {drawn.split} split ({classes})"
    )


def _add_facts(
    page: PageBuilder,
    mined: MinedShapelets,
    held_out: HeldOutScores | None,
    windows: Windows,
    options: MiningOptions,
) -> None:
    checked = "no held-out windows"
    if held_out is not None:
        checked = _describe_windows(held_out.drawn, windows)
    segments = "standardised segments" if options.normalised else "segments without standardisation"
    by_subject = subject_classes(mined.drawn.labels, mined.drawn.subjects) is not None
    permuted = "the classes of subjects" if by_subject else "labels within each subject"
    page.fact("Data", describe_data(windows))
    page.fact("Split", f"by {windows.split}")
    page.fact("Mined", _describe_windows(mined.drawn, windows))
    page.fact("Checked", checked)
    page.fact("Candidates", f"{mined.candidates:,}")
    page.fact("Score", f"{options.score}, {segments}")
    page.fact("Permutations", f"{len(mined.null)}, of {permuted}")
    page.fact("Seed", options.seed)


def _summarize(
    mined: MinedShapelets, held_out: HeldOutScores | None, windows: Windows, options: MiningOptions
) -> dict[str, object]:
    checked: dict[str, object] | None = None
    if held_out is not None:
        drawn, scores = held_out
        checked = {
            "split": drawn.split,
            "windows": len(drawn.rows),
            "subjects": drawn.n_subjects,
            "shapelets": [{"f": test.f, "gain": test.gain, "p": test.p} for test in scores],
        }
    quantiles = (0.5, 0.95, 0.99) if len(mined.null) else ()
    return {
        "shapelets": [
            {**shapelet._asdict(), "values": shapelet.values.tolist()}
            for shapelet in mined.shapelets
        ],
        "held_out": checked,
        "best_by_chance": {f"{q:g}": float(np.quantile(mined.null, q)) for q in quantiles},
        "options": {
            "score": options.score,
            "normalise": "z" if options.normalised else "none",
            "seed": options.seed,
            "candidates": mined.candidates,
            "permutations": len(mined.null),
            "data": windows.name,
            "fingerprint": windows.fingerprint,
            "windows": len(mined.drawn.rows),
        },
    }
