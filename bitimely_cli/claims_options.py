"""Options of claims: how sources are read, how sequences are built, and their names in the library
(builder's reference, section 16).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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


def declare_option(
    group: str, text: str, metavar: str | None = None, flag: str = "", least: float | None = None
) -> Any:
    """An option of a group of the help; `flag`: if it is not called as the field."""
    return typer.Option(
        *([flag] if flag else []), help=text, metavar=metavar, rich_help_panel=group, min=least
    )


read_option, build_option = partial(declare_option, READING), partial(declare_option, BUILDING)


@dataclass(frozen=True, kw_only=True)
class ClaimsFileOptions(OptionGroup):
    """How tables of claims are read."""

    kind: Annotated[
        Text,
        read_option(
            "Layout: claims, synpuf, mimic3, mimic4, omop or meds (default: "
            "as the names of the files show).",
            flag="--source",
        ),
    ] = None
    col: Annotated[
        Texts,
        read_option(
            "Column that holds what: subject=.. date=.. code=.. vocab=.. source=.. birth=.. "
            "status=.. amount=.. (of reversals) certainty=.. (none: not used). "
            "May be repeated.",
            "KEY=NAME",
        ),
    ] = None
    source_value: Annotated[
        Texts,
        read_option(
            "What a value of the column of sources is: VALUE=inpatient. May be repeated.", "TEXT"
        ),
    ] = None
    source_vocab: Annotated[
        Texts,
        read_option(
            "Vocabulary that a word of the column of vocabularies stands for: 09=icd9, "
            "KCD7=icd10, SM=none. May be repeated.",
            "WORD=VOCAB",
        ),
    ] = None
    code_pattern: Annotated[
        Texts,
        read_option(
            "Regular expression with groups vocab and code (meds). May be repeated.", "REGEX"
        ),
    ] = None
    default_source: Annotated[
        Text,
        read_option(
            "Kind of rows that name none: inpatient, outpatient, physician, emergency, other."
        ),
    ] = None
    date_format: Annotated[
        Texts,
        read_option(
            "Form of dates, if not ISO nor 8 digits: as %d/%m/%Y; of numbers sas, stata, unix, r, "
            "excel, excel-1904, year, yyyymm, roc, wareki, quarter. COLUMN=FORM: of date, birth, "
            "death, obs_start, obs_end or index_date alone. May be repeated.",
            "[COLUMN=]FORM",
        ),
    ] = None
    icd10_from: Annotated[
        Text, read_option("Codes are ICD-10 from this date on.", "YYYY-MM-DD")
    ] = None
    keep_ids: Annotated[
        Text, read_option("Write raw and new ids here, outside the workspace.", "FILE")
    ] = None
    id_key: Annotated[
        Text,
        read_option("32 random bytes for the pseudonyms, instead of the workspace's own.", "FILE"),
    ] = None

    def collect(self) -> dict[str, Any]:
        """The options that were given, under the names of the library."""
        values = {
            "source" if name == "kind" else name: value for name, value in super().collect().items()
        }
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }


@dataclass(frozen=True, kw_only=True)
class ClaimsReadOptions(ClaimsFileOptions):
    """How a source of claims is read, with what codes and labels mean."""

    phecode_map: Annotated[
        Texts,
        read_option(
            "ICD to PheCode map: table, archive, pkg:NAME, or phecode12, phecodex, phecodex-who. "
            "May be repeated.",
            "FILE|NAME",
        ),
    ] = None
    map_repair: Annotated[
        Text,
        read_option(
            "phecode-zeros: put back leading zeros of PheCodes, where nothing else is wrong."
        ),
    ] = None
    map_overrides: Annotated[
        Text, read_option("Table of code, vocab, phecode that replaces entries of the map.", "FILE")
    ] = None
    map_vocab: Annotated[
        Text, read_option("Vocabulary of a map that names none: icd9, icd10 or icd10cm.")
    ] = None
    rules: Annotated[
        Text, read_option("Label rules: ccdss, ccw, none or a TOML file.", "NAME|FILE")
    ] = None
    label_column: Annotated[
        Texts,
        read_option("Label from a column: COLUMN:NAME:VALUE[@YEAR]. May be repeated.", "TEXT"),
    ] = None
    pad_undotted: Annotated[
        bool,
        read_option(
            "Read an undotted number of 1 or 2 digits as a category that has lost its zeros.",
            flag="--pad-undotted",
        ),
    ] = False
    codes: Annotated[
        Text,
        read_option(
            "icd, or all: also codes of other vocabularies, as tokens of their own, "
            "with their numbers (meds, omop)."
        ),
    ] = None
    time_unit: Annotated[
        Text, read_option("day, or minute: times of events as exact as the source has them.")
    ] = None
    admitting: Annotated[
        bool, read_option("Use admitting diagnoses too (synpuf).", flag="--admitting")
    ] = False
    keep_ignored: Annotated[
        bool, read_option("Keep the PheCodes that the catalog marks Ignore.", flag="--keep-ignored")
    ] = False
    control_exclusions: Annotated[
        bool,
        read_option(
            "No label for non-cases with a code near the label's.", None, "--control-exclusions"
        ),
    ] = False
    sex_restrictions: Annotated[
        bool,
        read_option(
            "Leave out PheCodes of the other sex, where the map states sexes.",
            None,
            "--sex-restrictions",
        ),
    ] = False
    subjects: Annotated[Count, read_option("Subjects to make (synthetic-claims).", least=1)] = None


@dataclass(frozen=True, kw_only=True)
class ClaimsBuildOptions(OptionGroup):
    """How sequences are built from the cache of claims."""

    preset: Annotated[Text, build_option("paper, original or strict.")] = None
    leakage: Annotated[
        Text,
        build_option(
            "keep, drop-icd or drop-phecode: what of the labels' own codes leaves the input."
        ),
    ] = None
    landmark: Annotated[
        Text,
        build_option(
            "Input up to so many days after the first row, labels after a gap, within a horizon.",
            "DAYS[,GAP,HORIZON]",
        ),
    ] = None
    landmark_date: Annotated[
        Text, build_option("Input up to this date (needs --keep-dates).", "YYYY-MM-DD")
    ] = None
    cohort: Annotated[
        Text,
        build_option(
            "Subjects at risk of an outcome, to their index days: "
            "diabetes-incident, chf-incident, diabetes-codes (dates and codes alone) or a "
            "TOML file.",
            "NAME|FILE",
        ),
    ] = None
    level: Annotated[Text, build_option("integer, first-decimal or full PheCodes.")] = None
    threshold: Annotated[
        Share,
        build_option(
            "Select PheCodes with a prevalence ratio above it.", None, "--ratio-threshold", 0.0
        ),
    ] = None
    top_k: Annotated[Count, build_option("How many for a label without any above it.", least=0)] = (
        None
    )
    min_case_support: Annotated[
        Count, build_option("Cases that must carry a PheCode.", least=1)
    ] = None
    min_case_fraction: Annotated[
        Share, build_option("The same as a share of the cases.", least=0.0)
    ] = None
    denominator: Annotated[Text, build_option("all or controls.", flag="--ratio-denominator")] = (
        None
    )
    population: Annotated[Text, build_option("subjects or observed.")] = None
    no_select: Annotated[
        bool, build_option("Keep every PheCode of the training subjects.", flag="--no-select")
    ] = False
    dedupe: Annotated[Text, build_option("day, month, none or first-per-age30.")] = None
    time: Annotated[Text, build_option("months, calendar-month or age30.")] = None
    values: Annotated[
        Text,
        build_option(
            "Numbers of events (--codes all): "
            "none, deciles of the training split, or raw for models."
        ),
    ] = None
    time_to_event: Annotated[
        Text,
        build_option(
            "Labels are times to event (needs a landmark): predict the risk within so many days.",
            "DAYS[,DAYS...]",
        ),
    ] = None
    min_codes: Annotated[Count, build_option("Leave out subjects with fewer.", least=0)] = None
    min_codes_unit: Annotated[Text, build_option("events, records or unique.")] = None
    max_events: Annotated[Count, build_option("Keep the last so many events.", least=1)] = None
    split_file: Annotated[
        Text,
        build_option(
            "Table of subject_id (in ingest the source's own, "
            "in tokenize as in subjects.parquet) and split.",
            "FILE",
        ),
    ] = None
    engine: Annotated[
        Text, build_option("polars in this process, or spark on a cluster: the same result.")
    ] = None
    small_counts: Annotated[
        bool | None,
        build_option(
            "Show counts of 1 to 10 people in pages and results, which may be shared: for "
            "consented data only (default: of synthetic people).",
            flag="--small-counts/--no-small-counts",
        ),
    ] = None
    individual_timelines: Annotated[
        bool,
        build_option(
            "Draw histories of some subjects in the page: for synthetic or consented data only.",
            flag="--individual-timelines",
        ),
    ] = False

    def build_choices(self) -> dict[str, Any]:
        """The options that were given, under the names of the library."""
        values = self.collect()
        if self.small_counts is False:  # said: synthetic people have it by default
            values["small_counts"] = False
        return {**values, "select": False} if values.pop("no_select", False) else values


@dataclass(frozen=True, kw_only=True)
class TaskOptions(OptionGroup):
    """Sequences of the codes of others: of those that are tokenized, or of a run."""

    vocabulary: Annotated[
        Text,
        build_option(
            "Use the codes, code map and choices of this run or export, for people that it was not "
            "trained on.",
            "RUN",
        ),
    ] = None

    task: Annotated[
        Text,
        build_option(
            "Folder of MEDS labels: one sequence up to each prediction time, "
            "of the codes that are tokenized already.",
            "DIR",
        ),
    ] = None
    ids: Annotated[
        Text,
        build_option("Table of ingest --keep-ids, where labels speak of raw ids (--task).", "FILE"),
    ] = None


def shortcut_rows(baselines: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """The shortcut baselines of a build, for the screen."""
    columns = ["label", "cases", "prevalence", "sequence length only", "best single code", "code"]
    keys = ("label", "cases", "prevalence (chance)", "length alone", "best single code", "which")
    return columns, [
        [format_count(row[key]) if key == "cases" else row[key] for key in keys]
        for row in baselines
    ]
