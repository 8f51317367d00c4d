"""Pickles of arrays: what numpy wrote comes back, and nothing that a pickle says is run."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bitimely_core.errors import Reason, UserError
from bitimely_core.formats import pickles


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def read(folder: Path, data: bytes) -> Any:
    path = folder / "x.pkl"
    path.write_bytes(data)
    return pickles.load_pickle(path)


def find_refusal(folder: Path, data: bytes) -> Reason:
    with pytest.raises(UserError) as caught:
        read(folder, data)
    assert caught.value.file
    return caught.value.code


CONTENT = {
    "signal": {
        "wrist": {
            "BVP": np.arange(12.0).reshape(12, 1),
            "ACC": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        }
    },
    "label": np.linspace(60, 100, 5, dtype=np.float32),
    "big": np.arange(3, dtype=">i4"),
    "flags": np.array([True, False]),
    "scalar": np.float64(1.5),
    "subject": "S1",
    "list": [1, (2, None), 2**70, 1.25, True, b"\x00\xff", "\u00e9"],
}


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_what_numpy_wrote_comes_back(tmp_path: Path, protocol: int) -> None:
    found = read(tmp_path, pickle.dumps(CONTENT, protocol=protocol))
    np.testing.assert_equal(found, CONTENT)
    assert found["big"].dtype == np.dtype(">i4")
    assert type(found["signal"]["wrist"]["BVP"]) is np.ndarray


def test_the_names_of_old_numpy_and_the_texts_of_python_2(tmp_path: Path) -> None:
    raw = np.arange(4.0).tobytes().decode("latin-1").encode("latin-1")
    old = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01K\x04\x85cnumpy\ndtype\nU\x02f8K\x00K\x01\x87R"
    old += b"(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x20" + raw + b"tb."
    np.testing.assert_array_equal(read(tmp_path, old), np.arange(4.0))
    assert read(tmp_path, b"\x80\x02U\x02\xe9a.") == "\u00e9a"


def payloads() -> dict[str, bytes]:
    record = np.zeros(1, dtype=[("a", "f8"), ("o", "O")])
    mark = "open('PWNED', 'w')"
    return {
        "system": pickle.dumps({"x": Call(os.system, "touch PWNED")}),
        "exec": pickle.dumps(Call(exec, mark)),
        "open": pickle.dumps([Call(open, "PWNED", "w")], protocol=2),
        "getattr": pickle.dumps(Call(getattr, "x", "upper")),
        "other name of numpy": b"cnumpy\nload\n(S'x.npy'\ntR.",
        "dotted name": b"\x80\x04\x8c\x05numpy\x8c\x11ndarray.__class__\x93.",
        "instance": b"(ios\nsystem\n(S'touch PWNED'\no.",
        "new object": b"\x80\x02cnumpy\nndarray\n)\x81.",
        "persistent": b"Pname\n.",
        "extension": b"\x80\x02\x82\x01.",
        "state of a name": b"\x80\x02cnumpy\nndarray\n}U\x01aK\x01sb.",
        "state in slots of a name": b"\x80\x02c_codecs\nencode\nN}U\x04nameU\x01xs\x86b.",
        "call of a text": b"U\x01a)R.",
        "call of a result": pickle.dumps(CONTENT["label"], protocol=2)[:-1] + b")R.",
        "other codec": b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.",
        "object array": pickle.dumps(np.array([None, {}], dtype=object), protocol=2),
        "structured array": pickle.dumps(record, protocol=2),
        "object scalar": b"\x80\x02cnumpy.core.multiarray\nscalar\ncnumpy\ndtype\nU\x02O8K\x00K\x01\x87RU\x01x\x86R.",
        "nested keys": b"\x80\x02}))\x86K\x01s.",
        "a name alone": b"cnumpy\nndarray\n.",
        "set": pickle.dumps({1, 2}, protocol=4),
    }


@pytest.mark.parametrize("name", payloads())
def test_nothing_else_is_read_and_nothing_runs(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_refusal(tmp_path, payloads()[name]) == Reason.UNSAFE_PICKLE
    assert os.listdir(tmp_path) == ["x.pkl"]  # noqa: PTH208


def test_the_names_are_what_they_were_after_attempts_to_change_them(tmp_path: Path) -> None:
    for data in payloads().values():
        find_refusal(tmp_path, data)
    np.testing.assert_equal(read(tmp_path, pickle.dumps(CONTENT, protocol=2)), CONTENT)
    assert sorted({name for _, name in pickles.NAMES}) == [
        "_reconstruct",
        "dtype",
        "encode",
        "ndarray",
        "scalar",
    ]
    assert len(pickles.NAMES) == 7


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"x.",  # bytes of a terabyte
        b"\x80\x02K\x01r\xff\xff\xff\x7f.",  # a table of two thousand million places
        b"\x80\x02" + b"(" * 100_000 + b"l" * 100_000 + b".",
        b"\x80\x02]" + b"q\x00h\x00h\x00\x86" * 1000 + b".",
    ],
)
def test_small_pickles_stay_small(tmp_path: Path, data: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(UserError):
        read(tmp_path, data)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_a_list_in_itself_and_one_in_two_places(tmp_path: Path) -> None:
    one: list[Any] = [1]
    found = read(tmp_path, pickle.dumps({"a": one, "b": one}))
    assert found["a"] is found["b"]
    one.append(one)
    found = read(tmp_path, pickle.dumps(one))
    assert found[1] is found


def test_every_truncation_is_reported(tmp_path: Path) -> None:
    data = pickle.dumps(CONTENT, protocol=2)
    codes = {find_refusal(tmp_path, data[:n]) for n in range(0, len(data), 7)}
    assert codes <= {Reason.TRUNCATED, Reason.CORRUPT, Reason.EMPTY_FILE, Reason.UNSAFE_PICKLE}
    assert find_refusal(tmp_path, data[: len(data) // 2]) == Reason.TRUNCATED


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x80\x02\x8b\xff\xff\xff\xff.", Reason.CORRUPT),  # an integer of -1 bytes
        (b"\x80\x02S'abc\n.", Reason.CORRUPT),  # a text whose quote is not closed
        (b"\x80\x04\x95\x20\0\0\0\0\0\0\0K\x01.", Reason.TRUNCATED),  # 32 bytes announced, 3 there
        # the frame ends within a length
        (b"\x80\x04\x95\x02\0\0\0\0\0\0\0B\x09\0\0\0.", Reason.TRUNCATED),
    ],
)
def test_damage_and_a_file_that_was_cut_have_codes_of_their_own(
    tmp_path: Path, data: bytes, code: Reason
) -> None:
    assert find_refusal(tmp_path, data) == code


@pytest.mark.slow
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=6))
def test_whatever_the_bytes_only_user_errors(
    tmp_path: Path, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(pickle.dumps(CONTENT, protocol=2))
    for place, byte in changes:
        data[place % len(data)] = byte
    with contextlib.suppress(UserError):
        read(tmp_path, bytes(data))


def test_what_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.pkl"):
        with pytest.raises(UserError) as caught:
            pickles.load_pickle(path)
        assert caught.value.code == Reason.IO_ERROR
