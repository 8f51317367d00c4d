"""The mapping file of a user's own recordings (`--map`), and the names by which it finds them."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from pydantic import Field

from bitimely_core.config import Section, read_toml, validate
from bitimely_core.errors import UserError, safe_text, usage_error
from bitimely_core.formats.source import locate_errors
from bitimely_core.formats.stage_texts import STAGES
from bitimely_core.formats.wfdb_annotations import AnnotationKind
from bitimely_core.types import Annotation, AttributeValue, leave_out

LabelForm = Literal["text", "xml", "edf", "wfdb", "bids", "device"]
Format = Literal["edf", "wfdb", "table", "npy", "mat", "mne"]
Clock = Literal["", "s", "ms", "us", "ns", "min", "h", "days", "ticks", "samples", "datetime"]

SUFFIXES: dict[str, Format] = {
    ".edf": "edf",
    ".bdf": "edf",
    ".rec": "edf",
    ".hea": "wfdb",
    ".csv": "table",
    ".csv.gz": "table",
    ".tsv": "table",
    ".tsv.gz": "table",
    ".txt": "table",
    ".txt.gz": "table",
    ".parquet": "table",
    ".pq": "table",
    **dict.fromkeys((".npy", ".npz"), "npy"),
    ".mat": "mat",
    **dict.fromkeys((".vhdr", ".set", ".gdf", ".fif", ".fif.gz", ".cnt"), "mne"),
}

COMPRESSED = tuple(ending for ending in SUFFIXES if ending.endswith(".gz"))

LONGEST_EPOCH = 600.0  # seconds
EMPTY_CELLS = {"", "n/a", "na", "nan"}
# names of columns that say whose a row is
PEOPLE = {
    "id", "subject", "subject_id", "subjectid", "patient", "patient_id", "patientid",
    "participant", "participant_id", "participantid", "person", "person_id", "pid", "user",
    "user_id", "nsrrid", "mesaid", "pptid", "subj", "subj_id", "subjid", "case_id", "caseid",
}  # fmt: skip
# names of columns of a table with a row a recording
CLASSES = {
    "label", "labels", "class", "diagnosis", "target", "group", "condition", "y", "category",
    "outcome", "rhythm",
}  # fmt: skip
PARTS = {"split", "fold", "folds", "strat_fold"}


def fold_column(name: str) -> str:
    """The name of a column as it is compared: `Subject ID` is `subject_id`."""
    return re.sub(r"[\s.-]+", "_", name.strip().lower())


def fold_subject(text: str) -> str:
    """A subject as it is compared: spreadsheets make 7 or 7.0 of 007."""
    number = re.sub(r"^(\d+)\.0+$", r"\1", text.strip())
    return re.sub(r"(?<!\d)0+(?=\d)", "", number).casefold()


class ChannelRule(Section):
    """A channel: its name in the cache and its unit."""

    name: str
    unit: str = ""


class FileRule(Section):
    """[[files]]: a group of files, and the properties that they do not state."""

    # of the path in the source; * also matches folders; capitals of the ending do not count
    pattern: str = "*"
    format: Format | None = None  # else by the ending
    # regular expression on the path, with groups named subject, label, value or recording
    match: str = ""
    subject: str = ""  # of all these files
    label: str = ""
    rate: float | None = Field(
        None, gt=0
    )  # Hz, of tables, npy and mat; others are compared with it
    unit: str = ""
    # () all but those of codes; names as in the file, or name in the file -> name or {name, unit},
    # or name in the cache -> names in the files, of which the first there is read, or "C4 - M1"
    channels: tuple[str, ...] | dict[str, str | tuple[str, ...] | ChannelRule] = ()
    variable: str = ""  # of MATLAB files: name of the array; else the only one
    time: str = ""  # column with the times of the rows, of tables; "": found
    clock: Clock = ""  # unit of these times; "": found by header, step and plausibility
    # pattern of columns: each row is a recording of one channel, these are its samples in order
    series: str = ""
    id_column: str = ""  # of such rows; else they are numbered
    subject_column: str = ""  # also of tables with a row a sample: whose it is
    label_column: str = ""
    value_column: str = ""
    delimiter: str = ""  # between cells; "": found
    missing: tuple[str, ...] | None = None  # cells without a value, such as "-999"; absent: found
    annotators: tuple[str, ...] = (
        "atr",
        "apn",
        "st",
    )  # endings of the annotation files beside WFDB records
    events: AnnotationKind = "both"  # what of them is read
    # path of the label files of a recording: {stem} is its name without ending, {folder} its
    # folder, {subject} its subject; * stands for anything
    labels: str = ""


class TableRule(Section):
    """[table]: a table with one row a recording (`file`) or a subject (`subject` alone)."""

    path: str
    file: str = ""  # column: path without ending, or file name, of the recording
    subject: str = ""  # column
    label: str = ""  # column with a class
    labels: tuple[str, ...] = ()  # columns with 0 or 1, one a class; a recording may have several
    value: str = ""  # column with a number
    # column with train, validation or test, or with folds: 1 to 10, or 1-8 for those of training
    split: str = ""
    attributes: tuple[str, ...] = ()  # further columns to keep
    delimiter: str = ""  # between cells; "": found


class AnnotationRule(Section):
    """[annotations]: a table with one row an annotation, a text or a number."""

    path: str
    file: str  # column: path without ending, or file name, of the recording
    onset: str = "onset"  # column: seconds
    # column: seconds; "": a row lasts until the next one of its recording, the last to the end
    duration: str = "duration"
    label: str = "label"
    value: str = ""  # column with a number, read instead of the label
    delimiter: str = ""  # between cells; "": found


class RecordingMap(Section):
    """The mapping file."""

    files: tuple[FileRule, ...] = (FileRule(),)
    table: TableRule | None = None
    annotations: AnnotationRule | None = None
    # channel of the files, or a pattern with * -> its unit, whatever the files state
    units: dict[str, str] = Field(default_factory=dict)
    # text of an annotation -> class; others are excluded, unless all classes are sleep stages.
    # Four keys are none of texts: `reaches`, `scorer`, `epoch`, `shift` (see `LabelRules`)
    labels: dict[str, str | float] | None = None


class ChannelChoice(NamedTuple):
    """A channel of the cache, and where it is in a file."""

    name: str
    # names in the file, or derivations "PLUS - MINUS"; the first that is there is read
    sources: tuple[str, ...]
    unit: str = ""


class ChannelFacts(NamedTuple):
    """What the channels table of BIDS beside a recording says of a channel."""

    kind: str  # in capitals, such as EEG; "": not stated
    unit: str = ""
    bad: bool = False


NO_FACTS = ChannelFacts("")


class LabelRules(NamedTuple):
    """[labels]: what texts mean, and how labels are read."""

    words: dict[str, str] | None = None  # text -> class; None: those that are known
    # what a mark without a duration stands for: until the next one, or from the previous one; or
    # how many seconds each label lasts at least; "": a point
    reaches: str | float = ""
    scorer: str = ""  # whose labels are used where there are several; or "consensus"
    epoch: float | None = None  # seconds of a stage in files with one a line
    shift: float = 0.0  # seconds that are added to the times of files of labels

    @property
    def extends(self) -> bool:
        """Whether the map adds words for stages to those that are known."""
        return bool(self.words) and set((self.words or {}).values()) <= {*STAGES, ""}


NO_RULES = LabelRules()


@dataclass(frozen=True)
class LabelFile:
    """A file with labels of a recording."""

    path: Path
    rel: str
    form: LabelForm
    four: str = ""  # the stage of the digit 4, "" where it is not known
    levels: dict[str, str] = field(default_factory=dict)  # text -> word, of BIDS


@dataclass(frozen=True, kw_only=True)
class RecordingInfo:
    """What is known of one recording before its file is read.

    It is part of the key of a stored unit: `later` fields count only where they differ from their
    default.
    """

    recording_id: str
    subject_id: str
    attributes: dict[str, AttributeValue] = field(default_factory=dict)
    notes: tuple[Annotation, ...] = ()  # from tables
    numbers: tuple[Annotation, ...] = ()  # from a table of numbers: their texts are no labels
    channels: dict[str, tuple[str, str]] = field(default_factory=dict)  # in the file -> name, unit
    label_rules: LabelRules = NO_RULES
    rate: float | None = None
    unit: str = ""
    variable: str = ""
    time: str = ""
    clock: str = ""
    series: str = ""
    # id, subject, label, value -> column of a table of series
    columns: dict[str, str] = field(default_factory=dict)
    delimiter: str = ""
    missing: tuple[str, ...] | None = None
    keep_dates: bool = False
    keep_phi: bool = False
    events: AnnotationKind = "both"
    stages: bool = False  # texts of sleep stages in the file are read without a map
    annotation_files: tuple[str, ...] = ()  # of WFDB, beside the recording
    label_files: tuple[LabelFile, ...] = ()
    origin: float = 0.0  # seconds of the file's own clock at the beginning of the recording
    points: bool = False  # annotations without a duration are read, and no text
    unfilled: bool = False  # no WFDB header of its folder states a checksum other than 0
    # instead of `channels`, where the map has alternatives or derivations
    choices: tuple[ChannelChoice, ...] = ()
    units: dict[str, str] = field(default_factory=dict)  # `units` of the map
    facts: dict[str, ChannelFacts] = field(default_factory=dict)  # by the channels table of BIDS
    stated_rate: float | None = None  # Hz, by the description beside a recording
    headers: tuple[tuple[str, str], ...] = ()  # names and units of columns, by that beside a table
    has_subject: bool = False  # the subject is stated, and may be called as the recording
    zone: float | None = None  # seconds from UTC to the recording's clock, where it is stated
    is_part: bool = False  # of a recording in several files: all channels are read


def read_map(path: Path) -> RecordingMap:
    """The mapping file, checked. Raises UserError (config, exit 2) by its key."""
    chosen = validate(RecordingMap, read_toml(path), str(path))
    check_map(chosen, path)
    return chosen


def check_map(chosen: RecordingMap, path: Path) -> None:
    """Raises UserError (config, exit 2) by its key for a faulty text of a mapping file."""
    with locate_errors(path):
        for i, rule in enumerate(chosen.files):
            check_match(rule.match, f"files.{i}.match")
        read_label_rules(chosen)


def check_match(pattern: str, field: str) -> None:
    """Raises UserError (config, exit 2) for a pattern that is no regular expression."""
    try:
        search_groups(pattern, "")
    except ValueError as error:
        problem = f"found {safe_text(pattern)}"
        wanted = "expected a regular expression without looking around or back"
        raise usage_error(problem, f"{wanted} ({error})", field=field) from None


def read_label_rules(chosen: RecordingMap) -> LabelRules:
    """[labels] of a map. Raises UserError (config, exit 2) by its key."""
    words = dict(chosen.labels or {})
    reaches, scorer, epoch = (words.pop(key, "") for key in ("reaches", "scorer", "epoch"))
    shift = words.pop("shift", 0.0)
    _check_reaches(reaches)
    is_stated = bool(words) or chosen.labels == {}
    return LabelRules(
        words=dict(itertools.starmap(_read_word, words.items())) if is_stated else None,
        reaches=reaches,
        scorer=str(scorer),
        epoch=_read_epoch(epoch),
        shift=_read_shift(shift),
    )


def _read_word(text: str, name: str | float) -> tuple[str, str]:
    """A text of annotations and its class."""
    if not isinstance(name, str):
        raise _label_error(text, name, 'expected the name of a class in quotes, such as "N2"')
    return text, name


def _read_epoch(epoch: str | float) -> float | None:
    """Seconds of an epoch; None where the map states none."""
    if epoch == "":
        return None
    if isinstance(epoch, str) or not 0 < epoch <= LONGEST_EPOCH:
        raise _label_error("epoch", epoch, f"expected up to {LONGEST_EPOCH:g} seconds")
    return epoch


def _read_shift(shift: str | float) -> float:
    if isinstance(shift, str):
        raise _label_error("shift", shift, "expected seconds, such as 3600")
    return shift


def _check_reaches(reaches: str | float) -> None:
    if isinstance(reaches, str) and reaches not in {"", "next", "previous"}:
        raise _label_error("reaches", reaches, 'expected "next", "previous" or seconds')
    if isinstance(reaches, float) and reaches <= 0:
        raise _label_error("reaches", reaches, "expected more than 0 seconds")


def _label_error(key: str, value: str | float, wanted: str) -> UserError:
    return usage_error(f"found {safe_text(value)}", wanted, field=f"labels.{key}")


def find_suffix(rel: str) -> str:
    """The ending of a file's name, in lower case."""
    name = rel.lower()
    double = next(filter(name.endswith, COMPRESSED), "")
    if double:
        return double
    name = name.rpartition("/")[2]  # a fifth of the time that a path takes
    dot = name.rfind(".")
    return name[dot:] if 0 < dot < len(name) - 1 else ""


def strip_suffix(rel: str) -> str:
    """The path without its ending."""
    return rel[: len(rel) - len(find_suffix(rel))]


def search_groups(pattern: str, text: str) -> dict[str, str]:
    """The named groups of the first place where a regular expression fits, in time linear in the
    text whatever the pattern. Raises ValueError on one that it does not know.
    """
    import polars as pl

    if not pattern:
        return {}
    names = re.findall(r"\(\?P?<([A-Za-z_]\w*)>", pattern)
    try:
        groups = pl.select(pl.lit(text).str.extract_groups(pattern)).to_series().struct.unnest()
    except pl.exceptions.PolarsError as error:
        raise ValueError(str(error).splitlines()[-1].removeprefix("error: ")) from None
    texts = groups.row(0, named=True)
    return {name: texts[name] for name in names if texts.get(name) is not None}


def matches_pattern(rel: str, pattern: str) -> bool:
    """Whether a file is of a group.

    Capitals count in its path and not in its ending, which some systems write in capitals.
    """
    if fnmatch.fnmatchcase(rel, pattern):
        return True
    folded, wanted = (strip_suffix(text) + find_suffix(text) for text in (rel, pattern))
    return fnmatch.fnmatchcase(folded, wanted)


def list_recording_keys(rel: str) -> tuple[str, ...]:
    """Names of a recording that a table may use, those with its folder first."""
    stem = strip_suffix(rel)
    return stem, rel, PurePosixPath(stem).name, PurePosixPath(rel).name


class RecordingKeys(NamedTuple):
    """Which names tables may use for which files."""

    keys: dict[str, tuple[str, ...]]  # file -> its names
    # name without a folder that several recordings have, and none alone -> their files
    shared: dict[str, list[str]]


def assign_recording_keys(rels: Iterable[str]) -> RecordingKeys:
    """The names of every recording among `rels`.

    A name without its folder counts only where no recording of another path has it, too.
    """
    names = {rel: list_recording_keys(rel) for rel in rels}
    bearers: dict[str, list[str]] = {}
    for rel, (*_, stem, name) in names.items():
        for key in {stem, name}:
            bearers.setdefault(key, []).append(rel)
    shared = {
        key: files for key, files in bearers.items() if len(set(map(strip_suffix, files))) > 1
    }
    keys: dict[str, tuple[str, ...]] = {}
    for rel, (path, full, *short) in names.items():
        unshared = [key for key in short if key not in shared]
        keys[rel] = tuple(dict.fromkeys([path, full, *unshared]))
    # at the root of the source a name without a folder is a path
    exact = set(itertools.chain.from_iterable(keys.values()))
    return RecordingKeys(keys, leave_out(shared, exact))
