"""Exit codes, reason codes, findings, and the one exception that users see with its constructors.

Library code raises `UserError`; only the command line prints it and turns it into an exit code.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import signal
import threading
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from enum import IntEnum, StrEnum
from pathlib import PurePath
from types import FrameType
from typing import Any, Literal, TypedDict, Unpack

from bitimely_core.wording import list_first

# those that end a process whose terminal, scheduler or limit of CPU time wants it to stop
STOP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)


class Exit(IntEnum):
    """Stable exit codes of every command."""

    OK = 0
    INTERNAL_ERROR = 1
    USAGE = 2
    PARTIAL = 3
    REFUSED = 4
    INTEGRITY = 5
    RESOURCES = 6
    LOCKED = 7
    INTERRUPTED = 130
    TERMINATED = 143


def list_stop_signals() -> list[int]:
    """The signals that end a verb, without those that its starter ignores, as `nohup` does."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def replace_handlers(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """While the block runs `handle` gets the signals that end a verb.

    Outside of the main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in list_stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def find_stop_code(number: int) -> Exit:
    """The exit code after signal `number`: all but SIGINT end a verb as SIGTERM does."""
    return Exit.INTERRUPTED if number == signal.SIGINT else Exit.TERMINATED


class Reason(StrEnum):
    """Why a unit, a row, a data set or a command was refused, warned about or noted."""

    # container
    EMPTY_FILE = "empty_file"
    NOT_EDF = "not_edf"
    TRUNCATED = "truncated"
    SIZE_MISMATCH = "size_mismatch"
    CORRUPT = "corrupt"
    ENCODING = "encoding"
    UNSUPPORTED_FORMAT = "unsupported_format"
    FORMAT = "format"
    IO_ERROR = "io_error"
    NOT_REGULAR_FILE = "not_regular_file"
    SYMLINK_OUTSIDE_ROOT = "symlink_outside_root"
    FILE_NAME = "file_name"
    MISSING_PAIR = "missing_pair"
    MISSING_SIGNAL_FILE = "missing_signal_file"
    MISSING_SEGMENT = "missing_segment"
    NO_INPUT = "no_input"
    # header
    HEADER_SYNTAX = "header_syntax"
    HEADER_FIELD = "header_field"
    HEADER_BYTES = "header_bytes"
    HEADER_IMPLAUSIBLE = "header_implausible"
    N_RECORDS_UNKNOWN = "n_records_unknown"
    RECORD_DURATION = "record_duration"
    PHYSICAL_RANGE = "physical_range"
    DIGITAL_RANGE = "digital_range"
    GAIN = "gain"
    UNIT = "unit"
    SAMPLING_RATE = "sampling_rate"
    LENGTH = "length"
    RECORD_NAME = "record_name"
    START_DATE = "start_date"
    BASE_DATE = "base_date"
    START_MISMATCH = "start_mismatch"
    DISCONTINUOUS = "discontinuous"
    NON_ASCII = "non_ascii"
    LABEL_CHARS = "label_chars"
    DUPLICATE_CHANNEL = "duplicate_channel"
    MISSING_CHANNEL = "missing_channel"
    # signal
    CHECKSUM = "checksum"
    INITIAL_VALUE = "initial_value"
    MISSING_SAMPLES = "missing_samples"
    MISSING_VALUES = "missing_values"
    NON_FINITE = "non_finite"
    FLAT_CHANNEL = "flat_channel"
    CLIPPED = "clipped"
    # annotation, label
    ANNOTATION_SYNTAX = "annotation_syntax"
    ANNOTATION_OVERLAP = "annotation_overlap"
    ANNOTATION_OUT_OF_RANGE = "annotation_out_of_range"
    UNLABELLED_EPOCHS = "unlabelled_epochs"
    UNKNOWN_LABEL = "unknown_label"
    LABEL = "label"
    CLASS_MISSING = "class_missing"
    LABEL_LEAKAGE = "label_leakage"
    UNMATCHED_LABELS = "unmatched_labels"
    # table
    CSV_SYNTAX = "csv_syntax"
    HEADER = "header"
    SCHEMA = "schema"
    SCHEMA_MISMATCH = "schema_mismatch"
    ROW_WIDTH = "row_width"
    NOT_NUMERIC = "not_numeric"
    DIMENSIONS = "dimensions"
    TIMESTAMPS = "timestamps"
    DUPLICATE_KEY = "duplicate_key"
    DUPLICATES = "duplicates"
    IDENTIFIER = "identifier"
    METADATA = "metadata"
    METADATA_SYNTAX = "metadata_syntax"
    # claims
    DATE = "date"
    DATE_OUTSIDE_LIFE = "date_outside_life"
    AMBIGUOUS_CODE = "ambiguous_code"
    WRONG_VOCABULARY = "wrong_vocabulary"
    EMPTY_CODE = "empty_code"
    UNMAPPED_CODE = "unmapped_code"
    BAD_CODE = "bad_code"
    CODE_FORM = "code_form"
    NOT_DIAGNOSED = "not_diagnosed"
    REVERSED = "reversed"
    MIN_CODES = "min_codes"
    MAP_DAMAGED = "map_damaged"
    # splits
    SUBJECT_LEAKAGE = "subject_leakage"
    DUPLICATE_ACROSS_SPLITS = "duplicate_across_splits"
    SPLIT_EMPTY = "split_empty"
    LEFT_OUT = "left_out"  # windows, by a documented rule: trimming, gaps
    # security
    PATH_ESCAPE = "path_escape"
    UNSAFE_PICKLE = "unsafe_pickle"
    EXPANSION_LIMIT = "expansion_limit"
    CONFIG = "config"
    PHI = "phi"
    # run
    SOURCE_CHECKSUM = "source_checksum"
    READER_CRASH = "reader_crash"
    RESOURCE_LIMIT = "resource_limit"
    DISK_FULL = "disk_full"
    LOCKED = "locked"
    INTERRUPTED = "interrupted"
    INTERNAL = "internal"
    # commands (beyond the data): names, stored artefacts, training
    UNKNOWN_NAME = "unknown_name"
    NOT_FOUND = "not_found"
    INCOMPLETE = "incomplete"
    INTEGRITY = "integrity"
    SETTINGS_DIFFER = "settings_differ"
    SHAPES_DIFFER = "shapes_differ"
    NON_FINITE_LOSS = "non_finite_loss"
    MISSING_EXTRA = "missing_extra"


HINTS = {  # what to do about an error of a reason, where it says nothing else
    **dict.fromkeys(
        (
            Reason.EMPTY_FILE,
            Reason.TRUNCATED,
            Reason.CORRUPT,
            Reason.CHECKSUM,
            Reason.INITIAL_VALUE,
            Reason.MISSING_SIGNAL_FILE,
        ),
        "Download it again",
    ),
    Reason.INTEGRITY: "Make it again, or restore a copy",
}
Level = Literal["info", "warning", "error"]
# also in full width, which spreadsheets of East Asian locales take
FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r]")
SCHEME = r"([A-Za-z][A-Za-z0-9+.-]+)(:/{1,2})"  # a path made from a URL has one slash
# in a text; a secret may hold spaces
URL = re.compile(SCHEME + r"((?:[^\s/'\"<>]*:[^\s/'\"<>]*(?: [^\s/'\"<>:@]+)+@)?[^\s'\"<>]*)")
WHOLE_URL = re.compile(SCHEME + r"(.*)", re.DOTALL)  # keys of a bucket may hold spaces and quotes
PORT = re.compile(r"(\[[^\]]*\]|[^:]*):\d{1,5}")
UNPRINTABLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # categories of Unicode
NAMES_LISTED, FIRST_NAMES = 60, 20  # known names in an error, and of more than these the first
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def safe_text(value: object, limit: int = 80) -> str:
    """Foreign text made fit to print: its repr, cut to `limit` characters.

    It has no control characters (C0, C1, DEL). For screen and log the caller prints it without
    markup; for HTML it is escaped again by the template.
    """
    return clean(repr(value) if isinstance(value, str) else str(value), limit)


def split_url(text: str) -> tuple[str, str, str] | None:
    """Scheme, user information (`user:password`, often empty) and the rest of a URL.

    None for other text. Secrets with characters that a URL should not hold count to the user
    information: nothing after it shows a part of them.
    """
    match = WHOLE_URL.fullmatch(text)
    if match is None:
        return None
    scheme, rest = match[1].lower(), match[3]
    host = rest.partition("/")[0]
    if "@" in host and not re.search(r"[?#]", host):
        user, _, place = host.rpartition("@")
        return scheme, user, place + rest[len(host) :]
    if "@" not in host and (
        ":" not in host or (scheme.startswith(("http", "ftp")) and PORT.fullmatch(host))
    ):
        return scheme, "", rest
    user, _, rest = rest.rpartition("@")
    return scheme, user, rest


def hide_credentials(text: str) -> str:
    """`text` with every URL in it without user information and query.

    Those of web servers lose their fragment, too: # is a letter of other names.
    """

    def shorten(match: re.Match[str]) -> str:
        scheme, user, rest = split_url(match[0]) or ("", "", "")
        if re.search(r"[?#]", user):
            rest = ""
        ends = r"[?#]" if user or scheme.startswith(("http", "ftp")) else r"\?"
        return match[1] + match[2] + re.split(ends, rest, maxsplit=1)[0]

    return URL.sub(shorten, text) if ":/" in text else text


def clean(text: str, limit: int = 400) -> str:
    """`text` cut to `limit` characters, without credentials of URLs.

    Control, surrogate, format and line-separator characters become question marks.
    """
    text = hide_credentials(text)
    if not text.isprintable():
        text = "".join("?" if unicodedata.category(c) in UNPRINTABLE else c for c in text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def quote_formula(text: str) -> str:
    """`text` with an apostrophe before it where a spreadsheet would run it; numbers stay."""
    return f"'{text}" if FORMULA.match(text) and not NUMBER.fullmatch(text) else text


def _show_path(file: str) -> str:
    return clean(file if not file or "://" in file else PurePath(file).as_posix(), 200)


def _end_sentence(text: str) -> str:
    return text if text.endswith(("?", "!")) else text.rstrip(".") + "."


@dataclass(frozen=True)
class Finding:
    """One message: the reason object of `ingest_report.json` and the error line on the screen."""

    code: Reason
    problem: str = ""  # what was found, in words, without the path
    requirement: str = ""  # what was expected, in words
    hint: str = ""  # what to do, one sentence without the full stop
    _: KW_ONLY
    level: Level = "error"
    file: str | None = None  # path relative to the source, or as given
    field: str | None = None
    row: int | None = None  # 1-based line number in the file
    found: str | None = None  # short, through safe_text
    expected: str | None = None
    count: int = 1
    examples: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        """`<path>[:<field|row N>]: <found>, <expected>. <what to do>.`, printable on one line."""
        place = f"row {self.row}" if self.row is not None else ""
        if self.field is not None:
            place = clean(self.field, 80)
        where = ":".join(filter(None, (_show_path(self.file or ""), place)))
        line = f"{self.problem}, {self.requirement}" if self.requirement else self.problem
        line = f"{where}: {line}" if where else line
        return clean(" ".join(map(_end_sentence, filter(None, (line, self.hint)))), 1000)

    def line(self) -> str:
        """The line on stderr: `error[code] path:field: ...`."""
        return f"{self.level}[{self.code}] {self.message}"

    def as_dict(self) -> dict[str, Any]:
        """The reason object of the ingest report (schema `bitimely.ingest_report/1`)."""
        return {
            "code": str(self.code),
            "level": self.level,
            "message": self.message,
            "file": None if self.file is None else clean(self.file, 400),
            "field": None if self.field is None else clean(self.field, 80),
            "row": self.row,
            "found": self.found,
            "expected": self.expected,
            "count": self.count,
            "examples": list(self.examples),
        }

    def at(self, file: str) -> Finding:
        """The same finding with `file` filled in where it was left open."""
        return self if self.file is not None else replace(self, file=file)


class Place(TypedDict, total=False):
    """Where a problem is, and what was found there, as in `Finding`.

    All constructors of errors and warnings share these keywords.
    """

    file: str | None
    field: str | None
    row: int | None
    found: str | None
    expected: str | None


@dataclass
class UserError(Exception):
    """An error that the user can correct.

    Readers raise it for a unit that must be quarantined; commands raise it for usage, refusals,
    integrity and so on. `exit_code` is that of the command when nothing catches it.
    """

    code: Reason
    problem: str
    requirement: str = ""
    hint: str = ""
    file: str | None = None
    field: str | None = None
    row: int | None = None
    found: str | None = None
    expected: str | None = None
    exit_code: int = Exit.REFUSED
    # further lines, for instance one a differing key
    details: list[Finding] = dataclasses.field(default_factory=list)
    # of a refused ingest: what was written to ingest_report.json
    report: dict[str, Any] | None = None
    # what was computed before a fault of the machine, as the command prints it under --json
    result: object = None
    # the lines as the owner of the data sees them, where those above have rounded counts of people
    exact: list[Finding] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.finding.message)

    def __reduce__(self) -> tuple[Any, ...]:  # worker processes hand it back
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    @property
    def finding(self) -> Finding:
        """This error as a finding of level error."""
        place = Place(
            file=self.file, field=self.field, row=self.row, found=self.found, expected=self.expected
        )
        return Finding(self.code, self.problem, self.requirement, self.hint, **place)

    def __str__(self) -> str:
        return self.finding.message


Details = list[Finding] | None


def usage_error(
    problem: str,
    requirement: str = "",
    hint: str = "",
    *,
    code: Reason = Reason.CONFIG,
    details: Details = None,
    **place: Unpack[Place],
) -> UserError:
    """An error in what the user asked for: an option, a setting, a name (exit 2)."""
    return UserError(
        code, problem, requirement, hint, exit_code=Exit.USAGE, details=details or [], **place
    )


def input_error(
    code: Reason,
    problem: str,
    requirement: str = "",
    hint: str | None = None,
    *,
    details: Details = None,
    **place: Unpack[Place],
) -> UserError:
    """An error in data that cannot be used as they are (exit 4).

    `hint`: None is that of the reason in `HINTS`.
    """
    return UserError(
        code,
        problem,
        requirement,
        HINTS.get(code, "") if hint is None else hint,
        details=details or [],
        **place,
    )


def join_findings(findings: Iterable[Finding]) -> UserError:
    """The first finding as an error in what the user asked for (exit 2), others as its details."""
    first, *others = findings
    return usage_error(
        first.problem,
        first.requirement,
        first.hint,
        code=first.code,
        file=first.file,
        field=first.field,
        details=others,
    )


def integrity_error(
    file: str | None,
    problem: str,
    requirement: str = "",
    hint: str | None = None,
    *,
    details: Details = None,
    field: str | None = None,
) -> UserError:
    """A stored file that is damaged or was altered (exit 5).

    `hint`: None is that of the reason in `HINTS`.
    """
    text = HINTS[Reason.INTEGRITY] if hint is None else hint
    return UserError(
        Reason.INTEGRITY,
        problem,
        requirement,
        text,
        file,
        field,
        exit_code=Exit.INTEGRITY,
        details=details or [],
    )


def input_warning(
    code: Reason,
    problem: str,
    requirement: str = "",
    hint: str = "",
    *,
    level: Level = "warning",
    count: int = 1,
    examples: tuple[str, ...] = (),
    **place: Unpack[Place],
) -> Finding:
    """A warning about data that are used all the same."""
    return Finding(
        code, problem, requirement, hint, level=level, count=count, examples=examples, **place
    )


def select_errors(findings: Iterable[Finding]) -> list[Finding]:
    """Those of level error."""
    return [finding for finding in findings if finding.level == "error"]


def unknown_name_error(kind: str, name: object, names: Iterable[str]) -> UserError:
    """A name, or another value in its place, that is none of `names` (unknown_name, exit 2).

    It lists these and the closest of them.
    """
    names = set(names)
    close = difflib.get_close_matches(str(name), sorted(names), n=3, cutoff=0.5)
    return usage_error(
        f"unknown {kind} {str(name)!r}",
        f"known are {_list_known(names) or 'none yet'}",
        f"Did you mean {' or '.join(close)}?" if close else "",
        code=Reason.UNKNOWN_NAME,
    )


def _list_known(names: Collection[str]) -> str:
    """The names, of very many the first."""
    return list_first(sorted(names), NAMES_LISTED if len(names) <= NAMES_LISTED else FIRST_NAMES)


def check_choice(kind: str, value: str | None, names: Iterable[str]) -> None:
    """Raise the error of `unknown_name_error` for a value that is none of `names`.

    None, nothing chosen, passes.
    """
    names = list(names)
    if value is not None and value not in names:
        raise unknown_name_error(kind, value, names)


def raise_differences(
    before: Mapping[str, object], now: Mapping[str, object], path: PurePath, hint: str
) -> None:
    """Raise a UserError (settings_differ, exit 2) for settings that differ from those at `path`.

    It names the first key whose value differs; its details are a finding for each further key.
    `before`, `now`: stored and present settings, a missing one is None. `hint` is what to do.
    """
    findings = [
        Finding(
            Reason.SETTINGS_DIFFER,
            f"was made with {safe_text(before.get(key))}",
            f"now it is {safe_text(now.get(key))}",
            file=str(path),
            field=key,
        )
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if findings:
        raise join_findings([replace(findings[0], hint=hint), *findings[1:]])
