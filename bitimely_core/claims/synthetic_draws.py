"""The draws behind the synthetic claims: subjects, onsets of diseases, visits and errors, before
they are written.

Subjects are drawn in blocks, each from its own key of a counter-based generator and always
complete: subject i is the same in a cohort of any size. The codes are in `synthetic_codes.csv`.

Legend: B subjects of a block, K months of the calendar, N claim rows of a block. Days count from
1970-01-01.
"""

from __future__ import annotations

import csv
import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bitimely_core.claims.synthetic_config import CohortConfig
from bitimely_core.errors import Reason
from bitimely_core.tokens.sequences import MONTH

BLOCK = 1000  # subjects drawn together
# key, which no seed can be, and blocks of the draw on which hazards and base rate are solved
FIXED = (2**64 - 1, 12)
YEAR = 365.25  # days
NO_DAY = -50_000  # of a row without a date, before all others
SOURCES = ("inpatient", "physician", "outpatient", "emergency")
INPATIENT, PHYSICIAN = 0, 1
Array = np.ndarray
# each part of a block draws from its own
STREAMS = ("people", "states", "care", "visits", "mess", "spelling", "labels")


def _read_codes() -> dict[str, list[tuple[str, str, str, str]]]:
    """Group -> (state, ICD-9, ICD-10, PheCode 1.2 or "") of its codes; background codes by falling
    frequency.
    """
    groups: dict[str, list[tuple[str, str, str, str]]] = {}
    with Path(__file__).with_name("synthetic_codes.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            groups.setdefault(row["group"], []).append(
                (row["state"], row["icd9"], row["icd10"], row["phecode"])
            )
    return groups


_codes = _read_codes()
STATES = {state: tuple(codes) for state, *codes in _codes["state"]}
PRODROME, BACKGROUND, PREVENTIVE, UNKNOWN = (
    tuple(tuple(codes) for _, *codes in _codes[group])
    for group in ("prodrome", "background", "preventive", "unknown")
)
# in an ICD-9 row, in an ICD-10 row, fault found by the normalisation of either, reason of the
# ingest report
MALFORMED = (
    ("XX000", "XX000", ("bad_format", "bad_format"), Reason.BAD_CODE),
    ("25.0.0", "I5", ("bad_format", "bad_format"), Reason.BAD_CODE),
    ("E11.9", "428.0", ("bad_format", "bad_format"), Reason.WRONG_VOCABULARY),
    ("8", "2.5E+02", ("ambiguous_short", "bad_format"), Reason.AMBIGUOUS_CODE),
    ("2.5E+02", "2.5E+02", ("bad_format", "bad_format"), Reason.AMBIGUOUS_CODE),
    ("UNK", "UNK", ("missing", "missing"), Reason.EMPTY_CODE),
    ("", "NA", ("missing", "missing"), Reason.EMPTY_CODE),
)
CODES = (
    *STATES.values(),
    *PRODROME,
    *BACKGROUND,
    *PREVENTIVE,
    *UNKNOWN,
    *((nine, ten, "") for nine, ten, _, _ in MALFORMED),
)
_groups = (STATES, PRODROME, BACKGROUND, PREVENTIVE, UNKNOWN, MALFORMED)
_, OF_PRODROME, OF_BACKGROUND, OF_PREVENTIVE, OF_UNKNOWN, OF_MALFORMED = itertools.starmap(
    range, itertools.pairwise(itertools.accumulate(map(len, _groups), initial=0))
)
MAPPED = np.array([phecode != "" for _, _, phecode in CODES])


class SyntheticSubjects(NamedTuple):
    """The subjects of a block, one value each [B]; days are integers."""

    birth: Array
    birth_written: Array  # 0 not at all, 1 year and month, 2 the day
    sex: Array  # 1 male, 2 female
    start: Array  # first day of registration
    end: Array  # last one: of the calendar, on leaving, or of life
    dead: Array  # whether life ended on it
    frailty: Array  # factor of the hazards
    silent: Array  # no claim, no disease
    rate: Array  # visits a month


class SyntheticRows(NamedTuple):
    """Rows of a block [N]: subject of the block, day, index into `CODES`, index into `SOURCES`."""

    subject: Array
    day: Array
    code: Array
    source: Array


class SyntheticHistory(NamedTuple):
    """A block before it is written."""

    subjects: SyntheticSubjects
    onset: Array  # day [B, 12], infinite for never
    claims: SyntheticRows  # by subject, day and code; no two alike
    until: Array  # last day of the input [B]
    score: Array  # z of the tempo signal [B]


class SolvedHazards(NamedTuple):
    """What bisection on the fixed draw gives: hazards at age 60 in 1e-4 a month, and the intercept
    of the tempo label.
    """

    hazards: dict[str, float]
    intercept: float


def parse_day(text: str) -> int:
    """The day of YYYY-MM-DD."""
    return int(np.datetime64(text, "D").astype(int))


def solve_hazards(config: CohortConfig) -> SolvedHazards:
    """Hazards of the states that are given by a prevalence, and the intercept of the tempo label,
    by bisection on a fixed draw.
    """
    key, blocks = FIXED
    drawn = (draw_subjects(config, make_generator(key, i, "people")) for i in range(blocks))
    population = SyntheticSubjects(*map(np.concatenate, zip(*drawn, strict=True)))
    limits = np.concatenate([_draw_limits(key, i) for i in range(blocks)])
    hazards: dict[str, float] = {}
    compute_onsets(config, population, limits, hazards)
    histories = [draw_history(config, hazards, key, i) for i in range(blocks)]
    score = np.concatenate([each.score[np.unique(each.claims.subject)] for each in histories])
    weight, base_rate = config.tempo.weight, config.tempo.base_rate
    return SolvedHazards(
        hazards,
        bisect(
            lambda a: float(np.mean(compute_sigmoid(a + weight * score))), base_rate, -20.0, 20.0
        ),
    )


def bisect(rising: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Argument at which a rising function has the value `wanted`, to 2^-50 of the interval."""
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return (low + high) / 2


def compute_sigmoid(x: Array) -> Array:
    """The logistic function."""
    return 1 / (1 + np.exp(-x))


def make_generator(key: int, block: int, part: str) -> np.random.Generator:
    """The draws of one part of one block."""
    return np.random.Generator(
        np.random.Philox(
            counter=[0, 0, 0, STREAMS.index(part)], key=np.array([key, block], np.uint64)
        )
    )


def _draw_limits(key: int, block: int) -> Array:
    """Integrated hazard of each state at its onset, exponential draws [B, 12]."""
    return make_generator(key, block, "states").exponential(size=(BLOCK, len(STATES)))


def draw_history(
    config: CohortConfig, hazards: dict[str, float], key: int, block: int
) -> SyntheticHistory:
    """The subjects of a block with all rows before spelling; deterministic."""
    subjects = draw_subjects(config, make_generator(key, block, "people"))
    onset = compute_onsets(config, subjects, _draw_limits(key, block), hazards)
    care = _draw_care(config, subjects, onset, make_generator(key, block, "care"))
    visits = _draw_visits(config, subjects, make_generator(key, block, "visits"))
    rows = SyntheticRows(*map(np.concatenate, zip(care, visits, strict=True)))
    subject, day, code, _ = claims = _add_errors(
        config, subjects, rows, make_generator(key, block, "mess")
    )
    until = np.minimum(subjects.start + round(config.tempo.years * YEAR), subjects.end)
    signal = np.isin(code, OF_PRODROME) & (day >= subjects.start[subject]) & (day <= until[subject])
    age = (until[subject] - day)[signal] / MONTH
    score = np.bincount(subject[signal], 2.0 ** (-age / config.tempo.half_life), BLOCK)
    return SyntheticHistory(subjects, onset, claims, until, score)


def draw_subjects(config: CohortConfig, rng: np.random.Generator) -> SyntheticSubjects:
    """Registration, age, death and visit rate of the subjects of a block."""
    population, visits = config.people, config.visits
    first, last = parse_day(config.calendar.first), parse_day(config.calendar.last)
    inside, late, female, silent, unwritten, month, age, when = rng.random((8, BLOCK))
    newborn = inside < population.born_inside
    wait = np.where(
        newborn,
        when * (last - first + 1),
        when * population.late_years * YEAR * (late < population.late),
    )
    start = first + wait.astype(int)
    low, high = population.entry_age
    birth = start - np.where(newborn, 0, (low + (high - low) * age) * YEAR).astype(int)
    leave = start + rng.exponential(YEAR / population.leave, BLOCK)
    doubling, entry = population.death_doubling, (start - birth) / YEAR - population.death_age
    # of the Gompertz hazard, integrated
    spent = rng.exponential(size=BLOCK) * math.log(2) / (population.death * doubling)
    death = birth + YEAR * (
        population.death_age + doubling * np.log2(2 ** (entry / doubling) + spent)
    )
    return SyntheticSubjects(
        birth=birth,
        birth_written=np.select(
            [unwritten < config.mess.no_birth, month < config.mess.birth_month], [0, 1], 2
        ),
        sex=np.where(female < population.women, 2, 1),
        start=start,
        end=np.floor(np.minimum(np.minimum(leave, death), last)).astype(int),
        dead=death < np.minimum(leave, last + 1),
        frailty=np.exp(population.frailty * rng.standard_normal(BLOCK)),
        silent=silent < population.silent,
        rate=np.clip(
            visits.median / 12 * np.exp(visits.sigma * rng.standard_normal(BLOCK)), *visits.clip
        ),
    )


def compute_onsets(
    config: CohortConfig, subjects: SyntheticSubjects, limits: Array, hazards: dict[str, float]
) -> Array:
    """First day of each state [B, 12], infinite for never: when its hazard, summed month by month,
    reaches its limit, a draw of `limits` [B, 12].

    A hazard depends only on earlier states. `hazards` (1e-4 a month) gains those that are solved
    here from a prevalence.
    """
    months = _count_days(config) / MONTH
    middle = np.arange(math.ceil(months)) + 0.5  # of each month since the start of registration [K]
    follow = (subjects.end - subjects.start)[:, None] / MONTH
    onsets: dict[str, Array] = {}  # months until the onset [B, 1]
    for name, limit in zip(STATES, limits.T[:, :, None], strict=True):
        state = config.states[name]
        slope = state.slope / 10  # a year
        # [B, K]
        rate = np.exp(slope * ((subjects.start - subjects.birth)[:, None] / YEAR - 60)) * np.exp(
            slope * middle / 12
        )
        rate *= (1e-4 * subjects.frailty * ~subjects.silent)[:, None] * (middle < follow)
        for other, factor in state.factors.items():
            rate *= np.where(middle > onsets[other], factor, 1.0)
        for other, fading in state.fading.items():
            since = np.maximum(middle - onsets[other], 0.0)
            rate *= np.where(
                middle > onsets[other],
                1 + (fading.peak - 1) * 2.0 ** (-since / fading.half_life),
                1.0,
            )
        total = np.cumsum(rate, axis=1)
        if state.prevalence is not None and name not in hazards:
            cases = state.prevalence / (1 - config.care.under_coding)
            hazards[name] = 10 ** bisect(
                functools.partial(_share_cases, total[:, -1]), cases, -4.0, 5.0
            )
        onsets[name] = _find_crossing(
            rate, total, limit / (hazards[name] if state.hazard is None else state.hazard), follow
        )
    return subjects.start[:, None] + np.floor(np.hstack(list(onsets.values())) * MONTH)


def _share_cases(total: Array, exponent: float) -> float:
    """The share of cases under a hazard of 10^exponent, where `total` is the sum of a hazard of 1
    for each subject.
    """
    return float(np.mean(-np.expm1(-(10**exponent) * total)))


def _find_crossing(rate: Array, total: Array, limit: Array, follow: Array) -> Array:
    """Months [B, 1] until `total`, the running sum of `rate` [B, K], reaches a limit [B, 1];
    infinite for never, or not in `follow`.
    """
    month = np.minimum(np.sum(total < limit, axis=1, keepdims=True), rate.shape[1] - 1)
    reached, step = np.take_along_axis(total, month, 1), np.take_along_axis(rate, month, 1)
    crossing = month + 1 - (reached - limit) / np.where(step > 0, step, 1.0)
    return np.where((reached >= limit) & (crossing <= follow), crossing, np.inf)


def _count_days(config: CohortConfig) -> int:
    return parse_day(config.calendar.last) - parse_day(config.calendar.first) + 1


def _draw_care(
    config: CohortConfig, subjects: SyntheticSubjects, onset: Array, rng: np.random.Generator
) -> SyntheticRows:
    """Rows of diseases: stays at onset, later renewals of the diagnosis, and claims that ruled a
    disease out.
    """
    care, states = config.care, [config.states[name] for name in STATES]
    hidden = rng.random(onset.shape) < np.array([state.hidden for state in states])
    coded = np.where(hidden, np.inf, onset)
    subject, state = np.nonzero(
        np.isfinite(coded) & (rng.random(onset.shape) < np.array([state.stay for state in states]))
    )
    low, high = care.stay_codes
    # so that codes are drawn without replacement
    noise = rng.gumbel(size=(len(subject), len(BACKGROUND)))
    others = np.argsort(-np.log(_weight_background(config)) - noise, axis=1)
    taken = np.arange(len(BACKGROUND)) < rng.integers(low - 1, high, len(subject))[:, None]
    day, stay = coded[subject, state], np.nonzero(taken)[0]
    parts: list[tuple[Any, ...]] = [
        (subject, day, state, INPATIENT),
        (subject[stay], day[stay], OF_BACKGROUND.start + others[taken], INPATIENT),
    ]
    for code, renewal in enumerate(state.renewal * MONTH for state in states):
        count = math.ceil(_count_days(config) / (renewal * (1 - care.jitter)))
        gaps = renewal * rng.uniform(1 - care.jitter, 1 + care.jitter, (BLOCK, count))
        days = coded[:, [code]] + np.cumsum(np.pad(gaps, ((0, 0), (1, 0))), axis=1)
        subject, visit = np.nonzero(days <= subjects.end[:, None])
        parts.append((subject, days[subject, visit], code, PHYSICIAN))
    ruled_out = list(map(list(STATES).index, ("diabetes", "chf")))
    healthy = ~np.isfinite(onset[:, ruled_out]).any(axis=1) & ~subjects.silent
    (subject,) = np.nonzero(healthy & (rng.random(BLOCK) < care.rule_out))
    day = subjects.start + rng.random(BLOCK) * (subjects.end - subjects.start + 1)
    parts.append((subject, day[subject], rng.choice(ruled_out, BLOCK)[subject], PHYSICIAN))
    return _concatenate_rows(parts)


def _draw_visits(
    config: CohortConfig, subjects: SyntheticSubjects, rng: np.random.Generator
) -> SyntheticRows:
    """Visits at a personal rate, uniform in time, one code each, independent of the diseases."""
    visits, share = config.visits, config.tempo.share
    length = subjects.end - subjects.start + 1
    subject = np.repeat(
        np.arange(BLOCK), rng.poisson(subjects.rate * length / MONTH * ~subjects.silent)
    )
    when, what, where = rng.random((3, len(subject)))
    background = _weight_background(config) * (1 - share * len(PRODROME) - visits.preventive)
    preventive = np.full(len(PREVENTIVE), visits.preventive / len(PREVENTIVE))
    code = OF_PRODROME.start + _choose_share(
        what, np.concatenate([np.full(len(PRODROME), share), background, preventive])
    )
    source = _choose_share(where, np.array([visits.sources.get(name, 0.0) for name in SOURCES]))
    return _concatenate_rows(
        [(subject, subjects.start[subject] + when * length[subject], code, source)]
    )


def _weight_background(config: CohortConfig) -> Array:
    weights = np.arange(1.0, len(BACKGROUND) + 1) ** -config.visits.zipf
    return weights / weights.sum()


def _choose_share(draws: Array, shares: Array) -> Array:
    """Index of the share of each draw from 0 to 1."""
    return np.searchsorted(np.cumsum(shares / shares.sum())[:-1], draws, side="right")


def _concatenate_rows(parts: list[tuple[Any, ...]]) -> SyntheticRows:
    """Rows from parts (subject, day, code, source); days are rounded down."""
    columns = zip(*(np.broadcast_arrays(*part) for part in parts), strict=True)
    return SyntheticRows(*(np.concatenate(column).astype(int) for column in columns))


def _add_errors(
    config: CohortConfig, subjects: SyntheticSubjects, rows: SyntheticRows, rng: np.random.Generator
) -> SyntheticRows:
    """Rows of which some lose their date or code or precede birth, at most one of these each; of
    equal rows one is kept.
    """
    mess = config.mess
    subject, day, code, source = rows
    shares = np.cumsum([mess.no_date, mess.malformed, mess.unknown, mess.before_birth])
    kind = np.searchsorted(shares, rng.random(len(day)), side="right")
    malformed, unknown = rng.choice(OF_MALFORMED, len(day)), rng.choice(OF_UNKNOWN, len(day))
    # before the first day of the month of birth
    early = subjects.birth[subject] - rng.integers(32, 366, len(day))
    day = np.select(
        [kind == 0, (kind == 3) & (subjects.birth_written[subject] > 0)], [NO_DAY, early], day
    )
    code = np.select([kind == 1, kind == 2], [malformed, unknown], code)
    key = (subject * 2**17 + day - NO_DAY) * len(CODES) + code
    # in the order of the key; of rows alike the first, so that stays win
    keep = np.unique(key, return_index=True)[1]
    return SyntheticRows(*(values[keep] for values in (subject, day, code, source)))
