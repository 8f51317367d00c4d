"""The options of claims, in two groups, and what they are called in the library (builder's reference, section 16)."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bitimely_cli.options import Group


def _text(name: str, help_: str, metavar: str | None = None) -> tuple[Any, Any]:
    return Annotated[str | None, typer.Option(name, help=help_, metavar=metavar, rich_help_panel="Claims")], None


def _several(name: str, help_: str, metavar: str | None = None) -> tuple[Any, Any]:
    return Annotated[
        list[str] | None, typer.Option(name, help=f"{help_} May be repeated.", metavar=metavar, rich_help_panel="Claims")
    ], None


def _flag(name: str, help_: str) -> tuple[Any, Any]:
    return Annotated[bool, typer.Option(name, help=help_, rich_help_panel="Claims")], False


def _whole(name: str, help_: str, least: int = 0) -> tuple[Any, Any]:
    return Annotated[int | None, typer.Option(name, help=help_, min=least, rich_help_panel="Claims")], None


def _real(name: str, help_: str) -> tuple[Any, Any]:
    return Annotated[float | None, typer.Option(name, help=help_, min=0.0, rich_help_panel="Claims")], None


READ: Group = {
    "kind": _text("--source", "Layout: claims, synpuf, mimic3, mimic4, omop or meds."),
    "phecode_map": _several("--phecode-map", "ICD to PheCode map: a table, an archive, or pkg:NAME.", "FILE"),
    "map_repair": _text("--map-repair", "phecode-zeros: put back leading zeros of PheCodes, where nothing else is wrong."),
    "map_overrides": _text("--map-overrides", "Table of code, vocab, phecode that replaces entries of the map.", "FILE"),
    "map_vocab": _text("--map-vocab", "Vocabulary of a map that names none: icd9, icd10 or icd10cm."),
    "rules": _text("--rules", "Label rules: ccdss, ccw or a TOML file.", "NAME|FILE"),
    "label_column": _several("--label-column", "Label from a column: COLUMN:NAME:VALUE[@YEAR].", "TEXT"),
    "col": _several("--col", "Column that holds what: subject=.. date=.. code=.. vocab=.. source=.. birth=..", "KEY=NAME"),
    "source_value": _several("--source-value", "What a value of the column of sources means: VALUE=inpatient.", "TEXT"),
    "code_pattern": _several("--code-pattern", "Regular expression with groups vocab and code (meds).", "REGEX"),
    "default_source": _text("--default-source", "Kind of rows that name none: inpatient, outpatient, physician, emergency, other."),
    "date_format": _text("--date-format", "Form of dates that are neither ISO nor 8 digits, for example %d/%m/%Y."),
    "icd10_from": _text("--icd10-from", "Codes are ICD-10 from this date on.", "YYYY-MM-DD"),
    "pad_undotted": _flag("--pad-undotted", "Read an undotted number of 1 or 2 digits as a category that has lost its zeros."),
    "admitting": _flag("--admitting", "Use admitting diagnoses too (synpuf)."),
    "keep_ignored": _flag("--keep-ignored", "Keep the PheCodes that the catalog marks Ignore."),
    "control_exclusions": _flag("--control-exclusions", "No label for non-cases with a code near the label's."),
    "keep_ids": _text("--keep-ids", "Write raw and new ids here, outside the workspace.", "FILE"),
    "id_key": _text("--id-key", "32 random bytes for the pseudonyms, instead of the workspace's own.", "FILE"),
    "subjects": _whole("--subjects", "Subjects to make (synthetic-claims).", 1),
}
BUILD: Group = {
    "preset": _text("--preset", "paper, original or strict."),
    "leakage": _text("--leakage", "keep, drop-icd or drop-phecode: what of the labels' own codes leaves the input."),
    "landmark": _text(
        "--landmark", "Input up to so many days after the first row, labels after a gap, within a horizon.", "DAYS[,GAP,HORIZON]"
    ),
    "landmark_date": _text("--landmark-date", "Input up to this date (needs --keep-dates).", "YYYY-MM-DD"),
    "level": _text("--level", "integer, first-decimal or full PheCodes."),
    "threshold": _real("--ratio-threshold", "Select PheCodes with a prevalence ratio above it."),
    "top_k": _whole("--top-k", "How many for a label without any above it."),
    "min_case_support": _whole("--min-case-support", "Cases that must carry a PheCode.", 1),
    "min_case_fraction": _real("--min-case-fraction", "The same as a share of the cases."),
    "denominator": _text("--ratio-denominator", "all or controls."),
    "population": _text("--population", "subjects or observed."),
    "no_select": _flag("--no-select", "Keep every PheCode."),
    "dedupe": _text("--dedupe", "day, month, none or first-per-age30."),
    "time": _text("--time", "months, calendar-month or age30."),
    "min_codes": _whole("--min-codes", "Leave out subjects with fewer."),
    "min_codes_unit": _text("--min-codes-unit", "events, records or unique."),
    "max_events": _whole("--max-events", "Keep the last so many events.", 1),
    "split_file": _text(
        "--split-file", "Table of subject_id (in ingest the source's own, in tokenize as in subjects.parquet) and split.", "FILE"
    ),
    "engine": _text("--engine", "polars, duckdb or spark: the same result."),
}


TASK: Group = {
    "task": _text(
        "--task", "Folder of MEDS labels: one sequence up to each prediction time, of the codes that are tokenized already.", "DIR"
    ),
    "ids": _text("--ids", "Table of ingest --keep-ids, where labels speak of raw ids (--task).", "FILE"),
}


def reading(given: dict[str, Any]) -> dict[str, Any]:
    """Options of READ under the names of the library."""
    return {"source" if name == "kind" else name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}


def choices(given: dict[str, Any]) -> dict[str, Any]:
    """Options of BUILD under the names of the library."""
    found = {name: value for name, value in given.items() if name != "no_select"}
    return {**found, "select": False} if given.get("no_select") else found


def shown(result: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """The honesty table of a build for the screen."""
    columns = ["label", "cases", "prevalence (chance)", "length alone", "best single code", "which"]
    return columns, [[row[column] for column in columns] for row in result["honesty"]]
