"""Text from foreign files: decoding, and labels made safe to store and to show."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Sequence

from bitimely_core.errors import Finding, Reason, input_error, input_warning, safe_text

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


def has_unsafe_characters(label: str) -> bool:
    """Whether a printable text holds markup or begins like a formula."""
    return MARKUP.search(label) is not None or label.startswith(FORMULA)


def list_names(names: Sequence[str], limit: int = 30) -> str:
    """The first names, safe to show, and how many more there are."""
    return ", ".join(map(safe_text, names[:limit])) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def list_numbers(numbers: Sequence[int]) -> str:
    """The first ten numbers, and how many more there are."""
    return ", ".join(map(str, numbers[:10])) + (f" and {len(numbers) - 10} more" if len(numbers) > 10 else "")


def number_duplicates(names: dict[int, str], required: Collection[str] | None, field: str, findings: list[Finding]) -> dict[int, str]:
    """Unique names of signals by 1-based number: those with equal names get their numbers, and a warning is added to `findings`.

    `required`: names that must be unique (None: all); `field`: of the header, for messages. Raises UserError: duplicate_channel.
    """
    unique = dict(names)
    bearers: dict[str, list[int]] = {}
    for i, name in names.items():
        bearers.setdefault(name, []).append(i)
    for name, same in bearers.items():
        if len(same) == 1:
            continue
        problem = f"{len(same)} signals are called {safe_text(name)}: {list_numbers(same)}"
        if required is None or name in required:
            raise input_error(Reason.DUPLICATE_CHANNEL, problem, "expected one", field=field, found=safe_text(name))
        findings.append(input_warning(Reason.DUPLICATE_CHANNEL, problem, "stored with their numbers", field=field, count=len(same)))
        unique |= {i: f"{name} ({i})" for i in same}
    if len(set(unique.values())) < len(unique):
        raise input_error(Reason.DUPLICATE_CHANNEL, f"signals have equal {field}s", "expected different ones", field=field)
    return unique
