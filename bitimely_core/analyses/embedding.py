"""Does a model put together what is alike, or who is alike? Vectors of held-out windows in two dimensions, and in numbers.

The vectors of a readout are shown by their first two principal components and by t-SNE, coloured by label and by subject. A picture proves
nothing, so three numbers stand beside it, all taken in the full space on standardised columns: how many of the nearest neighbours have
the same label (neighbours of the same subject left out, else a model that knows the person would seem to know the label), how many are of
the same subject, and the silhouette by label and by subject. Each beside chance, random weights, and features that need no model.

Legend: n rows, D width of a vector, k neighbours, K classes or labels, U subjects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bitimely_core import evaluate
from bitimely_core.analyses import features
from bitimely_core.analyses.features import VectorChoice
from bitimely_core.analyses.regions import draw_held_out
from bitimely_core.errors import Reason, input_error, usage_error
from bitimely_core.evaluate.linear import extract_simple_features, standardise
from bitimely_core.models.heads import POOLS
from bitimely_core.page import Figure, Page, Table
from bitimely_core.registry import AnalysisFacts, analyses, unknown
from bitimely_core.types import Progress

if TYPE_CHECKING:
    from bitimely_core.analyses import LoadedRun
    from bitimely_core.tokens import Windows

Array = npt.NDArray[Any]

DEFAULT_ROWS = 600  # rows
MAX_GROUPS = 8  # groups with a colour of their own
TSNE_COMPONENTS = 50  # principal components that t-SNE starts from
THIRDS = ("low third", "middle third", "high third")  # of a regression's targets


# --- numbers ------------------------------------------------------------------------------------------------------------------------------


def nearest_neighbours(x: Array, k: int, allowed: Array) -> Array:
    """The k nearest rows of each row among those that `allowed` [n, n] permits, [n, k]; -1 where there are fewer. Euclidean."""
    from scipy.spatial.distance import cdist

    distance = np.where(allowed, cdist(x, x), np.inf)
    np.fill_diagonal(distance, np.inf)
    k = min(k, len(x) - 1)
    order = np.argsort(distance, axis=1, kind="stable")[:, :k]
    return np.where(np.isfinite(np.take_along_axis(distance, order, 1)), order, -1)


def neighbour_agreement(nearest: Array, group: Array) -> Array:
    """Share of each row's neighbours that are of its group, [n]; NaN without neighbours or group (-1)."""
    there = nearest >= 0
    same = (group[nearest] == group[:, None]) & there
    with np.errstate(invalid="ignore"):
        share = same.sum(1) / there.sum(1)
    return np.where(group >= 0, share, np.nan)


def chance_agreement(group: Array, allowed: Array) -> Array:
    """Share of all permitted rows that are of its group, [n]: what `agreement` expects of neighbours at random."""
    allowed = allowed & ~np.eye(len(group), dtype=bool)
    with np.errstate(invalid="ignore"):
        share = (allowed & (group[:, None] == group)).sum(1) / allowed.sum(1)
    return np.where(group >= 0, share, np.nan)


def compute_silhouettes(x: Array, group: Array) -> Array:
    """Silhouette of each row, [n] in -1 .. 1: near 1 = far nearer to its own group than to the next one; NaN without two groups."""
    from sklearn.metrics import silhouette_samples

    kept = group >= 0
    out = np.full(len(group), np.nan)
    if 2 <= len(np.unique(group[kept])) < kept.sum():
        out[kept] = silhouette_samples(x[kept], group[kept])
    return out


def mean_over_rows(values: Array, units: Array, n_units: int, bootstrap: int, seed: int) -> dict[str, Any]:
    """Mean of per-row values as a metric object, with an interval over subjects. The values themselves are not recomputed in a replicate."""
    known = np.isfinite(values)
    if not known.any():
        return features.make_metric(np.array(np.nan), np.empty(0), n_units, bootstrap)
    total = np.bincount(units[known], values[known], n_units)
    count = np.bincount(units[known], minlength=n_units).astype(float)
    draws = evaluate.draw_counts(range(bootstrap), n_units, seed) if bootstrap else np.zeros((0, n_units))
    with np.errstate(invalid="ignore"):
        return features.make_metric(total.sum() / count.sum(), (draws @ total) / (draws @ count), n_units, bootstrap)


def measure_space(
    x: Array, label: Array, units: Array, n_units: int, k: int, bootstrap: int, seed: int, counted: Array | None = None
) -> dict[str, Any]:
    """The numbers of one space.

    Args:
        x: [n, D] standardised.
        label: [n] groups of the labels, -1 = none.
        units: [n] subjects as numbers from 0.
        n_units: U.
        k: neighbours.
        bootstrap: replicates over subjects.
        seed: of the draws.
        counted: [n] bool, rows whose neighbours are looked at for the label; None = all. Of a rare label those that have it: the others
            mostly have neighbours without it whatever the space.

    Returns:
        Metric objects `label_agreement`, `label_chance`, `subject_agreement`, `subject_chance`, `label_silhouette`, `subject_silhouette`.
    """
    other = units[:, None] != units if n_units > 1 else np.ones((len(units), len(units)), dtype=bool)
    anybody = np.ones_like(other)
    several = np.bincount(units, minlength=n_units)[units] > 1  # a subject of one row has no neighbour of its own
    person = np.where(several, units, -1) if n_units > 1 else np.full(len(units), -1)
    seen = np.ones(len(x), dtype=bool) if counted is None else counted
    values = {
        "label_agreement": np.where(seen, neighbour_agreement(nearest_neighbours(x, k, other), label), np.nan),
        "label_chance": np.where(seen, chance_agreement(label, other), np.nan),
        "subject_agreement": neighbour_agreement(nearest_neighbours(x, k, anybody), person),
        "subject_chance": chance_agreement(person, anybody),
        "label_silhouette": compute_silhouettes(x, label),
        "subject_silhouette": compute_silhouettes(x, person),
    }
    return {name: mean_over_rows(v, units, n_units, bootstrap, seed) for name, v in values.items()}


# --- pictures -----------------------------------------------------------------------------------------------------------------------------


def principal_components(x: Array, parts: int) -> tuple[Array, Array]:
    """The first principal components [n, parts] and their shares of the variance; signs so that the largest entry is positive."""
    centred = x - x.mean(0)
    u, s, _ = np.linalg.svd(centred, full_matrices=False)
    out = (u * s)[:, :parts]
    out *= np.sign(out[np.abs(out).argmax(0), np.arange(out.shape[1])] + 1e-300)
    out = np.pad(out, ((0, 0), (0, max(0, parts - out.shape[1]))))
    share = s**2 / max(float((s**2).sum()), 1e-300)
    return out, share[:parts]


def compute_tsne(x: Array, perplexity: float, seed: int) -> Array | None:
    """t-SNE of scikit-learn from the first 50 principal components, [n, 2]; None below ten rows."""
    from sklearn.manifold import TSNE

    if len(x) < 10:
        return None
    start = principal_components(x, min(TSNE_COMPONENTS, x.shape[1], len(x)))[0]
    perplexity = min(perplexity, (len(x) - 1) / 3)
    if start.shape[1] < 2 or not start.std(0)[:2].all():
        return None
    return np.asarray(TSNE(2, perplexity=perplexity, init="pca", random_state=seed, max_iter=750).fit_transform(start), np.float64)


# --- the analysis -------------------------------------------------------------------------------------------------------------------------


@analyses(
    AnalysisFacts(
        takes="run", scores=True, help="Does the model know the label or the person? Vectors in two dimensions, neighbours, silhouettes"
    )
)
def embedding(
    runs: list[LoadedRun],
    *,
    sequences: int = DEFAULT_ROWS,
    readout: str = "",
    layers: str = "last",
    neighbours: int = 10,
    perplexity: float = 30.0,
    label: str = "",
    bootstrap: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Page:
    """Vectors of held-out windows: pictures by label and by subject, neighbours and silhouettes, beside what training did not bring.

    Args:
        runs: one run, pre-trained or fine-tuned; `--data` names a labelled view.
        sequences: rows, drawn at random from the test split.
        readout: a key of `heads.POOLS`; "" = what fine-tuning reads.
        layers: last, last-two, or the number of a layer.
        neighbours: k.
        perplexity: of t-SNE.
        label: of a view with several labels the one that is looked at; "" = the most frequent.
        bootstrap: replicates, over subjects.
        seed: of rows, random weights, draws and t-SNE.
        progress: told about the vectors.

    Returns:
        A page; its summary holds `spaces`: trained, random, raw -> the numbers of `measured`. No subject is named.

    Raises:
        UserError: windows without labels, unknown readout or label (exit 2); no_input without rows.
    """
    run = runs[0]
    windows = features.require_labels(run, "embedding")
    rows, split = draw_held_out(windows, sequences, seed)
    if len(rows) < 3:
        raise input_error(Reason.NO_INPUT, f"{len(rows)} rows in the {split} split", "expected at least 3", "Tokenize more subjects")
    if readout and readout not in POOLS:
        raise unknown("readout", readout, list(POOLS))
    own = features.default_choice(run)
    cell = VectorChoice(readout or own.readout, layers if readout or layers != "last" else own.layers)
    depth = int(run.model.config.layers)  # type: ignore[union-attr, arg-type]
    if layers not in {"last", "last-two"} and not (layers.isdigit() and 1 <= int(layers) <= depth):
        raise usage_error(f"layers {layers[:20]!r}", f"expected last, last-two or 1 to {depth}", field="--layers")
    group, names, about = _group_labels(windows, rows, label)
    counted = group == 1 if windows.task == "multilabel" else None
    units, n_units = features.number_subjects(windows.whole_index["subject_id"].to_numpy()[rows], seed)
    spaces: dict[str, Array] = {}
    for name, model in (("trained", run.model), ("random", features.random_weights(run.model, seed))):
        spaces[name] = features.extract_vectors(model, windows, rows, [cell], progress=progress, what=f"{name} vectors")[cell]
    spaces["raw"] = extract_simple_features(windows, rows)
    spaces = {name: standardise(x)[0] for name, x in spaces.items()}
    words = {
        "trained": run.name,
        "random": "random weights",
        "raw": "counts of codes" if hasattr(windows, "vocabulary") else "means and spectra",
    }
    found = {name: measure_space(x, group, units, n_units, neighbours, bootstrap, seed, counted) for name, x in spaces.items()}
    flat = {name: principal_components(x, 2) for name, x in spaces.items()}
    maps = {name: compute_tsne(x, perplexity, seed) for name, x in spaces.items()}
    drawn = {name: m for name, m in maps.items() if m is not None}
    person, persons = _group_subjects(units, n_units)
    blocks: list[Figure | Table | str] = [_headline(found, words), HOW_TO_READ, _table(found, words, neighbours, about)]
    shares = {name: f"{words[name]}, {100 * share.sum():.0f} % of the variance" for name, (_, share) in flat.items()}
    blocks.append(
        _scatter("pca-labels", f"Principal components by {about}", PCA, {n: m for n, (m, _) in flat.items()}, shares, group, names)
    )
    if drawn:
        blocks.append(_scatter("tsne-labels", f"t-SNE by {about}", TSNE_LABELS, drawn, words, group, names))
    if n_units < len(rows):
        blocks.append(
            _scatter(
                "tsne-subjects" if drawn else "pca-subjects",
                "The same by subject",
                SUBJECTS,
                drawn or {n: m for n, (m, _) in flat.items()},
                words,
                person,
                persons,
            )
        )
    else:
        blocks.append("Every subject has one sequence here, so nothing can be said about whether a vector tells the person.")
    said = features.notices(run, split, n_units)
    if len(rows) < len(windows[split]):
        said.append(f"{len(rows):,} of the {len(windows[split]):,} {split} windows were used (--sequences).")
    if windows.task == "regression":
        said.append("The targets are numbers; their thirds stand for labels.")
    return Page(
        title=f"Vectors of {run.name}",
        verdict=_verdict(found, neighbours, about),
        notices=list(dict.fromkeys(said)),
        blocks=blocks,
        facts=features.facts(
            run,
            seed,
            {
                "Rows": f"{len(rows):,} of the {split} split, {n_units} subjects, numbered at random",
                "Vector": f"{cell.words()}, {spaces['trained'].shape[1]} numbers",
                "Neighbours": str(neighbours),
                "t-SNE": f"perplexity {min(perplexity, (len(rows) - 1) / 3):.3g}, from {TSNE_COMPONENTS} principal components",
            },
        ),
        summary={
            "run": run.name,
            "data": windows.name,
            "split": split,
            "n": len(rows),
            "n_subjects": n_units,
            "readout": cell.readout,
            "layers": cell.layers,
            "label": about,
            "neighbours": neighbours,
            "spaces": found,
            "seed": seed,
        },
    )


HOW_TO_READ = (
    "Recordings of one person resemble each other, so vectors can lie together because of the person and not of the label. A model that has "
    "learnt the label has neighbours of other persons with the same label, more than random weights and plain features have; a model whose "
    "silhouette by subject is above that by label sorts persons first. Distances are those in the full space, not in the pictures."
)
PCA = (
    "The same windows in three spaces, by the two directions of largest variance; colour and glyph are the label. If the labels lie apart in the "
    "first panel no better than in the other two, training did not put them apart."
)
TSNE_LABELS = (
    "t-SNE keeps neighbours and invents distances: islands, their sizes and the gaps between them mean nothing by themselves. Only whether one colour "
    "keeps to itself can be read off, and the table says that without the picture."
)
SUBJECTS = (
    "The same points, coloured by subject (up to eight with the most windows; the others are pale). Islands of one colour are persons: a model that knew the "
    "label alone would mix the colours inside each island."
)
MEASURES = {
    "label_agreement": "neighbours of the same label, other subjects only",
    "label_chance": "by chance",
    "subject_agreement": "neighbours of the same subject",
    "subject_chance": "by chance, subject",
    "label_silhouette": "silhouette by label",
    "subject_silhouette": "silhouette by subject",
}


def _group_labels(windows: Windows, rows: Array, label: str) -> tuple[Array, list[str], str]:
    """The group of each row for its label, the groups' names, and what they are groups of."""
    target = np.asarray(windows.targets(rows))
    if windows.task == "classification":
        return target.astype(np.int64), list(windows.class_names), "label"
    if windows.task == "regression":
        edges = np.quantile(target, [1 / 3, 2 / 3])
        return np.searchsorted(edges, target, side="right"), list(THIRDS), "thirds of the target"
    names = list(windows.class_names)
    if label and label not in names:
        raise unknown("label", label, names)
    k = names.index(label) if label else int(np.nansum(target, axis=0).argmax())
    column = target[:, k]
    return np.where(np.isfinite(column), np.nan_to_num(column), -1).astype(np.int64), [f"without {names[k]}", names[k]], names[k]


def _group_subjects(units: Array, n_units: int) -> tuple[Array, list[str]]:
    """Groups for colouring by subject: those with the most rows by a number, the others none."""
    counts = np.bincount(units, minlength=n_units)
    largest = np.sort(np.argsort(-counts, kind="stable")[:MAX_GROUPS])
    place = np.full(n_units, -1)
    place[largest] = np.arange(len(largest))
    return place[units], [f"subject {k + 1}" for k in range(len(largest))]


def _scatter(
    name: str, title: str, caption: str, maps: Mapping[str, Array], words: Mapping[str, str], group: Array, names: list[str]
) -> Figure:
    shown = group
    if len(names) > MAX_GROUPS:  # the most frequent classes; the others pale
        counts = np.bincount(group[group >= 0], minlength=len(names))
        kept = np.sort(np.argsort(-counts, kind="stable")[:MAX_GROUPS])
        place = np.full(len(names) + 1, -1)
        place[kept] = np.arange(MAX_GROUPS)
        shown, names = place[group], [names[k] for k in kept]
    panels = [{"name": words[key], "x": m[:, 0], "y": m[:, 1], "group": shown} for key, m in maps.items()]
    return Figure(
        name=name, title=title, caption=caption, kind="scatter", data={"panels": panels, "groups": names, "xlabel": "", "ylabel": ""}
    )


def _headline(found: dict[str, dict[str, Any]], words: dict[str, str]) -> Figure:
    shown = {words[name]: m["label_agreement"] for name, m in found.items()} | {
        "chance": found["trained"]["label_chance"] | {"lo": None, "hi": None}
    }
    shown = {name: m for name, m in shown.items() if m["value"] is not None}
    return Figure(
        name="main-score",
        title="Neighbours of the same label",
        caption="Share of the nearest neighbours, those of other subjects only, that have the same label; lines are 95 % intervals over subjects. "
        "A model that does not clear random weights and plain features has not learnt to put the labels together.",
        kind="bars",
        data={
            "names": list(shown),
            "values": [m["value"] for m in shown.values()],
            "lo": [m["lo"] for m in shown.values()],
            "hi": [m["hi"] for m in shown.values()],
            "ylabel": "share of the neighbours",
        },
    )


def _table(found: dict[str, dict[str, Any]], words: dict[str, str], k: int, about: str) -> Table:
    return Table(
        name="numbers",
        title="The label or the person?",
        caption=f"In the full space on standardised columns, {k} neighbours{'' if about == 'label' else f', groups by {about}'}. Intervals over subjects, of the mean over rows; neighbours and "
        "silhouettes are not found anew in each resample, so they are a little too narrow. A silhouette by subject that is not above that of random weights "
        "would refute that training made persons distinct; a label agreement at chance that the labels are there at all.",
        columns=["vectors", *MEASURES.values()],
        rows=[[words[name], *(m[key] if not key.endswith("chance") else m[key]["value"] for key in MEASURES)] for name, m in found.items()],
    )


def _verdict(found: dict[str, dict[str, Any]], k: int, about: str) -> str:
    own, random, raw = (found[name] for name in ("trained", "random", "raw"))
    if own["label_agreement"]["value"] is None:
        return "Nothing can be said about labels here: there is one group alone, or one subject."
    text = (
        f"Of the {k} nearest neighbours from other subjects{'' if about in {'label', 'thirds of the target'} else f' of those with {about}'} {100 * own['label_agreement']['value']:.0f} % have the same label "
        f"(random weights {100 * random['label_agreement']['value']:.0f} %, plain features {100 * raw['label_agreement']['value']:.0f} %, "
        f"chance {100 * own['label_chance']['value']:.0f} %)."
    )
    label, person = own["label_silhouette"]["value"], own["subject_silhouette"]["value"]
    if label is None or person is None:
        return text
    which = "labels more than persons" if label > person else "persons more than labels"
    return f"{text} The silhouette is {label:+.2f} by label and {person:+.2f} by subject: the vectors tell {which}."
