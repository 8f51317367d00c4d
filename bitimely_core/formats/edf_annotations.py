"""Parses and writes the time-stamped annotation lists (TALs) of EDF+ and BDF+.

They hold annotations, and state the onset of each data record. Legend: R data records.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from bitimely_core.errors import Finding, Reason, UserError, clean, input_error, input_warning
from bitimely_core.formats.text import decode_text, has_unsafe_characters, is_utf8
from bitimely_core.types import Annotation

TAL = re.compile(
    rb"([+-]\d++(?:\.\d*+)?)(?:\x15(\d++(?:\.\d*+)?))?\x14((?:[^\x00\x14\x15]*+\x14)*+)(?:\x00|\Z)"
)
TIME_KEEPING = re.compile(rb"([+-]\d++(?:\.\d*+)?)\x14\x14\x00*+")
CONTENT = re.compile(rb"[^\x00]")
TimedTexts = tuple[float, float | None, list[bytes]]  # onset and duration in seconds, texts


def parse_tals(block: bytes) -> list[TimedTexts]:
    """The annotation lists of one data record, in the order of the file.

    Raises UserError: annotation_syntax for anything that is no list, with the position in the block
    and none of the text.
    """
    lists = []
    place = 0
    while begin := CONTENT.search(block, place):
        place = begin.start()
        match = TAL.match(block, place)
        onset = float(match[1]) if match else math.inf
        duration = float(match[2]) if match and match[2] else None
        if match is None or not math.isfinite(onset) or not math.isfinite(duration or 0):
            text = f"no time-stamped annotation list begins at byte {place} of an annotation signal"
            raise input_error(
                Reason.ANNOTATION_SYNTAX,
                text,
                "expected +onset, byte 20, texts each ended by byte 20, byte 0",
            )
        lists.append((onset, duration, match[3].split(b"\x14")[:-1]))
        place = match.end()
    return lists


def decode_annotations(
    blocks: Sequence[np.ndarray],
) -> tuple[np.ndarray, list[Annotation], list[Finding]]:
    """Onset of each record (NaN without a time-keeping annotation), all annotations, findings.

    Args:
        blocks: bytes of each annotation signal, uint8 [R, bytes].
    """
    onsets = _decode_record_onsets(blocks[0]) if blocks else np.empty(0)
    timed: list[TimedTexts] = []
    for signal, rows in enumerate(blocks):
        pending = rows.any(axis=1) if signal else np.isnan(onsets)
        for record in np.flatnonzero(pending).tolist():
            try:
                lists = parse_tals(rows[record].tobytes())
            except UserError as error:
                error.problem += f", record {record + 1}"
                raise
            if signal == 0 and lists:
                onset, duration, texts = lists[0]
                if duration is None and not any(texts[:1]):
                    onsets[record] = onset
            timed += lists
    notes, findings = _decode_texts(timed)
    return onsets, sorted(notes, key=lambda note: note.onset), findings


def _decode_texts(timed: Sequence[TimedTexts]) -> tuple[list[Annotation], list[Finding]]:
    """The texts as annotations, and warnings about those that are not stored as they are."""
    notes: list[Annotation] = []
    recoded = unsafe = 0
    for onset, duration, texts in timed:
        for raw in filter(None, texts):
            words = decode_text(raw)
            label = clean(words)
            recoded += not raw.isascii() and not is_utf8(raw)
            unsafe += label != words or has_unsafe_characters(label)
            notes.append(Annotation(onset, duration or 0.0, label))
    rows = (
        (Reason.ENCODING, "that are not valid UTF-8", "read as Latin-1", recoded),
        (
            Reason.LABEL_CHARS,
            "with markup, formula or control characters",
            "stored, if at all, without control characters",
            unsafe,
        ),
    )
    findings = [
        input_warning(code, f"annotations {what}: {count}", action, count=count)
        for code, what, action, count in rows
        if count
    ]
    return notes, findings


def _decode_record_onsets(rows: np.ndarray) -> np.ndarray:
    """Onset of each record whose first annotation signal holds a time-keeping list and nothing
    else; NaN for the others.

    Nearly all records of a long recording are such, and `parse_tals` takes three times as long.
    """
    data, width = rows.tobytes(), rows.shape[1]
    onsets = np.full(len(rows), np.nan)
    for record in range(len(rows)):
        match = TIME_KEEPING.fullmatch(data, record * width, (record + 1) * width)
        if match and math.isfinite(float(match[1])):
            onsets[record] = float(match[1])
    return onsets


def encode_tal(onset: float, duration: float | None, text: str) -> bytes:
    """One time-stamped annotation list. Raises ValueError for a text that it cannot hold."""
    if set(text) & {"\x00", "\x14", "\x15"}:
        raise ValueError("annotations cannot hold the bytes 0, 20 and 21")
    stamp = _format_seconds(onset)
    if duration is not None:
        stamp += f"\x15{_format_seconds(duration)[1:]}"
    return f"{stamp}\x14{text}\x14".encode() + b"\x00"


def _format_seconds(seconds: float) -> str:
    """With a sign and without an exponent, to the microsecond."""
    return f"{seconds:+.6f}".rstrip("0").rstrip(".")
