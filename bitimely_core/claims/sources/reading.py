"""What the sources share: the hand-over to the builder, tables found by name, and the checks of a whole table or column.

A source names its tables of diagnoses (`Table`) and how a block of each becomes events. `survey` reads all of them once and refuses what
cannot be trusted as a whole; `events` then streams them. Neither holds more than a block of about 16 MiB.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from bitimely_core.claims import codes, dates
from bitimely_core.claims.label_rules import SOURCES as KINDS
from bitimely_core.errors import Finding, Reason, UserError, input_error, safe_text, usage_error
from bitimely_core.formats import tables
from bitimely_core.formats.source import Source, located
from bitimely_core.registry import unknown
from bitimely_core.types import Rows

if TYPE_CHECKING:
    import polars as pl

ENDINGS = (".csv", ".csv.gz", ".parquet")
DATES = ("birth", "death", "obs_start", "obs_end")  # of a subject
SEXES = {"1": 1, "m": 1, "male": 1, "2": 2, "f": 2, "female": 2}  # any other text: 0, unknown
MET = 1 << 20  # subjects of several blocks that are put together at once
DATE = 10  # characters that hold a date in the forms that are read
ODD_ID = r"^[=+@]|^-[^0-9]|[\x00-\x1f\x7f]"  # what a spreadsheet runs as a formula, or a terminal obeys
SHORT = re.compile(r"\s*\d{1,2}\.\d{1,2}\s*", re.ASCII)  # 38.9: a category has three digits
BOTH = {f"E{number}" for number in (850, 851, 852, 853, 854, 860, 861)}  # poisoning in ICD-9; without their dots amyloidosis ... in ICD-10

Stated = Literal["surely", "by name", "nowhere"]
"""Who says which vocabulary the rows are in that carry none."""


@dataclass(frozen=True, kw_only=True)
class Claims:
    """A source's rows before any cleaning: every value is text as written.

    Dates alone may have been written anew: what `--date-format` reads stands here as YYYY-MM-DD, so that nobody else needs the format.
    """

    events: Callable[[], Iterator[pl.DataFrame]]
    """Frames of at most about a million rows, in file order: subject_id, date, code, vocab, source (String, nullable), claim (String,
    nullable), position (Int16, nullable), file (String), row (Int64: 1-based line of a text, number of the row in a Parquet file)."""
    subjects: pl.DataFrame | None
    """subject_id, unique; birth, death, obs_start, obs_end (String, nullable); sex (UInt8, nullable: 0 unknown, 1 male, 2 female)."""
    labels: pl.DataFrame | None  # subject_id, one Int8 column a label (nullable), optional index_date String; unique
    vocab: str  # of rows that carry none
    source: str  # of rows that carry none
    rows: list[Rows]  # each table as far as known before cleaning, which adds its own counts to the tables of events
    findings: list[Finding]  # warnings and infos
    facts: dict[str, Any]  # what the report says
    splits: dict[str, str] | None = None  # subject -> train, validation, test


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of diagnoses."""

    file: str  # relative to the source
    path: Path
    columns: tuple[str, ...]  # wanted, as the file spells them
    shape: Callable[[pl.DataFrame], Shaped]
    dated: tuple[str, str]  # file and column that the dates come from, for messages
    kind: Literal["rows", "codes"] = "rows"  # what is counted: records, or the diagnoses on them where a record holds several
    delimiter: str = ","


class Shaped(NamedTuple):
    """A block of a table as events."""

    events: pl.DataFrame  # row, subject_id, date, code, and any of vocab, source, claim, position
    dropped: Mapping[str, int] = {}  # reason -> rows (codes) left out by a rule of the source


@dataclass(kw_only=True)
class Survey:
    """What one reading of all tables of diagnoses found."""

    rows: list[Rows] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    records: dict[str, int] = field(default_factory=dict)  # file -> records
    subjects: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))  # hashes of those with a row, sorted, where asked for


# --- files and columns


def find(source: Source, *stems: str, needed: bool = True) -> str:
    """Relative path of the one table with one of these names, whatever the case, the folder and the ending; "" where there is none.

    Raises:
        UserError: no_input when there are several, or none and it is `needed`.
    """
    names = {stem + ending for stem in stems for ending in ENDINGS}
    found = sorted(rel for rel in {*source.files, *source.odd} if PurePosixPath(rel).name.lower() in names)
    if len(found) > 1:
        text = f"{stems[0]} is there {len(found)} times ({', '.join(map(safe_text, found[:5]))})"
        raise input_error(Reason.NO_INPUT, text, "expected once", "Keep one of them in the folder")
    if needed and not found:
        text = f"no {stems[0]}{{{','.join(ENDINGS)}}} among {len(source.files)} files"
        raise input_error(Reason.NO_INPUT, text, hint="Give the folder that holds it, and the --source it is laid out for")
    return found[0] if found else ""


def delimiter(path: Path) -> str:
    """Comma, or tab where the header has tabs."""
    return "\t" if any("\t" in name for name in tables.names(path)) else ","


def matched(path: Path, wanted: Mapping[str, Sequence[str]], optional: Collection[str] = (), mark: str = ",") -> dict[str, str]:
    """Which column holds what: key -> name in the file. Names are compared without case and blanks around them.

    Args:
        path: table.
        wanted: key -> the names that it may have, the first that is there is taken.
        optional: keys that may be absent.
        mark: delimiter.

    Raises:
        UserError: header (a name twice, none of those wanted), schema (columns missing: found and expected names), and as `tables.names`.
    """
    every = tables.names(path, delimiter=mark)
    chosen = {}
    missing = []
    for key, accepted in wanted.items():
        name = next((one for some in accepted for one in every if one.lower() == some.lower()), None)
        if name is not None:
            chosen[key] = name
        elif key not in optional:
            missing.append(" or ".join(accepted))
    if missing and not set(chosen) - set(optional):
        text = f"the first line names none of the columns wanted ({', '.join(missing)})"
        raise input_error(Reason.HEADER, text, "is the header line absent, or the separator another?", file=str(path))
    if missing:
        text = f"the column{'s' * (len(missing) > 1)} {', '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing"
        found = ", ".join(map(safe_text, every[:60]))
        raise input_error(Reason.SCHEMA, text, f"found {found}", field=missing[0], file=str(path), found=found, expected=missing[0])
    return chosen


def typed(path: Path, file: str, columns: Mapping[str, str], codes: Collection[str] = ("code",)) -> None:
    """Refuses columns whose stored type has lost what was written: codes that are no text, subjects and dates with a fraction.

    Args:
        path: table.
        file: its name in messages.
        columns: key -> name.
        codes: keys of codes, which must be text.

    Raises:
        UserError: ambiguous_code, schema.
    """
    kinds = tables.kinds(path)
    for key, name in columns.items():
        kind = kinds.get(name, "text")
        if key in codes and kind != "text":
            text = f"the codes are stored as {kind}, which loses zeros: 018.82 and 188.2 look the same"
            raise input_error(Reason.AMBIGUOUS_CODE, text, "expected text", "Write the table again from its origin", file=file, field=name)
        if key in {"subject", "subject_id", "date", *DATES} and re.match(r"float|double|halffloat|decimal", kind):
            raise input_error(Reason.SCHEMA, f"is stored as {kind}", "expected text", "Write it as text", file=file, field=name)


def refuse_faults(block: tables.Block, file: str) -> None:
    """A table with a record that is none is refused: what the others hold cannot be trusted either.

    Raises:
        UserError: csv_syntax, row_width, truncated.
    """
    if block.faults:
        first, *others = (finding.at(file) for finding in tables.gathered(block.faults))
        wanted = first.requirement if first.code == Reason.ROW_WIDTH else "expected a record"
        action = "Nothing of the table is used: mend it"
        raise input_error(first.code, first.problem, wanted, action, file=file, row=first.row, details=others)


def whole(path: Path, file: str, columns: Mapping[str, str], mark: str = ",", *, quotes: bool = True) -> pl.DataFrame:
    """A table that is small enough to be held: `row` and the columns under their keys, text without blanks around it, null where empty.

    Raises:
        UserError: as `refuse_faults` and `tables.frames`.
    """
    import polars as pl

    parts = []
    for block in tables.frames(path, tuple(columns.values()), delimiter=mark, quotes=quotes):
        refuse_faults(block, file)
        parts.append(block.frame.select("row", *(bare(pl.col(name)).alias(key) for key, name in columns.items())))
    return pl.concat(parts)


def bare(column: pl.Expr) -> pl.Expr:
    """Without blanks around it; null where nothing is left."""
    import polars as pl

    text = column.str.strip_chars()
    return pl.when(text != "").then(text)


def civil(column: pl.Series, form: str | None) -> pl.Series:
    """Dates that a `strptime` format reads, written anew as YYYY-MM-DD; all others as they are. Each distinct text is read once."""
    if form is None:
        return column
    distinct = column.drop_nulls().unique()
    days = [dates.read(text, form) for text in distinct]
    return column.replace_strict(
        distinct, [text if day is None else dates.iso(day) for text, day in zip(distinct, days, strict=True)], default=None
    )


def switched(column: pl.Series, since: int, before: str, after: str) -> pl.Series:
    """The vocabulary of rows by their date: `before` a day, or from it on; null where the date cannot be read."""
    import polars as pl

    return (dates.days(column) >= since).replace_strict({True: after, False: before}, default=None, return_dtype=pl.String)


def one_row_each(frame: pl.DataFrame, file: str, key: str = "subject_id") -> tuple[pl.DataFrame, Rows, list[Finding]]:
    """The table with one row for each subject: rows without a subject are left out, repeated ones used once.

    Raises:
        UserError: duplicate_key when two rows of one subject differ.
    """
    import polars as pl

    known = frame.filter(pl.col(key).is_not_null())
    single = known.unique([name for name in frame.columns if name != "row"], keep="first", maintain_order=True)
    torn = single.filter(pl.col(key).is_duplicated())
    if torn.height:
        text = f"rows {', '.join(map(str, torn.filter(pl.col(key) == torn[key][0])['row'].head(5)))} are of one subject and differ"
        many = torn[key].n_unique()
        more = f", so do those of {many - 1} other subjects" if many > 1 else ""
        action = "Keep the right one: nobody else knows which that is"
        raise input_error(Reason.DUPLICATE_KEY, text + more, "expected one row a subject", action, file=file, row=int(torn["row"][0]))
    empty, repeated = frame.height - known.height, known.height - single.height
    findings = []
    if empty:
        text, rows = f"{empty} rows have no subject", frame.filter(pl.col(key).is_null())["row"].head(5)
        findings.append(
            Finding(
                code=Reason.IDENTIFIER,
                problem=text,
                requirement="they are left out",
                file=file,
                count=empty,
                examples=tuple(map(str, rows)),
            )
        )
    if repeated:
        text = f"{repeated} rows repeat others"
        findings.append(
            Finding(code=Reason.DUPLICATES, level="warning", problem=text, requirement="they are used once", file=file, count=repeated)
        )
    dropped = {str(Reason.DUPLICATES): repeated} if repeated else {}
    quarantined = {str(Reason.IDENTIFIER): empty} if empty else {}
    return single, Rows(file=file, seen=frame.height, dropped=dropped, quarantined=quarantined), findings


def subjects(frame: pl.DataFrame, file: str, found: list[Finding]) -> pl.DataFrame:
    """`Claims.subjects`.

    Args:
        frame: any of its columns, `sex` as text or as the number it shall be.
        file: that the dates come from.
        found: gets a warning for each column of dates some of which cannot be read; they count as unknown.

    Raises:
        UserError: date, where most of a column cannot be read.
    """
    import polars as pl

    for name in (name for name in DATES if name in frame.columns):
        good, odd = _spelled(frame[name])
        _readable(good, odd, file, name)
        if bad := odd.total():
            text = f"{bad} of {good + bad} dates cannot be read"
            found.append(
                Finding(
                    code=Reason.METADATA,
                    level="warning",
                    problem=text,
                    requirement="they count as unknown",
                    file=file,
                    field=name,
                    count=bad,
                )
            )
    columns = [pl.col(name) if name in frame.columns else pl.lit(None, pl.String).alias(name) for name in ("subject_id", *DATES)]
    sex = pl.col("sex") if "sex" in frame.columns else pl.lit(None, pl.UInt8).alias("sex")
    if frame.schema.get("sex") == pl.String:
        sex = pl.when(sex.is_not_null()).then(sex.str.to_lowercase().replace_strict(SEXES, default=0, return_dtype=pl.UInt8)).alias("sex")
    return frame.select(*columns, sex.cast(pl.UInt8))


# --- events


def long(frame: pl.DataFrame, columns: Sequence[str], positions: Sequence[int] | None = None) -> pl.DataFrame:
    """One row for each code of a wide table: its other columns, `code` and `position`, in the order of the rows and then of the columns.

    Args:
        frame: a block.
        columns: those that hold codes; empty cells are none.
        positions: on the claim; default 1, 2, ...
    """
    import polars as pl

    places = dict(zip(columns, positions or range(1, len(columns) + 1), strict=True))
    order = dict(zip(columns, range(len(columns)), strict=True))
    cells = (
        frame.select(pl.int_range(pl.len(), dtype=pl.UInt32).alias("at"), *columns)
        .unpivot(columns, index="at", variable_name="column", value_name="code")
        .filter(pl.col("code").str.contains(r"\S"))
        .with_columns(pl.col("column").replace_strict(order, return_dtype=pl.UInt16).alias("order"))
        .sort("at", "order")
    )
    position = cells["column"].replace_strict(places, return_dtype=pl.Int16).alias("position")
    return frame.drop(columns)[cells["at"]].with_columns(cells["code"], position)


def _shaped(table: Table) -> Iterator[tuple[tables.Block, pl.DataFrame, Mapping[str, int]]]:
    """Blocks of a table, their events with all columns of `Claims.events`, and what was left out.

    Raises:
        UserError: as `refuse_faults` and `tables.frames`.
    """
    import polars as pl

    texts = ("subject_id", "date", "code", "vocab", "source", "claim")
    kinds = [*((name, pl.String()) for name in texts), ("position", pl.Int16())]
    with located(table.file):
        for block in tables.frames(table.path, table.columns, delimiter=table.delimiter):
            refuse_faults(block, table.file)
            frame, dropped = table.shape(block.frame)
            if block.blanks:
                frame = frame.with_columns(pl.col("subject_id").str.strip_chars())
            filled = [(pl.col(name) if name in frame.columns else pl.lit(None)).cast(kind).alias(name) for name, kind in kinds]
            yield block, frame.select(*filled, pl.lit(table.file).alias("file"), "row"), dropped


def events(found: Sequence[Table]) -> Iterator[pl.DataFrame]:
    """`Claims.events` of tables that `survey` has accepted."""
    for table in found:
        for _, frame, _ in _shaped(table):
            if frame.height:
                yield frame


def stream(found: Sequence[Table]) -> Callable[[], Iterator[pl.DataFrame]]:
    """`events` of these tables, to be called as often as needed."""
    return partial(events, tuple(found))


def survey(found: Sequence[Table], *, vocab: str = "icd9", stated: Stated = "surely", listed: bool = False, hint: str = "") -> Survey:
    """Reads all tables of diagnoses once, and refuses what no check of a single row can find.

    Args:
        found: the tables.
        vocab: of rows that carry none.
        stated: whether that is sure, or by the name of a column, or nobody says so.
        listed: also gather the subjects.
        hint: what to do where there is no diagnosis at all.

    Raises:
        UserError: no_input (no rows at all), date (a column in another form), ambiguous_code (lost zeros; codes that both vocabularies
            have), wrong_vocabulary and schema (unknown words in the columns of vocabularies and of kinds of claims), and as `_shaped`.
    """
    import polars as pl

    told, met = Survey(), []
    for table in found:
        records = kept = foreign = 0
        dropped: Counter[str] = Counter()
        seen: set[tuple[str | None, str]] = set()
        readable = 0
        unread: Counter[str] = Counter()
        odd: list[int] = []
        strange = 0
        for block, frame, left in _shaped(table):
            records += block.seen
            kept += frame.height
            foreign += block.foreign
            dropped.update(left)
            if not frame.height:
                continue
            _known_words(frame, table.file)
            for (named,), rows in frame.group_by("vocab") if frame["vocab"].count() else [((None,), frame)]:
                seen.update((named, code) for code in rows["code"].drop_nulls().unique())
            good, other = _spelled(frame["date"])
            readable += good
            unread.update(other)
            marked = frame.filter(pl.col("subject_id").str.contains(ODD_ID))["row"]
            strange += marked.len()
            odd += marked.head(5 - len(odd)).to_list()
            if listed:
                met.append(hashed(frame["subject_id"]))
                if sum(map(len, met)) > max(len(told.subjects), MET):
                    told.subjects, met = np.unique(np.concatenate([told.subjects, *met])), []
        _readable(readable, unread, *table.dated)
        _whole_codes({code for named, code in seen if codes.FAMILIES[named or vocab] == "icd9"}, table.file)
        if any(named is None for named, _ in seen):
            _one_vocabulary({code for named, code in seen if named is None}, table.file, vocab, stated)
        told.records[table.file] = records
        told.rows.append(Rows(file=table.file, kind=table.kind, seen=kept + sum(dropped.values()), dropped=dict(dropped)))
        if foreign:
            text, wanted = f"{foreign} lines are not valid UTF-8", "they are read as latin-1"
            told.findings.append(
                Finding(code=Reason.ENCODING, level="warning", problem=text, requirement=wanted, file=table.file, count=foreign)
            )
        if strange:
            text, wanted = (
                f"{strange} rows have a subject that looks like a formula or holds control characters",
                "ids are never written as they are",
            )
            examples = tuple(map(str, odd))
            finding = Finding(
                code=Reason.LABEL_CHARS,
                level="warning",
                problem=text,
                requirement=wanted,
                file=table.file,
                count=strange,
                examples=examples,
            )
            told.findings.append(finding)
    told.subjects = np.unique(np.concatenate([told.subjects, *met]))
    if not any(row.seen - sum(row.dropped.values()) for row in told.rows):
        text = f"none of {sum(told.records.values())} records holds a diagnosis"
        raise input_error(Reason.NO_INPUT, text, hint=hint, file=found[0].file if len(found) == 1 else None)
    return told


def hashed(ids: pl.Series) -> np.ndarray:
    """The distinct ids as numbers, sorted [n] uint64: good for counting, as two of a million share one with a chance of 3e-8."""
    return np.unique(ids.drop_nulls().hash().to_numpy())


def _known_words(frame: pl.DataFrame, file: str) -> None:
    for name, known, code in (("vocab", codes.FAMILIES, Reason.WRONG_VOCABULARY), ("source", KINDS, Reason.SCHEMA)):
        words = set(frame[name].drop_nulls().unique()) - set(known)
        if words:
            text = f"holds {', '.join(map(safe_text, sorted(words)[:5]))}"
            action = "" if name == "vocab" else "Say what they mean with --source-value WORD=KIND"
            raise input_error(code, text, f"known are {', '.join(known)}", action, file=file, field=name)


def _spelled(column: pl.Series) -> tuple[int, Counter[str]]:
    """How many dates of a column can be read, and the beginnings of the others. Each distinct text is looked at once."""
    distinct = column.drop_nulls().unique()
    heads = distinct.str.strip_chars().str.head(DATE)
    odd = distinct.filter(heads.is_in([head for head in heads.unique() if dates.read(head) is None]))
    rows = column.filter(column.is_in(odd.implode())) if odd.len() else column.clear()
    return column.count() - rows.len(), Counter(dict(rows.str.strip_chars().str.head(DATE).value_counts().iter_rows()))


def _readable(good: int, odd: Counter[str], file: str, name: str) -> None:
    """Refuses a column of dates most of which have another form than those that are read: 02/03/04 may be six days.

    Raises:
        UserError: date.
    """
    bad = odd.total()
    if bad <= good:
        return
    shape = re.sub(r"[^\W\d_]", "x", re.sub(r"\d", "9", next(iter(odd))))  # no date of a patient is shown
    text = f"{bad} of {good + bad} dates are not in a form that is read (they look like {safe_text(shape)})"
    action = "Say how they are written with --date-format, as in --date-format '%d/%m/%Y'"
    raise input_error(Reason.DATE, text, "expected YYYY-MM-DD or YYYYMMDD", action, file=file, field=name)


def _whole_codes(texts: Collection[str], file: str) -> None:
    """Refuses ICD-9 codes that have lost their zeros: 38.9 for 038.9, and not one that begins with 0."""
    short = sorted(text.strip() for text in texts if SHORT.fullmatch(text))
    if short and not any(text.lstrip(" '\"").startswith("0") for text in texts):
        text = f"codes have lost their leading zeros ({', '.join(map(safe_text, short[:5]))}), no code begins with 0"
        action = "Write the table again from its origin, with the codes as text"
        raise input_error(Reason.AMBIGUOUS_CODE, text, "expected three digits before the dot", action, file=file, found=short[0])


def _one_vocabulary(texts: Collection[str], file: str, vocab: str, stated: Stated) -> None:
    """Refuses codes that ICD-9 and ICD-10 both have, where nothing says which of them the rows are in, or some rows belie it."""
    both = sorted({text.strip().upper() for text in texts} & BOTH)
    if both and (stated == "nowhere" or (stated == "by name" and any(_foreign(text, vocab) for text in texts))):
        text = f"{', '.join(both)} exist in ICD-9 and in ICD-10, and nothing says which is meant"
        action = "Give --icd10-from DATE; or for plain claims --col vocab=COLUMN, or --col vocab=icd9"
        raise input_error(Reason.AMBIGUOUS_CODE, text, "expected a vocabulary", action, file=file)


def _foreign(text: str, vocab: str) -> bool:
    """Whether a code cannot be in its vocabulary, and can be in the other one."""
    other = "icd10" if codes.FAMILIES[vocab] == "icd9" else "icd9"
    code, _ = codes.normalise(text, vocab)
    return (code is None or codes.foreign(code, vocab)) and codes.normalise(text, other)[0] is not None


# --- options


def usage(text: str, wanted: str = "", action: str = "") -> UserError:
    """An option that cannot be followed (exit 2)."""
    return usage_error(text, wanted, action)


def switch(options: Mapping[str, Any]) -> int | None:
    """The day of `--icd10-from`.

    Raises:
        UserError: config (exit 2).
    """
    if not (text := options.get("icd10_from")):
        return None
    if (day := dates.read(str(text))) is None:
        raise usage(f"--icd10-from {safe_text(text)} is no date", "expected YYYY-MM-DD")
    return day


def default_kind(options: Mapping[str, Any], otherwise: str = "outpatient") -> str:
    """`--default-source`, the kind of claims that do not say theirs."""
    kind = options.get("default_source") or otherwise
    if kind not in KINDS:
        raise unknown("kind of claims", kind, list(KINDS))
    return str(kind)


def pairs(options: Mapping[str, Any], name: str, known: Collection[str] | None = None) -> dict[str, str]:
    """An option that is given as KEY=VALUE, any number of times; keys in lower case.

    Raises:
        UserError: config, unknown_name (exit 2).
    """
    found = {}
    for text in options.get(name) or ():
        key, equals, value = (part.strip() for part in str(text).partition("="))
        if not (key and equals and value):
            raise usage(f"--{name.replace('_', '-')} {safe_text(text)} has no = between two words", "expected KEY=VALUE")
        if known is not None and key.lower() not in known:
            raise unknown(f"key of --{name.replace('_', '-')}", key, list(known))
        found[key.lower()] = value
    return found


class LabelColumn(NamedTuple):
    """`--label-column COLUMN:NAME:VALUE[@YEAR]`: the label `name` is 1 where the column holds `value`."""

    column: str
    name: str
    value: str
    year: str | None


def label_columns(options: Mapping[str, Any]) -> list[LabelColumn]:
    """`--label-column`, any number of times.

    Raises:
        UserError: config (exit 2).
    """
    found = []
    for text in options.get("label_column") or ():
        parts = re.fullmatch(r"([^:]+):([A-Za-z]\w*):([^:@]+)(?:@(\d{4}))?", str(text), re.ASCII)
        if parts is None:
            raise usage(f"--label-column {safe_text(text)} is not understood", "expected COLUMN:NAME:VALUE or COLUMN:NAME:VALUE@YEAR")
        column, name, value, year = parts.groups()
        found.append(LabelColumn(column.strip(), name.lower(), value.strip(), year))
    if len({one.name for one in found}) < len(found):
        raise usage("--label-column gives one name to two labels")
    return found


def not_for(kind: str, options: Mapping[str, Any], *names: str) -> None:
    """Refuses options that this source cannot follow.

    Raises:
        UserError: config (exit 2).
    """
    for name in names:
        if options.get(name):
            raise usage(f"--{name.replace('_', '-')} has no meaning with --source {kind}")


def read_labels(
    frame: pl.DataFrame, columns: Mapping[str, str], names: Sequence[str], file: str
) -> tuple[pl.DataFrame, int, list[Finding]]:
    """Columns of 0 and 1 as Int8; a row with anything else in one of them is left out.

    Args:
        frame: text.
        columns: key -> header, for messages.
        names: the keys that are labels.
        file: for messages.

    Returns:
        The frame, the number of rows left out, and what to say of them.

    Raises:
        UserError: label, for a column that holds other words in most rows.
    """
    import polars as pl

    words = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}
    odd = pl.lit(value=False)
    for name in names:
        wrong = frame.filter(pl.col(name).is_not_null() & ~pl.col(name).is_in(list(words)))
        if 2 * wrong.height > frame[name].count():
            text = f"{wrong.height} of {frame[name].count()} rows hold neither 0 nor 1"
            action = "Take the column out of the table, or name the labels with --label-column COLUMN:NAME:VALUE"
            raise input_error(Reason.LABEL, text, "expected a label", action, file=file, field=columns[name])
        odd |= pl.col(name).is_not_null() & ~pl.col(name).is_in(list(words))
    left = frame.filter(odd)
    kept = frame.filter(~odd).with_columns(pl.col(name).replace_strict(words, default=None, return_dtype=pl.Int8) for name in names)
    if not left.height:
        return kept, 0, []
    text, examples = f"{left.height} rows hold neither 0 nor 1 as a label", tuple(map(str, left["row"].head(5)))
    return (
        kept,
        left.height,
        [Finding(code=Reason.LABEL, problem=text, requirement="they are left out", file=file, count=left.height, examples=examples)],
    )
