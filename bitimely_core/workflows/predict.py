"""The verb `predict`: a fine-tuned run on new recordings without labels."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypedDict, cast

import numpy as np
import numpy.typing as npt

from bitimely_core import __version__
from bitimely_core.analyses.reliability import apply_temperature
from bitimely_core.cache.unit_groups import describe_failure
from bitimely_core.errors import (
    Exit,
    Finding,
    Reason,
    UserError,
    input_warning,
    quote_formula,
    usage_error,
)
from bitimely_core.evaluate.conformal import predict_sets
from bitimely_core.evaluate.endpoints import compute_endpoints, is_staging, place_epochs
from bitimely_core.evaluate.prediction import ANYWHERE, Computation
from bitimely_core.evaluate.prediction import predict as predict_windows
from bitimely_core.evaluate.spectrogram import compute_spectrogram
from bitimely_core.formats.edf_hypnogram import encode_hypnogram
from bitimely_core.formats.source import finding_to_error, locate_errors
from bitimely_core.formats.wfdb_annotations import WRITTEN, encode_annotations
from bitimely_core.page import Spectrogram
from bitimely_core.progress import report_progress
from bitimely_core.recordings.in_memory import place_recordings
from bitimely_core.recordings.points import PointTimes, read_times
from bitimely_core.registry import Choices
from bitimely_core.report.prediction_page import (
    collection_page,
    describe_calibration,
    recording_page,
)
from bitimely_core.report.renderer import write_report
from bitimely_core.run import FORMAT, Run
from bitimely_core.schemas.scores import EndpointValue
from bitimely_core.schemas.tokens import Calibration, Preprocessing, WindowOptions
from bitimely_core.store import storage
from bitimely_core.store.records import describe_changes, read_result_table
from bitimely_core.store.workspace import find_run_folder, locate_new
from bitimely_core.tokens.channel_maps import ChannelMap, MapItems, parse_map
from bitimely_core.tokens.new_recordings import NewRecording, find_recordings
from bitimely_core.tokens.resampling import to_physical
from bitimely_core.tokens.trained_windows import WindowMarks, holds_marked, mark_recordings
from bitimely_core.tokens.unlabelled import cut_unlabelled
from bitimely_core.types import Annotation, Record, count_nouns, group_by
from bitimely_core.workflows import hub
from bitimely_core.workflows.calibrate import (
    calibrate_folds,
    calibrate_run,
    find_calibration,
    fit_recalibrations,
)
from bitimely_core.workflows.calibrate import calibrate_on as fit_own_calibration
from bitimely_core.workflows.new_subjects import (
    HistoryPredictor,
    SubjectsRequest,
    SubjectsResult,
    predict_subjects,
)
from bitimely_core.workflows.prepare import Execution, prepare_windows
from bitimely_core.workflows.tokenize import apply_vocabulary

if TYPE_CHECKING:
    import polars as pl
    from mne.io import BaseRaw

    from bitimely_core.heads import Head
    from bitimely_core.methods.method_contract import FittedMethod
    from bitimely_core.tokens import Windows

TRAINED_ON = input_warning(
    Reason.SUBJECT_LEAKAGE,
    "the run was trained on it",
    "its predictions look better than those of a new recording",
)
LEVELS = {
    "W": "wake",
    "N1": "stage N1",
    "N2": "stage N2",
    "N3": "stage N3",
    "REM": "REM sleep",
    "R": "REM sleep",
}


class RecordingRow(TypedDict):
    """Status of one recording."""

    recording: str
    file: str
    status: str  # predicted or refused
    windows: int | None
    hours: float | None
    placement: str | None  # where the windows lie
    prediction: str | None  # `RecordingPrediction.describe`
    confidence: float | None  # mean over the windows
    trained_on: bool | None  # whether the run was trained on it, where its tokens are there
    endpoints: dict[str, Any]
    messages: list[str]
    report: str | None


class PredictResult(TypedDict, total=False):
    """Result of `predict`; a dry run has neither report nor exit code."""

    format_version: int
    run: str
    out: str
    n: int
    notices: list[str]  # altered files of the run
    recordings: list[Any]
    findings: list[dict[str, Any]]
    report: str
    exit_code: int


class RecordingPrediction(NamedTuple):
    """What the model says about one recording."""

    windows: Windows
    prediction: npt.NDArray[Any]  # [n, K] probabilities or [n] values
    # [n] of the most probable class, after temperature scaling where there is a calibration
    confidence: npt.NDArray[Any] | None
    # [n, K] classes of the conformal set of each window; None without a threshold
    sets: npt.NDArray[np.bool_] | None
    # half the width of the conformal interval of a value; None without a threshold
    reach: float | None
    endpoints: dict[str, EndpointValue]
    findings: list[Finding]
    placement: str  # where the windows lie, in words
    native_rate: float  # Hz, lowest of the channels of the recording
    spectrogram: Spectrogram | None = None  # of the n epochs of a night
    clock: float | None = None  # seconds from midnight to the first epoch; None: not known
    trained_on: bool | None = None  # whether the run was trained on it; None: not known

    def frame(self) -> pl.DataFrame:
        """Content of `predictions.parquet`: recording_id, window, start, then prediction, class,
        p_<class>, confidence and set (classes that hold the true one with the level of the
        calibration, joined by |); or prediction, lo and hi.
        """
        import polars as pl

        columns = {
            name: pl.lit(None, pl.String) if values is None else pl.Series(values)
            for name, values in self._list_columns().items()
        }
        return self.windows.index.select("recording_id", "window", "start").with_columns(**columns)

    def describe(self) -> str:
        """The sleep of a night; else the class of the largest mean probability, with it, or the
        median value.
        """
        if self.endpoints:
            asleep = self.endpoints["total_sleep_time"]
            return f"asleep {asleep.value:.4g} {asleep.unit}"
        if self.windows.task == "regression":
            return f"{np.median(self.prediction):.4g}"
        means = self.prediction.mean(0)
        return f"{self.windows.class_names[means.argmax()]} {means.max():.2f}"

    def _list_columns(self) -> dict[str, Any]:
        """The columns of `frame` beside those of the windows; None for one without values."""
        values, classes = self.prediction, self.windows.class_names
        if self.windows.task == "regression":
            reach = np.full(len(values), np.nan if self.reach is None else self.reach)
            return {"prediction": values, "lo": values - reach, "hi": values + reach}
        probabilities = {f"p_{name}": values[:, k] for k, name in enumerate(classes)}
        if self.windows.task != "classification":
            return probabilities
        sets = None
        if self.sets is not None:
            sets = ["|".join(classes[k] for k in np.flatnonzero(row)) for row in self.sets]
        best = values.argmax(1)
        return {
            "prediction": best,
            "class": [classes[k] for k in best],
            **probabilities,
            "confidence": self.confidence,
            "set": sets,
        }


class Night(NamedTuple):
    """What is shown of a night beside its stages."""

    endpoints: dict[str, EndpointValue]
    spectrogram: Spectrogram | None = None
    clock: float | None = None


def _describe_night(record: Record, windows: Windows, prediction: npt.NDArray[Any]) -> Night:
    """Endpoints, spectrogram and clock of sleep stages in epochs; nothing of another task."""
    options = windows.options
    is_night = windows.task == "classification" and is_staging(windows.class_names)
    if not is_night or options.points or options.epoch is None:
        return Night({})
    epoch = float(options.epoch)
    onsets = windows.index["start"].to_numpy() + (options.length - epoch) / 2
    hypnogram = place_epochs(onsets, prediction.argmax(1), epoch, origin=0.0)
    endpoints = compute_endpoints(hypnogram, windows.class_names, epoch)
    first = record.signals[0]
    name = record.sources.get(first.channel, first.channel)
    spectrogram = compute_spectrogram(
        name, to_physical(first), first.rate, onsets - first.onset, epoch
    )
    clock = _read_clock(record)
    return Night(endpoints, spectrogram, None if clock is None else clock + float(onsets[0]))


def _read_clock(record: Record) -> float | None:
    """Seconds from midnight to the start of a recording; None: not known."""
    if record.start_time is None:
        return None
    start = time.fromisoformat(record.start_time.rpartition("T")[2])
    return start.hour * 3600 + start.minute * 60 + start.second


@dataclass(frozen=True, eq=False, repr=False)
class Predictor:
    """A fine-tuned model with what turns recordings into its windows; of a run over folds or seeds
    the mean of all its models.
    """

    run: Run
    head: Head | FittedMethod
    preprocessing: Preprocessing
    calibration: Calibration | None = None
    others: tuple[Predictor, ...] = ()  # whose predictions are averaged with that of `head`
    changes: tuple[str, ...] = ()  # sentences on the altered files of the run
    training: WindowMarks = frozenset()  # of the recordings of the training

    def __repr__(self) -> str:
        record = self.run.record
        return f"Predictor({record.run!r}: {record.model} on {record.data[0].name})"

    def predict_record(
        self, record: Record, name: str, place: Computation = ANYWHERE
    ) -> RecordingPrediction:
        """The predictions for a recording that was read. Raises UserError: as `cut_unlabelled`."""
        cut = cut_unlabelled(record, name, self.preprocessing)
        windows = cut.windows
        prediction = predict_windows(self.head, windows, place, cut.record)
        for other in self.others:  # each normalises by its own training subjects
            again = cut_unlabelled(record, name, other.preprocessing)
            prediction = prediction + predict_windows(
                other.head, again.windows, place, again.record
            )
        prediction = prediction / (1 + len(self.others))
        confidence, sets = None, None
        if windows.task == "classification":
            confidence, sets = self._measure_confidence(prediction)
        threshold = None if self.calibration is None else self.calibration.threshold
        reach = threshold if windows.task == "regression" else None
        night = _describe_night(record, windows, prediction)
        trained_on = holds_marked(windows, self.training) if self.training else None
        return RecordingPrediction(
            windows,
            prediction,
            confidence,
            sets,
            reach,
            night.endpoints,
            [*([TRAINED_ON] if trained_on else []), *cut.findings],
            cut.placement,
            min(signal.rate for signal in record.signals),
            night.spectrogram,
            night.clock,
            trained_on,
        )

    def _measure_confidence(
        self, prediction: npt.NDArray[Any]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]:
        """Calibrated probability [n] of the most probable class, and the conformal sets [n, K];
        None without a threshold.
        """
        fitted, tempered = self.calibration, prediction
        if fitted is not None and fitted.temperature is not None:
            tempered = apply_temperature("classification", prediction, fitted.temperature)
        confidence = tempered[np.arange(len(prediction)), prediction.argmax(1)]
        if fitted is None or fitted.threshold is None:
            return confidence, None
        return confidence, predict_sets(tempered, fitted.threshold)

    def predict(
        self,
        files: str | Path | BaseRaw | Sequence[str | Path | BaseRaw],
        *,
        channel_map: MapItems = (),
        times: str | Path | None = None,
        batch_size: int | None = None,
        device: str = "auto",
    ) -> pl.DataFrame:
        """The predictions for recordings, folders or caches as one frame
        (`RecordingPrediction.frame`); keeps no file. A Raw of MNE is read as the FIF file that it
        saves. `times`: as in `predict`.

        Raises UserError for the first recording that cannot be read.
        """
        import polars as pl

        options, place = self.preprocessing.options, Computation(batch_size, device)
        mapping = parse_map(channel_map, options.read_channels)
        with place_recordings(files) as paths:
            predictions = [
                self.predict_record(recording.read(), recording.name, place)
                for recording in find_places(paths, options, mapping, times)
            ]
        return pl.concat([prediction.frame() for prediction in predictions])


def from_pretrained(
    run: str | Path, *, workspace: Path = Path("workspace"), calibrate: bool = True
) -> Predictor | HistoryPredictor:
    """The fine-tuned model of a run, of a folder that `export` wrote, or of `OWNER/NAME[@REVISION]`
    on a hub (extra `hub`). Of a run over folds or seeds: the mean of its models.

    With `calibrate`, the calibration of the run is fitted where it is not stored
    (`calibrate.find_calibration`).

    Raises UserError: not_found, config (exit 2) for a model without a head; incomplete (4);
    integrity (5).
    """
    opened = Run.open(_find_model(run, workspace), workspace)
    if opened.record.members is not None and opened.record.finished:
        return _open_members(opened, workspace, calibrate=calibrate)
    opened.require_finished()
    if not opened.record.is_finetuned:
        hint = f"Run: bitimely finetune {opened.name} --data DATASET/VIEW"
        raise usage_error(
            f"{opened.name} was only pre-trained",
            "expected a fine-tuned run, which predicts labels",
            hint,
            field="RUN",
        )
    head = opened.load_head()
    fitted = find_calibration(opened, head) if calibrate else None
    lines = tuple(describe_changes(opened.folder))
    if opened.record.data[0].vocabulary:
        return HistoryPredictor(opened, head, opened.histories(), fitted, changes=lines)
    trained = cast("Windows | None", opened.find_training(workspace))
    marks: WindowMarks = frozenset() if trained is None else mark_recordings(trained)
    return Predictor(opened, head, opened.preprocessing(), fitted, (), lines, marks)


def _find_model(run: str | Path, workspace: Path) -> Path:
    """The folder of a run or an export, or of a model of a hub that has neither's name."""
    try:
        return Path(find_run_folder(run, workspace))
    except UserError:
        if not hub.NAME.fullmatch(str(run)) or "/" not in str(run) or Path(run).exists():
            raise
        return Path(hub.fetch_model(str(run))[0])


def _open_members(run: Run, workspace: Path, *, calibrate: bool) -> Predictor:
    """The mean of all models of a run over folds or seeds.

    It is calibrated on the pooled predictions of the test folds, of the first seed where there are
    several; over seeds alone on the validation windows.

    Raises UserError: config (exit 2) for runs on histories.
    """
    assert run.record.members is not None, "the caller has asked"
    if run.record.data[0].vocabulary:
        raise usage_error(
            f"{run.name} is of several trainings on histories",
            "expected one training",
            f"Give one of its runs, as {run.record.members.runs[0]}",
            field="RUN",
        )
    members = [
        from_pretrained(run.folder.parent / name, workspace=workspace, calibrate=False)
        for name in run.record.members.runs
    ]
    first, *others = (member for member in members if isinstance(member, Predictor))
    models = [
        replace(model, others=())
        for member in (first, *others)
        for model in (member, *member.others)
    ]
    heads = [model.head for model in models]
    calibration = _calibrate_members(run, first.run, heads) if calibrate else None
    marks = frozenset().union(*(model.training for model in models))
    model = replace(
        models[0], run=run, calibration=calibration, others=tuple(models[1:]), training=marks
    )
    return replace(model, changes=_gather_changes(model))


def _calibrate_members(
    run: Run, first: Run, heads: Sequence[Head | FittedMethod]
) -> Calibration | None:
    """The calibration of the mean of `heads`; `first` is the first of its runs."""
    if run.record.members is not None and run.record.members.by == "fold":
        return calibrate_folds(run)
    if first.record.members is not None:
        return calibrate_folds(first)
    return calibrate_run(first, heads)


def _gather_changes(model: Predictor) -> tuple[str, ...]:
    """Sentences on the altered files of a run over folds or seeds and of its runs."""
    members = (model, *model.others)
    lines = itertools.chain(
        describe_changes(model.run.folder), *(member.changes for member in members)
    )
    return tuple(dict.fromkeys(lines))


def predict(
    run: str | Path,
    files: Sequence[str | Path],
    *,
    channel_map: MapItems = (),
    times: str | Path | None = None,
    calibrate_on: Path | None = None,
    as_of: str | None = None,
    options: Choices | None = None,
    out: Path | None = None,
    jobs: int = 1,
    batch_size: int | None = None,
    device: str = "auto",
    workspace: Path = Path("workspace"),
    dry_run: bool = False,
) -> PredictResult | SubjectsResult:
    """Predict new recordings, or new people by their histories, with a fine-tuned run: tables,
    hypnograms and pages in `out` (default `reports/predict-<run>`).

    `files` are recordings, folders of them (also BIDS) and caches; labels beside them are never
    opened, but for the times of points where the run reads windows around points. `times`: a file
    with such times (`recordings.points.read_times`), instead of them. `channel_map` has items
    `WANTED=FOUND` (channel of the run = channel of the files) and TOML files (`ChannelMap`), or is
    a dict of such channels. `map` and `at`, as on the command line, stand for `channel_map` and
    `times`.
    Confidence and sets are calibrated on the validation windows of the
    run, or on one person's own labelled recordings `calibrate_on` (a file, a BIDS folder, a cache).
    Every recording has a folder with `predictions.parquet`, of classes `<recording>_events.tsv` and
    `.json` (BIDS derivatives), of sleep stages `<recording>-hypnogram.edf`, of values
    `<recording>_timeseries.csv`, and `report.html`; `predictions.parquet` and `report.html` of all
    are above. A recording that cannot be read is named, and the others go on (exit 3).

    Of a run on histories `files` is one folder of claims, OMOP, MEDS or MIMIC tables, or a cache;
    `as_of` the index day and `options` those of its ingest (`new_subjects.predict_subjects`);
    `calibrate_on` names tokens of labelled people, on whom the risks are recalibrated.

    Raises UserError: as `from_pretrained`, and the first fault (exit 4) where no recording can be
    read; config (exit 2) for options of the other kind of data.
    """
    from bitimely_core.train.devices import select_device

    select_device(device)
    model = from_pretrained(
        run, workspace=workspace, calibrate=not dry_run and calibrate_on is None
    )
    target = out or locate_new(workspace, "reports", f"predict-{model.run.name}")
    storage.check_target(target)
    paths, place = list(map(Path, files)), Computation(batch_size, device)
    request = SubjectsRequest(as_of, options or {}, workspace)
    if isinstance(model, HistoryPredictor):
        _refuse_options({"map": channel_map, "at": times}, "recordings")
        if calibrate_on is not None and not dry_run:
            model = _recalibrate(model, str(calibrate_on), workspace, place)
        return predict_subjects(model, paths, target, request, place, dry_run=dry_run)
    _refuse_options({"as-of": as_of, **(options or {})}, "histories")
    reading = model.preprocessing.options
    mapping = parse_map(channel_map, reading.read_channels)
    recordings = find_places(paths, reading, mapping, times)
    result: PredictResult = {
        "format_version": FORMAT,
        "run": model.run.name,
        "out": str(target),
        "n": len(recordings),
        "notices": list(model.changes),
    }
    if dry_run:
        return {**result, "recordings": [recording.name for recording in recordings]}
    if calibrate_on is not None:
        model = _calibrate_on(model, calibrate_on, mapping)
    return {**result, **_predict_recordings(model, recordings, target, jobs, place)}


def _calibrate_on(model: Predictor, recordings: Path, mapping: ChannelMap) -> Predictor:
    """The model with the calibration of a person's own labelled recordings."""
    model.run.require_single()
    with locate_errors(recordings, replace=False):
        calibration = fit_own_calibration(
            recordings, model.run, model.head, model.preprocessing, mapping
        )
    return replace(model, calibration=calibration)


def _recalibrate(
    model: HistoryPredictor, tokens: str, workspace: Path, place: Computation
) -> HistoryPredictor:
    """The model with risks that are recalibrated on labelled people, in the vocabulary of the run;
    of the people of its own cache on the validation split, whom it was not trained on.
    """
    name = apply_vocabulary(model.run.folder, tokens, workspace)
    windows = prepare_windows(name, Execution(workspace))
    labelled = windows["validation"] if len(windows["train"]) else windows
    fitted = fit_recalibrations(model.head, labelled, tokens, place)
    return replace(model, recalibrations=fitted)


def _refuse_options(options: Mapping[str, Any], kind: str) -> None:
    """Raises UserError (config, exit 2) for an option that is given but of another kind of data."""
    for name, value in options.items():
        if value:
            raise usage_error(
                f"is an option of {kind}",
                "the run reads other data",
                "Leave it out",
                field=f"--{name.replace('_', '-')}",
            )


def _predict_recordings(
    model: Predictor,
    recordings: Sequence[NewRecording],
    target: Path,
    jobs: int,
    place: Computation,
) -> PredictResult:
    """The predictions for recordings, written to `target` one by one."""
    rows: list[RecordingRow] = []
    faults: list[Finding] = []
    findings: list[Finding] = []
    for done, (recording, read) in enumerate(_read_ahead(recordings, jobs)):
        report_progress("predict", done, len(recordings))
        prediction = _predict_recording(model, recording, read, place)
        if isinstance(prediction, Finding):
            faults.append(prediction.at(recording.file))
            rows.append(_make_refused_row(recording, prediction))
            continue
        rows.append(_write_recording(target / recording.name, recording, model, prediction))
        findings += [finding.at(recording.file) for finding in prediction.findings]
    report_progress("predict", len(recordings), len(recordings))
    if len(faults) == len(recordings):
        raise _refuse_all(faults)
    report = _write_collection(target, model, rows)
    return {
        "recordings": rows,
        "findings": list(map(Finding.as_dict, (*faults, *_join_equal(findings)))),
        "report": str(report),
        "exit_code": int(Exit.PARTIAL if faults else Exit.OK),
    }


def _join_equal(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Findings that differ by their recording alone as one: the first, with their number."""
    groups = group_by(findings, lambda finding: replace(finding, file=None))
    for first, *others in groups.values():
        rest = f" (and in {count_nouns(len(others), 'more recording')})" if others else ""
        yield replace(
            first,
            problem=first.problem + rest,
            count=sum(finding.count for finding in (first, *others)),
        )


def find_places(
    paths: Sequence[Path], options: WindowOptions, mapping: ChannelMap, times: str | Path | None
) -> list[NewRecording]:
    """The recordings of `paths`, with the times in a file where a run on points is applied.

    Raises UserError: config (exit 2) for times that the run does not read, or that are of an
    unknown one of several recordings; and the faults of the file.
    """
    if times is None:
        return list(find_recordings(paths, options, mapping, points=options.points))
    if not options.points:
        raise usage_error(
            "the windows of this run do not lie around points",
            "expected a run on a view such as generic/points",
            field="--at",
        )
    points = read_times(Path(times), paths)
    recordings = list(find_recordings(paths, options, mapping))
    if len(recordings) > 1 and not points.names_recordings:
        raise usage_error(
            f"names no recordings, and {len(recordings)} are to be predicted",
            "expected a column `recording`",
            "Or give one recording at a time",
            file=str(times),
            field="--at",
        )
    return [
        recording._replace(read=partial(_read_at, recording, points)) for recording in recordings
    ]


def _read_at(recording: NewRecording, times: PointTimes) -> Record:
    """The recording with the times that are given for it."""
    record = recording.read()
    points = [Annotation(seconds, 0.0, "") for seconds in times.list_of(recording.file)]
    return replace(record, annotations=points)


def _predict_recording(
    model: Predictor, recording: NewRecording, read: Callable[[], Record], place: Computation
) -> RecordingPrediction | Finding:
    """The predictions for one recording, or why there are none.

    Raises what is a defect of the model, hence the fault of no recording.
    """
    try:
        record = read()
    except Exception as error:
        return describe_failure(error, None, recording.file)[0]
    try:
        return model.predict_record(record, recording.name, place)
    except (UserError, MemoryError) as error:
        return describe_failure(error, None, recording.file)[0]


def _read_ahead(
    recordings: Sequence[NewRecording], jobs: int
) -> Iterator[tuple[NewRecording, Callable[[], Record]]]:
    """Each recording and the function that gives what was read; with several `jobs` that many are
    read while the model works.
    """
    if jobs <= 1:
        for recording in recordings:
            yield recording, recording.read
        return
    with ThreadPoolExecutor(jobs) as pool:
        rest = iter(recordings)
        waiting = deque((first, pool.submit(first.read)) for first in itertools.islice(rest, jobs))
        while waiting:
            recording, future = waiting.popleft()
            for following in itertools.islice(rest, 1):
                waiting.append((following, pool.submit(following.read)))
            yield recording, future.result


def _refuse_all(faults: Sequence[Finding]) -> UserError:
    """The error where no recording could be read: exit 4, and 2 where none is there."""
    error = finding_to_error(faults[0])
    error.details = list(faults[1:])
    error.exit_code = (
        Exit.USAGE if all(fault.code == Reason.NOT_FOUND for fault in faults) else Exit.REFUSED
    )
    return error


def _make_refused_row(recording: NewRecording, fault: Finding) -> RecordingRow:
    return {
        "recording": recording.name,
        "file": recording.file,
        "status": "refused",
        "windows": None,
        "hours": None,
        "placement": None,
        "prediction": None,
        "confidence": None,
        "trained_on": None,
        "endpoints": {},
        "messages": [fault.message],
        "report": None,
    }


def _write_recording(
    folder: Path, recording: NewRecording, model: Predictor, prediction: RecordingPrediction
) -> RecordingRow:
    """The folder of one recording."""
    windows, frame, name = prediction.windows, prediction.frame(), recording.name
    starts, length = windows.index["start"].to_numpy(), windows.options.length
    files: dict[str, storage.Content | None] = {
        "predictions.parquet": storage.encode_parquet(frame)
    }
    messages = [finding.message for finding in prediction.findings if finding.level != "info"]
    if windows.task == "classification":
        points = windows.options.points
        epoch = 0.0 if points else float(windows.options.epoch or length)
        onsets = starts + (length - epoch) / 2
        if points:
            classes = frame["class"].to_list()
            files[f"{name}.{WRITTEN}"] = encode_annotations(
                name, onsets.tolist(), classes, prediction.native_rate
            )
        files[f"{name}_events.tsv"], files[f"{name}_events.json"] = encode_events(
            onsets, epoch, frame, model
        )
        if prediction.endpoints:
            stages = frame["prediction"].to_list()
            files[f"{name}-hypnogram.edf"] = encode_hypnogram(
                onsets.tolist(), stages, windows.class_names, epoch
            )
    elif windows.task == "regression":
        series = frame.select("start", (frame["start"] + length).alias("stop"), "prediction")
        files[f"{name}_timeseries.csv"] = series.write_csv().encode()
    confidence = prediction.confidence
    notices = [*model.changes, *messages]
    page = recording_page(name, model.run.record, model.calibration, prediction, notices)
    report = write_report(folder, page, others=files)
    return {
        "recording": name,
        "file": recording.file,
        "status": "predicted",
        "windows": len(windows),
        "hours": float((starts[-1] + length) / 3600),
        "placement": prediction.placement,
        "prediction": prediction.describe(),
        "confidence": None if confidence is None else float(confidence.mean()),
        "trained_on": prediction.trained_on,
        "endpoints": {key: value.model_dump() for key, value in prediction.endpoints.items()},
        "messages": messages,
        "report": str(report),
    }


def encode_events(
    onsets: npt.NDArray[Any], duration: float, frame: pl.DataFrame, model: Predictor
) -> tuple[bytes, bytes]:
    """Content of the `events.tsv` of a BIDS derivative and of its sidecar."""
    cells = zip(
        onsets.tolist(), frame["class"].to_list(), frame["confidence"].to_list(), strict=True
    )
    lines = [
        f"{onset:.6f}\t{duration:.6f}\t{quote_formula(name)}\t{confidence:.6f}\n"
        for onset, name, confidence in cells
    ]
    how = f"automatic, by run {model.run.name} of bitimely {__version__}, not reviewed by a person"
    sidecar = {
        "trial_type": {
            "LongName": "Predicted class",
            "Description": f"Most probable class of the window; {how}",
            "Levels": {name: LEVELS.get(name, name) for name in model.preprocessing.class_names},
        },
        "confidence": {
            "LongName": "Confidence",
            "Description": describe_calibration(model.calibration),
            "Minimum": 0,
            "Maximum": 1,
        },
    }
    return (
        "onset\tduration\ttrial_type\tconfidence\n" + "".join(lines)
    ).encode(), storage.encode_json(sidecar) + b"\n"


def _write_collection(target: Path, model: Predictor, rows: Sequence[RecordingRow]) -> Path:
    """The files of all recordings together; the tables are copied one by one."""
    import pyarrow.parquet as pq

    names = [row["recording"] for row in rows if row["status"] == "predicted"]

    def copy_tables(stream: BinaryIO) -> None:
        writer = None
        for name in names:
            table = read_result_table(target / name / "predictions.parquet").to_arrow()
            writer = writer or pq.ParquetWriter(
                stream, table.schema, compression="zstd", version="2.6"
            )
            writer.write_table(table)
        if writer is not None:
            writer.close()

    about = {
        "Name": f"Predictions of {model.run.name}",
        "BIDSVersion": "1.10.0",
        "DatasetType": "derivative",
        "GeneratedBy": [{"Name": "bitimely", "Version": __version__}],
    }
    others: dict[str, storage.Content | None] = {
        "predictions.parquet": copy_tables,
        "dataset_description.json": storage.encode_json(about) + b"\n",
    }
    page = collection_page(model.run.record, model.calibration, rows, model.changes)
    return write_report(target, page, others=others)
