"""Whether the vectors of held-out windows separate labels or subjects: projections into two
dimensions, and numbers from the full space.

The vectors of a readout are shown by their first two principal components and by t-SNE, coloured by
label and by subject. Projections are no evidence, so the numbers are computed in the full space on
standardised columns: the share of the nearest neighbours with the same label (neighbours of the
same subject are excluded, because a model that recognises subjects would seem to recognise labels),
the share of the same subject, and the silhouettes by label and by subject, each beside chance,
random weights, and features that need no model.

Legend: n rows, D width of a vector, k neighbours, K classes or labels, U subjects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bitimely_core import evaluate
from bitimely_core.analyses import plain_features
from bitimely_core.analyses.controls import randomise_model
from bitimely_core.errors import Reason, check_choice, input_error, usage_error
from bitimely_core.heads import POOLS
from bitimely_core.methods.linear import extract_simple_features, standardise
from bitimely_core.page import BarPlot, Page, PageBuilder, ScatterPanel, ScatterPlot
from bitimely_core.privacy import Sharing
from bitimely_core.registry import AnalysisFacts, analyses
from bitimely_core.run import Run
from bitimely_core.schemas.scores import MetricValue
from bitimely_core.tokens import Windows
from bitimely_core.tokens.drawing import draw_held_out
from bitimely_core.tokens.sets import require_plain_labels
from bitimely_core.types import drop_none

Array = npt.NDArray[Any]

DEFAULT_ROWS = 600
MAX_GROUPS = 8  # groups that are coloured
TSNE_COMPONENTS = 50  # principal components that t-SNE starts from


def nearest_neighbours(x: Array, k: int, allowed: Array) -> Array:
    """The k nearest rows of each row among those that `allowed` [n, n] permits, [n, k]; -1 where
    there are fewer. Euclidean.
    """
    from scipy.spatial.distance import cdist

    distance = np.where(allowed, cdist(x, x), np.inf)
    np.fill_diagonal(distance, np.inf)
    k = min(k, len(x) - 1)
    order = np.argsort(distance, axis=1, kind="stable")[:, :k]
    return np.where(np.isfinite(np.take_along_axis(distance, order, 1)), order, -1)


def neighbour_agreement(nearest: Array, group: Array) -> Array:
    """Share of each row's neighbours that are of its group, [n]; NaN without neighbours or group
    (-1).
    """
    exists = nearest >= 0
    same = (group[nearest] == group[:, None]) & exists
    with np.errstate(invalid="ignore"):
        share = same.sum(1) / exists.sum(1)
    return np.where(group >= 0, share, np.nan)


def chance_agreement(group: Array, allowed: Array) -> Array:
    """Share of all permitted rows that are of its group, [n]: what `neighbour_agreement`
    expects of neighbours at random.
    """
    allowed = allowed & ~np.eye(len(group), dtype=bool)
    with np.errstate(invalid="ignore"):
        share = (allowed & (group[:, None] == group)).sum(1) / allowed.sum(1)
    return np.where(group >= 0, share, np.nan)


def compute_silhouettes(x: Array, group: Array) -> Array:
    """Silhouette of each row, [n] in -1 .. 1: near 1 = far nearer to its own group than to the next
    one; NaN without two groups.
    """
    from sklearn.metrics import silhouette_samples

    rows = group >= 0
    silhouettes = np.full(len(group), np.nan)
    if 2 <= len(np.unique(group[rows])) < rows.sum():
        silhouettes[rows] = silhouette_samples(x[rows], group[rows])
    return silhouettes


class SpaceMeasures(NamedTuple):
    """Nearest neighbours and silhouettes of one space, by label and by subject."""

    label_agreement: MetricValue  # of neighbours of other subjects
    label_chance: MetricValue
    subject_agreement: MetricValue
    subject_chance: MetricValue
    label_silhouette: MetricValue
    subject_silhouette: MetricValue


def measure_space(
    x: Array,
    label: Array,
    units: Array,
    n_units: int,
    k: int,
    bootstrap: int,
    counted: Array | None = None,
) -> SpaceMeasures:
    """Measures of `x` [n, D] standardised, with `label` [n] groups (-1 = none), `units` [n]
    subjects from 0 on, and `k` neighbours.

    `counted` [n] bool marks the rows that count for the label: of a rare label those that have it,
    as most neighbours of the others lack it.
    """
    anybody = np.ones((len(x), len(x)), dtype=bool)
    other, subject = anybody, np.full(len(x), -1)
    if n_units > 1:
        other = units[:, None] != units
        # a subject with one row has no neighbour of the same subject
        subject = np.where(np.bincount(units, minlength=n_units)[units] > 1, units, -1)
    agreement = neighbour_agreement(nearest_neighbours(x, k, other), label)
    chance = chance_agreement(label, other)
    if counted is not None:
        agreement, chance = (np.where(counted, part, np.nan) for part in (agreement, chance))

    def average(values: Array, kind: str = "mean") -> MetricValue:
        return evaluate.average_over_units(values, units, n_units, kind, bootstrap)

    return SpaceMeasures(
        average(agreement, "share"),
        average(chance),
        average(neighbour_agreement(nearest_neighbours(x, k, anybody), subject), "share"),
        average(chance_agreement(subject, anybody)),
        average(compute_silhouettes(x, label)),
        average(compute_silhouettes(x, subject)),
    )


def principal_components(x: Array, parts: int) -> tuple[Array, Array]:
    """The first principal components [n, parts] and their shares of the variance; signs so that the
    largest entry is positive.
    """
    centred = x - x.mean(0)
    u, s, _ = np.linalg.svd(centred, full_matrices=False)
    components = (u * s)[:, :parts]
    count = components.shape[1]
    components *= np.sign(components[np.abs(components).argmax(0), np.arange(count)] + 1e-300)
    share = s**2 / max(float((s**2).sum()), 1e-300)
    return np.pad(components, ((0, 0), (0, parts - count))), share[:parts]


def compute_tsne(x: Array, perplexity: float, seed: int) -> Array | None:
    """t-SNE of scikit-learn from the first 50 principal components, [n, 2]; None below ten rows.
    `perplexity` is below n.
    """
    from sklearn.manifold import TSNE

    if len(x) < 10:
        return None
    start = principal_components(x, min(TSNE_COMPONENTS, x.shape[1], len(x)))[0]
    if start.shape[1] < 2 or not start.std(0)[:2].all():
        return None
    tsne = TSNE(2, perplexity=perplexity, init="pca", random_state=seed, max_iter=750)
    return np.asarray(tsne.fit_transform(start), np.float64)


@analyses(
    AnalysisFacts(
        takes="run",
        scores=True,
        help="Do embeddings separate labels or subjects? Neighbours, silhouettes and projections",
    )
)
def embedding(
    runs: list[Run],
    *,
    sequences: int = DEFAULT_ROWS,
    readout: str = "",
    layers: str = "last",
    neighbours: int | None = None,
    perplexity: float | None = None,
    label: str = "",
    bootstrap: int = 1000,
    seed: int = 0,
    device: str = "auto",
) -> Page:
    """Vectors of held-out windows: neighbours, silhouettes and projections by label and by subject,
    beside random weights and plain features.

    `runs` is one run, pre-trained or fine-tuned, on labelled windows, of which `sequences` rows are
    drawn from the test split. `readout` is a key of `heads.POOLS` ("": that of fine-tuning),
    `layers` last, last-two or the number of a layer, `neighbours` k (None: 10, of few rows all
    others), `perplexity` that of t-SNE (None: 30, at most a third of the other rows), `label` the
    one of several labels to analyze ("": the most frequent).

    Returns a page; its summary holds `spaces`: trained, random, raw -> `SpaceMeasures`. No subject
    id is stored. Raises UserError: windows without labels, unknown readout or label, more
    neighbours or a larger perplexity than the rows allow (exit 2); no_input without rows.
    """
    run = runs[0]
    windows = run.windows()
    require_plain_labels(windows)
    rows, split = draw_held_out(windows, sequences, seed)
    if len(rows) < 3:
        raise input_error(
            Reason.NO_INPUT,
            f"{len(rows)} rows in the {split} split",
            "expected at least 3",
            "Tokenize more subjects",
        )
    neighbours = int(_limit_option("--neighbours", neighbours, 10, len(rows) - 1, len(rows)))
    perplexity = _limit_option("--perplexity", perplexity, 30.0, (len(rows) - 1) / 3, len(rows))
    choice = _choose_vector(run, readout, layers)
    labels = _group_labels(windows, rows, label)
    units, n_units = plain_features.number_subjects(
        windows.whole_index["subject_id"].to_numpy()[rows], seed
    )
    models = {"trained": run.model(), "random": randomise_model(run.model(), seed).float()}
    spaces = _compute_spaces(models, windows, rows, choice, device)
    counted = labels.group == 1 if windows.task == "multilabel" else None
    measures = {
        name: measure_space(x, labels.group, units, n_units, neighbours, bootstrap, counted)
        for name, x in spaces.items()
    }
    page = plain_features.start_scored_page(f"Embeddings of {run.name}", run, split, n_units, seed)
    plain_features.note_sample(page, len(rows), windows, split)
    if windows.task == "regression":
        page.notice("The targets are numbers; tertiles of the target serve as labels.")
    page.fact("Rows", f"{len(rows):,} of the {split} split, {n_units} subjects, numbered at random")
    page.fact("Vector", f"{choice.describe()}, {spaces['trained'].shape[1]} numbers")
    page.fact("Neighbours", neighbours)
    projection = f"perplexity {perplexity:.3g}, from {TSNE_COMPONENTS} principal components"
    page.fact("t-SNE", projection, Sharing.OWNER)  # its limit is a third of the rows
    plain = "counts of codes" if windows.vocabulary else "means and spectra"
    names = {"trained": run.name, "random": "random weights", "raw": plain}
    _add_measures(page, measures, names, neighbours, labels.name)
    subjects = None
    if n_units < len(rows):
        group, largest = _select_largest(units, n_units)
        subject_names = [f"subject {k + 1}" for k in range(len(largest))]
        subjects = RowGroups(group, subject_names, "subject")
    _add_projections(page, spaces, names, labels, subjects, perplexity, seed)
    if subjects is None:
        page.text(
            "Every subject has one sequence here, so separation of subjects cannot be measured."
        )
    summary = {
        "run": run.name,
        "data": windows.name,
        "split": split,
        "n": len(rows),
        "n_subjects": n_units,
        **choice._asdict(),
        "label": labels.name,
        "neighbours": neighbours,
        "spaces": measures,
        "seed": seed,
    }
    return page.finish(_verdict(measures, neighbours, labels.name), summary)


def _compute_spaces(
    models: Mapping[str, Any],
    windows: Windows,
    rows: Array,
    choice: plain_features.VectorChoice,
    device: str,
) -> dict[str, Array]:
    """Standardised vectors [n, D] of the models, and features that need none."""
    spaces = {}
    for name, model in models.items():
        label = f"{name} vectors"
        vectors = plain_features.extract_vectors(
            model, windows, rows, [choice], device=device, label=label
        )
        spaces[name] = standardise(vectors[choice])[0]
    spaces["raw"] = standardise(extract_simple_features(windows, rows))[0]
    return spaces


def _limit_option(flag: str, value: float | None, default: float, most: float, rows: int) -> float:
    """The value of an option, None: its default, at most `most`. Raises UserError (config, exit 2)
    for a value that is 0 or beyond `most`.
    """
    if value is not None and not 0 < value <= most:
        raise usage_error(
            f"found {value:g}",
            f"expected a number above 0 and at most {most:g}, of {rows} rows",
            field=flag,
        )
    return min(default, most) if value is None else value


def _choose_vector(run: Run, readout: str, layers: str) -> plain_features.VectorChoice:
    check_choice("readout", readout or None, POOLS)
    default = plain_features.default_choice(run)
    depth = run.model().config.layers
    if layers not in {"last", "last-two"} and not (layers.isdigit() and 1 <= int(layers) <= depth):
        raise usage_error(
            f"layers {layers[:20]!r}", f"expected last, last-two or 1 to {depth}", field="--layers"
        )
    if not readout and layers == "last":
        return default
    return plain_features.VectorChoice(readout or default.readout, layers)


HOW_TO_READ = (
    "Recordings of one subject resemble each other, so vectors can be close because of the subject "
    "rather than the label. A model that has learnt the label has more neighbours of other "
    "subjects with the same label than random weights and plain features; where the silhouette by "
    "subject exceeds that by label, the model separates subjects first. Distances are those of the "
    "full space, not of the projections."
)
AGREEMENT = (
    "Share of the nearest neighbours, of other subjects only, with the same label; lines are 95 % "
    "CI over subjects. A model that does not exceed random weights and plain features has not "
    "learnt to group the labels."
)
TABLE = (
    "Full space, standardised columns, {k} neighbours{groups}. 95 % CI over subjects, of the mean "
    "over rows; neighbours and silhouettes are taken as they are, so the intervals are slightly "
    "too narrow. Evidence against learnt subject identity: a silhouette by subject no higher than "
    "that of random weights. Evidence against learnt labels: agreement at chance."
)
PCA = (
    "The same windows in three spaces, by the two directions of largest variance; colour and glyph "
    "are the label. If the labels separate in the first panel no better than in the other two, "
    "training did not separate them."
)
TSNE_LABELS = (
    "t-SNE preserves neighbours, not distances: clusters, their sizes and the gaps between them "
    "have no meaning by themselves. Read off only whether one colour clusters; the table measures "
    "that without the projection."
)
SUBJECTS = (
    "The same points, coloured by subject (up to eight with the most windows; the others are "
    "pale). Clusters of one colour are subjects: a model that encodes the label alone would mix "
    "the colours within each cluster."
)
COLUMNS = [
    "neighbours of the same label, other subjects only",
    "by chance",
    "neighbours of the same subject",
    "by chance, subject",
    "silhouette by label",
    "silhouette by subject",
]


THIRDS = "thirds of the target"


class RowGroups(NamedTuple):
    """A grouping of the rows."""

    group: Array  # [n] int, -1 = none
    names: list[str]  # of the groups
    name: str  # of the grouping


def _group_labels(windows: Windows, rows: Array, label: str) -> RowGroups:
    """Rows by class, by tertile of the target, or by one of several labels."""
    target = np.asarray(windows.targets(rows))
    if windows.task == "classification":
        return RowGroups(target.astype(np.int64), list(windows.class_names), "label")
    if windows.task == "regression":
        edges = np.quantile(target, [1 / 3, 2 / 3])
        thirds = np.searchsorted(edges, target, side="right")
        return RowGroups(thirds, ["low third", "middle third", "high third"], THIRDS)
    names = list(windows.class_names)
    check_choice("label", label or None, names)
    k = names.index(label) if label else int(np.nansum(target, axis=0).argmax())
    group = np.where(np.isfinite(target[:, k]), np.nan_to_num(target[:, k]), -1).astype(np.int64)
    return RowGroups(group, [f"without {names[k]}", names[k]], names[k])


def _select_largest(group: Array, n_groups: int) -> tuple[Array, Array]:
    """The groups with the most rows renumbered from 0, all others -1, [n]; and their former
    numbers.
    """
    counts = np.bincount(group[group >= 0], minlength=n_groups)
    largest = np.sort(np.argsort(-counts, kind="stable")[:MAX_GROUPS])
    place = np.full(n_groups + 1, -1)  # the last is that of -1
    place[largest] = np.arange(len(largest))
    return place[group], largest


def _add_measures(
    page: PageBuilder,
    measures: Mapping[str, SpaceMeasures],
    names: Mapping[str, str],
    k: int,
    label: str,
) -> None:
    bars = {names[key]: space.label_agreement for key, space in measures.items()}
    chance = measures["trained"].label_chance
    bars["chance"] = chance.model_copy(update={"lo": None, "hi": None})
    plot = BarPlot.from_metrics(bars, "share of the neighbours")
    page.figure("main-score", "Neighbours of the same label", AGREEMENT, plot, Sharing.OPEN)
    page.text(HOW_TO_READ)
    rows = [
        [
            names[key],
            space.label_agreement,
            space.label_chance.value,
            space.subject_agreement,
            space.subject_chance.value,
            space.label_silhouette,
            space.subject_silhouette,
        ]
        for key, space in measures.items()
    ]
    caption = TABLE.format(k=k, groups="" if label == "label" else f", groups by {label}")
    page.table("numbers", "Labels or subjects", caption, ["vectors", *COLUMNS], rows)


def _add_projections(
    page: PageBuilder,
    spaces: Mapping[str, Array],
    names: Mapping[str, str],
    labels: RowGroups,
    subjects: RowGroups | None,
    perplexity: float,
    seed: int,
) -> None:
    planes, shares = {}, {}
    for key, x in spaces.items():
        planes[key], share = principal_components(x, 2)
        shares[key] = f"{names[key]}, {100 * share.sum():.0f} % of the variance"
    title = f"Principal components by {labels.name}"
    page.figure("pca-labels", title, PCA, _make_scatter(planes, shares, labels))
    maps = {key: compute_tsne(x, perplexity, seed) for key, x in spaces.items()}
    points = drop_none(maps)
    if points:
        plot = _make_scatter(points, names, labels)
        page.figure("tsne-labels", f"t-SNE by {labels.name}", TSNE_LABELS, plot)
    if subjects is not None:
        name = "tsne-subjects" if points else "pca-subjects"
        plot = _make_scatter(points or planes, names, subjects)
        page.figure(name, "The same points by subject", SUBJECTS, plot)


def _make_scatter(
    planes: Mapping[str, Array], titles: Mapping[str, str], groups: RowGroups
) -> ScatterPlot:
    group, names = groups.group, groups.names
    if len(names) > MAX_GROUPS:
        group, largest = _select_largest(group, len(names))
        names = [names[k] for k in largest]
    panels = [ScatterPanel(titles[key], xy[:, 0], xy[:, 1], group) for key, xy in planes.items()]
    return ScatterPlot(panels, names)


def _verdict(measures: Mapping[str, SpaceMeasures], k: int, label: str) -> str:
    space = measures["trained"]
    trained, chance = space.label_agreement.value, space.label_chance.value
    random, raw = (measures[key].label_agreement.value for key in ("random", "raw"))
    if trained is None or random is None or raw is None or chance is None:
        return "Separation of labels cannot be measured: there is one group, or one subject."
    rows = "" if label in {"label", THIRDS} else f" of those with {label}"
    text = (
        f"Of the {k} nearest neighbours from other subjects{rows} {100 * trained:.0f} % have the "
        f"same label (random weights {100 * random:.0f} %, plain features {100 * raw:.0f} %, "
        f"chance {100 * chance:.0f} %)."
    )
    by_label, by_subject = space.label_silhouette.value, space.subject_silhouette.value
    if by_label is None or by_subject is None:
        return text
    which = "labels more than subjects" if by_label > by_subject else "subjects more than labels"
    return (
        f"{text} The silhouette is {by_label:+.2f} by label and {by_subject:+.2f} by subject: the "
        f"vectors separate {which}."
    )
