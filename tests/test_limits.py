"""Every verb under limits of memory, open files, file sizes and threads ends with 0 or 6, never with a defect, a blamed file or an abort.

A process in which the libraries are loaded forks a child for each run; the child sets its limit, for memory above what it holds already.
`python tests/test_limits.py sweep STEP [VERB...]` runs all of it and prints how the runs ended.
"""

from __future__ import annotations

import collections
import ctypes
import importlib
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
HOME = HERE / "fixtures" / "v1" / "home"
SECONDS = 120  # a run that takes longer has hung
SMALL = ["--preset", "tiny", "--batch-size", "4", "--steps", "2", "--device", "cpu", "--set", "model.layers=2"]
RECIPE = """
title = "limits"
[pretrain]
preset = "tiny"
data = "generic/classification"
steps = 1
[finetune]
data = ["generic/classification"]
fraction = 1.0
steps = 1
[evaluate]
bootstrap = 5
[model]
tokenizer = "patch"
patch = 10
layers = 2
[train]
batch_size = 4
device = "cpu"
"""
VERBS: dict[str, list[str]] = {
    "list": ["list", "runs"],
    "verify": ["verify", "--deep"],
    "ingest": ["ingest", "generic", "{raw}", "--map", "{raw}/map.toml", "--force-new"],
    "ingest claims": ["ingest", "synthetic-claims", "--subjects", "30", "--seed", "3", "--force-new"],
    "tokenize": ["tokenize", "generic/classification", "--name", "more"],
    "tokenize claims": ["tokenize", "synthetic-claims", "--min-codes", "1", "--name", "more"],
    "pretrain": ["pretrain", "--data", "generic", "--run", "new", "--set", "model.tokenizer=patch", "--set", "model.patch=10", *SMALL],
    "finetune": [
        "finetune",
        "plain",
        "--data",
        "generic/classification",
        "--fraction",
        "1",
        "--run",
        "new",
        "--steps",
        "2",
        "--batch-size",
        "4",
    ],
    "evaluate": ["evaluate", "plain-class", "--bootstrap", "20", "--device", "cpu"],
    "evaluate events": ["evaluate", "events-labels", "--bootstrap", "20", "--device", "cpu"],
    "embed": ["embed", "plain", "--device", "cpu"],
    "analyze": ["analyze", "svd", "plain", "--sequences", "4"],
    "report": ["report", "plain-class", "timesnet-class"],
    "export": ["export", "plain-class"],
    "run": ["run", "{raw}/limits.toml"],
}


class Limited(NamedTuple):
    """How a verb ended under a limit."""

    verb: str
    kind: str
    value: int
    code: int  # negative: of the signal that ended it
    text: str
    seconds: float


LIBRARIES = (
    *("torch", "polars", "pyarrow.parquet", "safetensors.torch", "safetensors.numpy", "scipy.stats", "sklearn.metrics", "jinja2"),
    *("bitimely_cli.verbs", "bitimely_core.workflows", "bitimely_core.pipeline", "bitimely_core.claims.ingest", "bitimely_core.tokens"),
)


# ---- the process that forks


def set_limit(kind: str, value: int) -> None:
    """MiB above what this process holds for AS and DATA; files, bytes, or processes of a user that has none yet for the others."""
    from bitimely_core.system_errors import read_status

    held = {"AS": "VmSize", "DATA": "VmData"}.get(kind)
    if held is not None:
        value = ((read_status(held) or 0) << 10) + (value << 20)
    which = getattr(resource, f"RLIMIT_{kind}")
    resource.setrlimit(which, (value, value))
    if kind == "NPROC":
        become_user(60_000 + os.getpid() % 5000)


def become_user(number: int) -> None:
    """A user other than root, who has no such limit, that may still read every file (CAP_DAC_OVERRIDE): the libraries may be root's."""
    libc = ctypes.CDLL(None)
    libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS
    os.setuid(number)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(2, 2, 0, 0, 0, 0)
    assert libc.capset(header, sets) == 0


def run_limited(verb: str, kind: str, value: int, raw: Path) -> Limited:
    """Run a verb on a copy of the workspace in a forked child."""
    folder = Path(tempfile.mkdtemp(prefix="limits-", dir=raw.parent))
    workspace = Path(shutil.copytree(HOME, folder / "w", ignore=shutil.ignore_patterns("unfinished")))
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    begin, (reader, writer) = time.monotonic(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir(folder)
        for fd in (1, 2):
            os.dup2(writer, fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.closerange(3, 64)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        code = 1
        try:
            from bitimely_cli.main import main

            arguments = [part.format(raw=raw) for part in VERBS[verb]]
            if kind != "none":
                set_limit(kind, value)
            code = main([*arguments, "-w", str(workspace)])
            sys.stdout.flush()
        finally:
            os._exit(code)
    os.close(writer)
    text = b""
    while time.monotonic() - begin < SECONDS and select.select([reader], [], [], SECONDS)[0]:
        block = os.read(reader, 1 << 16)
        if not block:
            break
        text += block
    else:
        os.killpg(pid, signal.SIGKILL)
    os.close(reader)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    shutil.rmtree(folder)
    return Limited(verb, kind, value, code, text.decode(errors="replace")[-2000:], time.monotonic() - begin)


def serve(folder: str) -> None:
    """Runs in, one a line, results out."""
    from fixtures import make_v1

    raw = Path(folder) / "raw"
    make_v1.write_raw(raw)
    (raw / "limits.toml").write_text(RECIPE)
    for path in (Path(folder), raw, *raw.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    Path(folder).chmod(0o777)
    for name in LIBRARIES:
        importlib.import_module(name)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run_limited(*json.loads(line), raw)), flush=True)


# ---- the tests


class Server:
    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="bitimely-limits-")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1", "PYTHONPATH": f"{HERE}:{HERE.parent}"}
        command = [sys.executable, __file__, "serve", self.folder]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.read() == "ready\n"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def run(self, verb: str, kind: str, value: int) -> Limited:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([verb, kind, value]) + "\n")
        self.process.stdin.flush()
        return Limited(*json.loads(self.read()))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)


def list_runs(step: int, verbs: list[str]) -> Iterator[tuple[str, str, int]]:
    """Each verb under each limit; from `step` 16 on only some limits that are not of memory."""
    values = {
        "AS": range(0, 65, step),
        "NOFILE": [3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 32],
        "FSIZE": [0, 1, 100, 1000, 3000, 10_000, 30_000, 100_000],
        "NPROC": [1, 2, 3, 4, 6, 8],
    }
    if step >= 16:
        values |= {"NOFILE": [4, 8], "FSIZE": [0, 1000], "NPROC": [1, 3]}
    return ((verb, kind, value) for verb in verbs for kind, ones in values.items() for value in ones)


def sweep(step: str, *verbs: str) -> None:
    """All runs; how they ended, and each one that ended with neither 0 nor 6."""
    server = Server()
    ends: collections.Counter[tuple[str, int]] = collections.Counter()
    for verb, kind, value in list_runs(int(step), list(verbs or VERBS)):
        found = server.run(verb, kind, value)
        ends[kind, found.code] += 1
        native = " NATIVE" if "native code could" in found.text else " TIGHT" if "ended by" in found.text else ""
        print(found.verb, found.kind, found.value, found.code, f"{found.seconds:.1f} s{native}", flush=True)
        if found.code not in {WARNED.get(verb, 0), 6} or os.environ.get("VERBOSE"):
            print(found.text, flush=True)
    server.close()
    print(sorted(ends.items()))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


WARNED = {"ingest claims": 3}  # the table has rows that are quarantined


def check(found: Limited) -> None:
    assert found.code in {WARNED.get(found.verb, 0), 6}, (
        f"{found.verb} under {found.kind} {found.value} ended with {found.code}: {found.text}"
    )
    if found.code == 6:
        assert "error[" in found.text, found.text
        assert "Traceback" not in found.text


SAMPLE = [
    *(("evaluate", "AS", value) for value in (0, 16, 40)),
    *(("tokenize claims", "AS", 8), ("pretrain", "AS", 24), ("verify", "AS", 4), ("ingest", "AS", 32)),
    *(("tokenize", "NOFILE", 8), ("export", "NOFILE", 6), ("finetune", "FSIZE", 3000), ("report", "FSIZE", 100), ("embed", "NPROC", 1)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "kind", "value"), SAMPLE)
def test_a_verb_under_a_limit_ends_with_0_or_6(server: Server, verb: str, kind: str, value: int) -> None:
    check(server.run(verb, kind, value))


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_without_a_limit_does_its_work(server: Server, verb: str) -> None:
    found = server.run(verb, "none", 0)
    assert found.code == WARNED.get(verb, 0), found.text


@pytest.mark.long
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_under_any_limit_ends_with_0_or_6(server: Server, verb: str) -> None:
    for run in list_runs(8, [verb]):
        check(server.run(*run))


# ---- the supervision itself

SUPERVISED = """
import os, resource, signal, sys, time
from bitimely_cli import supervision
from bitimely_cli.supervision import run_supervised
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
supervision.STALLED = 1.0
def stall(held):
    kept = bytearray(held << 20)
    for _ in range(20):
        time.sleep(0.2)
    return 0
def wait():
    print(os.getpid(), flush=True)
    for _ in range(600):
        time.sleep(0.1)
    return 0
def report(fault):
    print(fault.finding.line())
    return fault.exit_code
ends = {"code": lambda: 4, "abort": os.abort, "exit": lambda: os._exit(1), "fault": lambda: os.kill(os.getpid(), signal.SIGSEGV), "wait": wait}
ends |= {"stalled": lambda: stall(850), "idle": lambda: stall(0)}
sys.exit(run_supervised(ends[sys.argv[1]], report))
"""


@pytest.mark.parametrize(("end", "code"), [("code", 4), ("abort", 6), ("exit", 6), ("fault", 6), ("stalled", 6), ("idle", 0)])
def test_a_death_in_native_code_under_a_limit_ends_with_6(end: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", SUPERVISED, end], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert ("1.1 GB (ulimit -v)" in done.stdout) == (code == 6)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_to_the_parent_reaches_the_child(sent: signal.Signals, code: int) -> None:
    with subprocess.Popen([sys.executable, "-c", SUPERVISED, "wait"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert child != process.pid
        process.send_signal(sent)
        assert process.wait(timeout=30) == code
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("the child goes on")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
