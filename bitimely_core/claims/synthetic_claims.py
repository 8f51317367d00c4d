"""Synthetic claims: a registered population with claims in ICD-9 and ICD-10, for demonstrations and
tests.

Twelve chronic states with hazards that depend on age, frailty and each other cause diagnoses at
visits and stays, among background codes that are independent of them. A known number of spellings,
dates and codes have errors. Three labels are found by rules (chf, copd, diabetes). The fourth,
`tempo`, depends on the time from three prodrome codes to the index day, not on their number: counts
and order alone predict it less well than times.

`labels.csv` has `tempo` and `index_date` of every subject with a claim; rows after that day are
excluded from the input, for every label. chf, copd and diabetes are in no column: the rules make
them from all rows. They have to be given by name (`--rules ccdss`), because a source with label
columns uses rules only for the agreement table.

Every parameter is a field of `pipelines/demo_claims.toml`. `synthetic_draws` draws the population;
this module writes it. Legend: N claim rows of a block of subjects.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from bitimely_core.claims.claims_reading import LABELS, ClaimsOptions
from bitimely_core.claims.synthetic_config import CohortConfig, resolve_config
from bitimely_core.claims.synthetic_draws import (
    BLOCK,
    CODES,
    INPATIENT,
    MALFORMED,
    MAPPED,
    NO_DAY,
    OF_MALFORMED,
    OF_PREVENTIVE,
    OF_UNKNOWN,
    SOURCES,
    STATES,
    Array,
    SyntheticHistory,
    SyntheticRows,
    compute_sigmoid,
    draw_history,
    make_generator,
    parse_day,
    solve_hazards,
)
from bitimely_core.errors import Reason, safe_text, usage_error
from bitimely_core.registry import Choices, DatasetFacts, View, datasets
from bitimely_core.store import storage
from bitimely_core.types import IngestOptions

VOCABS = ("icd9", "icd10")
FACTS = DatasetFacts(
    title="Synthetic claims: a registered population with chronic diseases, messy codes and a "
    "label that depends on times",
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
        "labels": "tempo comes from labels.csv; chf, copd and diabetes from the rules ccdss, by "
        "all rows of a subject",
        "index_date": "the last day of twelve years of registration, or of the registration where "
        "that is shorter; later rows are no input",
        "map": "icd_phecode_demo.csv, written beside the claims",
        "truth": "truth.csv (onsets, tempo score) and ledger.json (rows of each mess) are never "
        "read",
    },
    options={"subjects": 20_000, "seed": 0, "config": None, "engine": "polars"},
    needs_source=False,
    kind="events",
)


def write_cohort(
    folder: Path,
    *,
    subjects: int = 20_000,
    seed: int = 0,
    config: Mapping[str, object] | None = None,
) -> Choices:
    """Write the cohort under `folder`, in the layout of the source `claims`; the same bytes for the
    same arguments.

    The files are claims.csv (patient_id, date, icd, vocab, source), patients.csv, labels.csv
    (tempo, index_date), truth.csv (onsets and tempo score), icd_phecode_demo.csv (vocab, code,
    phecode; to be given as map) and ledger.json (see `_count_rows`), which is returned.

    Raises UserError: config or unknown_name (exit 2), and those of `storage.write_file`.

    Args:
        folder: made if it is missing.
        subjects: how many; subject i is the same in a cohort of any size.
        seed: from 0 to 2**63 - 1.
        config: values in the place of those of `pipelines/demo_claims.toml`, nested alike.
    """
    _check_integer("subjects", subjects, 1)
    _check_integer("seed", seed, 0)
    chosen = resolve_config(config or {})
    solved = solve_hazards(chosen)
    ledger: Counter[str] = Counter()
    onsets = ",".join(f"onset_{state}" for state in STATES)
    tables = {
        "patients.csv": ["patient_id,birth_date,death_date,sex,obs_start,obs_end"],
        "labels.csv": ["patient_id,tempo,index_date"],
        "truth.csv": [f"patient_id,{onsets},tempo_score"],
        "icd_phecode_demo.csv": ["vocab,code,phecode"],
    }
    for i, vocab in enumerate(VOCABS):
        tables["icd_phecode_demo.csv"] += [f"{vocab},{c[i]},{c[2]}" for c in CODES if c[2]]

    def fill(stream: BinaryIO) -> None:
        stream.write(b"patient_id,date,icd,vocab,source\n")
        for block, first in enumerate(range(0, subjects, BLOCK)):
            history = draw_history(chosen, solved.hazards, seed, block)
            numbers = range(first, min(subjects, first + BLOCK))
            names = np.array([f"S{i:07d}" for i in numbers], object)
            rng = make_generator(seed, block, "spelling")
            stream.write(_claims_csv(chosen, history, names, rng, ledger))
            rng = make_generator(seed, block, "labels")
            lines_by_table = _format_subjects(chosen, solved.intercept, history, names, rng)
            for name, lines in lines_by_table.items():
                tables[name] += lines

    storage.make_folder(folder)
    storage.write_file(folder / "claims.csv", fill)
    for name, lines in tables.items():
        storage.write_bytes(folder / name, "\n".join([*lines, ""]).encode())
    body: Choices = {
        "format_version": 1,
        "subjects": subjects,
        "seed": seed,
        "solved": solved._asdict(),
        "labels": len(tables["labels.csv"]) - 1,
    }
    _add_counts(body, ledger)
    storage.write_json(folder / "ledger.json", body)
    return body


def _check_integer(name: str, value: object, least: int) -> None:
    """Raises UserError (config, exit 2) for another value."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
        expected = f"expected an integer of at least {least}"
        raise usage_error(f"{name} is {safe_text(value)}", expected)


def _add_counts(body: Choices, ledger: Mapping[str, int]) -> None:
    """Add the counts of the ledger to its file: the parts of a key are sections in each other."""
    for key, rows in ledger.items():
        *parents, leaf = key.split(".")
        section = body
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = rows


def _claims_csv(
    config: CohortConfig,
    history: SyntheticHistory,
    names: Array,
    rng: np.random.Generator,
    ledger: Counter[str],
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
    icd10 = (day >= parse_day(config.calendar.icd10_from)) & (source == INPATIENT)
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
    codes = [f",{text},{VOCABS[i // 16 % 2]}," for i, text in enumerate(_list_spellings().text)]
    rows = zip(
        (names + ",")[subject],
        _format_days(day),
        np.array(codes, object)[form[keep]],
        np.array([f"{name}\n" for name in SOURCES], object)[source],
        strict=True,
    )
    return "".join(map("".join, rows)).encode()


class CodeSpellings(NamedTuple):
    """Every code in every spelling, at `code * 32 + icd10 * 16 + dotted * 8 + padded * 4 + lower *
    2 + blank`, and what it shows.
    """

    text: Array
    padded: Array
    lower: Array
    blank: Array


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
    texts, *properties = zip(*rows, strict=True)
    return CodeSpellings(np.array(texts, object), *map(np.array, properties))


def _count_rows(
    ledger: Counter[str], written: SyntheticHistory, form: Array, *, first: Array
) -> None:
    """Add the rows of a block to the ledger (dotted key -> rows).

    The sections of the ledger are:
        mess: rows of each kind as they are in the file.
        funnel: as `build_sequences` counts them.
        reasons: as the ingest report counts them, each row at the first check that it fails: date,
            life, code, duplicates, no PheCode, after the index day.
        after_index: the duplicates and the rows without PheCode that come after the index day as
            well.

    Args:
        ledger: to be added to.
        written: the block, with copies.
        form: [N] number of the spelling in `_list_spellings()`.
        first: [N] false for copies.
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
            n = int(np.count_nonzero((code == i) & (form // 16 % 2 == icd10)))
            ledger[f"funnel.bad_code.{kind}"] += n
            ledger[f"reasons.{reason}"] += n


def _format_subjects(
    config: CohortConfig,
    intercept: float,
    history: SyntheticHistory,
    names: Array,
    rng: np.random.Generator,
) -> dict[str, list[str]]:
    """Lines of patients.csv, labels.csv and truth.csv of the first `len(names)` subjects of a
    block.
    """
    subjects = history.subjects
    tempo = rng.random(BLOCK) < compute_sigmoid(intercept + config.tempo.weight * history.score)
    claims = np.bincount(history.claims.subject, minlength=BLOCK)
    birth, start, end, until = map(
        _format_days, (subjects.birth, subjects.start, subjects.end, history.until)
    )
    onset = _format_days(np.where(np.isfinite(history.onset), history.onset, NO_DAY).astype(int))
    length = np.array([0, 7, 10])[subjects.birth_written]  # characters of the birth
    births = [text[:n] for text, n in zip(birth, length, strict=True)]
    deaths = np.where(subjects.dead, end, "")
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


def _format_days(days: Array) -> Array:
    """Days as text, objects of the same shape; `NO_DAY` is empty."""
    distinct, places = np.unique(days, return_inverse=True)
    texts = np.where(
        distinct == NO_DAY, "", np.datetime_as_string(distinct.astype("datetime64[D]"))
    )
    return texts.astype(object)[places].reshape(days.shape)


@datasets(FACTS)
def synthetic_claims(folder: Path, options: IngestOptions) -> Choices:
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
