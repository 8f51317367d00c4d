"""Claims as plain tables, with optional tables of patients and labels and an optional map of codes.

`claims.{csv,csv.gz,parquet}`: patient_id, date, icd9 (or icd, code, icd10; or wide: dx1 .. dxN),
optional vocab, source, claim. `patients`: patient_id, birth_date or month_of_birth, death_date,
sex, obs_start, obs_end. `labels`: patient_id, a column of 0 and 1 for each label, optional
index_date. `icd9_phecode.csv`: a map. `--col KEY=NAME` gives a column another name (and `--col
vocab=icd10` a vocabulary).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from bitimely_core.claims import dates
from bitimely_core.claims.codes import FAMILIES
from bitimely_core.claims.distinct import map_texts
from bitimely_core.claims.label_rules import SOURCES as KINDS
from bitimely_core.claims.options import ClaimsOptions
from bitimely_core.claims.sources.claims_source import ClaimsSource
from bitimely_core.claims.sources.columns import (
    DateCounts,
    assign_vocabulary,
    check_types,
    detect_delimiter,
    find_table,
    match_columns,
    open_table,
    reformat_dates,
    report_spelling,
    report_zones,
)
from bitimely_core.claims.sources.options import (
    parse_default_source,
    parse_label_columns,
    parse_pairs,
    parse_switch_day,
)
from bitimely_core.claims.sources.source_table import EventBlock, SourceTable, Stated
from bitimely_core.claims.sources.subject_tables import (
    keep_unique_rows,
    make_subjects,
    parse_labels,
)
from bitimely_core.claims.sources.survey import (
    SourceSurvey,
    bind_events,
    hash_ids,
    iter_surveyed,
    unpivot_codes,
)
from bitimely_core.errors import (
    Finding,
    Reason,
    check_choice,
    input_error,
    input_warning,
    safe_text,
    usage_error,
)
from bitimely_core.formats import tables
from bitimely_core.formats.source import Source
from bitimely_core.types import SourceRows

SUBJECT_NAMES = ("patient_id", "subject_id", "person_id", "id")
EVENT_COLUMNS = {
    "subject": SUBJECT_NAMES,
    "date": ("date",),
    "code": ("icd9", "icd", "code", "icd10"),
    "vocab": ("vocab", "vocabulary_id", "icd_version"),
    "source": ("source",),
    "claim": ("claim", "claim_id"),
    "position": ("position",),
}
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
# as written in a column of them
VOCABULARY_WORDS = {
    "9": "icd9",
    "10": "icd10",
    "icd10ca": "icd10",
    **{name: name for name in FAMILIES},
}


class _EventLayout(NamedTuple):
    """How a block of the table becomes events."""

    columns: dict[str, str]  # key -> name; without `code` where there are several
    wide: tuple[str, ...]  # names of the columns of codes where there are several
    words: dict[str, str]  # of the column `source`, in lower case -> a kind of claims
    form: str | None  # of dates
    since: int | None  # day from which on codes are ICD-10


def _shape_block(frame: pl.DataFrame, *, layout: _EventLayout) -> EventBlock:
    """Columns under the names of `ClaimsSource.events`, one row per code."""
    spelled = {"subject": "subject_id"}
    named = frame.select(
        "row",
        *(pl.col(name).alias(spelled.get(key, key)) for key, name in layout.columns.items()),
        *layout.wide,
    )
    if layout.form is not None:
        named = named.with_columns(reformat_dates(named["date"], layout.form))
    if layout.since is not None:
        named = named.with_columns(
            vocab=assign_vocabulary(named["date"], layout.since, "icd9", "icd10")
        )
    elif "vocab" in layout.columns:
        named = named.with_columns(_translate_words(named["vocab"], VOCABULARY_WORDS, r"[^a-z0-9]"))
    if "source" in layout.columns:
        named = named.with_columns(_translate_words(named["source"], layout.words))
    if "position" in layout.columns:
        named = named.with_columns(
            pl.col("position").str.strip_chars().cast(pl.Int16, strict=False)
        )
    return EventBlock(unpivot_codes(named, layout.wide) if layout.wide else named)


def _translate_words(
    column: pl.Series, words: Mapping[str, str], noise: str = r"^\s+|\s+$"
) -> pl.Series:
    """Known words in one spelling; unknown ones unchanged, for the survey to report; null where
    empty.
    """
    return map_texts(
        column,
        lambda text: (
            words.get(re.sub(noise, "", text.lower()), text) if text and text.strip() else None
        ),
        column.dtype,
    )


def read_claims(source: Source, options: ClaimsOptions, *, once: bool = False) -> ClaimsSource:
    """Claims in plain tables; `once`: they are surveyed by the reading of `ClaimsSource.survey`,
    where no other table waits for that.

    Options: col, source_value, label_column (lists of texts); default_source, date_format,
    icd10_from. Raises UserError: what cannot be read or trusted (exit 4), options that are not
    understood (exit 2).
    """
    renamed, kind = (
        parse_pairs(options, "col", {*EVENT_COLUMNS, *PATIENT_COLUMNS}),
        parse_default_source(options),
    )
    form = options.date_format or None
    file = find_table(source, "claims")
    table, vocab, stated, spelling = _open_events(source, file, renamed, options, form)
    labels, labelled, label_findings = _read_labels(source, renamed, options, form)
    # two digits of a year of birth are read by the last day of the claims
    survey, once = SourceSurvey(), once and form is None
    reading = partial(
        iter_surveyed, survey, [table], vocab=vocab, stated=stated, listed=labels is not None
    )
    if not once:
        deque(reading(), maxlen=0)
    patients, registered, more = _read_patients(source, renamed, form, survey.last)
    maps = [rel for rel in source.files if PurePosixPath(rel).name.lower() == MAP_FILE]

    def describe() -> ClaimsSource:
        facts: dict[str, Any] = {
            "tables": [row.file for row in (*survey.rows, *registered, *labelled)]
        }
        facts |= {"records": survey.records} if table.kind == "codes" else {}
        return ClaimsSource(
            events=bind_events([table]),
            subjects=patients,
            labels=labels,
            vocab=vocab,
            source=kind,
            rows=[*survey.rows, *registered, *labelled],
            findings=[
                *spelling,
                *survey.findings,
                *more,
                *label_findings,
                *_find_unmatched_labels(labels, survey.subjects, labelled),
            ],
            facts=facts | ({"phecode_map": maps[0]} if maps else {}),
        )

    return replace(describe(), survey=reading, complete=describe) if once else describe()


def _open_events(
    source: Source, file: str, renamed: Mapping[str, str], options: ClaimsOptions, form: str | None
) -> tuple[SourceTable, str, Stated, list[Finding]]:
    """The table of claims, the vocabulary of rows without one, where it is stated, and findings on
    names of columns.
    """
    path = source.path(file)
    every = tables.read_names(path, delimiter=detect_delimiter(path))
    named_vocab = re.sub(r"[^a-z0-9]", "", renamed.get("vocab", "").lower())
    constant = VOCABULARY_WORDS.get(named_vocab) if renamed.get("vocab") not in every else None
    wanted = {
        key: (renamed[key],) if key in renamed else names for key, names in EVENT_COLUMNS.items()
    }
    if constant:
        wanted.pop("vocab")
    wide = _find_wide_columns(every, renamed.get("code"))
    if wide:
        wanted.pop("code")
    elif (
        "code" not in renamed
        and len(both := [name for name in every if name.lower() in {"icd9", "icd10"}]) > 1
    ):
        text = f"the columns {' and '.join(map(safe_text, both))} both hold codes"
        raise input_error(
            Reason.SCHEMA, text, "expected one column", "Choose one with --col code=NAME", file=file
        )
    table = open_table(
        source, file, wanted, {"vocab", "source", "claim", "position"} - set(renamed)
    )
    check_types(path, file, {name: name for name in wide}, wide)
    columns = table.columns
    since = parse_switch_day(options)
    if since is not None and (constant or "vocab" in columns):
        raise usage_error("--icd10-from and a vocabulary are both given", "expected one of them")
    named = re.fullmatch(r"icd_?(9|10)(cm)?.*", columns.get("code", ""), re.IGNORECASE)
    vocab = constant or (f"icd{named[1]}{(named[2] or '').lower()}" if named else "icd9")
    layout = _EventLayout(columns, wide, _read_source_words(options), form, since)
    events = table.as_events(
        partial(_shape_block, layout=layout), wide=wide, kind="codes" if wide else "rows"
    )
    known: Stated = "surely" if constant or since is not None else "by name" if named else "nowhere"
    others = {name for key, name in columns.items() if key not in FEW_TEXTS}
    categories = tuple({columns[key] for key in FEW_TEXTS & set(columns)} - others)
    return (
        replace(events, categories=categories),
        vocab,
        known,
        report_spelling(file, columns, wanted),
    )


def _find_wide_columns(every: tuple[str, ...], pattern: str | None) -> tuple[str, ...]:
    """The columns of codes, ordered by number, of a table with several."""
    if pattern is None:
        if any(name.lower() in EVENT_COLUMNS["code"] for name in every):
            return ()
        numbered = sorted(
            (int(found[1]), name) for name in every if (found := WIDE_COLUMN.fullmatch(name))
        )
        return tuple(name for _, name in numbered)
    if not re.search(r"[*?\[]", pattern):
        return ()
    named = [name for name in every if fnmatchcase(name.lower(), pattern.lower())]
    if not named:
        raise usage_error(
            f"--col code={safe_text(pattern)} names no column",
            f"found {', '.join(map(safe_text, every[:60]))}",
        )
    return tuple(
        sorted(
            named,
            key=lambda name: [
                int(part) if part.isdigit() else 0 for part in re.split(r"(\d+)", name)
            ],
        )
    )


def _read_source_words(options: ClaimsOptions) -> dict[str, str]:
    """Words of the column `source`, in lower case -> kind of claims."""
    given = parse_pairs(options, "source_value")
    for kind in given.values():
        check_choice("kind of claims", kind, KINDS)
    return {kind: kind for kind in KINDS} | given


def _read_patients(
    source: Source, renamed: Mapping[str, str], form: str | None, last: int | None
) -> tuple[pl.DataFrame | None, list[SourceRows], list[Finding]]:
    """The registered subjects, if there is a table of them."""
    if not (file := find_table(source, "patients", needed=False)):
        return None, [], []
    wanted = {
        key: (renamed[key],) if key in renamed else names for key, names in PATIENT_COLUMNS.items()
    }
    # the column may have its name in the claims only
    wanted["subject"] = (*wanted["subject"], *SUBJECT_NAMES)
    table = open_table(source, file, wanted, set(PATIENT_COLUMNS) - {"subject", *renamed})
    frame, rows, findings = keep_unique_rows(table.read(), file, "subject")
    findings += report_spelling(file, table.columns, wanted)
    return (
        make_subjects(frame.rename({"subject": "subject_id"}), file, findings, form, last),
        [rows],
        findings,
    )


def _read_labels(
    source: Source, renamed: Mapping[str, str], options: ClaimsOptions, form: str | None
) -> tuple[pl.DataFrame | None, list[SourceRows], list[Finding]]:
    """The table of labels, if there is one: all its columns, or those of `--label-column`."""
    chosen = parse_label_columns(options)
    file = find_table(source, "labels", needed=False)
    if chosen and not file:
        raise usage_error("--label-column is given", "but the folder has no table of labels")
    if any(one.year for one in chosen):
        raise usage_error("--label-column with a year has no meaning with --source claims")
    if not file:
        return None, [], []
    accepted = (renamed["subject"], *SUBJECT_NAMES) if "subject" in renamed else SUBJECT_NAMES
    wanted: dict[str, tuple[str, ...]] = {"subject_id": accepted, INDEX_DATE: (INDEX_DATE,)}
    table = open_table(source, file, wanted, {INDEX_DATE})
    every = tables.read_names(table.path, delimiter=table.delimiter)
    if chosen:
        wanted |= {one.name: (one.column,) for one in chosen}
    else:
        wanted |= {name.lower(): (name,) for name in every if name not in table.columns.values()}
    names = [name for name in wanted if name not in {"subject_id", INDEX_DATE}]
    if len(names) + len(table.columns) < len(every) and not chosen:
        raise input_error(
            Reason.HEADER,
            "columns have equal names",
            "expected different ones (case does not count)",
            file=file,
        )
    columns = match_columns(table.path, wanted, {INDEX_DATE}, table.delimiter)
    frame = table._replace(columns=columns).read()
    if chosen:
        frame = frame.with_columns(
            pl.when(pl.col(one.name).is_not_null())
            .then((pl.col(one.name) == one.value).cast(pl.Int8).cast(pl.String))
            .alias(one.name)
            for one in chosen
        )
    single, rows, findings = keep_unique_rows(frame, file)
    kept, odd, more = parse_labels(single, columns, names, file)
    if odd:
        rows.quarantined[str(Reason.LABEL)] = odd
    if INDEX_DATE in kept.columns:
        written = reformat_dates(kept[INDEX_DATE], form)
        # claims after such a date could not be excluded
        unread = written.is_not_null() & dates.parse_days(written).is_null()
        lost, kept = kept.filter(unread)["row"], kept.with_columns(written).filter(~unread)
        more += report_zones(DateCounts().add(kept[INDEX_DATE]).zoned, file, INDEX_DATE)
        if n := lost.len():
            rows.quarantined[str(Reason.DATE)] = n
            text, examples = (
                f"{n} rows have an index date that cannot be read",
                tuple(map(str, lost.head(5))),
            )
            more.append(
                Finding(
                    Reason.DATE,
                    text,
                    "they are excluded",
                    file=file,
                    field=INDEX_DATE,
                    count=n,
                    examples=examples,
                )
            )
    more += report_spelling(
        file, table.columns, {"subject_id": accepted, INDEX_DATE: (INDEX_DATE,)}
    )
    return kept.drop("row"), [rows], [*findings, *more]


def _find_unmatched_labels(
    labels: pl.DataFrame | None, seen: np.ndarray, rows: list[SourceRows]
) -> list[Finding]:
    """A warning of labels without claims and of claims without labels; `seen` are the hashed
    subjects of the claims.
    """
    if labels is None:
        return []
    labelled = hash_ids(labels["subject_id"])
    both = len(np.intersect1d(labelled, seen, assume_unique=True))
    without, unlabelled = len(labelled) - both, len(seen) - both
    if not without and not unlabelled:
        return []
    text = f"{without} subjects with labels have no claims, {unlabelled} subjects with claims have no labels"
    return [
        input_warning(Reason.UNMATCHED_LABELS, text, file=rows[0].file, count=without + unlabelled)
    ]
