"""A synthetic registered population with claims in ICD-9 and ICD-10, for demonstrations and tests.

Twelve chronic states with hazards that depend on age, frailty and each other cause diagnoses at
visits and stays, among background codes that are independent of them; a known number of spellings,
dates and codes have errors. Three labels are found by rules (chf, copd, diabetes). The fourth,
`tempo`, depends on the time from three prodrome codes to the index day, not on their number: counts
and order alone predict it less well than times.

`labels.csv` has `tempo` and `index_date` of every subject with a claim; rows after that day are
excluded from the input, for every label. chf, copd and diabetes are in no column: the rules make
them from all rows. They have to be given by name (`--rules ccdss`), because a source with label
columns uses rules only for the agreement table.

Every parameter is a field of `pipelines/demo_claims.toml`, the codes are in `synthetic_codes.csv`.
Subjects are drawn in blocks, each from its own key of a counter-based generator and always
complete: subject i is the same in a cohort of any size.

Legend: B subjects of a block, K months of the calendar, N claim rows of a block. Days count from
1970-01-01.
"""

from __future__ import annotations

import csv
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from bitimely_core import storage
from bitimely_core.claims.options import LABELS, ClaimsOptions
from bitimely_core.claims.synthetic_config import CohortConfig, resolve_config
from bitimely_core.errors import Reason, safe_text, usage_error
from bitimely_core.registry import DatasetFacts, View, datasets

BLOCK = 1000  # subjects drawn together
# key, which no seed can be, and blocks of the draw on which hazards and base rate are solved
FIXED = (2**64 - 1, 12)
MONTH, YEAR = 30.4375, 365.25  # days
NO_DAY = -50_000  # of a row without a date, before all others
SOURCES = ("inpatient", "physician", "outpatient", "emergency")
INPATIENT, PHYSICIAN = 0, 1
VOCABS = ("icd9", "icd10")
# each part of a block draws from its own
STREAMS = ("people", "states", "care", "visits", "mess", "spelling", "labels")

FACTS = DatasetFacts(
    title="Synthetic claims: a registered population with chronic diseases, messy codes and a label that depends on times",
    views={
        "": View(
            channels=(),
            rate=0.0,
            window=0,
            task="multilabel",
            classes=(*LABELS, "tempo"),
            help="sequences of PheCodes",
        )
    },
    licence="CC0 1.0",
    url="",
    download="nothing to download: it is made from its seed",
    paper={},
    rules={
        "labels": "tempo comes from labels.csv; chf, copd and diabetes from the rules ccdss, by all rows of a subject",
        "index_date": "the last day of twelve years of registration, or of the registration where that is shorter; later rows are no input",
        "map": "icd_phecode_demo.csv, written beside the claims",
        "truth": "truth.csv (onsets, tempo score) and ledger.json (rows of each mess) are never read",
    },
    options={"subjects": 20_000, "seed": 0, "config": None, "engine": "polars"},
    needs_source=False,
    kind="events",
)


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

    birth: np.ndarray
    birth_written: np.ndarray  # 0 not at all, 1 year and month, 2 the day
    sex: np.ndarray  # 1 male, 2 female
    start: np.ndarray  # first day of registration
    end: np.ndarray  # last one: of the calendar, on leaving, or of life
    dead: np.ndarray  # whether life ended on it
    frailty: np.ndarray  # factor of the hazards
    silent: np.ndarray  # no claim, no disease
    rate: np.ndarray  # visits a month


class SyntheticRows(NamedTuple):
    """Rows of a block [N]: subject of the block, day, index into `CODES`, index into `SOURCES`."""

    subject: np.ndarray
    day: np.ndarray
    code: np.ndarray
    source: np.ndarray


class SyntheticHistory(NamedTuple):
    """A block before it is written."""

    subjects: SyntheticSubjects
    onset: np.ndarray  # day [B, 12], infinite for never
    claims: SyntheticRows  # by subject, day and code; no two alike
    until: np.ndarray  # last day of the input [B]
    score: np.ndarray  # z of the tempo signal [B]


class SolvedHazards(NamedTuple):
    """What bisection on the fixed draw gives: hazards at age 60 in 1e-4 a month, and the intercept
    of the tempo label.
    """

    hazards: dict[str, float]
    intercept: float


def write_cohort(
    folder: Path,
    *,
    subjects: int = 20_000,
    seed: int = 0,
    vocab_column: bool = True,
    config: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Write the cohort under `folder`, in the layout of the source `claims`; the same bytes for the
    same arguments.

    claims.csv (patient_id, date, icd, vocab, source), patients.csv, labels.csv (tempo, index_date),
    truth.csv (onsets and tempo score), icd_phecode_demo.csv (vocab, code, phecode; to be given as
    map) and ledger.json (see `_count_rows`), which is returned. Raises UserError: config or
    unknown_name (exit 2), and those of `storage.write_file`.

    Args:
        folder: made if it is missing.
        subjects: how many; subject i is the same in a cohort of any size.
        seed: from 0 to 2**63 - 1.
        vocab_column: without it every row, not only those of stays, is in ICD-10 from the day of
            the switch on.
        config: values in the place of those of `pipelines/demo_claims.toml`, nested alike.
    """
    for name, value, low in (("subjects", subjects, 1), ("seed", seed, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 2**63:
            raise usage_error(
                f"{name} is {safe_text(value)}", f"expected an integer of at least {low}"
            )
    chosen = resolve_config(config or {})
    solved = solve_hazards(chosen)
    ledger: Counter[str] = Counter()
    tables = {
        "patients.csv": ["patient_id,birth_date,death_date,sex,obs_start,obs_end"],
        "labels.csv": ["patient_id,tempo,index_date"],
        "truth.csv": [
            ",".join(["patient_id", *(f"onset_{state}" for state in STATES), "tempo_score"])
        ],
        "icd_phecode_demo.csv": [
            "vocab,code,phecode",
            *(f"{v},{c[i]},{c[2]}" for i, v in enumerate(VOCABS) for c in CODES if c[2]),
        ],
    }

    def fill(stream: BinaryIO) -> None:
        stream.write(f"patient_id,date,icd,{'vocab,' if vocab_column else ''}source\n".encode())
        for block in range(-(-subjects // BLOCK)):
            history = draw_history(chosen, solved.hazards, seed, block)
            names = np.array(
                [f"S{i:07d}" for i in range(block * BLOCK, min(subjects, (block + 1) * BLOCK))],
                object,
            )
            stream.write(
                _claims_csv(
                    chosen,
                    history,
                    names,
                    make_generator(seed, block, "spelling"),
                    ledger,
                    vocab_column=vocab_column,
                )
            )
            for name, lines in _format_subjects(
                chosen, solved.intercept, history, names, make_generator(seed, block, "labels")
            ).items():
                tables[name] += lines

    storage.make_folder(folder)
    storage.write_file(folder / "claims.csv", fill)
    for name, lines in tables.items():
        storage.write_bytes(folder / name, "\n".join([*lines, ""]).encode())
    body: dict[str, Any] = {
        "format_version": 1,
        "subjects": subjects,
        "seed": seed,
        "vocab_column": vocab_column,
        "solved": solved._asdict(),
    }
    body["labels"] = len(tables["labels.csv"]) - 1
    for key, rows in ledger.items():
        *parents, leaf = key.split(".")
        functools.reduce(lambda part, name: part.setdefault(name, {}), parents, body)[leaf] = rows
    storage.write_json(folder / "ledger.json", body)
    return body


def _claims_csv(
    config: CohortConfig,
    history: SyntheticHistory,
    names: np.ndarray,
    rng: np.random.Generator,
    ledger: Counter[str],
    *,
    vocab_column: bool,
) -> bytes:
    """Rows of claims.csv of the first `len(names)` subjects of a block, spelt in many ways, some
    twice; they are counted in the ledger.
    """
    mess = config.mess
    subject, day, code, source = history.claims
    total = len(subject)
    claim = np.cumsum((np.diff(subject, prepend=-1) != 0) | (np.diff(day, prepend=NO_DAY) != 0)) - 1
    dotted = (rng.random(total) < mess.dotted)[claim]  # a claim is written at one site
    padded, lower, blank, twice = rng.random((4, total)) < np.array(
        [[mess.padded], [mess.lower], [mess.blank], [mess.duplicate]]
    )
    icd10 = (day >= _parse_day(config.calendar.icd10_from)) & (
        (source == INPATIENT) | (not vocab_column)
    )
    form = code * 32 + icd10 * 16 + dotted * 8 + padded * 4 + lower * 2 + blank
    twice &= MAPPED[code] & (day >= history.subjects.start[subject])
    keep = np.repeat(np.arange(total), 1 + twice)
    keep = keep[: np.searchsorted(subject[keep], len(names))]
    subject, day, code, source = written = SyntheticRows(
        *(values[keep] for values in history.claims)
    )
    _count_rows(
        ledger, history._replace(claims=written), form[keep], first=np.diff(keep, prepend=-1) != 0
    )
    vocabs, texts = (
        [f",{vocab}" if vocab_column else "" for vocab in VOCABS],
        _list_spellings().text,
    )
    tails = np.array(
        [
            f",{text}{vocabs[i // 16 % 2]},{name}\n"
            for i, text in enumerate(texts)
            for name in SOURCES
        ],
        object,
    )
    rows = zip(
        (names + ",")[subject],
        _format_days(day),
        tails[form[keep] * len(SOURCES) + source],
        strict=True,
    )
    return "".join(map("".join, rows)).encode()


class CodeSpellings(NamedTuple):
    """Every code in every spelling, at `code * 32 + icd10 * 16 + dotted * 8 + padded * 4 + lower *
    2 + blank`, and what it shows.
    """

    text: np.ndarray
    padded: np.ndarray
    lower: np.ndarray
    blank: np.ndarray


@functools.cache
def _list_spellings() -> CodeSpellings:
    """The spellings. Malformed codes have one; of the others ICD-9 categories alone are padded:
    `496.0` or `4960`.
    """
    rows = []
    for code, icd10, dotted, padded, lower, blank in itertools.product(
        range(len(CODES)), *[(False, True)] * 5
    ):
        text = CODES[code][icd10]
        category = padded and len(text) == 3 and text.isdigit()
        if code not in OF_MALFORMED:
            text += ".0" * category
            text = text if dotted else text.replace(".", "")
            text = (text.lower() if lower else text) + " " * blank
        rows.append((text, category, text != text.upper(), text.endswith(" ")))
    texts, *shown = zip(*rows, strict=True)
    return CodeSpellings(np.array(texts, object), *map(np.array, shown))


def _count_rows(
    ledger: Counter[str], written: SyntheticHistory, form: np.ndarray, *, first: np.ndarray
) -> None:
    """Add the rows of a block to the ledger (dotted key -> rows); `form` [N] indexes `_forms()`,
    `first` [N] is false for copies.

    `mess`: rows of each kind as they are in the file. `funnel`: as `build_sequences` counts them.
    `reasons`: as the ingest report does,
    each row at the first check that it fails: date, life, code, duplicates, no PheCode, after the
    index day; `after_index`: how many of the duplicates and of those without PheCode come after
    that day as well.
    """
    subject, day, code, _ = written.claims
    forms = _list_spellings()
    dated = day > NO_DAY
    # no other claim precedes the registration
    before = dated & (day < written.subjects.start[subject])
    good = dated & ~before & (code < OF_MALFORMED.start)
    mapped, unmapped, late = good & MAPPED[code], good & ~MAPPED[code], day > written.until[subject]
    counts = {
        "rows": np.ones_like(good),
        "mess.no_date": ~dated,
        "mess.before_birth": before,
        "mess.malformed": code >= OF_MALFORMED.start,
        "mess.unknown": np.isin(code, OF_UNKNOWN),
        "mess.preventive": np.isin(code, OF_PREVENTIVE),
        "mess.duplicate": ~first,
        "mess.padded": forms.padded[form],
        "mess.lower": forms.lower[form],
        "mess.blank": forms.blank[form],
        "funnel.bad_date": ~dated,
        "funnel.before_birth": before,
        "funnel.mapped.exact": mapped & ~forms.padded[form],
        "funnel.mapped.trailing_zero": mapped & forms.padded[form],
        "funnel.unmapped": unmapped,
        f"reasons.{Reason.DATE}": ~dated,
        f"reasons.{Reason.DATE_OUTSIDE_LIFE}": before,
        f"reasons.{Reason.DUPLICATES}": ~first,
        f"reasons.{Reason.UNMAPPED_CODE}": unmapped,
        f"reasons.{Reason.LABEL_LEAKAGE}": mapped & first & late,
        "after_index.duplicates": ~first & late,
        "after_index.unmapped_code": unmapped & late,
    }
    for key, rows in counts.items():
        ledger[key] += int(np.count_nonzero(rows))
    for i, (*_, kinds, reason) in zip(OF_MALFORMED, MALFORMED, strict=True):
        for icd10, kind in enumerate(kinds):
            found = int(np.count_nonzero((code == i) & (form // 16 % 2 == icd10)))
            ledger[f"funnel.bad_code.{kind}"] += found
            ledger[f"reasons.{reason}"] += found


def _format_subjects(
    config: CohortConfig,
    intercept: float,
    history: SyntheticHistory,
    names: np.ndarray,
    rng: np.random.Generator,
) -> dict[str, list[str]]:
    """Lines of patients.csv, labels.csv and truth.csv of the first `len(names)` subjects of a
    block.
    """
    subjects = history.subjects
    tempo = rng.random(BLOCK) < _sigmoid(intercept + config.tempo.weight * history.score)
    claims = np.bincount(history.claims.subject, minlength=BLOCK)
    birth, start, end, until = (
        _format_days(days) for days in (subjects.birth, subjects.start, subjects.end, history.until)
    )
    onset = _format_days(np.where(np.isfinite(history.onset), history.onset, NO_DAY).astype(int))
    length = np.array([0, 7, 10])[subjects.birth_written]  # characters of the birth
    births, deaths = (
        [text[:n] for text, n in zip(birth, length, strict=True)],
        np.where(subjects.dead, end, ""),
    )
    return {
        "patients.csv": [
            f"{name},{births[i]},{deaths[i]},{subjects.sex[i]},{start[i]},{end[i]}"
            for i, name in enumerate(names)
        ],
        "labels.csv": [
            f"{name},{tempo[i]:d},{until[i]}" for i, name in enumerate(names) if claims[i]
        ],
        "truth.csv": [
            ",".join([name, *onset[i], f"{history.score[i]:.6f}"]) for i, name in enumerate(names)
        ],
    }


def _format_days(days: np.ndarray) -> np.ndarray:
    """Days as text, objects of the same shape; `NO_DAY` is empty."""
    distinct, places = np.unique(days, return_inverse=True)
    texts = np.where(
        distinct == NO_DAY, "", np.datetime_as_string(distinct.astype("datetime64[D]"))
    )
    return texts.astype(object)[places].reshape(days.shape)


def _parse_day(text: str) -> int:
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
        bisect(lambda a: float(np.mean(_sigmoid(a + weight * score))), base_rate, -20.0, 20.0),
    )


def bisect(rising: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Argument at which a rising function has the value `wanted`, to 2^-50 of the interval."""
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return (low + high) / 2


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def make_generator(key: int, block: int, part: str) -> np.random.Generator:
    """The draws of one part of one block."""
    return np.random.Generator(
        np.random.Philox(
            counter=[0, 0, 0, STREAMS.index(part)], key=np.array([key, block], np.uint64)
        )
    )


def _draw_limits(key: int, block: int) -> np.ndarray:
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
    first, last = _parse_day(config.calendar.first), _parse_day(config.calendar.last)
    inside, late, female, silent, known, exact, age, when = rng.random((8, BLOCK))
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
        birth_written=np.where(
            known < config.mess.no_birth, 0, np.where(exact < config.mess.birth_month, 1, 2)
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
    config: CohortConfig, subjects: SyntheticSubjects, limits: np.ndarray, hazards: dict[str, float]
) -> np.ndarray:
    """First day of each state [B, 12], infinite for never: when its hazard, summed month by month,
    reaches its limit, a draw of `limits` [B, 12].

    A hazard depends only on earlier states. `hazards` (1e-4 a month) gains those that are solved
    here from a prevalence.
    """
    months = _count_days(config) / MONTH
    middle = np.arange(math.ceil(months)) + 0.5  # of each month since the start of registration [K]
    follow = (subjects.end - subjects.start)[:, None] / MONTH
    onsets: dict[str, np.ndarray] = {}  # months until the onset [B, 1]
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


def _share_cases(total: np.ndarray, exponent: float) -> float:
    """The share of cases under a hazard of 10^exponent, where `total` is the sum of a hazard of 1
    for each subject.
    """
    return float(np.mean(-np.expm1(-(10**exponent) * total)))


def _find_crossing(
    rate: np.ndarray, total: np.ndarray, limit: np.ndarray, follow: np.ndarray
) -> np.ndarray:
    """Months [B, 1] until `total`, the running sum of `rate` [B, K], reaches a limit [B, 1];
    infinite for never, or not in `follow`.
    """
    month = np.minimum(np.sum(total < limit, axis=1, keepdims=True), rate.shape[1] - 1)
    reached, step = np.take_along_axis(total, month, 1), np.take_along_axis(rate, month, 1)
    at = month + 1 - (reached - limit) / np.where(step > 0, step, 1.0)
    return np.where((reached >= limit) & (at <= follow), at, np.inf)


def _count_days(config: CohortConfig) -> int:
    return _parse_day(config.calendar.last) - _parse_day(config.calendar.first) + 1


def _draw_care(
    config: CohortConfig, subjects: SyntheticSubjects, onset: np.ndarray, rng: np.random.Generator
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
    ruled_out = [list(STATES).index(name) for name in ("diabetes", "chf")]
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


def _weight_background(config: CohortConfig) -> np.ndarray:
    weights = np.arange(1.0, len(BACKGROUND) + 1) ** -config.visits.zipf
    return weights / weights.sum()


def _choose_share(draws: np.ndarray, shares: np.ndarray) -> np.ndarray:
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


@datasets(FACTS)
def synthetic_claims(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Synthetic claims of a registered population, written to `folder`; the options of their
    ingest.
    """
    write_cohort(
        folder, subjects=options["subjects"], seed=options["seed"], config=options["config"]
    )
    return asdict(
        ClaimsOptions(
            rules="ccdss",
            phecode_map=(str(folder / "icd_phecode_demo.csv"),),
            engine=options["engine"],
        )
    )
