"""How many directions do the layers really mix in? Singular values of retention and attention maps, with the controls that explain them.

R [N, N] of every layer and head on held-out sequences, in float64, without [SOS], [EOS] and padding. The singular values s_1 >= .. >= s_N
of each map are divided by their own sum, cumulated, and only then averaged over sequences. Full rank says nothing: any triangular map with
a non-zero diagonal has it. The effective rank exp(-sum p ln p) / N, p = s / sum s, is the measure, and most of it is the triangular mask,
so the same figure always shows the decay alone, q k^T alone (its rank is at most K), the same architecture with random weights, and the
composition R_b R_f that a pair of layers really applies, beside the combination tril(R_f) + triu(R_b, 1) of the paper.

Legend: S sequences, H heads, N tokens, K key width of a head, G points of a curve.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bitimely_core.analyses import start_page
from bitimely_core.analyses.attention import LayerMixing, combine_pair, compute_mixings, draw_batches, randomise_model, to_float64
from bitimely_core.page import Figure, Page, Table
from bitimely_core.registry import AnalysisFacts, analyses, unknown
from bitimely_core.types import Progress

if TYPE_CHECKING:
    from bitimely_core.run import Run

Array = npt.NDArray[np.float64]
SpectraByLayer = dict[int, dict[str, "Spectra"]]  # layer (from 1) -> matrix -> spectra

ENOUGH = 32  # sequences
MEASURES = ("effective_rank", "n90", "auc", "stable_rank", "log_det", "condition", "numerical_rank")
ROW_NORMS = ("none", "sqrt-decay", "abs-sum")
WORDS = {
    "map": "the layer's map",
    "random": "random weights",
    "scores": "q kᵀ alone",
    "alone": "decay or mask alone",
    "combined": "pair combined",
    "combined_random": "pair combined, random weights",
    "composed": "pair composed",
    "composed_random": "pair composed, random weights",
}


# --- singular values ----------------------------------------------------------------------------------------------------------------------


def log_det_triangular(maps: Array) -> Array:
    """Logarithm of |det| of triangular maps [..., N, N]."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.abs(np.diagonal(maps, axis1=-2, axis2=-1))).sum(-1))


def singular_values(maps: Array) -> tuple[Array, Array]:
    """Singular values, descending, [H, N], and log |det| [H] of maps [H, N, N].

    One map a core: threads inside a matrix of this size get in each other's way.
    """
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # a requirement of scikit-learn

    def one(matrix: Array) -> tuple[Array, float]:
        triangular = not np.triu(matrix, 1).any() or not np.tril(matrix, -1).any()
        with np.errstate(divide="ignore"):
            log_det = log_det_triangular(matrix) if triangular else np.linalg.slogdet(matrix)[1]
        return np.asarray(np.linalg.svd(matrix, compute_uv=False), np.float64), float(log_det)

    with threadpool_limits(1, "blas"), ThreadPoolExecutor(os.cpu_count()) as pool:
        values, log_dets = zip(*pool.map(one, maps), strict=True)
    return np.stack(values), np.array(log_dets)


def product_singular_values(queries: Array, keys: Array) -> tuple[Array, Array]:
    """As `factored`, of queries keys^T, both [H, N, K]: from the K x K product of their triangular factors, the other N - K are exactly 0."""
    heads, n, k = queries.shape
    if k >= n:
        return singular_values(queries @ keys.transpose(0, 2, 1))
    left, right = (np.asarray(np.linalg.qr(part, mode="r")) for part in (queries, keys))
    values = np.linalg.svd(left @ right.transpose(0, 2, 1), compute_uv=False)
    return np.concatenate([values, np.zeros((heads, n - k))], axis=1), np.full(heads, -np.inf)


def measure_rank(singular: Array, log_det: float) -> dict[str, float]:
    """What the singular values of one map say. All but `log_det` and `condition` are fractions of N.

    Args:
        singular: [N] float64, descending.
        log_det: log |det| of the map, from its LU factors: a product of rounded small singular values would be noise.

    Returns:
        `effective_rank` exp(entropy of s / sum s) / N; `n90` smallest k / N with 90 % of the sum; `auc` mean of the cumulated shares (0.5
        flat, 1 rank one); `stable_rank` sum s^2 / s_1^2 / N; `log_det`; `condition` s_1 / s_N; `numerical_rank` share of the s above
        s_1 N eps(float32). All NaN for a map of zeros.
    """
    n, total = len(singular), float(singular.sum())
    if total <= 0:
        return dict.fromkeys(MEASURES, np.nan)
    p = singular / total
    cumulated = np.cumsum(p)
    entropy = -float((p[p > 0] * np.log(p[p > 0])).sum())
    largest = float(singular[0])
    return {
        "effective_rank": float(np.exp(entropy)) / n,
        "n90": float((cumulated < 0.9 * (1 - 1e-12)).sum() + 1) / n,
        "auc": float(cumulated.mean()),
        "stable_rank": float((singular**2).sum()) / largest**2 / n,
        "log_det": log_det,
        "condition": largest / float(singular[-1]) if singular[-1] > 0 else np.inf,
        "numerical_rank": float((singular > largest * n * np.finfo(np.float32).eps).mean()),
    }


def cumulate_shares(singular: Array, points: int) -> Array:
    """Share of the sum of singular values in the largest k, at k / N = 1/G .. 1, [G]; exact where G = N. From [N], descending."""
    n, total = len(singular), float(singular.sum())
    if total <= 0:
        return np.full(points, np.nan)
    return np.interp(np.arange(1, points + 1) / points, np.arange(n + 1) / n, np.concatenate([[0.0], np.cumsum(singular) / total]))


class Spectra:
    """Curves and measures of one matrix of one layer, sequence by sequence and head by head."""

    def __init__(self) -> None:
        self.singular: list[Array] = []  # S times [H, N]
        self.found: list[list[dict[str, float]]] = []  # S times H
        self._last: Array | None = None

    def add(self, maps: Array) -> None:
        """The maps [H, N, N] of one more sequence. Equal ones (a decay on a regular clock) are not factored again."""
        if self._last is not None and np.array_equal(maps, self._last):
            self.singular.append(self.singular[-1])
            self.found.append(self.found[-1])
        else:
            self._last = maps
            self.note(*singular_values(maps))

    def note(self, singular: Array, log_dets: Array) -> None:
        """Singular values [H, N] and log |det| [H] of one more sequence."""
        self.singular.append(singular)
        self.found.append([measure_rank(s, float(d)) for s, d in zip(singular, log_dets, strict=True)])

    def curves(self, points: int) -> Array:
        """[S, H, G]."""
        return np.array([[cumulate_shares(s, points) for s in of_heads] for of_heads in self.singular])

    def table(self, head: int | None = None) -> dict[str, float | None]:
        """Means over sequences (and heads, for None), the median of the condition number, and the deviation of the effective rank."""
        out: dict[str, float | None] = {}
        for name in MEASURES:
            values = np.array([[m[name] for m in (heads if head is None else heads[head : head + 1])] for heads in self.found])
            middle = np.median(values) if name == "condition" else values.mean()
            out[name] = float(middle) if np.isfinite(middle) else None
            if name == "effective_rank":
                out["effective_rank_sd"] = float(values.mean(1).std()) if np.isfinite(middle) else None
        return out


def normalise_map(mixing: LayerMixing, how: str) -> LayerMixing:
    """The map with its rows rescaled: R is only defined up to a positive factor a row, because a norm follows.

    `sqrt-decay` divides row n by the root of the sum of its decays (retention only), `abs-sum` by the sum of its magnitudes.
    """
    if how == "abs-sum":
        scale = np.abs(mixing.map).sum(-1, keepdims=True)
    elif how == "sqrt-decay" and mixing.gammas and mixing.alone is not None:
        scale = np.sqrt(mixing.alone.sum(-1, keepdims=True))
    else:
        return mixing
    return mixing._replace(map=np.divide(mixing.map, scale, out=np.zeros_like(mixing.map), where=scale > 0))


def collect_spectra(run: Run, sequences: int, seed: int, row_norm: str, progress: Progress | None) -> tuple[SpectraByLayer, dict[str, Any]]:
    """The spectra of every layer of a run with its controls, and what they were taken from."""
    batches, _, split = draw_batches(run.windows(), sequences, seed)
    trained, random = to_float64(run.model()), randomise_model(run.model(), seed)
    found: SpectraByLayer = {}
    tokens: list[int] = []
    layers: list[LayerMixing] = []
    for k, batch in enumerate(batches):
        layers, control = ([normalise_map(m, row_norm) for m in compute_mixings(model, batch)] for model in (trained, random))
        tokens.append(layers[0].map.shape[-1])
        for layer, (mixing, other) in enumerate(zip(layers, control, strict=True), 1):
            of_layer = found.setdefault(layer, {})
            for name, maps in {"map": mixing.map, "random": other.map, "alone": mixing.alone}.items():
                if maps is not None:
                    of_layer.setdefault(name, Spectra()).add(maps)
            if mixing.queries is not None and mixing.keys is not None:
                of_layer.setdefault("scores", Spectra()).note(*product_singular_values(mixing.queries, mixing.keys))
            for name, (before, here) in {"": (layers[layer - 2], mixing), "_random": (control[layer - 2], other)}.items():
                combined = combine_pair(before, here) if layer > 1 else None
                if combined is not None:
                    of_layer.setdefault(f"combined{name}", Spectra()).add(combined)
                    log_dets = log_det_triangular(before.map) + log_det_triangular(here.map)  # that of the product itself would be rounding
                    of_layer.setdefault(f"composed{name}", Spectra()).note(singular_values(here.map @ before.map)[0], log_dets)
        if progress is not None:
            progress(f"svd {run.name}", k + 1, len(batches))
    about = {
        "split": split,
        "sequences": len(batches),
        "tokens": tokens,
        "key_width": layers[0].key_width,
        "gammas": [list(m.gammas) for m in layers],
        "directions": [m.direction for m in layers],
    }
    return found, about


# --- the analysis -------------------------------------------------------------------------------------------------------------------------


@analyses(
    AnalysisFacts(takes="runs", help="Singular values of the maps, layer by layer and head by head, with the controls that explain them")
)
def svd(runs: list[Run], *, sequences: int = ENOUGH, row_norm: str = "none", seed: int = 0, progress: Progress | None = None) -> Page:
    """Effective rank of retention and attention maps, beside decay alone, q k^T alone, random weights and the composition of a pair.

    Args:
        runs: any models with attention maps. Runs on the same windows see the same sequences; with other numbers of tokens they get figures
            of their own.
        sequences: held-out sequences to average over.
        row_norm: none (the raw map, as in the paper), sqrt-decay or abs-sum.
        seed: of the choice of sequences and of the random weights.
        progress: told about the sequences.

    Returns:
        A page; its summary is keyed by run, layer, head ("mean" over heads too) and matrix.

    Raises:
        UserError: unknown row normalisation or a model without maps (exit 2); no_input without windows.
    """
    if row_norm not in ROW_NORMS:
        raise unknown("row normalisation", row_norm, list(ROW_NORMS))
    found, about = {}, {}
    for run in runs:
        found[run.name], about[run.name] = collect_spectra(run, sequences, seed, row_norm, progress)
    blocks: list[Figure | Table | str] = [_main_figure(found), HOW_TO_READ]
    together: dict[int, list[str]] = {}
    for name, facts in about.items():
        together.setdefault(max(facts["tokens"]), []).append(name)
    for points, names in together.items():
        if len(names) > 1:
            blocks.append(_comparison({n: found[n] for n in names}, {n: about[n] for n in names}, points))
    for run in runs:
        blocks += [f"## {run.name}", *_of_run(run.name, found[run.name], about[run.name])]
    counts = sorted({facts["sequences"] for facts in about.values()})
    start = start_page("", runs, [facts["split"] for facts in about.values()], seed)
    return Page(
        title="Rank of the maps of " + " and ".join(about),
        verdict=_verdict(found, about),
        notices=[*start.notices, *_notices(about, counts)],
        blocks=blocks,
        facts={
            **start.facts,
            "Sequences": f"{' and '.join(map(str, counts))}, the same for runs on the same windows",
            "Tokens": ", ".join(f"{name}: {_format_range(facts['tokens'])}" for name, facts in about.items()),
            "Key width of a head": ", ".join(f"{name}: {facts['key_width'] or 'not known'}" for name, facts in about.items()),
            "Row normalisation": row_norm,
        },
        summary={name: _summary(of_run) for name, of_run in found.items()}
        | {"options": {"row_norm": row_norm, "seed": seed, "runs": about}},
    )


HOW_TO_READ = (
    "A map with few directions copies the same few mixtures into every token. The effective rank says how many of the N directions carry "
    "weight: 1 / N when one does, 1 when all do alike. It is not the rank: a triangular map with a non-zero diagonal always has full rank, "
    "which says nothing. Compare a trained map with the controls: the mask and the decay are there before training, a product q kᵀ has at "
    "most K directions, and a pair of layers really applies the composition of its maps, which has far fewer than their combination."
)
SPECTRA = (
    "Share of the sum of singular values in the largest k, mean over sequences and heads, bands one standard deviation over sequences. "
    "Further left: fewer directions. If training had raised the rank, the trained curve would lie below that of random weights."
)
LAYERS = (
    "Means over heads; bands are one standard deviation over sequences. A finding about training is the gap between a trained map and "
    "random weights, not the height of either. Softmax maps depend on the scale of their logits, so only trained ones at equal K and N "
    "compare. Pairs stand at their second layer."
)
BY_HEAD = (
    "One curve a head. Heads with γ nearer to 1 remember longer and keep fewer directions: the decay matters more than the direction. "
    "Curves that do not order by γ would speak against that."
)
TABLE = (
    "Fractions of N but for log |det| and the condition number (median). AUC of the cumulated shares: 0.5 flat, 1 rank one. The numerical "
    "rank counts singular values that float32 can tell from zero. Beyond a condition number of 10¹⁵ the smallest one is lost in float64."
)


def _format_range(tokens: list[int]) -> str:
    low, high = min(tokens), max(tokens)
    return str(low) if low == high else f"{low} to {high}"


def _main_matrix(found: SpectraByLayer) -> tuple[int, str]:
    """Layer and matrix that stand for a run: the last pair of an alternating model, else the last layer."""
    last = max(found)
    return last, "combined" if "combined" in found[last] else "map"


def _list_controls(found: SpectraByLayer) -> list[str]:
    """The matrices that are drawn beside it."""
    last, main = _main_matrix(found)
    return [name for name in (f"{main}_random" if main != "map" else "random", "composed", "scores", "alone") if name in found[last]]


def _main_figure(found: dict[str, SpectraByLayer]) -> Figure:
    """Effective ranks: the runs, then the controls of the first of them."""
    names, values = [], []
    for run, of_run in found.items():
        layer, main = _main_matrix(of_run)
        names.append(run)
        values.append(of_run[layer][main].table()["effective_rank"])
    first = next(iter(found.values()))
    layer, main = _main_matrix(first)
    for control in _list_controls(first):
        names.append(WORDS[control].removeprefix(f"{WORDS[main]}, "))
        values.append(first[layer][control].table()["effective_rank"])
    where = f"layers {layer - 1} and {layer} (tril(R_f) + triu(R_b, 1))" if main == "combined" else f"layer {layer}"
    caption = (
        f"Share of the N directions that carry weight in {where}, mean over sequences and heads; the others are controls of {names[0]}."
    )
    return Figure(
        name="main-score",
        title="Effective rank",
        caption=caption,
        kind="bars",
        data={"names": names, "values": values, "ylabel": "effective rank / N"},
    )


def _series(name: str, spectra: Spectra, points: int, head: int | None = None) -> dict[str, Any]:
    """A curve: over heads the mean, over sequences mean and deviation."""
    curves = spectra.curves(points)
    over = curves.mean(1) if head is None else curves[:, head]
    mean, sd = over.mean(0), over.std(0)
    return {"name": name, "x": np.arange(1, points + 1) / points, "y": mean, "lo": np.clip(mean - sd, 0, 1), "hi": np.clip(mean + sd, 0, 1)}


def _comparison(found: dict[str, SpectraByLayer], about: dict[str, dict[str, Any]], points: int) -> Figure:
    series = []
    for name, of_run in found.items():
        layer, main = _main_matrix(of_run)
        width = about[name]["key_width"]
        label = f"{name}, K = {width}" if width else name
        series += [_series(label, of_run[layer][main], points)]
        series += [_series(f"{label}, random weights", of_run[layer]["random" if main == "map" else f"{main}_random"], points)]
    return Figure(
        name=f"comparison-{points}",
        title=f"The runs beside each other, N = {points}",
        caption=f"{SPECTRA} Runs compare at equal K only.",
        kind="lines",
        data={"series": series, "xlabel": "k / N", "ylabel": "share of the sum"},
    )


def _of_run(name: str, found: SpectraByLayer, about: dict[str, Any]) -> Iterator[Figure | Table]:
    points = max(about["tokens"])
    layer, main = _main_matrix(found)
    width = f", K = {about['key_width']}" if about["key_width"] else ""
    label = (
        f"layers {layer - 1} and {layer} combined"
        if main == "combined"
        else f"{about['directions'][-1].replace('both', 'two-sided')} layer {layer}"
    )
    series = [_series(label, found[layer][main], points)]
    if main == "combined":
        series += [
            _series(f"forward layer {layer - 1}", found[layer - 1]["map"], points),
            _series(f"backward layer {layer}", found[layer]["map"], points),
        ]
    series += [_series(WORDS[control], found[layer][control], points) for control in _list_controls(found)]
    axes = {"xlabel": "k / N", "ylabel": "share of the sum"}
    yield Figure(
        name=f"spectra-{name}",
        title=f"Cumulated singular values, N = {points}{width}",
        caption=SPECTRA,
        kind="lines",
        data={"series": series, **axes},
    )
    by_layer = []
    for matrix, words in WORDS.items():
        layers = [k for k in found if matrix in found[k]]
        if layers:
            tables = [found[k][matrix].table() for k in layers]
            mean, sd = (
                np.array([np.nan if t[key] is None else t[key] for t in tables], float) for key in ("effective_rank", "effective_rank_sd")
            )
            by_layer.append({"name": words, "x": np.array(layers), "y": mean, "lo": mean - sd, "hi": mean + sd})
    yield Figure(
        name=f"layers-{name}",
        title="Effective rank, layer by layer",
        caption=LAYERS,
        kind="lines",
        data={"series": by_layer, "xlabel": "layer", "ylabel": "effective rank / N"},
    )
    gammas = about["gammas"][layer - 1]
    heads = range(len(found[layer][main].found[0]))
    per_head = [_series(f"head {h + 1}" + (f", γ {gammas[h]:.4f}" if gammas else ""), found[layer][main], points, h) for h in heads]
    yield Figure(name=f"heads-{name}", title=f"Head by head: {label}", caption=BY_HEAD, kind="lines", data={"series": per_head, **axes})
    columns = ["effective rank", "sd", "n90", "AUC", "stable rank", "log |det|", "condition", "numerical rank"]
    order = ("effective_rank", "effective_rank_sd", *MEASURES[1:])
    rows = [
        [k, WORDS[matrix], *(t[c] for c in order)]
        for k in found
        for matrix in WORDS
        if matrix in found[k] and (t := found[k][matrix].table())
    ]
    yield Table(name=f"table-{name}", title="Layer by layer", caption=TABLE, columns=["layer", "matrix", *columns], rows=rows)
    rows = [
        [k, h + 1, WORDS[matrix], *(t[c] for c in order)]
        for k in found
        for h in heads
        for matrix in WORDS
        if matrix in found[k] and (t := found[k][matrix].table(h))
    ]
    yield Table(name=f"table-heads-{name}", title="Head by head", caption=TABLE, columns=["layer", "head", "matrix", *columns], rows=rows)


def _summary(found: SpectraByLayer) -> dict[str, Any]:
    """Measures keyed by layer, head and matrix."""
    out: dict[str, Any] = {}
    for layer, matrices in found.items():
        heads = len(next(iter(matrices.values())).found[0])
        out[str(layer)] = {
            "mean" if h is None else str(h + 1): {name: spectra.table(h) for name, spectra in matrices.items()}
            for h in (None, *range(heads))
        }
    return out


def _notices(about: dict[str, dict[str, Any]], counts: list[int]) -> list[str]:
    out = []
    if min(counts) < ENOUGH:
        out.append(f"Averages over {min(counts)} sequences; {ENOUGH} or more are advised.")
    widths = {facts["key_width"] for facts in about.values()}
    if len(widths) > 1:
        said = ", ".join(f"{name}: {facts['key_width'] or 'not known'}" for name, facts in about.items())
        out.append(f"The runs have different key widths ({said}), which bounds the rank of q kᵀ: their maps do not compare.")
    if len({max(facts["tokens"]) for facts in about.values()}) > 1:
        out.append("The runs have different numbers of tokens, so they are not drawn into one figure.")
    return out


def _verdict(found: dict[str, SpectraByLayer], about: dict[str, dict[str, Any]]) -> str:
    name, of_run = next(iter(found.items()))
    layer, main = _main_matrix(of_run)
    values = [of_run[layer][m].table()["effective_rank"] for m in (main, "random" if main == "map" else f"{main}_random")]
    if values[0] is None or values[1] is None:
        return f"The maps of {name} are all zero, so they have no rank to speak of."
    gap = values[0] - values[1]
    sd = of_run[layer][main].table()["effective_rank_sd"] or 0.0
    tendency = "about as many as" if abs(gap) <= max(sd, 0.02) else "more than" if gap > 0 else "fewer than"
    what = f"last pair of layers combined of {name} uses" if main == "combined" else f"last layer of {name} uses"
    tokens = _format_range(about[name]["tokens"])
    return f"The {what} {100 * values[0]:.0f} % of its {tokens} directions (effective rank), {tendency} with random weights ({100 * values[1]:.0f} %)."
