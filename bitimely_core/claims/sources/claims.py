"""Reads claims in plain tables, with optional tables of patients and labels and a map of codes.

`claims.{csv,csv.gz,parquet}`: patient_id, date, icd9 (or icd, code, icd10; or wide: dx1 .. dxN),
optional vocab, source, claim. `patients`: patient_id, birth_date or month_of_birth, death_date,
sex, obs_start, obs_end. `labels`: patient_id, a column of 0 and 1 for each label, optional
index_date. `icd9_phecode.csv`: a map. `--col KEY=NAME` gives a column another name (and `--col
vocab=icd10` a vocabulary).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import PurePosixPath

import polars as pl

from bitimely_core.claims import dates, reversals
from bitimely_core.claims.codes import FAMILIES
from bitimely_core.claims.distinct import map_texts
from bitimely_core.claims.label_rules import SOURCES as KINDS
from bitimely_core.claims.options import ClaimsOptions
from bitimely_core.claims.sources.claims_source import ClaimsSource
from bitimely_core.claims.sources.columns import (
    DateCounts,
    assign_vocabulary,
    detect_delimiter,
    find_table,
    open_table,
    reformat_dates,
    report_spelling,
    report_zones,
)
from bitimely_core.claims.sources.options import (
    LabelColumn,
    parse_label_columns,
    parse_pairs,
    parse_switch_day,
)
from bitimely_core.claims.sources.source_table import EventBlock, OpenTable, SourceTable, Stated
from bitimely_core.claims.sources.subject_tables import (
    TableAccounts,
    keep_unique_rows,
    make_subjects,
    parse_labels,
)
from bitimely_core.claims.sources.survey import EventReader, SourceSurvey, unpivot_codes
from bitimely_core.claims.unknown_dates import DEFAULTS, blank_dates
from bitimely_core.errors import Finding, Reason, input_error, input_warning, safe_text, usage_error
from bitimely_core.formats import tables
from bitimely_core.formats.source import Source

SUBJECT_NAMES = ("patient_id", "subject_id", "person_id", "id")
EVENT_COLUMNS = {
    "subject": SUBJECT_NAMES,
    "date": ("date",),
    "code": ("icd9", "icd", "code", "icd10"),
    "vocab": ("vocab", "vocabulary_id", "icd_version"),
    "source": ("source",),
    "claim": ("claim", "claim_id"),
    "position": ("position",),
    "status": reversals.STATUS_NAMES,
    "amount": reversals.AMOUNT_NAMES,
}
OPTIONAL_COLUMNS = {"vocab", "source", "claim", "position", "status", "amount"}
REVERSING = ("status", "amount")  # columns that are used where they reverse claims
NO_COLUMN = "none"  # --col amount=none: the column is not used
PEEKED_ROWS = 100_000  # by which a column is judged
PATIENT_COLUMNS = {
    "subject": SUBJECT_NAMES,
    "birth": ("birth_date", "month_of_birth", "birth"),
    "death": ("death_date", "death"),
    "sex": ("sex",),
    "obs_start": ("obs_start",),
    "obs_end": ("obs_end",),
}
FEW_TEXTS = {"date", "code", "vocab", "source"}  # columns whose texts repeat
INDEX_DATE = "index_date"
MAP_FILE = "icd9_phecode.csv"
WIDE_COLUMN = re.compile(r"dx_?(\d+)", re.IGNORECASE | re.ASCII)
CODE_COLUMN = re.compile(r"icd_?((?:9|10)(?:cm)?).*", re.IGNORECASE)  # whose name is a vocabulary
# as written in a column of them
VOCABULARY_WORDS = {
    "9": "icd9",
    "10": "icd10",
    "icd10ca": "icd10",
    **{name: name for name in FAMILIES},
}


def _shape_block(
    frame: pl.DataFrame,
    *,
    wide: Sequence[str],
    words: Mapping[str, str],
    form: str,
    since: int | None,
    words_of_status: dict[str, int] | None,
) -> EventBlock:
    """Columns under the names of `ClaimsSource.events`, one row for each code.

    `words_of_status`: word -> kind of a row, where the table has columns of reversals.
    `wide`: columns of codes where there are several. `words`: of the column `source`, in lower case
    -> a kind of claims. `form`: of dates. `since`: day from which on codes are ICD-10.
    """
    events = frame.rename({"subject": "subject_id"})
    events = events.with_columns(reformat_dates(events["date"], form))
    if since is not None:
        vocab = assign_vocabulary(events["date"], since, "icd9", "icd10")
        events = events.with_columns(vocab=vocab)
    elif "vocab" in events.columns:
        events = events.with_columns(
            _translate_words(events["vocab"], VOCABULARY_WORDS, r"[^a-z0-9]")
        )
    if "source" in events.columns:
        events = events.with_columns(_translate_words(events["source"], words))
    if words_of_status is not None:
        events = reversals.mark_reversals(events, words_of_status)
    if "position" in events.columns:
        position = pl.col("position").str.strip_chars().cast(pl.Int16, strict=False)
        events = events.with_columns(position)
    return EventBlock(unpivot_codes(events, wide) if wide else events)


def _translate_words(
    column: pl.Series, words: Mapping[str, str], noise: str = r"^\s+|\s+$"
) -> pl.Series:
    """Known words in one spelling, without `noise`; null where empty.

    Unknown words stay as they are, for the survey to report.
    """

    def translate(text: str | None) -> str | None:
        if not text or not text.strip():
            return None
        return words.get(re.sub(noise, "", text.lower()), text)

    return map_texts(column, translate, column.dtype)


def read_claims(source: Source, options: ClaimsOptions, *, once: bool = False) -> ClaimsSource:
    """Claims in plain tables.

    Options: col, source_value, label_column (lists of texts); default_source, date_format,
    icd10_from. Raises UserError: what cannot be read or trusted (exit 4), options that are not
    understood (exit 2).

    `once`: the claims are surveyed as `ClaimsSource.read` reads them. Without it, or with a
    `date_format`, they are surveyed here.
    """
    renamed = parse_pairs(options, "col", {*EVENT_COLUMNS, *PATIENT_COLUMNS})
    table, survey = _open_events(source, renamed, options)
    survey.counts_subjects = bool(find_table(source, "labels", needed=False))
    # two digits of a year of birth are read by the last day of the claims
    if not once or options.date_format:
        survey.read_all([table])
    patients = _read_patients(source, renamed, options.date_format, survey)
    labels = _read_labels(source, renamed, options, survey)
    map_files = [path for path in source.files if PurePosixPath(path).name.lower() == MAP_FILE]
    return ClaimsSource(
        events=EventReader([table]),
        survey=survey,
        subjects=patients,
        labels=labels,
        source=options.default_source or "outpatient",
        map_files=map_files[:1],
        facts={"records": survey.records} if table.wide else {},
    )


def _open_events(
    source: Source, renamed: Mapping[str, str], options: ClaimsOptions
) -> tuple[SourceTable, SourceSurvey]:
    """The table of claims, and the survey that it needs."""
    file = find_table(source, "claims")
    path = source.path(file)
    names = tables.read_names(path, delimiter=detect_delimiter(path))
    wanted = _rename_accepted(EVENT_COLUMNS, renamed)
    word = re.sub(r"[^a-z0-9]", "", renamed.get("vocab", "").lower())
    constant = VOCABULARY_WORDS.get(word) if renamed.get("vocab") not in names else None
    if constant:
        del wanted["vocab"]
    wide = _find_wide_columns(names, renamed.get("code"))
    if wide:
        del wanted["code"]
    elif "code" not in renamed:
        _refuse_two_code_columns(names, file)
    for key in REVERSING:
        if renamed.get(key, "").lower() == NO_COLUMN:
            del wanted[key]
    table = open_table(source, file, wanted, OPTIONAL_COLUMNS - set(renamed), codes=wide)
    table, reversing = _choose_reversing(table, set(renamed))
    since = parse_switch_day(options)
    if since is not None and (constant or "vocab" in table.columns):
        raise usage_error("--icd10-from and a vocabulary are both given", "expected one of them")
    shape = partial(
        _shape_block,
        wide=wide,
        words={kind: kind for kind in KINDS} | parse_pairs(options, "source_value"),
        form=options.date_format,
        since=since,
        words_of_status=_list_status_words(table),
    )
    events = SourceTable(table=table, shape=shape, wide=wide, categories=_list_categories(table))
    vocab, stated = _find_vocabulary(table.columns.get("code", ""), constant, since)
    spelled = {key: wanted[key] for key in wanted if key not in REVERSING}
    findings = [*report_spelling(file, table.columns, spelled), *reversing]
    return events, SourceSurvey(vocab=vocab, stated=stated, findings=findings)


def _list_status_words(table: OpenTable) -> dict[str, int] | None:
    """Word of a status -> kind of a row; None where the table has no column of reversals."""
    if set(REVERSING).isdisjoint(table.columns):
        return None
    return reversals.list_words(table.columns.get("status", ""))


def _choose_reversing(table: OpenTable, named: set[str]) -> tuple[OpenTable, list[Finding]]:
    """The table with its columns of reversals, and what is to be said of them.

    Columns that an option names are used. Others are where they hold reversals of other rows, by
    the first rows; a column of negative amounts that reverses none is named.
    """
    guessed = [key for key in REVERSING if key in table.columns and key not in named]
    if not guessed:
        return table, []
    columns = {key: name for key, name in table.columns.items() if key not in guessed}
    without = table._replace(columns=columns)
    keys = [key for key in ("subject", "date", "code") if key in columns]
    marked = _peek_reversals(table, keys)
    if not (marked["reversal"] != reversals.USUAL).any():
        return without, []
    return _judge_reversing(table, without, guessed, is_used=reversals.is_reversing(marked, keys))


def _judge_reversing(
    table: OpenTable, without: OpenTable, guessed: Sequence[str], *, is_used: bool
) -> tuple[OpenTable, list[Finding]]:
    """The table with its guessed columns of reversals or without them, and a line on either."""
    names = " and ".join(safe_text(table.columns[key]) for key in guessed)
    flags = " ".join(f"--col {key}={safe_text(table.columns[key])}" for key in guessed)
    if is_used:
        problem, rule = f"{names} mark reversals of other rows", "both are left out"
        hint = f"Give {' '.join(f'--col {key}={NO_COLUMN}' for key in guessed)} to use them"
    else:
        table = without
        problem = f"{names} may mark reversed or replaced claims"
        rule, hint = "they are used as all others", f"Give {flags} to leave them out"
    return table, [input_warning(Reason.REVERSED, problem, rule, hint, file=table.file)]


def _peek_reversals(table: OpenTable, keys: Sequence[str]) -> pl.DataFrame:
    """The first rows of some columns, under their keys, with the columns of reversals."""
    wanted = [*keys, *(key for key in REVERSING if key in table.columns)]
    columns = {key: table.columns[key] for key in wanted}
    frames, rows = [pl.DataFrame(schema=dict.fromkeys(wanted, pl.String))], 0
    for frame in table._replace(columns=columns).read_blocks():
        frames.append(frame.select(wanted).cast(pl.String))
        rows += frame.height
        if rows >= PEEKED_ROWS:
            break
    words = reversals.list_words(columns.get("status", ""))
    return reversals.mark_reversals(pl.concat(frames), words)


def _rename_accepted(
    accepted: Mapping[str, tuple[str, ...]], renamed: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Key -> accepted names, which `--col` replaces."""
    return {key: (renamed[key],) if key in renamed else names for key, names in accepted.items()}


def _refuse_two_code_columns(names: Collection[str], file: str) -> None:
    """Raises UserError: schema for a table with columns for both ICD-9 and ICD-10."""
    both = [name for name in names if name.lower() in {"icd9", "icd10"}]
    if len(both) > 1:
        raise input_error(
            Reason.SCHEMA,
            f"the columns {' and '.join(map(safe_text, both))} both hold codes",
            "expected one column",
            "Choose one with --col code=NAME",
            file=file,
        )


def _find_vocabulary(
    code_column: str, constant: str | None, since: int | None
) -> tuple[str, Stated]:
    """The vocabulary of rows without one, and what states it."""
    match = CODE_COLUMN.fullmatch(code_column)
    by_name = f"icd{match[1].lower()}" if match else None
    if constant or since is not None:
        return constant or by_name or "icd9", "surely"
    return (by_name, "by name") if by_name else ("icd9", "nowhere")


def _list_categories(table: OpenTable) -> tuple[str, ...]:
    """Columns whose texts repeat, and that are not read for another purpose as well."""
    others = {name for key, name in table.columns.items() if key not in FEW_TEXTS}
    return tuple({table.columns[key] for key in FEW_TEXTS & set(table.columns)} - others)


def _find_wide_columns(names: Sequence[str], pattern: str | None) -> tuple[str, ...]:
    """The columns of codes, ordered by number, of a table with several.

    `pattern`: of their names, as of files; a name without a wildcard is that of a single column.
    """
    if pattern is None:
        if any(name.lower() in EVENT_COLUMNS["code"] for name in names):
            return ()
        wide = list(filter(WIDE_COLUMN.fullmatch, names))
    elif re.search(r"[*?\[]", pattern):
        wide = [name for name in names if fnmatchcase(name.lower(), pattern.lower())]
        if not wide:
            raise usage_error(
                f"--col code={safe_text(pattern)} names no column",
                f"found {', '.join(map(safe_text, names[:60]))}",
            )
    else:
        return ()
    return tuple(sorted(wide, key=_list_numbers))


def _list_numbers(name: str) -> list[int]:
    """Sort key of names that differ by a number: dx2 comes before dx10."""
    return list(map(int, re.findall(r"\d+", name)))


def _read_patients(
    source: Source, renamed: Mapping[str, str], form: str, accounts: TableAccounts
) -> pl.DataFrame | None:
    """The registered subjects, if there is a table of them."""
    file = find_table(source, "patients", needed=False)
    if not file:
        return None
    wanted = _rename_accepted(PATIENT_COLUMNS, renamed)
    # the column may have its name in the claims only
    wanted["subject"] = (*wanted["subject"], *SUBJECT_NAMES)
    table = open_table(source, file, wanted, set(PATIENT_COLUMNS) - {"subject", *renamed})
    frame = keep_unique_rows(table.read(), file, accounts, "subject")
    accounts.findings += report_spelling(file, table.columns, wanted)
    return make_subjects(frame.rename({"subject": "subject_id"}), file, accounts, form)


def _read_labels(
    source: Source, renamed: Mapping[str, str], options: ClaimsOptions, accounts: TableAccounts
) -> pl.DataFrame | None:
    """The table of labels, if there is one: all its columns, or those of `--label-column`."""
    chosen = parse_label_columns(options)
    file = find_table(source, "labels", needed=False)
    if chosen and not file:
        raise usage_error("--label-column is given", "but the folder has no table of labels")
    if any(label.year for label in chosen):
        raise usage_error("--label-column with a year has no meaning with --source claims")
    if not file:
        return None
    subject_names = (renamed["subject"],) if "subject" in renamed else ()
    wanted = {"subject_id": (*subject_names, *SUBJECT_NAMES), INDEX_DATE: (INDEX_DATE,)}
    table = open_table(source, file, wanted, {INDEX_DATE})
    names = _list_labels(table, chosen)
    table = open_table(source, file, {**wanted, **names}, {INDEX_DATE})
    frame = table.read().with_columns(map(_flag_value, chosen))
    frame = keep_unique_rows(frame, file, accounts)
    labels = parse_labels(frame, table.columns, list(names), accounts)
    if INDEX_DATE in table.columns:
        labels = _read_index_dates(labels, options.date_format, accounts)
    accounts.findings += report_spelling(file, table.columns, wanted)
    return labels.drop("row")


def _list_labels(table: OpenTable, chosen: Sequence[LabelColumn]) -> dict[str, str]:
    """Label -> its column. Raises UserError: header where two have one name."""
    if chosen:
        return {label.name: label.column for label in chosen}
    names = tables.read_names(table.path, delimiter=table.delimiter)
    columns = [name for name in names if name not in table.columns.values()]
    labels = {name.lower(): name for name in columns}
    if len(labels.keys() - {"subject_id", INDEX_DATE}) < len(columns):
        raise input_error(
            Reason.HEADER,
            "columns have equal names",
            "expected different ones (case does not count)",
            file=table.file,
        )
    return labels


def _flag_value(label: LabelColumn) -> pl.Expr:
    """1 where the column has the value, 0 where it has another one, null where it is empty."""
    cell = pl.col(label.name)
    flag = (cell == label.value).cast(pl.Int8).cast(pl.String)
    return pl.when(cell.is_not_null()).then(flag).alias(label.name)


def _read_index_dates(labels: pl.DataFrame, form: str, accounts: TableAccounts) -> pl.DataFrame:
    """The labels with index dates as YYYY-MM-DD.

    A row whose index date cannot be read is excluded: claims after such a date could not be.
    """
    labels = labels.with_columns(blank_dates(reformat_dates(labels[INDEX_DATE], form), DEFAULTS))
    written = labels[INDEX_DATE]
    is_unread = written.is_not_null() & dates.parse_days(written).is_null()
    unread, labels = labels.filter(is_unread)["row"], labels.filter(~is_unread)
    zoned = DateCounts().add(labels[INDEX_DATE]).zoned
    accounts.findings += report_zones(zoned, accounts.rows[-1].file, INDEX_DATE)
    accounts.exclude(Reason.DATE, unread, "have an index date that cannot be read", INDEX_DATE)
    return labels
