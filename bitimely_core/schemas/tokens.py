"""Records of token sets: options, manifests and statistics of windows and sequences, and what a run
needs to prepare new recordings.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from bitimely_core.config import Filtering, Normalise, Resampling, Split, WindowConfig
from bitimely_core.privacy import Sharing
from bitimely_core.registry import Task
from bitimely_core.schemas.ingest_records import (
    AgreementCell,
    ClaimsFunnel,
    CodeCount,
    CodeMap,
    FindingRecord,
)
from bitimely_core.store.records import Manifest, Part, StoredRecord, omit_none

Number = int | float  # stored as given: 30 stays 30


class LandmarkOptions(Part):
    """Index day of sequences and the period of their labels, in days."""

    landmark_days: int | None = None  # since the first row
    day: int | None = None  # since 1970
    gap_days: int
    horizon_days: int


class TokenOptions(Part):
    """The resolved choices that made a token set; those of one kind of data are added by the
    subclasses.
    """

    dataset: str
    view: str
    task: Task
    split: str
    seed: int
    normalise: str


class WindowOptions(TokenOptions, WindowConfig):
    """Choices of windows: a view with the options of the caller."""

    channels: tuple[str, ...]
    rate: float  # Hz
    window: int  # samples at `rate`
    stride: int  # samples at `rate`; of sliding views
    split: Split
    seed: int
    normalise: Normalise
    resampling: Resampling
    filtering: Filtering
    resample: bool  # `rate` was given: faster channels may be brought to it
    decimate: tuple[str, ...]  # faster channels that the view itself brings to `rate`
    hold: tuple[str, ...]
    classes: tuple[str, ...]  # () with a classification task: those that occur
    labels: dict[str, str] | None
    epoch: Number | None  # seconds
    trim: tuple[str, Number] | None
    target: str | None
    overlap: Number | None  # of numeric annotations
    # channel with the times of irregular samples, the last of `channels` unless `grid`
    clock: str | None
    grid: bool  # irregular samples were brought to `rate`
    points: bool  # windows around annotations without a duration

    @property
    def irregular(self) -> bool:
        """Whether the last of `channels` holds the times of the others."""
        return self.clock is not None and not self.grid

    @property
    def value_channels(self) -> tuple[str, ...]:
        """The channels without that of the times."""
        return self.channels[:-1] if self.irregular else self.channels

    @property
    def read_channels(self) -> tuple[str, ...]:
        """The channels that are read of a recording: `channels`, and the times of samples that are
        brought to a grid.
        """
        return (
            (*self.channels, self.clock) if self.clock is not None and self.grid else self.channels
        )

    @property
    def length(self) -> float:
        """Seconds a window."""
        return self.window / self.rate


class SequenceOptions(TokenOptions):
    """Choices of sequences (`claims.choices.SequenceChoices`)."""

    preset: str
    split_file: str | None  # SHA-256
    landmark: LandmarkOptions | None
    leakage: str
    level: str
    asked: str | None  # of prediction times: hash of the labels
    time_to_event: tuple[int, ...] | None  # horizons in days
    values: Literal["none", "deciles", "raw"]  # numbers of codes that are not ICD
    small_counts: bool  # pages show counts below 11
    individual_timelines: bool  # the page draws sequences of single subjects
    cohort: dict[str, object] | None  # `claims.cohorts.CohortRules`: the label is its outcome

    @property
    def numbers(self) -> bool:
        """Whether events come with their numbers."""
        return self.values == "raw"


class HistoryPreparation(StoredRecord):
    """`histories.json` of sequences, and of a run on them: what turns histories of new people into
    the sequences that the model reads.
    """

    REPAIR: ClassVar[str] = "Tokenize and train again, or export the run again"

    cache: str  # SHA-256 of the manifest of the cache of the training
    options: SequenceOptions
    class_names: tuple[str, ...]  # labels, without horizons
    indexed: bool  # whether the sequences end with index days
    vocabulary: tuple[str, ...]  # codes in the order of their ids, which follow the special ones
    names: dict[str, str]  # code -> phenotype
    categories: dict[str, str]
    rules: list[dict[str, Any]]  # as `label_rules.parse_rules` takes them
    defining: tuple[str, ...]  # PheCodes of the rules, for the leakage policies
    reading: dict[str, Any]  # options of the ingest
    codemap: CodeMap
    values: list[dict[str, Any]] | None  # rows of `code_values.fit_values`; None: no numbers
    # rules of labels which those who fulfil them by their index days do not have: they had them
    first_outcomes: tuple[dict[str, object], ...] = ()
    kinds: tuple[str, ...] = ()  # of the claims of the training
    # of a run: labels, with horizons, that nobody of its training has
    labels_without_cases: tuple[str, ...] = ()


class ChannelPreparation(Part):
    """How native samples became values: channels of one native rate that were treated alike."""

    channels: tuple[str, ...]
    native_rate: float  # Hz
    rate: float  # Hz, of the values
    resampling: Literal["none", "interpolated", "held", "placed", "resampled", "causal", "averaged"]
    filters: Literal["zero-phase", "causal"] | None


class SamplePreparation(Part):
    """From the native samples of a recording to the values of its windows."""

    channels: tuple[ChannelPreparation, ...]
    # values of which the starts of windows are multiples; None: they start anywhere
    stride: int | None = None


class SplitCounts(Part):
    """Audit of one split."""

    windows: int
    subjects: int
    recordings: int
    classes: dict[str, int]
    empty: int  # windows that were left out: they have no sample


class WindowShard(Part):
    """A file of windows."""

    name: str
    rows: int
    dtype: Literal["int16", "float32"]


class WindowUse(Part):
    """What of a cache is in windows."""

    recordings: int  # of the cache
    recordings_used: int  # that have a window
    channels_left: dict[str, int]  # channel that no window has -> recordings that have it
    seconds: float  # of all recordings
    seconds_used: float  # of them, those in windows


class TokenManifest(Manifest):
    """The manifest of a token set, of windows or of sequences."""

    REPAIR: ClassVar[str] = "Tokenize again"

    kind: Literal["windows", "sequences"]
    cache: str  # SHA-256 of the manifest of the cache
    options: TokenOptions
    class_names: list[str]
    notices: list[str]
    findings: list[FindingRecord]


class WindowManifest(TokenManifest):
    """The manifest of windows."""

    kind: Literal["windows"] = "windows"
    options: WindowOptions
    units: list[str]  # of the channels
    windows: int
    missing: bool  # whether any value is missing
    shards: list[WindowShard]
    counts: dict[str, SplitCounts]
    left_out: dict[str, int]
    use: WindowUse | None = omit_none()
    preparation: SamplePreparation


class SequenceManifest(TokenManifest):
    """The manifest of event sequences."""

    kind: Literal["sequences"] = "sequences"
    options: SequenceOptions
    shards: list[str]
    events: int
    base: str | None = None  # of prediction times: hash of the sequences whose codes they use


class TargetStatistics(Part):
    """Numeric labels of the training split."""

    n: int
    mean: float
    std: float


class ChannelStatistics(TargetStatistics):
    """Physical values of a channel in the training split."""

    channel: str
    unit: str


class TokenStatistics(StoredRecord):
    """`statistics.json` of a token set."""

    REPAIR: ClassVar[str] = "Tokenize again"


class WindowStatistics(TokenStatistics):
    """What windows are normalised with, and label frequencies: of the training split alone."""

    split: Literal["train"] = "train"
    windows: int
    channels: list[ChannelStatistics]
    labels: dict[str, int] | None = None  # of classes
    target: TargetStatistics | None = None  # of numbers


class Preprocessing(StoredRecord):
    """`preprocessing.json` of a fine-tuned run on recordings: what turns a new recording into the
    windows that the model reads.
    """

    REPAIR: ClassVar[str] = "Fine-tune again under --force-new, or export the run again"

    fingerprint: str  # of the token set
    options: WindowOptions
    units: tuple[str, ...]  # of the channels
    class_names: tuple[str, ...]
    # whether any window has missing values: the model then reads a mask with all of them
    missing: bool
    channels: tuple[ChannelStatistics, ...]  # of the training split

    @property
    def unit_of(self) -> dict[str, str]:
        """Channel -> its unit."""
        return dict(zip(self.options.channels, self.units, strict=True))


class Calibration(StoredRecord):
    """`calibration.json` of a fine-tuned run: temperature and conformal threshold, fitted on
    windows that it was not trained on.
    """

    REPAIR: ClassVar[str] = "Remove it: the next predict fits it again"

    weights: str  # SHA-256 of the model
    data: str  # name of the windows
    unit: str  # what a unit is: subject, recording, segment; window: of one person's own recordings
    units: Annotated[int, Sharing.ROWS]
    windows: Annotated[int, Sharing.ROWS]
    level: float  # of coverage
    temperature: float | None  # None: values, which have no probabilities
    # of one less the probability, or of the absolute error, see `evaluate.conformal`; None: sets
    # hold everything
    threshold: float | None
    undefined_reason: str | None = None  # of the threshold


class SequenceFunnel(ClaimsFunnel):
    """`ClaimsFunnel`, and the subjects and events that are left in sequences."""

    subjects_in: int
    subjects_out: int
    events: int
    no_birth: int


class SequenceLengths(Part):
    """Lengths of sequences."""

    n: int
    median_length: float
    longest: int
    median_positive_gap: float | None  # months


PartScores = dict[str, float | None]
"""train, validation, test, all -> average precision."""


class BestCode(Part):
    """The PheCode whose count predicts a label best on the training split."""

    phecode: str
    count: PartScores


class ShortcutScores(Part):
    """How well shortcuts alone predict a label; `prevalence` is the average precision of chance."""

    subjects: dict[str, int]
    cases: dict[str, int]
    prevalence: PartScores
    length: PartScores
    best: BestCode | None
    own: dict[str, PartScores]  # PheCode of the label's rule -> scores
    leak: bool


class PrevalenceCount(Part):
    """Subjects with a label, and cases among them."""

    subjects: int
    cases: int
    prevalence: float | None


class FlowStep(Part):
    """A step of the choice of a cohort."""

    reason: str  # as in cohort.parquet
    text: str
    left_out: int
    left: int  # who remain


class CohortFlow(Part):
    """How the subjects of a cohort were chosen."""

    title: str
    kind: Literal["incident", "prevalent"]
    subjects: int
    steps: list[FlowStep]
    cases: int  # of those who remain


class SequenceStatistics(TokenStatistics):
    """Funnel, label prevalences and shortcut baselines of sequences."""

    funnel: SequenceFunnel
    sequences: SequenceLengths
    # of the filters -> label -> split
    prevalence: dict[Literal["before", "after"], dict[str, dict[str, PrevalenceCount]]]
    leaks: dict[str, ShortcutScores]
    own: dict[str, list[str]]  # label -> PheCodes of its rule
    max_attainable: dict[str, float | None]
    threshold: Number
    fallback: list[str]  # labels without a PheCode above the threshold
    selected: int
    small_support: list[str]
    agreement: list[AgreementCell]
    unmapped: list[CodeCount]
    cohort: CohortFlow | None = None


class PredictionStatistics(TokenStatistics):
    """Counts of sequences up to prediction times."""

    rows: int
    without_codes: int
    not_in_cache: int
    events: int
