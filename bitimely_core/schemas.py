"""Schemas of the JSON files that are stored: records of runs, caches, tokens, scores and reports.

Each record is one frozen pydantic model, read by `load` and written by `save`, nowhere else. Keys that this version does not know are kept,
so that nothing is lost when an older version writes a record again; keys of later versions are tolerated. `upgrade_v1` brings what version
0.1 wrote to the present form while it is read; the file itself is left as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, SerializeAsAny, SerializerFunctionWrapHandler, model_serializer, model_validator

from bitimely_core.config import SECTIONS, Filtering, Resampling, Settings, SettingsLayer, parse_stored_settings, upgrade_settings
from bitimely_core.errors import Exit, Finding, Level
from bitimely_core.records import Manifest as Manifest
from bitimely_core.records import Part, has_result, omit_none, write_results
from bitimely_core.records import StoredFile as StoredFile
from bitimely_core.records import StoredRecord as StoredRecord
from bitimely_core.registry import Task


def flatten_keys(value: JsonValue, prefix: str = "") -> dict[str, JsonValue]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; lists are values."""
    if not isinstance(value, dict):
        return {prefix: value}
    return {key: leaf for name, inner in value.items() for key, leaf in flatten_keys(inner, f"{prefix}.{name}" if prefix else name).items()}


# --- ingest report ----------------------------------------------------------------------------------------------------------------------


class FindingRecord(Part):
    """A finding as it is stored (`Finding.as_dict`)."""

    code: str
    level: Level
    message: str
    file: str | None
    field: str | None
    row: int | None
    found: str | None
    expected: str | None
    count: int
    examples: list[str]

    @classmethod
    def of(cls, finding: Finding) -> Self:
        """`finding` as it is stored."""
        return cls(**finding.as_dict())


class UnitReport(Part):
    """Status of one unit of a data set."""

    unit: str
    files: list[str]
    status: Literal["accepted", "accepted_with_warning", "quarantined"]
    reasons: list[FindingRecord]
    content_sha256: str | None
    samples: int | None
    channels: int | None


class TableReport(Part):
    """Status of the rows of one table."""

    file: str
    kind: str
    seen: int
    used: int
    dropped: int
    quarantined: int
    dropped_by_reason: dict[str, int]
    quarantined_by_reason: dict[str, int]
    warned_by_reason: dict[str, int]


ChecksumStatus = Literal["verified", "mismatch", "absent", "skipped"]


class SourceReport(Part):
    """The source of an ingest."""

    path: str | None
    kind: str | None
    files: int
    bytes: int
    sha256: str
    sha256sums: ChecksumStatus


class UnitCounts(Part):
    """Units by status."""

    units_seen: int
    accepted: int
    accepted_with_warning: int
    quarantined: int


class ToolVersions(Part):
    """Versions of bitimely and of the libraries that read and write."""

    version: str
    python: str
    libraries: dict[str, str]


class ErrorReport(Part):
    """The error that ended an ingest."""

    code: str
    message: str


class IngestAccount(StoredRecord):
    """Status of every unit and row of an ingest, or of a part of it."""

    REPAIR: ClassVar[str] = "Ingest again"

    dataset: str
    units: list[UnitReport]
    counts: UnitCounts
    rows: list[TableReport]
    reasons: list[FindingRecord]  # of the data set, not of one unit
    reason_counts: dict[str, int]
    options: dict[str, Any]


class IngestReport(IngestAccount):
    """`ingest_report.json` of an ingest. Holds no clock, host or duration."""

    schema_name: str = Field("bitimely.ingest_report/1", alias="schema")
    source: SourceReport
    status: Literal["published", "partial", "refused", "interrupted", "failed"] = "refused"
    exit_code: int = int(Exit.REFUSED)
    published: bool = False
    generation: int | None = None
    manifest_sha256: str | None = None
    content_sha256: str | None = None
    units_listed: Literal["all", "not_accepted"]
    rules: dict[str, str]
    tool: ToolVersions
    error: ErrorReport | None = None
    tokens: dict[str, Any] | None = omit_none()  # of claims: the sequences that were built at once

    def save(self, path: Path, *, held: bool = True) -> None:
        """As `StoredRecord.save`, in a cache whose lock the caller has (`held`)."""
        write_results(path.parent, {path.name: self.encode()}, beside=True, held=held)


class IngestPart(IngestAccount):
    """Result of part k of n of an ingest; nothing is published."""

    schema_name: str = Field("bitimely.ingest_part/1", alias="schema")
    status: Literal["part"] = "part"
    shard: str  # k/n
    exit_code: int = int(Exit.OK)
    published: Literal[False] = False
    parts_missing: int

    @classmethod
    def of(cls, report: IngestReport, shard: tuple[int, int], parts_missing: int) -> Self:
        """The result of part k of n = `shard`, from the report so far."""
        shared = {name: getattr(report, name) for name in IngestAccount.model_fields}
        return cls(**shared, shard=f"{shard[0]}/{shard[1]}", parts_missing=parts_missing)


# --- cache ------------------------------------------------------------------------------------------------------------------------------


class CachedUnit(Part):
    """A unit in `units-*.json`, and in the notes of an unfinished ingest."""

    key: str | None  # hash of what decides the content; None: read again every time
    sources: dict[str, str]  # file -> SHA-256
    report: UnitReport | None
    rows: list[TableReport] = []
    recordings: list[tuple[str, str, dict[str, Any], int, int]] = []  # id, subject, attributes, signals, annotations
    samples: list[str] = Field([], exclude_if=lambda samples: not samples)  # hash of each recording's samples, empty for constant ones
    shard: tuple[str | None, str | None] = (None, None)  # files of recordings and annotations


class CachedPart(Part):
    """Finished groups of units: a note of an unfinished ingest, or all that a cache holds."""

    units: dict[str, CachedUnit]
    files: dict[str, StoredFile] = {}


class CacheSettings(Part):
    """What a cache must have been made with to be continued."""

    dataset: str
    version: str
    options: dict[str, Any]


class CacheManifest(Manifest):
    """The manifest of a cache, of recordings or of events."""

    schema_name: str = Field("bitimely.cache/1", alias="schema")
    kind: Literal["recordings", "events"]
    dataset: str
    settings: CacheSettings
    content_sha256: str
    subjects: str  # file: one row a recording, of events a subject
    report: IngestReport


class RecordingsManifest(CacheManifest):
    """The manifest of a cache of recordings."""

    kind: Literal["recordings"] = "recordings"
    shards: list[tuple[str | None, str | None]]  # files of recordings and annotations
    units: str  # file: `CachedUnit` by name
    recordings: int


class CodeCount(Part):
    """A code without PheCode, and its rows."""

    code: str
    n: int


class AgreementCell(Part):
    """A cell of the table of a label rule against a label of the source."""

    rule: str
    flag: str
    cell: Literal["tp", "fp", "fn", "tn"]
    n: int


class ClaimsFunnel(Part):
    """Rows of claims by the first check that they fail."""

    rows: int
    identifier: int | None = omit_none()
    bad_date: int
    before_birth: int
    after_death: int | None = omit_none()
    future: int | None = omit_none()
    bad_code: dict[str, int]
    mapped: dict[str, int]
    unmapped: int
    subjects: int | None = omit_none()


class EventsManifest(CacheManifest):
    """The manifest of a cache of events (claims)."""

    kind: Literal["events"] = "events"
    shards: list[str]
    labels: str  # file: one row a subject and label
    names: list[str]  # of the labels
    rules: list[dict[str, Any]]  # as `label_rules.parse_rules` takes them
    ruled: bool  # whether the rules make the labels
    defining: dict[str, list[str]]  # label -> PheCodes of its rule
    phenotypes: dict[str, str]  # PheCode -> name
    categories: dict[str, str]
    map: list[dict[str, Any]]  # PheCode map: facts of each file
    clock: Literal["calendar", "subject"]
    data_end: int | None  # day since 1970
    days: int
    seed: int
    split: Literal["official", "subject"]
    agreement: list[AgreementCell]
    funnel: ClaimsFunnel
    unmapped: list[CodeCount]
    facts: dict[str, Any]


# --- tokens -----------------------------------------------------------------------------------------------------------------------------


Number = int | float  # stored as given: 30 stays 30


class LandmarkOptions(Part):
    """Index day of sequences and the period of their labels, in days."""

    landmark_days: int | None = None  # since the first row
    day: int | None = None  # since 1970
    gap_days: int
    horizon_days: int


class TokenOptions(Part):
    """The resolved choices that made a token set; those of one kind of data are added by the subclasses."""

    dataset: str
    view: str
    task: Task
    split: str
    seed: int
    normalise: str


class WindowOptions(TokenOptions):
    """Choices of windows: a view with the options of the caller. Options that came later are stored only when they are used."""

    channels: tuple[str, ...]
    rate: float  # Hz
    window: int  # samples at `rate`
    stride: int  # samples at `rate`; of sliding views
    resample: bool  # `rate` was given: faster channels may be brought to it
    decimate: tuple[str, ...]  # faster channels that the view itself brings to `rate`
    hold: tuple[str, ...]
    classes: tuple[str, ...]  # () with a classification task: those that occur
    labels: dict[str, str] | None
    epoch: Number | None  # seconds
    trim: tuple[str, Number] | None
    target: str | None
    overlap: Number | None = omit_none()  # of numeric annotations
    bandpass: tuple[Number | None, Number | None] | None = omit_none()  # Hz
    notch: tuple[Number, ...] | None = omit_none()  # Hz
    test_fold: int | None = omit_none()  # of ten
    resampling: Resampling | None = omit_none()
    filtering: Filtering | None = omit_none()
    clock: str | None = omit_none()  # channel with the times of irregular samples, the last of `channels` unless `grid`
    grid: Literal[True] | None = omit_none()  # irregular samples were brought to `rate`
    points: Literal[True] | None = omit_none()  # windows around annotations without a duration

    @property
    def irregular(self) -> bool:
        """Whether the last of `channels` holds the times of the others."""
        return self.clock is not None and self.grid is None

    @property
    def value_channels(self) -> tuple[str, ...]:
        """The channels without that of the times."""
        return self.channels[:-1] if self.irregular else self.channels

    @property
    def length(self) -> float:
        """Seconds a window."""
        return self.window / self.rate


class SequenceOptions(TokenOptions):
    """Choices of sequences (`claims.steps.SequenceChoices`)."""

    preset: str
    split_file: str | None  # SHA-256
    landmark: LandmarkOptions | None
    leakage: str
    level: str
    asked: str | None = omit_none()  # of prediction times: hash of the labels
    small_counts: Literal["shown"] | None = omit_none()  # pages show counts below 11
    individual_timelines: Literal["drawn"] | None = omit_none()  # the page draws sequences of single subjects


class ChannelPreparation(Part):
    """How native samples became values: channels of one native rate that were treated alike."""

    channels: tuple[str, ...]
    native_rate: float  # Hz
    rate: float  # Hz, of the values
    resampling: Literal["none", "interpolated", "held", "placed", "resampled", "causal", "averaged"]
    filters: Literal["zero-phase", "causal"] | None = omit_none()


class SamplePreparation(Part):
    """From the native samples of a recording to the values of its windows."""

    channels: tuple[ChannelPreparation, ...]
    stride: int | None = omit_none()  # values of which the starts of windows are multiples; None: they start anywhere


class SplitCounts(Part):
    """Audit of one split."""

    windows: int
    subjects: int
    recordings: int
    classes: dict[str, int]


class WindowShard(Part):
    """A file of windows."""

    name: str
    rows: int
    dtype: Literal["int16", "float32"]


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
    preparation: SamplePreparation | None = omit_none()


class SequenceManifest(TokenManifest):
    """The manifest of event sequences."""

    kind: Literal["sequences"] = "sequences"
    options: SequenceOptions
    shards: list[str]
    events: int
    base: str | None = omit_none()  # of prediction times: hash of the sequences whose codes they use


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
    labels: dict[str, int] | None = omit_none()
    target: TargetStatistics | None = omit_none()


class Preprocessing(StoredRecord):
    """`preprocessing.json` of a fine-tuned run on recordings: what turns a new recording into the windows that the model reads."""

    REPAIR: ClassVar[str] = "Fine-tune again under --force-new, or export the run again"

    fingerprint: str  # of the token set
    options: WindowOptions
    units: tuple[str, ...]  # of the channels
    class_names: tuple[str, ...]
    missing: bool  # whether any window has missing values: the model then reads a mask with all of them
    channels: tuple[ChannelStatistics, ...]  # of the training split


class Calibration(StoredRecord):
    """`calibration.json` of a fine-tuned run: temperature and conformal threshold, fitted on windows that it was not trained on."""

    REPAIR: ClassVar[str] = "Remove it: the next predict fits it again"

    weights: str  # SHA-256 of the model
    data: str  # name of the windows
    unit: str  # what a unit is: subject, recording, segment; window: of one person's own recordings
    units: int
    windows: int
    level: float  # of coverage
    temperature: float | None  # None: values, which have no probabilities
    threshold: float | None  # of one less the probability, or of the absolute error, see `evaluate.conformal`; None: sets hold everything
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


class SequenceStatistics(TokenStatistics):
    """Funnel, label prevalences and shortcut baselines of sequences."""

    funnel: SequenceFunnel
    sequences: SequenceLengths
    prevalence: dict[Literal["before", "after"], dict[str, dict[str, PrevalenceCount]]]  # of the filters -> label -> split
    leaks: dict[str, ShortcutScores]
    own: dict[str, list[str]]  # label -> PheCodes of its rule
    max_attainable: dict[str, float | None]
    threshold: Number
    fallback: list[str]  # labels without a PheCode above the threshold
    selected: int
    small_support: list[str]
    agreement: list[AgreementCell]
    unmapped: list[CodeCount]


class PredictionStatistics(TokenStatistics):
    """Counts of sequences up to prediction times."""

    rows: int
    without_codes: int
    not_in_cache: int
    events: int


# --- runs ---------------------------------------------------------------------------------------------------------------------------------


SHOWN = 5e-4  # half of the last digit that pages show of a number below 1; of larger ones relative


class ReadingOptions(Part):
    """How the windows of a run were made, as far as a score depends on it."""

    normalise: str | None = None
    bandpass: tuple[Number | None, ...] | None = None  # Hz
    notch: tuple[Number, ...] | None = None  # Hz
    leakage: str | None = None  # of claims
    landmark: LandmarkOptions | None = None  # of claims


class SplitCount(Part):
    """Size of one split."""

    windows: int = 0
    subjects: int = 0


class RunData(Part):
    """The windows of one data set that a run was trained on."""

    name: str
    dataset: str
    fingerprint: str
    view: str = ""
    channels: int = 1
    channel_names: tuple[str, ...] = ()
    length: int = 0  # samples; events
    rate: float = 0.0  # Hz; 0 for events
    reading: ReadingOptions = ReadingOptions()
    split: str = "subject"
    windows: int = 0
    audit: dict[str, SplitCount] = {}
    class_names: tuple[str, ...] = ()
    vocabulary: str | None = omit_none("SHA-256 of the names of the codes, for events.")
    small_counts: Literal["shown"] | None = omit_none("Of events: pages show counts below 11.")


class RunSource(Part):
    """The pre-training that a fine-tuning started from."""

    run: str
    weights: str | None = None  # SHA-256; None: trained from scratch


class Losses(Part):
    """Loss, and loss / Var(target)."""

    loss: float | None = None
    rel: float | None = None


class FinalLosses(Losses):
    """The last logged losses of a training."""

    step: int = 0
    validation: Losses | None = None


class ScoredCheckpoint(Losses):
    """The weights of a run, which every score is of; `loss` and `rel` are their validation losses."""

    choice: Literal["last", "best"]
    step: int
    steps: int  # of the training

    def describe(self) -> str:
        """In one line, for pages."""
        if self.choice == "last":
            return f"last, step {self.step:,}"
        return f"best validation loss ({self.loss:.4g}), step {self.step:,} of {self.steps:,}"


class TuningTrial(Part):
    """The short training at one learning rate."""

    lr: float
    scores: dict[str, float | None] = {}
    reason: str = ""  # why there are no scores


class TuningRecord(Part):
    """A learning-rate search: `tuning` of `run.json`."""

    lr: float  # the selected one
    by: tuple[str, ...]  # the scores that decided
    steps: int  # of each trial
    seed: int
    around: float  # the rate of the settings
    trials: tuple[TuningTrial, ...]


class TrialRecord(StoredRecord, TuningTrial):
    """`tuning/lr-<rate>/trial.json` of a run."""

    VERSION: ClassVar[int] = 2
    GUARDED: ClassVar[int | None] = 2

    format_version: int = 2


class RunEnvironment(Part):
    """Where a training computed: what may change the last digits of its numbers, beside the versions."""

    device: str  # cpu, cuda or mps
    hardware: str  # name of the GPU, or architecture and vector instructions of the processor
    threads: int  # of torch on the CPU
    processes: int
    deterministic: bool  # kernels that add in a fixed order
    matmul: str  # precision of float32 matrix products: highest, high or medium

    def describe(self) -> str:
        """In one line, for pages."""
        several = f", {self.processes} processes" if self.processes > 1 else ""
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        return f"{self.device} ({self.hardware}), {threads}{several}, {'' if self.deterministic else 'non-'}deterministic kernels"

    def list_changes(self, before: RunEnvironment) -> list[str]:
        """What differs from the environment `before`, a line each."""
        both = ((name, getattr(self, name), getattr(before, name)) for name in RunEnvironment.model_fields)
        return [f"{name} {now}, it was {then}" for name, now, then in both if now != then]


class RunRecord(StoredRecord):
    """`run.json`: what was trained, on which data, with which settings and result."""

    VERSION: ClassVar[int] = 3
    GUARDED: ClassVar[int | None] = 3
    REPAIR: ClassVar[str] = "Restore a copy, or repeat the training under --force-new"

    format_version: int = 3
    run: str
    kind: Literal["pretrain", "finetune"]
    model: str
    settings: Annotated[SerializeAsAny[Settings], BeforeValidator(parse_stored_settings)]
    data: tuple[RunData, ...]
    preset: str = ""
    source: RunSource | None = None
    init: str | None = None  # SHA-256 of the weights of --init
    init_from: dict[str, str] | None = omit_none("The run, or repository and revision, that --init named.")
    parameters: int = 0
    paper_parameters: int | float | None = None
    leak_free: bool | str | None = None
    preparation: tuple[SamplePreparation | None, ...] | None = omit_none("Of each data set; null: unknown.")
    seed: int = 0
    versions: dict[str, str] = {}
    verified: bool = True  # whether checksums of the data were compared
    notices: tuple[str, ...] = ()
    finished: bool = False
    final: FinalLosses | None = omit_none("Of finished runs.")
    device: str | None = omit_none("Of finished runs.")
    environment: RunEnvironment | None = omit_none("Where it was trained; of a run that was stopped, where it ended.")
    earlier_environments: tuple[RunEnvironment, ...] | None = omit_none("Of a run that was stopped and continued elsewhere.")
    weights: str | None = omit_none("SHA-256 of model.safetensors, of finished runs.")
    checkpoint: ScoredCheckpoint | None = omit_none("Of finished runs: which weights these are.")
    tuning: TuningRecord | None = omit_none("The learning-rate search.")
    pretraining_data: tuple[RunData, ...] | None = omit_none("Of a fine-tuning.")
    pretraining_steps: int | None = omit_none("Of a fine-tuning.")
    renewed: tuple[str, ...] | None = omit_none("Tensors of a fine-tuning that were randomly initialised.")
    train_windows: int | None = omit_none("Of a fine-tuning.")
    train_label_counts: dict[str, int] | None = omit_none("Training windows of each class, of a fine-tuning.")

    @classmethod
    def upgrade_v1(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Without the settings of other models and objectives."""
        settings = values.get("settings")
        return {**values, "format_version": 3, "settings": upgrade_settings(settings) if isinstance(settings, dict) else settings}

    @property
    def is_finetuned(self) -> bool:
        """Whether the run has a supervised head."""
        return self.kind == "finetune"

    @property
    def channels(self) -> tuple[int, ...]:
        """The channels that the adapters of the run read, in their order."""
        return (self.settings.model.channels, *self.settings.model.others)


class Reproduction(StoredRecord):
    """`reproduction.json`: a run beside the same training once more; pairs are the run's number and that of the other."""

    again: str  # name of the other run
    differences: tuple[str, ...]  # of data, versions and environment
    loss: tuple[float | None, float | None]  # of the last step
    same_weights: bool
    metrics: dict[str, tuple[float | None, float | None]] = {}  # of an evaluated run

    def list_changes(self) -> list[str]:
        """The scores that differ by more than rounding of the digits that pages show, in words; without scores the loss."""
        found = self.metrics or {"last loss": self.loss}
        both = [(name, a, b) for name, (a, b) in found.items() if a is not None and b is not None]
        far = [(name, f"{a:.3f}", f"{b:.3f}") for name, a, b in both if abs(a - b) > SHOWN * max(1.0, abs(a))]
        return [f"{name.replace('_', ' ')} {b}, it was {a}" for name, a, b in far if a != b]


class TrainSubjects(StoredRecord):
    """`train_subjects.json`: hashes of the subjects of the training splits, fine-tuning and pre-training together."""

    marks: tuple[str, ...] = ()


class CheckpointMeta(StoredRecord):
    """`checkpoints/step-N/meta.json`."""

    VERSION: ClassVar[int] = 2
    REPAIR: ClassVar[str] = "Start again with --force-new"

    format_version: int = 2
    step: int  # optimizer steps done
    total: int = 0
    epoch: int = 0
    finished: bool = False
    validated: int = 0  # step of the last validation
    best: dict[str, int | float | None] | None = None  # lowest validation loss, its rel, step and epoch
    last: dict[str, float | None] = {}  # loss and rel of the last step
    seed: int = 0
    processes: int = 1
    identity: dict[str, JsonValue] = {}  # what a continued run must agree with
    bitimely: str = ""
    torch: str = ""
    files: dict[str, StoredFile] = {}
    log: StoredFile | None = omit_none("metrics.jsonl as it was at this step.")
    sha256: str = ""  # of the other keys

    @classmethod
    def upgrade_v1(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Its identity without the settings of other models and objectives, which format 1 holds as dotted keys."""
        settings = values.get("identity", {}).get("settings")
        if not isinstance(settings, dict):
            return values
        sections: SettingsLayer = {}
        for key, value in settings.items():
            head, *rest = key.removeprefix("settings.").split(".")
            if rest and head in SECTIONS:
                sections.setdefault(head, {})[rest[0]] = value
        own = upgrade_settings(sections)
        gone = {f"settings.{head}.{key}" for head, section in sections.items() for key in section.keys() - own[head].keys()}
        kept = {key: value for key, value in settings.items() if ".".join(key.split(".")[:3]) not in gone}
        return {**values, "identity": {**values["identity"], "settings": kept}}


# --- scores -------------------------------------------------------------------------------------------------------------------------------


class Uncertainty(Part):
    """Uncertainty of an estimate: standard error and 95 % confidence interval, null with the reason where they are not defined."""

    se: float | None = None
    lo: float | None = None
    hi: float | None = None
    n_defined: int | None = 0  # subjects (units) that the estimate is made of; None: withheld
    undefined_reason: str | None = None


class Difference(Uncertainty):
    """A paired difference of one metric between two models on the same rows."""

    difference: float | None = None
    df: float | None = omit_none("of Student's t")
    p: float | None = omit_none("two-sided")
    unit: str | None = omit_none("of the numbers times `factor`: points, /min ...; 1: a number without unit")
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
    """Tests of a difference against a margin, in the family of all such tests of a page. Bounds and margin are in units of the score."""

    margin: float
    worst: float | None = (
        None  # how much worse the first can be: one bound of the corrected 95 % interval, turned so that worse is positive
    )
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

    support: int | None = 0  # rows of the class; None: withheld
    subjects: int | None = 0  # subjects with such a row; None: withheld
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


class IntervalMethod(Part):
    """The method of the intervals: linearised variance over the units, Student's t (`evaluate.intervals`)."""

    method: str = "linearised"
    by: Literal["subject", "window"]
    unit: str = "subject"  # what a unit is: subject, recording, segment or window
    level: float
    units: int
    minimum_units: int
    minimum_effective: float
    minimum_rows: int


class PairedComparison(Part):
    """Two runs on the same rows, metric by metric."""

    task: str
    main: str
    n: int
    n_subjects: int
    metrics: dict[str, PairedScores]
    intervals: IntervalMethod


class SeedScore(MetricValue):
    """The metric of one run of a cell."""

    seed: int
    run: str


class CellScore(MetricValue):
    """A cell of a table of results: the mean over seeds with its interval, and the runs behind it."""

    seeds: list[SeedScore]
    seed_sd: float | None = None  # standard deviation over seeds
    seed_se: float | None = None
    n: int | None = 0  # None: withheld
    n_subjects: int | None = 0


class ColumnResult(Part):
    """Cells of one column by row, the differences of the rows to the reference row, and of each row to fitted baselines."""

    cells: dict[str, CellScore] = {}
    differences: dict[str, MeanDifference] = {}
    baselines: dict[str, dict[str, MeanDifference]] = {}
    remarks: list[str] = []


class EndpointValue(Part):
    """A clinical endpoint of one recording; null, with the reason, where its hypnogram cannot define it."""

    value: float | None = None
    unit: str = "min"
    undefined_reason: str | None = None


class EndpointAgreement(Part):
    """A clinical endpoint by the model and by the scorer over nights (Bland and Altman): predicted less scored, with intervals over subjects."""

    unit: str
    nights: int  # in which both define it
    scored: float | None = None  # mean over nights
    predicted: float | None = None
    bias: MetricValue = MetricValue()
    lower_limit: MetricValue = MetricValue()  # of agreement, bias - 1.96 standard deviations of the differences
    upper_limit: MetricValue = MetricValue()


class NightScores(Part):
    """Agreement night by night of predicted and scored hypnograms."""

    nights: int
    subjects: int
    kappa: MetricValue  # mean over nights of Cohen's kappa
    kappa_range: tuple[float, float] | None  # lowest and highest night
    endpoints: dict[str, EndpointAgreement]


class EventScores(Part):
    """Events of the second of two classes: successive windows of it are one event; it is found where any predicted event overlaps it."""

    events: int
    hours: float
    false_alarms: int  # predicted events that overlap no true one
    sensitivity: MetricValue
    false_alarms_per_hour: MetricValue


class Comparison(Part):
    """Paired differences of a run to another one, which is named."""

    run: str
    metrics: dict[str, PairedScores]
    sentence: str | None = omit_none("on the main metric")


class EncoderDeclaration(Part):
    """What a file of vectors declares on its encoder (docs/encoders.md)."""

    encoder: str = ""  # name
    pretrained_on: tuple[str, ...] | None = None  # data sets, or one split of one: NAME:train; None: unknown
    pretrained_subjects: tuple[str, ...] | None = omit_none("Subject ids of the scored data that the pre-training had.")
    tokens: str | None = omit_none("Fingerprint of the token set that was encoded.")
    seed: int | None = omit_none("Of a training: files of one encoder with a seed each are one row.")


class ComparedRow(CorrectedDifference):
    """An encoder, the mean over its seeds, less one or more models that differ in their seed alone."""

    models: tuple[str, ...]  # keys of `compared`


class EncoderRecord(Part):
    """The encoder of scored vectors, and the linear probe on them."""

    file: str
    sha256: str
    width: int
    pretrained_on: tuple[str, ...] | None  # as declared; None: unknown
    penalty: list[float]
    fitted_on: dict[str, int]  # split -> windows; of histories withheld


class EvaluationSettings(Part):
    """How a run was scored."""

    bootstrap: int = 0
    by: Literal["subject", "window"] = "subject"
    baselines: Literal["all", "cheap"] | None = omit_none("cheap: without those that are fitted; None: of version 0.1, without them")
    seed: int = 0
    model: str = ""
    preset: str = ""
    verified: bool = True
    checkpoint: ScoredCheckpoint | None = omit_none("The weights that were scored.")


class TaskScores(Part):
    """Scores of predictions on the rows of one split. Rows of `confusion` are true classes."""

    task: str | None = None
    main: str | None = None  # the metric of verdicts
    unit: str | None = omit_none("of the values of a regression, where it is known")
    n: int | None = 0  # rows; None: withheld
    n_subjects: int | None = 0
    metrics: dict[str, MetricValue] = {}
    by_class: dict[str, ClassScores] = {}
    confusion: list[list[int]] | None = None
    baselines: dict[str, Baseline] = {}
    intervals: IntervalMethod | None = omit_none("None: by the bootstrap of version 0.1")
    remarks: list[str] = []


class Scores(TaskScores, StoredRecord):
    """scores.json: an evaluated run. A pre-trained one has no task; its metrics are loss, rel and the parts of the objective."""

    VERSION: ClassVar[int] = 2
    GUARDED: ClassVar[int | None] = 2
    REPAIR: ClassVar[str] = "Repeat: bitimely evaluate"
    SHARED: ClassVar[str] = "scores_shared.json"  # beside scores.json of claims: without what few people have in common

    @classmethod
    def load_shared(cls, folder: Path) -> Self:
        """The scores of a run as pages print them. Raises UserError: as `load`."""
        shared = folder / cls.SHARED
        return cls.load(shared if has_result(shared) else folder / "scores.json")

    format_version: int = 2

    run: str = ""
    data: str = ""
    split: str = "test"
    settings: EvaluationSettings = EvaluationSettings()
    leak_free: bool | str | None = None
    subjects_shared_with_training: int = 0
    notices: list[str] = []
    comparison: Comparison | None = omit_none("with --compare")
    nights: NightScores | None = omit_none("of sleep stages")
    events: EventScores | None = omit_none("of two classes over time")
    encoder: EncoderRecord | None = omit_none("of --vectors: `run` is the name of the encoder")
    compared: dict[str, Baseline] | None = omit_none(
        "of --vectors: trained models on the same windows; differences are the encoder less them"
    )
    compared_rows: dict[str, ComparedRow] | None = omit_none("the main metric of them, as one family; of histories withheld")

    @model_serializer(mode="wrap")
    def omit_task(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the fields of a task where there is none."""
        values = handler(self)
        hidden = ("task", "main", "confusion", "resampling", "remarks") if self.task is None else ()
        return {key: value for key, value in values.items() if key not in hidden}


# --- reports ------------------------------------------------------------------------------------------------------------------------------


class ReportInfo(Part):
    """The page of a report."""

    title: str
    verdict: str
    notices: list[str] = []
    facts: dict[str, str] = {}
    files: dict[str, StoredFile] = {}  # beside the page


class Summary(StoredRecord):
    """summary.json: the page, and the numbers of its figures under keys that depend on the kind of report (`model_extra`)."""

    VERSION: ClassVar[int] = 2
    GUARDED: ClassVar[int | None] = 2

    format_version: int = 2

    report: ReportInfo


class StageRecord(StoredRecord):
    """`stage.json`: how one stage of an experiment ended, with the hashes of its inputs and its output."""

    VERSION: ClassVar[int] = 2
    GUARDED: ClassVar[int | None] = 2

    format_version: int = 2

    stage: str
    settings: dict[str, Any]
    time: float  # seconds since the epoch
    frames: list[str]  # of a defect: file, line and function, without values
    state: str
    detail: str
    exit_code: int
    seconds: float
    read: dict[str, str | None]
    made: str | None
