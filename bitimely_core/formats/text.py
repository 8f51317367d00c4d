"""Decodes text from foreign files, and makes labels safe to store and to show.

A table is UTF-8 with or without a byte order mark, UTF-16 with one, or in the encoding that
`--encoding` states (`use_encoding`). A mark outranks that statement; bytes that do not decode
refuse the table.
"""

from __future__ import annotations

import codecs
import io
import re
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import IO

from bitimely_core.errors import (
    Finding,
    Reason,
    UserError,
    input_error,
    input_warning,
    safe_text,
    usage_error,
)
from bitimely_core.wording import list_first

UTF8 = "utf-8"
BYTE_ORDER_MARKS = {b"\xef\xbb\xbf": UTF8, b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
UTF32_MARKS = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
NO_ENCODING_OF_TABLES = {
    "idna",
    "punycode",
    "unicode-escape",
    "raw-unicode-escape",
    "utf-7",
    "undefined",
}
DECODED_BYTES = 1 << 20  # decoded at once
ENCODING: ContextVar[str] = ContextVar("encoding", default=UTF8)
"""Encoding of tables without a byte order mark: `use_encoding` sets it for an ingest."""

MARKUP = re.compile(r"[<>\[\]`]|&#?\w+;")
FORMULA = ("=", "+", "-", "@")


@contextmanager
def use_encoding(name: str | None) -> Iterator[None]:
    """Read tables without a byte order mark in the encoding `name` within the block; None: UTF-8.

    Raises UserError: config (exit 2) for a name that is no encoding of texts.
    """
    try:
        codec = codecs.lookup(name or UTF8)
    except (LookupError, ValueError):
        codec = None
    if codec is None or not codec._is_text_encoding or codec.name in NO_ENCODING_OF_TABLES:
        problem = f"{safe_text(name)} is no encoding of texts"
        expected = "expected an encoding such as latin-1, cp1252, utf-16 or shift_jis"
        raise usage_error(problem, expected, field="--encoding")
    token = ENCODING.set(codec.name)
    try:
        yield
    finally:
        ENCODING.reset(token)


def detect_encoding(head: bytes) -> tuple[str, int]:
    """Encoding of a table by its first bytes, and the length of its byte order mark.

    Raises UserError: encoding, for UTF-32, and for UTF-16 without a mark unless it is stated.
    """
    stated = ENCODING.get()
    if not stated.startswith(("utf-16", "utf-32")):
        if head.startswith(UTF32_MARKS):
            raise encoding_error(0, 1, "UTF-8 (it begins like UTF-32)", "utf-32")
        for zeros, name in ((head[1:4:2], "utf-16-le"), (head[0:3:2], "utf-16-be")):
            if zeros == b"\0\0":
                what = "UTF-8 (it looks like UTF-16 without a byte order mark)"
                raise encoding_error(0, 1, what, name)
    elif stated.startswith("utf-32") and b"\0" in head:
        return stated, 0
    for mark, name in BYTE_ORDER_MARKS.items():
        if head.startswith(mark):
            return name, len(mark)
    # UTF-16 and 32 have zeros in each line: a map beside such claims may be UTF-8
    is_plain = stated.startswith(("utf-16", "utf-32")) and b"\0" not in head
    return UTF8 if is_plain else stated, 0


def encoding_error(
    offset: int, row: int | None, expected: str = "UTF-8", likely: str = "latin-1"
) -> UserError:
    """A table whose byte `offset`, from 0, in line `row` is not in the expected encoding, but
    perhaps in `likely`.
    """
    hint = f"Save it as UTF-8, or give its encoding, for instance --encoding {likely}"
    where = "" if row is None else f" in row {row}"
    return input_error(
        Reason.ENCODING,
        f"byte {offset}{where} is not valid {expected}",
        "none of the table is used",
        hint,
        row=row,
    )


def require_utf8(text: bytes, offset: int = 0, row: int = 1) -> None:
    """Raises UserError (encoding) for bytes that are not UTF-8.

    They begin at byte `offset` of the table, in line `row`.
    """
    if text.isascii():
        return
    try:
        text.decode(UTF8)
    except UnicodeDecodeError as error:
        raise encoding_error(
            offset + error.start, row + text.count(b"\n", 0, error.start)
        ) from None


def decode_table(data: bytes, *, fallback: str | None = None) -> str:
    """The text of a table, without its byte order mark.

    `fallback`: the encoding of what is not UTF-8. Raises UserError: encoding.
    """
    encoding, mark = detect_encoding(data)
    try:
        return data[mark:].decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        if fallback and encoding == UTF8:
            return data[mark:].decode(fallback)
        row = 1 + data.count(b"\n", 0, mark + error.start)
        raise encoding_error(mark + error.start, row, encoding.upper()) from None


class DecodedStream(io.RawIOBase):
    """The bytes of a text in some encoding, after its mark of `start` bytes, as UTF-8.

    With `mac` line ends are single carriage returns.
    """

    def __init__(self, file: IO[bytes], encoding: str, start: int, *, mac: bool) -> None:
        self.file, self.encoding, self.offset, self.mac = file, encoding, start, mac
        self.decoder = codecs.getincrementaldecoder(encoding)()
        self.waiting = b""
        self.ended = False

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Fill the buffer. Raises UserError: encoding."""
        while not self.waiting and not self.ended:
            pending = len(self.decoder.getstate()[0])
            raw = self.file.read(DECODED_BYTES)
            self.ended = not raw
            try:
                text = self.decoder.decode(raw, final=self.ended)
            except UnicodeDecodeError as error:
                raise encoding_error(
                    self.offset - pending + error.start, None, self.encoding.upper()
                ) from None
            self.offset += len(raw)
            self.waiting = (text.replace("\r", "\n") if self.mac else text).encode(UTF8)
        content, self.waiting = self.waiting[: len(buffer)], self.waiting[len(buffer) :]
        buffer[: len(content)] = content
        return len(content)


def format_bytes(raw: bytes) -> str:
    """The bytes of a header field, safe to show in a message."""
    return safe_text(raw.decode("latin-1"))


def decode_text(raw: bytes) -> str:
    """UTF-8, else Latin-1, which takes any byte."""
    return raw.decode("utf-8" if is_utf8(raw) else "latin-1").strip()


def is_utf8(raw: bytes) -> bool:
    """Whether the bytes are valid UTF-8."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def sanitize_label(label: str) -> str:
    """A foreign label made safe to store.

    Control, markup and leading formula characters become underscores.
    """
    text = "".join("_" if _is_control(c) else c for c in label)
    text = MARKUP.sub("_", text).strip()
    return "_" + text[1:] if text.startswith(FORMULA) else text


def _is_control(character: str) -> bool:
    """Whether a character is one of control, format, surrogate or a separator of lines."""
    return unicodedata.category(character)[0] == "C" or character in "\u2028\u2029"


def escape_controls(text: str) -> str:
    """Text whose control, format and surrogate characters are escaped: different texts stay so."""
    if text.isprintable():
        return text
    return "".join(f"\\x{ord(c):02x}" if _is_control(c) else c for c in text)


def require_plain_names(names: Sequence[str]) -> None:
    """Raises UserError (label_chars) for names of columns with characters that no one sees.

    Tabs may be delimiters.
    """
    for number, name in enumerate(names, 1):
        name = name.replace("\t", " ")
        escaped = escape_controls(name)
        if escaped != name:
            problem = f"the name of column {number} holds control characters: {safe_text(escaped)}"
            raise input_error(
                Reason.LABEL_CHARS, problem, "expected plain text", "Correct the header", row=1
            )


def has_unsafe_characters(label: str) -> bool:
    """Whether a printable text holds markup or begins like a formula."""
    return MARKUP.search(label) is not None or label.startswith(FORMULA)


def list_names(names: Sequence[str], limit: int = 30) -> str:
    """The first names, safe to show, and how many more there are."""
    return list_first(list(map(safe_text, names)), limit)


def list_numbers(numbers: Sequence[int]) -> str:
    """The first ten numbers, and how many more there are."""
    return list_first(list(map(str, numbers)), 10)


def number_duplicates(
    names: dict[int, str], required: Collection[str] | None, field: str, findings: list[Finding]
) -> dict[int, str]:
    """Unique names of signals by 1-based number.

    Those with equal names get their numbers, and a warning is added to `findings`.

    Args:
        names: of the signals.
        required: names that must be unique; None: all.
        field: of the header, for messages.
        findings: of the header.

    Raises:
        UserError: duplicate_channel.
    """
    unique = dict(names)
    numbers: dict[str, list[int]] = {}
    for number, name in names.items():
        numbers.setdefault(name, []).append(number)
    code = Reason.DUPLICATE_CHANNEL
    for name, same in numbers.items():
        if len(same) == 1:
            continue
        problem = f"{len(same)} signals are called {safe_text(name)}: {list_numbers(same)}"
        if required is None or name in required:
            raise input_error(code, problem, "expected one", field=field, found=safe_text(name))
        action = "stored with their numbers"
        findings.append(input_warning(code, problem, action, field=field, count=len(same)))
        unique |= {number: f"{name} ({number})" for number in same}
    if len(set(unique.values())) < len(unique):
        problem = f"signals have equal {field}s"
        raise input_error(code, problem, "expected different ones", field=field)
    return unique
