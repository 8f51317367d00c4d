"""The verb `evaluate --vectors`: linear probes on the vectors of any encoder.

They are compared with runs, with random weights and with simple features.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bitimely_core import evaluate as scoring
from bitimely_core.errors import clean, usage_error
from bitimely_core.evaluate import baselines
from bitimely_core.evaluate.prediction import Computation, predict
from bitimely_core.evaluate.vector_files import (
    EncoderVectors,
    count_declared_subjects,
    read_vectors,
)
from bitimely_core.methods.linear import DEFAULT_PENALTY, PENALTIES, LinearProbe, fit_windows
from bitimely_core.report.encoder_page import encoder_page
from bitimely_core.report.page_text import make_slug
from bitimely_core.report.renderer import write_report
from bitimely_core.run import SPLITS, Run, flatten_compared
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.schemas.scores import ComparedRow, EncoderRecord, EvaluationSettings, Scores
from bitimely_core.store.records import refuse_other_manifest
from bitimely_core.store.workspace import locate_new, shorten_name
from bitimely_core.system_errors import attach_result
from bitimely_core.tokens.sequences import EventSequences
from bitimely_core.tokens.sets import require_labels
from bitimely_core.types import leave_out
from bitimely_core.workflows.evaluate import (
    NOT_COMPARED,
    OVER_WINDOWS,
    BaselineChoice,
    Predictions,
    ScoredWindows,
    Unit,
    describe_scores,
    predict_shortcuts,
    protect_scores,
    score_endpoints,
    score_windows,
)
from bitimely_core.workflows.prepare import (
    Execution,
    hides_counts,
    open_run,
    prepare_windows,
    share_sizes,
)

if TYPE_CHECKING:
    from bitimely_core.tokens import Windows

# windows of train and of validation by default: as many as the baselines of a run are fitted on
MOST_FITTED = 5_000
SUFFIXES = ("(probe)", "(fine-tuned)")  # of the two models of a run
SEED = 0  # of draws of rows and of random weights
FEATURES = "logistic regression (numbers: ridge) on simple features of the windows, no model"


class ProbedWindows(NamedTuple):
    """The windows that linear probes are fitted and scored on."""

    windows: Windows
    rows: Mapping[str, np.ndarray]  # split -> positions in the full index
    target: Mapping[str, np.ndarray]  # of them
    scored: Windows  # those of test
    settings: EvaluationSettings

    @property
    def is_complete(self) -> bool:
        """Whether the whole test split is scored."""
        return len(self.scored) == len(self.windows["test"])

    @property
    def n_subjects(self) -> int:
        """Subjects of the scored windows."""
        return len(set(self.scored.subjects()))

    def fit(self, encoder: EncoderVectors) -> LinearProbe:
        """The probe of an encoder."""
        ends = np.cumsum([len(self.rows[split]) for split in SPLITS])[:-1]
        vectors = dict(zip(SPLITS, np.split(encoder.vectors, ends), strict=True))
        return fit_windows(self.windows, vectors, self.target)


def evaluate_vectors(
    vectors: Sequence[Path],
    *,
    data: str | None = None,
    runs: Sequence[str | Path] = (),
    sequences: int | None = None,
    bootstrap: int = 1000,
    by: Unit = "subject",
    baselines: BaselineChoice = "all",
    batch_size: int | None = None,
    device: str = "auto",
    out: Path | None = None,
    workspace: Path = Path("workspace"),
    verify: bool = True,
    dry_run: bool = False,
) -> dict[str, object]:
    """Score the first file of `vectors` by a linear probe on the test split of `data`.

    Without `data` it is that of the first of `runs`. Returns the scores, and writes them as
    `scores.json` with a page into `reports/vectors-<encoder>-<data>` (or `out`).

    The penalty is chosen on the validation split. The probe is compared, paired and on the same
    windows, with probes of the other files and of the vectors of `runs`, with the fine-tuned ones
    as they are, and with the baselines: random weights of each run, simple features, constants.
    `sequences` windows of each split are drawn as by the analysis probing. None: all of test, up to
    5,000 of the others.

    Raises UserError: config, not_found (2); those of `read_vectors`, subject_leakage, incomplete
    (4); integrity (5).
    """
    from bitimely_core.analyses.probing import draw_splits
    from bitimely_core.train.devices import select_device

    select_device(device)
    execution = Execution(workspace, verify=verify, dry_run=dry_run)
    opened = [open_run(run, execution, data) for run in runs]
    windows = _open_windows(opened, data, execution)
    rows = draw_splits(windows, sequences or MOST_FITTED, sequences or len(windows), SEED)
    positions = np.concatenate(list(rows.values()))
    encoders = _name_encoders([read_vectors(path, windows, positions) for path in vectors], opened)
    first, encoder = next(iter(encoders.items()))
    folder = out or locate_new(
        workspace,
        "reports",
        shorten_name(["vectors", make_slug(encoder.name, set()), windows.name]),
    )
    refuse_other_manifest(folder)
    settings = EvaluationSettings(
        bootstrap=bootstrap, by=by, baselines=baselines, seed=SEED, verified=verify
    )
    probed = _select_windows(windows, rows, settings)
    if dry_run:
        return {
            "encoders": list(encoders),
            "data": windows.name,
            "folder": str(folder),
            **share_sizes(probed.scored),
        }
    probes = {name: probed.fit(encoder) for name, encoder in encoders.items()}
    models, controls = _predict_others(probed, probes, opened, batch_size, device)
    exact = _score_encoder(probed, encoders, probes, opened, models, controls)
    scores = protect_scores(exact, windows)
    columns = {"target": probed.target["test"], "prediction": probes[first].prediction}
    with attach_result(scores.to_json):
        page = encoder_page(probed.scored, scores, columns if probed.is_complete else {})
        report = write_report(folder, page, others={"scores.json": scores.encode()})
    return {"report": str(report), **describe_scores(scores, exact)}


def _select_windows(
    windows: Windows, rows: Mapping[str, np.ndarray], settings: EvaluationSettings
) -> ProbedWindows:
    """The rows with their labels. Raises UserError (config, exit 2) for a part of the test split
    where counts of people are withheld: they could be computed from the parts.
    """
    scored = windows.subset(np.isin(windows.rows, rows["test"]))
    target = {split: np.asarray(windows.targets(rows[split])) for split in rows}
    probed = ProbedWindows(windows, rows, target, scored, settings)
    if hides_counts(windows) and not probed.is_complete:
        raise usage_error(
            "a part of the test split",
            "counts of people are withheld in these data",
            "Leave it out",
            field="--sequences",
        )
    return probed


def _predict_others(
    probed: ProbedWindows,
    probes: Mapping[str, LinearProbe],
    opened: Sequence[Run],
    batch_size: int | None,
    device: str,
) -> tuple[Predictions, Predictions]:
    """What the first encoder is compared with: the other encoders and the runs, and controls."""
    models = {
        name: (f"linear probe on the vectors of {name}", probe.prediction)
        for name, probe in list(probes.items())[1:]
    }
    controls = _predict_controls(probed)
    for run in opened:
        predictions, random = _predict_by_run(probed, run, batch_size, device)
        models |= predictions
        suffix = "" if len(opened) == 1 else f"_of_{run.name}"
        controls |= {f"{name}{suffix}": random[name] for name in random}
    if not opened and probed.settings.baselines == "all":
        controls |= _predict_without_run(probed, device)
    return models, controls


def _score_encoder(
    probed: ProbedWindows,
    encoders: Mapping[str, EncoderVectors],
    probes: Mapping[str, LinearProbe],
    opened: Sequence[Run],
    models: Predictions,
    controls: Predictions,
) -> Scores:
    """The scores of the first encoder beside all others."""
    windows, hidden = probed.windows, hides_counts(probed.windows)
    first, encoder = next(iter(encoders.items()))
    prediction = probes[first].prediction
    rows = ScoredWindows(probed.target["test"], prediction, probed.scored.subjects())
    task = score_windows(windows, rows, models | controls, probed.target["train"], probed.settings)
    shared = {name: count_declared_subjects(encoders[name].declared, windows) for name in encoders}
    n_shared = shared[first] or 0
    compared = None
    if not hidden:
        compared = _compare_rows(probed, encoders, opened, {first: ("", prediction)} | models)
    endpoints = {}
    if probed.is_complete:
        endpoints = score_endpoints(
            windows, probed.scored, probed.settings.bootstrap, rows.target, prediction
        )
    fitted = {split: len(probed.rows[split]) for split in SPLITS[:2]}
    return Scores(
        **{**dict(task), "baselines": leave_out(task.baselines, models)},
        compared={name: task.baselines[name] for name in models},
        compared_rows=compared,
        run=encoder.name,
        data=windows.name,
        settings=probed.settings,
        subjects_shared_with_training=n_shared,
        notices=_list_notices(probed, encoders, shared, opened, probes),
        encoder=EncoderRecord(
            file=clean(encoder.path.name),
            sha256=encoder.sha256,
            width=encoder.vectors.shape[1],
            pretrained_on=encoder.declared.pretrained_on,
            penalty=probes[first].penalty,
            fitted_on=fitted,
        ),
        **endpoints,
    )


def _open_windows(opened: Sequence[Run], data: str | None, execution: Execution) -> Windows:
    """The labelled windows, which all runs can read. Raises UserError (exit 2, 4)."""
    if data is None and not opened:
        raise usage_error(
            "no data",
            "expected the data set or view that was encoded",
            "For example --data synthetic/staging",
            field="--data",
        )
    windows = opened[0].windows() if opened else prepare_windows(str(data), execution)
    require_labels(windows)
    for run in opened:
        if run.windows().fingerprint != windows.fingerprint:
            raise usage_error(
                f"{run.name} reads other windows",
                f"expected {windows.name}",
                "Name the view with --data",
                field="--run",
            )
        run.adapter_for(windows)
        run.count_shared_subjects()
    return windows


def _name_encoders(
    files: Sequence[EncoderVectors], opened: Sequence[Run]
) -> dict[str, EncoderVectors]:
    """The files by the names of their encoders, and by their seeds. Raises UserError (config, exit
    2) for two of one name, also among the runs.
    """
    taken = {f"{run.name} {suffix}" for run in opened for suffix in SUFFIXES}
    counts = Counter(file.name for file in files)
    encoders: dict[str, EncoderVectors] = {}
    for file in files:
        seed, name = file.declared.seed, file.name
        if seed is not None and counts[name] > 1:
            name = f"{name}, seed {seed}"
        if name in encoders or name in taken:
            raise usage_error(
                f"{name} is the name of two encoders",
                "expected different ones",
                "Declare other names or seeds in their metadata or TOML file",
                file=str(file.path),
                field="encoder",
            )
        encoders[name] = file
    if len({run.name for run in opened}) < len(opened):
        raise usage_error(
            "a run is given twice", "expected different ones", "Name each once", field="--run"
        )
    return encoders


def _predict_controls(probed: ProbedWindows) -> Predictions:
    """What the length alone predicts, and simple features."""
    from bitimely_core.analyses.probing import fit_simple_features

    windows, rows, target = probed[:3]
    controls = predict_shortcuts(windows, probed.scored)
    if probed.settings.baselines == "cheap":
        return controls
    controls["simple_features"] = FEATURES, fit_simple_features(windows, rows, target).prediction
    if isinstance(windows, EventSequences) and windows.task != "survival":
        parts = {
            split: windows.subset(np.isin(windows.rows, drawn)) for split, drawn in rows.items()
        }
        for kind in ("counts-logistic", "counts-trees"):
            title = baselines.title_baseline(kind).replace(" ", "_")
            prediction = baselines.fit_and_predict(kind, parts, 0, len(PENALTIES))
            controls[title] = baselines.describe_baseline(kind), prediction
    return controls


def _predict_by_run(
    probed: ProbedWindows, run: Run, batch_size: int | None, device: str
) -> tuple[Predictions, Predictions]:
    """The probe of a run's vectors and, of a fine-tuned one, its own predictions; and the probe of
    random weights.
    """
    from bitimely_core.analyses import plain_features
    from bitimely_core.analyses.probing import draw_random_weights, fit_model_probes, make_key

    choice, models = plain_features.default_choice(run), {"trained": run.model()}
    if probed.settings.baselines == "all":
        models["random"] = draw_random_weights(models["trained"], SEED)
    probes = fit_model_probes(models, *probed[:3], [choice], device=device)
    words = f"linear probe on {choice.describe()} of {run.name}"
    predictions = {f"{run.name} (probe)": (words, probes[make_key("trained", choice)].prediction)}
    random = {}
    if "random" in models:
        prediction = probes[make_key("random", choice)].prediction
        random["random_weights"] = f"{words} with random weights", prediction
    if (head := run.head()) is not None:
        predictions[f"{run.name} (fine-tuned)"] = (
            "fine-tuned on the training labels",
            predict(head, probed.scored, Computation(batch_size, device)),
        )
    return predictions, random


def _predict_without_run(probed: ProbedWindows, device: str) -> Predictions:
    """The probe of random weights of the smallest preset; none where it does not read the
    windows.
    """
    from bitimely_core import models
    from bitimely_core.analyses.plain_features import VectorChoice
    from bitimely_core.analyses.probing import draw_random_weights, fit_model_probes

    windows, codes = probed.windows, len(probed.windows.vocabulary)
    if getattr(windows, "irregular", False):
        return {}
    events = {"tokenizer": "codes", "codes": codes} if codes else {}
    model = models.build(
        "bitimelygpt", preset="tiny", channels=windows.channels, length=windows.length, **events
    )
    random, choice = {"random": draw_random_weights(model, SEED)}, VectorChoice("sos", "last")
    (probe,) = fit_model_probes(random, *probed[:3], [choice], device=device).values()
    return {
        "random_weights": (
            f"linear probe on {choice.describe()} of bitimelygpt, preset tiny, with random weights",
            probe.prediction,
        )
    }


def _group_models(
    encoders: Mapping[str, EncoderVectors], opened: Sequence[Run], names: Collection[str]
) -> dict[str, list[str]]:
    """Row -> its models: the files of one encoder, the runs that differ in their seed alone. The
    first row is that of the first file.
    """
    rows: dict[str, list[str]] = {}
    for key, encoder in encoders.items():
        rows.setdefault(encoder.name, []).append(key)
    for group in _group_runs(opened):
        seeds = f" and {len(group) - 1} other seeds" if len(group) > 1 else ""
        for suffix in SUFFIXES:
            models = [f"{run.name} {suffix}" for run in group]
            if present := [name for name in models if name in names]:
                rows[f"{group[0].name}{seeds} {suffix}"] = present
    return rows


def _group_runs(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs in groups that differ in their seed alone."""
    groups: list[list[Run]] = []
    for run in runs:
        for group in groups:
            if all(_differ_in_seed(run.record, other.record) for other in group):
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def _differ_in_seed(first: RunRecord, second: RunRecord) -> bool:
    settings = [
        flatten_compared(record, ("kind", "model", "settings")) | {"settings.train.seed": None}
        for record in (first, second)
    ]
    return first.seed != second.seed and settings[0] == settings[1]


def _compare_rows(
    probed: ProbedWindows,
    encoders: Mapping[str, EncoderVectors],
    opened: Sequence[Run],
    models: Predictions,
) -> dict[str, ComparedRow]:
    """The main metric of the first row less that of each other, of means over seeds, as one
    family.
    """
    rows = _group_models(encoders, opened, models)
    windows, settings, subjects = probed.windows, probed.settings, probed.scored.subjects()
    positions, target = probed.rows["test"], probed.target["test"]
    measured = scoring.estimate_runs(
        windows.task,
        {
            name: scoring.Predictions(positions, target, prediction, subjects)
            for name, (_, prediction) in models.items()
        },
        class_names=windows.class_names,
        bootstrap=settings.bootstrap,
        by=settings.by,
        unit=windows.target_unit,
        subject=windows.subject_unit,
    )
    first, *others = rows
    family = scoring.holm_correct(
        [scoring.paired_difference(measured, rows[first], rows[row]) for row in others]
    )
    return {
        row: ComparedRow(**difference.model_dump(), models=tuple(rows[row]))
        for row, difference in zip(others, family, strict=True)
    }


def _list_notices(
    probed: ProbedWindows,
    encoders: Mapping[str, EncoderVectors],
    shared: Mapping[str, int | None],
    opened: Sequence[Run],
    probes: Mapping[str, LinearProbe],
) -> list[str]:
    """Caveats of the encoders, the windows and the probes."""
    notices, windows, first = [], probed.windows, next(iter(encoders))
    if first != encoders[first].name:
        notices.append(
            f"Scores and baselines are those of {first}; "
            "differences to other models are of means over seeds."
        )
    for name, encoder in encoders.items():
        notices += _list_encoder_notices(name, encoder, shared[name], probed)
    notices += [f"{run.name}: {line}" for run in opened for line in run.record.notices]
    notices += [*windows.notices, *_list_draws(probed)]
    if not len(probed.rows["validation"]):
        notices.append(f"No validation split: all penalties are {DEFAULT_PENALTY:g}.")
    if unfinished := sum(probe.unfinished for probe in probes.values()):
        notices.append(f"{unfinished} of the fits stopped before convergence.")
    if probed.settings.by == "window":
        notices.append(OVER_WINDOWS)
    if not probed.settings.verified:
        notices.append(NOT_COMPARED)
    return list(dict.fromkeys(notices))


def _list_draws(probed: ProbedWindows) -> list[str]:
    """The splits of which only a part was used."""
    totals = {split: len(probed.windows[split]) for split in probed.rows}
    return [
        f"{len(rows):,} of the {totals[split]:,} {split} windows were used, drawn at random."
        for split, rows in probed.rows.items()
        if len(rows) < totals[split]
    ]


def _list_encoder_notices(
    name: str, encoder: EncoderVectors, shared: int | None, probed: ProbedWindows
) -> list[str]:
    """Caveats of one encoder; `shared`: subjects of test in its pre-training, where declared."""
    notices, declared, data = [], encoder.declared, probed.windows.name
    if shared:
        notices.append(
            f"{shared} of {probed.n_subjects} subjects of the test split were in the declared "
            f"pre-training of {name}: its scores are not of people that it has not seen."
        )
    if shared is None:
        why = "not declared"
        if declared.pretrained_on is not None:
            why = f"declared by names ({', '.join(declared.pretrained_on)}) alone"
        notices.append(
            f"The pre-training data of {name} are {why}: whether subjects of the test split were "
            "in them is unknown (pretrained_on, pretrained_subjects)."
        )
    subjects = set(declared.pretrained_subjects or ())
    if subjects and subjects.isdisjoint(probed.windows.subjects()):
        notices.append(
            f"No subject that {name} declares occurs in {data}: are these its subject_id?"
        )
    if not encoder.has_identity:
        notices.append(
            f"The vectors of {name} name their windows by number alone: that they are of {data} "
            "could not be compared (columns recording_id and start)."
        )
    return notices
