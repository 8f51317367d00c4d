"""Files of a folder as recordings: which files belong together, who they are of, which labels they
have, and how each is read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath

from bitimely_core.errors import (
    Finding,
    Reason,
    UserError,
    input_error,
    input_warning,
    safe_text,
    usage_error,
)
from bitimely_core.formats import tables, wfdb_header
from bitimely_core.formats import wfdb as format_wfdb
from bitimely_core.formats.source import Source, locate_errors, report_unclaimed
from bitimely_core.recordings import readers as recording_readers
from bitimely_core.recordings.mapping import (
    SUFFIXES,
    FileRule,
    Format,
    RecordingInfo,
    RecordingKeys,
    RecordingMap,
    assign_recording_keys,
    find_suffix,
    matches_pattern,
    strip_suffix,
)
from bitimely_core.recordings.tables import (
    read_annotations,
    read_attributes,
    read_bids_events,
    read_participants,
)
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import (
    Annotation,
    Attributes,
    IngestOptions,
    IngestUnit,
    Record,
    SourceRows,
)

COMPANIONS = {".vhdr": (".eeg", ".vmrk", ".dat"), ".set": (".fdt",)}
LAYOUT = re.compile(
    r"(RECORDS|SHA256SUMS|LICENSE|README|CHANGES|ANNOTATORS|index\.html|dataset_description\.json|participants\.).*|.*\.(dat|txt|md|json|xyz)"
    r"|.*_(events|channels|scans|sessions|electrodes|coordsystem)\.(tsv|json)|.*\.d\d+",
    re.IGNORECASE,
)
BIDS_FILES = ("participants.tsv", "dataset_description.json")
INIT_MAP = "Write one to fill in: bitimely ingest generic SOURCE --init-map map.toml"
BIDS = re.compile(r"(?:^|/)sub-([A-Za-z0-9]+)(?=[_/])")
NSRR = "-nsrr.xml"  # scored events beside an EDF file, or in a folder of their own
DERIVED = ("derivatives/", "sourcedata/", "code/", "stimuli/")


def refuse_tables_alone(source: Source) -> None:
    """Raises UserError (no_input, exit 4) for a folder whose only recordings are files that state
    no rate.
    """
    kinds = {
        rel: SUFFIXES.get(find_suffix(rel))
        for rel in source.files
        if not LAYOUT.fullmatch(PurePosixPath(rel).name)
    }
    bare = [rel for rel, kind in kinds.items() if kind in {"table", "npy"}]
    if (
        bare
        and not {"edf", "wfdb", "mne"} & set(kinds.values())
        and not any(name in source.files for name in BIDS_FILES)
    ):
        more = f", and {len(bare) - 1} more files" if bare[1:] else ""
        raise input_error(
            Reason.NO_INPUT,
            f"states no sampling rate{more}",
            "needs --map with a rate",
            INIT_MAP,
            file=bare[0],
        )


def list_units(
    source: Source, chosen: RecordingMap, formats: tuple[Format, ...], options: IngestOptions
) -> Iterator[IngestUnit | Finding | SourceRows]:
    """The units of a folder, findings about the folder, and the account of its tables."""
    bids = any(name in source.files for name in BIDS_FILES)
    skipped = {table.path for table in (chosen.table, chosen.annotations) if table}
    derived = {rel for rel in source.files if bids and rel.startswith(DERIVED)}
    found: dict[str, tuple[Format, FileRule]] = {}
    for rel in [*source.files, *source.rejected]:
        if rel in skipped | derived or (bids and PurePosixPath(rel).suffix == ".tsv"):
            continue
        files = next((files for files in chosen.files if matches_pattern(rel, files.pattern)), None)
        kind = files and (files.format or SUFFIXES.get(find_suffix(rel)))
        if (
            kind == "mat"
            and files
            and not (files.variable or files.format or files.pattern.lower().endswith(".mat"))
        ):
            # many data sets have a copy of their recordings in this format; others are named below
            continue
        if files and kind in formats:
            found[rel] = (kind, files)
    segments = find_segments(source, [rel for rel, (kind, _) in found.items() if kind == "wfdb"])
    found = {rel: what for rel, what in found.items() if rel not in segments}
    names = _name_units(list(found))
    keys = assign_recording_keys(found)
    rows, table_rows = (
        read_attributes(source, chosen.table)
        if chosen.table
        else read_participants(source)
        if bids
        else ([], {})
    )
    yield from rows
    for rel in found:
        if finding := _drop_torn_rows(rel, keys.of[rel], table_rows):
            yield finding.at(chosen.table.path if chosen.table else "participants.tsv")
    rows, annotations = (
        read_annotations(source, chosen.annotations) if chosen.annotations else ([], {})
    )
    yield from rows
    scored: dict[str, list[str]] = {}
    for rel in source.files:
        if rel.endswith(NSRR):
            scored.setdefault(PurePosixPath(rel).name.removesuffix(NSRR), []).append(rel)
    units: list[IngestUnit] = []
    infos: dict[str, RecordingInfo] = {}
    for rel, (kind, files) in found.items():
        if rel in source.rejected:
            units.append(
                IngestUnit(
                    name=names[rel], files=(rel,), read=None, findings=(source.rejected[rel],)
                )
            )
            continue
        info = infos[rel] = describe_recording(
            rel, names[rel], keys.of[rel], files, chosen, table_rows, annotations, options
        )
        if kind == "edf" and (beside := scored.get(PurePosixPath(strip_suffix(rel)).name)):
            own = [
                one for one in beside if PurePosixPath(one).parent == PurePosixPath(rel).parent
            ] or beside
            info = infos[rel] = replace(info, annotation_files=tuple(own) if len(own) == 1 else ())
        try:
            units.append(make_unit(source, rel, kind, info, bids=bids, annotators=files.annotators))
        except UserError as error:
            raise_system_error(error)
            units.append(
                IngestUnit(
                    name=names[rel], files=(rel,), read=None, findings=(error.finding.at(rel),)
                )
            )
    claimed = {rel: rel for unit in units for rel in unit.files} | {
        rel: rel for rel in segments | skipped | derived
    }
    stems = {strip_suffix(rel) for rel in claimed}
    copies = {
        rel: rel
        for rel in source.files
        if find_suffix(rel) == ".mat" and strip_suffix(rel) in stems
    }
    yield from report_unclaimed(source, {"": claimed | copies}, LAYOUT)
    named = [
        chosen.table.path if chosen.table else "participants.tsv",
        chosen.annotations.path if chosen.annotations else "",
    ]
    yield from _report_unmatched(
        infos, keys, table_rows, annotations, named, has_table=bool(chosen.table or table_rows)
    )
    yield from units


def _report_unmatched(
    infos: Mapping[str, RecordingInfo],
    keys: RecordingKeys,
    table_rows: Mapping[str, Attributes],
    annotations: Mapping[str, list[Annotation]],
    files: Sequence[str],
    *,
    has_table: bool,
) -> Iterator[Finding]:
    """Warnings about recordings without a known subject or a row in the table, and about rows of no
    recording or of several; `files`: of both.
    """
    alone = [
        rel
        for rel, info in infos.items()
        if info.subject_id == info.recording_id and not info.series
    ]
    if len(infos) > 1 and alone:
        text = (
            f"{len(alone)} recordings with unknown subjects, each counted as a subject of its own"
        )
        action = "Give --map (generic) with a match or a table where several are of one person"
        wanted = "recordings of one person in two splits make scores optimistic"
        yield input_warning(
            Reason.IDENTIFIER, text, wanted, action, file=alone[0], count=len(alone)
        )
    of_files, subjects = (
        {key for rel in infos for key in keys.of[rel]},
        {info.subject_id for info in infos.values()},
    )
    for what, table, file in zip(
        ("the table", "the table of annotations"), (table_rows, annotations), files, strict=True
    ):
        # annotations are of one recording, never of a subject
        known = of_files | subjects if table is table_rows else of_files
        unknown = [key for key in table if key not in known]
        if unclear := [key for key in unknown if key in keys.shared]:
            yield _report_shared(unclear, keys.shared, what, file)
        if extra := [key for key in unknown if key not in keys.shared]:
            text = f"{len(extra)} recordings or subjects of {what} have no file here"
            yield input_warning(
                Reason.UNMATCHED_LABELS,
                text,
                "their rows are not used",
                file=file,
                count=len(extra),
            )
    lacking = [
        rel
        for rel, info in infos.items()
        if has_table and not {*keys.of[rel], info.subject_id} & table_rows.keys()
    ]
    if lacking:
        text = f"{len(lacking)} recordings have no row in the table"
        yield input_warning(
            Reason.UNMATCHED_LABELS, text, "they have no label", file=lacking[0], count=len(lacking)
        )


def _drop_torn_rows(
    rel: str, keys: Sequence[str], table_rows: dict[str, Attributes]
) -> Finding | None:
    """A warning where several rows name one recording, each in its own way; those that differ leave
    `table_rows`: which is right is unknown.
    """
    own = [key for key in keys if key in table_rows]
    if len(own) < 2:
        return None
    names = ", ".join(map(safe_text, own))
    if all(table_rows[key] == table_rows[own[0]] for key in own):
        return input_warning(
            Reason.DUPLICATES,
            f"the rows {names} are of one recording, {safe_text(rel)}",
            "used once",
            count=len(own) - 1,
        )
    for key in own:
        del table_rows[key]
    text = f"the rows {names} are of one recording, {safe_text(rel)}, and differ"
    return input_warning(
        Reason.UNMATCHED_LABELS,
        text,
        "none of them is used",
        "Remove the wrong ones",
        count=len(own),
    )


def _report_shared(
    unclear: Sequence[str], shared: Mapping[str, Sequence[str]], what: str, file: str
) -> Finding:
    """The warning about names in a table that several recordings have: to use them would give one
    person's label to others.
    """
    first, *others = unclear
    rels = shared[first]
    named = ", ".join(safe_text(rel) for rel in rels[:5]) + (
        f" and {len(rels) - 5} more" if rels[5:] else ""
    )
    text = f"{safe_text(first)} in {what} fits {len(rels)} recordings: {named}" + (
        f"; so do {len(others)} more names" if others else ""
    )
    action = f"Write paths, such as {safe_text(strip_suffix(rels[0]))}, or give a match with subject where the names are those of subjects"
    examples = tuple(safe_text(key) for key in unclear[:5])
    wanted = "a row counts for one recording or subject, and these are not used"
    return input_warning(
        Reason.UNMATCHED_LABELS,
        text,
        wanted,
        action,
        file=file,
        count=len(unclear),
        examples=examples,
    )


def _name_units(rels: list[str]) -> dict[str, str]:
    """File -> name of its unit: the path without ending, with it where two would be equal."""
    often = Counter(strip_suffix(rel) for rel in rels)
    return {rel: strip_suffix(rel) if often[strip_suffix(rel)] == 1 else rel for rel in rels}


def describe_recording(
    rel: str,
    name: str,
    keys: Sequence[str],
    files: FileRule,
    chosen: RecordingMap,
    table_rows: Mapping[str, Attributes],
    annotations: Mapping[str, list[Annotation]],
    options: IngestOptions,
) -> RecordingInfo:
    """Properties of a recording by the map, its tables and the path; `keys`: its names in
    tables.
    """
    matched = re.search(files.match, rel) if files.match else None
    groups = {
        key: value
        for key, value in (matched.groupdict() if matched else {}).items()
        if value is not None
    }
    bids = BIDS.search(rel)
    subject = groups.get("subject") or files.subject or (bids[1] if bids else "")
    row = next((table_rows[key] for key in (*keys, subject) if key in table_rows), {})
    subject = str(row.get("subject") or subject or name)
    attributes = {key: value for key, value in row.items() if key != "subject"}
    if label := groups.get("label") or files.label:
        attributes.setdefault("label", label)
    if "value" in groups:
        with locate_errors(rel):
            attributes.setdefault("value", tables.parse_number(groups["value"]))
    channels = (
        files.channels
        if isinstance(files.channels, dict)
        else {channel: channel for channel in files.channels}
    )
    noted = tuple(sorted(note for key in dict.fromkeys(keys) for note in annotations.get(key, ())))
    numeric = chosen.annotations is not None and bool(chosen.annotations.value)
    return RecordingInfo(
        recording_id=name,
        subject_id=subject,
        attributes=attributes,
        notes=() if numeric else noted,
        numbers=noted if numeric else (),
        channels={
            key: (to, "") if isinstance(to, str) else (to.name, to.unit)
            for key, to in channels.items()
        },
        labels=chosen.labels,
        rate=files.rate,
        unit=files.unit,
        variable=files.variable,
        time=files.time,
        series=files.series,
        columns={
            key: column
            for key, column in zip(
                ("id", "subject", "label", "value"),
                (files.id_column, files.subject_column, files.label_column, files.value_column),
                strict=True,
            )
            if column
        },
        delimiter="\t" if find_suffix(rel) == ".tsv" else files.delimiter,
        keep_dates=bool(options.get("keep_dates")),
        keep_phi=bool(options.get("keep_phi")),
        events=files.events,
    )


def make_unit(
    source: Source,
    rel: str,
    kind: Format,
    info: RecordingInfo,
    *,
    bids: bool,
    annotators: Sequence[str] = (),
) -> IngestUnit:
    """One recording. Raises UserError for what is wrong with its header or with its events."""
    path = source.path(rel)
    files = [rel]
    if kind in {"edf", "mne"} or info.events == "notes":
        info = replace(info, stages=True)
    if bids:
        events = f"{rel[: len(strip_suffix(rel))].rpartition('_')[0]}_events.tsv"
        if events in source.files:
            files.append(events)
            info = replace(
                info, notes=(*info.notes, *read_bids_events(source.path(events), events))
            )
    if kind == "wfdb":
        with locate_errors(rel):
            names = format_wfdb.read_header(rel, source, required=tuple(info.channels)).files
        beside = [f"{strip_suffix(rel)}.{ending}" for ending in annotators]
        info = replace(
            info,
            annotation_files=tuple(
                name for name in beside if name in source.files or name in source.rejected
            ),
        )
        names = (*names, *info.annotation_files)
        for name in info.annotation_files:
            source.path(name)
        own = replace(source, files={name: source.files[name] for name in names}, rejected={})
        return IngestUnit(
            name=info.recording_id,
            files=tuple(dict.fromkeys([*files, *names])),
            read=partial(recording_readers.read_wfdb, own, rel, info),
        )
    if kind in {"npy", "mat"} and info.rate is None:
        raise usage_error(
            "has no sampling rate", "needs --map with a rate (`rate` in [[files]])", INIT_MAP
        )
    if kind == "mne":
        files += [
            name
            for name in source.files
            if strip_suffix(name) == strip_suffix(rel)
            and find_suffix(name) in COMPANIONS.get(find_suffix(rel), ())
        ]
    if kind == "edf" and info.annotation_files:
        files += info.annotation_files
        paths = tuple(map(source.path, info.annotation_files))
        return IngestUnit(
            name=info.recording_id,
            files=tuple(files),
            read=partial(recording_readers.read_edf, path, rel, info, events=paths),
        )
    if info.series:
        return IngestUnit(
            name=info.recording_id,
            files=tuple(files),
            read=partial(recording_readers.read_series, path, rel, info),
        )
    readers: dict[Format, Callable[[Path, str, RecordingInfo], Record]] = {
        "edf": recording_readers.read_edf,
        "table": recording_readers.read_table,
        "npy": recording_readers.read_npy,
        "mat": recording_readers.read_mat,
        "mne": recording_readers.read_mne,
    }
    return IngestUnit(
        name=info.recording_id, files=tuple(files), read=partial(readers[kind], path, rel, info)
    )


def find_segments(source: Source, headers: Iterable[str]) -> set[str]:
    """Header files that are segments of another record, or the layout of one."""
    found: set[str] = set()
    for rel in headers:
        if rel in source.rejected:
            continue
        try:
            with source.path(rel).open("rb") as file:
                head = file.read(1 << 12).split(b"\n")
                first = next(
                    (line for line in head if line.strip() and not line.startswith(b"#")), b""
                )
                if b"/" not in (first.split() or [b""])[0]:
                    continue
                file.seek(0)
                parsed = wfdb_header.parse_header(
                    file.read(wfdb_header.MAX_HEADER + 1), PurePosixPath(rel).stem, required=()
                )
        except (OSError, UserError) as error:
            raise_system_error(error, source.path(rel), stored=False)
            continue  # its unit reports that
        folder = PurePosixPath(rel).parent
        found |= {
            (folder / f"{name}.hea").as_posix() for name, _ in parsed.segments or () if name != "~"
        }
    return found - {rel for rel in found if rel not in source.files}
