"""The options of `ingest` that sources interpret."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from bitimely_core.claims import dates
from bitimely_core.claims.label_rules import SOURCES as KINDS
from bitimely_core.errors import UserError, safe_text, usage_error
from bitimely_core.registry import unknown


def usage(text: str, wanted: str = "", action: str = "") -> UserError:
    """An option that cannot be followed (exit 2)."""
    return usage_error(text, wanted, action)


def parse_switch_day(options: Mapping[str, Any]) -> int | None:
    """The day of `--icd10-from`.

    Raises:
        UserError: config (exit 2).
    """
    if not (text := options.get("icd10_from")):
        return None
    if (day := dates.parse_day(str(text))) is None:
        raise usage(f"--icd10-from {safe_text(text)} is no date", "expected YYYY-MM-DD")
    return day


def parse_default_source(options: Mapping[str, Any], otherwise: str = "outpatient") -> str:
    """`--default-source`, the kind of claims that do not say theirs."""
    kind = options.get("default_source") or otherwise
    if kind not in KINDS:
        raise unknown("kind of claims", kind, list(KINDS))
    return str(kind)


def parse_pairs(options: Mapping[str, Any], name: str, known: Collection[str] | None = None) -> dict[str, str]:
    """An option that is given as KEY=VALUE, any number of times; keys in lower case.

    Raises:
        UserError: config, unknown_name (exit 2).
    """
    found = {}
    for text in options.get(name) or ():
        key, equals, value = (part.strip() for part in str(text).partition("="))
        if not (key and equals and value):
            raise usage(f"--{name.replace('_', '-')} {safe_text(text)} has no = between two words", "expected KEY=VALUE")
        if known is not None and key.lower() not in known:
            raise unknown(f"key of --{name.replace('_', '-')}", key, list(known))
        found[key.lower()] = value
    return found


class LabelColumn(NamedTuple):
    """`--label-column COLUMN:NAME:VALUE[@YEAR]`: the label `name` is 1 where the column holds `value`."""

    column: str
    name: str
    value: str
    year: str | None


def parse_label_columns(options: Mapping[str, Any]) -> list[LabelColumn]:
    """`--label-column`, any number of times.

    Raises:
        UserError: config (exit 2).
    """
    found = []
    for text in options.get("label_column") or ():
        parts = re.fullmatch(r"([^:]+):([A-Za-z]\w*):([^:@]+)(?:@(\d{4}))?", str(text), re.ASCII)
        if parts is None:
            raise usage(f"--label-column {safe_text(text)} is not understood", "expected COLUMN:NAME:VALUE or COLUMN:NAME:VALUE@YEAR")
        column, name, value, year = parts.groups()
        found.append(LabelColumn(column.strip(), name.lower(), value.strip(), year))
    if len({one.name for one in found}) < len(found):
        raise usage("--label-column gives one name to two labels")
    return found


def refuse_options(kind: str, options: Mapping[str, Any], *names: str) -> None:
    """Refuses options that this source cannot follow.

    Raises:
        UserError: config (exit 2).
    """
    for name in names:
        if options.get(name):
            raise usage(f"--{name.replace('_', '-')} has no meaning with --source {kind}")
