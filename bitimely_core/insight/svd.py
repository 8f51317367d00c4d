"""Effective rank of attention maps: singular values of retention and softmax maps, with their
controls.

R [N, N] of every layer and head on held-out sequences, in float64, without [SOS], [EOS] and
padding. The singular values s_1 >= .. >= s_N of each map are divided by their sum, cumulated, and
then averaged over sequences. Full rank is uninformative, because any triangular map with a non-zero
diagonal has it. The measure is the effective rank exp(-sum p ln p) / N, p = s / sum s. Most of it
comes from the triangular mask, so figures include as controls the decay alone, q k^T alone (of rank
at most K), the same architecture with random weights, and the composition R_b R_f that a pair of
layers applies, beside the combination tril(R_f) + triu(R_b, 1) of the paper.

Legend: S sequences, H heads, N tokens, K key width of a head, G points of a curve.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bitimely_core.analyses import start_page
from bitimely_core.analyses.controls import randomise_model, to_float64
from bitimely_core.errors import check_choice
from bitimely_core.insight.attention import LayerMixing, combine_pair, compute_mixings, draw_batches
from bitimely_core.page import BarPlot, Line, LinePlot, Page, PageBuilder
from bitimely_core.registry import AnalysisFacts, analyses
from bitimely_core.run import Run
from bitimely_core.types import Progress

Array = npt.NDArray[np.float64]
SpectraByLayer = dict[int, dict[str, "Spectra"]]  # layer (from 1) -> matrix -> spectra

ADVISED_SEQUENCES = 32
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


def log_det_triangular(maps: Array) -> Array:
    """Logarithm of |det| of triangular maps [..., N, N]."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.abs(np.diagonal(maps, axis1=-2, axis2=-1))).sum(-1))


def singular_values(maps: Array) -> tuple[Array, Array]:
    """Singular values, descending, [H, N], and log |det| [H] of maps [H, N, N].

    One map a core, because threads within a matrix of this size slow each other down.
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
    """As `factored`, of queries keys^T, both [H, N, K]: from the K x K product of their triangular
    factors, the other N - K are exactly 0.
    """
    heads, n, k = queries.shape
    if k >= n:
        return singular_values(queries @ keys.transpose(0, 2, 1))
    left, right = (np.asarray(np.linalg.qr(part, mode="r")) for part in (queries, keys))
    values = np.linalg.svd(left @ right.transpose(0, 2, 1), compute_uv=False)
    return np.concatenate([values, np.zeros((heads, n - k))], axis=1), np.full(heads, -np.inf)


def measure_rank(singular: Array, log_det: float) -> dict[str, float]:
    """Measures of the singular values [N] float64, descending, of one map. All but `log_det` and
    `condition` are fractions of N.

    `log_det` is log |det| from the LU factors; a product of rounded small singular values would be
    noise. `effective_rank` exp(entropy of s / sum s) / N; `n90` smallest k / N with 90 % of the
    sum; `auc` mean of the cumulated shares (0.5 flat, 1 rank one); `stable_rank` sum s^2 / s_1^2 /
    N; `condition` s_1 / s_N; `numerical_rank` share of the s above s_1 N eps(float32). All NaN for
    a map of zeros.
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
    """Share of the sum of singular values in the largest k, at k / N = 1/G .. 1, [G]; exact where G
    = N. From [N], descending.
    """
    n, total = len(singular), float(singular.sum())
    if total <= 0:
        return np.full(points, np.nan)
    return np.interp(
        np.arange(1, points + 1) / points,
        np.arange(n + 1) / n,
        np.concatenate([[0.0], np.cumsum(singular) / total]),
    )


class Spectra:
    """Curves and measures of one matrix of one layer, sequence by sequence and head by head."""

    def __init__(self) -> None:
        self.singular: list[Array] = []  # S times [H, N]
        self.found: list[list[dict[str, float]]] = []  # S times H
        self._last: Array | None = None

    def add(self, maps: Array) -> None:
        """The maps [H, N, N] of one more sequence. Equal ones (a decay on a regular clock) are not
        factored again.
        """
        if self._last is not None and np.array_equal(maps, self._last):
            self.singular.append(self.singular[-1])
            self.found.append(self.found[-1])
        else:
            self._last = maps
            self.append(*singular_values(maps))

    def append(self, singular: Array, log_dets: Array) -> None:
        """Singular values [H, N] and log |det| [H] of one more sequence."""
        self.singular.append(singular)
        self.found.append(
            [measure_rank(s, float(d)) for s, d in zip(singular, log_dets, strict=True)]
        )

    def curves(self, points: int) -> Array:
        """[S, H, G]."""
        return np.array(
            [[cumulate_shares(s, points) for s in of_heads] for of_heads in self.singular]
        )

    def table(self, head: int | None = None) -> dict[str, float | None]:
        """Means over sequences (and heads, for None), the median of the condition number, and the
        deviation of the effective rank.
        """
        out: dict[str, float | None] = {}
        for name in MEASURES:
            values = np.array(
                [
                    [m[name] for m in (heads if head is None else heads[head : head + 1])]
                    for heads in self.found
                ]
            )
            middle = np.median(values) if name == "condition" else values.mean()
            out[name] = float(middle) if np.isfinite(middle) else None
            if name == "effective_rank":
                out["effective_rank_sd"] = (
                    float(values.mean(1).std()) if np.isfinite(middle) else None
                )
        return out


def normalise_map(mixing: LayerMixing, how: str) -> LayerMixing:
    """The map, defined up to a factor a row, with rows over their sum of magnitudes (abs-sum), or
    the root of their sum of decays (sqrt-decay).
    """
    if how == "abs-sum":
        scale = np.abs(mixing.map).sum(-1, keepdims=True)
    elif how == "sqrt-decay" and mixing.gammas and mixing.alone is not None:
        scale = np.sqrt(mixing.alone.sum(-1, keepdims=True))
    else:
        return mixing
    return mixing._replace(
        map=np.divide(mixing.map, scale, out=np.zeros_like(mixing.map), where=scale > 0)
    )


class RunSpectra(NamedTuple):
    """Spectra of one run by layer, and the sequences and layers that they are from."""

    layers: SpectraByLayer
    split: str
    sequences: int
    tokens: list[int]  # of each sequence
    key_width: int | None
    gammas: list[list[float]]  # of each layer
    directions: list[str]  # of each layer

    @property
    def points(self) -> int:
        """Points of its curves."""
        return max(self.tokens)

    @property
    def main(self) -> tuple[int, str]:
        """Layer and matrix of the headline: the last pair of an alternating model, else the last
        layer.
        """
        last = max(self.layers)
        return last, "combined" if "combined" in self.layers[last] else "map"

    @property
    def main_spectra(self) -> Spectra:
        """The spectra of `main`."""
        layer, matrix = self.main
        return self.layers[layer][matrix]

    @property
    def random_spectra(self) -> Spectra:
        """As `main_spectra`, of random weights."""
        layer, matrix = self.main
        return self.layers[layer]["random" if matrix == "map" else f"{matrix}_random"]

    def list_controls(self) -> list[str]:
        """The matrices that are drawn beside `main`."""
        last, main = self.main
        names = (f"{main}_random" if main != "map" else "random", "composed", "scores", "alone")
        return [name for name in names if name in self.layers[last]]

    def summarize(self) -> dict[str, dict[str, dict[str, dict[str, float | None]]]]:
        """Measures keyed by layer, head ("mean" over heads too) and matrix."""
        out = {}
        for layer, matrices in self.layers.items():
            heads = len(next(iter(matrices.values())).found[0])
            out[str(layer)] = {
                "mean" if h is None else str(h + 1): {
                    name: spectra.table(h) for name, spectra in matrices.items()
                }
                for h in (None, *range(heads))
            }
        return out


def collect_spectra(
    run: Run,
    sequences: int,
    seed: int,
    row_norm: str,
    progress: Progress | None,
    device: str = "cpu",
) -> RunSpectra:
    """The spectra of every layer of a run with its controls."""
    batches, _, split = draw_batches(run.windows(), sequences, seed)
    trained, random = to_float64(run.model(), device), randomise_model(run.model(), seed, device)
    found: SpectraByLayer = {}
    tokens: list[int] = []
    layers: list[LayerMixing] = []
    for k, batch in enumerate(batches):
        layers, control = (
            [normalise_map(m, row_norm) for m in compute_mixings(model, batch)]
            for model in (trained, random)
        )
        tokens.append(layers[0].map.shape[-1])
        for layer, (mixing, other) in enumerate(zip(layers, control, strict=True), 1):
            of_layer = found.setdefault(layer, {})
            for name, maps in {
                "map": mixing.map,
                "random": other.map,
                "alone": mixing.alone,
            }.items():
                if maps is not None:
                    of_layer.setdefault(name, Spectra()).add(maps)
            if mixing.queries is not None and mixing.keys is not None:
                of_layer.setdefault("scores", Spectra()).append(
                    *product_singular_values(mixing.queries, mixing.keys)
                )
            for name, (first, second) in {
                "": (layers[layer - 2], mixing),
                "_random": (control[layer - 2], other),
            }.items():
                combined = combine_pair(first, second) if layer > 1 else None
                if combined is not None:
                    of_layer.setdefault(f"combined{name}", Spectra()).add(combined)
                    # of the product: rounding errors
                    log_dets = log_det_triangular(first.map) + log_det_triangular(second.map)
                    of_layer.setdefault(f"composed{name}", Spectra()).append(
                        singular_values(second.map @ first.map)[0], log_dets
                    )
        if progress is not None:
            progress(f"svd {run.name}", k + 1, len(batches))
    gammas, directions = [list(m.gammas) for m in layers], [m.direction for m in layers]
    return RunSpectra(found, split, len(batches), tokens, layers[0].key_width, gammas, directions)


@analyses(
    AnalysisFacts(
        takes="runs",
        help="Effective rank of attention maps: singular values by layer and head, with controls",
    )
)
def svd(
    runs: list[Run],
    *,
    sequences: int = ADVISED_SEQUENCES,
    row_norm: str = "none",
    seed: int = 0,
    device: str = "auto",
    progress: Progress | None = None,
) -> Page:
    """Effective rank of retention and attention maps, beside decay alone, q k^T alone, random
    weights and the composition of a pair.

    `runs` are any models with attention maps: those on the same windows get the same sequences,
    those with other numbers of tokens separate figures. Means are over `sequences` held-out
    sequences; `row_norm` is none (the raw map, as in the paper), sqrt-decay or abs-sum.

    Returns a page; its summary is keyed by run, layer, head ("mean" over heads too) and matrix.
    Raises UserError: unknown row normalisation or a model without maps (exit 2); no_input without
    windows.
    """
    check_choice("row normalisation", row_norm, ROW_NORMS)
    found = {
        run.name: collect_spectra(run, sequences, seed, row_norm, progress, device) for run in runs
    }
    page = start_page(
        "Rank of the maps of " + " and ".join(found),
        runs,
        [one.split for one in found.values()],
        seed,
    )
    counts = sorted({one.sequences for one in found.values()})
    widths = ", ".join(f"{name}: {one.key_width or 'unknown'}" for name, one in found.items())
    page.fact(
        "Sequences", f"{' and '.join(map(str, counts))}, the same for runs on the same windows"
    )
    page.fact(
        "Tokens", ", ".join(f"{name}: {_format_range(one.tokens)}" for name, one in found.items())
    )
    page.fact("Key width of a head", widths)
    page.fact("Row normalisation", row_norm)
    _add_notices(page, found, counts[0], widths)
    _add_headline(page, found)
    page.text(HOW_TO_READ)
    by_points: dict[int, dict[str, RunSpectra]] = {}
    for name, one in found.items():
        by_points.setdefault(one.points, {})[name] = one
    for points, group in by_points.items():
        if len(group) > 1:
            lines = []
            for name, one in group.items():
                label = f"{name}, K = {one.key_width}" if one.key_width else name
                lines.append(_make_line(label, one.main_spectra, points))
                lines.append(_make_line(f"{label}, random weights", one.random_spectra, points))
            caption = f"{SPECTRA} Runs compare at equal K only."
            page.figure(
                f"comparison-{points}",
                f"Comparison of the runs, N = {points}",
                caption,
                _plot_shares(lines),
            )
    for name, one in found.items():
        page.section(name)
        _add_curves(page, name, one)
        _add_tables(page, name, one)
    about = {
        name: {key: value for key, value in one._asdict().items() if key != "layers"}
        for name, one in found.items()
    }
    summary = {name: one.summarize() for name, one in found.items()}
    return page.finish(
        _verdict(found), {**summary, "options": {"row_norm": row_norm, "seed": seed, "runs": about}}
    )


HOW_TO_READ = (
    "A map of low rank copies the same few mixtures of tokens into every token. The effective rank is the fraction of the N directions that "
    "carry weight: 1 / N for one direction, 1 for all equally. It differs from the rank, because a triangular map with a non-zero diagonal "
    "always has full rank. Compare a trained map with the controls: mask and decay exist before training, a product q kᵀ has at most K "
    "directions, and a pair of layers applies the composition of its maps, which has far fewer directions than their combination."
)
SPECTRA = (
    "Share of the sum of singular values in the largest k, mean over sequences and heads, bands one standard deviation over sequences. "
    "Further left: fewer directions. If training had raised the rank, the trained curve would be below that of random weights."
)
LAYERS = (
    "Means over heads; bands are one standard deviation over sequences. The effect of training is the gap between a trained map and random "
    "weights, not the height of either. Softmax maps depend on the scale of their logits, so compare trained ones at equal K and N only. Pairs "
    "are drawn at their second layer."
)
BY_HEAD = (
    "One curve a head. Heads with γ nearer to 1 have longer memory and fewer directions: the decay matters more than the direction. Evidence "
    "against that: curves that are not ordered by γ."
)
TABLE = (
    "Fractions of N except log |det| and the condition number (median). AUC of the cumulative shares: 0.5 flat, 1 rank one. The numerical "
    "rank counts singular values above float32 precision. Beyond a condition number of 10¹⁵ the smallest one is lost in float64."
)
COLUMNS = [
    "effective rank",
    "sd",
    "n90",
    "AUC",
    "stable rank",
    "log |det|",
    "condition",
    "numerical rank",
]
KEYS = ("effective_rank", "effective_rank_sd", *MEASURES[1:])


def _format_range(tokens: list[int]) -> str:
    low, high = min(tokens), max(tokens)
    return str(low) if low == high else f"{low} to {high}"


def _add_headline(page: PageBuilder, found: Mapping[str, RunSpectra]) -> None:
    """Effective ranks: the runs, then the controls of the first of them."""
    ranks = [(name, one.main_spectra) for name, one in found.items()]
    name, first = next(iter(found.items()))
    layer, main = first.main
    ranks += [
        (WORDS[control].removeprefix(f"{WORDS[main]}, "), first.layers[layer][control])
        for control in first.list_controls()
    ]
    where = (
        f"layers {layer - 1} and {layer} (tril(R_f) + triu(R_b, 1))"
        if main == "combined"
        else f"layer {layer}"
    )
    caption = f"Share of the N directions that carry weight in {where}, mean over sequences and heads; the others are controls of {name}."
    values = [spectra.table()["effective_rank"] for _, spectra in ranks]
    page.figure(
        "main-score",
        "Effective rank",
        caption,
        BarPlot([name for name, _ in ranks], values, ylabel="effective rank / N"),
    )


def _make_line(name: str, spectra: Spectra, points: int, head: int | None = None) -> Line:
    """Mean and standard deviation over sequences of the cumulative shares, of one head or of the
    mean over heads.
    """
    curves = spectra.curves(points)
    of = curves.mean(1) if head is None else curves[:, head]
    mean, sd = of.mean(0), of.std(0)
    return Line(
        name,
        np.arange(1, points + 1) / points,
        mean,
        np.clip(mean - sd, 0, 1),
        np.clip(mean + sd, 0, 1),
    )


def _plot_shares(lines: Sequence[Line]) -> LinePlot:
    return LinePlot(lines, xlabel="k / N", ylabel="share of the sum")


def _add_curves(page: PageBuilder, name: str, found: RunSpectra) -> None:
    points, (layer, main), by_layer = found.points, found.main, found.layers
    if main == "combined":
        label = f"layers {layer - 1} and {layer} combined"
        parts = {
            f"forward layer {layer - 1}": by_layer[layer - 1]["map"],
            f"backward layer {layer}": by_layer[layer]["map"],
        }
        extra = [_make_line(name, spectra, points) for name, spectra in parts.items()]
    else:
        label, extra = f"{found.directions[-1].replace('both', 'two-sided')} layer {layer}", []
    controls = [
        _make_line(WORDS[control], by_layer[layer][control], points)
        for control in found.list_controls()
    ]
    width = f", K = {found.key_width}" if found.key_width else ""
    lines = [_make_line(label, found.main_spectra, points), *extra, *controls]
    page.figure(
        f"spectra-{name}",
        f"Cumulative singular values, N = {points}{width}",
        SPECTRA,
        _plot_shares(lines),
    )
    lines = []
    for matrix, words in WORDS.items():
        layers = [k for k in by_layer if matrix in by_layer[k]]
        if layers:
            tables = [by_layer[k][matrix].table() for k in layers]
            mean, sd = (
                np.array([t[key] for t in tables], dtype=float)
                for key in ("effective_rank", "effective_rank_sd")
            )
            lines.append(Line(words, np.array(layers), mean, mean - sd, mean + sd))
    page.figure(
        f"layers-{name}",
        "Effective rank by layer",
        LAYERS,
        LinePlot(lines, xlabel="layer", ylabel="effective rank / N"),
    )
    gammas = found.gammas[layer - 1]
    heads = range(len(found.main_spectra.found[0]))
    lines = [
        _make_line(
            f"head {h + 1}" + (f", γ {gammas[h]:.4f}" if gammas else ""),
            found.main_spectra,
            points,
            h,
        )
        for h in heads
    ]
    page.figure(
        f"heads-{name}",
        f"Cumulative singular values by head: {label}",
        BY_HEAD,
        _plot_shares(lines),
    )


def _add_tables(page: PageBuilder, name: str, found: RunSpectra) -> None:
    cells = [
        (k, matrix, found.layers[k][matrix])
        for k in found.layers
        for matrix in WORDS
        if matrix in found.layers[k]
    ]
    rows = [
        [k, WORDS[matrix], *(table[key] for key in KEYS)]
        for k, matrix, spectra in cells
        if (table := spectra.table())
    ]
    page.table(f"table-{name}", "Measures by layer", TABLE, ["layer", "matrix", *COLUMNS], rows)
    heads = range(len(found.main_spectra.found[0]))
    by_head = (
        (h, *cell) for layer in found.layers for h in heads for cell in cells if cell[0] == layer
    )
    rows = [
        [k, h + 1, WORDS[matrix], *(table[key] for key in KEYS)]
        for h, k, matrix, spectra in by_head
        if (table := spectra.table(h))
    ]
    page.table(
        f"table-heads-{name}",
        "Measures by head",
        TABLE,
        ["layer", "head", "matrix", *COLUMNS],
        rows,
    )


def _add_notices(
    page: PageBuilder, found: Mapping[str, RunSpectra], fewest: int, widths: str
) -> None:
    if fewest < ADVISED_SEQUENCES:
        page.notice(
            f"Averages over {fewest} sequences; {ADVISED_SEQUENCES} or more are recommended."
        )
    if len({one.key_width for one in found.values()}) > 1:
        page.notice(
            f"The runs have different key widths ({widths}), which bound the rank of q kᵀ: their maps are not comparable."
        )
    if len({one.points for one in found.values()}) > 1:
        page.notice(
            "The runs have different numbers of tokens, so they are drawn in separate figures."
        )


def _verdict(found: Mapping[str, RunSpectra]) -> str:
    name, first = next(iter(found.items()))
    trained, random = first.main_spectra.table(), first.random_spectra.table()["effective_rank"]
    rank, sd = trained["effective_rank"], trained["effective_rank_sd"] or 0.0
    if rank is None or random is None:
        return f"The maps of {name} are all zero, so their rank is undefined."
    gap = rank - random
    tendency = (
        "about as many as"
        if abs(gap) <= max(sd, 0.02)
        else "more than"
        if gap > 0
        else "fewer than"
    )
    what = (
        f"last pair of layers combined of {name} uses"
        if first.main[1] == "combined"
        else f"last layer of {name} uses"
    )
    return (
        f"The {what} {100 * rank:.0f} % of its {_format_range(first.tokens)} directions (effective rank), {tendency} with random weights "
        f"({100 * random:.0f} %)."
    )
