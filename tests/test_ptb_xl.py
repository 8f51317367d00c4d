"""PTB-XL: leads, statements, folds and metadata against the package `wfdb` and the official
example; the real sample.
"""

from __future__ import annotations

import ast
import csv
import pickle
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import SAMPLES, needs_sample, require_sample

from bitimely_core import cache, tokens
from bitimely_core.datasets.ptb_xl import LEADS, SUPERCLASSES, parse_statements, ptb_xl
from bitimely_core.errors import Finding, UserError
from bitimely_core.formats.source import scan_folder
from bitimely_core.registry import datasets
from bitimely_core.types import IngestUnit, Record, SourceRows

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # its import sets off pandas'
    import wfdb

DATA = SAMPLES / "ptb-xl"
COLUMNS = (
    "ecg_id",
    "patient_id",
    "age",
    "sex",
    "recording_date",
    "scp_codes",
    "strat_fold",
    "filename_lr",
    "filename_hr",
)

real = needs_sample(DATA / "ptbxl_database.csv")


def record(
    path: Path,
    *,
    rate: int = 100,
    frames: int = 1000,
    names: tuple[str, ...] = LEADS,
    unit: str = "mV",
    flat: str = "",
    **line: str,
) -> np.ndarray:
    """A record in format 16; digital values int16 [frames, leads]."""
    rng = np.random.default_rng(len(path.name))
    values = rng.integers(-500, 500, (frames, len(names))).astype("<i2")
    for i, name in enumerate(names):
        values[:, i] = 7 if name == flat else values[:, i]
    path.parent.mkdir(parents=True, exist_ok=True)
    file = line.get("file", f"{path.name}.dat")
    sums = values.sum(axis=0, dtype=np.int64) & 0xFFFF
    lines = [
        f"{file} 16 1000.0(0)/{unit} 16 0 {values[0, i]} {sums[i]} 0 {name}"
        for i, name in enumerate(names)
    ]
    path.with_suffix(".hea").write_text(
        "\n".join([f"{path.name} {len(names)} {rate} {frames}", *lines]) + "\n"
    )
    path.with_suffix(".dat").write_bytes(values.tobytes())
    return values


def row(number: int, **cells: Any) -> dict[str, str]:
    """A row of the table; by default one patient a record, folds 1 to 10."""
    own = {
        "ecg_id": number,
        "patient_id": f"{1000 + number}.0",
        "age": "56.0",
        "sex": number % 2,
        "recording_date": "1984-11-09 09:17:34",
        "scp_codes": "{'NORM': 100.0, 'SR': 0.0}",
        "strat_fold": 1 + (number - 1) % 10,
        "filename_lr": f"records100/00000/{number:05d}_lr",
        "filename_hr": f"records500/00000/{number:05d}_hr",
    }
    return {key: str(value) for key, value in (own | cells).items()}


def layout(
    folder: Path,
    rows: list[dict[str, str]],
    *,
    columns: tuple[str, ...] = COLUMNS,
    records: bool = True,
    tail: str = "",
) -> Path:
    """The tables, and a record for every row."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "ptbxl_database.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        file.write(tail)
    kinds = {"NORM": "NORM", "IMI": "MI", "LVH": "HYP", "NDT": "STTC", "LAFB": "CD"}
    lines = [f"{code},1.0,{kind}" for code, kind in kinds.items()]
    (folder / "scp_statements.csv").write_text(
        "\n".join([",diagnostic,diagnostic_class", *lines, "SR,,", "LOWT,,STTC"]) + "\n"
    )
    for cells in rows if records else ():
        record(folder / cells["filename_lr"])
    return folder


class Found:
    """What came of a folder."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.records: dict[str, Record] = {}
        self.refused: dict[str, list[Finding]] = {}
        self.units: dict[str, IngestUnit] = {}
        self.findings: list[Finding] = []
        for item in ptb_xl(scan_folder(folder), options):
            if isinstance(item, SourceRows):
                self.rows = item
            elif isinstance(item, Finding):
                self.findings.append(item)
            else:
                self.take(pickle.loads(pickle.dumps(item)))

    def take(self, unit: IngestUnit) -> None:
        self.units[unit.name] = unit
        try:
            if unit.read is None:
                self.refused[unit.name] = list(unit.findings)
            else:
                got = unit.read()
                assert isinstance(got, Record)
                self.records[unit.name] = got
        except UserError as error:
            self.refused[unit.name] = [error.finding]

    def codes(self, name: str) -> set[str]:
        return {str(finding.code) for finding in self.refused[name]}

    @property
    def warned(self) -> set[str]:
        return {str(finding.code) for finding in self.findings if finding.level == "warning"}


def test_leads_are_selected_by_name_whatever_order_case_and_other_signals(tmp_path: Path) -> None:
    folder = layout(tmp_path, [row(1)])
    names = ("Resp", *(lead.replace("AV", "aV") for lead in reversed(LEADS)))
    values = record(folder / "records100/00000/00001_lr", names=names, unit="uV")
    found = Found(folder).records["1"]
    assert [signal.channel for signal in found.signals] == list(LEADS)
    for i, signal in enumerate(found.signals):
        assert np.array_equal(signal.samples, values[:, len(LEADS) - i])
        assert (signal.unit, signal.scale) == ("mV", pytest.approx(1e-6))
    assert {str(finding.code) for finding in found.findings} == {"unit"}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"rate": 500}, "sampling_rate"),
        ({"frames": 999}, "length"),
        ({"frames": 1001}, "length"),
        ({"names": LEADS[:-1]}, "missing_channel"),
        ({"names": (*LEADS[:2], "ii", *LEADS[2:])}, "duplicate_channel"),
        ({"unit": "bpm"}, "unit"),
        # of another record: its signals under this patient
        ({"file": "00002_lr.dat"}, "missing_signal_file"),
    ],
)
def test_a_record_that_is_not_as_it_must_be_is_refused_alone(
    tmp_path: Path, change: dict[str, Any], code: str
) -> None:
    folder = layout(tmp_path, [row(1), row(2)])
    record(folder / "records100/00000/00001_lr", **change)
    found = Found(folder)
    assert found.codes("1") == {code}
    assert set(found.records) == {"2"}


def test_a_constant_lead_gives_a_warning(tmp_path: Path) -> None:
    folder = layout(tmp_path, [row(1)])
    record(folder / "records100/00000/00001_lr", flat="V3")
    (finding,) = Found(folder).records["1"].findings
    assert (finding.code, finding.level) == ("flat_channel", "warning")
    assert "V3" in finding.problem


@pytest.mark.parametrize(
    ("cells", "code"),
    [
        ({"patient_id": ""}, "identifier"),
        ({"patient_id": "12.5"}, "identifier"),
        ({"strat_fold": "11"}, "metadata"),
        ({"strat_fold": ""}, "metadata"),
        ({"filename_lr": ""}, "metadata"),
        ({"filename_lr": "/etc/hostname"}, "path_escape"),
        ({"filename_lr": "records100/../../x"}, "path_escape"),
        ({"filename_lr": "records100/00000/00002_lr"}, "duplicate_key"),
        ({"scp_codes": "{'NORM': 101.0}"}, "metadata_syntax"),
        ({"scp_codes": "{'NORM': nan}"}, "metadata_syntax"),
        ({"scp_codes": "[1]"}, "metadata_syntax"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_and_counted(
    tmp_path: Path, cells: dict[str, str], code: str
) -> None:
    folder = layout(tmp_path, [row(1), row(2), row(3)])
    layout(folder, [row(1, **cells), row(2), row(3)], records=False)
    found = Found(folder)
    assert found.codes("1") == {code}
    assert "3" in found.records
    assert found.rows.seen == 3
    if code != "path_escape":
        assert set(found.rows.quarantined) == {code}
        assert found.refused["1"][0].row == 2


def test_rows_without_a_record_are_counted_and_an_exact_copy_is_used_once(tmp_path: Path) -> None:
    folder = layout(tmp_path, [row(1), row(2), row(2), row(9, ecg_id="x")], tail="7,8\n")
    found = Found(folder)
    assert set(found.records) == {"1", "2"}
    assert found.rows == SourceRows(
        file="ptbxl_database.csv",
        seen=5,
        dropped={"duplicates": 1},
        quarantined={"identifier": 1, "row_width": 1},
        warned=found.rows.warned,
    )


def test_a_record_with_two_different_rows_refuses_the_data_set(tmp_path: Path) -> None:
    folder = layout(tmp_path, [row(1), row(1, ecg_id="1.0", scp_codes="{'IMI': 100.0}")])
    with pytest.raises(UserError) as caught:
        Found(folder)
    assert (caught.value.code, caught.value.file) == ("duplicate_key", "ptbxl_database.csv")


def test_a_patient_in_two_splits_refuses_the_data_set_however_the_id_is_written(
    tmp_path: Path,
) -> None:
    folder = layout(tmp_path, [row(1, patient_id="77"), row(2, patient_id="077.0", strat_fold=10)])
    with pytest.raises(UserError) as caught:
        Found(folder)
    assert caught.value.code == "subject_leakage"
    assert "77" not in str(caught.value)  # rows, not patients
    # both train
    assert set(
        Found(layout(folder, [row(1, patient_id="77"), row(2, patient_id="077.0")])).records
    ) == {"1", "2"}


@pytest.mark.parametrize(
    ("age", "attributes"),
    [
        ("56.0", {"age": 56.0}),
        ("0", {"age": 0.0}),
        ("300.0", {"age_over_89": True}),
        ("", {}),
        ("nan", {}),
        ("old", {}),
        ("-1", {}),
        ("150", {}),
    ],
)
def test_an_age_is_a_number_only_when_it_is_one(
    tmp_path: Path, age: str, attributes: dict[str, Any]
) -> None:
    found = Found(layout(tmp_path, [row(1, age=age)]))
    got = found.records["1"].attributes
    assert {key: value for key, value in got.items() if key.startswith("age")} == attributes
    assert ("metadata" in found.warned) == ("age" not in attributes)
    assert got["sex"] == "F"


def test_labels_follow_the_official_example_and_unknown_statements_are_counted(
    tmp_path: Path,
) -> None:
    rows = [
        # likelihood 0 is unknown, not absent
        row(1, scp_codes="{'NORM': 0.0, 'IMI': 100.0, 'SR': 0.0}"),
        row(2, scp_codes='{"LAFB": 50, "LOWT": 100.0}'),
        row(3, scp_codes="{'SR': 0.0, 'XYZ': 100.0}"),
        row(4, scp_codes="{}"),
    ]
    found = Found(layout(tmp_path, rows))
    labels = [
        (got.attributes.get("superclass"), got.attributes.get("superclasses"))
        for got in found.records.values()
    ]
    assert labels == [(None, ["NORM", "MI"]), ("CD", ["CD"]), (None, None), (None, None)]
    (unknown,) = [finding for finding in found.findings if finding.code == "unknown_label"]
    assert (unknown.count, unknown.examples) == (1, ("XYZ",))
    (zero,) = [
        finding
        for finding in found.findings
        if finding.code == "metadata" and finding.level == "info"
    ]
    assert zero.count == 1
    assert {
        finding.problem.rsplit(" ", 1)[1]
        for finding in found.findings
        if finding.code == "class_missing"
    } == {"train", "validation", "test"}


@given(
    st.dictionaries(
        st.text("ABC1_/", min_size=1, max_size=6),
        st.floats(0, 100).map(lambda x: round(x, 3)),
        max_size=5,
    )
)
def test_statements_read_as_python_would_read_them(codes: dict[str, float]) -> None:
    assert parse_statements(repr(codes)) == ast.literal_eval(repr(codes))


@given(st.text(st.sampled_from("{}'\":,. 019AB\\()\n"), max_size=60))
def test_other_texts_are_no_statements_and_never_an_error(text: str) -> None:
    found = parse_statements(text)
    if found is not None:
        assert found == ast.literal_eval(text.strip())


def test_statements_of_any_length_take_no_time() -> None:
    assert parse_statements("{" + " " * 1900 + "x") is None
    assert parse_statements("{'A': 1.0," * 10**6) is None


def test_dates_are_kept_only_with_keep_dates(tmp_path: Path) -> None:
    folder = layout(tmp_path, [row(1), row(2, recording_date="=1+1")])
    assert Found(folder).records["1"].start_time is None
    dated = Found(folder, keep_dates=True).records
    assert (dated["1"].start_time, dated["2"].start_time) == ("1984-11-09T09:17:34", None)
    assert "recording_date" not in dated["1"].attributes


def test_a_unit_has_all_files_of_its_record_and_foreign_ones_are_named(tmp_path: Path) -> None:
    folder = layout(tmp_path, [row(1), row(12)])
    for name in ("00001_a.dat", "00099_lr.hea"):
        (folder / "records100/00000" / name).write_text("x")
    found = Found(folder)
    assert {Path(name).name for name in found.units["1"].files} == {
        "00001_lr.hea",
        "00001_lr.dat",
        "00001_a.dat",
    }
    (unlisted,) = [finding for finding in found.findings if finding.code == "file_name"]
    assert unlisted.file is not None
    assert unlisted.file.endswith("00099_lr.hea")


def test_a_record_whose_row_is_faulty_is_not_one_without_a_row(tmp_path: Path) -> None:
    folder = layout(
        tmp_path,
        [
            row(1),
            row(2, strat_fold="11"),
            row(3, filename_lr="records100/00000/00001_lr"),
            row(4, scp_codes="{'NORM'"),
        ],
    )
    record(folder / "records100/00000/00003_lr")
    found = Found(folder)
    assert set(found.refused) == {"1", "2", "3", "4"}
    assert {Path(file).name for file in found.units["4"].files} == {"00004_lr.hea", "00004_lr.dat"}
    (unlisted,) = [finding for finding in found.findings if finding.code == "file_name"]
    assert (unlisted.file, unlisted.count) == ("records100/00000/00003_lr.hea", 1)


def test_names_of_records_may_be_in_capitals_and_a_second_table_is_named(tmp_path: Path) -> None:
    folder = layout(tmp_path, [row(1), row(2)])
    expected = {
        name: [signal.samples for signal in one.signals]
        for name, one in Found(folder).records.items()
    }
    for path in list((folder / "records100/00000").iterdir()):
        path.rename(
            path.with_name(
                path.name.upper() if "00001" in path.name else path.stem + path.suffix.upper()
            )
        )
    layout(folder / "old", [row(1)])
    found = Found(folder)
    assert set(found.records) == {"1", "2"}
    for name, one in found.records.items():
        np.testing.assert_array_equal([signal.samples for signal in one.signals], expected[name])
    assert [finding.file for finding in found.findings if finding.code == "file_name"] == [
        "old/ptbxl_database.csv"
    ]


def test_the_folder_may_be_nested_and_must_be_complete(tmp_path: Path) -> None:
    folder = layout(tmp_path / "ptb-xl" / "1.0.3", [row(1)])
    assert set(Found(tmp_path).records) == {"1"}
    (folder / "scp_statements.csv").unlink()
    with pytest.raises(UserError, match=r"scp_statements\.csv: is missing"):
        Found(tmp_path)
    (folder / "ptbxl_database.csv").unlink()
    with pytest.raises(UserError, match=r"no ptbxl_database\.csv among"):
        Found(tmp_path)
    with pytest.raises(UserError) as caught:
        Found(tmp_path, rate=250)
    assert caught.value.exit_code == 2


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        Found(layout(tmp_path, [row(1)], columns=COLUMNS[:-3]))
    assert caught.value.code == "schema"
    assert "strat_fold" in caught.value.problem


# --- the real sample


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[dict[str, Any], Path]]:
    """Report and cache of the sample at both rates."""
    root = tmp_path_factory.mktemp("ptb-xl")
    return {
        rate: (
            cache.ingest("ptb-xl", DATA, root / str(rate), options={"rate": rate}),
            root / str(rate),
        )
        for rate in (100, 500)
    }


@real
def test_the_sample_lands_at_both_rates(caches: dict[int, tuple[dict[str, Any], Path]]) -> None:
    report = caches[100][0]
    assert (report["exit_code"], report["counts"]["accepted"]) == (0, 124)
    assert all(unit["channels"] == 12 and unit["samples"] == 1000 for unit in report["units"])
    report = caches[500][0]
    assert (report["exit_code"], report["counts"]["accepted"], report["counts"]["quarantined"]) == (
        3,
        123,
        1,
    )
    assert report["units"][0]["unit"] == "1"
    assert [reason["code"] for reason in report["units"][0]["reasons"]] == ["missing_signal_file"]
    assert report["rows"][0]["seen"] == report["rows"][0]["used"] == 124


@pytest.mark.slow
@real
@pytest.mark.parametrize("rate", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_values_are_those_of_wfdb(
    caches: dict[int, tuple[dict[str, Any], Path]], rate: int
) -> None:
    with (DATA / "ptbxl_database.csv").open(newline="") as file:
        names = {
            line["ecg_id"]: line["filename_lr" if rate == 100 else "filename_hr"]
            for line in csv.DictReader(file)
        }
    read = 0
    for got in cache.open_cache(caches[rate][1]).records():
        digital = wfdb.rdrecord(str(DATA / names[got.recording_id]), physical=False)
        physical = wfdb.rdrecord(str(DATA / names[got.recording_id]))
        for i, name in enumerate(digital.sig_name):
            (signal,) = [signal for signal in got.signals if signal.channel == name]
            assert signal.rate == digital.fs == rate
            assert np.array_equal(signal.samples, digital.d_signal[:, i])
            assert np.allclose(
                signal.samples * signal.scale + signal.offset,
                physical.p_signal[:, i],
                rtol=1e-12,
                atol=1e-12,
            )
        read += 1
    assert read == (124 if rate == 100 else 123)


@pytest.mark.slow
@real
def test_windows_labels_and_folds_are_the_official_ones(
    caches: dict[int, tuple[dict[str, Any], Path]], tmp_path: Path
) -> None:
    with (DATA / "ptbxl_database.csv").open(newline="") as file:
        table = {line["ecg_id"]: line for line in csv.DictReader(file)}
    with (DATA / "scp_statements.csv").open(newline="") as file:
        kind = {
            line[""]: line["diagnostic_class"]
            for line in csv.DictReader(file)
            if line["diagnostic"] == "1.0"
        }
    labels = {
        name: {kind[code] for code in ast.literal_eval(line["scp_codes"]) if code in kind}
        for name, line in table.items()
    }
    folds = {name: int(line["strat_fold"]) for name, line in table.items()}

    unlabelled = tokens.build(caches[100][1], out=tmp_path / "whole")
    assert (
        len(unlabelled),
        unlabelled.length,
        unlabelled.channels,
        unlabelled.rate,
        unlabelled.task,
    ) == (124, 1000, 12, 100.0, "none")
    many = tokens.build(caches[100][1], view="multilabel", out=tmp_path / "many")
    found = many.targets()
    assert found is not None
    ids = many.index["recording_id"].to_list()
    assert [{c for c, on in zip(SUPERCLASSES, line, strict=True) if on} for line in found] == [
        labels[name] for name in ids
    ]
    one = tokens.build(caches[100][1], view="superclass", out=tmp_path / "one")
    single = {name: next(iter(names)) for name, names in labels.items() if len(names) == 1}
    assert dict(zip(one.index["recording_id"], one.index["label"], strict=True)) == single
    assert Counter(one.index["label"].to_list()) == Counter(single.values())
    for windows in (unlabelled, many, one):
        expected = {
            name: "train" if folds[name] < 9 else "validation" if folds[name] == 9 else "test"
            for name in folds
        }
        assert all(
            expected[name] == split
            for name, split in zip(
                windows.index["recording_id"], windows.index["split"], strict=True
            )
        )
    fast = tokens.build(caches[500][1], out=tmp_path / "fast")
    assert (len(fast), fast.length, fast.rate) == (123, 5000, 500.0)
    slow = tokens.build(caches[500][1], out=tmp_path / "slow", rate=100)
    assert (slow.length, slow.rate) == (1000, 100.0)


@pytest.mark.slow
def test_the_complete_folder_lands_with_its_rows(tmp_path: Path) -> None:
    folder = require_sample(DATA.parent / "complete" / "ptb-xl-488")
    report = cache.ingest("ptb-xl", folder, tmp_path / "cache")
    assert (report["exit_code"], len(report["units"]), report["counts"]["quarantined"]) == (
        0,
        488,
        0,
    )
    with (folder / "ptbxl_database.csv").open(newline="") as file:
        rows = {int(line["ecg_id"]): line for line in csv.DictReader(file)}
    assert len(rows) == 488
    for one in list(cache.open_cache(tmp_path / "cache").records())[::61]:
        number = int(one.recording_id)
        expected = wfdb.rdrecord(str(folder / rows[number]["filename_lr"])).p_signal
        found = {
            signal.channel: signal.samples * signal.scale + signal.offset for signal in one.signals
        }
        np.testing.assert_allclose(
            np.stack(list(found.values()), 1)[:, 0], expected[:, 0], atol=1e-6
        )
        assert float(one.attributes["fold"]) == float(rows[number]["strat_fold"])
        assert one.subject_id == str(int(float(rows[number]["patient_id"])))


def test_facts() -> None:
    facts = datasets["ptb-xl"].facts
    assert set(facts.views) == {"", "superclass", "multilabel"}
    assert all(
        view.split == "official" and len(view.channels) == 12 for view in facts.views.values()
    )
    assert facts.views["superclass"].classes == facts.views["multilabel"].classes == SUPERCLASSES
    assert facts.options == {"rate": 100}
    assert "scp_likelihood_0" in facts.rules
