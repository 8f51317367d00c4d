"""Text from foreign files: decoding, and labels made safe to store and to show."""

from __future__ import annotations

import re
import unicodedata

from bitimely_core.errors import safe_text

MARKUP = re.compile(r"[<>\[\]`]|&#?\w+;")
FORMULA = ("=", "+", "-", "@")


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
    """A foreign label made safe to store: control, markup and leading formula characters become underscores."""
    kept = "".join("_" if unicodedata.category(c)[0] == "C" or unicodedata.category(c) in {"Zl", "Zp"} else c for c in label)
    kept = MARKUP.sub("_", kept).strip()
    return "_" + kept[1:] if kept.startswith(FORMULA) else kept
