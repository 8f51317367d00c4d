"""EMG examples of PhysioNet (emgdb 1.0.0): needle EMG of three persons, one healthy, one with
myopathy, one with neuropathy.

One recording a class: the class is the person, the electrode and the day as well. No split by
subject is possible; the windows of each recording are split by time with a gap, and every score
carries a notice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import PurePosixPath

from bitimely_core.datasets.raw_files import (
    is_constant,
    list_paths,
    list_rejected,
    make_unit,
    restrict_source,
)
from bitimely_core.errors import Finding, Reason, input_error, input_warning
from bitimely_core.formats import wfdb
from bitimely_core.formats.source import Source, locate_errors, require_source
from bitimely_core.formats.units import find_factor, require_rate, scale_signal
from bitimely_core.recordings.channels import make_missing_channel_error
from bitimely_core.registry import DatasetFacts, View, datasets
from bitimely_core.types import IngestOptions, IngestUnit, Record, Signal

RATE = 4000.0  # Hz
CHANNEL = "EMG"
CLASSES = ("healthy", "myopathy", "neuropathy")
RECORDS = {f"emg_{name}": name for name in CLASSES}
NOTICE = (
    "EMG: each class is one person (three recordings in all). A model that recognises the person, "
    "the electrode or the day is right too: these scores do not apply to the disease in other "
    "people."
)


@datasets(
    DatasetFacts(
        title="EMG examples: healthy, myopathy and neuropathy, one person each",
        views={
            "": View(
                channels=(CHANNEL,),
                rate=RATE,
                window=1500,
                task="classification",
                classes=CLASSES,
                target="condition",
                split="time",
                notice=NOTICE,
                help=(
                    "condition of the muscle from 375 ms of needle EMG; class = person, split by "
                    "time with a gap"
                ),
            )
        },
        licence="ODC-BY 1.0",
        url="https://physionet.org/content/emgdb/1.0.0/",
        download=(
            "wget -r -N -c -np -nH --cut-dirs=3 https://physionet.org/files/emgdb/1.0.0/   (a few "
            "MB; no account needed)"
        ),
        layout="emg_healthy, emg_myopathy and emg_neuropathy, each as .hea and .dat",
        paper={
            "": {
                "channels": 1,
                "timesteps": 306_000,
                "sequences": 204,
                "length": 1500,
                "subjects": 3,
                "classes": 3,
            },
            "note": (
                "204 = 33 + 73 + 98 windows before the split; the gaps between the blocks of time "
                "cost 2 in each recording"
            ),
        },
        rules={
            "units": (
                f"the records {', '.join(RECORDS)}; the text copies of the signals are not read"
            ),
            "classes": "from the name of the record: one recording, and one person, a class",
            "split": (
                "blocks of time in each recording: first 80 % train, then validation, then test, "
                "with a gap of a window before each"
            ),
            "channel": f"one signal called {CHANNEL}, {RATE:g} Hz, in mV ('mv' is a spelling of it)",
        },
    )
)
def emg(source: Source | None, options: IngestOptions) -> Iterator[IngestUnit | Finding]:
    """EMG examples (PhysioNet emgdb): three recordings, one a class."""
    source = require_source(source)
    paths_by_name: dict[str, list[str]] = {name: [] for name in RECORDS}
    others: list[str] = []
    for path in list_paths(source):
        if path.endswith(".hea"):
            paths_by_name.get(PurePosixPath(path).stem, others).append(path)
    headers = sorted(chain.from_iterable(paths_by_name.values()))
    if not headers:
        raise input_error(
            Reason.NO_INPUT,
            f"no record of the data set among {len(source.files)} files",
            f"expected {', '.join(f'{name}.hea' for name in RECORDS)}",
        )
    yield input_warning(
        Reason.LABEL_LEAKAGE, "each class is one person", "scores say nothing about other people"
    )
    for name, paths in paths_by_name.items():
        if not paths:
            yield input_warning(
                Reason.CLASS_MISSING,
                f"{name}.hea is missing",
                "its class is missing",
                "Download it",
            )
        elif len(paths) > 1:
            raise input_error(
                Reason.DUPLICATE_KEY,
                f"{name}.hea exists {len(paths)} times",
                "expected one",
                file=paths[1],
            )
    for path in others:
        yield input_warning(
            Reason.FILE_NAME, "is no record of this data set", "it is not read", file=path
        )
    for path in headers:
        yield _list_unit(source, path, options)


def _list_unit(source: Source, header: str, options: IngestOptions) -> IngestUnit:
    """The record of a header."""
    name = header.removesuffix(".hea")
    present = source.files.keys() | source.rejected.keys()
    files = [path for path in (header, f"{name}.dat") if path in present]
    read = partial(
        read_record,
        restrict_source(source, files),
        header,
        keep_dates=bool(options.get("keep_dates")),
        keep_phi=bool(options.get("keep_phi")),
    )
    return make_unit(name, files, list_rejected(source, files), read)


def read_record(
    source: Source, rel: str, *, keep_dates: bool = False, keep_phi: bool = False
) -> Record:
    """One recording, in mV, with its class as attribute `condition`; `keep_phi`: keep the comments
    of the header as an attribute.

    Raises UserError: what keeps the recording out of the cache.
    """
    recording = wfdb.read_recording(rel, source, required=(CHANNEL,), keep_phi=keep_phi)
    with locate_errors(rel):
        signals, findings = _select_channel(recording.signals)
    name = PurePosixPath(rel).stem
    start, comments = recording.header.start, recording.header.comments
    return Record(
        recording_id=name,
        subject_id=name,
        signals=signals,
        attributes={
            "condition": RECORDS[name],
            **({"comments": list(comments)} if comments else {}),
        },
        start_time=start.isoformat() if keep_dates and start is not None else None,
        findings=[finding.at(rel) for finding in (*recording.findings, *findings)],
    )


def _select_channel(signals: Sequence[Signal]) -> tuple[list[Signal], list[Finding]]:
    """The segments of the channel in mV, and findings.

    Raises UserError: missing_channel, sampling_rate, unit.
    """
    segments = [signal for signal in signals if signal.channel.upper() == CHANNEL]
    if not segments:
        names = (signal.channel for signal in signals)
        problem = f"has no signal {CHANNEL}"
        raise make_missing_channel_error(problem, names, "description", CHANNEL)
    first = segments[0]
    require_rate(first, RATE)
    factor = find_factor(first, "mV")
    findings = []
    if factor != 1.0:
        findings.append(
            input_warning(
                Reason.UNIT, f"is in {first.unit}", "converted to mV by its scale", field="unit"
            )
        )
    if all(is_constant(segment.samples) for segment in segments):
        findings.append(input_warning(Reason.FLAT_CHANNEL, "is constant", field=CHANNEL))
    scaled = [scale_signal(segment, factor, "mV")._replace(channel=CHANNEL) for segment in segments]
    return scaled, findings
