"""Warnings about recordings of a folder and rows of its tables that do not fit together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from bitimely_core.errors import Finding, Reason, input_error, input_warning, safe_text
from bitimely_core.recordings.mapping import RecordingInfo, RecordingKeys, strip_suffix
from bitimely_core.types import Attributes
from bitimely_core.wording import list_first

# what several files share -> the `match` for it
PATTERNS = {
    "a folder": r"(?P<subject>[^/]+)/[^/]*$",
    "the beginning of a name": r"(?:^|/)(?P<subject>[^/_-]+)[_-][^/]*$",
}
FIRST_FOLDER = r"^(?P<subject>[^/]+)/"
SHOWN = 5  # names in a message


def report_lone_recordings(infos: Mapping[str, RecordingInfo]) -> Iterator[Finding]:
    """A warning about recordings without a known subject."""
    lone = [rel for rel, info in infos.items() if not info.has_subject and not info.series]
    if len(infos) > 1 and lone:
        line = _propose_match(list(infos))
        hint = "Give --map (generic) with a match or a table where several are of one person"
        yield input_warning(
            Reason.IDENTIFIER,
            f"{len(lone)} recordings with unknown subjects, each counted as a subject of its own",
            "recordings of one person in two splits make scores optimistic",
            f"{hint}{line}",
            file=lone[0],
            field="subject",
            count=len(lone),
        )


def _propose_match(rels: Sequence[str]) -> str:
    """The line of a map for files whose folders, or the beginnings of whose names, are shared."""
    for kind, pattern in PATTERNS.items():
        matches = list(filter(None, (re.search(pattern, rel) for rel in rels)))
        names = {match["subject"] for match in matches}
        if len(matches) == len(rels) and 1 < len(names) < len(rels):
            line = f"files = [{{match = '{pattern}'}}]"
            parts = f"'{pattern.replace('subject', 'recording')}' where it is one recording"
            classes = f"'{pattern.replace('subject', 'label')}' where it is a class"
            first = f", '{FIRST_FOLDER}' where the first one is" if rels[0].count("/") > 1 else ""
            return f", such as {line} where {kind} is a person{first} ({parts}, {classes})"
    return ""


def report_unfilled(unfilled: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """A warning about WFDB headers, by their folders, in which no checksum is filled in."""
    rels = list(chain.from_iterable(unfilled.values()))
    if rels:
        yield input_warning(
            Reason.CHECKSUM,
            f"{len(rels):,} headers state the checksum 0, as all in their folder do",
            "taken for not filled in: damage of the samples would not be seen",
            file=rels[0],
            count=len(rels),
        )


def report_unknown_rows(
    what: str, file: str, rows: Mapping[str, object], names: set[str], recordings: RecordingKeys
) -> Iterator[Finding]:
    """Warnings about rows of no recording, and of several; `what` has them, in `file`.

    `names`: those of recordings, and of subjects where rows may be of these. Raises UserError
    (unmatched_labels, exit 4) where no row is of a recording: nobody has a label.
    """
    shared = recordings.shared
    if rows and names and rows.keys().isdisjoint({*names, *shared}):
        row, name = next(iter(rows)), min(names)
        raise input_error(
            Reason.UNMATCHED_LABELS,
            f"none of {len(rows)} recordings or subjects of {what} has a file here",
            f"found {safe_text(row)}, expected such as {safe_text(name)}",
            "Correct `file` or `subject` in the map, or the names in the table",
            file=file,
        )
    unclear = [key for key in rows if key not in names and key in shared]
    if unclear:
        yield _report_shared(unclear, shared, what, file)
    unknown = [key for key in rows if key not in names and key not in shared]
    if unknown:
        problem = f"{len(unknown)} recordings or subjects of {what} have no file here"
        action = "their rows are not used"
        yield input_warning(Reason.UNMATCHED_LABELS, problem, action, file=file, count=len(unknown))


def report_lacking(
    infos: Mapping[str, RecordingInfo],
    keys: Mapping[str, Sequence[str]],
    rows: Mapping[str, object],
) -> Iterator[Finding]:
    """A warning about recordings without a row in the table."""
    lacking = [
        rel for rel, info in infos.items() if rows.keys().isdisjoint([*keys[rel], info.subject_id])
    ]
    if lacking:
        problem = f"{len(lacking)} recordings have no row in the table"
        yield input_warning(
            Reason.UNMATCHED_LABELS,
            problem,
            "they have no label",
            file=lacking[0],
            count=len(lacking),
        )


def drop_torn_rows(
    rel: str, keys: Sequence[str], rows: dict[str, Attributes], file: str
) -> Iterator[Finding]:
    """A warning where several rows name one recording, each in its own way.

    Rows that differ leave `rows`: which is right is unknown.
    """
    same = [key for key in keys if key in rows]
    if len(same) < 2:
        return
    problem = f"the rows {', '.join(map(safe_text, same))} are of one recording, {safe_text(rel)}"
    if all(rows[key] == rows[same[0]] for key in same):
        yield input_warning(Reason.DUPLICATES, problem, "used once", file=file, count=len(same) - 1)
        return
    for key in same:
        del rows[key]
    yield input_warning(
        Reason.UNMATCHED_LABELS,
        f"{problem}, and differ",
        "none of them is used",
        "Remove the wrong ones",
        file=file,
        count=len(same),
    )


def _report_shared(
    unclear: Sequence[str], shared: Mapping[str, Sequence[str]], what: str, file: str
) -> Finding:
    """The warning about names in a table that several recordings have.

    To use them would give one person's label to others.
    """
    first, *others = unclear
    rels = shared[first]
    named = list_first(list(map(safe_text, rels)), SHOWN)
    rest = f"; so do {len(others)} more names" if others else ""
    path = safe_text(strip_suffix(rels[0]))
    return input_warning(
        Reason.UNMATCHED_LABELS,
        f"{safe_text(first)} in {what} fits {len(rels)} recordings: {named}{rest}",
        "a row counts for one recording or subject, and these are not used",
        f"Write paths, such as {path}, "
        "or give a match with subject where the names are those of subjects",
        file=file,
        count=len(unclear),
        examples=tuple(map(safe_text, unclear[:SHOWN])),
    )
