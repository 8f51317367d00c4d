"""A user's own recordings as data sets: `generic` for all formats and a BIDS folder as it is, `edf`
and `wfdb` for files of that one format.

What files do not state (subjects, channels of a table, rates, labels) comes from a mapping file in
TOML (`--map`), whose keys are those of `recordings.mapping.RecordingMap`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

from bitimely_core.errors import Finding
from bitimely_core.formats import stage_texts
from bitimely_core.formats.source import Source, require_source
from bitimely_core.recordings.file_choice import refuse_tables_alone
from bitimely_core.recordings.files import list_units
from bitimely_core.recordings.mapping import Format, RecordingMap, read_map
from bitimely_core.registry import DatasetFacts, View, datasets
from bitimely_core.types import IngestOptions, IngestUnit, SourceRows

RULES = {
    "units": "one file (or record) is one recording, called by its path without ending",
    "subjects": (
        "by --map; in a BIDS folder sub-...; else every recording is taken for another subject, "
        "with a warning"
    ),
    "annotations": "texts inside files can hold names: they are kept where [labels] of the map "
    "names them, or under --keep-phi, else counted; sleep stages in the spellings of AASM and of "
    "Rechtschaffen and Kales are kept without a map; texts of tables (BIDS events, [annotations]) "
    "are labels and are kept",
    "channels": (
        "by name; all of a file but those of codes, markers and counters, or those of the map, and "
        "then each must be there; units of one quantity are converted to the unit asked for"
    ),
    "views": "channels are those that the largest number of recordings have together, of two such "
    "sets the larger; the rate is that of most of these recordings, those of a higher rate are "
    "left out without --rate; a window is 10 s, or the commonest annotation, unless --window says "
    "otherwise",
}
WINDOWS = View(
    channels=(),
    rate=0.0,
    window=0,
    seconds=10.0,
    help="the channels that most recordings have, windows of 10 s, no labels",
)
OPEN = {
    "": WINDOWS,
    "annotations": replace(
        WINDOWS,
        task="classification",
        epoch=0.0,
        help="windows of annotations that last, whose texts are the classes",
    ),
    "staging": replace(
        WINDOWS,
        task="classification",
        classes=stage_texts.STAGES,
        labels=stage_texts.LABELS | {stage: stage for stage in stage_texts.STAGES},
        epoch=stage_texts.EPOCH,
        seconds=stage_texts.EPOCH,
        help="sleep stage of a 30-s epoch, by the texts of AASM and of Rechtschaffen and Kales",
    ),
    "points": replace(
        WINDOWS,
        task="classification",
        epoch=1.0,
        seconds=1.0,
        points=True,
        help=(
            "a window of 1 s around each annotation without a duration, such as a beat; its text "
            "is the class"
        ),
    ),
}
LABELLED = {
    "classification": replace(
        WINDOWS, task="classification", target="label", help="the class of the recording"
    ),
    "multilabel": replace(
        WINDOWS,
        task="multilabel",
        target="labels",
        help="all classes of it, by the columns `labels` of the table",
    ),
    "regression": replace(
        WINDOWS, task="regression", target="value", help="the number of the recording"
    ),
    "values": replace(
        WINDOWS,
        task="regression",
        overlap=0.5,
        help="the mean of the numeric annotations over the window, where they cover half of it",
    ),
}


def name_unit(subjects: Iterable[str], recordings: Iterable[str]) -> str:
    """Whether the subjects of windows are recordings, because the source names no subjects."""
    return "recording" if all(map(operator.eq, subjects, recordings)) else "subject"


def _make_facts(
    title: str, layout: str, views: dict[str, View], options: dict[str, None] | None = None
) -> DatasetFacts:
    return DatasetFacts(
        subject_unit=name_unit,
        title=title,
        views=views,
        licence="your own",
        own_files=True,
        url="",
        download="your own files",
        layout=layout,
        paper={},
        rules=RULES,
        options=options,
    )


@datasets(
    _make_facts(
        "Your own recordings, with a mapping file for what the files do not state",
        (
            "any folders of recordings, with --map FILE.toml where the files do not state "
            "subjects, rates and labels; a BIDS folder as it is"
        ),
        OPEN | LABELLED,
        {"map": None},
    )
)
def generic(
    source: Source | None, options: IngestOptions
) -> Iterator[IngestUnit | Finding | SourceRows]:
    """Your own files: EDF, BDF, WFDB, csv, Parquet, npy, mat (--map), BrainVision, EEGLAB, GDF,
    FIF, or a BIDS folder.
    """
    source = require_source(source)
    path = options.get("map")
    if path is None:
        refuse_tables_alone(source)
        yield from list_units(
            source, RecordingMap(), ("edf", "wfdb", "mne", "table", "npy"), options
        )
    else:
        chosen = read_map(Path(path))
        yield from list_units(source, chosen, get_args(Format), options)


@datasets(
    _make_facts("Recordings in EDF, EDF+ or BDF files", "any folders of .edf and .bdf files", OPEN)
)
def edf(
    source: Source | None, options: IngestOptions
) -> Iterator[IngestUnit | Finding | SourceRows]:
    """All .edf and .bdf files of a folder, one recording each."""
    yield from list_units(require_source(source), RecordingMap(), ("edf",), options)


@datasets(
    _make_facts(
        "Recordings in WFDB format", "any folders of .hea files with their signal files", OPEN
    )
)
def wfdb(
    source: Source | None, options: IngestOptions
) -> Iterator[IngestUnit | Finding | SourceRows]:
    """All WFDB records of a folder, single and multi-segment, one recording each."""
    yield from list_units(require_source(source), RecordingMap(), ("wfdb",), options)
