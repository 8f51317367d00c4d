"""Sentences for people: counts of one in the singular, long sentences cut to their answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

MOST_WORDS = 25  # of a sentence that leads a page or ends a verb
SENTENCE_END = re.compile(r"(?<=[\w%)\"]\.) (?=\S)")
# what a long sentence does without, in this order, with what takes its place: the last clause
# behind a semicolon, a remark in parentheses, the last clause behind a comma or a colon
OMITTED = (
    (re.compile(r";(?![^()]*\))(?:[^;()]|\([^()]*\))*$"), "."),
    (re.compile(r" \([^()]*\)"), ""),
    (re.compile(r"[,:] (?:[^,:]|[,:](?! ))*$"), "."),
)
# nouns that messages count
NOUNS = (
    "annotations|arrays|baselines|beats|bits|blocks|bytes|cases|caveats|cells|"
    "channels|characters|checkpoints|classes|codes|columns|comparisons|components|"
    "controls|copies|cores|counts|curves|dates|days|diagnoses|differences|"
    "dimensions|directions|draws|embeddings|epochs|errors|events|examples|features|"
    "files|filters|folders|folds|gaps|groups|headers|heads|histories|hours|"
    "hypnograms|ids|indices|integers|intervals|kernels|labels|layers|lengths|lines|"
    "maps|members|metrics|minutes|models|names|nights|numbers|onsets|pages|pairs|"
    "parameters|parts|passes|patches|paths|patients|people|phecodes|places|points|"
    "positions|predictions|problems|processes|rates|readouts|recordings|records|"
    "reports|resamples|rounds|rows|runs|samples|scorers|scores|seconds|seeds|"
    "segments|seizures|sequences|sets|settings|shapelets|shards|signals|stages|stays|steps|"
    "stretches|subjects|tables|targets|tensors|tests|texts|threads|times|tokens|"
    "trainings|trees|units|values|vectors|versions|views|visits|weights|windows|"
    "words|years"
)
IRREGULAR = {"people": "person", "indices": "index", "diagnoses": "diagnosis", "sexes": "sex"}
VERBS = {"are": "is", "were": "was", "have": "has", "do": "does", "belong": "belongs"}
VERB = "|".join(VERBS)
ONE = re.compile(
    r"(?<![\w.,:/-])(?<!class )(?<!fold )(?<!seed )(?<!step )1 "
    r"((?:(?!(?:of|and|or|to|in|with|without|for|no|by|are|has|have|is) )[a-z-]+ )?)"
    rf"({NOUNS})(?![\w/-]|\.\w)"
    rf"((?: of [a-z]+(?= (?:{VERB})\b))?)((?: (?:{VERB})\b)?)"
)


def fit_number(text: str) -> str:
    """`text` with a noun behind a count of one in the singular, and its verb.

    >>> fit_number("1 subjects are left, of 21 subjects")
    '1 subject is left, of 21 subjects'
    """
    return ONE.sub(_use_singular, text)


def _use_singular(match: re.Match[str]) -> str:
    between, noun, part, verb = match.groups()
    singular = re.sub(r"(?<=s|h)es$|s$", "", re.sub(r"ies$", "ys", noun))
    noun = IRREGULAR.get(noun, singular)
    return f"1 {between}{noun}{part}{' ' * bool(verb)}{VERBS.get(verb.strip(), '')}"


def shorten_answer(text: str) -> str:
    """The first sentence of `text` in at most `MOST_WORDS` words; what is left out is for the page.

    >>> shorten_answer("It is 0.5 (95 % CI 0.4 to 0.6). More is below.")
    'It is 0.5 (95 % CI 0.4 to 0.6).'
    """
    answer, *_ = SENTENCE_END.split(text, maxsplit=1)
    for pattern, rest in OMITTED:
        while len(answer.split()) > MOST_WORDS:
            shorter = pattern.sub(rest, answer, count=1)
            if shorter == answer:
                break
            answer = shorter
    words = answer.split()
    return answer if len(words) <= MOST_WORDS else " ".join([*words[: MOST_WORDS - 1], "…"])


def list_first(texts: Sequence[str], limit: int, between: str = ", ") -> str:
    """The first texts, and how many more there are."""
    rest = f" and {len(texts) - limit:,} more" if len(texts) > limit else ""
    return between.join(texts[:limit]) + rest
