"""The .ts reader: real files of the archives against a few lines of plain Python, hand-made faults
and fuzzed bytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import SAMPLES, require_sample

from bitimely_core.errors import Finding, UserError
from bitimely_core.formats import ts

FUZZ = settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

HEAD = [
    "@problemName Toy",
    "@timeStamps false",
    "@missing false",
    "@univariate false",
    "@dimensions 2",
    "@equalLength true",
    "@seriesLength 3",
]
ROWS = ["1,2,3:4,5,6:60.5", "7,8,9:1,1,1:61.5", "-1,.5,1e2:0,0,0:-3", "3,2,1:9,9,9:0"]


def text(
    rows: Sequence[str] = ROWS, head: Sequence[str] = HEAD, target: str = "@targetlabel true"
) -> str:
    return "\n".join([*head, target, "@data", *rows]) + "\n"


def write_ts(folder: Path, content: str | bytes, name: str = "Toy_TRAIN.ts") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read_ts(path: Path) -> tuple[ts.TsHeader, list[ts.TsCase], list[Finding]]:
    header = ts.read_header(path)
    items = list(ts.read_cases(path, header))
    rows = [item for item in items if isinstance(item, ts.TsCase) or item.row is not None]
    assert len(rows) == header.cases
    return (
        header,
        [item for item in items if isinstance(item, ts.TsCase)],
        [item for item in items if isinstance(item, Finding)],
    )


def read_error(path: Path) -> UserError:
    with pytest.raises(UserError) as caught:
        list(ts.read_cases(path))
    assert path.name in str(caught.value)
    return caught.value


def only(path: Path) -> tuple[list[int], Finding]:
    """Line numbers of the cases that are left, and the one finding."""
    _, cases, (finding,) = read_ts(path)
    return [case.row for case in cases], finding


# --- real files


@pytest.mark.parametrize(
    ("name", "cases", "dimensions", "lengths"),
    [
        ("CardanoSentiment/CardanoSentiment_TRAIN", 74, 2, (24, 24)),
        ("CardanoSentiment/CardanoSentiment_TEST", 33, 2, (24, 24)),
        ("Covid3Month/Covid3Month_TRAIN", 140, 1, (84,)),
        ("JapaneseVowels/JapaneseVowels_TRAIN", 270, 12, None),
    ],
)
def test_real_files_read_as_plain_python_reads_them(
    name: str, cases: int, dimensions: int, lengths: tuple[int, ...] | None
) -> None:
    path = require_sample(SAMPLES / "tser" / f"{name}.ts")
    header, found, findings = read_ts(path)
    assert (header.cases, header.dimensions, header.lengths, len(found)) == (
        cases,
        dimensions,
        lengths,
        cases,
    )
    assert list(header.findings) + findings == []
    data = path.read_text().split("@data\n")[1].splitlines()
    for case, line in zip(found, data, strict=True):
        *channels, label = line.split(":")
        assert case.label == (label if header.task == "classification" else float(label))
        for values, channel in zip(case.channels, channels, strict=True):
            assert np.array_equal(
                values, np.array([float(value) for value in channel.split(",")], np.float32)
            )


def test_real_timestamps() -> None:
    path = require_sample(SAMPLES / "tser" / "UnitTest" / "UnitTestTimeStamps_TRAIN.ts")
    header, cases, findings = read_ts(path)
    assert header.timestamps
    assert [str(finding.code) for finding in header.findings] == ["timestamps"]
    assert findings == []
    assert [case.label for case in cases] == ["1", "1", "2", "2"]
    assert cases[0].times is not None
    assert cases[0].times[0].tolist() == [0, 60, 120, 180]
    assert cases[2].channels[0].tolist() == [4, 0, 1, 11]
    assert "2007" not in repr((header, cases))


def test_real_train_and_test_belong_together() -> None:
    folder = require_sample(SAMPLES / "tser" / "Covid3Month")
    train, test = (folder / f"Covid3Month_{split}.ts" for split in ("TRAIN", "TEST"))
    ts.check_compatible(ts.read_header(train), ts.read_header(test))
    found = ts.find_duplicates(train, test)
    series = [
        {line.rpartition(":")[0] for line in path.read_text().split("@data\n")[1].splitlines()}
        for path in (train, test)
    ]
    assert (found is not None) == bool(series[0] & series[1])


# --- valid, in other words


@pytest.mark.parametrize(
    "content",
    [
        text(),
        text().replace("\n", "\r\n"),
        "# comment\n% another\n\n" + text().replace("@data\n", "@Data \n\n# here too\n"),
        "\ufeff"
        + text()
        .replace("@dimensions 2", "@DIMENSION\t 2")
        .replace("@seriesLength 3", "@SERIESLENGTH\t\t3"),
        text().replace(",", " , ").replace(":", " : "),
        text(
            head=[
                line
                for line in HEAD
                if "dimensions" not in line and "missing" not in line and "series" not in line
            ]
        ),
        text(head=HEAD[:2], target="@classlabel false\n@targetlabel TRUE"),
    ],
)
def test_spellings_of_one_file(tmp_path: Path, content: str) -> None:
    header, cases, findings = read_ts(write_ts(tmp_path, content))
    assert [*header.findings, *findings] == []
    assert (header.task, header.dimensions, header.lengths) == ("regression", 2, (3, 3))
    assert [case.label for case in cases] == [60.5, 61.5, -3.0, 0.0]
    assert cases[2].channels[0].tolist() == [-1.0, 0.5, 100.0]
    assert all(values.dtype == np.float32 for case in cases for values in case.channels)
    assert content.encode().splitlines()[cases[0].row - 1].replace(b" ", b"").startswith(b"1,2,3")


def test_classes_and_unlabelled_files(tmp_path: Path) -> None:
    header, cases, _ = read_ts(
        write_ts(tmp_path, text(["1,2:3,4:b", "5,6:7,8:a"], HEAD[:5], "@classLabel true a b"))
    )
    assert (header.task, header.classes, [case.label for case in cases]) == (
        "classification",
        ("a", "b"),
        ["b", "a"],
    )
    header, cases, _ = read_ts(
        write_ts(tmp_path, text(["1,2:3,4", "5,6:7,8"], HEAD[:5], "@classLabel false"))
    )
    assert (header.task, header.lengths, [case.label for case in cases]) == (
        "none",
        (2, 2),
        [None, None],
    )


def test_unknown_keys_are_one_warning(tmp_path: Path) -> None:
    header, _, _ = read_ts(
        write_ts(tmp_path, text(head=[*HEAD, "@colour blue", *["@shape round"] * 40_000]))
    )
    (found,) = header.findings
    assert (str(found.code), found.level, found.count) == ("header_syntax", "warning", 40_001)
    assert "'@colour' in line 8" in found.problem


@pytest.mark.slow
def test_thousands_of_classes_take_linear_time(
    tmp_path: Path, seconds: Callable[[Callable[[], object]], float]
) -> None:
    names = [f"c{i}" for i in range(20_000)]
    few, many = (
        write_ts(
            tmp_path,
            text(
                [f"1:2:{name}" for name in names[:n]],
                HEAD[:5],
                f"@classLabel true {' '.join(names[:n])}",
            ),
            f"{n}.ts",
        )
        for n in (2500, 20_000)
    )
    assert [case.label for case in read_ts(many)[1]] == names
    assert seconds(lambda: read_ts(many)) < 20 * seconds(lambda: read_ts(few))


def test_channels_of_unequal_length_in_one_case(tmp_path: Path) -> None:
    rows = ["1,2,3,4:1,2:1,2:60", "5,6,7,8:3,4:5,6:61"]
    for head in ([*HEAD[:4], "@dimensions 3", "@equalLength false"], HEAD[:2]):
        header, cases, findings = read_ts(write_ts(tmp_path, text(rows, head)))
        assert (header.lengths, header.equal, [*header.findings, *findings]) == (
            (4, 2, 2),
            False,
            [],
        )
        assert [len(values) for values in cases[1].channels] == [4, 2, 2]
    header, cases, _ = read_ts(
        write_ts(tmp_path, text(rows, [*HEAD[:4], "@equalLength true", "@seriesLength 4"]))
    )
    assert (header.lengths, len(cases), [str(finding.code) for finding in header.findings]) == (
        (4, 2, 2),
        2,
        ["length"],
    )


def test_missing_values(tmp_path: Path) -> None:
    _, cases, (finding,) = read_ts(write_ts(tmp_path, text(["?,2,3:4, ? ,NaN:60.5", *ROWS[1:]])))
    assert np.isnan(np.concatenate(cases[0].channels)).tolist() == [
        True,
        False,
        False,
        False,
        True,
        True,
    ]
    assert (str(finding.code), finding.level, finding.count, finding.row) == (
        "missing_values",
        "warning",
        3,
        None,
    )


@pytest.mark.parametrize(
    ("row", "times"),
    [
        (
            "(2013-03-01 00:00:00,4),(2013-03-01 00:00:01.5,5):(2013-03-01 00:00:30,1):2",
            [[0, 1.5], [30]],
        ),
        ("(10,4),(11,5) : (10.5,?) : 2", [[0, 1], [0.5]]),
        ("(2013-03-01,4), (2013-03-02,5):(2013-03-01,6):2", [[0, 86400], [0]]),
    ],
)
def test_timestamps_hold_the_separators_of_the_format(
    tmp_path: Path, row: str, times: list[list[float]]
) -> None:
    _, (case,), _ = read_ts(write_ts(tmp_path, text([row], ["@timestamps true"])))
    assert case.times is not None
    assert [channel.tolist() for channel in case.times] == times
    assert case.channels[0].tolist() == [4, 5]
    assert case.label == 2


# --- faults


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty_file"),
        (text().replace("@data\n", ""), "header_syntax"),
        (text().split("@data")[0], "header_syntax"),
        (text([]), "truncated"),
        (text(head=["@timeStamps perhaps"]), "header_syntax"),
        (text(head=["@dimensions two"]), "header_syntax"),
        (text(head=["@seriesLength 0"]), "header_syntax"),
        (text(target=""), "header_syntax"),
        (text(target="@classLabel true 1 2\n@targetlabel true"), "header_syntax"),
        (text(head=["@missing true", "@missing false"]), "header_syntax"),
        (text(head=["@dimensions 3"]), "dimensions"),
        ("<!DOCTYPE html>\n", "header_syntax"),
        (text().encode("utf-16"), "header_syntax"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, content: str | bytes, code: str) -> None:
    assert read_error(write_ts(tmp_path, content)).code == code


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ("7,8,9:1,1,1", "label"),
        ("7,8,9:1,1,1:", "label"),
        ("7,8,9:1,1,1:NaN", "label"),
        ("7,8,9:1,1,1:inf", "label"),
        ("7,8,9:1,1,1:1_0", "label"),
        ("7,8,9:61.5", "dimensions"),
        ("7,8,9:1,1,1:2,2,2:61.5", "dimensions"),
        ("7,8,9:1,1:61.5", "length"),
        ("7,8,9:1,1,1,1:61.5", "length"),
        ("7,8,9::61.5", "not_numeric"),
        ("7,,9:1,1,1:61.5", "not_numeric"),
        ("7,x,9:1,1,1:61.5", "not_numeric"),
        ("7,1 2,9:1,1,1:61.5", "not_numeric"),
        ("7,1_0,9:1,1,1:61.5", "not_numeric"),
        ("7,\u0661,9:1,1,1:61.5", "not_numeric"),
        ("7,1e400,9:1,1,1:61.5", "non_finite"),
        ("7,1e39,9:1,1,1:61.5", "non_finite"),
        ("7,-Infinity,9:1,1,1:61.5", "non_finite"),
        ("7,\0,9:1,1,1:61.5", "not_numeric"),
    ],
)
def test_faulty_cases_are_left_out_by_line(tmp_path: Path, row: str, code: str) -> None:
    rows, finding = only(write_ts(tmp_path, text([ROWS[0], row, *ROWS[2:]])))
    assert rows == [10, 12, 13]
    assert (str(finding.code), finding.level, finding.row) == (code, "error", 11)
    assert not any(value in finding.message for value in ("61.5", "1e400", "x,9"))


def test_an_unknown_class_is_left_out(tmp_path: Path) -> None:
    rows, finding = only(
        write_ts(
            tmp_path, text(["1:a", "2:c", "3:b"], ["@univariate true"], "@classLabel true a b")
        )
    )
    assert (rows, str(finding.code), finding.row) == ([4, 6], "label", 5)


@pytest.mark.parametrize(
    "stamps",
    [
        "(2,1),(1,1),(3,1)",
        "(1,1),(1,1),(3,1)",
        "(1,1),x,(3,1)",
        "(1,1),(noon,1),(3,1)",
        "1,2,3",
        "(1e999,1),(2,1),(3,1)",
        "(-1e999,1),(2,1),(3,1)",
    ],
)
def test_faulty_timestamps_are_left_out(tmp_path: Path, stamps: str) -> None:
    path = write_ts(
        tmp_path,
        text(["(1,1),(2,1),(3,1):4", f"{stamps}:5", "(1,1),(2,1),(3,1):6"], ["@timeStamps true"]),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # differences of infinite times
        rows, finding = only(path)
    assert rows == [4, 6]
    assert str(finding.code) == ("label" if stamps == "1,2,3" else "timestamps")


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    content = text()
    for cut in (3, 8):  # inside of the label or before it
        header, cases, findings = read_ts(write_ts(tmp_path, content[:-cut]))
        assert [str(finding.code) for finding in header.findings] == ["truncated"]
        assert [str(finding.code) for finding in findings] == ["truncated"]
        assert (findings[0].row, len(cases)) == (13, 3)
    header, cases, findings = read_ts(write_ts(tmp_path, content[:-1]))  # ambiguous
    assert ([str(finding.code) for finding in header.findings], len(cases), findings) == (
        ["truncated"],
        4,
        [],
    )


def test_the_cases_decide_what_the_header_forgot(tmp_path: Path) -> None:
    header, cases, findings = read_ts(
        write_ts(
            tmp_path, text(["1,2:5", "1:6", "3,4:7"], ["@univariate true", "@equalLength true"])
        )
    )
    assert (
        header.lengths,
        [case.row for case in cases],
        [str(finding.code) for finding in findings],
    ) == ((2,), [5, 7], ["length"])
    header, _, _ = read_ts(write_ts(tmp_path, text(head=["@univariate true", "@dimensions 2"])))
    assert [str(finding.code) for finding in header.findings] == ["dimensions"]


def test_unknown_keys_give_a_warning(tmp_path: Path) -> None:
    header, _, _ = read_ts(write_ts(tmp_path, text(head=[*HEAD, "@flavour <b>vanilla</b>"])))
    assert [(str(finding.code), finding.level) for finding in header.findings] == [
        ("header_syntax", "warning")
    ]
    assert "vanilla" not in header.findings[0].message


def test_lines_have_a_longest_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ts, "MAX_LINE", 1000)
    assert read_error(write_ts(tmp_path, text(["1," * 600]))).code == "resource_limit"


# --- two files


def test_train_and_test_must_agree(tmp_path: Path) -> None:
    train = ts.read_header(write_ts(tmp_path, text()))

    def differ(content: str) -> Any:
        test = ts.read_header(write_ts(tmp_path, content, "Toy_TEST.ts"))
        with pytest.raises(UserError) as caught:
            ts.check_compatible(train, test, "Toy_TEST.ts")
        assert caught.value.code == "schema_mismatch"
        assert "Toy_TEST.ts" in str(caught.value)
        return caught.value.field

    ts.check_compatible(train, ts.read_header(write_ts(tmp_path, text(ROWS[:1]), "Toy_TEST.ts")))
    assert differ(text(["1,2,3:5"], ["@equalLength true"])) == "dimensions"
    assert differ(text(["1,2:3,4:5"], [*HEAD[:5], "@equalLength true"])) == "seriesLength"
    assert differ(text(target="@classLabel true 60.5 61.5 -3 0")) == "label"
    assert differ(text(["(1,2):(1,3):4"], ["@timeStamps true"])) == "timeStamps"


def test_a_case_in_both_files_is_reported_whatever_its_label(tmp_path: Path) -> None:
    train = write_ts(tmp_path, text())
    assert ts.find_duplicates(train, write_ts(tmp_path, text(["1,2,3:4,5,7:60.5"]), "b.ts")) is None
    found = ts.find_duplicates(
        train, write_ts(tmp_path, text(["1,2,3:4,5,7:60.5", "7, 8, 9:1,1,1:0", ROWS[3]]), "b.ts")
    )
    assert found is not None
    assert (str(found.code), found.level, found.count, found.examples) == (
        "duplicate_across_splits",
        "warning",
        2,
        ("row 11", "row 12"),
    )


# --- fuzz


@pytest.mark.slow
@FUZZ
@given(data=st.data())
def test_no_file_does_more_than_refuse(tmp_path: Path, data: st.DataObject) -> None:
    stamped = text(
        ["(2013-03-01 00:00:00,4.0),(2013-03-01 01:00:00,5):(1,1),(2,2):61"] * 2,
        ["@timeStamps true"],
    )
    content = bytearray(
        data.draw(
            st.sampled_from([text(), stamped, text(target="@classLabel true 0 -3 60.5 61.5")])
        ).encode()
    )
    tokens = st.sampled_from(
        [
            b"?",
            b"nan",
            b"1e999",
            b"-",
            b":",
            b",",
            b"(",
            b")",
            b"\n",
            b"@data\n",
            b"@",
            b"#",
            b"\xff",
            b" ",
            b"9" * 40,
        ]
    )
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content)))
        content[place : place + data.draw(st.integers(0, 8))] = data.draw(
            st.one_of(tokens, st.binary(max_size=4))
        )
    path = write_ts(tmp_path, bytes(content))
    try:
        header, cases, _ = read_ts(path)
    except UserError as error:
        named = error.file
    else:
        named = str(path)
        for case in cases:
            assert len(case.channels) == header.dimensions
            assert not any(np.isinf(values).any() for values in case.channels)
            assert case.times is None or [len(t) for t in case.times] == [
                len(values) for values in case.channels
            ]
    assert named == str(path)
