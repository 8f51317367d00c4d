"""PhysioNet 2012: stays with their own times, on a grid, in archives and folders; oddities with
counts; the complete sets against pandas.
"""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from samples import SAMPLES, require_sample

from bitimely_cli.main import main
from bitimely_core import data, models, tokens
from bitimely_core.cache import ingest, open_cache
from bitimely_core.datasets.physionet_2012 import CHANNELS, VARIABLES
from bitimely_core.errors import UserError
from bitimely_core.workflows.predict import from_pretrained

DATA = SAMPLES / "complete" / "physionet2012"
NAMES = ["HR", "Temp", "GCS", "Urine", "pH", "Weight", "MechVent", "NIMAP"]


def make_stay(number: int, rows: int = 30) -> list[str]:
    rng = np.random.default_rng(number)
    lines = [
        f"00:00,RecordID,{number}",
        f"00:00,Age,{20 + number % 60}",
        f"00:00,Gender,{number % 2}",
        "00:00,Height,-1",
    ]
    lines += [f"00:00,ICUType,{1 + number % 4}", f"00:00,Weight,{60 + number % 30}.5"]
    fixed = {"Temp": 37, "pH": 7.25, "MechVent": 1}
    for minute in sorted(rng.choice(2880, rows, replace=False).tolist()):
        lines += [
            f"{minute // 60:02d}:{minute % 60:02d},{name},{fixed.get(name) or rng.integers(*((3, 16) if name == 'GCS' else (20, 99)))}"
            for name in NAMES
            if rng.random() < 0.4
        ]
    return lines


def write_set(
    folder: Path, letter: str, stays: dict[int, list[str]], *, packed: bool, outcomes: bool = True
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        f"set-{letter}/{number}.txt": "\n".join(["Time,Parameter,Value", *lines]) + "\n"
        for number, lines in stays.items()
    }
    if packed:
        with tarfile.open(folder / f"set-{letter}.tar.gz", "w:gz") as archive:
            for name, text in texts.items():
                info = tarfile.TarInfo(name)
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text.encode()))
    else:
        (folder / f"set-{letter}").mkdir()
        for name, text in texts.items():
            (folder / name).write_text(text)
    if outcomes:
        rows = [f"{number},{number % 30},7,{number % 9},-1,{number % 3 == 0:d}" for number in stays]
        header = "RecordID,SAPS-I,SOFA,Length_of_stay,Survival,In-hospital_death"
        (folder / f"Outcomes-{letter}.txt").write_text("\n".join([header, *rows]) + "\n")


def read_by_pandas(lines: list[str]) -> pd.DataFrame:
    """Minutes x variables, the last value of a time, of urine the sum; without descriptors."""
    table = pd.DataFrame([line.split(",") for line in lines], columns=["time", "name", "value"])
    table["minute"] = [60 * int(t[:2]) + int(t[3:]) for t in table["time"]]
    table["value"] = table["value"].astype(float)
    cells = table[table["name"].isin(VARIABLES)].groupby(["minute", "name"])["value"]
    values = cells.last().unstack()
    if "Urine" in values:
        values["Urine"] = cells.sum().unstack()["Urine"]
    return values


STAYS = {132539 + i: make_stay(132539 + i) for i in range(40)}


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("p12")
    write_set(home / "raw", "a", STAYS, packed=True)
    report = ingest("physionet-2012", home / "raw", home / "cache")
    assert (report["exit_code"], [unit["unit"] for unit in report["units"]]) == (0, ["set-a"])
    assert {(row["kind"], row["seen"], row["used"]) for row in report["rows"]} == {
        ("stays", 40, 40),
        ("outcomes", 40, 40),
    }
    return home


def test_windows_keep_the_times_of_observations(cached: Path) -> None:
    windows = tokens.build(
        cached / "cache", view="mortality", out=cached / "irregular", normalise="none"
    )
    assert (len(windows), windows.channels, windows.length) == (40, 44, 216)
    assert windows.channel_names == CHANNELS
    batch = data.collate(windows)
    assert batch.times is not None
    assert batch.mask is not None
    assert batch.target is not None
    for row, name in enumerate(windows.index["recording_id"]):
        expected = read_by_pandas(STAYS[int(name)])
        n = int(batch.mask[row].any(-1).sum())
        assert n == len(expected)
        np.testing.assert_allclose(
            batch.times[row, :n].numpy() * 800 / 60, expected.index, rtol=1e-6
        )
        assert not batch.mask[row, n:].any()
        for channel, variable in enumerate(CHANNELS):
            seen = batch.mask[row, :, channel].numpy()
            if variable in expected:
                known = expected[variable].dropna()
                np.testing.assert_allclose(batch.values[row, seen, channel], known, rtol=1e-6)
                np.testing.assert_allclose(
                    batch.times[row, seen].numpy() * 800 / 60, known.index, rtol=1e-6
                )
            elif variable in VARIABLES or variable == "Height":
                assert not seen.any()
        statics = batch.values[row, 0, CHANNELS.index("Age") :].tolist()
        number = int(name)
        assert statics == [
            20 + number % 60,
            number % 2,
            0,
            *(float(kind == 1 + number % 4) for kind in range(1, 5)),
        ]
        assert batch.target[row] == (number % 3 == 0)


def test_times_behind_the_window_are_counted(tmp_path: Path) -> None:
    """A stay of 230 times in a window of 216; on a grid of 24 hours, times of the second day."""
    stays = {number: make_stay(number, 30) for number in range(1, 21)} | {
        21: [f"{i // 6:02d}:{i % 6}0,HR,80" for i in range(230)]
    }
    write_set(tmp_path / "raw", "a", stays, packed=False)
    ingest("physionet-2012", tmp_path / "raw", tmp_path / "cache")
    windows = tokens.build(tmp_path / "cache", view="mortality", out=tmp_path / "irregular")
    (found,) = (one for one in windows.manifest.findings if one.code == "length")
    assert (found.level, found.count) == ("warning", 14)
    assert "14 times of irregular recordings behind their windows were left out" in found.message
    assert not [
        one
        for one in tokens.build(
            tmp_path / "cache", view="grid", out=tmp_path / "grid"
        ).manifest.findings
        if one.code == "length"
    ]
    day = tokens.build(tmp_path / "cache", view="grid", out=tmp_path / "day", window=24)
    records = open_cache(tmp_path / "cache").records(["time"])
    beyond = sum(int((record.signals[0].samples > 86400).sum()) for record in records)
    assert [one.count for one in day.manifest.findings if one.code == "length"] == [beyond]


def test_a_grid_holds_the_means_of_the_hours(cached: Path) -> None:
    windows = tokens.build(
        cached / "cache", view="mortality-grid", out=cached / "grid", normalise="none"
    )
    assert (windows.channels, windows.length) == (44, 48)
    values, mask = windows.read()
    assert mask is not None
    for row, name in enumerate(windows.index["recording_id"]):
        table = read_by_pandas(STAYS[int(name)])
        hours = table.groupby(np.minimum(table.index // 60, 47)).mean().reindex(range(48))
        for variable in table:
            at = CHANNELS.index(variable)
            np.testing.assert_allclose(
                np.where(mask[row, :, at], values[row, :, at], np.nan), hours[variable], rtol=1e-6
            )
    fine = tokens.build(
        cached / "cache", view="grid", out=cached / "fine", rate=1 / 1800, window=96
    )
    assert (fine.length, len(fine)) == (96, 40)
    with pytest.raises(UserError) as caught:
        tokens.build(cached / "cache", view="", out=cached / "none", rate=1 / 1800)
    assert caught.value.exit_code == 2


def test_statistics_leave_the_times_alone(cached: Path) -> None:
    windows = tokens.build(cached / "cache", out=cached / "scaled")
    plain = tokens.build(cached / "cache", out=cached / "plain", normalise="none")
    scaled, raw = data.collate(windows["train"]), data.collate(plain["train"])
    assert torch.equal(scaled.times, raw.times)
    at = CHANNELS.index("HR")
    seen = scaled.mask[:, :, at]
    assert abs(float(scaled.values[:, :, at][seen].mean())) < 1e-4
    assert abs(float(scaled.values[:, :, at][seen].std()) - 1) < 1e-2


@pytest.mark.parametrize("name", ["gru-d", "mtand", "mtand-enc", "raindrop", "seft"])
def test_models_of_irregular_times_read_the_times(cached: Path, name: str) -> None:
    windows = tokens.build(cached / "cache", view="mortality", out=cached / "irregular-scaled")
    torch.manual_seed(0)
    model = models.build(
        name, preset="tiny", channels=windows.channels, length=windows.length
    ).eval()
    batch = data.collate(windows, np.arange(4))
    vectors = model(batch).pooled
    later = model(batch._replace(times=batch.times * torch.linspace(0.2, 1, 216))).pooled
    assert vectors.isfinite().all()
    assert not torch.allclose(vectors, later, atol=1e-6)
    # rows behind the last observation change nothing
    n = 1 + int(batch.mask.any(-1).nonzero()[:, 1].max())
    short = batch._replace(
        values=batch.values[:, :n], times=batch.times[:, :n], mask=batch.mask[:, :n]
    )
    torch.testing.assert_close(model(short).pooled, vectors, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "view"),
    [
        ("gru-d", "mortality"),
        pytest.param("mtand", "mortality", marks=pytest.mark.slow),
        pytest.param("bitimelygpt", "mortality-grid", marks=pytest.mark.slow),
    ],
)
def test_new_stays_are_predicted_as_they_are_scored(
    tmp_path: Path, cached: Path, model: str, view: str
) -> None:
    """From the cache and, for one stay, from a table of its observations: the probabilities of
    `evaluate`.
    """
    shutil.copytree(cached / "cache", tmp_path / "cache" / "physionet-2012")
    name, common = f"physionet-2012/{view}", ["-w", str(tmp_path)]
    first = [
        "pretrain",
        "--preset",
        "tiny",
        "--model",
        model,
        "--data",
        name,
        "--run",
        "p",
        "--steps",
        "2",
        "--batch-size",
        "8",
    ]
    assert main([*first, *common]) == 0
    assert (
        main(
            [
                "finetune",
                "p",
                "--data",
                name,
                "--run",
                "f",
                "--steps",
                "2",
                "--batch-size",
                "8",
                *common,
            ]
        )
        == 0
    )
    assert main(["evaluate", "f", *common]) == 0
    notices = json.loads((tmp_path / "runs" / "f" / "scores.json").read_text())["notices"]
    assert any("the unit is the stay" in notice for notice in notices)
    scored = pl.read_parquet(tmp_path / "runs" / "f" / "predictions.parquet")
    found = from_pretrained("f", workspace=tmp_path).predict(tmp_path / "cache" / "physionet-2012")
    assert len(found) == len(STAYS)
    both = scored.join(found, on="recording_id", suffix="_new")
    assert len(both) == len(scored) > 0
    np.testing.assert_allclose(both["p_died_new"], both["p_died"], atol=1e-6)

    stay = both["recording_id"][0]
    record = next(iter(open_cache(tmp_path / "cache" / "physionet-2012").records(only=[stay])))
    columns = {
        signal.channel: signal.samples.astype(float) * signal.scale + signal.offset
        for signal in record.signals
    }
    table = tmp_path / "stay.csv"
    pd.DataFrame(columns).to_csv(table, index=False)
    assert main(["predict", "f", str(table), "--out", str(tmp_path / "one"), *common]) == 0
    [row] = pl.read_parquet(tmp_path / "one" / "predictions.parquet").to_dicts()
    assert row["p_died"] == pytest.approx(both["p_died"][0], abs=1e-6)
    table.write_text(pd.DataFrame({**columns, "time": -1 - columns["time"]}).to_csv(index=False))
    assert main(["predict", "f", str(table), "--out", str(tmp_path / "two"), *common]) == 4


def test_a_model_that_reads_no_times_is_refused(
    tmp_path: Path, cached: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(cached / "cache", tmp_path / "cache" / "physionet-2012")
    assert (
        main(
            [
                "pretrain",
                "--preset",
                "tiny",
                "--data",
                "physionet-2012/mortality",
                "--run",
                "p",
                "-w",
                str(tmp_path),
            ]
        )
        == 2
    )
    assert "irregular times, which bitimelygpt does not read" in capsys.readouterr().err


def test_archive_and_folder_have_one_content_hash(tmp_path: Path, cached: Path) -> None:
    write_set(tmp_path / "raw", "a", STAYS, packed=False)
    report = ingest("physionet-2012", tmp_path / "raw", tmp_path / "cache")
    assert report["content_sha256"] == open_cache(cached / "cache").manifest.content_sha256


def pack_folder(folder: Path, letter: str) -> None:
    """A zip archive of a set beside its folder."""
    with zipfile.ZipFile(folder / f"set-{letter}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted((folder / f"set-{letter}").iterdir()):
            archive.write(path, f"set-{letter}/{path.name}")


@pytest.mark.slow
def test_of_several_forms_of_a_set_one_is_read_and_the_others_are_named(
    tmp_path: Path, cached: Path
) -> None:
    """As PhysioNet publishes them: set-a.tar.gz beside set-a.zip, and either may be unpacked beside
    them.
    """
    raw = tmp_path / "raw"
    write_set(raw, "a", STAYS, packed=True)
    write_set(raw, "a", STAYS, packed=False)
    pack_folder(raw, "a")
    for used, unread in (
        ("set-a", ["set-a.tar.gz", "set-a.zip"]),
        ("set-a.tar.gz", ["set-a.zip"]),
        ("set-a.zip", []),
    ):
        report = ingest("physionet-2012", raw, tmp_path / f"cache-{used}")
        assert (report["exit_code"], report["content_sha256"]) == (
            0,
            open_cache(cached / "cache").manifest.content_sha256,
        )
        assert [row["file"] for row in report["rows"] if row["kind"] == "stays"] == [used]
        assert [(reason["code"], reason["file"]) for reason in report["reasons"]] == [
            ("duplicates", name) for name in unread
        ]
        assert all(f"read from '{used}'" in reason["message"] for reason in report["reasons"])
        if (raw / used).is_dir():
            shutil.rmtree(raw / used)
        else:
            (raw / used).unlink()


def test_two_copies_of_one_form_are_refused_with_what_to_do(tmp_path: Path) -> None:
    for name in ("x", "y"):
        write_set(tmp_path / "folders" / name, "a", {1: make_stay(1)}, packed=False, outcomes=False)
        write_set(tmp_path / "archives" / name, "a", {1: make_stay(1)}, packed=True, outcomes=False)
        (tmp_path / "tables" / name).mkdir(parents=True)
        (tmp_path / "tables" / name / "Outcomes-a.txt").write_text(
            "RecordID,In-hospital_death\n1,0\n"
        )
    for kind, there in (
        ("folders", "x/set-a'"),
        ("archives", "x/set-a.tar.gz'"),
        ("tables", "x/Outcomes-a.txt'"),
    ):
        with pytest.raises(UserError) as caught:
            ingest("physionet-2012", tmp_path / kind, tmp_path / "cache")
        assert caught.value.exit_code == 2
        assert there in str(caught.value)
        assert "Remove one of them" in str(caught.value)


def test_every_file_of_a_set_is_read_or_named(tmp_path: Path) -> None:
    """An ending in capitals is read; what an archive holds besides its stays is counted."""
    raw = tmp_path / "raw"
    write_set(
        raw,
        "c",
        {number: make_stay(number, 4) for number in (1, 2, 3)},
        packed=False,
        outcomes=False,
    )
    (raw / "set-c" / "3.txt").rename(raw / "set-c" / "3.TXT")
    report = ingest("physionet-2012", raw, tmp_path / "folder")
    assert set(open_cache(tmp_path / "folder").recording_ids()) == {"1", "2", "3"}
    for name in ("4.txt.part", "notes.txt", ".DS_Store", "README.txt"):
        (raw / "set-c" / name).write_text("x")
    pack_folder(raw, "c")
    shutil.rmtree(raw / "set-c")
    report = ingest("physionet-2012", raw, tmp_path / "zip")
    assert set(open_cache(tmp_path / "zip").recording_ids()) == {"1", "2", "3"}
    (named,) = (reason for reason in report["units"][0]["reasons"] if reason["code"] == "file_name")
    assert (named["count"], named["examples"]) == (2, ["'4.txt.part'", "'notes.txt'"])


def list_stays(cache: Path) -> dict[str, object]:
    """RecordID -> death, of a cache."""
    return {one.recording_id: one.attributes.get("death") for one in open_cache(cache).records()}


@pytest.mark.parametrize("packed", [False, True])
def test_a_stay_of_two_sets_is_used_once_and_one_that_differs_not_at_all(
    tmp_path: Path, *, packed: bool
) -> None:
    raw, end = tmp_path / "raw", ".tar.gz" if packed else ""
    stays = {number: make_stay(number, 4) for number in range(1, 9)}
    write_set(
        raw, "a", {number: stays[number] for number in (1, 2, 3, 4)}, packed=packed, outcomes=False
    )
    write_set(
        raw,
        "b",
        {number: stays[number] for number in (1, 5, 6)} | {2: make_stay(2, 5)},
        packed=packed,
    )
    report = ingest("physionet-2012", raw, tmp_path / "cache")
    assert report["exit_code"] == 3
    assert list_stays(tmp_path / "cache") == {
        "1": "survived",
        "3": None,
        "4": None,
        "5": "survived",
        "6": "died",
    }  # 1 of the set with outcomes
    rows = {row["file"]: row for row in report["rows"] if row["kind"] == "stays"}
    assert {
        name: (row["seen"], row["dropped_by_reason"], row["quarantined_by_reason"])
        for name, row in rows.items()
    } == {
        f"set-a{end}": (4, {"duplicates": 1}, {"duplicate_key": 1}),
        f"set-b{end}": (4, {}, {"duplicate_key": 1}),
    }
    inner = {
        letter: f"set-{letter}{end}/set-{letter}" if packed else f"set-{letter}" for letter in "ab"
    }
    found = {reason["code"]: reason for reason in report["units"][0]["reasons"]}
    assert (
        f"'{inner['a']}/1.txt' repeats '{inner['b']}/1.txt', used once"
        in found["duplicates"]["message"]
    )
    assert found["duplicate_key"]["message"].startswith(
        f"{inner['a']}/2.txt: '{inner['b']}/2.txt' is of the same stay and differs"
    )


def test_a_set_that_repeats_another_one_adds_nothing(tmp_path: Path) -> None:
    stays = {number: make_stay(number, 4) for number in range(1, 5)}
    for letter in "ab":
        write_set(tmp_path / "raw", letter, stays, packed=letter == "a")
    report = ingest("physionet-2012", tmp_path / "raw", tmp_path / "cache")
    assert (report["exit_code"], set(list_stays(tmp_path / "cache"))) == (0, {"1", "2", "3", "4"})
    assert report["reason_counts"]["duplicates"] == 4
    table = tmp_path / "raw" / "Outcomes-b.txt"
    table.write_text(table.read_text().replace("2,2,7,2,-1,0", "2,2,7,2,-1,1"))
    report = ingest("physionet-2012", tmp_path / "raw", tmp_path / "other")
    # its two outcomes differ
    assert (report["exit_code"], set(list_stays(tmp_path / "other"))) == (3, {"1", "3", "4"})


def test_a_stay_that_an_archive_holds_twice_is_judged_alone(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    write_set(
        raw,
        "c",
        {number: make_stay(number, 4) for number in range(1, 6)},
        packed=False,
        outcomes=False,
    )
    with zipfile.ZipFile(raw / "set-c.zip", "w") as archive:
        for number in range(1, 6):
            archive.write(raw / "set-c" / f"{number}.txt", f"set-c/{number}.txt")
        archive.write(raw / "set-c" / "1.txt", "old/1.txt")
        archive.writestr("old/2.txt", "Time,Parameter,Value\n00:00,HR,80\n")
    shutil.rmtree(raw / "set-c")
    report = ingest("physionet-2012", raw, tmp_path / "cache")
    assert (report["exit_code"], set(list_stays(tmp_path / "cache"))) == (3, {"1", "3", "4", "5"})
    (row,) = report["rows"]
    assert (row["seen"], row["dropped_by_reason"], row["quarantined_by_reason"]) == (
        7,
        {"duplicates": 1},
        {"duplicate_key": 2},
    )


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("01:00,HR", "row_width"),
        ("01:60,HR,80", "timestamps"),
        ("48:01,HR,80", "timestamps"),
        ("-1:00,HR,80", "timestamps"),
        ("01:00,HR,x", "not_numeric"),
        ("01:00,HR,", "missing_values"),
        ("01:00,HR,inf", "non_finite"),
        ("00:00,RecordID,1", "identifier"),
        ("01:00,HR,\udcff", "encoding"),
    ],
)
def test_a_damaged_stay_is_counted_and_the_others_land(
    tmp_path: Path, line: str, code: str
) -> None:
    write_set(
        tmp_path / "raw", "b", {number: make_stay(number, 4) for number in (1, 2, 3)}, packed=False
    )
    path = tmp_path / "raw" / "set-b" / "2.txt"
    path.write_bytes(path.read_bytes() + f"{line}\n".encode(errors="surrogateescape"))
    report = ingest("physionet-2012", tmp_path / "raw", tmp_path / "cache")
    (stays,) = (row for row in report["rows"] if row["kind"] == "stays")
    assert (report["exit_code"], stays["used"], stays["quarantined_by_reason"]) == (3, 2, {code: 1})
    assert set(open_cache(tmp_path / "cache").recording_ids()) == {"1", "3"}


def test_what_is_odd_is_reported_with_counts(tmp_path: Path) -> None:
    stays = {number: make_stay(number, 6) for number in range(1, 7)}
    stays[1] += ["47:59,pH,735", "48:00,Temp,-17.8", "48:00,Shoe,43"]
    stays[2] = stays[2][:6]
    stays[3] += ["48:00,HR,80", "48:00,HR,90"]
    stays[4] += ["48:00,Urine,120", "48:00,Urine,35.5", "48:00,Urine,0"]
    write_set(tmp_path / "raw", "a", stays, packed=True)
    outcomes = (tmp_path / "raw" / "Outcomes-a.txt").read_text().splitlines()
    outcomes[4] = "99,1,1,1,-1,0"
    outcomes[5] = outcomes[5][:-1] + "2"
    (tmp_path / "raw" / "Outcomes-a.txt").write_text("\n".join(outcomes) + "\n")
    report = ingest("physionet-2012", tmp_path / "raw", tmp_path / "cache")
    (unit,) = report["units"]
    found = {(reason["code"], reason["field"]): reason["count"] for reason in unit["reasons"]}
    assert found[("missing_values", "Height")] == 6
    assert (found[("physical_range", "pH")], found[("physical_range", "Temp")]) == (1, 1)
    assert (found[("unknown_label", None)], found[("missing_values", None)]) == (1, 1)
    repeated = [reason["count"] for reason in unit["reasons"] if reason["code"] == "duplicates"]
    assert repeated == [1, 2]
    assert (
        sum(reason["count"] for reason in unit["reasons"] if reason["code"] == "unmatched_labels")
        == 3
    )
    records = {one.recording_id: one for one in open_cache(tmp_path / "cache").records()}
    rates = next(s.samples for s in records["3"].signals if s.channel == "HR")
    assert rates[-1] == 90
    volumes = next(s.samples for s in records["4"].signals if s.channel == "Urine")
    assert volumes[-1] == 155.5
    assert [one.attributes for one in records.values()].count({}) == 2
    later = {"SAPS-I", "SOFA", "Length_of_stay", "Survival"}
    assert not any(
        later & {s.channel for s in one.signals} or later & set(one.attributes)
        for one in records.values()
    )


@pytest.mark.parametrize(
    ("variable", "wrong", "right"),
    [
        ("HR", ("-1", "8000"), "0"),
        ("SysABP", ("-1",), "0"),
        ("SaO2", ("-1", "250"), "100"),
        ("FiO2", ("40",), "0.4"),
        ("GCS", ("2", "16"), "3"),
        ("Urine", ("-50",), "19990"),
        ("Glucose", ("-0.5",), "8"),
        ("Age", ("400",), "90"),
        ("Gender", ("7", "0.5", "-2"), "1"),
        ("ICUType", ("0", "5"), "4"),
    ],
)
def test_values_that_cannot_be_are_missing_and_counted(
    tmp_path: Path, variable: str, wrong: tuple[str, ...], right: str
) -> None:
    """Each in a stay of its own, beside one with a value that can be."""
    stays = {
        i: ["00:00,Weight,80", f"01:00,{variable},{value}"]
        for i, value in enumerate([*wrong, right], 1)
    }
    write_set(tmp_path / "raw", "a", stays, packed=False, outcomes=False)
    report = ingest("physionet-2012", tmp_path / "raw", tmp_path / "cache")
    (reason,) = (
        reason for reason in report["units"][0]["reasons"] if reason["code"] == "physical_range"
    )
    assert (reason["field"], reason["count"]) == (variable, len(wrong))
    channel = "ICUType 4" if variable == "ICUType" else variable
    for record in open_cache(tmp_path / "cache").records([channel]):
        (signal,) = record.signals
        assert np.isfinite(signal.samples).any() == (record.recording_id == str(len(stays)))


def test_fractions_in_percent_rows_out_of_order_and_cut_files_are_counted(tmp_path: Path) -> None:
    lines = {
        1: ["05:00,FiO2,40", "01:00,FiO2,100", "03:00,FiO2,0.5"],
        2: ["01:00,FiO2,1"],
        3: ["01:00,FiO2,35", "02:00,FiO2,7"],
    }
    write_set(
        tmp_path / "raw",
        "a",
        {number: ["00:00,Weight,80", *rows] for number, rows in lines.items()},
        packed=False,
        outcomes=False,
    )
    cut = tmp_path / "raw" / "set-a" / "2.txt"
    cut.write_text(cut.read_text() + "02:00,HR,8")  # of 85
    report = ingest("physionet-2012", tmp_path / "raw", tmp_path / "cache")
    found = {reason["code"]: reason for reason in report["units"][0]["reasons"]}
    assert (report["exit_code"], found["unit"]["field"], found["unit"]["count"]) == (0, "FiO2", 3)
    assert (
        "in 2 stays, expected fractions: they are missing. Divide them by 100"
        in found["unit"]["message"]
    )
    assert (
        found["physical_range"]["count"],
        found["timestamps"]["count"],
        found["truncated"]["count"],
    ) == (4, 1, 1)
    for record in open_cache(tmp_path / "cache").records(["FiO2", "time"]):
        values = {signal.channel: signal.samples for signal in record.signals}
        assert (np.diff(values["time"]) > 0).all()
        known = [
            (row.split(",")[0], float(row.split(",")[2]))
            for row in lines[int(record.recording_id)]
            if float(row.split(",")[2]) <= 1
        ]
        seen = np.isfinite(values["FiO2"])
        assert [
            (f"{int(time) // 3600:02d}:00", value)
            for time, value in zip(values["time"][seen], values["FiO2"][seen], strict=True)
        ] == known


def test_outcomes_that_a_spreadsheet_saved_again_are_read(tmp_path: Path) -> None:
    """Whole numbers as 1.0, another ending, and an underscore in the names; a RecordID that is
    none, or there in two spellings, is a faulty row.
    """
    stays = {number: make_stay(number, 4) for number in range(1, 7)}
    write_set(tmp_path / "raw", "a", stays, packed=False)
    raw = tmp_path / "raw"
    (raw / "set-a").rename(raw / "set_a")
    table = pd.read_csv(raw / "Outcomes-a.txt")
    plain = {
        str(number): ("survived", "died")[death]
        for number, death in zip(table["RecordID"], table["In-hospital_death"], strict=True)
    }
    (raw / "Outcomes-a.txt").unlink()
    table.astype(float).to_csv(raw / "outcomes_a.csv", index=False)
    text = (raw / "outcomes_a.csv").read_text()
    (raw / "outcomes_a.csv").write_text(text.replace("\n6.0,", "\n6.5,") + "5,1,7,1,-1,1\n")
    report = ingest("physionet-2012", raw, tmp_path / "cache")
    (rows,) = (row for row in report["rows"] if row["kind"] == "outcomes")
    assert (report["exit_code"], rows["used"], rows["quarantined_by_reason"]) == (
        3,
        5,
        {"identifier": 1, "duplicate_key": 1},
    )
    found = {
        record.recording_id: record.attributes.get("death")
        for record in open_cache(tmp_path / "cache").records()
    }
    assert found == plain | {"5": None, "6": None}


@pytest.mark.long
def test_the_complete_sets(tmp_path: Path) -> None:
    require_sample(DATA)
    report = ingest("physionet-2012", DATA, tmp_path / "cache")
    assert report["exit_code"] == 0
    assert (
        sorted((row["kind"], row["used"]) for row in report["rows"])
        == [("outcomes", 4000)] * 2 + [("stays", 4000)] * 2
    )
    windows = tokens.build(
        tmp_path / "cache", view="mortality", out=tmp_path / "t", normalise="none"
    )
    assert len(windows) == 8000
    outcomes = pd.concat(
        pd.read_csv(DATA / f"Outcomes-{letter}.txt", index_col="RecordID") for letter in "ab"
    )
    died = np.asarray(windows.targets(None))
    assert died.tolist() == [
        outcomes.loc[int(name), "In-hospital_death"] for name in windows.index["recording_id"]
    ]
    row_of = {name: row for row, name in enumerate(windows.index["recording_id"])}
    with tarfile.open(DATA / "set-b.tar.gz") as archive:
        for member in [one for one in archive.getmembers() if one.isfile()][:4000:400]:
            file = archive.extractfile(member)
            assert file is not None
            table = read_by_pandas(file.read().decode().splitlines()[1:])
            values, mask = windows.read([row_of[Path(member.name).stem]])
            assert mask is not None
            for variable in {"HR", "GCS", "Urine", "BUN"} & set(table):
                at = CHANNELS.index(variable)
                np.testing.assert_allclose(
                    values[0, mask[0, :, at], at], table[variable].dropna(), rtol=1e-6
                )
