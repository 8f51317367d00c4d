"""What a linear map can read from each layer and readout of a frozen model (the paper's probing
study).

On each vector a logistic regression (numbers: ridge regression) of scikit-learn is fitted to the
training split, its penalty is chosen by the loss on the validation split, and it is scored on the
test split. All probes are scored on the same windows, so differences to the default readout are
paired; those of all readouts and layers that are shown are one family with Holm correction. There
are two controls, which are a second family: the same architecture with random weights, and features
that need no model (means and spectra of signals, counts of codes). The predictions of fine-tuned
runs are scored on the same windows, and compared with each other and with the frozen probe of the
vector that each reads.

Legend: n rows, D width of a vector, K classes or labels, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bitimely_core import evaluate
from bitimely_core.analyses import plain_features
from bitimely_core.analyses.calibration import predict_rows
from bitimely_core.analyses.controls import randomise_model
from bitimely_core.errors import usage_error
from bitimely_core.evaluate.verdicts import (
    PrintedMetric,
    describe_difference,
    describe_interval,
    name_verdict,
    print_bounds,
)
from bitimely_core.methods.linear import (
    DEFAULT_PENALTY,
    LinearProbe,
    extract_simple_features,
    fit_windows,
)
from bitimely_core.page import BarPlot, Line, LinePlot, Page, PageBuilder
from bitimely_core.privacy import Sharing
from bitimely_core.progress import report_progress
from bitimely_core.registry import AnalysisFacts, analyses
from bitimely_core.run import SPLITS, Run
from bitimely_core.schemas.scores import CorrectedDifference, Difference, MetricValue, TaskScores
from bitimely_core.tokens import Windows
from bitimely_core.tokens.sets import require_plain_labels
from bitimely_core.types import select_keys

Array = npt.NDArray[Any]

DEFAULT_ROWS = 2000  # of each split
PAPER_READOUTS = ("sos", "eos", "sos+eos", "mean")  # rows of its table
# baselines of `evaluate`
CONSTANTS = {"majority": "majority class", "mean": "mean of the training split"}


class ProbeScores(NamedTuple):
    """Probes and their scores, by key: source, readout and layers."""

    probes: dict[str, LinearProbe]
    scores: TaskScores
    choices: list[plain_features.VectorChoice]
    default: plain_features.VectorChoice

    @property
    def main(self) -> str:
        """The metric that is shown."""
        return str(self.scores.main)

    @property
    def name(self) -> str:
        """The metric that is shown, in words."""
        return evaluate.NAMES[self.main]

    @property
    def minus(self) -> str:
        """The column of differences to the default readout, with their unit."""
        unit = evaluate.find_unit(self.main, self.scores.unit).name
        return "minus the default, paired" + ("" if unit == "1" else f" ({unit})")

    @property
    def first(self) -> str:
        """The key of the default readout."""
        return make_key("trained", self.default)

    @property
    def has_control(self) -> bool:
        """Whether random weights were probed."""
        return make_key("random", self.default) in self.probes

    def all_metrics(self, key: str) -> dict[str, MetricValue]:
        """All metrics of a probe or baseline."""
        return self.scores.metrics if key == self.first else self.scores.baselines[key].metrics

    def metric(self, key: str) -> MetricValue:
        """The main metric of a probe or baseline."""
        return self.all_metrics(key)[self.main]

    @property
    def print_metric(self) -> PrintedMetric:
        """The main metric as it is printed."""
        return PrintedMetric(self.main, self.scores.unit)

    def differences(self) -> dict[str, CorrectedDifference]:
        """The main metric of every other readout and layer less that of the default readout: one
        family.
        """
        keys = [make_key("trained", choice) for choice in self.choices if choice != self.default]
        return evaluate.correct_pairs(
            {key: negate_difference(self.metric(key).difference or Difference()) for key in keys}
        )

    def control_differences(self) -> dict[str, CorrectedDifference]:
        """The main metric of the default readout less that of random weights and of features
        without a model: the second family.
        """
        keys = [make_key("random", self.default)] if self.has_control else []
        return evaluate.correct_pairs(
            {key: self.metric(key).difference or Difference() for key in [*keys, "raw"]}
        )


@analyses(
    AnalysisFacts(
        takes="runs",
        scores=True,
        help="Linear probes by layer and readout of a frozen model, "
        "beside random weights and fine-tuned runs",
    )
)
def probing(
    runs: list[Run],
    *,
    sequences: int = DEFAULT_ROWS,
    readouts: str = "all",
    bootstrap: int = 1000,
    control: bool = True,
    seed: int = 0,
    device: str = "auto",
) -> Page:
    """Linear probes on the readouts of all layers of a frozen model, beside random weights and
    features that need no model.

    The first of `runs` is frozen and probed, on windows that have labels; fine-tuned ones (the
    first, too) are also scored as they are, so that those of all readouts make the fine-tuned half
    of the paper's table. `sequences` rows of each split are drawn at random. `readouts` are names
    separated by commas; all = every one of the model except `flatten`, which is wider by the number
    of tokens. With `control` random weights are probed, too, which doubles the time.

    Returns a page; its summary holds `cells`: readout -> layers -> main metric, paired difference
    to the default readout, all metrics, penalty and the same cell with random weights;
    `fine_tuned`: run -> its cell, metric and paired differences; and `controls`. Raises UserError:
    windows without labels or not the same ones, unknown readouts, a second run without a head (exit
    2); no_input without training or test rows.
    """
    run = runs[0]
    windows = run.windows()
    require_plain_labels(windows)
    _check_comparable(runs)
    rows = draw_splits(windows, sequences, sequences, seed)
    target = {split: np.asarray(windows.targets(drawn)) for split, drawn in rows.items()}
    choices = _list_choices(run, windows, rows, readouts)
    models = {"trained": run.model()}
    if control:
        models["random"] = draw_random_weights(run.model(), seed)
    probes = fit_model_probes(models, windows, rows, target, choices, device=device)
    probes["raw"] = fit_simple_features(windows, rows, target)
    test = plain_features.TestSplit(windows, rows["test"], target["test"], bootstrap)
    baselines = {name: probe.prediction for name, probe in probes.items()}
    default = plain_features.default_choice(run)
    first = baselines.pop(make_key("trained", default))
    scores = test.score(first, baselines, target["train"])
    probed = ProbeScores(probes, scores, choices, default)
    tuned = _score_fine_tuned(runs, test, probed, device)
    n_subjects = scores.n_subjects or 0
    page = plain_features.start_scored_page(f"Probes on {run.name}", run, "test", n_subjects, seed)
    for other in runs[1:]:
        page.notice(*plain_features.start_scored_page("", other, "test", n_subjects, seed).notices)
    page.notice(*scores.remarks)
    plain_features.describe_rows(page, windows, rows)
    model = "ridge" if windows.task == "regression" else "logistic"
    page.fact("Probe", f"{model} regression on standardised vectors, penalty by validation loss")
    page.fact("Intervals", f"over {scores.n_subjects} subjects")
    _add_notices(page, probed, rows, all_readouts=readouts == "all")
    _add_scores(page, probed, _name_controls(probed, windows), tuned)
    summary = _summarize(run, probed, rows, seed)
    if tuned:
        summary["fine_tuned"] = {name: part.to_json() for name, part in tuned.items()}
    return page.finish(_verdict(probed, windows.name), summary)


def _list_choices(
    run: Run, windows: Windows, rows: Mapping[str, Array], readouts: str
) -> list[plain_features.VectorChoice]:
    """Layers of the named readouts, with the default of the run."""
    names = None if readouts == "all" else [name.strip() for name in readouts.split(",")]
    choices = plain_features.list_choices(run.model(), windows, int(rows["train"][0]), names)
    default = plain_features.default_choice(run)
    return choices if default in choices else [default, *choices]


def _check_comparable(runs: Sequence[Run]) -> None:
    """Raises UserError (config, exit 2): runs on other windows than the first one, or further ones
    that were only pre-trained.
    """
    for run in runs[1:]:
        if run.windows().fingerprint != runs[0].windows().fingerprint:
            raise usage_error(
                f"{run.name} reads other windows",
                f"expected those of {runs[0].name}",
                field="--data",
            )
        if run.head() is None:
            raise usage_error(
                f"{run.name} was only pre-trained",
                "the first run is probed, all others must be fine-tuned",
                f"Probe it by itself: bitimely analyze probing {run.name}",
            )


def draw_splits(windows: Windows, fitted: int, scored: int, seed: int) -> dict[str, Array]:
    """Split -> rows: up to `fitted` of train and validation, up to `scored` of test, drawn at
    random.

    Raises UserError (no_input, exit 4) where train or test has none.
    """
    rows = {
        split: plain_features.draw_rows(windows, split, scored if split == "test" else fitted, seed)
        for split in SPLITS
    }
    requirement = "a probe is fitted on the training split and scored on the test split"
    for split in ("train", "test"):
        plain_features.require_rows(windows, split, rows[split], requirement)
    return rows


def fit_simple_features(
    windows: Windows, rows: Mapping[str, Array], target: Mapping[str, Array]
) -> LinearProbe:
    """The probe of the features that need no model."""
    x = {split: extract_simple_features(windows, drawn) for split, drawn in rows.items()}
    return fit_windows(windows, x, target)


def draw_random_weights(model: Any, seed: int) -> Any:
    """A model of the same architecture with random weights."""
    return randomise_model(model, seed).float()


def fit_model_probes(
    models: Mapping[str, Any],
    windows: Windows,
    rows: Mapping[str, Array],
    target: Mapping[str, Array],
    choices: Sequence[plain_features.VectorChoice],
    *,
    device: str = "cpu",
) -> dict[str, LinearProbe]:
    """Probes of every choice on the models, by the `make_key` of their source (trained, random) and
    the choice.
    """
    probes: dict[str, LinearProbe] = {}
    for name, model in models.items():
        x = {
            split: plain_features.extract_vectors(
                model, windows, drawn, choices, device=device, label=f"{name}: {split}"
            )
            for split, drawn in rows.items()
        }
        for choice in choices:
            probes[make_key(name, choice)] = fit_windows(
                windows, {split: vectors[choice] for split, vectors in x.items()}, target
            )
            report_progress("probes", len(probes), len(choices) * len(models))
    return probes


class FineTunedScores(NamedTuple):
    """Main metric of a fine-tuned run, its difference to the run with the default readout, and to
    the frozen probe of its vector.
    """

    choice: plain_features.VectorChoice
    metric: MetricValue
    difference: Difference | None
    frozen: float | None
    beyond_frozen: Difference | None

    def to_json(self) -> dict[str, object]:
        """As the summary stores it."""
        beyond = self.beyond_frozen
        return {
            **self.choice._asdict(),
            "words": self.choice.describe(),
            **self.metric.model_dump(),
            "difference": self.difference,
            "frozen": self.frozen,
            "beyond_frozen": None
            if beyond is None
            else {**beyond.model_dump(), "value": beyond.difference},
        }


def _score_fine_tuned(
    runs: Sequence[Run], test: plain_features.TestSplit, probed: ProbeScores, device: str
) -> dict[str, FineTunedScores]:
    """Scores of the fine-tuned ones of `runs`; the first that reads the default vector, else the
    first, is the reference of the differences.
    """
    choices, predictions = {}, {}
    for run in runs:
        if run.head() is not None:
            choices[run.name] = plain_features.default_choice(run)
            predictions[run.name] = predict_rows(
                run.head(), test.windows, test.rows, f"predict {run.name}", device
            )
    if not choices:
        return {}
    first = min(choices, key=lambda name: choices[name] != probed.default)
    others = {name: part for name, part in predictions.items() if name != first}
    between = test.score(predictions[first], others)
    tuned = {}
    for name, choice in choices.items():
        probe = probed.probes.get(make_key("trained", choice))
        baselines = {} if probe is None else {"frozen": probe.prediction}
        scores = test.score(predictions[name], baselines)
        frozen, difference = MetricValue(), None
        if probe is not None:
            frozen = scores.baselines["frozen"].metrics.get(probed.main, frozen)
        if name != first:  # reference less run
            difference = between.baselines[name].metrics[probed.main].difference
        tuned[name] = FineTunedScores(
            choice,
            scores.metrics[probed.main],
            difference and negate_difference(difference),
            frozen.value,
            frozen.difference,
        )
    return tuned


def make_key(source: str, choice: plain_features.VectorChoice) -> str:
    """The key of a probe; `source`: trained or random."""
    return f"{source} {choice.readout} {choice.layers}"


def negate_difference(difference: Difference) -> Difference:
    """The paired difference with the two models exchanged."""
    values = {"difference": difference.difference, "lo": difference.hi, "hi": difference.lo}
    negated = {key: None if value is None else -value + 0.0 for key, value in values.items()}
    return difference.model_copy(update=negated)


def _scale_difference(difference: Difference | None) -> MetricValue | None:
    """The difference as it is printed, in its unit."""
    if difference is None:
        return None
    value, lo, hi = (
        None if number is None else number * (difference.factor or 1)
        for number in (difference.difference, difference.lo, difference.hi)
    )
    return MetricValue(value=value, lo=lo, hi=hi)


FAMILY = ("corrected 95 % CI", "p, Holm", "significant?")  # columns of tables


def _make_cells(d: CorrectedDifference | None, metric: PrintedMetric) -> list[object]:
    """The difference and the cells of `FAMILY`; empty for the reference itself."""
    if d is None:
        return [None] * (1 + len(FAMILY))
    corrected = None if d.corrected_lo is None else print_bounds(d, metric)
    return [_scale_difference(d), corrected, d.p_holm, name_verdict(d, metric)]


HOW_TO_READ = (
    "Each row is a linear probe: the model is frozen, only a linear map from its vector to the "
    "labels is fitted. Differences to the default readout are paired (same windows, subject by "
    "subject), so they are more precise than the overlap of two intervals suggests; those of all "
    "readouts and layers on this page are one family with Holm correction, in the main metric. If "
    "the corrected 95 % CI contains 0, the difference is not significant. They speak of this "
    "trained model. The effect of pre-training is the gap to random weights, not the score."
)
MAIN = (
    "{name} ({side} is better) of linear probes on {n:,} test windows of {n_subjects} subjects: "
    "the default readout and its baselines. A probe no better than random weights and raw features "
    "shows no benefit of pre-training."
)
TABLE = (
    "Rows as in the paper's probing table, in which [SOS] of the last layer is best by 0.2 to 1.8 "
    "points. Differences below 0 whose corrected 95 % CI exclude 0 would confirm that; evidence "
    "against it: a significant difference above 0."
)
TUNED = (
    "The same windows: runs whose weights were trained on the labels, each with the vector that it "
    "reads. The default is the run that reads the default vector. One seed each: variance between "
    "seeds is not in the intervals over subjects, which are not corrected, and nothing is said "
    "about the methods."
)
REST = (
    "The other readouts and layers. L is the last layer. The maximum over many rows is optimistic; "
    "choose by the validation split."
)
LAYERS = (
    "Each line is a readout; bands are 95 % CI over subjects (default readout only), x is the "
    "layer. If pre-training learnt features of the labels, the lines exceed those of random "
    "weights; where they coincide, the architecture explains the score."
)
CONTROLS = (
    "The default readout beside random weights, features without a model and a constant "
    "prediction; differences are paired, control minus default readout. Random weights (one draw) "
    "and features are the second family with Holm correction. Evidence against a benefit of "
    "pre-training: a control that is not significantly worse."
)


def _add_notices(
    page: PageBuilder, probed: ProbeScores, rows: Mapping[str, Array], *, all_readouts: bool
) -> None:
    if not len(rows["validation"]):
        page.notice(f"No validation split: all penalties are {DEFAULT_PENALTY:g}.")
    unfinished = sum(probe.unfinished for probe in probed.probes.values())
    if unfinished:
        page.notice(f"{unfinished} of the fits stopped before convergence.")
    if all_readouts and "flatten" not in {choice.readout for choice in probed.choices}:
        page.notice(
            "The readout flatten was excluded, because its vector is wider by the number of "
            "tokens; include it by --readouts flatten."
        )


def _name_controls(probed: ProbeScores, windows: Windows) -> dict[str, str]:
    """Key -> words of the default readout and of what it is compared with."""
    plain = "counts of codes, no model" if windows.vocabulary else "means and spectra, no model"
    words = {make_key("random", probed.default): "random weights", "raw": plain, **CONSTANTS}
    compared = select_keys(words, probed.scores.baselines)
    return {probed.first: probed.default.describe(), **compared}


def _add_scores(
    page: PageBuilder,
    probed: ProbeScores,
    controls: Mapping[str, str],
    tuned: Mapping[str, FineTunedScores],
) -> None:
    """Figures and tables; `controls` are those of `_name_controls`."""
    name = probed.name
    bars = BarPlot.from_metrics(
        {words: probed.metric(key) for key, words in controls.items()}, name
    )
    caption = MAIN.format(
        name=name[0].upper() + name[1:],
        side="lower" if probed.main in evaluate.LOWER_IS_BETTER else "higher",
        n=probed.scores.n,
        n_subjects=probed.scores.n_subjects,
    )
    page.figure("main-score", f"Probe: {name}", caption, bars, Sharing.OPEN)
    page.text(HOW_TO_READ)
    order = [
        *(plain_features.VectorChoice(readout, "last") for readout in PAPER_READOUTS),
        *(plain_features.VectorChoice(readout, "last-two") for readout in PAPER_READOUTS),
    ]
    paper = [choice for choice in order if choice in probed.choices]
    others = [choice for choice in probed.choices if choice not in order]
    _add_probes(page, "probing", "The paper's probing table", TABLE, probed, paper)
    _add_tuned(page, probed, tuned)
    _add_layers(page, probed)
    _add_probes(page, "others", "Other readouts and layers", REST, probed, others)
    _add_controls(page, probed, controls)


def _add_probes(
    page: PageBuilder,
    name: str,
    title: str,
    caption: str,
    probed: ProbeScores,
    choices: Sequence[plain_features.VectorChoice],
) -> None:
    """Add a table of probes, a row a choice, where there is any."""
    if not choices:
        return
    random = ["random weights"] if probed.has_control else []
    columns = ["sequence representation", probed.name, "standard error", probed.minus, *FAMILY]
    differences, rows = probed.differences(), []
    for choice in choices:
        key = make_key("trained", choice)
        metric = probed.metric(key)
        cells = _make_cells(differences.get(key), probed.print_metric)
        row = [choice.describe(), metric, metric.se, *cells]
        row += [probed.metric(make_key("random", choice)).value for _ in random]
        rows.append([*row, float(np.median(probed.probes[key].penalty))])
    page.table(name, title, caption, [*columns, *random, "penalty"], rows)


def _add_tuned(
    page: PageBuilder, probed: ProbeScores, tuned: Mapping[str, FineTunedScores]
) -> None:
    """Add the table of fine-tuned runs, where there is any."""
    if not tuned:
        return
    columns = [
        "run",
        "sequence representation",
        probed.name,
        "standard error",
        probed.minus,
        "frozen probe",
        probed.minus.replace("default", "frozen probe"),
    ]
    rows = [
        [
            run,
            part.choice.describe(),
            part.metric,
            part.metric.se,
            _scale_difference(part.difference),
            part.frozen,
            _scale_difference(part.beyond_frozen),
        ]
        for run, part in tuned.items()
    ]
    page.table("fine-tuned", "Fine-tuned", TUNED, columns, rows)


def _add_layers(page: PageBuilder, probed: ProbeScores) -> None:
    """Score against layer, a line a readout; of random weights the default readout and the mean."""
    below = [choice for choice in probed.choices if choice.layers.isdigit()]
    if not below:
        return
    depth = 1 + max(int(choice.layers) for choice in below)
    readouts = sorted({choice.readout for choice in below}, key=list(plain_features.WORDS).index)

    def make_line(source: str, readout: str, suffix: str = "") -> Line:
        layers = [*map(str, range(1, depth)), "last"]
        keys = [make_key(source, plain_features.VectorChoice(readout, layer)) for layer in layers]
        band = not suffix and readout == probed.default.readout
        return Line.from_metrics(
            plain_features.WORDS[readout] + suffix,
            np.arange(1, depth + 1),
            map(probed.metric, keys),
            band=band,
        )

    lines = [make_line("trained", readout) for readout in readouts]
    if probed.has_control:
        compared = [name for name in readouts if name in {probed.default.readout, "mean"}]
        lines += [make_line("random", readout, ", random weights") for readout in compared]
    plot = LinePlot(lines, xlabel="layer", ylabel=probed.name)
    page.figure("layers", "Scores by layer", LAYERS, plot, Sharing.OPEN)


def _add_controls(page: PageBuilder, probed: ProbeScores, controls: Mapping[str, str]) -> None:
    differences = probed.control_differences()
    swapped = {"better": "worse", "worse": "better"}  # differences are those of the default
    rows: list[list[object]] = []
    for key, title in controls.items():
        metric, d = probed.metric(key), differences.get(key)
        plain = metric.difference and _scale_difference(negate_difference(metric.difference))
        verdict = None if d is None else name_verdict(d, probed.print_metric)
        p = None if d is None else d.p_holm
        cells = [p, swapped.get(str(verdict), verdict), metric.undefined_reason or ""]
        rows.append([title, metric, metric.se, plain, *cells])
    columns = ["probe", probed.name, "standard error", probed.minus, *FAMILY[1:], "remark"]
    page.table("controls", "Baselines of a probe", CONTROLS, columns, rows)


def _verdict(probed: ProbeScores, data: str) -> str:
    default, words = probed.metric(probed.first), probed.default.describe()
    if default.value is None:
        return f"{words}: {probed.name} is undefined here ({default.undefined_reason})."
    sentences = [
        f"A probe on {words} reaches {probed.name} {plain_features.format_metric(default)}.",
        *(
            describe_difference(
                (words, "features without a model" if key == "raw" else "random weights"),
                data,
                d,
                probed.print_metric,
            )
            for key, d in probed.control_differences().items()
        ),
        _describe_family(probed, words),
    ]
    return " ".join(filter(None, sentences))


def _describe_family(probed: ProbeScores, words: str) -> str:
    """The verdict on all other readouts and layers; "" without any."""
    metric, differences = probed.print_metric, probed.differences()
    choices = {make_key("trained", choice): choice for choice in probed.choices}
    defined = {choices[key]: d for key, d in differences.items() if d.difference is not None}
    reasons = {choice: evaluate.explain_no_verdict(d) for choice, d in defined.items()}
    judged = {choice: d for choice, d in defined.items() if reasons[choice] is None}
    if not defined:
        return ""
    if not judged:
        reason = str(next(iter(reasons.values()))).removeprefix("no CI: ")
        return f"No verdict on the {len(defined)} other readouts and layers ({reason})."
    sides = [evaluate.significance_sign(d) * metric.sign for d in judged.values()]
    best, d = max(judged.items(), key=lambda item: metric.sign * (item[1].difference or 0.0))
    return (
        f"Of the {len(judged)} other readouts and layers, one family with Holm correction, "
        f"{sides.count(1)} are better and {sides.count(-1)} worse than {words}; the best of them "
        f"is {best.describe()}, {metric.difference(d.difference)} ({describe_interval(d, metric)})."
    )


def _summarize(
    run: Run, probed: ProbeScores, rows: Mapping[str, Array], seed: int
) -> dict[str, object]:
    cells: dict[str, dict[str, object]] = {}
    differences = probed.differences()
    for choice in probed.choices:
        key = make_key("trained", choice)
        metrics = {
            name: metric.model_copy(update={"difference": None})
            for name, metric in probed.all_metrics(key).items()
        }
        random = probed.metric(make_key("random", choice)).value if probed.has_control else None
        cells.setdefault(choice.readout, {})[choice.layers] = {
            **metrics[probed.main].model_dump(),
            "difference": differences.get(key),
            "metrics": metrics,
            "penalty": probed.probes[key].penalty,
            "random": random,
        }
    constants = ("raw", "majority", "prior", "mean", "median")
    return {
        "run": run.name,
        "data": run.windows().name,
        "task": run.windows().task,
        "main": probed.main,
        "default": probed.default,
        "n": {split: len(drawn) for split, drawn in rows.items()},
        "n_subjects": probed.scores.n_subjects,
        "cells": cells,
        "controls": {
            key: probed.metric(key) for key in constants if key in probed.scores.baselines
        },
        "control_differences": {
            "raw" if key == "raw" else "random weights": d
            for key, d in probed.control_differences().items()
        },
        "seed": seed,
    }
