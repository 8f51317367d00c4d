"""Can the probabilities of a fine-tuned model be believed, and for whom? Reliability, confusion, classes, subjects, nights, learning curve.

A prediction of 0.8 should be right in eight of ten cases. Windows are put into bins by the probability of the class that the model names
(labels: of each label); the expected calibration error is the mean over windows of |share that is right - mean probability| of their bin.
It is never 0: bins of few windows differ by chance. So it stands beside what a model of exactly these probabilities that is perfectly
calibrated would show (labels drawn from them), and beside the error after one temperature that is fitted on the validation split.

Legend: n rows, K classes or labels, U subjects, B bins, R replicates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from bitimely_core import data, evaluate
from bitimely_core.analyses import features
from bitimely_core.errors import Reason, input_error, usage_error
from bitimely_core.page import Figure, Page, Table
from bitimely_core.registry import AnalysisFacts, analyses
from bitimely_core.types import Progress

if TYPE_CHECKING:
    from bitimely_core.analyses import LoadedRun
    from bitimely_core.tokens import Windows

Array = npt.NDArray[Any]

SUBJECTS = 40  # that a figure shows by themselves
NIGHTS = 3
EPOCHS = 10  # fewest windows of a recording that is shown as a night
CHANCE = 200  # draws of labels from the probabilities


# --- numbers ------------------------------------------------------------------------------------------------------------------------------


def assign_bins(confidence: Array, bins: int) -> Array:
    """Which of `bins` equal parts of (0, 1] a probability is in, [n] int; 0 is in the first."""
    return np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)


def sum_bins(confidence: Array, right: Array, units: Array, n_units: int, bins: int) -> Array:
    """Windows, right ones and summed probability of each subject and bin, [U, B, 3]."""
    out = np.zeros((n_units, bins, 3))
    np.add.at(out, (units, assign_bins(confidence, bins)), np.stack([np.ones_like(confidence), right, confidence], 1))
    return out


def calibration_error(counts: Array) -> Array:
    """Expected calibration error of summed bins [..., B, 3]: sum over bins of |right - probability| / windows."""
    total = counts[..., 0].sum(-1)
    with np.errstate(invalid="ignore"):
        return np.abs(counts[..., 1] - counts[..., 2]).sum(-1) / total


def estimate_reliability(confidence: Array, right: Array, units: Array, *, bins: int, bootstrap: int, seed: int) -> dict[str, Any]:
    """The curve and its error with intervals over subjects.

    Args:
        confidence: [n] probabilities.
        right: [n] 1 where what they are the probability of is so.
        units: [n] subjects as numbers from 0.
        bins: B.
        bootstrap: replicates.
        seed: of the draws.

    Returns:
        `ece` and `gap` (mean probability - share right: above 0 the model is too sure) as metric objects; `curve`: probability, share,
        lo, hi and windows of every bin that has any; `chance`: mean and 95th percentile of the error of a perfectly calibrated model.
    """
    n_units = int(units.max()) + 1 if len(units) else 0
    table = sum_bins(confidence, right, units, n_units, bins)
    whole = table.sum(0)
    draws = evaluate.draw_counts(range(bootstrap), n_units, seed) if n_units and bootstrap else np.zeros((0, n_units))
    drawn = np.einsum("ru,ubk->rbk", draws, table)
    with np.errstate(invalid="ignore"):
        gap = (whole[:, 2].sum() - whole[:, 1].sum()) / whole[:, 0].sum()
        gaps = (drawn[..., 2].sum(1) - drawn[..., 1].sum(1)) / drawn[..., 0].sum(1)
        shares = drawn[..., 1] / drawn[..., 0]
    curve: dict[str, list[Any]] = {key: [] for key in ("probability", "share", "lo", "hi", "windows")}
    for b in np.flatnonzero(whole[:, 0]):
        found = features.make_metric(whole[b, 1] / whole[b, 0], shares[:, b], n_units, int(np.isfinite(shares[:, b]).sum()))
        curve["probability"].append(float(whole[b, 2] / whole[b, 0]))
        curve["windows"].append(int(whole[b, 0]))
        for key, name in (("share", "value"), ("lo", "lo"), ("hi", "hi")):
            curve[key].append(found[name])
    rng = np.random.default_rng([seed, 1])
    of = assign_bins(confidence, bins)
    by_chance = [
        float(np.abs(np.bincount(of, (rng.random(len(of)) < confidence) - confidence, bins)).sum() / len(of))
        for _ in range(CHANCE if len(of) else 0)
    ]
    return {
        "ece": features.make_metric(calibration_error(whole), calibration_error(drawn), n_units, bootstrap),
        "gap": features.make_metric(gap, gaps, n_units, bootstrap),
        "curve": curve,
        "chance": {"mean": float(np.mean(by_chance)), "p95": float(np.percentile(by_chance, 95))} if by_chance else None,
    }


def apply_temperature(task: str, prediction: Array, temperature: float) -> Array:
    """The probabilities with their logits divided by a temperature: above 1 less sure, the order of classes unchanged."""
    p = np.clip(np.asarray(prediction, np.float64), 1e-12, 1.0)
    if task == "classification":
        logits = np.log(p) / temperature
        return evaluate.to_probabilities(task, logits)
    p = np.clip(p, 1e-12, 1 - 1e-12)
    return evaluate.to_probabilities(task, (np.log(p) - np.log1p(-p)) / temperature)


def fit_temperature(task: str, prediction: Array, target: Array) -> float | None:
    """The temperature with the least log loss on these rows; None without rows."""
    from scipy.optimize import minimize_scalar

    if not len(prediction):
        return None

    def loss(log_temperature: float) -> float:
        p = np.clip(apply_temperature(task, prediction, float(np.exp(log_temperature))), 1e-12, 1 - 1e-12)
        if task == "classification":
            return -float(np.log(p[np.arange(len(p)), target.astype(int)]).mean())
        known = np.isfinite(target)
        y = target[known]
        return -float((y * np.log(p[known]) + (1 - y) * np.log1p(-p[known])).mean())

    return float(np.exp(minimize_scalar(loss, bounds=(-3.0, 3.0), method="bounded").x))


def bin_means(prediction: Array, target: Array, bins: int) -> dict[str, Array]:
    """Mean prediction and mean target in `bins` groups of equally many rows, by prediction."""
    order = np.argsort(prediction, kind="stable")
    groups = [g for g in np.array_split(order, min(bins, len(order))) if len(g)]
    return {"prediction": np.array([prediction[g].mean() for g in groups]), "target": np.array([target[g].mean() for g in groups])}


# --- predictions --------------------------------------------------------------------------------------------------------------------------


def predict_rows(head: Any, windows: Windows, rows: Array, progress: Progress | None = None, what: str = "predict") -> Array:
    """What the fine-tuned model says of `rows`: probabilities [n, K] or values [n]."""
    out: list[Array] = []
    head = head.eval()
    with torch.inference_mode():
        for start in range(0, len(rows), features.BATCH_ROWS):
            out.append(head.predict(data.collate(windows, rows[start : start + features.BATCH_ROWS])).float().numpy())
            if progress is not None:
                progress(what, min(start + features.BATCH_ROWS, len(rows)), len(rows))
    return np.concatenate(out) if out else np.zeros((0, max(windows.classes, 1)), np.float32)


@analyses(
    AnalysisFacts(
        takes="run", scores=True, help="Can the probabilities be believed, and for whom: reliability, confusion, subjects, nights"
    )
)
def calibration(
    runs: list[LoadedRun],
    *,
    sequences: int = 20_000,
    bins: int = 10,
    bootstrap: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Page:
    """Reliability of a fine-tuned run on the test split, its errors class by class, subject by subject, night by night.

    Args:
        runs: one fine-tuned run.
        sequences: rows of the test and of the validation split, drawn at random where there are more.
        bins: of probability.
        bootstrap: replicates, over subjects.
        seed: of rows and draws.
        progress: told about the predictions.

    Returns:
        A page; its summary holds `metrics`, `by_class`, `confusion`, `reliability` (of labels: one each), `temperature`, `subjects` and
        `learning_curve`. Subjects are numbered at random; their ids are nowhere.

    Raises:
        UserError: a run without a head, without labels (exit 2); no_input without test rows.
    """
    run = runs[0]
    windows = features.require_labels(run, "calibration")
    head: Any = run.head
    if head is None:
        raise usage_error(
            f"{run.name} was only pre-trained",
            "expected a fine-tuned run, which predicts labels",
            f"Run: bitimely finetune {run.name} --data {windows.dataset}" + (f"/{windows.view}" if windows.view else ""),
        )
    rows = {split: features.draw_rows(windows, split, sequences, seed) for split in ("validation", "test")}
    if not len(rows["test"]):
        raise input_error(
            Reason.NO_INPUT, f"{windows.name} has no test rows", "predictions are judged on the test split", "Tokenize more subjects"
        )
    prediction = {split: predict_rows(head, windows, at, progress, f"predict {split}") for split, at in rows.items()}
    target = {split: np.asarray(windows.targets(at)) for split, at in rows.items()}
    groups = windows.whole_index["subject_id"].to_numpy()[rows["test"]].astype(str)
    train = windows["train"]
    scores = evaluate.score(
        windows.task,
        target["test"],
        prediction["test"],
        groups,
        class_names=windows.class_names,
        train_target=train.targets(None) if len(train) else None,
        rows=rows["test"],
        bootstrap=bootstrap,
        seed=seed,
    )
    units, n_units = features.number_subjects(groups, seed)
    said = features.notices(run, "test", n_units) + scores["remarks"]
    said += [
        f"{len(at):,} of the {len(windows[split]):,} {split} windows were used (--sequences)."
        for split, at in rows.items()
        if len(at) < len(windows[split])
    ]
    blocks: list[Figure | Table | str] = []
    summary: dict[str, Any] = {
        "run": run.name,
        "data": windows.name,
        "task": windows.task,
        "n": len(units),
        "n_subjects": n_units,
        "seed": seed,
        "bins": bins,
    }
    summary |= {key: scores[key] for key in ("metrics", "by_class", "confusion")}
    if windows.task == "regression":
        found, verdict = _values(prediction["test"], target["test"], units, bins, scores)
        summary["reliability"] = found.pop("summary")
        blocks += found["blocks"]
    else:
        of_run = _believed(windows, prediction, target, units, bins, bootstrap, seed)
        summary |= {"reliability": of_run["reliability"], "temperature": of_run["temperature"]}
        blocks += of_run["blocks"]
        verdict = of_run["verdict"]
        blocks += _classes(windows, scores)
    persons = _subjects(windows.task, prediction["test"], target["test"], units, n_units)
    summary["subjects"] = persons
    blocks += ["## Subjects", *_of_subjects(persons)]
    if windows.task == "classification":
        shown = add_nights(windows, head, progress)
        blocks += ["## Nights", *shown] if shown else []
    curve = read_learning_curve(run, scores["main"])
    summary["learning_curve"] = curve
    blocks += ["## Labels", *_learning(run, curve, scores["main"])]
    return Page(
        title=f"Calibration of {run.name}",
        verdict=verdict,
        notices=list(dict.fromkeys(said)),
        blocks=blocks,
        facts=features.facts(
            run,
            seed,
            {
                "Rows": ", ".join(f"{len(at):,} {split}" for split, at in rows.items()),
                "Subjects": f"{n_units}, numbered at random",
                "Bins": f"{bins} of equal width",
                "Bootstrap": f"{bootstrap:,} resamples of {n_units} subjects",
            },
        ),
        summary=summary,
    )


# --- probabilities ------------------------------------------------------------------------------------------------------------------------

RELIABLE = (
    "Each point is a bin of windows: across, the mean probability that the model gave; up, the share of windows for which it was right; the band is "
    "the 95 % interval over subjects. On the dashed diagonal a probability means what it says. Points below it: too sure. A curve whose bands all "
    "hold the diagonal would refute that the model is badly calibrated. In a bin of few windows that are all right, or all wrong, the band has no width and says nothing."
)
ERRORS = (
    "Expected calibration error: how far probability and share right lie apart, mean over windows. By chance: what a perfectly calibrated model "
    "with the same probabilities would show on as many windows, drawn independently; windows of one subject are not independent, so the truth lies above it. "
    "An error at or below the 95th percentile by chance is no evidence of bad calibration. Gap: mean probability less share right, above 0 = too sure."
)


def _believed(
    windows: Windows, prediction: dict[str, Array], target: dict[str, Array], units: Array, bins: int, bootstrap: int, seed: int
) -> dict[str, Any]:
    """Reliability of the named class, or of each label, before and after one temperature from the validation split."""
    task = windows.task
    temperature = fit_temperature(task, prediction["validation"], target["validation"])
    after = apply_temperature(task, prediction["test"], temperature) if temperature is not None else None
    names = ["class that the model names"] if task == "classification" else list(windows.class_names)
    found: dict[str, dict[str, Any]] = {}
    for k, name in enumerate(names):
        parts = {}
        for what, p in {"as_is": prediction["test"], "tempered": after}.items():
            if p is None:
                continue
            if task == "classification":
                confidence, right, of = p.max(1).astype(np.float64), (p.argmax(1) == target["test"]).astype(np.float64), units
            else:
                known = np.isfinite(target["test"][:, k])
                confidence, right, of = p[known, k].astype(np.float64), target["test"][known, k].astype(np.float64), units[known]
            parts[what] = estimate_reliability(confidence, right, of, bins=bins, bootstrap=bootstrap, seed=seed)
        found[name] = parts
    series: list[dict[str, Any]] = []
    for name, parts in found.items():
        for what, one in parts.items():
            if what == "tempered" and task == "multilabel":
                continue
            curve = one["curve"]
            line: dict[str, Any] = {
                "name": name if task == "multilabel" else {"as_is": "as it is", "tempered": "with one temperature"}[what]
            }
            line |= {"x": curve["probability"], "y": curve["share"]}
            if all(v is not None for v in curve["lo"]) and (what == "as_is" or len(names) == 1):
                line |= {"lo": curve["lo"], "hi": curve["hi"]}
            series.append(line)
    series.append({"name": "perfect", "x": [0.0, 1.0], "y": [0.0, 1.0], "reference": True})
    rows = []
    for name, parts in found.items():
        one, other = parts["as_is"], parts.get("tempered")
        by_chance = one["chance"] or {"mean": None, "p95": None}
        rows.append([name, one["ece"], by_chance["mean"], by_chance["p95"], one["gap"], other["ece"] if other else None, temperature])
    blocks: list[Figure | Table | str] = [
        Figure(
            name="reliability",
            title="Reliability",
            caption=RELIABLE,
            kind="lines",
            data={
                "series": series,
                "xlabel": "probability",
                "ylabel": "share right" if task == "classification" else "share with the label",
            },
        ),
        Table(
            name="calibration",
            title="Calibration error",
            caption=ERRORS,
            columns=[
                "of",
                "expected calibration error",
                "by chance, mean",
                "by chance, 95th",
                "gap",
                "with one temperature",
                "temperature",
            ],
            rows=rows,
        ),
    ]
    if task == "classification":
        curve = found[names[0]]["as_is"]["curve"]
        blocks.insert(
            1,
            Figure(
                name="confidence",
                title="How sure the model is",
                caption="Windows in each bin of probability of the named class. Most windows in the last bin is a model that is hardly ever in doubt; "
                "whether that is right the reliability shows.",
                kind="bars",
                data={"names": [f"around {p:.2f}" for p in curve["probability"]], "values": curve["windows"], "ylabel": "windows"},
            ),
        )
    return {"reliability": found, "temperature": temperature, "blocks": blocks, "verdict": _verdict(found, task)}


def _verdict(found: dict[str, dict[str, Any]], task: str) -> str:
    worst, parts = max(found.items(), key=lambda pair: pair[1]["as_is"]["ece"]["value"] or 0.0)
    one = parts["as_is"]
    where = "" if task == "classification" else f" (worst of {len(found)} labels, {worst})"
    gap = one["gap"]["value"]
    text = f"Expected calibration error {features.format_metric(one['ece'])}{where}"
    if one["chance"]:
        text += f"; a perfectly calibrated model would show {one['chance']['mean']:.3f} by chance"
    if gap is None:
        return text + "."
    if one["gap"]["lo"] is not None and one["gap"]["lo"] <= 0 <= one["gap"]["hi"]:
        text += f". On average it is neither too sure nor too unsure (gap {features.format_metric(one['gap'])})"
    else:
        text += f". Its probabilities are too {'high' if gap > 0 else 'low'} by {abs(gap):.3f} on average"
    if "tempered" in parts and parts["tempered"]["ece"]["value"] is not None:
        text += f"; one temperature brings the error to {parts['tempered']['ece']['value']:.3f}"
    return text + "."


def _classes(windows: Windows, scores: dict[str, Any]) -> Iterator[Figure | Table | str]:
    """Confusion and scores of each class."""
    yield "## Classes"
    if scores["confusion"]:
        confusion = np.array(scores["confusion"], dtype=float)
        support = confusion.sum(1, keepdims=True)
        share = np.divide(confusion, support, out=np.full_like(confusion, np.nan), where=support > 0)
        names = list(windows.class_names)
        yield Figure(
            name="confusion",
            title="Confusion: share of each true class",
            caption="Row: scored; column: predicted; each row sums to 1. A column that swallows all rows is a classifier that names one class; "
            "mass between neighbours is usual between experts, too.",
            kind="matrix",
            data={
                "values": share,
                "xlabel": "predicted",
                "ylabel": "scored",
                "diverging": False,
                "row_names": names,
                "column_names": names,
            },
        )
    first: dict[str, Any] = next(iter(scores["by_class"].values()), {})
    yield Table(
        name="classes",
        title="Scores by class",
        caption="Support is the number of test windows, subjects how many persons they come from: a class of few persons is a score of these persons. "
        "Intervals over subjects.",
        columns=["class", *(evaluate.NAMES.get(key, key.replace("_", " ")) for key in first)],
        rows=[[name, *row.values()] for name, row in scores["by_class"].items()],
    )


# --- numbers as targets -------------------------------------------------------------------------------------------------------------------


def _values(prediction: Array, target: Array, units: Array, bins: int, scores: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """A regression: mean target against mean prediction, and the bias of each subject."""
    curve = bin_means(prediction, target, bins)
    spread = float(np.var(prediction))
    slope = float(np.cov(prediction, target, bias=True)[0, 1] / spread) if spread > 0 else None
    bias = float((prediction - target).mean())
    ends = [float(min(curve["prediction"].min(), curve["target"].min())), float(max(curve["prediction"].max(), curve["target"].max()))]
    figure = Figure(
        name="reliability",
        title="Predicted against measured",
        caption="Each point is a tenth of the windows, ordered by prediction: across its mean prediction, up its mean target. On the dashed diagonal "
        "predictions mean what they say; a flatter line is a model that exaggerates, a horizontal one knows nothing.",
        kind="lines",
        data={
            "series": [
                {"name": "windows by prediction", "x": curve["prediction"], "y": curve["target"]},
                {"name": "perfect", "x": ends, "y": ends, "reference": True},
            ],
            "xlabel": "predicted",
            "ylabel": "measured",
        },
    )
    verdict = (
        f"Mean absolute error {features.format_metric(scores['metrics']['mae'])}; predictions lie {bias:+.3g} from the targets on average"
    )
    verdict += f", and one more predicted goes with {slope:.2f} more measured (1 = calibrated)." if slope is not None else "."
    return {"blocks": [figure], "summary": {"slope": slope, "bias": bias, "curve": {k: v.tolist() for k, v in curve.items()}}}, verdict


# --- subjects -----------------------------------------------------------------------------------------------------------------------------


def _subjects(task: str, prediction: Array, target: Array, units: Array, n_units: int) -> list[dict[str, Any]]:
    """One entry a subject, numbered at random: windows, a score, of classes also kappa and mean probability; () where each has one window."""
    if len(units) <= n_units:
        return []
    out = []
    for unit in range(n_units):
        here = units == unit
        said, truth = prediction[here], target[here]
        entry: dict[str, Any] = {"subject": unit + 1, "windows": int(here.sum())}
        if task == "regression":
            entry["mae"] = float(np.abs(said - truth).mean())
        elif task == "multilabel":  # the share of its known labels that are right
            known = np.isfinite(truth)
            entry["accuracy"] = float(((said >= 0.5) == (truth > 0.5))[known].mean()) if known.any() else None
        else:
            named = said.argmax(1)
            by_chance = (
                float((np.bincount(named, minlength=said.shape[1]) * np.bincount(truth, minlength=said.shape[1])).sum()) / len(truth) ** 2
            )
            accuracy = float((named == truth).mean())
            kappa = (accuracy - by_chance) / (1 - by_chance) if by_chance < 1 else None
            entry |= {"accuracy": accuracy, "kappa": kappa, "confidence": float(said.max(1).mean())}
        out.append(entry)
    return out


def _of_subjects(persons: list[dict[str, Any]]) -> Iterator[Figure | Table | str]:
    if not persons:
        yield "Every subject has one sequence, so there is no score of a subject by itself."
        return
    key = "mae" if "mae" in persons[0] else "accuracy"
    known = sorted((p for p in persons if p[key] is not None), key=lambda p: p[key])
    lower = key in evaluate.LOWER_IS_BETTER
    caption = (
        f"{evaluate.NAMES[key].capitalize()} of each test subject by itself, sorted; the numbers are given at random. A mean that all subjects share would "
        "be a flat row: the spread is what the interval over subjects comes from, and a subject far below the others is whom the model fails."
    )
    values = [p[key] for p in known]
    if len(known) <= SUBJECTS:
        yield Figure(
            name="subjects",
            title="Subject by subject",
            caption=caption,
            kind="bars",
            data={
                "names": [f"subject {p['subject']} ({p['windows']:,} windows)" for p in known],
                "values": values,
                "ylabel": evaluate.NAMES[key],
            },
        )
    else:
        yield Figure(
            name="subjects",
            title="Subject by subject",
            caption=caption,
            kind="lines",
            data={
                "series": [{"name": "subjects", "x": (np.arange(len(known)) + 0.5) / len(known), "y": values}],
                "xlabel": "share of the subjects",
                "ylabel": evaluate.NAMES[key],
            },
        )
    if values:
        worst = max(values) if lower else min(values)
        yield (
            f"Worst subject {worst:.3f}, median {float(np.median(values)):.3f}, best {(min(values) if lower else max(values)):.3f} of {len(values)} subjects."
        )


# --- nights -------------------------------------------------------------------------------------------------------------------------------


def add_nights(windows: Windows, head: Any, progress: Progress | None = None) -> list[Figure | Table | str]:
    """Predicted beside scored epochs of up to three test recordings: the one with the least, the middle and the most agreement.

    Only for windows that follow each other in a recording; () where none has ten.
    """
    chosen = windows["test"]
    recordings = chosen.index["recording_id"].to_numpy().astype(str)
    starts = chosen.index["start"].to_numpy().astype(float)
    epoch = windows.length / windows.rate if windows.rate else 0.0
    found: list[tuple[float, Array, Array, Array]] = []
    names, counts = np.unique(recordings, return_counts=True)
    for recording in names[counts >= EPOCHS][:60]:
        here = np.flatnonzero(recordings == recording)
        here = here[np.argsort(starts[here])]
        place = np.round((starts[here] - starts[here[0]]) / epoch).astype(int) if epoch else np.arange(0)
        if len(place) != len(here) or len(np.unique(place)) < len(place):  # overlapping windows: no night
            continue
        said = predict_rows(head, windows, chosen.rows[here], progress, "nights").argmax(1)
        truth = np.asarray(windows.targets(chosen.rows[here]))
        found.append((float((said == truth).mean()), place, truth, said))
    found.sort(key=lambda night: night[0])
    picked = sorted({0, len(found) // 2, len(found) - 1}) if found else []
    words = {0: "least", len(found) - 1: "most"}
    out: list[Figure | Table | str] = []
    for k in picked[:NIGHTS]:
        agreement, place, truth, said = found[k]
        tracks = []
        for name, stages in (("scored", truth), ("predicted", said)):
            line = np.full(place[-1] + 1, -1)
            line[place] = stages
            tracks.append({"name": name, "stages": line})
        out.append(
            Figure(
                name=f"night-{k + 1}",
                title=f"Recording with the {words.get(k, 'middle')} agreement: {agreement:.2f}"
                if len(found) > 1
                else f"One recording: agreement {agreement:.2f}",
                caption=f"Predicted against scored, {len(place)} windows, of {len(found)} recordings of the test split. Errors that sit at changes of stage are "
                "usual; a stage that is missing over a whole night is not. One recording is no score: the tables speak for all.",
                kind="hypnogram",
                data={"epoch": epoch, "classes": list(windows.class_names), "tracks": tracks},
            )
        )
    return out


# --- learning curve -----------------------------------------------------------------------------------------------------------------------


def read_learning_curve(run: LoadedRun, main: str) -> list[dict[str, Any]]:
    """Main test scores of this run and of its siblings: the same pre-trained model, data, readout and seed, other fractions of the subjects.

    A sibling counts when it has been evaluated on the test split. Entries: run, fraction, scratch, value, lo, hi; by fraction.
    """
    if run.folder is None:
        return []
    own = run.settings
    out = []
    for path in sorted(run.folder.parent.glob("*/scores.json")):
        try:
            body, scores = (json.loads(p.read_bytes()) for p in (path.with_name("run.json"), path))
        except (OSError, ValueError):
            continue
        if (
            body.get("kind") != "finetune"
            or scores.get("data") != run.windows.name
            or scores.get("split") != "test"
            or main not in scores.get("metrics", {})
        ):
            continue
        alike = [(b.get("source") or {}).get("run") for b in (body, own)]
        tuned = [{k: v for k, v in b["settings"]["finetune"].items() if k != "from_scratch"} for b in (body, own)]
        same = [b["data"][0]["fingerprint"] for b in (body, own)]
        if alike[0] != alike[1] or tuned[0] != tuned[1] or same[0] != same[1]:
            continue
        metric = scores["metrics"][main]
        scratch = (body.get("source") or {}).get("weights") is None
        out.append(
            {
                "run": body["run"],
                "fraction": body["settings"]["data"]["fraction"],
                "scratch": scratch,
                **{k: metric[k] for k in ("value", "lo", "hi")},
            }
        )
    return sorted(out, key=lambda one: (one["scratch"], one["fraction"], one["run"]))


def _learning(run: LoadedRun, curve: list[dict[str, Any]], main: str) -> Iterator[Figure | Table | str]:
    source = (run.settings.get("source") or {}).get("run") or "RUN"
    view = f"{run.windows.dataset}/{run.windows.view}" if run.windows.view else run.windows.dataset
    fractions = {one["fraction"] for one in curve if one["value"] is not None}
    if len(fractions) < 2:
        yield (
            "A learning curve needs runs on other shares of the training subjects, evaluated: for F in 0.05 0.1 0.2 0.5 1: "
            f"bitimely finetune {source} --data {view} --fraction F --run {source}-F, the same with --from-scratch --run {source}-F-scratch, "
            "then bitimely evaluate each of them, and this command again."
        )
        return
    series = []
    for scratch, name in ((False, "pre-trained"), (True, "from scratch")):
        points = [one for one in curve if one["scratch"] == scratch and one["value"] is not None]
        if points:
            line: dict[str, Any] = {"name": name, "x": [p["fraction"] for p in points], "y": [p["value"] for p in points]}
            if all(p["lo"] is not None for p in points):
                line |= {"lo": [p["lo"] for p in points], "hi": [p["hi"] for p in points]}
            series.append(line)
    yield Figure(
        name="learning-curve",
        title="Score against labels",
        caption="Test score of runs that were fine-tuned on a share of the training subjects; bands are 95 % intervals over test subjects, not over draws of the "
        "training subjects. If pre-training saves labels, its line lies above that from scratch on the left; where the two meet it no longer helps.",
        kind="lines",
        data={"series": series, "xlabel": "share of the training subjects", "ylabel": evaluate.NAMES[main], "logx": True},
    )
