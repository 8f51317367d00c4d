"""The PheCode maps of the samples with an eighth of their rows and all those of the codes of the
cases; most of the time of an ingest of a hundred people goes into reading the whole ones.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from samples import SAMPLES

MAP9 = SAMPLES / "phecode" / "phecode_map_v1_2_icd9cm.csv"
MAP10 = SAMPLES / "phecode" / "variants" / "phecode_icd10.csv"
WHOLE = "038 250 272 311 401 428 465 496 530 599 719 724 780 786 "
WHOLE += (
    "C80 E10 E11 E78 E85 F32 G20 H33 H36 I10 I50 J06 J12 J44 K21 M17 M25 M54 N39 R07 R53 S72 T36"
)


def _shorten(path: Path, folder: Path, code: str) -> pl.DataFrame:
    """Writes the rows that stay."""
    rows = pl.read_csv(path, infer_schema=False).with_row_index("row")
    stays = (pl.col("row") % 8 == 0) | pl.col(code).str.slice(0, 3).is_in(WHOLE.split())
    rows = rows.filter(stays).drop("row")
    rows.write_csv(folder / path.name)
    return rows


@pytest.fixture(scope="session")
def short_maps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Those of ICD-9, beside its names and exclusions, and of ICD-10."""
    folder = tmp_path_factory.mktemp("maps")
    known = _shorten(MAP9, folder, "code")["phecode"].implode()
    for name, columns in (
        ("pheinfo.csv", ["phecode"]),
        ("phecode_exclude.csv", ["code", "exclusion_criteria"]),
    ):
        rows = pl.read_csv(MAP9.with_name(name), infer_schema=False)
        rows.filter(pl.all_horizontal(pl.col(columns).is_in(known))).write_csv(folder / name)
    if MAP10.is_file():
        _shorten(MAP10, folder, "ICD10")
    return folder / MAP9.name, folder / MAP10.name
