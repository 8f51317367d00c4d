"""Records of scores: metrics with intervals, differences, baselines and comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import SerializerFunctionWrapHandler, model_serializer, model_validator

from bitimely_core.privacy import Sharing
from bitimely_core.schemas.runs import ScoredCheckpoint
from bitimely_core.store.records import Part, ResultRecord, has_result, omit_none
from bitimely_core.types import leave_out

People = Annotated[int | None, Sharing.PEOPLE]  # None: withheld
# notice of an evaluation
WITHOUT_FITTED = "Baselines that are fitted were left out (--baselines cheap)."


class Uncertainty(Part):
    """Uncertainty of an estimate: standard error and 95 % confidence interval, null with the reason
    where they are not defined.
    """

    se: float | None = None
    lo: float | None = None
    hi: float | None = None
    n_defined: People = 0  # subjects (units) that the estimate is made of
    undefined_reason: str | None = None


class Difference(Uncertainty):
    """A paired difference of one metric between two models on the same rows."""

    difference: float | None = None
    df: float | None = omit_none("of Student's t")
    p: float | None = omit_none("two-sided")
    unit: str | None = omit_none(
        "of the numbers times `factor`: points, /min ...; 1: a number without unit"
    )
    factor: float | None = omit_none("100 for shares, which are printed in points, else 1")


class PairedScores(Difference):
    """A paired difference, first less second, with both scores."""

    first: float | None = None
    second: float | None = None


class MeanDifference(Difference):
    """A paired difference of means over seeds with its two-sided test."""

    total_se: float | None = None  # of subjects and seeds
    effective: float = 0.0  # effective number of subjects
    seeds: tuple[int, ...] = ()  # runs behind the two means; 0: a method without seeds


class MarginTest(Part):
    """Tests of a difference against a margin, in the family of all such tests of a page. Bounds and
    margin are in units of the score.
    """

    margin: float
    # how much worse the first can be: one bound of the corrected 95 % interval, turned so that
    # worse is positive
    worst: float | None = None
    lo: float | None = None  # corrected 90 % interval of the difference
    hi: float | None = None
    non_inferior: bool = False
    equivalent: bool = False


class CorrectedDifference(MeanDifference):
    """A member of a family of comparisons after Holm correction."""

    p_holm: float | None = None
    corrected_lo: float | None = None
    corrected_hi: float | None = None
    against_margin: MarginTest | None = omit_none("with a margin")


class RegisteredResult(Part):
    """One difference of a registered family; values, difference, bounds and margin are in units of
    the score, null before the family is complete, or, in a descriptive family, before its own cells
    are.
    """

    family: str
    data: str
    row: str
    rival: str
    done: int  # cells that have run
    cells: int
    metric: str = ""
    unit: str = ""  # of printed differences
    value: float | None = None  # mean over seeds
    rival_value: float | None = None
    difference: float | None = None
    # corrected 95 % interval, of a descriptive one not corrected; with a margin that of the
    # test of non-inferiority
    lo: float | None = None
    hi: float | None = None
    margin: float | None = None
    medians: float | None = None  # the difference of medians over seeds
    verdict: str | None = None
    sentence: str = ""
    descriptive: bool = False  # without verdict


class ClassCounts(Part):
    """Classes that enter a macro mean, out of all."""

    defined: int
    of: int


class MetricValue(Uncertainty):
    """One metric; the value is null, with the reason, where the rows cannot define it."""

    value: float | None = None
    classes: ClassCounts | None = omit_none("of a macro mean")
    difference: Difference | None = omit_none("run less baseline, of a baseline")


class ClassScores(Part):
    """Scores of one class or label against the rest."""

    support: People = 0  # rows of the class
    subjects: People = 0  # subjects with such a row
    base_rate: float | None = None
    unknown: People = omit_none("rows in which the label is not known, multi-label only")
    precision: MetricValue = MetricValue()
    recall: MetricValue = MetricValue()
    f1: MetricValue = MetricValue()
    auroc: MetricValue = MetricValue()
    auprc: MetricValue = MetricValue()
    c_index: MetricValue | None = omit_none("time to event only, as is the next")
    brier: MetricValue | None = omit_none()


class LabelCalibration(Part):
    """Calibration of the predicted risks of one label (`evaluate.risk_calibration`)."""

    slope: MetricValue  # 1: right; below: risks are too extreme
    intercept: MetricValue  # with the slope fixed at 1; 0: right; above: risks are too low
    brier: MetricValue
    observed: float | None = None  # share of the rows that have the label
    predicted: float | None = None  # mean risk
    recalibration: dict[str, float] | None = omit_none("intercept and slope, of --calibrate-on")
    recalibrated: LabelCalibration | None = omit_none("of the risks that --calibrate-on gives")


class Baseline(Part):
    """Scores of a baseline; its metrics are stored beside `about`."""

    about: str = ""
    metrics: dict[str, MetricValue] = {}
    by_class: dict[str, dict[str, MetricValue]] | None = omit_none(
        "label -> AUROC and AUPRC, multi-label only"
    )
    settings: int | None = omit_none("settings tried on the validation split, of counts in windows")

    @model_validator(mode="before")
    @classmethod
    def gather_metrics(cls, values: Any) -> Any:
        """Metrics stored at the top level as `metrics`."""
        if not isinstance(values, dict) or "metrics" in values:
            return values
        others = {key: values[key] for key in ("about", "by_class", "settings") if key in values}
        return {**others, "metrics": leave_out(values, others)}

    @model_serializer(mode="wrap")
    def flatten_metrics(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Inverse of `gather_metrics`."""
        values = handler(self)
        return {**values.pop("metrics"), **values}


class BaselineLift(CorrectedDifference):
    """The main metric of a run less that of its best baseline, in the family of all its
    baselines.
    """

    baseline: str


class IntervalMethod(Part):
    """The method of the intervals: linearised variance over the units, Student's t
    (`evaluate.intervals`).
    """

    method: str = "linearised"
    by: Literal["subject", "window"]
    unit: str = "subject"  # what a unit is: subject, recording, segment or window
    level: float
    units: People
    minimum_units: int
    minimum_effective: float
    minimum_rows: int


class PairedComparison(Part):
    """Two runs on the same rows, metric by metric."""

    task: str
    main: str
    n: People
    n_subjects: People
    metrics: dict[str, PairedScores]
    intervals: IntervalMethod


class SeedScore(MetricValue):
    """The metric of one run of a cell."""

    seed: int
    run: str


class CellScore(MetricValue):
    """A cell of a table of results: the mean over seeds with its interval, and the runs behind
    it.
    """

    seeds: list[SeedScore]
    seed_sd: float | None = None  # standard deviation over seeds
    seed_se: float | None = None
    n: People = 0
    n_subjects: People = 0


class ColumnResult(Part):
    """Cells of one column by row, the differences of the rows to the reference row, and of each row
    to fitted baselines.
    """

    cells: dict[str, CellScore] = {}
    differences: dict[str, MeanDifference] = {}
    baselines: dict[str, dict[str, MeanDifference]] = {}
    remarks: list[str] = []


class EndpointValue(Part):
    """A clinical endpoint of one recording; null, with the reason, where its hypnogram cannot
    define it.
    """

    value: float | None = None
    unit: str = "min"
    undefined_reason: str | None = None


class EndpointAgreement(Part):
    """A clinical endpoint by the model and by the scorer over nights (Bland and Altman): predicted
    less scored, with intervals over subjects.
    """

    unit: str
    nights: People  # in which both define it
    scored: float | None = None  # mean over nights
    predicted: float | None = None
    bias: MetricValue = MetricValue()
    # of agreement, bias - 1.96 standard deviations of the differences
    lower_limit: MetricValue = MetricValue()
    upper_limit: MetricValue = MetricValue()


class NightScores(Part):
    """Agreement night by night of predicted and scored hypnograms."""

    nights: People
    subjects: People
    kappa: MetricValue  # mean over nights of Cohen's kappa
    kappa_range: tuple[float, float] | None  # lowest and highest night
    endpoints: dict[str, EndpointAgreement]


class EventScores(Part):
    """Events of one of two classes: successive windows of it are one event; it is found where any
    predicted event overlaps it.
    """

    event: str | None = None  # the class; None: the second
    events: People
    hours: float
    false_alarms: People  # predicted events that overlap no true one
    sensitivity: MetricValue
    false_alarms_per_hour: MetricValue


class RiskPoint(Part):
    """A group of predicted risk on one day; None: withheld."""

    day: float
    at_risk: People  # under observation without event behind it
    events: People  # up to it
    incidence: float | None  # Aalen and Johansen's
    lo: float | None
    hi: float | None


class RiskGroup(Part):
    """Subjects of similar predicted risk at the longest horizon."""

    name: str
    n: People
    predicted: list[float] | None  # mean predicted risk at each horizon
    points: list[RiskPoint]


class RiskGroups(Part):
    """Observed incidence of one label by predicted risk: curves, numbers at risk, calibration at
    the horizons.
    """

    horizons: list[float]  # days, each the day of a point
    groups: list[RiskGroup]
    deciles: list[RiskGroup] | None = omit_none(
        "tenths by the same risk, with a point at each horizon"
    )


class Comparison(Part):
    """Paired differences of a run to another one, which is named."""

    run: str
    metrics: dict[str, PairedScores]
    sentence: str | None = omit_none(
        "on the main metric, with where its interval lies against the margin"
    )
    margin: float | None = omit_none("with --margin, in units of the score")


class EncoderDeclaration(Part):
    """What a file of vectors declares on its encoder (docs/encoders.md)."""

    encoder: str = ""  # name
    # data sets, or one split of one: NAME:train; None: unknown
    pretrained_on: tuple[str, ...] | None = None
    pretrained_subjects: tuple[str, ...] | None = omit_none(
        "Subject ids of the scored data that the pre-training had."
    )
    tokens: str | None = omit_none("Fingerprint of the token set that was encoded.")
    seed: int | None = omit_none(
        "Of a training: files of one encoder with a seed each are one row."
    )


class ComparedRow(CorrectedDifference):
    """An encoder, the mean over its seeds, less one or more models that differ in their seed
    alone.
    """

    models: tuple[str, ...]  # keys of `compared`


class EncoderRecord(Part):
    """The encoder of scored vectors, and the linear probe on them."""

    file: str
    sha256: str
    width: int
    pretrained_on: tuple[str, ...] | None  # as declared; None: unknown
    penalty: list[float]
    fitted_on: Annotated[dict[str, int] | None, Sharing.OWNER]  # split -> windows


class TrainingScore(Part):
    """Scores on windows that the run was trained on, without intervals: far better ones than on the
    scored split are the mark of a model that knows its training people.
    """

    # windows, drawn at random where the training had more
    n: Annotated[int | None, Sharing.OWNER]
    total: Annotated[int | None, Sharing.OWNER]  # windows of the training
    metrics: dict[str, MetricValue] = {}


class EvaluationSettings(Part):
    """How a run was scored."""

    bootstrap: int = 0
    by: Literal["subject", "window"] = "subject"
    baselines: Literal["all", "cheap"] = "all"  # cheap: without those that are fitted
    seed: int = 0
    model: str = ""
    preset: str = ""
    verified: bool = True
    checkpoint: ScoredCheckpoint | None = omit_none("The weights that were scored.")
    calibrated_on: str | None = omit_none("Whose labels the risks were recalibrated on.")


class BestBaseline(NamedTuple):
    """The best value that a baseline reaches, with its interval."""

    value: float
    name: str  # in words
    lo: float | None
    hi: float | None


class TaskScores(Part):
    """Scores of predictions on the rows of one split. Rows of `confusion` are true classes."""

    task: str | None = None
    main: str | None = None  # the metric of verdicts
    unit: str | None = omit_none("of the values of a regression, where it is known")
    n: People = 0  # rows
    n_subjects: People = 0
    metrics: dict[str, MetricValue] = {}
    by_class: dict[str, ClassScores] = {}
    confusion: Annotated[list[list[int]] | None, Sharing.OWNER] = None
    baselines: dict[str, Baseline] = {}
    intervals: IntervalMethod | None = omit_none("of a task")
    folds: int | None = omit_none("test folds, each predicted by a model of its own")
    remarks: Annotated[list[str], Sharing.MESSAGE] = []

    def find_best_baseline(self, metric: str, *, lower: bool) -> BestBaseline | None:
        """The baseline with the best value of a metric; None: none has one. `lower`: lower is
        better.
        """
        reached = [
            BestBaseline(row.value, name.replace("_", " "), row.lo, row.hi)
            for name, baseline in self.baselines.items()
            if (row := baseline.metrics.get(metric, MetricValue())).value is not None
        ]
        choose = min if lower else max
        return choose(reached, key=lambda best: best[:2], default=None)


class Scores(TaskScores, ResultRecord):
    """scores.json: an evaluated run. A pre-trained one has no task; its metrics are loss, rel and
    the parts of the objective.
    """

    REPAIR: ClassVar[str] = "Repeat: bitimely evaluate"
    # beside scores.json of claims: without what few people have in common
    SHARED: ClassVar[str] = "scores_shared.json"

    @classmethod
    def load_shared(cls, folder: Path) -> Self:
        """The scores of a run as pages print them. Raises UserError: as `load`."""
        shared = folder / cls.SHARED
        return cls.load(shared if has_result(shared) else folder / "scores.json")

    run: str = ""
    data: str = ""
    split: str = "test"
    settings: EvaluationSettings = EvaluationSettings()
    leak_free: bool | str | None = None
    subjects_shared_with_training: Annotated[int, Sharing.ROWS] = 0
    notices: Annotated[list[str], Sharing.MESSAGE] = []
    comparison: Comparison | None = omit_none("with --compare")
    lift: BaselineLift | None = omit_none("over the best baseline")
    training: TrainingScore | None = omit_none(
        "where the run was trained on this token set and another split is scored"
    )
    nights: NightScores | None = omit_none("of sleep stages")
    events: EventScores | None = omit_none("of two classes over time")
    risk_groups: dict[str, RiskGroups] | None = omit_none("of times to event, by label")
    risk_calibration: dict[str, LabelCalibration] | None = omit_none("of labels of histories")
    encoder: EncoderRecord | None = omit_none("of --vectors: `run` is the name of the encoder")
    compared: dict[str, Baseline] | None = omit_none(
        "of --vectors: trained models on the same windows; differences are the encoder less them"
    )
    compared_rows: dict[str, ComparedRow] | None = omit_none(
        "the main metric of them, as one family; of histories withheld"
    )

    @model_serializer(mode="wrap")
    def omit_task(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the fields of a task where there is none."""
        values = handler(self)
        hidden = ("task", "main", "confusion", "remarks") if self.task is None else ()
        return leave_out(values, hidden)
