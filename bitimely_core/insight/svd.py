"""How many directions attention maps have: effective ranks from the singular values of retention
and softmax maps, with their controls.

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
from bitimely_core.insight.attention_maps import (
    LayerMixing,
    combine_pair,
    compute_mixings,
    name_heads,
    split_batch,
)
from bitimely_core.page import BarPlot, Line, LinePlot, Page, PageBuilder
from bitimely_core.privacy import Sharing
from bitimely_core.progress import report_progress
from bitimely_core.registry import AnalysisFacts, analyses
from bitimely_core.run import Run
from bitimely_core.tokens.drawing import draw_held_out

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
    # a requirement of scikit-learn
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    def factor(matrix: Array) -> tuple[Array, float]:
        is_triangular = not np.triu(matrix, 1).any() or not np.tril(matrix, -1).any()
        with np.errstate(divide="ignore"):
            log_det = log_det_triangular(matrix) if is_triangular else np.linalg.slogdet(matrix)[1]
        return np.asarray(np.linalg.svd(matrix, compute_uv=False)), float(log_det)

    with threadpool_limits(1, "blas"), ThreadPoolExecutor(os.cpu_count()) as pool:
        values, log_dets = zip(*pool.map(factor, maps), strict=True)
    return np.stack(values), np.array(log_dets)


def product_singular_values(queries: Array, keys: Array) -> tuple[Array, Array]:
    """As `singular_values`, of queries keys^T, both [H, N, K]: from the K x K product of their
    triangular factors, the other N - K are exactly 0.
    """
    heads, n, k = queries.shape
    if k >= n:
        return singular_values(queries @ keys.transpose(0, 2, 1))
    first, second = (np.asarray(np.linalg.qr(part, mode="r")) for part in (queries, keys))
    values = np.linalg.svd(first @ second.transpose(0, 2, 1), compute_uv=False)
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
        self.measures: list[list[dict[str, float]]] = []  # S times H
        self._last: Array | None = None

    def add(self, maps: Array) -> None:
        """The maps [H, N, N] of one more sequence. Equal ones (a decay on a regular clock) are not
        factored again.
        """
        if self._last is not None and np.array_equal(maps, self._last):
            self.singular.append(self.singular[-1])
            self.measures.append(self.measures[-1])
        else:
            self._last = maps
            self.append(*singular_values(maps))

    def append(self, singular: Array, log_dets: Array) -> None:
        """Singular values [H, N] and log |det| [H] of one more sequence."""
        self.singular.append(singular)
        self.measures.append(list(map(measure_rank, singular, log_dets.tolist())))

    def curves(self, points: int) -> Array:
        """[S, H, G]."""
        return np.array(
            [[cumulate_shares(head, points) for head in heads] for heads in self.singular]
        )

    def table(self, head: int | None = None) -> dict[str, float | None]:
        """Means over sequences (and heads, for None), the median of the condition number, and the
        deviation of the effective rank.
        """
        chosen = slice(None) if head is None else slice(head, head + 1)
        means: dict[str, float | None] = {}
        for name in MEASURES:
            values = np.array(
                [[measures[name] for measures in heads[chosen]] for heads in self.measures]
            )
            mean = np.median(values) if name == "condition" else values.mean()
            means[name] = float(mean) if np.isfinite(mean) else None
            if name == "effective_rank":
                spread = float(values.mean(1).std())
                means["effective_rank_sd"] = spread if np.isfinite(mean) else None
        return means

    def cells(self, head: int | None = None) -> list[float | None]:
        """The measures in the order of `COLUMNS`."""
        table = self.table(head)
        return [table[key] for key in KEYS]


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

    @property
    def heads(self) -> range:
        """Numbers of the heads, from 0."""
        return range(len(self.main_spectra.measures[0]))

    def summarize(self) -> dict[str, dict[str, dict[str, dict[str, float | None]]]]:
        """Measures keyed by layer, head ("mean" over heads too) and matrix."""
        heads = {"mean": None} | {str(h + 1): h for h in self.heads}
        return {
            str(layer): {
                name: {matrix: spectra.table(head) for matrix, spectra in matrices.items()}
                for name, head in heads.items()
            }
            for layer, matrices in self.layers.items()
        }


def collect_spectra(
    run: Run, sequences: int, seed: int, row_norm: str, device: str = "cpu"
) -> RunSpectra:
    """The spectra of every layer of a run with its controls."""
    rows, split = draw_held_out(run.windows(), sequences, seed)
    batches = split_batch(run.windows(), rows)
    trained, random = to_float64(run.model(), device), randomise_model(run.model(), seed, device)
    spectra: SpectraByLayer = {}
    tokens: list[int] = []
    layers: list[LayerMixing] = []
    for k, batch in enumerate(batches):
        layers, control = (
            [normalise_map(mixing, row_norm) for mixing in compute_mixings(model, batch)]
            for model in (trained, random)
        )
        tokens.append(layers[0].map.shape[-1])
        for i in range(len(layers)):
            matrices = spectra.setdefault(i + 1, {})
            _add_layer(matrices, layers[i], control[i])
            if i > 0:
                _add_pair(matrices, "", layers[i - 1], layers[i])
                _add_pair(matrices, "_random", control[i - 1], control[i])
        report_progress(f"svd {run.name}", k + 1, len(batches))
    gammas = [list(mixing.gammas) for mixing in layers]
    directions = [mixing.direction for mixing in layers]
    return RunSpectra(spectra, split, len(batches), tokens, layers[0].key_width, gammas, directions)


def _add_layer(matrices: dict[str, Spectra], mixing: LayerMixing, control: LayerMixing) -> None:
    """Add the spectra of the maps of one layer."""
    maps = {"map": mixing.map, "random": control.map, "alone": mixing.alone}
    for name, matrix in maps.items():
        if matrix is not None:
            matrices.setdefault(name, Spectra()).add(matrix)
    if mixing.queries is not None and mixing.keys is not None:
        product = product_singular_values(mixing.queries, mixing.keys)
        matrices.setdefault("scores", Spectra()).append(*product)


def _add_pair(
    matrices: dict[str, Spectra], suffix: str, first: LayerMixing, second: LayerMixing
) -> None:
    """Add the spectra of a pair of layers, combined and composed, where it is one."""
    combined = combine_pair(first, second)
    if combined is None:
        return
    matrices.setdefault(f"combined{suffix}", Spectra()).add(combined)
    # that of the product would be rounding errors
    log_dets = log_det_triangular(first.map) + log_det_triangular(second.map)
    singular, _ = singular_values(second.map @ first.map)
    matrices.setdefault(f"composed{suffix}", Spectra()).append(singular, log_dets)


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
    spectra = {run.name: collect_spectra(run, sequences, seed, row_norm, device) for run in runs}
    title = "Rank of the maps of " + " and ".join(spectra)
    page = start_page(title, runs, [part.split for part in spectra.values()], seed)
    counts = sorted({part.sequences for part in spectra.values()})
    widths = ", ".join(f"{name}: {part.key_width or 'unknown'}" for name, part in spectra.items())
    tokens = ", ".join(f"{name}: {_format_range(part.tokens)}" for name, part in spectra.items())
    joined = " and ".join(map(str, counts))
    page.fact("Sequences", f"{joined}, the same for runs on the same windows")
    page.fact("Tokens", tokens)
    page.fact("Key width of a head", widths, Sharing.OPEN)
    page.fact("Row normalisation", row_norm)
    _add_notices(page, spectra, counts[0], widths)
    _add_headline(page, spectra)
    page.text(HOW_TO_READ)
    _add_comparisons(page, spectra)
    about = {}
    for name, part in spectra.items():
        page.section(name)
        _add_curves(page, name, part)
        _add_tables(page, name, part)
        about[name] = part._asdict()
        del about[name]["layers"]
    summary: dict[str, object] = {name: part.summarize() for name, part in spectra.items()}
    summary["options"] = {"row_norm": row_norm, "seed": seed, "runs": about}
    return page.finish(_verdict(spectra), summary)


HOW_TO_READ = (
    "A map of low rank copies the same few mixtures of tokens into every token. The effective rank "
    "is the fraction of the N directions that carry weight: 1 / N for one direction, 1 for all "
    "equally. It differs from the rank, because a triangular map with a non-zero diagonal always "
    "has full rank. Compare a trained map with the controls: mask and decay exist before training, "
    "a product q kᵀ has at most K directions, and a pair of layers applies the composition of its "
    "maps, which has far fewer directions than their combination."
)
SPECTRA = (
    "Share of the sum of singular values in the largest k, mean over sequences and heads, bands "
    "one standard deviation over sequences. Further left: fewer directions. If training had raised "
    "the rank, the trained curve would be below that of random weights."
)
LAYERS = (
    "Means over heads; bands are one standard deviation over sequences. The effect of training is "
    "the gap between a trained map and random weights, not the height of either. Softmax maps "
    "depend on the scale of their logits, so compare trained ones at equal K and N only. Pairs are "
    "drawn at their second layer."
)
BY_HEAD = (
    "One curve a head. Heads with γ nearer to 1 have longer memory and fewer directions: the decay "
    "matters more than the direction. Evidence against that: curves that are not ordered by γ."
)
TABLE = (
    "Fractions of N except log |det| and the condition number (median). AUC of the cumulative "
    "shares: 0.5 flat, 1 rank one. The numerical rank counts singular values above float32 "
    "precision. Beyond a condition number of 10¹⁵ the smallest one is lost in float64."
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


def _add_headline(page: PageBuilder, spectra: Mapping[str, RunSpectra]) -> None:
    """Effective ranks: the runs, then the controls of the first of them."""
    ranks = [(name, part.main_spectra) for name, part in spectra.items()]
    name, first = next(iter(spectra.items()))
    layer, main = first.main
    for control in first.list_controls():
        words = WORDS[control].removeprefix(f"{WORDS[main]}, ")
        ranks.append((words, first.layers[layer][control]))
    where = f"layer {layer}"
    if main == "combined":
        where = f"layers {layer - 1} and {layer} (tril(R_f) + triu(R_b, 1))"
    caption = (
        f"Share of the N directions that carry weight in {where}, mean over sequences and heads; "
        f"the others are controls of {name}."
    )
    names, values = zip(
        *((name, part.table()["effective_rank"]) for name, part in ranks), strict=True
    )
    plot = BarPlot(names, values, ylabel="effective rank / N")
    page.figure("main-score", "Effective rank", caption, plot, Sharing.OPEN)


def _add_comparisons(page: PageBuilder, spectra: Mapping[str, RunSpectra]) -> None:
    """The curves of runs with equally many tokens in one figure."""
    by_points: dict[int, dict[str, RunSpectra]] = {}
    for name, part in spectra.items():
        by_points.setdefault(part.points, {})[name] = part
    for points, group in by_points.items():
        if len(group) == 1:
            continue
        lines = []
        for name, part in group.items():
            label = f"{name}, K = {part.key_width}" if part.key_width else name
            lines.append(_make_line(label, part.main_spectra, points))
            lines.append(_make_line(f"{label}, random weights", part.random_spectra, points))
        title = f"Comparison of the runs, N = {points}"
        caption = f"{SPECTRA} Runs compare at equal K only."
        _add_shares(page, f"comparison-{points}", title, caption, lines)


def _make_line(name: str, spectra: Spectra, points: int, head: int | None = None) -> Line:
    """Mean and standard deviation over sequences of the cumulative shares, of one head or of the
    mean over heads.
    """
    curves = spectra.curves(points)
    curves = curves.mean(1) if head is None else curves[:, head]
    mean, sd = curves.mean(0), curves.std(0)
    lo, hi = np.clip(mean - sd, 0, 1), np.clip(mean + sd, 0, 1)
    return Line(name, np.arange(1, points + 1) / points, mean, lo, hi)


def _add_shares(
    page: PageBuilder, name: str, title: str, caption: str, lines: Sequence[Line]
) -> None:
    plot = LinePlot(lines, xlabel="k / N", ylabel="share of the sum")
    page.figure(name, title, caption, plot, Sharing.OPEN)


def _add_curves(page: PageBuilder, name: str, run: RunSpectra) -> None:
    """Cumulative singular values of a run and its controls, its ranks by layer, its heads."""
    points, (layer, main), spectra = run.points, run.main, run.main_spectra
    parts: dict[str, Spectra] = {}
    if main == "combined":
        label = f"layers {layer - 1} and {layer} combined"
        parts[f"forward layer {layer - 1}"] = run.layers[layer - 1]["map"]
        parts[f"backward layer {layer}"] = run.layers[layer]["map"]
    else:
        label = f"{run.directions[-1].replace('both', 'two-sided')} layer {layer}"
    parts |= {WORDS[control]: run.layers[layer][control] for control in run.list_controls()}
    lines = [_make_line(words, part, points) for words, part in ({label: spectra} | parts).items()]
    width = f", K = {run.key_width}" if run.key_width else ""
    title = f"Cumulative singular values, N = {points}{width}"
    _add_shares(page, f"spectra-{name}", title, SPECTRA, lines)
    _add_ranks(page, name, run)
    heads = name_heads(len(run.heads), run.gammas[layer - 1])
    lines = [_make_line(words, spectra, points, h) for h, words in enumerate(heads)]
    title = f"Cumulative singular values by head: {label}"
    _add_shares(page, f"heads-{name}", title, BY_HEAD, lines)


def _add_ranks(page: PageBuilder, name: str, run: RunSpectra) -> None:
    """Effective rank of every matrix by layer."""
    lines = []
    for matrix, words in WORDS.items():
        layers = [layer for layer, matrices in run.layers.items() if matrix in matrices]
        if layers:
            cells = [run.layers[layer][matrix].cells()[:2] for layer in layers]
            mean, sd = np.array(cells, dtype=float).T
            lines.append(Line(words, np.array(layers), mean, mean - sd, mean + sd))
    plot = LinePlot(lines, xlabel="layer", ylabel="effective rank / N")
    page.figure(f"layers-{name}", "Effective rank by layer", LAYERS, plot, Sharing.OPEN)


def _add_tables(page: PageBuilder, name: str, run: RunSpectra) -> None:
    rows: list[list[object]] = []
    head_rows: list[list[object]] = []
    for layer, matrices in run.layers.items():
        spectra = {words: matrices[matrix] for matrix, words in WORDS.items() if matrix in matrices}
        rows += [[layer, words, *part.cells()] for words, part in spectra.items()]
        for h in run.heads:
            head_rows += [[layer, h + 1, words, *part.cells(h)] for words, part in spectra.items()]
    columns = ["layer", "matrix", *COLUMNS]
    page.table(f"table-{name}", "Measures by layer", TABLE, columns, rows, Sharing.OPEN)
    columns = ["layer", "head", "matrix", *COLUMNS]
    page.table(f"table-heads-{name}", "Measures by head", TABLE, columns, head_rows, Sharing.OPEN)


def _add_notices(
    page: PageBuilder, spectra: Mapping[str, RunSpectra], fewest: int, widths: str
) -> None:
    if fewest < ADVISED_SEQUENCES:
        page.notice(
            f"Averages over {fewest} sequences; {ADVISED_SEQUENCES} or more are recommended."
        )
    if len({part.key_width for part in spectra.values()}) > 1:
        page.notice(
            f"The runs have different key widths ({widths}), which bound the rank of q kᵀ: their "
            "maps are not comparable."
        )
    if len({part.points for part in spectra.values()}) > 1:
        page.notice(
            "The runs have different numbers of tokens, so they are drawn in separate figures."
        )


def _verdict(spectra: Mapping[str, RunSpectra]) -> str:
    name, first = next(iter(spectra.items()))
    trained, random = first.main_spectra.table(), first.random_spectra.table()["effective_rank"]
    rank, sd = trained["effective_rank"], trained["effective_rank_sd"] or 0.0
    if rank is None or random is None:
        return f"The maps of {name} are all zero, so their rank is undefined."
    tendency = "more than" if rank > random else "fewer than"
    if abs(rank - random) <= max(sd, 0.02):
        tendency = "about as many as"
    where = "last pair of layers combined" if first.main[1] == "combined" else "last layer"
    return (
        f"The {where} of {name} uses {100 * rank:.0f} % of its {_format_range(first.tokens)} "
        f"directions (effective rank), {tendency} with random weights ({100 * random:.0f} %)."
    )
