"""Reads label rules and finds the days on which they are met: codes, number of dates, time window
and minimum age (section 6).

A rule matches codes by prefix, dots ignored, family by family. Each of its clauses requires `count`
distinct dates within `window_days`. The onset is the date that completes the earliest such set. The
label is 1 exactly when there is an onset.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from bitimely_core.claims.codes import IcdCode, PhecodeTable
from bitimely_core.claims.distinct import sort_distinct
from bitimely_core.errors import Reason, clean, usage_error
from bitimely_core.store.records import describe_invalid
from bitimely_core.system_errors import raise_system_error

T = TypeVar("T")

SHIPPED = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.toml"))}
NO_RULES = "none"
SOURCES = ("inpatient", "outpatient", "physician", "emergency", "other")
COMMENTS = {"note", "reference"}  # fields of a table that change nothing

Numbers = NDArray[np.integer]
"""Subjects or days of rows [n]."""

RuleTable = Mapping[str, object]
"""A rule as in a `[[rule]]` of a TOML file, not checked yet."""


def _parse_prefix(text: str) -> str:
    """A prefix of codes without dots."""
    prefix = text.strip().upper().replace(".", "")
    if not prefix:
        raise ValueError("prefixes are texts that are not empty")
    return prefix


AtLeast0 = Annotated[int, Field(ge=0, strict=True)]
AtLeast1 = Annotated[int, Field(ge=1, strict=True)]
Kinds = frozenset[Annotated[str, Field(pattern=rf"^({'|'.join(SOURCES)})$")]]
Family = Annotated[str, Field(pattern=r"^icd(9|10)$")]
Prefixes = dict[Family, tuple[Annotated[str, AfterValidator(_parse_prefix)], ...]]


class _RulePart(BaseModel):
    """A table of a rule. A misspelt `window_days` must not widen a rule silently."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_comments(cls, table: object) -> object:
        """The fields with a value that are no comments. `source` in a clause is misspelt."""
        if not isinstance(table, Mapping):
            return table
        comments = COMMENTS if "sources" in cls.model_fields else COMMENTS | {"source"}
        return {name: table[name] for name in table.keys() - comments if table[name] is not None}


class RuleClause(_RulePart):
    """`count` distinct dates from `sources`: each at least `min_gap_days` after the one before, and
    at most `window_days` from first to last.
    """

    sources: Annotated[Kinds, Field(min_length=1)] = frozenset(SOURCES)
    count: AtLeast1 = 1
    window_days: AtLeast0 | None = None
    min_gap_days: AtLeast0 = 1


class LabelRule(_RulePart):
    """A label rule. Onset: the earliest over its clauses."""

    name: Annotated[str, Field(pattern=r"\S")]
    codes: Prefixes
    exclude: Prefixes = {}
    min_age_years: AtLeast0 | None = None  # None: no limit; 0 is one, which every known age meets
    clauses: Annotated[tuple[RuleClause, ...], Field(alias="any", min_length=1)]

    def matches(self, code: IcdCode) -> bool:
        """Whether a code belongs to the rule's code set."""
        text = code.code.replace(".", "")
        return text.startswith(self.codes.get(code.family, ())) and not text.startswith(
            self.exclude.get(code.family, ())
        )


def parse_rules(rules: Iterable[RuleTable]) -> tuple[LabelRule, ...]:
    """Rule objects, as in the shipped tables, checked. Raises ValueError for an unknown field or
    value.
    """
    try:
        parsed = TypeAdapter(tuple[LabelRule, ...]).validate_python(rules)
    except ValidationError as error:
        field, value, message = describe_invalid(error)
        text = f"rule.{field}: {message}, {value}"
        if error.errors()[0]["type"] == "extra_forbidden":
            part = RuleClause if ".any." in field else LabelRule
            fields = (field.alias or name for name, field in part.model_fields.items())
            text = f"{text}, known are {', '.join(sorted(fields))}"
        raise ValueError(text) from None
    names = [rule.name for rule in parsed]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two rules have the name {twice[0]!r}")
    return parsed


def load_rules(name: str | Path) -> list[RuleTable]:
    """The rule objects of a shipped table (`ccdss`, `ccw`) or of a TOML file, for `parse_rules` and
    the manifest.

    `none`: no rules, hence no labels but those of the source. Raises UserError: not_found or config
    (exit 2).
    """
    if str(name) == NO_RULES:
        return []
    return read_definition(name, SHIPPED, f"Check --rules ({NO_RULES}: no rules)", _read_rules)


def _read_rules(table: Mapping[str, list[RuleTable]]) -> list[RuleTable]:
    if set(table) != {"rule"}:
        raise ValueError(
            f"expected [[rule]] alone, found {', '.join(map(repr, table)) or 'nothing'}"
        )
    (rules,) = table.values()
    parse_rules(rules)
    return list(rules)


def read_definition(
    name: str | Path, shipped: Mapping[str, Path], hint: str, parse: Callable[[dict[str, Any]], T]
) -> T:
    """What `parse` makes of a shipped TOML file, or of one of the user.

    Raises UserError: not_found, with `hint`, or config where `parse` raises ValueError (exit 2).
    """
    path = shipped.get(str(name), Path(name))
    try:
        return parse(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise_system_error(error, path, stored=False)
        raise usage_error(
            f"cannot be read ({error.strerror})",
            f"shipped are {', '.join(shipped)}",
            hint,
            code=Reason.NOT_FOUND,
            file=str(path),
        ) from None
    except ValueError as error:
        problem, field = str(error), ""
        if isinstance(error, ValidationError):
            field, _, problem = describe_invalid(error)
        raise usage_error(
            clean(problem, 200), hint="Correct the definition", file=str(path), field=field or None
        ) from None


def find_defining_phecodes(
    rules: Sequence[LabelRule], tables: Mapping[str, PhecodeTable]
) -> dict[str, list[str]]:
    """Rule -> the PheCodes that the map gives to the codes of the rule, in text order.

    They come from the map, not from the data, so that `drop_phecode` means the same everywhere.
    """
    by_rule: dict[str, set[str]] = {rule.name: set() for rule in rules}
    for vocab, table in tables.items():
        for text, phecodes in table.items():
            code = IcdCode(vocab, text)
            for rule in rules:
                if rule.matches(code):
                    by_rule[rule.name].update(phecodes)
    return {name: sorted(phecodes) for name, phecodes in by_rule.items()}


def find_completed_sets(
    subject: Numbers, day: Numbers, clause: RuleClause
) -> tuple[Numbers, Numbers]:
    """Subject and last day of every set of dates that fulfils a clause, by subject, then day.

    From every start date the next date that is far enough from the last one is chosen until there
    are `count`. The set counts if it is within the window. Two sets may end on one day.

    Args:
        subject: [n] integers >= 0.
        day: [n] of matching events from the clause's sources, in any order, repeats allowed.
        clause: what is required.
    """
    if not len(day):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    first = int(day.min())
    days = int(day.max()) - first + 1  # a gap of that many days excludes every later date
    gap = min(max(clause.min_gap_days, 1), days)  # dates are distinct anyway
    span = days + gap
    key = sort_distinct(subject.astype(np.int64) * span + (day.astype(np.int64) - first))
    start = end = np.arange(len(key))  # of each set, as indices in `key`
    for _ in range(clause.count - 1):
        following = np.searchsorted(key, key[end] + gap)
        exists = following < len(key)
        exists[exists] = key[following[exists]] // span == key[end[exists]] // span
        start, end = start[exists], following[exists]
        if not len(end):
            break
    if clause.window_days is not None:
        end = end[key[end] - key[start] <= clause.window_days]
    return key[end] // span, key[end] % span + first
