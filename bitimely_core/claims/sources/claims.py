"""Claims as plain tables: claims, and beside them patients, labels and a map of codes where they are there.

`claims.{csv,csv.gz,parquet}`: patient_id, date, icd9 (or icd, code, icd10; or wide: dx1 .. dxN), optional vocab, source, claim.
`patients`: patient_id, birth_date or month_of_birth, death_date, sex, obs_start, obs_end. `labels`: patient_id, a column of 0 and 1 for each
label, optional index_date. `icd9_phecode.csv`: a map. `--col KEY=NAME` gives a column another name (and `--col vocab=icd10` a vocabulary).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bitimely_core.claims import dates
from bitimely_core.claims.codes import FAMILIES
from bitimely_core.claims.label_rules import SOURCES as KINDS
from bitimely_core.claims.sources.reading import (
    Claims,
    Shaped,
    Stated,
    Table,
    civil,
    default_kind,
    delimiter,
    find,
    hashed,
    label_columns,
    long,
    matched,
    one_row_each,
    pairs,
    read_labels,
    stream,
    subjects,
    survey,
    switch,
    switched,
    typed,
    usage,
    whole,
)
from bitimely_core.errors import Finding, Reason, input_error, safe_text
from bitimely_core.formats import tables
from bitimely_core.formats.source import Source
from bitimely_core.types import Rows

if TYPE_CHECKING:
    import polars as pl

SUBJECT = ("patient_id", "subject_id", "person_id", "id")
EVENT = {
    "subject": SUBJECT,
    "date": ("date",),
    "code": ("icd9", "icd", "code", "icd10"),
    "vocab": ("vocab", "vocabulary_id", "icd_version"),
    "source": ("source",),
    "claim": ("claim", "claim_id"),
    "position": ("position",),
}
PATIENT = {
    "subject": SUBJECT,
    "birth": ("birth_date", "month_of_birth", "birth"),
    "death": ("death_date", "death"),
    "sex": ("sex",),
    "obs_start": ("obs_start",),
    "obs_end": ("obs_end",),
}
INDEX = "index_date"
MAP = "icd9_phecode.csv"
WIDE = re.compile(r"dx_?(\d+)", re.IGNORECASE | re.ASCII)
WORDS = {
    "9": "icd9",
    "10": "icd10",
    "icd10ca": "icd10",
    **{name: name for name in FAMILIES},
}  # a vocabulary, as written in a column of them


class _Layout(NamedTuple):
    """How a block of the table becomes events."""

    columns: dict[str, str]  # key -> name; without `code` where there are several
    wide: tuple[str, ...]  # names of the columns of codes where there are several
    words: dict[str, str]  # of the column `source`, in lower case -> a kind of claims
    form: str | None  # of dates
    since: int | None  # day from which on codes are ICD-10


def _shape(frame: pl.DataFrame, *, layout: _Layout) -> Shaped:
    """Columns under the names of `Claims.events`, one row a code."""
    import polars as pl

    spelled = {"subject": "subject_id"}
    named = frame.select("row", *(pl.col(name).alias(spelled.get(key, key)) for key, name in layout.columns.items()), *layout.wide)
    if layout.form is not None:
        named = named.with_columns(civil(named["date"], layout.form))
    if layout.since is not None:
        named = named.with_columns(vocab=switched(named["date"], layout.since, "icd9", "icd10"))
    elif "vocab" in layout.columns:
        named = named.with_columns(_translated(named["vocab"], WORDS, r"[^a-z0-9]"))
    if "source" in layout.columns:
        named = named.with_columns(_translated(named["source"], layout.words))
    if "position" in layout.columns:
        named = named.with_columns(pl.col("position").str.strip_chars().cast(pl.Int16, strict=False))
    return Shaped(long(named, layout.wide) if layout.wide else named)


def _translated(column: pl.Series, words: Mapping[str, str], noise: str = r"^\s+|\s+$") -> pl.Series:
    """Known words in one spelling; unknown ones as they are, for the survey to name; null where there is none."""
    distinct = column.drop_nulls().unique()
    plain = [re.sub(noise, "", text.lower()) for text in distinct]
    known = [words.get(word, text) if text.strip() else None for word, text in zip(plain, distinct, strict=True)]
    return column.replace_strict(distinct, known, default=None, return_dtype=column.dtype)


def read(source: Source, options: dict[str, Any]) -> Claims:
    """Claims in plain tables.

    Args:
        source: folder.
        options: col, source_value, label_column (lists of texts); default_source, date_format, icd10_from.

    Raises:
        UserError: what cannot be trusted as a whole (exit 4), options that are not understood (exit 2).
    """
    renamed, kind = pairs(options, "col", {*EVENT, *PATIENT}), default_kind(options)
    form = options.get("date_format") or None
    file = find(source, "claims")
    table, vocab, stated = _table(source.path(file), file, renamed, options, form)
    labels, labelled, told = _labels(source, renamed, options, form)
    found = survey([table], vocab=vocab, stated=stated, listed=labels is not None)
    patients, registered, more = _patients(source, renamed, form)
    facts: dict[str, Any] = {"tables": [row.file for row in (*found.rows, *registered, *labelled)]}
    if table.kind == "codes":
        facts["records"] = found.records
    if (beside := _beside(source)) is not None:
        facts["phecode_map"] = beside
    return Claims(
        events=stream([table]),
        subjects=patients,
        labels=labels,
        vocab=vocab,
        source=kind,
        rows=[*found.rows, *registered, *labelled],
        findings=[*found.findings, *more, *told, *_unmatched(labels, found.subjects, labelled)],
        facts=facts,
    )


def _beside(source: Source) -> str | None:
    """The map of codes that lies in the folder."""
    return next((rel for rel in source.files if PurePosixPath(rel).name.lower() == MAP), None)


# --- claims


def _table(path: Path, file: str, renamed: Mapping[str, str], options: Mapping[str, Any], form: str | None) -> tuple[Table, str, Stated]:
    """The table of claims, the vocabulary of rows that carry none, and who says so."""
    mark = delimiter(path)
    every = tables.names(path, delimiter=mark)
    constant = WORDS.get(re.sub(r"[^a-z0-9]", "", renamed.get("vocab", "").lower())) if renamed.get("vocab") not in every else None
    wanted = {key: (renamed[key],) if key in renamed else names for key, names in EVENT.items()}
    if constant:
        wanted.pop("vocab")
    wide = _wide(every, renamed.get("code"))
    if wide:
        wanted.pop("code")
    elif "code" not in renamed and len(both := [name for name in every if name.lower() in {"icd9", "icd10"}]) > 1:
        text = f"the columns {' and '.join(map(safe_text, both))} both hold codes"
        raise input_error(Reason.SCHEMA, text, "expected one column", "Choose one with --col code=NAME", file=file)
    columns = matched(path, wanted, {"vocab", "source", "claim", "position"} - set(renamed), mark)
    typed(path, file, {**columns, **{name: name for name in wide}}, {"code", *wide})
    since = switch(options)
    if since is not None and (constant or "vocab" in columns):
        raise usage("--icd10-from and a vocabulary are both given", "expected one of them")
    named = re.fullmatch(r"icd_?(9|10)(cm)?.*", columns.get("code", ""), re.IGNORECASE)
    vocab = constant or (f"icd{named[1]}{(named[2] or '').lower()}" if named else "icd9")
    layout = _Layout(columns, wide, _kinds(options), form, since)
    everything = tuple(dict.fromkeys((*columns.values(), *wide)))
    kept = Table(
        file=file,
        path=path,
        columns=everything,
        shape=partial(_shape, layout=layout),
        dated=(file, columns["date"]),
        kind="codes" if wide else "rows",
        delimiter=mark,
    )
    return kept, vocab, "surely" if constant or since is not None else "by name" if named else "nowhere"


def _wide(every: tuple[str, ...], pattern: str | None) -> tuple[str, ...]:
    """The columns of codes, in the order of their numbers, where there are several."""
    if pattern is None:
        if any(name.lower() in EVENT["code"] for name in every):
            return ()
        numbered = sorted((int(found[1]), name) for name in every if (found := WIDE.fullmatch(name)))
        return tuple(name for _, name in numbered)
    if not re.search(r"[*?\[]", pattern):
        return ()
    named = [name for name in every if fnmatchcase(name.lower(), pattern.lower())]
    if not named:
        raise usage(f"--col code={safe_text(pattern)} names no column", f"found {', '.join(map(safe_text, every[:60]))}")
    return tuple(sorted(named, key=lambda name: [int(part) if part.isdigit() else 0 for part in re.split(r"(\d+)", name)]))


def _kinds(options: Mapping[str, Any]) -> dict[str, str]:
    """Words of the column `source`, in lower case, and the kind of claims that each means."""
    given = pairs(options, "source_value")
    for kind in given.values():
        default_kind({"default_source": kind})
    return {kind: kind for kind in KINDS} | given


# --- patients


def _patients(source: Source, renamed: Mapping[str, str], form: str | None) -> tuple[pl.DataFrame | None, list[Rows], list[Finding]]:
    """The registered subjects, where there is a table of them."""
    if not (file := find(source, "patients", needed=False)):
        return None, [], []
    path = source.path(file)
    mark = delimiter(path)
    wanted = {key: (renamed[key],) if key in renamed else names for key, names in PATIENT.items()}
    wanted["subject"] = (*wanted["subject"], *SUBJECT)  # the column may have its name in the claims only
    columns = matched(path, wanted, set(PATIENT) - {"subject", *renamed}, mark)
    typed(path, file, columns)
    frame, rows, findings = one_row_each(whole(path, file, columns, mark), file, "subject")
    written = frame.with_columns(civil(frame[key], form) for key in ("birth", "death", "obs_start", "obs_end") if key in frame.columns)
    return subjects(written.rename({"subject": "subject_id"}), file, findings), [rows], findings


# --- labels


def _labels(
    source: Source, renamed: Mapping[str, str], options: Mapping[str, Any], form: str | None
) -> tuple[pl.DataFrame | None, list[Rows], list[Finding]]:
    """The table of labels, where there is one: all its columns, or those of `--label-column`."""
    import polars as pl

    chosen = label_columns(options)
    file = find(source, "labels", needed=False)
    if chosen and not file:
        raise usage("--label-column is given", "but there is no table of labels")
    if any(one.year for one in chosen):
        raise usage("--label-column with a year has no meaning with --source claims")
    if not file:
        return None, [], []
    path = source.path(file)
    mark = delimiter(path)
    every = tables.names(path, delimiter=mark)
    accepted = (renamed["subject"], *SUBJECT) if "subject" in renamed else SUBJECT
    wanted: dict[str, tuple[str, ...]] = {"subject_id": accepted, INDEX: (INDEX,)}
    subject = matched(path, wanted, {INDEX}, mark)
    if chosen:
        wanted |= {one.name: (one.column,) for one in chosen}
    else:
        wanted |= {name.lower(): (name,) for name in every if name not in subject.values()}
    names = [name for name in wanted if name not in {"subject_id", INDEX}]
    if len(names) + len(subject) < len(every) and not chosen:
        raise input_error(Reason.HEADER, "columns have equal names", "expected different ones (case does not count)", file=file)
    columns = matched(path, wanted, {INDEX}, mark)
    typed(path, file, {key: columns[key] for key in ("subject_id", INDEX) if key in columns})
    frame = whole(path, file, columns, mark)
    if chosen:
        frame = frame.with_columns(
            pl.when(pl.col(one.name).is_not_null()).then((pl.col(one.name) == one.value).cast(pl.Int8).cast(pl.String)).alias(one.name)
            for one in chosen
        )
    single, rows, findings = one_row_each(frame, file)
    kept, odd, more = read_labels(single, columns, names, file)
    if odd:
        rows.quarantined[str(Reason.LABEL)] = odd
    if INDEX in kept.columns:
        kept, lost = _indexed(kept.with_columns(civil(kept[INDEX], form)), file)
        if lost:
            rows.quarantined[str(Reason.DATE)] = lost[0].count
            more += lost
    return kept.drop("row"), [rows], [*findings, *more]


def _indexed(labels: pl.DataFrame, file: str) -> tuple[pl.DataFrame, list[Finding]]:
    """Without the rows whose index date cannot be read: what comes after it could not be told from what comes before."""
    odd = labels[INDEX].is_not_null() & dates.days(labels[INDEX]).is_null()
    rows = labels.filter(odd)["row"]
    if not rows.len():
        return labels, []
    text, examples = f"{rows.len()} rows have an index date that cannot be read", tuple(map(str, rows.head(5)))
    fault = Finding(
        code=Reason.DATE, problem=text, requirement="they are left out", file=file, field=INDEX, count=rows.len(), examples=examples
    )
    return labels.filter(~odd), [fault]


def _unmatched(labels: pl.DataFrame | None, seen: np.ndarray, rows: list[Rows]) -> list[Finding]:
    """Labels of nobody, and subjects without labels; `seen` are the subjects of the claims, hashed."""
    if labels is None:
        return []
    labelled = hashed(labels["subject_id"])
    both = len(np.intersect1d(labelled, seen, assume_unique=True))
    without, unlabelled = len(labelled) - both, len(seen) - both
    if not without and not unlabelled:
        return []
    text = f"{without} subjects with labels have no claims, {unlabelled} subjects with claims have no labels"
    finding = Finding(code=Reason.UNMATCHED_LABELS, level="warning", problem=text, file=rows[0].file, count=without + unlabelled)
    return [finding]
