"""Reads OMOP CDM 5.2 to 5.4: the source concepts of conditions, and the V, E and Z codes that its
rules of domains put into three other tables.

Standard concepts (SNOMED) are read with `--codes all` alone. Without a table of concepts, or
without a concept, the source value is read as a code. The other three tables hold procedure codes
too: a value of theirs is used only if it can only be an ICD code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import polars as pl

from bitimely_core.claims import dates
from bitimely_core.claims.claims_reading import ClaimsOptions
from bitimely_core.claims.codes import MARK, OTHER
from bitimely_core.claims.distinct import map_texts
from bitimely_core.claims.sources import words
from bitimely_core.claims.sources.claims_source import ClaimsSource
from bitimely_core.claims.sources.code_columns import split_prefix
from bitimely_core.claims.sources.columns import (
    assign_vocabulary,
    find_table,
    open_table,
    reformat_dates,
    warn_of_rows,
)
from bitimely_core.claims.sources.observation_tables import join_periods
from bitimely_core.claims.sources.source_options import (
    parse_date_forms,
    parse_switch_day,
    parse_vocabularies,
)
from bitimely_core.claims.sources.source_survey import EXAMPLES, EventReader, SourceSurvey
from bitimely_core.claims.sources.source_table import (
    EventBlock,
    OpenTable,
    SourceTable,
    count_dropped,
)
from bitimely_core.claims.sources.subject_tables import (
    TableAccounts,
    keep_unique_rows,
    make_subjects,
)
from bitimely_core.errors import Finding, Reason, input_error, safe_text
from bitimely_core.formats import tables
from bitimely_core.formats.source import Source
from bitimely_core.types import SourceRows

TABLES = words.LAYOUTS["omop"]
EVENTS, OTHER_EVENTS = TABLES["events"], TABLES["other_events"]  # table -> column of dates
VOCABULARIES = {"ICD9CM": "icd9cm", "ICD10CM": "icd10cm", "ICD10": "icd10"}
VISITS = {"9201": "inpatient", "262": "inpatient", "9202": "outpatient", "9203": "emergency"}
SEXES = {"8507": "1", "8532": "2"}  # as `make_subjects` reads them
# supplementary codes, with or without their dot
LETTERED = r"^(?:V\d{2}\.?\d{0,2}|E\d{3}\.?\d?|Z\d{2}\.?[0-9A-Z]{0,4})$"
# HCPCS: vision, hearing, equipment
PROCEDURE = r"^(?:V(?:2[0-7]|5[0-3])\d{2}|E(?:[0-2]\d|80)\d{2})$"
ID_COLUMNS = {"claim", "concept", "standard", "unit"}  # keys of columns of whole numbers
NULL_TEXT = pl.lit(None, pl.String)


def read_omop(source: Source, options: ClaimsOptions) -> ClaimsSource:
    """OMOP CDM: a folder with its tables as csv or Parquet.

    Options: default_source (of visits of other kinds, and of rows without one), date_format,
    icd10_from (of rows without a source concept), codes (all: rows without an ICD code have their
    standard concept, with the number of measurements and observations), time_unit.
    Raises UserError: what cannot be read or trusted (exit 4), options that have no meaning here
    (exit 2).
    """
    forms, since = parse_date_forms(options), parse_switch_day(options)
    others = options.codes == "all"
    stated = VOCABULARIES | parse_vocabularies(options)
    vocabularies = words.fold_keys(stated)
    concepts, visits = _read_concepts(source, vocabularies), _read_visits(source)
    opened = _open_tables(source, others=others, timed=options.time_unit == "minute")
    tokens = _name_concepts(source, opened.values()) if others else None
    source_tables = [
        SourceTable(
            table=table,
            shape=_BlockShaper(
                concepts=concepts,
                visits=visits,
                form=forms["date"],
                since=since,
                only_lettered=name != "condition_occurrence",
                tokens=tokens,
                prefixes=words.translate_words(stated, "vocabularies"),
            ),
            others=others,
        )
        for name, table in opened.items()
    ]
    survey = SourceSurvey(
        stated="nowhere" if since is None else "surely",
        hint=f"Give the folder that holds {' or '.join(EVENTS)}",
    )
    survey.read_all(source_tables)
    survey.findings += _report_unused(source, survey)
    persons, periods = _read_persons(source, forms, survey)
    absent = [name for name in EVENTS if name not in opened]
    survey.findings += warn_of_rows(
        len(absent),
        Reason.MISSING_PAIR,
        f"tables are missing: {', '.join(absent)}",
        "V, E and Z codes may be (insulin use, status after): OMOP routes them by domain",
    )
    subjects = make_subjects(persons, find_table(source, "person"), survey, forms)
    facts = {
        "absent": absent,
        "concepts": "no table of concepts: source values are read as ICD-9-CM"
        if concepts is None
        else "source concepts",
        "visits": "no table of visits"
        if visits is None
        else "of the kinds 9201, 262, 9202, 9203; all others are of the default source",
    }
    return ClaimsSource(
        events=EventReader(source_tables),
        subjects=subjects,
        source=options.default_source or "outpatient",
        survey=survey,
        facts=facts,
        periods=periods,
    )


def _open_tables(source: Source, *, others: bool, timed: bool) -> dict[str, OpenTable]:
    """The tables of events by name.

    `others`: also those without ICD codes; `timed`: with times of day.
    """
    opened = {}
    for name in (*EVENTS, *OTHER_EVENTS) if others else EVENTS:
        if file := find_table(source, name, needed=False):
            wanted = _list_columns(name, others=others, timed=timed)
            opened[name] = open_table(
                source, file, wanted, {"code", "concept", "claim", "moment", *TABLES["numbers"]}
            )
            if not others:
                _refuse_without_codes(opened[name], wanted)
    return opened


def _refuse_without_codes(table: OpenTable, wanted: Mapping[str, str]) -> None:
    """Raises UserError: schema, for a table with standard concepts alone."""
    if {"code", "concept"}.isdisjoint(table.columns):
        raise input_error(
            Reason.SCHEMA,
            f"has neither {wanted['code']} nor {wanted['concept']}",
            "expected the codes of the source, which have PheCodes",
            "Export one of them as well; or give --codes all --rules none --no-select to use the "
            "standard concepts as tokens, without PheCodes and labels",
            file=table.file,
        )


def _list_columns(name: str, *, others: bool, timed: bool) -> dict[str, str]:
    """Key -> name of the columns of a table of events."""
    prefix, date = name.partition("_")[0], (EVENTS | OTHER_EVENTS)[name]
    columns = {"subject_id": "person_id", "date": date}
    if name in EVENTS:
        columns["code"] = f"{prefix}_source_value"
        columns["concept"] = f"{prefix}_source_concept_id"
    columns["claim"] = "visit_occurrence_id"
    if others:
        columns["standard"] = f"{prefix}_concept_id"
        columns |= TABLES["numbers"] if name in EVENTS else {}
    if timed:
        columns["moment"] = f"{date}time"
    return columns


def _iter_concepts(source: Source) -> Iterator[pl.DataFrame]:
    """Blocks of concept, vocab and concept_code; nothing without a table of concepts.

    The vocabulary's own files are separated by tabs and know no quotes.
    """
    file = find_table(source, "concept", needed=False)
    if not file:
        return
    table = open_table(source, file, TABLES["concept"], codes=("concept_code",))
    for block in table.read_blocks(quotes=table.delimiter != "\t"):
        yield block.drop("row")


def _read_concepts(source: Source, vocabularies: Mapping[str, str]) -> pl.DataFrame | None:
    """concept, vocab, concept_code: the ICD concepts; None without a table of concepts.

    `vocabularies`: folded name of a vocabulary of ICD codes -> vocabulary of the cleaning.
    """
    parts = []
    for block in _iter_concepts(source):
        names = {name: words.fold_name(name) for name in block["vocab"].unique().drop_nulls()}
        meanings = {
            name: vocabularies[folded] for name, folded in names.items() if folded in vocabularies
        }
        icd = block.filter(pl.col("vocab").is_in(list(meanings)))
        vocab = pl.col("vocab").replace_strict(meanings, return_dtype=pl.String)
        parts.append(icd.with_columns(vocab) if meanings else icd)
    return pl.concat(parts).unique("concept") if parts else None


def _report_unused(source: Source, survey: SourceSurvey) -> list[Finding]:
    """A warning of each table with diagnoses of vocabularies that no map reads: which, and how many
    rows.
    """
    wanted = set().union(*survey.unused.values())
    if not wanted:
        return []
    vocab_of: dict[str, str] = {}
    for block in _iter_concepts(source):
        named = block.filter(pl.col("concept").is_in(list(wanted)))
        vocab_of |= dict(named.select("concept", "vocab").iter_rows())
    findings = []
    for file, concepts in survey.unused.items():
        counts = Counter[str]()
        for concept, rows in concepts.items():
            counts[vocab_of.get(concept) or "no vocabulary"] += rows
        if not counts:
            continue
        first, listed = counts.most_common(1)[0][0], counts.most_common(EXAMPLES)
        text = ", ".join(f"{rows} rows of {safe_text(vocab)}" for vocab, rows in listed)
        findings += warn_of_rows(
            counts.total(),
            Reason.WRONG_VOCABULARY,
            f"of {survey.records[file]} rows have concepts that are no ICD codes ({text})",
            "they are left out",
            hint=f"Where they are ICD codes all the same, give --source-vocab {first}=icd10; "
            "--codes all keeps their standard concepts",
            file=file,
        )
    return findings


def _read_visits(source: Source) -> pl.DataFrame | None:
    """claim, source: the visits of a kind that is in `VISITS`; None without a table of visits."""
    file = find_table(source, "visit_occurrence", needed=False)
    if not file:
        return None
    visits = open_table(source, file, TABLES["visit_occurrence"]).read()
    kind = read_id("source").replace_strict(VISITS, default=None, return_dtype=pl.String)
    visits = visits.select(claim=read_id("claim"), source=kind).drop_nulls("source")
    return visits.unique("claim", maintain_order=True)


def read_id(name: str) -> pl.Expr:
    """A column of whole numbers as text; tools that have no empty integers write 10.0 for 10."""
    return tables.strip_blanks(pl.col(name)).str.replace(r"\.0$", "")


def _name_concepts(source: Source, opened: Iterable[OpenTable]) -> pl.DataFrame:
    """concept, token, symbol of the standard concepts and units in the tables.

    The token is `LOINC//2345-7`, or `CONCEPT//3004501` without a row of the vocabulary. The symbol
    is the code alone, `mg/dL` of a unit, or null without such a row.
    """
    ids = pl.Series("concept", [], pl.String)
    for table in opened:
        names = tuple(table.columns[key] for key in ("standard", "unit") if key in table.columns)
        for block in tables.read_frames(table.path, names, delimiter=table.delimiter):
            columns = [block.frame.select(concept=read_id(name))["concept"] for name in names]
            ids = pl.concat([ids, *columns]).unique()
    wanted = ids.filter(~ids.is_in(["", "0"])).drop_nulls().sort().to_frame()
    named = pl.DataFrame(schema=dict.fromkeys(TABLES["concept"], pl.String))
    for concepts in _iter_concepts(source):
        named = pl.concat([named, concepts.join(wanted, on="concept", how="semi")])
    joined = wanted.join(named.unique("concept"), on="concept", how="left", maintain_order="left")
    token = pl.coalesce(
        pl.format(f"{{}}{MARK}{{}}", "vocab", "concept_code"),
        pl.format(f"CONCEPT{MARK}{{}}", "concept"),
    )
    return joined.select("concept", token=token, symbol="concept_code")


@dataclass(frozen=True, kw_only=True)
class _BlockShaper:
    """Makes events of a block of a table."""

    concepts: pl.DataFrame | None  # of `_read_concepts`
    visits: pl.DataFrame | None  # of `_read_visits`
    form: str  # of dates
    since: int | None  # day from which on codes without a concept are ICD-10
    only_lettered: bool  # the table holds codes that are not ICD: only V, E and Z codes are read
    tokens: pl.DataFrame | None  # of `_name_concepts`, with `--codes all`
    prefixes: Mapping[str, str]  # folded word before a code -> its vocabulary: ICD10CM:E11.9

    def __call__(self, frame: pl.DataFrame) -> EventBlock:
        """The rows whose source concept is an ICD code, and those without one whose source value
        is; with `tokens` also other rows, with their standard concept, its unit and number.
        """
        rows = self._mark_icd(self._read_columns(frame))
        if self.tokens is not None:
            rows = self._mark_others(_add_tokens(rows, self.tokens))
        events = rows.filter("is_event").with_columns(code=pl.coalesce("concept_code", "code"))
        left_out = rows.height - events.height
        return EventBlock(
            events, count_dropped(Reason.WRONG_VOCABULARY, left_out), self._count_unused(rows)
        )

    def _count_unused(self, rows: pl.DataFrame) -> dict[str, int]:
        """Source concept -> rows of a table of diagnoses that are left out for it."""
        if self.only_lettered or "concept" not in rows.columns:
            return {}
        unused = rows.filter(~pl.col("is_event"))["concept"].drop_nulls()
        return dict(unused.value_counts().iter_rows())

    def _read_columns(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The rows with dates in one form, and the kind of the visit."""
        # a table without ICD codes, without visits
        absent = sorted({"code", "claim"}.difference(frame.columns))
        rows = frame.with_columns(tables.strip_blanks(pl.col(pl.String))).with_columns(
            *(
                pl.col(key).str.replace(r"\.0$", "")
                for key in ID_COLUMNS.intersection(frame.columns)
            ),
            *map(NULL_TEXT.alias, absent),
        )
        rows = rows.with_columns(reformat_dates(rows["date"], self.form))
        if "moment" in rows.columns:
            moment = pl.when(pl.col("moment").str.contains(":")).then("moment")
            rows = rows.with_columns(date=pl.coalesce(moment, "date"))
        if self.visits is not None:
            rows = rows.join(self.visits, on="claim", how="left", maintain_order="left")
        return rows

    def _mark_icd(self, rows: pl.DataFrame) -> pl.DataFrame:
        """The rows with `vocab` and `concept_code` of their source concept, and `is_event` for
        those with an ICD code.
        """
        prefix, code = self._split_prefixes(rows["code"])
        rows = rows.with_columns(code, prefix=prefix)
        text, is_written, stated = pl.col("code").str.to_uppercase(), pl.lit(value=True), NULL_TEXT
        if self.only_lettered:
            is_written = text.str.contains(LETTERED) & ~text.str.contains(PROCEDURE)
            is_written |= pl.col("prefix").is_not_null()
            stated = pl.when(text.str.starts_with("Z")).then(pl.lit("icd10cm"))
        if self.since is not None:
            by_date = assign_vocabulary(rows["date"], self.since, "icd9cm", "icd10cm")
            stated = pl.coalesce(stated, by_date)
        stated = pl.coalesce("prefix", stated)
        is_written &= pl.col("prefix").ne_missing(words.NO_DIAGNOSIS)
        if self.tokens is not None:  # which has another token for a row without a code
            is_written &= text != ""
        is_written = is_written.fill_null(value=False)
        if self.concepts is None or "concept" not in rows.columns:
            rows = rows.with_columns(concept_code=NULL_TEXT, vocab=stated)
        else:
            rows = rows.join(self.concepts, on="concept", how="left", maintain_order="left")
            is_written &= pl.col("concept").is_null() | (pl.col("concept") == "0")
            has_code = pl.col("concept_code").is_not_null()
            rows = rows.with_columns(vocab=pl.when(has_code).then("vocab").otherwise(stated))
        return rows.with_columns(is_event=pl.col("concept_code").is_not_null() | is_written)

    def _split_prefixes(self, column: pl.Series) -> tuple[pl.Series, pl.Series]:
        """Vocabulary and code of source values, the first null where a value has none."""
        vocab = map_texts(column, self._name_vocabulary, pl.String)
        code = map_texts(column, lambda text: split_prefix(text, self.prefixes)[1], pl.String)
        return vocab, code

    def _name_vocabulary(self, text: str | None) -> str | None:
        word = split_prefix(text, self.prefixes)[0]
        return self.prefixes[words.fold_name(word)] if word else None

    def _mark_others(self, rows: pl.DataFrame) -> pl.DataFrame:
        """The rows with `is_event` also for those whose standard concept has a token.

        These have the token as code, no visit, and their number as `value`.
        """
        value = pl.lit(None, pl.Float32)
        if "value" in rows.columns:
            value = pl.col("value").cast(pl.Float32, strict=False)
        is_other = ~pl.col("is_event") & pl.col("token").is_not_null()
        changes = {"vocab": pl.lit(OTHER), "code": pl.col("token")}
        changes |= {"concept_code": NULL_TEXT, "claim": NULL_TEXT}
        return rows.with_columns(
            *(
                pl.when(is_other).then(new).otherwise(key).alias(key)
                for key, new in changes.items()
            ),
            value=pl.when(is_other & value.is_finite()).then(value),
            is_event=pl.col("is_event") | is_other,
        )


def _add_tokens(rows: pl.DataFrame, tokens: pl.DataFrame) -> pl.DataFrame:
    """Rows with the token of their standard concept and its unit, `LOINC//2345-7//mg/dL`.

    So numbers of two units are not taken for one quantity. The unit is that of the vocabulary, else
    as the source writes it, else the number of its concept.
    """
    rows = rows.join(
        tokens.select("token", standard="concept"), on="standard", how="left", maintain_order="left"
    )
    stated = [NULL_TEXT]
    if "unit" in rows.columns:
        symbols = tokens.select("symbol", unit="concept")
        rows = rows.join(symbols, on="unit", how="left", maintain_order="left")
        stated.append(pl.col("symbol"))
    written = [name for name in ("unit_text", "unit") if name in rows.columns]
    stated += [pl.col(name).replace({"": None, "0": None}) for name in written]
    unit = pl.coalesce(stated)
    with_unit = pl.format(f"{{}}{MARK}{{}}", "token", unit)
    return rows.with_columns(token=pl.when(unit.is_not_null()).then(with_unit).otherwise("token"))


def _read_persons(
    source: Source, forms: Mapping[str, str], accounts: TableAccounts
) -> tuple[pl.DataFrame, pl.DataFrame | None]:
    """Subjects with birth, sex, death, start of the first and end of the last observation; and the
    periods of those who were observed several times.
    """
    periods = None
    table = open_table(source, find_table(source, "person"), TABLES["person"], {"month", "day"})
    persons = keep_unique_rows(table.read(), table.file, accounts)
    year, month, day = (
        pl.col(name).str.replace(r"\.0$", "") if name in table.columns else NULL_TEXT
        for name in ("year", "month", "day")
    )
    persons = persons.with_columns(
        sex=pl.col("sex").replace_strict(SEXES, default="0"),
        birth=pl.format("{}-{}-{}", year, month.fill_null("1"), day.fill_null("1")),
    )
    for name in ("observation_period", "death"):  # any number of rows per person
        if file := find_table(source, name, needed=False):
            frame = open_table(source, file, TABLES[name]).read()
            _, *columns = TABLES[name]  # the first is the subject
            accounts.rows.append(SourceRows(file=file, kind="subjects", seen=frame.height))
            read = frame.with_columns(reformat_dates(frame[key], forms[key]) for key in columns)
            if name == "observation_period":
                days = (dates.parse_days(read[key]).alias(key[4:]) for key in columns)
                spells = read.select("subject_id", *days)
                periods = join_periods(spells, file, accounts)
            spans = read.group_by("subject_id").agg(
                pl.col(key).max() if key == "obs_end" else pl.col(key).min() for key in columns
            )
            persons = persons.join(spans, on="subject_id", how="left", maintain_order="left")
    return persons, periods
