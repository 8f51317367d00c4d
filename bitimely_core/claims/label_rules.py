"""Reads label rules and finds the days on which they are met: codes, number of dates, time window
and minimum age (section 6).

A rule matches codes by prefix, dots ignored, family by family. Each of its clauses requires `count`
distinct dates within `window_days`. The onset is the date that completes the earliest such set. The
label is 1 exactly when there is an onset.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import numpy as np
from numpy.typing import NDArray

from bitimely_core.claims.codes import IcdCode, PhecodeTable
from bitimely_core.claims.distinct import find_starts, sort_distinct
from bitimely_core.errors import Reason, usage_error
from bitimely_core.system_errors import raise_system_error

SHIPPED = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.toml"))}
SOURCES = ("inpatient", "outpatient", "physician", "emergency", "other")
COMMENTS = {"source", "note", "reference"}
RULE_FIELDS = {"name", "codes", "exclude", "min_age_years", "any"}
CLAUSE_FIELDS = {"sources", "count", "window_days", "min_gap_days"}

RuleTable = Mapping[str, object]
"""A rule as in a `[[rule]]` of a TOML file, not checked yet."""

Prefixes = dict[str, tuple[str, ...]]
"""Family -> prefixes without dots."""


@dataclass(frozen=True, kw_only=True)
class RuleClause:
    """`count` distinct dates from `sources`: each at least `gap` days after the one before, and at
    most `window` days from first to last.
    """

    sources: frozenset[str]
    count: int = 1
    window: int | None = None
    gap: int = 1


@dataclass(frozen=True, kw_only=True)
class LabelRule:
    """A label rule. Onset: the earliest over its clauses."""

    name: str
    codes: Prefixes
    exclude: Prefixes
    min_age_years: int | None  # None: no limit; 0 is one, which every known age meets
    clauses: tuple[RuleClause, ...]

    def matches(self, code: IcdCode) -> bool:
        """Whether a code belongs to the rule's code set."""
        text = code.code.replace(".", "")
        return text.startswith(self.codes.get(code.family, ())) and not text.startswith(
            self.exclude.get(code.family, ())
        )


def parse_rules(rules: Iterable[RuleTable]) -> tuple[LabelRule, ...]:
    """Rule objects, as in the shipped tables, checked.

    Raises ValueError for an unknown field or value: a misspelt `window_days` must not widen a rule
    silently.
    """
    if isinstance(rules, Mapping | str) or not isinstance(rules, Iterable):
        text = f"rules are a list of objects, found {type(rules).__name__}"
        raise ValueError(text)  # noqa: TRY004
    parsed = tuple(_parse_rule(rule) for rule in rules)
    names = [rule.name for rule in parsed]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two rules have the name {twice[0]!r}")
    return parsed


def load_rules(name: str | Path) -> list[RuleTable]:
    """The rule objects of a shipped table (`ccdss`, `ccw`) or of a TOML file, for `parse_rules` and
    the manifest.

    Raises UserError: not_found or config (exit 2).
    """
    path = SHIPPED.get(str(name), Path(name))
    try:
        rules = tomllib.loads(path.read_text(encoding="utf-8"))
        if set(rules) != {"rule"}:
            raise ValueError(
                f"expected [[rule]] alone, found {', '.join(map(repr, rules)) or 'nothing'}"
            )
        parse_rules(rules["rule"])
    except OSError as error:
        raise_system_error(error, path, stored=False)
        raise usage_error(
            f"cannot be read ({error.strerror})",
            f"shipped are {', '.join(SHIPPED)}",
            "Check --rules",
            code=Reason.NOT_FOUND,
            file=str(path),
        ) from None
    except ValueError as error:
        raise usage_error(str(error), hint="Correct the rule table", file=str(path)) from None
    return list(rules["rule"])


def _parse_rule(rule: RuleTable) -> LabelRule:
    name = rule.get("name") if isinstance(rule, Mapping) else None
    if not isinstance(name, str) or not name.strip():
        raise ValueError("a rule has no name")
    where = f"rule {name!r}"
    _check_fields(rule, RULE_FIELDS | COMMENTS, where)
    clauses = rule.get("any")
    if not _is_list(clauses) or not clauses:
        raise ValueError(f"{where}: `any` is a list of one clause or more")
    if "codes" not in rule:
        raise ValueError(f"{where} has no codes")
    return LabelRule(
        name=name,
        codes=_parse_prefixes(rule["codes"], f"{where}, codes"),
        exclude=_parse_prefixes(rule.get("exclude") or {}, f"{where}, exclude"),
        min_age_years=_parse_count(rule, "min_age_years", None, 0, where),
        clauses=tuple(
            _parse_clause(clause, f"{where}, clause {i}") for i, clause in enumerate(clauses, 1)
        ),
    )


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _parse_clause(clause: RuleTable, where: str) -> RuleClause:
    if not isinstance(clause, Mapping):
        raise ValueError(f"{where} is no object")  # noqa: TRY004
    # `source` is `sources` misspelt
    _check_fields(clause, CLAUSE_FIELDS | COMMENTS - {"source"}, where)
    sources = clause.get("sources")
    if sources is None:
        sources = SOURCES
    if not _is_list(sources) or not sources or not set(sources) <= set(SOURCES):
        raise ValueError(f"{where}: sources are some of {', '.join(SOURCES)}, found {sources!r}")
    return RuleClause(
        sources=frozenset(sources),
        count=_parse_count(clause, "count", 1, 1, where),
        window=_parse_count(clause, "window_days", None, 0, where),
        # dates are distinct anyway
        gap=max(1, _parse_count(clause, "min_gap_days", 1, 0, where)),
    )


def _check_fields(table: RuleTable, fields: set[str], where: str) -> None:
    if unknown := [name for name in table if name not in fields]:
        known = ", ".join(sorted(fields))
        raise ValueError(f"{where} has the unknown field {unknown[0]!r}, known are {known}")


Default = TypeVar("Default", int, None)


def _parse_count(
    table: RuleTable, name: str, default: Default, least: int, where: str
) -> int | Default:
    value = table.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{where}: {name} is an integer of at least {least}, found {value!r}")
    return value


def _parse_prefixes(by_family: object, where: str) -> Prefixes:
    if not isinstance(by_family, Mapping) or not set(by_family) <= {"icd9", "icd10"}:
        text = f"expected lists of prefixes for icd9 and icd10, found {by_family!r}"
        raise ValueError(f"{where}: {text}")
    parsed: Prefixes = {}
    for family, prefixes in by_family.items():
        is_text = _is_list(prefixes) and all(isinstance(prefix, str) for prefix in prefixes)
        texts = [prefix.strip().upper().replace(".", "") for prefix in prefixes] if is_text else []
        if not is_text or not all(texts):
            text = f"prefixes are texts that are not empty, found {prefixes!r}"
            raise ValueError(f"{where}, {family}: {text}")
        parsed[family] = tuple(texts)
    return parsed


def match_rules(rules: Sequence[LabelRule], code: IcdCode) -> tuple[int, ...]:
    """Numbers of the rules whose code set holds a code."""
    return tuple(i for i, rule in enumerate(rules) if rule.matches(code))


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


def find_completion_days(
    subject: NDArray[np.integer], day: NDArray[np.integer], clause: RuleClause
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Subjects that fulfil a clause, ascending, and the day that completes it for each.

    It is the first of `find_completed_sets`: later starts end later, so it is that of the first
    start that fits the window.
    """
    subjects, days = find_completed_sets(subject, day, clause)
    earliest = find_starts(subjects)
    return subjects[earliest], days[earliest]


def find_completed_sets(
    subject: NDArray[np.integer], day: NDArray[np.integer], clause: RuleClause
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
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
    gap = min(clause.gap, days)
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
    if clause.window is not None:
        end = end[key[end] - key[start] <= clause.window]
    return key[end] // span, key[end] % span + first
