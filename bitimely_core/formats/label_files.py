"""Reads the labels of a recording from text files of their own.

Three forms are known: one stage a line; a table with a row a label, timed in seconds, by the clock
or by the number of the epoch; and the XML of Profusion and of the National Sleep Research Resource.
A form is recognised by the content: a table of samples, or a text of sentences, is none of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from tokenize import TokenError

import numpy as np

from bitimely_core.formats import matlab, vendors
from bitimely_core.formats.label_rows import (
    CLOCK,
    MISSING,
    LabelRow,
    LabelText,
    are_stages,
    is_listed,
    list_codes,
    parse_time,
)
from bitimely_core.formats.label_tables import ALL_NAMES, STAGE_NAMES, fold_name, parse_table
from bitimely_core.formats.stage_texts import COUNTED_DOWN
from bitimely_core.formats.text import decode_table
from bitimely_core.types import find_only

MAX_BYTES = 1 << 26
ARRAYS = {".json", ".mat", ".npy"}
PREAMBLE = 12  # lines above a list of stages, at most
RDANN = re.compile(
    r"\s*(?:\[[^\]]*\]|[\d:.]+)\s+(?P<sample>\d+)\s+(?P<type>\S)\s+\d+\s+\d+\s+-?\d+"
    r"(?:\s+(?P<aux>\S.*?))?\s*"
)
# seconds of a stage, in the lines above a list of them
STATED_EPOCH = re.compile(
    r"(?:time_base|epoch[ _]?(?:length|duration|dur|size|sec)|rate)\W{0,4}"
    r"(\d+(?:\.\d+)?)\s*(?:s|sec|secs|seconds)?\s*$",
    re.IGNORECASE,
)
# of lines above a list of stages that state a time of day
BEGIN = re.compile(r"\b(?:start|begin|anfang|debut|inicio|inizio)", re.IGNORECASE)
DREAMS = re.compile(r"\[hypnogram(?:aasm|r&k)\]", re.IGNORECASE)
LIGHTS_OFF = re.compile(r"\blights?[ _-]*(?:off|out)\b|\blicht[ _-]*aus\b", re.IGNORECASE)


def read_label_text(path: Path) -> LabelText | None:
    """The labels of a text file, None for a file of another content.

    Raises UserError: encoding.
    """
    if path.suffix.lower() in ARRAYS:
        return parse_label_text(_write_lines(path))
    data = path.read_bytes() if path.stat().st_size <= MAX_BYTES else b"\0\0\0"
    if b"\0" in data[:4096] and not data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return None
    text = decode_table(data, fallback="latin-1")
    if vendors.find_form(path.name, "\n".join(text[:4096].splitlines()) + "\n"):
        return None  # samples of a device
    return parse_label_text(text)


def _write_lines(path: Path) -> str:
    """The labels of an array (.npy, .mat, .json) as lines of text, "" for another content."""
    ending = path.suffix.lower()
    try:
        if ending == ".json":
            return _write_json(json.loads(path.read_bytes()[:MAX_BYTES]))
        if ending == ".mat":
            values = matlab.read_vector(path, STAGE_NAMES, None)
        else:
            values = np.squeeze(np.load(path, mmap_mode="r", allow_pickle=False))
    except (ValueError, EOFError, SyntaxError, TokenError, RecursionError):
        return ""  # its unit, or the list of files that are not read, says so
    if values is None or values.ndim != 1 or values.dtype.kind not in "iufU":
        return ""
    texts = values.tolist() if values.dtype.kind == "U" else [f"{cell:g}" for cell in values]
    return "\n".join(texts)  # NaN is nan, a missing one


def _write_json(content: object) -> str:
    """A list of stages as a stage a line, one of rows with names as a table; "" for another."""
    above: list[str] = []
    if isinstance(content, dict):
        stated = (f"{str(key).removesuffix('_s')} {value}" for key, value in content.items())
        above = list(filter(STATED_EPOCH.fullmatch, stated))
        lists = [rows for key, rows in content.items() if fold_name(str(key)) in ALL_NAMES]
        content = find_only(lists, None)
    if not isinstance(content, list) or not content:
        return ""
    if all(isinstance(row, dict) for row in content):
        return _write_table(content)
    return "\n".join([*above, *map(str, content)])  # null is None, a missing one


def _write_table(rows: Sequence[dict[str, object]]) -> str:
    nested = {name for row in rows for name, cell in row.items() if isinstance(cell, (dict, list))}
    names = [name for name in rows[0] if name not in nested]
    cells = [[str(row.get(name, "")) for name in names] for row in rows]
    return "\n".join(map("\t".join, [names, *cells]))


def parse_label_text(text: str) -> LabelText | None:
    """The labels in a text, None for another content."""
    lines = list(filter(str.strip, re.split(r"\r\n|\r|\n", text)))
    return _parse_stage_lines(lines) or _parse_rdann(lines) or parse_table(lines)


# --- as rdann prints


def _parse_rdann(lines: Sequence[str]) -> LabelText | None:
    """What the program rdann of WFDB prints: a row an annotation, of which those of rhythms are
    called by the text at their end. Comments are left out.
    """
    rows = list(map(RDANN.fullmatch, lines[1:] if "Sample #" in "".join(lines[:1]) else lines))
    printed = list(filter(None, rows))
    if len(printed) < 2 or len(printed) < len(rows):
        return None
    labels = [
        LabelRow(float(row["sample"]), 0.0, row["aux"] if row["type"] == "+" else row["type"])
        for row in printed
        if row["type"] != '"' and (row["type"] != "+" or row["aux"])
    ]
    return LabelText("a table of labels", "samples", labels, len(rows) - len(labels))


# --- one stage a line


def _parse_stage_lines(lines: Sequence[str]) -> LabelText | None:
    """A text with a stage a line, below a name, where it has one."""
    above, texts = _split_preamble(lines)
    if any(map(DREAMS.fullmatch, above)):
        texts = [COUNTED_DOWN.get(text, "?") for text in texts]
    if len(texts) < 2 or not are_stages(texts) or max(map(len, texts)) > 40:
        return None
    if len(above) > 1 and len(texts) < len(above):  # a text with two words at its end
        return None
    rows = [
        LabelRow(float(number), None, "?" if text.lower() in MISSING else text)
        for number, text in enumerate(texts)
    ]
    return LabelText(
        "one stage a line",
        "epochs",
        rows,
        codes=list_codes(rows),
        is_listed=True,
        epoch=_find_stated_epoch(above),
        begin=_find_stated_clock(above, BEGIN),
        lights_off=_find_stated_clock(above, LIGHTS_OFF),
    )


def _split_preamble(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """The texts above the first stage, and those from there on; comments are left out."""
    texts = [line.strip().strip('"') for line in lines if not line.lstrip().startswith(("#", "%"))]
    first = next((i for i, text in enumerate(texts[:PREAMBLE]) if is_listed(text)), len(texts))
    return texts[:first], texts[first:]


def _find_stated_epoch(texts: Sequence[str]) -> float | None:
    """Seconds of a stage that the first of these texts to do so states; None: none does."""
    lengths = (float(match[1]) for match in map(STATED_EPOCH.search, texts) if match)
    return next(lengths, 0.0) or None


def _find_stated_clock(texts: Sequence[str], words: re.Pattern[str]) -> float | None:
    """Seconds of the day that the first of these texts with one of `words` states."""
    clocks = (CLOCK.search(text) for text in texts if words.search(text))
    return next((parse_time(clock[0].strip()) for clock in clocks if clock), None)
