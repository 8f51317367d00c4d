"""Curves for TensorBoard (extra `track`): an event file with one record a line of the log.

A file of TensorBoard is a sequence of records: length, its checksum, an event (protocol buffer),
its checksum. The first one is the version.
"""

from __future__ import annotations

import io
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bitimely_core.errors import usage_error
from bitimely_core.store import storage
from bitimely_core.system_errors import raise_system_error

FOLDER = "tensorboard"
NAME = "events.out.tfevents.0.bitimely"
VERSION = "brain.Event:2"  # of the format, which TensorBoard expects in the first record
KEYS = ("step", "epoch", "split", "of")  # of a line, which are no curves
FRAME = 16  # bytes of a record beside its event


def require_tensorboard() -> None:
    """Raises UserError (config, exit 2) where the extra is not installed."""
    try:
        from tensorboard.compat.proto import event_pb2  # noqa: F401
        from tensorboard.summary.writer import record_writer  # noqa: F401
    except ImportError as error:
        raise_system_error(error)
        hint = "Install it with: pip install 'bitimely[track]', or leave --track out"
        raise usage_error(
            "tensorboard is not installed", "expected it for the curves", hint, field="--track"
        ) from error


def restore_events(home: Path, lines: Sequence[Mapping[str, object]]) -> None:
    """Cut the event file to the `lines` of the log that a continued training keeps, and add those
    that it lacks.
    """
    path = storage.make_folder(home / FOLDER) / NAME
    content = path.read_bytes() if path.is_file() else b""
    ends = _find_ends(content)[: 1 + len(lines)]
    content = content[: ends[-1]] if ends else encode_version()
    missing = map(encode_event, lines[max(len(ends) - 1, 0) :])
    storage.write_bytes(path, content + b"".join(missing))


def append_event(home: Path, line: Mapping[str, object]) -> None:
    """Add one line of the log."""
    storage.append_bytes(home / FOLDER / NAME, encode_event(line))


def encode_version() -> bytes:
    """The first record of a file."""
    from tensorboard.compat.proto.event_pb2 import Event

    return _encode_record(Event(wall_time=time.time(), file_version=VERSION).SerializeToString())


def encode_event(line: Mapping[str, object]) -> bytes:
    """The numbers of a line as one record, `loss/train` and so on."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    numbers = {
        name: float(value)
        for name, value in line.items()
        if name not in KEYS and isinstance(value, int | float)
    }
    values = [
        Summary.Value(tag=f"{name}/{line['split']}", simple_value=number)
        for name, number in numbers.items()
    ]
    event = Event(wall_time=time.time(), step=line["step"], summary=Summary(value=values))
    return _encode_record(event.SerializeToString())


def _encode_record(event: bytes) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    out = io.BytesIO()
    RecordWriter(out).write(event)
    return out.getvalue()


def _find_ends(content: bytes) -> list[int]:
    """Where each whole record ends."""
    ends, end = [], 0
    while end + FRAME <= len(content):
        end += FRAME + int(struct.unpack_from("<Q", content, end)[0])
        if end > len(content):
            break
        ends.append(end)
    return ends
