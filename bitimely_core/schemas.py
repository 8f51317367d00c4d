"""Records that are stored as JSON: what a run, a cache, tokens, scores and reports say about themselves.

Each record is one frozen pydantic model, read by `load` and written by `save`, nowhere else. Keys that this version does not know are kept,
so that nothing is lost when an older version writes a record again; keys of later versions are tolerated. `upgrade_v1` brings what version
0.1 wrote to the present form while it is read; the file itself is left as it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer, model_validator

from bitimely_core import storage
from bitimely_core.errors import Reason, input_error, integrity_error, safe_text


def is_none(value: object) -> bool:
    """Condition of `Omittable`."""
    return value is None


def omit_none(description: str = "") -> Any:
    """A field that is None by default and whose key is left out of the file then."""
    return Field(None, description=description, exclude_if=is_none)


class Part(BaseModel):
    """A part of a stored record."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)


class StoredRecord(Part):
    """A record with a file of its own."""

    VERSION: ClassVar[int] = 1  # the newest `format_version` that this class reads
    REPAIR: ClassVar[str] = "Repeat the command that wrote it"

    format_version: int = 1

    @classmethod
    def upgrade_v1(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Stored values of format 1 in the present form."""
        return values

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the record at `path`.

        Raises UserError: integrity (exit 5) when the file is missing, is not JSON or does not have the fields; unsupported_format (exit 4)
        for a later format.
        """
        try:
            values = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise integrity_error(str(path), f"not readable: {safe_text(str(error))}", "expected JSON", cls.REPAIR) from error
        return cls.parse(values, path)

    @classmethod
    def parse(cls, values: Any, path: Path) -> Self:
        """The record of `values`, which `path` holds. Raises UserError: as `load`."""
        if not isinstance(values, dict):
            raise integrity_error(str(path), f"found {safe_text(values)}", "expected a JSON object", cls.REPAIR)
        version = values.get("format_version", 1)
        if isinstance(version, int) and version > cls.VERSION:
            raise input_error(
                Reason.UNSUPPORTED_FORMAT,
                f"format version {version}",
                f"expected at most {cls.VERSION}",
                "Use a newer bitimely",
                file=str(path),
            )
        try:
            return cls.model_validate(cls.upgrade_v1(values) if version == 1 else values)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise integrity_error(
                str(path), f"found {safe_text(first.get('input'))}", str(first["msg"]), cls.REPAIR, field=where
            ) from error

    def to_json(self) -> dict[str, Any]:
        """The record as it is stored."""
        return self.model_dump(mode="json", by_alias=True)

    def save(self, path: Path) -> None:
        """Write the record to `path` in one step. Raises UserError: disk (exit 6)."""
        storage.write_json(path, self.to_json())


# --- scores -------------------------------------------------------------------------------------------------------------------------------


class Estimate(Part):
    """Uncertainty of an estimate: standard error and 95 % confidence interval, null with the reason where they are not defined."""

    se: float | None = None
    lo: float | None = None
    hi: float | None = None
    n_defined: int = 0  # bootstrap replicates in which the estimate is defined
    undefined_reason: str | None = None


class Difference(Estimate):
    """A paired difference of one metric between two models on the same rows."""

    difference: float | None = None
    share_above_zero: float | None = None  # of the bootstrap replicates
    share_below_zero: float | None = None


class PairedScores(Difference):
    """A paired difference, first less second, with both scores."""

    first: float | None = None
    second: float | None = None


class MeanDifference(Difference):
    """A paired difference of means over seeds with its two-sided test."""

    total_se: float | None = None  # of subjects and seeds
    df: float | None = None  # of Student's t
    p: float | None = None


class CorrectedDifference(MeanDifference):
    """A member of a family of comparisons after Holm correction."""

    p_holm: float | None = None
    corrected_lo: float | None = None
    corrected_hi: float | None = None


class ClassCounts(Part):
    """Classes that enter a macro mean, out of all."""

    defined: int
    of: int


class MetricValue(Estimate):
    """One metric; the value is null, with the reason, where the rows cannot define it."""

    value: float | None = None
    classes: ClassCounts | None = omit_none("of a macro mean")
    difference: Difference | None = omit_none("run less baseline, of a baseline")


class ClassScores(Part):
    """Scores of one class or label against the rest."""

    support: int = 0  # rows of the class
    subjects: int = 0  # subjects with such a row
    base_rate: float | None = None
    unknown: int | None = omit_none("rows in which the label is not known, multi-label only")
    precision: MetricValue = MetricValue()
    recall: MetricValue = MetricValue()
    f1: MetricValue = MetricValue()
    auroc: MetricValue = MetricValue()
    auprc: MetricValue = MetricValue()


class Baseline(Part):
    """Scores of a baseline; its metrics are stored beside `about`."""

    about: str = ""
    metrics: dict[str, MetricValue] = {}
    by_class: dict[str, dict[str, MetricValue]] | None = omit_none("label -> AUROC and AUPRC, multi-label only")

    @model_validator(mode="before")
    @classmethod
    def gather_metrics(cls, values: Any) -> Any:
        """Metrics stored at the top level as `metrics`."""
        if not isinstance(values, dict) or "metrics" in values:
            return values
        own = {key: values[key] for key in ("about", "by_class") if key in values}
        return {**own, "metrics": {key: value for key, value in values.items() if key not in own}}

    @model_serializer(mode="wrap")
    def flatten_metrics(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Inverse of `gather_metrics`."""
        values = handler(self)
        return {**values.pop("metrics"), **values}


class Resampling(Part):
    """The bootstrap behind the intervals."""

    replicates: int
    by: str  # subject or window
    seed: int
    level: float
    interval: str
    units: int
    minimum_units: int
    minimum_rows: int
    minimum_defined: float


class PairedComparison(Part):
    """Two runs on the same rows, metric by metric."""

    task: str
    main: str
    n: int
    n_subjects: int
    metrics: dict[str, PairedScores]
    resampling: Resampling


class Comparison(Part):
    """Paired differences of a run to another one, which is named."""

    run: str
    metrics: dict[str, PairedScores]


class EvaluationSettings(Part):
    """How a run was scored."""

    bootstrap: int = 0
    by: str = "subject"
    seed: int = 0
    model: str = ""
    preset: str = ""
    verified: bool = True


class TaskScores(Part):
    """Scores of predictions on the rows of one split. Rows of `confusion` are true classes."""

    task: str | None = None
    main: str | None = None  # the metric of verdicts
    n: int = 0
    n_subjects: int = 0
    metrics: dict[str, MetricValue] = {}
    by_class: dict[str, ClassScores] = {}
    confusion: list[list[int]] | None = None
    baselines: dict[str, Baseline] = {}
    resampling: Resampling | None = None
    remarks: list[str] = []


class Scores(TaskScores, StoredRecord):
    """scores.json: an evaluated run. A pre-trained one has no task; its metrics are loss, rel and the parts of the objective."""

    REPAIR: ClassVar[str] = "Repeat: bitimely evaluate"

    run: str = ""
    data: str = ""
    split: str = "test"
    settings: EvaluationSettings = EvaluationSettings()
    leak_free: bool | str | None = None
    subjects_shared_with_training: int = 0
    notices: list[str] = []
    comparison: Comparison | None = omit_none("with --compare")

    @model_serializer(mode="wrap")
    def omit_task(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the fields of a task where there is none."""
        values = handler(self)
        hidden = ("task", "main", "confusion", "resampling", "remarks") if self.task is None else ()
        return {key: value for key, value in values.items() if key not in hidden}


# --- reports ------------------------------------------------------------------------------------------------------------------------------


class ReportFile(Part):
    """A file that a report wrote beside its page."""

    sha256: str
    size: int


class ReportInfo(Part):
    """The page of a report."""

    title: str
    verdict: str
    notices: list[str] = []
    facts: dict[str, str] = {}
    files: dict[str, ReportFile] = {}


class Summary(StoredRecord):
    """summary.json: the page, and the numbers of its figures under keys that depend on the kind of report (`model_extra`)."""

    report: ReportInfo
