"""Tables beside recordings that say whose they are and of which class, where no map names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyedflib
import pytest

from bitimely_core import tokens
from bitimely_core.cache import ingest, open_cache
from bitimely_core.errors import UserError
from bitimely_core.formats.source import scan_folder
from bitimely_core.recordings.template import write_template
from bitimely_core.types import Record


def read_folder(folder: Path, **options: Any) -> dict[str, Record]:
    """Name -> recording of a folder."""
    cache = folder.parent / "cache"
    ingest("generic", folder, cache, **options)
    return {record.recording_id: record for record in open_cache(cache).records()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "raw").mkdir()
    return tmp_path / "raw"


def write_recording(path: Path, seed: int) -> None:
    """One channel of noise at 100 Hz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(seed).standard_normal(300)
    rows = [f"{k / 100:.2f},{value:.4f}" for k, value in enumerate(values)]
    path.write_text("\n".join(["time,ECG", *rows]) + "\n")


def write_records(folder: Path, count: int) -> None:
    for number in range(count):
        write_recording(folder / f"r{number}.csv", number)


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("labels.csv", "file,diagnosis\nr0,MI\nr1,N\nr2,N\nr3,MI\n", "MI N N MI"),
        ("t.tsv", "r0.csv\t0\nr1.csv\t1\nr2.csv\t1\nr3.csv\t0\n", "0 1 1 0"),
        ("t.csv", "id;who;class\n1;r0;a\n2;r1;b\n3;r2;a\n4;r3;\n", "a b a None"),
        ("t.csv", "r0,a,x\nr1,b,x\nr2,b,y\nr3,a,y\n", None),  # two columns can be classes
        ("t.csv", "name,age\nr0,31\nr1,32\nr2,44\nr3,60\n", None),
        ("t.csv", "name,class\nr0,a\nr9,b\nr8,a\nr7,b\n", None),  # names one of four
        ("t.csv", "file,sex,class\nr0,F,a\nr1,M,b\nr2,F,b\nr3,M,a\n", "a b b a"),
        ("t.csv", "file,group,fold\nr0,a,1\nr1,b,1\nr2,b,2\nr3,a,2\n", "a b b a"),
    ],
)
def test_a_table_of_classes_is_recognised(
    folder: Path, name: str, text: str, wanted: str | None
) -> None:
    write_records(folder, 4)
    (folder / name).write_text(text)
    report = ingest("generic", folder, folder.parent / "cache")
    records = read_folder(folder)
    labels = [records[f"r{k}"].attributes.get("label") for k in range(4)]
    assert labels == (
        [None] * 4 if wanted is None else [None if w == "None" else w for w in wanted.split()]
    )
    is_said = "label" in report["reason_counts"]
    assert is_said == (wanted is not None or "x" in text)
    if wanted is not None:
        assert (report["rows"][0]["seen"], report["rows"][0]["used"]) == (4, 4)


@pytest.mark.parametrize(
    ("column", "cells", "wanted"),
    [
        ("split", ["train", "val", "Test", "training"], ["train", "validation", "test", "train"]),
        ("strat_fold", ["1", "9", "10", "2"], ["train", "validation", "test", "train"]),
        ("fold", ["0", "1", "2", "3"], None),  # not of ten folds
        ("split", ["a", "b", "test", "c"], None),
        ("split", ["train", "train", "train", "train"], None),  # none is tested
    ],
)
def test_splits_of_a_table_are_the_official_ones(
    folder: Path, column: str, cells: list[str], wanted: list[str] | None
) -> None:
    """They were ignored without a word, and `--split official` found none."""
    write_records(folder, 4)
    rows = [f"r{k},p{k},{cell}" for k, cell in enumerate(cells)]
    (folder / "table.csv").write_text("\n".join([f"file,subject,{column}", *rows]) + "\n")
    cache = folder.parent / "cache"
    report = ingest("generic", folder, cache)
    assert ("their splits" in str(report["reasons"])) == (wanted is not None)
    if wanted is None:
        with pytest.raises(UserError, match="has no official split"):
            tokens.build(cache, view="", out=folder.parent / "t", split="official")
        return
    index = tokens.build(cache, view="", out=folder.parent / "t", split="official").index
    assert index.sort("recording_id")["split"].to_list() == wanted


def test_the_advice_on_several_columns_of_classes_works(folder: Path) -> None:
    write_records(folder, 4)
    (folder / "t.csv").write_text("file,sex,ward\nr0,F,a\nr1,M,b\nr2,F,b\nr3,M,a\n")
    report = ingest("generic", folder, folder.parent / "cache")
    (line,) = [r["message"] for r in report["reasons"] if r["code"] == "label"]
    advice = line.partition("with the lines ")[2].removesuffix(".")
    text = "\n".join(advice.replace("[table] ", "[table]\n").split("; "))
    path = folder.parent / "map.toml"
    path.write_text(text.replace('"sex"', '"ward"'))
    records = read_folder(folder, options={"map": str(path)}, force_new=True)
    assert [records[f"r{k}"].attributes["label"] for k in range(4)] == ["a", "b", "b", "a"]


def list_subjects(folder: Path) -> dict[str, str]:
    return {name: record.subject_id for name, record in read_folder(folder).items()}


@pytest.mark.parametrize(
    ("names", "text", "wanted"),
    [
        # a row a recording
        ("a b c d", "file,patient,class\na,P1,x\nb,P1,x\nc,P2,y\nd,P2,y\n", "P1 P1 P2 P2"),
        ("a b c d", "file,Subject-ID,age\na,7,20\nb,7,21\nc,8,30\nd,8,31\n", "7 7 8 8"),
        # numbers of the rows are no subjects
        ("a b c d", "id,file,class\n1,a,x\n2,b,x\n3,c,y\n4,d,y\n", "a b c d"),
        # a row a subject, in the folders or at the beginning of the names
        ("S1/n1 S1/n2 S2/n1 S2/n2", "subject,age\nS1,20\nS2,30\nS9,40\n", "S1 S1 S2 S2"),
        ("S1/S1 S1/S1-2 S2/S2 S2/S2-2", "Subject ID,sex\nS1,F\nS2,M\n", "S1 S1 S2 S2"),
        ("P1_a P1_b P2_a P2_b", "participant_id,group\nP1,x\nP2,y\n", "P1 P1 P2 P2"),
        # names that fit two subjects are of none
        (
            "S1/S2 S2/S1 S1/S2_b S2/S1_b",
            "subject,age\nS1,20\nS2,30\n",
            "S1/S2 S2/S1 S1/S2_b S2/S1_b",
        ),
        # spreadsheets drop zeros, and people write capitals as they like
        ("001/a 001/b 002/a 002/b", "patient_id,age\n1,20\n2,30\n", "1 1 2 2"),
        ("s01_a s01_b s02_a s02_b", "subject,age\nS1,20\nS2,30\n,\n", "S1 S1 S2 S2"),
        ("7_a 7_b 8_a 8_b", "subject,age\n7.0,20\n8.0,30\n", "7.0 7.0 8.0 8.0"),
        ("1_a 1_b 01_a 01_b", "subject,age\n1,20\n01,30\n", "1_a 1_b 01_a 01_b"),
        ("a b c d", "file,subject\na,7\nb,7.0\nc,08\nd,8\n", "7 7 08 08"),
        # visits, whose numbers are those of subjects, too
        ("1_5 2_5 1_6 2_6", "subject\n1\n2\n5\n6\n", "1_5 2_5 1_6 2_6"),
        ("1/P5 2/P5 1/P6 2/P6", "subject\n1\n2\n5\n6\n", "1/P5 2/P5 1/P6 2/P6"),
        ("1_1 1_2 2_1 2_2", "subject,age\n1,30\n2,40\n", "1 1 2 2"),
        # several rows a subject
        ("S1_a S1_b S2_a S2_b", "subject,visit\nS1,a\nS1,b\nS2,a\nS2,b\n", "S1 S1 S2 S2"),
        ("c1_a c1_b c2_a c2_b", "case_id,patient_id\nc1,P1\nc2,P1\n", "c1_a c1_b c2_a c2_b"),
        # of several columns the clearest
        ("a b c d", "file,caseid,subjectid\na,1,p\nb,2,p\nc,3,q\nd,4,q\n", "p p q q"),
        ("a b c d", "file,id,patient_id\na,1,p\nb,1,q\nc,2,p\nd,2,q\n", "p q p q"),
        ("P1_a P1_b P2_a P2_b", "id,patient_id\n1,P1\n2,P2\n", "P1 P1 P2 P2"),
        # no usual name for subjects
        ("P1_a P1_b P2_a P2_b", "ward,beds\nP1,4\nP2,5\n", "P1_a P1_b P2_a P2_b"),
    ],
)
@pytest.mark.parametrize("table", ["table.csv", "participants.tsv"])
def test_a_table_says_whose_recordings_are(
    folder: Path, names: str, text: str, wanted: str, table: str
) -> None:
    for seed, name in enumerate(names.split()):
        write_recording(folder / f"{name}.csv", seed)
    (folder / table).write_text(text.replace(",", "\t") if table.endswith(".tsv") else text)
    assert list_subjects(folder) == dict(zip(names.split(), wanted.split(), strict=True))


def test_subjects_of_a_map_come_before_those_of_a_table(folder: Path) -> None:
    for seed, name in enumerate(("S1_a", "S1_b", "S2_a", "S2_b")):
        write_recording(folder / f"{name}.csv", seed)
    (folder / "t.csv").write_text("file,subject,class\nS1_a,u,x\nS1_b,v,x\nS2_a,u,y\nS2_b,v,y\n")
    path = folder.parent / "map.toml"
    path.write_text("[[files]]\npattern = 'S*.csv'\nmatch = '(?P<subject>S[0-9])'\n")
    records = read_folder(folder, options={"map": str(path)})
    assert {name: (r.subject_id, r.attributes["label"]) for name, r in records.items()} == {
        "S1_a": ("S1", "x"), "S1_b": ("S1", "x"), "S2_a": ("S2", "y"), "S2_b": ("S2", "y"),
    }  # fmt: skip


@pytest.mark.parametrize("by", ["match", "table", "nothing"])
def test_a_subject_may_be_called_as_its_recording(folder: Path, by: str) -> None:
    write_records(folder, 3)
    path = folder.parent / "map.toml"
    line = "match = '(?P<subject>r[0-9])'" if by == "match" else ""
    path.write_text(f"[[files]]\npattern = 'r*.csv'\n{line}\n")
    if by == "table":
        (folder / "t.csv").write_text("file,subject\nr0,r0\nr1,r1\nr2,r2\n")
    options = {"map": str(path)}
    report = ingest("generic", folder, folder.parent / "cache", options=options)
    unknown = [r for r in report["reasons"] if "unknown subjects" in r["message"]]
    wanted = (1, 3) if by == "nothing" else (0, 0)
    assert (len(unknown), report["use"]["unknown_subjects"]) == wanted


@pytest.mark.parametrize(
    ("names", "text", "wanted"),
    [
        ("a b c d", "file,user,label\na,u,x\nb,u,y\nc,v,x\nd,v,y\n", "a b c d"),
        ("a b c d", "file,user_id,age,label\na,u,1,x\nb,u,1,y\nc,v,2,x\nd,v,2,y\n", "u u v v"),
        ("u_a u_b v_a v_b", "file,user,label\nu_a,u,x\nu_b,u,y\nv_a,v,x\nv_b,v,y\n", "u u v v"),
        ("a b c d", "file,user\na,u\nb,u\nc,v\nd,v\n", "u u v v"),
    ],
)
def test_users_beside_classes_may_be_raters(
    folder: Path, names: str, text: str, wanted: str
) -> None:
    for seed, name in enumerate(names.split()):
        write_recording(folder / f"{name}.csv", seed)
    (folder / "t.csv").write_text(text)
    assert list(list_subjects(folder).values()) == wanted.split()


@pytest.mark.parametrize(
    ("people", "chosen", "labels"),
    [
        ("subject,age\nS1,20\nS2,30\n", "", "x y x y"),
        ("file,subject\nS1_a,S1\nS1_b,S1\nS2_a,S2\nS2_b,S2\n", "", "x y x y"),
        ("subject,group\nS1,c\nS2,d\n", 'path = "people.csv"\nsubject = "subject"\n'
         'label = "group"', "c c d d"),
    ],
)  # fmt: skip
def test_subjects_beside_a_table_of_the_map_are_read(
    folder: Path, people: str, chosen: str, labels: str
) -> None:
    names = ["S1_a", "S1_b", "S2_a", "S2_b"]
    for seed, name in enumerate(names):
        write_recording(folder / f"{name}.csv", seed)
    (folder / "labels.csv").write_text("file,label\nS1_a,x\nS1_b,y\nS2_a,x\nS2_b,y\n")
    (folder / "people.csv").write_text(people)
    path = folder.parent / "map.toml"
    chosen = chosen or 'path = "labels.csv"\nfile = "file"\nlabel = "label"'
    path.write_text(f"[[files]]\npattern = 'S*.csv'\n[table]\n{chosen}\n")
    records = read_folder(folder, options={"map": str(path)})
    assert [records[name].subject_id for name in names] == ["S1", "S1", "S2", "S2"]
    assert [records[name].attributes["label"] for name in names] == labels.split()


def test_classes_of_subjects_are_those_of_their_recordings(folder: Path) -> None:
    for seed, name in enumerate(["S1/n1", "S1/n2", "S2/n1", "S3/n1", "S3/n2", "S4/n1", "S5/n1"]):
        write_recording(folder / f"{name}.csv", seed)
    rows = "S1,MDD\nS2,HC\nS3,HC\nS4,MDD\n"
    (folder / "people.csv").write_text(f"subject,diagnosis\n{rows}")
    labels = {name: record.attributes.get("label") for name, record in read_folder(folder).items()}
    assert labels == {
        "S1/n1": "MDD", "S1/n2": "MDD", "S2/n1": "HC", "S3/n1": "HC", "S3/n2": "HC", "S4/n1": "MDD",
        "S5/n1": None,
    }  # fmt: skip


def test_subjects_are_read_where_it_is_not_clear_what_the_classes_are(folder: Path) -> None:
    write_records(folder, 4)
    rows = "r0,p,F,x\nr1,p,F,y\nr2,q,M,x\nr3,q,M,y\n"
    (folder / "t.csv").write_text(f"file,subject,sex,ward\n{rows}")
    report = ingest("generic", folder, folder.parent / "cache")
    assert list_subjects(folder) == {"r0": "p", "r1": "p", "r2": "q", "r3": "q"}
    (line,) = [r["message"] for r in report["reasons"] if r["code"] == "label"]
    assert 'subject = "subject"' in line


@pytest.mark.parametrize("text", ["id,beds\nA,4\nB,5\n", "id,task\nA,rest\nB,count\n"])
def test_a_table_of_sites_or_tasks_is_of_no_subjects(folder: Path, text: str) -> None:
    names = ["A/p1", "A/p2", "B/p1", "B/p2"]
    for seed, name in enumerate(names):
        write_recording(folder / f"{name}.csv", seed)
    (folder / "list.csv").write_text(text)
    assert list_subjects(folder) == {name: name for name in names}


def test_classes_of_recordings_and_subjects_are_read_from_two_tables(folder: Path) -> None:
    names = ["S1_a", "S1_b", "S2_a", "S2_b", "S3_a"]
    for seed, name in enumerate(names):
        write_recording(folder / f"{name}.csv", seed)
    (folder / "labels.csv").write_text("file,label\nS1_a,x\nS1_b.csv,y\nS2_a,x\nS2_b,y\n")
    (folder / "people.csv").write_text("subject,group\nS1,c\nS2,c\nS3,d\nS4,d\n")
    report = ingest("generic", folder, folder.parent / "cache")
    assert report["use"]["files_left"] == []
    records = read_folder(folder)
    assert [records[name].attributes.get("label") for name in names] == ["x", "y", "x", "y", None]
    assert [records[name].subject_id for name in names] == ["S1", "S1", "S2", "S2", "S3"]


def test_a_map_that_is_written_reads_the_same_subjects(folder: Path) -> None:
    for seed, name in enumerate(["S1/S1", "S1/S1-2", "S2/S2", "S2/S2-2"]):
        write_recording(folder / f"{name}.csv", seed)
    (folder / "people.csv").write_text("subject,sex\nS1,F\nS2,M\n")
    path = folder.parent / "map.toml"
    path.write_text(write_template(scan_folder(folder)))
    assert "# people.csv has a row a subject" in path.read_text()
    records = read_folder(folder, options={"map": str(path)})
    assert [records[name].subject_id for name in sorted(records)] == ["S1", "S1", "S2", "S2"]


def test_names_of_the_corpus_of_temple_university_state_subjects(folder: Path) -> None:
    names = ["aaaaaaac_s001_t000", "aaaaaaac_s002_t000", "aaaaaaad_s001_t001"]
    for seed, name in enumerate(names):
        with pyedflib.EdfWriter(str(folder / f"{name}.edf"), 1) as writer:
            writer.setLabel(0, "EEG")
            writer.writeSamples([np.random.default_rng(seed).normal(0, 50, 300)])
    assert list(list_subjects(folder).values()) == ["aaaaaaac", "aaaaaaac", "aaaaaaad"]


def test_subjects_of_edf_files_are_read_and_classes_are_not(folder: Path) -> None:
    for name in ("S1/n1", "S1/n2", "S2/n1", "S2/n2"):
        path = folder / f"{name}.edf"
        path.parent.mkdir(parents=True, exist_ok=True)
        with pyedflib.EdfWriter(str(path), 1) as writer:
            writer.setLabel(0, "ECG")
            writer.writeSamples([np.random.default_rng([*name.encode()]).normal(0, 50, 300)])
    (folder / "table.csv").write_text("subject,group\nS1,a\nS2,b\n")
    (folder / "wards.csv").write_text("file,ward\nS1/n1,a\nS1/n2,b\nS2/n1,a\nS2/n2,b\n")
    cache = folder.parent / "cache"
    ingest("edf", folder, cache)
    records = {record.recording_id: record for record in open_cache(cache).records()}
    assert [records[name].subject_id for name in sorted(records)] == ["S1", "S1", "S2", "S2"]
    assert all("label" not in record.attributes for record in records.values())
