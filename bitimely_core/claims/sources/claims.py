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
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import NamedTuple

import polars as pl

from bitimely_core.claims import code_cells, dates, reversals
from bitimely_core.claims.claims_reading import ClaimsOptions
from bitimely_core.claims.dates import QUARTER
from bitimely_core.claims.distinct import map_texts
from bitimely_core.claims.label_rules import SOURCES as KINDS
from bitimely_core.claims.sources import words
from bitimely_core.claims.sources.claims_source import ClaimsSource
from bitimely_core.claims.sources.coarse_dates import holds_years
from bitimely_core.claims.sources.code_columns import (
    find_certainties,
    find_versions,
    find_vocabulary,
    match_vocabularies,
    report_certainties,
    report_kinds,
    report_other_codes,
    report_versions,
    split_prefix,
)
from bitimely_core.claims.sources.columns import (
    SUBJECT_DATE_COLUMNS,
    DateCounts,
    assign_vocabulary,
    find_names,
    open_table,
    peek_texts,
    read_first,
    reformat_dates,
    refuse_several_forms,
    report_spelling,
    report_zones,
    warn_of_rows,
)
from bitimely_core.claims.sources.date_parts import is_quarter, join_date_parts, report_date_parts
from bitimely_core.claims.sources.dated_codes import Pairs, join_cells, report_pairs, spread_lists
from bitimely_core.claims.sources.enrolment_months import read_months, report_months
from bitimely_core.claims.sources.id_spellings import report_id_parts
from bitimely_core.claims.sources.observation_tables import (
    PERIOD_DATES,
    join_periods,
    read_spells,
    separate_spells,
    span_spells,
)
from bitimely_core.claims.sources.plain_files import (
    MAP_FILE,
    AcceptedNames,
    Names,
    PlainFiles,
    find_kinds,
    find_plain_files,
    list_names,
    list_partitions,
    report_other_formats,
    report_patients,
    report_unread,
)
from bitimely_core.claims.sources.source_options import (
    LabelColumn,
    parse_date_forms,
    parse_label_columns,
    parse_pairs,
    parse_switch_day,
    parse_vocabularies,
)
from bitimely_core.claims.sources.source_survey import EventReader, SourceSurvey, unpivot_codes
from bitimely_core.claims.sources.source_table import (
    EventBlock,
    OpenTable,
    SourceTable,
    Stated,
    count_dropped,
)
from bitimely_core.claims.sources.subject_tables import (
    TableAccounts,
    decode_sexes,
    keep_unique_rows,
    make_subjects,
    parse_labels,
    report_unread_dates,
)
from bitimely_core.claims.sources.vital_states import (
    close_vital_states,
    is_discharge,
    read_vital_states,
    report_discharges,
)
from bitimely_core.claims.unknown_dates import DEFAULTS, blank_dates
from bitimely_core.errors import Finding, Reason, input_error, input_warning, safe_text, usage_error
from bitimely_core.formats.sniffer import find_delimiter
from bitimely_core.formats.source import Source, locate_errors
from bitimely_core.types import drop_empty, leave_out

EVENT_COLUMNS = {
    **words.list_names("claims"),
    "status": reversals.STATUS_NAMES,
    "amount": reversals.AMOUNT_NAMES,
}
OPTIONAL_COLUMNS = {"vocab", "source", "certainty", "claim", "position", "status", "amount"}
REVERSING = ("status", "amount")  # columns that are used where they reverse claims
NO_COLUMN = "none"  # --col amount=none: the column is not used
PEEKED_ROWS = 100_000  # by which a column is judged
PEEKED_DATES = 1000  # by which its form is
SUBJECT_NAMES = EVENT_COLUMNS["subject"]
PATIENT_COLUMNS = {"subject": SUBJECT_NAMES, **words.list_names("patients")}
FEW_TEXTS = {"date", "code", "vocab", "source", "certainty"}  # columns whose texts repeat
# that rows of claims may tell of their subject
CLAIM_FACTS = ("birth", "death", "vital", "last_contact", "sex")
INDEX_DATE = "index_date"
SCHEMED = re.compile(r"([^:]+):(.*)")  # a code of i2b2 behind its scheme: DEM|SEX:f
SCHEMED_COLUMN = "conceptcd"  # folded
ICD_LIKE = re.compile(r"icd|dx|diag", re.IGNORECASE)  # in a scheme: of diagnoses
FLOAT_ID = r"^(\d+)\.0+$"
QUOTES = "'\""


class _Columns(NamedTuple):
    """Where a table of claims has its codes and dates, where each is in several columns."""

    wide: Sequence[str]  # of codes
    pairs: Pairs  # columns of codes with dates of their own
    parts: Sequence[str]  # of year, month and day
    versions: Sequence[str]  # of the vocabularies of `wide`
    certainties: Sequence[str]  # of the certainties of `wide`

    @property
    def dates(self) -> tuple[str, ...]:
        """The columns of dates, or of parts of them."""
        return (*itertools.chain(*self.pairs.values()), *self.parts)

    def list_names(self) -> dict[str, Sequence[str]]:
        """Key -> name of the first of the dates, and of the versions of a single code."""
        named = {"date": self.dates[:1], "vocab": () if self.wide else self.versions}
        return drop_empty(named)

    @property
    def beside(self) -> tuple[str, ...]:
        """The columns that are read beside those with keys."""
        return (*self.dates[len(self.parts) > 0 :], *self.versions, *self.certainties)


@dataclass(frozen=True, kw_only=True)
class _BlockPlan:
    """How a block of a table of claims becomes events."""

    columns: _Columns
    wide_vocabularies: Mapping[int, str]  # number of such a column -> the vocabulary of its name
    kinds: Mapping[str, str]  # word of the column `source`, in lower case -> a kind of claims
    vocabularies: Mapping[str, str]  # folded word of the column `vocab` -> a vocabulary
    form: str  # of dates
    since: int | None  # day from which on codes are ICD-10
    constants: Mapping[str, str]  # key -> text of all rows, as the folders of the file state it
    whole_ids: bool  # ids are written as numbers with a fraction of 0
    words_of_status: Mapping[str, int]  # word of the column `status` -> kind of a row
    doubts: Collection[str]  # words of the column `certainty` for what was not diagnosed
    has_schemes: bool  # each code stands behind its vocabulary, as in i2b2

    def __call__(self, frame: pl.DataFrame) -> EventBlock:
        """Columns under the names of `ClaimsSource.events`, one row for each code."""
        events = frame.with_columns(pl.lit(text).alias(key) for key, text in self.constants.items())
        events = events.rename({"subject": "subject_id"})
        events = self._place_codes(events)
        if self.whole_ids:
            events = events.with_columns(pl.col("subject_id").str.replace(FLOAT_ID, "$1"))
        if self.columns.parts:
            events = join_date_parts(events, self.columns.parts)
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
            events = events.filter(pl.col("vocab").cast(pl.String).ne_missing(words.NO_DIAGNOSIS))
            dropped = count_dropped(Reason.WRONG_VOCABULARY, rows - events.height)
        rows, events = events.height, self._drop_doubted(events)
        dropped |= count_dropped(Reason.NOT_DIAGNOSED, rows - events.height)
        if "source" in events.columns:
            events = events.with_columns(_translate_words(events["source"], self.kinds, _trim))
        if not set(REVERSING).isdisjoint(events.columns):
            events = reversals.mark_reversals(events, self.words_of_status)
        return EventBlock(events, dropped)

    def _place_codes(self, events: pl.DataFrame) -> pl.DataFrame:
        """One row for each code, with its place among those of the claim as a number."""
        if self.columns.pairs:
            return self._pair_dates(events)
        if self.columns.wide:
            return self._unpivot(events, self.columns.wide)
        if "position" not in events.columns:
            return events
        position = pl.col("position").str.strip_chars().cast(pl.Int16, strict=False)
        return events.with_columns(position)

    def _drop_doubted(self, events: pl.DataFrame) -> pl.DataFrame:
        """The rows without those that a column of certainties marks as not diagnosed."""
        if "certainty" not in events.columns:
            return events
        certainty = pl.col("certainty").cast(pl.String).str.strip_chars().str.to_lowercase()
        return events.filter(~certainty.is_in(list(self.doubts)).fill_null(value=False))

    def _pair_dates(self, events: pl.DataFrame) -> pl.DataFrame:
        """One row for each code, with its own date."""
        events, columns = spread_lists(events.drop("code", strict=False), self.columns.pairs)
        return join_cells(self._unpivot(events, columns), "date", self.columns.dates)

    def _split_prefixes(self, events: pl.DataFrame) -> pl.DataFrame:
        """Vocabulary and code of cells that hold both, as ICD10CM:E11.9, in two columns."""
        if "vocab" in events.columns or "code" not in events.columns or self.since is not None:
            return events

        codes = events["code"]
        if not any(self._split_prefix(text)[0] for text in codes.unique()):
            return events
        vocab = map_texts(codes, lambda text: self._split_prefix(text)[0], pl.String)
        code = map_texts(codes, lambda text: self._split_prefix(text)[1], codes.dtype)
        return events.with_columns(code, vocab=vocab)

    def _split_prefix(self, text: str | None) -> tuple[str | None, str | None]:
        """Vocabulary and code of a cell; no vocabulary where the cell has none."""
        vocab, code = split_prefix(text, self.vocabularies)
        if vocab:
            return vocab, code
        schemed = SCHEMED.fullmatch(text) if text and self.has_schemes else None
        if schemed is None:
            return None, text
        return schemed[1] if ICD_LIKE.search(schemed[1]) else words.NO_DIAGNOSIS, schemed[2]

    def _unpivot(self, events: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
        """One row for each code, with the vocabulary that its column states where no other does."""
        events = unpivot_codes(events, columns)
        events = events.filter(~map_texts(events["code"], code_cells.is_empty, pl.Boolean))
        if self.columns.certainties:
            events = join_cells(events, "certainty", self.columns.certainties)
        if self.columns.versions:
            return join_cells(events, "vocab", self.columns.versions)
        if not self.wide_vocabularies or "vocab" in events.columns:
            return events
        vocab = pl.col("position").replace_strict(
            self.wide_vocabularies, default=None, return_dtype=pl.String
        )
        return events.with_columns(vocab=vocab)


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


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What is read, by which names, and the survey of all of it."""

    source: Source
    options: ClaimsOptions
    accepted: AcceptedNames
    survey: SourceSurvey

    @property
    def renamed(self) -> Mapping[str, str]:
        """Key of a column -> its name, by `--col`."""
        return self.accepted.renamed

    @property
    def subject_names(self) -> tuple[str, ...]:
        """Of tables beside the claims: the name of `--col` may be that in the claims only."""
        return (*self.accepted.patients["subject"], *SUBJECT_NAMES)


def read_claims(source: Source, options: ClaimsOptions, *, once: bool = False) -> ClaimsSource:
    """Claims in plain tables.

    Options: col, source_value, source_vocab, label_column (lists of texts); default_source,
    date_format, icd10_from. Raises UserError: what cannot be read or trusted (exit 4), options that
    are not understood (exit 2).

    `once`: the claims are surveyed as `ClaimsSource.read` reads them. Without it, or with a
    `date_format`, they are surveyed here.
    """
    renamed = parse_pairs(options, "col", {*EVENT_COLUMNS, *PATIENT_COLUMNS})
    accepted = AcceptedNames(
        renamed,
        events=_rename_accepted(EVENT_COLUMNS, renamed),
        patients=_rename_accepted(PATIENT_COLUMNS, renamed),
    )
    files = find_plain_files(source, accepted)
    survey = SourceSurvey(counts_subjects=bool(files.labels))
    request = _Request(source=source, options=options, accepted=accepted, survey=survey)
    source_tables = _open_events(request, files.claims)
    answers = ["truth.csv"] if "ledger.json" in source.files else []  # of made-up claims
    unread = report_unread(files, [*options.phecode_map, *answers])
    survey.findings += [*report_patients(files), *unread, *report_other_formats(source, files)]
    people = _read_subject_facts(request, files)
    forms = parse_date_forms(options)
    _refuse_forms(source_tables, people, forms)
    # two digits of a year of birth and the end of an observation go by the last day of the claims
    if not once or any(forms.values()) or people.spells is not None:
        survey.read_all(source_tables)
    patients, periods = _make_patients(people, forms, survey)
    maps = [path for path in source.files if PurePosixPath(path).name.lower() == MAP_FILE]
    row_facts = {"records": survey.records} if any(table.wide for table in source_tables) else {}
    return ClaimsSource(
        events=EventReader(source_tables),
        survey=survey,
        subjects=patients,
        labels=_read_labels(request, files.labels),
        source=options.default_source or "outpatient",
        map_files=maps[:1],
        facts=row_facts,
        periods=periods,
        advice=people.advice,
    )


def _refuse_forms(
    source_tables: Sequence[SourceTable], people: _SubjectFacts, forms: Mapping[str, str]
) -> None:
    """Raises UserError: as `refuse_several_forms`, of first rows of the claims and of people."""
    columns = dict[str, tuple[str, pl.Series]]()
    told = [frame for frame in (people.frame, people.spells) if frame is not None]
    for frame, key in itertools.product(told, SUBJECT_DATE_COLUMNS):
        if key in frame.columns and not holds_years(frame[key]):
            columns[key] = people.file, frame[key].drop_nulls().head(PEEKED_DATES)
    table = source_tables[0].table
    name = table.columns.get("date", "")
    if name and not (source_tables[0].beside or is_quarter(name)):
        texts = peek_texts(table.path, name, table.delimiter)
        columns["date"] = table.file, pl.Series(texts, dtype=pl.String)
    for key, (file, column) in columns.items():
        with locate_errors(file):
            columns[key] = file, reformat_dates(column, forms[key])
    refuse_several_forms(columns)


def _open_events(request: _Request, files: Sequence[str]) -> list[SourceTable]:
    """The tables of claims. What states the vocabulary of the first is entered in the survey."""
    kinds = {} if "source" in request.renamed else find_kinds(files)
    opened = [_open_events_table(request, file, kinds.get(file, "")) for file in files]
    request.survey.vocab, request.survey.stated = opened[0][1]
    reverses = any(not set(REVERSING).isdisjoint(table.table.columns) for table, _ in opened)
    return [
        # each table states its vocabulary, by a name of its columns
        replace(table, reverses=reverses, vocab="" if vocab == request.survey.vocab else vocab)
        for table, (vocab, _) in opened
    ]


def _open_events_table(
    request: _Request, file: str, kind: str
) -> tuple[SourceTable, tuple[str, Stated]]:
    """A table of claims, and the vocabulary of its rows without one. `kind`: of its rows, by its
    name; "" where it states none.
    """
    options, renamed, names = request.options, request.renamed, list_names(request.source, file)
    meanings = words.translate_words(parse_vocabularies(options), "vocabularies")
    constant = _find_stated_vocabulary(names, renamed, meanings)
    since = parse_switch_day(options)
    is_stated = constant is not None or since is not None
    columns = _find_columns(request, file, {} if is_stated else meanings)
    wanted = {**request.accepted.events, **columns.list_names()}
    constants = _find_constants(file, names, wanted, kind)
    unneeded = {*constants, *["vocab"] * bool(constant), *["code"] * bool(columns.wide)}
    wanted = _drop_columns(wanted, unneeded, renamed)
    optional = OPTIONAL_COLUMNS - set(renamed)
    table = open_table(request.source, file, wanted, optional, codes=columns.wide, named=True)
    table, reversing = _choose_reversing(table, set(renamed))
    _refuse_two_vocabularies(table, constant, since)
    whole_ids = "subject" in table.columns and _has_float_ids(table, "subject")
    certainties = (*columns.certainties, table.columns.get("certainty", ""))
    plan = _BlockPlan(
        columns=columns,
        wide_vocabularies={} if is_stated else match_vocabularies(columns.wide),
        kinds={kind: kind for kind in KINDS} | parse_pairs(options, "source_value"),
        vocabularies=meanings,
        form=_find_form(options, table, columns),
        since=since,
        constants=constants,
        whole_ids=whole_ids,
        words_of_status=reversals.list_words(table.columns.get("status", "")),
        doubts=_list_doubts(certainties[0]),
        has_schemes=words.fold_name(table.columns.get("code", "")) == SCHEMED_COLUMN,
    )
    events = SourceTable(
        table=table,
        shape=plan,
        wide=tuple(columns.wide),
        beside=columns.beside,
        dropped_note="are of vocabularies without diagnoses",
        dated=(file, "date") if "date" in constants else None,
        categories=_list_categories(table),
    )
    request.survey.findings += [
        *report_spelling(file, table.columns, _drop_columns(wanted, REVERSING, {})),
        *_report_choice(table, names, wanted, renamed),
        *_report_columns(table, columns, renamed),
        *_report_others(request, table, columns, constants),
        *([] if is_stated or columns.versions else report_versions(table, columns.wide, meanings)),
        *_report_kind(file, kind * (constants.get("source") == kind)),
        *_report_float_ids(file, is_float=whole_ids),
        *report_id_parts(table),
        *reversing,
    ]
    code_name = columns.wide[0] if columns.wide else table.columns.get("code", "")
    return events, find_vocabulary(code_name, constant, since)


def _find_columns(request: _Request, file: str, meanings: Mapping[str, str]) -> _Columns:
    """The columns of codes and dates. `meanings`: word -> vocabulary, of the columns of
    vocabularies; {} where all rows have one that is stated.
    """
    names, accepted = list_names(request.source, file), request.accepted
    wide = accepted.find_wide_columns(names)
    pairs = accepted.find_date_pairs(names, wide)
    wide = tuple(pairs) or wide
    has_certainty = "certainty" in request.renamed or find_names(
        names, accepted.events["certainty"]
    )
    parts = () if pairs else accepted.find_date_parts(names)
    versions = _find_versions(request, file, wide, meanings) if meanings else ()
    certainties = () if has_certainty else find_certainties(names, wide)
    return _Columns(wide, pairs, parts, versions, certainties)


def _find_form(options: ClaimsOptions, table: OpenTable, columns: _Columns) -> str:
    """The form of the dates: as an option states it, or of quarters by the name of their column."""
    is_named = not columns.parts and is_quarter(table.columns.get("date", ""))
    return parse_date_forms(options)["date"] or QUARTER * is_named


def _report_columns(
    table: OpenTable, columns: _Columns, renamed: Mapping[str, str]
) -> list[Finding]:
    """What is said of dates in several columns, and of columns that are not read."""
    is_asked = columns.certainties or "certainty" in renamed
    return [
        *report_pairs(table.file, columns.pairs, is_stated="date" in renamed),
        *report_date_parts(table.file, columns.parts),
        *([] if is_asked else report_certainties(table)),
        *([] if "vital" in renamed else report_discharges(table)),
    ]


def _report_others(
    request: _Request, table: OpenTable, columns: _Columns, constants: Collection[str]
) -> list[Finding]:
    """What is said of columns of codes and of kinds of claims that are not read. The first is also
    the way out of a source without any diagnosis.
    """
    others = report_other_codes(table, columns.wide)
    request.survey.hint = request.survey.hint or "".join(finding.hint for finding in others)
    if "source" in constants:
        return others
    return [*others, *report_kinds(table, request.options.default_source or "outpatient")]


def _drop_columns(
    wanted: Names, unneeded: Collection[str], renamed: Mapping[str, str]
) -> dict[str, Sequence[str]]:
    """Key -> accepted names, without the keys that are not needed and the columns that
    `--col KEY=none` leaves out.
    """
    optional = (*REVERSING, "certainty", "source")
    unused = {key for key in optional if renamed.get(key, "").lower() == NO_COLUMN}
    return {key: wanted[key] for key in wanted if key not in unused.union(unneeded)}


def _find_versions(
    request: _Request, file: str, wide: Sequence[str], meanings: Mapping[str, str]
) -> tuple[str, ...]:
    """The columns of the vocabularies of the columns of codes, where no column of a known name
    holds those of the rows. Years of an edition are none.
    """
    names, accepted = list_names(request.source, file), request.accepted.events
    if find_names([*names, *list_partitions(file)], accepted["vocab"]):
        return ()
    path = request.source.path(file)
    versions = find_versions(names, wide or find_names(names, accepted["code"])[:1])
    mark = find_delimiter(path) if versions else ""
    texts = itertools.chain(*(peek_texts(path, name, mark) for name in versions))
    return versions if all(words.fold_name(text) in meanings for text in texts) else ()


def _find_stated_vocabulary(
    names: Collection[str], renamed: Mapping[str, str], meanings: Mapping[str, str]
) -> str | None:
    """The vocabulary of all rows, where `--col vocab` gives one and no column. A column of its
    name holds the codes: `icd10`.
    """
    stated = renamed.get("vocab", "")
    is_column = stated in names and stated.lower() not in EVENT_COLUMNS["code"]
    return None if is_column else meanings.get(words.fold_name(stated))


def _list_doubts(column: str) -> list[str]:
    """Words of a column of certainties, in lower case, for what was not diagnosed."""
    certainties = words.WORDS["certainties"]
    name = words.fold_name(column)
    if "prefix" in name:
        return certainties["prefixed"]
    is_flag = name.startswith(tuple(certainties["flags"]))
    return certainties["not_diagnosed"] + certainties["yes"] * is_flag


def _choose_reversing(table: OpenTable, named: set[str]) -> tuple[OpenTable, list[Finding]]:
    """The table with its columns of reversals, and what is to be said of them.

    Columns that an option names are used. Others are where they hold reversals of other rows, by
    the first rows; a column of negative amounts that reverses none is named.
    """
    guessed = [key for key in REVERSING if key in table.columns and key not in named]
    if not guessed:
        return table, []
    columns = leave_out(table.columns, guessed)
    without = table._replace(columns=columns)
    keys = [key for key in ("subject", "date", "code") if key in columns]
    marked = _peek_reversals(table, keys)
    if not (marked["reversal"] != reversals.USUAL).any():
        return without, []
    is_used = reversals.is_reversing(marked, keys)
    finding = _describe_reversing(table, guessed, is_used=is_used)
    return table if is_used else without, [finding]


def _describe_reversing(table: OpenTable, guessed: Sequence[str], *, is_used: bool) -> Finding:
    """A line on columns of reversals that no option names."""
    names = " and ".join(safe_text(table.columns[key]) for key in guessed)
    if is_used:
        problem, rule = f"{names} mark reversals of other rows", "both are left out"
        hint = f"Give {' '.join(f'--col {key}={NO_COLUMN}' for key in guessed)} to use them"
    else:
        problem, rule = (
            f"{names} may mark reversed or replaced claims",
            "they are used as all others",
        )
        flags = " ".join(f"--col {key}={safe_text(table.columns[key])}" for key in guessed)
        hint = f"Give {flags} to leave them out"
    return input_warning(Reason.REVERSED, problem, rule, hint, file=table.file)


def _peek_reversals(table: OpenTable, keys: Sequence[str]) -> pl.DataFrame:
    """The first rows of some columns, under their keys, with the columns of reversals."""
    wanted = [*keys, *(key for key in REVERSING if key in table.columns)]
    columns = {key: table.columns[key] for key in wanted}
    first = read_first(table._replace(columns=columns).read_blocks(), wanted, PEEKED_ROWS)
    words_of_status = reversals.list_words(columns.get("status", ""))
    return reversals.mark_reversals(first, words_of_status)


def _rename_accepted(
    accepted: Mapping[str, tuple[str, ...]], renamed: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Key -> accepted names, which `--col` replaces."""
    return {key: (renamed[key],) if key in renamed else names for key, names in accepted.items()}


def _find_constants(file: str, names: Sequence[str], wanted: Names, kind: str) -> dict[str, str]:
    """Key -> text of all rows of a file, where its folders state it and no column does. `kind`: of
    its rows, where its name states one.
    """
    partitions = list_partitions(file)
    constants = {"source": kind} if kind and not find_names(names, wanted["source"]) else {}
    for key, accepted in wanted.items():
        matches = find_names(list(partitions), accepted)
        if matches and not find_names(names, accepted):
            constants[key] = partitions[matches[0]]
    return constants


def _has_float_ids(table: OpenTable, key: str) -> bool:
    """Whether the ids of a table, by its first rows, are whole numbers as tools without empty
    integers write them: 1000.0.
    """
    texts = peek_texts(table.path, table.columns[key], table.delimiter)
    return bool(texts) and all(re.fullmatch(FLOAT_ID, text) for text in texts)


def _report_float_ids(file: str, *, is_float: bool) -> list[Finding]:
    """A warning that the ids of a file have lost their fraction."""
    problem, rule = "ids are written as 9999.0", "they are read as 9999"
    warning = input_warning(Reason.IDENTIFIER, problem, rule, file=file, field="subject")
    return [warning] if is_float else []


def _report_choice(
    table: OpenTable, names: Sequence[str], wanted: Names, renamed: Mapping[str, str]
) -> list[Finding]:
    """A warning where several columns may hold the date or the code, and none has been named."""
    findings = []
    for key in ("date", "code"):
        if key in renamed or key not in table.columns:
            continue
        chosen = table.columns[key]
        others = [safe_text(name) for name in find_names(names, wanted[key]) if name != chosen]
        if others and chosen.lower() != wanted[key][0]:
            passed_over = " and ".join(others)
            problem = f"the {key} is read from {safe_text(chosen)}, not from {passed_over}"
            hint = f"Choose with --col {key}=NAME"
            findings.append(input_warning(Reason.HEADER, problem, "", hint, file=table.file, row=1))
    return findings


def _report_kind(file: str, kind: str) -> list[Finding]:
    """A warning that the name of a file states the kind of its rows."""
    rule = "by the name of the file"
    hint = "Rename the files, or give a column of kinds, if that is wrong"
    warning = input_warning(Reason.HEADER, f"rows are {kind}", rule, hint, file=file)
    return [warning] if kind else []


def _refuse_two_vocabularies(table: OpenTable, constant: str | None, since: int | None) -> None:
    """Raises UserError (config, exit 2) for a vocabulary beside `--icd10-from`."""
    if since is not None and (constant or "vocab" in table.columns):
        raise usage_error("--icd10-from and a vocabulary are both given", "expected one of them")


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


def _read_subject_facts(request: _Request, files: PlainFiles) -> _SubjectFacts:
    """The registered subjects, if tables of them or the claims tell of them."""
    wanted = {**request.accepted.patients, "subject": request.subject_names}
    # the columns of periods are in tables of their own, where there are some
    named = set(request.renamed) - set(PERIOD_DATES if files.periods else ())
    if files.patients:
        told = _read_patient_facts(request, files, wanted, named)
    else:
        file = files.claims[0]
        frame = _read_patients_of_claims(request, files.claims, wanted, named)
        advice = _advise_ages(list_names(request.source, file))
        told = _SubjectFacts(frame, file, advice, None, file)
    frame, file = told.frame, told.file
    for key, paths in files.facts.items():
        file = paths[0] if frame is None else file
        frame = _add_facts(frame, _read_fact_tables(request, key, paths, wanted), key)
    frame = close_vital_states(frame, file, request.survey)
    if not files.periods:
        return _SubjectFacts(frame, file, told.advice, told.spells, file)
    spells = _read_period_tables(request, files.periods)
    return _SubjectFacts(frame, file, told.advice, spells, files.periods[0])


def _read_patient_facts(
    request: _Request, files: PlainFiles, wanted: Mapping[str, Sequence[str]], named: set[str]
) -> _SubjectFacts:
    """What the tables of patients tell of them; `wanted`: what is told of a subject -> names of its
    columns, `named`: those that an option names.
    """
    file, ends_stays = files.patients[0], is_discharge(request.renamed.get("vital", ""))
    unread = {"vital"} if ends_stays else set[str]()
    columns = leave_out(wanted, unread)
    table, advice = _read_patient_tables(request, files.patients, columns, named - unread)
    people, spells = separate_spells(table)
    if len(files.patients) > 1:  # a death may be in the file of its year alone
        facts = pl.all().exclude("subject", "row")
        people = people.with_columns(facts.forward_fill().backward_fill().over("subject"))
    frame = keep_unique_rows(people, file, request.survey, "subject")
    request.survey.rows[-1] = replace(request.survey.rows[-1], seen=table.height)
    if ends_stays:
        frame = _add_facts(frame, _read_deaths_in_hospital(request, files.claims), "death")
    return _SubjectFacts(frame, file, advice, spells, file)


def _read_fact_tables(
    request: _Request, key: str, paths: Sequence[str], wanted: Mapping[str, Sequence[str]]
) -> pl.DataFrame:
    """Subject and death, birth or sex, of tables of it apart; `wanted` as of
    `_read_patient_facts`.
    """
    names = (*wanted[key], *("date", "datum") * (key == "death"))
    columns = {"subject": wanted["subject"], key: names}
    rows = pl.concat(_read_subject_rows(request, path, columns) for path in paths)
    if key != "death":  # they may stand on any number of rows
        rows = _keep_single_facts(rows.drop("row"), paths[0], request.survey)
        rows = rows.with_row_index("row", 1)
    return keep_unique_rows(rows.drop_nulls(key), paths[0], request.survey, "subject").drop("row")


def _advise_ages(names: Sequence[str]) -> dict[str, str]:
    """How to give births where claims have ages at them."""
    ages = find_names(names, words.WORDS["ages"]["years"])
    if not ages:
        return {}
    advice = (
        "Put patients.csv with patient_id, birth_date and sex beside the claims: the year of a "
        f"claim less its {safe_text(ages[0])} is near that of the birth"
    )
    return {"birth": advice}


def _read_deaths_in_hospital(request: _Request, files: Sequence[str]) -> pl.DataFrame:
    """Subject and death of those whose claims tell how a stay has ended, where they have died."""
    wanted = {key: request.accepted.patients[key] for key in ("subject", "vital")}
    told = _read_patients_of_claims(request, files, wanted, {"vital"})
    deaths = pl.DataFrame(schema={"subject": pl.String, "death": pl.String})
    return deaths if told is None else told.select(deaths.columns).drop_nulls()


def _read_subject_rows(request: _Request, file: str, columns: Names) -> pl.DataFrame:
    """All rows of a table of subjects whose columns are all there."""
    table = open_table(request.source, file, columns, named=True)
    return _read_ids(table, "subject", request.survey)


def _read_period_tables(request: _Request, files: Sequence[str]) -> pl.DataFrame:
    """The times of observation of tables of them: subject, obs_start, obs_end."""
    frames = []
    for file in files:
        subject = {"subject": request.subject_names}
        months = request.accepted.find_months(file, list_names(request.source, file))
        if months is None:
            columns = {**request.accepted.list_period_names(file), **subject}
            frame = _read_subject_rows(request, file, columns)
        else:
            columns = {**{name: (name,) for name in months.names}, **subject}
            frame = read_months(_read_subject_rows(request, file, columns), months)
            request.survey.findings += report_months(file, months, frame)
        frames.append(request.survey.enter_subjects(frame, file, "subject").drop("row"))
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
    request: _Request, files: Sequence[str], wanted: Names, named: set[str]
) -> tuple[pl.DataFrame, dict[str, str]]:
    """All rows, and what to give for the facts that are not told."""
    frames, optional = [], set(PATIENT_COLUMNS) - {"subject", *named}
    opened = [open_table(request.source, file, wanted, optional, named=True) for file in files]
    for table in opened:
        frame = _read_ids(table, "subject", request.survey)
        frames.append(read_vital_states(frame, table.columns, table.file, request.survey))
        request.survey.findings += report_spelling(table.file, table.columns, wanted)
        request.survey.findings += report_unread_dates(table)
    advice = {key: _advise_column(key, opened[-1], files[0]) for key in ("birth", "sex")}
    return pl.concat(frames, how="diagonal"), advice


def _add_facts(frame: pl.DataFrame | None, facts: pl.DataFrame, key: str) -> pl.DataFrame:
    """The subjects with the facts of a table apart, where they have none themselves, and those
    whom only this table has.
    """
    if frame is None:
        return facts
    joined = frame.join(facts, on="subject", how="full", coalesce=True, suffix="_apart")
    if key not in frame.columns:
        return joined
    return joined.with_columns(pl.coalesce(key, f"{key}_apart")).drop(f"{key}_apart")


def _read_ids(table: OpenTable, key: str, accounts: TableAccounts) -> pl.DataFrame:
    """All rows of a table of subjects; its ids without a fraction of 0."""
    frame = decode_sexes(table.read(), table.columns)
    ids = frame[key].drop_nulls()
    is_float = ids.len() > 0 and bool(ids.str.contains(FLOAT_ID).all())
    accounts.findings += _report_float_ids(table.file, is_float=is_float)
    return frame.with_columns(pl.col(key).str.replace(FLOAT_ID, "$1")) if is_float else frame


def _advise_column(key: str, table: OpenTable, file: str) -> str:
    """What to give where a table of patients has no column of `key`; "" where it has one."""
    if key in table.columns:
        return ""
    unread = table.list_unread()
    if similar := words.find_lookalikes(key, unread):
        return f"Give --col {key}={safe_text(min(similar)).strip(QUOTES)}"
    if not unread:
        return f"Add a column {PATIENT_COLUMNS[key][0]} to {file}"
    listed = ", ".join(map(safe_text, table.list_names()[:10]))
    return f"Give --col {key}=NAME: the columns of {file} are {listed}"


def _read_patients_of_claims(
    request: _Request, files: Sequence[str], wanted: Names, named: set[str]
) -> pl.DataFrame | None:
    """What the claims themselves tell of their subjects on each row: birth, death and sex.

    A fact of which two rows of a subject differ is unknown. Raises UserError: config (exit 2) for a
    column that `--col` names and no table has.
    """
    wanted = wanted if "death" in named else _drop_discharges(wanted)
    facts = [_read_claim_facts(request, file, wanted) for file in files]
    frames = [frame for frame in facts if frame is not None]
    headers = [list_names(request.source, file) for file in files]
    names = list(itertools.chain.from_iterable(headers))
    told = {key for key in CLAIM_FACTS if find_names(names, wanted.get(key, ()))}
    missing = sorted(named & set(PATIENT_COLUMNS) - {"subject"} - told)
    if missing:
        raise usage_error(
            f"--col {missing[0]}={safe_text(request.renamed[missing[0]])} names no column of the "
            "claims",
            "and there is no table of patients",
            "Put patients.csv beside the claims",
        )
    if not frames:
        return None
    return _keep_single_facts(pl.concat(frames, how="diagonal"), files[0], request.survey)


def _drop_discharges(wanted: Names) -> Names:
    """Accepted names without those of deaths that are of discharges in claims, as ddate."""
    days = words.WORDS["vital"]["days_of_discharge"]
    return {**wanted, "death": [name for name in wanted.get("death", ()) if name not in days]}


def _read_claim_facts(request: _Request, file: str, wanted: Names) -> pl.DataFrame | None:
    """The distinct subject, birth, death and sex of a table of claims, as far as it has them; None
    for one that has none.
    """
    source, names = request.source, list_names(request.source, file)
    present = {key: wanted[key] for key in CLAIM_FACTS if find_names(names, wanted.get(key, ()))}
    if not present or not find_names(names, wanted["subject"]):
        return None
    ends_stays = any(map(is_discharge, present.get("vital", ())))
    if ends_stays:  # a stay is no end of the observation
        days = (*words.WORDS["vital"]["days_of_discharge"], *request.accepted.events["date"])
        present["last_contact"] = find_names(names, days)[:1]
    table = open_table(source, file, {"subject": wanted["subject"], **present})
    frame = pl.concat(block.drop("row").unique() for block in table.read_blocks()).unique()
    frame = decode_sexes(frame, table.columns)
    if _has_float_ids(table, "subject"):
        frame = frame.with_columns(pl.col("subject").str.replace(FLOAT_ID, "$1"))
    frame = read_vital_states(frame, table.columns, file, request.survey)
    frame = frame.drop("obs_end") if ends_stays else frame
    return frame.drop_nulls("subject").unique()


def _keep_single_facts(rows: pl.DataFrame, file: str, accounts: TableAccounts) -> pl.DataFrame:
    """One row for each subject; a fact of which two rows of a subject differ is unknown."""
    texts = pl.all().drop_nulls()  # of all facts of a subject
    groups = rows.group_by("subject", maintain_order=True)
    several = groups.agg(texts.n_unique() > 1).drop("subject").sum()
    for column in several:
        problem = f"subjects have several texts of {column.name} on their rows"
        accounts.findings += warn_of_rows(
            column[0], Reason.METADATA, problem, "it counts as unknown", file=file
        )
    return groups.agg(pl.when(texts.n_unique() < 2).then(texts.first()))


def _read_labels(request: _Request, files: Sequence[str]) -> pl.DataFrame | None:
    """The table of labels, if there is one: all its columns, or those of `--label-column`."""
    options, accounts = request.options, request.survey
    chosen = parse_label_columns(options)
    if chosen and not files:
        raise usage_error("--label-column is given", "but the folder has no table of labels")
    if any(label.year for label in chosen):
        raise usage_error("--label-column with a year has no meaning with --source claims")
    if not files:
        return None
    file = files[0]
    wanted = {"subject_id": request.subject_names, INDEX_DATE: (INDEX_DATE,)}
    table = open_table(request.source, file, wanted, {INDEX_DATE})
    names = _list_labels(table, chosen)
    table = open_table(request.source, file, {**wanted, **names}, {INDEX_DATE})
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
    columns = table.list_unread()
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
