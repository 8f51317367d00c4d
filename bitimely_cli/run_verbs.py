"""Verbs on runs: pretrain, finetune, train, evaluate, embed, analyze, report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer import Argument, Option

from bitimely_cli.claims_options import ClaimsFileOptions
from bitimely_cli.completion import complete
from bitimely_cli.following import name_next
from bitimely_cli.options import (
    RUNS,
    Data,
    Device,
    Encoding,
    OneData,
    OptionGroup,
    Out,
    ReadOptions,
    Run,
    ScoreOptions,
    Seed,
    StartOptions,
    TrainOptions,
    WriteOptions,
    declare_setting,
    expand_options,
    take_settings,
)
from bitimely_cli.screen import screen
from bitimely_core.config import DataConfig, FinetuneConfig
from bitimely_core.errors import Exit, Reason, input_warning, usage_error
from bitimely_core.privacy import format_count
from bitimely_core.types import leave_out

if TYPE_CHECKING:
    from bitimely_core.schemas.scores import MetricValue, PairedScores, Scores
    from bitimely_core.workflows.jobs import TrainingResult


class ResamplingUnit(StrEnum):
    """The unit of the intervals."""

    subject = "subject"
    window = "window"


class BaselineChoice(StrEnum):
    """The baselines beside the scores."""

    all = "all"
    cheap = "cheap"


# options of `evaluate` that only a run has
RUN_OPTIONS = ("compare", "margin", "predictions", "ids", "split", "calibrate_on")


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(OptionGroup):
    """What is pre-trained, and on what."""

    preset: Annotated[
        str | None,
        Option(
            help="See: bitimely list presets (default: the recipe file's, else tiny).",
            autocompletion=complete("presets"),
        ),
    ] = None
    data: Data = None
    model: Annotated[
        str | None, Option(help="See: bitimely list models.", autocompletion=complete("models"))
    ] = None
    budget: Annotated[
        str | None,
        Option(help="table (the paper's widths) or matched (as many parameters as bitimelygpt)."),
    ] = None
    objective: Annotated[
        str | None,
        Option(help="See: bitimely list objectives.", autocompletion=complete("objectives")),
    ] = None
    init: Annotated[
        Path | None,
        Option(help="Start with weights of a run, model folder or OWNER/NAME[@REVISION] of a hub."),
    ] = None


@take_settings(FinetuneConfig, "finetune")
@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(OptionGroup):
    """How a run is fine-tuned."""

    fraction: Annotated[
        float | None,
        declare_setting(
            DataConfig,
            "fraction",
            note=" Default: 0.2 on the data set of the pre-training, else 1.",
        ),
    ] = None


@take_settings(FinetuneConfig, "train")
@dataclass(frozen=True, kw_only=True)
class HeadOptions(OptionGroup):
    """How a model is trained from random weights."""

    preset: Annotated[
        str | None,
        Option(
            help="Sizes of the model, see: bitimely list presets (default: tiny).",
            autocompletion=complete("presets"),
        ),
    ] = None
    fraction: Annotated[float | None, declare_setting(DataConfig, "fraction")] = None
    folds: Annotated[
        int | None,
        Option(min=2, help="Train and score on so many test folds by subject, pooled as one run."),
    ] = None
    seeds: Annotated[
        int | None, Option(min=2, help="Train and score with so many seeds, pooled as one run.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class VectorOptions(OptionGroup):
    """Vectors that are scored in the place of a run."""

    vectors: Annotated[
        list[Path] | None,
        Option(metavar="FILE", help="Vectors of any encoder (docs/encoders.md); may be repeated."),
    ] = None
    runs: Annotated[
        list[str] | None,
        Option(
            "--run", metavar="RUN", help="With --vectors: runs to compare.", autocompletion=RUNS
        ),
    ] = None
    sequences: Annotated[
        int | None,
        Option(
            min=1,
            help="With --vectors: windows of each split, drawn as by analyze probing "
            "(default: all of test).",
        ),
    ] = None
    out: Annotated[Path | None, Option(metavar="DIR", help="With --vectors: where to write.")] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(OptionGroup):
    """How predictions are scored."""

    split: Annotated[str, Option(help="train, validation or test.")] = "test"
    bootstrap: Annotated[
        int,
        Option(min=0, max=1_000_000, help="Resamples of what has no closed form; 0: no intervals."),
    ] = 1000
    by: Annotated[
        ResamplingUnit, Option(help="subject, or window (to reproduce papers; stamped).")
    ] = ResamplingUnit.subject
    compare: Annotated[
        str | None, Option(metavar="RUN2", help="Differences to this run.", autocompletion=RUNS)
    ] = None
    margin: Annotated[
        float | None,
        Option(
            help="With --compare: a margin for the difference, in points or the unit of the error."
        ),
    ] = None
    predictions: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Write predictions as MEDS-evaluation reads them (tokenize --task).",
        ),
    ] = None
    ids: Annotated[
        Path | None, Option(metavar="FILE", help="Table of ingest --keep-ids, for --predictions.")
    ] = None
    calibrate_on: Annotated[
        str | None,
        Option(
            metavar="DATA",
            help="Histories: recalibrate the risks on the labels of these tokens (of the scored "
            "people themselves: in five parts, each by the others).",
        ),
    ] = None
    baselines: Annotated[
        BaselineChoice, Option(help="cheap: without those that are fitted; recorded.")
    ] = BaselineChoice.all


@dataclass(frozen=True, kw_only=True)
class AnalyzeOptions(OptionGroup):
    """What an analysis reads beside runs, and where it writes."""

    data: OneData = None
    model: Annotated[
        str | None,
        Option(
            help="Model to analyze instead of a run (leakage, complexity).",
            autocompletion=complete("models"),
        ),
    ] = None
    objective: Annotated[
        str | None,
        Option(
            help="Objective to analyze instead of that of a run (leakage).",
            autocompletion=complete("objectives"),
        ),
    ] = None
    preset: Annotated[
        str,
        Option(
            help="Sizes of that model, see: bitimely list presets.",
            autocompletion=complete("presets"),
        ),
    ] = "tiny"
    sequences: Annotated[
        int | None, Option(min=1, help="Largest number of sequences to analyze.")
    ] = None
    seed: Seed = None
    device: Device = None
    name: Annotated[str | None, Option(help="Name of the report.")] = None
    out: Out = None


@expand_options
def pretrain(
    *,
    source: PretrainOptions,
    training: TrainOptions,
    ties: Annotated[
        str | None, Option(help="Events at one time: canonical, shuffle or group.")
    ] = None,
    rotary: Annotated[str | None, Option(help="Rotation by token index or by time.")] = None,
    start: StartOptions,
) -> int:
    """Pre-train a model on unlabelled windows. The same command again continues a stopped run
    exactly.

    Example: bitimely pretrain --preset 18m
    """
    from bitimely_core import workflows

    call = partial(
        workflows.pretrain,
        ties=ties,
        rotary=rotary,
        **source.collect(),
        **training.collect(),
        **start.collect(),
    )
    result = _train_here_or_launch(call)
    return _show_training(result, start.workspace, start.dry_run)


@expand_options
def finetune(
    source: Run,
    *,
    data: OneData = None,
    head: FinetuneOptions,
    training: TrainOptions,
    start: StartOptions,
) -> int:
    """Fine-tune a run on a labelled view.

    Example: bitimely finetune 18m --data sleep-edf/staging
    """
    from bitimely_core import workflows

    options = {**head.collect(), **training.collect(), **start.collect()}
    call = partial(workflows.finetune, source, data=data, **options)
    result = _train_here_or_launch(call)
    return _show_training(result, start.workspace, start.dry_run)


@expand_options
def train(
    model: Annotated[
        str | None,
        Argument(
            help="See: bitimely list models (default: rates for signals whose label is a rate a "
            "minute, resnet for others, gru-d for samples at irregular times, trees for "
            "histories). Methods without a network: kernels, features, signal, rates, counts, "
            "trees.",
            metavar="MODEL",
            autocompletion=complete("models"),
        ),
    ] = None,
    *,
    data: OneData = None,
    head: HeadOptions,
    training: TrainOptions,
    start: StartOptions,
) -> int:
    """Train a model on the labels of a view from random weights, without pre-training.

    Without --steps, --epochs or --minutes it takes 3,000 steps of 32 windows: AdamW at the model's
    own rate, which rises over 5 % of the budget and falls as a cosine to 0. Methods without a
    network are fitted at once.

    --folds K trains and scores K models, so that each subject is tested once, by one that was not
    trained on it; --seeds K averages over seeds. Both make one run with one page. The same command
    again goes on where it stopped.

    Example: bitimely train resnet --data epilepsy/five --folds 5
    """
    from bitimely_core import workflows

    options = {**head.collect(), **training.collect(), **start.collect()}
    call = partial(workflows.train, model, data=data, **options)
    result = _train_here_or_launch(call)
    if "members" in result:
        return _show_members(result, start.workspace)
    return _show_training(result, start.workspace, start.dry_run)


def _show_members(result: TrainingResult, workspace: Path) -> int:
    """The pooled scores of folds or seeds."""
    if not result["writer"]:
        return Exit.OK
    lines = _show_scores(result["scores"], workspace)
    if not result["trained"]:
        lines.append("already finished under these settings: nothing to do")
    lines += [
        f"{len(result['members'])} runs: {result['members'][0]} and so on",
        f"run: {result['folder']}",
        name_next(result["run"], workspace),
    ]
    screen.result(result, lines)
    return Exit.OK


Margin = Annotated[
    float | None,
    Option(
        "--margin",
        help="Test non-inferiority and equivalence within this margin, "
        "in points or the unit of the error.",
    ),
]


@expand_options
def evaluate(
    run: Annotated[
        str | None, Argument(help="Name or folder of a run.", metavar="RUN", autocompletion=RUNS)
    ] = None,
    *,
    data: OneData = None,
    encoder: VectorOptions,
    choices: EvaluateOptions,
    score: ScoreOptions,
) -> int:
    """Score a run, or the vectors of any encoder, on the test split: metrics with 95 % intervals,
    baselines, paired comparison, report.

    Example: bitimely evaluate 18m-staging
    """
    from bitimely_core import workflows

    if run is None and not encoder.vectors:
        raise usage_error(
            "no run",
            "expected RUN, or the vectors of an encoder",
            "For example: bitimely evaluate 18m-staging",
            field="RUN",
        )
    options = choices.collect()
    if encoder.vectors:
        verb: Callable[..., Mapping[str, Any]] = workflows.evaluate_vectors
        if options["split"] == "test":
            del options["split"]
        _refuse_options([name for name in RUN_OPTIONS if name in options], "without")
        options |= encoder.collect()
        options["runs"] = [*filter(None, [run]), *(encoder.runs or [])]
    else:
        _refuse_options(encoder.collect(), "of")
        verb = partial(workflows.evaluate, run or "")
    options |= {"by": choices.by.value, "baselines": choices.baselines.value}
    show = partial(_show_scores, workspace=score.workspace)
    with screen.show_partial(show), screen.progress():
        result = verb(data=data, **options, **score.collect())
    if score.dry_run:
        return _show_plan(result)
    screen.result(result, [*show(result), name_next(run or "", score.workspace)])
    return Exit.OK


def _refuse_options(names: Iterable[str], where: str) -> None:
    """Raises UserError (config, exit 2) for options that do not fit what is scored."""
    for name in names:
        raise usage_error(
            f"is an option {where} --vectors",
            "expected one that fits",
            "Leave it out",
            field="--run" if name == "runs" else f"--{name.replace('_', '-')}",
        )


def _show_scores(result: Mapping[str, Any], workspace: Path) -> list[str]:
    """Print the tables of scores; the lines below them."""
    result = screen.choose(result)
    from bitimely_core.evaluate import describe_units
    from bitimely_core.report.run_page import verdict_text
    from bitimely_core.schemas.scores import Scores

    scores = Scores.model_validate(leave_out(result, {"report", "verdict"}))
    _show_metrics(scores)
    if scores.main and scores.baselines:
        _show_baselines(scores, scores.main)
    _show_calibration(scores)
    verdict = result.get("verdict") or verdict_text(scores)
    compared = [] if scores.comparison is None else _describe_comparison(scores)
    return [
        *_describe_undefined(scores),
        *screen.summarize(scores.notices, workspace, verdict),
        f"n = {format_count(scores.n)} windows of {describe_units(scores)}",
        *compared,
        *([f"report: {result['report']}"] if "report" in result else []),
    ]


def _show_metrics(scores: Scores) -> None:
    """Print each metric beside that on the training windows and that of a constant."""
    from bitimely_core.evaluate import METRICS
    from bitimely_core.schemas.scores import Baseline, MetricValue

    constant = {"regression": "mean", "survival": "prior"}.get(scores.task or "", "majority")
    constants = scores.baselines.get(constant, Baseline()).metrics
    training = {} if scores.training is None else scores.training.metrics
    rows: list[list[Any]] = []
    names = dict.fromkeys((*METRICS.get(scores.task or "", ()), *scores.metrics))
    for name in filter(scores.metrics.__contains__, names):
        metric = scores.metrics[name]
        chance = constants.get(name, MetricValue()).value
        trained = training.get(name, MetricValue()).value
        rows.append([name, *_list_numbers(metric), trained, chance])
    screen.table(
        [
            *("metric", "value", "se", "95 % CI lower", "upper"),
            *("training windows", f"{constant} baseline"),
        ],
        rows,
        f"{scores.run} on {scores.data} ({scores.split})",
    )


def _describe_undefined(scores: Scores) -> list[str]:
    """Why metrics have no value or no interval: a line for each reason."""
    metrics: dict[str, list[str]] = {}
    for name, metric in scores.metrics.items():
        if metric.undefined_reason:
            metrics.setdefault(metric.undefined_reason, []).append(name)
    return [
        f"{'all metrics' if len(names) == len(scores.metrics) else ', '.join(names)}: {reason}"
        for reason, names in metrics.items()
    ]


def _show_baselines(scores: Scores, main: str) -> None:
    """Print the main metric of each baseline, and the difference of the run to it."""
    from bitimely_core.schemas.scores import MetricValue

    rows = []
    for name, baseline in scores.baselines.items():
        metric = baseline.metrics.get(main, MetricValue())
        difference = metric.difference.difference if metric.difference else None
        rows.append([name.replace("_", " "), *_list_numbers(metric), difference])
    screen.table(
        ["baseline", main, "se", "95 % CI lower", "upper", "run less baseline"],
        rows,
        "Baselines on the same windows",
    )


def _show_calibration(scores: Scores) -> None:
    """Print the calibration of the risks of each label, where they are risks."""
    if scores.risk_calibration:
        from bitimely_core.analyses.plain_features import format_metric  # with torch
        from bitimely_core.report.score_blocks import list_calibration

        names, labels = list_calibration(scores.risk_calibration)
        rows = [[*row[:3], *map(format_metric, row[3:])] for row in labels]
        screen.table(names, rows, "Calibration of the risks")


def _list_numbers(metric: MetricValue) -> list[float | None]:
    return [metric.value, metric.se, metric.lo, metric.hi]


def _describe_comparison(scores: Scores) -> list[str]:
    """Lines about the differences to another run."""
    assert scores.comparison is not None
    runs = f"{scores.run} minus {scores.comparison.run}"
    differences = scores.comparison.metrics.items()
    lines = [f"{name}: {runs} = {_describe_difference(d)}" for name, d in differences]
    return [*lines, *filter(None, [scores.comparison.sentence])]


def _describe_difference(d: PairedScores) -> str:
    """A difference with its unit and its interval, or that it is undefined."""
    from bitimely_core.evaluate import MetricUnit
    from bitimely_core.evaluate.verdicts import choose_places

    if d.difference is None:
        return "undefined"
    unit = MetricUnit(d.unit or "1", d.factor or 1.0)
    lo, hi, se = (None if v is None else v * unit.factor for v in (d.lo, d.hi, d.se))
    places = choose_places(2 if unit.factor > 1 else 4, se, lo, hi)
    interval = ""
    if lo is not None:
        interval = f" (95 % CI {lo:+.{places}f} to {hi:+.{places}f})"
    return f"{d.difference * unit.factor:+.{places}f}{unit.suffix}{interval}"


@expand_options
def predict(
    run: Run,
    files: Annotated[
        list[Path],
        Argument(
            help="Recordings, folders of them (also BIDS) or caches; of histories one folder.",
            metavar="FILES...",
        ),
    ],
    *,
    channel_map: Annotated[
        list[str] | None,
        Option(
            "--map",
            metavar="WANTED=FOUND",
            help="Channel of the run = channel of the files, or a TOML file; may be repeated.",
        ),
    ] = None,
    times: Annotated[
        Path | None,
        Option(
            "--at",
            metavar="FILE",
            help="Times of a run on points, such as beats: a table of seconds, or annotations of "
            "WFDB or EDF+. Default: the annotations without a duration beside the recording.",
        ),
    ] = None,
    calibrate_on: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="One person's own labelled recordings (of histories: tokens of labelled people), "
            "to calibrate on instead of the validation split.",
        ),
    ] = None,
    as_of: Annotated[
        str | None,
        Option(
            metavar="YYYY-MM-DD",
            help="Histories: index day of all (default: that of the label table, else the last "
            "day of the data where the run was trained with index days).",
        ),
    ] = None,
    encoding: Encoding = None,
    out: Out = None,
    jobs: Annotated[
        int,
        Option(min=1, max=1024, help="Recordings that are read at a time, while the model works."),
    ] = 1,
    score: ScoreOptions,
    claims_files: ClaimsFileOptions,
) -> int:
    """Predict new recordings or people without labels: tables, hypnograms, risks and a page each.

    Histories: one folder of claims, OMOP, MEDS or MIMIC tables, read with the codes, the code map
    and the choices of the run.

    Example: bitimely predict 18m-staging night.edf --map "EEG Fpz-Cz=Fpz-Cz"
    """
    from bitimely_core.tokens.new_recordings import check_exists

    if not any(path.exists() for path in files):
        check_exists(files[0])  # before torch is imported, which takes seconds
    from bitimely_core import workflows
    from bitimely_core.formats.text import use_encoding
    from bitimely_core.schemas.ingest_records import FindingRecord

    options = score.collect()
    # no checksums of data are there to compare; those of the model always are
    options.pop("verify", None)
    with use_encoding(encoding), screen.progress():
        made = workflows.predict(
            run,
            files,
            channel_map=channel_map or (),
            times=times,
            calibrate_on=calibrate_on,
            as_of=as_of,
            options=claims_files.collect(),
            out=out,
            jobs=jobs,
            **options,
        )
    if score.dry_run:
        return _show_plan(made)
    visible = cast("Mapping[str, Any]", screen.choose(made))
    screen.print_findings([FindingRecord(**finding) for finding in visible["findings"]])
    if "people" in visible:
        lines = [*visible.get("lines", []), f"risks: {visible['out']}"]
    else:
        lines = _show_recordings(visible["recordings"])
        lines.append(f"{_count_predicted(visible['recordings'])} in {visible['out']}")
    lines += [f"report: {visible['report']}", name_next(run, score.workspace)]
    screen.result(made, screen.summarize(visible["notices"], score.workspace) + lines)
    return made["exit_code"]


def _count_predicted(recordings: Sequence[Mapping[str, Any]]) -> str:
    """How many were predicted, and of how many where some were refused."""
    count = sum(row["status"] == "predicted" for row in recordings)
    total = f"{len(recordings)} recordings"
    return total if count == len(recordings) else f"{count} of {total} predicted"


def _show_recordings(recordings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Print the table of predicted recordings; the lines below it."""
    keys = ("recording", "status", "windows", "hours", "prediction", "confidence")
    rows = [[row[key] for key in keys] for row in recordings[:40]]
    screen.table([*keys[:-1], "mean confidence"], rows)
    placements = dict.fromkeys(filter(None, (row["placement"] for row in recordings)))
    return [f"windows: {text}" for text in list(placements)[:3]]


@expand_options
def embed(
    run: Run,
    *,
    data: OneData = None,
    readout: Annotated[str | None, Option(help="As for finetune.")] = None,
    layers: Annotated[str, Option(help="last or last-two.")] = "last",
    split: Annotated[str, Option(help="train, validation, test or all.")] = "all",
    out: Out = None,
    score: ScoreOptions,
) -> int:
    """Write the embeddings of a run as Parquet, one row a sequence.

    Example: bitimely embed 18m --data sleep-edf/staging
    """
    from bitimely_core import workflows

    with screen.progress():
        result = workflows.embed(
            run, data=data, readout=readout, layers=layers, split=split, out=out, **score.collect()
        )
    if score.dry_run:
        return _show_plan(result)
    screen.table(["run", "embeddings", "width"], [[run, result["n"], result["width"]]])
    line = f"{result['n']:,} embeddings of width {result['width']} in {result['out']}"
    screen.result(result, [line, name_next(run, score.workspace)])
    return Exit.OK


@expand_options
def analyze(
    kind: Annotated[
        str,
        Argument(
            help="See: bitimely list analyses.", metavar="KIND", autocompletion=complete("analyses")
        ),
    ],
    run: Annotated[
        list[str] | None,
        Argument(
            help="Names or folders of runs, and options of the kind.",
            metavar="[RUN...] [--OPTION VALUE...]",
            autocompletion=RUNS,
        ),
    ] = None,
    *,
    choices: AnalyzeOptions,
    read: ReadOptions,
) -> int:
    """Answer a question about runs with figures, their data and controls.

    Options of a kind are listed by: bitimely list analyses

    Example: bitimely analyze svd 18m
    """
    from bitimely_core import workflows

    names, options = _split_options(run or [])
    with (
        screen.show_partial(lambda computed: [computed["verdict"], *computed["notices"]]),
        screen.progress(),
    ):
        result = workflows.analyze(
            kind, names, options=options, **choices.collect(), **read.collect()
        )
    if read.dry_run:
        return _show_plan(result)
    screen.page_table(result.pop("page"))
    visible = screen.choose(result)
    lines = screen.summarize(visible["notices"], read.workspace, visible["verdict"])
    lines.append(f"report: {visible['report']}")
    screen.result(result, [*lines, name_next(next(iter(names), ""), read.workspace)])
    return int(result["exit_code"])


@expand_options
def report(
    run: Annotated[
        list[str], Argument(help="Names or folders of runs.", metavar="RUN...", autocompletion=RUNS)
    ],
    *,
    margin: Margin = None,
    out: Out = None,
    write: WriteOptions,
) -> int:
    """One comparison page of several runs: scores with intervals, paired differences, curves.

    Example: bitimely report 18m-staging 18m-staging-scratch
    """
    from bitimely_core import workflows

    result = workflows.report(run, margin=margin, out=out, **write.collect())
    if write.dry_run:
        return _show_plan(result)
    screen.page_table(result.pop("page"))
    lines = screen.summarize(result["notices"], write.workspace, result["verdict"])
    lines.append(f"report: {result['report']}")
    screen.result(result, [*lines, name_next(run[0], write.workspace)])
    return Exit.OK


def _train_here_or_launch(call: partial[TrainingResult]) -> TrainingResult:
    """The result of a verb that trains, here or in as many processes as `--devices` says."""
    devices = call.keywords.get("devices")
    if devices == "auto" and "WORLD_SIZE" not in os.environ and not call.keywords.get("dry_run"):
        with screen.progress():
            plan = call(dry_run=True)
        devices = str(plan.get("processes", 1))
        if reason := plan.get("one_process_since"):
            screen.announce(f"one process: {reason}")
    if devices is not None and devices.isdecimal():
        _launch_processes(int(devices))
    with screen.show_partial(lambda last: [_show_losses(**last)]), screen.progress():
        return call()


def _launch_processes(devices: int) -> None:
    """`--devices N`: the same command line again in N processes; this one waits and passes their
    exit code on.
    """
    if devices < 2:
        return
    from bitimely_core.train.distributed import LAUNCHED, get_world_size, launch

    if (code := launch(sys.argv[1:], devices)) is not None:
        raise typer.Exit(code)
    if LAUNCHED not in os.environ and devices != get_world_size():
        screen.print_finding(
            input_warning(
                Reason.CONFIG,
                f"{devices} does not count: RANK or WORLD_SIZE is set, "
                f"for {get_world_size()} processes in all",
                "",
                "Unset both, or start as many with the launcher",
                field="--devices",
            )
        )


def _show_losses(steps: int, loss: float | None, rel: float | None) -> str:
    """The number of steps and the losses of the last one."""
    losses = {"loss": loss, "rel": rel}
    texts = [f"{name} {value:.4g}" for name, value in losses.items() if value is not None]
    return ", ".join([f"{steps:,} steps" if steps else "fitted at once", *texts])


def _show_training(result: TrainingResult, workspace: Path, dry_run: bool) -> int:
    if dry_run:
        return _show_plan(result)
    if not result["writer"]:
        return Exit.OK
    final: Mapping[str, Any] = result["final"] or {}
    losses = _show_losses(result["steps"], final.get("loss"), final.get("rel"))
    lines = [
        f"{result['run']}: {result['parameters']:,} parameters, {losses}",
        *([] if result["trained"] else ["already finished under these settings: nothing to do"]),
        f"run: {result['folder']}",
        name_next(result["run"], workspace),
    ]
    screen.result(result, lines)
    return Exit.OK


def _split_options(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Runs and the options of an analysis: `["a", "--row-norm", "abs-sum"]` -> `(["a"],
    {"row_norm": "abs-sum"})`.
    """
    names: list[str] = []
    options: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        if not word.startswith("--"):
            names.append(word)
            continue
        key, sign, value = word[2:].partition("=")
        options[key.replace("-", "_")] = value if sign else next(rest, "true")
    return names, options


def _show_plan(result: Mapping[str, Any]) -> int:
    screen.result(result, screen.lines(result))
    return Exit.OK


VERBS = (pretrain, finetune, train, evaluate, predict, embed, analyze, report)
