"""Packed tables, as claims, DE-SynPUF samples and PheCode maps come in: refused or read in place by
one rule, never a crash, never a file.
"""

from __future__ import annotations

import gzip
import io
import random
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from bitimely_cli.main import main
from bitimely_core.claims import map_files, phecode_maps
from bitimely_core.errors import UserError
from bitimely_core.formats import archives, table_text

MAP = b"icd9,phecode\n001,008\n250.00,250.2\n"
SAMPLE = "DE1_0_2008_to_2010_Carrier_Claims_Sample_1A"


def pack_zip(**members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name.replace("__", "."), content)
    return out.getvalue()


def pack_tar(*items: tuple[str, bytes, str], mode: str = "w:gz", pax: str = "") -> bytes:
    """Items are (name, content or target of a link, type)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode, format=tarfile.PAX_FORMAT) as bundle:  # type: ignore[call-overload]
        for name, content, kind in items:
            info = tarfile.TarInfo(name)
            info.type = kind.encode()
            info.pax_headers = {"comment": pax} if pax else {}
            if kind == "0":
                info.size = len(content)
            else:
                info.linkname = content.decode()
            bundle.addfile(info, io.BytesIO(content))
    return out.getvalue()


def patch(data: bytes, signature: bytes, offset: int, value: bytes) -> bytes:
    """`data` with `value` at an offset of each record that begins with `signature`."""
    at, out = data.find(signature), bytearray(data)
    while at >= 0:
        out[at + offset : at + offset + len(value)] = value
        at = data.find(signature, at + 1)
    return bytes(out)


GOOD = pack_zip(m__csv=MAP)
LOCAL, CENTRAL = b"PK\x03\x04", b"PK\x01\x02"
BAD_ZIPS = {
    "encrypted": patch(patch(GOOD, LOCAL, 6, b"\x01"), CENTRAL, 8, b"\x01"),
    "patched": patch(patch(GOOD, LOCAL, 6, b"\x20"), CENTRAL, 8, b"\x20"),
    "strongly encrypted": patch(patch(GOOD, LOCAL, 6, b"\x40"), CENTRAL, 8, b"\x40"),
    "of a later version": patch(GOOD, CENTRAL, 6, b"\xff\x00"),
    "of a later method": patch(patch(GOOD, LOCAL, 8, b"\x63"), CENTRAL, 10, b"\x63"),
    "lzma": patch(patch(GOOD, LOCAL, 8, b"\x0e"), CENTRAL, 10, b"\x0e"),
    "of a name that is no UTF-8": patch(
        patch(GOOD, CENTRAL, 8, b"\x00\x08"), CENTRAL, 46, b"\xff\xfe"
    ),
    "without a central directory": GOOD[:40],
    "with a damaged central directory": patch(GOOD, CENTRAL, 0, b"PK??"),
    "of another place": patch(GOOD, CENTRAL, 42, b"\xff\xff\xff\x7f"),
    "of another checksum": patch(patch(GOOD, LOCAL, 14, b"\1\2\3\4"), CENTRAL, 16, b"\1\2\3\4"),
    "of two tables": pack_zip(a__csv=MAP, b__csv=MAP),
    "empty": pack_zip(),
}


def read_as_text(path: Path) -> object:
    return list(table_text.read_blocks(path))


def read_as_map(path: Path) -> object:
    return phecode_maps.read_map([path])


@pytest.mark.parametrize("read", [read_as_text, read_as_map])
@pytest.mark.parametrize("kind", BAD_ZIPS)
def test_zip_archives_that_cannot_be_read_are_refused(
    kind: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / "m.zip"
    path.write_bytes(BAD_ZIPS[kind])
    with pytest.raises(UserError) as caught:
        read(path)
    assert caught.value.exit_code == 4
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", BAD_ZIPS)
def test_samples_of_de_synpuf_that_cannot_be_unpacked_are_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "raw"
    source.mkdir()
    (source / f"{SAMPLE}.zip").write_bytes(BAD_ZIPS[kind])
    (tmp_path / "map.csv").write_bytes(MAP)
    code = main(
        [
            "ingest",
            "pophr",
            str(source),
            "--source",
            "synpuf",
            "--phecode-map",
            str(tmp_path / "map.csv"),
            "-w",
            str(tmp_path / "ws"),
        ]
    )
    err = capsys.readouterr().err
    assert code == 4, err
    assert f"{SAMPLE}.zip" in err or "no_input" in err
    assert "internal" not in err
    assert [path.name for path in tmp_path.rglob("*.csv")] == ["map.csv"]


@pytest.mark.parametrize("name", ["../../m.csv", "/absent/m.csv", "C:\\m.csv", "a/../../m.csv"])
def test_names_of_members_lead_nowhere(name: str, tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    for path, data in (
        (inner / "m.zip", pack_zip(**{name: MAP})),
        (inner / "m.tar.gz", pack_tar((name, MAP, "0"))),
    ):
        path.write_bytes(data)
        assert read_as_map(path).tables["icd9"]["001"] == ("008",)  # type: ignore[attr-defined]
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"m.zip", "m.tar.gz"}


LINK, HARD, FIFO, DEVICE = "2", "1", "6", "3"


@pytest.mark.parametrize(
    "items",
    [
        [("m.csv", b"/etc/passwd", LINK)],
        [("m.csv", b"../../secret.csv", HARD)],
        [("m.csv", b"", FIFO)],
        [("m.csv", b"", DEVICE)],
        [("m.csv", b"m.csv", LINK)],
    ],
)
def test_only_plain_files_of_a_tar_archive_are_tables(
    items: list[tuple[str, bytes, str]], tmp_path: Path
) -> None:
    path = tmp_path / "m.tar.gz"
    path.write_bytes(pack_tar(*items))
    with pytest.raises(UserError, match="holds no map table"):
        read_as_map(path)
    # a link of the same name does not take the place of the file
    path.write_bytes(pack_tar(("m.csv", MAP, "0"), *items))
    assert read_as_map(path).tables["icd9"]["001"] == ("008",)  # type: ignore[attr-defined]


def test_bombs_end_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_files, "MAX_BYTES", 1 << 21)
    zeros = bytes(1 << 23)
    for name, data in {
        "table.csv.gz": gzip.compress(zeros),
        "table.zip": pack_zip(m__csv=zeros),
        "table.tar.gz": pack_tar(("other.bin", zeros, "0"), ("m.csv", MAP, "0")),
        "comment.tar.gz": pack_tar(("m.csv", MAP, "0"), pax="x" * (1 << 23)),
    }.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(UserError) as caught:
            read_as_map(path)
        assert caught.value.code == "expansion_limit", name


def test_any_damage_of_an_archive_is_one_error(tmp_path: Path) -> None:
    rng = random.Random(0)
    tar = gzip.decompress(pack_tar(("m.csv", MAP, "0"), ("n", b"m.csv", LINK), pax="x"))
    for name, data, reads in (
        ("m.zip", GOOD, (read_as_text, read_as_map)),
        ("m.tar", tar[:4096], (read_as_map,)),
    ):
        path = tmp_path / name
        for _ in range(400):
            broken = bytearray(data)
            for _ in range(rng.choice([1, 1, 2, 8])):
                broken[rng.randrange(len(broken))] = rng.choice([0, 0xFF, 0x7F, rng.randrange(256)])
            path.write_bytes(
                broken[: rng.choice([len(broken), len(broken), rng.randrange(len(broken))])]
            )
            for read in reads:
                with suppress(UserError):
                    read(path)


@pytest.mark.parametrize(
    "dataset", ["sleep-edf", "ptb-xl", "epilepsy", "ppg-dalia", "generic", "ts", "pophr"]
)
@pytest.mark.parametrize("name", ["d.zip", "d.tar", "d.tar.gz", "d.gz"])
def test_an_archive_in_the_place_of_a_folder_is_refused(
    dataset: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "raw" / name
    path.parent.mkdir()
    path.write_bytes(
        pack_tar(("../../evil.txt", b"x", "0"))
        if "tar" in name
        else pack_zip(**{"../../evil.txt": b"x"})
    )
    assert main(["ingest", dataset, str(path), "-w", str(tmp_path / "ws")]) in {2, 4}
    assert "internal" not in capsys.readouterr().err
    assert not list(tmp_path.rglob("evil.txt"))
    assert not (tmp_path.parent / "evil.txt").exists()


def pack_members(mode: str, *members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def make_special(name: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "../../etc"
    return info


def test_files_of_an_archive_are_read_in_their_order(tmp_path: Path) -> None:
    members = {"set-a/2.txt": b"two", "set-a/1.txt": b"", "__MACOSX/set-a/._1.txt": b"x"}
    named = [(tarfile.TarInfo(name), content) for name, content in members.items()]
    raws = [pack_zip(**members), *(pack_members(mode, *named) for mode in ("w", "w:gz"))]
    for raw in raws:
        (tmp_path / "x").write_bytes(raw)
        assert list(archives.read_members(tmp_path / "x")) == [
            ("set-a/2.txt", b"two"),
            ("set-a/1.txt", b""),
        ]


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (lambda: pack_members("w", (tarfile.TarInfo("../evil.txt"), b"x")), "path_escape"),
        (lambda: pack_members("w:gz", (tarfile.TarInfo("/evil.txt"), b"x")), "path_escape"),
        (lambda: pack_zip(**{"a/../../evil.txt": b"x"}), "path_escape"),
        (
            lambda: pack_members("w", (make_special("out", tarfile.SYMTYPE), b"")),
            "unsupported_format",
        ),
        (
            lambda: pack_members("w", (make_special("out", tarfile.LNKTYPE), b"")),
            "unsupported_format",
        ),
        (
            lambda: pack_members("w", (make_special("out", tarfile.CHRTYPE), b"")),
            "unsupported_format",
        ),
        (
            lambda: pack_members(
                "w:gz", (tarfile.TarInfo("a"), b"x"), (tarfile.TarInfo("a"), b"y")
            ),
            "duplicate_key",
        ),
        (lambda: pack_zip(zeros=bytes(200 << 20)), "expansion_limit"),
        (lambda: gzip.compress(bytes(200 << 20), 1), "expansion_limit"),
        (
            lambda: pack_members(
                "w:gz", *((tarfile.TarInfo(f"{i}"), bytes(16 << 20)) for i in range(6))
            ),
            "expansion_limit",
        ),
        (
            lambda: pack_members("w:gz", (tarfile.TarInfo("a"), random.Random(0).randbytes(5000)))[
                :-2000
            ],
            "truncated",
        ),
        (lambda: b"", "empty_file"),
        (lambda: b"no archive at all", "corrupt"),
    ],
)
def test_archives_that_lead_elsewhere_or_swell_are_refused(
    tmp_path: Path, raw: Callable[[], bytes], code: str
) -> None:
    (tmp_path / "x.zip").write_bytes(raw())
    with pytest.raises(UserError) as caught:
        list(archives.read_members(tmp_path / "x.zip"))
    assert (str(caught.value.code), caught.value.exit_code) == (code, 4)
    assert "x.zip" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["x.zip"]
