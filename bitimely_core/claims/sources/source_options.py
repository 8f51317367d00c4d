"""Checks and parses the options of `ingest` that sources interpret."""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from bitimely_core.claims import dates
from bitimely_core.claims.claims_reading import ClaimsOptions
from bitimely_core.claims.codes import FAMILIES
from bitimely_core.claims.engines import ENGINES
from bitimely_core.claims.label_rules import SOURCES as KINDS
from bitimely_core.claims.map_files import is_map_path, locate_map
from bitimely_core.claims.sources.columns import SUBJECT_DATE_COLUMNS
from bitimely_core.claims.sources.words import NO_DIAGNOSIS
from bitimely_core.errors import Reason, check_choice, safe_text, unknown_name_error, usage_error

MIMIC_REFUSED = (
    "col",
    "icd10_from",
    "source_value",
    "source_vocab",
    "label_column",
    "default_source",
)
REFUSED = {  # layout -> options that have no meaning in it
    "omop": ("col", "source_value", "label_column"),
    "synpuf": ("col", "icd10_from", "source_value", "source_vocab", "default_source"),
    "mimic3": MIMIC_REFUSED,
    "mimic4": MIMIC_REFUSED,
    "meds": ("col", "icd10_from", "source_value", "source_vocab", "label_column"),
}
DATE_COLUMNS = ("date", *SUBJECT_DATE_COLUMNS, "index_date")  # that may have forms of their own
SAMPLE_DATE = datetime(2009, 12, 31, tzinfo=UTC)  # by which a form of dates is tried


def _name_flag(option: str) -> str:
    """An option as the command line spells it."""
    return f"--{option.replace('_', '-')}"


def parse_switch_day(options: ClaimsOptions) -> int | None:
    """The day of `--icd10-from`. Raises UserError: config (exit 2)."""
    if not options.icd10_from:
        return None
    text = str(options.icd10_from)
    day = dates.parse_day(text)
    if day is None:
        raise usage_error(f"--icd10-from {safe_text(text)} is not a date", "expected YYYY-MM-DD")
    return day


def parse_date_forms(options: ClaimsOptions) -> dict[str, str]:
    """`--date-format FORM` and `--date-format COLUMN=FORM`: the form of each of `DATE_COLUMNS`,
    empty where none is stated.

    Raises UserError: unknown_name (exit 2) for a column that has no dates.
    """
    texts = options.date_format
    general, forms = "", dict[str, str]()
    for text in [texts] if isinstance(texts, str) else texts:
        key, equals, form = text.partition("=")
        if not equals:
            general = text
        elif key not in DATE_COLUMNS:
            raise unknown_name_error("column of --date-format", key, DATE_COLUMNS)
        else:
            forms[key] = form
    return {name: forms.get(name, general) for name in DATE_COLUMNS}


def _check_date_form(form: str) -> None:
    """Raises UserError (config, exit 2) for a form that does not show month and year."""
    if not form or form in dates.NUMBER_FORMS:
        return
    with suppress(ValueError):
        days = set(map(dates.to_day, (SAMPLE_DATE, SAMPLE_DATE.replace(day=1))))
        if dates.parse_day(SAMPLE_DATE.strftime(form), form) in days:
            return
    expected = (
        "expected day, month and year, or the last two, in the letters of strptime, as %d/%m/%Y"
    )
    expected += f", or {', '.join(dates.NUMBER_FORMS)}"
    raise usage_error(f"--date-format {safe_text(form)}", expected, field="--date-format")


def parse_pairs(
    options: ClaimsOptions, name: str, keys: Collection[str] | None = None
) -> dict[str, str]:
    """An option KEY=VALUE that may be repeated; its keys, some of `keys`, in lower case.

    Raises UserError: config, unknown_name (exit 2).
    """
    flag, pairs = _name_flag(name), {}
    for text in getattr(options, name):
        key, equals, value = (part.strip() for part in str(text).partition("="))
        if not (key and equals and value):
            raise usage_error(f"{flag} {safe_text(text)} has another form", "expected KEY=VALUE")
        if keys is not None and key.lower() not in keys:
            raise unknown_name_error(f"key of {flag}", key, keys)
        pairs[key.lower()] = value
    return pairs


def parse_vocabularies(options: ClaimsOptions) -> dict[str, str]:
    """`--source-vocab WORD=VOCABULARY`: word in lower case -> vocabulary. Raises UserError: config,
    unknown_name (exit 2).
    """
    pairs = parse_pairs(options, "source_vocab")
    for vocab in pairs.values():
        check_choice("vocabulary", vocab, (*FAMILIES, NO_DIAGNOSIS))
    return pairs


class LabelColumn(NamedTuple):
    """`--label-column COLUMN:NAME:VALUE[@YEAR]`: the label `name` is 1 where the column holds
    `value`.
    """

    column: str
    name: str
    value: str
    year: str | None


def parse_label_columns(options: ClaimsOptions) -> list[LabelColumn]:
    """`--label-column`, any number of times. Raises UserError: config (exit 2)."""
    columns = []
    for text in options.label_column:
        parts = re.fullmatch(r"([^:]+):([A-Za-z]\w*):([^:@]+)(?:@(\d{4}))?", str(text), re.ASCII)
        if parts is None:
            raise usage_error(
                f"--label-column {safe_text(text)} has another form",
                "expected COLUMN:NAME:VALUE or COLUMN:NAME:VALUE@YEAR",
            )
        column, name, value, year = parts.groups()
        columns.append(LabelColumn(column.strip(), name.lower(), value.strip(), year))
    if len({label.name for label in columns}) < len(columns):
        raise usage_error("--label-column gives one name to two labels")
    return columns


def check_options(options: ClaimsOptions) -> None:
    """Check what can be checked without the source. Raises UserError (config, unknown_name or
    not_found; exit 2).
    """
    check_choice("engine", options.engine, ENGINES)
    check_choice("--codes", options.codes or None, ("icd", "all"))
    check_choice("--time-unit", options.time_unit or None, ("day", "minute"))
    _refuse_combinations(options)
    parse_switch_day(options)
    for form in set(parse_date_forms(options).values()):
        _check_date_form(form)
    for kind in (options.default_source, *parse_pairs(options, "source_value").values()):
        check_choice("kind of claims", kind or None, KINDS)
    parse_label_columns(options)
    parse_pairs(options, "col")
    parse_vocabularies(options)
    _check_files(options)


def _refuse_combinations(options: ClaimsOptions) -> None:
    """Raises UserError (config, exit 2) for options that have no meaning together."""
    for name in REFUSED.get(options.source, ()):
        if getattr(options, name):
            flag = _name_flag(name)
            raise usage_error(
                f"{flag} has no meaning with --source {options.source}", hint=f"Leave {flag} out"
            )
    if options.codes == "all" and options.source not in {"meds", "omop"}:
        raise usage_error(
            f"--codes all with --source {options.source}",
            "expected meds or omop, which have codes of other vocabularies",
            "Leave --codes out",
            field="--codes",
        )
    if options.time_unit == "minute" and options.date_format:
        raise usage_error(
            "--time-unit minute with --date-format",
            "times of day are read from ISO dates",
            "Leave one of them out",
            field="--time-unit",
        )


def _check_files(options: ClaimsOptions) -> None:
    """Raises UserError (not_found, exit 2) for a file that an option names and that is missing."""
    files = [(name, getattr(options, name)) for name in ("map_overrides", "split_file", "id_key")]
    missing = [(name, path) for name, path in files if path and not Path(path).is_file()]
    maps = map(locate_map, map(str, options.phecode_map))
    missing += [("phecode_map", path) for path in maps if not is_map_path(path)]
    if missing:
        flag, path = _name_flag(missing[0][0]), str(missing[0][1])
        raise usage_error(
            "no such file",
            "expected a file",
            f"Check {flag}",
            code=Reason.NOT_FOUND,
            file=path,
            field=flag,
        )
