"""Records of runs: data, losses, checkpoints, tuning and environment."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, JsonValue, SerializeAsAny

from bitimely_core import privacy
from bitimely_core.config import Settings, parse_stored_settings
from bitimely_core.privacy import Sharing
from bitimely_core.registry import methods
from bitimely_core.schemas.tokens import LandmarkOptions, Number, SamplePreparation
from bitimely_core.store.records import Part, ResultRecord, StoredFile, StoredRecord, omit_none


def flatten_keys(value: JsonValue, prefix: str = "") -> dict[str, JsonValue]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; lists are values."""
    if not isinstance(value, dict):
        return {prefix: value}
    return {
        key: leaf
        for name, inner in value.items()
        for key, leaf in flatten_keys(inner, f"{prefix}.{name}" if prefix else name).items()
    }


SHOWN = 5e-4  # half of the last digit that pages show of a number below 1; of larger ones relative


class ReadingOptions(Part):
    """How the windows of a run were made, as far as a score depends on it."""

    normalise: str | None = None
    bandpass: tuple[Number | None, ...] | None = None  # Hz
    notch: tuple[Number, ...] | None = None  # Hz
    leakage: str | None = None  # of claims
    landmark: LandmarkOptions | None = None  # of claims
    numbers: bool = False  # events come with their numbers


class SplitCount(Part):
    """Size of one split."""

    windows: Annotated[int | None, Sharing.PEOPLE] = 0  # None: withheld
    subjects: Annotated[int | None, Sharing.PEOPLE] = 0


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
    windows: Annotated[int | None, Sharing.OWNER] = 0  # in all: with the audit it shows each split
    audit: dict[str, SplitCount] = {}
    class_names: tuple[str, ...] = ()
    vocabulary: str | None = omit_none("SHA-256 of the names of the codes, for events.")
    small_counts: bool = False  # of events: pages show counts below 11


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
    """The weights of a run, which every score is of; `loss` and `rel` are their validation
    losses.
    """

    choice: Literal["last", "best"]
    step: int
    steps: int  # of the training
    metric: str | None = omit_none("Of the best: the validation metric that decided.")
    score: float | None = omit_none("Its value.")

    def describe(self) -> str:
        """In one line, for pages."""
        if self.choice == "last":
            return f"last, step {self.step:,}"
        name, value = "loss", self.loss
        if self.metric is not None:
            name, value = self.metric.replace("_", " "), self.score
        return f"best validation {name} ({value:.4g}), step {self.step:,} of {self.steps:,}"


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


class TrialRecord(ResultRecord, TuningTrial):
    """`tuning/lr-<rate>/trial.json` of a run."""


class RunEnvironment(Part):
    """Where a training computed: what may change the last digits of its numbers, beside the
    versions.
    """

    device: str  # cpu, cuda or mps
    hardware: str  # name of the GPU, or architecture and vector instructions of the processor
    threads: int  # of torch on the CPU
    processes: int
    deterministic: bool  # kernels that add in a fixed order
    matmul: str  # precision of float32 matrix products: highest, high or medium
    kernels: str | None = omit_none("Of retention on CUDA: triton, or torch where it is missing.")

    def describe(self) -> str:
        """In one line, for pages."""
        several = f", {self.processes} processes" if self.processes > 1 else ""
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        kernels = "deterministic" if self.deterministic else "non-deterministic"
        return f"{self.device} ({self.hardware}), {threads}{several}, {kernels} kernels"

    def list_changes(self, before: RunEnvironment) -> list[str]:
        """What differs from the environment `before`, a line each."""
        both = (
            (name, getattr(self, name), getattr(before, name))
            for name in RunEnvironment.model_fields
        )
        return [f"{name} {now}, it was {then}" for name, now, then in both if now != then]


class PooledRuns(Part):
    """The runs that a run of several test folds or seeds pools, which has no weights of its own."""

    by: Literal["fold", "seed"]
    runs: tuple[str, ...]  # names; of seeds each may pool folds itself

    def describe(self) -> str:
        """In words, such as "5 folds"."""
        return f"{len(self.runs)} {self.by}s"


class RunRecord(ResultRecord):
    """`run.json`: what was trained, on which data, with which settings and result."""

    REPAIR: ClassVar[str] = "Restore a copy, or repeat the training under --force-new"

    run: str
    kind: Literal["pretrain", "finetune", "train"]
    model: str
    settings: Annotated[SerializeAsAny[Settings], BeforeValidator(parse_stored_settings)]
    data: tuple[RunData, ...]
    preset: str = ""
    source: RunSource | None = None
    init: str | None = None  # SHA-256 of the weights of --init
    init_from: dict[str, str] | None = omit_none(
        "The run, or repository and revision, that --init named."
    )
    parameters: int = 0
    paper_parameters: int | float | None = None
    leak_free: bool | str | None = None
    preparation: tuple[SamplePreparation, ...] = ()  # of each data set
    seed: int = 0
    versions: dict[str, str] = {}
    verified: bool = True  # whether checksums of the data were compared
    notices: Annotated[tuple[str, ...], Sharing.MESSAGE] = ()
    finished: bool = False
    final: FinalLosses | None = omit_none("Of finished runs.")
    device: str | None = omit_none("Of finished runs.")
    environment: RunEnvironment | None = omit_none(
        "Where it was trained; of a run that was stopped, where it ended."
    )
    earlier_environments: tuple[RunEnvironment, ...] | None = omit_none(
        "Of a run that was stopped and continued elsewhere."
    )
    weights: str | None = omit_none("SHA-256 of model.safetensors, of finished runs.")
    checkpoint: ScoredCheckpoint | None = omit_none("Of finished runs: which weights these are.")
    tuning: TuningRecord | None = omit_none("The learning-rate search.")
    pretraining_data: tuple[RunData, ...] | None = omit_none("Of a fine-tuning.")
    pretraining_steps: int | None = omit_none("Of a fine-tuning.")
    renewed: tuple[str, ...] | None = omit_none(
        "Tensors of a fine-tuning that were randomly initialised."
    )
    train_windows: Annotated[int | None, Sharing.PEOPLE] = omit_none("Of a fine-tuning.")
    train_label_counts: Annotated[dict[str, int] | None, Sharing.OWNER] = omit_none(
        "Training windows of each class, of a fine-tuning."
    )

    members: PooledRuns | None = omit_none("Of a run over test folds or seeds.")

    @property
    def hides_counts(self) -> bool:
        """Whether counts of 1 to 10 people are withheld: histories without `small_counts`."""
        return any(data.vocabulary and not data.small_counts for data in self.data)

    def share(self) -> Self:
        """The record as it may be shared (`privacy.share_record`)."""
        return privacy.share_record(self) if self.hides_counts else self

    @property
    def is_finetuned(self) -> bool:
        """Whether the run has a supervised head."""
        return self.kind != "pretrain"

    @property
    def is_method(self) -> bool:
        """Whether it is a fitted method without a network."""
        return self.model in methods

    @property
    def channels(self) -> tuple[int, ...]:
        """The channels that the adapters of the run read, in their order."""
        return (self.settings.model.channels, *self.settings.model.others)


class Reproduction(StoredRecord):
    """`reproduction.json`: a run beside the same training once more; pairs are the run's number and
    that of the other.
    """

    again: str  # name of the other run
    differences: tuple[str, ...]  # of data, versions and environment
    loss: tuple[float | None, float | None]  # of the last step
    same_weights: bool
    metrics: dict[str, tuple[float | None, float | None]] = {}  # of an evaluated run

    def list_changes(self) -> list[str]:
        """The scores that differ by more than rounding of the digits that pages show, in words;
        without scores the loss.
        """
        pairs = self.metrics or {"last loss": self.loss}
        both = [(name, a, b) for name, (a, b) in pairs.items() if a is not None and b is not None]
        far = [
            (name, f"{a:.3f}", f"{b:.3f}")
            for name, a, b in both
            if abs(a - b) > SHOWN * max(1.0, abs(a))
        ]
        return [f"{name.replace('_', ' ')} {b}, it was {a}" for name, a, b in far if a != b]


class TrainSubjects(StoredRecord):
    """`train_subjects.json`: hashes of the subjects of the training splits, fine-tuning and
    pre-training together.
    """

    marks: tuple[str, ...] = ()


class CheckpointMeta(StoredRecord):
    """`checkpoints/step-N/meta.json`."""

    REPAIR: ClassVar[str] = "Start again with --force-new"

    step: int  # optimizer steps done
    total: int = 0
    epoch: int = 0
    finished: bool = False
    validated: int = 0  # step of the last validation
    # best validation: its loss, rel, step and epoch, and the metric that decided as `score`
    best: dict[str, int | float | None] | None = None
    last: dict[str, float | None] = {}  # loss and rel of the last step
    seconds: float = 0.0  # of a budget in minutes: spent so far
    seed: int = 0
    processes: int = 1
    identity: dict[str, JsonValue] = {}  # what a continued run must agree with
    bitimely: str = ""
    torch: str = ""
    files: dict[str, StoredFile] = {}
    log: StoredFile | None = omit_none("metrics.jsonl as it was at this step.")
    sha256: str = ""  # of the other keys
