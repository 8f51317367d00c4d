"""Label rules as data: codes, number of dates, time window and minimum age (section 6).

A rule matches codes by prefix, dots ignored, family by family. Each of its clauses requires `count`
distinct dates within `window_days`; the onset is the date that completes the earliest such set, and
the label is 1 exactly when there is an onset.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    """`count` distinct dates from `sources`, each at least `gap` days after the one before, at most
    `window` days from first to last.
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

    Raises ValueError: for an unknown field or value: a misspelt `window_days` must not widen a rule
    silently.
    """
    if isinstance(rules, Mapping | str) or not isinstance(rules, Iterable):
        raise ValueError(f"rules are a list of objects, found {type(rules).__name__}")  # noqa: TRY004
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
        text, shipped = f"cannot be read ({error.strerror})", f"shipped are {', '.join(SHIPPED)}"
        raise usage_error(
            text, shipped, "Check --rules", code=Reason.NOT_FOUND, file=str(path)
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
    if not isinstance(clauses, Sequence) or isinstance(clauses, str) or not clauses:
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


def _parse_clause(clause: RuleTable, where: str) -> RuleClause:
    if not isinstance(clause, Mapping):
        raise ValueError(f"{where} is no object")  # noqa: TRY004
    # `source` is `sources` misspelt
    _check_fields(clause, CLAUSE_FIELDS | COMMENTS - {"source"}, where)
    sources = clause.get("sources")
    if sources is None:
        sources = SOURCES
    if (
        not isinstance(sources, Sequence)
        or isinstance(sources, str)
        or not sources
        or not set(sources) <= set(SOURCES)
    ):
        raise ValueError(f"{where}: sources are some of {', '.join(SOURCES)}, found {sources!r}")
    return RuleClause(
        sources=frozenset(sources),
        count=_parse_count(clause, "count", 1, 1, where) or 1,
        window=_parse_count(clause, "window_days", None, 0, where),
        # dates are distinct anyway
        gap=max(1, _parse_count(clause, "min_gap_days", 1, 0, where) or 1),
    )


def _check_fields(given: RuleTable, fields: set[str], where: str) -> None:
    if odd := [name for name in given if name not in fields]:
        raise ValueError(
            f"{where} has the unknown field {odd[0]!r}, known are {', '.join(sorted(fields))}"
        )


def _parse_count(
    given: RuleTable, name: str, absent: int | None, least: int, where: str
) -> int | None:
    value = given.get(name)
    if value is None:
        return absent
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{where}: {name} is an integer of at least {least}, found {value!r}")
    return value


def _parse_prefixes(given: object, where: str) -> Prefixes:
    if not isinstance(given, Mapping) or not set(given) <= {"icd9", "icd10"}:
        raise ValueError(f"{where}: expected lists of prefixes for icd9 and icd10, found {given!r}")
    parsed: Prefixes = {}
    for family, prefixes in given.items():
        listed = (
            isinstance(prefixes, Sequence)
            and not isinstance(prefixes, str)
            and all(isinstance(p, str) for p in prefixes)
        )
        parsed[family] = (
            tuple(p.strip().upper().replace(".", "") for p in prefixes) if listed else ("",)
        )
        if not all(parsed[family]):
            raise ValueError(
                f"{where}, {family}: prefixes are texts that are not empty, found {prefixes!r}"
            )
    return parsed


def match_rules(rules: Sequence[LabelRule], code: IcdCode) -> tuple[int, ...]:
    """Numbers of the rules whose code set holds a code."""
    return tuple(i for i, rule in enumerate(rules) if rule.matches(code))


def find_defining_phecodes(
    rules: Sequence[LabelRule], tables: Mapping[str, PhecodeTable]
) -> dict[str, list[str]]:
    """Rule -> the PheCodes that the map gives to the codes in the code set of the rule, in text
    order.

    Computed from the map, not from the data, so that `drop_phecode` means the same everywhere.
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
    """Subjects that fulfil a clause, ascending, and the day that completes it for each: the first
    of `find_completed_sets`.

    Later starts end later, so it is the set of the first start that fits the window.
    """
    subjects, days = find_completed_sets(subject, day, clause)
    earliest = find_starts(subjects)
    return subjects[earliest], days[earliest]


def find_completed_sets(
    subject: NDArray[np.integer], day: NDArray[np.integer], clause: RuleClause
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Subject and last day of every set of dates that fulfils a clause, by subject, then day; two
    sets may end on one day.

    From every start date the next date that is far enough from the last one is chosen until there
    are `count`; the set counts if it is within the window.

    `subject` [n] integers >= 0; `day` [n] of matching events from the clause's sources, in any
    order, repeats allowed.
    """
    if not len(day):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    first = int(day.min())
    reach = int(day.max()) - first + 1  # a gap of that many days excludes every later date
    gap = min(clause.gap, reach)
    span = reach + gap
    key = sort_distinct(subject.astype(np.int64) * span + (day.astype(np.int64) - first))
    start = at = np.arange(len(key))
    for _ in range(clause.count - 1):
        following = np.searchsorted(key, key[at] + gap)
        valid = following < len(key)
        valid[valid] = key[following[valid]] // span == key[at[valid]] // span
        start, at = start[valid], following[valid]
        if not len(at):
            break
    if clause.window is not None:
        at = at[key[at] - key[start] <= clause.window]
    return key[at] // span, key[at] % span + first
