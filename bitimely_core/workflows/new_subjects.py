"""The verb `predict` on histories: a risk of each label for each of new people."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypedDict, cast

import numpy as np
import numpy.typing as npt

from bitimely_core import registry
from bitimely_core.analyses.reliability import apply_temperature
from bitimely_core.errors import (
    Exit,
    Reason,
    input_error,
    input_warning,
    quote_formula,
    usage_error,
)
from bitimely_core.evaluate.prediction import Computation, map_batches
from bitimely_core.evaluate.prediction import predict as predict_rows
from bitimely_core.evaluate.risk_calibration import IDENTITY, Recalibration
from bitimely_core.page import Page
from bitimely_core.registry import Choices
from bitimely_core.report.new_subjects_page import SharedCounts, SubjectsSummary, new_subjects_page
from bitimely_core.report.renderer import write_report
from bitimely_core.run import FORMAT, Run
from bitimely_core.schemas.ingest_records import FindingRecord, IngestReport
from bitimely_core.schemas.tokens import Calibration, HistoryPreparation
from bitimely_core.store import storage
from bitimely_core.store.workspace import refuse_inside_workspace
from bitimely_core.tokens.sequences import EventSequences, NewHistories
from bitimely_core.tokens.trained_windows import is_trained_on

if TYPE_CHECKING:
    import polars as pl
    from torch import Tensor

    from bitimely_core.heads import Head
    from bitimely_core.methods.method_contract import FittedMethod
    from bitimely_core.tokens import Windows
    from bitimely_core.types import Batch

    # what the histories of new people are read from: a folder, a cache, or a table in memory
    People: TypeAlias = str | Path | pl.DataFrame


TRAINED_ON = input_warning(
    Reason.SUBJECT_LEAKAGE,
    "the run was trained on some of these people",
    "their risks look better than those of new people",
)


class OwnerSubjects(TypedDict):
    """What the owner of the data sees of new people."""

    lines: list[str]
    findings: list[Choices]


class SubjectsResult(TypedDict, total=False):
    """Result of `predict` on histories; counts of few people are None."""

    format_version: int
    run: str
    out: str
    labels: list[str]
    notices: list[str]  # altered files of the run
    n: int | None
    people: SharedCounts
    calibrated: bool
    findings: list[Choices]
    report: str
    exit_code: int
    exact: OwnerSubjects


class SubjectsRequest(NamedTuple):
    """What is asked of the histories of new people."""

    as_of: str | None = None  # index day, YYYY-MM-DD
    options: Choices | None = None  # of the ingest, in the place of those of the run
    workspace: Path = Path("workspace")  # in which no raw ids may lie

    def choose_options(self) -> Choices:
        """The options, with the key of the pseudonyms of the workspace where it has one."""
        key = self.workspace / "id.key"
        return {**({"id_key": str(key)} if key.is_file() else {}), **(self.options or {})}


class SubjectsPrediction(NamedTuple):
    """What the model says about new people."""

    # a row a person: subject_id, index_date, status, events, rows, unknown_rows, risk_<label>
    # (calibrated where the run has a calibration; null of the dead, of who has had the outcome,
    # and of labels that nobody of the training has) and p_<label> of the model
    frame: pl.DataFrame
    unknown: pl.DataFrame  # `NewHistories.unknown`
    findings: list[FindingRecord]  # of the ingest, and that the run was trained on people
    exit_code: int  # of the ingest: 3 where rows are quarantined
    exact: bool  # whether pages show small counts: the people are synthetic


@dataclass(frozen=True, eq=False, repr=False)
class HistoryPredictor:
    """A fine-tuned model with what turns histories of new people into its sequences."""

    run: Run
    head: Head | FittedMethod
    prepared: HistoryPreparation
    calibration: Calibration | None = None
    # of each label, in the place of the calibration
    recalibrations: Sequence[Recalibration | None] | None = None
    changes: tuple[str, ...] = ()  # sentences on the altered files of the run

    def __repr__(self) -> str:
        record = self.run.record
        return f"HistoryPredictor({record.run!r}: {record.model} on {record.data[0].name})"

    @property
    def class_names(self) -> tuple[str, ...]:
        """The labels, of times to event at each horizon."""
        return self.run.record.data[0].class_names

    def list_notices(self) -> list[str]:
        """The altered files of the run, and the labels without a risk."""
        names = self.prepared.labels_without_cases
        lacking = f"Nobody of the training has {' or '.join(names)}: no risk of it is given."
        return [*self.changes, *([lacking] if names else [])]

    def describe_calibration(self) -> str:
        """What the risks are."""
        fitted = self.calibration
        if self.recalibrations is not None:
            return "recalibrated, label by label, on the people of --calibrate-on"
        if fitted is None:
            return "as the model gives them; not calibrated: the run has no calibration"
        if fitted.temperature is None:
            return "as the model gives them; risks of times to event are not scaled"
        scaled = f"calibrated on {fitted.data} (temperature {fitted.temperature:.3g})"
        return f"{scaled}; p_<label> in the table are those of the model"

    def predict(
        self,
        source: People,
        *,
        as_of: str | None = None,
        options: Choices | None = None,
        batch_size: int | None = None,
        device: str = "auto",
    ) -> pl.DataFrame:
        """The risks of the people in a folder of claims, OMOP, MEDS or MIMIC tables, in a cache, or
        in a table with columns of people, dates and codes (`SubjectsPrediction.frame`); writes
        nothing. Of a table `subject_id` is the id that it has.

        `as_of`: index day, YYYY-MM-DD (default: `claims.new_histories.build_new_histories`);
        `options`: of the ingest, in the place of those of the run.
        """
        request = SubjectsRequest(as_of, options or {})
        return self.predict_subjects(source, request, Computation(batch_size, device)).frame

    def transform(
        self,
        source: People,
        *,
        as_of: str | None = None,
        options: Choices | None = None,
        batch_size: int | None = None,
        device: str = "auto",
    ) -> pl.DataFrame:
        """The vectors that the head reads, in the rows of `predict`: subject_id, embedding float32
        [D]. Raises UserError (config, exit 2) for a method without a network.
        """
        import polars as pl

        from bitimely_core.heads import compute_vectors

        self.run.require_network()
        head, place = cast("Head", self.head), Computation(batch_size, device)

        def compute(batch: Batch) -> Tensor:
            return compute_vectors(head.model, batch, head.readout, head.layers, head.layer_merge)

        with self._read(source, SubjectsRequest(as_of, options or {})) as people:
            sequences = cast("Windows", people.sequences)
            vectors = np.concatenate(map_batches(head, compute, sequences, "embed", place))
            column = pl.Series(vectors, dtype=pl.Array(pl.Float32, vectors.shape[1]))
            frame = people.people.select("subject_id").with_columns(embedding=column)
            return people.name_rows(frame)

    def predict_subjects(
        self, source: People, request: SubjectsRequest, place: Computation
    ) -> SubjectsPrediction:
        """As `predict`, with what was not understood. Raises UserError: as `cache.ingest`."""
        with self._read(source, request) as people:
            sequences = cast("Windows", people.sequences)
            probabilities = predict_rows(self.head, sequences, place)
            frame = people.name_rows(self._make_frame(people, probabilities))
        findings = _list_findings(people.report) if people.report else []
        findings += self._find_trained(people.sequences, request.workspace)
        exit_code = people.report.exit_code if people.report else int(Exit.OK)
        return SubjectsPrediction(frame, people.unknown, findings, exit_code, people.exact)

    def _find_trained(self, sequences: EventSequences, workspace: Path) -> list[FindingRecord]:
        """That the run was trained on histories of these people."""
        is_trained = is_trained_on(self.run.find_training(workspace), sequences)
        return [FindingRecord.from_finding(TRAINED_ON)] if is_trained else []

    @contextmanager
    def _read(self, source: People, request: SubjectsRequest) -> Iterator[NewHistories]:
        """The histories of the people, in a folder that is there within the block."""
        read = registry.data_kinds["events"].read_subjects
        assert read is not None
        with tempfile.TemporaryDirectory(prefix="bitimely-people-") as name:
            yield read(
                source,
                self.run.folder,
                self.prepared,
                Path(name),
                as_of=request.as_of,
                options=request.choose_options(),
            )

    def _calibrate(self, probabilities: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The risks [n, K] of the probabilities that the model gives."""
        fitted = self.calibration
        if self.recalibrations is not None:
            columns = zip(probabilities.T, self.recalibrations, strict=True)
            return np.stack([(change or IDENTITY).apply(p) for p, change in columns], axis=1)
        if fitted is not None and fitted.temperature is not None:
            return apply_temperature("multilabel", probabilities, fitted.temperature)
        return probabilities.astype(np.float64)

    def _find_label(self, k: int) -> str:
        """The label of an output, without its horizon."""
        return self.prepared.class_names[k // len(self.prepared.options.time_to_event or (0,))]

    def _make_frame(self, made: NewHistories, probabilities: npt.NDArray[Any]) -> pl.DataFrame:
        import polars as pl

        people, died = made.people, made.people["died"]
        index = pl.col("index_day").cast(pl.Int32)
        day = {"index_date": index.cast(pl.Date)} if made.dated else {"index_day": index}
        columns: dict[str, pl.Series] = {}
        for prefix, values in (("risk", self._calibrate(probabilities)), ("p", probabilities)):
            for k, name in enumerate(self.class_names):
                column = pl.Series(values[:, k])
                without = died | people["had"].list.contains(self._find_label(k))
                without |= name in self.prepared.labels_without_cases
                columns[f"{prefix}_{name}"] = (
                    column.set(without, None) if prefix == "risk" else column
                )
        counted = ("status", "events", "rows", "unknown_rows")
        return people.select("subject_id", **day, **{name: name for name in counted}).with_columns(
            **columns
        )


def _list_findings(report: IngestReport) -> list[FindingRecord]:
    """The warnings and errors of an ingest, of its tables and of all."""
    reasons = list(chain.from_iterable(unit.reasons for unit in report.units))
    return [reason for reason in (*reasons, *report.reasons) if reason.level != "info"]


def predict_subjects(
    model: HistoryPredictor,
    files: Sequence[Path],
    target: Path,
    request: SubjectsRequest,
    place: Computation,
    *,
    dry_run: bool = False,
) -> SubjectsResult:
    """The risks of new people: `predictions.parquet` and `report.html` in `target`; with `keep_ids`
    in the options the same table there, under the ids of the source.

    Raises UserError: config (exit 2) for several folders; no_input (4) for one without people.
    """
    folder = _require_one(files)
    result: SubjectsResult = {
        "format_version": FORMAT,
        "run": model.run.name,
        "out": str(target),
        "labels": list(model.class_names),
        "notices": model.list_notices(),
    }
    keep_ids = request.choose_options().get("keep_ids")
    ids = Path(keep_ids) if keep_ids else None
    if ids is not None:
        refuse_inside_workspace(ids, request.workspace)
    if dry_run:
        return result
    made = model.predict_subjects(folder, request, place)
    if not made.frame.height:
        raise input_error(
            Reason.NO_INPUT, "nobody is in these data", "expected people", file=str(folder)
        )
    page = _make_page(model, made)
    report = write_report(
        target, page, others={"predictions.parquet": storage.encode_parquet(made.frame)}
    )
    if ids is not None:
        _add_risks(ids, made.frame)
    summary = SubjectsSummary.describe(made)
    exact = [finding.model_dump() for finding in made.findings]
    shared = [finding.round_counts().model_dump() for finding in made.findings]
    return {
        **result,
        "n": summary.protected["people"],
        "people": summary.protected,
        "calibrated": model.calibration is not None or model.recalibrations is not None,
        "findings": exact if made.exact else shared,
        "report": str(report),
        "exit_code": made.exit_code,
        "exact": {"lines": summary.lines, "findings": exact},
    }


def _require_one(files: Sequence[Path]) -> Path:
    """The only path. Raises UserError (config, exit 2) for several."""
    if len(files) != 1:
        raise usage_error(
            f"{len(files)} paths",
            "expected one folder of claims, or one cache",
            "Put the tables of all people into one folder",
            field="FILES",
        )
    return files[0]


def _make_page(model: HistoryPredictor, made: SubjectsPrediction) -> Page:
    """The page of the risks, with the notices of the run and that of its own people."""
    page = new_subjects_page(model.run.record, model.describe_calibration(), made)
    trained = {finding.message for finding in made.findings} & {TRAINED_ON.message}
    return replace(page, notices=[*trained, *model.list_notices(), *page.notices])


def _add_risks(path: Path, frame: pl.DataFrame) -> None:
    """Add the risks to the table of raw and new ids that the ingest has written."""
    import polars as pl

    ids = pl.read_csv(path, infer_schema=False, glob=False).with_columns(
        pl.col("new").cast(pl.Int64)
    )
    table = ids.join(frame, left_on="new", right_on="subject_id", maintain_order="left")
    table = table.with_columns(pl.col("subject_id").map_elements(quote_formula, pl.String))
    storage.write_bytes(path, table.drop("new").write_csv().encode())
