"""Variants of faults in every class of input, as data: what is put where, and the reason code that
the reader must give.

A text maps to the code of the refusal, to "~code" for an accepted file with that warning, to "" for
one that is accepted without any.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

from bitimely_core.formats import edf_header, edf_writer

Codes = dict[bytes, str]

NUMBERS: Codes = dict.fromkeys(
    (b"inf", b"nan", b"1_000", b"0x10", "\u0661\u0662".encode(), b"2,500", b"1e400", b"", b"abc"),
    "header_field",
)
BAD_RANGES = dict.fromkeys((b"1e30", b"-1e30", b"1e300", b"1e19", b"1e12"), "physical_range")
# of the first of two channels: -192 to 192 uV, -2048 to 2047, 100 samples a record of a second
EDF_SIGNAL: dict[str, Codes] = {
    "physical_max": NUMBERS
    | BAD_RANGES
    | dict.fromkeys((b"+192", b"1.92e2", b"192.", b"192\0", b"1e6", b"-500"), ""),
    "physical_min": NUMBERS
    | {
        b"192": "physical_range",
        b"-1e30": "physical_range",
        b"191.9999": "physical_range",
        b"191": "",
        b"-0": "",
    },
    "digital_max": NUMBERS
    | dict.fromkeys((b"1e3", b"2047.5"), "header_field")
    | dict.fromkeys((b"-2048", b"32768", b"99999"), "digital_range")
    | dict.fromkeys((b"+2047", b"2047.0"), "")
    | {b"5": "~digital_range"},
    "samples_per_record": NUMBERS
    | {
        b"0": "header_implausible",
        b"-1": "header_implausible",
        b"+100": "",
        b"100.0": "",
        b"9999999": "truncated",
    },
    "label": {
        **dict.fromkeys(
            (
                b"a\0b",
                b"\0ab",
                b"ab\0 ",
                b"a\x07",
                b"a\x1b[31m",
                b"a\tb",
                b"a\x7f",
                b"<b>",
                b"=1",
                b"",
            ),
            "~label_chars",
        ),
        b"ab\0\0\0\0\0\0\0\0\0\0\0\0\0\0": "",
        b" ab": "",
    },
    "unit": {
        **dict.fromkeys((b"u\0V", b"uV\0 ", b"\x07V", b"<V>", b"u\x1bV"), "~label_chars"),
        b"uV\0\0\0\0\0\0": "",
        b"mV": "",
    },
}
EDF_FIXED: dict[str, Codes] = {
    "record_duration": NUMBERS
    | dict.fromkeys((b"0", b"-1", b"1e-7", b"1e8", b"1e6", b"1e-5"), "record_duration")
    | dict.fromkeys((b"+1", b"1e0", b"1.0", b"0.001", b"86400"), ""),
    "n_records": NUMBERS
    | {
        b"-2": "header_implausible",
        b"9999999": "header_implausible",
        b"-1": "~n_records_unknown",
        b"+6": "",
        b"6.0": "",
    },
    "n_signals": NUMBERS
    | {b"0": "header_implausible", b"-2": "header_implausible", b"3": "header_bytes", b"+2": ""},
}
WFDB_CALIBRATIONS = {
    **dict.fromkeys(
        (
            "1e-300/mV",
            "1e300/mV",
            "1e30/mV",
            "1e-30/mV",
            "1e-12/mV",
            "1000(999999999999999999)/mV",
            "1e19/V",
        ),
        "gain",
    ),
    **dict.fromkeys(
        ("nan/mV", "inf/mV", "1_000/mV", "0x10/mV", "1000,0/mV", "1000(0.5)/mV", "1e400/mV"), "gain"
    ),
    **dict.fromkeys(
        (
            "1e3/mV",
            "+1000/mV",
            "-1000/mV",
            "1000(-32768)/mV",
            "1e-3/mV",
            "1e6/uV",
            "1000/NU",
            "1e9/NU",
        ),
        "",
    ),
    **dict.fromkeys(("0/mV", "(0)/mV", "1e-400/mV"), "~gain"),
    "1000/m\x07V": "~label_chars",
}
WFDB_RATES = {
    **dict.fromkeys(
        ("1e-9", "1e7", "0", "-100", "nan", "1_00", "0x64", "1e400", "\u0661"), "sampling_rate"
    ),
    **dict.fromkeys(("1e2", "+100", "100/1", "100/1(0)", "2e-5", "1e6"), ""),
}
WFDB_FORMATS = {
    **dict.fromkeys(("999", "1"), "format"),
    **dict.fromkeys(("16x0", "16x99999", "16:99999"), "header_implausible"),
    **dict.fromkeys(("16:-1", "x"), "header_syntax"),
    "16 16": "header_field",
    "16+99999999": "truncated",
    "16x1": "",
    "16+0": "",
}
WFDB_RECORDS = {
    **dict.fromkeys(
        (
            "r 2 100 50 25:61:00",
            "r 2 100 50 10:00:00+02:00 01/01/2020",
            "r 2 100 50 10:00:00 2020-01-01",
        ),
        "~base_date",
    ),
    **dict.fromkeys(("r 3 100 50", "r/1 2 100 50", "r 2.0 100 50", "r"), "header_syntax"),
    **dict.fromkeys(("x 2 100 50", "\u0661 2 100 50"), "record_name"),
    "r 2 100 1e3": "header_field",
    "r 2 100 -50": "header_implausible",
    "r 2 100 51": "truncated",
    "r 2": "~sampling_rate",
    **dict.fromkeys(("r 2 100", "r 2 100 0", "r  2\t100 50", "r 2 100 50 10:00:00 01/01/2020"), ""),
}
WFDB_NAMES = {  # of the first of two signals, the second is II
    **dict.fromkeys(("I\x07", "<b>I", "=I", "I\x1b[31m", "\u200bI"), "~label_chars"),
    "II": "duplicate_channel",
    "I\0": "header_syntax",
    **dict.fromkeys(("", "I", "i", "I  V", "avR"), ""),
}
TS_HEADER = [
    "@problemName P",
    "@timeStamps false",
    "@missing true",
    "@univariate false",
    "@dimensions 2",
    "@equalLength true",
    "@seriesLength 4",
]
TS_LINES = {  # put before @data
    **dict.fromkeys(("@missing true", "@SERIESLENGTH 4", "# comment", ""), ""),
    **dict.fromkeys(("@frobnicate yes", "@description a b"), "~header_syntax"),
    **dict.fromkeys(("@missing false", "@dimensions 3", "1,2,3,4:1,2,3,4:0"), "header_syntax"),
}
TS_CASES = {  # one case of five
    **dict.fromkeys(("@data", "@seriesLength 4", "@DATA"), "header_syntax"),
    **dict.fromkeys(("1,2,3,4:1,2,3,4:", "1,2,3,4:1,2,3,4:?", "1,2,3,4:1,2,3,4:9"), "label"),
    "1,2,3,4:1,2,3,4:0\x07": "label_chars",
    **dict.fromkeys(("1,2,3,4:0", "1,2,3,4:1,2,3,4:1,2,3,4:0"), "dimensions"),
    **dict.fromkeys(("1,2,3:1,2,3,4:0", "1,2,3,4,5:1,2,3,4:0"), "length"),
    **dict.fromkeys(
        (f"1,2,3,{v}:1,2,3,4:0" for v in ("", "x", "1_0", "0x1", "NA", "1\0", "1 2", "\u0661")),
        "not_numeric",
    ),
    **dict.fromkeys(
        (f"1,2,3,{v}:1,2,3,4:0" for v in ("inf", "1e400", "-inf", "1e39")), "non_finite"
    ),
    **dict.fromkeys((f"1,2,3,{v}:1,2,3,4:0" for v in ("1e30", "-1e19")), "physical_range"),
    **dict.fromkeys((f"1,2,3,{v}:1,2,3,4:0" for v in ("?", "NaN")), "~missing_values"),
    **dict.fromkeys(
        (f"1,2,3,{v}:1,2,3,4:0" for v in ("+1", "1.", ".5", "1e5", "1e-45", " 4 ")), ""
    ),
}
CELLS = {  # one cell of a table of numbers
    **dict.fromkeys(
        (
            "n/a",
            "NULL",
            "1_0",
            "0x1",
            "\u0661",
            '"1,5"',
            '"1,000"',
            "=1",
            "\x071",
            "true",
            "2001-01-01",
        ),
        "not_numeric",
    ),
    **dict.fromkeys(("inf", "NaN", "1e400", "-Infinity", "1e39"), "non_finite"),
    **dict.fromkeys(("1e30", "-1e19"), "physical_range"),
    **dict.fromkeys(("1\0", 'a"b"'), "csv_syntax"),
    "1,5": "row_width",
    "": "missing_values",
    **dict.fromkeys(("+1", "1.", "1e5", " 1 ", '"1"', "1e18"), ""),
}
TABLE_BYTES = {  # the table -> another; "id,x" and three rows
    "bom": (lambda b: b"\xef\xbb\xbf" + b, ""),
    "utf-16": (lambda b: b.decode().encode("utf-16"), ""),
    "crlf": (lambda b: b.replace(b"\n", b"\r\n"), ""),
    "cr": (lambda b: b.replace(b"\n", b"\r"), ""),
    "blank lines": (lambda b: b"\n\n" + b.replace(b"\n", b"\n\n"), ""),
    "padded names": (lambda b: b.replace(b"id,x", b" id , x "), ""),
    "quoted": (lambda b: b.replace(b"id,x", b'"id","x"'), ""),
    "gzip": (gzip.compress, ""),
    "empty column": (lambda b: b.replace(b"\n", b",\n"), ""),
    "latin-1": (lambda b: b.replace(b"b2", b"b\xe9"), "encoding"),
    "utf-16 without mark": (lambda b: b.decode().encode("utf-16-le"), "encoding"),
    "utf-32": (lambda b: b.decode().encode("utf-32"), "encoding"),
    "cut gzip": (lambda b: gzip.compress(b)[:-9], "truncated"),
    "gzip and more": (lambda b: gzip.compress(b) + b"more", "corrupt"),
    "gzip of nothing": (lambda b: gzip.compress(b""), "empty_file"),
    "nothing": (lambda b: b"", "empty_file"),
    "upper case": (lambda b: b.replace(b"id,x", b"ID,X"), "schema"),
    "one in upper case": (lambda b: b.replace(b"id,x", b"id,X"), "schema"),
    "twice": (lambda b: b.replace(b"id,x", b"x,x"), "header"),
    "semicolons": (lambda b: b.replace(b",", b";"), "header"),
    "no header": (lambda b: b.partition(b"\n")[2], "header"),
    "zero byte in a name": (lambda b: b.replace(b"id,x", b"i\0d,x"), "csv_syntax"),
    "bell in a name": (lambda b: b.replace(b"id,x", b"id\x07,x"), "label_chars"),
    "zero width space": (lambda b: b.replace(b"id,x", b"id\xe2\x80\x8b,x"), "label_chars"),
}
DATES = {  # one date of a table of claims; "" is read, "~timestamps" with a warning, "date" is not
    **dict.fromkeys(
        (
            "2001-03-04",
            "2001-3-4",
            "20010304",
            "2001-03",
            "2001-03-04 10:00:00",
            "2001-03-04T10:00",
            " 2001-03-04 ",
        ),
        "",
    ),
    **dict.fromkeys(
        (
            "2001-03-04T23:30:00Z",
            "2001-03-04T23:30:00.5+02:00",
            "2001-03-04 23:30:00 -0500",
            "2001-03-04Z",
            "2001-03-04+05:00",
        ),
        "~timestamps",
    ),
    **dict.fromkeys(
        (
            "2001-03-04xyz",
            "2001-03-04 EST5",
            "2001-03-04T",
            "01-03-04",
            "3/4/01",
            "36954",
            "2001/03/04",
            "2001",
            "12001-03-04",
        ),
        "date",
    ),
    **dict.fromkeys(
        ("2001-W10-1", "2001-063", "March 4 2001", "2001-02-30", "\u0662001-03-04"), "date"
    ),
}


def write_edf(
    path: Path,
    channels: list[edf_header.EdfChannel],
    fields: dict[str, bytes],
    *,
    records: int = 6,
    signal: int = 0,
) -> Path:
    """A file of one-second records of noise, with fields of the header or of one signal
    overwritten.
    """
    rng = np.random.default_rng(0)
    samples = [
        rng.integers(c.digital_min // 2, c.digital_max // 2, records * c.samples).astype(np.int16)
        for c in channels
    ]
    raw = bytearray(edf_writer.encode_edf(channels, samples))
    place = 0
    for name, width in edf_header.FIELDS:
        if name in fields:
            raw[place : place + width] = fields[name][:width].ljust(width)
        place += width
    for name, width in edf_header.SIGNAL_FIELDS:
        if name in fields:
            raw[place + signal * width : place + (signal + 1) * width] = fields[name][:width].ljust(
                width
            )
        place += width * len(channels)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(raw))
    return path
