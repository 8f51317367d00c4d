"""The layouts in which PheCode maps are published: how a table is recognised, and what its columns
mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

VOCABULARIES = {  # as maps write them -> vocabulary of a table
    "icd9": "icd9",
    "icd9cm": "icd9",
    "9": "icd9",
    "icd10": "icd10",
    "icd10who": "icd10",
    "icd10cm": "icd10cm",
    "10": "icd10cm",
}


@dataclass(frozen=True, kw_only=True)
class MapLayout:
    """The columns of a published table, by their names in lower case."""

    name: str
    needs: frozenset[str]  # by which it is recognised
    code: str
    vocab: str | None = None  # of all rows
    vocab_column: str = ""
    title: str | None = None  # column with the PheCode's name
    category: str = "category_string"
    single: bool = False  # one row an ICD-9 code


def _make_catalog_layout(column: str) -> MapLayout:
    """A table of the PheWAS catalog, which names its column of codes by their vocabulary."""
    return MapLayout(
        name=f"catalog-{column}",
        needs=frozenset({column, f"{column} string", "phecode"}),
        code=column,
        vocab=VOCABULARIES[column],
        title="phenotype",
        single=column == "icd9",
    )


def _make_phetk_layout(name: str, column: str) -> MapLayout:
    """A table of the package PheTK; `column` is one that only this version has."""
    return MapLayout(
        name=name,
        needs=frozenset({"phecode", "icd", "flag", column}),
        code="icd",
        vocab_column="flag",
        title="phecode_string",
        category="phecode_category",
    )


def _make_plain_layout(column: str) -> MapLayout:
    """A table of codes and PheCodes alone."""
    return MapLayout(
        name="plain",
        needs=frozenset({column, "phecode"}),
        code=column,
        vocab=column if column in VOCABULARIES else None,
        vocab_column="vocab",
    )


LAYOUTS = (  # the first one that fits is used
    *map(_make_catalog_layout, ("icd9", "icd10", "icd10cm")),
    _make_phetk_layout("phetk-1.2", "phecode_unrolled"),
    _make_phetk_layout("phetk-x", "code_val"),
    MapLayout(
        name="r",
        needs=frozenset({"vocabulary_id", "code", "phecode"}),
        code="code",
        vocab_column="vocabulary_id",
        single=True,
    ),
    *map(_make_plain_layout, (*VOCABULARIES, "icd", "code")),
)


def detect_layout(columns: Iterable[str]) -> MapLayout | None:
    """The layout of a table with these columns; None where it is no map."""
    return next((layout for layout in LAYOUTS if layout.needs.issubset(columns)), None)
