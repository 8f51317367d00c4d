"""Linear probes by layer and readout of a frozen model (the paper's probing study).

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
from bitimely_core.analyses import features
from bitimely_core.analyses.calibration import predict_rows
from bitimely_core.analyses.controls import randomise_model
from bitimely_core.errors import Reason, input_error, usage_error
from bitimely_core.evaluate.linear import (
    DEFAULT_PENALTY,
    LinearProbe,
    extract_simple_features,
    fit_windows,
)
from bitimely_core.evaluate.verdicts import (
    PrintedMetric,
    describe_difference,
    describe_interval,
    name_verdict,
    print_bounds,
)
from bitimely_core.page import BarPlot, Line, LinePlot, Page, PageBuilder
from bitimely_core.registry import AnalysisFacts, analyses
from bitimely_core.run import SPLITS, Run
from bitimely_core.schemas.scores import CorrectedDifference, Difference, MetricValue, TaskScores
from bitimely_core.tokens import Windows
from bitimely_core.types import Progress

Array = npt.NDArray[Any]

DEFAULT_ROWS = 2000  # of each split
PAPER_READOUTS = ("sos", "eos", "sos+eos", "mean")  # rows of its table
# baselines of `evaluate`
CONSTANTS = {"majority": "majority class", "mean": "mean of the training split"}


class ProbeScores(NamedTuple):
    """Probes and their scores, by key: source, readout and layers."""

    probes: dict[str, LinearProbe]
    scores: TaskScores
    choices: list[features.VectorChoice]
    default: features.VectorChoice

    @property
    def main(self) -> str:
        """The metric that is shown."""
        return str(self.scores.main)

    @property
    def has_control(self) -> bool:
        """Whether random weights were probed."""
        return make_key("random", self.default) in self.probes

    def all_metrics(self, key: str) -> dict[str, MetricValue]:
        """All metrics of a probe or baseline."""
        return (
            self.scores.metrics
            if key == make_key("trained", self.default)
            else self.scores.baselines[key].metrics
        )

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
        keys = [
            key
            for choice in self.choices
            if (key := make_key("trained", choice)) != make_key("trained", self.default)
        ]
        return evaluate.correct_pairs(
            {key: negate_difference(self.metric(key).difference or Difference()) for key in keys}
        )

    def control_differences(self) -> dict[str, CorrectedDifference]:
        """The main metric of the default readout less that of random weights and of features
        without a model: the second family.
        """
        keys = [
            key for key in (make_key("random", self.default), "raw") if key in self.scores.baselines
        ]
        return evaluate.correct_pairs(
            {key: self.metric(key).difference or Difference() for key in keys}
        )


@analyses(
    AnalysisFacts(
        takes="runs",
        scores=True,
        help="Linear probes by layer and readout of a frozen model, beside random weights and fine-tuned runs",
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
    progress: Progress | None = None,
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
    windows = features.require_labels(run, "probing")
    _check_comparable(runs)
    rows = draw_splits(windows, sequences, sequences, seed)
    target = {split: np.asarray(windows.targets(at)) for split, at in rows.items()}
    names = None if readouts == "all" else [name.strip() for name in readouts.split(",")]
    default = features.default_choice(run)
    choices = features.list_choices(run.model(), windows, int(rows["train"][0]), names)
    if default not in choices:
        choices.insert(0, default)
    models = {
        "trained": run.model(),
        **({"random": draw_random_weights(run.model(), seed)} if control else {}),
    }
    probes = fit_model_probes(
        models, windows, rows, target, choices, device=device, progress=progress
    )
    probes["raw"] = fit_simple_features(windows, rows, target)
    test = features.TestSplit(windows, rows["test"], target["test"], bootstrap)
    first = make_key("trained", default)
    baselines = {name: probe.prediction for name, probe in probes.items() if name != first}
    found = ProbeScores(
        probes, test.score(probes[first].prediction, baselines, target["train"]), choices, default
    )
    tuned = _score_fine_tuned(
        [one for one in runs if one.head() is not None], test, found, device, progress
    )
    page = features.start_scored_page(
        f"Probes on {run.name}", run, "test", found.scores.n_subjects or 0, seed
    )
    for one in runs[1:]:
        page.notice(
            *features.start_scored_page("", one, "test", found.scores.n_subjects or 0, seed).notices
        )
    page.notice(*found.scores.remarks)
    features.describe_rows(page, windows, rows)
    model = "ridge" if windows.task == "regression" else "logistic"
    page.fact("Probe", f"{model} regression on standardised vectors, penalty by validation loss")
    page.fact("Intervals", f"over {found.scores.n_subjects} subjects")
    _add_notices(
        page, found, has_validation=len(rows["validation"]) > 0, all_readouts=names is None
    )
    plain = "counts of codes, no model" if windows.vocabulary else "means and spectra, no model"
    shown = {
        first: default.describe(),
        make_key("random", default): "random weights",
        "raw": plain,
        **CONSTANTS,
    }
    _add_scores(
        page,
        found,
        {
            key: words
            for key, words in shown.items()
            if key == first or key in found.scores.baselines
        },
        tuned,
    )
    summary = _summarize(run, found, rows, seed)
    if tuned:
        summary["fine_tuned"] = {name: one.to_json() for name, one in tuned.items()}
    return page.finish(_verdict(found, windows.name), summary)


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
        split: features.draw_rows(windows, split, scored if split == "test" else fitted, seed)
        for split in SPLITS
    }
    for split in ("train", "test"):
        if not len(rows[split]):
            raise input_error(
                Reason.NO_INPUT,
                f"{windows.name} has no {split} rows",
                "a probe is fitted on the training split and scored on the test split",
                "Tokenize more subjects",
            )
    return rows


def fit_simple_features(
    windows: Windows, rows: Mapping[str, Array], target: Mapping[str, Array]
) -> LinearProbe:
    """The probe of the features that need no model."""
    return fit_windows(
        windows, {split: extract_simple_features(windows, at) for split, at in rows.items()}, target
    )


def draw_random_weights(model: Any, seed: int) -> Any:
    """A model of the same architecture with random weights."""
    return randomise_model(model, seed).float()


def fit_model_probes(
    models: Mapping[str, Any],
    windows: Windows,
    rows: Mapping[str, Array],
    target: Mapping[str, Array],
    choices: Sequence[features.VectorChoice],
    *,
    device: str = "cpu",
    progress: Progress | None = None,
) -> dict[str, LinearProbe]:
    """Probes of every choice on the models, by the `make_key` of their source (trained, random) and
    the choice.
    """
    probes: dict[str, LinearProbe] = {}
    for name, model in models.items():
        x = {
            split: features.extract_vectors(
                model,
                windows,
                at,
                choices,
                device=device,
                progress=progress,
                label=f"{name}: {split}",
            )
            for split, at in rows.items()
        }
        for choice in choices:
            probes[make_key(name, choice)] = fit_windows(
                windows, {split: vectors[choice] for split, vectors in x.items()}, target
            )
            if progress is not None:
                progress("probes", len(probes), len(choices) * len(models))
    return probes


class FineTunedScores(NamedTuple):
    """Main metric of a fine-tuned run, its difference to the run with the default readout, and to
    the frozen probe of its vector.
    """

    choice: features.VectorChoice
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
    runs: Sequence[Run],
    test: features.TestSplit,
    found: ProbeScores,
    device: str,
    progress: Progress | None,
) -> dict[str, FineTunedScores]:
    """Scores of fine-tuned runs; the first that reads the default vector, else the first, is the
    reference of the differences.
    """
    if not runs:
        return {}
    predictions = {
        run.name: predict_rows(
            run.head(), test.windows, test.rows, progress, f"predict {run.name}", device
        )
        for run in runs
    }
    choices = {run.name: features.default_choice(run) for run in runs}
    first = next((name for name in predictions if choices[name] == found.default), runs[0].name)
    between = test.score(
        predictions[first], {name: part for name, part in predictions.items() if name != first}
    )
    main = str(between.main)
    out: dict[str, FineTunedScores] = {}
    for name, prediction in predictions.items():
        probe = found.probes.get(make_key("trained", choices[name]))
        scores = test.score(prediction, {"frozen": probe.prediction} if probe is not None else {})
        frozen = scores.baselines["frozen"].metrics.get(main) if probe is not None else None
        difference = None if name == first else between.baselines[name].metrics[main].difference
        out[name] = FineTunedScores(
            choices[name],
            scores.metrics[main],
            None if difference is None else negate_difference(difference),
            None if frozen is None else frozen.value,
            None if frozen is None else frozen.difference,
        )
    return out


def make_key(source: str, choice: features.VectorChoice) -> str:
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
        None if v is None else v * (difference.factor or 1)
        for v in (difference.difference, difference.lo, difference.hi)
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
    "Each row is a linear probe: the model is frozen, only a linear map from its vector to the labels is fitted. Differences to the default "
    "readout are paired (same windows, subject by subject), so they are more precise than the overlap of two intervals suggests; those of all "
    "readouts and layers on this page are one family with Holm correction, in the main metric. If the corrected 95 % CI contains 0, the "
    "difference is not significant. They speak of this trained model. The effect of pre-training is the gap to random weights, not the score."
)
TABLE = (
    "Rows as in the paper's probing table, in which [SOS] of the last layer is best by 0.2 to 1.8 points. Differences below 0 whose corrected "
    "95 % CI exclude 0 would confirm that; evidence against it: a significant difference above 0."
)
TUNED = (
    "The same windows: runs whose weights were trained on the labels, each with the vector that it reads. The default is the run "
    "that reads the default vector. One seed each: variance between seeds is not in the intervals over subjects, which are not corrected, and "
    "nothing is said about the methods."
)
REST = "The other readouts and layers. L is the last layer. The maximum over many rows is optimistic; choose by the validation split."
LAYERS = (
    "Each line is a readout; bands are 95 % CI over subjects (default readout only), x is the layer. If pre-training learnt features of the "
    "labels, the lines exceed those of random weights; where they coincide, the architecture explains the score."
)
CONTROLS = (
    "The default readout beside random weights, features without a model and a constant prediction; differences are paired, control minus "
    "default readout. Random weights (one draw) and features are the second family with Holm correction. Evidence against a benefit of "
    "pre-training: a control that is not significantly worse."
)


def _add_notices(
    page: PageBuilder, found: ProbeScores, *, has_validation: bool, all_readouts: bool
) -> None:
    if not has_validation:
        page.notice(f"No validation split: all penalties are {DEFAULT_PENALTY:g}.")
    unfinished = sum(probe.unfinished for probe in found.probes.values())
    if unfinished:
        page.notice(f"{unfinished} of the fits stopped before convergence.")
    if all_readouts and "flatten" not in {choice.readout for choice in found.choices}:
        page.notice(
            "The readout flatten was excluded, because its vector is wider by the number of tokens; include it by --readouts flatten."
        )


def _add_scores(
    page: PageBuilder,
    found: ProbeScores,
    controls: Mapping[str, str],
    tuned: Mapping[str, FineTunedScores],
) -> None:
    """Figures and tables; `controls` names the default readout and what it is compared with."""
    name = evaluate.NAMES[found.main]
    side = "lower" if found.main in evaluate.LOWER_IS_BETTER else "higher"
    caption = (
        f"{name[0].upper()}{name[1:]} ({side} is better) of linear probes on {found.scores.n:,} test windows of {found.scores.n_subjects} "
        "subjects: the default readout and its baselines. A probe no better than random weights and raw features shows no benefit of pre-training."
    )
    bars = BarPlot.from_metrics({words: found.metric(key) for key, words in controls.items()}, name)
    page.figure("main-score", f"Probe: {name}", caption, bars)
    page.text(HOW_TO_READ)
    order = [
        features.VectorChoice(readout, layers)
        for layers in ("last", "last-two")
        for readout in PAPER_READOUTS
    ]
    of_paper = sorted((choice for choice in found.choices if choice in order), key=order.index)
    others = [choice for choice in found.choices if choice not in order]
    differences, controlled = found.differences(), found.control_differences()
    minus = f"minus the default, paired ({evaluate.find_unit(found.main, found.scores.unit).name})".replace(
        " (1)", ""
    )
    columns = ["sequence representation", name, "standard error", minus, *FAMILY]
    columns += [*(["random weights"] if found.has_control else []), "penalty"]
    if of_paper:
        page.table(
            "probing",
            "The paper's probing table",
            TABLE,
            columns,
            [_make_row(found, choice, differences) for choice in of_paper],
        )
    if tuned:
        words = ["run", "sequence representation", name, "standard error", minus, "frozen probe"]
        rows = []
        for run, one in tuned.items():
            cells = [
                one.metric,
                one.metric.se,
                _scale_difference(one.difference),
                one.frozen,
                _scale_difference(one.beyond_frozen),
            ]
            rows.append([run, one.choice.describe(), *cells])
        page.table(
            "fine-tuned",
            "Fine-tuned",
            TUNED,
            [*words, minus.replace("default", "frozen probe")],
            rows,
        )
    depth = 1 + max((int(c.layers) for c in found.choices if c.layers.isdigit()), default=0)
    if depth > 1:
        _add_layers(page, found, depth, name)
    if others:
        page.table(
            "others",
            "Other readouts and layers",
            REST,
            columns,
            [_make_row(found, choice, differences) for choice in others],
        )
    beside: list[list[object]] = []
    for key, title in controls.items():
        m, d = found.metric(key), controlled.get(key)
        plain = None if m.difference is None else _scale_difference(negate_difference(m.difference))
        judged = [None, None] if d is None else [d.p_holm, _name_control(d, found)]
        beside.append([title, m, m.se, plain, *judged, m.undefined_reason or ""])
    columns = ["probe", name, "standard error", minus, "p, Holm", "significant?", "remark"]
    page.table("controls", "Baselines of a probe", CONTROLS, columns, beside)


def _name_control(d: CorrectedDifference, found: ProbeScores) -> str:
    """The verdict on a control, whose difference is that of the default less it."""
    return {"better": "worse", "worse": "better"}.get(
        word := name_verdict(d, found.print_metric), word
    )


def _make_row(
    found: ProbeScores,
    choice: features.VectorChoice,
    differences: Mapping[str, CorrectedDifference],
) -> list[object]:
    key = make_key("trained", choice)
    metric = found.metric(key)
    control = [found.metric(make_key("random", choice)).value] if found.has_control else []
    penalty = float(np.median(found.probes[key].penalty))
    return [
        choice.describe(),
        metric,
        metric.se,
        *_make_cells(differences.get(key), found.print_metric),
        *control,
        penalty,
    ]


def _add_layers(page: PageBuilder, found: ProbeScores, depth: int, name: str) -> None:
    """Score against layer, a line a readout; of random weights the default readout and the mean."""
    readouts = sorted(
        {c.readout for c in found.choices if c.layers.isdigit()}, key=list(features.WORDS).index
    )
    lines = []
    for source in ("trained", *(["random"] if found.has_control else [])):
        for readout in (
            readouts
            if source == "trained"
            else [r for r in readouts if r in {found.default.readout, "mean"}]
        ):
            layers = [*map(str, range(1, depth)), "last"]
            metrics = [
                found.metric(make_key(source, features.VectorChoice(readout, layer)))
                for layer in layers
            ]
            label = features.WORDS[readout] + (", random weights" if source == "random" else "")
            band = source == "trained" and readout == found.default.readout
            lines.append(Line.from_metrics(label, np.arange(1, depth + 1), metrics, band=band))
    page.figure("layers", "Scores by layer", LAYERS, LinePlot(lines, xlabel="layer", ylabel=name))


def _verdict(found: ProbeScores, data: str) -> str:
    name, metric, default = (
        evaluate.NAMES[found.main],
        found.print_metric,
        found.metric(make_key("trained", found.default)),
    )
    words = found.default.describe()
    if default.value is None:
        return f"{words}: {name} is undefined here ({default.undefined_reason})."
    out = [f"A probe on {words} reaches {name} {features.format_metric(default)}."]
    titles = {
        make_key("random", found.default): "random weights",
        "raw": "features without a model",
    }
    out += [
        describe_difference((words, titles[key]), data, d, metric)
        for key, d in found.control_differences().items()
    ]
    differences = {
        choice: d
        for choice in found.choices
        if (d := found.differences().get(make_key("trained", choice))) and d.difference is not None
    }
    judged = {
        choice: d for choice, d in differences.items() if evaluate.explain_no_verdict(d) is None
    }
    if differences and not judged:
        reason = evaluate.explain_no_verdict(next(iter(differences.values()))) or ""
        out.append(
            f"No verdict on the {len(differences)} other readouts and layers ({reason.removeprefix('no CI: ')})."
        )
    elif judged:
        sides = [evaluate.significance_sign(d) * metric.sign for d in judged.values()]
        best = max(judged, key=lambda choice: metric.sign * (judged[choice].difference or 0.0))
        d = judged[best]
        out.append(
            f"Of the {len(judged)} other readouts and layers, one family with Holm correction, {sides.count(1)} are better and "
            f"{sides.count(-1)} worse than {words}; the best of them is {best.describe()}, {metric.difference(d.difference)} "
            f"({describe_interval(d, metric)})."
        )
    return " ".join(out)


def _summarize(
    run: Run, found: ProbeScores, rows: Mapping[str, Array], seed: int
) -> dict[str, object]:
    cells: dict[str, dict[str, object]] = {}
    differences = found.differences()
    for choice in found.choices:
        key = make_key("trained", choice)
        metrics = {
            name: one.model_copy(update={"difference": None}).model_dump()
            for name, one in found.all_metrics(key).items()
        }
        cells.setdefault(choice.readout, {})[choice.layers] = {
            **metrics[found.main],
            "difference": differences.get(key),
            "metrics": metrics,
            "penalty": found.probes[key].penalty,
            "random": found.metric(make_key("random", choice)).value if found.has_control else None,
        }
    constants = ("raw", "majority", "prior", "mean", "median")
    about = {
        "run": run.name,
        "data": run.windows().name,
        "task": run.windows().task,
        "main": found.main,
        "default": found.default,
    }
    controls = {key: found.metric(key) for key in constants if key in found.scores.baselines}
    counts = {
        "n": {split: len(at) for split, at in rows.items()},
        "n_subjects": found.scores.n_subjects,
    }
    family = {
        "random weights" if key != "raw" else key: d
        for key, d in found.control_differences().items()
    }
    return {
        **about,
        **counts,
        "cells": cells,
        "controls": controls,
        "control_differences": family,
        "seed": seed,
    }
