"""Shapelets: short segments of a signal whose presence separates the classes, mined from labelled
windows and tested on held-out ones.

The shapelets themselves are found by `shapelet_mining`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

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
    compute_distances,
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
from bitimely_core.records import read_result
from bitimely_core.registry import AnalysisFacts, analyses
from bitimely_core.system_errors import raise_system_error
from bitimely_core.tokens import Windows
from bitimely_core.types import Progress


def read_shapelets(path: Path | str) -> list[Shapelet]:
    """The shapelets of a report of this analysis: its folder, or its summary.json. Raises UserError
    (not_found or config, exit 2).
    """
    file = Path(path) / "summary.json" if Path(path).is_dir() else Path(path)
    try:
        stored = json.loads(read_result(file))["shapelets"]
        return [
            Shapelet(**{**one, "values": np.array(one["values"], np.float64)}) for one in stored
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
    progress: Progress | None = None,
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
    found = mine_shapelets(windows, options, progress)
    held_out = draw_windows(windows, ("test", "validation"), sequences, seed)
    tests = [] if held_out is None else _score_held_out(found.shapelets, windows, held_out, options)
    page = PageBuilder(f"Shapelets of {windows.name}")
    page.notice(*windows.notices, *found.notices)
    if held_out is None:
        page.notice(
            "There are no held-out windows, so the shapelets were tested only on the windows from which they were selected."
        )
    elif held_out.n_subjects < MIN_SUBJECTS:
        page.notice(
            f"Checked on {held_out.n_subjects} subjects: results may not generalise to other subjects."
        )
    _add_facts(page, found, held_out, windows, options)
    _add_blocks(page, found, tests, held_out, windows, options)
    return page.finish(_verdict(found, tests), _summarize(found, tests, held_out, windows, options))


def parse_seconds(text: str) -> tuple[float, ...]:
    """`0.5,1` as numbers. Raises UserError (config, exit 2)."""
    try:
        return tuple(float(part) for part in str(text).split(",") if part.strip())
    except ValueError:
        raise usage_error(
            f"found {safe_text(str(text))}", "expected seconds, as in 0.5,1", field="--lengths"
        ) from None


class HeldOutScore(NamedTuple):
    """A shapelet on windows from which it was not selected."""

    f: float
    gain: float
    p: float  # of the score, for this shapelet alone
    distances: Array  # [n]
    starts: Ints  # [n]


def _score_held_out(
    found: list[Shapelet], windows: Windows, held_out: LabelledWindows, options: MiningOptions
) -> list[HeldOutScore]:
    labels, out = torch.from_numpy(held_out.labels), []
    for one in found:
        series = held_out.values[..., windows.channel_names.index(one.channel)]
        d, places = compute_distances(
            series.double(), torch.from_numpy(one.values)[None], normalised=options.normalised
        )
        score = float(SCORES[options.score](d, labels).nan_to_num(0.0))
        null = null_maxima(
            d, held_out.labels, held_out.subjects, options.score, options.permutations, options.seed
        )
        f, gain = float(f_statistic(d, labels)), float(information_gain(d, labels)[0])
        out.append(HeldOutScore(f, gain, p_value(score, null), d[0].numpy(), places[0].numpy()))
    return out


def name_shapelets(shapelets: Sequence[Shapelet]) -> list[str]:
    """A name for each: number, class, channel."""
    several = len({one.channel for one in shapelets}) > 1
    return [
        f"{k + 1}: {one.klass}, {one.seconds:g} s" + (f", {one.channel}" if several else "")
        for k, one in enumerate(shapelets)
    ]


CHANCE = (
    "Score of each shapelet on the windows it was mined from, and the best score of any of the same candidates under permuted labels (the "
    "start was then moved by less than a tenth of the length, which p ignores). A shapelet below the last bar is what a search of this size "
    "finds in random labels."
)
SHAPES = (
    "The shapelets, standardised, as in their training windows. They are examples that are close to many windows of one class, not averages; "
    "their class is the closest one, which may also be the one without a feature of the others."
)
MATCHES = (
    "Shapelet 1 and the closest segment of a held-out window, one window a class: the median of its class. If it represents its class, the "
    "curve of that class coincides with it and the others do not."
)
DISTANCES = (
    "Distance of held-out windows to shapelet 1, divided by the number of samples: share of the windows of each class that are closer. "
    "{scale} Evidence against the shapelet: curves that coincide."
)
NULL = "The best score of all candidates under permuted labels, in ascending order, and that of shapelet 1 (vertical)."
TABLE = (
    "Mined: on the training windows from which the shapelet was selected; p: share of the permutations in which any candidate scores as high. "
    "Held out: on other windows, p for this shapelet alone. F: variance between classes over that within; gain: information gain of the best "
    "threshold on the distance about the class."
)


def _add_blocks(
    page: PageBuilder,
    found: MinedShapelets,
    tests: list[HeldOutScore],
    held_out: LabelledWindows | None,
    windows: Windows,
    options: MiningOptions,
) -> None:
    names, is_f = name_shapelets(found.shapelets), options.score == "f"
    unit = "F" if is_f else "information gain, bits"
    scores = [one.f if is_f else one.gain for one in found.shapelets]
    chance = [float(np.quantile(found.null, 0.95))] if len(found.null) else []
    bars = BarPlot(
        [*names, *(["permuted labels, 95 %"] * len(chance))], [*scores, *chance], ylabel=unit
    )
    page.figure("main-score", "Separation of the classes", CHANCE, bars)
    shapes = [
        _shape_line(name, one.values, one.rate)
        for name, one in zip(names, found.shapelets, strict=True)
    ]
    page.figure(
        "shapelets",
        "The shapelets",
        SHAPES,
        LinePlot(shapes, xlabel="seconds", ylabel="standardised"),
    )
    first = found.shapelets[0]
    v, row = (
        windows.channel_names.index(first.channel),
        int(np.flatnonzero(found.drawn.rows == first.window)[0]),
    )
    start = first.start / first.rate
    caption = f"Training window {first.window} of class {windows.class_names[found.drawn.labels[row]]}, as models read it."
    trace, span = (
        Trace(first.channel, found.drawn.values[row, :, v].numpy()),
        TimeSpan(start, start + first.seconds, "shapelet"),
    )
    page.figure("source", "Source of shapelet 1", caption, TracePlot(windows.rate, [trace], [span]))
    if held_out is not None:
        _add_held_out(page, first, tests[0], held_out, windows, options)
    if len(found.null):
        null = Line(
            "permuted labels",
            np.sort(found.null),
            np.arange(1, len(found.null) + 1) / len(found.null),
        )
        lines = [null, Line("shapelet 1", [scores[0]] * 2, [0.0, 1.0])]
        page.figure(
            "chance",
            "Null distribution",
            NULL,
            LinePlot(lines, xlabel=f"best {unit}", ylabel="share of the permutations"),
        )
    columns = [
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
    rows = [
        [name, s.window, s.start / s.rate, s.f, s.gain, s.p]
        for name, s in zip(names, found.shapelets, strict=True)
    ]
    held: list[Sequence[float | None]] = [test[:3] for test in tests] or [
        (None, None, None) for _ in rows
    ]
    page.table(
        "table",
        "Shapelets, best first",
        TABLE,
        columns,
        [[*row, *test] for row, test in zip(rows, held, strict=True)],
    )


def _add_held_out(
    page: PageBuilder,
    first: Shapelet,
    test: HeldOutScore,
    held_out: LabelledWindows,
    windows: Windows,
    options: MiningOptions,
) -> None:
    m, v = len(first.values), windows.channel_names.index(first.channel)
    matches, distances = [_shape_line("shapelet 1", first.values, first.rate)], []
    for c in np.unique(held_out.labels):
        rows = np.flatnonzero(held_out.labels == c)
        rows = rows[np.argsort(test.distances[rows], kind="stable")]
        at = rows[len(rows) // 2]
        segment = held_out.values[at, test.starts[at] : test.starts[at] + m, v].double().numpy()
        matches.append(_shape_line(windows.class_names[c], segment, first.rate))
        distances.append(
            Line(
                windows.class_names[c],
                test.distances[rows] / m,
                np.arange(1, len(rows) + 1) / len(rows),
            )
        )
    plot = LinePlot(matches, xlabel="seconds", ylabel="standardised")
    page.figure("matches", "The closest segment in each class", MATCHES, plot)
    scale = (
        "0 is the same shape, 2 is no correlation."
        if options.normalised
        else "0 is the same segment."
    )
    plot = LinePlot(distances, xlabel="distance / samples", ylabel="share of the windows")
    page.figure("distances", "Distance by class", DISTANCES.format(scale=scale), plot)


def _shape_line(name: str, values: Array, rate: float) -> Line:
    shape = standardise_segments(torch.from_numpy(np.asarray(values, np.float64))).numpy()
    return Line(name, np.arange(len(values)) / rate, shape)


def _verdict(found: MinedShapelets, tests: list[HeldOutScore]) -> str:
    one = found.shapelets[0]
    what = f"The best of {found.candidates:,} segments, {one.seconds:g} s of {one.channel} closest to class {one.klass},"
    text = f"{what} {'separates' if one.p <= 0.05 else 'does not significantly separate'} the classes (p = {one.p:.3g}, corrected for selection)"
    if not tests:
        return f"{text}; there are no held-out windows to confirm it."
    if tests[0].p <= 0.05:
        again = "and does so again" if one.p <= 0.05 else "but does so"
    else:
        again = "but not" if one.p <= 0.05 else "nor does it"
    return f"{text} {again} on held-out windows (p = {tests[0].p:.3g}, information gain {tests[0].gain:.2f} bits)."


def _add_facts(
    page: PageBuilder,
    found: MinedShapelets,
    held_out: LabelledWindows | None,
    windows: Windows,
    options: MiningOptions,
) -> None:
    def describe(part: LabelledWindows) -> str:
        counts = np.bincount(part.labels, minlength=windows.classes)
        of_class = ", ".join(
            f"{name} {count}" for name, count in zip(windows.class_names, counts, strict=True)
        )
        return f"{len(part.rows)} windows of {part.n_subjects} subjects, {part.split} split ({of_class})"

    by_subject = subject_classes(found.drawn.labels, found.drawn.subjects) is not None
    page.fact(
        "Data",
        f"{windows.name} ({windows.channels} channels, {windows.length} samples at {windows.rate:g} Hz)",
    )
    page.fact("Split", f"by {windows.split}")
    page.fact("Mined", describe(found.drawn))
    page.fact("Checked", "no held-out windows" if held_out is None else describe(held_out))
    page.fact("Candidates", f"{found.candidates:,}")
    page.fact(
        "Score",
        f"{options.score}, {'standardised segments' if options.normalised else 'segments without standardisation'}",
    )
    page.fact(
        "Permutations",
        f"{len(found.null)}, of {'the classes of subjects' if by_subject else 'labels within each subject'}",
    )
    page.fact("Seed", options.seed)


def _summarize(
    found: MinedShapelets,
    tests: list[HeldOutScore],
    held_out: LabelledWindows | None,
    windows: Windows,
    options: MiningOptions,
) -> dict[str, object]:
    checked: dict[str, object] | None = None
    if held_out is not None:
        scores = [{"f": one.f, "gain": one.gain, "p": one.p} for one in tests]
        checked = {
            "split": held_out.split,
            "windows": len(held_out.rows),
            "subjects": held_out.n_subjects,
            "shapelets": scores,
        }
    chosen = {
        "score": options.score,
        "normalise": "z" if options.normalised else "none",
        "seed": options.seed,
    }
    tried = {"candidates": found.candidates, "permutations": len(found.null)}
    source = {
        "data": windows.name,
        "fingerprint": windows.fingerprint,
        "windows": len(found.drawn.rows),
    }
    return {
        "shapelets": [{**one._asdict(), "values": one.values.tolist()} for one in found.shapelets],
        "held_out": checked,
        "best_by_chance": {f"{q:g}": float(np.quantile(found.null, q)) for q in (0.5, 0.95, 0.99)}
        if len(found.null)
        else {},
        "options": {**chosen, **tried, **source},
    }
