"""What the readers of several data sets share: the files of a source, units that cannot be read,
accounts of rows, and findings in the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Unpack

import numpy as np

from bitimely_core.errors import (
    Finding,
    Level,
    Place,
    Reason,
    UserError,
    input_warning,
    safe_text,
    select_errors,
    usage_error,
)
from bitimely_core.formats import tables
from bitimely_core.formats.source import Source
from bitimely_core.types import IngestUnit, Record, Records


def list_paths(source: Source) -> list[str]:
    """All paths of a source in order, also those of files that must not be opened."""
    return sorted({*source.files, *source.rejected})


def list_rejected(source: Source, paths: Iterable[str]) -> list[Finding]:
    """Why some of the files must not be opened."""
    return [source.rejected[path] for path in paths if path in source.rejected]


def restrict_source(source: Source, paths: Iterable[str]) -> Source:
    """The source of one recording, which opens its own files alone."""
    files = {path: source.files[path] for path in paths if path in source.files}
    return Source(source.root, files, {})


def parse_integer(cell: str) -> int | None:
    """A whole number, also as 1.0; None for anything else."""
    with suppress(UserError):
        return tables.parse_integer(cell)
    return None


def is_constant(samples: np.ndarray) -> bool:
    """Whether all samples are equal, or all are missing."""
    return not np.fmin.reduce(samples) < np.fmax.reduce(samples)


def make_unit(
    name: str,
    files: Iterable[str],
    findings: Iterable[Finding],
    read: Callable[[], Record | Records] | None,
) -> IngestUnit:
    """A unit; one with a finding of level error is not read."""
    findings = tuple(findings)
    return IngestUnit(
        name=name,
        files=tuple(files),
        read=None if select_errors(findings) else read,
        findings=findings,
    )


def report_count(
    code: Reason,
    text: str,
    count: int,
    effect: str = "",
    hint: str = "",
    *,
    level: Level = "warning",
    examples: tuple[str, ...] = (),
    **place: Unpack[Place],
) -> list[Finding]:
    """A warning whose text ends in a number, such as `outcomes without a stay: 3`; none for 0."""
    if not count:
        return []
    warning = input_warning(
        code, f"{text}: {count}", effect, hint, level=level, count=count, examples=examples, **place
    )
    return [warning]


def report_other_files(text: str, names: Sequence[str], file: str) -> list[Finding]:
    """A warning about files beside those of a data set in `file`, with the first of their names."""
    if not names:
        return []
    first = tuple(map(safe_text, names[:5]))
    return [
        input_warning(
            Reason.FILE_NAME,
            f"{text}: {len(names)}, {first[0]} first",
            "not read",
            file=file,
            count=len(names),
            examples=first,
        )
    ]


def two_forms_error(form: str, other: str) -> UserError:
    """The error for a folder with two forms of one data set (config, exit 2)."""
    return usage_error(
        f"{form} and {other}", "expected one form of one data set", "Give the folder of one form"
    )
