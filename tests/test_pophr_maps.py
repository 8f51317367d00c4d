"""PheCode maps: every layout and container, every kind of damage, repairs, overrides."""

from __future__ import annotations

import csv
import gzip
import io
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from samples import SAMPLES, needs_sample

from bitimely_cli.main import main
from bitimely_core.claims import label_rules, map_damage, map_files, phecode_maps
from bitimely_core.errors import Exit, Reason, UserError

DATA = SAMPLES / "phecode"
needs_data = needs_sample(DATA)

CATALOG9 = """ICD9,ICD9 String,PheCode,Phenotype,Excl. Phecodes,Excl. Phenotypes,Rollup,Leaf,Ignore Bool
001,Cholera,008,Intestinal infection,001-009.99,Intestinal infection,1,0,0
250.00,Diabetes,250.2,Type 2 diabetes,"249-250.99, 648-649",Diabetes,1,0,0
V70.0,Check-up,1010,Other tests,,,1,1,1
999,Nothing,,,,,,,0
"""
CATALOG10 = """ICD10,ICD10 String,PheCode,Phenotype,Excl. Phecodes,Excl. Phenotypes
A00,Cholera,008,Intestinal infection,001-009.99,x
I13.0,Both,428.1,Failure,425-429.99,x
I13.0,Both,401.2,Hypertensive heart disease,401-405.99,x
"""
PHETK12 = """phecode,ICD,flag,code_val,phecode_string,phecode_category,phecode_unrolled
250.2,250.00,9,1,Type 2 diabetes,endocrine,250.2
250.2,250.00,9,1,Type 2 diabetes,endocrine,250
250.2,E11.9,10,1,Type 2 diabetes,endocrine,250.2
250.2,E11.9,10,1,Type 2 diabetes,endocrine,250
"""
PHETKX = "phecode,ICD,flag,phecode_string,phecode_category,code_val\nEM_202.2,250.00,9,T2D,endo,202.2\nEM_202.2,E11.9,10,T2D,endo,202.2\n"
R12 = "vocabulary_id,code,phecode\nICD9CM,001,008\nICD9CM,250.00,250.2\nICD10CM,I13.0,428.1\nICD10CM,I13.0,401.2\n"
RX = "code,vocabulary_id,phecode\n250.00,ICD9CM,EM_202.2\n250.00,ICD9CM,EM_202\nE11.9,ICD10CM,EM_202.2\n"


def written(folder: Path, text: str, name: str = "map.csv", encoding: str = "utf-8") -> Path:
    path = folder / name
    path.write_bytes(text.encode(encoding))
    return path


def refused(*paths: Path | str, **options: Any) -> UserError:
    with pytest.raises(UserError) as error:
        phecode_maps.read_map(paths, **options)
    return error.value


@pytest.mark.parametrize(
    ("text", "layout", "tables"),
    [
        (CATALOG9, "catalog-icd9", {"icd9": {"001": ("008",), "250.00": ("250.2",)}}),
        (CATALOG10, "catalog-icd10", {"icd10": {"A00": ("008",), "I13.0": ("401.2", "428.1")}}),
        (PHETK12, "phetk-1.2", {"icd9": {"250.00": ("250.2",)}, "icd10cm": {"E11.9": ("250.2",)}}),
        (
            PHETKX,
            "phetk-x",
            {"icd9": {"250.00": ("EM_202.2",)}, "icd10cm": {"E11.9": ("EM_202.2",)}},
        ),
        (
            R12,
            "r",
            {
                "icd9": {"001": ("008",), "250.00": ("250.2",)},
                "icd10cm": {"I13.0": ("401.2", "428.1")},
            },
        ),
        (
            RX,
            "r",
            {"icd9": {"250.00": ("EM_202", "EM_202.2")}, "icd10cm": {"E11.9": ("EM_202.2",)}},
        ),
        ("icd9,phecode\n001,008\n", "plain", {"icd9": {"001": ("008",)}}),
        (
            "Code,PheCode,Vocab,more\n001,008,ICD9CM,x\nE119,250.2,icd10,\n",
            "plain",
            {"icd9": {"001": ("008",)}, "icd10": {"E11.9": ("250.2",)}},
        ),
        ("icd,phecode\n001,008\n", "plain", {"icd9": {"001": ("008",)}}),
    ],
)
def test_layouts(tmp_path: Path, text: str, layout: str, tables: dict[str, Any]) -> None:
    found = phecode_maps.read_map([written(tmp_path, text)])
    assert found.tables == tables
    assert found.facts[0]["layout"] == layout
    pairs = [
        (vocab, code, phecode)
        for vocab, table in tables.items()
        for code, phecodes in table.items()
        for phecode in phecodes
    ]
    assert phecode_maps.group_phecodes(pairs[::-1]) == tables


def test_what_the_catalog_says_besides(tmp_path: Path) -> None:
    path = written(tmp_path, CATALOG9)
    found = phecode_maps.read_map([path])
    assert found.facts[0]["left_out"] == {"ignored": 1, "without_phecode": 1}
    assert found.facts[0]["rows"] == sum(found.facts[0]["pairs"].values()) + 2
    assert found.names["250.2"] == "Type 2 diabetes"
    assert found.exclusions["250.2"] == ("249-250.99", "648-649")
    assert phecode_maps.read_map([path], keep_ignored=True).tables["icd9"]["V70.0"] == ("1010",)


def test_ranges_of_exclusions() -> None:
    assert phecode_maps.is_excluded("250.99", ["249-250.99", "008"])
    assert phecode_maps.is_excluded("008", ["249-250.99", "008"])
    assert not phecode_maps.is_excluded("251", ["249-250.99", "008"])
    assert not phecode_maps.is_excluded("EM_250", ["249-250.99"])


def test_the_who_table_is_recognised_by_name_or_option(tmp_path: Path) -> None:
    assert "icd10" in phecode_maps.read_map([written(tmp_path, PHETKX, "phecodeX_WHO.csv")]).tables
    assert "icd10" in phecode_maps.read_map([written(tmp_path, PHETKX)], vocab="icd10").tables
    assert "icd9" in phecode_maps.read_map([written(tmp_path, PHETKX)], vocab="icd10").tables
    assert phecode_maps.read_map(
        [written(tmp_path, "icd,phecode\nE11.9,250.2\n")], vocab="icd10cm"
    ).tables == {"icd10cm": {"E11.9": ("250.2",)}}


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def tarred(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


CONTAINERS: dict[str, Callable[[Path, bytes], Path | str]] = {
    "csv.gz": lambda folder, data: (
        (folder / "m.csv.gz").write_bytes(gzip.compress(data)) and folder / "m.csv.gz"
    ),
    "csv.zip": lambda folder, data: zipped(folder / "m.csv.zip", {"m.csv": data}),
    "wheel": lambda folder, data: zipped(
        folder / "a-1-py3-none-any.whl",
        {"a/b.csv": b"x,y\n1,2\n", "a/m.csv": data, "a/__init__.py": b""},
    ),
    "member": lambda folder, data: (
        str(zipped(folder / "two.zip", {"a/m.csv": data, "b/m.csv": data})) + "/b/m.csv"
    ),
    "preferred": lambda folder, data: zipped(
        folder / "p.whl", {"p/phecode12.csv": data, "p/phecodeX.csv": PHETKX.encode()}
    ),
    "tar.gz": lambda folder, data: tarred(
        folder / "m.tar.gz", {"a/m.csv": data, "a/setup.py": b"raise SystemExit"}
    ),
    "latin-1": lambda folder, data: written(
        folder, data.decode().replace("Cholera", "Cholér\xe9"), encoding="latin-1"
    ),
    "bom": lambda folder, data: written(folder, "\ufeff" + data.decode().replace("\n", "\r\n")),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_containers(tmp_path: Path, container: str) -> None:
    place = CONTAINERS[container](tmp_path, CATALOG9.encode())
    before = sorted(tmp_path.rglob("*"))
    found = phecode_maps.read_map([place])
    assert found.tables == {"icd9": {"001": ("008",), "250.00": ("250.2",)}}
    assert len(found.facts[0]["sha256"]) == 64
    assert sorted(tmp_path.rglob("*")) == before  # nothing is extracted


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("250.00,250.2,x", Reason.ROW_WIDTH),
        ("250.00", Reason.ROW_WIDTH),
        ('250.00,"250.2', Reason.CSV_SYNTAX),
        ('2"50,250.2', Reason.CSV_SYNTAX),
    ],
)
def test_a_malformed_record_is_named_with_its_row(tmp_path: Path, line: str, code: Reason) -> None:
    text = f"icd9,phecode\n001,008\n{line}\n002,008\n"
    error = refused(written(tmp_path, text))
    assert (error.code, error.file, error.row, error.exit_code) == (
        code,
        "map.csv",
        3,
        Exit.REFUSED,
    )
    assert error.requirement
    beside = zipped(
        tmp_path / "a.zip",
        {"a/m.csv": b"icd9,phecode\n001,008\n", "a/other.csv": text.replace("icd9", "x").encode()},
    )
    assert phecode_maps.read_map([beside]).tables == {"icd9": {"001": ("008",)}}, (
        "another table of an archive does not matter"
    )


def test_archives_that_do_not_say_which(tmp_path: Path) -> None:
    two = zipped(tmp_path / "two.zip", {"a/m.csv": CATALOG9.encode(), "b/m.csv": CATALOG9.encode()})
    assert refused(two).code == Reason.FORMAT
    assert refused(zipped(tmp_path / "none.zip", {"a.csv": b"x,y\n"})).code == Reason.FORMAT
    (tmp_path / "torn.zip").write_bytes(two.read_bytes()[:60])
    assert refused(tmp_path / "torn.zip").code == Reason.CORRUPT
    (tmp_path / "torn.csv.gz").write_bytes(gzip.compress(CATALOG9.encode())[:-20])
    assert refused(tmp_path / "torn.csv.gz").code == Reason.CORRUPT


def test_an_installed_package_is_read_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, facts = tmp_path / "phemapper", tmp_path / "phemapper-1.0.dist-info"
    package.mkdir()
    facts.mkdir()
    (package / "__init__.py").write_text("raise ImportError('imported')")
    written(package, CATALOG9)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: phemapper\nVersion: 1.0\n")
    (facts / "RECORD").write_text(
        "phemapper/__init__.py,,\nphemapper/map.csv,,\nphemapper-1.0.dist-info/METADATA,,\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert (
        phecode_maps.read_map(["pkg:phemapper"]).tables
        == phecode_maps.read_map(["pkg:phemapper/map.csv"]).tables
        != {}
    )
    assert "phemapper" not in sys.modules
    assert refused("pkg:phemapper/other.csv").code == Reason.FORMAT
    error = refused("pkg:no-such-package-at-all")
    assert (error.code, error.exit_code) == (Reason.NOT_FOUND, Exit.USAGE)


def test_published_maps_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("phecode12", "phecodex", "PhecodeX", "phecodex-who"):
        error = refused(name)
        assert (error.code, error.exit_code) == (Reason.NOT_FOUND, Exit.USAGE)
        assert "pip download --no-deps phetk" in str(error)
        assert "GPL-3.0" in str(error)
    with zipfile.ZipFile(tmp_path / "phetk-0.3.6-py3-none-any.whl", "w") as wheel:
        for member, text in (
            ("phecode12", PHETK12),
            ("phecodeX", PHETKX),
            ("phecodeX_WHO", PHETKX),
        ):
            wheel.writestr(f"phetk/phecode/{member}.csv", text)
    assert phecode_maps.read_map(["phecode12"]).tables == {
        "icd9": {"250.00": ("250.2",)},
        "icd10cm": {"E11.9": ("250.2",)},
    }
    both = {"icd9": {"250.00": ("EM_202.2",)}, "icd10cm": {"E11.9": ("EM_202.2",)}}
    assert (
        phecode_maps.read_map(["phecodex"]).tables
        == phecode_maps.read_map(["PhecodeX"]).tables
        == both
    )
    assert phecode_maps.read_map(["phecodex-who"]).tables["icd10"] == {"E11.9": ("EM_202.2",)}
    assert (
        map_files.hash_map("phecodex")
        == map_files.hash_map("PhecodeX")
        != map_files.hash_map("phecode12")
    )
    written(tmp_path, CATALOG9, "phecodex")
    assert phecode_maps.read_map(["phecodex"]).facts[0]["layout"] == "catalog-icd9", (
        "a file of this name is used"
    )


def test_what_is_missing_or_given_twice(tmp_path: Path) -> None:
    assert refused().exit_code == Exit.USAGE
    assert "pip download --no-deps phetk" in str(refused())
    assert refused(tmp_path / "absent.csv").exit_code == Exit.USAGE
    path = written(tmp_path, CATALOG9)
    assert refused(path, path).code == Reason.DUPLICATE_KEY
    assert set(phecode_maps.read_map([path, written(tmp_path, CATALOG10, "b.csv")]).tables) == {
        "icd9",
        "icd10",
    }
    assert refused(written(tmp_path, "a,b\n1,2\n", "c.csv")).code == Reason.FORMAT
    assert refused(path, repair="everything").exit_code == Exit.USAGE


# --- damage: a good map, one line changed


@pytest.mark.parametrize(
    ("text", "old", "new", "shown"),
    [
        (R12, "ICD9CM,001,008", "ICD9CM,1,008", "'1'"),  # 1
        (R12, "ICD9CM,001,008", "ICD9CM,38.9,038", "'38.9'"),
        (R12, "ICD9CM,250.00,", "ICD9CM,25000,", "'25000'"),
        (CATALOG9, "001,Cholera", "1,Cholera", "'1'"),
        ("icd9,phecode\n001,008\n", "001,", "1,", "'1'"),
        (CATALOG9, "001,Cholera", "250.00,Cholera", "'250.00'"),  # 2
        (R12, "ICD9CM,001,008", "ICD9CM,250.00,250", "'250.00'"),
        (CATALOG9, ",008,", ",8,", "'8'"),  # 3
        (CATALOG10, "A00,Cholera,008", "A00,Cholera,38.1", "'38.1'"),
        (R12, "ICD9CM,001,008", "ICD9CM,2.5E+02,008", "'2.5E+02'"),  # 5
        (R12, "250.00,250.2", "250.00,2.502E+02", "'2.502E+02'"),
        (R12, "250.00,250.2", "250.00,250.20", "'250.20'"),
        (CATALOG10, "I13.0,Both,428.1", "I13.0,Both,428.10", "'428.10'"),
    ],
)
def test_damage_is_refused_and_shown(
    tmp_path: Path, text: str, old: str, new: str, shown: str
) -> None:
    assert old in text
    phecode_maps.read_map([written(tmp_path, text)])
    error = refused(written(tmp_path, text.replace(old, new)))
    assert (error.code, error.exit_code) == (Reason.MAP_DAMAGED, Exit.REFUSED)
    assert shown in str(error)


def full() -> list[tuple[str, str, str]]:
    rows = [
        ("ICD9CM", f"{n:03d}{dot}", "008" if n < 3 else "250")
        for n in range(1, 1000)
        for dot in ("", *(f".{d}" for d in range(10)))
    ]
    return [row for row in rows if row[1] != "999"]


@pytest.mark.parametrize("gone", ["001", "001.0", "phecode 008"])
def test_a_full_map_without_its_first_rows_is_refused(tmp_path: Path, gone: str) -> None:  # 4
    rows = full()
    assert len(rows) >= map_damage.FULL_ROWS
    header = "vocabulary_id,code,phecode\n"
    phecode_maps.read_map(
        [written(tmp_path, header + "".join(f"{','.join(row)}\n" for row in rows))]
    )
    rows = (
        [(v, c, "250") for v, c, _ in rows]
        if gone == "phecode 008"
        else [row for row in rows if row[1] != gone]
    )
    error = refused(written(tmp_path, header + "".join(f"{','.join(row)}\n" for row in rows)))
    assert (error.code, gone.split()[-1] in str(error)) == (Reason.MAP_DAMAGED, True)


@pytest.mark.parametrize(
    ("wrong", "intact"),
    [
        (["51.692"], True),
        (["1"], False),
        (["38.9"], False),
        (["2.5E+02"], False),
        ([f"51.{n}" for n in range(600, 620)], False),
    ],
)
def test_a_wrong_code_of_a_full_map_is_left_out_and_damage_is_not(
    tmp_path: Path, wrong: list[str], intact: bool
) -> None:
    rows = [*full(), *(("ICD9CM", code, "286") for code in wrong)]
    path = written(
        tmp_path, "vocabulary_id,code,phecode\n" + "".join(f"{','.join(row)}\n" for row in rows)
    )
    if not intact:
        assert refused(path).code == Reason.MAP_DAMAGED
        return
    found = phecode_maps.read_map([path])
    assert set(found.tables["icd9"]) == {code for _, code, _ in full()}
    assert [(finding.level, "51.692" in finding.problem) for finding in found.findings] == [
        ("warning", True)
    ]


@pytest.mark.parametrize("column", ["code", "phecode"])
def test_numbers_in_parquet_are_refused(tmp_path: Path, column: str) -> None:  # 6
    frame = pl.DataFrame({"code": ["250.1"], "phecode": ["250.2"]})
    path = tmp_path / "map.parquet"
    frame.write_parquet(path)
    assert phecode_maps.read_map([path]).tables == {"icd9": {"250.1": ("250.2",)}}
    frame.with_columns(pl.col(column).cast(pl.Float64)).write_parquet(path)
    assert refused(path).code == Reason.MAP_DAMAGED


def test_in_a_plain_map_odd_phecodes_are_a_warning(tmp_path: Path) -> None:
    found = phecode_maps.read_map([written(tmp_path, "icd9,phecode\n250.00,250.20\n")])
    assert found.tables == {"icd9": {"250.00": ("250.20",)}}
    assert [(one.code, one.level) for one in found.findings] == [(Reason.MAP_DAMAGED, "warning")]


def test_zeros_of_phecodes_are_put_back_on_request_where_nothing_else_is_wrong(
    tmp_path: Path,
) -> None:
    damaged = CATALOG10.replace("Cholera,008", "Cholera,8").replace(
        "I13.0,Both,428.1", "I13.0,Both,38.1"
    )
    path = written(tmp_path, damaged)
    assert "--map-repair phecode-zeros" in str(refused(path))
    found = phecode_maps.read_map([path], repair="phecode-zeros")
    assert found.tables == {"icd10": {"A00": ("008",), "I13.0": ("038.1", "401.2")}}
    assert found.facts[0]["repaired"] == 2
    assert found.names["008"] == "Intestinal infection"
    worse = written(tmp_path, CATALOG9.replace(",008,", ",8,").replace("001,", "1,"))
    assert "cannot be repaired" in str(refused(worse, repair="phecode-zeros"))


def test_overrides(tmp_path: Path) -> None:
    path = written(tmp_path, CATALOG9)
    text = (
        "code,vocab,phecode\n250.00,ICD9CM,250.1\n25000,icd9,250.3\n001,icd9,\nE119,icd10,250.2\n"
    )
    found = phecode_maps.read_map([path], overrides=written(tmp_path, text, "o.csv"))
    assert found.tables == {"icd9": {"250.00": ("250.1", "250.3")}, "icd10": {"E11.9": ("250.2",)}}
    assert found.facts[-1]["codes"] == 3
    for wrong in (
        "code,phecode\n1,2\n",
        "code,vocab,phecode\nxx,icd9,250\n",
        "code,vocab,phecode\n250,icd8,250\n",
    ):
        assert refused(path, overrides=written(tmp_path, wrong, "o.csv")).code == Reason.FORMAT


# --- the published files


@pytest.mark.slow
@needs_data
def test_the_published_maps() -> None:
    r, icd10 = DATA / "phecode_map_v1_2_icd9cm.csv", DATA / "variants" / "phecode_icd10.csv"
    found = phecode_maps.read_map([r, icd10], repair="phecode-zeros")
    assert [facts["pairs"] for facts in found.facts] == [{"icd9": 13707}, {"icd10": 9366}]
    with icd10.open(encoding="latin-1") as stream:
        assert set(found.tables["icd10"]) == {
            row["ICD10"] for row in csv.DictReader(stream) if row["PheCode"]
        }
    assert len({p for own in found.tables["icd9"].values() for p in own}) == 1817
    assert (found.names["008"], found.categories["008"]) == (
        "Intestinal infection",
        "infectious diseases",
    )
    near = phecode_maps.related_phecodes(
        found,
        label_rules.find_defining_phecodes(
            label_rules.parse_rules(label_rules.load_rules("ccdss")), {"icd9": found.tables["icd9"]}
        ),
    )
    assert "250.1" in near["diabetes"]
    assert "008" not in near["diabetes"]
    with (DATA / "phecode_map_v1_2_icd9cm.csv").open() as stream:
        assert all(
            found.tables["icd9"][row["code"]] == (row["phecode"],) for row in csv.DictReader(stream)
        )


@needs_data
def test_the_spreadsheet_damaged_copies_are_refused() -> None:
    rolled, icd10 = (
        DATA / "variants" / "phecode_icd9_rolled.csv",
        DATA / "variants" / "phecode_icd10.csv",
    )
    for options in ({}, {"repair": "phecode-zeros"}):
        error = refused(rolled, **options)
        assert (error.code, error.exit_code) == (Reason.MAP_DAMAGED, Exit.REFUSED)
        assert "cannot be repaired" in str(error)
    assert "--map-repair phecode-zeros" in str(refused(icd10))


def test_map_of_claims_is_the_phecode_map_and_of_recordings_the_mapping_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "map.toml").write_text("[channels]\n")
    (tmp_path / "raw" / "claims.csv").write_text("subject_id,date,code\n1,2001-02-03,250.0\n")
    for dataset, file, found in (
        ("pophr", "nowhere.csv", "nowhere.csv"),
        ("generic", "map.toml", "map.toml:channels: unknown key"),
    ):
        assert (
            main(
                [
                    "ingest",
                    dataset,
                    str(tmp_path / "raw"),
                    "--map",
                    str(tmp_path / "raw" / file),
                    "-w",
                    str(tmp_path / "w"),
                ]
            )
            != 0
        )
        shown = capsys.readouterr().err
        assert found in shown
        assert "unknown option" not in shown
