"""Fuzzes the readers of foreign files: whatever the bytes, a reader returns or raises UserError,
within a second and in bounded memory.

    python tests/fuzz.py edf-header edf-annotations wfdb-header ts table pickle archive matlab
    claims claims-parquet recipe record manifest --seconds 60

Coverage decides what is mutated where `atheris` is installed (extra `fuzz`, Linux), chance alone
where it is not. Seeds are made here; real samples are added where BITIMELY_TEST_DATA has them. A
target that fails leaves its input as `fuzz/<target>/crash-*`; give that file's name in the place of
the target's to run it again: `python tests/fuzz.py ts --file fuzz/ts/crash-0123`. Findings become
tests of the reader.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pickle
import random
import subprocess
import sys
import tarfile
import tempfile
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

instrumented: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
try:
    import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    atheris = None
else:
    sys.modules.pop("pickle", None)  # its reader is ours too: `pickles` interprets opcodes by it
    instrumented = atheris.instrument_imports(include=["bitimely_core", "pickle"])

with instrumented:
    import fuzz_stored

    from bitimely_core.errors import Finding, UserError
    from bitimely_core.formats import (
        archives,
        edf,
        edf_writer,
        matlab,
        pickles,
        tables,
        ts,
        wfdb,
        wfdb_header,
    )
    from bitimely_core.formats.edf_annotations import parse_tals
    from bitimely_core.formats.edf_header import FIELDS, SIGNAL_FIELDS, EdfChannel, parse_header
    from bitimely_core.formats.source import scan_folder
    from bitimely_core.types import Annotation

DATA = Path(os.environ.get("BITIMELY_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
LONGEST = 4096  # bytes of an input
SECONDS = 1.0  # of CPU time an input
MEMORY = 256  # bytes a byte of input, beside
SPARE = 8 << 20  # bytes; a header file is read into 4 MiB
CALLS = {
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.remove",
    "subprocess.Popen",
    "socket.connect",
    "pickle.find_class",
    "exec",
    "compile",
}
PIECES = [
    b"",
    b"-1",
    b"0",
    b"nan",
    b"inf",
    b"1e999",
    b"9999",
    b"99999999",
    b"\xff" * 8,
    b"\0" * 40,
    b"\x14",
    b"\x15",
    b"\x14\0",
    b"+",
    b"\n",
    b'"',
]

watched: list[str] = []  # events of CALLS in `refuse_calls`
watching = False


def note(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook: what the bytes of a file made the interpreter do."""
    if watching and event in CALLS:
        watched.append(event)


@contextlib.contextmanager
def refuse_calls() -> Iterator[None]:
    """Raise AssertionError where the block calls anything of CALLS, whatever comes of it."""
    global watching
    watched.clear()
    watching = True
    try:
        yield
    finally:
        watching = False
        assert not watched, f"the file reached {watched}"


class Target(NamedTuple):
    """What is done with an input in a folder, the inputs to begin with, and files that lie
    beside.
    """

    run: Callable[[bytes, Path], object]
    seeds: Callable[[], Iterator[bytes]]
    sample: str = ""  # glob of real samples
    work: int = 1  # times the limits of time and memory: 1 is a parser, more a complete verb


# --- EDF

CHANNELS = [
    EdfChannel("EEG Fpz-Cz", "uV", -192.0, 192.0, -2048, 2047, 10),
    EdfChannel("Temp rectal", "DegC", 34.0, 40.0, -2849, 2731, 1),
]
NOTES = [
    Annotation(0.0, 30.0, "Sleep stage W"),
    Annotation(1.5, 0.0, "Lights off"),
    Annotation(2.0, 1.0, "é <b>"),
]


def recordings() -> Iterator[bytes]:
    """Plain, with annotations, with a gap, annotations alone."""
    samples = [np.arange(4 * channel.samples, dtype=np.int16) for channel in CHANNELS]
    yield edf_writer.encode_edf(CHANNELS, samples)
    yield edf_writer.encode_edf(CHANNELS, samples, notes=NOTES)
    yield edf_writer.encode_edf(CHANNELS, samples, notes=NOTES, onsets=[0.0, 1.0, 5.0, 6.0])
    yield edf_writer.encode_edf([], [], notes=NOTES)
    bdf = bytearray(edf_writer.encode_edf(CHANNELS[1:], [np.zeros(4, np.int16)]) + b"\0\0\0\0")
    bdf[:8] = b"\xffBIOSEMI"
    yield bytes(bdf)


def edf_header(data: bytes, folder: Path) -> None:
    """A complete file, and its header as that of a file of any size, which must not cost memory."""
    path = folder / "x"
    path.write_bytes(data)
    for size in (len(data), 1 << 40):
        with contextlib.suppress(UserError):
            header = parse_header(data, size, required=("EEG Fpz-Cz",))
            assert header.size + header.records * header.record_bytes <= size
    recording = edf.read_recording(path)
    assert sum(signal.samples.size for signal in recording.signals) * recording.header.width <= len(
        data
    )
    assert all(
        np.isfinite([s.rate, s.scale, s.offset, s.onset]).all() and s.rate > 0
        for s in recording.signals
    )


def lists() -> Iterator[bytes]:
    """Blocks of time-stamped annotation lists."""
    yield b"+0\x14\x14\0\0\0\0"
    yield b"+0\x14\x14\0+1.5\x1530\x14Sleep stage W\x14\0-2\x14a\x14b\x14\0"
    yield b"".join(
        f"+{i}\x14\x14\0".encode().ljust(24, b"\0") + "é".encode().ljust(24, b"\0")
        for i in range(4)
    )
    yield b"".join(f"+{i}\x14\x14\0+{i}.5\x14N{i}\x14".encode().ljust(48, b"\0") for i in range(9))


def edf_annotations(data: bytes, folder: Path) -> None:
    """One block by itself; and records of 48 bytes in two annotation signals beside an ordinary
    one.
    """
    with contextlib.suppress(UserError):
        found = parse_tals(data)
        assert all(
            np.isfinite(onset) and (duration is None or duration >= 0)
            for onset, duration, _ in found
        )
    rows = np.frombuffer(data.ljust(-(-max(len(data), 1) // 48) * 48, b"\0"), np.uint8).reshape(
        -1, 48
    )
    body = np.concatenate([np.zeros((len(rows), 2), np.uint8), rows], axis=1)
    names = (
        "label",
        "physical_min",
        "physical_max",
        "digital_min",
        "digital_max",
        "samples_per_record",
    )
    signals = [("EEG", "-1", "1", "-2048", "2047", "1")] + [
        ("EDF Annotations", "-1", "1", "-32768", "32767", "12")
    ] * 2
    fields = {
        "version": "0",
        "reserved": "EDF+C",
        "header_bytes": "1024",
        "n_records": str(len(rows)),
        "record_duration": "1",
        "n_signals": "3",
    }
    table = dict(zip(names, zip(*signals, strict=True), strict=True))
    text = "".join(fields.get(name, "").ljust(width) for name, width in FIELDS)
    text += "".join(
        value.ljust(width) for name, width in SIGNAL_FIELDS for value in table.get(name, ("",) * 3)
    )
    path = folder / "x"
    path.write_bytes(text.encode() + body.tobytes())
    recording = edf.read_recording(path)
    assert sum(len(signal.samples) for signal in recording.signals) == len(rows)
    assert all(np.isfinite([note.onset, note.duration]).all() for note in recording.annotations)


# --- WFDB


def headers() -> Iterator[bytes]:
    """One file, two files, frames of several samples, segments of both layouts, the shortest that
    there is.
    """
    yield b"r 2 100 40\nr.dat 16 1000.0(0)/mV 16 0 0 780 0 I\nr.dat 16 1000(0)/mV 16 0 0 780 0 II\n# Name: Doe\n"
    yield b"r 3 360/360(0) 20 12:00:00.5 01/02/1999\nr.dat 16x2:1+0 200 12 0 0 0 0 I\nr.dat 16\ns.dat 212 0/uV 12 1024 5 -7 0 V1\n"
    yield b"r/3 1 100 30\nr1 10\n~ 10\nr1 10\n"
    yield b"r/2 2 100 10 0:0:0\nr0 0\nr1 10\n"
    yield b"r 1\nr.dat 80\n"
    yield "r 4 1e2 5 05-May-2020\nr.dat 8 1 8 0 3 4 0 é\ns.dat 310\nf.flac 516 100 16\nsub/x.dat 32+4 1e-3(-5)/NU\n".encode()


SEGMENT = b"r1 1 100 10\nr.dat 16 200 16 0 0\n"
LAYOUT = b"r0 1 100 0\n~ 0 200 16 0 0 0 0 I\n"
SAMPLES = np.repeat(np.arange(40, dtype="<i2"), 2).tobytes()


def read_wfdb(data: bytes, folder: Path) -> None:
    """The text by itself, and the record that it makes of the files beside it."""
    beside = {
        "r.dat": SAMPLES,
        "s.dat": SAMPLES[:90],
        "r1.hea": SEGMENT,
        "r0.hea": LAYOUT,
        "f.flac": b"fLaC" + bytes(60),
    }
    for name, content in beside.items():
        if not (folder / name).exists():
            (folder / name).write_bytes(content)
    with contextlib.suppress(UserError):
        found = wfdb_header.parse_header(data, "r", required=("I",))
        assert all(
            np.isfinite([c.scale, c.offset]).all() and c.samples > 0 for _, _, _, c in found.signals
        )
        assert found.frames is None or found.frames > 0
    (folder / "r.hea").write_bytes(data)
    recording = wfdb.read_recording("r", scan_folder(folder))
    assert all(
        len(signal.samples) and signal.rate > 0 and np.isfinite([signal.scale, signal.offset]).all()
        for signal in recording.signals
    )


# --- text


def problems() -> Iterator[bytes]:
    """Regression, classes, timestamps, series of unequal length."""
    head = "@problemName Toy\n@timeStamps {}\n@missing true\n@univariate false\n@dimensions 2\n@equalLength {}\n"
    rows = "1,2,3:4,?,6:{0}\n7,8,9:1,1,1:{0}\n\n# no case\n-1,.5,1e2:0,0,0:{0}\n"
    yield (
        head.format("false", "true")
        + "@seriesLength 3\n@targetlabel true\n@data\n"
        + rows.format("60.5")
    ).encode()
    yield (
        head.format("false", "false")
        + "@classLabel true a b\n@data\n"
        + rows.format("a")
        + "1:2:b\n"
    ).encode()
    yield (
        head.format("true", "false")
        + "@classLabel false\n@data\n(2013-03-01 00:00:00,4.0),(2013-03-02,5):(1,2)\n(1,2),(2,3):(1,1)\n"
    ).encode()
    yield b"\xef\xbb\xbf@univariate true\r\n@TARGETLABEL TRUE\r\n@data\r\n1,2:3"


def ts_file(data: bytes, folder: Path) -> None:
    """Header and cases: one item a line of data; and the comparison of two files."""
    path = folder / "x.ts"
    path.write_bytes(data)
    header = ts.read_header(path)
    items = list(ts.read_cases(path, header))
    assert (
        sum(not isinstance(item, Finding) or item.row is not None for item in items) == header.cases
    )
    for case in items:
        if not isinstance(case, Finding):
            assert len(case.channels) == header.dimensions
            assert not any(np.isinf(values).any() for values in case.channels)
    ts.check_compatible(header, header)
    ts.find_duplicates(path, path)


def csvs() -> Iterator[bytes]:
    """Quotes, line breaks in cells, other line ends, gzip."""
    import gzip

    plain = b'id,x,"a ""b"""\r\n1,2.5,"two\nlines"\n2,nan,\n"3",1e400,z\n'
    yield plain
    yield b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n") + b'4,"open\n'
    yield b"id;x\n1;2\n1;2\n1;3\n2;4\n5;6\n7;8"
    yield gzip.compress(plain, mtime=0)


def table(data: bytes, folder: Path) -> None:
    """As many items as records, with and without a key; cells as numbers."""
    path = folder / "x.csv"
    path.write_bytes(data)
    names = tables.read_names(path)
    count = len(list(tables.read_rows(path)))
    for key in ((), names[:1]):
        items = list(tables.read_rows(path, key=key))
        assert len(items) == count
        for row in items:
            if isinstance(row, tables.TableRow):
                assert len(row.cells) == len(names)
                tables.parse_numbers(row, names)


# --- pickles


def arrays() -> Iterator[bytes]:
    """Containers of arrays in every protocol, as old and new numpy name them; and calls that must
    not happen.
    """
    content = {
        "signal": {
            "ACC": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
            "BVP": np.arange(3.0),
        },
        "label": np.float32(1.5),
        "list": [1, (2, None), 2**70, b"\xff", "é"],
    }
    for protocol in range(6):
        raw = pickle.dumps(content, protocol=protocol)
        yield raw
        if protocol < 3:
            yield raw.replace(b"numpy._core", b"numpy.core")
    yield b"cos\nsystem\n(S'true'\ntR."
    yield b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R."


def pickle_file(data: bytes, folder: Path) -> None:
    """Nothing is called."""
    path = folder / "x.pkl"
    path.write_bytes(data)
    with refuse_calls():
        pickles.load_pickle(path)


# --- archives


def packed_files() -> Iterator[bytes]:
    """A zip archive, a tar archive plain and compressed; one with a link and a path that leads
    out.
    """
    for mode in ("w", "w:gz"):
        raw = io.BytesIO()
        with tarfile.open(
            fileobj=raw, mode=mode, format=tarfile.PAX_FORMAT if mode == "w" else tarfile.GNU_FORMAT
        ) as archive:  # type: ignore[call-overload]
            for name in ("set-a/1.txt", f"set-a/{'2' * 120}.txt"):
                info = tarfile.TarInfo(name)
                info.size = 30
                archive.addfile(info, io.BytesIO(b"Time,Parameter,Value\n00:00,A,1"))
            link = tarfile.TarInfo("out")
            link.type, link.linkname = tarfile.SYMTYPE, "../.."
            if mode == "w":
                archive.addfile(link)
        yield raw.getvalue()
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("Z/Z001.txt", "12\n" * 50)
        packed.writestr("Z002.txt", "7")
    yield raw.getvalue()


def archive_file(data: bytes, folder: Path) -> None:
    """Every file has the size that was announced, and nothing is written."""
    path = folder / "x.zip"
    path.write_bytes(data)
    for name, _ in archives.read_members(path):
        assert not name.startswith("/")
        assert ".." not in name.split("/")
    assert [one.name for one in folder.iterdir()] == ["x.zip"]


# --- MATLAB


def matrices() -> Iterator[bytes]:
    """Arrays plain and compressed, in both byte orders; what is not read beside one."""
    import scipy.io

    content = {
        "sig": np.arange(12.0).reshape(3, 4),
        "t": "text",
        "c": np.array([1, "a"], object),
        "s": {"x": 1},
        "i": np.arange(3, dtype="i2"),
    }
    for packed in (False, True):
        raw = io.BytesIO()
        scipy.io.savemat(raw, content, do_compression=packed)
        yield raw.getvalue()
    yield raw.getvalue()[:126] + b"MI" + raw.getvalue()[128:]


def matlab_file(data: bytes, folder: Path) -> None:
    """By name and as the only array; nothing is called."""
    path = folder / "x.mat"
    path.write_bytes(data)
    with refuse_calls():
        for name in ("sig", "i", ""):
            with contextlib.suppress(UserError):
                assert matlab.read_array(path, name).nbytes <= 200 * len(data) + (1 << 26)


TARGETS = {
    "edf-header": Target(edf_header, recordings, "**/*.edf"),
    "edf-annotations": Target(edf_annotations, lists),
    "wfdb-header": Target(read_wfdb, headers, "**/*.hea"),
    "ts": Target(ts_file, problems, "**/*.ts"),
    "table": Target(table, csvs, "esr/*.csv"),
    "pickle": Target(pickle_file, arrays),
    "matlab": Target(matlab_file, matrices, "complete/ieee-spc2015/TrueBPM/*.mat", work=4),
    "archive": Target(archive_file, packed_files, work=4),
    "claims": Target(fuzz_stored.claims_tables, fuzz_stored.list_sources, work=10),
    "claims-parquet": Target(fuzz_stored.claims_parquet, fuzz_stored.list_parquets, work=10),
    "recipe": Target(fuzz_stored.recipe, fuzz_stored.list_recipes, work=10),
    "record": Target(fuzz_stored.records, fuzz_stored.list_records),
    "manifest": Target(fuzz_stored.manifests, fuzz_stored.list_manifests, work=10),
}


def seeds(name: str) -> list[bytes]:
    """What a target begins with; files that are too long are cut."""
    found = list(TARGETS[name].seeds())
    samples = (
        sorted(DATA.glob(TARGETS[name].sample)) if TARGETS[name].sample and DATA.is_dir() else []
    )
    by_folder = {path.parent: path for path in samples if path.is_file()}  # one a folder
    for path in by_folder.values():
        with path.open("rb") as file:
            found.append(file.read(LONGEST))
    return found


def check(name: str, data: bytes, folder: Path) -> None:
    """Run a target on one input. Raises whatever but UserError it raises, and AssertionError beyond
    the limits.
    """
    tracemalloc.start()  # once: to stop and start again leaks
    tracemalloc.reset_peak()
    held = tracemalloc.get_traced_memory()[0]
    began = time.process_time()
    with contextlib.suppress(UserError):
        TARGETS[name].run(data, folder)
    spent = time.process_time() - began
    peak = tracemalloc.get_traced_memory()[1] - held
    assert spent < SECONDS * TARGETS[name].work, f"{spent:.2f} s of CPU time for {len(data)} bytes"
    assert peak < SPARE * TARGETS[name].work + MEMORY * len(data), (
        f"{peak} bytes of memory for {len(data)}"
    )


def warm(name: str) -> None:
    """Run the seeds unwatched: modules that are imported late are not the input's doing."""
    with tempfile.TemporaryDirectory() as folder:
        for data in TARGETS[name].seeds():
            with contextlib.suppress(UserError):
                TARGETS[name].run(data, Path(folder))
    "".encode("raw-unicode-escape")
    sys.addaudithook(note)


def mutate(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """A few random edits: overwritten, inserted, cut out, copied from elsewhere or from another
    input.
    """
    raw = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        place, length = rng.randint(0, len(raw)), rng.choice((0, 1, 2, 4, 8, 16, 80, 256))
        other = rng.choice(others)
        start = rng.randint(0, len(other))
        piece = rng.choice(
            (rng.choice(PIECES), rng.randbytes(length), other[start : start + length])
        )
        raw[place : place + rng.choice((0, len(piece), length))] = piece
    return bytes(raw[:LONGEST])


def by_chance(name: str, seconds: float, out: Path, rng: random.Random) -> int:
    """Mutate the seeds until the time is up; the number of inputs. A failing one is saved, and its
    error raised.
    """
    known = seeds(name)
    end = time.monotonic() + seconds
    done = 0
    with tempfile.TemporaryDirectory() as folder:
        queue = iter(known)
        while done < len(known) or time.monotonic() < end:
            data = next(queue, None) if done < len(known) else None
            data = mutate(rng.choice(known), known, rng) if data is None else data
            try:
                check(name, data, Path(folder))
            except BaseException:
                out.mkdir(parents=True, exist_ok=True)
                (out / f"crash-{sha256(data).hexdigest()[:16]}").write_bytes(data)
                raise
            done += 1
    return done


def by_coverage(name: str, seconds: float, out: Path) -> None:
    """libFuzzer, which ends the process; the inputs that reached something new stay in
    `out`/corpus.
    """
    corpus = out / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for data in seeds(name):
        (corpus / sha256(data).hexdigest()[:16]).write_bytes(data)
    folder = tempfile.mkdtemp()  # of a process that has no end of its own
    flags = {
        "max_total_time": int(seconds),
        "max_len": LONGEST,
        "timeout": 60,
        "rss_limit_mb": 1024,
        "artifact_prefix": f"{out}/",
        "print_final_stats": 1,
    }
    atheris.Setup(
        [sys.argv[0], *(f"-{key}={value}" for key, value in flags.items()), str(corpus)],
        lambda data: check(name, data, Path(folder)),
    )
    atheris.Fuzz()


def main() -> int:
    """One target in this process, several in one process each; 0 when nothing was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], help="default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each target")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("fuzz"),
        help="folder for inputs that fail, and for the corpora",
    )
    parser.add_argument("--file", type=Path, help="run one target on this input alone")
    parser.add_argument("--seed", type=int, default=0, help="without atheris")
    given = parser.parse_args()
    names = given.targets or list(TARGETS)
    if given.file:
        warm(names[0])
        with tempfile.TemporaryDirectory() as folder:
            check(names[0], given.file.read_bytes(), Path(folder))
        print(f"{names[0]}: nothing wrong with {given.file}")
        return 0
    if len(names) > 1:
        command = [
            sys.executable,
            __file__,
            "--seconds",
            str(given.seconds),
            "--out",
            str(given.out),
            "--seed",
            str(given.seed),
        ]
        return max(subprocess.run([*command, name], check=False).returncode != 0 for name in names)
    warm(names[0])
    out = given.out / names[0]
    if atheris is not None:
        by_coverage(names[0], given.seconds, out)
    done = by_chance(names[0], given.seconds, out, random.Random(given.seed))
    print(f"{names[0]}: {done} inputs by chance (atheris is not installed), nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
