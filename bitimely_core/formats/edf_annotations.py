"""Annotations of EDF+ and BDF+: time-stamped annotation lists (TALs), parsed and written, and the
onset that each data record states.

Legend: R data records.
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
CONTENT = re.compile(rb"[^\x00]")


def parse_tals(block: bytes) -> list[tuple[float, float | None, list[bytes]]]:
    """Time-stamped annotation lists of one data record: (onset, duration or None, texts), in the
    order of the file.

    Raises UserError: annotation_syntax for anything that is no list, with the position in the block
    and none of the text.
    """
    lists = []
    place = 0
    while begin := CONTENT.search(block, place):
        place = begin.start()
        found = TAL.match(block, place)
        onset = float(found[1]) if found else math.inf
        duration = float(found[2]) if found and found[2] else None
        if found is None or not math.isfinite(onset) or not math.isfinite(duration or 0):
            text = f"no time-stamped annotation list begins at byte {place} of an annotation signal"
            raise input_error(
                Reason.ANNOTATION_SYNTAX,
                text,
                "expected +onset, byte 20, texts each ended by byte 20, byte 0",
            )
        lists.append((onset, duration, found[3].split(b"\x14")[:-1]))
        place = found.end()
    return lists


def decode_annotations(
    blocks: Sequence[np.ndarray],
) -> tuple[np.ndarray, list[Annotation], list[Finding]]:
    """Onset of each record (NaN without a time-keeping annotation), all annotations, findings.

    Args:
        blocks: bytes of each annotation signal, uint8 [R, bytes].
    """
    notes: list[Annotation] = []
    recoded = unsafe = 0
    onsets = _decode_record_onsets(blocks[0]) if blocks else np.empty(0)
    for signal, rows in enumerate(blocks):
        silent = ~rows.any(axis=1) if signal else ~np.isnan(onsets)
        for record in np.flatnonzero(~silent).tolist():
            try:
                lists = parse_tals(rows[record].tobytes())
            except UserError as error:
                error.problem += f", record {record + 1}"
                raise
            if signal == 0 and lists and lists[0][1] is None and not any(lists[0][2][:1]):
                onsets[record] = lists[0][0]
            for onset, duration, texts in lists:
                for raw in filter(None, texts):
                    words = decode_text(raw)
                    label = clean(words)
                    recoded += not raw.isascii() and not is_utf8(raw)
                    unsafe += label != words or has_unsafe_characters(label)
                    notes.append(Annotation(onset, duration or 0.0, label))
    findings = []
    if recoded:
        findings.append(
            input_warning(
                Reason.ENCODING,
                f"annotations that are not valid UTF-8: {recoded}",
                "read as Latin-1",
                count=recoded,
            )
        )
    if unsafe:
        problem = f"annotations with markup, formula or control characters: {unsafe}"
        findings.append(
            input_warning(
                Reason.LABEL_CHARS,
                problem,
                "stored, if at all, without control characters",
                count=unsafe,
            )
        )
    return onsets, sorted(notes, key=lambda note: note.onset), findings


def _decode_record_onsets(rows: np.ndarray) -> np.ndarray:
    """Onset of each record whose first annotation signal holds a time-keeping list and nothing
    else, NaN for the others.

    These are nearly all records of a long recording; all at once they take a tenth of the time of
    `parse_tals`.
    """
    onsets = np.full(len(rows), np.nan)
    for first in range(0, len(rows), 4096):
        part = rows[first : first + 4096]
        stop = (part == 20).argmax(axis=1)  # +onset, byte 20, byte 20, zeros
        digit, point = (part >= ord("0")) & (part <= ord("9")), part == ord(".")
        stamp = (digit | point) & (np.arange(part.shape[1]) < stop[:, None])
        plain = ((part[:, 0] == ord("+")) | (part[:, 0] == ord("-"))) & digit[:, 1] & (stop > 1)
        plain &= (
            (point.sum(axis=1) <= 1)
            & (stamp.sum(axis=1) == stop - 1)
            & ((part != 0).sum(axis=1) == stop + 2)
        )
        plain &= (
            np.take_along_axis(part, np.minimum(stop + 1, part.shape[1] - 1)[:, None], axis=1)[:, 0]
            == 20
        )
        stamps = np.where(part == 20, np.uint8(0), part)[plain]
        onsets[first : first + 4096][plain] = stamps.view(f"S{part.shape[1]}")[:, 0].astype(float)
    return np.where(np.isfinite(onsets), onsets, np.nan)


def encode_tal(onset: float, duration: float | None, text: str) -> bytes:
    """One time-stamped annotation list. Raises ValueError for a text that it cannot hold."""
    if set(text) & {"\x00", "\x14", "\x15"}:
        raise ValueError("annotations cannot hold the bytes 0, 20 and 21")
    stamp = _format_seconds(onset) + (
        "" if duration is None else f"\x15{_format_seconds(duration)[1:]}"
    )
    return f"{stamp}\x14{text}\x14".encode() + b"\x00"


def _format_seconds(seconds: float) -> str:
    """With a sign and without an exponent, to the microsecond."""
    return f"{seconds:+.6f}".rstrip("0").rstrip(".")
