"""Reads tables that hold several blocks, each with lines above it, as parts of one recording."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from bitimely_core.errors import Reason, input_error
from bitimely_core.formats import vendors
from bitimely_core.formats.source import locate_errors
from bitimely_core.formats.table_layout import read_head
from bitimely_core.formats.table_text import read_blocks
from bitimely_core.formats.tables import is_binary
from bitimely_core.formats.text import ENCODING, use_encoding
from bitimely_core.recordings.joining import describe_part, join_records
from bitimely_core.recordings.mapping import RecordingInfo
from bitimely_core.recordings.sample_tables import read_table
from bitimely_core.types import Record, Records


def read_any_table(path: Path, rel: str, info: RecordingInfo) -> Record | Records:
    """As `read_table`; a table of several blocks is one recording with a gap between them.

    Raises UserError: as `read_table`, and as `join_records` for blocks that do not follow each
    other.
    """
    with locate_errors(rel):
        blocks = _split_blocks(path)
    if len(blocks) < 2:
        return read_table(path, rel, info)
    part = describe_part(info, "table")
    with TemporaryDirectory() as folder:
        reads = []
        for number, text in enumerate(blocks, 1):
            name = str(PurePosixPath(rel).with_stem(f"{PurePosixPath(rel).stem} block {number}"))
            block = Path(folder) / f"{number}{path.suffix}"
            block.write_bytes(text)
            reads.append((name, partial(read_table, block, name, part)))
        return join_records(info, reads)


def _split_blocks(path: Path) -> list[bytes]:
    """The texts of the blocks of a table whose form has such; []: it has one.

    Raises UserError: schema, for blocks that do not say when they begin.
    """
    if is_binary(path):
        return []
    head = read_head(path)
    form = vendors.find_form(path.name, "\n".join(head.lines[: vendors.FORM_LINES]))
    if form is None or not form.block:
        return []
    with use_encoding("latin-1" if head.encoding == "latin-1" else ENCODING.get()):
        text = b"".join(block for block, _ in read_blocks(path)).decode()
    edges = [match.start() for match in re.finditer(form.block, text, re.MULTILINE)]
    blocks = [text[a:b] for a, b in zip(edges, [*edges[1:], len(text)], strict=True)]
    if len(blocks) > 1 and not all(map(form.read_start, blocks)):
        problem = f"holds {len(blocks)} blocks that do not say when they begin"
        hint = "Cut it above each of them, or export it with the time of each block"
        raise input_error(Reason.SCHEMA, problem, "their order in time is unknown", hint)
    return [block.encode() for block in blocks]
