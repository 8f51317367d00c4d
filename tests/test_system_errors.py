"""What belongs to the machine ends with exit 6 and names the resource; what belongs to a file does
not.
"""

from __future__ import annotations

import ast
import errno
import json
import os
import re
import resource
import subprocess
import sys
import zlib
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import small
import torch
from safetensors import SafetensorError

from bitimely_cli import verbs
from bitimely_cli.main import main
from bitimely_core.errors import Exit, Reason, UserError, integrity_error
from bitimely_core.formats import edf_header, edf_writer
from bitimely_core.store import storage
from bitimely_core.system_errors import (
    find_system_error,
    raise_system_error,
    translate_system_errors,
)

CORE = Path(__file__).parent.parent / "bitimely_core"


def os_fault(number: int) -> OSError:
    return OSError(number, os.strerror(number))


MEMORY = [
    MemoryError(),
    os_fault(errno.ENOMEM),
    pa.ArrowMemoryError("malloc of size 4096 failed"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."
    ),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    pl.exceptions.ComputeError("failed to mmap file: Cannot allocate memory (os error 12)"),
]
PROCESSES = [os_fault(errno.EAGAIN)]
DISK = [
    os_fault(errno.ENOSPC),
    os_fault(errno.EDQUOT),
    os_fault(errno.EFBIG),
    OSError("No space left on device (os error 28)"),  # of polars: without a number
    pl.exceptions.ComputeError(
        "parquet: File out of specification: underlying IO error: No space left on device (os error 28)"
    ),
    SafetensorError("Error while serializing: I/O error: Disk quota exceeded (os error 122)"),
    RuntimeError("PytorchStreamWriter failed writing file: No space left on device"),
]
DESCRIPTORS = [
    os_fault(errno.EMFILE),
    os_fault(errno.ENFILE),
    OSError("Too many open files (os error 24): a.parquet"),
]
PLACES = [
    *(
        os_fault(number)
        for number in (errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE)
    ),
    PermissionError("Permission denied (os error 13): a.parquet"),
]
KINDS = [
    *((error, Reason.RESOURCE_LIMIT, "out of memory") for error in MEMORY),
    *((error, Reason.RESOURCE_LIMIT, "process") for error in PROCESSES),
    *((error, Reason.DISK_FULL, "") for error in DISK),
    *((error, Reason.RESOURCE_LIMIT, "open files") for error in DESCRIPTORS),
    *((error, Reason.IO_ERROR, "cannot be") for error in PLACES),
]


@pytest.mark.parametrize(
    ("error", "code", "words"),
    KINDS,
    ids=[f"{type(error).__name__}-{error}"[:60] for error, *_ in KINDS],
)
def test_a_fault_of_the_machine_has_exit_6_whichever_library_raises_it(
    tmp_path: Path, error: BaseException, code: Reason, words: str
) -> None:
    found = find_system_error(error, tmp_path / "file")
    assert found is not None
    assert (found.code, found.exit_code, found.file) == (
        code,
        Exit.RESOURCES,
        str(tmp_path / "file"),
    )
    assert words in found.problem
    assert found.hint
    wrapped = RuntimeError("serialisation failed")
    wrapped.__cause__ = error
    assert find_system_error(wrapped) == find_system_error(error)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file"),
        ValueError("found 'out of memory'"),
        KeyError("no space left on device"),
        pa.ArrowInvalid("CSV conversion error: 'Permission denied'"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        OSError("Couldn't deserialize thrift: TProtocolException: Invalid data"),
        pl.exceptions.ComputeError(
            "parquet: File out of specification: The file must end with PAR1"
        ),
        zlib.error("Error -3 while decompressing data: invalid stored block lengths"),
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        integrity_error("a", "differs from its own checksum"),
    ],
)
def test_a_fault_of_a_file_is_none_of_the_machine(error: Exception) -> None:
    assert find_system_error(error) is None
    raise_system_error(error)


@pytest.mark.parametrize("error", PLACES[1:], ids=str)
def test_a_source_that_may_not_be_read_is_its_own_fault(error: OSError) -> None:
    assert find_system_error(error, stored=False) is None
    assert find_system_error(PLACES[0], stored=False) is not None


def test_a_full_table_of_inodes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    fields = [name for name in dir(real) if name.startswith("f_")]
    values = {name: getattr(real, name) for name in fields}
    disk = namedtuple("disk", fields)  # type: ignore[misc]
    monkeypatch.setattr(
        os,
        "statvfs",
        lambda path: disk(**(values | {"f_files": 5000, "f_ffree": 0, "f_favail": 0})),
    )
    found = find_system_error(os_fault(errno.ENOSPC), tmp_path / "new" / "file")
    assert found is not None
    assert "no inodes left: all 5,000" in found.problem
    assert "free" not in found.problem


@pytest.mark.parametrize(
    ("limit", "value", "error", "words"),
    [
        (resource.RLIMIT_AS, 1 << 46, MemoryError(), "70.4 TB (ulimit -v)"),
        (resource.RLIMIT_NOFILE, 512, os_fault(errno.EMFILE), "512 (ulimit -n)"),
        (resource.RLIMIT_FSIZE, 1 << 40, os_fault(errno.EFBIG), "1.1 TB (ulimit -f)"),
    ],
)
def test_a_limit_of_the_process_is_named(
    limit: int, value: int, error: Exception, words: str
) -> None:
    former = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, former[1]))
    try:
        fault = find_system_error(error)
    finally:
        resource.setrlimit(limit, former)
    assert fault is not None
    assert words in fault.problem


def test_a_quota_is_not_called_a_full_disk() -> None:
    quota = find_system_error(os_fault(errno.EDQUOT))
    assert quota is not None
    assert "quota" in quota.problem


def test_a_write_says_how_much_it_needs(tmp_path: Path) -> None:
    free = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, free[1]))
    try:
        with pytest.raises(UserError) as stopped:
            storage.write_bytes(tmp_path / "a", bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, free)
    assert (stopped.value.exit_code, stopped.value.requirement) == (Exit.RESOURCES, "needs 5.0 kB")
    assert list(tmp_path.iterdir()) == []


def test_errors_of_a_block_are_translated_but_for_defects(tmp_path: Path) -> None:
    for error in (
        RuntimeError("CUDA out of memory"),
        OSError(errno.ELOOP, "Too many levels of symbolic links"),
    ):
        with pytest.raises(UserError) as stopped, translate_system_errors(tmp_path):
            raise error
        assert stopped.value.exit_code == Exit.RESOURCES
    with pytest.raises(RuntimeError, match="shapes"), translate_system_errors(tmp_path):
        raise RuntimeError("shapes differ")


# ---- no other place decides

BROAD = {
    "OSError",
    "Exception",
    "BaseException",
    "MemoryError",
    "RuntimeError",
    "ImportError",
    "ArrowException",
    "PolarsError",
    "SafetensorError",
}
BROAD |= {"zlib.error", "UserError"}
ASKS = {
    "raise_system_error",
    "find_system_error",
    "describe_os_error",
    "describe_unreadable",
    "_describe_unreadable",
    "_parquet_error",
    "describe_failure",
}
ALLOWED = {  # file: functions that need not ask
    "analyses/plain_features.py": {"_is_default"},  # the model has no such vector
    "workflows/ingest.py": {"ingest", "add_tokens"},  # `_make_finding` raises it again
    "evaluate/vector_files.py": {"read_vectors"},  # raises it again with its file
    "datasets/epilepsy.py": {"parse_segment"},  # of bytes in memory, as the next two
    "datasets/physionet_2012.py": {"_parse_cells", "_read_stay"},
    "formats/nsrr_xml.py": {"_make_event"},  # a cell
    "formats/matlab.py": {"_inflate_head", "_inflate"},
    "tokens/new_recordings.py": {"_list_recordings"},  # raised when its recording is read
    # the reader of the layout meets the fault again, and says it
    "claims/sources/__init__.py": {"_has_anchor_year"},
    "store/locks.py": {"_locked_error"},  # a message
    "store/storage.py": {"try_lock"},  # no locks there
    "store/manifests.py": {"remove_old_files"},  # leaves the files for the next time
    "claims/engines.py": {"_run_task"},  # asks `find_system_error`; the driver raises what it finds
    # a pipe that the other side has closed
    "cache/workers.py": {"_receive", "_serve_tasks"},
    "pipeline/stage_workers.py": {"_run_process"},  # stored with the stage
    "train/distributed.py": {"claim_report"},  # a store that has ended with its machine
    "train/batches.py": {"read_ahead", "read_batches"},
    # handed to out_of_memory_error, which asks
    "train/loop.py": {"_sum_gradients"},
    "train/micro_batches.py": {"read_parts"},
    "train/validation.py": {"_sum_losses", "_measure_score"},
    # an unknown name; from here on nothing is opened in the block
    "recipe.py": {"check_stage_name"},
    "recordings/folder_tables.py": {"_parse_attributes", "_parse_annotation", "_make_annotation"},
    "recordings/sample_tables.py": {"_make_series_record"},
    "recordings/points.py": {"_parse_time"},  # a cell
    "recordings/mapping.py": {"search_groups"},  # of a text in memory
    # the careful parser reads the same file again, and a cell
    "formats/sample_values.py": {"_parse_fast", "_read_cell"},
    "datasets/ptb_xl.py": {"_find_escape"},
    "datasets/tser.py": {"read_problem"},
    "formats/tables.py": {"parse_numbers", "read_number_table"},
    "formats/ts.py": {"read_cases"},
}


def caught_names(handler: ast.ExceptHandler) -> set[str]:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    texts = {ast.unparse(kind) for kind in kinds if kind is not None}
    return texts | {text.rpartition(".")[2] for text in texts}


def list_deciders(tree: ast.Module) -> set[str]:
    """Functions with a handler of broad exceptions that neither asks the classifier nor raises the
    same exception again.
    """
    found = set()
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for handler in (
            node
            for node in ast.walk(function)
            if isinstance(node, ast.ExceptHandler) and node.type is not None
        ):
            if not BROAD & caught_names(handler):
                continue
            inside = [node for statement in handler.body for node in ast.walk(statement)]
            asks = any(
                isinstance(node, ast.Call)
                and getattr(node.func, "id", getattr(node.func, "attr", "")) in ASKS
                for node in inside
            )
            again = any(isinstance(node, ast.Raise) and node.exc is None for node in inside)
            if not asks and not again:
                found.add(function.name)
    return found


@pytest.mark.slow
def test_every_handler_of_broad_exceptions_asks_the_classifier() -> None:
    deciders = {
        path.relative_to(CORE).as_posix(): list_deciders(ast.parse(path.read_text()))
        for path in CORE.rglob("*.py")
    }
    assert {name: found for name, found in deciders.items() if found} == ALLOWED


# ---- on the screen


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return small.copy_workspace(tmp_path / "home")


def fill_disk(monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    """No room for files whose name begins so."""
    write = storage.os_write

    def full(fd: int, data: memoryview) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink().name.startswith(names):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    monkeypatch.setattr(storage, "os_write", full)


def write_recordings(folder: Path, *names: str) -> Path:
    folder.mkdir()
    channels = [edf_header.EdfChannel("c", "uV", -100.0, 100.0, -2048, 2047, 16)]
    for number, name in enumerate(names):
        edf_writer.write_edf(
            folder / name, channels, [np.arange(number, 256 + number, dtype=np.int16)]
        )
    return folder


UNWRITABLE = [
    (MemoryError(), "resource_limit"),
    *((os_fault(number), "resource_limit") for number in (errno.EMFILE, errno.ENOMEM)),
    *((os_fault(number), "disk_full") for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
    *((os_fault(number), "io_error") for number in (errno.EROFS, errno.EACCES, errno.EIO)),
]


@pytest.mark.parametrize(
    ("error", "code"), UNWRITABLE, ids=[repr(error) for error, _ in UNWRITABLE]
)
def test_a_verb_that_cannot_write_ends_with_6_and_one_line(
    error: Exception,
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(descriptor: int, data: memoryview) -> int:
        raise error

    raw = write_recordings(tmp_path / "raw", "a.edf")
    monkeypatch.setattr(storage, "os_write", fail)
    assert main(["ingest", "edf", str(raw), "-w", str(tmp_path / "home")]) == Exit.RESOURCES
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error[{code}] ")
    assert re.search(r"\. (Raise the limit|Make room|Choose a folder|Check the disk).*\.$", line)


def test_a_verb_without_memory_ends_with_6_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: list[str]) -> int:
        raise MemoryError

    monkeypatch.setattr(verbs, "run_command", fail)
    assert main(["list", "models"]) == Exit.RESOURCES
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error[resource_limit] out of memory")


@pytest.mark.parametrize(
    ("fault", "code"),
    [(errno.EACCES, "io_error"), (errno.EIO, "io_error"), ("damage", "not_edf")],
    ids=["EACCES", "EIO", "damage"],
)
def test_a_source_file_that_cannot_be_read_costs_that_file_alone(
    fault: int | str,
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    raw = write_recordings(tmp_path / "raw", "good.edf", "bad.edf")
    open_file = storage.os_open

    def open_or_fail(path: Path, *flags: int) -> int:
        if Path(path).name == "bad.edf" and isinstance(fault, int):
            raise os_fault(fault)
        return open_file(path, *flags)

    monkeypatch.setattr(storage, "os_open", open_or_fail)
    if fault == "damage":
        (raw / "bad.edf").write_bytes(bytes(1000))
    assert main(["ingest", "edf", str(raw), "-w", str(tmp_path / "home"), "--json"]) == Exit.PARTIAL
    units = json.loads(capsys.readouterr().out)["units"]
    assert {unit["unit"]: [reason["code"] for reason in unit["reasons"]] for unit in units} == {
        "good": [],
        "bad": [code],
    }


EVALUATE = ["evaluate", "tuned", "--bootstrap", "20", "--device", "cpu"]


@pytest.mark.parametrize(
    "name", ["predictions.parquet", "scores.json", "model_card.md", "report.html"]
)
def test_scores_are_shown_when_the_disk_is_full(
    home: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main([*EVALUATE, "-w", str(home), "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)["metrics"]
    fill_disk(monkeypatch, name)
    assert main([*EVALUATE, "-w", str(home), "--json"]) == Exit.RESOURCES
    found = json.loads(capsys.readouterr().out)
    assert found["result"]["metrics"] == expected
    assert (found["exit_code"], found["error"]["code"]) == (Exit.RESOURCES, "disk_full")
    assert main([*EVALUATE, "-w", str(home)]) == Exit.RESOURCES
    shown = capsys.readouterr()
    for metric, score in expected.items():
        (line,) = [line.split() for line in shown.out.splitlines() if line.split()[:1] == [metric]]
        assert score["value"] is None or f"{score['value']:.4g}" in line
    assert shown.err.splitlines()[-1].startswith("error[disk_full]")
    assert name in shown.err.splitlines()[-1]


@pytest.mark.slow
def test_losses_and_verdicts_are_shown_when_the_disk_is_full(
    home: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fill_disk(monkeypatch, "model.safetensors")
    train = [
        "pretrain",
        "--data",
        "generic",
        "--run",
        "new",
        "--preset",
        "tiny",
        "--batch-size",
        "8",
        "--steps",
        "2",
        "--device",
        "cpu",
    ]
    assert main([*train, "-w", str(home)]) == Exit.RESOURCES
    out = capsys.readouterr().out
    lines = [
        json.loads(line)
        for line in (home / "runs" / "new" / "metrics.jsonl").read_text().splitlines()
    ]
    last = [line for line in lines if line["split"] == "train"][-1]
    assert f"2 steps, loss {last['loss']:.4g}" in out
    fill_disk(monkeypatch, "summary.json")
    assert (
        main(["analyze", "svd", "plain", "--sequences", "4", "--name", "new", "-w", str(home)])
        == Exit.RESOURCES
    )
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--json"], ["--help"]])
def test_a_screen_that_cannot_be_written_ends_with_6(options: list[str]) -> None:
    command = [sys.executable, "-m", "bitimely_cli", "list", "datasets", *options]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == Exit.RESOURCES
        assert done.stderr.startswith("error[disk_full]")
        assert "Traceback" not in done.stderr
        assert (
            subprocess.run(command, stdout=full, stderr=full, check=False).returncode
            == Exit.RESOURCES
        )
