"""Options of claims: how sources are read, how sequences are built, and their names in the library (builder's reference, section 16)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from bitimely_cli.options import OptionGroup
from bitimely_core.privacy import format_count

READING = "Claims: reading"
BUILDING = "Claims: sequences"
Text = str | None
Texts = list[str] | None
Count = int | None
Share = float | None


def read_option(flag: str, text: str, metavar: str | None = None, min: float | None = None) -> Any:  # noqa: A002  the name of typer
    """An option of the group `READING`."""
    return typer.Option(flag, help=text, metavar=metavar, rich_help_panel=READING, min=min)


def build_option(flag: str, text: str, metavar: str | None = None, min: float | None = None) -> Any:  # noqa: A002  the name of typer
    """An option of the group `BUILDING`."""
    return typer.Option(flag, help=text, metavar=metavar, rich_help_panel=BUILDING, min=min)


@dataclass(frozen=True, kw_only=True)
class ClaimsReadOptions(OptionGroup):
    """How a source of claims is read."""

    kind: Annotated[Text, read_option("--source", "Layout: claims, synpuf, mimic3, mimic4, omop or meds.")] = None
    phecode_map: Annotated[
        Texts, read_option("--phecode-map", "ICD to PheCode map: a table, an archive, or pkg:NAME. May be repeated.", "FILE")
    ] = None
    map_repair: Annotated[
        Text, read_option("--map-repair", "phecode-zeros: put back leading zeros of PheCodes, where nothing else is wrong.")
    ] = None
    map_overrides: Annotated[
        Text, read_option("--map-overrides", "Table of code, vocab, phecode that replaces entries of the map.", "FILE")
    ] = None
    map_vocab: Annotated[Text, read_option("--map-vocab", "Vocabulary of a map that names none: icd9, icd10 or icd10cm.")] = None
    rules: Annotated[Text, read_option("--rules", "Label rules: ccdss, ccw or a TOML file.", "NAME|FILE")] = None
    label_column: Annotated[
        Texts, read_option("--label-column", "Label from a column: COLUMN:NAME:VALUE[@YEAR]. May be repeated.", "TEXT")
    ] = None
    col: Annotated[
        Texts,
        read_option("--col", "Column that holds what: subject=.. date=.. code=.. vocab=.. source=.. birth=.. May be repeated.", "KEY=NAME"),
    ] = None
    source_value: Annotated[
        Texts, read_option("--source-value", "What a value of the column of sources means: VALUE=inpatient. May be repeated.", "TEXT")
    ] = None
    code_pattern: Annotated[
        Texts, read_option("--code-pattern", "Regular expression with groups vocab and code (meds). May be repeated.", "REGEX")
    ] = None
    default_source: Annotated[
        Text, read_option("--default-source", "Kind of rows that name none: inpatient, outpatient, physician, emergency, other.")
    ] = None
    date_format: Annotated[Text, read_option("--date-format", "Form of dates that are neither ISO nor 8 digits, for example %d/%m/%Y.")] = (
        None
    )
    icd10_from: Annotated[Text, read_option("--icd10-from", "Codes are ICD-10 from this date on.", "YYYY-MM-DD")] = None
    pad_undotted: Annotated[
        bool, read_option("--pad-undotted", "Read an undotted number of 1 or 2 digits as a category that has lost its zeros.")
    ] = False
    admitting: Annotated[bool, read_option("--admitting", "Use admitting diagnoses too (synpuf).")] = False
    keep_ignored: Annotated[bool, read_option("--keep-ignored", "Keep the PheCodes that the catalog marks Ignore.")] = False
    control_exclusions: Annotated[bool, read_option("--control-exclusions", "No label for non-cases with a code near the label's.")] = False
    keep_ids: Annotated[Text, read_option("--keep-ids", "Write raw and new ids here, outside the workspace.", "FILE")] = None
    id_key: Annotated[Text, read_option("--id-key", "32 random bytes for the pseudonyms, instead of the workspace's own.", "FILE")] = None
    subjects: Annotated[Count, read_option("--subjects", "Subjects to make (synthetic-claims).", min=1)] = None

    def collect(self) -> dict[str, Any]:
        """The options that were given, under the names of the library."""
        values = {"source" if name == "kind" else name: value for name, value in super().collect().items()}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


@dataclass(frozen=True, kw_only=True)
class ClaimsBuildOptions(OptionGroup):
    """How sequences are built from the cache of claims."""

    preset: Annotated[Text, build_option("--preset", "paper, original or strict.")] = None
    leakage: Annotated[
        Text, build_option("--leakage", "keep, drop-icd or drop-phecode: what of the labels' own codes leaves the input.")
    ] = None
    landmark: Annotated[
        Text,
        build_option(
            "--landmark", "Input up to so many days after the first row, labels after a gap, within a horizon.", "DAYS[,GAP,HORIZON]"
        ),
    ] = None
    landmark_date: Annotated[Text, build_option("--landmark-date", "Input up to this date (needs --keep-dates).", "YYYY-MM-DD")] = None
    level: Annotated[Text, build_option("--level", "integer, first-decimal or full PheCodes.")] = None
    threshold: Annotated[Share, build_option("--ratio-threshold", "Select PheCodes with a prevalence ratio above it.", min=0.0)] = None
    top_k: Annotated[Count, build_option("--top-k", "How many for a label without any above it.", min=0)] = None
    min_case_support: Annotated[Count, build_option("--min-case-support", "Cases that must carry a PheCode.", min=1)] = None
    min_case_fraction: Annotated[Share, build_option("--min-case-fraction", "The same as a share of the cases.", min=0.0)] = None
    denominator: Annotated[Text, build_option("--ratio-denominator", "all or controls.")] = None
    population: Annotated[Text, build_option("--population", "subjects or observed.")] = None
    no_select: Annotated[bool, build_option("--no-select", "Keep every PheCode.")] = False
    dedupe: Annotated[Text, build_option("--dedupe", "day, month, none or first-per-age30.")] = None
    time: Annotated[Text, build_option("--time", "months, calendar-month or age30.")] = None
    min_codes: Annotated[Count, build_option("--min-codes", "Leave out subjects with fewer.", min=0)] = None
    min_codes_unit: Annotated[Text, build_option("--min-codes-unit", "events, records or unique.")] = None
    max_events: Annotated[Count, build_option("--max-events", "Keep the last so many events.", min=1)] = None
    split_file: Annotated[
        Text,
        build_option(
            "--split-file", "Table of subject_id (in ingest the source's own, in tokenize as in subjects.parquet) and split.", "FILE"
        ),
    ] = None
    engine: Annotated[Text, build_option("--engine", "polars, duckdb or spark: the same result.")] = None
    small_counts: Annotated[
        bool, build_option("--small-counts", "Show counts of 1 to 10 people in pages and results: for synthetic or consented data only.")
    ] = False
    individual_timelines: Annotated[
        bool,
        build_option("--individual-timelines", "Draw the histories of some subjects in the page: for synthetic or consented data only."),
    ] = False

    def build_choices(self) -> dict[str, Any]:
        """The options that were given, under the names of the library."""
        values = self.collect()
        return {**values, "select": False} if values.pop("no_select", False) else values


@dataclass(frozen=True, kw_only=True)
class TaskOptions(OptionGroup):
    """Sequences up to the prediction times of a task."""

    task: Annotated[
        Text,
        build_option(
            "--task", "Folder of MEDS labels: one sequence up to each prediction time, of the codes that are tokenized already.", "DIR"
        ),
    ] = None
    ids: Annotated[Text, build_option("--ids", "Table of ingest --keep-ids, where labels speak of raw ids (--task).", "FILE")] = None


def shortcut_rows(baselines: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """The shortcut baselines of a build, for the screen."""
    columns = {
        "label": "label",
        "cases": "cases",
        "prevalence": "prevalence (chance)",
        "sequence length only": "length alone",
        "best single code": "best single code",
        "code": "which",
    }
    return list(columns), [[format_count(row[key]) if key == "cases" else row[key] for key in columns.values()] for row in baselines]
