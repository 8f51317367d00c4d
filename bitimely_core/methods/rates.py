"""Rates by trees on spectra: which frequency of a window is the one that its label counts.

Candidates are steps of a logarithmic grid of frequencies. What is read of a candidate are the
powers at it and at fixed multiples of it. Where all times are stretched, spectrum and rate move
together and these numbers stay. So the trees learn how a pulse or a breath looks in spectra, and
hardly learn which person has which rate.

Spectra are those of each channel and of the size of its steps from sample to sample, which follows
beats and their strength. The prediction is the median of the candidates by their probabilities.

Legend: n windows, T samples, V channels, S = 2 V sources, F frequencies, K candidates among them, D
numbers of a candidate.
"""

from __future__ import annotations

import numpy as np

from bitimely_core.errors import usage_error
from bitimely_core.methods.classifiers import (
    extract_trees,
    pack_classifiers,
    predict_chance,
    unpack_classifiers,
)
from bitimely_core.methods.method_contract import (
    Array,
    Arrays,
    FittedMethod,
    MethodConfig,
    MethodFit,
    MethodRows,
)
from bitimely_core.registry import MethodFacts, methods

CYCLES = np.geomspace(1.5, 200, 192)  # in a window; a step is 2.6 %
MULTIPLES = np.array([1 / 4, 1 / 3, 1 / 2, 0.9, 0.95, 1, 1.05, 1.1, 1.5, 2, 3, 4])
STEPS = np.rint(np.log(MULTIPLES) / np.log(CYCLES[1] / CYCLES[0])).astype(np.int64)
FLOOR = 1e-3  # of the power of a source with variance 1, below which powers are alike
SLACK = 1.18  # of the candidates beyond the rates of the training
WITHIN = 0.04  # of the logarithm: a candidate is that of the label
MOST_WINDOWS = 2000  # that the trees are fitted on, evenly from all
BOOSTING = {
    "max_iter": 150,
    "max_leaf_nodes": 15,
    "learning_rate": 0.06,
    "l2_regularization": 1.0,
    "min_samples_leaf": 100,
    "early_stopping": False,
}


class RatesConfig(MethodConfig):
    """Settings of rates: none."""


def require_rates(config: RatesConfig, windows: object) -> RatesConfig:
    """The settings. Raises UserError (config, exit 2) for labels that are no rates a minute."""
    if not is_rate(windows):
        raise usage_error(
            f"the labels of {getattr(windows, 'name', 'this view')} are no rates a minute",
            "expected a view whose label is one",
            "Use features or kernels",
            field="MODEL",
        )
    return config


def is_rate(view: object) -> bool:
    """Whether the labels of a view, or of windows, are rates a minute."""
    unit = getattr(view, "unit", "") or getattr(view, "target_unit", "")
    return getattr(view, "label_scales", "") == "rate" and unit == "/min"


def compute_spectra(x: Array) -> Array:
    """Logarithms of the power at `CYCLES` in windows [n, T, V], [n, S, F] float32."""
    length = x.shape[1]
    taper = np.hanning(length)
    waves = np.exp(-2j * np.pi * np.outer(np.arange(length) / length, CYCLES)) * taper[:, None]
    centred = x - x.mean(1, keepdims=True)
    strength = np.abs(np.diff(centred, axis=1, prepend=centred[:, :1]))
    sources = np.concatenate([centred, strength - strength.mean(1, keepdims=True)], 2)
    sources = sources / (sources.std(1, keepdims=True) + 1e-6)
    turned = np.ascontiguousarray(sources.transpose(0, 2, 1), np.float32)
    parts = turned @ waves.real.astype(np.float32), turned @ waves.imag.astype(np.float32)
    power = (parts[0] ** 2 + parts[1] ** 2) / np.square(taper).sum()
    return np.log(power + FLOOR)


def describe_candidates(spectra: Array, places: Array) -> Array:
    """The numbers of the candidates at `places` [K] of spectra [n, S, F], [n, K, D].

    Each source has the powers at all multiples, relative to the largest of the candidates, and the
    share of the power of all candidates. Beyond the grid its last power stands.
    """
    relative = spectra - spectra[:, :, places].max(2, keepdims=True)
    last = spectra.shape[2] - 1
    columns = [relative[:, :, np.clip(places + step, 0, last)] for step in STEPS]
    power = np.exp(relative[:, :, places])
    columns.append(power / power.sum(2, keepdims=True))
    return np.concatenate(columns, 1).transpose(0, 2, 1)


def find_median(chances: Array, rates: Array) -> Array:
    """The medians [n] of distributions over rates [K] with the weights [n, K], between steps."""
    shares = chances / chances.sum(1, keepdims=True)
    middles = shares.cumsum(1) - shares / 2
    return np.array([np.exp(np.interp(0.5, middle, np.log(rates))) for middle in middles])


def predict_rates(fitted: FittedMethod, rows: MethodRows) -> Array:
    """The rate of each row."""
    places, rates = fitted.arrays["places"], fitted.arrays["rates"]
    (trees,) = unpack_classifiers(fitted.arrays)
    parts = []
    for block in rows.read_blocks():
        described = describe_candidates(compute_spectra(block), places)
        chance = predict_chance(trees, described.reshape(-1, described.shape[2]))[:, 1]
        parts.append(find_median(chance.reshape(len(block), -1), rates))
    return np.concatenate(parts)


@methods(
    MethodFacts(
        config=RatesConfig,
        input=("signals",),
        tasks=("regression",),
        score=predict_rates,
        resolve=require_rates,
    )
)
def rates(config: RatesConfig, inputs: MethodFit) -> Arrays:
    """Rates a minute, such as heart rates: gradient-boosted trees choose among the frequencies of
    a window by the powers there and at their multiples.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier

    windows = inputs.train.windows
    chosen = np.unique(
        np.linspace(0, len(windows) - 1, min(len(windows), MOST_WINDOWS)).astype(int)
    )
    labels = inputs.train.labels()[chosen].astype(np.float64)
    by_place = CYCLES * 60 * windows.rate / windows.length
    is_candidate = (by_place > labels.min() / SLACK) & (by_place < labels.max() * SLACK)
    places = np.flatnonzero(is_candidate)
    spectra = []
    for start in range(0, len(chosen), 256):
        inputs.report("spectra", start, len(chosen))
        spectra.append(compute_spectra(windows.values(windows.rows[chosen[start : start + 256]])))
    described = describe_candidates(np.concatenate(spectra), places)
    distance = np.abs(np.log(by_place[places]) - np.log(labels)[:, None])
    boosting = HistGradientBoostingClassifier(**BOOSTING, random_state=inputs.seed)
    boosting.fit(described.reshape(-1, described.shape[2]), (distance < WITHIN).ravel())
    trees = pack_classifiers([extract_trees(boosting)])
    return {"places": places, "rates": by_place[places], **trees}
