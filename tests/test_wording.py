"""Sentences for people: a count of one in the singular, and answers of at most 25 words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from style import to_words

from bitimely_core.wording import MOST_WORDS, NOUNS, fit_number, shorten_answer

ROOT = Path(__file__).parent.parent
COUNT = "\0"
# words behind a value that end in s and are no plural nouns of what is counted
NO_NOUNS = to_words(
    """is was has does its this as less plus across versus always access status basis series
    holds lists gives names needs reads takes lies reaches makes beats
    differs exceeds states misses follows hertz exists ends stays stands starts knows counts asks
    begins shows fits covers measures uses writes sees repeats sets equals fills ignores wants means
    allows comes expects leaves lacks says cannot contains belongs keeps marks runs goes falls
    predicts carries loads ranks answers assigns hides looks points speaks becomes changes hashes
    trains serves parses requires minus compares
    others occurs sexes pickles lasts class ms fails loss pools deals declares"""
)


def list_templates() -> Iterator[tuple[str, str]]:
    """Place and text of every f-string of the packages, values as `COUNT`."""
    for package in ("bitimely", "bitimely_cli", "bitimely_core"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (
                        str(part.value) if isinstance(part, ast.Constant) else COUNT
                        for part in node.values
                    )
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", "".join(parts)


@pytest.mark.slow
def test_every_counted_noun_of_a_message_has_a_singular() -> None:
    missing = {}
    for place, text in list_templates():
        for word in re.findall(rf"(?<![\w.,:/-]){COUNT} ([a-z]+s)(?![\w/-]|\.\w)", text):
            if word not in NO_NOUNS and fit_number(f"1 {word}") == f"1 {word}":
                missing.setdefault(word, place)
    assert not missing


@pytest.mark.parametrize(
    ("text", "fitted"),
    [
        ("1 subjects are left, of 21 subjects", "1 subject is left, of 21 subjects"),
        ("1 training windows were cut", "1 training window was cut"),
        ("1 more channels", "1 more channel"),
        ("1 columns of codes are not read", "1 column of codes is not read"),
        ("1 classes, 1 histories, 1 indices, 1 patches", "1 class, 1 history, 1 index, 1 patch"),
        ("1 people have 1 diagnoses", "1 person has 1 diagnosis"),
        ("1,001 windows of 1 of 2 subjects", "1,001 windows of 1 of 2 subjects"),
        ("0.1 windows, 11 seeds, fold 1 windows", "0.1 windows, 11 seeds, fold 1 windows"),
        ("x_1 windows and 1 windows.csv", "x_1 windows and 1 windows.csv"),
    ],
)
def test_a_count_of_one_is_singular(text: str, fitted: str) -> None:
    assert fit_number(text) == fitted
    assert fit_number(fitted) == fitted


@pytest.mark.parametrize("noun", NOUNS.split("|"))
def test_no_noun_is_left_in_the_plural(noun: str) -> None:
    singular = fit_number(f"1 {noun}").removeprefix("1 ")
    assert singular != noun
    assert fit_number(f"2 {noun}") == f"2 {noun}"


def test_an_answer_keeps_what_fits() -> None:
    long = (
        "The random kernels baseline beats this trained model on D in accuracy: 90.0 and 60.0, a "
        "difference of −30.0 points (95 % confidence interval −40 to −20, Holm-corrected over 3 "
        "baselines; 12 subjects); this is one trained model, and nothing is said about the method."
    )
    assert shorten_answer(f"{long} A second sentence.") == (
        "The random kernels baseline beats this trained model on D in accuracy: 90.0 and 60.0, a "
        "difference of −30.0 points."
    )
    short = "Accuracy 0.842 (95 % CI 0.800 to 0.870) on 120 windows; the baseline reaches 0.4."
    assert shorten_answer(short) == short
    assert len(shorten_answer("word " * 60).split()) == MOST_WORDS
