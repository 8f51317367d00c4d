"""Which vector of a frozen model tells the labels best? A linear probe on every readout of every layer (the paper's probing study).

The model is not touched. On each vector a logistic regression (numbers: ridge regression) of scikit-learn is fitted to the training split,
its penalty is chosen by the loss on the validation split, and it is scored on the test split. All probes are scored on the same windows
and the same bootstrap draws of subjects, so that the difference of each to the default readout is a paired one. Two controls go the same
way: the same architecture with random weights, and features that need no model (means and spectra of the signals, counts of codes).
Fine-tuned runs are no probes: their own predictions are scored on the same windows, beside each other and beside the frozen probe of the
vector that each reads.

Legend: n rows, D width of a vector, K classes or labels, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bitimely_core import evaluate
from bitimely_core.analyses import features
from bitimely_core.analyses.calibration import predict_rows
from bitimely_core.analyses.features import VectorChoice
from bitimely_core.errors import Reason, input_error, usage_error
from bitimely_core.evaluate.linear import DEFAULT_PENALTY, LinearProbe, extract_simple_features, fit_probe
from bitimely_core.page import Figure, Page, Table
from bitimely_core.registry import AnalysisFacts, analyses
from bitimely_core.types import Progress

if TYPE_CHECKING:
    from bitimely_core.analyses import LoadedRun

Array = npt.NDArray[Any]


DEFAULT_ROWS = 2000  # rows of each split

PAPER_READOUTS = ("sos", "eos", "sos+eos", "mean")  # rows of its table


@analyses(
    AnalysisFacts(
        takes="runs",
        scores=True,
        help="Which vector tells the labels: frozen probes on all readouts and layers, and fine-tuned runs, paired",
    )
)
def probing(
    runs: list[LoadedRun],
    *,
    sequences: int = DEFAULT_ROWS,
    readouts: str = "all",
    bootstrap: int = 1000,
    control: bool = True,
    seed: int = 0,
    progress: Progress | None = None,
) -> Page:
    """Linear probes on the readouts of all layers of a frozen model, beside random weights and features that need no model.

    Args:
        runs: the first one is frozen and probed, on windows that have labels (`--data`); fine-tuned ones (the first, too) are also scored as
            they are, so that those of all readouts make the fine-tuned half of the paper's table.
        sequences: rows of each split, drawn at random.
        readouts: names separated by commas; all = every one that the model has, but `flatten`, which is wider by the number of tokens.
        bootstrap: replicates, over subjects.
        control: whether random weights are probed, too; it doubles the time.
        seed: of the rows, the draws and the random weights.
        progress: told about the probes.

    Returns:
        A page; its summary holds `cells`: readout -> layers -> main metric, paired difference to the default readout, all metrics,
        penalty and the same cell with random weights; `fine_tuned`: run -> its cell, metric and paired differences; and `controls`.

    Raises:
        UserError: windows without labels or not the same ones, unknown readouts, a second run without a head (exit 2); no_input without training or test rows.
    """
    run = runs[0]
    windows = features.require_labels(run, "probing")
    _check_comparable(runs)
    rows = {split: features.draw_rows(windows, split, sequences, seed) for split in ("train", "validation", "test")}
    for split in ("train", "test"):
        if not len(rows[split]):
            raise input_error(
                Reason.NO_INPUT,
                f"{windows.name} has no {split} rows",
                "a probe is fitted on the training split and scored on the test split",
                "Tokenize more subjects",
            )
    y = {split: np.asarray(windows.targets(at)) for split, at in rows.items()}
    named = None if readouts == "all" else [name.strip() for name in readouts.split(",")]
    default = features.default_choice(run)
    cells = features.list_choices(run.model, windows, int(rows["train"][0]), named)
    if default not in cells:
        cells.insert(0, default)
    sources: dict[str, Any] = {"trained": run.model, **({"random": features.random_weights(run.model, seed)} if control else {})}
    probes: dict[str, LinearProbe] = {}
    total = len(cells) * len(sources) + 1
    for name, model in sources.items():
        x = {
            split: features.extract_vectors(model, windows, at, cells, progress=progress, what=f"{name}: {split}")
            for split, at in rows.items()
        }
        for cell in cells:
            parts = {split: _match_width(x[split][cell], x["train"][cell]) for split in rows}
            probes[_key(name, cell)] = fit_probe(windows.task, parts, y, max(windows.classes, 1))
            if progress is not None:
                progress("probes", len(probes), total)
    plain = {split: extract_simple_features(windows, at) for split, at in rows.items()}
    probes["raw"] = fit_probe(windows.task, {k: _match_width(v, plain["train"]) for k, v in plain.items()}, y, max(windows.classes, 1))
    groups = windows.whole_index["subject_id"].to_numpy()[rows["test"]]
    first = _key("trained", default)
    scores = evaluate.score(
        windows.task,
        y["test"],
        probes[first].prediction,
        groups,
        class_names=windows.class_names,
        train_target=y["train"],
        baselines={name: p.prediction for name, p in probes.items() if name != first},
        rows=rows["test"],
        bootstrap=bootstrap,
        seed=seed,
    )
    tuned = _score_fine_tuned(
        [one for one in runs if one.head is not None], y["test"], rows["test"], groups, probes, default, bootstrap, seed, progress
    )
    page = _page(run, scores, probes, cells, default, rows, seed, bootstrap, named=named is not None)
    if tuned:
        page.blocks.insert(3, _tuned_table(tuned, evaluate.NAMES[scores["main"]]))
        page.summary["fine_tuned"] = tuned
        page.notices[:] = list(
            dict.fromkeys([*page.notices, *(n for one in runs for n in features.notices(one, "test", scores["n_subjects"]))])
        )
    return page


def _check_comparable(runs: list[LoadedRun]) -> None:
    """Raises UserError (config, exit 2): runs on other windows than the first one, or further ones that were only pre-trained."""
    for run in runs[1:]:
        if run.windows.fingerprint != runs[0].windows.fingerprint:
            wanted = f"expected those of {runs[0].name}"
            raise usage_error(f"{run.name} reads other windows", wanted, field="--data")
        if run.head is None:
            raise usage_error(
                f"{run.name} was only pre-trained",
                "the first run is probed, the others are fine-tuned ones to hold beside it",
                f"Probe it by itself: bitimely analyze probing {run.name}",
            )


def _score_fine_tuned(
    tuned: list[LoadedRun],
    target: Array,
    rows: Array,
    groups: Array,
    probes: Mapping[str, LinearProbe],
    default: VectorChoice,
    bootstrap: int,
    seed: int,
    progress: Progress | None,
) -> dict[str, dict[str, Any]]:
    """Scores of fine-tuned runs, less that of the one that reads the default vector (or the first), and less the frozen probe of the same vector."""
    if not tuned:
        return {}
    windows = tuned[0].windows
    said = {run.name: predict_rows(run.head, windows, rows, progress, f"predict {run.name}") for run in tuned}
    cell = {run.name: features.default_choice(run) for run in tuned}
    first = next((name for name in said if cell[name] == default), tuned[0].name)

    def scored(name: str, others: Mapping[str, Array]) -> dict[str, Any]:
        return evaluate.score(
            windows.task,
            target,
            said[name],
            groups,
            class_names=windows.class_names,
            baselines=others,
            rows=rows,
            bootstrap=bootstrap,
            seed=seed,
        )

    between = scored(first, {name: part for name, part in said.items() if name != first})
    main = between["main"]
    out: dict[str, dict[str, Any]] = {}
    for name in said:
        entry: dict[str, Any] = {"readout": cell[name].readout, "layers": cell[name].layers, "words": cell[name].words()}
        frozen = probes.get(_key("trained", cell[name]))
        beside = scored(name, {"frozen": frozen.prediction} if frozen is not None else {})
        found = beside["baselines"].get("frozen", {}).get(main)
        out[name] = {
            **entry,
            **beside["metrics"][main],
            "difference": None if name == first else negate_difference(between["baselines"][name][main]["difference"]),
            "frozen": None if found is None else found["value"],
            "beyond_frozen": None if found is None else {**found["difference"], "value": found["difference"]["difference"]},
        }
    return out


def _tuned_table(tuned: Mapping[str, dict[str, Any]], name: str) -> Table:
    """The fine-tuned half of the paper's table."""
    columns = ["run", "sequence representation", name, "standard error", "minus the default, paired", "told apart"]
    rows = []
    for run, one in tuned.items():
        metric = {key: one[key] for key in ("value", "se", "lo", "hi", "undefined_reason")}
        difference = one["difference"]
        rows.append(
            [run, one["words"], metric, one["se"], difference, _describe_significance(difference), one["frozen"], one["beyond_frozen"]]
        )
    return Table(
        name="fine-tuned",
        title="Fine-tuned",
        caption=TUNED,
        columns=[*columns, "frozen probe", "minus the frozen probe, paired"],
        rows=rows,
    )


def _match_width(part: Array, like: Array) -> Array:
    """An empty split gets the columns of the others."""
    return part if len(part) else np.zeros((0, like.shape[1]), like.dtype)


def _key(source: str, cell: VectorChoice) -> str:
    return f"{source} {cell.readout} {cell.layers}"


HOW_TO_READ = (
    "Each row is a linear probe: the model is frozen, only a linear map from its vector to the labels is fitted. The difference to the "
    "default readout is paired (the same windows, the same draws of subjects), so it is far more certain than the two intervals beside "
    "each other suggest. A readout that is better than the default has a difference whose interval lies on one side of 0; of many "
    "differences one in twenty does so by chance. What training has brought is the gap to random weights, not the score."
)
TABLE = (
    "Rows as in the paper's probing table, which has [SOS] of the last layer as the best by 0.2 to 1.8 points. That would be confirmed by "
    "differences below 0 whose intervals exclude 0, and refuted by one above 0. An interval that holds 0 tells nothing apart."
)
TUNED = (
    "The same windows and draws: runs whose weights were trained on the labels, each with the vector that it reads. The default is the run "
    "that reads the default vector. One seed each: two runs that differ only in their seed differ, too, which no interval over subjects "
    "shows. An interval of the last column that holds 0 says that a linear map on the frozen vector does as well."
)
REST = (
    "The other readouts and layers. L is the last layer. The best of so many rows looks better than it is: choose by the validation split."
)
LAYERS = (
    "Each line is a readout; bands are 95 % intervals over subjects (default readout only), x is the layer that is read. If pre-training built "
    "up what the labels need, the lines rise above those of random weights; lines that lie on those of random weights are the architecture's work, not training's."
)
HEADLINE = "the default readout, and what it must beat. A probe that does not clear random weights and the raw features owes the pre-training nothing."


def _page(
    run: LoadedRun,
    scores: dict[str, Any],
    probes: dict[str, LinearProbe],
    cells: list[VectorChoice],
    default: VectorChoice,
    rows: dict[str, Array],
    seed: int,
    bootstrap: int,
    *,
    named: bool,
) -> Page:
    windows, main = run.windows, scores["main"]
    name = evaluate.NAMES[main]

    def metrics(key: str) -> dict[str, Any]:
        found: dict[str, Any] = scores["metrics"] if key == _key("trained", default) else scores["baselines"][key]
        return found

    def against(key: str, what: str = main) -> dict[str, Any] | None:
        """This one minus the default readout."""
        return None if key == _key("trained", default) else negate_difference(scores["baselines"][key][what]["difference"])

    depth = 1 + max((int(c.layers) for c in cells if c.layers.isdigit()), default=0)
    control = _key("random", default) in probes
    table = []
    for cell in cells:
        key, other = _key("trained", cell), _key("random", cell)
        value = metrics(key)[main]
        row = [cell.words(), value, value["se"], against(key), _describe_significance(against(key))]
        table.append((cell, [*row, *([metrics(other)[main]["value"]] if control else []), _penalty(probes[key])]))
    columns = ["sequence representation", name, "standard error", "minus the default, paired", "told apart"]
    columns += [*(["random weights"] if control else []), "penalty"]
    order = [VectorChoice(r, at) for at in ("last", "last-two") for r in PAPER_READOUTS]
    of_paper = sorted((t for t in table if t[0] in order), key=lambda t: order.index(t[0]))
    others = [t for t in table if t[0] not in order]
    names = {_key("trained", default): default.words(), _key("random", default): "random weights", "raw": _describe_features(windows)}
    names |= {
        key: words
        for key, words in {"majority": "majority class", "mean": "mean of the training split"}.items()
        if key in scores["baselines"]
    }
    shown = {words: metrics(key)[main] for key, words in names.items() if key in scores["baselines"] or key == _key("trained", default)}
    defined = {words: m for words, m in shown.items() if m["value"] is not None}
    side = "lower" if main in evaluate.LOWER_IS_BETTER else "higher"
    blocks: list[Figure | Table | str] = [
        Figure(
            name="main-score",
            title=f"Probe: {name}",
            caption=f"{name[0].upper()}{name[1:]} ({side} is better) of linear probes on {scores['n']:,} test windows of "
            f"{scores['n_subjects']} subjects: {HEADLINE}",
            kind="bars",
            data={
                "names": list(defined),
                "values": [m["value"] for m in defined.values()],
                "lo": [m["lo"] for m in defined.values()],
                "hi": [m["hi"] for m in defined.values()],
                "ylabel": name,
            },
        ),
        HOW_TO_READ,
    ]
    if of_paper:
        blocks.append(
            Table(name="probing", title="The paper's probing table", caption=TABLE, columns=columns, rows=[row for _, row in of_paper])
        )
    if depth > 1:
        blocks.append(_by_layer(cells, metrics, main, name, depth, control, default))
    if others:
        blocks.append(
            Table(name="others", title="Other readouts and layers", caption=REST, columns=columns, rows=[row for _, row in others])
        )
    blocks.append(_controls(shown, {words: key for key, words in names.items()}, against, name))
    said = features.notices(run, "test", scores["n_subjects"]) + scores["remarks"]
    for split, at in rows.items():
        if len(at) < len(windows[split]):
            said.append(f"{len(at):,} of the {len(windows[split]):,} {split} windows were used (--sequences).")
    if not len(rows["validation"]):
        said.append(f"There is no validation split: all penalties are {DEFAULT_PENALTY:g}.")
    unfinished = sum(p.unfinished for p in probes.values())
    if unfinished:
        said.append(f"{unfinished} of the fits stopped before they had converged.")
    if not named and "flatten" not in {c.readout for c in cells}:
        said.append("The readout flatten is left out, for its vector is wider by the number of tokens; ask for it by --readouts flatten.")
    return Page(
        title=f"Probes on {run.name}",
        verdict=_verdict(cells, default, metrics, against, main, name, control=control),
        notices=list(dict.fromkeys(said)),
        blocks=blocks,
        facts=features.facts(
            run,
            seed,
            {
                "Rows": ", ".join(f"{len(at):,} {split}" for split, at in rows.items()),
                "Probe": ("ridge" if windows.task == "regression" else "logistic")
                + " regression on standardised vectors, penalty by validation loss",
                "Bootstrap": f"{bootstrap:,} resamples of {scores['n_subjects']} subjects",
            },
        ),
        summary={
            "run": run.name,
            "data": windows.name,
            "task": windows.task,
            "main": main,
            "default": {"readout": default.readout, "layers": default.layers},
            "n": {split: len(at) for split, at in rows.items()},
            "n_subjects": scores["n_subjects"],
            "cells": _summary(cells, probes, metrics, against, main, control=control),
            "controls": {key: metrics(key)[main] for key in ("raw", "majority", "prior", "mean", "median") if key in scores["baselines"]},
            "seed": seed,
        },
    )


def negate_difference(difference: dict[str, Any]) -> dict[str, Any]:
    """The paired difference the other way round, with `value` beside `difference`."""
    flip = {"difference": difference["difference"], "lo": difference["hi"], "hi": difference["lo"]}
    out = {key: None if value is None else -value + 0.0 for key, value in flip.items()}
    sides = {"share_above_zero": difference["share_below_zero"], "share_below_zero": difference["share_above_zero"]}
    return {**difference, **out, **sides}


def _describe_significance(difference: dict[str, Any] | None) -> str | None:
    if difference is None or difference["lo"] is None:
        return None
    return "yes" if difference["lo"] > 0 or difference["hi"] < 0 else "no"


def _penalty(found: LinearProbe) -> float:
    return float(np.median(found.penalty))


def _describe_features(windows: Any) -> str:
    return "counts of codes, no model" if hasattr(windows, "vocabulary") else "means and spectra, no model"


def _by_layer(
    cells: Iterable[VectorChoice],
    metrics: Callable[[str], dict[str, Any]],
    main: str,
    name: str,
    depth: int,
    control: bool,
    default: VectorChoice,
) -> Figure:
    """Score against layer, a line a readout; of random weights the default readout and the mean."""
    have = set(cells)
    series = []
    for source in ("trained", *(["random"] if control else [])):
        shown = sorted({c.readout for c in have if c.layers.isdigit()}, key=lambda r: list(features.WORDS).index(r))
        for readout in shown if source == "trained" else [r for r in shown if r in {default.readout, "mean"}]:
            at = [VectorChoice(readout, "last" if k == depth else str(k)) for k in range(1, depth + 1)]
            found = [metrics(_key(source, cell))[main] for cell in at]
            line: dict[str, Any] = {
                "name": features.WORDS[readout] + (", random weights" if source == "random" else ""),
                "x": np.arange(1, depth + 1),
                "y": [m["value"] for m in found],
            }
            if readout == default.readout and source == "trained" and all(m["lo"] is not None for m in found):
                line |= {"lo": [m["lo"] for m in found], "hi": [m["hi"] for m in found]}
            series.append(line)
    return Figure(
        name="layers", title="Layer by layer", caption=LAYERS, kind="lines", data={"series": series, "xlabel": "layer", "ylabel": name}
    )


def _controls(shown: dict[str, Any], keys: dict[str, str], against: Callable[[str], dict[str, Any] | None], name: str) -> Table:
    rows = [[words, m, m["se"], against(keys[words]), m["undefined_reason"] or ""] for words, m in shown.items()]
    return Table(
        name="controls",
        title="What a probe must beat",
        caption="The default readout beside random weights, features without a model and a constant answer; differences are paired, control minus "
        "default readout. A control that is not worse refutes that the pre-trained vector brings anything.",
        columns=["probe", name, "standard error", "minus the default, paired", "remark"],
        rows=rows,
    )


def _verdict(
    cells: list[VectorChoice],
    default: VectorChoice,
    metrics: Callable[[str], dict[str, Any]],
    against: Callable[[str], dict[str, Any] | None],
    main: str,
    name: str,
    *,
    control: bool,
) -> str:
    sign = -1 if main in evaluate.LOWER_IS_BETTER else 1
    own = metrics(_key("trained", default))[main]
    if own["value"] is None:
        return f"{default.words()}: {name} is undefined here ({own['undefined_reason']})."
    text = f"A probe on {default.words()} reaches {name} {features.format_metric(own)}"
    if control:
        text += f", random weights {metrics(_key('random', default))[main]['value']:.3f}"
    raw = metrics("raw")[main]["value"]
    text += f", features without a model {raw:.3f}." if raw is not None else "."
    others = [(cell, against(_key("trained", cell))) for cell in cells if cell != default]
    told = [(c, d) for c, d in others if d is not None and d["difference"] is not None]
    if not told:
        return text
    best, difference = max(told, key=lambda pair: sign * pair[1]["difference"])
    apart = [c for c, d in told if _describe_significance(d) == "yes"]
    better = [c for c, d in told if _describe_significance(d) == "yes" and sign * d["difference"] > 0]
    text += f" The best of the {len(told)} others is {best.words()}, {features.format_metric(difference)}."
    if all(d["lo"] is None for _, d in told):
        return text + " Without intervals (the table of controls says why) none can be told apart."
    return (
        text
        + f" {len(apart)} of the {len(told)} differ from the default by more than chance ({len(better)} of them better; about {len(told) / 20:.1g} would by chance)."
    )


def _summary(
    cells: Iterable[VectorChoice],
    probes: Mapping[str, LinearProbe],
    metrics: Callable[[str], dict[str, Any]],
    against: Callable[[str], dict[str, Any] | None],
    main: str,
    *,
    control: bool,
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for cell in cells:
        key = _key("trained", cell)
        plain = {m: {k: v for k, v in found.items() if k != "difference"} for m, found in metrics(key).items() if m != "about"}
        out.setdefault(cell.readout, {})[cell.layers] = {
            **plain[main],
            "difference": against(key),
            "metrics": plain,
            "penalty": probes[key].penalty,
            "random": metrics(_key("random", cell))[main]["value"] if control else None,
        }
    return out
