"""The options of `ingest` that sources interpret."""

from __future__ import annotations

import re
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from bitimely_core.claims import dates
from bitimely_core.claims.engines import ENGINES
from bitimely_core.claims.label_rules import SOURCES as KINDS
from bitimely_core.claims.options import ClaimsOptions
from bitimely_core.claims.phecode_maps import locate_map
from bitimely_core.errors import Reason, check_choice, safe_text, unknown_name_error, usage_error

REFUSED = {  # layout -> options that have no meaning in it
    "omop": ("col", "source_value", "label_column"),
    "synpuf": ("col", "icd10_from", "source_value", "default_source"),
    "mimic3": ("col", "icd10_from", "source_value", "label_column", "default_source"),
    "mimic4": ("col", "icd10_from", "source_value", "label_column", "default_source"),
    "meds": ("col", "icd10_from", "source_value", "label_column"),
}


def parse_switch_day(options: ClaimsOptions) -> int | None:
    """The day of `--icd10-from`. Raises UserError: config (exit 2)."""
    if not (text := options.icd10_from):
        return None
    if (day := dates.parse_day(str(text))) is None:
        raise usage_error(f"--icd10-from {safe_text(text)} is not a date", "expected YYYY-MM-DD")
    return day


def _check_date_form(form: str) -> None:
    """Raises UserError: config (exit 2), for a form that does not show day, month and year."""
    try:
        fits = (
            not form
            or form in dates.SERIALS
            or dates.parse_day(datetime(2009, 12, 31, tzinfo=UTC).strftime(form), form) == 14609
        )
    except ValueError:
        fits = False
    if not fits:
        expected = f"expected day, month and year in the letters of strptime, as %d/%m/%Y, or {' or '.join(dates.SERIALS)}"
        raise usage_error(f"--date-format {safe_text(form)}", expected, field="--date-format")


def parse_default_source(options: ClaimsOptions) -> str:
    """`--default-source`, the kind of claims without one."""
    kind = options.default_source or "outpatient"
    check_choice("kind of claims", kind, KINDS)
    return str(kind)


def parse_pairs(
    options: ClaimsOptions, name: str, known: Collection[str] | None = None
) -> dict[str, str]:
    """An option KEY=VALUE that may be repeated; keys in lower case. Raises UserError: config,
    unknown_name (exit 2).
    """
    pairs = {}
    for text in getattr(options, name):
        key, equals, value = (part.strip() for part in str(text).partition("="))
        if not (key and equals and value):
            raise usage_error(
                f"--{name.replace('_', '-')} {safe_text(text)} has another form",
                "expected KEY=VALUE",
            )
        if known is not None and key.lower() not in known:
            raise unknown_name_error(f"key of --{name.replace('_', '-')}", key, list(known))
        pairs[key.lower()] = value
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
    if len({one.name for one in columns}) < len(columns):
        raise usage_error("--label-column gives one name to two labels")
    return columns


def check_options(options: ClaimsOptions) -> None:
    """Check what can be checked without the source. Raises UserError (config, unknown_name or
    not_found; exit 2).
    """
    check_choice("engine", options.engine, ENGINES)
    for name in REFUSED.get(options.source, ()):
        if getattr(options, name):
            hint = f"Leave --{name.replace('_', '-')} out"
            raise usage_error(
                f"--{name.replace('_', '-')} has no meaning with --source {options.source}",
                hint=hint,
            )
    for name, known in (("codes", ["icd", "all"]), ("time_unit", ["day", "minute"])):
        if (value := getattr(options, name)) and value not in known:
            raise unknown_name_error(f"--{name.replace('_', '-')}", value, known)
    if options.codes == "all" and options.source not in {"meds", "omop"}:
        expected = "expected meds or omop, which have codes of other vocabularies"
        raise usage_error(
            f"--codes all with --source {options.source}",
            expected,
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
    parse_switch_day(options)
    _check_date_form(options.date_format)
    parse_default_source(options)
    parse_label_columns(options)
    for name in ("col", "source_value"):
        parse_pairs(options, name)
    maps = [
        path
        for path in map(locate_map, map(str, options.phecode_map))
        if not path.startswith("pkg:")
    ]
    files = [("phecode_map", path) for path in maps] + [
        (name, getattr(options, name)) for name in ("map_overrides", "split_file", "id_key")
    ]
    for name, file in files:
        # a member of an archive
        inside = (file, *Path(file).parents) if name == "phecode_map" else (file,)
        if file and not any(Path(place).is_file() for place in inside):
            flag = f"--{name.replace('_', '-')}"
            raise usage_error(
                "no such file",
                "expected a file",
                f"Check {flag}",
                code=Reason.NOT_FOUND,
                file=str(file),
                field=flag,
            )
