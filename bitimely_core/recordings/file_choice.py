"""Chooses the files of a folder that are recordings, and the format in which each is read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from bitimely_core.errors import Reason, UserError, input_error
from bitimely_core.formats import wfdb_header
from bitimely_core.formats.sniffer import sniff_table
from bitimely_core.formats.source import Source
from bitimely_core.formats.table_facts import TableFacts, looks_like_samples
from bitimely_core.recordings.arrays import find_label_arrays, find_rate
from bitimely_core.recordings.mapping import (
    SUFFIXES,
    FileRule,
    Format,
    RecordingMap,
    find_suffix,
    matches_pattern,
)
from bitimely_core.recordings.mne_files import find_later_parts
from bitimely_core.recordings.sidecars import is_bids
from bitimely_core.recordings.sniffed_tables import is_sample_table, is_timed_table, sniff_file
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import drop_none

# names of files that lie in folders of recordings and are none
LAYOUT = re.compile(
    r"(RECORDS|SHA256SUMS|LICENSE|README|CHANGES|ANNOTATORS|index\.html|dataset_description\.json"
    r"|participants\.(tsv|json)).*|.*\.(dat|txt|md|json|xyz)"
    r"|.*_(events|channels|scans|sessions|electrodes|coordsystem)\.(tsv|json)|.*\.d\d+",
    re.IGNORECASE,
)
PHYSIOLOGY = re.compile(r"_physio\.tsv\.gz$")  # of BIDS, read where nothing else is
DERIVED = ("derivatives/", "sourcedata/", "code/", "stimuli/")


class FolderFiles(NamedTuple):
    """The files of a folder by what they are."""

    recordings: dict[str, tuple[Format, FileRule]]
    label_arrays: dict[str, str]  # array of epochs -> array of their classes
    passed_over: set[str]  # tables of the map, what a BIDS folder derives, segments of records


def suggest_map(source: Source) -> str:
    """The command that writes a map of a folder."""
    folder = shlex.quote(str(source.root))
    return f"Write one to fill in: bitimely ingest generic {folder} --init-map map.toml"


def refuse_tables_alone(source: Source) -> None:
    """Raises UserError (no_input, exit 4) where all recordings are files that state no rate."""
    kinds = {rel: SUFFIXES.get(find_suffix(rel)) for rel in source.files}
    if is_bids(source) or not {"edf", "wfdb", "mne"}.isdisjoint(kinds.values()):
        return
    facts = {rel: sniff_file(source, rel) for rel, kind in kinds.items() if kind == "table"}
    if _is_timed(source, kinds, facts.values()):
        return
    bare = [rel for rel, kind in kinds.items() if _is_bare(rel, kind, facts.get(rel))]
    if bare:
        raise _refuse_bare(source, bare, facts)


def _is_timed(
    source: Source, kinds: Mapping[str, Format | None], tables: Iterable[TableFacts | None]
) -> bool:
    """Whether one of the tables has a clock or a rate, or one of the arrays a rate."""
    if any(map(is_timed_table, tables)):
        return True
    return any(kind == "npy" and _states_rate(source, rel) for rel, kind in kinds.items())


def _refuse_bare(
    source: Source, rels: Sequence[str], tables: Mapping[str, TableFacts | None]
) -> UserError:
    """The error for files that state no rate; `tables`: what those of them that are tables say.

    Raises UserError: the fault of the first file, where that is a table that does not read.
    """
    rest = f", and {len(rels) - 1} more files" if rels[1:] else ""
    first = tables.get(rels[0])
    if first is None and rels[0] in tables and rels[0] not in source.rejected:
        first = sniff_table(source.path(rels[0]))
    if first is not None and not (first.rows and first.list_channels()):
        wanted = "expected a table of samples"
        return input_error(Reason.NO_INPUT, f"has no column of numbers{rest}", wanted, file=rels[0])
    is_timed = first is not None and bool(first.found_rate)
    problem = f"{'may hold labels' if is_timed else 'states no sampling rate'}{rest}"
    wanted = f"needs --map with a rate{_suggest_name(first)}"
    return input_error(Reason.NO_INPUT, problem, wanted, suggest_map(source), file=rels[0])


def _suggest_name(facts: TableFacts | None) -> str:
    """What a list of numbers needs in place of a rate where they are intervals."""
    if facts is None or len(facts.columns) > 1:
        return ""
    return ", or _rr at the end of its name if it lists intervals between beats"


def _is_bare(rel: str, kind: Format | None, facts: TableFacts | None) -> bool:
    """Whether a file is an array, or may be a table, without a rate; of .txt only those of numbers
    are tables.
    """
    if kind == "npy":
        return True
    if LAYOUT.fullmatch(PurePosixPath(rel).name):
        return facts is not None and looks_like_samples(facts)
    return kind == "table"


def find_files(
    source: Source, chosen: RecordingMap, formats: tuple[Format, ...], *, has_map: bool
) -> FolderFiles:
    """The files of a folder by what they are."""
    passed_over = _list_passed_over(source, chosen)
    recordings = _choose_files(source, chosen, formats, passed_over, has_map=has_map)
    recordings = _drop_other_tables(source, recordings, has_map=has_map)
    headers = [rel for rel, (kind, _) in recordings.items() if kind == "wfdb"]
    segments = find_segments(source, headers) | find_later_parts(source, recordings)
    label_arrays = find_label_arrays(source, recordings)
    for rel in segments | label_arrays.list_files():
        recordings.pop(rel, None)
    return FolderFiles(recordings, label_arrays.of_epochs, passed_over | segments)


def _choose_files(
    source: Source,
    chosen: RecordingMap,
    formats: tuple[Format, ...],
    passed_over: set[str],
    *,
    has_map: bool,
) -> dict[str, tuple[Format, FileRule]]:
    """The files that may be recordings, with format and rule. Of BIDS tables are recordings where
    the map says so, and physiology where nothing else is.
    """
    choices = _choose_formats(source, chosen, passed_over)
    if not is_bids(source):
        return _filter_formats(choices, formats)
    readable = formats if has_map else set(formats) - {"table"}
    physiology = {rel: choice for rel, choice in choices.items() if PHYSIOLOGY.search(rel)}
    return _filter_formats(choices, readable) or physiology


def _choose_formats(
    source: Source, chosen: RecordingMap, passed_over: set[str]
) -> dict[str, tuple[Format, FileRule]]:
    """Format and rule of the files that have one. The tables of BIDS describe other files."""
    described = ".tsv" if is_bids(source) else ()
    choices = {
        rel: choose_format(rel, _find_rule(rel, chosen))
        for rel in (*source.files, *source.rejected)
        if rel not in passed_over and not rel.endswith(described)
    }
    return drop_none(choices)


def _filter_formats(
    choices: Mapping[str, tuple[Format, FileRule]], formats: Collection[Format]
) -> dict[str, tuple[Format, FileRule]]:
    return {rel: choice for rel, choice in choices.items() if choice[0] in formats}


def _list_passed_over(source: Source, chosen: RecordingMap) -> set[str]:
    """The tables of the map, and what a BIDS folder derives from its recordings."""
    tables_of_map = {table.path for table in (chosen.table, chosen.annotations) if table}
    if not is_bids(source):
        return tables_of_map
    return tables_of_map.union(rel for rel in source.files if rel.startswith(DERIVED))


def _drop_other_tables(
    source: Source, recordings: Mapping[str, tuple[Format, FileRule]], *, has_map: bool
) -> dict[str, tuple[Format, FileRule]]:
    """The recordings without the tables that are none, and without a map the arrays that state no
    rate. Where a map leaves nothing else, all of them: each says what it needs.
    """
    samples = {
        rel: (kind, rule)
        for rel, (kind, rule) in recordings.items()
        if (kind != "table" or is_sample_table(source, rel, rule, has_map=has_map))
        and not _is_text(source, rel)
        and (kind != "npy" or has_map or _states_rate(source, rel))
    }
    return samples or dict(recordings if has_map else list_matlab(source))


def _is_text(source: Source, rel: str) -> bool:
    """Whether a file that ends in .rec, as some of EDF, begins with a row of numbers."""
    if find_suffix(rel) != ".rec" or rel in source.rejected:
        return False
    with source.path(rel).open("rb") as file:
        return re.match(rb"[\d.]+[,;\t]", file.read(64)) is not None


def list_matlab(source: Source) -> dict[str, tuple[Format, FileRule]]:
    """The files of MATLAB, which are recordings where nothing else is: those that state a rate, or
    all of them, so that each says what it needs.
    """
    rels = [rel for rel in source.files if find_suffix(rel) == ".mat"]
    rated = [rel for rel in rels if _states_rate(source, rel)]
    return {rel: ("mat", FileRule()) for rel in rated or rels}


def _states_rate(source: Source, rel: str) -> bool:
    return rel not in source.rejected and find_rate(source.path(rel)) is not None


def _find_rule(rel: str, chosen: RecordingMap) -> FileRule | None:
    """The first group of the map that fits a file."""
    return next((rule for rule in chosen.files if matches_pattern(rel, rule.pattern)), None)


def choose_format(rel: str, rule: FileRule | None) -> tuple[Format, FileRule] | None:
    """The format of a file, and its group in the map; None: it is no recording."""
    if rule is None:
        return None
    kind = rule.format or SUFFIXES.get(find_suffix(rel))
    is_named = rule.variable or rule.format or rule.pattern.lower().endswith(".mat")
    # many data sets have a copy of their recordings in this format
    if kind is None or (kind == "mat" and not is_named):
        return None
    return kind, rule


def find_segments(source: Source, headers: Iterable[str]) -> set[str]:
    """Header files that are segments of another record, or the layout of one."""
    segments: set[str] = set()
    for rel in headers:
        if rel in source.rejected:
            continue
        path = source.path(rel)
        try:
            names = _read_segment_names(path)
        except (OSError, UserError) as error:
            raise_system_error(error, path, stored=False)
            continue  # its unit reports that
        folder = PurePosixPath(rel).parent
        segments |= {(folder / f"{name}.hea").as_posix() for name in names}
    return segments & source.files.keys()


def _read_segment_names(path: Path) -> list[str]:
    """The segments that a WFDB header names; most name none, which its first line tells."""
    with path.open("rb") as file:
        head = file.read(1 << 12).split(b"\n")
        lines = (line.split() for line in head if not line.startswith(b"#"))
        record = next(filter(None, lines), [b""])
        if b"/" not in record[0]:
            return []
        file.seek(0)
        data = file.read(wfdb_header.MAX_HEADER + 1)
    parsed = wfdb_header.parse_header(data, path.stem, required=())
    return [name for name, _ in parsed.segments or () if name != "~"]
