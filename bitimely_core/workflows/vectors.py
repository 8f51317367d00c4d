"""`evaluate --vectors`: linear probes on the vectors of any encoder, compared with runs, random
weights and simple features.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bitimely_core import evaluate as scoring
from bitimely_core.config import DataConfig
from bitimely_core.errors import clean, usage_error
from bitimely_core.evaluate import window_counts
from bitimely_core.evaluate.linear import DEFAULT_PENALTY, PENALTIES, LinearProbe, fit_windows
from bitimely_core.evaluate.predict import predict
from bitimely_core.evaluate.vectors import EncoderVectors, count_declared_subjects, read_vectors
from bitimely_core.privacy import is_small, round_rows
from bitimely_core.records import refuse_other_manifest
from bitimely_core.report.encoder_page import encoder_page
from bitimely_core.report.renderer import write_report
from bitimely_core.report.run_page import verdict_text
from bitimely_core.report.text import make_slug
from bitimely_core.run import SPLITS, Run, flatten_compared
from bitimely_core.schemas.runs import RunRecord
from bitimely_core.schemas.scores import (
    ComparedRow,
    EncoderRecord,
    EvaluationSettings,
    Scores,
    TaskScores,
)
from bitimely_core.system_errors import attach_result
from bitimely_core.tokens.sequences import EventSequences
from bitimely_core.types import Progress
from bitimely_core.workflows.evaluate import (
    BaselineChoice,
    Unit,
    predict_shortcuts,
    protect_scores,
    score_endpoints,
)
from bitimely_core.workflows.prepare import open_run, prepare_windows
from bitimely_core.workspace import locate_new, shorten_name

if TYPE_CHECKING:
    from bitimely_core.tokens import Windows

# windows of train and of validation by default: as many as the baselines of a run are fitted on
MOST_FITTED = 5_000
SUFFIXES = ("(probe)", "(fine-tuned)")  # of the two models of a run
SEED = 0  # of draws of rows and of random weights
FEATURES = "logistic regression (numbers: ridge) on simple features of the windows, no model"

Predictions = dict[str, tuple[str, np.ndarray]]  # name -> description and prediction


class ProbedWindows(NamedTuple):
    """The windows that linear probes are fitted and scored on."""

    windows: Windows
    rows: Mapping[str, np.ndarray]  # split -> positions in the full index
    target: Mapping[str, np.ndarray]  # of them
    scored: Windows  # those of test

    def fit(self, one: EncoderVectors) -> LinearProbe:
        """The probe of an encoder."""
        ends = np.cumsum([len(self.rows[split]) for split in SPLITS])[:-1]
        return fit_windows(
            self.windows, dict(zip(SPLITS, np.split(one.vectors, ends), strict=True)), self.target
        )


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
    progress: Progress | None = None,
) -> dict[str, object]:
    """Score the first file of `vectors` by a linear probe on the test split of `data` (None: that
    of the first of `runs`); returns the scores.

    The penalty is chosen on the validation split. The probe is compared, paired and on the same
    windows, with probes of the other files and of the vectors of `runs`, with the fine-tuned ones
    as they are, and with the baselines: random weights of each run, simple features, constants.
    `sequences` windows of each split are drawn as by the analysis probing; None: all of test, up to
    5,000 of the others. Writes `scores.json` and a page into `reports/vectors-<encoder>-<data>` (or
    `out`).

    Raises UserError: config, not_found (2); those of `read_vectors`, subject_leakage, incomplete
    (4); integrity (5).
    """
    from bitimely_core.analyses.probing import draw_splits
    from bitimely_core.train.devices import select_device

    select_device(device)
    opened = [
        open_run(run, workspace, data=data, verify=verify, dry_run=dry_run, progress=progress)
        for run in runs
    ]
    windows = _open_windows(
        opened, data, workspace, verify=verify, dry_run=dry_run, progress=progress
    )
    rows = draw_splits(windows, sequences or MOST_FITTED, sequences or len(windows), SEED)
    read = np.concatenate([rows[split] for split in SPLITS])
    found = _name_encoders([read_vectors(path, windows, read) for path in vectors], opened)
    first = next(iter(found))
    folder = out or locate_new(
        workspace,
        "reports",
        shorten_name(["vectors", make_slug(found[first].name, set()), windows.name]),
    )
    refuse_other_manifest(folder)
    hidden = isinstance(windows, EventSequences) and not windows.options.small_counts
    if hidden and len(rows["test"]) < len(windows["test"]):
        raise usage_error(
            "a part of the test split",
            "counts of people are withheld in these data",
            "Leave it out",
            field="--sequences",
        )
    scored = windows.subset(np.isin(windows.rows, rows["test"]))
    n_subjects = len(set(scored.subjects()))
    if dry_run:
        n = None if hidden and is_small(n_subjects) else len(scored)
        return {
            "encoders": list(found),
            "data": windows.name,
            "n": n,
            "n_subjects": n and n_subjects,
            "folder": str(folder),
        }
    of = ProbedWindows(
        windows,
        rows,
        {split: np.asarray(windows.targets(at)) for split, at in rows.items()},
        scored,
    )
    probes = {name: of.fit(one) for name, one in found.items()}
    others = {
        name: (f"linear probe on the vectors of {name}", probe.prediction)
        for name, probe in probes.items()
        if name != first
    }
    controls = _predict_controls(of, baselines)
    for run in opened:
        own, random = _predict_by_run(of, run, baselines, batch_size, device, progress)
        others |= own
        controls |= {
            name if len(opened) == 1 else f"{name}_of_{run.name}": one
            for name, one in random.items()
        }
    if not opened and baselines == "all":
        controls |= _predict_without_run(of, device, progress)
    columns = {"target": of.target["test"], "prediction": probes[first].prediction}
    task = _score_probe(of, columns["prediction"], others | controls, bootstrap, by)
    shared = {name: count_declared_subjects(one.declared, windows) for name, one in found.items()}
    own_shared = shared[first] or 0
    complete = len(scored) == len(windows["test"])
    scores = Scores(
        **{name: getattr(task, name) for name in type(task).model_fields if name != "baselines"},
        baselines={name: one for name, one in task.baselines.items() if name not in others},
        compared={name: task.baselines[name] for name in others},
        compared_rows=None
        if hidden
        else _compare_rows(
            of, found, opened, {first: ("", columns["prediction"])} | others, bootstrap, by
        ),
        run=found[first].name,
        data=windows.name,
        settings=EvaluationSettings(
            bootstrap=bootstrap, by=by, baselines=baselines, seed=SEED, verified=verify
        ),
        subjects_shared_with_training=round_rows(own_shared) if hidden else own_shared,
        notices=_list_notices(of, found, shared, opened, probes, by, verify=verify),
        encoder=_describe_encoder(
            found[first],
            probes[first],
            {} if hidden else {s: len(rows[s]) for s in ("train", "validation")},
        ),
        **(score_endpoints(windows, scored, bootstrap, **columns) if complete else {}),
    )
    scores = protect_scores(scores, windows)
    with attach_result(scores.to_json):
        page = encoder_page(scored, scores, columns if complete else {})
        report = write_report(folder, page, others={"scores.json": scores.encode()})
    return {**scores.to_json(), "report": str(report), "verdict": verdict_text(scores)}


def _open_windows(
    opened: Sequence[Run],
    data: str | None,
    workspace: Path,
    *,
    verify: bool,
    dry_run: bool,
    progress: Progress | None,
) -> Windows:
    """The labelled windows, which all runs can read. Raises UserError (exit 2, 4)."""
    if data is None and not opened:
        raise usage_error(
            "no data",
            "expected the data set or view that was encoded",
            "For example --data synthetic/staging",
            field="--data",
        )
    windows = (
        opened[0].windows()
        if opened
        else prepare_windows(
            str(data), workspace, DataConfig(), verify=verify, dry_run=dry_run, progress=progress
        )
    )
    if windows.task == "none":
        raise usage_error(
            f"{windows.name} has no labels",
            "expected a labelled view",
            "Give one, for example synthetic/staging",
            field="--data",
        )
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
    found: Sequence[EncoderVectors], opened: Sequence[Run]
) -> dict[str, EncoderVectors]:
    """The files by the names of their encoders, and by their seeds. Raises UserError (config, exit
    2) for two of one name, also among the runs.
    """
    out: dict[str, EncoderVectors] = {}
    for one in found:
        several = (
            one.declared.seed is not None and sum(other.name == one.name for other in found) > 1
        )
        key = f"{one.name}, seed {one.declared.seed}" if several else one.name
        if key in out or key in {f"{run.name} {suffix}" for run in opened for suffix in SUFFIXES}:
            problem, hint = (
                f"{key} is the name of two encoders",
                "Declare other names or seeds in their metadata or TOML file",
            )
            raise usage_error(
                problem, "expected different ones", hint, file=str(one.path), field="encoder"
            )
        out[key] = one
    if len({run.name for run in opened}) < len(opened):
        raise usage_error(
            "a run is given twice", "expected different ones", "Name each once", field="--run"
        )
    return out


def _predict_controls(of: ProbedWindows, baselines: BaselineChoice) -> Predictions:
    """What the length alone predicts, and simple features."""
    from bitimely_core.analyses.probing import fit_simple_features

    about = scoring.scores.ABOUT
    out = {
        name: (about[name], one) for name, one in predict_shortcuts(of.windows, of.scored).items()
    }
    if baselines == "all":
        out["simple_features"] = FEATURES, fit_simple_features(*of[:3]).prediction
        if isinstance(of.windows, EventSequences):
            for kind, words in window_counts.DESCRIPTIONS.items():
                found = window_counts.predict_from_counts(
                    kind, of.windows, of.rows, of.target, len(PENALTIES)
                )
                out[window_counts.TITLES[kind].replace(" ", "_")] = words, found
    return out


def _predict_by_run(
    of: ProbedWindows,
    run: Run,
    baselines: BaselineChoice,
    batch_size: int | None,
    device: str,
    progress: Progress | None,
) -> tuple[Predictions, Predictions]:
    """The probe of a run's vectors and, of a fine-tuned one, its own predictions; and the probe of
    random weights.
    """
    from bitimely_core.analyses import features
    from bitimely_core.analyses.probing import draw_random_weights, fit_model_probes, make_key

    choice, model = features.default_choice(run), run.model()
    control = {"random": draw_random_weights(model, SEED)} if baselines == "all" else {}
    probes = fit_model_probes(
        {"trained": model, **control}, *of[:3], [choice], device=device, progress=progress
    )
    words = f"linear probe on {choice.describe()} of {run.name}"
    own = {f"{run.name} (probe)": (words, probes[make_key("trained", choice)].prediction)}
    random = (
        {
            "random_weights": (
                f"{words} with random weights",
                probes[make_key("random", choice)].prediction,
            )
        }
        if control
        else {}
    )
    if (head := run.head()) is not None:
        prediction = predict(
            head, of.scored, batch_size=batch_size, device=device, progress=progress
        )
        own[f"{run.name} (fine-tuned)"] = "fine-tuned on the training labels", prediction
    return own, random


def _predict_without_run(of: ProbedWindows, device: str, progress: Progress | None) -> Predictions:
    """The probe of random weights of the smallest preset; none where it does not read the
    windows.
    """
    from bitimely_core import models
    from bitimely_core.analyses.features import VectorChoice
    from bitimely_core.analyses.probing import draw_random_weights, fit_model_probes

    windows, codes = of.windows, len(of.windows.vocabulary)
    if getattr(windows, "irregular", False):
        return {}
    events = {"tokenizer": "codes", "codes": codes} if codes else {}
    model = models.build(
        "bitimelygpt", preset="tiny", channels=windows.channels, length=windows.length, **events
    )
    random, choice = {"random": draw_random_weights(model, SEED)}, VectorChoice("sos", "last")
    (probe,) = fit_model_probes(
        random, *of[:3], [choice], device=device, progress=progress
    ).values()
    return {
        "random_weights": (
            f"linear probe on {choice.describe()} of bitimelygpt, preset tiny, with random weights",
            probe.prediction,
        )
    }


def _score_probe(
    of: ProbedWindows, prediction: np.ndarray, others: Predictions, bootstrap: int, by: Unit
) -> TaskScores:
    return scoring.score(
        of.windows.task,
        of.target["test"],
        prediction,
        of.scored.subjects(),
        class_names=of.windows.class_names,
        train_target=of.target["train"],
        baselines={name: one for name, (_, one) in others.items()},
        about={name: about for name, (about, _) in others.items()},
        bootstrap=bootstrap,
        by=by,
        unit=of.windows.target_unit,
        subject=of.windows.subject_unit,
    )


def _group_rows(
    found: Mapping[str, EncoderVectors], opened: Sequence[Run], names: Collection[str]
) -> dict[str, list[str]]:
    """Row -> its models: the files of one encoder, the runs that differ in their seed alone. The
    first row is that of the first file.
    """
    rows: dict[str, list[str]] = {}
    for key, one in found.items():
        rows.setdefault(one.name, []).append(key)
    groups: list[list[Run]] = []
    for run in opened:
        same = [
            group
            for group in groups
            if all(_differ_in_seed(run.record, other.record) for other in group)
        ]
        if same:
            same[0].append(run)
        else:
            groups.append([run])
    for group in groups:
        more = f" and {len(group) - 1} other seeds" if len(group) > 1 else ""
        for suffix in SUFFIXES:
            if models := [name for run in group if (name := f"{run.name} {suffix}") in names]:
                rows[f"{group[0].name}{more} {suffix}"] = models
    return rows


def _differ_in_seed(one: RunRecord, other: RunRecord) -> bool:
    both = [
        flatten_compared(record, ("kind", "model", "settings")) | {"settings.train.seed": None}
        for record in (one, other)
    ]
    return one.seed != other.seed and both[0] == both[1]


def _compare_rows(
    of: ProbedWindows,
    found: Mapping[str, EncoderVectors],
    opened: Sequence[Run],
    models: Predictions,
    bootstrap: int,
    by: Unit,
) -> dict[str, ComparedRow]:
    """The main metric of the first row less that of each other, of means over seeds, as one
    family.
    """
    rows = _group_rows(found, opened, models)
    subjects, (first, *others) = of.scored.subjects(), rows
    measured = scoring.estimate_runs(
        of.windows.task,
        {
            name: scoring.Predictions(of.rows["test"], of.target["test"], one, subjects)
            for name, (_, one) in models.items()
        },
        class_names=of.windows.class_names,
        bootstrap=bootstrap,
        by=by,
        unit=of.windows.target_unit,
        subject=of.windows.subject_unit,
    )
    family = scoring.holm_correct(
        [scoring.paired_difference(measured, rows[first], rows[row]) for row in others]
    )
    return {
        row: ComparedRow(**d.model_dump(), models=tuple(rows[row]))
        for row, d in zip(others, family, strict=True)
    }


def _describe_encoder(
    one: EncoderVectors, probe: LinearProbe, fitted: dict[str, int]
) -> EncoderRecord:
    declared, width = one.declared.pretrained_on, one.vectors.shape[1]
    return EncoderRecord(
        file=clean(one.path.name),
        sha256=one.sha256,
        width=width,
        pretrained_on=declared,
        penalty=probe.penalty,
        fitted_on=fitted,
    )


def _list_notices(
    of: ProbedWindows,
    found: Mapping[str, EncoderVectors],
    shared: Mapping[str, int | None],
    opened: Sequence[Run],
    probes: Mapping[str, LinearProbe],
    by: str,
    *,
    verify: bool,
) -> list[str]:
    """Caveats of the encoders, the windows and the probes."""
    out, windows, rows, first = [], of.windows, of.rows, next(iter(found))
    if first != found[first].name:
        out.append(
            f"Scores and baselines are those of {first}; differences to other models are of means over seeds."
        )
    n_subjects = len(set(of.scored.subjects()))
    for name, one in found.items():
        declared = one.declared
        if shared[name]:
            out.append(
                f"{shared[name]} of {n_subjects} subjects of the test split were in the declared pre-training of {name}: its scores are not of "
                "people that it has not seen."
            )
        elif shared[name] is None:
            why = (
                "not declared"
                if declared.pretrained_on is None
                else f"declared by names ({', '.join(declared.pretrained_on)}) alone"
            )
            out.append(
                f"The pre-training data of {name} are {why}: whether subjects of the test split were in them is unknown "
                "(pretrained_on, pretrained_subjects)."
            )
        if declared.pretrained_subjects and not set(declared.pretrained_subjects) & set(
            windows.subjects()
        ):
            out.append(
                f"No subject that {name} declares occurs in {windows.name}: are these its subject_id?"
            )
        if not one.has_identity:
            out.append(
                f"The vectors of {name} name their windows by number alone: that they are of {windows.name} could not be compared (columns "
                "recording_id and start)."
            )
    out += [f"{run.name}: {line}" for run in opened for line in run.record.notices]
    out += windows.notices
    out += [
        f"{len(at):,} of the {len(windows[split]):,} {split} windows were used, drawn at random."
        for split, at in rows.items()
        if len(at) < len(windows[split])
    ]
    if not len(rows["validation"]):
        out.append(f"No validation split: all penalties are {DEFAULT_PENALTY:g}.")
    if unfinished := sum(probe.unfinished for probe in probes.values()):
        out.append(f"{unfinished} of the fits stopped before convergence.")
    if by == "window":
        out.append(
            "Intervals are over windows, not subjects (--by window): windows of one subject are not independent, so they are too narrow."
        )
    if not verify:
        out.append("Checksums were not compared (--no-verify).")
    return list(dict.fromkeys(out))
