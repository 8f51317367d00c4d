"""Decodes the samples of WFDB signal files: the packed formats and FLAC, block by block.

Checksums and initial values are compared with those of the header, and samples are calibrated.

Digital values are the file's own, bit for bit. Legend: F frames, W samples of all signals of one
file in a frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bitimely_core.errors import Finding, Reason, input_error, input_warning, safe_text
from bitimely_core.formats.source import translate_read_errors
from bitimely_core.formats.text import list_numbers
from bitimely_core.system_errors import raise_system_error

# bytes that a compressed file may always hold; beyond it at most MAX_RATIO times its size
MAX_EXPANDED = 1 << 28
MAX_RATIO = 1000
BLOCK = 1 << 17  # samples, or pairs or triplets of them, that are decoded at once


class WfdbChannel(NamedTuple):
    """One signal of a header."""

    number: int  # 1-based line of the header
    name: str  # safe to store: without control, markup and formula characters
    unit: str
    gain: float  # digital steps a unit
    baseline: int  # digital value of the physical 0
    samples: int = 1  # a frame
    skew: int = 0  # frames before the record's beginning
    initial: int | None = None
    checksum: int | None = None

    @property
    def scale(self) -> float:
        """Physical units a digital step."""
        return 1.0 / self.gain

    @property
    def offset(self) -> float:
        """Physical value of the digital 0."""
        return -self.baseline / self.gain


class WfdbSignalGroup(NamedTuple):
    """The signals that one file holds, interleaved frame by frame."""

    path: Path
    name: str  # as in the header
    code: int  # sample format
    start: int  # bytes before the first sample; FLAC: frames of the stream
    channels: tuple[WfdbChannel, ...]

    @property
    def width(self) -> int:
        """Samples of all signals in a frame."""
        return sum(channel.samples for channel in self.channels)


def _decode_212(raw: np.ndarray) -> np.ndarray:
    """Two 12-bit values in three bytes; the low bytes are the first and the third."""
    three = raw.reshape(-1, 3).astype(np.int16)
    pair = np.empty((len(three), 2), np.int16)
    pair[:, 0] = (three[:, 0] << 4) | (three[:, 1] << 12)
    pair[:, 1] = (three[:, 2] << 4) | ((three[:, 1] & 0xF0) << 8)
    return (pair >> 4).reshape(-1)  # shifted up and down again: the sign is extended


def _decode_310(raw: np.ndarray) -> np.ndarray:
    """Three 10-bit values in two words: bits 1 to 10 of each, and the five highest bits of both."""
    words = raw.view("<u2").reshape(-1, 2)
    low, high = words[:, 0], words[:, 1]
    third = ((low >> 11) | ((high >> 11) << 5)) << 6
    return np.stack([low << 5, high << 5, third], axis=1).view(np.int16).reshape(-1) >> 6


def _decode_311(raw: np.ndarray) -> np.ndarray:
    """Three 10-bit values in the low 30 bits of a double word."""
    word = raw.view("<u4")
    return (
        np.stack([word << 22, word << 12, word << 2], axis=1).view(np.int32).reshape(-1) >> 22
    ).astype(np.int16)


def _decode_24(raw: np.ndarray) -> np.ndarray:
    wide = np.zeros((raw.size // 3, 4), np.uint8)
    wide[:, 1:] = raw.reshape(-1, 3)
    return wide.reshape(-1).view("<i4") >> 8


class SampleFormat(NamedTuple):
    """A sample format without compression."""

    sizes: tuple[int, ...]  # bytes of 0, 1, ... samples, the last of a complete block
    invalid: int | None  # the value that marks a missing sample
    kind: type[np.signedinteger]  # type that holds a sample
    decode: Callable[[np.ndarray], np.ndarray]  # uint8 of complete blocks -> integers


FORMATS = {
    # differences, summed up later
    8: SampleFormat((0, 1), None, np.int8, lambda raw: raw.view(np.int8)),
    16: SampleFormat((0, 2), -(1 << 15), np.int16, lambda raw: raw.view("<i2")),
    24: SampleFormat((0, 3), -(1 << 23), np.int32, _decode_24),
    32: SampleFormat((0, 4), -(1 << 31), np.int32, lambda raw: raw.view("<i4")),
    61: SampleFormat((0, 2), -(1 << 15), np.int16, lambda raw: raw.view(">i2")),
    80: SampleFormat((0, 1), -(1 << 7), np.int16, lambda raw: raw.astype(np.int16) - 128),
    160: SampleFormat(
        (0, 2), -(1 << 15), np.int16, lambda raw: (raw.view("<u2") ^ 0x8000).view(np.int16)
    ),
    212: SampleFormat((0, 2, 3), -(1 << 11), np.int16, _decode_212),
    310: SampleFormat((0, 2, 4, 4), -(1 << 9), np.int16, _decode_310),
    311: SampleFormat((0, 2, 3, 4), -(1 << 9), np.int16, _decode_311),
}
FLAC = {508: 8, 516: 16, 524: 24}  # bits a sample
FLAC_BITS = {"PCM_S8": 8, "PCM_16": 16, "PCM_24": 24}  # as soundfile calls them


def count_bytes(code: int, samples: int) -> int:
    """Bytes that hold this many samples."""
    sizes = FORMATS[code].sizes
    blocks, rest = divmod(samples, len(sizes) - 1)
    return blocks * sizes[-1] + sizes[rest]


def count_samples(code: int, size: int) -> int:
    """Complete samples in this many bytes."""
    sizes = FORMATS[code].sizes
    blocks, rest = divmod(size, sizes[-1])
    return blocks * (len(sizes) - 1) + max(k for k, need in enumerate(sizes) if need <= rest)


def count_flac_frames(head: bytes, size: int, group: WfdbSignalGroup) -> int:
    """Frames by the first block of a FLAC file, which must agree with the header.

    Raises UserError: corrupt, format, header_syntax, expansion_limit.
    """
    file = safe_text(group.name)
    if len(head) < 42 or head[:4] != b"fLaC" or head[4] & 0x7F != 0:
        raise input_error(
            Reason.CORRUPT,
            f"{file} does not begin like a FLAC file",
            f"expected for format {group.code}",
            field="file_name",
        )
    # 20 bits of rate, 3 of channels - 1, 5 of bits - 1, 36 of length
    packed = int.from_bytes(head[18:26], "big")
    channels, bits = (packed >> 41 & 7) + 1, (packed >> 36 & 31) + 1
    length = packed & ((1 << 36) - 1)
    if channels != len(group.channels):
        raise input_error(
            Reason.HEADER_SYNTAX,
            f"{file} has {channels} signals",
            f"the header says {len(group.channels)}",
            field="n_signals",
        )
    if bits > FLAC[group.code]:
        raise input_error(
            Reason.FORMAT,
            f"{file} has {bits} bits a sample",
            f"format {group.code} has {FLAC[group.code]}",
            field="format",
        )
    if 4 * channels * length > max(MAX_EXPANDED, MAX_RATIO * size):
        problem = f"{file} says that {4 * channels * length} bytes of samples are in {size}"
        raise input_error(
            Reason.EXPANSION_LIMIT, problem, "no recording is compressed that well", field="length"
        )
    return max(0, length - group.start) // group.channels[0].samples


def decode_group(group: WfdbSignalGroup, frames: int) -> list[np.ndarray]:
    """Digital values of each signal of a file, int8 to int32, [F * samples] each."""
    flat = _decode_packed(group, frames) if group.code in FORMATS else _decode_flac(group, frames)
    rows = flat.reshape(frames, group.width)
    if group.width == len(group.channels) and group.code != 8:
        return list(np.ascontiguousarray(rows.T))
    edges = np.cumsum([0, *(channel.samples for channel in group.channels)]).tolist()
    columns = [np.ascontiguousarray(rows[:, a:b]).reshape(-1) for a, b in pairwise(edges)]
    if group.code == 8:
        columns = [
            (c.initial or 0) + np.cumsum(v, dtype=np.int64)
            for c, v in zip(group.channels, columns, strict=True)
        ]
    return columns


def _decode_packed(group: WfdbSignalGroup, frames: int) -> np.ndarray:
    """All samples of a file without compression, in its order: [F * W], int8, int16 or int32.

    Block by block: the processor's cache holds what is decoded, and a file that shrinks meanwhile
    gives an error instead of a SIGBUS.
    """
    code = FORMATS[group.code]
    samples = frames * group.width
    many = BLOCK * (len(code.sizes) - 1)
    values = np.empty(samples, code.kind)
    with translate_read_errors(group.path, group.name), group.path.open("rb") as file:
        file.seek(group.start)
        for first in range(0, samples, many):
            block = values[first : first + many]
            size = count_bytes(group.code, len(block))
            raw = np.zeros(-(-size // code.sizes[-1]) * code.sizes[-1], np.uint8)
            if file.readinto(raw.data[:size]) != size:
                problem = f"{safe_text(group.name)} became shorter while it was read"
                raise input_error(Reason.TRUNCATED, problem, "nothing may write to it")
            block[:] = code.decode(raw)[: len(block)]
    return values


def _decode_flac(group: WfdbSignalGroup, frames: int) -> np.ndarray:
    """All samples of a FLAC file, in the order of a file without compression: [F * W], int16 or
    int32.
    """
    import soundfile  # type: ignore[import-untyped]

    each = group.channels[0].samples
    bits = FLAC[group.code]
    file = safe_text(group.name)
    values = np.empty((frames * each, len(group.channels)), np.int16 if bits <= 16 else np.int32)
    try:
        with soundfile.SoundFile(group.path) as stream:
            stream.seek(group.start)
            shift = 32 - FLAC_BITS[stream.subtype]
            for first in range(0, len(values), BLOCK):
                block = values[first : first + BLOCK]
                wide = stream.read(len(block), dtype="int32", always_2d=True)
                if len(wide) != len(block):
                    problem = f"{file} ends before its last sample"
                    wanted = "expected a complete FLAC stream"
                    raise input_error(Reason.TRUNCATED, problem, wanted, field="file_name")
                block[:] = wide >> shift
    except (OSError, RuntimeError, KeyError, ValueError, AssertionError) as error:
        # RuntimeError: soundfile's own errors
        raise_system_error(error, group.path, stored=False)
        raise input_error(
            Reason.CORRUPT,
            f"{file} does not decode ({type(error).__name__})",
            "expected FLAC",
            field="file_name",
        ) from None
    return values.reshape(frames, each, -1).transpose(0, 2, 1).reshape(-1)


def verify_checksums(
    group: WfdbSignalGroup,
    values: Sequence[np.ndarray],
    findings: list[Finding],
    *,
    sized: bool,
    unfilled: bool,
) -> None:
    """Compare checksums and initial values with those of the header.

    A checksum is the sum of all digital samples modulo 65,536, signed or unsigned in headers. Where
    the header states no length (not `sized`) the format does not promise one; where all of its
    checksums and initial values are 0 they were never filled in. Both are warned about, not
    refused. `unfilled`: no header of the folder has a checksum, which its reader was told.

    Raises UserError: checksum, initial_value.
    """
    if unfilled:
        _report_unfilled(group, values, findings)
        return
    channels = group.channels
    unfilled = not any(c.checksum or c.initial for c in channels)
    damaged = _find_damaged(channels, values)
    if damaged:
        signals = f"signal {list_numbers(damaged)} in {safe_text(group.name)}"
        problem = f"the samples of {signals} do not add up to the checksum of the header"
        if sized and not unfilled:
            raise input_error(Reason.CHECKSUM, problem, "one of them is damaged", field="checksum")
        why = "all are 0 in the header" if sized else "the header states no length"
        findings.append(_report_difference(Reason.CHECKSUM, problem, why, len(damaged)))
    if group.code == 8:  # the initial value is what the differences are added to
        return
    verified = not damaged and all(c.checksum is not None for c in channels)
    _verify_initial(group, values, findings, unfilled=unfilled, verified=verified)


def _report_unfilled(
    group: WfdbSignalGroup, values: Sequence[np.ndarray], findings: list[Finding]
) -> None:
    """What differs from a header whose numbers nobody filled in, for the report alone."""
    stale = [
        c.number
        for c, samples in zip(group.channels, values, strict=True)
        if c.initial is not None and int(samples[0]) != c.initial
    ]
    for code, numbers in (
        (Reason.CHECKSUM, _find_damaged(group.channels, values)),
        (Reason.INITIAL_VALUE, stale),
    ):
        if numbers:
            problem = f"that of signal {list_numbers(numbers)} is not that of the header"
            action = "whose checksums are not filled in"
            count = len(numbers)
            findings.append(Finding(code, problem, action, level="info", count=count))


def _find_damaged(channels: Sequence[WfdbChannel], values: Sequence[np.ndarray]) -> list[int]:
    """The numbers of the signals whose samples do not add up to their checksum."""
    return [
        c.number
        for c, samples in zip(channels, values, strict=True)
        if c.checksum is not None and (int(samples.sum(dtype=np.int64)) - c.checksum) & 0xFFFF
    ]


def _report_difference(code: Reason, problem: str, why: str, count: int) -> Finding:
    return input_warning(code, problem, f"not refused because {why}", field=str(code), count=count)


def _verify_initial(
    group: WfdbSignalGroup,
    values: Sequence[np.ndarray],
    findings: list[Finding],
    *,
    unfilled: bool,
    verified: bool,
) -> None:
    """Compare the initial values of the header with the first samples.

    They are redundant, and tools leave stale ones. A wrong one is refused unless the checksums are
    right (`verified`) and no frame of the file has the header's values: else samples may be
    shifted.
    """
    stated = [
        (c, samples)
        for c, samples in zip(group.channels, values, strict=True)
        if c.initial is not None
    ]
    wrong = [c.number for c, samples in stated if int(samples[0]) != c.initial]
    if not wrong:
        return
    signals = f"signal {list_numbers(wrong)} in {safe_text(group.name)}"
    problem = f"the first sample of {signals} is not the initial value of the header"
    equal = [samples[:: c.samples] == c.initial for c, samples in stated]
    shifted = np.logical_and.reduce(equal).any()
    if not unfilled and (shifted or not verified):
        wanted = "the samples are shifted or damaged"
        raise input_error(Reason.INITIAL_VALUE, problem, wanted, field="initial_value")
    why = (
        "all are 0 in the header"
        if unfilled
        else "the checksums are right and the values occur nowhere in the file"
    )
    findings.append(_report_difference(Reason.INITIAL_VALUE, problem, why, len(wrong)))


class CalibratedSamples(NamedTuple):
    """Samples to keep: physical = samples * scale + offset."""

    samples: np.ndarray  # int16, or float32 with NaN where one is missing
    scale: float
    offset: float
    missing: int


def calibrate_samples(channel: WfdbChannel, digital: np.ndarray, code: int) -> CalibratedSamples:
    """The samples of a channel by their digital values in the sample format `code`.

    int16 as long as the values fit. float32, which holds 24 bits exactly, for missing samples and
    longer values. Beyond 24 bits float32 of the physical values, because a float32 of such digital
    values could lose all that is above a large baseline.

    Raises UserError: gain.
    """
    invalid = FORMATS[code].invalid if code in FORMATS else -(1 << (FLAC[code] - 1))
    lost = np.zeros(len(digital), bool) if invalid is None else digital == invalid
    missing = int(np.count_nonzero(lost))
    bits = _count_bits(digital, lost)
    scale, offset = channel.scale, channel.offset
    if bits > 25:  # sign and 24 bits
        with np.errstate(over="ignore"):
            samples = ((digital - float(channel.baseline)) / channel.gain).astype(np.float32)
        if not np.isfinite(samples[~lost]).all():
            problem = f"signal {channel.number} has values beyond 10^38"
            raise input_error(Reason.GAIN, problem, "expected a usable gain", field="gain")
        scale, offset = 1.0, 0.0
    else:
        samples = digital.astype(np.float32 if missing or bits > 16 else np.int16, copy=False)
    if missing:
        samples[lost] = np.nan
    return CalibratedSamples(samples, scale, offset, missing)


def _count_bits(digital: np.ndarray, lost: np.ndarray) -> int:
    """Bits, with that of the sign, of the longest value that is not `lost`; 16 for int16."""
    if digital.dtype.itemsize <= 2:
        return 16
    edges = (digital.min(where=~lost, initial=0), digital.max(where=~lost, initial=0))
    return 1 + max(int(edge if edge >= 0 else ~edge).bit_length() for edge in edges)
