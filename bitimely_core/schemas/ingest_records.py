"""Records of an ingest: its report, and the manifest and entries of a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field

from bitimely_core import privacy
from bitimely_core.errors import Exit, Finding, Level
from bitimely_core.privacy import Sharing
from bitimely_core.store.records import (
    Manifest,
    Part,
    StoredFile,
    StoredRecord,
    omit_none,
    write_results,
)


class FindingRecord(Part):
    """A finding as it is stored (`Finding.as_dict`)."""

    code: str
    level: Level
    message: Annotated[str, Sharing.MESSAGE]
    file: str | None
    field: str | None
    row: int | None
    found: str | None
    expected: str | None
    count: Annotated[int, Sharing.ROWS]
    examples: list[str]

    @classmethod
    def from_finding(cls, finding: Finding) -> Self:
        """`finding` as it is stored."""
        return cls(**finding.as_dict())

    def round_counts(self) -> Self:
        """This finding without exact counts of rows and subjects."""
        examples = [] if privacy.is_small(self.count) else self.examples
        return privacy.share_record(self).model_copy(update={"examples": examples})


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
    seen: Annotated[int, Sharing.ROWS]
    used: Annotated[int, Sharing.ROWS]
    dropped: Annotated[int, Sharing.ROWS]
    quarantined: Annotated[int, Sharing.ROWS]
    dropped_by_reason: Annotated[dict[str, int], Sharing.ROWS]
    quarantined_by_reason: Annotated[dict[str, int], Sharing.ROWS]
    warned_by_reason: Annotated[dict[str, int], Sharing.ROWS]


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


class FileGroup(Part):
    """Files of one ending that were not read."""

    kind: str  # ending in small letters, "" without one
    count: int
    reason: str  # "" where none is known
    examples: list[str]


class DroppedRows(Part):
    """Rows of a table that a rule excludes."""

    file: str
    reason: str
    count: int


class SourceUse(Part):
    """What of a source was used."""

    files_read: int
    files_left: list[FileGroup]
    recordings: int
    channels: dict[str, int]  # name -> recordings that have it
    annotated: int  # recordings with an annotation
    annotations: int
    seconds: float  # of all recordings
    labelled_seconds: float  # of them, those that annotations cover
    labels_known: bool  # whether any recording has a class or a number of its own
    unknown_texts: int  # annotations whose texts are no labels
    unknown_subjects: int  # recordings that count as subjects of their own
    rows_dropped: list[DroppedRows]


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
    use: SourceUse | None = None  # of recordings
    tokens: dict[str, Any] | None = None  # of claims: the sequences that were built at once

    def save(self, path: Path) -> None:
        """As `StoredRecord.save`, in a cache whose lock the caller has."""
        write_results(path.parent, {path.name: self.encode()}, beside=True, held=True)


class IngestPart(IngestAccount):
    """Result of part k of n of an ingest; nothing is published."""

    schema_name: str = Field("bitimely.ingest_part/1", alias="schema")
    status: Literal["part"] = "part"
    shard: str  # k/n
    exit_code: int = int(Exit.OK)
    published: Literal[False] = False
    parts_missing: int

    @classmethod
    def from_report(cls, report: IngestReport, shard: tuple[int, int], parts_missing: int) -> Self:
        """The result of part k of n = `shard`, from the report so far."""
        shared = {name: getattr(report, name) for name in IngestAccount.model_fields}
        return cls(**shared, shard=f"{shard[0]}/{shard[1]}", parts_missing=parts_missing)


class CachedRecording(NamedTuple):
    """A recording of a cached unit."""

    recording_id: str
    subject_id: str
    attributes: dict[str, Any]
    signals: int  # number of them
    annotations: int
    seconds: float = 0.0
    labelled: float = 0.0  # seconds that annotations cover


class CacheShard(NamedTuple):
    """The files of one group of units; None where there is nothing to hold."""

    recordings: str | None = None
    annotations: str | None = None


class CachedUnit(Part):
    """A unit in `units-*.json.gz`, and in the notes of an unfinished ingest."""

    key: str | None  # hash of what decides the content; None: read again every time
    sources: dict[str, str]  # file -> SHA-256
    report: UnitReport | None
    rows: list[TableReport] = []
    recordings: list[CachedRecording] = []
    channels: dict[str, int] = {}  # name -> recordings that have it
    samples: list[str] = []  # hash of each recording's samples, empty for constant ones
    shard: CacheShard = CacheShard()


class CachedPart(Part):
    """Finished groups of units: a note of an unfinished ingest, or all that a cache holds."""

    units: dict[str, CachedUnit]
    files: dict[str, StoredFile] = {}


class CacheSettings(Part):
    """What a cache must have been made with to be continued."""

    dataset: str
    version: str
    options: dict[str, Any]

    def flatten(self) -> dict[str, Any]:
        """The settings by name, the options among them."""
        return {"dataset": self.dataset, "version": self.version, **self.options}


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
    shards: list[CacheShard]
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


class CodeMap(StoredRecord):
    """The PheCode map as an ingest has read it."""

    phecodes: dict[str, dict[str, tuple[str, ...]]]  # vocabulary -> code -> PheCodes
    sexes: dict[str, int] = {}  # PheCode of one sex alone -> 1 male, 2 female


class EventsManifest(CacheManifest):
    """The manifest of a cache of events (claims)."""

    kind: Literal["events"] = "events"
    shards: list[str]
    labels: str  # file: one row a subject and label
    codemap: str  # file: `CodeMap`
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
