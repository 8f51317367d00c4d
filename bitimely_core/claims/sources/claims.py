"""Reads claims in plain tables, with optional tables of patients and labels and a map of codes.

Claims, in any number of files: patient_id, date, icd9 (or icd, code, icd10; or wide: dx1 .. dxN),
optional vocab, source, claim. `patients`: patient_id, birth_date or month_of_birth, death_date,
sex, obs_start, obs_end. `words.toml` has the other names of these columns. `labels`: patient_id, a
column of 0 and 1 for each label, optional index_date. `icd9_phecode.csv`: a map. `--col KEY=NAME`
gives a column another name (and `--col vocab=icd10` a vocabulary).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath
from typing import NamedTuple

import polars as pl

from bitimely_core.claims import dates, reversals
from bitimely_core.claims.distinct import map_texts
from bitimely_core.claims.label_rules import SOURCES as KINDS
from bitimely_core.claims.options import ClaimsOptions
from bitimely_core.claims.sources import words
from bitimely_core.claims.sources.claims_source import ClaimsSource
from bitimely_core.claims.sources.code_columns import (
    find_vocabulary,
    find_wide_columns,
    has_code_columns,
    match_vocabularies,
    report_other_codes,
)
from bitimely_core.claims.sources.columns import (
    DateCounts,
    assign_vocabulary,
    find_names,
    open_table,
    reformat_dates,
    report_spelling,
    report_zones,
    warn_of_rows,
)
from bitimely_core.claims.sources.dated_codes import (
    Pairs,
    find_pairs,
    join_dates,
    report_pairs,
    spread_lists,
)
from bitimely_core.claims.sources.observation_tables import (
    PERIOD_DATES,
    join_periods,
    read_spells,
    separate_spells,
    span_spells,
)
from bitimely_core.claims.sources.options import (
    LabelColumn,
    parse_date_forms,
    parse_label_columns,
    parse_pairs,
    parse_switch_day,
    parse_vocabularies,
)
from bitimely_core.claims.sources.plain_files import (
    PlainFiles,
    find_plain_files,
    list_partitions,
    report_unread,
)
from bitimely_core.claims.sources.source_table import (
    EventBlock,
    OpenTable,
    SourceTable,
    Stated,
    count_dropped,
)
from bitimely_core.claims.sources.subject_tables import (
    TableAccounts,
    keep_unique_rows,
    make_subjects,
    parse_labels,
    report_unread_dates,
)
from bitimely_core.claims.sources.survey import EventReader, SourceSurvey, unpivot_codes
from bitimely_core.claims.unknown_dates import DEFAULTS, blank_dates
from bitimely_core.errors import (
    Finding,
    Reason,
    UserError,
    input_error,
    input_warning,
    safe_text,
    usage_error,
)
from bitimely_core.formats import tables
from bitimely_core.formats.sniffer import find_delimiter
from bitimely_core.formats.source import Source
from bitimely_core.formats.stat_files import is_stat_file, read_value_labels
from bitimely_core.types import SourceRows

EVENT_COLUMNS = {
    **words.list_names("claims"),
    "status": reversals.STATUS_NAMES,
    "amount": reversals.AMOUNT_NAMES,
}
OPTIONAL_COLUMNS = {"vocab", "source", "claim", "position", "status", "amount"}
REVERSING = ("status", "amount")  # columns that are used where they reverse claims
NO_COLUMN = "none"  # --col amount=none: the column is not used
PEEKED_ROWS = 100_000  # by which a column is judged
SUBJECT_NAMES = EVENT_COLUMNS["subject"]
PATIENT_COLUMNS = {"subject": SUBJECT_NAMES, **words.list_names("patients")}
FEW_TEXTS = {"date", "code", "vocab", "source"}  # columns whose texts repeat
CLAIM_FACTS = ("birth", "death", "sex")  # that rows of claims may tell of their subject
INDEX_DATE = "index_date"
MAP_FILE = "icd9_phecode.csv"
# a code behind its vocabulary: ICD10CM:E11.9, ICD-9-CM 250.00
PREFIXED_CODE = re.compile(r"([A-Za-z]{2}[\w -]*?)(?:\s*[:|/]+\s*|\s+)([A-Za-z]?\d.*)", re.ASCII)
FLOAT_ID = r"^(\d+)\.0+$"
ID_ROWS = 200  # rows by which the form of the ids of claims is known
QUOTES = "'\""


@dataclass(frozen=True, kw_only=True)
class _BlockPlan:
    """How a block of a table of claims becomes events."""

    wide: Sequence[str]  # columns of codes where there are several
    pairs: Pairs  # columns of codes with dates of their own
    wide_vocabularies: Mapping[int, str]  # number of such a column -> the vocabulary of its name
    kinds: Mapping[str, str]  # word of the column `source`, in lower case -> a kind of claims
    vocabularies: Mapping[str, str]  # folded word of the column `vocab` -> a vocabulary
    form: str  # of dates
    since: int | None  # day from which on codes are ICD-10
    constants: Mapping[str, str]  # key -> text of all rows, as the folders of the file state it
    whole_ids: bool  # ids are written as numbers with a fraction of 0
    # word -> kind of a row, where the table has columns of reversals
    words_of_status: Mapping[str, int] | None

    def __call__(self, frame: pl.DataFrame) -> EventBlock:
        """Columns under the names of `ClaimsSource.events`, one row for each code."""
        events = frame.with_columns(pl.lit(text).alias(key) for key, text in self.constants.items())
        events = events.rename({"subject": "subject_id"})
        if self.pairs:
            events = self._pair_dates(events)
        if self.whole_ids:
            events = events.with_columns(pl.col("subject_id").str.replace(FLOAT_ID, "$1"))
        events = events.with_columns(reformat_dates(events["date"], self.form))
        dropped: dict[str, int] = {}
        events = self._split_prefixes(events)
        if self.since is not None:
            vocab = assign_vocabulary(events["date"], self.since, "icd9", "icd10")
            events = events.with_columns(vocab=vocab)
        elif "vocab" in events.columns:
            vocab = _translate_words(events["vocab"], self.vocabularies, words.fold_name)
            events = events.with_columns(vocab)
            rows = events.height
            events = _drop_other_vocabularies(events)
            dropped = count_dropped(Reason.WRONG_VOCABULARY, rows - events.height)
        if "source" in events.columns:
            events = events.with_columns(_translate_words(events["source"], self.kinds, _trim))
        if self.words_of_status is not None:
            events = reversals.mark_reversals(events, self.words_of_status)
        return EventBlock(events if self.pairs else self._place_codes(events), dropped)

    def _place_codes(self, events: pl.DataFrame) -> pl.DataFrame:
        """One row for each code, with its place among those of the claim as a number."""
        if self.wide:
            return self._unpivot(events, self.wide)
        if "position" not in events.columns:
            return events
        position = pl.col("position").str.strip_chars().cast(pl.Int16, strict=False)
        return events.with_columns(position)

    def _pair_dates(self, events: pl.DataFrame) -> pl.DataFrame:
        """One row for each code, with its own date."""
        events, columns = spread_lists(events.drop("code", strict=False), self.pairs)
        return join_dates(self._unpivot(events, columns), self.pairs)

    def _split_prefixes(self, events: pl.DataFrame) -> pl.DataFrame:
        """Vocabulary and code of cells that hold both, as ICD10CM:E11.9, in two columns."""
        if "vocab" in events.columns or "code" not in events.columns or self.since is not None:
            return events

        def split_prefix(text: str | None) -> tuple[str | None, str | None]:
            match = PREFIXED_CODE.fullmatch(text.strip()) if text else None
            if match and words.fold_name(match[1]) in self.vocabularies:
                return match[1], match[2]
            return None, text

        codes = events["code"]
        if not any(split_prefix(text)[0] for text in codes.unique()):
            return events
        vocab = map_texts(codes, lambda text: split_prefix(text)[0], pl.String)
        code = map_texts(codes, lambda text: split_prefix(text)[1], codes.dtype)
        return events.with_columns(code, vocab=vocab)

    def _unpivot(self, events: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
        """One row for each code, with the vocabulary that its column states where no other does."""
        events = unpivot_codes(events, columns)
        if not self.wide_vocabularies or "vocab" in events.columns:
            return events
        vocab = pl.col("position").replace_strict(
            self.wide_vocabularies, default=None, return_dtype=pl.String
        )
        return events.with_columns(vocab=vocab)


def _drop_other_vocabularies(events: pl.DataFrame) -> pl.DataFrame:
    """The rows without those of vocabularies that hold no diagnoses."""
    present = events["vocab"].unique().cast(pl.String)
    if words.NO_DIAGNOSIS not in present:
        return events
    return events.filter(pl.col("vocab").cast(pl.String).ne_missing(words.NO_DIAGNOSIS))


def _trim(text: str) -> str:
    return text.strip().lower()


def _translate_words(
    column: pl.Series, meanings: Mapping[str, str], fold: Callable[[str], str]
) -> pl.Series:
    """Known words in one spelling; null where empty.

    Unknown words stay as they are, for the survey to report.
    """

    def translate(text: str | None) -> str | None:
        if not text or not text.strip():
            return None
        return meanings.get(fold(text), text)

    return map_texts(column, translate, column.dtype)


def read_claims(source: Source, options: ClaimsOptions, *, once: bool = False) -> ClaimsSource:
    """Claims in plain tables.

    Options: col, source_value, source_vocab, label_column (lists of texts); default_source,
    date_format, icd10_from. Raises UserError: what cannot be read or trusted (exit 4), options that
    are not understood (exit 2).

    `once`: the claims are surveyed as `ClaimsSource.read` reads them. Without it, or with a
    `date_format`, they are surveyed here.
    """
    renamed = parse_pairs(options, "col", {*EVENT_COLUMNS, *PATIENT_COLUMNS})
    wanted = _rename_accepted(EVENT_COLUMNS, renamed)
    is_dated = partial(_is_dated, wanted, renamed)
    has_codes = partial(has_code_columns, accepted=wanted["code"], pattern=renamed.get("code"))
    has_periods = partial(_has_periods, wanted=_rename_accepted(PATIENT_COLUMNS, renamed))
    files = find_plain_files(source, is_dated, {MAP_FILE}, has_codes, has_periods)
    source_tables, survey = _open_events(source, files.claims, renamed, options)
    survey.counts_subjects = bool(files.labels)
    survey.findings += report_unread(files)
    people = _read_subject_facts(source, files, renamed, survey)
    # two digits of a year of birth and the end of an observation go by the last day of the claims
    forms = parse_date_forms(options)
    if not once or any(forms.values()) or people.spells is not None:
        survey.read_all(source_tables)
    patients, periods = _make_patients(people, forms, survey)
    labels = _read_labels(source, files.labels, renamed, options, survey)
    map_files = [path for path in source.files if PurePosixPath(path).name.lower() == MAP_FILE]
    is_wide = any(table.wide for table in source_tables)
    return ClaimsSource(
        events=EventReader(source_tables),
        survey=survey,
        subjects=patients,
        labels=labels,
        source=options.default_source or "outpatient",
        map_files=map_files[:1],
        facts={"records": survey.records} if is_wide else {},
        periods=periods,
        advice=people.advice,
    )


def _open_events(
    source: Source, files: Sequence[str], renamed: Mapping[str, str], options: ClaimsOptions
) -> tuple[list[SourceTable], SourceSurvey]:
    """The tables of claims, and the survey that they need."""
    opened = [_open_events_table(source, file, renamed, options) for file in files]
    vocab, stated = opened[0][1]
    source_tables, survey = [], SourceSurvey(vocab=vocab, stated=stated)
    reverses = any(not set(REVERSING).isdisjoint(table.table.columns) for table, *_ in opened)
    for table, (own_vocab, _), findings in opened:
        table = replace(table, reverses=reverses)
        if own_vocab != vocab:  # each table states its vocabulary, by a name of its columns
            table = replace(table, vocab=own_vocab)
        source_tables.append(table)
        survey.findings += findings
    return source_tables, survey


def _open_events_table(
    source: Source, file: str, renamed: Mapping[str, str], options: ClaimsOptions
) -> tuple[SourceTable, tuple[str, Stated], list[Finding]]:
    """A table of claims, the vocabulary of its rows without one, and findings."""
    path = source.path(file)
    names = tables.read_names(path, delimiter=find_delimiter(path))
    wanted = _rename_accepted(EVENT_COLUMNS, renamed)
    meanings = words.translate_words(parse_vocabularies(options), "vocabularies")
    constant = _find_stated_vocabulary(names, renamed, meanings)
    wide = find_wide_columns(names, renamed.get("code"))
    pairs = _find_date_pairs(names, wide, wanted, renamed)
    dates = tuple(itertools.chain(*pairs.values()))
    if pairs:
        wide = tuple(pairs)
        wanted["date"] = dates[:1]
    constants = _find_constants(file, names, wanted)
    unneeded = {*constants, *["vocab"] * bool(constant), *["code"] * bool(wide)}
    wanted = _drop_columns(wanted, unneeded, renamed)
    table = open_table(
        source, file, wanted, OPTIONAL_COLUMNS - set(renamed), codes=wide, named=True
    )
    table, reversing = _choose_reversing(table, set(renamed))
    since = parse_switch_day(options)
    _refuse_two_vocabularies(table, constant, since)
    whole_ids = "subject" in table.columns and _has_float_ids(table, "subject")
    plan = _BlockPlan(
        wide=wide,
        pairs=pairs,
        wide_vocabularies=match_vocabularies(wide) if constant is None and since is None else {},
        kinds={kind: kind for kind in KINDS} | parse_pairs(options, "source_value"),
        vocabularies=meanings,
        form=parse_date_forms(options)["date"],
        since=since,
        constants=constants,
        whole_ids=whole_ids,
        words_of_status=_list_status_words(table),
    )
    events = SourceTable(
        table=table,
        shape=plan,
        wide=wide,
        dates=dates,
        dropped_note="are of vocabularies without diagnoses",
        dated=(file, "date") if "date" in constants else None,
        categories=_list_categories(table),
    )
    code_name = wide[0] if wide else table.columns.get("code", "")
    spelled = {key: wanted[key] for key in wanted if key not in REVERSING}
    findings = [
        *report_spelling(file, table.columns, spelled),
        *_report_choice(file, names, table.columns, wanted, renamed),
        *report_pairs(file, pairs, is_stated="date" in renamed),
        *report_other_codes(table, names, wide),
        *_report_float_ids(file, is_float=whole_ids),
        *reversing,
    ]
    return events, find_vocabulary(code_name, constant, since), findings


def _find_date_pairs(
    names: Sequence[str],
    wide: Sequence[str],
    wanted: Mapping[str, Sequence[str]],
    renamed: Mapping[str, str],
) -> dict[str, tuple[str, ...]]:
    """The columns of dates of the columns of codes, {} where one date is that of all."""
    codes = wide or find_names(names, wanted["code"])[:1]
    return find_pairs(names, codes, renamed.get("date")) if codes else {}


def _is_dated(
    wanted: Mapping[str, Sequence[str]], renamed: Mapping[str, str], names: Sequence[str]
) -> bool:
    """Whether a table has columns of subjects and of dates."""
    if not find_names(names, wanted["subject"]):
        return False
    with suppress(UserError):
        wide = find_wide_columns(names, renamed.get("code"))
        if _find_date_pairs(names, wide, wanted, renamed):
            return True
    return bool(find_names(names, wanted["date"]))


def _find_stated_vocabulary(
    names: Collection[str], renamed: Mapping[str, str], meanings: Mapping[str, str]
) -> str | None:
    """The vocabulary of all rows, where `--col vocab` gives one and no column."""
    stated = renamed.get("vocab", "")
    return None if stated in names else meanings.get(words.fold_name(stated))


def _drop_columns(
    wanted: Mapping[str, tuple[str, ...]], unneeded: Collection[str], renamed: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Key -> accepted names, without the keys that are not needed and the columns of reversals
    that `--col KEY=none` leaves out.
    """
    unused = {key for key in REVERSING if renamed.get(key, "").lower() == NO_COLUMN}
    return {key: wanted[key] for key in wanted if key not in unused.union(unneeded)}


def _refuse_two_vocabularies(table: OpenTable, constant: str | None, since: int | None) -> None:
    """Raises UserError (config, exit 2) for a vocabulary beside `--icd10-from`."""
    if since is not None and (constant or "vocab" in table.columns):
        raise usage_error("--icd10-from and a vocabulary are both given", "expected one of them")


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
    words_of_status = reversals.list_words(columns.get("status", ""))
    return reversals.mark_reversals(pl.concat(frames), words_of_status)


def _rename_accepted(
    accepted: Mapping[str, tuple[str, ...]], renamed: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Key -> accepted names, which `--col` replaces."""
    return {key: (renamed[key],) if key in renamed else names for key, names in accepted.items()}


def _find_constants(
    file: str, names: Sequence[str], wanted: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Key -> text of all rows of a file, where its folders state it and no column does."""
    partitions = list_partitions(file)
    constants = {}
    for key, accepted in wanted.items():
        matches = find_names(list(partitions), accepted)
        if matches and not find_names(names, accepted):
            constants[key] = partitions[matches[0]]
    return constants


def _has_float_ids(table: OpenTable, key: str) -> bool:
    """Whether the ids of a table, by its first rows, are whole numbers as tools without empty
    integers write them: 1000.0.
    """
    rows = tables.read_rows(table.path, (table.columns[key],), delimiter=table.delimiter)
    sample = itertools.islice(rows, ID_ROWS)
    ids = [row.cells[0].strip() for row in sample if isinstance(row, tables.TableRow)]
    written = [text for text in ids if text]
    return bool(written) and all(re.fullmatch(FLOAT_ID, text) for text in written)


def _report_float_ids(file: str, *, is_float: bool) -> list[Finding]:
    """A warning that the ids of a file have lost their fraction."""
    problem, rule = "ids are written as 9999.0", "they are read as 9999"
    warning = input_warning(Reason.IDENTIFIER, problem, rule, file=file, field="subject")
    return [warning] if is_float else []


def _report_choice(
    file: str,
    names: Sequence[str],
    columns: Mapping[str, str],
    wanted: Mapping[str, Sequence[str]],
    renamed: Mapping[str, str],
) -> list[Finding]:
    """A warning where several columns may hold the date or the code, and none has been named."""
    findings = []
    for key in ("date", "code"):
        matches = find_names(names, wanted.get(key, ()))
        is_plain = bool(matches) and matches[0].lower() == wanted[key][0]
        if key in columns and key not in renamed and len(matches) > 1 and not is_plain:
            others = " and ".join(map(safe_text, matches[1:]))
            problem = f"the {key} is read from {safe_text(columns[key])}, not from {others}"
            hint = f"Choose with --col {key}=NAME"
            findings.append(input_warning(Reason.HEADER, problem, "", hint, file=file, row=1))
    return findings


def _list_categories(table: OpenTable) -> tuple[str, ...]:
    """Columns whose texts repeat, and that are not read for another purpose as well."""
    others = {name for key, name in table.columns.items() if key not in FEW_TEXTS}
    return tuple({table.columns[key] for key in FEW_TEXTS & set(table.columns)} - others)


class _SubjectFacts(NamedTuple):
    """What tables tell of subjects, as text."""

    frame: pl.DataFrame | None  # a row a subject
    file: str
    advice: Mapping[str, str]  # fact that is not told -> what to give
    spells: pl.DataFrame | None  # times of observation, any number a subject
    spells_file: str


def _has_periods(names: Sequence[str], wanted: Mapping[str, Sequence[str]]) -> bool:
    """Whether a table has columns of subjects and of the start and end of their observation."""
    return all(find_names(names, wanted[key]) for key in ("subject", *PERIOD_DATES))


def _read_subject_facts(
    source: Source, files: PlainFiles, renamed: Mapping[str, str], accounts: TableAccounts
) -> _SubjectFacts:
    """The registered subjects, if tables of them or the claims tell of them."""
    wanted = _rename_accepted(PATIENT_COLUMNS, renamed)
    # the column may have its name in the claims only
    wanted["subject"] = (*wanted["subject"], *SUBJECT_NAMES)
    file, advice, spells = files.claims[0], dict[str, str](), None
    frame: pl.DataFrame | None
    named = dict(renamed)
    if files.periods:  # their columns are there
        named = {key: name for key, name in named.items() if key not in PERIOD_DATES}
    if files.patients:
        file = files.patients[0]
        table, advice = _read_patient_tables(source, files.patients, wanted, named, accounts)
        people, spells = separate_spells(table)
        frame = keep_unique_rows(people, file, accounts, "subject")
        accounts.rows[-1] = replace(accounts.rows[-1], seen=table.height)
    else:
        frame = _read_patients_of_claims(source, files.claims, wanted, named, accounts)
    if files.deaths:
        frame = _add_deaths(frame, _read_deaths(source, files.deaths, wanted, accounts))
    if not files.periods:
        return _SubjectFacts(frame, file, advice, spells, file)
    spells = _read_period_tables(source, files.periods, wanted, accounts)
    return _SubjectFacts(frame, file, advice, spells, files.periods[0])


def _read_period_tables(
    source: Source,
    files: Sequence[str],
    wanted: Mapping[str, Sequence[str]],
    accounts: TableAccounts,
) -> pl.DataFrame:
    """The times of observation of tables of them: subject, obs_start, obs_end."""
    columns = {key: wanted[key] for key in ("subject", *PERIOD_DATES)}
    frames = []
    for path in files:
        frame = _read_ids(open_table(source, path, columns, named=True), "subject", accounts)
        accounts.rows.append(SourceRows(file=path, kind="subjects", seen=frame.height))
        accounts.exclude(
            Reason.IDENTIFIER, frame.filter(pl.col("subject").is_null())["row"], "have no subject"
        )
        frames.append(frame.drop("row").drop_nulls("subject"))
    return pl.concat(frames)


def _make_patients(
    people: _SubjectFacts, forms: Mapping[str, str], accounts: TableAccounts
) -> tuple[pl.DataFrame | None, pl.DataFrame | None]:
    """`ClaimsSource.subjects` and `ClaimsSource.periods`."""
    frame, periods = people.frame, None
    if people.spells is not None:
        spells = read_spells(people.spells, people.spells_file, forms, accounts)
        periods = join_periods(spells, people.spells_file, accounts)
        frame = _add_spans(frame, span_spells(spells))
    if frame is None:
        return None, None
    frame = frame.rename({"subject": "subject_id"})
    return make_subjects(frame, people.file, accounts, forms), periods


def _add_spans(frame: pl.DataFrame | None, spans: pl.DataFrame) -> pl.DataFrame:
    """The subjects with the span of their times of observation, and those whom only these have."""
    if frame is None:
        return spans
    others = frame.drop(PERIOD_DATES, strict=False)
    return others.join(spans, on="subject", how="full", coalesce=True)


def _read_patient_tables(
    source: Source,
    files: Sequence[str],
    wanted: Mapping[str, Sequence[str]],
    renamed: Mapping[str, str],
    accounts: TableAccounts,
) -> tuple[pl.DataFrame, dict[str, str]]:
    """All rows, and what to give for the facts that are not told."""
    frames, names, columns = [], list[str](), dict[str, str]()
    for file in files:
        table = open_table(
            source, file, wanted, set(PATIENT_COLUMNS) - {"subject", *renamed}, named=True
        )
        frames.append(_read_ids(table, "subject", accounts))
        accounts.findings += report_spelling(file, table.columns, wanted)
        accounts.findings += report_unread_dates(table)
        names = list(tables.read_names(table.path, delimiter=table.delimiter))
        columns = table.columns
    frame = pl.concat(frames, how="diagonal")
    advice = {key: _advise_column(key, names, columns, files[0]) for key in ("birth", "sex")}
    return frame, advice


def _read_deaths(
    source: Source,
    files: Sequence[str],
    wanted: Mapping[str, Sequence[str]],
    accounts: TableAccounts,
) -> pl.DataFrame:
    """Subject and death of the tables of deaths."""
    columns = {"subject": wanted["subject"], "death": (*wanted["death"], "date", "datum")}
    frames = [
        _read_ids(open_table(source, file, columns, named=True), "subject", accounts)
        for file in files
    ]
    return keep_unique_rows(pl.concat(frames), files[0], accounts, "subject").drop("row")


def _add_deaths(frame: pl.DataFrame | None, deaths: pl.DataFrame) -> pl.DataFrame:
    """The subjects with the deaths of a table apart, where they have none themselves, and those
    whom only this table has.
    """
    if frame is None:
        return deaths
    joined = frame.join(deaths, on="subject", how="full", coalesce=True, suffix="_apart")
    if "death" not in frame.columns:
        return joined
    return joined.with_columns(pl.coalesce("death", "death_apart")).drop("death_apart")


def _read_ids(table: OpenTable, key: str, accounts: TableAccounts) -> pl.DataFrame:
    """All rows of a table of subjects; its ids without a fraction of 0."""
    frame = table.read()
    if "sex" in table.columns and is_stat_file(table.path):  # 1 may be labelled female
        labels = read_value_labels(table.path, table.columns["sex"])
        frame = frame.with_columns(pl.col("sex").replace(labels))
    ids = frame[key].drop_nulls()
    is_float = ids.len() > 0 and bool(ids.str.contains(FLOAT_ID).all())
    accounts.findings += _report_float_ids(table.file, is_float=is_float)
    if not is_float:
        return frame
    return frame.with_columns(pl.col(key).str.replace(FLOAT_ID, "$1"))


def _advise_column(key: str, names: Sequence[str], columns: Mapping[str, str], file: str) -> str:
    """What to give where a table of patients has no column of `key`; "" where it has one."""
    if key in columns:
        return ""
    similar = words.find_lookalikes(key, set(names) - set(columns.values()))
    if similar:
        return f"Give --col {key}={safe_text(sorted(similar)[0]).strip(QUOTES)}"
    listed = ", ".join(map(safe_text, names[:10]))
    return f"Give --col {key}=NAME: the columns of {file} are {listed}"


def _read_patients_of_claims(
    source: Source,
    files: Sequence[str],
    wanted: Mapping[str, Sequence[str]],
    renamed: Mapping[str, str],
    accounts: TableAccounts,
) -> pl.DataFrame | None:
    """What the claims themselves tell of their subjects on each row: birth, death and sex.

    A fact of which two rows of a subject differ is unknown. Raises UserError: config (exit 2) for a
    column that `--col` names and no table has.
    """
    tables_read = [_read_claim_facts(source, file, wanted) for file in files]
    frames = [frame for frame in tables_read if frame is not None]
    columns = {column for frame in frames for column in frame.columns}
    missing = sorted(set(renamed) & set(PATIENT_COLUMNS) - {"subject"} - columns)
    if missing:
        name = safe_text(renamed[missing[0]])
        raise usage_error(
            f"--col {missing[0]}={name} names no column of the claims",
            "and there is no table of patients",
            "Put patients.csv beside the claims",
        )
    if not frames:
        return None
    return _keep_single_facts(pl.concat(frames, how="diagonal"), files[0], accounts)


def _read_claim_facts(
    source: Source, file: str, wanted: Mapping[str, Sequence[str]]
) -> pl.DataFrame | None:
    """The distinct subject, birth, death and sex of a table of claims, as far as it has them; None
    for one that has none.
    """
    path = source.path(file)
    names = tables.read_names(path, delimiter=find_delimiter(path))
    present = {key: wanted[key] for key in CLAIM_FACTS if find_names(names, wanted[key])}
    if not present or not find_names(names, wanted["subject"]):
        return None
    table = open_table(source, file, {"subject": wanted["subject"], **present})
    frame = pl.concat(block.drop("row").unique() for block in table.read_blocks()).unique()
    if _has_float_ids(table, "subject"):
        frame = frame.with_columns(pl.col("subject").str.replace(FLOAT_ID, "$1"))
    return frame.drop_nulls("subject")


def _keep_single_facts(rows: pl.DataFrame, file: str, accounts: TableAccounts) -> pl.DataFrame:
    """One row for each subject; a fact of which two rows of a subject differ is unknown."""
    columns = [column for column in rows.columns if column != "subject"]
    groups = rows.group_by("subject", maintain_order=True)
    counts = groups.agg(pl.col(columns).drop_nulls().n_unique())
    facts = groups.agg(pl.col(columns).drop_nulls().first())
    for column in columns:
        is_single = counts[column] < 2
        problem = f"subjects have several texts of {column} in their claims"
        accounts.findings += warn_of_rows(
            int((~is_single).sum()), Reason.METADATA, problem, "it counts as unknown", file=file
        )
        facts = facts.with_columns(pl.when(pl.Series(is_single)).then(column).alias(column))
    return facts


def _read_labels(
    source: Source,
    files: Sequence[str],
    renamed: Mapping[str, str],
    options: ClaimsOptions,
    accounts: TableAccounts,
) -> pl.DataFrame | None:
    """The table of labels, if there is one: all its columns, or those of `--label-column`."""
    chosen = parse_label_columns(options)
    file = files[0] if files else ""
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
    frame = _read_ids(table, "subject_id", accounts).with_columns(map(_flag_value, chosen))
    frame = keep_unique_rows(frame, file, accounts)
    labels = parse_labels(frame, table.columns, list(names), accounts)
    if INDEX_DATE in table.columns:
        labels = _read_index_dates(labels, parse_date_forms(options)[INDEX_DATE], accounts)
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
