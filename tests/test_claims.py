"""Claims from files to sequences: rows kept, findings reported, de-identification, and that the
command equals the builder.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from samples import BAD_INPUTS, SAMPLES, needs_sample, require_sample

from bitimely_core import cache, tokens, workflows
from bitimely_core.claims import ingest_claims, label_rules
from bitimely_core.claims.build import build_sequences
from bitimely_core.errors import UserError
from bitimely_core.store import manifests

MAP = SAMPLES / "phecode" / "phecode_map_v1_2_icd9cm.csv"
FLAGS = ("SP_CHF:chf:1", "SP_COPD:copd:1", "SP_DIABETES:diabetes:1")
real = needs_sample(MAP)


def ingested(home: Path, folder: Path, **options: Any) -> dict[str, Any]:
    given = {key: options.pop(key) for key in ("keep_dates", "force_new") if key in options}
    if (folder / "claims.csv").is_file():  # the rules need claims of physicians
        options.setdefault("default_source", "physician")
    return cache.ingest("pophr", folder, home / "cache" / "pophr", options=options, **given)


def built(
    home: Path, name: str = "pophr", data: str = "pophr", **choices: Any
) -> tokens.EventSequences:
    workflows.tokenize(data, workspace=home, name=name, options=choices)
    return tokens.open_tokens(home / "tokens" / name)


@pytest.fixture(scope="module")
def synpuf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("synpuf")
    if MAP.is_file():
        ingested(
            home,
            SAMPLES / "de-synpuf",
            source="synpuf",
            phecode_map=(str(MAP),),
            rules="ccw",
            label_column=FLAGS,
        )
    return home


# --- small claims of our own


def write(
    folder: Path, rows: list[tuple[str, str, str]], patients: list[tuple[str, str]] | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "claims.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("patient_id", "date", "icd9"), *rows])
    if patients is None:  # the rules need an age
        patients = [(subject, "1930-05-17") for subject in sorted({row[0] for row in rows})]
    with (folder / "patients.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("patient_id", "birth_date"), *patients])
    with (folder / "icd9_phecode.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [
                ("icd9", "phecode"),
                ("428.0", "428.1"),
                ("250.00", "250.2"),
                ("401.9", "401.1"),
                ("496", "496"),
                ("008.5", "008"),
            ]
        )
    return folder


def some(n: int = 40, seed: int = 0) -> list[tuple[str, str, str]]:
    draw = np.random.default_rng(seed)
    codes = ["428.0", "250.00", "401.9", "496", "008.5", "25000", "4280", "zzz", "V70.0"]
    rows = []
    for subject in range(n):
        for _ in range(int(draw.integers(1, 14))):
            day = np.datetime64("2004-01-01") + int(draw.integers(0, 3000))
            rows.append((f"P{subject:04d}", str(day), codes[int(draw.integers(len(codes)))]))
    return rows


# --- the real sample against the published expectations


@real
def test_desynpuf_gives_the_expected_figures(synpuf: Path) -> None:
    """Measured expectations of the builder's reference, section 14."""
    manifest = cache.open_cache(synpuf / "cache" / "pophr").events_manifest
    funnel = manifest.funnel
    assert funnel.rows == 54_416
    assert funnel.bad_code == {"missing": 29, "bad_format": 1, "ambiguous_short": 0}
    assert funnel.mapped == {"exact": 49_237, "parent": 1_028, "trailing_zero": 165}
    assert funnel.unmapped == 3_956
    cells = {(c.rule, c.cell): c.n for c in manifest.agreement if c.rule == c.flag}
    counts = {
        name: tuple(cells.get((name, cell), 0) for cell in ("tp", "fp", "fn"))
        for name in ("chf", "copd", "diabetes")
    }
    assert counts == {"chf": (179, 0, 3), "copd": (87, 23, 1), "diabetes": (178, 22, 4)}
    one = built(synpuf, "all", select=False)
    statistics = one.statistics
    assert (len(one), statistics.funnel.events, statistics.sequences.median_length) == (
        265,
        41_305,
        129,
    )
    assert statistics.sequences.median_positive_gap == pytest.approx(0.263, abs=5e-4)
    leaks = {name: statistics.leaks[f"{name}_source"] for name in ("chf", "copd", "diabetes")}
    assert [round(leak.prevalence["all"], 3) for leak in leaks.values()] == [0.672, 0.332, 0.679]
    assert [round(leak.length["all"], 3) for leak in leaks.values()] == [0.932, 0.675, 0.936]
    own = {"chf": "428", "copd": "496", "diabetes": "250"}
    assert [round(leak.own[own[name]]["all"], 3) for name, leak in leaks.items()] == [
        0.985,
        0.881,
        0.981,
    ]


@pytest.mark.slow
@real
def test_no_dropped_code_and_nothing_after_the_index_day_in_the_input(synpuf: Path) -> None:
    dropped = built(synpuf, "dropped", select=False, leakage="drop-phecode")
    assert not {"428", "496", "250", "249", "401"} & set(dropped.vocabulary)
    assert "428" in built(synpuf, "kept", select=False).vocabulary
    landmark = built(synpuf, "landmark", select=False, landmark="365,30,365", min_codes=1)
    arrays = landmark.arrays()
    assert (arrays["times"].max(1) <= arrays["end"] + 1e-4).all()
    assert np.isnan(landmark.targets()).any(), "prevalent subjects have no label"
    days = 365 / 30.4375
    assert replace(landmark, limit=10**6).arrays()["end"].max() <= days + 1e-4


@pytest.mark.slow
@real
def test_nobody_is_recognisable(synpuf: Path) -> None:
    """No raw id, claim id, date or birth date anywhere below cache/ and tokens/."""
    built(synpuf, "seen", select=False)
    with (
        SAMPLES / "de-synpuf" / "DE1_0_2008_Beneficiary_Summary_File_Sample_1.csv"
    ).open() as file:
        people = list(csv.DictReader(file))
    secrets = {row["DESYNPUF_ID"] for row in people} | {row["BENE_BIRTH_DT"] for row in people}
    dates = re.compile(r"(?<!\d)(19|20)\d\d-?[01]\d-?[0-3]\d(?!\d)")
    for path in [*(synpuf / "cache").rglob("*"), *(synpuf / "tokens").rglob("*")]:
        if path.suffix == ".parquet":
            frame = pl.read_parquet(path)
            texts = {str(v) for column in frame.select(pl.col(pl.String)) for v in column}
            assert not texts & secrets, path.name
            if "time" in frame.columns:
                assert frame["time"].min().year in (1969, 1970)
        elif path.suffix in {".json", ".html"}:
            text = path.read_text()
            assert not any(one in text for one in secrets), path.name
            if path.suffix == ".json":
                assert not dates.search(
                    re.sub(
                        r'"(sha256|\w*_sha256|meds_version|version|pseudonyms)":"[^"]*"', "", text
                    )
                ), path.name
    assert (synpuf / "id.key").stat().st_mode & 0o777 == 0o600


# --- caches


def test_a_second_run_changes_nothing_and_a_repaired_file_is_ingested(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", some())
    first = ingested(tmp_path, raw)
    files = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "cache" / "pophr").glob("*.parquet")}
    again = ingested(tmp_path, raw)
    assert {
        p.name: p.stat().st_mtime_ns for p in (tmp_path / "cache" / "pophr").glob("*.parquet")
    } == files
    assert (again["content_sha256"], again["generation"]) == (first["content_sha256"], 1)
    assert again["reason_counts"] == first["reason_counts"]
    births = [(f"P{i:04d}", "1930-05-17") for i in range(40)]
    write(raw, [row for row in some() if row[2] != "zzz"], births)
    mended = ingested(tmp_path, raw)
    assert (mended["generation"], mended["exit_code"], first["exit_code"]) == (2, 0, 3)
    assert mended["content_sha256"] == first["content_sha256"], (
        "what was left out was left out of the content"
    )
    with pytest.raises(UserError, match="keep_ignored") as caught:
        ingested(tmp_path, raw, keep_ignored=True)
    assert caught.value.exit_code == 2


def test_pseudonyms_hang_on_the_key_and_splits_and_content_do_not(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", some(80))
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    reports = [ingested(tmp_path / str(i), raw, id_key=str(key)) for i in range(2)]
    bytes_of = [
        {p.name: p.read_bytes() for p in (tmp_path / str(i) / "cache" / "pophr").glob("*.parquet")}
        for i in range(2)
    ]
    assert bytes_of[0] == bytes_of[1], "same input, same key: same bytes"
    other = ingested(tmp_path / "other", raw)
    assert other["content_sha256"] == reports[0]["content_sha256"]
    people = [
        pl.read_parquet(next((tmp_path / w / "cache" / "pophr").glob("subjects-*.parquet")))
        for w in ("0", "other")
    ]
    assert sorted(people[0]["split_bin"]) == sorted(people[1]["split_bin"])
    assert people[0]["split_bin"].to_list() != people[1]["split_bin"].to_list()
    (tmp_path / "short").write_bytes(b"x")
    with pytest.raises(UserError, match="32 random bytes"):
        ingested(tmp_path / "third", raw, id_key=str(tmp_path / "short"))


@pytest.mark.slow
def test_shards_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write(tmp_path / "raw", some(120))
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    single = ingested(tmp_path / "whole", raw, id_key=str(key))
    monkeypatch.setattr(ingest_claims, "SHARD_BYTES", (raw / "claims.csv").stat().st_size // 4)
    monkeypatch.setattr("bitimely_core.claims.spill.GROUP", 50)  # several row groups a file
    parts = ingested(tmp_path / "parts", raw, id_key=str(key))
    assert parts["content_sha256"] == single["content_sha256"]
    assert parts["reason_counts"] == single["reason_counts"]
    assert parts["rows"] == single["rows"]
    assert len(list((tmp_path / "parts" / "cache" / "pophr").glob("events-*.parquet"))) > 3
    assert not (tmp_path / "parts" / "cache" / "pophr" / ".piles").exists()
    frames = []
    for home in ("whole", "parts"):
        one = built(tmp_path / home, select=False, min_codes=2)
        frame = pl.concat(
            [pl.read_parquet(one.folder / name) for name in one.manifest.shards]
        ).sort("subject_id")
        frames.append(frame.with_columns(pl.col("split").cast(pl.String)))
        assert (
            one.statistics.leaks
            == tokens.open_tokens(tmp_path / "whole" / "tokens" / "pophr").statistics.leaks
        )
    assert frames[0].equals(frames[1])


@pytest.mark.slow
def test_parts_of_a_job_array_make_the_same_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bitimely_core.formats import table_text

    raw = write(
        tmp_path / "raw", some(120), [(f"P{i:04d}", f"{1930 + i % 40}-05-17") for i in range(150)]
    )
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    options = {"id_key": str(key), "default_source": "physician"}
    single = ingested(tmp_path / "whole", raw, **options)
    monkeypatch.setattr(table_text, "BLOCK", 2000)
    monkeypatch.setattr(ingest_claims, "SHARD_BYTES", (raw / "claims.csv").stat().st_size // 3)
    out = tmp_path / "parts" / "cache" / "pophr"
    for k in (2, 3):
        one = cache.ingest("pophr", raw, out, options=options, shard=(k, 3))
        assert (one["published"], one["parts_missing"]) == (False, 4 - k)
        assert not (out / "manifest.json").exists()
    raw_ids = {row[0].encode() for row in some(120)}
    assert not any(
        raw_id in path.read_bytes()
        for path in out.rglob("*")
        if path.is_file()
        for raw_id in raw_ids
    )
    last = cache.ingest("pophr", raw, out, options=options, shard=(1, 3))
    for field in ("content_sha256", "rows", "reason_counts", "exit_code"):
        assert last[field] == single[field]
    assert not (out / ".parts").exists()
    frames = [
        cache.open_cache(home).cohort() for home in (out, tmp_path / "whole" / "cache" / "pophr")
    ]
    assert frames[0].equals(frames[1])
    assert cache.ingest("pophr", raw, out, options=options, shard=(2, 3))["generation"] == 1


def test_the_command_is_the_builder(tmp_path: Path) -> None:
    """Property 12: command and `build_sequences` give the same sequences, labels, splits and
    ratios.
    """
    rows = some(150, seed=3)
    raw = write(
        tmp_path / "raw", rows, [(f"P{i:04d}", f"{1930 + i % 40}-05-17") for i in range(150)]
    )
    ids = tmp_path / "ids.csv"
    ingested(tmp_path / "home", raw, keep_ids=str(ids))
    new = {row["subject_id"]: row["new"] for row in csv.DictReader(ids.read_text().splitlines())}
    one = built(tmp_path / "home", select=False, min_codes=3, leakage="drop-icd")
    frame = pl.DataFrame(rows, schema=["subject_id", "date", "code"], orient="row")
    frame = frame.with_columns(source=pl.lit("physician"))
    people = pl.DataFrame(
        {"subject_id": list(new), "birth": [f"{1930 + int(i[1:]) % 40}-05-17" for i in new]}
    )
    phemap = pl.read_csv(raw / "icd9_phecode.csv", infer_schema=False)
    wanted = build_sequences(
        frame,
        people,
        phemap.select("phecode", vocab=pl.lit("icd9"), code="icd9"),
        rules=label_rules.load_rules("ccdss"),
        select=False,
        min_codes=3,
        leakage="drop_icd",
    )
    arrays, index = one.arrays(), one.whole_index
    assert set(index["subject_id"]) == {new[s] for s in wanted["sequences"]}
    at = {subject: row for row, subject in enumerate(index["subject_id"])}
    for raw_id, sequence in wanted["sequences"].items():
        row = at[new[raw_id]]
        n = len(sequence["codes"])
        assert arrays["values"][row, :n].tolist() == sequence["codes"]
        assert arrays["mask"][row].sum() == n
        assert arrays["times"][row, :n] == pytest.approx(sequence["times"], abs=1e-5)
        assert index["split"][row] == sequence["split"]
        labels = [None if np.isnan(v) else int(v) for v in one.target[row]]
        assert labels == [sequence["labels"][name] for name in one.class_names]


def test_choices_that_do_not_fit_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    ingested(tmp_path, write(tmp_path / "raw", some()))
    for choices, message in (
        ({"time": "calendar-month"}, "--keep-dates"),
        ({"landmark_date": "2008-01-01"}, "--keep-dates"),
        ({"preset": "original"}, "--keep-ignored"),
        ({"preset": "papr"}, "paper"),
        ({"leakage": "drop"}, "leakage is one of"),
        ({"seed": 3}, "--split-file"),
        ({"landmark": "365,30"}, "DAYS"),
    ):
        with pytest.raises(UserError, match=re.escape(message)) as caught:
            built(tmp_path, **choices)
        assert caught.value.exit_code == 2
    assert not (tmp_path / "tokens").exists()
    built(tmp_path, select=False, min_codes=1)
    with pytest.raises(UserError, match="was made with"):
        built(tmp_path, select=False, min_codes=2)


@pytest.mark.slow
def test_a_meds_folder_that_meds_accepts(tmp_path: Path) -> None:
    import meds
    import pyarrow.parquet as pq

    raw = write(tmp_path / "raw", some(80), [(f"P{i:04d}", "1950-05-17") for i in range(80)])
    ingested(tmp_path, raw, keep_dates=True)
    one = built(tmp_path, select=False, min_codes=2)
    out = one.folder / "meds"
    data = pq.read_table(out / "data" / "0.parquet")
    meds.DataSchema.validate(data)
    meds.CodeMetadataSchema.validate(pq.read_table(out / "metadata" / "codes.parquet"))
    splits = pq.read_table(out / "metadata" / "subject_splits.parquet")
    meds.SubjectSplitSchema.validate(splits)
    for label in one.class_names:
        meds.LabelSchema.validate(pq.read_table(out / "labels" / label / "0.parquet"))
    times = data.column("time").to_pylist()
    subjects = data.column("subject_id").to_pylist()
    assert all(
        a < b or (a == b and s <= t)
        for a, b, s, t in zip(subjects, subjects[1:], times, times[1:], strict=False)
    )
    again = cache.ingest(
        "pophr",
        out,
        tmp_path / "again" / "cache" / "pophr",
        options={"source": "meds", "phecode_map": (str(raw / "icd9_phecode.csv"),)},
    )
    assert again["exit_code"] == 0, "what is written is read again"
    lines = [row for row in again["reasons"] if "have no split" in row["message"]]
    assert [row["count"] for row in lines] == [80 - splits.num_rows], "of too short histories"
    back = tokens.build(
        tmp_path / "again" / "cache" / "pophr",
        out=tmp_path / "again" / "tokens" / "pophr",
        select=False,
        min_codes=2,
    )
    assert sorted(back.lengths()) == sorted(one.lengths())
    assert back.split == "official"


@pytest.mark.slow
def test_labels_of_any_name_stay_in_the_meds_folder(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", some(80))
    rows = "".join(f"P{i:04d},{i % 2},{i % 3 % 2},{i % 5 % 2}\n" for i in range(80))
    (raw / "labels.csv").write_text(f"patient_id,../../../escaped,chf/copd,chf-copd\n{rows}")
    ingested(tmp_path, raw, keep_dates=True)
    one = built(tmp_path, select=False, min_codes=1)
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("0.parquet"))
    folder = "tokens/pophr/meds"
    names = ("-..-..-escaped", "chf-copd", "chf-copd-2")
    assert written == sorted(
        [f"{folder}/data/0.parquet", *(f"{folder}/labels/{name}/0.parquet" for name in names)]
    )
    assert len(one.class_names) == len(names)


def test_labels_that_depend_on_the_kind_of_claim_survive_the_round_trip_through_meds(
    tmp_path: Path,
) -> None:
    draw = np.random.default_rng(3)
    rows = ["patient_id,date,icd9,source"]
    for i, day in enumerate(draw.integers(1, 29, 400)):
        kind = draw.choice(["inpatient", "outpatient", "physician", "emergency"])
        rows.append(
            f"P{i % 60:02d},2010-{1 + i // 100:02d}-{day:02d},{draw.choice(['250.00', '428.0', '401.9'], p=[0.2, 0.1, 0.7])},{kind}"
        )
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "claims.csv").write_text("\n".join(rows) + "\n")
    (raw / "patients.csv").write_text(
        "patient_id,birth_date\n" + "".join(f"P{i:02d},1940-05-17\n" for i in range(60))
    )
    (raw / "icd9_phecode.csv").write_text("icd9,phecode\n250.00,250.2\n428.0,428\n401.9,401.1\n")
    ingested(tmp_path, raw, keep_dates=True)
    out = built(tmp_path, select=False, min_codes=1).folder / "meds"
    options = {
        "source": "meds",
        "phecode_map": (str(raw / "icd9_phecode.csv"),),
        "keep_ids": str(tmp_path / "ids.csv"),
    }
    cache.ingest(
        "pophr", out, tmp_path / "again" / "cache" / "pophr", keep_dates=True, options=options
    )
    ids = dict(pl.read_csv(tmp_path / "ids.csv").select("new", "subject_id").iter_rows())
    before = cache.open_cache(tmp_path / "cache" / "pophr").labels()
    after = (
        cache.open_cache(tmp_path / "again" / "cache" / "pophr")
        .labels()
        .with_columns(pl.col("subject_id").replace_strict(ids))
    )
    assert after.sort("subject_id", "name").equals(before.sort("subject_id", "name"))
    assert set(before.filter(pl.col("name") == "diabetes")["value"]) == {0, 1}
    kinds = pl.read_parquet(out / "data" / "0.parquet")["visit_kind"].drop_nulls()
    assert set(kinds) == {"inpatient", "outpatient", "physician", "emergency"}


def test_phecodes_of_the_other_sex_are_left_out(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    people = {"m": "1", "f": "2", "u": ""}
    codes = ["185", "617.9", "401.9"]
    (raw / "claims.csv").write_text(
        "patient_id,date,icd9\n"
        + "".join(f"{who},2010-01-0{i + 1},{c}\n" for who in people for i, c in enumerate(codes))
    )
    (raw / "patients.csv").write_text(
        "patient_id,birth_date,sex\n"
        + "".join(f"{who},1940-05-17,{sex}\n" for who, sex in people.items())
    )
    rows = [("185", "185", "Male"), ("617.9", "615", "Female"), ("401.9", "401.1", "Both")]
    path = tmp_path / "map.csv"
    path.write_text(
        "phecode,ICD,flag,exclude_range,sex,phecode_unrolled\n"
        + "".join(f"{p},{c},9,,{sex},{p}\n" for c, p, sex in rows)
    )
    options = {
        "phecode_map": (str(path),),
        "sex_restrictions": True,
        "keep_ids": str(tmp_path / "ids.csv"),
        "rules": "none",
    }
    report = ingested(tmp_path / "w", raw, **options)
    assert any("other sex" in reason["message"] for reason in report["reasons"])
    ids = dict(pl.read_csv(tmp_path / "ids.csv").select("new", "subject_id").iter_rows())
    found: dict[str, list[str]] = {}
    for frame in cache.open_cache(tmp_path / "w" / "cache" / "pophr").events():
        for who, phecodes in frame.sort("time").select("subject_id", "phecodes").iter_rows():
            found.setdefault(ids[who], []).extend(phecodes)
    assert found == {"m": ["185", "401.1"], "f": ["615", "401.1"], "u": ["185", "615", "401.1"]}
    (tmp_path / "split.csv").write_text("subject_id,split\n0,train\n1,train\n2,train\n")
    built(tmp_path / "w", min_codes=1, select=False, split_file=str(tmp_path / "split.csv"))
    folder = tmp_path / "w" / "tokens" / "pophr"
    names = dict(
        pl.read_parquet(folder / next(folder.glob("vocab*.parquet")))
        .select("id", "code")
        .iter_rows()
    )
    sequences = pl.read_parquet(folder / "sequences-*.parquet").select("subject_id", "codes")
    read = {ids[who]: [names[i] for i in row] for who, row in sequences.iter_rows()}
    assert read == {"m": ["185", "401"], "f": ["615", "401"], "u": ["185", "615", "401"]}
    path.write_text("icd9,phecode\n401.9,401.1\n")
    with pytest.raises(UserError, match="states no sexes"):
        ingested(tmp_path / "other", raw, **options)


@pytest.mark.slow
def test_synthetic_claims_are_made_once(tmp_path: Path) -> None:
    options = {"subjects": 300, "seed": 5}
    first = workflows.ingest(
        "synthetic-claims",
        None,
        tmp_path / "cache" / "synthetic-claims",
        options=options,
        build={"select": False},
    )
    again = workflows.ingest(
        "synthetic-claims",
        None,
        tmp_path / "cache" / "synthetic-claims",
        options=options,
        build={"select": False},
    )
    assert again["generation"] == first["generation"] == 1
    assert not (tmp_path / "cache" / "synthetic-claims" / ".raw").exists()
    one = tokens.open_tokens(tmp_path / "tokens" / "synthetic-claims")
    assert set(one.class_names) == {"chf", "copd", "diabetes", "tempo"}
    assert (one.arrays()["end"] >= one.arrays()["times"].max(1) - 1e-4).all()
    assert "timelines" not in (one.folder / "report.html").read_text(), (
        "single subjects are drawn on demand only"
    )
    drawn = built(
        tmp_path, "drawn", data="synthetic-claims", select=False, individual_timelines=True
    )
    assert drawn.options.individual_timelines
    assert "timelines" in (drawn.folder / "report.html").read_text()
    assert (
        "Status of the units"
        in (tmp_path / "cache" / "synthetic-claims" / "report.html").read_text()
    )


# --- bad inputs


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    require_sample(BAD_INPUTS / "make_bad_inputs.py")
    out = tmp_path_factory.mktemp("bad")
    subprocess.run(
        [sys.executable, BAD_INPUTS / "make_bad_inputs.py", out, "--only", "CL"],
        check=True,
        capture_output=True,
    )
    return out, [
        case
        for case in json.loads((out / "manifest.json").read_bytes())
        if case["id"].startswith("CL")
    ]


EXITS = {"accept": {0}, "accept_warn": {0}, "quarantine": {3, 4}, "fail": {2, 4}}


@pytest.mark.long
def test_every_bad_input_behaves_as_its_manifest_says(
    bad: tuple[Path, list[dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bitimely_cli.main import main

    folder, cases = bad
    content = {}
    for case in cases:
        home = tmp_path / case["id"]
        before = {
            p: p.read_bytes() for p in (folder / case["command"]["dir"]).rglob("*") if p.is_file()
        }
        code = main(
            [
                part.format(dir=folder / case["command"]["dir"], workspace=home)
                for part in case["command"]["argv"]
            ]
        )
        out, err = capsys.readouterr()
        verdicts = [case["expect"], *case["alt"]]
        assert code in case["exits"] or any(code in EXITS[v] for v in verdicts), (
            case["id"],
            code,
            err,
        )
        assert "Traceback" not in err
        assert not any(text in out + err for text in case["forbid"]), case["id"]
        report = json.loads((home / "cache" / "pophr" / "ingest_report.json").read_bytes())
        assert report["exit_code"] == code
        wanted = {case["reason"], *case["reason_alt"]}
        assert case["reason"] == "-" or wanted & set(report["reason_counts"]), (
            case["id"],
            report["reason_counts"],
        )
        assert all(
            row["seen"] == row["used"] + row["dropped"] + row["quarantined"]
            for row in report["rows"]
        ), case["id"]
        assert code in (0, 3) or not (home / "cache" / "pophr" / "manifest.json").exists()
        assert before == {p: p.read_bytes() for p in before}, "the source is left as it is"
        if case["reason"] != "-":
            assert any(name in err or name in json.dumps(report) for name in case["names"]), case[
                "id"
            ]
        content[case["id"][:4]] = report["content_sha256"]
    assert content["CL00"] == content["CL01"] == content["CL11"], (
        "spelling and order of rows mean nothing"
    )
    assert content["CL00"] == content["CL03"]


@pytest.mark.slow
def test_a_named_subject_stays_out_of_every_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bitimely_cli.main import main

    raw = write(
        tmp_path / "raw",
        [("SECRET-PERSON", "2009-13-45", "428.0"), ("SECRET-PERSON", "2009-01-05", "xx"), *some()],
    )
    assert (
        main(
            [
                "ingest",
                "pophr",
                str(raw),
                "--default-source",
                "physician",
                "--no-select",
                "--min-codes",
                "1",
                "-w",
                str(tmp_path / "w"),
            ]
        )
        == 3
    )
    out, err = capsys.readouterr()
    assert "SECRET" not in out + err
    report = (tmp_path / "w" / "cache" / "pophr" / "ingest_report.json").read_text()
    assert "SECRET" not in report
    table, _ = json.loads(report)["units"]
    assert [reason["code"] for reason in table["reasons"]] == [
        "bad_code",
        "date",
        "unmapped_code",
    ], "reasons of a table are sorted"
    assert "SECRET" not in (tmp_path / "w" / "tokens" / "pophr" / "report.html").read_text()
    assert manifests.read_manifest(tmp_path / "w" / "cache" / "pophr")["kind"] == "events"


def test_shards_grow_smaller_as_the_table_of_subjects_grows() -> None:
    mib = 1 << 20
    assert [ingest_claims.count_shards(size * mib) for size in (0, 1, 48, 49, 384)] == [
        1,
        1,
        1,
        2,
        8,
    ]
    assert 130 < ingest_claims.count_shards(3800 * mib) < 160  # 100 million rows
    sizes = [48 * mib * k for k in range(1, 2000, 7)]
    counts = [ingest_claims.count_shards(size) for size in sizes]
    assert counts == sorted(counts)
    assert all(size / count <= 48 * mib for size, count in zip(sizes, counts, strict=True))
    assert sizes[-1] / counts[-1] > 11.9 * mib  # a quarter, whatever comes
