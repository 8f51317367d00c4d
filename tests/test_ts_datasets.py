"""Data sets in .ts files and their other forms: ts, ppg-dalia, ieee-ppg, bidmc; the bad inputs one
by one; the real samples.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from samples import BAD_INPUTS, SAMPLES, require_sample

from bitimely_core import tokens
from bitimely_core.cache import ingest, open_cache
from bitimely_core.datasets import bidmc, ppg_dalia, tser
from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.formats import ts
from bitimely_core.formats.source import scan_folder
from bitimely_core.store import manifests
from bitimely_core.types import Record, Records


def attempt(dataset: str, source: Path, out: Path, **options: Any) -> dict[str, Any]:
    """The ingest report, of a refusal too."""
    try:
        return ingest(dataset, source, out, **options)
    except UserError as error:
        report = error.report or {
            "exit_code": int(error.exit_code),
            "reason_counts": {str(error.code): 1},
            "units": [],
            "rows": [],
            "reasons": [],
        }
        return report | {"message": str(error)}


def codes(report: dict[str, Any]) -> set[str]:
    return set(report["reason_counts"])


# --- the bad inputs


def cases() -> list[str]:
    script = BAD_INPUTS / "make_bad_inputs.py"
    return (
        sorted(re.findall(r'"(TS\d\d-[\w-]+|SE0[1235678]-[\w-]+)"', script.read_text()))
        if script.is_file()
        else []
    )


@pytest.fixture(scope="session")
def bad_inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    script = require_sample(BAD_INPUTS / "make_bad_inputs.py")
    out = tmp_path_factory.mktemp("bad_inputs")
    command = [sys.executable, str(script), str(out), "--only", "TS|SE0[1235678]"]
    subprocess.run(command, check=True, capture_output=True)
    manifest = json.loads((out / "manifest.json").read_text())
    return {case["id"]: case | {"folder": out / case["command"]["dir"]} for case in manifest}


def test_bad_inputs_exist(bad_inputs: dict[str, dict[str, Any]]) -> None:
    assert sorted(bad_inputs) == sorted(cases())
    assert len(bad_inputs) == 20


@pytest.mark.parametrize("name", cases())
def test_bad_inputs_behave_as_their_manifest_states(
    bad_inputs: dict[str, dict[str, Any]], name: str, tmp_path: Path
) -> None:
    case = bad_inputs[name]
    argv = case["command"]["argv"]
    source = Path(argv[2].format(dir=case["folder"]))
    before = sorted(
        (p.relative_to(case["folder"]), p.stat().st_size) for p in case["folder"].rglob("*")
    )
    report = attempt(argv[1], source, tmp_path / "cache")
    verdicts = {"accept": {0}, "accept_warn": {0}, "quarantine": {3}, "fail": {4}}
    allowed = set(case["exits"]).union(*(verdicts[verdict] for verdict in case["alt"]))
    assert report["exit_code"] in allowed, report
    if case["reason"] != "-":
        assert codes(report) & {case["reason"], *case["reason_alt"]}, report["reason_counts"]
        reported = json.dumps([*report["units"], *report["reasons"], report.get("message", "")])
        assert any(file in reported for file in case["names"])
    assert (
        sorted((p.relative_to(case["folder"]), p.stat().st_size) for p in case["folder"].rglob("*"))
        == before
    )
    for rows in report["rows"]:
        assert rows["seen"] == rows["used"] + rows["dropped"] + rows["quarantined"]
    assert attempt(argv[1], source, tmp_path / "cache")["reason_counts"] == report["reason_counts"]


def test_good_cases_are_the_same_with_and_without_a_bad_one(
    bad_inputs: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    source = tmp_path / "raw"
    source.mkdir()
    for path in bad_inputs["TS06-dims-mismatch"]["folder"].iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    report = attempt("ts", source, tmp_path / "cache")
    (rows,) = [rows for rows in report["rows"] if "TRAIN" in rows["file"]]
    assert (report["exit_code"], rows["used"], rows["quarantined_by_reason"]) == (
        3,
        5,
        {"dimensions": 1},
    )
    found = {r.recording_id: r.signals[0].samples for r in open_cache(tmp_path / "cache").records()}
    raw = list(ts.read_cases(source / "PPGDalia_TRAIN.ts"))
    good = [case for case in raw if isinstance(case, ts.TsCase)]
    assert len(good) == 5
    kept = [found[name] for name in sorted(found) if "TRAIN" in name]
    for samples, case in zip(kept, good, strict=True):
        np.testing.assert_array_equal(samples, case.channels[0])


def test_a_mended_file_gives_the_cache_of_a_clean_ingest(
    bad_inputs: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    clean, raw = bad_inputs["TS00-control"]["folder"], tmp_path / "raw"
    raw.mkdir()
    for path in clean.iterdir():
        text = path.read_text()
        (raw / path.name).write_text(text if "TEST" in path.name else text.replace(":60.5", ":nan"))
    assert attempt("ts", raw, tmp_path / "a")["exit_code"] == 3
    (raw / "PPGDalia_TRAIN.ts").write_bytes((clean / "PPGDalia_TRAIN.ts").read_bytes())
    corrected, expected = (
        attempt("ts", raw, tmp_path / "a"),
        attempt("ts", clean, tmp_path / "b", jobs=2),
    )
    assert (corrected["exit_code"], corrected["content_sha256"]) == (0, expected["content_sha256"])
    shards = [
        {
            name
            for name in manifests.read_manifest(tmp_path / cache)["files"]
            if name.startswith("recordings")
        }
        for cache in "ab"
    ]
    assert shards[0] == shards[1]


# --- ts


def write_ts(
    path: Path,
    series: Sequence[Sequence[np.ndarray]],
    labels: Sequence[Any],
    *,
    classes: Sequence[str] = (),
    equal: bool | None = None,
) -> None:
    lengths = {len(x) for case in series for x in case}
    head = [
        "@problemName x",
        "@timeStamps false",
        "@missing false",
        f"@univariate {str(len(series[0]) == 1).lower()}",
    ]
    head += [
        f"@dimensions {len(series[0])}",
        f"@equalLength {str(len(lengths) == 1 if equal is None else equal).lower()}",
    ]
    head += [f"@classLabel true {' '.join(classes)}" if classes else "@targetlabel true", "@data"]
    body = [
        ":".join([",".join(f"{v:.6g}" for v in x) for x in case]) + f":{label}"
        for case, label in zip(series, labels, strict=True)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*head, *body]) + "\n")


def cut_windows(long: np.ndarray, length: int, step: int) -> list[list[np.ndarray]]:
    """Windows of a recording [V, T]."""
    return [list(long[:, at : at + length]) for at in range(0, long.shape[1] - length + 1, step)]


def splits_of(cache: Path) -> dict[str, tuple[str, str]]:
    """Recording -> (subject, split)."""
    return {
        r.recording_id: (r.subject_id, r.attributes["split"]) for r in open_cache(cache).records()
    }


@pytest.mark.parametrize("quantum", [1e-6, 0.5])  # the latter repeats values often
def test_cases_of_one_recording_are_found_in_any_order(tmp_path: Path, quantum: float) -> None:
    rng = np.random.default_rng(0)
    walks = np.round(np.cumsum(rng.standard_normal((10, 2, 600)), axis=-1) / quantum) * quantum
    windows = [(i, case) for i, walk in enumerate(walks) for case in cut_windows(walk, 128, 32)]
    rng.shuffle(windows)  # type: ignore[arg-type]
    test = [(i, case) for i, case in windows if i >= 7]
    train = [(i, case) for i, case in windows if i < 7]
    for name, part in (("TRAIN", train), ("TEST", test)):
        write_ts(
            tmp_path / "raw" / f"W_{name}.ts", [case for _, case in part], [i for i, _ in part]
        )
    report = attempt("ts", tmp_path / "raw", tmp_path / "cache")
    assert report["exit_code"] == 0
    assert not codes(report)
    found = splits_of(tmp_path / "cache")
    truth = {
        f"W_{name}-{k + 1:06d}": i
        for name, part in (("TRAIN", train), ("TEST", test))
        for k, (i, _) in enumerate(part)
    }
    pairs = {(truth[name], subject) for name, (subject, _) in found.items()}
    assert len(pairs) == 10 == len({subject for _, subject in pairs})
    assert {split for name, (_, split) in found.items() if "TEST" in name} == {"test"}
    of_train = {truth[name]: split for name, (_, split) in found.items() if "TRAIN" in name}
    assert sorted(of_train.values()) == ["train"] * 6 + ["validation"]
    made = tokens.build(tmp_path / "cache", view="regression", out=tmp_path / "tokens")
    assert (made.length, made.channels, len(made["test"])) == (128, 2, len(test))
    assert sorted(made["test"].targets(None).tolist()) == sorted(float(i) for i, _ in test)


def test_files_that_split_inside_recordings_are_split_again(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    walks = np.cumsum(rng.standard_normal((10, 1, 600)), axis=-1)
    windows = [(i, case) for i, walk in enumerate(walks) for case in cut_windows(walk, 128, 32)]
    rng.shuffle(windows)  # type: ignore[arg-type]
    for name, part in (("TRAIN", windows[:100]), ("TEST", windows[100:])):
        write_ts(
            tmp_path / "raw" / f"W_{name}.ts", [case for _, case in part], [i for i, _ in part]
        )
    report = attempt("ts", tmp_path / "raw", tmp_path / "cache")
    assert codes(report) == {"duplicate_across_splits"}
    by_subject: dict[str, set[str]] = {}
    for subject, split in splits_of(tmp_path / "cache").values():
        by_subject.setdefault(subject, set()).add(split)
    assert sorted(split for (split,) in by_subject.values()) == [
        "test",
        *["train"] * 8,
        "validation",
    ]
    # asserts that no subject stands in two splits
    tokens.build(tmp_path / "cache", out=tmp_path / "tokens")


def test_flat_and_independent_series_join_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    series = [[np.concatenate([np.zeros(100), rng.standard_normal(28)])] for _ in range(30)]
    write_ts(tmp_path / "A_TRAIN.ts", series, ["a", "b"] * 15, classes="ab")
    head = ts.read_header(tmp_path / "A_TRAIN.ts")
    ((groups,), known) = tser.group_cases([(tmp_path / "A_TRAIN.ts", head)])
    assert groups.tolist() == list(range(30))
    assert not known


def test_unequal_cases_are_filled_up_with_missing_values(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    series = [[rng.standard_normal(n), rng.standard_normal(n)] for n in (7, 12, 9, 12)]
    write_ts(tmp_path / "raw" / "U_TRAIN.ts", series[:3], "aba", classes="ab")
    write_ts(tmp_path / "raw" / "U_TEST.ts", series[3:], "b", classes="ab", equal=False)
    assert attempt("ts", tmp_path / "raw", tmp_path / "cache")["exit_code"] == 0
    made = tokens.build(
        tmp_path / "cache", view="classification", out=tmp_path / "tokens", normalise="none"
    )
    assert (len(made), made.length, list(made.class_names)) == (4, 12, ["a", "b"])
    mask = made.mask(None)
    assert mask is not None
    assert sorted(mask.sum(axis=1)[:, 0].tolist()) == [7, 9, 12, 12]
    with pytest.raises(UserError, match="no window fits"):
        tokens.build(tmp_path / "cache", view="regression", out=tmp_path / "other")


def test_a_grid_of_times() -> None:
    values = np.arange(4, dtype=np.float32)
    same, rate = tser.place_on_grid(values, np.array([0.0, 0.5, 1.0, 1.5]))
    assert same is values
    assert rate == 2.0
    filled, rate = tser.place_on_grid(values, np.array([0.0, 60.0, 120.0, 300.0]))
    np.testing.assert_array_equal(filled, [0, 1, 2, np.nan, np.nan, 3])
    assert rate == pytest.approx(1 / 60)
    with pytest.raises(UserError) as caught:
        tser.place_on_grid(values, np.array([0.0, 1.0, 2.5, 3.9]))
    assert caught.value.code == Reason.TIMESTAMPS


def test_several_problems_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("a/A_TRAIN.ts", "b/B_TRAIN.ts"):
        write_ts(tmp_path / name, [[np.ones(3)], [np.zeros(3)]], [1, 2])
    report = attempt("ts", tmp_path, tmp_path / "cache")
    assert report["exit_code"] == Exit.USAGE
    assert "a/A" in report["message"]
    assert "b/B" in report["message"]


@pytest.mark.parametrize(
    ("folder", "windows", "view"),
    [
        ("CardanoSentiment", 107, "regression"),
        ("Covid3Month", 201, "regression"),
        ("JapaneseVowels", 270, "classification"),
        ("UnitTest", None, "classification"),
    ],
)
def test_real_problems(tmp_path: Path, folder: str, windows: int | None, view: str) -> None:
    require_sample(SAMPLES / "tser" / folder)
    report = attempt("ts", SAMPLES / "tser" / folder, tmp_path / "cache")
    assert report["exit_code"] == 0
    assert all(rows["used"] == rows["seen"] for rows in report["rows"])
    made = tokens.build(tmp_path / "cache", view=view, out=tmp_path / "tokens")
    assert len(made) == (windows or sum(rows["seen"] for rows in report["rows"]))


# --- PPG-DaLiA, IEEEPPG


def dalia(subject: str, windows: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    seconds = 8 + 2 * (windows - 1)
    wrist = {
        "BVP": rng.normal(size=(seconds * 64, 1)),
        "ACC": rng.normal(size=(seconds * 32, 3)),
        "EDA": rng.normal(size=(seconds * 4, 1)),
    }
    answers = {"AGE": 31, "Gender": " f", "NAME": "Somebody"}
    return {
        "signal": {"wrist": wrist, "chest": {}},
        "label": 60 + np.arange(windows) * 1.5,
        "questionnaire": answers,
        "subject": subject,
    }


def test_both_forms_of_ppg_dalia_give_the_same_windows(tmp_path: Path) -> None:
    content = dalia("S1", 12, 0)
    (tmp_path / "pickles" / "S1").mkdir(parents=True)
    (tmp_path / "pickles" / "S1" / "S1.pkl").write_bytes(pickle.dumps(content, protocol=2))
    assert attempt("ppg-dalia", tmp_path / "pickles", tmp_path / "a")["exit_code"] == 0
    wrist = content["signal"]["wrist"]
    series = [
        [wrist["BVP"][128 * i : 128 * i + 512, 0], *wrist["ACC"][64 * i : 64 * i + 256].T]
        for i in range(12)
    ]
    write_ts(tmp_path / "ts" / "PPGDalia_TRAIN.ts", series, content["label"].tolist())
    assert attempt("ppg-dalia", tmp_path / "ts", tmp_path / "b")["exit_code"] == 0
    one, other = (
        tokens.build(tmp_path / name, out=tmp_path / f"{name}-tokens", normalise="none")
        for name in "ab"
    )
    assert list(one.channel_names) == ["PPG", "ACC x", "ACC y", "ACC z"]
    assert (one.rate, one.length, len(one), len(other)) == (32.0, 256, 12, 12)
    np.testing.assert_allclose(one.targets(None), content["label"], rtol=1e-6)
    np.testing.assert_allclose(one.values(None)[..., 1:], other.values(None)[..., 1:], atol=1e-5)
    # the filter's edges differ
    np.testing.assert_allclose(
        one.values(None)[3, 20:-20, 0], other.values(None)[3, 20:-20, 0], atol=0.05
    )
    assert len(set(other.subjects())) == 1
    (record,) = open_cache(tmp_path / "a").records()
    assert {key: record.attributes[key] for key in ("age", "sex")} == {"age": 31, "sex": "F"}
    assert b"Somebody" not in b"".join(
        path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()
    )


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"subject": "S2"}, Reason.RECORD_NAME),
        ({"label": np.arange(3.0)}, Reason.LENGTH),
        ({"label": "none"}, Reason.SCHEMA),
        ({"label": np.full(12, np.nan)}, Reason.LABEL),
        ({"signal": {"wrist": {"BVP": np.ones(5)}}}, Reason.SCHEMA),
        ({"signal": 3}, Reason.SCHEMA),
    ],
)
def test_pickles_with_another_content_are_refused(
    tmp_path: Path, change: dict[str, Any], code: Reason
) -> None:
    path = tmp_path / "S1.pkl"
    path.write_bytes(pickle.dumps(dalia("S1", 12, 0) | change, protocol=2))
    with pytest.raises(UserError) as caught:
        ppg_dalia.read_subject(path, "S1.pkl", "S1", "train")
    assert caught.value.code == code


def test_heart_rates_that_are_none_leave_their_windows_out(tmp_path: Path) -> None:
    content = dalia("S3", 10, 0)
    content["label"][2] = np.nan
    content["label"] = content["label"][:9]
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "S3.pkl").write_bytes(pickle.dumps(content, protocol=2))
    report = attempt("ppg-dalia", tmp_path / "raw", tmp_path / "cache")
    assert codes(report) == {"label", "unmatched_labels"}
    made = tokens.build(tmp_path / "cache", out=tmp_path / "tokens")
    assert made.targets(None).tolist() == np.delete(content["label"], 2).astype(np.float32).tolist()


def test_the_split_of_the_subjects_is_fixed() -> None:
    placed = tser.split_by_hash(ppg_dalia.SUBJECTS, sizes=(1, 2))
    assert sorted(placed.values()) == ["test"] * 2 + ["train"] * 12 + ["validation"]
    assert placed == tser.split_by_hash(tuple(reversed(ppg_dalia.SUBJECTS)), sizes=(1, 2))


def test_ieee_ppg(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    walks = np.cumsum(rng.standard_normal((4, 5, 2000)), axis=-1)
    windows = [(i, case) for i, walk in enumerate(walks) for case in cut_windows(walk, 1000, 250)]
    write_ts(
        tmp_path / "raw" / "IEEEPPG_TRAIN.ts",
        [c for i, c in windows if i < 3],
        [80 + i for i, _ in windows if i < 3],
    )
    write_ts(tmp_path / "raw" / "IEEEPPG_TEST.ts", [c for i, c in windows if i == 3], [70] * 5)
    assert attempt("ieee-ppg", tmp_path / "raw", tmp_path / "cache")["exit_code"] == 0
    made = tokens.build(tmp_path / "cache", out=tmp_path / "tokens")
    assert (made.channels, made.rate, made.length, len(set(made.subjects()))) == (5, 125.0, 1000, 4)
    assert (len(made["train"]), len(made["validation"]), len(made["test"])) == (10, 5, 5)
    write_ts(
        tmp_path / "raw" / "IEEEPPG_TEST.ts",
        [[np.ones(1000)] * 3 + [np.ones(999)] * 2],
        [70],
        equal=False,
    )
    write_ts(
        tmp_path / "raw" / "IEEEPPG_TRAIN.ts",
        [c for i, c in windows if i < 3],
        [80] * 15,
        equal=False,
    )
    report = attempt("ieee-ppg", tmp_path / "raw", tmp_path / "other", max_bad=1.0)
    assert [rows["quarantined_by_reason"] for rows in report["rows"]] == [{"length": 1}, {}]


# --- BIDMC


def numbers(seconds: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """PPG and ECG at 125 Hz, the monitor's HR once a second."""
    rng = np.random.default_rng(9)
    return rng.random(seconds * 125), rng.random(seconds * 125), 70 + np.arange(seconds + 1) / 10


def write_bidmc(folder: Path, seconds: int = 60) -> None:
    ppg, ecg, hr = numbers(seconds)
    folder.mkdir(parents=True)
    rows = [f"{i / 125:.5g},{a:.5f},{b:.5f}" for i, (a, b) in enumerate(zip(ppg, ecg, strict=True))]
    (folder / "bidmc_02_Signals.csv").write_text("Time [s], PLETH, II\n" + "\n".join(rows) + "\n")
    lines = [f"{i},{x:.1f},{'NaN' if i < 20 else 97}" for i, x in enumerate(hr)]
    (folder / "bidmc_02_Numerics.csv").write_text("Time [s], HR, SpO2\n" + "\n".join(lines) + "\n")
    breaths = [f"{k * 500},{k * 500 + 10 if k < 12 else ''}" for k in range(15)]
    (folder / "bidmc_02_Breaths.csv").write_text(
        "breaths ann1 [signal sample no], breaths ann2 [signal sample no]\n"
        + "\n".join(breaths)
        + "\n"
    )


def test_bidmc_in_tables_gives_every_view(tmp_path: Path) -> None:
    write_bidmc(tmp_path / "raw")
    report = attempt("bidmc", tmp_path / "raw", tmp_path / "cache")
    assert (report["exit_code"], [u["unit"] for u in report["units"]], codes(report)) == (
        0,
        ["bidmc_02"],
        {"missing_values"},
    )
    found = {
        (reason["file"], reason["field"]): reason["count"]
        for unit in report["units"]
        for reason in unit["reasons"]
    }
    assert found == {("bidmc_02_Breaths.csv", "ann2"): 3, ("bidmc_02_Numerics.csv", "SpO2"): 20}
    made = {
        view: tokens.build(
            tmp_path / "cache", view=view, out=tmp_path / f"t{view}", normalise="none"
        )
        for view in ("", "rr", "hr", "spo2")
    }
    assert len(made[""]) == 1
    starts = np.arange(10) * 3
    assert made["hr"].index["start"].to_list() == starts.tolist()
    np.testing.assert_allclose(
        made["hr"].targets(None),
        [np.mean(70 + np.arange(t, t + 32) / 10) for t in starts],
        rtol=1e-5,
    )
    np.testing.assert_allclose(made["rr"].targets(None), 15.0, rtol=1e-6)  # a breath every 4 s
    # sixteen of 32 seconds known
    assert made["spo2"].index["start"].to_list() == [6, 9, 12, 15, 18, 21, 24, 27]
    ppg, ecg, _ = numbers(60)
    np.testing.assert_allclose(
        made["hr"].values(None)[4], np.stack([ppg, ecg], -1)[1500:5500], atol=1e-5
    )


def copy_as(folder: Path, number: int, to: Path) -> None:
    """The files of bidmc_02 as another recording's, with other values of its own."""
    to.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("bidmc_02_*.csv"):
        text = path.read_text()
        (to / path.name.replace("_02_", f"_{number:02d}_")).write_text(
            text.replace(",0.", f",{number}.") if "Signals" in path.name else text
        )


def test_recordings_of_one_patient_are_one_subject(tmp_path: Path) -> None:
    write_bidmc(tmp_path / "raw")
    for number in (6, 7, 9, 10, 23, 38, 39):
        copy_as(tmp_path / "raw", number, tmp_path / "raw")
    attempt("bidmc", tmp_path / "raw", tmp_path / "cache")
    records = list(open_cache(tmp_path / "cache").records())
    assert {record.recording_id[-2:]: record.subject_id[-2:] for record in records} == {
        "02": "02", "06": "06", "07": "06", "09": "06", "10": "10", "23": "20", "38": "38", "39": "38",
    }  # fmt: skip
    splits = {(record.subject_id, record.attributes["split"]) for record in records}
    assert len(splits) == len({subject for subject, _ in splits}) == 5


def test_the_patients_are_those_of_the_published_files() -> None:
    folder = require_sample(SAMPLES / "complete" / "bidmc")
    patients: dict[str, list[str]] = {}
    for path in sorted((folder / "bidmc_csv").glob("*_Fix.txt")):
        subject = next(
            line
            for line in path.read_text().splitlines()
            if line.startswith("MIMIC II matched wdb ID")
        )
        patients.setdefault(subject, []).append(path.name[:8])
    assert len(patients) == 46
    assert {name: same[0] for same in patients.values() for name in same} == {
        name: bidmc.find_patient(name) for name in bidmc.RECORDINGS
    }


def test_copies_of_bidmc_are_used_once_or_not_at_all(tmp_path: Path) -> None:
    write_bidmc(tmp_path / "raw" / "bidmc_csv")
    copy_as(tmp_path / "raw" / "bidmc_csv", 3, tmp_path / "raw" / "bidmc_csv")
    shutil.copytree(tmp_path / "raw" / "bidmc_csv", tmp_path / "raw" / "old")
    report = attempt("bidmc", tmp_path / "raw", tmp_path / "cache")
    assert (report["exit_code"], len(report["units"]), codes(report)) == (
        0,
        2,
        {"missing_values", "duplicates"},
    )
    other = tmp_path / "raw" / "old" / "bidmc_02_Numerics.csv"
    other.write_text(other.read_text().replace(",97", ",70"))
    report = attempt("bidmc", tmp_path / "raw", tmp_path / "cache")
    assert report["exit_code"] == 3
    (unit,) = [unit for unit in report["units"] if unit["status"] == "quarantined"]
    named = {reason["file"] for reason in unit["reasons"]}
    assert (unit["unit"], named) == (
        "bidmc_02",
        {"bidmc_csv/bidmc_02_Numerics.csv", "old/bidmc_02_Numerics.csv"},
    )


def test_a_part_of_a_recording_has_the_labels_of_its_time(tmp_path: Path) -> None:
    """Signals from the 30th second on; breaths and numbers are counted from the beginning of the
    whole.
    """
    write_bidmc(tmp_path / "raw", 100)
    folder = tmp_path / "raw"
    (folder / "bidmc_02_Breaths.csv").write_text(
        "breaths ann1, breaths ann2\n"
        + "\n".join(f"{x},{x}" for x in range(0, 3750, 250))
        + "\n4250,4250\n4750,4750\n"
    )
    signals = folder / "bidmc_02_Signals.csv"
    head, *rows = signals.read_text().splitlines()
    signals.write_text("\n".join([head, *rows[3750:]]) + "\n")
    report = attempt("bidmc", folder, tmp_path / "cache")
    assert (report["exit_code"], codes(report)) == (
        0,
        {"timestamps", "missing_values", "annotation_out_of_range"},
    )
    made = {
        view: tokens.build(tmp_path / "cache", view=view, out=tmp_path / view, normalise="none")
        for view in ("hr", "rr")
    }
    starts = np.arange(13) * 3
    np.testing.assert_allclose(
        made["hr"].targets(None),
        [np.mean(70 + np.arange(t, t + 32) / 10) for t in 30 + starts],
        rtol=1e-5,
    )
    # breaths at 34 and 38 s alone
    np.testing.assert_allclose(made["rr"].targets(None)[:2], 15.0, rtol=1e-6)


def write_wfdb(
    folder: Path, name: str, rate: int, signals: dict[str, tuple[np.ndarray, int, str]]
) -> None:
    """A record of format 16: name -> values, steps a unit, unit."""
    digital = np.stack([np.round(x * gain) for x, gain, _ in signals.values()], -1).astype("<i2")
    lines = [f"{name} {len(signals)} {rate} {len(digital)}"]
    for i, (label, (_, gain, unit)) in enumerate(signals.items()):
        check = (int(digital[:, i].astype(np.int64).sum()) + 0x8000) % 0x10000 - 0x8000
        lines.append(f"{name}.dat 16 {gain}/{unit} 16 0 {digital[0, i]} {check} 0 {label}")
    (folder / f"{name}.hea").write_text("\n".join(lines) + "\n")
    (folder / f"{name}.dat").write_bytes(digital.tobytes())


def test_bidmc_in_wfdb_gives_the_same_labels(tmp_path: Path) -> None:
    ppg, ecg, hr = numbers(60)
    (tmp_path / "raw").mkdir()
    write_wfdb(
        tmp_path / "raw", "bidmc02", 125, {"PLETH,": (ppg, 1000, "NU"), "II,": (ecg, 1000, "mV")}
    )
    write_wfdb(tmp_path / "raw", "bidmc02n", 1, {"HR,": (hr, 100, "bpm")})
    report = attempt("bidmc", tmp_path / "raw", tmp_path / "cache")
    assert (report["exit_code"], [u["unit"] for u in report["units"]]) == (0, ["bidmc_02"])
    assert codes(report) == {"unmatched_labels"}  # no breaths, no SpO2
    made = tokens.build(tmp_path / "cache", view="hr", out=tmp_path / "t", normalise="none")
    np.testing.assert_allclose(
        made.targets(None),
        [np.mean(70 + np.arange(t, t + 32) / 10) for t in np.arange(10) * 3],
        rtol=1e-4,
    )
    (tmp_path / "raw" / "bidmc02.dat").unlink()
    report = attempt("bidmc", tmp_path / "raw", tmp_path / "cache")
    assert (report["exit_code"], codes(report)) == (4, {"missing_signal_file"})


def test_bidmc_problems_share_their_recordings(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    walks = np.cumsum(rng.standard_normal((3, 2, 6000)), axis=-1)
    for kind, low in (("RR", 12), ("HR", 60)):
        windows = [
            (i, case) for i, walk in enumerate(walks) for case in cut_windows(walk, 4000, 500)
        ]
        for name, keep in (("TRAIN", (0, 1)), ("TEST", (2,))):
            part = [(i, case) for i, case in windows if i in keep]
            write_ts(
                tmp_path / "raw" / f"BIDMC32{kind}_{name}.ts",
                [case for _, case in part],
                [low + i for i, _ in part],
            )
    assert attempt("bidmc", tmp_path / "raw", tmp_path / "cache")["exit_code"] == 0
    made = {
        view: tokens.build(tmp_path / "cache", view=view, out=tmp_path / view)
        for view in ("rr", "hr")
    }
    assert sorted(made["rr"].targets(None).tolist()) == sorted([12.0] * 5 + [13.0] * 5 + [14.0] * 5)
    assert set(made["rr"].subjects()) == set(made["hr"].subjects())
    assert len(set(made["rr"].subjects())) == 3
    assert made["hr"]["test"].targets(None).tolist() == [62.0] * 5


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("0.016,", "0.016,x", "not_numeric"),
        ("0.016,", "0.5,", "sampling_rate"),
        ("0.016,", "0.016,1,", "row_width"),
        (" PLETH", " II", "schema"),
        ("Time [s]", "t", "schema"),
    ],
)
def test_bidmc_tables_with_faults_are_quarantined(
    tmp_path: Path, old: str, new: str, code: str
) -> None:
    write_bidmc(tmp_path / "raw", 40)
    path = tmp_path / "raw" / "bidmc_02_Signals.csv"
    path.write_text(path.read_text().replace(old, new, 1))
    report = attempt("bidmc", tmp_path / "raw", tmp_path / "cache")
    assert (report["exit_code"], codes(report)) == (4, {code})


@pytest.mark.slow
def test_the_real_recording(tmp_path: Path) -> None:
    require_sample(SAMPLES / "bidmc")
    report = attempt("bidmc", SAMPLES / "bidmc", tmp_path / "cache")
    assert (report["exit_code"], codes(report)) == (0, {"unmatched_labels"})
    (unit,) = report["units"]
    assert (unit["unit"], unit["samples"]) == ("bidmc_01", 60001)
    made = tokens.build(tmp_path / "cache", view="rr", out=tmp_path / "t")
    assert len(made) == 150
    rates = made.targets(None)
    assert rates is not None
    assert 15 < rates.min() < rates.max() < 30


def test_breaths_by_hand() -> None:
    rates = bidmc.compute_breathing_rates([np.arange(0, 40, 4.0), np.array([1.0])], 40.0)
    np.testing.assert_allclose(rates, [15.0, 15.0, 15.0])
    assert np.isnan(bidmc.compute_breathing_rates([np.array([1.0]), np.array([])], 40.0)).all()


@pytest.mark.parametrize("absent", ["NaN", "nan", ""])
def test_breaths_that_one_annotator_lacks_are_a_warning_with_counts(
    tmp_path: Path, absent: str
) -> None:
    write_bidmc(tmp_path / "raw", 100)
    rows = [[f"{k * 500}", f"{k * 500 + 10}"] for k in range(25)]  # a breath every 4 s
    for k in (4, *range(8, 25)):
        rows[k][1] = absent
    lines = [
        "breaths ann1 [signal sample no], breaths ann2 [signal sample no]",
        *(",".join(row) for row in rows),
    ]
    (tmp_path / "raw" / "bidmc_02_Breaths.csv").write_text("\n".join(lines) + "\n")
    report = attempt("bidmc", tmp_path / "raw", tmp_path / "cache")
    assert report["exit_code"] == 0
    found = [
        reason
        for unit in report["units"]
        for reason in unit["reasons"]
        if reason["field"] == "ann2"
    ]
    assert [(reason["level"], reason["count"]) for reason in found] == [
        ("warning", 17),
        ("warning", 1),
    ]
    made = tokens.build(tmp_path / "cache", view="rr", out=tmp_path / "t", normalise="none")
    # neither the gap nor the early end changes the rate
    np.testing.assert_allclose(made.targets(None), 15.0, rtol=1e-6)


@pytest.mark.long
def test_all_real_recordings_of_bidmc_are_published(tmp_path: Path) -> None:
    """Labels against the tables as pandas reads them."""
    folder = require_sample(SAMPLES / "complete" / "bidmc")
    report = attempt("bidmc", folder, tmp_path / "cache")
    assert (report["exit_code"], report["counts"]["quarantined"], len(report["units"])) == (
        0,
        0,
        53,
    )
    lost = {
        (unit["unit"], reason["field"]): reason["count"]
        for unit in report["units"]
        for reason in unit["reasons"]
        if reason["code"] == "missing_values"
    }
    for record in open_cache(tmp_path / "cache").records():
        name = record.recording_id
        signals = {signal.channel: signal.samples for signal in record.signals}
        breaths = pd.read_csv(folder / "bidmc_csv" / f"{name}_Breaths.csv")
        numerics = pd.read_csv(folder / "bidmc_csv" / f"{name}_Numerics.csv", skipinitialspace=True)
        for i, column in enumerate(breaths, 1):
            assert lost.get((name, f"ann{i}"), 0) == breaths[column].isna().sum()
        windows = [(t, t + 32) for t in range(0, 449, 3)]
        for key, column in (("hr", "HR"), ("spo2", "SpO2")):
            parts = [
                numerics[column][(numerics["Time [s]"] >= a) & (numerics["Time [s]"] < b)]
                for a, b in windows
            ]
            expected = [part.mean() if part.notna().sum() >= 16 else np.nan for part in parts]
            np.testing.assert_allclose(signals[key], expected, rtol=1e-5)
        rates = []
        for a, b in windows:
            inside = [
                times[(times >= 125 * a) & (times < 125 * b)].dropna()
                for _, times in breaths.items()
            ]
            found = [
                60 * 125 * (len(times) - 1) / (times.max() - times.min())
                for times in inside
                if len(times) > 1
            ]
            rates.append(np.mean(found) if found else np.nan)
        np.testing.assert_allclose(signals["rr"], rates, rtol=1e-5)


def test_readers_return_what_the_cache_takes(tmp_path: Path) -> None:
    write_bidmc(tmp_path / "raw", 40)
    files = {kind: f"bidmc_02_{kind}.csv" for kind in ("Signals", "Breaths", "Numerics")}
    assert isinstance(
        bidmc.read_recording("bidmc_02", scan_folder(tmp_path / "raw"), files, "train"), Record
    )
    assert Records(records=[]).rows == []
